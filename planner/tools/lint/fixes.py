"""Rewrite a command for its version: drop removed options and rename renamed ones."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from planner.core.redaction import MASK
from planner.engines.cli_options import ParsedOption, get_cli_options, load_flag_lists
from planner.engines.engine_args import spell_option
from planner.tools.lint.findings import (
    ENVIRONMENT_OPTIONS,
    LintFinding,
    load_engine_changes,
)
from planner.tools.lint.option_checks import (
    CheckedCommand,
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
        gone, added = ([one for one in a if one not in b] for a, b in ((old, new), (new, old)))
        return (*(f"- {one}" for one in gone), *(f"+ {one}" for one in added))


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
        if argument in remaining:
            words += _spell_argument(checked, argument, remaining.pop(argument))
        elif name.replace("_", "-") not in ENVIRONMENT_OPTIONS:
            finding = findings.get(name)
            is_wrong = finding and finding.verdict != "ok"
            words += _replace_option(checked, meant, finding) if finding and is_wrong else [
                meant.written, *meant.words
            ]  # fmt: skip
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
    variables = [
        f"{name if name.isupper() else MASK}={command.shown.show_variable(name, value)}"
        for name, value in command.environment.items()
    ]
    shown = (map(quote_word, command.shown.list_words(words)) for words in listed)
    return [*map(" ".join, shown), *variables]


def _replace_option(
    checked: CheckedCommand, option: ParsedOption, finding: LintFinding
) -> list[str]:
    """Return an option under its new name or at a safer value.

    The words are empty if the option is removed or has no effect; else they stay as they were.
    """
    advice = finding.instead.split()
    is_spelled = "..." not in advice and advice[:1] in [[one] for one in checked.options.spellings]
    may_be_another = finding.verdict in ("removed", "renamed", "wrong value")
    if is_spelled and len(advice) == 2 and (may_be_another or advice[0] == finding.name):
        return advice
    if is_spelled and len(advice) == 1 and finding.verdict == "wrong value":
        return advice  # --enable-x=false is --no-enable-x
    if is_spelled and len(advice) == 1 and finding.verdict in ("renamed", "unknown"):
        return [*advice, *option.words]
    # what another option took over is for its owner to decide
    is_gone = finding.verdict == "removed" and finding.instead.startswith("nothing")
    is_idle = finding.verdict == "useless" or re.match(r"leave it out(:|$)", finding.instead)
    return [] if (is_gone and option.option is None) or is_idle else [option.written, *option.words]


def _spell_argument(checked: CheckedCommand, argument: str, value: Any) -> list[str]:
    """Return an argument as an option of this version; empty if the version has none."""
    options = checked.options.by_spelling.values()
    option = next((option for option in options if option.argument == argument), None)
    is_idle = value is False and option is not None and option.default == "off"
    return spell_option(option, value) if option and not is_idle else []
