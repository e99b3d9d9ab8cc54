"""Board power: measured runs, what physics forbids, and what follows from it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.intervals import Interval
from planner.engines.deployment import deploy_on
from planner.hardware.gpus import list_gpus
from planner.latency.power import (
    GpuActivity,
    compute_board_watts,
    compute_joules_per_token,
    estimate_board_power,
    estimate_gpu_activity,
    get_gpu_energy,
)
from planner.planning.prediction import evaluate
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

CHAT = Workload(
    LengthDistribution.from_constant(500), LengthDistribution.from_constant(300), concurrency=64
)
DONE = st.builds(
    GpuActivity,
    bytes=st.floats(0, 8e12),
    flops=st.tuples(st.floats(0, 5e15), st.floats(0, 5e15)),
    busy=st.floats(0, 1),
    prompts=st.floats(0, 1),
)
GPUS = st.sampled_from(list_gpus())


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "seqs", "prompt", "output", "batch", "tps", "measured"),
    [  # ML.ENERGY leaderboard v3, vLLM 0.11.1
        ("Qwen/Qwen3-32B", "H100", 2, 8, 150, 631, 7.99, 522.5, 425),
        ("meta-llama/Llama-3.1-70B-Instruct", "H100", 4, 512, 150, 353, 511, 5928, 624),
        ("meta-llama/Llama-3.3-70B-Instruct", "B200", 2, 512, 150, 410, 511, 7087, 971),
        ("Qwen/Qwen3-8B", "B200", 1, 8, 350, 8168, 8, 250, 294),  # its host keeps the GPU waiting
        ("openai/gpt-oss-120b", "H100", 1, 64, 350, 1739, 64, 2570, 688),
    ],
)
def test_measured_boards(model, gpu, tp, seqs, prompt, output, batch, tps, measured):
    """At the rate that was measured, from a GPU that mostly waits to one at its limit."""
    deployment = deploy_on(
        model, gpu, tp=tp, engine_version="0.11.1", max_num_seqs=seqs, max_model_len=20480
    )
    load = Workload(
        LengthDistribution.from_constant(prompt),
        LengthDistribution.from_constant(output),
        concurrency=seqs,
    )
    done = replace(estimate_gpu_activity(deployment, load, tps / output, batch), busy=1.0)
    assert estimate_board_power(deployment.gpu, done).mid == pytest.approx(measured, rel=0.2)


def test_a_gpu_that_nobody_fitted():
    """RTX 4090 decoding Qwen3-4B in FP8 at batch 1: 246 W at 138 tokens/s, whatever its limit (club-3090 issue 697)."""
    deployment = deploy_on(
        "Qwen/Qwen3-4B-Instruct-2507", "RTX-4090", quantization="fp8", max_model_len=4096
    )
    load = Workload(
        LengthDistribution.from_constant(100), LengthDistribution.from_constant(1000), concurrency=1
    )
    drawn = estimate_board_power(
        deployment.gpu, estimate_gpu_activity(deployment, load, 138 / 1000, 1.0)
    )
    assert drawn.lo <= 246 <= drawn.hi


@pytest.mark.parametrize("gpu", ["H100", "A100-SXM-80GB"])
def test_prompts_take_the_limit_and_tokens_do_not(gpu):
    """Splitwise (arXiv 2311.18677): prompts use the whole power budget, single tokens about half of it."""
    deployment = deploy_on("meta-llama/Llama-2-70b-hf", gpu, tp=8)
    prompts = evaluate(
        deployment,
        Workload(
            LengthDistribution.from_constant(3000),
            LengthDistribution.from_constant(1),
            concurrency=32,
        ),
    ).gpu_power_w
    tokens = evaluate(
        deployment,
        Workload(
            LengthDistribution.from_constant(100),
            LengthDistribution.from_constant(1000),
            concurrency=1,
        ),
    ).gpu_power_w
    assert (
        prompts.mid > 0.75 * deployment.gpu.board_limit_w
        and tokens.mid < 0.65 * deployment.gpu.board_limit_w
    )


def test_fp8_saves_joules_not_watts():
    """H200: 663 W in BF16, 662 W in FP8 at 1.68 times the throughput (serialalice.pt, 2026-06)."""
    load = replace(CHAT, concurrency=128)
    wide, narrow = (
        evaluate(deploy_on("meta-llama/Llama-3.1-8B-Instruct", "H200", quantization=q), load)
        for q in ("none", "fp8")
    )
    assert narrow.gpu_power_w.mid == pytest.approx(wide.gpu_power_w.mid, rel=0.1)
    assert narrow.joules_per_output_token.mid < 0.8 * wide.joules_per_output_token.mid


@given(DONE, DONE, GPUS)
def test_more_done_never_draws_less(one, more, gpu):
    both = GpuActivity(
        one.bytes + more.bytes,
        (one.flops[0] + more.flops[0], one.flops[1] + more.flops[1]),
        max(one.busy, more.busy),
        one.prompts,
    )
    energy = get_gpu_energy(gpu)
    assert compute_board_watts(both, gpu.board_limit_w, energy) >= compute_board_watts(
        one, gpu.board_limit_w, energy
    ) * (1 - 1e-12)


@given(DONE, GPUS)
def test_between_idle_and_the_limit(done, gpu):
    drawn = estimate_board_power(gpu, done)
    assert 0.99 * get_gpu_energy(gpu).idle * gpu.board_limit_w <= drawn.mid <= gpu.board_limit_w
    assert 0 < drawn.lo <= drawn.mid <= drawn.hi <= gpu.board_limit_w


@pytest.mark.parametrize(("gpu", "idle"), [("H100", 102), ("B200", 147), ("H200", 80)])
def test_without_traffic_it_idles(gpu, idle):
    """A request an hour: what is drawn with a model loaded. H200: measured; the others: what the fit leaves."""
    load = replace(CHAT, concurrency=None, rate=1 / 3600)
    assert evaluate(
        deploy_on("meta-llama/Llama-3.1-8B-Instruct", gpu), load
    ).gpu_power_w.mid == pytest.approx(idle, rel=0.05)


def test_what_does_not_run_has_no_power():
    found = evaluate(deploy_on("meta-llama/Llama-3.1-405B-Instruct", "L4"), CHAT)
    assert found.gpu_power_w is None and found.joules_per_output_token is None
    assert compute_joules_per_token(Interval.from_value(100.0), 1, Interval.from_value(0.0)) is None


def test_every_gpu_reaches_its_limit():
    """At 70% of its matrix units and bandwidth any board is near its limit: that is what limits are for."""
    for gpu in list_gpus():
        flops = 0.7 * max(gpu.peak_flops.get(dtype, 0.0) for dtype in ("bf16", "fp16"))
        done = GpuActivity(0.7 * gpu.memory_bandwidth, (flops, 0.0), 1.0, 0.5)
        assert estimate_board_power(gpu, done).mid > 0.8 * gpu.board_limit_w, gpu.name
