"""What `test_answer.py` looks at in small, more widely."""

from dataclasses import replace

import pytest
from test_answer import QUESTIONS

from planner.answers import build_answer
from planner.answers.words import format_bills
from planner.core.number_format import format_usd


def test_where_the_day_decides_every_option_has_a_bill_by_the_hour() -> None:
    """Else a plan that is cheaper over the day stands beside options that look cheaper than it."""
    plan = QUESTIONS["a day"]()
    chosen = plan.chosen
    assert chosen and chosen.usd_per_hour
    other = next(each for each in plan.candidates if each.placement_key != chosen.placement_key)
    by_day, safe = replace(chosen, billed_fraction=0.5), replace(other, billed_fraction=0.75)
    told = build_answer(replace(plan, chosen=by_day, safe=safe, candidates=(by_day, safe)))
    always_on, by_hour = told.named_options["safe"].bills
    assert by_hour.basis == "scaled by the hour"
    assert by_hour.usd == pytest.approx(0.75 * 730.5 * safe.prediction.usd_per_hour)
    said = f"{format_usd(always_on.usd)}/month always on, {format_usd(by_hour.usd)} by the hour"
    assert format_bills(told.named_options["safe"]) == said
