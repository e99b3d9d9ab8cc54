"""Check a launched server against its plan: every predicted quantity, and what was measured of it.

What fails is named, the plan is evaluated again with what was measured, and, if it no longer meets its
targets, searched again.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import median

from planner.calibration.benchmark_results import read_benchmark_results
from planner.calibration.user_fit import (
    REPEAT_SIGMA_TTFT_TPOT,
    BenchmarkPoint,
)
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.readers import read_text
from planner.core.templates import render_template
from planner.core.units import GIB
from planner.engines.failure_modes import load_failure_modes
from planner.latency.performance import Performance
from planner.latency.speculative_decoding import compute_planned_acceptance
from planner.latency.startup_time import estimate_startup
from planner.memory.memory_plan import get_memory_plan
from planner.planning.capacity import count_benchmark_prefix_tokens, derive_effective_workload
from planner.planning.planned_replica import (
    PlannedReplica,
    load_planned_replica,
)
from planner.planning.prediction import predict
from planner.tools.comparison import (
    Column,
    ComparisonRow,
    ComparisonStatus,
    format_table,
)
from planner.tools.diagnostics.diagnosis import MAX_LOG_BYTES
from planner.tools.diagnostics.failure_detection import (
    MIN_PREEMPTIONS_PER_REQUEST,
    DiagnosisCase,
    find_failure_modes,
)
from planner.tools.diagnostics.metrics_pages import (
    ReplicaMetrics,
    measure_replica,
    read_metrics_page,
)
from planner.tools.diagnostics.startup_errors import StartupError, find_startup_errors
from planner.tools.diagnostics.startup_log import StartupLog, parse_startup_log

TARGET_RATE_TOLERANCE = 0.15
"""Distance of a benchmark's rate from the planned one up to which it tells of the targets."""
MIN_HIT_FRACTION = 0.8
"""Of the planned prefix cache hits, below which the cache is colder than planned."""
NOTABLE_RATIO = 0.1
"""Distance of measured from expected TPOT, relative, from which on a pace that passes is reported."""
LAYOUT_NAMES = ("tp", "pp", "dp", "dcp")
CHECK_COLUMNS = (
    Column("quantity", lambda row: row.title, "<44"),
    Column(
        "predicted, 80% interval",
        lambda row: ", ".join(
            f"{'limit ' * (value is row.limit)}{row.format_value(value)}"
            for value in (row.expected, row.limit)
            if value is not None
        ),
        "<30",
    ),
    Column("measured", lambda row: row.format_value(row.measured), ">9"),
    Column("ratio", lambda row: "" if math.isnan(row.ratio) else f"{row.ratio:.2f}", ">7"),
    Column("", lambda row: f"  {row.status}"),
)


@dataclass(frozen=True)
class BenchmarkCheck:
    """One benchmark, and what the plan predicts for exactly its requests."""

    point: BenchmarkPoint
    performance: Performance

    @property
    def rate(self) -> float | None:
        """Requests/s that were offered; None for a closed loop."""
        return self.point.workload.rate

    @property
    def tpot_ratio(self) -> float:
        """Measured over predicted mean TPOT; NaN without one."""
        measured = self.point.tpot
        return measured / self.performance.get("tpot", "mean").mid if measured else math.nan

    def list_checks(self, planned: PlannedReplica, rate: float | None) -> Iterator[ComparisonRow]:
        """Yield latencies and throughput; targets if it has about the planned `rate`."""
        is_planned_load = bool(
            rate and self.rate and abs(self.rate / rate - 1) < TARGET_RATE_TOLERANCE
        )
        limits = {f"{t.percentile} {t.metric}": t.seconds for t in planned.targets}
        names = dict.fromkeys(["mean ttft", "mean tpot", *limits])
        for name in names:
            statistic, metric = name.split()
            predicted = self.performance.get(metric, statistic)
            if math.isnan(predicted.mid):
                continue
            measured = self.point.statistics.get(name)
            limit = limits.get(name) if is_planned_load else None
            yield ComparisonRow(
                f"{statistic} {metric.upper()}, {self.point.name}",
                "ms",
                predicted * 1e3,
                None if measured is None else measured * 1e3,
                None if limit is None else limit * 1e3,
                sigma=REPEAT_SIGMA_TTFT_TPOT[metric in ("tpot", "itl")],
            )
        yield ComparisonRow(
            f"requests, {self.point.name}",
            "1/s",
            self.performance.request_tps,
            self.point.statistics.get("request_tps"),
            worse="lower",
            sigma=REPEAT_SIGMA_TTFT_TPOT[1],
        )


