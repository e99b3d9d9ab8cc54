"""What decoding sequences have in common is read from memory once: how many read together, what that saves a step.

The replay counts who shares which block (`simulator.step_kernels`); the closed form takes the
trace's own shares.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from planner.engines.deployment import Deployment
from planner.latency.step_model import StepModel
from planner.models.architecture import GroupedQueryAttention
from planner.workload.traces import TRACE_BLOCK_TOKENS, Trace
from planner.workload.workload import Workload

L2_BANDWIDTH_FACTOR = 1.7
"""What a GPU's L2 cache gives in the time in which memory gives one: about 5.6 TB/s of an H100's 3.35
(chipsandcheese.com, Nvidia's H100: Funny L2, and Tons of Bandwidth, 2023-07-02, the PCIe card)."""
MAX_BLOCK_SHARERS = 64
"""Sequences that have one block: more count as so many."""


def count_concurrent_readers(deployment: Deployment) -> float:
    """Sequences whose KV cache decoding attention reads at the same time: a multiprocessor has one KV head of one.

    What several of them have in common then comes from memory once (FlashAttention 3 on Hopper). 0
    where that is not known: of other GPUs, latent attention, or layers that differ.
    """
    sequence_mixers = {layer.mixer for layer in deployment.model.architecture.layers}
    mixer = sequence_mixers.pop()
    if (
        sequence_mixers
        or not isinstance(mixer, GroupedQueryAttention)
        or mixer.window
        or not deployment.gpu.multiprocessors
    ):
        return 0.0
    return deployment.gpu.multiprocessors / max(mixer.kv_heads / deployment.layout.tp, 1.0)


def subtract_shared_reads(step: StepModel, deployment: Deployment, workload: Workload) -> StepModel:
    """`step` less what its sequences need not each read, if each of them is any of the trace's with equal chance."""
    together = count_concurrent_readers(deployment)
    if not (
        together
        and deployment.args.enable_prefix_caching
        and workload.trace
        and workload.uses_trace_prefixes
    ):
        return step
    counts = np.arange(deployment.args.max_num_seqs + 1)
    some = np.unique(np.geomspace(1, counts[-1], 24).astype(int))
    context = workload.prompt.mean + workload.output.mean / 2
    most = some * context * (1 - 1 / L2_BANDWIDTH_FACTOR)
    found = np.minimum(
        [_estimate_shared_tokens(workload.trace, together, n) for n in some.tolist()], most
    )
    saved = step.decode_context_s * np.interp(counts, np.append(0, some), np.append(0.0, found))
    return replace(step, sequences_s=step.interpolate_sequences_s(counts) - saved)


@lru_cache(maxsize=4096)
def _estimate_shared_tokens(trace: Trace, together: float, sequences: int) -> float:
    """Tokens that so many sequences of a trace have in common and do not each read, on average.

    r of n have a block with the binomial chance of its share of the requests; what they save then
    is as in `simulator.step_kernels`.
    """
    n, most = sequences, min(MAX_BLOCK_SHARERS - 1, sequences)
    times, blocks = np.unique(np.bincount(trace.block_ids[0]), return_counts=True)
    share = np.minimum(times[times > 1] / len(trace.arrival), 1 - 1e-9)[:, None]
    r = np.arange(n + 1)
    factorials = np.append(0.0, np.cumsum(np.log(r[1:])))  # their logarithms
    log = (
        factorials[n]
        - factorials
        - factorials[::-1]
        + r * np.log(share)
        + (n - r) * np.log1p(-share)
    )
    alone = np.cumprod(np.maximum(0.0, 1 - together / (n - np.arange(most))))
    saves = np.append(0.0, np.arange(1, most + 1) - max(1.0, n / together) * (1 - alone))
    saves = np.maximum(saves[np.minimum(r, most)], 0.0) * (r > 1)
    return float(blocks[times > 1] @ (np.exp(log) @ saves)) * TRACE_BLOCK_TOKENS
