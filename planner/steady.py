"""Steady state in closed form: TTFT, ITL, TPOT and throughput of a deployment at a concurrency or an arrival rate.

Little's law ties the sequences in flight to the time each stays; a step's cost ties that time to their number.
Waiting follows the Allen-Cunneen approximation of G/G/1 and G/G/k queues. The replay does the same exactly and slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log, sqrt
from typing import TYPE_CHECKING

import numpy as np

from planner.deployment import Deployment
from planner.latency import StepModel, step_model
from planner.quantities import Interval, PlannerError
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.memory import MemoryPlan

POINTS = 16
"""Equally likely prompt and output lengths over which a distribution is integrated."""
QUANTILES = (np.arange(POINTS) + 0.5) / POINTS


@dataclass(frozen=True)
class Performance:
    """Latencies in seconds and rates per second of a whole deployment, as 80 % intervals."""

    ttft: Mapping[str, Interval]  # "mean", "p50", "p95", "p99"
    tpot: Mapping[str, Interval]
    itl: Mapping[str, Interval]
    e2e: Mapping[str, Interval]
    output_tps: Interval
    total_tps: Interval
    request_tps: Interval
    decode_batch: float  # sequences decoding in one engine, mean
    kv_usage: float  # of the pool
    queue: float  # seconds that a request waits before it is scheduled, p99
    preemptions: float  # per request
    saturated: bool  # the offered rate is more than it can serve
    limit: str  # what caps it: "compute", "kv", "max_num_seqs" or "load"
    basis: str
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        def ms(values: Mapping[str, Interval]) -> str:
            return f"mean {values['mean'] * 1e3:.1f} ms, p99 {values['p99'] * 1e3:.1f} ms"

        return (
            f"TTFT {ms(self.ttft)}; ITL {ms(self.itl)}; TPOT {ms(self.tpot)}; "
            f"{self.output_tps:.0f} output tokens/s ({self.basis}; limit: {self.limit})"
        )


@dataclass(frozen=True)
class _Traffic:
    """One engine's traffic as equally likely lengths, and what its prompts cost."""

    prompts: np.ndarray  # tokens to compute, [POINTS]
    outputs: np.ndarray  # [POINTS]
    context: float  # mean tokens that a decoding sequence attends to
    kv_tokens: float  # mean tokens that a running sequence holds


def _traffic(workload: Workload) -> _Traffic:
    prompts, outputs = workload.prompt.points(POINTS), workload.output.points(POINTS)
    cached = workload.cached_tokens
    context = prompts.mean() + (outputs**2).mean() / (2 * outputs.mean())
    return _Traffic(np.maximum(prompts - cached, 1), outputs, context, context - cached)


def _decode_s(step: StepModel, batch: np.ndarray | float, context: float) -> np.ndarray:
    """A step of `batch` decoding sequences (spread over the pipeline's stages) and nothing else."""
    share = np.maximum(np.asarray(batch, float) / step.stages, 1e-9)
    part = np.maximum(share, 1.0)  # no step holds less than one sequence
    return step.fixed_s + step.tokens(part) + step.rows(part) + part * step.decode_attention(context)


def _prefill_s(
    step: StepModel, prompts: np.ndarray, beside: np.ndarray | float, cached: float
) -> tuple[np.ndarray, np.ndarray]:
    """(chunks, seconds that they add to the decode steps they ride on) for each prompt, `beside` sequences decoding."""
    beside = np.asarray(beside, float) / step.stages
    budget = np.maximum(step.max_tokens - beside, 1.0)
    chunks = np.ceil(prompts / budget)
    base, last = step.tokens(np.maximum(beside, 1.0)), prompts - (chunks - 1) * budget
    whole = np.maximum(step.tokens(step.max_tokens) - base, 0)
    linears = (chunks - 1) * whole + np.maximum(step.tokens(last + beside) - base, 0)
    return chunks, (linears + step.prefill_attention(prompts, cached) + chunks * step.prefill_step_s) / step.stages


