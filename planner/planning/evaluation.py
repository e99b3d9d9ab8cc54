"""Evaluate one deployment under the scenario's workload, and check its SLOs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from planner.core.intervals import Interval
from planner.core.number_format import format_distinct, format_number
from planner.engines.deployment import Deployment
from planner.hardware.prices import HOURS_PER_MONTH
from planner.latency.performance import Performance
from planner.planning.candidate import Candidate
from planner.planning.memory_odds import estimate_memory_probability
from planner.planning.prediction import Prediction, evaluate_batch
from planner.planning.scenario import Scenario
from planner.planning.slo import (
    MAX_TOLERANCE_SIGMAS,
    LimitOdds,
    SloTarget,
    compute_asked_tolerance,
    estimate_tolerance_from_interval,
    format_latency,
    get_pessimistic_value,
    rate_limit,
)
from planner.workload.workload import Workload

MAX_CAPACITY_ERROR_FACTOR = 1.3
"""What a deployment serves at most is in closed form at most so many times what the replay says."""


def evaluate_candidate(
    scenario: Scenario, deployment: Deployment, replicas: int, preference: tuple[int, ...] = ()
) -> Candidate:
    """Evaluate `replicas` of `deployment` under the scenario's workload and SLOs, analytically."""
    return evaluate_candidates(scenario, [(deployment, replicas, preference)])[0]


def evaluate_candidates(
    scenario: Scenario, cases: Sequence[tuple[Deployment, int, tuple[int, ...]]]
) -> list[Candidate]:
    """Evaluate every (deployment, replicas, preference); a batch takes little longer than one."""
    if not cases:
        return []
    deployments = [deployment.with_replicas(replicas) for deployment, replicas, _ in cases]
    predictions = evaluate_batch(
        [(each, get_candidate_workload(scenario, each)) for each in deployments], scenario.prices
    )
    return [
        check_against_slos(scenario, prediction, preference)
        for prediction, (_, _, preference) in zip(predictions, cases, strict=True)
    ]


REPLICA_LIMITS = {"max_model_len"}
"""Limits of one replica, known without a replay, that no number of replicas helps to keep."""


def may_be_feasible(candidate: Candidate) -> bool:
    """Tell whether the closed form, at its largest error, leaves open what no engine argument changes."""
    performance = candidate.prediction.performance
    if performance is None or not REPLICA_LIMITS.isdisjoint(candidate.violated_constraints):
        return False
    return candidate.capacity_utilization <= MAX_CAPACITY_ERROR_FACTOR


def get_candidate_workload(scenario: Scenario, deployment: Deployment) -> Workload:
    """Return the scenario's workload; if offline, a closed loop that fills every slot."""
    workload = scenario.workload
    return saturate_workload(deployment, workload) if scenario.offline else workload


def saturate_workload(deployment: Deployment, workload: Workload) -> Workload:
    """Turn `workload` into a closed loop that fills every slot (max_num_seqs) of `deployment`."""
    slots = deployment.num_slots
    return replace(
        workload, rate=None, trace=None, concurrency=min(slots, workload.num_prompts or slots)
    )


def check_against_slos(
    scenario: Scenario, prediction: Prediction, preference: tuple[int, ...] = (),
    limits: tuple[LimitOdds, ...] | None = None,
) -> Candidate:  # fmt: skip
    """Check a prediction against the SLOs and the limits of the scenario.

    `limits` are what replays say of the targets and of the load; without them the intervals do.
    """
    deployment, confidence = prediction.deployment, scenario.confidence
    if prediction.performance is None:
        limits = (rate_start(confidence),)
        return Candidate(
            deployment, prediction, (prediction.memory.reason,), (), ("memory",), math.inf, math.inf,
            preference, limits, 0.0, confidence,
        )  # fmt: skip
    limits = estimate_limits(scenario, prediction) if limits is None else limits
    capacity = _compute_capacity_utilization(scenario, prediction)
    known = {limit.name for limit in limits}
    latencies = {
        t: prediction.performance.get(t.metric, t.percentile) for t in scenario.slo_targets
    }
    utilization = max(
        [capacity, *(latencies[t].mid / t.seconds for t in latencies if t.name in known)]
    )
    texts = {target.name: partial(_describe_latency, target) for target in scenario.slo_targets}
    describe_load = partial(_describe_load, scenario, prediction)
    violations, risks = list[tuple[str, str]](), list[str]()
    for limit in limits:
        if limit.status == "missed":
            violations.append((limit.name, texts.get(limit.name, describe_load)(limit)))
        elif limit.status == "at risk" and limit.pessimistic_use > 1:
            risks.append(texts.get(limit.name, describe_load)(limit))
    if prediction.rejected_fraction > scenario.refused_at_most:
        text = (
            f"{prediction.rejected_fraction:.1%} of the requests are rejected, above"
            f" {scenario.refused_at_most:.1%}"
        )
        refused = prediction.rejected_fraction / max(scenario.refused_at_most, 1e-6)
        violations.append(("max_model_len", text))
        utilization = max(utilization, refused)
    p_memory = compute_memory_probability(prediction)
    if p_memory < confidence:
        risks.append(prediction.memory.reason or "it may run out of memory")
    limits += tuple(
        rate_limit(name, utilization, utilization, -MAX_TOLERANCE_SIGMAS, p_memory, confidence)
        for name, _ in violations
        if name not in known
    )
    violations.sort(key=lambda violation: violation[0] not in REPLICA_LIMITS)
    constraints, sentences = zip(*violations, strict=True) if violations else ((), ())
    return Candidate(
        deployment, prediction, sentences, tuple(risks), constraints, utilization, capacity,
        preference, limits, p_memory, confidence, deployment.gpu.name in scenario.owned_usd_per_hour,
    )  # fmt: skip


