"""Search prefill and decode pools as candidates, if the scenario allows them (`pools: true`).

A pool is a deployment whose replicas are its workers; two of them and the link between them make a
candidate. For each pair of worker shapes, workers are added to the pool that is short until every
SLO is met at the pessimistic end too. Intervals of pools are wide, and pools need a router and a
fast link, so that the search chooses them only if they cost less than replicas that do both and
meet the SLOs even at the pessimistic end.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from operator import attrgetter

from planner.core.errors import PlannerError
from planner.core.progress import advance, is_out_of_time, show_step
from planner.engines.deployment import Deployment
from planner.memory.memory_plan import get_memory_plan
from planner.parallelism.layouts import list_legal_layouts
from planner.parallelism.start_gate import explain_refused_model
from planner.planning.candidate import Candidate
from planner.planning.deployment_builder import build_deployment, load_format
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.evaluation import check_against_slos
from planner.planning.plan import SAFE_PROBABILITY, Plan
from planner.planning.scenario import CandidateGpu, Scenario
from planner.workload.workload import Workload

MAX_POOL_COST_FACTOR = 2.0
"""Pools that cost more than so many times the plan without them are of no interest."""
SCREENING_REQUESTS = 2_000
"""Requests of a screening; a final simulation has all of a run."""
NUM_ISOLATED_REQUESTS, ISOLATED_LATENCY_SLACK = 200, 1.1
"""Requests one at a time, and the factor by which they may exceed an SLO. More workers only shorten
queues and batches."""
MAX_GROWTH_STEPS = 8
"""Largest number of times that workers are added."""
MAX_SIMULATED_POOLS = 6
"""Largest number of pools that are simulated in full."""


def explain_skipped_pools(scenario: Scenario) -> str:
    """Explain why pools are not searched; "" if they are."""
    engines = [each.engine for each in scenario.split_by_engine]
    if all(engine.facts.kv_handover == "none" for engine in engines):
        return f"{engines[0]} is not known to transfer KV cache between workers"
    reasons = {
        "a batch job has no latency target": scenario.offline,
        "the cost of LoRA adapters in pools is not measured": bool(scenario.workload.adapters),
        "their probability is not computed for traffic that is a range": bool(scenario.load_sigma),
        "scaling pools over a day is not supported": scenario.daily_profile is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


@show_step("simulating pools")
def search_pools(scenario: Scenario, max_price: float = math.inf) -> list[Candidate]:
    """Search pools, from best to worst, that cost up to `max_price` USD per hour (or GPUs)."""
    if explain_skipped_pools(scenario):
        return []
    screening = replace(
        scenario.workload, num_prompts=min(scenario.workload.num_requests, SCREENING_REQUESTS)
    )
    screened: list[tuple[Candidate, CandidateGpu]] = []
    for candidate_gpu, prefill, decode, preference in _generate_worker_shapes(scenario):
        advance()
        if is_out_of_time():
            break
        if not _is_hopeless(scenario, prefill, decode) and (
            candidate := _add_workers_until_feasible(
                scenario, candidate_gpu, prefill, decode, preference, screening, max_price,
                quick=True,
            )
        ):  # fmt: skip
            screened.append((candidate, candidate_gpu))
    screened.sort(key=lambda case: case[0].rank_key)
    candidates: list[Candidate] = []
    for best, candidate_gpu in screened[:MAX_SIMULATED_POOLS]:
        if candidates and candidates[0].rank_key < best.rank_key:
            break
        prefill, decode = best.prediction.pools
        simulated = _add_workers_until_feasible(
            scenario, candidate_gpu, prefill, decode, best.preference_key, scenario.workload,
            max_price,
        )  # fmt: skip
        candidates = sorted([*candidates, simulated or best], key=attrgetter("rank_key"))
    others = (each for each, _ in screened[len(candidates) :])
    return [*candidates, *(each for each in others if candidates[0].rank_key < each.rank_key)]


def _generate_worker_shapes(
    scenario: Scenario,
) -> Iterator[tuple[CandidateGpu, Deployment, Deployment, tuple[int, ...]]]:
    """Yield pairs of one worker of each pool, of every TP and DP in a machine, formats alike.

    Models with caches of several kinds (recurrent states, sliding windows) have none: engines
    transfer those by other rules, and not in every version.
    """
    for (e, variant), candidate_gpu, (q, quantization), (k, kv) in product(
        enumerate(scenario.split_by_engine), scenario.gpus, enumerate(scenario.quantizations),
        enumerate(scenario.kv_cache_dtypes),
    ):  # fmt: skip
        model, workers = load_format(scenario.model, quantization), list[Deployment]()
        if variant.engine.facts.kv_handover == "none" or explain_refused_model(
            model, candidate_gpu.gpu, variant.engine
        ):
            continue
        for layout in list_legal_layouts(
            model,
            candidate_gpu.gpu,
            min(candidate_gpu.max_machine_gpus, candidate_gpu.max_gpus - 1),
            candidate_gpu.max_machine_gpus,
            variant.engine,
        ):
            if layout.pp > 1 or any(
                getattr(layout, name) != size for name, size in scenario.layout.items()
            ):
                continue
            with suppress(PlannerError):
                deployment = build_deployment(variant, candidate_gpu, model, layout, kv)
                memory = get_memory_plan(deployment)
                if memory.can_start and len(memory.layout.groups) == 1:
                    workers.append(deployment)
        transfer = variant.engine.facts.kv_handover
        for prefill, decode in product(workers, workers):
            narrow, wide = prefill.layout.tp, decode.layout.tp
            if transfer == "any" or narrow == wide or (transfer == "wider" and narrow < wide):
                yield candidate_gpu, prefill, decode, (q, k, 0, e, 0)


def _is_hopeless(scenario: Scenario, prefill: Deployment, decode: Deployment) -> bool:
    """Return whether even a request that is alone in both pools violates an SLO."""
    load = replace(
        scenario.workload, rate=None, trace=None, concurrency=1, num_prompts=NUM_ISOLATED_REQUESTS
    )
    with suppress(PlannerError):
        performance = evaluate_disaggregated(prefill, decode, load).performance
        return performance is not None and any(
            performance.get(t.metric, t.percentile).mid > ISOLATED_LATENCY_SLACK * t.seconds
            for t in scenario.slo_targets
        )
    return True


def _add_workers_until_feasible(
    scenario: Scenario, candidate_gpu: CandidateGpu, prefill: Deployment, decode: Deployment,
    preference: tuple[int, ...],
    load: Workload, max_price: float, *, quick: bool = False,
) -> Candidate | None:  # fmt: skip
    """Add workers to the pool that is short until every SLO is met; return the best candidate.

    None if the first one cannot serve the load, or exceeds `max_price` or the GPUs.
    """
    best: Candidate | None = None
    for _ in range(MAX_GROWTH_STEPS):
        candidate = evaluate_pools(scenario, prefill, decode, load, preference, quick=quick)
        if (
            candidate is None
            or candidate.prediction.num_gpus_billed > candidate_gpu.max_gpus
            or candidate.cost_key[1] > max_price
        ):
            break
        best = candidate if best is None or candidate.rank_key < best.rank_key else best
        if candidate.is_confident or "max_model_len" in candidate.violated_constraints:
            break
        overload = max(candidate.capacity_utilization - 1, 0.0)
        more_prefill, more_decode = (
            pool.with_replicas(math.ceil(pool.layout.replicas * (1 + overload)) + (overload == 0))
            for pool in (prefill, decode)
        )
        pairs = (more_prefill, decode), (prefill, more_decode)
        tried = [evaluate_pools(scenario, *pair, load, preference, quick=True) for pair in pairs]
        nearness = [(each.nearness_key, k) for k, each in enumerate(tried) if each]
        if not nearness:
            break
        prefill, decode = pairs[min(nearness)[1]]
    return best


def evaluate_pools(
    scenario: Scenario, prefill: Deployment, decode: Deployment, load: Workload,
    preference: tuple[int, ...] = (), *,
    quick: bool = False,
) -> Candidate | None:  # fmt: skip
    """Evaluate both pools under `load`, request by request; None if they cannot serve it."""
    try:
        prediction = evaluate_disaggregated(prefill, decode, load, scenario.prices, quick=quick)
    except PlannerError:
        return None
    if prediction.performance is None or math.isnan(prediction.performance.request_tps.mid):
        return None
    return check_against_slos(scenario, prediction, preference)


def add_pools(whole: Plan) -> Plan:
    """`whole` with pools among its candidates; the plan is theirs where the rule says so."""
    scenario, today = whole.scenario, whole.chosen
    if reason := explain_skipped_pools(scenario):
        return replace(
            whole, notes=(*whole.notes, f"pools are not evaluated: {reason}"), without_pools=whole
        )
    pools = search_pools(scenario, _get_max_pool_cost(today))
    best = next((pool for pool in pools if pool.is_feasible), None)
    is_cheaper = best is not None and (today is None or best.rank_key < today.rank_key)
    first, together = best if is_cheaper else today, [*whole.candidates, *pools]
    if first:
        together.sort(
            key=lambda one: (
                one is not first, not (one.is_feasible and one.is_simulated), one.rank_key,
            )
        )  # fmt: skip
    plan = replace(whole, candidates=tuple(together), without_pools=whole)
    if best is None:
        return plan
    if is_cheaper:
        binding = whole.binding_constraint
        notes = tuple(dict.fromkeys((*whole.notes, *best.prediction.warnings)))
        return replace(
            plan,
            chosen=best,
            runner_up=today,
            binding_constraint=binding,
            notes=notes,
        )
    safer = best.probability >= SAFE_PROBABILITY and (
        whole.safe is None or best.cost_key < whole.safe.cost_key
    )
    return replace(plan, safe=best) if safer else plan


def _get_max_pool_cost(unified: Candidate | None) -> float:
    """Get what pools may cost beside the plan without them."""
    if unified is None or unified.cost_key[0]:
        return math.inf
    return MAX_POOL_COST_FACTOR * unified.cost_key[1]
