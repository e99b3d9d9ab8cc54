"""Read a vLLM start-up log, compare it with the plan line by line, and learn a local calibration from the difference.

Phrases of vLLM 0.6 to 0.33 (v1/worker/gpu_worker.py, v1/worker/gpu_model_runner.py, v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from planner.memory import TERMS, MemoryPlan
from planner.quantities import GIB, Interval, PlannerError

if TYPE_CHECKING:
    import pandas as pd

_NUMBER = r"(-?[\d.,]*\d)"
_FIGURES: Mapping[str, tuple[str, ...]] = {
    "total": (rf"Free memory on device[^(]*\([\d.]+/{_NUMBER} GiB\)", rf"total_gpu_memory \({_NUMBER}GiB\)",
              rf"total_memory={_NUMBER}GiB"),
    "free": (rf"Free memory on device[^(]*\({_NUMBER}/", rf"Initial free memory: {_NUMBER} GiB"),
    "requested": (rf"Requested memory: [\d.]+ \(util\), {_NUMBER} GiB",
                  rf"utilization (?:is )?\([\d.]+, {_NUMBER} GiB\)",
                  rf"gpu_memory_utilization \([\d.]+\) = {_NUMBER}GiB"),
    "weights": (rf"Model loading took {_NUMBER} Gi?B", rf"Loading model weights took {_NUMBER} Gi?B",
                rf"model weights take {_NUMBER}GiB", rf"{_NUMBER} GiB for weight"),
    "activation": (rf"torch peak memory increase: {_NUMBER}GiB", rf"activation peak memory takes {_NUMBER}GiB",
                   rf"{_NUMBER} GiB for peak activation"),
    "non_torch": (rf"non-torch forward increase memory: {_NUMBER}GiB", rf"non_torch_memory takes {_NUMBER}GiB",
                  rf"{_NUMBER} GiB for non-torch"),
    "cudagraph_estimate": (rf"Estimated CUDA graph memory: {_NUMBER} GiB",),
    "cudagraph_actual": (rf"CUDA graph pool memory: {_NUMBER} GiB", rf"Graph capturing .*took {_NUMBER} GiB"),
    "kv_available": (rf"Available KV cache memory: {_NUMBER} GiB", rf"reserved for KV Cache is {_NUMBER}GiB"),
    "kv_tokens": (rf"GPU KV cache size: {_NUMBER} tokens",),
    "num_blocks": (rf"# (?:GPU|cuda) blocks: {_NUMBER}", rf"num_gpu_blocks is: {_NUMBER}"),
    "max_concurrency": (rf"Maximum concurrency for [\d,]+ tokens per request: {_NUMBER}x",),
}  # fmt: skip
_COUNTS = ("kv_tokens", "num_blocks", "max_concurrency")
_SMALLEST = ("free", "kv_available", *_COUNTS)
"""Of several ranks the tightest counts: the smallest of these, the largest of the others."""
_ARGUMENTS = {
    "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp",
    "decode_context_parallel_size": "dcp", "max_seq_len": "max_model_len", "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs", "max_num_batched_tokens": "max_num_batched_tokens", "block_size": "block_size",
    "gpu_memory_utilization": "gpu_memory_utilization", "enforce_eager": "enforce_eager", "dtype": "dtype",
    "enable_prefix_caching": "enable_prefix_caching", "kv_cache_dtype": "kv_cache_dtype", "model": "model",
}  # fmt: skip
_VERSION = r"(?:LLM engine \(v|API server version |vLLM version:? ?|version )v?(\d+\.\d+(?:\.\d+)?[\w.+]*)"


@dataclass(frozen=True)
class StartupLog:
    """What a start-up log states: figures (bytes, but counts as they are) and the engine's arguments."""

    version: str | None
    figures: Mapping[str, float]
    arguments: Mapping[str, Any]
    """For `deploy_on`: model, engine_version and whatever else the log names."""
    failure: str


def read_log(text: str) -> StartupLog:
    """The figures and arguments in the `text` of a vLLM start-up log; `PlannerError` when it states none of them."""
    figures = {}
    for name, patterns in _FIGURES.items():
        found = next((hits for pattern in patterns if (hits := re.findall(pattern, text))), [])
        if found:
            values = [float(hit.replace(",", "")) for hit in found]
            value = min(values) if name in _SMALLEST else max(values)
            figures[name] = value if name in _COUNTS else value * GIB
    if not {"weights", "kv_available", "kv_tokens", "free"} & set(figures):
        raise PlannerError('no vLLM start-up figures found; lines such as "Available KV cache memory: ..." would be')
    arguments: dict[str, Any] = {}
    for name, ours in _ARGUMENTS.items():
        if match := re.search(rf"\b{name}['\"]?\s*[=:]\s*(?:'([^']*)'|\"([^\"]*)\"|([\w./+-]+))", text):
            arguments.setdefault(ours, _value(next(group for group in match.groups() if group is not None)))
    if match := re.search(_VERSION, text):
        arguments["engine_version"] = match[1]
    if "total" in figures:
        arguments["gpu_total"] = round(figures["total"])
    failures = re.findall(
        r"^.*?((?:\w+Error|No available memory|Free memory on device .* is less|To serve at least).*)$", text, re.M
    )
    return StartupLog(
        arguments.get("engine_version"),
        figures,
        {name: value for name, value in arguments.items() if value not in (None, "auto")},
        failures[-1].strip() if failures else "",
    )


