"""vLLM V1's scheduler, step for step, compiled: arrays in, arrays out, no Python object per request or token.

Follows vLLM 0.20.2 (v1/core/sched/scheduler.py:352, v1/core/sched/async_scheduler.py,
v1/engine/core.py:443) and, with `Rules.recent`, 0.33.0 where it differs. The KV blocks are in
`simulator.block_pool`. An engine can be stopped at any time and go on later, so that several take
turns behind one router (`simulator.router`).
"""

import numpy as np

from planner.simulator import block_pool
from planner.simulator import decode_fast_path as fast_path
from planner.simulator import kernel_types as kinds
from planner.simulator import step_cost_kernels as step_kernels
from planner.simulator import waiting_queues as queues
from planner.simulator.compilation import njit_allocating, njit_compiled, njit_force_inline
from planner.simulator.engine_state import (
    MAX_FAST_PATH_STEPS,
    EngineInstance,
    RequestRecords,
    has_windows,
    overlaps_steps,
    tracks_block_contents,
)
from planner.simulator.kernel_types import (
    EngineRules,
    RequestBatch,
    SimulationOptions,
    StepCostTable,
)

ROW_REQUEST, ROW_SLOT, ROW_TOKENS, ROW_CONTEXT, ROW_DRAFTED, ROW_YIELDS, ROW_PREEMPTIONS = (
    step_kernels.STEP_ROWS
)
FAST_PATH_COOLDOWN_TURNS = 16
"""Turns for which nobody drifts after all had to be awoken."""


@njit_compiled
def submit_request(
    rules: EngineRules,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    i: int,
    at: float,
) -> None:
    """Request `i` is sent to the engine, whose scheduler sees it when the front end is through with it.

    That takes by the tokens of its prompt that are not cached by then, as `prompt_token_s` was
    fitted to.
    """
    records.sent[i], fresh, size = at, int(requests.prompt[i]), rules.groups[0, 1]
    if requests.prompt_token_s and tracks_block_contents(rules, requests):
        content, most = requests.content[requests.content_start[i] :], (fresh - 1) // size
        hit = block_pool.find_longest_cached_prefix(engine.pool, content, most, rules.groups)
        more = (
            block_pool.count_host_hits(engine.pool, content, hit, most) if rules.host_blocks else 0
        )
        fresh -= (hit + more) * size
    engine.state[0].next_visible = queues.push_request(
        engine.arriving, at + requests.request_s + requests.prompt_token_s * fresh, i
    )


@njit_force_inline
def _receive_requests(
    rules: EngineRules,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    until: float,
) -> float:
    """Send what is to be sent by now, and queue what has come; an idle engine waits. When the next request comes."""
    state, n = engine.state[0], requests.prompt.size
    while True:
        at = until
        while state.num_sent < n and not state.is_routed:
            at = requests.arrival[state.num_sent]
            if requests.concurrency and state.num_sent >= requests.concurrency:
                ended = state.num_sent - requests.concurrency
                at = max(at, records.released[ended]) if ended < state.num_finished else np.inf
            if at > state.now:
                break
            submit_request(rules, requests, records, engine, state.num_sent, at)
            state.num_sent += 1
            at = until
        looks = (
            rules.recv_interval == 1
            or state.steps_since_receive >= rules.recv_interval
            or not (state.num_running or state.num_steps_in_flight)
        )
        while looks and state.next_visible <= state.now:
            i, state.next_visible = queues.pop_request(engine.arriving)
            state.back_order += 1
            queues.add_request(
                requests, engine, float(requests.rank[i] if rules.priority else state.back_order), i
            )
        state.steps_since_receive = 0 if looks else state.steps_since_receive
        sooner = min(at, state.next_visible)
        if (
            state.num_running
            or state.num_waiting
            or state.num_steps_in_flight
            or state.now >= until
        ):
            return sooner
        state.now = sooner


