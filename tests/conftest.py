"""How the suite runs: the same cases every time, kernels compiled and plans kept once, and the longest files first."""

import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from planner.simulator.compilation import find_code_folder

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
"""Where the dev requirements put shellcheck, check-jsonschema and docker-compose."""
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
"""A grammar that jsonschema builds in seconds when it is imported, for a check that nobody asks for."""
gc.set_threshold(200_000, 20, 50)
"""As `planner` sets it for its searches: a worker holds many objects that never go."""
COMPILING = pytest.StashKey[subprocess.Popen[bytes]]()
"""What compiles the replay's kernels while workers collect their tests, so that not each of them does."""
KEPT = pytest.StashKey[Path]()
"""Where the run keeps plans, for its workers and kernels together."""
LONGEST = (
    "readme",
    "report",
    "notebooks",
    "search",
    "slim_base",
    "answer",
    "cockpit",
    "renting",
    "scaling",
)
"""The files of tests that take the most time, longest first."""


WORK: Counter[str] = Counter()
"""Searches and simulated steps of this process; of the whole run in the process that started it."""
BUDGET = tomllib.loads(Path(__file__).with_name("budgets.toml").read_text(encoding="utf-8"))["run"]
"""The most of each that `make test` may need: what a run takes, in figures that no machine changes."""


def _count(module: Any, name: str, kind: str, amount: Callable[[Any], int]) -> None:
    """Add what each call of a function does to `WORK`; before others import it."""
    run = getattr(module, name)

    @functools.wraps(run)
    def run_counted(*arguments: Any, **named: Any) -> Any:
        result = run(*arguments, **named)
        WORK[kind] += amount(result)
        return result

    setattr(module, name, run_counted)


def _count_work() -> None:
    from planner.simulator import simulation

    _count(
        simulation, "simulate_requests", "simulated_steps", lambda run: int(run.outcome.totals[0])
    )
    from planner.planning import search

    _count(search, "search_deployments", "searches", lambda _: 1)


def _use_shared_kernel_cache() -> None:
    """Let the run find the simulator that the user has compiled, though its plans are in a folder of its own."""
    if folder := find_code_folder():
        os.environ["NUMBA_CACHE_DIR"] = str(folder)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        _count_work()
    if hasattr(config, "workerinput"):
        return
    _use_shared_kernel_cache()
    kept = config.stash[KEPT] = Path(tempfile.mkdtemp())
    os.environ["XDG_CACHE_HOME"] = str(kept)
    if getattr(config.option, "numprocesses", None):
        with (kept / "compilation.log").open("wb") as log:
            config.stash[COMPILING] = subprocess.Popen(
                [sys.executable, "-m", "planner.simulator"], stdout=log, stderr=log
            )


def pytest_unconfigure(config: pytest.Config) -> None:
    if compiling := config.stash.get(COMPILING, None):
        compiling.kill()  # it has ended, unless the run did before its tests began
        compiling.wait()
    if kept := config.stash.get(KEPT, None):
        shutil.rmtree(kept)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node) -> None:
    if (compiling := node.config.stash.get(COMPILING, None)) and (code := compiling.wait()):
        said = (node.config.stash[KEPT] / "compilation.log").read_text(encoding="utf-8")
        pytest.exit(f"`python -m planner.simulator` ended with {code}:\n{said}", returncode=1)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    WORK.update(getattr(node, "workeroutput", {}).get("work", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of `make test` that needs more work than its budget."""
    config = session.config
    if hasattr(config, "workerinput"):
        config.workeroutput["work"] = dict(WORK)
    elif config.option.markexpr == "not exhaustive" and any(
        WORK[kind] > most for kind, most in BUDGET.items()
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    done = ", ".join(f"{WORK[kind]:,} {kind} of {most:,}" for kind, most in BUDGET.items())
    terminalreporter.write_line(f"work of the run: {done}".replace("_", " "))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that no worker is left alone with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(item.path.name, len(LONGEST)), item.path not in slow))
