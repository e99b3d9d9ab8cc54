"""Where the shipped notebooks are, and the chapters among them."""

from pathlib import Path

from planner.core.catalog import locate_shipped_folder

NOTEBOOK_DIR = locate_shipped_folder("notebooks")
CHAPTER_NAMES = (
    "0-summary", "1-framework", "2-vram", "3-layout", "4-batching", "5-speculation", "6-deploy",
    "7-validation",
)  # fmt: skip
"""Chapters in reading order. They are named, so that no other notebook in the folder passes for one."""


def list_chapter_notebooks() -> list[Path]:
    """Return the chapters in reading order."""
    return [NOTEBOOK_DIR / f"{name}.ipynb" for name in CHAPTER_NAMES]
