"""A day of traffic instead of its busiest moment: how many replicas each hour needs, and when to start them.

A replica takes what one takes at most within the service level, and not more than the headroom
leaves. The day is then replayed through the router, several times over with other arrivals, and an
hour in which one more such day could break a promise gets another replica, up to those of the fixed
fleet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import numpy as np

from planner.engines.deployment import Deployment
from planner.hardware.prices import look_up_gpu_price
from planner.latency.speculative_decoding import build_step_model
from planner.latency.startup_time import DEFAULT_MAX_STARTUP_S, estimate_startup
from planner.memory.memory_plan import get_memory_plan
from planner.planning.candidate import Candidate
from planner.planning.capacity import derive_effective_workload
from planner.planning.evaluation import simulate_candidate
from planner.planning.prediction import Prediction
from planner.planning.scenario import Scenario
from planner.planning.simulation_runs import run_in_parallel
from planner.planning.slo import SloTarget
from planner.simulator.kernel_types import RouterConfig
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import simulate_workload
from planner.workload.request_generator import sample_arrivals
from planner.workload.workload import Workload

MAX_REQUESTS_PER_DAY = 100_000
"""Requests of a day that are replayed; a busier day is replayed with as many seconds of each hour as come to that."""
NUM_SIMULATED_DAYS = 5
"""Days that are replayed, each with other arrivals and lengths."""
NEXT_DAY_SIGMA = 3.04
"""A sixth day is above the mean of five by so many of their standard deviations once in forty (Student's t with four
degrees of freedom, 2.776, times the root of 1 + 1/5)."""
SIMILAR_LOAD_FRACTION = 0.85
"""Hours with so much of an hour's traffic a replica, up to all of it, tell what may become of it."""
MAX_SCALING_ROUNDS = 6
"""Times that replicas are added until every hour holds; at the last an hour that does not gets the whole fleet."""
MAX_DAYS_COMPARED, MAX_BILL_RATIO = 3, 0.98
"""Plans whose day is compared with that of the first, and the share of its bill below which one is preferred."""
MAX_BISECTIONS = 5
"""Of the rate that a replica may take, between that of the plan and what it serves at most."""
STABILIZATION_BOUNDS_S = (300.0, 3600.0)
"""Least and most seconds that a lull lasts before a replica is given back: Kubernetes' own default, and what it accepts
(scaleDown.stabilizationWindowSeconds, kubernetes.io, Horizontal Pod Autoscaling)."""


