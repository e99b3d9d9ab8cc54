"""Charts of the validation: predicted over measured, curves over concurrency, logs, gauges over time."""

import math
from collections.abc import Iterable, Mapping

import altair as alt
import pandas as pd

from planner.ui.charts.base import (
    CATEGORY_COLORS,
    CHART_WIDTH_PX,
    MUTED_COLOR,
    OK_COLOR,
    PANEL_GAP_PX,
    VIOLATED_COLOR,
    encode_color,
    split_intervals,
)

PANEL_WIDTH_PX = (CHART_WIDTH_PX - PANEL_GAP_PX) // 2
GAUGE_COLORS = dict(zip(("running", "waiting"), CATEGORY_COLORS, strict=False))
LOG_MATCH_COLORS = {"logged, inside": OK_COLOR, "logged, outside": VIOLATED_COLOR}


def plot_predicted_over_measured(
    data: pd.DataFrame, quantities: Mapping[str, str], series: str
) -> alt.TopLevelMixin:
    """Plot predicted over measured values with intervals and the diagonal, a panel per quantity.

    `data` has the columns "measured ..." and "predicted ..." (intervals) of every quantity.
    `quantities` has the titles of panels by quantity with its unit. Both axes are logarithmic;
    colors are by the column `series`. Missing measurements are left out.
    """
    panels = []
    for quantity, title in quantities.items():
        shown, scale, axis = _build_comparison_axes(
            data[data[f"measured {quantity}"].notna()], quantity, series
        )
        base = alt.Chart(shown).encode(
            x=alt.X("measured:Q", title=f"measured {quantity}", scale=scale, axis=axis),
            color=alt.Color(f"{series}:N", title=None, sort=None),
        )
        height = alt.Y("mid:Q", title=f"predicted {quantity}", scale=scale, axis=axis)
        diagonal = alt.Chart(pd.DataFrame({"measured": scale.domain, "mid": scale.domain}))
        layers = [
            diagonal.mark_line(color=MUTED_COLOR, strokeDash=[2, 3], strokeWidth=1).encode(
                x="measured:Q", y=height
            ),
            base.mark_rule(opacity=0.45, strokeWidth=1.5).encode(y=alt.Y("lo:Q"), y2="hi"),
            base.mark_point(size=26).encode(y=alt.Y("mid:Q")),
        ]
        panels.append(alt.layer(*layers).properties(width=PANEL_WIDTH_PX, height=205, title=title))
    return alt.hconcat(*panels)


def _build_comparison_axes(
    data: pd.DataFrame, quantity: str, by: str
) -> tuple[pd.DataFrame, alt.Scale, alt.Axis]:
    """Return columns `by`, measured, lo, mid and hi of a quantity, with their scale and axis.

    The scale is logarithmic, with ticks at 1, 2 and 5, or at powers of ten over two decades.
    """
    table = pd.DataFrame(
        {
            by: data[by],
            "measured": data[f"measured {quantity}"],
            **split_intervals(data[f"predicted {quantity}"]),
        }
    )
    low = table[["lo", "measured"]].min().min() * 0.9
    high = table[["hi", "measured"]].max().max() * 1.1
    steps = (1, 2, 5) if high < 100 * low else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    axis = alt.Axis(values=[tick for tick in ticks if low <= tick <= high], format="~s")
    return table, scale, axis


def plot_serving_curve(points: pd.DataFrame, quantities: Iterable[str]) -> alt.TopLevelMixin:
    """Plot the predicted band and the measured points of a deployment over concurrency."""
    loads = list(points["concurrency"])
    across = alt.Scale(type="log", base=2, nice=False, domain=[loads[0], loads[-1]])
    x = alt.X(
        "concurrency:Q", title="requests in flight", scale=across, axis=alt.Axis(values=loads)
    )
    panels = []
    for quantity in quantities:
        shown, scale, axis = _build_comparison_axes(points, quantity, "concurrency")
        base = alt.Chart(shown).encode(x=x)
        height = alt.Y("mid:Q", title=f"mean {quantity}", scale=scale, axis=axis)
        layers = [
            base.mark_area(opacity=0.15).encode(y=alt.Y("lo:Q"), y2=alt.Y2("hi")),
            base.mark_line().encode(y=height),
            base.mark_point(color=CATEGORY_COLORS[1], size=45).encode(y=alt.Y("measured:Q")),
        ]
        panels.append(alt.layer(*layers).properties(width=PANEL_WIDTH_PX, height=140))
    return alt.hconcat(*panels)


def plot_gauges(runs: Mapping[str, pd.DataFrame]) -> alt.TopLevelMixin:
    """Plot running and waiting requests over time: measured dots and simulated lines."""
    x = alt.X("Seconds:Q", title="seconds", scale=alt.Scale(nice=False))
    panels = []
    for name, data in runs.items():
        base = alt.Chart(data).encode(x=x, color=encode_color("gauge:N", GAUGE_COLORS))
        replayed = alt.Y("replayed:Q", title="requests", axis=alt.Axis(tickCount=5))
        layers = [
            base.mark_line(strokeWidth=1.5).encode(y=replayed),
            base.mark_point(size=14, opacity=0.7).encode(y=alt.Y("measured:Q")),
        ]
        panels.append(alt.layer(*layers).properties(width=CHART_WIDTH_PX, height=95, title=name))
    return alt.vconcat(*panels)


def plot_memory_residuals(data: pd.DataFrame) -> alt.TopLevelMixin:
    """Plot the planned 80% interval of each public log as a bar, and the logged value as a dot."""
    drawn = data[["log"]].assign(
        **split_intervals(data["interval (%)"]),
        error=data["error (%)"],
        logged=data["inside"].map(dict(zip((True, False), LOG_MATCH_COLORS, strict=True))),
    )
    y = alt.Y("log", title=None, sort=None, axis=alt.Axis(labelLimit=300))
    base = alt.Chart(drawn, height=alt.Step(11)).encode(y=y)
    x = alt.X(
        "lo", title="logged minus planned KV cache (% of the budget); bar: planned 80% interval"
    )
    bars = base.mark_bar(color=MUTED_COLOR, opacity=0.45, height=7).encode(x=x, x2="hi")
    return bars + base.mark_point().encode(
        x="error", color=encode_color("logged", LOG_MATCH_COLORS)
    )
