"""Models by name, path or configuration: architecture, weight formats and assumptions."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from os.path import isfile  # False for names that no file can have
from pathlib import Path
from typing import Any

from pydantic import Field

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.errors import PlannerError, make_unknown_name_error, validate_unicode_text
from planner.core.readers import parse_json, read_text
from planner.models import quantization as q
from planner.models.architecture import DecoderLayer, ModelArchitecture
from planner.models.hf_config import parse_hf_config
from planner.models.quantization_config import parse_quantization_config

DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
"""Bytes per element of the dtypes of weights and activations."""


class ModelEntry(SourcedEntry):
    """One entry of `catalogs/models.yaml`, whose head explains every field."""

    base: str | None = None
    aliases: tuple[str, ...] = ()
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)

    def list_names(self, key: str) -> tuple[str, ...]:
        """List all names of the entry called `key`."""
        return (key, *self.aliases, *self.variants)


@dataclass(frozen=True, eq=False)
class Model:
    """A model as an engine loads it."""

    name: str
    architecture: ModelArchitecture
    quantization: q.CheckpointQuantization = q.UNQUANTIZED
    dtype: str = "bfloat16"
    warnings: tuple[str, ...] = ()
    is_inferred: bool = False  # architecture and format follow from the name alone
    local_name: str = ""  # of a checkpoint on this machine: its folder's, or its file's
    # of its files, where that is not `quantization`: what the engine converts, or somebody before
    stored_quantization: q.CheckpointQuantization | None = None

    @property
    def served_name(self) -> str:
        """The name that clients ask for."""
        return self.local_name or self.name

    @property
    def pooling_task(self) -> str:
        """What it is served for by its name, "embed" or "score"; empty if it answers."""
        bare = self.name.rpartition("/")[2].casefold()
        tasks = {"embed": r"embed|\b(e5|gte|bge)\b", "score": r"rerank"}
        return next((task for task, words in tasks.items() if re.search(words, bare)), "")

    @cached_property
    def as_stored(self) -> "Model":
        """The model in the format of its files."""
        if self.stored_quantization is None:
            return self
        return replace(self, quantization=self.stored_quantization, stored_quantization=None)

    @cached_property
    def layer_prefixes(self) -> tuple[str, ...]:
        """The module path of each layer, "layers.3.", or of the first that is stored alike."""
        first_prefixes: dict[tuple[DecoderLayer, tuple[q.WeightFormat | None, ...]], str] = {}
        prefixes = []
        for index, layer in enumerate(self.architecture.layers):
            prefix = f"layers.{index}."
            formats = tuple(
                self.quantization.get_weight_format(weight, prefix) for weight in layer.weights
            )
            prefixes.append(first_prefixes.setdefault((layer, formats), prefix))
        return tuple(prefixes)

    @cached_property
    def distinct_layers(self) -> Mapping[tuple[DecoderLayer, str], int]:
        """(layer, module path) of layers that differ in shape or format -> their number."""
        return Counter(zip(self.architecture.layers, self.layer_prefixes, strict=True))

    def __str__(self) -> str:
        stored = "" if self.quantization.method == "none" else f", {self.quantization.method}"
        return f"{self.name} ({self.architecture.params_total / 1e9:.2f} B parameters{stored})"


def list_models() -> tuple[str, ...]:
    """List the keys of the catalog's models."""
    return tuple(_load_model_catalog()[0])


def list_model_names() -> tuple[str, ...]:
    """List all names in the catalog: models, aliases and variants."""
    return tuple(
        name for key, entry in _load_model_catalog()[0].items() for name in entry.list_names(key)
    )


