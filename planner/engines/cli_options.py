"""Options of an engine's launcher by version, and a parser that reads command lines as it does.

The options are in `catalogs/flags/`; `lists.yaml` there explains their format. Nothing is executed.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from planner.core.catalog import CATALOG_DIR, SourcedEntry, load_catalog
from planner.core.errors import PlannerError, make_unknown_name_error
from planner.core.readers import parse_json, read_csv_lines
from planner.core.units import MIB
from planner.core.versions import Version, is_nightly

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
_PLACEHOLDER_PATTERN = re.compile(r"\$[A-Za-z_{(@*]|\{\{|^<[^<>]+>$")
"""What a shell, Kubernetes, a template or a reader fills in."""
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
    """An engine's entry of `catalogs/flags/lists.yaml`, whose head explains every field."""

    versions: tuple[Version, ...]
    parser: Literal["argparse", "click"]
    underscores: bool


@dataclass(frozen=True)
class CliOption:
    """One option, unchanged from version `first` to version `last` of the lists."""

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
        """The engine's name of the argument that it sets: max_num_seqs for --max-num-seqs."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings: name, aliases and negations."""
        return self.name, *self.aliases, *self.negations


@dataclass(frozen=True)
class ParsedOption:
    """An option of a command line with the words that it takes, and their value or an error.

    The value of an option that only other versions have is what they read.
    """

    written: str
    words: tuple[str, ...] = ()
    option: CliOption | None = None
    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class ParsedCommandLine:
    """A parsed command line: options in their order, and words that belong to none."""

    options: tuple[ParsedOption, ...]
    positional: tuple[str, ...]

    @property
    def errors(self) -> tuple[str, ...]:
        """Reasons for which the launcher would end at once, one sentence each."""
        return tuple(option.error for option in self.options if option.error)

    @property
    def values(self) -> dict[str, Any]:
        """Argument -> value; later options override, parts of one JSON value are merged."""
        values: dict[str, Any] = {}
        for option in self.options:
            if option.option and not option.error:
                name, value = option.option.argument, option.value
                if isinstance(value, dict) and isinstance(values.get(name), dict):
                    value = merge_json(values[name], value)
                values[name] = value
        return values


@dataclass(frozen=True)
class CliOptions:
    """An engine's options by the list of `version`; `note` if another version was requested."""

    engine: str
    version: Version
    note: str
    lists: FlagLists
    by_spelling: Mapping[str, CliOption] = field(repr=False)

    @property
    def spellings(self) -> frozenset[str]:
        """All spellings of all options."""
        return frozenset(self.by_spelling)

    def find_spellings(self, written: str) -> list[str]:
        """Find the spellings that a word may mean: itself, or those that begin with it."""
        word = self._normalize_spelling(written)
        if word in self.by_spelling:
            return [word]
        positive = self.by_spelling.get("--" + word.removeprefix("--no-"))
        if word.startswith("--no-") and positive and positive.negations:
            # vLLM 0.33.0 utils/argparse_utils.py:120: still accepted beside --disable-...
            return [word]
        if self.lists.parser != "argparse" or not word.startswith("--") or len(word) < 3:
            return []
        matches = [spelling for spelling in self.by_spelling if spelling.startswith(word)]
        meanings = {
            (self.by_spelling[spelling].name, spelling in self.by_spelling[spelling].negations)
            for spelling in matches
        }
        return matches[:1] if len(meanings) == 1 else matches

    def _normalize_spelling(self, word: str) -> str:
        return word.replace("_", "-") if self.lists.underscores and word.startswith("--") else word

    def find_argument(self, name: str) -> CliOption | None:
        """Find the option that sets an argument such as max_num_seqs; None if there is none."""
        spellings = (f"--{name.replace('_', '-')}", f"--{name}")
        options = filter(None, map(self.by_spelling.get, spellings))
        return next((each for each in options if each.negations[:1] != spellings[:1]), None)

    def __getitem__(self, spelling: str) -> CliOption:
        """Get the option of a spelling that `find_spellings` returned."""
        return (
            self.by_spelling.get(spelling)
            or self.by_spelling["--" + spelling.removeprefix("--no-")]
        )

    def parse(self, argv: Sequence[str]) -> ParsedCommandLine:
        """Parse the words after the program's own as the launcher does."""
        options, positional, words = [], [], list(_expand_optimization_levels(argv, self))
        index = 0
        while index < len(words):
            word = words[index]
            index += 1
            if word == "--":
                positional += words[index:]
                break
            if not self._is_option(word):
                positional.append(word)
                continue
            option, index = self._read_option(word, words, index)
            options.append(option)
        return ParsedCommandLine(tuple(options), tuple(positional))

    def _is_option(self, word: str) -> bool:
        """Return whether the parser takes a word for an option: no negative number, no space."""
        if not word.startswith("-") or len(word) < 2 or re.fullmatch(r"-\d+|-\d*\.\d+", word):
            return False
        return " " not in word.partition("=")[0]

    def _read_option(self, word: str, words: Sequence[str], start: int) -> tuple[ParsedOption, int]:
        """Read the option `word` with its values in `words[start:]`; return it and their end."""
        written, equals, text = word.partition("=")
        if written[:2] in self.by_spelling and written not in self.by_spelling:  # -qfp8
            written, equals, text = word[:2], "=", word[2:]
        name, dot, key = written.partition(".")
        spellings = self.find_spellings(name)
        if len(spellings) != 1 or (dot and "json" not in self[spellings[0]].kind):
            spelling = self._normalize_spelling(name)
            had = list_versions_with_spelling(
                self.engine, spelling
            )  # it takes words as it did then
            option, dot = _index_by_spelling(self.engine, had[-1])[spelling] if had else None, ""
            error = (
                f"{name} may be {' or '.join(spellings[:4])}"
                if len(spellings) > 1
                else f"unknown option {written}"
            )
        else:
            option, error = self[spellings[0]], ""
        kind, count = (option.kind, option.count) if option else ("text", "?")
        values: tuple[str, ...] = (text,)
        end = start
        if not equals:
            end += _count_option_words(words[start:], kind, "" if dot else count, self._is_option)
            values = tuple(words[start:end])
        if error or option is None:
            value = _parse_option_value(option, values, bool(equals), False)[0] if option else None
            return ParsedOption(written, values, value=value, error=error), end
        if dot:
            value, error = _parse_dotted_json(key, values)
        else:
            negated = spellings[0] not in (option.name, *option.aliases)
            value, error = _parse_option_value(option, values, bool(equals), negated)
        return ParsedOption(written, values, option, value, error and f"{written}: {error}"), end


