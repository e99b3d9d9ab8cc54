"""Estimate the prefix cache hit rate of a trace, with an LRU cache per engine.

The simulation finds the same request by request (within three points on Mooncake's trace). This
module serves the analytical estimate, which needs the hit rate of every candidate.
"""

from functools import lru_cache

import numpy as np
from numba import njit

from planner.simulator.compilation import CAN_CACHE_COMPILED_CODE
from planner.simulator.interruptible import make_interruptible
from planner.workload.traces import TRACE_BLOCK_TOKENS, Trace


@make_interruptible
@njit(cache=CAN_CACHE_COMPILED_CODE, nogil=True, error_model="numpy")
def _simulate_lru(
    ids: np.ndarray,
    begin: np.ndarray,
    tokens: np.ndarray,
    output: np.ndarray,
    engines: int,
    max_blocks: int,
) -> np.ndarray:
    """Return [n] cached prompt tokens of requests dealt round robin to LRU caches of `max_blocks`.

    Request i has the blocks ids[begin[i]:begin[i + 1]]. The first block of a prompt counts as used
    last, so that the end of a prompt is evicted first. Outputs take blocks too.
    """
    n, blocks = len(tokens), ids.max() + 1 if len(ids) else 0
    hits = np.zeros(n, np.int64)
    output_blocks = int(output.sum()) // TRACE_BLOCK_TOKENS + engines + 1
    for engine in range(engines):
        # a ring through the last index, whose successor is the least recently used block
        head = blocks + output_blocks
        after, before = np.full(head + 1, -1), np.full(head + 1, -1)
        after[head] = before[head] = head
        held, partial, next_output_block = 0, 0, blocks
        for i in range(engine, n, engines):
            run = 0
            while begin[i] + run < begin[i + 1] and after[ids[begin[i] + run]] >= 0:
                run += 1
            hits[i] = min(run * TRACE_BLOCK_TOKENS, tokens[i])
            partial += output[i]
            filled = partial // TRACE_BLOCK_TOKENS
            partial -= filled * TRACE_BLOCK_TOKENS
            for k in range(filled + begin[i + 1] - begin[i]):
                block = next_output_block if k < filled else ids[begin[i + 1] - 1 - (k - filled)]
                next_output_block += k < filled
                if after[block] >= 0:
                    after[before[block]], before[after[block]] = after[block], before[block]
                    held -= 1
                newest = before[head]
                after[newest] = before[head] = block
                before[block], after[block] = newest, head
                held += 1
                if held > max_blocks:
                    oldest = after[head]
                    after[head], before[after[oldest]] = after[oldest], head
                    after[oldest], held = -1, held - 1
    return hits


@lru_cache(maxsize=1024)
def compute_prefix_hit_rate(trace: Trace, engines: int, kv_tokens: int) -> float:
    """Return the fraction of prompt tokens that `engines` with `kv_tokens` each have cached."""
    ids, begin = trace.block_ids
    hits = _simulate_lru(
        ids, begin, trace.prompt, trace.output, engines, kv_tokens // TRACE_BLOCK_TOKENS
    )
    return float(hits.sum() / trace.prompt.sum())
