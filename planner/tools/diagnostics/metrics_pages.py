"""Saved /metrics pages of one replica, and what they measure of it: one page since its start, two pages in between."""

import math
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time

import numpy as np

from planner.core.errors import PlannerError
from planner.core.readers import read_text
from planner.core.units import MIB
from planner.engines.metric_names import EngineMetricNames, match_metric_names
from planner.workload.length_distribution import LengthDistribution, RequestSide
from planner.workload.workload import Workload

MAX_PAGE_BYTES = 16 * MIB
"""Bytes of one page."""
MAX_METRIC_VALUE = 1e15
"""What an engine's metrics stay below: tokens of years, and times since 1970."""
LENGTH_METRICS: Mapping[RequestSide, tuple[str, str]] = {
    "prompt": ("prompt_lengths", "prompt_tokens"),
    "output": ("output_lengths", "generation_tokens"),
}  # fmt: skip
"""The histogram of tokens by request, and the counter of all."""
METRIC_PREFIXES = {"vllm:": "vllm", "sglang:": "sglang"}
"""How the names of an engine's metrics begin."""


@dataclass(frozen=True)
class MetricsPage:
    """All samples of one page, by name."""

    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
    taken_at_s: float  # seconds since 1970: when the file was written, or the page fetched
    where: str = ""

    @property
    def engine(self) -> str:
        """Whose page it is; `PlannerError` where no engine is known by its names."""
        for name in self.samples:
            for prefix, engine in METRIC_PREFIXES.items():
                if name.startswith(prefix):
                    return engine
        raise PlannerError(f"{self.where} has no metrics of vLLM or SGLang (vllm:..., sglang:...)")

    def sum_series(self, name: str | None, **labels: str) -> float | None:
        """The sum of a metric over its series with these labels; None where there is none."""
        values = [
            value
            for found, value in self.samples.get(name or "", ())
            if labels.items() <= found.items()
        ]
        return sum(values) if values else None

    def read_buckets(self, name: str | None) -> dict[float, float]:
        """Upper edge -> how many are at or below it."""
        found: dict[float, float] = {}
        for labels, value in self.samples.get(f"{name}_bucket", ()):
            edge = float(labels.get("le", "nan"))
            found[edge] = found.get(edge, 0.0) + value
        return dict(sorted(found.items()))


def read_metrics_page(location: str | Path) -> MetricsPage:
    """The page in a file, or at an address that begins with http; `PlannerError` for what is none."""
    from prometheus_client.parser import text_string_to_metric_families

    if str(location).startswith(("http://", "https://")):
        text, taken = _fetch_page(str(location))
    else:
        text, taken = (
            read_text(Path(location), MAX_PAGE_BYTES, errors="replace"),
            Path(location).stat().st_mtime,
        )
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                edge, value = float(sample.labels.get("le", 0)), abs(float(sample.value))
                if sample.name.startswith(tuple(METRIC_PREFIXES)) and (
                    math.isnan(edge) or not value < MAX_METRIC_VALUE
                ):
                    raise ValueError(
                        f"{sample.name} is {sample.value:g}; a finite number below"
                        f" {MAX_METRIC_VALUE:g} is needed"
                    )
                samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise PlannerError(
            f"{location} is not a /metrics page: {str(error)[:120] or type(error).__name__}"
        ) from None
    return MetricsPage(samples, taken, str(location))


def _fetch_page(address: str) -> tuple[str, float]:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace"), time()
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise PlannerError(f"cannot read {address}: {error}") from None


@dataclass(frozen=True)
class MetricsHistogram:
    """Observations by bucket: upper `edges` (the last infinite) and `counts` in each, their sum and number."""

    edges: np.ndarray
    counts: np.ndarray
    total: float
    count: float

    @property
    def mean(self) -> float:
        """Mean of all observations."""
        return self.total / self.count

    def format_quantile_bounds(self, q: float) -> str:
        """Between which edges a quantile lies, in ms."""
        low, high = (f"{edge * 1e3:,.0f}" for edge in self.find_quantile_bucket(q))
        return (
            f"under {high}"
            if low == "0"
            else f"over {low}"
            if high == "inf"
            else f"{low} to {high}"
        )

    def find_quantile_bucket(self, q: float) -> tuple[float, float]:
        """The edges of the bucket in which a quantile lies: it may be anywhere there."""
        k = int(np.searchsorted(np.cumsum(self.counts) / self.counts.sum(), q))
        return float(self.edges[k - 1]) if k else 0.0, float(self.edges[k])

    def compute_fraction_above(self, edge: float) -> float:
        """The share of observations above the lowest edge from `edge` on."""
        return float(
            self.counts[self.edges > self.edges[np.searchsorted(self.edges, edge)]].sum()
            / self.counts.sum()
        )

    def estimate_lengths(self, most: float = math.inf) -> LengthDistribution:
        """Tokens as this histogram of them knows, none above `most`: spread within buckets by ratio, with its mean."""
        edges = np.where(np.isinf(self.edges), 2 * self.edges[-2], self.edges)
        reached = np.concatenate(([0.0], np.cumsum(self.counts) / self.counts.sum()))
        shares = (np.arange(2000) + 0.5) / 2000
        spread = np.exp(
            np.interp(shares, reached, np.log(np.concatenate(([1.0], np.maximum(edges, 1.0)))))
        )
        for _ in range(20):
            spread = np.clip(spread * self.mean / spread.mean(), 1.0, most)
        return LengthDistribution.from_samples(spread)


