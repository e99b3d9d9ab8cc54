"""Commands that fill tables: predict and sweep."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.core.errors import PlannerError
from planner.core.files import check_not_overwriting, check_replaceable
from planner.core.text import format_count
from planner.ui.commands.options import (
    add_force,
    parse_count,
    print_message,
    watch_command,
)

if TYPE_CHECKING:
    from planner.ui.commands.options import Subparsers


class ColumnHelpFormatter(argparse.HelpFormatter):
    """Help that ends with the columns of a table, which are read only then."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        from planner.planning.table_rows import COLUMN_CATALOG, INPUT_COLUMNS

        kinds = dict[str, list[str]]()
        for name, kind in INPUT_COLUMNS.items():
            kinds.setdefault(COLUMN_CATALOG["kinds"][kind]["accepts"], []).append(name)
        lines = (
            super(ColumnHelpFormatter, self)._fill_text(
                f"{accepts}: {', '.join(names)}", width, "  "
            )
            for accepts, names in kinds.items()
        )
        return "\n".join(
            ["columns, by what their cells hold; an empty cell leaves it open:", *lines]
        )


def add_predict(commands: "Subparsers") -> None:
    """Declare `headroom predict`."""
    parser = commands.add_parser(
        "predict",
        help="predict memory, latencies and cost of deployments, one per CSV row",
        formatter_class=ColumnHelpFormatter,
        epilog="columns",
    )
    parser.add_argument(
        "rows",
        type=Path,
        metavar="ROWS.csv",
        help="deployments. Required columns: model, gpu. For latencies: isl and osl (mean tokens of "
        "prompt and answer) with request_rate or concurrency. All columns stand below",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PREDICTIONS.csv", help="file to write"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="your own step costs, as `headroom calibrate --out` writes them",
    )
    parser.add_argument(
        "--resume", action="store_true", help="reuse the answers of an interrupted run"
    )
    add_force(parser)
    parser.set_defaults(run=run_predict)


@watch_command
def run_predict(options: argparse.Namespace) -> int:
    """Predict rows; 1 if any of them fails."""
    from planner.tools.batch import predict_file

    check_not_overwriting([options.rows], [options.out])
    check_replaceable(options.out, "id,status,error,", force=options.force)
    return predict_file(
        options.rows,
        options.out,
        options.calibration,
        resume=options.resume,
        report_message=print_message,
    )


def add_sweep(commands: "Subparsers") -> None:
    """Declare `headroom sweep`."""
    parser = commands.add_parser(
        "sweep",
        help="plan or predict a scenario at thousands of points, on all cores or on Dask",
    )
    parser.add_argument(
        "sweep",
        type=Path,
        metavar="SWEEP.yaml",
        help="sweep file with a scenario and a grid or sample of its fields; "
        "`headroom init --kind sweep` writes one",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="TABLE",
        help="file to write, .csv or .parquet, one row per point",
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="FILE",
        help="file that keeps answers for later runs (default: one per user)",
    )
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="address of a running Dask scheduler, such as tcp://10.0.0.1:8786 (default: none, run "
        "on this machine)",
    )
    parser.add_argument(
        "--workers",
        type=parse_count,
        metavar="N",
        help="number of processes on this machine (default: one per core)",
    )
    add_force(parser)
    parser.set_defaults(run=run_sweep_command)


@watch_command
def run_sweep_command(options: argparse.Namespace) -> int:
    """Answer the points of a sweep; 1 if any of them fails."""
    from planner.tools.answer_store import Answer
    from planner.tools.sweep.runner import run_sweep_file
    from planner.tools.sweep.sweep_spec import load_sweep_spec
    from planner.ui.sweep_text import draw_sweep, format_sweep
    from planner.ui.terminal import detect_style

    picture, mark = options.out.with_suffix(".svg"), "<!-- drawn by headroom sweep -->"
    own = ("PAR1", "headroom") if options.out.suffix == ".parquet" else ("point,set.", "")
    for path, (beginning, holds) in ((options.out, own), (picture, ("<svg", mark))):
        if path.is_file():  # its folder is made
            check_replaceable(path, beginning, holds, force=options.force)
    limits = load_sweep_spec(options.sweep).fields.get("service_level") or {}
    metrics = [f"{metric}_ms_{point}" for metric, points in limits.items() for point in points]
    charts = list[str]()

    def draw(rows: list[Answer]) -> str:
        try:
            if chart := draw_sweep(rows, metrics):
                charts.append(f"{chart}\n{mark}\n")
        except PlannerError as error:  # the table is written all the same
            print_message(str(error))
        return "".join(charts)

    def log_message(text: str) -> None:
        if sys.stderr is None or not sys.stderr.isatty():  # a terminal draws the progress
            print_message(text)

    rows = run_sweep_file(
        options.sweep, options.out, options.store, options.scheduler, options.workers,
        print_message, log_message, draw,
    )  # fmt: skip
    print(format_sweep(rows, metrics, detect_style()))
    has_cheapest = any(row.get("cheapest") for row in rows)
    chart_key = "hollow: at risk or missed" + "; ringed: the cheapest GPU" * has_cheapest
    chart = f", chart: {picture} ({chart_key})" if charts else ""
    print(f"\ntable: {options.out}{chart}")
    failed = [row["error"] for row in rows if row["status"] == "error"]
    if failed:
        print_message(f"{format_count(len(failed), 'point')} failed, the first: {failed[0]}")
    return int(bool(failed))
