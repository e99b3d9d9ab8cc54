"""The options of an engine's launcher at a version, and what its own parser would read in a command line.

`catalogs/flags/` holds them, and its `lists.yaml` says how they are written down. Nothing is run.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from planner.core.catalog import CATALOG_DIR, SourcedEntry, load_catalog
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.readers import parse_json, read_csv_lines
from planner.core.units import MIB
from planner.core.versions import Version

FLAGS_DIR = CATALOG_DIR / "flags"
FLAG_COLUMNS = ["option", "also", "off", "takes", "default", "choices", "first", "last"]
VALUE_KINDS = (
    "nothing",
    "bool",
    "int",
    "float",
    "text",
    "json",
    "json or text",
    "size",
    "size or auto",
)
_SIZE_SUFFIXES = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


class FlagLists(SourcedEntry):
    """One engine's lists: `catalogs/flags/lists.yaml`."""

    versions: tuple[Version, ...]
    parser: Literal["argparse", "click", "clap"]
    underscores: bool


@dataclass(frozen=True)
class CliOption:
    """One option, as it was from version `first` to version `last` of the lists."""

    name: str
    aliases: tuple[str, ...]
    negations: tuple[str, ...]
    kind: str
    count: str
    default: str
    choices: tuple[str, ...]
    first: Version
    last: Version

    @property
    def argument(self) -> str:
        """The engine's own name of what the option sets: max_num_seqs for --max-num-seqs."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All that it can be called."""
        return self.name, *self.aliases, *self.negations


@dataclass(frozen=True)
class ParsedOption:
    """An option in a command line: as `written`, the words it took, what they mean or what is wrong with them."""

    written: str
    words: tuple[str, ...] = ()
    option: CliOption | None = None
    value: Any = None
    error: str = ""

    def __str__(self) -> str:
        return " ".join((self.written, *self.words))


@dataclass(frozen=True)
class ParsedCommandLine:
    """A command line as its parser reads it: options in their order, and the words that belong to none."""

    options: tuple[ParsedOption, ...]
    positional: tuple[str, ...]

    @property
    def errors(self) -> tuple[str, ...]:
        """Why the launcher would end at once, a sentence for each reason."""
        return tuple(option.error for option in self.options if option.error)

    @property
    def values(self) -> dict[str, Any]:
        """Argument -> value; the last word counts, and parts of one JSON value are joined."""
        found: dict[str, Any] = {}
        for option in self.options:
            if option.option and not option.error:
                name = option.option.argument
                joined = isinstance(option.value, dict) and isinstance(found.get(name), dict)
                found[name] = _merge_json(found[name], option.value) if joined else option.value
        return found


@dataclass(frozen=True)
class CliOptions:
    """The options that `engine` takes at a version, by the list of `version`; `note` where that is another one."""

    engine: str
    version: Version
    note: str
    lists: FlagLists
    by_spelling: Mapping[str, CliOption] = field(repr=False)

    @property
    def spellings(self) -> frozenset[str]:
        """Everything that an option can be called."""
        return frozenset(self.by_spelling)

    def find_spellings(self, written: str) -> list[str]:
        """The spellings that `written` may stand for: itself, or all that it is the beginning of."""
        word = self._normalize_spelling(written)
        if word in self.by_spelling:
            return [word]
        if (
            word.startswith("--no-")
            and (pair := self.by_spelling.get("--" + word[5:]))
            and pair.negations
        ):
            return [
                word
            ]  # vLLM 0.33.0 utils/argparse_utils.py:120: still taken beside --disable-...
        if self.lists.parser != "argparse" or not word.startswith("--") or len(word) < 3:
            return []
        begun = [spelling for spelling in self.by_spelling if spelling.startswith(word)]
        meant = {
            (self.by_spelling[spelling].name, spelling in self.by_spelling[spelling].negations)
            for spelling in begun
        }
        return (
            begun[:1] if len(meant) == 1 else begun
        )  # one option, and not both its on and its off

    def _normalize_spelling(self, word: str) -> str:
        return word.replace("_", "-") if self.lists.underscores and word.startswith("--") else word

    def __getitem__(self, spelling: str) -> CliOption:
        """The option behind a spelling that `find` gave."""
        return (
            self.by_spelling.get(spelling)
            or self.by_spelling["--" + spelling.removeprefix("--no-")]
        )

    def parse(self, argv: Sequence[str]) -> ParsedCommandLine:
        """What the launcher's parser reads in `argv`, the words after the program's own."""
        given, positional, words = [], [], list(_expand_optimization_levels(argv, self))
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if word == "--":
                positional += words[at:]
                break
            if not self._is_option(word):
                positional.append(word)
                continue
            option, at = self._read_option(word, words, at)
            given.append(option)
        return ParsedCommandLine(tuple(given), tuple(positional))

    def _is_option(self, word: str) -> bool:
        """Whether a parser takes the word for an option: not a number below zero, nor words with a space in them."""
        if not word.startswith("-") or len(word) < 2 or re.fullmatch(r"-\d+|-\d*\.\d+", word):
            return False
        return " " not in word.partition("=")[0]

    def _read_option(self, word: str, words: Sequence[str], at: int) -> tuple[ParsedOption, int]:
        """The option `word` with what it takes of the `words` from `at` on; where the next one begins."""
        written, tied, rest = word.partition("=")
        name, dot, key = written.partition(".")
        lines = self.find_spellings(name)
        if len(lines) != 1 or (dot and "json" not in self[lines[0]].kind):
            option, dot = _find_in_other_versions(self.engine, self._normalize_spelling(name)), ""
            error = (
                f"{name} may be {' or '.join(lines[:4])}"
                if len(lines) > 1
                else f"unknown option {written}"
            )
        else:
            option, error = self[lines[0]], ""
        kind, count = (option.kind, option.count) if option else ("text", "?")
        if tied:
            taken, end = [rest], at
        else:
            end = at + _count_option_words(words[at:], kind, "" if dot else count, self._is_option)
            taken = list(words[at:end])
        given = ParsedOption(written, tuple(taken), None if error else option, error=error)
        if error or option is None:
            return given, end
        off = lines[0] not in (option.name, *option.aliases)
        value, error = (
            _parse_dotted_json(key, taken)
            if dot
            else _parse_option_value(option, taken, bool(tied), off)
        )
        return (
            ParsedOption(
                written, tuple(taken), option, value, f"{written}: {error}" if error else ""
            ),
            end,
        )