def _stats(mean: float, values: np.ndarray, sigma: float, weights: np.ndarray | None = None) -> dict[str, Interval]:
    """Mean and percentiles of equally likely (or weighted) `values`, each with the calibration's spread."""
    flat = np.sort(values, axis=None) if weights is None else values
    at = {"mean": mean}
    for name, q in (("p50", 0.50), ("p95", 0.95), ("p99", 0.99)):
        at[name] = (
            float(flat[min(int(q * len(flat)), len(flat) - 1)]) if weights is None else _weighted(values, weights, q)
        )
    tail = {"mean": 1.0, "p50": 1.0, "p95": 1.25, "p99": 1.5}  # the tails are less certain than the mean
    return {name: Interval.factor(value, sigma * tail[name]) for name, value in at.items()}


def _weighted(values: np.ndarray, weights: np.ndarray, q: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][min(np.searchsorted(reached, q * reached[-1]), len(values) - 1)])


def _capacity(deployment: Deployment, plan: MemoryPlan, t: _Traffic) -> tuple[float, float, str]:
    """(sequences that run at once, sequences that the KV pool holds, which limit binds) in one engine."""
    most = float(deployment.args.max_num_seqs or 256)
    pool = plan.pool
    blocks = pool.blocks_for(max(int(t.kv_tokens), 1))
    held = max((pool.num_blocks - 1) / max(blocks, 1), 0.0)
    if held < 1:
        raise PlannerError(f"the KV pool of {pool.kv_tokens:,} tokens holds no sequence of {t.kv_tokens:,.0f} tokens")
    return (most, held, "max_num_seqs") if most <= held else (held, held, "kv")


def _batch(step: StepModel, t: _Traffic, running: float, cached: float) -> tuple[float, float, float]:
    """(decoding sequences, s per decode step, s that one prompt adds) with `running` sequences in the engine."""
    decode = max(running, 1.0)
    outputs = max(t.outputs.mean() - 1, 1.0)
    for _ in range(4):
        per_token = float(_decode_s(step, decode, t.context))
        chunks, prompt_s = _prefill_s(step, t.prompts, decode, cached)
        added = float(prompt_s.mean())
        prefill = added + float(chunks.mean()) * per_token
        stay = prefill + outputs * per_token + max(running - 1, 0) * added
        decode = max(running * (stay - prefill) / stay, min(running, 1.0))
    return decode, per_token, added


def closed_loop(deployment: Deployment, plan: MemoryPlan, workload: Workload) -> Performance:
    """A fixed number of requests in flight over all replicas; each that ends is replaced at once.

    The run starts with all of them arriving together and lasts `num_prompts` requests (default: 10 per unit of
    concurrency), so the mean TTFT holds that first burst, as in InferenceX and `vllm bench serve --max-concurrency`.
    """
    if workload.concurrency is None:
        raise PlannerError("a closed loop needs a concurrency")
    step, engines = step_model(deployment), deployment.layout.replicas * deployment.layout.dp
    t, cached = _traffic(workload), workload.cached_tokens
    present = workload.concurrency / min(engines, workload.concurrency)
    most, held, limit = _capacity(deployment, plan, t)
    running = min(present, most)
    decode, per_token, added = _batch(step, t, running, cached)
    outputs, waves = (
        t.outputs.mean(),
        max((workload.num_prompts or 10 * workload.concurrency) / workload.concurrency, 1.0),
    )
    chunks, prompt_s = _prefill_s(step, t.prompts, decode, cached)
    own = prompt_s + chunks * per_token
    interference = max(running - 1, 0) * added / outputs  # every other request is prefilled once while one stays
    tpot = per_token + interference * (1 - 0.5 / waves)
    # first burst: the k-th prompt of `running` waits for k batches of prompts; later waves come spread out
    together = max(step.max_tokens / t.prompts.mean(), 1.0)
    burst = added_together(step, t, running, cached)
    first = burst * (running + together) / (2 * running) if running > 1 else float(own.mean())
    period = outputs * tpot + float(own.mean())
    busy = min(running * added / period, 0.95)
    clustered = min(busy * max(1.0, 3.0 / sqrt(waves)), 0.95)
    wait = added * clustered / (2 * (1 - clustered)) + 0.5 * per_token
    queue = max(present - running, 0.0) * (period + wait) / running
    front = step.request_s + step.prompt_token_s * t.prompts
    ttfts = np.add.outer(own + wait + front, np.full(8, queue))
    late = (1 - 1 / waves) * float(ttfts.mean()) + (first + queue / 2 + float(front.mean())) / waves
    share = np.concatenate([np.full(ttfts.size, (1 - 1 / waves) / ttfts.size), np.full(POINTS, 1 / waves / POINTS)])
    spread = np.concatenate([ttfts.ravel(), float(front.mean()) + first * 2 * QUANTILES + queue * QUANTILES])
    rate = engines * running / (period + wait)
    return _performance(
        deployment, step, t, late, spread, share, tpot, per_token, decode, rate, added,
        kv_usage=min(running / held, 1.0), queue=queue, saturated=False,
        limit=limit if present > most else "load", present=min(engines, workload.concurrency),
        prompt_tokens=workload.prompt.mean,
    )  # fmt: skip


