"""The plans of the shipped scenarios, each searched for once in a test run; and what a chart draws."""

from functools import cache
from typing import Any

from altair import TopLevelMixin

from planner.latency.performance import Performance
from planner.planning.scenario import load_scenario
from planner.planning.search import Plan
from planner.queueing.steady_state import LoadCase, solve_closed_loops, solve_open_loops
from planner.ui.notebook_session import search_cached


@cache
def plan_of(name: str) -> Plan:
    """The plan of a shipped scenario."""
    return search_cached(load_scenario(name))


def drawn_rows(chart: TopLevelMixin, key: str) -> dict[Any, dict[str, Any]]:
    """The rows of a chart's data that have the column `key`, by its value."""
    datasets = chart.to_dict()["datasets"].values()
    return {row[key]: row for rows in datasets for row in rows if key in row}


def closed_loop(*case: Any) -> Performance:
    """`closed_loops` of one `Case`, given by its fields."""
    return solve_closed_loops([LoadCase(*case)])[0]


def open_loop(*case: Any) -> Performance:
    """`open_loops` of one `Case`, given by its fields."""
    return solve_open_loops([LoadCase(*case)])[0]
