"""Analytical effect of each knob on a plan, and the cost of scenarios without any tuning.

Knobs are turned one at a time on the plan's deployment. Its replicas stay, except for the knobs
that change them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import pandas as pd

from planner.analysis.sweep import Row, sweep_args
from planner.core.errors import PlannerError
from planner.core.progress import show_step
from planner.engines.deployment import Deployment
from planner.engines.engine_args import resolve_engine_args
from planner.memory.deployment_changes import DeploymentChange
from planner.parallelism.layouts import explain_illegal_layout
from planner.planning.candidate import Candidate
from planner.planning.deployment_builder import load_format
from planner.planning.evaluation import evaluate_candidate, evaluate_candidates
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.search import Plan, search_deployments
from planner.planning.tolerance import simulate_candidate
from planner.workload.length_distribution import LengthDistribution

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
PAIR_SLOTS, PAIR_BUDGETS_TOKENS = (1, 2, 4, 8), (512, 1024, 2048, 4096, 8192)
"""Slots per sequence that decodes, and tokens of a step, whose pairs are replayed."""


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


@show_step("simulating engine arguments")
def sweep_knob_pair(scenario: Scenario, best: Candidate) -> pd.DataFrame:
    """Return how likely every target is met, replayed, by max_num_seqs and max_num_batched_tokens.

    Slots are multiples of the sequences that decode at once on average. Columns: both arguments, and
    "probability". Pairs with which the engine does not start are left out.
    """
    performance = best.prediction.performance
    assert performance is not None
    running = max(1, round(performance.decode_batch))

    def _read(deployment: Deployment) -> Row:
        tried = evaluate_candidate(scenario, deployment, deployment.layout.replicas)
        if not tried.prediction.can_start:
            raise PlannerError(tried.prediction.memory.reason)
        return {"probability": simulate_candidate(scenario, tried).probability}

    pairs = {
        "max_num_seqs": [m * running for m in PAIR_SLOTS],
        "max_num_batched_tokens": PAIR_BUDGETS_TOKENS,
    }
    return sweep_args(best.deployment, pairs, _read)


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
    text). Latencies of an overloaded deployment grow without bound and have no figure.
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


def reset_tuning(scenario: Scenario, gpu: CandidateGpu | None = None) -> Scenario:
    """Return `scenario` with the checkpoint's formats and default arguments.

    Its GPU is `gpu`; without one the first that the scenario names.
    """
    candidate_gpu, model = gpu or scenario.gpus[0], load_format(scenario.model, None)
    args = resolve_engine_args({}, scenario.engine, candidate_gpu.gpu, model)
    defaults = {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs}
    return replace(
        scenario,
        gpus=(candidate_gpu,),
        quantizations=(None,),
        kv_cache_dtypes=("auto",),
        speculation=None,
        layout={},
        engine_args={**defaults, **scenario.engine_args},
    )


def fix_lengths(scenario: Scenario) -> Scenario:
    """Return `scenario` with every prompt and every answer as long as the mean one."""
    load = scenario.workload
    alike = replace(
        load,
        prompt=LengthDistribution.from_constant(load.prompt.mean),
        output=LengthDistribution.from_constant(load.output.mean),
    )
    return replace(scenario, name=f"{scenario.name}, fixed lengths", workload=alike)


def build_decision_table(
    scenarios: Iterable[Scenario], answer: Callable[[Scenario], Plan] = search_deployments
) -> pd.DataFrame:
    """Return each scenario's plan, its binding constraint, and its saving over no tuning.

    Untuned means the plan's own GPU with the checkpoint's formats and default arguments; "the first
    GPU instead" is the same on the first GPU that the scenario names, where that is another. Rows
    without a plan, or in which the knobs save nothing, are left out: `attrs["left_out"]` says why.
    `answer` may be another way to the plan, such as a cached search.
    """
    rows, left_out = [], list[str]()
    for scenario in scenarios:
        plan = answer(scenario)
        if (best := plan.chosen) is None:
            left_out.append(f"{scenario.name} (no plan meets its targets)")
            continue
        own = next(each for each in scenario.gpus if each.gpu.name == best.deployment.gpu.name)
        untuned = answer(reset_tuning(scenario, own))
        default, usd = untuned.chosen, best.usd_per_hour
        untuned_usd = default and default.usd_per_hour
        if default and (default.usd_per_hour, default.prediction.num_gpus_billed) == (
            usd, best.prediction.num_gpus_billed,
        ):  # fmt: skip
            left_out.append(f"{scenario.name} (costs the same with no knob turned)")
            continue
        prompt, output = scenario.workload.prompt.mean, scenario.workload.output.mean
        rows.append({
            "scenario": scenario.name, "work": f"{prompt:,.0f} tokens in, {output:,.0f} out",
            "approach": f"{best.description}, max_num_seqs {best.deployment.args.max_num_seqs}",
            "what limits it": plan.binding_constraint.constraint,
            "USD per hour": usd and f"{usd:,.2f}",
            "no knob turned, same GPU": _describe_untuned(untuned),
            "its USD per hour": untuned_usd and f"{untuned_usd:,.2f}",
            "saved (%)": round((1 - usd / untuned_usd) * 100) if usd and untuned_usd else None,
            "the first GPU instead": "" if own is scenario.gpus[0]
            else _describe_untuned(answer(reset_tuning(scenario))),
        })  # fmt: skip
    table = pd.DataFrame(rows)
    table.attrs["left_out"] = "; ".join(left_out)
    return table


def _describe_untuned(plan: Plan) -> str:
    if plan.chosen is None:
        return f"nothing meets the targets: {plan.binding_constraint.constraint}"
    usd = plan.chosen.usd_per_hour
    return plan.chosen.description + (f", ${usd:,.2f} per hour" if usd else "")
