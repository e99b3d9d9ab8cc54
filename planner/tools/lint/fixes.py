"""Rewrite a command for its version: drop removed options and rename renamed ones."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

from planner.engines.cli_options import ParsedOption, get_cli_options, load_flag_lists
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
    """A fixed command, and the one that it is made of."""

    before: ServerCommand
    command: ServerCommand

    @cached_property
    def diff(self) -> tuple[str, ...]:
        """The parts that differ, as they are shown: `-` before, `+` after."""
        old, new = _list_parts(self.before), _list_parts(self.command)
        lines = list[str]()
        for tag, i, end, j, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            fresh = new[j:last] if tag != "equal" else []
            for part in old[i:end] if tag != "equal" else ():
                lines.append(f"- {part}")
                is_pair = fresh and (end - i == last - j or fresh[0].split()[0] == part.split()[0])
                lines += [f"+ {fresh.pop(0)}"] if is_pair else []
            lines += [f"+ {part}" for part in fresh]
        return tuple(lines)


def fix_command(
    checked: CheckedCommand, settings: Mapping[str, Any] | None = None
) -> ServerCommand:
    """Return the command without what its version rejects or ignores.

    `settings` (argument -> value) replace or extend the arguments of the command.
    """
    cli_options, findings = checked.options, {finding.name: finding for finding in checked.findings}
    words, remaining = list[str](), dict(settings or {})
    for meant in checked.as_meant.options:
        spelling = (
            meant.written.replace("_", "-") if cli_options.lists.underscores else meant.written
        )
        name = meant.option.name if meant.option and spelling not in findings else spelling
        argument = meant.option.argument if meant.option else ""
        is_moved = meant.option is None and find_new_place(name, cli_options)
        if argument in remaining:
            words += _spell_argument(checked, argument, remaining.pop(argument))
        elif not (
            is_moved or argument in checked.moved or name.replace("_", "-") in ENVIRONMENT_OPTIONS
        ):
            finding = findings.get(name)
            is_wrong = finding and finding.verdict != "ok"
            words += _replace_option(checked, meant, name, finding) if finding and is_wrong else [
                meant.written, *meant.words
            ]  # fmt: skip
    for argument, value in checked.merge_moved(checked.as_meant.values).items():
        words += _spell_argument(checked, argument, json.dumps(value))
    environment = dict(checked.command.environment)
    for finding in checked.findings:
        is_gone = finding.verdict in ("removed", "renamed", "useless")
        if finding.kind == "environment" and is_gone and finding.name in environment:
            value = environment.pop(finding.name)
            change = load_engine_changes(checked.command.engine).environment.get(finding.name)
            if change and change.becomes and change.becomes in cli_options.spellings:
                words += [change.becomes, normalize_variable_value(value)]
    for argument, value in remaining.items():
        words += _spell_argument(checked, argument, value)
    model = list(checked.as_meant.positional)
    wrong = {
        one.written
        for one in checked.findings
        if one.kind == "word" and one.verdict == "contradicts"
    }
    for word in checked.as_meant.positional:
        if checked.command.shown.show_stray(word) in wrong:
            model.remove(word)
            words += word.split(" ", 1) if word.startswith("--") else []
    return replace(checked.command, argv=(*model, *words), environment=environment)


def _list_parts(command: ServerCommand) -> list[str]:
    """List the words and options of a command, and its variables, as they are shown."""
    parsed = get_cli_options(command.engine, load_flag_lists(command.engine).versions[-1]).parse(
        command.argv
    )
    listed = [[word] for word in parsed.positional] + [
        [one.written, *one.words] for one in parsed.options
    ]
    variables = [f"{k}={command.shown.show_variable(k, v)}" for k, v in command.environment.items()]
    shown = (map(quote_word, command.shown.list_words(words)) for words in listed)
    return [*map(" ".join, shown), *variables]


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
