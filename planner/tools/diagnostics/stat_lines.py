"""Read the periodic lines of an engine's log: what runs, waits, and fills the KV cache."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from planner.core.text import format_count
from planner.tools.diagnostics.failure_detection import BUSY_FRACTION, DiagnosisFinding

MIN_WAITING = 4.0
"""Requests that wait in the usual line, above which they queue."""
MIN_STALLED_LINES = 3
"""Last lines in which nothing is computed while requests are in flight: half a minute."""
MIN_SLOWDOWN = 4.0
"""Factor by which fewer tokens a second are generated for as many requests, from which it is told."""
_STAT_PATTERNS = {
    # vLLM v1/metrics/loggers.py and V0's engine/metrics.py
    "vllm": re.compile(
        r"(?:Avg prompt throughput: (?P<prompt>[\d.]{1,12}) tokens/s, Avg generation throughput:"
        r" (?P<generated>[\d.]{1,12}) tokens/s, )?"
        r"Running: (?P<running>\d{1,7}) reqs,.{0,60}?(?:Waiting|Pending): (?P<waiting>\d{1,7}) reqs,"
        r"(?:.{0,40}?Preemptions: (?P<preempted>\d{1,7}),)?"
        r".{0,60}?GPU KV cache usage: (?P<usage>\d{1,3}(?:\.\d{1,4})?)%"
    ),
    # SGLang's scheduler: a fraction, not percent
    "sglang": re.compile(
        r"#running-req: (?P<running>\d{1,7}),.{0,120}?token usage: (?P<fraction>[01]?\.\d{1,4})"
        r".{0,200}?(?:gen throughput \(token/s\): (?P<generated>[\d.]{1,12}), )?#queue-req:"
        r" (?P<waiting>\d{1,7})"
    ),
}
_PREEMPTION_PATTERNS = (
    # vLLM V0's scheduler, every 50th; SGLang's
    re.compile(r"is preempted by.{0,300}total_cumulative_preemption_cnt=(?P<total>\d{1,9})"),
    re.compile(r"#retracted_reqs: (?P<count>\d{1,7})"),
)
MIN_PREEMPTIONS = 3
"""SGLang's documentation calls occasional retractions fine (hyperparameter tuning)."""


@dataclass(frozen=True)
class StatLine:
    """One periodic line while requests are in flight."""

    running: float
    waiting: float
    kv_usage: float  # fraction
    tps: float | None  # prompt and generated tokens per second


@dataclass(frozen=True)
class StatLines:
    """The periodic lines of a log, and the preemptions that it tells."""

    lines: tuple[StatLine, ...]
    preemptions: int = 0
    engine: str = "vllm"

    @property
    def running(self) -> float:
        """Requests that run in the usual line."""
        return median(line.running for line in self.lines) if self.lines else 0.0

    @property
    def waiting(self) -> float:
        """Requests that wait in the usual line, so that a short burst is no queue."""
        return median(line.waiting for line in self.lines) if self.lines else 0.0

    @property
    def kv_usage(self) -> float:
        """The fraction of the KV cache in use in the usual line."""
        return median(line.kv_usage for line in self.lines) if self.lines else 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether nothing is computed in the last lines."""
        last = self.lines[-MIN_STALLED_LINES:]
        return len(last) == MIN_STALLED_LINES and all(line.tps == 0 for line in last)

    @property
    def slowdown(self) -> str:
        """That as many requests are served with far fewer tokens a second than before; empty if not."""
        paced = [line for line in self.lines if line.tps]
        if len(paced) < 2:
            return ""
        best = max(paced, key=lambda line: line.tps or 0.0)
        later = paced[paced.index(best) :]
        worst = min(later, key=lambda line: line.tps or 0.0)
        if (best.tps or 0.0) < MIN_SLOWDOWN * (worst.tps or 0.0) or worst.running < best.running:
            return ""
        return (
            f"tokens a second fall from {best.tps:,.0f} with {best.running:.0f} running to"
            f" {worst.tps:,.0f} with {worst.running:.0f}"
        )

    def __str__(self) -> str:
        word = "retraction" if self.engine == "sglang" else "preemption"
        counted = f"; {format_count(self.preemptions, word)}" if self.preemptions else ""
        if not self.lines:
            return f"no periodic lines{counted}"
        return (
            f"{format_count(len(self.lines), 'periodic line')}: {self.running:.0f} running and"
            f" {self.waiting:.0f} waiting,"
            f" the KV cache is {self.kv_usage:.0%} full{counted}"
        )

    def find_failure_modes(self) -> Iterator[DiagnosisFinding]:
        """Yield what is wrong: no progress, preemptions, a full KV cache, or too few slots."""
        if self.is_stalled:
            count = f"in the last {MIN_STALLED_LINES} lines or more no token is computed"
            yield DiagnosisFinding("stalled", (str(self), count))
            return
        # of an excerpt, one is enough where the cache is full and others wait for it
        is_full = self.kv_usage >= BUSY_FRACTION and self.waiting >= 1
        if self.preemptions >= MIN_PREEMPTIONS or (self.preemptions and is_full):
            evidence = (str(self), *filter(None, (self.slowdown,)))
            yield DiagnosisFinding("kv_preemption", evidence)
        if self.waiting < max(MIN_WAITING, 0.1 * self.running):
            return
        if self.kv_usage >= BUSY_FRACTION:
            more = "more sequences at once (max_num_seqs) would not help"
            yield DiagnosisFinding("kv_full", (str(self), more))
            return
        counts = {line.running for line in self.lines}
        sentences = [str(self)]
        if len(counts) == 1 and len(self.lines) > 1:
            sentences.append(f"every line has {self.running:.0f} running: probably max_num_seqs")
        yield DiagnosisFinding("oversubscribed", tuple(sentences))


def read_stat_lines(text: str) -> StatLines | None:
    """Return the lines of `text` while something runs or waits; None without any."""
    rows, preemptions, engine = [], 0, "vllm"
    for line in text.splitlines():
        for pattern in _PREEMPTION_PATTERNS:
            if match := pattern.search(line[:2000]):
                counts = {name: int(count) for name, count in match.groupdict().items()}
                preemptions = max(preemptions + counts.get("count", 0), counts.get("total", 0))
                engine = "sglang" if "count" in counts else engine
        found = ((name, p.search(line[:2000])) for name, p in _STAT_PATTERNS.items())
        engine, match = next((one for one in found if one[1]), (engine, None))
        if match is None:
            continue
        figures = {name: float(value or 0) for name, value in match.groupdict().items()}
        preemptions += int(figures.get("preempted", 0.0))
        usage = figures.get("usage", 0.0) / 100 + figures.get("fraction", 0.0)
        tps = figures.get("prompt", 0.0) + figures["generated"] if match["generated"] else None
        if figures["running"] or figures["waiting"]:
            rows.append(StatLine(figures["running"], figures["waiting"], min(usage, 1.0), tps))
    return StatLines(tuple(rows), preemptions, engine) if rows or preemptions else None