@dataclass(frozen=True)
class ReplicaMetrics:
    """What pages say of one replica; None for what they do not report. Seconds, tokens, shares, as names say."""

    engine: str
    names: EngineMetricNames
    seconds: float | None  # between the pages
    requests: float  # that were answered
    histograms: Mapping[str, MetricsHistogram]  # by role
    gauges: Mapping[str, float] = field(default_factory=dict)  # by role, mean of the pages
    counters: Mapping[str, float] = field(default_factory=dict)  # by role, how much they grew
    in_flight_grew: float = 0.0
    deferred: float | None = None  # requests that wait for an adapter, or what else is not room
    cpu: float | None = None  # seconds a second of the process that answers
    since_start: bool = False  # since the server started, by one page
    most_running: float = 0.0  # requests at once, on either page
    pool: float | None = None  # tokens that the blocks of one engine hold

    def get_mean(self, role: str) -> float | None:
        """Mean of a histogram."""
        return self.histograms[role].mean if role in self.histograms else None

    @property
    def arrival_rps(self) -> float | None:
        """Requests/s that arrive: those answered, and those by which more are in flight than before."""
        return (
            max(self.requests + self.in_flight_grew, 1e-9) / self.seconds if self.seconds else None
        )

    def compute_ratio(self, part: str, whole: str) -> float | None:
        """How much of one counter another is; None where either is unknown or nothing was counted."""
        counted = self.counters.get(whole)
        return self.counters[part] / counted if part in self.counters and counted else None

    @property
    def preemptions(self) -> float | None:
        """Per request."""
        return (
            self.counters["preemptions"] / self.requests if "preemptions" in self.counters else None
        )

    @property
    def prefix_hit_fraction(self) -> float | None:
        """The share of prompt tokens that the prefix cache had."""
        return self.compute_ratio("prefix_hits", "prefix_queries")

    @property
    def acceptance_fraction(self) -> float | None:
        """The share of drafted tokens that was kept."""
        return self.compute_ratio("accepted", "drafted")

    def get_mean_tokens(self, side: RequestSide) -> float | None:
        """Mean tokens of a prompt or an answer, by its histogram or else the counter."""
        role, counter = LENGTH_METRICS[side]
        if role in self.histograms:
            return self.histograms[role].mean
        return (
            max(self.counters[counter] / self.requests, 1.0) if self.counters.get(counter) else None
        )

    def estimate_lengths(
        self, side: RequestSide, most: float = math.inf
    ) -> LengthDistribution | None:
        """Tokens of a prompt or an answer: as the histogram has them, or spread as in public traces of that mean."""
        if histogram := self.histograms.get(LENGTH_METRICS[side][0]):
            return histogram.estimate_lengths(most)
        mean = self.get_mean_tokens(side)
        return (
            LengthDistribution.from_public_traces(mean, side, most if math.isfinite(most) else None)
            if mean
            else None
        )

    def estimate_workload(self, most: float = math.inf) -> Workload | None:
        """The traffic that this replica saw; None where rate or lengths are not reported.

        A prompt and its answer had at most `most` tokens: neither is longer than the mean of the
        other leaves.
        """
        mean_prompt, mean_output = (
            self.get_mean_tokens("prompt") or 0.0,
            self.get_mean_tokens("output") or 0.0,
        )
        prompt = self.estimate_lengths("prompt", max(most - mean_output, mean_prompt))
        output = self.estimate_lengths("output", max(most - mean_prompt, mean_output))
        if prompt is None or output is None or not self.arrival_rps:
            return None
        return Workload(
            prompt,
            output,
            rate=self.arrival_rps,
            prefix_hit_rate=min(self.prefix_hit_fraction or 0.0, 1.0),
        )


COUNTER_ROLES = (
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "drafted",
    "accepted",
    "prefix_queries",
    "prefix_hits",
)
HISTOGRAM_ROLES = ("ttft", "itl", "tpot", "e2e", "queue", "prefill", "decode", "prompt_lengths", "output_lengths",
              "step_tokens")  # fmt: skip
MIN_FILE_AGE_GAP_S = 5.0
"""Seconds between two files that were copied rather than saved from a server."""
GAUGE_ROLES = ("running", "waiting", "kv_usage")


