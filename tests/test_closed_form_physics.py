"""The closed form against physics: what no deployment can do, for any legal deployment and workload."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shipped import closed_loop, open_loop

from planner.engines.deployment import deploy_on
from planner.engines.layout import SpeculationConfig
from planner.latency.performance import LATENCY_STATISTICS
from planner.latency.step_model import build_step_model
from planner.latency.step_work import count_step_work
from planner.memory.memory_plan import plan_memory
from planner.queueing.steady_state import LoadCase, solve_closed_loops, solve_open_loops
from planner.simulator.simulation import simulate_workload
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"
QWEN, GEMMA = "Qwen/Qwen3-32B", "google/gemma-3-27b-it"
GPT_OSS, R1 = "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-R1"


@cache
def deployed(model, gpu, how):
    deployment = deploy_on(model, gpu, **dict(how))
    return deployment, plan_memory(deployment)


def layouts(model, gpu, tp, pp, **more):
    """Deployments of a model that differ in what a scheduler sees."""
    return st.builds(
        lambda *values: deployed(model, gpu, tuple(zip(("tp", "pp", *SCHEDULER, *more), values, strict=True))),
        st.just(tp), st.sampled_from(pp), *SCHEDULER.values(), *map(st.just, more.values()),
    )  # fmt: skip


EAGLE = SpeculationConfig("eagle3", 3, 0.62)
SCHEDULER = {
    "max_num_seqs": st.sampled_from([1, 2, 16, 256, 1024]),
    "max_num_batched_tokens": st.sampled_from([2048, 8192]),
    "replicas": st.sampled_from([1, 3]),
}
DEPLOYED = st.one_of(
    layouts(LLAMA_8B, "H100", 1, (1, 2, 4, 8)),
    layouts(LLAMA_8B, "RTX4090", 1, (1,), max_model_len=24_000, quantization="fp8"),  # a small pool
    layouts(LLAMA_8B, "H100", 1, (1, 2), speculation=EAGLE),
    layouts(LLAMA_70B, "A100-80GB", 4, (1, 2, 4)),
    layouts(GEMMA, "H200", 1, (1, 2)),
    layouts(GPT_OSS, "H200", 2, (1, 2, 6)),
    layouts(R1, "B200", 8, (1, 2)),
)
"""Dense, windowed, latent and mixture models, speculation, pipelines, one sequence to a thousand, small pools."""
LENGTHS = st.one_of(
    st.sampled_from([1, 2, 3, 4, 16, 64, 1000]).map(LengthDistribution.from_constant),
    st.floats(1, 4000).map(LengthDistribution.from_constant),
    st.floats(3, 4000).map(lambda mean: LengthDistribution.from_lognormal(mean, 2 * mean)),
    st.floats(1, 4000).map(lambda most: LengthDistribution.from_uniform(most, 0.5)),
)
PROMPTS = st.one_of(LENGTHS, st.sampled_from([8_000, 16_000]).map(LengthDistribution.from_constant))
RATES = st.floats(-3, 3).map(lambda power: 10**power)
NUMBERS = st.one_of(st.integers(1, 20), st.integers(1, 5000))
WORKLOADS = st.builds(
    Workload, prompt=PROMPTS, output=LENGTHS, rate=RATES, concurrency=NUMBERS,
    burstiness=st.floats(0.2, 5),
    prefix_hit_rate=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    num_prompts=st.none() | st.integers(1, 50_000),
)  # fmt: skip
LATENCIES = ("ttft", "tpot", "itl", "e2e")


def both(deployment, memory, workload):
    """The performance of both loops."""
    return (loop(deployment, memory, workload) for loop in (open_loop, closed_loop))


def numbers_of(found, names):
    """All of a performance's figures of those latencies and of its rates."""
    intervals = [interval for name in names for interval in found.latencies[name].values()]
    intervals += [found.output_tps, found.total_tps, found.request_tps]
    values = [value for interval in intervals for value in (interval.lo, interval.mid, interval.hi)]
    return np.array([*values, found.decode_batch, found.kv_usage, found.queue])


@settings(deadline=None, max_examples=100)
@given(DEPLOYED, WORKLOADS)
def test_every_figure_is_finite_positive_and_in_order(engine, workload):
    for found in both(*engine, workload):
        there = LATENCIES if workload.output.max_tokens >= 1.5 else ("ttft", "e2e")
        values = numbers_of(found, there)
        assert np.isfinite(values).all() and (values >= 0).all()
        for name in there:
            p50, p95, p99 = (found.get(name, point).mid for point in LATENCY_STATISTICS[1:])
            assert 0 < p50 <= p95 * (1 + 1e-12) and p95 <= p99 * (1 + 1e-12), name
            assert found.get(name, "mean").mid > 0
        assert found.get("e2e", "mean").mid >= found.get("ttft", "mean").mid * (1 - 1e-9)


