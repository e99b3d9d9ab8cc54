"""Model architectures: shapes of all weights, and the cache of each layer per token and sequence.

`models.hf_config` builds them from a `config.json`. Counts are elements, sizes bytes.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ShardingKind = Literal["column", "row", "kv", "vocab", "replicated"]
"""How tensor parallelism splits a weight: by outputs, by inputs, by heads (repeated once each rank
has one), by vocabulary rows padded to a multiple of 64, or not at all."""


@dataclass(frozen=True)
class WeightTensor:
    """One tensor or `copies` equal ones (experts): `rows` outputs, `cols` inputs (vectors: 1)."""

    name: str  # end of its Hugging Face module path, which quantizers match
    rows: int
    cols: int = 1
    shard: ShardingKind = "replicated"
    part: str = "attention"
    copies: int = 1
    num_shard_units: int = 1  # heads or groups that "kv" does not split
    linear: bool = True  # a matrix product that may be quantized
    stored_bits: int | None = None  # fixed width instead of the model's dtype

    @property
    def num_elements(self) -> int:
        """Elements in all copies."""
        return self.rows * self.cols * self.copies


@dataclass(frozen=True)
class GroupedQueryAttention:
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

    @property
    def rotary_dim(self) -> int:
        """Dimensions that a rotary embedding may rotate."""
        return self.head_dim

    @property
    def index_bytes(self) -> float:
        """Bytes of index keys per token: one key in bf16 (vLLM models/minimax_m3/common)."""
        return 2 * self.index_dim if self.index_heads else 0


@dataclass(frozen=True)
class LatentAttention:
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
    window: int | None = None  # DeepSeek-V4: a sliding window of latents beside the compressed ones
    compress: int = 1  # tokens per stored latent (DeepSeek-V4: 4 or 128; 0: only the window's)
    stores_kv: bool = True

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
        reach = self.selected_latents * self.compress if self.selected_latents else None
        all_latents = ((reach, 1 / self.compress),) if self.compress else ()
        return ((self.window, 1.0),) * bool(self.window) + all_latents


@dataclass(frozen=True)
class RecurrentMixer:
    """A mixer with constant state: state space, delta rule, linear attention, short convolution."""

    kind: str  # mamba1 mamba2 gdn kda lightning short_conv compressor
    heads: int = 1
    conv_channels: int = 0  # split over tensor-parallel ranks
    conv_group_channels: int = 0  # per group; groups are repeated if there are fewer than ranks
    groups: int = 0
    conv_kernel: int = 0
    state_elements: int = 0
    state_width: int = 4  # bytes per element of the recurrent state; convolution: 16 bit

    def compute_state_bytes(self, tp: int = 1, k: int = 0) -> int:
        """Compute the state bytes per sequence on one of `tp` ranks.

        Beside the recurrent state, a convolution keeps kernel - 1 inputs per channel in 16 bit, and
        one more for each of `k` speculative tokens.
        """
        groups = self.groups // tp if self.groups % tp == 0 else 1
        channels = self.conv_channels // tp + groups * self.conv_group_channels
        inputs = self.conv_kernel - 1 + k if self.conv_kernel > 1 else 0
        ranks = 1 if self.kind == "compressor" else tp  # DeepSeek-V4 repeats it on every rank
        return channels * inputs * 2 + self.state_elements // ranks * self.state_width


@dataclass(frozen=True)
class DenseMlp:
    """A dense feed-forward block: `matrices` is 3 if gated (gate, up, down), else 2."""

    intermediate: int
    matrices: int = 3


@dataclass(frozen=True)
class MoeBlock:
    """A mixture of experts; every token also passes through the shared experts."""

    num_experts: int
    num_active_experts: int
    intermediate: int
    shared_intermediate: int = 0
    matrices: int = 3


SequenceMixer = GroupedQueryAttention | LatentAttention | RecurrentMixer


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One decoder layer; equal layers of a model are the same object."""

    mixer: SequenceMixer | None
    mlp: DenseMlp | MoeBlock | None
    weights: tuple[WeightTensor, ...]
    extra_mixer: RecurrentMixer | None = None  # Falcon-H1's state space, V4's compressor

    @property
    def mixers(self) -> tuple[SequenceMixer, ...]:
        """The mixers, each of which keeps a cache or a state."""
        return tuple(mixer for mixer in (self.mixer, self.extra_mixer) if mixer is not None)


