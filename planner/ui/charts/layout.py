"""Charts of memory and layouts: what fits, their communication, and cost over latency."""

import altair as alt
import pandas as pd

from planner.analysis.layout_tables import find_pareto_front
from planner.ui.charts.base import (
    MUTED_COLOR,
    encode_color,
    plot_limit_line,
    split_intervals,
)

MAX_LAYOUT_LIMIT_MULTIPLE = 4
"""Layouts with larger latencies, as multiples of the limit, are not drawn."""


def plot_pareto_front(
    data: pd.DataFrame, y: str, limit: float | None = None, more_is_better: bool = False
) -> alt.TopLevelMixin:
    """Plot `y` (intervals) over the cost of each layout, with the Pareto front as a line."""
    cost = "USD per hour" if data["USD per hour"].notna().all() else "GPUs"
    held = data[data[y].notna() & ~data["Saturated"]]
    if limit is not None and not more_is_better:
        near = held[[value.mid <= MAX_LAYOUT_LIMIT_MULTIPLE * limit for value in held[y]]]
        held = near if len(near) else held
    flat = pd.DataFrame(
        {"cost": held[cost], "gpu": held["GPU"], "layout": held["Layout"], "chosen": held["Chosen"]}
    )
    flat = flat.assign(**split_intervals(held[y]))
    flat["front"] = find_pareto_front(held, cost, y, more_is_better)
    x = alt.X(
        "cost:Q",
        title=cost,
        scale=alt.Scale(type="log", nice=False, padding=12),
        axis=alt.Axis(tickCount=6),
    )
    at = alt.Y(
        "mid:Q",
        title=y,
        scale=alt.Scale(type="log", nice=False, padding=8),
        axis=alt.Axis(tickCount=6),
    )
    color = encode_color("gpu:N", list(dict.fromkeys(flat["gpu"])))
    base, best = alt.Chart(flat).encode(x=x), alt.Chart(flat[flat["front"]]).encode(x=x)
    layers = [
        base.mark_point(opacity=0.35, size=22).encode(y=at, color=color),
        best.mark_line(color=MUTED_COLOR, interpolate="step-after", strokeWidth=1.5).encode(y=at),
        best.mark_point(size=60).encode(y=at, color=color),
    ]
    picked = alt.Chart(flat[flat["chosen"]]).encode(x=x)
    layers += [
        picked.mark_rule(color="currentColor").encode(y="lo:Q", y2="hi:Q"),
        picked.mark_point(filled=False, size=170, color="currentColor", strokeWidth=2).encode(y=at),
        picked.mark_text(align="left", dx=12, dy=-9, color="currentColor").encode(
            y=at, text="layout:N"
        ),
    ]
    return alt.layer(*layers, *plot_limit_line(limit))
