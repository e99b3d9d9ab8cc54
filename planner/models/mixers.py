"""Sequence mixers: attention and recurrent layers, and what each answers about itself.

A kind of layer is one class here: the caches that it keeps, what its attention reads and multiplies,
its kernels, and the blocks of its backend.
Rules from vLLM 0.20.2 (v1/kv_cache_interface.py:130-570, config/model.py:1219) and 0.33.0 (:552, :1663).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

CacheKind = Literal["full", "window", "chunked", "state"]

KERNEL_BLOCK_TOKENS = 16
"""Tokens per block are a multiple of this (FlashAttention, FlashAttention-MLA)."""
_DTYPE_BYTES = {
    "float32": 4.0,
    "fp8": 1.0,
    "mxfp8": 1.03125,
    "int8": 1.0,
    "turboquant_k8v4": 0.766,
    "turboquant_4bit": 0.523,
    "turboquant_k3v4": 0.461,
    "turboquant_3bit": 0.398,
    "nvfp4": 0.5625,
    "fp4": 0.5625,
}
"""Of an element, with the scales of its blocks; TurboQuant's with the norm of a key and the scale and zero of a
value, of 128 elements each (vllm pull 38479)."""
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


@dataclass(frozen=True)
class AttentionWork:
    """Attention layers with one span: the cost of one context token of a sequence on one GPU."""

    kind: str  # grouped, latent, sparse (latents that an indexer selects) or index (its scores)
    window: int | None
    bytes: float  # KV read per context token in decode
    # per context token, with one query per sequence padded to what a matrix instruction multiplies
    decode_flops: float
    query_flops: float  # per (query, context token), unpadded
    prefill_flops: float


class _Attention:
    """What attention answers about states: it has none."""

    delta_passes: ClassVar[int] = 0
    checkpoint_tokens: ClassVar[int] = 0

    def compute_state_bytes(self, tp: int = 1, k: int = 0) -> int:
        """Compute the bytes of its state per sequence: none."""
        return 0


@dataclass(frozen=True)
class GroupedQueryAttention(_Attention):
    """Attention that caches one key and one value per KV head and token."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None  # tokens that it attends to; None: all
    chunked: bool = False  # `window` is a fixed chunk instead of a sliding window
    stores_kv: bool = True  # False: reads the cache of an earlier layer
    index_heads: int = 0  # of the indexer that selects blocks of tokens (MiniMax-M3)
    index_dim: int = 0
    selected_tokens: int | None = None  # that a query attends to after the indexer's selection

    is_latent: ClassVar[bool] = False
    attention_kind: ClassVar[str] = ""
    compress: ClassVar[int] = 1

    @property
    def kernels(self) -> int:
        """Norm, rotary embedding, cache write, attention, its reduction; an indexer's scores, top-k."""
        return 5 + 2 * bool(self.index_heads)

    @property
    def label(self) -> str:
        """What the kind of layer is called."""
        if not self.stores_kv:
            return "attention on an earlier layer's cache"
        kind = "full attention"
        if self.window:
            kind = "attention in chunks" if self.chunked else "sliding window"
        kind += " with an indexer" * bool(self.index_heads)
        return f"{kind} of {self.window:,}" if self.window else kind

    @property
    def output_width(self) -> int:
        """Elements that a head's attention puts out before they are projected."""
        return self.v_head_dim

    @property
    def gathered_width(self) -> int:
        """Elements of a head's queries and outputs together."""
        return self.head_dim + self.v_head_dim

    @property
    def index_bytes(self) -> float:
        """Bytes of index keys per token: one key in bf16 (vLLM models/minimax_m3/common)."""
        return 2 * self.index_dim if self.index_heads else 0

    @property
    def rotary_dim(self) -> int:
        """Dimensions that a rotary embedding may rotate."""
        return self.head_dim

    def list_caches(
        self, tp: int, kv_cache_dtype: str, k: int = 0, shares: bool = True
    ) -> list[LayerCache]:
        """List keys and values, whose heads are split until one is left per rank, and index keys."""
        if shares and not self.stores_kv:
            return []
        width = get_kv_element_bytes(kv_cache_dtype)
        scales = 8 if kv_cache_dtype.endswith("per_token_head") else 0
        token = max(1, self.kv_heads // tp) * ((self.head_dim + self.v_head_dim) * width + scales)
        kind: CacheKind = "full" if not self.window else "chunked" if self.chunked else "window"
        keys = [LayerCache("full", self.index_bytes)] * bool(self.index_heads)
        return [LayerCache(kind, token, self.window or 0), *keys]

    def count_attention(self, tp: int, dcp: int, width: float, rows: int) -> list[AttentionWork]:
        """Count attention to all tokens, the window or the selected blocks, and an indexer's scores."""
        flops = 2.0 * self.heads / tp * self.gathered_width
        min_heads = rows * max(self.kv_heads / tp, 1.0) / dcp
        padded = 2.0 * max(self.heads / tp, min_heads) * self.gathered_width
        size = max(self.kv_heads / tp, 1.0) * self.gathered_width * width
        reach = self.selected_tokens or self.window
        works = [AttentionWork("grouped", reach, size / dcp, padded, flops, flops)]
        if self.index_heads:  # it scores the whole context in bf16
            score = 2.0 * max(self.index_heads / tp, 1.0) * self.index_dim
            works.append(AttentionWork("index", None, self.index_bytes, score, score, score))
        return works

    def get_block_size(self, width: float, capability: float | None, in_hybrid: bool) -> int:
        """Get vLLM 0.33's: MINIMAX_M3_SPARSE has blocks of 128."""
        return 128 if self.index_heads else KERNEL_BLOCK_TOKENS


@dataclass(frozen=True)
class LatentAttention(_Attention):
    """Multi-head latent attention (arXiv 2405.04434): all heads share a latent and a rotary key."""

    heads: int
    kv_lora_rank: int
    nope_dim: int
    rotary_dim: int
    v_dim: int
    index_heads: int = 0  # of the indexer that selects latents (DeepSeek-V3.2 sparse attention)
    index_dim: int = 0
    selected_latents: int | None = None  # that a query attends to
    has_indexer_cache: bool = False  # False with `index_heads`: uses another layer's selection
    window: int | None = None
    compress: int = 1  # tokens per stored latent

    is_latent: ClassVar[bool] = True
    kv_heads: ClassVar[int] = 1

    @property
    def kernels(self) -> int:
        """As of attention, and the absorbed products; an indexer's projections, norm, rotation and top-k."""
        return 9 + 7 * self.has_indexer_cache

    @property
    def attention_kind(self) -> str:
        """Its kind in `catalogs/capabilities.yaml`; empty where any GPU runs it."""
        return "sparse" if self.index_heads else ""

    @property
    def label(self) -> str:
        """What the kind of layer is called."""
        kind = f"latent attention (MLA){' with an indexer' * self.has_indexer_cache}"
        return f"{kind} of {self.window:,}" if self.window else kind

    @property
    def output_width(self) -> int:
        """Elements that a head's attention puts out before they are projected."""
        return self.kv_lora_rank

    @property
    def gathered_width(self) -> int:
        """Elements of a head's queries and outputs together, as latents."""
        return self.kv_elements + self.kv_lora_rank

    @property
    def kv_elements(self) -> int:
        """Elements of one stored latent."""
        return self.kv_lora_rank + self.rotary_dim

    @property
    def index_bytes(self) -> float:
        """Bytes of index keys per token: FP8 with a 4-byte scale per 128 (vLLM's indexer cache)."""
        key = self.index_dim + 4 * math.ceil(self.index_dim / 128)
        return key / self.compress if self.has_indexer_cache else 0

    @property
    def spans(self) -> tuple[tuple[int | None, float], ...]:
        """(tokens back to which a query attends, latents per token there); None: all tokens."""
        return ((self.selected_latents, 1.0),)

    def list_caches(
        self, tp: int, kv_cache_dtype: str, k: int = 0, shares: bool = True
    ) -> list[LayerCache]:
        """List latents and index keys, which are always FP8 with FP32 scales; no rank splits them."""
        width, keys = get_kv_element_bytes(kv_cache_dtype), self.index_bytes
        latent = self.kv_elements * width
        if self.index_heads and width < 2:
            latent = FP8_DS_MLA_BYTES if width == 1 else NVFP4_DS_MLA_BYTES
        return [LayerCache("full", latent)] + [LayerCache("full", keys)] * bool(keys)

    def count_attention(self, tp: int, dcp: int, width: float, rows: int) -> list[AttentionWork]:
        """Count attention to latents, expanded in prefill unless they are selected or compressed."""
        queries = 2.0 * self.gathered_width
        decode = queries * self.heads / tp
        padded = queries * max(self.heads / tp, rows / dcp)
        expanded = 2.0 * self.heads / tp * (self.nope_dim + self.rotary_dim + self.v_dim)
        is_dense = self.spans == ((None, 1),)
        kind, prefill = ("latent", expanded) if is_dense else ("sparse", padded)
        costs = self.kv_elements * width / dcp, padded, decode, prefill
        works = [
            AttentionWork(kind, reach, *(latents * cost for cost in costs))
            for reach, latents in self.spans
        ]
        if self.has_indexer_cache:  # it scores the whole context, in FP8: twice the bf16 rate
            score = self.index_heads * self.index_dim / self.compress
            works.append(AttentionWork("index", None, self.index_bytes, score, score, score))
        return works

    def get_block_size(self, width: float, capability: float | None, in_hybrid: bool) -> int:
        """Get vLLM 0.33's: FLASHMLA and FLASHMLA_SPARSE 64, FlashInfer-MLA (Blackwell) 32.

        FlashMLA runs FP8 on Hopper.
        """
        if in_hybrid:
            return KERNEL_BLOCK_TOKENS
        if self.index_heads or (capability == 9.0 and width < 2):
            return 64
        return 32 if int(capability or 0) == 10 else KERNEL_BLOCK_TOKENS


@dataclass(frozen=True)
class CompressedAttention(LatentAttention):
    """DeepSeek-V4's: a sliding window of latents beside one per `compress` tokens (0: only the window's)."""

    @property
    def attention_kind(self) -> str:
        """Its kind in `catalogs/capabilities.yaml`."""
        return "compressed"

    @property
    def spans(self) -> tuple[tuple[int | None, float], ...]:
        """(tokens back to which a query attends, latents per token there); None: all tokens."""
        reach = self.selected_latents * self.compress if self.selected_latents else None
        all_latents = ((reach, 1 / self.compress),) if self.compress else ()
        return (self.window, 1.0), *all_latents

    def list_caches(
        self, tp: int, kv_cache_dtype: str, k: int = 0, shares: bool = True
    ) -> list[LayerCache]:
        """List latents of window and compressed tokens, index keys and FP32 states.

        vLLM 0.27 models/deepseek_v4 (attention, compressor): pages are padded to multiples of 576
        bytes.
        """

        def pad_page(size: int) -> int:
            return math.ceil(size / 576) * 576

        ratio, keys = self.compress, round(self.index_bytes * self.compress)
        overlap, block = (2, 4) if keys else (1, 8)
        latents = LayerCache(
            "window", V4_LATENT_BYTES, self.window or 0, 0, 64, pad_page(64 * V4_LATENT_BYTES)
        )
        caches = [latents]
        for size, elements in ((V4_LATENT_BYTES, self.kv_elements), (keys, self.index_dim)):
            if ratio and size:
                page, row = pad_page(256 // ratio * size), 2 * overlap * elements * 4
                tokens, state_page = overlap * ratio, pad_page(block * row)
                caches += [
                    LayerCache("full", size / ratio, block=256, page_bytes=page),
                    LayerCache("window", 0, tokens, tokens * row, block, state_page),
                ]
        return caches

    def get_block_size(self, width: float, capability: float | None, in_hybrid: bool) -> int:
        """Get vLLM 0.33's, 256."""
        return 256


@dataclass(frozen=True)
class RecurrentMixer:
    """A mixer with constant state: state space, delta rule, linear attention, short convolution."""

    kind: str  # mamba1 mamba2 gdn kda lightning short_conv
    label: str = ""
    conv_channels: int = 0  # split over tensor-parallel ranks
    conv_group_channels: int = 0  # per group; groups are repeated if there are fewer than ranks
    groups: int = 0
    conv_kernel: int = 0
    state_elements: int = 0
    state_width: int = 4  # bytes per element of the recurrent state; convolution: 16 bit
    has_chosen_width: bool = False  # by --mamba-ssm-cache-dtype
    delta_passes: int = 0  # values that its chunked kernels pass on per result
    checkpoint_tokens: int = 0  # to which vLLM 0.33 aligns cached states

    is_latent: ClassVar[bool] = False
    kv_heads: ClassVar[int] = 0
    window: ClassVar[int | None] = None
    kernels: ClassVar[int] = 8

    def list_caches(
        self, tp: int, kv_cache_dtype: str, k: int = 0, shares: bool = True
    ) -> list[LayerCache]:
        """List the state."""
        return [LayerCache("state", state_bytes=self.compute_state_bytes(tp, k))]

    def compute_state_bytes(self, tp: int = 1, k: int = 0) -> int:
        """Compute the state bytes per sequence on one of `tp` ranks.

        Beside the recurrent state, a convolution keeps kernel - 1 inputs per channel in 16 bit, and
        one more for each of `k` speculative tokens.
        """
        groups = self.groups // tp if self.groups % tp == 0 else 1
        channels = self.conv_channels // tp + groups * self.conv_group_channels
        inputs = self.conv_kernel - 1 + k if self.conv_kernel > 1 else 0
        return channels * inputs * 2 + self.state_elements // tp * self.state_width


@dataclass(frozen=True)
class Compressor(RecurrentMixer):
    """The running sums of DeepSeek-V4's compressor, which it stores with the latents, on every rank."""

    def list_caches(
        self, tp: int, kv_cache_dtype: str, k: int = 0, shares: bool = True
    ) -> list[LayerCache]:
        """List nothing: `CompressedAttention` does."""
        return []

    def compute_state_bytes(self, tp: int = 1, k: int = 0) -> int:
        """Compute the state bytes per sequence, whole on every rank."""
        return self.state_elements * self.state_width


Attention = GroupedQueryAttention | LatentAttention
SequenceMixer = Attention | RecurrentMixer
