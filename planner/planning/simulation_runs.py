"""A run: what the engines of a deployment are sent, how much of it is replayed, and what came of it.

Traffic that goes on is replayed for long, several times over with other random arrivals; a
benchmark of so many requests as it is, from its first burst to its last token; a trace as it came.
Whatever is stated of a deployment under load comes from here (`performance`); the closed form
(`queueing.steady_state`) ranks, draws and answers while a slider moves.
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
from planner.latency.speculative_decoding import build_step_model
from planner.memory.kv_cache import KvCachePool
from planner.memory.memory_plan import get_memory_plan
from planner.planning.capacity import (
    MAX_OUTPUT_TOKENS_PER_RUN,
    compute_admitted_rps,
    compute_rejected_fraction,
    derive_effective_workload,
    estimate_capacity,
    get_rate_sigma,
    is_finite_run,
)
from planner.queueing.steady_state import LoadCase, solve_open_loop
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import simulate_workload
from planner.workload.workload import Workload

MIN_REQUESTS_FOR_PERCENTILES = 4_000
"""Requests of one engine, over all seeds, on which the stated percentiles rest at least."""
RUN_LENGTH_IN_FLIGHT_MULTIPLE = 12
"""Traffic that goes on is replayed for so many times the requests in flight."""
WARMUP_IN_FLIGHT_MULTIPLE, COOLDOWN_IN_FLIGHT_MULTIPLE = 2, 1
"""Times the requests in flight that are left out of it, while the engine fills up and runs dry."""
MAX_REQUESTS_PER_RUN = 10_000
"""Requests of one engine up to which a run is replayed whole; what a longer one adds goes at a full engine's pace."""
SEED_COUNT_BOUNDS = (2, 16)
"""Fewest and most runs with other random lengths and arrivals."""
MAX_SEED_NOISE = 0.03
"""More runs are added while another set of seeds would move a percentile by more than this (80%)."""
MAX_REQUESTS_ALL_SEEDS = 12_000
"""But no more than that many requests; the interval is widened by what others would still move."""
MIN_REQUESTS_PER_RUN, MAX_OUTPUT_TOKENS_FACTOR = 200, 2
"""Requests of one run at least; and how many times its most output tokens all its seeds may have."""
MAX_TRACE_REQUESTS_PER_ENGINE = 30_000
"""Requests of a trace that one engine is sent at most."""
SCREENING_REQUEST_BOUNDS, SCREENING_OUTPUT_TOKENS = (1_000, 50), 1_500_000
"""Requests of a first look at a candidate at most and at least, and output tokens between the two."""
MIN_CLOSED_LOOP_WAVES = 4
"""Times that every place of a closed loop is taken at least."""
REQUESTS_PER_INTERVAL_END = 1_500
"""Requests of one engine at each end of the step cost."""
CaseT = TypeVar("CaseT")


