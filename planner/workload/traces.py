"""Read request traces: CSV or JSON lines of times, prompt and output tokens under common names."""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np

from planner.core.errors import PlannerError
from planner.core.readers import open_bounded, parse_json
from planner.core.text import format_count
from planner.core.units import MIB

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Columns of the Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset).
"""
PLAIN_COLUMNS = ("arrival", "prompt_tokens", "output_tokens")
"""Columns of a plain trace: seconds, tokens, tokens."""
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")
"""Fields of Mooncake's JSON lines (github.com/kvcache-ai/Mooncake, FAST25-release): ms, tokens,
tokens.

RAGPulse (github.com/flashserve/RAGPulse) has the same fields, but in seconds, and its `hash_ids`
are an object.
"""
MAX_TRACE_BYTES, MAX_TRACE_REQUESTS, MAX_TRACE_BLOCKS = 128 * MIB, 2 * 10**6, 8 * 10**6
"""Limits of a trace, uncompressed."""
TRACE_BLOCK_TOKENS = 512
"""Tokens per entry of Mooncake's `hash_ids`."""
SECONDS_PER_HOUR, MIN_REQUESTS_PER_BUSY_HOUR = 3600, 100
"""Seconds, and the fewest requests for which the busiest hour is not chance."""
_SECONDS_BY_UNIT = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_TOKEN_FIELD_PATTERN = "(tokens?(count|len|length|num)?|len|length)"
_FIELD_NAME_PATTERNS = {
    "time": re.compile(
        r"((request)?(arrival|arrived|start|started|submit|submitted|send|sent|created|received)(time(stamp)?|ts|at)?"
        r"|(request)?timestamp|time|ts|datetime)s??(in)?"
        r"((?P<ns>ns|nanos(econds)?)|(?P<us>us|micros(econds)?)|(?P<ms>ms|msecs?|millis(econds?)?)|(?P<s>s|secs?|seconds?))?"
    ),
    "prompt tokens": re.compile(
        rf"(n|num)?(prompt|input|context|prefill|request){_TOKEN_FIELD_PATTERN}|tokens?(prompt|input)|isl"
    ),
    "output tokens": re.compile(
        rf"(n|num)?(output|generated|generation|gen|completion|decode|response){_TOKEN_FIELD_PATTERN}"
        r"|tokens?(output|completion|generated)|osl"
    ),
}
"""Accepted field names in lower-case letters and digits: Azure's, BurstGPT's, Vidur's, OpenAI's,
..."""
_ACCEPTED_COLUMNS_HINT = (
    f"accepted are {','.join(AZURE_COLUMNS)} or {','.join(PLAIN_COLUMNS)} and the like"
    " (arrival_time_ms, arrived_at; input_tokens, prompt_len, num_prefill_tokens;"
    " completion_tokens, output_len, num_decode_tokens), as CSV or as JSON lines"
)


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded requests: `arrival` [n] s since the first, `prompt` and `output` [n] tokens."""

    path: Path
    arrival: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    # one id per request and `TRACE_BLOCK_TOKENS` of its prompt
    hash_ids: tuple[tuple[int, ...], ...] | None = None
    num_dropped: int = 0  # requests in the file without an output token: failed or aborted
    num_hours: int = 1  # hours in the file, if this is the busiest of them
    num_uncounted: int = 0  # first requests, which only fill the caches

    @property
    def has_block_ids(self) -> bool:
        """Whether it is known which blocks of prompts are equal."""
        return bool(self.hash_ids)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of `block_ids`."""
        return TRACE_BLOCK_TOKENS

    @property
    def unhashed_output(self) -> np.ndarray:
        """Output tokens that `block_ids` leave out, [n]."""
        return self.output

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What is assumed of the requests, in sentences."""
        sentences = []
        if self.num_dropped:
            sentences.append(
                f"{format_count(self.num_dropped, 'request')} of {self.path.name} without output"
                f" {'is' if self.num_dropped == 1 else 'are'} left out."
            )
        if self.num_hours > 1:
            sentences.append(
                f"Of the {self.num_hours} hours of {self.path.name} the busiest is planned"
                + ("; the one before it fills the caches." if self.num_uncounted else ".")
            )
        return tuple(sentences)

    @property
    def rate(self) -> float:
        """Requests per second over the trace."""
        counted = self.arrival[self.num_uncounted :]
        return (len(counted) - 1) / max(float(counted[-1] - counted[0]), 1e-9)

    @property
    def burstiness(self) -> float:
        """Shape of the gamma distribution with the same spread of gaps: 1 / CV^2 (1 = Poisson).

        Lower is burstier. If most arrivals share a time stamp, the clock was coarse, and it is mean
        / variance of the arrivals per tick.
        """
        counted = self.arrival[self.num_uncounted :]
        gaps = np.diff(counted)
        if np.count_nonzero(gaps) * 2 < len(gaps):
            ticks = np.unique(counted, return_counts=True)[1]
            return float(ticks.mean() / max(ticks.var(), 1e-9))
        return float(gaps.mean() ** 2 / max(gaps.var(), 1e-12))

    @cached_property
    def block_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """All `hash_ids` numbered from 0, and the start index of each request's, [n + 1]."""
        counts = [len(ids) for ids in self.hash_ids or ((),) * len(self.arrival)]
        flat = np.fromiter(
            (block for ids in self.hash_ids or () for block in ids), np.int64, sum(counts)
        )
        return np.unique(flat, return_inverse=True)[1], np.concatenate(([0], np.cumsum(counts)))

    @cached_property
    def prefix_hit_rate(self) -> float:
        """Fraction of prompt tokens in blocks of an earlier request, as an unlimited cache hits."""
        seen: set[int] = set()
        hits = 0
        rows = zip(self.hash_ids or (), self.prompt, strict=False)
        for row, (blocks, tokens) in enumerate(rows):
            prefix = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
            hits += min(TRACE_BLOCK_TOKENS * prefix, int(tokens)) * (row >= self.num_uncounted)
            seen.update(blocks)
        return hits / float(self.prompt[self.num_uncounted :].sum())

    @property
    def max_sampled_engines(self) -> int:
        """Engines whose caches tell the hit rate of all."""
        return len(self.arrival)

    def select_rows(self, engine: int, engines: int) -> np.ndarray:
        """Return the requests that one of `engines` gets: every n-th."""
        return np.arange(engine, len(self.arrival), engines)

    def take(self, rows: np.ndarray) -> Self:
        """Return the requests `rows`, all counted."""
        hashes = self.hash_ids and tuple(self.hash_ids[row] for row in rows)
        return replace(
            self, arrival=self.arrival[rows] - self.arrival[rows[0]], prompt=self.prompt[rows],
            output=self.output[rows], hash_ids=hashes, num_uncounted=0,
        )  # fmt: skip

    def select_busiest_hour(self) -> Self:
        """Return the requests of the busiest hour since the first request.

        Where equal blocks are known, the hour before it comes first and fills the caches,
        uncounted. Return all if the trace is no longer than an hour or has too few requests.
        """
        hours = (self.arrival // SECONDS_PER_HOUR).astype(int)
        hour_numbers, counts = np.unique(hours, return_counts=True)
        busiest = hour_numbers[counts.argmax()]
        rows = np.flatnonzero(hours == busiest)
        if len(rows) < MIN_REQUESTS_PER_BUSY_HOUR or len(rows) == len(hours):
            return self
        before = np.flatnonzero(hours == busiest - 1) if self.has_block_ids else rows[:0]
        return replace(
            self.take(np.concatenate((before, rows))), num_hours=int(hours[-1]) + 1,
            num_uncounted=len(before),
        )  # fmt: skip

    def __str__(self) -> str:
        counted = self.arrival[self.num_uncounted :]
        minutes = (counted[-1] - counted[0] * (self.num_uncounted > 0)) / 60
        length = f"{format_count(len(counted), 'request')} in {minutes:,.1f} minutes"
        length += f", the busiest of {self.num_hours} hours" if self.num_hours > 1 else ""
        return f"{self.path.name}: {length}" + (
            f", {self.num_dropped:,} without output left out" if self.num_dropped else ""
        )


def read_trace(path: str | Path) -> Trace:
    """Read a trace: CSV (comma, semicolon or tab) or JSON (lines).

    Times are seconds from any start, ms, us or ns if the field's name or the size of an epoch says
    so, or ISO dates. Requests without an output token are left out. Raises `PlannerError` naming
    line and field for values that are missing, not a number, negative or out of order, for empty
    prompts, and for fields whose meaning is unclear.
    """
    path = Path(path)
    try:
        binary = open_bounded(path, MAX_TRACE_BYTES, "the trace ")
        with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
            head = file.readline(MIB).strip()
            file.seek(0)
            return (_read_jsonl_trace if head.startswith(("{", "[")) else _read_csv_trace)(
                path, head, file
            )
    except PlannerError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise PlannerError(
            f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}"
        ) from None


