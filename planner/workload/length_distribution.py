"""Distributions of prompt and output lengths in tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import NormalDist
from typing import Literal, Self

import numpy as np
from pydantic import PositiveFloat

from planner.core.catalog import SourcedEntry, StrictEntry, load_catalog
from planner.core.errors import PlannerError

DistributionKind = Literal["fixed", "uniform", "lognormal", "empirical"]
RequestSide = Literal["prompt", "output"]
_STANDARD_NORMAL = NormalDist()
_NORMAL_GRID = np.array([_STANDARD_NORMAL.inv_cdf((i + 0.5) / 2000) for i in range(2000)])
"""2,000 equally likely standard normal values: what a lognormal is integrated over."""
_Z_SCORE_95 = _STANDARD_NORMAL.inv_cdf(0.95)


class LengthQuantilesEntry(StrictEntry):
    """Figures of a trace's prompts or outputs, tokens."""

    mean: PositiveFloat
    p50: PositiveFloat
    p95: PositiveFloat
    max: PositiveFloat | None = None

    @property
    def longest(self) -> float:
        """`max`, or the longest that the lognormal through p50 and p95 knows."""
        return self.max or float(
            self.p50 * (self.p95 / self.p50) ** (_NORMAL_GRID[-1] / _Z_SCORE_95)
        )


class PublicTraceEntry(SourcedEntry):
    """A public trace; the head of `catalogs/lengths.yaml` explains every field."""

    prompt: LengthQuantilesEntry | None = None
    output: LengthQuantilesEntry | None = None


@cache
def _load_trace_spreads(side: RequestSide) -> tuple[tuple[str, ...], np.ndarray]:
    """The public traces with such lengths, shortest first, and [n, 4] logarithms of their mean, p50, p95 and max."""
    found = {
        name: getattr(entry, side)
        for name, entry in load_catalog("lengths.yaml", PublicTraceEntry).items()
    }
    known = sorted(
        ((name, spread) for name, spread in found.items() if spread), key=lambda pair: pair[1].mean
    )
    figures = np.log([[spread.mean, spread.p50, spread.p95, spread.longest] for _, spread in known])
    if (np.diff(figures, axis=0) <= 0).any():
        raise PlannerError(
            f"lengths.yaml: of every {side}, mean, p50, p95 and max must all rise with the mean"
        )
    return tuple(name for name, _ in known), figures


