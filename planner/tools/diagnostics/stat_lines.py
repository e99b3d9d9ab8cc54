"""Read the periodic lines of an engine's log: what runs, waits, and fills the KV cache."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from planner.tools.diagnostics.failure_detection import BUSY_FRACTION, DiagnosisFinding

MIN_WAITING = 4.0
"""Requests that wait on average, above which they queue."""
_STAT_PATTERNS = (
    # vLLM v1/metrics/loggers.py and V0's engine/metrics.py
    re.compile(
        r"Running: (?P<running>\d{1,7}) reqs,.{0,60}?(?:Waiting|Pending): (?P<waiting>\d{1,7}) reqs,"
        r".{0,60}?GPU KV cache usage: (?P<usage>\d{1,3}(?:\.\d{1,4})?)%"
    ),
    # SGLang's scheduler: a fraction, not percent
    re.compile(
        r"#running-req: (?P<running>\d{1,7}),.{0,120}?token usage: (?P<fraction>[01]?\.\d{1,4})"
        r".{0,200}?#queue-req: (?P<waiting>\d{1,7})"
    ),
)


@dataclass(frozen=True)
class StatLines:
    """The means over the periodic lines of a log."""

    lines: int
    running: float
    waiting: float
    kv_usage: float  # fraction

    def __str__(self) -> str:
        return (
            f"{self.lines} periodic lines: {self.running:.0f} run and {self.waiting:.0f} wait, the"
            f" KV cache is {self.kv_usage:.0%} full"
        )

    def find_failure_modes(self) -> Iterator[DiagnosisFinding]:
        """Yield what keeps requests waiting: a full KV cache, or too few slots."""
        if self.waiting < max(MIN_WAITING, 0.1 * self.running):
            return
        if self.kv_usage >= BUSY_FRACTION:
            more = "more sequences at once (max_num_seqs) would not help"
            yield DiagnosisFinding("kv_full", (str(self), more))
        else:
            yield DiagnosisFinding("oversubscribed", (str(self),))


def read_stat_lines(text: str) -> StatLines | None:
    """Return the means over the lines of `text` while something runs or waits; None without any."""
    rows = []
    for line in text.splitlines():
        match = next(filter(None, (p.search(line[:2000]) for p in _STAT_PATTERNS)), None)
        if match is None:
            continue
        figures = match.groupdict()
        usage = float(figures.get("usage") or 0) / 100 + float(figures.get("fraction") or 0)
        rows.append((float(figures["running"]), float(figures["waiting"]), min(usage, 1.0)))
    if not (busy := [row for row in rows if row[0] or row[1]]):
        return None
    running, waiting, usage = map(fmean, zip(*busy, strict=True))
    return StatLines(len(busy), running, waiting, usage)
