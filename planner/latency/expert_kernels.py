"""Efficiency of fused mixture-of-experts kernels: `catalogs/calibration/experts.yaml`.

Entries are by GPU generation and number format.
"""

from functools import cache

from pydantic import PositiveFloat

from planner.core.catalog import SourcedEntry, load_catalog
from planner.engines.engine import Engine, select_entry_for_release
from planner.hardware.gpus import Gpu


class ExpertKernelEfficiency(SourcedEntry):
    """One fused-experts layer, measured in isolation."""

    memory: PositiveFloat  # of bandwidth, reading the experts that a step touches
    gemm: PositiveFloat  # of the dense peak
    padding: PositiveFloat  # rows that tiles add to each touched expert
    latency_s: PositiveFloat
    passes: PositiveFloat  # over the activations of its rows


@cache
def load_expert_kernels() -> dict[str, ExpertKernelEfficiency]:
    """Load all entries by "GENERATION FORMAT" or "GENERATION FORMAT before VERSION"."""
    return load_catalog("calibration/experts.yaml", ExpertKernelEfficiency)


@cache
def get_expert_kernel(gpu: Gpu, engine: Engine, format: str) -> ExpertKernelEfficiency:
    """Return the kernel of `engine` on `gpu`; for an unmeasured generation that of Hopper."""
    kernels, name = load_expert_kernels(), f"{gpu.kernel_generation} {format}"
    name = select_entry_for_release(name, engine, kernels) if engine.name == "vllm" else name
    near = NEAREST_FORMAT.get(format, format)
    names = name, f"{gpu.kernel_generation} {near}", f"hopper {format}", f"hopper {near}"
    return next(kernels[name] for name in names if name in kernels)


NEAREST_FORMAT = {
    "fp8": "fp8_block",
    "fp8_block": "fp8",
    "mxfp4": "int4",
    "mxfp4_fp8": "mxfp4",
    "nvfp4": "int4",
}
"""Format with the most similar kernel, for formats that were not measured."""
