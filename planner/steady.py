"""Steady state in closed form: TTFT, ITL, TPOT and throughput of a deployment at a concurrency or an arrival rate.

Little's law ties the sequences in flight to the time each stays; a step's cost ties that time to their number.
Waiting follows the Allen-Cunneen approximation of G/G/1 and G/G/k queues. The replay does the same exactly and slower.

All formulas are for many cases at once: their arrays have three axes, [cases, what is varied, slices of lengths].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from planner.deployment import Deployment
from planner.latency import StepModel
from planner.performance import Performance, Performances
from planner.quantities import PlannerError
from planner.speculation import step_of
from planner.stacked import column, stack
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.memory import MemoryPlan

__all__ = ["Case", "Performance", "Performances", "closed_loop", "closed_loops", "open_loop", "open_loops"]

EDGES = np.append(np.linspace(0, 0.9, 13), [0.94, 0.96, 0.985, 0.995, 1.0])
"""Slices of a distribution over which it is integrated: finer in the tail, around the 95th and 99th percentiles."""
SHARES = np.diff(EDGES)
QUANTILES = (EDGES[1:] + EDGES[:-1]) / 2
NORMAL = np.array([NormalDist().inv_cdf(float(q)) for q in QUANTILES])
PAIRS = np.outer(SHARES, SHARES).ravel()
"""Shares of the slices of two independent distributions, one added to the other."""
WAVES = np.arange(1, 33)[:, None]
"""Generations of requests that a closed loop tells apart."""
COUNTS = np.linspace(0, 1, 24)[:, None]
"""Numbers of sequences at which throughput is worked out, as powers of the largest."""
CERTAIN, LATE = np.array([1.0, 1.0, 1.25, 1.5]), (0.50, 0.95, 0.99)
"""By `planner.performance.POINTS`: tails are less certain; percentiles."""
TOGETHER = 256
"""Cases that are evaluated at once: what they need stays in a core's cache."""
ROOM = 1 << 21
"""Numbers in a block that glibc has to see once to keep as much freed memory; else every part faults its pages in anew.

See `M_MMAP_THRESHOLD` in mallopt(3): the threshold is the largest block given back. It saves a third of the time.
"""


@dataclass(frozen=True)
class Case:
    """What a steady state is asked for; `step` replaces the catalog's step cost."""

    deployment: Deployment
    plan: MemoryPlan
    workload: Workload
    step: StepModel | None = None


@dataclass(frozen=True)
class _Traffic:
    """Workloads as the mean lengths of `SHARES` of their requests."""

    prompts: np.ndarray  # tokens to compute, [cases, 1, slices]
    outputs: np.ndarray  # the same, streamed: a step of speculative decoding streams several tokens as one
    tokens: np.ndarray  # mean output tokens, [cases, 1, 1] as the rest
    cached: np.ndarray  # prompt tokens found in the prefix cache
    context: np.ndarray  # mean tokens that a decoding sequence attends to
    uneven: np.ndarray  # [cases, 1, percentiles] standard deviations from the mean of a TPOT with a mean output


@dataclass(frozen=True)
class _State:
    """One engine of every case in its steady state, [cases, 1, 1]: what spreads around it makes a `Performance`."""

    step: StepModel
    traffic: _Traffic
    per_token: np.ndarray  # s of a step that only decodes
    added: np.ndarray  # s that one prompt adds to the steps it rides on
    tpot: np.ndarray  # per streamed output
    decode: np.ndarray  # sequences decoding
    rate: np.ndarray  # requests/s served
    engines: np.ndarray
    held: np.ndarray  # sequences that the KV pool holds
    queue: np.ndarray  # s waiting to be scheduled, p99
    saturated: np.ndarray
    limit: np.ndarray
    ttft: np.ndarray  # mean
    ttfts: np.ndarray  # [cases, 1, values] and how its values are spread
    shares: np.ndarray  # [values] or [cases, 1, values]


def closed_loop(
    deployment: Deployment, plan: MemoryPlan, workload: Workload, step: StepModel | None = None
) -> Performance:
    """A fixed number of requests in flight over all replicas; each that ends is replaced at once.

    The run starts with all of them arriving together and lasts `num_prompts` requests (default: 10 per unit of
    concurrency), so the mean TTFT holds that first burst, as in InferenceX and `vllm bench serve --max-concurrency`.
    `step` replaces the catalog's step cost. Raises `PlannerError` without a concurrency or room for a sequence.
    """
    return closed_loops([Case(deployment, plan, workload, step)])[0]