def _read_csv_trace(path: Path, head: str, file: TextIO) -> Trace:
    """Read a CSV trace whose first line is `head`."""
    names, separator = max(
        (
            ([name.strip() for name in next(csv.reader([head], delimiter=sep), [])], sep)
            for sep in ",;\t"
        ),
        key=lambda header: len(header[0]),
    )
    reader = csv.reader(file, delimiter=separator)
    rows = [(reader.line_num, row) for row in islice(reader, 1, MAX_TRACE_REQUESTS + 2)]
    # two columns of the same values are one
    places = [k for k, name in enumerate(names) if not any(
        all(row[k : k + 1] == row[before : before + 1] for _, row in rows)
        for before in range(k) if rows[1:] and _find_quantity(names[before]) == _find_quantity(name) is not None
    )]  # fmt: skip
    fields = _match_columns([names[k] for k in places], f"{path.name}, line 1")
    if tuple(map(str.casefold, fields)) == MOONCAKE_FIELDS:
        raise PlannerError(
            f"{path.name}, line 1: Mooncake's times are ms, most other files' are seconds: call the"
            f" column timestamp_ms or timestamp_s instead of {fields[0]}"
        )
    pick, missing = itemgetter(*(names.index(name) for name in fields)), [""] * len(names)
    cells: list[tuple[str, ...]] = [
        pick(row if len(row) >= len(names) else row + missing) for _, row in rows
    ]
    _check_trace_size(path, len(cells))
    while cells and not any(cells[-1]):
        cells.pop()
    if separator == ";":  # then the comma is the decimal point
        cells = [tuple(cell.replace(",", ".") for cell in row) for row in cells]
    return _build_trace(path, fields, cells, [line for line, _ in rows], 1.0)


