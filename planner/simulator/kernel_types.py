"""Types that enter and leave the compiled simulation: rules, step costs, requests, an outcome.

They are named tuples of numbers and arrays, since compiled code can read these.
`simulator.simulation` creates them.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np

ITL_BINS_PER_DECADE = 200
"""Bins of the inter-token latency histogram per factor of ten, from `ITL_FIRST_BIN_S` on."""
ITL_FIRST_BIN_S = 1e-5
NUM_ITL_BINS = 8 * ITL_BINS_PER_DECADE
NUM_KV_USAGE_BINS = 1001
"""Bins of KV cache usage from 0 to 1."""
NOTE_GAUGE, NOTE_STEP, NOTE_ENTRY, NOTE_PREEMPTED, NOTE_FINISHED = range(5)
"""Kinds of notes, each followed by up to five numbers.

GAUGE: seconds, running, waiting, used blocks, scheduled tokens. STEP: step, tokens, running,
waiting, free blocks. The others: row of the step among the steps, request; ENTRY also the request's
tokens in that step.
"""


class EngineRules(NamedTuple):
    """Engine arguments by their own names, in tokens, blocks and requests, and other rules."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int  # including the null block
    max_model_len: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    async_scheduling: bool
    priority: bool  # policy
    uses_v033_scheduler: bool  # schedule as 0.33.0 does, else as 0.20.2
    # [groups, 2] reach and block size; reach 0: full attention, w > 0: a sliding window, -b: b
    # blocks of state
    groups: np.ndarray
    num_speculative_tokens: int = 0
    # probability that a drafted token is accepted if those before it were
    acceptance_rate: float = 0.0
    num_lookahead_tokens: int = 0  # slots for the drafter: k for EAGLE, MTP and draft models
    seed: int = 0
    # decode steps between two looks for new requests (SGLang); it also looks after every prompt
    recv_interval: int = 1
    max_loras: int = 0  # adapters in one step, and slots on the GPU
    max_cpu_loras: int = 0  # adapters kept in host memory
    host_blocks: int = 0  # blocks that host memory keeps behind the KV cache pool
    # a step has either prompts, which come first, or sequences that decode (SGLang)
    prefills_first: bool = False
    token_ratio: float = 0.0  # share of their outputs that running requests reserve at first


