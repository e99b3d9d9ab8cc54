"""vLLM V1's scheduler, step for step, compiled: arrays in, arrays out, no Python object per request or token.

Follows vLLM 0.20.2 (v1/core/sched/scheduler.py:352, v1/core/sched/async_scheduler.py,
v1/engine/core.py:443) and, with `Rules.recent`, 0.33.0 where it differs. The KV blocks are in
`simulator.block_pool`. An engine can be stopped at any time and go on later, so that several take
turns behind one router (`simulator.router`).
"""

from typing import Any

import numpy as np

from planner.simulator import block_pool
from planner.simulator import decode_fast_path as drift
from planner.simulator import kernel_types as kinds
from planner.simulator import step_cost_kernels as step_kernels
from planner.simulator import waiting_queues as queues
from planner.simulator.block_pool import njit_allocating, njit_compiled, njit_force_inline
from planner.simulator.engine_state import (
    MAX_FAST_PATH_STEPS,
    has_windows,
    overlaps_steps,
    tracks_block_contents,
)
from planner.simulator.kernel_types import RequestBatch, StepCostTable

ROW_REQUEST, ROW_SLOT, ROW_TOKENS, ROW_CONTEXT, ROW_DRAFTED, ROW_YIELDS, ROW_PREEMPTIONS = (
    step_kernels.STEP_ROWS
)
FAST_PATH_COOLDOWN_TURNS = 16
"""Turns for which nobody drifts after all had to be awoken."""


@njit_compiled
def submit_request(
    rules: Any, traffic: RequestBatch, fates: Any, e: Any, i: int, at: float
) -> None:
    """Request `i` is sent to the engine, whose scheduler sees it when the front end is through with it.

    That takes by the tokens of its prompt that are not cached by then, as `prompt_token_s` was
    fitted to.
    """
    fates.sent[i], fresh, size = at, int(traffic.prompt[i]), rules.groups[0, 1]
    if traffic.prompt_token_s and tracks_block_contents(rules, traffic):
        content, most = traffic.content[traffic.content_start[i] :], (fresh - 1) // size
        hit = block_pool.find_longest_cached_prefix(e.pool, content, most, rules.groups)
        more = block_pool.count_host_hits(e.pool, content, hit, most) if rules.host_blocks else 0
        fresh -= (hit + more) * size
    e.state[0].soonest = queues.push_request(
        e.coming, at + traffic.request_s + traffic.prompt_token_s * fresh, i
    )


@njit_force_inline
def _receive_requests(rules: Any, traffic: Any, fates: Any, e: Any, until: float) -> float:
    """Send what is to be sent by now, and queue what has come; an idle engine waits. When the next request comes."""
    c, n = e.state[0], traffic.prompt.size
    while True:
        at = until
        while c.arrived < n and not c.fed:
            at = traffic.arrival[c.arrived]
            if traffic.concurrency and c.arrived >= traffic.concurrency:
                ended = c.arrived - traffic.concurrency
                at = max(at, fates.released[ended]) if ended < c.done else np.inf
            if at > c.now:
                break
            submit_request(rules, traffic, fates, e, c.arrived, at)
            c.arrived += 1
            at = until
        looks = (
            rules.recv_interval == 1
            or c.unseen >= rules.recv_interval
            or not (c.num_running or c.flying)
        )
        while looks and c.soonest <= c.now:
            i, c.soonest = queues.pop_request(e.coming)
            c.queued += 1
            queues.add_request(
                traffic, e, float(traffic.rank[i] if rules.priority else c.queued), i
            )
        c.unseen = 0 if looks else c.unseen
        sooner = min(at, c.soonest)
        if c.num_running or c.num_waiting or c.flying or c.now >= until:
            return sooner
        c.now = sooner


