"""Analytical curves of the cockpit: latencies of a plan over the load, and costs of other loads."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.core.intervals import Interval
from planner.latency.performance import Performance
from planner.planning.candidate import Candidate
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.evaluation import check_against_slos, get_candidate_workload
from planner.planning.prediction import estimate_hourly_cost, evaluate_batch
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.slo import SloTarget
from planner.workload.workload import Workload

CURVE_POINTS = 24
"""Loads per curve."""
MAX_LAYOUTS_PRICED = 12
"""Most layouts, best first, that other loads are priced for."""
MAX_NARROWING_ROUNDS, NARROWING_PARTS = 3, 6
"""Rounds that narrow the largest load of one replica, and parts that each round divides it into."""
LOAD_SPAN_FACTOR = 4.0
"""Loads range from this factor below to this factor above the offered load."""


def get_load(workload: Workload) -> tuple[str, float]:
    """Return the name of a workload's load, and its value."""
    return (
        ("Requests/s", workload.rate)
        if workload.rate
        else ("Concurrent requests", float(workload.concurrency or 1))
    )


def with_load(workload: Workload, load: float) -> Workload:
    """Return `workload` with this many requests/s, or users if it has no rate.

    A trace's own arrivals are dropped.
    """
    if workload.rate:
        return replace(workload, rate=load, trace=None)
    return replace(workload, concurrency=max(round(load), 1))


def sweep_performance(scenario: Scenario, candidate: Candidate) -> list[tuple[float, Performance]]:
    """Return loads up to the capacity of `candidate`, each with its analytical performance.

    Offline, there is none: all slots are taken at any load.
    """
    workload, performance = scenario.workload, candidate.prediction.performance
    _, offered = get_load(workload)
    if scenario.offline or performance is None:
        return []
    max_load = (
        performance.capacity.mid * 0.98
        if workload.rate and performance.capacity
        else LOAD_SPAN_FACTOR * offered
    )
    loads = {*np.geomspace(max_load / 16, max_load, CURVE_POINTS).tolist(), min(offered, max_load)}
    if not workload.rate:
        loads = {float(max(round(load), 1)) for load in loads}
    ordered = sorted(loads)
    decode, prefill = candidate.deployment, candidate.prediction.prefill
    workloads = [with_load(workload, load) for load in ordered]
    if prefill:
        predictions = [evaluate_disaggregated(prefill, decode, load) for load in workloads]
    else:
        predictions = evaluate_batch([(decode, load) for load in workloads])
    return [
        (load, at_load)
        for load, prediction in zip(ordered, predictions, strict=True)
        if (at_load := prediction.performance) and not at_load.saturated
    ]


def sweep_stated_latency(
    scenario: Scenario, candidate: Candidate, target: SloTarget
) -> list[tuple[float, float, float, float]]:
    """Return (load, lo, mid, hi) of the latency of `target` (s), through the candidate's own.

    The closed form gives the shape; each end is scaled to what the candidate is predicted to do at
    the offered load.
    """
    points = sweep_performance(scenario, candidate)
    if not points:
        return []
    ends = _scale_curve(scenario, candidate, target, points)
    return list(zip((load for load, _ in points), *ends, strict=True))


def _scale_curve(
    scenario: Scenario,
    candidate: Candidate,
    target: SloTarget,
    points: Sequence[tuple[float, Performance]],
) -> tuple[list[float], list[float], list[float]]:
    """Return lo, mid and hi of a curve (s), scaled to the candidate's own at the offered load."""
    performance, (_, offered) = candidate.prediction.performance, get_load(scenario.workload)
    assert performance is not None
    own = performance.get(target.metric, target.percentile)
    curve = [at_load.get(target.metric, target.percentile) for _, at_load in points]
    nearest = int(np.abs(np.array([load for load, _ in points]) - offered).argmin())

    def scale(end: str) -> list[float]:
        values = np.array([getattr(value, end) for value in curve])
        with np.errstate(all="ignore"):
            scaled = values / values[nearest] * getattr(own, end)
        return [float(value) for value in scaled]

    return scale("lo"), scale("mid"), scale("hi")


def find_max_feasible_rps(scenario: Scenario, candidate: Candidate) -> tuple[Interval, str] | None:
    """Find the largest requests/s within all SLOs, and what is violated beyond.

    Returns None if only the capacity limits it. It follows `sweep_performance`, with each curve
    scaled to the candidate's own prediction at the offered load.
    """
    performance, offered, lowest = candidate.prediction.performance, scenario.workload.rate, None
    points = sweep_performance(scenario, candidate) if offered else []
    if performance is None or offered is None or performance.capacity is None or not points:
        return None
    loads, capacity = np.array([load for load, _ in points]), performance.capacity
    for target in scenario.slo_targets:
        (lo, mid, hi), rates = _scale_curve(scenario, candidate, target, points), []
        for curve, limit in ((hi, capacity.lo), (mid, capacity.mid), (lo, capacity.hi)):
            values = np.array(curve) / target.seconds
            index = int(np.argmax(values > 1))  # 0 if it never is, or is from the start
            if index:
                neighbors = slice(index - 1, index + 1)
                limit = math.exp(np.interp(0, np.log(values[neighbors]), np.log(loads[neighbors])))
            rates.append(0.0 if values[0] > 1 else limit)
        if rates[1] < capacity.mid and (lowest is None or rates[1] < lowest[0].mid):
            lowest = (
                Interval(*sorted(rates)),
                f"the {target.name} exceeds {target.seconds * 1e3:,.0f} ms",
            )
    return lowest


