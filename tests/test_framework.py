"""The framework advice follows the stated rules, whatever the points are tuned to."""

import pytest

from planner.core.quantities import PlannerError
from planner.facts.gpus import gpu
from planner.planning.framework import Traits, choose, frameworks

H100, MI300X = "H100 SXM", "MI300X"


@pytest.mark.parametrize(
    ("traits", "gpus", "chosen"),
    [
        (Traits(), [H100], "vllm"),
        (Traits(structured_or_agentic=True, prefix_reuse=True), [H100], "sglang"),
        (Traits(structured_or_agentic=True), [H100], "vllm"),
        (Traits(prefix_reuse=True), [H100], "vllm"),
        (Traits(fixed_shapes=True, rebuild_acceptable=True), [H100], "trtllm"),
        (Traits(fixed_shapes=True), [H100], "vllm"),
        (Traits(fixed_shapes=True, rebuild_acceptable=True), [H100, "L40S"], "vllm"),
        (Traits(fixed_shapes=True, rebuild_acceptable=True), [H100, MI300X], "vllm"),
        (Traits(fixed_shapes=True, rebuild_acceptable=True), [MI300X], "vllm"),
        (Traits(hugging_face_stack=True), [H100], "tgi"),
        (Traits(portability=True), [H100], "vllm"),
        (Traits(portability=True, structured_or_agentic=True, prefix_reuse=True), [MI300X], "vllm"),
    ],
)
def test_advice(traits: Traits, gpus: list[str], chosen: str) -> None:
    assert choose(traits, map(gpu, gpus)).chosen.name == chosen


def test_tensorrt_llm_is_ruled_out_on_amd() -> None:
    scores = {score.name: score for score in choose(Traits(), [gpu(MI300X)]).ranked}
    assert "does not serve" in scores["trtllm"].ruled_out


def points(name: str, traits: Traits, *cards: str) -> int:
    return next(score.points for score in choose(traits, map(gpu, cards)).ranked if score.name == name)


def test_sglang_is_portable_too_and_on_less_hardware_than_vllm() -> None:
    for cards in ((H100, MI300X), (MI300X,), (H100, "Arc Pro B60")):
        gained = {
            name: points(name, Traits(portability=True), *cards) - points(name, Traits(), H100)
            for name in ("vllm", "sglang")
        }
        assert 0 < gained["sglang"] < gained["vllm"]


def test_reused_prefixes_speak_for_every_engine_that_caches_them_by_default() -> None:
    for name in ("vllm", "sglang", "trtllm"):
        assert points(name, Traits(prefix_reuse=True), H100) > points(name, Traits(), H100)
    assert any("0.28" in rule.fact for rule in frameworks()["vllm"].rules)


def test_tgi_never_hides_its_maintenance_status() -> None:
    choice = choose(Traits(hugging_face_stack=True), [gpu(H100)])
    assert any("archived" in reason for reason in choice.reasons)


def test_every_fact_has_a_source_and_reaches_the_table() -> None:
    assert all(rule.source and rule.date for known in frameworks().values() for rule in known.rules)
    frame = choose(Traits(), [gpu(H100)]).frame()
    assert set(frame["framework"]) == {known.title for known in frameworks().values()}


def test_no_gpu_is_one_clear_sentence() -> None:
    with pytest.raises(PlannerError, match="name at least one"):
        choose(Traits(), [])
