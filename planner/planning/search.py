"""Which deployment to choose: every legal candidate, evaluated; the cheapest that meets the service level.

Candidates are ranked in closed form; those at the top are replayed (`planning.verification`), and
one that fails there counts as missing its target. The rule, in this order: it meets every target at
the middle of its interval; it costs least per hour (GPUs, where no price is known); it meets them
at the pessimistic end too; it changes the model least (formats in the scenario's order, no
speculation); it has the fewest pipeline stages, then the largest margin. Where the traffic has a
day, another layout or GPU comes first if that day, scaled by the hour, is clearly cheaper with it.
Pools of prefill and decode workers (`planning.disaggregated_search`) come before replicas that do both only where
they cost less and meet every target at the pessimistic end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Literal

from planner.engines.deployment import Deployment, ParallelLayout
from planner.hardware.prices import look_up_gpu_price
from planner.latency.performance import Performance
from planner.models.registry import load_model
from planner.parallelism.layouts import list_legal_layouts
from planner.planning.autoscaling import AutoscalingPlan, plan_autoscaling, rank_by_daily_cost
from planner.planning.billing import BillingComparison, compare_billing
from planner.planning.candidate import Candidate
from planner.planning.deployment_builder import build_deployment
from planner.planning.disaggregated_search import explain_skipped_pools, search_pools
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.search_space import RejectedOption, evaluate_search_space, fit_to_budget
from planner.planning.verification import (
    VerificationResult,
    ensure_simulated,
    rank_closest_candidates,
    tune_and_simulate,
    verify_candidates,
)

MAX_POOL_COST_FACTOR = 2.0
"""Pools that cost more than so many times the plan without them are of no interest."""
MAX_CHEAPER_RETRIES = 3
"""Cheaper candidates that are replayed once a plan holds, however far the closed form puts them from holding."""


@dataclass(frozen=True)
class BindingConstraint:
    """What keeps anything cheaper from doing: a target such as "p95 TPOT", "rate", "memory", or "one GPU"."""

    constraint: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Plan:
    """The answer to a scenario."""

    scenario: Scenario
    chosen: Candidate | None
    runner_up: Candidate | None  # the best with another GPU or layout
    safer: (
        Candidate | None
    )  # the cheapest that holds at the pessimistic end, where the chosen one is at risk
    binding_constraint: BindingConstraint
    candidates: tuple[Candidate, ...]  # from best to worst
    rejected: tuple[RejectedOption, ...]
    notes: tuple[str, ...]
    without_pools: "Plan | None" = None  # where pools are allowed
    simulated_day: AutoscalingPlan | None = None  # of the chosen candidate, if the search needed it

    @property
    def without_disaggregation(self) -> "Plan":
        """The plan in which every replica does both, prefill and decode."""
        return self.without_pools or self

    @property
    def is_disaggregated(self) -> bool:
        return self.chosen is not None and self.chosen.is_disaggregated

    @property
    def best_disaggregated(self) -> Candidate | None:
        """The best pools that were looked at."""
        return next(
            (candidate for candidate in self.candidates if candidate.is_disaggregated), None
        )

    @property
    def best(self) -> Candidate | None:
        """The chosen candidate, else the one that comes nearest to the service level; None where nothing fits."""
        return next(iter(self.candidates), None)

    @property
    def performance(self) -> Performance | None:
        """What that one is predicted to do."""
        return self.best.prediction.performance if self.best else None

    @property
    def verdict(self) -> Literal["holds", "at_risk", "nothing_meets"]:
        """Whether the plan keeps every promise, at the pessimistic end of every interval too."""
        return (
            "nothing_meets"
            if self.chosen is None
            else "at_risk"
            if self.chosen.at_risk
            else "holds"
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is at risk, or what the nearest plan misses."""
        if self.chosen:
            return self.chosen.risks
        return self.best.violations if self.best else (self.binding_constraint.sentence,)

    @cached_property
    def autoscaling(self) -> AutoscalingPlan | None:
        """The replicas of the chosen candidate by hour; None if the scenario has no daily profile."""
        if self.scenario.daily_profile is None or not self.chosen:
            return None
        return self.simulated_day or plan_autoscaling(self.scenario, self.chosen)

    @cached_property
    def billing(self) -> BillingComparison | None:
        """The ways to pay for that day."""
        return compare_billing(self.scenario, self.autoscaling) if self.autoscaling else None

    def __str__(self) -> str:
        if self.chosen is None:
            return (
                f"{self.scenario.name}: nothing meets the service level. {self.binding_constraint}"
            )
        after = f" Next best: {self.runner_up}." if self.runner_up else ""
        return f"{self.scenario.name}: {self.chosen}. {self.binding_constraint}{after}"


def search_deployments(scenario: Scenario) -> Plan:
    """Evaluate every legal candidate of `scenario` and choose by the rule above."""
    plan = _search_unified(scenario)
    return _add_pool_candidates(plan) if scenario.allow_disaggregation else plan


