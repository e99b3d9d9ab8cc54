"""What would meet the targets where nothing does: other GPUs, formats or limits, less load."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from planner.answers.limits import list_limits
from planner.core.progress import try_each
from planner.planning.candidate import Candidate
from planner.planning.evaluation import get_load_limit_name
from planner.planning.max_load import find_max_load, get_figure
from planner.planning.plan import Plan
from planner.planning.scenario import Scenario
from planner.planning.slo import combine_limits, compute_asked_tolerance
from planner.planning.what_if import find_enabling_change

MIN_USEFUL_LOAD = 0.01
"""Share of the load below which serving less is no way out."""


@dataclass(frozen=True)
class Relaxation:
    """A limit that the closest deployment would meet, or a load that the allowed GPUs serve."""

    kind: Literal["limit", "rate", "concurrency", "hours"]
    name: str  # of the limit
    given: float  # s, requests/s, requests, or h
    pessimistic: float  # with the asked probability, of a limit alone
    probability: float  # of every target with this load, or with all relaxed limits


@dataclass(frozen=True)
class WaysOut:
    """What would meet the targets where nothing does."""

    change: (
        tuple[str, Scenario, Candidate] | None
    )  # the cheapest that the first change that helps allows
    relaxations: tuple[Relaxation, ...]


def find_ways_out(plan: Plan) -> WaysOut | None:
    """Find what would meet the targets; None where the plan does.

    Each follows from a search, or from the prediction of the closest deployment.
    """
    if plan.chosen:
        return None
    change = find_enabling_change(plan.scenario)
    relaxations = list(_relax_limits(plan.scenario, plan.best)) if plan.best else []
    for _, loads in try_each(_find_feasible_load, {"less load": plan}, "ways out"):
        relaxations += loads or ()
    return WaysOut(change, tuple(relaxations))


def _relax_limits(scenario: Scenario, best: Candidate) -> Iterator[Relaxation]:
    """List the latency limits that the closest deployment would meet; none if more is missing."""
    rows = list_limits(scenario, best) if best.prediction.performance else ()
    missed = [limit for limit in rows if limit.status != "met"]
    if all(limit.target and math.isfinite(limit.use.hi) for limit in missed):
        names, asked = {limit.name for limit in missed}, scenario.confidence
        z = compute_asked_tolerance(asked, best.p_memory)
        relaxed = [
            replace(odds, tolerance_sigmas=z, probability=asked) if odds.name in names else odds
            for odds in best.limits
        ]
        likely = combine_limits(relaxed, best.p_memory)  # less than each alone
        for limit in missed:
            yield Relaxation("limit", limit.name, limit.limit, limit.pessimistic, likely)


def _find_feasible_load(plan: Plan) -> tuple[Relaxation, ...]:
    """Find the largest load within the targets of the closest deployment, or a job's deadline."""
    scenario, load = plan.scenario, plan.scenario.workload
    if scenario.offline and plan.best and plan.performance:
        given, usable = (
            scenario.deadline_hours,
            plan.performance.request_tps * (1 - scenario.headroom),
        )
        if not given or not load.rate:
            return ()
        slow = given * load.rate / usable.lo
        return (Relaxation("hours", "deadline", given, slow, scenario.confidence),)
    if plan.best is None or scenario.found_figure or load.trace:
        return ()
    mended = {*(target.name for target in scenario.slo_targets), get_load_limit_name(scenario)}
    if not mended.issuperset(plan.best.violated_constraints):
        return ()  # less load does not help
    kind: Literal["rate", "concurrency"] = "rate" if load.rate is not None else "concurrency"
    wanted, steady = get_figure(scenario, kind), replace(scenario, daily_profile=None)
    largest = find_max_load(steady, plan.best, kind=kind)
    if not MIN_USEFUL_LOAD <= largest / wanted < 1 or (kind == "concurrency" and largest < 2):
        return ()
    return (Relaxation(kind, kind, wanted, largest, scenario.confidence),)
