"""The workload of a scenario file: lengths, load, a trace, a day; and the paths of its files."""

import math
from collections.abc import Callable
from contextlib import suppress
from os.path import exists, isfile
from pathlib import Path
from typing import cast

import numpy as np

from planner.core.errors import PlannerError, add_error_context
from planner.hardware.prices import HOURS_PER_MONTH
from planner.planning.scenario_schema import (
    OPEN_FIGURE,
    AdaptersEntry,
    LengthsEntry,
    PrefixEntry,
    SessionsEntry,
    TrafficRange,
    TrafficVolume,
    WorkloadEntry,
)
from planner.workload.daily_profile import HOURS_PER_DAY, DailyProfile, build_daily_profile
from planner.workload.length_distribution import LengthDistribution, RequestSide
from planner.workload.sessions import (
    Sessions,
    build_exponential,
    build_geometric_turns,
    draw_session_trace,
)
from planner.workload.traces import Trace, read_trace
from planner.workload.workload import Workload


def resolve_path(folder: Path, file: str) -> Path:
    """Resolve a file named by a scenario in `folder`: beside it, else in the working directory."""
    return Path(file) if not isfile(folder / file) and isfile(file) else folder / file


def resolve_existing_path(folder: Path, file: str, what: str) -> Path:
    """Resolve a file that must exist; the `PlannerError` otherwise calls it `what`."""
    path = resolve_path(folder, file)
    if not (exists(path) or Path(file).is_absolute()):
        looked_in = " nor in ".join(dict.fromkeys(map(str, (folder.resolve(), Path.cwd()))))
        raise PlannerError(f"no {what} {file} in {looked_in}")
    return path


def parse_daily_profile(entry: WorkloadEntry, folder: Path) -> DailyProfile | None:
    """Return the daily profile of a scenario file, None if it has neither `day` nor `office_hours`.

    In office hours the traffic comes evenly, and not at all outside.
    """
    with add_error_context(f"workload, {'day' if entry.office_hours is None else 'office_hours'}"):
        if entry.office_hours is None:
            path = resolve_path(folder, str(entry.day))
            return None if entry.day is None else build_daily_profile(entry.day, path)
        opens, closes = entry.office_hours
        open_day = [float(opens <= hour < closes) for hour in range(HOURS_PER_DAY)]
        days = entry.office_days or 1
        closed = [0.0] * HOURS_PER_DAY * (7 - days if entry.office_days else 0)
        return build_daily_profile([*open_day * days, *closed], Path())


def _compute_peak_rps(
    entry: WorkloadEntry, day: DailyProfile | None, volume: TrafficVolume, tokens_per_request: float
) -> float:
    """Compute the busiest hour's requests/s of a `volume`, spread as `day` says or `peak_to_mean`."""
    if not tokens_per_request:
        raise PlannerError(f"workload: {volume} need prompt_tokens and output_tokens")
    mean_fraction = day.mean_fraction if day else 1 / (entry.peak_to_mean or 1.0)
    day_hours = day.hours_a_day if day else HOURS_PER_DAY * mean_fraction
    requests = volume.amount / (tokens_per_request if volume.unit == "tokens" else 1)
    hours = day_hours if volume.period == "day" else HOURS_PER_MONTH * mean_fraction
    return requests / (hours * 3600)