@settings(deadline=None, max_examples=100)
@given(DEPLOYED, WORKLOADS)
def test_nothing_beats_the_gpu(engine, workload):
    """FLOP/s of all tokens, and bytes/s of weights and KV cache, at most the data sheet's; no step beats its reads."""
    deployment, memory = engine
    gpu, layout, counted, step = (
        deployment.gpu,
        deployment.layout,
        count_step_work(deployment),
        build_step_model(deployment),
    )
    shape = deployment.model.architecture
    multiplied = 2 * (
        shape.params_active - 2 * shape.vocab * shape.hidden
    )  # looked up: one, the head: rarely
    least = sum(m.bytes for m in counted.matmuls) + sum(
        e.layers * e.bytes * e.held * e.active / e.total for e in counted.experts
    )
    computed = max(workload.prompt.mean * (1 - workload.prefix_hit_rate), 1.0)
    for found in both(deployment, memory, workload):
        served, later = found.request_tps.mid, workload.output.mean - 1
        assert served * (computed + later) * multiplied <= layout.num_gpus * max(
            gpu.peak_flops.values()
        )
        steps = (
            served * later / step.tokens_per_step / (deployment.args.max_num_seqs * layout.replicas)
        )
        assert steps * least <= gpu.memory_bandwidth * layout.pp
        read = sum(
            k.bytes * min(workload.prompt.mean, k.window or math.inf) for k in counted.contexts
        )
        per_engine = served / (layout.replicas * layout.dp) * later / step.tokens_per_step
        assert per_engine * read <= gpu.memory_bandwidth * layout.pp
        if workload.output.max_tokens >= 1.5:
            assert (
                found.get("tpot", "mean").mid >= least / gpu.memory_bandwidth / step.tokens_per_step
            )
            assert found.get("itl", "p50").mid >= least / gpu.memory_bandwidth


@settings(deadline=None, max_examples=100)
@given(DEPLOYED, WORKLOADS)
def test_throughput_times_stay_is_what_is_in_flight(engine, workload):
    """Little's law, for requests and for those that decode."""
    deployment, memory = engine
    layout = deployment.layout
    engines = layout.replicas * layout.dp
    closed, opened = (loop(deployment, memory, workload) for loop in (closed_loop, open_loop))
    sent = workload.num_prompts or 10 * workload.concurrency
    in_flight = min(
        workload.concurrency, sent
    )  # the last ones are replaced by none: a queue empties as they end
    least = in_flight * max(1 - 0.5 * in_flight / sent, 0.5)
    stay = closed.get("e2e", "mean").mid
    assert least * 0.97 <= closed.request_tps.mid * stay <= in_flight * 1.03
    for found in (closed, opened):
        later = max(workload.output.mean - 1, 0)
        tpot = found.get("tpot", "mean").mid if workload.output.max_tokens >= 1.5 else 0.0
        decoding = found.request_tps.mid / engines * later * tpot
        seats = deployment.args.max_num_seqs
        assert decoding <= min(seats, workload.concurrency if found is closed else math.inf) * 1.03
        if found is opened and not found.saturated:
            assert found.request_tps.mid == pytest.approx(workload.rate)


CROWDED = deployed(
    LLAMA_8B,
    "H100",
    (("pp", 2), ("max_num_seqs", 1024), ("max_num_batched_tokens", 2048), ("speculation", EAGLE)),
)
"""All its sequences together verify more tokens than a step holds."""


@settings(deadline=None, max_examples=60)
@given(DEPLOYED, PROMPTS, LENGTHS)
@example(CROWDED, LengthDistribution.from_constant(1), LengthDistribution.from_constant(4))
def test_more_load_never_lowers_throughput(engine, prompt, output):
    """In open loops; in closed ones not by more than the closed form is off where one regime ends (two fifths)."""
    base = Workload(prompt, output, rate=1.0)
    found = solve_open_loops(
        [LoadCase(*engine, base.with_rate(rate)) for rate in np.geomspace(1e-3, 1e3, 25)]
    )
    assert (np.diff(found.request_tps) >= -1e-9 * found.request_tps[1:]).all()
    ladder = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096]
    found = solve_closed_loops(
        [LoadCase(*engine, replace(base, rate=None, concurrency=n)) for n in ladder]
    )
    assert (np.diff(found.request_tps) >= -0.2 * found.request_tps[1:]).all()


