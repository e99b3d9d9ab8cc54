"""Two pools in series, compiled: prompts queue for prefill workers, then join a decode worker until their last token.

Requests are dealt to the workers of each pool in turn, as NVIDIA Dynamo's frontend does by default,
and wait there, first come, first served. A prefill worker computes as many whole prompts a step as
its data-parallel ranks have room for; the fullest rank decides how long its own part of the step
takes, all ranks together how long the experts do. A decode worker's sequences advance together, one
token a step; it takes a new one whenever it has a seat, `handover` steps after its KV cache has
come. What is left out: differences between ranks of a decode worker.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from planner.simulator.block_pool import CAN_CACHE_COMPILED_CODE, njit_allocating
from planner.simulator.interruptible import make_interruptible

EVENT_ARRIVAL, EVENT_PREFILLED, EVENT_JOIN, EVENT_END = 0, 1, 2, 3


class PrefillWorkerPool(NamedTuple):
    """What a step of one worker costs: `own_s` by tokens of its fullest rank, `joint_s` by tokens per rank."""

    workers: int
    ranks: int
    rank_step_s: np.ndarray  # [max_num_batched_tokens + 1]
    collective_step_s: np.ndarray  # [max_num_batched_tokens + 1]
    step_s: float


class DecodeWorkerPool(NamedTuple):
    """`step_s[n]`: seconds of a step of a worker with n sequences, as many as it takes at most."""

    workers: int
    step_s: np.ndarray  # [seats + 1], rising
    kv_transfer_steps: (
        float  # steps that pass between the arrival of a request's KV cache and its first token
    )


class PoolTimeline(NamedTuple):
    """[n] seconds at which each request was sent, prefilled, began to decode and ended; tokens by decode batch."""

    sent: np.ndarray
    prefilled: np.ndarray
    joined: np.ndarray
    ended: np.ndarray
    tokens: np.ndarray  # [seats + 1] tokens decoded in batches of so many sequences
    busy: np.ndarray  # [1] seconds that prefill workers compute, summed over them


@njit_allocating
def _run_prefill_step(
    prefill: Any,
    first: int,
    came: int,
    prompt: Any,
    attention_s: Any,
    batch: Any,
    loads: Any,
    attention: Any,
) -> Any:
    """A worker's step: every so-manieth of the requests from `first` on that `came`, as many as fit, make its `batch`.

    Returns the request that it begins its next step with, and seconds.
    """
    room, i = len(prefill.rank_step_s) - 1, first
    batch.clear()
    loads[:] = 0.0
    attention[:] = 0.0
    while i < came:  # the next prompt goes to the emptiest rank, if it has room
        rank = int(np.argmin(loads))
        if loads[rank] > 0 and loads[rank] + prompt[i] > room:
            break
        loads[rank] += prompt[i]
        attention[rank] += attention_s[i]
        batch.append(i)
        i += prefill.workers
    chunks = max(np.ceil(loads.max() / room), 1.0)
    own = prefill.rank_step_s[int(np.ceil(loads.max() / chunks))] + prefill.step_s
    joint = prefill.collective_step_s[int(np.ceil(loads.sum() / prefill.ranks / chunks))]
    return i, chunks * (own + joint) + attention.max()


@njit_allocating
def _advance_decode(
    decode: Any, worker: int, now: float, batch: int, tokens: Any, passed: Any, since: Any
) -> None:
    """Let the `batch` sequences of a worker decode until `now`."""
    if batch:
        tokens[batch] += batch * (now - since[worker]) / decode.step_s[batch]
        passed[worker] += (now - since[worker]) / decode.step_s[batch]
    since[worker] = now


@njit_allocating
def _schedule_next_end(
    decode: Any, worker: int, now: float, running: Any, passed: Any, version: Any, events: Any
) -> None:
    """When the next sequence of a worker ends; what was announced before no longer counts."""
    version[worker] += 1
    if running:
        gap = (running[0][0] - passed[worker]) * decode.step_s[len(running)]
        heapq.heappush(events, (now + max(gap, 0.0), EVENT_END, worker, version[worker]))


@make_interruptible
@njit(cache=CAN_CACHE_COMPILED_CODE, nogil=True, error_model="numpy")
def simulate_tandem_pools(
    prefill: Any,
    decode: Any,
    arrival: Any,
    concurrency: int,
    prompt: Any,
    attention_s: Any,
    travel_s: Any,
    steps: Any,
) -> Any:
    """Let [n] requests pass both pools.

    `arrival` in seconds, ascending; `concurrency` > 0 holds requests back while so many are in
    flight. `prompt` in tokens to compute, `attention_s` their attention's seconds on a rank,
    `travel_s` from the end of prefill until a decode worker has the KV cache, `steps` decode steps
    after the first token.
    """
    n, seats = len(arrival), len(decode.step_s) - 1
    sent, done, joined, ended = (
        np.full(n, np.nan),
        np.full(n, np.nan),
        np.full(n, np.nan),
        np.full(n, np.nan),
    )
    tokens, busy = np.zeros(seats + 1), np.zeros(1)
    came, upcoming = (
        0,
        np.arange(prefill.workers),
    )  # requests, in order; the next for each prefill worker
    idle = np.ones(prefill.workers, np.bool_)
    batches = [[0][:0] for _ in range(prefill.workers)]
    ready, taken = [[0][:0] for _ in range(decode.workers)], np.zeros(decode.workers, np.int64)
    running = [
        [(0.0, 0)][:0] for _ in range(decode.workers)
    ]  # (the worker's step count at which it ends, request)
    passed, since = np.zeros(decode.workers), np.zeros(decode.workers)  # steps done, and until when
    version = np.zeros(decode.workers, np.int64)
    loads, attention = np.zeros(prefill.ranks), np.zeros(prefill.ranks)
    events = [(0.0, 0, 0, 0)][:0]
    sendable = min(concurrency, n) if concurrency else n
    for i in range(sendable):
        sent[i] = arrival[i]
        heapq.heappush(events, (arrival[i], EVENT_ARRIVAL, i, 0))
    while events:
        now, kind, what, stamp = heapq.heappop(events)
        touched = -1  # the decode worker where something changes
        if kind == EVENT_ARRIVAL:
            came += 1
            if len(events) > 0 and events[0][0] == now and events[0][1] == EVENT_ARRIVAL:
                continue  # those that come at once may share a step
        elif kind == EVENT_PREFILLED:
            for i in batches[what]:
                done[i], batch = now, min(len(running[i % decode.workers]) + 1, seats)
                arrives = now + travel_s[i] + decode.kv_transfer_steps * decode.step_s[batch]
                heapq.heappush(events, (arrives, EVENT_JOIN, i, 0))
            idle[what] = True
        elif kind == EVENT_JOIN:
            touched = what % decode.workers
            ready[touched].append(what)
        elif stamp == version[what]:
            touched = what
            _advance_decode(decode, what, now, len(running[what]), tokens, passed, since)
            end, i = heapq.heappop(running[what])
            passed[what], ended[i] = max(passed[what], end), now
            _schedule_next_end(decode, what, now, running[what], passed, version, events)
            if concurrency and sendable < n:
                sent[sendable] = max(now, arrival[sendable])
                heapq.heappush(events, (sent[sendable], EVENT_ARRIVAL, sendable, 0))
                sendable += 1
        for w in (
            range(prefill.workers)
            if kind == EVENT_ARRIVAL
            else range(what, what + (kind == EVENT_PREFILLED))
        ):
            if idle[w] and upcoming[w] < came:
                upcoming[w], seconds = _run_prefill_step(
                    prefill, upcoming[w], came, prompt, attention_s, batches[w], loads, attention
                )
                busy[0] += seconds
                idle[w] = False
                heapq.heappush(events, (now + seconds, EVENT_PREFILLED, w, 0))
        while (
            touched >= 0 and taken[touched] < len(ready[touched]) and len(running[touched]) < seats
        ):
            i = ready[touched][taken[touched]]
            taken[touched] += 1
            _advance_decode(decode, touched, now, len(running[touched]), tokens, passed, since)
            joined[i] = now
            heapq.heappush(running[touched], (passed[touched] + steps[i], i))
            _schedule_next_end(decode, touched, now, running[touched], passed, version, events)
    return PoolTimeline(sent, done, joined, ended, tokens, busy)