@dataclass(frozen=True)
class AutoscalingPlan:
    """Replicas by hour for a day that repeats, with what was found when the day was replayed."""

    deployment: Deployment  # the fixed fleet: as many replicas as the busiest hour needs
    rates: tuple[float, ...]  # requests/s that are taken on, hour by hour
    replicas: tuple[int, ...]
    hourly_limit_utilization: tuple[
        float, ...
    ]  # share of the tightest limit that each hour may use on another such day, 1 = all of it
    requests: int  # of the days that were replayed
    max_load_replica: Prediction  # of a single replica with all the traffic that it may take
    lead_s: float  # before its hour a replica is started: the pessimistic end of a start-up
    drain_s: float  # until the last request of a replica that gets no more has ended (p99)
    usd_per_gpu_hour: float | None
    starts_at_midnight: bool  # the first hour begins at midnight, a week's on Monday

    @property
    def scale_up_in_flight(self) -> float:
        """Requests in a replica, running or waiting, above which another is needed: those of a replica at its most."""
        return self.max_load_replica.mean_in_flight

    @property
    def stabilization_s(self) -> float:
        """How long a replica must not have been needed before it is given back: at least as long as a new one takes."""
        return compute_stabilization_s(self.lead_s)

    @property
    def violated_hours(self) -> tuple[int, ...]:
        """The hours, from 0, in which a promise was broken on a replayed day, or may be on another."""
        return tuple(np.flatnonzero(np.array(self.hourly_limit_utilization) > 1).tolist())

    @property
    def verdict(self) -> str:
        """Whether the promises are kept in every hour, in words."""
        if not self.violated_hours:
            return (
                f"every hour holds on {NUM_SIMULATED_DAYS} days replayed at the expected step cost"
            )
        hours = ", ".join(map(str, self.violated_hours))
        return (
            f"hours that may be missed with the whole fleet too, of {NUM_SIMULATED_DAYS} days"
            f" replayed: {hours}"
        )

    @property
    def num_starts(self) -> int:
        """Replicas that are started in a day, as many as are given back."""
        return int(np.maximum(np.diff(self.replicas, prepend=self.replicas[-1]), 0).sum())

    @property
    def fixed_gpu_hours(self) -> float:
        return float(self.deployment.num_gpus_billed * len(self.rates))

    @cached_property
    def gpu_hours(self) -> float:
        """GPU-hours that are paid; never more than the fixed fleet's."""
        return min(self.compute_billed_gpu_hours(np.array(self.replicas)), self.fixed_gpu_hours)

    def compute_billed_gpu_hours(self, replicas: np.ndarray) -> float:
        """GPU-hours of each hour's `replicas`, and of starting, stabilisation and drain at each change."""
        gpus = {
            count: self.deployment.with_replicas(count).num_gpus_billed
            for count in set(replicas.tolist())
        }
        rented = np.array([gpus[count] for count in replicas.tolist()])
        more = np.maximum(np.diff(rented, prepend=rented[-1]), 0).sum()
        return float(
            rented.sum() + more * (self.lead_s + self.stabilization_s + self.drain_s) / 3600
        )

    @property
    def max_replica_rps(self) -> float:
        """Requests/s that a replica may take."""
        assert (
            self.max_load_replica.workload is not None
            and self.max_load_replica.workload.rate is not None
        )
        return self.max_load_replica.workload.rate

    def compute_replicas_needed(self, times: float) -> np.ndarray:
        """[hours] replicas for so many times the traffic, each with the most that one may take."""
        return np.ceil(np.array(self.rates) * times / self.max_replica_rps - 1e-9).astype(int)

    @property
    def saved_fraction(self) -> float:
        """Share of the fixed fleet's GPU-hours that is not paid."""
        return 1 - self.gpu_hours / self.fixed_gpu_hours

    def __str__(self) -> str:
        saved, few, most = (
            self.fixed_gpu_hours - self.gpu_hours,
            min(self.replicas),
            max(self.replicas),
        )
        if few == most:
            return (
                f"each of the {len(self.rates)} hours needs as many replicas, {most}: scaling saves"
                " nothing"
            )
        return (
            f"{few} to {most} replicas over {len(self.rates)} hours save {saved:,.0f} of "
            f"{self.fixed_gpu_hours:,.0f} GPU-hours ({self.saved_fraction:.0%})"
        )


def compute_stabilization_s(start_s: float) -> float:
    """Seconds for which a replica that takes `start_s` to start must not have been needed before it is given back."""
    return min(max(start_s, STABILIZATION_BOUNDS_S[0]), STABILIZATION_BOUNDS_S[1])


def plan_autoscaling(scenario: Scenario, candidate: Candidate) -> AutoscalingPlan | None:
    """Replicas of `candidate` in each hour of the scenario's day; None without one, and where nothing is predicted."""
    performance = candidate.prediction.performance
    if scenario.daily_profile is None or performance is None:
        return None
    deployment = candidate.deployment
    load = replace(
        derive_effective_workload(deployment, scenario.workload), trace=None, num_prompts=None
    )
    prediction = find_max_replica_load(replace(scenario, workload=load), candidate)
    assert (
        load.rate is not None
        and prediction.workload is not None
        and prediction.workload.rate is not None
    )
    rates = tuple(share * load.rate for share in scenario.daily_profile.hourly_fractions)
    begins, most = estimate_startup(deployment, scenario.storage), deployment.layout.replicas
    lead_s, drain_s = (
        begins.total.hi if begins else DEFAULT_MAX_STARTUP_S,
        performance.e2e["p99"].mid,
    )
    needed = [math.ceil(rate / prediction.workload.rate - 1e-9) for rate in rates]
    counts = np.clip(needed, min(scenario.replicas_at_least, most), most)
    price = look_up_gpu_price(deployment.gpu, scenario.prices)

    def one_day(seed: int) -> SimulationResult:
        return simulate_day(deployment, load, rates, counts.tolist(), seed=seed)

    days: list[SimulationResult] = []
    left = MAX_SCALING_ROUNDS
    while len(days) < NUM_SIMULATED_DAYS:  # one day tells most of what is missing
        counts = fill_short_lulls(counts, (lead_s + drain_s) / 3600)
        days += run_in_parallel(one_day, range(len(days), NUM_SIMULATED_DAYS if days else 1))
        shares = [compute_hourly_utilization(day, rates, scenario.slo_targets) for day in days]
        largest = bound_next_day(shares, rates, counts)
        short = (largest > 1) & (counts < most)
        if short.any():
            days, left = [], left - 1
            counts = np.where(short, counts + 1 if left > 0 else most, counts)
    return AutoscalingPlan(
        deployment, rates, tuple(counts.tolist()), tuple(largest.tolist()),
        sum(len(day.output) for day in days), prediction, lead_s, drain_s,
        price.median_usd if price else None, scenario.daily_profile.peak_rps is None,
    )  # fmt: skip


