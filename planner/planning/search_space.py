"""Enumerate the legal deployments of a scenario, and bound the replicas of each in closed form."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

from planner.core.errors import PlannerError
from planner.core.progress import show_step
from planner.engines.deployment import Deployment
from planner.engines.layout import ParallelLayout
from planner.engines.speculation_methods import explain_unsupported_pipeline
from planner.hardware.prices import look_up_gpu_price
from planner.memory.memory_plan import get_default_memory_utilization, get_memory_plan
from planner.models.registry import Model, load_model
from planner.parallelism.layouts import explain_illegal_layout, list_legal_layouts
from planner.parallelism.start_gate import explain_refused_model
from planner.planning.candidate import Candidate, describe_deployment, mark_as_tuned
from planner.planning.deployment_builder import build_deployment
from planner.planning.engine_tuning import generate_variants
from planner.planning.evaluation import evaluate_candidates, may_be_feasible
from planner.planning.scenario import CandidateGpu, Scenario


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


@dataclass
class Family:
    """One way to run a replica: GPU, engine, formats, drafts and layout, in any number of replicas.

    `start` has the arguments that the closed form likes best, `other_start` those that come next;
    `refuted` is what replay has ruled out.
    """

    start: Deployment  # one replica
    other_start: Deployment | None
    max_replicas: int
    preference_key: tuple[int, ...]
    estimate: Candidate  # in closed form, in as many replicas as it then takes
    min_replicas: int  # fewer are too few, however far the closed form errs
    refuted: dict[int, float] = field(default_factory=dict)  # replicas: the least tolerance

    def get_min_replicas(self, z: float) -> int:
        """The fewest replicas that replay has not refuted at a tolerance of `z`."""
        known = [replicas for replicas, least in self.refuted.items() if least <= z + 1e-9]
        return max([self.min_replicas, *(replicas + 1 for replicas in known)])

    def price(self, scenario: Scenario, replicas: int) -> tuple[bool, float]:
        """What so many replicas cost, as `Candidate.price_key` has it."""
        deployment = self.start.with_replicas(replicas)
        price = look_up_gpu_price(deployment.gpu, scenario.prices)
        gpus = deployment.num_gpus_billed
        return (price is None, float(gpus) if price is None else price.median_usd * gpus)


@show_step("estimating layouts")
def build_families(
    scenario: Scenario, layout_filter: LayoutFilter, *, in_full: bool = False
) -> tuple[list[Family], list[RejectedOption]]:
    """Build every legal family whose layout the filter lets through, and list what is none.

    `in_full`, each is looked at in the most replicas alone: what it serves is asked, not what it costs.
    """
    usual: list[SearchOption] = []
    rejected: list[RejectedOption] = []
    for option in generate_search_options(scenario, layout_filter):
        if isinstance(option, RejectedOption):
            rejected.append(option)
            continue
        deployment, most, preference = option
        memory = get_memory_plan(deployment)
        if memory.can_start:
            usual.append(option)
        elif larger := next(generate_variants(scenario, deployment), None):
            usual.append((larger, most, mark_as_tuned(preference)))
        else:
            gpus, what = deployment.layout.gpus_per_replica, describe_deployment(deployment)
            rejected.append(
                RejectedOption(what, deployment.gpu.name, gpus, memory.reason, "memory")
            )

    def is_open(candidate: Candidate) -> bool:
        return may_be_feasible(scenario, candidate) or _lacks_power(candidate)

    def is_enough(candidate: Candidate) -> bool:
        return candidate.is_feasible and not candidate.at_risk

    evaluated: dict[tuple[Deployment, tuple[int, ...]], Candidate] = {}
    in_full &= scenario.power_at_most is None  # which more replicas break the more
    find_min_replicas = partial(_find_min_replicas, scenario, evaluated, in_full)
    fewest = find_min_replicas(usual, is_open)
    enough = dict(
        zip(map(_get_option_key, usual), find_min_replicas(usual, is_enough), strict=True)
    )
    # with other arguments only what may still cost less than what does with its usual ones
    known = min((c.cost_key for c in enough.values() if is_enough(c)), default=(True, math.inf))
    tuned = [
        (variant, most, mark_as_tuned(preference))
        for candidate, (deployment, most, preference) in zip(fewest, usual, strict=True)
        if not is_open(candidate) or candidate.cost_key <= known
        for variant in generate_variants(scenario, deployment)
    ]
    options = [*usual, *tuned]
    fewest += find_min_replicas(tuned, is_open)
    ranked: dict[object, list[tuple[tuple[object, ...], int, Candidate, SearchOption]]] = {}
    for k, (candidate, option) in enumerate(zip(fewest, options, strict=True)):
        if not is_open(candidate):
            candidate = replace(candidate, limit_utilization=math.inf)
        deployment = option[0]
        raised = deployment.args.gpu_memory_utilization > get_default_memory_utilization(deployment)
        key = candidate.family_key, raised and "gpu_memory_utilization" not in scenario.engine_args
        rank: tuple[object, ...] = (
            candidate.limit_utilization == math.inf,
            candidate.p_memory < scenario.confidence,
            candidate.price_key,
            candidate.limit_utilization,
        )
        ranked.setdefault(key, []).append((rank, k, candidate, option))
    best = [sorted(each)[:2] for each in ranked.values()]
    others = [first[-1] for first, *_ in best if _get_option_key(first[-1]) not in enough]
    found = find_min_replicas(others, is_enough)
    enough |= zip(map(_get_option_key, others), found, strict=True)
    families = []
    for (*_, least, option), *second in best:
        deployment, most, preference = option
        is_open_at_all = math.isfinite(least.limit_utilization)
        families.append(
            Family(
                deployment.with_replicas(1),
                second[0][-1][0].with_replicas(1) if second else None,
                most,
                preference,
                enough[_get_option_key(option)],
                least.deployment.layout.replicas if is_open_at_all else most + 1,
            )
        )
    return families, rejected


def estimate_fewest(
    scenario: Scenario, families: list[Family], probability: float
) -> list[Candidate]:
    """Estimate each family in the fewest replicas that meet the targets with `probability`, or in all."""
    options = [(family.start, family.max_replicas, family.preference_key) for family in families]

    def is_enough(candidate: Candidate) -> bool:
        return candidate.is_feasible and candidate.probability >= probability

    return _find_min_replicas(scenario, {}, False, options, is_enough)


def _get_option_key(option: SearchOption) -> tuple[Deployment, tuple[int, ...]]:
    deployment, _, preference = option
    return deployment, preference


def _lacks_power(candidate: Candidate) -> bool:
    """Tell whether all it misses is a power limit, which more replicas break the more."""
    return {*candidate.violated_constraints} == {"power"}


def generate_search_options(
    scenario: Scenario, layout_filter: LayoutFilter
) -> Iterator[SearchOption | RejectedOption]:
    """Every combination of GPU, formats, speculation and layout that the scenario allows and the engine accepts.

    What two formats make the same, such as "fp8" of an FP8 checkpoint, comes once.
    """
    seen: set[Deployment] = set()
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
        if reason := explain_refused_model(model, gpu, engine):
            if layout_filter(candidate_gpu, ParallelLayout()):
                what = str(engine) + (f", {quantization}" if quantization else "")
                yield RejectedOption(what, gpu.name, 1, reason, "engine")
            continue
        layouts = list_legal_layouts(
            model, gpu, candidate_gpu.max_gpus, candidate_gpu.max_machine_gpus, engine
        )
        settled = scenario.layout.items()
        shapes = [shape for shape in layouts if all(getattr(shape, k) == v for k, v in settled)]
        if settled and not shapes:
            yield from _explain_fixed_layout(under, candidate_gpu, model)
        kinds = product(
            [shape for shape in shapes if layout_filter(candidate_gpu, shape)],
            enumerate(scenario.kv_cache_dtypes),
            enumerate(speculations),
        )
        for layout, (k, kv_cache_dtype), (s, speculation) in kinds:
            what = f"{layout}, {quantization or 'checkpoint'}"
            if (
                speculation
                and layout.pp > 1
                and (reason := explain_unsupported_pipeline(speculation.method, engine))
            ):
                yield RejectedOption(what, gpu.name, layout.num_gpus, reason, "engine")
                continue
            try:
                deployment = build_deployment(
                    under, candidate_gpu, model, layout, kv_cache_dtype, speculation
                )
            except PlannerError as error:
                yield RejectedOption(what, gpu.name, layout.num_gpus, str(error), "engine")
                continue
            if deployment in seen:
                continue
            seen.add(deployment)
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


def _explain_fixed_layout(
    scenario: Scenario, candidate_gpu: CandidateGpu, model: Model
) -> Iterator[RejectedOption]:
    """Yield why the layout that the scenario fixes is not legal, if the engine refuses it."""
    with suppress(PlannerError):  # sizes that contradict each other
        layout = ParallelLayout(**scenario.layout)
        node = candidate_gpu.max_machine_gpus
        if reason := explain_illegal_layout(model, layout, node, scenario.engine):
            gpu = candidate_gpu.gpu.name
            yield RejectedOption(str(layout), gpu, layout.num_gpus, reason, "engine")


def _count_gpus_billed(deployment: Deployment, replicas: int) -> int:
    return deployment.with_replicas(replicas).num_gpus_billed


def _find_min_replicas(
    scenario: Scenario, evaluated: dict[tuple[Deployment, tuple[int, ...]], Candidate],
    in_full: bool,
    options: list[SearchOption], is_enough: Callable[[Candidate], bool],
) -> list[Candidate]:  # fmt: skip
    """Each option with the fewest replicas that are enough, or with all there may be where none are.

    All options are halved at once, so that every round is one evaluation of many. What was
    `evaluated` for another question is not again.
    """

    def evaluate_all(replicas: dict[int, int]) -> dict[int, Candidate]:
        keys = {
            k: (options[k][0].with_replicas(count), options[k][2]) for k, count in replicas.items()
        }
        new = [key for key in dict.fromkeys(keys.values()) if key not in evaluated]
        asked = [(deployment, deployment.layout.replicas, what) for deployment, what in new]
        evaluated.update(zip(new, evaluate_candidates(scenario, asked), strict=True))
        return {k: evaluated[key] for k, key in keys.items()}

    high = {k: most for k, (_, most, _) in enumerate(options)}
    best = evaluate_all(high)
    low = dict.fromkeys(high, 0)
    halved = [k for k in best if not in_full and high[k] > 1 and is_enough(best[k])]
    pending = {k: (low[k] + high[k]) // 2 for k in halved}
    while pending:
        for k, candidate in evaluate_all(pending).items():
            if is_enough(candidate):
                high[k], best[k] = pending[k], candidate
            else:
                low[k] = pending[k]
        pending = {k: (low[k] + high[k]) // 2 for k in pending if high[k] - low[k] > 1}
    return list(best.values())


def fit_to_budget(
    scenario: Scenario, max_price: tuple[bool, float], candidates: Iterable[Candidate]
) -> list[Candidate]:
    """Each of `candidates` in as many replicas as cost up to `most` (as `Candidate.price` has it), but dearer ones."""
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
