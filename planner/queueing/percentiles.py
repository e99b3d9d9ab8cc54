"""How latencies spread around their means: over requests, steps and tokens; and how certain they are.

Arrays have three axes, [cases, what is varied, slices of a distribution]; see `queueing.steady_state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from planner.facts.workload import Workload
from planner.latency.performance import WIDER, Performances
from planner.latency.step_model import StepModel
from planner.queueing.prefill_interference import LATE, NORMAL, PAIRS, QUANTILES, SHARES, Traffic, mean, quantiles

LATE_NORMAL = np.array([NormalDist().inv_cdf(q) for q in LATE])


@dataclass(frozen=True)
class State:
    """One engine of every case in its steady state, [cases, 1, 1]: what spreads around it makes a `Performance`."""

    step: StepModel
    traffic: Traffic
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
    level: np.ndarray  # standard deviation of a step, from how many are in flight
    groups: np.ndarray  # microbatches of a pipeline among which its sequences are spread


def level_sd(tpot: np.ndarray, least: np.ndarray, inside: np.ndarray, saturated: np.ndarray) -> np.ndarray:
    """Standard deviation of a step from how many are in flight.

    With a share x of the step that grows with their number, it is that of processor sharing with a fixed part: negative
    binomial, mean N and variance N / (1 - x), whatever the lengths.
    """
    grows = np.clip(1 - least / tpot, 0.0, 1.0)
    return np.where(saturated, 0.0, tpot * grows / np.sqrt(np.maximum(inside * (1 - grows), 1.0)))


def gamma(average: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """[cases, 1, slices] quantiles of a gamma distribution (Wilson and Hilferty 1931)."""
    k = average**2 / np.maximum(variance, 1e-30)
    return average * np.maximum(1 - 1 / (9 * k) + NORMAL / (3 * np.sqrt(k)), 0.0) ** 3


def performance(s: State, workloads: Sequence[Workload], steps: Sequence[StepModel]) -> Performances:
    """Spread the means over requests and tokens, and put the calibration's intervals around them."""
    step, t, outputs = s.step, s.traffic, mean(s.traffic.outputs)
    # how many prompts interfere with one request varies like a Poisson count
    meetings = np.maximum(s.rate * outputs * s.tpot, 1e-9)
    sd = np.maximum(s.tpot - s.per_token, 0.0) / np.sqrt(meetings)
    late = np.sign(t.uneven) * np.hypot(
        np.hypot(sd, s.tpot * np.sqrt(t.jitter / outputs)) * t.uneven, s.level * LATE_NORMAL
    )
    tpots = np.maximum(s.tpot + late, s.per_token)
    # gaps with prompts hold a Poisson count of chunks, up to a full step: spread as a gamma with the same moments
    extra, chunks = np.maximum(s.tpot - s.per_token, 1e-12), np.ceil(t.prompts / step.max_tokens)
    chunk = s.added * t.prompts / (mean(t.prompts) * chunks)
    one = mean(chunks * chunk) / mean(chunks)
    carrying = -np.expm1(-extra / one)
    several = extra / carrying
    moment = extra * mean(chunks * chunk**2) / mean(chunks * chunk) + extra**2
    full = np.maximum(step.max_tokens / np.minimum(mean(t.prompts), step.max_tokens) * one, several)
    gap = np.minimum(gamma(several, moment / carrying - several**2 + s.level**2), full)
    gaps = np.concatenate([s.per_token, s.per_token + gap], axis=-1)
    weights = np.concatenate([1 - carrying, carrying * SHARES], axis=-1)
    whole = s.ttft + (outputs - 1) * s.tpot
    first, decoding = step.sigma_ttft, step.sigma_tpot
    mixed = np.sqrt((first * s.ttft) ** 2 + (decoding * (whole - s.ttft)) ** 2) / whole
    reached = quantiles(s.ttfts, s.shares, (*LATE, *QUANTILES))
    # E2E: each output with every quantile of the TTFT, whose distance from the mean adds to that of the TPOT in squares
    strays = (t.outputs - 1) * np.sqrt(sd**2 * outputs / t.outputs + s.level**2 + s.tpot**2 * t.jitter / t.outputs)
    around = np.hypot(reached[:, :, len(LATE) :].swapaxes(1, 2) - s.ttft, strays * NORMAL[:, None])
    e2es = s.ttft + (t.outputs - 1) * s.tpot + np.sign(NORMAL[:, None]) * around

    each = np.maximum(t.tokens - 1, 1e-9) / np.maximum(outputs - 1, 1e-9)  # tokens of a gap

    def points(average: np.ndarray, percentiles: np.ndarray) -> np.ndarray:
        return np.concatenate([average, percentiles], axis=-1)[:, 0]

    # a request of one token has no token after the first
    gaps_exist = np.array([[1.0 if workload.output.largest >= 1.5 else np.nan] for workload in workloads])
    keeps_up = (s.limit == "load") & np.array([workload.rate is not None for workload in workloads])[:, None, None]
    return Performances(
        ttft=points(s.ttft, reached[:, :, : len(LATE)]),
        tpot=gaps_exist * points(s.tpot / each, tpots / each),
        itl=gaps_exist * points(s.tpot, quantiles(gaps, weights, LATE)),
        e2e=points(whole, quantiles(e2es, PAIRS, LATE)),
        sigmas=np.concatenate([first, decoding, decoding, mixed], axis=1) * WIDER,
        request_tps=np.ravel(s.rate * s.engines),
        request_sigma=np.ravel(np.where(keeps_up, 0.0, decoding)),  # what comes in goes out
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
