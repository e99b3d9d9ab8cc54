"""What a GPU-hour costs: quotes by tier from `catalogs/prices.yaml`, their median and range, a user's own instead."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Literal

from pydantic import PositiveFloat

from planner.core.catalog import Entry, Sourced, entries
from planner.core.quantities import PlannerError
from planner.facts.gpus import Gpu, gpu

HOURS_PER_MONTH = 730.5
"""Hours in an average month: 365.25 / 12 days."""
Tier = Literal["on_demand", "reserved", "spot"]
OWN = "given by the scenario"


class Quote(Sourced):
    """What one seller asks for a GPU-hour, USD; `source` begins with the seller and a colon."""

    usd: PositiveFloat

    @property
    def seller(self) -> str:
        """Who asks."""
        return self.source.partition(":")[0]


class PriceEntry(Entry):
    """The quotes for one GPU; the head of `catalogs/prices.yaml` explains the tiers."""

    on_demand: tuple[Quote, ...] = ()
    reserved: tuple[Quote, ...] = ()
    spot: tuple[Quote, ...] = ()


@dataclass(frozen=True)
class Price:
    """What a GPU-hour costs in one tier, USD: the quotes for it, at least one."""

    tier: Tier
    quotes: tuple[Quote, ...]

    @property
    def usd(self) -> float:
        """The median of the quotes."""
        return median(quote.usd for quote in self.quotes)

    @property
    def low(self) -> float:
        """The cheapest."""
        return min(quote.usd for quote in self.quotes)

    @property
    def high(self) -> float:
        """The dearest."""
        return max(quote.usd for quote in self.quotes)

    @property
    def own(self) -> bool:
        """The scenario says so, not the catalog."""
        return self.quotes[0].source == OWN

    @property
    def date(self) -> str:
        """When it was asked, from and to; nothing for a user's own."""
        return " to ".join(sorted({min(dates := [quote.date for quote in self.quotes]), max(dates)}))

    @property
    def source(self) -> str:
        """Who asks it, or that the scenario says so."""
        return OWN if self.own else ", ".join(dict.fromkeys(quote.seller for quote in self.quotes))

    def __str__(self) -> str:
        if self.own:
            return f"{_usd(self.usd)} USD per GPU-hour ({OWN})"
        said = f"{_usd(self.usd)} USD per GPU-hour {self.tier.replace('_', ' ')}"
        if len(self.quotes) == 1:
            return f"{said} ({self.source}, {self.date})"
        first, *_, last = sorted(self.quotes, key=lambda quote: quote.usd)
        ends = f"{first.usd:.2f} ({first.seller}) to {last.usd:.2f} ({last.seller})"
        return f"{said}, the middle of {len(self.quotes)} quotes from {ends}, {self.date}"


@dataclass(frozen=True)
class Prices:
    """Which prices count: USD per GPU-hour that are `given`, by GPU name or alias, else the catalog's of one tier."""

    given: Mapping[str, float] = field(default_factory=dict)
    tier: Tier = "on_demand"


def _usd(usd: float) -> str:
    """In cents; the middle of two quotes with their tenth."""
    return f"{usd:.3f}".removesuffix("0")


@cache
def _catalog() -> Mapping[str, PriceEntry]:
    """Quotes by GPU name; `PlannerError` for a GPU that `gpus.yaml` doesn't have."""
    return {gpu(name).name: entry for name, entry in entries("prices.yaml", PriceEntry).items()}


def price_per_hour(card: Gpu, prices: Prices | None = None) -> Price | None:
    """The price of one `card`-hour among `prices` (None: the catalog's on demand); None if unknown."""
    prices = prices or Prices()
    for name, usd in prices.given.items():
        if usd <= 0:
            raise PlannerError(f"price of {name}: expected USD per GPU-hour above 0, got {usd}")
        if gpu(name).name == card.name:
            return Price(prices.tier, (Quote(usd=usd, source=OWN, date=""),))
    known = _catalog().get(card.name)
    quotes: tuple[Quote, ...] = getattr(known, prices.tier) if known else ()
    return Price(prices.tier, quotes) if quotes else None
