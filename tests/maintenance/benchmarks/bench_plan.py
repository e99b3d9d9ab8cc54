"""How fast a plan is. What people feel: import, plan, redraw, search.

`pytest tests/maintenance/benchmarks/bench_plan.py`
"""

import math
import subprocess
import sys
import time

import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

from planner.engines.deployment import deploy_on
from planner.hardware.gpus import get_gpu
from planner.memory.memory_plan import plan_memory
from planner.planning.prediction import evaluate
from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.tools.fleet import tables
from planner.tools.fleet.allocation import FleetEntry, FleetOption, FleetPlan, allocate_stock
from planner.ui.charts import base as charts
from planner.ui.notebook_widgets import show_figure

DEPLOYMENT = deploy_on(
    "meta-llama/Llama-3.1-70B-Instruct", "H100", tp=4, quantization="fp8", max_model_len=8192
)
SCENARIO = load_scenario("chat-70b")


def test_import(benchmark: BenchmarkFixture) -> None:
    benchmark.pedantic(
        lambda: subprocess.run([sys.executable, "-c", "import planner"], check=True), rounds=5
    )


def test_memory_plan(benchmark: BenchmarkFixture) -> None:
    benchmark(plan_memory, DEPLOYMENT)


def test_prediction(benchmark: BenchmarkFixture) -> None:
    benchmark(evaluate, DEPLOYMENT, SCENARIO.workload)


def test_slider_redraw(benchmark: BenchmarkFixture) -> None:
    """One movement of the VRAM chapter's utilization slider: plan, chart, SVG."""

    def redraw() -> str:
        found = plan_memory(DEPLOYMENT.with_args(gpu_memory_utilization=0.85))
        return show_figure(charts.plot_memory_budget({"plan": found}), "memory of one GPU").html

    benchmark(redraw)


def test_search(benchmark: BenchmarkFixture) -> None:
    benchmark.pedantic(search_deployments, args=(SCENARIO,), rounds=5)


def test_thirty_scenarios_on_six_kinds_of_gpu(benchmark: BenchmarkFixture) -> None:
    """The cheapest replicas: under 30 s is asked. Then all that a report says."""
    prices = {"L4": 0.8, "L40S": 1.9, "A100-80GB": 2.2, "H100": 3.0, "H200": 3.8, "B200": 6.0}
    kinds = {get_gpu(name).name: usd for name, usd in prices.items()}
    plan, rng = search_deployments(SCENARIO), np.random.default_rng(0)
    chosen = plan.chosen
    assert chosen

    def draw(kind: str, gpus: int) -> FleetOption:
        count = math.ceil(1 / (kinds[kind] * gpus * float(rng.uniform(0.03, 0.09))))
        most, usd = float(rng.uniform(1, 1 + 1 / count)), kinds[kind] * gpus * count
        size, watts = gpus * count, 400.0 * gpus * count
        return FleetOption(plan, chosen, kind, size, usd, watts, 0.9, most, count)

    names = [f"scenario {k}" for k in range(30)]
    limits = {"stock": dict.fromkeys(kinds, 48), "power_at_most": 60_000.0}
    fleet = FleetPlan(
        FleetEntry.model_validate({"scenarios": names, **limits}), dict.fromkeys(names, SCENARIO),
        {name: [draw(kind, gpus) for kind in kinds for gpus in (1, 2)] for name in names},
    )  # fmt: skip
    began = time.process_time()
    found = benchmark.pedantic(allocate_stock, args=(fleet,), rounds=1)
    seconds = time.process_time() - began
    assert found and seconds < 30
    assert tables.format_fleet_plan(fleet) and len(tables.build_growth_step_table(fleet)) > 1
    tables.build_growth_limit_table(fleet)
    print(
        f"\n{seconds:.1f} s of CPU, {time.process_time() - began:.1f} s with all that a report says"
    )
