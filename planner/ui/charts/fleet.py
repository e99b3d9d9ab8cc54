"""Charts of a fleet: the use of its stock, and its cost as loads grow."""

from itertools import cycle

import altair as alt
import pandas as pd

from planner.tools.fleet.allocation import FleetPlan, find_max_growth
from planner.tools.fleet.tables import (
    FREE_GPU_LABEL,
    LOAD_COLUMN,
    build_gpu_usage_table,
    build_growth_step_table,
)
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
    names = [name for name in plan.options if name in set(data["who"])]
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
            y=alt.Y("GPU:N", title=None, sort=list(plan.entry.stock)),
            color=encode_color("who:N", colors),
            order=alt.Order("order:Q"),
        )
    )


def plot_fleet_growth(plan: FleetPlan) -> alt.TopLevelMixin:
    """Plot the cost, or GPUs that are all owned, as all loads grow to twice as much.

    Dashed are the given growth, and in red the largest one.
    """
    steps, most = build_growth_step_table(plan), find_max_growth(plan)
    figure = "USD/h" if steps["USD/h"].any() else "GPUs"
    end = min(2 * plan.entry.growth - 1, most)
    data = pd.concat([steps, steps.tail(1).assign(**{LOAD_COLUMN: end})])
    x = alt.X(
        f"{LOAD_COLUMN}:Q", scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(format=".2f")
    )
    line = alt.Chart(data, width=CHART_WIDTH_PX, height=120).mark_line(interpolate="step-after")
    marks = {MUTED_COLOR: plan.entry.growth, VIOLATED_COLOR: most}
    rules = [
        alt.Chart(pd.DataFrame({LOAD_COLUMN: [at]}))
        .mark_rule(color=color, strokeDash=[5, 4])
        .encode(x=x)
        for color, at in marks.items()
        if at <= end
    ]
    return alt.layer(line.encode(x=x, y=alt.Y(f"{figure}:Q", scale=alt.Scale(zero=True))), *rules)
