"""Step cost and steady state against physics, and against public measurements copied here with their source."""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shipped import closed_loop, open_loop

from planner.core.errors import PlannerError
from planner.engines.deployment import deploy_on
from planner.engines.layout import SpeculationConfig
from planner.latency.performance import LATENCY_METRICS
from planner.latency.step_model import (
    build_step_model,
    build_target_step_model,
    count_attention_pairs,
)
from planner.latency.step_work import count_step_work
from planner.memory.memory_plan import plan_memory
from planner.queueing.batched_step_models import batch_step_models
from planner.queueing.steady_state import LoadCase, solve_open_loops
from planner.simulator.simulation import simulate_workload
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"


@cache
def deployed(model=LLAMA_8B, gpu="H100", **how):
    deployment = deploy_on(model, gpu, **how)
    return deployment, plan_memory(deployment)


def inferencex(isl, osl, concurrency):
    """The public InferenceX benchmark: lengths uniform in 0.8 to 1.0 of nominal, 10 prompts per unit of concurrency."""
    return Workload(
        LengthDistribution.from_uniform(isl, 0.8),
        LengthDistribution.from_uniform(osl, 0.8),
        concurrency=concurrency,
    )


def test_decode_of_llama_8b_cannot_beat_reading_its_weights():
    """15.0 GB of BF16 layers and head over 3.35 TB/s is 4.5 ms; vLLM on one H100 is known to need 6 to 9 ms."""
    step = build_target_step_model(deployed()[0]).estimate_step([], [500]).seconds
    assert 15.0e9 / 3.35e12 < step < 9e-3


def test_prefill_of_llama_70b_cannot_beat_the_peak():
    """2 x 69.5e9 FLOP per token (no embedding) over 8 x 989 TFLOP/s."""
    seconds = (
        build_target_step_model(deployed(LLAMA_70B, tp=8)[0]).estimate_step([(8192, 0)], []).seconds
    )
    least = 2 * 69.5e9 * 8192 / (8 * 989e12)
    assert least < seconds < 4 * least


def test_work_of_a_dense_model_is_its_parameters():
    """Llama-3.1-8B: 6.98e9 weights in layers, 0.525e9 in the head, 32 x 2 x 8 x 128 KV elements a token."""
    counted = count_step_work(deployed()[0])
    (matmul,) = counted.matmuls
    assert matmul.bytes == pytest.approx(2 * 6.979e9, rel=1e-3)
    assert matmul.flops == matmul.bytes  # 2 FLOP a weight, 2 bytes a weight
    assert counted.head.bytes == pytest.approx(2 * 0.5253e9, rel=1e-3)
    assert counted.contexts[0].bytes == 131072


def test_a_mixture_reads_all_experts_only_for_many_tokens():
    """gpt-oss-120b routes to 4 of 128: one token reads a 32nd of the experts' 59 GB."""
    step = build_target_step_model(deployed("openai/gpt-oss-120b", "H200")[0])
    experts = step.parts["experts"]
    few, many = (float(np.interp(t, step.grid, experts)) for t in (1, 512))
    assert many > 8 * few


def test_latent_cache_costs_the_same_on_every_tensor_parallel_rank():
    """MLA caches one latent for all heads, so TP does not divide it (vLLM 0.33)."""
    one, eight = (
        count_step_work(deployed("deepseek-ai/DeepSeek-R1", "B200", tp=tp)[0]).contexts[0]
        for tp in (4, 8)
    )
    assert one.bytes == eight.bytes
    assert one.decode_flops == 2 * eight.decode_flops


def test_a_window_caps_what_decode_reads():
    """gemma-3-27b: 52 of 62 layers look back 1,024 tokens, so 16 x the context costs far less than 16 x the time."""
    step = build_target_step_model(deployed("google/gemma-3-27b-it", "H100")[0])
    short, long = (float(step.estimate_decode_attention_s(context)) for context in (8192, 131072))
    assert step.decode_windows[0][0] == 1024
    assert long < 16 * short
    assert step.estimate_decode_attention_s(131072) - step.estimate_decode_attention_s(
        131071
    ) == pytest.approx(step.decode_context_s, rel=1e-6)


