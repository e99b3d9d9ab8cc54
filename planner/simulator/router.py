"""Simulate replicas behind a router, compiled; one replica alone is the case without a router.

Every replica advances to the moment at which the router looks at it, so that the router sees what
it would see in operation.
"""

import heapq

import numpy as np

from planner.latency import shared_prefix_reads
from planner.simulator import (
    block_pool,
    decode_fast_path,
    engine_state,
    scheduler,
    step_cost_kernels,
    step_scheduling,
    waiting_queues,
)
from planner.simulator import kernel_types as kinds
from planner.simulator.borrowed import borrow, borrow_item
from planner.simulator.compilation import (
    EntryPoint,
    njit_allocating,
    njit_compiled,
    njit_inline_always,
)
from planner.simulator.engine_state import (
    EngineInstance,
    RequestRecords,
    create_engine_instance,
    create_request_records,
)
from planner.simulator.kernel_types import (
    EngineRules,
    RequestBatch,
    RouterConfig,
    SimulationOptions,
    SimulationOutcome,
    StepCostTable,
    to_compiled_types,
)
from planner.simulator.scheduler import (
    advance_engine,
    find_next_host_load,
    submit_request,
)

MAX_INDEXED_PROMPT_TOKENS = 4096
"""Prompt tokens that an approximate router looks at: 256 blocks of 64 characters.

It keeps them for more prompts than a replica has room for (defaults of prefix-cache-scorer, Gateway
API Inference Extension 1.0).
"""
SPECULATIVE_CACHE_TTL_S = 2.0
"""Seconds for which a router expects the blocks of a prompt it has just sent to be cached (llm-d's
precise prefix scorer)."""


