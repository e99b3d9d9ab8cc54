"""Parse the numbers that people type, with their units."""

import re
from collections.abc import Mapping

from planner.core.errors import PlannerError

_SECOND_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
SECOND_UNITS: Mapping[str, float] = _SECOND_UNITS
MILLISECOND_UNITS: Mapping[str, float] = {
    unit: 1.0 if not unit else seconds * 1e3 for unit, seconds in _SECOND_UNITS.items()
}
COUNT_UNITS: Mapping[str, float] = {"": 1.0, "k": 1e3, "m": 1e6, "/s": 1.0, "%": 1.0, "$": 1.0}


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
