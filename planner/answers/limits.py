"""The limits of a scenario, and what a candidate takes of each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from planner.core.intervals import Interval
from planner.planning.candidate import Candidate
from planner.planning.evaluation import (
    compute_offered_rps,
    estimate_run_hours,
    get_capacity_rps,
    get_load_limit_name,
)
from planner.planning.max_load import is_least_load
from planner.planning.scenario import Scenario
from planner.planning.slo import (
    LimitOdds,
    LimitStatus,
    SloTarget,
    compute_tolerance,
    get_range_at,
)


@dataclass(frozen=True)
class Limit:
    """One limit of the scenario, and what a deployment takes of it."""

    kind: Literal["latency", "load", "job", "users", "rejected"]
    name: str  # "p95 TTFT", "load"
    unit: str  # "s", "requests/s", "h", "requests", or "" for a share
    value: float  # expected
    limit: float
    pessimistic: float  # at the asked probability: the value, or of a load what may be used then
    use: Interval  # the expected share, up to that at the asked probability, and as far below
    pessimistic_use: float
    status: LimitStatus
    probability: float
    target: SloTarget | None = None
    load: Interval | None = None  # share of the usable capacity, with its 80% interval

    @property
    def is_load(self) -> bool:
        """Whether it is that of requests/s, or of the hours of a job."""
        return self.kind in ("load", "job")


def list_limits(scenario: Scenario, candidate: Candidate) -> Iterator[Limit]:
    """List the limits of a candidate: latencies, then the load, then others."""
    prediction, z = candidate.prediction, compute_tolerance(scenario.confidence)
    assert prediction.performance is not None
    for target in scenario.slo_targets:
        if not (odds := candidate.get_limit(target.name)):
            continue  # answers of one token have no time per token
        value = prediction.performance.get_for_display(target.metric, target.percentile)
        use = _end_at_pessimistic(value / target.seconds, odds, z)
        yield Limit(
            "latency", target.name, "s", value.mid, target.seconds, odds.pessimistic_use * target.seconds,
            use, odds.pessimistic_use, odds.status, odds.probability, target,
        )  # fmt: skip
    if load := _build_load_limit(scenario, candidate, z):
        yield load
    refused, allowed = prediction.rejected_fraction, scenario.refused_at_most
    if refused > allowed:
        share = refused / max(allowed, 1e-6)
        use = Interval.from_value(share)
        yield Limit(
            "rejected", "rejected", "", refused, allowed, refused, use, share, "missed", 0.0
        )


def _end_at_pessimistic(use: Interval, odds: LimitOdds, z: float) -> Interval:
    """Get the range of a limit up to the asked probability, and as far below."""
    return replace(get_range_at(use, z), hi=max(odds.pessimistic_use, use.mid))


def _build_load_limit(scenario: Scenario, candidate: Candidate, z: float) -> Limit | None:
    """Build the limit of requests/s, of a job's hours, or of the slots that users need."""
    performance, load = candidate.prediction.performance, scenario.workload
    capacity = performance and get_capacity_rps(scenario, performance)
    odds = candidate.get_limit(get_load_limit_name(scenario))
    if not capacity or odds is None or is_least_load(scenario):
        return None
    if load.rate is None:
        users = load.concurrency or 0
        slots, use = round(users / odds.use), Interval.from_value(odds.use)
        return Limit(
            "users", "concurrency", "requests", users, slots, users, use, odds.use, odds.status,
            odds.probability,
        )  # fmt: skip
    admitted = compute_offered_rps(scenario, candidate.prediction)
    usable = capacity * (1 - scenario.headroom)
    share = usable.map_monotone(lambda rate: admitted / max(rate, 1e-9))
    use = _end_at_pessimistic(share, odds, z)
    if hours := estimate_run_hours(scenario, candidate):
        limit_h = hours.mid / share.mid
        return Limit(
            "job", "job time", "h", hours.mid, limit_h, limit_h * odds.pessimistic_use, use,
            odds.pessimistic_use, odds.status, odds.probability, load=share,
        )  # fmt: skip
    offered = load.rate
    if (offered > usable.mid) != (share.mid > 1):
        offered = admitted  # the rest is rejected
    return Limit(
        "load", "load", "requests/s", offered, usable.mid, usable.mid * share.mid / odds.pessimistic_use,
        use, odds.pessimistic_use, odds.status, odds.probability, load=share,
    )  # fmt: skip
