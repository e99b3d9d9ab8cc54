"""The framework advice follows the stated rules, whatever the points are tuned to."""

import pytest

from planner.core.errors import PlannerError
from planner.hardware.gpus import get_gpu
from planner.planning.framework_choice import WorkloadTraits, choose_framework, load_frameworks

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
        (WorkloadTraits(hugging_face_stack=True), [H100], "tgi"),
        (WorkloadTraits(portability=True), [H100], "vllm"),
        (
            WorkloadTraits(portability=True, structured_or_agentic=True, prefix_reuse=True),
            [MI300X],
            "vllm",
        ),
    ],
)
def test_advice(traits: WorkloadTraits, gpus: list[str], chosen: str) -> None:
    assert choose_framework(traits, map(get_gpu, gpus)).chosen.name == chosen


def test_tensorrt_llm_is_ruled_out_on_amd() -> None:
    scores = {
        score.name: score for score in choose_framework(WorkloadTraits(), [get_gpu(MI300X)]).ranked
    }
    assert "does not serve" in scores["trtllm"].ruled_out


def points(name: str, traits: WorkloadTraits, *cards: str) -> int:
    return next(
        score.points
        for score in choose_framework(traits, map(get_gpu, cards)).ranked
        if score.name == name
    )


def test_sglang_is_portable_too_and_on_less_hardware_than_vllm() -> None:
    for cards in ((H100, MI300X), (MI300X,), (H100, "Arc Pro B60")):
        gained = {
            name: (
                points(name, WorkloadTraits(portability=True), *cards)
                - points(name, WorkloadTraits(), H100)
            )
            for name in ("vllm", "sglang")
        }
        assert 0 < gained["sglang"] < gained["vllm"]


def test_reused_prefixes_speak_for_every_engine_that_caches_them_by_default() -> None:
    for name in ("vllm", "sglang", "trtllm"):
        assert points(name, WorkloadTraits(prefix_reuse=True), H100) > points(
            name, WorkloadTraits(), H100
        )
    assert any("0.28" in rule.fact for rule in load_frameworks()["vllm"].rules)


def test_tgi_never_hides_its_maintenance_status() -> None:
    choice = choose_framework(WorkloadTraits(hugging_face_stack=True), [get_gpu(H100)])
    assert any("archived" in reason for reason in choice.reasons)


def test_every_fact_has_a_source_and_reaches_the_table() -> None:
    assert all(
        rule.source and rule.date for known in load_frameworks().values() for rule in known.rules
    )
    facts = choose_framework(WorkloadTraits(), [get_gpu(H100)]).list_facts()
    assert {fact["framework"] for fact in facts} == {
        known.title for known in load_frameworks().values()
    }


def test_no_gpu_is_one_clear_sentence() -> None:
    with pytest.raises(PlannerError, match="name at least one"):
        choose_framework(WorkloadTraits(), [])
