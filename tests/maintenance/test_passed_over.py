"""Why not another GPU, engine or format: each is named, and its sentence is what a replay of it says."""

import pytest
from shipped import answer_of, plan_of

from planner.answers import serialize_answer
from planner.answers.answer import Alternative
from planner.answers.words import explain_alternative
from planner.planning.alternatives import find_alternatives
from planner.planning.scenario import Scenario, load_scenario
from planner.planning.search import Plan, search_deployments
from planner.planning.tolerance import simulate_candidate
from planner.ui import plan_tables as tables
from planner.ui.plan_text import format_answer


def explain(plan: Plan, option: str) -> tuple[Alternative, str]:
    """The alternative of this name, and why it is none."""
    answer = answer_of(plan)
    (other,) = (each for each in answer.alternatives or () if each.option == option)
    return other, explain_alternative(answer, other)


def asked(**changes: object) -> Scenario:
    traffic = {"prompt_tokens": {"exactly": 800}, "output_tokens": {"exactly": 200}, "rate": 2}
    usual = {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "quantization": ["checkpoint", "fp8"],
        "workload": traffic,
    }
    return load_scenario("edge-8b-24gb", {**usual, **changes})


def test_each_engine_and_format_has_a_line_in_the_answer_and_in_the_summary() -> None:
    gpus = [{"gpu": "L40S", "at_most": 4}, {"gpu": "RTX-PRO-6000-Max-Q", "at_most": 4}]
    plan = search_deployments(
        asked(
            gpus=gpus,
            engine=["vllm", "sglang"],
            engine_version=None,
            kv_cache_dtype=["auto", "fp8_e4m3"],
        )
    )
    answer = answer_of(plan)
    lines = {each.option: explain_alternative(answer, each) for each in answer.alternatives or ()}
    assert {"fp8_e4m3 KV cache", "the model's own KV cache"} & lines.keys()
    assert {"sglang", "vllm"} & lines.keys()
    assert lines["RTX-PRO-6000-Max-Q"] == "no price known, so ranked last"
    assert serialize_answer(answer_of(plan))["why_not"] == lines
    assert (
        format_answer(answer_of(plan), detailed=True).count("\n  Alternative ")
        == len(lines)
        == len(tables.build_alternatives_table(answer_of(plan)))
    )


def test_a_format_that_the_scenario_lists_later_is_passed_over_for_that() -> None:
    plan = search_deployments(
        asked(quantization=["fp8", "checkpoint"], gpus=[{"gpu": "H100-SXM", "at_most": 1}])
    )
    _, reason = explain(plan, "the checkpoint's own weights")
    assert "meets the targets too" in reason and reason.endswith(
        "its weight format comes later in `quantization`"
    )


def test_a_format_that_changes_nothing_is_no_alternative() -> None:
    """Qwen3-32B-FP8 is published in FP8: "fp8 weights" once stood there as what does not start."""
    gpus = [{"gpu": "H100-SXM", "at_most": 2}]
    plan = search_deployments(asked(model="Qwen/Qwen3-32B-FP8", gpus=gpus))
    assert plan.chosen is not None
    assert not {"fp8 weights"} & {each.option for each in find_alternatives(plan)}


def test_a_kind_of_gpu_that_needs_several_machines_is_not_said_to_be_unable() -> None:
    """DeepSeek-R1's 671 GB go into two machines of 8 x 80 GB; a B200 machine alone holds them."""
    gpus = [{"gpu": "B200", "at_most": 8}, {"gpu": "H100-SXM", "at_most": 32}]
    plan = search_deployments(asked(model="deepseek-ai/DeepSeek-R1", gpus=gpus))
    assert plan.chosen is not None and plan.chosen.deployment.gpu.name == "B200"
    (other,) = (each for each in find_alternatives(plan) if each.option == "H100-SXM")
    assert other.kind == "not tried" and "several" in other.text


@pytest.mark.parametrize("name", ("chatbot-throughput", "edge-8b-24gb"))
def test_what_is_passed_over_misses_costs_more_or_comes_after(name: str) -> None:
    plan = plan_of(name)
    assert plan.chosen is not None
    found = {other.option: other for other in find_alternatives(plan)}
    assert {c.gpu.name for c in plan.scenario.gpus} - {
        plan.chosen.deployment.gpu.name
    } <= found.keys()
    for other in found.values():
        one = other.candidate
        assert one is not None
        if other.kind == "dearer":
            assert one.cost_key > plan.chosen.cost_key and one.deployment.num_replicas == 1
            continue
        assert one.cost_key <= plan.chosen.cost_key
        # in full, what misses clearly was looked at for short
        again = simulate_candidate(plan.scenario, one)
        assert again.is_feasible == one.is_feasible and (
            one.is_feasible or {*again.violated_constraints} & {*one.violated_constraints}
        )
        assert (other.kind == "meets") == one.is_confident
        if other.kind == "meets":
            assert one.rank_key > plan.chosen.rank_key and other.rank_reason


def test_what_another_format_would_gain_is_what_its_replay_says() -> None:
    level, traffic = (
        {"tpot": {"p95": 60}},
        {"prompt_tokens": {"exactly": 8000}, "output_tokens": {"exactly": 500}},
    )
    card = [{"gpu": "L40S", "at_most": 1}]
    changes = {
        "gpus": card,
        "kv_cache_dtype": ["auto", "fp8_e4m3"],
        "workload": {**traffic, "rate": 0.1},
    }
    plan = search_deployments(asked(quantization=["fp8"], service_level=level, **changes))
    (found,) = (each for each in find_alternatives(plan) if each.option == "fp8_e4m3 KV cache")
    _, reason = explain(plan, "fp8_e4m3 KV cache")
    assert plan.chosen is not None and found.candidate is not None
    again = [
        simulate_candidate(plan.scenario, c).prediction.performance
        for c in (found.candidate, plan.chosen)
    ]
    most, least = (one.capacity.mid for one in again if one and one.capacity)
    fast, slow = (round(one.tpot["p95"].mid * 1e3) for one in again if one)
    assert f"serves {most / least - 1:.0%} more" in reason
    assert f"p95 TPOT {fast} ms, not {slow} ms" in reason


def test_what_does_not_start_says_so() -> None:
    gpus = [{"gpu": "H100-SXM", "at_most": 8}, {"gpu": "RTX-3090", "at_most": 1}]
    plan = search_deployments(asked(model="meta-llama/Llama-3.3-70B-Instruct", gpus=gpus))
    other, reason = explain(plan, "RTX-3090")
    assert other.kind == "cannot start" and "GiB" in reason
