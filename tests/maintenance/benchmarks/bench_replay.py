"""How fast the replay is: `pytest tests/maintenance/benchmarks/bench_replay.py`; compiled beforehand, one core.

AZURE_TRACE names the Azure conversation trace of 2023 (AzureLLMInferenceTrace_conv.csv); without
it, as many requests of the same mean lengths. TEN_MILLION=1 also runs ten million requests (about a
minute and a half).
"""

import os
import resource
import time

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from planner.engines.deployment import deploy_on
from planner.latency.step_model import build_target_step_model
from planner.memory.memory_plan import plan_memory
from planner.simulator.kernel_types import (
    ROUTE_LEAST_LOADED,
    ROUTE_ROUND_ROBIN,
    RequestBatch,
    RouterConfig,
)
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import (
    build_engine_rules,
    build_step_cost_table,
    simulate_requests,
)
from planner.workload.request_generator import sample_arrivals
from planner.workload.traces import read_trace

DEPLOYMENT = deploy_on(
    "meta-llama/Llama-3.1-8B", "H100", engine_version="0.20.2", max_model_len=16384
)
RULES, TABLE = (
    build_engine_rules(DEPLOYMENT, plan_memory(DEPLOYMENT).pool),
    build_step_cost_table(build_target_step_model(DEPLOYMENT)),
)


def _replay(arrival: np.ndarray, prompt: np.ndarray, output: np.ndarray) -> SimulationResult:
    result = simulate_requests(RULES, TABLE, RequestBatch(arrival, prompt, output))
    assert (
        result.ttft.mean() > 0
        and result.tpot.mean() > 0
        and result.e2e.mean() > 0
        and result.outcome.itl.sum() > 0
    )
    return result


def test_azure_conversation_hour(benchmark: BenchmarkFixture) -> None:
    """19,366 requests of 1,155 / 211 tokens on average: under 0.1 s is asked."""
    if path := os.environ.get("AZURE_TRACE"):
        trace = read_trace(path)
        arrival, prompt, output = trace.arrival, trace.prompt, trace.output
    else:
        rng = np.random.default_rng(0)
        arrival = sample_arrivals(19_366, 19_366 / 3_502, 1.0, rng)
        prompt, output = (
            rng.gamma(1.1, 1_155 / 1.1, 19_366) + 1,
            rng.gamma(1.6, 211 / 1.6, 19_366) + 1,
        )
        prompt, output = prompt.astype(int), output.astype(int)
    benchmark(_replay, arrival, np.minimum(prompt, 14_000), output)


@pytest.mark.parametrize("policy", [ROUTE_ROUND_ROBIN, ROUTE_LEAST_LOADED])
def test_a_week_behind_a_router(benchmark: BenchmarkFixture, policy: int) -> None:
    """537,600 requests of 1,155 / 211 tokens on average to 8 replicas in a week: under 10 s and 2 GB is asked."""
    n, rng = 537_600, np.random.default_rng(0)
    arrival = sample_arrivals(n, n / (7 * 86_400), 1.0, rng)
    prompt, output = rng.gamma(1.1, 1_155 / 1.1, n) + 1, rng.gamma(1.6, 211 / 1.6, n) + 1
    sent = RequestBatch(
        arrival, np.minimum(prompt, 14_000).astype(np.int32), output.astype(np.int32)
    )
    started = time.process_time()
    found = benchmark.pedantic(
        simulate_requests,
        (RULES, TABLE, sent),
        {"router": RouterConfig(8, policy)},
        rounds=1,
        warmup_rounds=0,
    )
    seconds, peak = (
        time.process_time() - started,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    print(f"\n{seconds:.1f} s of CPU, peak memory {peak / 1e9:.2f} GB")
    assert np.bincount(found.outcome.replica).min() > n / 9 and np.isfinite(found.e2e).all()
    assert seconds < 10 and peak < 2e9


@pytest.mark.skipif("TEN_MILLION" not in os.environ, reason="takes minutes")
def test_ten_million_poisson_requests(benchmark: BenchmarkFixture) -> None:
    """256 / 128 tokens each at 63 requests/s, 80% of the 79 that it can serve: under 3 minutes and 2 GB is asked."""
    n = 10_000_000
    arrival = sample_arrivals(n, 63.0, 1.0, np.random.default_rng(0))
    lengths = np.full(n, 256, np.int32), np.full(n, 128, np.int32)
    benchmark.pedantic(_replay, (arrival, *lengths), rounds=1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    benchmark.extra_info["peak bytes"] = peak
    print(f"\npeak memory {peak / 1e9:.2f} GB")
    assert peak < 2e9
