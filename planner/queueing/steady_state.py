"""Estimate TTFT, ITL, TPOT and throughput at a concurrency or rate: a steady-state queueing model.

Little's law links the sequences in flight to the time each stays; the step cost links that time to
their number. The simulation does the same exactly and more slowly. Median deviations from it, with
the same step costs, in random cases: closed loops TTFT 3%, TPOT 1%; open loops up to 85% load TTFT
3%, TPOT 3%, p95 12%; pipelines up to 85% load TTFT 5%, TPOT 5%, p95 13-17%; throughput of full
pipelines with 2 to 64 output tokens 4%, at most a factor of 1.55 in 600 cases; from 87% load to
saturation TTFT 23%, TPOT 9%.

All formulas evaluate many cases at once. Their arrays have three axes: [cases, what varies, slices
of lengths].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.latency.lora_adapters import limit_sequences_by_adapters
from planner.latency.performance import LATENCY_QUANTILES, Performance, PerformanceBatch
from planner.latency.step_model import StepModel
from planner.latency.workload_step_costs import build_workload_step_costs
from planner.memory.memory_plan import MemoryPlan
from planner.queueing.batched_step_models import batch_step_models, stack_scalars
from planner.queueing.percentiles import (
    SteadyState,
    compute_gamma_quantiles,
    derive_performance,
    estimate_step_sd,
)
from planner.queueing.prefill_interference import (
    SLICE_EDGES,
    SLICE_MIDPOINTS,
    TrafficMix,
    average_slices,
    build_traffic_mix,
    compute_first_chunk_fraction,
    compute_slice_variance,
    estimate_burst_ttft_s,
    estimate_decode_step_s,
    estimate_microbatches,
    estimate_min_engine_s,
    estimate_prefill_s,
    estimate_prompts_of_slowest_rank,
    estimate_receiving_microbatches,
    estimate_slowest_microbatch,
    estimate_spilled_steps,
)
from planner.workload.workload import Workload

REQUEST_GENERATIONS = np.arange(1, 33)[:, None]
"""Generations of requests that a closed loop distinguishes."""
LOAD_EXPONENTS = np.linspace(0, 1, 24)[:, None]
"""Numbers of sequences at which throughput is computed, as exponents of the largest."""
MAX_CASES_PER_BATCH = 256
"""Cases evaluated at once: their arrays fit into a core's cache."""
MALLOC_WARMUP_ELEMENTS = 1 << 21
"""Elements of an array that glibc must free once to keep freed memory of that size.

Otherwise every batch faults its pages in anew; this saves a third of the time. See
`M_MMAP_THRESHOLD` in mallopt(3): the threshold is the largest freed block.
"""


@dataclass(frozen=True)
class LoadCase:
    """One case to solve; `step` replaces the calibrated step model."""

    deployment: Deployment
    plan: MemoryPlan
    workload: Workload
    step: StepModel | None = None


def solve_closed_loops(cases: Sequence[LoadCase]) -> PerformanceBatch:
    """Solve closed loops: a fixed number of requests in flight over all replicas.

    Each request that ends is replaced at once. A run starts with all requests arriving together and
    lasts `num_prompts` requests (default: 10 per unit of concurrency). The mean TTFT thus includes
    that first burst, as in InferenceX and `vllm bench serve --max-concurrency`.
    """
    if any(case.workload.concurrency is None for case in cases):
        raise PlannerError("a closed loop needs a concurrency")
    return _solve_in_batches(_solve_closed, cases)


def solve_open_loops(cases: Sequence[LoadCase]) -> PerformanceBatch:
    """Solve open loops: requests arrive at a rate over all replicas, whatever the latency."""
    if any(case.workload.rate is None for case in cases):
        raise PlannerError("an open loop needs a request rate")
    return _solve_in_batches(_solve_open, cases)


@lru_cache(maxsize=1024)
def solve_open_loop(case: LoadCase) -> Performance:
    """Solve one open loop; cached, as simulations and searches ask for the same cases."""
    return solve_open_loops([case])[0]