def _read_jsonl_trace(path: Path, head: str, file: TextIO) -> Trace:
    """Read a trace of JSON lines."""
    fields: tuple[str, ...] = ()
    cells: list[list[object]] = []
    lines: list[int] = []
    hashes: list[object] = []
    num_blocks = 0
    listed = (
        map(json.dumps, parse_json(file.read(), path.name))
        if head.startswith("[")
        else iter(lambda: file.readline(MIB), "")
    )
    for number, line in filter(lambda one: one[1].strip(), enumerate(listed, 1)):
        where = f"{path.name}, line {number}"
        try:
            request = parse_json(line, where)
        except PlannerError:
            raise PlannerError(f"{where}: not a JSON object: {line.strip()[:60]!r}") from None
        if isinstance(request, dict):
            fields = fields or _match_columns(list(request), where)
        if not isinstance(request, dict) or any(name not in request for name in fields):
            raise PlannerError(f"{where}: needs the fields {', '.join(fields)}")
        kept = (
            value if type(value := request[name]) in (int, float, str) else None for name in fields
        )
        cells.append([None if isinstance(v, int) and abs(v) > 2**63 else v for v in kept])
        lines.append(number)
        hashes.append(ids := request.get("hash_ids") or ())
        num_blocks += len(ids) if isinstance(ids, list) else 0
        _check_trace_size(path, len(cells), num_blocks)
        if isinstance(ids, list) and not all(
            isinstance(block, int) and abs(block) < 2**63 for block in ids
        ):
            raise PlannerError(
                f"{where}, field hash_ids: expected whole numbers below 2^63, got {ids!r:.60}"
            )
    mooncake = fields == MOONCAKE_FIELDS and not any(isinstance(ids, dict) for ids in hashes)
    block_ids = tuple(tuple(ids) if mooncake and isinstance(ids, list) else () for ids in hashes)
    return _build_trace(
        path, fields, cells, lines, 1e-3 if mooncake else 1.0, block_ids if any(block_ids) else None
    )


def _check_trace_size(path: Path, requests: int, blocks: int = 0) -> None:
    """Raise `PlannerError` for a trace with too many requests or blocks."""
    if requests > MAX_TRACE_REQUESTS or blocks > MAX_TRACE_BLOCKS:
        limits = f"{MAX_TRACE_REQUESTS:,} requests, or {MAX_TRACE_BLOCKS:,} hash_ids"
        raise PlannerError(f"{path.name} has more than {limits}; cut it to its busiest hours")


def _match_columns(names: Sequence[str], location: str) -> tuple[str, ...]:
    """Return the names of the time, the prompt tokens and the output tokens.

    Raises `PlannerError` if they are unclear.
    """
    folded = [name.casefold() for name in names]
    for kind in (AZURE_COLUMNS, PLAIN_COLUMNS, MOONCAKE_FIELDS):
        if set(map(str.casefold, kind)) <= set(folded):
            return tuple(names[folded.index(name.casefold())] for name in kind)
    fields = []
    for quantity in _FIELD_NAME_PATTERNS:
        matches = [name for name in names if _find_quantity(name) == quantity]
        if len(matches) != 1:
            problem = (
                f"{' or '.join(matches)} for the {quantity}"
                if matches
                else f"nothing for the {quantity}"
            )
            # a file that is no trace may hold anything: only what reads as a name is shown
            shown = [
                name[:40] for name in names if re.fullmatch(r"[A-Za-z]+([_ ][A-Za-z]+)*", name)
            ]
            place = f"{','.join(shown)[:80]!r}" if shown[1:] else f"its {len(names)} columns"
            raise PlannerError(f"{location}: found {problem} in {place}; {_ACCEPTED_COLUMNS_HINT}")
        fields += matches
    return tuple(fields)


