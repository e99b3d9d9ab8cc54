"""What fraction of its published peaks a GPU reaches under an engine: `catalogs/calibration/ENGINE.yaml`.

Coefficients are what all measured runs of an engine have in common, times what a GPU's generation,
the GPU, the engine's release and the model change, each pulled towards 1 as far as measurements
leave it open (partial pooling). An owner's own file, of entries by GPU, comes before the catalog
where an `Engine` carries it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from planner.core.catalog import CATALOG_DIR, load_catalog, validate_entry
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.readers import read_yaml
from planner.engines.coefficients import (
    CalibrationEffect,
    CommonCalibration,
    ErrorWidths,
    StepCoefficients,
    UserCalibration,
    list_coefficient_names,
)
from planner.engines.deployment import Deployment
from planner.engines.engine import Engine
from planner.hardware.gpus import Gpu, get_gpu
from planner.models.registry import Model

CalibrationBasis = Literal["measured", "model-transfer", "gpu-transfer", "prior"]
NOVELTY_KINDS = ("pair", "model", "gpu", "version")
"""What may be new in a question, beside its load."""


@dataclass(frozen=True)
class CalibratedCoefficients:
    """Coefficients for one GPU, engine and model, what they rest on, and how far off a prediction from them may be."""

    coefficients: StepCoefficients
    basis: CalibrationBasis
    novelties: tuple[str, ...]  # of `NEW`
    sigma_tpot: float
    sigma_ttft: float
    sigma_output_tps: float
    kv_cache_dtype: str
    points: int  # that were measured of this GPU under this engine
    note: str


@dataclass(frozen=True)
class CalibrationCatalog:
    common: CommonCalibration
    effects: Mapping[str, CalibrationEffect]

    def matches(self, effect: CalibrationEffect, engine: Engine, **asked: str | int) -> bool:
        """Whether `asked` and the engine's release meet its conditions, and no lower `before` of its kind does."""
        if any(getattr(effect, name) not in (None, value) for name, value in asked.items()):
            return False
        if effect.before is None:
            return True
        kind = {name: getattr(effect, name) for name in asked}
        bounds = [
            other.before
            for other in self.effects.values()
            if other.before and {name: getattr(other, name) for name in asked} == kind
        ]
        return effect.before == min(
            (bound for bound in bounds if engine.release < bound), default=None
        )


@cache
def load_calibration_catalog(engine: str) -> CalibrationCatalog:
    """The calibrations of `engine`; an engine without any is planned with vLLM's."""
    file = f"calibration/{engine}.yaml"
    if not (CATALOG_DIR / file).exists():
        file = "calibration/vllm.yaml"
    data = dict(read_yaml(CATALOG_DIR / file))
    common = validate_entry(CommonCalibration, data.pop("common", None), f"{file}, entry common")
    found = {
        name: validate_entry(CalibrationEffect, fields, f"{file}, entry {name}")
        for name, fields in data.items()
    }
    if missing := set(list_coefficient_names()) - common.coefficients.keys():
        raise PlannerError(f"{file}, entry common: field is missing: {', '.join(sorted(missing))}")
    for name, effect in found.items():
        check_coefficient_names(effect.times, f"{file}, entry {name}")
    return CalibrationCatalog(common, found)


def check_coefficient_names(coefficients: Iterable[str], location: str) -> None:
    """Raise `PlannerError` for what is no coefficient's name."""
    for unknown in set(coefficients) - set(list_coefficient_names()):
        raise PlannerError(
            f"{location}:"
            f" {make_unknown_name_error(unknown, set(list_coefficient_names()), 'coefficient')}"
        )


def load_user_calibrations(path: Path) -> dict[str, UserCalibration]:
    """An owner's calibration file, by GPU; `PlannerError` for whatever is wrong in it."""
    try:
        found = load_catalog(path.name, UserCalibration, path.parent)
        for name, entry in found.items():
            check_coefficient_names(entry.coefficients, f"{path.name}, entry {name}")
        return {get_gpu(name).name: entry for name, entry in found.items()}
    except PlannerError as error:
        raise PlannerError(f"{error} ({path.name} is read as a calibration, by GPU)") from None


def apply_user_calibrations(engine: Engine, own: Mapping[str, UserCalibration]) -> Engine:
    """`engine` with an owner's calibrations, as far as they were measured under it."""
    return replace(
        engine, calibration={name: e for name, e in own.items() if e.engine in ("", engine.name)}
    )