def test_eager_mode_waits_for_the_host():
    """Qwen2.5-Omni-7B on an A800 80 GB: 13 ms a token with graphs, 22 to 23 without; its talker, small: 19 to 20.

    vllm-omni issue 7960.
    """
    graphs, eager = (
        build_target_step_model(
            deploy_on(
                "Qwen/Qwen2.5-7B-Instruct", "A100-SXM-80GB", max_model_len=4096, enforce_eager=flag
            )
        )
        for flag in (False, True)
    )
    times = eager.estimate_step([], [500]).seconds / graphs.estimate_step([], [500]).seconds
    assert times == pytest.approx(1.75, rel=0.35)
    assert eager.estimate_prompt(8000).seconds < 1.1 * graphs.estimate_prompt(8000).seconds
    small = deploy_on(
        "Qwen/Qwen2.5-0.5B", "A100-SXM-80GB", max_model_len=4096, enforce_eager=True
    )  # 24 layers
    assert build_target_step_model(small).estimate_step([], [500]).seconds == pytest.approx(
        19.5e-3, rel=0.15
    )  # as the talker's


MEASURED = (
    # model, GPU, vLLM version, how, isl, osl, concurrency, TTFT ms, TPOT ms
    ("MiniMaxAI/MiniMax-M2.5", "B300", "0.19.0", {"tp": 4}, 8192, 1024, 128, 972.3, 33.44),
    ("MiniMaxAI/MiniMax-M2.5", "B300", "0.19.0", {"tp": 4}, 1024, 1024, 128, 205.6, 17.79),
    ("openai/gpt-oss-120b", "H200", "0.18.0", {"tp": 8}, 1024, 1024, 4, 37, 3.62),
    ("openai/gpt-oss-120b", "H200", "0.18.0", {"tp": 4}, 1024, 1024, 64, 117, 9.48),
    (LLAMA_70B, "H100", None, {"tp": 4, "quantization": "fp8"}, 1024, 1024, 16, 121, None),
    ("nvidia/MiniMax-M3-NVFP4", "B200", "0.24.0", {"tp": 4}, 8192, 1024, 64, None, 24.49),
    ("ByteDance-Seed/Seed-OSS-36B-Instruct", "RTX 3090", "0.10.1", {"tp": 8, "max_model_len": 8192},
     800, 100, 8, None, 44.39),
)  # fmt: skip
"""InferenceX (SemiAnalysis, Apache-2.0), public runs of 2025-10 to 2026-07; Seed-OSS: vllm-project/recipes
Seed/Seed-OSS-36B.md, eight cards in one machine at 1.85 requests/s, about 8 at a time."""


@pytest.mark.parametrize(
    "model, gpu, version, how, isl, osl, concurrency, ttft_ms, tpot_ms", MEASURED
)
def test_public_points_lie_near_the_prediction(
    model, gpu, version, how, isl, osl, concurrency, ttft_ms, tpot_ms
):
    """Within twice the stated 80% interval (in logarithms), which one point in a hundred may miss."""
    deployment, memory = deployed(
        model,
        gpu,
        engine_version=version,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.9,
        **how,
    )
    found = closed_loop(deployment, memory, inferencex(isl, osl, concurrency))
    for metric, measured in (("ttft", ttft_ms), ("tpot", tpot_ms)):
        predicted = found.get(metric, "mean")
        if measured is not None:
            reach = 2 * math.log(predicted.hi / predicted.mid)
            assert abs(math.log(measured / 1e3 / predicted.mid)) < reach


def test_a_gpu_that_nobody_measured_says_so_and_is_less_certain():
    known, unknown = (build_step_model(deployed(gpu=gpu)[0]) for gpu in ("H100", "V100-SXM-32GB"))
    assert known.basis == "measured"
    assert unknown.basis in ("prior", "gpu-transfer")
    assert unknown.sigma_tpot > 1.5 * known.sigma_tpot


LOADS = st.floats(0.05, 40)


@settings(deadline=None, max_examples=60)
@given(
    LOADS,
    st.floats(1.01, 3),
    st.sampled_from([1, 2, 4]),
    st.integers(50, 6000),
    st.integers(20, 800),
)
def test_more_traffic_is_never_faster(rate, more, tp, prompt, output):
    deployment, memory = deployed(tp=tp)
    base = Workload(
        LengthDistribution.from_lognormal(prompt, 2 * prompt),
        LengthDistribution.from_lognormal(output, 2 * output),
        rate=rate,
    )
    calm, busy = (open_loop(deployment, memory, w) for w in (base, base.with_rate(rate * more)))
    for name in ("ttft", "tpot", "itl", "e2e"):
        before, after = calm.latencies[name], busy.latencies[name]
        assert after["mean"].mid >= before["mean"].mid * (1 - 1e-3), name
        slack = 0.03 if busy.saturated else 1e-3  # an engine that is always full varies less
        assert after["p99"].mid >= before["p99"].mid * (1 - slack), name
    assert busy.request_tps.mid >= calm.request_tps.mid * (1 - 1e-9)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 200), st.integers(50, 6000), st.integers(20, 800))
