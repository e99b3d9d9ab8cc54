"""What engines take on of a workload, and how much of it they serve at most."""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.engines.deployment import Deployment
from planner.latency.kv_offload import estimate_kv_offload
from planner.latency.speculative_decoding import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.simulator.prefix_cache_hits import compute_prefix_hit_rate
from planner.simulator.simulation import simulate_workload
from planner.workload.length_distribution import LengthDistribution
from planner.workload.traces import Trace
from planner.workload.workload import WORKLOAD_BOUNDS, Workload

MAX_OUTPUT_TOKENS_PER_RUN = 20_000_000
"""Output tokens of one run at most."""
SATURATION_RUN_MINIMA, MIXING_TIME_FRACTION = (5, 600), 0.4
"""To learn what an engine serves at most: times that every slot is taken, requests at least, and the share of the time
until those of all lengths have mixed."""
MAX_PREEMPTIONS_PER_REQUEST = 0.1
"""Preemptions per request from which on what is begun does not tell what is served."""
MIN_TRACE_REQUESTS_PER_REPLICA = 2 * SATURATION_RUN_MINIMA[1]
"""Requests that a replica has of a trace at least, to learn from it what it serves at most; else from its lengths."""


def is_finite_run(workload: Workload) -> bool:
    """Whether the traffic is a run of so many requests; else it goes on, and is replayed for long enough."""
    return workload.trace is not None or workload.rate is None or workload.num_prompts is not None


def compute_rejected_fraction(workload: Workload, max_model_len: int) -> float:
    """The share of requests that the engine refuses: prompts that leave no room for an output."""
    return _drop_oversized_prompts(workload.prompt, max_model_len)[0]


@lru_cache(maxsize=256)
def _drop_oversized_prompts(
    prompt: LengthDistribution, limit: int
) -> tuple[float, LengthDistribution]:
    """(the share of prompts from `limit` tokens on, the others)."""
    share = float(np.count_nonzero(prompt.values >= limit) / len(prompt.values))
    return share, (
        LengthDistribution.from_samples(prompt.values[prompt.values < limit])
        if 0 < share < 1
        else prompt
    )


def drop_rejected_requests(workload: Workload, max_model_len: int) -> Workload:
    """`workload` as the engine takes it on: without the prompts that it refuses, and so at a lower rate.

    Raises `PlannerError` where requests do not fit on average, as they never do where it refuses
    all of them.
    """
    if workload.mean_tokens_per_request > max_model_len:
        raise PlannerError(
            f"requests of {workload.mean_tokens_per_request:,.0f} tokens on average do not fit into"
            f" max_model_len {max_model_len:,}"
        )
    if not (share := compute_rejected_fraction(workload, max_model_len)):
        return workload
    rate = workload.rate and workload.rate * (1 - share)
    return replace(
        workload, prompt=_drop_oversized_prompts(workload.prompt, max_model_len)[1], rate=rate
    )


def compute_admitted_rps(deployment: Deployment, workload: Workload) -> float:
    """Requests/s that arrive and are not refused."""
    return (workload.rate or 0.0) * (
        1 - compute_rejected_fraction(workload, deployment.args.max_model_len)
    )


def derive_effective_workload(deployment: Deployment, workload: Workload) -> Workload:
    """`workload` as `deployment` takes it on: without what it refuses, and with what its prefix caches really find."""
    cached = replace(workload, prefix_hit_rate=_estimate_prefix_hit_rate(deployment, workload))
    return drop_rejected_requests(cached, deployment.args.max_model_len)


def _estimate_prefix_hit_rate(deployment: Deployment, workload: Workload) -> float:
    """The `prefix_hit_rate` of `workload`: 0 without a prefix cache, and of a trace's blocks what each engine keeps."""
    if not deployment.args.enable_prefix_caching:
        return 0.0
    if workload.trace is None or not workload.uses_trace_prefixes:
        return workload.prefix_hit_rate
    pool = get_memory_plan(deployment).pool
    tokens = pool.reported_tokens
    if deployment.args.kv_offloading_size:  # host memory has what the pool has, and what it gave up
        tokens = max(
            tokens,
            estimate_kv_offload(deployment, pool).num_blocks
            * pool.layout.groups[0].block_size
            * pool.layout.dcp,
        )
    return compute_prefix_hit_rate(workload.trace, deployment.num_engine_instances, tokens)


