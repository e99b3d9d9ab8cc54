"""Deployments in the rows of a CSV, one prediction each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from planner.core.errors import PlannerError
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
    explain_unknown_column,
    fit_max_model_len,
    parse_cells,
    parse_deployment,
    parse_model,
    parse_row_workload,
)
from planner.tools.answer_store import Answer

MAX_ROWS_FILE_BYTES = 16 * MIB
SURPLUS = " surplus"
"""How many cells of a row have no column; no column has this name, as names are stripped."""


@dataclass(frozen=True)
class DeploymentRows:
    """The cells of every row by column; paths in them are relative to `folder`.

    `calibrations`, by GPU, take precedence over the catalog.
    """

    points: Sequence[Mapping[str, str]] = ()
    folder: Path = Path()
    calibrations: Mapping[str, UserCalibration] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    columns: ClassVar = OUTPUT_COLUMNS  # of the table, in order
    line_end: ClassVar = "\r\n"  # of the table as CSV

    def describe_question(self, row: Mapping[str, str]) -> object:
        """Return all that decides the answer to a row, as JSON values."""
        calibrations = {gpu: e.model_dump(mode="json") for gpu, e in self.calibrations.items()}
        return [{name: cell for name, cell in row.items() if name != "id"}, calibrations]

    def answer(self, row: Mapping[str, str]) -> Answer:
        """Return the output columns of a row but for its id; `PlannerError` if it is wrong."""
        if SURPLUS in row:
            raise PlannerError(f"the row has {row[SURPLUS]} more cells than the header has columns")
        cells, notes = parse_cells(row)
        workload = parse_row_workload(cells, self.folder, notes)
        model = parse_model(cells, self.folder)
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
            parse_deployment(model, cells, self.folder, notes, pool) for pool in pools or [""]
        ]
        deployments = [
            replace(d, engine=apply_user_calibrations(d.engine, self.calibrations))
            for d in deployments
        ]
        if workload and "max_model_len" not in cells:
            deployments = [fit_max_model_len(d, workload, notes) for d in deployments]
        if workload is None:
            memory = get_memory_plan(deployments[-1])
            prediction = Prediction(deployments[-1], None, memory, None, None)
        elif pools:
            prediction = evaluate_disaggregated(deployments[0], deployments[1], workload)
        else:
            prediction = predict(deployments[0], workload)
        return build_output_row(prediction, notes)

    def build_table(self, answers: Sequence[Answer]) -> list[Answer]:
        """Return the rows of the table: every answer with the id of its row."""
        return [
            {"id": row.get("id", ""), **answer}
            for row, answer in zip(self.points, answers, strict=True)
        ]


def read_rows(
    path: Path, calibration: Path | None, report_message: Callable[[str], object]
) -> DeploymentRows:
    """Read the rows of a CSV, with the user's own step costs in the file `calibration`.

    `report_message` gets the columns that are ignored. Raises `PlannerError` if a file cannot be
    read, or the header lacks columns that are needed.
    """
    calibrations = load_user_calibrations(calibration) if calibration else {}
    lines = [cells for _, cells in read_csv_lines(path, MAX_ROWS_FILE_BYTES)]
    header = [name.strip() for cells in lines[:1] for name in cells]
    if "gpu" not in header or not {"model", "model_config"} & set(header):
        raise PlannerError(
            f"{path.name}: line 1 must name the columns, among them gpu and model (or model_config)"
        )
    if twice := next((name for name in header if name and header.count(name) > 1), None):
        raise PlannerError(f"{path.name}: the column {twice} occurs twice")
    for ignored in filter(None, map(explain_unknown_column, header)):
        report_message(ignored)
    rows = [dict(zip(header, cells, strict=False)) for cells in lines[1:]]
    for row, cells in zip(rows, lines[1:], strict=True):
        if len(cells) > len(header):
            row[SURPLUS] = str(len(cells) - len(header))
    files = (path, *([calibration] if calibration else []))
    return DeploymentRows(rows, path.parent, calibrations, files)
