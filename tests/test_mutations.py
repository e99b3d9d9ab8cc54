"""Whatever stands in a configuration or a scenario: a sentence that says what is wrong, or finite figures."""

import copy
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from planner.core.catalog import read_yaml
from planner.core.quantities import PlannerError
from planner.facts.deployment import deploy_on
from planner.facts.workload import Lengths, Workload
from planner.memory.budget import TERMS, MemoryPlan, longest_model_len, plan
from planner.memory.limits import safe_max_num_seqs
from planner.models.registry import _catalog, model, models
from planner.planning.scenario import scenario, scenario_path
from planner.planning.search import search
from planner.studies.kv_equation import kv_table, kv_worked
from planner.studies.summary import subject

pytestmark = pytest.mark.slow

WRONG: list[Any] = [None, -7, 0, 1, 37, 65536, 10**18, 1.5, math.nan, math.inf, "banana", True, [1, "x"], {"a": 1}]
CHAT = Workload(Lengths.lognormal(1000, 3000), Lengths.lognormal(200, 600), rate=1.0)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of nested mappings and lists."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield data, key
        if isinstance(value, dict | list):
            yield from places(value)


def mutate(data: Any, rng: random.Random) -> None:
    """Drop, replace or scale one value, numbers rather than others."""
    everywhere = list(places(data))
    numbers = [(at, key) for at, key in everywhere if isinstance(at[key], int | float)]
    at, key = rng.choice(numbers if numbers and rng.random() < 0.6 else everywhere)
    if rng.random() < 0.1:
        del at[key]
    elif isinstance(at[key], int | float) and rng.random() < 0.5:
        at[key] = at[key] * rng.choice([-1, 1e-9, 0.1, 2, 10, 1000])
    else:
        at[key] = rng.choice(WRONG)


def finite(found: MemoryPlan) -> None:
    """No NaN in the plan, in what it prints, or in what rests on it."""
    assert sum(found.parts.values()) == found.total
    for name in (*TERMS, "kv_available", "max_concurrency"):
        interval = getattr(found, name)
        assert -math.inf < interval.lo <= interval.mid <= interval.hi < math.inf, name
    safe_max_num_seqs(found, CHAT)
    longest_model_len(found)
    printed = str(found) + found.remedy + kv_table(found).to_string() + kv_worked(found)
    assert not re.search(r"\b(nan|inf)\b", printed)


def told(error: PlannerError) -> bool:
    """It is one sentence of a readable length."""
    return "\n" not in str(error) and 10 < len(str(error)) < 900


def test_a_mutated_configuration_is_planned_or_refused() -> None:
    rng, planned = random.Random(1), 0
    names = [name for name in models() if _catalog()[0][name].base is None]
    for _ in range(120):
        config = copy.deepcopy(_catalog()[0][rng.choice(names)].config)
        mutate(config, rng)
        try:
            found = plan(deploy_on(model(config), rng.choice(["H200", "L4", "MI300X"]), tp=rng.choice([1, 2, 8])))
        except PlannerError as error:
            assert told(error)
        else:
            planned += 1
            finite(found)
    assert planned > 20


def test_a_mutated_scenario_is_answered_or_refused() -> None:
    rng, answered = random.Random(2), 0
    extras = {"memory_calibration": {"weights": 0.1}, "engine_args": {"max_num_seqs": 64}, "other_tenants_gib": 1}
    for _ in range(60):
        data = {**extras, **read_yaml(scenario_path("edge-8b-24gb"))}
        data["gpus"] = data["gpus"][:1]
        data = copy.deepcopy(data)
        mutate(data, rng)
        try:
            found = search(scenario(data, "mine"))
        except PlannerError as error:
            assert told(error)
        else:
            answered += 1
            finite(plan(subject(found)))
            assert not re.search(r"\bnan\b", str(found))
    assert answered > 10
