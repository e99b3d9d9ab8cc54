"""CONTRIBUTING.md can be followed: what it names is there, and its entries work as they stand."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from planner.calibration.benchmark_results import read_benchmark_results
from planner.core.errors import PlannerError

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = {part.splitlines()[0]: part for part in TEXT.split("\n## ")[1:]}
GPU, MODEL, ATTENTION, VERSION, CALIBRATION, FINDING, LIMIT = list(RECIPES)[1:]
COMMANDS = [
    shlex.split(command, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    for command in line.split("&&")
    if command.strip()
]


def house(folder: Path, recipe: str) -> dict[str, Path]:
    """A copy of the program and its catalogs in which the recipe's entries are at the ends of their files."""
    for name in ("planner", "catalogs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests" / "data").mkdir(parents=True)
    for name in ("test_models.py", "data/published_models.yaml"):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    changed = {}
    for block in re.findall(r"```(?:yaml|python)\n(.*?)```", RECIPES[recipe], re.DOTALL):
        name, anchor = re.match(r" *# (\S+?)(?:, after: (.*))?\n", block).groups()
        entry = "\n".join(line.removeprefix("   ") for line in block.splitlines()[1:]).rstrip()
        file, text = folder / name, (folder / name).read_text(encoding="utf-8")
        before, found, after = text.partition(f"{anchor}\n") if anchor else (text, "\n", "")
        assert found, anchor
        file.write_text(f"{before}{found}{entry}\n{after}", encoding="utf-8")
        changed[file.name] = file
    return changed


def test_a_new_limit_needs_its_row_and_its_values(tmp_path: Path) -> None:
    """plan.json states its figure, between those of the first and of the last token."""
    house(tmp_path, LIMIT)
    (command,) = [c for c in COMMANDS if c[:2] == ["headroom", "plan"] and "t100" in c[-1]]
    told = json.loads(run(tmp_path, [*command, "--json"]))
    (limit,) = (each for each in told["service_level"] if each["metric"] == "t100")
    found = told["predicted"]
    assert limit["limit_ms"] == 9000
    for at in ("mean", "p95"):
        first, hundred, whole = (found[f"{name}_ms"][at][0] for name in ("ttft", "t100", "e2e"))
        assert first < hundred <= whole
    asked = ["headroom", "check", *command[2:-1], "service_level.t100.p95=0.1"]
    assert "a p95 T100 of 0.1 ms is out of reach of any GPU" in run(tmp_path, asked)


def run(folder: Path, command: list[str]) -> str:
    """What a `headroom` command says in that copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    call = [sys.executable, "-m", "planner", *command[1:]]
    done = subprocess.run(
        call, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (GPU, [r"TEST-GPU-48GB +44.4 +864 .* vllm 0.8.0\+"]),
        (MODEL, [r"acme/New-8B +8.03 B +131,072 +bfloat16", r"model +acme/New-8B: 8.03 B parameters, context 131,072"]),
        (ATTENTION, [r"model +acme/Folded-8B: 8.03 B parameters"]),
        (VERSION, [r"engine +vllm 0.99.0\n"]),
        (FINDING, [r"risky: --max_batch_size|risky +--max_batch_size"]),
    ],
)  # fmt: skip
def test_the_commands_of_a_recipe_show_its_entry(
    recipe: str, said: list[str], tmp_path: Path
) -> None:
    looks = [
        c
        for c in COMMANDS
        if c[:2] in (["headroom", "list"], ["headroom", "check"], ["headroom", "lint"])
    ]
    before = [c for c in looks if shlex.join(c) in RECIPES[recipe]]
    house(tmp_path, recipe)
    assert len(before) == len(said)
    for command, expected in zip(before, said, strict=True):
        shown = run(tmp_path, command)
        assert re.search(expected, shown), shown
        assert "is not a known family" not in shown and "planned with the facts of" not in shown


def test_a_new_attention_is_a_class_and_a_test(tmp_path: Path) -> None:
    """The test that the recipe writes holds in a house with the class that it writes."""
    house(tmp_path, ATTENTION)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    options = ["-q", "-n0", "--noconftest", "-p", "no:cacheprovider", "-k", "folded"]
    call = [sys.executable, "-m", "pytest", *options, "tests/test_models.py"]
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_table_of_runs_can_be_fitted_to(tmp_path: Path) -> None:
    (block,) = re.findall(r"```csv\n(.*?)```", RECIPES[CALIBRATION], re.DOTALL)
    table, rows = tmp_path / "runs.csv", "\n".join(map(str.strip, block.splitlines()))
    with pytest.raises(PlannerError) as refused:
        table.write_text(rows.replace("RTX-4090", "RTX-4091"), encoding="utf-8")
        read_benchmark_results([table])
    (said,) = re.findall(r"`(runs\.csv, [^`]+)`", RECIPES[CALIBRATION])
    assert str(refused.value).startswith(said)
    table.write_text(rows, encoding="utf-8")
    points = read_benchmark_results([table]).points
    assert [(p.deployment.gpu.name, p.workload.concurrency, p.ttft, p.tpot) for p in points] == [
        ("RTX-4090", 1, pytest.approx(0.078), pytest.approx(0.0184)),
        ("RTX-4090", 32, pytest.approx(0.640), pytest.approx(0.0265)),
    ]


def test_every_file_and_test_that_is_named_exists() -> None:
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    words = {
        word
        for span in re.findall(r"`([^`]+)`|\]\(([^)#]+)", prose)
        for part in span
        for word in part.split()
    }
    words |= {word for command in COMMANDS for word in command}
    files = {
        word for word in words if re.fullmatch(r"[\w./-]+/[\w./-]*|[\w.-]+\.(md|yaml|toml)", word)
    }
    files -= {word for word in files if re.search(r"VERSION|PATH|^(acme|mine|v1)\b", word)}
    assert len(files) > 20
    assert [name for name in files if not (ROOT / name).exists()] == []
    tests = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    named = {word for word in words if re.fullmatch(r"test_\w+", word)}
    assert len(named) > 5
    assert [name for name in named if f"def {name}(" not in tests] == []
    published = (ROOT / "tests" / "data" / "published_models.yaml").read_text(encoding="utf-8")
    assert len(sections := re.findall(r"below\s+`(\w+:)`", prose)) == 3
    assert all(f"\n{section}\n" in published for section in sections)


def test_every_command_that_is_named_exists() -> None:
    targets = re.findall(
        r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    known = {
        "make": targets,
        "headroom": re.findall(r"^ +([a-z-]+)\b", run(ROOT, ["headroom", "--help"]), re.MULTILINE),
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tools = " ".join(project["optional-dependencies"]["dev"]).replace(
        "import-linter", "lint-imports"
    )
    for program, *arguments in COMMANDS:
        assert arguments[0] in known[program] if program in known else program in tools, program
