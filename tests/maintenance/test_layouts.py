"""Every layout of a scenario: what is compared, what is sent, and that the plan is the cheapest of them."""

from dataclasses import replace

import pytest
from shipped import plan_of

from planner.analysis import layout_tables as layout_study
from planner.planning.plan import Plan
from planner.planning.scenario import parse_scenario
from planner.planning.search import search_deployments


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("chat-70b")


@pytest.fixture(scope="module")
def every(plan):
    return layout_study.list_shapes(plan)


def test_no_legal_layout_meets_the_service_level_for_less_than_the_plan(plan, every):
    cheapest = min(candidate.cost_key for candidate in every if candidate.is_feasible)
    assert cheapest == plan.chosen.cost_key
    assert sum(candidate is plan.chosen for candidate in every) == 1


def test_every_layout_appears_once_and_keeps_to_the_gpus_allowed(plan, every):
    shapes = [candidate.deployment.layout for candidate in every]
    assert len({replace(layout, replicas=1) for layout in shapes}) == len(shapes)
    assert max(layout.num_gpus for layout in shapes) <= 32
    assert {layout.tp for layout in shapes} == {1, 2, 4, 8}


NOWHERE = {
    "question": "Does a 70B model fit on one 24 GB card?",
    "model": "meta-llama/Llama-3.1-70B-Instruct",
    "gpus": [{"gpu": "RTX-4090", "at_most": 1}],
    "workload": {"prompt_tokens": {"mean": 500}, "output_tokens": {"mean": 100}, "rate": 1},
    "service_level": {"ttft": {"p95": 1000}},
}


def test_where_nothing_fits_the_chapter_says_so_and_goes_on_with_a_change():
    asked = search_deployments(parse_scenario(NOWHERE, "nowhere"))
    study = layout_study.begin_study(asked, fits=True)
    assert not asked.candidates and study.plan.candidates
    assert "fits nowhere" in study.note and "up to 64 x" in study.note
