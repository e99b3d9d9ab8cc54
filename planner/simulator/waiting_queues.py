"""Who waits for a seat in which order: one queue, or one for each LoRA adapter; and which adapters are there."""

import heapq

import numpy as np

from planner.simulator import step_cost_kernels as step_kernels
from planner.simulator.compilation import njit_allocating, njit_compiled, njit_force_inline
from planner.simulator.engine_state import EngineInstance, RequestHeap
from planner.simulator.kernel_types import EngineRules, RequestBatch, StepCostTable

ROW_REQUEST, ROW_TOKENS = step_kernels.ROW_REQUEST, step_kernels.ROW_TOKENS


@njit_allocating
def push_request(heap: RequestHeap, order: float, request: int) -> float:
    """Put a request into a heap, and return the order of its first."""
    heapq.heappush(heap, (order, request))
    return heap[0][0]


@njit_allocating
def pop_request(heap: RequestHeap) -> tuple[int, float]:
    """Take the first request out of a heap, and return the order of the next."""
    first = heapq.heappop(heap)[1]
    return first, heap[0][0] if len(heap) else np.inf


@njit_allocating
def peek_first(waiting: list[RequestHeap], q: int) -> int:
    return waiting[q][0][1]


@njit_allocating
def _enqueue(waiting: list[RequestHeap], q: int, order: float, request: int) -> float:
    """Put a request into queue `q`, and return the order of its first."""
    return push_request(waiting[q], order, request)


@njit_allocating
def dequeue(waiting: list[RequestHeap], q: int) -> float:
    """Take the first request out of queue `q`, and return the order of the next."""
    return pop_request(waiting[q])[1]


@njit_force_inline
def get_queue_index(requests: RequestBatch, request: int) -> int:
    return requests.adapter[request] + 1 if requests.adapter.size else 0


@njit_compiled
def select_next_queue(rules: EngineRules, requests: RequestBatch, engine: EngineInstance) -> int:
    """The queue whose first request comes first of those that may join the step; -1 where all have to wait.

    At most `max_loras` different adapters are in a step; requests with another one are passed over
    (vLLM 0.20.2, v1/core/sched/scheduler.py: scheduled_loras).
    """
    state = engine.state[0]
    if not requests.adapter.size:
        return 0
    best, full = -1, state.num_active_adapters >= rules.max_loras
    for q in range(len(engine.queue_heads)):
        joins = q == 0 or not full or engine.adapter_turns[q - 1, 0] == state.turn
        if (
            joins
            and engine.queue_heads[q] < np.inf
            and (best < 0 or engine.queue_heads[q] < engine.queue_heads[best])
        ):
            best = q
    return best


@njit_compiled
def mark_adapter_used(engine: EngineInstance, adapter: int) -> None:
    """Count an adapter among those of the step being scheduled."""
    state = engine.state[0]
    if adapter >= 0 and engine.adapter_turns[adapter, 0] != state.turn:
        engine.adapter_turns[adapter, 0] = state.turn
        state.num_active_adapters += 1


@njit_compiled
def _load_adapter(engine: EngineInstance, adapter: int, where: int, slots: int) -> bool:
    """Have an adapter on the GPU (1) or in host memory (2), in place of the one used least lately; False: it was."""
    turns, there = engine.state[0].turn, engine.adapter_turns[adapter, where] > 0
    if not there:
        held, oldest = 0, -1
        for a in range(len(engine.adapter_turns)):
            if engine.adapter_turns[a, where] > 0:
                held += 1
                oldest = (
                    a
                    if oldest < 0
                    or engine.adapter_turns[a, where] < engine.adapter_turns[oldest, where]
                    else oldest
                )
        if held >= slots and oldest >= 0:
            engine.adapter_turns[oldest, where] = 0
    engine.adapter_turns[adapter, where] = turns
    return not there


@njit_compiled
def compute_adapter_s(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    engine: EngineInstance,
    batch: np.ndarray,
    taken: int,
) -> float:
    """Seconds that adapters add to the step: those that it uses, what they change, and what has to be loaded first."""
    state, tokens, loading = engine.state[0], 0, 0.0
    for j in range(taken):
        adapter = requests.adapter[batch[ROW_REQUEST, j]]
        tokens += batch[ROW_TOKENS, j] * (adapter >= 0)
        if adapter >= 0 and engine.adapter_turns[adapter, 1] != state.turn:
            loading += table.adapter_cold_s * _load_adapter(engine, adapter, 2, rules.max_cpu_loras)
            loading += table.adapter_load_s * _load_adapter(engine, adapter, 1, rules.max_loras)
    state.adapters_s = table.adapter_s * state.num_active_adapters + table.adapter_token_s * tokens
    return state.adapters_s + loading


@njit_force_inline
def add_request(requests: RequestBatch, engine: EngineInstance, order: float, request: int) -> None:
    q = get_queue_index(requests, request)
    engine.queue_heads[q] = _enqueue(engine.waiting, q, order, request)
    engine.state[0].num_waiting += 1
    engine.state[0].is_blocked &= (
        requests.adapter.size == 0
    )  # this one may be let in past those that wait


@njit_allocating
def remove_request(waiting: list[RequestHeap], q: int, request: int) -> float:
    """Take a request out of queue `q`, and return the order of its first."""
    heap = waiting[q]
    for k in range(len(heap)):
        if heap[k][1] == request:
            heap[k] = heap[-1]
            heap.pop()
            heapq.heapify(heap)
            break
    return heap[0][0] if len(heap) else np.inf
