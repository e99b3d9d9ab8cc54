"""When requests come, and which of their KV blocks are equal: what a replay is fed with."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from planner.core.errors import PlannerError
from planner.workload.traces import TRACE_BLOCK_TOKENS, Trace

BlockContents = tuple[np.ndarray, np.ndarray]
"""Numbers of full KV blocks, equal where the text up to and in them is, and where each request's begin."""


def sample_arrivals(n: int, rate: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """[n] arrival times, s, as `vllm bench serve` draws them (vllm/benchmarks/serve.py, 0.20.2:243).

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


def sample_ramp_arrivals(
    rates: Sequence[float], seconds: float, rng: np.random.Generator
) -> np.ndarray:
    """Poisson arrivals, s, at each of `rates` (requests/s) for so many `seconds`, one after the other."""
    counts = [rng.poisson(rate * seconds) for rate in rates]
    return np.concatenate(
        [(k + np.sort(rng.random(count))) * seconds for k, count in enumerate(counts)]
    )


def build_shared_prefix_blocks(
    prompt: np.ndarray, output: np.ndarray, prefix: np.ndarray, block_size: int
) -> BlockContents:
    """Requests whose first `prefix` [n] tokens are those of one common text, and the rest their own."""
    full = (prompt.astype(np.int64) + output) // block_size
    common = np.minimum(prefix, prompt) // block_size
    start = np.concatenate(([0], full.cumsum()[:-1]))
    place = np.arange(full.sum()) - np.repeat(start, full)
    shared = place < np.repeat(common, full)
    return np.where(shared, place, common.max() + np.cumsum(~shared)).astype(np.int32), start


def build_trace_blocks(
    trace: Trace,
    request_indices: np.ndarray,
    prompt: np.ndarray,
    output: np.ndarray,
    block_size: int,
) -> BlockContents:
    """The requests `own` [n] of a trace, whose `hash_ids` say which `BLOCK` tokens of their prompts are equal.

    A hash stands for all the text up to its end (Mooncake's do), so a block is what its last token
    is.
    """
    ids, begin = trace.block_ids
    full = (prompt.astype(np.int64) + output) // block_size
    start = np.concatenate(([0], full.cumsum()[:-1]))
    last = (np.arange(full.sum()) - np.repeat(start, full) + 1) * block_size - 1
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
    """One text per request, prompt and output, as segments (name, tokens); a name is the same text from its start."""
    uses = Counter(name for text in texts for name in {name for name, _ in text})
    known: dict[tuple[int, tuple[tuple[str, int, int], ...]], int] = {}
    numbers: list[np.ndarray] = []
    fresh = 0
    for text in texts:
        left = sum(tokens for _, tokens in text) // block_size
        own: list[int] = []
        parent, pieces, room, shared = -1, [], block_size, True
        for name, tokens in text:
            offset = 0
            shared &= uses[name] > 1 or not tokens
            while offset < tokens and shared and len(own) < left:
                piece = min(room, tokens - offset)
                pieces.append((name, offset, piece))
                offset, room = offset + piece, room - piece
                if not room:
                    parent = known.setdefault((parent, tuple(pieces)), fresh)
                    fresh += parent == fresh
                    own.append(parent)
                    pieces, room = [], block_size
        alone = left - len(own)  # from the first block on that holds a text of this request only
        numbers.append(np.concatenate((np.array(own, np.int64), np.arange(fresh, fresh + alone))))
        fresh += alone
    start = np.concatenate(([0], np.cumsum([len(part) for part in numbers])[:-1]))
    return np.concatenate(numbers).astype(np.int32), start
