"""Every notebook runs from top to bottom; lessons also reproduce their committed outputs."""

from __future__ import annotations

import subprocess
import sys

import nbformat
import pytest

from planner.report import NOTEBOOKS, walk

LESSONS = sorted((NOTEBOOKS / "learn").glob("*.ipynb"))


def nbval(*arguments: object) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--override-ini=addopts=",
        "-q",
        *map(str, arguments),
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=NOTEBOOKS)
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.parametrize("notebook", walk(), ids=lambda path: path.stem)
def test_walk(notebook):
    nbval("--nbval-lax", notebook)


@pytest.mark.parametrize("notebook", LESSONS, ids=lambda path: path.stem)
def test_lesson(notebook):
    nbval("--nbval", notebook)


@pytest.mark.parametrize("notebook", walk(), ids=lambda path: path.stem)
def test_walk_is_committed_without_outputs_and_takes_a_scenario(notebook):
    cells = nbformat.read(notebook, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    parameters = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(parameters) == 1
    assert parameters[0].startswith("scenario: str = ")


@pytest.mark.parametrize("notebook", [*walk(), *LESSONS], ids=lambda path: path.stem)
def test_notebook_has_one_title_and_cell_ids(notebook):
    found = nbformat.read(notebook, as_version=4)
    assert (found.nbformat, found.nbformat_minor) == (4, 5)
    titles = [
        line
        for c in found.cells
        if c.cell_type == "markdown"
        for line in c.source.splitlines()
        if line.startswith("# ")
    ]
    assert len(titles) == 1
