"""The caches of one layer on one rank, in the engine's storage formats.

Rules from vLLM 0.20.2 (v1/kv_cache_interface.py:130-570, config/model.py:1219) and 0.33.0
(:552, :1663).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.models.architecture import DecoderLayer, LatentAttention, RecurrentMixer, SequenceMixer

CacheKind = Literal["full", "window", "chunked", "state"]

_DTYPE_BYTES = {
    "float32": 4.0,
    "fp8": 1.0,
    "int8": 1.0,
    "turboquant_4bit": 0.5,
    "nvfp4": 0.5625,
    "fp4": 0.5625,
}
FP8_DS_MLA_BYTES, NVFP4_DS_MLA_BYTES, V4_LATENT_BYTES = 656, 352, 584
"""Bytes of a latent in formats of sparse attention: DeepSeek-V3.2 in FP8 and NVFP4, DeepSeek-V4."""


def get_kv_element_bytes(kv_cache_dtype: str) -> float:
    """Return the bytes of a cached element; those of NVFP4 include its block scales.

    >>> [get_kv_element_bytes(name) for name in ("auto", "fp8_e4m3", "nvfp4")]  # 4 bits, 8 per 16
    [2.0, 1.0, 0.5625]
    """
    return next(
        (width for name, width in _DTYPE_BYTES.items() if kv_cache_dtype.startswith(name)), 2.0
    )


@dataclass(frozen=True)
class LayerCache:
    """One cache of a layer: `token_bytes` per token of context, or `state_bytes` per sequence."""

    kind: CacheKind
    token_bytes: float = 0
    window: int = 0
    state_bytes: int = 0
    block: int = 0  # tokens per block, if the format requires it (DeepSeek-V4)
    page_bytes: int = 0  # bytes of such a block, with padding


def list_mixer_caches(
    mixer: SequenceMixer, tp: int, kv_cache_dtype: str, k: int = 0, shares: bool = True
) -> list[LayerCache]:
    """List the caches of a mixer on one of `tp` ranks; `k` speculative tokens extend its states.

    KV heads are split until one is left per rank, then they are replicated; latents and index keys
    always are. Unless an engine `shares` caches, layers that read those of others have one as well.
    """
    width = get_kv_element_bytes(kv_cache_dtype)
    if isinstance(mixer, RecurrentMixer):
        if mixer.kind == "compressor":
            return []  # DeepSeek-V4 stores its state with the latents
        return [LayerCache("state", state_bytes=mixer.compute_state_bytes(tp, k))]
    if shares and not mixer.stores_kv:
        return []
    if isinstance(mixer, LatentAttention):
        return _list_latent_caches(mixer, width)
    scales = 8 if kv_cache_dtype.endswith("per_token_head") else 0
    token = max(1, mixer.kv_heads // tp) * ((mixer.head_dim + mixer.v_head_dim) * width + scales)
    kind: CacheKind = "full" if not mixer.window else "chunked" if mixer.chunked else "window"
    keys = [LayerCache("full", mixer.index_bytes)] * bool(mixer.index_heads)
    return [LayerCache(kind, token, mixer.window or 0), *keys]


def count_caches(
    layers: Sequence[DecoderLayer], tp: int, kv_cache_dtype: str, k: int = 0, shares: bool = True
) -> Counter[LayerCache]:
    """Count the equal caches of all layers."""
    counts: Counter[LayerCache] = Counter()
    for layer, times in Counter(layers).items():
        for mixer in layer.mixers:
            for cache in list_mixer_caches(mixer, tp, kv_cache_dtype, k, shares):
                counts[cache] += times
    return counts


def sum_cache_bytes(caches: Mapping[LayerCache, int]) -> tuple[float, float, int]:
    """Sum the bytes of caches: per token of a long context, of full windows, and of states."""
    token = sum(cache.token_bytes * n for cache, n in caches.items() if cache.kind == "full")
    windows = sum(cache.window * cache.token_bytes * n for cache, n in caches.items())
    return token, windows, sum(cache.state_bytes * n for cache, n in caches.items())


def _list_latent_caches(mixer: LatentAttention, width: float) -> list[LayerCache]:
    """List an MLA layer's latents and index keys, which are always FP8 with FP32 scales."""
    keys = mixer.index_bytes
    if mixer.window:
        return _list_compressed_caches(mixer, mixer.window)
    latent = mixer.kv_elements * width
    if mixer.index_heads and width < 2:
        latent = FP8_DS_MLA_BYTES if width == 1 else NVFP4_DS_MLA_BYTES
    return [LayerCache("full", latent)] + [LayerCache("full", keys)] * bool(keys)


def _list_compressed_caches(mixer: LatentAttention, window: int) -> list[LayerCache]:
    """List DeepSeek-V4's latents of window and compressed tokens, index keys and FP32 states.

    vLLM 0.27 models/deepseek_v4 (attention, compressor): pages are padded to multiples of 576
    bytes.
    """

    def pad_page(size: int) -> int:
        return math.ceil(size / 576) * 576

    ratio, keys = mixer.compress, round(mixer.index_bytes * mixer.compress)
    overlap, block = (2, 4) if keys else (1, 8)
    latent_page = pad_page(64 * V4_LATENT_BYTES)
    caches = [LayerCache("window", V4_LATENT_BYTES, window, block=64, page_bytes=latent_page)]
    for size, elements in ((V4_LATENT_BYTES, mixer.kv_elements), (keys, mixer.index_dim)):
        if ratio and size:
            page, row = pad_page(256 // ratio * size), 2 * overlap * elements * 4
            tokens, state_page = overlap * ratio, pad_page(block * row)
            caches += [
                LayerCache("full", size / ratio, block=256, page_bytes=page),
                LayerCache("window", 0, tokens, tokens * row, block, state_page),
            ]
    return caches
