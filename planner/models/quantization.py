"""Weight formats of checkpoints: which matrices are quantized, and their bytes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
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
        names = {strip_wrapper_prefix(pattern) for pattern in self.ignore if is_plain_name(pattern)}
        others = [
            convert_to_regex(pattern) for pattern in self.ignore if not is_plain_name(pattern)
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


def strip_wrapper_prefix(pattern: str) -> str:
    """Strip wrappers of the decoder from a module name or glob, and translate it to our names."""
    bare = re.sub(r"^(model\.|language_model\.|backbone\.|\*\.)+", "", pattern).rstrip(".")
    for theirs, ours in QUANTIZATION_CATALOG["modules"].items():
        bare = re.sub(theirs, ours, bare)
    return bare


def convert_to_regex(pattern: str) -> str:
    """Convert a module name, a glob or a `re:` expression to an expression for `search`."""
    if pattern.startswith("re:"):
        return f"(?:{strip_search_anchors(pattern[3:])})"
    bare = (
        re.escape(strip_wrapper_prefix(pattern))
        .replace(r"\*", ".*")
        .replace("mixer", "(?:mixer|self_attn|mlp)")
    )
    return rf"(?:(?:^|\.){bare}(?:$|\.))"


def is_plain_name(pattern: str) -> bool:
    """Return whether a pattern is a plain module name."""
    return not re.search(r"[*:]|mixer", pattern)


def strip_search_anchors(expression: str) -> str:
    """Strip `.*` from both ends of an expression, where a search does not need it."""
    return re.sub(r"^\^?(\.\*\??)+|(?<!\\)(\.\*)+\$?$", "", expression)


class WeightFormatEntry(SourcedEntry):
    """One entry of `catalogs/formats.yaml`: a weight format with its published quality loss."""

    title: str
    checkpoint: str
    quality: str


def load_weight_formats() -> dict[str, WeightFormatEntry]:
    """Load the weight formats with what each is known to cost in quality."""
    return load_catalog("formats.yaml", WeightFormatEntry)
