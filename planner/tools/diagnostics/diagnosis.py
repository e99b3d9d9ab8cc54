"""Diagnose one replica: detectors of `detectors.yaml` over facts of its pages, its log and its plan.

The simulation of the measured workload separates causes. If it is as slow as the server, the cause
is scheduling or memory; if its steps are faster, the cause is the machine.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import jinja2

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.readers import read_text, read_yaml
from planner.core.templates import render_template
from planner.core.text import format_count
from planner.core.units import MIB
from planner.engines.argument_names import translate_arguments
from planner.engines.engine import get_engine
from planner.engines.metric_names import get_metric_names, load_failure_modes
from planner.latency.performance import Performance
from planner.latency.speculative_decoding import compute_planned_acceptance
from planner.latency.step_model import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.planned_replica import (
    PlannedReplica,
    load_planned_replica,
    with_acceptance,
)
from planner.planning.prediction import predict
from planner.tools.comparison import ComparisonRow
from planner.tools.diagnostics.metrics_pages import (
    ReplicaMetrics,
    measure_replica,
    read_metrics_page,
)
from planner.tools.diagnostics.startup_log import (
    StartupError,
    find_failures,
    find_memory_shortage,
    find_startup_errors,
    has_memory_error,
)
from planner.tools.diagnostics.stat_lines import StatLines, read_stat_lines
from planner.workload.workload import Workload

MAX_LOG_BYTES = 64 * MIB
MEASURED_EXCESS_FACTOR = 1.2
"""Measured KV cache beyond its planned interval, as a factor, that is no longer the planned one."""
_WORDS = jinja2.Environment()
_WORDS.filters |= {"f": format, "plural": format_count}
_compile = cache(_WORDS.compile_expression)
_parse = cache(_WORDS.from_string)
_read_tables = cache(partial(read_yaml, Path(__file__).with_name("detectors.yaml")))
_UNKNOWN: Mapping[str, Any] = {
    **dict.fromkeys(
        ("accepted", "cpu", "decode_s", "deferred", "gap", "generated", "held", "hits",
         "last_tps", "line_preemptions", "longest", "most_running", "output", "planned_accepted",
         "planned_hits", "planned_output", "planned_pool", "planned_prompt", "planned_rate", "pool",
         "pool_hi", "pool_lo", "pool_tokens", "preemptions", "prefill", "prompt", "queue", "rate",
         "requests", "running", "slots", "ttft", "ttft_limit", "usage", "waiting", "waiting_now"),
        math.nan,
    ),
    **dict.fromkeys(
        ("between_pages", "has_links", "has_pages", "in_flight", "is_idle", "knows_in_flight",
         "late", "meets_targets", "since_start", "summary"),
        "",
    ),
    "expected_gap": Interval.from_value(math.nan), "expected_ttft": Interval.from_value(math.nan),
    "front_end_s": 0.0, "late": (), "lines": 0,
}  # fmt: skip
"""All facts, as they are where nothing tells them."""


@dataclass(frozen=True)
class DiagnosisFinding:
    """One failure mode, by its key in `catalogs/failure_modes.yaml`, with its evidence."""

    mode: str
    evidence: tuple[str, ...]


def complete_facts(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return all facts by those that are known, with those that follow from others."""
    facts = {**_UNKNOWN, **known}
    for name, expression in _read_tables()["facts"].items():
        facts[name] = _compile(expression)(facts)
    return facts


def find_failure_modes(known: Mapping[str, Any]) -> list[DiagnosisFinding]:
    """Return every failure mode that has evidence, the likeliest cause first."""
    facts, is_held = complete_facts(known), False
    evidence: dict[str, tuple[str, ...]] = {}
    last = set[str]()
    for row in _read_tables()["detectors"]:
        if row.get("otherwise") and is_held:
            continue
        if is_held := bool(_compile(row["when"])({**facts, "found": evidence})):
            texts = (_parse(text).render(facts) for text in row["evidence"])
            evidence[row["mode"]] = evidence.get(row["mode"], ()) + tuple(filter(None, texts))
            last |= {row["mode"]} if row.get("traffic") and facts["meets_targets"] else set()
    return [
        DiagnosisFinding(mode, evidence[mode]) for mode in sorted(evidence, key=last.__contains__)
    ]