@cache
def look_up_coefficients(
    gpu: Gpu, engine: Engine, model_type: str, quantization: str, tp: int = 0
) -> CalibratedCoefficients:
    """Coefficients for `gpu` under `engine` and a model of this `model_type` (config.json), quantization and TP."""
    calibration_catalog = load_calibration_catalog(engine.name)
    asked: dict[str, str | int] = {
        "generation": gpu.kernel_generation,
        "gpu": gpu.name,
        "model": model_type,
        "tp": tp,
    }
    asked["quantization"] = quantization
    effects = [
        effect
        for effect in calibration_catalog.effects.values()
        if calibration_catalog.matches(effect, engine, **asked)
    ]
    values = dict(calibration_catalog.common.coefficients)
    for effect in effects:
        for name, factor in effect.times.items():
            values[name] *= factor
    here = [
        effect
        for effect in calibration_catalog.effects.values()
        if effect.gpu == gpu.name and effect.points
    ]
    measured = [e for e in here if (e.model, e.quantization) == (model_type, quantization)]
    versions = {
        version
        for e in measured or here or calibration_catalog.effects.values()
        for version in e.versions
    }
    apart = bool(versions) and not min(versions) <= engine.release <= max(versions)
    there = next((e for e in effects if e.generation and not (e.before or e.gpu or e.model)), None)
    is_known = {
        "pair": bool(measured),
        "model": any(effect.model == model_type for effect in calibration_catalog.effects.values()),
        "gpu": bool(here),
        "version": not apart,
    }
    basis: CalibrationBasis = (
        "measured"
        if measured
        else "model-transfer"
        if here
        else "gpu-transfer"
        if there
        else "prior"
    )
    new = tuple(name for name in NOVELTY_KINDS if not is_known[name])
    many = max((effect.curves for effect in measured), default=0) >= MIN_CURVES_PER_PAIR
    loads = calibration_catalog.common.sigma_tpot, calibration_catalog.common.sigma_ttft
    tpot, ttft = (
        widths.many if many and not new else _compute_error_width(widths, new) for widths in loads
    )
    tpot *= there.spread_tpot if there else UNSEEN_GENERATION_FACTOR
    ttft *= there.spread_ttft if there else UNSEEN_GENERATION_FACTOR
    rate = calibration_catalog.common.sigma_output_tps if new else None
    tps = (
        max(
            tpot,
            _compute_error_width(rate, new)
            * (there.spread_output_tps if there else UNSEEN_GENERATION_FACTOR),
        )
        if rate
        else tpot
    )
    dtype = next((e.kv_cache_dtype for e in effects if e.kv_cache_dtype != "auto"), "auto")
    coefficients = CalibratedCoefficients(
        StepCoefficients(**values),
        basis,
        new,
        tpot,
        ttft,
        tps,
        dtype,
        sum(e.points for e in here),
        calibration_catalog.common.source,
    )
    own = engine.calibration.get(gpu.name)
    return coefficients if own is None else _apply_user_measurements(coefficients, own, model_type)


MIN_CURVES_PER_PAIR = 10
"""Curves of a pair of model and GPU from which on another load of it is told much more exactly."""
UNSEEN_GENERATION_FACTOR = 2.5
"""How much less certain a GPU is of whose generation none was measured. Of generations of which one GPU was measured,
held back: CDNA 3 1.7 times the width of a GPU held back (SGLang), GB10 2.0, A100 2.3
(TensorRT-LLM), Gaudi 3 4.4."""


def _compute_error_width(widths: ErrorWidths, new: tuple[str, ...]) -> float:
    """The spread for a load, widened by what else is `new`: what each adds to that of a load alone, in squares."""
    extra = {name: max(getattr(widths, name) ** 2 - widths.curve**2, 0.0) for name in new}
    if "model" in extra or "gpu" in extra:  # each of them is a new pair, too
        extra.pop("pair", None)
    return math.sqrt(widths.curve**2 + sum(extra.values()))


def _apply_user_measurements(
    known: CalibratedCoefficients, own: UserCalibration, model_type: str
) -> CalibratedCoefficients:
    """`known` with what an owner measured of this GPU."""
    coefficients = replace(known.coefficients, **own.coefficients)
    tpot, ttft = known.sigma_tpot, known.sigma_ttft
    if model_type in own.models:
        tpot, ttft = own.sigma_tpot or tpot, own.sigma_ttft or ttft
    else:  # carried over, nothing is more certain than where it was measured
        tpot, ttft = max(tpot, own.sigma_tpot or 0), max(ttft, own.sigma_ttft or 0)
    basis: CalibrationBasis = "measured" if model_type in own.models else "model-transfer"
    new = () if basis == "measured" else known.novelties
    tps = tpot if basis == "measured" else max(tpot, known.sigma_output_tps)
    return CalibratedCoefficients(
        coefficients, basis, new, tpot, ttft, tps, own.kv_cache_dtype, own.points, own.source
    )


def get_deployment_coefficients(
    deployment: Deployment, *, layouts: bool = True
) -> CalibratedCoefficients:
    """`calibrated` for a deployment; without `layouts` without what its tensor parallel size adds of its own."""
    model = deployment.model
    method, tp = get_weight_format_name(model), deployment.layout.tp if layouts else 0
    return look_up_coefficients(
        deployment.gpu, deployment.engine, model.architecture.model_type, method, tp
    )


def get_weight_format_name(model: Model) -> str:
    """The number format of most of its weights, as calibrations name it."""
    main = model.quantization.main_format
    return main.method if main else "none"
