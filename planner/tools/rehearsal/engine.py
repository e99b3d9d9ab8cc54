"""Schedule requests as they come, step by step, as vLLM V1 does (v1/core/sched/scheduler.py).

`planner.simulator` needs all requests in advance and simulates millions; this plays one engine
live. Blocks are those of one group of full attention; other caches count as the memory plan does.
"""

import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    num_cached: int = 0  # prompt tokens found in the prefix cache when first scheduled
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    in_step: bool = False
    announce: Callable[[int], None] = lambda new: None  # called with the number of new tokens
    num_private: int = 0  # blocks that no other request can find
    shared: list[int] = field(default_factory=list)  # keys of its blocks in the prefix cache

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


class LiveBlockPool:
    """The KV cache: blocks in use, and those that the prefix cache keeps until others need them."""

    def __init__(self, num_blocks: int, count_blocks: Callable[[int], int], block_size: int):
        """Create an empty pool; `count_blocks` returns the blocks of a request by its tokens."""
        self.total, self.count_blocks, self.block_size = num_blocks, count_blocks, block_size
        self.used = 0
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def usage(self) -> float:
        """The fraction of the blocks in use."""
        return self.used / self.total

    def find_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Return the keys of the leading blocks that are cached, which leave a token to compute."""
        keys, key = [], 0
        for end in range(self.block_size, len(tokens), self.block_size):
            key = hash((key, tuple(tokens[end - self.block_size : end])))
            if key not in self._references and key not in self._idle:
                break
            keys.append(key)
        return keys

    def allocate(self, request: LiveRequest, num_tokens: int, found: Sequence[int] = ()) -> bool:
        """Take the blocks that `request` lacks for `num_tokens`; False if too few are free.

        `found` are blocks of the prefix cache that it starts with.
        """
        held = len(request.shared) + request.num_private + len(found)
        lacking = max(self.count_blocks(num_tokens) - held, 0)
        revived = sum(key in self._idle for key in found)
        if lacking + revived > self.total - self.used:
            return False
        for key in found:
            self._idle.pop(key, None)
            self._references[key] = self._references.get(key, 0) + 1
        request.shared += found
        request.num_private += lacking
        self.used += lacking + revived
        while self.used + len(self._idle) > self.total:
            self._idle.popitem(last=False)
        return True

    def publish(self, request: LiveRequest) -> None:
        """Let others find the full blocks that `request` has computed."""
        size, done = self.block_size, len(request.shared)
        while (done + 1) * size <= request.num_computed and request.num_private:
            key = request.shared[-1] if done else 0
            key = hash((key, tuple(request.tokens[done * size : (done + 1) * size])))
            if key in self._references or key in self._idle:
                return  # another computed the same at the same time: these stay private
            self._references[key] = 1
            request.shared.append(key)
            request.num_private -= 1
            done += 1

    def release(self, request: LiveRequest) -> None:
        """Give all blocks back; the prefix cache keeps the last blocks for the shortest time."""
        self.used -= request.num_private
        for key in reversed(request.shared):
            self._references[key] -= 1
            if not self._references[key]:
                del self._references[key]
                self._idle[key] = None
                self.used -= 1
        request.num_private, request.shared = 0, []


@dataclass(frozen=True)
class LiveStep:
    """What a step computes: each request with its tokens, those drafted included."""

    rows: tuple[tuple[LiveRequest, int], ...]
    preempted: tuple[LiveRequest, ...] = ()

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(tokens, context before) of each prompt chunk."""
        return [(n, r.num_computed) for r, n in self.rows if not is_decoding(r)]

    @property
    def contexts(self) -> list[int]:
        """Context of each decoding sequence."""
        return [r.num_computed for r, _ in self.rows if is_decoding(r)]


def is_decoding(request: LiveRequest) -> bool:
    """Whether all tokens of a request but the last are computed."""
    return 0 < request.num_computed == len(request.tokens) - 1


