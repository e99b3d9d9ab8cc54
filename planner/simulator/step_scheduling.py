"""Choose what the next step of an engine has: running requests, then waiting ones, with preemption.

Rules of vLLM's scheduler and, with `EngineRules.prefills_first`, SGLang's, as `simulator.scheduler` says.
"""

import numpy as np

from planner.simulator import block_pool
from planner.simulator import step_cost_kernels as step_kernels
from planner.simulator import waiting_queues as queues
from planner.simulator.compilation import njit_compiled, njit_force_inline
from planner.simulator.decode_fast_path import (
    allocate_fast_path_blocks,
    begin_fast_path_step,
    stop_fast_path,
    stop_fast_path_ring,
)
from planner.simulator.engine_state import (
    ROW_DRAFTED,
    ROW_PREEMPTIONS,
    ROW_REQUEST,
    ROW_SLOT,
    ROW_TOKENS,
    ROW_YIELDS,
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

FAST_PATH_COOLDOWN_TURNS = 16
"""Turns without a fast path after all sequences had to leave it."""
MAX_RESERVED_TOKENS = 4096
"""Tokens of an output that SGLang reserves at most (schedule_policy.py, CLIP_MAX_NEW_TOKENS)."""
MIN_TOKEN_RATIO, TOKEN_RATIO_STEPS, RETRACT_STEPS = 0.14, 600, 20
"""SGLang's share of outputs falls to this part of its first value in so many steps of decoding; after
a retraction it is what running requests have, and so many tokens more (environ.py of 0.5.4 to
0.5.23)."""


@njit_compiled
def _select_victim(rules: EngineRules, requests: RequestBatch, engine: EngineInstance) -> int:
    """Return the place in `running` to preempt: the last, or with priorities the least urgent.

    SGLang takes the one with the fewest outputs, of equals the longest prompt (schedule_batch.py,
    retract_decode).
    """
    running, rank = engine.running[: engine.state[0].num_awake], requests.rank
    last = len(running) - 1
    for j in range(len(running) if len(rank) or rules.prefills_first else 0):
        i, k = engine.request[running[j]], engine.request[running[last]]
        if len(rank):
            last = j if rank[i] > rank[k] else last
            continue
        ahead = engine.num_tokens[running[j]] - requests.prompt[i]
        ahead -= engine.num_tokens[running[last]] - requests.prompt[k]
        if ahead < 0 or (ahead == 0 and requests.prompt[i] > requests.prompt[k]):
            last = j
    return last


@njit_force_inline
def _count_tokens_to_schedule(
    rules: EngineRules, requests: RequestBatch, engine: EngineInstance, s: int, max_tokens: int
) -> int:
    """Return the tokens that running slot `s` takes in a step, at most `max_tokens`.

    0 if all of them are in flight, or if its blocks from host memory are.
    """
    i, context, pending = engine.request[s], engine.num_computed[s], engine.num_placeholders[s]
    # the step in flight yields the last token
    is_ending = pending > 0 and context + 2 - pending >= requests.prompt[i] + requests.output[i]
    if is_ending or engine.ready_at[s] > engine.state[0].now:
        return 0
    want = engine.num_tokens[s] + engine.num_drafts[s] + pending - context
    return max(0, min(want, max_tokens, rules.max_model_len - 1 - context))


@njit_force_inline
def _allocate_fast_path_blocks(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    threshold: int,
) -> None:
    """Allocate the blocks of the fast path as far as the scheduler would do the same.

    Sequences that may not get a block, or that would get it out of order, return to the scheduler.
    If the token budget may not suffice, all do.
    """
    state, fast_path, is_crossed = engine.state[0], engine.fast_path, False
    num_slots, size, ring = len(engine.request), rules.groups[0, 1], fast_path.block_rings
    left = rules.max_num_batched_tokens - (state.num_running - state.num_awake)
    caching = tracks_block_contents(rules, requests)
    phase = state.fast_path_steps % size
    is_certain, lacking = left >= 0, fast_path.phase_blocks[0, phase]
    last = ring[1, num_slots + phase]
    for s in engine.running[: state.num_awake]:
        want = _count_tokens_to_schedule(rules, requests, engine, s, min(threshold, max(left, 0)))
        end = engine.num_computed[s] + want
        if want and end > engine.tables.capacity[s]:
            lacking += block_pool.count_missing_blocks(rules, engine.tables, s, end)
            is_crossed |= last < num_slots and fast_path.admission[last] > fast_path.admission[s]
        left -= want
        youngest = fast_path.running_ring[1, num_slots]
        while left <= 0 and youngest != s and fast_path.entered[youngest] < 0:
            youngest = fast_path.running_ring[1, youngest]
        # without budget, no sequence on the fast path may come after this one
        is_certain &= left > 0 or youngest == s
    is_short = lacking > engine.pool.free[0]
    if not is_certain or (is_short and has_windows(rules)):
        stop_fast_path_ring(rules, table, records, engine, fast_path.running_ring, num_slots)
        state.fast_path_turn = state.turn + FAST_PATH_COOLDOWN_TURNS
    elif is_short or (is_crossed and caching):
        stop_fast_path_ring(rules, table, records, engine, ring, num_slots + phase)
        # a preempted sequence fills no block
        if is_short and caching and not overlaps_steps(rules, table):
            end = num_slots + (phase + 1) % size
            stop_fast_path_ring(rules, table, records, engine, ring, end)
    allocate_fast_path_blocks(rules, table, requests, engine)


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
    first: int,
) -> tuple[int, int, int, bool]:
    """Schedule running requests from place `first` on, and preempt if blocks run out.

    Returns scheduled and preempted requests, the rest of the token budget, and whether no prompt
    chunk is among them. With `halt`, state.stuck is -2 instead of the first preemption.
    """
    state, pool, tables = engine.state[0], engine.pool, engine.tables
    caching, windowed = tracks_block_contents(rules, requests), has_windows(rules)
    size, model_len = rules.groups[0, 1], rules.max_model_len
    budget = rules.max_num_batched_tokens - (state.num_running - state.num_awake)
    taken, victims, k = 0, 0, first
    uniform = rules.uses_v033_scheduler and rules.num_speculative_tokens > 0
    while k < state.num_awake and budget > 0:
        s = engine.running[k]
        i, context, pending = engine.request[s], engine.num_computed[s], engine.num_placeholders[s]
        k += 1
        want = _count_tokens_to_schedule(rules, requests, engine, s, min(threshold, budget))
        if want == 0:
            continue
        settled = context - (engine.tokens_in_flight[s] if rules.uses_v033_scheduler else 0)
        if windowed and settled >= tables.slides[s]:
            block_pool.free_outside_window(rules, pool, tables, s, settled)
        end = min(context + want + rules.num_lookahead_tokens, model_len)
        lacking = (
            block_pool.count_missing_blocks(rules, tables, s, end)
            if end > tables.capacity[s]
            else 0
        )
        while lacking > pool.free[0] and engine.request[s] == i and not halt:
            last = engine.fast_path.running_ring[1, len(engine.request)]
            if engine.fast_path.entered[last] >= 0:
                stop_fast_path(rules, table, records, engine, last)
                budget += 1
            place = _select_victim(rules, requests, engine)
            victim = engine.running[place]
            returned = step_kernels.remove_from_step(batch, taken, victim)
            budget += returned
            taken -= returned > 0
            # 0.20.2 otherwise skips a request that it should not skip
            if returned or victim == s or (rules.uses_v033_scheduler and place < k):
                k -= 1
            engine.leaving[victims] = _preempt_request(rules, requests, records, engine, place)
            victims += 1
        if engine.request[s] != i:
            if rules.uses_v033_scheduler and rules.priority:
                continue
            break
        if lacking > pool.free[0]:
            state.stuck = -2
            break
        if lacking:
            block_pool.allocate_slots(rules, pool, tables, s, end)
        full = min(context + want, engine.num_tokens[s])
        if caching and full >= (tables.published[s] + 1) * size:
            block_pool.cache_full_blocks(rules, requests, pool, tables, s, i, full)
        drafted = min(engine.num_drafts[s], want + context - engine.num_tokens[s] - pending)
        step_kernels.write_step_row(batch, taken, i, s, want, context, max(0, drafted))
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
    """Return the request at `place` in `running` to its queue, and free its blocks."""
    state, slot = engine.state[0], engine.running[place]
    victim = engine.request[slot]
    state.num_running -= 1
    state.num_awake -= 1
    for j in range(place, state.num_awake):
        engine.running[j] = engine.running[j + 1]
    records.num_outputs[victim] = engine.num_tokens[slot] - requests.prompt[victim]
    records.preemptions[victim] += 1
    free_slot(rules, engine, slot)
    state.front_order -= 1
    state.back_order += 1
    turn = state.back_order if rules.prefills_first else state.front_order
    order = float(requests.rank[victim] if rules.priority else turn)
    queues.add_request(requests, engine, order, victim)
    return victim


