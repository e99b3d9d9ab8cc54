"""Answer thousands of what-ifs of one scenario, for `headroom sweep`.

Every point is the scenario with some fields set. Answers that the store has are not computed again.
"""

import json
import math
import os
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context, parent_process
from operator import attrgetter
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

from planner.core.catalog import compute_build_digest, validate_entry
from planner.core.errors import PlannerError, require_extra
from planner.core.files import (
    check_not_overwriting,
    ensure_folder,
    list_columns,
    replace_atomically,
    write_csv,
)
from planner.core.progress import show_step
from planner.core.text import escape_to_one_line, format_count
from planner.engines.layout import ParallelLayout
from planner.hardware.gpus import get_gpu
from planner.models.registry import load_model
from planner.parallelism.layouts import explain_illegal_layout
from planner.planning.candidate import Candidate
from planner.planning.deployment_builder import build_deployment
from planner.planning.evaluation import evaluate_candidate
from planner.planning.scenario import CandidateGpu, Scenario, parse_scenario
from planner.planning.search import SMALLEST, Plan, search_analytically, search_deployments
from planner.planning.table_rows import OUTPUT_COLUMNS, build_output_row
from planner.planning.tolerance import simulate_candidate
from planner.tools.answer_store import (
    Answer,
    AnswerStore,
    compute_answer_key,
    open_default_store,
)
from planner.tools.sweep.sweep_spec import DeploymentEntry, SweepPoint, SweepSpec, load_sweep_spec

Chunk = list[tuple[str, SweepPoint]]
"""The (key, point) pairs of one task."""
POINTS_PER_TASK = {False: 64, True: 1}
"""Points of a task, by whether requests are simulated."""
SIMULATED_POINT_S = {"plan": 60.0, "predict": 2.0}
"""Roughly what a simulated point takes on one core of a laptop; a plan from seconds to minutes."""
MIN_REPORT_S, MAX_REPORT_S = 10.0, 60.0
"""Progress is reported at each tenth of the points, not more often, and not less often if a point ends."""
GPU_FIELDS = ("gpus", "deployment.gpu")
"""Fields, and those below them, whose values are kinds of GPU to choose from."""
CANDIDATE_COLUMNS = (
    *(
        "status",
        "verdict",
        "probability",
        "binding",
        "assumed",
        "figures",
        "gpu",
        "gpus",
        "gpus_rented",
    ),
    *("tp", "pp", "dp", "ep", "dcp", "replicas", "pools", "quantization", "kv_cache_dtype"),
    *("max_num_seqs", "max_model_len", "misses", "margin"),
)
DAY_COLUMNS = ("replicas_fewest", "replicas_most", "hours_missed", "gpu_hours", "gpu_hours_fixed")
POINT_COLUMNS = frozenset((*CANDIDATE_COLUMNS, *DAY_COLUMNS, *OUTPUT_COLUMNS))


def compute_point_key(sweep: SweepSpec, fields: Mapping[str, object]) -> str:
    """Return the key of an answer; the scenario's title and the files to write do not count."""
    question = {name: v for name, v in fields.items() if name not in ("question", "files")}
    return compute_answer_key("point", [sweep.answer, sweep.replay, question], sweep.folder)


def answer_points(
    sweep: SweepSpec, build_digest: str, points: Sequence[tuple[str, SweepPoint]]
) -> dict[str, Answer]:
    """Return the answers to (key, point) pairs, for one task of the build `build_digest`.

    Raises `PlannerError` if this worker has another build.
    """
    if compute_build_digest() != build_digest:
        raise PlannerError(
            "a worker has another version of the planner, or other catalogs: give it the same"
        )
    return {key: answer_point(sweep, point) for key, point in points}


def answer_point(sweep: SweepSpec, point: SweepPoint) -> Answer:
    """Return one output row; `status` is ok, does_not_fit, nothing_meets or error."""
    try:
        fields = sweep.build_scenario_fields(point)
        deployment_fields = fields.pop("deployment", None)
        scenario = parse_scenario(fields, sweep.name, sweep.folder)
        if sweep.answer == "predict":
            entry = validate_entry(DeploymentEntry, deployment_fields, "deployment")
            row = _build_point_row(scenario, _predict_point(scenario, entry, sweep.replay))
            return row | _describe_assumptions(scenario)
        plan = search_deployments(scenario) if sweep.replay else search_analytically(scenario)
        columns: Answer = {
            "verdict": plan.verdict,
            "binding": _name_binding_limit(plan),
            **_describe_assumptions(scenario),
        }
        if sweep.replay and (day := plan.autoscaling):
            columns |= {
                "replicas_fewest": min(day.replicas),
                "replicas_most": max(day.replicas),
                "hours_missed": len(day.violated_hours),
                "gpu_hours": day.gpu_hours,
                "gpu_hours_fixed": day.fixed_gpu_hours,
            }
        if plan.best is None:
            return {"status": "nothing_meets", **columns, "error": str(plan.binding_constraint)}
        row = _build_point_row(scenario, plan.best) | columns
        return (
            row
            if plan.chosen
            else row | {"status": "nothing_meets", "error": "; ".join(plan.reasons)}
        )
    except PlannerError as error:
        return {"status": "error", "error": str(error)}
    except Exception as error:  # an unexpected failure must not end the other points
        return {
            "status": "error",
            "error": escape_to_one_line(
                f"this point cannot be planned ({type(error).__name__}: {error})"
            ),
        }