def _add_pool_candidates(whole: Plan) -> Plan:
    """`whole` with pools among its candidates; the plan is theirs where the rule says so."""
    scenario, today = whole.scenario, whole.chosen
    if reason := explain_skipped_pools(scenario):
        return replace(
            whole, notes=(*whole.notes, f"pools are not looked at: {reason}"), without_pools=whole
        )
    pools = search_pools(
        scenario,
        MAX_POOL_COST_FACTOR * today.cost_key[1] if today and not today.cost_key[0] else math.inf,
    )
    best = next((pool for pool in pools if pool.is_feasible), None)
    together = (*whole.candidates, *pools)
    if today or best:
        together = tuple(
            sorted(
                together, key=lambda one: (not (one.is_feasible and one.is_simulated), one.rank_key)
            )
        )
    plan = replace(whole, candidates=together, without_pools=whole)
    if best is None:
        return plan
    if today is None or best.rank_key < today.rank_key:
        binding = _find_binding_constraint(
            scenario, best, list(whole.candidates), list(whole.rejected)
        )
        notes = tuple(dict.fromkeys((*whole.notes, *best.prediction.warnings)))
        return replace(
            plan,
            chosen=best,
            runner_up=today,
            safer=None,
            binding_constraint=binding,
            notes=notes,
        )
    safer = whole.safer is None or best.rank_key < whole.safer.rank_key
    return replace(plan, safer=best) if today.at_risk and not best.at_risk and safer else plan


def _search_unified(scenario: Scenario) -> Plan:
    """The plan of replicas that do both, prefill and decode.

    Replicas over several nodes are looked at where nothing smaller holds, or one of them would cost
    no more.
    """
    candidates, rejected = evaluate_search_space(
        scenario, lambda card, layout: layout.num_gpus <= card.max_machine_gpus
    )
    verified = verify_candidates(scenario, candidates)

    def wide(candidate_gpu: CandidateGpu, layout: ParallelLayout) -> bool:
        price = look_up_gpu_price(candidate_gpu.gpu, scenario.prices)
        best = verified.feasible[0].usd_per_hour if verified.feasible else None
        dearer = (
            price is not None and best is not None and price.median_usd * layout.num_gpus > best
        )
        return layout.num_gpus > candidate_gpu.max_machine_gpus and not dearer

    more, refused = evaluate_search_space(scenario, wide)
    rejected += refused
    if more:
        candidates += more
        verified = verify_candidates(scenario, candidates)
    while held := _retry_cheaper_candidates(scenario, verified, candidates):
        verified.feasible = sorted([*held, *verified.feasible], key=attrgetter("rank_key"))
    looked_at = {c.placement_key for c in (*verified.feasible, *verified.infeasible)}
    rest = [c for c in candidates if c.placement_key not in looked_at]
    ordered = (
        []
        if verified.feasible
        else rank_closest_candidates(scenario, [*verified.infeasible, *rest])
    )
    verified.feasible += sorted(
        (c for c in ordered if c.is_feasible and c.is_simulated), key=attrgetter("rank_key")
    )
    day = None
    if verified.feasible:
        if scenario.daily_profile:
            verified.feasible, day = rank_by_daily_cost(scenario, verified.feasible)
        ordered = [
            *verified.feasible,
            *sorted((*verified.infeasible, *rest), key=attrgetter("rank_key")),
        ]
    unpriced = sorted({c.deployment.gpu.name for c in ordered if c.usd_per_hour is None})
    notes = (
        [f"no price is known for {', '.join(unpriced)}: ranked after the others, by GPUs"]
        if unpriced
        else []
    )
    return _build_plan(scenario, verified, ordered, rejected, notes, day=day)


