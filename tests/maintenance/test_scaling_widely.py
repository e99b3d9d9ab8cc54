"""What `test_scaling.py` looks at in small, more widely."""

from dataclasses import replace

import pytest
from shipped import answer_of
from test_scaling import SMALL

from planner.planning.autoscaling import plan_autoscaling
from planner.planning.scenario import parse_scenario
from planner.planning.search import search_deployments
from planner.ui.plan_text import format_answer


def test_of_two_layouts_at_one_price_the_one_whose_day_costs_less_is_chosen() -> None:
    """Two replicas of one L4 become one at night; two L4 that share each step (TP2) cannot, and are better by day."""
    level = {"ttft": {"p95": 800}, "tpot": {"p95": 50}}
    office = {**SMALL, "service_level": level, "workload": {**SMALL["workload"], "rate": 5}}
    moment = search_deployments(replace(parse_scenario(office, "office"), daily_profile=None))
    plan = search_deployments(parse_scenario(office, "office"))
    assert moment.chosen is not None and moment.chosen.description.startswith("2 x L4, TP2,")
    assert plan.chosen is not None and plan.chosen.description.startswith(
        "2 x L4, TP1 x 2 replicas,"
    )
    assert plan.chosen.usd_per_hour == moment.chosen.usd_per_hour
    assert (
        plan.autoscaling is not None
        and plan.autoscaling.violated_hours == ()
        and plan.autoscaling.saved_fraction > 0.25
    )
    assert plan.chosen.cost_key[1] == pytest.approx(plan.billing.usd["scaled by the hour"] / 24)
    whole = plan_autoscaling(plan.scenario, moment.chosen)
    assert whole is not None and whole.saved_fraction == 0
    share = f"{plan.chosen.billed_fraction:.0%} of its always-on price; the runner-up costs 100%"
    assert f"its cost with hourly scaling: {share}" in format_answer(answer_of(plan), detailed=True)
