"""Vision towers: image encoders, and projectors to the width of the decoder."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planner.models.architecture import ShardingKind, WeightTensor
from planner.models.config_reader import ConfigReader
from planner.models.transformer_blocks import (
    WeightTensors,
    build_linear,
    build_vector,
    join_weights,
)

VISION_PART = "vision_audio"


def _build_unquantized_linear(
    name: str, rows: int, cols: int, shard: ShardingKind, bias: bool = False, copies: int = 1
) -> WeightTensors:
    """Build a linear layer in the model's dtype; quantizers skip towers."""
    weights = build_linear(f"vision.{name}", rows, cols, shard, VISION_PART, bias, copies)
    return tuple(replace(weight, linear=False) for weight in weights)


def _build_encoder(
    depth: int, hidden: int, inner: int, bias: bool = True, norm_bias: bool = True,
    gated: bool = False, norms: int = 2, extra: int = 0, qkv_bias: bool | None = None,
) -> WeightTensors:  # fmt: skip
    """Build `depth` transformer blocks; `extra` is the number of other elements in each."""
    with_bias = bias if qkv_bias is None else qkv_bias
    attention = (
        _build_unquantized_linear(f"attn.{name}", hidden, hidden, "column", with_bias, depth)
        for name in "qkv"
    )
    mlp = (
        _build_unquantized_linear(f"mlp.{name}", inner, hidden, "column", bias, depth)
        for name in (("gate_proj", "fc1") if gated else ("fc1",))
    )
    block = join_weights(
        [
            *attention,
            _build_unquantized_linear("attn.proj", hidden, hidden, "row", bias, depth),
            *mlp,
            _build_unquantized_linear("mlp.fc2", hidden, inner, "row", bias, depth),
        ]
    )
    rest = norms * hidden * (2 if norm_bias else 1) + extra
    return (
        *block,
        WeightTensor("vision.norms", rest, part=VISION_PART, copies=depth, linear=False),
    )


def _build_stated_encoder(v: ConfigReader, **options: Any) -> WeightTensors:
    """Build the blocks of the usual fields, with `options` of `_build_encoder`."""
    depth, hidden = v.read_int("num_hidden_layers"), v.read_int("hidden_size")
    return _build_encoder(depth, hidden, v.read_int("intermediate_size"), **options)


