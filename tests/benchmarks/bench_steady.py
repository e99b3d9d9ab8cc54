"""How fast the closed form is: `pytest tests/benchmarks/bench_steady.py`; over 20,000 deployments a second are asked.

Memory plans and step costs are worked out beforehand; the last two tests say what a deployment costs with them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from planner.core.quantities import PlannerError
from planner.facts.deployment import Deployment, deploy_on
from planner.facts.workload import Lengths, Workload
from planner.latency.performance import Performances
from planner.latency.speculation import step_of
from planner.memory.budget import plan
from planner.planning.prediction import memory_of
from planner.queueing.steady_state import Case, closed_loops, open_loops

CHAT = Workload(Lengths.lognormal(1000, 2500), Lengths.lognormal(250, 600), rate=5.0, concurrency=64)
GPUS, MODELS = ("A100-80GB", "L40S", "H100", "H200", "B200"), ("Llama-3.1-8B-Instruct", "Llama-3.1-70B-Instruct")


def deployments() -> Iterator[Deployment]:
    """Legal deployments, all different: models, formats, GPUs, layouts, batch limits, replicas."""
    choices = product(MODELS, GPUS, (1, 2, 4, 8), (None, "fp8"), (64, 128, 256, 512), (2048, 8192), (1, 4))
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
        if memory_of(found).pool.max_concurrency_x >= 1:
            yield found


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    found = list(deployments())
    steps = {one: step_of(one) for one in {replace(each, layout=replace(each.layout, replicas=1)) for each in found}}
    return [Case(d, memory_of(d), CHAT, steps[replace(d, layout=replace(d.layout, replicas=1))]) for d in found]


def _per_second(benchmark: BenchmarkFixture, count: int, found: Performances) -> None:
    assert len(found) == count and np.isfinite(found.e2e).all()
    benchmark.extra_info["deployments"] = count
    if benchmark.stats:
        print(f"\n{count} cases: {count / benchmark.stats.stats.min:,.0f} a second")


def test_open_loops_of_different_deployments(benchmark: BenchmarkFixture, cases: list[Case]) -> None:
    _per_second(benchmark, len(cases), benchmark(open_loops, cases))


def test_closed_loops_of_different_deployments(benchmark: BenchmarkFixture, cases: list[Case]) -> None:
    _per_second(benchmark, len(cases), benchmark(closed_loops, cases))


def test_a_sweep_over_rates(benchmark: BenchmarkFixture, cases: list[Case]) -> None:
    swept = [replace(cases[0], workload=CHAT.at(rate)) for rate in np.geomspace(0.1, 100, 1000)]
    _per_second(benchmark, len(swept), benchmark(open_loops, swept))


def test_one_at_a_time(benchmark: BenchmarkFixture, cases: list[Case]) -> None:
    benchmark(open_loops, cases[:1])


def test_a_memory_plan_and_a_step_cost(benchmark: BenchmarkFixture, cases: list[Case]) -> None:
    benchmark(lambda: (plan(cases[0].deployment), step_of(cases[0].deployment)))