def rate_start(confidence: float) -> LimitOdds:
    """Rate an engine that does not start."""
    return rate_limit("memory", math.inf, math.inf, -MAX_TOLERANCE_SIGMAS, 0.0, confidence)


def get_load_limit_name(scenario: Scenario) -> str:
    """Get what the limit of the load is called: it is met by requests/s, by a deadline, or by slots."""
    if scenario.workload.rate is None:
        return "users"
    return "rate" if scenario.offline else "capacity"


def estimate_limits(scenario: Scenario, prediction: Prediction) -> tuple[LimitOdds, ...]:
    """Estimate how probably the load and each target are kept, from the intervals of a prediction.

    Answers of one token have no TPOT, and no limit of it.
    """
    performance, p_memory = prediction.performance, compute_memory_probability(prediction)
    assert performance is not None
    asked = min(compute_asked_tolerance(scenario.confidence, p_memory), MAX_TOLERANCE_SIGMAS)
    limits = []

    def add(
        name: str, use: Interval, shown: float, at_most: float = math.inf, metric: str | None = None
    ) -> float:
        tolerance = min(estimate_tolerance_from_interval(use, 1.0), at_most)
        reach = max(get_pessimistic_value(use, asked), shown)
        limits.append(
            rate_limit(name, shown, reach, tolerance, p_memory, scenario.confidence, metric)
        )
        return tolerance

    load, load_tolerance = estimate_load_share(scenario, prediction), math.inf
    if load:
        load_tolerance = add(get_load_limit_name(scenario), load, load.mid)
    for target in scenario.slo_targets:
        value = performance.get(target.metric, target.percentile)
        shown = performance.get_for_display(target.metric, target.percentile).mid
        if not math.isnan(value.mid):
            most = load_tolerance if math.isinf(shown) else math.inf  # a queue that grows
            add(target.name, value / target.seconds, shown / target.seconds, most, target.metric)
    return tuple(limits)


def estimate_load_share(scenario: Scenario, prediction: Prediction) -> Interval | None:
    """Estimate the load as a share of what may be used; None where nothing limits it.

    That is the capacity less the headroom, and the slots where every user needs one.
    """
    performance = prediction.performance
    if scenario.workload.rate is None:  # slower steps change no slot
        share = compute_slot_share(scenario, prediction.deployment)
        return Interval.from_value(share) if share else None
    most = get_capacity_rps(scenario, performance) if performance else None
    if most is None:
        return None
    asked = compute_offered_rps(scenario, prediction)
    return (most * (1 - scenario.headroom)).map_monotone(lambda rate: asked / max(rate, 1e-9))


def compute_memory_probability(prediction: Prediction) -> float:
    """The probability that every pool starts and does not run out of memory."""
    return min(map(estimate_memory_probability, prediction.pools))


def _describe_latency(target: SloTarget, limit: LimitOdds) -> str:
    """Describe that a latency is above its limit, or may be."""
    missed = limit.status == "missed"
    seconds = target.seconds * (limit.use if missed else limit.pessimistic_use)
    may = "" if missed else " may"
    if math.isinf(seconds):
        return f"{target.name}{may} {'grows' if missed else 'grow'} without bound"
    reach = format_latency(seconds, target.seconds)
    verb = "is" if missed else "reach"
    return f"{target.name}{may} {verb} {reach}, above {format_latency(target.seconds)}"


def _compute_capacity_utilization(scenario: Scenario, prediction: Prediction) -> float:
    """Compute the load as a share of what may be used of the capacity, or of the slots."""
    free = compute_free_capacity(scenario, prediction)
    assert free is not None
    if scenario.workload.rate is None:  # the queue of a closed loop is bounded
        return max(min(1 - free, 1.0), compute_slot_share(scenario, prediction.deployment))
    return (1 - free) / (1 - scenario.headroom)


