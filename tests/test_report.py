"""The report of a scenario is a PDF that holds what the notebooks show, and nothing that a reader should not see."""

import json
import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pypdf import PageObject, PdfReader
from shipped import sampled

from planner.core.errors import PlannerError
from planner.planning.scenario import find_scenario_file
from planner.ui import notebook_runner as headless
from planner.ui import typesetting
from planner.ui.cli import main
from planner.ui.pdf_report import list_chapter_notebooks, write_report

pytestmark = pytest.mark.slow

NAME = "edge-8b-24gb"

CONTENT = """
import altair as alt, pandas as pd
from IPython.display import Markdown, display
from planner.core.intervals import Interval
from planner.ui.notebook_widgets import InteractiveView, build_choice, build_slider
from planner.ui.notebook_widgets import show_code, show_figure, show_note, show_table
frame = pd.DataFrame({"Concurrency": [1, 2, 3], "TPOT (ms)": [4, 5, 6]})
def draw(scale, mark):
    chart = alt.Chart(frame.assign(y=frame["TPOT (ms)"] * scale)).mark_line().encode(x="Concurrency", y="y")
    return show_figure(chart, f"Scaled by {scale}.")
display(InteractiveView(draw, scale=build_slider(1, 9, 2), mark=build_choice(["line"])))
display(show_table(pd.DataFrame({"TTFT p99 (ms)": [Interval(300, 412.3, 550)]}), "Costs $3 or $4."))
display(show_note("A note."), show_code("vllm serve " + "--option value " * 40),
        Markdown("The product is $6 \\\\times 7$."))
"""


def made(folder: Path, source: str) -> Path:
    """A notebook that shows what `source` does."""
    parameters = new_code_cell('scenario: str = ""', metadata={"tags": ["parameters"]})
    nb = new_notebook(
        cells=[new_markdown_cell("# A title\n\n## A section"), parameters, new_code_cell(source)]
    )
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nb, path := folder / "1-made.ipynb")
    return path


@pytest.fixture
def notebook(tmp_path):
    return partial(made, tmp_path)


HOSTILE = (
    'It\'s "5 $x$" `a` $(b) #c {{d}} 100 % \\e *f* _g_ <b>h</b> ![i](none.png) #panic() @j\nnext'
    " \u2028 end"
)


class Written:
    """A report on one notebook, of a scenario whose name and question are hostile."""

    def __init__(self, folder: Path) -> None:
        path = folder / "it's #1 $x$ *bold* \\ [a](b).yaml"
        path.write_bytes(find_scenario_file(NAME).read_bytes())
        columns = {
            f"gpu_memory_utilization {i}": ["some words", "meta-llama/Llama-3.1-70B-Instruct"]
            for i in range(14)
        }
        shown = (
            f"text = {HOSTILE!r}\ndisplay(show_note(text), show_table(pd.DataFrame({{text: [text]}}), text),"
            " show_code(text))\n"
        )
        shown += f"display(Markdown(f'**{{text}}**'), show_table(pd.DataFrame({columns}), 'Wide.'))"
        self.said: list[str] = []
        self.again = partial(
            write_report,
            path,
            overrides={"question": HOSTILE},
            notebooks=[made(folder, CONTENT + shown)],
        )
        self.pdf = self.again(folder / "a", show_answer=self.said.append)
        self.pages, self.name = PdfReader(self.pdf).pages, path.stem
        self.text = " ".join(" ".join(page.extract_text() for page in self.pages).split())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SOURCE_DATE_EPOCH", "86400")
        yield Written(tmp_path_factory.mktemp("written"))


def test_every_kind_of_content_reaches_the_page(written):
    charts = ["Figure 1", "Scaled by 2.", "Drawn for scale 2", "Concurrency"]
    tables = ["Table 1", "412 (300 to 550)", "Costs $3 or $4."]
    product = "6 \N{MULTIPLICATION SIGN} 7"
    for expected in [
        "A title",
        "A section",
        *charts,
        *tables,
        "A note.",
        "--option value",
        product,
    ]:
        assert expected in written.text
    assert (
        "import altair" not in written.text and "VBox" not in written.text
    )  # neither code nor a widget's name
    assert len(written.said) == 1 and "MEETS TARGETS" in written.said[0]


def test_a_chart_is_drawn_with_the_names_that_svg_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("vl_convert.svg_to_pdf", lambda svg: drawn.append(svg) or b"")
    svg = '<svg width="9" height="9" viewBox="-1 0 9 9"><clipPath id="a"></clipPath></svg>'
    shown = new_output("display_data", {"text/html": svg})
    nbformat.write(new_notebook(cells=[new_code_cell("", outputs=[shown])]), tmp_path / "a.ipynb")
    typesetting.convert_notebook(tmp_path / "a.ipynb", tmp_path, ())
    assert 'viewBox="-1 0 9 17"' in drawn[0] and "</clipPath>" in drawn[0]


def test_a_table_with_many_columns_stays_on_the_page(written):
    page = next(page for page in written.pages if "Wide." in page.extract_text())
    starts = _text_starts(page)
    assert min(starts) > 60 and max(starts) < 533 < float(page.mediabox.width)


def _text_starts(page: PageObject) -> list[float]:
    """Where each run of text starts, in points from the left edge."""
    found: list[float] = []

    def visit(text: str, cm: list[float], tm: list[float], *_: object) -> None:
        if text.strip():
            found.append(tm[4] * cm[0] + tm[5] * cm[2] + cm[4])

    page.extract_text(visitor_text=visit)
    return found


