"""Performance of a deployment: latencies and rates as intervals, of one case and of many."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

import numpy as np

from planner.core.intervals import Interval


@dataclass(frozen=True)
class LatencyMetric:
    """What everything that lists, limits or measures a latency knows of it; all are in seconds."""

    label: str
    waits: bool  # whether the queue moves it; else steps alone do, the pace of a request
    error: Literal["prompt", "step", "mixed"]  # whose measured error it has
    per_request: bool  # a value for each request, not for each of its gaps
    min_plausible_s: float  # a shorter limit is out of reach of any GPU
    benchmark: str  # its name in `vllm bench serve`


LATENCY_METRICS: Mapping[str, LatencyMetric] = {
    "ttft": LatencyMetric("First token", True, "prompt", True, 5e-3, "ttft"),
    "tpot": LatencyMetric("Time per token", False, "step", True, 0.5e-3, "tpot"),
    "itl": LatencyMetric("Gap between tokens", False, "step", False, 0.5e-3, "itl"),
    "e2e": LatencyMetric("Whole answer", True, "mixed", True, 5e-3, "e2el"),
}
"""Latencies of a request, by the name in scenarios, plan.json and engines' histograms."""
UNBOUNDED = Interval.from_value(math.inf)
LATENCY_STATISTICS = ("mean", "p50", "p95", "p99")
"""Statistics of a latency's distribution."""
LATENCY_QUANTILES = (0.50, 0.95, 0.99)
"""Quantiles of the last three of these statistics."""
STATISTIC_SIGMA_FACTORS = np.array([1.0, 1.0, 1.25, 1.5])
"""Error of each statistic relative to that of the mean: tails are less certain."""
Z_SCORE_99 = 2.3263
"""Standard normal quantile at 0.99; requests in flight vary about like a Poisson count."""
FP8_KV_NOTE = (
    "latency counts on an FP8 KV cache, as the measured recipes of this GPU had; set kv_cache_dtype"
    " to plan another"
)


def apply_unbounded_queue(
    value: Interval, metric: str, arriving: float, capacity: Interval | None
) -> Interval:
    """Return a simulated latency, infinite under overload; its upper end if overload is possible.

    Such a wait grows as long as the overload lasts; the simulated figure only reflects the length
    of the simulation.
    """
    waits = metric == "queue" or LATENCY_METRICS[metric].waits
    if not waits or capacity is None or arriving <= capacity.lo:
        return value
    return UNBOUNDED if arriving > capacity.mid else replace(value, hi=math.inf)


