"""What an engine step costs in time, compiled (see `simulator.kernel_types.StepTable`), and who is in it."""

from typing import Any

import numpy as np

from planner.latency.shared_reads import L2_TIMES, SHARERS
from planner.simulator.block_pool import compiled, inlined
from planner.simulator.kernel_types import ITL_BINS, ITL_FIRST, ITL_PER_DECADE

ROWS = REQUEST, SEAT, TOKENS, CONTEXT, DRAFTED, YIELDS, PAST = (0, 1, 2, 3, 4, 5, 6)
"""Rows of a step's table: who, in which seat, does so many tokens after so many, of them drafted; whether it yields an
output, and how often it had been preempted when the step began."""


@compiled
def _pairs(tokens: int, context: int, window: float) -> float:
    """(query, key) pairs of a chunk of `tokens` after `context`, each query seeing `window` keys at most."""
    growing = min(tokens, max(0.0, window - context))
    return growing * (context + (growing + 1) / 2) + (tokens - growing) * window


@inlined
def _price(
    table: Any, tokens: int, sequences: int, sampled: int, contexts: float, pairs: float, windows_s: float
) -> float:
    """Seconds of a step, given its sums."""
    seconds = table.fixed_s + table.state_s * sequences + windows_s + (table.prefill_step_s if pairs else 0.0)
    seconds += table.tokens_s[min(tokens, table.tokens_s.size - 1)] + table.rows_s[min(sampled, table.rows_s.size - 1)]
    seconds += table.sequences_s[min(sequences, table.sequences_s.size - 1)]
    return seconds + table.decode_context_s * contexts + table.prefill_pair_s * pairs


@compiled
def found_in_l2(rules: Any, table: Any, pool: Any, sequences: int) -> float:
    """Tokens that decoding `sequences` have in common and do not each read from memory, on average.

    The sequences are read in n / together rounds, in each of which a block comes from memory once: if r of n have it,
    in as many as one of the r is in. The chance that none is: (n - together) / n x (n - 1 - together) / (n - 1) x ...
    """
    found, missed = 0.0, 1.0
    for r in range(1, min(SHARERS, sequences + 1) if table.together > 0 else 0):
        missed *= max(0.0, 1 - table.together / (sequences - r + 1))
        found += pool.shared[r] * (r - max(1.0, sequences / table.together) * (1 - missed)) if r > 1 else 0.0
    return found * rules.groups[0, 1]


@inlined
def decoding_s(table: Any, count: int, contexts: int, found: float, inside: Any) -> float:
    """Seconds of a step in which `count` sequences decode, of which so much is `inside` the windows."""
    windows_s = 0.0
    for k in range(len(table.decode_windows)):
        windows_s += table.decode_windows[k, 1] * inside[k]
    return _price(table, count, count, count, max(contexts - found, contexts / L2_TIMES), 0.0, windows_s)


@inlined
def cost(rules: Any, table: Any, e: Any, batch: Any, taken: int) -> tuple[int, int, float]:
    """Tokens, decoding sequences and seconds of a step with `taken` sequences and those that drift."""
    c, tokens_of, context_of, drafted_of = e.state[0], batch[TOKENS], batch[CONTEXT], batch[DRAFTED]
    total = decoding = c.num_running - c.awake
    sampled, sequences, contexts, pairs, windows_s = total + taken, total + taken, c.contexts, 0.0, 0.0
    decode_windows, prefill_windows = table.decode_windows, table.prefill_windows
    for j in range(taken):
        tokens, context = tokens_of[j], context_of[j]
        total += tokens
        sampled += drafted_of[j]
        if tokens == 1 + drafted_of[j] and context > 0:
            decoding += 1
            contexts += context
        else:
            pairs += tokens * (context + (tokens + 1) / 2)
            windows_s += table.prompt_s
            for k in range(len(prefill_windows)):
                windows_s += prefill_windows[k, 1] * _pairs(tokens, context, prefill_windows[k, 0])
    for k in range(len(decode_windows)):
        inside = e.drift.inside[0, k]
        for j in range(taken):
            if tokens_of[j] == 1 + drafted_of[j]:
                inside += min(context_of[j], decode_windows[k, 0])
        windows_s += decode_windows[k, 1] * inside
    read = max(contexts - found_in_l2(rules, table, e.pool, decoding), contexts / L2_TIMES)
    return total, decoding, _price(table, total, sequences, sampled, read, pairs, windows_s)


@compiled
def itl_bin(gap: float) -> int:
    """Bin of the inter-token latency histogram."""
    return min(int(np.log10(max(gap, ITL_FIRST) / ITL_FIRST) * ITL_PER_DECADE), ITL_BINS - 1)


@compiled
def drafts_kept(rules: Any, request: int, position: int, drafted: int) -> int:
    """Drafted tokens kept: draws that depend on seed, request and position only (SplitMix64)."""
    for k in range(drafted):
        z = np.uint64(rules.seed) + np.uint64(request) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(position + k + 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        if (z ^ (z >> np.uint64(31))) / 18446744073709551616.0 >= rules.acceptance_rate:
            return k
    return drafted


@compiled
def put(batch: Any, j: int, request: int, seat: int, tokens: int, context: int, drafted: int) -> None:
    """Write what a request does in a step."""
    batch[REQUEST, j], batch[SEAT, j], batch[TOKENS, j] = request, seat, tokens
    batch[CONTEXT, j], batch[DRAFTED, j] = context, drafted


@compiled
def unschedule(batch: Any, taken: int, seat: int) -> int:
    """Take a seat out of the step being scheduled; its tokens, 0 if it had no part."""
    tokens, place = 0, taken
    for j in range(taken):
        if batch[SEAT, j] == seat:
            tokens, place = batch[TOKENS, j], j
    for j in range(place, taken - 1):
        for field in range(YIELDS):
            batch[field, j] = batch[field, j + 1]
    return tokens
