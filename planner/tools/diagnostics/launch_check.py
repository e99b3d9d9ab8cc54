"""Check a launched server against its plan: every predicted quantity, and what was measured of it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from planner.calibration.benchmark_results import read_benchmark_results
from planner.calibration.user_fit import REPEAT_SIGMA_TTFT_TPOT, BenchmarkPoint
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.readers import read_text
from planner.core.templates import render_template
from planner.core.units import GIB
from planner.engines.metric_names import load_failure_modes
from planner.latency.performance import LATENCY_METRICS, Performance
from planner.latency.speculative_decoding import compute_planned_acceptance
from planner.memory.memory_plan import get_memory_plan
from planner.planning.capacity import count_benchmark_prefix_tokens, derive_effective_workload
from planner.planning.planned_replica import PlannedReplica, load_planned_replica
from planner.planning.prediction import predict
from planner.tools.comparison import Column, ComparisonRow, ComparisonStatus, format_table
from planner.tools.diagnostics.diagnosis import MAX_LOG_BYTES, DiagnosisCase, find_failure_modes
from planner.tools.diagnostics.metrics_pages import measure_replica, read_metrics_page
from planner.tools.diagnostics.startup_log import (
    LAYOUT_NAMES,
    StartupError,
    StartupLog,
    find_startup_errors,
    parse_startup_log,
)

TARGET_RATE_TOLERANCE = 0.15
"""Distance of a benchmark's rate from the planned one up to which it tells of the targets."""
MIN_HIT_FRACTION = 0.8
"""Of the planned prefix cache hits, or accepted drafts, below which they are fewer than planned."""
MAX_MORE_PREEMPTIONS = 0.1
"""Preemptions of a request beyond the expected ones."""
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
class LaunchCheck:
    """A launched replica against its plan; each benchmark has what is predicted for its requests."""

    planned: PlannedReplica
    benchmarks: tuple[tuple[BenchmarkPoint, Performance], ...] = ()
    live: DiagnosisCase | None = None  # the pages beside the plan
    log: StartupLog | None = None
    errors: tuple[StartupError, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def checks(self) -> tuple[ComparisonRow, ...]:
        """All compared quantities: memory, caches, and each benchmark, or else the live traffic."""
        loads = [row for each in self.benchmarks for row in self._check_benchmark(*each)]
        return (*self._check_replica(), *(loads if self.benchmarks else self._check_live_traffic()))

    @property
    def verdict(self) -> ComparisonStatus:
        """FAIL if anything deviates; NOT MEASURED without a KV cache or any latency; else PASS."""
        measured = [row for row in self.checks if row.status != "NOT MEASURED"]
        if self.deviations or any(row.status == "FAIL" for row in measured):
            return "FAIL"
        is_whole = {"ms", "tokens"} <= {row.unit for row in measured}
        return "PASS" if is_whole else "NOT MEASURED"

    @cached_property
    def deviations(self) -> tuple[str, ...]:
        """What differs from the plan: what the log says, else the likeliest cause, or what is off."""
        deployment = self.planned.deployment
        ours = {
            **vars(deployment.args),
            **{name: getattr(deployment.layout, name) for name in LAYOUT_NAMES},
            "engine_version": deployment.engine.version,
        }
        logged = self.log.arguments if self.log else {}
        told = [f"{error.phrase.title}: {error.remedy}" for error in self.errors]
        told += [
            f"{name} is {value}, planned {ours[name]}"
            for name, value in logged.items()
            if ours.get(name) is not None and str(ours[name]) != str(value)
        ]
        failed = [row for row in self.checks if row.status == "FAIL"]
        if not told and self.live and (failed or not self.benchmarks):
            modes = load_failure_modes(self.live.measured.names.names)
            findings = find_failure_modes(self.live.facts)
            told = [f"{modes[f.mode].title}: {'; '.join(f.evidence)}" for f in findings[:1]]
        if not told and failed:
            off = [
                f"{r.name} is {r.ratio:.2f} times what is expected" for r in failed if r.ratio > 0
            ]
            told = [
                *off,
                "the cause is not in these files: headroom diagnose, with pages under load",
            ]
        return tuple(told)

    def _check_benchmark(
        self, point: BenchmarkPoint, performance: Performance
    ) -> Iterator[ComparisonRow]:
        """Yield latencies and throughput; targets if it has about the planned rate."""
        rate, planned_rate = point.workload.rate or math.inf, self.planned.rate or math.nan
        is_planned_load = abs(rate / planned_rate - 1) < TARGET_RATE_TOLERANCE
        limits: dict[tuple[str, str], float] = {
            (t.percentile, t.metric): t.seconds for t in self.planned.targets
        }
        for statistic, metric in dict.fromkeys([("mean", "ttft"), ("mean", "tpot"), *limits]):
            predicted, limit = performance.get(metric, statistic), limits.get((statistic, metric))
            if not math.isnan(predicted.mid):
                yield ComparisonRow(
                    f"{statistic} {metric.upper()}, {point.name}",
                    "ms",
                    predicted * 1e3,
                    point.statistics.get(f"{statistic} {metric}", math.nan) * 1e3,
                    limit * 1e3 if limit and is_planned_load else None,
                    sigma=REPEAT_SIGMA_TTFT_TPOT[not LATENCY_METRICS[metric].waits],
                )
        yield ComparisonRow(
            f"requests, {point.name}",
            "1/s",
            performance.request_tps,
            point.statistics.get("request_tps"),
            worse="lower",
            sigma=REPEAT_SIGMA_TTFT_TPOT[1],
        )

    def _check_replica(self) -> Iterator[ComparisonRow]:
        """Yield memory, and shares that pages tell."""
        memory, planned = get_memory_plan(self.planned.deployment), self.planned
        figures, pool, kv = self.log.figures if self.log else {}, memory.pool, memory.kv_available
        facts = self.live.facts if self.live else {}
        tokens = pool.reported_tokens
        paged = facts.get("pool", math.nan) * tokens / (pool.num_blocks * pool.layout.block_size)
        weights, expected = (
            figures.get("weights", math.nan),
            Interval(kv.lo, kv.mid, kv.hi) / kv.mid,
        )
        yield ComparisonRow("weights", "GiB", memory.weights / GIB, weights / GIB, sigma=0.01)
        yield ComparisonRow(
            "KV cache", "tokens", expected * tokens, figures.get("kv_tokens", paged), worse="lower", sigma=0.01,
        )  # fmt: skip
        loads = [derive_effective_workload(p.deployment, p.workload) for p, _ in self.benchmarks]
        loads = loads or [load for load in [planned.workload] if load]
        shares = {
            "prompt tokens from the prefix cache": (
                min((load.cache_hit_fraction for load in loads), default=0.0), "hits",
            ),
            "accepted drafts": (compute_planned_acceptance(planned.deployment), "accepted"),
        }  # fmt: skip
        for name, (share, fact) in shares.items():
            if share:
                interval = Interval(MIN_HIT_FRACTION, 1.0, 1 / MIN_HIT_FRACTION) * (100 * share)
                measured = 100 * facts.get(fact, math.nan)
                yield ComparisonRow(name, "%", interval, measured, worse="lower")
        most = max((performance.preemptions for _, performance in self.benchmarks), default=0.0)
        interval = Interval(0.0, most, most + MAX_MORE_PREEMPTIONS)
        yield ComparisonRow("preemptions per request", "", interval, facts.get("preemptions"))

    def _check_live_traffic(self) -> Iterator[ComparisonRow]:
        """Yield latencies of the pages' own traffic: means as simulated, and who misses targets."""
        simulated = self.live.simulated if self.live else None
        for metric in ("ttft", "tpot"):
            if self.live and simulated and not simulated.saturated:
                yield ComparisonRow(
                    f"mean {metric.upper()}, live",
                    "ms",
                    simulated.get(metric, "mean") * 1e3,
                    self.live.measured.get_mean(metric) * 1e3,
                    sigma=REPEAT_SIGMA_TTFT_TPOT[not LATENCY_METRICS[metric].waits],
                )
        yield from self.live.target_checks if self.live else ()

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
                    "measured": None if math.isnan(check.value) else check.value,
                    "status": check.status,
                }
                for check in self.checks
            ],
            "deviations": list(self.deviations),
            "remarks": list(self.notes),
        }


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
    deployment, prefix, results, live = planned.deployment, 0, None, None
    if benchmarks:
        if not (memory := get_memory_plan(deployment)).can_start:
            raise PlannerError(f"the planned replica does not start: {memory.reason}")
        if planned.scenario:
            whole = deployment.with_replicas(planned.num_replicas)
            prefix = count_benchmark_prefix_tokens(whole, planned.scenario.workload)
        served = deployment.with_replicas(replicas)
        results = read_benchmark_results(benchmarks, served, prefix, to_fit=False)
    text = "" if log is None else read_text(Path(log), MAX_LOG_BYTES, errors="replace")
    started = parse_startup_log(text, knows_model=True) if text else None
    if pages:
        read = [read_metrics_page(page) for page in pages]
        live = DiagnosisCase(measure_replica(read, deployment.engine.version, seconds), planned)
    return LaunchCheck(
        planned,
        tuple(
            (point, performance)
            for point in (results.points if results else ())
            if (performance := predict(point.deployment, point.workload).performance)
        ),
        live,
        started,
        tuple(find_startup_errors(text)),
        results.notes if results else (),
    )