def rank_by_daily_cost(
    scenario: Scenario, holding: list[Candidate]
) -> tuple[list[Candidate], AutoscalingPlan | None]:
    """`holding` by the rule, the day's bill being what counts, and the day of the first where it was worked out.

    That of the first is held against the best of every other layout or GPU that may undercut it.
    One that may miss hours is paid in full, and where none costs clearly less the order stays.
    """
    first = holding[0]
    kinds = {
        candidate.display_key: candidate
        for candidate in reversed(holding)
        if candidate.display_key != first.display_key
    }
    rivals = sorted(kinds.values(), key=lambda found: _estimate_min_daily_cost(scenario, found))
    rivals = [
        found for found in rivals if _estimate_min_daily_cost(scenario, found) < first.cost_key
    ][:MAX_DAYS_COMPARED]
    days = {
        found.identity_key: plan_autoscaling(scenario, found)
        for found in [first, *rivals]
        if rivals
    }
    saved = {
        whose: day.saved_fraction for whose, day in days.items() if day and not day.violated_hours
    }
    paid = [
        replace(found, billed_fraction=1 - saved.get(found.identity_key, 0)) for found in holding
    ]
    best, today = min(paid, key=attrgetter("rank_key")), paid[0]
    if (
        best.cost_key[1] < MAX_BILL_RATIO * today.cost_key[1]
        and best.cost_key[0] == today.cost_key[0]
    ):
        holding = sorted(paid, key=attrgetter("rank_key"))
    return holding, days.get(holding[0].identity_key)


def _estimate_min_daily_cost(scenario: Scenario, candidate: Candidate) -> tuple[bool, float]:
    """The least that `candidate` may cost over the day, replicas starting and ending at once."""
    assert scenario.daily_profile is not None
    replicas, (unpriced, price) = candidate.deployment.layout.replicas, candidate.price_key
    hours = [
        math.ceil(replicas * candidate.capacity_utilization * share - 1e-9)
        for share in scenario.daily_profile.hourly_fractions
    ]
    least = np.maximum(hours, min(scenario.replicas_at_least, replicas)).mean()
    return unpriced, price * float(least) / replicas


def find_max_replica_load(
    scenario: Scenario, candidate: Candidate, *, safe: bool = False
) -> Prediction:
    """One replica with the most traffic that it serves within every promise, at least its share of the scenario's.

    `safe`: at the pessimistic end too.
    """
    rate, replicas = scenario.workload.rate, candidate.deployment.layout.replicas
    most = candidate.prediction.performance
    assert most is not None and most.capacity is not None and rate is not None
    single = replace(candidate, deployment=candidate.deployment.with_replicas(1))

    def at(rate: float) -> Candidate:
        return simulate_candidate(
            replace(scenario, workload=scenario.workload.with_rate(rate), power_at_most=None),
            single,
        )

    low, high = rate / replicas, most.capacity.mid * (1 - scenario.headroom) / replicas
    best = at(low)
    for k in range(MAX_BISECTIONS if high > low * 1.02 else 0):
        tried = high * 0.999 if not k else (low + high) / 2
        if (found := at(tried)).is_feasible and not (safe and found.at_risk):
            low, best = tried, found
        else:
            high = tried
        if high - low < 0.02 * low:
            break
    return best.prediction


