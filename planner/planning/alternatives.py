"""Why not another GPU, engine or format: what each that the scenario allows comes to at the price of the plan."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter

from planner.core.progress import get_progress_watch, try_each
from planner.planning.candidate import Candidate
from planner.planning.evaluation import evaluate_candidates, get_capacity_rps
from planner.planning.scenario import Scenario
from planner.planning.search import Plan, tune_candidate
from planner.planning.search_space import fit_to_budget
from planner.planning.slo import format_latency

PREFERENCE_REASONS = (
    "its weight format comes later in `quantization`",
    "its KV cache format comes later in `kv_cache_dtype`",
    "it needs speculative decoding, the plan does not", "its engine comes later in `engine`",
    "it needs non-default engine arguments",
)  # fmt: skip
"""Why one comes after another at the same price, by the first place in which their `preference` differs."""

MAX_TUNED_ALTERNATIVES = 2
"""Deployments of an alternative whose engine arguments are tuned, those first that the closed form likes best."""


@dataclass(frozen=True)
class Alternative:
    """Something that the scenario allows and the plan has not, and why not."""

    option: str  # "B200", "the checkpoint's own weights"
    candidate: (
        Candidate | None
    )  # the nearest for no more money, replayed; else the least that starts, if any does
    reason: str

    def __str__(self) -> str:
        return f"{self.option}: {self.reason}"


def explain_alternatives(
    plan: Plan, among: Collection[str] | None = None
) -> tuple[Alternative, ...]:
    """Every GPU, engine, weight and KV-cache format, and drafting or none, that the plan might have had instead.

    Only those `among` some options, if they are given.
    """
    if (chosen := plan.chosen) is None:
        return ()
    kinds = _list_alternatives(plan, chosen)
    asked = {kind[0]: kind for kind in kinds if among is None or kind[0] in among}
    tried = try_each(lambda kind: _explain_alternative(plan, chosen, *kind), asked, "alternatives")
    watch = get_progress_watch()
    return tuple(
        found or Alternative(option, None, f"not tried: {watch.stop_reason}")
        for option, found in tried
    )


def explain_other_engines(plan: Plan) -> tuple[Alternative, ...]:
    """Every other engine that the scenario allows, at no more money, or the least with it that starts."""
    names = [engine.name for engine in (plan.scenario.engine, *plan.scenario.other_engines)]
    return explain_alternatives(plan, names) if len(names) > 1 else ()


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
    for position, options in enumerate(names):
        for k, what in enumerate(options):
            if k != chosen.preference_key[position]:
                yield (
                    what,
                    "",
                    [
                        c
                        for c in plan.without_disaggregation.candidates
                        if c.preference_key[position] == k
                    ],
                )


def _explain_alternative(
    plan: Plan, chosen: Candidate, what: str, gpu: str, others: list[Candidate]
) -> Alternative:
    """What the nearest of `others` misses for no more money, or by how much the least of them is dearer."""
    scenario = plan.scenario
    if not others:
        refused = [rejection for rejection in plan.rejected if rejection.gpu == gpu]
        last = max(refused, key=attrgetter("gpus"), default=None)
        return Alternative(
            what,
            None,
            f"{last.description}: {last.reason}" if last else "no deployment with it starts",
        )
    affordable = fit_to_budget(scenario, chosen.price_key, others)
    if affordable:
        nearest = sorted(affordable, key=attrgetter("nearness_key"))
        candidate = min(
            (tune_candidate(plan, each) for each in nearest[:MAX_TUNED_ALTERNATIVES]),
            key=attrgetter("nearness_key"),
        )
        if candidate.is_feasible and not candidate.at_risk:
            gains = _compare_to_chosen(scenario, candidate, chosen)
            text = (
                f"{candidate.description} meets the targets too, at {_format_price(candidate)}{gains};"
                f" {explain_rank(candidate, chosen)}"
            )
            return Alternative(what, candidate, text)
        text = f"closest at no higher price: {candidate.description}; {candidate.shortfall}"
        return Alternative(what, candidate, text)
    single = evaluate_candidates(
        scenario, [(one.deployment, 1, one.preference_key) for one in others]
    )
    least = min(single, key=attrgetter("cost_key", "nearness_key"))
    if least.usd_per_hour is None and chosen.usd_per_hour is not None:
        return Alternative(what, least, "no price known, so ranked last")
    return Alternative(
        what,
        least,
        f"its smallest deployment, {least.description}, costs {_format_price(least)}; the plan"
        f" costs {_format_price(chosen)}",
    )


def _format_price(candidate: Candidate) -> str:
    unpriced, cost = candidate.price_key
    return f"{cost:,.0f} GPU{'s' * (cost != 1)}" if unpriced else f"${cost:,.2f} per hour"


def _compare_to_chosen(scenario: Scenario, candidate: Candidate, chosen: Candidate) -> str:
    """What `candidate` serves more or less than `chosen`, and the promise that `chosen` keeps most narrowly in both."""
    new, old = candidate.prediction.performance, chosen.prediction.performance
    if (
        new is None
        or old is None
        or not (
            (most := get_capacity_rps(scenario, new)) and (least := get_capacity_rps(scenario, old))
        )
    ):
        return ""
    more = round(100 * (most.mid / least.mid - 1))
    text = (
        f", and serves {abs(more)}% {'more' if more > 0 else 'less'}"
        if more
        else ", and serves as much"
    )
    paced = {t: old.get_for_display(t.metric, t.percentile).mid for t in scenario.slo_targets}
    paced = {
        t: value for t, value in paced.items() if not math.isnan(value)
    }  # answers of one token have no pace
    if not paced:
        return text
    target = max(paced, key=lambda t: paced[t] / t.seconds)
    after = format_latency(new.get_for_display(target.metric, target.percentile).mid)
    before = format_latency(paced[target])
    return f"{text}, {target.name} {after}, not {before}" if after != before else text


def explain_rank(candidate: Candidate, chosen: Candidate) -> str:
    """Which part of the rule puts `candidate` after `chosen`, both of which do at one price."""
    if candidate.cost_key > chosen.cost_key:
        return "over the day the plan costs less"
    if candidate.raises_memory > chosen.raises_memory:
        return "it needs gpu_memory_utilization above the engine's default"
    if round(candidate.probability, 2) < round(chosen.probability, 2):
        odds = f"{candidate.probability:.0%} instead of {chosen.probability:.0%}"
        return f"it is less likely to meet every target: {odds}"
    if candidate.preference_key > chosen.preference_key:
        differ = (
            why
            for why, own, its in zip(
                PREFERENCE_REASONS, chosen.preference_key, candidate.preference_key, strict=True
            )
            if own != its
        )
        return next(differ)
    stages = candidate.deployment.layout.pp > chosen.deployment.layout.pp
    return "it has more pipeline stages" if stages else "it comes nearer to a limit"