def load_model(
    source: str | Path | Mapping[str, Any],
    *,
    quantization: str | None = None,
    dtype: str | None = None,
) -> Model:
    """Load a model by name, by the path of a `config.json` or its folder, or by its content.

    Names are looked up in the catalog, in the local Hub cache, as a variant of a catalog model,
    then on the Hub. `quantization` is the format to which the engine converts a 16-bit checkpoint
    (or FP8 to NVFP4). For other checkpoints it must name their format, or that of a published
    checkpoint of the model, which is loaded instead. `dtype` overrides the configuration. Raises
    `PlannerError`, also for a `quantization` that contradicts the checkpoint.
    """
    if isinstance(source, Mapping):
        name = source.get("_name_or_path") or source.get("model_type") or "config"
        model = _build_model(source, validate_unicode_text(name, "model"))
    elif isfile(path := Path(validate_unicode_text(source, "model"))) or isfile(
        path / "config.json"
    ):
        location = path.name if isfile(path) else "config.json"
        model = _build_model(
            _read_config_file(path), re.sub(r"(?<=[^.])/config\.json$", "", str(source)), location
        )
        folder = (path.parent if isfile(path) else path).resolve()
        local_name = folder.name if location == "config.json" else path.stem
        model = replace(model, local_name=local_name or "model")
    elif str(source).endswith(".json"):
        raise PlannerError(f"model {str(source)!r:.300}: there is no such file")
    elif (
        not str(source).isprintable()
        or len(str(source)) > 200
        or re.search("://[^/]*@", str(source))
    ):
        raise PlannerError(
            f"model {str(source)!r:.80} is longer than 200 letters, has one that cannot be printed, or a"
            " login; no name is so"
        )
    else:
        model = _look_up_model(str(source))
    named_format = _split_format_from_name(model.name)[1]
    is_silent = not model.quantization.schemes and named_format not in (None, "none")
    if is_silent and named_format and quantization in (None, named_format):
        maker = _normalize_name(str(Path(model.name).parent)).split("/")[-1]
        stored, _ = _convert_like_copies(named_format, model, maker)
        model = replace(model, quantization=stored, is_inferred=True)
    elif quantization is not None:
        model = _apply_format(quantization, model)
    if is_silent and quantization is None:
        note = (
            f"{model.name} says {named_format}, and its configuration states no quantization:"
            f" planned in {named_format}, on the layers that such checkpoints usually convert"
        )
        model = replace(model, warnings=(*model.warnings, note))
    if dtype is not None and dtype != "auto":
        if dtype not in DTYPE_BYTES:
            raise make_unknown_name_error(dtype, (*DTYPE_BYTES, "auto"), "dtype")
        model = replace(model, dtype={"half": "float16", "float": "float32"}.get(dtype, dtype))
    return model


@lru_cache(maxsize=256)
def _apply_format(requested: str, model: Model) -> Model:
    """Return the model in the requested format: as stored, converted, or another checkpoint.

    Raises `PlannerError` if there is none. Cached, so that equal requests return the same object,
    by which results of deployments are cached in turn.
    """
    stored = model.quantization
    if q.matches_stored_format(requested, stored):
        return model
    converted = _convert_quantization(requested, model)
    # the request is more specific than the name
    if model.is_inferred and converted.method == stored.method:
        return replace(model, quantization=converted)
    if not stored.schemes:
        return replace(model, quantization=converted, stored_quantization=stored)
    # the name does not tell who packed the weights
    if model.is_inferred and q.is_container_name(requested) and stored.method in ("gptq", "awq"):
        return replace(model, quantization=q.parse_quantization("int4"))
    note = f"{model.name} is stored in {stored.method}; planned"
    published = find_published_checkpoint(requested, model)
    is_fp8 = stored.method in ("fp8", "fp8_block") and stored.weight_bits == 8
    if is_fp8 and converted.method == "nvfp4":
        note += f" with all its linear layers converted to {requested}"
        if published:
            note += f" ({published} keeps some as they were)"
        return replace(model, quantization=converted, warnings=(*model.warnings, note))
    if published:
        note += f" as {published}, which is what {requested} asks for"
        return replace(_build_catalog_model(published), warnings=(*model.warnings, note))
    raise PlannerError(
        f"{model.name} is stored in {stored.method}, so quantization {requested} would be another"
        " checkpoint: name that one, or leave quantization out"
    )


def _convert_quantization(requested: str, model: Model) -> q.CheckpointQuantization:
    """Return the requested format on the layers that use it; MXFP4 only on experts, if any."""
    quantization = q.parse_quantization(requested)
    if quantization.method == "mxfp4" and not model.architecture.is_moe:
        return q.parse_quantization(requested, (("", "mxfp4"),))
    return quantization


def find_published_checkpoint(requested: str, model: Model) -> str | None:
    """Find a checkpoint of the same model in the requested format in the catalog."""
    bare = _split_format_from_name(model.name)[0]
    matches = (
        name
        for name in list_model_names()
        if _split_format_from_name(name)[0] == bare
        and q.matches_stored_format(requested, _build_catalog_model(name).quantization)
    )
    return next(matches, None)


def _build_model(config: Mapping[str, Any], name: str, location: str = "config.json") -> Model:
    architecture = parse_hf_config(config, location)
    text = config.get("text_config")
    configs = (config, text if isinstance(text, Mapping) else {})
    dtypes = (fields.get(key) for fields in configs for key in ("dtype", "torch_dtype"))
    dtype = str(next(filter(None, dtypes), "bfloat16")).removeprefix("torch.")
    if dtype not in DTYPE_BYTES or dtype == "float32":
        dtype = "bfloat16"  # vLLM's dtype "auto" casts FP32 checkpoints to 16 bit
    stored = parse_quantization_config(config, location)
    return Model(name, architecture, stored, dtype, architecture.warnings)


