"""Reproduce vLLM V1's scheduler step by step, compiled, without a Python object per request.

It follows vLLM 0.20.2 (v1/core/sched/scheduler.py:352, v1/core/sched/async_scheduler.py,
v1/engine/core.py:443) and, with `EngineRules.uses_v033_scheduler`, 0.33.0 where that differs; with
`EngineRules.prefills_first`, SGLang in what a step has, whom it admits and whom it retracts. KV cache
blocks are in `simulator.block_pool`. An engine can stop at any time and continue later, so
that several take turns behind one router (`simulator.router`).
"""

import numpy as np

from planner.simulator import block_pool
from planner.simulator import kernel_types as kinds
from planner.simulator import step_cost_kernels as step_kernels
from planner.simulator import waiting_queues as queues
from planner.simulator.compilation import njit_allocating, njit_compiled, njit_force_inline
from planner.simulator.decode_fast_path import (
    run_decode_only_steps,
    start_fast_path,
    stop_fast_path_ring,
)
from planner.simulator.engine_state import (
    MAX_FAST_PATH_STEPS,
    ROW_DRAFTED,
    ROW_PREEMPTIONS,
    ROW_REQUEST,
    ROW_SLOT,
    ROW_TOKENS,
    ROW_YIELDS,
    EngineInstance,
    RequestRecords,
    overlaps_steps,
    tracks_block_contents,
)
from planner.simulator.kernel_types import (
    EngineRules,
    RequestBatch,
    SimulationOptions,
    StepCostTable,
)
from planner.simulator.step_scheduling import free_slot, schedule_step


@njit_compiled
def submit_request(
    rules: EngineRules,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    i: int,
    at: float,
) -> None:
    """Send request `i` to the engine, whose scheduler sees it after the front end has processed it.

    That takes time for each prompt token that is not cached then, as `prompt_token_s` was fitted.
    """
    records.sent[i], uncached, size = at, int(requests.prompt[i]), rules.groups[0, 1]
    if requests.prompt_token_s and tracks_block_contents(rules, requests):
        content, limit = requests.content[requests.content_start[i] :], (uncached - 1) // size
        hit = block_pool.find_longest_cached_prefix(engine.pool, content, limit, rules.groups)
        more = (
            block_pool.count_host_hits(engine.pool, content, hit, limit) if rules.host_blocks else 0
        )
        uncached -= (hit + more) * size
    engine.state[0].next_visible = queues.push_request(
        engine.arriving, at + requests.request_s + requests.prompt_token_s * uncached, i
    )


@njit_force_inline
def _receive_requests(
    rules: EngineRules,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    until: float,
) -> float:
    """Send and queue all requests that are due by now; an idle engine waits for the next one.

    Returns the time of the next request, at most `until`.
    """
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
        receives = (
            rules.recv_interval == 1
            or state.steps_since_receive >= rules.recv_interval
            or not (state.num_running or state.num_steps_in_flight)
        )
        while receives and state.next_visible <= state.now:
            i, state.next_visible = queues.pop_request(engine.arriving)
            state.back_order += 1
            order = float(requests.rank[i] if rules.priority else state.back_order)
            queues.add_request(requests, engine, order, i)
        state.steps_since_receive = 0 if receives else state.steps_since_receive
        next_request = min(at, state.next_visible)
        if (
            state.num_running
            or state.num_waiting
            or state.num_steps_in_flight
            or state.now >= until
        ):
            return next_request
        state.now, state.token_ratio = next_request, rules.token_ratio
        state.ratio_step = state.fast_path_steps


@njit_force_inline
def allows_fast_path(
    rules: EngineRules, table: StepCostTable, requests: RequestBatch, options: SimulationOptions
) -> bool:
    """Return whether the fast path gives exactly the scheduler's results."""
    allowed = options.timed and not (options.log or rules.priority or options.gauge_s > 0)
    allowed &= rules.num_speculative_tokens == 0 and table.stages == 1 and rules.recv_interval == 1
    allowed &= not (options.shares_clock and (rules.host_blocks > 0 or requests.adapter.size > 0))
    allowed &= rules.num_lookahead_tokens == 0 and (
        rules.groups[0, 0] == 0 or not tracks_block_contents(rules, requests)
    )
    for g in range(len(rules.groups)):
        window, size = rules.groups[g]
        allowed &= window < 0 or (
            size == rules.groups[0, 1]
            and (window == 0 or not tracks_block_contents(rules, requests))
        )
    return allowed