def added_together(step: StepModel, t: _Traffic, requests: float, cached: float) -> float:
    """Seconds until the last of `requests` prompts that arrive together has its first token."""
    total = requests * t.prompts.mean()
    steps = max(ceil(total / step.max_tokens), 1)
    each = step.tokens(min(total, step.max_tokens)) + step.fixed_s + step.prefill_step_s
    return float(steps * each / step.stages + requests * step.prefill_attention(t.prompts, cached).mean() / step.stages)


def open_loop(deployment: Deployment, plan: MemoryPlan, workload: Workload) -> Performance:
    """Requests arriving at a rate over all replicas, whatever the deployment does with them; steady state."""
    if workload.rate is None:
        raise PlannerError("an open loop needs a request rate")
    step, engines = step_model(deployment), deployment.layout.replicas * deployment.layout.dp
    t, cached = _traffic(workload), workload.cached_tokens
    rate, outputs = workload.rate / engines, t.outputs.mean()
    most, held, limit = _capacity(deployment, plan, t)
    # in flight by Little's law: the smallest number whose throughput reaches the rate
    counts = np.unique(np.concatenate([np.geomspace(1, max(most, 1.001), 24), [most]]))
    per_token = _decode_s(step, counts, t.context)
    added = np.array([float(_prefill_s(step, t.prompts, n, cached)[1].mean()) for n in counts])
    capacity = np.maximum.accumulate(1 / (outputs * per_token / counts + added))
    peak = float(capacity[-1])
    load = rate / peak
    saturated = load >= 1
    decode = float(np.interp(rate, np.concatenate([[0.0], capacity]), np.concatenate([[0.0], counts])))
    idle_step, busy_added = float(_decode_s(step, max(decode, 1.0), t.context)), float(np.interp(decode, counts, added))
    prefilling = min(rate * busy_added, 0.999)
    tpot = idle_step / max(1 - prefilling, 1e-3) if not saturated else float(most / (outputs * peak))
    chunks, prompt_s = _prefill_s(step, t.prompts, decode, cached)
    variation = (1 / workload.burstiness + float((prompt_s.std() / max(prompt_s.mean(), 1e-12)) ** 2)) / 2
    wait = busy_added * prefilling / (1 - prefilling) * variation + 0.5 * idle_step
    # all running slots taken: G/G/k with k = most, Sakasegawa's form
    stay = outputs * tpot + float((prompt_s + chunks * idle_step).mean())
    slots = (
        stay
        / most
        * min(load, 0.999) ** (sqrt(2 * (most + 1)) - 1)
        / max(1 - load, 1e-3)
        * (1 / workload.burstiness + 1)
        / 2
    )
    front = step.request_s + step.prompt_token_s * t.prompts
    duration = (workload.num_prompts or workload.rate * 600) / workload.rate
    backlog = duration * (1 - 1 / load) if saturated else 0.0  # an overloaded queue grows all along
    delays = wait * -np.log(1 - QUANTILES) + slots * -np.log(1 - QUANTILES) + backlog * QUANTILES
    ttfts = np.add.outer(prompt_s + chunks * idle_step + front, delays)
    served = min(rate, peak) * engines
    return _performance(
        deployment, step, t, float(ttfts.mean()), ttfts.ravel(), None, tpot, idle_step, decode, served, busy_added,
        kv_usage=min(decode / held, 1.0), queue=(wait + slots) * -log(0.01) + backlog, saturated=saturated,
        limit=("compute" if limit == "max_num_seqs" and _flat(counts, capacity) else limit) if saturated else "load",
        present=engines, prompt_tokens=workload.prompt.mean,
    )  # fmt: skip


