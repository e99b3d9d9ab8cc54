"""The framework advice follows the stated rules, whatever the points are tuned to."""

from itertools import product

import pytest

from planner.core.errors import PlannerError
from planner.engines.engine import get_engine
from planner.hardware.gpus import get_gpu
from planner.planning.framework_choice import (
    WorkloadTraits,
    choose_framework,
    explain_engines,
    load_frameworks,
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
        (WorkloadTraits(hugging_face_stack=True), [H100], "vllm"),
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


def test_no_trait_advises_a_project_that_was_archived() -> None:
    """huggingface/text-generation-inference is read-only since 2026-03-21."""
    names = WorkloadTraits.__dataclass_fields__
    for held in product((False, True), repeat=len(names)):
        traits = WorkloadTraits(**dict(zip(names, held, strict=True)))
        for cards in ([H100], ["T4"], [MI300X]):
            choice = choose_framework(traits, map(get_gpu, cards))
            (tgi,) = (score for score in choice.ranked if score.name == "tgi")
            assert choice.chosen.name != "tgi" and tgi.ruled_out
    assert "archived in March 2026" in tgi.ruled_out


def test_a_scenario_that_names_it_is_refused() -> None:
    with pytest.raises(PlannerError, match="engine: tgi was archived in March 2026"):
        load_scenario("chat-70b", {"engine": ["vllm", "tgi"], "engine_version": None})
    assert explain_engines(WorkloadTraits(), [get_gpu(H100)], [get_engine("vllm")]) == ()


def test_traits_show_their_effect() -> None:
    traits = WorkloadTraits(structured_or_agentic=True, prefix_reuse=True)
    note, *facts = explain_engines(traits, [get_gpu(H100)], [get_engine("vllm")])
    assert "served by SGLang" in note and "which `engine: sglang` plans" in note
    note, *_ = explain_engines(traits, [get_gpu(H100)], [get_engine("sglang")])
    assert "served by SGLang" in note and "which is planned" in note
    assert any("up to 5x" in fact for fact in facts)
    assert len(explain_engines(WorkloadTraits(fixed_shapes=True), [get_gpu(MI300X)], [])) == 1


def test_every_fact_has_a_source() -> None:
    assert all(
        rule.source and rule.date for known in load_frameworks().values() for rule in known.rules
    )


def test_no_gpu_is_one_clear_sentence() -> None:
    with pytest.raises(PlannerError, match="name at least one"):
        choose_framework(WorkloadTraits(), [])
