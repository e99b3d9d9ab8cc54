"""What another version makes of a command: its verdicts there, and the defaults that it leaves open."""

from collections.abc import Iterator
from typing import Any

from planner.engines.cli_options import CliOption, get_cli_options
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.option_checks import (
    VERSIONED_DEFAULTS,
    CheckedCommand,
    check_command,
    find_engine_version,
)


def check_upgrade(judged: CheckedCommand, to: str) -> list[LintFinding]:
    """What `to` changes for a command: its verdicts, and the defaults that it leaves open."""
    now = {(finding.kind, finding.name): finding for finding in judged.findings}
    then = check_command(judged.command, to).findings
    changed = [one for one in then if one.verdict != "ok" and one != now.get((one.kind, one.name))]
    listed = list(_compare_recorded_defaults(judged, to))
    named = {one.name for one in listed}
    return [
        *changed,
        *listed,
        *(one for one in _compare_catalog_defaults(judged, to) if one.name not in named),
    ]


def _compare_recorded_defaults(judged: CheckedCommand, to: str) -> Iterator[LintFinding]:
    """Defaults that differ between the lists of two versions."""
    old, new = judged.options, get_cli_options(judged.command.engine, to)
    for name in dict.fromkeys(option.name for option in old.by_spelling.values()):
        if (
            name not in new.by_spelling
            or old[name].argument in judged.as_meant.values
            or old[name].kind == "json"
        ):
            continue
        before, after = old[name].default, new[name].default
        if before != after and before and after:
            yield _make_default_change(name, before, after, _keep_default(new[name], before))


def _compare_catalog_defaults(judged: CheckedCommand, to: str) -> Iterator[LintFinding]:
    """Defaults that `catalogs/engines.yaml` has by version."""
    first, second = (
        find_engine_version(judged.command.engine, version) for version in (judged.version, to)
    )
    if judged.command.engine != "vllm" or first is None or second is None:
        return
    new = get_cli_options("vllm", to)
    for argument, fact in VERSIONED_DEFAULTS.items():
        name, before, after = (
            f"--{argument.replace('_', '-')}",
            getattr(first.facts, fact),
            getattr(second.facts, fact),
        )
        if argument not in judged.as_meant.values and before != after:
            yield _make_default_change(
                name,
                _format_value(before),
                _format_value(after),
                _keep_default(new[name], _format_value(before)),
            )


def _keep_default(option: CliOption, before: Any) -> str:
    """What keeps the default as it was; empty where the option has no words for it."""
    if before == "on":
        return option.name
    return next(iter(option.negations), "") if before == "off" else f"{option.name} {before}"


def _make_default_change(name: str, before: Any, after: Any, keep: str) -> LintFinding:
    why = f"the default is {after}, it was {before}"
    return LintFinding("flag", name, f"{name} {before} -> {after}", "default changed", why, keep)


def _format_value(value: Any) -> Any:
    return ("off", "on")[value] if isinstance(value, bool) else value