def _describe_assumptions(scenario: Scenario) -> Answer:
    return {"assumed": " ".join(scenario.assumptions)}


def _name_binding_limit(plan: Plan) -> str:
    """Name the limit that keeps the plan from being smaller, such as "p95 TPOT".

    Where no smaller deployment is known, it is the one of what is chosen that tolerates least.
    """
    best, constraint = plan.best, plan.binding_constraint.constraint
    if constraint != SMALLEST or best is None or best.prediction.num_gpus_billed == 1:
        return constraint
    limits = sorted(best.limits, key=attrgetter("tolerance_sigmas"))
    return limits[0].name if limits else constraint


def _predict_point(scenario: Scenario, entry: DeploymentEntry, simulate: bool) -> Candidate:
    """Evaluate the deployment of `entry` under the scenario's workload."""
    gpu = get_gpu(entry.gpu) if entry.gpu else scenario.gpus[0].gpu
    model = load_model(
        scenario.model,
        quantization=None if entry.quantization == "checkpoint" else entry.quantization,
    )
    layout = ParallelLayout(entry.tp, entry.pp, entry.dp, entry.ep, entry.dcp)
    if reason := explain_illegal_layout(model, layout, layout.gpus_per_replica, scenario.engine):
        raise PlannerError(reason)
    speculation = (
        scenario.speculation.to_config()
        if scenario.speculation and scenario.speculation.allowed
        else None
    )
    candidate_gpu = next(
        (candidate for candidate in scenario.gpus if candidate.gpu.name == gpu.name), None
    ) or CandidateGpu(gpu, layout.num_gpus * entry.replicas)
    deployment = build_deployment(
        scenario, candidate_gpu, model, layout, entry.kv_cache_dtype, speculation
    )
    candidate = evaluate_candidate(scenario, deployment, entry.replicas)
    return (
        simulate_candidate(scenario, candidate)
        if simulate and candidate.prediction.can_start
        else candidate
    )


def _build_point_row(scenario: Scenario, candidate: Candidate) -> Answer:
    """Return the columns of a candidate and of its prediction, as JSON can hold them."""
    deployment = candidate.deployment
    verdict = (
        "nothing_meets"
        if not candidate.is_feasible
        else "at_risk"
        if candidate.at_risk
        else "holds"
    )
    values: dict[str, Any] = {
        "status": "ok",
        "verdict": verdict,
        "probability": candidate.probability,
        "binding": "",
        "figures": "replay" if candidate.is_simulated else "closed form",
        "gpu": deployment.gpu.name,
        "gpus": sum(pool.num_gpus for pool in candidate.prediction.pools),
        "gpus_rented": candidate.prediction.num_gpus_billed,
        **vars(deployment.layout),
        "pools": candidate.description if candidate.is_disaggregated else "",
        "quantization": deployment.model.quantization.method,
        "kv_cache_dtype": deployment.args.kv_cache_dtype or "auto",
        "max_num_seqs": deployment.args.max_num_seqs,
        "max_model_len": deployment.args.max_model_len,
        "misses": "; ".join(candidate.violations),
        "margin": candidate.limit_utilization,
        **build_output_row(candidate.prediction),
    }
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def unify_column_type(column: Sequence[object]) -> list[object]:
    """Return a column for Parquet: text if its values have several types, such as 8 and "auto"."""
    types = {type(value) for value in column if value is not None}
    if len(types) < 2 or types == {int, float}:
        return list(column)
    return [v if v is None or isinstance(v, str) else json.dumps(v) for v in column]


def load_parquet_writer() -> Callable[[Path, Sequence[Answer]], None]:
    """Return the function that writes rows as Parquet."""
    with require_extra("parquet", "a .parquet file"):
        import pyarrow
        import pyarrow.parquet

    def write_parquet(path: Path, rows: Sequence[Answer]) -> None:
        columns = {n: unify_column_type([row.get(n) for row in rows]) for n in list_columns(rows)}
        table = pyarrow.table(columns, metadata={"written_by": "headroom"})
        pyarrow.parquet.write_table(table, path)

    return write_parquet