def test_more_requests_in_flight_are_never_faster_each(concurrency, more, prompt, output):
    deployment, memory = deployed()
    base = Workload(
        LengthDistribution.from_uniform(prompt, 0.8),
        LengthDistribution.from_uniform(output, 0.8),
        concurrency=concurrency,
    )
    few, many = (
        closed_loop(deployment, memory, w)
        for w in (base, replace(base, concurrency=concurrency + more))
    )
    assert many.get("tpot", "mean").mid >= few.get("tpot", "mean").mid * (1 - 1e-6)
    assert many.get("ttft", "mean").mid >= few.get("ttft", "mean").mid * 0.88  # bunches come and go


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 8100), st.integers(0, 60), st.integers(1, 60000))
def test_no_token_is_free(tokens, decoding, context):
    step = build_target_step_model(deployed("openai/gpt-oss-120b", "H100", tp=2)[0])
    chunk = [(tokens, 0)] if tokens else []
    cost = step.estimate_step(chunk, [context] * decoding).seconds
    assert step.estimate_step([(tokens + 1, 0)], [context] * decoding).seconds >= cost
    assert step.estimate_step(chunk, [context + 1] * decoding).seconds >= cost
    assert step.estimate_step(chunk, [context] * (decoding + 1)).seconds > cost


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    """8B reads 8,000 tokens of 16 GFLOP each: at L40S's 362 TFLOP/s 0.35 s, however many steps it takes."""
    for budget in (2048, 8192):
        deployment, _ = deployed(gpu="L40S", max_num_batched_tokens=budget)
        step = build_target_step_model(deployment)
        assert 0.35 < step.estimate_prompt(8000).seconds < 1
    small = build_target_step_model(deployed(gpu="L40S", max_num_batched_tokens=2048)[0])
    with pytest.raises(PlannerError, match="holds 2,048 tokens"):
        small.estimate_step([(8000, 0)], [])


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 3000))
def test_pairs_are_what_a_loop_counts(tokens, context, window):
    counted = sum(min(context + i, window) for i in range(1, tokens + 1))
    assert count_attention_pairs(tokens, context, window) == pytest.approx(counted)
    assert count_attention_pairs(tokens, context) == pytest.approx(
        sum(context + i for i in range(1, tokens + 1))
    )


def test_an_overload_is_told_and_serves_its_capacity():
    deployment, memory = deployed()
    found = open_loop(
        deployment,
        memory,
        Workload(
            LengthDistribution.from_constant(1000), LengthDistribution.from_constant(500), rate=500
        ),
    )
    assert found.saturated
    assert found.request_tps.mid < 500
    assert found.get("ttft", "p99").mid > 60


LAYOUTS = (
    {},
    {"quantization": "fp8", "max_num_seqs": 64, "max_num_batched_tokens": 2048},
    {"model": LLAMA_70B, "tp": 4, "quantization": "fp8", "replicas": 2},
    {"model": LLAMA_70B, "gpu": "H200", "tp": 2, "pp": 2},
    {"model": "google/gemma-3-27b-it", "gpu": "H200", "max_num_batched_tokens": 3000},
    {"model": "openai/gpt-oss-120b", "gpu": "H200", "tp": 4, "dp": 2},
    {"model": "deepseek-ai/DeepSeek-R1", "gpu": "B200", "tp": 8},
    {"speculation": SpeculationConfig("eagle3", 3, 0.62)},
)
"""Dense, windowed, latent and mixture models; formats, batch limits, pipelines, replicas, speculation."""


def test_many_cases_come_in_order():
    """More than are evaluated at once, of one deployment: throughput follows the rate up to saturation."""
    deployment, memory = deployed()
    rates = np.geomspace(0.1, 10, 300)
    base = Workload(
        LengthDistribution.from_constant(500), LengthDistribution.from_constant(100), rate=1
    )
    found = solve_open_loops([LoadCase(deployment, memory, base.with_rate(rate)) for rate in rates])
    assert found.request_tps == pytest.approx(rates) and not found.saturated.any()
    assert (np.diff(found.latencies[:, list(LATENCY_METRICS).index("tpot"), 0]) >= 0).all()


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(LAYOUTS), st.floats(0, 20_000), st.floats(0, 20_000)), min_size=1
    )
)
def test_stacked_step_costs_are_each_ones_own(asked):
    steps = [build_step_model(deployed(**layout)[0]) for layout, _, _ in asked]
    counts, contexts = (np.array([row[k] for row in asked])[:, None, None] for k in (1, 2))
    stacked = batch_step_models(steps)
    for name in (
        "interpolate_tokens_s",
        "interpolate_rows_s",
        "interpolate_sequences_s",
        "estimate_decode_attention_s",
    ):
        own = [
            float(getattr(step, name)(count))
            for step, count in zip(steps, counts.ravel(), strict=True)
        ]
        assert np.broadcast_to(
            getattr(stacked, name)(counts), counts.shape
        ).ravel() == pytest.approx(own, rel=1e-9)
    for name in ("estimate_decode_step_s", "estimate_prefill_attention_s"):
        both = zip(steps, counts.ravel(), contexts.ravel(), strict=True)
        own = [float(getattr(step, name)(count, context)) for step, count, context in both]
        assert getattr(stacked, name)(counts, contexts).ravel() == pytest.approx(own, rel=1e-9)


