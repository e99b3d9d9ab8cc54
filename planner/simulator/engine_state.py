"""One engine of the compiled replay: what it holds, its state, and how a new one begins."""

from typing import Any, NamedTuple

import numpy as np

from planner.simulator import block_pool
from planner.simulator import kernel_types as kinds
from planner.simulator.block_pool import njit_allocating, njit_force_inline

_TIME_FIELDS = (
    "now",
    "entry",
    "end",
    "spent",
    "last_gap",
    "soonest",
    "adapters_s",
    "loaded",
    "last",
)
_COUNT_FIELDS = (
    "arrived", "due", "done", "queued", "front", "unseen", "num_running", "num_spare",
    "num_waiting", "first", "flying",
    "last_bin", "steps", "gauges", "stuck", "turns", "active", "awake", "admitted", "drifted",
    "contexts", "calm",
)  # fmt: skip
_FLAG_FIELDS = ("steady", "blocked", "fed")
ENGINE_STATE_DTYPE = np.dtype(
    [
        (name, kind)
        for kind, names in (
            (float, _TIME_FIELDS),
            (np.int64, _COUNT_FIELDS),
            (np.bool_, _FLAG_FIELDS),
        )
        for name in names
    ],
    align=True,
)
"""Numbers of one engine that change as it goes.

now: the scheduler's time; entry: when the next step may start; end: of the last one; spent: its
seconds; soonest: when the next request that was sent gets to the scheduler; arrived: requests sent;
due: that will be; done: that ended; queued, front: order of the last that joined the queue, and
that was put back to its front; unseen: decode steps since it looked for new ones; first, flying:
oldest step under way, and how many are; steady: in the last step everybody decoded; blocked: the
first in the queue did not fit; stuck: see `Outcome`; last_gap, last_bin: the last inter-token
latency, and its bin; fed: requests come from a router; turns: steps that were scheduled; active:
different adapters in this one, and adapters_s: the seconds that they add; loaded: when the last
blocks are there from host memory; last: the end of the last step whose outputs were taken; awake:
those that run and do not drift; admitted: times that a request was; drifted: steps that were
scheduled; contexts: tokens in the KV cache of those that drift; calm: the turn from which on
somebody may begin to.
"""
MAX_FAST_PATH_STEPS = 2048
"""Steps for which one drifts at most before it is looked at again."""


class FastPathSums(NamedTuple):
    """Sums over those that drift, see `simulator.drift`. A ring is [2]: who comes next, who comes before."""

    since: np.ndarray  # [seats] `drifted` when it began to drift, -1: it is awake
    order: np.ndarray  # [seats] of admission
    line: np.ndarray  # [2, seats + 1] ring of those that run, in this order, through the last index
    due: (
        np.ndarray
    )  # [2, seats + AHEAD] rings of those to be awoken in the same step, through the last indices
    full: (
        np.ndarray
    )  # [2, seats + block size] likewise those that take a block in steps with the same remainder
    blocks: (
        np.ndarray
    )  # [2, block size] blocks that are taken, and leave windows, in steps with this remainder
    inside: (
        np.ndarray
    )  # [2, decode_windows] tokens inside the windows, and by how many they grow in a step


class EngineState(NamedTuple):
    """What one engine holds; `state` has its numbers. A seat is the place of a running request in all tables."""

    state: np.ndarray  # [1] of `State`
    pool: block_pool.BlockPool
    tables: block_pool.BlockTables
    cap: np.ndarray  # [groups] blocks that admission asks for at most
    request: np.ndarray  # [seats] who runs there, -1 nobody
    known: np.ndarray  # [seats] tokens whose values are there
    computed: np.ndarray  # [seats] tokens in the KV cache, or on their way
    placeholders: np.ndarray  # [seats] outputs that async scheduling counts on
    drafts: np.ndarray  # [seats] drafted tokens
    in_flight: np.ndarray  # [seats] tokens of steps under way
    ready: np.ndarray  # [seats] when its blocks are there that come from host memory
    drift: FastPathSums
    running: np.ndarray  # [seats] seats that are awake, in order of admission
    spare: np.ndarray  # [seats] free ones
    parted: np.ndarray  # requests that the step being scheduled preempts; that the oldest one ends
    coming: list[tuple[float, int]]  # heap of (when the scheduler can see it, request)
    waiting: list[
        list[tuple[float, int]]
    ]  # heaps of (order, request): one, or without an adapter and with each
    heads: np.ndarray  # [heaps] order of their first, inf if there is none
    adapters: (
        np.ndarray
    )  # [adapters, 3] the turn in which each was used, on the GPU (0: not there), in host memory
    batches: np.ndarray  # [depth, 7, seats] steps under way
    sizes: np.ndarray  # [depth] their sequences, ends and rows among the notes
    ends: np.ndarray
    rows: np.ndarray
    itl: np.ndarray
    usage: np.ndarray
    totals: np.ndarray
    notes: list[tuple[float, float, float, float, float, float]]


