"""The KV pool as the engine lays it out: page sizes per layer kind, groups that share one pool, blocks per request.

Rules read from vLLM 0.20.2 (v1/kv_cache_interface.py:130-570, v1/core/kv_cache_utils.py:1052-1684,
platforms/interface.py:502) and 0.33.0 (v1/core/kv_cache_planning.py:416, v1/core/kv_cache_utils.py:1061-1130).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from planner.architecture import Architecture, LatentAttention, Layer, Recurrent
from planner.quantities import PlannerError
from planner.weights import partition

if TYPE_CHECKING:
    from planner.deployment import Deployment

Kind = Literal["full", "window", "chunked", "state"]

KERNEL_BLOCK = 16
"""Tokens that attention kernels want a block to be a multiple of (FlashAttention, FlashAttention-MLA)."""
SAME_SIZE_RATIO = 1.5
"""Layer counts of mixed kinds closer than this become groups of the largest count, else of the smallest."""
HYBRID_POOL_FROM = (0, 10, 0)
"""Before this release windows were stored like full attention in V1."""
GDN_CHECKPOINT_FROM = (0, 33, 0)
"""From here on cached gated-delta-rule states lie on chunk borders of 64 tokens and cost one page more."""

_WIDTH = {"float32": 4.0, "fp8": 1.0, "int8": 1.0, "turboquant_4bit_nc": 0.5, "nvfp4": 0.5625}


def kv_width(kv_cache_dtype: str) -> float:
    """Bytes of one cached element: 2 for 16-bit formats, 1 for FP8 and INT8, 0.5625 for NVFP4 with its block scales."""
    return next((width for name, width in _WIDTH.items() if kv_cache_dtype.startswith(name)), 2.0)


@dataclass(frozen=True)
class Cache:
    """What one layer keeps on one rank: `token_bytes` per token of context, or `state_bytes` per sequence."""

    kind: Kind
    token_bytes: float = 0
    window: int = 0
    state_bytes: int = 0


@dataclass(frozen=True)
class Group:
    """Layers that share block tables: a request holds `blocks()` of the pool for them, whatever their number."""

    kind: Kind
    layers: int
    block_size: int
    window: int = 0
    states: int = 0

    def blocks(self, tokens: int, in_flight: int = 1) -> int:
        """Blocks that a request with `tokens` of context holds while `in_flight` of them are being computed."""
        if self.kind == "state":
            return self.states
        if self.kind == "window":
            return math.ceil(min(self.window - 1 + in_flight, tokens) / self.block_size) + 1
        if self.kind == "chunked":
            tokens = min(self.window + in_flight, tokens)
        return math.ceil(tokens / self.block_size)


@dataclass(frozen=True)
class KvLayout:
    """How caches are cut into blocks, before the memory is known. Bytes are per GPU, one entry per pipeline stage."""

    groups: tuple[Group, ...]
    block_size: int
    stage_bytes_per_block: tuple[int, ...]
    kv_bytes_per_token: float  # what one more token of context costs once windows are full, fullest stage
    window_bytes_per_token: float  # what it costs in windowed layers until then
    state_bytes_per_seq: int
    used: float  # share of a block's bytes, over all groups, that some layer uses; the rest is padding
    max_model_len: int
    in_flight: int  # tokens being computed per request at most: what the engine reserves windows for
    dcp: int = 1
    counts_blocks: bool = False  # the version logs blocks x block size as "GPU KV cache size"

    def blocks_for(self, tokens: int, in_flight: int = 1) -> int:
        """Blocks that one request with `tokens` of context holds, over all groups; decoding by default."""
        local = math.ceil(tokens / self.dcp)
        return sum(group.blocks(local, in_flight) for group in self.groups)

    @cached_property
    def blocks_per_request(self) -> int:
        """Blocks that the engine wants for one request of `max_model_len` tokens."""
        return self.blocks_for(self.max_model_len, self.in_flight)

    def bytes_needed(self, max_model_len: int) -> int:
        """Bytes on the fullest stage for one request of `max_model_len`: what start-up demands."""
        return self.blocks_for(max_model_len, self.in_flight) * max(self.stage_bytes_per_block)

    def pool(self, available: Sequence[float]) -> KvPool:
        """The pool that `available` bytes (one figure, or one per stage) give: the poorest stage decides for all."""
        stages = [*available] * (len(self.stage_bytes_per_block) if len(available) == 1 else 1)
        counts = [int(max(0, b) // page) for b, page in zip(stages, self.stage_bytes_per_block, strict=True)]
        num_blocks = min(counts)
        return KvPool(
            layout=self, num_blocks=num_blocks, bytes_per_block=self.stage_bytes_per_block[counts.index(num_blocks)]
        )


@dataclass(frozen=True)
class KvPool:
    """`num_blocks` blocks of `bytes_per_block` bytes on each GPU (one of them is the engine's null block)."""

    layout: KvLayout
    num_blocks: int
    bytes_per_block: int

    @property
    def block_size(self) -> int:
        """Tokens of one block in the group with the smallest blocks."""
        return self.layout.block_size

    @property
    def groups(self) -> tuple[Group, ...]:
        """KV-cache groups; all of them draw on this pool."""
        return self.layout.groups

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes per GPU that one more token of a long context costs."""
        return self.layout.kv_bytes_per_token

    @property
    def state_bytes_per_seq(self) -> int:
        """Bytes per GPU of recurrent state and other per-sequence cache."""
        return self.layout.state_bytes_per_seq

    @property
    def max_concurrency_x(self) -> float:
        """Requests of `max_model_len` tokens that fit, as the engine logs it."""
        return self.num_blocks / self.layout.blocks_per_request

    @property
    def kv_tokens(self) -> int:
        """ "GPU KV cache size" as this version logs it: blocks x block size up to 0.20.0, concurrency x length since."""
        if self.layout.counts_blocks:
            return self.num_blocks // len(self.groups) * self.block_size * self.layout.dcp
        return int(self.max_concurrency_x * self.layout.max_model_len)

    def blocks_for(self, tokens: int, in_flight: int = 1) -> int:
        """Blocks that one request with `tokens` of context holds (see `KvLayout.blocks_for`)."""
        return self.layout.blocks_for(tokens, in_flight)

    def sequences(self, tokens: int) -> int:
        """Decoding sequences with `tokens` of context that fit at once."""
        return max(0, self.num_blocks - 1) // max(1, self.blocks_for(tokens))

    @property
    def padding(self) -> float:
        """Share of the pool that no layer uses: groups filled up to equal size, pages padded to equal bytes."""
        return 1 - self.layout.used


def _latent_caches(mixer: LatentAttention, width: float) -> list[Cache]:
    """An MLA layer's latents, plus its index keys (always FP8 with one FP32 scale) where it has an indexer."""
    if mixer.window:  # DeepSeek-V4: latents are always stored as fp8_ds_mla, 584 bytes each
        caches = [Cache("window", 584, window=mixer.window)]
        return caches + [
            Cache("full", (584 + mixer.index_dim * mixer.has_indexer_cache * 33 / 32) / mixer.compress)
        ] * bool(mixer.compress)
    latent = mixer.kv_elements * width
    if mixer.index_heads and width < 2:
        latent = 656 if width == 1 else 352  # fp8_ds_mla, nvfp4_ds_mla
    return [Cache("full", latent)] + [Cache("full", mixer.index_bytes)] * mixer.has_indexer_cache


def layer_caches(layer: Layer, tp: int, kv_cache_dtype: str, k: int = 0) -> list[Cache]:
    """What `layer` keeps on one of `tp` ranks, with `k` speculative tokens (which lengthen convolution states).

    KV heads split until one is left per rank, then they are replicated; latents and index keys always are.
    """
    width, caches = kv_width(kv_cache_dtype), []
    for mixer in layer.mixers:
        if isinstance(mixer, Recurrent):
            state_width = 2 if mixer.kind == "lightning" else mixer.state_width  # in the model's dtype in the engine
            conv = mixer.conv_elements(tp) * 2
            conv += conv // max(1, mixer.conv_kernel - 1) * k
            caches.append(Cache("state", state_bytes=conv + mixer.state_elements // tp * state_width))
        elif not mixer.stores_kv:
            continue
        elif isinstance(mixer, LatentAttention):
            caches += _latent_caches(mixer, width)
        else:
            heads = max(1, mixer.kv_heads // tp)
            scales = 8 if kv_cache_dtype.endswith("per_token_head") else 0
            token = heads * ((mixer.head_dim + mixer.v_head_dim) * width + scales)
            kind: Kind = "full" if not mixer.window else "chunked" if mixer.chunked else "window"
            caches.append(Cache(kind, token, mixer.window or 0))
    return caches


def _count(layers: Sequence[Layer], tp: int, kv_cache_dtype: str, k: int) -> Counter[Cache]:
    counts: Counter[Cache] = Counter()
    for layer, times in Counter(layers).items():
        for cache in layer_caches(layer, tp, kv_cache_dtype, k):
            counts[cache] += times
    return counts


def backend_block_size(architecture: Architecture, kv_cache_dtype: str, compute_capability: float | None) -> int:
    """Block size that the attention backend insists on: 64 for sparse MLA and FlashMLA (FP8 on Hopper), else 16.

    vLLM 0.33.0 backends: FLASHMLA 64, FLASHMLA_SPARSE 64, FlashInfer-MLA 32 (Blackwell), DeepSeek-V4 256.
    """
    latent = next((m for m in architecture.attentions if isinstance(m, LatentAttention)), None)
    if latent is None or architecture.is_hybrid:
        return KERNEL_BLOCK
    if latent.window:
        return 256
    if latent.index_heads or (compute_capability == 9.0 and kv_width(kv_cache_dtype) < 2):
        return 64
    return 32 if compute_capability is not None and int(compute_capability) == 10 else KERNEL_BLOCK


def state_block_size(caches: Mapping[Cache, int], align: int) -> int:
    """Attention block size of a hybrid: the smallest multiple of `align` whose page holds the largest state page."""
    state = max(cache.state_bytes for cache in caches)
    token = max((cache.token_bytes for cache in caches if cache.kind != "state"), default=0)
    return align * math.ceil(state / (align * token)) if token and state else align


def lay_out(
    stages: Sequence[Mapping[Cache, int]],
    *,
    block_size: int,
    max_model_len: int,
    in_flight: int,
    states: int = 1,
    dcp: int = 1,
    hybrid: bool = True,
    counts_blocks: bool = False,
) -> KvLayout:
    """Cut the caches of every pipeline stage into groups and blocks.

    One kind of cache, or only full attention, makes one group. Mixed kinds make groups of equal size (short ones
    padded) and pages of equal bytes (small ones take more tokens per block). `states` is the number of state pages
    per sequence; `hybrid=False` stores windows like full attention. Raises `PlannerError` when nothing is cached.
    """
    total: Counter[Cache] = Counter()
    for stage in stages:
        total.update(stage)
    if not total:
        raise PlannerError("the model keeps no KV cache in any layer; only generative attention models can be planned")
    kinds = {cache.kind for cache in total}
    if kinds <= {"full"} or (not hybrid and "state" not in kinds):
        pages = [round(sum(c.token_bytes * n for c, n in stage.items()) * block_size) for stage in stages]
        groups: tuple[Group, ...] = (Group("full", total.total(), block_size),)
        used = 1.0
    else:
        page = max(max(cache.token_bytes * block_size, cache.state_bytes) for cache in total)
        smallest, largest = min(total.values()), max(total.values())
        size = largest if largest < SAME_SIZE_RATIO * smallest else smallest
        split = {cache: math.ceil(n / size) for cache, n in total.items()}
        groups = tuple(
            Group(
                kind=cache.kind,
                layers=size,
                block_size=block_size
                if cache.kind == "state"
                else block_size * max(1, int(page // (cache.token_bytes * block_size))),
                window=cache.window,
                states=states,
            )
            for cache, number in split.items()
            for _ in range(number)
        )
        pages = [round(page * max(math.ceil(n / split[cache]) for cache, n in stage.items())) for stage in stages]
        useful = sum(
            n * (c.state_bytes or c.token_bytes * block_size * max(1, page // (c.token_bytes * block_size)))
            for c, n in total.items()
        )
        used = useful / (page * size * len(groups))
    return KvLayout(
        groups=groups,
        block_size=min(group.block_size for group in groups),
        stage_bytes_per_block=tuple(max(1, page) for page in pages),
        kv_bytes_per_token=max(_bytes(stage, "full") for stage in stages) / dcp,
        window_bytes_per_token=max(_bytes(stage, "window", "chunked") for stage in stages) / dcp,
        state_bytes_per_seq=max(sum(c.state_bytes * n for c, n in stage.items()) for stage in stages),
        used=used,
        max_model_len=max_model_len,
        in_flight=in_flight,
        dcp=dcp,
        counts_blocks=counts_blocks,
    )


def _bytes(stage: Mapping[Cache, int], *kinds: Kind) -> float:
    return sum(cache.token_bytes * n for cache, n in stage.items() if cache.kind in kinds)


def kv_layout(deployment: Deployment) -> KvLayout:
    """The KV layout of `deployment`, draft and MTP layers included on the last pipeline stage."""
    model, args, engine, layout = deployment.model, deployment.args, deployment.engine, deployment.layout
    architecture, facts = model.architecture, engine.facts
    dtype, speculation = args.kv_cache_dtype or "auto", deployment.speculation
    if dtype == "auto":
        dtype = getattr(model.quantization, "kv_cache_dtype", None) or "auto"
    k = speculation.num_speculative_tokens if speculation else 0
    stages, start = [], 0
    for size in partition(len(architecture.layers), layout.pp):
        stages.append(_count(architecture.layers[start : start + size], layout.tp, dtype, k))
        start += size
    if speculation and speculation.draft:
        stages[-1] += _count(speculation.draft.architecture.layers, layout.tp, dtype, k)
    elif speculation and "mtp" in speculation.method:
        stages[-1] += _count(architecture.mtp, layout.tp, dtype, k)
    block_size = args.block_size or backend_block_size(architecture, dtype, deployment.gpu.compute_capability)
    states = 1 + k
    if architecture.is_hybrid:
        cached = bool(args.enable_prefix_caching)
        checkpoints = cached and engine.release >= GDN_CHECKPOINT_FROM and _is_gdn(architecture)
        block_size = state_block_size(sum(stages, Counter()), max(block_size, 64 if checkpoints else KERNEL_BLOCK))
        states += cached + checkpoints
    concurrent = (layout.pp + bool(args.async_scheduling)) if facts["window_batches"] == "concurrent" else 1
    return lay_out(
        stages,
        block_size=block_size,
        max_model_len=args.max_model_len or architecture.max_position,
        in_flight=concurrent * (args.max_num_batched_tokens or 0),
        states=states,
        dcp=layout.dcp,
        hybrid=engine.release >= HYBRID_POOL_FROM,
        counts_blocks=facts["kv_tokens"] == "blocks",
    )


def _is_gdn(architecture: Architecture) -> bool:
    return any(isinstance(mixer, Recurrent) and mixer.kind == "gdn" for mixer in architecture.mixers)
