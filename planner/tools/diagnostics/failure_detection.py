"""Find the failure modes of a replica from its metrics, its plan and a simulation.

The simulation of the measured workload separates causes. If it is as slow as the server, the cause
is scheduling or memory; if its steps are faster, the cause is the machine.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.core.text import format_count
from planner.engines.deployment import Deployment
from planner.latency.performance import Performance
from planner.latency.speculative_decoding import compute_planned_acceptance
from planner.latency.step_model import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.planned_replica import PlannedReplica, with_acceptance
from planner.planning.prediction import predict
from planner.planning.slo import SloTarget
from planner.tools.diagnostics.metrics_pages import (
    LENGTH_METRICS,
    MetricsHistogram,
    ReplicaMetrics,
)
from planner.workload.workload import Workload

TRAFFIC_EXCESS_FACTOR = 1.2
"""Measured rate or length, over the planned one, above which the traffic is not the planned one."""
STEP_SLOWDOWN_FACTOR = 1.1
"""Measured gap, over the high end of the simulated one, above which the machine is too slow."""
BUSY_FRACTION = 0.9
"""Utilization of a CPU core, of the slots or of the KV cache above which it limits the replica."""
MIN_PREEMPTIONS_PER_REQUEST = 0.1
"""Above this the KV cache is too small; if it is full and requests wait, above zero."""
MIN_QUEUE_S = 0.1
"""Mean seconds in the queue below which nobody notices them."""
QUEUE_TTFT_FRACTION = 0.25
"""Fraction of the TTFT in the queue above which requests queue for too long."""
FRONT_END_DELAY_S = 0.2
"""Seconds, and fraction, of the TTFT outside the engine above which the front end is too slow."""
PREFILL_STALL_FACTOR = 1.2
"""Measured gap, over a decode-only step, above which prefills delay the answers."""


@dataclass(frozen=True)
class DiagnosisFinding:
    """One failure mode, by its key in `catalogs/failure_modes.yaml`, with its evidence."""

    mode: str
    evidence: tuple[str, ...]


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
    def status(self) -> Literal["met", "violated", "unknown"]:
        """`unknown` if the limit is inside a bucket."""
        statistic, (low, high) = self.target.percentile, self.bounds
        limit = self.target.seconds if statistic == "mean" else 1 - int(statistic[1:]) / 100
        return "violated" if low > limit else "met" if high <= limit else "unknown"

    @property
    def edge_s(self) -> float | None:
        """The mean, or the end of what the quantile can be that is nearest to the limit.

        None if the limit is inside its bucket, whose lower edge lies outside it.
        """
        limit = self.target.seconds
        if self.target.percentile == "mean":
            return self.histogram.mean
        low, high = self.histogram.find_quantile_bucket(int(self.target.percentile[1:]) / 100)
        # a bucket begins above its lower edge
        edges = {"met": min(high, limit), "violated": max(low, limit) * (1 + 1e-9)}
        return edges.get(self.status)

    def __str__(self) -> str:
        if self.status != "violated":
            inside = " (the limit is inside a histogram bucket)" * (self.status == "unknown")
            return f"{self.target}: {self.status}{inside}"
        if self.target.percentile == "mean":
            return f"{self.target}: the mean is {self.bounds[0] * 1e3:,.0f} ms"
        low, high = (f"{fraction:.0%}" for fraction in self.bounds)
        late = low if low == high else f"{low} to {high}"
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
        workload = self.measured.estimate_workload(
            planned.deployment.args.max_model_len - 1 if planned else math.inf
        )
        if workload is None or planned is None or planned.workload is None:
            return workload
        return replace(workload, burstiness=planned.workload.burstiness)

    @cached_property
    def simulated(self) -> Performance | None:
        """The planned replica under the measured traffic and drafts; None if either is unknown.

        The rate since the start of a server that is idle now is not that of its load.
        """
        is_diluted = self.measured.is_idle and self.measured.since_start
        if self.planned is None or self.measured_workload is None or is_diluted:
            return None
        try:
            return predict(
                self.deployment_as_measured, self.measured_workload, quick=True
            ).performance
        except PlannerError:  # such as prompts that the engine would refuse
            return None

    @property
    def deployment_as_measured(self) -> Deployment:
        """The planned replica, with the measured fraction of accepted drafts."""
        assert self.planned is not None
        deployment, fraction = self.planned.deployment, self.measured.acceptance_fraction
        return deployment if fraction is None else with_acceptance(deployment, fraction)

    @property
    def max_running(self) -> int | None:
        """Slots of the planned replica; None without a plan."""
        return (
            self.planned.deployment.args.max_num_seqs * self.planned.deployment.layout.dp
            if self.planned
            else None
        )

    @property
    def knows_in_flight(self) -> bool:
        """Whether a page was taken under load, or the mean between two pages is known."""
        measured = self.measured
        is_averaged = measured.seconds and "e2e" in measured.histograms and not measured.since_start
        return bool(is_averaged) or not measured.is_idle

    @property
    def kv_usage_statement(self) -> str:
        """How full the KV cache is, as evidence."""
        if self.measured.is_idle:
            size = f", of {self.measured.pool:,.0f} tokens," if self.measured.pool else ""
            return f"how full the KV cache{size} was under load is not on a page of an idle moment"
        if (usage := self.measured.gauges.get("kv_usage")) is None:
            return "whether the KV cache is full is not on the page"
        return f"the KV cache is {usage:.0%} full"

    @property
    def mean_running(self) -> float:
        """Requests that run at once: the gauge, or the result of Little's law if that is more."""
        seconds, e2e = self.measured.seconds, self.measured.get_mean("e2e")
        queue = self.measured.get_mean("queue") or 0.0
        gauge = self.measured.gauges.get("running", 0.0)
        return (
            max(gauge, self.measured.requests / seconds * (e2e - queue))
            if seconds and e2e
            else gauge
        )

    @property
    def mean_waiting(self) -> float:
        """Requests that wait at once: the gauge, or the result of Little's law if that is more."""
        rate, queue = self.measured.arrival_rps, self.measured.get_mean("queue")
        gauge = self.measured.gauges.get("waiting", 0.0)
        return max(gauge, rate * queue) if rate and queue else gauge

    @cached_property
    def slo_readings(self) -> list[SloReading]:
        """The SLOs of the plan whose metric is measured."""
        histograms = self.measured.histograms
        return [
            SloReading(target, histograms[target.metric])
            for target in (self.planned.targets if self.planned else ())
            if target.metric in histograms
        ]

    @property
    def violated_slos(self) -> list[SloReading]:
        """SLOs that are certainly violated."""
        return [reading for reading in self.slo_readings if reading.status == "violated"]

    @property
    def is_queueing(self) -> bool:
        """Whether requests wait for a large part of their TTFT, and longer than its SLO allows."""
        targets = self.planned.targets if self.planned else ()
        limits = [target.seconds for target in targets if target.metric == "ttft"]
        violated = {reading.target.metric for reading in self.violated_slos}
        is_met = limits and not {"ttft", "e2e"} & violated
        if is_met and self.mean_waiting <= max(limits) * (self.measured.arrival_rps or 0.0):
            return False
        queue, ttft = self.measured.get_mean("queue"), self.measured.get_mean("ttft")
        is_long = bool(
            queue and ttft and queue > QUEUE_TTFT_FRACTION * ttft and queue > MIN_QUEUE_S
        )
        is_known = self.knows_in_flight  # else the mean since the start, idle time included
        return (is_long and (self.mean_waiting >= 1 or not is_known)) or self.measured.gauges.get(
            "waiting", 0.0
        ) >= max(4.0, 0.1 * self.mean_running)


