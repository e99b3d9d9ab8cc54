"""The best prefill and decode pools for a scenario, held against its plan, in which every replica does both.

They are looked at only where the scenario says `pools: true`, for traffic with a rate: what is known of them was mostly
measured behind NVIDIA Dynamo, they take a router and a fast link, and their intervals are wide. They are preferred
where they cost less though they keep every promise at the pessimistic end of those intervals.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from planner.core.quantities import PlannerError
from planner.facts.deployment import Deployment
from planner.facts.engines import unsupported
from planner.facts.workload import Workload
from planner.memory.budget import memory_of
from planner.models.registry import model
from planner.parallelism.layouts import legal_layouts
from planner.planning.candidate import Candidate, against
from planner.planning.deployments import deployment_of
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.search import Plan

ENGINES = ("vllm", "sglang", "trtllm")
"""That can hand a KV cache from one worker to another."""
FIRST_LOOK = 3_000
"""Requests of a first look; what is stated has all of a run."""
STEPS = 12
"""Workers that are added one by one, at most, until every promise is kept."""
DECODING = {"tpot", "itl", "e2e", "kv", "max_num_seqs"}
"""What is missed for want of decode workers."""


@dataclass(frozen=True)
class PoolPlan:
    """A prefill and a decode pool under a scenario's traffic, held against its service level."""

    prefill: Deployment
    decode: Deployment
    found: Candidate  # of the decode pool, its figures those of both

    @property
    def gpus(self) -> int:
        """GPUs of both pools that are rented."""
        return self.prefill.gpus_rented + self.decode.gpus_rented

    @property
    def cost(self) -> tuple[bool, float]:
        """As a candidate's: USD per hour, or GPUs where no price is known."""
        usd = self.found.usd_per_hour
        return usd is None, self.gpus if usd is None else usd

    def __str__(self) -> str:
        first, rest = (replace(pool.layout, replicas=1) for pool in (self.prefill, self.decode))
        workers = self.prefill.layout.replicas, self.decode.layout.replicas
        return f"{self.gpus} x {self.decode.gpu.name}: prefill {workers[0]} x {first}, decode {workers[1]} x {rest}"


def best_pools(scenario: Scenario) -> PoolPlan | None:
    """The cheapest pools that keep every promise, else those that come nearest; None where none can be looked at."""
    if not scenario.pools or scenario.workload.rate is None or scenario.offline:
        return None
    found = [grown for one in _shapes(scenario) if (grown := _grown(scenario, *one))]
    if not found:
        return None
    best = min(found, key=_rank)
    stated = _judged(scenario, best.prefill, best.decode, scenario.workload)
    return stated or best


def preferred(plan: Plan, pools: PoolPlan) -> bool:
    """Whether pools cost less than the plan, and keep every promise at the pessimistic end of every interval."""
    holds = pools.found.meets and not pools.found.at_risk
    return holds and (plan.chosen is None or pools.cost < plan.chosen.cost)


def _rank(pools: PoolPlan) -> tuple[object, ...]:
    return not pools.found.meets, pools.found.at_risk * pools.found.meets, *pools.cost, pools.found.margin


def _shapes(scenario: Scenario) -> Iterator[tuple[CandidateGpu, Deployment, Deployment]]:
    """One worker of each pool: every tensor and data parallel size inside a node, formats in both alike."""
    for under, card, quantization, kv in product(
        scenario.by_engine, scenario.gpus, scenario.quantizations, scenario.kv_cache_dtypes
    ):
        if under.engine.name not in ENGINES or unsupported(card.gpu, under.engine):
            continue
        served, alone = model(scenario.model, quantization=quantization), replace(under, spare_replicas=0)
        workers = []
        for layout in legal_layouts(served, card.gpu, card.at_most, card.node, under.engine):
            if layout.pp > 1 or layout.gpus >= min(card.at_most, card.node + 1):
                continue
            with suppress(PlannerError):
                one = deployment_of(alone, card, served, layout, kv)
                workers += [one] if memory_of(one).starts else []
        yield from ((card, first, rest) for first, rest in product(workers, workers))


def _grown(scenario: Scenario, card: CandidateGpu, first: Deployment, rest: Deployment) -> PoolPlan | None:
    """One worker of each, and one more at a time of the pool that is short, until nothing is missed or too many are."""
    many = replace(scenario.workload, num_prompts=min(scenario.workload.requests, FIRST_LOOK))
    best: PoolPlan | None = None
    for _ in range(STEPS):
        found = _judged(scenario, first, rest, many) if first.gpus_rented + rest.gpus_rented <= card.at_most else None
        if found is None:
            break
        best = found if best is None or _rank(found) < _rank(best) else best
        performance = found.found.prediction.performance
        if (found.found.meets and not found.found.at_risk) or performance is None:
            break
        said = found.found.constraints or found.found.risks
        short = {word.lower() for each in said for word in each.split()}
        if "capacity" in short:
            short = {performance.limit if performance.limit != "load" else _bottleneck(found)}
        if short & DECODING:
            rest = rest.with_replicas(rest.layout.replicas + 1)
        else:
            first = first.with_replicas(first.layout.replicas + 1)
    return best


def _bottleneck(pools: PoolPlan) -> str:
    performance = pools.found.prediction.performance
    return "kv" if performance and performance.kv_usage > 0.5 else "compute"


def _judged(scenario: Scenario, first: Deployment, rest: Deployment, load: Workload) -> PoolPlan | None:
    """Both pools under `load`, requests let through one by one; None where they cannot serve it."""
    try:
        prediction = evaluate_disaggregated(first, rest, load, scenario.prices)
    except PlannerError:
        return None
    if prediction.performance is None or math.isnan(prediction.performance.request_tps.mid):
        return None
    return PoolPlan(first, rest, against(scenario, prediction))
