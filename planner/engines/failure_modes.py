"""Failure modes of serving: symptom, cause, check and remedy (`catalogs/failure_modes.yaml`)."""

from collections.abc import Mapping

from pydantic import Field

from planner.core.catalog import StrictEntry, load_catalog
from planner.engines.argument_names import translate_arguments


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
