"""Tail latencies of a deployment: one engine's part of the traffic, simulated.

Every run is simulated at the calibrated step cost and at both ends of its 80% interval, so
intervals grow if a slower engine would queue. Columns have readable names with units.
"""

import math
from collections.abc import Sequence

import pandas as pd

from planner.analysis.load_curves import get_load, set_load
from planner.analysis.sweep import (
    MIN_SERVED_FRACTION,
    REQUESTS_PER_SWEEP_RUN,
    Row,
    build_tail_row,
    get_wait_ms,
    sweep,
)
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.engines.deployment import Deployment
from planner.latency.performance import (
    LATENCY_METRICS,
    LATENCY_STATISTICS,
    Performance,
)
from planner.planning.prediction import evaluate
from planner.planning.simulation_runs import SimulationRun, run_short_simulation, simulate_once
from planner.planning.slo import SloTarget, compute_tolerance, get_limit_status
from planner.workload.workload import Workload

OVERLOAD_RPS = 1e4
"""Requests/s that no deployment serves: what it then serves is its capacity."""
RAMP_STEPS = 8
"""Steps between the loads of a ramp."""


def build_latency_table(
    measured: Performance | SimulationRun, service_level: Sequence[SloTarget] = ()
) -> pd.DataFrame:
    """Return the latencies (simulated: and the queueing time) in ms with 80% intervals.

    If given, the SLOs' limits and statuses stand beside them.
    """

    def judge(target: SloTarget) -> str:
        share = measured.get_for_display(target.metric, target.percentile) / target.seconds
        status = get_limit_status(share, compute_tolerance(target.confidence))
        return f"{target.percentile} {target.seconds * 1e3:,.0f}: {status}"

    rows = []
    for metric in (*LATENCY_METRICS, *["queue"] * isinstance(measured, SimulationRun)):
        row: dict[str, object] = {"latency": "queue" if metric == "queue" else metric.upper()}
        for name in LATENCY_STATISTICS:
            row[f"{name} (ms)"] = measured.get_for_display(metric, name) * 1e3
        if service_level:
            limits = [judge(target) for target in service_level if target.metric == metric]
            row["limit (ms)"] = ", ".join(limits) or None
        rows.append(row)
    return pd.DataFrame(rows)


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


def run_load_ramp(
    deployment: Deployment, workload: Workload, most: float | None = None
) -> pd.DataFrame:
    """Return requests/s served and tail latencies of all replicas by load, simulated.

    The load is "Requests/s", or "Concurrent requests" of a closed loop, from a quarter of the
    traffic (or of `most`, what is served, if that is less) to four times it, or until more comes than
    is served.
    """
    label, planned = get_load(workload)

    def _read(load: float) -> Row:
        run = run_short_simulation(deployment, set_load(workload, load), REQUESTS_PER_SWEEP_RUN)
        served: Interval | float = run.served_fraction * load
        if not workload.rate:
            served = run.mid.request_tps * deployment.num_engine_instances
        return {"Requests/s served": served, **build_tail_row(run)}

    loads = [
        min(planned, most or planned) * 4 ** (2 * step / RAMP_STEPS - 1)
        for step in range(RAMP_STEPS + 1)
    ]
    ramp = sweep({label: loads if workload.rate else sorted({*map(math.ceil, loads)})}, _read)
    overloaded = ramp["Served (%)"].map(lambda share: share.mid < 100 * MIN_SERVED_FRACTION)
    return ramp[overloaded.cumsum() <= 1]