@njit_force_inline
def _run_fast_path(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    next_request: float,
    may_run: bool,
) -> int:
    """Update the fast path, and run steps up to `next_request` if all sequences are on it.

    Returns the number of steps, 0 unless it `may_run` any. With adapters or blocks in host memory, all sequences leave
    afterwards, because the order of use matters.
    """
    state, steps = engine.state[0], 0
    cannot_admit = state.is_blocked or state.num_free_slots == 0 or state.num_waiting == 0
    leaves = rules.host_blocks > 0 or requests.adapter.size > 0
    if leaves and not (
        state.is_steady and cannot_admit and next_request > state.now + 2 * state.step_s
    ):
        return 0
    end = len(engine.request) + state.fast_path_steps % MAX_FAST_PATH_STEPS
    stop_fast_path_ring(rules, table, records, engine, engine.fast_path.exit_rings, end)
    if state.turn >= state.fast_path_turn and state.num_running <= rules.max_num_batched_tokens:
        start_fast_path(rules, table, requests, records, engine)
    if may_run and cannot_admit and state.num_awake == 0 and state.num_running:
        steps = run_decode_only_steps(rules, table, requests, engine, next_request)
    if leaves:
        ring = engine.fast_path.running_ring
        stop_fast_path_ring(rules, table, records, engine, ring, len(engine.request))
        state.is_steady = False
    return steps


@njit_compiled
def find_next_host_load(engine: EngineInstance) -> float:
    """Return when the next running request has its blocks from host memory; inf if none waits."""
    state, first = engine.state[0], np.inf
    for s in engine.running[: state.num_awake]:
        first = min(first, engine.ready_at[s] if engine.ready_at[s] > state.now else np.inf)
    return first


@njit_allocating
def _record_gauges(
    rules: EngineRules, engine: EngineInstance, gauge_s: float, start: float, total: int
) -> None:
    """Record samples of the gauges up to the end of the step."""
    state = engine.state[0]
    used, waiting = rules.num_blocks - 1 - engine.pool.free[0], state.num_waiting
    while state.num_gauges * gauge_s < state.next_start:
        at = state.num_gauges * gauge_s
        on = 1.0 if at >= start or state.num_steps_in_flight > 1 else 0.0  # 0: the engine is idle
        engine.notes.append(
            (kinds.NOTE_GAUGE, at, on * state.num_running, on * waiting, on * used, on * total)
        )
        state.num_gauges += 1


@njit_allocating
def _log_step(
    engine: EngineInstance, batch: np.ndarray, taken: int, victims: int, total: int
) -> None:
    """Log the step that starts: its preemptions, its totals, and its requests."""
    state, notes = engine.state[0], engine.notes
    row = float(state.num_logged_steps)
    for j in range(victims):
        notes.append((kinds.NOTE_PREEMPTED, row, float(engine.leaving[j]), 0.0, 0.0, 0.0))
    waiting, free = float(state.num_waiting), float(engine.pool.free[0])
    notes.append(
        (kinds.NOTE_STEP, state.now, float(total), float(state.num_running), waiting, free)
    )
    for j in range(taken):
        request, tokens = float(batch[ROW_REQUEST, j]), float(batch[ROW_TOKENS, j])
        notes.append((kinds.NOTE_ENTRY, row, request, tokens, 0.0, 0.0))
    state.num_logged_steps += 1


@njit_allocating
def _log_finished(engine: EngineInstance, ended: int) -> None:
    """Log the requests that ended with the oldest step in flight."""
    row = float(engine.batch_log_rows[engine.state[0].oldest])
    for j in range(ended):
        engine.notes.append((kinds.NOTE_FINISHED, row, float(engine.leaving[j]), 0.0, 0.0, 0.0))


