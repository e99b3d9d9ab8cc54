"""The theme and the common parts of all charts."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import unescape
from itertools import cycle
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import vl_convert

from planner.core.intervals import Interval
from planner.core.readers import read_yaml
from planner.core.units import GIB
from planner.memory.memory_plan import MemoryPlan

VEGA_THEME = read_yaml(Path(__file__).parents[1] / "templates" / "theme.yaml")
CHART_WIDTH_PX: int = VEGA_THEME["view"]["continuousWidth"]
CATEGORY_COLORS: list[str] = VEGA_THEME["range"]["category"]
OK_COLOR, VIOLATED_COLOR, MUTED_COLOR = "#2e9e78", "#c9524a", "#8a8f98"
MEMORY_PART_COLORS = {
    "weights": "#3b7dd8", "LoRA adapters": "#7fb1ea", "activations": "#e0802f", "runtime": "#8a6fc4",
    "KV cache": OK_COLOR, "other tenants": VIOLATED_COLOR, "free": "#8a8f9866",
}  # fmt: skip
"""Colours of the parts of a memory budget; slivers are drawn together."""
MEMORY_PART_NAMES = {
    "activation": "activations", "non-torch": "runtime", "CUDA graphs": "runtime",
    "driver context": "runtime", "headroom": "free",
}  # fmt: skip
"""Parts in which terms of a memory plan are drawn, where not by their own name."""
FONT_MARGIN_PX_PER_CHAR = 0.8
"""Extra width of a browser's own font, such as DejaVu Sans, over Liberation Sans at 11 px."""
MAX_DRAWN_UTILIZATION = 3.0
"""Largest latency that is drawn, as a multiple of its limit."""
GAUGE_COLORS = dict(zip(("running", "waiting"), CATEGORY_COLORS, strict=False))
"""Colours of the gauges of an engine."""


@alt.theme.register("headroom", enable=True)
def build_theme() -> Any:
    """Return the Vega-Lite configuration of all charts."""
    return {"config": VEGA_THEME}


def render_svg(chart: alt.TopLevelMixin | dict[str, Any]) -> str:
    """Return a chart, or its Vega-Lite, as an SVG element whose marks have tooltips.

    It is rendered offline.
    """
    version = alt.SCHEMA_VERSION.removeprefix("v").rsplit(".", 1)[0]
    svg = vl_convert.vegalite_to_svg(
        chart if isinstance(chart, dict) else chart.to_dict(), vl_version=version
    )
    digest = hashlib.sha1(svg.encode()).hexdigest()[:8]
    # ids are unique on a page with several charts
    svg = re.sub(r'(id="|url\(#)((?:clip|gradient)\w*)', rf"\g<1>{digest}-\2", svg)

    def add_title(mark: re.Match[str]) -> str:
        text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.3g}", mark[2])
        return f"{mark[1]}><title>{text}</title></path>"

    path = r'(<path aria-label="([^"]*)" role="[^"]*" aria-roledescription="(?!line|area)[^>]*)/>'
    return _widen_left_margin(re.sub(path, add_title, svg))


def render_png(svg: str) -> bytes:
    """Return an SVG as a picture on white."""
    return bytes(
        vl_convert.svg_to_png(
            svg.replace("<g", '<rect x="-999" width="9999" height="9999" fill="white"/><g', 1),
            scale=2,
        )
    )


def _widen_left_margin(svg: str) -> str:
    """Return an SVG with a left margin for a font that is wider than the one it was laid out in."""
    labels = re.findall(r'<text text-anchor="end" transform="translate\(-[^>]*>([^<]*)', svg)
    margin = math.ceil(max(map(len, map(unescape, labels)), default=0) * FONT_MARGIN_PX_PER_CHAR)
    size = r'width="([\d.]+)" height="([\d.]+)" viewBox="0 0 [\d. ]+"'

    def widen(match: re.Match[str]) -> str:
        width = float(match[1]) + margin
        return (
            f'width="{width:g}" height="{match[2]}" viewBox="{-margin} 0 {width:g} {match[2]}"'
            f' style="overflow: visible; width: 100%; height: auto; max-width: {1.7 * width:.0f}px"'
        )

    return re.sub(size, widen, svg, count=1)