@njit_force_inline
def _allows_fast_path(rules: Any, table: Any, traffic: Any, options: Any) -> bool:
    """Whether steps in which sequences only decode are the same whoever looks at them."""
    can = options.timed and not (options.log or rules.priority or options.gauge_s > 0)
    can &= rules.num_speculative_tokens == 0 and table.stages == 1 and rules.recv_interval == 1
    can &= rules.num_lookahead_tokens == 0 and (
        rules.groups[0, 0] == 0 or not tracks_block_contents(rules, traffic)
    )
    for g in range(len(rules.groups)):
        window, size = rules.groups[g]
        can &= window < 0 or (
            size == rules.groups[0, 1]
            and (window == 0 or not tracks_block_contents(rules, traffic))
        )
    return can


@njit_force_inline
def _run_decode_only_steps(
    rules: Any, table: Any, traffic: Any, fates: Any, e: Any, sooner: float
) -> int:
    """Steps in which nobody is looked at, all at once, up to `sooner`; 0 where there is none.

    With adapters or blocks in host memory nobody drifts beyond, since the order of their use
    counts.
    """
    c, many = e.state[0], 0
    full = c.blocked or c.num_spare == 0 or c.num_waiting == 0
    whole = rules.host_blocks > 0 or traffic.adapter.size > 0
    if whole and not (c.steady and full and sooner > c.now + 2 * c.spent):
        return 0
    drift.stop_fast_path_ring(
        rules, table, fates, e, e.drift.due, len(e.request) + c.drifted % MAX_FAST_PATH_STEPS
    )
    if c.turns >= c.calm and c.num_running <= rules.max_num_batched_tokens:
        drift.start_fast_path(rules, table, traffic, fates, e)
    if full and c.awake == 0 and c.num_running:
        many = drift.run_decode_only_steps(rules, table, traffic, e, sooner)
    if whole:
        drift.stop_fast_path_ring(rules, table, fates, e, e.drift.line, len(e.request))
        c.steady = False
    return many


@njit_compiled
def _select_victim(running: Any, seated: Any, rank: Any) -> int:
    """Place in `running` of the one to preempt: the last, or with priorities the least urgent."""
    last = len(running) - 1
    for j in range(len(running) if len(rank) else 0):
        if rank[seated[running[j]]] > rank[seated[running[last]]]:
            last = j
    return last


@njit_force_inline
def _count_tokens_to_schedule(rules: Any, traffic: Any, e: Any, s: int, most: int) -> int:
    """Tokens that one who runs takes in a step, of `most`; 0 where all of them are under way, or its blocks are."""
    i, context, pending = e.request[s], e.computed[s], e.placeholders[s]
    if (pending > 0 and context + 2 - pending >= traffic.prompt[i] + traffic.output[i]) or e.ready[
        s
    ] > e.state[0].now:
        return 0  # the step under way yields its last token
    return max(
        0,
        min(e.known[s] + e.drafts[s] + pending - context, most, rules.max_model_len - 1 - context),
    )


@njit_force_inline
def _allocate_fast_path_blocks(
    rules: Any, table: Any, traffic: Any, fates: Any, e: Any, threshold: int
) -> None:
    """Those that drift take their blocks, as far as the scheduler would come to the same if it looked at them.

    Who might find none, or would have to stand in line for it, is awoken; where tokens might not
    suffice, all are.
    """
    c, seats, size, ring, crossed = (
        e.state[0],
        len(e.request),
        rules.groups[0, 1],
        e.drift.full,
        False,
    )
    left, caching = (
        rules.max_num_batched_tokens - (c.num_running - c.awake),
        tracks_block_contents(rules, traffic),
    )
    phase = c.drifted % size
    certain, lacking, last = left >= 0, e.drift.blocks[0, phase], ring[1, seats + phase]
    for s in e.running[: c.awake]:
        want = _count_tokens_to_schedule(rules, traffic, e, s, min(threshold, max(left, 0)))
        slots = e.computed[s] + want
        if want and slots > e.tables.capacity[s]:
            lacking += block_pool.count_missing_blocks(rules, e.tables, s, slots)
            crossed |= last < seats and e.drift.order[last] > e.drift.order[s]
        left -= want
        youngest = e.drift.line[1, seats]
        while left <= 0 and youngest != s and e.drift.since[youngest] < 0:
            youngest = e.drift.line[1, youngest]
        certain &= left > 0 or youngest == s  # else somebody drifts who comes after this one
    short = lacking > e.pool.free[0]
    if not certain or (short and has_windows(rules)):
        drift.stop_fast_path_ring(rules, table, fates, e, e.drift.line, seats)
        c.calm = c.turns + FAST_PATH_COOLDOWN_TURNS
    elif short or (crossed and caching):
        drift.stop_fast_path_ring(rules, table, fates, e, ring, seats + phase)
        if (
            short and caching and not overlaps_steps(rules, table)
        ):  # who is preempted fills no block
            drift.stop_fast_path_ring(rules, table, fates, e, ring, seats + (phase + 1) % size)
    drift.allocate_fast_path_blocks(rules, table, traffic, e)


