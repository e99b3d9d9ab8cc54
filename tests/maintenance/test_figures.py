"""How far traffic may grow, and figures that stand beside others."""

import re
from dataclasses import replace

import pytest
from shipped import plan_of, plan_once, sampled

from planner.answers.words import describe_growth_end
from planner.core.number_format import format_number, format_probability
from planner.planning.candidate import Candidate
from planner.planning.growth import find_growth_limit
from planner.planning.plan import Plan
from planner.planning.tolerance import state_deployment

RATE_TOLERANCE = 0.02
"""A largest load is found to 1%."""


@pytest.fixture(params=sampled(("chat-70b", "code-completion", "long-documents"), ["chat-70b"]))
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(request.param)


@pytest.fixture
def chosen(plan: Plan) -> Candidate:
    assert plan.chosen
    return plan.chosen


def test_room_to_grow_keeps_the_probability_asked_for(plan: Plan, chosen: Candidate) -> None:
    growth, scenario = find_growth_limit(plan), plan.scenario
    assert growth and scenario.workload.rate
    share = max(growth.confident_rps / growth.offered_rps, 1.0)
    for more, holds in ((1 / (1 + RATE_TOLERANCE), True), (1 + 3 * RATE_TOLERANCE, False)):
        busier = scenario.workload.with_rate(scenario.workload.rate * share * more)
        found = state_deployment(replace(scenario, workload=busier), chosen.deployment)
        assert found.is_confident == holds


def test_nothing_cheaper_that_is_shown_is_nearer_than_the_nearest(
    plan: Plan, chosen: Candidate
) -> None:
    near = plan.binding_constraint.candidate
    assert near
    for option in plan.options.values():
        cheaper = option.price_key < chosen.price_key
        assert not cheaper or option.probability <= near.probability


def test_a_probability_below_what_is_asked_is_not_rounded_up_to_it() -> None:
    assert format_probability(0.796, 0.8) == "79.6%"
    assert format_probability(0.7999, 0.8) == "79.9%"
    assert format_probability(0.804, 0.8) == "80%" == format_probability(0.796)
    assert format_probability(0.58, 0.8) == "58%"


def test_the_load_that_traffic_may_grow_to_differs_from_the_planned_one(plan: Plan) -> None:
    growth = find_growth_limit(plan)
    assert growth
    (end,) = re.findall(r"to ([\d.,]+) requests/s", describe_growth_end(growth)) or [""]
    assert bool(end) == (growth.growth > 0) and end != format_number(growth.offered_rps, 2)


def test_room_to_grow_is_the_largest_load_that_the_same_gpus_serve() -> None:
    plan = plan_of("chat-70b")
    growth, chosen = find_growth_limit(plan), plan.chosen
    assert growth and chosen
    (gpus,) = plan.scenario.gpus
    same = replace(gpus, max_gpus=chosen.prediction.num_gpus_billed)
    most = plan_once(replace(plan.scenario, gpus=(same,), open_figure="rate"))
    assert most.scenario.workload.rate == pytest.approx(growth.confident_rps, rel=RATE_TOLERANCE)