@dataclass(frozen=True)
class LaunchCheck:
    """A launched replica against its plan."""

    planned: PlannedReplica
    benchmarks: tuple[BenchmarkCheck, ...] = ()
    metrics: ReplicaMetrics | None = None
    log: StartupLog | None = None
    startup_s: float | None = None
    errors: tuple[StartupError, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def checks(self) -> tuple[ComparisonRow, ...]:
        """All compared quantities: memory, caches, and each benchmark."""
        each = (one.list_checks(self.planned, self.planned.rate) for one in self.benchmarks)
        loads = chain.from_iterable(each) if self.benchmarks else self._list_live_checks()
        return (*self._list_memory_checks(), *self._list_cache_checks(), *loads)

    @property
    def verdict(self) -> ComparisonStatus:
        """FAIL if anything deviates; NOT MEASURED without a KV cache or any latency; else PASS."""
        if self.deviations or any(check.status == "FAIL" for check in self.checks):
            return "FAIL"
        has_latency = any(
            check.unit == "ms" and check.status != "NOT MEASURED" for check in self.checks
        )
        return "PASS" if has_latency and self.kv_tokens else "NOT MEASURED"

    @property
    def planned_settings(self) -> dict[str, object]:
        """What the plan starts its engine with, by the names of `StartupLog.arguments`."""
        deployment = self.planned.deployment
        layout = {name: getattr(deployment.layout, name) for name in LAYOUT_NAMES}
        return {**vars(deployment.args), **layout, "engine_version": deployment.engine.version}

    @cached_property
    def measured_settings(self) -> dict[str, object]:
        """Arguments that the plan has otherwise: those of the log, and slots that a queue tells."""
        logged, planned = self.log.arguments if self.log else {}, self.planned_settings
        settings = {
            name: value
            for name, value in logged.items()
            if (ours := planned.get(name)) is not None
            and not (
                math.isclose(ours, value, rel_tol=1e-3)
                if isinstance(ours, float) and isinstance(value, float | int)
                else str(ours) == str(value)
            )
        }
        if "max_num_seqs" not in logged and (slots := self._infer_slots()):
            settings["max_num_seqs"] = slots
        return settings

    @property
    def kv_tokens(self) -> float | None:
        """Tokens of KV cache that the log or the page states."""
        if self.log and "kv_tokens" in self.log.figures:
            return self.log.figures["kv_tokens"]
        if self.metrics is None or self.metrics.pool is None:
            return None
        pool = get_memory_plan(self.planned.deployment).pool
        return self.metrics.pool * pool.reported_tokens / (pool.num_blocks * pool.layout.block_size)

    @property
    def kv_ratio(self) -> float:
        """Measured over planned KV cache; 1 if not measured."""
        planned = get_memory_plan(self.planned.deployment).pool.reported_tokens
        return (self.kv_tokens or planned) / planned

    def _list_memory_checks(self) -> Iterator[ComparisonRow]:
        memory = get_memory_plan(self.planned.deployment)
        weights = self.log.figures.get("weights") if self.log else None
        yield ComparisonRow(
            "weights", "GiB", memory.weights / GIB, weights and weights / GIB, sigma=0.01
        )
        tokens, kv = memory.pool.reported_tokens, memory.kv_available
        yield ComparisonRow(
            "KV cache",
            "tokens",
            Interval(tokens * kv.lo / kv.mid, tokens, tokens * kv.hi / kv.mid),
            self.kv_tokens,
            worse="lower",
            sigma=0.01,
        )
        scenario = self.planned.scenario
        storage = {"storage": scenario.storage} if scenario else {}
        if startup := estimate_startup(self.planned.deployment, **storage):
            yield ComparisonRow("startup", "s", startup.total, self.startup_s)

    def _list_cache_checks(self) -> Iterator[ComparisonRow]:
        metrics = self.metrics
        shares = {
            "prompt tokens from the prefix cache": (
                self.planned_hit_fraction,
                metrics.prefix_hit_fraction if metrics else None,
            ),
            "accepted drafts": (
                compute_planned_acceptance(self.planned.deployment),
                metrics.acceptance_fraction if metrics else None,
            ),
        }
        for name, (planned, measured) in shares.items():
            if planned:
                percent = 100 * planned
                yield ComparisonRow(
                    name,
                    "%",
                    Interval(percent * MIN_HIT_FRACTION, percent, percent / MIN_HIT_FRACTION),
                    None if measured is None else measured * 100,
                    worse="lower",
                )
        expected = max((b.performance.preemptions for b in self.benchmarks), default=0.0)
        yield ComparisonRow(
            "preemptions per request",
            "",
            Interval(0.0, expected, expected + MIN_PREEMPTIONS_PER_REQUEST),
            metrics.preemptions if metrics else None,
        )

    @cached_property
    def planned_hit_fraction(self) -> float:
        """The fraction of prompt tokens that the benchmarks, or the plan, find in the cache."""
        if self.benchmarks:
            loads = [
                derive_effective_workload(b.point.deployment, b.point.workload)
                for b in self.benchmarks
            ]
            prompts = sum(load.num_requests * load.prompt.mean for load in loads)
            return sum(load.num_requests * load.mean_cached_tokens for load in loads) / prompts
        workload = self.planned.workload
        return workload.cache_hit_fraction if workload else 0.0

    @cached_property
    def live(self) -> DiagnosisCase | None:
        """The pages beside the plan; None without pages."""
        return DiagnosisCase(self.metrics, self.planned) if self.metrics else None

    def _list_live_checks(self) -> Iterator[ComparisonRow]:
        """Yield latencies of the pages' own traffic: means as simulated, and targets by bucket."""
        histograms = self.metrics.histograms if self.metrics else {}
        simulated = self.live.simulated if self.live else None
        for metric in ("ttft", "tpot"):
            if metric in histograms and simulated and not simulated.saturated:
                yield ComparisonRow(
                    f"mean {metric.upper()}, live",
                    "ms",
                    simulated.get(metric, "mean") * 1e3,
                    histograms[metric].mean * 1e3,
                    sigma=REPEAT_SIGMA_TTFT_TPOT[metric == "tpot"],
                )
        edges = {slo.target: slo.edge_s for slo in (self.live.slo_readings if self.live else ())}
        for target in self.planned.targets:
            edge_s = edges.get(target)
            yield ComparisonRow(
                f"{target.name}, bucket edge",
                "ms",
                None,
                edge_s and edge_s * 1e3,
                target.seconds * 1e3,
            )

    @cached_property
    def deviations(self) -> tuple[str, ...]:
        """What differs from the plan, the cause before its effects."""
        deviations = [f"{error.phrase.title}: {error.remedy}" for error in self.errors]
        deviations += [
            f"{name} is {value}, planned {self.planned_settings[name]}"
            for name, value in self.measured_settings.items()
        ]
        by_name = {check.name: check for check in self.checks if check.status == "FAIL"}
        if "KV cache" in by_name:
            deviations.append(
                f"the KV cache has {self.kv_ratio:.2f} times the planned tokens: other memory"
                " settings, or something else on the GPU"
            )
        for name, check in by_name.items():
            if check.unit == "%" and check.expected:
                deviations.append(
                    f"{name}: {check.value:.0f}%, planned {check.expected.mid:.0f}%: a"
                    f" {'colder prefix cache' if 'prefix' in name else 'worse draft'}"
                )
        if slowdown := self.slowdown:
            deviations.append(
                f"tokens take {slowdown:.2f} times as long as planned in every benchmark: a slower"
                " GPU, host or link"
            )
        if not deviations and self.live and not self.benchmarks:
            titles = load_failure_modes(self.live.measured.names.names)
            deviations += [
                f"{titles[finding.mode].title}: {'; '.join(finding.evidence)}"
                for finding in find_failure_modes(self.live)
            ]
        if not deviations and by_name:
            deviations.append(
                "the cause is not in these files: headroom diagnose, with pages under load"
            )
        return tuple(deviations)

    @cached_property
    def slowdown(self) -> float | None:
        """The factor by which tokens take longer in every benchmark; None if in none, or if else deviates."""
        has_colder = any(c.unit == "%" and c.status == "FAIL" for c in self._list_cache_checks())
        if self.measured_settings or has_colder or self.kv_ratio < MIN_HIT_FRACTION:
            return None
        ratios = [b.tpot_ratio for b in self.benchmarks if not math.isnan(b.tpot_ratio)]
        fails = [
            check.status == "FAIL"
            for b in self.benchmarks
            for check in b.list_checks(self.planned, None)
            if check.name.startswith("mean TPOT")
        ]
        return median(ratios) if ratios and all(fails) else None

    def _infer_slots(self) -> int | None:
        """Infer max_num_seqs from requests that wait while fewer run than planned."""
        case = self.live
        if case is None or self.kv_ratio < MIN_HIT_FRACTION:  # which may be why they wait
            return None
        has_others = any(finding.mode == "other_settings" for finding in find_failure_modes(case))
        running = round(case.mean_running / self.planned.deployment.layout.dp)
        if not (has_others and case.is_queueing and 0 < running < (case.max_running or 0)):
            return None
        return running

    @property
    def remarks(self) -> tuple[str, ...]:
        """How files were read, and a pace that passes and yet is not the expected one."""
        ratios = [b.tpot_ratio for b in self.benchmarks if not math.isnan(b.tpot_ratio)]
        if self.verdict != "PASS" or not ratios or abs(median(ratios) - 1) < NOTABLE_RATIO:
            return self.notes
        pace = (
            f"tokens take {median(ratios):.2f} times the expected time, which the intervals allow:"
            " headroom calibrate on these benchmarks, and plan again"
        )
        return (*self.notes, pace)

    def __str__(self) -> str:
        table = format_table(self.checks, CHECK_COLUMNS)
        return render_template("tools/diagnostics", "launch_check", check=self, table=table).strip(
            "\n"
        )

    def to_json(self) -> dict[str, object]:
        """Return the page for `--json`."""
        return {
            "verdict": self.verdict,
            "checks": [
                {
                    "quantity": check.name,
                    "unit": check.unit,
                    "predicted": check.expected and check.expected.as_json_list,
                    "limit": check.limit,
                    "measured": check.measured,
                    "status": check.status,
                }
                for check in self.checks
            ],
            "deviations": list(self.deviations),
            "remarks": list(self.remarks),
        }


_TIMESTAMP = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")


def measure_startup(text: str) -> float | None:
    """Return the seconds from the first line of a log to the end of the start; None if it does not show them."""
    done = re.search(r"Application startup complete|The server is fired up", text)
    times = _TIMESTAMP.findall(text[: done.end()]) if done else []
    if len(times) < 2:
        return None
    first, last = (
        datetime.strptime(f"2024-{at}", "%Y-%m-%d %H:%M:%S") for at in (times[0], times[-1])
    )
    seconds = (last - first).total_seconds()
    return seconds if seconds > 0 else None


def check_launch(
    plan: str | Path,
    benchmarks: Sequence[Path] = (),
    pages: Sequence[str | Path] = (),
    log: str | Path | None = None,
    seconds: float | None = None,
    replicas: int = 1,
) -> LaunchCheck:
    """Check a launched server against the `plan` that `headroom plan --out` wrote.

    `benchmarks` are results of load generators against `replicas` of it, `pages` one or two
    /metrics pages of one replica, `seconds` apart, `log` its start-up log. Raises `PlannerError`
    if there is none of them, or one cannot be read.
    """
    if not benchmarks and not pages and log is None:
        raise PlannerError("verify needs a measurement: --bench, --metrics or --log")
    planned = load_planned_replica(plan, unified=True)
    deployment = planned.deployment
    points: tuple[BenchmarkPoint, ...] = ()
    notes: tuple[str, ...] = ()
    if benchmarks:
        prefix = 0
        if planned.scenario:
            whole = deployment.with_replicas(planned.num_replicas)
            prefix = count_benchmark_prefix_tokens(whole, planned.scenario.workload)
        results = read_benchmark_results(
            benchmarks, deployment.with_replicas(replicas), prefix, to_fit=False
        )
        points, notes = results.points, results.notes
    text = "" if log is None else read_text(Path(log), MAX_LOG_BYTES, errors="replace")
    version = deployment.engine.version
    started = parse_startup_log(text, knows_model=True) if text else None
    if started:
        started = replace(started, arguments={**started.arguments, **started.engine_args})
    return LaunchCheck(
        planned,
        tuple(BenchmarkCheck(point, _predict_benchmark(point)) for point in points),
        measure_replica([read_metrics_page(page) for page in pages], version, seconds)
        if pages
        else None,
        started,
        measure_startup(text),
        tuple(find_startup_errors(text)),
        notes,
    )


def _predict_benchmark(point: BenchmarkPoint) -> Performance:
    performance = predict(point.deployment, point.workload).performance
    if performance is None:
        raise PlannerError(
            f"the planned replica does not start: {get_memory_plan(point.deployment).reason}"
        )
    return performance
