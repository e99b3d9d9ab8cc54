"""What a calibration is: the fitted numbers of the step cost for one GPU under one engine, and how sure they are."""

from dataclasses import dataclass, fields

from pydantic import Field, PositiveFloat

from planner.core.catalog import SourcedEntry, StrictEntry
from planner.core.versions import Version


@dataclass(frozen=True)
class StepCoefficients:
    """The fitted numbers of the step cost: fractions of a published peak, or seconds (`_s`)."""

    memory: float  # of bandwidth, reading weights of dense linears
    memory_fp4: float  # the same for 4-bit weights
    kv: float  # of bandwidth, reading KV cache in decode
    gemm_bf16: float  # of dense peak, by the dtype that the matrix units compute in
    gemm_fp8: float
    gemm_fp4: float
    gemm_widened: (
        float  # of what 16-bit weights reach, where narrow ones are widened to 16 bit first
    )
    expert_gemm: float  # of what the fused-experts kernel reaches when measured alone
    expert_latency: float  # of its latency measured alone, what is seen in a step
    attention: float  # of dense bf16 peak, prefill attention
    link: float  # of link bandwidth, large all-reduces
    allreduce_s: float  # latency of one small all-reduce between two GPUs
    kernel_s: (
        float  # latency of one kernel in a CUDA graph that no roofline covers, at H100's clock
    )
    token_passes: (
        float  # activations: time of one token's against what the bandwidth would move them in
    )
    step_s: (
        float  # host time of one step; with asynchronous scheduling only what outlasts the GPU's
    )
    row_s: float  # the same, per scheduled sequence
    # issuing one kernel outside a CUDA graph: what steps with prompt tokens, and eager ones, wait
    # for
    launch_s: float
    prompt_s: float  # in a step of each prompt chunk, whatever its length
    request_s: float  # front end per request before its first token: HTTP, scheduling, detokenizing
    prompt_token_s: float  # the same per prompt token that is not cached: tokenizing, moving
    # of the whole step, against what the others give: young kernels and a model's own lie above 1
    pace: float


def list_coefficient_names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(StepCoefficients))


class UserCalibration(SourcedEntry):
    """One GPU of an owner's calibration file; coefficients that it leaves out are the catalog's."""

    coefficients: dict[str, PositiveFloat]
    sigma_tpot: PositiveFloat | None = None  # standard deviation of ln(measured / predicted)
    sigma_ttft: PositiveFloat | None = None
    kv_cache_dtype: str = "auto"  # what the measured recipes set where a deployment leaves it open
    models: tuple[str, ...] = ()  # by `model_type`
    points: int = 0
    versions: tuple[str, ...] = ()
    residuals: str = ""
    engine: str = ""


class CalibrationEffect(StrictEntry):
    """One entry of a calibration catalog: where all its conditions hold, factors of the coefficients before it."""

    generation: str | None = None  # of the GPU, see `Gpu.generation`
    gpu: str | None = None
    model: str | None = None  # by `model_type`
    quantization: str | None = None
    tp: int | None = None
    before: Version | None = (
        None  # the engine's release; of several alike the lowest above it holds
    )
    times: dict[str, PositiveFloat] = Field(default_factory=dict)
    kv_cache_dtype: str = "auto"  # what the measured recipes set where a deployment leaves it open
    spread_tpot: PositiveFloat = 1.0  # of a generation's errors, against those of all
    spread_ttft: PositiveFloat = 1.0
    spread_output_tps: PositiveFloat = 1.0
    points: int = 0  # that were measured of a pair, and
    curves: int = 0  # how many loads, of a layout each, those are at several concurrencies or rates
    versions: tuple[Version, ...] = ()


class ErrorWidths(StrictEntry):
    """Standard deviations of ln(measured / predicted) on what was held back as a whole."""

    curve: PositiveFloat  # a load that was not measured, of a pair that was
    pair: PositiveFloat  # a model, in its number format, that was measured on other GPUs only
    model: PositiveFloat  # one of a kind that was not measured
    gpu: PositiveFloat
    version: PositiveFloat  # a release apart from all measured ones


class LoadErrorWidths(ErrorWidths):
    """Those that tell loads of pairs apart."""

    # a load that was not measured, of a pair of which many were; `curve` is of the other pairs
    many: PositiveFloat


class CommonCalibration(SourcedEntry):
    """What all effects of a calibration catalog start from."""

    coefficients: dict[str, PositiveFloat]
    sigma_tpot: LoadErrorWidths
    sigma_ttft: LoadErrorWidths
    sigma_output_tps: ErrorWidths | None = None  # None: not measured, it is as TPOT's
