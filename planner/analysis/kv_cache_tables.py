"""The KV equation with a plan's own numbers: what each kind of layer keeps, per token and per sequence."""

from collections import Counter

import pandas as pd

from planner.core.units import GIB, MIB
from planner.engines.speculation_methods import list_draft_layers
from planner.memory.kv_cache import assign_stage_layers, resolve_kv_cache_dtype
from planner.memory.layer_caches import LayerCache, get_kv_element_bytes, list_mixer_caches
from planner.memory.memory_plan import MemoryPlan
from planner.models.architecture import DecoderLayer, LatentAttention, RecurrentMixer, SequenceMixer

RECURRENT_STATE_LABELS = {
    "mamba1": "state space (Mamba)", "mamba2": "state space (Mamba-2)", "gdn": "gated delta rule",
    "kda": "Kimi delta attention", "lightning": "linear attention",
    "short_conv": "short convolution",
}  # fmt: skip


def build_kv_table(memory: MemoryPlan) -> pd.DataFrame:
    """One row per kind of layer on the stage where a token costs most: what a layer keeps, and what all of them cost.

    Bytes are per GPU: for every token of context, and, in windows and states, for every sequence
    however long.
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
        rows.append(
            (
                _describe_mixer(mixer),
                layers,
                _format_layer_cache(memory, mixer, "\N{MULTIPLICATION SIGN}"),
                round(token),
                round(fixed),
            )
        )
    columns = [
        "kind of layer",
        "layers",
        "one layer keeps",
        "bytes per token",
        "bytes per sequence",
    ]
    return (
        pd.DataFrame(rows, columns=columns)
        .groupby(columns[:3:2], sort=False, as_index=False)
        .sum()[columns]
    )


def derive_kv_equation(memory: MemoryPlan) -> str:
    """What one more token of a long context takes on one GPU, as Markdown with LaTeX."""
    layout, cut = memory.layout, memory.deployment.layout
    terms = [
        rf"{layers} \times {_format_layer_cache(memory, mixer, chr(92) + 'times', bare=True)}"
        for mixer, layers in _count_mixers(memory).items()
        if any(cache.kind == "full" for cache in _list_caches(memory, mixer))
    ]
    if not terms:
        return "No layer keeps the whole context: beyond the windows, one more token takes nothing."
    where = f"TP{cut.tp}" + ", on the pipeline stage where a token costs most" * (cut.pp > 1)
    where += ", the draft's layers counted with the model's" * bool(
        list_draft_layers(memory.deployment)
    )
    total = f"{layout.kv_bytes_per_token:,.0f}".replace(",", "{,}")
    added = (
        " + ".join(terms)
        if layout.dcp == 1
        else rf"\left({' + '.join(terms)}\right) / {layout.dcp}"
    )
    text = f"On one GPU of this deployment ({where}), one more token of a long context takes"
    return text + "\n\n" + rf"$${added} = {total} \text{{ bytes}}$$"


def build_pool_table(memory: MemoryPlan, tokens: int) -> pd.DataFrame:
    """The pool as this version of the engine counts it, and what a sequence of `tokens` holds of it."""
    pool, layout = memory.pool, memory.layout
    held = layout.count_request_blocks(tokens)
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
        (f"blocks of a sequence of {tokens:,} tokens", held),
        ("the same in MiB", held * pool.bytes_per_block / MIB),
    ]
    return pd.DataFrame(rows, columns=["pool", "value"])


def _count_mixers(memory: MemoryPlan) -> Counter[SequenceMixer]:
    """Mixers of the stage where a token costs most, equal ones counted; those that read an earlier layer's too."""

    def size(layers: tuple[DecoderLayer, ...]) -> tuple[float, float]:
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
        for layer in max(assign_stage_layers(memory.deployment), key=size)
        for mixer in layer.mixers
    )
    return Counter(
        mixer
        for mixer in mixers
        if not (isinstance(mixer, RecurrentMixer) and mixer.kind == "compressor")
    )


def _list_caches(memory: MemoryPlan, mixer: SequenceMixer) -> list[LayerCache]:
    deployment = memory.deployment
    return list_mixer_caches(
        mixer, deployment.layout.tp, resolve_kv_cache_dtype(deployment), deployment.num_draft_tokens
    )


def _describe_mixer(mixer: SequenceMixer) -> str:
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
    return "full attention"


def _format_layer_cache(
    memory: MemoryPlan, mixer: SequenceMixer, times: str, bare: bool = False
) -> str:
    """What one layer keeps: heads x (key + value width) x bytes an element, a latent, or a state.

    `bare` leaves words out, and what stays within a window where other caches of the layer grow.
    """
    caches = _list_caches(memory, mixer)
    if isinstance(mixer, RecurrentMixer):
        return f"{sum(cache.state_bytes for cache in caches) / MIB:.2f} MiB per sequence"
    if not caches:
        return "nothing"
    width, full = (
        get_kv_element_bytes(resolve_kv_cache_dtype(memory.deployment)),
        sum(c.token_bytes for c in caches if c.kind == "full"),
    )
    if isinstance(mixer, LatentAttention) and mixer.window:
        kept = (
            f"{caches[0].token_bytes:g} bytes a token of the window"
            + f", {full:g} of every token" * bool(full)
        )
        return f"{full:g}" if bare else kept
    if isinstance(mixer, LatentAttention):
        size, text = (
            mixer.kv_elements * width,
            f"({mixer.kv_lora_rank} + {mixer.rotary_dim}) {times} {width:g}",
        )
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
