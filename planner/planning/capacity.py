"""The capacity of a deployment, and the part of a workload that its engines admit."""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.engines.deployment import Deployment
from planner.latency.step_model import build_step_model
from planner.latency.workload_step_costs import estimate_kv_offload
from planner.memory.memory_plan import get_memory_plan
from planner.simulator.simulation import simulate_workload
from planner.workload.length_distribution import LengthDistribution
from planner.workload.traces import Trace
from planner.workload.workload import WORKLOAD_BOUNDS, Workload

MAX_OUTPUT_TOKENS_PER_RUN = 20_000_000
"""Upper limit of the output tokens of one run."""
SATURATION_RUN_MINIMA, MIXING_TIME_FRACTION = (5, 600), 0.4
"""Size of a capacity run: how often every slot is filled, requests at least, and the fraction of
the time until short and long answers have mixed."""
MAX_PREEMPTIONS_PER_REQUEST = 0.1
"""From this many preemptions per request, requests begun do not measure requests served."""
MIN_TRACE_REQUESTS_PER_REPLICA = 2 * SATURATION_RUN_MINIMA[1]
"""Requests per replica at which a trace is simulated as it is; shorter ones give only lengths."""


def is_finite_run(workload: Workload) -> bool:
    """Whether the workload has a fixed number of requests.

    Otherwise it goes on, and is simulated for long enough.
    """
    return workload.trace is not None or workload.rate is None or workload.num_prompts is not None


def compute_rejected_fraction(workload: Workload, max_model_len: int) -> float:
    """Compute the fraction of requests that are rejected: prompts without room for an output."""
    return _drop_oversized_prompts(workload.prompt, max_model_len)[0]


@lru_cache(maxsize=256)
def _drop_oversized_prompts(
    prompt: LengthDistribution, limit: int
) -> tuple[float, LengthDistribution]:
    """Return the fraction of prompts of `limit` tokens or more, and the lengths of the others."""
    fraction = float(np.count_nonzero(prompt.values >= limit) / len(prompt.values))
    return fraction, (
        LengthDistribution.from_samples(prompt.values[prompt.values < limit])
        if 0 < fraction < 1
        else prompt
    )


def drop_rejected_requests(workload: Workload, max_model_len: int) -> Workload:
    """Return the admitted part of `workload`: without rejected prompts, and so at a lower rate.

    Raises `PlannerError` if requests do not fit on average, which includes that all are rejected.
    """
    if workload.mean_tokens_per_request > max_model_len:
        raise PlannerError(
            f"requests of {workload.mean_tokens_per_request:,.0f} tokens on average do not fit into"
            f" max_model_len {max_model_len:,}"
        )
    if not (rejected := compute_rejected_fraction(workload, max_model_len)):
        return workload
    rate = workload.rate and workload.rate * (1 - rejected)
    return replace(
        workload, prompt=_drop_oversized_prompts(workload.prompt, max_model_len)[1], rate=rate
    )


def compute_admitted_rps(deployment: Deployment, workload: Workload) -> float:
    """Compute the requests/s that arrive and are not rejected."""
    return (workload.rate or 0.0) * (
        1 - compute_rejected_fraction(workload, deployment.args.max_model_len)
    )


def derive_effective_workload(deployment: Deployment, workload: Workload) -> Workload:
    """Return the admitted part of `workload`, with the hit rate of its prefix caches."""
    cached = replace(workload, prefix_hit_rate=_estimate_prefix_hit_rate(deployment, workload))
    return drop_rejected_requests(cached, deployment.args.max_model_len)


def count_benchmark_prefix_tokens(deployment: Deployment, workload: Workload) -> int:
    """Count the tokens of the shared prefix of the prompts that `bench.sh` sends.

    It is the workload's own prefix, or the mean number of cached tokens.
    """
    return workload.prefix_tokens or int(
        derive_effective_workload(deployment, workload).mean_cached_tokens
    )


