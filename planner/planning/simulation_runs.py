"""Simulation runs: the requests that an engine gets, how many are simulated, and the results.

Traffic that goes on is simulated for long, with several seeds; a benchmark of a fixed number of
requests from its first burst to its last token; a trace as recorded. Every figure of a plan comes
from here (`simulate_performance`); the analytical estimate (`queueing.steady_state`) ranks
candidates, draws sweeps and follows sliders.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from planner.core.errors import PlannerError
from planner.core.intervals import Z_SCORE_80PCT, Interval
from planner.engines.deployment import Deployment
from planner.latency.performance import (
    LATENCY_METRICS,
    LATENCY_QUANTILES,
    LATENCY_STATISTICS,
    STATISTIC_SIGMA_FACTORS,
    Performance,
    apply_unbounded_queue,
)
from planner.latency.step_model import build_step_model
from planner.memory.kv_cache import KvCachePool
from planner.memory.memory_plan import get_memory_plan
from planner.planning.capacity import (
    MAX_OUTPUT_TOKENS_PER_RUN,
    compute_admitted_rps,
    compute_rejected_fraction,
    derive_effective_workload,
    estimate_capacity,
    is_finite_run,
)
from planner.queueing.steady_state import LoadCase, solve_open_loop
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import count_serving_engines, simulate_workload
from planner.workload.workload import Workload

MIN_REQUESTS_FOR_PERCENTILES = 4_000
"""Requests of one engine, over all seeds, behind every percentile."""
RUN_LENGTH_IN_FLIGHT_MULTIPLE = 12
"""Length of a run of traffic that goes on, in multiples of the requests in flight."""
WARMUP_IN_FLIGHT_MULTIPLE, COOLDOWN_IN_FLIGHT_MULTIPLE = 2, 1
"""Requests not counted while the engine fills and drains, in multiples of those in flight."""
MAX_REQUESTS_PER_RUN = 10_000
"""Requests of one engine up to which a run is simulated whole; the rest passes at capacity."""
SEED_COUNT_BOUNDS = (2, 16)
"""Fewest and most seeds."""
MAX_SEED_NOISE = 0.03
"""Seeds are added while another set of them would move a percentile by more than this (80%)."""
MAX_REQUESTS_ALL_SEEDS = 12_000
"""Limit of requests over all seeds; the noise that remains widens the interval."""
MIN_REQUESTS_PER_RUN, MAX_OUTPUT_TOKENS_FACTOR = 200, 2
"""Fewest requests of a run; output tokens of all seeds, in multiples of the limit of one run."""
MAX_TRACE_REQUESTS_PER_ENGINE = 30_000
"""Largest number of requests of a trace that one engine gets."""
SCREENING_REQUEST_BOUNDS, SCREENING_OUTPUT_TOKENS = (1_000, 50), 1_500_000
"""Most and fewest requests of a screening run, and its output tokens between the two."""
MIN_CLOSED_LOOP_WAVES = 4
"""Fewest requests per user of a closed loop."""
REQUESTS_PER_INTERVAL_END = 1_500
"""Requests of one engine at each end of the step cost."""
CaseT = TypeVar("CaseT")


@dataclass(frozen=True, eq=False, repr=False)
class SimulationRun:
    """The same requests at the calibrated step cost and at both ends of its 80% interval.

    `interval_ends` are faster and slower steps, for the first `num_end_seeds` seeds. They are empty
    if requests do not arrive on their own, since every time then scales with the step cost.
    """

    deployment: Deployment
    workload: Workload
    seeds: tuple[SimulationResult, ...]  # at the expected step cost
    interval_ends: tuple[SimulationResult, ...]
    sigmas: tuple[float, float]  # of the logarithms of TTFT and TPOT, from measurements
    num_end_seeds: int = 1

    def __repr__(self) -> str:
        return f"{self.deployment}, an engine of it:\n{self.mid}"

    @cached_property
    def mid(self) -> SimulationResult:
        """All requests at the expected step cost."""
        return SimulationResult.concatenate(self.seeds)

    @cached_property
    def _matching_mid(self) -> SimulationResult:
        """The requests at the expected step cost that `interval_ends` simulate too."""
        return SimulationResult.concatenate(self.seeds[: self.num_end_seeds])

    @property
    def num_requests(self) -> int:
        """Requests that were simulated at the expected step cost."""
        return len(self.mid.output)

    def get(self, metric: str, point: str) -> Interval:
        """Return "ttft", "tpot", "itl", "e2e" or "queue" in seconds.

        `point` is one of `LATENCY_STATISTICS`. The value is NaN if no request has a value. The
        interval covers faster and slower steps, at least the spread of measured TTFT and TPOT
        (wider in the tails, `STATISTIC_SIGMA_FACTORS`), and the noise of the seeds.
        """
        return self._build_interval(
            metric,
            lambda run: get_statistic(run, metric, point),
            float(STATISTIC_SIGMA_FACTORS[LATENCY_STATISTICS.index(point)]),
        )

    def compute_quantile(self, metric: str, q: float) -> Interval:
        """Compute the quantile `q` of the values of `metric`, in seconds."""
        sigma_factor = float(np.interp(q, LATENCY_QUANTILES, STATISTIC_SIGMA_FACTORS[1:]))
        return self._build_interval(
            metric, lambda run: run.compute_quantile(metric, q), sigma_factor
        )

    def _build_interval(
        self, metric: str, read: Callable[[SimulationResult], float], sigma_factor: float
    ) -> Interval:
        mid = read(self.mid)
        if not math.isfinite(mid):
            return Interval(math.nan, math.nan, math.nan)
        reach = math.exp(Z_SCORE_80PCT * sigma_factor * self._get_sigma(metric))
        lo, hi = mid / reach, mid * reach
        if self.interval_ends and (matching := read(self._matching_mid)):
            factors = (1, mid / matching)
            ends = [read(run) * factor for run in self.interval_ends for factor in factors]
            lo, hi = min(lo, *ends), max(hi, *ends)
        noise = self.estimate_seed_noise(read) * mid
        return Interval(
            max(mid - math.hypot(mid - lo, noise), 0.0), mid, mid + math.hypot(hi - mid, noise)
        )

    def estimate_seed_noise(self, read: Callable[[SimulationResult], float]) -> float:
        """Estimate the fraction by which another set of seeds would move a figure, at 80%."""
        values = np.array([value for run in self.seeds if math.isfinite(value := read(run))])
        if len(values) < 2:
            return 0.0
        return float(
            Z_SCORE_80PCT
            * values.std(ddof=1)
            / math.sqrt(len(values))
            / max(abs(values.mean()), 1e-12)
        )

    def _get_sigma(self, metric: str) -> float:
        ttft_sigma, tpot_sigma = self.sigmas
        error = "prompt" if metric == "queue" else LATENCY_METRICS[metric].error
        if error == "prompt":
            return ttft_sigma
        if error == "mixed":
            ttft, e2e = float(self.mid.ttft.mean()), float(self.mid.e2e.mean())
            return math.hypot(ttft_sigma * ttft, tpot_sigma * (e2e - ttft)) / e2e
        return tpot_sigma

    @cached_property
    def served_fraction(self) -> Interval:
        """Fraction of the arrivals that is served meanwhile, 0 to 1; below 1 the queue grows."""
        mid = float(np.mean([compute_served_fraction(run) for run in self.seeds]))
        ends = [mid, *map(compute_served_fraction, self.interval_ends)]
        return Interval(min(ends), mid, max(ends))

    @property
    def arrival_rps(self) -> float:
        """Admitted requests/s of traffic that goes on; 0 for a fixed number of requests."""
        return (
            0.0
            if is_finite_run(self.workload)
            else compute_admitted_rps(self.deployment, self.workload)
        )

    def get_for_display(self, metric: str, point: str) -> Interval:
        """Return `get`, with latencies that grow under overload as infinite."""
        return apply_unbounded_queue(
            self.get(metric, point),
            metric,
            self.arrival_rps,
            estimate_capacity(self.deployment, self.workload),
        )

    @property
    def preemptions(self) -> float:
        """Preemptions per request."""
        return float(self.mid.preemptions.mean())


def list_requests(result: SimulationResult) -> list[dict[str, float]]:
    """List the lengths (tokens), times and preemptions of each request, by readable names."""
    tpot = np.full(len(result.output), np.nan)
    tpot[result.output > 1] = result.tpot
    columns = {
        "sent_s": result.sent,
        "prompt_tokens": result.prompt,
        "output_tokens": result.output,
        "queue_ms": result.queue * 1e3,
        "ttft_ms": result.ttft * 1e3,
        "tpot_ms": tpot * 1e3,
        "e2e_ms": result.e2e * 1e3,
        "cached_tokens": result.outcome.cached,
        "preemptions": result.preemptions,
    }
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def get_statistic(run: SimulationResult, metric: str, point: str) -> float:
    """Return the seconds of `metric` at one of `LATENCY_STATISTICS`."""
    return run.summarize(metric)[point]


def compute_served_fraction(run: SimulationResult) -> float:
    """Compute requests finished per arrival, up to 1, after the first quarter of arrivals."""
    start, end = run.sent[-1] / 4, run.sent[-1]
    ended = run.outcome.last_token * run.clock_scale
    arrived = np.count_nonzero(run.sent > start)
    return (
        min(np.count_nonzero((ended > start) & (ended <= end)) / arrived, 1.0) if arrived else 1.0
    )


@lru_cache(maxsize=256)
def run_simulation(
    deployment: Deployment, workload: Workload, *, quick: bool = False
) -> SimulationRun:
    """Simulate `workload` on one engine of `deployment`; `quick` screens at the expected step cost.

    Raises `PlannerError` if the deployment does not fit, and for requests that can never be
    scheduled.
    """
    step = build_step_model(deployment, workload)
    requests = count_requests_to_simulate(deployment, workload, quick=quick)
    sigmas = step.sigma_ttft, step.sigma_tpot

    def simulate_case(case: tuple[int, float]) -> SimulationResult:
        seed, factor = case
        result = simulate_once(deployment, workload, requests, step_cost_factor=factor, seed=seed)
        return result.trim(*uncounted)

    in_flight = 0.0 if is_finite_run(workload) else _estimate_in_flight(deployment, workload)
    uncounted = _count_trimmed_requests(in_flight, requests)
    if quick:
        return SimulationRun(deployment, workload, (simulate_case((0, 1.0)),), (), sigmas)
    fewest = 1 if is_finite_run(workload) else SEED_COUNT_BOUNDS[0]
    # Answers of 100,000 tokens take a second of simulation for ten.
    simulated = requests * deployment.ranks_per_clock
    affordable = math.ceil(
        MAX_OUTPUT_TOKENS_FACTOR * MAX_OUTPUT_TOKENS_PER_RUN / (simulated * workload.output.mean)
    )
    most = max(min(SEED_COUNT_BOUNDS[1], MAX_REQUESTS_ALL_SEEDS // simulated, affordable), fewest)
    if workload.trace:  # a trace has no randomness: its seeds are different engines
        engines = min(deployment.num_clocks, len(workload.trace.arrival))
        fewest, most = min(fewest, engines), min(most, engines)
    counted = MIN_REQUESTS_FOR_PERCENTILES * (0.5 if is_finite_run(workload) else 1)
    num_seeds = min(max(fewest, math.ceil(counted / simulated)), most)
    num_end_seeds = min(math.ceil(REQUESTS_PER_INTERVAL_END / simulated), num_seeds)
    factors = _get_interval_step_factors(step.sigma_tpot) if workload.rate is not None else ()
    cases = [(seed, 1.0) for seed in range(num_seeds)] + [
        (seed, factor) for factor in factors for seed in range(num_end_seeds)
    ]
    results = run_in_parallel(simulate_case, cases)
    interval_ends = (
        SimulationResult.concatenate(results[start : start + num_end_seeds])
        for start in range(num_seeds, len(results), num_end_seeds)
    )
    run = SimulationRun(
        deployment, workload, tuple(results[:num_seeds]), tuple(interval_ends), sigmas,
        num_end_seeds,
    )  # fmt: skip
    # The randomness of a benchmark is part of its result.
    may_add_seeds = not is_finite_run(workload) or workload.trace is not None
    while may_add_seeds and len(run.seeds) < most and _needs_more_seeds(run):
        added = [(seed, 1.0) for seed in range(len(run.seeds), min(len(run.seeds) + 2, most))]
        run = replace(run, seeds=(*run.seeds, *run_in_parallel(simulate_case, added)))
    return run


def run_short_simulation(
    deployment: Deployment,
    workload: Workload,
    requests: int,
    *,
    pool: KvCachePool | None = None,
    with_interval: bool = True,
) -> SimulationRun:
    """Simulate `requests` of one engine with one seed, for charts.

    A closed loop gets several waves. Without `with_interval` only at the expected step cost. `pool`
    replaces the KV cache pool of the memory plan.
    """
    step = build_step_model(deployment, workload)
    concurrency = math.ceil((workload.concurrency or 0) / deployment.num_engine_instances)
    requests = max(requests, MIN_CLOSED_LOOP_WAVES * concurrency)
    factors = (
        _get_interval_step_factors(step.sigma_tpot)
        if with_interval and workload.rate is not None
        else ()
    )
    mid, *ends = run_in_parallel(
        lambda factor: simulate_once(
            deployment, workload, requests, pool=pool, step_cost_factor=factor
        ),
        (1.0, *factors),
    )
    return SimulationRun(
        deployment,
        workload,
        (mid,),
        tuple(ends),
        (step.sigma_ttft, step.sigma_tpot) if with_interval else (0.0, 0.0),
    )


def _get_interval_step_factors(sigma: float) -> tuple[float, float]:
    """Return the faster and the slower end of the step cost, as factors of the expected one."""
    factor = math.exp(Z_SCORE_80PCT * sigma)
    return 1 / factor, factor


def simulate_once(
    deployment: Deployment, workload: Workload, requests: int, *, pool: KvCachePool | None = None,
    step_cost_factor: float = 1.0,
    seed: int = 0, gauge_s: float = 0.0,
) -> SimulationResult:  # fmt: skip
    """Simulate `requests` of one engine once, every step at `step_cost_factor` times its cost.

    Raises `PlannerError` if the deployment does not fit.
    """
    if pool is None:
        memory = get_memory_plan(deployment)
        if not memory.can_start:
            raise PlannerError(memory.reason)
        pool = memory.pool
    step = (
        build_step_model(deployment, workload)
        if step_cost_factor == 1
        else build_step_model(deployment, workload).scale(step_cost_factor)
    )
    even = not is_finite_run(workload)  # the sample stands for the rest of traffic that goes on
    return simulate_workload(deployment, pool, step, workload, seed, gauge_s, requests, even)


def _needs_more_seeds(run: SimulationRun) -> bool:
    """Return whether other seeds would move p95 or p99 by more than `MAX_SEED_NOISE`."""
    metrics = [name for name, metric in LATENCY_METRICS.items() if metric.per_request]
    points = [(metric, point) for metric in metrics for point in ("p95", "p99")]
    return any(
        run.estimate_seed_noise(partial(get_statistic, metric=metric, point=point)) > MAX_SEED_NOISE
        for metric, point in points
    )


def run_in_parallel(
    simulate: Callable[[CaseT], SimulationResult], cases: Sequence[CaseT]
) -> list[SimulationResult]:
    """Simulate every case on all cores: the compiled simulator releases the interpreter's lock."""
    return (
        list(_get_thread_pool(os.getpid()).map(simulate, cases))
        if len(cases) > 1
        else [simulate(case) for case in cases]
    )


