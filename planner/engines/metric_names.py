"""Metrics of an engine by version, and the failure modes (`catalogs/failure_modes.yaml`) that they show."""

from collections.abc import Container, Mapping
from functools import cache

from pydantic import Field

from planner.core.catalog import SourcedEntry, StrictEntry, load_catalog
from planner.core.versions import Version
from planner.engines.argument_names import translate_arguments
from planner.engines.engine import Engine, get_engine, load_entries_by_release


class EngineMetricNames(StrictEntry):
    """The metrics of one engine version, by role; `without` explains why there are none."""

    names: dict[str, str | None] = Field(default_factory=dict)
    buckets: dict[str, tuple[float, ...]] = Field(default_factory=dict)  # upper edges, seconds
    without: str = ""


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


class FailureMode(StrictEntry):
    """One failure mode; the head of the catalog explains every field."""

    title: str
    symptom: str
    cause: str
    check: str
    remedy: str
    source: str
    engines: dict[str, str] = Field(default_factory=dict)


class _ShownNames(dict[str, str]):
    """Names of metrics by role, with words for those that an engine does not report."""

    def __missing__(self, role: str) -> str:
        return f"{role} (not reported)"


def load_failure_modes(
    names: Mapping[str, str | None], engine: str = "vllm"
) -> dict[str, FailureMode]:
    """Load all failure modes by key, in the words of an engine.

    Checks have its own metric `names` (by role), a metric that is not reported that of its role;
    arguments have the engine's names, and a remedy of its own comes first.
    """
    shown_names = _ShownNames({role: name for role, name in names.items() if name})

    def translate(text: str) -> str:
        return translate_arguments(text, engine)

    return {
        key: mode.model_copy(
            update={
                "symptom": translate(mode.symptom),
                "cause": translate(mode.cause),
                "check": translate(mode.check.format_map(shown_names)),
                "remedy": " ".join(
                    filter(None, (mode.engines.get(engine), translate(mode.remedy)))
                ),
            }
        )
        for key, mode in load_catalog("failure_modes.yaml", FailureMode).items()
    }
