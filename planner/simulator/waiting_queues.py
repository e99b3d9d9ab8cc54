"""Queue waiting requests, with one queue per LoRA adapter, and track loaded adapters."""

import heapq

import numpy as np

from planner.simulator.compilation import njit_allocating, njit_compiled, njit_force_inline
from planner.simulator.engine_state import (
    ADAPTER_IN_STEP,
    ADAPTER_ON_GPU,
    ADAPTER_ON_HOST,
    ROW_REQUEST,
    ROW_TOKENS,
    EngineInstance,
    RequestHeap,
)
from planner.simulator.kernel_types import EngineRules, RequestBatch, StepCostTable


@njit_allocating
def push_request(heap: RequestHeap, key: float, request: int) -> float:
    """Push a request onto a heap and return the smallest key."""
    heapq.heappush(heap, (key, request))
    return heap[0][0]


@njit_allocating
def pop_request(heap: RequestHeap) -> tuple[int, float]:
    """Pop the first request of a heap; return it and the smallest remaining key, inf if none."""
    first = heapq.heappop(heap)[1]
    return first, heap[0][0] if len(heap) else np.inf


@njit_allocating
def peek_first(waiting: list[RequestHeap], q: int) -> int:
    """Return the first request of queue `q`."""
    return waiting[q][0][1]


@njit_allocating
def _enqueue(waiting: list[RequestHeap], q: int, order: float, request: int) -> float:
    """Add a request to queue `q` and return the order of its first."""
    return push_request(waiting[q], order, request)


@njit_allocating
def dequeue(waiting: list[RequestHeap], q: int) -> float:
    """Remove the first request of queue `q` and return the order of the next."""
    return pop_request(waiting[q])[1]


@njit_force_inline
def get_queue_index(requests: RequestBatch, request: int) -> int:
    """Return the queue of a request: 0 without an adapter, else 1 + its number."""
    return requests.adapter[request] + 1 if requests.adapter.size else 0


@njit_compiled
def select_next_queue(rules: EngineRules, requests: RequestBatch, engine: EngineInstance) -> int:
    """Return the queue whose first request may join the step and comes first; -1 if all must wait.

    A step has at most `max_loras` distinct adapters; requests with another one are skipped (vLLM
    0.20.2, v1/core/sched/scheduler.py: scheduled_loras).
    """
    if not requests.adapter.size:
        return 0
    state, heads, turns = engine.state[0], engine.queue_heads, engine.adapter_turns
    best, full = -1, state.num_active_adapters >= rules.max_loras
    for q in range(len(heads)):
        joins = q == 0 or not full or turns[q - 1, ADAPTER_IN_STEP] == state.turn
        if joins and heads[q] < np.inf and (best < 0 or heads[q] < heads[best]):
            best = q
    return best


@njit_compiled
def mark_adapter_used(engine: EngineInstance, adapter: int) -> None:
    """Count an adapter among those of the step being scheduled."""
    state = engine.state[0]
    if adapter >= 0 and engine.adapter_turns[adapter, ADAPTER_IN_STEP] != state.turn:
        engine.adapter_turns[adapter, ADAPTER_IN_STEP] = state.turn
        state.num_active_adapters += 1


@njit_compiled
def _load_adapter(engine: EngineInstance, adapter: int, location: int, capacity: int) -> bool:
    """Load an adapter in place of the least recently used; return whether it had to be loaded.

    `location` is a column of `adapter_turns`, which holds `capacity` adapters.
    """
    turns = engine.adapter_turns
    is_present = turns[adapter, location] > 0
    if not is_present:
        held, oldest = 0, -1
        for a in range(len(turns)):
            if turns[a, location] > 0:
                held += 1
                oldest = a if oldest < 0 or turns[a, location] < turns[oldest, location] else oldest
        if held >= capacity and oldest >= 0:
            turns[oldest, location] = 0
    turns[adapter, location] = engine.state[0].turn
    return not is_present


@njit_compiled
def compute_adapter_s(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    engine: EngineInstance,
    batch: np.ndarray,
    taken: int,
) -> float:
    """Return the seconds that adapters add to the step: use, changed tokens, and loads."""
    state, tokens, loading_s = engine.state[0], 0, 0.0
    for j in range(taken):
        adapter = requests.adapter[batch[ROW_REQUEST, j]]
        tokens += batch[ROW_TOKENS, j] * (adapter >= 0)
        if adapter >= 0 and engine.adapter_turns[adapter, ADAPTER_ON_GPU] != state.turn:
            loading_s += table.adapter_cold_s * _load_adapter(
                engine, adapter, ADAPTER_ON_HOST, rules.max_cpu_loras
            )
            loading_s += table.adapter_load_s * _load_adapter(
                engine, adapter, ADAPTER_ON_GPU, rules.max_loras
            )
    state.adapters_s = table.adapter_s * state.num_active_adapters + table.adapter_token_s * tokens
    return state.adapters_s + loading_s


@njit_force_inline
def add_request(requests: RequestBatch, engine: EngineInstance, order: float, request: int) -> None:
    """Add a request to its queue."""
    q = get_queue_index(requests, request)
    engine.queue_heads[q] = _enqueue(engine.waiting, q, order, request)
    engine.state[0].num_waiting += 1
    # with adapters, the new request may be admitted before those that wait
    engine.state[0].is_blocked &= requests.adapter.size == 0


@njit_allocating
def remove_request(waiting: list[RequestHeap], q: int, request: int) -> float:
    """Remove a request from queue `q` and return the order of its first."""
    heap = waiting[q]
    for k in range(len(heap)):
        if heap[k][1] == request:
            heap[k] = heap[-1]
            heap.pop()
            heapq.heapify(heap)
            break
    return heap[0][0] if len(heap) else np.inf
