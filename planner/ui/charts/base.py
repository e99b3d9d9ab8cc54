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
SLO_STATUS_COLORS = {"met": OK_COLOR, "at risk": CATEGORY_COLORS[1], "missed": VIOLATED_COLOR}
KIND_COLORS = {
    **SLO_STATUS_COLORS, "does not fit": MUTED_COLOR,
    "helps": CATEGORY_COLORS[0], "hurts": CATEGORY_COLORS[1], "same": MUTED_COLOR + "33",
}  # fmt: skip
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
            ' style="overflow: visible"'
        )

    return re.sub(size, widen, svg, count=1)


def plot_memory_budget(plans: Mapping[str, MemoryPlan]) -> alt.TopLevelMixin:
    """Plot the memory budget of one GPU: a stacked bar in GiB for each labelled plan."""
    axis, sizes = "GiB on one GPU (the fullest rank)", Counter[tuple[str, str]]()
    for label, plan in plans.items():
        for term, size in plan.bytes_by_part.items():
            sizes[label, MEMORY_PART_NAMES.get(term, term)] += max(size, 0)
    rows = [(*key, size / GIB) for key, size in sizes.items() if size]
    data = pd.DataFrame(rows, columns=["plan", "part", axis])
    return plot_bars(data, axis, "plan", "part", MEMORY_PART_COLORS)


def plot_bars(
    data: pd.DataFrame, x: str, y: str, part: str, colors: Mapping[str, str] | Sequence[str],
    panel: str | None = None, beside: bool = False,
) -> alt.TopLevelMixin:  # fmt: skip
    """Plot bars of `x` for each `y`, the parts stacked or `beside` each other, a panel per `panel`."""
    panels = data[panel].nunique() if panel else 1
    rank = {name: at for at, name in enumerate(colors)}
    place = {"yOffset": alt.YOffset(f"{part}:N", sort=list(colors))} if beside else {}
    bars = (
        alt.Chart(data.assign(rank=data[part].map(rank)))
        .mark_bar()
        .encode(
            x=alt.X(f"{_escape_field(x)}:Q", title=x, axis=alt.Axis(tickCount=5)),
            y=alt.Y(f"{y}:N", title=None, sort=list(dict.fromkeys(data[y]))),
            color=encode_color(f"{part}:N", colors, data[part]),
            order=alt.Order("rank:Q"),
            **place,
        )
        .properties(width=(CHART_WIDTH_PX - 90) // panels, height=alt.Step(12 if beside else 18))
    )
    if panel is None:
        return bars
    drawn = arrange_panels(bars, panel, list(dict.fromkeys(data[panel])), panels)
    return drawn.resolve_scale(x="independent")


def plot_tiles(
    data: pd.DataFrame, x: str, y: str, kind: str, text: str, *, panel: str | None = None,
    framed: str | None = None,
) -> alt.TopLevelMixin:  # fmt: skip
    """Plot a tile for each `x` and `y`, coloured by `kind` and with `text`; `framed` marks some."""
    panels = list(dict.fromkeys(data[panel])) if panel else []
    abreast = min(max(len(panels), 1), 3)
    used = [name for name in (x, y, kind, text, panel, framed) if name]
    base = alt.Chart(data[used]).encode(
        x=alt.X(f"{x}:N", sort=list(dict.fromkeys(data[x])), axis=alt.Axis(labelAngle=0)),
        y=alt.Y(
            f"{y}:N", title=y, sort=list(dict.fromkeys(data[y])), axis=alt.Axis(labelLimit=260)
        ),
    )
    layers = [
        base.mark_rect(opacity=0.55, stroke="white").encode(
            color=encode_color(f"{kind}:N", KIND_COLORS, data[kind])
        ),
        base.mark_text(fontSize=10, color="currentColor").encode(text=f"{text}:N"),
    ]
    if framed:
        ring = base.mark_rect(filled=False, stroke="currentColor", strokeWidth=2)
        layers.append(ring.transform_filter(f"datum['{framed}']"))
    wide = min((CHART_WIDTH_PX - 120) // abreast - 20, 64 * max(data[x].nunique(), 4))
    drawn = alt.layer(*layers).properties(width=wide, height=alt.Step(20))
    return arrange_panels(drawn, panel, panels, abreast) if panel else drawn


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
