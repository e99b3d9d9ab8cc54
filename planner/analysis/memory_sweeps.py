"""Tables of the VRAM chapter: terms of the budget, the KV equation, sequences, formats, tenants."""

from collections import Counter
from dataclasses import replace

import pandas as pd

from planner.analysis.sweep import Row, sweep
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.latency.step_model import build_step_model
from planner.memory.concurrency_limits import estimate_preemption_risk, find_safe_max_num_seqs
from planner.memory.kv_cache import assign_stage_layers, resolve_kv_cache_dtype
from planner.memory.memory_plan import MemoryPlan, plan_memory
from planner.memory.weights import compute_stage_bytes
from planner.models.architecture import DecoderLayer
from planner.models.mixers import (
    LayerCache,
    SequenceMixer,
)
from planner.models.quantization import load_weight_formats
from planner.models.registry import load_model
from planner.planning.plan import Plan
from planner.workload.workload import Workload

COMPARED_BATCH = 32
"""Sequences of the decode step by which weight formats are compared."""


def build_budget_table(memory: MemoryPlan) -> pd.DataFrame:
    """Return each memory term in GiB, and whether `gpu_memory_utilization` covers it."""
    rows = [(label, size / GIB, is_inside) for label, (size, is_inside) in memory.terms.items()]
    other_tenants = Interval.from_value(memory.deployment.other_tenants_bytes / GIB)
    rows = [
        ("budget", Interval.from_value(memory.budget_bytes / GIB), True),
        *rows,
        ("KV cache", memory.kv_available / GIB, True),
        ("driver context", memory.context / GIB, False),
        *([("other tenants", other_tenants, False)] if other_tenants.mid else []),
    ]
    return pd.DataFrame(rows, columns=["term", "GiB", "inside the budget"])


def build_format_table(deployment: Deployment, tokens: int) -> pd.DataFrame:
    """Return weights, KV cache, sequences, decode step and quality of each weight format.

    Only formats that make the model smaller than its checkpoint are listed.
    """
    base, formats = load_model(deployment.model.name), load_weight_formats()
    if not base.architecture.is_moe:  # engines store only experts in it
        formats = {name: entry for name, entry in formats.items() if name != "mxfp4"}
    largest = max(compute_stage_bytes(replace(deployment, model=base)))

    def _read(name: str) -> Row:
        entry, model = formats[name], base
        if name != "checkpoint":
            model = load_model(deployment.model.name, quantization=name)
        served = replace(deployment, model=model)
        if name != "checkpoint" and max(compute_stage_bytes(served)) >= largest:
            raise PlannerError(f"{name} is no smaller than the checkpoint")
        memory = plan_memory(served)
        step = build_step_model(served).estimate_step([], [tokens] * COMPARED_BATCH)
        fits = memory.status != "does_not_fit"
        return {
            "format": entry.title,
            "weights (GiB)": memory.weights.map_monotone(lambda value: value / GIB),
            "KV cache (GiB)": memory.kv_available.map_monotone(lambda value: max(value, 0.0) / GIB),
            "sequences": memory.pool.count_sequences(tokens) if fits else 0,
            f"decode step of {COMPARED_BATCH} (ms)": step.seconds * 1e3,
            "published quality": entry.quality, "source": entry.source,
        }  # fmt: skip

    return sweep({"format": formats}, _read)


def describe_recommended_limits(memory: MemoryPlan, workload: Workload, buffer: float) -> str:
    """Describe max_model_len and max_num_seqs of the plan, or the remedy if it does not fit."""
    if memory.status == "does_not_fit":
        return f"There is nothing to recommend before it fits: {memory.remedy}."
    args, p99 = memory.deployment.args, workload.compute_total_tokens_quantile(0.99)
    limit = find_safe_max_num_seqs(memory, workload)
    return (
        f"max_model_len {args.max_model_len:,}: p99 of prompt + output, {p99:,.0f} tokens, plus"
        f" {buffer:.0%}; longer requests are refused. max_num_seqs {args.max_num_seqs:,}: with up to"
        f" {limit:,} at once the risk that the pool preempts is at most 5%, and a slot more costs"
        " nothing while the traffic keeps fewer at work."
    )


