"""How serving goes wrong: symptom, cause, check and remedy, in the words of `catalogs/failure_modes.yaml`."""

from collections.abc import Mapping

from planner.core.catalog import Entry, entries


class FailureMode(Entry):
    """One way to go wrong; the head of the catalog explains every field."""

    title: str
    symptom: str
    cause: str
    check: str
    remedy: str
    source: str

    def told(self, names: Mapping[str, str | None]) -> "FailureMode":
        """The same with the engine's own `names` of metrics; a role that it does not report keeps its name."""
        named = {role: name or f"{role} (not reported)" for role, name in names.items()}
        return self.model_copy(update={"check": self.check.format_map(named)})


def failure_modes(names: Mapping[str, str | None]) -> dict[str, FailureMode]:
    """Every mode by its key, with the engine's own `names` of metrics by role."""
    return {key: mode.told(names) for key, mode in entries("failure_modes.yaml", FailureMode).items()}
