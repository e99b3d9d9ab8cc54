"""From the `quantization_config` of a checkpoint to the formats of its modules."""

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from planner.core.errors import PlannerError, make_unknown_name_error
from planner.models.quantization import (
    ROUTED_EXPERTS_PATTERN,
    UNQUANTIZED,
    WEIGHT_FORMATS,
    CheckpointQuantization,
    WeightFormat,
    convert_to_regex,
    is_plain_name,
    strip_search_anchors,
    strip_wrapper_prefix,
)

_IGNORE_FIELD_NAMES = (
    "ignore",
    "ignored_layers",
    "modules_to_not_convert",
    "exclude_modules",
    "llm_int8_skip_modules",
)


def parse_quantization_config(
    config: Mapping[str, Any], location: str = "config.json"
) -> CheckpointQuantization:
    """Parse a `quantization_config`, or ModelOpt's `hf_quant_config.json` in its place."""
    text = config.get("text_config")
    section = config.get("quantization_config") or config.get("compression_config")
    if not section and isinstance(text, Mapping):
        section = text.get("quantization_config")
    if not section:
        return UNQUANTIZED
    if not isinstance(section, Mapping):
        raise PlannerError(
            f"{location}, field quantization_config: expected a mapping, got {section!r:.60}"
        )
    nested = section.get("quantization")
    q: Mapping[str, Any] = nested if isinstance(nested, Mapping) else section
    ignored: list[str] = []
    for key in _IGNORE_FIELD_NAMES:
        if (names := q.get(key)) is None:
            continue
        if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
            raise PlannerError(
                f"{location}, quantization_config.{key}: expected a list of names, got"
                f" {names!r:.50}"
            )
        ignored += names
    overrides = _read_overrides(q, location)
    ignored += [name for name, fields in overrides if fields["bits"] >= 16]
    groups, layers = q.get("config_groups"), q.get("quantized_layers")
    searched = [pattern for pattern in ignored if not is_plain_name(pattern)]
    if (
        isinstance(layers, Mapping)
        and str(q.get("quant_algo")).upper() == "MIXED_PRECISION"
        and not groups
    ):
        formats = _parse_per_layer_formats(
            layers, f"{location}, quantization_config.quantized_layers"
        )
        method, head = formats[0][1].method, any("lm_head" in pattern for pattern, _ in formats)
        searched += {strip_wrapper_prefix(name) for name in layers}
    elif isinstance(groups, Mapping) and groups:
        prefix = f"{location}, quantization_config.config_groups"
        formats = tuple(
            _parse_format_group(group, f"{prefix}.{name}") for name, group in groups.items()
        )
        searched += [target for group in groups.values() for target in group.get("targets") or ()]
        method = min(formats, key=lambda part: part[1].bits)[1].method
        head = any("lm_head" in pattern for pattern, _ in formats)
    else:
        scheme = _parse_uniform_format(q, location)
        method, head = scheme.method, bool(q.get("lm_head"))
        main = ROUTED_EXPERTS_PATTERN if method == "mxfp4" else ""
        if names := _list_quantized_modules(q):
            main = _join_patterns(names)
        others = [(name, fields) for name, fields in overrides if fields["bits"] < 16]
        searched += [name for name, _ in others]
        formats = (
            *(
                (convert_to_regex(name), _parse_uniform_format({**q, **fields}, location))
                for name, fields in others
            ),
            (main, scheme),
        )
        # DeepSeek-V4: the experts are MXFP4 whatever quant_method says
        if config.get("expert_dtype") == "fp4":
            formats = ((ROUTED_EXPERTS_PATTERN, WEIGHT_FORMATS["mxfp4"]), *formats)
    _check_expressions(searched, location)
    return CheckpointQuantization(
        method,
        formats,
        (*ignored, *([] if head else ["lm_head"])),
        "fp8" if _has_fp8_kv_scales(q) else None,
    )


