"""Checked reading of a `config.json`: synonyms, class defaults, types and ranges of fields."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar, overload

from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError
from planner.core.readers import read_yaml_sections

ValueT = TypeVar("ValueT")

_MISSING: Any = object()
MAX_LAYERS = 2000
"""Also the largest number of entries of any list that is read."""
CONFIG_FIELD_CATALOG: Mapping[str, Any] = read_yaml_sections(
    CATALOG_DIR / "config_fields.yaml",
    "sizes",
    "others",
    "flags",
    "texts",
    "spellings",
    "layers",
    "unread",
)
"""The fields that are read, with the names that models give them; the catalog explains it."""
_FIELD_SYNONYMS: Mapping[str, list[str]] = {
    **CONFIG_FIELD_CATALOG["sizes"], **CONFIG_FIELD_CATALOG["spellings"]
}  # fmt: skip


class ConfigReader:
    """One (nested) configuration, with the traits of its class and defaults for missing fields.

    A default that is used adds to `warnings`.
    """

    def __init__(
        self, config: Mapping[str, Any], traits: Mapping[str, Any], location: str = "config.json"
    ) -> None:
        self.config, self.traits, self.location = config, traits, location
        self.defaults: Mapping[str, Any] = traits.get("defaults", {})
        self.warnings: list[str] = []
        self.is_known_family = True
        self.read = {"quantization_config", "compression_config", "dtype", "torch_dtype"}

    def override(self, changes: Mapping[str, Any]) -> "ConfigReader":
        """Copy the reader with some fields replaced, as one layer has them; share its warnings."""
        fields = ConfigReader({**self.config, **changes}, self.traits, self.location)
        fields.warnings, fields.read = self.warnings, self.read
        return fields

    def list_unread(self) -> list[str]:
        """List the fields that nothing has read although, by their names, they decide sizes."""
        deciding, harmless = (
            re.compile("|".join(CONFIG_FIELD_CATALOG["unread"][name]))
            for name in ("deciding", "harmless")
        )
        return [
            name
            for name, value in self.config.items()
            if name not in self.read
            and value not in (None, False, 0, 1, "", [], {})
            and deciding.search(name)
            and not harmless.search(name)
        ]

    def has_field(self, name: str) -> bool:
        """Return whether the file has the field, even if it is null."""
        return any(key in self.config for key in self._list_spellings(name))

    def _list_spellings(self, name: str) -> tuple[str, ...]:
        spellings = (name, *_FIELD_SYNONYMS.get(name, ()))
        self.read.update(spellings)
        return spellings

    def get_explicit(self, name: str) -> Any:
        """Get the file's value under the field's name or a synonym; None if absent or null."""
        values = (self.config.get(key) for key in self._list_spellings(name))
        return next((value for value in values if value is not None), None)

    def get_or_default(self, name: str, default: Any = None) -> Any:
        """Get the file's value, else the class default (with a warning), trait or `default`."""
        if (value := self.get_explicit(name)) is not None:
            return value
        if name in self.defaults:
            value = self.defaults[name]
            self.warnings.append(
                f"{self.location} does not state {name}; its class default, {value}, is assumed"
            )
            return value
        return self.traits.get(name, default)

    def make_field_error(self, name: str, accepted: str, value: object) -> PlannerError:
        """Build the error for a field whose value is invalid."""
        return PlannerError(
            f"{self.location}, field {name}: expected {accepted}, got {value!r:.60}"
        )

    @overload
    def read_int(
        self, name: str, default: int = ..., minimum: int = 1, maximum: int = 2**20
    ) -> int: ...

    @overload
    def read_int(
        self, name: str, default: None, minimum: int = 1, maximum: int = 2**20
    ) -> int | None: ...

    def read_int(
        self, name: str, default: int | None = _MISSING, minimum: int = 1, maximum: int = 2**20
    ) -> int | None:
        """Read a whole number in [minimum, maximum]; `PlannerError` if missing and no default."""
        value = self.get_or_default(name, default)
        if value is _MISSING:
            known = ", ".join((name, *_FIELD_SYNONYMS.get(name, ())))
            raise PlannerError(f"{self.location}: field {name} is missing; looked for {known}")
        if value is default:
            return value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and minimum <= value <= maximum and value == int(value)):
            raise self.make_field_error(name, f"a whole number from {minimum} to {maximum}", value)
        return int(value)

    def read_fraction(self, name: str, default: float, maximum: float = 1) -> float:
        """Read a number above 0 and up to `maximum`."""
        value = self.get_or_default(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= maximum
        ):
            raise self.make_field_error(name, f"a number above 0 and up to {maximum:g}", value)
        return float(value)

    def read_bool(self, name: str, default: bool = False) -> bool:
        """Read true or false."""
        return self._read_typed(bool, name, default, "true or false")

    def read_text_field(self, name: str, default: str = "") -> str:
        """Read a string."""
        return self._read_typed(str, name, default, "a string")

    def read_list(self, name: str, kind: type[ValueT], count: int | None = None) -> list[ValueT]:
        """Read a list of `kind`, cut to `count` entries if given; empty if the field is absent."""
        value = self.get_or_default(name)
        if value is None:
            return []
        if isinstance(value, str) and kind is str:
            value = list(value)
        if not isinstance(value, list | tuple) or not all(isinstance(item, kind) for item in value):
            raise self.make_field_error(name, f"a list of {kind.__name__}", value)
        if len(value) > MAX_LAYERS:
            raise self.make_field_error(name, f"at most {MAX_LAYERS:,} entries", value)
        if count is not None and value and len(value) < count:
            raise self.make_field_error(name, f"one entry for each of the {count} layers", value)
        return list(value) if count is None else list(value[:count])

    def get_nested(self, name: str) -> Mapping[str, Any] | None:
        """Get a nested configuration; None if absent."""
        value = self.get_or_default(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.make_field_error(name, "a mapping", value)
        return value

    def read_nested(self, name: str) -> "ConfigReader":
        """Read a nested configuration without class defaults; it is empty if absent."""
        return ConfigReader(self.get_nested(name) or {}, {}, f"{self.location}, {name}")

    def _read_typed(self, kind: type[ValueT], name: str, default: ValueT, accepted: str) -> ValueT:
        value = self.get_or_default(name, default)
        if not isinstance(value, kind):
            raise self.make_field_error(name, accepted, value)
        return value
