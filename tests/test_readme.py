"""Every command in README.md and on the page of commands runs as it is written, with files of those names.

All of them run in this process, with few searches and no notebook; `make test-all` also has a shell run
each as it is. `.ci/run` runs the `make` targets, in the repository itself.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab_answers import check_start, serving
from metrics_pages import Server
from shipped import answer_of, plan_of, plan_once, sampled

from planner.answers import build_answer, serialize_answer
from planner.engines.deployment import deploy_on
from planner.planning.plan import Plan
from planner.planning.scenario import Scenario, load_scenario
from planner.planning.search import search_analytically, search_deployments
from planner.tools.diagnostics.log_comparison import EXAMPLE_LOG
from planner.ui import notebook_runner
from planner.ui.cli import EXIT_FAILURE, main
from planner.ui.commands.options import TEMPLATE_DIR
from planner.ui.notebook_session import search_cached
from planner.ui.plan_text import format_summary
from planner.ui.terminal import TerminalStyle
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

ROOT = Path(__file__).parents[1]
README, PAGE, INSTALLATION = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "notebooks/commands.md", "notebooks/installation.md")
)
TEXT = README + PAGE
WRITTEN = [
    command.strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    for command in re.sub(r"\s+#\s.*", "", line).split(";")
] + re.findall(r"`(make \w+|headroom \w[^`]+)`", README)
COMMANDS = list(dict.fromkeys(WRITTEN))
HEADROOM = [command for command in COMMANDS if command.startswith("headroom ")]
EXIT_CODES = {
    "plan": {0, 3, 4},
    "lint": {0, 3, 1},
    "verify": {0, 1, 3},
    "fleet": {0, 4},
    "explain-log": {0, 1},
    "diagnose": {0, 1, 3},
}
"""What commands.md says besides 0, by command."""
RUN_AS_THEY_ARE = {
    "init", "check", "plan", "report", "list", "predict", "fleet",
    "calibrate",
    "verify", "explain-log", "diagnose", "profile", "lint", "replay",
}  # fmt: skip
FINITE = [command for command in HEADROOM if command.split()[1] in RUN_AS_THEY_ARE]
IN_SHELL = [
    command for command in FINITE if command.split()[1] in ("list", "predict", "explain-log")
]
"""A sample of cheap ones, with options and files."""
LAB = "lab"
"""The command that goes on until it is stopped."""
COMMAND_TIMEOUT_S = 300
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
"""The model of the scenario that `headroom init` writes."""

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
COMPOSE = """services:
  llm:
    image: vllm/vllm-openai:v0.20.2
    command: --model Qwen/Qwen3-8B --max-model-len 8192 --max-num-seqs 64
"""


RULES = """groups:
  - name: vllm
    rules:
      - alert: KVCacheFull
        expr: vllm:gpu_cache_usage_perc > 0.9
"""
"""An alert with a metric that vLLM renamed in 0.10."""


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


def write_plan(path: Path) -> None:
    """Write the plan of that scenario."""
    plan = plan_once(load_scenario(TEMPLATE_DIR / "scenario.yaml"))
    path.write_text(json.dumps(serialize_answer(answer_of(plan))), encoding="utf-8")


def write_fleet(path: Path) -> None:
    """Write what `headroom init --kind fleet` writes, with one kind of GPU, as each is a search for every scenario."""
    text = (TEMPLATE_DIR / "fleet.yaml").read_text(encoding="utf-8")
    path.write_text(re.sub(r"(?m)^stock: .*$", "stock: {L40S: 16}", text), encoding="utf-8")


def copy(source: Path) -> Callable[[Path], object]:
    """Make a function that puts a copy of `source` at a path."""
    return lambda path: shutil.copy(source, path)


FILES: dict[str, Callable[[Path], object]] = {
    "my-scenario.yaml": copy(TEMPLATE_DIR / "scenario.yaml"),
    **dict.fromkeys(("SWEEP.yaml", "sweep.yaml"), copy(TEMPLATE_DIR / "sweep.yaml")),
    **dict.fromkeys(("FLEET.yaml", "fleet.yaml"), write_fleet),
    "config.json": lambda path: path.write_text(json.dumps(CONFIG)),
    "vllm.log": copy(EXAMPLE_LOG),
    "rules.yml": lambda path: path.write_text(RULES),
    "requests.csv": lambda path: write_requests(
        path, "arrived_at,num_prefill_tokens,completion_tokens"
    ),
    "access.csv": lambda path: write_requests(path, "time,prompt_tokens,completion_tokens"),
    "ROWS.csv": lambda path: path.write_text(
        f"model,gpu,isl,osl,concurrency\n{MODEL},L40S,500,100,4\n"
    ),
    "compose.yaml": lambda path: path.write_text(COMPOSE),
    "bench-1.json": lambda path: write_benchmark(path, 1),
    "bench-2.json": lambda path: write_benchmark(path, 16),
    "plan.json": lambda path: write_plan(path),
    "before.txt": lambda path: write_pages(path.parent),
    "after.txt": lambda path: write_pages(path.parent),
}
"""What makes the files that commands name."""


def read_files(command: str) -> list[str]:
    """List the names of the files that a command reads, as it writes them."""
    words = shlex.split(command)
    written = {
        words[place + 1] for place, word in enumerate(words[:-1]) if word in ("--out", "init")
    }
    names = re.findall(r"[\w*.-]+\.(?:ya?ml|csv|json|log|txt)\b", " ".join(words))
    return [name for name in dict.fromkeys(names) if name not in written]


def make_files(command: str, folder: Path) -> None:
    """Make the files that a command reads; `AssertionError` for one that nobody can make."""
    for name in read_files(command):
        made = [known for known in FILES if Path(known).match(name)]
        assert made, f"{command} names {name}, which this test does not know how to make"
        for known in made:
            FILES[known](folder / known)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What a person's shell has: `headroom` of this checkout, and files of one's own elsewhere than here."""
    shim = tmp_path / "bin" / "headroom"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m headroom_planner "$@"\n')
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
            assert words[0] == "headroom" and words[1] in known, f"{command}: nobody runs it"
    assert {shlex.split(command)[1] for command in HEADROOM} == known


