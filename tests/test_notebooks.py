"""Every notebook runs from top to bottom; lessons also reproduce their committed outputs.

The walk runs in one IPython, which imports everything once; reports run it in kernels, as
JupyterLab does.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ipywidgets
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import CapturedIO, capture_output
from ipywidgets.widgets.widget import _instances
from shipped import sampled

from planner.planning.scenario import SCENARIO_DIR
from planner.ui.notebook_session import CURRENT_SCENARIO_FILE
from planner.ui.notebook_widgets import InteractiveView
from planner.ui.pdf_report import DISAGGREGATION_NOTEBOOK, NOTEBOOK_DIR, list_chapter_notebooks

pytestmark = pytest.mark.slow

LESSONS = sorted((NOTEBOOK_DIR / "learn").glob("*.ipynb"))
TWO_LESSONS = [
    NOTEBOOK_DIR / "learn" / f"{name}.ipynb"
    for name in ("1-kv-equation", "3-batching-and-preemption")
]
EXPLORED = [
    path for path in list_chapter_notebooks() if "planner.try_" in path.read_text(encoding="utf-8")
]
"""Chapters with controls; the test that moves them opens the chapter."""
ASIDE = [NOTEBOOK_DIR / f"{name}.ipynb" for name in ("start", "compare", "fleet")]


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    """What a kernel runs its cells with."""
    made = InteractiveShell.instance(cache_size=0)
    yield made
    made.restore_sys_module_state()
    InteractiveShell.clear_instance()


@pytest.fixture
def run(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], Iterator[tuple[Any, CapturedIO]]]:
    """Runs a notebook, in a folder and with names of its own: each code cell and what it shows."""

    def cells(notebook: Path, folder: Path) -> Iterator[tuple[Any, CapturedIO]]:
        monkeypatch.chdir(folder)
        # captured, a line that is drawn again would be another output
        monkeypatch.setattr("planner.ui.notebook_session.draw_in_notebook", nullcontext)
        shell.reset(new_session=False)
        for cell in nbformat.read(notebook, as_version=4).cells:
            if cell.cell_type == "code":
                with shell.display_trap, capture_output() as shown:
                    ran = shell.run_cell(cell.source)
                ran.raise_error()
                yield cell, shown

    return cells


@pytest.mark.parametrize(
    "notebook",
    sampled(list_chapter_notebooks(), {*list_chapter_notebooks()} - {*EXPLORED}),
    ids=lambda path: path.stem,
)
def test_walk(notebook, run, tmp_path):
    """As the cockpit leaves it behind: with a question of one's own."""
    shutil.copy(SCENARIO_DIR / "edge-8b-24gb.yaml", tmp_path / CURRENT_SCENARIO_FILE)
    assert sum(len(shown.outputs) for _, shown in run(notebook, tmp_path)) > 2


def values(control: ipywidgets.Widget) -> list[Any]:
    """A few that a chapter's control can be moved to, and back."""
    if hasattr(control, "_options_full"):
        return [
            *[value for _, value in control._options_full if value != control.value][:3],
            control.value,
        ]
    return [control.min, control.max, control.value]


@pytest.mark.parametrize("notebook", sampled(EXPLORED, EXPLORED[1:2]), ids=lambda path: path.stem)
def test_after_each_control_a_chapter_shows_a_fresh_computation(
    notebook, run, tmp_path, monkeypatch
):
    """What moved controls show is what the chapter opened anew computes of these values, without any widget."""
    shutil.copy(SCENARIO_DIR / "edge-8b-24gb.yaml", tmp_path / CURRENT_SCENARIO_FILE)
    made: list[InteractiveView] = []

    def explore(*parts: Any, **controls: Any) -> InteractiveView:
        made.append(InteractiveView(*parts, **controls))
        return made[-1]

    def opened() -> list[InteractiveView]:
        made.clear()
        list(run(notebook, tmp_path))
        return list(made)

    monkeypatch.setattr("planner.ui.chapter_views.InteractiveView", explore)
    seen, idle = [], []
    for place, moved in enumerate(opened()):
        for name, control in moved._controls.items():
            screens = set()
            for value in values(control):
                control.value = value
                seen.append(
                    (
                        place,
                        {each: one.value for each, one in moved._controls.items()},
                        moved._screen.value,
                    )
                )
                screens.add(moved._screen.value)
            idle += [name] * (len(screens) == 1)
    assert not idle  # each control changes something
    fresh = opened()
    for place, at, screen in reversed(
        seen
    ):  # in another order: nothing is left over from the value before
        fresh[place]._controls = {name: ipywidgets.fixed(value) for name, value in at.items()}
        assert fresh[place]._render_html() == screen, (place, at)