def _expand_optimization_levels(argv: Sequence[str], options: CliOptions) -> Iterator[str]:
    """Yield the words, with vLLM's -O2, -O=2 and -O 2 as the option of that version."""
    name = "--optimization-level" if "--optimization-level" in options.by_spelling else "-O"
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        level = re.fullmatch(r"-O=?(\d+)", word)
        is_level = level is not None or (word == "-O" and following.isdigit())
        values = (level[1],) if level else ()
        yield from (name, *values) if options.engine == "vllm" and is_level else (word,)


def _count_option_words(
    words: Sequence[str], kind: str, count: str, is_option: Callable[[str], bool]
) -> int:
    """Count the words that an option takes."""
    if kind == "nothing":
        return 0
    ends = (index for index, word in enumerate(words) if is_option(word) or word == "--")
    end = next(ends, len(words))
    return min(end, 1) if count in ("", "?") else end


def _parse_option_value(
    option: CliOption, words: Sequence[str], has_equals_sign: bool, negated: bool
) -> tuple[Any, str]:
    """Return the value of an option and an error, which is empty if the words are valid."""
    if option.kind == "nothing":
        return (
            not negated,
            "takes no value" if has_equals_sign else "",
        )
    if not words and option.count in ("", "+"):
        return None, f"needs {_describe_expected_value(option)}"
    if not words and option.kind == "bool":
        return True, ""
    values = []
    for word in words:
        try:
            values.append(_convert_word(option.kind, word))
        except ValueError:
            return None, f"takes {_describe_expected_value(option)}"
        if option.choices and word not in option.choices and not is_unresolved(word):
            return None, f"takes {_describe_expected_value(option)}"
    return (values if option.count in ("+", "*") else values[0] if values else None), ""


def is_unresolved(value: object) -> bool:
    """Return whether a value is text with placeholders that are filled in at run time."""
    return isinstance(value, str) and _PLACEHOLDER_PATTERN.search(value) is not None


def _describe_expected_value(option: CliOption) -> str:
    """Describe the values that an option takes."""
    if option.choices:
        return f"one of {', '.join(option.choices[:12])}{', ...' * (len(option.choices) > 12)}"
    return {
        "int": "a whole number",
        "size": "a whole number",
        "float": "a number",
        "json": "JSON",
        "bool": "true or false",
    }.get(option.kind.partition(" ")[0], "a value")


def _convert_word(kind: str, word: str) -> Any:
    """Convert a word to its kind; `ValueError` if it is invalid."""
    if kind == "text" or (is_unresolved(word) and not kind.startswith("json")):
        return word
    if kind == "bool":
        return ("false", "true").index(word.lower()) == 1
    if kind in ("int", "float"):
        return int(word) if kind == "int" else float(word)
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
        if kind == "json or text" or is_unresolved(word):
            return word
        raise ValueError(word) from None