def _find_quantity(name: str) -> str | None:
    """Find the quantity that a field's name says; None for another."""
    normal = _normalize_field_name(name)
    return next(
        (q for q, pattern in _FIELD_NAME_PATTERNS.items() if pattern.fullmatch(normal)), None
    )


def _normalize_field_name(name: str) -> str:
    """Return a field's name in lower-case letters and digits."""
    return re.sub(r"[^a-z0-9]", "", name.casefold().replace("\N{MICRO SIGN}", "u"))


def _build_trace(
    path: Path, fields: Sequence[str], cells: Sequence[Sequence[object]], lines: Sequence[int], unit: float,
    hash_ids: tuple[tuple[int, ...], ...] | None = None,
) -> Trace:  # fmt: skip
    """Build a `Trace` from rows of the `fields`; raise `PlannerError` for a bad cell.

    `lines` are the rows' lines of the file. `unit` is the seconds per unit of time if neither the
    field's name nor the size of the figures says it.
    """
    time, prompt, output = (
        np.array([_parse_number(row[k]) for row in cells], float) for k in range(3)
    )
    if np.count_nonzero(np.isnan(time)) * 2 > len(time):
        time = _parse_dates([row[0] for row in cells])
    elif len(time):
        time = time * _detect_time_unit(fields[0], float(np.nanmin(time)), unit)
    indices = np.flatnonzero(output != 0)
    num_dropped = len(output) - len(indices)
    time, prompt, output = time[indices], prompt[indices], output[indices]
    time = np.where(np.abs(time) < 1e12, time, np.nan)
    if len(time) < 2:
        verb = "has" if num_dropped == 1 else "have"
        dropped = f" ({num_dropped} more {verb} no output token)" if num_dropped else ""
        raise PlannerError(
            f"{path.name} has {format_count(len(time), 'request')}{dropped}; a trace needs at least two"
        )
    for column, bad, problem in (
        (
            0,
            np.isnan(time),
            "is not a time; expected all numbers, or all ISO dates (2026-03-29T12:00:00)",
        ),
        (1, ~np.isfinite(prompt), "is not a number"),
        (2, ~np.isfinite(output), "is not a number"),
        (0, time < 0, "must not be negative"),
        (
            0,
            np.diff(time, prepend=time[:1]) < 0,
            "comes before the line above; sort the trace by time",
        ),
        (1, prompt < 1, "must be at least one token"),
        (2, output < 1, "must be at least one token"),
        (1, prompt >= 2**31, "is more than any model takes"),
        (2, output >= 2**31, "is more than any model gives"),
        (1, prompt != np.floor(prompt), "is not a whole number of tokens"),
        (2, output != np.floor(output), "is not a whole number of tokens"),
    ):
        if bad.any():
            row = indices[np.argmax(bad)]
            cell = cells[row][column]
            shown = "an empty cell" if cell == "" else cell
            where = f"{path.name}, line {lines[row]}, field {fields[column]}"
            raise PlannerError(f"{where}: {shown} {problem}")
    hashes = None if hash_ids is None else tuple(hash_ids[row] for row in indices)
    counts = prompt.astype(np.int64), output.astype(np.int64)
    trace = Trace(path.resolve(), time - time[0], *counts, hashes, num_dropped)
    if trace.select_busiest_hour().arrival[-1] < 1e-9 * len(time):
        raise PlannerError(
            f"{path.name}: all requests of its busiest hour arrive at the same time, so it has no"
            " rate"
        )
    return trace


def _parse_number(cell: Any) -> float:
    """Return a cell as a number; NaN if it is none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return np.nan


def _parse_dates(cells: Sequence[object]) -> np.ndarray:
    """Return the seconds of ISO dates since the first of them, [n]; NaN for what is none."""
    stamps: list[datetime | None] = []
    for cell in cells:
        try:
            stamp = datetime.fromisoformat(str(cell).strip())
            stamps.append(stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC))
        except ValueError:
            stamps.append(None)
    first = min(filter(None, stamps), default=datetime.min)
    return np.array(
        [(stamp - first).total_seconds() if stamp else np.nan for stamp in stamps], float
    )


def _detect_time_unit(field: str, first: float, unit: float) -> float:
    """Return the seconds per unit of a time field.

    They follow from its name, else from the size of an epoch (1.7e9 s since 1970), else they are
    `unit`.
    """
    match = _FIELD_NAME_PATTERNS["time"].fullmatch(_normalize_field_name(field))
    for name, seconds in _SECONDS_BY_UNIT.items():
        if match and match[name]:
            return seconds
    return next(
        (seconds for seconds in _SECONDS_BY_UNIT.values() if 1e9 < first * seconds < 1e10), unit
    )
