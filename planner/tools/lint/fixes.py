"""The command as it should be written for its version: what is gone left out, what was renamed under its new name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import ParsedOption
from planner.tools.lint.findings import (
    LintFinding,
    OptionChange,
    is_secret_option,
    load_engine_changes,
)
from planner.tools.lint.option_checks import CheckedCommand, normalize_variable_value
from planner.tools.lint.server_commands import ServerCommand, quote_word


@dataclass(frozen=True)
class FixedCommand:
    """A command as it should be, and the lines that differ: `-` as it was, `+` as it should be."""

    command: ServerCommand
    diff: tuple[str, ...]


def fix_command(judged: CheckedCommand, settings: Mapping[str, Any] | None = None) -> FixedCommand:
    """The command without what its version does not take or do, and with `settings` (arguments -> values) in place."""
    cli_options, old = judged.options, {found.name: found for found in judged.findings}
    words, diff, drafting = list[str](), list[str](), dict[str, Any]()
    wanted = dict(settings or {})
    drafts = (
        load_argument_names("vllm").drafting
        if "--speculative-config" in cli_options.spellings
        else {}
    )
    for option, given in zip(judged.as_written.options, judged.as_meant.options, strict=True):
        spelt = given.written.replace("_", "-") if cli_options.lists.underscores else given.written
        name = given.option.name if given.option and spelt not in old else spelt
        argument = given.option.argument if given.option else ""
        was = [option.written, *option.words]
        if given.option is None and name in drafts:
            word = next(iter(given.words), None)
            drafting[drafts[name]] = int(word) if word and word.isdigit() else word
            now: list[str] = []
        elif argument in wanted:
            value = wanted.pop(argument)
            now = _spell_argument(judged, argument, value)
        else:
            found = old.get(name)
            now = [given.written, *given.words]
            now = (
                now
                if found is None or found.verdict == "ok"
                else _replace_option(judged, given, name, found)
            )
            now = [] if is_secret_option(name) else now
        words += now
        diff += _diff_option(name, was, now)
    if drafting:
        made = ["--speculative-config", json.dumps(_convert_draft_options(drafting))]
        words, diff = [*words, *made], [*diff, _format_diff_line("+", made)]
    environment = dict(judged.command.environment)
    for name, value in judged.command.environment.items():
        finding, change = (
            old.get(name),
            load_engine_changes(judged.command.engine).environment.get(name) or OptionChange(),
        )
        if (
            finding is None
            or finding.kind != "environment"
            or finding.verdict not in ("removed", "renamed", "useless")
        ):
            continue
        diff.append(_format_diff_line("-", [f"{name}={value}"]))
        del environment[name]
        if change.becomes and change.becomes in cli_options.spellings:
            words += [change.becomes, normalize_variable_value(value)]
            diff.append(_format_diff_line("+", [change.becomes, normalize_variable_value(value)]))
    for argument, value in wanted.items():
        made = _spell_argument(judged, argument, value)
        words += made
        diff += [_format_diff_line("+", made)] if made else []
    model = list(judged.as_meant.positional)
    for found in judged.findings:
        if found.kind == "word" and found.verdict == "contradicts":
            now = found.written.split(" ", 1) if found.written.startswith("--") else []
            diff += [
                _format_diff_line("-", [found.written]),
                *([_format_diff_line("+", now)] if now else []),
            ]
            words += now
            model.remove(found.written)
    argv = (*model, *words)
    return FixedCommand(replace(judged.command, argv=argv, environment=environment), tuple(diff))


def _diff_option(name: str, was: list[str], now: list[str]) -> list[str]:
    """The lines of a diff for one option; a secret is not repeated."""
    if was == now:
        return []
    shown = [was[0], "..."] if is_secret_option(name) else was
    return [_format_diff_line("-", shown)] + ([_format_diff_line("+", now)] if now else [])


def _format_diff_line(sign: str, words: list[str]) -> str:
    return f"{sign} {' '.join(map(quote_word, words))}"


def _replace_option(
    judged: CheckedCommand, option: ParsedOption, name: str, finding: LintFinding
) -> list[str]:
    """An option under its new name or at a safer value; nothing where it is gone or idle; else as it was."""
    change = load_engine_changes(judged.command.engine).flags.get(name)
    if (
        finding.verdict == "renamed"
        and change
        and change.becomes in judged.options.spellings
        and change.becomes
    ):
        value = ["ray"] if name == "--worker-use-ray" else list(option.words)
        return [change.becomes, *value]
    if (
        option.option is None
        and finding.instead in judged.options.spellings
        and finding.verdict == "unknown"
    ):
        return [finding.instead, *option.words]
    if finding.verdict == "risky" or (
        finding.verdict == "unknown" and option.option and not option.error
    ):
        if finding.instead == "leave it out":
            return []
        safer = finding.instead.split()
        return safer if len(safer) == 2 and safer[0] == name else [option.written, *option.words]
    refused = finding.verdict == "removed" and option.option is None
    return [] if refused or finding.verdict == "useless" else [option.written, *option.words]


def _spell_argument(judged: CheckedCommand, argument: str, value: Any) -> list[str]:
    """An argument as an option of this version."""
    cli_options = judged.options
    option = next(
        (
            cli_option
            for cli_option in cli_options.by_spelling.values()
            if cli_option.argument == argument
        ),
        None,
    )
    if option is None:
        return []
    if value is True:
        return [option.name]
    if value is False:
        return [option.negations[0]] if option.negations and option.default != "off" else []
    return [option.name, f"{value:g}" if isinstance(value, float) else str(value)]


def _convert_draft_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of old options for drafts."""
    if given.get("model") in ("[ngram]", "ngram"):
        return {"method": "ngram", **{key: value for key, value in given.items() if key != "model"}}
    return {"method": "draft_model", **given} if "model" in given else {"method": "ngram", **given}