def _describe_load(scenario: Scenario, prediction: Prediction, limit: LimitOdds) -> str:
    """Describe that the load is beyond what may be used, or may be."""
    planned, offered = 1 - scenario.headroom, compute_offered_rps(scenario, prediction)
    if limit.name == "users":
        users = scenario.workload.concurrency or 0
        return f"{users:,} concurrent requests need more than the {prediction.deployment.num_slots:,} slots"
    if limit.status != "missed":
        low = offered / (limit.pessimistic_use * planned)
        digits = 3 if low * planned < 0.99 * offered else 5
        if offered > low:
            return f"it may serve only {low:.{digits}g} of {offered:.{digits}g} requests/s"
        spare = f"{scenario.headroom:.0%} should stay free"
        return f"it may serve only {low:.{digits}g} requests/s, of which {spare}"
    used = limit.use * planned
    served = format_number(offered / used)
    if scenario.offline:
        spare = f", of which {scenario.headroom:.0%} should stay free" if used <= 1 else ""
        return f"it serves {served} of {format_number(offered)} requests/s{spare}"
    beyond = f"above the planned {planned:.0%}" if used <= 1 else "so the queue grows without bound"
    percent = format_distinct(used * 100, (planned if used <= 1 else 1.0) * 100, digits=3)
    times = f"{used:.3g} times" if used >= 2 else f"{percent}% of"
    return f"{format_number(offered)} requests/s are {times} the capacity of {served}, {beyond}"


def compute_slot_share(scenario: Scenario, deployment: Deployment) -> float:
    """Return the users of a closed loop per slot, where no target limits how long they may wait.

    There every user needs a slot: else a target for the time per token would be met by serving a
    few of them and letting the rest wait. It is 0 for other loads, and with a target for TTFT or E2E.
    """
    users, targets = scenario.workload.concurrency, scenario.slo_targets
    if scenario.workload.rate is not None or not users or not targets:
        return 0.0
    if any(target.waits for target in targets):
        return 0.0
    return users / deployment.num_slots


def compute_offered_rps(scenario: Scenario, prediction: Prediction) -> float:
    """Return the requests/s that are admitted, meet the deadline, or come from the closed loop."""
    rate, performance = scenario.workload.rate, prediction.performance
    if rate is None:
        return performance.request_tps.mid if performance else math.nan
    return rate if scenario.offline else rate * (1 - prediction.rejected_fraction)


def compute_free_capacity(scenario: Scenario, prediction: Prediction) -> float | None:
    """Compute the free fraction of the capacity, negative if overloaded; None without capacity."""
    performance = prediction.performance
    if performance is None or (capacity := get_capacity_rps(scenario, performance)) is None:
        return None
    return 1 - compute_offered_rps(scenario, prediction) / capacity.mid


def get_capacity_rps(scenario: Scenario, performance: Performance) -> Interval | None:
    """Return the capacity in requests/s, or the rate of the whole job if offline."""
    return performance.request_tps if scenario.offline else performance.capacity


def estimate_run_hours(scenario: Scenario, candidate: Candidate) -> Interval | None:
    """Estimate the hours of offline work; None for other work, or without a prediction."""
    performance, requests = candidate.prediction.performance, scenario.workload.num_prompts
    return (
        performance.request_tps.map_monotone(lambda rate: requests / rate / 3600)
        if scenario.offline and performance and requests
        else None
    )


def price_all_hours(
    scenario: Scenario, candidate: Candidate, more: float = 0.0
) -> tuple[bool, float]:
    """Price a job, or an hour of what runs always, and a share `more`."""
    unpriced, price = candidate.price_key
    hours = estimate_run_hours(scenario, candidate)
    return unpriced, price * (hours.mid if hours else 1.0) * (1 + more)


def estimate_energy(scenario: Scenario, candidate: Candidate) -> list[tuple[str, Interval]]:
    """Estimate mean power and energy under the planned load, as (unit, value) pairs."""
    prediction, hours = candidate.prediction, estimate_run_hours(scenario, candidate)
    if prediction.gpu_power_w is None:
        return []
    kwh = (prediction.total_power_w or prediction.gpu_power_w) * (
        (hours.mid if hours else HOURS_PER_MONTH) / 1e3
    )
    period = "for the job" if hours else "a month"
    if scenario.daily_profile:
        period = "a month at the busiest hour's load"
    figures = [
        ("W per GPU on average", prediction.gpu_power_w),
        (f"kWh {period}", kwh),
    ]
    if joules := prediction.joules_per_output_token:
        figures.append(("J per output token", joules))
    return figures
