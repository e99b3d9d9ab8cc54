"""The memory plan: what an engine does with a GPU's bytes at start-up, term by term, and whether it starts at all.

vLLM 0.20.2 v1/worker/gpu_worker.py:332, 0.33.0 v1/worker/gpu_worker.py:641: requested = ceil(total
x utilization); what weights, activation peak, non-torch memory (and, from 0.20.2 on, the CUDA-graph
estimate) leave is the KV pool.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, get_args

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.engines.engine_args import resolve_engine_args
from planner.memory import runtime_overhead
from planner.memory.kv_cache import KvCacheLayout, KvCachePool, build_kv_layout
from planner.memory.weights import compute_stage_bytes
from planner.models.quantization import parse_quantization
from planner.parallelism.layouts import explain_illegal_layout

MemoryStatus = Literal["ok", "at_risk", "does_not_fit"]
MemoryTerm = Literal["weights", "activation", "non_torch", "cudagraph"]
MEMORY_TERMS: tuple[MemoryTerm, ...] = get_args(MemoryTerm)
"""What takes memory beside the KV cache, in the order in which the engine subtracts it; a calibration shifts these."""
MEMORY_TERM_LABELS = {
    "weights": "weights",
    "activation": "activation",
    "non_torch": "non-torch",
    "cudagraph": "CUDA graphs",
}
WEIGHTS_RELATIVE_SIGMA = 0.004
"""Relative spread of logged weights around the checkpoint's arithmetic (loader padding, repacked quantized formats)."""
BOOT_RELATIVE_SPREAD = 0.05
"""By how much a term differs between identical boots (first, uncached compile), where a log calibrates it."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per GPU on the rank that decides the pool. Parts of the budget sum to `requested` to the byte."""

    deployment: Deployment
    total_bytes: int
    budget_bytes: int
    weights: Interval
    activation: Interval
    non_torch: Interval
    cudagraph: Interval
    budgeted_terms: tuple[
        str, ...
    ]  # terms that `requested` must hold beside the KV cache; the others live outside
    context: Interval
    kv_available: Interval
    layout: KvCacheLayout
    pool: KvCachePool
    max_concurrency: Interval
    status: MemoryStatus
    reason: str
    warnings: tuple[str, ...]

    @property
    def bytes_outside_budget(self) -> int:
        """Bytes outside the budget: driver context, other tenants, and terms that the engine doesn't budget."""
        return self.total_bytes - self.budget_bytes

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """Bytes by name, summing to `total`; a negative KV cache is what the budget lacks."""
        inside = {
            MEMORY_TERM_LABELS[term]: round(getattr(self, term).mid) for term in self.budgeted_terms
        }
        others = {
            MEMORY_TERM_LABELS[term]: round(getattr(self, term).mid)
            for term in MEMORY_TERMS
            if term not in self.budgeted_terms
        }
        beside = {
            "driver context": round(self.context.mid),
            "other tenants": self.deployment.other_tenants_bytes,
        }
        rest, outside = self.bytes_outside_budget, {}
        for name, size in (beside | others).items():
            outside[name] = min(rest, size)
            rest -= outside[name]
        return {
            **inside,
            "KV cache": self.budget_bytes - sum(inside.values()),
            **outside,
            "headroom": rest,
        }

    @cached_property
    def remedy(self) -> str:
        """The smallest change that would make it fit; empty when it fits."""
        return "" if self.status == "ok" else _find_remedy(self)

    @property
    def can_start(self) -> bool:
        """The engine would start: everything fits, and the pool holds one request of max_model_len."""
        return self.status != "does_not_fit" and self.pool.max_concurrency_x >= 1

    def __str__(self) -> str:
        lines = [f"{self.deployment}: {self.status}"]
        lines += [f"  {name:<15}{size / GIB:8.2f} GiB" for name, size in self.bytes_by_part.items()]
        lines.append(
            f"  {self.pool.num_blocks} blocks, {self.pool.reported_tokens} tokens,"
            f" {self.max_concurrency:.2f}x"
        )
        return "\n".join(lines + [text for text in (self.reason, self.remedy) if text])


