"""Diagnose one replica: what is wrong, the evidence, the cause, and what helps."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from planner.core.errors import PlannerError
from planner.core.readers import read_text
from planner.core.templates import render_template
from planner.core.units import MIB
from planner.engines.argument_names import translate_arguments
from planner.engines.engine import get_engine
from planner.engines.failure_modes import FailureMode, load_failure_modes
from planner.engines.metric_names import get_metric_names
from planner.memory.memory_plan import get_memory_plan
from planner.planning.memory_remedies import (
    MemoryRemedies,
    find_memory_remedies,
    shift_kv_available,
)
from planner.planning.planned_replica import PlannedReplica, load_planned_replica
from planner.tools.diagnostics.failure_detection import (
    DiagnosisCase,
    DiagnosisFinding,
    complete_facts,
    find_failure_modes,
    list_questions,
)
from planner.tools.diagnostics.metrics_pages import NoLoadError, measure_replica, read_metrics_page
from planner.tools.diagnostics.startup_errors import (
    StartupError,
    find_logged_kv_bytes,
    find_startup_errors,
    has_memory_error,
)
from planner.tools.diagnostics.startup_log import find_failures
from planner.tools.diagnostics.stat_lines import StatLines, read_stat_lines

MAX_LOG_BYTES = 64 * MIB
_ENGINE_WORDS = {
    "vllm": r"\b[vV]LLM\b|\bvllm\b|\bEngineCore\b|KV cache memory:",
    "sglang": r"\b[sS][gG][lL]ang\b|#running-req|server_args=|mem_fraction_static|mem usage=",
    "trtllm": r"TRT-LLM|\btensorrt_llm\b|TensorRT-LLM",
}
"""Words by which an engine's log is known."""
_STARTED_PATTERN = r"Application startup complete|server is fired up|KV cache size:|# GPU blocks|max_total_num_tokens="
"""What an engine logs when the start is over, or all of it that needs memory."""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with one replica, by its /metrics pages and its log."""

    case: DiagnosisCase | None
    planned: PlannedReplica | None
    errors: tuple[StartupError, ...] = ()
    stat_lines: StatLines | None = None
    not_judged: str = ""  # why the pages, or the log, tell nothing
    logged_engine: str = "vllm"  # that wrote the log

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the pages tell, or else the lines of the log."""
        source = self.case or self.stat_lines
        return source.facts if source else {}

    @cached_property
    def findings(self) -> list[DiagnosisFinding]:
        """Failure modes that the pages show, the likeliest cause first."""
        return find_failure_modes(self.facts)

    @property
    def engine_name(self) -> str:
        """The engine of the pages, or else of the log."""
        return self.case.measured.engine if self.case else self.logged_engine

    @property
    def modes(self) -> dict[str, FailureMode]:
        """All modes of the catalog, with this engine's names of metrics."""
        engine = get_engine(self.engine_name)
        names = self.case.measured.names if self.case else get_metric_names(engine)
        return load_failure_modes(names.names, engine.name)

    @property
    def memory_remedies(self) -> MemoryRemedies | None:
        """What frees enough memory for the planned deployment if its start failed for want of it."""
        if self.planned is None or not has_memory_error(self.errors):
            return None
        memory = get_memory_plan(self.planned.deployment)
        return find_memory_remedies(shift_kv_available(memory, find_logged_kv_bytes(self.errors)))

    @property
    def questions(self) -> tuple[str, ...]:
        """What these files cannot tell, and what would."""
        known = {
            "has_plan": self.planned is not None,
            "found": bool(self.findings),
            "has_errors": bool(self.errors),
            "lacks_memory": has_memory_error(self.errors),
        }
        return tuple(list_questions({**self.facts, **known}))

    @property
    def exit_code(self) -> int:
        """1 if anything is wrong, 3 if the pages tell nothing, else 0."""
        return 1 if self.has_findings else 3 if self.not_judged else 0

    @property
    def has_findings(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.findings or self.errors)

    def __str__(self) -> str:
        return render_template(
            "tools/diagnostics",
            "diagnosis",
            diagnosis=self,
            facts=complete_facts(self.facts),
            modes=self.modes,
            translate=partial(translate_arguments, engine=self.engine_name),
            memory=self.planned and get_memory_plan(self.planned.deployment),
        ).strip("\n")

    def to_json(self) -> dict[str, object]:
        """Return the diagnosis for `--json`."""
        translate = partial(translate_arguments, engine=self.engine_name)
        kinds = [error.key for error in self.errors] + [one.mode for one in self.findings]
        return {
            "verdict": kinds or ["not_judged" if self.not_judged else "healthy"],
            "findings": [
                {"mode": one.mode, "evidence": [translate(line) for line in one.evidence]}
                for one in self.findings
            ],
            "not_told": list(self.questions),
            "held_against": self.planned and str(self.planned.deployment),
            "errors": [
                {
                    "error": error.key,
                    "mode": error.phrase.mode,
                    "figures": dict(error.figures),
                    "line": error.line,
                    "remedy": translate(error.remedy),
                }
                for error in self.errors
            ],
            "memory_remedies": remedies.to_json() if (remedies := self.memory_remedies) else None,
        }


def diagnose(
    pages: Sequence[str | Path] = (),
    log: str | Path | None = None,
    plan: str | Path | None = None,
    seconds: float | None = None,
) -> Diagnosis:
    """Diagnose a replica by one or two /metrics pages (files or addresses) and its startup `log`.

    `plan` is a scenario or a plan.json. `seconds` is the time between two pages, if the times of
    the files are not those of the server. Raises `PlannerError` if there is neither a page nor a
    log, or one of them cannot be read.
    """
    if not pages and log is None:
        raise PlannerError("diagnose needs one or two pages of /metrics, or a log with --log")
    planned = load_planned_replica(plan) if plan is not None else None
    case, not_judged = None, ""
    if pages:
        version = planned.deployment.engine.version if planned else None
        try:
            measured = measure_replica(
                [read_metrics_page(page) for page in pages], version, seconds
            )
            case = DiagnosisCase(measured, planned)
        except NoLoadError as error:
            not_judged = str(error)
    text = "" if log is None else read_text(Path(log), MAX_LOG_BYTES, errors="replace")
    errors, lines = tuple(find_startup_errors(text)), read_stat_lines(text)
    counts = {name: len(re.findall(words, text)) for name, words in _ENGINE_WORDS.items()}
    named_most = max(counts, key=lambda name: counts[name])
    engine = lines.engine if lines else named_most if counts[named_most] else ""
    if log is not None and case is None and not (errors or not_judged):
        not_judged = f"{Path(log).name}: {gap}" if (gap := _find_gap(text, lines, engine)) else ""
    return Diagnosis(case, planned, errors, lines, not_judged, engine or "vllm")


def _find_gap(text: str, lines: StatLines | None, engine: str) -> str:
    """Return why a log without a known error tells nothing of how it serves; empty if it tells."""
    if lines:
        return lines.untold
    if find_failures(text):
        return "its start failed with an error that is not known here"
    if re.search(_STARTED_PATTERN, text):
        return ""
    if not engine:
        return "it has no line that vLLM, SGLang or TensorRT-LLM is known to write"
    return "it has neither the end of a start nor periodic lines"
