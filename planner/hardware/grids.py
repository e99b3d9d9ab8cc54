"""Carbon intensity of grids, from `catalogs/grids.yaml` or a user's own figure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from pydantic import PositiveFloat

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.errors import make_unknown_name_error

GRAMS_PER_KG = 1e3
JOULES_PER_KWH = 3.6e6


class GridEntry(SourcedEntry):
    """One entry of `catalogs/grids.yaml`, whose head explains every field."""

    aliases: tuple[str, ...] = ()
    g_co2e_per_kwh: PositiveFloat


@dataclass(frozen=True)
class Grid:
    """The greenhouse gas of a kWh, and whose figure it is."""

    g_co2e_per_kwh: float
    source: str

    @property
    def kg_co2e_per_kwh(self) -> float:
        """Kilograms of CO2 equivalent per kWh."""
        return self.g_co2e_per_kwh / GRAMS_PER_KG

    def __str__(self) -> str:
        return f"{self.g_co2e_per_kwh:g} g/kWh ({self.source})"


@cache
def load_grids() -> Mapping[str, GridEntry]:
    """Load the catalog's grids by name."""
    return load_catalog("grids.yaml", GridEntry)


def get_grid(grid: str | float) -> Grid:
    """Get a grid by name, or of so many g CO2e per kWh; `PlannerError` if the name is unknown."""
    if not isinstance(grid, str):
        return Grid(grid, "given by the scenario")
    for name, entry in load_grids().items():
        if grid.casefold() in (each.casefold() for each in (name, *entry.aliases)):
            return Grid(entry.g_co2e_per_kwh, f"{name} {entry.date}")
    raise make_unknown_name_error(grid, load_grids(), "grid")
