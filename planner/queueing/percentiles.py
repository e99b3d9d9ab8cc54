"""How latencies spread around their means: over requests, steps and tokens; and how certain they are.

Only as well as ranking, sweeps and sliders need: each latency as one gamma distribution of its mean
and variance (gaps between tokens: none or one or more prompts in them). What is stated is replayed
(`planning.simulation_runs`). Arrays have three axes, [cases, what is varied, slices of a
distribution]; see `queueing.steady_state`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from planner.latency.performance import LATENCY_QUANTILES, STATISTIC_SIGMA_FACTORS, PerformanceBatch
from planner.latency.step_model import StepModel
from planner.queueing.prefill_interference import TrafficMix, average_slices, compute_slice_variance
from planner.workload.workload import Workload

NORMAL_QUANTILES = np.array([NormalDist().inv_cdf(q) for q in LATENCY_QUANTILES])


@dataclass(frozen=True)
class SteadyState:
    """One engine of every case in its steady state, [cases, 1, 1]: what spreads around it makes a `Performance`."""

    step: StepModel
    traffic: TrafficMix
    per_token: np.ndarray  # s of a step that only decodes
    added: np.ndarray  # s that one prompt adds to the steps it rides on
    tpot: np.ndarray  # per streamed output
    decode: np.ndarray  # sequences decoding
    rate: np.ndarray  # requests/s served
    peak: np.ndarray  # requests/s that it serves at most, as its traffic comes
    engines: np.ndarray
    held: np.ndarray  # sequences that the KV pool holds
    queue: np.ndarray  # s waiting to be scheduled, p99
    saturated: np.ndarray
    limit: np.ndarray
    ttft: np.ndarray  # mean, percentiles [cases, 1, `LATE`], variance
    ttfts: np.ndarray
    ttft_varies: np.ndarray
    level: np.ndarray  # standard deviation of a step, from how many are in flight
    groups: np.ndarray  # microbatches of a pipeline among which its sequences are spread


def estimate_step_sd(
    tpot: np.ndarray, least: np.ndarray, inside: np.ndarray, saturated: np.ndarray
) -> np.ndarray:
    """Standard deviation of a step from how many are in flight.

    With a share x of the step that grows with their number, it is that of processor sharing with a
    fixed part: negative binomial, mean N and variance N / (1 - x), whatever the lengths.
    """
    grows = np.clip(1 - least / tpot, 0.0, 1.0)
    return np.where(saturated, 0.0, tpot * grows / np.sqrt(np.maximum(inside * (1 - grows), 1.0)))


def compute_gamma_quantiles(average: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """[cases, 1, percentiles] of gamma distributions (Wilson and Hilferty 1931)."""
    k = average**2 / np.maximum(variance, 1e-30)
    return average * np.maximum(1 - 1 / (9 * k) + NORMAL_QUANTILES / (3 * np.sqrt(k)), 0.0) ** 3


def derive_performance(
    s: SteadyState, workloads: Sequence[Workload], steps: Sequence[StepModel]
) -> PerformanceBatch:
    """Spread the means over requests and tokens, and put the calibration's intervals around them."""
    step, t, outputs = s.step, s.traffic, average_slices(s.traffic.outputs)
    later, extra = outputs - 1, np.maximum(s.tpot - s.per_token, 1e-12)
    # how many prompts interfere with one request varies like a Poisson count; over few tokens a
    # mean varies more
    meetings = np.maximum(s.rate * s.tpot, 1e-9)
    varies = extra**2 / meetings + s.tpot**2 * t.jitter
    tpots = np.maximum(
        compute_gamma_quantiles(s.tpot, varies * average_slices(1 / t.outputs) + s.level**2),
        s.per_token,
    )
    # a share of the gaps holds a Poisson count of chunks: a Weibull distribution of about their
    # mean and variance
    chunks = np.ceil(t.prompts / step.max_tokens)
    one = s.added / average_slices(chunks)
    carrying = -np.expm1(-extra / one)
    uneven = (
        average_slices(t.prompts**2 / chunks)
        * average_slices(chunks)
        / average_slices(t.prompts) ** 2
    )
    shape = np.sqrt(
        np.maximum(carrying * (1 + (one * uneven + s.level**2 / extra) / extra) - 1, 0.0)
    )
    gap = (
        extra
        / carrying
        * np.maximum(np.log(carrying / (1 - np.array(LATENCY_QUANTILES))), 0.0) ** shape
    )
    whole = s.ttft + later * s.tpot
    first, decoding = step.sigma_ttft, step.sigma_tpot
    serving = np.maximum(decoding, step.sigma_output_tps)
    mixed = np.sqrt((first * s.ttft) ** 2 + (decoding * (whole - s.ttft)) ** 2) / whole
    strays = (
        s.ttft_varies
        + s.tpot**2 * compute_slice_variance(t.outputs)
        + later**2 * (varies / outputs + s.level**2)
    )
    each = np.maximum(t.tokens - 1, 1e-9) / np.maximum(later, 1e-9)  # tokens of a gap

    def points(average: np.ndarray, percentiles: np.ndarray) -> np.ndarray:
        return np.concatenate([average, percentiles], axis=-1)[:, 0]

    # a request of one token has no token after the first
    gaps_exist = np.array(
        [[1.0 if workload.output.max_tokens >= 1.5 else np.nan] for workload in workloads]
    )
    keeps_up = (s.limit == "load") & np.array(
        [workload.rate is not None for workload in workloads]
    )[:, None, None]
    return PerformanceBatch(
        ttft=points(s.ttft, s.ttfts),
        tpot=gaps_exist * points(s.tpot / each, tpots / each),
        itl=gaps_exist * points(s.tpot, s.per_token + gap),
        e2e=points(whole, compute_gamma_quantiles(whole, strays)),
        sigmas=np.concatenate([first, decoding, decoding, mixed], axis=1) * STATISTIC_SIGMA_FACTORS,
        request_tps=np.ravel(s.rate * s.engines),
        capacity=np.ravel(s.peak * s.engines),
        capacity_sigma=np.ravel(serving),
        request_sigma=np.ravel(np.where(keeps_up, 0.0, serving)),  # what comes in goes out
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
