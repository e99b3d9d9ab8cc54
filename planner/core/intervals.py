"""Intervals around an expected value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Z_SCORE_80PCT = 1.2815515655446004
"""Standard normal quantile at 0.90: an 80% interval extends this many sigmas to each side."""


@dataclass(frozen=True)
class Interval:
    """A predicted value `mid` with its 80% interval [`lo`, `hi`], all in the same unit."""

    lo: float
    mid: float
    hi: float

    @classmethod
    def from_value(cls, value: float) -> Interval:
        """Create the interval of a known value, such as arithmetic on a checkpoint's shapes."""
        return cls(value, value, value)

    @classmethod
    def from_normal(cls, mid: float, sigma: float) -> Interval:
        """Create a normal interval with standard deviation `sigma`, in the unit of `mid`."""
        return cls(mid - Z_SCORE_80PCT * sigma, mid, mid + Z_SCORE_80PCT * sigma)

    @classmethod
    def from_lognormal(cls, mid: float, sigma: float) -> Interval:
        """Create a lognormal interval; `sigma` is the std of the logarithm (0.1 = about 10%)."""
        factor = math.exp(Z_SCORE_80PCT * sigma)
        return cls(mid / factor, mid, mid * factor)

    @property
    def relative_half_width(self) -> str:
        """The distance to each end in percent of the expected value."""
        return f"{self.lo / self.mid - 1:+.0%} to {self.hi / self.mid - 1:+.0%}"

    def map_monotone(self, function: Callable[[float], float]) -> Interval:
        """Apply a monotone function, rising or falling, to the interval."""
        lo, mid, hi = function(self.lo), function(self.mid), function(self.hi)
        return Interval(min(lo, hi), mid, max(lo, hi))

    @property
    def as_json_list(self) -> list[float] | None:
        """[mid, lo, hi] for JSON; None if the value is NaN."""
        return None if math.isnan(self.mid) else [self.mid, self.lo, self.hi]

    def __add__(self, other: Interval | float) -> Interval:
        """Add independent values: half-widths add in quadrature."""
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
        lo, mid, hi = (
            "growing" if math.isinf(each) else _format_without_exponent(each, spec)
            for each in (self.lo, self.mid, self.hi)
        )
        return mid if self.lo == self.hi else f"{mid} ({lo} to {hi})"

    def __str__(self) -> str:
        return format(self, ".4g")

    @property
    def short(self) -> str:
        """The value with three digits and the ends with two, such as "25 (16-42)"."""
        low, high = (format_short(end, 2) for end in (self.lo, self.hi))
        mid = format_short(self.mid)
        return mid if low == high else f"{mid} ({low}-{high})"


def _format_without_exponent(value: float, spec: str) -> str:
    text = format(value, spec)
    return f"{float(text):,.0f}" if "e+" in text else text


def format_short(value: float, digits: int = 3) -> str:
    """Format a number with `digits`, whole from 100 on, in thousands or millions from 100,000 on."""
    if math.isinf(value):
        return "unbounded"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.{digits}g}M"
    if abs(value) >= 1e5:
        return f"{value / 1e3:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 100 else _format_without_exponent(value, f".{digits}g")
