"""What would meet the targets where nothing does: other GPUs, formats or limits, less load."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from planner.answers.limits import list_limits
from planner.core.progress import try_each
from planner.planning.candidate import Candidate
from planner.planning.engine_tuning import HOPELESS_MARGIN
from planner.planning.evaluation import get_load_limit_name
from planner.planning.max_load import find_max_load, get_figure, set_figure
from planner.planning.open_figure import settle_open_figure
from planner.planning.plan import Plan
from planner.planning.scenario import Scenario
from planner.planning.search import search_analytically
from planner.planning.what_if import allow_formats, propose_changes, search_to_end

MAX_CHANGES_TRIED = 2
"""Changes that are searched for one that helps, beside other GPUs."""
MIN_USEFUL_LOAD = 0.01
"""Share of the load below which serving less is no way out."""


@dataclass(frozen=True)
class Relaxation:
    """A limit that the closest deployment would meet, or a load that the allowed GPUs serve."""

    kind: Literal["limit", "rate", "concurrency", "hours"]
    name: str  # of the limit
    given: float  # s, requests/s, requests, or h
    expected: float | None  # what would do at the expected speed
    pessimistic: float  # with the asked probability


@dataclass(frozen=True)
class WaysOut:
    """What would meet the targets where nothing does."""

    change: tuple[str, Scenario, Candidate] | None  # the best deployment that a change allows
    relaxations: tuple[Relaxation, ...]


def find_ways_out(plan: Plan) -> WaysOut | None:
    """Find what would meet the targets; None where the plan does.

    Each follows from a search, or from the prediction of the closest deployment.
    """
    if plan.chosen:
        return None
    change = _find_change(plan)
    relaxations = list(_relax_limits(plan.scenario, plan.best)) if plan.best else []
    for _, loads in try_each(_find_feasible_load, {"less load": plan}, "ways out"):
        relaxations += loads or ()
    return WaysOut(change, tuple(relaxations))


def _find_change(plan: Plan) -> tuple[str, Scenario, Candidate] | None:
    """Find what other formats on these GPUs, then more GPUs, then other kinds of GPU allow.

    Of what is probable enough the cheapest, else the likeliest.
    """
    given, options = plan.scenario, list[tuple[str, Scenario, Candidate]]()
    formats = allow_formats(given)  # all at once, so that none is searched alone again
    kept = ("workload", "slo_targets", "quantizations", "kv_cache_dtypes")
    proposed = [
        (change, each)
        for change, each in propose_changes(plan)
        if all(getattr(each, name) == getattr(given, name) for name in kept)
    ]
    others = proposed[MAX_CHANGES_TRIED:][-1:]  # on other GPUs
    first = [("other formats allowed", formats)] if formats else []
    searched = dict((*first, *proposed[:MAX_CHANGES_TRIED], *others))
    if _has_few_slots(given):  # the cheapest change, alone and beside the others
        free = {"as many adapter slots as serve best": given, **searched}
        searched = {change: _free_slots(each) for change, each in free.items()}
    for change, plans in try_each(search_to_end, searched, "ways out"):
        options += [(change, each.scenario, each.chosen) for each in plans or () if each.chosen]
        if options and options[-1][2].is_confident:
            break
    return min(options, key=lambda each: _rank_fix(each[2]), default=None)


def _has_few_slots(scenario: Scenario) -> bool:
    """Whether the scenario gives fewer slots than it has LoRA adapters."""
    return 0 < int(scenario.engine_args.get("max_loras") or 0) < scenario.workload.adapters


def _free_slots(scenario: Scenario) -> Scenario:
    """Let the search choose max_loras."""
    args = {name: value for name, value in scenario.engine_args.items() if name != "max_loras"}
    return replace(scenario, engine_args=args)


def _rank_fix(candidate: Candidate) -> tuple[object, ...]:
    """Sort what would do by its price, and what is less probable than asked by that."""
    if candidate.is_confident:
        return False, candidate.cost_key
    return True, -candidate.probability, candidate.cost_key


def _relax_limits(scenario: Scenario, best: Candidate) -> Iterator[Relaxation]:
    """List the latency limits that the closest deployment would meet; none if more is missing."""
    rows = list_limits(scenario, best) if best.prediction.performance else ()
    missed = [limit for limit in rows if limit.status != "met"]
    if all(limit.target and math.isfinite(limit.use.hi) for limit in missed):
        for limit in missed:
            yield Relaxation("limit", limit.name, limit.limit, limit.value, limit.pessimistic)


def _find_feasible_load(plan: Plan) -> tuple[Relaxation, ...]:
    """Find the largest load within the targets on the allowed GPUs, or a job's deadline.

    At the expected speed it is that of the closest deployment.
    """
    scenario, load = plan.scenario, plan.scenario.workload
    if scenario.offline and plan.best and plan.performance:
        given, usable = (
            scenario.deadline_hours,
            plan.performance.request_tps * (1 - scenario.headroom),
        )
        if not given or not load.rate:
            return ()
        expected, slow = (given * load.rate / rate for rate in (usable.mid, usable.lo))
        return (Relaxation("hours", "deadline", given, expected, slow),)
    if plan.best is None or scenario.found_figure or load.trace:
        return ()
    mended = {*(target.name for target in scenario.slo_targets), get_load_limit_name(scenario)}
    if not mended.issuperset(plan.best.violated_constraints):
        return ()  # less load does not help
    kind: Literal["rate", "concurrency"] = "rate" if load.rate is not None else "concurrency"
    easier = replace(scenario, open_figure=kind, daily_profile=None)
    least = set_figure(easier, kind, MIN_USEFUL_LOAD * get_figure(scenario, kind))
    if all(
        each.limit_utilization > HOPELESS_MARGIN for each in search_analytically(least).candidates
    ):
        return ()
    most = settle_open_figure(easier, is_simulated=True).workload
    wanted, largest = (
        (load.rate, most.rate) if kind == "rate" else (load.concurrency, most.concurrency)
    )
    if not wanted or not largest or not MIN_USEFUL_LOAD <= largest / wanted < 1:
        return ()
    if kind == "concurrency" and largest < 2:
        return ()
    expected = find_max_load(easier, plan.best, 0.0, kind)
    at_expected = min(expected, wanted) if expected >= largest else None
    return (Relaxation(kind, kind, wanted, at_expected, largest),)
