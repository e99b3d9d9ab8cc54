"""Look up the coefficients of the step model: `catalogs/calibration/ENGINE.yaml`.

They say what fraction of its published peaks a GPU reaches under an engine. Coefficients are common
to all measured runs of an engine, times effects of the GPU's generation, the GPU, the engine's
release and the model. Each effect is pulled towards 1 as far as measurements leave it open (partial
pooling). A user's own file, with entries by GPU, takes precedence if an `Engine` carries it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
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
    ErrorSpread,
    ErrorWidths,
    LoadErrorWidths,
    StepCoefficients,
    UserCalibration,
    list_coefficient_names,
)
from planner.engines.deployment import Deployment
from planner.engines.engine import Engine
from planner.hardware.gpus import Gpu, get_gpu
from planner.models.registry import Model

CalibrationBasis = Literal["measured", "model-transfer", "gpu-transfer", "prior"]
NOVELTY_KINDS = ("pair", "model", "gpu", "format", "version")
"""What may be new about a deployment, apart from its load."""
POWER_REFERENCE_GPUS = {
    "turing": "Quadro-RTX-8000", "ampere": "A100-SXM-80GB", "ada": "L40S", "hopper": "H100-SXM",
    "blackwell": "B200", "blackwell-desktop": "RTX-PRO-6000", "cdna3": "MI300X", "cdna4": "MI355X",
}  # fmt: skip
"""A GPU of each generation whose peaks and power limit go together as the fitted fractions assume."""
PEAK_COEFFICIENTS = ("gemm_bf16", "gemm_fp8", "gemm_fp4", "expert_gemm", "attention")
"""Fractions of a matrix peak."""
RELEASE_BOUNDARIES = {
    "vllm": ("0.11.0", "0.12.0", "0.16.0", "0.18.0", "0.20.0", "0.21.0"),
    "sglang": ("0.5.6", "0.5.9", "0.5.12"),
    "trtllm": ("1.0.0", "1.2.0", "1.3.0"),
}
"""Releases that changed an engine's runner, scheduler or kernels: each starts an era."""


def find_era(engine: str, release: Version) -> str:
    """Return the first of `RELEASE_BOUNDARIES` above a release, "" above the last."""
    bounds = RELEASE_BOUNDARIES.get(engine, ())
    return next((bound for bound in bounds if release < Version.parse(bound)), "")


@dataclass(frozen=True)
class CalibratedCoefficients:
    """Coefficients for one GPU, engine and model, with their basis and the error of predictions."""

    coefficients: StepCoefficients
    basis: CalibrationBasis
    novelties: tuple[str, ...]  # of `NOVELTY_KINDS`
    sigma_tpot: float
    sigma_ttft: float
    sigma_output_tps: float
    kv_cache_dtype: str
    points: int  # measured on this GPU under this engine
    note: str


@dataclass(frozen=True)
class CalibrationCatalog:
    """Calibration of one engine: common coefficients, and effects by name."""

    common: CommonCalibration
    effects: Mapping[str, CalibrationEffect]

    def matches(self, effect: CalibrationEffect, engine: Engine, **conditions: str | int) -> bool:
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
        return effect.before == min(
            (bound for bound in bounds if engine.release < bound), default=None
        )


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


