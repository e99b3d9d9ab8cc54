"""The kind of each layer in a `config.json`: its mixer, its feed-forward block, its own fields."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.core.errors import PlannerError
from planner.models.config_reader import CONFIG_FIELD_CATALOG, MAX_LAYERS, ConfigReader

_PER_LAYER_FIELDS = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "num_key_value_heads",
    "num_attention_heads",
)
"""Fields that some files give as a list with one value per layer, or under NAME_per_layer."""
_SLIDING_WINDOW_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
"""Fields that some files override for sliding-window layers, with the prefix `swa_`."""


@dataclass(frozen=True)
class LayerKind:
    """A kind of decoder layer, and the `fields` in which it differs from the whole configuration."""

    mixer: str = "full"  # full sliding chunked recurrent both compressed none
    ffn: str = ""  # dense moe none; empty: as the fields of the file say
    compress_ratio: int = 0  # tokens per latent of a compressed one
    indexer: str = ""  # of latents: full, shared
    selects_blocks: bool = False  # of keys and values
    stores_kv: bool = True
    key_is_value: bool = False
    has_sinks: bool = False
    fields: tuple[tuple[str, Any], ...] = ()


_LAYER_TYPES = {name: LayerKind(**given) for name, given in CONFIG_FIELD_CATALOG["layers"].items()}
"""Kinds of layers by the names that configurations give them."""


def classify_layers(c: ConfigReader) -> list[LayerKind]:
    """Classify every layer."""
    pattern = c.read_list("hybrid_override_pattern", str) or c.read_list("layers_block_type", str)
    count = c.read_int("num_hidden_layers", maximum=MAX_LAYERS) if not pattern else len(pattern)
    kinds, ffns = _classify_mixers(c, count, pattern), _classify_feed_forwards(c, count)
    kinds = [
        _add_own_fields(c, replace(kind, ffn=kind.ffn or ffn), index, count)
        for index, (kind, ffn) in enumerate(zip(kinds, ffns, strict=True))
    ]
    for index, kind in enumerate(kinds):
        for key, value in kind.fields:
            if isinstance(value, dict | list):
                raise PlannerError(
                    f"{c.location}, field {key} of layer {index}: expected one value, got"
                    f" {value!r:.50}"
                )
    return kinds


def _classify_mixers(c: ConfigReader, count: int, pattern: list[str]) -> list[LayerKind]:
    """Return the mixer of every layer, some with the feed-forward block that they imply."""
    for field, names in (
        ("layer_types", c.read_list("layer_types", str, count)),
        ("layers_block_type", pattern),
    ):
        if names:
            return look_up_layer_types(c, field, names, c.read_bool("single_blocks"))
    if ratios := c.read_list("compress_ratios", int, count):
        return [LayerKind("compressed", compress_ratio=int(ratio)) for ratio in ratios]
    return [LayerKind(mixer) for mixer in _name_mixers(c, count)]


def _name_mixers(c: ConfigReader, count: int) -> list[str]:
    """Name the mixer of every layer of a model that lists no types of layers."""
    if c.get_nested("linear_attn_config"):
        recurrent = set(c.read_nested("linear_attn_config").read_list("kda_layers", int))
        return ["recurrent" if index + 1 in recurrent else "full" for index in range(count)]
    if kinds := c.read_list("hybrid_layer_pattern", int, count):
        return ["sliding" if kind else "full" for kind in kinds]
    if kinds := c.read_list("attn_type_list", int, count):
        return ["full" if kind else "recurrent" for kind in kinds]
    if (period := c.read_int("attn_layer_period", 0, minimum=0)) > 0:
        offset = c.read_int("attn_layer_offset", 0, minimum=0)
        return ["full" if index % period == offset else "recurrent" for index in range(count)]
    full = c.read_list("attn_layer_indices", int) or c.read_list("full_attn_idxs", int)
    if full or c.has_field("attn_layer_indices"):
        return ["full" if index in full else "recurrent" for index in range(count)]
    if mixer := c.read_text_field("mixer"):
        return [mixer] * count
    if cycle := c.read_int("full_attention_interval", 0, minimum=0):
        return ["full" if (index + 1) % cycle == 0 else "recurrent" for index in range(count)]
    return _classify_windows(c, count)


def look_up_layer_types(
    c: ConfigReader, field: str, names: list[str], has_single_blocks: bool
) -> list[LayerKind]:
    """Return the kind of each named layer; of a single block the feed-forward block too."""
    if unknown := [name for name in names if name not in _LAYER_TYPES]:
        raise c.make_field_error(field, f"entries among {', '.join(_LAYER_TYPES)}", unknown[0])
    kinds = [_LAYER_TYPES[name] for name in names]
    return [replace(kind, ffn=kind.ffn or "none" * has_single_blocks) for kind in kinds]


def _classify_windows(c: ConfigReader, count: int) -> list[str]:
    """Return the mixers of a model of attention layers only: full, or limited to a window."""
    if c.get_or_default("attention_chunk_size") is not None and (
        cycle := c.read_int("layer_cycle", 0, minimum=0)
    ):
        has_rope = c.read_list("no_rope_layers", int) or [
            (index + 1) % cycle for index in range(count)
        ]
        return ["chunked" if rotary else "full" for rotary in has_rope[:count]]
    if c.get_or_default("sliding_window") is None or (
        c.read_bool("sliding_off") and not c.read_bool("use_sliding_window")
    ):
        return ["full"] * count
    if c.read_bool("sliding_off"):
        first = c.read_int("max_window_layers", 0, minimum=0)
        return ["sliding" if index >= first else "full" for index in range(count)]
    pattern = c.get_or_default("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        if set(pattern) - {"L", "G"}:
            raise c.make_field_error(
                "sliding_window_pattern",
                "a number, or L for local and G for global layers",
                pattern,
            )
        letters = itertools.islice(itertools.cycle(pattern), count)
        return ["full" if letter == "G" else "sliding" for letter in letters]
    cycle = c.read_int("sliding_window_pattern", c.read_int("layer_cycle", 0, minimum=0), minimum=0)
    return ["full" if cycle and (index + 1) % cycle == 0 else "sliding" for index in range(count)]


def _classify_feed_forwards(c: ConfigReader, count: int) -> list[str]:
    """Return the feed-forward block of every layer: dense, moe, or one of the family's own."""
    if ffn := c.read_text_field("ffn"):
        return [ffn] * count
    if not c.read_int(
        "num_experts", None, minimum=int("num_experts" in c.traits.get("needs", ())), maximum=2**16
    ):
        return ["dense"] * count
    if kinds := c.read_list("mlp_layer_types", str, count):
        return ["dense" if kind == "dense" else "moe" for kind in kinds]
    frequency = c.get_or_default("moe_layer_freq", 1)
    if isinstance(frequency, list):
        return ["moe" if kind else "dense" for kind in c.read_list("moe_layer_freq", int, count)]
    if (moe_layers := c.read_list("moe_layers", int)) or c.has_field("moe_layers"):
        return ["moe" if index in moe_layers else "dense" for index in range(count)]
    first_fields = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    first = max(c.read_int(name, 0, minimum=0) for name in first_fields)
    last = c.read_int("moe_layer_end_index", count - 1, minimum=-1)
    last = count - 1 if last == -1 else last
    step = c.read_int(
        "decoder_sparse_step",
        c.read_int("moe_layer_interval", c.read_int("interleave_moe_layer_step", 1)),
    )
    period = c.read_int("expert_layer_period", c.read_int("moe_layer_freq", 1))
    offset = c.read_int("expert_layer_offset", 0, 0)
    dense = c.read_list("mlp_only_layers", int)
    routed = [
        first <= index <= last
        and (index + 1) % step == 0
        and (index - offset) % period == 0
        and index not in dense
        for index in range(count)
    ]
    return ["moe" if is_moe else "dense" for is_moe in routed]


