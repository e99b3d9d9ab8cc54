"""Derive latency percentiles and intervals from the means of a steady state.

This is as accurate as ranking, sweeps and sliders need: each latency is one gamma distribution with
its mean and variance (gaps between tokens: with no, one or more prompts in them). Stated results
are simulated (`planning.simulation_runs`). Arrays have three axes, [cases, what varies, slices of a
distribution]; see `queueing.steady_state`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from planner.latency.performance import (
    LATENCY_METRICS,
    LATENCY_QUANTILES,
    STATISTIC_SIGMA_FACTORS,
    PerformanceBatch,
)
from planner.latency.step_model import StepModel
from planner.queueing.prefill_interference import TrafficMix, average_slices, compute_slice_variance
from planner.workload.workload import Workload

NORMAL_QUANTILES = np.array([NormalDist().inv_cdf(q) for q in LATENCY_QUANTILES])


@dataclass(frozen=True)
class SteadyState:
    """Steady state of one engine per case, [cases, 1, 1]."""

    step: StepModel
    traffic: TrafficMix
    per_token: np.ndarray  # s of a step that only decodes
    added: np.ndarray  # s that one prompt adds to its steps
    tpot: np.ndarray  # s per streamed output
    decode: np.ndarray  # sequences decoding
    rate: np.ndarray  # requests/s served
    peak: np.ndarray  # highest requests/s that it serves of this traffic
    engines: np.ndarray
    held: np.ndarray  # sequences that fit into the KV cache pool
    queue: np.ndarray  # s until a request is scheduled, p99
    saturated: np.ndarray
    limit: np.ndarray
    ttft: np.ndarray  # s, mean
    ttfts: np.ndarray  # [cases, 1, percentiles] s
    ttft_varies: np.ndarray  # variance
    level: np.ndarray  # s, standard deviation of a step due to the number of requests in flight
    groups: np.ndarray  # microbatches among which a pipeline's sequences are spread


def estimate_step_sd(
    tpot: np.ndarray, least: np.ndarray, inside: np.ndarray, saturated: np.ndarray
) -> np.ndarray:
    """Estimate the standard deviation of a step that is due to the number of requests in flight.

    If a fraction x of the step grows with that number, the number is distributed as in processor
    sharing with a fixed part: negative binomial, mean N and variance N / (1 - x), whatever the
    lengths.
    """
    grows = np.clip(1 - least / tpot, 0.0, 1.0)
    return np.where(saturated, 0.0, tpot * grows / np.sqrt(np.maximum(inside * (1 - grows), 1.0)))


def compute_gamma_quantiles(average: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return [cases, 1, percentiles] of gamma distributions (Wilson and Hilferty 1931)."""
    k = average**2 / np.maximum(variance, 1e-30)
    return average * np.maximum(1 - 1 / (9 * k) + NORMAL_QUANTILES / (3 * np.sqrt(k)), 0.0) ** 3


def derive_performance(
    s: SteadyState, workloads: Sequence[Workload], steps: Sequence[StepModel]
) -> PerformanceBatch:
    """Derive percentiles over requests and tokens, and the intervals of the calibration."""
    step, t, outputs = s.step, s.traffic, average_slices(s.traffic.outputs)
    later, extra = outputs - 1, np.maximum(s.tpot - s.per_token, 1e-12)
    # the number of prompts that interfere with a request varies like a Poisson count; a mean over
    # few tokens varies more
    meetings = np.maximum(s.rate * s.tpot, 1e-9)
    varies = extra**2 / meetings + s.tpot**2 * t.jitter
    tpots = np.maximum(
        compute_gamma_quantiles(s.tpot, varies * average_slices(1 / t.outputs) + s.level**2),
        s.per_token,
    )
    # some gaps hold a Poisson count of chunks: a Weibull distribution with about their mean and
    # variance
    chunks = np.ceil(t.prompts / step.max_tokens)
    chunk_s = s.added / average_slices(chunks)
    carrying = -np.expm1(-extra / chunk_s)
    uneven = (
        average_slices(t.prompts**2 / chunks)
        * average_slices(chunks)
        / average_slices(t.prompts) ** 2
    )
    shape = np.sqrt(
        np.maximum(carrying * (1 + (chunk_s * uneven + s.level**2 / extra) / extra) - 1, 0.0)
    )
    whole = s.ttft + later * s.tpot
    first, decoding = step.sigma_ttft, step.sigma_tpot
    strays = (
        s.ttft_varies
        + s.tpot**2 * compute_slice_variance(t.outputs)
        + later**2 * (varies / outputs + s.level**2)
    )
    tokens_per_gap = np.maximum(t.tokens - 1, 1e-9) / np.maximum(later, 1e-9)

    def points(average: np.ndarray, percentiles: np.ndarray) -> np.ndarray:
        return np.concatenate([average, percentiles], axis=-1)[:, 0]

    # a request of one token has no token after the first
    gaps_exist = np.array([[1.0 if w.output.max_tokens >= 1.5 else np.nan] for w in workloads])
    keeps_up = (s.limit == "load") & np.array(
        [workload.rate is not None for workload in workloads]
    )[:, None, None]
    latencies = {
        "ttft": points(s.ttft, s.ttfts),
        "tpot": gaps_exist * points(s.tpot / tokens_per_gap, tpots / tokens_per_gap),
        "itl": gaps_exist
        * points(
            s.tpot,
            s.per_token
            + extra
            / carrying
            * np.maximum(np.log(carrying / (1 - np.array(LATENCY_QUANTILES))), 0.0) ** shape,
        ),
        "e2e": points(whole, compute_gamma_quantiles(whole, strays)),
    }
    errors = {
        "prompt": first,
        "step": decoding,
        "mixed": np.sqrt((first * s.ttft) ** 2 + (decoding * (whole - s.ttft)) ** 2) / whole,
    }
    return PerformanceBatch(
        latencies=np.stack([latencies[name] for name in LATENCY_METRICS], axis=1),
        sigmas=np.concatenate([errors[m.error] for m in LATENCY_METRICS.values()], axis=1)
        * STATISTIC_SIGMA_FACTORS,
        request_tps=np.ravel(s.rate * s.engines),
        capacity=np.ravel(s.peak * s.engines),
        capacity_sigma=np.ravel(step.sigma_capacity),
        request_sigma=np.ravel(np.where(keeps_up, 0.0, decoding)),  # all that arrives is served
        output_tokens=np.ravel(t.tokens),
        prompt_tokens=np.array([workload.prompt.mean for workload in workloads]),
        decode_batch=np.ravel(s.decode / s.groups),
        kv_usage=np.ravel(np.minimum(s.decode / s.held, 1.0)),
        queue=np.ravel(s.queue),
        saturated=np.ravel(s.saturated),
        limit=np.ravel(s.limit),
        basis=np.array([step.basis for step in steps]),
        fp8_kv=np.ravel(step.kv_stretch > 1),
    )
