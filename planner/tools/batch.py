"""Answer every point of a file into one table, for `headroom predict`.

The points are the rows of a CSV of deployments, or those of a sweep of a scenario. Answers that the
store has are not computed again.
"""

import json
import math
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

from planner.core.catalog import compute_build_digest
from planner.core.errors import PlannerError, require_extra
from planner.core.files import list_columns, replace_atomically, write_csv
from planner.core.progress import show_step
from planner.core.text import escape_to_one_line, format_count
from planner.tools.answer_store import Answer, AnswerStore, compute_answer_key
from planner.tools.deployment_rows import DeploymentRows, read_rows
from planner.tools.sweep_points import SweepPoints, read_sweep

PointFile = DeploymentRows | SweepPoints
Chunk = Sequence[tuple[str, Mapping[str, Any]]]
"""The (key, point) pairs of one task."""
MAX_TASKS = 10_000
"""Of more points, several are one task."""
START_WORKERS_AFTER_S = 5.0
"""Seconds that this process answers alone, unless told how many do: workers take as long to start."""
SAVE_INTERVAL_S = 0.1
"""Between two transactions of the store, which take longer than many a point."""
REPORT_INTERVAL_S = 60.0


def read_points(
    path: Path,
    calibration: Path | None = None,
    report_message: Callable[[str], object] = lambda text: None,
) -> PointFile:
    """Read a sweep if `path` is YAML, otherwise a CSV of deployments.

    `calibration` is a file of the user's own step costs.
    """
    if path.suffix in (".yaml", ".yml"):
        return read_sweep(path, calibration)
    return read_rows(path, calibration, report_message)


def answer_points(
    file: PointFile, store: AnswerStore, scheduler: str | None = None, workers: int | None = None,
    report_message: Callable[[str], object] = lambda text: None,
) -> list[Answer]:  # fmt: skip
    """Return the rows of the table in order; compute the answers that `store` lacks, and keep them.

    They run on the Dask `scheduler` at an address, or in `workers` processes of this machine, by
    default one per core. `report_message` gets how many points there are, each distinct one counted
    once. Raises `PlannerError` if the scheduler cannot be reached or its workers have another
    planner.
    """
    keys = [
        compute_answer_key(type(file).__name__, file.describe_question(point), file.folder)
        for point in file.points
    ]
    points = dict(zip(keys, file.points, strict=True))
    answers = store.fetch(keys)
    missing = [(key, point) for key, point in points.items() if key not in answers]
    num_kept, started = len(answers), monotonic()
    unsaved, saved_at, told_at = dict[str, Answer](), -math.inf, started
    with show_step("points", len(points)) as step:
        try:
            for found in _compute_answers(file, missing, scheduler, workers, report_message):
                answers |= found
                unsaved |= found
                step.done, now = len(answers), monotonic()
                if now > saved_at + SAVE_INTERVAL_S:
                    store.add(unsaved)
                    unsaved, saved_at = {}, monotonic()
                if now > told_at + REPORT_INTERVAL_S:
                    left_s = (now - started) / (step.done - num_kept) * (len(points) - step.done)
                    left = format_count(left_s / 60, "minute")
                    report_message(f"{step.done:,} of {len(points):,} points, about {left} left")
                    told_at = now
        finally:
            store.add(unsaved)
    report_message(f"{format_count(len(points), 'point')}, {num_kept:,} from the store")
    return file.build_table([answers[key] for key in keys])


def predict_row(row: Mapping[str, str], folder: Path = Path()) -> Answer:
    """Return the answer to one row of a CSV of deployments, in which paths are below `folder`."""
    return answer_point(DeploymentRows(folder=folder), row)


def answer_point(file: PointFile, point: Mapping[str, Any]) -> Answer:
    """Return the columns of an answer; `status` is ok, does_not_fit, nothing_meets or error."""
    try:
        columns: dict[str, Any] = file.answer(point)
    except PlannerError as error:
        return {"status": "error", "error": str(error)}
    except Exception as error:  # an unexpected failure must not end the other points
        problem = f"this point cannot be planned ({type(error).__name__}: {error})"
        return {"status": "error", "error": escape_to_one_line(problem)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in columns.items()
    }


