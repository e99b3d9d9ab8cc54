"""Read the measured runs that are rows of CSV catalogs."""

import csv
from typing import TypeVar

from planner.core.catalog import CATALOG_DIR, StrictEntry, validate_entry
from planner.core.readers import read_text

EntryT = TypeVar("EntryT", bound=StrictEntry)


def load_catalog_rows(file: str, entry_type: type[EntryT]) -> tuple[EntryT, ...]:
    """Load and validate all rows of a CSV catalog; lines that begin with # are comments."""
    lines = [
        line for line in read_text(CATALOG_DIR / file).splitlines() if not line.startswith("#")
    ]
    return tuple(
        validate_entry(entry_type, row, f"{file}, row {number}")
        for number, row in enumerate(csv.DictReader(lines), 1)
    )
