"""Models by name, path or configuration: an architecture, how its weights are stored, and what was assumed."""

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from glob import escape
from os.path import isfile  # False for a name that no file can have
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.errors import PlannerError, make_unknown_name_error, validate_unicode_text
from planner.core.readers import parse_json, read_text
from planner.models import quantization as q
from planner.models.architecture import DecoderLayer, ModelArchitecture
from planner.models.hf_config import parse_hf_config

DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
"""Bytes per element of the dtypes that weights and activations may have."""
MAX_PATTERN_STEPS = 10**8
"""Of all expressions of a checkpoint's quantization on the names of one weight of each layer."""


class ModelEntry(SourcedEntry):
    """One model as people write it; the head of `catalogs/models.yaml` explains every field."""

    base: str | None = None
    aliases: tuple[str, ...] = ()
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)

    def list_names(self, key: str) -> tuple[str, ...]:
        """Every name of the entry called `key`."""
        return (key, *self.aliases, *self.variants)


@dataclass(frozen=True, eq=False)
class Model:
    """A model as an engine would load it."""

    name: str
    architecture: ModelArchitecture
    quantization: q.CheckpointQuantization = q.UNQUANTIZED
    dtype: str = "bfloat16"
    warnings: tuple[str, ...] = ()
    is_inferred: bool = False  # the name alone says what it is and how it is stored

    @cached_property
    def layer_prefixes(self) -> tuple[str, ...]:
        """A module path for every layer, "layers.3."; layers whose weights are stored alike share the first one's."""
        alike: dict[Any, str] = {}
        rows = []
        for index, layer in enumerate(self.architecture.layers):
            prefix = f"layers.{index}."
            formats = tuple(
                self.quantization.get_weight_format(weight, prefix) for weight in layer.weights
            )
            rows.append(alike.setdefault((layer, formats), prefix))
        return tuple(rows)

    @cached_property
    def distinct_layers(self) -> Mapping[tuple[DecoderLayer, str], int]:
        """Layers that differ, or are stored differently, with their place in the checkpoint -> how many there are."""
        return Counter(zip(self.architecture.layers, self.layer_prefixes, strict=True))

    def __str__(self) -> str:
        stored = "" if self.quantization.method == "none" else f", {self.quantization.method}"
        return f"{self.name} ({self.architecture.params_total / 1e9:.2f} B parameters{stored})"


def list_models() -> tuple[str, ...]:
    return tuple(_load_model_catalog()[0])


def list_model_names() -> tuple[str, ...]:
    """Every name that the catalog knows: its models, their aliases and their variants."""
    return tuple(
        name for key, entry in _load_model_catalog()[0].items() for name in entry.list_names(key)
    )


def load_model(
    source: str | Path | Mapping[str, Any],
    *,
    quantization: str | None = None,
    dtype: str | None = None,
) -> Model:
    """The model called `source`, or described by a path to a `config.json` or by its content; it keeps that name,
    its folder's where that is one.

    Names are looked up in the catalog, in the local Hub cache, as a variant of a catalog model,
    then on the Hub. `quantization` says how the engine shall store a checkpoint of 16 bits (FP8 may
    become NVFP4 too); for any other it names the format that the checkpoint has, or leads to a
    published checkpoint that has it, whose name the model then bears. `dtype` overrides what the
    configuration says. Raises `PlannerError`, also for a `quantization` that contradicts the
    checkpoint.
    """
    if isinstance(source, Mapping):
        model = _build_model(
            source,
            validate_unicode_text(
                source.get("_name_or_path") or source.get("model_type") or "config", "model"
            ),
        )
    elif isfile(path := Path(validate_unicode_text(source, "model"))) or isfile(
        path / "config.json"
    ):
        where = path.name if isfile(path) else "config.json"
        model = _build_model(
            _read_config_file(path), str(source).removesuffix("/config.json"), where
        )
    elif str(source).endswith(".json"):
        raise PlannerError(f"model {str(source)!r:.300}: there is no such file")
    elif not str(source).isprintable() or len(str(source)) > 200:
        long = f"model {str(source)!r:.80} is longer than 200 letters"
        raise PlannerError(f"{long}, or has one that cannot be printed; no name is so")
    else:
        model = _look_up_model(str(source))
    if quantization is not None:
        model = _apply_format(quantization, model)
    if not model.quantization.schemes and (said := _split_format_from_name(model.name)[1]) not in (
        None,
        "none",
    ):
        note = (
            f"{model.name} says {said}, and its configuration states no quantization: planned in"
            f" {model.dtype}"
        )
        model = replace(
            model,
            warnings=(*model.warnings, f"{note}; add its hf_quant_config.json, or quantization"),
        )
    if dtype is not None and dtype != "auto":
        if dtype not in DTYPE_BYTES:
            raise make_unknown_name_error(dtype, (*DTYPE_BYTES, "auto"), "dtype")
        model = replace(model, dtype={"half": "float16", "float": "float32"}.get(dtype, dtype))
    return model


