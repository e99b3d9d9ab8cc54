"""Run sequences that only decode without the scheduler: the fast path, exact and O(1) per step.

A sequence on the fast path takes one token per step, and a block whenever its last one is full. A
step does not look at these sequences; it uses sums over all of them. A sequence leaves for the step
in which something else happens to it, or may happen. Its tables are then brought up to date, and
the scheduler sees it again.
"""

import numpy as np

from planner.simulator import block_pool
from planner.simulator import step_cost_kernels as step_kernels
from planner.simulator.compilation import njit_compiled, njit_force_inline
from planner.simulator.engine_state import (
    MAX_FAST_PATH_STEPS,
    ROW_PREEMPTIONS,
    ROW_REQUEST,
    ROW_SLOT,
    ROW_YIELDS,
    EngineInstance,
    EngineState,
    RequestRecords,
    overlaps_steps,
    tracks_block_contents,
)
from planner.simulator.kernel_types import (
    NUM_KV_USAGE_BINS,
    EngineRules,
    RequestBatch,
    StepCostTable,
)


@njit_force_inline
def _count_steps_until_window_slides(
    rules: EngineRules, table: StepCostTable, engine: EngineInstance, s: int, g: int
) -> int:
    """Count steps until a block of group `g` leaves its window, from the state of the tables."""
    window, size = rules.groups[g]
    behind = overlaps_steps(rules, table) and rules.uses_v033_scheduler
    return (engine.tables.passed[s, g] + 1) * size + window - 1 - engine.num_computed[s] + behind


@njit_compiled
def _count_undisturbed_steps(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    s: int,
) -> int:
    """Count the next steps in which slot `s` certainly only decodes; 0 if there is none."""
    state, tables, i = engine.state[0], engine.tables, engine.request[s]
    context, size, overlap = (
        engine.num_computed[s],
        rules.groups[0, 1],
        overlaps_steps(rules, table),
    )
    if (
        records.last_token[i] != state.last_output
        or engine.num_tokens[s] != context + 1 - overlap
        or engine.num_placeholders[s] != overlap
    ):
        return 0
    if (
        tracks_block_contents(rules, requests)
        and context - overlap >= (tables.published[s] + 1) * size
    ):
        return 0
    # the scheduler handles a request's last step; with async scheduling it is still in flight
    steps = min(
        min(requests.prompt[i] + requests.output[i], rules.max_model_len) - 2 + overlap - context,
        MAX_FAST_PATH_STEPS - 1,
    )
    for g in range(len(rules.groups)):
        window = rules.groups[g, 0]
        if window >= 0 and not 0 <= tables.capacity[s] - context < size:
            return 0
        if window > 0:
            first = _count_steps_until_window_slides(rules, table, engine, s, g)
            steps = min(steps, 0 if first < 0 else first if first >= size else steps)
    for k in range(len(table.decode_windows)):
        rest = int(table.decode_windows[k, 0]) - context
        steps = min(steps, rest if rest > 0 else steps)
    return max(steps, 0)


@njit_compiled
def _update_fast_path_sums(
    rules: EngineRules, table: StepCostTable, engine: EngineInstance, s: int, sign: int
) -> int:
    """Add a slot to the sums of the fast path (1) or subtract it (-1).

    Returns the remainder of the steps in which it takes a block.
    """
    state, fast_path, size = engine.state[0], engine.fast_path, rules.groups[0, 1]
    entered, context = fast_path.entered[s], engine.num_computed[s]
    now = context + state.fast_path_steps - entered
    phase = (entered + engine.tables.capacity[s] - context) % size
    state.fast_path_context += sign * now
    for g in range(len(rules.groups)):
        fast_path.phase_blocks[0, phase] += sign * (rules.groups[g, 0] >= 0)
        if rules.groups[g, 0] > 0:
            first = _count_steps_until_window_slides(rules, table, engine, s, g)
            fast_path.phase_blocks[1, (entered + first) % size] += sign * (first < size)
    for k in range(len(table.decode_windows)):
        window = table.decode_windows[k, 0]
        fast_path.window_tokens[0, k] += sign * min(now, window)
        fast_path.window_tokens[1, k] += sign * (context < window)
    return phase


