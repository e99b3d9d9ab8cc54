"""Charts that compare: plans by SLO and cost, engine arguments, and drafts by load."""

from collections.abc import Mapping

import altair as alt
import pandas as pd

from planner.answers.answer import CostCurve
from planner.ui.charts.base import (
    CATEGORY_COLORS,
    CHART_WIDTH_PX,
    MUTED_COLOR,
    VIOLATED_COLOR,
    cap_utilization,
    encode_color,
    plot_limit_line,
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
    drawn, names = [curve for curve in curves.values() if curve], list(curves)
    kinds = {(curve.axis, curve.unit) for curve in drawn}
    if len(drawn) < len(names) or len(drawn) < 2 or len(kinds) > 1:
        return None
    ((load, unit),) = kinds
    frame = pd.DataFrame(
        [
            (*point[:2], name)
            for name, curve in zip(names, drawn, strict=True)
            for point in curve.points
        ],
        columns=["load", "cost", "scenario"],
    )
    dash = alt.Scale(domain=names, range=[[1, 0], [7, 3], [2, 2], [9, 3, 2, 3]][: len(names)])
    return (
        alt.Chart(frame, width=CHART_WIDTH_PX, height=180)
        .mark_line(interpolate="step-before")
        .encode(
            x=alt.X(
                "load:Q",
                title=load,
                scale=alt.Scale(type="log", nice=False),
                axis=alt.Axis(format="~g"),
            ),
            y=alt.Y("cost:Q", title=unit),
            color=encode_color("scenario:N", names),
            strokeDash=alt.StrokeDash("scenario:N", title=None, scale=dash),
        )
    )


def plot_knob_effects(data: pd.DataFrame) -> alt.TopLevelMixin:
    """Plot the effect of arguments on metrics, see `analysis.sensitivity`; blue is better."""
    knobs, measures = (list(dict.fromkeys(data[name])) for name in ("knob", "measure"))
    frame = data.assign(helps=data["benefit"] > 0, strength=data["benefit"].abs().clip(upper=0.5))
    base = alt.Chart(frame, width=CHART_WIDTH_PX - 150, height=alt.Step(17)).encode(
        x=alt.X("measure:N", title=None, sort=measures, axis=alt.Axis(orient="top", labelAngle=0)),
        y=alt.Y("knob:N", title=None, sort=knobs, axis=alt.Axis(labelLimit=260)),
    )
    sign = alt.Scale(domain=[True, False], range=CATEGORY_COLORS[:2])
    tiles = base.mark_rect().encode(
        color=alt.Color("helps:N", scale=sign, legend=None),
        opacity=alt.Opacity(
            "strength:Q", scale=alt.Scale(domain=[0, 0.5], range=[0.04, 0.75]), legend=None
        ),
    )
    return tiles + base.mark_text(fontSize=10, color="currentColor").encode(text="told:N")


def plot_adapter_endpoints(data: pd.DataFrame) -> alt.TopLevelMixin:
    """Plot the cost over the number of adapters, on shared and own endpoints."""
    return (
        alt.Chart(data, height=200)
        .mark_line(point=True)
        .encode(
            x=alt.X("Adapters:Q", title="adapters", scale=alt.Scale(type="log", nice=False)),
            y=alt.Y("USD per hour:Q", scale=alt.Scale(type="log", nice=False, padding=12)),
            color=alt.Color("Endpoints:N", title=None, sort=None),
        )
    )


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
