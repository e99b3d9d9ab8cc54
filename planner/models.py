"""Models by name, path or configuration: an architecture, how its weights are stored, and what was assumed."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from planner import quantization as q
from planner.architecture import Architecture
from planner.architecture_config import from_config
from planner.catalog import Entry, entries
from planner.quantities import PlannerError, did_you_mean

DTYPES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
"""Bytes per element of the dtypes that weights and activations may have."""


class ModelEntry(Entry):
    """One model as people write it; the head of `catalogs/models.yaml` explains every field."""

    base: str | None = None
    aliases: tuple[str, ...] = ()
    config: dict[str, Any] = Field(default_factory=dict)
    source: str
    date: str


@dataclass(frozen=True, eq=False)
class Model:
    """A model as an engine would load it."""

    name: str
    architecture: Architecture
    quantization: q.Quantization = q.NONE
    dtype: str = "bfloat16"
    warnings: tuple[str, ...] = ()

    @property
    def dtype_bytes(self) -> int:
        """Bytes per element of what isn't quantized."""
        return DTYPES[self.dtype]

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """A module path for every layer, "layers.3."; layers whose weights are stored alike share the first one's."""
        alike: dict[Any, str] = {}
        found = []
        for index, layer in enumerate(self.architecture.layers):
            prefix = f"layers.{index}."
            formats = tuple(self.quantization.scheme(weight, prefix) for weight in layer.weights)
            found.append(alike.setdefault((layer, formats), prefix))
        return tuple(found)

    def __str__(self) -> str:
        stored = "" if self.quantization.method == "none" else f", {self.quantization.method}"
        return f"{self.name} ({self.architecture.params_total / 1e9:.2f} B parameters{stored})"


def models() -> tuple[str, ...]:
    """Names of the catalog's models."""
    return tuple(_catalog()[0])


def model(
    source: str | Path | Mapping[str, Any], *, quantization: str | None = None, dtype: str | None = None
) -> Model:
    """The model called `source`, or described by a path to a `config.json` or by its content.

    Names are looked up in the catalog, in the local Hub cache, as a variant of a catalog model, then on the Hub.
    `quantization` and `dtype` override what the configuration says. Raises `PlannerError`.
    """
    if isinstance(source, Mapping):
        found = _build(source, str(source.get("_name_or_path") or source.get("model_type") or "config"))
    elif (path := Path(source)).is_file() or (path / "config.json").is_file():
        found = _build(_read(path), str(source))
    else:
        found = _named(str(source))
    if quantization is not None and (wanted := q.named(quantization, found.quantization)) != found.quantization:
        found = replace(found, quantization=wanted)
    if dtype is not None and dtype != "auto":
        if dtype not in DTYPES:
            raise did_you_mean(dtype, (*DTYPES, "auto"), "dtype")
        found = replace(found, dtype={"half": "float16", "float": "float32"}.get(dtype, dtype))
    return found


