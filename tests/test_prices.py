"""What a GPU costs: quotes by tier, their median and range, and a user's own instead."""

from datetime import date, timedelta
from statistics import median

import pytest
import yaml

from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError
from planner.hardware.gpus import get_gpu, list_gpus
from planner.hardware.prices import (
    SCENARIO_PRICE_SOURCE,
    GpuPrice,
    PriceQuote,
    PriceSelection,
    find_seller,
    look_up_gpu_price,
)

QUOTED = yaml.safe_load((CATALOG_DIR / "prices.yaml").read_text())
ROWS = [(name, tier, quotes) for name, tiers in QUOTED.items() for tier, quotes in tiers.items()]
ELASTIC = ("serverless", "spot", "interruptible", "preemptible", "per second")


def price(name: str, prices: PriceSelection | None = None) -> GpuPrice:
    found = look_up_gpu_price(get_gpu(name), prices)
    assert found
    return found


def test_a_price_is_old_90_days_after_its_newest_quote() -> None:
    """From the last day of a month or year, on which it may have been asked."""
    for asked, last in (
        ("2025-06", date(2025, 9, 28)),
        ("2025", date(2026, 3, 31)),
        ("2025-06-10", date(2025, 9, 8)),
    ):
        older = PriceQuote(usd=1, source="A: b", date="2024-01")
        newest = PriceQuote(usd=1, source="A: b", date=asked)
        found = GpuPrice("on_demand", (newest, older))
        assert not found.is_old(last) and found.is_old(last + timedelta(days=1))
    assert not price("H100-SXM", PriceSelection({"H100-SXM": 2})).is_old(date(2099, 1, 1))


@pytest.mark.parametrize(
    ("name", "tier", "quotes"), ROWS, ids=[f"{name}-{tier}" for name, tier, _ in ROWS]
)
def test_a_price_is_the_median_of_its_quotes(name: str, tier: str, quotes: list[dict]) -> None:
    found, asked = price(name, PriceSelection(tier=tier)), [quote["usd"] for quote in quotes]
    assert (found.median_usd, found.min_usd, found.max_usd) == (
        median(asked),
        min(asked),
        max(asked),
    )
    assert found.is_old(date(2099, 1, 1)) and not found.is_old(date(2020, 1, 1))
    assert all(quote["source"].partition(": ")[2] and quote["date"][:2] == "20" for quote in quotes)


@pytest.mark.parametrize("tier", ["on_demand", "reserved"])
def test_what_may_be_taken_away_or_is_let_by_the_second_is_no_price_of_a_machine(tier: str) -> None:
    said = [quote["source"].casefold() for _, at, quotes in ROWS if at == tier for quote in quotes]
    assert said and not [source for source in said if any(word in source for word in ELASTIC)]


@pytest.mark.parametrize(
    "name",
    ["B200", "B300", "GB300", "MI300X", "MI355X", "GH200", "T4", "A10", "A10G", "L4", "L40S"],
)
def test_what_clouds_rent_is_priced_on_demand(name: str) -> None:
    assert 0.1 < price(name).median_usd < 20


def test_an_h100_rents_within_what_was_seen_this_autumn() -> None:
    found = price("H100")  # 2026-11-09, data-receipts.com/gpu-pricing: 2.69 to 6.88 on demand
    assert 2.69 <= found.median_usd <= 6.88 and len(found.quotes) >= 10


@pytest.mark.parametrize("name", [name for name, tiers in QUOTED.items() if "reserved" in tiers])
def test_a_term_is_cheaper_than_the_dearest_hour(name: str) -> None:
    assert price(name, PriceSelection(tier="reserved")).min_usd < price(name).max_usd


def test_every_quoted_gpu_is_known_and_most_that_are_known_are_quoted() -> None:
    assert all(get_gpu(name).name == name for name in QUOTED)
    assert len([card for card in list_gpus() if look_up_gpu_price(card)]) >= 35


def test_a_scenario_overrides_by_any_name_in_any_tier() -> None:
    own = price("H100-SXM", PriceSelection({"L4": 0.5, "h100_sxm": 2.2}, "spot"))
    assert (
        own.median_usd == own.min_usd == own.max_usd == 2.2
        and own.is_user_given
        and own.source == SCENARIO_PRICE_SOURCE
    )
    assert str(own) == "2.20 USD per GPU-hour (given by the scenario)" and not own.date
    assert look_up_gpu_price(get_gpu("Rubin")) is None


def test_bad_overrides_are_refused() -> None:
    with pytest.raises(
        PlannerError, match="price of H100: expected USD per GPU-hour above 0, got -1"
    ):
        look_up_gpu_price(get_gpu("H100"), PriceSelection({"H100": -1}))
    with pytest.raises(PlannerError, match="unknown GPU"):
        look_up_gpu_price(get_gpu("H100"), PriceSelection({"H1OO0": 1}))


def test_a_seller_is_asked_alone() -> None:
    quotes = {quote.seller: quote.usd for quote in price("L40S", PriceSelection()).quotes}
    for seller, usd in quotes.items():
        assert price("L40S", PriceSelection(seller=find_seller(seller.lower()))).median_usd == usd
    assert look_up_gpu_price(get_gpu("L40S"), PriceSelection(seller="nobody")) is None
    with pytest.raises(PlannerError, match="Lambda"):
        find_seller("Lamda")
