"""How much of each limit a plan uses: a row for every target, the load, and other limits."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.analysis.phrases import METRIC_NAMES
from planner.core.intervals import Interval
from planner.core.number_format import (
    format_distinct,
    format_limit_seconds,
    format_number,
    format_seconds,
)
from planner.planning.candidate import Candidate
from planner.planning.evaluation import (
    compute_offered_rps,
    estimate_run_hours,
    get_capacity_rps,
    get_load_limit_name,
    list_resource_limits,
)
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.slo import (
    LimitOdds,
    LimitStatus,
    SloTarget,
    compute_tolerance,
    get_limit_status,
    get_pessimistic_value,
    get_range_at,
)


@dataclass(frozen=True)
class LimitRow:
    """A limit, what is expected of it, and its status."""

    name: str  # "First token (TTFT) p95"
    short_name: str  # "p95 TTFT"
    value: str  # "330 ms"
    limit: str  # "1 s"
    use: Interval  # share of the limit, 1 at the limit, with its range at the asked probability
    status: LimitStatus
    pessimistic: str = ""  # the value at the probability that the scenario asks for
    pessimistic_use: float = 0.0
    target: SloTarget | None = None  # of a latency
    is_load: bool = False  # the offered load, or the hours of a job
    load: Interval | None = None  # of a load: the share of the limit with its 80% interval


def list_limit_rows(plan: Plan) -> list[LimitRow]:
    """List the limits of a plan's best candidate: latencies, then the load, then others."""
    if plan.best is None or plan.performance is None:
        return []
    return list(_generate_rows(plan.scenario, plan.best))


def find_tightest_target(plan: Plan) -> SloTarget | None:
    """Find the target that is missed by most, else whose pessimistic value is nearest to its limit."""
    if plan.best is None or plan.performance is None:
        return None
    rows = [row for row in _generate_rows(plan.scenario, plan.best) if row.target]
    tightest = max(rows, key=lambda row: (max(row.use.mid, 1.0), row.pessimistic_use), default=None)
    return tightest.target if tightest else None


def list_violated_limits(scenario: Scenario, candidate: Candidate) -> list[str]:
    """List the limits that a candidate exceeds: "p95 TTFT 1.1 s > 1 s"."""
    if candidate.prediction.performance is None:
        return [candidate.prediction.memory.reason]
    missed = [row for row in _generate_rows(scenario, candidate) if row.status == "missed"]
    if any(row.is_load for row in missed):  # then waits grow without bound, which is no news
        missed = [row for row in missed if not math.isinf(row.use.mid)]
    unit = "" if scenario.offline else " requests/s"
    return [
        f"{row.short_name} {row.value} > {row.limit}{unit if row.is_load else ''}" for row in missed
    ]


def _generate_rows(scenario: Scenario, candidate: Candidate) -> Iterator[LimitRow]:
    performance = candidate.prediction.performance
    assert performance is not None
    z = compute_tolerance(scenario.confidence)
    for target in scenario.slo_targets:
        if not (odds := candidate.get_limit(target.name)):
            continue  # answers of one token have no time per token
        value = performance.get_for_display(target.metric, target.percentile)
        yield LimitRow(
            f"{METRIC_NAMES[target.metric]} ({target.metric.upper()}) {target.percentile}",
            target.name,
            format_seconds(value.mid, target.seconds),
            format_limit_seconds(target.seconds),
            _get_range(value / target.seconds, odds, z),
            odds.status,
            format_seconds(odds.pessimistic_use * target.seconds, target.seconds),
            odds.pessimistic_use,
            target,
        )
    if load := _build_load_row(scenario, candidate, z):
        yield load
    for name, _, amount, limit in list_resource_limits(scenario, candidate.prediction):
        if amount is None:
            continue
        yield LimitRow(
            name.capitalize(),
            name,
            f"{format_distinct(amount.mid, limit.value)} {limit.unit}",
            f"{limit.value:,.6g} {limit.unit}",
            get_range_at(use := amount / limit.value, z),
            get_limit_status(use, z),
            f"{format_distinct(get_pessimistic_value(amount, z), limit.value)} {limit.unit}",
        )
    refused = candidate.prediction.rejected_fraction
    if refused > scenario.refused_at_most:
        use = Interval.from_value(refused / max(scenario.refused_at_most, 1e-6))
        amount_text, limit_text = f"{refused:.1%}", f"{scenario.refused_at_most:.1%}"
        yield LimitRow("Rejected requests", "rejected", amount_text, limit_text, use, "missed")


def _get_range(use: Interval, limit: LimitOdds, z: float) -> Interval:
    """Get the bar of a limit: it ends where the asked probability does, and begins as far below."""
    return replace(get_range_at(use, z), hi=max(limit.pessimistic_use, use.mid))


def _build_load_row(scenario: Scenario, candidate: Candidate, z: float) -> LimitRow | None:
    """Build the row of the offered load, or of the hours of a job.

    In a closed loop it is that of the slots which users need, if any.
    """
    performance, load = candidate.prediction.performance, scenario.workload
    capacity = performance and get_capacity_rps(scenario, performance)
    limit = candidate.get_limit(get_load_limit_name(scenario))
    if not capacity or limit is None:
        return None
    if load.rate is None:
        users = load.concurrency or 0
        return LimitRow(
            "Concurrent requests", "concurrency", f"{users:,}", f"{round(users / limit.use):,}",
            Interval.from_value(limit.use), limit.status,
        )  # fmt: skip
    admitted = compute_offered_rps(scenario, candidate.prediction)
    usable = capacity * (1 - scenario.headroom)
    use = usable.map_monotone(lambda rate: admitted / max(rate, 1e-9))
    slow_use = limit.pessimistic_use
    if hours := estimate_run_hours(scenario, candidate):
        limit_h = hours.mid / use.mid
        slow_h = format_distinct(limit_h * slow_use, limit_h)
        return LimitRow(
            f"Job time, {scenario.headroom:.0%} headroom", "job time", f"{format_distinct(hours.mid, limit_h)} h",
            f"{format_number(limit_h)} h", _get_range(use, limit, z), limit.status, f"{slow_h} h",
            slow_use, is_load=True, load=use,
        )  # fmt: skip
    offered = load.rate
    if (offered > usable.mid) != (use.mid > 1):
        offered = admitted  # the rest is rejected
    allowed = f", {1 - scenario.headroom:.0%} of capacity" if scenario.headroom else ""
    name = "Busiest hour" if scenario.daily_profile else "Load"
    slow = usable.mid * use.mid / slow_use
    return LimitRow(
        f"{name} (req/s){allowed}", name.lower(), format_distinct(offered, usable.mid, 3),
        format_number(usable.mid), _get_range(use, limit, z), limit.status, format_number(slow), slow_use,
        is_load=True, load=use,
    )  # fmt: skip
