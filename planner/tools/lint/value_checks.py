"""Check words of a command against `catalogs/flags/values.yaml`: with others no engine could start."""

import json
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache

from pydantic import Field

from planner.core.catalog import SourcedEntry, validate_entry
from planner.core.errors import find_closest
from planner.core.readers import read_yaml
from planner.core.versions import Version
from planner.engines.cli_options import FLAGS_DIR, ParsedCommandLine, ParsedOption, is_unresolved
from planner.tools.lint.findings import LintFinding, OptionChange, judge_presence
from planner.tools.lint.server_commands import ServerCommand
from planner.tools.lint.tree_reader import list_mappings


class ValueWords(SourcedEntry):
    """Words of an argument in `catalogs/flags/values.yaml`, whose head explains every field."""

    arguments: tuple[str, ...]
    say: str
    listed: dict[str, str]
    between: str = ""
    hints: dict[str, str] = Field(default_factory=dict)
    unless: str = ""


@cache
def load_value_words(engine: str) -> tuple[ValueWords, ...]:
    """Return the words that `engine` knows, by argument."""
    data = read_yaml(FLAGS_DIR / "values.yaml").get(engine, [])
    return tuple(
        validate_entry(ValueWords, entry, f"flags/values.yaml, entry {n} of {engine}")
        for n, entry in enumerate(data, start=1)
    )


def check_values(
    parsed: ParsedCommandLine, command: ServerCommand, version: Version
) -> Iterator[LintFinding]:
    """Yield a finding for each word that this version of the engine refuses, or may not know."""
    for words in load_value_words(command.engine):
        for option in parsed.options:
            for word, place in _find_words(words, option):
                assert option.option
                name = option.option.name
                written = f"{name} {place}" if place else command.shown.show_option(option)
                finding = LintFinding("flag", name, written, "ok")
                yield from _check_word(words, word, finding, command.engine, version)


def _find_words(words: ValueWords, option: ParsedOption) -> Iterator[tuple[str, str]]:
    """Yield the words of an option's value that a list is about, each with its place in JSON."""
    for name, _, key in (one.partition(".") for one in words.arguments):
        if option.option is None or name != option.option.argument:
            continue
        if not key and isinstance(option.value, str) and not is_unresolved(option.value):
            yield option.value.lower(), ""
        for given in list_mappings(option.value) if key else ():
            word = given.get(key)
            if isinstance(word, str) and not is_unresolved(word) and not given.get(words.unless):
                yield word, json.dumps({key: word})


def _check_word(
    words: ValueWords, word: str, finding: LintFinding, engine: str, version: Version
) -> Iterator[LintFinding]:
    """Yield the finding about a word that its version does not know, or may not know any more."""
    listed = {Version.parse(release): text.split() for release, text in words.listed.items()}
    is_between = version not in listed and version < max(listed)
    if version < min(listed) and "." in words.arguments[0]:  # no parser has a list of these
        why = f"not checked: the {words.say}s of {engine} are listed from {min(listed)} on"
        yield replace(finding, why=why)
    if version < min(listed) or (is_between and word in words.between.split()):
        return
    having = [one for one in listed if any(fnmatchcase(word, pattern) for pattern in listed[one])]
    hint = words.hints.get(word, "")
    judged = judge_presence(finding, having, engine, version, OptionChange(), [*listed])
    if judged is None:
        close = find_closest(word, listed[max(one for one in listed if one <= version)], 0.8)
        why = f"no {words.say} of {engine} {version}, unless a plugin brings it"
        judged = replace(finding, verdict="unknown", why=why)
        hint = hint or (close and f"{finding.name} {close}")
    if judged.needs_fix:
        yield replace(judged, instead=hint, refused=judged.verdict != "risky")
