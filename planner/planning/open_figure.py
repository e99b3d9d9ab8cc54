"""The figure that a scenario leaves open: the largest load, or the shortest limit, that anything keeps.

It is bisected: at each figure, what comes nearest to the targets in all the replicas that there may
be is tuned and stated as a search does it.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter

from planner.planning.candidate import MAX_PRICE_WITHOUT_STAGES, Candidate, has_inner_stages
from planner.planning.disaggregated_search import explain_skipped_pools, search_pools
from planner.planning.engine_tuning import tune_to_margin, tune_to_probability
from planner.planning.evaluation import may_be_feasible
from planner.planning.max_load import (
    LOAD_PRECISION,
    MIN_FIGURE,
    find_largest,
    get_figure,
    round_figure,
    set_figure,
)
from planner.planning.memory_odds import estimate_memory_probability
from planner.planning.scenario import Scenario
from planner.planning.scenario_schema import OpenFigure
from planner.planning.search_space import build_families, fits_in_machine, spans_machines
from planner.planning.slo import compute_asked_tolerance
from planner.planning.tolerance import EvaluationStore, state_deployment

ROUGH_PRECISION = 1.5
"""Of the closed form where it is only the start of a search."""
MAX_NEAREST = 3
"""Deployments that come nearest to the targets by short replays and have their arguments tuned."""


def settle_open_figure(scenario: Scenario, *, is_simulated: bool) -> Scenario:
    """Find the largest load, or the shortest limit, that any deployment keeps as asked.

    Returns `scenario` with that figure; with the easiest that was tried if not even that is kept.
    Without simulations the closed form answers.
    """
    kind = scenario.open_figure
    assert kind is not None

    def is_met_analytically(value: float) -> bool:
        asked = set_figure(scenario, kind, value)
        return any(
            family.most.is_confident
            for layouts in (fits_in_machine, spans_machines)
            for family in build_families(asked, layouts)[0]
        )

    precision = ROUGH_PRECISION if is_simulated else LOAD_PRECISION
    value = find_largest(is_met_analytically, 1.0, precision) or MIN_FIGURE
    if is_simulated:
        value = _find_best_figure(scenario, kind, value)
    settled = round_figure(kind, value or MIN_FIGURE)
    return replace(set_figure(scenario, kind, settled), found_figure=kind)


def ease_figure(scenario: Scenario) -> Scenario:
    """Return `scenario` with what was found for its open figure a little easier, if it can be."""
    kind = scenario.found_figure
    assert kind is not None
    value = round_figure(kind, get_figure(scenario, kind) / LOAD_PRECISION)
    return set_figure(scenario, kind, max(value, MIN_FIGURE))


def _find_best_figure(scenario: Scenario, kind: OpenFigure, start: float) -> float:
    """Find the largest figure; pipeline stages inside a machine have to raise it by half; 0 if none."""

    def is_met(value: float, *, inner_stages: bool = False) -> bool:
        asked = set_figure(scenario, kind, round_figure(kind, value))
        return any(map(attrgetter("is_confident"), _generate_strongest(asked, inner_stages)))

    is_met_by_all = partial(is_met, inner_stages=True)
    usual = find_largest(is_met, start)
    beyond = usual * MAX_PRICE_WITHOUT_STAGES
    if not usual or is_met_by_all(beyond):
        return find_largest(is_met_by_all, beyond or start)
    return usual


def _generate_strongest(scenario: Scenario, inner_stages: bool) -> Iterator[Candidate]:
    """Generate what comes nearest to the targets as a search states it: in a machine, over several, pools."""
    store = EvaluationStore(scenario)
    for layouts in (fits_in_machine, spans_machines)[: 1 + inner_stages]:
        asked = {
            family.most.deployment: compute_asked_tolerance(
                scenario.confidence, estimate_memory_probability(family.start)
            )
            for family in build_families(scenario, layouts)[0]
            if may_be_feasible(family.most)
            if inner_stages or not has_inner_stages(family.start)
        }
        margins = {each: store.get_margin(each, z) for each, z in asked.items() if math.isfinite(z)}
        for usual in sorted(margins, key=lambda each: margins[each])[:MAX_NEAREST]:
            tuned = tune_to_margin(store, usual, asked[usual])
            if store.is_met(tuned, asked[usual]):
                tuned = tune_to_probability(store, tuned, usual, scenario.confidence)
                yield state_deployment(scenario, tuned)
    if inner_stages and scenario.allow_disaggregation and not explain_skipped_pools(scenario):
        yield from search_pools(scenario, math.inf)
