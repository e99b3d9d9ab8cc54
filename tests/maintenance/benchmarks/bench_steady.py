"""How fast the closed form is; over 20,000 deployments a second are asked.

`pytest tests/maintenance/benchmarks/bench_steady.py`. Memory plans and step costs are worked out
beforehand; the last two tests say what a deployment costs with them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment, deploy_on
from planner.latency.performance import PerformanceBatch
from planner.latency.step_model import build_step_model
from planner.memory.memory_plan import plan_memory
from planner.planning.prediction import get_memory_plan
from planner.queueing.steady_state import LoadCase, solve_closed_loops, solve_open_loops
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

CHAT = Workload(
    LengthDistribution.from_lognormal(1000, 2500),
    LengthDistribution.from_lognormal(250, 600),
    rate=5.0,
    concurrency=64,
)
GPUS, MODELS = (
    ("A100-80GB", "L40S", "H100", "H200", "B200"),
    ("Llama-3.1-8B-Instruct", "Llama-3.1-70B-Instruct"),
)


def deployments() -> Iterator[Deployment]:
    """Legal deployments, all different: models, formats, GPUs, layouts, batch limits, replicas."""
    choices = product(
        MODELS, GPUS, (1, 2, 4, 8), (None, "fp8"), (64, 128, 256, 512), (2048, 8192), (1, 4)
    )
    for name, gpu, tp, stored, seqs, budget, replicas in choices:
        sizes = {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "max_model_len": 8192}
        try:
            found = deploy_on(
                f"meta-llama/{name}",
                gpu,
                tp=tp,
                replicas=replicas,
                **sizes,
                **({"quantization": stored} if stored else {}),
            )
        except PlannerError:
            continue
        if get_memory_plan(found).pool.max_concurrency_x >= 1:
            yield found


@pytest.fixture(scope="module")
def cases() -> list[LoadCase]:
    found = list(deployments())
    steps = {
        one: build_step_model(one)
        for one in {replace(each, layout=replace(each.layout, replicas=1)) for each in found}
    }
    return [
        LoadCase(
            d, get_memory_plan(d), CHAT, steps[replace(d, layout=replace(d.layout, replicas=1))]
        )
        for d in found
    ]


def _per_second(benchmark: BenchmarkFixture, count: int, found: PerformanceBatch) -> None:
    assert len(found) == count and np.isfinite(found.latencies).all()
    benchmark.extra_info["deployments"] = count
    if benchmark.stats:
        print(f"\n{count} cases: {count / benchmark.stats.stats.min:,.0f} a second")


def test_open_loops_of_different_deployments(
    benchmark: BenchmarkFixture, cases: list[LoadCase]
) -> None:
    _per_second(benchmark, len(cases), benchmark(solve_open_loops, cases))


def test_closed_loops_of_different_deployments(
    benchmark: BenchmarkFixture, cases: list[LoadCase]
) -> None:
    _per_second(benchmark, len(cases), benchmark(solve_closed_loops, cases))


def test_a_sweep_over_rates(benchmark: BenchmarkFixture, cases: list[LoadCase]) -> None:
    swept = [
        replace(cases[0], workload=CHAT.with_rate(rate)) for rate in np.geomspace(0.1, 100, 1000)
    ]
    _per_second(benchmark, len(swept), benchmark(solve_open_loops, swept))


def test_one_at_a_time(benchmark: BenchmarkFixture, cases: list[LoadCase]) -> None:
    benchmark(solve_open_loops, cases[:1])


def test_a_memory_plan_and_a_step_cost(benchmark: BenchmarkFixture, cases: list[LoadCase]) -> None:
    benchmark(lambda: (plan_memory(cases[0].deployment), build_step_model(cases[0].deployment)))
