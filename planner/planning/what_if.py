"""What-ifs: the same search with one thing changed."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import get_args

from planner.core.errors import PlannerError
from planner.core.progress import is_out_of_time, try_each
from planner.engines.layout import ParallelLayout
from planner.hardware.gpus import get_gpu
from planner.hardware.prices import look_up_gpu_price
from planner.planning.candidate import CLEARLY_LIKELIER, Candidate
from planner.planning.deployment_builder import load_format
from planner.planning.engine_tuning import HOPELESS_MARGIN
from planner.planning.evaluation import may_be_feasible, price_all_hours
from planner.planning.plan import Plan
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.scenario_schema import LayoutSize
from planner.planning.search import find_choice, is_promising, search_deployments
from planner.planning.search_space import Family, build_families

SUGGESTED_GPUS = (
    "L40S",
    "A100-SXM-80GB",
    "H100-SXM",
    "H200-SXM",
    "B200",
    "MI300X",
    "RTX-PRO-6000-Server",
)
"""GPUs that are tried if the scenario does not name them: those that clouds offer most."""
FALLBACK_MAX_GPUS = 64
"""GPUs of a kind that are tried, at least, if nothing is feasible on those allowed."""
MAX_SUGGESTED_GPUS_SEARCHED = 2
"""Suggested GPUs that are searched: those with most analytical capacity for their price."""
CLEARLY_CHEAPER = 0.95
"""Share of the plan's price that something outside the scenario costs at most, or its gain for no more, to be named."""
FAIR_CHANCE = 0.25
"""Probability from which on something cheaper is worth a benchmark."""
TWICE, HALF = "twice the traffic", "half the traffic"
RELAXED = "every latency limit doubled"


@dataclass(frozen=True)
class WhatIf:
    """The plan after one change."""

    change: str
    plan: Plan


search_choice = partial(search_deployments, with_options=False)
"""Search for a choice alone, which is all that a change is asked for."""


def run_what_ifs(
    plan: Plan, search: Callable[[Scenario], Plan] = search_choice
) -> tuple[WhatIf, ...]:
    """Search with every proposed change; if no plan was feasible, return only those that help.

    Changes that time or an interruption leaves out are missing. `search` may be another way to a
    plan, such as a cached search.
    """
    changes = dict(propose_changes(plan))
    tried = try_each(lambda scenario: search_to_end(scenario, search), changes, "what-ifs")
    rows = [WhatIf(change, answer) for change, plans in tried for answer in plans or ()]
    return tuple(what_if for what_if in rows if plan.chosen or what_if.plan.chosen)


def search_to_end(
    scenario: Scenario, search: Callable[[Scenario], Plan] = search_choice
) -> tuple[Plan, ...] | None:
    """Search to the end: the plan, none if the model cannot take a format; None if time ends first."""
    try:
        plan = search(scenario)
    except PlannerError:
        return ()
    return None if plan.left_out else (plan,)


def propose_changes(plan: Plan) -> Iterator[tuple[str, Scenario]]:
    """Yield a description and the changed scenario for each change that could matter to `plan`.

    If there is a plan, changes that can only make it cheaper get its cost as their budget; other
    formats and GPUs are options of its own (`find_unlisted_format`, `find_unlisted_gpu`).
    """
    if (chosen := plan.chosen) is None:
        kinds = {each.gpu for each in plan.scenario.gpus}
        changes = {**dict(_widen(plan.scenario)), **dict(_list_changes(plan.scenario))}
        del changes[TWICE]
        yield from (
            (text, each)
            for text, each in changes.items()
            if kinds.isdisjoint(other.gpu for other in each.gpus)  # which are promising already
            or _select_promising_gpus(each)
        )
        return
    layout = chosen.deployment.layout
    # several replicas would become about half as many
    pointless = {
        HALF: layout.num_gpus == 1 or layout.replicas > 1,
        RELAXED: layout.num_gpus == 1,
    }
    for text, changed in _list_changes(plan.scenario):
        if not pointless.get(text):
            times = 2 + 1 / layout.replicas if text == TWICE else 1.0
            yield text, limit_to_budget(changed, chosen, times)


def _get_priced_choice(plan: Plan) -> Candidate | None:
    """Get the choice that something outside the scenario may undercut; None where cost is no question."""
    chosen = plan.chosen
    if chosen is None or plan.scenario.found_figure or chosen.is_disaggregated:
        return None
    return chosen if chosen.usd_per_hour else None


