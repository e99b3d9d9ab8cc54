"""Knobs turned one at a time on a plan: every figure is that of the changed deployment, and directions are physics."""

import pytest

from planner.analysis.sensitivity import (
    MEASURE_DIRECTIONS,
    MEASURE_LABELS,
    PLAN_LABEL,
    compute_knob_effects,
    sweep_knobs,
)
from planner.planning.evaluation import evaluate_candidate
from planner.planning.scenario import load_scenario
from planner.planning.search import search_analytically
from planner.planning.search_space import RejectedOption, generate_search_options


@pytest.fixture(scope="module")
def plan():
    return search_analytically(load_scenario("chat-70b"))


@pytest.fixture(scope="module")
def turned(plan):
    return sweep_knobs(plan.scenario, plan.chosen).set_index(["knob", "setting"])


def test_figures_are_those_of_the_changed_deployment(plan, turned):
    deployment = plan.chosen.deployment
    half = deployment.with_args(max_num_seqs=deployment.args.max_num_seqs // 2)
    found = evaluate_candidate(plan.scenario, half, half.layout.replicas).prediction.performance
    row = turned.loc[("max_num_seqs", f"{half.args.max_num_seqs}")]
    assert row["p95 TTFT (ms)"] == pytest.approx(found.ttft["p95"].mid * 1e3)
    assert row["output tokens/s at most"] == pytest.approx(
        found.capacity.mid * plan.scenario.workload.output.mean
    )


def test_directions_are_those_of_the_physics(turned):
    base = turned.loc[(PLAN_LABEL, "")]
    pool, served, cost = (MEASURE_LABELS[name] for name in ("KV cache", "throughput", "cost"))
    assert turned.loc[("gpu_memory_utilization", "0.95"), pool] > base[pool]
    assert turned.loc[("gpu_memory_utilization", "0.8"), pool] < base[pool]
    assert turned.loc[("replicas", "2"), served] == pytest.approx(2 * base[served], rel=0.01)
    assert turned.loc[("replicas", "2"), cost] == pytest.approx(base[cost], rel=0.01)
    assert turned.loc[("enforce_eager", "True"), served] < base[served]
    assert turned.loc[("tensor parallel", "8"), MEASURE_LABELS["ITL"]] < base[MEASURE_LABELS["ITL"]]


def legal(scenario):
    found = generate_search_options(scenario, lambda *_: True)
    return (one for one in found if not isinstance(one, RejectedOption))


def test_one_gpu_has_no_half():
    """A plan of TP1 is never turned to TP0."""
    asked = load_scenario("edge-8b-24gb")
    single = next(one for one, *_ in legal(asked) if one.layout.tp == 1)
    turned = sweep_knobs(asked, evaluate_candidate(asked, single, 1))
    assert "0" not in set(turned.loc[turned["knob"] == "tensor parallel", "setting"])


def test_experts_stay_over_all_ranks_of_attention_data_parallelism():
    changes = {
        "model": "deepseek-ai/DeepSeek-V3",
        "quantization": ["checkpoint"],
        "gpus": [{"gpu": "H200", "at_most": 16}],
    }
    asked = load_scenario("chat-70b", changes)
    wide = next(one for one, *_ in legal(asked) if one.layout.dp == 8 and one.layout.ep == 8)
    turned = sweep_knobs(asked, evaluate_candidate(asked, wide, 1))
    assert {"max_num_seqs", "replicas"} <= set(turned["knob"])


def test_effects_say_what_helps(plan, turned):
    told = compute_knob_effects(turned.reset_index())
    assert set(told["measure"]) == set(MEASURE_DIRECTIONS)
    finite = told[told["change"].abs() < 1e6]
    for _, row in finite.iterrows():
        assert row["benefit"] == pytest.approx(MEASURE_DIRECTIONS[row["measure"]] * row["change"])
    eager = told[told["knob"] == "enforce_eager: True"].set_index("measure")
    if turned.loc[("enforce_eager", "True"), "note"] == "overloaded":
        assert eager.loc["TTFT", "told"] == "overloaded"
