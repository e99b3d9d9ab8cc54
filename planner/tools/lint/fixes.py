"""Rewrite a command for its version: drop removed options and rename renamed ones."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.engines.cli_options import ParsedOption
from planner.tools.lint.findings import (
    ENVIRONMENT_OPTIONS,
    LintFinding,
    load_engine_changes,
)
from planner.tools.lint.option_checks import (
    CheckedCommand,
    find_new_place,
    normalize_variable_value,
)
from planner.tools.lint.server_commands import ServerCommand, quote_word


@dataclass(frozen=True)
class FixedCommand:
    """A fixed command, and the lines that differ: `-` before, `+` after."""

    command: ServerCommand
    diff: tuple[str, ...]


def fix_command(checked: CheckedCommand, settings: Mapping[str, Any] | None = None) -> FixedCommand:
    """Return the command without what its version rejects or ignores.

    `settings` (argument -> value) replace or extend the arguments of the command.
    """
    cli_options, findings = checked.options, {finding.name: finding for finding in checked.findings}
    words, diff = list[str](), list[str]()
    remaining = dict(settings or {})
    for written, meant in zip(checked.as_written.options, checked.as_meant.options, strict=True):
        spelling = (
            meant.written.replace("_", "-") if cli_options.lists.underscores else meant.written
        )
        name = meant.option.name if meant.option and spelling not in findings else spelling
        argument = meant.option.argument if meant.option else ""
        before = [written.written, *written.words]
        is_moved = meant.option is None and find_new_place(name, cli_options)
        if is_moved or argument in checked.moved:
            after: list[str] = []
        elif argument in remaining:
            value = remaining.pop(argument)
            after = _spell_argument(checked, argument, value)
        else:
            finding = findings.get(name)
            after = [meant.written, *meant.words]
            if name.replace("_", "-") in ENVIRONMENT_OPTIONS:
                after = []
            elif finding and finding.verdict != "ok":
                after = _replace_option(checked, meant, name, finding)
        words += after
        diff += _diff_option(checked, before, after)
    for argument, value in checked.merge_moved(checked.as_meant.values).items():
        added = _spell_argument(checked, argument, json.dumps(value))
        words, diff = [*words, *added], [*diff, _format_diff_line(checked, "+", added)]
    environment = dict(checked.command.environment)
    for name, value in checked.command.environment.items():
        finding = findings.get(name)
        if (
            finding is None
            or finding.kind != "environment"
            or finding.verdict not in ("removed", "renamed", "useless")
        ):
            continue
        shown = checked.command.shown.show_variable(name, value)
        diff.append(f"- {name}={shown}")
        del environment[name]
        change = load_engine_changes(checked.command.engine).environment.get(name)
        if change and change.becomes and change.becomes in cli_options.spellings:
            added = [change.becomes, normalize_variable_value(value)]
            words += added
            diff.append(_format_diff_line(checked, "+", added))
    for argument, value in remaining.items():
        added = _spell_argument(checked, argument, value)
        words += added
        diff += [_format_diff_line(checked, "+", added)] if added else []
    model = list(checked.as_meant.positional)
    for finding in checked.findings:
        if finding.kind == "word" and finding.verdict == "contradicts":
            word = next(
                word for word in model if checked.command.shown.show_stray(word) == finding.written
            )
            after = word.split(" ", 1) if word.startswith("--") else []
            diff += [f"- {finding.written}"] + [_format_diff_line(checked, "+", after)] * bool(
                after
            )
            words += after
            model.remove(word)
    argv = (*model, *words)
    return FixedCommand(replace(checked.command, argv=argv, environment=environment), tuple(diff))


def merge_diffs(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """Return two diffs as one, without the lines that the first adds and the second removes."""
    added = {line[2:] for line in first if line.startswith("+ ")}
    undone = {line[2:] for line in second if line.startswith("- ")} & added
    remaining = [line for line in first if not (line.startswith("+ ") and line[2:] in undone)]
    return (
        *remaining,
        *(line for line in second if line[2:] not in undone or line.startswith("+ ")),
    )


def _diff_option(checked: CheckedCommand, before: list[str], after: list[str]) -> list[str]:
    """Return the diff lines of one option, with secrets masked."""
    if before == after:
        return []
    return [_format_diff_line(checked, "-", before)] + (
        [_format_diff_line(checked, "+", after)] if after else []
    )


def _format_diff_line(checked: CheckedCommand, sign: str, words: list[str]) -> str:
    return f"{sign} {' '.join(map(quote_word, checked.command.shown.list_words(words)))}"


def _replace_option(
    checked: CheckedCommand, option: ParsedOption, name: str, finding: LintFinding
) -> list[str]:
    """Return an option under its new name or at a safer value.

    The words are empty if the option is removed or has no effect; else they stay as they were.
    """
    if re.match(r"leave it out(:|$)", finding.instead):
        return []
    if finding.verdict == "wrong value" and finding.instead in checked.options.spellings:
        return [finding.instead]  # --enable-x=false is --no-enable-x
    change = load_engine_changes(checked.command.engine).flags.get(name)
    becomes = change.becomes if change else None
    if finding.verdict == "renamed" and becomes and becomes in checked.options.spellings:
        value = ["ray"] if name == "--worker-use-ray" else list(option.words)
        return [becomes, *value]
    if (
        option.option is None
        and finding.instead in checked.options.spellings
        and finding.verdict == "unknown"
    ):
        return [finding.instead, *option.words]
    if finding.verdict in ("risky", "contradicts") or (
        finding.verdict == "unknown" and option.option and not option.error
    ):
        safer = finding.instead.split()
        return safer if len(safer) == 2 and safer[0] == name else [option.written, *option.words]
    refused = finding.verdict == "removed" and option.option is None
    return [] if refused or finding.verdict == "useless" else [option.written, *option.words]


def _spell_argument(checked: CheckedCommand, argument: str, value: Any) -> list[str]:
    """Return an argument as an option of this version; empty if the version has none."""
    options = checked.options.by_spelling.values()
    option = next((option for option in options if option.argument == argument), None)
    if option is None:
        return []
    if value is True:
        return [option.name]
    if value is False:
        return [option.negations[0]] if option.negations and option.default != "off" else []
    return [option.name, f"{value:g}" if isinstance(value, float) else str(value)]
