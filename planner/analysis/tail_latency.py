"""The tail of a deployment's latencies: one engine's share of the traffic, replayed request by request.

Every run is replayed at the calibrated step cost and at both ends of its 80% interval, so that an
interval grows where a slower engine would queue. Frames have columns as people read them, units
included.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.engines.deployment import Deployment
from planner.latency.performance import (
    LATENCY_METRICS,
    LATENCY_QUANTILES,
    LATENCY_STATISTICS,
    Performance,
)
from planner.memory.memory_plan import get_memory_plan
from planner.planning.prediction import evaluate
from planner.planning.simulation_runs import (
    SimulationRun,
    compute_served_fraction,
    get_statistic,
    run_short_simulation,
    simulate_once,
)
from planner.planning.slo import SloTarget, get_slo_status
from planner.simulator.results import SimulationResult
from planner.workload.workload import Workload

REQUESTS_PER_SWEEP_RUN = 1500
"""Requests of each run of a sweep."""
OVERLOAD_RPS = 1e4
"""Requests/s that no single deployment serves: what it then serves is its most."""
MIN_SERVED_FRACTION = 0.95
"""Served share of the arrivals from which on a deployment counts as following them."""


def build_latency_table(
    measured: Performance | SimulationRun,
    service_level: Sequence[SloTarget] = (),
    steady: Performance | None = None,
) -> pd.DataFrame:
    """The four latencies (replayed: and the wait in the queue) in ms with 80% intervals.

    Beside them what the service level says of each, and the p99 of the closed form, where they are
    given.
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
                (t, get_slo_status(t, measured.get_for_display(metric, t.percentile)))
                for t in service_level
                if t.metric == metric
            ]
            row["Limit (ms)"] = (
                ", ".join(f"{t.percentile} {t.seconds * 1e3:,.0f}: {how}" for t, how in limits)
                or None
            )
        if steady:
            row["p99 in closed form (ms)"] = (
                steady.get(metric, "p99") * 1e3 if metric in LATENCY_METRICS else None
            )
        rows.append(row)
    return pd.DataFrame(rows)


def build_latency_row(measured: Performance | SimulationRun) -> dict[str, Interval | float]:
    """Every latency at every percentile in ms, as a part of a row."""
    return {
        f"{at} {metric.upper()} (ms)": measured.get(metric, at) * 1e3
        for metric in LATENCY_METRICS
        for at in LATENCY_STATISTICS
    }


def build_tail_curve(
    run: SimulationRun, metric: str, steady: Performance | None = None
) -> pd.DataFrame:
    """Latency (ms, 80% interval) by the share of values that are slower, down to 0.1%: the distribution's tail.

    Columns: slower, lo, mid, hi, name ("p50", "p95", "p99" or nothing) and, where there is a name,
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
        stated = steady.get(metric, name).mid * 1e3 if name and steady else None
        rows.append((share, value.lo, value.mid, value.hi, name, stated))
    return pd.DataFrame(rows, columns=["slower", "lo", "mid", "hi", "name", "closed form"])


def build_tail_row(run: SimulationRun) -> dict[str, Interval | float]:
    """A tail in one row: every latency at every percentile in ms, preemptions, and the share that is served."""
    row = build_latency_row(run) | {
        "Longest ITL (ms)": run.compute_quantile("itl", 1.0) * 1e3,
        "Served (%)": run.served_fraction * 100,
    }
    return row | {"Preemptions (per 100)": 100 * run.preemptions}


def sweep_engine_arg(
    deployment: Deployment, workload: Workload, name: str, values: Sequence[float]
) -> pd.DataFrame:
    """Each value as the engine argument `name`; values with which the engine would not start are left out."""
    rows = []
    for value in values:
        changed = deployment.with_args(**{name: value})
        if (memory := get_memory_plan(changed)).can_start:
            row: dict[str, Any] = {name: value, "KV pool (tokens)": memory.pool.reported_tokens}
            rows.append(
                row
                | build_tail_row(run_short_simulation(changed, workload, REQUESTS_PER_SWEEP_RUN))
            )
    return pd.DataFrame(rows)


def sweep_utilization(
    deployment: Deployment, workload: Workload, shares: Sequence[float]
) -> pd.DataFrame:
    """TTFT (ms) at shares of the rate that the closed form says is served at most: its own figures, and a replay's.

    Beyond all of it both grow without end.
    """
    most = evaluate(deployment, workload.with_rate(OVERLOAD_RPS)).performance
    if most is None:
        raise PlannerError(f"{deployment} does not start")
    rows = []
    for share in shares:
        load = workload.with_rate(share * most.request_tps.mid)
        steady, result = (
            evaluate(deployment, load).performance,
            simulate_once(deployment, load, 4 * REQUESTS_PER_SWEEP_RUN),
        )
        row: dict[str, Any] = {"Utilization (%)": share * 100, "Requests/s": load.rate}
        for point in ("mean", "p99"):
            row[f"{point}, closed form"] = (
                steady.get("ttft", point).mid * 1e3 if share < 1 and steady else math.inf
            )
            row[f"{point}, replayed"] = get_wait_ms(result, point)
        rows.append(row)
    return pd.DataFrame(rows)


def get_wait_ms(result: SimulationResult, point: str, metric: str = "ttft") -> float:
    """A wait in ms; where a replay does not keep up it grows without end, and says only how long was looked at."""
    return (
        get_statistic(result, metric, point) * 1e3
        if compute_served_fraction(result) >= MIN_SERVED_FRACTION
        else math.inf
    )


def sweep_kv_pool(deployment: Deployment, workload: Workload) -> pd.DataFrame:
    """Seven KV pools around what the traffic takes: from twice its own p99 of use, or the plan's pool, to a quarter.

    At the middle of the step cost. `gpu_memory_utilization` is what would leave so much. A pool
    that cannot hold one request of max_model_len is left out: the engine would not start with it.
    """
    memory = get_memory_plan(deployment)
    plan, share = memory.pool, deployment.args.gpu_memory_utilization
    least = plan.layout.max_blocks_per_request + 1
    wanted = plan.num_blocks * simulate_once(
        deployment, workload, REQUESTS_PER_SWEEP_RUN
    ).compute_kv_usage_quantile(0.99)
    most = max(min(2 * wanted, plan.num_blocks), least)
    rows = []
    for blocks in np.unique(np.geomspace(max(wanted / 4, least), most, 7).astype(int))[::-1]:
        pool = replace(plan, num_blocks=int(blocks))
        given_up = (plan.num_blocks - pool.num_blocks) * plan.bytes_per_block
        left = share * (1 - given_up / memory.budget_bytes)
        row: dict[str, Any] = {
            "KV pool (tokens)": pool.reported_tokens,
            "gpu_memory_utilization": left,
        }
        run = run_short_simulation(
            deployment, workload, REQUESTS_PER_SWEEP_RUN, with_interval=False, pool=pool
        )
        rows.append(
            row | build_tail_row(run) | {"p99 E2E (ms)": get_wait_ms(run.mid, "p99", "e2e")}
        )
    return pd.DataFrame(rows)


def select_stable_rows(swept: pd.DataFrame) -> pd.DataFrame:
    """The rows of a sweep in which the deployment keeps up with its traffic; all of them where it nowhere does."""
    enough = swept[[value.mid >= 100 * MIN_SERVED_FRACTION for value in swept["Served (%)"]]]
    return enough if len(enough) > 1 else swept