PIPELINES = (
    (LLAMA_8B, "L40S", {"pp": 4, "max_num_seqs": 64}),
    (LLAMA_8B, "H100", {"pp": 8, "max_num_seqs": 256}),
    (LLAMA_70B, "H100", {"pp": 4, "tp": 2, "max_num_seqs": 256, "max_num_batched_tokens": 8192}),
    (LLAMA_70B, "A100-80GB", {"pp": 3, "tp": 2, "max_num_seqs": 128}),
    (QWEN, "H100", {"pp": 6, "max_num_seqs": 64, "replicas": 2}),
    (QWEN, "A100-80GB", {"pp": 2, "max_num_seqs": 256}),
    (GPT_OSS, "H200", {"pp": 8, "tp": 4, "max_num_seqs": 128, "max_num_batched_tokens": 16384}),
    (R1, "B200", {"pp": 2, "tp": 4, "max_num_seqs": 512, "max_num_batched_tokens": 8192}),
)  # fmt: skip
SHORT = (
    (LengthDistribution.from_constant(300), LengthDistribution.from_constant(1)),
    (LengthDistribution.from_lognormal(150, 330), LengthDistribution.from_lognormal(8, 18)),
    (LengthDistribution.from_uniform(1000, 0.5), LengthDistribution.from_uniform(20, 0.5)),
    (LengthDistribution.from_constant(400), LengthDistribution.from_uniform(4, 0.5)),
    (LengthDistribution.from_lognormal(3000, 6500), LengthDistribution.from_constant(40)),
    (LengthDistribution.from_uniform(6000, 0.5), LengthDistribution.from_lognormal(60, 130)),
)  # fmt: skip


def test_full_pipelines_with_short_outputs_serve_what_the_replay_does():
    """Offline work: as many requests as run at once. What the closed form promises beyond the replay is not there."""
    off = []
    for k, (model, gpu, how) in enumerate(PIPELINES):
        deployment, memory = deployed(model, gpu, tuple(how.items()))
        engines = deployment.layout.replicas * deployment.layout.dp
        for prompt, output in (SHORT[k % 6], SHORT[(k + 1) % 6], SHORT[(k + 3) % 6]):
            workload = Workload(prompt, output, concurrency=how["max_num_seqs"] * engines)
            run = simulate_workload(
                deployment, memory.pool, build_step_model(deployment, workload), workload
            )
            off.append(
                closed_loop(deployment, memory, workload).request_tps.mid
                / (run.request_tps * engines)
            )
    assert max(off) < 1.35
    assert np.median(np.abs(np.log(off))) < 0.08


def test_tails_are_those_of_the_replay():
    """p95 of whole requests, and p99 of gaps, which hold at most one prompt: random arrivals, and a full engine."""
    thousand, two_hundred = map(LengthDistribution.from_constant, (1000, 200))
    how = {"max_num_seqs": 64}
    opened = [(Workload(thousand, two_hundred, rate=rate), {}) for rate in (2.0, 10.0)]
    closed = [(Workload(thousand, two_hundred, concurrency=64, num_prompts=256), how)]
    for workload, args in opened + closed:
        deployment, memory = deployed(LLAMA_8B, "H100", tuple(args.items()))
        run = simulate_workload(
            deployment, memory.pool, build_step_model(deployment, workload), workload
        )
        found = (open_loop if workload.rate else closed_loop)(deployment, memory, workload)
        whole = found.get("e2e", "p95").mid
        if workload.rate:
            assert whole == pytest.approx(run.summarize("e2e")["p95"], rel=0.08)
            assert found.get("itl", "p99").mid == pytest.approx(
                run.summarize("itl")["p99"], rel=0.3
            )
        else:
            assert whole == pytest.approx(run.summarize("e2e")["p95"], rel=0.15)


LD = LengthDistribution
DRAFTING = (
    # budget, drafted, accepted, prompts, outputs, in flight
    (2048, 4, 0.9, LD.from_uniform(20, 0.5), LD.from_constant(2), 400),
    (1024, 5, 0.3, LD.from_constant(4), LD.from_lognormal(90, 180), 1024),
    (2048, 3, 0.72, LD.from_lognormal(12, 24), LD.from_lognormal(22, 44), 1500),
    (2048, 5, 0.6, LD.from_constant(300), LD.from_constant(40), 1024),
    (8192, 5, 0.4, LD.from_constant(16), LD.from_lognormal(3, 5), 140),
)


@pytest.mark.parametrize("budget, k, accepted, prompt, output, in_flight", DRAFTING)
def test_speculation_serves_what_the_replay_does(budget, k, accepted, prompt, output, in_flight):
    """Outputs of less than a step's tokens, and more tokens to verify than a step holds: then sequences take turns."""
    how = {
        "max_num_seqs": 1024,
        "max_num_batched_tokens": budget,
        "speculation": SpeculationConfig("eagle3", k, accepted),
    }
    deployment, memory = deployed(LLAMA_8B, "H100", tuple(how.items()))
    workload = Workload(prompt, output, concurrency=in_flight, num_prompts=6 * in_flight)
    run = simulate_workload(
        deployment, memory.pool, build_step_model(deployment, workload), workload
    )
    assert closed_loop(deployment, memory, workload).request_tps.mid == pytest.approx(
        run.request_tps, rel=0.25
    )


def test_two_tokens_are_one_gap():
    """However many drafted tokens a step accepts, it streams only the one that is left."""
    deployment, memory = deployed(LLAMA_8B, "H100", (("speculation", EAGLE),))
    for found in both(
        deployment,
        memory,
        Workload(
            LengthDistribution.from_constant(500),
            LengthDistribution.from_constant(2),
            rate=1.0,
            concurrency=8,
        ),
    ):
        assert found.get("tpot", "mean").mid == pytest.approx(found.get("itl", "mean").mid)
