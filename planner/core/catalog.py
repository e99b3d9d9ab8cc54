"""Read the YAML catalogs: what people edit, checked on load, with errors that name file, entry and field."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from planner.core.quantities import PlannerError

_PACKAGE = Path(__file__).resolve().parents[1]
CATALOGS = _PACKAGE / "catalogs" if (_PACKAGE / "catalogs").is_dir() else _PACKAGE.parent / "catalogs"
"""Where the catalogs lie: inside an installed package, or beside it in a checkout."""


class Entry(BaseModel):
    """Base of every catalog entry: unknown fields are errors, numbers are finite, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


E = TypeVar("E", bound=Entry)


def read_yaml(path: Path) -> Any:
    """The content of one YAML file; `PlannerError` when it is missing or not YAML."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise PlannerError(f"cannot read {path}: {error.strerror or error}") from None
    except RecursionError:
        raise PlannerError(f"{path.name} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise PlannerError(f"{path.name} is not valid YAML: {' '.join(str(error).split())}") from None


def check(kind: type[E], data: Any, where: str) -> E:
    """Validate `data` as a `kind`; `where` names the file and entry in the error."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        field = ".".join(str(part) for part in first["loc"]) or "(the whole entry)"
        if first["type"] == "extra_forbidden":
            known = sorted(kind.model_fields) if len(first["loc"]) == 1 else []
            close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else f"; accepted: {', '.join(known)}" if known else ""
            raise PlannerError(f"{where}, field {field}: unknown field{hint}") from None
        if first["type"] == "missing":
            raise PlannerError(f"{where}, field {field}: field is missing") from None
        raise PlannerError(f"{where}, field {field}: {first['msg']}, got {first['input']!r:.80}") from None


def entries(file: str, kind: type[E], root: Path = CATALOGS) -> dict[str, E]:
    """All entries of the catalog `file`, a mapping of name to fields, each validated as a `kind`."""
    data = read_yaml(root / file)
    if not isinstance(data, dict):
        raise PlannerError(f"{file}: expected a mapping of entry names to fields, got {type(data).__name__}")
    return {str(name): check(kind, fields, f"{file}, entry {name}") for name, fields in data.items()}