@dataclass(frozen=True, eq=False, repr=False)
class SimulationRun:
    """The same requests at the calibrated step cost (`mid`) and at both ends of its 80% interval; all seeds pooled."""

    deployment: Deployment
    workload: Workload
    seeds: tuple[SimulationResult, ...]  # at the middle
    interval_ends: tuple[
        SimulationResult, ...
    ]  # faster and slower steps, of the first seeds; none where nothing arrives on its
    # own, so that every time is longer by the same factor
    sigmas: tuple[float, float]  # of the logarithms of TTFT and TPOT, as far as measurements tell
    num_end_seeds: int = 1  # seeds of both ends

    def __repr__(self) -> str:
        return f"{self.deployment}, an engine of it:\n{self.mid}"

    @cached_property
    def mid(self) -> SimulationResult:
        """All requests at the middle of the step cost."""
        return SimulationResult.concatenate(self.seeds)

    @cached_property
    def _matching_mid(self) -> SimulationResult:
        """Those requests at the middle that `ends` replay."""
        return SimulationResult.concatenate(self.seeds[: self.num_end_seeds])

    @property
    def num_requests(self) -> int:
        """Requests that were replayed at the middle of the step cost."""
        return len(self.mid.output)

    def get(self, metric: str, point: str) -> Interval:
        """Seconds of "ttft", "tpot", "itl", "e2e" or "queue" at one of `POINTS`; NaN where there are none.

        The interval holds what slower and faster steps make of it, at least the spread of measured
        TTFT and TPOT (more in the tails, `WIDER`), and what other random arrivals would move.
        """
        return self._build_interval(
            metric,
            lambda run: get_statistic(run, metric, point),
            float(STATISTIC_SIGMA_FACTORS[LATENCY_STATISTICS.index(point)]),
        )

    def compute_quantile(self, metric: str, q: float) -> Interval:
        """Seconds that a share `q` of the values of `metric` does not exceed."""
        wider = float(np.interp(q, LATENCY_QUANTILES, STATISTIC_SIGMA_FACTORS[1:]))
        return self._build_interval(metric, lambda run: run.compute_quantile(metric, q), wider)

    def _build_interval(
        self, metric: str, read: Callable[[SimulationResult], float], wider: float
    ) -> Interval:
        mid = read(self.mid)
        if not math.isfinite(mid):
            return Interval(math.nan, math.nan, math.nan)
        reach = math.exp(Z_SCORE_80PCT * wider * self._get_sigma(metric))
        lo, hi = mid / reach, mid * reach
        if self.interval_ends and (same := read(self._matching_mid)):
            ends = [read(run) * share for run in self.interval_ends for share in (1, mid / same)]
            lo, hi = min(lo, *ends), max(hi, *ends)
        luck = self.estimate_seed_noise(read) * mid
        return Interval(
            max(mid - math.hypot(mid - lo, luck), 0.0), mid, mid + math.hypot(hi - mid, luck)
        )

    def estimate_seed_noise(self, read: Callable[[SimulationResult], float]) -> float:
        """By which share another set of as many seeds would move a figure, in four cases of five at most."""
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
        first, decoding = self.sigmas
        if metric in ("ttft", "queue"):
            return first
        if metric == "e2e":
            ttft, whole = float(self.mid.ttft.mean()), float(self.mid.e2e.mean())
            return math.hypot(first * ttft, decoding * (whole - ttft)) / whole
        return decoding

    @cached_property
    def served_fraction(self) -> Interval:
        """The share of the arrivals that is served in the meantime, 0 to 1: below 1 the queue grows."""
        mid = float(np.mean([compute_served_fraction(run) for run in self.seeds]))
        ends = [mid, *map(compute_served_fraction, self.interval_ends)]
        return Interval(min(ends), mid, max(ends))

    @property
    def arrival_rps(self) -> float:
        """Requests/s that come for as long as it runs; 0 where the run has an end."""
        return (
            0.0
            if is_finite_run(self.workload)
            else compute_admitted_rps(self.deployment, self.workload)
        )

    def get_for_display(self, metric: str, point: str) -> Interval:
        """`at`, for people: see `unending`."""
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


def get_statistic(run: SimulationResult, metric: str, point: str) -> float:
    """Seconds of one replay's `metric` at one of `POINTS`."""
    return run.summarize(metric)[point]


