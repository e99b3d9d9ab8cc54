"""Read what people write, YAML and JSON, bounded and checked on load, with errors that name file, entry and field."""

import csv
import hashlib
import io
import json
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from planner.core.quantities import MIB, PlannerError, closest

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(folder: str) -> Path:
    """Where a folder that comes along lies: inside an installed package, or beside it in a checkout."""
    return _PACKAGE / folder if (_PACKAGE / folder).is_dir() else _PACKAGE.parent / folder


CATALOGS = shipped("catalogs")


@cache
def build() -> str:
    """A digest of the planner's code and catalogs: what answers hang on besides the question."""
    found = hashlib.sha256()
    for root, kinds in ((_PACKAGE, ("*.py",)), (CATALOGS, ("*.yaml", "*.csv", "*.json"))):
        for path in sorted(path for kind in kinds for path in root.rglob(kind)):
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


class Entry(BaseModel):
    """Base of every catalog entry: unknown fields are errors, numbers finite, text Unicode, values frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_max_length=2**16)
    others_say: ClassVar[Mapping[str, str]] = {}
    """Parts of names that people expect here, and what to write instead."""


class Sourced(Entry):
    """An entry that says where its figures are from, and when they were read there."""

    source: str
    date: str


E = TypeVar("E", bound=Entry)
DEEPEST = 100
"""Levels of lists and mappings inside one another."""
MOST_VALUES = 2**16
"""Of a YAML file, which take about a second."""
MOST_JSON = 800 * 10**6
"""Bytes that the values of a JSON file may take."""
MOST_CELLS = 1000
"""Of a line of a CSV."""


def opened(path: Path, most: int, what: str = "") -> BinaryIO:
    """The file at `path`, open to be read; `PlannerError` where it is none, or has more than `most` bytes."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"it is {'a directory' if stat.S_ISDIR(found.st_mode) else 'no regular file'}")
        if found.st_size > most:
            raise ValueError(f"it has {found.st_size / MIB:,.1f} MiB, and at most {most / MIB:g} are read")
        return path.open("rb")
    except (OSError, ValueError) as error:
        raise PlannerError(f"cannot read {what}{path}: {getattr(error, 'strerror', None) or error}") from None


def read_text(path: Path, most: int = 16 * MIB, errors: str = "strict") -> str:
    """The text of a file of at most `most` bytes, UTF-8; `PlannerError` for any other."""
    try:
        with opened(path, most) as file:
            return file.read(most).decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise PlannerError(f"cannot read {path}: byte {error.start + 1:,} is not UTF-8 text") from None
    except OSError as error:
        raise PlannerError(f"cannot read {path}: {error.strerror or error}") from None


def csv_lines(path: Path, most: int) -> Iterator[tuple[int, list[str]]]:
    """The lines of a CSV that are not blank, as their numbers and cells; `PlannerError` for what is none."""
    with opened(path, most) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        try:
            for cells in filter(None, lines):
                if len(cells) > MOST_CELLS:
                    raise ValueError(f"{len(cells):,} cells in line {lines.line_num:,}, and at most {MOST_CELLS:,} are")
                yield lines.line_num, cells
        except (csv.Error, OSError, ValueError) as error:
            raise PlannerError(f"{path.name} is not a CSV that can be read: {error}") from None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Plain scalars as YAML 1.2 reads them: yes, 1:30 and 2024-01-01 are text, 010 is ten, 1e3 a number."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    depth = values = 0

    def descend_resolver(self, parent: Any, index: Any) -> None:
        self.depth += 1
        self.values += 1
        if self.depth > DEEPEST:
            raise _wrong(f"it is nested deeper than {DEEPEST} levels", parent)
        if self.values > MOST_VALUES:
            raise _wrong(f"it has more than {MOST_VALUES:,} values", parent)

    def ascend_resolver(self) -> None:
        self.depth -= 1

    def get_single_node(self) -> Any:
        """Keys are given once, and aliases do not stand for more than a file could hold."""
        root = super().get_single_node()
        level, depth, size = [root], 0, 0
        while level:
            depth += 1
            inside: list[Any] = []
            for node in level:
                parts = node.value if isinstance(node, yaml.CollectionNode) else ()
                size += len(parts)
                if depth > DEEPEST + 1 or size > MOST_VALUES:
                    raise _wrong("its aliases stand for too much", node)
                if isinstance(node, yaml.MappingNode):
                    _given_once(key for key, _ in parts)
                    parts = chain.from_iterable(parts)
                inside += parts
            level = inside
        return root

    def construct_yaml_int(self, node: Any) -> int:
        digits = node.value.replace("_", "")
        if len(digits) > 20 or abs(int(digits)) > 2**53:
            raise _wrong(f"{digits:.40} is beyond 2^53, the largest whole number that is read", node)
        return int(digits)


def _given_once(keys: Iterable[Any]) -> None:
    seen = set()
    for key in keys:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise _wrong(f"{key.value:.60} is given twice", key)
            seen.add(key.value)


def _wrong(problem: str, node: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag, _written, _first in (
    ("merge", r"<<", ["<"]),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     list("-+.0123456789")),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_written})\Z"), _first)


