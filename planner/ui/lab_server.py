"""Open JupyterLab on the package's notebooks, with the extension that runs them.

`headroom lab` and `make lab` both start here, and so do the browser tests.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from planner.core.errors import PlannerError
from planner.core.files import ensure_folder, replace_atomically
from planner.core.readers import read_text
from planner.core.text import get_program_name
from planner.ui.notebook_files import NOTEBOOK_DIR, list_chapter_notebooks, provide_jupyter_folders

DEFAULT_FOLDER = Path("headroom-notebooks")
FIRST_NOTEBOOK = "start.ipynb"
EXTENSION = Path(__file__).with_name("lab") / "headroom"
SCRIPT = Path("static") / "remoteEntry.js"
SHIPPED_LINE = "const SHIPPED = [];"
"""The line of the extension's script that `build_extension` replaces."""
MADE_BY_USE = (".yaml", ".json")
"""Suffixes of files that the cockpit writes beside the notebooks of a checkout."""
CONTENT_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:;"
    " connect-src 'self' data: blob: ws: wss:; form-action 'self'; frame-ancestors 'self'"
)
"""What the browser may load: from this server only, so that a stranger's notebook fetches no picture.

JupyterLab needs scripts in its page, and anywidget `blob:`. Not every browser counts a WebSocket of
this server as `'self'`.
"""


def open_lab(place: Path, options: Sequence[str] = ()) -> None:
    """Open JupyterLab on `start.ipynb` in the folder `place`, until it is stopped.

    Notebooks that are missing there are copied first. `options` are JupyterLab's own.
    """
    from jupyterlab.labapp import LabApp

    class Lab(LabApp):
        """JupyterLab with a content policy, which the user's own `tornado_settings` replace."""

        @classmethod
        def get_extension_package(cls) -> str:
            return "jupyterlab"

        @classmethod
        def make_serverapp(cls, **settings: Any) -> Any:
            headers = {"Content-Security-Policy": CONTENT_POLICY}
            return super().make_serverapp(tornado_settings={"headers": headers}, **settings)

    program = get_program_name()
    if kept := copy_notebooks(place):
        print(
            f"{program}: {place}: kept your own {', '.join(map(str, kept))}; notebooks among them do"
            " not run when they are opened"
        )
    print(f"{program}: notebooks in {place}", flush=True)
    with (
        provide_jupyter_folders() as is_own,
        tempfile.TemporaryDirectory(
            prefix="headroom-lab-", ignore_cleanup_errors=True
        ) as extensions,
    ):
        if not is_own:
            print(f"{program}: you have no home folder to write to: settings last until this ends")
        build_extension(Path(extensions))
        Lab.launch_instance(
            [
                f"--ServerApp.root_dir={place.resolve()}",
                f"--LabApp.default_url=/lab/tree/{FIRST_NOTEBOOK}",
                f"--LabApp.extra_labextensions_path={extensions}",
                *options,
            ]
        )


def copy_notebooks(place: Path) -> list[Path]:
    """Copy the notebooks and their files to the folder `place`; return the files that differ.

    An existing file is never overwritten. The package's own folder stays as it is.
    """
    ensure_folder(place)
    kept: list[Path] = []
    if place.resolve() == NOTEBOOK_DIR.resolve():
        return kept
    for name in _list_files():
        original, copy = NOTEBOOK_DIR / name, place / name
        ensure_folder(copy.parent)
        if os.path.lexists(copy):
            kept += [name] * (_read(original) != _read(copy))
            continue
        with replace_atomically(copy, new=True) as (part,):
            shutil.copyfile(original, part)
    return kept


def _list_files() -> Iterator[Path]:
    """List the files to copy, relative to `NOTEBOOK_DIR`: neither hidden nor the cockpit's own."""
    for path in sorted(NOTEBOOK_DIR.rglob("*")):
        name = path.relative_to(NOTEBOOK_DIR)
        hidden = any(part.startswith((".", "__")) for part in name.parts)
        made = name.parts[0] == "reports" or (len(name.parts) == 1 and name.suffix in MADE_BY_USE)
        if path.is_file() and not hidden and not made:
            yield name


def _read(path: Path) -> object:
    """Read a file to compare it: of a notebook its code; None if that can't be."""
    try:
        return read_code(path) if path.suffix == ".ipynb" else path.read_bytes()
    except (OSError, PlannerError):
        return None


def build_extension(extensions: Path) -> Path:
    """Write the lab extension, with the code of the shipped notebooks, to a folder in `extensions`.

    The script is named by its content, because browsers cache the files of extensions for good.
    """
    made = extensions / EXTENSION.name
    (made / SCRIPT).parent.mkdir(parents=True)
    script = (EXTENSION / SCRIPT).read_text(encoding="utf-8")
    assert script.count(SHIPPED_LINE) == 1
    script = script.replace(SHIPPED_LINE, f"const SHIPPED = {json.dumps(list_shipped())};")
    named = SCRIPT.with_suffix(f".{hashlib.sha256(script.encode()).hexdigest()[:16]}.js")
    (made / named).write_text(script, encoding="utf-8")
    package = json.loads((EXTENSION / "package.json").read_text(encoding="utf-8"))
    package["jupyterlab"]["_build"]["load"] = named.as_posix()
    (made / "package.json").write_text(json.dumps(package), encoding="utf-8")
    return made


def list_shipped() -> list[dict[str, object]]:
    """List the code of every shipped notebook, and whether it runs when opened, as chapters do."""
    opened = {NOTEBOOK_DIR / FIRST_NOTEBOOK, *list_chapter_notebooks()}
    shipped: list[dict[str, object]] = []
    for name in _list_files():
        if name.suffix == ".ipynb":
            path = NOTEBOOK_DIR / name
            with suppress(PlannerError):  # a file of the user's in a checkout that is no notebook
                shipped.append({"runsWhenOpened": path in opened, "code": read_code(path)})
    return shipped


def read_code(notebook: Path) -> list[str]:
    """Read the code cells of a notebook; raise `PlannerError` if it is none."""
    try:
        cells = json.loads(read_text(notebook))["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise PlannerError(f"{notebook} is not a notebook: {error!r}") from None