def _parse_dotted_json(key: str, words: Sequence[str]) -> tuple[Any, str]:
    """Parse vLLM's `--option.a.b value` as {"a": {"b": value}}; a final `+` makes it a list."""
    if not key or not words:
        return None, "needs a key and a value"
    try:
        value = json.loads(words[0])
    except (ValueError, RecursionError):
        value = words[0]
    keys = key.split(".")[:100]
    if keys[-1].endswith("+"):
        keys[-1], value = keys[-1][:-1], [value]
    for part in reversed(keys):
        value = {part: value}
    return value, ""


def merge_json(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two JSON objects: lists are joined, other values of the second override."""
    merged = dict(first)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge_json(merged[key], value)
        elif isinstance(value, list) and isinstance(merged.get(key), list):
            merged[key] = [*merged[key], *value]
        else:
            merged[key] = value
    return merged


@cache
def load_flag_lists(engine: str) -> FlagLists:
    """Load the listed versions and the parser's rules; `PlannerError` for an unknown engine."""
    known = load_catalog("flags/lists.yaml", FlagLists)
    if engine not in known:
        raise make_unknown_name_error(engine, known, "engine")
    return known[engine]


def parse_engine_version(engine: str, text: str) -> Version:
    """Return a release; a nightly build compares as the last that is listed, and prints as given.

    Raises `PlannerError` for any other text.
    """
    if is_nightly(text):
        return replace(load_flag_lists(engine).versions[-1], text=text)
    return Version.parse(text)


@cache
def load_recorded_options(engine: str) -> tuple[CliOption, ...]:
    """Load all options of all listed versions; a `PlannerError` names file and line."""
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


@cache
def load_recorded_names(
    kind: Literal["environment", "metrics"], engine: str
) -> Mapping[str, tuple[Version, ...]]:
    """Load name -> listed versions of an engine's environment variables or metrics."""
    known, path = load_flag_lists(engine).versions, FLAGS_DIR / f"{kind}.csv"
    texts, recorded_names = list(map(str, known)), dict[str, tuple[Version, ...]]()
    for number, cells in read_csv_lines(path, MIB):
        if cells == ["engine", "name", "first", "last"] or cells[0] != engine:
            continue
        if len(cells) != 4 or not {*cells[2:]} <= {*texts}:
            raise PlannerError(
                f"{path.name}, line {number}: expected engine, name, first and last of"
                f" {', '.join(texts)}"
            )
        first, last = map(texts.index, cells[2:])
        recorded_names[cells[1]] = recorded_names.get(cells[1], ()) + known[first : last + 1]
    return recorded_names


def list_versions_with_spelling(engine: str, spelling: str) -> list[Version]:
    """List the versions whose parser knows exactly this spelling, in ascending order."""
    return [
        version
        for version in load_flag_lists(engine).versions
        if spelling in _index_by_spelling(engine, version)
    ]


def get_cli_options(engine: str, version: str | Version) -> CliOptions:
    """Get the options at a version from the nearest list up to it, else from the first list.

    A nightly build is read by the last list. "0.20" means any patch, so the list of 0.20.2 counts.
    """
    lists, text = load_flag_lists(engine), str(version)
    release = parse_engine_version(engine, text)
    earlier = (
        listed
        for listed in lists.versions
        if listed <= release or (text.count(".") == 1 and listed.series == release.series)
    )
    nearest = max(earlier, default=lists.versions[0])
    note = (
        ""
        if nearest == release and not is_nightly(text)
        else f"{engine} {version} is read by the options of {nearest}"
    )
    return CliOptions(engine, nearest, note, lists, _index_by_spelling(engine, nearest))


def find_pooling_option(
    engine: str, version: str | Version, task: str = "embed"
) -> tuple[str, ...]:
    """Find the option and value with which a version serves a task, embed or score, of pooling models.

    Empty if none is known. Sources: the lists of options; docs.vllm.ai, pooling models; SGLang's
    embedding models.

    >>> find_pooling_option("vllm", "0.33.0"), find_pooling_option("vllm", "0.8.5")
    (('--runner', 'pooling'), ('--task', 'embed'))
    """
    spellings = get_cli_options(engine, version).spellings
    options = (("--runner", "pooling"), ("--is-embedding",), ("--task", task))
    return next((option for option in options if option[0] in spellings), ())


@cache
def _index_by_spelling(engine: str, version: Version) -> Mapping[str, CliOption]:
    """Index the options of a listed version by all their spellings."""
    return {
        spelling: option
        for option in load_recorded_options(engine)
        if option.first <= version <= option.last
        for spelling in option.spellings
    }
