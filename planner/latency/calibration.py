"""What fraction of its published peaks a GPU reaches under an engine: `catalogs/calibration/ENGINE.yaml`, by GPU.

An owner's own file, of entries by GPU in the same form, comes before the catalog where an `Engine` carries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import log
from pathlib import Path
from typing import Literal

from planner.core.catalog import CATALOGS, entries
from planner.core.quantities import PlannerError, did_you_mean
from planner.facts.coefficients import Calibration, Coefficients, coefficient_names
from planner.facts.engines import Engine, release
from planner.facts.gpus import Gpu, gpu, gpus
from planner.models.registry import Model

Basis = Literal["measured", "model-transfer", "gpu-transfer", "prior"]


@dataclass(frozen=True)
class Calibrated:
    """Coefficients for one GPU, engine and model, what they rest on, and how far off a prediction from them may be."""

    coefficients: Coefficients
    basis: Basis
    sigma_tpot: float
    sigma_ttft: float
    kv_cache_dtype: str
    note: str


WIDTHS: dict[Basis, tuple[float, float]] = {
    "measured": (0.08, 0.20),
    "model-transfer": (0.12, 0.30),
    "gpu-transfer": (0.15, 0.35),
    "prior": (0.30, 0.50),
}
"""Default standard deviations of ln(measured / predicted) for TPOT and TTFT, by basis."""


@cache
def calibrations(engine: str) -> dict[str, Calibration]:
    """The calibration file of `engine`; an engine without one is planned with vLLM's."""
    file = catalog_file(engine)
    found = _entries(file if file.exists() else catalog_file("vllm"))
    if missing := set(coefficient_names()) - found["prior"].coefficients.keys():
        raise PlannerError(f"calibration/{engine}.yaml, entry prior: field is missing: {', '.join(sorted(missing))}")
    return found


def catalog_file(engine: str) -> Path:
    """Where the catalog keeps the calibrations of `engine`."""
    return CATALOGS / "calibration" / f"{engine}.yaml"


def own_calibrations(path: Path) -> dict[str, Calibration]:
    """An owner's calibration file, by GPU; `PlannerError` for whatever is wrong in it."""
    try:
        return {gpu(name).name: entry for name, entry in _entries(path).items()}
    except PlannerError as error:
        raise PlannerError(f"{error} ({path.name} is read as a calibration, by GPU)") from None


def calibrated_by(engine: Engine, own: Mapping[str, Calibration]) -> Engine:
    """`engine` with an owner's calibrations, as far as they were measured under it."""
    return replace(engine, calibration={name: e for name, e in own.items() if e.engine in ("", engine.name)})


def _entries(path: Path) -> dict[str, Calibration]:
    found = entries(path.name, Calibration, path.parent)
    names = set(coefficient_names())
    for name, entry in found.items():
        for unknown in entry.coefficients.keys() - names:
            raise PlannerError(f"{path.name}, entry {name}: {did_you_mean(unknown, names, 'coefficient')}")
    return found


def _known(engine: Engine) -> Mapping[str, Calibration]:
    """All entries for `engine`: the catalog's, those of GPUs that its owner measured replaced."""
    own = engine.calibration
    shipped = {name: e for name, e in calibrations(engine.name).items() if name.partition(" before ")[0] not in own}
    return {**shipped, **own}


def entry_name(engine: Engine, name: str) -> str:
    """The entry for `name` that covers the engine's release: the lowest "NAME before VERSION" above it, else "NAME"."""
    bounds = [key.partition(" before ")[2] for key in _known(engine) if key.startswith(f"{name} before ")]
    above = [bound for bound in bounds if engine.release < release(bound)]
    return f"{name} before {min(above, key=release)}" if above else name


def _entry(engine: Engine, name: str) -> Calibration | None:
    return _known(engine).get(entry_name(engine, name))


def _generation(gpu: Gpu) -> tuple[str, int]:
    """Architecture and major compute capability: data-centre and desktop Blackwell are two things."""
    return gpu.architecture, int(gpu.compute_capability or 0)


@cache
def calibrated(gpu: Gpu, engine: Engine, model_type: str) -> Calibrated:
    """Coefficients for `gpu` under `engine`: its own entry, its architecture's or nearest sibling's, or the prior.

    `model_type` (config.json) decides whether the model's family was among those measured.
    """
    known = _known(engine)
    own, family, prior = _entry(engine, gpu.name), _entry(engine, gpu.architecture), known["prior"]
    if own is None and family is None:  # the sibling of the same generation with the nearest bandwidth
        siblings = [other for other in gpus() if _generation(other) == _generation(gpu) and other.name in known]
        nearest = min(siblings, key=lambda other: abs(log(other.bandwidth / gpu.bandwidth)), default=None)
        family = _entry(engine, nearest.name) if nearest else None
    chosen = own or family or prior
    basis: Basis = "prior"
    if own is not None:
        basis = "measured" if model_type in own.models else "model-transfer"
    elif family is not None:
        basis = "gpu-transfer"
    coefficients = replace(Coefficients(**prior.coefficients), **chosen.coefficients)
    tpot, ttft = WIDTHS[basis]
    if basis == "measured":
        tpot, ttft = chosen.sigma_tpot or tpot, chosen.sigma_ttft or ttft
    else:  # carried over, nothing is more certain than where it was measured
        tpot, ttft = max(tpot, chosen.sigma_tpot or 0), max(ttft, chosen.sigma_ttft or 0)
    return Calibrated(coefficients, basis, tpot, ttft, chosen.kv_cache_dtype, chosen.source)


def calibration_of(model: Model, gpu: Gpu, engine: Engine) -> Calibrated:
    """`calibrated` for a model."""
    return calibrated(gpu, engine, model.architecture.model_type)
