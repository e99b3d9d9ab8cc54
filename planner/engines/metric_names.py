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
    """Get the metrics of an engine at `version`; without one, of the release that fits a page best.

    That is the newest of those with most of their metrics among `present_names`, since people post
    pages of a few lines.
    """
    if version is not None:
        return get_metric_names(get_engine(name, version))

    def count_present(metrics: EngineMetricNames) -> int:
        known = filter(None, metrics.names.values())
        return sum(each in present_names or f"{each}_count" in present_names for each in known)

    return max(reversed(_load_metric_names()[name].values()), key=count_present)


def get_metric_names(engine: Engine) -> EngineMetricNames:
    """Get the metrics of an engine from the nearest entry up to its version."""
    versions = _load_metric_names().get(engine.name, {})
    earlier = [version for version in versions if version <= engine.release]
    if not earlier:
        return EngineMetricNames(without=f"What {engine} says on /metrics is not known.")
    return versions[max(earlier)]