def sweep_cost_over_load(plan: Plan) -> tuple[str, list[tuple[float, float, str]]]:
    """Return "USD per hour", or "GPUs" without prices, and loads with their least cost and GPUs.

    That is the cheapest of the first `MAX_LAYOUTS_PRICED` layouts for the offered load, with any
    number of replicas.
    """
    scenario = plan.scenario
    _, offered = get_load(scenario.workload)
    candidates = plan.without_disaggregation.candidates[:MAX_LAYOUTS_PRICED]
    layouts = {
        candidate.identity_key: candidate
        for candidate in candidates
        if candidate.prediction.can_start
    }
    priced = all(candidate.usd_per_hour is not None for candidate in layouts.values())
    max_gpus = {candidate_gpu.gpu: candidate_gpu.max_gpus for candidate_gpu in scenario.gpus}
    options = list(
        zip(layouts.values(), find_max_loads(scenario, list(layouts.values())), strict=True)
    )
    rows = []
    for load in np.geomspace(
        offered / LOAD_SPAN_FACTOR, offered * LOAD_SPAN_FACTOR, 4 * CURVE_POINTS
    ).tolist():
        offers = []
        for candidate, limit in options:
            layout, gpu = candidate.deployment.layout, candidate.deployment.gpu
            replicas = math.ceil(load / limit - 1e-9) if limit else math.inf
            if replicas * layout.gpus_per_replica > max_gpus[gpu]:
                continue
            deployment = candidate.deployment.with_replicas(int(replicas))
            if deployment.num_gpus_billed <= max_gpus[gpu]:
                usd = estimate_hourly_cost(deployment, scenario.prices) if priced else None
                offers.append(
                    (
                        usd.mid if usd else deployment.num_gpus_billed,
                        f"{deployment.num_gpus_billed} x {gpu.name}",
                    )
                )
        if offers:
            rows.append((load, *min(offers)))
    return "USD per hour" if priced else "GPUs", rows


def find_max_loads(scenario: Scenario, candidates: Sequence[Candidate]) -> list[float]:
    """Find the largest load of one replica of each candidate within the SLOs; 0 if none."""
    low = np.zeros(len(candidates))
    high = np.array([_bound_replica_load(scenario, candidate) for candidate in candidates])
    for _ in range(MAX_NARROWING_ROUNDS if len(candidates) else 0):
        edges = (
            low[:, None] + (high - low)[:, None] * np.arange(NARROWING_PARTS + 1) / NARROWING_PARTS
        )
        loads = np.maximum(edges[:, 1:], 1e-6)
        pairs = [
            (candidate, load)
            for candidate, row in zip(candidates, loads, strict=True)
            for load in row.tolist()
        ]
        meets = np.array(_check_feasible(scenario, pairs)).reshape(loads.shape)
        num_met = np.logical_and.accumulate(meets, axis=1).sum(axis=1)
        rows = np.arange(len(candidates))
        low, high = edges[rows, num_met], edges[rows, np.minimum(num_met + 1, NARROWING_PARTS)]
    return [float(load) for load in low]


def _bound_replica_load(scenario: Scenario, candidate: Candidate) -> float:
    """Return an upper bound of one replica's load.

    It is the usable capacity, or in a closed loop the end of the curve.
    """
    replicas, performance = candidate.deployment.layout.replicas, candidate.prediction.performance
    name, offered = get_load(scenario.workload)
    if name == "Requests/s" and performance and performance.capacity and not scenario.offline:
        return performance.capacity.mid / replicas * (1 - scenario.headroom)
    return (
        offered / (replicas - 1)
        if replicas > 1 and candidate.is_confident
        else LOAD_SPAN_FACTOR * offered
    )


def _check_feasible(scenario: Scenario, pairs: Sequence[tuple[Candidate, float]]) -> list[bool]:
    """Return whether one replica of each candidate is feasible under its load."""
    cases = [
        (c, replace(scenario, workload=with_load(scenario.workload, load))) for c, load in pairs
    ]
    replicas = [candidate.deployment.with_replicas(1) for candidate, _ in cases]
    predictions = evaluate_batch(
        [
            (deployment, get_candidate_workload(loaded, deployment))
            for deployment, (_, loaded) in zip(replicas, cases, strict=True)
        ],
        scenario.prices,
    )
    feasible = []
    for (candidate, loaded), prediction in zip(cases, predictions, strict=True):
        performance, count = candidate.prediction.performance, candidate.deployment.layout.replicas
        if prediction.performance and performance and performance.capacity:
            prediction = replace(
                prediction,
                performance=replace(
                    prediction.performance, capacity=performance.capacity * (1 / count)
                ),
            )
        feasible.append(check_against_slos(loaded, prediction).is_confident)
    return feasible
