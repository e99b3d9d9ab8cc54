"""Catalogs: YAML and CSV files, validated on load; errors name file, entry and field."""

import csv
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from planner import __version__
from planner.core.errors import PlannerError, find_closest
from planner.core.readers import read_text, read_yaml

_PACKAGE = Path(__file__).resolve().parents[1]


def locate_shipped_folder(folder: str) -> Path:
    """Locate a shipped folder, inside an installed package or beside it in a checkout."""
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
    """Base of catalog entries: frozen; no unknown fields, infinite numbers or very long text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, str_max_length=2**16
    )
    misspelling_hints: ClassVar[Mapping[str, str]] = {}
    """Part of an unknown field's name -> the hint that its error gives instead of a near name."""


class SourcedEntry(StrictEntry):
    """An entry with the source of its figures and the date on which they were read there."""

    source: str
    date: str


EntryT = TypeVar("EntryT", bound=StrictEntry)


_PARSER_WORDS = {
    "tuple_type": "Input should be a list",
    "model_type": "Input should be a mapping of fields",
    "dataclass_type": "Input should be a mapping of fields",
    "dict_type": "Input should be a mapping",
}
"""What is expected, where pydantic names types of Python."""


def validate_entry(entry_type: type[EntryT], data: object, location: str) -> EntryT:
    """Validate `data`; `location` names file and entry in the `PlannerError`."""
    try:
        entry = entry_type.model_validate(data)
        if flag := next(_find_bools_read_as_numbers(data, entry), None):
            raise PlannerError(
                f"{location}, field {flag[0]}: Input should be a number, got {flag[1]}"
            )
        return entry
    except ValidationError as error:
        first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        field = (
            ".".join(str(part) for part in first["loc"] if part != "[key]") or "(the whole entry)"
        )
        if first["type"] == "extra_forbidden":
            *parents, unknown = first["loc"]
            parent_type: type[StrictEntry] = entry_type
            for parent in parents:
                if field_info := parent_type.model_fields.get(str(parent)):
                    parent_type = _find_entry_type(field_info.annotation) or parent_type
            known = sorted(parent_type.model_fields)
            close = find_closest(str(unknown), known, 0.5)
            hint = f"; did you mean {close}?" if close else f"; accepted: {', '.join(known)}"
            for part, text in parent_type.misspelling_hints.items():
                if part in str(unknown):
                    hint = f"; {text}"
                    break
            raise PlannerError(f"{location}, field {field}: unknown field{hint}") from None
        if first["type"] == "missing":
            raise PlannerError(f"{location}, field {field}: field is missing") from None
        if first["type"] == "value_error" and not first["loc"]:
            raise PlannerError(f"{location}: {first['ctx']['error']}") from None
        expected = (
            "Input should be a number"
            if "than" in first["type"] and first["input"] is True
            else first["msg"]
        )
        expected = _PARSER_WORDS.get(first["type"], expected)
        if first["type"] == "float_parsing":
            expected = "Input should be a number, worked out (2.5 for 60/24)"
        raise PlannerError(
            f"{location}, field {field}: {expected}, got {first['input']!r:.80}"
        ) from None


def _find_entry_type(annotation: Any) -> type[StrictEntry] | None:
    """Find the entry type in the annotation of a field, which may be a list or a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, StrictEntry):
        return annotation
    return next(filter(None, map(_find_entry_type, get_args(annotation))), None)


def _find_bools_read_as_numbers(
    data: object, parsed: object, path: str = ""
) -> Iterator[tuple[str, bool]]:
    """Yield field and value of every true or false that was read as a number."""
    if isinstance(parsed, tuple) and not isinstance(data, list | tuple):
        parsed = next(iter(parsed), None)  # a single item stands for a list of one
    if isinstance(data, bool) and isinstance(parsed, int | float) and not isinstance(parsed, bool):
        yield path.removeprefix("."), data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            field = (
                parsed.get(key) if isinstance(parsed, Mapping) else getattr(parsed, str(key), None)
            )
            yield from _find_bools_read_as_numbers(value, field, f"{path}.{key}")
    elif isinstance(data, list | tuple) and isinstance(parsed, list | tuple):
        for index, value in enumerate(data[: len(parsed)]):
            if isinstance(value, bool | Mapping | list | tuple):
                yield from _find_bools_read_as_numbers(value, parsed[index], f"{path}.{index}")


def load_catalog_rows(file: str, entry_type: type[EntryT]) -> tuple[EntryT, ...]:
    """Load and validate all rows of a CSV catalog; lines that begin with # are comments."""
    lines = [
        line for line in read_text(CATALOG_DIR / file).splitlines() if not line.startswith("#")
    ]
    return tuple(
        validate_entry(entry_type, row, f"{file}, row {number}")
        for number, row in enumerate(csv.DictReader(lines), 1)
    )


def load_catalog(
    file: str, entry_type: type[EntryT], root: Path = CATALOG_DIR
) -> dict[str, EntryT]:
    """Load and validate all entries of a YAML catalog, by name."""
    data = read_yaml(root / file)
    if not isinstance(data, dict):
        raise PlannerError(
            f"{file}: expected a mapping of entry names to fields, got {type(data).__name__}"
        )
    return {
        str(name): validate_entry(entry_type, fields, f"{file}, entry {name}")
        for name, fields in data.items()
    }
