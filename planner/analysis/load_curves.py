"""What a cockpit draws of a plan, in closed form: its latencies against the load, and what other loads would cost."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from planner.core.intervals import Interval
from planner.planning.candidate import Candidate
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.evaluation import check_against_slos, get_candidate_workload
from planner.planning.prediction import estimate_hourly_cost, evaluate_batch
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.workload.workload import Workload

CURVE_POINTS = 24
"""Loads of a curve."""
MAX_LAYOUTS_PRICED = 12
"""Of the layouts so many are asked what other loads would cost: those that come first."""
MAX_NARROWING_ROUNDS, NARROWING_PARTS = 3, 6
"""So often the largest load that one replica carries is narrowed, to one of so many parts."""
LOAD_SPAN_FACTOR = 4.0
"""Loads are drawn from so many times less to so many times more than is asked."""


def get_load(workload: Workload) -> tuple[str, float]:
    """What the load of a workload is called, and how much it is."""
    return (
        ("Requests/s", workload.rate)
        if workload.rate
        else ("Users at once", float(workload.concurrency or 1))
    )


def with_load(workload: Workload, load: float) -> Workload:
    """`workload` with so many requests/s, or so many users where it has no rate; not a trace's own arrivals."""
    if workload.rate:
        return replace(workload, rate=load, trace=None)
    return replace(workload, concurrency=max(round(load), 1))


def sweep_latency_over_load(scenario: Scenario, candidate: Candidate) -> pd.DataFrame:
    """A row per load up to what `candidate` serves at most: the load, and each promised latency in ms.

    Offline there is none: every slot is taken, whatever the pace that is asked.
    """
    workload, performance = scenario.workload, candidate.prediction.performance
    name, here = get_load(workload)
    if scenario.offline or performance is None:
        return pd.DataFrame()
    top = (
        performance.capacity.mid * 0.98
        if workload.rate and performance.capacity
        else LOAD_SPAN_FACTOR * here
    )
    loads = {*np.geomspace(top / 16, top, CURVE_POINTS).tolist(), min(here, top)}
    if not workload.rate:
        loads = {float(max(round(load), 1)) for load in loads}
    ordered = sorted(loads)
    rest, first = candidate.deployment, candidate.prediction.prefill
    traffic_of = [with_load(workload, load) for load in ordered]
    if first:
        predictions = [evaluate_disaggregated(first, rest, load) for load in traffic_of]
    else:
        predictions = evaluate_batch([(rest, load) for load in traffic_of])
    rows = []
    for load, prediction in zip(ordered, predictions, strict=True):
        if (at := prediction.performance) and not at.saturated:
            promised = {
                f"{t.name} (ms)": at.get(t.metric, t.percentile) * 1e3 for t in scenario.slo_targets
            }
            rows.append({name: load, **promised})
    return pd.DataFrame(rows)


def find_max_feasible_rps(scenario: Scenario, candidate: Candidate) -> tuple[Interval, str] | None:
    """Requests/s up to which `candidate` keeps every promise, and what breaks beyond; None where only capacity ends it.

    Along `latency_against_load`, each curve scaled to what the candidate's own prediction says at
    the load asked.
    """
    performance, here, first = candidate.prediction.performance, scenario.workload.rate, None
    curves = sweep_latency_over_load(scenario, candidate) if here else pd.DataFrame()
    if performance is None or here is None or performance.capacity is None or curves.empty:
        return None
    loads, most = curves.iloc[:, 0].to_numpy(), performance.capacity
    at = int(np.abs(loads - here).argmin())
    for target in scenario.slo_targets:
        interval, curve, rates = (
            performance.get(target.metric, target.percentile),
            curves[f"{target.name} (ms)"],
            [],
        )
        for end, last in (("hi", most.lo), ("mid", most.mid), ("lo", most.hi)):
            values = np.array([getattr(value, end) for value in curve])
            with np.errstate(all="ignore"):
                values *= getattr(interval, end) / values[at] / target.seconds
            over = int(np.argmax(values > 1))  # 0 where it never is, or from the start
            if over:
                around = slice(over - 1, over + 1)
                last = math.exp(np.interp(0, np.log(values[around]), np.log(loads[around])))
            rates.append(0.0 if values[0] > 1 else last)
        if rates[1] < most.mid and (first is None or rates[1] < first[0].mid):
            first = (
                Interval(*sorted(rates)),
                f"the {target.name} exceeds {target.seconds * 1e3:,.0f} ms",
            )
    return first