def _build(config: Mapping[str, Any], name: str, where: str = "config.json") -> Model:
    architecture = from_config(config, where)
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    dtype = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype")
    dtype = str(dtype or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES or dtype == "float32":  # vLLM's dtype "auto" casts FP32 checkpoints to 16 bit
        dtype = "bfloat16"
    return Model(name, architecture, q.from_config(config, where), dtype, architecture.warnings)


def _read(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlannerError(f"cannot read {path} as JSON: {error}") from None
    beside = path.parent / "hf_quant_config.json"
    if isinstance(config, dict) and "quantization_config" not in config and beside.is_file():
        config["quantization_config"] = json.loads(beside.read_text(encoding="utf-8"))
    return config


@cache
def _catalog() -> tuple[dict[str, ModelEntry], dict[str, str]]:
    """Entries by name, and names by folded name or alias."""
    found = entries("models.yaml", ModelEntry)
    folded = {}
    for name, entry in found.items():
        for alias in (name, *entry.aliases):
            folded[_squash(_fold(alias))] = name
            folded.setdefault(_squash(_fold(alias.split("/")[-1])), name)
    return found, folded


def _fold(name: str) -> str:
    """A name without its case, spaces, and what stands in brackets."""
    return re.sub(r"[\s_]+", "-", re.sub(r"\(.*?\)", "", name).strip().casefold())


def _squash(name: str) -> str:
    """A folded name without its dashes: "llama3.1-8b" and "llama-3.1-8b" are the same."""
    return name.replace("-", "")


@cache
def _entry(name: str) -> Model:
    """The catalog's model `name`, its base's configuration overlaid with its own."""
    catalog, _ = _catalog()
    config: dict[str, Any] = {}
    chain: list[ModelEntry] = [catalog[name]]
    while (base := chain[-1].base) is not None:
        if base not in catalog or len(chain) > 8:
            raise PlannerError(f"models.yaml, entry {name}, field base: {did_you_mean(base, catalog, 'model')}")
        chain.append(catalog[base])
    for entry in reversed(chain):
        config.update(entry.config)
    return _build(config, name, f"models.yaml, entry {name}")


_FORMATS = (
    (r"nvfp4|fp4", "nvfp4"), (r"mxfp4", "mxfp4"), (r"fp8[-_](dynamic|static|kv)", "fp8_channel"), (r"fp8", "fp8"),
    (r"gptq(-?marlin)?(-?int4|-?4bit)?", "gptq"), (r"awq(-?int4|-?4bit)?", "awq"),
    (r"bnb-4bit|bnb|bitsandbytes", "bitsandbytes"), (r"quantized\.w4a16|w4a16|int4|4bit|autoround", "int4"),
    (r"quantized\.w8a8|w8a8|int8", "int8"), (r"bf16|bfloat16|fp16", "none"),
)  # fmt: skip
"""How names say the format of a quantized copy, and the format."""
_DRESS = r"^meta-|-(instruct|chat|it|hf|base|thinking|mtp|reasoning|preview|\d{4}|v\d+(\.\d+)?)(?=-|$)"
"""What names add that doesn't change any shape."""
_BLOCK_FP8 = ("qwen", "zai-org", "deepseek-ai", "minimaxai", "moonshotai", "stepfun-ai", "xiaomimimo")
"""Makers whose own FP8 releases scale blocks of 128 x 128."""


@cache
def _named(name: str) -> Model:
    catalog, folded = _catalog()
    if (key := folded.get(_squash(_fold(name)))) is not None:
        return _entry(key)
    if (config := _cached(name)) is not None:
        return _build(config, name)
    if (variant := _variant(name)) is not None:
        return variant
    if (config := _download(name)) is not None:
        return _build(config, name)
    error = did_you_mean(name, {alias for key, entry in catalog.items() for alias in (key, *entry.aliases)}, "model")
    network = "" if _online() else ", or a network to ask the Hub for it"
    raise PlannerError(f"{error}; the path of its config.json would do as well{network}")


def _variant(name: str) -> Model | None:
    """A catalog model under a dressed-up name, or a quantized copy of one: its base, with what the name says.

    NVFP4 copies leave alone what NVIDIA's own do: all but the routed experts of an MoE model (Kimi-K2.6-NVFP4,
    Qwen3.5-397B-A17B-NVFP4), the recurrent mixers of a hybrid.
    """
    bare, wanted = _fold(name).split("/")[-1], None
    if unknown := re.search(r"[-.](gguf|ggml|exl[23]|mlx)(?=[-.]|$)", bare):
        raise PlannerError(f"{name}: {unknown[1]} checkpoints are not planned for; {', '.join(q.SCHEMES)} are")
    for pattern, spelled in _FORMATS:
        stripped = re.sub(rf"[-.]({pattern})(?=[-.]|$)", "", bare)
        if stripped != bare:
            bare, wanted = stripped, wanted or spelled
    if wanted == "fp8" and _fold(name).split("/")[0] in _BLOCK_FP8:
        wanted = "fp8_block"
    catalog, known = _catalog()
    plain = re.sub(_DRESS, "", bare)
    undressed = {re.sub(_DRESS, "", _fold(alias).split("/")[-1]): key
                 for key, entry in reversed(catalog.items()) for alias in (*entry.aliases, key)}  # fmt: skip
    squashed = {_squash(alias): key for alias, key in undressed.items()}
    exact = known.get(_squash(bare)) or squashed.get(_squash(plain))
    begins = [alias for alias in undressed if plain.startswith(f"{alias}-") and re.search(r"\d[bm](-|$)", alias)]
    key = exact or undressed.get(max(begins, key=len, default=""))
    if key is None:
        return None
    base = _entry(key)
    derived = "planned as" if exact else "taken for a derivative of"
    note, quantization = f"{name} is not in the catalog; {derived} {key}", base.quantization
    if wanted is not None:
        targets: tuple[tuple[str, str], ...] = ()
        if wanted == "nvfp4" and base.architecture.is_moe:
            targets = ((r"mlp\.experts", "nvfp4"),)
        elif wanted == "nvfp4" and base.architecture.is_hybrid:
            targets = ((r"^(?!.*(linear_attn|mixer))", "nvfp4"),)
        quantization = q.named(wanted, base.quantization, targets)
        note += f" with {wanted} {'experts' if base.architecture.is_moe and targets else 'weights'}"
    return replace(base, name=name, quantization=quantization, warnings=(*base.warnings, note))


def _cached(name: str) -> dict[str, Any] | None:
    """The newest `config.json` of the repository `name` in the local Hub cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache_dir = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted(cache_dir.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"), key=os.path.getmtime)
    return _read(found[-1]) if found else None


@cache
def _online() -> bool:
    """The Hub answers; asked once, so that a planner without a network doesn't wait for every unknown name."""
    from huggingface_hub import constants

    try:
        socket.create_connection((urlsplit(constants.ENDPOINT).hostname or "", 443), timeout=2).close()
    except OSError:
        return False
    return not constants.HF_HUB_OFFLINE


def _download(name: str) -> dict[str, Any] | None:
    """`config.json` from the Hub; None without a network or repository."""
    if name.count("/") != 1 or not _online():
        return None
    from huggingface_hub import hf_hub_download

    try:
        return _read(Path(hf_hub_download(name, "config.json", etag_timeout=3)))
    except Exception:
        return None
