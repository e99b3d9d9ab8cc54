"""Catalogs: YAML and CSV files, validated on load; errors name file, entry and field."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from planner import __version__
from planner.core.errors import PlannerError, find_closest
from planner.core.readers import read_yaml
from planner.core.redaction import quote_name, quote_value

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

PACKAGE_DIR = Path(__file__).resolve().parents[1]


def locate_shipped_folder(folder: str) -> Path:
    """Locate a shipped folder, inside an installed package or beside it in a checkout."""
    return PACKAGE_DIR / folder if (PACKAGE_DIR / folder).is_dir() else PACKAGE_DIR.parent / folder


CATALOG_DIR = locate_shipped_folder("catalogs")


@cache
def compute_build_digest() -> str:
    """Return a digest of the planner's version, code and catalogs, which decide every answer."""
    digest = hashlib.sha256(__version__.encode() + b"\0")
    for root, kinds in (
        (PACKAGE_DIR, ("*.py", "*.yaml")),
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


def validate_entry(entry_type: type[EntryT], data: object, location: str) -> EntryT:
    """Validate `data`; `location` names file and entry in the `PlannerError`."""
    try:
        entry = entry_type.model_validate(data)
        if flag := next(_find_bools_read_as_numbers(data, entry), None):
            raise PlannerError(f"{location}, field {flag[0]}: must be a number, got {flag[1]}")
        return entry
    except ValidationError as error:
        # unknown fields first: they often are why another is missing
        errors = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        problems = [_describe_problem(entry_type, problem, location) for problem in errors]
        for k, (text, listed) in enumerate(problems):
            if any(listed == earlier for _, earlier in problems[:k]):
                problems[k] = text, ""  # once is enough
        text, listed = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise PlannerError(
            f"{text}{more}" if len(f"{text}{listed}{more}") > 400 else f"{text}{listed}{more}",
            [f"{text}{listed}" for text, listed in problems],
        ) from None


def _describe_problem(
    entry_type: type[StrictEntry], problem: "ErrorDetails", location: str
) -> tuple[str, str]:
    """Describe what is wrong with a field, and list the fields that are accepted instead."""
    path = [part for part in problem["loc"] if part != "[key]"]
    field = ".".join(map(str, path)) or "(the whole entry)"
    if problem["type"] == "value_error" and (
        not path
        or isinstance(problem["input"], Mapping)
        or isinstance(problem["ctx"]["error"], PlannerError)
    ):
        where = f"{location}, field {field}" if path else location
        return f"{where}: {problem['ctx']['error']}", ""
    if problem["type"] == "missing":
        return f"{location}, field {field}: field is missing", ""
    if problem["type"] == "extra_forbidden":
        *parents, unknown = problem["loc"]
        hint, listed = _suggest_field(
            _find_type_at(entry_type, parents), str(unknown), _find_fields(entry_type, str(unknown))
        )
        shown = [*map(str, path[:-1]), str(unknown) if hint else quote_name(str(unknown))]
        return f"{location}, field {'.'.join(shown)}: unknown field{hint}", listed
    value = problem["input"]
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        at_hand = _find_type_at(entry_type, path)
        fields = {} if at_hand is entry_type else at_hand.model_fields
        needed = [name for name, each in fields.items() if each.is_required()]
        example = ": ..., ".join(needed or [*fields][:1] or ["name"])
        return (
            f"{location}, field {field}: must be {'fields' if fields else 'names'} with values, such as"
            f" {{{example}: ...}}, got {quote_value(value)}",
            f"; accepted: {', '.join(sorted(fields))}" if fields else "",
        )
    expected = problem["msg"].replace("Input should be", "must be")
    if "than" in problem["type"] and value is True:
        expected = "must be a number"
    for old, new in PLAIN_WORDS.items():
        expected = expected.replace(old, new)
    return f"{location}, field {field}: {expected}, got {quote_value(value)}", ""


PLAIN_WORDS = {
    "Unable to parse input string as an integer, exceeded maximum size": "must be a whole number",
    ", got a number with a fractional part": "",
    ", unable to parse string as a number": "",
    ", unable to parse string as an integer": "",
    "a valid number": "a number",
    "a valid integer": "a whole number",
    "a valid string": "text",
    "a valid tuple": "a list",
    "a valid list": "a list",
    "a valid boolean": "true or false",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}
"""Words of pydantic, and plain ones."""


def _find_type_at(entry_type: type[StrictEntry], path: Sequence[object]) -> type[StrictEntry]:
    """Find the type of the entry at `path`; of what is no entry, that of the one around it."""
    for part in path:
        if field_info := entry_type.model_fields.get(str(part)):
            entry_type = _find_entry_type(field_info.annotation) or entry_type
    return entry_type


def _suggest_field(
    entry_type: type[StrictEntry], unknown: str, elsewhere: Iterable[str]
) -> tuple[str, str]:
    """Suggest the known field that `unknown` may mean, here or `elsewhere`, and list those here."""
    known = sorted(entry_type.model_fields)
    listed = f"; accepted: {', '.join(known)}"
    for part, text in entry_type.misspelling_hints.items():
        if part in unknown:
            return f"; {text}", listed
    if 0 < len(places := list(elsewhere)) <= 2:  # more are no hint
        return f"; it is {' or '.join(places)}", listed
    close = find_closest(unknown, known, 0.5)
    return f"; did you mean {close}?" if close else "", listed


def _find_fields(entry_type: type[StrictEntry], name: str, path: str = "") -> Iterator[str]:
    """Yield where else fields called `name` stand, by their dotted names."""
    for field, info in entry_type.model_fields.items():
        if field == name:
            yield f"{path}{field}" if path else f"{field}, at the top"
        elif inner := _find_entry_type(info.annotation):
            yield from _find_fields(inner, name, f"{path}{field}.")


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


def load_catalog(
    file: str, entry_type: type[EntryT], root: Path = CATALOG_DIR
) -> dict[str, EntryT]:
    """Load and validate all entries of a YAML catalog, by name; a shipped one is read once."""
    return (
        _load_shipped(file, entry_type)
        if root == CATALOG_DIR
        else _read_entries(file, entry_type, root)
    )


@cache
def _load_shipped(file: str, entry_type: type[EntryT]) -> dict[str, EntryT]:
    return _read_entries(file, entry_type, CATALOG_DIR)


def _read_entries(file: str, entry_type: type[EntryT], root: Path) -> dict[str, EntryT]:
    data = read_yaml(root / file)
    if not isinstance(data, dict):
        raise PlannerError(
            f"{file}: expected a mapping of entry names to fields, got {type(data).__name__}"
        )
    return {
        str(name): validate_entry(entry_type, fields, f"{file}, entry {name}")
        for name, fields in data.items()
    }
