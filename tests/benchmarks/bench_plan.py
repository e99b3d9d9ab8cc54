"""How fast a plan is: `pytest tests/benchmarks/bench_plan.py`. What people feel: import, plan, redraw, search."""

import subprocess
import sys
import time

import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

from planner.faces.charts import base as charts
from planner.faces.widgets import figure
from planner.facts.deployment import deploy_on
from planner.memory.budget import plan
from planner.planning.fleet import TOLERANCE, Fleet, Option, allocate, reach, worth
from planner.planning.prediction import evaluate
from planner.planning.scenario import load_scenario
from planner.planning.search import search

DEPLOYMENT = deploy_on("meta-llama/Llama-3.1-70B-Instruct", "H100", tp=4, quantization="fp8", max_model_len=8192)
SCENARIO = load_scenario("chat-70b")


def test_import(benchmark: BenchmarkFixture) -> None:
    benchmark.pedantic(lambda: subprocess.run([sys.executable, "-c", "import planner"], check=True), rounds=5)


def test_memory_plan(benchmark: BenchmarkFixture) -> None:
    benchmark(plan, DEPLOYMENT)


def test_prediction(benchmark: BenchmarkFixture) -> None:
    benchmark(evaluate, DEPLOYMENT, SCENARIO.workload)


def test_slider_redraw(benchmark: BenchmarkFixture) -> None:
    """One movement of the VRAM chapter's utilization slider: plan, chart, SVG."""

    def redraw() -> str:
        found = plan(DEPLOYMENT.with_args(gpu_memory_utilization=0.85))
        return figure(charts.budget({"plan": found}), "memory of one GPU").html

    benchmark(redraw)


def test_search(benchmark: BenchmarkFixture) -> None:
    benchmark.pedantic(search, args=(SCENARIO,), rounds=5)


def test_thirty_scenarios_on_six_kinds_of_gpu(benchmark: BenchmarkFixture) -> None:
    """The cheapest replicas: under 30 s is asked. Then what one more GPU of each kind is worth, and growth."""
    kinds = {"L4": 0.8, "L40S": 1.9, "A100-80GB": 2.2, "H100": 3.0, "H200": 3.8, "B200": 6.0}
    rng = np.random.default_rng(0)

    def options() -> list[Option]:
        made = []
        for kind, usd in kinds.items():
            for gpus in (1, 2, 4):
                share = usd * gpus * float(rng.uniform(0.03, 0.09))
                made.append(Option(f"{gpus} x {kind}", kind, gpus, usd * gpus, 400.0 * gpus, share))
        return made

    fleet = Fleet({f"scenario {k}": options() for k in range(30)}, dict.fromkeys(kinds, 48), power=60_000.0)
    began = time.process_time()
    found = benchmark.pedantic(allocate, args=(fleet,), rounds=1)
    seconds = time.process_time() - began
    assert found and found.watts <= fleet.power * (1 + TOLERANCE)
    assert worth(fleet, found).keys() <= kinds.keys() and reach(fleet) > 1
    alone = [reach(fleet, {name}) for name in fleet.options]
    print(f"\n{seconds:.1f} s of CPU, {time.process_time() - began:.1f} s with all that a report says")
    assert seconds < 30 and min(alone) >= 1
