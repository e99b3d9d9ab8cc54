"""What an engine step costs in time, compiled (see `simulator.kernel_types.StepTable`), and who is in it."""

import numpy as np

from planner.latency.shared_prefix_reads import L2_BANDWIDTH_FACTOR, MAX_BLOCK_SHARERS
from planner.simulator.block_pool import BlockPool
from planner.simulator.compilation import njit_compiled, njit_force_inline
from planner.simulator.engine_state import EngineInstance
from planner.simulator.kernel_types import (
    ITL_BINS_PER_DECADE,
    ITL_FIRST_BIN_S,
    NUM_ITL_BINS,
    EngineRules,
    StepCostTable,
)

STEP_ROWS = (
    ROW_REQUEST,
    ROW_SLOT,
    ROW_TOKENS,
    ROW_CONTEXT,
    ROW_DRAFTED,
    ROW_YIELDS,
    ROW_PREEMPTIONS,
) = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
)
"""Rows of a step's table: who, in which seat, does so many tokens after so many, of them drafted; whether it yields an
output, and how often it had been preempted when the step began."""


@njit_compiled
def _count_attention_pairs(tokens: int, context: int, window: float) -> float:
    """(query, key) pairs of a chunk of `tokens` after `context`, each query seeing `window` keys at most."""
    growing = min(tokens, max(0.0, window - context))
    return growing * (context + (growing + 1) / 2) + (tokens - growing) * window


@njit_force_inline
def _sum_step_s(
    table: StepCostTable,
    tokens: int,
    sequences: int,
    sampled: int,
    contexts: float,
    pairs: float,
    windows_s: float,
) -> float:
    """Seconds of a step, given its sums."""
    seconds = (
        table.fixed_s
        + table.state_s * sequences
        + windows_s
        + (table.prefill_step_s if pairs else 0.0)
    )
    seconds += (
        table.tokens_s[min(tokens, table.tokens_s.size - 1)]
        + table.rows_s[min(sampled, table.rows_s.size - 1)]
    )
    seconds += table.sequences_s[min(sequences, table.sequences_s.size - 1)]
    return seconds + table.decode_context_s * contexts + table.prefill_pair_s * pairs


@njit_compiled
def count_shared_tokens(
    rules: EngineRules, table: StepCostTable, pool: BlockPool, sequences: int
) -> float:
    """Tokens that decoding `sequences` have in common and do not each read from memory, on average.

    The sequences are read in n / together rounds, in each of which a block comes from memory once:
    if r of n have it, in as many as one of the r is in. The chance that none is: (n - together) / n
    x (n - 1 - together) / (n - 1) x ...
    """
    value, missed = 0.0, 1.0
    for r in range(1, min(MAX_BLOCK_SHARERS, sequences + 1) if table.concurrent_readers > 0 else 0):
        missed *= max(0.0, 1 - table.concurrent_readers / (sequences - r + 1))
        value += (
            pool.shared[r] * (r - max(1.0, sequences / table.concurrent_readers) * (1 - missed))
            if r > 1
            else 0.0
        )
    return value * rules.groups[0, 1]


@njit_force_inline
def compute_decode_s(
    table: StepCostTable, count: int, contexts: int, value: float, inside: np.ndarray
) -> float:
    """Seconds of a step in which `count` sequences decode, of which so much is `inside` the windows."""
    windows_s = 0.0
    for k in range(len(table.decode_windows)):
        windows_s += table.decode_windows[k, 1] * inside[k]
    return _sum_step_s(
        table,
        count,
        count,
        count,
        max(contexts - value, contexts / L2_BANDWIDTH_FACTOR),
        0.0,
        windows_s,
    )


@njit_force_inline
def compute_step_cost(
    rules: EngineRules, table: StepCostTable, engine: EngineInstance, batch: np.ndarray, taken: int
) -> tuple[int, int, float]:
    """Tokens, decoding sequences and seconds of a step with `taken` sequences and those that drift."""
    state, tokens_of, context_of, drafted_of = (
        engine.state[0],
        batch[ROW_TOKENS],
        batch[ROW_CONTEXT],
        batch[ROW_DRAFTED],
    )
    total = decoding = state.num_running - state.num_awake
    sampled, sequences, contexts, pairs, windows_s = (
        total + taken,
        total + taken,
        state.fast_path_context,
        0.0,
        0.0,
    )
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
                windows_s += prefill_windows[k, 1] * _count_attention_pairs(
                    tokens, context, prefill_windows[k, 0]
                )
    for k in range(len(decode_windows)):
        inside = engine.fast_path.window_tokens[0, k]
        for j in range(taken):
            if tokens_of[j] == 1 + drafted_of[j]:
                inside += min(context_of[j], decode_windows[k, 0])
        windows_s += decode_windows[k, 1] * inside
    read = max(
        contexts - count_shared_tokens(rules, table, engine.pool, decoding),
        contexts / L2_BANDWIDTH_FACTOR,
    )
    return total, decoding, _sum_step_s(table, total, sequences, sampled, read, pairs, windows_s)


@njit_compiled
def get_itl_bin(gap: float) -> int:
    """Bin of the inter-token latency histogram."""
    return min(
        int(np.log10(max(gap, ITL_FIRST_BIN_S) / ITL_FIRST_BIN_S) * ITL_BINS_PER_DECADE),
        NUM_ITL_BINS - 1,
    )


@njit_compiled
def sample_accepted_drafts(rules: EngineRules, request: int, position: int, drafted: int) -> int:
    """Drafted tokens kept: draws that depend on seed, request and position only (SplitMix64)."""
    for k in range(drafted):
        z = (
            np.uint64(rules.seed)
            + np.uint64(request) * np.uint64(0x9E3779B97F4A7C15)
            + np.uint64(position + k + 1)
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        if (z ^ (z >> np.uint64(31))) / 18446744073709551616.0 >= rules.acceptance_rate:
            return k
    return drafted


@njit_compiled
def write_step_row(
    batch: np.ndarray, j: int, request: int, seat: int, tokens: int, context: int, drafted: int
) -> None:
    """Write what a request does in a step."""
    batch[ROW_REQUEST, j], batch[ROW_SLOT, j], batch[ROW_TOKENS, j] = request, seat, tokens
    batch[ROW_CONTEXT, j], batch[ROW_DRAFTED, j] = context, drafted


@njit_compiled
def remove_from_step(batch: np.ndarray, taken: int, seat: int) -> int:
    """Take a seat out of the step being scheduled; its tokens, 0 if it had no part."""
    tokens, place = 0, taken
    for j in range(taken):
        if batch[ROW_SLOT, j] == seat:
            tokens, place = batch[ROW_TOKENS, j], j
    for j in range(place, taken - 1):
        for field in range(ROW_YIELDS):
            batch[field, j] = batch[field, j + 1]
    return tokens