def _add_own_fields(c: ConfigReader, kind: LayerKind, index: int, count: int) -> LayerKind:
    """Add the facts and fields in which layer `index` differs from the whole configuration."""
    mixer, fields, facts = kind.mixer, dict[str, Any](), dict[str, Any]()
    for name in _PER_LAYER_FIELDS:
        for key in (name, f"{name}_per_layer"):
            if isinstance(c.get_explicit(key), list) and (values := c.read_list(key, int, count)):
                fields[name] = values[index]
    if mixer == "sliding":
        for name in _SLIDING_WINDOW_FIELDS:
            if c.has_field(f"swa_{name}"):
                fields[name] = c.read_int(f"swa_{name}")
        facts["has_sinks"] = c.read_bool("add_swa_attention_sink_bias")
        other = c.get_nested("attention_other_setting") or {}
        fields |= {key: value for key, value in other.items() if "num" in key}
    if mixer == "full" and c.get_or_default("global_head_dim") is not None:
        fields["head_dim"] = c.read_int("global_head_dim")
        if c.read_bool("attention_k_eq_v"):
            facts["key_is_value"] = True
            fields["num_key_value_heads"] = c.read_int(
                "num_global_key_value_heads", c.read_int("num_key_value_heads")
            )
    if index >= count - c.read_int("num_kv_shared_layers", 0, minimum=0):
        facts["stores_kv"] = False
        if c.read_bool("use_double_wide_mlp"):
            fields["intermediate_size"] = 2 * c.read_int("intermediate_size")
    if c.get_or_default("index_n_heads") is not None and mixer == "full":
        indexers = c.read_list("indexer_types", str, count)
        facts["indexer"] = indexers[index] if indexers else "full"
    sparse = c.read_nested("sparse_attention_config")
    flags = sparse.read_list("sparse_attention_freq", int, count) if mixer == "full" else []
    facts["selects_blocks"] = bool(flags and flags[index])
    fields |= c.read_nested("per_layer_config").get_nested(str(index)) or {}
    if configs := c.read_list("block_configs", Mapping, count):  # type: ignore[type-abstract]
        chosen, own = _read_searched_block(c, configs[index], f"block_configs[{index}]")
        facts, fields = facts | chosen, fields | own
    return replace(kind, **facts, fields=tuple(fields.items()))


def _read_searched_block(
    c: ConfigReader, block: Mapping[str, Any], location: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the facts and fields that an architecture search chose (Nemotron-NAS, DeciLM)."""
    reader = ConfigReader(block, {}, f"{c.location}, {location}")
    attention, ffn = reader.read_nested("attention"), reader.read_nested("ffn")
    if attention.read_bool("replace_with_linear") or ffn.read_bool("replace_with_linear"):
        raise PlannerError(
            f"{c.location}, {location}: replace_with_linear is not planned for; attention or no_op"
            " would be"
        )
    facts, fields = dict[str, Any](), dict[str, Any]()
    if attention.read_bool("no_op"):
        facts["mixer"] = "none"
    else:
        fields["num_key_value_heads"] = c.read_int("num_attention_heads") // attention.read_int(
            "n_heads_in_group"
        )
    if ffn.read_bool("no_op"):
        facts["ffn"] = "none"
    else:
        multiple = ffn.get_or_default("ffn_mult")
        if not isinstance(multiple, int | float) or not 0 < multiple < 100:
            raise ffn.make_field_error("ffn_mult", "a number between 0 and 100", multiple)
        fields["intermediate_size"] = (
            -(-int(2 * multiple * c.read_int("hidden_size") / 3) // 256) * 256
        )
    return facts, fields
