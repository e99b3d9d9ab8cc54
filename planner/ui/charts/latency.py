"""Charts of batching: one request, latencies over load, and the effect of a long prompt."""

from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from planner.core.intervals import Interval
from planner.ui.charts.base import (
    CATEGORY_COLORS,
    CHART_WIDTH_PX,
    MUTED_COLOR,
    arrange_panels,
    encode_color,
    plot_limit_line,
    plot_lines,
    split_intervals,
)

PANEL_GAP_PX = 70
"""Width of a panel's axis and the space before it."""
MAX_PANEL_LIMIT_MULTIPLE = 3
"""Larger values, as multiples of the limit, are left out: they would flatten the rest."""


def plot_request_timeline(
    first: float, gap: float, last: float, tokens: float
) -> alt.TopLevelMixin:
    """Plot a request over time (ms): its TTFT, the first ten of its `tokens`, and its end."""
    arrivals = [first + gap * n for n in range(max(min(10, round(tokens)), 2))]
    scale = alt.Scale(domain=[0, arrivals[-1] + gap], nice=False)
    x = alt.X("ms:Q", title="ms after the request was sent", scale=scale)

    def at(y: float, ms: list[float], text: str = "", **more: list[float]) -> alt.Chart:
        return alt.Chart(pd.DataFrame({"ms": ms, **more}), height=84).encode(
            x=x, y=alt.value(y), text=alt.value(text)
        )

    end = f"... {tokens:,.0f} tokens: E2E {last / 1e3:,.2f} s"
    return alt.layer(
        at(42, [0], end=[first]).mark_bar(height=22, color=CATEGORY_COLORS[1]).encode(x2="end"),
        at(42, arrivals).mark_tick(thickness=2, size=22, color=CATEGORY_COLORS[0]),
        at(20, [0], f"TTFT {first:,.0f} ms").mark_text(align="left", dx=2, color="currentColor"),
        at(66, [arrivals[0]], end=[arrivals[1]])
        .mark_rule(strokeWidth=2, color=CATEGORY_COLORS[0])
        .encode(x2="end"),
        at(78, [arrivals[0]], f"ITL {gap:,.1f} ms").mark_text(align="left", color="currentColor"),
        at(20, [arrivals[-1] + gap], end).mark_text(align="right", dx=-4, color="currentColor"),
    )


def plot_panels(
    data: pd.DataFrame, x: str, limits: Mapping[str, float | None],
    marks: Mapping[str, float] | None = None,
    log: bool = True, columns: int = 2,
) -> alt.TopLevelMixin:  # fmt: skip
    """Plot a panel for each column in `limits`, dashed; `marks` names values of `x`."""
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
        panel = plot_lines(
            _cut_bands((near if len(near) > 1 else data)[[x, y]], y, limit),
            x,
            y,
            limit=limit,
            log=log,
        )
        shown = named[:1] if drawn else named  # names stand above the first panel
        drawn.append(
            alt.layer(panel, *shown).properties(
                width=compute_panel_width(min(columns, len(limits))), height=120
            )
        )
    return alt.concat(*drawn, columns=columns).resolve_scale(x="shared")


def _cut_bands(data: pd.DataFrame, y: str, limit: float | None) -> pd.DataFrame:
    """Return `data` with the bands of `y` cut off far above its curve and its limit."""
    top = MAX_PANEL_LIMIT_MULTIPLE * max(
        limit or 0.0, *(getattr(value, "mid", value) for value in data[y])
    )
    cut: Any = [
        Interval(v.lo, v.mid, min(v.hi, top)) if isinstance(v, Interval) else v for v in data[y]
    ]
    return data.assign(**{y: cut})


def compute_panel_width(columns: int) -> int:
    """Return the width of each of `columns` panels in a row."""
    return (CHART_WIDTH_PX - PANEL_GAP_PX * (columns - 1)) // columns


def plot_pace_throughput(
    load: pd.DataFrame, here: pd.DataFrame, tpot: str, limit: float | None
) -> alt.TopLevelMixin:
    """Plot TPOT over the throughput of a replica as its load grows; `here` marks the plan."""

    def points(data: pd.DataFrame) -> alt.Chart:
        flat = pd.DataFrame(
            {
                "made": [value.mid for value in data["Output tokens/s"]],
                **split_intervals(data[tpot]),
            }
        )
        x = alt.X("made:Q", title="Output tokens/s of one replica")
        return alt.Chart(flat.assign(n=list(data["Requests in flight"]))).encode(x=x)

    height, spot = alt.Y("mid:Q", title=tpot), points(here)
    layers = [
        points(load).mark_line().encode(y=height, order=alt.Order("n:Q")),
        spot.mark_rule(color=CATEGORY_COLORS[1], strokeWidth=2).encode(
            y=alt.Y("lo:Q"), y2=alt.Y2("hi")
        ),
        spot.mark_point(color=CATEGORY_COLORS[1], size=110).encode(y=alt.Y("mid:Q")),
    ]
    return alt.layer(*layers, *plot_limit_line(limit))


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
