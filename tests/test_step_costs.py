"""What a step costs, part by part: graphs, fused experts, the host; and how calibrations are put together."""

from dataclasses import replace

import numpy as np
import pytest

from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError
from planner.engines.coefficients import StepCoefficients
from planner.engines.deployment import deploy_on
from planner.engines.engine import get_engine
from planner.hardware.gpus import get_gpu
from planner.latency.coefficient_lookup import (
    get_deployment_coefficients,
    load_calibration_catalog,
    look_up_coefficients,
)
from planner.latency.kernel_costs import estimate_expert_s, get_expert_kernel, load_expert_kernels
from planner.latency.measured_residuals import list_novelties
from planner.latency.step_model import (
    REFERENCE_WORKLOAD,
    build_step_model,
    build_target_step_model,
    locate_operating_point,
)
from planner.latency.step_work import ExpertWork, count_step_work

ALONE = replace(
    StepCoefficients(**load_calibration_catalog("vllm").common.coefficients),
    expert_gemm=1.0,
    expert_latency=1.0,
    pace=1.0,
)
"""Kernels as they are when nothing else runs."""


def launches(**deployed: object) -> list[float]:
    """Seconds that launching adds to a step with 100 prompt tokens, and to one with 600, of 8 decoding sequences."""
    free = replace(ALONE, launch_s=1e-9)
    found = deploy_on("meta-llama/Llama-3.1-8B", "H100", max_model_len=4096, **deployed)
    whole, without = (
        build_target_step_model(found, replace(ALONE, launch_s=20e-6)),
        build_target_step_model(found, free),
    )
    steps = [([(tokens, 0)], [500] * 8) for tokens in (100, 600)]
    return [
        whole.estimate_step(*step).seconds - without.estimate_step(*step).seconds for step in steps
    ]


def test_a_small_mixed_step_does_not_pay_a_full_launch() -> None:
    """vLLM serves steps of up to the largest captured size (512 here) from graphs cut at attention."""
    small, large = launches()
    assert 0 < small < 0.5 * large


def test_prompts_run_without_graphs_where_an_engine_captures_decoding_only() -> None:
    small, large = launches(engine="sglang", engine_version="0.5.9")
    assert small == pytest.approx(large)


def test_before_full_graphs_a_decode_step_launches_attention_between_the_pieces() -> None:
    """vLLM pull 25444 (0.11.0): FULL_AND_PIECEWISE by default, 5.98 instead of 4.07 requests/s on a 30B-A3B."""
    old, new = (
        build_target_step_model(
            deploy_on("meta-llama/Llama-3.1-8B", "H100", engine_version=version), ALONE
        )
        for version in ("0.10.0", "0.11.0")
    )
    assert old.fixed_s - new.fixed_s == pytest.approx(32 * 3 * ALONE.launch_s, rel=0.02)


def test_prompts_that_share_a_step_cost_more_than_one_of_their_length() -> None:
    """MiniMax-M2.5 on 4 x B200: a burst of prompts of 922 tokens takes about twice as long a token as one of 7,373."""
    step = build_target_step_model(
        deploy_on(
            "MiniMaxAI/MiniMax-M2.5", "B200", tp=4, engine_version="0.19.0", quantization="fp8"
        )
    )
    long, short = (
        step.estimate_step(chunks, []).seconds for chunks in ([(7376, 0)], [(922, 0)] * 8)
    )
    assert 1.1 < short / long < 2.5


@pytest.mark.parametrize(
    ("name", "form", "expert_bytes", "tokens", "measured"),
    [
        # 128 experts of 3 x 2048 x 768, 8 per token, on one GPU: AIConfigurator's tables of vLLM
        # 0.19 and 0.24, us
        ("H100-SXM", "bf16", 2.0, 4096, 835), ("H100-SXM", "bf16", 2.0, 16384, 3016),
        ("H100-SXM", "fp8_block", 1.0, 4096, 841), ("H100-SXM", "fp8", 1.0, 16384, 1967),
        ("B200", "bf16", 2.0, 16384, 1352), ("B200", "fp8_block", 1.0, 4096, 554),
        ("B200", "nvfp4", 0.5625, 16384, 738),
        ("L40S", "fp8", 1.0, 4096, 1878), ("RTX-PRO-6000-Server", "bf16", 2.0, 4096, 1336),
    ],
)  # fmt: skip
def test_fused_experts_take_what_their_kernels_were_measured_to(
    name: str, form: str, expert_bytes: float, tokens: int, measured: float
) -> None:
    found = deploy_on("Qwen/Qwen3-30B-A3B", name, max_model_len=4096)
    size, dtype = 3 * 2048 * 768, {"bf16": "bf16", "nvfp4": "fp4"}.get(form, "fp8")
    layer = ExpertWork(
        dtype, form, 1, 128, 128, 8, 1, expert_bytes * size, 2.0 * size, 2 * (2 * 2048 + 3 * 768)
    )
    seconds = estimate_expert_s(layer, np.array([float(tokens)]), found, ALONE)
    assert seconds[0] == pytest.approx(measured * 1e-6, rel=0.25)


