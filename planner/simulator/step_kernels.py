"""What an engine step costs in time, and many equal ones at once, compiled (see `simulator.kernel_types.StepTable`)."""

from typing import Any

import numpy as np

from planner.latency.shared_reads import L2_TIMES, SHARERS
from planner.simulator import block_pool
from planner.simulator.block_pool import allocating, compiled, inlined
from planner.simulator.kernel_types import ITL_BINS, ITL_FIRST, ITL_PER_DECADE, USAGE_BINS

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
def _found_in_l2(rules: Any, table: Any, pool: Any, sequences: int) -> float:
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
def cost(
    rules: Any, table: Any, pool: Any, taken: int, tokens_of: Any, context_of: Any, drafted_of: Any
) -> tuple[int, int, float]:
    """Tokens, decoding sequences and seconds of a step with `taken` sequences."""
    total, sampled, decoding, contexts, pairs, windows_s = 0, taken, 0, 0, 0.0, 0.0
    decode_windows, prefill_windows = table.decode_windows, table.prefill_windows
    for j in range(taken):
        tokens, context = tokens_of[j], context_of[j]
        total += tokens
        sampled += drafted_of[j]
        if tokens == 1 + drafted_of[j] and context > 0:
            decoding += 1
            contexts += context
            for k in range(len(decode_windows)):
                windows_s += decode_windows[k, 1] * min(context, decode_windows[k, 0])
        else:
            pairs += tokens * (context + (tokens + 1) / 2)
            windows_s += table.prompt_s
            for k in range(len(prefill_windows)):
                windows_s += prefill_windows[k, 1] * _pairs(tokens, context, prefill_windows[k, 0])
    read = max(contexts - _found_in_l2(rules, table, pool, decoding), contexts / L2_TIMES)
    return total, decoding, _price(table, total, taken, sampled, read, pairs, windows_s)


@compiled
def itl_bin(gap: float) -> int:
    """Bin of the inter-token latency histogram."""
    return min(int(np.log10(max(gap, ITL_FIRST) / ITL_FIRST) * ITL_PER_DECADE), ITL_BINS - 1)


@inlined
def _moved_on(
    rules: Any, pool: Any, tables: Any, running: Any, request: Any, known: Any, computed: Any, content: Any,
    content_start: Any, steps: int, overlap: bool,
) -> None:  # fmt: skip
    """Give the seats that decoded `steps` tokens their blocks, take back what left a window, publish what is full."""
    capacity, held, size, caching = tables.capacity, tables.held, rules.groups[0, 1], len(tables.blocks) > 0
    behind = overlap and rules.recent
    for s in running:
        room = capacity[s] - computed[s] - rules.num_lookahead_tokens
        more = max(0, steps - room + size - 1) // size
        capacity[s] += more * size
        tables.slides[s] = 1 << 60
        for g in range(len(rules.groups)):
            window = rules.groups[g, 0]
            for k in range(held[s, g], held[s, g] + more * (caching and window == 0)):
                tables.blocks[s, g, k] = block_pool.take(pool)
            held[s, g] += more * (window >= 0)
            if window > 0:
                first = (tables.passed[s, g] + 1) * size + window - 1 - computed[s] + behind
                tables.passed[s, g] += max(0, steps - first + size - 1) // size
                tables.slides[s] = min(tables.slides[s], (tables.passed[s, g] + 1) * size + window - 1)
        computed[s] += steps
        known[s] += steps
        if caching and computed[s] - overlap >= (tables.published[s] + 1) * size:
            block_pool.publish(rules, pool, tables, s, content[content_start[request[s]] :], computed[s] - overlap)


@allocating
def coast(
    rules: Any, table: Any, pool: Any, tables: Any, running: Any, request: Any, known: Any, computed: Any,
    placeholders: Any, prompt: Any, output: Any, last_token: Any, itl: Any, usage: Any, totals: Any,
    overlap: bool, now: float, until: float, entry: float, end: float, oldest: float, content: Any, content_start: Any,
    adapters_s: float,
) -> tuple[int, float, float, float, float]:  # fmt: skip
    """As many steps as pass until something happens, while everybody decodes: an arrival, an end, no free block.

    Exactly what the scheduler does step by step, but each step costs O(1): contexts grow by one token a sequence, and
    sequences need their next blocks in turns. Returns the number of steps (0 where not everybody decodes), `now`,
    `entry` and `end` of the last step, and the end of the `oldest` step under way.
    """
    count, size, growing, caching = len(running), rules.groups[0, 1], 0, len(tables.blocks) > 0
    for g in range(len(rules.groups)):
        window, width = rules.groups[g]
        growing += window >= 0
        if window >= 0 and (width != size or (window > 0 and caching)):
            return 0, now, entry, end, oldest
    turns, leaving = np.zeros(size, np.int64), np.zeros(size, np.int64)  # blocks taken and left behind, by step
    contexts, most, last = 0, 1 << 60, last_token[request[running[0]]]
    windows_s, grows_s = 0.0, 0.0  # of the contexts inside the windows, and by how much that grows in a step
    behind = overlap and rules.recent
    for s in running:
        i, room = request[s], tables.capacity[s] - computed[s] - rules.num_lookahead_tokens
        if last_token[i] != last or known[s] + placeholders[s] != computed[s] + 1 or placeholders[s] != overlap:
            return 0, now, entry, end, oldest
        if growing:
            if not 0 <= room < size:
                return 0, now, entry, end, oldest
            turns[room] += growing
        contexts += computed[s]
        most = min(most, min(prompt[i] + output[i], rules.max_model_len) - 1 - computed[s])
        for g in range(len(rules.groups)):
            if rules.groups[g, 0] > 0:
                first = (tables.passed[s, g] + 1) * size + rules.groups[g, 0] - 1 - computed[s] + behind
                if first < 0:
                    return 0, now, entry, end, oldest
                leaving[first % size] += first < size
                most = min(most, first if first >= size else most)
        for k in range(len(table.decode_windows)):
            window_s, rest = table.decode_windows[k, 1], int(table.decode_windows[k, 0]) - computed[s]
            windows_s += window_s * (computed[s] + min(rest, 0))
            grows_s += window_s * (rest > 0)
            most = min(most, rest if rest > 0 else most)
    most -= not overlap  # the step that ends a request is the scheduler's; with async scheduling it is still under way
    steps, taken, usable, alike = 0, 0, rules.num_blocks - 1, _price(table, count, count, count, 0.0, 0.0, adapters_s)
    found = _found_in_l2(rules, table, pool, count)
    free = pool.free
    while steps < most and now < until and turns[steps % size] <= free[0]:
        free[0] += leaving[steps % size] - turns[steps % size]
        taken += turns[steps % size]
        seconds = alike + table.decode_context_s * max(contexts - found, contexts / L2_TIMES) + windows_s
        start = max(now, entry)
        entry, end = start + seconds, max(start + seconds, end + seconds)
        now, oldest = (oldest, end) if overlap else (end, end)
        usage[(usable - free[0]) * (USAGE_BINS - 1) // usable] += entry - start
        totals[1] += entry - start
        totals[4] += count * (entry - start)
        itl[itl_bin(now - last)] += count
        last = now
        contexts += count
        windows_s += grows_s
        steps += 1
    free[0] += taken * caching  # where blocks are told apart they are taken one by one, below
    totals[0] += steps
    totals[2] += steps * count
    totals[3] += steps * count
    if steps:
        _moved_on(rules, pool, tables, running, request, known, computed, content, content_start, steps, overlap)
        for s in running:
            last_token[request[s]] = last
    return steps, now, entry, end, oldest


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