def _flat(counts: np.ndarray, capacity: np.ndarray) -> bool:
    """More sequences at once would hardly serve more requests."""
    return bool(capacity[-1] < 1.05 * np.interp(counts[-1] / 2, counts, capacity))


def _performance(
    deployment: Deployment, step: StepModel, t: _Traffic, ttft: float, ttfts: np.ndarray, shares: np.ndarray | None,
    tpot: float, per_token: float, decode: float, rate: float, added: float, *,
    kv_usage: float, queue: float, saturated: bool, limit: str, present: int, prompt_tokens: float,
) -> Performance:  # fmt: skip
    """Spread the means over requests and tokens, and put the calibration's intervals around them."""
    outputs = t.outputs.mean()
    meetings = max(rate / present * outputs * tpot, 1e-9)  # prompts prefilled while one request decodes
    sd = max(tpot - per_token, 0.0) / sqrt(meetings)
    tpots = tpot + sd * np.sqrt(outputs / t.outputs)[:, None] * _NORMAL16
    tpots = np.maximum(tpots, per_token)
    e2es = ttfts[:: max(len(ttfts) // 64, 1), None] + (t.outputs - 1) * tpot
    chunk_share = min(rate / present * per_token * np.maximum(np.ceil(t.prompts / step.max_tokens), 1).mean(), 1.0)
    chunk = per_token + added * np.minimum(t.prompts, step.max_tokens) / t.prompts.mean()
    gaps = np.concatenate([[per_token], chunk])
    weights = np.concatenate([[1 - chunk_share], np.full(POINTS, chunk_share / POINTS)])
    s_out, s_first = step.sigma_tpot, step.sigma_ttft
    tokens = Interval.factor(rate * outputs, s_out if limit != "load" or present else 0.0)
    return Performance(
        ttft=_stats(ttft, ttfts, s_first, shares),
        tpot=_stats(tpot, tpots, s_out),
        itl=_stats(tpot, gaps, s_out, weights),
        e2e=_stats(ttft + (outputs - 1) * tpot, e2es, sqrt(s_out**2 + (s_first * ttft / (ttft + outputs * tpot)) ** 2)),
        output_tps=tokens,
        total_tps=tokens * ((outputs + prompt_tokens) / outputs),
        request_tps=tokens / outputs,
        decode_batch=decode,
        kv_usage=kv_usage,
        queue=queue,
        preemptions=0.0,
        saturated=saturated,
        limit=limit,
        basis=step.basis,
        warnings=(),
    )


_NORMAL16 = np.array(
    [-1.86, -1.32, -1.01, -0.78, -0.58, -0.40, -0.24, -0.08, 0.08, 0.24, 0.40, 0.58, 0.78, 1.01, 1.32, 1.86]
)
"""Standard normal quantiles at `QUANTILES`."""
