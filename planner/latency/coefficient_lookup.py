"""Look up the coefficients of the step model: `catalogs/calibration/ENGINE.yaml`.

They say what fraction of its published peaks a GPU reaches under an engine. Coefficients are common
to all measured runs of an engine, times effects of the GPU's generation and die, the engine's
release and the model; of a single GPU's own there is nothing but its data sheet. Each effect is
pulled towards 1 as far as measurements leave it open (partial pooling). What single runs say beyond
that is in `measured_residuals`. A user's own file, with entries by GPU, takes precedence if an
`Engine` carries it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from planner.core.catalog import CATALOG_DIR, load_catalog, validate_entry
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.readers import read_yaml
from planner.core.versions import Version
from planner.engines.coefficients import (
    CalibrationEffect,
    CommonCalibration,
    MatrixShares,
    StepCoefficients,
    UserCalibration,
    list_coefficient_names,
)
from planner.engines.deployment import Deployment
from planner.engines.engine import Engine
from planner.hardware.gpus import Gpu, get_gpu
from planner.models.registry import Model

CalibrationBasis = Literal["measured", "model-transfer", "gpu-transfer", "prior"]
PEAK_COEFFICIENTS = ("gemm_bf16", "gemm_fp8", "gemm_fp4", "expert_gemm", "attention")
"""Fractions of a matrix peak."""
RELEASE_BOUNDARIES = {
    "vllm": ("0.11.0", "0.12.0", "0.16.0", "0.18.0", "0.20.0", "0.21.0"),
    "sglang": ("0.5.3", "0.5.6", "0.5.9", "0.5.12"),
    "trtllm": ("1.1.0", "1.2.0", "1.3.0"),
}
"""Releases that changed an engine's runner, scheduler or kernels: each starts an era."""


def find_era(engine: str, release: Version) -> str:
    """Return the first of `RELEASE_BOUNDARIES` above a release, "" above the last."""
    bounds = RELEASE_BOUNDARIES.get(engine, ())
    return next((bound for bound in bounds if release < Version.parse(bound)), "")


@dataclass(frozen=True)
class CalibratedCoefficients:
    """Coefficients for one GPU, engine and model, and what they come from."""

    coefficients: StepCoefficients
    kv_cache_dtype: str
    note: str


@dataclass(frozen=True)
class CalibrationCatalog:
    """Calibration of one engine: common coefficients, and effects by name."""

    common: CommonCalibration
    effects: Mapping[str, CalibrationEffect]

    def matches(self, effect: CalibrationEffect, release: Version, **conditions: str) -> bool:
        """Return whether an effect applies under these conditions and the engine's release.

        Of effects of one kind with `before`, the lowest one above the release applies.
        """
        if any(getattr(effect, name) not in (None, value) for name, value in conditions.items()):
            return False
        if effect.before is None:
            return True
        kind = {name: getattr(effect, name) for name in conditions}
        bounds = [
            other.before
            for other in self.effects.values()
            if other.before and {name: getattr(other, name) for name in conditions} == kind
        ]
        return effect.before == min((bound for bound in bounds if release < bound), default=None)


@cache
def load_calibration_catalog(engine: str) -> CalibrationCatalog:
    """Load the calibration of `engine`; an engine without one uses vLLM's."""
    file = f"calibration/{engine}.yaml"
    if not (CATALOG_DIR / file).exists():
        file = "calibration/vllm.yaml"
    data = dict(read_yaml(CATALOG_DIR / file))
    common = validate_entry(CommonCalibration, data.pop("common", None), f"{file}, entry common")
    effects = {
        name: validate_entry(CalibrationEffect, fields, f"{file}, entry {name}")
        for name, fields in data.items()
    }
    if missing := set(list_coefficient_names()) - common.coefficients.keys():
        raise PlannerError(f"{file}, entry common: field is missing: {', '.join(sorted(missing))}")
    for name, effect in effects.items():
        check_coefficient_names(effect.times, f"{file}, entry {name}")
    return CalibrationCatalog(common, effects)


def check_coefficient_names(coefficients: Iterable[str], location: str) -> None:
    """Raise `PlannerError` for names that are no coefficients."""
    for unknown in set(coefficients) - set(list_coefficient_names()):
        raise PlannerError(
            f"{location}:"
            f" {make_unknown_name_error(unknown, set(list_coefficient_names()), 'coefficient')}"
        )


