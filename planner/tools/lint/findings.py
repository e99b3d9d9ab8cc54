"""What can be said of an item of a command, and what came and went of an engine: `catalogs/flags/changes.yaml`."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import Field

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.readers import read_yaml
from planner.core.versions import Version
from planner.engines.cli_options import FLAGS_DIR

LintVerdict = Literal[
    "ok",
    "removed",
    "renamed",
    "unknown",
    "wrong value",
    "default changed",
    "contradicts",
    "useless",
    "risky",
]
VERDICTS_TO_FIX = ("removed", "renamed", "unknown", "wrong value", "contradicts", "risky")
"""Verdicts after which there is something to mend; the others only tell."""


@dataclass(frozen=True)
class LintFinding:
    """What is to be said of one item of a command."""

    kind: Literal["flag", "setting", "environment", "metric", "word"]
    name: str
    written: str
    verdict: LintVerdict
    why: str = ""
    instead: str = ""
    refused: bool = False  # the server ends over it at once

    @property
    def needs_fix(self) -> bool:
        """Something should be done."""
        return self.verdict in VERDICTS_TO_FIX


class OptionChange(StrictEntry):
    """What to write instead of one name: `catalogs/flags/changes.yaml`, whose head explains every field."""

    becomes: str | None = None
    instead: str = ""
    idle_from: Version | None = None
    old_from: Version | None = None
    gone_from: Version | None = None
    falls_back: tuple[Version, Version] | None = None
    source: str | None = None
    date: str | None = None

    @property
    def verdict(self) -> LintVerdict:
        """On what is gone."""
        return "renamed" if self.becomes else "removed"

    @property
    def advice(self) -> str:
        """What to write; empty where nobody says."""
        return self.instead or self.becomes or ""


class EngineChanges(StrictEntry):
    """One engine's."""

    flags: dict[str, OptionChange] = Field(default_factory=dict)
    settings: dict[str, OptionChange] = Field(default_factory=dict)
    environment: dict[str, OptionChange] = Field(default_factory=dict)
    metrics: dict[str, OptionChange] = Field(default_factory=dict)


@cache
def load_engine_changes(engine: str) -> EngineChanges:
    """What came and went of `engine`; `PlannerError` names file, entry and field of a mistake."""
    data = read_yaml(FLAGS_DIR / "changes.yaml").get(engine, {})
    return validate_entry(EngineChanges, data, f"flags/changes.yaml, entry {engine}")


def is_secret_option(option: str) -> bool:
    """Whether the value of an option is a secret, which is not repeated and belongs into the environment."""
    return option.replace("_", "-") in ("--api-key", "--hf-token")
