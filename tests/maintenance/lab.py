"""A real JupyterLab or Notebook 7 in a real browser, for the browser test and for pictures to look at.

Run as a script it saves a picture of every notebook, light and dark: `python tests/maintenance/lab.py FOLDER
[NOTEBOOK ...]`.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab_answers import serving
from playwright.sync_api import Page, sync_playwright

from planner.ui.lab_server import copy_notebooks
from planner.ui.notebook_files import list_chapter_notebooks

ROOT = Path(__file__).resolve().parents[2]
THEME = "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})"
PANEL = "window.jupyterapp?.shell.currentWidget"
CODE = f"{PANEL}.content.widgets.filter(cell => cell.model.type === 'code')"
ERRORS = (
    f"{CODE}.flatMap(cell => cell.model.outputs.toJSON())"
    ".filter(output => output.output_type === 'error').map(output => output.evalue)"
)
FAILED = f"{ERRORS}.length > 0"


def chromium() -> str | None:
    """The system's own browser."""
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """A server over `folder` as `headroom lab` starts it, with settings of its own; its address."""
    with serving([sys.executable, "-m", "planner", "lab", str(folder)], ROOT) as address:
        yield address


@contextmanager
def notebook7(folder: Path) -> Iterator[str]:
    """A server over `folder` as a user of Jupyter Notebook 7 starts it, who has the notebooks there."""
    copy_notebooks(folder)
    with serving([sys.executable, "-m", "notebook", str(folder)], ROOT) as address:
        yield address.removesuffix("/lab")


@contextmanager
def browser(width: int = 1250, height: int = 1000) -> Iterator[Page]:
    """A page in the system's Chromium."""
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            page = opened.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(120_000)
            yield page
        finally:
            opened.close()


def run_notebook(page: Page, address: str, notebook: str) -> None:
    """Open `notebook` and run all of it; returns when its kernel is idle again and its widgets are drawn."""
    page.goto(f"{address}/tree/{notebook}?reset")
    idle = f"{PANEL}?.sessionContext?.session?.kernel?.status === 'idle'"
    page.wait_for_function(idle, timeout=90_000)
    if "/lab/" not in page.url or notebook not in (
        "start.ipynb",
        *(chapter.name for chapter in list_chapter_notebooks()),
    ):  # those run by themselves in JupyterLab
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    done = f"{CODE}.every(cell => cell.model.executionCount) && {idle}"
    page.wait_for_function(f"({done}) || {FAILED}", timeout=300_000)
    assert not page.evaluate(FAILED), page.evaluate(ERRORS)
    page.wait_for_timeout(1_000)


def main(out: Path, names: list[str]) -> None:
    """Save pictures of the walk's notebooks and the lessons."""
    out.mkdir(parents=True, exist_ok=True)
    notebooks = [Path(name) for name in names] or sorted((ROOT / "notebooks").rglob("*.ipynb"))
    with tempfile.TemporaryDirectory() as folder:
        for notebook in notebooks:
            shutil.copy(notebook, folder)
            if (data := notebook.parent / "data").is_dir():
                shutil.copytree(data, Path(folder) / "data", dirs_exist_ok=True)
        with jupyterlab(Path(folder)) as address:
            for notebook in notebooks:
                with browser(height=5000) as page:
                    run_notebook(page, address, notebook.name)
                    page.evaluate(
                        "document.querySelectorAll('details').forEach(answer => answer.open = true)"
                    )
                    if tall := page.evaluate(
                        "document.querySelector('.jp-WindowedPanel-outer')?.scrollHeight"
                    ):
                        page.set_viewport_size({"width": 1250, "height": min(tall + 200, 16_000)})
                    for theme in ("Light", "Dark"):
                        page.evaluate(THEME, f"JupyterLab {theme}")
                        page.wait_for_timeout(2_000)
                        page.screenshot(path=out / f"{notebook.stem}-{theme.lower()}.png")
                    print(notebook.stem, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
