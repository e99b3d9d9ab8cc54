"""What an engine says of itself on /metrics: its own names, and the edges of its histograms, by version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import Field

from planner.core.catalog import Entry, entries
from planner.facts.engines import Engine, release


class MetricsEntry(Entry):
    """What one version changed; the head of `catalogs/metrics.yaml` explains every field."""

    source: str
    date: str
    names: dict[str, str | None] = Field(default_factory=dict)
    buckets: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    edges_by: dict[str, str] = Field(default_factory=dict)
    without: str = ""


@dataclass(frozen=True)
class EngineMetrics:
    """The metrics of one engine version, by role; `without` says why there are none."""

    names: Mapping[str, str | None] = field(default_factory=dict)
    buckets: Mapping[str, Sequence[float]] = field(default_factory=dict)  # upper edges, seconds
    edges_by: Mapping[str, str] = field(default_factory=dict)
    without: str = ""

    def edge(self, role: str, seconds: float) -> float | None:
        """The lowest edge of a histogram from `seconds` on: what lies above it surely took longer; None beyond all."""
        return next((edge for edge in self.buckets.get(role, ()) if edge >= seconds), None)


@cache
def _catalog() -> dict[str, dict[tuple[int, int, int], EngineMetrics]]:
    """Engine name -> release -> all that is known of its metrics."""
    known: dict[str, dict[tuple[int, int, int], EngineMetrics]] = {}
    listed = [(*title.partition(" ")[::2], entry) for title, entry in entries("metrics.yaml", MetricsEntry).items()]
    for name, version, entry in sorted(listed, key=lambda found: release(found[1])):
        versions = known.setdefault(name, {})
        before = next(reversed(versions.values()), EngineMetrics())
        changed: dict[str, Any] = {
            part: {**getattr(before, part), **getattr(entry, part)} for part in ("names", "buckets", "edges_by")
        }
        versions[release(version)] = EngineMetrics(**changed, without=entry.without)
    return known


def engine_metrics(engine: Engine) -> EngineMetrics:
    """The metrics of `engine`, by the nearest entry before it."""
    versions = _catalog().get(engine.name, {})
    earlier = [version for version in versions if version <= engine.release]
    if not earlier:
        return EngineMetrics(without=f"What {engine.name} {engine.version} says on /metrics is not known.")
    return versions[max(earlier)]
