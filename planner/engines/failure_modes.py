"""How serving goes wrong: symptom, cause, check and remedy, in the words of `catalogs/failure_modes.yaml`."""

from collections.abc import Mapping

from planner.core.catalog import StrictEntry, load_catalog


class FailureMode(StrictEntry):
    """One way to go wrong; the head of the catalog explains every field."""

    title: str
    symptom: str
    cause: str
    check: str
    remedy: str
    source: str


def load_failure_modes(names: Mapping[str, str | None]) -> dict[str, FailureMode]:
    """Every mode by its key, with the engine's own `names` of metrics by role; one not reported keeps its role."""
    named = {role: name or f"{role} (not reported)" for role, name in names.items()}
    known = load_catalog("failure_modes.yaml", FailureMode)
    return {
        key: mode.model_copy(update={"check": mode.check.format_map(named)})
        for key, mode in known.items()
    }
