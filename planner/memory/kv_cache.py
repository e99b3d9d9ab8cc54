"""The KV cache pool as the engine lays it out: groups of layers, blocks, and those of a request.

Rules from vLLM 0.20.2 (v1/core/kv_cache_utils.py:1052-1684, platforms/interface.py:502) and
0.33.0 (v1/core/kv_cache_planning.py:416, v1/core/kv_cache_utils.py:1061-1130).
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.engines.speculation_methods import list_draft_layers
from planner.models.architecture import DecoderLayer, ModelArchitecture
from planner.models.mixers import (
    KERNEL_BLOCK_TOKENS,
    CacheKind,
    LayerCache,
    get_kv_element_bytes,
)
from planner.parallelism.sharding import split_layers_into_stages

MAX_GROUP_SIZE_RATIO = 1.5
"""Up to this ratio of layer counts, groups have the largest count, beyond it the smallest."""


@dataclass(frozen=True)
class KvCacheGroup:
    """Layers that share block tables, so that a request holds the same blocks for all of them."""

    kind: CacheKind
    layers: int
    block_size: int
    window: int = 0
    states: int = 0

    def count_blocks(self, tokens: int, in_flight: int = 1) -> int:
        """Count a request's blocks at `tokens` of context, `in_flight` of them in computation."""
        if self.kind == "state":
            return self.states
        if self.kind == "window":
            return math.ceil(min(self.window - 1 + in_flight, tokens) / self.block_size) + 1
        if self.kind == "chunked":
            tokens = min(self.window + in_flight, tokens)
        return math.ceil(tokens / self.block_size)


