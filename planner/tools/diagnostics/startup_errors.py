"""Find why an engine did not start by phrases of its log, see `catalogs/startup_errors.yaml`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from planner.core.catalog import StrictEntry, load_catalog
from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.core.redaction import redact_text
from planner.core.text import escape_to_one_line
from planner.core.units import GIB, parse_bytes

FOREIGN_MEMORY_ERRORS = ("foreign_process", "memory_profiling")
"""Errors about memory that other processes take or give back."""
MAX_LINE_CHARS, MAX_UNWRAPPED_CHARS = 2000, 65_536
"""Characters of a line that are searched, and of the log's end without its line breaks."""


class ErrorPhrase(StrictEntry):
    """One kind of error; the head of the catalog explains the fields."""

    pattern: str
    title: str
    cause: str
    remedy: str
    like: str
    source: str
    mode: str | None = None


@dataclass(frozen=True)
class StartupError:
    """One error of a log: its kind, the figures that it names, and its line."""

    key: str
    phrase: ErrorPhrase
    figures: Mapping[str, str]
    line: str

    @property
    def remedy(self) -> str:
        """The remedy, with the figures of the log."""
        return self.phrase.remedy.format_map(self.figures)


class FailedStartError(PlannerError):
    """A log says why a start failed, and its deployment is not known: there is nothing to compare."""

    def __init__(self, line: str, errors: Sequence[StartupError], reason: str) -> None:
        """Keep the log's last error, what is known of all, and why nothing was compared."""
        known = [f"{error.phrase.title}. {error.remedy}" for error in errors]
        super().__init__("; ".join([reason, *(f"it ended so: {each}" for each in known or [line])]))
        if shortage := find_memory_shortage(errors):
            missing = format_number(shortage.missing / GIB, 1)
            known.append(f"{missing} GiB short, beside what the engine holds already")
        ended, not_compared = f"The log ends with: {line}", f"Not compared with a plan: {reason}"
        self.lines = [ended, *known, not_compared]


@dataclass(frozen=True)
class MemoryShortage:
    """What PyTorch asked for and did not get; bytes of one GPU."""

    missing: float
    total: float
    allocated: float  # by PyTorch; 0 if that is not stated


def find_memory_shortage(errors: Iterable[StartupError]) -> MemoryShortage | None:
    """Find by how much an allocation failed; None if no error states it."""
    for error in errors:
        names = ("asked", "free", "total", "allocated")
        stated = (parse_bytes(error.figures.get(name, "").replace(" ", "")) for name in names)
        asked, free, total, allocated = (size or 0.0 for size in stated)
        if asked > free and free and total:
            return MemoryShortage(asked - free, total, allocated)
    return None


def has_memory_error(errors: Iterable[StartupError]) -> bool:
    """Return whether the engine itself takes more memory than there is."""
    return any(
        error.phrase.mode == "oom_start" and error.key not in FOREIGN_MEMORY_ERRORS
        for error in errors
    )


def find_logged_kv_bytes(
    errors: Iterable[StartupError], logged: float | None = None
) -> float | None:
    """Return the bytes available to the KV cache as the errors, or else a line, state them."""
    stated = filter(None, (error.figures.get("available_gib") for error in errors))
    return next((float(gib) * GIB for gib in stated), logged)


def find_startup_errors(text: str) -> list[StartupError]:
    """Return an error of each kind, in the order of the log: the one that names the most figures.

    Of a line counts the first phrase. Shown is what the phrase says, as the rest may be anything.
    """
    known = load_catalog("startup_errors.yaml", ErrorPhrase)
    patterns = {key: re.compile(phrase.pattern) for key, phrase in known.items()}
    found, errors = list[tuple[str, re.Match[str]]](), dict[str, StartupError]()
    for line in text.splitlines():
        of_line = (
            (key, pattern.search(line[:MAX_LINE_CHARS])) for key, pattern in patterns.items()
        )
        found += islice(((key, match) for key, match in of_line if match), 1)
    for blank in (" ", ""):  # people break lines where they paste them, between words or in them
        whole = re.sub(r"\s*\n[>\s]*", blank, text[-MAX_UNWRAPPED_CHARS:])
        of_whole = ((key, pattern.search(whole)) for key, pattern in patterns.items())
        found += ((key, match) for key, match in of_whole if match and match[0] not in text)
    for key, match in found:
        figures = {name: value for name, value in match.groupdict().items() if value is not None}
        if key not in errors or len(figures) > len(errors[key].figures):
            shown = redact_text(escape_to_one_line(match[0]))[:300]
            errors[key] = StartupError(key, known[key], figures, shown)
    return list(errors.values())