def compute_served_fraction(run: SimulationResult) -> float:
    """Requests that ended per request that arrived, at most 1, in the last three quarters of the arrivals' time."""
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
    """`workload` on one engine of `deployment`; `quick`: a first look, at the middle of the step cost only.

    Raises `PlannerError` where the deployment does not fit, and for requests that can never be
    scheduled.
    """
    step, many = (
        build_step_model(deployment),
        count_requests_to_simulate(deployment, workload, quick=quick),
    )
    sigmas = step.sigma_ttft, step.sigma_tpot

    def one(case: tuple[int, float]) -> SimulationResult:
        seed, factor = case
        return simulate_once(deployment, workload, many, step_cost_factor=factor, seed=seed).trim(
            *cut
        )

    inside = 0.0 if is_finite_run(workload) else _estimate_in_flight(deployment, workload)
    cut = tuple(
        min(math.ceil(part * inside), many // 5)
        for part in (WARMUP_IN_FLIGHT_MULTIPLE, COOLDOWN_IN_FLIGHT_MULTIPLE)
    )
    if quick:
        return SimulationRun(deployment, workload, (one((0, 1.0)),), (), sigmas)
    fewest = 1 if is_finite_run(workload) else SEED_COUNT_BOUNDS[0]
    long = (
        MAX_OUTPUT_TOKENS_FACTOR * MAX_OUTPUT_TOKENS_PER_RUN / (many * workload.output.mean)
    )  # answers of 100,000 tokens take a second for ten
    most = max(min(SEED_COUNT_BOUNDS[1], MAX_REQUESTS_ALL_SEEDS // many, math.ceil(long)), fewest)
    if workload.trace:  # which is what it is: other seeds are other engines
        engines = min(deployment.num_engine_instances, len(workload.trace.arrival))
        fewest, most = min(fewest, engines), min(most, engines)
    first = min(
        max(
            fewest,
            math.ceil(
                MIN_REQUESTS_FOR_PERCENTILES * (0.5 if is_finite_run(workload) else 1) / many
            ),
        ),
        most,
    )
    like = min(math.ceil(REQUESTS_PER_INTERVAL_END / many), first)
    sides = _get_interval_step_factors(step.sigma_tpot) if workload.rate is not None else ()
    cases = [(seed, 1.0) for seed in range(first)] + [
        (seed, factor) for factor in sides for seed in range(like)
    ]
    results = run_in_parallel(one, cases)
    pooled = (
        SimulationResult.concatenate(results[start : start + like])
        for start in range(first, len(results), like)
    )
    result = SimulationRun(
        deployment, workload, tuple(results[:first]), tuple(pooled), sigmas, like
    )
    goes_on = (
        not is_finite_run(workload) or workload.trace is not None
    )  # else the run's own luck is part of it
    while goes_on and len(result.seeds) < most and _needs_more_seeds(result):
        more = [(seed, 1.0) for seed in range(len(result.seeds), min(len(result.seeds) + 2, most))]
        result = replace(result, seeds=(*result.seeds, *run_in_parallel(one, more)))
    return result


def run_short_simulation(
    deployment: Deployment,
    workload: Workload,
    requests: int,
    *,
    pool: KvCachePool | None = None,
    with_interval: bool = True,
) -> SimulationRun:
    """A shorter `run` for drawing: `requests` of one engine with one seed; a closed loop has several waves at least.

    Without `ends` only at the middle of the step cost. `pool` replaces the KV pool of the memory
    plan.
    """
    step = build_step_model(deployment)
    many = max(
        requests,
        MIN_CLOSED_LOOP_WAVES
        * math.ceil((workload.concurrency or 0) / deployment.num_engine_instances),
    )
    sides = (
        _get_interval_step_factors(step.sigma_tpot)
        if with_interval and workload.rate is not None
        else ()
    )
    mid, *others = run_in_parallel(
        lambda pace: simulate_once(deployment, workload, many, pool=pool, step_cost_factor=pace),
        (1.0, *sides),
    )
    return SimulationRun(
        deployment,
        workload,
        (mid,),
        tuple(others),
        (step.sigma_ttft, step.sigma_tpot) if with_interval else (0.0, 0.0),
    )


def _get_interval_step_factors(sigma: float) -> tuple[float, float]:
    """The faster and the slower end of the step cost, of its middle."""
    pace = math.exp(Z_SCORE_80PCT * sigma)
    return 1 / pace, pace


def simulate_once(
    deployment: Deployment, workload: Workload, requests: int, *, pool: KvCachePool | None = None,
    step_cost_factor: float = 1.0,
    seed: int = 0, gauge_s: float = 0.0,
) -> SimulationResult:  # fmt: skip
    """One replay of `requests` of one engine, every step at `pace` times its cost."""
    if pool is None:
        memory = get_memory_plan(deployment)
        if not memory.can_start:
            raise PlannerError(memory.reason)
        pool = memory.pool
    step = (
        build_step_model(deployment)
        if step_cost_factor == 1
        else build_step_model(deployment).scale(step_cost_factor)
    )
    even = not is_finite_run(
        workload
    )  # of traffic that goes on, what is looked at stands for what is not
    return simulate_workload(deployment, pool, step, workload, seed, gauge_s, requests, even)


def _needs_more_seeds(run: SimulationRun) -> bool:
    """Whether other seeds would move a stated percentile by more than `MOVES`."""
    points = [(metric, point) for metric in ("ttft", "tpot", "e2e") for point in ("p95", "p99")]
    return any(
        run.estimate_seed_noise(partial(get_statistic, metric=metric, point=point)) > MAX_SEED_NOISE
        for metric, point in points
    )


def run_in_parallel(
    one: Callable[[CaseT], SimulationResult], cases: Sequence[CaseT]
) -> list[SimulationResult]:
    """`one` of every case, on all cores: the compiled replay does not hold the interpreter's lock."""
    return (
        list(_get_thread_pool(os.getpid()).map(one, cases))
        if len(cases) > 1
        else [one(case) for case in cases]
    )


@lru_cache(maxsize=1)
def _get_thread_pool(_process: int) -> ThreadPoolExecutor:
    """Threads of this process, for all of its runs."""
    return ThreadPoolExecutor(os.cpu_count() or 1)


def count_requests_to_simulate(
    deployment: Deployment, workload: Workload, *, quick: bool = False
) -> int:
    """How many requests of `workload` one engine is sent in one replay; `quick`: for a first look."""
    share = math.ceil(workload.num_requests / deployment.num_engine_instances)
    if workload.trace is not None:
        return min(share, SCREENING_REQUEST_BOUNDS[0] if quick else MAX_TRACE_REQUESTS_PER_ENGINE)
    if is_finite_run(workload):
        waves = MIN_CLOSED_LOOP_WAVES * math.ceil(
            (workload.concurrency or 0) / deployment.num_engine_instances
        )
        return min(
            share,
            max(
                (
                    SCREENING_REQUEST_BOUNDS[0]
                    if quick
                    else (
                        MIN_REQUESTS_FOR_PERCENTILES
                        if share > MAX_REQUESTS_PER_RUN
                        else MAX_REQUESTS_PER_RUN
                    )
                ),
                waves,
            ),
        )
    if quick:
        return min(
            max(round(SCREENING_OUTPUT_TOKENS / workload.output.mean), SCREENING_REQUEST_BOUNDS[1]),
            SCREENING_REQUEST_BOUNDS[0],
        )
    wanted = min(
        max(
            math.ceil(RUN_LENGTH_IN_FLIGHT_MULTIPLE * _estimate_in_flight(deployment, workload)),
            SCREENING_REQUEST_BOUNDS[0],
        ),
        MAX_REQUESTS_PER_RUN,
    )
    return max(
        min(wanted, round(MAX_OUTPUT_TOKENS_PER_RUN / workload.output.mean)), MIN_REQUESTS_PER_RUN
    )


@lru_cache(maxsize=1024)
def _estimate_in_flight(deployment: Deployment, workload: Workload) -> float:
    """Requests that are in one engine at once, by Little's law and the closed form."""
    load = derive_effective_workload(deployment, workload)
    performance = solve_open_loop(LoadCase(deployment, get_memory_plan(deployment), load))
    stay = (
        performance.request_tps.mid * performance.e2e["mean"].mid / deployment.num_engine_instances
    )
    return min(stay, float(deployment.args.max_num_seqs))


def simulate_performance(
    deployment: Deployment,
    workload: Workload,
    like: Performance,
    *,
    quick: bool = False,
    rough: bool = False,
) -> Performance:
    """What `deployment` does under `workload`, replayed; `like` is what the closed form says, for limit and basis.

    `rough`: its capacity is the closed form's too. Raises `PlannerError` for requests that can
    never be scheduled.
    """
    return replace(
        like,
        **_compute_performance_fields(
            deployment, workload, quick=quick, capacity=like.capacity if rough else None
        ),
    )


@lru_cache(maxsize=4096)
def _compute_performance_fields(
    deployment: Deployment, workload: Workload, *, quick: bool, capacity: Interval | None
) -> dict[str, Any]:
    """The fields of a `Performance` that a replay fills in, kept for a whole search: it asks for most of them twice.

    `capacity` is the capacity, where it need not be replayed.
    """
    waiting = _get_thread_pool(os.getpid()).submit(
        lambda: capacity or estimate_capacity(deployment, workload)
    )
    run = run_simulation(deployment, workload, quick=quick)
    capacity = waiting.result()
    mid, rate = run.mid, _estimate_served_rps(run, capacity)
    outputs, prompts = workload.output.mean, workload.prompt.mean
    if is_finite_run(workload):  # the run itself may serve a little more than a crowd that waits
        outputs, prompts = float(mid.output.mean()), float(mid.prompt.mean())
        capacity = Interval(
            max(capacity.lo, rate.lo), max(capacity.mid, rate.mid), max(capacity.hi, rate.hi)
        )
    return {
        **{
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
    """Requests/s that all engines serve over the run; of traffic that goes on, what comes in as far as it can go out.

    Ten minutes of such traffic differ by chance, as a Poisson count does.
    """
    deployment, workload, mid = run.deployment, run.workload, run.mid
    if not is_finite_run(workload):
        coming = compute_admitted_rps(deployment, workload)
        reach = math.exp(
            Z_SCORE_80PCT / math.sqrt(max(workload.burstiness * workload.num_requests, 1.0))
        )
        interval = capacity.map_monotone(lambda rate: min(rate, coming))
        return Interval(interval.lo / reach, interval.mid, interval.hi * reach)
    served_once = (
        len(mid.output) / len(run.seeds) * deployment.num_engine_instances
    )  # of those sent, all that were not refused
    share = 1 - compute_rejected_fraction(workload, deployment.args.max_model_len)
    more = max(workload.num_requests * share - served_once, 0.0)
    duration = mid.duration / len(run.seeds) + more / capacity.mid
    arriving = workload.num_requests / workload.rate if workload.rate else 0.0
    paced = min(arriving / duration, 1.0)  # of the run, for which its speed is the client's
    return Interval.from_lognormal(
        (served_once + more) / duration, get_rate_sigma(deployment) * (1 - paced)
    )