@njit_force_inline
def _schedule_running(
    rules: Any, table: Any, traffic: Any, fates: Any, e: Any, batch: Any, threshold: int, halt: bool
) -> tuple[int, int, int, bool]:
    """Schedule those that run, in order of admission, and preempt where blocks lack.

    Returns scheduled and preempted requests, tokens left of the budget, and whether no chunk of a
    prompt is among them.
    """
    c = e.state[0]
    caching, windowed, size = (
        tracks_block_contents(rules, traffic),
        has_windows(rules),
        rules.groups[0, 1],
    )
    model_len, budget = (
        rules.max_model_len,
        rules.max_num_batched_tokens - (c.num_running - c.awake),
    )
    taken, victims, k = 0, 0, 0
    uniform = rules.uses_v033_scheduler and rules.num_speculative_tokens > 0
    while k < c.awake and budget > 0:
        s = e.running[k]
        i, context, pending = e.request[s], e.computed[s], e.placeholders[s]
        k += 1
        want = _count_tokens_to_schedule(rules, traffic, e, s, min(threshold, budget))
        if want == 0:
            continue
        settled = context - (e.in_flight[s] if rules.uses_v033_scheduler else 0)
        if windowed and settled >= e.tables.slides[s]:
            block_pool.free_outside_window(rules, e.pool, e.tables, s, settled)
        slots = min(context + want + rules.num_lookahead_tokens, model_len)
        lacking = (
            block_pool.count_missing_blocks(rules, e.tables, s, slots)
            if slots > e.tables.capacity[s]
            else 0
        )
        while lacking > e.pool.free[0] and e.request[s] == i and not halt:
            last = e.drift.line[1, len(e.request)]
            if e.drift.since[last] >= 0:
                drift.stop_fast_path(rules, table, fates, e, last)
                budget += 1
            place = _select_victim(e.running[: c.awake], e.request, traffic.rank)
            seat = e.running[place]
            given_back = step_kernels.remove_from_step(batch, taken, seat)
            budget += given_back
            taken -= given_back > 0
            if (
                given_back or seat == s or (rules.uses_v033_scheduler and place < k)
            ):  # 0.20.2 then skips one that it should not
                k -= 1
            e.parted[victims] = _preempt_request(rules, traffic, fates, e, place)
            victims += 1
        if e.request[s] != i:
            if rules.uses_v033_scheduler and rules.priority:
                continue
            break
        if lacking > e.pool.free[0]:
            c.stuck = -2
            break
        if lacking:
            block_pool.allocate_slots(rules, e.pool, e.tables, s, slots)
        if caching and min(context + want, e.known[s]) >= (e.tables.published[s] + 1) * size:
            own = traffic.content_start[i]
            block_pool.cache_full_blocks(
                rules, e.pool, e.tables, s, traffic.content[own:], min(context + want, e.known[s])
            )
        step_kernels.write_step_row(
            batch,
            taken,
            i,
            s,
            want,
            context,
            max(0, min(e.drafts[s], want + context - e.known[s] - pending)),
        )
        uniform &= e.drafts[s] > 0
        e.drafts[s] = 0
        taken += 1
        budget -= want
    return taken, victims, budget, uniform