@njit_force_inline
def _process_outputs(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engine: EngineInstance,
    log: bool,
) -> None:
    """Process the outputs of the oldest step in flight, and free requests that end."""
    state, tables = engine.state[0], engine.tables
    batch, end = engine.batches[state.oldest], engine.batch_ends[state.oldest]
    depth, before, num_freed = len(engine.batches), state.num_finished, 0
    caching, overlap = tracks_block_contents(rules, requests), overlaps_steps(rules, table)
    size = rules.groups[0, 1]
    if state.num_steps_in_flight:
        if state.num_awake < state.num_running:
            gap_bin = step_kernels.get_itl_bin(end - state.last_output)
            engine.itl[gap_bin] += state.num_running - state.num_awake
        state.last_output = end
    for j in range(engine.batch_sizes[state.oldest] if state.num_steps_in_flight else 0):
        i, s, drafted = batch[ROW_REQUEST, j], batch[ROW_SLOT, j], batch[ROW_DRAFTED, j]
        current = engine.request[s] == i and batch[ROW_PREEMPTIONS, j] == records.preemptions[i]
        if current:
            engine.tokens_in_flight[s] -= batch[ROW_TOKENS, j]
            records.num_outputs[i] = engine.num_tokens[s] - requests.prompt[i]
        max_outputs = min(requests.output[i], rules.max_model_len - requests.prompt[i])
        left = max_outputs - records.num_outputs[i]
        if not batch[ROW_YIELDS, j] or left == 0 or (depth > 2 and not current):
            continue  # a prompt chunk; ended meanwhile; preempted too long ago
        accepted = (
            step_kernels.sample_accepted_drafts(rules, i, records.num_outputs[i], drafted)
            if drafted
            else 0
        )
        if records.num_outputs[i] == 0:
            records.first_token[i] = end
        else:
            engine.itl[step_kernels.get_itl_bin(end - records.last_token[i])] += 1
        records.last_token[i] = end
        records.num_outputs[i] += min(1 + accepted, left)
        if current:
            engine.num_tokens[s] = requests.prompt[i] + records.num_outputs[i]
            engine.num_computed[s] -= drafted - accepted
            if overlap:
                engine.num_placeholders[s] -= 1 + drafted
            else:
                engine.num_drafts[s] = rules.num_speculative_tokens
            if caching and (
                overlap or (rules.uses_v033_scheduler and rules.num_speculative_tokens)
            ):
                computed = engine.num_computed[s] - engine.num_placeholders[s]
                settled = min(computed - max(0, 1 + accepted - left), engine.num_tokens[s])
                if settled >= (tables.published[s] + 1) * size:
                    block_pool.cache_full_blocks(
                        rules, requests, engine.pool, tables, s, i, settled
                    )
        if 1 + accepted >= left:
            if requests.concurrency:
                records.released[records.ended[0]] = end
                records.ended[0] += 1
            engine.leaving[state.num_finished - before] = i
            state.num_finished += 1
            if current:
                free_slot(rules, engine, s)
                num_freed += 1
            else:
                q = queues.get_queue_index(requests, i)
                engine.queue_heads[q] = queues.remove_request(engine.waiting, q, i)
                state.num_waiting -= 1
    if log:
        _log_finished(engine, state.num_finished - before)
    if num_freed:
        _compact_running(engine)


@njit_compiled
def _compact_running(engine: EngineInstance) -> None:
    """Remove free slots from `running`."""
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
    """Run an engine until `until`, or until all its requests have ended.

    In a closed loop, an engine behind a router also stops when a request ends, which admits
    another one. Each turn starts a step, or ends one, or both: it receives requests; runs the fast
    path; schedules running requests, preempting if blocks run out; admits waiting ones; starts the
    step; and processes the outputs of the oldest step in flight. Of ranks on one clock, each stops
    in between, when its step is priced (`simulator.router`). i is a request, s its slot, j a place
    in a step.
    """
    # no comprehensions in here: numba 0.68 then drops writes to fields of named tuples as dead code
    state, depth, shares_clock = engine.state[0], len(engine.batches), options.shares_clock
    timed, log, gauge_s = options.timed, options.log, options.gauge_s
    before, has_fast_path = state.num_finished, allows_fast_path(rules, table, requests, options)
    while (shares_clock or state.num_finished < state.num_due) and state.now < until:
        next_request = until
        if not state.is_scheduled:
            next_request = _receive_requests(
                rules, requests, records, engine, state.now if shares_clock else until
            )
            if state.now >= until:
                break
            if has_fast_path and _run_fast_path(
                rules, table, requests, records, engine, next_request, not shares_clock
            ):
                continue
            batch = engine.batches[(state.oldest + state.num_steps_in_flight) % depth]
            schedule_step(rules, table, requests, records, engine, batch, options)
            if state.stuck == -2:
                break
            if shares_clock:
                state.is_scheduled = True
                break
        turn, state.is_scheduled = (state.oldest + state.num_steps_in_flight) % depth, False
        taken, victims, total = state.num_taken, state.num_victims, state.num_step_tokens
        if state.has_step:
            engine.batch_log_rows[turn] = state.num_logged_steps
            start = step_kernels.start_step(rules, engine, table.stages, turn, taken)
            if gauge_s > 0:
                _record_gauges(rules, engine, gauge_s, start, total)
            if log:
                _log_step(engine, engine.batches[turn], taken, victims, total)
            state.is_steady = total == taken == state.num_running
        elif state.num_steps_in_flight == victims == 0:
            loaded = find_next_host_load(engine)
            if loaded < np.inf:
                state.now = min(loaded, next_request if next_request > state.now else np.inf)
                continue
            state.stuck = (
                queues.peek_first(engine.waiting, int(np.argmin(engine.queue_heads)))
                if state.num_waiting
                else engine.request[engine.running[0]]
            )
            break
        if not timed:
            state.now += 1
        if (taken or (shares_clock and state.has_step)) and state.num_steps_in_flight < depth:
            if shares_clock:
                break
            continue
        _process_outputs(rules, table, requests, records, engine, log)
        if state.num_steps_in_flight:
            state.now = engine.batch_ends[state.oldest] if timed else state.now
            state.oldest = (state.oldest + 1) % depth
            state.num_steps_in_flight -= 1
        if shares_clock or (
            state.is_routed and requests.concurrency and state.num_finished > before
        ):
            break
