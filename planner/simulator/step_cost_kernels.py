"""Price a step of the engine, and keep its rows: kernels around `kernel_types.StepCostTable`."""

import numpy as np

from planner.latency.shared_prefix_reads import L2_BANDWIDTH_FACTOR, MAX_BLOCK_SHARERS
from planner.simulator.compilation import njit_compiled, njit_force_inline
from planner.simulator.engine_state import (
    ROW_CONTEXT,
    ROW_DRAFTED,
    ROW_REQUEST,
    ROW_SLOT,
    ROW_TOKENS,
    ROW_YIELDS,
    EngineInstance,
)
from planner.simulator.kernel_types import (
    ITL_BINS_PER_DECADE,
    ITL_FIRST_BIN_S,
    NUM_ITL_BINS,
    NUM_KV_USAGE_BINS,
    EngineRules,
    StepCostTable,
)


@njit_compiled
def _count_attention_pairs(tokens: int, context: int, window: float) -> float:
    """Count (query, key) pairs of `tokens` after `context`, at most `window` keys per query."""
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
    """Return the seconds of a step from its totals."""
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
    rules: EngineRules, table: StepCostTable, shared: np.ndarray, sequences: int
) -> float:
    """Return the mean context tokens that decoding `sequences` share and do not each read.

    `shared` is that of the `BlockPool`. Of n sequences, c = `concurrent_readers` are read at a
    time, in n / c rounds. A round reads a shared block from memory once. A block with r sharers is
    thus read in the rounds that include one of them. The probability that a round includes none is
    (n - c) / n x (n - 1 - c) / (n - 1) x ... with r factors.
    """
    saved, missed = 0.0, 1.0
    for r in range(1, min(MAX_BLOCK_SHARERS, sequences + 1) if table.concurrent_readers > 0 else 0):
        missed *= max(0.0, 1 - table.concurrent_readers / (sequences - r + 1))
        saved += (
            shared[r] * (r - max(1.0, sequences / table.concurrent_readers) * (1 - missed))
            if r > 1
            else 0.0
        )
    return saved * rules.groups[0, 1]


@njit_force_inline
def compute_decode_s(
    table: StepCostTable,
    count: int,
    contexts: int,
    shared_tokens: float,
    window_tokens: np.ndarray,
) -> float:
    """Return the seconds of a step in which `count` sequences decode and nothing else."""
    windows_s = 0.0
    for k in range(len(table.decode_windows)):
        windows_s += table.decode_windows[k, 1] * window_tokens[k]
    read = max(contexts - shared_tokens, contexts / L2_BANDWIDTH_FACTOR)
    return _sum_step_s(table, count, count, count, read, 0.0, windows_s)


@njit_force_inline
def compute_step_cost(
    rules: EngineRules, table: StepCostTable, engine: EngineInstance, batch: np.ndarray, taken: int
) -> tuple[int, int, float]:
    """Return tokens, decoding sequences and seconds of a step.

    It has the first `taken` sequences of `batch` and those on the fast path.
    """
    state = engine.state[0]
    tokens_of, context_of, drafted_of = batch[ROW_TOKENS], batch[ROW_CONTEXT], batch[ROW_DRAFTED]
    total = decoding = state.num_running - state.num_awake
    sampled = sequences = total + taken
    contexts, pairs, windows_s = state.fast_path_context, 0.0, 0.0
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
    shared = count_shared_tokens(rules, table, engine.pool.shared, decoding)
    read = max(contexts - shared, contexts / L2_BANDWIDTH_FACTOR)
    return total, decoding, _sum_step_s(table, total, sequences, sampled, read, pairs, windows_s)


@njit_force_inline
def start_step(
    rules: EngineRules, engine: EngineInstance, stages: int, turn: int, taken: int
) -> float:
    """Start the step that was priced, and count it; return its start.

    It is the step `turn` of those in flight, with `taken` sequences that are not on the fast path.
    """
    state, totals = engine.state[0], engine.totals
    start, stage_s = max(state.now, state.next_start), state.step_s / stages
    state.next_start = start + stage_s
    state.last_end = max(start + state.step_s, state.last_end + stage_s)
    engine.batch_sizes[turn], engine.batch_ends[turn] = taken, state.last_end
    state.num_steps_in_flight += 1
    busy_s, usable = state.next_start - start, rules.num_blocks - 1
    engine.usage[(usable - engine.pool.free[0]) * (NUM_KV_USAGE_BINS - 1) // usable] += busy_s
    totals[0] += 1
    totals[1] += busy_s
    totals[2] += state.num_step_tokens
    totals[3] += state.num_decoding
    totals[4] += state.num_decoding * busy_s
    return start


@njit_compiled
def get_itl_bin(gap_s: float) -> int:
    """Return the bin of the inter-token latency histogram."""
    return min(
        int(np.log10(max(gap_s, ITL_FIRST_BIN_S) / ITL_FIRST_BIN_S) * ITL_BINS_PER_DECADE),
        NUM_ITL_BINS - 1,
    )


@njit_compiled
def sample_accepted_drafts(rules: EngineRules, request: int, position: int, drafted: int) -> int:
    """Return how many drafted tokens are accepted.

    The random numbers depend on seed, request and position only (SplitMix64).
    """
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
    batch: np.ndarray, j: int, request: int, slot: int, tokens: int, context: int, drafted: int
) -> None:
    """Write what a request does in a step."""
    batch[ROW_REQUEST, j], batch[ROW_SLOT, j], batch[ROW_TOKENS, j] = request, slot, tokens
    batch[ROW_CONTEXT, j], batch[ROW_DRAFTED, j] = context, drafted


@njit_compiled
def remove_from_step(batch: np.ndarray, taken: int, slot: int) -> int:
    """Remove a slot from the step being scheduled; return its tokens, 0 if it has none."""
    tokens, place = 0, taken
    for j in range(taken):
        if batch[ROW_SLOT, j] == slot:
            tokens, place = batch[ROW_TOKENS, j], j
    for j in range(place, taken - 1):
        for field in range(ROW_YIELDS):
            batch[field, j] = batch[field, j + 1]
    return tokens
