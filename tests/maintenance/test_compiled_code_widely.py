"""What `test_compiled_code.py` looks at in small, more widely."""

import os
import subprocess
import sys
from pathlib import Path

from test_compiled_code import ROOT, _run, _start


def test_other_types_have_their_own_code(tmp_path: Path) -> None:
    assert _run(tmp_path / "one", tmp_path / "cache", "float") == ["84", "6.0", "4"]
    assert _run(tmp_path / "one", tmp_path / "cache", "float") == ["84", "6.0", "0"]


def test_processes_that_start_at_once_compile_once(tmp_path: Path) -> None:
    processes = [_start(tmp_path / "one", tmp_path / "cache") for _ in range(3)]
    outputs = sorted(process.communicate(timeout=120)[0] for process in processes)
    assert outputs == ["84  0\n", "84  0\n", "84  2\n"]


def test_the_answer_of_a_planner_compiles_nothing_that_was_compiled_ahead(tmp_path: Path) -> None:
    """numba's own events, in the process that answers."""
    code = (
        "import sys\nfrom numba.core.event import Listener, register\n"
        "class Shown(Listener):\n"
        "    def on_start(self, event): sys.exit(f'compiles {event.data}')\n"
        "    def on_end(self, event): pass\n"
        "subprocess_done = __import__('subprocess').run([sys.executable, '-m', 'planner.simulator'])\n"
        "assert subprocess_done.returncode == 0\n"
        "register('numba:compile', Shown())\n"
        "from planner.ui.cli import main\nsys.exit(main(['plan', 'edge-8b-24gb']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]
    assert "edge-8b-24gb" in done.stdout


def test_planners_at_once_on_an_empty_or_damaged_cache_answer_alike(tmp_path: Path) -> None:
    """Three share a cache that is empty, then cut to 100 bytes a file; one has a home of no use."""
    cache, answers = tmp_path / "cache", set[str]()
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    for homes in (["cache"] * 3, ["cache"], ["/proc/none"]):
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "planner", "plan", "edge-8b-24gb", "--json"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
                env={**inherited, "PYTHONPATH": str(ROOT), "HOME": "/proc/none",
                     "XDG_CACHE_HOME": str(tmp_path / home)},
            )
            for home in homes
        ]  # fmt: skip
        for process in running:
            answer, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
            assert "Traceback" not in errors
            answers.add(answer)
        kept = [path for path in cache.rglob("*") if path.is_file()]
        assert kept and not [path for path in kept if path.suffix == ".part"]
        for path in kept:
            path.write_bytes(path.read_bytes()[:100])
    assert len(answers) == 1


def test_damaged_code_is_compiled_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    _run(tmp_path / "one", cache)
    for path in cache.rglob("*.bin"):
        path.write_bytes(path.read_bytes()[:40])
    assert _run(tmp_path / "one", cache) == ["84", "2"]
    assert _run(tmp_path / "one", cache) == ["84", "0"]


def test_without_a_cache_every_process_compiles(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert _run(tmp_path / "one", tmp_path / "file") == ["84", "2"]
