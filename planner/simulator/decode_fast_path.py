"""Sequences that only decode drift: a step looks at none of them, and what it asks of all of them is kept as sums.

Who drifts takes one token in every step, and a block whenever the last one is full. It is awoken
for the step in which something else happens to it, or may: its tables are brought up to date, and
the scheduler looks at it again.
"""

import numpy as np

from planner.simulator import block_pool
from planner.simulator import step_cost_kernels as step_kernels
from planner.simulator.compilation import njit_compiled, njit_force_inline
from planner.simulator.engine_state import (
    MAX_FAST_PATH_STEPS,
    EngineInstance,
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

ROW_REQUEST, ROW_SLOT, _, _, _, ROW_YIELDS, ROW_PREEMPTIONS = step_kernels.STEP_ROWS


@njit_force_inline
def insert_before(ring: np.ndarray, node: int, end: int) -> None:
    """Put a node before `end` into a ring of (next, previous)."""
    before = ring[1, end]
    ring[0, before] = ring[1, end] = node
    ring[0, node], ring[1, node] = end, before


@njit_force_inline
def remove_from_ring(ring: np.ndarray, node: int) -> None:
    """Take a node out of its ring."""
    ring[0, ring[1, node]], ring[1, ring[0, node]] = ring[0, node], ring[1, node]


@njit_force_inline
def _count_steps_until_window_slides(
    rules: EngineRules, table: StepCostTable, engine: EngineInstance, s: int, g: int
) -> int:
    """Steps until a block of group `g` leaves its window, from where the seat's tables stand."""
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
    """Steps from the next one on in which a seat only decodes, as far as is foreseen; 0 where there is none."""
    state, i, context, size, overlap = (
        engine.state[0],
        engine.request[s],
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
        and context - overlap >= (engine.tables.published[s] + 1) * size
    ):
        return 0
    # the step that ends a request is the scheduler's; with async scheduling it is still under way
    steps = min(
        min(requests.prompt[i] + requests.output[i], rules.max_model_len) - 2 + overlap - context,
        MAX_FAST_PATH_STEPS - 1,
    )
    for g in range(len(rules.groups)):
        window = rules.groups[g, 0]
        if window >= 0 and not 0 <= engine.tables.capacity[s] - context < size:
            return 0
        if window > 0:
            first = _count_steps_until_window_slides(rules, table, engine, s, g)
            steps = min(steps, 0 if first < 0 else first if first >= size else steps)
    for k in range(len(table.decode_windows)):
        rest = int(table.decode_windows[k, 0]) - context
        steps = min(steps, rest if rest > 0 else steps)
    return max(steps, 0)


@njit_compiled
def _update_fast_path_counts(
    rules: EngineRules, table: StepCostTable, engine: EngineInstance, s: int, sign: int
) -> int:
    """Count a seat among those that drift (1), or no more (-1). The remainder of steps in which it takes a block."""
    state, fast_path, size = engine.state[0], engine.fast_path, rules.groups[0, 1]
    began, context = fast_path.entered[s], engine.num_computed[s]
    now, phase = (
        context + state.fast_path_steps - began,
        (began + engine.tables.capacity[s] - context) % size,
    )
    state.fast_path_context += sign * now
    for g in range(len(rules.groups)):
        fast_path.phase_blocks[0, phase] += sign * (rules.groups[g, 0] >= 0)
        if rules.groups[g, 0] > 0:
            first = _count_steps_until_window_slides(rules, table, engine, s, g)
            fast_path.phase_blocks[1, (began + first) % size] += sign * (first < size)
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
    """Those that decoded in the last step, and will in the next ones, drift from now on."""
    state, fast_path, stay, seats = engine.state[0], engine.fast_path, 0, len(engine.request)
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
            end = seats + _update_fast_path_counts(rules, table, engine, s, 1)
            while (
                fast_path.block_rings[1, end] < seats
                and fast_path.admission[fast_path.block_rings[1, end]] > fast_path.admission[s]
            ):
                end = fast_path.block_rings[1, end]
            insert_before(fast_path.block_rings, s, end)
            insert_before(
                fast_path.exit_rings,
                s,
                seats + (state.fast_path_steps + steps) % MAX_FAST_PATH_STEPS,
            )
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
    """A seat drifts no more: its tables stand where the scheduler would have brought them, step by step."""
    state, fast_path, tables, i, size = (
        engine.state[0],
        engine.fast_path,
        engine.tables,
        engine.request[s],
        rules.groups[0, 1],
    )
    steps = state.fast_path_steps - fast_path.entered[s]
    _update_fast_path_counts(rules, table, engine, s, -1)
    more = (
        max(0, steps + engine.num_computed[s] - tables.capacity[s] + size - 1) // size
    )  # 0 where blocks are told apart
    tables.capacity[s] += more * size
    tables.slides[s] = 1 << 60
    for g in range(len(rules.groups)):
        window = rules.groups[g, 0]
        tables.held[s, g] += more * (window >= 0)
        if window > 0:
            tables.passed[s, g] += (
                max(
                    0,
                    steps - _count_steps_until_window_slides(rules, table, engine, s, g) + size - 1,
                )
                // size
            )
            tables.slides[s] = min(tables.slides[s], (tables.passed[s, g] + 1) * size + window - 1)
    engine.num_computed[s] += steps
    engine.num_tokens[s] += steps
    records.last_token[i] = state.last_output
    fast_path.entered[s] = -1
    remove_from_ring(fast_path.exit_rings, s)
    remove_from_ring(fast_path.block_rings, s)
    if overlaps_steps(rules, table):
        batch, j = engine.batches[state.oldest], engine.batch_sizes[state.oldest]
        while j > 0 and fast_path.admission[batch[ROW_SLOT, j - 1]] > fast_path.admission[s]:
            for row in range(len(batch)):
                batch[row, j] = batch[row, j - 1]
            j -= 1
        engine.tokens_in_flight[s] = 1
        step_kernels.write_step_row(batch, j, i, s, 1, engine.num_computed[s] - 1, 0)
        batch[ROW_YIELDS, j], batch[ROW_PREEMPTIONS, j] = 1, records.preemptions[i]
        engine.batch_sizes[state.oldest] += 1
    k = state.num_awake
    while k > 0 and fast_path.admission[engine.running[k - 1]] > fast_path.admission[s]:
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
    """Awake those who drift of a ring, in its order."""
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
    """Those that drift take their blocks for the next step; what leaves a window is free then.

    Where blocks are told apart, they take them in order of admission, and those that the step fills
    (with async scheduling: that the last one filled) are made known to the cache.
    """
    full, pool, tables, seats, size = (
        engine.fast_path.block_rings,
        engine.pool,
        engine.tables,
        len(engine.request),
        rules.groups[0, 1],
    )
    phase = engine.state[0].fast_path_steps % size
    if not tracks_block_contents(rules, requests):
        pool.free[0] += (
            engine.fast_path.phase_blocks[1, phase] - engine.fast_path.phase_blocks[0, phase]
        )
        return
    s = full[0, seats + phase]
    while s < seats:
        tables.capacity[s] += size
        for g in range(len(rules.groups)):
            if rules.groups[g, 0] == 0:
                tables.blocks[s, g, tables.held[s, g]] = block_pool.take_free_block(pool)
                tables.held[s, g] += 1
        s = full[0, s]
    overlap = overlaps_steps(rules, table)
    s = full[0, seats + (phase + 1 - overlap) % size]
    while s < seats:
        content = requests.content[requests.content_start[engine.request[s]] :]
        block_pool.cache_full_blocks(
            rules, pool, tables, s, content, tables.capacity[s] - overlap * size
        )
        s = full[0, s]


@njit_force_inline
def begin_fast_path_step(engine: EngineInstance, drifting: int) -> None:
    """The next step begins for those that drift."""
    state = engine.state[0]
    state.fast_path_steps += 1
    state.fast_path_context += drifting
    for k in range(engine.fast_path.window_tokens.shape[1]):
        engine.fast_path.window_tokens[0, k] += engine.fast_path.window_tokens[1, k]


@njit_compiled
def run_decode_only_steps(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    engine: EngineInstance,
    until: float,
) -> int:
    """Steps in which everybody drifts, nobody is due and blocks suffice, up to `until`. How many.

    Exactly what the scheduler does step by step, but each costs O(1).
    """
    state, fast_path, free, seats, size = (
        engine.state[0],
        engine.fast_path,
        engine.pool.free,
        len(engine.request),
        rules.groups[0, 1],
    )
    count, usable, overlap = state.num_running, rules.num_blocks - 1, overlaps_steps(rules, table)
    usage, totals, before = engine.usage, engine.totals, state.fast_path_steps
    now, entry, end, last, oldest = (
        state.now,
        state.next_start,
        state.last_end,
        state.last_output,
        engine.batch_ends[state.oldest],
    )
    value = step_kernels.count_shared_tokens(rules, table, engine.pool, count)
    while now < until:
        bucket = seats + state.fast_path_steps % MAX_FAST_PATH_STEPS
        if (
            fast_path.exit_rings[0, bucket] != bucket
            or fast_path.phase_blocks[0, state.fast_path_steps % size] > free[0]
        ):
            break
        allocate_fast_path_blocks(rules, table, requests, engine)
        seconds = (
            step_kernels.compute_decode_s(
                table, count, state.fast_path_context, value, fast_path.window_tokens[0]
            )
            + state.adapters_s
        )
        start = max(now, entry)
        entry, end = start + seconds, max(start + seconds, end + seconds)
        now, oldest = (oldest, end) if overlap else (end, end)
        usage[(usable - free[0]) * (NUM_KV_USAGE_BINS - 1) // usable] += entry - start
        totals[1] += entry - start
        totals[4] += count * (entry - start)
        engine.itl[step_kernels.get_itl_bin(now - last)] += count
        last = now
        begin_fast_path_step(engine, count)
    steps = state.fast_path_steps - before
    totals[0] += steps
    totals[2] += steps * count
    totals[3] += steps * count
    (
        state.now,
        state.next_start,
        state.last_end,
        state.last_output,
        engine.batch_ends[state.oldest],
    ) = now, entry, end, last, oldest
    return steps
