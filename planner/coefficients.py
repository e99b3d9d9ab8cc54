"""What fraction of its published peaks a GPU reaches under an engine: `catalogs/calibration/ENGINE.yaml`, by GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from math import log
from typing import Literal

from pydantic import PositiveFloat

from planner.catalog import CATALOGS, Entry, entries
from planner.engines import Engine, release
from planner.hardware import Gpu, gpus
from planner.models import Model
from planner.quantities import PlannerError, did_you_mean

Basis = Literal["measured", "model-transfer", "gpu-transfer", "prior"]


@dataclass(frozen=True)
class Coefficients:
    """The fitted numbers of the step cost: fractions of a published peak, or seconds (`_s`)."""

    memory: float  # of bandwidth, reading weights of dense linears
    memory_fp4: float  # the same for 4-bit weights
    expert_memory: float  # of what dense weights reach, reading those of the experts that a step touches
    kv: float  # of bandwidth, reading KV cache in decode
    gemm_bf16: float  # of dense peak, by the dtype that the matrix units compute in
    gemm_fp8: float
    gemm_fp4: float
    expert_gemm: float  # of what a dense GEMM of that dtype reaches
    expert_spread: float  # exponent: a batch of T tokens routes as differently as T^spread independent ones
    attention: float  # of dense bf16 peak, prefill attention
    link: float  # of link bandwidth, large all-reduces
    allreduce_s: float  # latency of one small all-reduce between two GPUs
    kernel_s: float  # latency of one kernel in a CUDA graph that no roofline covers
    token_passes: float  # activations of one token: passes over `hidden` bf16 values per layer
    step_s: float  # host time of one step that the GPU waits for
    row_s: float  # the same, per scheduled sequence
    launch_s: float  # issuing one kernel outside a CUDA graph: what steps with prompt tokens, and eager ones, wait for
    request_s: float  # front end per request before its first token: HTTP, scheduling, detokenizing
    prompt_token_s: float  # the same per prompt token: tokenizing, moving


def coefficient_names() -> tuple[str, ...]:
    """Names of all coefficients."""
    return tuple(field.name for field in fields(Coefficients))


class Calibration(Entry):
    """One entry of a calibration file; coefficients that it leaves out are those of the file's `prior`."""

    coefficients: dict[str, PositiveFloat]
    sigma_tpot: PositiveFloat | None = None  # standard deviation of ln(measured / predicted)
    sigma_ttft: PositiveFloat | None = None
    kv_cache_dtype: str = "auto"  # what the measured recipes set where a deployment leaves it open
    models: tuple[str, ...] = ()  # by `model_type`
    points: int = 0
    versions: tuple[str, ...] = ()
    residuals: str = ""
    source: str
    date: str


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
    file = CATALOGS / "calibration" / f"{engine}.yaml"
    found = entries(f"calibration/{engine if file.exists() else 'vllm'}.yaml", Calibration)
    names = set(coefficient_names())
    for name, entry in found.items():
        for unknown in entry.coefficients.keys() - names:
            raise PlannerError(
                f"calibration/{engine}.yaml, entry {name}: {did_you_mean(unknown, names, 'coefficient')}"
            )
    if missing := names - found["prior"].coefficients.keys():
        raise PlannerError(f"calibration/{engine}.yaml, entry prior: field is missing: {', '.join(sorted(missing))}")
    return found


def _entry(engine: Engine, name: str) -> Calibration | None:
    """The entry for `name` that covers the engine's release: the lowest "NAME before VERSION" above it, else "NAME"."""
    known = calibrations(engine.name)
    bounds = [key.partition(" before ")[2] for key in known if key.startswith(f"{name} before ")]
    above = [bound for bound in bounds if engine.release < release(bound)]
    return known[f"{name} before {min(above, key=release)}"] if above else known.get(name)


def _generation(gpu: Gpu) -> tuple[str, int]:
    """Architecture and major compute capability: data-centre and desktop Blackwell are two things."""
    return gpu.architecture, int(gpu.compute_capability or 0)


@cache
def calibrated(gpu: Gpu, engine: Engine, model_type: str) -> Calibrated:
    """Coefficients for `gpu` under `engine`: its own entry, its architecture's or nearest sibling's, or the prior.

    `model_type` (config.json) decides whether the model's family was among those measured.
    """
    known = calibrations(engine.name)
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
