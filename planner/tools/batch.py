"""Predict a CSV of deployments row by row, for `headroom predict`."""

import csv
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from planner.core.errors import PlannerError
from planner.core.files import check_not_overwriting, format_cell, replace_atomically
from planner.core.progress import show_step
from planner.core.readers import read_csv_lines
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
from planner.tools.answer_store import Answer, compute_answer_key, open_default_store

MAX_BATCH_FILE_BYTES = 16 * MIB
SAVE_INTERVAL_S = 1.0
"""Between two transactions of the store, which take longer than many a row."""
ANSWER_COLUMNS = frozenset(OUTPUT_COLUMNS) - {"id"}


def predict_file(
    rows_csv: str | Path,
    out_csv: str | Path,
    calibration: Path | None = None,
    *,
    resume: bool = False,
    report_message: Callable[[str], object] = lambda text: None,
) -> int:
    """Predict every row of `rows_csv` into `out_csv`; return 0 if all succeed, 1 if any fails.

    Answers are kept in the user's store every second. With `resume`, rows that have an answer there
    take it: the same cells, files, calibration, catalogs and planner, whatever their id and place.
    `report_message` gets the columns that are ignored, and why the first row failed if all did.
    `calibration` is a file that takes precedence over the catalog. Raises `PlannerError` (exit code
    2) if a file cannot be read or written, or has no usable header.
    """
    source, out = Path(rows_csv), Path(out_csv)
    check_not_overwriting([source, *([calibration] if calibration else [])], [out])
    user_calibrations = load_user_calibrations(calibration) if calibration else {}
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
    store = open_default_store(report_message)
    calibration_content = {
        gpu: entry.model_dump(mode="json") for gpu, entry in user_calibrations.items()
    }
    errors: list[object] = []
    unsaved: dict[str, Answer] = {}
    saved_at = time.monotonic()
    with (
        replace_atomically(out) as (part,),
        part.open("w", newline="", encoding="utf-8") as file,
        show_step("rows", count) as step,
    ):
        writer = csv.DictWriter(file, OUTPUT_COLUMNS, restval="")
        writer.writeheader()
        try:
            rows = islice(read_csv_lines(source, MAX_BATCH_FILE_BYTES), 1, None)
            for _, cells in rows:
                row, surplus = dict(zip(header, cells, strict=False)), len(cells) - len(header)
                question = {name: cell for name, cell in row.items() if name != "id"}
                key = compute_answer_key(
                    "row", [question, max(surplus, 0), calibration_content], source.parent
                )
                answer = store.fetch([key], ANSWER_COLUMNS).get(key) if resume else None
                if answer is None:
                    values = predict_row(row, source.parent, surplus, user_calibrations)
                    answer = {name: format_cell(v) for name, v in values.items() if name != "id"}
                    unsaved[key] = answer
                    errors += [answer["error"]] if answer["status"] == "error" else []
                if time.monotonic() > saved_at + SAVE_INTERVAL_S:
                    store.add(unsaved)
                    unsaved, saved_at = {}, time.monotonic()
                writer.writerow({"id": row.get("id", ""), **answer})
                step.done += 1
        finally:
            store.add(unsaved)
    if errors:
        which = f"{len(errors):,} of {count:,} rows are" if len(errors) < count else "no row can be"
        report_message(f"{which}{' not' * (len(errors) < count)} planned; the first: {errors[0]}")
    return int(bool(errors))


def predict_row(
    row: Mapping[str, str],
    folder: Path = Path(),
    surplus: int = 0,
    user_calibrations: Mapping[str, UserCalibration] | None = None,
) -> dict[str, object]:
    """Return the output row for an input row, in which paths are relative to `folder`.

    `surplus` cells of the row have no column. `user_calibrations`, by GPU, take precedence over the
    catalog.
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
        if user_calibrations:
            deployments = [
                replace(d, engine=apply_user_calibrations(d.engine, user_calibrations))
                for d in deployments
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
    except Exception as error:  # an unexpected failure must not end the other rows
        return {
            **answer,
            "status": "error",
            "error": f"this row cannot be planned ({type(error).__name__}: {error})",
        }
    return answer | build_output_row(prediction, notes)
