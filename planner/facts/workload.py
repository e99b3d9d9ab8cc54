"""Traffic: how long prompts and outputs are, how requests arrive, and traces of both."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import NormalDist
from typing import Literal, Self

import numpy as np
from pydantic import PositiveFloat

from planner.core.catalog import Entry, Sourced, entries
from planner.core.quantities import PlannerError
from planner.facts.traces import Trace

How = Literal["fixed", "uniform", "lognormal", "empirical"]
Side = Literal["prompt", "output"]
_NORMAL = NormalDist()
_Z = np.array([_NORMAL.inv_cdf((i + 0.5) / 2000) for i in range(2000)])
"""2,000 equally likely standard normal values: what a lognormal is integrated over."""
_Z95 = _NORMAL.inv_cdf(0.95)
BOUNDS = {"rate": (1e-9, 1e9), "concurrency": (1, 200_000), "burstiness": (1e-3, math.inf)}
"""Requests/s, requests in flight and burstiness from which on figures, or the machine, would no longer hold."""
DEFAULT_SECONDS = 600.0
"""Arrivals of a run that has neither a number of requests nor a concurrency."""


class SpreadEntry(Entry):
    """Figures of a trace's prompts or outputs, tokens."""

    mean: PositiveFloat
    p50: PositiveFloat
    p95: PositiveFloat
    max: PositiveFloat | None = None

    @property
    def longest(self) -> float:
        """`max`, or the longest that the lognormal through p50 and p95 knows."""
        return self.max or float(self.p50 * (self.p95 / self.p50) ** (_Z[-1] / _Z95))


class TraceEntry(Sourced):
    """A public trace; the head of `catalogs/lengths.yaml` explains every field."""

    prompt: SpreadEntry | None = None
    output: SpreadEntry | None = None


@cache
def _spreads(side: Side) -> tuple[tuple[str, ...], np.ndarray]:
    """The public traces with such lengths, shortest first, and [n, 4] logarithms of their mean, p50, p95 and max."""
    found = {name: getattr(entry, side) for name, entry in entries("lengths.yaml", TraceEntry).items()}
    known = sorted(((name, spread) for name, spread in found.items() if spread), key=lambda pair: pair[1].mean)
    figures = np.log([[spread.mean, spread.p50, spread.p95, spread.longest] for _, spread in known])
    if (np.diff(figures, axis=0) <= 0).any():
        raise PlannerError(f"lengths.yaml: of every {side}, mean, p50, p95 and max must all rise with the mean")
    return tuple(name for name, _ in known), figures


