"""Format a plan or a scenario for the terminal."""

import math

from planner.analysis.phrases import CALIBRATION_BASIS_LABELS
from planner.analysis.plan_risks import describe_growth_limit
from planner.core.templates import render_template
from planner.core.text import escape_to_one_line, format_columns
from planner.deploy import build_launches
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
"""Exit codes of `planner plan` by verdict."""


def format_plan(plan: Plan) -> str:
    """Return the plan in a dozen lines or more."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    values: dict[str, object] = {
        "plan": plan,
        "scenario": scenario,
        "best": best,
        "performance": performance,
    }
    if best and performance:
        values |= {
            "launches": build_launches,
            "hours": estimate_run_hours(scenario, best),
            "price": look_up_gpu_price(best.deployment.gpu, scenario.prices),
            "power": [
                f"{value:,.{2 if value.mid < 10 else 0}f} {unit}"
                for unit, value in estimate_energy(scenario, best)
            ],
            "latencies": [
                *(_format_slo(target, performance) for target in scenario.slo_targets),
                *_format_latencies_without_slo(scenario, performance),
            ],
            "skipped_pools": explain_skipped_pools(scenario),
            "not_written": list_unsupported_artifacts(plan),
            "estimate_kv_transfer": estimate_kv_transfer,
            "confidence": estimate_choice_confidence(plan),
            "scripts": [name for name in list_benchmark_files(plan) if name.endswith(".sh")],
            "alternatives": explain_alternatives(plan),
            "basis_labels": CALIBRATION_BASIS_LABELS,
            "free_capacity": compute_free_capacity(scenario, best.prediction) or 0.0,
            "offered_rps": compute_offered_rps(scenario, best.prediction),
            "startup": estimate_startup(best.deployment, scenario.storage),
            "growth": describe_growth_limit(plan),
            "utilization_reason": explain_memory_utilization(best.deployment),
        }
    return format_columns(render_rows("plan", **values))


def format_scenario(scenario: Scenario) -> str:
    """Return a scenario as it was read, line by line."""
    head = escape_to_one_line(f"{scenario.name}: {scenario.question}")
    rows = render_rows(
        "check",
        scenario=scenario,
        model=load_model(scenario.model),
        look_up_gpu_price=look_up_gpu_price,
    )
    return f"{head}\n{format_columns(rows)}"


def render_rows(template: str, **values: object) -> list[list[str]]:
    """Return the lines of a rendered template, split at their first bar."""
    return [
        line.split(" | ", 1)
        for line in render_template("ui", template, **values).splitlines()
        if line
    ]


def _format_slo(target: SloTarget, performance: Performance) -> tuple[str, str]:
    """Return the name of an SLO, and its prediction and status."""
    value = performance.get_for_display(target.metric, target.percentile)
    limit = format_latency(target.seconds)
    if math.isnan(value.mid):
        return target.name, f"none, as answers have one token; promised {limit}"
    if math.isinf(value.mid):
        return target.name, f"grows for as long as it runs, promised {limit}: broken"
    status = get_slo_status(target, value)
    latency = (
        format_latency(value.mid, target.seconds)
        if status == "broken"
        else f"{value * 1e3:,.0f} ms"
    )
    return target.name, f"{latency}, promised {limit}: {status}"


def _format_latencies_without_slo(
    scenario: Scenario, performance: Performance
) -> list[tuple[str, str]]:
    """Return the p95 of TTFT, TPOT and E2E that no SLO limits; none for offline work."""
    if scenario.offline:
        return []
    limited = {"itl", *(target.metric for target in scenario.slo_targets)}
    values = {
        metric: performance.get_for_display(metric, "p95")
        for metric in LATENCY_METRICS
        if metric not in limited
    }
    return [
        (f"p95 {metric.upper()}", f"{value * 1e3:,.0f} ms, not promised")
        for metric, value in values.items()
        if not math.isnan(value.mid)
    ]