def _estimate_prefix_hit_rate(deployment: Deployment, workload: Workload) -> float:
    """Estimate the prefix hit rate: 0 without a prefix cache, else the workload's own.

    For a trace with block hashes, it is that of caches as large as the engine's KV cache pool.
    """
    if not deployment.args.enable_prefix_caching:
        return 0.0
    if workload.trace is None or not workload.uses_trace_prefixes:
        return workload.prefix_hit_rate
    from planner.simulator.prefix_cache_hits import estimate_prefix_hit_rate  # and the compiler

    pool = get_memory_plan(deployment).pool
    # host memory also holds the blocks that the pool evicted
    offloaded_blocks = estimate_kv_offload(deployment, pool).num_blocks
    offloaded_tokens = offloaded_blocks * pool.layout.groups[0].block_size * pool.layout.dcp
    tokens = max(pool.reported_tokens, offloaded_tokens)
    return estimate_prefix_hit_rate(workload.trace, deployment.num_engine_instances, tokens)


def estimate_capacity(deployment: Deployment, workload: Workload) -> Interval:
    """Estimate the requests/s that all engines sustain with every slot taken and others waiting.

    It depends on lengths and shared prefixes, not on arrival times. For a trace with block hashes
    each replica simulates its own requests, in their order. The interval is that of the step cost.
    """
    trace, replicas = (
        workload.trace if workload.uses_trace_prefixes else None,
        deployment.layout.replicas,
    )
    waiting = (
        _select_replica_requests(trace, replicas)
        if trace and workload.num_requests >= MIN_TRACE_REQUESTS_PER_REPLICA * replicas
        else None
    )
    lengths = replace(
        workload, rate=None, concurrency=1, burstiness=1.0, num_prompts=None, trace=waiting,
        prefix_hit_rate=waiting.prefix_hit_rate if waiting
        else _estimate_prefix_hit_rate(deployment, workload),
    )  # fmt: skip
    capacity = replicas * _simulate_saturated_rps(deployment.with_replicas(1), lengths)
    return Interval.from_lognormal(capacity, build_step_model(deployment, workload).sigma_capacity)


@lru_cache(maxsize=64)
def _select_replica_requests(trace: Trace, replicas: int) -> Trace:
    """Return the requests of a trace that one of `replicas` gets, all arriving at once."""
    rows = trace.select_rows(0, replicas)
    own = trace.take(rows[rows >= trace.num_uncounted])
    return replace(own, arrival=np.zeros(len(own.arrival)))


@lru_cache(maxsize=4096)
def _simulate_saturated_rps(replica: Deployment, lengths: Workload) -> float:
    """Simulate the requests/s that one replica begins once lengths have mixed, in whole waves.

    Requests are counted by their tokens, since a few hundred of them may be longer than usual.
    Requests that end would mislead: short answers end first. On random candidates the median error
    against 24 waves is 1.5%, and 5% in nine of ten. With more preemptions than
    `MAX_PREEMPTIONS_PER_REQUEST` the whole run counts, whose error is at most 6%.
    """
    pool = get_memory_plan(replica).pool
    slots = min(
        replica.args.max_num_seqs,
        max(pool.count_sequences(max(int(lengths.mean_decode_context), 1)), 1),
    )
    shared = slots * replica.ranks_per_clock  # by all that are simulated together
    waves = max(SATURATION_RUN_MINIMA[0], math.ceil(SATURATION_RUN_MINIMA[1] / shared))
    n = slots * max(min(waves, round(MAX_OUTPUT_TOKENS_PER_RUN / lengths.output.mean / shared)), 2)
    if lengths.trace:  # prefix hits differ from wave to wave
        n = min(4 * n, len(lengths.trace.arrival))
    saturating = replace(
        lengths,
        concurrency=min(
            2 * slots * replica.num_engine_instances, int(WORKLOAD_BOUNDS["concurrency"][1])
        ),
    )
    result = simulate_workload(
        replica, pool, build_step_model(replica, saturating), saturating, requests=n, even=True
    )
    begun, tokens = result.outcome.first_token * result.clock_scale, result.prompt + result.output
    end, slots = begun.max(), slots * result.engines
    ends = np.append(np.sort(begun)[slots - 1 :: slots], end)  # of waves
    mixed = ends[np.searchsorted(ends, MIXING_TIME_FRACTION * end)]
    # All begin within a step or two, or many are preempted again: the whole run counts.
    if mixed == end or result.preemptions.mean() > MAX_PREEMPTIONS_PER_REQUEST:
        end, mixed = result.duration, 0.0
    return (
        replica.num_engine_instances
        / result.engines
        * float(tokens[begun > mixed].sum() / tokens.mean() / (end - mixed))
    )
