"""The command is `headroom`, also called `planner`, and says when another project's package hides its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.core.text import get_program_name

ROOT = Path(__file__).parents[1]


def run_headroom(*places: Path) -> subprocess.CompletedProcess[str]:
    """Run `headroom --version` with these folders before all others that hold packages."""
    path = os.pathsep.join(map(str, [*places, ROOT]))
    code = "import sys; sys.argv = ['headroom', '--version']; import headroom_planner; sys.exit(headroom_planner.run())"
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, cwd="/",
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_own_package_is_run() -> None:
    done = run_headroom()
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("headroom ")


@pytest.mark.parametrize("file", ["planner/__init__.py", "planner.py"])
def test_another_projects_package_is_named_and_not_run(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("raise SystemExit('run')\n", encoding="utf-8")
    done = run_headroom(tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"headroom: the package planner in {(tmp_path / file).parent}" in done.stderr
    assert "llm-d-planner" in done.stderr


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("/usr/bin/planner", "planner"),
        ("planner.exe", "planner"),
        ("/usr/bin/headroom", "headroom"),
        ("/src/planner/__main__.py", "headroom"),
        ("", "headroom"),
    ],
)
def test_messages_have_the_name_by_which_the_command_was_called(
    called: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    assert get_program_name() == name