@njit_force_inline
def free_slot(rules: EngineRules, engine: EngineInstance, slot: int) -> None:
    """Free a slot and its blocks."""
    state = engine.state[0]
    block_pool.free_sequence(rules, engine.pool, engine.tables, slot)
    block_pool.remove_from_ring(engine.fast_path.running_ring, slot)
    engine.request[slot] = -1
    engine.free_slots[state.num_free_slots] = slot
    state.num_free_slots += 1


@njit_force_inline
def _admit_request(engine: EngineInstance, q: int, i: int, tokens: int, context: int) -> int:
    """Give the first request of queue `q` a slot, with `context` of its `tokens` computed."""
    state = engine.state[0]
    engine.queue_heads[q] = queues.dequeue(engine.waiting, q)
    state.num_waiting -= 1
    state.num_free_slots -= 1
    s = engine.free_slots[state.num_free_slots]
    engine.running[state.num_awake] = s
    state.num_awake += 1
    state.num_running += 1
    state.num_admitted += 1
    engine.fast_path.admission[s] = state.num_admitted
    block_pool.insert_before(engine.fast_path.running_ring, s, len(engine.request))
    engine.request[s], engine.num_tokens[s], engine.num_computed[s] = i, tokens, context
    engine.num_placeholders[s] = engine.num_drafts[s] = engine.tokens_in_flight[s] = 0
    engine.ready_at[s] = 0.0
    return s


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
    """Schedule waiting requests after the `taken` ones until one does not fit; return how many are."""
    state, pool, tables = engine.state[0], engine.pool, engine.tables
    caching, size = tracks_block_contents(rules, requests), rules.groups[0, 1]
    spec_tokens, model_len, ran = rules.num_speculative_tokens, rules.max_model_len, taken > 0
    per_token = 0.0  # blocks
    for g in range(len(rules.groups)):
        per_token += (rules.groups[g, 0] == 0) / rules.groups[g, 1]
    while state.num_waiting and budget > 0 and state.num_free_slots > 0:
        q = queues.select_next_queue(rules, requests, engine)
        if q < 0:
            state.is_blocked = True
            break
        i = queues.peek_first(engine.waiting, q)
        tokens, hit = int(requests.prompt[i] + records.num_outputs[i]), 0
        content = requests.content[requests.content_start[i] if caching else 0 :]
        if caching:
            limit = (tokens - 1) // size
            hit = block_pool.find_longest_cached_prefix(pool, content, limit, rules.groups)
        more = 0
        if rules.host_blocks and caching:
            more = block_pool.touch_host_hits(pool, content, hit, (tokens - 1) // size)
        context, drafted = (hit + more) * size, 0
        want = tokens - context
        if want == 1 and uniform and (ran or hit) and context + spec_tokens + 2 <= model_len:
            # 0.33 pads a new decode with rejected drafts, or waits for budget to do so
            drafted = spec_tokens
            if 1 + drafted > budget:
                break
        want = min(want + drafted, threshold)
        if want > budget and not rules.enable_chunked_prefill:
            break
        want = min(want, budget) if more == 0 else 0  # it starts when they are loaded
        end = context + want + (rules.num_lookahead_tokens if rules.uses_v033_scheduler else 0)
        end = min(end, model_len)
        needed = block_pool.count_blocks_to_admit(
            rules, pool, content, hit, tokens, end, engine.max_admission_blocks
        )
        left = min(requests.output[i] - records.num_outputs[i], MAX_RESERVED_TOKENS)
        if rules.prefills_first and state.num_running:
            reserved = state.num_reserved + tokens - context - want + left + size
            if needed + reserved * per_token >= pool.free[0]:
                state.is_blocked = True
                break
        if needed > pool.free[0]:
            # blocks that leave a window may make room
            state.is_blocked = rules.prefills_first or not (caching or has_windows(rules))
            break
        s = _admit_request(engine, q, i, tokens, context)
        block_pool.reuse_cached_prefix(rules, pool, tables, s, content, hit)
        block_pool.allocate_slots(rules, pool, tables, s, end)
        if caching and more == 0:
            full = min(context + want, tokens)
            block_pool.cache_full_blocks(rules, requests, pool, tables, s, i, full)
        if np.isnan(records.scheduled[i]):
            records.scheduled[i], records.cached[i] = state.now, context
        if more:
            state.host_loaded = max(state.now, state.host_loaded) + more * table.host_block_s
            engine.ready_at[s] = state.host_loaded
            continue
        step_kernels.write_step_row(batch, taken, i, s, want, context, drafted)
        taken += 1
        state.num_reserved += left if context + want >= tokens else 0
        if requests.adapter.size:
            queues.mark_adapter_used(engine, requests.adapter[i])
        budget -= want
    return taken


@njit_compiled
def _prepare_prefills(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
) -> int:
    """Return the place in `running` of the prompt that goes on, or behind the last; -1: decode.

    Sets the tokens that the others reserve. SGLang computes prompts as long as there are any whose
    tokens, with reserved ones, fit (scheduler.py, get_next_batch_to_run; schedule_policy.py,
    PrefillAdder, 0.5.4 to 0.5.23).
    """
    state, num_slots, place = engine.state[0], len(engine.request), -1
    if state.num_awake:
        s = engine.running[state.num_awake - 1]
        is_cut = engine.num_tokens[s] + engine.num_placeholders[s] - engine.num_computed[s] > 1
        place = 0 if is_cut else -1
    if place < 0 and (not state.num_waiting or state.is_blocked or not state.num_free_slots):
        if engine.pool.free[0] <= state.num_running * len(rules.groups):  # any may be retracted
            ring = engine.fast_path.running_ring
            stop_fast_path_ring(rules, table, records, engine, ring, num_slots)
        return -1
    stop_fast_path_ring(rules, table, records, engine, engine.fast_path.running_ring, num_slots)
    least = rules.token_ratio * MIN_TOKEN_RATIO
    steps = state.fast_path_steps - state.ratio_step
    ratio = state.token_ratio - steps * (rules.token_ratio - least) / TOKEN_RATIO_STEPS
    place, state.num_reserved = state.num_awake - (place == 0), 0.0
    for s in engine.running[:place]:
        i = engine.request[s]
        left = requests.prompt[i] + requests.output[i] - engine.num_tokens[s]
        state.num_reserved += max(ratio, least) * min(left, MAX_RESERVED_TOKENS)
    return place


@njit_compiled
def _raise_token_ratio(requests: RequestBatch, engine: EngineInstance) -> None:
    """Set the share of outputs that requests reserve after a retraction, and admit again."""
    state, outputs, most = engine.state[0], 0, 1
    for s in engine.running[: state.num_awake]:
        i = engine.request[s]
        outputs += engine.num_tokens[s] - requests.prompt[i] + RETRACT_STEPS
        most += requests.output[i]
    state.token_ratio, state.ratio_step = min(outputs / most, 1.0), state.fast_path_steps
    state.is_blocked = False


@njit_force_inline
def _price_step(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    batch: np.ndarray,
    taken: int,
    timed: bool,
) -> None:
    """Price the step with `taken` requests, which is to start."""
    state, overlap = engine.state[0], overlaps_steps(rules, table)
    for j in range(taken):
        s = batch[ROW_SLOT, j]
        engine.num_computed[s] += batch[ROW_TOKENS, j]
        engine.tokens_in_flight[s] += batch[ROW_TOKENS, j]
        # false for all chunks of a prompt but the last
        batch[ROW_YIELDS, j] = (
            engine.num_computed[s] >= engine.num_tokens[s] + engine.num_placeholders[s]
        )
        batch[ROW_PREEMPTIONS, j] = records.preemptions[batch[ROW_REQUEST, j]]
        if overlap and batch[ROW_YIELDS, j]:
            engine.num_placeholders[s] += 1 + batch[ROW_DRAFTED, j]
            engine.num_drafts[s] = rules.num_speculative_tokens
    on_fast_path = state.num_running - state.num_awake
    total, decoding, seconds = step_kernels.compute_step_cost(rules, table, engine, batch, taken)
    begin_fast_path_step(state, engine.fast_path.window_tokens, on_fast_path)
    state.steps_since_receive += 1 if decoding == taken + on_fast_path else rules.recv_interval
    if requests.adapter.size:
        seconds += queues.compute_adapter_s(rules, table, requests, engine, batch, taken)
    state.step_s = seconds if timed else 1.0
    state.num_step_tokens, state.num_decoding = total, decoding


@njit_force_inline
def schedule_step(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    batch: np.ndarray,
    options: SimulationOptions,
) -> None:
    """Schedule the next step into `batch`: running requests, then waiting ones; and price it."""
    state, threshold = engine.state[0], rules.long_prefill_token_threshold
    if threshold == 0 or (rules.uses_v033_scheduler and state.num_running + state.num_waiting <= 1):
        threshold = rules.max_model_len
    state.is_blocked &= rules.prefills_first
    state.turn += 1
    state.num_active_adapters = 0
    place = (
        _prepare_prefills(rules, table, requests, records, engine) if rules.prefills_first else 0
    )
    if state.num_awake < state.num_running:
        _allocate_fast_path_blocks(rules, table, requests, records, engine, threshold)
    while True:
        taken, victims, budget, uniform = _schedule_running(
            rules,
            table,
            requests,
            records,
            engine,
            batch,
            threshold,
            options.stop_at_first_preemption,
            max(place, 0),
        )
        for j in range(taken if requests.adapter.size else 0):
            queues.mark_adapter_used(engine, requests.adapter[batch[ROW_REQUEST, j]])
        if victims == 0 and place >= 0 and state.stuck != -2:
            taken = _schedule_waiting(
                rules,
                table,
                requests,
                records,
                engine,
                batch,
                threshold,
                taken,
                budget,
                uniform,
            )
        if taken or victims or place <= 0:
            break
        place = -1  # no prompt fits: the others decode
    if state.stuck == -2:
        return
    if rules.prefills_first:
        state.ratio_step += place >= 0
        if victims:
            _raise_token_ratio(requests, engine)
    state.num_taken, state.num_victims = taken, victims
    state.has_step = taken > 0 or state.num_awake < state.num_running
    if state.has_step or options.shares_clock:
        _price_step(rules, table, requests, records, engine, batch, taken, options.timed)
