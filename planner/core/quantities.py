"""Units, intervals and the one error type: what every other module counts in."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from unicodedata import category

MIB, GIB = 2**20, 2**30
"""Bytes in a MiB and a GiB: memory as drivers and engines report it."""
GB = 10**9
"""Bytes in a GB: vendors' bandwidths and capacities."""
Z80 = 1.2815515655446004
"""Standard normal quantile at 0.90: an 80% interval reaches this many sigmas to each side."""
T = TypeVar("T")


class PlannerError(ValueError):
    """Bad input, told in one sentence: what is wrong, where, and what would be accepted.

    It is one line of at most 400 printable characters, whatever it quotes.
    """

    def __init__(self, message: object) -> None:
        shown = one_line(" ".join(str(message)[:10_000].split()))
        super().__init__(shown if len(shown) <= 400 else f"{shown[:250]} ... {shown[-140:]}")


@contextmanager
def told_of(where: str) -> Iterator[None]:
    """Every `PlannerError` of the block says first that it is about `where`."""
    try:
        yield
    except PlannerError as error:
        raise PlannerError(f"{where}: {error}") from None


def closest(name: str, known: Iterable[str], alike: float) -> str:
    """The nearest of the `known` names, at least so much `alike`; empty where none is."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=alike)), "")


def did_you_mean(name: str, known: Iterable[str], what: str, alike: float = 0.5) -> PlannerError:
    """The error for an unknown `name`: the nearest known ones, at least so much `alike`, or all of them when few."""
    known = sorted(known)
    folded = {k.casefold(): k for k in known}
    close = [folded[match] for match in difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=alike)]
    listed = f"known: {', '.join(known)}" if len(known) <= 12 else "nothing like it is known"
    hint = f"did you mean {' or '.join(close)}?" if close else listed
    return PlannerError(f"unknown {what} {name!r}; {hint}")


def all_known(given: Mapping[str, T], names: Iterable[str], what: str) -> Mapping[str, T]:
    """What was `given`, if `names` has all its keys; `PlannerError` with the nearest where one is not."""
    for key in given:
        if key not in names:
            raise did_you_mean(key, names, what)
    return given


def one_line(text: object) -> str:
    """Text with whatever would not print as a character of one line, such as a newline, shown as its escape."""
    shown = (c if c.isprintable() or category(c) == "Zs" else c.encode("unicode_escape").decode() for c in str(text))
    return "".join(shown)


def named(name: object, what: str) -> str:
    """`name` as text; `PlannerError` where it has half characters, which no file and no terminal takes."""
    if any(category(letter) == "Cs" for letter in str(name)):
        raise PlannerError(f"{what} {str(name)!r:.80} is no Unicode text")
    return str(name)


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Rows of text in columns, the last as wide as it is."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, (*widths[:-1], 0))) for row in rows)


def bytes_of(gib: float, most: int, field: str) -> int:
    """The bytes of `gib` GiB; `PlannerError` above the `most` bytes that a GPU has."""
    if gib * GIB > 1.1 * most:
        mib = f"; if it is MiB, write {gib / 1024:.4g}" if gib * MIB <= 1.1 * most else ""
        raise PlannerError(f"{field}: {gib:g} GiB is more than a GPU has, {most / GIB:.4g} GiB{mib}")
    return round(gib * GIB)


@dataclass(frozen=True)
class Interval:
    """A predicted figure: `mid`, and the 80% interval [`lo`, `hi`] around it, all in the same unit."""

    lo: float
    mid: float
    hi: float

    @classmethod
    def exactly(cls, value: float) -> Interval:
        """A figure that is known, such as arithmetic on a checkpoint's shapes."""
        return cls(value, value, value)

    @classmethod
    def spread(cls, mid: float, sigma: float) -> Interval:
        """Normal around `mid` with standard deviation `sigma`, in the unit of `mid`."""
        return cls(mid - Z80 * sigma, mid, mid + Z80 * sigma)

    @classmethod
    def factor(cls, mid: float, sigma: float) -> Interval:
        """Lognormal around `mid`: `sigma` is the standard deviation of its logarithm (0.1 = about 10%)."""
        reach = math.exp(Z80 * sigma)
        return cls(mid / reach, mid, mid * reach)

    @property
    def reach(self) -> str:
        """How far it goes to each side, in percent of the middle."""
        return f"{self.lo / self.mid - 1:+.0%} to {self.hi / self.mid - 1:+.0%}"

    def map(self, function: Callable[[float], float]) -> Interval:
        """Carry a monotone `function` through the interval."""
        lo, mid, hi = function(self.lo), function(self.mid), function(self.hi)
        return Interval(min(lo, hi), mid, max(lo, hi))

    @property
    def triple(self) -> list[float] | None:
        """[middle, low, high] for JSON; None where there is no figure."""
        return None if math.isnan(self.mid) else [self.mid, self.lo, self.hi]

    def __add__(self, other: Interval | float) -> Interval:
        """Sum of independent figures: the half-widths add in quadrature."""
        if not isinstance(other, Interval):
            return Interval(self.lo + other, self.mid + other, self.hi + other)
        mid = self.mid + other.mid
        down = math.hypot(self.mid - self.lo, other.mid - other.lo)
        return Interval(mid - down, mid, mid + math.hypot(self.hi - self.mid, other.hi - other.mid))

    __radd__ = __add__

    def __neg__(self) -> Interval:
        return Interval(-self.hi, -self.mid, -self.lo)

    def __sub__(self, other: Interval | float) -> Interval:
        return self + (-other)

    def __mul__(self, scale: float) -> Interval:
        lo, mid, hi = self.lo * scale, self.mid * scale, self.hi * scale
        return Interval(lo, mid, hi) if scale >= 0 else Interval(hi, mid, lo)

    __rmul__ = __mul__

    def __truediv__(self, scale: float) -> Interval:
        return self * (1 / scale)

    def __format__(self, spec: str) -> str:
        lo, mid, hi = ("growing" if math.isinf(each) else format(each, spec) for each in (self.lo, self.mid, self.hi))
        return mid if self.lo == self.hi else f"{mid} ({lo} to {hi})"

    def __str__(self) -> str:
        return format(self, ".4g")
