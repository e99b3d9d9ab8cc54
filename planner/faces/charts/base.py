"""Charts: one theme, one way to draw. Every function takes results of `planner` and returns an Altair chart."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import altair as alt
import pandas as pd
import vl_convert

from planner.core.quantities import GIB
from planner.memory.budget import MemoryPlan

WIDTH, HEIGHT = 560, 200
PALETTE = ["#3b7dd8", "#e0802f", "#2e9e78", "#c9524a", "#8a6fc4", "#b38a3d", "#4fa9bd", "#c96fa3"]
"""Mid-tones that stay apart for colour-blind eyes, on white paper and on a dark screen."""
GOOD, BAD, MUTED = "#2e9e78", "#c9524a", "#8a8f98"
PARTS = {
    "weights": "#3b7dd8",
    "activation": "#e0802f",
    "non-torch": "#b38a3d",
    "CUDA graphs": "#8a6fc4",
    "KV cache": GOOD,
    "driver context": "#4fa9bd",
    "other tenants": BAD,
    "headroom": "#8a8f9866",
}
"""One colour for each part of a memory budget, everywhere."""


@alt.theme.register("headroom", enable=True)
def theme() -> Any:
    """Text takes the colour of what is around it (`currentColor`), so that a chart suits paper and a dark screen."""
    text = "currentColor"
    font = "Liberation Sans, Arial, Helvetica, sans-serif"
    faint = "#8888884d"
    return {
        "config": {
            "background": "transparent",
            "font": font,
            "view": {"continuousWidth": WIDTH, "continuousHeight": HEIGHT, "discreteWidth": WIDTH, "stroke": None},
            "range": {"category": PALETTE, "heatmap": {"scheme": "viridis"}},
            "title": {"color": text, "fontSize": 12, "anchor": "start", "fontWeight": "bold"},
            "axis": {
                "labelColor": text,
                "titleColor": text,
                "titleFontWeight": "normal",
                "labelFontSize": 11,
                "titleFontSize": 11,
                "gridColor": faint,
                "domainColor": MUTED,
                "tickColor": MUTED,
                "tickCount": 8,
                "labelSeparation": 6,
            },
            "legend": {
                "labelColor": text,
                "titleColor": text,
                "titleFontWeight": "normal",
                "labelFontSize": 11,
                "titleFontSize": 11,
                "orient": "top",
                "symbolOpacity": 1,
            },
            "header": {"labelColor": text, "titleColor": text, "labelFontSize": 11},
            "line": {"strokeWidth": 2},
            "text": {"color": text, "fontSize": 11},
            "rule": {"color": MUTED},
            "mark": {"color": PALETTE[0]},
            "point": {"filled": True, "size": 55},
        }
    }


def svg(chart: alt.TopLevelMixin) -> str:
    """The chart as one SVG element, made offline; marks say what they stand for when the pointer rests on them."""
    drawn = vl_convert.vegalite_to_svg(
        chart.to_dict(), vl_version=alt.SCHEMA_VERSION.removeprefix("v").rsplit(".", 1)[0]
    )
    mark = hashlib.sha1(drawn.encode()).hexdigest()[:8]
    drawn = re.sub(r'(id="|url\(#)((?:clip|gradient)\w*)', rf"\g<1>{mark}-\2", drawn)  # several charts share a page
    return re.sub(
        r'(<path aria-label="([^"]*)" role="[^"]*" aria-roledescription="(?!line|area)[^>]*)/>', _with_title, drawn
    )


def _with_title(match: re.Match[str]) -> str:
    text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.3g}", match[2])
    return f"{match[1]}><title>{text}</title></path>"


def budget(plans: Mapping[str, MemoryPlan]) -> alt.Chart:
    """What fills one GPU: a stacked bar in GiB for each labelled plan."""
    rows = [(label, order, part, size / GIB) for label, plan in plans.items() for order, (part, size) in _parts(plan)]
    data = pd.DataFrame(rows, columns=["plan", "order", "part", "gib"])
    present = [part for part in PARTS if part in set(data["part"])]
    return (
        alt.Chart(data, height=alt.Step(26))
        .mark_bar()
        .encode(
            x=alt.X("gib:Q", title="GiB on one GPU (the fullest rank)"),
            y=alt.Y("plan:N", title=None, sort=list(plans)),
            color=alt.Color(
                "part:N", title=None, scale=alt.Scale(domain=present, range=[PARTS[part] for part in present])
            ),
            order=alt.Order("order:Q"),
        )
    )


def _parts(plan: MemoryPlan) -> Iterable[tuple[int, tuple[str, int]]]:
    return enumerate((part, size) for part, size in plan.parts.items() if size > 0)


def lines(
    data: pd.DataFrame, x: str, y: str, series: str | None = None, limit: float | None = None, log: bool = False
) -> alt.LayerChart | alt.FacetChart:
    """`y` against `x` by `series`; a column of intervals gets its 80 % band, `limit` a dashed line across.

    Column names are the axis titles, units included.
    """
    mid, lo, hi = (data[y].map(lambda value, end=end: getattr(value, end, value)) for end in ("mid", "lo", "hi"))
    base = alt.Chart(data.drop(columns=y).assign(mid=mid, lo=lo, hi=hi)).encode(
        x=alt.X(_field(x), title=x, scale=alt.Scale(type="log" if log else "linear", nice=False)),
        color=alt.Color(_field(series), title=series, sort=None) if series else alt.Undefined,
    )
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("lo:Q"), y2=alt.Y2("hi"))
    layers = [band, base.mark_line().encode(y=alt.Y("mid:Q", title=y))]
    if limit is not None:
        rule = alt.Chart(pd.DataFrame({"limit": [limit]})).mark_rule(strokeDash=[5, 4], color=BAD)
        layers.append(rule.encode(y=alt.Y("limit:Q")))
    return alt.layer(*layers)


def _field(column: str) -> str:
    """A column name as Vega-Lite reads it: dots, colons and brackets are not operators in it."""
    return re.sub(r"([.:\[\]])", r"\\\1", column)
