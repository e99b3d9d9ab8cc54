"""Units of bytes, and the largest count that is read."""

from __future__ import annotations

import re

from planner.core.errors import PlannerError

MIB, GIB = 2**20, 2**30
"""Bytes in a MiB and a GiB, the units in which drivers and engines report memory."""
GB = 10**9
"""Bytes in a GB, the unit of vendors' bandwidths and capacities."""
MAX_COUNT = 10**8
"""Largest whole number that a scenario, a table or a schedule case may give, of whatever it counts."""


def convert_gib_to_bytes(gib: float, max_bytes: int, field: str) -> int:
    """Convert GiB to bytes; raise `PlannerError` above the `max_bytes` of the GPU."""
    if gib * GIB > 1.1 * max_bytes:
        mib = f"; if it is MiB, write {gib / 1024:.4g}" if gib * MIB <= 1.1 * max_bytes else ""
        raise PlannerError(
            f"{field}: {gib:g} GiB is more than a GPU has, {max_bytes / GIB:.4g} GiB{mib}"
        )
    return round(gib * GIB)


def parse_bytes(text: str) -> float | None:
    """Return the bytes of "16Gi", "64m" or "1.5 GB", in powers of 1024; None for other text."""
    match = re.fullmatch(r"([\d.]{1,20})\s*([kmgt]?)i?b?", text.strip().lower())
    if not match or match[1].count(".") > 1 or match[1] == ".":
        return None
    return float(match[1]) * float(1024 ** " kmgt".index(match[2] or " "))
