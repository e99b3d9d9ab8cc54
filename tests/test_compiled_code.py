"""Compiled code is kept by what it was compiled from, and found from every place of the sources."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNEL = """
import sys
from numba.core.event import Listener, register
from planner.simulator.compilation import EntryPoint, njit_compiled

@njit_compiled
def double(x):
    return 2 * x

def quadruple(x):
    return double(double(x))

class Counter(Listener):
    compiled = 0
    def on_start(self, event): Counter.compiled += 1
    def on_end(self, event): pass

register("numba:compile", Counter())
entry_point = EntryPoint(quadruple, lambda: (1,))

def show():
    print(entry_point(21), entry_point(1.5) if "float" in sys.argv else "", Counter.compiled)
"""


def _start(folder: Path, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that calls the kernel in `folder`, with its code in `cache`."""
    folder.mkdir(exist_ok=True)
    (folder / "kernel.py").write_text(KERNEL)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", "import kernel; kernel.show()", *arguments], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _run(folder: Path, cache: Path, *arguments: str) -> list[str]:
    process = _start(folder, cache, *arguments)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output.split()


def test_code_is_compiled_once_and_found_from_every_place(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert _run(tmp_path / "one", cache) == ["84", "2"]
    assert _run(tmp_path / "one", cache) == ["84", "0"]
    assert _run(tmp_path / "other", cache) == ["84", "0"]