def _read_overrides(q: Mapping[str, Any], location: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Read what GPTQModel's `dynamic` or AutoRound's `extra_config` changes of modules; 16 bits: nothing packed.

    GPTQModel's expressions begin with `-:` for modules that are left alone, or with `+:`.
    """
    overrides: list[tuple[str, Mapping[str, Any]]] = []
    for key in ("dynamic", "extra_config"):
        rules = q.get(key) or {}
        if not isinstance(rules, Mapping):
            raise PlannerError(
                f"{location}, quantization_config.{key}: expected a mapping, got {rules!r:.60}"
            )
        for name, fields in rules.items():
            given = fields if isinstance(fields, Mapping) else {}
            bits = 16 if str(name).startswith("-:") else given.get("bits", q.get("bits", 4))
            bare = re.sub(r"^[-+]:", "", str(name))
            is_expression = key == "dynamic" or re.search(r"[*+\\\[(|]", bare)
            if isinstance(bits, int):
                overrides.append((f"re:{bare}" if is_expression else bare, {**given, "bits": bits}))
    return overrides


def _list_quantized_modules(q: Mapping[str, Any]) -> list[str]:
    """List the modules of a block that are quantized; empty means all (Transformers' GPTQConfig)."""
    blocks = q.get("modules_in_block_to_quantize")
    names = [name for names in blocks for name in names] if isinstance(blocks, list) else []
    return [re.sub(r"\.\d+(?=\.)", "", name) for name in names if isinstance(name, str)]


def _has_fp8_kv_scales(q: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint has FP8 scales of the KV cache, so that "auto" means FP8."""
    scheme = q.get("kv_cache_scheme")
    bits = scheme.get("num_bits") if isinstance(scheme, Mapping) else None
    return bits == 8 or "FP8" in (str(scheme).upper(), str(q.get("kv_cache_quant_algo")).upper())


_MODELOPT_FORMATS = {
    "fp8": WEIGHT_FORMATS["fp8"], "fp8_pb_wo": WEIGHT_FORMATS["fp8_block"],
    "mxfp8": WEIGHT_FORMATS["mxfp8"], "nvfp4": WEIGHT_FORMATS["nvfp4"],
    "w4a16_nvfp4": replace(WEIGHT_FORMATS["nvfp4"], activation="bf16"),
}  # fmt: skip
"""Formats by ModelOpt's names."""


def _parse_per_layer_formats(
    layers: Mapping[str, Any], location: str
) -> tuple[tuple[str, WeightFormat], ...]:
    """Parse a configuration with one format per layer; the narrowest format comes first."""
    modules: dict[str, dict[str, None]] = {}
    for name, layer in layers.items():
        algorithm = str(layer.get("quant_algo") if isinstance(layer, Mapping) else layer).lower()
        if algorithm not in _MODELOPT_FORMATS:
            raise PlannerError(
                f"{location}.{name}:"
                f" {make_unknown_name_error(algorithm, _MODELOPT_FORMATS, 'quant_algo')}"
            )
        modules.setdefault(algorithm, {})[strip_wrapper_prefix(name)] = None
    if not modules:
        raise PlannerError(f"{location}: expected the layers and their formats, got none")
    formats = (
        (_join_patterns(list(names)), _MODELOPT_FORMATS[algorithm])
        for algorithm, names in modules.items()
    )
    return tuple(sorted(formats, key=lambda part: part[1].bits))


def _parse_uniform_format(q: Mapping[str, Any], location: str) -> WeightFormat:
    """Parse the format of a checkpoint that has only one."""
    method = str(q.get("quant_method") or q.get("quant_algo") or "").lower()
    algo = str(q.get("quant_algo") or "").lower()
    block = q.get("weight_block_size")
    sizes = (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
    )
    if block is not None and not sizes:
        raise PlannerError(
            f"{location}, quantization_config.weight_block_size: expected two sizes, got"
            f" {block!r:.40}"
        )
    if method in ("fp8", "modelopt", "fbgemm_fp8", "deepseek_v4_fp8") and algo in ("", "fp8"):
        if block is not None:
            return WeightFormat("fp8_block", 8, "fp8", (block[0], block[1]))
        return WEIGHT_FORMATS["fp8_channel" if method == "fbgemm_fp8" else "fp8"]
    if algo in _MODELOPT_FORMATS or method in ("nvfp4", "mxfp8"):
        return _MODELOPT_FORMATS[algo if algo in _MODELOPT_FORMATS else method]
    if method in ("awq", "gptq", "auto-round", "auto_gptq"):
        bits, group = (
            q.get("bits", q.get("w_bit", 4)),
            q.get("group_size", q.get("q_group_size", 128)),
        )
        if bits not in (2, 3, 4, 8) or not isinstance(group, int):
            raise PlannerError(
                f"{location}, field quantization_config.bits: expected 2, 3, 4 or 8, got"
                f" {bits!r:.40}"
            )
        awq = method == "awq"
        return WeightFormat(
            "awq" if awq else "gptq", bits, "bf16", (1, max(group, 0)), 2, bits, 0 if awq else 4
        )
    if method == "bitsandbytes":
        return WEIGHT_FORMATS["bitsandbytes" if q.get("load_in_4bit", True) else "int8"]
    if method in WEIGHT_FORMATS:
        return WEIGHT_FORMATS[method]
    raise PlannerError(
        f"{location}, field quantization_config.quant_method:"
        f" {make_unknown_name_error(method, WEIGHT_FORMATS, 'method')}"
    )


def _parse_format_group(group: Any, location: str) -> tuple[str, WeightFormat]:
    """Parse one group of a compressed-tensors or ModelOpt configuration to (modules, format)."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise PlannerError(
            f"{location}: expected a mapping with the field weights, got {group!r:.60}"
        )
    bits, floating = weights.get("num_bits", 8), weights.get("type", "int") == "float"
    size, inputs = weights.get("group_size"), group.get("input_activations")
    strategy = str(weights.get("strategy") or ("group" if size else "tensor"))
    if bits not in (4, 8) or not (size is None or isinstance(size, int)):
        raise PlannerError(f"{location}, field weights.num_bits: expected 4 or 8, got {bits!r:.40}")
    if floating and bits == 4:
        scheme = WEIGHT_FORMATS["nvfp4" if size == 16 else "mxfp4"]
        if not inputs:
            scheme = WeightFormat(scheme.method, 4, "bf16", scheme.group, scheme.scale_bytes)
    elif bits == 8 and (floating or inputs):
        activation = ("fp8" if floating else "int8") if inputs else "bf16"
        shape = {"channel": (1, 0), "block": (128, 128), "group": (1, size or 0)}.get(
            strategy, (0, 0)
        )
        scheme = WeightFormat("fp8" if floating else "int8", 8, activation, shape, 4)
    else:
        symmetric = weights.get("symmetric", True)
        scheme = WeightFormat(
            "compressed-tensors", bits, "bf16", (1, max(size or 0, 0)), 2, 0 if symmetric else bits
        )
    targets = group.get("targets")
    if targets is None:  # all modules, as in ModelOpt's own groups
        return "", scheme
    if not isinstance(targets, list) or not all(isinstance(item, str) for item in targets):
        raise PlannerError(
            f"{location}, field targets: expected a list of names, got {targets!r:.60}"
        )
    return ("" if "Linear" in targets else _join_patterns(targets)), scheme


def _join_patterns(patterns: list[str]) -> str:
    """Join module names, globs and `re:` expressions to one regular expression."""
    return "|".join(dict.fromkeys(map(convert_to_regex, patterns)))


def _check_expressions(patterns: Iterable[str], location: str) -> None:
    """Refuse expressions that are none, or whose search in every module path may take minutes.

    Each repetition multiplies the steps of a search by the letters of a path, about 60.
    """
    bare = [strip_search_anchors(pattern.removeprefix("re:")) for pattern in patterns]
    steps = sum(60.0 ** len(re.findall(r"(?<!\()[*+{?]", expression)) for expression in bare)
    if steps > 2e6 or any(
        len(e) > 1000 or re.search(r"\)[*+{]|\\[1-9]|\(\?(P=|\()", e) for e in bare
    ):
        raise PlannerError(
            f"{location}, field quantization_config: its expressions of module names may take"
            " hours; accepted are names, and a few of `.*`, `+` and `?`"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(_join_patterns(list(patterns)))
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise PlannerError(
            f"{location}, field quantization_config: an expression is none: {error}"
        ) from None