@lru_cache(maxsize=256)
def _apply_format(wanted: str, base_model: Model) -> Model:
    """`found` in the format called `wanted`: as it is, converted, or another checkpoint of it; else refused.

    The same for the same, so that what has been worked out of a deployment is known of its like.
    """
    stored = base_model.quantization
    if q.matches_stored_format(wanted, stored):
        return base_model
    converted = _convert_quantization(wanted, base_model)
    if not stored.schemes or (
        base_model.is_inferred and converted.method == stored.method
    ):  # more than the name said
        return replace(base_model, quantization=converted)
    if (
        base_model.is_inferred and q.is_container_name(wanted) and stored.method in ("gptq", "awq")
    ):  # who packed it, the name didn't say
        return replace(base_model, quantization=q.parse_quantization("int4"))
    if (
        stored.method in ("fp8", "fp8_block")
        and stored.weight_bits == 8
        and converted.method == "nvfp4"
    ):
        note = (
            f"{base_model.name} is stored in {stored.method}; planned with all its linear layers"
            f" converted to {wanted}"
        )
        if published := _find_published_checkpoint(wanted, base_model):
            note += f" ({published} keeps some as they were)"
        return replace(base_model, quantization=converted, warnings=(*base_model.warnings, note))
    if published := _find_published_checkpoint(wanted, base_model):
        note = (
            f"{base_model.name} is stored in {stored.method}; planned as {published}, which is what"
            f" {wanted} asks for"
        )
        return replace(_build_catalog_model(published), warnings=(*base_model.warnings, note))
    raise PlannerError(
        f"{base_model.name} is stored in {stored.method}, so quantization {wanted} would be another"
        " checkpoint: name that one, or leave quantization out"
    )


def _convert_quantization(wanted: str, base_model: Model) -> q.CheckpointQuantization:
    """The format called `wanted` on what of `found` it is used for: MXFP4 on the experts, where there are some."""
    quantization = q.parse_quantization(wanted)
    dense = quantization.method == "mxfp4" and not base_model.architecture.is_moe
    return q.parse_quantization(wanted, (("", "mxfp4"),)) if dense else quantization


def _find_published_checkpoint(wanted: str, base_model: Model) -> str | None:
    """The catalog's checkpoint of the same model in the format called `wanted`."""
    bare = _split_format_from_name(base_model.name)[0]
    same = (name for name in list_model_names() if _split_format_from_name(name)[0] == bare)
    return next(
        (
            name
            for name in same
            if q.matches_stored_format(wanted, _build_catalog_model(name).quantization)
        ),
        None,
    )


def _build_model(config: Mapping[str, Any], name: str, location: str = "config.json") -> Model:
    architecture = parse_hf_config(config, location)
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    dtype = (
        config.get("dtype")
        or config.get("torch_dtype")
        or inner.get("dtype")
        or inner.get("torch_dtype")
    )
    dtype = str(dtype or "bfloat16").removeprefix("torch.")
    if (
        dtype not in DTYPE_BYTES or dtype == "float32"
    ):  # vLLM's dtype "auto" casts FP32 checkpoints to 16 bit
        dtype = "bfloat16"
    stored = q.parse_quantization_config(config, location)
    if stored.steps * len(architecture.layers) > MAX_PATTERN_STEPS:
        raise PlannerError(
            f"{location}, field quantization_config: its expressions of module names may take"
            " hours; accepted are names, and a few of `.*`, `+` and `?`"
        )
    return Model(name, architecture, stored, dtype, architecture.warnings)


