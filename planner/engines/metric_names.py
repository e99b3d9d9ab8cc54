"""What an engine says of itself on /metrics: its own names, and the edges of its histograms, by version."""

from collections.abc import Container
from functools import cache

from pydantic import Field

from planner.core.catalog import SourcedEntry, StrictEntry
from planner.core.versions import Version
from planner.engines.engine import Engine, get_engine, load_entries_by_release


class EngineMetricNames(StrictEntry):
    """The metrics of one engine version, by role; `without` says why there are none."""

    names: dict[str, str | None] = Field(default_factory=dict)
    buckets: dict[str, tuple[float, ...]] = Field(default_factory=dict)  # upper edges, seconds
    without: str = ""

    def find_bucket_edge(self, role: str, seconds: float) -> float | None:
        """The lowest edge of a histogram from `seconds` on: what lies above it surely took longer; None beyond all."""
        return next((edge for edge in self.buckets.get(role, ()) if edge >= seconds), None)


class MetricNamesEntry(EngineMetricNames, SourcedEntry):
    """What one version changed; the head of `catalogs/metrics.yaml` explains every field."""


@cache
def _load_metric_names() -> dict[str, dict[Version, EngineMetricNames]]:
    """Engine name -> release -> all that is known of its metrics."""
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
    """Those of engine `name` at `version`, or of the newest version all of whose latencies were `seen` on a page."""
    if version is not None:
        return get_metric_names(get_engine(name, version))
    for engine_metric_names in reversed(_load_metric_names()[name].values()):
        told = [
            engine_metric_names.names[role]
            for role in ("ttft", "itl", "tpot")
            if engine_metric_names.names[role]
        ]
        if (
            all(f"{metric}_count" in present_names for metric in told)
            and engine_metric_names.names["kv_usage"] in present_names
        ):
            return engine_metric_names
    return next(reversed(_load_metric_names()[name].values()))


def get_metric_names(of: Engine) -> EngineMetricNames:
    """The metrics of an engine, by the nearest entry before its version."""
    versions = _load_metric_names().get(of.name, {})
    earlier = [version for version in versions if version <= of.release]
    if not earlier:
        return EngineMetricNames(without=f"What {of} says on /metrics is not known.")
    return versions[max(earlier)]
