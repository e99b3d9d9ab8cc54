"""Why not another GPU, engine or format: what each that the scenario allows comes to at the price of the plan."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from planner.core.progress import get_progress_watch, try_each
from planner.core.text import format_count
from planner.planning.candidate import Candidate
from planner.planning.deployment_builder import load_format
from planner.planning.evaluation import evaluate_candidates
from planner.planning.search import Plan, tune_candidate
from planner.planning.search_space import fit_to_budget

RankReason = Literal[
    "day", "memory", "probability", "weights", "kv_cache", "drafts", "engine", "arguments", "stages",
    "limit",
]  # fmt: skip
"""Which part of the search's rule puts one deployment after another at the same price."""
PREFERENCE_REASONS: tuple[RankReason, ...] = (
    "weights", "kv_cache", "drafts", "engine", "arguments",
)  # fmt: skip
"""By the first place in which their `preference` differs."""
AlternativeKind = Literal[
    "not tried", "cannot start", "no price", "dearer", "misses", "less", "meets"
]
MAX_TUNED_ALTERNATIVES = 2
"""Deployments of an alternative whose engine arguments are tuned, those first that the closed form likes best."""


@dataclass(frozen=True)
class CandidateAlternative:
    """Something that the scenario allows and the plan has not, and why not."""

    option: str  # "B200", "the checkpoint's own weights"
    kind: AlternativeKind
    # the nearest for no more money, simulated; else the least that starts, if any does
    candidate: Candidate | None = None
    text: str = ""  # what keeps it from starting, or from being tried
    rank_reason: RankReason | None = None  # of one that meets the targets too


def find_alternatives(
    plan: Plan, is_wanted: Callable[[str], bool] = lambda _: True
) -> tuple[CandidateAlternative, ...]:
    """Find every GPU, engine, weight and KV-cache format, and drafting or none, that the plan might have had instead.

    Engines come last. Only options of which the name `is_wanted` are tried.
    """
    if (chosen := plan.chosen) is None:
        return ()
    kinds = _list_alternatives(plan, chosen)
    wanted = {kind[0]: kind for kind in kinds if is_wanted(kind[0])}
    tried = try_each(lambda kind: _find_alternative(plan, chosen, *kind), wanted, "alternatives")
    watch = get_progress_watch()
    return tuple(
        found or CandidateAlternative(option, "not tried", text=str(watch.stop_reason))
        for option, found in tried
    )


def list_engine_options(plan: Plan) -> list[str]:
    """List the engines among which the scenario lets the plan choose; empty where there is one."""
    names = [engine.name for engine in (plan.scenario.engine, *plan.scenario.other_engines)]
    return names if len(names) > 1 else []


def _list_alternatives(plan: Plan, chosen: Candidate) -> Iterator[tuple[str, str, list[Candidate]]]:
    """(what, its GPU if that is what it is, the candidates with it) for each that `chosen` has not."""
    scenario = plan.scenario
    for candidate_gpu in scenario.gpus:
        if candidate_gpu.gpu != chosen.deployment.gpu:
            name = candidate_gpu.gpu.name
            yield (
                name,
                name,
                [
                    c
                    for c in plan.without_disaggregation.candidates
                    if c.deployment.gpu == candidate_gpu.gpu
                ],
            )
    drafted = (
        scenario.speculation.method if scenario.speculation and scenario.speculation.allowed else ""
    )
    names = (
        [f"{q} weights" if q else "the checkpoint's own weights" for q in scenario.quantizations],
        [
            "the model's own KV cache" if kv == "auto" else f"{kv} KV cache"
            for kv in scenario.kv_cache_dtypes
        ],
        ["no drafts", f"drafts of {drafted}"] if drafted else ["no drafts"],
        [one.engine.name for one in scenario.split_by_engine],
    )
    # formats that leave the chosen weights as they are, such as "fp8" of an FP8 checkpoint
    same = {
        k
        for k, quantization in enumerate(scenario.quantizations)
        if load_format(scenario.model, quantization) == chosen.deployment.model
    }
    for position, options in enumerate(names):
        for k, what in enumerate(options):
            if k != chosen.preference_key[position] and (position or k not in same):
                yield (
                    what,
                    "",
                    [
                        c
                        for c in plan.without_disaggregation.candidates
                        if c.preference_key[position] == k
                    ],
                )


def _find_alternative(
    plan: Plan, chosen: Candidate, what: str, gpu: str, others: list[Candidate]
) -> CandidateAlternative:
    """Find the nearest of `others` for no more money, or else the least of them."""
    scenario = plan.scenario
    if not others:
        wide = [
            one
            for one in scenario.gpus
            if one.gpu.name == gpu and one.max_gpus > one.max_machine_gpus
        ]
        if wide:
            text = (
                f"{format_count(wide[0].max_machine_gpus, 'GPU')} of one machine do not hold it, and layouts"
                " over several are tried only where nothing else meets the targets"
            )
            return CandidateAlternative(what, "not tried", text=text)
        refused = [rejection for rejection in plan.rejected if rejection.gpu == gpu]
        last = max(refused, key=attrgetter("gpus"), default=None)
        text = f"{last.description}: {last.reason}" if last else "no deployment with it starts"
        return CandidateAlternative(what, "cannot start", text=text)
    affordable = fit_to_budget(scenario, chosen.price_key, others)
    if not affordable and gpu:
        kind = next(each for each in plan.by_gpu if each.gpu.name == gpu)
        if kind.candidate is None:
            return CandidateAlternative(what, "cannot start", text=kind.reason)
        return CandidateAlternative(what, "misses" if kind.reason else "dearer", kind.candidate)
    if not affordable:
        single = evaluate_candidates(
            scenario, [(one.deployment, 1, one.preference_key) for one in others]
        )
        least = min(single, key=attrgetter("cost_key", "nearness_key"))
        is_unpriced = least.usd_per_hour is None and chosen.usd_per_hour is not None
        return CandidateAlternative(what, "no price" if is_unpriced else "dearer", least)
    nearest = sorted(affordable, key=attrgetter("nearness_key"))
    candidate = min(
        (tune_candidate(plan, each) for each in nearest[:MAX_TUNED_ALTERNATIVES]),
        key=attrgetter("nearness_key"),
    )
    if candidate.is_confident:
        return CandidateAlternative(
            what, "meets", candidate, rank_reason=find_rank_reason(candidate, chosen)
        )
    is_load = scenario.found_figure in ("rate", "concurrency")
    return CandidateAlternative(what, "less" if is_load else "misses", candidate)


def find_rank_reason(candidate: Candidate, chosen: Candidate) -> RankReason:
    """Find which part of the rule puts `candidate` after `chosen`, both of which do at one price."""
    if candidate.cost_key > chosen.cost_key:
        return "day"
    if candidate.raises_memory > chosen.raises_memory:
        return "memory"
    if round(candidate.probability, 2) < round(chosen.probability, 2):
        return "probability"
    if candidate.preference_key > chosen.preference_key:
        pairs = zip(
            PREFERENCE_REASONS, chosen.preference_key, candidate.preference_key, strict=True
        )
        return next(reason for reason, own, its in pairs if own != its)
    stages = candidate.deployment.layout.pp > chosen.deployment.layout.pp
    return "stages" if stages else "limit"
