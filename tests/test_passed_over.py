"""Why not another GPU, engine or format: each is named, and its sentence is what a replay of it says."""

import pytest
from shipped import plan_of

from planner.analysis import plan_summary as summary
from planner.planning.alternatives import explain_alternatives
from planner.planning.scenario import Scenario, load_scenario
from planner.planning.search import search_deployments
from planner.planning.tolerance import simulate_candidate
from planner.ui.plan_json import serialize_plan
from planner.ui.plan_text import format_plan


@pytest.mark.parametrize("name", ("chatbot-throughput", "edge-8b-24gb"))
def test_what_is_passed_over_misses_costs_more_or_comes_after(name: str) -> None:
    plan = plan_of(name)
    assert plan.chosen is not None
    found = {other.option: other for other in explain_alternatives(plan)}
    assert {c.gpu.name for c in plan.scenario.gpus} - {
        plan.chosen.deployment.gpu.name
    } <= found.keys()
    for other in found.values():
        one = other.candidate
        assert one is not None
        if "its smallest deployment" in other.reason:
            assert one.cost_key > plan.chosen.cost_key and one.deployment.num_replicas == 1
            continue
        assert one.cost_key <= plan.chosen.cost_key
        again = simulate_candidate(
            plan.scenario, one
        )  # in full, what misses clearly was looked at for short
        assert again.is_feasible == one.is_feasible and (
            one.is_feasible or {*again.violated_constraints} & {*one.violated_constraints}
        )
        assert (
            all(miss in other.reason for miss in one.violations)
            if one.violations
            else one.rank_key > plan.chosen.rank_key
        )


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
    lines = dict(
        line.split(": ", 1) for line in (str(other) for other in explain_alternatives(plan))
    )
    assert {"fp8_e4m3 KV cache", "sglang"} <= lines.keys() or {
        "fp8_e4m3 KV cache",
        "vllm",
    } <= lines.keys()
    assert lines["RTX-PRO-6000-Max-Q"] == "no price known, so ranked last"
    assert serialize_plan(plan)["why_not"] == lines
    assert (
        format_plan(plan, detailed=True).count("\n  Alternative ")
        == len(lines)
        == len(summary.build_alternatives_table(plan))
    )


def test_a_format_that_the_scenario_lists_later_is_passed_over_for_that() -> None:
    plan = search_deployments(
        asked(quantization=["fp8", "checkpoint"], gpus=[{"gpu": "H100-SXM", "at_most": 1}])
    )
    (other,) = (
        other
        for other in explain_alternatives(plan)
        if other.option == "the checkpoint's own weights"
    )
    assert "meets the targets too" in other.reason and other.reason.endswith(
        "its weight format comes later in `quantization`"
    )


def test_what_another_format_would_gain_is_what_its_replay_says() -> None:
    level, traffic = (
        {"tpot": {"p95": 60}},
        {"prompt_tokens": {"exactly": 8000}, "output_tokens": {"exactly": 500}},
    )
    card = [{"gpu": "L40S", "at_most": 1}]
    changes = {
        "gpus": card,
        "kv_cache_dtype": ["auto", "fp8_e4m3"],
        "workload": {**traffic, "rate": 0.2},
    }
    plan = search_deployments(asked(quantization=["fp8"], service_level=level, **changes))
    (other,) = (
        other for other in explain_alternatives(plan) if other.option == "fp8_e4m3 KV cache"
    )
    assert plan.chosen is not None and other.candidate is not None
    again = [
        simulate_candidate(plan.scenario, c).prediction.performance
        for c in (other.candidate, plan.chosen)
    ]
    most, least = (one.capacity.mid for one in again if one and one.capacity)
    fast, slow = (round(one.tpot["p95"].mid * 1e3) for one in again if one)
    assert f"serves {most / least - 1:.0%} more" in other.reason
    assert f"p95 TPOT {fast} ms, not {slow} ms" in other.reason


def test_what_does_not_start_says_so() -> None:
    gpus = [{"gpu": "H100-SXM", "at_most": 8}, {"gpu": "RTX-3090", "at_most": 1}]
    plan = search_deployments(asked(model="meta-llama/Llama-3.3-70B-Instruct", gpus=gpus))
    (why,) = (other.reason for other in explain_alternatives(plan) if other.option == "RTX-3090")
    assert "GiB" in why
