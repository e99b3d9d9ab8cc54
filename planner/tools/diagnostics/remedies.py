"""Simulate remedies: the measured traffic with one argument or the layout changed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.latency.performance import Performance
from planner.memory.deployment_changes import DeploymentChange, list_smaller_caches
from planner.memory.memory_plan import find_larger_utilization, get_memory_plan
from planner.planning.prediction import predict
from planner.tools.diagnostics.failure_detection import DiagnosisCase
from planner.workload.workload import Workload

KV_CACHE_MODES = ("kv_preemption", "kv_full", "oversubscribed", "oom_admission")
"""Failures that more memory for the KV cache may end."""
MIN_BATCHED_TOKENS = 512
"""Smallest token budget of a step to propose; smaller prefill chunks only cost throughput."""


@dataclass(frozen=True)
class Remedy:
    """One change, and the predicted performance of each replica with it."""

    change: str
    rate: float  # requests/s of each replica
    performance: Performance


def simulate_remedies(case: DiagnosisCase, mode: str) -> list[Remedy]:
    """Simulate every change that may help against `mode`; none if plan or traffic is unknown."""
    if case.simulated is None:
        return []
    remedies = []
    for change, deployment, workload in _propose_remedies(case, mode):
        try:
            performance = predict(deployment, workload, quick=True).performance
        except PlannerError:  # this engine or model does not support the change
            continue
        if performance is not None:
            remedies.append(Remedy(change, workload.rate or 0.0, performance))
    return remedies


def _propose_remedies(case: DiagnosisCase, mode: str) -> Iterator[tuple[str, Deployment, Workload]]:
    """Yield changes in words, with the deployment and the traffic of a replica after each."""
    planned, load = case.planned, case.measured_workload
    assert planned is not None and load is not None
    deployment = planned.deployment
    combinations = [[change] for change in _list_changes(deployment, load, mode)]
    if mode in KV_CACHE_MODES and (share := find_larger_utilization(deployment)):
        more = DeploymentChange("gpu_memory_utilization", share)
        others = _list_changes(more.apply(deployment), load, mode)
        combinations = [[more], *combinations, *([more, change] for change in others)]
    for changes in combinations:
        text = " and ".join(f"{change.argument} {change.value}" for change in changes)
        yield text, reduce(lambda changed, change: change.apply(changed), changes, deployment), load
    if mode == "cold_prefix_cache" and planned.workload:
        hit_rate = planned.workload.cache_hit_fraction
        change = f"{hit_rate:.0%} of the prompt tokens cached, as planned"
        yield change, deployment, replace(load, prefix_hit_rate=hit_rate)
    if mode == "drafts_rejected" and deployment.speculation:
        measured = case.deployment_as_measured.speculation or deployment.speculation
        if (fewer := measured.num_speculative_tokens // 2) >= 1:
            speculation = replace(measured, num_speculative_tokens=fewer)
            change = f"num_speculative_tokens {fewer}"
            yield change, replace(deployment, speculation=speculation), load
        yield "no speculation", replace(deployment, speculation=None), load
    if mode in (*KV_CACHE_MODES, "assumption"):
        yield "another replica beside it", deployment, load.split(2)


def _list_changes(deployment: Deployment, load: Workload, mode: str) -> list[DeploymentChange]:
    """List the changes of an argument that may help against `mode`."""
    args, pool = deployment.args, get_memory_plan(deployment).pool
    num_sequences = max(pool.count_sequences(round(load.mean_tokens_per_request)), 1)
    values: list[tuple[str, Any]] = []
    if mode == "kv_preemption" and num_sequences < args.max_num_seqs:
        values.append(("max_num_seqs", num_sequences))
    if mode in ("kv_preemption", "kv_full", "oom_admission"):
        values += [("kv_cache_dtype", name) for name in list_smaller_caches(deployment)]
    if mode == "oversubscribed" and num_sequences > args.max_num_seqs:
        more = min(2 * args.max_num_seqs, num_sequences, args.max_num_batched_tokens)
        values.append(("max_num_seqs", more))
    if mode == "prefill_contention":
        values += [
            ("max_num_batched_tokens", budget)
            for budget in (args.max_num_batched_tokens // 2, args.max_num_batched_tokens // 4)
            if budget >= max(MIN_BATCHED_TOKENS, args.max_num_seqs)
        ]
    return [DeploymentChange(argument, value) for argument, value in values]
