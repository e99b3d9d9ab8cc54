"""Charts of batching: one request, latencies over load, tails, a load ramp, gauges over time."""

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
    plot_lines,
    split_intervals,
)

PANEL_GAP_PX = 70
"""Width of a panel's axis and the space before it."""
MAX_PANEL_LIMIT_MULTIPLE = 3
"""Larger values, as multiples of the limit, are left out: they would flatten the rest."""


def plot_panels(
    rows: pd.DataFrame | Sequence[Mapping[str, Any]], x: str, limits: Mapping[str, float | None],
    marks: Mapping[str, float] | None = None,
    log: bool = True, columns: int = 2,
) -> alt.TopLevelMixin:  # fmt: skip
    """Plot a panel for each column in `limits`, dashed; `marks` names values of `x`."""
    data = pd.DataFrame(rows)
    places = pd.DataFrame({"at": list((marks or {}).values()), "name": list(marks or {})})
    middle = (data[x].min() * data[x].max()) ** 0.5 if log else data[x].max() / 2
    places["side"] = ["right" if at > middle else "left" for at in places["at"]]
    spots = alt.Chart(places.assign(height=range(len(places)))).encode(x=alt.X("at:Q", title=x))
    side, aside = alt.expr("datum.side"), alt.expr("datum.side == 'left' ? 4 : -4")
    names = spots.mark_text(
        y=alt.expr("-6 - 13 * datum.height"), align=side, dx=aside, color="currentColor"
    )
    named = (
        [
            spots.mark_rule(color=MUTED_COLOR, strokeDash=[2, 3]),
            names.encode(text=alt.Text("name:N")),
        ]
        if marks
        else []
    )
    drawn: list[alt.LayerChart | alt.FacetChart] = []
    for y, limit in limits.items():
        near = (
            data
            if limit is None
            else data[[value.mid <= MAX_PANEL_LIMIT_MULTIPLE * limit for value in data[y]]]
        )
        shown = (near if len(near) > 1 else data)[[x, y]]
        # bands end far above the curve and its limit
        top = MAX_PANEL_LIMIT_MULTIPLE * max(
            limit or 0.0, *(getattr(value, "mid", value) for value in shown[y])
        )
        cut: Any = [
            Interval(v.lo, v.mid, min(v.hi, top)) if isinstance(v, Interval) else v
            for v in shown[y]
        ]
        panel = plot_lines(
            shown.assign(**{y: cut}),
            x,
            y,
            limit=limit,
            log=log,
        )
        marked = named[:1] if drawn else named  # names stand above the first panel
        drawn.append(
            alt.layer(panel, *marked).properties(
                width=compute_panel_width(min(columns, len(limits))), height=120
            )
        )
    return alt.concat(*drawn, columns=columns).resolve_scale(x="shared")


def compute_panel_width(columns: int) -> int:
    """Return the width of each of `columns` panels in a row."""
    return (CHART_WIDTH_PX - PANEL_GAP_PX * (columns - 1)) // columns


def plot_token_gaps(cases: Mapping[str, pd.DataFrame]) -> alt.TopLevelMixin:
    """Plot the gaps between tokens of other requests over time, a panel per case."""
    rows = [
        data.assign(case=name, **split_intervals(data["Gap (ms)"])) for name, data in cases.items()
    ]
    flat = pd.concat(rows).drop(columns="Gap (ms)")
    flat["kind"] = flat["Prompt in it"].map(
        {True: "step with part of the prompt", False: "decode step"}
    )
    kind = encode_color("kind:N", ("decode step", "step with part of the prompt"))
    base = alt.Chart(flat).encode(
        x=alt.X("ms:Q", title="ms after the long prompt arrived"), color=kind
    )
    height = alt.Y("mid:Q", title="gap (ms)", axis=alt.Axis(tickCount=4))
    layers = [
        base.mark_rule(strokeWidth=1.5).encode(y=height),
        base.mark_rule(strokeWidth=6, opacity=0.25).encode(y=alt.Y("lo:Q"), y2=alt.Y2("hi")),
        base.mark_point(size=30).encode(y=alt.Y("mid:Q")),
    ]
    return arrange_panels(
        alt.layer(*layers).properties(width=CHART_WIDTH_PX, height=48), "case", list(cases)
    )


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
