"""Knobs turned one at a time on a plan: every figure is that of the changed deployment, and directions are physics."""

from dataclasses import replace

import pytest

from planner.analysis.sensitivity import (
    MEASURE_DIRECTIONS,
    MEASURE_LABELS,
    PLAN_LABEL,
    build_decision_table,
    compute_knob_effects,
    fix_lengths,
    reset_tuning,
    sweep_knobs,
)
from planner.memory.memory_plan import get_memory_plan
from planner.planning.evaluation import evaluate_candidate
from planner.planning.scenario import list_scenarios, load_scenario
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


def test_nothing_turned_is_the_engines_own():
    asked = load_scenario("long-documents")
    plain = reset_tuning(asked)
    assert (
        plain.quantizations == (None,)
        and plain.kv_cache_dtypes == ("auto",)
        and plain.speculation is None
    )
    best = search_analytically(replace(plain, gpus=asked.gpus)).best
    assert best.deployment.args.kv_cache_dtype in (None, "auto")
    assert get_memory_plan(best.deployment).can_start


def test_the_matrix_has_agents_and_fixed_lengths():
    """Lengths that are all alike need no more GPUs than those that spread around the same mean."""
    assert "coding-agents" in list_scenarios()
    asked = load_scenario("chat-70b")
    alike = fix_lengths(asked)
    rows = build_decision_table([asked, alike], search_analytically).to_dict("records")
    assert [row["scenario"] for row in rows] == ["chat-70b", "chat-70b, fixed lengths"]
    assert rows[0]["work"] == rows[1]["work"]
    assert float(rows[1]["USD per hour"]) <= float(rows[0]["USD per hour"])
    assert alike.workload.prompt.max_tokens == pytest.approx(asked.workload.prompt.mean)


def test_the_matrix_holds_each_scenario_against_no_knob_on_the_same_gpu():
    """The knobs alone make the difference: the GPU that the scenario names first stands beside it."""
    two = {"gpus": [{"gpu": "H200", "at_most": 8}, {"gpu": "H100-SXM", "at_most": 8}]}
    asked = load_scenario("chat-70b", two)
    (row,) = build_decision_table([asked], search_analytically).to_dict("records")
    chosen = search_analytically(asked).chosen
    own = next(each for each in asked.gpus if each.gpu == chosen.deployment.gpu)
    usd, usual = (
        chosen.usd_per_hour,
        search_analytically(reset_tuning(asked, own)).chosen.usd_per_hour,
    )
    assert row["USD per hour"] == f"{usd:,.2f}" and row["its USD per hour"] == f"{usual:,.2f}"
    assert row["saved (%)"] == round((1 - usd / usual) * 100)
    assert own.gpu.name in row["no knob turned, same GPU"]
    first = row["the first GPU instead"]
    assert ("H200" in first) if own.gpu.name != "H200" else (first == "")


def test_the_matrix_leaves_out_and_names_what_no_knob_changes():
    """What cannot be served, and what no knob makes cheaper, has no row and is still named."""
    asked = load_scenario("chat-70b")
    plain = replace(reset_tuning(asked), name="plain")
    hopeless = replace(
        load_scenario("chat-70b", {"service_level": {"ttft": {"p95": 1}}}), name="hopeless"
    )
    table = build_decision_table([plain, hopeless], search_analytically)
    assert table.empty
    assert "plain (costs the same with no knob turned)" in table.attrs["left_out"]
    assert "hopeless (no plan meets its targets)" in table.attrs["left_out"]
