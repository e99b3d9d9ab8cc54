"""How far the traffic of a plan may grow, and what its probability is at more than planned."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.core.intervals import Interval
from planner.core.progress import show_step
from planner.latency.performance import Performance
from planner.planning.evaluation import compute_offered_rps, get_capacity_rps
from planner.planning.max_load import (
    find_max_load,
    get_figure,
    get_load_kind,
    is_least_load,
    judge_at_load,
    set_figure,
)
from planner.planning.plan import GAMBLE_PROBABILITY, Plan
from planner.planning.scenario import Scenario
from planner.planning.search import search_deployments

MIN_GROWTH = 0.005
"""Growth below half a percent is none."""
SURGE_FACTOR = 1.2
"""So much more traffic than planned is what a plan is told to stand, or not."""


@dataclass(frozen=True)
class EvenOdds:
    """The largest load at which a plan of its own has even odds, where the largest load was the question."""

    load: float  # requests/s or users
    probability: float
    unlimited: Mapping[str, Interval]  # p95 latencies [s] there for which no limit is given


@dataclass(frozen=True)
class Surge:
    """More traffic than a plan assumes, and how probably it meets every target then."""

    more: float  # 0.2 for 20% more; 0 where hardly any traffic is planned
    probability: float
    even_odds: EvenOdds | None
    unlimited: Mapping[str, Interval]  # as in `EvenOdds`, at the planned load


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


def judge_surge(plan: Plan) -> Surge | None:
    """Judge the plan at `SURGE_FACTOR` times its traffic, whole users; None without a prediction or traffic."""
    scenario, chosen = plan.scenario, plan.chosen
    if chosen is None or (performance := chosen.prediction.performance) is None:
        return None
    even = _find_even_odds(scenario)
    unlimited = list_unlimited(scenario, performance) if even else {}
    if is_least_load(scenario):
        return Surge(0.0, chosen.probability, even, unlimited) if even else None
    kind = get_load_kind(scenario)
    planned = get_figure(scenario, kind)
    load = SURGE_FACTOR * planned
    load = math.ceil(load - 1e-9) if kind == "concurrency" else load
    probability = judge_at_load(scenario, chosen, load).probability
    return Surge(load / planned - 1, probability, even, unlimited)


def _find_even_odds(scenario: Scenario) -> EvenOdds | None:
    """Ask for the largest load once more, with even odds."""
    kind = scenario.found_figure
    if kind not in ("rate", "concurrency"):
        return None
    open_load = set_figure(scenario, kind, 1.0)
    asked = replace(open_load, open_figure=kind, found_figure=None, confidence=GAMBLE_PROBABILITY)
    plan = search_deployments(asked)
    load = get_figure(plan.scenario, kind)
    if plan.verdict != "holds" or load < get_figure(scenario, kind) or plan.performance is None:
        return None
    return EvenOdds(load, plan.probability, list_unlimited(scenario, plan.performance))


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
    # simulations of two loads differ by chance: what is told of the surge holds here too
    more = SURGE_FACTOR * offered
    if 0 < confident < more and (surge := judge_surge(plan)):
        confident = more if surge.probability >= scenario.confidence else confident
    return GrowthLimit(offered, confident, scenario.confidence)
