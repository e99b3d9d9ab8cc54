"""Prefix reuse from a trace's block hashes, per replica: against a plain LRU, and a fleet that was measured."""

import csv
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.analysis.prefix_cache_sweeps import build_document_workload
from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment, deploy_on
from planner.latency.shared_prefix_reads import L2_BANDWIDTH_FACTOR, count_concurrent_readers
from planner.latency.step_model import build_step_model
from planner.latency.workload_step_costs import estimate_kv_offload
from planner.memory.memory_plan import get_memory_plan
from planner.planning.capacity import derive_effective_workload, estimate_capacity
from planner.planning.prediction import evaluate
from planner.planning.simulation_runs import simulate_once
from planner.simulator.kernel_types import (
    ROUTE_PREFIX_AFFINITY,
    ROUTE_ROUND_ROBIN,
    EngineRules,
    RequestBatch,
    RouterConfig,
    StepCostTable,
)
from planner.simulator.prefix_cache_hits import compute_prefix_hit_rate
from planner.simulator.simulation import (
    build_engine_rules,
    build_step_cost_table,
    simulate_requests,
    simulate_workload,
)
from planner.workload.length_distribution import LengthDistribution
from planner.workload.request_generator import sample_arrivals
from planner.workload.traces import TRACE_BLOCK_TOKENS, Trace
from planner.workload.workload import Workload


def conversations(requests: int = 2_400, rate: float = 2.0) -> Trace:
    """Turns of 300 conversations that go on at random: each prompt is the one before it, and some blocks more."""
    rng = np.random.default_rng(3)
    texts: list[tuple[int, ...]] = [(0, 1, 2)] * 300
    fresh, prompts, outputs, hashes = 3, [], [], []
    for _ in range(requests):
        k = int(rng.integers(300))
        more = int(rng.integers(1, 12))
        texts[k] = (*texts[k], *range(fresh, fresh + more)) if len(texts[k]) < 60 else (0, 1, 2)
        fresh += more
        hashes.append(texts[k])
        prompts.append(
            len(texts[k]) * TRACE_BLOCK_TOKENS - int(rng.integers(0, TRACE_BLOCK_TOKENS))
        )
        outputs.append(int(rng.integers(20, 600)))
    return Trace(
        Path("made.jsonl"),
        sample_arrivals(requests, rate, 1.0, rng),
        np.array(prompts),
        np.array(outputs),
        tuple(hashes),
    )


TRACE = conversations()


def on_h100(replicas: int) -> Deployment:
    return deploy_on(
        "meta-llama/Llama-3.1-8B", "H100", replicas=replicas, engine_version="0.20.2",
        max_model_len=65536,
        gpu_memory_utilization=0.6,
    )  # fmt: skip


def plain_lru(trace: Trace, engines: int, blocks: int) -> float:
    """Hit rate of so many caches of prompt blocks, requests dealt in turn."""
    hits = 0
    for engine in range(engines):
        cache: OrderedDict[int, None] = OrderedDict()
        for ids, tokens in list(zip(trace.hash_ids or (), trace.prompt, strict=True))[
            engine::engines
        ]:
            run = next((k for k, block in enumerate(ids) if block not in cache), len(ids))
            hits += min(run * TRACE_BLOCK_TOKENS, int(tokens))
            for block in reversed(ids):
                cache[block] = None
                cache.move_to_end(block)
            while len(cache) > blocks:
                cache.popitem(last=False)
    return hits / float(trace.prompt.sum())


def hold(prompt: int, output: int, concurrency: int) -> Workload:
    """Requests of these lengths, so many of them at once."""
    lengths = (LengthDistribution.from_constant(tokens) for tokens in (prompt, output))
    return Workload(*lengths, concurrency=concurrency)


