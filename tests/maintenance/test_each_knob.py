"""Knobs turned one at a time on a plan: every figure is that of the changed deployment, and directions are physics."""

import pytest

from planner.analysis.sensitivity import MEASURE_DIRECTIONS, sweep_knobs
from planner.planning.evaluation import evaluate_candidate
from planner.planning.scenario import load_scenario
from planner.planning.search import search_analytically
from planner.planning.search_space import RejectedOption, generate_search_options


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
    assert changes["TTFT p95"] == pytest.approx(found.ttft["p95"].mid / own.ttft["p95"].mid - 1)
    assert changes["throughput"] == pytest.approx(found.capacity.mid / own.capacity.mid - 1)


def test_directions_are_those_of_the_physics(turned):
    change = turned["change"]
    assert change["gpu_memory_utilization: 0.95", "KV cache"] > 0
    assert change["gpu_memory_utilization: 0.8", "KV cache"] < 0
    assert change["replicas: 2", "throughput"] == pytest.approx(1, rel=0.01)
    assert change["replicas: 2", "cost"] == pytest.approx(0, abs=0.01)
    assert change["enforce_eager: True", "throughput"] < 0
    assert change["tensor parallel: 8", "ITL p99"] < 0


def test_effects_say_what_helps(turned):
    for (_, measure), row in turned[turned["change"].abs() < 1e6].iterrows():
        benefit = MEASURE_DIRECTIONS[measure] * row["change"]
        effect = "same" if abs(benefit) < 0.005 else "helps" if benefit > 0 else "hurts"
        assert row["effect"] == effect


def legal(scenario):
    found = generate_search_options(scenario, lambda *_: True)
    return (one for one in found if not isinstance(one, RejectedOption))


def test_one_gpu_has_no_half():
    """A plan of TP1 is never turned to TP0."""
    asked = load_scenario("edge-8b-24gb")
    single = next(one for one, *_ in legal(asked) if one.layout.tp == 1)
    turned = sweep_knobs(asked, evaluate_candidate(asked, single, 1))
    assert "tensor parallel: 0" not in set(turned["knob"])


def test_experts_stay_over_all_ranks_of_attention_data_parallelism():
    changes = {
        "model": "deepseek-ai/DeepSeek-V3",
        "quantization": ["checkpoint"],
        "gpus": [{"gpu": "H200", "at_most": 16}],
    }
    asked = load_scenario("chat-70b", changes)
    wide = next(one for one, *_ in legal(asked) if one.layout.dp == 8 and one.layout.ep == 8)
    turned = sweep_knobs(asked, evaluate_candidate(asked, wide, 1))
    assert {"max_num_seqs", "replicas"} <= {knob.partition(":")[0] for knob in turned["knob"]}
