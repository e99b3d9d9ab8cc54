"""More traffic than planned: a ramp to find what a deployment serves at most, bursts, and a surge, all replayed."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd

from planner.analysis.tail_latency import (
    MIN_SERVED_FRACTION,
    REQUESTS_PER_SWEEP_RUN,
    build_tail_row,
    get_wait_ms,
)
from planner.core.errors import PlannerError
from planner.core.intervals import Z_SCORE_80PCT, Interval
from planner.engines.deployment import Deployment
from planner.latency.speculative_decoding import build_step_model
from planner.planning.capacity import estimate_capacity
from planner.planning.simulation_runs import (
    SimulationRun,
    compute_served_fraction,
    get_statistic,
    simulate_once,
)
from planner.planning.slo import SloTarget
from planner.simulator.results import SimulationResult
from planner.workload.request_generator import sample_ramp_arrivals
from planner.workload.traces import Trace
from planner.workload.workload import Workload

CEILING_PRECISION_OCTAVES = 0.1
"""The bisection for a ceiling stops within this power of two."""
OVERLOAD_REASON = "requests arrive faster than they are served"
"""Why a ramp ends where no promise does."""
TIMELINE_REQUESTS, TIMELINE_SAMPLES = 300, 120
"""Requests of a run whose gauges are drawn, and samples of the gauges over it."""


@dataclass(frozen=True)
class LoadRamp:
    """A deployment under one load after the other, and the most of it that it serves as promised."""

    data: pd.DataFrame  # a row per load: the load, "Requests/s served", then `tail`
    load_label: str  # the first column: "Requests/s offered" or "Requests in flight"
    ceiling: Interval  # 0 where even the smallest load is too much
    reason: str  # what breaks beyond it

    def __str__(self) -> str:
        unit = self.load_label.lower().removesuffix(" offered")
        if not self.ceiling.mid:
            least = self.data[self.load_label].iloc[0]
            much = (
                "1 request/s is" if (least, unit) == (1, "requests/s") else f"{least:g} {unit} are"
            )
            return f"Even {much} too much: {self.reason}."
        shown = f"{self.ceiling:,.0f}" if self.ceiling.mid >= 100 else f"{self.ceiling:.3g}"
        return f"The ceiling is {shown} {unit}: beyond it {self.reason}."


def run_load_ramp(
    deployment: Deployment, workload: Workload, service_level: Sequence[SloTarget] = ()
) -> LoadRamp:
    """1, 2, 4, 8, ... requests/s over all replicas until it no longer keeps up; without a rate, so many in flight.

    The ceiling is the last rate, to a few percent, that is served and meets every target; in
    flight, the first number whose throughput more of them hardly raise.
    """
    step = build_step_model(deployment)
    slower = math.exp(Z_SCORE_80PCT * step.sigma_tpot)

    @cache
    def run(power: float, pace: float) -> SimulationResult:
        return simulate_once(
            deployment,
            _set_load(workload, 2.0**power),
            REQUESTS_PER_SWEEP_RUN,
            step_cost_factor=pace,
        )

    def broken(pace: float, power: float) -> str:
        """What is not kept: a target, or the rate; nothing where all is."""
        result = run(power, pace)
        for target in service_level:
            if get_statistic(result, target.metric, target.percentile) > target.seconds:
                return f"the {target.name} exceeds {target.seconds * 1e3:,.0f} ms"
        return "" if compute_served_fraction(result) >= MIN_SERVED_FRACTION else OVERLOAD_REASON

    def around(power: float) -> SimulationRun:
        ends = tuple(run(power, pace) for pace in (1 / slower, slower)) if workload.rate else ()
        sigmas = step.sigma_ttft, step.sigma_tpot
        return SimulationRun(
            deployment, _set_load(workload, 2.0**power), (run(power, 1.0),), ends, sigmas
        )

    if workload.rate is None:
        return _ramp_concurrency(deployment, around)
    loads = [math.floor(math.log2(workload.rate)) - 2]
    while compute_served_fraction(run(loads[-1], 1.0)) >= MIN_SERVED_FRACTION and len(loads) < 12:
        loads.append(loads[-1] + 1)
    found = [_bisect(loads, partial(broken, pace)) for pace in (1 / slower, 1.0, slower)]
    data = _build_ramp_frame(
        "Requests/s offered",
        ((2.0**n, around(n), around(n).served_fraction * 2.0**n) for n in loads),
    )
    return LoadRamp(
        data, "Requests/s offered", Interval(*sorted(held for held, _ in found)), found[1][1]
    )


def _set_load(workload: Workload, load: float) -> Workload:
    """`workload` at so many requests/s, or in flight where it has no rate."""
    return workload.with_rate(load) if workload.rate else replace(workload, concurrency=round(load))


def _bisect(loads: Sequence[float], breaks: Callable[[float], str]) -> tuple[float, str]:
    """The largest load between the powers of two in `loads` that breaks nothing (0: none), and what breaks beyond."""
    high = next((load for load in loads if breaks(load)), loads[-1] + 1)
    if high == loads[0]:
        return 0.0, breaks(high)
    low = high - 1.0
    while high - low > CEILING_PRECISION_OCTAVES:
        middle = (low + high) / 2
        low, high = (low, middle) if breaks(middle) else (middle, high)
    return 2.0**low, breaks(high)


def _ramp_concurrency(deployment: Deployment, around: Callable[[float], SimulationRun]) -> LoadRamp:
    """`ramp_test` of a closed loop, up to as many in flight as may run, rounded up to a power of two."""
    engines = deployment.num_engine_instances
    least, most = (
        math.ceil(math.log2(engines)),
        math.ceil(math.log2(engines * deployment.args.max_num_seqs)),
    )
    loads = range(least, most + 1)
    rates = {n: around(n).mid.request_tps * engines for n in loads}
    end = next(2.0**n for n in loads if rates[n] >= MIN_SERVED_FRACTION * rates[most])
    sigma = build_step_model(deployment).sigma_tpot
    data = _build_ramp_frame(
        "Requests in flight",
        ((2.0**n, around(n), Interval.from_lognormal(rates[n], sigma)) for n in loads),
    )
    return LoadRamp(
        data,
        "Requests in flight",
        Interval.from_value(end),
        "more of them hardly raise the throughput",
    )


def _build_ramp_frame(
    load: str, cases: Iterable[tuple[float, SimulationRun, Interval]]
) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {load: at, "Requests/s served": through, **build_tail_row(run)}
            for at, run, through in cases
        ]
    )


def build_surge_workload(workload: Workload, factor: float, seconds: float) -> Workload:
    """`workload` for so many `seconds`, Poisson, with `factor` times its rate in the second of three equal parts."""
    rng, rate = np.random.default_rng(0), workload.rate or 0.0
    arrival = sample_ramp_arrivals((rate, factor * rate, rate), seconds / 3, rng)
    if len(arrival) < 2:
        raise PlannerError(
            f"{seconds:g} s at {rate:g} requests/s are too short for a surge: nobody comes"
        )
    prompt, output = (
        workload.prompt.sample(len(arrival), rng),
        workload.output.sample(len(arrival), rng),
    )
    trace = Trace(Path(), arrival, prompt, output)
    return replace(workload, rate=trace.rate, trace=trace, num_prompts=None)


def simulate_timeline(
    deployment: Deployment, workload: Workload, seconds: float
) -> tuple[str, pd.DataFrame]:
    """One engine for so many `seconds`: its tail in a few words, and the requests that run and wait over time."""
    share = math.ceil((workload.rate or 0) * seconds / deployment.num_engine_instances)
    run = simulate_once(deployment, workload, max(share, 2), gauge_s=seconds / TIMELINE_SAMPLES)
    gauges = run.gauges.rename(columns={"seconds": "Seconds"})
    text = (
        f"p99 TTFT {get_statistic(run, 'ttft', 'p99') * 1e3:,.0f} ms, p99 ITL"
        f" {get_statistic(run, 'itl', 'p99') * 1e3:,.0f} ms"
    )
    again = int(run.preemptions.sum())
    return text + f", {again} preemptions" * (again > 0), gauges[gauges["Seconds"] <= 1.5 * seconds]


def choose_timeline_s(deployment: Deployment, workload: Workload) -> float:
    """Seconds in which one engine gets `CROWD` requests, to the nearest half minute."""
    return (
        max(
            round(
                TIMELINE_REQUESTS * deployment.num_engine_instances / (workload.rate or 1.0) / 30
            ),
            1,
        )
        * 30.0
    )


def sweep_autoscaler_signals(
    deployment: Deployment, workload: Workload, shares: Sequence[float]
) -> pd.DataFrame:
    """What an autoscaler could watch of one engine and what its users see, at shares of its capacity.

    Gauges are means from the first arrival to the last; all is replayed, `2 * SWEEP` requests at
    each share.
    """
    most, rows = estimate_capacity(deployment, workload).mid, []
    for share in shares:
        load = workload.with_rate(share * most)
        run = simulate_once(
            deployment,
            load,
            2 * REQUESTS_PER_SWEEP_RUN,
            gauge_s=2
            * REQUESTS_PER_SWEEP_RUN
            * deployment.num_engine_instances
            / (share * most)
            / TIMELINE_SAMPLES,
        )
        gauges = run.gauges[run.gauges.seconds <= run.sent[-1]]
        steps, busy = run.outcome.totals[0], run.outcome.totals[1] * run.clock_scale
        rows.append({
            "Load (%)": share * 100, "A step is running (% of the time)": busy / run.duration * 100,
            "Steps/s": steps / run.duration, "Requests running": gauges.running.mean(),
            "Requests waiting": gauges.waiting.mean(),
            "KV cache in use (%)": gauges.kv_usage.mean() * 100,
            "mean TPOT (ms)": get_statistic(run, "tpot", "mean") * 1e3,
            "p99 TTFT (ms)": get_wait_ms(run, "p99"),
        })  # fmt: skip
    return pd.DataFrame(rows)