def plan_memory(deployment: Deployment) -> MemoryPlan:
    """The start-up accounting of `deployment` on its fullest pipeline stage, its `memory_calibration` added."""
    engine, args = deployment.engine, deployment.args
    share = args.gpu_memory_utilization
    requested = math.ceil(deployment.gpu_total_bytes * share)
    shifts = dict(deployment.memory_calibration)
    if unknown := set(shifts) - set(MEMORY_TERMS):
        raise PlannerError(
            f"memory calibration: unknown term {', '.join(sorted(unknown))}; known:"
            f" {', '.join(MEMORY_TERMS)}"
        )
    in_budget = _select_budgeted_terms(deployment)
    layout, context = (
        build_kv_layout(deployment),
        runtime_overhead.estimate_driver_context(deployment),
    )
    estimate = runtime_overhead.estimate_cudagraph_budget(deployment)
    graphs = (
        estimate
        if "cudagraph" in in_budget
        else runtime_overhead.estimate_cudagraph_actual(deployment, estimate)
    )
    stages = []
    weights = compute_stage_bytes(deployment)
    for stage, size in enumerate(weights):
        terms = {
            "weights": Interval.from_lognormal(size, WEIGHTS_RELATIVE_SIGMA),
            "activation": runtime_overhead.estimate_activation(
                deployment, last_stage=stage == len(weights) - 1
            ),
            "non_torch": runtime_overhead.estimate_non_torch(deployment),
            "cudagraph": graphs,
        }
        terms = {
            name: _apply_calibration_shift(term, shifts.get(name)) for name, term in terms.items()
        }
        used = sum((terms[name] for name in in_budget), Interval.from_value(0))
        if (
            engine.facts.memory_budget == "free"
        ):  # a share of what is free once everything else is there
            free = -used - context + (deployment.gpu_total_bytes - deployment.other_tenants_bytes)
            stages.append(
                (terms, free.map_monotone(lambda size: round(share * size)), round(used.mid))
            )
        else:
            stages.append((terms, -used + requested, round(used.mid)))
    pools = [
        layout.build_pool([getattr(kv, end) for _, kv, _ in stages]) for end in ("lo", "mid", "hi")
    ]
    tight = min(
        range(len(stages)), key=lambda i: stages[i][1].mid / layout.stage_bytes_per_block[i]
    )
    terms, available, budgeted = stages[tight]
    memory = MemoryPlan(
        deployment, deployment.gpu_total_bytes, budgeted + round(available.mid), **terms,
        budgeted_terms=in_budget,
        context=context, kv_available=available, layout=layout, pool=pools[1], status="ok",
        reason="", warnings=(),
        max_concurrency=Interval(*(pool.max_concurrency_x for pool in pools)),
    )  # fmt: skip
    status, reason = _determine_status(memory, pools)
    return replace(
        memory, status=status, reason=reason, warnings=(reason,) if status == "at_risk" else ()
    )


def get_memory_plan(deployment: Deployment) -> MemoryPlan:
    """`plan`, worked out once for any number of replicas."""
    memory = _plan_memory_cached(deployment.with_replicas(1))
    return memory if deployment.layout.replicas == 1 else replace(memory, deployment=deployment)


_plan_memory_cached = lru_cache(maxsize=4096)(plan_memory)


def _select_budgeted_terms(deployment: Deployment) -> tuple[str, ...]:
    """The terms that share the engine's memory fraction with the KV cache.

    vLLM: all, graphs if it estimates them; SGLang's static fraction: weights; TensorRT-LLM and TGI
    size the pool last.
    """
    budget = deployment.engine.facts.memory_budget
    if budget == "static":
        return ("weights",)
    return (
        MEMORY_TERMS
        if budget == "free" or runtime_overhead.estimates_cudagraphs(deployment)
        else MEMORY_TERMS[:3]
    )


def _apply_calibration_shift(term: Interval, shift: float | None) -> Interval:
    """`term` with whole bytes in the middle, moved by a calibrated `shift` and then at most as wide as boots differ."""
    mid = round(term.mid)
    if shift is None:
        return Interval(min(term.lo, mid), mid, max(term.hi, mid))
    moved = max(0, round(term.mid + shift))
    most = BOOT_RELATIVE_SPREAD * moved
    return Interval(moved - min(mid - term.lo, most), moved, moved + min(term.hi - mid, most))


