"""What each knob does to a plan, one at a time, in closed form; and what scenarios cost when none is turned.

A knob is turned on the plan's own deployment: its replicas stay, but for the knobs that are about
them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.engines.engine_args import resolve_engine_args
from planner.models.registry import load_model
from planner.parallelism.layouts import explain_illegal_layout
from planner.planning.candidate import Candidate
from planner.planning.evaluation import evaluate_candidates
from planner.planning.scenario import Scenario
from planner.planning.search import Plan, search_deployments

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
    """A row per knob after the plan's own: what it is, its setting, and each of `MEASURES` in closed form.

    What the engine refuses is left out; where the model no longer fits, figures are missing and
    "note" says why.
    """
    turned = [
        (PLAN_LABEL, "", best.deployment),
        *_generate_knob_settings(scenario, best.deployment),
    ]
    candidates = evaluate_candidates(
        scenario,
        [
            (deployment, deployment.layout.replicas, best.preference_key)
            for _, _, deployment in turned
        ],
    )
    rows = [
        {"knob": name, "setting": setting, **measure_candidate(scenario, candidate)}
        for (name, setting, _), candidate in zip(turned, candidates, strict=True)
    ]
    return pd.DataFrame(rows)


def measure_candidate(scenario: Scenario, candidate: Candidate) -> dict[str, Any]:
    """`MEASURES` of a candidate, middles of their intervals, and a note where it does not start or is overloaded."""
    performance, memory = candidate.prediction.performance, candidate.prediction.memory
    if performance is None or performance.capacity is None:
        return {**dict.fromkeys(MEASURE_LABELS.values()), "note": memory.reason}
    most, usd = performance.capacity.mid * scenario.workload.output.mean, candidate.usd_per_hour
    per_mtok = usd / 3600 / most * 1e6 if usd else None
    values = (
        performance.ttft["p95"].mid * 1e3,
        performance.itl["p99"].mid * 1e3,
        most,
        memory.pool.reported_tokens,
        per_mtok,
    )
    return {
        **dict(zip(MEASURE_LABELS.values(), values, strict=True)),
        "note": "overloaded" if performance.saturated else "",
    }


def _generate_knob_settings(
    scenario: Scenario, plan: Deployment
) -> Iterator[tuple[str, str, Deployment]]:
    """(knob, setting, the deployment with it) for each that can be turned here."""
    args, layout = plan.args, plan.layout
    steps: list[tuple[str, Sequence[Any]]] = [
        ("max_num_seqs", (max(args.max_num_seqs // 2, 1), 2 * args.max_num_seqs)),
        (
            "max_num_batched_tokens",
            (max(args.max_num_batched_tokens // 4, 512), 2 * args.max_num_batched_tokens),
        ),
        ("gpu_memory_utilization", (0.8, 0.95)),
        ("max_model_len", (2 * args.max_model_len,)),
        ("kv_cache_dtype", ("fp8",) if args.kv_cache_dtype in (None, "auto") else ("auto",)),
        ("enforce_eager", (not args.enforce_eager,)),
    ]
    for name, values in steps:
        for value in values:
            if value != getattr(args, name):
                yield from _try_setting(name, value, partial(plan.with_args, **{name: value}))
    stored = plan.model.quantization.method
    for quantization in (None, "fp8", "awq"):
        with suppress(PlannerError):
            model = load_model(scenario.model, quantization=quantization)
            if model.quantization.method != stored:
                yield from _try_setting(
                    "weights", quantization or "checkpoint", partial(replace, plan, model=model)
                )
    for tp in filter(None, (layout.tp // 2, layout.tp * 2)):
        shape = replace(layout, tp=tp, ep=tp * layout.dp if layout.ep > 1 else 1)
        if explain_illegal_layout(plan.model, shape, plan.gpus_per_node, plan.engine) is None:
            yield from _try_setting("tensor parallel", tp, partial(replace, plan, layout=shape))
    for count in (layout.replicas - 1, layout.replicas + 1):
        if count:
            yield from _try_setting("replicas", count, partial(plan.with_replicas, count))
    if scenario.speculation:
        drafting = None if plan.speculation else scenario.speculation.to_config()
        setting = drafting.method if drafting else "off"
        yield from _try_setting("speculation", setting, lambda: replace(plan, speculation=drafting))


def _try_setting(
    name: str, setting: object, make: Callable[[], Deployment]
) -> Iterator[tuple[str, str, Deployment]]:
    """The knob, unless the engine refuses it."""
    shown = f"{setting:,}" if type(setting) is int else str(setting)
    with suppress(PlannerError):
        yield name, shown, make()


def compute_knob_effects(data: pd.DataFrame) -> pd.DataFrame:
    """A row per knob and measure of a `knobs` frame: the change against the plan, and how good that is.

    Columns: knob, measure, change (a share), benefit (the same, positive where it helps), told (as
    people read it). Waits of what is overloaded grow without end, and have no figure.
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
    return pd.DataFrame(rows, columns=["knob", "measure", "change", "benefit", "told"])


def reset_tuning(scenario: Scenario) -> Scenario:
    """`scenario` with nothing chosen: its first GPU, the checkpoint as it is, and the engine's own arguments."""
    candidate_gpu, model = scenario.gpus[0], load_model(scenario.model)
    args = resolve_engine_args({}, scenario.engine, candidate_gpu.gpu, model)
    usual = {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs}
    return replace(
        scenario,
        gpus=(candidate_gpu,),
        quantizations=(None,),
        kv_cache_dtypes=("auto",),
        speculation=None,
        layout={},
        engine_args={**usual, **scenario.engine_args},
    )


def build_decision_table(
    scenarios: Iterable[Scenario], answer: Callable[[Scenario], Plan] = search_deployments
) -> pd.DataFrame:
    """A row per scenario: its work, what to do, why not less, and what that saves against turning no knob.

    `answer` may be another way to the plan, such as one that keeps answers.
    """
    rows = []
    for scenario in scenarios:
        plan, usual = answer(scenario), answer(reset_tuning(scenario))
        prompt, output = scenario.workload.prompt.mean, scenario.workload.output.mean
        best, default = plan.chosen, usual.chosen
        usd, more = best and best.usd_per_hour, default and default.usd_per_hour
        seats = f", max_num_seqs {best.deployment.args.max_num_seqs}" if best else ""
        rows.append({
            "scenario": scenario.name, "work": f"{prompt:,.0f} tokens in, {output:,.0f} out",
            "approach": best.description + seats if best else "none",
            "what limits it": plan.binding_constraint.constraint,
            "USD per hour": usd and f"{usd:,.2f}",
            "turning no knob": default.description if default else f"nothing does: {usual.binding_constraint.constraint}",
            "its USD per hour": more and f"{more:,.2f}",
            "saved (%)": round((1 - usd / more) * 100) if usd and more else None,
        })  # fmt: skip
    return pd.DataFrame(rows)
