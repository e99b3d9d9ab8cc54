"""The largest load is one that meets the targets, more does not, and an option more never lowers it."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shipped import plan_once, small_plan, small_scenario

from planner.latency.step_model import build_step_model
from planner.planning.growth import find_even_odds
from planner.planning.max_load import find_largest, find_max_load, round_figure
from planner.planning.plan import Plan
from planner.planning.scenario import parse_scenario
from planner.planning.simulation_runs import simulate_once
from planner.planning.slo import compute_tolerance

ONE_L40S = {"gpus.0.at_most": 1, "service_level": {"ttft": {"p95": 2000}, "tpot": {"p95": 60}}}


@given(most=st.floats(2e-3, 1e5), start=st.floats(1e-3, 1e6))
def test_a_threshold_is_found_from_wherever_the_search_starts(most: float, start: float) -> None:
    found = find_largest(lambda value: value <= most, start)
    assert found <= most < found * 1.0101


@given(value=st.floats(1e-3, 1e6))
def test_a_figure_is_rounded_to_what_is_easier(value: float) -> None:
    assert value / 1.0101 < round_figure("rate", value) <= value * (1 + 1e-8)
    assert round_figure("limit", value) <= value * (1 + 1e-8)
    assert round_figure("concurrency", value) == max(math.floor(value + 1e-9), 1)


def test_a_deployment_meets_its_target_up_to_its_largest_load() -> None:
    """With steps as slow as the probability allows for, and other requests than those that judged it."""
    scenario = small_scenario({
        "gpus.0.at_most": 1, "headroom": 0, "workload.rate": 1,
        "service_level": {"tpot": {"mean": 45}},
    })  # fmt: skip
    chosen = plan_once(scenario).chosen
    assert chosen
    deployment = chosen.deployment
    most = find_max_load(scenario, chosen)
    step = build_step_model(deployment, scenario.workload.with_rate(most))
    slow = math.exp(step.sigma_tpot * compute_tolerance(0.8))
    for more, meets in ((0.97, True), (1.05, False)):
        loaded = scenario.workload.with_rate(more * most)
        run = simulate_once(deployment, loaded, 6000, step_cost_factor=slow, seed=901)
        assert (run.trim(300, 200).summarize("tpot")["mean"] <= 0.045) == meets


def test_less_probable_loads_and_more_replicas_are_larger() -> None:
    plan = small_plan(ONE_L40S | {"workload.rate": 2})
    chosen = plan.chosen
    assert chosen
    expected, likely, safe = (find_max_load(plan.scenario, chosen, p) for p in (0.0, 0.8, 0.95))
    assert expected > likely > safe > 0
    twice = find_max_load(plan.scenario, chosen.deployment.with_replicas(2), 0.8)
    assert twice == pytest.approx(2 * likely, rel=0.05)


ONE_LIMIT: dict[str, Any] = {
    "model": "mistralai/Mistral-Small-24B-Instruct-2501", "quantization": ["checkpoint", "fp8"],
    "gpus": [{"gpu": "L40S", "at_most": 1}], "service_level": {"tpot": {"p95": 50}},
    "workload": {"prompt_tokens": {"mean": 1200}, "output_tokens": {"mean": 250}, "rate": "max"},
}  # fmt: skip


def test_odds_at_the_largest_rate_and_at_even_odds_are_those_of_plans() -> None:
    """Whoever states the rate that was found, and the one at even odds, gets the same answer."""
    most = plan_once(parse_scenario(ONE_LIMIT, "max"))
    even = find_even_odds(most)
    assert most.verdict == "holds" and even
    assert even.load >= most.scenario.workload.rate
    assert even.unlimited_here.keys() == {"p95 TTFT"} == even.unlimited.keys()

    def plan_at(rate: float) -> Plan:
        stated = {**ONE_LIMIT, "workload": {**ONE_LIMIT["workload"], "rate": rate}}
        return plan_once(parse_scenario(stated, "stated"))

    stated = plan_at(most.scenario.workload.rate)
    assert stated.chosen and stated.probability == most.probability
    assert stated.performance.get("ttft", "p95") == even.unlimited_here["p95 TTFT"]
    likely = plan_at(even.load)
    assert likely.verdict == "at_risk" and likely.probability >= 0.5


def test_even_odds_lie_where_the_expected_pace_reaches_its_limit() -> None:
    """At 1.14 a second an L40S with the engine's own arguments is expected to take 50 ms a token."""
    even = find_even_odds(plan_once(parse_scenario(ONE_LIMIT, "max")))
    assert even and 1.14 <= even.load < 1.14 * 1.5
    assert even.probability == pytest.approx(0.5, abs=0.03)
    assert even.unlimited_here["p95 TTFT"].mid < 2


def test_users_are_whole_and_a_limit_is_the_shortest() -> None:
    users = plan_once(small_scenario(
        ONE_L40S | {"workload.rate": None, "workload.concurrency": "max"}
    ))  # fmt: skip
    assert users.verdict == "holds" and isinstance(users.scenario.workload.concurrency, int)
    limit = plan_once(small_scenario(ONE_L40S | {
        "workload.rate": 2, "service_level": {"tpot": {"p95": "best"}, "ttft": {"p95": 2000}},
    }))  # fmt: skip
    shortest, others = limit.scenario.slo_targets[0], limit.scenario.slo_targets[1:]
    assert limit.verdict == "holds"
    tighter = replace(shortest, seconds=shortest.seconds / 1.05)
    shorter = replace(limit.scenario, slo_targets=(tighter, *others), found_figure=None)
    assert plan_once(shorter).verdict != "holds"