def _determine_status(memory: MemoryPlan, pools: list[KvCachePool]) -> tuple[MemoryStatus, str]:
    """Status and reason, in the engine's words: the start check, the pool's size, then what comes after the pool."""
    deployment, layout, gib = memory.deployment, memory.layout, GIB
    free = _estimate_free_at_start(memory)
    if free.hi < memory.budget_bytes:
        return (
            "does_not_fit",
            (
                f"Free memory on device ({free.mid / gib:.2f}/{memory.total_bytes / gib:.2f} GiB)"
                " on startup is less than desired GPU memory utilization"
                f" ({deployment.args.gpu_memory_utilization}, {memory.budget_bytes / gib:.2f} GiB)"
            ),
        )
    reserve = 1 if deployment.engine.facts.null_block_reserved else 0
    need = layout.max_blocks_per_request + reserve
    if pools[0].num_blocks < need:
        status: MemoryStatus = "at_risk" if pools[2].num_blocks >= need else "does_not_fit"
        have, want = memory.kv_available.mid, need * memory.pool.bytes_per_block
        if have <= 0:
            return (
                status,
                f"No available memory for the cache blocks: the budget lacks {-have / gib:.2f} GiB",
            )
        return (
            status,
            (
                f"One request of max_model_len {layout.max_model_len} needs {want / gib:.2f} GiB KV"
                f" cache, {memory.kv_available / gib:.2f} GiB is available,"
                f" {max(0.0, want - have) / gib:.2f} GiB is missing; estimated maximum model length"
                f" {layout.compute_max_model_len(memory.pool.num_blocks - reserve)}"
            ),
        )
    if free.lo < memory.budget_bytes:
        return (
            "at_risk",
            (
                f"{free / gib:.2f} GiB may be free at start, {memory.budget_bytes / gib:.2f} GiB is"
                " requested"
            ),
        )
    rest, interval = _estimate_after_pool(memory)
    if rest < interval.hi:
        return (
            "at_risk",
            (
                f"CUDA graphs and the sampler's warm-up on {deployment.args.max_num_seqs} rows want"
                f" {interval / gib:.2f} GiB after the KV pool is allocated, {rest / gib:.2f} GiB"
                " remains"
            ),
        )
    return "ok", ""


def _estimate_free_at_start(memory: MemoryPlan) -> Interval:
    if memory.deployment.gpu_free_bytes is not None:
        return Interval.from_value(memory.deployment.gpu_free_bytes)
    return (
        -memory.context + (memory.total_bytes - memory.deployment.other_tenants_bytes)
    ).map_monotone(lambda size: max(0.0, size))


def _estimate_after_pool(memory: MemoryPlan) -> tuple[float, Interval]:
    """Bytes left once the pool is allocated, and what vLLM then still takes: graphs outside the budget, warm-up."""
    deployment = memory.deployment
    free = deployment.gpu_free_bytes
    if free is None:
        free = (
            memory.total_bytes
            - deployment.other_tenants_bytes
            - round(runtime_overhead.get_base_driver_context(deployment))
        )
    rest = free - memory.budget_bytes + memory.activation.mid
    if deployment.engine.name != "vllm":
        return rest, Interval.from_value(0)
    graphs = Interval.from_value(0) if "cudagraph" in memory.budgeted_terms else memory.cudagraph
    return rest, runtime_overhead.estimate_after_pool(deployment, graphs)


def find_safe_memory_utilization(deployment: Deployment) -> float:
    """The largest gpu_memory_utilization, in hundredths, that passes the start check and leaves room after the pool."""
    memory = get_memory_plan(deployment)
    rest, interval = _estimate_after_pool(memory)
    most = min(
        _estimate_free_at_start(memory).lo,
        memory.budget_bytes + rest - interval.hi,
        memory.total_bytes,
    )
    return max(0.0, math.floor(100 * most / memory.total_bytes) / 100)


def explain_memory_utilization(deployment: Deployment) -> str:
    """What speaks for a gpu_memory_utilization that is not the engine's default; empty where it is."""
    usual = resolve_engine_args(
        {}, deployment.engine, deployment.gpu, deployment.model
    ).gpu_memory_utilization
    if deployment.args.gpu_memory_utilization == usual:
        return ""
    most = find_safe_memory_utilization(deployment)
    return f"the default is {usual:g}; up to {most:g} starts and leaves what the engine takes later"