def run_sweep(
    sweep: SweepSpec, store: AnswerStore, scheduler: str | None = None, workers: int | None = None,
    report_message: Callable[[str], object] = lambda text: None,
    report_progress: Callable[[str], object] = lambda text: None,
) -> list[Answer]:  # fmt: skip
    """Return the answers to all points in order; compute those that `store` lacks, and keep them.

    They run on the Dask `scheduler` at an address, or in `workers` processes of this machine (by
    default one per core). `report_message` gets the numbers of points, each distinct one counted
    once, and `report_progress` from time to time how many are done. Raises `PlannerError` if the
    scheduler cannot be reached or its workers have another
    planner.
    """
    if scheduler:
        with require_extra("dask", "--scheduler"):
            import distributed  # noqa: F401
    keys = [compute_point_key(sweep, sweep.build_scenario_fields(point)) for point in sweep.points]
    answers = store.fetch(keys, POINT_COLUMNS)
    num_stored, points = len(answers), dict(zip(keys, sweep.points, strict=True))
    missing = [(key, point) for key, point in points.items() if key not in answers]
    if missing:
        report_message("workers start; on a new machine they compile first, up to a minute or two")
        if sweep.replay:
            report_message(_estimate_duration(sweep, len(missing), scheduler, workers))
        if sweep.replay and not scheduler:
            from planner.simulator.router import run_compiled_simulation

            run_compiled_simulation.prepare()  # once, before the workers start: they load its code
        report = _ProgressReport(len(missing), report_progress)
        with show_step("points", len(points)) as step:
            for chunk in _compute_answers(sweep, missing, scheduler, workers):
                store.add(chunk)
                answers |= chunk
                step.done = len(answers)
                report.tell(len(answers) - num_stored)
    total = len(points)
    report_message(f"{total:,} of {total:,} points, {num_stored:,} from the store")
    return [answers[key] for key in keys]


def _estimate_duration(
    sweep: SweepSpec, num_points: int, scheduler: str | None, workers: int | None
) -> str:
    """Say roughly how long points that are simulated take on this machine."""
    point_s = SIMULATED_POINT_S[sweep.answer]
    text = f"{format_count(num_points, 'point')} to simulate"
    if sweep.answer == "plan":
        text += ", each from some seconds to minutes"
    if scheduler:
        return text
    processes = min(workers or count_usable_cores(), num_points)
    total_s = math.ceil(num_points / processes) * point_s
    where = f"in {format_count(processes, 'process', 'processes')}"
    return f"{text}: at {point_s:g} s each it is {_format_minutes(total_s)} {where}"


def _format_minutes(seconds: float) -> str:
    return format_count(max(round(seconds / 60), 1), "minute")


@dataclass
class _ProgressReport:
    """Tells how many of `total` points are done, and how long the others take at this speed."""

    total: int
    report: Callable[[str], object]
    clock: Callable[[], float] = monotonic
    started: float = field(init=False)
    told_at: float = field(init=False)
    tenths: int = 0

    def __post_init__(self) -> None:
        self.started = self.told_at = self.clock()

    def tell(self, done: int) -> None:
        """Report that so many are done, at a new tenth or after a minute, but for the last."""
        now, tenths = self.clock(), 10 * done // self.total
        silent_s = now - self.told_at
        is_due = silent_s >= (MIN_REPORT_S if tenths > self.tenths else MAX_REPORT_S)
        if not is_due or done >= self.total:
            return
        left_s = (now - self.started) / done * (self.total - done)
        self.report(f"{done:,} of {self.total:,} points, about {_format_minutes(left_s)} left")
        self.told_at, self.tenths = now, tenths


def _compute_answers(
    sweep: SweepSpec,
    points: list[tuple[str, SweepPoint]],
    scheduler: str | None,
    workers: int | None,
) -> Iterator[dict[str, Answer]]:
    """Yield answers by key, task by task as they end."""
    task = partial(answer_points, replace(sweep, points=(), files=()), compute_build_digest())
    size = POINTS_PER_TASK[sweep.replay]
    chunks = [points[k : k + size] for k in range(0, len(points), size)]
    if scheduler:
        yield from _run_on_dask(task, chunks, scheduler)
    else:
        yield from _run_in_processes(task, chunks, workers)


