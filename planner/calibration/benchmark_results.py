"""Read measured runs from files: JSON and printed tables of load generators, and tables of serving points."""

import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from planner.calibration.benchmark_forms import (
    MAX_NUMBER,
    STATISTICS,
    convert_to_vllm_run,
    read_printed_tables,
)
from planner.calibration.user_fit import BenchmarkPoint
from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError, add_error_context, find_closest
from planner.core.readers import parse_json, read_csv_lines, read_text
from planner.core.text import format_count
from planner.core.units import MIB
from planner.engines.deployment import Deployment
from planner.engines.engine import get_engine
from planner.hardware.gpus import get_gpu
from planner.latency.performance import LATENCY_METRICS
from planner.planning.capacity import count_benchmark_prefix_tokens
from planner.planning.plan import get_reference_deployment
from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.planning.table_rows import (
    COLUMN_CATALOG,
    INPUT_COLUMNS,
    POOL_SIZE_COLUMNS,
    parse_cells,
    parse_measured_run,
)
from planner.workload.length_distribution import LengthDistribution
from planner.workload.request_generator import sample_arrivals
from planner.workload.traces import Trace
from planner.workload.workload import Workload

MEASURED_COLUMNS = tuple(COLUMN_CATALOG["measured"])
"""Columns with the means over a run; an empty cell was not measured."""
MAX_RESULT_FILE_BYTES, MAX_RUNS_PER_FILE = 128 * MIB, 10_000
"""Limits of a file of results."""
MAX_SPREAD = 3.5
"""A p95 over its mean, as far as a lognormal has it."""
SPECULATION_REASON = "whose acceptance would be fitted too"
TokenCount = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True)
class BenchmarkResults:
    """Measured runs, and notes for the reader on how they were read."""

    points: tuple[BenchmarkPoint, ...]
    notes: tuple[str, ...]


class VllmBenchResult(StrictEntry):
    """The fields used of a `vllm bench serve` result (benchmarks/serve.py, 0.20.2 and 0.33.0)."""

    model_config = ConfigDict(extra="ignore")

    model_id: str = ""
    completed: Annotated[PositiveInt, Field(le=10**8)]
    failed: NonNegativeInt = 0
    total_input_tokens: Annotated[PositiveInt, Field(le=2**53)]
    total_output_tokens: Annotated[PositiveInt, Field(le=2**53)]
    p95_input_tokens: float = 0.0  # of other load generators' forms; 0: not stated
    p95_output_tokens: float = 0.0
    request_rate: float = Field(default=math.inf, gt=0, allow_inf_nan=True)
    burstiness: PositiveFloat = 1.0
    max_concurrency: Annotated[PositiveInt, Field(le=10**9)] | None = None
    ramp_up_strategy: str | None = None
    mean_ttft_ms: PositiveFloat
    mean_tpot_ms: NonNegativeFloat  # 0: no request had a second token
    input_lens: tuple[TokenCount, ...] = ()  # these three with --save-detailed
    output_lens: tuple[TokenCount, ...] = ()  # 0: the request failed
    start_times: tuple[float, ...] = ()  # s, once the limit of requests in flight lets it go

    def build_workload(self, prefix_tokens: int) -> Workload:
        """Return what was sent, with the recorded lengths and arrivals if the result has them.

        Otherwise lengths are the means of the totals, and arrivals are drawn as the benchmark does.
        """
        rate = None if math.isinf(self.request_rate) else self.request_rate
        if self.ramp_up_strategy and len(self.start_times) < 2:
            raise PlannerError(
                "field ramp_up_strategy: a ramp can be replayed with its start_times"
                " (--save-detailed)"
            )
        sides = (
            (self.total_input_tokens, self.p95_input_tokens),
            (self.total_output_tokens, self.p95_output_tokens),
        )
        prompt, output = (
            LengthDistribution.from_lognormal(
                mean, min(p95, MAX_SPREAD * mean) if p95 > mean else None
            )
            for tokens, p95 in sides
            for mean in [max(tokens / self.completed, 1.0)]
        )
        if trace := self._build_trace():
            prompt = LengthDistribution.from_samples(trace.prompt)
            output = LengthDistribution.from_samples(trace.output)
            rate = trace.rate if trace.arrival[-1] else rate
        in_flight = self.max_concurrency or (self.completed if rate is None else None)
        return Workload(
            prompt, output, rate=rate, concurrency=in_flight, burstiness=self.burstiness,
            trace=trace,
            prefix_tokens=prefix_tokens, prefix_hit_rate=float(prefix_tokens > 0),
            num_prompts=len(trace.prompt) if trace else self.completed,
        )  # fmt: skip

    def _build_trace(self) -> Trace | None:
        """Return the successful requests in the order sent; None if fewer than two have lengths.

        With neither a rate nor a ramp all requests arrive at the start, and only the concurrency
        limit holds them back.
        """
        if len(self.input_lens) != len(self.output_lens):
            counts = f"{len(self.input_lens)} entries and output_lens {len(self.output_lens)}"
            raise PlannerError(f"field input_lens has {counts}; they must be as many")
        start_times = np.array(
            self.start_times if len(self.start_times) == len(self.input_lens) else ()
        )
        lens = np.array([self.input_lens, self.output_lens], np.int64)
        indices = np.flatnonzero((lens > 0).all(axis=0))
        if len(indices) < 2:
            return None
        if math.isinf(self.request_rate) and not self.ramp_up_strategy:
            arrival = np.zeros(len(indices))
        elif len(start_times):
            indices = indices[np.argsort(start_times[indices], kind="stable")]
            arrival = start_times[indices] - start_times[indices[0]]
        else:
            arrival = sample_arrivals(
                len(indices), self.request_rate, self.burstiness, np.random.default_rng(0)
            )
        return Trace(Path(), arrival, *lens[:, indices])


