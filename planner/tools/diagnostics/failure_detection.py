"""Find the failure modes of a replica: detectors of `detectors.yaml` over facts of its pages, log and plan.

The simulation of the measured workload separates causes. If it is as slow as the server, the cause
is scheduling or memory; if its steps are faster, the cause is the machine.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import jinja2

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.readers import read_yaml
from planner.core.text import format_count
from planner.latency.performance import Performance
from planner.latency.speculative_decoding import compute_planned_acceptance
from planner.latency.step_model import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.planned_replica import PlannedReplica, with_acceptance
from planner.planning.prediction import predict
from planner.planning.slo import SloTarget
from planner.tools.diagnostics.metrics_pages import MetricsHistogram, ReplicaMetrics
from planner.workload.workload import Workload

MEASURED_EXCESS_FACTOR = 1.2
"""Measured KV cache beyond its planned interval, as a factor, that is no longer the planned one."""
_WORDS = jinja2.Environment()
_WORDS.filters |= {"f": format, "plural": format_count}
_compile = cache(_WORDS.compile_expression)
_parse = cache(_WORDS.from_string)


class Detector(StrictEntry):
    """A row of `detectors.yaml`, whose head explains every field."""

    mode: str
    when: str
    evidence: tuple[str, ...]
    otherwise: bool = False
    traffic: bool = False


@cache
def _load_detectors() -> tuple[Mapping[str, str], tuple[Detector, ...], list[Mapping[str, str]]]:
    """Return derived facts, detectors, and questions."""
    data = read_yaml(Path(__file__).with_name("detectors.yaml"))
    rows = (
        validate_entry(Detector, row, f"detectors.yaml, {row.get('mode')}")
        for row in data["detectors"]
    )
    return data["facts"], tuple(rows), data["questions"]


@dataclass(frozen=True)
class DiagnosisFinding:
    """One failure mode, by its key in `catalogs/failure_modes.yaml`, with its evidence."""

    mode: str
    evidence: tuple[str, ...]


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
        ("between_pages", "found", "has_errors", "has_links", "has_pages", "has_plan", "in_flight",
         "is_idle", "is_ttft_late", "knows_in_flight", "lacks_memory", "late", "late_tokens",
         "meets_targets", "since_start", "summary"),
        "",
    ),
    "expected_gap": Interval.from_value(math.nan), "expected_ttft": Interval.from_value(math.nan),
    "front_end_s": 0.0,
}  # fmt: skip
"""All facts, as they are where nothing tells them."""


def complete_facts(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return all facts by those that are known, with those that follow from others."""
    facts = {**_UNKNOWN, **known}
    for name, expression in _load_detectors()[0].items():
        facts[name] = _compile(expression)(**facts)
    return facts


def find_failure_modes(known: Mapping[str, Any]) -> list[DiagnosisFinding]:
    """Return every failure mode that has evidence, the likeliest cause first."""
    facts, is_held = complete_facts(known), False
    evidence: dict[str, tuple[str, ...]] = {}
    late = set[str]()
    for row in _load_detectors()[1]:
        if row.otherwise and is_held:
            continue
        is_held = bool(_compile(row.when)({**facts, "found": evidence}))
        if is_held:
            texts = (_parse(text).render(facts) for text in row.evidence)
            evidence[row.mode] = evidence.get(row.mode, ()) + tuple(filter(None, texts))
            late |= {row.mode} if row.traffic and facts["meets_targets"] else set()
    order = sorted(evidence, key=late.__contains__)
    return [DiagnosisFinding(mode, evidence[mode]) for mode in order]


