"""What `test_summary.py` looks at in small, more widely."""

from shipped import answer_of
from test_summary import find_plan_at_risk, plan

from planner.answers.words import describe_risk
from planner.planning.what_if import limit_to_budget, run_what_ifs
from planner.ui.decision_memo import build_memo


def test_an_answer_for_no_more_money_costs_no_more() -> None:
    chosen = plan().chosen
    assert chosen and chosen.usd_per_hour
    for card in limit_to_budget(plan().scenario, chosen, 1.0).gpus:
        assert (
            card.max_gpus * chosen.usd_per_hour / chosen.deployment.layout.num_gpus
            <= chosen.usd_per_hour + 1e-9
        )
    for found in run_what_ifs(plan()):
        if "no more money" in found.change and found.plan.chosen:
            assert (found.plan.chosen.usd_per_hour or 0) <= chosen.usd_per_hour


def test_a_promise_at_the_edge_is_the_first_of_three_risks() -> None:
    risky = find_plan_at_risk()
    largest = answer_of(risky).risks
    assert 1 <= len(largest) <= 3
    assert largest[0] == "edge" and "may" in describe_risk(answer_of(risky), "edge")


def test_the_memo_of_a_plan_at_risk_names_the_doubt_and_asks_for_a_benchmark() -> None:
    risky = find_plan_at_risk()
    memo = build_memo(answer_of(risky)).fields
    assert memo["verdict"] == "At risk" and memo["title"].endswith("only after a benchmark")
