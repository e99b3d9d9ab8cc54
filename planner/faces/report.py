"""The walk as one PDF: execute the notebooks headlessly, side by side, and typeset what they show."""

import json
import math
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planner import __version__
from planner.core.catalog import shipped
from planner.core.files import folder, replacing, spare, today
from planner.core.quantities import one_line
from planner.facts.prices import price_per_hour
from planner.operations import fleet_file
from planner.operations.answer import parted, told, write
from planner.planning.confidence import confidence
from planner.planning.scenario import load_scenario, scenario_path
from planner.planning.search import Plan, search
from planner.studies import fleet_tables
from planner.studies.comparison import cheapest, some, titles
from planner.studies.phrases import BASES
from planner.studies.risks import lost, room
from planner.studies.summary import asked, verdict

NOTEBOOKS = shipped("notebooks")
TEMPLATE = Path(__file__).with_name("templates") / "report.typ"
TEXT_WIDTH = 640
"""Width of the page's text in a chart's pixels: a chart's type comes out a little smaller than the page's."""
SVG_NAMES = ("viewBox", "clipPath", "linearGradient")
"""What of a chart nbconvert writes in small letters, as HTML may."""
SHOWN = ["text/html", "image/svg+xml", "image/png", "text/markdown", "text/latex", "text/plain"]
"""Outputs that reach the page, the first that a cell offers: widgets are left out for their plain HTML."""


POOLS = NOTEBOOKS / "pools.ipynb"
"""The chapter of scenarios that allow pools."""


def walk() -> list[Path]:
    """The notebooks of the walk, in reading order."""
    return sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))


def chapters(plan: Plan) -> list[Path]:
    """The notebooks that have something to say of `plan`: without a deployment there is nothing to explain."""
    if not plan.candidates:
        return walk()[:2]
    idle = ("6",) * (plan.chosen is None or plan.in_pools)
    idle += ("5",) * (plan.chosen is None and not plan.scenario.speculation)
    shown = [notebook for notebook in walk() if not notebook.name.startswith(idle)]
    shown += [POOLS] * plan.scenario.pools
    return sorted(shown, key=lambda one: "4-pools" if one == POOLS else one.name)  # after the chapter on batching


def report(
    name: str | Path, out: Path | None = None, overrides: Mapping[str, Any] | None = None,
    notebooks: Sequence[Path] | None = None, progress: Callable[[str], None] = print,
) -> Path:  # fmt: skip
    """Write the capacity report of the scenario `name` (a shipped one, or a YAML file) into the folder `out`.

    `overrides` sets fields of the scenario by dotted name, such as {"workload.rate": 12}. `plan.json` and the files
    that start and watch the plan lie beside the PDF, whose path is returned: all of them, or none when anything fails.
    """
    path = scenario_path(name)
    out = (out or Path("reports") / path.stem).resolve()
    plan = search(load_scenario(name, overrides))
    folder(out)
    progress(told(plan))
    shown = chapters(plan) if notebooks is None else notebooks
    said = {"fits": plan.candidates, "meets": plan.chosen, "misses": not plan.chosen, "day": plan.scaling}
    left_out = ["live", *(tag for tag, holds in said.items() if not holds)]  # "live": the page has shown it already
    parameters = {"scenario": str(path.resolve())}
    with _typeset(plan, parameters, shown, left_out, _title(plan), progress) as made:
        write(plan, out, made)
    return out / "report.pdf"


def compare(
    names: Sequence[str | Path], out: Path | None = None, overrides: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = print,
) -> Path:  # fmt: skip
    """Write a PDF that holds 2 to `studies.comparison.MOST` answers against each other into the folder `out`; its path.

    `overrides` sets fields of all scenarios.
    """
    some(names)
    asked = [load_scenario(name, overrides) for name in names]
    out = (out or Path("reports") / "-against-".join(scenario_path(name).stem for name in names)).resolve()
    spare([path for scenario in asked for path in scenario.files], [out / "report.pdf"])
    plans = [search(scenario) for scenario in asked]
    folder(out)
    for plan in plans:
        progress(told(plan))
    first, *others = map(_facts, plans)
    facts = [[name, verdict(plan)] for name, plan in zip(titles(plans), plans, strict=True)]
    facts += [fact for fact in first if all(fact in other for other in others)]
    title = {"name": " against ".join(titles(plans)), "question": "Several questions, answered side by side."}
    title |= {"verdict": cheapest(plans), "spare": ""}
    return _alone(plans, NOTEBOOKS / "compare.ipynb", _on_a_page(title, facts), out, progress)


def fleet(path: Path, out: Path | None = None, progress: Callable[[str], None] = print) -> Path:
    """Write a PDF of what the fleet file at `path` asks for into the folder `out`; its path."""

    def searched(done: int, of: int) -> None:
        print(f"\rplanner: {done} of {of} searches", end="\n" if done == of else "", file=sys.stderr, flush=True)

    out = (out or Path("reports") / path.stem).resolve()
    plan = fleet_file.fleet_plan(path, searched)
    spare([path, *(file for one in plan.scenarios.values() for file in one.files)], [out / "report.pdf"])
    folder(out)
    progress(fleet_file.told(plan))
    stock = ", ".join(f"{many} x {kind}" for kind, many in plan.fleet.stock.items())
    limits = {"USD per hour, at most": plan.fleet.budget, "W, at most": plan.fleet.power}
    facts = [("Scenarios", ", ".join(plan.scenarios)), ("Stock", stock)]
    facts += [(name, f"{most:,.10g}") for name, most in limits.items() if math.isfinite(most)]
    facts += [("Date", f"{today():%-d %B %Y}"), ("Planned with", f"Headroom {__version__}")]
    title = {"name": plan.name, "question": "Several services on one stock of GPUs, at least cost."}
    title |= {"verdict": fleet_tables.verdict(plan), "spare": fleet_tables.growing(plan)}
    return _alone(plan, NOTEBOOKS / "fleet.ipynb", _on_a_page(title, facts), out, progress)


