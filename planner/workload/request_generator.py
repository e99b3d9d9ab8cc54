"""Draw arrival times, and identify equal KV blocks of requests, for simulations."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from planner.core.errors import PlannerError
from planner.workload.traces import TRACE_BLOCK_TOKENS, Trace

BlockContents = tuple[np.ndarray, np.ndarray]
"""Ids of full KV blocks, and the start index of each request's.

Blocks with the same text up to their end have the same id.
"""


def sample_arrivals(n: int, rate: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Draw [n] arrival times in s as `vllm bench serve` (benchmarks/serve.py, 0.20.2:243).

    Gaps are gamma distributed with shape `burstiness` (1 = Poisson, inf = constant), then stretched
    so that the last request comes at exactly n / rate. An infinite rate sends all at once.
    """
    if not n >= 1 or not rate > 0 or not burstiness > 0:
        raise PlannerError(
            f"arrivals need n, rate and burstiness above 0, got {n}, {rate:g} and {burstiness:g}"
        )
    if math.isinf(rate):
        return np.zeros(n)
    gaps = (
        np.ones(n) if math.isinf(burstiness) else rng.gamma(burstiness, 1 / (rate * burstiness), n)
    )
    times = np.cumsum(gaps)
    return times * (n / rate / times[-1])


def _number_blocks(
    prompt: np.ndarray, output: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return full blocks and the start index of each request, and the place of each block in it."""
    full = (prompt.astype(np.int64) + output) // block_size
    start = np.concatenate(([0], full.cumsum()[:-1]))
    return full, start, np.arange(full.sum()) - np.repeat(start, full)


def build_shared_prefix_blocks(
    prompt: np.ndarray, output: np.ndarray, prefix: np.ndarray, block_size: int
) -> BlockContents:
    """Return the blocks of requests whose first `prefix` [n] tokens are one common text."""
    full, start, place = _number_blocks(prompt, output, block_size)
    common = np.minimum(prefix, prompt) // block_size
    shared = place < np.repeat(common, full)
    return np.where(shared, place, common.max() + np.cumsum(~shared)).astype(np.int32), start


def build_session_blocks(
    session: np.ndarray, system_tokens: int, prompt: np.ndarray, output: np.ndarray, block_size: int
) -> BlockContents:
    """Return the blocks of the turns of sessions, [n] each, whose numbers `session` has.

    The text of a session begins with the system prompt of all, and every turn repeats what the
    turns before it said, answers included.
    """
    full, start, place = _number_blocks(prompt, output, block_size)
    longest = np.zeros(int(session.max(initial=0)) + 1, np.int64)
    np.maximum.at(longest, session, full)
    common = system_tokens // block_size
    own = common + np.repeat((np.cumsum(longest) - longest)[session], full) + place
    return np.where(place < common, place, own).astype(np.int32), start


def build_trace_blocks(
    trace: Trace,
    request_indices: np.ndarray,
    prompt: np.ndarray,
    output: np.ndarray,
    block_size: int,
) -> BlockContents:
    """Return the blocks of the requests `request_indices` [n] of a trace with `hash_ids`.

    Each hash stands for `TRACE_BLOCK_TOKENS` of a prompt and all the text before (Mooncake's do),
    so a block is identified by its last token.
    """
    ids, begin = trace.block_ids
    full, start, place = _number_blocks(prompt, output, block_size)
    last = (place + 1) * block_size - 1
    place = np.repeat(begin[request_indices], full) + last // TRACE_BLOCK_TOKENS
    known = (last < np.repeat(prompt, full)) & (place < np.repeat(begin[request_indices + 1], full))
    content = np.cumsum(~known) - 1
    numbers = np.unique(
        ids[place[known]] * TRACE_BLOCK_TOKENS + last[known] % TRACE_BLOCK_TOKENS,
        return_inverse=True,
    )[1]
    content[known] = numbers + content[-1] + 1
    return content.astype(np.int32), start


def build_segment_blocks(
    texts: Sequence[Sequence[tuple[str, int]]], block_size: int
) -> BlockContents:
    """Return the blocks of texts, one per request, given as segments (name, tokens).

    A text covers prompt and output; segments of the same name have the same text from their start.
    """
    uses = Counter(name for text in texts for name in {name for name, _ in text})
    ids: dict[tuple[int, tuple[tuple[str, int, int], ...]], int] = {}
    parts: list[np.ndarray] = []
    next_id = 0
    for text in texts:
        num_blocks = sum(tokens for _, tokens in text) // block_size
        blocks: list[int] = []
        parent, block_pieces, free_tokens, shared = -1, [], block_size, True
        for name, tokens in text:
            offset = 0
            shared &= uses[name] > 1 or not tokens
            while offset < tokens and shared and len(blocks) < num_blocks:
                piece = min(free_tokens, tokens - offset)
                block_pieces.append((name, offset, piece))
                offset, free_tokens = offset + piece, free_tokens - piece
                if not free_tokens:
                    parent = ids.setdefault((parent, tuple(block_pieces)), next_id)
                    next_id += parent == next_id
                    blocks.append(parent)
                    block_pieces, free_tokens = [], block_size
        # blocks from the first one on that holds text of this request only
        unique = num_blocks - len(blocks)
        parts.append(
            np.concatenate((np.array(blocks, np.int64), np.arange(next_id, next_id + unique)))
        )
        next_id += unique
    start = np.concatenate(([0], np.cumsum([len(part) for part in parts])[:-1]))
    return np.concatenate(parts).astype(np.int32), start
