"""Calibrations: fitted coefficients of the step cost by GPU and engine, with their errors."""

from dataclasses import dataclass, fields

from pydantic import Field, PositiveFloat

from planner.core.catalog import SourcedEntry, StrictEntry
from planner.core.versions import Version


@dataclass(frozen=True)
class StepCoefficients:
    """Fitted coefficients of the step cost: fractions of a published peak, or seconds (`_s`)."""

    memory: float  # of bandwidth, reading weights of dense linears
    memory_fp4: float  # the same for 4-bit weights
    kv: float  # of bandwidth, reading KV cache in decode
    gemm_bf16: float  # of dense peak, by the dtype that the matrix units compute in
    gemm_fp8: float
    gemm_fp4: float
    # of what 16-bit weights reach, for kernels that first widen narrower weights to 16 bit
    gemm_widened: float
    expert_gemm: float  # of what the fused-experts kernel reaches when measured alone
    expert_latency: float  # latency in a step, relative to that measured alone
    attention: float  # of dense bf16 peak, prefill attention
    link: float  # of link bandwidth, large all-reduces
    allreduce_s: float  # latency of one small all-reduce between two GPUs
    kernel_s: float  # latency of one kernel in a CUDA graph beside its roofline, at H100's clock
    token_passes: float  # time for one token's activations, relative to moving them at bandwidth
    step_s: float  # host time of one step; asynchronous: only what exceeds the GPU's time
    row_s: float  # the same, per scheduled sequence
    launch_s: float  # launching one kernel outside a CUDA graph: steps with prompts, eager mode
    prompt_s: float  # per prompt chunk of a step, whatever its length
    request_s: float  # front end per request before its first token: HTTP, scheduling, detokenizing
    prompt_token_s: float  # the same per prompt token that is not cached: tokenizing, moving
    pace: float  # factor of the whole step; above 1 for young kernels and a model's own


def list_coefficient_names() -> tuple[str, ...]:
    """List the fields of `StepCoefficients`."""
    return tuple(field.name for field in fields(StepCoefficients))


class UserCalibration(SourcedEntry):
    """One GPU of a user's calibration file; the catalog provides coefficients that it omits."""

    coefficients: dict[str, PositiveFloat]
    sigma_tpot: PositiveFloat | None = None  # standard deviation of ln(measured / predicted)
    sigma_ttft: PositiveFloat | None = None
    kv_cache_dtype: str = "auto"  # set by the measured recipes if the deployment does not
    models: tuple[str, ...] = ()  # by `model_type`
    points: int = 0
    versions: tuple[str, ...] = ()
    residuals: str = ""
    engine: str = ""


class CalibrationEffect(StrictEntry):
    """One entry of a calibration catalog: factors of the coefficients if all conditions hold."""

    generation: str | None = None  # of the GPU, see `Gpu.kernel_generation`
    die: str | None = None  # see `Gpu.die`
    model: str | None = None  # by `model_type`
    quantization: str | None = None
    before: Version | None = (
        None  # the engine's release; of equal entries the lowest bound above it holds
    )
    releases: tuple[Version, ...] = ()  # at which the model was measured
    times: dict[str, PositiveFloat] = Field(default_factory=dict)
    kv_cache_dtype: str = "auto"  # set by the measured recipes if the deployment does not


class MatrixShares(SourcedEntry):
    """An entry of `catalogs/calibration/matrix_shares.yaml`, whose head explains every field."""

    reference: str
    shares: dict[str, PositiveFloat] = Field(default_factory=dict)


class CommonCalibration(SourcedEntry):
    """The common coefficients that all effects of a calibration catalog multiply."""

    coefficients: dict[str, PositiveFloat]
