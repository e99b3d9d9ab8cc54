"""Simulate disaggregated serving, compiled: prefill workers, then decode workers.

Requests are dealt to the workers of each pool round robin, the default of NVIDIA Dynamo's frontend,
and wait there first come, first served. A prefill worker computes as many whole prompts per step as
its data-parallel ranks have room for. The fullest rank determines the duration of its own part of
the step, all ranks together that of the experts. The sequences of a decode worker advance together,
one token per step. A worker with a free slot admits a sequence `kv_transfer_steps` steps after its
KV cache has arrived. Differences between the ranks of a decode worker are not modelled.
"""

import heapq

import numpy as np

from planner.simulator.compilation import EntryPoint, njit_allocating
from planner.simulator.kernel_types import DecodeWorkerPool, PoolTimeline, PrefillWorkerPool

EVENT_ARRIVAL, EVENT_PREFILLED, EVENT_JOIN, EVENT_END = 0, 1, 2, 3
"""Kinds of events, about a request (ARRIVAL, JOIN) or a worker (PREFILLED, END)."""
PoolEvent = tuple[float, int, int, int]
"""Time in s, kind, request or worker, version of the worker's schedule."""


@njit_allocating
def _run_prefill_step(
    prefill: PrefillWorkerPool,
    first: int,
    num_arrived: int,
    prompt: np.ndarray,
    attention_s: np.ndarray,
    batch: list[int],
    loads: np.ndarray,
    attention: np.ndarray,
) -> tuple[int, float]:
    """Fill `batch` with the worker's next requests, from `first` on, that fit into one step.

    Returns the first request of the worker's next step, and the seconds of this one.
    """
    max_tokens, i = len(prefill.rank_step_s) - 1, first
    batch.clear()
    loads[:] = 0.0
    attention[:] = 0.0
    while i < num_arrived:  # the next prompt goes to the emptiest rank, if it has room
        rank = int(np.argmin(loads))
        if loads[rank] > 0 and loads[rank] + prompt[i] > max_tokens:
            break
        loads[rank] += prompt[i]
        attention[rank] += attention_s[i]
        batch.append(i)
        i += prefill.workers
    chunks = max(np.ceil(loads.max() / max_tokens), 1.0)
    rank_s = prefill.rank_step_s[int(np.ceil(loads.max() / chunks))] + prefill.step_s
    collective_s = prefill.collective_step_s[int(np.ceil(loads.sum() / prefill.ranks / chunks))]
    return i, chunks * (rank_s + collective_s) + attention.max()


@njit_allocating
def _advance_decode(
    decode: DecodeWorkerPool,
    worker: int,
    now: float,
    batch: int,
    tokens: np.ndarray,
    passed: np.ndarray,
    since: np.ndarray,
) -> None:
    """Let the `batch` sequences of a worker decode until `now`."""
    if batch:
        tokens[batch] += batch * (now - since[worker]) / decode.step_s[batch]
        passed[worker] += (now - since[worker]) / decode.step_s[batch]
    since[worker] = now


@njit_allocating
def _schedule_next_end(
    decode: DecodeWorkerPool,
    worker: int,
    now: float,
    running: list[tuple[float, int]],
    passed: np.ndarray,
    version: np.ndarray,
    events: list[PoolEvent],
) -> None:
    """Schedule the end of the worker's next sequence; a new version invalidates earlier events."""
    version[worker] += 1
    if running:
        gap = (running[0][0] - passed[worker]) * decode.step_s[len(running)]
        heapq.heappush(events, (now + max(gap, 0.0), EVENT_END, worker, version[worker]))