@dataclass(frozen=True, eq=False)
class ModelArchitecture:
    """Layers, embeddings and towers; MTP layers are separate, as only speculation loads them."""

    model_type: str
    hidden: int
    vocab: int
    max_position: int
    layers: tuple[DecoderLayer, ...]
    embedding_and_head: tuple[WeightTensor, ...]  # embedding, final norm, head (absent when tied)
    vision_towers: tuple[WeightTensor, ...] = ()  # vision and audio encoders with their projectors
    mtp_layers: tuple[DecoderLayer, ...] = ()
    tied: bool = False
    warnings: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # that serve it, where its config.json states `architectures`

    @cached_property
    def distinct_layers(self) -> Mapping[DecoderLayer, int]:
        """Each distinct layer -> its number, in order of first appearance."""
        return Counter(self.layers)

    @cached_property
    def params_by_part(self) -> Counter[str]:
        """Elements by part: embedding, attention, ...; `engine`: tensors that engines add."""
        parts: Counter[str] = Counter()
        for layer, times in self.distinct_layers.items():
            for weight in layer.weights:
                parts[weight.part] += weight.num_elements * times
        for weight in (*self.embedding_and_head, *self.vision_towers):
            parts[weight.part] += weight.num_elements
        return parts

    @cached_property
    def params_total(self) -> int:
        """Parameters, without the routers' correction biases, which are buffers."""
        return self.params_stored - self.params_by_part["router_bias"]

    @cached_property
    def params_stored(self) -> int:
        """Elements in the checkpoint, tied embeddings once, without MTP layers."""
        return sum(self.params_by_part.values()) - self.params_by_part["engine"]

    @cached_property
    def params_active(self) -> float:
        """Parameters that a text token uses: without towers and the experts of other tokens."""
        idle = sum(
            times * weight.num_elements * (1 - layer.mlp.num_active_experts / layer.mlp.num_experts)
            for layer, times in self.distinct_layers.items()
            if isinstance(layer.mlp, MoeBlock)
            for weight in layer.weights
            if weight.part == "routed_experts"
        )
        return self.params_total - self.params_by_part["vision_audio"] - idle

    @cached_property
    def mixers(self) -> tuple[SequenceMixer, ...]:
        """The mixers of all layers, in order."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @cached_property
    def attentions(self) -> tuple[GroupedQueryAttention | LatentAttention, ...]:
        """The attention mixers of all layers, in order."""
        return tuple(mixer for mixer in self.mixers if not isinstance(mixer, RecurrentMixer))

    @cached_property
    def num_query_heads(self) -> int:
        """Query heads of the first attention layer; 0 without attention."""
        return self.attentions[0].heads if self.attentions else 0

    @cached_property
    def num_kv_heads(self) -> int:
        """KV heads of the first attention layer: 1 for latent attention, 0 without attention."""
        first = self.attentions[0] if self.attentions else None
        return (
            first.kv_heads if isinstance(first, GroupedQueryAttention) else len(self.attentions[:1])
        )

    @cached_property
    def is_moe(self) -> bool:
        """Whether some layer routes tokens to experts."""
        return any(isinstance(layer.mlp, MoeBlock) for layer in self.distinct_layers)

    @cached_property
    def is_mla(self) -> bool:
        """Whether some layer caches latents."""
        return any(isinstance(mixer, LatentAttention) for mixer in self.mixers)

    @cached_property
    def is_hybrid(self) -> bool:
        """Whether some layer keeps a recurrent state."""
        return any(isinstance(mixer, RecurrentMixer) for mixer in self.mixers)
