"""Charts of simulations: tails of latencies, a load ramp with its capacity, gauges over time."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from planner.core.intervals import Interval
from planner.ui.charts.base import (
    CATEGORY_COLORS,
    CHART_WIDTH_PX,
    GAUGE_COLORS,
    MUTED_COLOR,
    VIOLATED_COLOR,
    arrange_panels,
    encode_color,
    plot_band,
    plot_limit_line,
    split_intervals,
)
from planner.ui.charts.latency import compute_panel_width

TAIL_AXIS_MARKS = {"p50": 0.5, "p90": 0.1, "p95": 0.05, "p99": 0.01, "p99.9": 0.001}
"""Labels of the axis of a tail, by the fraction of slower values."""
_TAIL_AXIS_LABELS = (
    " : ".join(
        f"abs(datum.value - {share}) < 1e-6 ? '{name}'" for name, share in TAIL_AXIS_MARKS.items()
    )
    + " : ''"
)


def plot_tails(
    curves: Mapping[str, pd.DataFrame], limits: Mapping[str, Sequence[tuple[str, float]]]
) -> alt.TopLevelMixin:
    """Plot ms over the percentile of each latency, with its 80% band; see `analysis.tail_latency`.

    `limits` has (percentile, ms) of the SLOs by latency. Hollow points are analytical estimates.
    """
    axis = alt.Axis(
        values=list(TAIL_AXIS_MARKS.values()), labelExpr=_TAIL_AXIS_LABELS, labelOverlap=False
    )
    scale = alt.Scale(type="log", domain=[1, 0.001], nice=False)
    panels = []
    for name, data in curves.items():
        x = alt.X("slower:Q", title=f"percentile of {name}", scale=scale, axis=axis)
        height = alt.Y(
            "mid:Q", title=f"{name} (ms)", scale=alt.Scale(type="log"), axis=alt.Axis(tickCount=5)
        )
        named = data[data["name"].notna()]
        spots = alt.Chart(named).encode(x=x)
        layers = [
            *plot_band(alt.Chart(data).encode(x=x), height),
            spots.mark_point().encode(y=alt.Y("mid:Q")),
        ]
        if named["closed form"].notna().any():
            hollow = spots.mark_point(
                filled=False, color=CATEGORY_COLORS[1], size=70, strokeWidth=2
            )
            layers.append(hollow.encode(y=alt.Y("closed form:Q")))
        if promises := limits.get(name):
            rows = [(TAIL_AXIS_MARKS[at], ms, 1.0, f"{at} target") for at, ms in promises]
            frame = pd.DataFrame(rows, columns=["slower", "ms", "from", "text"])
            promised = alt.Chart(frame).encode(x=x, y=alt.Y("ms:Q"))
            layers += [
                promised.mark_rule(strokeDash=[5, 4], color=VIOLATED_COLOR).encode(x2="from"),
                promised.mark_point(shape="triangle-down", color=VIOLATED_COLOR, size=60),
                # at its left end, where the curve is lowest
                promised.mark_text(align="left", dx=3, dy=-7, color="currentColor").encode(
                    x="from:Q", text="text:N"
                ),
            ]
        panels.append(alt.layer(*layers).properties(width=compute_panel_width(2), height=150))
    return alt.hconcat(*panels)


def plot_load_ramp(
    rows: Sequence[Mapping[str, Any]],
    x: str,
    limits: Mapping[str, float | None],
    ceiling: Interval,
    here: float | None,
) -> alt.TopLevelMixin:
    """Plot each column in `limits` over the load `x`, both logarithmic, limits dashed.

    Every panel shows the capacity, `ceiling`, with its interval, and `here`, the load of the plan.
    """
    data = pd.DataFrame(rows)
    scale = alt.Scale(
        type="log", base=2, nice=False, domain=[float(data[x].min()), float(data[x].max())]
    )
    across = alt.X("load:Q", title=x, scale=scale, axis=alt.Axis(values=list(data[x]), format="~g"))
    marks = (
        {f"ceiling {float(f'{ceiling.mid:.3g}'):,g}": (ceiling.mid, VIOLATED_COLOR)}
        if ceiling.mid
        else {}
    )
    marks |= {"this traffic": (here, MUTED_COLOR)} if here else {}
    panels = []
    for number, (y, limit) in enumerate(limits.items()):
        base = alt.Chart(pd.DataFrame({"load": data[x], **split_intervals(data[y])})).encode(
            x=across
        )
        height = alt.Y(
            "mid:Q", title=y, scale=alt.Scale(type="log", nice=False), axis=alt.Axis(tickCount=4)
        )
        layers: list[alt.Chart] = []
        if ceiling.mid:
            sides = pd.DataFrame(
                [{"load": max(ceiling.lo, data[x].min()), "end": min(ceiling.hi, data[x].max())}]
            )
            layers.append(
                alt.Chart(sides)
                .mark_rect(opacity=0.12, color=VIOLATED_COLOR)
                .encode(x=across, x2="end")
            )
        layers += [
            *plot_band(base, height),
            base.mark_point(size=35).encode(y=alt.Y("mid:Q")),
            *plot_limit_line(limit),
        ]
        for row, (name, (load, color)) in enumerate(marks.items()):
            spot = alt.Chart(pd.DataFrame([{"load": load, "name": name}])).encode(x=across)
            layers.append(spot.mark_rule(color=color, strokeDash=[2, 3]))
            if not number:
                text = spot.mark_text(y=-6 - 13 * row, align="right", dx=-4, color="currentColor")
                layers.append(text.encode(text="name:N"))
        panels.append(alt.layer(*layers).properties(width=compute_panel_width(2), height=95))
    return alt.concat(*panels, columns=2)


def plot_timelines(cases: Mapping[str, pd.DataFrame]) -> alt.TopLevelMixin:
    """Plot the running and waiting requests of one engine over time, a panel per case."""
    frame = pd.concat([data.assign(case=name) for name, data in cases.items()])
    base = alt.Chart(
        frame.melt(["Seconds", "case"], list(GAUGE_COLORS), "kind", "requests")
    ).encode(
        x=alt.X("Seconds:Q", title="seconds", scale=alt.Scale(nice=False)),
        y=alt.Y("requests:Q", title="requests", axis=alt.Axis(tickCount=4)),
        color=encode_color("kind:N", GAUGE_COLORS),
    )
    drawn = base.mark_line(strokeWidth=1.3, interpolate="step-after").properties(
        width=CHART_WIDTH_PX, height=50
    )
    return arrange_panels(drawn, "case", list(cases))
