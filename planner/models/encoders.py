"""Vision towers: encoders that turn images into tokens, and the projector into the decoder's width."""

from collections.abc import Callable
from dataclasses import replace

from planner.models.architecture import Shard, Weight
from planner.models.attention_and_mlp import Weights, concat, matrix, vector
from planner.models.config_fields import Fields

PART = "vision_audio"


def _matrix(name: str, rows: int, cols: int, shard: Shard, bias: bool = False, copies: int = 1) -> Weights:
    """A linear layer that stays in the model's dtype: quantizers leave towers alone."""
    weights = matrix(f"vision.{name}", rows, cols, shard, PART, bias, copies)
    return tuple(replace(weight, linear=False) for weight in weights)


def _encoder(depth: int, hidden: int, inner: int, bias: bool = True, norm_bias: bool = True, gated: bool = False,
             norms: int = 2, extra: int = 0) -> Weights:  # fmt: skip
    """`depth` transformer blocks; `extra` counts further elements of each block."""
    names = ("gate_proj", "fc1") if gated else ("fc1",)
    block = concat([
        *(_matrix(f"attn.{name}", hidden, hidden, "column", bias, depth) for name in "qkv"),
        _matrix("attn.proj", hidden, hidden, "row", bias, depth),
        *(_matrix(f"mlp.{name}", inner, hidden, "column", bias, depth) for name in names),
        _matrix("mlp.fc2", hidden, inner, "row", bias, depth),
    ])  # fmt: skip
    rest = norms * hidden * (2 if norm_bias else 1) + extra
    return (*block, Weight("vision.norms", rest, part=PART, copies=depth, linear=False))


def _other(count: int) -> Weights:
    """Embeddings, norms and whatever else is neither split nor quantized."""
    return vector("vision.embeddings", count, PART)


def _patch(v: Fields, hidden: int, frames: int = 1) -> int:
    """Elements of the patch embedding."""
    return hidden * v.whole("in_channels", v.whole("num_channels", 3)) * frames * v.whole("patch_size") ** 2


def _projector(inputs: int, inner: int, outputs: int, bias: bool = True, split: bool = True) -> Weights:
    first = _matrix("projector.linear_1", inner, inputs, "column" if split else "replicated", bias)
    return first + _matrix("projector.linear_2", outputs, inner, "row" if split else "replicated", bias)


def qwen(v: Fields, c: Fields, hidden: int) -> Weights:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""
    third = v.has("num_position_embeddings")
    gated = not third and v.has("intermediate_size")
    width = v.whole("embed_dim", None) or v.whole("hidden_size")
    inner = v.whole("intermediate_size", None) or width * v.whole("mlp_ratio", 4)
    merged = width * v.whole("spatial_merge_size", 2) ** 2
    outputs = v.whole("hidden_size" if v.has("embed_dim") else "out_hidden_size", hidden)
    patch = _patch(v, width, v.whole("temporal_patch_size", 2))
    towers = _encoder(v.whole("depth"), width, inner, norm_bias=not gated, gated=gated)
    towers += _projector(merged, merged, outputs)
    if not third:
        return towers + _other(patch + width * (1 if gated else 2))
    deep = len(v.items("deepstack_visual_indexes", int))
    stacked = concat([_projector(merged, merged, outputs)] * deep)
    return towers + stacked + _other(patch + width * (3 + v.whole("num_position_embeddings")) + deep * 2 * merged)