def find_failure_modes(case: DiagnosisCase) -> list[DiagnosisFinding]:
    """Return every failure mode that has evidence, the likeliest cause first."""
    evidence: dict[str, tuple[str, ...]] = {}
    for detect in FAILURE_DETECTORS:
        for finding in detect(case):
            evidence[finding.mode] = evidence.get(finding.mode, ()) + finding.evidence
    findings = [DiagnosisFinding(mode, sentences) for mode, sentences in evidence.items()]
    targets, simulated = case.planned.targets if case.planned else (), case.simulated
    meets_slos = targets and simulated and not simulated.saturated and all(
        simulated.get(target.metric, target.percentile).mid <= target.seconds for target in targets
    )  # fmt: skip
    if meets_slos:
        findings.sort(key=lambda finding: finding.mode in LOAD_DEPENDENT_MODES)
    sentences = tuple(f"target {reading}" for reading in case.violated_slos)
    return findings or [DiagnosisFinding("broken_promise", sentences)] * bool(sentences)


def detect_stalled_engine(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Find an engine that has requests in flight and computes nothing between two pages."""
    measured = case.measured
    in_flight = measured.gauges.get("running", 0.0) + measured.gauges.get("waiting", 0.0)
    if measured.since_start or measured.requests or measured.num_idle_pages or not in_flight:
        return
    if not measured.counters.get("generation_tokens"):
        yield DiagnosisFinding(
            "stalled",
            (
                f"{format_count(in_flight, 'request')} in flight, and between the pages no request was"
                " answered and no token was generated",
            ),
        )


def detect_other_settings(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Find a KV cache or a number of slots other than planned, which explains much else."""
    if case.planned is None:
        return
    memory, slots = get_memory_plan(case.planned.deployment), case.max_running or 0
    measured_tokens = case.measured.pool
    planned_tokens = memory.pool.num_blocks * memory.pool.layout.block_size
    kv = memory.kv_available
    low, high = (
        planned_tokens * max(edge, 0.0) / max(kv.mid, 1.0)
        for edge in (kv.lo / TRAFFIC_EXCESS_FACTOR, kv.hi * TRAFFIC_EXCESS_FACTOR)
    )
    evidence = []
    if measured_tokens is not None and not low <= measured_tokens <= high:
        evidence.append(
            f"its KV cache has room for {measured_tokens:,.0f} tokens (num_gpu_blocks x"
            f" block_size), planned {planned_tokens:,.0f}"
        )
    if case.measured.most_running > slots:
        evidence.append(
            f"{case.measured.most_running:.0f} running at once, planned are at most {slots}"
            " (max_num_seqs)"
        )
    if evidence:
        yield DiagnosisFinding("other_settings", tuple(evidence))


def detect_adapter_starvation(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Find requests that wait for an adapter slot."""
    deferred = case.measured.deferred or 0.0
    if deferred >= 1 and deferred >= 0.5 * case.mean_waiting:
        text = (
            f"{deferred:.0f} of {format_count(max(case.mean_waiting, deferred), 'waiting request')}"
            f" {'is' if round(deferred) == 1 else 'are'} deferred"
        )
        yield DiagnosisFinding(
            "adapter_starvation", (f"{text}, with {case.mean_running:.0f} running",)
        )


def detect_rejected_drafts(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Find fewer accepted drafts than planned, or too few for a gain."""
    fraction = case.measured.acceptance_fraction
    planned = compute_planned_acceptance(case.planned.deployment) if case.planned else None
    if fraction is not None and fraction < (0.8 * planned if planned else 0.25):
        expected = f", planned {planned:.0%}" if planned else ""
        yield DiagnosisFinding(
            "drafts_rejected", (f"{fraction:.0%} of the drafted tokens are accepted{expected}",)
        )


def detect_cold_prefix_cache(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Find a prefix cache hit rate far below the planned one."""
    workload = case.planned.workload if case.planned else None
    if workload is None or case.measured.prefix_hit_fraction is None:
        return
    planned = workload.cache_hit_fraction
    if planned >= 0.05 and case.measured.prefix_hit_fraction < planned / 2:
        text = (
            f"{case.measured.prefix_hit_fraction:.0%} of the prompt tokens are cached, planned"
            f" {planned:.0%}"
        )
        yield DiagnosisFinding("cold_prefix_cache", (text,))


def detect_slow_machine(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Find longer gaps than simulated: the host, the links between GPUs, or the GPU is slow."""
    role = "itl" if case.measured.get_mean("itl") else "tpot"
    gap, simulated, planned = case.measured.get_mean(role), case.simulated, case.planned
    if (
        gap is None
        or simulated is None
        or planned is None
        or (case.measured.preemptions or 0.0) > MIN_PREEMPTIONS_PER_REQUEST
    ):
        return
    expected = simulated.get(role, "mean")
    if not gap > STEP_SLOWDOWN_FACTOR * expected.hi:
        return
    sentences = [
        f"gaps take {gap * 1e3:.1f} ms; a simulation of the same traffic {expected * 1e3:.1f} ms"
    ]
    cpu = case.measured.cpu
    if cpu is not None:
        sentences.append(f"the server's process uses {cpu:.2f} s of CPU a second")
    has_links = planned.deployment.layout.tp > 1
    is_host = cpu >= BUSY_FRACTION if cpu is not None else not has_links
    yield DiagnosisFinding(
        "host_bound" if is_host else "tp_communication" if has_links else "slow_gpu",
        tuple(sentences),
    )


def detect_traffic_mismatch(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Find more or longer requests than planned."""
    measured, planned = case.measured, case.planned
    if planned is None:
        return
    evidence = []
    if (
        measured.arrival_rps
        and planned.rate
        and measured.arrival_rps > TRAFFIC_EXCESS_FACTOR * planned.rate
    ):
        evidence.append(
            f"{format_number(measured.arrival_rps)} requests/s come to this replica, planned"
            f" {format_number(planned.rate)}"
        )
    if planned.workload:
        for side in LENGTH_METRICS:
            tokens, expected = measured.get_mean_tokens(side), getattr(planned.workload, side).mean
            if tokens and tokens > TRAFFIC_EXCESS_FACTOR * expected:
                evidence.append(f"{side}s have {tokens:,.0f} tokens, planned {expected:,.0f}")
    if evidence:
        yield DiagnosisFinding("assumption", tuple(evidence))


def detect_kv_preemption(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Find requests that lose their blocks and are recomputed."""
    preemptions, usage = case.measured.preemptions, case.measured.gauges.get("kv_usage")
    is_full = case.measured.is_idle if usage is None else usage >= BUSY_FRACTION
    is_blocking = is_full and case.is_queueing
    threshold = 0.0 if is_blocking else MIN_PREEMPTIONS_PER_REQUEST
    if preemptions is None or preemptions <= threshold:
        return
    full = f", the KV cache is {usage:.0%} full" if usage is not None else ""
    full = ", each with a full KV cache" if case.measured.is_idle else full
    yield DiagnosisFinding("kv_preemption", (f"{preemptions:.2f} preemptions a request{full}",))


def detect_queueing(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Find a queue: requests wait for a slot, or for KV cache for a whole prompt."""
    if not case.is_queueing:
        return
    measured, slots = case.measured, case.max_running
    most = f" of at most {slots}" if slots else ""
    counts = f"{case.mean_waiting:.0f} waiting and {case.mean_running:.0f} running{most}"
    sentences = [counts] if case.knows_in_flight else []
    queue, ttft = measured.get_mean("queue"), measured.get_mean("ttft")
    if queue is not None and ttft is not None:
        sentences.append(
            f"{queue * 1e3:,.0f} of {ttft * 1e3:,.0f} ms to the first token are spent in the queue"
        )
    usage = measured.gauges.get("kv_usage", 0.0)
    sentences.append(case.kv_usage_statement)
    reason = explain_blocked_queue(case)
    has_free_slots = (
        case.knows_in_flight and slots is not None and case.mean_running < BUSY_FRACTION * slots
    )
    simulated = case.simulated if has_free_slots else None
    expected = simulated.get("ttft", "mean") if simulated else None
    if has_free_slots and reason:
        yield DiagnosisFinding("oom_admission", (*sentences, reason))
    elif (
        has_free_slots and expected and queue and ttft and expected.hi < ttft / STEP_SLOWDOWN_FACTOR
    ):
        sentences.append(
            f"a simulation of the same traffic has {expected.mid * 1e3:,.0f} ms to the first token"
        )
        yield DiagnosisFinding("other_settings", tuple(sentences))
    elif usage >= BUSY_FRACTION and (slots is None or has_free_slots):
        yield DiagnosisFinding("kv_full", tuple(sentences))
    else:
        yield DiagnosisFinding("oversubscribed", tuple(sentences))


def detect_slow_front_end(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Find a first token that is late because of the front end."""
    planned, workload = case.planned, case.measured_workload
    late = {slo.target.metric for slo in case.violated_slos}
    has_slo = planned is not None and any(target.metric == "ttft" for target in planned.targets)
    measured = [case.measured.get_mean(role) for role in ("ttft", "queue", "prefill")]
    if None in measured or (has_slo and not late & {"ttft", "e2e"}):
        return
    ttft, queue, prefill = (1e3 * (mean or 0.0) for mean in measured)
    outside = (ttft - queue - prefill) / 1e3
    if planned and workload:
        step = build_step_model(planned.deployment, workload)
        outside -= step.request_s + workload.prompt.mean * step.prompt_token_s
    if outside > FRONT_END_DELAY_S and outside * 1e3 > FRONT_END_DELAY_S * ttft:
        text = (
            f"{outside * 1e3:,.0f} of {ttft:,.0f} ms to the first token are neither queue"
            f" ({queue:,.0f}) nor prefill"
        )
        cpu = case.measured.cpu
        busy = () if cpu is None else (f"the server's process uses {cpu:.2f} s of CPU a second",)
        yield DiagnosisFinding("front_end", (f"{text} ({prefill:,.0f})", *busy))


def explain_blocked_queue(case: DiagnosisCase) -> str:
    """Return that the longest prompts wait for KV cache; an empty text if they do not."""
    if case.planned is None or case.measured_workload is None:
        return ""
    pool = get_memory_plan(case.planned.deployment).pool
    longest = case.measured_workload.prompt.p95
    held = (
        case.mean_running
        / case.planned.deployment.layout.dp
        * case.measured_workload.mean_decode_context
    )
    if held + longest < BUSY_FRACTION * pool.reported_tokens:
        return ""
    return (
        f"prompts of {longest:,.0f} tokens (p95) do not find room beside {held:,.0f} in a pool of"
        f" {pool.reported_tokens:,}"
    )


def detect_prefill_contention(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Find a violated ITL or TPOT because prefills of other requests delay the answers."""
    gap = case.measured.get_mean("itl") or case.measured.get_mean("tpot")
    late = [slo.target for slo in case.violated_slos if slo.target.metric in ("itl", "tpot")]
    planned, workload = case.planned, case.measured_workload
    if (
        gap is None
        or planned is None
        or workload is None
        or not case.knows_in_flight
        or case.is_queueing
        or (case.measured.preemptions or 0.0) > MIN_PREEMPTIONS_PER_REQUEST
    ):
        return
    # seconds of a step that decodes the mean running requests and prefills nothing
    alone = build_step_model(planned.deployment, workload).estimate_decode_step_s(
        max(case.mean_running / planned.deployment.layout.dp, 1.0), workload.mean_decode_context
    )
    if gap > PREFILL_STALL_FACTOR * alone and late:
        sentence = f"gaps take {gap * 1e3:.1f} ms, steps that only decode {alone * 1e3:.1f} ms"
        missed = (f"target {target}" for target in late)
        yield DiagnosisFinding("prefill_contention", (sentence, *missed))


FAILURE_DETECTORS: tuple[Callable[[DiagnosisCase], Iterator[DiagnosisFinding]], ...] = (
    detect_stalled_engine,
    detect_other_settings,
    detect_adapter_starvation,
    detect_rejected_drafts,
    detect_cold_prefix_cache,
    detect_slow_machine,
    detect_traffic_mismatch,
    detect_kv_preemption,
    detect_queueing,
    detect_slow_front_end,
    detect_prefill_contention,
)
"""First whether it is the planned server, then from the most to the least specific evidence."""
LOAD_DEPENDENT_MODES = ("drafts_rejected", "cold_prefix_cache", "assumption")
"""Modes that the simulation includes: if it meets the SLOs, any other finding explains more."""