def list_questions(known: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not told, and what would."""
    facts = complete_facts(known)
    yield from (row["ask"] for row in _load_detectors()[2] if _compile(row["when"])(**facts))


@dataclass(frozen=True)
class SloReading:
    """An SLO and the measured histogram of its metric."""

    target: SloTarget
    histogram: MetricsHistogram

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and largest fraction of late requests; for an SLO on the mean, the mean in s."""
        if self.target.percentile == "mean":
            return self.histogram.mean, self.histogram.mean
        return self.histogram.bound_fraction_above(self.target.seconds)

    @property
    def limit(self) -> float:
        """What `bounds` may be at most."""
        statistic = self.target.percentile
        return self.target.seconds if statistic == "mean" else 1 - int(statistic[1:]) / 100

    @property
    def status(self) -> Literal["met", "violated", "unknown"]:
        """`unknown` if the limit is inside a bucket."""
        low, high = self.bounds
        return "violated" if low > self.limit else "met" if high <= self.limit else "unknown"

    def __str__(self) -> str:
        low, high = self.bounds
        if self.status != "violated":
            inside = " (the limit is inside a histogram bucket)" * (self.status == "unknown")
            return f"{self.target}: {self.status}{inside}"
        if self.target.percentile == "mean":
            return f"{self.target}: the mean is {low * 1e3:,.0f} ms"
        late = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
        return f"{self.target}: {late} of requests miss it"


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
        workload = self.measured.estimate_workload(longest)
        if workload is None or planned is None or planned.workload is None:
            return workload
        return replace(workload, burstiness=planned.workload.burstiness)

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
    def slo_readings(self) -> list[SloReading]:
        """The SLOs of the plan whose metric is measured."""
        histograms = self.measured.histograms
        targets = self.planned.targets if self.planned else ()
        return [SloReading(t, histograms[t.metric]) for t in targets if t.metric in histograms]

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
        late = [slo for slo in self.slo_readings if slo.status == "violated"]
        facts = {
            "has_pages": True, "requests": measured.requests, "rate": measured.arrival_rps,
            "since_start": measured.since_start, "is_idle": measured.is_idle,
            "between_pages": not measured.since_start and not measured.num_idle_pages,
            "knows_in_flight": not measured.is_idle or (e2e / seconds > 0 and not measured.since_start),
            "running": max(running, running_mean), "waiting": max(waiting, measured.arrival_rps * queue),
            "waiting_now": waiting, "in_flight": running + waiting,
            "most_running": measured.most_running, "usage": gauges.get("kv_usage", math.nan),
            "pool": measured.pool, "deferred": measured.deferred, "cpu": measured.cpu,
            "preemptions": measured.preemptions, "accepted": measured.compute_ratio("accepted", "drafted"),
            "hits": measured.compute_ratio("prefix_hits", "prefix_queries"),
            "generated": measured.counters.get("generation_tokens", math.nan),
            "prompt": measured.get_mean_tokens("prompt"), "output": measured.get_mean_tokens("output"),
            "ttft": ttft, "queue": queue, "prefill": prefill, "gap": itl if itl > 0 else tpot,
            "late": "; ".join(f"target {slo}" for slo in late),
            "late_tokens": "; ".join(f"target {s}" for s in late if s.target.metric in ("itl", "tpot")),
            "is_ttft_late": any(slo.target.metric in ("ttft", "e2e") for slo in late),
        }  # fmt: skip
        return facts | self._list_planned_facts(facts) if self.planned else facts

    def _list_planned_facts(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the plan says, and the simulation of what was measured."""
        assert self.planned is not None
        planned, deployment, targets = self.planned, self.planned.deployment, self.planned.targets
        memory, ranks = get_memory_plan(deployment), deployment.layout.dp
        kv, tokens = memory.kv_available, memory.pool.num_blocks * memory.pool.layout.block_size
        traffic, load, simulated = planned.workload, self.measured_workload, self.simulated
        accepted = compute_planned_acceptance(deployment)
        known = {
            "has_plan": True, "slots": deployment.args.max_num_seqs * ranks,
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
            batch = facts["running"] / ranks
            known |= {
                "held": batch * context, "longest": load.prompt.p95,
                "front_end_s": step.request_s + load.prompt.mean * step.prompt_token_s,
                "decode_s": step.estimate_decode_step_s(max(batch, 1.0), context),
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
