"""Read the periodic lines of an engine's log: what runs, waits, and fills the KV cache."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from planner.core.text import format_count
from planner.tools.diagnostics.failure_detection import BUSY_FRACTION, DiagnosisFinding

MIN_WAITING = 4.0
"""Requests that wait in the usual line, above which they queue."""
MIN_STALLED_LINES = 3
"""Last lines in which nothing is computed while requests are in flight: half a minute."""
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
        r"(?:(?=.{0,300}gen throughput \(token/s\): (?P<generated>[\d.]{1,12}))|)"
        r"(?:(?=.{0,300}#queue-req: (?P<waiting>\d{1,7}))|)"
    ),
    # TensorRT-LLM's print_iter_log, a line for each step (pyexecutor/py_executor.py, 0.18 to 1.3; pulls 3914, 16323)
    "trtllm": re.compile(
        r"\biter = \d{1,9},(?=.{0,600}num_scheduled_requests(?::| =) (?P<running>\d{1,7}))"
        r"(?:(?=.{0,600}kv_cache_util = (?P<fraction>[01](?:\.\d{1,6})?))|)"
        r"(?:(?=.{0,900}num_unscheduled = (?P<waiting>\d{1,7}))|)"
        r"(?:(?=.{0,600}(?:elapsed_time = (?P<step_s>[\d.]{1,24})s|host_step_time = (?P<step_ms>[\d.]{1,24})ms))|)"
        r"(?:(?=.{0,900}'num_ctx_tokens': (?P<prompt>\d{1,9}))|)"
        r"(?=.{0,900}'num_generation_tokens': (?P<generated>\d{1,9}))"
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
    waiting: float | None  # None: the line does not tell
    kv_usage: float | None  # fraction
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
        return self._find_usual([line.running for line in self.lines]) or 0.0

    @property
    def waiting(self) -> float | None:
        """Requests that wait in the usual line, so that a short burst is no queue."""
        return self._find_usual([line.waiting for line in self.lines])

    @property
    def kv_usage(self) -> float | None:
        """The fraction of the KV cache in use in the usual line."""
        return self._find_usual([line.kv_usage for line in self.lines])

    @staticmethod
    def _find_usual(values: Iterable[float | None]) -> float | None:
        """Return the median of what is told; None if no line tells it."""
        told = [value for value in values if value is not None]
        return median(told) if told else None

    @property
    def untold(self) -> str:
        """What the lines leave open; empty if they tell what waits, and what fills the cache."""
        gaps = {"how many requests wait": self.waiting, "how full the KV cache is": self.kv_usage}
        untold = [gap for gap, value in gaps.items() if value is None]
        return f"its lines do not tell {' and '.join(untold)}" if self.lines and untold else ""

    def __str__(self) -> str:
        word = "retraction" if self.engine == "sglang" else "preemption"
        counted = f"; {format_count(self.preemptions, word)}" if self.preemptions else ""
        if not self.lines:
            return f"no periodic lines{counted}"
        return (
            f"{format_count(len(self.lines), 'periodic line')}: {self.running:.0f} running"
            f"{'' if self.waiting is None else f' and {self.waiting:.0f} waiting'}"
            f"{'' if self.kv_usage is None else f', the KV cache is {self.kv_usage:.0%} full'}{counted}"
        )

    def find_failure_modes(self) -> Iterator[DiagnosisFinding]:
        """Yield what is wrong: no progress, preemptions, a full KV cache, or too few slots."""
        last = self.lines[-MIN_STALLED_LINES:]
        if len(last) == MIN_STALLED_LINES and all(line.tps == 0 for line in last):
            count = f"in the last {MIN_STALLED_LINES} lines or more no token is computed"
            yield DiagnosisFinding("stalled", (str(self), count))
            return
        usage, waiting = self.kv_usage or 0.0, self.waiting or 0.0
        # of an excerpt, one is enough where the cache is full and others wait for it
        is_full = usage >= BUSY_FRACTION and waiting >= 1
        if self.preemptions >= MIN_PREEMPTIONS or (self.preemptions and is_full):
            yield DiagnosisFinding("kv_preemption", (str(self),))
        if waiting < max(MIN_WAITING, 0.1 * self.running):
            return
        if usage >= BUSY_FRACTION:
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
        told = {name: float(value) for name, value in match.groupdict().items() if value}
        preemptions += int(told.get("preempted", 0.0))
        running, waiting = told["running"], told.get("waiting")
        usage = told["usage"] / 100 if "usage" in told else told.get("fraction")
        # vLLM and SGLang give rates; TensorRT-LLM counts tokens, and the time of the step may be 0
        step_s = told.get("step_s", told.get("step_ms", 0.0) / 1e3) if engine == "trtllm" else 1.0
        tokens = told.get("prompt", 0.0) + told["generated"] if "generated" in told else None
        tps = None if tokens is None or (tokens and not step_s) else tokens / (step_s or 1.0)
        if running or waiting:
            usage = None if usage is None else min(usage, 1.0)
            rows.append(StatLine(running, waiting, usage, tps))
    return StatLines(tuple(rows), preemptions, engine) if rows or preemptions else None
