"""The shape of a weight on one rank."""

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
