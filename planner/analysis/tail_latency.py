"""Tail latencies of a deployment: one engine's part of the traffic, simulated.

Every run is simulated at the calibrated step cost and at both ends of its 80% interval, so
intervals grow if a slower engine would queue. Columns have readable names with units.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from planner.analysis.load_ramp import TIMELINE_SAMPLES
from planner.analysis.sweep import (
    MIN_SERVED_FRACTION,
    REQUESTS_PER_SWEEP_RUN,
    Row,
    get_wait_ms,
    sweep,
)
from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.latency.performance import (
    LATENCY_METRICS,
    LATENCY_QUANTILES,
    LATENCY_STATISTICS,
    Performance,
)
from planner.planning.capacity import estimate_capacity
from planner.planning.prediction import evaluate
from planner.planning.simulation_runs import (
    SimulationRun,
    get_statistic,
    simulate_once,
)
from planner.planning.slo import SloTarget, compute_tolerance, get_limit_status
from planner.workload.workload import Workload

OVERLOAD_RPS = 1e4
"""Requests/s that no deployment serves: what it then serves is its capacity."""


def build_latency_table(
    measured: Performance | SimulationRun,
    service_level: Sequence[SloTarget] = (),
    steady: Performance | None = None,
) -> pd.DataFrame:
    """Return the latencies (simulated: and the queueing time) in ms with 80% intervals.

    If given, the SLOs' limits and statuses and the analytical p99 stand beside them.
    """
    rows = []
    for metric in (*LATENCY_METRICS, *["queue"] * isinstance(measured, SimulationRun)):
        row: dict[str, object] = {
            "Latency": metric.upper() if metric in LATENCY_METRICS else "Queue"
        }
        row |= {
            f"{name} (ms)": measured.get_for_display(metric, name) * 1e3
            for name in LATENCY_STATISTICS
        }
        if service_level:
            limits = [
                (
                    t,
                    get_limit_status(
                        measured.get_for_display(metric, t.percentile) / t.seconds,
                        compute_tolerance(t.confidence),
                    ),
                )
                for t in service_level
                if t.metric == metric
            ]
            row["Limit (ms)"] = (
                ", ".join(
                    f"{t.percentile} {t.seconds * 1e3:,.0f}: {status}" for t, status in limits
                )
                or None
            )
        if steady:
            row["p99, estimate (ms)"] = (
                steady.get(metric, "p99") * 1e3 if metric in LATENCY_METRICS else None
            )
        rows.append(row)
    return pd.DataFrame(rows)


def build_tail_curves(run: SimulationRun, steady: Performance | None) -> dict[str, pd.DataFrame]:
    """Return `build_tail_curve` of TTFT and ITL."""
    return {name: build_tail_curve(run, name.lower(), steady) for name in ("TTFT", "ITL")}


def list_tail_limits(targets: Iterable[SloTarget]) -> dict[str, list[tuple[str, float]]]:
    """List the percentile and the limit in ms of each target, by latency."""
    limits: dict[str, list[tuple[str, float]]] = {}
    for target in targets:
        limits.setdefault(target.metric.upper(), []).append(
            (target.percentile, target.seconds * 1e3)
        )
    return limits


def build_tail_curve(
    run: SimulationRun, metric: str, steady: Performance | None = None
) -> pd.DataFrame:
    """Return latency (ms, 80% interval) by the fraction of slower values, down to 0.1%.

    Columns: slower, lo, mid, hi, name ("p50", "p95", "p99" or None) and, for rows with a name,
    "closed form".
    """
    slower_shares = sorted(
        {*np.geomspace(1, 1e-3, 91).round(6), *(round(1 - q, 6) for q in LATENCY_QUANTILES)}
    )
    names = {
        round(1 - q, 6): name
        for name, q in zip(LATENCY_STATISTICS[1:], LATENCY_QUANTILES, strict=True)
    }
    rows = []
    for share in slower_shares:
        value, name = run.compute_quantile(metric, 1 - share) * 1e3, names.get(share)
        analytical = steady.get(metric, name).mid * 1e3 if name and steady else None
        rows.append((share, value.lo, value.mid, value.hi, name, analytical))
    return pd.DataFrame(rows, columns=["slower", "lo", "mid", "hi", "name", "closed form"])


def sweep_utilization(
    deployment: Deployment, workload: Workload, shares: Sequence[float]
) -> pd.DataFrame:
    """Return analytical and simulated TTFT (ms) at these fractions of the analytical capacity.

    Above 1 both grow without bound.
    """
    saturated = evaluate(deployment, workload.with_rate(OVERLOAD_RPS)).performance
    if saturated is None:
        raise PlannerError(f"{deployment} does not start")

    def _read(percent: float) -> Row:
        load = workload.with_rate(percent / 100 * saturated.request_tps.mid)
        steady = evaluate(deployment, load).performance
        result = simulate_once(deployment, load, 4 * REQUESTS_PER_SWEEP_RUN)
        row: dict[str, object] = {"Requests/s": load.rate}
        for point in ("mean", "p99"):
            row[f"{point}, estimate"] = (
                steady.get("ttft", point).mid * 1e3 if percent < 100 and steady else math.inf
            )
            row[f"{point}, simulated"] = get_wait_ms(result, point)
        return row

    return sweep({"Utilization (%)": [share * 100 for share in shares]}, _read)


def select_stable_rows(swept: pd.DataFrame) -> pd.DataFrame:
    """Select the rows of a sweep in which the deployment keeps up; all if it never does."""
    stable = swept[[value.mid >= 100 * MIN_SERVED_FRACTION for value in swept["Served (%)"]]]
    return stable if len(stable) > 1 else swept


def sweep_autoscaler_signals(
    deployment: Deployment, workload: Workload, shares: Sequence[float]
) -> pd.DataFrame:
    """Return possible autoscaler signals of one engine, and user latencies, over its load.

    Gauges are means from the first arrival to the last of `2 * REQUESTS_PER_SWEEP_RUN` simulated
    requests.
    """
    capacity, requests = estimate_capacity(deployment, workload).mid, 2 * REQUESTS_PER_SWEEP_RUN

    def _read(percent: float) -> Row:
        rate = percent / 100 * capacity
        gauge_s = requests * deployment.num_engine_instances / rate / TIMELINE_SAMPLES
        run = simulate_once(deployment, workload.with_rate(rate), requests, gauge_s=gauge_s)
        gauges = run.gauges[run.gauges.seconds <= run.sent[-1]]
        steps, busy = run.outcome.totals[0], run.outcome.totals[1] * run.clock_scale
        return {
            "A step is running (% of the time)": busy / run.duration * 100,
            "Steps/s": steps / run.duration, "Requests running": gauges.running.mean(),
            "Requests waiting": gauges.waiting.mean(),
            "KV cache in use (%)": gauges.kv_usage.mean() * 100,
            "mean TPOT (ms)": get_statistic(run, "tpot", "mean") * 1e3,
            "p99 TTFT (ms)": get_wait_ms(run, "p99"),
        }  # fmt: skip

    return sweep({"Load (%)": [share * 100 for share in shares]}, _read)
