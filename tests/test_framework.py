"""The framework advice follows the stated rules, question by question."""

import pytest

from planner.core.errors import PlannerError
from planner.engines.engine import list_engines
from planner.hardware.gpus import get_gpu
from planner.planning.framework_choice import (
    WorkloadTraits,
    choose_framework,
    load_framework_questions,
)
from planner.planning.scenario import load_scenario

H100, MI300X = "H100 SXM", "MI300X"


@pytest.mark.parametrize(
    ("traits", "gpus", "chosen"),
    [
        (WorkloadTraits(), [H100], "vllm"),
        (WorkloadTraits(structured_or_agentic=True, prefix_reuse=True), [H100], "sglang"),
        (WorkloadTraits(structured_or_agentic=True), [H100], "vllm"),
        (WorkloadTraits(prefix_reuse=True), [H100], "vllm"),
        (WorkloadTraits(fixed_shapes=True, rebuild_acceptable=True), [H100], "trtllm"),
        (WorkloadTraits(fixed_shapes=True), [H100], "vllm"),
        (WorkloadTraits(fixed_shapes=True, rebuild_acceptable=True), [H100, "L40S"], "vllm"),
        (WorkloadTraits(fixed_shapes=True, rebuild_acceptable=True), [H100, MI300X], "vllm"),
        (WorkloadTraits(fixed_shapes=True, rebuild_acceptable=True), [MI300X], "vllm"),
        (WorkloadTraits(portability=True), [H100], "vllm"),
        (WorkloadTraits(portability=True, structured_or_agentic=True, prefix_reuse=True), [MI300X], "vllm"),
    ],
)  # fmt: skip
def test_advice(traits: WorkloadTraits, gpus: list[str], chosen: str) -> None:
    assert choose_framework(traits, map(get_gpu, gpus)).engine == chosen


def test_no_trait_advises_a_project_that_was_archived() -> None:
    """huggingface/text-generation-inference is read-only since 2026-03-21."""
    assert {each.engine for each in load_framework_questions()} <= set(list_engines())


def test_a_scenario_that_names_it_is_refused() -> None:
    with pytest.raises(PlannerError, match="engine: tgi was archived in March 2026"):
        load_scenario("chat-70b", {"engine": ["vllm", "tgi"], "engine_version": None})


def test_every_fact_has_a_source() -> None:
    assert all(each.source and each.date for each in load_framework_questions())


def test_a_gpu_that_nothing_serves_on_is_one_clear_sentence() -> None:
    with pytest.raises(PlannerError, match="no known framework serves on MI100"):
        choose_framework(WorkloadTraits(), [get_gpu("MI100")])
