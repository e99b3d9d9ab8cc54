"""Analytical effect of each engine argument on a plan, changed one at a time on its deployment."""

import math
from collections.abc import Iterator
from contextlib import suppress

import pandas as pd

from planner.analysis.sweep import judge_benefit
from planner.core.errors import PlannerError
from planner.engines.engine_args import EngineArgs
from planner.planning.candidate import Candidate
from planner.planning.evaluation import evaluate_candidates
from planner.planning.scenario import Scenario

MEASURE_DIRECTIONS = {
    "TTFT p95": -1, "ITL p99": -1, "throughput": 1, "KV cache": 1, "cost": -1,
}  # fmt: skip
"""What is measured of a knob, and whether more of it is good."""


def sweep_knobs(scenario: Scenario, best: Candidate) -> pd.DataFrame:
    """Return what each engine argument does to each measure: knob, measure, change, told, effect.

    Settings that the engine rejects are left out. Latencies of an overloaded deployment grow
    without bound and have no figure; nor has what does not start.
    """
    deployments = {"": best.deployment}
    for name, setting in _list_knob_changes(best.deployment.args):
        text = f"{setting:,}" if type(setting) is int else str(setting)
        with suppress(PlannerError):
            deployments[f"{name}: {text}"] = best.deployment.with_args(**{name: setting})
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
        waits = [performance.get("ttft", "p95").mid, performance.get("itl", "p99").mid]
    pool = candidate.prediction.memory.pool.reported_tokens
    costs = [usd / max_tps] if usd else []
    return dict(zip(MEASURE_DIRECTIONS, [*waits, max_tps, pool, *costs], strict=False))


def _list_knob_changes(args: EngineArgs) -> Iterator[tuple[str, object]]:
    """Yield each engine argument with each setting that is tried."""
    tokens = args.max_num_batched_tokens
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
            yield name, value
