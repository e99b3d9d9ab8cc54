"""What a replay tells: every request's times, their means and percentiles, and what the engine held meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.core.errors import PlannerError
from planner.latency.performance import LATENCY_METRICS, LATENCY_QUANTILES, LATENCY_STATISTICS
from planner.simulator import kernel_types as kinds
from planner.simulator.kernel_types import SimulationOutcome

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class SimulationResult:
    """What one engine did. Arrays are [n] requests in order of arrival, in seconds; `outcome` has the raw figures."""

    outcome: SimulationOutcome
    prompt: np.ndarray
    output: np.ndarray
    num_blocks: int
    clock_scale: float = 1.0  # seconds of one unit of the clock
    gaps: float = 1.0  # share of the gaps in `outcome.itl` that are these requests' own

    @classmethod
    def concatenate(cls, runs: Sequence[SimulationResult]) -> SimulationResult:
        """Several runs of one engine as if each began when the one before had ended; gauges are left out."""
        if len(runs) == 1:
            return runs[0]
        ends = np.cumsum([0.0, *(run.duration / run.clock_scale for run in runs)])
        times = ("sent", "scheduled", "first_token", "last_token")
        moved: dict[str, Any] = {
            name: np.concatenate([getattr(run.outcome, name) - run.outcome.sent.min() + end
                                  for run, end in zip(runs, ends[:-1], strict=True)])
            for name in times
        }  # fmt: skip
        for name in ("preemptions", "cached"):
            moved[name] = np.concatenate([getattr(run.outcome, name) for run in runs])
        for name in ("itl", "usage", "totals"):
            moved[name] = np.sum([getattr(run.outcome, name) for run in runs], axis=0)
        outcome = runs[0].outcome._replace(**moved, notes=np.empty((0, 6)))
        prompt, output = (
            np.concatenate([getattr(run, name) for run in runs]) for name in ("prompt", "output")
        )
        gaps = sum(run.gaps * run.outcome.itl.sum() for run in runs) / max(outcome.itl.sum(), 1)
        return cls(outcome, prompt, output, runs[0].num_blocks, runs[0].clock_scale, gaps)

    def trim(self, first: int, last: int) -> SimulationResult:
        """The same without the figures of its `first` and `last` requests; gaps and gauges keep theirs."""
        if not first + last:
            return self
        own = slice(first, len(self.output) - last)
        names = ("sent", "scheduled", "first_token", "last_token", "preemptions", "cached")
        outcome = self.outcome._replace(
            **{name: getattr(self.outcome, name)[own] for name in names}
        )
        gaps = self.gaps * float((self.output[own] - 1).sum() / max((self.output - 1).sum(), 1))
        return replace(
            self, outcome=outcome, prompt=self.prompt[own], output=self.output[own], gaps=gaps
        )

    @property
    def sent(self) -> np.ndarray:
        """When each request was sent."""
        return self.outcome.sent * self.clock_scale

    @cached_property
    def queue(self) -> np.ndarray:
        """From being sent to being scheduled first."""
        return (self.outcome.scheduled - self.outcome.sent) * self.clock_scale

    @cached_property
    def ttft(self) -> np.ndarray:
        """Time to first token, from being sent."""
        return (self.outcome.first_token - self.outcome.sent) * self.clock_scale

    @cached_property
    def e2e(self) -> np.ndarray:
        """From being sent to the last token."""
        return (self.outcome.last_token - self.outcome.sent) * self.clock_scale

    @cached_property
    def tpot(self) -> np.ndarray:
        """Time per output token after the first; requests with one token are left out, as vLLM's benchmark does."""
        later = self.outcome.last_token - self.outcome.first_token
        many = self.output > 1
        return later[many] / (self.output[many] - 1) * self.clock_scale

    @property
    def preemptions(self) -> np.ndarray:
        """How often each request was preempted."""
        return self.outcome.preemptions

    @property
    def duration(self) -> float:
        """From the first request sent to the last token."""
        return float((self.outcome.last_token.max() - self.outcome.sent.min()) * self.clock_scale)

    @property
    def output_tps(self) -> float:
        """Output tokens per second over the whole run."""
        return float(self.output.sum(dtype=np.int64)) / self.duration

    @property
    def request_tps(self) -> float:
        """Requests per second over the whole run."""
        return len(self.output) / self.duration

    @property
    def decode_batch(self) -> float:
        """Sequences decoding at once, mean over the time that steps run."""
        return float(self.outcome.totals[4] / max(self.outcome.totals[1], 1e-300))

    @property
    def max_running(self) -> int:
        """Requests that are in the engine's batch at once, at most."""
        begun = np.sort(self.outcome.scheduled)
        ended = np.searchsorted(np.sort(self.outcome.last_token), begun, side="right")
        return int((np.arange(1, len(begun) + 1) - ended).max())

    @property
    def kv_usage_mean(self) -> float:
        """Share of the KV blocks in use, mean over the time that steps run."""
        busy = self.outcome.usage
        return float(
            busy
            @ np.arange(kinds.NUM_KV_USAGE_BINS)
            / max(busy.sum(), 1e-300)
            / (kinds.NUM_KV_USAGE_BINS - 1)
        )

    def compute_kv_usage_quantile(self, q: float) -> float:
        """Share of the KV blocks in use that is not exceeded for a share `q` of the time that steps run."""
        return min(_find_quantile_bin(self.outcome.usage, q) / (kinds.NUM_KV_USAGE_BINS - 1), 1.0)

    @property
    def gauges(self) -> pd.DataFrame:
        """Samples of the engine's gauges, if asked for: seconds, running, waiting, kv_usage, scheduled_tokens."""
        import pandas as pd

        columns = ["seconds", "running", "waiting", "kv_usage", "scheduled_tokens"]
        frame = pd.DataFrame(self.outcome.get_notes(kinds.NOTE_GAUGE, 5), columns=columns)
        return frame.assign(
            seconds=frame.seconds * self.clock_scale,
            kv_usage=frame.kv_usage / (self.num_blocks - 1),
        )

    def compute_quantile(self, metric: str, q: float) -> float:
        """Seconds that a share `q` of the values of "ttft", "tpot", "itl", "e2e" or "queue" does not exceed."""
        if metric != "itl":
            values = getattr(self, metric)
            return float(np.quantile(values, q)) if len(values) else math.nan
        least = min(
            1 / max(self.outcome.itl.sum(), 1), 0.5
        )  # one gap: the shortest is no empty bin
        return (
            self.clock_scale
            * kinds.ITL_FIRST_BIN_S
            * 10
            ** (_find_quantile_bin(self.outcome.itl, max(q, least)) / kinds.ITL_BINS_PER_DECADE)
        )

    def summarize(self, metric: str) -> dict[str, float]:
        """mean, p50, p95 and p99 in seconds of "ttft", "tpot", "itl", "e2e" or "queue".

        ITL is the gap between streamed outputs, as vLLM's benchmark and metrics count it: a
        speculative step streams its tokens as one output, so ITL is TPOT times the tokens per step.
        """
        if metric not in self._summaries:
            raise PlannerError(f"metric {metric!r} is not one of {', '.join(self._summaries)}")
        return self._summaries[metric]

    @cached_property
    def _summaries(self) -> dict[str, dict[str, float]]:
        found = {}
        for metric in (*LATENCY_METRICS, "queue"):
            values = np.full(4, math.nan)
            if metric == "itl" and self.outcome.itl.any():
                gaps = (self.outcome.last_token - self.outcome.first_token).sum() * self.clock_scale
                values[0] = gaps / (self.gaps * self.outcome.itl.sum())
                values[1:] = [self.compute_quantile("itl", q) for q in LATENCY_QUANTILES]
            elif metric != "itl" and len(times := getattr(self, metric)):
                values[0], values[1:] = times.mean(), np.quantile(times, LATENCY_QUANTILES)
            found[metric] = dict(zip(LATENCY_STATISTICS, values.tolist(), strict=True))
        return found

    def to_frame(self) -> pd.DataFrame:
        """One row per request."""
        import pandas as pd

        tpot = np.full(len(self.output), np.nan)
        tpot[self.output > 1] = self.tpot
        return pd.DataFrame(
            {
                "sent_s": self.sent, "prompt_tokens": self.prompt, "output_tokens": self.output,
                "queue_ms": self.queue * 1e3, "ttft_ms": self.ttft * 1e3, "tpot_ms": tpot * 1e3,
                "e2e_ms": self.e2e * 1e3, "cached_tokens": self.outcome.cached,
                "preemptions": self.preemptions,
            }
        )  # fmt: skip

    def __repr__(self) -> str:
        lines = [
            (
                f"{len(self.output):,} requests in {self.duration:,.1f} s: {self.request_tps:,.2f}"
                f" requests/s, {self.output_tps:,.0f} output tokens/s; {self.decode_batch:.1f}"
                f" decoding at once, KV usage p99 {self.compute_kv_usage_quantile(0.99):.0%},"
                f" {int(self.preemptions.sum())} preemptions"
            ),
            "        "
            + "".join(f"{name:>12}" for name in ("mean ms", "p50 ms", "p95 ms", "p99 ms")),
        ]
        for metric in ("ttft", "tpot", "itl", "e2e", "queue"):
            lines.append(
                f"{metric:8}"
                + "".join(f"{value * 1e3:12,.2f}" for value in self.summarize(metric).values())
            )
        return "\n".join(lines)


def _find_quantile_bin(counts: np.ndarray, q: float) -> float:
    """Position, in bins, below which a share `q` of the counts lies."""
    total = np.cumsum(counts)
    if not total[-1]:
        return math.nan
    place = int(np.searchsorted(total, q * total[-1]))
    below = total[place - 1] if place else 0.0
    return place + float((q * total[-1] - below) / counts[place])
