"""Figures as people read them: two or three digits, one unit, one spelling of money."""

import math
import re
from collections.abc import Mapping

from planner.core.errors import PlannerError
from planner.core.intervals import Interval

DASH = "\N{EN DASH}"
"""Stands for a figure that does not exist, and between the ends of a range."""
MAX_LATENCY_DIGITS = 5
"""Most digits that tell a latency from its limit."""
_SECOND_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
SECOND_UNITS: Mapping[str, float] = _SECOND_UNITS
MILLISECOND_UNITS: Mapping[str, float] = {
    unit: 1.0 if not unit else seconds * 1e3 for unit, seconds in _SECOND_UNITS.items()
}
COUNT_UNITS: Mapping[str, float] = {"": 1.0, "k": 1e3, "m": 1e6, "/s": 1.0, "%": 1.0, "$": 1.0}


def round_digits(value: float, digits: int) -> float:
    """Round to significant digits."""
    return float(f"{value:.{digits}g}")


def format_number(value: float, digits: int = 2) -> str:
    """Format a number at `digits` significant digits, in thousands (k) from 100,000 on."""
    if not math.isfinite(value):
        return DASH
    value = round_digits(value, digits)
    if abs(value) >= 1e5:
        return f"{value / 1e3:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def format_usd(usd: float) -> str:
    """Format an amount: cents below $10, a decimal below $100, three digits above."""
    if usd >= 100:
        return f"${round_digits(usd, 3):,.0f}"
    return f"${usd:.{2 if usd < 9.995 else 1}f}"


def format_seconds(seconds: float, digits: int = 2) -> str:
    """Format a latency: milliseconds below a second, seconds above."""
    if not math.isfinite(seconds):
        return DASH
    if round_digits(seconds, digits) >= 1:
        text = f"{seconds:.{digits}g}" if seconds < 10**digits else f"{seconds:,.0f}"
        return f"{text}{'.0' if text.isdigit() and len(text) < digits else ''} s"
    return f"{format_number(seconds * 1e3, digits)} ms"


def format_beside_limit(seconds: float, limit: float) -> str:
    """Format a latency with as many digits as tell it from its limit."""
    for digits in range(2, MAX_LATENCY_DIGITS):
        text = format_seconds(seconds, digits)
        if text != format_seconds(limit, digits):
            return text
    return format_seconds(seconds, MAX_LATENCY_DIGITS)


def format_limit(seconds: float) -> str:
    """Format a limit exactly as it was asked for."""
    return f"{seconds:.10g} s" if seconds >= 1 else f"{seconds * 1e3:.10g} ms"


def format_range(interval: Interval, digits: int = 2) -> str:
    """Format both ends of an interval."""
    return f"{format_number(interval.lo, digits)}{DASH}{format_number(interval.hi, digits)}"


def format_share(share: float) -> str:
    """Format a probability or a share in whole percent, never rounded to certainty."""
    if 0.995 <= share < 1:
        return "over 99%"
    if 0 < share < 0.005:
        return "under 1%"
    return f"{share:.0%}"


def parse_quantity(text: object, units: Mapping[str, float], name: str) -> float:
    """Parse what people type, such as "1,500", "2k" or "1.5 s", into the unit of `units[""]`."""
    match = re.fullmatch(
        r"\$?\s*([\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([a-z/%$]*)", str(text).strip().lower()
    )
    factor = match and {**COUNT_UNITS, **units}.get(match[2])
    if not match or factor is None:
        raise PlannerError(
            f"{name}: expected a number such as {_describe_units(units)}, got {text!r:.40}"
        )
    return float(match[1].replace(",", "")) * factor


def _describe_units(units: Mapping[str, float]) -> str:
    return "1.5 s or 800 ms" if "ms" in units else "1,500 or 2k"