@njit_force_inline
def _allows_fast_path(
    rules: EngineRules, table: StepCostTable, requests: RequestBatch, options: SimulationOptions
) -> bool:
    """Whether steps in which sequences only decode are the same whoever looks at them."""
    can = options.timed and not (options.log or rules.priority or options.gauge_s > 0)
    can &= rules.num_speculative_tokens == 0 and table.stages == 1 and rules.recv_interval == 1
    can &= rules.num_lookahead_tokens == 0 and (
        rules.groups[0, 0] == 0 or not tracks_block_contents(rules, requests)
    )
    for g in range(len(rules.groups)):
        window, size = rules.groups[g]
        can &= window < 0 or (
            size == rules.groups[0, 1]
            and (window == 0 or not tracks_block_contents(rules, requests))
        )
    return can


@njit_force_inline
def _run_decode_only_steps(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    sooner: float,
) -> int:
    """Steps in which nobody is looked at, all at once, up to `sooner`; 0 where there is none.

    With adapters or blocks in host memory nobody drifts beyond, since the order of their use
    counts.
    """
    state, many = engine.state[0], 0
    full = state.is_blocked or state.num_free_slots == 0 or state.num_waiting == 0
    whole = rules.host_blocks > 0 or requests.adapter.size > 0
    if whole and not (state.is_steady and full and sooner > state.now + 2 * state.step_s):
        return 0
    fast_path.stop_fast_path_ring(
        rules,
        table,
        records,
        engine,
        engine.fast_path.exit_rings,
        len(engine.request) + state.fast_path_steps % MAX_FAST_PATH_STEPS,
    )
    if state.turn >= state.fast_path_turn and state.num_running <= rules.max_num_batched_tokens:
        fast_path.start_fast_path(rules, table, requests, records, engine)
    if full and state.num_awake == 0 and state.num_running:
        many = fast_path.run_decode_only_steps(rules, table, requests, engine, sooner)
    if whole:
        fast_path.stop_fast_path_ring(
            rules, table, records, engine, engine.fast_path.running_ring, len(engine.request)
        )
        state.is_steady = False
    return many


@njit_compiled
def _select_victim(running: np.ndarray, seated: np.ndarray, rank: np.ndarray) -> int:
    """Place in `running` of the one to preempt: the last, or with priorities the least urgent."""
    last = len(running) - 1
    for j in range(len(running) if len(rank) else 0):
        if rank[seated[running[j]]] > rank[seated[running[last]]]:
            last = j
    return last


@njit_force_inline
def _count_tokens_to_schedule(
    rules: EngineRules, requests: RequestBatch, engine: EngineInstance, s: int, most: int
) -> int:
    """Tokens that one who runs takes in a step, of `most`; 0 where all of them are under way, or its blocks are."""
    i, context, pending = engine.request[s], engine.num_computed[s], engine.num_placeholders[s]
    if (
        pending > 0 and context + 2 - pending >= requests.prompt[i] + requests.output[i]
    ) or engine.ready_at[s] > engine.state[0].now:
        return 0  # the step under way yields its last token
    return max(
        0,
        min(
            engine.num_tokens[s] + engine.num_drafts[s] + pending - context,
            most,
            rules.max_model_len - 1 - context,
        ),
    )


@njit_force_inline
def _allocate_fast_path_blocks(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    threshold: int,
) -> None:
    """Those that drift take their blocks, as far as the scheduler would come to the same if it looked at them.

    Who might find none, or would have to stand in line for it, is awoken; where tokens might not
    suffice, all are.
    """
    state, seats, size, ring, crossed = (
        engine.state[0],
        len(engine.request),
        rules.groups[0, 1],
        engine.fast_path.block_rings,
        False,
    )
    left, caching = (
        rules.max_num_batched_tokens - (state.num_running - state.num_awake),
        tracks_block_contents(rules, requests),
    )
    phase = state.fast_path_steps % size
    certain, lacking, last = (
        left >= 0,
        engine.fast_path.phase_blocks[0, phase],
        ring[1, seats + phase],
    )
    for s in engine.running[: state.num_awake]:
        want = _count_tokens_to_schedule(rules, requests, engine, s, min(threshold, max(left, 0)))
        slots = engine.num_computed[s] + want
        if want and slots > engine.tables.capacity[s]:
            lacking += block_pool.count_missing_blocks(rules, engine.tables, s, slots)
            crossed |= (
                last < seats and engine.fast_path.admission[last] > engine.fast_path.admission[s]
            )
        left -= want
        youngest = engine.fast_path.running_ring[1, seats]
        while left <= 0 and youngest != s and engine.fast_path.entered[youngest] < 0:
            youngest = engine.fast_path.running_ring[1, youngest]
        certain &= left > 0 or youngest == s  # else somebody drifts who comes after this one
    short = lacking > engine.pool.free[0]
    if not certain or (short and has_windows(rules)):
        fast_path.stop_fast_path_ring(
            rules, table, records, engine, engine.fast_path.running_ring, seats
        )
        state.fast_path_turn = state.turn + FAST_PATH_COOLDOWN_TURNS
    elif short or (crossed and caching):
        fast_path.stop_fast_path_ring(rules, table, records, engine, ring, seats + phase)
        if (
            short and caching and not overlaps_steps(rules, table)
        ):  # who is preempted fills no block
            fast_path.stop_fast_path_ring(
                rules, table, records, engine, ring, seats + (phase + 1) % size
            )
    fast_path.allocate_fast_path_blocks(rules, table, requests, engine)


