"""Describe a plan's tolerance and risks: more traffic, a lost replica, uncertain figures."""

from dataclasses import dataclass

from planner.analysis.load_curves import find_max_feasible_rps
from planner.analysis.load_ramp import OVERLOAD_REASON, run_load_ramp
from planner.core.intervals import Interval
from planner.core.number_format import (
    format_distinct,
    format_number,
    format_probability,
)
from planner.core.progress import show_step
from planner.planning.evaluation import (
    compute_offered_rps,
    get_capacity_rps,
)
from planner.planning.search import Plan
from planner.planning.slo import compute_tolerance, get_pessimistic_value
from planner.planning.tolerance import find_max_rate

MIN_GROWTH = 0.005
"""Growth below half a percent is none."""
MAX_GROWTH_IN_PERCENT = 2.0
"""From threefold on, growth is told as a factor."""
CAPACITY_MEANING = "Capacity is what the GPUs process at most, however long requests wait"


@dataclass(frozen=True)
class GrowthLimit:
    """How far the traffic of a plan may grow, in requests/s."""

    capacity: Interval
    offered_rps: float
    planned_rps: float  # the capacity less the headroom
    limit: tuple[Interval, str] | None  # the rate up to which all SLOs hold, and what fails beyond
    method: str  # " (estimate)" where the limit is that of an estimate
    confident_rps: (
        float  # up to which all SLOs and the headroom hold with `confidence`; 0 if at risk
    )
    confidence: float  # the probability that the scenario asks for
    slow_reason: str = ""  # what fails first with the slowest steps

    @property
    def growth(self) -> float:
        """The growth up to which the plan keeps the asked probability, 0.4 for 40%."""
        growth = max(self.confident_rps / self.offered_rps - 1, 0.0)
        return growth if growth >= MIN_GROWTH else 0.0

    def format_value(self) -> tuple[str, str]:
        """Format `growth` as a value and a unit: "+6%", from threefold on "3.5 times"."""
        if not self.growth:
            return "None", ""
        if self.growth < MAX_GROWTH_IN_PERCENT:
            return f"+{self.growth:.0%}", ""
        return format_number(1 + self.growth, 2), "times"

    def describe_end(self, ask_every_s: float | None = None) -> str:
        """Describe the load that `growth` leads to, in requests/s or in users, and its probability."""
        odds = format_probability(self.confidence)
        if not self.growth:
            return (
                f"more is under {odds} likely"
                if self.confident_rps
                else f"under {odds} likely already"
            )
        unit = "users" if ask_every_s else "requests/s"
        return f"to {self._format_end(ask_every_s or 1.0)} {unit}, {odds} likely"

    def _format_end(self, factor: float = 1.0) -> str:
        return format_distinct(self.confident_rps * factor, self.offered_rps * factor)

    def explain(self) -> str:
        """Explain up to which load every target is met, and how that differs from the capacity."""
        odds = format_probability(self.confidence)
        if self.growth:
            met = (
                f"Every target is met with a probability of {odds} up to {self._format_end()}"
                " requests/s"
            )
        elif self.confident_rps:
            met = f"Beyond the planned load the probability falls below the {odds} asked for"
        else:
            met = f"At the planned load the probability is already below the {odds} asked for"
        return f"{met}. {CAPACITY_MEANING}."


@show_step("load ramp")
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
        or not (capacity := get_capacity_rps(scenario, performance))
    ):
        return None
    limit, method, slow_reason = None, "", ""
    offered = compute_offered_rps(scenario, best.prediction)
    planned = (1 - scenario.headroom) * capacity.mid
    is_replayed = best.is_simulated and not best.is_disaggregated and not scenario.offline
    if is_replayed:
        ramp = run_load_ramp(best.deployment, scenario.workload, scenario.slo_targets)
        limit = None if ramp.reason == OVERLOAD_REASON else (ramp.ceiling, ramp.reason)
        slow_reason = "" if ramp.slow_reason == OVERLOAD_REASON else ramp.slow_reason
    elif not scenario.offline:
        limit, method = find_max_feasible_rps(scenario, best), " (estimate)"
        slow_reason = limit[1] if limit else ""
    if is_replayed:
        admitted = offered / scenario.workload.rate
        most = find_max_rate(scenario, best, planned / admitted) if best.is_confident else 0.0
        confident = admitted * most
    else:
        z = compute_tolerance(scenario.confidence)
        ends = [capacity * (1 - scenario.headroom), *([limit[0]] if limit else [])]
        confident = min(_get_rate_at(rate, z) for rate in ends) * best.is_confident
    return GrowthLimit(
        capacity, offered, planned, limit, method, confident, scenario.confidence, slow_reason
    )


def _get_rate_at(rate: Interval, z: float) -> float:
    """Get the rate that is reached with steps slower by `z` standard deviations."""
    slow = rate.map_monotone(lambda each: 1 / max(each, 1e-9))
    return 1 / max(get_pessimistic_value(slow, z), 1e-9)