class StepCostTable(NamedTuple):
    """Seconds of one engine step with T tokens of S sequences, R of whose tokens may be sampled.

    R counts the last token of each sequence and drafted ones. The step takes the sum of

    - fixed_s + tokens_s[T] + rows_s[R] + sequences_s[S] + state_s S, and prefill_step_s if it has
      prompt tokens,
    - decode_context_s x context tokens of each decoding sequence, and for each row (window,
      seconds) of decode_windows seconds x at most `window` of them,
    - prefill_pair_s x (query, key) pairs of each prompt chunk, t (c + (t + 1) / 2) for t tokens
      after c, and likewise prefill_windows; prompt_s per chunk,
    - what adapters add.

    A decoding sequence's context counts once, whatever its drafted tokens. Tables shorter than T, R
    or S continue with their last entry. The sum is the time through all `stages` of a pipeline,
    which works on as many steps at once.
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
    # the part of `tokens_s` that ranks on one clock do together, by their mean tokens
    shared_tokens_s: np.ndarray = np.zeros(1)
    padded_tokens: int = 0  # up to which all of them have as many tokens as the fullest
    prompt_s: float = 0.0
    adapter_s: float = 0.0  # per distinct adapter in the step
    adapter_token_s: float = 0.0  # per token that uses an adapter
    adapter_load_s: float = 0.0  # per adapter loaded from host memory
    adapter_cold_s: float = 0.0  # per adapter loaded from disk, in addition
    host_block_s: float = 0.0  # per block loaded from host memory
    # decoding sequences whose KV cache is read at the same time, equal blocks once; 0: one each
    concurrent_readers: float = 0.0


class RequestBatch(NamedTuple):
    """[n] requests in order of arrival."""

    arrival: np.ndarray  # [n] float64, seconds (steps if untimed), ascending
    prompt: np.ndarray  # [n] int32
    output: np.ndarray  # [n] int32
    # int32; the k-th full block of request i has content[content_start[i] + k]; equal prefixes have
    # equal numbers
    content: np.ndarray = np.empty(0)
    content_start: np.ndarray = np.empty(0)  # [n] int64
    # [n] int64, place in the order of (priority, arrival); empty: the order of arrival
    rank: np.ndarray = np.empty(0)
    concurrency: int = 0  # most requests in flight: the next is sent when one ends; 0 = no limit
    # seconds from sending until the scheduler sees the request, and per uncached prompt token
    request_s: float = 0.0
    prompt_token_s: float = 0.0
    # [n] int32, number of the adapter from 0, -1 without; empty: no request has one
    adapter: np.ndarray = np.empty(0)


ROUTE_ROUND_ROBIN, ROUTE_LEAST_LOADED, ROUTE_PREFIX_AFFINITY = range(3)
"""Policies of a router: in turn; to the fewest requests; to the highest score."""


class RouterConfig(NamedTuple):
    """How requests are distributed to `replicas`, each with its own engine.

    The score under PREFIX_AFFINITY is `prefix_weight` x the fraction of the prompt's blocks that
    the replica has + `queue_weight` x (most - own) / (most - fewest) waiting requests + `kv_weight`
    x the free fraction of its KV cache. These are scorers and weights of the Gateway API Inference
    Extension and llm-d.
    """

    replicas: int = 1
    policy: int = ROUTE_ROUND_ROBIN
    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    kv_weight: float = 2.0
    # replicas report their blocks; else the router goes by the starts of prompts that it sent
    precise: bool = True
    # consecutive replicas that start every step together and end it with the slowest: ranks that
    # share experts
    ranks_per_clock: int = 1


class SimulationOptions(NamedTuple):
    """How to run a simulation.

    Up to the first preemption, prompts without a shared prefix never hit the prefix cache, so block
    counts suffice until there.
    """

    timed: bool  # steps take what the step costs say, else 1
    log: bool  # log every step of one replica
    gauge_s: float  # s between samples of the gauges; 0: none
    stop_at_first_preemption: bool
    shares_clock: bool  # the router starts and ends every step, see `RouterConfig.ranks_per_clock`


class SimulationOutcome(NamedTuple):
    """What happened to [n] requests and in the engines."""

    stuck: int  # -1; a request that can never be scheduled; -2: stopped before a preemption
    sent: np.ndarray  # [n] seconds; NaN if not reached, as in the next three
    scheduled: np.ndarray
    first_token: np.ndarray
    last_token: np.ndarray
    preemptions: np.ndarray
    cached: np.ndarray  # [n] prompt tokens in the prefix cache when first scheduled
    itl: np.ndarray  # [NUM_ITL_BINS] counts
    usage: np.ndarray  # [NUM_KV_USAGE_BINS] busy seconds by fraction of blocks in use
    # steps, busy s, tokens; decoding sequences summed over steps and over s; blocks free at the end
    totals: np.ndarray
    notes: np.ndarray  # [.., 6] a kind, see `NOTE_GAUGE`, and five numbers
    replica: np.ndarray = np.empty(0, np.int32)  # [n] replica of each request, if several

    def get_notes(self, kind: int, columns: int) -> np.ndarray:
        """Return [.., columns] the notes of one kind, in order."""
        return self.notes[self.notes[:, 0] == kind, 1 : 1 + columns]


KernelTypeT = TypeVar(
    "KernelTypeT", EngineRules, StepCostTable, RequestBatch, RouterConfig, SimulationOptions
)
_ARRAY_DTYPES: dict[str, type] = {
    "prompt": np.int32, "output": np.int32, "content": np.int32, "adapter": np.int32,
    "rank": np.int64, "content_start": np.int64, "groups": np.int64,
}  # fmt: skip


def to_compiled_types(part: KernelTypeT) -> KernelTypeT:
    """Return `part` with every field of exactly the type that the simulator was compiled for."""
    values: list[Any] = [
        np.require(value, _ARRAY_DTYPES.get(name, float), ["C", "W"])
        if kind is np.ndarray
        else kind(value)
        for (name, kind), value in zip(type(part).__annotations__.items(), part, strict=True)
    ]
    return type(part)(*values)


class PrefillWorkerPool(NamedTuple):
    """Prefill workers and the seconds of their steps, by tokens per rank."""

    workers: int
    ranks: int
    rank_step_s: np.ndarray  # [max_num_batched_tokens + 1] by tokens of the fullest rank
    collective_step_s: np.ndarray  # [max_num_batched_tokens + 1] by mean tokens of the ranks
    step_s: float


class DecodeWorkerPool(NamedTuple):
    """Decode workers and the seconds of their steps, by number of sequences."""

    workers: int
    step_s: np.ndarray  # [slots + 1], rising
    kv_transfer_steps: float  # steps from the arrival of a KV cache to the request's next token


class PoolTimeline(NamedTuple):
    """What happened to [n] requests, in seconds."""

    sent: np.ndarray
    prefilled: np.ndarray
    joined: np.ndarray  # when the request got a slot of its decode worker
    ended: np.ndarray
    tokens: np.ndarray  # [slots + 1] tokens decoded in batches of this size
    busy: np.ndarray  # [1] s of computing, summed over the prefill workers
