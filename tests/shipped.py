"""The plans of the shipped scenarios, each searched for once in a test run."""

from functools import cache

from planner.scenario import load_scenario
from planner.search import Plan, search


@cache
def plan_of(name: str) -> Plan:
    """The plan of a shipped scenario."""
    return search(load_scenario(name))
