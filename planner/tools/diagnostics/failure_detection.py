"""Which failure mode a page shows: what was measured, against the plan and against a replay of the measured traffic.

The replay tells causes apart: traffic that it serves as badly as the server is a matter of schedule
and room, steps that take longer than in it are a matter of the machine.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.latency.performance import Performance
from planner.latency.speculative_decoding import build_step_model, compute_planned_acceptance
from planner.memory.memory_plan import get_memory_plan
from planner.planning.prediction import predict
from planner.planning.slo import SloTarget
from planner.tools.diagnostics.metrics_pages import LENGTH_METRICS, ReplicaMetrics
from planner.tools.diagnostics.planned_replica import PlannedReplica, with_acceptance
from planner.workload.workload import Workload

TRAFFIC_EXCESS_FACTOR = 1.2
"""Times the planned rate or length from which on traffic is not what was planned."""
STEP_SLOWDOWN_FACTOR = 1.1
"""Times the high end of the replay's interval from which on steps take longer than the machine explains."""
BUSY_FRACTION = 0.9
"""Seconds a second from which on a process is held up by its one core; of places in the batch or the pool, taken."""
MIN_PREEMPTIONS_PER_REQUEST = 0.1
"""Preemptions a request from which on the KV cache is too small; any do where it is full and requests wait."""
QUEUE_TTFT_FRACTION = 0.25
"""Share of the time to the first token that is spent in the queue from which on the queue is what is wrong."""
FRONT_END_DELAY_S = 0.2
"""Seconds to the first token outside the engine from which on, with the same share, the front end is what is wrong."""
PREFILL_STALL_FACTOR = 1.2
"""Times a step of decoding alone that a gap takes from which on prompts are what holds answers up."""


