"""Text for terminals: single lines and aligned columns."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from unicodedata import category

UNBREAKABLE_SPACE = "\u00a0"
"""Where a line of the terminal may not break."""


def get_program_name() -> str:
    """Return the command's name as the user called it: `planner`, or by default `headroom`."""
    called = os.path.basename(sys.argv[0]).partition(".")[0]
    return "planner" if called == "planner" else "headroom"


def escape_to_one_line(text: object) -> str:
    """Replace characters that do not print within one line, such as newlines, by their escapes."""
    shown = (
        c if c.isprintable() or category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in str(text)
    )
    return "".join(shown)


def capitalize(text: str) -> str:
    """Begin a sentence; names further on keep their letters."""
    return text[:1].upper() + text[1:]


def format_count(number: float, noun: str, plural: str = "") -> str:
    """Return a rounded number with its noun, in the singular for one: `1 user`, `2 users`."""
    count = round(number)
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def escape_markdown(text: object) -> str:
    """Return text as one line of Markdown that shows it: no markup, HTML or formula."""
    return re.sub(r"([\\`*_\[\]<>&~$|])", r"\\\1", escape_to_one_line(text))


def format_columns(rows: Iterable[Sequence[str]]) -> str:
    """Align rows of text in columns; the last column is not padded."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, (*widths[:-1], 0))) for row in rows)
