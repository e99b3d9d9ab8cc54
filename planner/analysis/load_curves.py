"""Analytical curves of the cockpit: latencies of a plan over the load, and costs of other loads."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.engines.deployment import Deployment
from planner.latency.performance import Performance
from planner.planning.candidate import Candidate
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.max_load import find_max_load
from planner.planning.plan import Plan
from planner.planning.prediction import estimate_hourly_cost, evaluate_batch
from planner.planning.scenario import Scenario
from planner.planning.slo import SloTarget
from planner.workload.workload import Workload

CURVE_POINTS = 24
"""Loads per curve."""
MAX_LAYOUTS_PRICED = 12
"""Most layouts, best first, that other loads are priced for."""
MIN_REACHED_LOAD = 0.95
"""Share of the offered load up to which a curve through it must reach."""
NUM_DRAFT_LOADS = 50
"""Loads at which engines with and without drafts are compared."""
LOAD_SPAN_FACTOR = 4.0
"""Loads range from this factor below to this factor above the offered load."""


def get_load(workload: Workload) -> tuple[str, float]:
    """Return the name of a workload's load, and its value."""
    return (
        ("Requests/s", workload.rate)
        if workload.rate
        else ("Concurrent requests", float(workload.concurrency or 1))
    )


def set_load(workload: Workload, load: float) -> Workload:
    """Return `workload` with this many requests/s, or users if it has no rate.

    A trace's own arrivals are dropped.
    """
    if workload.rate:
        return replace(workload, rate=load, trace=None)
    return replace(workload, concurrency=max(round(load), 1))


def list_draft_loads(
    drafted: Deployment, workload: Workload
) -> list[tuple[float, float | None, float | None]]:
    """List loads of all replicas with the mean TPOT (s) without and with drafts, analytically.

    Loads go up to the most that either serves, however long requests wait, the workload's own among
    them; beyond what one serves its TPOT is missing. Empty if either does not start, or answers have
    no decode steps.
    """
    ways = replace(drafted, speculation=None), drafted
    found = [each.performance for each in evaluate_batch([(way, workload) for way in ways])]
    if workload.output.mean <= 1 or not all(found):
        return []
    served = [each.capacity.mid for each in found if each and each.capacity]
    most, (_, own) = max(served) if workload.rate else float(drafted.num_slots), get_load(workload)
    ordered = sorted({min(own, most), *np.linspace(0, most, NUM_DRAFT_LOADS + 1)[1:].tolist()})
    cases = [(way, set_load(workload, load)) for load in ordered for way in ways]
    tpots = [
        each.get("tpot", "mean").mid if each and not each.saturated else None
        for each in (prediction.performance for prediction in evaluate_batch(cases))
    ]
    return list(zip(ordered, tpots[::2], tpots[1::2], strict=True))


def find_paying_loads(
    rows: Sequence[tuple[float, float | None, float | None]],
) -> list[tuple[int, int]]:
    """Find where drafts are faster, or alone serve the load: first and last rows of each range."""
    pays = [tpot is not None and (plain is None or tpot < plain) for _, plain, tpot in rows]
    edges = np.flatnonzero(np.diff(pays, prepend=False, append=False)).tolist()
    return [(first, beyond - 1) for first, beyond in zip(edges[::2], edges[1::2], strict=True)]


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
    workloads = [set_load(workload, load) for load in ordered]
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
    the offered load. There is no curve where the closed form is overloaded well below that load.
    """
    points, (_, offered) = sweep_performance(scenario, candidate), get_load(scenario.workload)
    if not points or points[-1][0] < MIN_REACHED_LOAD * offered:
        return []
    performance, loads = candidate.prediction.performance, [load for load, _ in points]
    assert performance is not None
    own = performance.get(target.metric, target.percentile)
    curve = [at_load.get(target.metric, target.percentile) for _, at_load in points]
    nearest = int(np.abs(np.array(loads) - offered).argmin())

    def scale(end: str) -> list[float]:
        values = np.array([getattr(value, end) for value in curve])
        with np.errstate(all="ignore"):
            scaled = values / values[nearest] * getattr(own, end)
        return [float(value) for value in scaled]

    return list(zip(loads, scale("lo"), scale("mid"), scale("hi"), strict=True))


def sweep_cost_over_load(plan: Plan) -> tuple[str, list[tuple[float, float, str]]]:
    """Return "USD per hour", or "GPUs" without prices, and loads with their least cost and GPUs.

    That is the cheapest of the first `MAX_LAYOUTS_PRICED` layouts for the offered load, with any
    number of replicas.
    """
    scenario, (_, offered) = plan.scenario, get_load(plan.scenario.workload)
    candidates = plan.without_disaggregation.candidates[:MAX_LAYOUTS_PRICED]
    layouts = {each.identity_key: each for each in candidates if each.prediction.can_start}
    priced = all(each.usd_per_hour is not None for each in layouts.values())
    max_gpus = {candidate_gpu.gpu: candidate_gpu.max_gpus for candidate_gpu in scenario.gpus}
    limits = {
        key: find_max_load(scenario, replace(each, deployment=each.deployment.with_replicas(1)))
        for key, each in layouts.items()
    }

    def list_offers(load: float) -> Iterator[tuple[float, str]]:
        for key, each in layouts.items():
            if not limits[key]:
                continue
            deployment = each.deployment.with_replicas(math.ceil(load / limits[key] - 1e-9))
            count, gpu = deployment.num_gpus_billed, deployment.gpu
            if count <= max_gpus[gpu]:
                usd = estimate_hourly_cost(deployment, scenario.prices) if priced else None
                yield usd.mid if usd else count, f"{count} x {gpu.name}"

    loads = np.geomspace(offered / LOAD_SPAN_FACTOR, offered * LOAD_SPAN_FACTOR, 4 * CURVE_POINTS)
    found = {load: list(list_offers(load)) for load in loads.tolist()}
    rows = [(load, *min(offers)) for load, offers in found.items() if offers]
    return "USD per hour" if priced else "GPUs", rows