def plot_memory_budget(plans: Mapping[str, MemoryPlan]) -> alt.Chart:
    """Plot the memory budget of one GPU: a stacked bar in GiB for each labelled plan."""
    order, sizes = list(MEMORY_PART_COLORS), Counter[tuple[str, str]]()
    for label, plan in plans.items():
        for term, size in plan.bytes_by_part.items():
            sizes[label, MEMORY_PART_NAMES.get(term, term)] += max(size, 0)
    rows = [
        (label, order.index(part), part, size / GIB)
        for (label, part), size in sizes.items()
        if size
    ]
    data = pd.DataFrame(rows, columns=["plan", "order", "part", "gib"])
    return (
        alt.Chart(data, height=alt.Step(26))
        .mark_bar()
        .encode(
            x=alt.X("gib:Q", title="GiB on one GPU (the fullest rank)"),
            y=alt.Y("plan:N", title=None, sort=list(plans)),
            color=encode_color("part:N", MEMORY_PART_COLORS, data["part"]),
            order=alt.Order("order:Q"),
        )
    )


def encode_color(
    column: str, colors: Mapping[str, str] | Sequence[str], present: Iterable[str] | None = None
) -> alt.Color:
    """Encode `column` by `colors` or the palette; the legend has all values or those `present`."""
    colors = (
        colors
        if isinstance(colors, Mapping)
        else dict(zip(colors, cycle(CATEGORY_COLORS), strict=False))
    )
    shown = list(colors) if present is None else [name for name in colors if name in set(present)]
    return alt.Color(
        column, title=None, scale=alt.Scale(domain=shown, range=[colors[name] for name in shown])
    )


def split_intervals(intervals: Iterable[Any]) -> dict[str, list[float]]:
    """Return columns "lo", "mid" and "hi" of intervals or numbers."""
    values = list(intervals)
    return {end: [getattr(value, end, value) for value in values] for end in ("lo", "mid", "hi")}


def cap_utilization(utilization: Iterable[Interval]) -> pd.DataFrame:
    """Split intervals of limit utilization, capped at `MAX_DRAWN_UTILIZATION`.

    The column "further" marks those that extend beyond it.
    """
    data = pd.DataFrame(split_intervals(utilization), dtype=float)
    return data.clip(upper=MAX_DRAWN_UTILIZATION).assign(further=data["hi"] > MAX_DRAWN_UTILIZATION)


def plot_overflow_arrows(base: alt.Chart) -> alt.Chart:
    """Plot an arrow at the end of each interval that `cap_utilization` capped."""
    return (
        base.transform_filter("datum.further")
        .mark_point(shape="triangle-right", filled=True)
        .encode(x="hi:Q")
    )


def plot_band(base: alt.Chart, height: alt.Y) -> list[alt.Chart]:
    """Plot the line of "mid" on the axis `height`, in its band from "lo" to "hi"."""
    return [
        base.mark_area(opacity=0.15).encode(y=alt.Y("lo:Q"), y2=alt.Y2("hi")),
        base.mark_line().encode(y=height),
    ]


def plot_limit_line(limit: float | None, axis: str = "y") -> list[alt.Chart]:
    """Plot a limit as a dashed line; nothing without a limit."""
    rule = alt.Chart(pd.DataFrame({"limit": [limit]})).mark_rule(
        strokeDash=[5, 4], color=VIOLATED_COLOR
    )
    return [] if limit is None else [rule.encode(**{axis: "limit:Q"})]


def arrange_panels(
    panel: Any, column: str, order: Sequence[str], abreast: int = 1
) -> alt.FacetChart:
    """Repeat `panel` for each value of `column`, `abreast` of them in a row."""
    above = alt.Header(labelOrient="top", labelAnchor="start", labelAngle=0)
    return panel.facet(
        facet=alt.Facet(f"{column}:N", title=None, sort=list(order), header=above), columns=abreast
    )


def plot_lines(
    data: pd.DataFrame,
    x: str,
    y: str,
    series: str | None = None,
    limit: float | None = None,
    log: bool = False,
) -> alt.LayerChart | alt.FacetChart:
    """Plot `y` over `x` by `series`, with the band of intervals and `limit` as a dashed line.

    Column names are the axis titles, units included.
    """
    base = alt.Chart(data.drop(columns=y).assign(**split_intervals(data[y]))).encode(
        x=alt.X(
            _escape_field(x), title=x, scale=alt.Scale(type="log" if log else "linear", nice=False)
        ),
        color=(
            alt.Color(_escape_field(series), title=series, sort=None) if series else alt.Undefined
        ),
    )
    return alt.layer(*plot_band(base, alt.Y("mid:Q", title=y)), *plot_limit_line(limit))


def _escape_field(column: str) -> str:
    """Return a column name with the operators of Vega-Lite (dots, colons, brackets) escaped."""
    return re.sub(r"([.:\[\]])", r"\\\1", column)