@dataclass(frozen=True)
class DiagnosisFinding:
    """One failure mode, by its key in `catalogs/failure_modes.yaml`, with the figures that speak for it."""

    mode: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class DiagnosisCase:
    """What was measured of a replica, and its plan."""

    measured: ReplicaMetrics
    planned: PlannedReplica | None = None

    @cached_property
    def measured_workload(self) -> Workload | None:
        """The measured traffic, as bursty as the plan has it."""
        planned = self.planned
        load = self.measured.estimate_workload(
            planned.deployment.args.max_model_len - 1 if planned else math.inf
        )
        if load is None or planned is None or planned.workload is None:
            return load
        return replace(load, burstiness=planned.workload.burstiness)

    @cached_property
    def simulated(self) -> Performance | None:
        """What the planned replica does with the measured traffic and drafts; None where either is unknown."""
        if self.planned is None or self.measured_workload is None:
            return None
        try:
            return predict(
                self.deployment_as_measured, self.measured_workload, quick=True
            ).performance
        except PlannerError:  # such as prompts that the engine would refuse
            return None

    @property
    def deployment_as_measured(self) -> Deployment:
        """The planned replica, with the share of its drafts that is really accepted."""
        assert self.planned is not None
        share = self.measured.acceptance_fraction
        return (
            self.planned.deployment
            if share is None
            else with_acceptance(self.planned.deployment, share)
        )

    @property
    def max_running(self) -> int | None:
        """Requests that the replica may run at once."""
        return (
            self.planned.deployment.args.max_num_seqs * self.planned.deployment.layout.dp
            if self.planned
            else None
        )

    @property
    def mean_running(self) -> float:
        """Requests that run at once, by Little's law or, where that is unknown, the gauge."""
        seconds, e2e, queue = (
            self.measured.seconds,
            self.measured.get_mean("e2e"),
            self.measured.get_mean("queue") or 0.0,
        )
        gauge = self.measured.gauges.get("running", 0.0)
        return (
            max(gauge, self.measured.requests / seconds * (e2e - queue))
            if seconds and e2e
            else gauge
        )

    @property
    def mean_waiting(self) -> float:
        """Requests that wait at once."""
        rate, queue, gauge = (
            self.measured.arrival_rps,
            self.measured.get_mean("queue"),
            self.measured.gauges.get("waiting", 0.0),
        )
        return max(gauge, rate * queue) if rate and queue else gauge

    @property
    def violated_slos(self) -> list[tuple[SloTarget, float]]:
        """(promise, share of requests surely late, or the mean in seconds): promises that are not kept."""
        rows = []
        for target in self.planned.targets if self.planned else ():
            histogram = self.measured.histograms.get(target.metric)
            if histogram is None:
                continue
            if target.percentile == "mean":
                value, limit = histogram.mean, target.seconds
            else:
                value, limit = (
                    histogram.compute_fraction_above(target.seconds),
                    1 - int(target.percentile[1:]) / 100,
                )
                value = max(value, 1.0 if histogram.mean > target.seconds else 0.0)
            if value > limit:
                rows.append((target, value))
        return rows

    @property
    def plan_could_serve_traffic(self) -> bool:
        """The planned replica would keep every promise under the measured traffic."""
        replay, targets = self.simulated, self.planned.targets if self.planned else ()
        if replay is None or replay.saturated or not targets:
            return False
        return all(replay.get(each.metric, each.percentile).mid <= each.seconds for each in targets)

    @property
    def slo_statements(self) -> list[str]:
        """What becomes of each promise that the page tells of."""
        broken, said = dict(self.violated_slos), []
        for target in self.planned.targets if self.planned else ():
            if histogram := self.measured.histograms.get(target.metric):
                at, mean = target.percentile, target.percentile == "mean"
                kept = (
                    mean or histogram.find_quantile_bucket(int(at[1:]) / 100)[1] <= target.seconds
                )
                what = "kept" if kept else "its limit lies within a bucket, so that nobody can tell"
                said.append(
                    f"{target}:"
                    f" {_describe_violation(target, broken[target]) if target in broken else what}"
                )
        return said

    @property
    def is_queueing(self) -> bool:
        """Requests wait for a good part of their time to the first token, which misses its limit where there is one."""
        limits = (
            [target.seconds for target in self.planned.targets if target.metric == "ttft"]
            if self.planned
            else []
        )
        kept = limits and not any(
            target.metric in ("ttft", "e2e") for target, _ in self.violated_slos
        )
        if kept and self.mean_waiting <= max(limits) * (self.measured.arrival_rps or 0.0):
            return False
        queue, ttft = self.measured.get_mean("queue"), self.measured.get_mean("ttft")
        long = bool(queue and ttft and queue > QUEUE_TTFT_FRACTION * ttft and queue > 0.05)
        return (long and self.mean_waiting >= 1) or self.measured.gauges.get("waiting", 0.0) >= max(
            4.0, 0.1 * self.mean_running
        )

    @property
    def front_end_delay_s(self) -> float | None:
        """Seconds to the first token that are neither queue nor prefill, beyond what the front end takes as planned."""
        ttft, queue, prefill = (
            self.measured.get_mean(role) for role in ("ttft", "queue", "prefill")
        )
        if ttft is None or queue is None or prefill is None:
            return None
        step = build_step_model(self.planned.deployment) if self.planned else None
        usual = (
            step.request_s + self.measured_workload.prompt.mean * step.prompt_token_s
            if step and self.measured_workload
            else 0.0
        )
        return ttft - queue - prefill - usual

    @property
    def decode_only_step_s(self) -> float | None:
        """Seconds of a step that only decodes what ran at once."""
        if self.planned is None or self.measured_workload is None:
            return None
        step = build_step_model(self.planned.deployment)
        return float(
            step.estimate_decode_step_s(
                max(self.mean_running / self.planned.deployment.layout.dp, 1.0),
                self.measured_workload.mean_decode_context,
            )
        )


def find_failure_modes(case: DiagnosisCase) -> list[DiagnosisFinding]:
    """Every mode that the figures speak for, the likeliest cause first; none where all is as it should be."""
    gathered: dict[str, tuple[str, ...]] = {}
    for rule in FAILURE_DETECTORS:
        for each in rule(case):
            gathered[each.mode] = gathered.get(each.mode, ()) + each.evidence
    findings = [DiagnosisFinding(*each) for each in gathered.items()]
    if case.plan_could_serve_traffic:
        findings.sort(key=lambda each: each.mode in LOAD_DEPENDENT_MODES)
    sentences = tuple(
        f"promised is a {target}, {_describe_violation(target, value)}"
        for target, value in case.violated_slos
    )
    return findings or [DiagnosisFinding("broken_promise", sentences)] * bool(sentences)


def _describe_violation(target: SloTarget, value: float) -> str:
    """How a promise of `Case.broken` is not kept."""
    return (
        f"the mean is {value * 1e3:,.0f} ms"
        if target.percentile == "mean"
        else f"{value:.0%} of requests miss it"
    )