def answer_chunk(file: PointFile, build_digest: str, points: Chunk) -> dict[str, Answer]:
    """Return the answers to (key, point) pairs, for one task of the build `build_digest`.

    Raises `PlannerError` if this worker has another build.
    """
    if compute_build_digest() != build_digest:
        raise PlannerError(
            "a worker has another version of the planner, or other catalogs: give it the same"
        )
    return {key: answer_point(file, point) for key, point in points}


def _compute_answers(
    file: PointFile, missing: Chunk, scheduler: str | None, workers: int | None,
    report_message: Callable[[str], object],
) -> Iterator[dict[str, Answer]]:  # fmt: skip
    """Yield answers by key, task by task as they end."""
    task = partial(answer_chunk, replace(file, points=(), files=()), compute_build_digest())
    size = 1 + len(missing) // MAX_TASKS
    chunks = [missing[k : k + size] for k in range(0, len(missing), size)]
    alone_until = monotonic() + (0 if workers else START_WORKERS_AFTER_S)
    workers = workers or _count_usable_cores()
    while chunks and not scheduler and (workers == 1 or monotonic() < alone_until):
        yield task(chunks.pop(0))
    if chunks:
        yield from _run_on_workers(task, chunks, scheduler, workers, report_message)


def _run_on_workers(
    task: Callable[[Chunk], dict[str, Answer]], chunks: Sequence[Chunk], scheduler: str | None,
    workers: int, report_message: Callable[[str], object] = lambda text: None,
) -> Iterator[dict[str, Answer]]:  # fmt: skip
    """Yield what tasks return as they end, on Dask or in processes of this machine.

    The processes listen on no port that others could use.
    """
    if scheduler and not re.fullmatch(r"(tcp|tls|ws|wss)://[^@/?#]+:\d{1,5}", scheduler):
        raise PlannerError(
            "--scheduler takes an address without a login, such as tcp://10.0.0.1:8786"
        )
    executor: Executor
    with ExitStack() as stack:
        try:
            if scheduler:
                with require_extra("dask", "--scheduler"):
                    from dask.distributed import Client
                client = stack.enter_context(Client(scheduler, timeout=20, set_as_default=False))
                executor = client.get_executor(pure=False)
            else:
                context = get_context("spawn")
                executor = ProcessPoolExecutor(min(workers, len(chunks)), context, _prepare_worker)
                stack.callback(executor.shutdown, wait=False, cancel_futures=True)
            report_message("workers start; on a new machine they compile first: up to two minutes")
            for future in as_completed([executor.submit(task, chunk) for chunk in chunks]):
                yield future.result()
        except PlannerError:
            raise
        except Exception as error:
            where = f"Dask on {scheduler}" if scheduler else "a worker on this machine"
            why = str(error) or type(error).__name__
            raise PlannerError(f"{where} gave up, what was answered is kept: {why}") from None


def _count_usable_cores() -> int:
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


def write_table(file: PointFile, rows: Sequence[Answer], out: Path) -> None:
    """Write rows to `out`, CSV or Parquet."""
    with replace_atomically(out) as (part,):
        if out.suffix == ".parquet":
            _write_parquet(part, rows)
        else:
            write_csv(part, rows, file.columns, file.line_end)


def _write_parquet(path: Path, rows: Sequence[Answer]) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {name: unify_column_type([r.get(name) for r in rows]) for name in list_columns(rows)}
    table = pyarrow.table(columns, metadata={"written_by": "headroom"})
    pyarrow.parquet.write_table(table, path)


def unify_column_type(column: Sequence[object]) -> list[object]:
    """Return a column for Parquet: text if its values have several types, such as 8 and "auto"."""
    types = {type(value) for value in column if value is not None}
    if len(types) < 2 or types == {int, float}:
        return list(column)
    return [v if v is None or isinstance(v, str) else json.dumps(v) for v in column]
