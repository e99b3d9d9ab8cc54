"""Estimate the memory reads that decoding sequences save by sharing prefixes.

The simulation counts which sequences share a block (`simulator.step_cost_kernels`). The analytical
estimate derives it from the trace.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from planner.engines.deployment import Deployment
from planner.latency.step_model import StepModel
from planner.workload.traces import Trace
from planner.workload.workload import Workload

L2_BANDWIDTH_FACTOR = 1.7
"""Bandwidth of a GPU's L2 cache relative to its memory: about 5.6 TB/s to 3.35 on an H100
(chipsandcheese.com, Nvidia's H100: Funny L2, and Tons of Bandwidth, 2023-07-02, the PCIe card)."""
MAX_BLOCK_SHARERS = 64
"""Sequences that share a block; more count as this many."""


def count_concurrent_readers(deployment: Deployment) -> float:
    """Return how many sequences' KV caches decoding attention reads at the same time.

    A multiprocessor reads one KV head of one sequence. Blocks that concurrent sequences share are
    then read from memory once (FlashAttention 3 on Hopper). Returns 0 if that is not known: other
    GPUs, latent attention, or layers that differ.
    """
    sequence_mixers = {layer.mixer for layer in deployment.model.architecture.layers}
    mixer = sequence_mixers.pop()
    if (
        sequence_mixers
        or not mixer
        or mixer.is_latent
        or not mixer.kv_heads
        or mixer.window
        or not deployment.gpu.multiprocessors
    ):
        return 0.0
    return deployment.gpu.multiprocessors / max(mixer.kv_heads / deployment.layout.tp, 1.0)


def subtract_shared_reads(
    step: StepModel, workload: Workload, concurrent_readers: float, max_num_seqs: int
) -> StepModel:
    """Return `step` without the reads that decoding sequences of a trace save on average.

    Each sequence is any of the trace's with equal probability.
    """
    if not (concurrent_readers and workload.trace):
        return step
    counts = np.arange(max_num_seqs + 1)
    grid = np.unique(np.geomspace(1, counts[-1], 24).astype(int))
    context = workload.prompt.mean + workload.output.mean / 2
    shared = np.minimum(
        [_estimate_shared_tokens(workload.trace, concurrent_readers, n) for n in grid.tolist()],
        grid * context * (1 - 1 / L2_BANDWIDTH_FACTOR),
    )
    saved_s = step.decode_context_s * np.interp(counts, np.append(0, grid), np.append(0.0, shared))
    return replace(step, sequences_s=step.interpolate_sequences_s(counts) - saved_s)


@lru_cache(maxsize=4096)
def _estimate_shared_tokens(trace: Trace, concurrent_readers: float, sequences: int) -> float:
    """Return the mean tokens that `sequences` of a trace share and do not each read from memory.

    The number of sequences that have a block is binomial, by the fraction of requests with the
    block. What r sharers save is as in `simulator.step_cost_kernels.count_shared_tokens`.
    """
    n, max_sharers = sequences, min(MAX_BLOCK_SHARERS - 1, sequences)
    times, blocks = np.unique(np.bincount(trace.block_ids[0]), return_counts=True)
    fraction = np.minimum(times[times > 1] / len(trace.arrival), 1 - 1e-9)[:, None]
    r = np.arange(n + 1)
    log_factorials = np.append(0.0, np.cumsum(np.log(r[1:])))
    log_probability = (
        log_factorials[n]
        - log_factorials
        - log_factorials[::-1]
        + r * np.log(fraction)
        + (n - r) * np.log1p(-fraction)
    )
    missed = np.cumprod(np.maximum(0.0, 1 - concurrent_readers / (n - np.arange(max_sharers))))
    saved = np.arange(1, max_sharers + 1) - max(1.0, n / concurrent_readers) * (1 - missed)
    saved = np.maximum(np.append(0.0, saved)[np.minimum(r, max_sharers)], 0.0) * (r > 1)
    return float(blocks[times > 1] @ (np.exp(log_probability) @ saved)) * trace.block_tokens