class LiveEngine:
    """One engine: its running and waiting requests, and its KV cache."""

    def __init__(
        self,
        rules: EngineRules,
        pool: LiveBlockPool,
        prefix_hit_fraction: float = 1.0,
        next_token: Callable[[], int] = lambda: 0,
    ):
        """Create an idle engine, in which that fraction of requests finds a cached prefix."""
        self.rules, self.pool, self.next_token = rules, pool, next_token
        self.prefix_hit_fraction = prefix_hit_fraction
        self.running: list[LiveRequest] = []
        self.waiting: deque[LiveRequest] = deque()
        self.drafted = self.accepted = 0  # tokens
        self._random = random.Random(rules.seed)

    def check(self, request: LiveRequest) -> None:
        """Raise `PlannerError` if a request can never be served."""
        needed = request.num_prompt + request.max_output
        if needed > self.rules.max_model_len or self.pool.count_blocks(needed) > self.pool.total:
            raise PlannerError(
                f"{request.num_prompt:,} prompt and {request.max_output:,} output tokens do not fit"
                f" into max_model_len {self.rules.max_model_len:,} and the KV cache"
            )

    def count_cached(self, tokens: Sequence[int]) -> int:
        """Count the leading tokens that are in the prefix cache now."""
        found = self.pool.find_prefix(tokens) if self.rules.enable_prefix_caching else []
        return len(found) * self.pool.block_size

    def abort(self, request: LiveRequest) -> None:
        """Forget a request whose client has left."""
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)
                self.pool.release(request)

    def schedule(self, now_s: float = 0.0, queued_by_s: float = math.inf) -> LiveStep | None:
        """Choose the next step, for requests queued by then; None if there is nothing to compute."""
        budget, drafts = self.rules.max_num_batched_tokens, self.rules.num_speculative_tokens
        rows: list[tuple[LiveRequest, int]] = []
        preempted: list[LiveRequest] = []
        for request in list(self.running):
            if request in preempted or request.in_step:
                continue
            ahead = drafts if is_decoding(request) else 0
            count = self._limit(len(request.tokens) + ahead - request.num_computed, budget)
            while count and not self.pool.allocate(request, request.num_computed + count):
                victim = self.running[-1]
                if victim.in_step:  # an earlier step of a pipeline computes it
                    count = 0
                    break
                self._preempt(victim)
                preempted.append(victim)
                rows = [(each, n) for each, n in rows if each is not victim]
                if victim is request:
                    count = 0
            if count:
                rows.append((request, count))
                budget -= count
        while self.waiting and budget and not preempted:
            request = self.waiting[0]
            if len(self.running) >= self.rules.max_num_seqs or request.queued_s > queued_by_s:
                break
            found = self._find_prefix(request)
            cached = len(found) * self.pool.block_size
            needed = len(request.tokens) - cached
            count = self._limit(needed, budget)
            if (count < needed and not self.rules.enable_chunked_prefill) or not (
                self.pool.allocate(request, cached + count, found)
            ):
                break
            self.waiting.popleft()
            self.running.append(request)
            request.num_computed = cached
            if request.scheduled_s is None:
                request.scheduled_s, request.num_cached = now_s, cached
            rows.append((request, count))
            budget -= count
        for request, _ in rows:
            request.in_step = True
        return LiveStep(tuple(rows), tuple(preempted)) if rows or preempted else None

    def finish(self, step: LiveStep, now_s: float = 0.0) -> list[tuple[LiveRequest, int]]:
        """Account for a computed step; return the requests with the number of their new tokens."""
        yields = []
        for request, count in step.rows:
            request.in_step = False
            if request not in self.running:  # aborted
                continue
            new = 0
            ahead = request.num_computed + count - len(request.tokens)
            if ahead >= 0:
                new = 1 + self._accept(ahead)
                new = min(new, request.max_output - request.num_output)
                request.num_computed = len(request.tokens) + new - 1
                request.tokens += [self.next_token() for _ in range(new)]
                request.first_token_s = request.first_token_s or now_s
                request.last_token_s = now_s
                yields.append((request, new))
            else:
                request.num_computed += count
            if self.rules.enable_prefix_caching:
                self.pool.publish(request)
            if request.is_finished:
                self.running.remove(request)
                self.pool.release(request)
        return yields

    def _limit(self, count: int, budget: int) -> int:
        threshold = self.rules.long_prefill_token_threshold
        if self.rules.uses_v033_scheduler and len(self.running) + len(self.waiting) <= 1:
            threshold = 0
        return min(count, budget, threshold or count)

    def _find_prefix(self, request: LiveRequest) -> list[int]:
        if not self.rules.enable_prefix_caching:
            return []
        found = self.pool.find_prefix(request.tokens)
        return found if self._random.random() < self.prefix_hit_fraction else []

    def _preempt(self, victim: LiveRequest) -> None:
        self.running.remove(victim)
        self.pool.release(victim)
        victim.num_computed, victim.in_step = 0, False
        victim.preemptions += 1
        self.waiting.appendleft(victim)

    def _accept(self, drafted: int) -> int:
        """Draw how many drafted tokens are accepted."""
        accepted = 0
        while accepted < drafted and self._random.random() < self.rules.acceptance_rate:
            accepted += 1
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        return accepted
