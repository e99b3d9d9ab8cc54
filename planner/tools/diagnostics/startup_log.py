"""Read a vLLM startup log: its figures, the arguments that it names, and how it ended.

The patterns are in `catalogs/startup_log.yaml`, those of errors in `catalogs/startup_errors.yaml`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from planner.core.catalog import CATALOG_DIR, StrictEntry, load_catalog
from planner.core.errors import PlannerError, add_error_context
from planner.core.readers import read_yaml
from planner.core.redaction import redact_text
from planner.core.text import escape_to_one_line
from planner.core.units import GIB, parse_bytes
from planner.engines.engine_args import EngineArgs
from planner.planning.scenario_schema import coerce_engine_args

LOG_PHRASES: Mapping[str, Any] = read_yaml(CATALOG_DIR / "startup_log.yaml")
COUNT_FIGURES: Mapping[str, list[str]] = LOG_PHRASES["counts"]
"""Figures that are not bytes."""
LAYOUT_NAMES = ("tp", "pp", "dp", "dcp")
_MIN_OVER_RANKS = ("free", "kv_available", *COUNT_FIGURES)
"""Figures of which the smallest over the ranks counts; of the others it is the largest."""
_ARGUMENT_NAMES: Mapping[str, str] = LOG_PHRASES["arguments"]
"""Our names of arguments, by the engine's."""
_ARGUMENT_NAME_PATTERN = f"({'|'.join(_ARGUMENT_NAMES)})"
_ARGUMENT_PATTERN = re.compile(
    rf"(?:\b{_ARGUMENT_NAME_PATTERN}['\"]?\s*[=:(]\s*|Defaulting {_ARGUMENT_NAME_PATTERN} to )"
    r"(?='([^']{0,200})'|\"([^\"]{0,200})\"|([\w./+-]{0,199}[\w/]))"  # a full stop ends a sentence
)
_SPECULATION_PATTERNS = {
    "method": r"'(\w{1,80})'",
    "model": r"'([^']{1,200})'",
    "num_spec(?:ulative)?_tokens": r"(\d{1,4})\b",
}
FOREIGN_MEMORY_ERRORS = ("foreign_process", "memory_profiling")
"""Errors about memory that other processes take or give back."""
MAX_LINE_CHARS, MAX_UNWRAPPED_CHARS = 2000, 65_536
"""Characters of a line that are searched, and of the log's end without its line breaks."""


@dataclass(frozen=True)
class StartupLog:
    """The figures (in bytes, except counts) and engine arguments of a startup log."""

    figures: Mapping[str, float]
    arguments: Mapping[str, Any]
    """By our names, such as model, gpu, tp, speculation (method, draft model, number of tokens)."""
    failure: str
    """The error that ended the start; empty for a server that started."""


def parse_startup_log(text: str, knows_model: bool = False) -> StartupLog:
    """Read the text of a vLLM startup log; raise `PlannerError` if it states no figures.

    One that ends in an error needs none, if it names its model or `knows_model` is true. Of the
    engine's arguments a value of another type raises it as well.
    """
    figures = {}
    for name, patterns in {**LOG_PHRASES["figures"], **COUNT_FIGURES}.items():
        numbers = next(filter(None, (_find_numbers(pattern, text) for pattern in patterns)), [])
        if numbers:
            values = [float(number.replace(",", "")) for number in numbers]
            value = min(values) if name in _MIN_OVER_RANKS else max(values)
            figures[name] = value if name in COUNT_FIGURES else value * GIB
    arguments, logged = dict[str, Any](), dict[str, str]()
    for match in _ARGUMENT_PATTERN.finditer(text):
        name, value_text = (group for group in match.groups() if group is not None)
        logged.setdefault(name, value_text)
    for name, our_name in _ARGUMENT_NAMES.items():
        if name in logged:
            text_value = logged[name].removeprefix("torch.").removesuffix(".json")
            arguments.setdefault(
                our_name,
                int(text_value)
                if re.fullmatch("[0-9]{1,15}", text_value)
                else float(text_value)
                if re.fullmatch(r"\d*\.\d+", text_value)
                else {"True": True, "False": False, "None": None}.get(text_value, text_value),
            )
    if version := re.search(LOG_PHRASES["version"], text):
        arguments["engine_version"] = version[1]
    if speculative := re.search(
        r"speculative_config['\"]?\s*[=:]\s*(?:SpeculativeConfig\(|\{)([^)}\n]{0,999})", text
    ):
        parts = [
            re.search(rf"\b{key}['\"]?\s*[=:]\s*{pattern}", speculative[1])
            for key, pattern in _SPECULATION_PATTERNS.items()
        ]
        arguments["speculation"] = tuple(part and part[1] for part in parts)
    arguments |= {
        f"gpu_{name}": round(figures[name]) for name in ("total", "free") if name in figures
    }
    failures = find_failures(text)
    if not {"weights", "kv_available", "kv_tokens", "free"} & set(figures) and not (
        failures and (knows_model or "model" in arguments)
    ):
        raise PlannerError(
            'no vLLM start-up figures found; lines such as "Available KV cache memory: ..."'
            " would be"
        )
    length = {"max_model_len": int(figures.pop("length"))} if "length" in figures else {}
    arguments = length | {
        name: value
        for name, value in arguments.items()
        if value not in (None, "auto") and (name not in LAYOUT_NAMES or isinstance(value, int))
    }
    given = {name: arguments[name] for name in arguments if name in EngineArgs.__dataclass_fields__}
    with add_error_context("the log"):
        arguments |= coerce_engine_args(given)
    return StartupLog(figures, arguments, failures[-1].strip() if failures else "")


def find_failures(text: str) -> list[str]:
    """Return the names of the errors of a log that end a start, without those that only point at another.

    What follows a name may hold anything, and is not shown.
    """
    return re.findall(LOG_PHRASES["failure"], text)


def _find_numbers(pattern: str, text: str) -> list[str]:
    """Return the numbers that `pattern` matches, each of bounded length."""
    number = r"(?<![\d.,])(-?\d[\d,]{0,18}(?:\.\d{1,20})?)"
    return re.findall(pattern.replace("__", r"[^(\n]{0,80}").replace("N", number, 1), text)


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
    remedy: str  # with the figures of the log


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
            remedy = known[key].remedy.format_map(figures)
            errors[key] = StartupError(key, known[key], figures, shown, remedy)
    return list(errors.values())