@dataclass(frozen=True)
class Lengths:
    """How many tokens a prompt (or an output) has: a distribution, as its equally likely `values`, ascending."""

    how: How
    mean: float
    p50: float
    p95: float
    p99: float
    values: np.ndarray = field(compare=False, repr=False)  # [n] tokens
    asked: Mapping[str, float] = field(default_factory=dict, compare=False)  # the figures it was made from
    like: str = field(default="", compare=False)  # the public traces whose spread it has, for want of its own

    @classmethod
    def _of(cls, how: How, values: np.ndarray) -> Self:
        p50, p95, p99 = (float(q) for q in np.quantile(values, (0.50, 0.95, 0.99), method="hazen"))
        return cls(how, float(values.mean()), p50, p95, p99, values)

    @classmethod
    def fixed(cls, tokens: float) -> Self:
        """Every request has the same length."""
        return replace(cls._of("fixed", np.array([_at_least_one(tokens, "length")])), asked={"mean": tokens})

    @classmethod
    def uniform(cls, most: float, ratio: float) -> Self:
        """Uniform in [`ratio` x `most`, `most`] tokens, as InferenceX draws its random prompts."""
        if not 0 <= ratio <= 1:
            raise PlannerError(f"length_range_ratio must lie between 0 and 1, got {ratio:g}")
        most = _at_least_one(most, "length")
        return cls._of("uniform", np.linspace(max(1.0, ratio * most), most, 513)) if ratio < 1 else cls.fixed(most)

    @classmethod
    def lognormal(
        cls, mean: float, p95: float | None = None, p50: float | None = None, largest: float | None = None
    ) -> Self:
        """The lognormal that a mean and `p95` (or `p50`) fix, cut at `largest`; with a mean alone, a fixed length.

        Given both, it is bent until all three are met: ln(length / p50) = ln(p95 / p50) t, where t = z / 1.645 of a
        standard normal z is replaced by t^k between p50 and p95 and by k t below p50 (k = 1: the lognormal itself).
        """
        mean, given = _at_least_one(mean, "mean length"), (p50, p95)
        if p95 is not None and p50 is None:
            if not mean <= p95 <= mean * math.exp(_Z95**2 / 2):
                raise PlannerError(
                    f"no lognormal has mean {mean:g} and p95 {p95:g}: p95 must lie between the mean "
                    f"and {math.exp(_Z95**2 / 2):.2f} x the mean; give p50 too for a longer tail"
                )
            p50 = mean * math.exp(-((_Z95 - math.sqrt(_Z95**2 - 2 * math.log(p95 / mean))) ** 2) / 2)
        elif p50 is not None and p95 is None:
            if not 1 <= p50 <= mean:
                raise PlannerError(f"no lognormal has mean {mean:g} and p50 {p50:g}: p50 must not exceed the mean")
            p95 = p50 * math.exp(_Z95 * math.sqrt(2 * math.log(mean / p50)))
        if p50 is None or p95 is None:
            return cls.fixed(mean)
        if not 1 <= p50 <= p95 <= (largest or math.inf):
            raise PlannerError(f"lengths must not fall from 1 over p50 and p95 to max, got {p50:g}, {p95:g}, {largest}")
        median, spread = p50, math.log(p95 / p50)

        def bent(log_k: float) -> np.ndarray:
            k, t = math.exp(log_k), _Z / _Z95
            curve = np.where(t < 0, k * t, np.where(t < 1, np.abs(t) ** k, t))
            return np.clip(median * np.exp(spread * curve), 1, largest)

        low, high = -4.0, 4.0  # the mean falls as k grows
        if not bent(high).mean() * 0.999 <= mean <= bent(low).mean() * 1.001:
            raise PlannerError(
                f"no lengths have p50 {p50:g}, p95 {p95:g} and mean {mean:g}: with these two the mean lies "
                f"between {bent(high).mean():.4g} and {bent(low).mean():.4g}"
            )
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if bent(middle).mean() > mean else (low, middle)
        asked = {"mean": mean, "p50": given[0], "p95": given[1], "max": largest}
        return replace(cls._of("lognormal", bent(low)), asked={name: v for name, v in asked.items() if v is not None})

    @classmethod
    def typical(cls, mean: float, side: Side, at_most: float | None = None) -> Self:
        """Lengths of which only the `mean` is known, spread as in the public traces of the nearest means.

        The figures of `catalogs/lengths.yaml` are interpolated over the logarithm of the mean, from one constant token
        up. Where no length may exceed `at_most`, the spread narrows until the longest is that long.
        """
        names, figures = _spreads(side)
        at = math.log(_at_least_one(mean, "mean length"))
        known = np.vstack((np.zeros(4), figures, figures[-1] + 20))
        p50, p95, longest = (np.interp(at, known[:, 0], column) - at for column in known.T[1:])
        room = math.inf if at_most is None else math.log(max(at_most, mean)) - at
        if longest > room:
            p50, p95, longest = (value * room / longest for value in (p50, p95, longest))
        if p95 - p50 < 1e-6:
            return cls.fixed(mean)
        above = int(np.searchsorted(figures[:, 0], at))
        between = [names[k] for k in (above - 1, above) if 0 <= k < len(names)]
        found = cls.lognormal(mean, *(float(mean * math.exp(value)) for value in (p95, p50, longest)))
        return replace(found, like=" and ".join(between))

    @classmethod
    def empirical(cls, tokens: np.ndarray) -> Self:
        """The lengths of a trace, [n] tokens, as they are."""
        return cls._of("empirical", np.sort(np.asarray(tokens, dtype=float)))

    @property
    def largest(self) -> float:
        """The longest length that this distribution knows (a lognormal's: its p99.975)."""
        return float(self.values[-1])

    def quantile(self, q: float) -> float:
        """Tokens that a share `q` of requests does not exceed."""
        return float(np.quantile(self.values, q, method="hazen"))

    def slices(self, edges: np.ndarray) -> np.ndarray:
        """Mean length of each slice between the shares `edges` (0 to 1), so that their weighted mean is `mean`."""
        if len(self.values) == 1:
            return np.full(len(edges) - 1, self.values[0])
        edges = edges * len(self.values)
        return np.diff(np.interp(edges, *self._sums)) / np.diff(edges)

    @cached_property
    def _sums(self) -> tuple[np.ndarray, np.ndarray]:
        """(how many of the values, shortest first, their sum)."""
        return np.arange(len(self.values) + 1.0), np.concatenate(([0.0], np.cumsum(self.values)))

    def sample(self, n: int, rng: np.random.Generator, even: bool = False) -> np.ndarray:
        """[n] lengths drawn at random, whole tokens; `even`: one from each n-th of them, in random order."""
        shares = (rng.permutation(n) + 0.5) / n if even else rng.random(n)
        known = len(self.values)  # np.quantile(..., method="hazen") of values that need no sorting
        lengths = np.interp(shares * known - 0.5, np.arange(known), self.values)
        return np.maximum(1, np.rint(lengths)).astype(np.int64)

    def __str__(self) -> str:
        if self.how == "fixed":
            return f"{self.mean:,.0f} tokens"
        return f"{self.mean:,.0f} tokens (p50 {self.p50:,.0f}, p95 {self.p95:,.0f}, p99 {self.p99:,.0f}, {self.how})"


