"""The answer to a scenario: a dozen lines for a person, `plan.json`, and the files that start and watch the plan."""

import math
from typing import Any

from planner.analysis.phrases import CALIBRATION_BASIS_LABELS
from planner.analysis.plan_risks import describe_growth_limit
from planner.core.templates import render_template
from planner.core.text import escape_to_one_line, format_columns
from planner.deploy import (
    build_launches,
)
from planner.deploy.artifacts import list_benchmark_files, list_unsupported_artifacts
from planner.hardware.prices import look_up_gpu_price
from planner.latency.performance import LATENCY_METRICS, Performance
from planner.latency.startup_time import estimate_startup
from planner.memory.memory_plan import explain_memory_utilization
from planner.models.registry import load_model
from planner.planning.alternatives import explain_alternatives
from planner.planning.confidence import estimate_choice_confidence
from planner.planning.disaggregated import estimate_kv_transfer
from planner.planning.disaggregated_search import explain_skipped_pools
from planner.planning.evaluation import (
    compute_free_capacity,
    compute_offered_rps,
    estimate_energy,
    estimate_run_hours,
)
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.slo import SloTarget, format_latency, get_slo_status

EXIT_CODES = {"holds": 0, "at_risk": 3, "nothing_meets": 4}
"""What `planner plan` ends with."""


def format_plan(plan: Plan) -> str:
    """The answer in a dozen lines."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    values: dict[str, Any] = {"plan": plan, "asked": scenario, "best": best, "found": performance}
    if best and performance:
        values |= {"launches": build_launches, "hours": estimate_run_hours(scenario, best)}
        drawn = [
            f"{value:,.{2 if value.mid < 10 else 0}f} {what}"
            for what, value in estimate_energy(scenario, best)
        ]
        values |= {"price": look_up_gpu_price(best.deployment.gpu, scenario.prices)}
        values |= {
            "power": drawn,
            "promises": [_format_slo(target, performance) for target in scenario.slo_targets],
        }
        values |= {
            "pools_left_out": explain_skipped_pools(scenario),
            "not_written": list_unsupported_artifacts(plan),
            "handover": estimate_kv_transfer,
        }
        values["promises"] += _format_latencies_without_slo(scenario, performance)
        values |= {
            "sure": estimate_choice_confidence(plan),
            "scripts": [name for name in list_benchmark_files(plan) if name.endswith(".sh")],
        }
        values |= {"passed_over": explain_alternatives(plan), "bases": CALIBRATION_BASIS_LABELS}
        values |= {"spare": compute_free_capacity(scenario, best.prediction) or 0.0}
        values |= {"planned": compute_offered_rps(scenario, best.prediction)}
        values |= {"start_up": estimate_startup(best.deployment, scenario.storage)}
        values |= {
            "growth": describe_growth_limit(plan),
            "share_why": explain_memory_utilization(best.deployment),
        }
    return format_columns(render_rows("plan", **values))


def format_scenario(scenario: Scenario) -> str:
    """What a scenario asks, line by line."""
    head = escape_to_one_line(f"{scenario.name}: {scenario.question}")
    return f"{head}\n{format_columns(render_rows('check', asked=scenario, served=load_model(scenario.model), price_of=look_up_gpu_price))}"


def render_rows(template: str, **values: Any) -> list[list[str]]:
    """What a template says, its lines parted at their first bar."""
    return [
        line.split(" | ", 1)
        for line in render_template("ui", template, **values).splitlines()
        if line
    ]


def _format_slo(target: SloTarget, performance: Performance) -> tuple[str, str]:
    """What becomes of a promise, with its name."""
    value, limit = (
        performance.get_for_display(target.metric, target.percentile),
        format_latency(target.seconds),
    )
    if math.isnan(value.mid):
        return target.name, f"none, as answers have one token; promised {limit}"
    if math.isinf(value.mid):
        return target.name, f"grows for as long as it runs, promised {limit}: broken"
    state = get_slo_status(target, value)
    shown = (
        f"{value * 1e3:,.0f} ms" if state != "broken" else format_latency(value.mid, target.seconds)
    )
    return target.name, f"{shown}, promised {limit}: {state}"


def _format_latencies_without_slo(
    scenario: Scenario, performance: Performance
) -> list[tuple[str, str]]:
    """The p95 of TTFT, TPOT and E2E where users wait and nothing is promised of it."""
    said = (
        LATENCY_METRICS
        if scenario.offline
        else {"itl", *(target.metric for target in scenario.slo_targets)}
    )
    beside = {
        name: performance.get_for_display(name, "p95")
        for name in LATENCY_METRICS
        if name not in said
    }
    return [
        (f"p95 {name.upper()}", f"{value * 1e3:,.0f} ms, not promised")
        for name, value in beside.items()
        if not math.isnan(value.mid)
    ]
