"""Prefix cache hits of requests that share documents, by pool size, replicas and routing."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from planner.analysis.sweep import Row, get_wait_ms, sweep
from planner.engines.deployment import Deployment
from planner.latency.step_model import build_step_model
from planner.memory.kv_cache import KvCachePool
from planner.memory.memory_plan import get_memory_plan
from planner.simulator.kernel_types import (
    ROUTE_LEAST_LOADED,
    ROUTE_PREFIX_AFFINITY,
    ROUTE_ROUND_ROBIN,
    RouterConfig,
)
from planner.simulator.prefix_cache_hits import compute_prefix_hit_rate
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import simulate_workload
from planner.workload.request_generator import sample_arrivals
from planner.workload.traces import TRACE_BLOCK_TOKENS, Trace
from planner.workload.workload import Workload, compute_zipf_fractions

ROUTING_POLICIES = {
    "in turn": ROUTE_ROUND_ROBIN,
    "to the least loaded": ROUTE_LEAST_LOADED,
    "to who has the prefix": ROUTE_PREFIX_AFFINITY,
}
"""Routing policies in words; `simulator.kernel_types.RouterConfig` explains them."""


def build_document_workload(
    count: int, blocks: int, rate: float, requests: int, *, zipf: float = 0.0, output: int = 200,
    question_first: bool = False,
) -> Workload:  # fmt: skip
    """Return questions about `count` documents of `blocks` blocks of 512 tokens, Poisson at `rate`.

    A prompt is a document and then a unique question of one block; with `question_first`, the
    question precedes it, so that no two prompts begin alike. The k-th document is asked about
    k^-zipf as often as the first.
    """
    rng = np.random.default_rng(0)
    chosen = rng.choice(count, requests, p=compute_zipf_fractions(count, zipf))
    prompts = []
    for i, document in enumerate(chosen):
        first_id = count * blocks + i * (blocks + 1)  # ids of blocks that only this prompt has
        shared = range(document * blocks, (document + 1) * blocks)
        unique_ids = range(first_id, first_id + blocks + 1)
        prompts.append(tuple(unique_ids) if question_first else (*shared, unique_ids[0]))
    prompt, answer = np.full(requests, (blocks + 1) * TRACE_BLOCK_TOKENS), np.full(requests, output)
    arrival = sample_arrivals(requests, rate, 1.0, rng)
    return Workload.from_trace(Trace(Path("documents"), arrival, prompt, answer, tuple(prompts)))


def get_hit_percent(run: SimulationResult) -> float:
    """Return the percentage of prompt tokens that a simulation found cached."""
    return float(run.outcome.cached.sum() / run.prompt.sum() * 100)


def simulate_routed(
    deployment: Deployment,
    workload: Workload,
    policy: str = "in turn",
    pool: KvCachePool | None = None,
) -> SimulationResult:
    """Simulate all replicas of `deployment` behind a router with one of `ROUTING_POLICIES`.

    `pool` replaces that of the memory plan.
    """
    pool = pool or get_memory_plan(deployment).pool
    router = RouterConfig(deployment.num_engine_instances, ROUTING_POLICIES[policy])
    return simulate_workload(
        deployment, pool, build_step_model(deployment, workload), workload, router=router
    )


def read_hits(run: SimulationResult) -> dict[str, float]:
    """Return what was found, and waits for the first token."""
    waits = {f"{point} TTFT (ms)": get_wait_ms(run, point) for point in ("p50", "p99")}
    return {"found (%)": get_hit_percent(run), **waits}


def sweep_pool_size(
    deployment: Deployment, workload: Workload, shares: Sequence[float]
) -> pd.DataFrame:
    """Return hits, also of a plain LRU, and TTFT of one replica by the fraction of its KV pool."""
    pool, trace = get_memory_plan(deployment).pool, workload.trace
    assert trace is not None
    smaller = [replace(pool, num_blocks=int(pool.num_blocks * share)) for share in shares]
    pools = {each.reported_tokens: each for each in smaller}

    def _read(tokens: int) -> Row:
        run = simulate_routed(deployment, workload, pool=pools[tokens])
        lru_hits = compute_prefix_hit_rate(trace, 1, tokens) * 100
        return {"found (%)": 0.0, "a plain LRU would find (%)": lru_hits, **read_hits(run)}

    return sweep({"KV pool (tokens)": pools}, _read)


def sweep_routing(
    deployment: Deployment,
    workload: Workload,
    replicas: Sequence[int],
    policies: Sequence[str] = tuple(ROUTING_POLICIES),
) -> pd.DataFrame:
    """Return hits, TTFT and load imbalance by replicas and routing policy.

    `workload` is the traffic per replica.
    """

    def _read(count: int, policy: str) -> Row:
        load = workload.with_rate((workload.rate or 0.0) * count)
        run = simulate_routed(deployment.with_replicas(count), load, policy)
        counts = np.bincount(run.outcome.replica, minlength=count) if count > 1 else np.ones(1)
        median = run.summarize("ttft")["p50"] * 1e3
        busiest = counts.max() / counts.mean()
        return read_hits(run) | {"p50 TTFT (ms)": median, "busiest, of the mean": busiest}

    return sweep({"replicas": replicas, "requests go": policies}, _read)