@dataclass(frozen=True)
class Performance:
    """Latencies in seconds and rates per second of a whole deployment, as 80% intervals."""

    # by `LATENCY_METRICS`, then `LATENCY_STATISTICS`; gaps are between streamed outputs, which have
    # several tokens with speculation
    latencies: Mapping[str, Mapping[str, Interval]]
    output_tps: Interval
    total_tps: Interval
    request_tps: Interval
    decode_batch: float  # mean sequences decoding in one engine
    kv_usage: float  # mean fraction of the KV cache pool
    queue: float  # seconds until a request is scheduled, p99
    preemptions: float  # per request
    saturated: bool  # the offered load exceeds capacity
    bottleneck: str  # what limits it: "compute", "kv", "max_num_seqs" or "load"
    basis: str
    warnings: tuple[str, ...] = ()
    kv_usage_p99: float = 0.0
    # highest sustainable requests/s; of a closed loop the requests/s served
    capacity: Interval | None = None
    num_simulated_requests: int = 0  # 0: an analytical estimate
    max_running: int = 0  # largest number of them in one engine at once
    arrival_rps: float = 0.0  # requests/s that arrive without end; 0 for a finite run

    def get(self, metric: str, point: str) -> Interval:
        """Return the seconds of a latency metric at one of its statistics."""
        return self.latencies[metric][point]

    def get_for_display(self, metric: str, point: str) -> Interval:
        """Return `get` for display: infinite if the queue is unbounded."""
        return apply_unbounded_queue(
            self.get(metric, point), metric, self.arrival_rps, self.capacity
        )

    @property
    def queue_growth(self) -> str:
        """Whether TTFT and E2E grow without bound: "no", "may" (pessimistic end) or "yes"."""
        interval = apply_unbounded_queue(
            Interval.from_value(0.0), "ttft", self.arrival_rps, self.capacity
        )
        return "yes" if interval.mid else "may" if interval.hi else "no"

    @property
    def source_label(self) -> str:
        """Source of the figures, as a table cell."""
        return "simulated" if self.num_simulated_requests else "estimate"

    @property
    def source_description(self) -> str:
        """Source of the figures, in a few words."""
        return (
            f"simulated, {self.num_simulated_requests:,} requests an engine"
            if self.num_simulated_requests
            else "estimated analytically"
        )

    def __str__(self) -> str:
        def ms(values: Mapping[str, Interval]) -> str:
            return f"mean {values['mean'] * 1e3:.1f} ms, p99 {values['p99'] * 1e3:.1f} ms"

        shown = {name: self.latencies[name] for name in ("ttft", "itl", "tpot")}
        text = "; ".join(
            f"{name.upper()} {ms(times)}"
            for name, times in shown.items()
            if not math.isnan(times["mean"].mid)
        )
        return (
            f"{text}; {self.output_tps:.0f} output tokens/s ({self.basis}; limit:"
            f" {self.bottleneck})"
        )


@dataclass(frozen=True)
class PerformanceBatch:
    """Performance of many cases as arrays; `[k]` is that of one case."""

    latencies: np.ndarray  # [cases, metrics, statistics] s, expected values
    sigmas: np.ndarray  # [cases, metrics, statistics] standard deviations of ln
    request_tps: np.ndarray  # [cases], like all below
    capacity: np.ndarray
    capacity_sigma: np.ndarray
    request_sigma: np.ndarray
    output_tokens: np.ndarray  # mean per request
    prompt_tokens: np.ndarray
    decode_batch: np.ndarray
    kv_usage: np.ndarray
    queue: np.ndarray
    saturated: np.ndarray
    limit: np.ndarray
    basis: np.ndarray
    fp8_kv: np.ndarray  # assumes an FP8 KV cache that was not requested

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Concatenate all cases of `parts`, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            *(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls))
        )

    def __len__(self) -> int:
        return len(self.request_tps)

    def __iter__(self) -> Iterator[Performance]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, k: int) -> Performance:
        latencies = {
            name: dict(
                zip(LATENCY_STATISTICS, map(Interval.from_lognormal, means, sigmas), strict=True)
            )
            for name, means, sigmas in zip(
                LATENCY_METRICS, self.latencies[k].tolist(), self.sigmas[k].tolist(), strict=True
            )
        }
        interval = Interval.from_lognormal(float(self.request_tps[k]), float(self.request_sigma[k]))
        outputs = float(self.output_tokens[k])
        return Performance(
            latencies,
            output_tps=interval * outputs,
            total_tps=interval * (outputs + float(self.prompt_tokens[k])),
            request_tps=interval,
            decode_batch=float(self.decode_batch[k]),
            kv_usage=float(self.kv_usage[k]),
            kv_usage_p99=min(
                float(
                    self.kv_usage[k] * (1 + Z_SCORE_99 / math.sqrt(max(self.decode_batch[k], 1.0)))
                ),
                1.0,
            ),
            queue=float(self.queue[k]),
            preemptions=0.0,
            saturated=bool(self.saturated[k]),
            bottleneck=str(self.limit[k]),
            basis=str(self.basis[k]),
            warnings=(FP8_KV_NOTE,) if self.fp8_kv[k] else (),
            capacity=Interval.from_lognormal(
                float(self.capacity[k]), float(self.capacity_sigma[k])
            ),
        )
