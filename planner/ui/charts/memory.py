"""Charts of memory: sweeps with their status, and sequences by length."""

import altair as alt
import pandas as pd

from planner.ui.charts.base import (
    CATEGORY_COLORS,
    OK_COLOR,
    VIOLATED_COLOR,
    encode_color,
    plot_lines,
    split_intervals,
)

MEMORY_STATUS_COLORS = {
    "ok": OK_COLOR,
    "at risk": CATEGORY_COLORS[1],
    "does not fit": VIOLATED_COLOR,
}


def plot_memory_sweep(
    data: pd.DataFrame, chosen: float | None = None, log: bool = False
) -> alt.TopLevelMixin:
    """Plot the second column over the first, by `status`, with a rule at `chosen`."""
    x, y = data.columns[:2]
    dots = data.drop(columns=y).assign(
        mid=split_intervals(data[y])["mid"], status=data["status"].str.replace("_", " ")
    )
    points = alt.Chart(dots).mark_point()
    points = points.encode(
        x=alt.X(x, scale=alt.Scale(type="log" if log else "linear", nice=False)),
        y=alt.Y("mid", scale=_build_zero_scale(dots["mid"])),
        color=encode_color("status", MEMORY_STATUS_COLORS),
    )
    layers = [plot_lines(data, x, y, log=log), points]
    if chosen is not None:
        layers.append(
            alt.Chart(pd.DataFrame({x: [chosen]})).mark_rule(strokeDash=[2, 3]).encode(x=x)
        )
    return alt.layer(*layers).properties(height=140)


def _build_zero_scale(values: pd.Series) -> alt.Scale:
    """Return a scale from zero, also if no value is above it."""
    return alt.Scale(domain=[0, float(values.max()) or 1.0])


def plot_sequence_counts(data: pd.DataFrame) -> alt.TopLevelMixin:
    """Plot the number of sequences that fit, by their length."""
    scale = _build_zero_scale(data["sequences"] * 1.1)
    x = alt.X("sequences", title="sequences that fit at once in one engine", scale=scale)
    base = alt.Chart(data, height=alt.Step(30)).encode(
        x=x, y=alt.Y("length", title=None, sort=None)
    )
    return base.mark_bar() + base.mark_text(align="left", dx=4).encode(
        text=alt.Text("sequences", format=",d")
    )