def test_the_wheel_is_installed_as_it_is_written() -> None:
    """`check_wheel.sh` takes its lines from installation.md, and CI runs it."""
    assert len(re.findall(r"`(pip wheel|pipx runpip) [^`]+`", INSTALLATION)) == 2
    assert "bash tests/check_wheel.sh" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_answer_on_the_first_page_is_the_plans_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")  # on which no price is old
    (shown,) = re.findall(r"```text\n(.*?)\n```", README, re.DOTALL)
    answer = build_answer(plan_of("chat-70b"))
    told = format_summary(answer, TerminalStyle(), command="headroom plan chat-70b")
    assert shown == told


def test_the_exit_codes_are_those_that_are_documented() -> None:
    """The filled cells of each command's row are its exit codes, as the runs below find them."""
    table = PAGE.partition("| command | 0 | 1 | 3 | 4 |\n")[2].partition("\n\n")[0]
    documented = {}
    for row in table.splitlines()[1:]:
        names, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        codes = {code for code, cell in zip((0, 1, 3, 4), cells, strict=True) if cell}
        documented |= dict.fromkeys(re.findall("`([a-z-]+)`", names), codes)
    failing_rows = {"predict": {0, 1}}
    assert documented == {**EXIT_CODES, **failing_rows}
    assert f"{EXIT_FAILURE} a failure of the machine" in PAGE


def check_end(command: str, folder: Path, code: int, out: str, err: str) -> None:
    """The command ended as commands.md says, said something, and wrote what it was asked to."""
    words = shlex.split(command)
    assert code in EXIT_CODES.get(words[1], {0}), out + err
    assert "Traceback" not in err and (out or "--out" in words)
    if "--out" in words:
        assert (folder / words[words.index("--out") + 1]).exists()


def plan_quickly(scenario: Scenario) -> Plan:
    """Search for the scenario of `planner init`, once; plan the others in closed form."""
    init = load_scenario(TEMPLATE_DIR / "scenario.yaml")
    is_init = replace(scenario, name=init.name, files=init.files) == init
    return plan_once(scenario) if is_init else search_analytically(scenario)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands search once for the scenario that most of them read, and reports run no chapter."""
    for name, module in list(sys.modules.items()):
        ours = name.startswith("planner.") and name != search_cached.__module__
        if ours and getattr(module, "search_deployments", None) is search_deployments:
            monkeypatch.setattr(module, "search_deployments", plan_quickly)
    monkeypatch.setattr(notebook_runner, "execute_notebooks", lambda notebooks, *_: notebooks)


@pytest.mark.slow
@pytest.mark.parametrize("command", FINITE)
def test_a_command_does_what_is_written(
    command: str, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    make_files(command, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = shlex.split(command)[1:]
    globbed = [sorted(map(str, Path().glob(word))) if "*" in word else [word] for word in words]
    code = main([word for each in globbed for word in each])
    check_end(command, tmp_path, code, *capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("command", sampled(FINITE, IN_SHELL))
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
    check_end(command, folder, done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in HEADROOM if one.split()[1] == LAB])
def test_jupyterlab_opens_as_it_is_written(
    command: str, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with serving(f"exec {command}", tmp_path) as address:
        check_start(address)
    assert (tmp_path / shlex.split(command)[2] / "start.ipynb").is_file()
