"""The walk as one PDF: execute the notebooks headlessly, side by side, and typeset what they show."""

import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planner import __version__
from planner.analysis.phrases import CALIBRATION_BASIS_LABELS
from planner.analysis.plan_comparison import (
    build_plan_titles,
    check_plan_count,
    describe_cheapest_plan,
)
from planner.analysis.plan_risks import describe_headroom, simulate_replica_loss
from planner.analysis.plan_summary import describe_scenario, summarize_plan
from planner.core.catalog import locate_shipped_folder
from planner.core.files import (
    check_not_overwriting,
    ensure_folder,
    get_report_date,
    replace_atomically,
)
from planner.core.text import escape_to_one_line
from planner.hardware.prices import look_up_gpu_price
from planner.planning.confidence import estimate_choice_confidence
from planner.planning.scenario import find_scenario_file, load_scenario
from planner.planning.search import Plan, search_deployments
from planner.tools.answer_store import write_pickle
from planner.tools.fleet import fleet_file
from planner.tools.fleet import tables as fleet_tables
from planner.ui.plan_files import write_plan_files
from planner.ui.plan_text import format_plan, render_rows

NOTEBOOK_DIR = locate_shipped_folder("notebooks")
TYPST_TEMPLATE = Path(__file__).with_name("templates") / "report.typ"
TEXT_WIDTH_PX = 640
"""Width of the page's text in a chart's pixels: a chart's type comes out a little smaller than the page's."""
SVG_CASE_SENSITIVE_NAMES = ("viewBox", "clipPath", "linearGradient")
"""What of a chart nbconvert writes in small letters, as HTML may."""
OUTPUT_MIME_TYPES = [
    "text/html",
    "image/svg+xml",
    "image/png",
    "text/markdown",
    "text/latex",
    "text/plain",
]
"""Outputs that reach the page, the first that a cell offers: widgets are left out for their plain HTML."""


DISAGGREGATION_NOTEBOOK = NOTEBOOK_DIR / "pools.ipynb"
"""The chapter of scenarios that allow pools."""


def list_chapter_notebooks() -> list[Path]:
    """The notebooks of the walk, in reading order."""
    return sorted(NOTEBOOK_DIR.glob("[0-9]*.ipynb"))


def select_chapters(plan: Plan) -> list[Path]:
    """The notebooks that have something to say of `plan`: without a deployment there is nothing to explain."""
    if not plan.candidates:
        return list_chapter_notebooks()[:2]
    idle = ("6",) * (plan.chosen is None or plan.is_disaggregated)
    idle += ("5",) * (plan.chosen is None and not plan.scenario.speculation)
    shown = [
        notebook for notebook in list_chapter_notebooks() if not notebook.name.startswith(idle)
    ]
    shown += [DISAGGREGATION_NOTEBOOK] * plan.scenario.allow_disaggregation
    return sorted(
        shown, key=lambda one: "4-pools" if one == DISAGGREGATION_NOTEBOOK else one.name
    )  # after the chapter on batching


def write_report(
    name: str | Path, out: Path | None = None, overrides: Mapping[str, Any] | None = None,
    notebooks: Sequence[Path] | None = None, progress: Callable[[str], None] = print,
) -> Path:  # fmt: skip
    """Write the capacity report of the scenario `name` (a shipped one, or a YAML file) into the folder `out`.

    `overrides` sets fields of the scenario by dotted name, such as {"workload.rate": 12}.
    `plan.json` and the files that start and watch the plan lie beside the PDF, whose path is
    returned: all of them, or none when anything fails.
    """
    path = find_scenario_file(name)
    out = (out or Path("reports") / path.stem).resolve()
    plan = search_deployments(load_scenario(name, overrides))
    ensure_folder(out)
    progress(format_plan(plan))
    shown = select_chapters(plan) if notebooks is None else notebooks
    said = {
        "fits": plan.candidates,
        "meets": plan.chosen,
        "misses": not plan.chosen,
        "day": plan.autoscaling,
    }
    left_out = [
        "live",
        *(tag for tag, holds in said.items() if not holds),
    ]  # "live": the page has shown it already
    parameters = {"scenario": str(path.resolve())}
    with _typeset_notebooks(
        plan, parameters, shown, left_out, _build_title_page(plan), progress
    ) as made:
        write_plan_files(plan, out, made)
    return out / "report.pdf"


