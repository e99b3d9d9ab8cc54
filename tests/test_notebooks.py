"""Every notebook runs from top to bottom; lessons also reproduce their committed outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

from planner.faces.report import NOTEBOOKS, walk

pytestmark = pytest.mark.slow

LESSONS = sorted((NOTEBOOKS / "learn").glob("*.ipynb"))


def nbval(mode: str, notebook: Path) -> str:
    """What nbval has to complain about."""
    options = ["-p", "no:cacheprovider", "--override-ini=addopts=", "-q", mode]
    command = [sys.executable, "-m", "pytest", *options, str(notebook)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=NOTEBOOKS, check=False)
    return run.stdout[-4000:] if run.returncode else ""


@pytest.fixture(scope="module")
def complaints(request: pytest.FixtureRequest) -> Iterator[dict[Path, Future[str]]]:
    """Of every notebook that was asked for; as many run side by side as there are cores."""
    modes = {"test_walk": "--nbval-lax", "test_lesson": "--nbval"}
    wanted = [item for item in request.session.items if getattr(item, "originalname", "") in modes]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = [(item.originalname, item.callspec.params["notebook"]) for item in wanted]
        yield {path: pool.submit(nbval, modes[name], path) for name, path in paths}


@pytest.mark.parametrize("notebook", walk(), ids=lambda path: path.stem)
def test_walk(notebook, complaints):
    assert complaints[notebook].result() == ""


@pytest.mark.parametrize("notebook", LESSONS, ids=lambda path: path.stem)
def test_lesson(notebook, complaints):
    assert complaints[notebook].result() == ""


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
