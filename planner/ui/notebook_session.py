"""How every chapter of the walk opens: with the plan of what the cockpit asked, searched for once and kept.

The question is a file, `current.yaml` beside the notebooks; what a chapter changed of it is
another, `changes.yaml`.
"""

import hashlib
import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from platformdirs import user_cache_path

from planner.core.catalog import compute_build_digest
from planner.core.files import replace_atomically
from planner.core.readers import read_yaml
from planner.models.registry import load_model
from planner.planning.scenario import Scenario, load_scenario
from planner.planning.search import Plan, search_deployments
from planner.tools.fleet.allocation import FleetPlan
from planner.tools.fleet.fleet_file import plan_fleet

CURRENT_SCENARIO, DEFAULT_SCENARIO = "current", "chat-70b"
"""What chapters open unless told otherwise, and what that is before the cockpit has saved anything."""
CURRENT_SCENARIO_FILE, CHANGES_FILE = Path("current.yaml"), Path("changes.yaml")
CachedT = TypeVar("CachedT")
MAX_CACHED_PLANS = 50
"""Answers that are kept; the oldest go."""


def open_plan(scenario: str | Path, kept: str | Path = "") -> Plan:
    """The plan of `scenario` ("current", a shipped one, or a YAML file), or the pickled one in the file `kept`."""
    return (
        _load_pickle(Path(kept), Plan) if kept else search_cached(load_current_scenario(scenario))
    )


def open_plans(scenarios: str, kept: str | Path = "") -> tuple[Plan, ...]:
    """The plans of several questions, their names or files parted by commas, or the pickled ones in the file `kept`."""
    if kept:
        return tuple(_load_pickle(Path(kept), list))
    return tuple(
        search_cached(load_current_scenario(name.strip())) for name in scenarios.split(",")
    )


def open_fleet_plan(fleet: str | Path, kept: str | Path = "") -> FleetPlan:
    """The answer to the file `fleet` (empty: that of `planner init --kind fleet`), or the one in the file `kept`."""
    path = Path(fleet) if fleet else Path(__file__).with_name("templates") / "fleet.yaml"
    return _load_pickle(Path(kept), FleetPlan) if kept else plan_fleet(path)


def _load_pickle(kept: Path, kind: type[CachedT]) -> CachedT:
    value = pickle.loads(kept.read_bytes())
    assert isinstance(value, kind)
    return value


def load_current_scenario(
    scenario: str | Path = CURRENT_SCENARIO, *, changed: bool = True
) -> Scenario:
    """What is asked; "current" is what the cockpit saved, with what chapters `changed` of it since."""
    if scenario != CURRENT_SCENARIO:
        return load_scenario(scenario)
    return load_scenario(
        CURRENT_SCENARIO_FILE if CURRENT_SCENARIO_FILE.is_file() else DEFAULT_SCENARIO,
        load_changes() if changed else {},
    )


def filter_carried_fields(
    scenario: str | Path, fields: Mapping[str, CachedT]
) -> Mapping[str, CachedT]:
    """`fields` that controls may change for the whole walk; none where it is about another question."""
    return fields if scenario == CURRENT_SCENARIO else {}


def load_changes() -> dict[str, Any]:
    """What chapters changed of the question, by field, as `--set` takes it."""
    found = read_yaml(CHANGES_FILE) if CHANGES_FILE.is_file() else {}
    return dict(found) if isinstance(found, dict) else {}


def save_changes(fields: Mapping[str, Any]) -> None:
    """Carry on with these fields changed, beside those that are already; without any, with the question as it was."""
    told = {**load_changes(), **fields} if fields else {}
    with replace_atomically(CHANGES_FILE) as (part,):
        part.write_text(yaml.safe_dump(told, sort_keys=False, allow_unicode=True), encoding="utf-8")


def search_cached(scenario: Scenario) -> Plan:
    """`search`, or its answer of an earlier time: to the same question, by the same program with the same catalogs."""
    place = user_cache_path("headroom") / f"{_compute_cache_key(scenario)}.pickle"
    with suppress(Exception):  # whatever is wrong with what was kept, it can be worked out again
        plan = _load_pickle(place, Plan)
        os.utime(place)
        vars(plan)["scenario"] = (
            scenario  # not `replace`, which would forget the day that is kept with it
        )
        return plan
    plan = search_deployments(scenario)
    _ = plan.billing  # a day is worked out here, and kept with the plan
    with suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = place.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(plan))
        part.replace(place)
        for old in sorted(place.parent.glob("*.pickle"), key=os.path.getmtime)[:-MAX_CACHED_PLANS]:
            old.unlink(missing_ok=True)
    return plan


def _compute_cache_key(scenario: Scenario) -> str:
    """What the answer to `scenario` hangs on, as one word."""
    digest = hashlib.sha256(
        repr((compute_build_digest(), replace(scenario, files=(), name="", question=""))).encode()
    )
    for quantization in scenario.quantizations:
        model = load_model(scenario.model, quantization=quantization)
        digest.update(repr((model.architecture, model.quantization, model.dtype)).encode())
    for path in scenario.files[1:]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