def _alone(kept: object, notebook: Path, title: Mapping[str, Any], out: Path, progress: Callable[[str], None]) -> Path:
    """A PDF of one notebook in the folder `out`; its path."""
    with _typeset(kept, {}, [notebook], ["live"], title, progress) as made, replacing(out / "report.pdf") as (part,):
        shutil.copyfile(made, part)
    return out / "report.pdf"


@contextmanager
def _typeset(
    kept: object, parameters: Mapping[str, str], notebooks: Sequence[Path], left_out: Sequence[str],
    title: Mapping[str, Any], progress: Callable[[str], None],
) -> Iterator[Path]:  # fmt: skip
    """A PDF of what `notebooks` show of what is `kept`, below its title; gone when the block ends."""
    import typst

    from planner.faces.headless import execute

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        work = Path(made)
        (work / "plan.pickle").write_bytes(pickle.dumps(kept))
        executed = execute(notebooks, {**parameters, "kept": str(work / "plan.pickle")}, work, progress)
        (work / "title.json").write_text(json.dumps(title))
        body = "\n\n".join(_typst(notebook, work, left_out) for notebook in executed)
        (work / "body.typ").write_text(body, encoding="utf-8")
        shutil.copy(TEMPLATE, work)
        page, floating, left = str(work / TEMPLATE.name), list[str](), [""]
        while left:  # what began a page, as there was no room for it on the one before: each moves what follows it
            (work / "floating.json").write_text(json.dumps(floating))
            on_top = json.loads(typst.query(page, "<on-top>", field="value", one=True, ignore_system_fonts=True))
            left = [name for name in on_top if name not in floating]
            floating += left[:1]
        # with the fonts that Typst brings along, so that the PDF is the same everywhere
        typst.compile(page, output=str(work / "report.pdf"), ignore_system_fonts=True)
        yield work / "report.pdf"


def _title(plan: Plan) -> dict[str, Any]:
    """What stands on the title page."""
    scenario = plan.scenario
    answer = {"name": scenario.name, "question": " ".join(scenario.question.split()), "verdict": verdict(plan)}
    answer["spare"] = " ".join([room(plan), lost(plan)[1]]) if plan.chosen else ""
    return _on_a_page(answer, _facts(plan))


def _on_a_page(title: Mapping[str, str], facts: Sequence[Any]) -> dict[str, Any]:
    return {**{part: one_line(text) for part, text in title.items()}, "facts": facts}


def _facts(plan: Plan) -> list[Any]:
    """(what, value) of what is asked, and of what the answer rests on."""
    scenario, best = plan.scenario, plan.best
    return parted(
        "title",
        asked=scenario,
        traffic=asked(scenario).partition("; ")[2],
        date=f"{today():%-d %B %Y}",
        version=__version__,
        found=best and best.prediction.performance,
        sure=confidence(plan),
        basis=BASES,
        price=best and price_per_hour(best.deployment.gpu, scenario.prices),
    )


def _typst(notebook: Path, work: Path, left_out: Sequence[str]) -> str:
    """What an executed notebook shows, but for cells tagged `left_out`, as Typst; its charts become PDFs in `work`."""
    import pypandoc
    import vl_convert
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    def placed(match: re.Match[str]) -> str:
        file, drawn = f"{notebook.stem}-{match.start()}.pdf", match[0]
        for name in SVG_NAMES:
            drawn = drawn.replace(name.lower(), name)
        (work / file).write_bytes(vl_convert.svg_to_pdf(drawn))
        share = min(100, round(float(match[1]) / TEXT_WIDTH * 100))
        return f'<img src="{file}" width="{share}%">'

    def said(image: re.Match[str]) -> str:
        alternative = re.search(r"""\balt=("[^"]*"|'[^']*')""", image[0])
        return alternative[1][1:-1] if alternative else ""

    tags = {"enabled": True, "remove_cell_tags": list(left_out)}
    config = Config({"NbConvertBase": {"display_data_priority": SHOWN}, "TagRemovePreprocessor": tags})
    hidden = {"exclude_input": True, "exclude_output_prompt": True, "exclude_anchor_links": True}
    html, _ = HTMLExporter(template_name="basic", config=config, **hidden).from_filename(str(notebook))
    html = re.sub(r"<img\b[^>]*>", said, html)  # of a user's text: charts come as SVG
    html = re.sub(r"<(?:figure|table)\b", lambda at: f'{at[0]} id="{notebook.stem}-{at.start()}"', html)
    html = re.sub(r'<svg[^>]*? width="([\d.]+)".*?</svg>', placed, html, flags=re.DOTALL)
    dialect = "html+tex_math_dollars-native_divs-native_spans-auto_identifiers"
    typst = str(pypandoc.convert_text(html, "typst", format=dialect, extra_args=["--wrap=none"]))
    typst = re.sub(r"(?m)^(\w.{,200})\n\n(?=#quote|#figure)", r"#block(sticky: true)[\1]\n\n", typst)
    return typst.replace("align(center)[#table(", "align(left)[#table(").replace("\n- ☐ ", "\n/ ☐: ")
