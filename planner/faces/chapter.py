"""How every chapter of the walk opens: with the plan of its scenario, searched for once."""

import pickle
from pathlib import Path

from planner.planning.scenario import load_scenario
from planner.planning.search import Plan, search


def open_chapter(scenario: str | Path, kept: str | Path = "") -> Plan:
    """The plan of `scenario` (a shipped one, or a YAML file), or the pickled one in the file `kept`."""
    if not kept:
        return search(load_scenario(scenario))
    plan = pickle.loads(Path(kept).read_bytes())
    assert isinstance(plan, Plan)
    return plan