def detect_other_settings(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """The server has other room or places than the plan, on which every other cause rests."""
    if case.planned is None:
        return
    memory, slots, said = get_memory_plan(case.planned.deployment), case.max_running or 0, []
    pool, room = case.measured.pool, memory.pool.num_blocks * memory.pool.layout.block_size
    kv = memory.kv_available
    low, high = (
        room * max(edge, 0.0) / max(kv.mid, 1.0)
        for edge in (kv.lo / TRAFFIC_EXCESS_FACTOR, kv.hi * TRAFFIC_EXCESS_FACTOR)
    )
    if pool is not None and not low <= pool <= high:
        said.append(
            f"its KV cache has room for {pool:,.0f} tokens (num_gpu_blocks x block_size), planned"
            f" {room:,.0f}"
        )
    if case.measured.most_running > slots:
        said.append(
            f"{case.measured.most_running:.0f} run at once, planned are at most {slots}"
            " (max_num_seqs)"
        )
    if said:
        yield DiagnosisFinding("other_settings", tuple(said))


def detect_adapter_starvation(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Requests are passed over for want of an adapter's slot."""
    deferred = case.measured.deferred or 0.0
    if deferred >= 1 and deferred >= 0.5 * case.mean_waiting:
        text = (
            f"{deferred:.0f} of {max(case.mean_waiting, deferred):.0f} waiting requests are"
            " deferred"
        )
        yield DiagnosisFinding(
            "adapter_starvation", (f"{text}, while {case.mean_running:.0f} run",)
        )


def detect_rejected_drafts(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Fewer drafts are kept than the plan counts on, or so few that they hardly pay."""
    share = case.measured.acceptance_fraction
    planned = compute_planned_acceptance(case.planned.deployment) if case.planned else None
    if share is not None and share < (0.8 * planned if planned else 0.25):
        against = f", planned {planned:.0%}" if planned else ""
        yield DiagnosisFinding(
            "drafts_rejected", (f"{share:.0%} of the drafted tokens are accepted{against}",)
        )


def detect_cold_prefix_cache(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """The plan counts on a cache that production does not find filled."""
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
    """Gaps are longer than in a replay of the same traffic: the host, the links between GPUs, or the GPU."""
    gap, replayed, planned = (
        case.measured.get_mean("itl") or case.measured.get_mean("tpot"),
        case.simulated,
        case.planned,
    )
    if (
        gap is None
        or replayed is None
        or planned is None
        or (case.measured.preemptions or 0.0) > MIN_PREEMPTIONS_PER_REQUEST
    ):
        return
    role = "itl" if case.measured.get_mean("itl") else "tpot"
    most = replayed.get(role, "mean").hi
    if not gap > STEP_SLOWDOWN_FACTOR * most:
        return
    sentences = [
        f"gaps take {gap * 1e3:.1f} ms; a replay of the same traffic"
        f" {replayed.get(role, 'mean') * 1e3:.1f} ms"
    ]
    cpu = case.measured.cpu
    if cpu is not None:
        sentences.append(f"the server's process uses {cpu:.2f} s of CPU a second")
    links = planned.deployment.layout.tp > 1
    host = cpu >= BUSY_FRACTION if cpu is not None else not links
    yield DiagnosisFinding(
        "host_bound" if host else "tp_communication" if links else "slow_gpu", tuple(sentences)
    )


def detect_traffic_mismatch(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """More requests, or longer ones, than were planned for."""
    measured, planned = case.measured, case.planned
    if planned is None:
        return
    said = []
    if (
        measured.arrival_rps
        and planned.rate
        and measured.arrival_rps > TRAFFIC_EXCESS_FACTOR * planned.rate
    ):
        said.append(
            f"{measured.arrival_rps:.3g} requests/s come to this replica, planned"
            f" {planned.rate:.3g}"
        )
    if planned.workload:
        for side in LENGTH_METRICS:
            tokens, expected = measured.get_mean_tokens(side), getattr(planned.workload, side).mean
            if tokens and tokens > TRAFFIC_EXCESS_FACTOR * expected:
                said.append(f"{side}s have {tokens:,.0f} tokens, planned {expected:,.0f}")
    if said:
        yield DiagnosisFinding("assumption", tuple(said))


def detect_kv_preemption(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Requests lose their blocks and start over."""
    often, usage = case.measured.preemptions, case.measured.gauges.get("kv_usage")
    blocks = usage is not None and usage >= BUSY_FRACTION and case.is_queueing
    if often is None or often <= (0.0 if blocks else MIN_PREEMPTIONS_PER_REQUEST):
        return
    full = f", the KV cache is {usage:.0%} full" if usage is not None else ""
    yield DiagnosisFinding("kv_preemption", (f"{often:.2f} preemptions a request{full}",))


def detect_queueing(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """Requests wait: for a place in the batch, or for room for a whole prompt."""
    if not case.is_queueing:
        return
    measured, slots = case.measured, case.max_running
    sentences = [
        f"{case.mean_waiting:.0f} wait and {case.mean_running:.0f} run"
        + (f" of at most {slots}" if slots else "")
    ]
    queue, ttft = measured.get_mean("queue"), measured.get_mean("ttft")
    if queue is not None and ttft is not None:
        sentences.append(
            f"{queue * 1e3:,.0f} of {ttft * 1e3:,.0f} ms to the first token are spent in the queue"
        )
    usage = measured.gauges.get("kv_usage", 0.0)
    sentences.append(f"the KV cache is {usage:.0%} full")
    room, free = (
        explain_blocked_queue(case),
        slots is not None and case.mean_running < BUSY_FRACTION * slots,
    )
    if free and room:
        yield DiagnosisFinding("oom_admission", (*sentences, room))
    elif (
        free
        and (replay := case.simulated)
        and queue
        and ttft
        and replay.get("ttft", "mean").hi < ttft / STEP_SLOWDOWN_FACTOR
    ):
        sooner = replay.get("ttft", "mean").mid * 1e3
        sentences.append(f"a replay of the same traffic has {sooner:,.0f} ms to the first token")
        yield DiagnosisFinding("other_settings", tuple(sentences))
    else:
        yield DiagnosisFinding("oversubscribed", tuple(sentences))


def detect_slow_front_end(case: DiagnosisCase) -> Iterator[DiagnosisFinding]:
    """The first token is late for what happens outside the engine."""
    outside, late = case.front_end_delay_s, {target.metric for target, _ in case.violated_slos}
    promised = case.planned is not None and any(
        target.metric == "ttft" for target in case.planned.targets
    )
    if outside is None or (promised and not late & {"ttft", "e2e"}):
        return
    ttft, queue, prefill = (
        1e3 * (case.measured.get_mean(role) or 0.0) for role in ("ttft", "queue", "prefill")
    )
    if outside > FRONT_END_DELAY_S and outside * 1e3 > FRONT_END_DELAY_S * ttft:
        text = (
            f"{outside * 1e3:,.0f} of {ttft:,.0f} ms to the first token are neither queue"
            f" ({queue:,.0f}) nor prefill"
        )
        cpu = case.measured.cpu
        busy = () if cpu is None else (f"the server's process uses {cpu:.2f} s of CPU a second",)
        yield DiagnosisFinding("front_end", (f"{text} ({prefill:,.0f})", *busy))


def explain_blocked_queue(case: DiagnosisCase) -> str:
    """What the first in line lacks: the longest prompts take a large part of the pool; nothing where they do not."""
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
    """Answers are held up by other requests' prompts, and their pace is not what was promised."""
    gap, alone = (
        case.measured.get_mean("itl") or case.measured.get_mean("tpot"),
        case.decode_only_step_s,
    )
    late = [target for target, _ in case.violated_slos if target.metric in ("itl", "tpot")]
    if (
        gap is None
        or alone is None
        or case.is_queueing
        or (case.measured.preemptions or 0.0) > MIN_PREEMPTIONS_PER_REQUEST
    ):
        return
    if gap > PREFILL_STALL_FACTOR * alone and late:
        yield DiagnosisFinding("prefill_contention", (
            f"gaps take {gap * 1e3:.1f} ms, steps that only decode {alone * 1e3:.1f} ms",
            *(f"promised is a {target}" for target in late),
        ))  # fmt: skip


FAILURE_DETECTORS: tuple[Callable[[DiagnosisCase], Iterator[DiagnosisFinding]], ...] = (
    detect_other_settings, detect_adapter_starvation, detect_rejected_drafts,
    detect_cold_prefix_cache, detect_slow_machine, detect_traffic_mismatch, detect_kv_preemption,
    detect_queueing,
    detect_slow_front_end, detect_prefill_contention,
)  # fmt: skip
"""From the most particular evidence to the most general, after whether it is the planned server at all."""
LOAD_DEPENDENT_MODES = ("drafts_rejected", "cold_prefix_cache", "assumption")
"""Modes that the replay knows of: where it bears them, whatever else was found explains more."""