def plan_benchmarked_deployment(scenario: str | Path) -> tuple[Deployment, int]:
    """Return one replica of a scenario's plan, and the tokens of the prefix that `bench.sh` shares.

    It has the catalog's coefficients, from which a fit starts, whatever calibration the scenario
    uses.
    """
    scenario_spec = load_scenario(scenario)
    planned = get_reference_deployment(search_deployments(scenario_spec))
    replica = planned.with_replicas(1)
    return (
        replace(replica, engine=replace(replica.engine, calibration={})),
        count_benchmark_prefix_tokens(planned, scenario_spec.workload),
    )


def read_benchmark_results(
    paths: Sequence[Path],
    deployment: Deployment | None = None,
    prefix_tokens: int = 0,
    *,
    to_fit: bool = True,
) -> BenchmarkResults:
    """Read all runs in `paths`: JSON of `vllm bench serve` or SGLang's bench_serving, or CSV.

    A CSV has the columns of the batch interface. JSON does not say what ran: that
    is `deployment`. Rows of a CSV do; if `deployment` is given, those of another GPU or engine are
    left out. Runs `to_fit` have no speculation. Raises `PlannerError` naming file, run or line, and
    field for what cannot be read.
    """
    points, notes = list[BenchmarkPoint](), list[str]()
    if to_fit and deployment and deployment.speculation:
        raise PlannerError(
            f"the plan drafts tokens, {SPECULATION_REASON}: benchmark it without speculation"
        )
    for path in paths:
        if path.suffix.lower() == ".csv":
            benchmark_points, sentences = _read_table(path, deployment)
        elif deployment is None:
            raise PlannerError(
                f"{path.name} says how a run went, not what ran: name its scenario with --scenario"
            )
        else:
            benchmark_points, sentences = _read_bench_file(path, deployment, prefix_tokens)
        points += benchmark_points
        notes += sentences
    if not points:
        raise PlannerError(". ".join(("there is no run to calibrate with", *notes)))
    return BenchmarkResults(tuple(points), tuple(dict.fromkeys(notes)))


def _read_bench_file(
    path: Path, deployment: Deployment, prefix_tokens: int
) -> tuple[list[BenchmarkPoint], list[str]]:
    """Read the runs of `deployment` in a result file: one, a list, or one per line."""
    objects = islice(_iterate_json_objects(path), MAX_RUNS_PER_FILE + 1)
    runs = [(data, convert_to_vllm_run(data, path.name)) for data in objects]
    points, notes = [], []
    if len(runs) > MAX_RUNS_PER_FILE:
        raise PlannerError(
            f"{path.name} has more than {MAX_RUNS_PER_FILE:,} runs, the most that are read of a"
            " file"
        )
    for number, (source, data) in enumerate(runs, 1):
        where = path.name if len(runs) == 1 else f"{path.name}, run {number}"
        run = validate_entry(VllmBenchResult, data, f"{where}, as a benchmark's result")
        if isinstance(data, dict) and (origin := data.get("derived")):
            notes.append(f"{where} states no TPOT: it was worked out from its means of {origin}")
        try:
            # bench.sh shares a prefix; the prompts of other load generators are taken as unlike
            workload = run.build_workload(prefix_tokens if data is source else 0)
        except PlannerError as error:
            raise PlannerError(f"{where}, {error}") from None
        points.append(
            BenchmarkPoint(
                where,
                deployment,
                workload,
                run.mean_ttft_ms / 1e3,
                run.mean_tpot_ms / 1e3 or None,
                _read_statistics(data),
            )
        )
        trace, max_model_len = workload.trace, deployment.args.max_model_len
        longest = (trace.prompt + trace.output).max() if trace else workload.mean_tokens_per_request
        if longest > max_model_len:
            raise PlannerError(
                f"{where}: a request has {longest:,.0f} tokens, over the plan's max_model_len"
                f" {max_model_len:,}"
            )
        named, served = (
            name.rpartition("/")[2].casefold() for name in (run.model_id, deployment.model.name)
        )
        if named not in served and served not in named:
            notes.append(
                f"{path.name} names the model {run.model_id}, and the plan serves"
                f" {deployment.model.name}"
            )
        if run.failed:
            failed = format_count(run.failed, "request")
            notes.append(f"{where}: {failed} failed; the other {run.completed} count")
    return points, notes