@dataclass(frozen=True)
class KvCacheLayout:
    """How caches are split into blocks; bytes are per GPU, tuples by pipeline stage."""

    groups: tuple[KvCacheGroup, ...]
    block_size: int
    stage_bytes_per_block: tuple[int, ...]
    padding: float  # unused fraction of a block: groups of equal size, pages of equal bytes
    kv_bytes_per_token: float  # of one more token once windows are full, fullest stage
    state_bytes_per_seq: int
    max_model_len: int
    in_flight: int  # maximum tokens in computation per request, for which windows are reserved
    dcp: int = 1
    counts_blocks: bool = False  # the version logs blocks x block size as "GPU KV cache size"
    # sequences that a pool of states or windows holds per block of the pool of full attention
    sequences_per_block: float = math.inf

    def count_request_blocks(self, tokens: int, in_flight: int = 1) -> int:
        """Count a request's blocks at `tokens` of context in all groups; default: decoding."""
        local = math.ceil(tokens / self.dcp)
        return sum(group.count_blocks(local, in_flight) for group in self.groups)

    @cached_property
    def max_blocks_per_request(self) -> int:
        """Blocks that the engine reserves for a request of `max_model_len` tokens."""
        return self.count_request_blocks(self.max_model_len, self.in_flight)

    def compute_max_model_len(self, num_blocks: int) -> int:
        """Compute the largest max_model_len of which one request fits; 0 if none does."""
        lengths = range(1, 2**26 + 1)
        return bisect_right(
            lengths,
            num_blocks,
            key=lambda tokens: self.count_request_blocks(tokens, self.in_flight),
        )

    def build_pool(self, available: Sequence[float]) -> "KvCachePool":
        """Build the pool from the `available` bytes of each stage; the smallest decides for all."""
        pages = self.stage_bytes_per_block
        counts = [int(max(0, size) // page) for size, page in zip(available, pages, strict=True)]
        return KvCachePool(self, min(counts), pages[counts.index(min(counts))])


@dataclass(frozen=True)
class KvCachePool:
    """`num_blocks` blocks of `bytes_per_block` on each GPU, including the engine's null block."""

    layout: KvCacheLayout
    num_blocks: int
    bytes_per_block: int

    @property
    def max_concurrency_x(self) -> float:
        """Requests of `max_model_len` tokens that fit, as the engine logs it."""
        return self.num_blocks / self.layout.max_blocks_per_request

    @property
    def max_sequences(self) -> float:
        """Sequences that run at once at most, by the pool of their states or windows."""
        held = self.layout.sequences_per_block
        return int(self.num_blocks * held) if math.isfinite(held) else held

    @property
    def reported_tokens(self) -> int:
        """Logged GPU KV cache size: blocks x block size up to 0.20.0, then concurrency x length."""
        layout = self.layout
        if layout.counts_blocks:
            return self.num_blocks // len(layout.groups) * layout.block_size * layout.dcp
        return int(self.max_concurrency_x * layout.max_model_len)

    def count_sequences(self, tokens: int) -> int:
        """Count the decoding sequences with `tokens` of context that fit at once."""
        fit = max(0, self.num_blocks - 1) // max(1, self.layout.count_request_blocks(tokens))
        return int(min(fit, self.max_sequences))


StageCaches = Sequence[Mapping[LayerCache, int]]
BlockGroups = tuple[tuple[KvCacheGroup, ...], list[float], float]
"""Groups, bytes per block of each stage, and the fraction of these bytes that is used."""


def group_caches(
    stages: StageCaches, block_size: int, states: int = 1, hybrid: bool = True
) -> BlockGroups:
    """Split the caches of all pipeline stages into groups and blocks.

    `states` is the number of state pages of a sequence; `hybrid=False` stores windows like full
    attention. Raises `PlannerError` if nothing is cached.
    """
    total: Counter[LayerCache] = Counter()
    for stage in stages:
        total.update(stage)
    if not total:
        raise PlannerError(
            "the model keeps no KV cache in any layer; only generative attention models can be"
            " planned"
        )
    kinds = {cache.kind for cache in total}
    if _is_compressed(stages):
        return _group_compressed_caches(stages, total)
    if kinds == {"full"} or (not hybrid and "state" not in kinds):
        group = KvCacheGroup("full", total.total(), block_size)
        token_bytes = (sum(c.token_bytes * n for c, n in stage.items()) for stage in stages)
        return (group,), [size * block_size for size in token_bytes], 1.0
    return _group_mixed_caches(stages, total, block_size, states)


def _split_pools(
    deployment: Deployment, stages: StageCaches, block_size: int
) -> tuple[BlockGroups, float] | None:
    """Give full attention the blocks, and states or windows pools in proportion to them.

    Returns also the sequences per block that such a pool holds; None if the engine has none for the
    model. Without prefix caching there are as many states as sequences (SGLang 0.5.16
    mem_cache/kv_cache_configurator.py:1735 and :1762, model_executor/pool_configurator.py:396).
    """
    facts, model_type = deployment.engine.facts, deployment.model.architecture.model_type
    caches = [cache for stage in stages for cache in stage]
    full = [sum(c.token_bytes * n for c, n in s.items() if c.kind == "full") for s in stages]
    states = [sum(cache.state_bytes * n for cache, n in stage.items()) for stage in stages]
    windows = [sum(c.token_bytes * n for c, n in s.items() if c.window) for s in stages]
    group = (KvCacheGroup("full", max(sum(stage.values()) for stage in stages), block_size),)
    if not all(full) or _is_compressed(stages):
        return None
    if (pool := facts.state_pool) and any(states) and deployment.args.enable_prefix_caching:
        pages = [block_size * size * (1 + pool.ratio) for size in full]
        held = min(f / s for f, s in zip(full, states, strict=True)) * pool.ratio
        held /= pool.per_sequence
        return (group, pages, 1 / (1 + pool.ratio)), held * block_size
    if (pool := facts.window_pool) and any(windows) and model_type.startswith(pool.model_types):
        pages = [block_size * (f + pool.ratio * w) for f, w in zip(full, windows, strict=True)]
        widest = max(cache.window for cache in caches)
        return (group, pages, 1.0), pool.ratio * block_size / (widest + block_size)
    return None


def _group_mixed_caches(
    stages: StageCaches, total: Mapping[LayerCache, int], block_size: int, states: int
) -> BlockGroups:
    """Make groups of equal size (padded) and pages of equal bytes (more tokens in small ones)."""
    page = max(max(cache.token_bytes * block_size, cache.state_bytes) for cache in total)
    smallest, largest = min(total.values()), max(total.values())
    size = largest if largest < MAX_GROUP_SIZE_RATIO * smallest else smallest
    split = {cache: math.ceil(n / size) for cache, n in total.items()}
    groups, used = [], 0.0
    for cache, n in total.items():
        tokens = block_size * (
            int(page // (cache.token_bytes * block_size)) if cache.token_bytes else 1
        )
        groups += [KvCacheGroup(cache.kind, size, tokens, cache.window, states)] * split[cache]
        used += n * (cache.state_bytes or cache.token_bytes * tokens)
    pages = [
        page * max((math.ceil(n / split[c]) for c, n in stage.items()), default=0)
        for stage in stages
    ]
    return tuple(groups), pages, used / (page * size * len(groups))


def _group_compressed_caches(stages: StageCaches, total: Mapping[LayerCache, int]) -> BlockGroups:
    """Group DeepSeek-V4's caches: all compressed ones, then one or more groups per window.

    All use the pages of the compressed caches. Raises `PlannerError` for the cache of a draft
    model, which is not compressed.
    """
    if not all(cache.page_bytes for cache in total):
        raise PlannerError(
            "a draft with a KV cache of its own has no place among compressed caches; draft"
            " with mtp"
        )
    pages = sorted({cache.page_bytes for cache in total if cache.kind == "full"})
    largest: dict[tuple[int, int], int] = {}
    for cache, n in total.items():
        key = (cache.block, cache.window)
        largest[key] = max(n, largest.get(key, 0))
    size = min(
        range(1, max(largest.values()) + 1),
        key=lambda d: (
            (sum(-n % d for n in largest.values()), -d)
            if d >= min(largest.values())
            else (math.inf, 0)
        ),
    )
    groups = [
        KvCacheGroup("window" if window else "full", size, block, window)
        for (block, window), n in largest.items()
        for _ in range(math.ceil(n / size))
    ]
    used = sum(cache.page_bytes * n for cache, n in total.items()) / (
        sum(pages) * size * len(groups)
    )
    fractions = [sum(stage.values()) / sum(total.values()) for stage in stages]
    return tuple(groups), [sum(pages) * math.ceil(size * part) for part in fractions], used


def compute_state_block_size(caches: Mapping[LayerCache, int], align: int) -> int:
    """Compute a hybrid's block size: the smallest multiple of `align` whose page holds a state.

    >>> caches = {LayerCache("full", 100): 1, LayerCache("state", state_bytes=5000): 3}
    >>> compute_state_block_size(caches, align=16)  # 50 tokens, in steps of 16
    64
    """
    state = max(cache.state_bytes for cache in caches)
    token = max((cache.token_bytes for cache in caches), default=0)
    return align * math.ceil(state / (align * token)) if token and state else align


def get_backend_block_size(
    architecture: ModelArchitecture, kv_cache_dtype: str, compute_capability: float | None
) -> int:
    """Get the block size that all attention backends of the model take."""
    width, in_hybrid = get_kv_element_bytes(kv_cache_dtype), architecture.is_hybrid
    sizes = (
        mixer.get_block_size(width, compute_capability, in_hybrid)
        for mixer in architecture.attentions
    )
    return max(sizes, default=KERNEL_BLOCK_TOKENS)


def count_caches(
    layers: Sequence[DecoderLayer], tp: int, kv_cache_dtype: str, k: int = 0, shares: bool = True
) -> Counter[LayerCache]:
    """Count the equal caches of all layers on one of `tp` ranks, with `k` speculative tokens."""
    counts: Counter[LayerCache] = Counter()
    for layer, times in Counter(layers).items():
        for mixer in layer.mixers:
            for cache in mixer.list_caches(tp, kv_cache_dtype, k, shares):
                counts[cache] += times
    return counts


def sum_cache_bytes(caches: Mapping[LayerCache, int]) -> tuple[float, float, int]:
    """Sum the bytes of caches: per token of a long context, of full windows, and of states."""
    token = sum(cache.token_bytes * n for cache, n in caches.items() if cache.kind == "full")
    windows = sum(cache.window * cache.token_bytes * n for cache, n in caches.items())
    return token, windows, sum(cache.state_bytes * n for cache, n in caches.items())


def resolve_kv_cache_dtype(deployment: Deployment) -> str:
    """Resolve the dtype of the KV cache: as given, else "auto" by the checkpoint's scales."""
    dtype = deployment.args.kv_cache_dtype or "auto"
    return dtype if dtype != "auto" else deployment.model.quantization.kv_cache_dtype or "auto"


def assign_stage_layers(deployment: Deployment) -> list[tuple[DecoderLayer, ...]]:
    """Assign layers to pipeline stages; those of a draft go to the last."""
    layers = deployment.model.architecture.layers
    stages = [
        layers[stage.start : stage.stop]
        for stage in split_layers_into_stages(len(layers), deployment.layout.pp)
    ]
    stages[-1] += list_draft_layers(deployment)
    return stages


def build_kv_layout(deployment: Deployment) -> KvCacheLayout:
    """Build the KV cache layout of a deployment."""
    args, engine, layout = deployment.args, deployment.engine, deployment.layout
    architecture, facts = deployment.model.architecture, engine.facts
    dtype, k = resolve_kv_cache_dtype(deployment), deployment.num_draft_tokens
    stages = [
        count_caches(layers, layout.tp, dtype, k, shares=facts.shares_layer_caches)
        for layers in assign_stage_layers(deployment)
    ]
    block_size = args.block_size or facts.block_size
    if facts.backend_blocks and args.block_size is None:
        block_size = get_backend_block_size(architecture, dtype, deployment.gpu.compute_capability)
    states, held = 1 + k, math.inf
    if split := _split_pools(deployment, stages, block_size):
        (groups, pages, used), held = split
    elif any(cache.kind == "state" for stage in stages for cache in stage):
        checkpoints = max(mixer.checkpoint_tokens for mixer in architecture.mixers)
        if not (args.enable_prefix_caching and facts.state_checkpoints):
            checkpoints = 0
        block_size = compute_state_block_size(
            sum(stages, Counter()), max(block_size, checkpoints, KERNEL_BLOCK_TOKENS)
        )
        states += args.enable_prefix_caching + bool(checkpoints)
    if not split:
        groups, pages, used = group_caches(stages, block_size, states, hybrid=facts.window_pages)
    batches = layout.pp + args.async_scheduling if facts.window_batches == "concurrent" else 1
    return KvCacheLayout(
        groups=groups,
        block_size=min(
            group.block_size
            for group in groups
            if group.kind == "full" or not _is_compressed(stages)
        ),
        stage_bytes_per_block=tuple(max(1, round(page)) for page in pages),
        padding=1 - used,
        kv_bytes_per_token=max(sum_cache_bytes(stage)[0] for stage in stages) / layout.dcp,
        state_bytes_per_seq=max(sum_cache_bytes(stage)[2] for stage in stages),
        max_model_len=args.max_model_len,
        in_flight=batches * args.max_num_batched_tokens,
        dcp=layout.dcp,
        counts_blocks=facts.kv_tokens == "blocks",
        sequences_per_block=held,
    )


def _is_compressed(stages: StageCaches) -> bool:
    return any(cache.page_bytes for stage in stages for cache in stage)
