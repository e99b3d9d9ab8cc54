"""Metrics on an engine's /metrics page by version: names and bucket edges of histograms."""

from collections.abc import Container
from functools import cache

from pydantic import Field

from planner.core.catalog import SourcedEntry, StrictEntry
from planner.core.versions import Version
from planner.engines.engine import Engine, get_engine, load_entries_by_release


class EngineMetricNames(StrictEntry):
    """The metrics of one engine version, by role; `without` explains why there are none."""

    names: dict[str, str | None] = Field(default_factory=dict)
    buckets: dict[str, tuple[float, ...]] = Field(default_factory=dict)  # upper edges, seconds
    without: str = ""

    def find_bucket_edge(self, role: str, seconds: float) -> float | None:
        """Find the lowest bucket edge from `seconds` on; None if all edges are lower."""
        return next((edge for edge in self.buckets.get(role, ()) if edge >= seconds), None)


class MetricNamesEntry(EngineMetricNames, SourcedEntry):
    """Changes of one version; the head of `catalogs/metrics.yaml` explains every field."""


@cache
def _load_metric_names() -> dict[str, dict[Version, EngineMetricNames]]:
    """Load engine name -> release -> its metrics, with those of the releases before it."""
    known: dict[str, dict[Version, EngineMetricNames]] = {}
    for name, version, entry in load_entries_by_release("metrics.yaml", MetricNamesEntry):
        versions = known.setdefault(name, {})
        before = next(reversed(versions.values()), EngineMetricNames())
        names, buckets = before.names | entry.names, before.buckets | entry.buckets
        versions[version] = EngineMetricNames(names=names, buckets=buckets, without=entry.without)
    return known


def match_metric_names(
    name: str, version: str | None, present_names: Container[str]
) -> EngineMetricNames:
    """Get the metrics of an engine at `version`; without one, of the newest that fits a page.

    A version fits if the page has all its latencies and its KV cache usage among `present_names`;
    if none fits, the newest is returned.
    """
    if version is not None:
        return get_metric_names(get_engine(name, version))
    newest_first = list(reversed(_load_metric_names()[name].values()))
    for metrics in newest_first:
        latencies = filter(None, (metrics.names[role] for role in ("ttft", "itl", "tpot")))
        if (
            all(f"{latency}_count" in present_names for latency in latencies)
            and metrics.names["kv_usage"] in present_names
        ):
            return metrics
    return newest_first[0]


def get_metric_names(engine: Engine) -> EngineMetricNames:
    """Get the metrics of an engine from the nearest entry up to its version."""
    versions = _load_metric_names().get(engine.name, {})
    earlier = [version for version in versions if version <= engine.release]
    if not earlier:
        return EngineMetricNames(without=f"What {engine} says on /metrics is not known.")
    return versions[max(earlier)]
