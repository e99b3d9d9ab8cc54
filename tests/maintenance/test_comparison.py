"""Answers side by side: what is asked otherwise, figures that are each plan's own."""

import pytest

from planner.answers import build_answer
from planner.core.errors import PlannerError
from planner.core.number_format import format_usd
from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.ui.plan_comparison import (
    MAX_COMPARED_PLANS,
    build_plan_comparison,
)

SMALL = "edge-8b-24gb"


def answers_of(plans):
    return [build_answer(plan) for plan in plans]


@pytest.fixture(scope="module")
def plans():
    return [
        search_deployments(load_scenario(SMALL, changed))
        for changed in ({}, {"gpus": [{"gpu": "L4", "at_most": 8}]})
    ]


def test_only_what_differs_is_told_of_the_questions(plans):
    rows = build_plan_comparison(answers_of(plans)).set_index("")
    assert "asked: GPUs" in rows.index
    assert not {"asked: model", "asked: traffic", "asked: targets"} & set(rows.index)


def test_figures_are_those_of_each_plan(plans):
    rows = build_plan_comparison(answers_of(plans)).set_index("")
    for column, plan in zip(rows.columns, plans, strict=True):
        best = plan.best
        assert format_usd(best.usd_per_hour) in rows.loc["cost per hour", column]
        for target in plan.scenario.slo_targets:
            assert " of " in rows.loc[target.name, column]
    share = plans[1].best.usd_per_hour / plans[0].best.usd_per_hour - 1
    assert f"({share:+.0%})".replace("-", "\N{MINUS SIGN}") in rows.loc["cost per hour"].iloc[1]


def test_two_to_four_are_compared(plans):
    for many in (1, MAX_COMPARED_PLANS + 1):
        with pytest.raises(PlannerError, match=f"2 to {MAX_COMPARED_PLANS}"):
            build_plan_comparison(answers_of(plans[:1] * many))
