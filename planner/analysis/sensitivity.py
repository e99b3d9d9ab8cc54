"""Analytical effect of each knob on a plan, and the cost of scenarios without any tuning.

Knobs are turned one at a time on the plan's deployment. Its replicas stay, except for the knobs
that change them.
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

MEASURE_DIRECTIONS = {"TTFT": -1, "ITL": -1, "throughput": 1, "KV cache": 1, "cost": -1}
"""What is measured of a knob, and whether more of it is good."""
MEASURE_LABELS = {
    "TTFT": "p95 TTFT (ms)",
    "ITL": "p99 ITL (ms)",
    "throughput": "output tokens/s at most",
    "KV cache": "KV cache of an engine (tokens)",
    "cost": "USD per million output tokens, when full",
}
PLAN_LABEL = "the plan"


def sweep_knobs(scenario: Scenario, best: Candidate) -> pd.DataFrame:
    """Return knob, setting and the measures of `MEASURE_LABELS`: the plan first, then every knob.

    Settings that the engine rejects are left out. If the model no longer fits, figures are missing
    and "note" says why.
    """
    settings = [(PLAN_LABEL, "", best.deployment)]
    for knob, setting, change in _list_knob_changes(scenario, best.deployment):
        text = f"{setting:,}" if type(setting) is int else str(setting)
        with suppress(PlannerError):
            settings.append((knob, text, change.apply(best.deployment)))
    candidates = evaluate_candidates(
        scenario,
        [
            (deployment, deployment.layout.replicas, best.preference_key)
            for _, _, deployment in settings
        ],
    )
    rows = [
        {"knob": name, "setting": text, **measure_candidate(scenario, candidate)}
        for (name, text, _), candidate in zip(settings, candidates, strict=True)
    ]
    return pd.DataFrame(rows)


def measure_candidate(scenario: Scenario, candidate: Candidate) -> dict[str, object]:
    """Return the expected measures of a candidate, and a note if overloaded or unable to start."""
    performance, memory = candidate.prediction.performance, candidate.prediction.memory
    if performance is None or performance.capacity is None:
        return {**dict.fromkeys(MEASURE_LABELS.values()), "note": memory.reason}
    max_tps, usd = performance.capacity.mid * scenario.workload.output.mean, candidate.usd_per_hour
    per_mtok = usd / 3600 / max_tps * 1e6 if usd else None
    values = (
        performance.ttft["p95"].mid * 1e3,
        performance.itl["p99"].mid * 1e3,
        max_tps,
        memory.pool.reported_tokens,
        per_mtok,
    )
    return {
        **dict(zip(MEASURE_LABELS.values(), values, strict=True)),
        "note": "overloaded" if performance.saturated else "",
    }


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


def compute_knob_effects(data: pd.DataFrame) -> pd.DataFrame:
    """Return the change of each measure by each knob, and how good it is.

    Columns: knob, measure, change (a fraction), benefit (the same, positive if it helps), told (as
    text), effect. Latencies of an overloaded deployment grow without bound and have no figure.
    """
    rows: list[tuple[str, str, float, float, str]] = []
    base = data.iloc[0]
    for _, row in data.iloc[1:].iterrows():
        label = f"{row['knob']}: {row['setting']}"
        for measure, column in MEASURE_LABELS.items():
            if pd.isna(base[column]) or not base[column]:
                continue
            if pd.isna(row[column]):
                rows.append((label, measure, math.nan, -1.0, "does not fit"))
            elif row["note"] == "overloaded" and measure in ("TTFT", "ITL"):
                rows.append((label, measure, math.inf, -1.0, "overloaded"))
            else:
                change = float(row[column] / base[column] - 1)
                text = f"{change:+.0%}" if abs(change) >= 0.005 else "0"
                rows.append((label, measure, change, MEASURE_DIRECTIONS[measure] * change, text))
    told = pd.DataFrame(rows, columns=["knob", "measure", "change", "benefit", "told"])
    return told.assign(effect=[judge_benefit(benefit) for benefit in told["benefit"]])
