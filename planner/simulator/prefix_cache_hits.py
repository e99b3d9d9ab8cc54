"""Estimate the prefix cache hit rate of a trace or of sessions, with an LRU cache per engine.

The simulation finds the same request by request (within three points on Mooncake's trace). This
module serves the analytical estimate, which needs the hit rate of every candidate.
"""

import math
from functools import lru_cache

import numpy as np

from planner.simulator import block_pool
from planner.simulator.compilation import EntryPoint
from planner.workload.traces import Trace


def _simulate_lru(
    ids: np.ndarray,
    begin: np.ndarray,
    tokens: np.ndarray,
    output: np.ndarray,
    rows: np.ndarray,
    block_tokens: int,
    max_blocks: int,
) -> np.ndarray:
    """Return [n] cached prompt tokens of the requests `rows`, sent to one LRU cache of `max_blocks`.

    Request i has the blocks ids[begin[i]:begin[i + 1]]. The first block of a prompt counts as used
    last, so that the end of a prompt is evicted first. Outputs take blocks too.
    """
    n, blocks = len(tokens), ids.max() + 1 if len(ids) else 0
    hits = np.zeros(n, np.int64)
    # a ring through the last index, whose successor is the least recently used block
    head = blocks + int(output.sum()) // block_tokens + 1
    ring = np.full((2, head + 1), -1)
    ring[:, head] = head
    held, partial, next_output_block = 0, 0, blocks
    for i in rows:
        run = 0
        while begin[i] + run < begin[i + 1] and ring[0, ids[begin[i] + run]] >= 0:
            run += 1
        hits[i] = min(run * block_tokens, tokens[i])
        partial += output[i]
        filled = partial // block_tokens
        partial -= filled * block_tokens
        for k in range(filled + begin[i + 1] - begin[i]):
            block = next_output_block if k < filled else ids[begin[i + 1] - 1 - (k - filled)]
            next_output_block += k < filled
            if ring[0, block] >= 0:
                block_pool.remove_from_ring(ring, block)
                held -= 1
            block_pool.insert_before(ring, block, head)
            held += 1
            if held > max_blocks:
                oldest = ring[0, head]
                block_pool.remove_from_ring(ring, oldest)
                ring[0, oldest], held = -1, held - 1
    return hits


simulate_lru = EntryPoint(
    _simulate_lru, lambda: (*[np.zeros(1, np.int64)] * 5, 1, 1), (block_pool,)
)


@lru_cache(maxsize=1024)
def compute_prefix_hit_rate(trace: Trace, engines: int, kv_tokens: int) -> float:
    """Return the fraction of prompt tokens that `engines` with `kv_tokens` each have cached."""
    ids, begin = trace.block_ids
    prompt, output, size = trace.prompt, trace.unhashed_output, trace.block_tokens
    hits = tokens = 0
    for engine in range(min(engines, trace.max_sampled_engines)):
        rows = trace.select_rows(engine, engines)
        cached = simulate_lru(ids, begin, prompt, output, rows, size, kv_tokens // size)
        counted = rows[rows >= trace.num_uncounted]
        hits += int(cached[counted].sum())
        tokens += int(prompt[counted].sum())
    return hits / tokens


def estimate_prefix_hit_rate(trace: Trace, engines: int, kv_tokens: int) -> float:
    """Estimate `compute_prefix_hit_rate` between the powers of the square root of two around `kv_tokens`.

    Each candidate has a cache of its own size; a few sizes stand for all of them.
    """
    if kv_tokens < 1:
        return 0.0
    position = 2 * math.log2(kv_tokens)
    below = math.floor(position)
    ends = [compute_prefix_hit_rate(trace, engines, int(2 ** (k / 2))) for k in (below, below + 1)]
    return float(np.interp(position, (below, below + 1), ends))
