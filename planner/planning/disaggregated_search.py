"""Pools of prefill and of decode workers as candidates for a scenario that allows them (`pools: true`).

A pool is a deployment whose replicas are its workers; two of them and the link between make a
candidate. Of each pair of worker shapes as many workers are taken as keep every promise at the
pessimistic end too, added where one is short. Their intervals are wide, and they take a router and
a fast link: the search chooses them where they cost less than replicas that do both, and hold even
there.
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
    without = [
        one.engine for one in scenario.split_by_engine if one.engine.facts.kv_handover == "none"
    ]
    if len(without) == len(scenario.split_by_engine):
        return f"no worker of {without[0]} is known to hand its KV cache to another"
    reasons = {
        "work with a deadline has no latency to keep": scenario.offline,
        "what adapters cost in pools was not measured": bool(scenario.workload.adapters),
        "how pools follow a day is not planned": scenario.daily_profile is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def search_pools(scenario: Scenario, max_price: float = math.inf) -> list[Candidate]:
    """Pools from best to worst, each with the workers that it takes; none for more than `dearest` USD (or GPUs)."""
    if explain_skipped_pools(scenario):
        return []
    many = replace(
        scenario.workload, num_prompts=min(scenario.workload.num_requests, SCREENING_REQUESTS)
    )
    looks: list[tuple[Candidate, CandidateGpu]] = []
    for candidate_gpu, first, rest, preference in _generate_worker_shapes(scenario):
        if not _is_hopeless(scenario, first, rest) and (
            look := _add_workers_until_feasible(
                scenario, candidate_gpu, first, rest, preference, many, max_price, quick=True
            )
        ):
            looks.append((look, candidate_gpu))
    looks.sort(key=lambda look: look[0].rank_key)
    candidates: list[Candidate] = []
    while (
        looks
        and len(candidates) < MAX_SIMULATED_POOLS
        and not _ranks_before(candidates, looks[0][0])
    ):
        best, candidate_gpu = looks.pop(0)
        first, rest = best.prediction.pools
        candidates.append(
            _add_workers_until_feasible(
                scenario,
                candidate_gpu,
                first,
                rest,
                best.preference_key,
                scenario.workload,
                max_price,
            )
            or best
        )
        candidates.sort(key=attrgetter("rank_key"))
    return [*candidates, *(look for look, _ in looks if _ranks_before(candidates, look))]


def _ranks_before(candidates: list[Candidate], look: Candidate) -> bool:
    """Whether the best that is stated comes before what is only looked at."""
    return bool(candidates) and candidates[0].rank_key < look.rank_key


def _generate_worker_shapes(
    scenario: Scenario,
) -> Iterator[tuple[CandidateGpu, Deployment, Deployment, tuple[int, ...]]]:
    """One worker of each pool: every tensor and data parallel size inside a node, formats in both alike.

    None of models whose layers keep caches of several kinds, with recurrent states or sliding
    windows: engines hand those over by other rules, and not in every version.
    """
    for (e, under), candidate_gpu, (q, quantization), (k, kv) in product(
        enumerate(scenario.split_by_engine), scenario.gpus, enumerate(scenario.quantizations),
        enumerate(scenario.kv_cache_dtypes),
    ):  # fmt: skip
        if under.engine.facts.kv_handover == "none" or explain_unsupported_gpu(
            candidate_gpu.gpu, under.engine
        ):
            continue
        model, workers = load_model(scenario.model, quantization=quantization), list[Deployment]()
        for layout in list_legal_layouts(
            model,
            candidate_gpu.gpu,
            min(candidate_gpu.max_machine_gpus, candidate_gpu.max_gpus - 1),
            candidate_gpu.max_machine_gpus,
            under.engine,
        ):
            if layout.pp > 1 or any(
                getattr(layout, name) != size for name, size in scenario.layout.items()
            ):
                continue
            with suppress(PlannerError):
                deployment = build_deployment(under, candidate_gpu, model, layout, kv)
                memory = get_memory_plan(deployment)
                workers += (
                    [deployment] if memory.can_start and len(memory.layout.groups) == 1 else []
                )
        pairs = (pair for pair in product(workers, workers) if _can_transfer_kv(*pair))
        yield from ((candidate_gpu, first, rest, (q, k, 0, e, 0)) for first, rest in pairs)


def _can_transfer_kv(prefill: Deployment, decode: Deployment) -> bool:
    """Whether a prefill worker like `first` can hand its KV cache to a decode worker like `rest`."""
    how, before, after = decode.engine.facts.kv_handover, prefill.layout.tp, decode.layout.tp
    return how == "any" or before == after or (how == "wider" and before < after)


def _is_hopeless(scenario: Scenario, prefill: Deployment, decode: Deployment) -> bool:
    """Whether even a request that is alone in both pools misses a promise."""
    load = replace(
        scenario.workload, rate=None, trace=None, concurrency=1, num_prompts=NUM_ISOLATED_REQUESTS
    )
    with suppress(PlannerError):
        performance = evaluate_disaggregated(prefill, decode, load).performance
        promises = scenario.slo_targets if performance else ()
        return any(
            performance.get(t.metric, t.percentile).mid > ISOLATED_LATENCY_SLACK * t.seconds
            for t in promises
            if performance
        )
    return True


def _add_workers_until_feasible(
    scenario: Scenario, candidate_gpu: CandidateGpu, prefill: Deployment, decode: Deployment,
    preference: tuple[int, ...],
    load: Workload, dearest: float, *, quick: bool = False,
) -> Candidate | None:  # fmt: skip
    """More workers of the pool that is short, until nothing is missed, or too many are needed; the best on the way."""
    best: Candidate | None = None
    for _ in range(MAX_GROWTH_STEPS):
        candidate = evaluate_pools(scenario, prefill, decode, load, preference, quick=quick)
        if (
            candidate is None
            or candidate.prediction.num_gpus_billed > candidate_gpu.max_gpus
            or candidate.cost_key[1] > dearest
        ):
            break
        best = candidate if best is None or candidate.rank_key < best.rank_key else best
        if (candidate.is_feasible and not candidate.at_risk) or UNFIXABLE_CONSTRAINTS & {
            *candidate.violated_constraints
        }:
            break
        more = max(candidate.capacity_utilization - 1, 0.0)
        wider, longer = (pool.with_replicas(math.ceil(pool.layout.replicas * (1 + more)) + (more == 0))
                         for pool in (prefill, decode))  # fmt: skip
        if _needs_decode_workers(scenario, candidate, wider, longer, load):
            decode = longer
        else:
            prefill = wider
    return best


def _needs_decode_workers(
    scenario: Scenario, candidate: Candidate, wider: Deployment, longer: Deployment, load: Workload
) -> bool:
    """Whether it takes the `longer` decode pool, not the `wider` prefill pool, to mend what `found` misses or risks."""
    said = {
        word.lower()
        for each in candidate.violated_constraints or candidate.risks
        for word in each.split()
    }
    if candidate.capacity_utilization <= 1 and said & {*DECODE_CONSTRAINTS, "ttft"}:
        return bool(said & DECODE_CONSTRAINTS)
    first, rest = candidate.prediction.pools
    tried = [
        evaluate_pools(scenario, *pools, load, candidate.preference_key, quick=True)
        for pools in ((wider, rest), (first, longer))
    ]
    with_first, with_rest = (one.capacity_utilization if one else math.inf for one in tried)
    return with_rest < with_first


def evaluate_pools(
    scenario: Scenario, prefill: Deployment, decode: Deployment, load: Workload,
    preference: tuple[int, ...] = (), *,
    quick: bool = False,
) -> Candidate | None:  # fmt: skip
    """Both pools under `load`, requests let through one by one; None where they cannot serve it."""
    try:
        prediction = evaluate_disaggregated(prefill, decode, load, scenario.prices, quick=quick)
    except PlannerError:
        return None
    if prediction.performance is None or math.isnan(prediction.performance.request_tps.mid):
        return None
    return check_against_slos(scenario, prediction, preference)
