"""Whatever stands in a configuration or a scenario: a sentence that says what is wrong, or finite figures."""

import copy
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from shipped import sampled

from planner.analysis.memory_sweeps import build_kv_table
from planner.core.errors import PlannerError
from planner.core.readers import read_yaml
from planner.engines.deployment import deploy_on
from planner.memory.concurrency_limits import find_safe_max_num_seqs
from planner.memory.memory_plan import MEMORY_TERMS, MemoryPlan, find_max_model_len, plan_memory
from planner.models.registry import _load_model_catalog, list_models, load_model
from planner.planning.plan import get_reference_deployment
from planner.planning.scenario import find_scenario_file, parse_scenario
from planner.planning.search import search_deployments
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

pytestmark = pytest.mark.slow

WRONG: list[Any] = [
    None,
    -7,
    0,
    1,
    37,
    65536,
    10**18,
    1.5,
    math.nan,
    math.inf,
    "banana",
    True,
    [1, "x"],
    {"a": 1},
]
CHAT = Workload(
    LengthDistribution.from_lognormal(1000, 3000),
    LengthDistribution.from_lognormal(200, 600),
    rate=1.0,
)


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
    assert sum(found.bytes_by_part.values()) == found.total_bytes
    for name in (*MEMORY_TERMS, "kv_available", "max_concurrency"):
        interval = getattr(found, name)
        assert -math.inf < interval.lo <= interval.mid <= interval.hi < math.inf, name
    find_safe_max_num_seqs(found, CHAT)
    find_max_model_len(found)
    printed = str(found) + found.remedy + build_kv_table(found).to_string()
    assert not re.search(r"\b(nan|inf)\b", printed)


def told(error: PlannerError) -> bool:
    """It is one sentence of a readable length."""
    return "\n" not in str(error) and 10 < len(str(error)) < 900


def test_a_mutated_configuration_is_planned_or_refused() -> None:
    rng, planned = random.Random(1), 0
    names = [name for name in list_models() if _load_model_catalog()[0][name].base is None]
    for _ in range(120):
        config = copy.deepcopy(_load_model_catalog()[0][rng.choice(names)].config)
        mutate(config, rng)
        try:
            found = plan_memory(
                deploy_on(
                    load_model(config),
                    rng.choice(["H200", "L4", "MI300X"]),
                    tp=rng.choice([1, 2, 8]),
                )
            )
        except PlannerError as error:
            assert told(error)
        else:
            planned += 1
            finite(found)
    assert planned > 20


@pytest.mark.parametrize("times", sampled((20, 100), [20]))
def test_a_mutated_scenario_is_answered_or_refused(times: int) -> None:
    rng, answered = random.Random(2), 0
    extras = {
        "memory_calibration": {"weights": 0.1},
        "engine_args": {"max_num_seqs": 64},
        "other_tenants_gib": 1,
    }
    for _ in range(times):
        data = {**extras, **read_yaml(find_scenario_file("edge-8b-24gb"))}
        data["gpus"] = data["gpus"][:1]
        data = copy.deepcopy(data)
        mutate(data, rng)
        try:
            found = search_deployments(parse_scenario(data, "mine"))
        except PlannerError as error:
            assert told(error)
        else:
            answered += 1
            finite(plan_memory(get_reference_deployment(found)))
            assert not re.search(r"\bnan\b", str(found))
    assert answered > times / 6
