"""How traffic rises and falls over the hours of a day or a week: figures, a profile of the catalog, or a trace."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import isfile
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.workload.traces import read_trace
from planner.workload.workload import WORKLOAD_BOUNDS

DAILY_PROFILE_CATALOG = "days.yaml"
HOURS_PER_DAY, HOURS_PER_WEEK = 24, 168
"""Hours of a profile, at least and at most."""
MIN_LAST_HOUR_FRACTION = 0.5
"""Of its last hour after a whole day a trace holds so much at least, or the hour is left out."""


class DailyProfileEntry(SourcedEntry):
    """A profile; the head of `catalogs/days.yaml` explains every field."""

    hours: Annotated[
        tuple[Annotated[float, Field(ge=0)], ...],
        Field(min_length=HOURS_PER_DAY, max_length=HOURS_PER_WEEK),
    ]


@dataclass(frozen=True)
class DailyProfile:
    """Traffic of each hour as a share of the busiest hour's; a day's begin at midnight, a week's on Monday."""

    hourly_fractions: tuple[float, ...]
    name: str  # where they are from
    peak_rps: float | None = (
        None  # requests/s of a trace's busiest hour; its hours begin with its first request
    )
    burstiness: float = (
        1.0  # of a trace's arrivals in their hours, as `workload.traces.Trace` has it
    )

    @property
    def num_hours(self) -> int:
        return len(self.hourly_fractions)

    def __str__(self) -> str:
        mean = sum(self.hourly_fractions) / self.num_hours
        return (
            f"{self.name}: {self.num_hours} hours, on average {mean:.0%} of the busiest, at least"
            f" {min(self.hourly_fractions):.0%}"
        )


def load_daily_profiles() -> dict[str, DailyProfileEntry]:
    return load_catalog(DAILY_PROFILE_CATALOG, DailyProfileEntry)


def build_daily_profile(given: str | Sequence[float], path: Path) -> DailyProfile:
    """The day of hourly figures, of a profile's name, or of the trace in the file `path`."""
    if not isinstance(given, str):
        return _normalize_hours(np.array(given, float), "given by the scenario")
    if daily_profile_entry := load_daily_profiles().get(given):
        return _normalize_hours(np.array(daily_profile_entry.hours), given)
    if not isfile(path):  # Path.is_file raises for a name that is too long
        raise PlannerError(
            f"{make_unknown_name_error(given, load_daily_profiles(), 'profile')}; or the file of a"
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
    before = np.append(0, counts.cumsum())  # each hour
    turns = np.interp(seconds / 3600, np.arange(len(before)), before)  # as if one came a second
    bursts = float(
        np.clip(replace(trace, arrival=turns).burstiness, *WORKLOAD_BOUNDS["burstiness"])
    )
    counts = counts[
        : (
            -1
            if len(counts) > HOURS_PER_DAY and seconds[-1] % 3600 < MIN_LAST_HOUR_FRACTION * 3600
            else None
        )
    ]
    return replace(
        _normalize_hours(counts, path.name, int(counts.max(initial=0)) / 3600), burstiness=bursts
    )


def _normalize_hours(hours: np.ndarray, name: str, busiest: float | None = None) -> DailyProfile:
    if not HOURS_PER_DAY <= len(hours) <= HOURS_PER_WEEK:
        raise PlannerError(
            f"{name} has {len(hours)} hours; expected one figure an hour for a day"
            f" ({HOURS_PER_DAY}) up to a week"
        )
    if not hours.max() > 0:
        raise PlannerError(f"{name} has no hour with traffic")
    return DailyProfile(tuple((hours / hours.max()).tolist()), name, busiest)
