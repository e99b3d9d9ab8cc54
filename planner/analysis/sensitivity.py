"""Analytical effect of each knob on a plan, turned one at a time on its deployment.

Its replicas stay, except for the knobs that change them.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pandas as pd

from planner.analysis.sweep import judge_benefit
from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.memory.deployment_changes import DeploymentChange
from planner.parallelism.layouts import explain_illegal_layout
from planner.planning.candidate import Candidate
from planner.planning.deployment_builder import load_format
from planner.planning.evaluation import evaluate_candidates
from planner.planning.scenario import Scenario

MEASURE_DIRECTIONS = {
    "TTFT p95": -1, "ITL p99": -1, "throughput": 1, "KV cache": 1, "cost": -1,
}  # fmt: skip
"""What is measured of a knob, and whether more of it is good."""


def sweep_knobs(scenario: Scenario, best: Candidate) -> pd.DataFrame:
    """Return what each knob does to each measure: knob, measure, change, told and effect.

    Settings that the engine rejects are left out. Latencies of an overloaded deployment grow
    without bound and have no figure; nor has what does not start.
    """
    deployments = {"": best.deployment}
    for name, setting, change in _list_knob_changes(scenario, best.deployment):
        text = f"{setting:,}" if type(setting) is int else str(setting)
        with suppress(PlannerError):
            deployments[f"{name}: {text}"] = change.apply(best.deployment)
    cases = [(each, each.layout.replicas, best.preference_key) for each in deployments.values()]
    base, *turned = (measure_candidate(scenario, c) for c in evaluate_candidates(scenario, cases))
    rows = []
    for knob, values in zip(list(deployments)[1:], turned, strict=True):
        for measure, own in base.items():
            change = values.get(measure, math.nan) / own - 1 if own else 0.0
            effect, told = (
                judge_benefit(MEASURE_DIRECTIONS[measure] * change),
                f"{change:+.0%}" if abs(change) >= 0.005 else "0",
            )
            if not math.isfinite(change):
                effect, told = "hurts", "overloaded" if values else "does not fit"
            rows.append((knob, measure, change, told, effect))
    return pd.DataFrame(rows, columns=["knob", "measure", "change", "told", "effect"])


def measure_candidate(scenario: Scenario, candidate: Candidate) -> dict[str, float]:
    """Return the expected measures of a candidate; none if it does not start."""
    performance, usd = candidate.prediction.performance, candidate.usd_per_hour
    if performance is None or performance.capacity is None:
        return {}
    max_tps = performance.capacity.mid * scenario.workload.output.mean
    waits = [math.inf] * 2
    if not performance.saturated:
        waits = [performance.ttft["p95"].mid, performance.itl["p99"].mid]
    pool = candidate.prediction.memory.pool.reported_tokens
    costs = [usd / max_tps] if usd else []
    return dict(zip(MEASURE_DIRECTIONS, [*waits, max_tps, pool, *costs], strict=False))


def _list_knob_changes(
    scenario: Scenario, plan: Deployment
) -> Iterator[tuple[str, object, DeploymentChange]]:
    """Yield (knob, setting, change) for each possible setting."""
    args, layout, tokens = plan.args, plan.layout, plan.args.max_num_batched_tokens
    values: dict[str, tuple[object, ...]] = {
        "max_num_seqs": (max(args.max_num_seqs // 2, 1), 2 * args.max_num_seqs),
        "max_num_batched_tokens": (min(max(tokens // 4, 512), tokens), 2 * tokens),
        "gpu_memory_utilization": (0.8, 0.95),
        "max_model_len": (2 * args.max_model_len,),
        "kv_cache_dtype": ("fp8",) if args.kv_cache_dtype in (None, "auto") else ("auto",),
        "enforce_eager": (not args.enforce_eager,),
        "enable_prefix_caching": (not args.enable_prefix_caching,),
    }
    for name, value in ((name, value) for name, each in values.items() for value in each):
        if value != getattr(args, name):
            yield name, value, DeploymentChange(name, value)
    for quantization in (None, "fp8", "awq"):
        with suppress(PlannerError):
            model = load_format(scenario.model, quantization)
            if model.quantization.method != plan.model.quantization.method:
                yield "weights", quantization or "checkpoint", DeploymentChange("model", model)
    for tp in filter(None, (layout.tp // 2, layout.tp * 2)):
        shape = layout.with_tp(tp)
        if explain_illegal_layout(plan.model, shape, plan.gpus_per_node, plan.engine) is None:
            yield "tensor parallel", tp, DeploymentChange("layout", shape)
    for count in filter(None, (layout.replicas - 1, layout.replicas + 1)):
        yield "replicas", count, DeploymentChange("layout", replace(layout, replicas=count))
    if scenario.speculation:
        drafting = None if plan.speculation else scenario.speculation.to_config()
        setting = drafting.method if drafting else "off"
        yield "speculation", setting, DeploymentChange("speculation", drafting)
