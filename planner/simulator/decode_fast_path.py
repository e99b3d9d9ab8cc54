"""Sequences that only decode drift: a step looks at none of them, and what it asks of all of them is kept as sums.

Who drifts takes one token in every step, and a block whenever the last one is full. It is awoken
for the step in which something else happens to it, or may: its tables are brought up to date, and
the scheduler looks at it again.
"""

from typing import Any

from planner.simulator import block_pool
from planner.simulator import step_cost_kernels as step_kernels
from planner.simulator.block_pool import njit_compiled, njit_force_inline
from planner.simulator.engine_state import (
    MAX_FAST_PATH_STEPS,
    overlaps_steps,
    tracks_block_contents,
)
from planner.simulator.kernel_types import NUM_KV_USAGE_BINS

ROW_REQUEST, ROW_SLOT, _, _, _, ROW_YIELDS, ROW_PREEMPTIONS = step_kernels.STEP_ROWS


@njit_force_inline
def insert_before(ring: Any, node: int, end: int) -> None:
    """Put a node before `end` into a ring of (next, previous)."""
    before = ring[1, end]
    ring[0, before] = ring[1, end] = node
    ring[0, node], ring[1, node] = end, before


@njit_force_inline
def remove_from_ring(ring: Any, node: int) -> None:
    """Take a node out of its ring."""
    ring[0, ring[1, node]], ring[1, ring[0, node]] = ring[0, node], ring[1, node]


@njit_force_inline
def _count_steps_until_window_slides(rules: Any, table: Any, e: Any, s: int, g: int) -> int:
    """Steps until a block of group `g` leaves its window, from where the seat's tables stand."""
    window, size = rules.groups[g]
    behind = overlaps_steps(rules, table) and rules.uses_v033_scheduler
    return (e.tables.passed[s, g] + 1) * size + window - 1 - e.computed[s] + behind


@njit_compiled
def _count_undisturbed_steps(
    rules: Any, table: Any, traffic: Any, fates: Any, e: Any, s: int
) -> int:
    """Steps from the next one on in which a seat only decodes, as far as is foreseen; 0 where there is none."""
    c, i, context, size, overlap = (
        e.state[0],
        e.request[s],
        e.computed[s],
        rules.groups[0, 1],
        overlaps_steps(rules, table),
    )
    if (
        fates.last_token[i] != c.last
        or e.known[s] != context + 1 - overlap
        or e.placeholders[s] != overlap
    ):
        return 0
    if (
        tracks_block_contents(rules, traffic)
        and context - overlap >= (e.tables.published[s] + 1) * size
    ):
        return 0
    # the step that ends a request is the scheduler's; with async scheduling it is still under way
    steps = min(
        min(traffic.prompt[i] + traffic.output[i], rules.max_model_len) - 2 + overlap - context,
        MAX_FAST_PATH_STEPS - 1,
    )
    for g in range(len(rules.groups)):
        window = rules.groups[g, 0]
        if window >= 0 and not 0 <= e.tables.capacity[s] - context < size:
            return 0
        if window > 0:
            first = _count_steps_until_window_slides(rules, table, e, s, g)
            steps = min(steps, 0 if first < 0 else first if first >= size else steps)
    for k in range(len(table.decode_windows)):
        rest = int(table.decode_windows[k, 0]) - context
        steps = min(steps, rest if rest > 0 else steps)
    return max(steps, 0)


@njit_compiled
def _update_fast_path_counts(rules: Any, table: Any, e: Any, s: int, sign: int) -> int:
    """Count a seat among those that drift (1), or no more (-1). The remainder of steps in which it takes a block."""
    c, drift, size = e.state[0], e.drift, rules.groups[0, 1]
    began, context = drift.since[s], e.computed[s]
    now, phase = context + c.drifted - began, (began + e.tables.capacity[s] - context) % size
    c.contexts += sign * now
    for g in range(len(rules.groups)):
        drift.blocks[0, phase] += sign * (rules.groups[g, 0] >= 0)
        if rules.groups[g, 0] > 0:
            first = _count_steps_until_window_slides(rules, table, e, s, g)
            drift.blocks[1, (began + first) % size] += sign * (first < size)
    for k in range(len(table.decode_windows)):
        window = table.decode_windows[k, 0]
        drift.inside[0, k] += sign * min(now, window)
        drift.inside[1, k] += sign * (context < window)
    return phase


@njit_compiled
def start_fast_path(rules: Any, table: Any, traffic: Any, fates: Any, e: Any) -> None:
    """Those that decoded in the last step, and will in the next ones, drift from now on."""
    c, drift, stay, seats = e.state[0], e.drift, 0, len(e.request)
    batch, size = e.batches[c.first], e.sizes[c.first]
    for j in range(size):
        i, s, steps = batch[ROW_REQUEST, j], batch[ROW_SLOT, j], 0
        if (
            e.request[s] == i
            and drift.since[s] < 0
            and batch[ROW_PREEMPTIONS, j] == fates.preemptions[i]
        ):
            steps = _count_undisturbed_steps(rules, table, traffic, fates, e, s)
        if steps:
            drift.since[s] = c.drifted
            end = seats + _update_fast_path_counts(rules, table, e, s, 1)
            while drift.full[1, end] < seats and drift.order[drift.full[1, end]] > drift.order[s]:
                end = drift.full[1, end]
            insert_before(drift.full, s, end)
            insert_before(drift.due, s, seats + (c.drifted + steps) % MAX_FAST_PATH_STEPS)
        else:
            for row in range(len(batch)):
                batch[row, stay] = batch[row, j]
            stay += 1
    e.sizes[c.first] = stay
    if stay < size:
        awake = 0
        for s in e.running[: c.awake]:
            if drift.since[s] < 0:
                e.running[awake] = s
                awake += 1
        c.awake = awake


