"""Plans that many tests look at, each searched for once in a test run; samples; and what a chart draws."""

import fcntl
import os
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from altair import TopLevelMixin

from planner.answers import Answer, build_answer
from planner.core.units import GIB
from planner.latency.performance import Performance
from planner.planning.plan import Plan
from planner.planning.scenario import Scenario, apply_overrides, load_scenario, parse_scenario
from planner.planning.table_rows import ENGINE_ARG_COLUMNS
from planner.queueing.steady_state import LoadCase, solve_closed_loops, solve_open_loops
from planner.tools import answer_store
from planner.ui.notebook_session import _compute_plan_key, search_cached

KEPT = Path(os.environ["XDG_CACHE_HOME"])
"""The folder of the run, as `conftest.py` makes it, before a test has a cache of its own."""
SMALL: dict[str, Any] = {
    "question": "?",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "gpus": [{"gpu": "L40S", "at_most": 4}],
    "workload": {
        "prompt_tokens": {"mean": 900, "p95": 2200},
        "output_tokens": {"mean": 150, "p95": 400},
        "rate": 9,
    },
    "service_level": {"ttft": {"p95": 2000}, "tpot": {"p95": 80}},
}
"""A scenario that is searched in a fraction of a second, for tests that need any."""
_PLANS: dict[tuple[str, str, str], Plan] = {}


def small_fields(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`SMALL` with other fields, by dotted names; None leaves one out."""
    return apply_overrides(SMALL, changes or {}, "small")


def small_scenario(changes: Mapping[str, Any] | None = None, folder: Path = Path()) -> Scenario:
    """The scenario of `small_fields`."""
    return parse_scenario(small_fields(changes), "small", folder)


def small_plan(changes: Mapping[str, Any] | None = None) -> Plan:
    """The plan of `small_scenario`, searched for once."""
    return plan_once(small_scenario(changes))


@cache
def plan_of(name: str) -> Plan:
    """The plan of a shipped scenario."""
    return plan_once(load_scenario(name))


def plan_once(scenario: Scenario) -> Plan:
    """The plan of `scenario`: one worker of the run searches for it, and notebooks find it as well.

    Not for tests that patch what the search rests on: who asks next would get their plan.
    """
    key = _compute_plan_key(scenario)
    asked = (key, scenario.name, scenario.question)
    if asked not in _PLANS:
        with (
            (KEPT / f"{key}.lock").open("w") as lock,
            pytest.MonkeyPatch.context() as patched,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            patched.setenv("XDG_CACHE_HOME", str(KEPT))
            patched.setattr(answer_store, "MAX_KEPT_PLANS", 10_000)
            _PLANS[asked] = search_cached(scenario)
    return _PLANS[asked]


def sampled(values: Iterable[Any], sample: Collection[Any]) -> list[ParameterSet]:
    """`values` as a test's parameters, tuples as several; those not in `sample` are for `make test-all`."""
    values = list(values)
    assert all(value in values for value in sample)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in sample else pytest.mark.exhaustive,
        )
        for value in values
    ]


def row_of(plan: Plan) -> dict[str, str]:
    """The chosen deployment of `plan` as a row for `predict_row`, but for its prices, which are the catalog's there."""
    assert plan.chosen is not None
    deployment, workload, scenario = (
        plan.chosen.deployment,
        plan.chosen.prediction.workload,
        plan.scenario,
    )
    assert workload is not None
    wanted = next(candidate for candidate in scenario.gpus if candidate.gpu == deployment.gpu)
    layout, args, trace = deployment.layout, deployment.args, scenario.workload.trace
    row: dict[str, object] = {
        "id": scenario.name, "model": scenario.model, "gpu": deployment.gpu.name,
        "engine": deployment.engine.name,
        "engine_version": deployment.engine.version, "interconnect": wanted.interconnect,
        "gpus_per_node": wanted.gpus_per_node,
        "quantization": scenario.quantizations[plan.chosen.preference_key[0]],
        **{size: getattr(layout, size) for size in ("tp", "pp", "dp", "ep", "dcp", "replicas")},
        **{name: getattr(args, name) for name in ENGINE_ARG_COLUMNS},
        "other_tenants_gib": deployment.other_tenants_bytes / GIB,
        "request_rate": workload.rate, "concurrency": workload.concurrency,
        "burstiness": workload.burstiness,
        "prefix_tokens": workload.prefix_tokens, "prefix_hit_rate": workload.prefix_hit_rate,
        "adapters": workload.adapters, "adapter_zipf": workload.adapter_zipf,
        "num_prompts": workload.num_prompts, "trace": trace and trace.path.absolute(),
    }  # fmt: skip
    for name, lengths in (
        ("isl", workload.prompt),
        ("osl", workload.output),
    ):  # a trace's lengths were not asked for
        row |= {
            name if what == "mean" else f"{name}_{what}": value
            for what, value in lengths.given_figures.items()
        }
    given = scenario.speculation
    if given and deployment.speculation:
        row |= {
            "speculative_method": given.method,
            "num_speculative_tokens": deployment.num_draft_tokens,
        }
        row |= {"acceptance_rate": given.acceptance_rate, "draft_model": given.draft_model}
    return {name: str(value) for name, value in row.items() if value is not None}


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


_ANSWERS: dict[int, tuple[Plan, Answer]] = {}


def answer_of(plan: Plan) -> Answer:
    """Everything that is told of `plan`, worked out once."""
    if id(plan) not in _ANSWERS:
        _ANSWERS[id(plan)] = plan, build_answer(plan)
    return _ANSWERS[id(plan)][1]
