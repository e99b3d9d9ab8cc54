"""Find why an engine did not start by phrases of its log, see `catalogs/startup_errors.yaml`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
        shortage = find_memory_shortage(errors)
        self.lines = [
            f"The log ends with: {line}",
            *known,
            *([f"{shortage}, beside what the engine holds already"] if shortage else []),
            f"Not compared with a plan: {reason}",
        ]


@dataclass(frozen=True)
class MemoryShortage:
    """What PyTorch asked for and did not get; bytes of one GPU."""

    missing: float
    total: float
    allocated: float | None  # by PyTorch

    def __str__(self) -> str:
        return f"{format_number(self.missing / GIB, 1)} GiB short"


def find_memory_shortage(errors: Iterable[StartupError]) -> MemoryShortage | None:
    """Find by how much an allocation failed; None if no error states it."""
    for error in errors:
        sizes = {
            name: size
            for name in ("asked", "free", "total", "allocated")
            if (size := parse_bytes(error.figures.get(name, "").replace(" ", ""))) is not None
        }
        if {"asked", "free", "total"} <= set(sizes) and sizes["asked"] > sizes["free"]:
            missing = sizes["asked"] - sizes["free"]
            return MemoryShortage(missing, sizes["total"], sizes.get("allocated"))
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
    available = (error.figures.get("available_gib") for error in errors)
    gib = next(filter(None, available), None)
    return logged if gib is None else float(gib) * GIB


def find_startup_errors(text: str) -> list[StartupError]:
    """Return the first error of each kind, in the order of the log."""
    known = load_catalog("startup_errors.yaml", ErrorPhrase)
    phrases = {key: (phrase, re.compile(phrase.pattern)) for key, phrase in known.items()}
    errors: dict[str, StartupError] = {}
    for line in text.splitlines():
        for key, (phrase, pattern) in phrases.items():
            if match := pattern.search(line[:MAX_LINE_CHARS]):
                errors.setdefault(key, _make_error(key, phrase, match))
                break
    # people break long lines where they paste them, between words or in them
    unwrapped = [re.sub(r"\s*\n[>\s]*", blank, text[-MAX_UNWRAPPED_CHARS:]) for blank in (" ", "")]
    for key, (phrase, pattern) in phrases.items():
        match = next(filter(None, map(pattern.search, unwrapped)), None)
        if match and match[0] not in text:  # which is of one line
            found = _make_error(key, phrase, match)
            if key not in errors or len(found.figures) > len(errors[key].figures):
                errors[key] = found
    return list(errors.values())


def _make_error(key: str, phrase: ErrorPhrase, match: re.Match[str]) -> StartupError:
    """Make the error of a phrase; of its line is shown what the phrase says, as the rest may be anything."""
    figures = {name: value for name, value in match.groupdict().items() if value is not None}
    return StartupError(key, phrase, figures, redact_text(escape_to_one_line(match[0]))[:300])
