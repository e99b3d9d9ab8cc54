"""Knobs turned one at a time on a plan: every figure is that of the changed deployment, and directions are physics."""

import pytest

from planner.analysis.sensitivity import MEASURE_DIRECTIONS, sweep_knobs
from planner.planning.evaluation import evaluate_candidate
from planner.planning.scenario import load_scenario
from planner.planning.search import search_analytically


@pytest.fixture(scope="module")
def plan():
    return search_analytically(load_scenario("chat-70b"))


@pytest.fixture(scope="module")
def turned(plan):
    return sweep_knobs(plan.scenario, plan.chosen).set_index(["knob", "measure"])


def test_figures_are_those_of_the_changed_deployment(plan, turned):
    deployment = plan.chosen.deployment
    half = deployment.with_args(max_num_seqs=deployment.args.max_num_seqs // 2)
    own, found = (
        evaluate_candidate(plan.scenario, each, each.layout.replicas).prediction.performance
        for each in (deployment, half)
    )
    changes = turned["change"].loc[f"max_num_seqs: {half.args.max_num_seqs}"]
    assert changes["TTFT p95"] == pytest.approx(
        found.get("ttft", "p95").mid / own.get("ttft", "p95").mid - 1
    )
    assert changes["throughput"] == pytest.approx(found.capacity.mid / own.capacity.mid - 1)


def test_directions_are_those_of_the_physics(turned):
    change = turned["change"]
    assert change["gpu_memory_utilization: 0.95", "KV cache"] > 0
    assert change["gpu_memory_utilization: 0.8", "KV cache"] < 0
    assert change["enforce_eager: True", "throughput"] < 0


def test_effects_say_what_helps(turned):
    for (_, measure), row in turned[turned["change"].abs() < 1e6].iterrows():
        benefit = MEASURE_DIRECTIONS[measure] * row["change"]
        effect = "same" if abs(benefit) < 0.005 else "helps" if benefit > 0 else "hurts"
        assert row["effect"] == effect
