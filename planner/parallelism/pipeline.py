"""Pipeline stages: which layers each holds, and the bubble."""

from itertools import accumulate


def split_layers_into_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Where each pipeline stage begins, and the last one ends.

    The remainder goes one each to stages counted back from the last but one (vLLM 0.33.0
    distributed/utils.py:198, without VLLM_PP_LAYER_PARTITION).
    """
    sizes = [layers // pp] * pp
    for extra in range(layers % pp):
        sizes[-2 - extra] += 1
    return tuple(accumulate(sizes, initial=0))


def compute_pipeline_bubble(pp: int, microbatches: int) -> float:
    """Idle share of a pipeline of `pp` stages fed `microbatches` at a time: (pp - 1) / (pp - 1 + m), GPipe (2019)."""
    return (pp - 1) / (pp - 1 + microbatches)