def _retry_cheaper_candidates(
    scenario: Scenario, result: VerificationResult, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """What holds and costs less than all of `result`, though the closed form puts it too far off to be tried."""
    if not result.feasible:
        return []
    unpriced, cost = result.feasible[0].price_key
    known = {candidate.placement_key for candidate in result.infeasible}
    cheaper = fit_to_budget(
        scenario, (unpriced, cost * (1 - 1e-6)), [*result.feasible, *candidates]
    )
    places: dict[object, Candidate] = {}
    for candidate in sorted(cheaper, key=attrgetter("limit_utilization")):
        places.setdefault(candidate.placement_key, candidate)
    tried = [
        places[place]
        for place in [place for place in places if place not in known][:MAX_CHEAPER_RETRIES]
    ]
    return [
        one for candidate in tried if (one := tune_and_simulate(scenario, candidate)).is_feasible
    ]


def _build_plan(
    scenario: Scenario, result: VerificationResult, ordered: list[Candidate],
    rejected: list[RejectedOption],
    notes: Sequence[str] = (),
    settle: Callable[[Scenario, Candidate], Candidate] = ensure_simulated,
    day: AutoscalingPlan | None = None,
) -> Plan:  # fmt: skip
    """The plan of what holds by `result`, and of all candidates, `ordered` from best to worst."""
    places: dict[object, Candidate] = {}
    for candidate in ordered:  # of one deployment with several arguments the best
        places.setdefault(candidate.placement_key, candidate)
    shown = tuple(places.values()), tuple(rejected)
    if not result.feasible:
        return Plan(
            scenario, None, None, None, _explain_infeasibility(ordered, rejected), *shown, ()
        )
    chosen, binding = (
        result.feasible[0],
        _find_binding_constraint(scenario, result.feasible[0], ordered, rejected, settle),
    )
    safer, sentences = (
        result.safest if chosen.at_risk else None,
        (*notes, *chosen.prediction.warnings),
    )
    return Plan(
        scenario, chosen, result.find_runner_up(chosen), safer, binding, *shown, sentences,
        simulated_day=day,
    )  # fmt: skip


def search_analytically(scenario: Scenario) -> Plan:
    """Search in closed form, in about a tenth of a second: for controls that move."""
    candidates, rejected = evaluate_search_space(
        scenario, lambda card, layout: layout.num_gpus <= card.max_machine_gpus
    )
    if not any(candidate.is_feasible for candidate in candidates):
        wide, refused = evaluate_search_space(
            scenario, lambda card, layout: layout.num_gpus > card.max_machine_gpus
        )
        candidates, rejected = candidates + wide, rejected + refused
    ordered = sorted(candidates, key=attrgetter("rank_key"))
    verified = VerificationResult([candidate for candidate in ordered if candidate.is_feasible])
    if not verified.feasible:
        ordered.sort(key=attrgetter("limit_utilization"))
    return _build_plan(scenario, verified, ordered, rejected, settle=lambda _, candidate: candidate)


def _find_binding_constraint(
    scenario: Scenario, chosen: Candidate, candidates: list[Candidate],
    rejected: list[RejectedOption],
    settle: Callable[[Scenario, Candidate], Candidate] = ensure_simulated,
) -> BindingConstraint:  # fmt: skip
    """What the nearest cheaper deployment misses: any candidate with as many replicas as cost less than `chosen`."""
    margin, (unpriced, cost) = attrgetter("limit_utilization"), chosen.price_key
    cheaper = [
        c
        for c in fit_to_budget(scenario, (unpriced, cost * (1 - 1e-6)), candidates)
        if not c.is_feasible
    ]
    if cheaper:
        looked_at = [settle(scenario, candidate) for candidate in sorted(cheaper, key=margin)[:2]]
        cheaper = sorted(
            (candidate for candidate in looked_at if not candidate.is_feasible), key=margin
        )
    if cheaper:
        near = cheaper[0]
        text = (
            f"Of all that costs less, {near.description} comes nearest, but"
            f" {'; '.join(near.violations)}."
        )
        return BindingConstraint(near.violated_constraints[0], text)
    small = [
        r
        for r in rejected
        if r.bottleneck == "memory" and r.gpus < chosen.deployment.layout.num_gpus
    ]
    if small:
        largest = max(small, key=lambda rejection: rejection.gpus)
        return BindingConstraint(
            "memory",
            f"Less does not hold the model, such as {largest.description}: {largest.reason}.",
        )
    return BindingConstraint(
        "one GPU",
        f"Nothing smaller exists; it uses {chosen.limit_utilization:.0%} of the tightest limit.",
    )


def _explain_infeasibility(
    candidates: list[Candidate], rejected: list[RejectedOption]
) -> BindingConstraint:
    """Why no candidate does, nearest first."""
    if candidates:
        near = candidates[0]
        return BindingConstraint(
            near.violated_constraints[0],
            f"The nearest, {near.description}: {'; '.join(near.violations)}.",
        )
    if not rejected:
        return BindingConstraint(
            "engine", "The engine accepts no layout of this model on these GPUs."
        )
    last = max(rejected, key=lambda rejection: rejection.gpus)
    return BindingConstraint(
        last.bottleneck, f"It fits nowhere: {last.description} on {last.gpu}: {last.reason}"
    )


def get_reference_deployment(plan: Plan) -> Deployment:
    """The deployment to talk about: the chosen one, else the nearest, else the widest layout there is."""
    if plan.best:
        return plan.best.deployment
    scenario, candidate_gpu = plan.scenario, plan.scenario.gpus[0]
    model = load_model(scenario.model, quantization=scenario.quantizations[-1])
    layouts = list_legal_layouts(
        model,
        candidate_gpu.gpu,
        candidate_gpu.max_gpus,
        candidate_gpu.max_machine_gpus,
        scenario.engine,
    ) or [ParallelLayout()]
    return build_deployment(
        scenario,
        candidate_gpu,
        model,
        max(layouts, key=lambda layout: (layout.num_gpus, layout.tp)),
    )
