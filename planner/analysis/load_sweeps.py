"""Sweep one variable of a deployment: load, batch limits, a long prompt, prefix reuse.

Columns have readable names with units; predictions are intervals.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from planner.analysis.latency_rows import build_latency_row
from planner.analysis.layout_tables import estimate_max_rps
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.latency.speculative_decoding import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.candidate import Candidate
from planner.planning.capacity import PREFIX_CACHE_OVERHEAD_FRACTION
from planner.planning.evaluation import saturate_workload
from planner.planning.prediction import evaluate, evaluate_batch
from planner.planning.scenario import Scenario
from planner.workload.workload import Workload


def isolate_replica(scenario: Scenario, candidate: Candidate) -> tuple[Deployment, Workload]:
    """Return one replica of `candidate`, and its part of the traffic (offline: a full batch)."""
    workload = scenario.workload.split(candidate.deployment.layout.replicas)
    replica = candidate.deployment.with_replicas(1)
    return replica, saturate_workload(replica, workload) if scenario.offline else workload


def get_slo_column(scenario: Scenario, metric: str) -> tuple[str, float | None]:
    """Return the sweep column with an SLO for `metric`, and its limit in ms; without one, p95."""
    target = next((t for t in scenario.slo_targets if t.metric == metric), None)
    return (
        (f"{target.name} (ms)", target.seconds * 1e3)
        if target
        else (f"p95 {metric.upper()} (ms)", None)
    )


def space_logarithmically(low: float, high: float, points: int = 24) -> list[int]:
    """Return integers from `low` to `high`, evenly spaced on a logarithmic axis."""
    return sorted(
        {round(value) for value in np.geomspace(max(low, 1), max(high, low + 1, 2), points)}
    )


def sweep_concurrency(
    deployment: Deployment, workload: Workload, values: Sequence[int]
) -> pd.DataFrame:
    """Return latencies and throughput of closed loops by requests in flight, if they fit."""
    loads = [replace(workload, rate=None, concurrency=n, num_prompts=None) for n in values]
    predictions = zip(values, evaluate_batch((deployment, load) for load in loads), strict=True)
    rows = [(n, prediction.performance) for n, prediction in predictions if prediction.performance]
    return pd.DataFrame(
        [
            {"Requests in flight": n, **build_latency_row(p), "Output tokens/s": p.output_tps}
            for n, p in rows
        ]
    )


def simulate_prefill_gaps(
    deployment: Deployment, workload: Workload, sequences: int, prompt: int, chunked: bool = True
) -> pd.DataFrame:
    """Return each gap between outputs of `sequences` while a prompt of `prompt` tokens runs.

    Unchunked, the prompt is one step. The first and the last three gaps are undisturbed.
    """
    budget = deployment.args.max_num_batched_tokens if chunked else prompt + sequences
    batch = math.ceil(sequences / deployment.layout.pp)  # in each concurrent batch
    step = build_step_model(deployment.with_args(max_num_batched_tokens=budget))
    contexts = [round(workload.mean_decode_context)] * batch
    chunk_tokens = budget - batch * (1 + step.num_draft_tokens)
    if chunk_tokens < 1:
        raise PlannerError(
            f"max_num_batched_tokens {budget} leaves no room beside {batch} decoding sequences"
        )
    plain = step.estimate_step([], contexts).seconds
    starts = range(0, prompt, chunk_tokens)
    mixed = [
        step.estimate_step([(min(chunk_tokens, prompt - start), start)], contexts).seconds
        for start in starts
    ]
    gaps = (
        [plain] * 3 + [plain + (seconds - plain) / step.stages for seconds in mixed] + [plain] * 3
    )
    ends = (np.cumsum(gaps) - plain * 3) * 1e3  # the prompt arrives at time 0
    intervals = [Interval.from_lognormal(wait * 1e3, step.sigma_tpot) for wait in gaps]
    has_prompt = [False] * 3 + [True] * len(mixed) + [False] * 3
    return pd.DataFrame({"ms": ends, "Gap (ms)": intervals, "Prompt in it": has_prompt})


def sweep_long_prompt(
    deployment: Deployment, workload: Workload, sequences: int, prompt: int, budgets: Sequence[int]
) -> pd.DataFrame:
    """Return the effect of a long prompt on others and its own wait by max_num_batched_tokens."""
    rows, whole = [], max(deployment.args.max_model_len, prompt + sequences)
    for budget, chunked in [*((budget, True) for budget in budgets), (whole, False)]:
        changed = deployment.with_args(
            max_num_batched_tokens=budget, enable_chunked_prefill=chunked
        )
        data = simulate_prefill_gaps(changed, workload, sequences, prompt, chunked)
        disturbed = data[data["Prompt in it"]]
        rows.append({
            "max_num_batched_tokens": f"{budget:,}" if chunked else "whole prompt",
            "Steps": len(disturbed),
            "Longest gap (ms)": max(disturbed["Gap (ms)"], key=lambda gap: gap.mid),
            "Disturbed for (ms)": float(disturbed["ms"].max()),
            "Activations (GiB per GPU)": get_memory_plan(changed).activation / GIB,
        })  # fmt: skip
    return pd.DataFrame(rows)


def sweep_prefix_reuse(
    scenario: Scenario, candidate: Candidate, shares: Sequence[float]
) -> pd.DataFrame:
    """Return TTFT, saturated throughput and replicas by the fraction of cached prompt tokens."""
    deployment = candidate.deployment.with_args(enable_prefix_caching=True)
    rows = []
    for share in shares:
        workload = replace(scenario.workload, prefix_tokens=0, prefix_hit_rate=share)
        saturated, loaded = (
            evaluate(deployment, w).performance
            for w in (saturate_workload(deployment, workload), workload)
        )
        max_rps = estimate_max_rps(
            replace(scenario, workload=workload), deployment.with_replicas(1)
        )
        needed = math.ceil((workload.rate or 0) / max_rps) if max_rps else math.nan
        rows.append({
            "Prompt tokens found in the cache (%)": share * 100, "Replicas needed": needed,
            "Requests/s, all slots taken": saturated and saturated.request_tps,
            **(build_latency_row(loaded) if loaded else {}),
        })  # fmt: skip
    return pd.DataFrame(rows)


def find_break_even_reuse(reuse: pd.DataFrame) -> float | None:
    """Find the reuse (%) whose gain in throughput exceeds `PREFIX_CACHE_OVERHEAD_FRACTION`.

    `reuse` comes from `sweep_prefix_reuse`.
    """
    served = np.array([value.mid for value in reuse["Requests/s, all slots taken"]])
    gain = np.maximum.accumulate(served / served[0] - 1)
    return (
        float(np.interp(PREFIX_CACHE_OVERHEAD_FRACTION, gain, reuse.iloc[:, 0]))
        if gain[-1] > PREFIX_CACHE_OVERHEAD_FRACTION
        else None
    )
