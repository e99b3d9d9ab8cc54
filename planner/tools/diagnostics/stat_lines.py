"""Read the periodic lines of an engine's log: what runs, waits, and fills the KV cache."""

import math
import re
from dataclasses import dataclass
from statistics import median
from typing import Any

from planner.core.text import format_count

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


@dataclass(frozen=True)
class StatLine:
    """One periodic line while requests are in flight; NaN for what it does not tell."""

    running: float
    waiting: float
    kv_usage: float  # fraction
    tps: float  # prompt and generated tokens per second


@dataclass(frozen=True)
class StatLines:
    """The periodic lines of a log, and the preemptions that it tells."""

    lines: tuple[StatLine, ...]
    preemptions: int = 0
    engine: str = "vllm"

    def find_usual(self, name: str) -> float:
        """Return the median of what the lines tell, so that a short burst is no queue; NaN if none does."""
        told = [value for line in self.lines if (value := getattr(line, name)) >= 0]
        return median(told) if told else math.nan

    def __str__(self) -> str:
        word = "retraction" if self.engine == "sglang" else "preemption"
        parts = [format_count(len(self.lines), "periodic line")]
        if self.lines:
            waiting, usage = self.find_usual("waiting"), self.find_usual("kv_usage")
            queued = "" if math.isnan(waiting) else f" and {waiting:.0f} waiting"
            full = "" if math.isnan(usage) else f", the KV cache is {usage:.0%} full"
            parts[0] += f": {self.find_usual('running'):.0f} running{queued}{full}"
        counted = format_count(self.preemptions, word) if self.preemptions else ""
        return "; ".join(filter(None, (*parts, counted)))

    @property
    def facts(self) -> dict[str, Any]:
        """What `detectors.yaml` asks for."""
        last = [line.tps for line in self.lines[-MIN_STALLED_LINES:]]
        waiting, running = (self.find_usual(name) for name in ("waiting", "running"))
        return {
            "summary": str(self),
            "lines": len(self.lines), "running": running, "waiting": waiting, "waiting_now": waiting,
            "usage": self.find_usual("kv_usage"), "line_preemptions": self.preemptions,
            "in_flight": self.lines[-1].running + max(self.lines[-1].waiting, 0.0) if self.lines else 0,
            "last_tps": max(last) if len(last) == MIN_STALLED_LINES else math.nan,
        }  # fmt: skip


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
        running, waiting = told["running"], told.get("waiting", math.nan)
        usage = told.get("fraction", told.get("usage", math.nan) / 100)
        # vLLM and SGLang give rates; TensorRT-LLM counts tokens, and the time of the step may be 0
        step_s = told.get("step_s", told.get("step_ms", 0.0) / 1e3) if engine == "trtllm" else 1.0
        tokens = told.get("prompt", 0.0) + told.get("generated", math.nan)
        tps = tokens / (step_s or math.nan) if tokens else 0.0
        if running or waiting > 0:
            rows.append(
                StatLine(running, waiting, usage if math.isnan(usage) else min(usage, 1.0), tps)
            )
    return StatLines(tuple(rows), preemptions, engine) if rows or preemptions else None
