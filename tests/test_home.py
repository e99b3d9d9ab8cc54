"""Users without a home folder, or with one that they may not write to, as in containers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_core.paths import jupyter_config_dir, jupyter_data_dir, jupyter_runtime_dir

from planner.core.errors import PlannerError
from planner.core.files import find_private_folder, find_user_cache
from planner.models import hub
from planner.models.registry import load_model
from planner.ui.cli import main
from planner.ui.notebook_files import JUPYTER_FOLDERS, provide_jupyter_folders

NOBODY = 2**31 - 5
"""An account that no machine has; a container may run as any number."""
WITHOUT_HOME = f"""
import os, sys
os.getuid = lambda: {NOBODY}
from planner.__main__ import run
sys.argv = ["headroom", "list", "scenarios"]
code = run()
import altair  # it asks for the home folder as it loads
sys.exit(code)
"""


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: NOBODY)
    assert os.path.expanduser("~") == "~"


@pytest.mark.usefixtures("no_home")
def test_without_a_home_nothing_is_kept_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_private_folder() is None and find_user_cache() is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.check_hub_reachable.cache_clear()
    with pytest.raises(PlannerError, match="unknown model"):
        load_model("acme/None-1")
    monkeypatch.setattr(hub, "check_hub_reachable", lambda: True)
    with pytest.raises(PlannerError, match="can't be kept: there is no home folder"):
        load_model("acme/None-1")


def test_the_command_runs_for_an_account_without_a_home(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HOME], cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "") and "chat-70b" in done.stdout
    assert not list(tmp_path.iterdir())


def test_jupyter_gets_folders_where_the_home_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`/dev/null` is a folder for nobody, the superuser included."""
    for name in (*JUPYTER_FOLDERS, "XDG_RUNTIME_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", os.devnull)
    before = dict(os.environ)
    with provide_jupyter_folders() as is_own:
        folders = [
            Path(find()) for find in (jupyter_config_dir, jupyter_data_dir, jupyter_runtime_dir)
        ]
        folders.append(Path(os.environ["IPYTHONDIR"]))
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
    assert not is_own and dict(os.environ) == before
    assert not any(folder.exists() for folder in folders), "nothing of it is left"
    monkeypatch.setenv("HOME", str(tmp_path))
    with provide_jupyter_folders() as is_own:
        assert is_own and jupyter_data_dir().startswith(str(tmp_path))


@pytest.mark.parametrize("command", ["plan", "report"])
def test_a_folder_that_cannot_be_made_is_told_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([command, "edge-8b-24gb", "--out", str(tmp_path / "file" / "out")]) == 2
    said = capsys.readouterr()
    assert "is no folder that you may write to" in said.err and not said.out
