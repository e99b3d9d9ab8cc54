"""How the suite runs: the same cases every time, kernels compiled and plans kept once, and the longest files first."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
"""Where the dev requirements put shellcheck, check-jsonschema and docker-compose."""
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
"""A grammar that jsonschema builds in seconds when it is imported, for a check that nobody asks for."""
COMPILED = pytest.StashKey[subprocess.Popen[bytes]]()
"""What compiles the replay's kernels while workers collect their tests, so that not each of them does."""
KEPT = pytest.StashKey[str]()
"""Where the run keeps plans, for its workers and kernels together."""
LONGEST = (
    "readme", "knobs", "agreement", "browser", "real_tools", "report", "random_scenarios", "notebooks", "search",
    "decision",
)  # fmt: skip
"""The files of tests that take the most time, longest first."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ["XDG_CACHE_HOME"] = config.stash[KEPT] = tempfile.mkdtemp()
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        plan = [sys.executable, "-m", "planner", "plan", "edge-8b-24gb"]
        config.stash[COMPILED] = subprocess.Popen(
            plan, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash.get(KEPT, ""), ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node) -> None:
    if compiling := node.config.stash.get(COMPILED, None):
        compiling.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that no worker is left alone with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(item.path.name, len(LONGEST)), item.path not in slow))
