"""What can be said of an item of a command, and what came and went of an engine: `catalogs/flags/changes.yaml`."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import Field

from planner.core.catalog import Entry, check, read_yaml
from planner.operations.flags import FLAGS

Verdict = Literal[
    "ok", "removed", "renamed", "unknown", "wrong value", "default changed", "contradicts", "useless", "risky"
]
MEND = ("removed", "renamed", "unknown", "wrong value", "contradicts", "risky")
"""Verdicts after which there is something to mend; the others only tell."""


@dataclass(frozen=True)
class Finding:
    """What is to be said of one item of a command."""

    kind: Literal["flag", "setting", "environment", "metric", "word"]
    name: str
    written: str
    verdict: Verdict
    why: str = ""
    instead: str = ""
    refused: bool = False  # the server ends over it at once

    @property
    def mend(self) -> bool:
        """Something should be done."""
        return self.verdict in MEND


class Change(Entry):
    """What to write instead of one name: `catalogs/flags/changes.yaml`, whose head explains every field."""

    becomes: str | None = None
    instead: str = ""
    idle_from: str | None = None
    old_from: str | None = None
    gone_from: str | None = None
    falls_back: tuple[str, str] | None = None
    source: str | None = None
    date: str | None = None

    @property
    def verdict(self) -> Verdict:
        """On what is gone."""
        return "renamed" if self.becomes else "removed"

    @property
    def advice(self) -> str:
        """What to write; empty where nobody says."""
        return self.instead or self.becomes or ""


class Changes(Entry):
    """One engine's."""

    flags: dict[str, Change] = Field(default_factory=dict)
    settings: dict[str, Change] = Field(default_factory=dict)
    environment: dict[str, Change] = Field(default_factory=dict)
    metrics: dict[str, Change] = Field(default_factory=dict)


@cache
def changes(engine: str) -> Changes:
    """What came and went of `engine`; `PlannerError` names file, entry and field of a mistake."""
    data = read_yaml(FLAGS / "changes.yaml").get(engine, {})
    return check(Changes, data, f"flags/changes.yaml, entry {engine}")


def secret(option: str) -> bool:
    """Whether the value of an option is a secret, which is not repeated and belongs into the environment."""
    return option.replace("_", "-") in ("--api-key", "--hf-token")
