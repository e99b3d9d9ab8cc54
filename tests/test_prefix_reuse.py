"""Prefix reuse from a trace's block hashes, per replica: against a plain LRU, and a fleet that was measured."""

import csv
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.facts.arrivals import arrivals
from planner.facts.deployment import Deployment, deploy_on
from planner.facts.traces import BLOCK, Trace
from planner.facts.workload import Workload
from planner.latency.speculation import step_of
from planner.memory.budget import memory_of
from planner.planning.benchmark_run import capacity, taken_on
from planner.simulator.kernel_types import PREFIX_AFFINITY, ROUND_ROBIN, Router, Traffic
from planner.simulator.prefix_reuse import hit_rate
from planner.simulator.replay import engine_rules, replay, replay_workload, step_table


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
        prompts.append(len(texts[k]) * BLOCK - int(rng.integers(0, BLOCK)))
        outputs.append(int(rng.integers(20, 600)))
    return Trace(
        Path("made.jsonl"), arrivals(requests, rate, 1.0, rng), np.array(prompts), np.array(outputs), tuple(hashes)
    )


TRACE = conversations()


def on_h100(replicas: int) -> Deployment:
    return deploy_on(
        "meta-llama/Llama-3.1-8B", "H100", replicas=replicas, engine_version="0.20.2", max_model_len=65536,
        gpu_memory_utilization=0.6,
    )  # fmt: skip


def plain_lru(trace: Trace, engines: int, blocks: int) -> float:
    """Hit rate of so many caches of prompt blocks, requests dealt in turn."""
    hits = 0
    for engine in range(engines):
        cache: OrderedDict[int, None] = OrderedDict()
        for ids, tokens in list(zip(trace.hash_ids or (), trace.prompt, strict=True))[engine::engines]:
            run = next((k for k, block in enumerate(ids) if block not in cache), len(ids))
            hits += min(run * BLOCK, int(tokens))
            for block in reversed(ids):
                cache[block] = None
                cache.move_to_end(block)
            while len(cache) > blocks:
                cache.popitem(last=False)
    return hits / float(trace.prompt.sum())


@pytest.mark.parametrize("replicas", [1, 4])
def test_replicas_find_what_a_plain_cache_of_their_size_finds(replicas: int) -> None:
    deployment, workload = on_h100(replicas), Workload.from_trace(TRACE)
    memory = memory_of(deployment)
    step, tokens = step_of(deployment), memory.pool.kv_tokens
    runs = [replay_workload(deployment, memory.pool, step, workload, seed=k) for k in range(replicas)]
    found = sum(run.outcome.cached.sum() for run in runs) / TRACE.prompt.sum()
    together = replay_workload(
        deployment, memory.pool, step, workload, router=Router(deployment.engines, ROUND_ROBIN)
    ).outcome
    expected = plain_lru(TRACE, replicas, tokens // BLOCK)
    assert found == pytest.approx(expected, abs=0.03)
    assert together.cached.sum() == sum(run.outcome.cached.sum() for run in runs)
    assert hit_rate(TRACE, replicas, tokens) == pytest.approx(expected, abs=0.03)
    assert expected < TRACE.prefix_hit_rate - 0.05, "a cache that forgets nothing finds more"


def test_a_plan_rests_on_the_hit_rate_of_its_own_replicas() -> None:
    workload = Workload.from_trace(TRACE)
    four = on_h100(4)
    assert 0 < taken_on(four, workload).prefix_hit_rate < workload.prefix_hit_rate
    assert taken_on(four.with_args(enable_prefix_caching=False), workload).prefix_hit_rate == 0
    assert capacity(four, workload).mid < 0.9 * capacity(four, replace(workload, trace=None)).mid
    affine = replay_workload(
        four, memory_of(four).pool, step_of(four), workload, router=Router(four.engines, PREFIX_AFFINITY)
    ).outcome
    assert affine.cached.sum() / TRACE.prompt.sum() > hit_rate(TRACE, 4, memory_of(four).pool.kv_tokens) + 0.05


def measured() -> list[dict[str, float]]:
    lines = (Path(__file__).parent / "data" / "routing.csv").read_text().splitlines()
    return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(line for line in lines if line[0] != "#")]


def test_a_measured_fleet_under_two_routers() -> None:
    """llm-d's ladder: round robin within 25 % at every rate; affinity within 40 % at every rate and 20 % in the median,
    in direction and order."""
    deployment = deploy_on("Qwen/Qwen3-32B", "H100", tp=2, replicas=8, engine_version="0.20.2")
    rows, rng, step = measured(), np.random.default_rng(0), step_of(deployment)
    stages = [(15.0, 50.0), *((row["rate"], row["seconds"]) for row in rows)]
    counts = [round(rate * seconds) for rate, seconds in stages]
    stage = np.repeat(np.arange(len(stages)), counts)
    arrival = np.concatenate([arrivals(n, rate, 1.0, rng) for n, (rate, _) in zip(counts, stages, strict=True)])
    n, size, system, prompt, full = len(stage), 128, 46, 56, 64  # blocks of 128 tokens
    who = rng.permutation(750)[np.arange(n) % 750]
    content = np.arange(n * full).reshape(n, full) + 150 * system + 750 * (prompt - system)
    content[:, :system] = (who // 5)[:, None] * system + np.arange(system)
    content[:, system:prompt] = 150 * system + who[:, None] * (prompt - system) + np.arange(prompt - system)
    rules = engine_rules(deployment, memory_of(deployment).pool)
    rules = rules._replace(num_blocks=rules.num_blocks * 16 // size, groups=np.array([[0, size]]))
    sent = Traffic(
        arrival + 400 * stage, np.full(n, 7200), np.full(n, 1000), content.ravel(), np.arange(n) * full,
        request_s=step.request_s, prompt_token_s=step.prompt_token_s,
    )  # fmt: skip

    def served(policy: int) -> tuple[list[float], list[float]]:
        outcome = replay(rules, step_table(step), sent, router=Router(8, policy)).outcome
        own = [stage == k for k in range(1, len(stages))]
        seconds = [outcome.last_token[j].max() - outcome.sent[j].min() for j in own]
        ttft = outcome.first_token - outcome.sent
        return [j.sum() * 1000 / s for j, s in zip(own, seconds, strict=True)], [float(np.median(ttft[j])) for j in own]

    (in_turn, late), (affine, soon) = served(ROUND_ROBIN), served(PREFIX_AFFINITY)
    for row, first, second in zip(rows, in_turn, affine, strict=True):
        assert first == pytest.approx(row["round_robin_tok_s"], rel=0.25)
        assert 0.65 < second / row["affinity_tok_s"] < 1.4
    assert np.median([abs(one / row["affinity_tok_s"] - 1) for row, one in zip(rows, affine, strict=True)]) < 0.2
    assert min(a / b for a, b in zip(affine[3:], in_turn[3:], strict=True)) > 1.5
    assert max(soon) < 1 and min(late[3:]) > 30