def fill_short_lulls(counts: np.ndarray, hours: float) -> np.ndarray:
    """`counts` of a day that repeats, where what is away for no longer than `hours` stays instead."""
    kept = np.array(counts)
    for level in range(int(kept.min()) + 1, int(kept.max()) + 1):
        away = np.flatnonzero(kept < level)
        turns = np.split(away, np.flatnonzero(np.diff(away) > 1) + 1)
        if (
            len(turns) > 1 and turns[0][0] == 0 and turns[-1][-1] == len(kept) - 1
        ):  # midnight is no end
            turns = [np.concatenate((turns[-1], turns[0])), *turns[1:-1]]
        for turn in turns:
            if len(turn) <= hours:
                kept[turn] = level
    return kept


def simulate_day(
    deployment: Deployment, load: Workload, rates: Sequence[float], replicas: Sequence[int],
    late_s: float = 0.0,
    seed: int = 0,
) -> SimulationResult:  # fmt: skip
    """A day behind the router, so many `replicas` of `deployment` taking requests in each hour, of `_hour_s` seconds.

    Requests come at `rates` (requests/s), as unevenly as those of `load`. Replicas that an hour
    adds take requests from `late_s` after its beginning on; those that it needs no more end what
    they have.
    """
    seconds, counts = _compute_hour_s(rates), np.array(replicas)
    sums = np.concatenate(([0.0], np.cumsum(rates))) * seconds
    n = max(round(sums[-1]), 1)
    turns = sample_arrivals(
        n, n / sums[-1], load.burstiness, np.random.default_rng(seed)
    )  # as if one came a second
    more = counts > np.concatenate((counts[:1], counts[:-1]))
    most = deployment.with_replicas(int(counts.max()))
    router = RouterConfig(
        most.num_engine_instances,
        scale_at=np.arange(len(rates)) * seconds + np.where(more, min(late_s, seconds), 0.0),
        scale_to=counts * most.layout.dp,
    )
    return simulate_workload(
        most, get_memory_plan(most).pool, build_step_model(most), load, seed, requests=n, even=True,
        router=router,
        arrival=np.interp(turns, sums, np.arange(len(sums)) * seconds),
    )  # fmt: skip


def _compute_hour_s(rates: Sequence[float]) -> float:
    """Seconds of each hour that are replayed."""
    return min(3600.0, MAX_REQUESTS_PER_DAY / sum(rates))


def bound_next_day(
    shares: Sequence[np.ndarray], rates: Sequence[float], replicas: np.ndarray
) -> np.ndarray:
    """[hours] the share of a limit that each may use on another day, after so many with such `shares`.

    It is at least what was seen of it, and of hours almost as busy: what befell them can befall it.
    """
    if len(shares) == 1:
        return shares[0]
    own = np.maximum(
        np.max(shares, axis=0),
        np.mean(shares, axis=0) + NEXT_DAY_SIGMA * np.std(shares, axis=0, ddof=1),
    )
    busy = np.array(rates) / replicas
    alike = (
        (busy <= busy[:, None])
        & (busy >= SIMILAR_LOAD_FRACTION * busy[:, None])
        & (replicas >= replicas[:, None])
    )
    worst: np.ndarray = np.where(alike, own, 0.0).max(axis=1)
    return worst


def compute_hourly_utilization(
    day: SimulationResult, rates: Sequence[float], level: Sequence[SloTarget]
) -> np.ndarray:
    """[hours] the share of the tightest limit that the requests sent in each hour of a replayed day used.

    Gaps between tokens are not known by hour: ITL holds as it does for a replica with the most that
    it may take.
    """
    hour = np.minimum(day.sent // _compute_hour_s(rates), len(rates) - 1)
    shares = np.zeros(len(rates))
    for target in level:
        if target.metric == "itl":
            continue
        values, own = (
            getattr(day, target.metric),
            hour if target.metric != "tpot" else hour[day.output > 1],
        )
        for k in range(len(rates)):
            if len(some := values[own == k]):
                point = target.percentile
                value = some.mean() if point == "mean" else np.quantile(some, int(point[1:]) / 100)
                shares[k] = max(shares[k], value / target.seconds)
    return shares