@njit_compiled
def start_fast_path(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
) -> None:
    """Move sequences to the fast path that decoded in the last step and will in the next ones."""
    state, fast_path, stay, num_slots = engine.state[0], engine.fast_path, 0, len(engine.request)
    batch, size = engine.batches[state.oldest], engine.batch_sizes[state.oldest]
    for j in range(size):
        i, s, steps = batch[ROW_REQUEST, j], batch[ROW_SLOT, j], 0
        if (
            engine.request[s] == i
            and fast_path.entered[s] < 0
            and batch[ROW_PREEMPTIONS, j] == records.preemptions[i]
        ):
            steps = _count_undisturbed_steps(rules, table, requests, records, engine, s)
        if steps:
            fast_path.entered[s] = state.fast_path_steps
            ring, admission = fast_path.block_rings, fast_path.admission
            end = num_slots + _update_fast_path_sums(rules, table, engine, s, 1)
            while ring[1, end] < num_slots and admission[ring[1, end]] > admission[s]:
                end = ring[1, end]
            block_pool.insert_before(ring, s, end)
            exit_step = (state.fast_path_steps + steps) % MAX_FAST_PATH_STEPS
            block_pool.insert_before(fast_path.exit_rings, s, num_slots + exit_step)
        else:
            for row in range(len(batch)):
                batch[row, stay] = batch[row, j]
            stay += 1
    engine.batch_sizes[state.oldest] = stay
    if stay < size:
        awake = 0
        for s in engine.running[: state.num_awake]:
            if fast_path.entered[s] < 0:
                engine.running[awake] = s
                awake += 1
        state.num_awake = awake


@njit_compiled
def stop_fast_path(
    rules: EngineRules,
    table: StepCostTable,
    records: RequestRecords,
    engine: EngineInstance,
    s: int,
) -> None:
    """Return slot `s` to the scheduler, with its tables as if scheduled step by step."""
    state, fast_path, tables = engine.state[0], engine.fast_path, engine.tables
    i, size = engine.request[s], rules.groups[0, 1]
    steps = state.fast_path_steps - fast_path.entered[s]
    _update_fast_path_sums(rules, table, engine, s, -1)
    # 0 if blocks have contents: then `allocate_fast_path_blocks` updates the tables in every step
    more = max(0, steps + engine.num_computed[s] - tables.capacity[s] + size - 1) // size
    tables.capacity[s] += more * size
    tables.slides[s] = 1 << 60
    for g in range(len(rules.groups)):
        window = rules.groups[g, 0]
        tables.held[s, g] += more * (window >= 0)
        if window > 0:
            first = _count_steps_until_window_slides(rules, table, engine, s, g)
            tables.passed[s, g] += max(0, steps - first + size - 1) // size
            tables.slides[s] = min(tables.slides[s], (tables.passed[s, g] + 1) * size + window - 1)
    engine.num_computed[s] += steps
    engine.num_tokens[s] += steps
    records.last_token[i] = state.last_output
    fast_path.entered[s] = -1
    block_pool.remove_from_ring(fast_path.exit_rings, s)
    block_pool.remove_from_ring(fast_path.block_rings, s)
    admission = fast_path.admission
    if overlaps_steps(rules, table):
        batch, j = engine.batches[state.oldest], engine.batch_sizes[state.oldest]
        while j > 0 and admission[batch[ROW_SLOT, j - 1]] > admission[s]:
            for row in range(len(batch)):
                batch[row, j] = batch[row, j - 1]
            j -= 1
        engine.tokens_in_flight[s] = 1
        step_kernels.write_step_row(batch, j, i, s, 1, engine.num_computed[s] - 1, 0)
        batch[ROW_YIELDS, j], batch[ROW_PREEMPTIONS, j] = 1, records.preemptions[i]
        engine.batch_sizes[state.oldest] += 1
    k = state.num_awake
    while k > 0 and admission[engine.running[k - 1]] > admission[s]:
        engine.running[k] = engine.running[k - 1]
        k -= 1
    engine.running[k] = s
    state.num_awake += 1


@njit_compiled
def stop_fast_path_ring(
    rules: EngineRules,
    table: StepCostTable,
    records: RequestRecords,
    engine: EngineInstance,
    ring: np.ndarray,
    end: int,
) -> None:
    """Return all slots of a ring that are on the fast path to the scheduler, in order."""
    s = ring[0, end]
    while s != end:
        following = ring[0, s]
        if engine.fast_path.entered[s] >= 0:
            stop_fast_path(rules, table, records, engine, s)
        s = following


