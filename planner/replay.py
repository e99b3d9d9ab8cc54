"""The replay: what happens to every request when traffic meets a deployment, by vLLM V1's own schedule.

`replay` is for arrays of requests, `replay_workload` for a `Workload` on a `Deployment`; `planner.cases` reads step-log
cases. The schedule is exact (`planner.scheduler`); the clock is the step cost that the caller gives. Same seed, same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from planner.engines import engine, release
from planner.quantities import PlannerError
from planner.rules import ITL_FIRST, ITL_PER_DECADE, USAGE_BINS, Outcome, Rules, StepTable, Traffic

if TYPE_CHECKING:
    import pandas as pd

    from planner.deployment import Deployment
    from planner.kv import KvPool
    from planner.latency import StepModel
    from planner.workload import Workload

RECENT = (0, 33, 0)
"""From this release on the scheduler differs as `Rules.recent` says (vLLM 0.33.0, v1/core/sched/scheduler.py:699)."""
LOOKAHEAD_METHODS = ("eagle", "mtp", "draft_model", "dflash")
"""Speculative methods whose drafter has a KV cache and so takes slots ahead; n-grams and suffixes take none."""
DEFAULT_SECONDS = 600.0
"""Arrivals that a workload without a number of prompts is replayed for."""


def is_recent(version: str | None) -> bool:
    """Whether vLLM `version` (None: the newest known) schedules as 0.33.0 does; `PlannerError` outside the known range."""
    return release(engine("vllm", version).version) >= RECENT


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """What one engine did. Arrays are [n] requests in order of arrival, in seconds; `outcome` has the raw figures."""

    outcome: Outcome
    prompt: np.ndarray
    output: np.ndarray
    num_blocks: int
    second: float = 1.0  # seconds of one unit of the clock

    @property
    def sent(self) -> np.ndarray:
        """When each request was sent."""
        return self.outcome.sent * self.second

    @cached_property
    def queue(self) -> np.ndarray:
        """From being sent to being scheduled first."""
        return (self.outcome.scheduled - self.outcome.sent) * self.second

    @cached_property
    def ttft(self) -> np.ndarray:
        """Time to first token, from being sent."""
        return (self.outcome.first_token - self.outcome.sent) * self.second

    @cached_property
    def e2e(self) -> np.ndarray:
        """From being sent to the last token."""
        return (self.outcome.last_token - self.outcome.sent) * self.second

    @cached_property
    def tpot(self) -> np.ndarray:
        """Time per output token after the first; requests with one token are left out, as vLLM's benchmark does."""
        later = self.outcome.last_token - self.outcome.first_token
        many = self.output > 1
        return later[many] / (self.output[many] - 1) * self.second

    @property
    def preemptions(self) -> np.ndarray:
        """How often each request was preempted."""
        return self.outcome.preemptions

    @property
    def duration(self) -> float:
        """From the first request sent to the last token."""
        return float((self.outcome.last_token.max() - self.outcome.sent.min()) * self.second)

    @property
    def output_tps(self) -> float:
        """Output tokens per second over the whole run."""
        return float(self.output.sum(dtype=np.int64)) / self.duration

    @property
    def request_tps(self) -> float:
        """Requests per second over the whole run."""
        return len(self.output) / self.duration

    @property
    def decode_batch(self) -> float:
        """Sequences decoding at once, mean over the time that steps run."""
        return float(self.outcome.totals[4] / max(self.outcome.totals[1], 1e-300))

    def kv_usage(self, q: float) -> float:
        """Share of the KV blocks in use that is not exceeded for a share `q` of the time that steps run."""
        return _quantile(self.outcome.usage, q) / (USAGE_BINS - 1)

    @property
    def gauges(self) -> pd.DataFrame:
        """Samples of the engine's gauges, if asked for: seconds, running, waiting, kv_usage, scheduled_tokens."""
        import pandas as pd

        frame = pd.DataFrame(self.outcome.gauges, columns=["seconds", "running", "waiting", "kv_usage", "scheduled_tokens"])
        return frame.assign(seconds=frame.seconds * self.second, kv_usage=frame.kv_usage / (self.num_blocks - 1))

    def stats(self, metric: str) -> dict[str, float]:
        """mean, p50, p95 and p99 in seconds of "ttft", "tpot", "itl", "e2e" or "queue"."""
        if metric == "itl":
            counts = self.outcome.itl
            bins = {q: ITL_FIRST * 10 ** (_quantile(counts, q) / ITL_PER_DECADE) for q in (0.5, 0.95, 0.99)}
            gaps = (self.outcome.last_token - self.outcome.first_token).sum()
            values = [gaps / max(counts.sum(), 1), *bins.values()]
            return dict(zip(("mean", "p50", "p95", "p99"), (float(v) * self.second for v in values), strict=True))
        if metric not in ("ttft", "tpot", "e2e", "queue"):
            raise PlannerError(f"metric {metric!r} is not one of ttft, tpot, itl, e2e, queue")
        values = getattr(self, metric)
        if not len(values):
            return dict.fromkeys(("mean", "p50", "p95", "p99"), math.nan)
        points = np.quantile(values, (0.5, 0.95, 0.99))
        return {"mean": float(values.mean()), "p50": float(points[0]), "p95": float(points[1]), "p99": float(points[2])}

    def frame(self) -> pd.DataFrame:
        """One row per request."""
        import pandas as pd

        tpot = np.full(len(self.output), np.nan)
        tpot[self.output > 1] = self.tpot
        return pd.DataFrame(
            {
                "sent_s": self.sent, "prompt_tokens": self.prompt, "output_tokens": self.output,
                "queue_ms": self.queue * 1e3, "ttft_ms": self.ttft * 1e3, "tpot_ms": tpot * 1e3, "e2e_ms": self.e2e * 1e3,
                "cached_tokens": self.outcome.cached, "preemptions": self.preemptions,
            }
        )  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"{len(self.output):,} requests in {self.duration:,.1f} s: {self.request_tps:,.2f} requests/s, "
            f"{self.output_tps:,.0f} output tokens/s; {self.decode_batch:.1f} decoding at once, "
            f"KV usage p99 {self.kv_usage(0.99):.0%}, {int(self.preemptions.sum())} preemptions",
            "        " + "".join(f"{name:>12}" for name in ("mean ms", "p50 ms", "p95 ms", "p99 ms")),
        ]
        for metric in ("ttft", "tpot", "itl", "e2e", "queue"):
            lines.append(f"{metric:8}" + "".join(f"{value * 1e3:12,.2f}" for value in self.stats(metric).values()))
        return "\n".join(lines)


