"""Enumerate the legal deployments of a scenario, and bound the replicas of each in closed form."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from planner.core.errors import PlannerError
from planner.core.progress import show_step
from planner.engines.deployment import Deployment
from planner.engines.layout import ParallelLayout
from planner.engines.speculation_methods import explain_unsupported_pipeline
from planner.hardware.prices import look_up_gpu_price
from planner.memory.memory_plan import get_memory_plan
from planner.models.registry import Model
from planner.parallelism.layouts import explain_illegal_layout, list_legal_layouts
from planner.parallelism.start_gate import explain_refused_model
from planner.planning.candidate import (
    Candidate,
    describe_deployment,
    get_stages_factor,
    mark_as_tuned,
)
from planner.planning.deployment_builder import build_deployment, load_format
from planner.planning.engine_tuning import generate_roomier, generate_startable
from planner.planning.evaluation import evaluate_candidates
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


def fits_in_machine(candidate_gpu: CandidateGpu, layout: ParallelLayout) -> bool:
    """Let one replica in a machine through."""
    return layout.num_gpus <= candidate_gpu.max_machine_gpus


def spans_machines(candidate_gpu: CandidateGpu, layout: ParallelLayout) -> bool:
    """Let one replica over several machines through."""
    return not fits_in_machine(candidate_gpu, layout)


@dataclass
class Family:
    """One way to run a replica: GPU, engine, formats, drafts and layout, in any number of replicas.

    `start` has the engine's own arguments, as far as they start; `refuted` is what replay has ruled out.
    """

    start: Deployment  # one replica
    max_replicas: int
    preference_key: tuple[int, ...]
    most: Candidate  # all replicas that there may be, in closed form
    refuted: dict[int, float] = field(default_factory=dict)  # replicas: the least tolerance

    @property
    def key(self) -> tuple[object, ...]:
        """What it is, as `Candidate.family_key` has it."""
        return self.most.family_key

    def get_min_replicas(self, z: float) -> int:
        """The fewest replicas that replay has not refuted at a tolerance of `z`."""
        known = [replicas for replicas, least in self.refuted.items() if least <= z + 1e-9]
        return max(known, default=0) + 1

    def price(self, scenario: Scenario, replicas: int) -> tuple[bool, float]:
        """What so many replicas cost, as `Candidate.price_key` has it."""
        deployment = self.start.with_replicas(replicas)
        price = look_up_gpu_price(deployment.gpu, scenario.prices)
        gpus = deployment.num_gpus_billed
        return (price is None, float(gpus) if price is None else price.median_usd * gpus)

    def rank_price(self, scenario: Scenario, replicas: int) -> tuple[bool, float]:
        """That price as `Candidate.rank_cost` has it."""
        unpriced, price = self.price(scenario, replicas)
        return unpriced, price * get_stages_factor([self.start])

    def count_affordable(self, scenario: Scenario, max_price: tuple[bool, float]) -> int:
        """Count the replicas that rank at most at `max_price`."""
        counts = range(1, self.max_replicas + 1)
        return bisect_right(counts, max_price, key=partial(self.rank_price, scenario))


@show_step("estimating layouts")
def build_families(
    scenario: Scenario, layout_filter: LayoutFilter
) -> tuple[list[Family], list[RejectedOption]]:
    """Build every legal family whose layout the filter lets through, and list what is none."""
    options: list[SearchOption] = []
    rejected: list[RejectedOption] = []
    for option in generate_search_options(scenario, layout_filter):
        if isinstance(option, RejectedOption):
            rejected.append(option)
            continue
        deployment, most, preference = option
        if started := next(generate_startable(scenario, deployment), None):
            kept = preference if started == deployment else mark_as_tuned(preference)
            options.append((started, most, kept))
            options += [
                (roomier, most, mark_as_tuned(preference))
                for roomier in generate_roomier(scenario, started)
            ]
        else:
            gpus, what = deployment.layout.gpus_per_replica, describe_deployment(deployment)
            reason = get_memory_plan(deployment).reason
            rejected.append(RejectedOption(what, deployment.gpu.name, gpus, reason, "memory"))
    families = [
        Family(deployment.with_replicas(1), most, preference, candidate)
        for candidate, (deployment, most, preference) in zip(
            evaluate_candidates(scenario, options), options, strict=True
        )
    ]
    return families, rejected


def estimate_fewest(
    scenario: Scenario, families: list[Family], is_enough: Callable[[Candidate], bool]
) -> list[Candidate]:
    """Estimate each family in the fewest replicas that are enough, or in all there may be where none are.

    All are halved at once, so that every round is one evaluation of many.
    """
    high = [family.max_replicas for family in families]
    best, low = [family.most for family in families], [0] * len(families)
    pending = [k for k, candidate in enumerate(best) if is_enough(candidate)]
    while pending := [k for k in pending if high[k] - low[k] > 1]:
        counts = {k: (low[k] + high[k]) // 2 for k in pending}
        asked = [(families[k].start, n, families[k].preference_key) for k, n in counts.items()]
        found = zip(counts.items(), evaluate_candidates(scenario, asked), strict=True)
        for (k, count), candidate in found:
            if is_enough(candidate):
                high[k], best[k] = count, candidate
            else:
                low[k] = count
    return best


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
            load_format(scenario.model, quantization),
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