def sweep_cost_over_load(plan: Plan) -> pd.DataFrame:
    """A row per load: the load, what the cheapest costs that carries it ("USD per hour"; "GPUs" unpriced), and which.

    Of the `KINDS` layouts that come first for the load that is asked, with as many replicas as
    there may be.
    """
    scenario = plan.scenario
    name, here = get_load(scenario.workload)
    shown = plan.without_disaggregation.candidates[:MAX_LAYOUTS_PRICED]
    kinds = {
        candidate.identity_key: candidate for candidate in shown if candidate.prediction.can_start
    }
    priced = all(candidate.usd_per_hour is not None for candidate in kinds.values())
    most = {candidate_gpu.gpu: candidate_gpu.max_gpus for candidate_gpu in scenario.gpus}
    options = list(zip(kinds.values(), find_max_loads(scenario, list(kinds.values())), strict=True))
    rows = []
    for load in np.geomspace(
        here / LOAD_SPAN_FACTOR, here * LOAD_SPAN_FACTOR, 4 * CURVE_POINTS
    ).tolist():
        offers = []
        for candidate, each in options:
            layout, gpu = candidate.deployment.layout, candidate.deployment.gpu
            replicas = math.ceil(load / each - 1e-9) if each else math.inf
            if replicas * layout.gpus_per_replica > most[gpu]:
                continue
            copies = candidate.deployment.with_replicas(int(replicas))
            if copies.num_gpus_billed <= most[gpu]:
                usd = estimate_hourly_cost(copies, scenario.prices) if priced else None
                offers.append(
                    (
                        usd.mid if usd else copies.num_gpus_billed,
                        f"{copies.num_gpus_billed} x {gpu.name}",
                    )
                )
        if offers:
            cost, what = min(offers)
            rows.append(
                {name: load, "USD per hour" if priced else "GPUs": cost, "Deployment": what}
            )
    return pd.DataFrame(rows)


def find_max_loads(scenario: Scenario, candidates: Sequence[Candidate]) -> list[float]:
    """The largest load that one replica of each of `candidates` carries within the service level; 0 where none is."""
    low, high = (
        np.zeros(len(candidates)),
        np.array([_bound_replica_load(scenario, candidate) for candidate in candidates]),
    )
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
        held = np.logical_and.accumulate(meets, axis=1).sum(axis=1)
        at = np.arange(len(candidates))
        low, high = edges[at, held], edges[at, np.minimum(held + 1, NARROWING_PARTS)]
    return [float(load) for load in low]


def _bound_replica_load(scenario: Scenario, candidate: Candidate) -> float:
    """A load that one replica does not exceed: what is to be used of its capacity; where users wait, what is drawn."""
    replicas, performance = candidate.deployment.layout.replicas, candidate.prediction.performance
    name, here = get_load(scenario.workload)
    if name == "Requests/s" and performance and performance.capacity and not scenario.offline:
        return performance.capacity.mid / replicas * (1 - scenario.headroom)
    return (
        here / (replicas - 1) if replicas > 1 and candidate.is_feasible else LOAD_SPAN_FACTOR * here
    )


def _check_feasible(scenario: Scenario, pairs: Sequence[tuple[Candidate, float]]) -> list[bool]:
    """Whether one replica of each candidate keeps the service level under its load."""
    asked = [
        (c, replace(scenario, workload=with_load(scenario.workload, load))) for c, load in pairs
    ]
    alone = [candidate.deployment.with_replicas(1) for candidate, _ in asked]
    predictions = evaluate_batch(
        [
            (deployment, get_candidate_workload(at, deployment))
            for deployment, (_, at) in zip(alone, asked, strict=True)
        ],
        scenario.prices,
    )
    feasible = []
    for (candidate, at), prediction in zip(asked, predictions, strict=True):
        most, copies = candidate.prediction.performance, candidate.deployment.layout.replicas
        if prediction.performance and most and most.capacity:
            prediction = replace(
                prediction,
                performance=replace(prediction.performance, capacity=most.capacity * (1 / copies)),
            )
        feasible.append(check_against_slos(at, prediction).is_feasible)
    return feasible