def _expand_optimization_levels(argv: Sequence[str], options: CliOptions) -> Iterator[str]:
    """The words, with vLLM's -O2, -O=2 and -O 2 as the option of that version."""
    name = "--optimization-level" if "--optimization-level" in options.by_spelling else "-O"
    words = iter(range(len(argv)))
    for at in words:
        level = re.fullmatch(r"-O=?(\d+)", argv[at])
        if options.engine == "vllm" and level:
            yield from (name, level[1])
        elif (
            options.engine == "vllm"
            and argv[at] == "-O"
            and argv[at + 1 : at + 2]
            and argv[at + 1].isdigit()
        ):
            yield from (name, argv[next(words)])
        else:
            yield argv[at]


def _count_option_words(words: Sequence[str], kind: str, count: str, is_option: Any) -> int:
    """How many of the words an option takes."""
    if kind == "nothing":
        return 0
    end = next((at for at, word in enumerate(words) if is_option(word) or word == "--"), len(words))
    return min(end, 1) if count in ("", "?") else end


def _parse_option_value(
    option: CliOption, taken: Sequence[str], tied: bool, off: bool
) -> tuple[Any, str]:
    """What the words mean to the option, or what is wrong with them."""
    if option.kind == "nothing":
        return not off, f"takes no value, got {taken[0]!r:.80}" if tied else ""
    if not taken and option.count in ("", "+"):
        return None, f"needs {_describe_expected_value(option)}"
    if not taken and option.kind == "bool":
        return True, ""
    values = []
    for word in taken:
        try:
            values.append(_convert_word(option.kind, word))
        except ValueError:
            return None, f"takes {_describe_expected_value(option)}, got {word!r:.80}"
        if option.choices and word not in option.choices and not is_unresolved(word):
            return None, f"takes {_describe_expected_value(option)}, got {word!r:.80}"
    return (values if option.count in ("+", "*") else values[0] if values else None), ""


def is_unresolved(value: Any) -> bool:
    """Whether a value is text that is filled in only where it runs."""
    return isinstance(value, str) and any(mark in value for mark in ("${", "$(", "{{"))


def _describe_expected_value(option: CliOption) -> str:
    """What an option takes, in words."""
    if option.choices:
        return f"one of {', '.join(option.choices[:12])}{', ...' * (len(option.choices) > 12)}"
    kinds = {"int": "a whole number", "float": "a number", "text": "a value", "json": "JSON", "size": "a whole number",
             "bool": "true or false"}  # fmt: skip
    return kinds.get(option.kind.partition(" ")[0], "a value")


def _convert_word(kind: str, word: str) -> Any:
    """A word as its kind; `ValueError` where it is none."""
    if kind == "text" or is_unresolved(word):
        return word
    if kind == "bool":
        return ("false", "true").index(word.lower()) == 1
    if kind == "int":
        return int(word)
    if kind == "float":
        return float(word)
    if kind.startswith("size"):
        if kind.endswith("auto") and word in ("auto", "-1"):
            return word
        match = re.fullmatch(r"(-?\d+)|(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])", word)
        if not match:
            raise ValueError(word)
        number, letter = match[2] or match[4], match[3] or match[5]
        return int(match[1]) if match[1] else int(float(number) * _SIZE_SUFFIXES[letter])
    try:
        return parse_json(word, "the value")
    except PlannerError:
        if kind == "json or text":
            return word
        raise ValueError(word) from None


def _parse_dotted_json(key: str, taken: Sequence[str]) -> tuple[Any, str]:
    """`--option.a.b value` as the JSON {"a": {"b": value}}; a `+` at the end makes it a list (vLLM)."""
    if not key or not taken:
        return None, "needs a key and a value"
    try:
        value = json.loads(taken[0])
    except (ValueError, RecursionError):
        value = taken[0]
    keys = key.split(".")[:100]
    if keys[-1].endswith("+"):
        keys[-1], value = keys[-1][:-1], [value]
    for part in reversed(keys):
        value = {part: value}
    return value, ""


