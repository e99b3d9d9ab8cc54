"""What goes into the compiled replay and what comes out: the engine's rules, the cost of a step, requests, an outcome.

Named tuples of numbers and arrays, because that is what compiled code can read; `simulator.replay`
makes them.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np

ITL_BINS_PER_DECADE = 200
"""Bins of the inter-token latency histogram per factor of ten; the first starts at `ITL_FIRST` seconds."""
ITL_FIRST_BIN_S = 1e-5
NUM_ITL_BINS = 8 * ITL_BINS_PER_DECADE
NUM_KV_USAGE_BINS = 1001
"""Bins of KV usage from 0 to 1."""
NOTE_GAUGE, NOTE_STEP, NOTE_ENTRY, NOTE_PREEMPTED, NOTE_FINISHED = range(5)
"""Notes. GAUGE: seconds, running, waiting, used blocks, scheduled tokens. STEP: step, tokens, running, waiting, free
blocks. The others: row of the step among steps, request; ENTRY also its tokens in that step."""


class EngineRules(NamedTuple):
    """What the engine is told, in its own argument names; tokens, blocks and requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int  # including the null block
    max_model_len: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    async_scheduling: bool
    priority: bool  # policy
    uses_v033_scheduler: bool  # as 0.33.0 does it, else as 0.20.2
    groups: (
        np.ndarray
    )  # [groups, 2]: 0 = full attention, w > 0 = sliding window, -b = b blocks of state; block size
    num_speculative_tokens: int = 0
    acceptance_rate: float = (
        0.0  # chance that a drafted token is kept, given that the ones before it were
    )
    num_lookahead_tokens: int = 0  # slots for the drafter: k for EAGLE, MTP and draft models
    seed: int = 0
    recv_interval: int = (
        1  # decode steps between two looks for new requests (SGLang); after a prompt there is one
    )
    max_loras: int = 0  # adapters in one step, and slots on the GPU
    max_cpu_loras: int = 0  # adapters kept in host memory
    host_blocks: int = 0  # blocks that host memory keeps beside the pool


class StepCostTable(NamedTuple):
    """Seconds of one engine step with T tokens of R sequences, the sum of

    - fixed_s + tokens_s[T] + rows_s[R] + sequences_s[S] + state_s S for S sequences, of which R
      tokens may be sampled (the last of each and drafted ones), and prefill_step_s if some of the
      tokens are a prompt's,
    - decode_context_s x tokens in the cache of each decoding sequence, and for each row (window,
      seconds) of decode_windows the same where no more than `window` tokens count,
    - prefill_pair_s x (query, key) pairs of each prompt chunk, t (c + (t + 1) / 2) for t tokens
      after c, and prefill_windows likewise.

    A decoding sequence's cache counts once, however many drafted tokens it has. Tables shorter than
    T, R or S end in their last entry. That is the time through all `stages` of a pipeline, in which
    as many steps are under way at once.
    """

    tokens_s: np.ndarray
    rows_s: np.ndarray
    fixed_s: float = 0.0
    state_s: float = 0.0
    decode_context_s: float = 0.0
    prefill_pair_s: float = 0.0
    prefill_step_s: float = 0.0
    decode_windows: np.ndarray = np.empty((0, 2))
    prefill_windows: np.ndarray = np.empty((0, 2))
    stages: int = 1
    sequences_s: np.ndarray = np.zeros(1)
    prompt_s: float = 0.0
    adapter_s: float = (
        0.0  # for each different adapter in the step, and for each token that one changes
    )
    adapter_token_s: float = 0.0
    adapter_load_s: float = (
        0.0  # for each that has to come from host memory, and in addition from disk
    )
    adapter_cold_s: float = 0.0
    host_block_s: float = 0.0  # to load a block from host memory
    # decoding sequences whose KV is read at the same time, equal blocks once; 0: each its own
    concurrent_readers: float = 0.0


