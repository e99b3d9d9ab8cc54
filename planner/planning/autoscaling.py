"""Plan replicas for each hour of a daily profile, and when to start them.

A replica gets up to the load that it serves within the SLOs and the headroom, as probably as the
scenario asks. Lulls that are shorter than a start and a stop keep their replicas.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import numpy as np

from planner.core.progress import show_step
from planner.engines.deployment import Deployment
from planner.hardware.prices import look_up_gpu_price
from planner.latency.startup_time import DEFAULT_MAX_STARTUP_S, estimate_startup
from planner.planning.candidate import Candidate
from planner.planning.capacity import derive_effective_workload
from planner.planning.evaluation import get_candidate_workload
from planner.planning.max_load import find_max_load
from planner.planning.prediction import Prediction, predict
from planner.planning.scenario import Scenario

MAX_BILL_RATIO = 0.98
"""A plan whose day costs less than this fraction of the first one's is taken instead."""
STABILIZATION_BOUNDS_S = (300.0, 3600.0)
"""Bounds of the stabilization window before a replica is stopped: Kubernetes' default and maximum
(scaleDown.stabilizationWindowSeconds, kubernetes.io, Horizontal Pod Autoscaling)."""


@dataclass(frozen=True)
class AutoscalingPlan:
    """Replicas by hour for a day that repeats.

    `starts_at_midnight` says that the first hour begins at midnight, on Monday for a week.
    """

    deployment: Deployment  # the fixed fleet: as many replicas as the busiest hour needs
    rates: tuple[float, ...]  # admitted requests/s by hour
    replicas: tuple[int, ...]
    max_load_replica: Prediction  # of a single replica at the largest load that it may get
    lead_s: (
        float  # a replica starts this long before its hour: pessimistic end of the start-up time
    )
    drain_s: float  # until a stopping replica has finished its last request (p99)
    usd_per_gpu_hour: float | None
    starts_at_midnight: bool
    admitted_fraction: float = 1.0  # of the traffic; the rest is rejected as too long
    idle_share: float = 0.0  # of the price, which is paid for all hours: reserved, or owned

    @property
    def scale_up_in_flight(self) -> float:
        """Running and waiting requests per replica above which another one is needed."""
        return self.max_load_replica.mean_in_flight

    @property
    def stabilization_s(self) -> float:
        """Seconds without need after which a replica is stopped: at least its start-up time."""
        return compute_stabilization_s(self.lead_s)

    @property
    def load_shares(self) -> tuple[float, ...]:
        """By hour, the traffic as a share of the largest that its replicas may get."""
        each = self.max_replica_rps
        pairs = zip(self.rates, self.replicas, strict=True)
        return tuple(rate / (max(count, 1) * each) for rate, count in pairs)

    @property
    def violated_hours(self) -> tuple[int, ...]:
        """Hours, from 0, for which even all replicas are too few."""
        return tuple(hour for hour, share in enumerate(self.load_shares) if share > 1 + 1e-9)

    @property
    def num_starts(self) -> int:
        """Replicas that are started in a day, which equals those that are stopped."""
        return int(np.maximum(np.diff(self.replicas, prepend=self.replicas[-1]), 0).sum())

    @property
    def fixed_gpu_hours(self) -> float:
        """Billed GPU-hours of the fixed fleet."""
        return float(self.deployment.num_gpus_billed * len(self.rates))

    @cached_property
    def gpu_hours(self) -> float:
        """Billed GPU-hours, never more than those of the fixed fleet."""
        return min(self.compute_billed_gpu_hours(np.array(self.replicas)), self.fixed_gpu_hours)

    @property
    def stopped_gpu_hours(self) -> float | None:
        """Billed GPU-hours if no replica runs in hours without traffic; None if that changes nothing."""
        stopped = np.where(np.array(self.rates) > 0, self.replicas, 0)
        hours = self.compute_billed_gpu_hours(stopped)
        return hours if hours < self.gpu_hours else None

    def compute_billed_gpu_hours(self, replicas: np.ndarray) -> float:
        """Compute the GPU-hours of `replicas` by hour, with start, stabilization and drain."""
        counts = replicas.tolist()
        gpus = {n: n and self.deployment.with_replicas(n).num_gpus_billed for n in {*counts}}
        billed = np.array([gpus[n] for n in counts])
        added = np.maximum(np.diff(billed, prepend=billed[-1]), 0).sum()
        return float(
            billed.sum() + added * (self.lead_s + self.stabilization_s + self.drain_s) / 3600
        )

    @property
    def max_replica_rps(self) -> float:
        """The largest load of a replica within the SLOs, in requests/s."""
        load = self.max_load_replica.workload
        assert load and load.rate
        return load.rate

    def count_paid_hours(self, gpu_hours: float) -> float:
        """Count the hours at the full price that are paid for `gpu_hours`, those that are off included."""
        return gpu_hours + self.idle_share * (self.fixed_gpu_hours - gpu_hours)

    @property
    def saved_fraction(self) -> float:
        """Fraction of the fixed fleet's GPU-hours that is saved."""
        return 1 - self.gpu_hours / self.fixed_gpu_hours