def _merge_json(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two JSON objects as one; lists grow, and the second wins."""
    made = dict(first)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(made.get(key), dict):
            made[key] = _merge_json(made[key], value)
        elif isinstance(value, list) and isinstance(made.get(key), list):
            made[key] = [*made[key], *value]
        else:
            made[key] = value
    return made


@cache
def load_flag_lists(engine: str) -> FlagLists:
    """Which versions of `engine` are listed, and how its parser reads; `PlannerError` for an engine without lists."""
    known = load_catalog("flags/lists.yaml", FlagLists)
    if engine not in known:
        raise make_unknown_name_error(engine, known, "engine")
    return known[engine]


@cache
def load_recorded_options(engine: str) -> tuple[CliOption, ...]:
    """All options of all listed versions of `engine`; `PlannerError` names file, line and what is wrong."""
    known = {str(version): version for version in load_flag_lists(engine).versions}
    path, results = FLAGS_DIR / f"{engine}.csv", []
    rows = read_csv_lines(path, MIB)
    if next(rows)[1] != FLAG_COLUMNS:
        raise PlannerError(f"{path.name}: expected the columns {', '.join(FLAG_COLUMNS)}")
    for number, cells in rows:
        where = f"{path.name}, line {number}"
        if len(cells) != len(FLAG_COLUMNS) or cells[6] not in known or cells[7] not in known:
            raise PlannerError(
                f"{where}: expected {len(FLAG_COLUMNS)} cells, the last two of {', '.join(known)}"
            )
        name, also, off, takes, default, choices, first, last = cells
        match = re.fullmatch(rf"({'|'.join(VALUE_KINDS)})([?+*]?)", takes)
        if not match or not name.startswith("--"):
            raise PlannerError(
                f"{where}: {name} takes {takes!r}; accepted: {', '.join(VALUE_KINDS)}, and ?, +"
                " or *"
            )
        spellings = tuple(also.split()), tuple(off.split())
        results.append(
            CliOption(
                name,
                *spellings,
                match[1],
                match[2],
                default,
                tuple(choices.split()),
                known[first],
                known[last],
            )
        )
    return tuple(results)


def _find_in_other_versions(engine: str, spelling: str) -> CliOption | None:
    """The option of any other version, to know how many words it took; None where no version had it."""
    had = list_versions_with_spelling(engine, spelling)
    return _index_by_spelling(engine, had[-1])[spelling] if had else None


@cache
def load_recorded_names(
    what: Literal["environment", "metrics"], engine: str
) -> Mapping[str, tuple[Version, ...]]:
    """Every name that `engine` reads from its environment, or has on /metrics -> the listed versions that know it."""
    known, path = load_flag_lists(engine).versions, FLAGS_DIR / f"{what}.csv"
    texts, recorded_names = list(map(str, known)), dict[str, tuple[Version, ...]]()
    for number, cells in read_csv_lines(path, MIB):
        if cells == ["engine", "name", "first", "last"] or cells[0] != engine:
            continue
        if len(cells) != 4 or not {*cells[2:]} <= {*texts}:
            accepted = f"engine, name, first and last of {', '.join(texts)}"
            raise PlannerError(f"{path.name}, line {number}: expected {accepted}")
        first, last = map(texts.index, cells[2:])
        recorded_names[cells[1]] = recorded_names.get(cells[1], ()) + known[first : last + 1]
    return recorded_names


def list_versions_with_spelling(engine: str, spelling: str) -> list[Version]:
    """The listed versions of `engine` whose parser knows exactly this spelling, in ascending order."""
    return [
        version
        for version in load_flag_lists(engine).versions
        if spelling in _index_by_spelling(engine, version)
    ]


def get_cli_options(engine: str, version: str | Version) -> CliOptions:
    """What `engine` takes at `version`, by the nearest earlier list, or by the first; a nightly build by the last.

    "0.20" is any patch of it, so that the list of 0.20.2 counts.
    """
    lists = load_flag_lists(engine)
    if str(version).startswith("nightly"):
        nearest, is_listed = lists.versions[-1], False
    else:
        release = Version.parse(str(version))
        any_patch = str(version).count(".") == 1
        earlier = (
            listed
            for listed in lists.versions
            if listed <= release or (any_patch and listed.series == release.series)
        )
        nearest = max(earlier, default=lists.versions[0])
        is_listed = nearest == release
    note = "" if is_listed else f"{engine} {version} is read by the options of {nearest}"
    return CliOptions(engine, nearest, note, lists, _index_by_spelling(engine, nearest))


@cache
def _index_by_spelling(engine: str, version: Version) -> Mapping[str, CliOption]:
    """The options of a listed version, by all that they are called."""
    return {
        spelling: option
        for option in load_recorded_options(engine)
        if option.first <= version <= option.last
        for spelling in option.spellings
    }