class RequestBatch(NamedTuple):
    """[n] requests in order of arrival. `content` names full blocks: equal prefixes have equal numbers."""

    arrival: np.ndarray  # [n] float64, seconds (steps when untimed), ascending
    prompt: np.ndarray  # [n] int32
    output: np.ndarray  # [n] int32
    content: np.ndarray = np.empty(
        0
    )  # int32; the k-th full block of request i is content[content_start[i] + k]
    content_start: np.ndarray = np.empty(0)  # [n] int64
    rank: np.ndarray = np.empty(
        0
    )  # [n] int64, place in the order of (priority, arrival); empty: of arrival
    concurrency: int = 0  # requests in flight at most: the next is sent when one ends; 0 = no limit
    # from sending until the scheduler sees the request, and per prompt token not cached then
    request_s: float = 0.0
    prompt_token_s: float = 0.0
    adapter: np.ndarray = np.empty(
        0
    )  # [n] int32, number of its adapter from 0, -1 without; empty: nobody has one


ROUTE_ROUND_ROBIN, ROUTE_LEAST_LOADED, ROUTE_PREFIX_AFFINITY = range(3)
"""Policies of a `Router`: in turn; to the replica with the fewest requests; to the one with the highest score."""


class RouterConfig(NamedTuple):
    """Who sends a request to which of `replicas`, each with its own engine.

    The score under PREFIX_AFFINITY is `prefix_weight` x the share of the prompt's blocks that the
    replica has, + `queue_weight` x (most - own) / (most - fewest) waiting requests, + `kv_weight` x
    free share of the KV cache: the scorers and weights of the Gateway API Inference Extension and
    llm-d.
    """

    replicas: int = 1
    policy: int = ROUTE_ROUND_ROBIN
    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    kv_weight: float = 2.0
    # it is told what replicas have; else it goes by what it sent where, of each prompt's start
    precise: bool = True
    scale_at: np.ndarray = np.empty(
        0
    )  # s, ascending: from then on requests go to the first `scale_to` replicas
    scale_to: np.ndarray = np.empty(0)


class SimulationOptions(NamedTuple):
    """How a replay is run: see `simulator.router.simulate`."""

    timed: bool
    log: bool
    gauge_s: float
    stop_at_first_preemption: bool


class SimulationOutcome(NamedTuple):
    """What happened. `stuck`: -1, or a request that can never be scheduled; -2: stopped before the first preemption."""

    stuck: int
    sent: np.ndarray  # [n] seconds; NaN where not reached, as in the next three
    scheduled: np.ndarray
    first_token: np.ndarray
    last_token: np.ndarray
    preemptions: np.ndarray
    cached: np.ndarray  # [n] prompt tokens found in the prefix cache when first scheduled
    itl: np.ndarray  # [ITL_BINS] counts
    usage: np.ndarray  # [USAGE_BINS] busy seconds by share of blocks in use
    # steps, busy s, tokens; decoding sequences summed over steps and over s; blocks free at the end
    totals: np.ndarray
    notes: np.ndarray  # [.., 6] what was to be noted: a kind (above) and five numbers
    replica: np.ndarray = np.empty(0, np.int32)  # [n] who served it, where there are several

    def get_notes(self, kind: int, columns: int) -> np.ndarray:
        """[.., columns] the notes of one kind, in order."""
        return self.notes[self.notes[:, 0] == kind, 1 : 1 + columns]


KernelTypeT = TypeVar("KernelTypeT", EngineRules, StepCostTable, RequestBatch, RouterConfig)
_ARRAY_DTYPES: dict[str, type] = {
    "prompt": np.int32, "output": np.int32, "content": np.int32, "adapter": np.int32,
    "rank": np.int64, "content_start": np.int64, "groups": np.int64,
}  # fmt: skip


def to_compiled_types(part: KernelTypeT) -> KernelTypeT:
    """The same with every field of exactly the type that `simulator.router` was compiled for."""
    values: list[Any] = []
    for (name, kind), value in zip(part.__annotations__.items(), part, strict=True):
        is_array = kind is np.ndarray
        values.append(
            np.require(value, _ARRAY_DTYPES.get(name, float), ["C", "W"])
            if is_array
            else kind(value)
        )
    return type(part)(*values)
