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
"""2,000 equally likely standard normal values, over which a lognormal is integrated."""
_Z_SCORE_95 = _STANDARD_NORMAL.inv_cdf(0.95)


class LengthQuantilesEntry(StrictEntry):
    """Figures of a trace's prompts or outputs in tokens."""

    mean: PositiveFloat
    p50: PositiveFloat
    p95: PositiveFloat
    max: PositiveFloat | None = None

    @property
    def longest(self) -> float:
        """`max`, or the largest value of the lognormal through p50 and p95."""
        return self.max or float(
            self.p50 * (self.p95 / self.p50) ** (_NORMAL_GRID[-1] / _Z_SCORE_95)
        )


class PublicTraceEntry(SourcedEntry):
    """A public trace; the head of `catalogs/lengths.yaml` explains every field."""

    prompt: LengthQuantilesEntry | None = None
    output: LengthQuantilesEntry | None = None


@cache
def _load_trace_spreads(side: RequestSide) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names of the public traces with such lengths, shortest first, and their figures.

    Figures are the logarithms of mean, p50, p95 and max, [n, 4].
    """
    entries = {
        name: getattr(entry, side)
        for name, entry in load_catalog("lengths.yaml", PublicTraceEntry).items()
    }
    known = sorted(
        ((name, spread) for name, spread in entries.items() if spread),
        key=lambda pair: pair[1].mean,
    )
    figures = np.log([[spread.mean, spread.p50, spread.p95, spread.longest] for _, spread in known])
    if (np.diff(figures, axis=0) <= 0).any():
        raise PlannerError(
            f"lengths.yaml: of every {side}, mean, p50, p95 and max must all rise with the mean"
        )
    return tuple(name for name, _ in known), figures


@dataclass(frozen=True)
class LengthDistribution:
    """Distribution of prompt or output tokens, given by its equally likely `values` in order."""

    kind: DistributionKind
    mean: float
    p50: float
    p95: float
    p99: float
    values: np.ndarray = field(compare=False, repr=False)  # [n] tokens
    # the figures it was built from
    given_figures: Mapping[str, float] = field(default_factory=dict, compare=False)
    # the public traces whose spread it has, if it was built from a mean
    spread_source: str = field(default="", compare=False)

    @classmethod
    def _from_values(cls, how: DistributionKind, values: np.ndarray) -> Self:
        """Build a distribution from its ascending values."""
        p50, p95, p99 = (float(q) for q in np.quantile(values, (0.50, 0.95, 0.99), method="hazen"))
        return cls(how, float(values.mean()), p50, p95, p99, values)

    @classmethod
    def from_constant(cls, tokens: float) -> Self:
        """Build a distribution in which every request has the same length."""
        return replace(
            cls._from_values("fixed", np.array([_check_min_tokens(tokens, "length")])),
            given_figures={"mean": tokens},
        )

    @classmethod
    def from_uniform(cls, most: float, ratio: float) -> Self:
        """Build a uniform distribution in [`ratio` x `most`, `most`] tokens, as InferenceX does."""
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
        """Build the lognormal with this mean and `p95` (or `p50`), cut at `largest`.

        With only a mean, the length is constant. With both, the lognormal is bent to meet all
        three: ln(length / p50) = ln(p95 / p50) t, where t = z / 1.645 of a standard normal z is
        replaced by t^k between p50 and p95 and by k t below p50 (k = 1: the lognormal itself).
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

        def bend(log_k: float) -> np.ndarray:
            k, t = math.exp(log_k), _NORMAL_GRID / _Z_SCORE_95
            curve = np.where(t < 0, k * t, np.where(t < 1, np.abs(t) ** k, t))
            return np.clip(median * np.exp(spread * curve), 1, largest)

        low, high = -4.0, 4.0  # the mean falls as k grows
        if not bend(high).mean() * 0.999 <= mean <= bend(low).mean() * 1.001:
            raise PlannerError(
                f"no lengths have p50 {p50:g}, p95 {p95:g} and mean {mean:g}: with these two the"
                f" mean lies between {bend(high).mean():.4g} and {bend(low).mean():.4g}"
            )
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if bend(middle).mean() > mean else (low, middle)
        figures = {
            "mean": mean,
            "p50": given[0],
            "p95": given[1],
            "max": largest,
        }
        return replace(
            cls._from_values("lognormal", bend(low)),
            given_figures={name: v for name, v in figures.items() if v is not None},
        )

    @classmethod
    def from_public_traces(
        cls, mean: float, side: RequestSide, at_most: float | None = None
    ) -> Self:
        """Build lengths with a known `mean`, spread as in the public traces of the nearest means.

        The figures of `catalogs/lengths.yaml` are interpolated over the logarithm of the mean, from
        a constant single token up. If no length may exceed `at_most`, the spread narrows until the
        longest is that long.
        """
        names, figures = _load_trace_spreads(side)
        center = math.log(_check_min_tokens(mean, "mean length"))
        grid = np.vstack((np.zeros(4), figures, figures[-1] + 20))
        p50, p95, longest = (
            np.interp(center, grid[:, 0], column) - center for column in grid.T[1:]
        )
        room = math.inf if at_most is None else math.log(max(at_most, mean)) - center
        if longest > room:
            p50, p95, longest = (value * room / longest for value in (p50, p95, longest))
        if p95 - p50 < 1e-6:
            return cls.from_constant(mean)
        index = int(np.searchsorted(figures[:, 0], center))
        nearest = [names[k] for k in (index - 1, index) if 0 <= k < len(names)]
        distribution = cls.from_lognormal(
            mean, *(float(mean * math.exp(value)) for value in (p95, p50, longest))
        )
        return replace(distribution, spread_source=" and ".join(nearest))

    @classmethod
    def from_samples(cls, tokens: np.ndarray) -> Self:
        """Build the distribution of a trace's lengths, [n] tokens."""
        return cls._from_values("empirical", np.sort(np.asarray(tokens, dtype=float)))

    @property
    def max_tokens(self) -> float:
        """The largest value of the distribution (of a lognormal: its p99.975)."""
        return float(self.values[-1])

    def compute_quantile(self, q: float) -> float:
        """Return the tokens that a fraction `q` of requests does not exceed."""
        return float(np.quantile(self.values, q, method="hazen"))

    def compute_slice_means(self, edges: np.ndarray) -> np.ndarray:
        """Return the mean length between successive quantiles `edges` (0 to 1).

        Their weighted mean is `mean`.
        """
        if len(self.values) == 1:
            return np.full(len(edges) - 1, self.values[0])
        edges = edges * len(self.values)
        return np.diff(np.interp(edges, *self._cumulative_sums)) / np.diff(edges)

    @cached_property
    def _cumulative_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of values, and the sum of that many smallest ones."""
        return np.arange(len(self.values) + 1.0), np.concatenate(([0.0], np.cumsum(self.values)))

    def sample(self, n: int, rng: np.random.Generator, even: bool = False) -> np.ndarray:
        """Draw [n] lengths in whole tokens.

        With `even`, one comes from each n-th of the distribution, in random order.
        """
        quantiles = (rng.permutation(n) + 0.5) / n if even else rng.random(n)
        num_values = len(self.values)
        # np.quantile(..., method="hazen") without sorting
        lengths = np.interp(quantiles * num_values - 0.5, np.arange(num_values), self.values)
        return np.maximum(1, np.rint(lengths)).astype(np.int64)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.mean:,.0f} tokens"
        # with three figures no lognormal meets all, and p50 and p95 alone say no mean
        shape = (
            "bent to this mean" if {"mean", "p50", "p95"} <= {*self.given_figures} else self.kind
        )
        return (
            f"{self.mean:,.0f} tokens (p50 {self.p50:,.0f}, p95 {self.p95:,.0f}, p99"
            f" {self.p99:,.0f}, {shape})"
        )


def _check_min_tokens(tokens: float, what: str) -> float:
    """Return `tokens`; raise `PlannerError` if it is below 1 or not finite."""
    if not (math.isfinite(tokens) and tokens >= 1):
        raise PlannerError(f"{what} must be at least 1 token, got {tokens:g}")
    return float(tokens)