class RequestRecords(NamedTuple):
    """[n] what became of each request: see `Outcome`; `made` outputs."""

    sent: np.ndarray
    scheduled: np.ndarray
    first_token: np.ndarray
    last_token: np.ndarray
    num_outputs: np.ndarray
    preemptions: np.ndarray
    cached: np.ndarray
    released: np.ndarray  # when the k-th request ended, where it lets another one in
    ended: np.ndarray  # [1] how many did


@njit_allocating
def create_request_records(n: int, closed: bool) -> Any:
    """Nothing happened yet to [n] requests."""
    times, counts, ended = (
        np.full((4, n), np.nan),
        np.zeros((3, n), np.int32),
        np.zeros(1, np.int64),
    )
    released = np.empty(n if closed else 0)
    return RequestRecords(
        times[0], times[1], times[2], times[3], counts[0], counts[1], counts[2], released, ended
    )


@njit_force_inline
def has_windows(rules: Any) -> bool:
    """Whether some KV-cache group looks back over a window only."""
    windows = False
    for g in range(len(rules.groups)):
        windows |= rules.groups[g, 0] > 0
    return windows


@njit_force_inline
def overlaps_steps(rules: Any, table: Any) -> bool:
    """Whether a step is scheduled while the one before it runs, on values that are not there yet."""
    return rules.async_scheduling and table.stages == 1


@njit_force_inline
def tracks_block_contents(rules: Any, traffic: Any) -> bool:
    """Whether blocks are told apart, so that equal ones are found again."""
    return rules.enable_prefix_caching and traffic.content.size > 0


@njit_allocating
def create_engine_state(rules: Any, table: Any, traffic: Any, longest: int, contents: int) -> Any:
    """An idle engine for requests of up to `longest` tokens, whose blocks have so many different `contents`."""
    groups, count, seqs = (
        rules.groups,
        len(rules.groups),
        min(rules.max_num_seqs, traffic.prompt.size),
    )
    depth, smallest, states = 2 if overlaps_steps(rules, table) else table.stages, groups[0, 1], 0
    cap = np.full(count, 1 << 40)
    for g in range(count):
        smallest, states = min(smallest, groups[g, 1]), max(states, -groups[g, 0])
        if groups[g, 0] > 0:
            ahead = rules.max_num_batched_tokens * (depth if rules.uses_v033_scheduler else 1)
            cap[g] = (
                block_pool.count_table_blocks(
                    min(groups[g, 0] - 1 + ahead, rules.max_model_len), 0, groups[g, 1]
                )
                + 1
            )
    caching = tracks_block_contents(rules, traffic)
    longest = min(longest + rules.num_lookahead_tokens, rules.max_model_len)
    pool = block_pool.create_pool(
        rules.num_blocks, contents * count, rules.host_blocks if caching else 0
    )
    tables = block_pool.create_tables(
        seqs,
        count,
        max(block_pool.count_table_blocks(longest, 0, smallest), states) if caching else 0,
    )
    state = np.zeros(1, ENGINE_STATE_DTYPE)
    state[0].num_spare, state[0].unseen, state[0].stuck, state[0].last_gap = (
        seqs,
        rules.recv_interval,
        -1,
        -1.0,
    )
    state[0].soonest = np.inf
    seats, spare = np.full((9, seqs), -1), np.arange(seqs)
    line, due = (
        np.zeros((2, seqs + 1), np.int64),
        np.zeros((2, seqs + MAX_FAST_PATH_STEPS), np.int64),
    )
    line[:] = np.arange(seqs + 1)
    due[:] = np.arange(seqs + MAX_FAST_PATH_STEPS)
    full, blocks = (
        np.zeros((2, seqs + groups[0, 1]), np.int64),
        np.zeros((2, groups[0, 1]), np.int64),
    )
    full[:] = np.arange(seqs + groups[0, 1])
    drift = FastPathSums(
        seats[7], seats[8], line, due, full, blocks, np.zeros((2, len(table.decode_windows)))
    )
    coming, waiting, notes = [(0.0, 0)], [[(0.0, 0)]], [(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)]
    coming.clear()
    waiting[0].clear()
    notes.clear()
    adapters = traffic.adapter.max() + 1 if traffic.adapter.size else 0
    for _ in range(adapters):
        waiting.append(waiting[0].copy())
    return EngineState(
        state, pool, tables, cap, seats[0], seats[1], seats[2], seats[3], seats[4], seats[5],
        np.zeros(seqs), drift,
        seats[6], spare, np.zeros(seqs, np.int64), coming, waiting, np.full(adapters + 1, np.inf),
        np.zeros((adapters, 3), np.int64), np.zeros((depth, 7, seqs), np.int64),
        np.zeros(depth, np.int64),
        np.zeros(depth), np.zeros(depth, np.int64), np.zeros(kinds.NUM_ITL_BINS, np.int64),
        np.zeros(kinds.NUM_KV_USAGE_BINS),
        np.zeros(6), notes,
    )  # fmt: skip
