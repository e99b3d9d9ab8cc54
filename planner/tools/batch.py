"""`planner predict`: a CSV of deployments in, a CSV of predictions out, row for row."""

import csv
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from planner.core.errors import PlannerError
from planner.core.files import check_not_overwriting
from planner.core.readers import MAX_CSV_CELLS_PER_LINE, read_csv_lines
from planner.core.units import MIB
from planner.engines.coefficients import UserCalibration
from planner.latency.coefficient_lookup import apply_user_calibrations, load_user_calibrations
from planner.memory.memory_plan import get_memory_plan
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.prediction import Prediction, predict
from planner.planning.table_rows import (
    OUTPUT_COLUMNS,
    POOL_SIZE_COLUMNS,
    build_output_row,
    explain_ignored_column,
    fit_max_model_len,
    is_unknown_column,
    parse_cells,
    parse_deployment,
    parse_model,
    parse_row_workload,
)

MAX_BATCH_FILE_BYTES = 16 * MIB
"""Of a batch."""


def predict_file(
    rows_csv: str | Path, out_csv: str | Path, calibration: Path | None = None, *,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    report_message: Callable[[str], object] = lambda text: None,
) -> int:  # fmt: skip
    """Predict every row of `rows_csv` into `out_csv`; 0 when all were answered, 1 when some failed.

    Answers are appended to OUT.partial as they are found, which becomes OUT at the end; with
    `resume` those that an earlier run left there are kept. `progress` is told how many of how many
    rows are answered, `say` which columns are ignored, and why the first row failed where all did.
    A calibration file of one's own comes before the catalog's. Raises `PlannerError` (the command's
    exit code 2) when a file cannot be read or written, has no usable header, or a partial one
    answers other rows.
    """
    source, out = Path(rows_csv), Path(out_csv)
    partial = out.with_name(f"{out.name}.partial")
    check_not_overwriting([source, *([calibration] if calibration else [])], [out, partial])
    own = load_user_calibrations(calibration) if calibration else {}
    lines = read_csv_lines(source, MAX_BATCH_FILE_BYTES)
    header = [name.strip() for name in next(lines, (1, []))[1]]
    if "gpu" not in header or not {"model", "model_config"} & set(header):
        raise PlannerError(
            f"{source.name}: line 1 must name the columns, among them gpu and model (or"
            " model_config)"
        )
    if twice := next((name for name in header if name and header.count(name) > 1), None):
        raise PlannerError(f"{source.name}: the column {twice} occurs twice")
    for name in filter(is_unknown_column, header):
        report_message(explain_ignored_column(name))
    count = sum(1 for _ in lines)
    place = header.index("id") if "id" in header else MAX_CSV_CELLS_PER_LINE
    kept, failed = (
        _read_partial_answers(partial, source, place)
        if resume and os.path.exists(partial)
        else (0, False)
    )
    errors = []
    try:
        with partial.open("a" if kept else "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, OUTPUT_COLUMNS, restval="")
            if not kept:
                writer.writeheader()
            for k, (_, cells) in enumerate(
                islice(read_csv_lines(source, MAX_BATCH_FILE_BYTES), kept + 1, None), kept + 1
            ):
                row = dict(zip(header, cells, strict=False))
                answer = predict_row(row, source.parent, len(cells) - len(header), own)
                errors += [answer["error"]] if answer["status"] == "error" else []
                writer.writerow({name: _format_cell(value) for name, value in answer.items()})
                file.flush()
                if progress:
                    progress(k, count)
        partial.replace(out)
    except OSError as error:
        raise PlannerError(f"cannot write {out}: {error.strerror or error}") from None
    if len(errors) == count > 0:
        report_message(f"no row can be planned; the first: {errors[0]}")
    return int(failed or bool(errors))


def _read_partial_answers(partial: Path, source: Path, place: int) -> tuple[int, bool]:
    """How many answers an interrupted run left, and whether one is an error; a line that it had begun is cut off.

    Their ids are those at `place` in the lines of `source`.
    """
    asked = (
        cells[place : place + 1] or [""]
        for _, cells in islice(read_csv_lines(source, MAX_BATCH_FILE_BYTES), 1, None)
    )
    kept, failed, whole = -1, False, 0
    with partial.open("rb") as file, suppress(csv.Error):
        ended = (
            line.decode(errors="replace")
            for line in iter(file.readline, b"")
            if line.endswith(b"\n")
        )
        for cells in csv.reader(ended, strict=True):
            if len(cells) != len(OUTPUT_COLUMNS) or (
                cells[:1] != next(asked, None) if kept >= 0 else cells != list(OUTPUT_COLUMNS)
            ):
                raise PlannerError(
                    f"{partial} does not answer these rows: move it away, or run without --resume"
                )
            kept, failed, whole = kept + 1, failed | (cells[1] == "error"), file.tell()
    os.truncate(partial, whole)
    return max(kept, 0), failed


def predict_row(
    row: Mapping[str, str],
    folder: Path = Path(),
    surplus: int = 0,
    own: Mapping[str, UserCalibration] | None = None,
) -> dict[str, object]:
    """One row of the output for one of the input; paths in it are relative to `folder`.

    `own` calibrations, by GPU, come before the catalog's.
    """
    answer: dict[str, object] = {"id": row.get("id", "")}
    try:
        if surplus > 0:
            raise PlannerError(f"the row has {surplus} more cells than the header has columns")
        cells, notes = parse_cells(row)
        workload = parse_row_workload(cells, folder, notes)
        model = parse_model(cells, folder)
        pools = [
            pool
            for pool in ("prefill", "decode")
            if any(f"{pool}_{size}" in cells for size in POOL_SIZE_COLUMNS)
        ]
        if len(pools) == 1:
            raise PlannerError(
                f"only the {pools[0]} pool is given; disaggregated serving needs both pools' sizes"
            )
        deployments = [
            parse_deployment(model, cells, folder, notes, pool) for pool in pools or [""]
        ]
        if own:
            deployments = [
                replace(found, engine=apply_user_calibrations(found.engine, own))
                for found in deployments
            ]
        if workload and "max_model_len" not in cells:
            deployments = [
                fit_max_model_len(deployment, workload, notes) for deployment in deployments
            ]
        if workload is None:
            prediction = Prediction(
                deployments[-1], None, get_memory_plan(deployments[-1]), None, None
            )
        elif pools:
            prediction = evaluate_disaggregated(deployments[0], deployments[1], workload)
        else:
            prediction = predict(deployments[0], workload)
    except PlannerError as error:
        return {**answer, "status": "error", "error": str(error)}
    except Exception as error:  # one odd row must not end the others
        return {
            **answer,
            "status": "error",
            "error": f"this row cannot be planned ({type(error).__name__}: {error})",
        }
    return answer | build_output_row(prediction, notes)


def _format_cell(value: object) -> str:
    """A cell: whole numbers in full, others to seven digits, nothing for what is unknown or unbounded."""
    if isinstance(value, float):
        return f"{value:.7g}" if math.isfinite(value) else ""
    return "" if value is None else str(value)
