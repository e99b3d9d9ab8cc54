"""What a remedy would do: the measured traffic, replayed with one thing changed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.latency.performance import Performance
from planner.memory.memory_plan import get_memory_plan
from planner.planning.prediction import predict
from planner.tools.diagnostics.failure_detection import DiagnosisCase
from planner.workload.workload import Workload

MIN_BATCHED_TOKENS = 512
"""Of a step: smaller pieces of a prompt would only cost."""


@dataclass(frozen=True)
class Remedy:
    """One change, and what the replica (or each of them) does with it."""

    change: str
    rate: float  # requests/s that each replica gets
    performance: Performance


def simulate_remedies(case: DiagnosisCase, mode: str) -> list[Remedy]:
    """Every change that may help against `mode` with its replay; none where plan or traffic is unknown."""
    if case.simulated is None:
        return []
    remedies = []
    for change, deployment, load in _propose_remedies(case, mode):
        try:
            performance = predict(deployment, load, quick=True).performance
        except PlannerError:  # a change that this engine or model cannot take
            continue
        if performance is not None:
            remedies.append(Remedy(change, load.rate or 0.0, performance))
    return remedies


def _propose_remedies(case: DiagnosisCase, mode: str) -> Iterator[tuple[str, Deployment, Workload]]:
    planned, load = case.planned, case.measured_workload
    assert planned is not None and load is not None
    deployment = planned.deployment
    args, pool = deployment.args, get_memory_plan(deployment).pool
    fits = max(pool.count_sequences(round(load.mean_tokens_per_request)), 1)
    if mode == "kv_preemption" and fits < args.max_num_seqs:
        yield f"max_num_seqs {fits}", deployment.with_args(max_num_seqs=fits), load
    if mode in ("kv_preemption", "oom_admission") and args.kv_cache_dtype in (None, "auto"):
        yield "kv_cache_dtype fp8", deployment.with_args(kv_cache_dtype="fp8"), load
    if mode == "oversubscribed" and fits > args.max_num_seqs:
        more = min(2 * args.max_num_seqs, fits, args.max_num_batched_tokens)
        yield f"max_num_seqs {more}", deployment.with_args(max_num_seqs=more), load
    if mode == "prefill_contention":
        for budget in (args.max_num_batched_tokens // 2, args.max_num_batched_tokens // 4):
            if budget >= max(MIN_BATCHED_TOKENS, args.max_num_seqs):
                yield (
                    f"max_num_batched_tokens {budget}",
                    deployment.with_args(max_num_batched_tokens=budget),
                    load,
                )
    if mode == "cold_prefix_cache" and planned.workload:
        share = planned.workload.cache_hit_fraction
        yield (
            f"{share:.0%} of the prompt tokens cached, as planned",
            deployment,
            replace(load, prefix_hit_rate=share),
        )
    if mode == "drafts_rejected" and deployment.speculation:
        really = case.deployment_as_measured.speculation or deployment.speculation
        if (fewer := really.num_speculative_tokens // 2) >= 1:
            drafting = replace(really, num_speculative_tokens=fewer)
            yield f"num_speculative_tokens {fewer}", replace(deployment, speculation=drafting), load
        yield "no speculation", replace(deployment, speculation=None), load
    if mode in ("kv_preemption", "oversubscribed", "oom_admission", "assumption"):
        yield "another replica beside it", deployment, load.split(2)
