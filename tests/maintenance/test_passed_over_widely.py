"""What `test_passed_over.py` looks at in small, more widely."""

import pytest
from shipped import plan_of
from test_passed_over import asked, explain

from planner.planning.alternatives import find_alternatives
from planner.planning.search import search_deployments
from planner.planning.tolerance import simulate_candidate


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
