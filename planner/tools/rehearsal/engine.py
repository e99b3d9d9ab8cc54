"""Play one engine live: a queue in front of slots and a KV cache, computed a step at a time.

A request starts when a slot and the KV cache of its whole answer are free, so that nothing is
preempted. vLLM's own schedule, which starts it earlier and may preempt it, is in
`planner.simulator`, which needs all requests in advance.
"""

import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.core.errors import PlannerError
from planner.simulator.kernel_types import EngineRules


@dataclass(eq=False)
class LiveRequest:
    """One request, and how far it is."""

    tokens: list[int]  # of the prompt, then of the answer
    max_output: int
    arrived_s: float = 0.0
    queued_s: float = 0.0
    num_prompt: int = 0
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache
    num_blocks: int = 0  # of the KV cache that its whole answer takes, those found left out
    scheduled_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    in_step: bool = False
    announce: Callable[[int], None] = lambda new: None  # called with the number of new tokens

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_finished(self) -> bool:
        """Whether the whole answer has been generated."""
        return self.num_output >= self.max_output

    @property
    def is_decoding(self) -> bool:
        """Whether all tokens but the last are computed."""
        return 0 < self.num_computed == len(self.tokens) - 1


@dataclass(frozen=True)
class LiveStep:
    """What a step computes: each request with its tokens, those drafted included."""

    rows: tuple[tuple[LiveRequest, int], ...]

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(tokens, context before) of each prompt chunk."""
        return [(n, r.num_computed) for r, n in self.rows if not r.is_decoding]

    @property
    def contexts(self) -> list[int]:
        """Context of each decoding sequence."""
        return [r.num_computed for r, _ in self.rows if r.is_decoding]


class LiveEngine:
    """One engine: its running and waiting requests, and its KV cache."""

    def __init__(
        self,
        rules: EngineRules,
        count_blocks: Callable[[int], int],
        prefix_hit_fraction: float = 1.0,
        next_token: Callable[[], int] = lambda: 0,
    ):
        """Create an idle engine, in which that fraction of requests finds a cached prefix.

        `count_blocks` returns the blocks of a request by its tokens.
        """
        self.rules, self.count_blocks, self.next_token = rules, count_blocks, next_token
        self.prefix_hit_fraction = prefix_hit_fraction
        self.num_blocks, self.block_size = rules.num_blocks - 1, int(rules.groups[0, 1])
        self.running: list[LiveRequest] = []
        self.waiting: deque[LiveRequest] = deque()
        self.drafted = self.accepted = 0  # tokens
        self._random = random.Random(rules.seed)
        self._known_blocks: OrderedDict[int, None] = OrderedDict()  # the oldest first

    @property
    def usage(self) -> float:
        """The fraction of the KV cache in use."""
        tokens = sum(
            self.count_blocks(len(r.tokens)) * self.block_size - r.num_cached for r in self.running
        )
        return min(tokens / (self.num_blocks * self.block_size), 1.0)

    def check(self, request: LiveRequest) -> None:
        """Raise `PlannerError` if a request can never be served."""
        needed = request.num_prompt + request.max_output
        if needed > self.rules.max_model_len or self.count_blocks(needed) > self.num_blocks:
            raise PlannerError(
                f"{request.num_prompt:,} prompt and {request.max_output:,} output tokens do not fit"
                f" into max_model_len {self.rules.max_model_len:,} and the KV cache"
            )

    def count_cached(self, tokens: Sequence[int]) -> int:
        """Count the leading tokens that are in the prefix cache now, which leave one to compute."""
        found = 0
        for key in self._hash_blocks(tokens[:-1]):
            if key not in self._known_blocks:
                break
            found += self.block_size
        return found

    def abort(self, request: LiveRequest) -> None:
        """Forget a request whose client has left."""
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)

    def schedule(self, now_s: float = 0.0, queued_by_s: float = math.inf) -> LiveStep | None:
        """Choose the next step, for requests queued by then; None if there is nothing to compute."""
        budget, rows = self.rules.max_num_batched_tokens, list[tuple[LiveRequest, int]]()
        ready = [request for request in self.running if not request.in_step]
        while budget:
            if not ready:
                if not (self.waiting and self._start_next(now_s, queued_by_s)):
                    break
                ready = self.running[-1:]
            request = ready.pop(0)
            drafts = self.rules.num_speculative_tokens if request.is_decoding else 0
            count = min(len(request.tokens) + drafts - request.num_computed, budget)
            request.in_step = True
            rows.append((request, count))
            budget -= count
        return LiveStep(tuple(rows)) if rows else None

    def finish(self, step: LiveStep, now_s: float = 0.0) -> list[tuple[LiveRequest, int]]:
        """Account for a computed step; return the requests with the number of their new tokens."""
        yields = []
        for request, count in step.rows:
            request.in_step = False
            if request not in self.running:  # aborted
                continue
            ahead = request.num_computed + count - len(request.tokens)
            if ahead < 0:
                request.num_computed += count
                continue
            new = min(1 + self._accept(ahead), request.max_output - request.num_output)
            request.num_computed = len(request.tokens) + new - 1
            request.tokens += [self.next_token() for _ in range(new)]
            request.last_token_s = now_s
            yields.append((request, new))
            if request.first_token_s is None or request.is_finished:
                self._remember(request.tokens[: request.num_computed])
            request.first_token_s = request.first_token_s or now_s
            if request.is_finished:
                self.running.remove(request)
        return yields

    def _start_next(self, now_s: float, queued_by_s: float) -> bool:
        """Start the first request of the queue; False if a slot or KV cache is missing."""
        request = self.waiting[0]
        if len(self.running) >= self.rules.max_num_seqs or request.queued_s > queued_by_s:
            return False
        finds = self._random.random() < self.prefix_hit_fraction
        cached = self.count_cached(request.tokens) if finds else 0
        needed = self.count_blocks(request.num_prompt + request.max_output)
        blocks = needed - cached // self.block_size
        if sum(each.num_blocks for each in self.running) + blocks > self.num_blocks:
            return False
        request.num_blocks, request.scheduled_s = blocks, now_s
        request.num_computed = request.num_cached = cached
        self.running.append(self.waiting.popleft())
        return True

    def _hash_blocks(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield a key for each full block, by all tokens up to its end."""
        key = 0
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            key = hash((key, tuple(tokens[end - self.block_size : end])))
            yield key

    def _remember(self, tokens: Sequence[int]) -> None:
        """Let others find the blocks of these tokens, in place of those used longest ago."""
        if self.rules.enable_prefix_caching:
            for key in reversed([*self._hash_blocks(tokens)]):  # the last are the first to go
                self._known_blocks[key] = None
                self._known_blocks.move_to_end(key)
        while len(self._known_blocks) > self.num_blocks:
            self._known_blocks.popitem(last=False)

    def _accept(self, drafted: int) -> int:
        """Draw how many drafted tokens are accepted."""
        accepted = 0
        while accepted < drafted and self._random.random() < self.rules.acceptance_rate:
            accepted += 1
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        return accepted
