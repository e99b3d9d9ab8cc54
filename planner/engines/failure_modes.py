"""Failure modes of serving: symptom, cause, check and remedy (`catalogs/failure_modes.yaml`)."""

from collections.abc import Mapping

from planner.core.catalog import StrictEntry, load_catalog


class FailureMode(StrictEntry):
    """One failure mode; the head of the catalog explains every field."""

    title: str
    symptom: str
    cause: str
    check: str
    remedy: str
    source: str


def load_failure_modes(names: Mapping[str, str | None]) -> dict[str, FailureMode]:
    """Load all failure modes by key, with the engine's own metric `names` (by role) in the checks.

    A metric that is not reported keeps the name of its role.
    """
    shown_names = {role: name or f"{role} (not reported)" for role, name in names.items()}
    return {
        key: mode.model_copy(update={"check": mode.check.format_map(shown_names)})
        for key, mode in load_catalog("failure_modes.yaml", FailureMode).items()
    }
