"""The state of one engine in the compiled simulation, and how it starts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from planner.simulator.block_pool import (
    BlockPool,
    BlockTables,
    count_table_blocks,
    create_pool,
    create_tables,
)
from planner.simulator.compilation import njit_allocating, njit_compiled, njit_force_inline
from planner.simulator.kernel_types import (
    NUM_ITL_BINS,
    NUM_KV_USAGE_BINS,
    EngineRules,
    RequestBatch,
    StepCostTable,
)

MAX_FAST_PATH_STEPS = 2048
"""Steps after which the scheduler looks at a sequence of the fast path again."""

ADAPTER_IN_STEP, ADAPTER_ON_GPU, ADAPTER_ON_HOST = range(3)
"""Columns of `EngineInstance.adapter_turns`."""

STEP_ROWS = tuple(range(7))
ROW_REQUEST, ROW_SLOT, ROW_TOKENS, ROW_CONTEXT, ROW_DRAFTED, ROW_YIELDS, ROW_PREEMPTIONS = STEP_ROWS
"""Rows of the table of a step's sequences.

REQUEST, in which SLOT; scheduled TOKENS, after CONTEXT tokens, of which DRAFTED; YIELDS: whether
the step yields an output; PREEMPTIONS of the request before the step.
"""

RequestHeap = list[tuple[float, int]]
"""Heap of (key, request)."""
LogEntry = tuple[float, float, float, float, float, float]
"""Kind and five numbers, see `simulator.kernel_types.NOTE_GAUGE`."""


class EngineState:
    """Numbers of one engine that change in every step; a row of a structured array.

    Times are in seconds of the simulated clock (steps in an untimed simulation).
    """

    now: float  # the scheduler's time
    next_start: float  # earliest start of the next step
    last_end: float  # end of the step scheduled last
    step_s: float  # duration of that step
    next_visible: float  # when the scheduler sees the next request that was sent
    adapters_s: float  # what adapters add to the current step
    host_loaded: float  # when the last blocks from host memory arrive
    last_output: float  # end of the step whose outputs were processed last
    token_ratio: float  # share of their outputs that running requests reserve, at `ratio_step`
    num_reserved: float  # tokens that they reserve

    num_sent: int
    num_due: int  # requests that this engine has to serve
    num_finished: int
    back_order: int  # order of the request that joined the queue last
    front_order: int  # order of the request that returned to the front of the queue last
    steps_since_receive: int  # decode steps since the scheduler received requests
    num_running: int
    num_free_slots: int
    num_waiting: int
    oldest: int  # index of the oldest step in flight
    num_steps_in_flight: int
    num_logged_steps: int
    num_gauges: int  # samples of the gauges
    stuck: int  # see `SimulationOutcome`
    turn: int  # steps that went through the scheduler
    num_active_adapters: int  # distinct adapters in the current step
    num_awake: int  # running requests that are not on the fast path
    num_taken: (
        int  # of the step that was scheduled last: its requests that are not on the fast path
    )
    num_victims: int  # requests that it preempted
    num_step_tokens: int
    num_decoding: int  # its sequences that decode
    num_admitted: int  # admissions, repeated ones included
    fast_path_steps: int  # steps scheduled so far, the clock of the fast path
    fast_path_context: int  # tokens in the KV cache of sequences on the fast path
    fast_path_turn: int  # turn from which on sequences may enter the fast path
    ratio_step: int  # `fast_path_steps` without steps of prompts since then

    is_steady: bool  # all running sequences decoded in the last step
    is_blocked: bool  # the first request of the queue did not fit
    is_routed: bool  # requests come from a router
    is_scheduled: bool  # a step is scheduled and priced, but has not started
    has_step: bool  # there is one: an engine that waits for its outputs has none


ENGINE_STATE_DTYPE = np.dtype(list(EngineState.__annotations__.items()), align=True)


class FastPathSums(NamedTuple):
    """Sums over the sequences of the fast path, see `simulator.decode_fast_path`.

    A ring is [2]: successors and predecessors.
    """

    entered: np.ndarray  # [slots] `fast_path_steps` at entry; -1 if not on the fast path
    admission: np.ndarray  # [slots] order of admission
    running_ring: np.ndarray  # [2, slots + 1] running requests by admission; head: the last index
    # [2, slots + MAX_FAST_PATH_STEPS] sequences that leave in the same step; heads: last indices
    exit_rings: np.ndarray
    # [2, slots + block size] sequences that take a block in steps with the same remainder
    block_rings: np.ndarray
    # [2, block size] blocks taken, and blocks that leave windows, in steps with this remainder
    phase_blocks: np.ndarray
    # [2, decode_windows] tokens inside the attention windows, and their growth per step
    window_tokens: np.ndarray


class EngineInstance(NamedTuple):
    """All that one engine holds. A slot is the place of a running request in all tables."""

    state: Sequence[EngineState]  # [1], a structured array
    pool: BlockPool
    tables: BlockTables
    max_admission_blocks: np.ndarray  # [groups] most blocks that admission asks for
    request: np.ndarray  # [slots] request in the slot, -1 if free
    num_tokens: np.ndarray  # [slots] tokens whose values are known
    num_computed: np.ndarray  # [slots] tokens in the KV cache, or in a step in flight
    num_placeholders: np.ndarray  # [slots] outputs that asynchronous scheduling assumes
    num_drafts: np.ndarray  # [slots] drafted tokens
    tokens_in_flight: np.ndarray  # [slots] tokens of steps in flight
    ready_at: np.ndarray  # [slots] s, when the blocks from host memory have arrived
    fast_path: FastPathSums
    running: np.ndarray  # [slots] slots of `num_awake` requests, by admission
    free_slots: np.ndarray  # [slots]
    leaving: np.ndarray  # [slots] requests that the current step preempts or the oldest step ends
    arriving: RequestHeap  # by the time at which the scheduler sees them
    waiting: list[RequestHeap]  # by order: one queue, and one per adapter
    queue_heads: np.ndarray  # [queues] order of the first request, inf if empty
    # [adapters, 3] turn of the last use: in a step, on the GPU, in host memory (0: not loaded)
    adapter_turns: np.ndarray
    batches: np.ndarray  # [depth, `STEP_ROWS`, slots] steps in flight
    batch_sizes: np.ndarray  # [depth] sequences
    batch_ends: np.ndarray  # [depth] s
    batch_log_rows: np.ndarray  # [depth] row of the step log
    itl: np.ndarray  # see `SimulationOutcome`, as the next three
    usage: np.ndarray
    totals: np.ndarray
    notes: list[LogEntry]


class RequestRecords(NamedTuple):
    """[n] what happened to each request, see `SimulationOutcome`."""

    sent: np.ndarray
    scheduled: np.ndarray
    first_token: np.ndarray
    last_token: np.ndarray
    num_outputs: np.ndarray  # tokens so far
    preemptions: np.ndarray
    cached: np.ndarray
    released: np.ndarray  # in a closed loop: when the k-th request ended, which admits another one
    ended: np.ndarray  # [1] number of these


@njit_allocating
def create_request_records(n: int, closed: bool) -> RequestRecords:
    """Create empty records of [n] requests."""
    times, counts = np.full((4, n), np.nan), np.zeros((3, n), np.int32)
    released, ended = np.empty(n if closed else 0), np.zeros(1, np.int64)
    return RequestRecords(
        times[0], times[1], times[2], times[3], counts[0], counts[1], counts[2], released, ended
    )


@njit_force_inline
def has_windows(rules: EngineRules) -> bool:
    """Return whether a KV cache group has a sliding window."""
    windows = False
    for g in range(len(rules.groups)):
        windows |= rules.groups[g, 0] > 0
    return windows


@njit_force_inline
def overlaps_steps(rules: EngineRules, table: StepCostTable) -> bool:
    """Return whether a step is scheduled while the one before it runs, before its outputs exist."""
    return rules.async_scheduling and table.stages == 1


@njit_force_inline
def tracks_block_contents(rules: EngineRules, requests: RequestBatch) -> bool:
    """Return whether blocks have contents, so that the prefix cache can find equal ones."""
    return rules.enable_prefix_caching and requests.content.size > 0


@njit_compiled
def _close_rings(rings: np.ndarray) -> None:
    """Make every node a ring of its own; `rings` is [2, nodes]."""
    for node in range(rings.shape[1]):
        rings[0, node] = rings[1, node] = node


@njit_allocating
def create_engine_instance(
    rules: EngineRules,
    table: StepCostTable,
    requests: RequestBatch,
    longest: int,
    contents: int,
) -> EngineInstance:
    """Create an idle engine for requests of up to `longest` tokens.

    `contents` is the number of distinct block contents.
    """
    groups, count = rules.groups, len(rules.groups)
    num_slots = min(rules.max_num_seqs, requests.prompt.size)
    depth = 2 if overlaps_steps(rules, table) else table.stages
    smallest, states = groups[0, 1], 0
    max_blocks = np.full(count, 1 << 40)
    for g in range(count):
        smallest, states = min(smallest, groups[g, 1]), max(states, -groups[g, 0])
        if groups[g, 0] > 0:
            ahead = rules.max_num_batched_tokens * (depth if rules.uses_v033_scheduler else 1)
            tokens = min(groups[g, 0] - 1 + ahead, rules.max_model_len)
            max_blocks[g] = count_table_blocks(tokens, 0, groups[g, 1]) + 1
    caching = tracks_block_contents(rules, requests)
    longest = min(longest + rules.num_lookahead_tokens, rules.max_model_len)
    host_blocks = rules.host_blocks if caching else 0
    pool = create_pool(rules.num_blocks - 1, contents * count, host_blocks)
    longest_table = max(count_table_blocks(longest, 0, smallest), states) if caching else 0
    tables = create_tables(num_slots, count, longest_table)
    per_slot, free_slots = np.full((9, num_slots), -1), np.arange(num_slots)
    running_ring = np.zeros((2, num_slots + 1), np.int64)
    exit_rings = np.zeros((2, num_slots + MAX_FAST_PATH_STEPS), np.int64)
    block_rings = np.zeros((2, num_slots + groups[0, 1]), np.int64)
    _close_rings(running_ring)
    _close_rings(exit_rings)
    _close_rings(block_rings)
    fast_path = FastPathSums(
        per_slot[7],
        per_slot[8],
        running_ring,
        exit_rings,
        block_rings,
        np.zeros((2, groups[0, 1]), np.int64),
        np.zeros((2, len(table.decode_windows))),
    )
    arriving, waiting = [(0.0, 0)][:0], [[(0.0, 0)][:0]]
    notes, adapters = [(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)][:0], 0
    for adapter in requests.adapter:
        adapters = max(adapters, adapter + 1)
    for _ in range(adapters):
        waiting.append(waiting[0].copy())
    state: Any = np.zeros(1, ENGINE_STATE_DTYPE)
    state[0].num_free_slots, state[0].steps_since_receive = num_slots, rules.recv_interval
    state[0].stuck, state[0].next_visible, state[0].token_ratio = -1, np.inf, rules.token_ratio
    return EngineInstance(
        state,
        pool,
        tables,
        max_blocks,
        per_slot[0],
        per_slot[1],
        per_slot[2],
        per_slot[3],
        per_slot[4],
        per_slot[5],
        np.zeros(num_slots),
        fast_path,
        per_slot[6],
        free_slots,
        np.zeros(num_slots, np.int64),
        arriving,
        waiting,
        np.full(adapters + 1, np.inf),
        np.zeros((adapters, 3), np.int64),
        np.zeros((depth, len(STEP_ROWS), num_slots), np.int64),
        np.zeros(depth, np.int64),
        np.zeros(depth),
        np.zeros(depth, np.int64),
        np.zeros(NUM_ITL_BINS, np.int64),
        np.zeros(NUM_KV_USAGE_BINS),
        np.zeros(6),
        notes,
    )
