"""What the distribution's own requirements are enough for, without extras: almost every command.

The commands run in processes that find nothing else: a folder of links to the required distributions takes the
place of site-packages, also for the workers that they start. What is required is what pyproject.toml says and what
the installed distributions' metadata say of each other.
"""

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
import yaml
from metrics_pages import Server
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from shipped import small_fields
from test_readme import COMPOSE, write_benchmark, write_requests

from planner.engines.deployment import deploy_on
from planner.tools.diagnostics.log_comparison import EXAMPLE_LOG
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAX_PACKAGES = 20
"""Of an installation without extras, this one included."""
HEAVY = {
    "altair", "dask", "distributed", "ipykernel", "ipywidgets", "jupyterlab", "pandas",
    "papermill", "pyarrow", "tornado", "typst",
}  # fmt: skip
EXTRA_COMMANDS = {
    "report edge-8b-24gb": ("report", "report"),
    "fleet fleet.yaml": ("fleet", "report"),
    "lab": ("lab", "lab"),
    "predict sweep.yaml --out sweep.parquet": ("a .parquet file", "parquet"),
    "predict sweep.yaml --out sweep.csv --store answers --scheduler tcp://127.0.0.1:9": (
        "--scheduler",
        "dask",
    ),
}
"""What needs an extra: how the message calls it, and the extra."""
SWEEP = """\
answer: predict
scenario: edge-8b-24gb
grid: {workload.rate: [0.1, 0.5]}
"""
BASE_COMMANDS = {
    "list scenarios": {0},
    "list models qwen3": {0},
    "list gpus l40": {0},
    "init scenario.yaml": {0},
    "check small.yaml": {0},
    "plan small.yaml --all --out out": {0},
    "plan small.yaml --set workload={trace:\N{NO-BREAK SPACE}requests.csv}": {0, 3, 4},
    "predict rows.csv --out predictions.csv": {0},
    "predict sweep.yaml --out sweep.csv --store answers": {0},
    "verify small.yaml --bench bench-1.json": {0, 1, 3},
    "explain-log vllm.log --gpu H100": {0},
    "diagnose before.txt after.txt --plan small.yaml": {0, 1},
    "profile requests.csv": {0},
    "lint compose.yaml --gpu H100": {0, 3},
    "replay --scenario small.yaml --requests times.csv": {0},
    "calibrate bench-1.json bench-2.json --scenario small.yaml --out mine.yaml": {0},
}
"""What runs without extras, with its exit codes; no-break spaces stand for spaces within a word."""


def list_requirements(extra: str = "") -> set[str]:
    """List the distributions that an installation with an extra has besides this one."""
    found: set[str] = set()
    waiting = [*PROJECT["dependencies"], *EXTRAS.get(extra, ())]
    while waiting:
        wanted = Requirement(waiting.pop())
        name = canonicalize_name(wanted.name)
        if name == canonicalize_name(PROJECT["name"]):
            waiting += [line for each in wanted.extras for line in EXTRAS[each]]
        elif f"{name}{sorted(wanted.extras)}" not in found:
            found.add(f"{name}{sorted(wanted.extras)}")
            environments = [{"extra": each} for each in ("", *wanted.extras)]
            for line in distribution(name).requires or ():
                marker = Requirement(line).marker
                if marker is None or any(map(marker.evaluate, environments)):
                    waiting.append(line)
    return {name.partition("[")[0] for name in found}


def link_distributions(names: Iterable[str], folder: Path) -> Path:
    """Make a folder from which nothing but these distributions can be imported."""
    folder.mkdir()
    for name in names:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_distributions(list_requirements(), tmp_path_factory.mktemp("base") / "site")