@pytest.mark.exhaustive
def test_the_chapter_on_pools(run, tmp_path):
    """Of a question that does not allow them: what they would be."""
    question = (
        "{question: '?', model: meta-llama/Llama-3.1-8B-Instruct, gpus: {gpu: H100-SXM, at_most:"
        " 4}, workload: {prompt_tokens: {mean: 5000, p95: 7500}, output_tokens: {mean: 150, p95:"
        " 300}, rate: 4}, service_level: {ttft: {p95: 4000}, itl: {p99: 22}}}"
    )
    (tmp_path / CURRENT_SCENARIO_FILE).write_text(question)
    shown = [
        str(output.data)
        for _, one in run(DISAGGREGATION_NOTEBOOK, tmp_path)
        for output in one.outputs
    ]
    assert len(shown) == 7 and "does not allow pools" in shown[0] and "vllm-router" in shown[-2]


def test_the_cockpit_shows_itself(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("planner.ui.cockpit.DEBOUNCE_S", 3600.0)
    ((_, shown),) = run(ASIDE[0], NOTEBOOK_DIR)
    (output,) = shown.outputs
    cockpit = _instances[output.data["application/vnd.jupyter.widget-view+json"]["model_id"]]
    cockpit._first.join()
    cockpit.close()  # nothing is simulated after the test
    assert output.data["text/html"].startswith("<p>")  # words, where no widget can be shown


@pytest.mark.parametrize("lessons", sampled([TWO_LESSONS, LESSONS], [TWO_LESSONS]), ids=len)
def test_lessons_reproduce_their_outputs(lessons):
    """All of them in one run of nbval, in one kernel."""
    options = [
        "-p",
        "no:cacheprovider",
        "-p",
        "one_kernel",
        "--override-ini=addopts=",
        "-q",
        "--nbval",
    ]
    command = [sys.executable, "-m", "pytest", *options, *map(str, lessons)]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=NOTEBOOK_DIR, env=environment, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_is_short_asks_the_reader_and_links_its_chapter(lesson):
    cells = nbformat.read(lesson, as_version=4).cells
    shown = [
        cell.source
        for cell in cells
        if cell.cell_type == "code" and not cell.metadata.get("jupyter")
    ]
    assert max(len(source.splitlines()) for source in shown) <= 12
    code = "".join(shown)
    assert code.count("planner.ask_number(") == 1
    assert code.count("planner.InteractiveView(") == (lesson.stem != "practice")
    (chapter,) = re.findall(r"\*\*Used in:\*\* \[\w+\]\(\.\./([\w-]+\.ipynb)\)", cells[0].source)
    assert (NOTEBOOK_DIR / chapter).is_file()


@pytest.mark.parametrize("notebook", list_chapter_notebooks(), ids=lambda path: path.stem)
def test_walk_is_committed_without_outputs_and_takes_a_scenario(notebook):
    cells = nbformat.read(notebook, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    parameters = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(parameters) == 1
    assert parameters[0].startswith("scenario: str = ")


@pytest.mark.parametrize(
    "notebook",
    [*ASIDE, DISAGGREGATION_NOTEBOOK, *list_chapter_notebooks(), *LESSONS],
    ids=lambda path: path.stem,
)
def test_notebook_has_one_title_and_cell_ids(notebook):
    found = nbformat.read(notebook, as_version=4)
    assert (found.nbformat, found.nbformat_minor) == (4, 5)
    assert found.metadata.kernelspec.name == "python3"
    titles = [
        line
        for c in found.cells
        if c.cell_type == "markdown"
        for line in c.source.splitlines()
        if line.startswith("# ")
    ]
    assert len(titles) == 1
