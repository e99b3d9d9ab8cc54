"""Pools against whole replicas: preferred where they cost less and hold at every pessimistic end, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from planner.planning.pools import best_pools, preferred
from planner.planning.scenario import Scenario, scenario
from planner.planning.search import search


def asked(prompt: int, output: int, rate: float, level: dict[str, Any]) -> Scenario:
    workload = {
        "prompt_tokens": {"mean": prompt, "p95": 1.5 * prompt},
        "output_tokens": {"mean": output, "p95": 2 * output},
    }
    data = {"question": "?", "model": "meta-llama/Llama-3.1-8B-Instruct", "gpus": [{"gpu": "H100-SXM", "at_most": 8}],
            "workload": {**workload, "rate": rate}, "service_level": level, "pools": True}  # fmt: skip
    return scenario(data, "pools")


@pytest.mark.parametrize(
    ("prompt", "output", "rate", "ttft", "itl"),
    ((6000, 150, 6, 4000, 25), (3000, 200, 10, 3000, 16), (5000, 150, 7, 4000, 22)),
)
def test_long_prompts_beside_a_strict_gap_between_tokens_are_cheaper_in_pools(
    prompt: int, output: int, rate: float, ttft: float, itl: float
) -> None:
    question = asked(prompt, output, rate, {"ttft": {"p95": ttft}, "itl": {"p99": itl}})
    plan, pools = search(question), best_pools(question)
    assert pools and preferred(plan, pools) and pools.found.meets and not pools.found.at_risk
    assert plan.chosen is None or pools.cost < plan.chosen.cost


@pytest.mark.parametrize(("prompt", "output", "rate"), ((500, 200, 10), (1000, 300, 4), (200, 500, 6)))
def test_short_prompts_and_an_easy_pace_are_not(prompt: int, output: int, rate: float) -> None:
    question = asked(prompt, output, rate, {"ttft": {"p95": 1500}, "tpot": {"p95": 50}})
    plan, pools = search(question), best_pools(question)
    assert plan.chosen and pools and not preferred(plan, pools) and pools.cost >= plan.chosen.cost