def clip(v: Fields, c: Fields, hidden: int) -> Weights:
    """CLIP and SigLIP encoders with LLaVA's or Gemma 3's projector."""
    if (kind := v.text("model_type")) not in ("clip_vision_model", "siglip_vision_model"):
        raise v.refuse("model_type", "clip_vision_model or siglip_vision_model", kind)
    width, depth, siglip = v.whole("hidden_size"), v.whole("num_hidden_layers"), kind.startswith("siglip")
    patches = (v.whole("image_size") // v.whole("patch_size")) ** 2
    towers = _encoder(depth, width, v.whole("intermediate_size"))
    other = _patch(v, width) + patches * width + (3 if siglip else 6) * width
    if siglip and v.flag("vision_use_head", True):  # attention pooling
        inner = v.whole("intermediate_size")
        other += 4 * width * width + 2 * width * inner + inner + 8 * width
    if c.has("mm_tokens_per_image"):
        return towers + _other(other + width) + _matrix("projector", hidden, width, "replicated")
    chosen = c.get("vision_feature_layer")
    features = len(chosen) if isinstance(chosen, list) else 1
    newline = hidden if "next" in c.text("model_type") else 0
    return towers + _projector(features * width, hidden, hidden) + _other(other + newline)


def pixtral(v: Fields, c: Fields, hidden: int) -> Weights:
    """Pixtral's encoder with Mistral 3's patch merger."""
    width, merged = v.whole("hidden_size"), c.whole("spatial_merge_size", 2) ** 2
    depth, inner = v.whole("num_hidden_layers"), v.whole("intermediate_size")
    towers = _encoder(depth, width, inner, bias=False, norm_bias=False, gated=True)
    towers += _matrix("projector.patch_merger", width, width * merged, "replicated")
    return towers + _projector(width, hidden, hidden, bias=False) + _other(_patch(v, width) + 2 * width)


def llama4(v: Fields, c: Fields, hidden: int) -> Weights:
    """Llama 4's encoder, pixel-shuffle adapter and projector."""
    width, inner = v.whole("hidden_size"), v.whole("intermediate_size")
    patches = (v.whole("image_size") // v.whole("patch_size")) ** 2
    towers = _encoder(v.whole("num_hidden_layers"), width, inner)
    adapter = v.whole("projector_output_dim")
    towers += _projector(inner, v.whole("projector_input_dim"), adapter, bias=False)
    towers += _matrix("projector.linear", hidden, v.whole("vision_output_dim"), "replicated")
    return towers + _other(_patch(v, width) + (patches + 6) * width)


def gemma4(v: Fields, c: Fields, hidden: int) -> Weights:
    """Gemma 4's encoder: gated blocks with four norms and per-head query and key norms."""
    width, head = v.whole("hidden_size"), v.whole("head_dim")
    depth, inner = v.whole("num_hidden_layers"), v.whole("intermediate_size")
    towers = _encoder(depth, width, inner, bias=False, norm_bias=False, gated=True, norms=4, extra=2 * head)
    towers += _matrix("projector", hidden, width, "replicated")
    whole = tuple(replace(weight, shard="replicated") for weight in towers)  # vLLM runs it unsplit
    return whole + _other(_patch(v, width) + 2 * v.whole("position_embedding_size") * width)


def moonvit(v: Fields, c: Fields, hidden: int) -> Weights:
    """Kimi's MoonViT with its patch-merging projector."""
    width = v.whole("vt_hidden_size", None) or v.whole("hidden_size")
    depth = v.whole("vt_num_hidden_layers", None) or v.whole("num_hidden_layers")
    inner = v.whole("vt_intermediate_size", None) or v.whole("intermediate_size")
    high, wide = (v.whole(f"init_pos_emb_{side}", v.whole(f"pos_emb_{side}", 64)) for side in ("height", "width"))
    merged = 4 * width
    towers = _encoder(depth, width, inner) + _projector(merged, merged, hidden, split=False)
    return towers + _other(_patch(v, width) + width * (1 + high * wide + 4))


def minimax(v: Fields, c: Fields, hidden: int) -> Weights:
    """MiniMax-M3's encoder: CLIP's blocks, a projector, and a merger of 2 x 2 patches."""
    width, merged = v.whole("hidden_size"), 4 * hidden
    towers = _encoder(v.whole("num_hidden_layers"), width, v.whole("intermediate_size"))
    towers += _projector(width, hidden, hidden)
    return towers + _projector(merged, hidden, hidden) + _other(_patch(v, width, 2) + 2 * width)


def encoders(count: int) -> Weights:
    """Encoders and projectors of which only the number of parameters is known; engines split their matrices."""
    return _matrix("encoders", count // 4096, 4096, "column") + _other(count % 4096)


TOWERS: dict[str, Callable[[Fields, Fields, int], Weights]] = {
    tower.__name__: tower for tower in (qwen, clip, pixtral, llama4, gemma4, moonvit, minimax)
}
"""Builders by the name that families give their tower: (vision_config, whole configuration, decoder width)."""