@pytest.mark.exhaustive
def test_the_same_scenario_gives_the_same_pages(written, tmp_path):
    assert written.pdf.read_bytes() == written.again(tmp_path).read_bytes()


def test_a_users_text_reaches_the_page_as_it_is(written):
    first, *rest = ["".join(page.extract_text().split()) for page in written.pages]
    assert "".join(written.name.split()) in first and "2January1970" in first
    assert "".join(HOSTILE.split()) in first
    assert "".join(rest).count("".join(HOSTILE.split())) >= 4


def test_a_planner_error_in_a_notebook_is_told_as_it_is(notebook, tmp_path):
    made = notebook("from planner.hardware.gpus import get_gpu\nget_gpu('H1000')")
    with pytest.raises(PlannerError, match=r"^unknown GPU 'H1000'"):
        write_report(NAME, tmp_path, notebooks=[made])


def test_any_other_error_names_the_notebook(notebook, tmp_path):
    with pytest.raises(
        PlannerError, match=r"^notebook 1-made failed: ZeroDivisionError: division by zero$"
    ):
        write_report(NAME, tmp_path, notebooks=[notebook("1 / 0")])


def test_fields_of_the_scenario_can_be_set(notebook, tmp_path):
    before = find_scenario_file(NAME).read_bytes()
    overrides = {"workload.rate": 0.25, "prices": {"RTX-3090": 0.01}}
    write_report(NAME, tmp_path, overrides, [notebook("scenario")])
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["planned_rps"], found["gpu"], found["usd_per_hour"][0]) == (
        0.25,
        "RTX-3090",
        0.01,
    )
    assert found["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert find_scenario_file(NAME).read_bytes() == before


WALKS = (("edge-8b-24gb", "Rent 1"), ("chat-70b", "Rent 4"))


@pytest.mark.parametrize(("name", "rent"), sampled(WALKS, WALKS[:1]))
def test_a_walk_through_all_chapters(name, rent, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one kernel: other tests have the other cores
    monkeypatch.setenv("HOME", os.devnull)  # as in a container: nobody can write to it
    assert len(list_chapter_notebooks()) == 7
    pdf = write_report(name, tmp_path)
    pages = PdfReader(pdf).pages
    asks_for_drafts = name == "chat-70b"
    assert 9 <= len(pages) <= 18 + 2 * asks_for_drafts
    texts = [" ".join(page.extract_text().split()) for page in pages]
    text = " ".join(texts)
    for title in (
        "Summary",
        "Figures of the plan",
        "Framework choice",
        "VRAM sizing",
        "Layout",
        "Batching and latency",
        "Deploy",
    ):
        assert title in text
    assert ("Speculative decoding" in text) is asks_for_drafts
    assert "Traceback" not in text and "object at 0x" not in text
    assert "ExecStart" not in text and "- alert:" not in text  # they are files of the plan
    memo, why = texts[:2]
    for part in (rent, "a month", "Three options", "Risks, and what settles each", "Next step"):
        assert part in memo
    assert "What this rests on" in why and "What this rests on" not in memo
    assert "Appendix." in texts[2] and "Appendix." not in memo + why  # the memo has its own pages
    sentences = [part for part in re.split(r"(?<=[.?]) ", memo) if len(part) > 30]
    assert len(sentences) > 5 and not any(sentence in why for sentence in sentences)


def test_two_pages_are_the_memo_alone(tmp_path):
    """A director gets two pages; what runs the plan lies beside them as ever."""
    assert main(["report", NAME, "--pages", "2", "--out", str(tmp_path)]) == 0
    memo, why = (page.extract_text() for page in PdfReader(tmp_path / "report.pdf").pages)
    assert NAME in memo and NAME in why and NAME.upper() not in memo + why
    assert "What this rests on" in why and "What this rests on" not in memo
    assert "Appendix" not in memo + why
    assert (tmp_path / "plan.json").is_file() and (tmp_path / "serve.sh").is_file()


def test_ctrl_c_does_not_wait_for_the_notebooks_that_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    import papermill

    ended, waited = threading.Event(), []
    monkeypatch.setattr(papermill, "inspect_notebook", lambda _: {})
    monkeypatch.setattr(
        papermill, "execute_notebook", lambda *_, **__: waited.append(ended.wait(60))
    )
    monkeypatch.setattr(headless, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        headless.execute_notebooks([tmp_path / "a.ipynb"], {}, tmp_path)
    assert waited == []
    ended.set()


def test_a_folder_may_have_braces_in_its_name(tmp_path: Path) -> None:
    """papermill fills its parameters into paths (its `parameterize_path`), and refuses others."""
    (work := tmp_path / "{p}{").mkdir()
    notebook = new_notebook(
        cells=[new_code_cell("print(6 * 7)")],
        metadata={"kernelspec": {"name": "python3", "language": "python", "display_name": "p"}},
    )
    nbformat.write(notebook, work / "a.ipynb")
    (work / "out").mkdir()
    (copy,) = headless.execute_notebooks([work / "a.ipynb"], {}, work / "out")
    (cell,) = (one for one in nbformat.read(copy, 4).cells if "6 * 7" in one.source)
    assert cell.outputs[0].text == "42\n"
