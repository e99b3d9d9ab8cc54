"""The kind of each layer in a `config.json`: its mixer, its feed-forward block, its own fields."""

import itertools
from collections.abc import Mapping
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
_LAYER_TYPE_NAMES: Mapping[str, str] = CONFIG_FIELD_CATALOG["layers"]
"""Names of layers in configurations -> mixer, and feed-forward block if implied."""
FieldOverrides = tuple[tuple[str, Any], ...]
"""(field, value) of one layer that differ from those of the whole configuration."""
LayerKind = tuple[str, str, FieldOverrides]
"""Mixer, feed-forward block and overridden fields of a layer."""


def classify_layers(c: ConfigReader) -> list[LayerKind]:
    """Classify every layer.

    Mixers are full, sliding, chunked, recurrent, both, compressed and none; feed-forward blocks
    dense, moe and none.
    """
    pattern = c.read_list("hybrid_override_pattern", str) or c.read_list("layers_block_type", str)
    count = c.read_int("num_hidden_layers", maximum=MAX_LAYERS) if not pattern else len(pattern)
    mixers, ffns = _classify_mixers(c, count, pattern), _classify_feed_forwards(c, count)
    kinds = []
    for index, mixer in enumerate(mixers):
        name, *more = mixer.split()
        ffn = more[0] if more and name != "compressed" else ffns[index]
        overrides = _collect_layer_overrides(c, index, count, mixer)
        for key, value in overrides.items():
            if isinstance(value, dict | list):
                raise PlannerError(
                    f"{c.location}, field {key} of layer {index}: expected one value, got"
                    f" {value!r:.50}"
                )
        kinds.append(
            (overrides.pop("mixer", name), overrides.pop("ffn", ffn), tuple(overrides.items()))
        )
    return kinds


def _classify_mixers(c: ConfigReader, count: int, pattern: list[str]) -> list[str]:
    """Return the mixer of every layer, some with the feed-forward block that they imply."""
    for field, names in (
        ("layer_types", c.read_list("layer_types", str, count)),
        ("layers_block_type", pattern),
    ):
        if names:
            return look_up_layer_types(c, field, names, c.read_bool("single_blocks"))
    if c.get_nested("linear_attn_config"):
        recurrent = set(c.read_nested("linear_attn_config").read_list("kda_layers", int))
        return ["recurrent" if index + 1 in recurrent else "full" for index in range(count)]
    if kinds := c.read_list("hybrid_layer_pattern", int, count):
        return ["sliding" if kind else "full" for kind in kinds]
    if kinds := c.read_list("attn_type_list", int, count):
        return ["full" if kind else "recurrent" for kind in kinds]
    if ratios := c.read_list("compress_ratios", int, count):
        return [f"compressed {int(ratio)}" for ratio in ratios]
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
) -> list[str]:
    """Return the mixer of each named layer; of a single block the feed-forward block too."""
    if unknown := [name for name in names if name not in _LAYER_TYPE_NAMES]:
        raise c.make_field_error(field, f"entries among {', '.join(_LAYER_TYPE_NAMES)}", unknown[0])
    layers = (_LAYER_TYPE_NAMES[name] for name in names)
    return [
        f"{layer} none" if has_single_blocks and " " not in layer else layer for layer in layers
    ]


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


def _collect_layer_overrides(c: ConfigReader, index: int, count: int, mixer: str) -> dict[str, Any]:
    """Collect the fields in which layer `index` differs from the whole configuration."""
    overrides: dict[str, Any] = {}
    for name in _PER_LAYER_FIELDS:
        for key in (name, f"{name}_per_layer"):
            if isinstance(c.get_explicit(key), list) and (values := c.read_list(key, int, count)):
                overrides[name] = values[index]
    if mixer == "sliding":
        for name in _SLIDING_WINDOW_FIELDS:
            if c.has_field(f"swa_{name}"):
                overrides[name] = c.read_int(f"swa_{name}")
        if c.read_bool("add_swa_attention_sink_bias"):
            overrides["sinks"] = True
        other = c.get_nested("attention_other_setting") or {}
        overrides |= {key: value for key, value in other.items() if "num" in key}
    if mixer == "full" and c.get_or_default("global_head_dim") is not None:
        overrides["head_dim"] = c.read_int("global_head_dim")
        if c.read_bool("attention_k_eq_v"):
            overrides["key_is_value"] = True
            overrides["num_key_value_heads"] = c.read_int(
                "num_global_key_value_heads", c.read_int("num_key_value_heads")
            )
    if index >= count - c.read_int("num_kv_shared_layers", 0, minimum=0):
        overrides["stores_kv"] = False
        if c.read_bool("use_double_wide_mlp"):
            overrides["intermediate_size"] = 2 * c.read_int("intermediate_size")
    if c.get_or_default("index_n_heads") is not None and mixer == "full":
        kinds = c.read_list("indexer_types", str, count)
        overrides["indexer"] = kinds[index] if kinds else "full"
    sparse = c.read_nested("sparse_attention_config")
    flags = sparse.read_list("sparse_attention_freq", int, count) if mixer == "full" else []
    if flags and flags[index]:
        for name in ("num_index_heads", "index_dim", "topk_blocks", "block_size"):
            overrides[name] = sparse.read_int(f"sparse_{name}")
    overrides |= c.read_nested("per_layer_config").get_nested(str(index)) or {}
    if mixer.startswith("compressed"):
        overrides["compress_ratio"] = int(mixer.split()[1])
    if configs := c.read_list("block_configs", Mapping, count):  # type: ignore[type-abstract]
        overrides |= _collect_nas_overrides(c, configs[index], f"block_configs[{index}]")
    return overrides


def _collect_nas_overrides(
    c: ConfigReader, block: Mapping[str, Any], location: str
) -> dict[str, Any]:
    """Collect fields that an architecture search chose for a layer (Nemotron-NAS, DeciLM)."""
    fields = ConfigReader(block, {}, f"{c.location}, {location}")
    attention, ffn = fields.read_nested("attention"), fields.read_nested("ffn")
    if attention.read_bool("replace_with_linear") or ffn.read_bool("replace_with_linear"):
        raise PlannerError(
            f"{c.location}, {location}: replace_with_linear is not planned for; attention or no_op"
            " would be"
        )
    overrides: dict[str, Any] = {"norms": 2 - attention.read_bool("no_op") - ffn.read_bool("no_op")}
    if attention.read_bool("no_op"):
        overrides["mixer"] = "none"
    else:
        overrides["num_key_value_heads"] = c.read_int("num_attention_heads") // attention.read_int(
            "n_heads_in_group"
        )
    if ffn.read_bool("no_op"):
        overrides["ffn"] = "none"
    else:
        multiple = ffn.get_or_default("ffn_mult")
        if not isinstance(multiple, int | float) or not 0 < multiple < 100:
            raise ffn.make_field_error("ffn_mult", "a number between 0 and 100", multiple)
        overrides["intermediate_size"] = (
            -(-int(2 * multiple * c.read_int("hidden_size") / 3) // 256) * 256
        )
    return overrides
