"""Check values of a command against `catalogs/flags/values.yaml`: what no engine could start with."""

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
from planner.engines.cli_options import FLAGS_DIR, ParsedCommandLine, is_unresolved
from planner.engines.model_support import VersionedEntry
from planner.tools.lint.findings import LintFinding, OptionChange, judge_presence
from planner.tools.lint.server_commands import ServerCommand
from planner.tools.lint.tree_reader import list_mappings


class ValueBounds(VersionedEntry):
    """Bounds of a number in `catalogs/flags/values.yaml`, whose head explains every field."""

    arguments: tuple[str, ...]
    say: str
    least: int
    most: int | None = None
    also: tuple[int | str, ...] = ()
    times: int = 1

    def accepts(self, value: float | str) -> bool:
        """Return whether an engine takes the value."""
        return value in self.also or (
            not isinstance(value, str)
            and self.least <= value <= (self.most or value)
            and value % self.times == 0
        )

    def __str__(self) -> str:
        upper = f" to {self.most}" if self.most else " or more"
        return f"{self.say}: {self.least}{upper}" + f", a multiple of {self.times}" * (
            self.times > 1
        )


class ValueWords(SourcedEntry):
    """Words of an argument in `catalogs/flags/values.yaml`, whose head explains every field."""

    arguments: tuple[str, ...]
    say: str
    listed: dict[str, str]
    between: str = ""
    hints: dict[str, str] = Field(default_factory=dict)
    unless: str = ""


@cache
def load_value_bounds(engine: str) -> tuple[ValueBounds, ...]:
    """Return the bounds for all engines and for `engine`."""
    data = read_yaml(FLAGS_DIR / "values.yaml")
    return tuple(
        validate_entry(ValueBounds, entry, f"flags/values.yaml, entry {n} of {section}")
        for section in ("all", engine)
        for n, entry in enumerate(data.get(section, []), start=1)
    )


@cache
def load_value_words(engine: str) -> tuple[ValueWords, ...]:
    """Return the words that `engine` knows, by argument."""
    data = read_yaml(FLAGS_DIR / "values.yaml")["words"].get(engine, [])
    return tuple(
        validate_entry(ValueWords, entry, f"flags/values.yaml, words, entry {n} of {engine}")
        for n, entry in enumerate(data, start=1)
    )


def is_accepted_word(engine: str, argument: str, word: str, version: Version) -> bool:
    """Return whether this version takes the word in place of a number."""
    return any(
        word in map(str, bounds.also) and argument in bounds.arguments
        for bounds in load_value_bounds(engine)
        if bounds.applies_to(version)
    )


def check_values(
    parsed: ParsedCommandLine, command: ServerCommand, version: Version
) -> Iterator[LintFinding]:
    """Yield a finding for each value that this version of the engine refuses."""
    engine = command.engine
    for option in parsed.options:
        value = option.value
        if option.option is None or isinstance(value, bool) or is_unresolved(value):
            continue
        name, written = option.option.name, command.shown.show_option(option)
        for bounds in load_value_bounds(engine) if isinstance(value, int | float) else ():
            is_about = option.option.argument in bounds.arguments and bounds.applies_to(version)
            if is_about and not bounds.accepts(value):
                why = f"it takes {bounds}"
                yield LintFinding("flag", name, written, "wrong value", why, refused=True)
        for words in load_value_words(engine):
            for word, shown in _find_words(words, option.option.argument, value):
                place = f"{name} {shown}" if shown else written
                yield from _check_word(words, word, name, place, engine, version)


def _find_words(words: ValueWords, argument: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the words of an option's value that a list is about, each with its place in JSON."""
    for listed in words.arguments:
        name, _, key = listed.partition(".")
        if name != argument:
            continue
        if not key and isinstance(value, str):
            yield value.lower(), ""
        for given in list_mappings(value) if key else ():
            word = given.get(key)
            if isinstance(word, str) and not is_unresolved(word) and not given.get(words.unless):
                yield word, json.dumps({key: word})


def _check_word(
    words: ValueWords, value: str, name: str, written: str, engine: str, version: Version
) -> Iterator[LintFinding]:
    """Yield the finding about a word that its version does not know, or may not know any more."""
    listed = {Version.parse(release): text.split() for release, text in words.listed.items()}
    having = [one for one in listed if any(fnmatchcase(value, pattern) for pattern in listed[one])]
    earlier = [v for v in listed if v <= version]
    if not earlier and "." in words.arguments[0]:  # of others the parser of that version has a list
        why = f"not checked: the {words.say}s of {engine} are listed from {min(listed)} on"
        yield LintFinding("flag", name, written, "ok", why)
    is_between = version not in listed and version < max(listed)
    if not earlier or (is_between and value in words.between.split()):
        return
    finding, hint = LintFinding("flag", name, written, "ok"), words.hints.get(value, "")
    if judged := judge_presence(finding, having, engine, version, OptionChange(), [*listed]):
        is_refused = judged.verdict != "risky"
        yield from [replace(judged, instead=hint, refused=is_refused)] * judged.needs_fix
        return
    why = f"no {words.say} of {engine} {version}, unless a plugin brings it"
    close = find_closest(value, listed[earlier[-1]], 0.8)
    instead = hint or (close and f"{name} {close}")
    yield replace(finding, verdict="unknown", why=why, instead=instead, refused=True)