@cache
def look_up_coefficients(
    gpu: Gpu, engine: Engine, model_type: str, quantization: str, tp: int = 0, dp: int = 0
) -> CalibratedCoefficients:
    """Look up the coefficients for `gpu` under `engine` and a kind of model.

    `model_type` is that of config.json; `tp` and `dp` are the tensor and the data parallel size.
    """
    catalog = load_calibration_catalog(engine.name)
    conditions: dict[str, str | int] = {
        "generation": gpu.kernel_generation,
        "gpu": gpu.name,
        "model": model_type,
        "tp": tp,
        "dp": dp,
        "attention_dp": dp > 1,
        "quantization": quantization,
    }
    effects = [
        effect
        for effect in catalog.effects.values()
        if catalog.matches(effect, engine, **conditions)
    ]
    values = dict(catalog.common.coefficients)
    for effect in effects:
        for name, factor in effect.times.items():
            values[name] *= factor
    of_gpu = [
        effect for effect in catalog.effects.values() if effect.gpu == gpu.name and effect.points
    ]
    of_pair = [
        effect
        for effect in of_gpu
        if (effect.model, effect.quantization) == (model_type, quantization)
        and (effect.attention_dp_points if dp > 1 else effect.points - effect.attention_dp_points)
    ]
    if not of_gpu:
        values |= _raise_shares_of_cut_gpu(gpu, values)
    novelties = _list_novelties(catalog, engine, gpu, model_type, quantization, of_gpu, of_pair)
    generation = next(
        (e for e in effects if e.generation and not (e.before or e.gpu or e.model)), None
    )
    basis: CalibrationBasis = (
        "measured"
        if of_pair
        else "model-transfer"
        if of_gpu
        else "gpu-transfer"
        if generation and not {"format", "model"} & set(novelties)
        else "prior"
    )
    num_curves = max((effect.curves for effect in of_pair), default=0)
    widths = _compute_error_widths(
        catalog.common,
        next((effect for effect in effects if effect.attention_dp), generation),
        novelties,
        num_curves >= MIN_CURVES_PER_PAIR and dp <= 1,
    )
    coefficients = CalibratedCoefficients(
        StepCoefficients(**values),
        basis,
        novelties,
        *widths,
        next((e.kv_cache_dtype for e in effects if e.kv_cache_dtype != "auto"), "auto"),
        sum(effect.points for effect in of_gpu),
        catalog.common.source,
    )
    user = engine.calibration.get(gpu.name)
    return (
        coefficients if user is None else _apply_user_measurements(coefficients, user, model_type)
    )


def _list_novelties(
    catalog: CalibrationCatalog,
    engine: Engine,
    gpu: Gpu,
    model_type: str,
    quantization: str,
    of_gpu: Sequence[CalibrationEffect],
    of_pair: Sequence[CalibrationEffect],
) -> tuple[str, ...]:
    """List what was not measured of a model on a GPU, of `NOVELTY_KINDS`.

    `of_gpu` are the measured effects of the GPU, `of_pair` those of its pair with the model.
    """
    effects = catalog.effects.values()
    eras = {
        find_era(engine.name, version)
        for effect in of_pair or of_gpu or effects
        for version in effect.versions
    }
    newest = max((v for effect in effects for v in effect.versions), default=engine.release)
    is_known = {
        "pair": bool(of_pair),
        "model": any(effect.model == model_type for effect in effects),
        "gpu": bool(of_gpu),
        "format": any(
            effect.points
            and effect.quantization == quantization
            and get_gpu(str(effect.gpu)).kernel_generation == gpu.kernel_generation
            for effect in effects
        ),
        "version": not eras
        or (find_era(engine.name, engine.release) in eras and engine.release <= newest),
    }
    return tuple(kind for kind in NOVELTY_KINDS if not is_known[kind])


def _raise_shares_of_cut_gpu(gpu: Gpu, values: Mapping[str, float]) -> dict[str, float]:
    """Return the coefficients that rise where a GPU that nobody measured has more power for its peak.

    At a share f of the peak a product takes 1 of its time to compute, and 1/f - 1 more for want of
    power. A card that is cut to q of its generation's peak per watt waits less: f' = 1 / (1 + (1/f - 1) q).
    Large BF16 products: L40S reaches 0.62 of its peak, L20 (q 0.42) 0.92, the law 0.80; MI300X 0.54, MI325X
    (0.75) 0.64, 0.61. With less power for the peak than the reference, clocks fall, which costs less speed
    than power: nothing changes.
    """
    name = POWER_REFERENCE_GPUS.get(gpu.kernel_generation)
    if name is None:
        return {}
    peaks_per_watt = [each.peak_flops["fp16"] / each.board_limit_w for each in (gpu, get_gpu(name))]
    q, reached = min(peaks_per_watt[0] / peaks_per_watt[1], 1.0), min(values["gemm_bf16"], 1.0)
    return {each: values[each] / (reached + (1 - reached) * q) for each in PEAK_COEFFICIENTS}