def _simulate_tandem_pools(
    prefill: PrefillWorkerPool, decode: DecodeWorkerPool, arrival: np.ndarray, concurrency: int,
    prompt: np.ndarray, attention_s: np.ndarray, travel_s: np.ndarray, steps: np.ndarray,
) -> PoolTimeline:  # fmt: skip
    """Simulate [n] requests in both pools.

    `arrival` is in seconds, ascending. If `concurrency` > 0, requests are held back while this many
    are in flight. `prompt` has the tokens to compute, `attention_s` the seconds of their attention
    on one rank, `travel_s` the seconds from the end of prefill to the KV cache's arrival at the
    decode worker, and `steps` the decode steps after the first token.
    """
    n, slots = len(arrival), len(decode.step_s) - 1
    sent, prefilled = np.full(n, np.nan), np.full(n, np.nan)
    joined, ended = np.full(n, np.nan), np.full(n, np.nan)
    tokens, busy = np.zeros(slots + 1), np.zeros(1)
    num_arrived, upcoming = 0, np.arange(prefill.workers)  # requests; next one of each worker
    idle = np.ones(prefill.workers, np.bool_)
    batches = [[0][:0] for _ in range(prefill.workers)]
    ready, taken = [[0][:0] for _ in range(decode.workers)], np.zeros(decode.workers, np.int64)
    running = [[(0.0, 0)][:0] for _ in range(decode.workers)]  # (`passed` at its end, request)
    passed, since = np.zeros(decode.workers), np.zeros(decode.workers)  # steps done, by what time
    version = np.zeros(decode.workers, np.int64)
    loads, attention = np.zeros(prefill.ranks), np.zeros(prefill.ranks)
    events = [(0.0, 0, 0, 0)][:0]
    sendable = min(concurrency, n) if concurrency else n
    for i in range(sendable):
        sent[i] = arrival[i]
        heapq.heappush(events, (arrival[i], EVENT_ARRIVAL, i, 0))
    while events:
        now, kind, subject, stamp = heapq.heappop(events)
        touched = -1  # the decode worker that may have a slot for a waiting sequence
        if kind == EVENT_ARRIVAL:
            num_arrived += 1
            if len(events) > 0 and events[0][0] == now and events[0][1] == EVENT_ARRIVAL:
                continue  # simultaneous arrivals may share a step
        elif kind == EVENT_PREFILLED:
            for i in batches[subject]:
                prefilled[i], batch = now, min(len(running[i % decode.workers]) + 1, slots)
                arrives = now + travel_s[i] + decode.kv_transfer_steps * decode.step_s[batch]
                heapq.heappush(events, (arrives, EVENT_JOIN, i, 0))
            idle[subject] = True
        elif kind == EVENT_JOIN:
            touched = subject % decode.workers
            ready[touched].append(subject)
        elif stamp == version[subject]:
            touched = subject
            _advance_decode(decode, subject, now, len(running[subject]), tokens, passed, since)
            end, i = heapq.heappop(running[subject])
            passed[subject], ended[i] = max(passed[subject], end), now
            _schedule_next_end(decode, subject, now, running[subject], passed, version, events)
            if concurrency and sendable < n:
                sent[sendable] = max(now, arrival[sendable])
                heapq.heappush(events, (sent[sendable], EVENT_ARRIVAL, sendable, 0))
                sendable += 1
        for worker in (
            range(prefill.workers)
            if kind == EVENT_ARRIVAL
            else range(subject, subject + (kind == EVENT_PREFILLED))
        ):
            if idle[worker] and upcoming[worker] < num_arrived:
                upcoming[worker], seconds = _run_prefill_step(
                    prefill, upcoming[worker], num_arrived, prompt, attention_s, batches[worker],
                    loads, attention,
                )  # fmt: skip
                busy[0] += seconds
                idle[worker] = False
                heapq.heappush(events, (now + seconds, EVENT_PREFILLED, worker, 0))
        while (
            touched >= 0 and taken[touched] < len(ready[touched]) and len(running[touched]) < slots
        ):
            i = ready[touched][taken[touched]]
            taken[touched] += 1
            _advance_decode(decode, touched, now, len(running[touched]), tokens, passed, since)
            joined[i] = now
            heapq.heappush(running[touched], (passed[touched] + steps[i], i))
            _schedule_next_end(decode, touched, now, running[touched], passed, version, events)
    return PoolTimeline(sent, prefilled, joined, ended, tokens, busy)


def _build_example() -> tuple[object, ...]:
    one = np.ones(1)
    pools = PrefillWorkerPool(1, 1, one, one, 1.0), DecodeWorkerPool(1, one, 1.0)
    return *pools, one, 0, one, one, one, one


simulate_tandem_pools = EntryPoint(_simulate_tandem_pools, _build_example)
