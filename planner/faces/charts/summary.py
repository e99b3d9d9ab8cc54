"""Charts of the answer: promises against predictions, what candidates cost, how frameworks score."""

import math

import altair as alt
import pandas as pd

from planner.faces.charts.base import BAD, GOOD, MUTED, PALETTE, WIDTH, colored, dashed, further, shares
from planner.latency.performance import GROWING
from planner.planning.candidate import Candidate, held
from planner.planning.framework import FrameworkChoice
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.studies.layout_study import state

STATES = {"kept": "meets", "at risk": "at risk", "broken": "misses"}
VERDICTS = {"meets": GOOD, "at risk": PALETTE[1], "misses": BAD}


def promises(scenario: Scenario, candidate: Candidate) -> alt.TopLevelMixin:
    """Each target's prediction with its 80% interval, as a share of its limit."""
    performance, rows = candidate.prediction.performance, []
    for target in scenario.service_level:
        told = performance.told(target.metric, target.percentile) if performance else GROWING
        if performance and not math.isnan(told.mid):
            rows.append((str(target), told / target.seconds, STATES[held(target, told)]))
    names, parts, states = zip(*rows, strict=True) if rows else ((), (), ())
    data = shares(parts).assign(target=names, state=states)
    y = alt.Y("target:N", title=None, sort=None, axis=alt.Axis(labelLimit=220))
    base = alt.Chart(data, height=alt.Step(24)).encode(y=y, color=colored("state:N", VERDICTS))
    share = alt.X("lo:Q", title="share of the limit", axis=alt.Axis(format="%"))
    bars = base.mark_bar(height=10, opacity=0.35).encode(x=share, x2="hi")
    return alt.layer(bars, base.mark_point().encode(x="mid:Q"), further(base), *dashed(1.0, "x"))


def prices(plan: Plan) -> alt.TopLevelMixin:
    """USD per hour (GPUs, where no price is known) of the twelve best, and whether each meets the service level."""
    shown = plan.candidates[:12]
    priced = all(candidate.usd_per_hour is not None for candidate in shown)
    rows = [(c.what, c.usd_per_hour if priced else c.prediction.gpus, state(c)) for c in shown]
    data = pd.DataFrame(rows, columns=["deployment", "cost", "state"])
    base = alt.Chart(data, height=alt.Step(18), width=WIDTH - 260).encode(
        x=alt.X("cost", title="USD per hour" if priced else "GPUs"),
        y=alt.Y("deployment", title=None, sort=None, axis=alt.Axis(labelLimit=400)),
        text=alt.Text("cost", format=",.2f" if priced else "d"),
    )
    label = base.mark_text(align="left", dx=4, color="currentColor")
    return base.mark_bar().encode(color=colored("state", VERDICTS)) + label


def frameworks(choice: FrameworkChoice) -> alt.TopLevelMixin:
    """Each framework's points, those that cannot serve on these GPUs in grey."""
    told = [(each.title, each.name, each.ruled_out, each.points) for each in choice.ranked]
    rows = [(title, 0 if out else n, out or str(n), name == choice.chosen.name) for title, name, out, n in told]
    data = pd.DataFrame(rows, columns=["framework", "points", "label", "chosen"])
    base = alt.Chart(data.assign(end=data["points"].clip(lower=0)), height=alt.Step(22))
    base = base.encode(y=alt.Y("framework", title=None, sort=None))
    bars = base.mark_bar().encode(
        x=alt.X("points", title="points", axis=alt.Axis(tickMinStep=1)),
        color=alt.condition("datum.chosen", alt.value(GOOD), alt.value(MUTED)),
    )
    return bars + base.mark_text(align="left", dx=4, color="currentColor").encode(x="end", text="label")