def _quantile(counts: np.ndarray, q: float) -> float:
    """Position, in bins, below which a share `q` of the counts lies."""
    total = np.cumsum(counts)
    if not total[-1]:
        return math.nan
    place = int(np.searchsorted(total, q * total[-1]))
    below = total[place - 1] if place else 0.0
    return place + float((q * total[-1] - below) / counts[place])


def replay(
    rules: Rules, table: StepTable, arrival: np.ndarray, prompt: np.ndarray, output: np.ndarray, *,
    concurrency: int = 0, request_s: float = 0.0, prompt_token_s: float = 0.0, priority: np.ndarray | None = None,
    content: tuple[np.ndarray, np.ndarray] | None = None, gauge_s: float = 0.0,
) -> ReplayResult:  # fmt: skip
    """Replay [n] requests: `arrival` in seconds (ascending), `prompt` and `output` in tokens.

    `concurrency` > 0 holds requests back while so many are in flight (a closed loop, if all arrive at 0). `request_s` and
    `prompt_token_s` are the front end's seconds before the scheduler sees a request. `content` (see `blocks_of_prompt`,
    `shared_prefix`) says which blocks are equal; without it no two prompts share a prefix. `gauge_s` samples the gauges.
    Raises `PlannerError` naming the request and field for anything that cannot be replayed.
    """
    columns = {"arrival": arrival, "prompt_tokens": prompt, "output_tokens": output}
    for name, values in columns.items():
        if len(values) != len(arrival):
            raise PlannerError(f"{name} has {len(values)} entries and arrival {len(arrival)}; they must be as many")
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise PlannerError(f"request {bad[0] + 1}, field {name}: {values[bad[0]]} is not a number")
        bad = np.flatnonzero(np.asarray(values) < (0 if name == "arrival" else 1))
        if len(bad):
            least = "0 seconds" if name == "arrival" else "1 token"
            raise PlannerError(f"request {bad[0] + 1}, field {name}: {values[bad[0]]:g} is less than {least}")
    late = np.flatnonzero(np.diff(arrival) < 0)
    if len(late):
        before, after = arrival[late[0]], arrival[late[0] + 1]
        raise PlannerError(f"request {late[0] + 2}, field arrival: {after:g} comes after {before:g}; sort by arrival")
    rank = np.empty(0, np.int64)
    if rules.priority:
        rank = np.argsort(np.argsort(np.zeros(len(arrival)) if priority is None else priority, kind="stable"))
    ids, start = content or (np.empty(0, np.int32), np.empty(0, np.int64))
    traffic = Traffic(
        np.ascontiguousarray(arrival, float), np.ascontiguousarray(prompt, np.int32), np.ascontiguousarray(output, np.int32),
        rank, ids, start, concurrency, request_s, prompt_token_s,
    )  # fmt: skip
    return run(rules, table, traffic, gauge_s=gauge_s)


