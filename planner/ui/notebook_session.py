"""Open the plan that a notebook shows: searched for once, and kept for the next one.

The scenario is `current.yaml` beside the notebooks, which the cockpit saves. Fields that a notebook
changed are in `changes.yaml`.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from planner.analysis.layout_tables import Study, begin_study
from planner.answers import Answer, build_answer
from planner.core.errors import PlannerError
from planner.core.files import (
    find_private_folder,
    read_pickle,
    replace_atomically,
    write_pickle,
)
from planner.core.progress import UNWATCHED, try_each, watch_progress
from planner.core.readers import read_yaml
from planner.models.registry import load_model
from planner.planning.plan import Plan
from planner.planning.scenario import Scenario, load_scenario
from planner.planning.search import search_deployments
from planner.planning.what_if import WhatIf, propose_changes, search_to_end
from planner.tools.answer_store import compute_answer_key, hash_file, prune_pickles
from planner.tools.fleet.allocation import FleetPlan, plan_fleet
from planner.ui.progress_line import draw_in_notebook

CURRENT_SCENARIO = "current"
"""What notebooks open by default: the scenario that the cockpit saved."""
DEFAULT_SCENARIO = "chat-70b"
"""The current scenario before the cockpit has saved any."""
CURRENT_SCENARIO_FILE, CHANGES_FILE = Path("current.yaml"), Path("changes.yaml")
OpenedPlan = Plan
"""What `open_plan` returns, for those who only show it."""


def open_plan(scenario: str | Path, kept: str | Path = "", time_limit_s: float = math.inf) -> Plan:
    """Return the plan in the pickle `kept`; without one that of `scenario`.

    `scenario` is "current", the name of a shipped one, or a YAML file. A search ends after
    `time_limit_s`. From here on the notebook shows the progress of its cells.
    """
    if kept:
        return read_pickle(Path(kept), Plan)
    UNWATCHED.draw = draw_in_notebook
    with watch_progress(time_limit_s):
        return search_cached(load_current_scenario(scenario))


def open_answer(plan: Plan) -> Answer:
    """Return the answer of an opened plan; that of a report is there already."""
    return plan if isinstance(plan, Answer) else build_answer(plan)


def add_changes(answer: Answer, time_limit_s: float = math.inf) -> Iterator[Answer]:
    """Yield `answer` with one what-if more each time, searched for up to `time_limit_s`.

    None where it has them. An interruption of the kernel ends the search of one; what was found is
    kept, so that the same cell goes on from there when it runs again.
    """
    changes, left_out = list[WhatIf](), list[str]()
    for name, scenario in propose_changes(answer) if answer.changes is None else ():
        with watch_progress(time_limit_s) as watch:
            tried = try_each(
                partial(search_to_end, search=search_cached), {name: scenario}, "what-if"
            )
            found = [WhatIf(name, each) for _, plans in tried for each in plans or ()]
            left_out += filter(None, [watch.describe_left_out()])
        changes += [each for each in found if answer.chosen or each.plan.chosen]
        yield answer.with_changes(changes, left_out)


def open_study(
    scenario: str | Path, kept: str | Path = "", time_limit_s: float = math.inf, *,
    fits: bool = False,
) -> Study:  # fmt: skip
    """Return what a chapter studies of the plan of `open_plan`.

    With `fits`, where nothing fits it is the plan after the first change with which something does.
    """
    answered = open_plan(scenario, kept, time_limit_s)
    return begin_study(answered, scenario == CURRENT_SCENARIO, fits=fits)


def allow_pools(plan: Plan) -> Plan:
    """Return `plan`, or that of its scenario with pools allowed."""
    if plan.scenario.allow_disaggregation:
        return plan
    return search_cached(replace(plan.scenario, allow_disaggregation=True))


def open_plans(
    scenarios: str, kept: str | Path = "", time_limit_s: float = math.inf
) -> tuple[Plan, ...]:
    """Return the plans in the pickle `kept`; without one those of comma-separated `scenarios`."""
    if kept:
        return tuple(read_pickle(Path(kept), list))
    return tuple(
        open_plan(name.strip(), time_limit_s=time_limit_s) for name in scenarios.split(",")
    )


def open_fleet_plan(
    fleet: str | Path, kept: str | Path = "", time_limit_s: float = math.inf
) -> FleetPlan:
    """Return the plan in the pickle `kept`; without one that of the file `fleet`.

    Without either it is that of `headroom init --kind fleet`.
    """
    path = Path(fleet) if fleet else Path(__file__).with_name("templates") / "fleet.yaml"
    if kept:
        return read_pickle(Path(kept), FleetPlan)
    with watch_progress(time_limit_s, draw_in_notebook):
        return plan_fleet(path)


def load_current_scenario(
    scenario: str | Path = CURRENT_SCENARIO, *, changed: bool = True
) -> Scenario:
    """Load `scenario`; "current" is the cockpit's, with the changes of notebooks if `changed`."""
    if scenario != CURRENT_SCENARIO:
        return load_scenario(scenario)
    return load_scenario(
        CURRENT_SCENARIO_FILE if CURRENT_SCENARIO_FILE.is_file() else DEFAULT_SCENARIO,
        load_changes() if changed else {},
    )


def load_changes() -> dict[str, Any]:
    """Return the values that notebooks set in the current scenario, by field as for `--set`."""
    changes = read_yaml(CHANGES_FILE) if CHANGES_FILE.is_file() else {}
    return dict(changes) if isinstance(changes, dict) else {}


def save_changes(fields: Mapping[str, object]) -> None:
    """Set `fields` in the current scenario as well; without any, undo all changes."""
    with replace_atomically(CHANGES_FILE, updating=True) as (part,):
        changes = {**load_changes(), **fields} if fields else {}
        text = yaml.safe_dump(changes, sort_keys=False, allow_unicode=True)
        part.write_text(text, encoding="utf-8")


def search_cached(scenario: Scenario) -> Plan:
    """Return the plan of `scenario`, from the cache if the same build has searched for it."""
    folder = find_private_folder()
    path = folder / f"{_compute_plan_key(scenario)}.pickle" if folder else None
    if path:
        with suppress(Exception):  # an unreadable or distrusted file is searched for again
            plan = read_pickle(path, Plan)
            os.utime(path)
            named = {name: getattr(scenario, name) for name in ("name", "question", "files")}
            return replace(plan, scenario=replace(plan.scenario, **named))
    plan = search_deployments(scenario)
    plan = replace(plan, simulated_day=plan.autoscaling)
    if path and not plan.left_out:
        with suppress(PlannerError, OSError):
            write_pickle(path, plan)
            prune_pickles(path.parent)
    return plan


def _compute_plan_key(scenario: Scenario) -> str:
    """Return a digest of all that decides the plan of `scenario`; its name and question do not."""
    models = [
        load_model(scenario.model, quantization=quantization)
        for quantization in scenario.quantizations
    ]
    question = [
        repr(replace(scenario, files=(), name="", question="")),
        [repr((model.architecture, model.quantization, model.dtype)) for model in models],
        [hash_file(path) for path in scenario.files[1:]],
    ]
    return compute_answer_key("plan", question, Path())
