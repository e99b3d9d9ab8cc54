"""Compare what was expected with what is: one row for a quantity, and one table of rows."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from planner.core.intervals import Z_SCORE_80PCT, Interval, format_short
from planner.core.text import escape_to_one_line

ComparisonStatus = Literal["PASS", "FAIL", "NOT MEASURED"]
WorseSide = Literal["higher", "lower", "both"]


@dataclass(frozen=True)
class ComparisonRow:
    """One quantity in its unit: what is expected of it, and what was measured."""

    name: str
    unit: str
    expected: Interval | None  # None: a limit alone
    measured: float | None = None
    limit: float | None = None  # of a target
    worse: WorseSide = "higher"
    sigma: float = 0.0  # of ln(measured) between repeats
    rounding: float = 0.0  # of what was measured
    decimals: int | None = None  # None: as many as are significant
    term: str = ""  # of the memory budget

    @property
    def title(self) -> str:
        """Name and unit."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    @property
    def value(self) -> float:
        """What was measured; NaN if it was not."""
        return math.nan if self.measured is None else self.measured

    @property
    def difference(self) -> float:
        """Measured minus expected; NaN without one of them."""
        return self.value - self.expected.mid if self.expected else math.nan

    @property
    def ratio(self) -> float:
        """Measured over expected; NaN without one of them."""
        is_known = self.expected is not None and 0 < self.expected.mid < math.inf
        return self.value / self.expected.mid if self.expected and is_known else math.nan

    @property
    def difference_text(self) -> str:
        """The difference with its sign."""
        return f"{round(self.difference, self.decimals) + 0.0:+,.{self.decimals}f}"  # no -0.00

    def format_value(self, value: Interval | float | None) -> str:
        """Format one of its values; empty for None and NaN."""
        if value is None or value != value:  # NaN
            return ""
        if self.decimals is not None:
            return format(value, f",.{self.decimals}f")
        if not isinstance(value, Interval):
            return format_short(value)
        return "overloaded" if math.isinf(value.mid) else value.short

    @property
    def accepted(self) -> tuple[float, float]:
        """The interval, widened by what repeats differ by and by the rounding."""
        assert self.expected is not None
        mid, lo, hi = self.expected.mid, self.expected.lo, self.expected.hi
        if not (self.sigma and mid > 0 and math.isfinite(mid)):
            return lo - self.rounding, hi + self.rounding
        below, above = (
            math.hypot(math.log(ratio), Z_SCORE_80PCT * self.sigma) if ratio < math.inf else ratio
            for ratio in (mid / max(lo, 1e-12), hi / mid)
        )
        return mid * math.exp(-below) - self.rounding, mid * math.exp(above) + self.rounding

    @property
    def status(self) -> ComparisonStatus:
        """PASS unless it is worse than its interval or its limit; being better is no failure."""
        if math.isnan(self.value):
            return "NOT MEASURED"
        if self.limit is not None and self.value > self.limit:
            return "FAIL"
        if self.expected is None:
            return "PASS"
        low, high = self.accepted
        fails = {"higher": self.value > high, "lower": self.value < low}
        is_worse = any(fails.values()) if self.worse == "both" else fails[self.worse]
        return "FAIL" if is_worse else "PASS"


@dataclass(frozen=True)
class Column:
    """A column of a comparison: its title, what it shows of a row, and its format in text."""

    title: str
    read: Callable[[ComparisonRow], str]
    spec: str = ""


def format_table(rows: Iterable[ComparisonRow], columns: Sequence[Column]) -> list[Markup]:
    """Return the lines of a table, its head first; text has no title for names."""
    cells = [[column.read(row) for column in columns] for row in rows]
    titles = [column.title for column in columns]
    return [
        Markup("".join(map(format, map(escape_to_one_line, line), specs)).rstrip())
        for specs in [[column.spec for column in columns]]
        for line in (["", *titles[1:]], *cells)
    ]
