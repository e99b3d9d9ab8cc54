"""Compare what two versions of an engine make of a command: verdicts and defaults."""

from collections.abc import Iterator
from typing import Any

from planner.engines.cli_options import CliOption, get_cli_options
from planner.tools.lint.consistency import check_model_support
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.option_checks import (
    VERSIONED_DEFAULTS,
    CheckedCommand,
    check_command,
    find_engine_version,
)


def check_upgrade(checked: CheckedCommand, to: str) -> list[LintFinding]:
    """Return what changes for a command at version `to`: new verdicts and changed defaults."""
    current = {(finding.kind, finding.name): finding for finding in checked.findings}
    at_target = find_engine_version(checked.command.engine, to)
    upgraded = (
        *check_command(checked.command, to).findings,
        *check_model_support(checked, at_target),
    )
    changed = [
        finding
        for finding in upgraded
        if finding.verdict != "ok" and finding != current.get((finding.kind, finding.name))
    ]
    recorded = list(_compare_recorded_defaults(checked, to))
    recorded_names = {finding.name for finding in recorded}
    return [
        *changed,
        *recorded,
        *(
            finding
            for finding in _compare_catalog_defaults(checked, to)
            if finding.name not in recorded_names
        ),
    ]


def _compare_recorded_defaults(checked: CheckedCommand, to: str) -> Iterator[LintFinding]:
    """Yield the defaults that differ between the option lists of two versions."""
    old_options, new_options = checked.options, get_cli_options(checked.command.engine, to)
    for name in dict.fromkeys(option.name for option in old_options.by_spelling.values()):
        if (
            name not in new_options.by_spelling
            or old_options[name].argument in checked.as_meant.values
            or old_options[name].kind == "json"
        ):
            continue
        before, after = old_options[name].default, new_options[name].default
        if before != after and before and after:
            yield _make_default_change(
                name, before, after, _keep_default(new_options[name], before)
            )


def _compare_catalog_defaults(checked: CheckedCommand, to: str) -> Iterator[LintFinding]:
    """Yield the changed defaults that `catalogs/engines.yaml` has by version."""
    first, second = (
        find_engine_version(checked.command.engine, version) for version in (checked.version, to)
    )
    if checked.command.engine != "vllm" or first is None or second is None:
        return
    new = get_cli_options("vllm", to)
    for argument, fact in VERSIONED_DEFAULTS.items():
        name, before, after = (
            f"--{argument.replace('_', '-')}",
            getattr(first.facts, fact),
            getattr(second.facts, fact),
        )
        if argument not in checked.as_meant.values and before != after:
            yield _make_default_change(
                name,
                _format_value(before),
                _format_value(after),
                _keep_default(new[name], _format_value(before)) if name in new.spellings else "",
            )


def _keep_default(option: CliOption, before: Any) -> str:
    """Return the option that keeps the old default; empty if the option cannot express it."""
    if before == "on":
        return option.name
    return next(iter(option.negations), "") if before == "off" else f"{option.name} {before}"


def _make_default_change(name: str, before: Any, after: Any, keep: str) -> LintFinding:
    why = f"the default is {after}, it was {before}"
    return LintFinding("flag", name, f"{name} {before} -> {after}", "default changed", why, keep)


def _format_value(value: Any) -> Any:
    return ("off", "on")[value] if isinstance(value, bool) else value