@dataclass(frozen=True)
class DiagnosisCase:
    """The measured metrics of a replica, and its plan."""

    measured: ReplicaMetrics
    planned: PlannedReplica | None = None

    @cached_property
    def measured_workload(self) -> Workload | None:
        """The measured traffic with the plan's burstiness; None if rate or lengths are unknown."""
        planned = self.planned
        longest = planned.deployment.args.max_model_len - 1 if planned else math.inf
        traffic = planned.workload if planned else None
        return self.measured.estimate_workload(longest, traffic.burstiness if traffic else 1.0)

    @cached_property
    def simulated(self) -> Performance | None:
        """The planned replica under the measured traffic and drafts; None if either is unknown.

        The rate since the start of a server that is idle now is not that of its load.
        """
        measured, load = self.measured, self.measured_workload
        if self.planned is None or load is None or (measured.is_idle and measured.since_start):
            return None
        deployment = self.planned.deployment
        if (accepted := measured.compute_ratio("accepted", "drafted")) >= 0:
            deployment = with_acceptance(deployment, accepted)
        try:
            return predict(deployment, load, quick=True).performance
        except PlannerError:  # such as prompts that the engine would refuse
            return None

    @cached_property
    def target_checks(self) -> list[ComparisonRow]:
        """Each target of the plan: the mean, or the least share that misses it, beside its limit.

        A share whose limit is inside a bucket of the histogram may or may not be met.
        """
        rows = []
        for target in self.planned.targets if self.planned else ():
            seen, measured = self.measured.histograms.get(target.metric), math.nan
            unit, limit = "ms", target.seconds * 1e3
            if target.percentile == "mean":
                measured = seen.mean * 1e3 if seen else math.nan
            else:
                unit, limit = "% above it", 100.0 - int(target.percentile[1:])
                low, high = seen.bound_fraction_above(target.seconds) if seen else (0.0, 1.0)
                if low * 100 > limit or high * 100 <= limit:
                    measured = low * 100
            rows.append(ComparisonRow(str(target), unit, None, measured, limit, term=target.metric))
        return rows

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the detectors ask for."""
        measured = self.measured
        gauges, seconds = measured.gauges, measured.seconds or math.nan
        ttft, itl, tpot, e2e, queue, prefill = map(
            measured.get_mean, ("ttft", "itl", "tpot", "e2e", "queue", "prefill")
        )
        running, waiting = (gauges.get(role, 0.0) for role in ("running", "waiting"))
        # Little's law, if that is more
        running_mean = measured.requests / seconds * (e2e - (queue if queue > 0 else 0.0))
        facts: dict[str, Any] = {
            "has_pages": True, "requests": measured.requests, "rate": measured.arrival_rps,
            "since_start": measured.since_start, "is_idle": measured.is_idle,
            "between_pages": not measured.since_start and not measured.num_idle_pages,
            "knows_in_flight": not measured.is_idle or (e2e / seconds > 0 and not measured.since_start),
            "running": max(running, running_mean), "waiting": max(waiting, measured.arrival_rps * queue),
            "waiting_now": waiting, "in_flight": running + waiting,
            "most_running": measured.most_running, "usage": gauges.get("kv_usage", math.nan),
            "pool": measured.pool, "deferred": measured.deferred, "cpu": measured.cpu,
            "preemptions": measured.counters.get("preemptions", math.nan) / (measured.requests or math.nan),
            "accepted": measured.compute_ratio("accepted", "drafted"),
            "hits": measured.compute_ratio("prefix_hits", "prefix_queries"),
            "generated": measured.counters.get("generation_tokens", math.nan),
            "prompt": measured.get_mean_tokens("prompt"), "output": measured.get_mean_tokens("output"),
            "ttft": ttft, "queue": queue, "prefill": prefill, "gap": itl if itl > 0 else tpot,
            "late": [row for row in self.target_checks if row.status == "FAIL"],
        }  # fmt: skip
        return (
            facts | self._list_planned_facts(self.planned, facts["running"])
            if self.planned
            else facts
        )

    def _list_planned_facts(self, planned: PlannedReplica, running: float) -> dict[str, Any]:
        """Return what the plan says, and the simulation of what was measured."""
        deployment, targets = planned.deployment, planned.targets
        memory, ranks = get_memory_plan(deployment), deployment.layout.dp
        kv, tokens = memory.kv_available, memory.pool.num_blocks * memory.pool.layout.block_size
        traffic, load, simulated = planned.workload, self.measured_workload, self.simulated
        accepted = compute_planned_acceptance(deployment)
        known: dict[str, Any] = {
            "slots": deployment.args.max_num_seqs * ranks,
            "has_links": deployment.layout.tp > 1, "planned_pool": tokens,
            "pool_lo": tokens * max(kv.lo, 0.0) / max(kv.mid, 1.0) / MEASURED_EXCESS_FACTOR,
            "pool_hi": tokens * max(kv.hi, 0.0) / max(kv.mid, 1.0) * MEASURED_EXCESS_FACTOR,
            "pool_tokens": memory.pool.reported_tokens, "planned_rate": planned.rate or math.nan,
            "planned_accepted": math.nan if accepted is None else accepted,
            "ttft_limit": max((t.seconds for t in targets if t.metric == "ttft"), default=math.nan),
        }  # fmt: skip
        if traffic:
            known |= {
                "planned_prompt": traffic.prompt.mean, "planned_output": traffic.output.mean,
                "planned_hits": traffic.cache_hit_fraction,
            }  # fmt: skip
        if load:
            step, context = build_step_model(deployment, load), load.mean_decode_context
            known |= {
                "held": running / ranks * context, "longest": load.prompt.p95,
                "front_end_s": step.request_s + load.prompt.mean * step.prompt_token_s,
                "decode_s": step.estimate_decode_step_s(max(running / ranks, 1.0), context),
            }  # fmt: skip
        if simulated:
            role = "itl" if "itl" in self.measured.histograms else "tpot"
            known |= {
                "expected_gap": simulated.get(role, "mean"),
                "expected_ttft": simulated.get("ttft", "mean"),
                "meets_targets": targets and not simulated.saturated and all(
                    simulated.get(t.metric, t.percentile).mid <= t.seconds for t in targets
                ),
            }  # fmt: skip
        return known


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with one replica, by its /metrics pages and its log."""

    case: DiagnosisCase | None
    planned: PlannedReplica | None
    errors: tuple[StartupError, ...] = ()
    stat_lines: StatLines | None = None
    logged: Mapping[str, Any] | None = None  # facts of the log as a whole; None without one

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
        logged = (self.logged or {}).get("engine") or "vllm"
        return self.case.measured.engine if self.case else str(logged)

    def _select_sentences(self, table: str) -> Iterator[str]:
        """Yield the sentences of a table of `detectors.yaml` that hold."""
        facts = {
            **complete_facts(self.facts),
            "has_plan": self.planned is not None,
            "has_findings": bool(self.findings),
            "errors": self.errors,
            "lacks_memory": has_memory_error(self.errors),
            "log": self.logged,
        }
        for row in _read_tables()[table]:
            if _compile(row["when"])(facts):
                yield _parse(row["say"]).render(facts)

    @property
    def not_judged(self) -> str:
        """Why the pages, or the log, tell nothing of how it serves; empty if they tell."""
        return next(self._select_sentences("gaps"), "")

    @property
    def has_failed(self) -> bool:
        """Whether the log ends in an error."""
        return bool(self.errors or (self.logged and self.logged["has_failed"]))

    @property
    def exit_code(self) -> int:
        """1 if anything is wrong, 3 if the pages tell nothing, else 0."""
        return 1 if self.findings or self.errors else 3 if self.not_judged else 0

    def __str__(self) -> str:
        engine = get_engine(self.engine_name)
        names = self.case.measured.names if self.case else get_metric_names(engine)
        return render_template(
            "tools/diagnostics",
            "diagnosis",
            diagnosis=self,
            facts=complete_facts(self.facts),
            modes=load_failure_modes(names.names, engine.name),
            translate=partial(translate_arguments, engine=self.engine_name),
            memory=self.planned and get_memory_plan(self.planned.deployment),
            shortage=find_memory_shortage(self.errors),
            questions=list(self._select_sentences("questions")),
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
            "not_told": list(self._select_sentences("questions")),
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
    version = planned.deployment.engine.version if planned else None
    read = [read_metrics_page(page) for page in pages]
    case = DiagnosisCase(measure_replica(read, version, seconds), planned) if read else None
    if log is None:
        return Diagnosis(case, planned)
    text = read_text(Path(log), MAX_LOG_BYTES, errors="replace")
    lines, words = read_stat_lines(text), _read_tables()["logs"]
    named = (name for name, pattern in words["engines"].items() if re.search(pattern, text))
    logged = {
        "name": Path(log).name,
        "engine": lines.engine if lines else next(named, ""),
        "has_failed": bool(find_failures(text)),
        "has_started": bool(re.search(words["started"], text)),
    }
    return Diagnosis(case, planned, tuple(find_startup_errors(text)), lines, logged)
