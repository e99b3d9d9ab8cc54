"""The diagnosis of one replica: what is wrong, the evidence, why, and what each remedy would do."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.core.catalog import read_text
from planner.core.quantities import MIB, PlannerError
from planner.facts.engine_metrics import engine_metrics
from planner.facts.engines import engine
from planner.latency.performance import Performance
from planner.memory.budget import memory_of
from planner.operations.diagnose.causes import Case, Finding, findings
from planner.operations.diagnose.pages import measured, read_page
from planner.operations.diagnose.plans import Planned, planned_by
from planner.operations.diagnose.remedies import Remedy, remedies
from planner.operations.diagnose.startup_errors import StartupError, startup_errors
from planner.operations.failure_modes import FailureMode, failure_modes
from planner.operations.rendering import render

MOST = 64 * MIB
"""Bytes of a log."""


@dataclass(frozen=True)
class Diagnosis:
    """What pages and a log of one replica say."""

    case: Case | None
    planned: Planned | None
    errors: tuple[StartupError, ...] = ()

    @cached_property
    def findings(self) -> list[Finding]:
        """Failure modes that the page shows, the likeliest cause first."""
        return findings(self.case) if self.case else []

    @property
    def modes(self) -> dict[str, FailureMode]:
        """All modes in the words of the catalog, with this engine's names of metrics."""
        names = self.case.measured.names if self.case else engine_metrics(engine())
        return failure_modes(names.names)

    @cached_property
    def remedies(self) -> list[Remedy]:
        """What helps against the first finding, replayed."""
        return remedies(self.case, self.findings[0].mode) if self.case and self.findings else []

    @property
    def replica(self) -> str:
        """Which deployment the page is held against."""
        if self.planned is None:
            return ""
        deployment = self.planned.deployment
        args, pool = deployment.args, memory_of(deployment).pool
        limits = f"max_num_seqs {args.max_num_seqs}, max_num_batched_tokens {args.max_num_batched_tokens}"
        return f"{deployment}, {limits}, a KV cache of {pool.kv_tokens:,} tokens"

    @property
    def plan_says(self) -> str:
        """Whether the planned deployment starts at all; empty without a plan."""
        if self.planned is None:
            return ""
        memory = memory_of(self.planned.deployment)
        return "the planned deployment starts" if memory.starts else memory.reason

    @property
    def wrong(self) -> bool:
        """Something was found."""
        return bool(self.findings or self.errors)

    def __str__(self) -> str:
        return render("diagnosis", found=self, modes=self.modes, before=self.case and self.case.replayed).strip("\n")

    def data(self) -> dict[str, Any]:
        """For other programs."""
        return {
            "verdict": [*(error.key for error in self.errors), *(found.mode for found in self.findings)] or ["healthy"],
            "findings": [{"mode": found.mode, "evidence": list(found.evidence)} for found in self.findings],
            "held_against": self.replica or None,
            "errors": [
                {"error": error.key, "mode": error.phrase.mode, "figures": dict(error.figures), "line": error.line,
                 "remedy": error.remedy}
                for error in self.errors
            ],
            "as_it_is": _figures(self.case.replayed) if self.case and self.case.replayed else None,
            "remedies": [{"change": remedy.change, **_figures(remedy.performance)} for remedy in self.remedies],
        }  # fmt: skip


def _figures(performance: Performance) -> dict[str, float | None]:
    found = {f"{name}_p95_ms": performance.at(name, "p95").mid * 1e3 for name in ("ttft", "tpot")}
    found |= {"preemptions_per_request": performance.preemptions, "kv_usage_p99": performance.kv_usage_p99}
    return {name: value if value == value else None for name, value in found.items()}


def diagnose(
    pages: Sequence[str | Path] = (), log: str | Path | None = None, plan: str | Path | None = None,
    seconds: float | None = None,
) -> Diagnosis:  # fmt: skip
    """What one or two /metrics pages (files or addresses) of a replica and its start-up `log` say.

    `plan` is a scenario or a plan.json; `seconds` the time between two pages where the files' own times do not tell.
    """
    if not pages and log is None:
        raise PlannerError("diagnose needs one or two pages of /metrics, or a log with --log")
    planned = planned_by(plan) if plan is not None else None
    case = None
    if pages:
        version = planned.deployment.engine.version if planned else None
        case = Case(measured([read_page(page) for page in pages], version, seconds), planned)
    errors = startup_errors(read_text(Path(log), MOST, errors="replace")) if log is not None else []
    return Diagnosis(case, planned, tuple(errors))
