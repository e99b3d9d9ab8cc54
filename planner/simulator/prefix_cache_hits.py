"""How much of a trace's prompts replicas find in their prefix caches: each a plain LRU of the size of its KV pool.

The replay finds the same, request by request, with what runs and when (within three points on
Mooncake's trace); this is for the closed form, which asks of every candidate.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from planner.simulator.block_pool import CAN_CACHE_COMPILED_CODE
from planner.simulator.interruptible import make_interruptible
from planner.workload.traces import TRACE_BLOCK_TOKENS, Trace


@make_interruptible
@njit(cache=CAN_CACHE_COMPILED_CODE, nogil=True, error_model="numpy")
def _simulate_lru(ids: Any, begin: Any, tokens: Any, output: Any, engines: int, room: int) -> Any:
    """[n] prompt tokens that each request finds, dealt in turn to `engines` LRU caches of `room` blocks.

    A prompt is left with its first block used last, so that its end goes first; outputs take room
    as well.
    """
    n, blocks = len(tokens), ids.max() + 1 if len(ids) else 0
    hits = np.zeros(n, np.int64)
    fresh = int(output.sum()) // TRACE_BLOCK_TOKENS + engines + 1
    for engine in range(engines):
        after, before = np.full(blocks + fresh + 1, -1), np.full(blocks + fresh + 1, -1)
        ring, held, spill, mine = blocks + fresh, 0, 0, blocks
        after[ring] = before[ring] = (
            ring  # after the ring's own place comes the least recently used
        )
        for i in range(engine, n, engines):
            run = 0
            while begin[i] + run < begin[i + 1] and after[ids[begin[i] + run]] >= 0:
                run += 1
            hits[i] = min(run * TRACE_BLOCK_TOKENS, tokens[i])
            spill += output[i]
            made = spill // TRACE_BLOCK_TOKENS
            spill -= made * TRACE_BLOCK_TOKENS
            for k in range(made + begin[i + 1] - begin[i]):
                block = mine if k < made else ids[begin[i + 1] - 1 - (k - made)]
                mine += k < made
                if after[block] >= 0:
                    after[before[block]], before[after[block]] = after[block], before[block]
                    held -= 1
                after[before[ring]], before[block], after[block], before[ring] = (
                    block,
                    before[ring],
                    ring,
                    block,
                )
                held += 1
                if held > room:
                    oldest = after[ring]
                    after[ring], before[after[oldest]] = after[oldest], ring
                    after[oldest], held = -1, held - 1
    return hits


@lru_cache(maxsize=1024)
def compute_prefix_hit_rate(trace: Trace, engines: int, kv_tokens: int) -> float:
    """The share of prompt tokens that `engines`, served in turn, find in KV pools of `kv_tokens` each."""
    ids, begin = trace.block_ids
    hits = _simulate_lru(
        ids, begin, trace.prompt, trace.output, engines, kv_tokens // TRACE_BLOCK_TOKENS
    )
    return float(hits.sum() / trace.prompt.sum())
