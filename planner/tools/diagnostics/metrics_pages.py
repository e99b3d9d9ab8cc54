"""Measure one replica by its /metrics pages.

One page covers the time since the server's start, two pages the time in between.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time

import numpy as np
import yaml

from planner.core.errors import PlannerError
from planner.core.http import fetch_bytes
from planner.core.readers import read_text
from planner.core.units import MIB
from planner.engines.metric_names import EngineMetricNames, match_metric_names
from planner.latency.performance import LATENCY_METRICS
from planner.workload.length_distribution import LengthDistribution, RequestSide
from planner.workload.traces import read_trace
from planner.workload.workload import Workload

MAX_PAGE_BYTES = 16 * MIB
MAX_METRIC_VALUE = 1e15
"""Above tokens of years, and seconds since 1970."""
LENGTH_METRICS: Mapping[RequestSide, tuple[str, str]] = {
    "prompt": ("prompt_lengths", "prompt_tokens"),
    "output": ("output_lengths", "generation_tokens"),
}  # fmt: skip
"""The histogram of tokens per request, and the counter of all tokens."""
METRIC_PREFIXES = {"vllm:": "vllm", "sglang:": "sglang"}
"""Engines by the prefix of their metrics."""


@dataclass(frozen=True)
class MetricsPage:
    """The samples of one page, by name of the metric."""

    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
    taken_at_s: float  # seconds since 1970: when the file was written, or the page fetched
    where: str = ""  # the file or address

    @property
    def engine(self) -> str:
        """The engine by the names of its metrics; raise `PlannerError` if they are of none."""
        for name in self.samples:
            if engine := METRIC_PREFIXES.get(name.partition(":")[0] + ":"):
                return engine
        raise PlannerError(f"{self.where} has no metrics of vLLM or SGLang (vllm:..., sglang:...)")

    def sum_series(self, name: str | None, **labels: str) -> float | None:
        """Return the sum of a metric over the series with `labels`; None if there are none."""
        values = [
            value
            for series_labels, value in self.samples.get(name or "", ())
            if labels.items() <= series_labels.items()
        ]
        return sum(values) if values else None

    def read_buckets(self, name: str | None) -> dict[float, float]:
        """Return the cumulative counts of a histogram by upper edge, summed over its series."""
        counts: dict[float, float] = {}
        for labels, value in self.samples.get(f"{name}_bucket", ()):
            edge = float(labels.get("le", "nan"))
            counts[edge] = counts.get(edge, 0.0) + value
        count = self.sum_series(f"{name}_count")
        if counts and count is not None:  # a page that was cut, or an exporter that leaves it out
            counts.setdefault(math.inf, max(count, *counts.values(), 0.0))
        return dict(sorted(counts.items())) if math.inf in counts else {}


def read_metrics_page(location: str | Path) -> MetricsPage:
    """Read a page from a file or an HTTP address; raise `PlannerError` for anything else.

    Names may begin with `vllm_`, and those of counters may lack `_total`.
    """
    from prometheus_client.parser import text_string_to_metric_families

    if str(location).startswith(("http://", "https://")):
        text = fetch_bytes(str(location), MAX_PAGE_BYTES).decode("utf-8", "replace")
        taken_at_s = time()
    else:
        text = read_text(Path(location), MAX_PAGE_BYTES, errors="replace")
        taken_at_s = Path(location).stat().st_mtime
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        families = list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError, OverflowError):
        # the parser quotes the line, and a file that is no page may hold anything
        raise PlannerError(
            f"{location} is not a /metrics page: a line is not of the form NAME{{LABELS}} NUMBER"
        ) from None
    for sample in (sample for family in families for sample in family.samples):
        name = re.sub("^(vllm|sglang)_", r"\1:", sample.name)
        edge, value = sample.labels.get("le", "0"), sample.value
        if abs(value) < MAX_METRIC_VALUE and re.fullmatch(r"[-+.\deE]+|\+?Inf", edge):
            samples.setdefault(name, []).append((sample.labels, float(value)))
        elif name.startswith(tuple(METRIC_PREFIXES)):
            raise PlannerError(
                f"{location} is not a /metrics page: {name} is {str(value)[:20]}; a finite number"
                f" below {MAX_METRIC_VALUE:g} is needed"
            )
    totals = {f"{name}_total": series for name, series in samples.items()}
    return MetricsPage({**totals, **samples}, taken_at_s, str(location))


@dataclass(frozen=True)
class MetricsHistogram:
    """Observations by bucket: upper `edges`, the last infinite, and `counts` in each."""

    edges: np.ndarray
    counts: np.ndarray
    total: float  # sum of all observations
    count: float  # number of observations

    @property
    def mean(self) -> float:
        """Mean of all observations."""
        return self.total / self.count

    def find_quantile_bucket(self, q: float) -> tuple[float, float]:
        """Return the edges of the bucket of a quantile, which can be anywhere between them."""
        k = int(np.searchsorted(np.cumsum(self.counts) / self.counts.sum(), q))
        return float(self.edges[k - 1]) if k else 0.0, float(self.edges[k])

    def bound_fraction_above(self, limit: float) -> tuple[float, float]:
        """Return the least and the largest fraction of observations above a limit.

        They differ by the bucket around the limit; the sum of all observations may need some above.
        """
        k, count = int(np.searchsorted(self.edges, limit)), self.counts.sum()
        above = float(self.counts[k + 1 :].sum() / count)
        inside = float(self.counts[k] / count) * bool(self.edges[k] != limit)
        used = self.counts > 0
        longest = np.where(np.arange(len(used)) == k, limit, self.edges)[used] @ self.counts[used]
        excess = self.total - float(longest)
        least = excess / count / (self.edges[k] - limit) if inside and excess > 0 else 0.0
        return above + min(float(least), inside), above + inside

    def estimate_lengths(self, max_tokens: float = math.inf) -> LengthDistribution:
        """Return the distribution of tokens with this histogram's buckets and mean.

        Within a bucket the logarithm of the tokens is uniform.
        """
        edges = np.where(np.isinf(self.edges), 2 * self.edges[-2], self.edges)
        reached = np.concatenate(([0.0], np.cumsum(self.counts) / self.counts.sum()))
        quantiles = (np.arange(2000) + 0.5) / 2000
        log_edges = np.log(np.concatenate(([1.0], np.maximum(edges, 1.0))))
        tokens = np.exp(np.interp(quantiles, reached, log_edges))
        for _ in range(20):
            tokens = np.clip(tokens * self.mean / tokens.mean(), 1.0, max_tokens)
        return LengthDistribution.from_samples(tokens)


@dataclass(frozen=True)
class ReplicaMetrics:
    """Metrics of one replica; NaN for what its pages do not report."""

    engine: str
    names: EngineMetricNames
    seconds: float | None  # between the pages
    requests: float  # answered
    histograms: Mapping[str, MetricsHistogram]  # by role
    gauges: Mapping[str, float] = field(default_factory=dict)  # by role, mean of the pages
    counters: Mapping[str, float] = field(default_factory=dict)  # by role, their growth
    in_flight_grew: float = 0.0  # requests, from the first page to the last
    deferred: float = math.nan  # requests that wait for something else than KV cache or slots
    cpu: float = math.nan  # CPU seconds per second of the server's process
    since_start: bool = False  # of the server, by one page
    most_running: float = 0.0  # requests at once, on either page
    pool: float = math.nan  # tokens in the KV cache of one engine
    num_idle_pages: int = 0  # on which nothing runs or waits; they have no part in `gauges`

    def get_mean(self, role: str) -> float:
        """Return the mean of a histogram."""
        return self.histograms[role].mean if role in self.histograms else math.nan

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits on any page, so that gauges tell nothing of the load."""
        return self.num_idle_pages == (1 if self.since_start else 2)

    @property
    def arrival_rps(self) -> float:
        """Requests/s that arrive, answered or in flight; 0 if unknown, or while a queue only drains."""
        return max(self.requests + self.in_flight_grew, 0.0) / (self.seconds or math.inf)

    def compute_ratio(self, part: str, whole: str) -> float:
        """Return one counter over another."""
        return self.counters.get(part, math.nan) / (self.counters.get(whole) or math.nan)

    def get_mean_tokens(self, side: RequestSide) -> float:
        """Return the mean tokens of a prompt or output, by the histogram, else by the counter."""
        role, counter = LENGTH_METRICS[side]
        if role in self.histograms:
            return self.histograms[role].mean
        return max((self.counters.get(counter) or math.nan) / (self.requests or math.nan), 1.0)

    def estimate_workload(
        self, max_tokens: float = math.inf, burstiness: float = 1.0
    ) -> Workload | None:
        """Return the measured traffic; None if the rate or the lengths are not reported.

        A prompt and its output together have at most `max_tokens`; each is limited by what the mean
        of the other leaves of them. Without a histogram lengths are those of public traces.
        """
        means = {side: self.get_mean_tokens(side) for side in LENGTH_METRICS}
        if not (self.arrival_rps and sum(means.values()) > 0):
            return None
        lengths = {}
        for side, mean in means.items():
            most = max(max_tokens - sum(means.values()) + mean, mean)
            histogram = self.histograms.get(LENGTH_METRICS[side][0])
            limit = most if math.isfinite(most) else None
            lengths[side] = (
                histogram.estimate_lengths(most)
                if histogram
                else LengthDistribution.from_public_traces(mean, side, limit)
            )
        hits = self.compute_ratio("prefix_hits", "prefix_queries")
        return Workload(
            lengths["prompt"],
            lengths["output"],
            rate=self.arrival_rps,
            burstiness=burstiness,
            prefix_hit_rate=min(hits, 1.0) if hits > 0 else 0.0,
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
HISTOGRAM_ROLES = (
    *LATENCY_METRICS,
    "queue",
    "prefill",
    *(r for r, _ in LENGTH_METRICS.values()),
)
MIN_FILE_AGE_GAP_S = 5.0
"""Files with less time between them were copied together, so their times say nothing."""
GAUGE_ROLES = ("running", "waiting", "kv_usage")


def measure_replica(
    pages: Sequence[MetricsPage], version: str | None = None, seconds: float | None = None
) -> ReplicaMetrics:
    """Measure a replica between two pages, or from its start to a single one.

    `seconds` is the time in between, if the times of the files are not those of the server. Raises
    `PlannerError` for more than two pages, two in the wrong order, and `seconds` out of range.
    """
    if seconds is not None and not 1e-3 <= seconds <= 1e9:
        raise PlannerError(
            f"the seconds between two pages must be from 0.001 to 1e9, got {seconds:g}"
        )
    after = pages[-1]
    metrics = match_metric_names(after.engine, version, after.samples)
    names = metrics.names
    before = _select_earlier_page(pages, names.get("success"))

    def compute_growth(name: str | None) -> float:
        now, then = after.sum_series(name), before.sum_series(name) if before else None
        return math.nan if now is None else max(now - (then or 0.0), 0.0)

    growths = map(
        compute_growth, (names.get("success"), *(f"{names[r]}_count" for r in ("e2e", "ttft")))
    )
    requests = next((growth for growth in growths if growth >= 0), 0.0)
    used = [page for page in (before, after) if page]
    in_flight = [[page.sum_series(names[role]) for role in ("running", "waiting")] for page in used]
    busy = [
        page
        for page, counts in zip(used, in_flight, strict=True)
        if counts[0] is None or any(counts)
    ]
    gauges = {
        role: mean
        for role in GAUGE_ROLES
        if (mean := _compute_mean(page.sum_series(names[role]) for page in busy)) >= 0
    }
    started = before.taken_at_s if before else after.sum_series("process_start_time_seconds")
    if not seconds and started and after.taken_at_s - started > MIN_FILE_AGE_GAP_S:
        seconds = after.taken_at_s - started
    totals = [sum(filter(None, counts)) for counts in in_flight]
    if "kv_usage" in gauges:
        gauges["kv_usage"] /= max(len(after.samples.get(names["running"] or "", ())), 1)
    histograms = {
        role: _subtract_histograms(before, after, names.get(role)) for role in HISTOGRAM_ROLES
    }
    counters = {role: compute_growth(names.get(role)) for role in COUNTER_ROLES}
    sizes = (
        [labels.get(name, "") for name in ("num_gpu_blocks", "block_size")]
        for labels, _ in after.samples.get(names.get("cache_config") or "", ())
    )
    return ReplicaMetrics(
        engine=after.engine,
        names=metrics,
        seconds=seconds,
        requests=requests,
        histograms={role: histogram for role, histogram in histograms.items() if histogram},
        gauges=gauges,
        counters={role: value for role, value in counters.items() if value >= 0},
        in_flight_grew=totals[-1] - (totals[0] if before else 0.0),
        deferred=_compute_mean(
            page.sum_series(names.get("waiting_by_reason"), reason="deferred") for page in used
        ),
        cpu=compute_growth("process_cpu_seconds_total") / (seconds or math.nan),
        since_start=before is None,
        most_running=max(page.sum_series(names["running"]) or 0.0 for page in used),
        pool=min(
            (math.prod(map(float, pair)) for pair in sizes if all(map(str.isdecimal, pair))),
            default=math.nan,  # tokens of the smallest engine
        ),
        num_idle_pages=len(used) - len(busy),
    )


def _select_earlier_page(pages: Sequence[MetricsPage], success: str | None) -> MetricsPage | None:
    """Select the page from which the counters grew; None if they grew since the server's start."""
    if len(pages) > 2:
        raise PlannerError(
            f"one page, or two of the same replica, the earlier first; got {len(pages)}"
        )
    answered = [page.sum_series(success) or 0.0 for page in pages]
    if answered[-1] < answered[0]:
        raise PlannerError(
            f"the earlier page comes first: {pages[-1].where} was saved before {pages[0].where}, for"
            " it had answered fewer requests; of a server started anew in between, give the later"
            " page alone"
        )
    return pages[0] if len(pages) == 2 else None


def _compute_mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _subtract_histograms(
    before: MetricsPage | None, after: MetricsPage, name: str | None
) -> MetricsHistogram | None:
    """Return the observations between two pages; None if there are none."""
    now, then = after.read_buckets(name), before.read_buckets(name) if before else {}
    if len(now) < 2:
        return None
    reached = np.array([value - then.get(edge, 0.0) for edge, value in now.items()])
    counts = np.maximum(np.diff(reached, prepend=0.0), 0.0)
    earlier = before.sum_series(f"{name}_sum") if before else 0.0
    total = (after.sum_series(f"{name}_sum") or 0.0) - (earlier or 0.0)
    is_observed = counts.sum() >= 1 and total > 0
    return (
        MetricsHistogram(np.array(list(now)), counts, total, counts.sum()) if is_observed else None
    )


LOG_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl")
"""Suffixes of access logs; any other file is a page."""


def build_traffic_profile(sources: Sequence[str | Path], seconds: float | None = None) -> str:
    """Return the `workload` of a scenario as YAML: lengths by mean, p50 and p95, and requests/s.

    `sources` is an access log (CSV or JSON lines with times, prompt and output tokens, or spans, see
    `read_trace`), or one or two /metrics pages of a replica, `seconds` apart. Raises `PlannerError`
    if they do not state the rate or the lengths.
    """
    known: dict[str, object] = {}
    if len(sources) == 1 and str(sources[0]).endswith(LOG_SUFFIXES):
        trace = read_trace(sources[0]).select_busiest_hour()
        load = Workload.from_trace(trace)
        known["burstiness"] = float(f"{trace.burstiness:.2g}")
        if trace.has_block_ids:
            cached = trace.prefix_hit_rate * load.prompt.mean
            known["shared_prefix"] = {"tokens": round(cached), "hit_rate": 1.0}
        text = f"{trace}; plan for the rate of your busiest hour"
    else:
        metrics = measure_replica(
            [read_metrics_page(source) for source in sources], seconds=seconds
        )
        measured = metrics.estimate_workload()
        if measured is None:
            raise PlannerError(
                f"{sources[-1]} states no rate or no lengths of requests: two pages under load, some"
                " minutes apart, would; add --seconds if the files do not tell the time between"
            )
        load = measured
        text = (
            f"{metrics.requests:,.0f} requests of one replica,"
            f" {'two pages' if len(sources) == 2 else 'one page, since the start of the server'};"
            " multiply the rate by your replicas"
        )
        if load.prefix_hit_rate >= 0.01:
            known["shared_prefix"] = {"tokens": round(load.mean_cached_tokens), "hit_rate": 1.0}
    workload = {
        "prompt_tokens": _summarize_lengths(load.prompt),
        "output_tokens": _summarize_lengths(load.output),
        "rate": float(f"{load.rate or 0.0:.3g}"),
        **known,
    }
    fields = yaml.safe_dump({"workload": workload}, sort_keys=False, default_flow_style=None)
    return f"# {text}.\n{fields}"


def _summarize_lengths(lengths: LengthDistribution) -> dict[str, float]:
    """Return mean, p50 and p95, or fewer of them if no lognormal has all."""
    mean, p50, p95 = (round(value, 1) for value in (lengths.mean, lengths.p50, lengths.p95))
    for figures in (
        {"mean": mean, "p50": p50, "p95": p95},
        {"mean": mean, "p95": p95},
        {"mean": mean, "p50": p50},
    ):
        try:
            LengthDistribution.from_lognormal(mean, figures.get("p95"), figures.get("p50"))
            return figures
        except PlannerError:
            continue
    return {"mean": mean}
