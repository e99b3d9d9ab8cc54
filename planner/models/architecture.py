"""What a model is made of: every weight's shape, and what each layer keeps per token and per sequence.

The nouns only; `models.from_config` builds them from a `config.json`. Counts are elements, sizes
bytes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ShardingKind = Literal["column", "row", "kv", "vocab", "replicated"]
"""What tensor parallelism does with a weight: split its outputs, its inputs, its heads until one is left per rank
(then repeat that one), its vocabulary padded to 64, or nothing."""


@dataclass(frozen=True)
class WeightTensor:
    """One tensor, or `copies` equal ones (experts): `rows` outputs by `cols` inputs; a vector has `cols` = 1."""

    name: str  # the tail of its Hugging Face module path: exclusion lists of quantizers match on it
    rows: int
    cols: int = 1
    shard: ShardingKind = "replicated"
    part: str = "attention"
    copies: int = 1
    num_shard_units: int = 1  # heads or groups that "kv" keeps whole
    linear: bool = True  # a matrix product, which a quantizer may touch
    stored_bits: int | None = None  # kept at this width whatever the model's dtype is

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
    window: int | None = None  # tokens it looks back; None: all
    chunked: bool = False  # `window` is a chunk that starts anew, not a sliding window
    stores_kv: bool = True  # False: reads an earlier layer's cache

    @property
    def rotary_dim(self) -> int:
        """Dimensions that a rotary embedding may turn."""
        return self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434): one latent and one rotary key per token, shared by all heads."""

    heads: int
    kv_lora_rank: int
    nope_dim: int
    rotary_dim: int
    v_dim: int
    index_heads: int = (
        0  # a sparse-attention indexer (DeepSeek-V3.2) chooses the tokens to attend to
    )
    index_dim: int = 0
    has_indexer_cache: bool = (
        False  # False with `index_heads`: this layer reuses another layer's choice
    )
    window: int | None = None  # DeepSeek-V4: a sliding window of latents beside the compressed ones
    compress: int = (
        1  # tokens per stored latent (DeepSeek-V4: 4 or 128; 0: none stored beside the window's)
    )
    stores_kv: bool = True

    @property
    def kv_elements(self) -> int:
        """Latent elements per stored latent."""
        return self.kv_lora_rank + self.rotary_dim

    @property
    def index_bytes(self) -> float:
        """Index key bytes per token: FP8 plus one FP32 scale per 128 elements (V3.2); bf16 per 4 tokens (V4)."""
        if not self.has_indexer_cache:
            return 0
        return (
            self.index_dim * 2 / self.compress
            if self.window
            else self.index_dim + 4 * -(-self.index_dim // 128)
        )


@dataclass(frozen=True)
class RecurrentMixer:
    """A mixer with a constant state per sequence: state space, delta rule, linear attention, short convolution."""

    kind: str  # mamba1 mamba2 gdn kda lightning short_conv compressor
    heads: int = 1
    conv_channels: int = 0  # split over tensor-parallel ranks
    conv_group_channels: int = 0  # per group; groups are repeated when there are fewer than ranks
    groups: int = 0
    conv_kernel: int = 0
    state_elements: int = 0
    state_width: int = (
        4  # bytes an element of the recurrent state; the convolution's is in the model's dtype
    )

    def compute_state_bytes(self, tp: int = 1, k: int = 0) -> int:
        """State bytes per sequence on one of `tp` ranks: of the recurrence, and inputs of every channel in 16 bit.

        A convolution keeps kernel - 1 of them, and one more for each of `k` speculative tokens.
        """
        groups = self.groups // tp if self.groups % tp == 0 else 1
        channels = self.conv_channels // tp + groups * self.conv_group_channels
        inputs = self.conv_kernel - 1 + k if self.conv_kernel > 1 else 0
        share = (
            1 if self.kind == "compressor" else tp
        )  # DeepSeek-V4's compressor is the same on every rank
        return channels * inputs * 2 + self.state_elements // share * self.state_width


@dataclass(frozen=True)
class DenseMlp:
    """A dense feed-forward block: `matrices` is 3 when gated (gate, up, down), else 2."""

    intermediate: int
    matrices: int = 3


@dataclass(frozen=True)
class MoeBlock:
    """A mixture of experts: `active` of `total` per token, beside shared ones that every token passes through."""

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
    extra_mixer: RecurrentMixer | None = (
        None  # beside the attention: Falcon-H1's state space, V4's compressor
    )

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all its weights."""
        return sum(weight.num_elements for weight in self.weights)

    @property
    def mixers(self) -> tuple[SequenceMixer, ...]:
        """Everything in it that keeps a cache or a state."""
        return tuple(mixer for mixer in (self.mixer, self.extra_mixer) if mixer is not None)


@dataclass(frozen=True, eq=False)
class ModelArchitecture:
    """A model's layers and what lies around them; MTP layers are apart: engines load them only to speculate."""

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

    @cached_property
    def distinct_layers(self) -> Mapping[DecoderLayer, int]:
        """Each different layer and how often it occurs, in order of first appearance."""
        return Counter(self.layers)

    def iterate_weights(self) -> Iterator[tuple[WeightTensor, int]]:
        """Every weight of the served model (MTP not among them) with the number of layers that hold it."""
        for layer, times in self.distinct_layers.items():
            for weight in layer.weights:
                yield weight, times
        for weight in (*self.embedding_and_head, *self.vision_towers):
            yield weight, 1

    @cached_property
    def params_by_part(self) -> Counter[str]:
        """Elements by part: embedding, attention, routed_experts, ...; `engine` is what only an engine holds."""
        parts: Counter[str] = Counter()
        for weight, times in self.iterate_weights():
            parts[weight.part] += weight.num_elements * times
        return parts

    @cached_property
    def params_total(self) -> int:
        """Parameters; the routers' correction biases are buffers and not in it (they are in `params_stored`)."""
        return self.params_stored - self.params_by_part["router_bias"]

    @cached_property
    def params_stored(self) -> int:
        """Elements of the served model's tensors in the checkpoint, tied embeddings once."""
        return sum(self.params_by_part.values()) - self.params_by_part["engine"]

    @cached_property
    def params_active(self) -> float:
        """Parameters that one text token passes through: without towers and the experts it isn't routed to."""
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
        """Some layer routes tokens to experts."""
        return any(isinstance(layer.mlp, MoeBlock) for layer in self.distinct_layers)

    @cached_property
    def is_mla(self) -> bool:
        """Some layer caches latents."""
        return any(isinstance(mixer, LatentAttention) for mixer in self.mixers)

    @cached_property
    def is_hybrid(self) -> bool:
        """Some layer keeps a recurrent state."""
        return any(isinstance(mixer, RecurrentMixer) for mixer in self.mixers)
