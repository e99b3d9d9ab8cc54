"""Tables of the VRAM chapter: terms, the KV equation, sweeps over one argument, formats, advice."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from planner.analysis.sweep import Row, cap_at_zero, read_memory, sweep, sweep_args
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import GIB, MIB
from planner.engines.deployment import Deployment
from planner.engines.speculation_methods import list_draft_layers
from planner.latency.step_model import build_step_model
from planner.memory.concurrency_limits import estimate_preemption_risk, find_safe_max_num_seqs
from planner.memory.kv_cache import assign_stage_layers, resolve_kv_cache_dtype
from planner.memory.layer_caches import LayerCache, get_kv_element_bytes, list_mixer_caches
from planner.memory.memory_plan import MemoryPlan, find_safe_memory_utilization, plan_memory
from planner.memory.weights import compute_stage_bytes
from planner.models.architecture import DecoderLayer, LatentAttention, RecurrentMixer, SequenceMixer
from planner.models.quantization import load_weight_formats, parse_quantization
from planner.models.registry import load_model
from planner.planning.search import Plan
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


def sweep_memory_utilization(deployment: Deployment) -> pd.DataFrame:
    """Return KV cache (GiB, 80% interval) and status over `gpu_memory_utilization`."""
    shares = {"gpu_memory_utilization": [percent / 100 for percent in range(50, 100, 2)]}
    return sweep_args(deployment, shares, read_memory).drop(columns="sequences of that length")


def sweep_max_model_len(deployment: Deployment) -> pd.DataFrame:
    """Return the full-length sequences that fit (80% interval) over `max_model_len`."""
    longest = deployment.model.architecture.max_position
    lengths = {"max_model_len": [2**power for power in range(10, longest.bit_length())]}
    data = sweep_args(deployment, lengths, read_memory).drop(columns=["KV cache (GiB)", "reason"])
    return data.rename(columns={"max_model_len": "max_model_len (tokens)"})


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
            "KV cache (GiB)": cap_at_zero(memory.kv_available),
            "sequences": memory.pool.count_sequences(tokens) if fits else 0,
            f"decode step of {COMPARED_BATCH} (ms)": step.seconds * 1e3,
            "published quality": entry.quality, "checkpoint": entry.checkpoint,
            "source": entry.source,
        }  # fmt: skip

    return sweep({"format": formats}, _read)


def sweep_other_tenants(deployment: Deployment, tenants_gib: Sequence[float]) -> pd.DataFrame:
    """Return the largest safe utilization, and its KV cache, beside other processes on the GPU."""

    def _read(gib: float) -> Row:
        shared = replace(deployment, other_tenants_bytes=round(gib * GIB))
        safe = find_safe_memory_utilization(shared)
        row = {"KV cache (GiB)": Interval.from_value(0), "status": "does not fit"}
        if safe > 0:
            row = read_memory(shared.with_args(gpu_memory_utilization=safe))
        return {"gpu_memory_utilization": safe, **{k: row[k] for k in ("KV cache (GiB)", "status")}}

    return sweep({"other tenants (GiB)": tenants_gib}, _read)


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


def estimate_memory_gains(memory: MemoryPlan, tokens: int) -> pd.DataFrame:
    """Estimate the gain of 1 GiB, an FP8 KV cache and narrower weights in sequences of `tokens`."""
    deployment = memory.deployment
    gib = math.ceil(GIB / deployment.args.gpu_memory_utilization)
    larger = replace(deployment, gpu_total_bytes=deployment.gpu_total_bytes + gib)
    changes = {"one more GiB": larger}
    if get_kv_element_bytes(resolve_kv_cache_dtype(deployment)) > 1:
        changes["FP8 KV cache"] = deployment.with_args(kv_cache_dtype="fp8")
    for name, scheme in (
        ("FP8 weights", parse_quantization("fp8")),
        ("4-bit weights (AWQ)", parse_quantization("awq")),
    ):
        if scheme.weight_bits < deployment.model.quantization.weight_bits:
            changes[name] = replace(
                deployment, model=replace(deployment.model, quantization=scheme)
            )

    def _read(name: str) -> Row:
        plan = plan_memory(changes[name])
        sequences = plan.pool.count_sequences(tokens)
        gain = sequences - memory.pool.count_sequences(tokens)
        size = cap_at_zero(plan.kv_available).mid
        return {"KV cache (GiB)": size, "sequences": sequences, "more than now": gain}

    return sweep({"change": changes}, _read)


RECURRENT_STATE_LABELS = {
    "mamba1": "state space (Mamba)", "mamba2": "state space (Mamba-2)", "gdn": "gated delta rule",
    "kda": "Kimi delta attention", "lightning": "linear attention",
    "short_conv": "short convolution",
}  # fmt: skip


def build_kv_table(memory: MemoryPlan) -> pd.DataFrame:
    """Return what each kind of layer caches, one row per kind on the most expensive stage.

    Bytes are per GPU: for every token of context and, in windows and states, for every sequence of
    any length.
    """
    rows = []
    for mixer, layers in _count_mixers(memory).items():
        caches = _list_caches(memory, mixer)
        token = (
            layers
            * sum(cache.token_bytes for cache in caches if cache.kind == "full")
            / memory.layout.dcp
        )
        fixed = layers * sum(
            cache.window * cache.token_bytes + cache.state_bytes for cache in caches
        )
        rows.append({
            "kind of layer": _describe_mixer(mixer), "layers": layers,
            "one layer keeps": _format_layer_cache(memory, mixer, "\N{MULTIPLICATION SIGN}"),
            "bytes per token": round(token), "bytes per sequence": round(fixed),
        })  # fmt: skip
    data = pd.DataFrame(rows)
    groups = data.groupby(["kind of layer", "one layer keeps"], sort=False, as_index=False)
    return groups.sum()[data.columns]


def derive_kv_equation(memory: MemoryPlan) -> str:
    """Return the bytes of one more token of a long context on one GPU, as Markdown with LaTeX."""
    layout, cut = memory.layout, memory.deployment.layout
    terms = [
        rf"{layers} \times {_format_layer_cache(memory, mixer, chr(92) + 'times', bare=True)}"
        for mixer, layers in _count_mixers(memory).items()
        if any(cache.kind == "full" for cache in _list_caches(memory, mixer))
    ]
    if not terms:
        return "No layer keeps the whole context: beyond the windows, one more token takes nothing."
    location = f"TP{cut.tp}" + ", on the pipeline stage where a token costs most" * (cut.pp > 1)
    location += ", the draft's layers counted with the model's" * bool(
        list_draft_layers(memory.deployment)
    )
    total = f"{layout.kv_bytes_per_token:,.0f}".replace(",", "{,}")
    sum_text = (
        " + ".join(terms)
        if layout.dcp == 1
        else rf"\left({' + '.join(terms)}\right) / {layout.dcp}"
    )
    text = f"On one GPU of this deployment ({location}), one more token of a long context takes"
    return text + "\n\n" + rf"$${sum_text} = {total} \text{{ bytes}}$$"


def build_pool_table(memory: MemoryPlan, tokens: int) -> pd.DataFrame:
    """Return the KV cache pool as this engine version counts it, and the use of `tokens`."""
    pool, layout = memory.pool, memory.layout
    num_blocks = layout.count_request_blocks(tokens)
    rows = [
        ("KV cache (GiB; below 0: what the budget lacks)", memory.kv_available / GIB),
        ("tokens of a block", layout.block_size),
        ("bytes of a block", pool.bytes_per_block),
        ("groups of layers, each with blocks of its own", len(layout.groups)),
        ("lost to filling groups and blocks up (%)", layout.padding * 100),
        ("blocks", pool.num_blocks),
        ("tokens", pool.reported_tokens),
        (
            f"sequences of max_model_len = {layout.max_model_len:,} that it lets start",
            memory.max_concurrency,
        ),
        (
            "the same, decoding: no windows kept for prompts",
            pool.count_sequences(layout.max_model_len),
        ),
        (f"blocks of a sequence of {tokens:,} tokens", num_blocks),
        ("the same in MiB", num_blocks * pool.bytes_per_block / MIB),
    ]
    return pd.DataFrame(rows, columns=["pool", "value"])


def _count_mixers(memory: MemoryPlan) -> Counter[SequenceMixer]:
    """Count equal mixers of the most expensive stage, including those that share a cache."""

    def compute_bytes(layers: tuple[DecoderLayer, ...]) -> tuple[float, float]:
        caches = [
            cache
            for layer in layers
            for mixer in layer.mixers
            for cache in _list_caches(memory, mixer)
        ]
        token = sum(cache.token_bytes for cache in caches if cache.kind == "full")
        return token, sum(cache.token_bytes + cache.state_bytes for cache in caches)

    mixers = (
        mixer
        for layer in max(assign_stage_layers(memory.deployment), key=compute_bytes)
        for mixer in layer.mixers
    )
    return Counter(
        mixer
        for mixer in mixers
        if not (isinstance(mixer, RecurrentMixer) and mixer.kind == "compressor")
    )


def _list_caches(memory: MemoryPlan, mixer: SequenceMixer) -> list[LayerCache]:
    """List the caches of one mixer on one GPU."""
    deployment = memory.deployment
    return list_mixer_caches(
        mixer, deployment.layout.tp, resolve_kv_cache_dtype(deployment), deployment.num_draft_tokens
    )


def _describe_mixer(mixer: SequenceMixer) -> str:
    """Describe a mixer in words."""
    if isinstance(mixer, RecurrentMixer):
        return RECURRENT_STATE_LABELS.get(mixer.kind, mixer.kind)
    if not mixer.stores_kv:
        return "attention on an earlier layer's cache"
    if isinstance(mixer, LatentAttention):
        indexed = " with an indexer" if mixer.has_indexer_cache else ""
        compressed = f" and every {mixer.compress} tokens" if mixer.compress > 1 else ""
        window = f", window of {mixer.window:,} tokens{compressed}" if mixer.window else ""
        return f"latent attention (MLA){indexed}{window}"
    if mixer.window:
        return (
            f"attention in chunks of {mixer.window:,}"
            if mixer.chunked
            else f"sliding window of {mixer.window:,}"
        )
    return "full attention with an indexer" if mixer.index_heads else "full attention"


def _format_layer_cache(
    memory: MemoryPlan, mixer: SequenceMixer, times: str, bare: bool = False
) -> str:
    """Format what one layer caches: heads x (key + value width) x bytes, a latent, or a state.

    `bare` omits words, and windows if other caches of the layer grow with the context.
    """
    caches = _list_caches(memory, mixer)
    if isinstance(mixer, RecurrentMixer):
        return f"{sum(cache.state_bytes for cache in caches) / MIB:.2f} MiB per sequence"
    if not caches:
        return "nothing"
    width = get_kv_element_bytes(resolve_kv_cache_dtype(memory.deployment))
    full = sum(c.token_bytes for c in caches if c.kind == "full")
    if isinstance(mixer, LatentAttention) and mixer.window:
        text_with_window = (
            f"{caches[0].token_bytes:g} bytes a token of the window"
            + f", {full:g} of every token" * bool(full)
        )
        return f"{full:g}" if bare else text_with_window
    if isinstance(mixer, LatentAttention):
        size = mixer.kv_elements * width
        text = f"({mixer.kv_lora_rank} + {mixer.rotary_dim}) {times} {width:g}"
    else:
        heads = max(1, mixer.kv_heads // memory.deployment.layout.tp)
        size = heads * (mixer.head_dim + mixer.v_head_dim) * width
        text = f"{heads} {times} ({mixer.head_dim} + {mixer.v_head_dim}) {times} {width:g}"
    token = sum(cache.token_bytes for cache in caches)
    if token > size:  # index keys, scales
        text = f"({text} + {token - size:g})" if bare else f"{text} + {token - size:g}"
    elif token < size:  # a packed latent
        text = f"{token:g}"
    return text if bare else f"{text} bytes a token"