def compute_stabilization_s(start_s: float) -> float:
    """Compute the stabilization window in seconds for replicas that take `start_s` to start."""
    return min(max(start_s, STABILIZATION_BOUNDS_S[0]), STABILIZATION_BOUNDS_S[1])


@show_step("replicas by the hour")
def plan_autoscaling(scenario: Scenario, candidate: Candidate) -> AutoscalingPlan | None:
    """Plan the replicas of `candidate` by hour; None without a daily profile or a prediction."""
    performance = candidate.prediction.performance
    if scenario.daily_profile is None or performance is None:
        return None
    deployment = candidate.deployment
    load = replace(
        derive_effective_workload(deployment, scenario.workload), trace=None, num_prompts=None
    )
    rate, single = load.rate, deployment.with_replicas(1)
    assert rate
    # at least its part of the traffic; the probability that is asked for, unless the plan is at risk
    own = load.with_rate(rate / deployment.layout.replicas)
    probability = 0.0 if candidate.at_risk else scenario.confidence
    most = find_max_load(replace(scenario, workload=own), single, probability)
    most = max(most, own.rate or 0.0)
    served = get_candidate_workload(replace(scenario, workload=load), single).with_rate(most)
    prediction = predict(single, served, scenario.prices)
    rates = tuple(fraction * rate for fraction in scenario.daily_profile.hourly_fractions)
    startup, fleet_size = estimate_startup(deployment, scenario.storage), deployment.layout.replicas
    lead_s = startup.total.hi if startup else DEFAULT_MAX_STARTUP_S
    drain_s = performance.get("e2e", "p99").mid
    needed = [math.ceil(rate / most - 1e-9) for rate in rates]
    counts = np.clip(needed, min(scenario.replicas_at_least, fleet_size), fleet_size)
    counts = fill_short_lulls(counts, (lead_s + drain_s) / 3600)
    price = look_up_gpu_price(deployment.gpu, scenario.prices)
    return AutoscalingPlan(
        deployment, rates, tuple(counts.tolist()), prediction, lead_s, drain_s,
        price.median_usd if price else None, scenario.daily_profile.peak_rps is None,
        rate / (scenario.workload.rate or rate), scenario.get_idle_share(deployment.gpu),
    )  # fmt: skip


def rank_by_daily_cost(
    scenario: Scenario, holding: list[Candidate]
) -> tuple[list[Candidate], AutoscalingPlan | None]:
    """Rank feasible candidates, of different layouts or GPUs, by the cost of the day.

    Also return the day of the first, None if it was not planned. One that may miss hours counts at
    its full price. The order stays if none costs clearly less.
    """
    if len(holding) < 2:
        return holding, None
    days = {each.identity_key: plan_autoscaling(scenario, each) for each in holding}
    billed = [_bill(each, days[each.identity_key]) for each in holding]
    best, current = min(billed, key=attrgetter("rank_key")), billed[0]
    if (
        best.cost_key[1] < MAX_BILL_RATIO * current.cost_key[1]
        and best.cost_key[0] == current.cost_key[0]
    ):
        holding = sorted(billed, key=attrgetter("rank_key"))
    return holding, days[holding[0].identity_key]


def _bill(candidate: Candidate, day: AutoscalingPlan | None) -> Candidate:
    if day is None or day.violated_hours:
        return candidate
    paid = day.count_paid_hours(day.gpu_hours) / day.fixed_gpu_hours
    return replace(candidate, billed_fraction=paid)


def bill_by_day(scenario: Scenario, candidate: Candidate, chosen: Candidate) -> Candidate:
    """Bill an option by the day if `chosen` is, and the option may look cheaper for want of it."""
    if candidate.identity_key == chosen.identity_key:
        return chosen
    if chosen.billed_fraction == 1 or candidate.price_key >= chosen.price_key:
        return candidate
    return _bill(candidate, plan_autoscaling(scenario, candidate))


def fill_short_lulls(counts: np.ndarray, hours: float) -> np.ndarray:
    """Keep replicas of `counts`, a day that repeats, through lulls of up to `hours`."""
    shifts = range(min(int(hours), len(counts) - 1) + 1)
    filled = np.max([np.roll(counts, shift) for shift in shifts], axis=0)
    return np.asarray(np.min([np.roll(filled, -shift) for shift in shifts], axis=0))