def _count_patches(v: ConfigReader) -> int:
    """Count the patches of an image."""
    return (v.read_int("image_size") // v.read_int("patch_size")) ** 2


def _build_unsplit_weights(count: int) -> WeightTensors:
    """Build embeddings, norms and other weights that are neither split nor quantized."""
    return build_vector("vision.embeddings", count, VISION_PART)


def _count_patch_embedding(v: ConfigReader, hidden: int, frames: int = 1) -> int:
    """Count the elements of the patch embedding."""
    channels = v.read_int("in_channels", v.read_int("num_channels", 3))
    return hidden * channels * frames * v.read_int("patch_size") ** 2


def _build_projector(
    inputs: int, inner: int, outputs: int, bias: bool = True, split: bool = True
) -> WeightTensors:
    """Build a projector of two linear layers, split over GPUs or repeated on each."""
    shards: tuple[ShardingKind, ShardingKind] = (
        ("column", "row") if split else ("replicated", "replicated")
    )
    return (
        *_build_unquantized_linear("projector.linear_1", inner, inputs, shards[0], bias),
        *_build_unquantized_linear("projector.linear_2", outputs, inner, shards[1], bias),
    )


def build_qwen_tower(v: ConfigReader, c: ConfigReader, hidden: int) -> WeightTensors:
    """Build the tower of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""
    is_qwen3 = v.has_field("num_position_embeddings")
    gated = not is_qwen3 and v.has_field("intermediate_size")
    width = v.read_int("embed_dim", None) or v.read_int("hidden_size")
    inner = v.read_int("intermediate_size", None) or width * v.read_int("mlp_ratio", 4)
    merged = width * v.read_int("spatial_merge_size", 2) ** 2
    outputs = v.read_int("hidden_size" if v.has_field("embed_dim") else "out_hidden_size", hidden)
    patch = _count_patch_embedding(v, width, v.read_int("temporal_patch_size", 2))
    towers = _build_encoder(v.read_int("depth"), width, inner, norm_bias=not gated, gated=gated)
    towers += _build_projector(merged, merged, outputs)
    if not is_qwen3:
        return towers + _build_unsplit_weights(patch + width * (1 if gated else 2))
    num_projectors = len(v.read_list("deepstack_visual_indexes", int))
    towers += _build_projector(merged, merged, outputs) * num_projectors
    positions = width * (3 + v.read_int("num_position_embeddings"))
    return towers + _build_unsplit_weights(patch + positions + num_projectors * 2 * merged)


def build_clip_tower(v: ConfigReader, c: ConfigReader, hidden: int) -> WeightTensors:
    """Build CLIP and SigLIP encoders with LLaVA's or Gemma 3's projector."""
    if (kind := v.read_text_field("model_type")) not in (
        "clip_vision_model",
        "siglip_vision_model",
    ):
        raise v.make_field_error("model_type", "clip_vision_model or siglip_vision_model", kind)
    width, siglip = v.read_int("hidden_size"), kind.startswith("siglip")
    towers, positions = _build_stated_encoder(v), _count_patches(v) + (3 if siglip else 6)
    other = _count_patch_embedding(v, width) + positions * width
    if siglip and v.read_bool("vision_use_head", True):  # attention pooling
        inner = v.read_int("intermediate_size")
        other += 4 * width * width + 2 * width * inner + inner + 8 * width
    if c.has_field("mm_tokens_per_image"):
        return (
            towers
            + _build_unsplit_weights(other + width)
            + _build_unquantized_linear("projector", hidden, width, "replicated")
        )
    layers = c.get_or_default("vision_feature_layer")
    features = len(layers) if isinstance(layers, list) else 1
    newline = hidden if "next" in c.read_text_field("model_type") else 0
    return (
        towers
        + _build_projector(features * width, hidden, hidden)
        + _build_unsplit_weights(other + newline)
    )


def build_pixtral_tower(v: ConfigReader, c: ConfigReader, hidden: int) -> WeightTensors:
    """Build Pixtral's encoder with Mistral 3's patch merger."""
    width, merged = v.read_int("hidden_size"), c.read_int("spatial_merge_size", 2) ** 2
    return (
        *_build_stated_encoder(v, bias=False, norm_bias=False, gated=True),
        *_build_unquantized_linear("projector.patch_merger", width, width * merged, "replicated"),
        *_build_projector(width, hidden, hidden, bias=False),
        *_build_unsplit_weights(_count_patch_embedding(v, width) + 2 * width),
    )


def build_llama4_tower(v: ConfigReader, c: ConfigReader, hidden: int) -> WeightTensors:
    """Build Llama 4's encoder, pixel-shuffle adapter and projector."""
    width, inner = v.read_int("hidden_size"), v.read_int("intermediate_size")
    adapter_inner, adapter = v.read_int("projector_input_dim"), v.read_int("projector_output_dim")
    outputs, other = v.read_int("vision_output_dim"), (_count_patches(v) + 6) * width
    return (
        *_build_stated_encoder(v),
        *_build_projector(inner, adapter_inner, adapter, bias=False),
        *_build_unquantized_linear("projector.linear", hidden, outputs, "replicated"),
        *_build_unsplit_weights(_count_patch_embedding(v, width) + other),
    )


def build_gemma4_tower(v: ConfigReader, c: ConfigReader, hidden: int) -> WeightTensors:
    """Build Gemma 4's encoder: gated blocks with four norms and per-head query and key norms."""
    width, head = v.read_int("hidden_size"), v.read_int("head_dim")
    options = {"bias": False, "norm_bias": False, "gated": True}
    encoder = _build_stated_encoder(v, **options, norms=4, extra=2 * head)
    positions = 2 * v.read_int("position_embedding_size")
    return (
        *(replace(weight, shard="replicated") for weight in encoder),  # vLLM: not split
        *_build_unquantized_linear("projector", hidden, width, "replicated"),
        *_build_unsplit_weights(_count_patch_embedding(v, width) + positions * width),
    )


def build_moonvit_tower(v: ConfigReader, c: ConfigReader, hidden: int) -> WeightTensors:
    """Build Kimi's MoonViT with its patch-merging projector."""
    width = v.read_int("vt_hidden_size", None) or v.read_int("hidden_size")
    depth = v.read_int("vt_num_hidden_layers", None) or v.read_int("num_hidden_layers")
    inner = v.read_int("vt_intermediate_size", None) or v.read_int("intermediate_size")
    rows, cols = (
        v.read_int(f"init_pos_emb_{side}", v.read_int(f"pos_emb_{side}", 64))
        for side in ("height", "width")
    )
    return (
        *_build_encoder(depth, width, inner),
        *_build_projector(4 * width, 4 * width, hidden, split=False),
        *_build_unsplit_weights(_count_patch_embedding(v, width) + width * (1 + rows * cols + 4)),
    )


def build_minimax_tower(v: ConfigReader, c: ConfigReader, hidden: int) -> WeightTensors:
    """Build MiniMax-M3's encoder: CLIP's blocks, a projector, and a merger of 2 x 2 patches."""
    width, merged = v.read_int("hidden_size"), 4 * hidden
    return (
        *_build_stated_encoder(v),
        *_build_projector(width, hidden, hidden),
        *_build_projector(merged, hidden, hidden),
        *_build_unsplit_weights(_count_patch_embedding(v, width, 2) + 2 * width),
    )


def build_intern_tower(v: ConfigReader, c: ConfigReader, hidden: int) -> WeightTensors:
    """Build InternVL's InternViT, 300M or 6B, with the projector behind its pixel shuffle."""
    width, is_rms = v.read_int("hidden_size"), v.read_text_field("norm_type") == "rms_norm"
    other = width + (_count_patches(v) + 2) * width + 8 * width  # bias, class, positions, norm
    return (
        *_build_stated_encoder(
            v,
            norm_bias=not is_rms,
            qkv_bias=v.read_bool("qkv_bias"),
            # scales of layers, norms
            extra=2 * width * (2 if v.read_bool("qk_normalization") else 1),
        ),
        *_build_projector(4 * width, hidden, hidden),
        *_build_unsplit_weights(_count_patch_embedding(v, width) + other),
    )


def build_generic_encoder(count: int) -> WeightTensors:
    """Build encoders of which only the number of parameters is known; engines split them."""
    return _build_unquantized_linear(
        "encoders", count // 4096, 4096, "column"
    ) + _build_unsplit_weights(count % 4096)


TowerBuilder = Callable[[ConfigReader, ConfigReader, int], WeightTensors]
"""(vision_config, whole configuration, width of the decoder) -> weights."""
VISION_TOWER_BUILDERS: dict[str, TowerBuilder] = {
    tower.__name__.removeprefix("build_").removesuffix("_tower"): tower
    for tower in (
        build_qwen_tower,
        build_clip_tower,
        build_pixtral_tower,
        build_llama4_tower,
        build_gemma4_tower,
        build_moonvit_tower,
        build_minimax_tower,
        build_intern_tower,
    )
}
"""Builders by the name of the tower in `catalogs/families.yaml`."""
