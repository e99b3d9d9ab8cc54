"""Workloads: the lengths of prompts and outputs, and how requests arrive."""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.workload.length_distribution import LengthDistribution
from planner.workload.traces import Trace

MAX_ADAPTERS = 10_000
"""LoRA adapters of one server, in scenarios, rows and logs alike."""
WORKLOAD_BOUNDS = {"rate": (1e-9, 1e9), "concurrency": (1, 200_000), "burstiness": (1e-3, math.inf)}
"""Smallest and largest requests/s, requests in flight and burstiness for which the models hold."""
DEFAULT_RUN_S = 600.0
"""Duration of the arrivals of a run with neither a number of requests nor a concurrency."""


def compute_zipf_fractions(count: int, zipf: float) -> np.ndarray:
    """Return the k-th item's fraction of the requests, [count], proportional to k^-zipf."""
    weights = np.arange(1.0, count + 1) ** -zipf
    return weights / weights.sum()


@dataclass(frozen=True)
class Workload:
    """Traffic of a deployment: open loop (`rate`), closed loop (`concurrency`), or a capped rate.

    The first `prefix_tokens` of every prompt are shared, and a request finds them cached with
    probability `prefix_hit_rate`. Without `prefix_tokens`, `prefix_hit_rate` is the fraction of all
    prompt tokens found cached.
    """

    prompt: LengthDistribution
    output: LengthDistribution
    rate: float | None = None  # requests/s
    concurrency: int | None = None  # requests in flight
    burstiness: float = 1.0  # gamma shape of the gaps between arrivals; 1 = Poisson
    prefix_tokens: int = 0
    prefix_hit_rate: float = 0.0
    num_prompts: int | None = None  # requests of a measured run; None: see `num_requests`
    trace: Trace | None = None
    adapters: int = 0  # LoRA adapters; each request uses one of them
    adapter_zipf: float = 0.0  # skew: the k-th is used k^-zipf as often as the first

    def __post_init__(self) -> None:
        if self.rate is None and self.concurrency is None:
            raise PlannerError(
                "a workload needs a rate (requests per second) or a concurrency (requests in"
                " flight)"
            )
        for name in ("rate", "concurrency", "burstiness", "num_prompts"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise PlannerError(f"{name} must be a positive number, got {value:g}")
            low, high = WORKLOAD_BOUNDS.get(name, (0.0, math.inf))
            if value is not None and self.trace is None and not low <= value <= high:
                raise PlannerError(
                    f"{name} {value:g} is beyond what is planned: {low:g} to {high:g}"
                )
        for is_wrong, problem in (
            (
                not 0 <= self.adapters <= MAX_ADAPTERS,
                f"adapters must be 0 to {MAX_ADAPTERS:,}, got {self.adapters:,}",
            ),
            (
                not 0 <= self.prefix_hit_rate <= 1,
                f"prefix_hit_rate must lie between 0 and 1, got {self.prefix_hit_rate:g}",
            ),
            (
                self.prefix_tokens < 0,
                f"prefix_tokens must not be negative, got {self.prefix_tokens:g}",
            ),
        ):
            if is_wrong:
                raise PlannerError(problem)

    @classmethod
    def from_trace(cls, trace: Trace, rate: float | None = None) -> Self:
        """Return a trace as a workload, with its prefix reuse, at its own rate or `rate`."""
        return cls(
            prompt=LengthDistribution.from_samples(trace.prompt[trace.num_uncounted :]),
            output=LengthDistribution.from_samples(trace.output[trace.num_uncounted :]),
            rate=trace.rate if rate is None else rate,
            burstiness=trace.burstiness,
            prefix_hit_rate=trace.prefix_hit_rate,
            num_prompts=len(trace.arrival) - trace.num_uncounted,
            trace=trace,
        )

    @property
    def num_requests(self) -> int:
        """Requests of a run.

        A trace's own, `num_prompts`, 10 per unit of concurrency, or ten minutes of arrivals.
        """
        if self.trace is not None:
            return len(self.trace.arrival) - self.trace.num_uncounted
        return (
            self.num_prompts
            or 10 * (self.concurrency or 0)
            or math.ceil(DEFAULT_RUN_S * (self.rate or 0.0))
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions about the traffic, in sentences."""
        sentences = [
            f"Of the {side} lengths only the mean is given: they are planned with the spread of"
            f" {lengths.spread_source} (p50 {lengths.p50:,.0f}, p95 {lengths.p95:,.0f}, at most"
            f" {lengths.max_tokens:,.0f} tokens); {{exactly: {lengths.mean:.10g}}} would make them"
            " all alike."
            for side, lengths in (("prompt", self.prompt), ("output", self.output))
            if lengths.spread_source
        ]
        if (
            self.prefix_tokens
            and (share := float(np.mean(self.prompt.values < self.prefix_tokens))) > 0.01
        ):
            text = f"{self.cache_hit_fraction:.0%} of all prompt tokens are found in the cache"
            sentences.append(
                f"{share:.0%} of the prompts are shorter than the {self.prefix_tokens:,} tokens"
                f" that they share, and count as shared whole: {text}."
            )
        return (*sentences, *(self.trace.assumptions if self.trace else ()))

    @property
    def uses_trace_prefixes(self) -> bool:
        """Whether the trace says which prompt blocks are equal, and the scenario sets no reuse."""
        trace = self.trace
        if (
            trace is None
            or not trace.has_block_ids
            or self.prompt.kind != "empirical"
            or self.prefix_tokens
        ):
            return False
        return self.prefix_hit_rate == trace.prefix_hit_rate

    @property
    def mean_tokens_per_request(self) -> float:
        """Mean tokens of a request, prompt and output."""
        return self.prompt.mean + self.output.mean

    @property
    def mean_cached_tokens(self) -> float:
        """Mean prompt tokens of a request found in the prefix cache, at most its prompt."""
        shared = (
            np.minimum(self.prompt.values, self.prefix_tokens).mean()
            if self.prefix_tokens
            else self.prompt.mean
        )
        return self.prefix_hit_rate * float(shared)

    @property
    def cache_hit_fraction(self) -> float:
        """Fraction of all prompt tokens found in the prefix cache."""
        return self.mean_cached_tokens / self.prompt.mean

    @property
    def mean_decode_context(self) -> float:
        """Mean tokens that a decoding sequence attends to; long outputs have more steps."""
        output = self.output.values
        return self.prompt.mean + float((output**2).mean() / (2 * output.mean()))

    def compute_total_tokens_quantile(self, q: float) -> float:
        """Return the tokens of prompt and output that a fraction `q` of requests stays within."""
        if self.trace is not None and self.prompt.kind == self.output.kind == "empirical":
            return float(np.quantile(self.trace.prompt + self.trace.output, q))
        edges = np.linspace(0, 1, 501)
        means = [side.compute_slice_means(edges) for side in (self.prompt, self.output)]
        return float(np.quantile(np.add.outer(*means), q))

    def with_rate(self, rate: float) -> Self:
        """Return the workload at another arrival rate, requests/s."""
        return replace(self, rate=rate, concurrency=None)

    def scale(self, factor: float) -> Self:
        """Return `factor` times the requests/s and the requests in flight, at least one."""
        counts = {
            name: math.ceil(value * factor - 1e-9)
            for name in ("concurrency", "num_prompts")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, rate=self.rate and self.rate * factor, **counts)

    def split(self, replicas: int) -> Self:
        """Return the share of one of `replicas` equal replicas."""
        return self if replicas == 1 else self.scale(1 / replicas)

    def __str__(self) -> str:
        load = [] if self.rate is None else [f"{format_number(self.rate)} requests/s"]
        load += [] if self.concurrency is None else [f"{self.concurrency:,} in flight"]
        return f"{', '.join(load)}; prompt {self.prompt}; output {self.output}"
