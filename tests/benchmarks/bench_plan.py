"""How fast a plan is: `pytest tests/benchmarks/bench_plan.py`. What people feel: import, plan, redraw, search."""

import subprocess
import sys

from pytest_benchmark.fixture import BenchmarkFixture

from planner.faces.charts import base as charts
from planner.faces.widgets import figure
from planner.facts.deployment import deploy_on
from planner.memory.budget import plan
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
