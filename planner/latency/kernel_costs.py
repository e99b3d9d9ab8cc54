"""Price the kernels of a step: matrix products, experts and attention on a GPU under an engine.

Roofline: Williams et al. 2009. A kernel's time is a norm of its memory and its compute time, so
that both matter near the ridge. A mixture of E experts, k of which serve a token, reads
E (1 - (1 - k/E)^T) experts for T tokens.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np
from pydantic import PositiveFloat

from planner.core.catalog import SourcedEntry, load_catalog
from planner.engines.coefficients import StepCoefficients
from planner.engines.deployment import Deployment
from planner.engines.engine import Engine, select_entry_for_release
from planner.hardware.gpus import Gpu
from planner.latency.step_work import ExpertWork, MatmulWork, resolve_planned_kv_dtype
from planner.models.mixers import AttentionWork, get_kv_element_bytes

HOPPER_CLOCK_HZ = 1.98e9
"""Clock of H100 SXM, to which `kernel_s` refers.

Kernels that move little data scale with the clock: Hopper's 3.7 us of a GEMM are 5.4 on A100 (by
its clock 5.2); small kernels of Gated DeltaNet take 0.78-0.85 of Hopper's on L40S (0.79), 0.83-0.89
on RTX PRO 6000 (0.76; AIConfigurator 0.12's tables). GPUs other than NVIDIA's were not measured.
"""
GEMM_LATENCY_FRACTION = 0.4
"""Fraction of `kernel_s` that a matrix product takes in addition to its roofline.

3.7 us on H100, 5.4 on A100, 2.4 on RTX PRO 6000 (AIConfigurator 0.12's bf16 GEMM tables of vLLM
0.24 and 0.14, 2026-09, which latency + roofline fits to 8%, a norm of both to 9-15%).
"""
TRITON_ATTENTION_EFFICIENCY = {
    "grouped": (0.44, 1.0),
    "latent": (0.05, 1.0),
    "sparse": (0.5, 0.9),
    "index": (0.3, 0.5),
}
ATTENTION_EFFICIENCY: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "hopper": {"grouped": (0.44, 1.0), "latent": (0.78, 1.4), "sparse": (0.71, 1.1), "index": (0.38, 0.6)},
    "blackwell": {"grouped": (0.44, 1.0), "latent": (0.8, 1.5), "sparse": (0.5, 0.9), "index": (0.3, 0.5)},
    "ampere": TRITON_ATTENTION_EFFICIENCY, "ada": TRITON_ATTENTION_EFFICIENCY,
    "blackwell-desktop": TRITON_ATTENTION_EFFICIENCY,
    "": {"grouped": (0.44, 1.0), "latent": (0.44, 1.0), "sparse": (0.44, 0.9), "index": (0.3, 0.5)},
}  # fmt: skip
"""Efficiency of decode and prefill attention by generation and kind.

The first figure is the fraction of the dense bf16 peak that decoding reaches if it is bound by
compute, the second how prefill compares with that of grouped queries (`attention`).

Source: AIConfigurator 0.12's tables of vLLM 0.24 (2026-09). FlashMLA reaches 0.74-0.81 on Hopper
with its rows padded to 64, FlashAttention 3 0.41 over an FP8 cache; Triton's MLA, the only one on
Ampere, Ada and desktop Blackwell, 0.05 (L40S, RTX PRO 6000). Prefill with expanded latents reaches
0.87-0.96 on Hopper and Blackwell where grouped queries reach 0.58-0.66, with selected ones 0.71 and
0.4-0.5; the indexer's scores 0.25-0.4 of the FP8 peak. A latent cache in FP8 is multiplied in FP8
on Blackwell. Others have not been measured.
"""


def estimate_matmul_s(
    m: MatmulWork, tokens: np.ndarray, deployment: Deployment, c: StepCoefficients
) -> np.ndarray:
    """Estimate the seconds of a group of linears at these token counts."""
    gpu = deployment.gpu
    reached = {"fp8": c.gemm_fp8, "int8": c.gemm_fp8, "fp4": c.gemm_fp4}.get(m.dtype, c.gemm_bf16)
    if m.bits <= 8 and m.dtype in ("bf16", "fp16"):
        reached *= c.gemm_widened
    # the pace scales the whole step, but the rate never exceeds the peak
    rate = gpu.peak_flops[m.dtype] * min(reached, c.pace)
    bandwidth = gpu.memory_bandwidth * (c.memory_fp4 if m.bits < 6 else c.memory)
    read = np.full_like(tokens, m.bytes / bandwidth)
    return combine_bounds(
        read, tokens * m.flops / rate
    ) + m.kernels * c.kernel_s * GEMM_LATENCY_FRACTION * (tokens > 0)


class ExpertKernelEfficiency(SourcedEntry):
    """An entry of `catalogs/calibration/experts.yaml`: a fused-experts layer, measured in isolation."""

    memory: PositiveFloat  # of bandwidth, reading the experts that a step touches
    gemm: PositiveFloat  # of the dense peak
    padding: PositiveFloat  # rows that tiles add to each touched expert
    latency_s: PositiveFloat
    passes: PositiveFloat  # over the activations of its rows


@cache
def load_expert_kernels() -> dict[str, ExpertKernelEfficiency]:
    """Load all entries by "GENERATION FORMAT" or "GENERATION FORMAT before VERSION"."""
    return load_catalog("calibration/experts.yaml", ExpertKernelEfficiency)


NEAREST_FORMAT = {
    "fp8": "fp8_block",
    "fp8_block": "fp8",
    "mxfp4": "int4",
    "mxfp4_fp8": "mxfp4",
    "nvfp4": "int4",
}
"""Format with the most similar kernel, for formats that were not measured."""


@cache
def get_expert_kernel(gpu: Gpu, engine: Engine, format: str) -> ExpertKernelEfficiency:
    """Return the kernel of `engine` on `gpu`; for an unmeasured generation that of Hopper."""
    kernels, name = load_expert_kernels(), f"{gpu.kernel_generation} {format}"
    name = select_entry_for_release(name, engine, kernels) if engine.facts.own_constants else name
    near = NEAREST_FORMAT.get(format, format)
    names = name, f"{gpu.kernel_generation} {near}", f"hopper {format}", f"hopper {near}"
    return next(kernels[name] for name in names if name in kernels)


def estimate_expert_s(
    e: ExpertWork, tokens: np.ndarray, deployment: Deployment, c: StepCoefficients, queries: int = 1
) -> np.ndarray:
    """Estimate the fused-experts kernels of all layers: latency, norm(read, compute), activations.

    T tokens route as T^0.9 independent ones would, so they touch E (1 - (1 - k/E)^(T^0.9)) of E
    experts; the `queries` of one sequence, most of which are guesses, count as independent. The
    rows of each touched expert are padded to whole tiles. Experts are used unevenly, with a
    relative standard deviation of `EXPERT_LOAD_RELATIVE_SIGMA`: of R ranks with n experts each, the
    fullest has 1 + sigma sqrt(2 ln R / n) times the mean (the largest of R normal variables).
    """
    gpu, kernel = deployment.gpu, get_expert_kernel(deployment.gpu, deployment.engine, e.format)
    # a rank's experts see the tokens of all data-parallel ranks
    all_tokens = tokens * deployment.layout.dp
    touched = e.held * (
        1
        - (1 - e.active / e.total) ** (queries * (all_tokens / queries) ** EXPERT_ROUTING_EXPONENT)
    )
    rows = (
        all_tokens
        * e.active
        / e.ranks
        * (1 + EXPERT_LOAD_RELATIVE_SIGMA * math.sqrt(2 * math.log(e.ranks) / e.held))
    )
    read = touched * e.bytes / (gpu.memory_bandwidth * kernel.memory)
    compute = (
        (rows + touched * kernel.padding)
        * e.flops
        / (gpu.peak_flops[e.dtype] * kernel.gemm * c.expert_gemm)
    )
    moved = rows * e.row_bytes * kernel.passes / gpu.memory_bandwidth
    return e.layers * (
        kernel.latency_s * c.expert_latency * (tokens > 0) + combine_bounds(read, compute) + moved
    )


EXPERT_ROUTING_EXPONENT = 0.9
"""Exponent of the tokens that route independently, fitted to expert counts of served models."""
EXPERT_LOAD_RELATIVE_SIGMA = 0.4
"""Standard deviation of the use of an expert, relative to the mean."""


def combine_bounds(*times: np.ndarray) -> np.ndarray:
    """Return the 4-norm of bounds.

    At the ridge GEMMs take 15-20% more than either bound (AIConfigurator's GEMM tables).

    >>> round(float(combine_bounds(np.array(1.0), np.array(1.0))), 2)
    1.19
    """
    squares = np.square(np.stack(times))
    return np.sqrt(np.sqrt((squares * squares).sum(axis=0)))


def estimate_attention_s(
    contexts: Iterable[AttentionWork], deployment: Deployment, c: StepCoefficients, queries: int
) -> tuple[dict[int | None, float], dict[int | None, float]]:
    """Estimate the seconds per context token in decode, and per (query, key) pair in prefill.

    Both are by window, None for attention to the whole context. `queries` of a decoding sequence
    share one read of its cache.
    """
    gpu, generation = deployment.gpu, deployment.gpu.kernel_generation
    efficiency = ATTENTION_EFFICIENCY.get(generation, ATTENTION_EFFICIENCY[""])
    has_fp8_cache = get_kv_element_bytes(resolve_planned_kv_dtype(deployment)) == 1
    peak = gpu.peak_flops["bf16" if "bf16" in gpu.peak_flops else "fp16"]
    decode: dict[int | None, float] = {}
    prefill: dict[int | None, float] = {}
    for work in contexts:
        reached, others = efficiency[work.kind]
        in_fp8 = work.kind == "latent" and generation == "blackwell" and has_fp8_cache
        reached *= 2 if in_fp8 else 1
        multiplied = max(work.decode_flops, queries * work.query_flops) / (peak * reached)
        read = work.bytes / (gpu.memory_bandwidth * c.kv)
        seconds = float(combine_bounds(np.array(read), np.array(multiplied)))
        decode[work.window] = decode.get(work.window, 0.0) + seconds
        pair_s = work.prefill_flops / (peak * c.attention * others)
        prefill[work.window] = prefill.get(work.window, 0.0) + pair_s
    return decode, prefill
