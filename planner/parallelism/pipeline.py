"""Pipeline stages: their layers, and the bubble."""

from itertools import accumulate


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
