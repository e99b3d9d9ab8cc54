"""Simulate more traffic than planned: a ramp up to capacity, bursts, and a surge."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from planner.analysis.sweep import (
    MIN_SERVED_FRACTION,
    REQUESTS_PER_SWEEP_RUN,
    build_tail_row,
)
from planner.core.intervals import Z_SCORE_80PCT, Interval
from planner.engines.deployment import Deployment
from planner.latency.step_model import build_step_model
from planner.planning.max_load import find_largest
from planner.planning.simulation_runs import (
    SimulationRun,
    compute_served_fraction,
    get_statistic,
    simulate_once,
)
from planner.planning.slo import SloTarget
from planner.simulator.results import SimulationResult
from planner.workload.workload import Workload

BEYOND_CEILING = 1.05
"""Why a load is too much is what is violated at so many times the ceiling."""
OVERLOAD_REASON = "requests arrive faster than they are served"
"""Why a ramp ends if no SLO is violated."""


@dataclass(frozen=True)
class LoadRamp:
    """Latencies of a deployment under increasing loads, and the largest feasible load."""

    rows: list[dict[str, Any]]  # one per load: it, "Requests/s served", then `build_tail_row`
    load_label: str  # the first key: "Requests/s offered" or "Requests in flight"
    ceiling: Interval  # 0 if even the smallest load is too much
    reason: str  # what is violated beyond it

    def __str__(self) -> str:
        unit = self.load_label.lower().removesuffix(" offered")
        if not self.ceiling.mid:
            least = self.rows[0][self.load_label]
            load_text = (
                "1 request/s is" if (least, unit) == (1, "requests/s") else f"{least:g} {unit} are"
            )
            return f"Even {load_text} too much: {self.reason}."
        shown = f"{self.ceiling:,.0f}" if self.ceiling.mid >= 100 else f"{self.ceiling:.3g}"
        return f"The ceiling is {shown} {unit}: beyond it {self.reason}."


def run_load_ramp(
    deployment: Deployment, workload: Workload, service_level: Sequence[SloTarget] = ()
) -> LoadRamp:
    """Simulate rising loads over all replicas until the deployment is overloaded.

    They are powers of two requests/s, from about a quarter of the planned rate on.
    The ceiling is the largest rate that is served within every SLO. It differs from
    `max_load.find_max_load`, as it is read off the runs that are drawn, at the expected step cost and
    at the ends of its interval, without the headroom and the probability of a scenario. Without a
    rate, the loads are requests in flight, and the ceiling is the first number beyond which
    throughput hardly grows.
    """
    step = build_step_model(deployment, workload)
    slow = math.exp(Z_SCORE_80PCT * step.sigma_tpot)

    @cache
    def run(load: float, factor: float) -> SimulationResult:
        return simulate_once(
            deployment, _set_load(workload, load), REQUESTS_PER_SWEEP_RUN, step_cost_factor=factor
        )

    def explain_violation(factor: float, load: float) -> str:
        """Explain which SLO, or the rate, is not met; empty if all are."""
        result = run(load, factor)
        for target in service_level:
            if get_statistic(result, target.metric, target.percentile) > target.seconds:
                return f"the {target.name} exceeds {target.seconds * 1e3:,.0f} ms"
        return "" if compute_served_fraction(result) >= MIN_SERVED_FRACTION else OVERLOAD_REASON

    def is_within_slos(factor: float, load: float) -> bool:
        return not explain_violation(factor, load)

    def simulate(load: float) -> SimulationRun:
        ends = tuple(run(load, factor) for factor in (1 / slow, slow)) if workload.rate else ()
        sigmas = step.sigma_ttft, step.sigma_tpot
        return SimulationRun(deployment, _set_load(workload, load), (run(load, 1.0),), ends, sigmas)

    if workload.rate is None:
        return _ramp_concurrency(deployment, simulate)
    loads = [2.0 ** (math.floor(math.log2(workload.rate)) - 2)]
    while compute_served_fraction(run(loads[-1], 1.0)) >= MIN_SERVED_FRACTION and len(loads) < 12:
        loads.append(2 * loads[-1])
    ends = [
        find_largest(partial(is_within_slos, factor), workload.rate)
        for factor in (1 / slow, 1.0, slow)
    ]
    rows = _build_ramp_rows(
        "Requests/s offered",
        ((load, simulate(load), simulate(load).served_fraction * load) for load in loads),
    )
    reason = explain_violation(1.0, BEYOND_CEILING * (ends[1] or loads[0]))
    return LoadRamp(rows, "Requests/s offered", Interval(*sorted(ends)), reason)


def _set_load(workload: Workload, load: float) -> Workload:
    """Return `workload` at this many requests/s, or in flight if it has no rate."""
    return workload.with_rate(load) if workload.rate else replace(workload, concurrency=round(load))


def _ramp_concurrency(
    deployment: Deployment, simulate: Callable[[float], SimulationRun]
) -> LoadRamp:
    """Ramp up a closed loop to the number of slots, rounded up to a power of two."""
    engines = deployment.num_engine_instances
    min_power = math.ceil(math.log2(engines))
    max_power = math.ceil(math.log2(deployment.num_slots))
    loads = [2.0**power for power in range(min_power, max_power + 1)]
    rates = {load: simulate(load).mid.request_tps * engines for load in loads}
    end = next(load for load in loads if rates[load] >= MIN_SERVED_FRACTION * rates[loads[-1]])
    sigma = build_step_model(deployment, simulate(end).workload).sigma_tpot
    rows = _build_ramp_rows(
        "Requests in flight",
        ((load, simulate(load), Interval.from_lognormal(rates[load], sigma)) for load in loads),
    )
    return LoadRamp(
        rows,
        "Requests in flight",
        Interval.from_value(end),
        "more of them hardly raise the throughput",
    )


def _build_ramp_rows(
    load: str, cases: Iterable[tuple[float, SimulationRun, Interval]]
) -> list[dict[str, Any]]:
    """Return one row per load: the load, requests/s served, and the tail latencies."""
    return [
        {load: value, "Requests/s served": served, **build_tail_row(run)}
        for value, run, served in cases
    ]
