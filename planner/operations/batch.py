"""`planner predict`: a CSV of deployments in, a CSV of predictions out, row for row."""

import csv
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from planner.core.catalog import MOST_CELLS, csv_lines
from planner.core.files import spare
from planner.core.quantities import GIB, MIB, Interval, PlannerError
from planner.facts.coefficients import Calibration
from planner.facts.deployment import Deployment
from planner.facts.workload import Workload
from planner.latency.calibration import calibrated_by, own_calibrations
from planner.latency.performance import LATENCIES, POINTS
from planner.latency.start_up import start_up
from planner.memory.budget import longest_model_len, memory_of
from planner.operations.batch_columns import (
    COLUMNS,
    POOL_SIZES,
    ignored,
    read_cells,
    read_deployment,
    read_model,
    read_workload,
    unknown,
)
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.prediction import RATES, Prediction, predict

_LATENCIES = tuple(f"{m}_ms_{q}" for m in LATENCIES for q in POINTS)
_MEMORY, _LOAD, _SCORED = COLUMNS["outputs"].values()
OUTPUTS = (*_MEMORY, *_LATENCIES, *_LOAD, *(f"{name}_{end}" for name in _SCORED for end in ("lo", "hi")), "calibration",
           "warnings")  # fmt: skip
"""Every output column, in order; `templates/columns.yaml` explains them."""
MOST_BYTES = 16 * MIB
"""Of a batch."""


