"""One deployment with one thing moved at a time: load, batch limits, a long prompt beside it, reuse of prefixes.

Frames have columns as people read them, units included; what is predicted stands in them as
intervals.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from planner.analysis.layout_tables import estimate_max_rps
from planner.analysis.tail_latency import build_latency_row
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.latency.speculative_decoding import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.candidate import Candidate
from planner.planning.evaluation import saturate_workload
from planner.planning.prediction import evaluate, evaluate_batch
from planner.planning.scenario import Scenario
from planner.workload.workload import Workload

PREFIX_CACHE_OVERHEAD_FRACTION = 0.01
"""Throughput that prefix caching costs where nothing is ever reused: under 1% (vLLM blog, V1 alpha, January 2025)."""


def isolate_replica(scenario: Scenario, candidate: Candidate) -> tuple[Deployment, Workload]:
    """One replica of `candidate`, and its share of the scenario's traffic (offline: a full batch)."""
    workload = scenario.workload.split(candidate.deployment.layout.replicas)
    alone = candidate.deployment.with_replicas(1)
    return alone, saturate_workload(alone, workload) if scenario.offline else workload


def get_slo_column(scenario: Scenario, metric: str) -> tuple[str, float | None]:
    """The column of a sweep that the service level limits, and the limit in ms; the p95 where it doesn't."""
    found = next((target for target in scenario.slo_targets if target.metric == metric), None)
    return (
        (f"{found.name} (ms)", found.seconds * 1e3)
        if found
        else (f"p95 {metric.upper()} (ms)", None)
    )


def space_logarithmically(low: float, high: float, points: int = 24) -> list[int]:
    """Whole numbers from `low` to `high`, evenly apart on a logarithmic axis."""
    return sorted(
        {round(value) for value in np.geomspace(max(low, 1), max(high, low + 1, 2), points)}
    )


def sweep_concurrency(
    deployment: Deployment, workload: Workload, values: Sequence[int]
) -> pd.DataFrame:
    """So many requests always in flight: a closed loop; one row per case that fits."""
    loads = [replace(workload, rate=None, concurrency=n, num_prompts=None) for n in values]
    found = zip(values, evaluate_batch((deployment, load) for load in loads), strict=True)
    rows = [(n, prediction.performance) for n, prediction in found if prediction.performance]
    return pd.DataFrame(
        [
            {"Requests in flight": n, **build_latency_row(p), "Output tokens/s": p.output_tps}
            for n, p in rows
        ]
    )


def simulate_prefill_gaps(
    deployment: Deployment, workload: Workload, sequences: int, prompt: int, chunked: bool = True
) -> pd.DataFrame:
    """Each gap between outputs of `sequences` decoding ones while a prompt of `prompt` tokens arrives beside them.

    Unchunked, the whole prompt is one step. The first and the last three gaps are undisturbed.
    """
    budget = deployment.args.max_num_batched_tokens if chunked else prompt + sequences
    share = math.ceil(
        sequences / deployment.layout.pp
    )  # of the sequences, in one of the batches under way
    step, contexts = (
        build_step_model(deployment.with_args(max_num_batched_tokens=budget)),
        [round(workload.mean_decode_context)] * share,
    )
    room = budget - share * (1 + step.num_draft_tokens)
    if room < 1:
        raise PlannerError(
            f"max_num_batched_tokens {budget} leaves no room beside {share} decoding sequences"
        )
    plain = step.estimate_step([], contexts).seconds
    starts = range(0, prompt, room)
    mixed = [
        step.estimate_step([(min(room, prompt - start), start)], contexts).seconds
        for start in starts
    ]
    waits = (
        [plain] * 3 + [plain + (seconds - plain) / step.stages for seconds in mixed] + [plain] * 3
    )
    ends = (np.cumsum(waits) - plain * 3) * 1e3  # the prompt arrives at 0
    spread = [Interval.from_lognormal(wait * 1e3, step.sigma_tpot) for wait in waits]
    carries = [False] * 3 + [True] * len(mixed) + [False] * 3
    return pd.DataFrame({"ms": ends, "Gap (ms)": spread, "Prompt in it": carries})


def sweep_long_prompt(
    deployment: Deployment, workload: Workload, sequences: int, prompt: int, budgets: Sequence[int]
) -> pd.DataFrame:
    """What a prompt of `prompt` tokens does to everyone else and waits itself, by max_num_batched_tokens."""
    rows, whole = [], max(deployment.args.max_model_len, prompt + sequences)
    for budget, chunked in [*((budget, True) for budget in budgets), (whole, False)]:
        changed = deployment.with_args(
            max_num_batched_tokens=budget, enable_chunked_prefill=chunked
        )
        data = simulate_prefill_gaps(changed, workload, sequences, prompt, chunked)
        disturbed = data[data["Prompt in it"]]
        row = {
            "max_num_batched_tokens": f"{budget:,}" if chunked else "whole prompt",
            "Steps": len(disturbed),
        }
        row |= {"Longest gap (ms)": max(disturbed["Gap (ms)"], key=lambda gap: gap.mid)}
        row |= {"Disturbed for (ms)": float(disturbed["ms"].max())}
        rows.append(row | {"Activations (GiB per GPU)": get_memory_plan(changed).activation / GIB})
    return pd.DataFrame(rows)


def sweep_prefix_reuse(
    scenario: Scenario, candidate: Candidate, shares: Sequence[float]
) -> pd.DataFrame:
    """A share of all prompt tokens found in the prefix cache: TTFT, throughput when full, replicas needed."""
    alone = candidate.deployment.with_args(enable_prefix_caching=True)
    rows = []
    for share in shares:
        workload = replace(scenario.workload, prefix_tokens=0, prefix_hit_rate=share)
        busy, loaded = (
            evaluate(alone, w).performance for w in (saturate_workload(alone, workload), workload)
        )
        each = estimate_max_rps(replace(scenario, workload=workload), alone.with_replicas(1))
        needed = math.ceil((workload.rate or 0) / each) if each else math.nan
        row: dict[str, Any] = {
            "Prompt tokens found in the cache (%)": share * 100,
            "Replicas needed": needed,
        }
        row |= {"Requests/s, all slots taken": busy and busy.request_tps}
        rows.append(row | (build_latency_row(loaded) if loaded else {}))
    return pd.DataFrame(rows)


def find_break_even_reuse(reuse: pd.DataFrame) -> float | None:
    """The reuse (%) from which prefix caching wins more throughput than `PREFIX_CACHE_COST`, of a `by_reuse` frame."""
    served = np.array([value.mid for value in reuse["Requests/s, all slots taken"]])
    gain = np.maximum.accumulate(served / served[0] - 1)
    return (
        float(np.interp(PREFIX_CACHE_OVERHEAD_FRACTION, gain, reuse.iloc[:, 0]))
        if gain[-1] > PREFIX_CACHE_OVERHEAD_FRACTION
        else None
    )
