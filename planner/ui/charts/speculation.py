"""Charts of speculative decoding: its speedup, and the parts of a step."""

import altair as alt
import pandas as pd

from planner.ui.charts.base import CATEGORY_COLORS, MUTED_COLOR, VIOLATED_COLOR, encode_color


def plot_speedup_map(
    surface: pd.DataFrame, line: pd.DataFrame, here: tuple[float, float] | None = None
) -> alt.TopLevelMixin:
    """Plot the speedup by batch and acceptance rate, a panel per k.

    `surface`: columns k, batch, acceptance_rate, speedup. `line`: k, batch, acceptance_rate of the
    break-even. `here`: (batch, acceptance rate) of the workload, marked.
    """
    panels = []
    batches, rates = sorted(surface["batch"].unique()), sorted(surface["acceptance_rate"].unique())
    least, most = min(surface["speedup"].min(), 0.9), max(surface["speedup"].max(), 1.1)
    color = alt.Color(
        "speedup",
        title="speed-up",
        scale=alt.Scale(
            domain=[least, 1, most], range=[VIOLATED_COLOR, "#f2f2f2", CATEGORY_COLORS[0]]
        ),
        legend=alt.Legend(
            type="symbol", symbolType="square", format=".1f", values=[0.5, 0.8, 1, 1.5, 2, 3]
        ),
    )
    half = (rates[1] - rates[0]) / 2
    across = alt.Scale(type="log", domain=[batches[0] / 2**0.5, batches[-1] * 2**0.5], nice=False)
    up = alt.Scale(domain=[rates[0] - half, rates[-1] + half], nice=False)
    x = alt.X(
        "left",
        title="sequences decoding at once",
        scale=across,
        axis=alt.Axis(values=batches[::2], format="d"),
    )
    y = alt.Y("low", title="acceptance rate", scale=up)
    for k, cells in surface.groupby("k"):
        batch, rate = cells["batch"], cells["acceptance_rate"]
        cells = cells.assign(
            left=batch / 2**0.5, right=batch * 2**0.5, low=rate - half, high=rate + half
        )
        layers = [alt.Chart(cells).mark_rect().encode(x=x, x2="right", y=y, y2="high", color=color)]
        edge = line[(line["k"] == k) & (line["acceptance_rate"] >= rates[0] - half)]
        even = alt.Chart(edge).mark_line(color="black", strokeDash=[5, 3], clip=True)
        layers.append(even.encode(x="batch", y="acceptance_rate"))
        if here is not None:
            spot = pd.DataFrame(
                {
                    "batch": [min(max(here[0], batches[0]), batches[-1])],
                    "acceptance_rate": [here[1]],
                }
            )
            ring = alt.Chart(spot).mark_point(size=110, color="black", filled=False, strokeWidth=2)
            layers.append(ring.encode(x="batch", y="acceptance_rate"))
        panels.append(alt.layer(*layers).properties(width=165, height=132, title=f"k = {k}"))
    return alt.hconcat(*panels)


def plot_step_parts(data: pd.DataFrame) -> alt.TopLevelMixin:
    """Plot milliseconds per token and sequence by part, with and without speculation."""
    bars = alt.Chart(data, height=alt.Step(34)).mark_bar()
    return bars.encode(
        x=alt.X("ms per token", title="milliseconds per token and sequence"),
        y=alt.Y("way", title=None, sort=None),
        color=encode_color("part", {"target": CATEGORY_COLORS[0], "draft": MUTED_COLOR}),
    )