def estimate_capacity(deployment: Deployment, workload: Workload) -> Interval:
    """Requests/s that all engines serve at most: every slot is taken, and others wait. All times grow with the step's.

    It depends on lengths and shared prefixes, not on when requests come: of a trace that tells
    which blocks are equal a replica has its own requests, in their order.
    """
    trace, replicas = (
        workload.trace if workload.uses_trace_prefixes else None,
        deployment.layout.replicas,
    )
    crowd = (
        _select_replica_requests(trace, replicas)
        if trace and len(trace.arrival) >= MIN_TRACE_REQUESTS_PER_REPLICA * replicas
        else None
    )
    lengths = replace(
        workload, rate=None, concurrency=1, burstiness=1.0, num_prompts=None, trace=crowd,
        prefix_hit_rate=crowd.prefix_hit_rate if crowd else _estimate_prefix_hit_rate(deployment, workload),
    )  # fmt: skip
    served = replicas * _simulate_saturated_rps(deployment.with_replicas(1), lengths)
    return Interval.from_lognormal(served, get_rate_sigma(deployment))


@lru_cache(maxsize=64)
def _select_replica_requests(trace: Trace, replicas: int) -> Trace:
    """What one of so many replicas has of a trace, all of it there at once."""
    own = slice(None, None, replicas)
    prompt, hashes = trace.prompt[own], trace.hash_ids and trace.hash_ids[own]
    return Trace(trace.path, np.zeros(len(prompt)), prompt, trace.output[own], hashes)


@lru_cache(maxsize=256)
def _simulate_saturated_rps(replica: Deployment, lengths: Workload) -> float:
    """Requests/s of one replica: what is begun once they have mixed, in whole waves, while others wait.

    Counted by their tokens, of which a few hundred requests may have more than usual. What ends
    would mislead: short answers come first. Of random candidates it is 1.5% off 24 waves, nine of
    ten 5%. Where more than `OFTEN` is preempted all from the first to the last request counts,
    which is 6% off at most.
    """
    pool = get_memory_plan(replica).pool
    slots = min(
        replica.args.max_num_seqs,
        max(pool.count_sequences(max(int(lengths.mean_decode_context), 1)), 1),
    )
    waves = max(SATURATION_RUN_MINIMA[0], math.ceil(SATURATION_RUN_MINIMA[1] / slots))
    n = slots * max(min(waves, round(MAX_OUTPUT_TOKENS_PER_RUN / lengths.output.mean / slots)), 2)
    if lengths.trace:  # which prompts find what they share differs from wave to wave
        n = min(4 * n, len(lengths.trace.arrival))
    waiting = replace(
        lengths,
        concurrency=min(
            2 * slots * replica.num_engine_instances, int(WORKLOAD_BOUNDS["concurrency"][1])
        ),
    )
    result = simulate_workload(
        replica, pool, build_step_model(replica), waiting, requests=n, even=True
    )
    begun, tokens = result.outcome.first_token * result.clock_scale, result.prompt + result.output
    end = begun.max()
    ends = np.append(np.sort(begun)[slots - 1 :: slots], end)  # of waves
    mixed = ends[np.searchsorted(ends, MIXING_TIME_FRACTION * end)]
    if (
        mixed == end or result.preemptions.mean() > MAX_PREEMPTIONS_PER_REQUEST
    ):  # all in a step or two; or much is begun and given up again
        end, mixed = result.duration, 0.0
    return replica.num_engine_instances * float(
        tokens[begun > mixed].sum() / tokens.mean() / (end - mixed)
    )


def get_rate_sigma(deployment: Deployment) -> float:
    """Standard deviation of the logarithm of what it serves while every slot is taken."""
    step = build_step_model(deployment)
    return max(step.sigma_tpot, step.sigma_output_tps)