def find_unlisted_format(plan: Plan) -> tuple[Candidate, Scenario] | None:
    """Find a plan in a format that the scenario does not allow, on the plan's own kind of GPU.

    It is clearly cheaper, or likelier for no more money; None where none is.
    """
    chosen, more = _get_priced_choice(plan), allow_formats(plan.scenario)
    if chosen is None or more is None:
        return None
    own = tuple(each for each in more.gpus if each.gpu == chosen.deployment.gpu)
    return _find_better(limit_to_budget(replace(more, gpus=own), chosen, 1.0), chosen)


def find_unlisted_gpu(plan: Plan) -> tuple[Candidate, Scenario] | None:
    """Find a plan on another kind of GPU, which the scenario does not list; as a format is found."""
    chosen = _get_priced_choice(plan)
    if chosen is None:
        return None
    others = limit_to_budget(_use_other_gpus(plan.scenario), chosen, 1.0)
    return (
        _find_better(promising, chosen) if (promising := _select_promising_gpus(others)) else None
    )


def find_measure_first(plan: Plan) -> Candidate | None:
    """Find what is worth a benchmark first, as its own plan states it; None where nothing is.

    Of plans that are clearly cheaper and have a fair chance it is the one with the largest product
    of probability and saving.
    """
    if (chosen := _get_priced_choice(plan)) is None or plan.scenario.offline:
        return None  # a job takes fewer GPUs longer, for the same bill
    best: tuple[float, Candidate | None] = 0.0, None

    def weigh(candidate: Candidate) -> float:
        (unpriced, cost), (_, own) = candidate.cost_key, chosen.cost_key
        is_worth = cost <= CLEARLY_CHEAPER * own and candidate.probability >= FAIR_CHANCE
        return candidate.probability * (own - cost) if is_worth and not unpriced else 0.0

    for candidate in sorted(plan.without_disaggregation.candidates, key=weigh, reverse=True):
        if weigh(candidate) <= best[0] or is_out_of_time():
            break
        pinned = search_choice(pin_candidate(plan.scenario, candidate)).best
        if pinned:
            stated = replace(pinned, billed_fraction=candidate.billed_fraction)
            best = max(best, (weigh(stated), stated), key=itemgetter(0))
    return best[1]


def pin_candidate(scenario: Scenario, candidate: Candidate) -> Scenario:
    """Allow nothing but the GPUs, the layout, the formats and the engine of `candidate`."""
    deployment, (weights, cache, drafts, engine, *_) = (
        candidate.deployment, candidate.preference_key,
    )  # fmt: skip
    gpus = tuple(
        replace(each, max_gpus=candidate.prediction.num_gpus_billed)
        for each in scenario.gpus
        if each.gpu == deployment.gpu
    )
    layout = {name: getattr(deployment.layout, name) for name in get_args(LayoutSize)}
    speculation = (
        scenario.speculation.model_copy(update={"allowed": drafts > 0})
        if scenario.speculation
        else None
    )
    return replace(
        scenario.split_by_engine[engine], gpus=gpus, layout=layout, speculation=speculation,
        quantizations=scenario.quantizations[weights : weights + 1],
        kv_cache_dtypes=scenario.kv_cache_dtypes[cache : cache + 1],
        allow_disaggregation=False, daily_profile=None,
    )  # fmt: skip


def _find_better(scenario: Scenario, known: Candidate) -> tuple[Candidate, Scenario] | None:
    """Find what holds and is clearly cheaper than what is `known`, or likelier for no more."""
    if (found := find_choice(scenario) if scenario.gpus else None) is None:
        return None
    is_likelier = found.probability >= known.probability + CLEARLY_LIKELIER
    _, bill = price_all_hours(scenario, found)
    is_cheaper = bill * found.billed_fraction <= CLEARLY_CHEAPER * (
        price_all_hours(scenario, known)[1] * known.billed_fraction
    )
    return (found, scenario) if is_cheaper or is_likelier else None


def allow_formats(scenario: Scenario) -> Scenario | None:
    """Allow FP8 and 4-bit weights and an FP8 KV cache too, where engines and model take them.

    None where the scenario allows them all.
    """
    formats, caches = [*scenario.quantizations], [*scenario.kv_cache_dtypes]
    for method in ("fp8", "awq"):
        with suppress(PlannerError):  # a format that this model cannot take
            load_format(scenario.model, method)
            formats += [method] if method not in formats else []
    caches += ["fp8"] if "fp8" not in caches else []
    allowed = replace(scenario, quantizations=tuple(formats), kv_cache_dtypes=tuple(caches))
    return None if allowed == scenario else allowed


