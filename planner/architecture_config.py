"""Any `config.json` to an `Architecture`: which kind every layer is, then its weights from the building blocks.

Families differ by a table of class facts, `catalogs/families.yaml`, not by code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from planner import architecture_blocks as blocks
from planner.architecture import Architecture, Experts, Layer, Mixer, Mlp, Weight
from planner.architecture_fields import Fields
from planner.catalog import CATALOGS, read_yaml
from planner.quantities import PlannerError


@cache
def families() -> dict[str, dict[str, Any]]:
    """Class facts by `model_type`, from `catalogs/families.yaml`."""
    return dict(read_yaml(CATALOGS / "families.yaml"))


def from_config(config: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """The architecture that a `config.json` describes.

    Raises `PlannerError` with the field's name when one is missing or impossible.
    """
    if not isinstance(config, Mapping):
        raise PlannerError(f"{where}: expected a mapping of fields, got {type(config).__name__}")
    top = _fields(config, where)
    text = next((top.sub(key) for key in ("text_config", "llm_config", "language_config", "thinker_config")
                 if top.sub(key)), None)  # fmt: skip
    c = top if text is None else _fields(text, f"{where}, text_config")
    hidden, vocab = c.whole("hidden_size"), c.whole("vocab_size", most=2**24)
    tied = top.flag("tie_word_embeddings", c.flag("tie_word_embeddings"))
    kinds = layer_kinds(c)
    made: dict[tuple[str, str], Layer] = {}
    layers = tuple(made.setdefault(kind, _layer(c, hidden, *kind)) if kind not in made else made[kind]
                   for kind in kinds)  # fmt: skip
    ends: tuple[Weight, ...] = (Weight("embed_tokens", vocab, hidden, "vocab", "embedding", linear=False),)
    ends += blocks.vector("norm", hidden, bias=c.flag("norm_bias"))
    if not tied:
        ends += blocks.matrix("lm_head", vocab, hidden, "vocab", "lm_head", c.flag("head_bias"))
    return Architecture(
        model_type=c.text("model_type", top.text("model_type", "unknown")),
        hidden=hidden, vocab=vocab, max_position=c.whole("max_position_embeddings", 2**31, most=2**31),
        layers=layers, ends=ends, tied=tied, warnings=tuple(top.warnings + (c.warnings if c is not top else [])),
    )  # fmt: skip


def _fields(config: Mapping[str, Any], where: str) -> Fields:
    model_type = config.get("model_type")
    known = families().get(model_type, {}) if isinstance(model_type, str) else {}
    fields = Fields(config, known, where)
    if model_type not in families():
        fields.warnings.append(f"{where}: model_type {model_type!r} is not a family known here; planned from its "
                               "generic fields")  # fmt: skip
    return fields


def layer_kinds(c: Fields) -> list[tuple[str, str]]:
    """(mixer, feed-forward) of every layer: full, sliding, chunked, recurrent, none; dense, moe, none."""
    count = c.whole("num_hidden_layers", most=2000)
    return list(zip(_mixers(c, count), _feed_forwards(c, count), strict=True))


_LAYER_TYPES = {
    "full_attention": "full", "attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked",
    "linear_attention": "recurrent", "mamba": "recurrent", "conv": "recurrent",
}  # fmt: skip


def _mixers(c: Fields, count: int) -> list[str]:
    stated = c.items("layer_types", str, count)
    if stated:
        for name in stated:
            if name not in _LAYER_TYPES:
                raise c.refuse("layer_types", f"entries among {', '.join(_LAYER_TYPES)}", name)
        return [_LAYER_TYPES[name] for name in stated]
    windowed = c.get("sliding_window") is not None and (not c.flag("sliding_off") or c.flag("use_sliding_window"))
    if not windowed:
        return ["full"] * count
    cycle = c.whole("sliding_window_pattern", c.whole("layer_cycle", 0, least=0), least=0)
    return ["full" if cycle and (index + 1) % cycle == 0 else "sliding" for index in range(count)]


def _feed_forwards(c: Fields, count: int) -> list[str]:
    if not c.whole("num_experts", 0, least=0, most=2**16):
        return ["dense"] * count
    first = c.whole("first_k_dense_replace", 0, least=0)
    return ["dense" if index < first else "moe" for index in range(count)]


def _layer(c: Fields, hidden: int, mixer_kind: str, mlp_kind: str) -> Layer:
    mixer: Mixer | None
    ffn: Mlp | Experts | None
    if c.get("kv_lora_rank") is not None:
        mixer, weights = blocks.latent_attention(c, hidden, "full" if c.get("index_n_heads") is not None else "")
    else:
        mixer, weights = blocks.attention(c, hidden, mixer_kind)
    if mlp_kind == "moe":
        ffn, more = blocks.experts(c, hidden)
    else:
        ffn, more = blocks.mlp(c, hidden, c.whole("intermediate_size"))
    return Layer(mixer, ffn, weights + more + blocks.norms(c, hidden, c.whole("norms", 2, least=0)))