@dataclass(frozen=True)
class LengthDistribution:
    """How many tokens a prompt (or an output) has: a distribution, as its equally likely `values`, ascending."""

    kind: DistributionKind
    mean: float
    p50: float
    p95: float
    p99: float
    values: np.ndarray = field(compare=False, repr=False)  # [n] tokens
    given_figures: Mapping[str, float] = field(
        default_factory=dict, compare=False
    )  # the figures it was made from
    spread_source: str = field(
        default="", compare=False
    )  # the public traces whose spread it has, for want of its own

    @classmethod
    def _from_values(cls, how: DistributionKind, values: np.ndarray) -> Self:
        p50, p95, p99 = (float(q) for q in np.quantile(values, (0.50, 0.95, 0.99), method="hazen"))
        return cls(how, float(values.mean()), p50, p95, p99, values)

    @classmethod
    def from_constant(cls, tokens: float) -> Self:
        """Every request has the same length."""
        return replace(
            cls._from_values("fixed", np.array([_check_min_tokens(tokens, "length")])),
            given_figures={"mean": tokens},
        )

    @classmethod
    def from_uniform(cls, most: float, ratio: float) -> Self:
        """Uniform in [`ratio` x `most`, `most`] tokens, as InferenceX draws its random prompts."""
        if not 0 <= ratio <= 1:
            raise PlannerError(f"length_range_ratio must lie between 0 and 1, got {ratio:g}")
        most = _check_min_tokens(most, "length")
        return (
            cls._from_values("uniform", np.linspace(max(1.0, ratio * most), most, 513))
            if ratio < 1
            else cls.from_constant(most)
        )

    @classmethod
    def from_lognormal(
        cls,
        mean: float,
        p95: float | None = None,
        p50: float | None = None,
        largest: float | None = None,
    ) -> Self:
        """The lognormal that a mean and `p95` (or `p50`) fix, cut at `largest`; with a mean alone, a fixed length.

        Given both, it is bent until all three are met: ln(length / p50) = ln(p95 / p50) t, where t
        = z / 1.645 of a standard normal z is replaced by t^k between p50 and p95 and by k t below
        p50 (k = 1: the lognormal itself).
        """
        mean, given = _check_min_tokens(mean, "mean length"), (p50, p95)
        if p95 is not None and p50 is None:
            if not mean <= p95 <= mean * math.exp(_Z_SCORE_95**2 / 2):
                raise PlannerError(
                    f"no lognormal has mean {mean:g} and p95 {p95:g}: p95 must lie between the mean"
                    f" and {math.exp(_Z_SCORE_95**2 / 2):.2f} x the mean; give p50 too for a longer"
                    " tail"
                )
            p50 = mean * math.exp(
                -((_Z_SCORE_95 - math.sqrt(_Z_SCORE_95**2 - 2 * math.log(p95 / mean))) ** 2) / 2
            )
        elif p50 is not None and p95 is None:
            if not 1 <= p50 <= mean:
                raise PlannerError(
                    f"no lognormal has mean {mean:g} and p50 {p50:g}: p50 must not exceed the mean"
                )
            p95 = p50 * math.exp(_Z_SCORE_95 * math.sqrt(2 * math.log(mean / p50)))
        if p50 is None or p95 is None:
            return cls.from_constant(mean)
        if not 1 <= p50 <= p95 <= (largest or math.inf):
            raise PlannerError(
                f"lengths must not fall from 1 over p50 and p95 to max, got {p50:g}, {p95:g},"
                f" {largest}"
            )
        median, spread = p50, math.log(p95 / p50)

        def bent(log_k: float) -> np.ndarray:
            k, t = math.exp(log_k), _NORMAL_GRID / _Z_SCORE_95
            curve = np.where(t < 0, k * t, np.where(t < 1, np.abs(t) ** k, t))
            return np.clip(median * np.exp(spread * curve), 1, largest)

        low, high = -4.0, 4.0  # the mean falls as k grows
        if not bent(high).mean() * 0.999 <= mean <= bent(low).mean() * 1.001:
            raise PlannerError(
                f"no lengths have p50 {p50:g}, p95 {p95:g} and mean {mean:g}: with these two the"
                f" mean lies between {bent(high).mean():.4g} and {bent(low).mean():.4g}"
            )
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if bent(middle).mean() > mean else (low, middle)
        asked = {"mean": mean, "p50": given[0], "p95": given[1], "max": largest}
        return replace(
            cls._from_values("lognormal", bent(low)),
            given_figures={name: v for name, v in asked.items() if v is not None},
        )

    @classmethod
    def from_public_traces(
        cls, mean: float, side: RequestSide, at_most: float | None = None
    ) -> Self:
        """Lengths of which only the `mean` is known, spread as in the public traces of the nearest means.

        The figures of `catalogs/lengths.yaml` are interpolated over the logarithm of the mean, from
        one constant token up. Where no length may exceed `at_most`, the spread narrows until the
        longest is that long.
        """
        names, figures = _load_trace_spreads(side)
        at = math.log(_check_min_tokens(mean, "mean length"))
        known = np.vstack((np.zeros(4), figures, figures[-1] + 20))
        p50, p95, longest = (np.interp(at, known[:, 0], column) - at for column in known.T[1:])
        room = math.inf if at_most is None else math.log(max(at_most, mean)) - at
        if longest > room:
            p50, p95, longest = (value * room / longest for value in (p50, p95, longest))
        if p95 - p50 < 1e-6:
            return cls.from_constant(mean)
        above = int(np.searchsorted(figures[:, 0], at))
        between = [names[k] for k in (above - 1, above) if 0 <= k < len(names)]
        found = cls.from_lognormal(
            mean, *(float(mean * math.exp(value)) for value in (p95, p50, longest))
        )
        return replace(found, spread_source=" and ".join(between))

    @classmethod
    def from_samples(cls, tokens: np.ndarray) -> Self:
        """The lengths of a trace, [n] tokens, as they are."""
        return cls._from_values("empirical", np.sort(np.asarray(tokens, dtype=float)))

    @property
    def max_tokens(self) -> float:
        """The longest length that this distribution knows (a lognormal's: its p99.975)."""
        return float(self.values[-1])

    def compute_quantile(self, q: float) -> float:
        """Tokens that a share `q` of requests does not exceed."""
        return float(np.quantile(self.values, q, method="hazen"))

    def compute_slice_means(self, edges: np.ndarray) -> np.ndarray:
        """Mean length of each slice between the shares `edges` (0 to 1), so that their weighted mean is `mean`."""
        if len(self.values) == 1:
            return np.full(len(edges) - 1, self.values[0])
        edges = edges * len(self.values)
        return np.diff(np.interp(edges, *self._cumulative_sums)) / np.diff(edges)

    @cached_property
    def _cumulative_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """(how many of the values, shortest first, their sum)."""
        return np.arange(len(self.values) + 1.0), np.concatenate(([0.0], np.cumsum(self.values)))

    def sample(self, n: int, rng: np.random.Generator, even: bool = False) -> np.ndarray:
        """[n] lengths drawn at random, whole tokens; `even`: one from each n-th of them, in random order."""
        shares = (rng.permutation(n) + 0.5) / n if even else rng.random(n)
        known = len(self.values)  # np.quantile(..., method="hazen") of values that need no sorting
        lengths = np.interp(shares * known - 0.5, np.arange(known), self.values)
        return np.maximum(1, np.rint(lengths)).astype(np.int64)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.mean:,.0f} tokens"
        return (
            f"{self.mean:,.0f} tokens (p50 {self.p50:,.0f}, p95 {self.p95:,.0f}, p99"
            f" {self.p99:,.0f}, {self.kind})"
        )


def _check_min_tokens(tokens: float, what: str) -> float:
    if not (math.isfinite(tokens) and tokens >= 1):
        raise PlannerError(f"{what} must be at least 1 token, got {tokens:g}")
    return float(tokens)
