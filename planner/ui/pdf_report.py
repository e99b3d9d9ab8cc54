"""Write reports: execute notebooks without a browser, in parallel, and typeset their outputs."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planner import __version__
from planner.answers import build_answer
from planner.core.files import (
    check_not_overwriting,
    ensure_folder,
    get_report_date,
    write_pickle,
)
from planner.core.progress import get_progress_watch
from planner.core.text import escape_to_one_line
from planner.planning.plan import Plan
from planner.planning.scenario import find_scenario_file, load_scenario
from planner.planning.what_if import run_what_ifs
from planner.tools.fleet import allocation
from planner.tools.fleet import tables as fleet_tables
from planner.ui.decision_memo import Memo, build_memo
from planner.ui.notebook_files import NOTEBOOK_DIR, list_chapter_notebooks
from planner.ui.notebook_session import search_cached
from planner.ui.plan_files import check_plan_folder, write_plan_files, write_plan_folders
from planner.ui.plan_text import format_answer
from planner.ui.typesetting import convert_notebook, convert_svg_to_pdf, typeset_pages

DISAGGREGATION_NOTEBOOK = NOTEBOOK_DIR / "pools.ipynb"
"""The chapter for scenarios that allow disaggregated serving."""


def select_chapters(plan: Plan) -> list[Path]:
    """Return the chapters that apply to `plan`."""
    if not plan.candidates:
        return list_chapter_notebooks()[:2]
    skipped = ("6",) * (plan.chosen is None or plan.is_disaggregated)
    skipped += ("5",) * (not plan.scenario.speculation)
    chapters = [path for path in list_chapter_notebooks() if not path.name.startswith(skipped)]
    chapters += [DISAGGREGATION_NOTEBOOK] * plan.scenario.allow_disaggregation
    # disaggregation follows the chapter on batching
    return sorted(
        chapters, key=lambda path: "4-pools" if path == DISAGGREGATION_NOTEBOOK else path.name
    )


def write_report(
    name: str | Path, out: Path | None = None, overrides: Mapping[str, Any] | None = None,
    notebooks: Sequence[Path] | None = None, show_answer: Callable[[str], object] = print,
) -> Path:  # fmt: skip
    """Write the capacity report of a scenario (a shipped one, or a YAML file) to the folder `out`.

    `overrides` sets fields of the scenario by dotted name, such as {"workload.rate": 12}. Without
    `notebooks` the PDF has the chapters that apply; an empty list leaves the memo alone. The PDF,
    `plan.json` and the plan's files are all written, or none of them. `show_answer` gets the answer
    before the chapters are written. Returns the path of the PDF.
    """
    path = find_scenario_file(name)
    out = (out or Path("reports") / path.stem).resolve()
    plan = search_cached(load_scenario(name, overrides))
    ensure_folder(out)
    answer = build_answer(plan)
    show_answer(format_answer(answer))
    answer.work_out()
    shown = select_chapters(plan) if notebooks is None else notebooks
    watch, changes = get_progress_watch(), run_what_ifs(plan, search_cached)
    answer = answer.with_changes(changes, [*filter(None, [watch.describe_left_out()])])
    tags = {
        "live": False,  # interactive cells, and content that stands elsewhere in the PDF
        "fits": plan.candidates,
        "meets": plan.chosen,
        "misses": not plan.chosen,
        "day": plan.autoscaling,
    }
    left_out_tags = [tag for tag, applies in tags.items() if not applies]
    left_s = watch.limit_s - (watch.clock() - watch.started)
    parameters = {"scenario": str(path.resolve()), "time_limit_s": left_s}
    with _typeset_notebooks(answer, parameters, shown, left_out_tags, build_memo(answer)) as report:
        write_plan_files(answer, out, report)
    return out / "report.pdf"


def write_fleet_report(
    path: Path, out: Path | None = None, show_answer: Callable[[str], object] = print,
    *, force: bool = False,
) -> tuple[Path, bool]:  # fmt: skip
    """Write a PDF about the fleet file at `path`, and the plan of each scenario, to the folder `out`.

    Plans have folders of their own. Files of the user's own are replaced only by `force`. Return the
    path of the PDF, and whether every scenario is served.
    """
    out = (out or Path("reports") / path.stem).resolve()
    plan = allocation.plan_fleet(path)
    members = allocation.build_member_plans(plan)
    check_not_overwriting(
        [path, *(file for scenario in plan.scenarios.values() for file in scenario.files)],
        [out / "report.pdf"],
    )
    for name, part in members.items():
        check_plan_folder(part.scenario, out / name, force=force)
    ensure_folder(out)
    show_answer(fleet_tables.format_fleet_plan(plan))
    if get_progress_watch().is_interrupted:
        raise KeyboardInterrupt
    runs, entry = fleet_tables.describe_runs(plan.current), plan.entry
    facts = [
        [
            name,
            "; ".join(
                [each.model, *map(str, (each.workload, *each.slo_targets)), runs.get(name, "")]
            ),
        ]
        for name, each in plan.scenarios.items()
    ]
    facts += [["Stock", ", ".join(f"{count} x {kind}" for kind, count in entry.stock.items())]]
    facts += [["Left out", plan.left_out]] * bool(plan.left_out)
    title = {"name": path.stem, "question": "Several services on one stock of GPUs, at least cost."}
    title |= {
        "verdict": fleet_tables.summarize_fleet(plan),
        "spare": " ".join(
            filter(None, (fleet_tables.describe_safer(plan), fleet_tables.describe_growth(plan)))
        ),
    }
    notebook, page = NOTEBOOK_DIR / "fleet.ipynb", _build_page(title, facts)
    with _typeset_notebooks(plan, {}, [notebook], ["live"], page) as report:
        answers = {out / name: build_answer(part) for name, part in members.items()}
        write_plan_folders(answers, {out / "report.pdf": report})
    return out / "report.pdf", plan.current is not None


@contextmanager
def _typeset_notebooks(
    kept: object, parameters: Mapping[str, Any], notebooks: Sequence[Path], left_out: Sequence[str],
    title: Mapping[str, Any] | Memo,
) -> Iterator[Path]:  # fmt: skip
    """Typeset the outputs of `notebooks` about the plans `kept`, after a title page or a memo.

    Yields the path of a PDF that exists until the block ends.
    """
    from planner.ui.notebook_runner import execute_notebooks

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        write_pickle(work / "plan.pickle", kept)
        values = {**parameters, "kept": str(work / "plan.pickle")}
        executed = execute_notebooks(notebooks, values, work) if notebooks else []
        memo = dict(title.fields) if isinstance(title, Memo) else {}
        if isinstance(title, Memo):
            if memo["chart"]:
                (work / "memo-chart.pdf").write_bytes(convert_svg_to_pdf(memo["chart"]))
                memo["chart"] = "memo-chart.pdf"
            made = f"Headroom {memo['version']} · {memo['name']} · {memo['date']}"
            title = {"memo": True, "name": memo["name"], "made": made, "appendix": bool(executed)}
        (work / "memo.json").write_text(json.dumps(memo), encoding="utf-8")
        (work / "title.json").write_text(json.dumps(title))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            chapters = pool.map(lambda path: convert_notebook(path, work, left_out), executed)
            (work / "body.typ").write_text("\n\n".join(chapters), encoding="utf-8")
        yield typeset_pages(work)


def _build_page(title: Mapping[str, str], facts: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a title page: its facts, and with which version it was planned, and when."""
    made = f"Headroom {__version__}, {get_report_date():%-d %B %Y}"
    named = {part: escape_to_one_line(text) for part, text in title.items()}
    return {**named, "facts": [*facts, ["Planned with", made]]}
