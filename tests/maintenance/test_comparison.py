"""Answers side by side: what is asked otherwise, figures that are each plan's own."""

from dataclasses import replace

import pytest

from planner.answers import build_answer
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.ui.plan_comparison import (
    MAX_COMPARED_PLANS,
    build_plan_comparison,
    compare_limits,
    describe_cheapest_plan,
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
    assert "GPUs allowed" in rows.index
    assert not {"model", "traffic", "targets"} & set(rows.index)


def test_figures_are_those_of_each_plan(plans):
    rows = build_plan_comparison(answers_of(plans)).set_index("")
    for column, plan in zip(rows.columns, plans, strict=True):
        best = plan.best
        assert f"{best.usd_per_hour:,.2f}" in rows.loc["USD per hour", column]
        for target in plan.scenario.slo_targets:
            value = best.prediction.performance.get(target.metric, target.percentile) * 1e3
            assert rows.loc[f"{target.name} (ms)", column].startswith(f"{value:,.0f}:")
    share = plans[1].best.usd_per_hour / plans[0].best.usd_per_hour - 1
    assert f"({share:+.0%})" in rows.loc["USD per hour"].iloc[1]
    assert len(compare_limits(answers_of(plans))) == sum(
        len(plan.scenario.slo_targets) for plan in plans
    )


def test_the_cheapest_that_keeps_its_promises_is_named(plans):
    less, more = sorted(plan.chosen.usd_per_hour for plan in plans)
    assert f"${less:,.2f} an hour, {1 - less / more:.0%} less" in describe_cheapest_plan(
        answers_of(plans)
    )
    nothing = search_deployments(load_scenario(SMALL, {"service_level": {"ttft": {"p95": 1}}}))
    assert "No plan meets the targets of" in describe_cheapest_plan(answers_of([plans[0], nothing]))


def test_cheaper_at_the_middle_price_alone_is_told(plans):
    def quoted(name, usd):
        plan = plans[0]
        chosen = replace(
            plan.chosen, prediction=replace(plan.chosen.prediction, usd_per_hour_interval=usd)
        )
        return replace(plan, chosen=chosen, scenario=replace(plan.scenario, name=name))

    said = describe_cheapest_plan(
        answers_of([quoted("h100", Interval(4, 8, 20)), quoted("b200", Interval(5, 7, 9))])
    )
    assert said.startswith("b200 costs least") and said.endswith(
        "quotes h100 does, $4.00 against $5.00."
    )
    assert "quotes" not in describe_cheapest_plan(
        answers_of([quoted("h100", Interval(6, 8, 20)), quoted("b200", Interval(5, 7, 9))])
    )


def test_two_to_four_are_compared(plans):
    for many in (1, MAX_COMPARED_PLANS + 1):
        with pytest.raises(PlannerError, match=f"2 to {MAX_COMPARED_PLANS}"):
            build_plan_comparison(answers_of(plans[:1] * many))


def test_of_equal_prices_the_safe_one_is_named(plans):
    holds = next(plan for plan in plans if plan.verdict == "holds")
    first = replace(holds.scenario, name="a-first")
    likely = tuple(replace(limit, probability=0.7) for limit in holds.chosen.limits)
    risky = replace(holds, scenario=first, chosen=replace(holds.chosen, limits=likely))
    assert describe_cheapest_plan(answers_of([risky, holds])).startswith(
        f"{holds.scenario.name} costs least: "
    )
    assert describe_cheapest_plan(answers_of([risky, holds])).endswith(
        "as much as a-first (at risk)."
    )