CHECKED = (
    {}, {"engine_version": "0.11.0", "max_num_batched_tokens": 2048}, {"async_scheduling": False},
    {"model": LLAMA_70B, "tp": 4, "quantization": "fp8"},
    {"model": "openai/gpt-oss-120b", "gpu": "H200", "tp": 4},
    {"model": "deepseek-ai/DeepSeek-R1", "gpu": "B200", "tp": 8},
    {"speculation": SpeculationConfig("eagle3", 3, 0.62)},
)  # fmt: skip
PIPELINES = (
    {"gpu": "L40S", "pp": 4},
    {"gpu": "L40S", "tp": 2, "pp": 2},
    {"model": LLAMA_70B, "tp": 2, "pp": 2},
)
SHAPES = (
    (LengthDistribution.from_uniform(1024, 0.8), LengthDistribution.from_uniform(1024, 0.8)),
    (LengthDistribution.from_uniform(8192, 0.8), LengthDistribution.from_uniform(512, 0.8)),
    (LengthDistribution.from_constant(300), LengthDistribution.from_lognormal(200, 500)),
    (LengthDistribution.from_lognormal(1500, 4000), LengthDistribution.from_constant(60)),
)  # fmt: skip


def against_the_replay(layouts, loads, closed):
    """ln(closed form / replay) by latency and point, one of each case, where a load is a concurrency or a share."""
    found = {}
    for k, (layout, load) in enumerate(product(layouts, loads)):
        (deployment, memory), (prompt, output) = deployed(**layout), SHAPES[k % len(SHAPES)]
        if closed:
            workload = Workload(prompt, output, concurrency=load)
            steady = closed_loop(deployment, memory, workload)
        else:
            most = open_loop(deployment, memory, Workload(prompt, output, rate=1e4)).request_tps.mid
            workload = Workload(prompt, output, rate=load * most, num_prompts=2000)
            steady = open_loop(deployment, memory, workload)
        run = simulate_workload(
            deployment, memory.pool, build_step_model(deployment, workload), workload
        )
        for metric, point in product(("ttft", "tpot", "itl", "e2e"), ("mean", "p95")):
            off = math.log(steady.latencies[metric][point].mid / run.summarize(metric)[point])
            found.setdefault((metric, point), []).append(off)
    return found


HOW_CLOSE = (
    # what, loads, closed, most that the median of |ln(closed form / replay)| may be: TTFT mean,
    # p95, TPOT mean, p95
    (CHECKED, (1, 6, 30, 150, 400), True, 0.03, 0.04, 0.025, 0.04),
    (CHECKED, (0.2, 0.4, 0.6, 0.8), False, 0.05, 0.22, 0.05, 0.10),
    (PIPELINES, (2, 20, 100), True, 0.065, 0.2, 0.04, 0.05),
    (PIPELINES, (0.2, 0.35), False, 0.06, 0.23, 0.06, 0.18),
)


@pytest.mark.parametrize("layouts, loads, closed, ttft, ttft_p95, tpot, tpot_p95", HOW_CLOSE)
def test_the_closed_form_is_near_the_replay(layouts, loads, closed, ttft, ttft_p95, tpot, tpot_p95):
    """The replay follows vLLM's schedule step by step with the same step cost, so it is what the closed form is for."""
    found = against_the_replay(layouts, loads, closed)
    allowed = {
        ("ttft", "mean"): ttft,
        ("ttft", "p95"): ttft_p95,
        ("tpot", "mean"): tpot,
        ("tpot", "p95"): tpot_p95,
    }
    for what, most in allowed.items():
        assert np.median(np.abs(found[what])) < most, what
        assert abs(np.median(found[what])) < most / 1.5, what
    assert np.median(np.abs(found["e2e", "mean"])) < max(tpot, 0.07)
