"""The answer to a scenario: what was chosen, what else there is, and what keeps anything cheaper from doing."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from planner.engines.deployment import Deployment
from planner.engines.layout import ParallelLayout
from planner.latency.performance import Performance
from planner.parallelism.layouts import list_legal_layouts
from planner.planning.autoscaling import AutoscalingPlan, plan_autoscaling
from planner.planning.billing import (
    ApiComparison,
    BillingComparison,
    compare_billing,
    compare_to_api,
)
from planner.planning.candidate import Candidate
from planner.planning.deployment_builder import build_deployment, load_format
from planner.planning.scenario import Scenario
from planner.planning.search_space import RejectedOption

GAMBLE_PROBABILITY, SAFE_PROBABILITY = 0.5, 0.95
"""Probabilities of the two options beside the recommendation."""
MAX_REFUSALS = 3
"""Reasons that are named where the engines refuse all there is."""


SMALLEST = "nothing smaller"
"""What `BindingConstraint.constraint` is where no smaller deployment exists."""


@dataclass(frozen=True)
class BindingConstraint:
    """What keeps anything cheaper from doing: a target such as "p95 TPOT", "rate", "memory", or `SMALLEST`."""

    constraint: str
    sentence: str
    candidate: Candidate | None = field(default=None, compare=False, repr=False)  # that it keeps

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Plan:
    """The answer to a scenario."""

    scenario: Scenario
    chosen: Candidate | None
    runner_up: Candidate | None  # the best with another GPU or layout
    gamble: Candidate | None  # the cheapest with a probability of `GAMBLE_PROBABILITY`
    safe: Candidate | None  # the cheapest with a probability of `SAFE_PROBABILITY`
    binding_constraint: BindingConstraint
    candidates: tuple[Candidate, ...]  # from best to worst
    rejected: tuple[RejectedOption, ...]
    notes: tuple[str, ...]
    without_pools: "Plan | None" = None  # where pools are allowed
    left_out: tuple[str, ...] = ()  # by a time limit
    # of the chosen candidate, if the choice rests on it
    simulated_day: AutoscalingPlan | None = field(default=None, repr=False)

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
    def options(self) -> dict[str, Candidate]:
        """The gamble, the recommendation and the safe option, those that there are, by name."""
        named = {"gamble": self.gamble, "recommended": self.chosen, "safe": self.safe}
        return {name: candidate for name, candidate in named.items() if candidate}

    @property
    def probability(self) -> float:
        """That what is chosen, or comes nearest, starts and meets every target."""
        return self.best.probability if self.best else 0.0

    @property
    def verdict(self) -> Literal["holds", "at_risk", "nothing_meets"]:
        """`holds` where the probability is at least the scenario's `confidence`."""
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
        if self.chosen and self.chosen.at_risk:
            return self.chosen.risks
        if self.chosen:
            return ()
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

    @cached_property
    def api_comparison(self) -> ApiComparison | None:
        """The plan's cost beside that of the scenario's API; None without one, or without a plan.

        With a daily profile it follows with the replay, which the bills of the day need.
        """
        if self.chosen is None or self.scenario.billing_alternatives.api is None:
            return None
        if self.scenario.daily_profile and not self.chosen.is_simulated:
            return None
        return compare_to_api(self.scenario, self.chosen, self.billing)

    def __str__(self) -> str:
        if self.chosen is None:
            return f"{self.scenario.name}: no plan meets the targets. {self.binding_constraint}"
        after = f" Next best: {self.runner_up}." if self.runner_up else ""
        return f"{self.scenario.name}: {self.chosen}. {self.binding_constraint}{after}"


def explain_nearest(near: Candidate) -> BindingConstraint:
    text = f"Closest cheaper option: {near.description}; {near.shortfall}."
    return BindingConstraint(get_first_violation(near), text, near)


def get_first_violation(candidate: Candidate) -> str:
    """The limit that `candidate` breaks first, or "probability"."""
    return next(iter(candidate.violated_constraints), "probability")


def describe_room(chosen: Candidate) -> str:
    return (
        f"No smaller deployment exists. Highest limit utilization: {chosen.limit_utilization:.0%}."
    )


def explain_infeasibility(
    candidates: list[Candidate], rejected: list[RejectedOption]
) -> BindingConstraint:
    """Why no candidate does, nearest first."""
    if candidates:
        near = candidates[0]
        text = f"Closest: {near.description}; {near.shortfall}."
        return BindingConstraint(get_first_violation(near), text)
    if refusals := _list_refusals(rejected):
        return BindingConstraint("engine", f"Nothing starts: {'; '.join(refusals)}.")
    if not rejected:
        return BindingConstraint(
            "engine",
            "No layout of this model is left on these GPUs: sizes have to divide its heads and layers,"
            " and tensor parallelism is planned inside one machine only.",
        )
    last = max(rejected, key=lambda rejection: rejection.gpus)
    where = "" if last.gpu in last.description else f" on {last.gpu}"
    return BindingConstraint(
        last.bottleneck, f"It fits nowhere: {last.description}{where}: {last.reason}"
    )


def _list_refusals(rejected: list[RejectedOption]) -> list[str]:
    """List the first reasons of what the engines refuse, if that is all there is."""
    if any(rejection.bottleneck != "engine" for rejection in rejected):
        return []
    return list(dict.fromkeys(rejection.reason for rejection in rejected))[:MAX_REFUSALS]


def get_reference_deployment(plan: Plan) -> Deployment:
    """The deployment to talk about: the chosen one, else the nearest, else the widest layout there is."""
    if plan.best:
        return plan.best.deployment
    scenario, candidate_gpu = plan.scenario, plan.scenario.gpus[0]
    model = load_format(scenario.model, scenario.quantizations[-1])
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
