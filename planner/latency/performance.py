"""What a deployment does: latencies and rates as intervals, of one case and of many."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from planner.core.intervals import Interval

LATENCY_METRICS = ("ttft", "tpot", "itl", "e2e")
"""What is told of a request's time."""
QUEUE_SENSITIVE_METRICS = ("ttft", "e2e", "queue")
"""Those that hold the wait in the queue, and the wait itself."""
UNBOUNDED = Interval.from_value(math.inf)
LATENCY_STATISTICS = ("mean", "p50", "p95", "p99")
"""Where a latency's distribution is told."""
LATENCY_QUANTILES = (0.50, 0.95, 0.99)
"""Shares of values that the last three of them do not exceed."""
STATISTIC_SIGMA_FACTORS = np.array([1.0, 1.0, 1.25, 1.5])
"""By `POINTS`, in standard deviations of the mean's: tails are less certain."""
Z_SCORE_99 = 2.3263
"""Standard normal quantile at 0.99: requests in flight spread about like a Poisson count."""
FP8_KV_NOTE = (
    "latency counts on an FP8 KV cache, as the measured recipes of this GPU had; set kv_cache_dtype"
    " to plan another"
)


def apply_unbounded_queue(
    value: Interval, metric: str, arriving: float, capacity: Interval | None
) -> Interval:
    """A replayed wait, infinite where more arrives than is served, or may be: it grows for as long as that lasts.

    The replay's own figure says only how long was looked at.
    """
    if metric not in QUEUE_SENSITIVE_METRICS or capacity is None or arriving <= capacity.lo:
        return value
    return UNBOUNDED if arriving > capacity.mid else replace(value, hi=math.inf)


@dataclass(frozen=True)
class Performance:
    """Latencies in seconds and rates per second of a whole deployment, as 80% intervals."""

    ttft: Mapping[str, Interval]  # by `POINTS`
    tpot: Mapping[str, Interval]
    itl: Mapping[str, Interval]  # between streamed outputs: with speculation several tokens each
    e2e: Mapping[str, Interval]
    output_tps: Interval
    total_tps: Interval
    request_tps: Interval
    decode_batch: float  # sequences decoding in one engine, mean
    kv_usage: float  # of the pool, mean
    queue: float  # seconds that a request waits before it is scheduled, p99
    preemptions: float  # per request
    saturated: bool  # the offered rate is more than it can serve
    bottleneck: str  # what caps it: "compute", "kv", "max_num_seqs" or "load"
    basis: str
    warnings: tuple[str, ...] = ()
    kv_usage_p99: float = 0.0
    capacity: Interval | None = (
        None  # requests/s that it serves at most; of users who wait, what they are served at
    )
    num_simulated_requests: int = 0  # that were replayed for these figures; 0: the closed form's
    max_running: int = 0  # of those, in one engine at once
    arrival_rps: float = (
        0.0  # requests/s that come for as long as it runs; 0 where the run has an end
    )

    def get(self, metric: str, point: str) -> Interval:
        """Seconds of one of `LATENCIES` at one of `POINTS`."""
        interval: Interval = getattr(self, metric)[point]
        return interval

    def get_for_display(self, metric: str, point: str) -> Interval:
        """`at`, for people: see `unending`."""
        return apply_unbounded_queue(
            self.get(metric, point), metric, self.arrival_rps, self.capacity
        )

    @property
    def queue_growth(self) -> str:
        """Whether TTFT and E2E grow for as long as it runs: "no", "may" (if it is as slow as may be) or "yes"."""
        interval = apply_unbounded_queue(
            Interval.from_value(0.0), "ttft", self.arrival_rps, self.capacity
        )
        return "yes" if interval.mid else "may" if interval.hi else "no"

    @property
    def source_label(self) -> str:
        """Where the figures come from, as a table's cell."""
        return "replayed" if self.num_simulated_requests else "closed form"

    @property
    def source_description(self) -> str:
        """Where the figures come from, in a few words."""
        return (
            f"replayed, {self.num_simulated_requests:,} requests an engine"
            if self.num_simulated_requests
            else "in closed form"
        )

    def __str__(self) -> str:
        def ms(values: Mapping[str, Interval]) -> str:
            return f"mean {values['mean'] * 1e3:.1f} ms, p99 {values['p99'] * 1e3:.1f} ms"

        shown = {name: getattr(self, name) for name in ("ttft", "itl", "tpot")}
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
    """The performance of many cases, as arrays; `[k]` is that of one."""

    ttft: np.ndarray  # [cases, points] s, middles by `POINTS`
    tpot: np.ndarray
    itl: np.ndarray
    e2e: np.ndarray
    sigmas: np.ndarray  # [cases, 4 latencies, points] standard deviations of the logarithms
    request_tps: np.ndarray  # [cases] as all others
    capacity: np.ndarray
    capacity_sigma: np.ndarray
    request_sigma: np.ndarray
    output_tokens: np.ndarray  # of a request, mean
    prompt_tokens: np.ndarray
    decode_batch: np.ndarray
    kv_usage: np.ndarray
    queue: np.ndarray
    saturated: np.ndarray
    limit: np.ndarray
    basis: np.ndarray
    fp8_kv: np.ndarray  # counts on an FP8 KV cache that nobody asked for

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """All cases of `parts`, in order."""
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
        times: dict[str, Any] = {
            name: dict(
                zip(
                    LATENCY_STATISTICS,
                    map(Interval.from_lognormal, getattr(self, name)[k].tolist(), sigma),
                    strict=True,
                )
            )
            for name, sigma in zip(
                ("ttft", "tpot", "itl", "e2e"), self.sigmas[k].tolist(), strict=True
            )
        }
        interval = Interval.from_lognormal(float(self.request_tps[k]), float(self.request_sigma[k]))
        outputs = float(self.output_tokens[k])
        return Performance(
            **times,
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
