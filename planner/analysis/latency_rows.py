"""Rows of latencies by readable names with units, of predictions and of simulated sweeps."""

import math

from planner.core.intervals import Interval
from planner.latency.performance import LATENCY_METRICS, LATENCY_STATISTICS, Performance
from planner.planning.simulation_runs import (
    SimulationRun,
    compute_served_fraction,
    get_statistic,
)
from planner.simulator.results import SimulationResult

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


def list_mean_latencies(performance: Performance) -> list[float]:
    """List the mean TTFT, ITL and E2E in ms."""
    return [performance.get(metric, "mean").mid * 1e3 for metric in ("ttft", "itl", "e2e")]


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
