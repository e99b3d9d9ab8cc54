"""How far the traffic of a plan may grow, and what it serves with even odds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.core.intervals import Interval
from planner.core.progress import show_step
from planner.latency.performance import Performance
from planner.planning.evaluation import compute_offered_rps, get_capacity_rps
from planner.planning.max_load import (
    find_max_load,
    get_figure,
    set_figure,
)
from planner.planning.plan import GAMBLE_PROBABILITY, Plan
from planner.planning.scenario import Scenario
from planner.planning.search import search_deployments

MIN_GROWTH = 0.005
"""Growth below half a percent is none."""


@dataclass(frozen=True)
class EvenOdds:
    """The largest load at which a plan of its own has even odds, where the largest load was the question."""

    load: float  # requests/s or users
    probability: float
    unlimited_here: Mapping[
        str, Interval
    ]  # p95 latencies [s] without a limit, at the load asked for
    unlimited: Mapping[str, Interval]  # and at this one


@dataclass(frozen=True)
class GrowthLimit:
    """How far the traffic of a plan may grow, in requests/s."""

    offered_rps: float
    confident_rps: float  # up to which all is met with `confidence`; 0 if at risk
    confidence: float  # the probability that the scenario asks for

    @property
    def growth(self) -> float:
        """The growth up to which the plan keeps the asked probability, 0.4 for 40%."""
        growth = max(self.confident_rps / self.offered_rps - 1, 0.0)
        return growth if growth >= MIN_GROWTH else 0.0


def find_even_odds(plan: Plan) -> EvenOdds | None:
    """Ask for the largest load once more, with even odds; None where that was not the question."""
    scenario, kind = plan.scenario, plan.scenario.found_figure
    if plan.performance is None or plan.chosen is None or kind not in ("rate", "concurrency"):
        return None
    open_load = set_figure(scenario, kind, 1.0)
    asked = replace(open_load, open_figure=kind, found_figure=None, confidence=GAMBLE_PROBABILITY)
    even = search_deployments(asked)
    load = get_figure(even.scenario, kind)
    if even.verdict != "holds" or load < get_figure(scenario, kind) or even.performance is None:
        return None
    return EvenOdds(
        load, even.probability, list_unlimited(scenario, plan.performance),
        list_unlimited(scenario, even.performance),
    )  # fmt: skip


def list_unlimited(scenario: Scenario, performance: Performance) -> dict[str, Interval]:
    """List the p95 of first token and pace, where no target limits any statistic of it."""
    limited = {target.metric for target in scenario.slo_targets}
    metrics = [metric for metric in ("ttft", "tpot") if metric not in limited]
    return {f"p95 {metric.upper()}": performance.get(metric, "p95") for metric in metrics}


@show_step("growth")
def find_growth_limit(plan: Plan) -> GrowthLimit | None:
    """Find how far traffic may grow; None in a closed loop or without a prediction.

    None also if the load is the largest that was found: it is the limit at the asked probability.
    """
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    if (
        best is None
        or performance is None
        or scenario.workload.rate is None
        or scenario.found_figure == "rate"
        or get_capacity_rps(scenario, performance) is None
    ):
        return None
    offered = compute_offered_rps(scenario, best.prediction)
    share = offered / scenario.workload.rate  # that is admitted
    confident = share * find_max_load(scenario, best) if best.is_confident else 0.0
    return GrowthLimit(offered, confident, scenario.confidence)
