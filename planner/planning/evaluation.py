"""Evaluate one deployment under the scenario's workload, and check its SLOs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.core.intervals import Interval
from planner.engines.deployment import Deployment
from planner.hardware.prices import HOURS_PER_MONTH
from planner.latency.performance import Performance
from planner.latency.startup_time import estimate_startup
from planner.planning.candidate import Candidate
from planner.planning.capacity import is_finite_run
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.prediction import Prediction, evaluate_batch, predict
from planner.planning.scenario import Scenario
from planner.planning.slo import ResourceLimit, format_latency
from planner.workload.workload import Workload

MAX_CAPACITY_ERROR_FACTOR = 1.3
"""What a deployment serves at most is in closed form at most so many times what the replay says."""


def evaluate_candidate(
    scenario: Scenario, deployment: Deployment, replicas: int, preference: tuple[int, ...] = ()
) -> Candidate:
    """`deployment` in `replicas` copies under the scenario's traffic, held against its service level in closed form."""
    return evaluate_candidates(scenario, [(deployment, replicas, preference)])[0]


def evaluate_candidates(
    scenario: Scenario, cases: Sequence[tuple[Deployment, int, tuple[int, ...]]]
) -> list[Candidate]:
    """`judge` of every (deployment, replicas, preference); together they take little longer than one."""
    if not cases:
        return []
    copies = [deployment.with_replicas(replicas) for deployment, replicas, _ in cases]
    predictions = evaluate_batch(
        [(one, get_candidate_workload(scenario, one)) for one in copies], scenario.prices
    )
    return [
        check_against_slos(scenario, prediction, preference)
        for prediction, (_, _, preference) in zip(predictions, cases, strict=True)
    ]


def simulate_candidate(
    scenario: Scenario, candidate: Candidate, *, quick: bool = False
) -> Candidate:
    """`candidate` as it is stated: its traffic, replayed; `quick` is a first look."""
    load, first = (
        get_candidate_workload(scenario, candidate.deployment),
        candidate.prediction.prefill,
    )
    if first:
        prediction = evaluate_disaggregated(first, candidate.deployment, load, scenario.prices)
    else:
        prediction = predict(candidate.deployment, load, scenario.prices, quick=quick)
    return check_against_slos(scenario, prediction, candidate.preference_key)


def screen_candidate(scenario: Scenario, candidate: Candidate) -> Candidate:
    """A first look at `candidate`; its capacity, which takes longest, is replayed only where it may decide."""
    load = get_candidate_workload(scenario, candidate.deployment)
    if is_finite_run(load):
        return simulate_candidate(scenario, candidate, quick=True)
    prediction = predict(candidate.deployment, load, scenario.prices, quick=True, rough=True)
    look = check_against_slos(scenario, prediction, candidate.preference_key)
    else_decides = max(
        1.0, look.limit_utilization if look.limit_utilization > look.capacity_utilization else 0.0
    )
    return (
        look
        if look.capacity_utilization * MAX_CAPACITY_ERROR_FACTOR < else_decides
        else simulate_candidate(scenario, candidate, quick=True)
    )


def get_candidate_workload(scenario: Scenario, deployment: Deployment) -> Workload:
    """The scenario's traffic; offline, a closed loop that keeps every slot of `deployment` taken."""
    workload = scenario.workload
    return saturate_workload(deployment, workload) if scenario.offline else workload


def saturate_workload(deployment: Deployment, workload: Workload) -> Workload:
    """`workload` as a closed loop that keeps every one of `deployment`'s max_num_seqs slots taken."""
    slots = deployment.args.max_num_seqs * deployment.num_engine_instances
    return replace(
        workload, rate=None, trace=None, concurrency=min(slots, workload.num_prompts or slots)
    )


def check_against_slos(
    scenario: Scenario, prediction: Prediction, preference: tuple[int, ...] = ()
) -> Candidate:
    """A prediction held against the service level."""
    deployment, performance = prediction.deployment, prediction.performance
    if performance is None:
        reason = prediction.memory.reason
        return Candidate(
            deployment, prediction, (reason,), (), ("memory",), math.inf, math.inf, preference
        )
    missed, risks, share = _check_capacity(scenario, prediction, performance)
    margin = share
    for target in scenario.slo_targets:
        interval, told = (
            read(target.metric, target.percentile)
            for read in (performance.get, performance.get_for_display)
        )
        if math.isnan(interval.mid):  # answers of one token have no pace
            continue
        margin = max(margin, interval.mid / target.seconds)
        if told.mid > target.seconds:
            missed.append(
                (
                    target.name,
                    f"{target.name} {_format_violation('is', 'grows', told.mid, target.seconds)}",
                )
            )
        elif told.hi > target.seconds:
            risks.append(
                f"{target.name} may {_format_violation('reach', 'grow', told.hi, target.seconds)}"
            )
    if prediction.rejected_fraction > scenario.refused_at_most:
        text = (
            f"{prediction.rejected_fraction:.1%} of the requests are refused, above"
            f" {scenario.refused_at_most:.1%}"
        )
        missed.append(("max_model_len", text))
        margin = max(margin, prediction.rejected_fraction / max(scenario.refused_at_most, 1e-6))
    for name, text, value, most in list_resource_limits(scenario, prediction):
        if value is None:
            risks.append(f"{text} is not known, and {most} is the limit")
            continue
        margin = max(margin, value.mid / most.value)
        if value.mid > most.value:
            missed.append((name, f"{text} is {most.format_amount(value.mid)}, above {most}"))
        elif value.hi > most.value:
            risks.append(f"{text} may reach {most.format_amount(value.hi)}, above {most}")
    if prediction.memory.status == "at_risk":
        risks.append(prediction.memory.reason)
    constraints, misses = zip(*missed, strict=True) if missed else ((), ())
    return Candidate(
        deployment, prediction, misses, tuple(risks), constraints, margin, share, preference
    )


