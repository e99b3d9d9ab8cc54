"""The command that fills tables: predict."""

import argparse
from pathlib import Path

from planner.core.errors import require_extra
from planner.core.files import check_not_overwriting, check_replaceable
from planner.core.text import format_count
from planner.ui.commands.options import (
    FORCE,
    declare,
    make_command,
    parse_count,
    print_message,
    watch_command,
)


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


@watch_command
def run_predict(options: argparse.Namespace) -> int:
    """Answer all points; 1 if any of them fails."""
    from planner.tools.answer_store import AnswerStore, open_default_store
    from planner.tools.batch import answer_points, read_points, write_table
    from planner.tools.sweep_points import SweepPoints
    from planner.ui.sweep_text import format_sweep
    from planner.ui.terminal import detect_style

    file = read_points(options.points, options.calibration, print_message)
    sweep = file if isinstance(file, SweepPoints) else None
    out = options.out
    check_not_overwriting(file.files, filter(None, (out, options.store)))
    own = "point,set." if sweep else "id,status,error,", ""
    if out.suffix == ".parquet":
        own = "PAR1", "headroom"
        with require_extra("parquet", "a .parquet file"):
            import pyarrow.parquet  # noqa: F401
    check_replaceable(out, *own, force=options.force)
    store = (
        AnswerStore(options.store, print_message)
        if options.store
        else open_default_store(print_message)
    )
    rows = answer_points(file, store, options.scheduler, options.workers, print_message)
    limits = sweep.fields.get("service_level") if sweep else None
    metrics = [
        f"{metric}_ms_{point}"
        for metric, points in (limits.items() if isinstance(limits, dict) else ())
        if isinstance(points, dict)  # else each point has its error
        for point in points
    ]
    write_table(file, rows, out)
    if sweep:
        print(format_sweep(rows, metrics, detect_style()))
        print(f"\ntable: {out}")
    failed = [row["error"] for row in rows if row["status"] == "error"]
    if failed:
        total = format_count(len(rows), "point")
        print_message(f"{len(failed):,} of {total} failed, the first: {failed[0]}")
    return int(bool(failed))


add_predict = make_command(
    "predict",
    run_predict,
    help="answer many deployments, one per CSV row, or thousands of what-ifs of a scenario",
    formatter_class=ColumnHelpFormatter,
    epilog="columns",
    arguments=[
        declare(
            "points",
            type=Path,
            metavar="POINTS",
            help="CSV of deployments, or YAML with a scenario and a grid or sample of its fields, as "
            "`headroom init --kind sweep` writes it. Required columns: model, gpu. For latencies: isl "
            "and osl (mean tokens of prompt and answer) with request_rate or concurrency. All columns "
            "stand below",
        ),
        declare(
            "--out",
            type=Path,
            required=True,
            metavar="TABLE",
            help="file to write, CSV or .parquet, one row per point",
        ),
        declare(
            "--calibration",
            type=Path,
            metavar="FILE",
            help="your own step costs, as `headroom calibrate --out` writes them",
        ),
        declare(
            "--store",
            type=Path,
            metavar="FILE",
            help="file that keeps answers, which no run computes again (default: one per user)",
        ),
        declare(
            "--resume",
            action="store_true",
            help="go on where a run was interrupted, as every run does",
        ),
        declare(
            "--scheduler",
            metavar="ADDRESS",
            help="address of a running Dask scheduler, such as tcp://10.0.0.1:8786 (default: none, run "
            "on this machine)",
        ),
        declare(
            "--workers",
            type=parse_count,
            metavar="N",
            help="number of processes on this machine (default: one, and after seconds one per core)",
        ),
        FORCE,
    ],
)