def read_yaml(path: Path) -> Any:
    """The content of one YAML file (at most half a MiB, 65,536 values); `PlannerError` when it is none."""
    return parse_yaml(read_text(path, MIB // 2), path.name)


def parse_yaml(text: str, where: str) -> Any:
    """The content of YAML `text`; `where` names it in the `PlannerError` for what is none."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise PlannerError(f"{where} is not valid YAML: {line}{problem}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # from PyYAML's readers of tags
        raise PlannerError(f"{where} is not valid YAML: {error}") from None


def parse_json(text: str, where: str) -> Any:
    """The content of JSON `text`; `where` names it in the `PlannerError` for what is none."""
    try:
        values = sum(map(text.count, ",[{{{"))  # an object is as much as three
        if (taken := 2 * sys.getsizeof(text) + 100 * values) > MOST_JSON:
            raise ValueError(f"{values:,} values would take {taken:.2g} bytes, and at most {MOST_JSON:.0e} are given")
        data = json.loads(text, object_pairs_hook=_object)
        level: list[Any] = [[data]]
        for _ in range(DEEPEST + 1):
            parts = (part for whole in level for part in (whole.values() if isinstance(whole, dict) else whole))
            if not (level := [part for part in parts if isinstance(part, dict | list)]):
                return data
    except ValueError as error:
        raise PlannerError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        pass
    raise PlannerError(f"{where} is nested deeper than {DEEPEST} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys are given once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"{twice!r:.60} is given twice")
    return found


def check(kind: type[E], data: Any, where: str) -> E:
    """Validate `data` as a `kind`; `where` names the file and entry in the error."""
    try:
        found = kind.model_validate(data)
        if flag := next(_flags(data, found), None):
            raise PlannerError(f"{where}, field {flag[0]}: Input should be a number, got {flag[1]}")
        return found
    except ValidationError as error:
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        field = ".".join(str(part) for part in first["loc"] if part != "[key]") or "(the whole entry)"
        if first["type"] == "extra_forbidden":
            *parents, unknown = first["loc"]
            inside: type[Entry] = kind
            for parent in parents:
                if parent in inside.model_fields:
                    inside = _entry_in(inside.model_fields[str(parent)].annotation) or inside
            known = sorted(inside.model_fields)
            close = closest(str(unknown), known, 0.5)
            hint = f"; did you mean {close}?" if close else f"; accepted: {', '.join(known)}"
            hint = next((f"; {said}" for part, said in inside.others_say.items() if part in str(unknown)), hint)
            raise PlannerError(f"{where}, field {field}: unknown field{hint}") from None
        if first["type"] == "missing":
            raise PlannerError(f"{where}, field {field}: field is missing") from None
        if first["type"] == "value_error" and not first["loc"]:
            raise PlannerError(f"{where}: {first['ctx']['error']}") from None
        wanted = "Input should be a number" if "than" in first["type"] and first["input"] is True else first["msg"]
        if first["type"] == "float_parsing":
            wanted = "Input should be a number, worked out (2.5 for 60/24)"
        raise PlannerError(f"{where}, field {field}: {wanted}, got {first['input']!r:.80}") from None


def _entry_in(annotation: Any) -> type[Entry] | None:
    """The kind of entry that a field, maybe a list or a mapping, holds."""
    if isinstance(annotation, type) and issubclass(annotation, Entry):
        return annotation
    return next(filter(None, map(_entry_in, get_args(annotation))), None)


def _flags(given: Any, read: Any, place: str = "") -> Iterator[tuple[str, bool]]:
    """Where true or false was read as a number."""
    if isinstance(read, tuple) and not isinstance(given, list | tuple):  # one item stood for a list of one
        read = next(iter(read), None)
    if isinstance(given, bool) and isinstance(read, int | float) and not isinstance(read, bool):
        yield place.removeprefix("."), given
    elif isinstance(given, Mapping):
        for key, value in given.items():
            inside = read.get(key) if isinstance(read, Mapping) else getattr(read, str(key), None)
            yield from _flags(value, inside, f"{place}.{key}")
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        for index, value in enumerate(given[: len(read)]):
            if isinstance(value, bool | Mapping | list | tuple):
                yield from _flags(value, read[index], f"{place}.{index}")


def rows(file: str, kind: type[E]) -> tuple[E, ...]:
    """All rows of the catalog's CSV `file`, each validated as a `kind`; lines from # on are its guide."""
    lines = [line for line in read_text(CATALOGS / file).splitlines() if not line.startswith("#")]
    return tuple(check(kind, row, f"{file}, row {number}") for number, row in enumerate(csv.DictReader(lines), 1))


def entries(file: str, kind: type[E], root: Path = CATALOGS) -> dict[str, E]:
    """All entries of the catalog `file`, a mapping of name to fields, each validated as a `kind`."""
    data = read_yaml(root / file)
    if not isinstance(data, dict):
        raise PlannerError(f"{file}: expected a mapping of entry names to fields, got {type(data).__name__}")
    return {str(name): check(kind, fields, f"{file}, entry {name}") for name, fields in data.items()}