def describe_memory_limit(plan: Plan) -> str:
    """Describe whether memory limits a plan, and what does if not."""
    performance = plan.best.prediction.performance if plan.best else None
    if performance is None or performance.bottleneck == "kv":
        return str(plan.binding_constraint)
    used = f"on average {performance.kv_usage:.0%} of the KV cache are in use"
    return f"Memory does not limit this plan: {used}. {plan.binding_constraint}"


def describe_memory_status(memory: MemoryPlan) -> str:
    """Describe what the engine reports, and the remedy; empty if the plan fits."""
    if memory.status == "ok":
        return ""
    verdict = "It may run out of memory." if memory.status == "at_risk" else "It does not start."
    return f"{verdict} {memory.reason}. Remedy: {memory.remedy}."


def build_sequence_table(memory: MemoryPlan, workload: Workload) -> pd.DataFrame:
    """Tabulate sequences that fit and their preemption risk at p50, p95 and max_model_len."""
    max_model_len = memory.layout.max_model_len
    lengths = {
        "p50": workload.compute_total_tokens_quantile(0.5),
        "p95": workload.compute_total_tokens_quantile(0.95),
        "max_model_len": max_model_len,
    }

    def _read(name: str) -> Row:
        tokens = round(lengths[name])
        sequences = memory.pool.count_sequences(min(tokens, max_model_len))
        risk = estimate_preemption_risk(memory, workload, sequences) if sequences else 1.0
        return {"tokens": tokens, "sequences": sequences, "preemption risk": risk}

    return sweep({"length": lengths}, _read)


def build_kv_table(memory: MemoryPlan) -> pd.DataFrame:
    """Return what each kind of layer caches, one row per kind on the most expensive stage.

    Bytes are per GPU: for every token of context and, in windows and states, for every sequence of
    any length.
    """
    rows = [
        {
            "kind of layer": mixer.label, "layers": layers,
            "bytes per token": round(layers * _count_token_bytes(memory, mixer) / memory.layout.dcp),
            "bytes per sequence": round(
                layers
                * sum(c.window * c.token_bytes + c.state_bytes for c in _list_caches(memory, mixer))
            ),
        }
        for mixer, layers in _count_mixers(memory).items()
    ]  # fmt: skip
    return pd.DataFrame(rows).groupby("kind of layer", sort=False, as_index=False).sum()


def _count_mixers(memory: MemoryPlan) -> Counter[SequenceMixer]:
    """Count equal mixers of the most expensive stage, including those that share a cache."""

    def compute_bytes(layers: tuple[DecoderLayer, ...]) -> tuple[float, float]:
        mixers = [mixer for layer in layers for mixer in layer.mixers]
        caches = [cache for mixer in mixers for cache in _list_caches(memory, mixer)]
        token = sum(_count_token_bytes(memory, mixer) for mixer in mixers)
        return token, sum(cache.token_bytes + cache.state_bytes for cache in caches)

    stage = max(assign_stage_layers(memory.deployment), key=compute_bytes)
    mixers = [mixer for layer in stage for mixer in layer.mixers]
    return Counter(mixer for mixer in mixers if mixer.label)


def _list_caches(memory: MemoryPlan, mixer: SequenceMixer) -> list[LayerCache]:
    """List the caches of one mixer on one GPU."""
    deployment = memory.deployment
    return mixer.list_caches(
        deployment.layout.tp, resolve_kv_cache_dtype(deployment), deployment.num_draft_tokens
    )


def _count_token_bytes(memory: MemoryPlan, mixer: SequenceMixer) -> float:
    """Return the bytes that a layer keeps of every token of the context."""
    return sum(each.token_bytes for each in _list_caches(memory, mixer) if each.kind == "full")
