"""Every command in README.md's `sh` blocks runs as it is written, with files of the names that it gives.

`.ci/run` runs the `make` targets, in the repository itself.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lab_answers import check_start, serving
from metrics_pages import Server

from planner.engines.deployment import deploy_on
from planner.tools.diagnostics.log_comparison import EXAMPLE_LOG
from planner.ui.commands.options import TEMPLATE_DIR
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    command.strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    for command in re.sub(r"\s+#\s.*", "", line).split(";")
]
PLANNER = [command for command in COMMANDS if command.startswith("planner ")]
EXIT_CODES = {"plan": {0, 3, 4}, "lint": {0, 3, 1}, "explain-log": {0, 1}, "diagnose": {0, 1}}
"""What README.md says besides 0, by command."""
RUN_AS_THEY_ARE = {
    "init", "check", "plan", "report", "models", "gpus", "scenarios", "predict", "sweep", "fleet",
    "calibrate",
    "explain-log", "diagnose", "profile", "lint", "replay",
}  # fmt: skip
LAB = "lab"
"""The command that goes on until it is stopped."""
COMMAND_TIMEOUT_S = 300
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
"""The model of the scenario that `planner init` writes."""


def write_requests(path: Path, head: str) -> None:
    """Write an access log of 400 requests, 2 per second."""
    rng = np.random.default_rng(1)
    at_s = np.cumsum(rng.exponential(0.5, 400))
    prompt, output = (np.maximum(rng.lognormal(mu, 0.6, 400), 1).astype(int) for mu in (6.5, 5.0))
    rows = (f"{a:.3f},{p},{o}" for a, p, o in zip(at_s, prompt, output, strict=True))
    path.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")


def write_benchmark(path: Path, concurrency: int) -> None:
    """Write what `vllm bench serve --save-result` saves."""
    run = {
        "completed": 100, "total_input_tokens": 120_000, "total_output_tokens": 25_000,
        "request_rate": "inf",
        "burstiness": 1.0, "max_concurrency": concurrency, "mean_ttft_ms": 150.0 + 5 * concurrency,
        "mean_tpot_ms": 22.0 + concurrency / 4,
    }  # fmt: skip
    path.write_text(json.dumps(run), encoding="utf-8")


def write_pages(folder: Path) -> None:
    """Write two /metrics pages of a server of that scenario, as far apart as their times say."""
    served = deploy_on(MODEL, "L40S", engine_version="0.33.0", max_model_len=16384)
    load = Workload(
        LengthDistribution.from_lognormal(1200, 3500),
        LengthDistribution.from_lognormal(250, 600),
        rate=2.0,
    )
    pages, seconds = Server(served, load, requests=300).pages(folder)
    for path, name, at_s in zip(
        pages, ("before.txt", "after.txt"), (1.8e9, 1.8e9 + seconds), strict=True
    ):
        os.utime(path.rename(folder / name), (at_s, at_s))


def copy(source: Path) -> Callable[[Path], object]:
    """Make a function that puts a copy of `source` at a path."""
    return lambda path: shutil.copy(source, path)


FILES: dict[str, Callable[[Path], object]] = {
    "my-scenario.yaml": copy(TEMPLATE_DIR / "scenario.yaml"),
    "SWEEP.yaml": copy(TEMPLATE_DIR / "sweep.yaml"),
    "FLEET.yaml": copy(TEMPLATE_DIR / "fleet.yaml"),
    "vllm.log": copy(EXAMPLE_LOG),
    "requests.csv": lambda path: write_requests(
        path, "arrived_at,num_prefill_tokens,completion_tokens"
    ),
    "access.csv": lambda path: write_requests(path, "time,prompt_tokens,completion_tokens"),
    "ROWS.csv": lambda path: path.write_text(
        f"model,gpu,isl,osl,concurrency\n{MODEL},L40S,500,100,4\n"
    ),
    "bench-1.json": lambda path: write_benchmark(path, 1),
    "bench-2.json": lambda path: write_benchmark(path, 16),
    "before.txt": lambda path: write_pages(path.parent),
    "after.txt": lambda path: write_pages(path.parent),
}
"""What makes the files that README.md names."""


def read_files(command: str) -> list[str]:
    """List the names of the files that a command reads, as it writes them."""
    words = shlex.split(command)
    written = {
        words[place + 1] for place, word in enumerate(words[:-1]) if word in ("--out", "init")
    }
    names = re.findall(r"[\w*.-]+\.(?:yaml|csv|json|log|txt)\b", " ".join(words))
    return [name for name in dict.fromkeys(names) if name not in written]


def make_files(command: str, folder: Path) -> None:
    """Make the files that a command reads; `AssertionError` for one that nobody can make."""
    for name in read_files(command):
        made = [known for known in FILES if Path(known).match(name)]
        assert made, f"README.md names {name}, which this test does not know how to make"
        for known in made:
            FILES[known](folder / known)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What a person's shell has: `planner` of this checkout, and files of one's own elsewhere than here."""
    shim = tmp_path / "bin" / "planner"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m planner "$@"\n')
    shim.chmod(0o755)
    found = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    return {
        **os.environ, "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": found,
        "HF_HUB_OFFLINE": "1", "XDG_DATA_HOME": str(tmp_path / "data"),
    }  # fmt: skip


def test_each_command_is_one_that_is_run() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    known = {*RUN_AS_THEY_ARE, LAB}
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        words = shlex.split(command)
        if words[0] == "make":
            assert re.search(rf"^check (.*\s)?{re.escape(command)}$", ci, re.MULTILINE), (
                f"{command}: not in .ci/run"
            )
        else:
            assert words[0] == "planner" and words[1] in known, f"{command}: nobody runs it"
    assert {shlex.split(command)[1] for command in PLANNER} == known


def test_the_exit_codes_are_those_that_are_documented() -> None:
    prose = " ".join(TEXT.split())
    for name, codes in EXIT_CODES.items():
        (sentence,) = re.findall(
            rf"`planner {name}`(?: and `planner [a-z]+`)? (?:ends )?with [^;]+?[;.] ", prose
        ) or [""]
        if name != "diagnose":
            assert all(f" {code} when" in sentence for code in codes - {0}), name
    assert "`planner explain-log` and `planner diagnose` with 1 when" in prose


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in PLANNER if one.split()[1] != LAB])
def test_a_command_runs_as_it_is_written(
    command: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    make_files(command, folder)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=COMMAND_TIMEOUT_S, check=False,
    )  # fmt: skip
    words = shlex.split(command)
    assert done.returncode in EXIT_CODES.get(words[1], {0}), done.stdout + done.stderr
    assert "Traceback" not in done.stderr and (done.stdout or "--out" in words)
    if "--out" in words:
        assert (folder / words[words.index("--out") + 1]).exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in PLANNER if one.split()[1] == LAB])
def test_jupyterlab_opens_as_it_is_written(
    command: str, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with serving(f"exec {command}", tmp_path) as address:
        check_start(address)
    assert (tmp_path / shlex.split(command)[2] / "start.ipynb").is_file()
