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

from planner.core.readers import read_yaml
from planner.core.units import GIB
from planner.memory.memory_plan import MemoryPlan
from planner.planning.autoscaling import AutoscalingPlan

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
PANEL_GAP_PX = 70
"""Width of a panel's axis and the space before it."""
MAX_LIMIT_MULTIPLE = 3
"""Larger values, as multiples of the limit or of the largest middle, are not drawn: they flatten the rest."""


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
    data: pd.DataFrame, x: str, y: str, part: str, colors: Mapping[str, str]
) -> alt.TopLevelMixin:  # fmt: skip
    """Plot bars of `x` for each `y`, the parts stacked."""
    rank = {name: at for at, name in enumerate(colors)}
    return (
        alt.Chart(data.assign(rank=data[part].map(rank)))
        .mark_bar()
        .encode(
            x=alt.X(f"{_escape_field(x)}:Q", title=x, axis=alt.Axis(tickCount=5)),
            y=alt.Y(f"{y}:N", title=None, sort=list(dict.fromkeys(data[y]))),
            color=encode_color(f"{part}:N", colors, data[part]),
            order=alt.Order("rank:Q"),
        )
        .properties(width=CHART_WIDTH_PX - 90, height=alt.Step(18))
    )


def plot_tiles(
    data: pd.DataFrame, x: str, y: str, kind: str, text: str, *, panel: str | None = None,
    framed: str | None = None,
) -> alt.TopLevelMixin:  # fmt: skip
    """Plot a tile for each `x` and `y`, coloured by `kind` and with `text`; `framed` marks some."""
    panels = list(dict.fromkeys(data[panel])) if panel else []
    abreast = min(max(len(panels), 1), 3)
    used = [name for name in (x, y, kind, text, panel, framed) if name]
    base = alt.Chart(data[used]).encode(
        x=alt.X(
            f"{x}:N",
            axis=alt.Axis(labelAngle=0),
            sort="ascending"
            if pd.api.types.is_numeric_dtype(data[x])
            else list(dict.fromkeys(data[x])),
        ),
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
    if not panel:
        return drawn
    above = alt.Header(
        labelOrient="top",
        labelAnchor="start",
        labelAngle=0,
        labelExpr=f"'{panel} ' + datum.value",
    )
    facet = alt.Facet(f"{panel}:N", title=None, sort=panels, header=above)
    return drawn.facet(facet=facet, columns=abreast)


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


def plot_lines(
    data: pd.DataFrame, x: str, y: str, series: str | None = None, limit: float | None = None,
    log: bool = False, marks: Mapping[str, float] | None = None, step: bool = False,
) -> Any:  # fmt: skip
    """Plot `y` over `x` by `series`, with the band of intervals, `limit` dashed, and named `marks`.

    Column names are the axis titles, units included. A `step` holds until the next value.
    """
    flat = data.drop(columns=y).assign(**split_intervals(data[y]))
    top = MAX_LIMIT_MULTIPLE * (limit or flat["mid"].max())
    near = flat[flat["mid"] <= top]
    flat = (near if len(near) > 1 else flat).assign(hi=flat["hi"].clip(upper=top))
    scale = alt.Scale(type="log" if log else "linear", nice=False)
    color = alt.Color(_escape_field(series), title=series, sort=None) if series else alt.Undefined
    base = alt.Chart(flat).encode(x=alt.X(_escape_field(x), title=x, scale=scale), color=color)
    line = base.mark_line(interpolate="step-after" if step else "linear")
    layers = [
        base.mark_area(opacity=0.15).encode(y=alt.Y("lo:Q"), y2=alt.Y2("hi")),
        line.encode(y=alt.Y("mid:Q", title=y)),
    ]
    if limit is not None:
        rule = alt.Chart(pd.DataFrame({"limit": [limit]})).mark_rule(strokeDash=[5, 4])
        layers.append(rule.encode(y="limit:Q", color=alt.value(VIOLATED_COLOR)))
    middle = (data[x].min() * data[x].max()) ** 0.5 if log else data[x].max() / 2
    for height, (name, at) in enumerate((marks or {}).items()):
        spot = alt.Chart(pd.DataFrame({"at": [at], "name": [name]})).encode(x="at:Q")
        side: dict[str, Any] = (
            {"align": "right", "dx": -4} if at > middle else {"align": "left", "dx": 4}
        )
        text = spot.mark_text(y=-6 - 13 * height, color="currentColor", **side)
        rule = spot.mark_rule(color=MUTED_COLOR, strokeDash=[2, 3])
        layers += [rule, text.encode(text="name:N")]
    return alt.layer(*layers)


def plot_panels(
    rows: pd.DataFrame | Sequence[Mapping[str, Any]], x: str, limits: Mapping[str, float | None],
    marks: Mapping[str, float] | None = None, log: bool = True,
) -> alt.TopLevelMixin:  # fmt: skip
    """Plot the lines of each column in `limits`, two panels abreast; `marks` names values of `x`."""
    data, columns = pd.DataFrame(rows), min(2, len(limits))
    width = (CHART_WIDTH_PX - PANEL_GAP_PX * (columns - 1)) // columns
    drawn = [
        plot_lines(data[[x, y]], x, y, limit=limit, log=log, marks=marks).properties(
            width=width, height=120
        )
        for y, limit in limits.items()
    ]
    return alt.concat(*drawn, columns=columns).resolve_scale(x="shared")


def plot_day(scaling: AutoscalingPlan) -> alt.TopLevelMixin:
    """Plot the requests/s of each hour as bars below the capacity of its replicas, which are named."""
    hours = list(zip(scaling.rates, scaling.replicas, strict=True))
    data = pd.DataFrame([*hours, hours[-1]], columns=["rate", "replicas"]).rename_axis("hour")
    data["end"], data["taken"] = data.index + 1, data["replicas"] * scaling.max_replica_rps
    data["named"] = data["replicas"].where(data["replicas"] != data["replicas"].shift())
    colors = {"comes": CATEGORY_COLORS[0], "its replicas may take": CATEGORY_COLORS[1]}
    base = alt.Chart(data.reset_index()).encode(
        x=alt.X("hour:Q", title="hour", scale=alt.Scale(domain=[0, len(hours)])),
        y=alt.Y("taken:Q", title="requests/s"),
    )
    bars = base.transform_filter(f"datum.hour < {len(hours)}").mark_bar(opacity=0.55)
    text = base.transform_filter("datum.named > 0").mark_text(
        align="left", dx=3, dy=-7, color="currentColor"
    )
    line, color = base.mark_line(interpolate="step-after"), encode_color("what:N", colors)
    come, taken = (repr(kind) for kind in colors)
    return alt.layer(
        bars.transform_calculate(what=come).encode(
            x2=alt.X2("end", title=""),
            y=alt.Y("rate:Q", title="requests/s"),
            y2=alt.datum(0),
            color=color,
        ),
        line.transform_calculate(what=taken).encode(color=color),
        text.encode(text="named:Q"),
    ).properties(width=CHART_WIDTH_PX, height=190)


def _escape_field(column: str) -> str:
    """Return a column name with the operators of Vega-Lite (dots, colons, brackets) escaped."""
    return re.sub(r"([.:\[\]])", r"\\\1", column)
