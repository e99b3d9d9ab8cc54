"""Charts of a fleet: the use of its stock, and its cost as loads grow."""

import math
from itertools import cycle

import altair as alt
import pandas as pd

from planner.tools.fleet.allocation import FleetPlan
from planner.tools.fleet.tables import FREE_GPU_LABEL, build_gpu_usage_table, sweep_fleet_growth
from planner.ui.charts.base import (
    CATEGORY_COLORS,
    CHART_WIDTH_PX,
    MUTED_COLOR,
    VIOLATED_COLOR,
    encode_color,
)


def plot_fleet_stock(plan: FleetPlan) -> alt.TopLevelMixin:
    """Plot the stock of each kind of GPU by scenario; free GPUs are grey."""
    data = build_gpu_usage_table(plan)
    names = [name for name in plan.fleet.options if name in set(data["who"])]
    colors = {
        **dict(zip(names, cycle(CATEGORY_COLORS), strict=False)),
        FREE_GPU_LABEL: MUTED_COLOR + "55",
    }
    order = {name: k for k, name in enumerate(colors)}
    return (
        alt.Chart(
            data.assign(order=data["who"].map(order)), width=CHART_WIDTH_PX, height=alt.Step(26)
        )
        .mark_bar(stroke="white", strokeWidth=0.5)
        .encode(
            x=alt.X("GPUs:Q", axis=alt.Axis(tickMinStep=1, format="d")),
            y=alt.Y("GPU:N", title=None, sort=list(plan.fleet.stock)),
            color=encode_color("who:N", colors),
            order=alt.Order("order:Q"),
        )
    )


def plot_fleet_growth(plan: FleetPlan) -> alt.TopLevelMixin:
    """Plot the cost, or GPUs that are all owned, as all loads grow.

    Dashed are the given growth, and in red the largest one.
    """
    figure = "GPUs" if plan.owns_all else "USD per hour"
    data = sweep_fleet_growth(plan)
    x = alt.X(
        "every load, times:Q", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(format=".2f")
    )
    line = alt.Chart(data, width=CHART_WIDTH_PX, height=120).mark_line(interpolate="step-after")
    marks = [(plan.growth, MUTED_COLOR)] * (plan.grown_allocation is not None)
    if math.isfinite(plan.max_growth) and plan.max_growth <= data["every load, times"].max() + 1e-9:
        marks.append((plan.max_growth, VIOLATED_COLOR))
    rules = [
        alt.Chart(pd.DataFrame({"every load, times": [at]}))
        .mark_rule(color=color, strokeDash=[5, 4])
        .encode(x=x)
        for at, color in marks
    ]
    return alt.layer(line.encode(x=x, y=alt.Y(f"{figure}:Q", scale=alt.Scale(zero=True))), *rules)
