"""Numbers for people: two or three significant digits, and never a limit's own text beside it."""

import math
from functools import partial

from planner.core.intervals import Interval

EN_DASH = "\N{EN DASH}"
"""Stands for a figure that does not exist, and between the ends of a range where ASCII is not asked for."""


def format_number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits: 5.53, 12.8, 1,170, 687k; no exponents."""
    if not math.isfinite(value):
        return "unbounded" if value > 0 else "-"
    if abs(value) >= 99_950 and digits <= 3:
        millions = abs(value) >= 999_500
        scaled, unit = (value / 1e6, "M") if millions else (value / 1e3, "k")
        return f"{format_number(scaled, digits)}{unit}"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))  # 9.996 became 10.0
    text = f"{rounded:,.{max(decimals, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_apart(value: float, other: float, digits: int = 3) -> str:
    """Format `value` with as many digits as tell it from `other` in as many, up to six.

    >>> format_apart(1.2502, 1.2478), format_apart(1.2478, 1.2502), format_apart(5.53, 10.1)
    ('1.25', '1.248', '5.53')
    """
    while digits < 6 and value != other and f"{value:.{digits}g}" == f"{other:.{digits}g}":
        digits += 1
    return format_number(value, digits)


format_distinct = partial(format_apart, digits=2)
"""The same from two digits on."""


def format_seconds(seconds: float, limit: float = math.inf) -> str:
    """Format a time in ms below a second, in s up to ten minutes, else in h; apart from `limit`."""
    unit, factor = _choose_time_unit(seconds if math.isinf(limit) else min(seconds, limit))
    if math.isinf(seconds):
        return "unbounded"
    text = (
        format_number(seconds * factor, 2)
        if math.isinf(limit)
        else format_distinct(seconds * factor, limit * factor)
    )
    return f"{text} {unit}"


def format_limit_seconds(seconds: float) -> str:
    """Format a limit as it was given: "300 ms", "1 s", "1.25 s"."""
    unit, factor = _choose_time_unit(seconds)
    value = seconds * factor
    return f"{value:,.6g} {unit}" if value < 1e5 else f"{value:,.0f} {unit}"


def format_seconds_range(value: Interval, limit: float = math.inf, dash: str = "-") -> str:
    """Format a time, apart from `limit`, with the ends of its interval in its unit: "25 ms (16-41)"."""
    ends = format_seconds_ends(value, dash)
    shown = value.lo < value.hi and math.isfinite(value.mid)
    return format_seconds(value.mid, limit) + f" ({ends})" * shown


def format_seconds_ends(value: Interval, dash: str = "-") -> str:
    """Format the ends of a time's interval in the unit of its middle: "16-41"."""
    return format_ends(value * _choose_time_unit(value.mid)[1], dash)


def format_range(value: Interval, digits: int = 3) -> str:
    """Format a number with the ends of its interval: "12.8 (9.2-18)"."""
    return format_number(value.mid, digits) + f" ({format_ends(value)})" * (value.lo < value.hi)


def format_ends(value: Interval, dash: str = "-") -> str:
    """Format both ends of an interval with two digits: "9.2-18"."""
    return f"{format_number(value.lo, 2)}{dash}{format_number(value.hi, 2)}"


def format_usd(usd: float) -> str:
    """Format an amount: cents below $10, else three significant digits: "$11,500"."""
    value = float(f"{usd:.3g}")
    return f"${usd:.2f}" if 0 < value < 10 else f"${value:,.0f}" if value >= 100 else f"${value:g}"


def format_share(share: float) -> str:
    """Format a share in whole percent; only all is 100%, and only nothing is 0%."""
    if 0.995 <= share < 1:
        return "over 99%"
    return "under 1%" if 0 < share < 0.005 else f"{share:.0%}"


def format_probability(probability: float, asked: float | None = None) -> str:
    """Format a probability in percent; never 0% or 100%, which no prediction is.

    One below what is `asked` has as many digits as show that.
    """
    shown = min(max(probability, 1e-6), 1 - 1e-6)
    if asked is not None and probability < asked and format_share(shown) == format_share(asked):
        return f"{min(shown, asked - 1e-3):.1%}"
    return format_share(shown)


def _choose_time_unit(seconds: float) -> tuple[str, float]:
    if not math.isfinite(seconds):
        return "s", 1.0
    return ("ms", 1e3) if seconds < 1 else ("s", 1.0) if seconds < 600 else ("h", 1 / 3600)
