"""Steady state in closed form: TTFT, ITL, TPOT and throughput of a deployment at a concurrency or an arrival rate.

Little's law ties the sequences in flight to the time each stays; a step's cost ties that time to their number.
Waiting follows the Allen-Cunneen approximation of G/G/1 and G/G/k queues. The replay does the same exactly and slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from planner.deployment import Deployment
from planner.latency import StepModel
from planner.quantities import Interval, PlannerError
from planner.speculation import step_of
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.memory import MemoryPlan

EDGES = np.append(np.linspace(0, 0.9, 13), [0.94, 0.96, 0.985, 0.995, 1.0])
"""Slices of a distribution over which it is integrated: finer in the tail, around the 95th and 99th percentiles."""
SHARES = np.diff(EDGES)
QUANTILES = (EDGES[1:] + EDGES[:-1]) / 2
NORMAL = np.array([NormalDist().inv_cdf(float(q)) for q in QUANTILES])


@dataclass(frozen=True)
class Performance:
    """Latencies in seconds and rates per second of a whole deployment, as 80 % intervals."""

    ttft: Mapping[str, Interval]  # "mean", "p50", "p95", "p99"
    tpot: Mapping[str, Interval]
    itl: Mapping[str, Interval]  # between streamed outputs: with speculation several tokens each
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
    """A workload as the mean lengths of `SHARES` of its requests."""

    prompts: np.ndarray  # tokens to compute, [slices]
    outputs: np.ndarray  # [slices] streamed: a step of speculative decoding streams several tokens as one
    tokens: float  # mean output tokens
    cached: float  # prompt tokens found in the prefix cache
    context: float  # mean tokens that a decoding sequence attends to


@dataclass(frozen=True)
class _State:
    """One engine in its steady state: what spreads around it makes a `Performance`."""

    step: StepModel
    traffic: _Traffic
    per_token: float  # s of a step that only decodes
    added: float  # s that one prompt adds to the steps it rides on
    tpot: float  # per streamed output
    decode: float  # sequences decoding
    rate: float  # requests/s served
    engines: int
    held: float  # sequences that the KV pool holds
    queue: float  # s waiting to be scheduled, p99
    saturated: bool
    limit: str


def _traffic(workload: Workload, step: StepModel) -> _Traffic:
    prompts, tokens = workload.prompt.slices(EDGES), workload.output.slices(EDGES)
    context = _mean(prompts) + _mean(tokens**2) / (2 * _mean(tokens))
    computed, outputs = np.maximum(prompts - workload.cached_tokens, 1), 1 + (tokens - 1) / step.tokens_per_step
    return _Traffic(computed, outputs, _mean(tokens), workload.cached_tokens, context)


def _mean(values: np.ndarray) -> float:
    """Mean over the slices."""
    return float(values @ SHARES)


def _decode_s(step: StepModel, batch: np.ndarray | float, context: float) -> np.ndarray:
    """A step of `batch` decoding sequences (spread over the pipeline's stages) and nothing else."""
    return step.decode_step(np.maximum(np.asarray(batch, float) / step.stages, 1.0), context)


def _prefill_s(step: StepModel, t: _Traffic, beside: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """(chunks, s that they add to the steps they ride on) of every prompt, [..., slices], with `beside` decoding."""
    beside = np.asarray(beside, float)[..., None] / step.stages * (1 + step.drafts)
    budget = np.maximum(step.max_tokens - beside, 1.0)
    chunks = np.ceil(t.prompts / budget)
    base, last = step.tokens(np.maximum(beside, 1.0)), t.prompts - (chunks - 1) * budget
    linears = (chunks - 1) * (step.tokens(step.max_tokens) - base) + step.tokens(last + beside) - base
    return chunks, (linears + step.prefill_attention(t.prompts, t.cached) + chunks * step.prefill_step_s) / step.stages


def _together_s(step: StepModel, t: _Traffic, requests: float) -> float:
    """Seconds until the last of `requests` prompts that arrive together has its first token."""
    total = requests * _mean(t.prompts)
    each = step.tokens(min(total, step.max_tokens)) + step.fixed_s + step.prefill_step_s
    steps = max(total / step.max_tokens, 1.0)
    return float(steps * each + requests * _mean(step.prefill_attention(t.prompts, t.cached))) / step.stages


def _capacity(deployment: Deployment, plan: MemoryPlan, t: _Traffic, step: StepModel) -> tuple[float, float, str]:
    """(sequences that run at once, sequences that the KV pool holds, which of the two binds) in one engine."""
    most = float(deployment.args.max_num_seqs or 256)
    blocks = plan.pool.blocks_for(max(int(t.context - t.cached), 1))
    held = (plan.pool.num_blocks - 1) / max(blocks, 1) * step.kv_stretch
    if held < 1:
        raise PlannerError(
            f"the KV pool of {plan.pool.kv_tokens:,} tokens holds no sequence of {t.context:,.0f} tokens"
        )
    return (most, held, "max_num_seqs") if most <= held else (held, held, "kv")


def closed_loop(
    deployment: Deployment, plan: MemoryPlan, workload: Workload, step: StepModel | None = None
) -> Performance:
    """A fixed number of requests in flight over all replicas; each that ends is replaced at once.

    The run starts with all of them arriving together and lasts `num_prompts` requests (default: 10 per unit of
    concurrency), so the mean TTFT holds that first burst, as in InferenceX and `vllm bench serve --max-concurrency`.
    `step` replaces the catalog's step cost. Raises `PlannerError` without a concurrency or room for a sequence.
    """
    if workload.concurrency is None:
        raise PlannerError("a closed loop needs a concurrency")
    step = step or step_of(deployment)
    t = _traffic(workload, step)
    engines = min(deployment.layout.replicas * deployment.layout.dp, workload.concurrency)
    present = workload.concurrency / engines
    most, held, limit = _capacity(deployment, plan, t, step)
    running, outputs = min(present, most), _mean(t.outputs)
    waves = max((workload.num_prompts or 10 * workload.concurrency) / workload.concurrency, 1.0)
    decode = max(running, 1.0)
    for _ in range(3):  # those who wait for their first token don't decode
        per_token = float(_decode_s(step, decode, t.context))
        chunks, own = _prefill_s(step, t, decode)
        added = _mean(own)
        own = own + chunks * per_token
        stay = _mean(own) + max(outputs - 1, 1) * per_token + max(running - 1, 0) * added
        decode = max(running * (1 - _mean(own) / stay), min(running, 1.0))
    # every other request is prefilled once while one stays; in the first burst only those behind it
    tpot = per_token + max(running - 1, 0) * added / outputs * (1 - 0.5 / waves)
    first = _burst(step, t, running, own)
    # later prompts come as the outputs end: those of one step together, until different lengths (wave k: sqrt(12 k)
    # standard deviations apart) have scattered them
    apart = (
        np.sqrt(12 * np.arange(1, int(min(waves, 32)) + 1))
        * sqrt(max(_mean(t.outputs**2) - _mean(t.outputs) ** 2, 0.0))
        * tpot
    )
    together = min(max(step.max_tokens / _mean(t.prompts), 1.0), running)
    bunch = _together_s(step, t, together)
    lockstep = np.maximum(1 - apart / bunch, 0)
    shared = min(max(bunch - per_token, 0) / together, added)  # a prompt's part of a step that holds several
    spared = max(running - 1, 0) * added - max(running - together, 0) * shared  # nobody of the own bunch decodes yet
    tpot -= float(lockstep.mean()) * spared / outputs * (1 - 0.5 / waves)
    period = outputs * tpot + _mean(own)
    busy = np.minimum(running * added / np.minimum(2 * first + apart, period), 0.9)
    wait = added * busy / (2 * (1 - busy)) * np.minimum(apart / (2 * first), 1)
    waits = lockstep * max(bunch - _mean(own), 0) + (1 - lockstep) * wait
    queue = max(present - running, 0.0) * period / running
    front = step.request_s + step.prompt_token_s * t.prompts
    opening = first + queue / 2
    later = own + float(waits.mean()) + queue
    ttft = (1 - 1 / waves) * _mean(later) + opening / waves + _mean(front)
    ttfts = np.concatenate([later + front, 2 * opening * QUANTILES + _mean(front)])
    shares = np.concatenate([SHARES * (1 - 1 / waves), SHARES / waves])
    state = _State(
        step, t, per_token, added, tpot, decode, running / (period + float(waits.mean())), engines, held, queue,
        saturated=False, limit=limit if present > most else "load",
    )  # fmt: skip
    return _performance(state, ttft, ttfts, shares, workload)


def _burst(step: StepModel, t: _Traffic, running: float, own: np.ndarray) -> float:
    """Mean time to the first token of `running` prompts that arrive together: the k-th waits for those before it."""
    if running <= 1:
        return _mean(own)
    together = min(max(step.max_tokens / _mean(t.prompts), 1.0), running)
    return _together_s(step, t, running) * (running + together) / (2 * running)


def open_loop(
    deployment: Deployment, plan: MemoryPlan, workload: Workload, step: StepModel | None = None
) -> Performance:
    """Requests arriving at a rate over all replicas, whatever the deployment does with them; steady state.

    `step` replaces the catalog's step cost. Raises `PlannerError` without a rate or room for a sequence.
    """
    if workload.rate is None:
        raise PlannerError("an open loop needs a request rate")
    step = step or step_of(deployment)
    t = _traffic(workload, step)
    engines, outputs = deployment.layout.replicas * deployment.layout.dp, _mean(t.outputs)
    rate, noise = workload.rate / engines, 1 / workload.burstiness
    most, held, limit = _capacity(deployment, plan, t, step)
    # in flight by Little's law: the number whose throughput is the rate
    counts = np.unique(np.append(np.geomspace(1, max(most, 1.001), 24), max(most, 1.0)))
    per_token, added = _decode_s(step, counts, t.context), _prefill_s(step, t, counts)[1] @ SHARES
    throughput = np.maximum.accumulate(1 / (outputs * per_token / counts + added))
    peak = float(throughput[-1])
    load, saturated = rate / peak, rate >= peak
    decode = float(np.interp(rate, np.append(0.0, throughput), np.append(0.0, counts)))
    plain = float(_decode_s(step, decode, t.context))
    chunks, own = _prefill_s(step, t, decode)
    prompt_s = _mean(own)
    prefilling = min(rate * prompt_s, 0.999)
    tpot = float(most / (outputs * peak)) if saturated else plain / max(1 - prefilling, 1e-3)
    # waiting for the prompts before it (Allen-Cunneen), for a running slot (Sakasegawa), and in an overload's backlog
    wait = (
        prompt_s * prefilling / (1 - prefilling) * (noise + (_mean(own**2) - prompt_s**2) / prompt_s**2) / 2
        + 0.5 * plain
    )
    own = own + chunks * plain
    stay, near = outputs * tpot + _mean(own), min(load, 0.999)
    slots = stay / most * near ** (sqrt(2 * (most + 1)) - 1) / (1 - near) * (noise + 1) / 2
    duration = (workload.num_prompts or workload.rate * 600) / workload.rate
    backlog = duration * (1 - 1 / load) if saturated else 0.0
    delays = -(wait + slots) * np.log(1 - QUANTILES) + backlog * QUANTILES
    ttfts = np.add.outer(own + step.request_s + step.prompt_token_s * t.prompts, delays).ravel()
    if saturated and limit == "max_num_seqs" and peak < 1.05 * np.interp(most / 2, counts, throughput):
        limit = "compute"  # more sequences at once would hardly serve more requests
    state = _State(
        step, t, plain, prompt_s, tpot, decode, min(rate, peak), engines, held, -(wait + slots) * log(0.01) + backlog,
        saturated, limit if saturated else "load",
    )  # fmt: skip
    shares = np.outer(SHARES, SHARES).ravel()
    return _performance(state, float(ttfts @ shares), ttfts, shares, workload)


def _performance(s: _State, ttft: float, ttfts: np.ndarray, shares: np.ndarray, workload: Workload) -> Performance:
    """Spread the means over requests and tokens, and put the calibration's intervals around them."""
    step, t, outputs = s.step, s.traffic, _mean(s.traffic.outputs)
    # how many prompts interfere with one request varies like a Poisson count
    meetings = max(s.rate * outputs * s.tpot, 1e-9)
    sd = max(s.tpot - s.per_token, 0.0) / sqrt(meetings)
    tpots = np.maximum(s.tpot + sd * np.sqrt(outputs / t.outputs)[:, None] * NORMAL, s.per_token).ravel()
    e2es = np.add.outer(ttfts, (t.outputs - 1) * s.tpot).ravel()
    carrying = min(s.rate * s.tpot * _mean(np.maximum(np.ceil(t.prompts / step.max_tokens), 1)), 1.0)
    chunk = s.added * np.minimum(t.prompts, step.max_tokens) / _mean(t.prompts)
    chunk = chunk * max((s.tpot - s.per_token) / (carrying * _mean(chunk)), 1.0)  # several prompts may share a step
    gaps, weights = np.append(s.per_token, s.per_token + chunk), np.append(1 - carrying, carrying * SHARES)
    even, decoding, first = np.outer(SHARES, SHARES).ravel(), step.sigma_tpot, step.sigma_ttft
    whole = ttft + (outputs - 1) * s.tpot
    mixed = sqrt((first * ttft) ** 2 + (decoding * (whole - ttft)) ** 2) / whole
    served = Interval.factor(s.rate * s.engines, decoding)
    if s.limit == "load" and workload.rate is not None:
        served = Interval.exactly(s.rate * s.engines)  # it keeps up: what comes in goes out
    return Performance(
        ttft=_stats(ttft, ttfts, shares, first),
        tpot=_stats(s.tpot / step.tokens_per_step, tpots / step.tokens_per_step, even, decoding),
        itl=_stats(s.tpot, gaps, weights, decoding),
        e2e=_stats(whole, e2es, np.outer(shares, SHARES).ravel(), mixed),
        output_tps=served * t.tokens,
        total_tps=served * (t.tokens + workload.prompt.mean),
        request_tps=served,
        decode_batch=s.decode,
        kv_usage=min(s.decode / s.held, 1.0),
        queue=s.queue,
        preemptions=0.0,
        saturated=s.saturated,
        limit=s.limit,
        basis=step.basis,
        warnings=(FP8_KV,) if step.kv_stretch > 1 else (),
    )


def _stats(mean: float, values: np.ndarray, weights: np.ndarray, sigma: float) -> dict[str, Interval]:
    """Mean and percentiles of weighted `values`, each with the calibration's spread; tails are less certain."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    found = {"mean": Interval.factor(mean, sigma)}
    for name, q, wider in (("p50", 0.50, 1.0), ("p95", 0.95, 1.25), ("p99", 0.99, 1.5)):
        index = min(int(np.searchsorted(reached, q * reached[-1] * (1 - 1e-12))), len(values) - 1)
        found[name] = Interval.factor(float(values[order[index]]), sigma * wider)
    return found


FP8_KV = (
    "latency counts on an FP8 KV cache, as the measured recipes of this GPU had; set kv_cache_dtype to plan another"
)