def _list_changes(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Yield what a change of traffic, limits or drafts is called, and the changed scenario."""
    for text, factor in ((TWICE, 2.0), (HALF, 0.5)):
        yield text, replace(scenario, workload=scenario.workload.scale(factor))
    if scenario.slo_targets:
        relaxed = tuple(replace(each, seconds=2 * each.seconds) for each in scenario.slo_targets)
        yield RELAXED, replace(scenario, slo_targets=relaxed)
    if scenario.speculation and not scenario.speculation.allowed:
        allowed = scenario.speculation.model_copy(update={"allowed": True})
        yield "speculative decoding allowed", replace(scenario, speculation=allowed)


def _widen(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Propose other formats, more GPUs, then other kinds of GPU that the closed form finds promising."""
    more = tuple(
        replace(candidate, max_gpus=max(FALLBACK_MAX_GPUS, 4 * candidate.max_gpus))
        for candidate in scenario.gpus
    )
    if formats := allow_formats(scenario):
        yield "other formats allowed", formats
    yield f"up to {more[0].max_gpus} GPUs", replace(scenario, gpus=more)
    if other := _select_promising_gpus(_use_other_gpus(scenario)):
        names = " or ".join(candidate.gpu.name for candidate in other.gpus)
        yield f"{names}, not on your list", other


def find_enabling_change(scenario: Scenario) -> tuple[str, Scenario, Candidate] | None:
    """Find the first change of formats or GPUs with which something holds, and the cheapest that does."""
    for text, changed in _widen(scenario):
        if is_out_of_time():
            break
        if found := find_choice(changed):
            return text, changed, found
    return None


def _use_other_gpus(scenario: Scenario) -> Scenario:
    """Replace the GPUs by the suggested ones that the scenario does not name."""
    named = [candidate.gpu for candidate in scenario.gpus]
    max_gpus = max(FALLBACK_MAX_GPUS, *(candidate.max_gpus for candidate in scenario.gpus))
    others = [gpu for gpu in map(get_gpu, SUGGESTED_GPUS) if gpu not in named]
    return replace(scenario, gpus=tuple(CandidateGpu(gpu, max_gpus) for gpu in others))


def limit_to_budget(scenario: Scenario, chosen: Candidate, times: float) -> Scenario:
    """Limit the GPUs of each kind to those that `times` the price of `chosen` buys.

    Without prices, the limit is `times` its billed GPUs.
    """
    affordable = []
    for candidate_gpu in scenario.gpus:
        price = look_up_gpu_price(candidate_gpu.gpu, scenario.prices)
        usd, gpus = chosen.usd_per_hour, chosen.prediction.num_gpus_billed
        max_gpus = int(times * (usd / price.median_usd if usd and price else gpus) + 1e-6)
        max_gpus = min(candidate_gpu.max_gpus, max_gpus)
        affordable += [replace(candidate_gpu, max_gpus=max_gpus)] if max_gpus else []
    return replace(scenario, gpus=tuple(affordable))


def _select_promising_gpus(scenario: Scenario) -> Scenario | None:
    """Keep the GPUs with most capacity for their price, likely ones first; None if none can be feasible.

    Probability and capacity are analytical estimates of every layout on up to two machines, in as
    many replicas as allowed.
    """
    values = {}  # (is likely, has a price, capacity per USD or GPU) of the best candidate
    for candidate_gpu in scenario.gpus:
        families = list[Family]()
        for quantization in scenario.quantizations:
            single = replace(
                scenario, gpus=(candidate_gpu,), quantizations=(quantization,),
                kv_cache_dtypes=scenario.kv_cache_dtypes[-1:], speculation=None,
            )  # fmt: skip
            with suppress(PlannerError):  # a format that this model cannot take
                families += build_families(single, _fits_two_machines)[0]
        rates = [
            (is_promising(each), not each.cost_key[0], performance.capacity.mid / each.cost_key[1])
            for family in families
            if may_be_feasible(each := family.most) and each.limit_utilization <= HOPELESS_MARGIN
            if (performance := each.prediction.performance) and performance.capacity
        ]  # fmt: skip
        if rates:
            values[candidate_gpu] = max(rates)
    best = sorted(values, key=lambda gpu: values[gpu], reverse=True)[:MAX_SUGGESTED_GPUS_SEARCHED]
    return replace(scenario, gpus=tuple(best)) if best else None


def _fits_two_machines(candidate_gpu: CandidateGpu, layout: ParallelLayout) -> bool:
    return layout.num_gpus <= 2 * candidate_gpu.max_machine_gpus
