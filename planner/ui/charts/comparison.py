"""Charts that compare plans by their targets and their cost."""

from collections.abc import Mapping

import altair as alt
import pandas as pd

from planner.answers.answer import CostCurve
from planner.ui.charts.base import (
    cap_utilization,
    encode_color,
    plot_limit_line,
    plot_lines,
    plot_overflow_arrows,
)

PLAN_MARKERS = ("circle", "square", "triangle-up", "diamond")
"""One marker for each plan, so that color is not the only difference."""


def plot_slo_comparison(data: pd.DataFrame) -> alt.TopLevelMixin:
    """Plot the utilization of every limit with its 80% interval, a row for each scenario."""
    names = list(dict.fromkeys(data["scenario"]))
    flat = data[["scenario", "target"]].join(cap_utilization(data["Share of the limit"]))
    base = alt.Chart(flat, height=alt.Step(16)).encode(
        y=alt.Y("target:N", title=None, sort=None, axis=alt.Axis(labelLimit=230)),
        yOffset=alt.YOffset("scenario:N", sort=names),
        color=encode_color("scenario:N", names),
    )
    share = alt.X("mid:Q", title="share of the limit", axis=alt.Axis(format="%"))
    scale = alt.Scale(domain=names, range=list(PLAN_MARKERS[: len(names)]))
    marks = alt.Shape("scenario:N", title=None, scale=scale)
    reach = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("lo:Q", title="share of the limit"), x2="hi:Q"
    )
    return alt.layer(
        reach,
        base.mark_point(size=60).encode(x=share, shape=marks),
        plot_overflow_arrows(base),
        *plot_limit_line(1.0, "x"),
    )


def plot_cost_comparison(curves: Mapping[str, CostCurve | None]) -> alt.TopLevelMixin | None:
    """Plot the least cost over the load of each scenario; None if loads or units differ."""
    drawn = {name: curve for name, curve in curves.items() if curve}
    kinds = {(curve.axis, curve.unit) for curve in drawn.values()}
    if len(drawn) < len(curves) or len(drawn) < 2 or len(kinds) > 1:
        return None
    ((load, unit),) = kinds
    rows = [(*point[:2], name) for name, curve in drawn.items() for point in curve.points]
    data = pd.DataFrame(rows, columns=[load, unit, "scenario"])
    return plot_lines(data, load, unit, "scenario", log=True)