def _read_config_file(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    config = parse_json(read_text(path), str(path))
    if not isinstance(config, dict):
        raise PlannerError(f"{path}: expected a mapping of fields, got {type(config).__name__}")
    beside = path.parent / "hf_quant_config.json"
    if not config.get("quantization_config") and beside.is_file() and beside != path:
        config["quantization_config"] = parse_json(read_text(beside), str(beside))
    return config


@cache
def _load_model_catalog() -> tuple[dict[str, ModelEntry], dict[str, str]]:
    """Entries by name, and every known name by its folded form, with and without its maker."""
    found = load_catalog("models.yaml", ModelEntry)
    known = [name for key, entry in found.items() for name in entry.list_names(key)]
    folded = {_remove_dashes(_normalize_name(name)): name for name in known}
    for name in known:
        folded.setdefault(_remove_dashes(_normalize_name(name.split("/")[-1])), name)
    return found, folded


def _normalize_name(name: str) -> str:
    """A name without its case, spaces, and what stands in brackets."""
    return re.sub(r"[\s_]+", "-", re.sub(r"\(.*?\)", "", name).strip().casefold())


def _remove_dashes(name: str) -> str:
    """A folded name without its dashes: "llama3.1-8b" and "llama-3.1-8b" are the same."""
    return name.replace("-", "")


@cache
def _build_catalog_model(name: str) -> Model:
    """The catalog's model `name`: its bases' configurations, then its entry's, then its own, one over the other."""
    catalog, _ = _load_model_catalog()
    if name not in catalog:
        key = next(key for key, entry in catalog.items() if name in entry.list_names(key))
        if name not in catalog[key].variants:
            return replace(_build_catalog_model(key), name=name)
        overlay = catalog[key].variants[name]
        return _build_model(
            _merge_configs(_merge_entry_config(key), overlay),
            name,
            f"models.yaml, entry {key}, variant {name}",
        )
    return _build_model(_merge_entry_config(name), name, f"models.yaml, entry {name}")


def _merge_entry_config(key: str) -> dict[str, Any]:
    """The configuration of the catalog's entry `key`, over those that it is based on."""
    catalog, _ = _load_model_catalog()
    chain = [catalog[key]]
    while (base := chain[-1].base) is not None:
        if base not in catalog or len(chain) > 8:
            raise PlannerError(
                f"models.yaml, entry {key}, field base:"
                f" {make_unknown_name_error(base, catalog, 'model')}"
            )
        chain.append(catalog[base])
    config: dict[str, Any] = {}
    for entry in reversed(chain):
        config = _merge_configs(config, entry.config)
    return config


def _merge_configs(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under` with the fields of `over`, nested configurations field by field; a quantization is replaced whole."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if (
            isinstance(value, Mapping)
            and isinstance(below, Mapping)
            and key != "quantization_config"
        ):
            value = _merge_configs(below, value)
        merged[key] = value
    return merged


_SUFFIX_PATTERN = r"^meta-|-(instruct|chat|it|hf|base|thinking|mtp|reasoning|preview|\d{4})(?=-|$)"
"""What names add that doesn't change any shape."""
_VERSION_PATTERN = r"-v\d+(\.\d+)?(?=-|$)"
_OTHER_MODEL_PATTERN = r"v\d|.*\b(vl|vision|omni|audio|asr|embed\w*|rerank\w*|reward|eagle\w*|medusa|dflash|dspark|draft\w*)\b"
"""What follows a known name in the name of something else."""
_BLOCK_FP8_MAKERS = (
    "qwen",
    "zai-org",
    "deepseek-ai",
    "minimaxai",
    "moonshotai",
    "stepfun-ai",
    "xiaomimimo",
)
"""Makers whose own FP8 releases scale blocks of 128 x 128; GLM-4's scale channels (vllm-hpu-extension pull 350)."""


@cache
def _look_up_model(name: str) -> Model:
    _, folded = _load_model_catalog()
    if (known := folded.get(_remove_dashes(_normalize_name(name)))) is not None:
        model = _build_catalog_model(known)
        read = (f"{name} is read as {known}",) if name.casefold() != known.casefold() else ()
        return (
            model if name == known else replace(model, name=name, warnings=(*model.warnings, *read))
        )
    if (config := _read_hub_cache(name)) is not None:
        return _build_model(config, name)
    if (variant := _find_variant(name)) is not None:
        return variant
    if (config := _download_config(name)) is not None:
        return _build_model(config, name)
    error = make_unknown_name_error(name, list_model_names(), "model")
    network = "" if _check_hub_reachable() else ", or a network to ask the Hub for it"
    raise PlannerError(f"{error}; the path of its config.json would do as well{network}")


def resolve_repository(name: str) -> str:
    """The Hub repository of the model called `name`, where the catalog knows it by more than its short name."""
    return (
        name
        if "/" in name
        else _load_model_catalog()[1].get(_remove_dashes(_normalize_name(name)), name)
    )


@cache
def _split_format_from_name(name: str) -> tuple[str, str | None]:
    """The folded name without its maker and without what it says of the format, and that format."""
    bare, said = (
        _normalize_name(name.rstrip("/").removesuffix("/config.json").removesuffix(".json")).split(
            "/"
        )[-1],
        None,
    )
    for pattern, spelled in q.QUANTIZATION_CATALOG["in_names"].items():
        stripped = re.sub(rf"[-.]({pattern})(-v\d(?=-|$))?(?=[-.]|$)", "", bare)
        if stripped != bare:
            bare, said = stripped, said or spelled
    return bare, said


@cache
def _index_stripped_names() -> dict[str, str]:
    """Known names by what is left of them without what doesn't change a shape; a size may do without its version."""
    plain: dict[str, str] = {}
    for name in reversed(list_model_names()):
        bare = re.sub(_SUFFIX_PATTERN, "", _normalize_name(name).split("/")[-1])
        plain[bare] = name
        if re.search(r"\d[bm](-|$)", bare):
            plain.setdefault(re.sub(_VERSION_PATTERN, "", bare), name)
    return plain


def _find_variant(name: str) -> Model | None:
    """A catalog model under a dressed-up name, or a quantized copy of one: its base, with what the name says.

    NVFP4 copies leave alone what NVIDIA's own do: all but the routed experts of an MoE model
    (Kimi-K2.6-NVFP4, Qwen3.5-397B-A17B-NVFP4), the recurrent mixers of a hybrid.
    """
    if unknown := re.search(r"[-.](gguf|ggml|exl[23]|mlx)(?=[-.]|$)", _normalize_name(name)):
        raise PlannerError(
            f"{name}: {unknown[1]} checkpoints are not planned for;"
            f" {', '.join(q.WEIGHT_FORMATS)} are"
        )
    bare, wanted = _split_format_from_name(name)
    if (
        wanted == "fp8"
        and _normalize_name(name).split("/")[0] in _BLOCK_FP8_MAKERS
        and not bare.startswith("glm-4")
    ):
        wanted = "fp8_block"
    plain, undressed = re.sub(_SUFFIX_PATTERN, "", bare), _index_stripped_names()
    squashed = {_remove_dashes(alias): known for alias, known in undressed.items()}
    exact = _load_model_catalog()[1].get(_remove_dashes(bare)) or squashed.get(
        _remove_dashes(plain)
    )
    begins = [
        alias
        for alias in undressed
        if plain.startswith(f"{alias}-") and re.search(r"\d[bm](-|$)", alias)
    ]
    longest = max(begins, key=len, default="")
    if exact is None and (not longest or re.match(_OTHER_MODEL_PATTERN, plain[len(longest) + 1 :])):
        return None
    known = exact or undressed[longest]
    base = _build_catalog_model(known)
    derived = "planned as" if exact else "taken for a derivative of"
    note, quantization = f"{name} is not in the catalog; {derived} {known}", base.quantization
    bits = q.parse_quantization(wanted).weight_bits if wanted else 0
    if wanted is not None and not (
        q.matches_stored_format(wanted, quantization) and bits == quantization.weight_bits
    ):
        targets: tuple[tuple[str, str], ...] = ()
        if wanted == "nvfp4" and base.architecture.is_moe:
            targets = ((q.ROUTED_EXPERTS_PATTERN, "nvfp4"),)
        elif wanted == "nvfp4" and base.architecture.is_hybrid:
            targets = ((r"^(?!.*(linear_attn|mixer))", "nvfp4"),)
        quantization = (
            q.parse_quantization(wanted, targets)
            if targets
            else _convert_quantization(wanted, base)
        )
        stored = "16-bit" if wanted == "none" else wanted
        note += f" with {stored} {'experts' if base.architecture.is_moe and targets else 'weights'}"
    warnings = (*base.warnings, note)
    return replace(base, name=name, quantization=quantization, warnings=warnings, is_inferred=True)


def _read_hub_cache(name: str) -> dict[str, Any] | None:
    """The newest `config.json` of the repository `name` in the local Hub cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache_dir = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    folder = escape(f"models--{name.replace('/', '--')}")
    paths = sorted(cache_dir.glob(f"{folder}/snapshots/*/config.json"), key=os.path.getmtime)
    return _read_config_file(paths[-1]) if paths else None


@cache
def _check_hub_reachable() -> bool:
    """The Hub answers; asked once, so that a planner without a network doesn't wait for every unknown name."""
    from huggingface_hub import constants

    try:
        socket.create_connection(
            (urlsplit(constants.ENDPOINT).hostname or "", 443), timeout=2
        ).close()
    except OSError:
        return False
    return not constants.HF_HUB_OFFLINE


def _download_config(name: str) -> dict[str, Any] | None:
    """`config.json` from the Hub; None without a network or repository."""
    if name.count("/") != 1 or not _check_hub_reachable():
        return None
    from huggingface_hub import hf_hub_download

    try:
        path = Path(hf_hub_download(name, "config.json", etag_timeout=3))
    except Exception:
        return None
    with suppress(Exception):  # most checkpoints have none
        hf_hub_download(name, "hf_quant_config.json", etag_timeout=3)
    return _read_config_file(path)
