"""What a calibration is: the fitted numbers of the step cost for one GPU under one engine, and how sure they are."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pydantic import PositiveFloat

from planner.core.catalog import Entry


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
    engine: str = ""  # in an owner's file; a catalog's is named after it
    source: str
    date: str
