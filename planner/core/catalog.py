"""Read what people write, YAML and JSON, bounded and checked on load, with errors that name file, entry and field."""

import csv
import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from planner import __version__
from planner.core.errors import PlannerError, find_closest
from planner.core.readers import _Yaml12Loader, read_text, read_yaml

_PACKAGE = Path(__file__).resolve().parents[1]


def locate_shipped_folder(folder: str) -> Path:
    """Where a folder that comes along lies: inside an installed package, or beside it in a checkout."""
    return _PACKAGE / folder if (_PACKAGE / folder).is_dir() else _PACKAGE.parent / folder


CATALOG_DIR = locate_shipped_folder("catalogs")


@cache
def compute_build_digest() -> str:
    """Return a digest of the planner's version, code and catalogs, which decide every answer."""
    digest = hashlib.sha256(__version__.encode() + b"\0")
    for root, kinds in (
        (_PACKAGE, ("*.py", "*.yaml")),
        (CATALOG_DIR, ("*.yaml", "*.csv", "*.json")),
    ):
        for path in sorted(path for kind in kinds for path in root.rglob(kind)):
            digest.update(
                path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
            )
    return digest.hexdigest()


class StrictEntry(BaseModel):
    """Base of every catalog entry: unknown fields are errors, numbers finite, text Unicode, values frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, str_max_length=2**16
    )
    misspelling_hints: ClassVar[Mapping[str, str]] = {}
    """Parts of names that people expect here, and what to write instead."""


class SourcedEntry(StrictEntry):
    """An entry that says where its figures are from, and when they were read there."""

    source: str
    date: str


EntryT = TypeVar("EntryT", bound=StrictEntry)


_Yaml12Loader.add_constructor("tag:yaml.org,2002:int", _Yaml12Loader.construct_yaml_int)
for _tag, _written, _first in (
    ("merge", r"<<", ["<"]),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     list("-+.0123456789")),
):  # fmt: skip
    _Yaml12Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_written})\Z"), _first
    )


def validate_entry(entry_type: type[EntryT], data: Any, location: str) -> EntryT:
    """Validate `data` as a `kind`; `where` names the file and entry in the error."""
    try:
        entry = entry_type.model_validate(data)
        if flag := next(_find_bools_read_as_numbers(data, entry), None):
            raise PlannerError(
                f"{location}, field {flag[0]}: Input should be a number, got {flag[1]}"
            )
        return entry
    except ValidationError as error:
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        field = (
            ".".join(str(part) for part in first["loc"] if part != "[key]") or "(the whole entry)"
        )
        if first["type"] == "extra_forbidden":
            *parents, unknown = first["loc"]
            inside: type[StrictEntry] = entry_type
            for parent in parents:
                if parent in inside.model_fields:
                    inside = _find_entry_type(inside.model_fields[str(parent)].annotation) or inside
            known = sorted(inside.model_fields)
            close = find_closest(str(unknown), known, 0.5)
            hint = f"; did you mean {close}?" if close else f"; accepted: {', '.join(known)}"
            hint = next(
                (
                    f"; {text}"
                    for part, text in inside.misspelling_hints.items()
                    if part in str(unknown)
                ),
                hint,
            )
            raise PlannerError(f"{location}, field {field}: unknown field{hint}") from None
        if first["type"] == "missing":
            raise PlannerError(f"{location}, field {field}: field is missing") from None
        if first["type"] == "value_error" and not first["loc"]:
            raise PlannerError(f"{location}: {first['ctx']['error']}") from None
        wanted = (
            "Input should be a number"
            if "than" in first["type"] and first["input"] is True
            else first["msg"]
        )
        if first["type"] == "float_parsing":
            wanted = "Input should be a number, worked out (2.5 for 60/24)"
        raise PlannerError(
            f"{location}, field {field}: {wanted}, got {first['input']!r:.80}"
        ) from None


def _find_entry_type(annotation: Any) -> type[StrictEntry] | None:
    """The kind of entry that a field, maybe a list or a mapping, holds."""
    if isinstance(annotation, type) and issubclass(annotation, StrictEntry):
        return annotation
    return next(filter(None, map(_find_entry_type, get_args(annotation))), None)


def _find_bools_read_as_numbers(
    given: Any, read: Any, place: str = ""
) -> Iterator[tuple[str, bool]]:
    """Where true or false was read as a number."""
    if isinstance(read, tuple) and not isinstance(
        given, list | tuple
    ):  # one item stood for a list of one
        read = next(iter(read), None)
    if isinstance(given, bool) and isinstance(read, int | float) and not isinstance(read, bool):
        yield place.removeprefix("."), given
    elif isinstance(given, Mapping):
        for key, value in given.items():
            inside = read.get(key) if isinstance(read, Mapping) else getattr(read, str(key), None)
            yield from _find_bools_read_as_numbers(value, inside, f"{place}.{key}")
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        for index, value in enumerate(given[: len(read)]):
            if isinstance(value, bool | Mapping | list | tuple):
                yield from _find_bools_read_as_numbers(value, read[index], f"{place}.{index}")


def load_catalog_rows(file: str, kind: type[EntryT]) -> tuple[EntryT, ...]:
    """All rows of the catalog's CSV `file`, each validated as a `kind`; lines from # on are its guide."""
    lines = [
        line for line in read_text(CATALOG_DIR / file).splitlines() if not line.startswith("#")
    ]
    return tuple(
        validate_entry(kind, row, f"{file}, row {number}")
        for number, row in enumerate(csv.DictReader(lines), 1)
    )


def load_catalog(
    file: str, entry_type: type[EntryT], root: Path = CATALOG_DIR
) -> dict[str, EntryT]:
    """All entries of the catalog `file`, a mapping of name to fields, each validated as a `kind`."""
    data = read_yaml(root / file)
    if not isinstance(data, dict):
        raise PlannerError(
            f"{file}: expected a mapping of entry names to fields, got {type(data).__name__}"
        )
    return {
        str(name): validate_entry(entry_type, fields, f"{file}, entry {name}")
        for name, fields in data.items()
    }