def parse_workload(
    entry: WorkloadEntry,
    longest: float,
    context: float,
    folder: Path,
    day: DailyProfile | None,
    adapters: AdaptersEntry | None,
) -> Workload:
    """Build the workload of a scenario file, whose own figures win over those of its trace.

    Lengths of which only the mean is known are spread so that prompt and output fit into `longest`
    tokens; the tail of others ends where no server takes them, at `context` tokens of the model.
    """
    given, concurrency = cast(object, entry.rate), entry.concurrency
    rate = given.middle if isinstance(given, TrafficRange) else entry.rate
    rate = 1.0 if rate == OPEN_FIGURE else rate  # the question, which is found later
    concurrency = 1 if concurrency == OPEN_FIGURE else concurrency
    if day and not entry.sessions:
        rate = rate or day.peak_rps
    if entry.requests and entry.within_hours:
        rate = entry.requests / (entry.within_hours * 3600)
    trace = _draw_sessions(entry, entry.sessions, longest) if entry.sessions else None
    if entry.trace is not None:
        path = resolve_existing_path(folder, entry.trace, "trace")
        trace = read_trace(path).select_busiest_hour()
    base = Workload.from_trace(trace, rate) if trace else None
    measured = (base.prompt, base.output) if base else (None, None)
    prompt, output = (
        (lengths_entry and (lengths_entry.exactly or lengths_entry.mean))
        or (traced.mean if traced else 0.0)  # mean tokens, as far as they are known
        for lengths_entry, traced in zip(
            (entry.prompt_tokens, entry.output_tokens), measured, strict=True
        )
    )
    if volume := entry.volume:
        rate = _compute_peak_rps(entry, day, volume, prompt + output if prompt and output else 0.0)
    if base is None and rate is None and concurrency is None:
        raise PlannerError(
            "workload: needs a rate (requests per second), a concurrency (users who each wait for"
            " their answer), a trace, requests or tokens per_day or per_month, or requests with"
            " within_hours"
        )
    burstiness = day.burstiness if day and day.peak_rps else base.burstiness if base else 1.0
    prefix = entry.shared_prefix or PrefixEntry(hit_rate=base.prefix_hit_rate if base else 0.0)
    return Workload(
        prompt=_parse_lengths(
            entry.prompt_tokens, "prompt", longest - output, measured[0], context=context - output
        ),
        output=_parse_lengths(
            entry.output_tokens, "output", longest - prompt, measured[1], context=context - prompt
        ),
        rate=base.rate if base else rate,
        concurrency=concurrency,
        burstiness=entry.burstiness or burstiness,
        prefix_tokens=prefix.tokens,
        prefix_hit_rate=prefix.hit_rate,
        num_prompts=entry.requests,
        trace=base.trace if base else None,
        adapters=adapters.count if adapters else 0,
        adapter_zipf=adapters.zipf if adapters else 0.0,
    )


def _draw_sessions(entry: WorkloadEntry, given: SessionsEntry, longest: float) -> Trace:
    """Draw the requests of the sessions of a scenario file, prompts and answers up to `longest`."""
    with add_error_context("workload, sessions"):
        if given.max_context and given.max_context > longest:
            raise PlannerError(
                f"field max_context: must be up to {longest:,.0f} tokens, the model's context or"
                f" max_model_len, got {given.max_context:,.0f}"
            )
        limit = given.max_context or longest
        return draw_session_trace(
            Sessions(
                _parse_spread(given.turns, "turns", 1, build_geometric_turns),
                given.system_tokens,
                _parse_lengths(given.context_tokens, "prompt", limit, None, "context_tokens"),
                _parse_lengths(given.turn_tokens, "prompt", limit, None, "turn_tokens"),
                _parse_lengths(given.output_tokens, "output", limit, None),
                _parse_spread(given.think_seconds, "think_seconds", 1e3, build_exponential),
                limit,
                100.0 if given.users == OPEN_FIGURE else given.users,  # the question, as a rate's
                given.per_hour,
                given.answer_seconds,
            )
        )


def _parse_spread(
    entry: LengthsEntry, field: str, unit: float, build: Callable[[float], LengthDistribution]
) -> LengthDistribution:
    """Return a distribution in `unit` parts; `build` makes it from a mean alone."""
    if entry.exactly is None and entry.mean is not None and entry.p50 is None and entry.p95 is None:
        distribution = build(entry.mean * unit)
        largest = (entry.max or math.inf) * unit
        return LengthDistribution.from_samples(np.minimum(distribution.values, largest))
    figures = {name: value * unit for name, value in entry.model_dump(exclude_none=True).items()}
    return _parse_lengths(LengthsEntry(**figures), "prompt", math.inf, None, field)


def _parse_lengths(
    entry: LengthsEntry | None,
    side: RequestSide,
    longest: float,
    measured: LengthDistribution | None,
    field: str = "",
    context: float = math.inf,
) -> LengthDistribution:
    """Return the scenario's lengths in `field`, or the `measured` ones of its trace.

    A mean alone is spread as in a comparable public trace.
    """
    field = field or f"{side}_tokens"
    if entry is None:
        if measured is None:
            raise PlannerError(f"workload: needs {field} (mean, and p50 or p95) or a trace")
        return measured
    with add_error_context(f"workload, {field}"):
        if entry.exactly is not None:
            return LengthDistribution.from_constant(entry.exactly)
        assert entry.mean is not None
        if entry.p50 is not None or entry.p95 is not None:
            figures = entry.mean, entry.p95, entry.p50
            if entry.max is None and math.isfinite(context):
                with suppress(PlannerError):  # the tail is cut, unless the p95 lies beyond
                    return LengthDistribution.from_lognormal(*figures, context)
            return LengthDistribution.from_lognormal(*figures, entry.max)
        if entry.max is not None and entry.max < entry.mean:
            raise PlannerError(
                f"max must not be below the mean, got {entry.max:g} and {entry.mean:g}"
            )
        return LengthDistribution.from_public_traces(
            entry.mean, side, min(entry.max or longest, longest)
        )