def _at_least_one(tokens: float, what: str) -> float:
    if not (math.isfinite(tokens) and tokens >= 1):
        raise PlannerError(f"{what} must be at least 1 token, got {tokens:g}")
    return float(tokens)


def popularity(adapters: int, zipf: float) -> np.ndarray:
    """[adapters] the share of requests that asks for each, the most popular first: the k-th k^-zipf as often."""
    asked = np.arange(1.0, adapters + 1) ** -zipf
    return asked / asked.sum()


@dataclass(frozen=True)
class Workload:
    """Traffic on the whole deployment: open loop (`rate`), closed loop (`concurrency`), or a rate capped by one.

    Of every prompt the first `prefix_tokens` are shared, and a request finds them cached with `prefix_hit_rate`;
    without `prefix_tokens`, `prefix_hit_rate` is the share of all prompt tokens that is found cached.
    """

    prompt: Lengths
    output: Lengths
    rate: float | None = None  # requests/s
    concurrency: int | None = None  # requests in flight
    burstiness: float = 1.0  # gamma shape of the gaps between arrivals; 1 = Poisson
    prefix_tokens: int = 0
    prefix_hit_rate: float = 0.0
    num_prompts: int | None = None  # a measured run's requests; None: see `requests`
    trace: Trace | None = None
    adapters: int = 0  # LoRA adapters in all; each request asks for one of them
    adapter_zipf: float = 0.0  # how unevenly: the k-th is asked for k^-zipf as often as the first

    def __post_init__(self) -> None:
        if self.rate is None and self.concurrency is None:
            raise PlannerError("a workload needs a rate (requests per second) or a concurrency (requests in flight)")
        for name in ("rate", "concurrency", "burstiness", "num_prompts"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise PlannerError(f"{name} must be a positive number, got {value:g}")
            low, high = BOUNDS.get(name, (0.0, math.inf))
            if value is not None and self.trace is None and not low <= value <= high:
                raise PlannerError(f"{name} {value:g} is beyond what is planned: {low:g} to {high:g}")
        if not 0 <= self.prefix_hit_rate <= 1:
            raise PlannerError(f"prefix_hit_rate must lie between 0 and 1, got {self.prefix_hit_rate:g}")
        if self.prefix_tokens < 0:
            raise PlannerError(f"prefix_tokens must not be negative, got {self.prefix_tokens:g}")

    @classmethod
    def from_trace(cls, trace: Trace, rate: float | None = None) -> Self:
        """A trace as traffic: its own lengths, burstiness and reuse, at its own rate or at `rate` requests/s."""
        return cls(
            prompt=Lengths.empirical(trace.prompt),
            output=Lengths.empirical(trace.output),
            rate=trace.rate if rate is None else rate,
            burstiness=trace.burstiness,
            prefix_hit_rate=trace.prefix_hit_rate,
            num_prompts=len(trace.arrival),
            trace=trace,
        )

    @property
    def requests(self) -> int:
        """Requests of a run: a trace's, as many as asked for, 10 per unit of concurrency, or ten minutes' arrivals."""
        if self.trace is not None:
            return len(self.trace.arrival)
        return self.num_prompts or 10 * (self.concurrency or 0) or math.ceil(DEFAULT_SECONDS * (self.rate or 0.0))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was taken for granted of the traffic, in sentences."""
        said = [
            f"Of the {side} lengths only the mean is given: they are planned with the spread of {lengths.like} "
            f"(p50 {lengths.p50:,.0f}, p95 {lengths.p95:,.0f}, at most {lengths.largest:,.0f} tokens); "
            f"{{exactly: {lengths.mean:.10g}}} would make them all alike."
            for side, lengths in (("prompt", self.prompt), ("output", self.output))
            if lengths.like
        ]
        if self.prefix_tokens and (short := float(np.mean(self.prompt.values < self.prefix_tokens))) > 0.01:
            found = f"{self.cached_share:.0%} of all prompt tokens are found in the cache"
            said.append(
                f"{short:.0%} of the prompts are shorter than the {self.prefix_tokens:,} tokens that they share, and "
                f"count as shared whole: {found}."
            )
        if self.trace is not None and self.trace.left_out:
            said.append(f"{self.trace.left_out:,} requests of {self.trace.path.name} without output are left out.")
        if self.trace is not None and self.trace.hours > 1:
            said.append(f"Of the {self.trace.hours} hours of {self.trace.path.name} the busiest is planned.")
        return tuple(said)

    @property
    def reuse_as_traced(self) -> bool:
        """Whether the trace tells which blocks of its prompts are equal, and nothing else was said of their reuse."""
        trace = self.trace
        if trace is None or not trace.hash_ids or self.prompt.how != "empirical" or self.prefix_tokens:
            return False
        return self.prefix_hit_rate == trace.prefix_hit_rate

    @property
    def tokens(self) -> float:
        """Tokens of a request on average, prompt and answer together."""
        return self.prompt.mean + self.output.mean

    @property
    def cached_tokens(self) -> float:
        """Prompt tokens that a request finds in the prefix cache, on average: no more than its prompt has."""
        shared = np.minimum(self.prompt.values, self.prefix_tokens).mean() if self.prefix_tokens else self.prompt.mean
        return self.prefix_hit_rate * float(shared)

    @property
    def cached_share(self) -> float:
        """The share of all prompt tokens that is found in the prefix cache."""
        return self.cached_tokens / self.prompt.mean

    @property
    def context(self) -> float:
        """Tokens that a decoding sequence attends to, on average over its steps: long answers weigh more."""
        output = self.output.values
        return self.prompt.mean + float((output**2).mean() / (2 * output.mean()))

    def total_quantile(self, q: float) -> float:
        """Tokens of prompt and output together that a share `q` of requests does not exceed."""
        if self.trace is not None and self.prompt.how == self.output.how == "empirical":
            return float(np.quantile(self.trace.prompt + self.trace.output, q))
        edges = np.linspace(0, 1, 501)
        return float(np.quantile(np.add.outer(self.prompt.slices(edges), self.output.slices(edges)), q))

    def at(self, rate: float) -> Self:
        """The same traffic at another arrival rate, requests/s."""
        return replace(self, rate=rate, concurrency=None)

    def times(self, factor: float) -> Self:
        """So many times the traffic, in requests/s and in requests at once; each at least one."""
        many = {
            name: math.ceil(value * factor - 1e-9)
            for name in ("concurrency", "num_prompts")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, rate=self.rate and self.rate * factor, **many)

    def share(self, replicas: int) -> Self:
        """What one of `replicas` equal copies sees."""
        return self if replicas == 1 else self.times(1 / replicas)

    def __str__(self) -> str:
        load = [] if self.rate is None else [f"{self.rate:.3g} requests/s"]
        load += [] if self.concurrency is None else [f"{self.concurrency:,} in flight"]
        return f"{', '.join(load)}; prompt {self.prompt}; output {self.output}"
