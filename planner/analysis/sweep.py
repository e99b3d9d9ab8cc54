"""The one sweep: change one thing, value by value, and tabulate what follows.

Columns have readable names with units; predictions are intervals.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.engines.deployment import Deployment
from planner.latency.performance import LATENCY_METRICS, LATENCY_STATISTICS, Performance
from planner.memory.memory_plan import get_memory_plan
from planner.planning.prediction import evaluate
from planner.planning.simulation_runs import (
    SimulationRun,
    compute_served_fraction,
    get_statistic,
    run_short_simulation,
)
from planner.simulator.results import SimulationResult
from planner.workload.workload import Workload

REQUESTS_PER_SWEEP_RUN = 1500
"""Requests of each run of a sweep."""
MIN_SERVED_FRACTION = 0.95
"""Served fraction of arrivals from which a deployment keeps up."""


def build_latency_row(measured: Performance | SimulationRun) -> dict[str, Interval | float]:
    """Return every latency at every statistic in ms, as part of a row."""
    return {
        f"{statistic} {metric.upper()} (ms)": measured.get(metric, statistic) * 1e3
        for metric in LATENCY_METRICS
        for statistic in LATENCY_STATISTICS
    }


def build_tail_row(run: SimulationRun) -> dict[str, Interval | float]:
    """Return all latencies in ms, preemptions, and the served percentage in one row."""
    row = build_latency_row(run) | {
        "Longest ITL (ms)": run.compute_quantile("itl", 1.0) * 1e3,
        "Served (%)": run.served_fraction * 100,
    }
    return row | {"Preemptions (per 100)": 100 * run.preemptions}


def get_wait_ms(result: SimulationResult, point: str, metric: str = "ttft") -> float:
    """Return a latency in ms; infinite if the deployment does not keep up.

    The simulated value would then depend on the length of the run.
    """
    return (
        get_statistic(result, metric, point) * 1e3
        if compute_served_fraction(result) >= MIN_SERVED_FRACTION
        else math.inf
    )


Row = dict[str, Any]


def sweep(axes: Mapping[str, Iterable[Any]], read: Callable[..., Row]) -> pd.DataFrame:
    """Return a row for each combination of the values on `axes`: they, then what `read` returns.

    A combination with a `PlannerError`, such as one that does not start, is left out.
    """
    rows: list[Row] = []
    for values in product(*axes.values()):
        with suppress(PlannerError):
            rows.append(dict(zip(axes, values, strict=True)) | read(*values))
    return pd.DataFrame(rows)


def space_logarithmically(low: float, high: float, points: int = 24) -> list[int]:
    """Return integers from `low` to `high`, evenly spaced on a logarithmic axis."""
    return sorted(
        {round(value) for value in np.geomspace(max(low, 1), max(high, low + 1, 2), points)}
    )


def read_estimate(deployment: Deployment, workload: Workload) -> Row:
    """Return every latency and the throughput, analytically."""
    prediction = evaluate(deployment, workload)
    if (performance := prediction.performance) is None:
        raise PlannerError(prediction.memory.reason)
    return {**build_latency_row(performance), "Output tokens/s": performance.output_tps}


def sweep_tails(
    deployment: Deployment, workload: Workload, name: str, values: Iterable[int]
) -> pd.DataFrame:
    """Sweep an engine argument: KV cache pool, latencies, preemptions and served share, simulated."""

    def _read(value: int) -> Row:
        changed = deployment.with_args(**{name: value})
        pool = get_memory_plan(changed).pool
        run = run_short_simulation(changed, workload, REQUESTS_PER_SWEEP_RUN)
        return {"KV pool (tokens)": pool.reported_tokens, **build_tail_row(run)}

    return sweep({name: values}, _read)


def judge_benefit(benefit: float) -> str:
    """Return whether a change of a fraction "helps", "hurts" or leaves it the "same"."""
    return "same" if abs(benefit) < 0.005 else "helps" if benefit > 0 else "hurts"
