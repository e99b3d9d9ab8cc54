"""Traffic over the hours of a day or a week: from figures, a catalog profile, or a trace."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import isfile
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.text import format_count
from planner.workload.traces import read_trace
from planner.workload.workload import WORKLOAD_BOUNDS

DAILY_PROFILE_CATALOG = "days.yaml"
HOURS_PER_DAY, HOURS_PER_WEEK = 24, 168
"""Smallest and largest number of hours of a profile."""
MIN_LAST_HOUR_FRACTION = 0.5
"""A trace's last hour after a whole day is left out if it covers less of the hour."""


class DailyProfileEntry(SourcedEntry):
    """A catalog profile; the head of `catalogs/days.yaml` explains every field."""

    hours: Annotated[
        tuple[Annotated[float, Field(ge=0)], ...],
        Field(min_length=HOURS_PER_DAY, max_length=HOURS_PER_WEEK),
    ]


@dataclass(frozen=True)
class DailyProfile:
    """Traffic by hour as a fraction of the busiest hour's.

    A day starts at midnight, a week on Monday, and the hours of a trace with its first request.
    """

    hourly_fractions: tuple[float, ...]
    name: str  # source of the figures
    peak_rps: float | None = None  # requests/s of a trace's busiest hour
    burstiness: float = 1.0  # of a trace's arrivals within the hours, as in `Trace`

    @property
    def mean_fraction(self) -> float:
        """A mean hour's traffic as a fraction of the busiest hour's."""
        return sum(self.hourly_fractions) / len(self.hourly_fractions)

    @property
    def hours_a_day(self) -> float:
        """Hours like the busiest that hold the traffic of a mean day of those that have any."""
        days = [
            self.hourly_fractions[k : k + HOURS_PER_DAY]
            for k in range(0, len(self.hourly_fractions), HOURS_PER_DAY)
        ]
        return (
            sum(self.hourly_fractions) * HOURS_PER_DAY / sum(len(day) for day in days if any(day))
        )


def load_daily_profiles() -> dict[str, DailyProfileEntry]:
    """Load the catalog's profiles by name."""
    return load_catalog(DAILY_PROFILE_CATALOG, DailyProfileEntry)


def build_daily_profile(source: str | Sequence[float], path: Path) -> DailyProfile:
    """Build the profile of hourly figures, a catalog name, or the trace in the file `path`."""
    if not isinstance(source, str):
        return _normalize_hours(np.array(source, float), "given by the scenario")
    if entry := load_daily_profiles().get(source):
        return _normalize_hours(np.array(entry.hours), source)
    if not isfile(path):  # Path.is_file raises for a name that is too long
        raise PlannerError(
            f"{make_unknown_name_error(source, load_daily_profiles(), 'profile')}; or the file of a"
            " trace of a day"
        )
    trace = read_trace(path)
    seconds = trace.arrival
    if seconds[-1] >= (HOURS_PER_WEEK + 1) * 3600:
        raise PlannerError(
            f"{path.name} lasts {seconds[-1] / 3600:,.0f} hours; expected a day ({HOURS_PER_DAY})"
            " up to a week"
        )
    counts = np.bincount((seconds // 3600).astype(int))
    num_before = np.append(0, counts.cumsum())  # requests before each hour
    # burstiness within hours: on this time scale every hour has the same rate
    uniform_arrival = np.interp(seconds / 3600, np.arange(len(num_before)), num_before)
    burstiness = float(
        np.clip(replace(trace, arrival=uniform_arrival).burstiness, *WORKLOAD_BOUNDS["burstiness"])
    )
    if len(counts) > HOURS_PER_DAY and seconds[-1] % 3600 < MIN_LAST_HOUR_FRACTION * 3600:
        counts = counts[:-1]
    profile = _normalize_hours(counts, path.name, int(counts.max(initial=0)) / 3600)
    return replace(profile, burstiness=burstiness)


def _normalize_hours(hours: np.ndarray, name: str, busiest: float | None = None) -> DailyProfile:
    """Return the profile of these hourly figures.

    Raises `PlannerError` for too few or too many hours, or no traffic.
    """
    if not HOURS_PER_DAY <= len(hours) <= HOURS_PER_WEEK:
        raise PlannerError(
            f"{name} has {format_count(len(hours), 'hour')}; expected one figure an hour for a day"
            f" ({HOURS_PER_DAY}) up to a week"
        )
    if not hours.max() > 0:
        raise PlannerError(f"{name} has no hour with traffic")
    return DailyProfile(tuple((hours / hours.max()).tolist()), name, busiest)