@pytest.mark.parametrize(
    ("name", "cache", "layout", "measured"),
    [
        # a context token more in the MLA block of DeepSeek-V3 with 64 sequences, 4,097 to 32,769
        # tokens, ns: tables of AIConfigurator 0.12 (vLLM 0.24); TP8 leaves 16 heads, attention data
        # parallelism all 128
        ("H100-SXM", "bfloat16", {"tp": 8}, 0.377), ("H100-SXM", "bfloat16", {"dp": 8, "ep": 8}, 0.399),
        ("H200", "fp8", {"tp": 8}, 0.182), ("H200", "fp8", {"dp": 8, "ep": 8}, 0.366),
        ("B200", "fp8", {"tp": 8}, 0.087), ("B200", "fp8", {"dp": 8, "ep": 8}, 0.099),
        ("L40S", "bfloat16", {"tp": 8}, 1.79),
    ],
)  # fmt: skip
def test_latent_attention_takes_what_its_kernels_were_measured_to(
    name: str, cache: str, layout: dict[str, int], measured: float
) -> None:
    found = deploy_on("deepseek-ai/DeepSeek-V3", name, kv_cache_dtype=cache, **layout)
    seconds = build_target_step_model(found, replace(ALONE, kv=0.9)).decode_context_s / 61
    assert seconds == pytest.approx(measured * 1e-9, rel=0.2)


def test_every_generation_has_a_kernel_for_every_format() -> None:
    newest = get_engine("vllm")
    for name in ("A100", "L40S", "H100", "B200", "RTX-PRO-6000", "MI300X", "V100"):
        for form in ("bf16", "fp8", "fp8_block", "int4", "mxfp4", "mxfp4_fp8", "nvfp4"):
            assert 0 < get_expert_kernel(get_gpu(name), newest, form).gemm <= 1
    assert (
        get_expert_kernel(get_gpu("B200"), get_engine("vllm", "0.17.0"), "fp8_block").gemm
        < load_expert_kernels()["blackwell fp8_block"].gemm
    )


def test_the_fullest_rank_of_expert_parallelism_is_waited_for() -> None:
    """Measured with skewed routing, EP8 and EP32 are 7-37% above balanced experts (AIConfigurator)."""
    found = deploy_on("Qwen/Qwen3-30B-A3B", "H100", max_model_len=4096)
    whole = ExpertWork("bf16", "bf16", 1, 256, 256, 8, 1, 2.0, 2.0 * 3 * 2048 * 768, 0.0)
    tokens, busy = np.array([32768.0]), replace(ALONE, expert_latency=1e-9)
    for ranks in (8, 32):
        one = replace(whole, held=256 // ranks, ranks=ranks)
        even = estimate_expert_s(whole, tokens, found, busy) / ranks
        assert 1.05 < float((estimate_expert_s(one, tokens, found, busy) / even)[0]) < 1.4


def test_the_host_bounds_a_small_models_steps() -> None:
    """Under asynchronous scheduling a step lasts as long as the longer of the two."""
    slow = replace(ALONE, step_s=6e-3)
    small, large = (
        build_target_step_model(deploy_on(name, "B200", max_model_len=4096), slow)
        for name in ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-72B")
    )
    assert float(small.estimate_decode_step_s(1, 100)) == pytest.approx(6e-3, rel=0.1)
    assert large.fixed_s < 0.2 * 6e-3


def test_what_is_new_widens_the_interval() -> None:
    """A measured pair; a kind of model on another GPU; a new kind there; a new GPU, generation and release as well."""
    asked = [
        deploy_on("MiniMaxAI/MiniMax-M2.5", "B200", tp=4, engine_version="0.19.0"),
        deploy_on("Qwen/Qwen3-8B", "MI355X", engine_version="0.19.0"),
        deploy_on("google/gemma-2-9b", "H200", engine_version="0.19.0"),
        deploy_on(
            "google/gemma-2-9b",
            "L4",
            engine_version="0.19.0",
            max_model_len=2048,
            quantization="fp8",
        ),
        deploy_on("google/gemma-2-9b", "V100-SXM-32GB", engine_version="0.9.0"),
    ]
    steps = [build_step_model(deployment) for deployment in asked]
    points = [locate_operating_point(deployment, REFERENCE_WORKLOAD) for deployment in asked]
    new = [list_novelties(point.engine, point.traits) for point in points]
    assert steps[0].basis == "measured" and new[0] == ()
    assert steps[1].basis == "model-transfer" and "pair" in new[1] and "model" not in new[1]
    assert steps[2].basis == "model-transfer" and "model" in new[2]
    assert steps[4].basis == "prior" and {"gpu", "generation"} <= set(new[4])
    widths = [step.sigma_tpot for step in steps]
    assert widths[0] < 0.14 < min(widths[1:]) and max(widths) == widths[4]


def test_pipeline_stages_and_new_kinds_of_attention_are_wide() -> None:
    """No run of vLLM with stages on H100 is among the measured."""
    widths = [
        build_step_model(deploy_on("Qwen/Qwen3-32B", "H100", **layout)).sigma_ttft
        for layout in ({"tp": 2}, {"tp": 2, "pp": 3})
    ]
    assert widths[1] > 1.15 * widths[0]


def test_gpus_of_a_generation_inform_each_other() -> None:
    """What an H100 lacks comes from Hopper: no coefficient of two Hopper GPUs is far from the other's."""
    newest = get_engine("vllm")
    ours, theirs = (
        look_up_coefficients(get_gpu(name), newest, "llama", "none").coefficients
        for name in ("H100-SXM", "H200-SXM")
    )
    for name in ("memory", "kv", "gemm_bf16", "attention", "kernel_s"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=0.42), name


def test_a_calibration_with_an_unknown_coefficient_is_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "calibration").mkdir()
    text = (CATALOG_DIR / "calibration" / "vllm.yaml").read_text(encoding="utf-8")
    (tmp_path / "calibration" / "vllm.yaml").write_text(
        f"{text}\nvolta:\n  generation: volta\n  times: {{memry: 1.1}}\n"
    )
    monkeypatch.setattr("planner.latency.coefficient_lookup.CATALOG_DIR", tmp_path)
    load_calibration_catalog.cache_clear()
    with pytest.raises(
        PlannerError, match=r"entry volta: unknown coefficient 'memry'; did you mean memory"
    ):
        load_calibration_catalog("vllm")
    monkeypatch.undo()
    load_calibration_catalog.cache_clear()


