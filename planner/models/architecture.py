"""Model architectures: shapes of all weights, layer by layer.

`models.hf_config` builds them from a `config.json`. Counts are elements, sizes bytes.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from planner.models.mixers import Attention, RecurrentMixer, SequenceMixer

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
class FeedForward:
    """A feed-forward block: dense, or a mixture of experts beside what every token passes through."""

    intermediate: int  # of one expert where there are `num_experts`
    matrices: int = 3  # gate, up and down; 2 without a gate
    num_experts: int = 0
    num_active_experts: int = 0
    shared_intermediate: int = 0

    @property
    def dense_width(self) -> int:
        """The inner width of what every token passes through."""
        return self.shared_intermediate if self.num_experts else self.intermediate


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One decoder layer; equal layers of a model are the same object."""

    mixers: tuple[SequenceMixer, ...]  # two with Falcon-H1's state space or V4's compressor
    mlp: FeedForward | None
    weights: tuple[WeightTensor, ...]

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The mixers that attend."""
        return tuple(mixer for mixer in self.mixers if not isinstance(mixer, RecurrentMixer))

    @property
    def mixer(self) -> SequenceMixer | None:
        """The first mixer; None for a layer without any."""
        return self.mixers[0] if self.mixers else None


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
    unread: tuple[str, ...] = ()  # fields of an unknown family that may decide sizes
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
            if layer.mlp and layer.mlp.num_experts
            for weight in layer.weights
            if weight.part == "routed_experts"
        )
        return self.params_total - self.params_by_part["vision_audio"] - idle

    @cached_property
    def mixers(self) -> tuple[SequenceMixer, ...]:
        """The mixers of all layers, in order."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention mixers of all layers, in order."""
        return tuple(mixer for layer in self.layers for mixer in layer.attentions)

    @cached_property
    def num_query_heads(self) -> int:
        """Query heads of the first attention layer; 0 without attention."""
        return self.attentions[0].heads if self.attentions else 0

    @cached_property
    def num_kv_heads(self) -> int:
        """KV heads of the first attention layer: 1 for latent attention, 0 without attention."""
        return self.attentions[0].kv_heads if self.attentions else 0

    @cached_property
    def is_moe(self) -> bool:
        """Whether some layer routes tokens to experts."""
        return any(layer.mlp and layer.mlp.num_experts for layer in self.distinct_layers)

    @cached_property
    def is_mla(self) -> bool:
        """Whether some layer caches latents."""
        return any(mixer.is_latent for mixer in self.attentions)

    @cached_property
    def is_hybrid(self) -> bool:
        """Whether some layer keeps a recurrent state."""
        return len(self.attentions) < len(self.mixers)
