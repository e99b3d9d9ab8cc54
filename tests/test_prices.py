"""Default prices and their overrides."""

import pytest

from planner.core.quantities import PlannerError
from planner.facts.gpus import gpu, gpus
from planner.facts.prices import price_per_hour


def test_defaults_lie_within_what_the_sources_ask() -> None:
    priced = [price for card in gpus() if (price := price_per_hour(card))]
    assert len(priced) >= 20
    assert all(price.low <= price.usd <= price.high and price.source and price.date for price in priced)


def test_h100_rents_for_about_three_dollars() -> None:
    price = price_per_hour(gpu("H100"))  # 2026-05: aimultiple.com's median over 37 providers is 2.95
    assert price is not None and price.usd == pytest.approx(2.95, abs=0.25)


def test_a_scenario_overrides_by_any_name() -> None:
    price = price_per_hour(gpu("H100-SXM"), {"L4": 0.5, "h100_sxm": 2.2})
    assert price is not None and price.usd == 2.2
    assert price_per_hour(gpu("T4")) is None


def test_bad_overrides_are_refused() -> None:
    with pytest.raises(PlannerError, match="price of H100: expected USD per GPU-hour above 0, got -1"):
        price_per_hour(gpu("H100"), {"H100": -1})
    with pytest.raises(PlannerError, match="unknown GPU"):
        price_per_hour(gpu("H100"), {"H1OO0": 1})