def open_loop(
    deployment: Deployment, plan: MemoryPlan, workload: Workload, step: StepModel | None = None
) -> Performance:
    """Requests arriving at a rate over all replicas, whatever the deployment does with them; steady state.

    `step` replaces the catalog's step cost. Raises `PlannerError` without a rate or room for a sequence.
    """
    return open_loops([Case(deployment, plan, workload, step)])[0]


def closed_loops(cases: Sequence[Case]) -> Performances:
    """`closed_loop` of every case, together."""
    if any(case.workload.concurrency is None for case in cases):
        raise PlannerError("a closed loop needs a concurrency")
    return _by_parts(_closed, cases)


def open_loops(cases: Sequence[Case]) -> Performances:
    """`open_loop` of every case, together."""
    if any(case.workload.rate is None for case in cases):
        raise PlannerError("an open loop needs a request rate")
    return _by_parts(_open, cases)


def _by_parts(loop: Callable[[Sequence[Case], StepModel, _Traffic], _State], cases: Sequence[Case]) -> Performances:
    """`loop` over some of the cases at a time, with their step costs and traffic."""
    found = []
    if len(cases) > TOGETHER:
        np.empty(ROOM)
    for start in range(0, len(cases), TOGETHER):
        part = cases[start : start + TOGETHER]
        steps = [case.step or _step_once(case.deployment) for case in part]
        found.append(_performance(loop(part, stack(steps), _traffic(part, steps)), part, steps))
    return Performances.joined(found)


def _step_once(deployment: Deployment) -> StepModel:
    """The step cost of `deployment`, worked out once for any number of replicas."""
    return _step_of_one(replace(deployment, layout=replace(deployment.layout, replicas=1)))


_step_of_one = lru_cache(maxsize=256)(step_of)


def _traffic(cases: Sequence[Case], steps: Sequence[StepModel]) -> _Traffic:
    """The traffic of every case; what several have in common is worked out once."""
    workloads = [case.workload for case in cases]
    kinds = [
        (id(workload.prompt), id(workload.output), workload.cached_tokens, step.tokens_per_step)
        for workload, step in zip(workloads, steps, strict=True)
    ]
    distinct = dict(zip(kinds, workloads, strict=True))
    prompts, tokens = (
        np.stack([getattr(workload, side).slices(EDGES) for workload in distinct.values()])[:, None]
        for side in ("prompt", "output")
    )
    cached, per_step = (column([kind[k] for kind in distinct]) for k in (2, 3))
    outputs, context = 1 + (tokens - 1) / per_step, _mean(prompts) + _mean(tokens**2) / (2 * _mean(tokens))
    spread = np.sqrt(_mean(outputs) / outputs) * NORMAL[:, None]  # over few tokens a mean varies more
    found = np.maximum(prompts - cached, 1), outputs, _mean(tokens), cached, context, _quantiles(spread, PAIRS, LATE)
    places = {kind: k for k, kind in enumerate(distinct)}
    place = [places[kind] for kind in kinds]
    return _Traffic(*(values[place] for values in found))


def _mean(values: np.ndarray) -> np.ndarray:
    """Mean over the slices."""
    return (values @ SHARES)[..., None]


