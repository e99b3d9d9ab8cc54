"""Text for a terminal: one line, aligned columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unicodedata import category


def escape_to_one_line(text: object) -> str:
    """Text with whatever would not print as a character of one line, such as a newline, shown as its escape."""
    shown = (
        c if c.isprintable() or category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in str(text)
    )
    return "".join(shown)


def format_columns(rows: Iterable[Sequence[str]]) -> str:
    """Rows of text in columns, the last as wide as it is."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, (*widths[:-1], 0))) for row in rows)
