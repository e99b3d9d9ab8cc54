"""Pools of prefill and of decode workers as candidates for a scenario that allows them (`pools: true`).

A pool is a deployment whose replicas are its workers; two of them and the link between make a candidate. Of each pair
of worker shapes as many workers are taken as keep every promise at the pessimistic end too, added where one is short.
Their intervals are wide, and they take a router and a fast link: the search chooses them where they cost less than
replicas that do both, and hold even there.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from operator import attrgetter

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.engines.engine import explain_unsupported_gpu
from planner.memory.memory_plan import get_memory_plan
from planner.models.registry import load_model
from planner.parallelism.layouts import list_legal_layouts
from planner.planning.candidate import Candidate
from planner.planning.deployment_builder import build_deployment
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.evaluation import check_against_slos
from planner.planning.scenario import CandidateGpu, Scenario
from planner.workload.workload import Workload

SCREENING_REQUESTS = 2_000
"""Requests of a first look; what is stated has all of a run."""
NUM_ISOLATED_REQUESTS, ISOLATED_LATENCY_SLACK = 200, 1.1
"""Requests, one after the other, that must be so near to each promise: more workers only shorten queues and batches."""
MAX_GROWTH_STEPS = 8
"""Times that workers are added, at most, until every promise is kept."""
MAX_SIMULATED_POOLS = 6
"""Pools that are stated, at most, until no others may come before them."""
DECODE_CONSTRAINTS = {"tpot", "itl", "e2e", "memory"}
"""What is missed for want of decode workers."""
UNFIXABLE_CONSTRAINTS = {"power", "start-up", "max_model_len"}
"""What no further worker mends."""


def explain_skipped_pools(scenario: Scenario) -> str:
    """Why no pools are looked at; "" where they are."""
    without = [one.engine for one in scenario.by_engine if one.engine.facts["kv_handover"] == "none"]
    if len(without) == len(scenario.by_engine):
        return f"no worker of {without[0]} is known to hand its KV cache to another"
    reasons = {
        "work with a deadline has no latency to keep": scenario.offline,
        "what adapters cost in pools was not measured": bool(scenario.workload.adapters),
        "how pools follow a day is not planned": scenario.day is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def search_pools(scenario: Scenario, dearest: float = math.inf) -> list[Candidate]:
    """Pools from best to worst, each with the workers that it takes; none for more than `dearest` USD (or GPUs)."""
    if explain_skipped_pools(scenario):
        return []
    many = replace(scenario.workload, num_prompts=min(scenario.workload.requests, SCREENING_REQUESTS))
    looks: list[tuple[Candidate, CandidateGpu]] = []
    for asked, first, rest, preference in _generate_worker_shapes(scenario):
        if not _is_hopeless(scenario, first, rest) and (
            look := _add_workers_until_feasible(scenario, asked, first, rest, preference, many, dearest, quick=True)
        ):
            looks.append((look, asked))
    looks.sort(key=lambda look: look[0].rank)
    found: list[Candidate] = []
    while looks and len(found) < MAX_SIMULATED_POOLS and not _ranks_before(found, looks[0][0]):
        best, asked = looks.pop(0)
        first, rest = best.prediction.pools
        found.append(
            _add_workers_until_feasible(scenario, asked, first, rest, best.preference, scenario.workload, dearest)
            or best
        )
        found.sort(key=attrgetter("rank"))
    return [*found, *(look for look, _ in looks if _ranks_before(found, look))]


def _ranks_before(found: list[Candidate], look: Candidate) -> bool:
    """Whether the best that is stated comes before what is only looked at."""
    return bool(found) and found[0].rank < look.rank


def _generate_worker_shapes(
    scenario: Scenario,
) -> Iterator[tuple[CandidateGpu, Deployment, Deployment, tuple[int, ...]]]:
    """One worker of each pool: every tensor and data parallel size inside a node, formats in both alike.

    None of models whose layers keep caches of several kinds, with recurrent states or sliding windows: engines hand
    those over by other rules, and not in every version.
    """
    for (e, under), asked, (q, quantization), (k, kv) in product(
        enumerate(scenario.by_engine), scenario.gpus, enumerate(scenario.quantizations),
        enumerate(scenario.kv_cache_dtypes),
    ):  # fmt: skip
        if under.engine.facts["kv_handover"] == "none" or explain_unsupported_gpu(asked.gpu, under.engine):
            continue
        served, workers = load_model(scenario.model, quantization=quantization), list[Deployment]()
        for layout in list_legal_layouts(
            served, asked.gpu, min(asked.node, asked.at_most - 1), asked.node, under.engine
        ):
            if layout.pp > 1 or any(getattr(layout, name) != size for name, size in scenario.layout.items()):
                continue
            with suppress(PlannerError):
                one = build_deployment(under, asked, served, layout, kv)
                memory = get_memory_plan(one)
                workers += [one] if memory.starts and len(memory.layout.groups) == 1 else []
        pairs = (pair for pair in product(workers, workers) if _can_transfer_kv(*pair))
        yield from ((asked, first, rest, (q, k, 0, e, 0)) for first, rest in pairs)


def _can_transfer_kv(first: Deployment, rest: Deployment) -> bool:
    """Whether a prefill worker like `first` can hand its KV cache to a decode worker like `rest`."""
    how, before, after = rest.engine.facts["kv_handover"], first.layout.tp, rest.layout.tp
    return how == "any" or before == after or (how == "wider" and before < after)


def _is_hopeless(scenario: Scenario, first: Deployment, rest: Deployment) -> bool:
    """Whether even a request that is alone in both pools misses a promise."""
    load = replace(scenario.workload, rate=None, trace=None, concurrency=1, num_prompts=NUM_ISOLATED_REQUESTS)
    with suppress(PlannerError):
        found = evaluate_disaggregated(first, rest, load).performance
        promises = scenario.service_level if found else ()
        return any(found.at(t.metric, t.percentile).mid > ISOLATED_LATENCY_SLACK * t.seconds for t in promises if found)
    return True


def _add_workers_until_feasible(
    scenario: Scenario, asked: CandidateGpu, first: Deployment, rest: Deployment, preference: tuple[int, ...],
    load: Workload, dearest: float, *, quick: bool = False,
) -> Candidate | None:  # fmt: skip
    """More workers of the pool that is short, until nothing is missed, or too many are needed; the best on the way."""
    best: Candidate | None = None
    for _ in range(MAX_GROWTH_STEPS):
        found = evaluate_pools(scenario, first, rest, load, preference, quick=quick)
        if found is None or found.prediction.gpus_rented > asked.at_most or found.cost[1] > dearest:
            break
        best = found if best is None or found.rank < best.rank else best
        if (found.meets and not found.at_risk) or UNFIXABLE_CONSTRAINTS & {*found.constraints}:
            break
        more = max(found.share - 1, 0.0)
        wider, longer = (pool.with_replicas(math.ceil(pool.layout.replicas * (1 + more)) + (more == 0))
                         for pool in (first, rest))  # fmt: skip
        if _needs_decode_workers(scenario, found, wider, longer, load):
            rest = longer
        else:
            first = wider
    return best


def _needs_decode_workers(
    scenario: Scenario, found: Candidate, wider: Deployment, longer: Deployment, load: Workload
) -> bool:
    """Whether it takes the `longer` decode pool, not the `wider` prefill pool, to mend what `found` misses or risks."""
    said = {word.lower() for each in found.constraints or found.risks for word in each.split()}
    if found.share <= 1 and said & {*DECODE_CONSTRAINTS, "ttft"}:
        return bool(said & DECODE_CONSTRAINTS)
    first, rest = found.prediction.pools
    tried = [
        evaluate_pools(scenario, *pools, load, found.preference, quick=True)
        for pools in ((wider, rest), (first, longer))
    ]
    with_first, with_rest = (one.share if one else math.inf for one in tried)
    return with_rest < with_first


def evaluate_pools(
    scenario: Scenario, first: Deployment, rest: Deployment, load: Workload, preference: tuple[int, ...] = (), *,
    quick: bool = False,
) -> Candidate | None:  # fmt: skip
    """Both pools under `load`, requests let through one by one; None where they cannot serve it."""
    try:
        prediction = evaluate_disaggregated(first, rest, load, scenario.prices, quick=quick)
    except PlannerError:
        return None
    if prediction.performance is None or math.isnan(prediction.performance.request_tps.mid):
        return None
    return check_against_slos(scenario, prediction, preference)