def run(
    rules: Rules, table: StepTable, traffic: Traffic, *, names: Sequence[str] | None = None, where: str = "",
    timed: bool = True, log: bool = False, gauge_s: float = 0.0,
) -> ReplayResult:  # fmt: skip
    """Replay `traffic`, whose arrays are sound; `names` and `where` (a file) are for errors."""
    from planner.scheduler import simulate

    def label(i: int) -> str:
        return f"{where}{', ' * bool(where)}request {names[i] if names else i + 1}"

    prompt, output = traffic.prompt, traffic.output
    if not len(prompt):
        raise PlannerError(f"{where}{': ' * bool(where)}there are no requests; at least one is needed")
    if (longest := int(prompt.argmax())) is not None and prompt[longest] >= rules.max_model_len:
        raise PlannerError(
            f"{label(longest)}, field prompt: {prompt[longest]:,} tokens leave no room for an output within "
            f"max_model_len {rules.max_model_len:,}"
        )
    needs, usable = blocks_at_end(rules, prompt, output), rules.num_blocks - 1
    if needs.max() > usable:
        most = int(needs.argmax())
        raise PlannerError(
            f"{label(most)} can never fit: its {prompt[most]:,} + {output[most]:,} tokens need {needs[most]:,} KV blocks and "
            f"the pool has {usable:,}"
        )
    del needs
    outcome = simulate(rules, table, traffic, timed, log, gauge_s, rules.enable_prefix_caching and not len(traffic.content))
    if outcome.stuck == -2:  # a preempted request may find its own blocks again: tell blocks apart
        full = ((prompt.astype(np.int64) + output) // rules.groups[0, 1]).cumsum()
        start = np.concatenate(([0], full[:-1]))
        own = traffic._replace(content=np.arange(max(full[-1], 1), dtype=np.int32), content_start=start)
        outcome = simulate(rules, table, own, timed, log, gauge_s, False)
    if outcome.stuck >= 0:
        raise PlannerError(
            f"{label(outcome.stuck)} can never be scheduled: with {prompt[outcome.stuck]:,} prompt tokens it does not fit "
            f"the {usable:,} KV blocks of {rules.groups[0, 1]} tokens and {rules.max_num_batched_tokens:,} tokens a step"
        )
    return ReplayResult(outcome, prompt, output, rules.num_blocks)


def blocks_at_end(rules: Rules, prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
    """[n] blocks that each request holds at least when its last token is computed."""
    tokens = np.minimum(prompt.astype(np.int64) + output - 1, rules.max_model_len - 1)
    blocks = np.zeros(len(prompt), np.int64)
    for window, size in rules.groups:
        blocks += -window if window < 0 else -(-np.minimum(tokens, window or tokens) // size)
    return blocks


def engine_rules(deployment: Deployment, pool: KvPool, seed: int = 0) -> Rules:
    """The rules of one engine (one data-parallel rank) of `deployment` with the KV `pool` of its memory plan."""
    args, speculation = deployment.args, deployment.speculation
    groups = []
    for group in pool.groups:
        reach = {"full": 0, "state": -group.states}.get(group.kind, group.window)
        groups.append((reach, group.block_size * (pool.layout.dcp if group.kind != "state" else 1)))
    k = speculation.num_speculative_tokens if speculation else 0
    ahead = k if speculation and speculation.method.lower().startswith(LOOKAHEAD_METHODS) else 0
    assert args.max_num_seqs and args.max_num_batched_tokens and args.max_model_len  # resolved
    return Rules(
        args.max_num_seqs, args.max_num_batched_tokens, pool.num_blocks, args.max_model_len,
        bool(args.enable_prefix_caching), bool(args.enable_chunked_prefill), args.long_prefill_token_threshold or 0,
        bool(args.async_scheduling), args.scheduling_policy == "priority",
        deployment.engine.name != "vllm" or is_recent(deployment.engine.version), np.array(groups, np.int64),
        k, speculation.acceptance_rate if speculation else 0.0, ahead, seed,
    )  # fmt: skip


def step_table(model: StepModel) -> StepTable:
    """A step cost as the compiled replay reads it."""
    return StepTable(
        np.asarray(model.tokens_s, float), np.asarray(model.rows_s, float), model.fixed_s, model.state_s,
        model.decode_context_s, model.prefill_pair_s, model.prefill_step_s,
        np.array(model.decode_windows, float).reshape(-1, 2), np.array(model.prefill_windows, float).reshape(-1, 2),
        model.stages,
    )  # fmt: skip


def replay_workload(
    deployment: Deployment, pool: KvPool, model: StepModel, workload: Workload, seed: int = 0, gauge_s: float = 0.0
) -> ReplayResult:
    """Replay one engine's share of `workload`: its own trace, or lengths and arrivals drawn with `seed`."""
    share = workload.share(deployment.layout.replicas * deployment.layout.dp)
    rng = np.random.default_rng(seed)
    if workload.trace is not None:
        parts = slice(None, None, deployment.layout.replicas * deployment.layout.dp)
        arrival, prompt, output = (a[parts] for a in (workload.trace.arrival, workload.trace.prompt, workload.trace.output))
        arrival = arrival * (workload.trace.rate / workload.rate) if workload.rate else arrival
    else:
        n = share.num_prompts or (10 * share.concurrency if share.concurrency else math.ceil((share.rate or 0) * DEFAULT_SECONDS))
        prompt, output = share.prompt.sample(n, rng), share.output.sample(n, rng)
        arrival = arrivals(n, share.rate or math.inf, share.burstiness, rng)
    rules = engine_rules(deployment, pool, seed)
    content = None
    if rules.enable_prefix_caching and share.prefix_tokens and share.prefix_hit_rate:
        shares = rng.random(len(prompt)) < share.prefix_hit_rate
        content = shared_prefix(prompt, output, np.where(shares, share.prefix_tokens, 0), int(rules.groups[0, 1]))
    return replay(
        rules, step_table(model), arrival, prompt, output, concurrency=share.concurrency or 0, content=content,
        request_s=model.request_s, prompt_token_s=model.prompt_token_s, gauge_s=gauge_s,
    )  # fmt: skip


def arrivals(n: int, rate: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """[n] arrival times, s, as `vllm bench serve` draws them (vllm/benchmarks/serve.py, 0.20.2:243).

    Gaps are gamma distributed with shape `burstiness` (1 = Poisson, inf = constant), then stretched so that the last
    request comes at exactly n / rate. An infinite rate sends all at once.
    """
    if not n >= 1 or not rate > 0 or not burstiness > 0:
        raise PlannerError(f"arrivals need n, rate and burstiness above 0, got {n}, {rate:g} and {burstiness:g}")
    if math.isinf(rate):
        return np.zeros(n)
    gaps = np.ones(n) if math.isinf(burstiness) else rng.gamma(burstiness, 1 / (rate * burstiness), n)
    times = np.cumsum(gaps)
    return times * (n / rate / times[-1])


def ramp(rates: Sequence[float], seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Poisson arrivals, s, at each of `rates` (requests/s) for so many `seconds`, one after the other."""
    stages = [np.sort(rng.uniform(k * seconds, (k + 1) * seconds, rng.poisson(rate * seconds))) for k, rate in enumerate(rates)]
    return np.concatenate(stages)


def shared_prefix(prompt: np.ndarray, output: np.ndarray, prefix: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """`content` of requests whose first `prefix` [n] tokens are those of one common text, and the rest their own."""
    full = (prompt.astype(np.int64) + output) // block_size
    common = np.minimum(prefix, prompt) // block_size
    start = np.concatenate(([0], full.cumsum()[:-1]))
    place = np.arange(full.sum()) - np.repeat(start, full)
    shared = place < np.repeat(common, full)
    return np.where(shared, place, common.max() + np.cumsum(~shared)).astype(np.int32), start


def blocks_of_prompt(texts: Sequence[Sequence[tuple[str, int]]], block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """`content` of texts given as segments (name, tokens): full blocks are equal where all segments up to them are.

    Segments of equal name are the same text from its start, as far as they go.
    """
    uses = Counter(name for text in texts for name in {name for name, _ in text})
    known: dict[tuple[int, tuple[tuple[str, int, int], ...]], int] = {}
    numbers: list[np.ndarray] = []
    fresh = 0
    for text in texts:
        left = sum(tokens for _, tokens in text) // block_size
        own: list[int] = []
        parent, pieces, room, shared = -1, [], block_size, True
        for name, tokens in text:
            offset = 0
            shared &= uses[name] > 1 or not tokens
            while offset < tokens and shared and len(own) < left:
                piece = min(room, tokens - offset)
                pieces.append((name, offset, piece))
                offset, room = offset + piece, room - piece
                if not room:
                    parent = known.setdefault((parent, tuple(pieces)), fresh)
                    fresh += parent == fresh
                    own.append(parent)
                    pieces, room = [], block_size
        alone = left - len(own)  # from the first block on that holds a text of this request only
        numbers.append(np.concatenate((np.array(own, np.int64), np.arange(fresh, fresh + alone))))
        fresh += alone
    start = np.concatenate(([0], np.cumsum([len(part) for part in numbers])[:-1]))
    return np.concatenate(numbers).astype(np.int32), start
