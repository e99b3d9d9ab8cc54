"""Results of a simulation: the times of every request, their statistics, and the engine's state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.core.errors import PlannerError
from planner.core.text import format_count
from planner.latency.performance import LATENCY_METRICS, LATENCY_QUANTILES, LATENCY_STATISTICS
from planner.simulator import kernel_types as kinds
from planner.simulator.kernel_types import SimulationOutcome

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class SimulationResult:
    """What one engine did, by request [n] in order of arrival, in seconds; see `outcome`."""

    outcome: SimulationOutcome
    prompt: np.ndarray
    output: np.ndarray
    num_blocks: int
    clock_scale: float = 1.0  # seconds of one unit of the clock
    engines: int = 1  # ranks on one clock, each of which has its share of the requests
    gaps: float = 1.0  # fraction of the gaps in `outcome.itl` that belong to these requests

    @classmethod
    def concatenate(cls, runs: Sequence[SimulationResult]) -> SimulationResult:
        """Concatenate runs of one engine, each starting when the one before ends.

        Samples of the gauges are left out.
        """
        if len(runs) == 1:
            return runs[0]
        ends = np.cumsum([0.0, *(run.duration / run.clock_scale for run in runs)])
        times = ("sent", "scheduled", "first_token", "last_token")
        merged: dict[str, Any] = {
            name: np.concatenate([getattr(run.outcome, name) - run.outcome.sent.min() + end
                                  for run, end in zip(runs, ends[:-1], strict=True)])
            for name in times
        }  # fmt: skip
        for name in ("preemptions", "cached"):
            merged[name] = np.concatenate([getattr(run.outcome, name) for run in runs])
        for name in ("itl", "usage", "totals"):
            merged[name] = np.sum([getattr(run.outcome, name) for run in runs], axis=0)
        outcome = runs[0].outcome._replace(**merged, notes=np.empty((0, 6)))
        prompt, output = (
            np.concatenate([getattr(run, name) for run in runs]) for name in ("prompt", "output")
        )
        gaps = sum(run.gaps * run.outcome.itl.sum() for run in runs) / max(outcome.itl.sum(), 1)
        first = runs[0]
        return cls(
            outcome, prompt, output, first.num_blocks, first.clock_scale, first.engines, gaps
        )

    def trim(self, first: int, last: int) -> SimulationResult:
        """Leave out an engine's first and last requests; gaps and gauges keep theirs."""
        first, last = first * self.engines, last * self.engines
        if not first + last:
            return self
        counted = slice(first, len(self.output) - last)
        names = ("sent", "scheduled", "first_token", "last_token", "preemptions", "cached")
        outcome = self.outcome._replace(
            **{name: getattr(self.outcome, name)[counted] for name in names}
        )
        gaps = self.gaps * float((self.output[counted] - 1).sum() / max((self.output - 1).sum(), 1))
        return replace(
            self,
            outcome=outcome,
            prompt=self.prompt[counted],
            output=self.output[counted],
            gaps=gaps,
        )

    @property
    def sent(self) -> np.ndarray:
        """Time at which each request was sent."""
        return self.outcome.sent * self.clock_scale

    @cached_property
    def queue(self) -> np.ndarray:
        """Time from sending to the first scheduling."""
        return (self.outcome.scheduled - self.outcome.sent) * self.clock_scale

    @cached_property
    def ttft(self) -> np.ndarray:
        """Time to first token, from sending."""
        return (self.outcome.first_token - self.outcome.sent) * self.clock_scale

    @cached_property
    def e2e(self) -> np.ndarray:
        """Time from sending to the last token."""
        return (self.outcome.last_token - self.outcome.sent) * self.clock_scale

    @cached_property
    def tpot(self) -> np.ndarray:
        """Time per output token after the first.

        Requests with one token are left out, as in vLLM's benchmark.
        """
        decode_s = self.outcome.last_token - self.outcome.first_token
        streams = self.output > 1
        return decode_s[streams] / (self.output[streams] - 1) * self.clock_scale

    @property
    def preemptions(self) -> np.ndarray:
        """Preemptions of each request."""
        return self.outcome.preemptions

    @property
    def duration(self) -> float:
        """Time from the first request sent to the last token."""
        return float((self.outcome.last_token.max() - self.outcome.sent.min()) * self.clock_scale)

    @property
    def output_tps(self) -> float:
        """Output tokens per second of an engine over the whole run."""
        return float(self.output.sum(dtype=np.int64)) / self.duration / self.engines

    @property
    def request_tps(self) -> float:
        """Requests per second of an engine over the whole run."""
        return len(self.output) / self.duration / self.engines

    @property
    def decode_batch(self) -> float:
        """Mean number of sequences decoding at once, over the time in which steps run."""
        return float(self.outcome.totals[4] / max(self.outcome.totals[1], 1e-300))

    @property
    def max_running(self) -> int:
        """Largest number of requests in an engine's batch at once."""
        begun = np.sort(self.outcome.scheduled)
        ended = np.searchsorted(np.sort(self.outcome.last_token), begun, side="right")
        return math.ceil((np.arange(1, len(begun) + 1) - ended).max() / self.engines)

    @property
    def kv_usage_mean(self) -> float:
        """Mean fraction of KV blocks in use, over the time in which steps run."""
        busy = self.outcome.usage
        return float(
            busy
            @ np.arange(kinds.NUM_KV_USAGE_BINS)
            / max(busy.sum(), 1e-300)
            / (kinds.NUM_KV_USAGE_BINS - 1)
        )

    def compute_kv_usage_quantile(self, q: float) -> float:
        """Return the quantile `q` of the fraction of KV blocks in use, over the time steps run."""
        return min(_find_quantile_bin(self.outcome.usage, q) / (kinds.NUM_KV_USAGE_BINS - 1), 1.0)

    @property
    def gauges(self) -> pd.DataFrame:
        """Samples of the gauges, if any: seconds, running, waiting, kv_usage, scheduled_tokens."""
        import pandas as pd

        columns = ["seconds", "running", "waiting", "kv_usage", "scheduled_tokens"]
        frame = pd.DataFrame(self.outcome.get_notes(kinds.NOTE_GAUGE, 5), columns=columns)
        return frame.assign(
            seconds=frame.seconds * self.clock_scale,
            kv_usage=frame.kv_usage / (self.num_blocks - 1),
        )

    def compute_quantile(self, metric: str, q: float) -> float:
        """Return the quantile `q` of "ttft", "tpot", "itl", "e2e" or "queue" in seconds."""
        if metric != "itl":
            values = getattr(self, metric)
            return float(np.quantile(values, q)) if len(values) else math.nan
        # at least one gap lies below, so that the shortest is never an empty bin
        min_q = min(1 / max(self.outcome.itl.sum(), 1), 0.5)
        decades = _find_quantile_bin(self.outcome.itl, max(q, min_q)) / kinds.ITL_BINS_PER_DECADE
        return self.clock_scale * kinds.ITL_FIRST_BIN_S * 10**decades

    def summarize(self, metric: str) -> dict[str, float]:
        """Return mean, p50, p95 and p99 in seconds of "ttft", "tpot", "itl", "e2e" or "queue".

        ITL is the gap between streamed outputs, as vLLM's benchmark and metrics count it. A
        speculative step streams its tokens as one output, so ITL is TPOT times the tokens per step.
        """
        if metric not in self._summaries:
            raise PlannerError(f"metric {metric!r} is not one of {', '.join(self._summaries)}")
        return self._summaries[metric]

    @cached_property
    def _summaries(self) -> dict[str, dict[str, float]]:
        summaries = {}
        for metric in (*LATENCY_METRICS, "queue"):
            values = np.full(4, math.nan)
            if metric == "itl" and self.outcome.itl.any():
                gaps = (self.outcome.last_token - self.outcome.first_token).sum() * self.clock_scale
                values[0] = gaps / (self.gaps * self.outcome.itl.sum())
                values[1:] = [self.compute_quantile("itl", q) for q in LATENCY_QUANTILES]
            elif metric != "itl" and len(times := getattr(self, metric)):
                places = np.array(LATENCY_QUANTILES) * (len(times) - 1)
                values[0] = times.mean()
                values[1:] = np.interp(places, np.arange(len(times)), np.sort(times))
            summaries[metric] = dict(zip(LATENCY_STATISTICS, values.tolist(), strict=True))
        return summaries

    def __repr__(self) -> str:
        lines = [
            (
                f"{format_count(len(self.output), 'request')} in {self.duration:,.1f} s: {self.request_tps:,.2f}"
                f" requests/s, {self.output_tps:,.0f} output tokens/s; {self.decode_batch:.1f}"
                f" decoding at once, KV usage p99 {self.compute_kv_usage_quantile(0.99):.0%},"
                f" {format_count(self.preemptions.sum(), 'preemption')}"
            ),
            "        "
            + "".join(f"{name:>12}" for name in ("mean ms", "p50 ms", "p95 ms", "p99 ms")),
        ]
        lines += [
            f"{metric:8}" + "".join(f"{value * 1e3:12,.2f}" for value in summary.values())
            for metric, summary in self._summaries.items()
        ]
        return "\n".join(lines)


def _find_quantile_bin(counts: np.ndarray, q: float) -> float:
    """Return the position, in bins, below which a fraction `q` of the counts lies."""
    total = np.cumsum(counts)
    if not total[-1]:
        return math.nan
    place = int(np.searchsorted(total, q * total[-1]))
    below = total[place - 1] if place else 0.0
    return place + float((q * total[-1] - below) / counts[place])
