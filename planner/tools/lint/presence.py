"""Judge names of options, variables, metrics and values by the versions that have them."""

from collections.abc import Sequence
from dataclasses import replace

from planner.core.versions import Version
from planner.engines.cli_options import get_cli_options, load_flag_lists
from planner.tools.lint.findings import LintFinding, LintVerdict, OptionChange


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