@lru_cache(maxsize=1)
def _get_thread_pool(_process: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process, shared by all of its runs."""
    return ThreadPoolExecutor(os.cpu_count() or 1)


def count_requests_to_simulate(
    deployment: Deployment, workload: Workload, *, quick: bool = False
) -> int:
    """Count the requests of `workload` that one engine gets in one run; `quick` for a screening."""
    share = math.ceil(workload.num_requests / count_serving_engines(deployment, workload))
    # ranks on one clock are simulated together
    most, fewest = SCREENING_REQUEST_BOUNDS
    most = max(most // deployment.ranks_per_clock, fewest)
    tokens = SCREENING_OUTPUT_TOKENS / deployment.ranks_per_clock
    screened = min(max(round(tokens / workload.output.mean), fewest), most)
    if workload.trace is not None:
        return min(share, most if quick else MAX_TRACE_REQUESTS_PER_ENGINE)
    if is_finite_run(workload):
        waves = MIN_CLOSED_LOOP_WAVES * math.ceil(
            (workload.concurrency or 0) / deployment.num_engine_instances
        )
        if quick:
            limit = screened
        elif share > MAX_REQUESTS_PER_RUN:
            limit = MIN_REQUESTS_FOR_PERCENTILES
        else:
            limit = MAX_REQUESTS_PER_RUN
        return min(share, max(limit, waves))
    if quick:
        return screened
    sufficient = min(
        max(
            math.ceil(RUN_LENGTH_IN_FLIGHT_MULTIPLE * _estimate_in_flight(deployment, workload)),
            most,
        ),
        MAX_REQUESTS_PER_RUN,
    )
    return max(
        min(sufficient, round(MAX_OUTPUT_TOKENS_PER_RUN / workload.output.mean)),
        MIN_REQUESTS_PER_RUN,
    )


@lru_cache(maxsize=1024)
def _estimate_in_flight(deployment: Deployment, workload: Workload) -> float:
    """Estimate the requests in flight in one engine analytically, by Little's law."""
    load = derive_effective_workload(deployment, workload)
    performance = solve_open_loop(LoadCase(deployment, get_memory_plan(deployment), load))
    in_flight = (
        performance.request_tps.mid
        * performance.get("e2e", "mean").mid
        / deployment.num_engine_instances
    )
    return min(in_flight, float(deployment.args.max_num_seqs))


def simulate_performance(
    deployment: Deployment,
    workload: Workload,
    like: Performance,
    *,
    quick: bool = False,
) -> Performance:
    """Simulate the performance of `deployment` under `workload`.

    `like` is the analytical estimate, from which limit and basis are taken. Raises `PlannerError`
    for requests that can never be scheduled.
    """
    return replace(
        like,
        **_compute_performance_fields(deployment, workload, quick=quick),
    )


@lru_cache(maxsize=4096)
def _compute_performance_fields(
    deployment: Deployment, workload: Workload, *, quick: bool
) -> dict[str, Any]:
    """Simulate the fields of a `Performance`, cached because a search needs most of them twice."""
    capacity_future = _get_thread_pool(os.getpid()).submit(estimate_capacity, deployment, workload)
    run = run_simulation(deployment, workload, quick=quick)
    capacity = capacity_future.result()
    mid, rate = run.mid, _estimate_served_rps(run, capacity)
    outputs, prompts = workload.output.mean, workload.prompt.mean
    if is_finite_run(workload):  # the run itself may reach a little more than the capacity
        outputs, prompts = float(mid.output.mean()), float(mid.prompt.mean())
        capacity = Interval(
            max(capacity.lo, rate.lo), max(capacity.mid, rate.mid), max(capacity.hi, rate.hi)
        )
    return {
        "latencies": {
            name: {point: run.get(name, point) for point in LATENCY_STATISTICS}
            for name in LATENCY_METRICS
        },
        "request_tps": rate,
        "output_tps": rate * outputs,
        "total_tps": rate * (outputs + prompts),
        "decode_batch": mid.decode_batch,
        "kv_usage": mid.kv_usage_mean,
        "kv_usage_p99": mid.compute_kv_usage_quantile(0.99),
        "queue": get_statistic(mid, "queue", "p99"),
        "preemptions": run.preemptions,
        "max_running": mid.max_running,
        "saturated": (
            workload.rate is not None and compute_admitted_rps(deployment, workload) > capacity.mid
        ),
        "arrival_rps": run.arrival_rps,
        "capacity": capacity,
        "num_simulated_requests": run.num_requests,
    }


def _estimate_served_rps(run: SimulationRun, capacity: Interval) -> Interval:
    """Estimate the requests/s that all engines serve over the run.

    For traffic that goes on that is the admitted load, up to the capacity, with the chance
    variation of ten minutes of it as of a Poisson count.
    """
    deployment, workload, mid = run.deployment, run.workload, run.mid
    if not is_finite_run(workload):
        admitted = compute_admitted_rps(deployment, workload)
        factor = math.exp(
            Z_SCORE_80PCT / math.sqrt(max(workload.burstiness * workload.num_requests, 1.0))
        )
        interval = capacity.map_monotone(lambda rate: min(rate, admitted))
        return Interval(interval.lo / factor, interval.mid, interval.hi * factor)
    serving = count_serving_engines(deployment, workload)
    simulated = len(mid.output) / mid.engines / len(run.seeds) * serving
    admitted_fraction = 1 - compute_rejected_fraction(workload, deployment.args.max_model_len)
    remaining = max(workload.num_requests * admitted_fraction - simulated, 0.0)
    duration = mid.duration / len(run.seeds) + remaining / capacity.mid
    arriving = workload.num_requests / workload.rate if workload.rate else 0.0
    paced = min(arriving / duration, 1.0)  # fraction of the run in which the client sets the pace
    return Interval.from_lognormal(
        (simulated + remaining) / duration,
        build_step_model(deployment, workload).sigma_tpot * (1 - paced),
    )


@lru_cache(maxsize=4096)
def estimate_statistics_at(
    deployment: Deployment, workload: Workload, step_cost_factor: float, *, quick: bool = True
) -> tuple[dict[tuple[str, str], float], int]:
    """Replay with every step `step_cost_factor` times its cost; a short run where `quick`.

    Returns seconds by (metric, statistic), and the most requests that ran at once in an engine.
    Every factor sees the same requests, and every search of the same traffic what the last one saw.
    """
    many = count_requests_to_simulate(deployment, workload, quick=quick)
    seeds = 1
    if not quick and not is_finite_run(workload):
        simulated = many * deployment.ranks_per_clock
        seeds = min(math.ceil(MIN_REQUESTS_FOR_PERCENTILES / simulated), SEED_COUNT_BOUNDS[1])

    def simulate(seed: int) -> SimulationResult:
        result = simulate_once(
            deployment, workload, many, step_cost_factor=step_cost_factor, seed=seed
        )
        if is_finite_run(workload):
            return result
        in_flight = float(result.e2e.sum()) / result.duration / result.engines
        in_flight = min(in_flight, float(deployment.args.max_num_seqs))
        return result.trim(*_count_trimmed_requests(in_flight, many))

    run = SimulationResult.concatenate(run_in_parallel(simulate, range(seeds)))
    statistics = {
        (metric, point): value
        for metric in LATENCY_METRICS
        for point, value in run.summarize(metric).items()
    }
    return statistics, run.max_running


def _count_trimmed_requests(in_flight: float, requests: int) -> tuple[int, int]:
    """Count the requests at the start and the end of a run during which the engine fills and drains."""
    start, end = (
        min(math.ceil(part * in_flight), requests // 5)
        for part in (WARMUP_IN_FLIGHT_MULTIPLE, COOLDOWN_IN_FLIGHT_MULTIPLE)
    )
    return start, end
