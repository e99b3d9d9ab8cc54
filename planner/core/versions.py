"""Releases of engines: parse, compare and print them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from pydantic_core import core_schema

from planner.core.errors import PlannerError
from planner.core.redaction import quote_name

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

_RELEASE_PATTERN = re.compile(
    r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,9}))?(?:[.-]?[a-z][a-z0-9_.+-]{0,99}|\+[a-z0-9_.]{1,99})?",
    re.ASCII,
)
_NIGHTLY_PATTERN = re.compile(r"nightly(?:-[A-Za-z0-9]{1,64}){0,3}", re.ASCII)


def is_nightly(text: str) -> bool:
    """Return whether text names a nightly build: nightly, or nightly-COMMIT as images are tagged.

    Raises `PlannerError` for any other text that begins with nightly.
    """
    if not text.startswith("nightly"):
        return False
    if not _NIGHTLY_PATTERN.fullmatch(text):
        raise PlannerError(f"{text!r:.80} is no nightly build; write nightly, or nightly-5b8c30d62")
    return True


@dataclass(frozen=True, order=True)
class Version:
    """A release, compared by its numbers and printed as it was written.

    What follows the numbers (rc, dev, post, local part) is not compared: a release candidate
    equals its release. Catalog entries take text as a `Version`.
    """

    major: int
    minor: int
    patch: int = 0
    text: str = field(default="", compare=False)

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, text: str) -> Self:
        """Parse text such as "v0.19.0", "0.15.2rc1.dev9" or "0.20.2+cu130", else `PlannerError`."""
        if not (match := _RELEASE_PATTERN.fullmatch(text.strip().lower())):
            raise PlannerError(f"{quote_name(text)!r} is not a version; write it like 0.20.2")
        return cls(int(match[1]), int(match[2]), int(match[3] or 0), text.strip())

    @property
    def series(self) -> tuple[int, int]:
        """The major and the minor number, which all patch releases share."""
        return self.major, self.minor

    @property
    def plain(self) -> str:
        """The numbers alone, as text."""
        return f"{self.major}.{self.minor}.{self.patch}"

    def __str__(self) -> str:
        return self.text or self.plain

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls.parse,
            core_schema.str_schema(),
            serialization=core_schema.to_string_ser_schema(when_used="always"),
        )
