"""Predict one deployment under one workload, for reports, search and batches."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planner.core.intervals import Interval
from planner.core.number_format import format_number
from planner.engines.deployment import Deployment
from planner.engines.model_support import judge_model_support
from planner.hardware.prices import HOURS_PER_MONTH, PriceSelection, look_up_gpu_price
from planner.latency.performance import Performance
from planner.latency.power import (
    GpuActivity,
    compute_joules_per_token,
    estimate_board_power,
    estimate_gpu_activity,
)
from planner.latency.speculative_decoding import evaluate_speculation
from planner.memory.memory_plan import MemoryPlan, get_memory_plan
from planner.planning.capacity import compute_rejected_fraction, derive_effective_workload
from planner.planning.simulation_runs import simulate_performance
from planner.queueing.steady_state import (
    LoadCase,
    solve_closed_loops,
    solve_open_loop,
    solve_open_loops,
)
from planner.workload.workload import Workload

IDLE_ACTIVITY = GpuActivity(0.0, (0.0, 0.0), 0.0, 0.0)
RATE_METRICS = ("output_tps", "total_tps", "request_tps")
"""Fields of `Performance` that are rates of the whole deployment."""


MAX_SOLVED_CASES = 16_384
"""Closed forms that are kept: a large search and its what-ifs."""
_solved: dict[tuple[Deployment, Workload], Performance] = {}


@dataclass(frozen=True)
class Prediction:
    """Memory, latency and cost of `deployment` under `workload`.

    `performance` is None if it does not fit. With a `prefill` pool, `deployment` and `memory` are
    those of the decode pool, and the rest is of both together. `usd_per_hour_interval` covers all
    GPUs, from the cheapest quote to the dearest.
    """

    deployment: Deployment
    workload: Workload | None  # None: memory only
    memory: MemoryPlan
    performance: Performance | None
    usd_per_hour_interval: Interval | None  # None without quotes
    prefill: Deployment | None = None

    @property
    def pools(self) -> tuple[Deployment, ...]:
        """The prefill and the decode pool, or the deployment alone."""
        return (self.prefill, self.deployment) if self.prefill else (self.deployment,)

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas and pools that serve the load."""
        return sum(pool.layout.num_gpus for pool in self.pools)

    @property
    def num_gpus_billed(self) -> int:
        """Billed GPUs of all pools, with spare replicas and idle GPUs of whole machines."""
        return sum(pool.num_gpus_billed for pool in self.pools)

    @property
    def usd_per_hour(self) -> float | None:
        """Cost of all GPUs at the median price; None without a price."""
        return self.usd_per_hour_interval.mid if self.usd_per_hour_interval else None

    @property
    def usd_per_month(self) -> Interval | None:
        """Cost of all GPUs for a month without a break; None without a price."""
        return self.usd_per_hour_interval * HOURS_PER_MONTH if self.usd_per_hour_interval else None

    @property
    def effective_workload(self) -> Workload:
        """The admitted part of the workload, with the hit rate of the engine's prefix cache."""
        assert self.workload is not None
        return derive_effective_workload(self.deployment, self.workload)

    @property
    def rejected_fraction(self) -> float:
        """Fraction of requests rejected because their prompts leave no room for an output."""
        return (
            compute_rejected_fraction(self.workload, self.deployment.args.max_model_len)
            if self.workload
            else 0.0
        )

    @property
    def mean_in_flight(self) -> float:
        """Mean running and waiting requests per replica: arrival rate x E2E (Little's law)."""
        assert self.performance is not None and self.workload is not None
        in_flight = (
            self.workload.concurrency
            or (self.workload.rate or 0.0) * self.performance.get("e2e", "mean").mid
        )
        return max(in_flight / self.deployment.layout.replicas, 1.0)

    @property
    def speedup(self) -> Interval | None:
        """TPOT without / with speculative decoding at the mean decode batch; None without it."""
        if self.deployment.speculation is None or self.performance is None or not self.workload:
            return None
        batch = max(self.performance.decode_batch, 1.0)
        return evaluate_speculation(
            self.deployment, batch, self.workload.mean_decode_context
        ).speedup

    @property
    def gpu_power_w(self) -> Interval | None:
        """Mean board power of one GPU under this load, W; None without a load."""
        if self.performance is None or self.workload is None:
            return None
        decode_w = self._estimate_pool_power(self.deployment, prefills=self.prefill is None)
        if self.prefill is None:
            return decode_w
        prefill_w = self._estimate_pool_power(self.prefill, decodes=False)
        return (
            prefill_w * self.prefill.layout.num_gpus + decode_w * self.deployment.layout.num_gpus
        ) / self.num_gpus

    def _estimate_pool_power(self, pool: Deployment, **phases: bool) -> Interval:
        assert self.performance and self.workload
        rps, batch = self.performance.request_tps.mid, self.performance.decode_batch
        return estimate_board_power(
            pool.gpu,
            estimate_gpu_activity(
                pool, derive_effective_workload(pool, self.workload), rps, batch, **phases
            ),
        )

    @property
    def total_power_w(self) -> Interval | None:
        """Mean power of all billed GPUs, W: those under load, and the idle ones."""
        if self.gpu_power_w is None:
            return None
        return self.gpu_power_w * self.num_gpus + estimate_board_power(
            self.deployment.gpu, IDLE_ACTIVITY
        ) * (self.num_gpus_billed - self.num_gpus)

    @property
    def joules_per_output_token(self) -> Interval | None:
        """Energy of all GPUs per output token, J; None without a load."""
        if self.gpu_power_w is None or self.performance is None:
            return None
        return compute_joules_per_token(
            self.gpu_power_w, self.num_gpus, self.performance.output_tps
        )

    @property
    def can_start(self) -> bool:
        """Whether the engine starts."""
        return self.performance is not None

    @property
    def usd_per_mtok_output(self) -> Interval | None:
        """USD per million output tokens at the median price; None without price or performance."""
        if self.performance is None or self.usd_per_hour is None:
            return None
        usd = self.usd_per_hour / 3600
        return (
            self.performance.output_tps.map_monotone(
                lambda rate: usd / rate if rate > 0 else math.inf
            )
            * 1e6
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the figures, without repetitions."""
        notes = (
            *self.deployment.model.warnings,
            self.deployment.engine.substitution_note,
            *self.memory.warnings,
            judge_model_support(self.deployment.model, self.deployment.engine).sentence,
        )
        notes += self.performance.warnings if self.performance else ()
        method, engine = self.deployment.model.quantization.method, self.deployment.engine
        if package := engine.facts.plugins.get(method):
            notes += (f"{engine} serves {method} only with the package {package} beside it",)
        if self.rejected_fraction:
            notes += (
                f"rejected requests: {self.rejected_fraction:.1%} (prompts longer than"
                " max_model_len)",
            )
        if self.performance and self.performance.saturated:
            rate = self.workload.rate if self.workload else None
            offered = f" of {format_number(rate)}" if rate and math.isfinite(rate) else ""
            served = format_number(self.performance.request_tps.mid)
            notes += (f"overloaded: {served}{offered} requests/s are served",)
        return tuple(dict.fromkeys(note for note in notes if note))

    def __str__(self) -> str:
        return f"{self.deployment}: {self.performance or self.memory.reason}"


def predict(
    deployment: Deployment, workload: Workload, prices: PriceSelection | None = None, *,
    quick: bool = False,
) -> Prediction:  # fmt: skip
    """Predict `deployment` under `workload` by simulating its requests.

    The loop is open with a rate, and closed with a concurrency; with both, arrivals wait while that
    many requests are in flight. `prices` default to the catalog's on demand. `quick` is a screening
    at the expected step cost only.
    """
    prediction = evaluate(deployment, workload, prices)
    if prediction.performance is None:
        return prediction
    return replace(
        prediction,
        performance=simulate_performance(deployment, workload, prediction.performance, quick=quick),
    )


def evaluate(
    deployment: Deployment, workload: Workload, prices: PriceSelection | None = None
) -> Prediction:
    """Predict analytically, in about a millisecond: for ranking, sweeps and sliders."""
    return evaluate_batch([(deployment, workload)], prices)[0]


def evaluate_batch(
    cases: Iterable[tuple[Deployment, Workload]], prices: PriceSelection | None = None
) -> list[Prediction]:
    """Evaluate all cases at once, so that more cases cost little more.

    What was solved is kept for the next search of the same traffic, such as that of a relaxed limit.
    """
    cases = list(cases)
    predictions = [
        Prediction(
            deployment,
            workload,
            get_memory_plan(deployment),
            None,
            estimate_hourly_cost(deployment, prices),
        )
        for deployment, workload in cases
    ]
    loads = {
        k: LoadCase(prediction.deployment, prediction.memory, prediction.effective_workload)
        for k, prediction in enumerate(predictions)
        if prediction.memory.can_start
    }
    solved = {k: found for k in loads if (found := _solved.get(cases[k]))}
    new = {k: load for k, load in loads.items() if k not in solved}
    solved |= zip(new, solve_load_cases(list(new.values())), strict=True)
    if len(_solved) + len(new) > MAX_SOLVED_CASES:
        _solved.clear()
    _solved.update((cases[k], solved[k]) for k in new)
    for k, performance in solved.items():
        predictions[k] = replace(predictions[k], performance=performance)
    return predictions


def estimate_hourly_cost(
    deployment: Deployment, prices: PriceSelection | None = None
) -> Interval | None:
    """Estimate USD per hour of all billed GPUs, from the cheapest quote to the dearest."""
    price = look_up_gpu_price(deployment.gpu, prices)
    return (
        Interval(price.min_usd, price.median_usd, price.max_usd) * deployment.num_gpus_billed
        if price
        else None
    )


def solve_load_cases(cases: Sequence[LoadCase]) -> list[Performance]:
    """Solve open loops for cases with a rate, closed ones for the others.

    A case with a rate that would exceed its concurrency is a closed loop too.
    """
    solved: dict[int, Performance] = {}
    if open_keys := [k for k, case in enumerate(cases) if case.workload.rate is not None]:
        open_cases = [cases[k] for k in open_keys]
        solutions = (
            [solve_open_loop(open_cases[0])]
            if len(open_cases) == 1 and open_cases[0].step is None
            else solve_open_loops(open_cases)
        )
        solved |= zip(open_keys, solutions, strict=True)
    if closed_keys := [
        k
        for k, case in enumerate(cases)
        if k not in solved
        or (
            (most := case.workload.concurrency) is not None
            and (
                solved[k].saturated
                or (case.workload.rate or 0.0) * solved[k].get("e2e", "mean").mid > most
            )
        )
    ]:
        closed_cases = [
            replace(cases[k], workload=replace(cases[k].workload, rate=None)) for k in closed_keys
        ]
        solved |= zip(closed_keys, solve_closed_loops(closed_cases), strict=True)
    return [solved[k] for k in range(len(cases))]
