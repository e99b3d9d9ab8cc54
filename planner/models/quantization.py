"""Weight formats of checkpoints: which matrices are quantized, and their bytes."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, comb, inf, prod
from typing import Any

from planner.core.catalog import CATALOG_DIR, SourcedEntry, load_catalog
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.readers import read_yaml_sections
from planner.models.architecture import WeightTensor


@dataclass(frozen=True)
class WeightFormat:
    """A storage format: bits per element, with scale and zero point per (rows, columns) group."""

    method: str
    bits: float
    activation: str = "bf16"  # dtype of the matrix product: bf16 fp8 int8 fp4
    group: tuple[int, int] = (0, 0)  # 0: the whole dimension
    scale_bytes: float = 4
    zero_bits: float = 0
    column_bytes: float = 0  # per input: GPTQ's g_idx
    split_groups: bool = False  # a split matrix may leave parts of groups

    def compute_matrix_bytes(self, rows: int, cols: int) -> float:
        """Compute the bytes of a `rows` x `cols` matrix with its scales."""
        groups = ceil(rows / (self.group[0] or rows)) * ceil(cols / (self.group[1] or cols))
        return (
            rows * cols * self.bits / 8
            + groups * (self.scale_bytes + self.zero_bits / 8)
            + cols * self.column_bytes
        )


QUANTIZATION_CATALOG: Mapping[str, Mapping[str, Any]] = read_yaml_sections(
    CATALOG_DIR / "quantization.yaml", "schemes", "spellings", "containers", "in_names", "modules"
)


def _build_weight_format(name: str, fields: Mapping[str, Any]) -> WeightFormat:
    try:
        return WeightFormat(**{**fields, "group": tuple(fields.get("group", (0, 0)))})
    except (TypeError, AttributeError) as error:
        accepted = ", ".join(WeightFormat.__dataclass_fields__)
        raise PlannerError(
            f"quantization.yaml, section schemes, entry {name}: expected fields of {accepted}"
            f" ({error})"
        ) from None


WEIGHT_FORMATS = {
    name: _build_weight_format(name, fields)
    for name, fields in QUANTIZATION_CATALOG["schemes"].items()
}
"""Formats by the names that users may give."""
_FORMAT_SPELLINGS = QUANTIZATION_CATALOG["spellings"]
_CONTAINER_FORMATS = QUANTIZATION_CATALOG["containers"]


@dataclass(frozen=True)
class CheckpointQuantization:
    """Formats of a checkpoint: the first pattern that matches a module holds, except `ignore`."""

    method: str
    schemes: tuple[tuple[str, WeightFormat], ...] = ()  # (expression of module paths, format)
    ignore: tuple[str, ...] = ()  # names, globs, `re:` expressions of unquantized modules
    kv_cache_dtype: str | None = None  # the meaning of "auto" for this checkpoint
    steps: float = 0.0  # limit for matching all expressions against one module path

    @property
    def main_format(self) -> WeightFormat | None:
        """The narrowest format, which most weights have; None if nothing is quantized."""
        return min(
            (scheme for _, scheme in self.schemes), key=lambda scheme: scheme.bits, default=None
        )

    @property
    def weight_bits(self) -> float:
        """Bits per element of the quantized matrices; 16 if there are none."""
        return self.main_format.bits if self.main_format else 16

    @property
    def activation(self) -> str:
        """Dtype of quantized matrix products: bf16, fp8, int8 or fp4."""
        return self.main_format.activation if self.main_format else "bf16"

    @cached_property
    def _compiled_patterns(
        self,
    ) -> tuple[frozenset[str], re.Pattern[str], list[tuple[re.Pattern[str], WeightFormat]]]:
        """Names to ignore, the expression of other ignored modules, and (pattern, format) pairs."""
        names = {
            _strip_wrapper_prefix(pattern) for pattern in self.ignore if _is_plain_name(pattern)
        }
        others = [
            _convert_to_regex(pattern) for pattern in self.ignore if not _is_plain_name(pattern)
        ]
        formats = [(re.compile(pattern), scheme) for pattern, scheme in self.schemes]
        return frozenset(names), re.compile("|".join(others) or r"(?!)"), formats

    @cached_property
    def _format_cache(self) -> dict[str, WeightFormat | None]:
        return {}

    def get_weight_format(self, weight: WeightTensor, prefix: str = "") -> WeightFormat | None:
        """Get the format of a weight in the module `prefix` ("layers.3."); None: unquantized."""
        if not weight.linear or not self.schemes:
            return None
        # `_groups`: part of Mamba-2's in_proj, which is split in two
        path = (prefix + weight.name).removesuffix("_groups")
        if path not in self._format_cache:
            names, others, formats = self._compiled_patterns
            parts = path.split(".")
            spans = (
                ".".join(parts[i:j])
                for i in range(len(parts))
                for j in range(i + 1, len(parts) + 1)
            )
            ignored = any(span in names for span in spans) or others.search(path)
            chosen = (scheme for pattern, scheme in formats if pattern.search(path))
            self._format_cache[path] = None if ignored else next(chosen, None)
        return self._format_cache[path]


_IGNORE_FIELD_NAMES = (
    "ignore",
    "ignored_layers",
    "modules_to_not_convert",
    "exclude_modules",
    "llm_int8_skip_modules",
)
ROUTED_EXPERTS_PATTERN = r"(?:^|\.)experts\."
"""The routed experts of any block."""
UNQUANTIZED = CheckpointQuantization("none")


def _parse_format_name(name: str) -> tuple[list[str], str]:
    """Return the words of a name that mean a format, and the format or container that they mean."""
    words = re.findall(r"[\w.]+", re.sub(r"[-/]", "_", name.casefold()))
    known = [word for word in words if word in WEIGHT_FORMATS or word in _FORMAT_SPELLINGS]
    if not known:
        raise make_unknown_name_error(name, (*WEIGHT_FORMATS, *_FORMAT_SPELLINGS), "quantization")
    keys = (_FORMAT_SPELLINGS.get(word, word) for word in known)
    return known, max(keys, key=lambda key: key not in _CONTAINER_FORMATS)


def parse_quantization(
    name: str, targets: tuple[tuple[str, str], ...] = ()
) -> CheckpointQuantization:
    """Parse the name of a quantization, by default of all linear layers but the head.

    `targets` are (expression of modules, format) instead. A container ("compressed-tensors",
    "modelopt") means the format of most of its checkpoints.
    """
    words, key = _parse_format_name(name)
    key = _CONTAINER_FORMATS.get(key, key)
    if key in ("none", "auto"):
        return UNQUANTIZED
    if "nvfp4" in words and "fp8" in words:
        targets = ((r"mlp\.", "nvfp4"), ("", "fp8"))
    targets = targets or ((ROUTED_EXPERTS_PATTERN if key == "mxfp4" else "", key),)
    keeps_mtp = WEIGHT_FORMATS[key].bits < 6 and key != "mxfp4"
    return CheckpointQuantization(
        WEIGHT_FORMATS[key].method,
        tuple((modules, WEIGHT_FORMATS[format_name]) for modules, format_name in targets),
        ("lm_head", "mtp*") if keeps_mtp else ("lm_head",),
    )


def is_container_name(name: str) -> bool:
    """Return whether a name means the tool that wrote a checkpoint instead of a format."""
    return _parse_format_name(name)[1] in _CONTAINER_FORMATS


def matches_stored_format(name: str, stored: CheckpointQuantization) -> bool:
    """Return whether an engine that is started with `name` loads a checkpoint stored like this.

    FP8 matches any FP8 whatever its scales span, int4 any 4-bit integer format, fp4 any 4-bit
    floating-point format.
    """
    words, key = _parse_format_name(name)
    if key == "auto" or not stored.schemes:
        return key in ("auto", "none")
    if key in _CONTAINER_FORMATS or key == "none":
        return key != "none" and not (
            key == "compressed_tensors" and stored.method in ("gptq", "awq")
        )
    if "nvfp4" in words and "fp8" in words:
        return {"nvfp4", "fp8"} <= {scheme.method for _, scheme in stored.schemes}
    methods = {scheme.method for _, scheme in stored.schemes if scheme.bits == stored.weight_bits}
    methods.add(stored.method)
    if stored.weight_bits == 4 and (
        (key == "int4" and methods & {"awq", "gptq"})
        or (key == "nvfp4" and "fp4" in words and "mxfp4" in methods)
    ):
        return True
    method = WEIGHT_FORMATS[key].method.removesuffix("_block")
    return method in {stored_method.removesuffix("_block") for stored_method in methods}


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
    searched = [pattern for pattern in ignored if not _is_plain_name(pattern)]
    if (
        isinstance(layers, Mapping)
        and str(q.get("quant_algo")).upper() == "MIXED_PRECISION"
        and not groups
    ):
        formats = _parse_per_layer_formats(
            layers, f"{location}, quantization_config.quantized_layers"
        )
        method, head = formats[0][1].method, any("lm_head" in pattern for pattern, _ in formats)
        searched += {_strip_wrapper_prefix(name) for name in layers}
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
                (_convert_to_regex(name), _parse_uniform_format({**q, **fields}, location))
                for name, fields in others
            ),
            (main, scheme),
        )
        # DeepSeek-V4: the experts are MXFP4 whatever quant_method says
        if config.get("expert_dtype") == "fp4":
            formats = ((ROUTED_EXPERTS_PATTERN, WEIGHT_FORMATS["mxfp4"]), *formats)
    return CheckpointQuantization(
        method,
        formats,
        (*ignored, *([] if head else ["lm_head"])),
        "fp8" if _has_fp8_kv_scales(q) else None,
        sum(map(_estimate_regex_steps, searched)),
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
        modules.setdefault(algorithm, {})[_strip_wrapper_prefix(name)] = None
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
    return "|".join(dict.fromkeys(map(_convert_to_regex, patterns)))


def _strip_wrapper_prefix(pattern: str) -> str:
    """Strip wrappers of the decoder from a module name or glob, and translate it to our names."""
    bare = re.sub(r"^(model\.|language_model\.|backbone\.|\*\.)+", "", pattern).rstrip(".")
    for theirs, ours in QUANTIZATION_CATALOG["modules"].items():
        bare = re.sub(theirs, ours, bare)
    return bare


def _convert_to_regex(pattern: str) -> str:
    """Convert a module name, a glob or a `re:` expression to an expression for `search`."""
    if pattern.startswith("re:"):
        return f"(?:{_strip_search_anchors(pattern[3:])})"
    bare = (
        re.escape(_strip_wrapper_prefix(pattern))
        .replace(r"\*", ".*")
        .replace("mixer", "(?:mixer|self_attn|mlp)")
    )
    return rf"(?:(?:^|\.){bare}(?:$|\.))"


def _is_plain_name(pattern: str) -> bool:
    """Return whether a pattern is a plain module name."""
    return not re.search(r"[*:]|mixer", pattern)


def _strip_search_anchors(expression: str) -> str:
    """Strip `.*` from both ends of an expression, where a search does not need it."""
    return re.sub(r"^\^?(\.\*\??)+|(?<!\\)(\.\*)+\$?$", "", expression)


_MAX_MODULE_PATH_CHARS = 60
"""Length of the longest module path."""


def _estimate_regex_steps(pattern: str) -> float:
    """Estimate the steps of a search in a module path from the ways to choose the pattern's parts.

    A repetition begins and ends anywhere, a `?` matches or not; repeated groups and references to
    groups have no bound.
    """
    if not pattern.startswith("re:"):
        return comb(_MAX_MODULE_PATH_CHARS + pattern.count("*"), pattern.count("*") + 1)
    expression = _strip_search_anchors(pattern[3:])
    if len(expression) > 1000 or re.search(r"\)[*+{]|\\[1-9]|\(\?(P=|\()", expression):
        return inf
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(_convert_to_regex(pattern))
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise PlannerError(
            f"quantization_config: {pattern!r:.80} is no regular expression: {error}"
        ) from None
    repeats, options = (len(re.findall(mark, expression)) for mark in (r"[*+{]", r"(?<!\()\?"))
    alternatives = prod(1 + part.count("|") for part in re.split(r"[()]", expression))
    return 2.0**options * alternatives * comb(_MAX_MODULE_PATH_CHARS + repeats, repeats + 1)


class WeightFormatEntry(SourcedEntry):
    """One entry of `catalogs/formats.yaml`: a weight format with its published quality loss."""

    title: str
    checkpoint: str
    quality: str


def load_weight_formats() -> dict[str, WeightFormatEntry]:
    """Load the weight formats with what each is known to cost in quality."""
    return load_catalog("formats.yaml", WeightFormatEntry)
