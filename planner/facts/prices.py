"""What a GPU costs per hour: dated defaults from `catalogs/prices.yaml`, overridden by the user."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from pydantic import PositiveFloat

from planner.core.catalog import Entry, entries
from planner.core.quantities import PlannerError
from planner.facts.gpus import Gpu, gpu

HOURS_PER_MONTH = 730.5
"""Hours in an average month: 365.25 / 12 days."""


class Price(Entry):
    """USD per GPU-hour on demand, the range of what others ask, and where that comes from."""

    usd: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat
    source: str
    date: str

    def __str__(self) -> str:
        spread = f", {self.low:.2f} to {self.high:.2f} elsewhere" if self.low < self.high else ""
        return f"{self.usd:.2f} USD per GPU-hour{spread} ({', '.join(filter(None, (self.source, self.date)))})"


@cache
def _catalog() -> Mapping[str, Price]:
    """Prices by GPU name; `PlannerError` for a GPU that `gpus.yaml` doesn't have."""
    return {gpu(name).name: price for name, price in entries("prices.yaml", Price).items()}


def price_per_hour(card: Gpu, overrides: Mapping[str, float] | None = None) -> Price | None:
    """The price of one `card`-hour: `overrides` (USD by GPU name or alias) first, else the default; None if unknown.

    Raises `PlannerError` for an override that is not positive or names no GPU.
    """
    for name, usd in (overrides or {}).items():
        if usd <= 0:
            raise PlannerError(f"price of {name}: expected USD per GPU-hour above 0, got {usd}")
        if gpu(name).name == card.name:
            return Price(usd=usd, low=usd, high=usd, source="given by the scenario", date="")
    return _catalog().get(card.name)