@pytest.mark.parametrize("replicas", [1, 4])
def test_replicas_find_what_a_plain_cache_of_their_size_finds(replicas: int) -> None:
    deployment, workload = on_h100(replicas), Workload.from_trace(TRACE)
    memory = get_memory_plan(deployment)
    step, tokens = build_step_model(deployment), memory.pool.reported_tokens
    runs = [
        simulate_workload(deployment, memory.pool, step, workload, seed=k) for k in range(replicas)
    ]
    found = sum(run.outcome.cached.sum() for run in runs) / TRACE.prompt.sum()
    together = simulate_workload(
        deployment,
        memory.pool,
        step,
        workload,
        router=RouterConfig(deployment.num_engine_instances, ROUTE_ROUND_ROBIN),
    ).outcome
    expected = plain_lru(TRACE, replicas, tokens // TRACE_BLOCK_TOKENS)
    assert found == pytest.approx(expected, abs=0.03)
    assert together.cached.sum() == sum(run.outcome.cached.sum() for run in runs)
    assert compute_prefix_hit_rate(TRACE, replicas, tokens) == pytest.approx(expected, abs=0.03)
    assert expected < TRACE.prefix_hit_rate - 0.05, "a cache that forgets nothing finds more"


@pytest.mark.parametrize("count", [2, 40])
def test_capacity_is_what_a_crowd_with_the_traces_questions_is_served(count: int) -> None:
    """Two replicas: a queue does not grow at 0.93 of it and grows at 1.1, whether few documents are read or many."""
    two, most = on_h100(2).with_args(gpu_memory_utilization=0.9, max_num_seqs=64), {}
    for share in (0.93, 1.1):
        rate = share * estimate_capacity(two, build_document_workload(count, 12, 1.0, 4_000)).mid
        run = simulate_once(two, build_document_workload(count, 12, rate, 4_000), 2_000)
        most[share] = run.queue[-500:].mean() / run.e2e.mean()
    assert most[0.93] < 0.1 < most[1.1]


@pytest.mark.parametrize("gib", [1.0, 20.0, 400.0])
def test_host_memory_finds_what_a_plain_cache_of_its_size_finds(gib: float) -> None:
    one, workload = on_h100(1).with_args(kv_offloading_size=gib), Workload.from_trace(TRACE)
    pool = replace(get_memory_plan(one).pool, num_blocks=4_000)
    kept, block_s, _ = estimate_kv_offload(one, pool)
    assert kept == int(gib * 2**30 / pool.bytes_per_block)
    assert block_s == pytest.approx(pool.bytes_per_block / 50e9), "PCIe 5.0 x16"
    run = simulate_workload(one, pool, build_step_model(one), workload)
    expected = plain_lru(TRACE, 1, max(kept * 16, pool.reported_tokens) // TRACE_BLOCK_TOKENS)
    assert run.outcome.cached.sum() / TRACE.prompt.sum() == pytest.approx(expected, abs=0.03)
    assert np.isfinite(run.outcome.last_token).all()
    alone = simulate_workload(on_h100(1), pool, build_step_model(one), workload)
    assert (run.ttft.mean() < 0.7 * alone.ttft.mean()) == (gib == 400)


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.11.0"), ("sglang", "0.5.10")])
def test_what_has_no_such_tier_is_refused(engine: str, version: str) -> None:
    with pytest.raises(
        PlannerError, match=r"has no kv_offloading_size; vllm has it from 0\.12\.0 on"
    ):
        deploy_on(
            "Qwen/Qwen3-32B",
            "H100",
            tp=2,
            engine=engine,
            engine_version=version,
            kv_offloading_size=100,
        )


def test_a_measured_tier_of_host_memory() -> None:
    """llm-d's comparison within 25% in every figure, and in direction: the mean over four orders of its prompts.

    Behind the router that the guide installs: it goes by where it sent a prompt's first 4,096
    tokens before, and weighs that like queue and free cache (defaults before 1.2). The client's
    prompts were 5% longer than asked for: random tokens, written as text and read again
    (kubernetes-sigs/inference-perf, issue 230); by throughput and E2E more than 45 would be in
    flight else. How many requests is not told; of 1,350 as many are in flight. The mean of the TTFT
    is without the first 45, that the engines cannot have begun cold: at once they alone would add
    0.08 s to it.
    """
    router, found = RouterConfig(8, ROUTE_PREFIX_AFFINITY, 1.0, 1.0, 1.0, precise=False), {}
    one = deploy_on(
        "Qwen/Qwen3-32B",
        "H100",
        tp=2,
        replicas=8,
        engine_version="0.11.0",
        gpu_memory_utilization=0.65,
    )  # the newest when it was published
    pool, step, n, size, longer = (
        replace(get_memory_plan(one).pool, num_blocks=9_271),
        build_step_model(one, hold(6256, 1024, 45)),
        1_350,
        128,
        1.05,
    )
    kept, block_s, token_s = estimate_kv_offload(
        deploy_on("Qwen/Qwen3-32B", "H100", tp=2, kv_offloading_size=100), pool
    )
    plain = build_step_cost_table(step)._replace(
        host_block_s=block_s * size / 16, concurrent_readers=count_concurrent_readers(one)
    )
    storing = plain._replace(tokens_s=plain.tokens_s + token_s * np.arange(len(plain.tokens_s)))
    rules = build_engine_rules(one, pool)._replace(
        num_blocks=9_271 * 16 // size, groups=np.array([[0, size]])
    )
    for row in rows_of("kv_offload.csv"):
        asked_for, offloads = int(row["system_prompt_len"]), row["host_gib"] > 0
        system, question = round(asked_for * longer), round(256 * longer)
        own, table = (
            rules._replace(host_blocks=kept * 16 // size * offloads),
            storing if offloads else plain,
        )
        orders = []
        for seed in range(4):
            who = np.random.default_rng(seed).permutation(450)[np.arange(n) % 450]
            content, start = asked(who, 10, system, question, 1024, size)
            sent = RequestBatch(
                np.zeros(n), np.full(n, system + question), np.full(n, 1024), content, start,
                concurrency=45,
                request_s=step.request_s, prompt_token_s=step.prompt_token_s,
            )  # fmt: skip
            outcome = simulate_requests(own, table, sent, router=router).outcome
            e2e, ttft = outcome.last_token - outcome.sent, (outcome.first_token - outcome.sent)[45:]
            tps = n * (system + question + 1024) / (outcome.last_token.max() - outcome.sent.min())
            orders.append(
                (tps, e2e.mean(), np.quantile(e2e, 0.9), ttft.mean(), np.quantile(ttft, 0.9))
            )
        names = ("total_tok_s", "mean_e2e_s", "p90_e2e_s", "mean_ttft_s", "p90_ttft_s")
        figures = dict(zip(names, np.mean(orders, axis=0), strict=True))
        assert figures == pytest.approx({name: row[name] for name in names}, rel=0.31)
        in_flight, measured = (at["total_tok_s"] * at["mean_e2e_s"] for at in (figures, row))
        assert in_flight == pytest.approx(measured, rel=0.02)
        found[asked_for, offloads] = figures
    with_host, without = found[30_000, True], found[30_000, False]
    assert with_host["total_tok_s"] > 1.1 * without["total_tok_s"]
    assert with_host["mean_ttft_s"] < 0.85 * without["mean_ttft_s"]
    assert found[8_000, True]["total_tok_s"] == pytest.approx(
        found[8_000, False]["total_tok_s"], rel=0.02
    )


def asked(
    who: np.ndarray, each: int, system: int, question: int, output: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of requests of so many users, of whom `each` share a system prompt, and where each request's begin."""
    n, users = len(who), int(who.max()) + 1
    full, common, prompt = (
        (system + question + output) // size,
        system // size,
        (system + question) // size,
    )
    content = (
        np.arange(n * full).reshape(n, full)
        + -(-users // each) * common
        + users * (prompt - common)
    )
    content[:, :common] = (who // each)[:, None] * common + np.arange(common)
    content[:, common:prompt] = (
        -(-users // each) * common + who[:, None] * (prompt - common) + np.arange(prompt - common)
    )
    return content.ravel(), np.arange(n) * full


def rows_of(name: str) -> list[dict[str, float]]:
    lines = (Path(__file__).parent / "data" / name).read_text().splitlines()
    return [
        {k: float(v) for k, v in row.items()}
        for row in csv.DictReader(line for line in lines if line[0] != "#")
    ]


def test_a_measured_fleet_under_two_routers() -> None:
    """llm-d's ladder: throughput within 29% at every rate, 16% of its three runs' median, in direction and order.

    At 20 requests/s the newest run dips in both columns, below what the same machines did at 15 and
    22: its 760 requests took 47 and 45 s longer than the 748 at 22 did, though these came faster.
    With the pause of the other column the replay has each within 6%; the other two runs have none.
    At 15, with affinity, it is 25% off the newest run and 5% off the other two: to end its 300
    requests when it did took 13 ms a token, and it says 30 to 45. Measured TTFT contradicts itself:
    in turn its median is 18 s at 22 requests/s, 0.4 at 25 and 21 at 35, where by the throughput as
    many wait.
    """
    deployment = deploy_on("Qwen/Qwen3-32B", "H100", tp=2, replicas=8, engine_version="0.20.2")
    rows, rng = rows_of("routing.csv"), np.random.default_rng(0)
    step = build_step_model(deployment, hold(7200, 1000, 400))
    stages = [(15.0, 50.0), *((row["rate"], row["seconds"]) for row in rows)]
    counts = [round(rate * seconds) for rate, seconds in stages]
    stage = np.repeat(np.arange(len(stages)), counts)
    arrival = np.concatenate(
        [sample_arrivals(n, rate, 1.0, rng) for n, (rate, _) in zip(counts, stages, strict=True)]
    )
    n, size = len(stage), 128
    content, start = asked(rng.permutation(750)[np.arange(n) % 750], 5, 6000, 1200, 1000, size)
    rules = build_engine_rules(deployment, get_memory_plan(deployment).pool)
    rules = rules._replace(num_blocks=rules.num_blocks * 16 // size, groups=np.array([[0, size]]))
    sent = RequestBatch(
        arrival + 400 * stage, np.full(n, 7200), np.full(n, 1000), content, start,
        request_s=step.request_s, prompt_token_s=step.prompt_token_s,
    )  # fmt: skip

    def served(policy: int) -> tuple[np.ndarray, np.ndarray]:
        table = build_step_cost_table(step)._replace(
            concurrent_readers=count_concurrent_readers(deployment)
        )
        outcome = simulate_requests(rules, table, sent, router=RouterConfig(8, policy)).outcome
        own = [stage == k for k in range(1, len(stages))]
        seconds = [outcome.last_token[j].max() - outcome.sent[j].min() for j in own]
        ttft = outcome.first_token - outcome.sent
        tps = [j.sum() * 1000 / s for j, s in zip(own, seconds, strict=True)]
        return np.array(tps), np.array([np.median(ttft[j]) for j in own])

    (in_turn, late), (affine, soon) = served(ROUTE_ROUND_ROBIN), served(ROUTE_PREFIX_AFFINITY)
    measured = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    tokens, slow = 1000 * measured["rate"] * measured["seconds"], measured["rate"] == 20
    for found, policy, other in (
        (in_turn, "round_robin", "affinity"),
        (affine, "affinity", "round_robin"),
    ):
        newest, *earlier = (measured[f"{run}{policy}_tok_s"] for run in ("", "earlier_", "sglang_"))
        took = tokens / measured[f"{other}_tok_s"]
        paused = tokens / (tokens / found + slow * (took[3] - took[4]))
        assert paused == pytest.approx(newest, rel=0.29) and paused[slow] == pytest.approx(
            newest[slow], rel=0.1
        )
        assert found == pytest.approx(np.median([newest, *earlier], axis=0), rel=0.16)
    for run, most in (("", 0.15), ("earlier_", 0.2), ("sglang_", 0.1)):
        for found, policy in ((in_turn, "round_robin"), (affine, "affinity")):
            assert np.median(np.abs(found / measured[f"{run}{policy}_tok_s"] - 1)) < most
    assert (affine[3:] > 1.5 * in_turn[3:]).all()
    assert soon.max() < 1 and late[3:].min() > 30


def test_sequences_that_share_a_prefix_decode_faster_up_to_what_l2_gives() -> None:
    """Eight that share 512 of 544 tokens: read at once, as fast as L2 allows; in eight rounds, each for itself."""
    table = StepCostTable(np.zeros(1), np.zeros(1), decode_context_s=1e-6)
    rules = EngineRules(8, 8192, 400, 2048, True, True, 0, False, False, False, np.array([[0, 16]]))
    content, start = asked(np.arange(9), 9, 512, 32, 100, 16)
    sent = RequestBatch(
        np.r_[0.0, np.full(8, 1.0)], np.full(9, 544), np.full(9, 100), content, start
    )

    def seconds(together: float, log: bool = False) -> float:
        outcome = simulate_requests(
            rules, table._replace(concurrent_readers=together), sent, log_steps=log
        ).outcome
        assert (outcome.cached[1:] == 512).all()
        return float(outcome.last_token.max() - 1)

    alone = seconds(0)
    assert seconds(1) == pytest.approx(alone), "a round for each"
    assert seconds(8) == pytest.approx(alone / L2_BANDWIDTH_FACTOR)
    assert alone / L2_BANDWIDTH_FACTOR < seconds(3) < 0.95 * alone
    assert seconds(3, log=True) == pytest.approx(seconds(3)), (
        "many steps at once are the same steps"
    )


@pytest.mark.parametrize(("count", "rate"), [(1, 2.8), (4, 2.8), (16, 2.8), (1000, 1.0)])
def test_the_closed_form_knows_what_decoding_sequences_read_together(
    count: int, rate: float
) -> None:
    """Questions about so many documents of 8,192 tokens, 500 tokens out: TPOT as the replay has it."""
    one, asked_about = (
        on_h100(1).with_args(gpu_memory_utilization=0.9),
        build_document_workload(count, 16, rate, 800, output=500),
    )
    closed, replayed = evaluate(one, asked_about).performance, simulate_once(one, asked_about, 800)
    assert closed is not None and closed.get("tpot", "mean").mid == pytest.approx(
        replayed.tpot.mean(), rel=0.1
    )
    apart = evaluate(one, replace(derive_effective_workload(one, asked_about), trace=None))
    assert apart.performance is not None
    assert (apart.performance.get("tpot", "mean").mid > 1.4 * closed.get("tpot", "mean").mid) == (
        count < 1000
    )
