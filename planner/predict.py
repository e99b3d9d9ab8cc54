"""What one deployment does under one workload: the function that report, search and batch share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from planner.benchmark import benchmark, is_benchmark
from planner.cost import Cost, cost
from planner.deployment import Deployment
from planner.memory import MemoryPlan, plan
from planner.prices import price_per_hour
from planner.quantities import Interval, PlannerError
from planner.speculation import speculate
from planner.steady import Performance, closed_loop, open_loop
from planner.workload import Workload

RATES = ("output_tps", "total_tps", "request_tps")
"""What a `Performance` counts per second over the whole deployment."""


@dataclass(frozen=True)
class Prediction:
    """Memory, latency and cost of `deployment` under `workload`; no `performance` when it does not fit.

    With a `prefill` pool, `deployment` and `memory` are those of the decode pool, the rest is of both together.
    """

    deployment: Deployment
    workload: Workload | None  # None: only memory was asked for
    memory: MemoryPlan
    performance: Performance | None
    usd_per_hour: float | None  # of all GPUs; None where no price is known
    speedup: Interval | None = None  # TPOT without / with speculative decoding at the decode batch, where there is any
    prefill: Deployment | None = None

    @property
    def gpus(self) -> int:
        """GPUs of all replicas and pools."""
        return self.deployment.layout.gpus + (self.prefill.layout.gpus if self.prefill else 0)

    @property
    def fits(self) -> bool:
        """The engine would start."""
        return self.performance is not None

    @property
    def cost(self) -> Cost | None:
        """Running cost, where a price is known and the deployment fits."""
        if self.performance is None or self.usd_per_hour is None:
            return None
        return cost(self.usd_per_hour / self.gpus, self.gpus, self.performance.output_tps, self.performance.request_tps)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before trusting the figures."""
        notes = (*self.deployment.model.warnings, self.deployment.engine.note, *self.memory.warnings)
        notes += self.performance.warnings if self.performance else ()
        if self.performance and self.performance.saturated:
            notes += (f"overloaded: it serves {self.performance.request_tps.mid:.3g} requests/s of the rate asked",)
        return tuple(dict.fromkeys(note for note in notes if note))

    def __str__(self) -> str:
        what = str(self.performance) if self.performance else self.memory.reason
        return f"{self.deployment}: {what}"


def evaluate(
    deployment: Deployment, workload: Workload, prices: Mapping[str, float] | None = None, *, replayed: bool = False
) -> Prediction:
    """Predict `deployment` under `workload`; `prices` (USD per GPU hour by name) win over the catalog's.

    With a rate the loop is open; with a concurrency closed; with both, a rate that would hold more requests in flight
    than the concurrency allows becomes a closed loop. `replayed` sends a run of so many requests through the engine's
    schedule (`planner.benchmark`) where the closed form would do; it takes some 10 ms instead of one.
    Raises `PlannerError` for what the engine would refuse.
    """
    memory = memory_of(deployment)
    price = price_per_hour(deployment.gpu, prices or {})
    usd = price.usd * deployment.layout.gpus if price else None
    mean, limit = workload.prompt.mean + workload.output.mean, deployment.args.max_model_len or 0
    if mean > limit:
        raise PlannerError(f"requests of {mean:,.0f} tokens on average do not fit into max_model_len {limit:,}")
    if not deployment.args.enable_prefix_caching:
        workload = replace(workload, prefix_hit_rate=0.0)
    if memory.status == "does_not_fit" or memory.pool.max_concurrency_x < 1:
        return Prediction(deployment, workload, memory, None, usd)
    performance, speedup = _perform(deployment, memory, workload), None
    if replayed and is_benchmark(deployment, workload):
        performance = benchmark(deployment, memory, workload, performance)
    if deployment.speculation is not None:
        speedup = speculate(deployment, max(performance.decode_batch, 1.0), workload.context).speedup
    return Prediction(deployment, workload, memory, performance, usd, speedup)


def memory_of(deployment: Deployment) -> MemoryPlan:
    """The memory plan of `deployment`, worked out once for any number of replicas."""
    one = replace(deployment, layout=replace(deployment.layout, replicas=1))
    return replace(_plan_once(one), deployment=deployment)


@lru_cache(maxsize=4096)
def _plan_once(deployment: Deployment) -> MemoryPlan:
    return plan(deployment)


def _perform(deployment: Deployment, memory: MemoryPlan, workload: Workload) -> Performance:
    if workload.rate is None:
        return closed_loop(deployment, memory, workload)
    performance = open_loop(deployment, memory, workload)
    in_flight = workload.rate * performance.e2e["mean"].mid
    if workload.concurrency is not None and (performance.saturated or in_flight > workload.concurrency):
        return closed_loop(deployment, memory, replace(workload, rate=None))
    return performance
