"""Layouts that vLLM accepts or refuses, and what GPUs say to each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.engines.coefficients import StepCoefficients
from planner.engines.deployment import deploy_on
from planner.engines.engine import get_engine
from planner.engines.layout import ParallelLayout
from planner.hardware.gpus import get_gpu
from planner.latency.coefficient_lookup import get_deployment_coefficients, load_calibration_catalog
from planner.latency.step_work import count_step_work
from planner.models.registry import load_model
from planner.parallelism.communication import estimate_allreduce_s, estimate_collectives
from planner.parallelism.layouts import explain_illegal_layout, list_legal_layouts
from planner.parallelism.sharding import compute_pipeline_bubble

LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"
PRIOR = StepCoefficients(**load_calibration_catalog("vllm").common.coefficients)


def test_llama_70b_takes_tp_8_but_not_tp_3_nor_tp_across_nodes():
    llama = load_model(LLAMA_70B)  # 64 heads, 8 KV heads
    assert explain_illegal_layout(llama, ParallelLayout(tp=8), 8) is None
    assert "must be divisible by tensor parallel size (3)" in explain_illegal_layout(
        llama, ParallelLayout(tp=3), 8
    )
    assert "node boundary" in explain_illegal_layout(llama, ParallelLayout(tp=16), 8)
    assert "81 exceeds the 80 layers" in explain_illegal_layout(llama, ParallelLayout(pp=81), 8)


def test_block_fp8_refuses_the_tp_that_cuts_through_a_block():
    """Qwen3-235B-A22B-FP8: experts of 1536, and 1536 / 8 is no multiple of 128 (vLLM's refusal); EP is the way out."""
    qwen = load_model("Qwen/Qwen3-235B-A22B", quantization="fp8_block")
    assert "not divisible by weight quantization block_n = 128" in explain_illegal_layout(
        qwen, ParallelLayout(tp=8), 8
    )
    assert explain_illegal_layout(qwen, ParallelLayout(tp=4), 8) is None
    assert explain_illegal_layout(qwen, ParallelLayout(tp=8, ep=8), 8) is None


def test_decode_context_parallelism_needs_replicated_kv_heads():
    """vLLM 0.33 config/model.py:1578: GQA needs tp > KV heads and dcp <= tp / KV heads."""
    qwen = load_model("Qwen/Qwen3-235B-A22B-Instruct-2507")  # 4 KV heads
    assert explain_illegal_layout(qwen, ParallelLayout(tp=8, dcp=2), 8) is None
    assert "at most tp / KV heads" in explain_illegal_layout(qwen, ParallelLayout(tp=4, dcp=2), 8)


def test_every_layout_listed_is_accepted_and_fits_the_gpus():
    llama, h100 = load_model(LLAMA_70B), get_gpu("H100")
    layouts = list_legal_layouts(llama, h100, 16)
    assert {layout.tp for layout in layouts} == {1, 2, 4, 8}
    assert ParallelLayout(tp=8, pp=2) in layouts
    assert all(
        layout.num_gpus <= 16 and explain_illegal_layout(llama, layout, 8) is None
        for layout in layouts
    )
    assert all(layout.ep == 1 for layout in layouts)


def test_bubble_of_gpipe():
    """Huang et al. 2019: (p - 1) / (p - 1 + m), negligible when m >= 4 p."""
    assert compute_pipeline_bubble(1, 4) == 0
    assert compute_pipeline_bubble(4, 1) == 0.75
    assert compute_pipeline_bubble(4, 16) < 0.16


def test_allreduce_near_nccl_measurements():
    """NCCL 2.27 on 8 H100s, 16 MiB bf16: 204 us (AIConfigurator comm tables); within a third with 70% of the link."""
    seconds = float(estimate_allreduce_s(np.array(2.0 * 2**24), 8, 450e9 * 0.7, 5e-6))
    assert seconds == pytest.approx(204e-6, rel=0.33)


@given(st.integers(1, 8192), st.sampled_from([2, 4, 8]))
def test_messages_grow_with_tokens_and_pcie_is_slower(tokens, tp):
    nvlink, pcie = (
        deploy_on(LLAMA_70B, "H100", tp=tp, interconnect=link) for link in ("nvlink", "pcie5")
    )
    cost = [
        sum(
            part.seconds
            for part in estimate_collectives(d, np.array([tokens, tokens + 1.0]), PRIOR)
        )
        for d in (nvlink, pcie)
    ]
    assert cost[0][0] < cost[0][1]
    assert (cost[0] < cost[1]).all()


def test_llama_70b_reduces_twice_a_layer():
    (reduce,) = estimate_collectives(deploy_on(LLAMA_70B, "H100", tp=4), np.array([1.0]), PRIOR)
    assert reduce.count == 160
    assert reduce.bytes[0] == 8192 * 2


def test_when_experts_must_stay_whole_blocks() -> None:
    """vLLM 0.20.2 refuses MiniMax-M2 at TP8 (1,536 / 8 = 192), 0.33.0 loads it (run with their own model classes)."""
    minimax, layout = load_model("MiniMaxAI/MiniMax-M2"), ParallelLayout(tp=8)
    assert "192 is not divisible" in str(
        explain_illegal_layout(minimax, layout, 8, get_engine("vllm", "0.20.2"))
    )
    assert explain_illegal_layout(minimax, layout, 8, get_engine("vllm", "0.33.0")) is None


def test_decode_context_parallelism_reads_a_share_and_pays_for_merging() -> None:
    """Kimi K2 on 8 B200, 32 sequences of 32k: 5.0 ms a step at DCP8; heads x dcp over s / dcp (aisimulate pull 240)."""
    whole, cut = (deploy_on("moonshotai/Kimi-K2-Instruct", "B200", tp=8, dcp=dcp) for dcp in (1, 8))
    (merge,) = (
        c
        for c in estimate_collectives(
            cut, np.array([32.0]), get_deployment_coefficients(cut).coefficients
        )
        if "DCP" in c.name
    )
    assert merge.seconds[0] == pytest.approx(5.0e-3, rel=0.15)
    for one, other in zip(
        count_step_work(whole).contexts, count_step_work(cut).contexts, strict=True
    ):
        assert other.bytes == one.bytes / 8
        assert other.query_flops == one.query_flops and other.prefill_flops == one.prefill_flops
        assert (
            other.decode_flops <= one.decode_flops
        )  # rows of the matrix units that a rank's few heads leave empty
