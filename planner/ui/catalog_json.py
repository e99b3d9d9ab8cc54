"""Models and GPUs of the catalogs that match a pattern, also as JSON."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.units import GB, GIB
from planner.hardware.gpus import Gpu, get_gpu, list_gpus
from planner.hardware.prices import look_up_gpu_price
from planner.models.registry import Model, list_model_names, list_models, load_model


def find_models(pattern: str) -> dict[str, Model]:
    """Return the models whose names match, by name; see `_filter_names`."""
    names = list_model_names() if pattern else list_models()
    return {name: load_model(name) for name in _filter_names(pattern, names, "model")}


def serialize_models(pattern: str) -> list[dict[str, Any]]:
    """Return the models that match."""
    return [
        {
            "name": name,
            "parameters": model.architecture.params_total,
            "active_parameters": model.architecture.params_active,
            "context_tokens": model.architecture.max_position,
            "dtype": model.dtype,
            "quantization": model.quantization.method,
        }
        for name, model in find_models(pattern).items()
    ]


def find_gpus(pattern: str) -> list[Gpu]:
    """Return the GPUs of which a name or an alias matches; see `_filter_names`."""
    known = {alias: gpu.name for gpu in list_gpus() for alias in (gpu.name, *gpu.aliases)}
    matches = _filter_names(pattern, known, "GPU")
    return [get_gpu(name) for name in dict.fromkeys(known[name] for name in matches)]


def serialize_gpus(pattern: str) -> list[dict[str, Any]]:
    """Return the GPUs that match, with the median price of a GPU-hour and its sources."""
    return [
        {
            "name": gpu.name,
            "aliases": list(gpu.aliases),
            "memory_gib": gpu.memory_bytes / GIB,
            "memory_basis": gpu.memory_basis,
            "bandwidth_gb_per_s": gpu.memory_bandwidth / GB,
            "usd_per_hour": price
            and {"median": price.median_usd, "min": price.min_usd, "max": price.max_usd},
            "price_source": str(price) if price else None,
            "engines": {
                engine: [str(first), None if last is None else str(last)]
                for engine, (first, last) in gpu.supported.items()
            },
        }
        for gpu in find_gpus(pattern)
        for price in [look_up_gpu_price(gpu)]
    ]


def _filter_names(pattern: str, names: Iterable[str], kind: str) -> list[str]:
    """Return the names that contain `pattern`, in which `*` matches anything.

    Raises `PlannerError` if there are none.
    """
    if len(pattern) > 200:
        raise PlannerError(f"a part of a name has at most 200 letters, got {len(pattern):,}")
    names = list(names)
    matches = [name for name in names if fnmatchcase(name.casefold(), f"*{pattern.casefold()}*")]
    if not matches:
        parts = {part for name in names for part in (name, *re.split("[/-]", name))}
        raise make_unknown_name_error(pattern, parts, kind, min_similarity=0.6)
    return matches