def _run_in_processes(
    task: Callable[[Chunk], dict[str, Answer]], chunks: Sequence[Chunk], workers: int | None
) -> Iterator[dict[str, Answer]]:
    """Run tasks in processes of this machine, which listen on no port that others could use."""
    pool = ProcessPoolExecutor(
        min(workers or count_usable_cores(), len(chunks)), get_context("spawn"), _prepare_worker
    )
    try:
        for future in as_completed([pool.submit(task, chunk) for chunk in chunks]):
            yield future.result()
    except (OSError, BrokenProcessPool) as error:
        raise PlannerError(
            f"a worker on this machine gave up, what was answered is kept: {error}"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def count_usable_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _prepare_worker() -> None:
    """Leave Ctrl-C to the main process, and end with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def exit_with_parent() -> None:
        if parent := parent_process():
            parent.join()
        os._exit(1)

    Thread(target=exit_with_parent, daemon=True).start()


def _run_on_dask(
    task: Callable[[Chunk], dict[str, Answer]], chunks: Sequence[Chunk], scheduler: str
) -> Iterator[dict[str, Answer]]:
    """Run tasks on the workers of a Dask scheduler."""
    from dask.distributed import Client, KilledWorker, as_completed
    from distributed.client import FutureCancelledError

    if not re.fullmatch(r"(tcp|tls|ws|wss)://.+:\d{1,5}", scheduler):
        raise PlannerError(
            f"--scheduler takes an address such as tcp://10.0.0.1:8786, got {scheduler!r:.80}"
        )
    try:
        with Client(scheduler, timeout=20, set_as_default=False) as client:
            tasks = client.map(task, chunks, pure=False)
            for _, answers in as_completed(tasks, loop=client.loop, with_results=True):
                yield answers
    except (OSError, KilledWorker, FutureCancelledError) as error:
        why = error or type(error).__name__
        raise PlannerError(
            f"Dask on {scheduler} gave up, what was answered is kept: {why}"
        ) from None


def mark_cheapest_gpus(points: Sequence[SweepPoint], answers: Sequence[Answer]) -> list[Answer]:
    """Return `cheapest` of each point, where GPUs vary: "yes" if it costs least of those that hold.

    Points are compared that differ in their GPUs alone.
    """
    groups = defaultdict[str, list[tuple[float, int]]](list)
    has_gpus = False
    for k, (point, answer) in enumerate(zip(points, answers, strict=True)):
        others = {name: value for name, value in point.items() if not name.startswith(GPU_FIELDS)}
        has_gpus |= len(others) < len(point)
        usd = answer.get("usd_per_hour")
        if answer.get("verdict") == "holds" and isinstance(usd, float):
            groups[json.dumps(others, sort_keys=True)].append((usd, k))
    cheapest = {min(group)[1] for group in groups.values()}
    return [{"cheapest": "yes" if k in cheapest else ""} if has_gpus else {}
            for k in range(len(points))]  # fmt: skip


def run_sweep_file(
    path: Path, out: Path, store: Path | None = None, scheduler: str | None = None,
    workers: int | None = None,
    report_message: Callable[[str], object] = lambda text: None,
    report_progress: Callable[[str], object] = lambda text: None,
    draw: Callable[[list[Answer]], str] = lambda rows: "",
) -> list[Answer]:  # fmt: skip
    """Run the sweep in the file `path`; write its rows to `out` (CSV or Parquet) and return them.

    Answers are kept in the file `store`, or in the user's own. The chart that `draw` makes of the
    rows is written beside them, as SVG.
    """
    if out.suffix not in (".csv", ".parquet"):
        raise PlannerError(f"--out takes a .csv or a .parquet file, got {out}")
    write = load_parquet_writer() if out.suffix == ".parquet" else write_csv
    sweep = load_sweep_spec(path)
    check_not_overwriting(sweep.files, [out, *([store] if store else [])])
    ensure_folder(out.parent)
    kept = AnswerStore(store, report_message) if store else open_default_store(report_message)
    answers = run_sweep(sweep, kept, scheduler, workers, report_message, report_progress)
    marks = mark_cheapest_gpus(sweep.points, answers)
    rows: list[Answer] = [
        {
            "point": k,
            **{
                f"set.{name}": json.dumps(value) if isinstance(value, dict | list) else value
                for name, value in point.items()
            },
            **mark,
            **answer,
        }
        for k, (point, mark, answer) in enumerate(zip(sweep.points, marks, answers, strict=True))
    ]
    chart = ""
    try:
        chart = draw(rows)
    finally:  # the table is written however drawing ends
        with replace_atomically(out, *[out.with_suffix(".svg")] * bool(chart)) as (part, *pictures):
            write(part, rows)
            for picture in pictures:
                picture.write_text(chart, encoding="utf-8")
    return rows
