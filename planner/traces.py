"""Traces of requests: the Azure LLM inference CSV, Mooncake's JSONL and a plain CSV."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from planner.quantities import PlannerError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Columns of the Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset)."""
MOONCAKE = ("timestamp", "input_length", "output_length")
"""Fields of the Mooncake traces (github.com/kvcache-ai/Mooncake, FAST25-release): ms, tokens, and `hash_ids`."""
PLAIN = ("arrival", "prompt_tokens", "output_tokens")
"""Columns of a plain trace: seconds, tokens, tokens."""
BLOCK = 512
"""Tokens behind one of Mooncake's `hash_ids`."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests as they came: `arrival` [n] s from the first, `prompt` and `output` [n] tokens, maybe block hashes."""

    path: Path
    arrival: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    hash_ids: tuple[tuple[int, ...], ...] | None = None  # per request, one id per `BLOCK` tokens of its prompt

    @property
    def rate(self) -> float:
        """Requests per second over the trace."""
        return (len(self.arrival) - 1) / max(float(self.arrival[-1]), 1e-9)

    @property
    def burstiness(self) -> float:
        """Shape of the gamma that spreads the gaps as much: 1 / CV^2 (1 = Poisson, less = burstier).

        Where most arrivals share a time stamp the clock was coarse: mean / variance of the arrivals per tick instead.
        """
        gaps = np.diff(self.arrival)
        if np.count_nonzero(gaps) * 2 < len(gaps):
            ticks = np.unique(self.arrival, return_counts=True)[1]
            return float(ticks.mean() / max(ticks.var(), 1e-9))
        return float(gaps.mean() ** 2 / max(gaps.var(), 1e-12))

    @cached_property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens whose block an earlier request already had: a cache that forgets nothing."""
        seen: set[int] = set()
        hits = 0
        for blocks, tokens in zip(self.hash_ids or (), self.prompt, strict=False):
            known = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
            hits += min(BLOCK * known, int(tokens))
            seen.update(blocks)
        return hits / float(self.prompt.sum())


def read_trace(path: str | Path) -> Trace:
    """The trace in `path`, its kind told by its first line.

    Raises `PlannerError` naming line and field for what is missing, not a number, negative, zero-length or unsorted.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig") as file:
            head = file.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PlannerError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from None
    if head.startswith("{"):
        return _mooncake(path)
    import pandas as pd

    known = {tuple(name.casefold() for name in kind): kind for kind in (AZURE, PLAIN)}
    columns = [name.strip().strip('"').casefold() for name in head.split(",")]
    kind = next((kind for folded, kind in known.items() if set(folded) <= set(columns)), None)
    if kind is None:
        raise PlannerError(
            f"{path.name}, line 1: a trace starts with {','.join(AZURE)}, with {','.join(PLAIN)} or with a JSON "
            f"object, got {head[:60]!r}"
        )
    try:
        frame = pd.read_csv(path, skip_blank_lines=False, dtype=str, encoding="utf-8-sig")
    except (ValueError, OSError) as error:
        raise PlannerError(f"{path.name} is not a CSV: {' '.join(str(error).split())}") from None
    frame.columns = pd.Index(columns)
    while len(frame) and frame.iloc[-1].isna().all():
        frame = frame.iloc[:-1]
    cells = {name: frame[name.casefold()] for name in kind}
    if kind is AZURE:
        stamps = pd.to_datetime(cells[AZURE[0]], format="ISO8601", errors="coerce", utc=True)
        seconds = (stamps - stamps.min()).dt.total_seconds().to_numpy()
    else:
        seconds = pd.to_numeric(cells[PLAIN[0]], errors="coerce").to_numpy(dtype=float)
    tokens = (pd.to_numeric(cells[name], errors="coerce").to_numpy(dtype=float) for name in kind[1:])
    return _checked(path, kind, (seconds, *tokens), cells, first_line=2)


def _mooncake(path: Path) -> Trace:
    requests: list[dict[str, Any]] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                request = json.loads(line)
            except ValueError:
                raise PlannerError(f"{path.name}, line {number}: not a JSON object: {line.strip()[:60]!r}") from None
            if not isinstance(request, dict) or any(name not in request for name in MOONCAKE):
                raise PlannerError(f"{path.name}, line {number}: needs the fields {', '.join(MOONCAKE)}")
            requests.append(request)
    cells = {name: [request[name] for request in requests] for name in MOONCAKE}
    stamps, prompt, output = (np.array([_number(value) for value in column]) for column in cells.values())
    hashes = tuple(tuple(request.get("hash_ids") or ()) for request in requests)
    return _checked(path, MOONCAKE, (stamps / 1000, prompt, output), cells, 1, hashes if any(hashes) else None)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _checked(
    path: Path, fields: Sequence[str], columns: tuple[np.ndarray, ...], cells: Mapping[str, Any], first_line: int,
    hash_ids: tuple[tuple[int, ...], ...] | None = None,
) -> Trace:  # fmt: skip
    """A `Trace` of (seconds, prompt tokens, output tokens); the first bad cell is the error."""
    arrival, prompt, output = columns
    if len(arrival) < 2:
        raise PlannerError(f"{path.name} has {len(arrival)} requests; a trace needs at least two")
    for field, bad, problem in (
        (fields[0], ~np.isfinite(arrival), "is not a time"),
        (fields[1], ~np.isfinite(prompt), "is not a number"),
        (fields[2], ~np.isfinite(output), "is not a number"),
        (fields[0], arrival < 0, "must not be negative"),
        (fields[0], np.diff(arrival, prepend=arrival[:1]) < 0, "comes before the line above; sort the trace by time"),
        (fields[1], prompt < 1, "must be at least one token"),
        (fields[2], output < 1, "must be at least one token"),
    ):
        if bad.any():
            row = int(np.argmax(bad))
            place = f"{path.name}, line {row + first_line}, field {field}"
            raise PlannerError(f"{place}: {list(cells[field])[row]} {problem}")
    if arrival[-1] <= arrival[0]:
        raise PlannerError(f"{path.name}: all requests arrive at the same time, so it has no rate")
    return Trace(path.resolve(), arrival - arrival[0], prompt.astype(np.int64), output.astype(np.int64), hash_ids)
