"""What one rank has: the shape of a weight, and the layers of its pipeline stage; the bubble."""

from itertools import accumulate
from math import ceil

from planner.engines.layout import ParallelLayout
from planner.models.architecture import WeightTensor

VOCAB_PADDING_ROWS = 64
"""vLLM pads the vocabulary to a multiple of this before splitting (vocab_parallel_embedding.py)."""


def compute_shard_shape(weight: WeightTensor, layout: ParallelLayout) -> tuple[int, int, int]:
    """Compute (rows, columns, copies) of a weight on the fullest rank."""
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
        rows = rows // weight.num_shard_units * max(1, weight.num_shard_units // tp)
    elif weight.shard == "vocab":
        rows = ceil(rows / VOCAB_PADDING_ROWS) * VOCAB_PADDING_ROWS // tp
    return rows, cols, copies


def split_layers_into_stages(layers: int, pp: int) -> list[range]:
    """Split layers into stages; return the numbers of each stage's layers.

    Stages before the last, counted backwards, get one layer of the remainder each (vLLM 0.33.0
    distributed/utils.py:198, without VLLM_PP_LAYER_PARTITION).

    >>> split_layers_into_stages(34, 4)  # 8, 9, 9 and 8 layers
    [range(0, 8), range(8, 17), range(17, 26), range(26, 34)]
    """
    sizes = [layers // pp] * pp
    for extra in range(layers % pp):
        sizes[-2 - extra] += 1
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def compute_pipeline_bubble(pp: int, microbatches: int) -> float:
    """Compute the idle fraction of a pipeline: (pp - 1) / (pp - 1 + microbatches), GPipe (2019).

    >>> compute_pipeline_bubble(4, 9)
    0.25
    """
    return (pp - 1) / (pp - 1 + microbatches)
