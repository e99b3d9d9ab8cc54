"""Draw sessions of turns: chats and agents, whose every prompt repeats the turns before it."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.workload.length_distribution import LengthDistribution
from planner.workload.request_generator import BlockContents, build_session_blocks
from planner.workload.traces import Trace
from planner.workload.workload import Workload

NUM_COUNTED_REQUESTS, MAX_WARMUP_REQUESTS = 10_000, 100_000
"""Requests that are planned, and the most before them, in which the first sessions grow."""
NUM_SAMPLED_SESSIONS, MAX_MEAN_TURNS = 4_000, 1_000
"""Sessions from which the mean duration is taken, and the turns that they may have on average."""
WARMUP_DURATION_QUANTILE = 0.95
"""Requests count from this quantile of the sessions' durations on."""
FIRST_TOKEN_S, OUTPUT_TOKEN_S = 0.5, 0.02
"""Assumed seconds to the first token and for each token of an answer: 50 tokens/s."""
MIN_BLOCK_TOKENS, BLOCKS_PER_MEAN_PROMPT = 16, 64
"""Smallest blocks of the analytical cache, and how many of them a mean prompt has about."""


@dataclass(frozen=True)
class Sessions:
    """Sessions of one kind: `users` at work on average, or new ones `per_hour`.

    A first prompt is the system prompt, which all sessions share, and a context of its own; every
    further one adds `added` tokens to the prompt and the answer before. A session ends after its
    turns, or when the next one does not fit into `max_context` tokens.
    """

    turns: LengthDistribution
    system_tokens: int
    context: LengthDistribution
    added: LengthDistribution
    output: LengthDistribution
    think_ms: LengthDistribution  # from the end of an answer to the next prompt
    max_context: float
    users: float | None = None
    per_hour: float | None = None
    answer_s: float | None = None  # mean; None: as `FIRST_TOKEN_S` and `OUTPUT_TOKEN_S` say

    @property
    def mean_answer_s(self) -> float:
        """Mean seconds from a prompt to the end of its answer."""
        return self.answer_s or FIRST_TOKEN_S + OUTPUT_TOKEN_S * self.output.mean


