"""Every legal deployment that a scenario allows, in as many replicas as it takes, evaluated in closed form."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import attrgetter

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment, ParallelLayout
from planner.engines.engine import explain_unsupported_gpu
from planner.memory.memory_plan import get_memory_plan
from planner.models.registry import load_model
from planner.parallelism.layouts import list_legal_layouts
from planner.planning.candidate import Candidate, describe_deployment, mark_as_tuned
from planner.planning.deployment_builder import build_deployment
from planner.planning.engine_tuning import SCREENING_TOKENS_VALUES, generate_variants
from planner.planning.evaluation import compute_offered_rps, evaluate_candidates, get_capacity_rps
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.verification import may_be_feasible

MAX_TUNING_GAIN = 1.3
"""Other engine arguments serve so many times as many requests, at most."""


@dataclass(frozen=True)
class RejectedOption:
    """A layout that was not evaluated, and why; `bottleneck` is "memory", "engine" or "stock"."""

    description: str
    gpu: str
    gpus: int  # of one replica
    reason: str
    bottleneck: str


LayoutFilter = Callable[[CandidateGpu, ParallelLayout], bool]
SearchOption = tuple[Deployment, int, tuple[int, ...]]
"""One replica of a legal deployment, how many there may be, and its `preference`."""


def evaluate_search_space(
    scenario: Scenario, layout_filter: LayoutFilter
) -> tuple[list[Candidate], list[RejectedOption]]:
    """Every legal candidate whose layout the filter lets through, in closed form, and those that are rejected."""
    cases, rejected = [], []
    for option in generate_search_options(scenario, layout_filter):
        if isinstance(option, RejectedOption):
            rejected.append(option)
            continue
        deployment, most, preference = option
        if (memory := get_memory_plan(deployment)).can_start:
            cases.append(option)
        elif (larger := next(generate_variants(scenario, deployment), None)) is not None:
            cases.append((larger, most, mark_as_tuned(preference)))
        else:
            gpus = deployment.layout.gpus_per_replica
            rejected.append(
                RejectedOption(
                    describe_deployment(deployment),
                    deployment.gpu.name,
                    gpus,
                    memory.reason,
                    "memory",
                )
            )
    usual = _find_min_replicas(scenario, cases)
    return [*usual, *_evaluate_tuned_options(scenario, cases, usual)], rejected


def generate_search_options(
    scenario: Scenario, layout_filter: LayoutFilter
) -> Iterator[SearchOption | RejectedOption]:
    """Every combination of GPU, formats, speculation and layout that the scenario allows and the engine accepts."""
    speculation_entry = scenario.speculation
    speculations = (
        [None, speculation_entry.to_config()]
        if speculation_entry and speculation_entry.allowed
        else [None]
    )
    for (e, under), candidate_gpu, (q, quantization) in product(
        enumerate(scenario.split_by_engine), scenario.gpus, enumerate(scenario.quantizations)
    ):
        gpu, model, engine = (
            candidate_gpu.gpu,
            load_model(scenario.model, quantization=quantization),
            under.engine,
        )
        if reason := explain_unsupported_gpu(gpu, engine):
            if q == 0 and layout_filter(candidate_gpu, ParallelLayout()):
                yield RejectedOption(str(engine), gpu.name, 1, reason, "engine")
            continue
        layouts = list_legal_layouts(
            model, gpu, candidate_gpu.max_gpus, candidate_gpu.max_machine_gpus, engine
        )
        settled = scenario.layout.items()
        kinds = product(
            [
                shape
                for shape in layouts
                if layout_filter(candidate_gpu, shape)
                and all(getattr(shape, k) == v for k, v in settled)
            ],
            enumerate(scenario.kv_cache_dtypes),
            enumerate(speculations),
        )
        for layout, (k, kv_cache_dtype), (s, speculation) in kinds:
            what = f"{layout}, {quantization or 'checkpoint'}"
            try:
                deployment = build_deployment(
                    under, candidate_gpu, model, layout, kv_cache_dtype, speculation
                )
            except PlannerError as error:
                yield RejectedOption(what, gpu.name, layout.num_gpus, str(error), "engine")
                continue
            rented = partial(_count_gpus_billed, deployment)
            if most := bisect_right(
                range(1, candidate_gpu.max_gpus // layout.num_gpus + 1),
                candidate_gpu.max_gpus,
                key=rented,
            ):
                yield deployment, most, (q, k, s, e, 0)
                continue
            beside = (
                f" and {deployment.spare_replicas} to spare" if deployment.spare_replicas else ""
            )
            reason = (
                f"one replica{beside} takes {rented(1)} GPUs to rent, of at most"
                f" {candidate_gpu.max_gpus}"
            )
            reason += (
                "; a machine of your own: sold_in: [1]"
                if candidate_gpu.max_gpus < rented(1) > layout.num_gpus
                else ""
            )
            yield RejectedOption(
                describe_deployment(deployment), gpu.name, layout.num_gpus, reason, "stock"
            )


def _count_gpus_billed(deployment: Deployment, replicas: int) -> int:
    return deployment.with_replicas(replicas).num_gpus_billed


def _find_min_replicas(scenario: Scenario, cases: list[SearchOption]) -> list[Candidate]:
    """Each option with the fewest replicas that meet the service level, or with all there may be where none do.

    All options are halved at once, so that every round is one evaluation of many.
    """

    def tried(replicas: dict[int, int]) -> dict[int, Candidate]:
        asked = [(cases[k][0], count, cases[k][2]) for k, count in replicas.items()]
        return dict(zip(replicas, evaluate_candidates(scenario, asked), strict=True))

    high = {k: most for k, (_, most, _) in enumerate(cases)}
    best = tried(high)
    low = {k: _count_insufficient_replicas(scenario, candidate) for k, candidate in best.items()}

    def enough(
        found: Candidate,
    ) -> bool:  # of more replicas, which do not mend a power limit, but break it
        return {*found.violated_constraints} <= {"power"}

    looked_at = {
        k: low[k] + 1 for k in best if enough(best[k]) and high[k] - low[k] > 1
    }  # mostly enough
    while middle := looked_at:
        for k, found in tried(middle).items():
            if enough(found):
                high[k], best[k] = middle[k], found
            else:
                low[k] = middle[k]
        looked_at = {k: (low[k] + high[k]) // 2 for k in middle if high[k] - low[k] > 1}
    return list(best.values())


def _count_insufficient_replicas(scenario: Scenario, candidate: Candidate) -> int:
    """Replicas of `candidate` that the load is too much for, whatever is promised: capacity grows with their number."""
    load = scenario.workload
    if (
        load.rate is None
        or load.trace
        or scenario.offline
        or not math.isfinite(candidate.capacity_utilization)
    ):
        return 0
    replicas = candidate.deployment.layout.replicas
    return min(math.ceil(candidate.capacity_utilization * replicas * (1 - 1e-9)), replicas) - 1


def _evaluate_tuned_options(
    scenario: Scenario, cases: list[SearchOption], usual: list[Candidate]
) -> list[Candidate]:
    """The same with other engine arguments, where those may do for less or at less risk: of each size the best."""
    least = min(
        (candidate.cost_key for candidate in usual if candidate.is_feasible),
        default=(True, math.inf),
    )
    tried = [
        (changed, most, mark_as_tuned(preference))
        for (deployment, most, preference), found in zip(cases, usual, strict=True)
        if _compute_min_cost(scenario, found) <= (least[0], least[1] * (1 + 1e-9))
        for changed in generate_variants(
            scenario, deployment, SCREENING_TOKENS_VALUES, is_underused=found.is_underused
        )
    ]

    def hope(found: Candidate) -> tuple[object, ...]:  # what only comes near may hold in the replay
        return not may_be_feasible(scenario, found), *found.rank_key[:3]

    known, better = {found.placement_key: hope(found) for found in usual}, dict[object, Candidate]()
    for found in sorted(_find_min_replicas(scenario, tried), key=attrgetter("rank_key")):
        if found.placement_key not in known or hope(found) < known[found.placement_key]:
            better.setdefault(found.placement_key, found)
    return list(better.values())


def _compute_min_cost(scenario: Scenario, candidate: Candidate) -> tuple[bool, float]:
    """What as many of its replicas cost as the load asks for by itself, whatever the engine's arguments."""
    unpriced, cost = candidate.cost_key
    replicas, performance, needed = (
        candidate.deployment.layout.replicas,
        candidate.prediction.performance,
        1,
    )
    if (
        scenario.workload.rate is not None
        and performance
        and (most := get_capacity_rps(scenario, performance))
    ):
        asked = (
            compute_offered_rps(scenario, candidate.prediction)
            / (1 - scenario.headroom)
            / MAX_TUNING_GAIN
        )
        needed = min(max(math.ceil(asked * replicas / most.mid), 1), replicas)
    return unpriced, cost / candidate.deployment.num_gpus_billed * _count_gpus_billed(
        candidate.deployment, needed
    )


def fit_to_budget(
    scenario: Scenario, max_price: tuple[bool, float], candidates: Iterable[Candidate]
) -> list[Candidate]:
    """Fit each of `candidates` to a price, as `Candidate.price_key` has it, by fewer replicas."""
    same, fewer = [], []
    for candidate in candidates:
        replicas, (unpriced, cost) = candidate.deployment.layout.replicas, candidate.price_key
        gpus = math.floor(max_price[1] / cost * candidate.deployment.num_gpus_billed + 1e-9)
        affordable = bisect_right(
            range(1, replicas + 1), gpus, key=partial(_count_gpus_billed, candidate.deployment)
        )
        if unpriced == max_price[0] and affordable == replicas and not candidate.is_feasible:
            same.append(candidate)
        elif unpriced == max_price[0] and affordable:
            fewer.append((candidate.deployment, affordable, candidate.preference_key))
    return [*same, *evaluate_candidates(scenario, fewer)]
