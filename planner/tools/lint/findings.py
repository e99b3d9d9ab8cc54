"""Lint findings, and the recorded changes of engines (`catalogs/flags/changes.yaml`)."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from pydantic import Field

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.readers import read_yaml
from planner.core.versions import Version
from planner.engines.cli_options import FLAGS_DIR, get_cli_options, load_flag_lists

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
    "unread",
]
VERDICTS_TO_FIX = ("removed", "renamed", "unknown", "wrong value", "contradicts", "risky", "unread")
"""Verdicts that call for a fix; the others only inform."""


ENVIRONMENT_OPTIONS = ("--api-key", "--hf-token")
"""Options of secrets that engines also read from the environment, where no other user sees them."""


@dataclass(frozen=True)
class LintFinding:
    """A finding about one item of a command."""

    kind: Literal["flag", "setting", "environment", "metric", "word"]
    name: str
    written: str
    verdict: LintVerdict
    why: str = ""
    instead: str = ""
    refused: bool = False  # the server does not start with it
    rule: str = ""  # of the catalog, that says so

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name[:80])

    @property
    def needs_fix(self) -> bool:
        """Whether the verdict calls for a fix."""
        return self.verdict in VERDICTS_TO_FIX

    @property
    def advice(self) -> str:
        """What to write instead, as reports say it; empty without any."""
        # advice starts with "nothing" for no option
        instead = re.sub(r"^nothing(: |$)", r"leave it out\1", self.instead)
        return f"instead: {instead}" if instead else ""


ReportVerdict = Literal["ok", "at_risk", "mend"]
LINT_EXIT_CODES: dict[ReportVerdict, int] = {"ok": 0, "at_risk": 3, "mend": 1}
"""Exit codes of `headroom lint`."""


def judge_findings(findings: Iterable[LintFinding]) -> ReportVerdict:
    """Judge findings: `mend` if one has to be fixed, `at_risk` if one is risky or was not read."""
    verdicts = {finding.verdict for finding in findings if finding.needs_fix}
    return "mend" if verdicts - {"risky", "unread"} else "at_risk" if verdicts else "ok"


def merge_findings(
    findings: Iterable[LintFinding], more: Iterable[LintFinding]
) -> tuple[LintFinding, ...]:
    """Return the findings, with those of `more` in place of risks and notes on the same item."""
    merged = {(finding.kind, finding.name): finding for finding in findings}
    for finding in more:
        previous = merged.get((finding.kind, finding.name))
        is_gone = previous and (previous.verdict, finding.verdict) == ("renamed", "removed")
        if previous is None or not previous.needs_fix or previous.verdict == "risky" or is_gone:
            merged[finding.kind, finding.name] = finding
    return tuple(merged.values())


class OptionChange(StrictEntry):
    """The change of one name in `catalogs/flags/changes.yaml`, whose head explains every field."""

    becomes: str | None = None
    instead: str = ""
    idle_from: Version | None = None
    old_from: Version | None = None
    falls_back: tuple[Version, Version] | None = None
    source: str | None = None
    date: str | None = None

    @property
    def verdict(self) -> LintVerdict:
        """The verdict on a name that a version no longer has."""
        is_key = re.match(r"--[\w-]+\.", self.becomes or "")
        return "renamed" if self.becomes and not is_key else "removed"

    @property
    def advice(self) -> str:
        """What to write instead; empty if there is no advice."""
        return self.instead or self.becomes or ""


class EngineChanges(StrictEntry):
    """The recorded changes of one engine."""

    flags: dict[str, OptionChange] = Field(default_factory=dict)
    environment: dict[str, OptionChange] = Field(default_factory=dict)
    metrics: dict[str, OptionChange] = Field(default_factory=dict)


@cache
def load_engine_changes(engine: str) -> EngineChanges:
    """Return the changes of `engine`; `PlannerError` names file, entry and field of a mistake."""
    data = read_yaml(FLAGS_DIR / "changes.yaml").get(engine, {})
    return validate_entry(EngineChanges, data, f"flags/changes.yaml, entry {engine}")


def judge_presence(
    finding: LintFinding, having: Sequence[Version], engine: str, version: Version,
    change: OptionChange, listed: Sequence[Version] = (),
) -> LintFinding | None:  # fmt: skip
    """Judge a name by the versions that have it, of those that are listed; None if it is never there."""
    versions = listed or load_flag_lists(engine).versions
    nearest = max((v for v in versions if v <= version), default=versions[0])
    if not listed:
        nearest = get_cli_options(engine, version).version
    following = next((v for v in versions if v > nearest), None) if nearest != version else None
    if nearest in having:
        verdict, why = _judge_accepted(change, version)
        if verdict == "ok" and following and following not in having:
            between = f"in {nearest}, not in {following}: {version} is between them"
            return replace(finding, verdict="risky", why=between, instead=change.advice)
        return replace(finding, verdict=verdict, why=why, instead=change.advice if why else "")
    if following in having:
        return replace(finding, why=f"not in {nearest}, in {following}: {version} is between them")
    if earlier := [v for v in versions if v in having and v < nearest]:
        first = next(v for v in versions if v > earlier[-1])
        why = f"gone since {first}, if not before; {earlier[-1]} had it"
        return replace(finding, verdict=change.verdict, why=why, instead=change.advice or "nothing")
    if change.advice:
        why = "versions before all lists had it"
        return replace(finding, verdict=change.verdict, why=why, instead=change.advice)
    why = f"it comes with {having[0]}, or shortly before" if having else ""
    return replace(finding, verdict="unknown", why=why) if having else None


def _judge_accepted(change: OptionChange, version: Version) -> tuple[LintVerdict, str]:
    """Return verdict and reason for an option that the version accepts."""
    if change.falls_back and change.falls_back[0] <= version < change.falls_back[1]:
        return (
            "risky",
            "engine V1 does not have it: the server falls back to the slower V0, or ends",
        )
    if change.idle_from and version >= change.idle_from:
        return "useless", f"it does nothing since {change.idle_from}"
    if change.old_from and version >= change.old_from:
        return "renamed", f"it is taken with a warning since {change.old_from}, and will go"
    return "ok", ""
