"""Service level objectives: a limit for one latency metric at one statistic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from planner.core.intervals import Z_SCORE_80PCT, Interval
from planner.latency.performance import LATENCY_METRICS

if TYPE_CHECKING:
    LatencyMetric = str
else:  # what scenarios accept are the rows of the table
    LatencyMetric = Literal[tuple(LATENCY_METRICS)]
LatencyStatistic = Literal["mean", "p50", "p95", "p99"]
LimitStatus = Literal["met", "at risk", "missed"]


STANDARD_NORMAL = NormalDist()
MAX_TOLERANCE_SIGMAS = 3.0
"""Beyond three standard deviations (99.9%) a tolerance is not told apart."""


def compute_probability(tolerance_sigmas: float) -> float:
    """Convert a tolerance to the probability that the promises hold."""
    return STANDARD_NORMAL.cdf(tolerance_sigmas)


def compute_tolerance(probability: float) -> float:
    """Convert a probability (0 to 1) to the tolerance that it asks for, in standard deviations."""
    if probability >= 1:
        return math.inf
    return STANDARD_NORMAL.inv_cdf(probability) if probability > 0 else -math.inf


STEP_PROMPT_CORRELATION = 0.2
"""Correlation of the errors of TPOT and TTFT of one run.

Spearman's 0.13 to 0.21 over the 1,300 runs of catalogs/validation/measured_runs.csv with both
(2026-11).
"""


def compute_joint_probability(one: float, other: float, correlation: float) -> float:
    """Compute the probability that two correlated standard normal errors stay below these tolerances.

    Plackett's identity (1954), Phi2(h, k, r) = Phi(h) Phi(k) + integral from 0 to r of the density
    phi2(h, k, t) dt, by Simpson's rule: exact to 1e-5 for correlations up to 0.5.

    >>> round(compute_joint_probability(0.84, 0.84, 0.0), 3), round(compute_joint_probability(0, 0, 0.5), 3)
    (0.639, 0.333)
    """

    def compute_density(r: float) -> float:
        square = (one * one - 2 * r * one * other + other * other) / (1 - r * r)
        return math.exp(-square / 2) / (2 * math.pi * math.sqrt(1 - r * r))

    ends, middle = (
        compute_density(0.0) + compute_density(correlation),
        compute_density(correlation / 2),
    )
    alone = STANDARD_NORMAL.cdf(one) * STANDARD_NORMAL.cdf(other)
    return alone + correlation * (ends + 4 * middle) / 6


@dataclass(frozen=True)
class LimitOdds:
    """How probably one limit is kept: that of a target, or the load that leaves the headroom free."""

    name: str  # "p95 TTFT", "capacity", "rate", "users", "memory"
    use: float  # expected share of the limit, 1 at the limit
    pessimistic_use: float  # the share that is exceeded only as improbably as was asked for
    tolerance_sigmas: float  # by which every step may be slower than predicted while it is kept
    probability: float  # that the engine starts and keeps it, 0 to 1
    status: LimitStatus
    metric: LatencyMetric | None = None  # that it limits

    @property
    def is_of_prompts(self) -> bool:
        """Whether it limits a latency whose error is that of prompts, not that of the steps."""
        return self.metric is not None and LATENCY_METRICS[self.metric].error == "prompt"


def combine_limits(limits: Sequence[LimitOdds], p_memory: float) -> float:
    """Combine the probabilities of all limits and of memory.

    Slower steps break the weakest of the other limits first; prompts have an error of their own.
    """
    if not limits:
        return p_memory
    lowest = {
        of_prompts: min(
            (each.tolerance_sigmas for each in limits if each.is_of_prompts == of_prompts),
            default=MAX_TOLERANCE_SIGMAS,
        )
        for of_prompts in (False, True)
    }
    both = compute_joint_probability(lowest[False], lowest[True], STEP_PROMPT_CORRELATION)
    return min(p_memory * both, *(each.probability for each in limits))


def compute_asked_tolerance(confidence: float, p_memory: float) -> float:
    """Compute the tolerance that `confidence` asks for, beside what memory risks; infinite if out of reach."""
    return compute_tolerance(confidence / p_memory) if p_memory > confidence else math.inf


def rate_limit(
    name: str, use: float, pessimistic_use: float, tolerance_sigmas: float, p_memory: float,
    confidence: float, metric: LatencyMetric | None = None,
) -> LimitOdds:  # fmt: skip
    """Rate a limit by its tolerance and by the probability that memory suffices."""
    probability = p_memory * compute_probability(tolerance_sigmas)
    status: LimitStatus = "at risk" if probability < confidence else "met"
    return LimitOdds(
        name, use, pessimistic_use, tolerance_sigmas, probability,
        "missed" if tolerance_sigmas < 0 else status, metric,
    )  # fmt: skip


def average_limits(
    limits: Sequence[LimitOdds], weights: Sequence[float], p_memory: float, confidence: float
) -> LimitOdds:
    """Average how probably a limit is kept at several loads, of which the middle one is the expected."""
    middle, asked = limits[len(limits) // 2], compute_asked_tolerance(confidence, p_memory)
    kept = sum(
        weight * compute_probability(limit.tolerance_sigmas)
        for limit, weight in zip(limits, weights, strict=True)
    )
    most = MAX_TOLERANCE_SIGMAS
    tolerance = min(max(compute_tolerance(kept), -most), most)
    reach = middle.pessimistic_use
    if tolerance > 0 and 0 < middle.use < 1:  # as if its logarithm grew evenly up to the limit
        reach = middle.use ** (1 - min(asked, most) / tolerance)
    return rate_limit(
        middle.name, middle.use, reach, tolerance, p_memory, confidence, middle.metric
    )


def estimate_tolerance_from_interval(value: Interval, limit: float) -> float:
    """Estimate the tolerance of one figure from its 80% interval, as if its logarithm were normal.

    Between the middle and the pessimistic end the interval is interpolated; beyond, extrapolated.
    """
    lo, mid, hi = (max(end / limit, 1e-9) for end in (value.lo, value.mid, value.hi))
    room, reach = -math.log(mid), math.log(hi / mid) if mid <= 1 else math.log(mid / lo)
    if reach <= 0:
        return math.copysign(MAX_TOLERANCE_SIGMAS, 1 if room >= 0 else -1)
    z = Z_SCORE_80PCT * room / reach
    return min(max(z, -MAX_TOLERANCE_SIGMAS), MAX_TOLERANCE_SIGMAS)


def get_pessimistic_value(value: Interval, z: float) -> float:
    """Get the value that is exceeded only beyond `z` standard deviations, by the same interpolation."""
    if not value.mid > 0 or not math.isfinite(value.hi):
        return value.hi if z > 0 else value.mid
    return value.mid * float((value.hi / value.mid) ** (z / Z_SCORE_80PCT))


def get_range_at(value: Interval, z: float) -> Interval:
    """Get the range that ends at the values of `get_pessimistic_value`, slow and fast.

    Its upper end is beyond a limit exactly if the limit is at risk at `z`.
    """
    slow = get_pessimistic_value(value, z)
    if not 0 < value.lo <= value.mid < math.inf:
        return Interval(value.lo, value.mid, slow)
    fast = value.mid * (value.lo / value.mid) ** (max(z, 0.0) / Z_SCORE_80PCT)
    return Interval(fast, value.mid, max(slow, value.mid))


@dataclass(frozen=True)
class SloTarget:
    """An SLO: `metric` at `percentile` takes at most `seconds`."""

    metric: LatencyMetric
    percentile: LatencyStatistic
    seconds: float
    confidence: float = 0.8  # probability with which it has to be kept

    @property
    def waits(self) -> bool:
        """Whether the queue moves what it limits; else only what steps take."""
        return LATENCY_METRICS[self.metric].waits

    @property
    def name(self) -> str:
        """The statistic and the metric, such as "p95 TPOT"."""
        return f"{self.percentile} {self.metric.upper()}"

    def __str__(self) -> str:
        return f"{self.name} of at most {self.seconds * 1e3:,.0f} ms"


def get_limit_status(use: Interval, z: float) -> LimitStatus:
    """Return the status of a limit of which `use` is taken, at `z` standard deviations."""
    if use.mid > 1:
        return "missed"
    return "at risk" if get_pessimistic_value(use, z) > 1 else "met"


def format_latency(seconds: float, limit: float = math.inf) -> str:
    """Format a latency for a sentence, with enough digits to differ from `limit`."""
    if seconds >= 10:
        return f"{seconds:,.0f} s" if abs(seconds - limit) >= 1 else f"{seconds:,.2f} s"
    if seconds < 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return (
        f"{seconds * 1e3:,.0f} ms" if abs(seconds - limit) >= 1e-3 else f"{seconds * 1e3:,.2f} ms"
    )


def explain_implausible_limits(targets: Sequence[SloTarget]) -> str:
    """Explain that limits are in ms, if one is so short that seconds are meant; else empty."""
    for target in targets:
        if target.seconds < LATENCY_METRICS[target.metric].min_plausible_s:
            ms = f"{target.seconds * 1e3:g}"
            return (
                f"a {target.name} of {ms} ms is out of reach of any GPU; limits are in ms, so"
                f" write {target.seconds * 1e6:g} for {ms} s"
            )
    return ""


def list_unlimited_targets(targets: Sequence[SloTarget]) -> list[SloTarget]:
    """List the p95 of what each request has that no target limits, without a limit."""
    limited = {target.metric for target in targets}
    return [
        SloTarget(name, "p95", 0.0)
        for name, metric in LATENCY_METRICS.items()
        if metric.per_request and name not in limited
    ]


def list_benchmark_targets(targets: Sequence[SloTarget]) -> tuple[SloTarget, ...]:
    """List what a benchmark is judged by: the metrics of the SLOs; without any, p99 TTFT and ITL."""
    defaults = (SloTarget("ttft", "p99", math.inf), SloTarget("itl", "p99", math.inf))
    return tuple({target.name: target for target in targets}.values()) or defaults