MIN_CURVES_PER_PAIR = 10
"""Curves of a pair of model and GPU from which on its other loads are predicted better."""
UNSEEN_GENERATION_FACTOR = 2.5
"""Factor of the error width for a GPU whose generation was not measured.

Held-out generations with one measured GPU, relative to the width of a held-out GPU: CDNA 3 1.7
(SGLang), GB10 2.0, A100 2.3 (TensorRT-LLM), Gaudi 3 4.4.
"""


def _compute_error_widths(
    common: CommonCalibration,
    effect: CalibrationEffect | None,
    new: tuple[str, ...],
    has_many_curves: bool,
) -> tuple[float, float, float]:
    """Compute the error widths of TPOT, TTFT and output tokens/s; the last is no less than TPOT's.

    `effect` has the spread of the GPU's generation, or of attention DP.
    """

    def widen(widths: ErrorWidths, metric: str, has_many_curves: bool = False) -> float:
        factor = UNSEEN_GENERATION_FACTOR
        if effect is not None:
            spread: ErrorSpread = getattr(effect, f"spread_{metric}")
            factor = spread.new if set(new) - {"version"} else spread.load
        return factor * _compute_error_width(widths, new, has_many_curves)

    tpot = widen(common.sigma_tpot, "tpot", has_many_curves)
    ttft = widen(common.sigma_ttft, "ttft", has_many_curves)
    rate = common.sigma_output_tps if new else None
    return tpot, ttft, max(tpot, widen(rate, "output_tps")) if rate else tpot


def _compute_error_width(
    widths: ErrorWidths, new: tuple[str, ...], has_many_curves: bool = False
) -> float:
    """Return the error width for a load, widened by what else is `new`.

    Each novelty adds the difference of its square to that of a load alone. A pair of which many
    loads were measured has widths of its own as long as at most the release is new.
    """
    if has_many_curves and isinstance(widths, LoadErrorWidths) and not set(new) - {"version"}:
        return widths.many_version if new else widths.many
    extra = {name: max(getattr(widths, name) ** 2 - widths.curve**2, 0.0) for name in new}
    if {"model", "gpu", "format"} & set(extra):  # each implies a new pair
        extra.pop("pair", None)
    return math.sqrt(widths.curve**2 + sum(extra.values()))


def _apply_user_measurements(
    known: CalibratedCoefficients, user: UserCalibration, model_type: str
) -> CalibratedCoefficients:
    """Return `known` with a user's measurements of this GPU."""
    coefficients = replace(known.coefficients, **user.coefficients)
    tpot, ttft = known.sigma_tpot, known.sigma_ttft
    if model_type in user.models:
        tpot, ttft = user.sigma_tpot or tpot, user.sigma_ttft or ttft
    else:  # transferred, no error is smaller than where it was measured
        tpot, ttft = max(tpot, user.sigma_tpot or 0), max(ttft, user.sigma_ttft or 0)
    basis: CalibrationBasis = "measured" if model_type in user.models else "model-transfer"
    new = () if basis == "measured" else known.novelties
    tps = tpot if basis == "measured" else max(tpot, known.sigma_output_tps)
    return CalibratedCoefficients(
        coefficients, basis, new, tpot, ttft, tps, user.kv_cache_dtype, user.points, user.source
    )


def get_deployment_coefficients(
    deployment: Deployment, *, layouts: bool = True
) -> CalibratedCoefficients:
    """Look up the coefficients of a deployment.

    Without `layouts`, the effect of its layout is left out.
    """
    model = deployment.model
    layout = deployment.layout
    return look_up_coefficients(
        deployment.gpu,
        deployment.engine,
        model.architecture.model_type,
        get_weight_format_name(model),
        *((layout.tp, layout.dp) if layouts else ()),
    )


def get_weight_format_name(model: Model) -> str:
    """Return the number format of most weights, as calibrations name it."""
    main = model.quantization.main_format
    return main.method if main else "none"