def load_user_calibrations(path: Path) -> dict[str, UserCalibration]:
    """Load a user's calibration file, by GPU; raise `PlannerError` for any error in it."""
    try:
        entries = load_catalog(path.name, UserCalibration, path.parent)
        for name, entry in entries.items():
            check_coefficient_names(entry.coefficients, f"{path.name}, entry {name}")
        return {get_gpu(name).name: entry for name, entry in entries.items()}
    except PlannerError as error:
        raise PlannerError(f"{error} ({path.name} is read as a calibration, by GPU)") from None


def apply_user_calibrations(engine: Engine, user: Mapping[str, UserCalibration]) -> Engine:
    """Return `engine` with those of a user's calibrations that were measured under it."""
    return replace(
        engine, calibration={name: e for name, e in user.items() if e.engine in ("", engine.name)}
    )


def find_known_release(engine: Engine, model_type: str) -> Version:
    """Find the last release up to the engine's at which a kind of model was measured.

    What a later one changes for other models it need not change for this. It is the engine's own
    where none is known.
    """
    effects = load_calibration_catalog(engine.name).effects.values()
    measured = (
        release
        for effect in effects
        if effect.model == model_type
        for release in effect.releases
        if release <= engine.release
    )
    return max(measured, default=engine.release)


@cache
def look_up_coefficients(
    gpu: Gpu, engine: Engine, model_type: str, quantization: str
) -> CalibratedCoefficients:
    """Look up the coefficients for `gpu` under `engine` and a kind of model.

    `model_type` is that of config.json.
    """
    catalog = load_calibration_catalog(engine.name)
    release = find_known_release(engine, model_type)
    conditions = {
        "generation": gpu.kernel_generation,
        "die": gpu.die,
        "model": model_type,
        "quantization": quantization,
    }
    effects = [
        effect
        for effect in catalog.effects.values()
        if catalog.matches(effect, release, **conditions)
    ]
    values = dict(catalog.common.coefficients)
    for effect in effects:
        for name, factor in effect.times.items():
            values[name] *= factor
    user = engine.calibration.get(gpu.name)
    dtype = next((e.kv_cache_dtype for e in effects if e.kv_cache_dtype != "auto"), "auto")
    known = adapt_to_power(gpu, StepCoefficients(**values))
    if user is None:
        return CalibratedCoefficients(known, dtype, catalog.common.source)
    return CalibratedCoefficients(
        replace(known, **user.coefficients), user.kv_cache_dtype, user.source
    )


@cache
def find_matrix_shares(*names: str) -> MatrixShares | None:
    """Find the shares of peak timed in isolation, of the first of these dies and generations that has some."""
    entries = load_catalog("calibration/matrix_shares.yaml", MatrixShares)
    return next(filter(None, map(entries.get, names)), None)


def adapt_to_power(gpu: Gpu, known: StepCoefficients) -> StepCoefficients:
    """Return a die's coefficients on a GPU with more power for its peak: shares of peak rise.

    At a share f of the peak a product takes 1 of its time to compute, and 1/f - 1 more for want of
    power. A card that is cut to q of its die's peak per watt waits less: f' = 1 / (1 + (1/f - 1) q).
    Large BF16 products: L40S reaches 0.62 of its peak, L20 (q 0.42) 0.92, the law 0.80; MI300X 0.54, MI325X
    (0.75) 0.64, 0.61. With less power for the peak than the reference, clocks fall, which costs less speed
    than power: nothing changes.
    """
    if (entry := find_matrix_shares(gpu.die, gpu.kernel_generation)) is None:
        return known
    peaks_per_watt = [
        each.peak_flops["fp16"] / each.board_limit_w for each in (gpu, get_gpu(entry.reference))
    ]
    q, reached = min(peaks_per_watt[0] / peaks_per_watt[1], 1.0), min(known.gemm_bf16, 1.0)
    rise = 1 / (reached + (1 - reached) * q)
    return replace(known, **{name: getattr(known, name) * rise for name in PEAK_COEFFICIENTS})


def get_deployment_coefficients(deployment: Deployment) -> CalibratedCoefficients:
    """Look up the coefficients of a deployment."""
    model = deployment.model
    return look_up_coefficients(
        deployment.gpu,
        deployment.engine,
        model.architecture.model_type,
        get_weight_format_name(model),
    )


def get_weight_format_name(model: Model) -> str:
    """Return the number format of most weights, as calibrations name it."""
    main = model.quantization.main_format
    return main.method if main else "none"