def _decode_s(step: StepModel, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
    """A step of `batch` decoding sequences (spread over the pipeline's stages) and nothing else."""
    return step.decode_step(np.maximum(batch / step.stages, 1.0), context)


def _prefill_s(step: StepModel, t: _Traffic, beside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(chunks, s that they add to the steps they ride on) of every prompt, [..., slices], with `beside` decoding."""
    beside = beside / step.stages * (1 + step.drafts)
    budget = np.maximum(step.max_tokens - beside, 1.0)
    chunks = np.ceil(t.prompts / budget)
    full = chunks - 1  # chunks that take all of a step's budget
    base, last = step.tokens(np.maximum(beside, 1.0)), t.prompts - full * budget
    added = step.tokens(last + beside)
    added += full * (step.tokens(step.max_tokens) - base + step.prefill_step_s)
    added += step.prefill_attention(t.prompts, t.cached) + (step.prefill_step_s - base)
    return chunks, added / step.stages


def _together_s(step: StepModel, t: _Traffic, requests: np.ndarray) -> np.ndarray:
    """Seconds until the last of `requests` prompts that arrive together has its first token."""
    total = requests * _mean(t.prompts)
    each = step.tokens(np.minimum(total, step.max_tokens)) + step.fixed_s + step.prefill_step_s
    steps = np.maximum(total / step.max_tokens, 1.0)
    return (steps * each + requests * _mean(step.prefill_attention(t.prompts, t.cached))) / step.stages


def _capacity(cases: Sequence[Case], t: _Traffic, step: StepModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sequences that run at once, sequences that the KV pool holds, which of the two binds) in one engine."""
    pools = [case.plan.pool for case in cases]
    contexts = np.maximum((t.context - t.cached).astype(int), 1).ravel().tolist()
    blocks = column([pool.blocks_for(context) for pool, context in zip(pools, contexts, strict=True)])
    held = (column([pool.num_blocks for pool in pools]) - 1) / np.maximum(blocks, 1) * step.kv_stretch
    if (held < 1).any():
        k = int(held.argmin())
        raise PlannerError(
            f"the KV pool of {pools[k].kv_tokens:,} tokens holds no sequence of {t.context[k, 0, 0]:,.0f} tokens"
        )
    most = column([case.deployment.args.max_num_seqs or 256 for case in cases])
    return np.minimum(most, held), held, np.where(most <= held, "max_num_seqs", "kv")


def _closed(cases: Sequence[Case], step: StepModel, t: _Traffic) -> _State:
    concurrency = column([case.workload.concurrency for case in cases])
    replicas = column([case.deployment.layout.replicas * case.deployment.layout.dp for case in cases])
    engines = np.minimum(replicas, concurrency)
    present = concurrency / engines
    most, held, limit = _capacity(cases, t, step)
    running, outputs = np.minimum(present, most), _mean(t.outputs)
    prompts = column([case.workload.num_prompts or 10 * (case.workload.concurrency or 0) for case in cases])
    waves = np.maximum(prompts / concurrency, 1.0)
    decode, others = np.maximum(running, 1.0), np.maximum(running - 1, 0)
    for _ in range(3):  # those who wait for their first token don't decode
        per_token = _decode_s(step, decode, t.context)
        chunks, own = _prefill_s(step, t, decode)
        added = _mean(own)
        own = own + chunks * per_token
        stay = _mean(own) + np.maximum(outputs - 1, 1) * per_token + others * added
        decode = np.maximum(running * (1 - _mean(own) / stay), np.minimum(running, 1.0))
    # every other request is prefilled once while one stays; in the first burst only those behind it
    tpot = per_token + others * added / outputs * (1 - 0.5 / waves)
    together = np.minimum(np.maximum(step.max_tokens / _mean(t.prompts), 1.0), running)
    # the k-th of a burst waits for those before it
    burst = _together_s(step, t, running) * (running + together) / (2 * running)
    first = np.where(running <= 1, _mean(own), burst)
    # later prompts come as the outputs end: those of one step together, until different lengths (wave k: sqrt(12 k)
    # standard deviations apart) have scattered them
    counted = waves >= WAVES
    counted = counted / counted.sum(axis=1, keepdims=True)  # the share of all waves that each one is
    apart = np.sqrt(12 * WAVES) * np.sqrt(np.maximum(_mean(t.outputs**2) - _mean(t.outputs) ** 2, 0.0)) * tpot
    bunch = _together_s(step, t, together)
    lockstep = np.maximum(1 - apart / bunch, 0)
    shared = np.minimum(np.maximum(bunch - per_token, 0) / together, added)  # a prompt's part of a step of several
    spared = others * added - np.maximum(running - together, 0) * shared  # nobody of the own bunch decodes yet
    tpot = tpot - _over(lockstep, counted) * spared / outputs * (1 - 0.5 / waves)
    period = outputs * tpot + _mean(own)
    busy = np.minimum(running * added / np.minimum(2 * first + apart, period), 0.9)
    wait = added * busy / (2 * (1 - busy)) * np.minimum(apart / (2 * first), 1)
    waits = _over(lockstep * np.maximum(bunch - _mean(own), 0) + (1 - lockstep) * wait, counted)
    queue = np.maximum(present - running, 0.0) * period / running
    front = step.request_s + step.prompt_token_s * t.prompts
    opening = first + queue / 2
    later = own + waits + queue
    ttft = (1 - 1 / waves) * _mean(later) + opening / waves + _mean(front)
    ttfts = np.concatenate([later + front, 2 * opening * QUANTILES + _mean(front)], axis=-1)
    shares = np.concatenate([SHARES * (1 - 1 / waves), SHARES / waves], axis=-1)
    return _State(
        step, t, per_token, added, tpot, decode, running / (period + waits), engines, held, queue,
        np.zeros(engines.shape, bool), np.where(present > most, limit, "load"), ttft, ttfts, shares,
    )  # fmt: skip


def _over(values: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Mean over what is varied."""
    return (values * shares).sum(axis=1, keepdims=True)


def _open(cases: Sequence[Case], step: StepModel, t: _Traffic) -> _State:
    offered = column([case.workload.rate for case in cases])
    engines = column([case.deployment.layout.replicas * case.deployment.layout.dp for case in cases])
    rate, outputs = offered / engines, _mean(t.outputs)
    noise = 1 / column([case.workload.burstiness for case in cases])
    most, held, limit = _capacity(cases, t, step)
    # in flight by Little's law: the number whose throughput is the rate
    counts = np.maximum(most, 1.001) ** COUNTS
    per_token, added = _decode_s(step, counts, t.context), _mean(_prefill_s(step, t, counts)[1])
    throughput = np.maximum.accumulate(1 / (outputs * per_token / counts + added), axis=1)
    peak = throughput[:, -1:]
    load, saturated = rate / peak, rate >= peak
    decode = _interpolated(rate, throughput, counts)
    plain = _decode_s(step, decode, t.context)
    chunks, own = _prefill_s(step, t, decode)
    prompt_s = _mean(own)
    prefilling = np.minimum(rate * prompt_s, 0.999)
    tpot = np.where(saturated, most / (outputs * peak), plain / np.maximum(1 - prefilling, 1e-3))
    # waiting for the prompts before it (Allen-Cunneen), for a running slot (Sakasegawa), and in an overload's backlog
    uneven = (_mean(own**2) - prompt_s**2) / prompt_s**2
    wait = prompt_s * prefilling / (1 - prefilling) * (noise + uneven) / 2 + 0.5 * plain
    own = own + chunks * plain
    stay, near = outputs * tpot + _mean(own), np.minimum(load, 0.999)
    slots = stay / most * near ** (np.sqrt(2 * (most + 1)) - 1) / (1 - near) * (noise + 1) / 2
    prompts = column([case.workload.num_prompts or (case.workload.rate or 0) * 600 for case in cases])
    backlog = np.where(saturated, prompts / offered * (1 - 1 / load), 0.0)
    delays = (backlog * QUANTILES - (wait + slots) * np.log(1 - QUANTILES)).swapaxes(1, 2)
    ttfts = (own + step.request_s + step.prompt_token_s * t.prompts + delays).reshape(len(cases), 1, -1)
    half = _interpolated(np.maximum(most / 2, 1.0), counts, throughput)  # more at once would hardly serve more requests
    limit = np.where((limit == "max_num_seqs") & (peak < 1.05 * half), "compute", limit)
    return _State(
        step, t, plain, prompt_s, tpot, decode, np.minimum(rate, peak), engines, held,
        backlog - (wait + slots) * np.log(0.01), saturated, np.where(saturated, limit, "load"),
        (ttfts @ PAIRS)[..., None], ttfts, PAIRS,
    )  # fmt: skip


def _interpolated(x: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    """[cases, 1, 1] rising functions through 0 and the points [cases, points, 1], constant after the last one."""
    nothing = np.zeros_like(x)
    xs, ys = np.concatenate([nothing, xs], axis=1), np.concatenate([nothing, ys], axis=1)
    size = xs.shape[1]
    before = np.minimum((xs <= x).sum(axis=1, keepdims=True), size - 1) - 1 + size * np.arange(len(x))[:, None, None]
    x0, x1, y0, y1 = xs.take(before), xs.take(before + 1), ys.take(before), ys.take(before + 1)
    inside = x < x1
    return y0 + (y1 - y0) * np.where(inside, (x - x0) / np.where(inside, x1 - x0, 1.0), 1.0)


def _performance(s: _State, cases: Sequence[Case], steps: Sequence[StepModel]) -> Performances:
    """Spread the means over requests and tokens, and put the calibration's intervals around them."""
    step, t, outputs = s.step, s.traffic, _mean(s.traffic.outputs)
    # how many prompts interfere with one request varies like a Poisson count
    meetings = np.maximum(s.rate * outputs * s.tpot, 1e-9)
    sd = np.maximum(s.tpot - s.per_token, 0.0) / np.sqrt(meetings)
    tpots = np.maximum(s.tpot + sd * t.uneven, s.per_token)
    carrying = np.minimum(s.rate * s.tpot * _mean(np.maximum(np.ceil(t.prompts / step.max_tokens), 1)), 1.0)
    chunk = s.added * np.minimum(t.prompts, step.max_tokens) / _mean(t.prompts)
    chunk = chunk * np.maximum((s.tpot - s.per_token) / (carrying * _mean(chunk)), 1.0)  # several may share a step
    gaps = np.concatenate([s.per_token, s.per_token + chunk], axis=-1)
    weights = np.concatenate([1 - carrying, carrying * SHARES], axis=-1)
    whole = s.ttft + (outputs - 1) * s.tpot
    first, decoding = step.sigma_ttft, step.sigma_tpot
    mixed = np.sqrt((first * s.ttft) ** 2 + (decoding * (whole - s.ttft)) ** 2) / whole
    reached = _quantiles(s.ttfts, s.shares, (*LATE, *QUANTILES))
    many = s.ttfts.shape[-1] > 2 * len(SHARES)  # then a value for every slice is enough to add the outputs' times to
    few, each = (reached[:, :, len(LATE) :], SHARES) if many else (s.ttfts, s.shares)
    e2es, both = few.swapaxes(1, 2) + (t.outputs - 1) * s.tpot, np.expand_dims(each, -1) * SHARES

    def points(mean: np.ndarray, percentiles: np.ndarray) -> np.ndarray:
        return np.concatenate([mean, percentiles], axis=-1)[:, 0]

    keeps_up = (s.limit == "load") & np.array([case.workload.rate is not None for case in cases])[:, None, None]
    return Performances(
        ttft=points(s.ttft, reached[:, :, : len(LATE)]),
        tpot=points(s.tpot / step.tokens_per_step, tpots / step.tokens_per_step),
        itl=points(s.tpot, _quantiles(gaps, weights, LATE)),
        e2e=points(whole, _quantiles(e2es, both, LATE)),
        sigmas=np.concatenate([first, decoding, decoding, mixed], axis=1) * CERTAIN,
        request_tps=np.ravel(s.rate * s.engines),
        request_sigma=np.ravel(np.where(keeps_up, 0.0, decoding)),  # what comes in goes out
        output_tokens=np.ravel(t.tokens),
        prompt_tokens=np.array([case.workload.prompt.mean for case in cases]),
        decode_batch=np.ravel(s.decode),
        kv_usage=np.ravel(np.minimum(s.decode / s.held, 1.0)),
        queue=np.ravel(s.queue),
        saturated=np.ravel(s.saturated),
        limit=np.ravel(s.limit),
        basis=np.array([step.basis for step in steps]),
        fp8_kv=np.ravel(step.kv_stretch > 1),
    )


def _quantiles(values: np.ndarray, shares: np.ndarray, at: Sequence[float]) -> np.ndarray:
    """[cases, 1, at] the smallest of a case's values, each with its share, that so much of all does not exceed."""
    values = values.reshape(len(values), -1)
    row = np.arange(len(values))[:, None]
    order = np.argsort(values, axis=-1)
    place = order + row * values.shape[1]
    reached = shares.take(order if shares.size == values.shape[1] else place).cumsum(axis=-1)
    found = (reached + row).ravel().searchsorted(np.array(at) * (1 - 1e-12) + row)  # one rising row after the other
    return values.take(place.take(found))[:, None]