def write_comparison_report(
    names: Sequence[str | Path], out: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = print,
) -> Path:  # fmt: skip
    """Write a PDF that holds 2 to `MAX_COMPARED_PLANS` answers against each other into the folder `out`; its path.

    `overrides` sets fields of all scenarios.
    """
    check_plan_count(names)
    scenarios = [load_scenario(name, overrides) for name in names]
    out = (
        out or Path("reports") / "-against-".join(find_scenario_file(name).stem for name in names)
    ).resolve()
    check_not_overwriting(
        [path for scenario in scenarios for path in scenario.files], [out / "report.pdf"]
    )
    plans = [search_deployments(scenario) for scenario in scenarios]
    ensure_folder(out)
    for plan in plans:
        progress(format_plan(plan))
    first, *others = map(_list_title_facts, plans)
    facts = [
        [name, summarize_plan(plan)]
        for name, plan in zip(build_plan_titles(plans), plans, strict=True)
    ]
    facts += [fact for fact in first if all(fact in other for other in others)]
    title = {
        "name": " against ".join(build_plan_titles(plans)),
        "question": "Several questions, answered side by side.",
    }
    title |= {"verdict": describe_cheapest_plan(plans), "spare": ""}
    return _write_single_notebook_report(
        plans, NOTEBOOK_DIR / "compare.ipynb", _build_page(title, facts), out, progress
    )


def write_fleet_report(
    path: Path, out: Path | None = None, progress: Callable[[str], None] = print
) -> Path:
    """Write a PDF of what the fleet file at `path` asks for into the folder `out`; its path."""

    def searched(done: int, of: int) -> None:
        print(
            f"\rplanner: {done} of {of} searches",
            end="\n" if done == of else "",
            file=sys.stderr,
            flush=True,
        )

    out = (out or Path("reports") / path.stem).resolve()
    plan = fleet_file.plan_fleet(path, searched)
    check_not_overwriting(
        [path, *(file for scenario in plan.scenarios.values() for file in scenario.files)],
        [out / "report.pdf"],
    )
    ensure_folder(out)
    progress(fleet_file.format_fleet_plan(plan))
    stock = ", ".join(f"{many} x {kind}" for kind, many in plan.fleet.stock.items())
    limits = {"USD per hour, at most": plan.fleet.budget, "W, at most": plan.fleet.power}
    facts = [("Scenarios", ", ".join(plan.scenarios)), ("Stock", stock)]
    facts += [(name, f"{most:,.10g}") for name, most in limits.items() if math.isfinite(most)]
    facts += [
        ("Date", f"{get_report_date():%-d %B %Y}"),
        ("Planned with", f"Headroom {__version__}"),
    ]
    title = {"name": plan.name, "question": "Several services on one stock of GPUs, at least cost."}
    title |= {
        "verdict": fleet_tables.summarize_fleet(plan),
        "spare": fleet_tables.describe_growth(plan),
    }
    return _write_single_notebook_report(
        plan, NOTEBOOK_DIR / "fleet.ipynb", _build_page(title, facts), out, progress
    )


def _write_single_notebook_report(
    kept: object,
    notebook: Path,
    title: Mapping[str, Any],
    out: Path,
    progress: Callable[[str], None],
) -> Path:
    """A PDF of one notebook in the folder `out`; its path."""
    with (
        _typeset_notebooks(kept, {}, [notebook], ["live"], title, progress) as path,
        replace_atomically(out / "report.pdf") as (part,),
    ):
        shutil.copyfile(path, part)
    return out / "report.pdf"


@contextmanager
def _typeset_notebooks(
    kept: object, parameters: Mapping[str, str], notebooks: Sequence[Path], left_out: Sequence[str],
    title: Mapping[str, Any], progress: Callable[[str], None],
) -> Iterator[Path]:  # fmt: skip
    """A PDF of what `notebooks` show of what is `kept`, below its title; gone when the block ends."""
    import typst

    from planner.ui.notebook_runner import execute_notebooks

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        work = Path(made)
        write_pickle(work / "plan.pickle", kept)
        executed = execute_notebooks(
            notebooks, {**parameters, "kept": str(work / "plan.pickle")}, work, progress
        )
        (work / "title.json").write_text(json.dumps(title))
        body = "\n\n".join(_convert_to_typst(notebook, work, left_out) for notebook in executed)
        (work / "body.typ").write_text(body, encoding="utf-8")
        shutil.copy(TYPST_TEMPLATE, work)
        page, floating, left = str(work / TYPST_TEMPLATE.name), list[str](), [""]
        # what began a page, as there was no room for it on the one before: each moves what follows
        # it
        while left:
            (work / "floating.json").write_text(json.dumps(floating))
            on_top = json.loads(
                typst.query(page, "<on-top>", field="value", one=True, ignore_system_fonts=True)
            )
            left = [name for name in on_top if name not in floating]
            floating += left[:1]
        # with the fonts that Typst brings along, so that the PDF is the same everywhere
        typst.compile(page, output=str(work / "report.pdf"), ignore_system_fonts=True)
        yield work / "report.pdf"


