"""What tables and charts show of a plan are the plan's own figures."""

import pandas as pd
import pytest
from shipped import drawn_rows, plan_of

from planner.analysis import load_curves
from planner.analysis.load_curves import get_load
from planner.core.intervals import Interval
from planner.parallelism.sharding import compute_pipeline_bubble
from planner.planning.plan import Plan
from planner.ui.charts import base as charts


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("edge-8b-24gb")


# -------------------------------------------------------------------------------------------------------------
# tables


def test_a_pipeline_of_p_stages_is_idle_p_minus_1_of_m_plus_p_minus_1() -> None:
    """GPipe (arXiv 1811.06965): the bubble is (p - 1) / (m + p - 1)."""
    assert [compute_pipeline_bubble(4, m) for m in (1, 12)] == pytest.approx([0.75, 3 / 15])


# -------------------------------------------------------------------------------------------------------------
# charts


def test_a_line_has_its_interval_and_its_limit() -> None:
    data = pd.DataFrame({"load": [1, 2], "ms": [Interval(1, 2, 4), Interval(2, 3, 5)]})
    chart = charts.plot_lines(data, "load", "ms", limit=4.5)
    rows = drawn_rows(chart, "load")
    assert [(rows[n]["lo"], rows[n]["mid"], rows[n]["hi"]) for n in (1, 2)] == [
        (1, 2, 4),
        (2, 3, 5),
    ]
    assert 4.5 in drawn_rows(chart, "limit")


def test_no_curve_goes_through_a_load_that_the_closed_form_cannot_reach(
    monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    best = plan.best
    assert best is not None
    performance = best.prediction.performance
    assert performance is not None
    target, rate = plan.scenario.slo_targets[0], get_load(plan.scenario.workload)[1]
    for reached, drawn in ((0.6, False), (1.2, True)):
        points = [(rate * reached * share / 5, performance) for share in range(1, 6)]
        monkeypatch.setattr(load_curves, "sweep_performance", lambda *_, points=points: points)
        assert bool(load_curves.sweep_stated_latency(plan.scenario, best, target)) is drawn