def measure_replica(
    pages: Sequence[MetricsPage], version: str | None = None, seconds: float | None = None
) -> ReplicaMetrics:
    """What happened between two pages of a replica, or since its start by one.

    `seconds`: how long that was, where the files' times do not tell. Raises `PlannerError` where
    nothing was answered, for more than two pages or two in the wrong order, and for seconds that
    are no time.
    """
    if len(pages) > 2:
        raise PlannerError(
            f"one page, or two of the same replica, the earlier first; got {len(pages)}"
        )
    if seconds is not None and not 1e-3 <= seconds <= 1e9:
        raise PlannerError(
            f"the seconds between two pages must be from 0.001 to 1e9, got {seconds:g}"
        )
    after = pages[-1]
    names = match_metric_names(after.engine, version, after.samples)
    answered = [page.sum_series(names.names.get("success")) or 0.0 for page in pages]
    before = (
        pages[0] if len(pages) == 2 and answered[0] <= answered[1] else None
    )  # else it was started anew
    if len(pages) == 2 and before is None and not _restarted_between(after, pages[0]):
        raise PlannerError(
            f"the earlier page comes first: {after.where} was saved before {pages[0].where}, for it"
            " had answered fewer requests; of a server started anew in between, give the later"
            " page alone"
        )

    def grown(name: str | None) -> float | None:
        now, then = after.sum_series(name), before.sum_series(name) if before else None
        return None if now is None else max(now - (then or 0.0), 0.0)

    requests = grown(names.names.get("success")) or 0.0
    if not requests:
        raise PlannerError(
            f"{after.where}: no request was answered in this time, so there is nothing to judge"
        )
    seen = [page for page in (before, after) if page]
    means = {
        role: _compute_mean(page.sum_series(names.names[role]) for page in seen)
        for role in GAUGE_ROLES
    }
    gauges = {role: mean for role, mean in means.items() if mean is not None}
    if seconds is None:
        started = (
            after.sum_series("process_start_time_seconds") if before is None else before.taken_at_s
        )
        seconds = (
            after.taken_at_s - started
            if started and after.taken_at_s - started > MIN_FILE_AGE_GAP_S
            else None
        )
    in_flight = [
        sum(page.sum_series(names.names[role]) or 0.0 for role in ("running", "waiting"))
        for page in seen
    ]
    cpu = grown("process_cpu_seconds_total")
    engines = max(len(after.samples.get(names.names["running"] or "", ())), 1)
    if "kv_usage" in gauges:
        gauges["kv_usage"] /= engines
    return ReplicaMetrics(
        after.engine, names, seconds, requests,
        {role: histogram for role in HISTOGRAM_ROLES if (histogram := _subtract_histograms(before, after, names.names[role]))},
        gauges,
        {role: value for role in COUNTER_ROLES if (value := grown(names.names[role])) is not None},
        in_flight[-1] - in_flight[0] if before else in_flight[-1],
        _compute_mean(page.sum_series(names.names["waiting_by_reason"], reason="deferred") for page in seen),
        cpu / seconds if cpu is not None and seconds else None,
        before is None,
        max(page.sum_series(names.names["running"]) or 0.0 for page in seen),
        _read_pool_tokens(after, names.names.get("cache_config") or ""),
    )  # fmt: skip


def _restarted_between(after: MetricsPage, before: MetricsPage) -> bool:
    """Whether the server of `after` says that it started after that of `before`; files' times tell who copied them."""
    now, then = (page.sum_series("process_start_time_seconds") for page in (after, before))
    return now is not None and then is not None and now > then


def _read_pool_tokens(page: MetricsPage, name: str) -> float | None:
    """Blocks x block size of the smallest engine, from the labels of vLLM's `cache_config_info`."""
    told = [
        [labels.get(of, "") for of in ("num_gpu_blocks", "block_size")]
        for labels, _ in page.samples.get(name, ())
    ]
    return min(
        (float(n) * float(size) for n, size in told if n.isdecimal() and size.isdecimal()),
        default=None,
    )


def _compute_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _subtract_histograms(
    before: MetricsPage | None, after: MetricsPage, name: str | None
) -> MetricsHistogram | None:
    """What was observed in between; None where there is nothing."""
    now, then = after.read_buckets(name), before.read_buckets(name) if before else {}
    if len(now) < 2:
        return None
    reached = np.array([value - then.get(edge, 0.0) for edge, value in now.items()])
    counts = np.maximum(np.diff(reached, prepend=0.0), 0.0)
    total = (after.sum_series(f"{name}_sum") or 0.0) - (
        (before.sum_series(f"{name}_sum") or 0.0) if before else 0.0
    )
    return (
        MetricsHistogram(np.array(list(now)), counts, total, counts.sum())
        if counts.sum() >= 1 and total > 0
        else None
    )
