"""Batch sizes that the KV cache holds, their preemption risk, and the gain of more memory."""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from planner.memory.kv_cache import KvCacheLayout
from planner.memory.memory_plan import MemoryPlan
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

NUM_CONTEXT_KNOTS = 33
"""Context lengths at which blocks are counted; others are interpolated."""
_QUASI_RANDOM_POINTS = np.outer((0.8191725, 0.6710436, 0.5497005), np.arange(1, 1025)) % 1
"""1,024 points of Roberts' R3 sequence in the unit cube: prompt, output, and progress in it."""


def estimate_preemption_risk(memory: MemoryPlan, workload: Workload, sequences: int) -> float:
    """Estimate the probability that concurrent requests outgrow the KV cache at a random moment.

    Each has a prompt of the workload and is at a random point of its output; long outputs are met
    more often than short ones. The sum of their blocks is taken as normal; shared prefixes are
    ignored.
    """
    mean, spread = _estimate_blocks_held(memory.layout, workload.prompt, workload.output)
    free = memory.pool.num_blocks - 1 - sequences * mean
    return 0.5 * math.erfc(free / max(spread * math.sqrt(sequences), 1e-9) / math.sqrt(2))


def find_safe_max_num_seqs(memory: MemoryPlan, workload: Workload, max_risk: float = 0.05) -> int:
    """Find the largest max_num_seqs with at most `max_risk` of preemption; 0 if no request fits.

    n requests hold up to n x mean + z x spread x sqrt(n) blocks with probability 1 - max_risk;
    solved for sqrt(n).
    """
    mean, spread = _estimate_blocks_held(memory.layout, workload.prompt, workload.output)
    free, margin = max(0, memory.pool.num_blocks - 1), NormalDist().inv_cdf(1 - max_risk) * spread
    root = (math.sqrt(margin**2 + 4 * mean * free) - margin) / (2 * mean)
    return math.floor(min(root**2 + 1e-9, memory.pool.max_sequences))


@lru_cache(maxsize=256)
def _estimate_blocks_held(
    layout: KvCacheLayout, prompt: LengthDistribution, output: LengthDistribution
) -> tuple[float, float]:
    """Estimate mean and standard deviation of a request's blocks at a random moment of decoding."""
    contexts, knots = _sample_contexts(prompt, output, layout.max_model_len)
    blocks = np.interp(
        contexts, knots, [layout.count_request_blocks(int(context)) for context in knots]
    )
    return float(blocks.mean()), float(blocks.std())


@lru_cache(maxsize=64)
def _sample_contexts(
    prompt: LengthDistribution, output: LengthDistribution, max_context: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sample contexts at random moments of decoding, and knots (ascending) to interpolate them."""
    prompts, outputs = prompt.values, output.values
    sampled_prompts = prompts[(_QUASI_RANDOM_POINTS[0] * len(prompts)).astype(int)]
    # weighted by length, as long outputs stay longer
    length_cdf = np.cumsum(outputs) / outputs.sum()
    sampled_outputs = outputs[np.searchsorted(length_cdf, _QUASI_RANDOM_POINTS[1])]
    contexts = np.clip(sampled_prompts + _QUASI_RANDOM_POINTS[2] * sampled_outputs, 1, max_context)
    knots = np.quantile(contexts, np.linspace(0, 1, NUM_CONTEXT_KNOTS))
    return contexts, np.unique(knots.astype(int))
