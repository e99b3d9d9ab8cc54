"""What one deployment does under one workload: the function that report, search and batch share."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planner.core.intervals import Interval
from planner.engines.deployment import Deployment
from planner.engines.engine import find_required_plugin
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
"""What a `Performance` counts per second over the whole deployment."""


@dataclass(frozen=True)
class Prediction:
    """Memory, latency and cost of `deployment` under `workload`; no `performance` when it does not fit.

    With a `prefill` pool, `deployment` and `memory` are those of the decode pool, the rest is of
    both together.
    """

    deployment: Deployment
    workload: Workload | None  # None: only memory was asked for
    memory: MemoryPlan
    performance: Performance | None
    usd_per_hour_interval: (
        Interval | None
    )  # per hour, of all GPUs, from the cheapest quote to the dearest; None where none is known
    prefill: Deployment | None = None

    @property
    def pools(self) -> tuple[Deployment, ...]:
        """The prefill and the decode pool; of replicas that do both the deployment alone."""
        return (self.prefill, self.deployment) if self.prefill else (self.deployment,)

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas and pools that serve the load."""
        return sum(pool.layout.num_gpus for pool in self.pools)

    @property
    def num_gpus_billed(self) -> int:
        """GPUs of all pools that are paid, spare ones and those of whole machines among them."""
        return sum(pool.num_gpus_billed for pool in self.pools)

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all GPUs; None where none is known."""
        return self.usd_per_hour_interval.mid if self.usd_per_hour_interval else None

    @property
    def usd_per_month(self) -> Interval | None:
        """Price of all GPUs, rented without a break; None where none is known."""
        return self.usd_per_hour_interval * HOURS_PER_MONTH if self.usd_per_hour_interval else None

    @property
    def effective_workload(self) -> Workload:
        """The traffic as the engine takes it on: without what it refuses, and without a prefix cache that is off."""
        assert self.workload is not None
        return derive_effective_workload(self.deployment, self.workload)

    @property
    def rejected_fraction(self) -> float:
        """The share of requests that is refused, because their prompts leave no room for an output."""
        return (
            compute_rejected_fraction(self.workload, self.deployment.args.max_model_len)
            if self.workload
            else 0.0
        )

    @property
    def mean_in_flight(self) -> float:
        """Requests in a replica, running or waiting, on average: arrivals times their time in it (Little's law)."""
        assert self.performance is not None and self.workload is not None
        inside = (
            self.workload.concurrency
            or (self.workload.rate or 0.0) * self.performance.get("e2e", "mean").mid
        )
        return max(inside / self.deployment.layout.replicas, 1.0)

    @property
    def speedup(self) -> Interval | None:
        """TPOT without / with speculative decoding at the decode batch that is reached; None where there is none."""
        if self.deployment.speculation is None or self.performance is None or not self.workload:
            return None
        batch = max(self.performance.decode_batch, 1.0)
        return evaluate_speculation(
            self.deployment, batch, self.workload.mean_decode_context
        ).speedup

    @property
    def gpu_power_w(self) -> Interval | None:
        """Mean board power of one GPU under this load, W; None where nothing runs."""
        if self.performance is None or self.workload is None:
            return None
        rest = self._estimate_pool_power(self.deployment, prefills=self.prefill is None)
        if self.prefill is None:
            return rest
        first = self._estimate_pool_power(self.prefill, decodes=False)
        return (
            first * self.prefill.layout.num_gpus + rest * self.deployment.layout.num_gpus
        ) / self.num_gpus

    def _estimate_pool_power(self, pool: Deployment, **phases: bool) -> Interval:
        assert self.performance and self.workload
        served, batch = self.performance.request_tps.mid, self.performance.decode_batch
        return estimate_board_power(
            pool.gpu,
            estimate_gpu_activity(
                pool, derive_effective_workload(pool, self.workload), served, batch, **phases
            ),
        )

    @property
    def total_power_w(self) -> Interval | None:
        """Mean power of all GPUs that are rented, W: of those under load, and of the others, which idle."""
        if self.gpu_power_w is None:
            return None
        return self.gpu_power_w * self.num_gpus + estimate_board_power(
            self.deployment.gpu, IDLE_ACTIVITY
        ) * (self.num_gpus_billed - self.num_gpus)

    @property
    def joules_per_output_token(self) -> Interval | None:
        """Energy of all boards per output token, J; None where there are none."""
        if self.gpu_power_w is None or self.performance is None:
            return None
        return compute_joules_per_token(
            self.gpu_power_w, self.num_gpus, self.performance.output_tps
        )

    @property
    def can_start(self) -> bool:
        """The engine would start."""
        return self.performance is not None

    @property
    def usd_per_mtok_output(self) -> Interval | None:
        """USD per million output tokens at the middle price; None where none is known, or it does not fit."""
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
        """What a reader should know before trusting the figures."""
        notes = (
            *self.deployment.model.warnings,
            self.deployment.engine.substitution_note,
            *self.memory.warnings,
        )
        notes += self.performance.warnings if self.performance else ()
        stored, engine = self.deployment.model.quantization.method, self.deployment.engine
        if package := find_required_plugin(engine, stored):
            notes += (f"{engine} serves {stored} only with the package {package} beside it",)
        if self.rejected_fraction:
            notes += (
                (
                    f"{self.rejected_fraction:.2%} of the requests are refused: their prompts do"
                    " not fit into max_model_len"
                ),
            )
        if self.performance and self.performance.saturated:
            notes += (
                (
                    f"overloaded: it serves {self.performance.request_tps.mid:.3g} requests/s of"
                    " the rate asked"
                ),
            )
        return tuple(dict.fromkeys(note for note in notes if note))

    def __str__(self) -> str:
        what = str(self.performance) if self.performance else self.memory.reason
        return f"{self.deployment}: {what}"


def predict(
    deployment: Deployment, workload: Workload, prices: PriceSelection | None = None, *,
    quick: bool = False, rough: bool = False,
) -> Prediction:  # fmt: skip
    """What is stated of `deployment` under `workload`: its traffic, replayed (`planning.simulation_runs`).

    With a rate the loop is open; with a concurrency closed; with both, arrivals wait while so many
    are in flight. `prices` are the catalog's on demand unless given. `quick` is a first look
    without intervals of its own, `rough` one with the closed form's capacity.
    """
    prediction = evaluate(deployment, workload, prices)
    if prediction.performance is None:
        return prediction
    return replace(
        prediction,
        performance=simulate_performance(
            deployment, workload, prediction.performance, quick=quick, rough=rough
        ),
    )


def evaluate(
    deployment: Deployment, workload: Workload, prices: PriceSelection | None = None
) -> Prediction:
    """`predict` in closed form, in about a millisecond: for ranking, sweeps and sliders."""
    return evaluate_batch([(deployment, workload)], prices)[0]


def evaluate_batch(
    cases: Iterable[tuple[Deployment, Workload]], prices: PriceSelection | None = None
) -> list[Prediction]:
    """`evaluate` of every case, all worked out at once, so that more points cost little more."""
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
    for k, steady in zip(loads, solve_load_cases(list(loads.values())), strict=True):
        predictions[k] = replace(predictions[k], performance=steady)
    return predictions


def estimate_hourly_cost(
    deployment: Deployment, prices: PriceSelection | None = None
) -> Interval | None:
    """USD per hour of all GPUs that are rented for it, from the cheapest to the dearest quote; None if unknown."""
    price = look_up_gpu_price(deployment.gpu, prices)
    return (
        Interval(price.min_usd, price.median_usd, price.max_usd) * deployment.num_gpus_billed
        if price
        else None
    )


def solve_load_cases(cases: Sequence[LoadCase]) -> list[Performance]:
    """Open loops where there is a rate, closed ones where there is none or it would hold more than the concurrency."""
    found: dict[int, Performance] = {}
    if paced := [k for k, case in enumerate(cases) if case.workload.rate is not None]:
        own = [cases[k] for k in paced]
        open_ = (
            [solve_open_loop(own[0])]
            if len(own) == 1 and own[0].step is None
            else solve_open_loops(own)
        )
        found |= zip(paced, open_, strict=True)
    if closed := [
        k
        for k, case in enumerate(cases)
        if k not in found or _exceeds_concurrency(case.workload, found[k])
    ]:
        limited = [
            replace(cases[k], workload=replace(cases[k].workload, rate=None)) for k in closed
        ]
        found |= zip(closed, solve_closed_loops(limited), strict=True)
    return [found[k] for k in range(len(cases))]


def _exceeds_concurrency(workload: Workload, performance: Performance) -> bool:
    """Whether an open loop would hold more requests in flight than the workload allows."""
    in_flight = (workload.rate or 0.0) * performance.e2e["mean"].mid
    return workload.concurrency is not None and (
        performance.saturated or in_flight > workload.concurrency
    )
