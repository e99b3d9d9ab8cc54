"""Simulate remedies: the measured traffic with one argument or the layout changed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.latency.performance import Performance
from planner.memory.deployment_changes import MAX_REMEDY_UTILIZATION, list_smaller_caches
from planner.memory.memory_plan import find_safe_memory_utilization, get_memory_plan
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
    settings = _list_settings(deployment, load, mode)
    if mode in KV_CACHE_MODES:
        share = min(find_safe_memory_utilization(deployment), MAX_REMEDY_UTILIZATION)
        if share >= deployment.args.gpu_memory_utilization + 0.01:
            more = {"gpu_memory_utilization": share}
            roomier = deployment.with_args(**more)
            settings = [more, *settings]
            settings += [{**more, **one} for one in _list_settings(roomier, load, mode)]
    for setting in settings:
        change = " and ".join(f"{name} {value}" for name, value in setting.items())
        yield change, deployment.with_args(**setting), load
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


def _list_settings(deployment: Deployment, load: Workload, mode: str) -> list[dict[str, Any]]:
    """List the arguments that may help against `mode`, one change each."""
    args, pool = deployment.args, get_memory_plan(deployment).pool
    num_sequences = max(pool.count_sequences(round(load.mean_tokens_per_request)), 1)
    settings = list[dict[str, Any]]()
    if mode == "kv_preemption" and num_sequences < args.max_num_seqs:
        settings.append({"max_num_seqs": num_sequences})
    if mode in ("kv_preemption", "kv_full", "oom_admission"):
        settings += [{"kv_cache_dtype": name} for name in list_smaller_caches(deployment)]
    if mode == "oversubscribed" and num_sequences > args.max_num_seqs:
        more = min(2 * args.max_num_seqs, num_sequences, args.max_num_batched_tokens)
        settings.append({"max_num_seqs": more})
    if mode == "prefill_contention":
        settings += [
            {"max_num_batched_tokens": budget}
            for budget in (args.max_num_batched_tokens // 2, args.max_num_batched_tokens // 4)
            if budget >= max(MIN_BATCHED_TOKENS, args.max_num_seqs)
        ]
    return settings