def predict_file(
    rows_csv: str | Path, out_csv: str | Path, calibration: Path | None = None, *, resume: bool = False,
    progress: Callable[[int, int], None] | None = None, say: Callable[[str], object] = lambda text: None,
) -> int:  # fmt: skip
    """Predict every row of `rows_csv` into `out_csv`; 0 when all were answered, 1 when some failed.

    Answers are appended to OUT.partial as they are found, which becomes OUT at the end; with `resume` those that an
    earlier run left there are kept. `progress` is told how many of how many rows are answered, `say` which columns are
    ignored, and why the first row failed where all did. A calibration file of one's own comes before the catalog's.
    Raises `PlannerError` (the command's exit code 2) when a file cannot be read or written, has no usable header, or a
    partial one answers other rows.
    """
    source, out = Path(rows_csv), Path(out_csv)
    partial = out.with_name(f"{out.name}.partial")
    spare([source, *([calibration] if calibration else [])], [out, partial])
    own = own_calibrations(calibration) if calibration else {}
    lines = csv_lines(source, MOST_BYTES)
    header = [name.strip() for name in next(lines, (1, []))[1]]
    if "gpu" not in header or not {"model", "model_config"} & set(header):
        raise PlannerError(f"{source.name}: line 1 must name the columns, among them gpu and model (or model_config)")
    if twice := next((name for name in header if name and header.count(name) > 1), None):
        raise PlannerError(f"{source.name}: the column {twice} occurs twice")
    for name in filter(unknown, header):
        say(ignored(name))
    count = sum(1 for _ in lines)
    place = header.index("id") if "id" in header else MOST_CELLS
    kept, failed = _kept(partial, source, place) if resume and os.path.exists(partial) else (0, False)
    errors = []
    try:
        with partial.open("a" if kept else "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, OUTPUTS, restval="")
            if not kept:
                writer.writeheader()
            for k, (_, cells) in enumerate(islice(csv_lines(source, MOST_BYTES), kept + 1, None), kept + 1):
                row = dict(zip(header, cells, strict=False))
                answer = predict_row(row, source.parent, len(cells) - len(header), own)
                errors += [answer["error"]] if answer["status"] == "error" else []
                writer.writerow({name: _written(value) for name, value in answer.items()})
                file.flush()
                if progress:
                    progress(k, count)
        partial.replace(out)
    except OSError as error:
        raise PlannerError(f"cannot write {out}: {error.strerror or error}") from None
    if len(errors) == count > 0:
        say(f"no row can be planned; the first: {errors[0]}")
    return int(failed or bool(errors))


def _kept(partial: Path, source: Path, place: int) -> tuple[int, bool]:
    """How many answers an interrupted run left, and whether one is an error; a line that it had begun is cut off.

    Their ids are those at `place` in the lines of `source`.
    """
    asked = (cells[place : place + 1] or [""] for _, cells in islice(csv_lines(source, MOST_BYTES), 1, None))
    kept, failed, whole = -1, False, 0
    with partial.open("rb") as file, suppress(csv.Error):
        ended = (line.decode(errors="replace") for line in iter(file.readline, b"") if line.endswith(b"\n"))
        for cells in csv.reader(ended, strict=True):
            if len(cells) != len(OUTPUTS) or (cells[:1] != next(asked, None) if kept >= 0 else cells != list(OUTPUTS)):
                raise PlannerError(f"{partial} does not answer these rows: move it away, or run without --resume")
            kept, failed, whole = kept + 1, failed | (cells[1] == "error"), file.tell()
    os.truncate(partial, whole)
    return max(kept, 0), failed


def predict_row(
    row: Mapping[str, str], folder: Path = Path(), surplus: int = 0, own: Mapping[str, Calibration] | None = None
) -> dict[str, object]:
    """One row of the output for one of the input; paths in it are relative to `folder`.

    `own` calibrations, by GPU, come before the catalog's.
    """
    answer: dict[str, object] = {"id": row.get("id", "")}
    try:
        if surplus > 0:
            raise PlannerError(f"the row has {surplus} more cells than the header has columns")
        cells, notes = read_cells(row)
        workload = read_workload(cells, folder, notes)
        served = read_model(cells, folder)
        pools = [pool for pool in ("prefill", "decode") if any(f"{pool}_{size}" in cells for size in POOL_SIZES)]
        if len(pools) == 1:
            raise PlannerError(f"only the {pools[0]} pool is given; disaggregated serving needs both pools' sizes")
        deployments = [read_deployment(served, cells, folder, notes, pool) for pool in pools or [""]]
        if own:
            deployments = [replace(found, engine=calibrated_by(found.engine, own)) for found in deployments]
        if workload and "max_model_len" not in cells:
            deployments = [that_starts(deployment, workload, notes) for deployment in deployments]
        if workload is None:
            found = Prediction(deployments[-1], None, memory_of(deployments[-1]), None, None)
        elif pools:
            found = evaluate_disaggregated(deployments[0], deployments[1], workload)
        else:
            found = predict(deployments[0], workload)
    except PlannerError as error:
        return {**answer, "status": "error", "error": str(error)}
    except Exception as error:  # one odd row must not end the others
        return {**answer, "status": "error", "error": f"this row cannot be planned ({type(error).__name__}: {error})"}
    return answer | written_row(found, notes)


def written_row(found: Prediction, notes: Iterable[str] = ()) -> dict[str, object]:
    """The output columns of one prediction: middles, and of the scored figures the ends of their intervals."""
    columns = _columns(found)
    scored = {name: value for name in _SCORED if isinstance(value := columns.get(name), Interval)}
    ends = {f"{name}_{end}": getattr(value, end) for name, value in scored.items() for end in ("lo", "hi")}
    middles = {name: value.mid if isinstance(value, Interval) else value for name, value in columns.items()}
    return middles | ends | {"warnings": ";".join((*notes, *found.warnings))}


def read_run(cells: Mapping[str, Any], folder: Path, notes: list[str]) -> tuple[Deployment, Workload]:
    """What ran, and what was sent, by the cells of a measured row; `PlannerError` for a row that says neither."""
    workload = read_workload(cells, folder, notes)
    if workload is None:
        raise PlannerError("isl and osl are missing")
    deployment = read_deployment(read_model(cells, folder), cells, folder, notes)
    return deployment if "max_model_len" in cells else that_starts(deployment, workload, notes), workload


def that_starts(deployment: Deployment, workload: Workload, notes: list[str]) -> Deployment:
    """`deployment`, with the largest max_model_len that fits where the model's own does not, but the workload does."""
    memory = memory_of(deployment)
    longest = longest_model_len(memory)[1]
    if memory.pool.max_concurrency_x >= 1 or longest < workload.total_quantile(1.0):
        return deployment
    notes.append(f"max_model_len {deployment.args.max_model_len:,} does not fit: planned with {longest:,}")
    return deployment.with_args(max_model_len=longest)


def _columns(found: Prediction) -> dict[str, object]:
    """The output columns of one prediction, intervals as they are."""
    memory, pool, architecture = found.memory, found.memory.pool, found.deployment.model.architecture
    performance, begins = found.performance, start_up(found.deployment)
    columns: dict[str, object] = {
        "status": "ok", "params_total": architecture.params_total, "params_active": architecture.params_active,
        **{f"{part}_gib": getattr(memory, part) / GIB for part in ("weights", "activation", "cudagraph", "non_torch")},
        "kv_available_gib": memory.kv_available / GIB, "kv_bytes_per_token": pool.layout.kv_bytes_per_token,
        "state_bytes_per_seq": pool.layout.state_bytes_per_seq, "num_gpu_blocks": pool.num_blocks,
        "block_size": pool.layout.block_size, "bytes_per_block": pool.bytes_per_block, "kv_tokens": pool.kv_tokens,
        "max_concurrency_x": memory.max_concurrency, "usd_per_hour": found.usd_per_hour,
        "start_up_s": begins and begins.total,
    }  # fmt: skip
    if performance is None:
        if found.workload is not None or not memory.starts:
            columns |= {"status": "does_not_fit", "error": ". ".join(filter(None, (memory.reason, memory.remedy)))}
        return columns
    columns |= {f"{m}_ms_{q}": performance.at(m, q) * 1e3 for m in LATENCIES for q in POINTS}
    return columns | {
        **{name: getattr(performance, name) for name in RATES},
        "output_tps_per_gpu": performance.output_tps / found.gpus, "preemptions_per_request": performance.preemptions,
        "kv_usage_p99": performance.kv_usage_p99 or performance.kv_usage, "queue_ms_p99": performance.queue * 1e3,
        "decode_batch_mean": performance.decode_batch, "spec_speedup": found.speedup, "calibration": performance.basis,
        "usd_per_mtok_output": found.usd_per_mtok_output, "capacity_rps": performance.capacity,
        "power_w_per_gpu": found.power, "joules_per_output_token": found.joules,
    }  # fmt: skip


def _written(value: object) -> str:
    """A cell: whole numbers in full, others to seven digits, nothing for what is unknown or unbounded."""
    if isinstance(value, float):
        return f"{value:.7g}" if math.isfinite(value) else ""
    return "" if value is None else str(value)
