"""How fast a plan is. What people feel: import, plan, redraw, search.

`pytest tests/maintenance/benchmarks/bench_plan.py`
"""

import subprocess
import sys
import time

import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

from planner.engines.deployment import deploy_on
from planner.memory.memory_plan import plan_memory
from planner.planning.prediction import evaluate
from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.tools.fleet.allocation import (
    LOAD_TOLERANCE,
    Fleet,
    FleetOption,
    allocate_replicas,
    compute_shadow_prices,
    find_max_growth,
)
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
    """The cheapest replicas: under 30 s is asked. Then what one more GPU of each kind is worth, and growth."""
    kinds = {"L4": 0.8, "L40S": 1.9, "A100-80GB": 2.2, "H100": 3.0, "H200": 3.8, "B200": 6.0}
    rng = np.random.default_rng(0)

    def options() -> list[FleetOption]:
        made = []
        for kind, usd in kinds.items():
            for gpus in (1, 2, 4):
                share = usd * gpus * float(rng.uniform(0.03, 0.09))
                made.append(
                    FleetOption(f"{gpus} x {kind}", kind, gpus, usd * gpus, 400.0 * gpus, share)
                )
        return made

    fleet = Fleet(
        {f"scenario {k}": options() for k in range(30)}, dict.fromkeys(kinds, 48), power=60_000.0
    )
    began = time.process_time()
    found = benchmark.pedantic(allocate_replicas, args=(fleet,), rounds=1)
    seconds = time.process_time() - began
    assert found and found.watts <= fleet.power * (1 + LOAD_TOLERANCE)
    assert compute_shadow_prices(fleet, found).keys() <= kinds.keys() and find_max_growth(fleet) > 1
    alone = [find_max_growth(fleet, {name}) for name in fleet.options]
    print(
        f"\n{seconds:.1f} s of CPU, {time.process_time() - began:.1f} s with all that a report says"
    )
    assert seconds < 30 and min(alone) >= 1
