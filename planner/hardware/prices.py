"""Prices of a GPU-hour: quotes by tier from `catalogs/prices.yaml`, or a user's own price."""

import datetime
from calendar import monthrange
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Literal

from pydantic import PositiveFloat

from planner.core.catalog import SourcedEntry, StrictEntry, load_catalog
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.hardware.gpus import Gpu, get_gpu

HOURS_PER_MONTH = 730.5
"""Hours in an average month: 365.25 / 12 days."""
PriceTier = Literal["on_demand", "reserved", "spot"]
SCENARIO_PRICE_SOURCE = "given by the scenario"
MAX_PRICE_AGE_DAYS = 90
"""Age from which a price is called old: they move by a factor of two within a year."""


class PriceQuote(SourcedEntry):
    """One provider's price of a GPU-hour, USD; `source` begins with the provider and a colon."""

    usd: PositiveFloat

    @property
    def seller(self) -> str:
        """The provider."""
        return self.source.partition(":")[0]


class PriceEntry(StrictEntry):
    """The quotes for one GPU; the head of `catalogs/prices.yaml` explains the tiers."""

    on_demand: tuple[PriceQuote, ...] = ()
    reserved: tuple[PriceQuote, ...] = ()
    spot: tuple[PriceQuote, ...] = ()


@dataclass(frozen=True)
class GpuPrice:
    """The price of a GPU-hour in one tier, from at least one quote."""

    tier: PriceTier
    quotes: tuple[PriceQuote, ...]

    @property
    def median_usd(self) -> float:
        """The median of the quotes."""
        return median(quote.usd for quote in self.quotes)

    @property
    def min_usd(self) -> float:
        """The cheapest quote."""
        return min(quote.usd for quote in self.quotes)

    @property
    def max_usd(self) -> float:
        """The most expensive quote."""
        return max(quote.usd for quote in self.quotes)

    @property
    def is_user_given(self) -> bool:
        """Whether the price is from the scenario instead of the catalog."""
        return self.quotes[0].source == SCENARIO_PRICE_SOURCE

    @property
    def date(self) -> str:
        """First and last date of the quotes; empty for a user's own price."""
        dates = [quote.date for quote in self.quotes]
        return " to ".join(sorted({min(dates), max(dates)}))

    @property
    def newest_quote(self) -> str:
        """The date of the newest quote; one of a month or a year counts from its last day."""
        return max((quote.date for quote in self.quotes), key=_get_last_day)

    def is_old(self, today: datetime.date) -> bool:
        """Return whether every quote was asked over `MAX_PRICE_AGE_DAYS` ago; no user's own is."""
        if self.is_user_given:
            return False
        return (today - _get_last_day(self.newest_quote)).days > MAX_PRICE_AGE_DAYS

    @property
    def source(self) -> str:
        """The providers, or a note that the scenario states the price."""
        if self.is_user_given:
            return SCENARIO_PRICE_SOURCE
        return ", ".join(dict.fromkeys(quote.seller for quote in self.quotes))

    def __str__(self) -> str:
        if self.is_user_given:
            return f"{_format_usd(self.median_usd)} USD per GPU-hour ({SCENARIO_PRICE_SOURCE})"
        text = f"{_format_usd(self.median_usd)} USD per GPU-hour {self.tier.replace('_', ' ')}"
        if len(self.quotes) == 1:
            return f"{text} ({self.source}, {self.date})"
        first, *_, last = sorted(self.quotes, key=lambda quote: quote.usd)
        ends = f"{first.usd:.2f} ({first.seller}) to {last.usd:.2f} ({last.seller})"
        return f"{text}, the middle of {len(self.quotes)} quotes from {ends}, {self.date}"


@dataclass(frozen=True)
class PriceSelection:
    """Prices to use: USD per GPU-hour by GPU name or alias, else the catalog's of one tier.

    With a `seller` only that one's quotes count, and a GPU that it does not let has no price.
    """

    user_prices: Mapping[str, float] = field(default_factory=dict)
    tier: PriceTier = "on_demand"
    seller: str | None = None


def _get_last_day(text: str) -> datetime.date:
    """Return the last day of a catalog's date: a day, a month or a year."""
    year, *rest = map(int, text.split("-"))
    month = rest[0] if rest else 12
    return datetime.date(year, month, rest[1] if len(rest) > 1 else monthrange(year, month)[1])


def _format_usd(usd: float) -> str:
    """Format USD in cents; the median of two quotes may have a tenth."""
    return f"{usd:.3f}".removesuffix("0")


@cache
def _load_price_catalog() -> Mapping[str, PriceEntry]:
    """Load quotes by GPU name; `PlannerError` for a GPU that is not in `gpus.yaml`."""
    return {
        get_gpu(name).name: entry for name, entry in load_catalog("prices.yaml", PriceEntry).items()
    }


def find_seller(name: str) -> str:
    """Find the catalog's spelling of a seller; `PlannerError` if none is called so."""
    sellers = {
        quote.seller
        for entry in _load_price_catalog().values()
        for quote in (*entry.on_demand, *entry.reserved, *entry.spot)
    }
    for seller in sellers:
        if seller.casefold() == name.casefold():
            return seller
    raise make_unknown_name_error(name, sorted(sellers), "seller")


def list_sellers(gpu: Gpu, tier: PriceTier) -> tuple[str, ...]:
    """List the sellers with a quote for `gpu` in this tier."""
    entry = _load_price_catalog().get(gpu.name)
    quotes: tuple[PriceQuote, ...] = getattr(entry, tier) if entry else ()
    return tuple(sorted({quote.seller for quote in quotes}, key=str.casefold))


def look_up_gpu_price(gpu: Gpu, prices: PriceSelection | None = None) -> GpuPrice | None:
    """Look up the price of a GPU-hour (default: the catalog's, on demand); None if unknown."""
    prices = prices or PriceSelection()
    for name, usd in prices.user_prices.items():
        if usd <= 0:
            raise PlannerError(f"price of {name}: expected USD per GPU-hour above 0, got {usd}")
        if get_gpu(name).name == gpu.name:
            return GpuPrice(
                prices.tier, (PriceQuote(usd=usd, source=SCENARIO_PRICE_SOURCE, date=""),)
            )
    price_entry = _load_price_catalog().get(gpu.name)
    quotes: tuple[PriceQuote, ...] = getattr(price_entry, prices.tier) if price_entry else ()
    if prices.seller is not None:
        quotes = tuple(quote for quote in quotes if quote.seller == prices.seller)
    return GpuPrice(prices.tier, quotes) if quotes else None
