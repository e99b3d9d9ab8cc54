"""Charts of a plan: its SLOs, the costs of candidates, and the scores of frameworks."""

import math

import altair as alt
import pandas as pd

from planner.analysis.layout_tables import get_slo_label
from planner.latency.performance import UNBOUNDED
from planner.planning.candidate import Candidate
from planner.planning.framework_choice import FrameworkChoice
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.slo import get_slo_status
from planner.ui.charts.base import (
    CATEGORY_COLORS,
    CHART_WIDTH_PX,
    MUTED_COLOR,
    OK_COLOR,
    VIOLATED_COLOR,
    cap_utilization,
    encode_color,
    plot_limit_line,
    plot_overflow_arrows,
)

SLO_STATUS_LABELS = {"kept": "meets", "at risk": "at risk", "broken": "misses"}
SLO_STATUS_COLORS = {"meets": OK_COLOR, "at risk": CATEGORY_COLORS[1], "misses": VIOLATED_COLOR}


def plot_slos(scenario: Scenario, candidate: Candidate) -> alt.TopLevelMixin:
    """Plot the utilization of every limit with its 80% interval."""
    performance, rows = candidate.prediction.performance, []
    for target in scenario.slo_targets:
        interval = (
            performance.get_for_display(target.metric, target.percentile)
            if performance
            else UNBOUNDED
        )
        if performance and not math.isnan(interval.mid):
            rows.append(
                (
                    str(target),
                    interval / target.seconds,
                    SLO_STATUS_LABELS[get_slo_status(target, interval)],
                )
            )
    names, parts, states = zip(*rows, strict=True) if rows else ((), (), ())
    data = cap_utilization(parts).assign(target=names, state=states)
    y = alt.Y("target:N", title=None, sort=None, axis=alt.Axis(labelLimit=220))
    base = alt.Chart(data, height=alt.Step(24)).encode(
        y=y, color=encode_color("state:N", SLO_STATUS_COLORS)
    )
    share = alt.X("lo:Q", title="share of the limit", axis=alt.Axis(format="%"))
    bars = base.mark_bar(height=10, opacity=0.35).encode(x=share, x2="hi")
    return alt.layer(
        bars,
        base.mark_point().encode(x="mid:Q"),
        plot_overflow_arrows(base),
        *plot_limit_line(1.0, "x"),
    )


def plot_prices(plan: Plan) -> alt.TopLevelMixin:
    """Plot the cost (GPUs, if prices are unknown) of the twelve best candidates, by feasibility."""
    shown = plan.candidates[:12]
    priced = all(candidate.usd_per_hour is not None for candidate in shown)
    rows = [
        (c.description, c.usd_per_hour if priced else c.prediction.num_gpus, get_slo_label(c))
        for c in shown
    ]
    data = pd.DataFrame(rows, columns=["deployment", "cost", "state"])
    base = alt.Chart(data, height=alt.Step(18), width=CHART_WIDTH_PX - 260).encode(
        x=alt.X("cost", title="USD per hour" if priced else "GPUs"),
        y=alt.Y("deployment", title=None, sort=None, axis=alt.Axis(labelLimit=400)),
        text=alt.Text("cost", format=",.2f" if priced else "d"),
    )
    label = base.mark_text(align="left", dx=4, color="currentColor")
    return base.mark_bar().encode(color=encode_color("state", SLO_STATUS_COLORS)) + label


def plot_framework_scores(choice: FrameworkChoice) -> alt.TopLevelMixin:
    """Plot the points of each framework; those that are ruled out are grey."""
    rows = [
        (
            score.title,
            0 if score.ruled_out else score.points,
            score.ruled_out or str(score.points),
            score.name == choice.chosen.name,
        )
        for score in choice.ranked
    ]
    data = pd.DataFrame(rows, columns=["framework", "points", "label", "chosen"])
    base = alt.Chart(data.assign(end=data["points"].clip(lower=0)), height=alt.Step(22))
    base = base.encode(y=alt.Y("framework", title=None, sort=None))
    bars = base.mark_bar().encode(
        x=alt.X("points", title="points", axis=alt.Axis(tickMinStep=1)),
        color=alt.condition("datum.chosen", alt.value(OK_COLOR), alt.value(MUTED_COLOR)),
    )
    return bars + base.mark_text(align="left", dx=4, color="currentColor").encode(
        x="end", text="label"
    )