def _solve_in_batches(
    loop: Callable[[Sequence[LoadCase], StepModel, TrafficMix], SteadyState],
    cases: Sequence[LoadCase],
) -> PerformanceBatch:
    """Solve the cases in batches with `loop`, given step models and traffic."""
    rows = []
    if len(cases) > MAX_CASES_PER_BATCH:
        np.empty(MALLOC_WARMUP_ELEMENTS)
    for start in range(0, len(cases), MAX_CASES_PER_BATCH):
        part = cases[start : start + MAX_CASES_PER_BATCH]
        steps = [
            build_workload_step_costs(
                case.deployment, case.workload, case.plan.pool, case.step
            ).average_step()
            for case in part
        ]
        step, workloads = batch_step_models(steps), [case.workload for case in part]
        rows.append(
            derive_performance(
                loop(part, step, build_traffic_mix(workloads, step)), workloads, steps
            )
        )
    return PerformanceBatch.concatenate(rows)


def _compute_engine_capacity(
    cases: Sequence[LoadCase], t: TrafficMix, step: StepModel
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sequences that run at once, those that fit into the KV cache, and which limit binds.

    All are for one engine.
    """
    pools = [case.plan.pool for case in cases]
    contexts = np.maximum((t.context - average_slices(t.cached)).astype(int), 1).ravel().tolist()
    blocks = stack_scalars(
        [
            pool.layout.count_request_blocks(context)
            for pool, context in zip(pools, contexts, strict=True)
        ]
    )
    held = (
        (stack_scalars([pool.num_blocks for pool in pools]) - 1)
        / np.maximum(blocks, 1)
        * step.kv_stretch
    )
    if (held < 1).any():
        k = int(held.argmin())
        raise PlannerError(
            f"the KV pool of {pools[k].reported_tokens:,} tokens holds no sequence of"
            f" {t.context[k, 0, 0]:,.0f} tokens"
        )
    max_running = stack_scalars(
        [
            min(limit_sequences_by_adapters(case.deployment, case.workload), pool.max_sequences)
            for case, pool in zip(cases, pools, strict=True)
        ]
    )
    return np.minimum(max_running, held), held, np.where(max_running <= held, "max_num_seqs", "kv")


def _solve_closed(cases: Sequence[LoadCase], step: StepModel, t: TrafficMix) -> SteadyState:
    """Solve a first burst of requests and the waves that replace it.

    Between its first token and its last, a request lives among the others as in
    `_solve_interleaved`. Outputs of one length end together and thus start together; different
    lengths scatter from wave to wave.
    """
    wanted = stack_scalars([case.workload.concurrency or 0 for case in cases])
    prompts = stack_scalars([case.workload.num_requests for case in cases])
    concurrency = np.minimum(wanted, prompts)
    replicas = stack_scalars([case.deployment.num_engine_instances for case in cases])
    engines = np.minimum(replicas, concurrency)
    present = concurrency / engines
    max_running, held, limit = _compute_engine_capacity(cases, t, step)
    ahead = _count_steps_ahead(cases)
    running, outputs = np.minimum(present, max_running), average_slices(t.outputs)
    waves, front = prompts / concurrency, step.request_s + step.prompt_token_s * t.prompts
    later = outputs - 1
    m = _solve_interleaved(step, t, running, front, waves, ahead)
    per_token, tpot, own, added, room = m.per_token, m.tpot, m.own, m.added, m.room
    together = np.minimum(np.maximum(room / step.stages, 1.0), running)
    # if lengths differ, one prompt comes first and starts alone
    single = 1.0 * ((t.prompts[..., -1:] > t.prompts[..., :1]) & (running > 1))
    lone = (
        estimate_prefill_s(step, t, np.zeros(1), np.zeros(1))[1]
        + estimate_decode_step_s(step, np.ones(1), t.context)
    )[..., :1]
    burst = estimate_burst_ttft_s(step, t, running - single)
    start = np.where(
        single,
        front[..., :1] + lone + ahead * estimate_decode_step_s(step, np.ones(1), t.context),
        average_slices(front),
    )
    burst += start
    # later prompts arrive as outputs end: those of one step together, until different lengths have
    # scattered them (in wave k over sqrt(12 k) standard deviations)
    apart = np.sqrt(12 * REQUEST_GENERATIONS * t.output_steps_variance) * tpot
    bunch = estimate_burst_ttft_s(step, t, together)[..., -1:]
    together_still, counted = np.maximum(1 - apart / bunch, 0), waves >= REQUEST_GENERATIONS
    lockstep = together_still.mean(axis=1, keepdims=True, where=counted)
    # a prompt's share of a step with several
    shared = np.minimum(np.maximum(bunch - per_token, 0) / together, added)
    # no sequence of the same bunch decodes yet: only prompts of others interfere, spread over all
    # outputs
    tight = per_token + np.maximum(running - together, 0) * shared / (outputs * step.stages)
    steps = np.ceil(front / per_token) + ahead
    bunched = _estimate_bunched_ttft(
        step, outputs, running / together, steps, per_token, bunch, front, start
    )
    tpot = tpot - lockstep * np.maximum(tpot - tight, 0.0) * (1 - 0.5 / waves)
    bunched = np.where(m.backlog > 0, np.maximum(own + m.backlog, bunched), bunched)
    scattered = _estimate_scattered_waits(
        t, m, running, burst, apart, steps, together_still, counted
    )
    later_ttft = lockstep * bunched + (1 - lockstep) * (own + m.backlog) + scattered
    opening = (
        (running - single) * average_slices(burst) + single * (lone + front[..., :1])
    ) / running
    # of requests that need not wait for a slot
    ttft = (1 - 1 / waves) * average_slices(later_ttft) + opening / waves
    # no engine exceeds the speed of its GPUs
    min_stay = running * estimate_min_engine_s(step, t, running)
    short = np.maximum(min_stay - ttft - later * tpot, 0.0)
    stay = ttft + short + later * tpot
    rate, queue = running / stay, np.maximum(present / running - 1, 0.0) * stay
    later_ttft, burst = later_ttft + short + queue, burst + short + queue * SLICE_MIDPOINTS
    ttft = ttft + short + queue * (1 - 0.5 / waves)
    varies, ttfts = _summarize_ttft(later_ttft, burst, waves, ttft)
    return SteadyState(
        step, t, per_token, added, tpot, m.decode, rate, rate, engines, held, queue,
        np.zeros(engines.shape, bool), np.where(present > max_running, limit, "load"),
        ttft, ttfts, np.maximum(varies, 0.0), np.zeros(engines.shape), m.groups,
    )  # fmt: skip


def _estimate_bunched_ttft(
    step: StepModel, outputs: np.ndarray, bunches: np.ndarray, steps: np.ndarray,
    per_token: np.ndarray, bunch: np.ndarray, front: np.ndarray, start: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Estimate the TTFT of prompts that start together, after the `steps` before their bunch.

    Those may hold other bunches; a pipeline has several in flight, k - 1 of k bunches of single
    outputs (what arrives while there is nothing else to schedule waits for the end of the oldest
    step).
    """
    behind = np.maximum(steps - steps * (steps + 1) / (2 * bunches), 0.0)
    before = (steps * per_token + behind * (bunch - per_token)) / step.stages
    alternate = bunch / np.clip(np.ceil(bunches) - 1, 1, step.stages)
    before = np.where((outputs < 1.5) & (step.stages > 1), alternate, before)
    return np.where(bunches > 1, np.maximum(before, front), start) + bunch


def _estimate_scattered_waits(
    t: TrafficMix, m: "_InterleavedState", running: np.ndarray, burst: np.ndarray,
    apart: np.ndarray, steps: np.ndarray, together_still: np.ndarray, counted: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Estimate the waits of waves not yet scattered over a whole stay: their steps are denser."""
    others, window = (
        np.maximum(running - 1, 0.0),
        np.minimum(np.hypot(burst[..., -1:], apart), m.period),
    )
    arriving = others / window * m.tpot
    waits = (
        np.maximum(
            estimate_spilled_steps(arriving, m.room, t), (running / m.room - window / m.tpot) / 2
        )
        * m.tpot
    )
    denser = np.minimum(arriving, m.room) - np.minimum(others / m.period * m.tpot, m.room)
    waits = waits + denser * m.added * (1 + average_slices(steps)) - m.backlog
    return ((1 - together_still) * np.maximum(waits, 0.0)).mean(
        axis=1, keepdims=True, where=counted
    )


def _summarize_ttft(
    later_ttft: np.ndarray, burst: np.ndarray, waves: np.ndarray, ttft: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the variance of TTFT and its quantiles, the first burst being 1 / waves of it."""
    varies = (
        average_slices(later_ttft**2) * (1 - 1 / waves) + average_slices(burst**2) / waves - ttft**2
    )
    # quantiles of the first burst, which is a fraction 1 / waves of all requests
    slowest = 1 - (1 - np.array(LATENCY_QUANTILES)) * waves
    first = np.take_along_axis(burst, np.maximum(SLICE_EDGES.searchsorted(slowest) - 1, 0), axis=-1)
    ttfts = np.maximum(
        compute_gamma_quantiles(average_slices(later_ttft), compute_slice_variance(later_ttft)),
        np.where(slowest > 0, first, 0.0),
    )
    # slices are by length, but a short prompt may be served last
    return varies, np.maximum.accumulate(ttfts, axis=-1)


class _InterleavedState(NamedTuple):
    """Mean state of a closed loop, [cases, 1, slices or 1]; times in s."""

    groups: np.ndarray  # microbatches of the decoding sequences
    per_token: np.ndarray  # a step that only decodes
    decode: np.ndarray  # sequences that decode in a step, of all microbatches
    tpot: np.ndarray  # C: a mean step, with prompts
    added: np.ndarray  # A: what a prompt adds to its steps
    room: np.ndarray  # prompts that fit into the steps of a round
    own: np.ndarray  # TTFT of each slice of prompts, including its wait for the scheduler
    period: np.ndarray  # a whole stay, until the same slot sends its next request
    backlog: np.ndarray  # part of it that a prompt waits because more arrive than fit


def _solve_interleaved(
    step: StepModel,
    t: TrafficMix,
    running: np.ndarray,
    front: np.ndarray,
    waves: np.ndarray,
    ahead: np.ndarray,
) -> _InterleavedState:
    """Solve the mean step of a closed loop with N `running` requests in flight.

    A request that is sent when another ends waits for whole steps: those that start before it
    reaches the scheduler, and with asynchronous scheduling one more, which was scheduled before.
    Its own step has other prompts too. Each of N requests passes through n steps (and adds A to one
    of them), so a step has (N - 1) / n other prompts and lasts C = P + A (N - 1) C / (A + n C),
    where P is a step that only decodes: quadratic in C. If more prompts arrive than fit, all wait
    their turn. N, n and P depend on C in turn; three rounds converge.
    """
    outputs, size = average_slices(t.outputs), average_slices(t.prompts)
    others, later = np.maximum(running - 1, 0.0), outputs - 1
    least = np.minimum(running, 1.0)
    # sequences that fit into steps together with the prompts that replace them
    fit = step.max_tokens * step.stages * later / (later * (1 + step.num_draft_tokens) + size)
    decode = np.maximum(np.minimum(running, fit), 1.0)
    passed = outputs + ahead  # steps that pass while a request stays
    # microbatches beside the first
    formed = np.minimum(np.ceil(running * size / step.max_tokens), step.stages) - 1
    for _ in range(3):
        groups = estimate_microbatches(step, t, running, decode, formed, waves, front)
        per_token = estimate_decode_step_s(step, decode / groups, t.context)
        # tokens of steps that are not available to prompts
        taken = np.where(later > 0, decode * (1 + step.num_draft_tokens), 0.0)
        room = np.maximum(step.max_tokens * step.stages - taken, 1.0) / size
        # other prompts in the same step, or round of a pipeline
        beside = np.maximum(others / passed, 1e-9)
        taking = estimate_receiving_microbatches(
            step, beside, groups, per_token, front, room / step.stages
        )
        # in the same microbatch; below also their mean given that there are any
        near = beside / taking
        chunks, whole, share = estimate_prefill_s(
            step, t, decode / groups, np.hstack([near / -np.expm1(-near) - 1, near])
        )
        added, whole = average_slices(share[:, :1]), whole[:, 1:]
        head = compute_first_chunk_fraction(step, t, decode / groups)
        slowest = estimate_slowest_microbatch(
            step, beside, taking, 1 / average_slices(head), room / step.stages
        )
        attention = average_slices(step.estimate_prefill_attention_s(t.prompts, t.cached))
        slowest = estimate_prompts_of_slowest_rank(
            step, slowest, average_slices(chunks), attention / added, room
        )
        slowed = added * slowest / beside
        # what the request's own prompt adds
        alone = average_slices(_estimate_pipelined_s(step, head, share[:, :1]))
        each = passed * per_token + slowed * others - alone
        tpot = (each + np.sqrt(each**2 + 4 * passed * per_token * alone)) / (2 * passed)
        tpot = np.where(running > 1, tpot, per_token)
        full = per_token + room / step.stages * added
        tpot = np.minimum(tpot, np.maximum(full, per_token))
        busy = 1 - (1 - np.minimum(decode / running, 1.0)) ** others
        wait = busy * (np.ceil(front * taking / tpot) / taking + ahead) * tpot + (1 - busy) * front
        own = (
            wait
            + per_token
            + _estimate_pipelined_s(step, head, whole)
            + (chunks - 1) * tpot / step.stages
        )
        period = average_slices(own) + later * tpot
        # prompts wait until all others had their turn
        backlog = np.maximum(running * tpot / room - period, 0.0)
        period = period + backlog
        passed = np.maximum((period - alone) / tpot, 1.0)
        decode = np.maximum(np.minimum(running * later * tpot / period, fit), least)
    return _InterleavedState(groups, per_token, decode, tpot, added, room, own, period, backlog)


def _count_steps_ahead(cases: Sequence[LoadCase]) -> np.ndarray:
    """Count the steps between the one in flight and a request's first.

    One with asynchronous scheduling, which is scheduled already. A scheduler that receives requests
    every n-th step adds (n - 1) / 2.
    """
    deployments = [case.deployment for case in cases]
    unseen = stack_scalars(
        [(deployment.args.scheduler_recv_interval - 1) / 2 for deployment in deployments]
    )
    return unseen + stack_scalars(
        [
            deployment.args.async_scheduling and deployment.layout.pp == 1
            for deployment in deployments
        ]
    )


def _solve_open(cases: Sequence[LoadCase], step: StepModel, t: TrafficMix) -> SteadyState:
    """Solve random arrivals, which find the other requests in their mean state (PASTA).

    Requests in flight share steps as in processor sharing. A request waits for the rest of the step
    that it meets; with asynchronous scheduling for the next one, scheduled before; for a free slot;
    and under overload for the backlog.
    """
    offered = stack_scalars([case.workload.rate or 0.0 for case in cases])
    engines = stack_scalars([case.deployment.num_engine_instances for case in cases])
    rate, outputs = offered / engines, average_slices(t.outputs)
    noise = 1 / stack_scalars([case.workload.burstiness for case in cases])
    max_running, held, limit = _compute_engine_capacity(cases, t, step)
    ahead, size = _count_steps_ahead(cases), average_slices(t.prompts)
    later = np.maximum(outputs - 1, 0.0)
    # in flight by Little's law: the number whose throughput is the rate. Every step has `counts /
    # outputs` new prompts.
    width = 1 + step.num_draft_tokens
    cap = np.minimum(max_running, step.max_tokens * step.stages * outputs / (size + later * width))
    counts = cap * np.maximum(cap, 64.0) ** (LOAD_EXPONENTS - 1)
    alone, each, *_ = _estimate_steps(step, t, counts, max_running)
    throughput = np.maximum.accumulate(counts / (outputs * each), axis=1)
    peak = throughput[:, -1:]
    load, saturated = rate / peak, rate >= peak
    rate = np.minimum(rate, peak)
    inside = _interpolate(rate, throughput, counts)
    plain, tpot, added, groups = _estimate_steps(step, t, inside, max_running)
    beside, decode = inside / outputs, inside * later / outputs
    slowed = (tpot - plain) / beside
    uneven = average_slices(t.prompts**2) / size**2
    # an arrival is more likely in a long step, and so are others with it: E[step^2] / E[step], as
    # each step has the prompts that arrived in one before
    spread = noise + uneven - 1
    longer = rate * slowed**2 * spread / np.maximum(1 - (rate * slowed) ** 2, 0.05)
    busy = 1 - np.exp(-inside)
    met = tpot + longer
    chunks, whole, _ = estimate_prefill_s(step, t, decode / groups, rate * met)
    own = (
        plain
        + _estimate_pipelined_s(step, compute_first_chunk_fraction(step, t, decode / groups), whole)
        + (chunks - 1) * tpot / step.stages
    )
    fixed = busy * ahead * plain
    # probability that all slots are taken (Sakasegawa)
    crowded = (inside / max_running) ** (np.sqrt(2 * (max_running + 1)) - 1)
    prompts = stack_scalars([case.workload.num_requests for case in cases])
    # near saturation a queue grows like a random walk, and a run ends before it reaches its mean
    # (2 / 3: mean over the run)
    walked = 2 / 3 * np.sqrt(2 / np.pi * (noise + 1) * prompts / engines) / peak
    slots = crowded * (noise + 1) / (2 * np.maximum(np.abs(peak - offered / engines), 1e-9))
    slots = np.minimum(slots, crowded * walked)
    level = estimate_step_sd(tpot, alone[:, :1], inside, saturated)
    moves = busy * (met / 2 + ahead * (tpot - plain)) + slots
    varies = busy * met**2 / 12 + (1 + 2 * ahead) * beside * slowed**2 * spread
    varies = (
        varies
        + slots**2 * (2 / np.maximum(crowded, 1e-9) - 1)
        + (busy * (0.5 + ahead) * level) ** 2
    )
    backlog = np.where(saturated, prompts / offered * (1 - 1 / load), 0.0)
    filling = np.minimum(max_running * engines / prompts, 1.0)
    queue = backlog + fixed + compute_gamma_quantiles(moves, varies)[..., -1:]
    delays = backlog * np.maximum(SLICE_MIDPOINTS - filling, 0.0)
    own = own + step.request_s + step.prompt_token_s * t.prompts
    ttft = average_slices(own) + fixed + moves + average_slices(delays)
    least, varies = (
        own[..., :1] + fixed,
        varies + compute_slice_variance(own) + compute_slice_variance(delays),
    )
    # if half the slots give this throughput, more slots would hardly serve more requests
    half = _interpolate(np.maximum(max_running / 2, 1.0), counts, throughput)
    limit = np.where((limit == "max_num_seqs") & (peak < 1.05 * half), "compute", limit)
    return SteadyState(
        step, t, plain, added, tpot, decode, rate, peak, engines, held,
        queue, saturated, np.where(saturated, limit, "load"),
        ttft, least + compute_gamma_quantiles(ttft - least, varies), varies, level, groups,
    )  # fmt: skip


def _estimate_steps(
    step: StepModel, t: TrafficMix, inside: np.ndarray, max_running: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Estimate the steps of a request that finds `inside` others.

    Returns the seconds of a step without prompts, of a mean step, and those that one prompt adds;
    and the number of microbatches, each of which has one step in a round.
    """
    outputs = average_slices(t.outputs)
    beside, decode = np.maximum(inside / outputs, 1e-9), inside * (outputs - 1) / outputs
    groups = estimate_microbatches(step, t, inside, decode)
    plain = estimate_decode_step_s(
        step, np.minimum(decode + groups, max_running) / groups, t.context
    )
    alone = 1 - np.exp(-beside / groups)
    chunks, _, share = estimate_prefill_s(step, t, decode / groups, beside / groups / alone - 1)
    added = average_slices(share)
    room = np.maximum(
        step.max_tokens - decode / groups * (1 + step.num_draft_tokens), 1.0
    ) / average_slices(t.prompts)
    slowest = estimate_slowest_microbatch(
        step,
        beside,
        groups,
        1 / average_slices(compute_first_chunk_fraction(step, t, decode / groups)),
        room,
    )
    attention = average_slices(step.estimate_prefill_attention_s(t.prompts, t.cached))
    slowest = estimate_prompts_of_slowest_rank(
        step, slowest, average_slices(chunks), attention / added, room
    )
    return plain, plain + slowest * added, added, groups


def _estimate_pipelined_s(step: StepModel, head: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return the seconds of prompts that take `whole` if their chunks follow each other.

    `head` is the fraction of each in its first chunk. The stages work on as many chunks at once, so
    all but the largest only occupy the first stage.
    """
    return whole * (head + (1 - head) / step.stages)


def _interpolate(x: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    """Evaluate [cases, 1, 1] rising functions through 0 and the points [cases, points, 1].

    They are constant after the last point.
    """
    zero = np.zeros_like(x)
    xs, ys = np.concatenate([zero, xs], axis=1), np.concatenate([zero, ys], axis=1)
    size = xs.shape[1]
    before = (
        np.minimum((xs <= x).sum(axis=1, keepdims=True), size - 1)
        - 1
        + size * np.arange(len(x))[:, None, None]
    )
    x0, x1, y0, y1 = xs.take(before), xs.take(before + 1), ys.take(before), ys.take(before + 1)
    inside = x < x1
    return y0 + (y1 - y0) * np.where(inside, (x - x0) / np.where(inside, x1 - x0, 1.0), 1.0)