@njit_force_inline
def _schedule_running(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    batch: np.ndarray,
    threshold: int,
    halt: bool,
) -> tuple[int, int, int, bool]:
    """Schedule those that run, in order of admission, and preempt where blocks lack.

    Returns scheduled and preempted requests, tokens left of the budget, and whether no chunk of a
    prompt is among them.
    """
    state = engine.state[0]
    caching, windowed, size = (
        tracks_block_contents(rules, requests),
        has_windows(rules),
        rules.groups[0, 1],
    )
    model_len, budget = (
        rules.max_model_len,
        rules.max_num_batched_tokens - (state.num_running - state.num_awake),
    )
    taken, victims, k = 0, 0, 0
    uniform = rules.uses_v033_scheduler and rules.num_speculative_tokens > 0
    while k < state.num_awake and budget > 0:
        s = engine.running[k]
        i, context, pending = engine.request[s], engine.num_computed[s], engine.num_placeholders[s]
        k += 1
        want = _count_tokens_to_schedule(rules, requests, engine, s, min(threshold, budget))
        if want == 0:
            continue
        settled = context - (engine.tokens_in_flight[s] if rules.uses_v033_scheduler else 0)
        if windowed and settled >= engine.tables.slides[s]:
            block_pool.free_outside_window(rules, engine.pool, engine.tables, s, settled)
        slots = min(context + want + rules.num_lookahead_tokens, model_len)
        lacking = (
            block_pool.count_missing_blocks(rules, engine.tables, s, slots)
            if slots > engine.tables.capacity[s]
            else 0
        )
        while lacking > engine.pool.free[0] and engine.request[s] == i and not halt:
            last = engine.fast_path.running_ring[1, len(engine.request)]
            if engine.fast_path.entered[last] >= 0:
                fast_path.stop_fast_path(rules, table, records, engine, last)
                budget += 1
            place = _select_victim(engine.running[: state.num_awake], engine.request, requests.rank)
            seat = engine.running[place]
            given_back = step_kernels.remove_from_step(batch, taken, seat)
            budget += given_back
            taken -= given_back > 0
            if (
                given_back or seat == s or (rules.uses_v033_scheduler and place < k)
            ):  # 0.20.2 then skips one that it should not
                k -= 1
            engine.leaving[victims] = _preempt_request(rules, requests, records, engine, place)
            victims += 1
        if engine.request[s] != i:
            if rules.uses_v033_scheduler and rules.priority:
                continue
            break
        if lacking > engine.pool.free[0]:
            state.stuck = -2
            break
        if lacking:
            block_pool.allocate_slots(rules, engine.pool, engine.tables, s, slots)
        if (
            caching
            and min(context + want, engine.num_tokens[s]) >= (engine.tables.published[s] + 1) * size
        ):
            own = requests.content_start[i]
            block_pool.cache_full_blocks(
                rules,
                engine.pool,
                engine.tables,
                s,
                requests.content[own:],
                min(context + want, engine.num_tokens[s]),
            )
        step_kernels.write_step_row(
            batch,
            taken,
            i,
            s,
            want,
            context,
            max(0, min(engine.num_drafts[s], want + context - engine.num_tokens[s] - pending)),
        )
        uniform &= engine.num_drafts[s] > 0
        engine.num_drafts[s] = 0
        taken += 1
        budget -= want
    return taken, victims, budget, uniform


