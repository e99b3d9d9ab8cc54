"""What a terminal can show: its width, its colours, and the characters of its encoding."""

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from planner.core.intervals import Interval
from planner.core.text import UNBREAKABLE_SPACE

Colour = Literal["green", "amber", "red"]
ANSI_CODES: dict[Colour, str] = {"green": "32", "amber": "33", "red": "31"}
DEFAULT_WIDTH, MIN_WIDTH, MAX_WIDTH = 80, 40, 100
BAR_LIMIT_SHARE = 0.8
"""Where on a bar its limit stands; what is beyond 1 / 0.8 of it is drawn at the end."""


@dataclass(frozen=True)
class TerminalStyle:
    """How text is laid out: columns, colour, block characters, and whether long lines wrap."""

    width: int = DEFAULT_WIDTH
    has_colour: bool = False
    has_unicode: bool = True
    wraps: bool = False

    def paint(self, text: str, colour: Colour) -> str:
        """Colour `text`, where colour is shown."""
        return f"\033[{ANSI_CODES[colour]}m{text}\033[0m" if self.has_colour else text

    def choose(self, text: str, ascii_text: str) -> str:
        """Choose the text that the encoding can show."""
        return text if self.has_unicode else ascii_text

    def draw_bar(self, use: Interval, columns: int) -> str:
        """Draw shares of a limit: the 80% interval, the expected value, and the limit at 1.

        `columns` are all of the bar's, at least 8. A value without bound ends beyond the limit.
        """
        line, band, dot, edge = "─━●▏" if self.has_unicode else "-=o|"
        first = self.choose("▕", "|")
        limit_at = round((columns - 2) * BAR_LIMIT_SHARE)
        cells = [line] * limit_at + [" "] * (columns - 2 - limit_at)

        def locate(share: float) -> int:
            if share <= 1:
                return min(math.floor(share * limit_at), limit_at - 1)
            at = math.floor(min(share, 1e3) * limit_at)
            return min(max(at, limit_at), len(cells) - 1)

        low, mid, high = map(locate, (use.lo, use.mid, use.hi))
        cells[low : high + 1] = [band] * (high + 1 - low)
        cells[mid] = dot
        return f"{first}{''.join(cells[:limit_at])}{edge}{''.join(cells[limit_at:])}"

    def format_rows(self, rows: Iterable[Sequence[str]]) -> list[str]:
        """Format pairs of label and text, indented, long text wrapped below itself."""
        pairs = list(rows)
        label_width = max((len(label) for label, _ in pairs), default=0)
        lines = []
        for label, text in pairs:
            head = f"  {label:<{label_width}}  "
            parts = (
                textwrap.wrap(
                    text, max(self.width - len(head), 20), break_long_words=False,
                    break_on_hyphens=False,
                )
                if self.wraps and text
                else [text]
            )  # fmt: skip
            indents = [head, *[" " * len(head)] * (len(parts) - 1)]
            lines += [f"{indent}{part}" for indent, part in zip(indents, parts, strict=True)]
        return [line.replace(UNBREAKABLE_SPACE, " ").rstrip() for line in lines]


def detect_style(stream: TextIO | None = None) -> TerminalStyle:
    """Detect what `stream` (default: stdout) shows; NO_COLOR and TERM=dumb turn colour off."""
    stream = stream or sys.stdout
    is_terminal = stream.isatty()
    width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns if is_terminal else DEFAULT_WIDTH
    return TerminalStyle(
        width=min(max(width, MIN_WIDTH), MAX_WIDTH),
        has_colour=(
            is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        ),
        has_unicode=(getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8",
        wraps=is_terminal,
    )