@njit_compiled
def _preempt_request(rules: Any, traffic: Any, fates: Any, e: Any, place: int) -> int:
    """Put the request at `place` among the running ones back to the queue; its blocks are free."""
    c, seat = e.state[0], e.running[place]
    victim = e.request[seat]
    c.num_running -= 1
    c.awake -= 1
    for j in range(place, c.awake):
        e.running[j] = e.running[j + 1]
    fates.num_outputs[victim] = e.known[seat] - traffic.prompt[victim]
    fates.preemptions[victim] += 1
    _free_slot(rules, e, seat)
    c.front -= 1
    queues.add_request(
        traffic, e, float(traffic.rank[victim] if rules.priority else c.front), victim
    )
    return victim


@njit_force_inline
def _free_slot(rules: Any, e: Any, seat: int) -> None:
    """Free a seat and its blocks."""
    c = e.state[0]
    block_pool.free_sequence(rules, e.pool, e.tables, seat)
    drift.remove_from_ring(e.drift.line, seat)
    e.request[seat] = -1
    e.spare[c.num_spare] = seat
    c.num_spare += 1


@njit_force_inline
def _schedule_waiting(
    rules: Any, table: Any, traffic: Any, fates: Any, e: Any, batch: Any, threshold: int,
    taken: int, budget: int,
    uniform: bool,
) -> int:  # fmt: skip
    """Schedule those that wait, behind the `taken` ones; the first that does not fit stops the queue. How many now."""
    c = e.state[0]
    caching, size, spec_tokens = (
        tracks_block_contents(rules, traffic),
        rules.groups[0, 1],
        rules.num_speculative_tokens,
    )
    model_len, ran = rules.max_model_len, taken > 0
    while c.num_waiting and budget > 0 and c.num_spare > 0:
        q = queues.select_next_queue(rules, traffic, e)
        if q < 0:
            c.blocked = True
            break
        i = queues.peek_first(e.waiting, q)
        tokens, hit = np.int64(traffic.prompt[i] + fates.num_outputs[i]), 0
        content = traffic.content[traffic.content_start[i] if caching else 0 :]
        if caching:
            hit = block_pool.find_longest_cached_prefix(
                e.pool, content, (tokens - 1) // size, rules.groups
            )
        more = (
            block_pool.touch_host_hits(e.pool, content, hit, (tokens - 1) // size)
            if rules.host_blocks and caching
            else 0
        )
        context, drafted = (hit + more) * size, 0
        want = tokens - context
        if want == 1 and uniform and (ran or hit) and context + spec_tokens + 2 <= model_len:
            # 0.33 fills a new decode up with rejected drafts, or waits for room to do so
            drafted = spec_tokens
            if 1 + drafted > budget:
                break
        want = min(want + drafted, threshold)
        if want > budget and not rules.enable_chunked_prefill:
            break
        want = min(want, budget) if more == 0 else 0  # it begins when they are loaded
        slots = min(
            context + want + (rules.num_lookahead_tokens if rules.uses_v033_scheduler else 0),
            model_len,
        )
        if (
            block_pool.count_blocks_to_admit(rules, e.pool, content, hit, tokens, slots, e.cap)
            > e.pool.free[0]
        ):
            c.blocked = not (
                caching or has_windows(rules)
            )  # else what leaves a window may make room
            break
        e.heads[q] = queues.dequeue(e.waiting, q)
        c.num_waiting -= 1
        c.num_spare -= 1
        s = e.spare[c.num_spare]
        e.running[c.awake] = s
        c.awake += 1
        c.num_running += 1
        c.admitted += 1
        e.drift.order[s] = c.admitted
        drift.insert_before(e.drift.line, s, len(e.request))
        e.request[s], e.known[s], e.computed[s] = i, tokens, context
        e.placeholders[s] = e.drafts[s] = e.in_flight[s] = 0
        e.ready[s] = 0.0
        block_pool.reuse_cached_prefix(rules, e.pool, e.tables, s, content, hit)
        block_pool.allocate_slots(rules, e.pool, e.tables, s, slots)
        if caching and more == 0:
            block_pool.cache_full_blocks(
                rules, e.pool, e.tables, s, content, min(context + want, tokens)
            )
        if np.isnan(fates.scheduled[i]):
            fates.scheduled[i], fates.cached[i] = c.now, context
        if more:
            c.loaded = e.ready[s] = max(c.now, c.loaded) + more * table.host_block_s
            continue
        step_kernels.write_step_row(batch, taken, i, s, want, context, drafted)
        taken += 1
        if traffic.adapter.size:
            queues.mark_adapter_used(e, traffic.adapter[i])
        budget -= want
    return taken


@njit_compiled
def _find_next_host_load(e: Any) -> float:
    """When the next request that runs has its blocks from host memory; infinite where none waits for them."""
    c, first = e.state[0], np.inf
    for s in e.running[: c.awake]:
        first = min(first, e.ready[s] if e.ready[s] > c.now else np.inf)
    return first


@njit_force_inline
def _start_step(
    rules: Any,
    table: Any,
    traffic: Any,
    fates: Any,
    e: Any,
    batch: Any,
    turn: int,
    taken: int,
    timed: bool,
) -> tuple[int, float]:
    """Begin the step of `taken` requests: what it costs, and what it is counted in. Returns its tokens and start."""
    c, overlap, usable = e.state[0], overlaps_steps(rules, table), rules.num_blocks - 1
    for j in range(taken):
        s = batch[ROW_SLOT, j]
        e.computed[s] += batch[ROW_TOKENS, j]
        e.in_flight[s] += batch[ROW_TOKENS, j]
        batch[ROW_YIELDS, j] = (
            e.computed[s] >= e.known[s] + e.placeholders[s]
        )  # not a chunk before the last
        batch[ROW_PREEMPTIONS, j] = fates.preemptions[batch[ROW_REQUEST, j]]
        if overlap and batch[ROW_YIELDS, j]:
            e.placeholders[s] += 1 + batch[ROW_DRAFTED, j]
            e.drafts[s] = rules.num_speculative_tokens
    drifting = c.num_running - c.awake
    total, decoding, spent = step_kernels.compute_step_cost(rules, table, e, batch, taken)
    drift.begin_fast_path_step(e, drifting)
    c.unseen += 1 if decoding == taken + drifting else rules.recv_interval
    if traffic.adapter.size:
        spent += queues.compute_adapter_s(rules, table, traffic, e, batch, taken)
    c.spent = spent if timed else 1.0
    start = max(c.now, c.entry)
    c.entry = start + c.spent / table.stages
    c.end = max(start + c.spent, c.end + c.spent / table.stages)
    e.sizes[turn], e.ends[turn], e.rows[turn] = taken, c.end, c.steps
    c.flying += 1
    busy = c.entry - start
    e.usage[(usable - e.pool.free[0]) * (kinds.NUM_KV_USAGE_BINS - 1) // usable] += busy
    e.totals[0] += 1
    e.totals[1] += busy
    e.totals[2] += total
    e.totals[3] += decoding
    e.totals[4] += decoding * busy
    return total, start


@njit_allocating
def _record_gauges(rules: Any, e: Any, gauge_s: float, start: float, total: int) -> None:
    """Note what the gauges show, up to the end of the step."""
    c = e.state[0]
    while c.gauges * gauge_s < c.entry:
        on = 1.0 if c.gauges * gauge_s >= start or c.flying > 1 else 0.0  # nothing under way: idle
        used, waits = rules.num_blocks - 1 - e.pool.free[0], c.num_waiting
        e.notes.append(
            (
                kinds.NOTE_GAUGE,
                c.gauges * gauge_s,
                on * c.num_running,
                on * waits,
                on * used,
                on * total,
            )
        )
        c.gauges += 1


@njit_allocating
def _log_step(e: Any, batch: Any, taken: int, victims: int, total: int) -> None:
    """Note the step that begins: who was preempted for it, what stands around it, and who is in it."""
    c = e.state[0]
    for j in range(victims):
        e.notes.append((kinds.NOTE_PREEMPTED, float(c.steps), float(e.parted[j]), 0.0, 0.0, 0.0))
    waits, free = c.num_waiting, e.pool.free[0]
    e.notes.append(
        (kinds.NOTE_STEP, c.now, float(total), float(c.num_running), float(waits), float(free))
    )
    for j in range(taken):
        e.notes.append(
            (
                kinds.NOTE_ENTRY,
                float(c.steps),
                float(batch[ROW_REQUEST, j]),
                float(batch[ROW_TOKENS, j]),
                0.0,
                0.0,
            )
        )
    c.steps += 1


@njit_allocating
def _log_finished(e: Any, ended: int) -> None:
    """Note who ended with the oldest step under way."""
    row = e.rows[e.state[0].first]
    for j in range(ended):
        e.notes.append((kinds.NOTE_FINISHED, float(row), float(e.parted[j]), 0.0, 0.0, 0.0))


@njit_force_inline
def _process_outputs(rules: Any, table: Any, traffic: Any, fates: Any, e: Any, log: bool) -> None:
    """Take the outputs of the oldest step under way; requests that end leave."""
    c = e.state[0]
    batch, end, depth, before, gone = e.batches[c.first], e.ends[c.first], len(e.batches), c.done, 0
    caching, overlap, size = (
        tracks_block_contents(rules, traffic),
        overlaps_steps(rules, table),
        rules.groups[0, 1],
    )
    if c.flying:
        if c.awake < c.num_running:
            e.itl[step_kernels.get_itl_bin(end - c.last)] += c.num_running - c.awake
        c.last = end
    for j in range(e.sizes[c.first] if c.flying else 0):
        i, s, drafted = batch[ROW_REQUEST, j], batch[ROW_SLOT, j], batch[ROW_DRAFTED, j]
        current = e.request[s] == i and batch[ROW_PREEMPTIONS, j] == fates.preemptions[i]
        if current:
            e.in_flight[s] -= batch[ROW_TOKENS, j]
            fates.num_outputs[i] = e.known[s] - traffic.prompt[i]
        room = (
            min(traffic.output[i], rules.max_model_len - traffic.prompt[i]) - fates.num_outputs[i]
        )
        if not batch[ROW_YIELDS, j] or room == 0 or (depth > 2 and not current):
            continue  # a chunk of a prompt; ended meanwhile; put back to the queue too long ago
        kept = (
            step_kernels.sample_accepted_drafts(rules, i, fates.num_outputs[i], drafted)
            if drafted
            else 0
        )
        if fates.num_outputs[i] == 0:
            fates.first_token[i] = end
        else:
            gap = end - fates.last_token[i]
            if gap != c.last_gap:
                c.last_gap, c.last_bin = gap, step_kernels.get_itl_bin(gap)
            e.itl[c.last_bin] += 1
        fates.last_token[i] = end
        fates.num_outputs[i] += min(1 + kept, room)
        if current:
            e.known[s] = traffic.prompt[i] + fates.num_outputs[i]
            e.computed[s] -= drafted - kept
            if overlap:
                e.placeholders[s] -= 1 + drafted
            else:
                e.drafts[s] = rules.num_speculative_tokens
            if caching and (
                overlap or (rules.uses_v033_scheduler and rules.num_speculative_tokens)
            ):
                own = traffic.content_start[i]
                settled = min(
                    e.computed[s] - e.placeholders[s] - max(0, 1 + kept - room), e.known[s]
                )
                if settled >= (e.tables.published[s] + 1) * size:
                    block_pool.cache_full_blocks(
                        rules, e.pool, e.tables, s, traffic.content[own:], settled
                    )
        if 1 + kept >= room:
            if traffic.concurrency:
                fates.released[fates.ended[0]] = end
                fates.ended[0] += 1
            e.parted[c.done - before] = i
            c.done += 1
            if current:
                _free_slot(rules, e, s)
                gone += 1
            else:
                q = queues.get_queue_index(traffic, i)
                e.heads[q] = queues.remove_request(e.waiting, q, i)
                c.num_waiting -= 1
    if log:
        _log_finished(e, c.done - before)
    if gone:
        _compact_running(e)


@njit_compiled
def _compact_running(e: Any) -> None:
    """Take seats that are free out of the running ones."""
    c, stay = e.state[0], 0
    for j in range(c.awake):
        if e.request[e.running[j]] >= 0:
            e.running[stay] = e.running[j]
            stay += 1
    c.num_running -= c.awake - stay
    c.awake, c.steady, c.blocked = stay, False, False


@njit_compiled
def advance_engine(
    rules: Any,
    table: StepCostTable,
    traffic: RequestBatch,
    fates: Any,
    e: Any,
    until: float,
    options: Any,
) -> None:
    """Let an engine go on until `until`, or until all requests that are due have ended.

    Where the end of one lets another in, an engine behind a router stops there too.

    Each turn schedules a step, or ends one, or both: RECEIVE what was sent meanwhile; COAST over
    steps in which nothing changes; RUN those that run, preempting where blocks lack; ADMIT those
    that wait; CLOCK the step; take the OUTPUTS of the oldest step under way. i is a request, s its
    seat, j a place in a step.
    """
    # no comprehensions in here: numba 0.68 then drops writes to fields of named tuples as dead code
    c, depth = e.state[0], len(e.batches)
    timed, log, gauge_s = options.timed, options.log, options.gauge_s
    can_drift, before = _allows_fast_path(rules, table, traffic, options), c.done
    while c.done < c.due and c.now < until:
        sooner = _receive_requests(rules, traffic, fates, e, until)
        if c.now >= until:
            break
        if can_drift and _run_decode_only_steps(rules, table, traffic, fates, e, sooner):
            continue
        threshold, turn = rules.long_prefill_token_threshold, (c.first + c.flying) % depth
        if threshold == 0 or (rules.uses_v033_scheduler and c.num_running + c.num_waiting <= 1):
            threshold = rules.max_model_len
        batch, c.blocked = e.batches[turn], False
        c.turns += 1
        c.active = 0
        if c.awake < c.num_running:
            _allocate_fast_path_blocks(rules, table, traffic, fates, e, threshold)
        taken, victims, budget, uniform = _schedule_running(
            rules, table, traffic, fates, e, batch, threshold, options.stop_at_first_preemption
        )
        if c.stuck == -2:
            break
        for j in range(taken if traffic.adapter.size else 0):
            queues.mark_adapter_used(e, traffic.adapter[batch[ROW_REQUEST, j]])
        if victims == 0:
            taken = _schedule_waiting(
                rules, table, traffic, fates, e, batch, threshold, taken, budget, uniform
            )
        if taken or c.awake < c.num_running:
            total, start = _start_step(rules, table, traffic, fates, e, batch, turn, taken, timed)
            if gauge_s > 0:
                _record_gauges(rules, e, gauge_s, start, total)
            if log:
                _log_step(e, batch, taken, victims, total)
            c.steady = total == taken == c.num_running
        elif c.flying == victims == 0 and _find_next_host_load(e) < np.inf:
            c.now = min(_find_next_host_load(e), sooner if sooner > c.now else np.inf)
            continue
        elif c.flying == victims == 0:
            c.stuck = (
                queues.peek_first(e.waiting, np.argmin(e.heads))
                if c.num_waiting
                else e.request[e.running[0]]
            )
            break
        if not timed:
            c.now += 1
        if taken and c.flying < depth:
            continue
        _process_outputs(rules, table, traffic, fates, e, log)
        if c.flying:
            c.now = e.ends[c.first] if timed else c.now
            c.first, c.flying = (c.first + 1) % depth, c.flying - 1
        if c.fed and traffic.concurrency and c.done > before:
            break
