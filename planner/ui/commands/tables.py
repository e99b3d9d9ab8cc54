"""Commands that fill tables: predict and sweep."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.core.errors import PlannerError
from planner.core.text import format_count
from planner.ui.commands.options import (
    announce_compilation,
    parse_count,
    print_message,
    print_progress,
)

if TYPE_CHECKING:
    from planner.ui.commands.options import Subparsers


def add_predict(commands: "Subparsers") -> None:
    """Declare `headroom predict`."""
    parser = commands.add_parser(
        "predict",
        help="predict memory, latencies and cost of deployments, one per CSV row",
    )
    parser.add_argument(
        "rows",
        type=Path,
        metavar="ROWS.csv",
        help="deployments. Required columns: model, gpu. For latencies: isl and osl (mean tokens of "
        "prompt and answer) with request_rate or concurrency. Optional: engine, engine_version, "
        "quantization, tp, pp, replicas, and engine arguments by their own names. Full list: "
        "planner/planning/table_columns.yaml",
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
    parser.set_defaults(run=run_predict)


@announce_compilation
def run_predict(options: argparse.Namespace) -> int:
    """Predict rows; 1 if any of them fails."""
    from planner.tools.batch import predict_file

    def show_progress(done: int, total: int) -> None:
        print_progress(done, total, "rows")

    return predict_file(
        options.rows,
        options.out,
        options.calibration,
        resume=options.resume,
        progress=show_progress if sys.stderr.isatty() else None,
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
    parser.set_defaults(run=run_sweep_command)


@announce_compilation
def run_sweep_command(options: argparse.Namespace) -> int:
    """Answer the points of a sweep; 1 if any of them fails."""
    from planner.core.files import replace_atomically
    from planner.tools.sweep.runner import run_sweep_file
    from planner.tools.sweep.sweep_spec import load_sweep_spec
    from planner.ui.sweep_text import draw_sweep, format_sweep
    from planner.ui.terminal import detect_style

    def show_progress(done: int, total: int, num_stored: int) -> None:
        unit = f"points, {num_stored:,} from the store"
        if done == total:
            print_message(f"{done:,} of {total:,} {unit}")
        elif done == num_stored:
            print_message(
                "workers start; on a new machine they compile first, up to a minute or two"
            )
        elif sys.stderr.isatty():
            print_progress(done, total, unit)

    rows = run_sweep_file(
        options.sweep,
        options.out,
        options.store,
        options.scheduler,
        options.workers,
        show_progress,
        print_message,
    )
    limits = load_sweep_spec(options.sweep).fields.get("service_level") or {}
    metrics = [f"{metric}_ms_{point}" for metric, points in limits.items() for point in points]
    print(format_sweep(rows, metrics, detect_style()))
    chart = None
    try:
        chart = draw_sweep(rows, metrics)
    except PlannerError as error:  # the table is there
        print_message(str(error))
    if chart:
        picture = options.out.with_suffix(".svg")
        with replace_atomically(picture) as (part,):
            part.write_text(chart, encoding="utf-8")
        print(f"\ntable: {options.out}, chart: {picture} (hollow: at risk or missed)")
    failed = [row["error"] for row in rows if row["status"] == "error"]
    if failed:
        print_message(f"{format_count(len(failed), 'point')} failed, the first: {failed[0]}")
    return int(bool(failed))