def _value(text: str) -> Any:
    text = text.removeprefix("torch.")
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    return int(text) if text.isdigit() else float(text) if re.fullmatch(r"\d*\.\d+", text) else text


@dataclass(frozen=True)
class Comparison:
    """One line of planned against logged, in bytes (counts as they are)."""

    term: str
    planned: Interval
    logged: float

    @property
    def off(self) -> float:
        """Logged minus planned."""
        return self.logged - self.planned.mid

    @property
    def inside(self) -> bool:
        """The logged figure lies in the planned interval, or within the log's rounding of it."""
        slack = 0.01 * (1 if self.term in _COUNTS else GIB)
        return self.planned.lo - slack <= self.logged <= self.planned.hi + slack

    def __str__(self) -> str:
        unit, name = (1, "") if self.term in _COUNTS else (GIB, " GiB")
        verdict = "as planned" if self.inside else f"off by {self.off / unit:+,.2f}{name}"
        planned, logged = f"{self.planned / unit:,.2f}{name}", f"{self.logged / unit:,.2f}{name}"
        return f"{self.term:<16} planned {planned}, logged {logged}: {verdict}"


@dataclass(frozen=True)
class Explanation:
    """A log beside the plan of the same deployment."""

    log: StartupLog
    plan: MemoryPlan
    lines: tuple[Comparison, ...]

    @cached_property
    def culprit(self) -> Comparison | None:
        """The budget's term that is furthest from its plan; None when all lie in their intervals."""
        wrong = [line for line in self.lines if line.term in (*TERMS, "requested", "unexplained") and not line.inside]
        return max(wrong, key=lambda line: abs(line.off), default=None)

    @property
    def calibration(self) -> dict[str, float]:
        """Bytes to add to each term, for `memory.plan(deployment, calibration)` and a scenario's `memory_calibration`.

        What the log leaves between its total and its terms goes to the activation peak, or non-torch memory if the log
        states the former.
        """
        shifts = {line.term: line.off for line in self.lines if line.term in TERMS}
        rest = next((line.off for line in self.lines if line.term == "unexplained"), None)
        if rest is not None:
            shifts["non_torch" if "activation" in self.log.figures else "activation"] = rest
        return shifts

    def frame(self) -> pd.DataFrame:
        """One row per line: planned with its interval, logged, difference."""
        import pandas as pd

        return pd.DataFrame(
            [{"term": x.term, "planned": x.planned.mid, "lo": x.planned.lo, "hi": x.planned.hi, "logged": x.logged,
              "off": x.off, "inside": x.inside} for x in self.lines]
        )  # fmt: skip

    def __str__(self) -> str:
        lines = [str(self.plan.deployment), *map(str, self.lines)]
        if self.culprit:
            lines.append(f"The assumption furthest off is {self.culprit.term}: {self.culprit.off / GIB:+.2f} GiB.")
        return "\n".join([*lines, *filter(None, [self.log.failure])])


def explain(log: StartupLog, plan: MemoryPlan) -> Explanation:
    """Every figure of `log` that `plan` has too, in the order in which the engine subtracts them."""
    graphs = "cudagraph_estimate" if "cudagraph" in plan.in_budget else "cudagraph_actual"
    planned = {
        "requested": Interval.exactly(plan.requested), "weights": plan.weights, "activation": plan.activation,
        "non_torch": plan.non_torch, graphs: plan.cudagraph, "kv_available": plan.kv_available,
        "num_blocks": Interval.exactly(plan.pool.num_blocks), "kv_tokens": Interval.exactly(plan.pool.kv_tokens),
        "max_concurrency": plan.max_concurrency,
    }  # fmt: skip
    pool = (plan.kv_available.mid or 1.0, plan.kv_available.lo, plan.kv_available.hi)
    for name in ("num_blocks", "kv_tokens"):
        mid = planned[name].mid
        planned[name] = Interval(mid * pool[1] / pool[0], mid, mid * pool[2] / pool[0])
    lines = [
        Comparison("cudagraph" if name == graphs else name, interval, log.figures[name])
        for name, interval in planned.items()
        if name in log.figures
    ]
    if (rest := _unexplained(log.figures, plan, graphs)) is not None:
        lines.insert(-1, rest)
    return Explanation(log, plan, tuple(lines))


def _unexplained(figures: Mapping[str, float], plan: MemoryPlan, graphs: str) -> Comparison | None:
    """What the log's terms leave of its budget, against the plan of the terms that it doesn't state."""
    if not {"weights", "kv_available"} <= set(figures) or {"activation", "non_torch"} <= set(figures):
        return None
    used = figures["weights"] + figures["kv_available"]
    missing = Interval.exactly(0)
    for name in ("activation", "non_torch", *((graphs,) if "cudagraph" in plan.in_budget else ())):
        if name in figures:
            used += figures[name]
        else:
            missing = missing + getattr(plan, "cudagraph" if name == graphs else name)
    return Comparison("unexplained", missing, figures.get("requested", plan.requested) - used)
