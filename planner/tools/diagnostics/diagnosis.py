"""The diagnosis of one replica: what is wrong, the evidence, why, and what each remedy would do."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.core.errors import PlannerError
from planner.core.readers import read_text
from planner.core.templates import render_template
from planner.core.units import MIB
from planner.engines.engine import get_engine
from planner.engines.failure_modes import FailureMode, load_failure_modes
from planner.engines.metric_names import get_metric_names
from planner.latency.performance import Performance
from planner.memory.memory_plan import get_memory_plan
from planner.tools.diagnostics.failure_detection import (
    DiagnosisCase,
    DiagnosisFinding,
    find_failure_modes,
)
from planner.tools.diagnostics.metrics_pages import measure_replica, read_metrics_page
from planner.tools.diagnostics.planned_replica import PlannedReplica, load_planned_replica
from planner.tools.diagnostics.remedies import Remedy, simulate_remedies
from planner.tools.diagnostics.startup_errors import StartupError, find_startup_errors

MAX_LOG_BYTES = 64 * MIB
"""Bytes of a log."""


@dataclass(frozen=True)
class Diagnosis:
    """What pages and a log of one replica say."""

    case: DiagnosisCase | None
    planned: PlannedReplica | None
    errors: tuple[StartupError, ...] = ()

    @cached_property
    def findings(self) -> list[DiagnosisFinding]:
        """Failure modes that the page shows, the likeliest cause first."""
        return find_failure_modes(self.case) if self.case else []

    @property
    def modes(self) -> dict[str, FailureMode]:
        """All modes in the words of the catalog, with this engine's names of metrics."""
        names = self.case.measured.names if self.case else get_metric_names(get_engine())
        return load_failure_modes(names.names)

    @cached_property
    def remedies(self) -> list[Remedy]:
        """What helps against the first finding, replayed."""
        return (
            simulate_remedies(self.case, self.findings[0].mode)
            if self.case and self.findings
            else []
        )

    @property
    def replica_description(self) -> str:
        """Which deployment the page is held against."""
        if self.planned is None:
            return ""
        deployment = self.planned.deployment
        args, pool = deployment.args, get_memory_plan(deployment).pool
        limits = (
            f"max_num_seqs {args.max_num_seqs}, max_num_batched_tokens"
            f" {args.max_num_batched_tokens}"
        )
        return f"{deployment}, {limits}, a KV cache of {pool.reported_tokens:,} tokens"

    @property
    def plan_start_status(self) -> str:
        """Whether the planned deployment starts at all; empty without a plan."""
        if self.planned is None:
            return ""
        memory = get_memory_plan(self.planned.deployment)
        return "the planned deployment starts" if memory.can_start else memory.reason

    @property
    def has_findings(self) -> bool:
        """Something was found."""
        return bool(self.findings or self.errors)

    def __str__(self) -> str:
        return render_template(
            "tools/diagnostics",
            "diagnosis",
            found=self,
            modes=self.modes,
            before=self.case and self.case.simulated,
        ).strip("\n")

    def to_json(self) -> dict[str, Any]:
        """For other programs."""
        return {
            "verdict": [*(error.key for error in self.errors), *(finding.mode for finding in self.findings)] or ["healthy"],
            "findings": [{"mode": found.mode, "evidence": list(found.evidence)} for found in self.findings],
            "held_against": self.replica_description or None,
            "errors": [
                {"error": error.key, "mode": error.phrase.mode, "figures": dict(error.figures), "line": error.line,
                 "remedy": error.remedy}
                for error in self.errors
            ],
            "as_it_is": _serialize_performance(self.case.simulated) if self.case and self.case.simulated else None,
            "remedies": [{"change": remedy.change, **_serialize_performance(remedy.performance)} for remedy in self.remedies],
        }  # fmt: skip


def _serialize_performance(performance: Performance) -> dict[str, float | None]:
    found = {f"{name}_p95_ms": performance.get(name, "p95").mid * 1e3 for name in ("ttft", "tpot")}
    found |= {
        "preemptions_per_request": performance.preemptions,
        "kv_usage_p99": performance.kv_usage_p99,
    }
    return {name: value if value == value else None for name, value in found.items()}


def diagnose(
    pages: Sequence[str | Path] = (), log: str | Path | None = None, plan: str | Path | None = None,
    seconds: float | None = None,
) -> Diagnosis:  # fmt: skip
    """What one or two /metrics pages (files or addresses) of a replica and its start-up `log` say.

    `plan` is a scenario or a plan.json; `seconds` the time between two pages where the files' own
    times do not tell.
    """
    if not pages and log is None:
        raise PlannerError("diagnose needs one or two pages of /metrics, or a log with --log")
    planned = load_planned_replica(plan) if plan is not None else None
    case = None
    if pages:
        version = planned.deployment.engine.version if planned else None
        case = DiagnosisCase(
            measure_replica([read_metrics_page(page) for page in pages], version, seconds), planned
        )
    errors = (
        find_startup_errors(read_text(Path(log), MAX_LOG_BYTES, errors="replace"))
        if log is not None
        else []
    )
    return Diagnosis(case, planned, tuple(errors))
