"""Charts of memory and layouts: what fits, their communication, and cost over latency."""

from collections.abc import Mapping

import altair as alt
import pandas as pd

from planner.analysis.layout_tables import find_pareto_front
from planner.planning.candidate import Candidate
from planner.ui.charts.base import (
    CATEGORY_COLORS,
    CHART_WIDTH_PX,
    MUTED_COLOR,
    OK_COLOR,
    VIOLATED_COLOR,
    arrange_panels,
    encode_color,
    plot_limit_line,
    plot_lines,
    plot_memory_budget,
    split_intervals,
)
from planner.ui.charts.summary import SLO_STATUS_COLORS

LAYOUT_STATUS_COLORS = {**SLO_STATUS_COLORS, "does not fit": MUTED_COLOR}
MAX_LAYOUT_LIMIT_MULTIPLE = 4
"""Layouts with larger latencies, as multiples of the limit, are not drawn."""


def plot_legal_layouts(data: pd.DataFrame) -> alt.TopLevelMixin:
    """Plot the GPUs that each legal TP x PP needs, and whether it is feasible; a panel per GPU."""
    cells = data[["GPU", "TP", "PP", "GPUs", "Targets", "Chosen"]]
    base = alt.Chart(cells).encode(
        x=alt.X("PP:O", title="pipeline stages (PP)", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("TP:O", title=None, sort=list(dict.fromkeys(data["TP"]))),
    )
    tiles = base.mark_rect(opacity=0.55, stroke="white", strokeWidth=1)
    tiles = tiles.encode(color=encode_color("Targets", LAYOUT_STATUS_COLORS, data["Targets"]))
    text = base.mark_text(fontSize=11, color="currentColor").encode(text="GPUs:Q")
    ring = base.mark_rect(filled=False, stroke="currentColor", strokeWidth=2).transform_filter(
        "datum.Chosen"
    )
    gpus = list(dict.fromkeys(data["GPU"]))
    abreast = min(len(gpus), 3)
    wide = min((CHART_WIDTH_PX - 90) // abreast - 16, 46 * int(max(data["PP"].max(), 4)))
    panel = alt.layer(tiles, text, ring).properties(width=wide, height=alt.Step(24))
    return arrange_panels(panel, "GPU", gpus, abreast).resolve_axis(x="independent")


def plot_candidate_memory(candidates: Mapping[str, Candidate]) -> alt.TopLevelMixin:
    """Plot the memory budget of the fullest GPU of each candidate."""
    drawn = plot_memory_budget(
        {name: candidate.prediction.memory for name, candidate in candidates.items()}
    )
    return drawn.properties(height=alt.Step(16))


def plot_communication(data: pd.DataFrame) -> alt.TopLevelMixin:
    """Plot the communication time of each layout by link, a panel per kind of step."""
    order = list(dict.fromkeys(data["Link"]))
    base = alt.Chart(data).encode(
        x=alt.X("Messages (ms):Q", title="ms of messages in one step", axis=alt.Axis(tickCount=5)),
        y=alt.Y("Layout", title=None, sort=list(dict.fromkeys(data["Layout"]))),
        yOffset=alt.YOffset("Link", sort=order),
    )
    bars = base.mark_bar().encode(
        color=alt.Color("Link", title=None, sort=order, scale=alt.Scale(domain=order))
    )
    label = base.mark_text(align="left", dx=3, fontSize=9, color="currentColor").encode(
        text="label"
    )
    panel = alt.layer(bars, label).properties(width=(CHART_WIDTH_PX - 90) // 2, height=alt.Step(13))
    labelled = data.assign(label=data["Share of the step (%)"].map("{:.0f}%".format))
    columns = alt.Column("Step", title=None, sort=None)
    return panel.properties(data=labelled).facet(column=columns).resolve_scale(x="independent")


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


def plot_pool_sizes(data: pd.DataFrame) -> alt.TopLevelMixin:
    """Plot limit utilization by the numbers of workers of both pools; the chosen one is framed."""
    base = alt.Chart(data.drop(columns="what is missing")).encode(
        x=alt.X("prefill workers:O", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("decode workers:O", sort="descending"),
    )
    tiles = base.mark_rect(opacity=0.55, stroke="white", strokeWidth=1)
    tiles = tiles.encode(color=encode_color("targets", SLO_STATUS_COLORS, data["targets"]))
    share = alt.Text("share of the tightest limit:Q", format=".0%")
    text = base.mark_text(fontSize=10, dy=-6, color="currentColor").encode(text=share)
    gpus = base.mark_text(fontSize=9, dy=8, color="currentColor").transform_calculate(
        label="datum.GPUs + ' GPUs'"
    )
    ring = base.mark_rect(filled=False, stroke="currentColor", strokeWidth=2).transform_filter(
        "datum.chosen"
    )
    layers = alt.layer(tiles, text, gpus.encode(text="label:N"), ring)
    return layers.properties(width=CHART_WIDTH_PX - 160, height=alt.Step(36))