def _read_statistics(run: object) -> dict[str, float]:
    """Return what a run in vLLM's form states: latencies in seconds, such as "p95 ttft", and rates."""
    fields = run if isinstance(run, dict) else {}
    names = {
        f"{theirs}_{metric.benchmark}_ms": (f"{ours} {name}", 1e-3)
        for name, metric in LATENCY_METRICS.items()
        for theirs, ours in (*((each, each) for each in STATISTICS), ("median", "p50"))
    }
    names |= {f"{each}_throughput": (f"{each}_tps", 1.0) for each in ("request", "output")}
    return {
        ours: fields[theirs] * unit
        for theirs, (ours, unit) in names.items()
        if isinstance(fields.get(theirs), float | int) and 0 < fields[theirs] < MAX_NUMBER
    }


def _iterate_json_objects(path: Path) -> Iterator[object]:
    """Yield the objects in a JSON file: the only one, those of a list, or one per line.

    Of a text with printed tables, yield their fields.
    """
    text = read_text(path, MAX_RESULT_FILE_BYTES)
    if runs := read_printed_tables(text):
        yield from runs
        return
    try:
        data = parse_json(text, path.name)
        yield from data if isinstance(data, list) else [data]
        return
    except PlannerError:
        if "\n" not in text.strip():
            raise
    for number, line in enumerate(io.StringIO(text), 1):
        if line.strip():
            yield parse_json(line, f"{path.name}, line {number}")


def _read_table(
    path: Path, deployment: Deployment | None
) -> tuple[list[BenchmarkPoint], list[str]]:
    """Read the runs in a CSV file, and notes about its rows."""
    rows = read_csv_lines(path, 16 * MIB)
    header = [name.strip() for name in next(rows, (1, []))[1]]
    known = {*INPUT_COLUMNS, *MEASURED_COLUMNS}
    if (
        "gpu" not in header
        or not {"model", "model_config"} & {*header}
        or not set(MEASURED_COLUMNS) & {*header}
    ):
        raise PlannerError(
            f"{path.name}, line 1: expected the batch interface's columns (gpu, model, ...) and"
            f" {' or '.join(MEASURED_COLUMNS)}, got {', '.join(header)[:80]!r}"
        )
    for name in set(header) - known:
        if near := find_closest(name, set(MEASURED_COLUMNS) - set(header), 0.85):
            raise PlannerError(f"{path.name}, line 1: unknown column {name}; did you mean {near}?")
    points, notes, omitted = list[BenchmarkPoint](), Counter[str](), Counter[str]()
    served = (deployment.gpu.name, deployment.engine.name) if deployment else ("", "")
    for line, row in rows:
        where = f"{path.name}, line {line}"
        with add_error_context(where):
            if len(row) > len(header):
                raise PlannerError(
                    f"the row has {len(row) - len(header)} more cells than the header has columns"
                )
            if len(points) == MAX_RUNS_PER_FILE:
                raise PlannerError(
                    f"{MAX_RUNS_PER_FILE:,} runs, the most that are read of a file, came before"
                )
            cells = {
                name: cell.strip() for name, cell in zip(header, row, strict=False) if cell.strip()
            }
            gpu, engine = get_gpu(cells.get("gpu", "")), get_engine(cells.get("engine", "vllm"))
            if deployment and (gpu.name, engine.name) != served:
                omitted[f"of {gpu.name} under {engine.name}"] += 1
            elif any(f"prefill_{size}" in cells for size in POOL_SIZE_COLUMNS):
                omitted["of disaggregated serving"] += 1
            elif "speculative_method" in cells:
                omitted[f"with speculative decoding, {SPECULATION_REASON}"] += 1
            else:
                points.append(_parse_benchmark_point(where, cells, path.parent, notes))
    sentences = [
        f"{path.name}: {note}" + f" ({count} rows)" * (count > 1) for note, count in notes.items()
    ]
    if omitted:
        listed = ", ".join(f"{count} {reason}" for reason, count in omitted.most_common())
        sentences.append(f"{path.name}: rows left out: {listed}")
    return points, sentences


def _parse_benchmark_point(
    name: str, row: Mapping[str, str], folder: Path, notes: Counter[str]
) -> BenchmarkPoint:
    """Parse a run from a row with the batch interface's columns."""
    cells, sentences = parse_cells(dict(row))
    times = [
        seconds and seconds / 1e3 for seconds in map(cells.pop, MEASURED_COLUMNS, (None, None))
    ]
    if times == [None, None]:
        raise PlannerError(f"{' and '.join(MEASURED_COLUMNS)} are both empty")
    if not {"concurrency", "request_rate", "trace"} & set(cells):
        raise PlannerError("concurrency (or request_rate, or trace) is missing")
    deployment, workload = parse_measured_run(cells, folder, sentences)
    notes.update(sentences)
    return BenchmarkPoint(name, deployment, workload, *times)
