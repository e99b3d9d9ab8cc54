"""What an engine says of itself on /metrics: its own names, and the edges of its histograms, by version."""

from collections.abc import Container
from functools import cache

from pydantic import Field

from planner.core.catalog import Entry, Sourced
from planner.facts.engines import Engine, by_release, engine, release


class EngineMetrics(Entry):
    """The metrics of one engine version, by role; `without` says why there are none."""

    names: dict[str, str | None] = Field(default_factory=dict)
    buckets: dict[str, tuple[float, ...]] = Field(default_factory=dict)  # upper edges, seconds
    without: str = ""

    def edge(self, role: str, seconds: float) -> float | None:
        """The lowest edge of a histogram from `seconds` on: what lies above it surely took longer; None beyond all."""
        return next((edge for edge in self.buckets.get(role, ()) if edge >= seconds), None)


class MetricsEntry(EngineMetrics, Sourced):
    """What one version changed; the head of `catalogs/metrics.yaml` explains every field."""


@cache
def _catalog() -> dict[str, dict[tuple[int, int, int], EngineMetrics]]:
    """Engine name -> release -> all that is known of its metrics."""
    known: dict[str, dict[tuple[int, int, int], EngineMetrics]] = {}
    for name, version, entry in by_release("metrics.yaml", MetricsEntry):
        versions = known.setdefault(name, {})
        before = next(reversed(versions.values()), EngineMetrics())
        names, buckets = before.names | entry.names, before.buckets | entry.buckets
        versions[release(version)] = EngineMetrics(names=names, buckets=buckets, without=entry.without)
    return known


def known_metrics(name: str, version: str | None, seen: Container[str]) -> EngineMetrics:
    """Those of engine `name` at `version`, or of the newest version all of whose latencies were `seen` on a page."""
    if version is not None:
        return engine_metrics(engine(name, version))
    for known in reversed(_catalog()[name].values()):
        told = [known.names[role] for role in ("ttft", "itl", "tpot") if known.names[role]]
        if all(f"{metric}_count" in seen for metric in told) and known.names["kv_usage"] in seen:
            return known
    return next(reversed(_catalog()[name].values()))


def engine_metrics(of: Engine) -> EngineMetrics:
    """The metrics of an engine, by the nearest entry before its version."""
    versions = _catalog().get(of.name, {})
    earlier = [version for version in versions if version <= of.release]
    if not earlier:
        return EngineMetrics(without=f"What {of} says on /metrics is not known.")
    return versions[max(earlier)]