@njit_compiled
def _preempt_request(
    rules: EngineRules,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    place: int,
) -> int:
    """Put the request at `place` among the running ones back to the queue; its blocks are free."""
    state, seat = engine.state[0], engine.running[place]
    victim = engine.request[seat]
    state.num_running -= 1
    state.num_awake -= 1
    for j in range(place, state.num_awake):
        engine.running[j] = engine.running[j + 1]
    records.num_outputs[victim] = engine.num_tokens[seat] - requests.prompt[victim]
    records.preemptions[victim] += 1
    _free_slot(rules, engine, seat)
    state.front_order -= 1
    queues.add_request(
        requests,
        engine,
        float(requests.rank[victim] if rules.priority else state.front_order),
        victim,
    )
    return victim


@njit_force_inline
def _free_slot(rules: EngineRules, engine: EngineInstance, seat: int) -> None:
    """Free a seat and its blocks."""
    state = engine.state[0]
    block_pool.free_sequence(rules, engine.pool, engine.tables, seat)
    fast_path.remove_from_ring(engine.fast_path.running_ring, seat)
    engine.request[seat] = -1
    engine.free_slots[state.num_free_slots] = seat
    state.num_free_slots += 1


@njit_force_inline
def _schedule_waiting(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    batch: np.ndarray,
    threshold: int,
    taken: int,
    budget: int,
    uniform: bool,
) -> int:
    """Schedule those that wait, behind the `taken` ones; the first that does not fit stops the queue. How many now."""
    state = engine.state[0]
    caching, size, spec_tokens = (
        tracks_block_contents(rules, requests),
        rules.groups[0, 1],
        rules.num_speculative_tokens,
    )
    model_len, ran = rules.max_model_len, taken > 0
    while state.num_waiting and budget > 0 and state.num_free_slots > 0:
        q = queues.select_next_queue(rules, requests, engine)
        if q < 0:
            state.is_blocked = True
            break
        i = queues.peek_first(engine.waiting, q)
        tokens, hit = int(requests.prompt[i] + records.num_outputs[i]), 0
        content = requests.content[requests.content_start[i] if caching else 0 :]
        if caching:
            hit = block_pool.find_longest_cached_prefix(
                engine.pool, content, (tokens - 1) // size, rules.groups
            )
        more = (
            block_pool.touch_host_hits(engine.pool, content, hit, (tokens - 1) // size)
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
            block_pool.count_blocks_to_admit(
                rules, engine.pool, content, hit, tokens, slots, engine.max_admission_blocks
            )
            > engine.pool.free[0]
        ):
            state.is_blocked = not (
                caching or has_windows(rules)
            )  # else what leaves a window may make room
            break
        engine.queue_heads[q] = queues.dequeue(engine.waiting, q)
        state.num_waiting -= 1
        state.num_free_slots -= 1
        s = engine.free_slots[state.num_free_slots]
        engine.running[state.num_awake] = s
        state.num_awake += 1
        state.num_running += 1
        state.num_admitted += 1
        engine.fast_path.admission[s] = state.num_admitted
        fast_path.insert_before(engine.fast_path.running_ring, s, len(engine.request))
        engine.request[s], engine.num_tokens[s], engine.num_computed[s] = i, tokens, context
        engine.num_placeholders[s] = engine.num_drafts[s] = engine.tokens_in_flight[s] = 0
        engine.ready_at[s] = 0.0
        block_pool.reuse_cached_prefix(rules, engine.pool, engine.tables, s, content, hit)
        block_pool.allocate_slots(rules, engine.pool, engine.tables, s, slots)
        if caching and more == 0:
            block_pool.cache_full_blocks(
                rules, engine.pool, engine.tables, s, content, min(context + want, tokens)
            )
        if np.isnan(records.scheduled[i]):
            records.scheduled[i], records.cached[i] = state.now, context
        if more:
            state.host_loaded = engine.ready_at[s] = (
                max(state.now, state.host_loaded) + more * table.host_block_s
            )
            continue
        step_kernels.write_step_row(batch, taken, i, s, want, context, drafted)
        taken += 1
        if requests.adapter.size:
            queues.mark_adapter_used(engine, requests.adapter[i])
        budget -= want
    return taken


@njit_compiled
def _find_next_host_load(engine: EngineInstance) -> float:
    """When the next request that runs has its blocks from host memory; infinite where none waits for them."""
    state, first = engine.state[0], np.inf
    for s in engine.running[: state.num_awake]:
        first = min(first, engine.ready_at[s] if engine.ready_at[s] > state.now else np.inf)
    return first


@njit_force_inline
def _start_step(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    batch: np.ndarray,
    turn: int,
    taken: int,
    timed: bool,
) -> tuple[int, float]:
    """Begin the step of `taken` requests: what it costs, and what it is counted in. Returns its tokens and start."""
    state, overlap, usable = engine.state[0], overlaps_steps(rules, table), rules.num_blocks - 1
    for j in range(taken):
        s = batch[ROW_SLOT, j]
        engine.num_computed[s] += batch[ROW_TOKENS, j]
        engine.tokens_in_flight[s] += batch[ROW_TOKENS, j]
        batch[ROW_YIELDS, j] = (
            engine.num_computed[s] >= engine.num_tokens[s] + engine.num_placeholders[s]
        )  # not a chunk before the last
        batch[ROW_PREEMPTIONS, j] = records.preemptions[batch[ROW_REQUEST, j]]
        if overlap and batch[ROW_YIELDS, j]:
            engine.num_placeholders[s] += 1 + batch[ROW_DRAFTED, j]
            engine.num_drafts[s] = rules.num_speculative_tokens
    drifting = state.num_running - state.num_awake
    total, decoding, spent = step_kernels.compute_step_cost(rules, table, engine, batch, taken)
    fast_path.begin_fast_path_step(engine, drifting)
    state.steps_since_receive += 1 if decoding == taken + drifting else rules.recv_interval
    if requests.adapter.size:
        spent += queues.compute_adapter_s(rules, table, requests, engine, batch, taken)
    state.step_s = spent if timed else 1.0
    start = max(state.now, state.next_start)
    state.next_start = start + state.step_s / table.stages
    state.last_end = max(start + state.step_s, state.last_end + state.step_s / table.stages)
    engine.batch_sizes[turn], engine.batch_ends[turn], engine.batch_log_rows[turn] = (
        taken,
        state.last_end,
        state.num_logged_steps,
    )
    state.num_steps_in_flight += 1
    busy = state.next_start - start
    engine.usage[(usable - engine.pool.free[0]) * (kinds.NUM_KV_USAGE_BINS - 1) // usable] += busy
    engine.totals[0] += 1
    engine.totals[1] += busy
    engine.totals[2] += total
    engine.totals[3] += decoding
    engine.totals[4] += decoding * busy
    return total, start


@njit_allocating
def _record_gauges(
    rules: EngineRules, engine: EngineInstance, gauge_s: float, start: float, total: int
) -> None:
    """Note what the gauges show, up to the end of the step."""
    state = engine.state[0]
    while state.num_gauges * gauge_s < state.next_start:
        on = (
            1.0 if state.num_gauges * gauge_s >= start or state.num_steps_in_flight > 1 else 0.0
        )  # nothing under way: idle
        used, waits = rules.num_blocks - 1 - engine.pool.free[0], state.num_waiting
        engine.notes.append(
            (
                kinds.NOTE_GAUGE,
                state.num_gauges * gauge_s,
                on * state.num_running,
                on * waits,
                on * used,
                on * total,
            )
        )
        state.num_gauges += 1


@njit_allocating
def _log_step(
    engine: EngineInstance, batch: np.ndarray, taken: int, victims: int, total: int
) -> None:
    """Note the step that begins: who was preempted for it, what stands around it, and who is in it."""
    state = engine.state[0]
    for j in range(victims):
        engine.notes.append(
            (
                kinds.NOTE_PREEMPTED,
                float(state.num_logged_steps),
                float(engine.leaving[j]),
                0.0,
                0.0,
                0.0,
            )
        )
    waits, free = state.num_waiting, engine.pool.free[0]
    engine.notes.append(
        (
            kinds.NOTE_STEP,
            state.now,
            float(total),
            float(state.num_running),
            float(waits),
            float(free),
        )
    )
    for j in range(taken):
        engine.notes.append(
            (
                kinds.NOTE_ENTRY,
                float(state.num_logged_steps),
                float(batch[ROW_REQUEST, j]),
                float(batch[ROW_TOKENS, j]),
                0.0,
                0.0,
            )
        )
    state.num_logged_steps += 1


@njit_allocating
def _log_finished(engine: EngineInstance, ended: int) -> None:
    """Note who ended with the oldest step under way."""
    row = engine.batch_log_rows[engine.state[0].oldest]
    for j in range(ended):
        engine.notes.append(
            (kinds.NOTE_FINISHED, float(row), float(engine.leaving[j]), 0.0, 0.0, 0.0)
        )


@njit_force_inline
def _process_outputs(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    log: bool,
) -> None:
    """Take the outputs of the oldest step under way; requests that end leave."""
    state = engine.state[0]
    batch, end, depth, before, gone = (
        engine.batches[state.oldest],
        engine.batch_ends[state.oldest],
        len(engine.batches),
        state.num_finished,
        0,
    )
    caching, overlap, size = (
        tracks_block_contents(rules, requests),
        overlaps_steps(rules, table),
        rules.groups[0, 1],
    )
    if state.num_steps_in_flight:
        if state.num_awake < state.num_running:
            engine.itl[step_kernels.get_itl_bin(end - state.last_output)] += (
                state.num_running - state.num_awake
            )
        state.last_output = end
    for j in range(engine.batch_sizes[state.oldest] if state.num_steps_in_flight else 0):
        i, s, drafted = batch[ROW_REQUEST, j], batch[ROW_SLOT, j], batch[ROW_DRAFTED, j]
        current = engine.request[s] == i and batch[ROW_PREEMPTIONS, j] == records.preemptions[i]
        if current:
            engine.tokens_in_flight[s] -= batch[ROW_TOKENS, j]
            records.num_outputs[i] = engine.num_tokens[s] - requests.prompt[i]
        room = (
            min(requests.output[i], rules.max_model_len - requests.prompt[i])
            - records.num_outputs[i]
        )
        if not batch[ROW_YIELDS, j] or room == 0 or (depth > 2 and not current):
            continue  # a chunk of a prompt; ended meanwhile; put back to the queue too long ago
        kept = (
            step_kernels.sample_accepted_drafts(rules, i, records.num_outputs[i], drafted)
            if drafted
            else 0
        )
        if records.num_outputs[i] == 0:
            records.first_token[i] = end
        else:
            gap = end - records.last_token[i]
            if gap != state.last_gap_s:
                state.last_gap_s, state.last_gap_bin = gap, step_kernels.get_itl_bin(gap)
            engine.itl[state.last_gap_bin] += 1
        records.last_token[i] = end
        records.num_outputs[i] += min(1 + kept, room)
        if current:
            engine.num_tokens[s] = requests.prompt[i] + records.num_outputs[i]
            engine.num_computed[s] -= drafted - kept
            if overlap:
                engine.num_placeholders[s] -= 1 + drafted
            else:
                engine.num_drafts[s] = rules.num_speculative_tokens
            if caching and (
                overlap or (rules.uses_v033_scheduler and rules.num_speculative_tokens)
            ):
                own = requests.content_start[i]
                settled = min(
                    engine.num_computed[s] - engine.num_placeholders[s] - max(0, 1 + kept - room),
                    engine.num_tokens[s],
                )
                if settled >= (engine.tables.published[s] + 1) * size:
                    block_pool.cache_full_blocks(
                        rules, engine.pool, engine.tables, s, requests.content[own:], settled
                    )
        if 1 + kept >= room:
            if requests.concurrency:
                records.released[records.ended[0]] = end
                records.ended[0] += 1
            engine.leaving[state.num_finished - before] = i
            state.num_finished += 1
            if current:
                _free_slot(rules, engine, s)
                gone += 1
            else:
                q = queues.get_queue_index(requests, i)
                engine.queue_heads[q] = queues.remove_request(engine.waiting, q, i)
                state.num_waiting -= 1
    if log:
        _log_finished(engine, state.num_finished - before)
    if gone:
        _compact_running(engine)


@njit_compiled
def _compact_running(engine: EngineInstance) -> None:
    """Take seats that are free out of the running ones."""
    state, stay = engine.state[0], 0
    for j in range(state.num_awake):
        if engine.request[engine.running[j]] >= 0:
            engine.running[stay] = engine.running[j]
            stay += 1
    state.num_running -= state.num_awake - stay
    state.num_awake, state.is_steady, state.is_blocked = stay, False, False


@njit_compiled
def advance_engine(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    until: float,
    options: SimulationOptions,
) -> None:
    """Let an engine go on until `until`, or until all requests that are due have ended.

    Where the end of one lets another in, an engine behind a router stops there too.

    Each turn schedules a step, or ends one, or both: RECEIVE what was sent meanwhile; COAST over
    steps in which nothing changes; RUN those that run, preempting where blocks lack; ADMIT those
    that wait; CLOCK the step; take the OUTPUTS of the oldest step under way. i is a request, s its
    seat, j a place in a step.
    """
    # no comprehensions in here: numba 0.68 then drops writes to fields of named tuples as dead code
    state, depth = engine.state[0], len(engine.batches)
    timed, log, gauge_s = options.timed, options.log, options.gauge_s
    can_drift, before = _allows_fast_path(rules, table, requests, options), state.num_finished
    while state.num_finished < state.num_due and state.now < until:
        sooner = _receive_requests(rules, requests, records, engine, until)
        if state.now >= until:
            break
        if can_drift and _run_decode_only_steps(rules, table, requests, records, engine, sooner):
            continue
        threshold, turn = (
            rules.long_prefill_token_threshold,
            (state.oldest + state.num_steps_in_flight) % depth,
        )
        if threshold == 0 or (
            rules.uses_v033_scheduler and state.num_running + state.num_waiting <= 1
        ):
            threshold = rules.max_model_len
        batch, state.is_blocked = engine.batches[turn], False
        state.turn += 1
        state.num_active_adapters = 0
        if state.num_awake < state.num_running:
            _allocate_fast_path_blocks(rules, table, requests, records, engine, threshold)
        taken, victims, budget, uniform = _schedule_running(
            rules,
            table,
            requests,
            records,
            engine,
            batch,
            threshold,
            options.stop_at_first_preemption,
        )
        if state.stuck == -2:
            break
        for j in range(taken if requests.adapter.size else 0):
            queues.mark_adapter_used(engine, requests.adapter[batch[ROW_REQUEST, j]])
        if victims == 0:
            taken = _schedule_waiting(
                rules, table, requests, records, engine, batch, threshold, taken, budget, uniform
            )
        if taken or state.num_awake < state.num_running:
            total, start = _start_step(
                rules, table, requests, records, engine, batch, turn, taken, timed
            )
            if gauge_s > 0:
                _record_gauges(rules, engine, gauge_s, start, total)
            if log:
                _log_step(engine, batch, taken, victims, total)
            state.is_steady = total == taken == state.num_running
        elif state.num_steps_in_flight == victims == 0 and _find_next_host_load(engine) < np.inf:
            state.now = min(_find_next_host_load(engine), sooner if sooner > state.now else np.inf)
            continue
        elif state.num_steps_in_flight == victims == 0:
            state.stuck = (
                queues.peek_first(engine.waiting, int(np.argmin(engine.queue_heads)))
                if state.num_waiting
                else engine.request[engine.running[0]]
            )
            break
        if not timed:
            state.now += 1
        if taken and state.num_steps_in_flight < depth:
            continue
        _process_outputs(rules, table, requests, records, engine, log)
        if state.num_steps_in_flight:
            state.now = engine.batch_ends[state.oldest] if timed else state.now
            state.oldest, state.num_steps_in_flight = (
                (state.oldest + 1) % depth,
                state.num_steps_in_flight - 1,
            )
        if state.is_routed and requests.concurrency and state.num_finished > before:
            break