@njit_compiled
def allocate_fast_path_blocks(
    rules: EngineRules, table: StepCostTable, requests: RequestBatch, engine: EngineInstance
) -> None:
    """Allocate the blocks of the fast path for the next step, and free those outside windows.

    If blocks have contents, allocation is in order of admission, and the blocks that the step fills
    enter the prefix cache (with async scheduling: those that the last step filled).
    """
    ring, pool, tables = engine.fast_path.block_rings, engine.pool, engine.tables
    num_slots, size = len(engine.request), rules.groups[0, 1]
    phase = engine.state[0].fast_path_steps % size
    if not tracks_block_contents(rules, requests):
        blocks = engine.fast_path.phase_blocks
        pool.free[0] += blocks[1, phase] - blocks[0, phase]
        return
    s = ring[0, num_slots + phase]
    while s < num_slots:
        tables.capacity[s] += size
        for g in range(len(rules.groups)):
            if rules.groups[g, 0] == 0:
                tables.blocks[s, g, tables.held[s, g]] = block_pool.take_free_block(pool)
                tables.held[s, g] += 1
        s = ring[0, s]
    overlap = overlaps_steps(rules, table)
    s = ring[0, num_slots + (phase + 1 - overlap) % size]
    while s < num_slots:
        tokens = tables.capacity[s] - overlap * size
        block_pool.cache_full_blocks(rules, requests, pool, tables, s, engine.request[s], tokens)
        s = ring[0, s]


@njit_force_inline
def begin_fast_path_step(state: EngineState, window_tokens: np.ndarray, sequences: int) -> None:
    """Advance the sums of the fast path, which has this many sequences, by one step."""
    state.fast_path_steps += 1
    state.fast_path_context += sequences
    for k in range(window_tokens.shape[1]):
        window_tokens[0, k] += window_tokens[1, k]


@njit_compiled
def run_decode_only_steps(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    engine: EngineInstance,
    until: float,
) -> int:
    """Run steps up to `until` while all sequences stay on the fast path; return their number.

    It stops before a step in which a sequence leaves or blocks run out. The result is exactly that
    of the scheduler, at O(1) per step.
    """
    state, fast_path, free = engine.state[0], engine.fast_path, engine.pool.free
    num_slots, size = len(engine.request), rules.groups[0, 1]
    count, usable, overlap = state.num_running, rules.num_blocks - 1, overlaps_steps(rules, table)
    usage, totals, before = engine.usage, engine.totals, state.fast_path_steps
    now, next_start, last_end = state.now, state.next_start, state.last_end
    last_output, oldest_end = state.last_output, engine.batch_ends[state.oldest]
    shared = step_kernels.count_shared_tokens(rules, table, engine.pool.shared, count)
    while now < until:
        end = num_slots + state.fast_path_steps % MAX_FAST_PATH_STEPS
        if (
            fast_path.exit_rings[0, end] != end
            or fast_path.phase_blocks[0, state.fast_path_steps % size] > free[0]
        ):
            break
        allocate_fast_path_blocks(rules, table, requests, engine)
        seconds = (
            step_kernels.compute_decode_s(
                table, count, state.fast_path_context, shared, fast_path.window_tokens[0]
            )
            + state.adapters_s
        )
        start = max(now, next_start)
        next_start, last_end = start + seconds, max(start + seconds, last_end + seconds)
        now, oldest_end = (oldest_end, last_end) if overlap else (last_end, last_end)
        usage[(usable - free[0]) * (NUM_KV_USAGE_BINS - 1) // usable] += next_start - start
        totals[1] += next_start - start
        totals[4] += count * (next_start - start)
        engine.itl[step_kernels.get_itl_bin(now - last_output)] += count
        last_output = now
        begin_fast_path_step(state, fast_path.window_tokens, count)
    steps = state.fast_path_steps - before
    totals[0] += steps
    totals[2] += steps * count
    totals[3] += steps * count
    state.now, state.next_start, state.last_end = now, next_start, last_end
    state.last_output, engine.batch_ends[state.oldest] = last_output, oldest_end
    return steps
