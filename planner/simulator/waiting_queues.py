"""Who waits for a seat in which order: one queue, or one for each LoRA adapter; and which adapters are there."""

import heapq
from typing import Any

import numpy as np

from planner.simulator import step_cost_kernels as step_kernels
from planner.simulator.block_pool import njit_allocating, njit_compiled, njit_force_inline

ROW_REQUEST, ROW_TOKENS = step_kernels.ROW_REQUEST, step_kernels.ROW_TOKENS


@njit_allocating
def push_request(heap: Any, order: float, request: int) -> float:
    """Put a request into a heap, and return the order of its first."""
    heapq.heappush(heap, (order, request))
    return heap[0][0]


@njit_allocating
def pop_request(heap: Any) -> tuple[int, float]:
    """Take the first request out of a heap, and return the order of the next."""
    first = heapq.heappop(heap)[1]
    return first, heap[0][0] if len(heap) else np.inf


@njit_allocating
def peek_first(waiting: Any, q: int) -> int:
    return waiting[q][0][1]


@njit_allocating
def _enqueue(waiting: Any, q: int, order: float, request: int) -> float:
    """Put a request into queue `q`, and return the order of its first."""
    return push_request(waiting[q], order, request)


@njit_allocating
def dequeue(waiting: Any, q: int) -> float:
    """Take the first request out of queue `q`, and return the order of the next."""
    return pop_request(waiting[q])[1]


@njit_force_inline
def get_queue_index(traffic: Any, request: int) -> int:
    return traffic.adapter[request] + 1 if traffic.adapter.size else 0


@njit_compiled
def select_next_queue(rules: Any, traffic: Any, e: Any) -> int:
    """The queue whose first request comes first of those that may join the step; -1 where all have to wait.

    At most `max_loras` different adapters are in a step; requests with another one are passed over
    (vLLM 0.20.2, v1/core/sched/scheduler.py: scheduled_loras).
    """
    c = e.state[0]
    if not traffic.adapter.size:
        return 0
    best, full = -1, c.active >= rules.max_loras
    for q in range(len(e.heads)):
        joins = q == 0 or not full or e.adapters[q - 1, 0] == c.turns
        if joins and e.heads[q] < np.inf and (best < 0 or e.heads[q] < e.heads[best]):
            best = q
    return best


@njit_compiled
def mark_adapter_used(e: Any, adapter: int) -> None:
    """Count an adapter among those of the step being scheduled."""
    c = e.state[0]
    if adapter >= 0 and e.adapters[adapter, 0] != c.turns:
        e.adapters[adapter, 0] = c.turns
        c.active += 1


@njit_compiled
def _load_adapter(e: Any, adapter: int, where: int, slots: int) -> bool:
    """Have an adapter on the GPU (1) or in host memory (2), in place of the one used least lately; False: it was."""
    turns, there = e.state[0].turns, e.adapters[adapter, where] > 0
    if not there:
        held, oldest = 0, -1
        for a in range(len(e.adapters)):
            if e.adapters[a, where] > 0:
                held += 1
                oldest = (
                    a if oldest < 0 or e.adapters[a, where] < e.adapters[oldest, where] else oldest
                )
        if held >= slots and oldest >= 0:
            e.adapters[oldest, where] = 0
    e.adapters[adapter, where] = turns
    return not there


@njit_compiled
def compute_adapter_s(
    rules: Any, table: Any, traffic: Any, e: Any, batch: Any, taken: int
) -> float:
    """Seconds that adapters add to the step: those that it uses, what they change, and what has to be loaded first."""
    c, tokens, loading = e.state[0], 0, 0.0
    for j in range(taken):
        adapter = traffic.adapter[batch[ROW_REQUEST, j]]
        tokens += batch[ROW_TOKENS, j] * (adapter >= 0)
        if adapter >= 0 and e.adapters[adapter, 1] != c.turns:
            loading += table.adapter_cold_s * _load_adapter(e, adapter, 2, rules.max_cpu_loras)
            loading += table.adapter_load_s * _load_adapter(e, adapter, 1, rules.max_loras)
    c.adapters_s = table.adapter_s * c.active + table.adapter_token_s * tokens
    return c.adapters_s + loading


@njit_force_inline
def add_request(traffic: Any, e: Any, order: float, request: int) -> None:
    q = get_queue_index(traffic, request)
    e.heads[q] = _enqueue(e.waiting, q, order, request)
    e.state[0].num_waiting += 1
    e.state[0].blocked &= traffic.adapter.size == 0  # this one may be let in past those that wait


@njit_allocating
def remove_request(waiting: Any, q: int, request: int) -> float:
    """Take a request out of queue `q`, and return the order of its first."""
    heap = waiting[q]
    for k in range(len(heap)):
        if heap[k][1] == request:
            heap[k] = heap[-1]
            heap.pop()
            heapq.heapify(heap)
            break
    return heap[0][0] if len(heap) else np.inf
