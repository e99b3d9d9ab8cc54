"""What an engine runs from some compute capability of a GPU on, by `catalogs/flags/values.yaml`."""

from functools import cache

from pydantic import Field

from planner.core.catalog import SourcedEntry, validate_entry
from planner.core.readers import read_yaml
from planner.core.versions import Version
from planner.engines.cli_options import FLAGS_DIR
from planner.hardware.gpus import Gpu


class VersionedEntry(SourcedEntry):
    """An entry about arguments of some versions."""

    arguments: tuple[str, ...]
    from_: Version | None = Field(default=None, alias="from")
    before: Version | None = None

    def applies_to(self, version: Version) -> bool:
        """Return whether the entry speaks of this version."""
        return (not self.from_ or version >= self.from_) and (
            not self.before or version < self.before
        )


class LeastCapability(VersionedEntry):
    """Least compute capability in `catalogs/flags/values.yaml`, whose head explains every field."""

    values: str
    least: float


@cache
def load_least_capabilities(engine: str) -> tuple[LeastCapability, ...]:
    """Return what `engine` runs from some compute capability on."""
    entries = read_yaml(FLAGS_DIR / "values.yaml")["capabilities"].get(engine, [])
    return tuple(
        validate_entry(
            LeastCapability, entry, f"flags/values.yaml, capabilities, entry {n} of {engine}"
        )
        for n, entry in enumerate(entries, start=1)
    )


def explain_capability(engine: str, value: str, gpu: Gpu, version: Version) -> str:
    """Explain why a GPU's compute capability is too low for a value; empty if it is not."""
    capability = gpu.compute_capability
    for entry in load_least_capabilities(engine):
        is_about = value in entry.values.split() and entry.applies_to(version)
        if is_about and gpu.vendor == "nvidia" and capability and capability < entry.least:
            return (
                f"{value} does not run on {gpu.name} (compute capability {capability}) in {engine}"
                f" {version}; it needs {entry.least}"
            )
    return ""