def _format_violation(is_: str, grows: str, seconds: float, limit: float) -> str:
    if math.isinf(seconds):
        return f"{grows} for as long as it runs"
    return f"{is_} {format_latency(seconds, limit)}, above {format_latency(limit)}"


def list_resource_limits(
    scenario: Scenario, prediction: Prediction
) -> Iterator[tuple[str, str, Interval | None, ResourceLimit]]:
    """(name, what it is, its figure, the limit) for each limit that the scenario sets beside its service level."""
    if scenario.start_up_at_most is not None:
        begins = [estimate_startup(pool, scenario.storage) for pool in prediction.pools]
        totals = [startup_time.total for startup_time in begins if startup_time]
        slowest = max(totals, key=lambda total: total.mid) if len(totals) == len(begins) else None
        yield (
            "start-up",
            "the start-up of a replica",
            slowest,
            ResourceLimit(scenario.start_up_at_most, "s"),
        )
    if scenario.power_at_most is not None:
        yield (
            "power",
            "the mean power of all GPUs",
            prediction.total_power_w,
            ResourceLimit(scenario.power_at_most, "W"),
        )


def _check_capacity(
    scenario: Scenario, prediction: Prediction, performance: Performance
) -> tuple[list[tuple[str, str]], list[str], float]:
    """What the load says: misses with their names, risks, and the share that it takes of what is to be used."""
    asked, free, planned = (
        compute_offered_rps(scenario, prediction),
        compute_free_capacity(scenario, prediction),
        1 - scenario.headroom,
    )
    most = get_capacity_rps(scenario, performance)
    assert free is not None and most is not None
    used = 1 - free
    if scenario.workload.rate is None:
        return (
            [],
            [],
            min(used, 1.0),
        )  # users wait for their answers: no queue grows, whatever they send
    share = used / planned
    if share > 1 and scenario.offline:
        spare = f", of which {scenario.headroom:.0%} should stay free" if used <= 1 else ""
        return [("rate", f"it serves {most.mid:.3g} of {asked:.3g} requests/s{spare}")], [], share
    if share > 1:
        beyond = (
            f"above the {planned:.0%} that are planned" if used <= 1 else "so that its queue grows"
        )
        digits = 3 if share <= 1.005 else 1 if used < 1.1 else 0
        times = f"{used:.3g} times" if used >= 2 else f"{used:.{digits}%} of"
        text = f"{asked:.3g} requests/s are {times} the {most.mid:.3g} it serves at most, {beyond}"
        return [("capacity", text)], [], share
    digits = 3 if most.lo < 0.99 * asked else 5
    risk = f"it may serve only {most.lo:.{digits}g} of {asked:.{digits}g} requests/s"
    return [], [risk] * (asked > most.lo), share


def compute_offered_rps(scenario: Scenario, prediction: Prediction) -> float:
    """Requests/s that are planned for: those that arrive and are taken, the deadline asks for, or the users send."""
    rate, performance = scenario.workload.rate, prediction.performance
    if rate is None:
        return performance.request_tps.mid if performance else math.nan
    return rate if scenario.offline else rate * (1 - prediction.rejected_fraction)


def compute_free_capacity(scenario: Scenario, prediction: Prediction) -> float | None:
    """The share of what it can serve that the traffic leaves free; negative where it is overloaded."""
    performance = prediction.performance
    if performance is None or (most := get_capacity_rps(scenario, performance)) is None:
        return None
    return 1 - compute_offered_rps(scenario, prediction) / most.mid


def get_capacity_rps(scenario: Scenario, performance: Performance) -> Interval | None:
    """Requests/s that the traffic is held against: the capacity, and offline what the whole job is served at."""
    return performance.request_tps if scenario.offline else performance.capacity


def estimate_run_hours(scenario: Scenario, candidate: Candidate) -> Interval | None:
    """Hours that work with a deadline takes; None where traffic goes on, or nothing is predicted."""
    performance, many = candidate.prediction.performance, scenario.workload.num_prompts
    return (
        performance.request_tps.map_monotone(lambda rate: many / rate / 3600)
        if scenario.offline and performance and many
        else None
    )


def estimate_energy(scenario: Scenario, candidate: Candidate) -> list[tuple[str, Interval]]:
    """(unit, figure) of the boards' mean power and energy under the planned load; none where nothing runs."""
    prediction, hours = candidate.prediction, estimate_run_hours(scenario, candidate)
    if prediction.gpu_power_w is None:
        return []
    kwh = (prediction.total_power_w or prediction.gpu_power_w) * (
        (hours.mid if hours else HOURS_PER_MONTH) / 1e3
    )
    shown = [
        ("W each, mean", prediction.gpu_power_w),
        ("kWh for all of it" if hours else "kWh a month", kwh),
    ]
    return (
        [*shown, ("J per output token", prediction.joules_per_output_token)]
        if prediction.joules_per_output_token
        else shown
    )