@pytest.mark.parametrize(
    ("gpu", "dtype"),
    [("GB10", "bf16"), ("RTX-PRO-6000", "bf16"), ("B200", "fp8"), ("H100-SXM", "bf16")],
)
def test_vllm_widens_mxfp4_where_it_has_no_kernels_for_it(gpu, dtype) -> None:
    """Issues 30135 and 41477: Marlin on compute capability 12, FlashInfer's MXFP4 x MXFP8 on 10."""
    assert {
        each.dtype
        for each in count_step_work(
            deploy_on("openai/gpt-oss-20b", gpu, max_model_len=4096)
        ).experts
    } == {dtype}


def test_small_kernels_take_as_long_as_the_clock_lets_them() -> None:
    """A matrix product of one row, weights aside: 3.7 us on H100, 5.4 on A100 (AIConfigurator 0.12's tables)."""
    found = [
        deploy_on("meta-llama/Llama-3.1-8B-Instruct", name)
        for name in ("A100-SXM-80GB", "H100-SXM")
    ]
    slow, fast = (build_target_step_model(each, ALONE).parts["kernel latency"][1] for each in found)
    assert slow / fast == pytest.approx(5.4 / 3.7, rel=0.06)


def test_a_models_own_pace_is_part_of_its_calibration() -> None:
    found = deploy_on("openai/gpt-oss-120b", "H100", tp=2)
    assert build_step_model(found).basis == "measured"
    assert 0.7 < get_deployment_coefficients(found).coefficients.pace < 1.4


@pytest.mark.parametrize(
    "name", ["A100-SXM-40GB", "A100-SXM-80GB", "L20", "L40S", "H100-SXM", "B200", "MI300X"]
)
@pytest.mark.parametrize("served", ["meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3-32B"])
def test_products_do_not_beat_the_peak_whatever_a_fit_says(name: str, served: str) -> None:
    found = deploy_on(served, name, tp=8, max_model_len=4096, max_num_batched_tokens=8192)
    model, linears = build_target_step_model(found), count_step_work(found).matmuls
    needed = sum(m.flops / found.gpu.peak_flops[m.dtype] for m in linears)
    assert model.parts["dense linears"][-1] > model.grid[-1] * needed


def test_a_cut_card_that_nobody_measured_reaches_more_of_its_peak() -> None:
    """An L20 reaches 0.92 of its BF16 peak in large products, an L40S 0.62: the H20 is cut further, at H100's power."""
    engine = get_engine("sglang")
    h20, l20, l40s, pcie = (
        look_up_coefficients(get_gpu(name), engine, "llama", "none").coefficients
        for name in ("H20", "L20", "L40S", "H100-PCIE")
    )
    h100 = look_up_coefficients(get_gpu("H100-SXM"), engine, "llama", "none").coefficients
    assert l40s.gemm_bf16 < l20.gemm_bf16 and h100.gemm_bf16 < h20.gemm_bf16 < 1
    assert pcie.gemm_bf16 < h20.gemm_bf16  # less power for its peak than H100 SXM