@njit_allocating
def _match_prefix(
    rules: EngineRules,
    requests: RequestBatch,
    router: RouterConfig,
    engine: EngineInstance,
    sent_at: np.ndarray,
    i: int,
    now: float,
) -> float:
    """Return the fraction of a prompt's blocks that a replica has or was sent: its longest prefix.

    A precise router counts cached blocks and those sent within `SPECULATIVE_CACHE_TTL_S`, an
    approximate one all blocks ever sent.
    """
    full, start, k = requests.prompt[i] // rules.groups[0, 1], requests.content_start[i], 0
    since, groups = now - SPECULATIVE_CACHE_TTL_S, len(rules.groups)
    if not router.precise:
        full, since = min(full, MAX_INDEXED_PROMPT_TOKENS // rules.groups[0, 1]), -np.inf
    while k < full:
        block = requests.content[start + k]
        is_cached = sent_at[block] > since or (
            router.precise and engine.pool.cached[block * groups] >= 0
        )
        if not is_cached and not (
            router.precise and engine.pool.host_count[1] and engine.pool.host[0, block] >= 0
        ):
            break
        k += 1
    return k / max(full, 1)


@njit_allocating
def _score_replicas(
    rules: EngineRules,
    requests: RequestBatch,
    router: RouterConfig,
    engines: list[EngineInstance],
    sent_at: np.ndarray,
    i: int,
    now: float,
) -> np.ndarray:
    """Return scores of replicas: weighted prefix, queue and free KV cache, as in llm-d."""
    up = len(engines)
    scores, queued, fewest, most = np.zeros(up), np.zeros(up), np.inf, 0.0
    for r in range(up):
        queued[r] = engines[r].state[0].num_waiting + len(engines[r].arriving)
        fewest, most = min(fewest, queued[r]), max(most, queued[r])
    for r in range(up):
        queue_score = (most - queued[r]) / (most - fewest) if most > fewest else 1.0
        free = engines[r].pool.free[0] / (rules.num_blocks - 1)
        scores[r] = router.queue_weight * queue_score + router.kv_weight * free
        if sent_at.size:
            scores[r] += router.prefix_weight * _match_prefix(
                rules, requests, router, engines[r], sent_at[r], i, now
            )
    return scores


@njit_allocating
def _pick_replica(
    rules: EngineRules,
    requests: RequestBatch,
    router: RouterConfig,
    engines: list[EngineInstance],
    sent_at: np.ndarray,
    i: int,
    now: float,
) -> int:
    """Return the replica for request `i`; of equals the next in turn."""
    up = len(engines)
    if router.policy < kinds.ROUTE_LEAST_LOADED:
        return i % up
    if router.policy == kinds.ROUTE_PREFIX_AFFINITY:
        scores = _score_replicas(rules, requests, router, engines, sent_at, i, now)
    else:
        scores = np.zeros(up)
        for r in range(up):
            state = engines[r].state[0]
            scores[r] = -float(state.num_due - state.num_finished)
    best = i % up
    for step in range(1, up):
        if scores[(i + step) % up] > scores[best]:
            best = (i + step) % up
    return best


@njit_allocating
def _find_next_turn(engines: list[EngineInstance], first: int, ranks: int) -> float:
    """Return when the next turn of replicas on one clock is; inf if they have nothing to do."""
    soon, is_idle, is_due = np.inf, True, False
    for r in range(first, first + ranks):
        state = engines[r].state[0]
        is_idle &= state.num_running + state.num_waiting + state.num_steps_in_flight == 0
        is_due |= state.num_finished < state.num_due
        soon = min(soon, state.next_visible)
    now = engines[first].state[0].now
    if not is_due:
        return np.inf
    return max(now, soon) if is_idle else now


@njit_allocating
def _advance_ranks(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engines: list[EngineInstance],
    first: int,
    ranks: int,
    until: float,
    options: SimulationOptions,
) -> int:
    """Advance ranks on one clock until `until`, in a closed loop only until one request ends.

    All start a step together, which takes as long as that of the slowest. What they do together
    takes the time of their mean tokens, or of the most where a CUDA graph has all ranks padded to
    that (vLLM's v1/worker/dp_utils.py). Idle ranks take part with an empty step of one token, as
    vLLM's do (v1/engine/core.py, `execute_dummy_batch`). Returns the stuck rank, else -1.
    """
    ended, last = records.ended[0], len(table.shared_tokens_s) - 1
    while not (requests.concurrency and records.ended[0] > ended):
        now = _find_next_turn(engines, first, ranks)
        if not now < until:
            break
        slowest, works, in_flight, loaded = 0.0, False, 0, np.inf
        tokens, most = 0, 0
        for r in range(first, first + ranks):
            engine, state = engines[r], engines[r].state[0]
            state.now = now
            advance_engine(rules, table, requests, records, engine, np.inf, options)
            if state.stuck != -1:
                return r
            if rules.host_blocks:
                loaded = min(loaded, find_next_host_load(engine))
            works |= state.has_step
            in_flight = max(in_flight, state.num_steps_in_flight)
            tokens += max(state.num_step_tokens, 1)
            most = max(most, state.num_step_tokens)
            slowest = max(
                slowest, state.step_s - table.shared_tokens_s[min(state.num_step_tokens, last)]
            )
        if not works and in_flight == 0 and loaded < np.inf:  # all wait for blocks of host memory
            for r in range(first, first + ranks):
                state = engines[r].state[0]
                state.is_scheduled = False
                state.now = min(loaded, state.next_visible if state.next_visible > now else np.inf)
            continue
        shared = most if most <= table.padded_tokens else round(tokens / ranks)
        slowest += table.shared_tokens_s[min(shared, last)]
        for r in range(first, first + ranks):
            state = engines[r].state[0]
            if not works and in_flight == 0 and state.num_running + state.num_waiting == 0:
                state.is_scheduled = False
                continue
            state.has_step, state.step_s = works, slowest if options.timed else 1.0
            advance_engine(rules, table, requests, records, engines[r], np.inf, options)
            if state.stuck != -1:
                return r
    return -1


@njit_inline_always
def _advance_replicas(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    records: RequestRecords,
    engines: list[EngineInstance],
    at: float,
    options: SimulationOptions,
    ranks: int,
) -> int:
    """Advance all replicas to `at`, in a closed loop only until one request ends.

    In a closed loop the replica furthest behind goes first, no further than the next one. `ranks`
    replicas each share a clock. Returns the stuck replica, else -1.
    """
    ended, stuck, in_turn = records.ended[0], -1, requests.concurrency > 0 and len(engines) > ranks
    while stuck < 0 and records.ended[0] == ended:
        first, end, until = 0, len(engines), at
        if in_turn:
            soon, next_soon = np.inf, np.inf
            for r in range(0, len(engines), ranks):
                turn = _find_next_turn(engines, r, ranks)
                if turn < np.inf:
                    next_soon = min(next_soon, max(turn, soon))
                    first, soon = (r, turn) if turn < soon else (first, soon)
            if not soon < at:
                break
            end, until = first + ranks, min(at, max(next_soon, soon * (1 + 1e-12) + 1e-12))
        for r in range(first, end, ranks):
            state = engines[r].state[0]
            if ranks > 1:
                stuck = _advance_ranks(
                    rules, table, requests, records, engines, r, ranks, until, options
                )
            elif state.now < until and state.num_finished < state.num_due:
                advance_engine(rules, table, requests, records, engines[r], until, options)
                stuck = r if state.stuck != -1 else -1
            if stuck >= 0:
                break
        if not in_turn:
            break
    return stuck


@njit_inline_always
def _serve_requests(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    router: RouterConfig,
    records: RequestRecords,
    engines: list[EngineInstance],
    contents: int,
    replica: np.ndarray,
    options: SimulationOptions,
) -> int:
    """Send every request to a replica, in order of arrival, and wait for the last one.

    Returns the stuck replica, else -1.
    """
    count, taken, i = len(engines), 0, 0
    sent_at = np.full(
        (count if router.policy == kinds.ROUTE_PREFIX_AFFINITY else 0, contents), -np.inf
    )
    size, ends, n = rules.groups[0, 1], [0.0][:0], len(replica)
    while True:
        at = requests.arrival[i] if i < n else np.inf
        if requests.concurrency and requests.concurrency <= i < n:
            at = max(at, ends[0]) if len(ends) else np.inf
        before = records.ended[0]
        stuck = _advance_replicas(
            rules, table, requests, records, engines, at, options, router.ranks_per_clock
        )
        if stuck >= 0:
            return stuck
        while taken < records.ended[0]:
            heapq.heappush(ends, records.released[taken])
            taken += 1
        if records.ended[0] != before:
            continue
        if i >= n:
            return -1
        if requests.concurrency and i >= requests.concurrency:
            heapq.heappop(ends)
        r = _pick_replica(rules, requests, router, engines, sent_at, i, at)
        replica[i] = r
        engines[r].state[0].num_due += 1
        submit_request(rules, requests, records, engines[r], i, at)
        start = requests.content_start[i] if sent_at.size else 0
        for k in range(start, start + (requests.prompt[i] // size if sent_at.size else 0)):
            sent_at[r, requests.content[k]] = at
        i += 1


@njit_compiled
def _add_counts(total: np.ndarray, counts: np.ndarray) -> None:
    """Add [n] `counts` to `total`; numba's own addition compiles text for its errors."""
    for k in range(len(total)):
        total[k] += counts[k]


@njit_inline_always
def _simulate(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    router: RouterConfig,
    options: SimulationOptions,
) -> SimulationOutcome:
    """Simulate requests behind a router, or one engine that has all requests from the start."""
    n, longest, contents = requests.prompt.size, 0, 0
    for i in range(n):
        longest = max(longest, requests.prompt[i] + requests.output[i])
    for number in requests.content if rules.enable_prefix_caching else requests.content[:0]:
        contents = max(contents, number + 1)
    routed = router.replicas > 1
    records = create_request_records(n, requests.concurrency > 0)
    replica = np.zeros(n if routed else 0, np.int32)
    instances = [create_engine_instance(rules, table, requests, longest, contents)]
    for _ in range(1, router.replicas):
        instances.append(create_engine_instance(rules, table, requests, longest, contents))
    engines = [borrow_item(instances, 0)]
    for r in range(1, router.replicas):
        engines.append(borrow_item(instances, r))
    for r in range(router.replicas):
        engines[r].state[0].num_due, engines[r].state[0].is_routed = 0 if routed else n, routed
    stuck = _serve_requests(
        rules, table, requests, router, borrow(records), engines, contents, replica, options
    )
    engine, totals = instances[max(stuck, 0)], instances[0].totals
    totals[5] = 0 if routed else engine.pool.free[0]
    for r in range(1, router.replicas):
        _add_counts(instances[0].itl, instances[r].itl)
        _add_counts(instances[0].usage, instances[r].usage)
        _add_counts(totals, instances[r].totals)
    notes = np.empty((len(engine.notes), 6))
    for row in range(len(engine.notes)):
        notes[row, 0], notes[row, 1], notes[row, 2], notes[row, 3], notes[row, 4], notes[row, 5] = (
            engine.notes[row]
        )
    return SimulationOutcome(
        engine.state[0].stuck,
        records.sent,
        records.scheduled,
        records.first_token,
        records.last_token,
        records.preemptions,
        records.cached,
        instances[0].itl,
        instances[0].usage,
        totals,
        notes,
        replica,
    )


def _simulate_all(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    router: RouterConfig,
    options: SimulationOptions,
) -> SimulationOutcome:
    """Simulate all requests, with arguments of the types that `to_compiled_types` gives them."""
    return _simulate(
        borrow(rules), borrow(table), borrow(requests), borrow(router), borrow(options)
    )


def _build_example() -> tuple[
    EngineRules, StepCostTable, RequestBatch, RouterConfig, SimulationOptions
]:
    rules = EngineRules(1, 16, 4, 16, False, True, 0, False, False, False, np.array([[0, 16]]))
    return (
        to_compiled_types(rules),
        to_compiled_types(StepCostTable(np.ones(1), np.ones(1))),
        to_compiled_types(RequestBatch(np.zeros(1), np.ones(1), np.ones(1))),
        to_compiled_types(RouterConfig()),
        to_compiled_types(SimulationOptions(True, False, 0.0, False, False)),
    )


run_compiled_simulation = EntryPoint(
    _simulate_all,
    _build_example,
    (
        block_pool,
        decode_fast_path,
        engine_state,
        kinds,
        scheduler,
        shared_prefix_reads,
        step_cost_kernels,
        step_scheduling,
        waiting_queues,
    ),
)