def _build_title_page(plan: Plan) -> dict[str, Any]:
    """What stands on the title page."""
    scenario = plan.scenario
    answer = {
        "name": scenario.name,
        "question": " ".join(scenario.question.split()),
        "verdict": summarize_plan(plan),
    }
    answer["spare"] = (
        " ".join([describe_headroom(plan), simulate_replica_loss(plan)[1]]) if plan.chosen else ""
    )
    return _build_page(answer, _list_title_facts(plan))


def _build_page(title: Mapping[str, str], facts: Sequence[Any]) -> dict[str, Any]:
    return {**{part: escape_to_one_line(text) for part, text in title.items()}, "facts": facts}


def _list_title_facts(plan: Plan) -> list[Any]:
    """(what, value) of what is asked, and of what the answer rests on."""
    scenario, best = plan.scenario, plan.best
    return render_rows(
        "title",
        asked=scenario,
        traffic=describe_scenario(scenario).partition("; ")[2],
        date=f"{get_report_date():%-d %B %Y}",
        version=__version__,
        found=best and best.prediction.performance,
        sure=estimate_choice_confidence(plan),
        basis=CALIBRATION_BASIS_LABELS,
        price=best and look_up_gpu_price(best.deployment.gpu, scenario.prices),
    )


def _convert_to_typst(notebook: Path, work: Path, left_out: Sequence[str]) -> str:
    """What an executed notebook shows, but for cells tagged `left_out`, as Typst; its charts become PDFs in `work`."""
    import pypandoc
    import vl_convert
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    def placed(match: re.Match[str]) -> str:
        file, drawn = f"{notebook.stem}-{match.start()}.pdf", match[0]
        for name in SVG_CASE_SENSITIVE_NAMES:
            drawn = drawn.replace(name.lower(), name)
        (work / file).write_bytes(vl_convert.svg_to_pdf(drawn))
        share = min(100, round(float(match[1]) / TEXT_WIDTH_PX * 100))
        return f'<img src="{file}" width="{share}%">'

    def said(image: re.Match[str]) -> str:
        alternative = re.search(r"""\balt=("[^"]*"|'[^']*')""", image[0])
        return alternative[1][1:-1] if alternative else ""

    tags = {"enabled": True, "remove_cell_tags": list(left_out)}
    config = Config(
        {
            "NbConvertBase": {"display_data_priority": OUTPUT_MIME_TYPES},
            "TagRemovePreprocessor": tags,
        }
    )
    hidden = {"exclude_input": True, "exclude_output_prompt": True, "exclude_anchor_links": True}
    html, _ = HTMLExporter(template_name="basic", config=config, **hidden).from_filename(
        str(notebook)
    )
    html = re.sub(r"<img\b[^>]*>", said, html)  # of a user's text: charts come as SVG
    html = re.sub(
        r"<(?:figure|table)\b", lambda at: f'{at[0]} id="{notebook.stem}-{at.start()}"', html
    )
    html = re.sub(r'<svg[^>]*? width="([\d.]+)".*?</svg>', placed, html, flags=re.DOTALL)
    dialect = "html+tex_math_dollars-native_divs-native_spans-auto_identifiers"
    typst = str(pypandoc.convert_text(html, "typst", format=dialect, extra_args=["--wrap=none"]))
    typst = re.sub(
        r"(?m)^(\w.{,200})\n\n(?=#quote|#figure)", r"#block(sticky: true)[\1]\n\n", typst
    )
    return typst.replace("align(center)[#table(", "align(left)[#table(").replace(
        "\n- ☐ ", "\n/ ☐: "
    )