@dataclass(frozen=True, eq=False, kw_only=True)
class SessionTrace(Trace):
    """Requests of sessions in order of arrival; `session` [n] is the number of each one's session.

    Prompts arrive in an open loop: the expected time of an answer stands for its real one. A
    session stays with one replica, as behind a router with session affinity.
    """

    session: np.ndarray
    sessions: Sessions

    @property
    def has_block_ids(self) -> bool:
        """Whether it is known which blocks of prompts are equal."""
        return True

    @cached_property
    def block_tokens(self) -> int:
        """Tokens of a block of `block_ids`, fine enough for the mean prompt."""
        fraction = self.prompt.mean() / (BLOCKS_PER_MEAN_PROMPT * MIN_BLOCK_TOKENS)
        return int(MIN_BLOCK_TOKENS * 2 ** max(round(math.log2(fraction)), 0))

    @cached_property
    def block_ids(self) -> BlockContents:
        """Ids of the blocks of prompts and answers, and the start index of each request's, [n + 1]."""
        ids, start = self.build_blocks(slice(None), self.block_tokens)
        return ids, np.append(start, len(ids))

    def build_blocks(self, rows: np.ndarray | slice, block_size: int) -> BlockContents:
        """Return the blocks of the requests `rows`."""
        return build_session_blocks(
            self.session[rows],
            self.sessions.system_tokens,
            self.prompt[rows],
            self.output[rows],
            block_size,
        )

    @cached_property
    def unhashed_output(self) -> np.ndarray:
        """Output tokens that `block_ids` leave out, [n]: none, as the next turn repeats them."""
        return np.zeros_like(self.output)

    @cached_property
    def prefix_hit_rate(self) -> float:
        """Fraction of prompt tokens that an earlier request has, as an unlimited cache hits."""
        order = np.argsort(self.session, kind="stable")
        session, total = self.session[order], (self.prompt + self.output)[order]
        known = np.full(len(order), self.sessions.system_tokens)
        known[1:] = np.where(session[1:] == session[:-1], total[:-1], known[1:])
        counted = order >= self.num_uncounted
        return float(known[counted].sum() / self.prompt[order][counted].sum())

    @property
    def max_sampled_engines(self) -> int:
        """Engines whose caches tell the hit rate of all, as sessions are alike."""
        return 2

    def select_rows(self, engine: int, engines: int) -> np.ndarray:
        """Return the requests of one of `engines`: those of every n-th session."""
        return np.flatnonzero(self.session % engines == engine)

    def take(self, rows: np.ndarray) -> Self:
        """Return the requests `rows`, all counted."""
        return replace(super().take(rows), session=self.session[rows])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What is assumed of the sessions, in sentences."""
        return (
            f"A prompt follows {format_number(self.sessions.mean_answer_s)} s after the one before, the expected mean"
            " time of an answer, and the time to think; slower answers would slow their sessions down. A"
            " session stays with one replica (session affinity).",
        )

    def __str__(self) -> str:
        counted = self.session[self.num_uncounted :]
        return (
            f"of {len(np.unique(counted)):,} sessions: {len(counted):,} turns in"
            f" {np.ptp(self.arrival[self.num_uncounted :]) / 60:,.0f} minutes"
        )


def build_geometric_turns(mean: float) -> LengthDistribution:
    """Build turns per session that end with the same probability after each."""
    ends = np.log((np.arange(1000) + 0.5) / 1000) / np.log1p(-1 / mean) if mean > 1 else np.ones(1)
    return LengthDistribution.from_samples(np.maximum(np.ceil(ends), 1))


def build_exponential(mean: float) -> LengthDistribution:
    """Build an exponential distribution: waits of independent ends."""
    return LengthDistribution.from_samples(-mean * np.log((np.arange(1000) + 0.5) / 1000))


def scale_sessions(workload: Workload, rate: float) -> Workload:
    """Return the workload at another rate: of more or fewer sessions, each of which thinks as long.

    Other workloads have the same requests, sooner or later.
    """
    trace = workload.trace
    if not isinstance(trace, SessionTrace):
        return replace(workload, rate=rate)
    given, factor = trace.sessions, rate / trace.rate
    load = {name: n * factor for name in ("users", "per_hour") if (n := getattr(given, name))}
    drawn = Workload.from_trace(draw_session_trace(replace(given, **load)), rate)
    return replace(drawn, adapters=workload.adapters, adapter_zipf=workload.adapter_zipf)


@lru_cache(maxsize=8)
def draw_session_trace(sessions: Sessions) -> SessionTrace:
    """Draw the requests of `sessions`: some in which the first sessions grow, then those planned.

    The same sessions give the same requests.
    """
    rng = np.random.default_rng(0)
    if sessions.turns.mean > MAX_MEAN_TURNS:
        raise PlannerError(
            f"turns: {sessions.turns.mean:,.0f} on average; at most {MAX_MEAN_TURNS:,} are planned"
        )
    session, _, _, _, ends = _draw_turns(sessions, NUM_SAMPLED_SESSIONS, rng)
    if not len(session):
        raise PlannerError(
            f"sessions: no first prompt and its answer fit into {sessions.max_context:,.0f} tokens"
        )
    sessions_per_s = (
        sessions.users / float(ends.mean()) if sessions.users else (sessions.per_hour or 0.0) / 3600
    )
    rate = sessions_per_s * len(session) / NUM_SAMPLED_SESSIONS
    warmup_s = min(float(np.quantile(ends, WARMUP_DURATION_QUANTILE)), MAX_WARMUP_REQUESTS / rate)
    duration_s = warmup_s + NUM_COUNTED_REQUESTS / rate
    count = math.ceil(duration_s * sessions_per_s)
    session, prompt, output, offset, _ = _draw_turns(sessions, count, rng)
    arrival = np.sort(rng.random(count))[session] * duration_s + offset
    order = np.argsort(arrival, kind="stable")[: np.count_nonzero(arrival < duration_s)]
    arrival = arrival[order]
    return SessionTrace(
        Path("sessions"), arrival, prompt[order], output[order],
        num_uncounted=int(np.searchsorted(arrival, warmup_s)),
        session=session[order], sessions=sessions,
    )  # fmt: skip


def _draw_turns(
    sessions: Sessions, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw the turns of `count` sessions, one after the other.

    Returns of each turn session, prompt tokens, output tokens and seconds since the first prompt,
    and [count] seconds until each session's next one would begin.
    """
    turns = sessions.turns.sample(count, rng)
    session = np.repeat(np.arange(count), turns)
    first = np.cumsum(turns) - turns
    n = len(session)
    new, output = sessions.added.sample(n, rng), sessions.output.sample(n, rng)
    new[first] = sessions.system_tokens + sessions.context.sample(count, rng)
    gap = sessions.think_ms.sample(n, rng) / 1e3
    gap += sessions.mean_answer_s * output / sessions.output.mean

    def accumulate(values: np.ndarray) -> np.ndarray:
        """Sum up to each turn, within its session."""
        sums = np.cumsum(values)
        return sums - (sums - values)[first][session]

    total, ended = accumulate(new + output), accumulate(gap)
    fits = total <= sessions.max_context
    ends = np.zeros(count)
    np.maximum.at(ends, session[fits], ended[fits])
    return session[fits], (total - output)[fits], output[fits], (ended - gap)[fits], ends