def _read_config_file(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    config = parse_json(read_text(path), str(path))
    if not isinstance(config, dict):
        raise PlannerError(f"{path}: expected a mapping of fields, got {type(config).__name__}")
    modelopt = path.parent / "hf_quant_config.json"
    if not config.get("quantization_config") and modelopt.is_file() and modelopt != path:
        config["quantization_config"] = parse_json(read_text(modelopt), str(modelopt))
    return config


@cache
def _load_model_catalog() -> tuple[dict[str, ModelEntry], dict[str, str]]:
    """Load entries by key, and all names by their folded form, with and without the maker."""
    entries = load_catalog("models.yaml", ModelEntry)
    known = [name for key, entry in entries.items() for name in entry.list_names(key)]
    folded = {_remove_dashes(_normalize_name(name)): name for name in known}
    for name in known:
        folded.setdefault(_remove_dashes(_normalize_name(name.split("/")[-1])), name)
    return entries, folded


def _normalize_name(name: str) -> str:
    """Fold case, spaces and underscores, and drop text in brackets."""
    return re.sub(r"[\s_]+", "-", re.sub(r"\([^()]*\)", "", name).strip().casefold())


def _remove_dashes(name: str) -> str:
    """Remove dashes, so that "llama3.1-8b" and "llama-3.1-8b" are equal."""
    return name.replace("-", "")


@cache
def _build_catalog_model(name: str) -> Model:
    """Build a catalog model from the configurations of its bases, its entry and its variant."""
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
    """Merge the configuration of an entry over those of its bases."""
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


def _merge_configs(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations, nested ones field by field; a quantization is replaced whole."""
    merged = dict(base)
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and key != "quantization_config":
            value = _merge_configs(old, value)
        merged[key] = value
    return merged


_SUFFIX_PATTERN = r"^meta-|-(instruct|chat|it|hf|base|thinking|mtp|reasoning|preview|\d{4})(?=-|$)"
"""Parts of names that do not change any shape."""
_VERSION_PATTERN = r"-v\d+(\.\d+)?(?=-|$)"
_OTHER_MODEL_PATTERN = (
    r"v\d|.*\b(vl|vision|omni|audio|asr|embed\w*|rerank\w*|reward|eagle\w*|medusa|dflash|dspark"
    r"|draft\w*|assistant)\b"
)
"""Text after a known name that makes it the name of another model."""
_BLOCK_FP8_MAKERS = (
    "qwen",
    "zai-org",
    "deepseek-ai",
    "minimaxai",
    "moonshotai",
    "stepfun-ai",
    "xiaomimimo",
)
"""Makers whose FP8 releases scale 128 x 128 blocks, except GLM-4 (vllm-hpu-extension pull 350)."""


@cache
def _look_up_model(name: str) -> Model:
    _, folded = _load_model_catalog()
    if (known := folded.get(_remove_dashes(_normalize_name(name)))) is not None:
        model = _build_catalog_model(known)
        notes = (f"{name} is read as {known}",) if name.casefold() != known.casefold() else ()
        if name == known:
            return model
        return replace(model, name=name, warnings=(*model.warnings, *notes))
    from planner.models import hub  # what speaks HTTP loads slowly

    if path := hub.find_hub_config(name):
        return _build_model(_read_config_file(path), name)
    if (variant := _find_variant(name)) is not None:
        return variant
    if path := hub.download_hub_config(name):
        return _build_model(_read_config_file(path), name)
    error = make_unknown_name_error(name, list_model_names(), "model")
    network = "" if hub.check_hub_reachable() else ", or a network to ask the Hub for it"
    raise PlannerError(f"{error}; the path of its config.json would do as well{network}")


def load_model_at(path: str, *, quantization: str | None = None) -> Model:
    """Load a model by a name, or by the path at which an engine has its copy.

    Copies lie in folders such as "/models/Qwen3-8B", "/models/Qwen_Qwen3-8B.w4a16" or
    "models--Qwen--Qwen3-8B/snapshots/0123". Raises `PlannerError` for an unknown one.
    """
    try:
        return load_model(path, quantization=quantization)
    except PlannerError:
        if path.count("/") < 2 and not path.startswith(("/", ".", "~")):
            raise
    folder = re.sub(r"/snapshots/[^/]+$", "", path.rstrip("/")).rpartition("/")[2]
    folder = folder.removeprefix("models--").replace("--", "/", 1)
    maker, sign, name = folder.partition("_")
    try:
        return load_model(folder, quantization=quantization)
    except PlannerError as error:
        if not (sign and maker and name) or "/" in folder:
            raise
        try:
            return load_model(f"{maker}/{name}", quantization=quantization)
        except PlannerError:
            raise error from None


def resolve_repository(name: str) -> str:
    """Return the Hub repository of a catalog model's short name; other names stay as they are."""
    if "/" in name:
        return name
    return _load_model_catalog()[1].get(_remove_dashes(_normalize_name(name)), name)


@cache
def _split_format_from_name(name: str) -> tuple[str, str | None]:
    """Split a name into its folded form without maker and format, and the format (None: none)."""
    path = name.rstrip("/").removesuffix("/config.json").removesuffix(".json")
    bare, named_format = _normalize_name(path).split("/")[-1], None
    for pattern, weight_format in q.QUANTIZATION_CATALOG["in_names"].items():
        stripped = re.sub(rf"[-.]({pattern})(-v\d(?=-|$))?(?=[-.]|$)", "", bare)
        if stripped != bare:
            bare, named_format = stripped, named_format or weight_format
    return bare, named_format


@cache
def _index_stripped_names() -> dict[str, str]:
    """Index known names by their form without suffixes and, if it has a size, without version."""
    stripped: dict[str, str] = {}
    for name in reversed(list_model_names()):
        bare = re.sub(_SUFFIX_PATTERN, "", _normalize_name(name).split("/")[-1])
        stripped[bare] = name
        if re.search(r"\d[bm](-|$)", bare):
            stripped.setdefault(re.sub(_VERSION_PATTERN, "", bare), name)
    return stripped


def _convert_like_copies(
    named_format: str, model: Model, maker: str
) -> tuple[q.CheckpointQuantization, bool]:
    """Return the format on the layers that published copies of such models convert, and if not on all.

    NVFP4 copies keep the layers that NVIDIA's own keep: all but the routed experts of an MoE model
    (Kimi-K2.6-NVFP4, Qwen3.5-397B-A17B-NVFP4), the recurrent mixers of a hybrid. Qwen's GPTQ copies
    of hybrids keep attention and shared experts (onnxruntime/mobius pull 18).
    """
    targets: tuple[tuple[str, str], ...] = ()
    if named_format == "nvfp4" and model.architecture.is_moe:
        targets = ((q.ROUTED_EXPERTS_PATTERN, "nvfp4"),)
    elif named_format == "gptq" and maker == "qwen" and model.architecture.is_hybrid:
        targets = ((r"^(?!.*(attn|shared_expert|mtp))", "gptq"),)
    elif named_format == "nvfp4" and model.architecture.is_hybrid:
        targets = ((r"^(?!.*(linear_attn|mixer))", "nvfp4"),)
    if targets:
        return q.parse_quantization(named_format, targets), True
    return _convert_quantization(named_format, model), False


def _find_variant(name: str) -> Model | None:
    """Find a catalog model by a longer name or the name of a quantized copy; None if none fits."""
    if unsupported := re.search(r"[-.](gguf|ggml|exl[23]|mlx)(?=[-.]|$)", _normalize_name(name)):
        raise PlannerError(
            f"{name}: {unsupported[1]} checkpoints are not planned for;"
            f" {', '.join(q.WEIGHT_FORMATS)} are"
        )
    bare, named_format = _split_format_from_name(name)
    maker = _normalize_name(name).split("/")[0]
    if named_format == "fp8" and maker in _BLOCK_FP8_MAKERS and not bare.startswith("glm-4"):
        named_format = "fp8_block"
    stripped, known_names = re.sub(_SUFFIX_PATTERN, "", bare), _index_stripped_names()
    without_dashes = {_remove_dashes(alias): known for alias, known in known_names.items()}
    exact = _load_model_catalog()[1].get(_remove_dashes(bare)) or without_dashes.get(
        _remove_dashes(stripped)
    )
    prefixes = (
        alias
        for alias in known_names
        if stripped.startswith(f"{alias}-") and re.search(r"\d[bm](-|$)", alias)
    )
    prefix = max(prefixes, key=len, default="")
    if exact is None and (
        not prefix or re.match(_OTHER_MODEL_PATTERN, stripped[len(prefix) + 1 :])
    ):
        return None
    known = exact or known_names[prefix]
    base = _build_catalog_model(known)
    derived = "planned as" if exact else "taken for a derivative of"
    note, quantization = f"{name} is not in the catalog; {derived} {known}", base.quantization
    bits = q.parse_quantization(named_format).weight_bits if named_format else 0
    if named_format is not None and not (
        q.matches_stored_format(named_format, quantization) and bits == quantization.weight_bits
    ):
        quantization, is_partial = _convert_like_copies(named_format, base, maker)
        stored = "16-bit" if named_format == "none" else named_format
        note += (
            f" with {stored} {'experts' if base.architecture.is_moe and is_partial else 'weights'}"
        )
    warnings = (*base.warnings, note)
    return replace(base, name=name, quantization=quantization, warnings=warnings, is_inferred=True)