@njit_compiled
def stop_fast_path(rules: Any, table: Any, fates: Any, e: Any, s: int) -> None:
    """A seat drifts no more: its tables stand where the scheduler would have brought them, step by step."""
    c, drift, tables, i, size = e.state[0], e.drift, e.tables, e.request[s], rules.groups[0, 1]
    steps = c.drifted - drift.since[s]
    _update_fast_path_counts(rules, table, e, s, -1)
    more = (
        max(0, steps + e.computed[s] - tables.capacity[s] + size - 1) // size
    )  # 0 where blocks are told apart
    tables.capacity[s] += more * size
    tables.slides[s] = 1 << 60
    for g in range(len(rules.groups)):
        window = rules.groups[g, 0]
        tables.held[s, g] += more * (window >= 0)
        if window > 0:
            tables.passed[s, g] += (
                max(0, steps - _count_steps_until_window_slides(rules, table, e, s, g) + size - 1)
                // size
            )
            tables.slides[s] = min(tables.slides[s], (tables.passed[s, g] + 1) * size + window - 1)
    e.computed[s] += steps
    e.known[s] += steps
    fates.last_token[i] = c.last
    drift.since[s] = -1
    remove_from_ring(drift.due, s)
    remove_from_ring(drift.full, s)
    if overlaps_steps(rules, table):
        batch, j = e.batches[c.first], e.sizes[c.first]
        while j > 0 and drift.order[batch[ROW_SLOT, j - 1]] > drift.order[s]:
            for row in range(len(batch)):
                batch[row, j] = batch[row, j - 1]
            j -= 1
        e.in_flight[s] = 1
        step_kernels.write_step_row(batch, j, i, s, 1, e.computed[s] - 1, 0)
        batch[ROW_YIELDS, j], batch[ROW_PREEMPTIONS, j] = 1, fates.preemptions[i]
        e.sizes[c.first] += 1
    k = c.awake
    while k > 0 and drift.order[e.running[k - 1]] > drift.order[s]:
        e.running[k] = e.running[k - 1]
        k -= 1
    e.running[k] = s
    c.awake += 1


@njit_compiled
def stop_fast_path_ring(rules: Any, table: Any, fates: Any, e: Any, ring: Any, end: int) -> None:
    """Awake those who drift of a ring, in its order."""
    s = ring[0, end]
    while s != end:
        following = ring[0, s]
        if e.drift.since[s] >= 0:
            stop_fast_path(rules, table, fates, e, s)
        s = following


@njit_compiled
def allocate_fast_path_blocks(rules: Any, table: Any, traffic: Any, e: Any) -> None:
    """Those that drift take their blocks for the next step; what leaves a window is free then.

    Where blocks are told apart, they take them in order of admission, and those that the step fills
    (with async scheduling: that the last one filled) are made known to the cache.
    """
    full, pool, tables, seats, size = (
        e.drift.full,
        e.pool,
        e.tables,
        len(e.request),
        rules.groups[0, 1],
    )
    phase = e.state[0].drifted % size
    if not tracks_block_contents(rules, traffic):
        pool.free[0] += e.drift.blocks[1, phase] - e.drift.blocks[0, phase]
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
        content = traffic.content[traffic.content_start[e.request[s]] :]
        block_pool.cache_full_blocks(
            rules, pool, tables, s, content, tables.capacity[s] - overlap * size
        )
        s = full[0, s]


@njit_force_inline
def begin_fast_path_step(e: Any, drifting: int) -> None:
    """The next step begins for those that drift."""
    c = e.state[0]
    c.drifted += 1
    c.contexts += drifting
    for k in range(e.drift.inside.shape[1]):
        e.drift.inside[0, k] += e.drift.inside[1, k]


@njit_compiled
def run_decode_only_steps(rules: Any, table: Any, traffic: Any, e: Any, until: float) -> int:
    """Steps in which everybody drifts, nobody is due and blocks suffice, up to `until`. How many.

    Exactly what the scheduler does step by step, but each costs O(1).
    """
    c, drift, free, seats, size = (
        e.state[0],
        e.drift,
        e.pool.free,
        len(e.request),
        rules.groups[0, 1],
    )
    count, usable, overlap = c.num_running, rules.num_blocks - 1, overlaps_steps(rules, table)
    usage, totals, before = e.usage, e.totals, c.drifted
    now, entry, end, last, oldest = c.now, c.entry, c.end, c.last, e.ends[c.first]
    value = step_kernels.count_shared_tokens(rules, table, e.pool, count)
    while now < until:
        bucket = seats + c.drifted % MAX_FAST_PATH_STEPS
        if drift.due[0, bucket] != bucket or drift.blocks[0, c.drifted % size] > free[0]:
            break
        allocate_fast_path_blocks(rules, table, traffic, e)
        seconds = (
            step_kernels.compute_decode_s(table, count, c.contexts, value, drift.inside[0])
            + c.adapters_s
        )
        start = max(now, entry)
        entry, end = start + seconds, max(start + seconds, end + seconds)
        now, oldest = (oldest, end) if overlap else (end, end)
        usage[(usable - free[0]) * (NUM_KV_USAGE_BINS - 1) // usable] += entry - start
        totals[1] += entry - start
        totals[4] += count * (entry - start)
        e.itl[step_kernels.get_itl_bin(now - last)] += count
        last = now
        begin_fast_path_step(e, count)
    steps = c.drifted - before
    totals[0] += steps
    totals[2] += steps * count
    totals[3] += steps * count
    c.now, c.entry, c.end, c.last, e.ends[c.first] = now, entry, end, last, oldest
    return steps
