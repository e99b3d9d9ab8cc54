"""Two pools in series, compiled: prompts queue for prefill workers, then join a decode worker until their last token.

Requests are dealt to the workers of each pool in turn, as NVIDIA Dynamo's frontend does by default, and wait there,
first come, first served. A prefill worker computes as many whole prompts a step as its data-parallel ranks have room
for; the fullest rank decides how long its own part of the step takes, all ranks together how long the experts do. A
decode worker's sequences advance together, one token a step; it takes a new one whenever it has a seat, `handover`
steps after its KV cache has come. What is left out: differences between ranks of a decode worker.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from planner.simulator.block_pool import KEPT

ARRIVES, PREFILLED, JOINS, ENDS = 0, 1, 2, 3


class PrefillPool(NamedTuple):
    """What a step of one worker costs: `own_s` by tokens of its fullest rank, `joint_s` by tokens per rank."""

    workers: int
    ranks: int
    own_s: np.ndarray  # [max_num_batched_tokens + 1]
    joint_s: np.ndarray  # [max_num_batched_tokens + 1]
    step_s: float


class DecodePool(NamedTuple):
    """`step_s[n]`: seconds of a step of a worker with n sequences, as many as it takes at most."""

    workers: int
    step_s: np.ndarray  # [seats + 1], rising
    handover: float  # steps that pass between the arrival of a request's KV cache and its first token


class Passage(NamedTuple):
    """[n] seconds at which each request was sent, prefilled, began to decode and ended; tokens by decode batch."""

    sent: np.ndarray
    prefilled: np.ndarray
    joined: np.ndarray
    ended: np.ndarray
    tokens: np.ndarray  # [seats + 1] tokens decoded in batches of so many sequences
    busy: np.ndarray  # [1] seconds that prefill workers compute, summed over them


@njit(cache=KEPT, error_model="numpy")
def _append(i: int, worker: int, first: Any, last: Any, after: Any) -> None:
    """Request `i` to the end of the queue of `worker`."""
    after[i] = -1
    if first[worker] < 0:
        first[worker] = i
    else:
        after[last[worker]] = i
    last[worker] = i


@njit(cache=KEPT, error_model="numpy")
def tandem(
    prefill: Any, decode: Any, arrival: Any, concurrency: int, prompt: Any, attention_s: Any, travel_s: Any, steps: Any
) -> Any:
    """Let [n] requests pass both pools.

    `arrival` in seconds, ascending; `concurrency` > 0 holds requests back while so many are in flight. `prompt` in
    tokens to compute, `attention_s` their attention's seconds on a rank, `travel_s` from the end of prefill until a
    decode worker has the KV cache, `steps` decode steps after the first token.
    """
    n, seats = len(arrival), len(decode.step_s) - 1
    room = len(prefill.own_s) - 1
    sent, done, joined, ended = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
    tokens, busy = np.zeros(seats + 1), np.zeros(1)
    after = np.full(n, -1)  # the request behind each in the queue of its worker
    first_waiting, last_waiting = np.full(prefill.workers, -1), np.full(prefill.workers, -1)
    first_ready, last_ready = np.full(decode.workers, -1), np.full(decode.workers, -1)
    idle = np.ones(prefill.workers, np.bool_)
    batches = [[0][:0] for _ in range(prefill.workers)]
    running = [[(0.0, 0)][:0] for _ in range(decode.workers)]  # (the worker's step count at which it ends, request)
    passed, since = np.zeros(decode.workers), np.zeros(decode.workers)  # steps done, and until when
    version = np.zeros(decode.workers, np.int64)
    loads, attention = np.zeros(prefill.ranks), np.zeros(prefill.ranks)
    events = [(0.0, 0, 0, 0)][:0]
    sendable = min(concurrency, n) if concurrency else n
    for i in range(sendable):
        sent[i] = arrival[i]
        heapq.heappush(events, (arrival[i], ARRIVES, i, 0))
    while events:
        now, kind, what, stamp = heapq.heappop(events)
        touched, worker = -1, what % prefill.workers if kind == ARRIVES else what
        if kind == ARRIVES:
            _append(what, worker, first_waiting, last_waiting, after)
        elif kind == PREFILLED:
            for i in batches[what]:
                done[i], batch = now, min(len(running[i % decode.workers]) + 1, seats)
                arrives = now + travel_s[i] + decode.handover * decode.step_s[batch]
                heapq.heappush(events, (arrives, JOINS, i, 0))
            idle[what] = True
        elif kind == JOINS:
            touched = what % decode.workers
            _append(what, touched, first_ready, last_ready, after)
        elif stamp == version[what]:
            touched = what
            batch = len(running[what])
            tokens[batch] += batch * (now - since[what]) / decode.step_s[batch]
            passed[what] += (now - since[what]) / decode.step_s[batch]
            since[what] = now
            end, i = heapq.heappop(running[what])
            passed[what] = max(passed[what], end)
            ended[i] = now
            version[what] += 1
            if running[what]:
                gap = (running[what][0][0] - passed[what]) * decode.step_s[len(running[what])]
                heapq.heappush(events, (now + max(gap, 0.0), ENDS, what, version[what]))
            if concurrency and sendable < n:
                sent[sendable] = max(now, arrival[sendable])
                heapq.heappush(events, (sent[sendable], ARRIVES, sendable, 0))
                sendable += 1
        together = len(events) > 0 and events[0][0] == now and events[0][1] == ARRIVES
        if kind == ARRIVES and together:
            continue
        for w in (
            range(prefill.workers) if kind == ARRIVES else range(worker, worker + 1 if kind == PREFILLED else worker)
        ):
            if not idle[w] or first_waiting[w] < 0:
                continue
            batches[w].clear()
            loads[:] = 0.0
            attention[:] = 0.0
            while first_waiting[w] >= 0:  # the next prompt goes to the emptiest rank, if it has room
                i, rank = first_waiting[w], int(np.argmin(loads))
                if loads[rank] > 0 and loads[rank] + prompt[i] > room:
                    break
                loads[rank] += prompt[i]
                attention[rank] += attention_s[i]
                batches[w].append(i)
                first_waiting[w] = after[i]
            chunks = max(np.ceil(loads.max() / room), 1.0)
            own = prefill.own_s[int(np.ceil(loads.max() / chunks))] + prefill.step_s
            joint = prefill.joint_s[int(np.ceil(loads.sum() / prefill.ranks / chunks))]
            seconds = chunks * (own + joint) + attention.max()
            busy[0] += seconds
            idle[w] = False
            heapq.heappush(events, (now + seconds, PREFILLED, w, 0))
        while touched >= 0 and first_ready[touched] >= 0 and len(running[touched]) < seats:
            i = first_ready[touched]
            first_ready[touched] = after[i]
            batch = len(running[touched])
            if batch:
                tokens[batch] += batch * (now - since[touched]) / decode.step_s[batch]
                passed[touched] += (now - since[touched]) / decode.step_s[batch]
            since[touched], joined[i] = now, now
            heapq.heappush(running[touched], (passed[touched] + steps[i], i))
            version[touched] += 1
            gap = (running[touched][0][0] - passed[touched]) * decode.step_s[batch + 1]
            heapq.heappush(events, (now + max(gap, 0.0), ENDS, touched, version[touched]))
    return Passage(sent, done, joined, ended, tokens, busy)
