"""Bytes of weights as vLLM holds them: per tensor-, pipeline- and expert-parallel rank, quantized as stored.

Sharding follows vLLM 0.33.0's layers: linear.py, vocab_parallel_embedding.py, fused_moe/layer.py, distributed/utils.py.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from planner.architecture import Layer, Weight
from planner.deployment import Deployment, ParallelLayout
from planner.models import Model

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it splits it (vocab_parallel_embedding.py)."""


def rank_shape(weight: Weight, layout: ParallelLayout) -> tuple[int, int, int]:
    """(rows, columns, copies) of `weight` on the fullest rank."""
    tp, rows, cols, copies = layout.tp, weight.rows, weight.cols, weight.copies
    if weight.part == "routed_experts":
        if layout.ep > 1:
            return rows, cols, ceil(copies / layout.ep)
        tp *= layout.dp
    if weight.shard == "column":
        rows = ceil(rows / tp)
    elif weight.shard == "row":
        cols = ceil(cols / tp)
    elif weight.shard == "kv":
        rows = rows // weight.units * max(1, weight.units // tp)
    elif weight.shard == "vocab":
        rows = ceil(rows / VOCAB_PADDING) * VOCAB_PADDING // tp
    return rows, cols, copies


def _tiled(weight: Weight, rows: int, cols: int) -> tuple[int, int]:
    """MXFP4 experts as the Marlin and TRT-LLM kernels want them: inner size to 128, hidden to 256.

    vLLM 0.33.0 fused_moe/oracle/mxfp4.py:837.
    """
    inner, outer = (0, 1) if weight.shard == "column" else (1, 0)
    shape = [rows, cols]
    shape[inner], shape[outer] = ceil(shape[inner] / 128) * 128, ceil(shape[outer] / 256) * 256
    return shape[0], shape[1]


def weight_bytes(model: Model, weight: Weight, layout: ParallelLayout, prefix: str = "") -> float:
    """Bytes of `weight` on the fullest rank, in the module `prefix`."""
    rows, cols, copies = rank_shape(weight, layout)
    scheme = model.quantization.scheme(weight, prefix)
    if scheme is not None and scheme.method == "mxfp4" and weight.part == "routed_experts":
        rows, cols = _tiled(weight, rows, cols)
    if scheme is not None:
        return copies * scheme.bytes(rows, cols)
    return rows * cols * copies * (weight.bits // 8 if weight.bits else model.dtype_bytes)


@lru_cache(maxsize=4096)
def _layer_bytes(model: Model, layer: Layer, layout: ParallelLayout, prefix: str) -> float:
    return sum(weight_bytes(model, weight, layout, prefix) for weight in layer.weights)


def partition(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage: the remainder goes one each to stages counted back from the last but one.

    vLLM 0.33.0 distributed/utils.py:198, without VLLM_PP_LAYER_PARTITION.
    """
    sizes = [layers // pp] * pp
    for extra in range(layers % pp):
        sizes[-2 - extra if pp > 1 else -1] += 1
    return tuple(sizes)


def rank_bytes(deployment: Deployment) -> tuple[int, ...]:
    """Weight bytes per GPU of every pipeline stage; the fullest one decides what fits."""
    return _stages(deployment.model, deployment.layout)


@lru_cache(maxsize=4096)
def _stages(model: Model, layout: ParallelLayout) -> tuple[int, ...]:
    architecture = model.architecture
    stages, start = [], 0
    for stage, size in enumerate(partition(len(architecture.layers), layout.pp)):
        total = sum(
            _layer_bytes(model, architecture.layers[index], layout, f"layers.{index}.")
            for index in range(start, start + size)
        )
        first, last = stage == 0, stage == layout.pp - 1
        for weight in architecture.ends:
            embedding = weight.part == "embedding"
            everywhere = weight.part == "engine"
            if everywhere or (first and embedding) or (last and (not embedding or architecture.tied)):
                total += weight_bytes(model, weight, layout)
        total += sum(weight_bytes(model, weight, layout) for weight in architecture.towers)
        stages.append(round(total))
        start += size
    return tuple(stages)
