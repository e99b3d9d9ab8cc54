"""The KV equation with a plan's numbers: what each kind of layer caches per token and sequence."""

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
