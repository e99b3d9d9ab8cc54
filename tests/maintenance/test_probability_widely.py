"""What `test_probability.py` looks at in small, more widely."""

from typing import Any

from test_probability import MODEL

from planner.answers import build_answer
from planner.planning.scenario import parse_scenario
from planner.planning.search import search_deployments
from planner.planning.what_if import find_unlisted_gpu
from planner.ui.plan_text import format_answer


def test_a_gpu_that_is_not_listed_is_cheaper_and_holds_when_it_is() -> None:
    entry: dict[str, Any] = {
        "question": "?", "model": MODEL, "gpus": [{"gpu": "L40S", "at_most": 8}],
        "quantization": ["fp8"],
        "workload": {"prompt_tokens": {"exactly": 1000}, "output_tokens": {"exactly": 250}, "rate": 20},
        "service_level": {"ttft": {"p95": 1500}, "tpot": {"p95": 50}},
    }  # fmt: skip
    plan = search_deployments(parse_scenario(entry, "asked"))
    found = find_unlisted_gpu(plan)
    assert found and plan.chosen
    candidate, _ = found
    assert candidate.cost_key < plan.chosen.cost_key and candidate.is_confident
    name = candidate.deployment.gpu.name
    listed = parse_scenario({**entry, "gpus": [{"gpu": name, "at_most": 8}]}, "listed")
    best = search_deployments(listed).chosen
    assert best and best.cost_key <= candidate.cost_key
    shown = format_answer(build_answer(plan))
    assert f"{name}, TP" in shown and "not listed" in shown
