"""What one deployment does under one workload: the function that report, search and batch share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from planner.benchmark import benchmark, is_benchmark
from planner.cost import Cost, cost
from planner.deployment import Deployment
from planner.memory import MemoryPlan, plan
from planner.prices import price_per_hour
from planner.quantities import Interval, PlannerError
from planner.speculation import speculate
from planner.steady import Case, Performance, closed_loops, open_loops
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
    return evaluate_all([(deployment, workload)], prices, replayed=replayed)[0]


def evaluate_all(
    cases: Iterable[tuple[Deployment, Workload]], prices: Mapping[str, float] | None = None, *, replayed: bool = False
) -> list[Prediction]:
    """`evaluate` of every case; the closed form is worked out for all at once, so that more points cost little more."""
    found = [_asked(deployment, workload, prices or {}) for deployment, workload in cases]
    loads = {
        k: Case(one.deployment, one.memory, one.workload)
        for k, one in enumerate(found)
        if one.workload and one.memory.starts
    }
    for (k, case), performance in zip(loads.items(), _perform(list(loads.values())), strict=True):
        speedup = None
        if replayed and is_benchmark(case.deployment, case.workload):
            performance = benchmark(case.deployment, case.plan, case.workload, performance)
        if case.deployment.speculation is not None:
            batch = max(performance.decode_batch, 1.0)
            speedup = speculate(case.deployment, batch, case.workload.context).speedup
        found[k] = replace(found[k], performance=performance, speedup=speedup)
    return found


def _asked(deployment: Deployment, workload: Workload, prices: Mapping[str, float]) -> Prediction:
    """What is known before any load: memory and price."""
    price = price_per_hour(deployment.gpu, prices)
    usd = price.usd * deployment.layout.gpus if price else None
    mean, limit = workload.prompt.mean + workload.output.mean, deployment.args.max_model_len or 0
    if mean > limit:
        raise PlannerError(f"requests of {mean:,.0f} tokens on average do not fit into max_model_len {limit:,}")
    if not deployment.args.enable_prefix_caching:
        workload = replace(workload, prefix_hit_rate=0.0)
    return Prediction(deployment, workload, memory_of(deployment), None, usd)


def memory_of(deployment: Deployment) -> MemoryPlan:
    """The memory plan of `deployment`, worked out once for any number of replicas."""
    one = replace(deployment, layout=replace(deployment.layout, replicas=1))
    return replace(_plan_once(one), deployment=deployment)


@lru_cache(maxsize=4096)
def _plan_once(deployment: Deployment) -> MemoryPlan:
    return plan(deployment)


def _perform(cases: Sequence[Case]) -> list[Performance]:
    """Open loops where there is a rate, closed ones where there is none or it would hold more than the concurrency."""
    found: dict[int, Performance] = {}
    if paced := [k for k, case in enumerate(cases) if case.workload.rate is not None]:
        found |= zip(paced, open_loops([cases[k] for k in paced]), strict=True)
    if closed := [k for k, case in enumerate(cases) if k not in found or _overruns(case.workload, found[k])]:
        limited = [replace(cases[k], workload=replace(cases[k].workload, rate=None)) for k in closed]
        found |= zip(closed, closed_loops(limited), strict=True)
    return [found[k] for k in range(len(cases))]


def _overruns(workload: Workload, performance: Performance) -> bool:
    """Whether an open loop would hold more requests in flight than the workload allows."""
    in_flight = (workload.rate or 0.0) * performance.e2e["mean"].mid
    return workload.concurrency is not None and (performance.saturated or in_flight > workload.concurrency)
