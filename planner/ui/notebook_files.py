"""Where the shipped notebooks are, and the chapters among them; and folders for who has none."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.core.catalog import locate_shipped_folder
from planner.core.files import find_private_folder

NOTEBOOK_DIR = locate_shipped_folder("notebooks")
CHAPTER_NAMES = (
    "0-summary", "1-framework", "2-vram", "3-layout", "4-batching", "5-speculation", "6-deploy",
)  # fmt: skip
"""Chapters in reading order. They are named, so that no other notebook in the folder passes for one."""
JUPYTER_FOLDERS = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
"""Variables of what is in the home folder otherwise."""


def list_chapter_notebooks() -> list[Path]:
    """Return the chapters in reading order."""
    return [NOTEBOOK_DIR / f"{name}.ipynb" for name in CHAPTER_NAMES]


@contextmanager
def provide_jupyter_folders() -> Iterator[bool]:
    """Let Jupyter have temporary folders where the home can't be written; yield whether it can.

    Kernels share there what one of them compiles.
    """
    home = os.path.expanduser("~")
    if os.path.isdir(home) and os.access(home, os.W_OK):
        yield True
        return
    names = (*JUPYTER_FOLDERS, *["NUMBA_CACHE_DIR"] * (find_private_folder() is None))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        added = {name: os.path.join(folder, name) for name in names if name not in os.environ}
        os.environ.update(added)
        try:
            yield False
        finally:
            for name in added:
                del os.environ[name]