def _find_remedy(memory: MemoryPlan) -> str:
    """The first change, from the smallest on, after which `plan` says ok."""
    for text, changed in _propose_memory_changes(memory):
        if plan_memory(changed).status == "ok":
            return text
    sizes = range(math.ceil(memory.total_bytes / GIB), 1024)
    alone = replace(memory.deployment, gpu_free_bytes=None)
    index = bisect_left(
        sizes,
        True,
        key=lambda gib: plan_memory(replace(alone, gpu_total_bytes=gib * GIB)).status == "ok",
    )
    return (
        f"use GPUs with {sizes[index]} GiB or more" if index < len(sizes) else "use a smaller model"
    )


def _propose_memory_changes(memory: MemoryPlan) -> Iterator[tuple[str, Deployment]]:
    """Changes that may help: engine arguments, then the KV cache's format, more GPUs, the weights' format."""
    deployment, args, layout = memory.deployment, memory.deployment.args, memory.deployment.layout
    current, safe, changed = (
        args.gpu_memory_utilization,
        find_safe_memory_utilization(deployment),
        deployment.with_args,
    )
    shares = [
        percent / 100 for percent in range(math.floor(100 * current) + 1, round(100 * safe) + 1)
    ] or [safe]
    least = bisect_left(
        shares,
        True,
        key=lambda share: plan_memory(changed(gpu_memory_utilization=share)).status == "ok",
    )
    if (share := shares[min(least, len(shares) - 1)]) > 0:
        yield f"set gpu_memory_utilization to {share}", changed(gpu_memory_utilization=share)
    if deployment.gpu_free_bytes is not None or deployment.other_tenants_bytes:
        yield (
            "stop what else runs on the GPU",
            replace(deployment, gpu_free_bytes=None, other_tenants_bytes=0),
        )
    if args.max_num_seqs > 256:
        yield "set max_num_seqs to 256", changed(max_num_seqs=256)
    for share, text in ((current, ""), (safe, f"gpu_memory_utilization to {safe} and ")):
        if (
            share > 0
            and (
                length := find_max_model_len(plan_memory(changed(gpu_memory_utilization=share)))[0]
            )
            >= 1024
        ):
            yield (
                f"set {text}max_model_len to {length}",
                changed(gpu_memory_utilization=share, max_model_len=length),
            )
    formats = deployment.engine.facts.kv_cache_dtypes
    if (args.kv_cache_dtype or "auto") == "auto" and (not formats or "fp8" in formats):
        yield "store the KV cache in FP8 (kv_cache_dtype fp8)", changed(kv_cache_dtype="fp8")
    wider = [
        replace(layout, tp=tp, ep=1)
        for tp in (2, 4, 8)
        if layout.tp < tp <= deployment.gpus_per_node
    ]
    deeper = [replace(layout, pp=pp) for pp in (2, 4, 8) if pp > layout.pp]
    for bigger in (*wider, *deeper, *(replace(w, pp=d.pp) for w in wider[-1:] for d in deeper)):
        if (
            explain_illegal_layout(
                deployment.model, bigger, deployment.gpus_per_node, deployment.engine
            )
            is None
        ):
            yield f"spread the model over {bigger}", replace(deployment, layout=bigger)
    for what, scheme in (
        ("FP8", parse_quantization("fp8")),
        ("4 bits (AWQ)", parse_quantization("awq")),
    ):
        if scheme.weight_bits < deployment.model.quantization.weight_bits:
            smaller = replace(deployment.model, quantization=scheme)
            yield f"store the weights in {what}", replace(deployment, model=smaller)


def find_max_model_len(memory: MemoryPlan) -> tuple[int, int]:
    """The largest max_model_len that surely starts (lower end of the KV interval), and that the middle says starts.

    Never above what the model was trained for.
    """
    limit = memory.deployment.model.architecture.max_position
    reserve = bool(memory.deployment.engine.facts.null_block_reserved)
    blocks = (
        max(0.0, size) // memory.pool.bytes_per_block
        for size in (memory.kv_available.lo, memory.kv_available.mid)
    )
    safe, likely = (
        min(limit, memory.layout.compute_max_model_len(max(0, int(n) - reserve))) for n in blocks
    )
    return safe, likely