def run(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder with the distributions of `site` and this package."""
    environment = {
        **os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1",
        "PLANNER_TRACEBACK": "1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-S", *words], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip


def write_pages(folder: Path) -> None:
    """Write two /metrics pages of a replica."""
    served = deploy_on("meta-llama/Llama-3.1-8B-Instruct", "RTX-3090", max_model_len=8192)
    lengths = (LengthDistribution.from_lognormal(mean, 3 * mean) for mean in (220, 120))
    pages, _ = Server(served, Workload(*lengths, rate=0.5), requests=200).pages(folder)
    for page, name in zip(pages, ("before.txt", "after.txt"), strict=True):
        page.rename(folder / name)


FILES: dict[str, Callable[[Path], object]] = {
    "small.yaml": lambda path: path.write_text(
        yaml.safe_dump(small_fields({"gpus.0.at_most": 1, "workload.rate": 1}))
    ),
    "sweep.yaml": lambda path: path.write_text(SWEEP),
    "fleet.yaml": lambda path: path.write_text("stock: {L4: 2}\nscenarios: [edge-8b-24gb]\n"),
    "rows.csv": lambda path: path.write_text(
        "model,gpu,isl,osl,concurrency\nmeta-llama/Llama-3.1-8B-Instruct,L40S,500,100,4\n"
    ),
    "requests.csv": lambda path: write_requests(path, "time,prompt_tokens,completion_tokens"),
    "bench-1.json": lambda path: write_benchmark(path, 1),
    "bench-2.json": lambda path: write_benchmark(path, 16),
    "vllm.log": lambda path: path.write_text(EXAMPLE_LOG.read_text()),
    "compose.yaml": lambda path: path.write_text(COMPOSE.format(64)),
    "before.txt": lambda path: write_pages(path.parent),
}
"""What makes the files that commands read."""


def write_command(folder: Path, command: str) -> list[str]:
    """Write the files that a command reads; return its words."""
    for name, make in FILES.items():
        if name in command:
            make(folder / name)
    return [word.replace("\N{NO-BREAK SPACE}", " ") for word in command.split(" ")]


def test_the_base_is_slim_and_all_is_everything() -> None:
    names = list_requirements()
    assert len(names) < MAX_PACKAGES and not names & HEAVY
    page = (ROOT / "notebooks" / "installation.md").read_text("utf-8")
    assert f"the base, {len(names) + 1} packages" in page
    assert list_requirements("all") >= HEAVY
    assert all(
        list_requirements(extra) <= list_requirements("all") for extra in EXTRAS if extra != "dev"
    )
    assert list_requirements("dev") > list_requirements("all")


def test_what_the_package_imports_is_required() -> None:
    """Anything that a module or function imports comes with the base or an extra."""
    imported = set()
    for path in (ROOT / "planner").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    brought_by, required = packages_distributions(), list_requirements("all")
    strangers = imported - sys.stdlib_module_names - {"planner"}
    assert len(strangers) > 20
    assert [
        name
        for name in strangers
        if not {canonicalize_name(one) for one in brought_by.get(name, ())} & required
    ] == []


IN_TURN = """
import contextlib, json, os, sys
from pathlib import Path
from planner.ui.cli import main

for folder, words in json.loads(sys.argv.pop()):
    os.chdir(folder)
    with open("stdout", "w") as out, open("stderr", "w") as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    Path("code").write_text(str(code))
"""


def run_in_turn(
    base: Path, folder: Path, commands: Iterable[str]
) -> Iterator[tuple[Path, int, str, str]]:
    """Run commands one after the other in one process; yield of each its folder, code and output."""
    jobs = []
    for place, command in enumerate(commands):
        (folder / str(place)).mkdir()
        jobs.append((str(folder / str(place)), write_command(folder / str(place), command)))
    ended = run(base, folder, "-c", IN_TURN, json.dumps(jobs))
    assert ended.returncode == 0, ended.stderr
    for place, _ in jobs:
        code, out, err = (Path(place, name).read_text() for name in ("code", "stdout", "stderr"))
        yield Path(place), int(code), out, err


@pytest.mark.slow
def test_commands_run_without_extras(base: Path, tmp_path: Path) -> None:
    ended = run_in_turn(base, tmp_path, BASE_COMMANDS)
    for (folder, code, out, err), (command, codes) in zip(
        ended, BASE_COMMANDS.items(), strict=True
    ):
        words = command.split()
        assert code in codes, command + out + err
        assert "Error" not in err
        for option in {"--out", "--requests"} & {*words}:
            assert (folder / words[words.index(option) + 1]).exists()


def test_what_needs_an_extra_names_it_in_one_line(base: Path, tmp_path: Path) -> None:
    ended = run_in_turn(base, tmp_path, EXTRA_COMMANDS)
    for (_, code, out, err), (subject, extra) in zip(ended, EXTRA_COMMANDS.values(), strict=True):
        assert (code, out) == (2, "")
        assert err == (
            f"headroom: {subject} needs the extra \"{extra}\": pip install 'headroom-planner[{extra}]'\n"
        )
