"""Plant small faults in a copy of the package, one at a time, and count those that tests notice.

`make mutants` runs it: `python tests/mutants.py --seed 1 --count 60`. Places are drawn by the seed,
as many of each area; a fault is an operator, a comparison, a constant or a branch that is another.
Of each module the test files run that import it, else those of its area. Faults that survive are
printed with their lines: a test that fails for them has to come from a fact, not from the code.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
AREAS = {
    "memory": ("memory", ("test_memory.py", "test_kv.py", "test_planted_faults.py")),
    "parallelism": ("parallelism", ("test_parallelism.py", "test_layouts.py")),
    "latency": ("latency", ("test_step_costs.py", "test_latency.py")),
    "queueing": ("queueing", ("test_tails.py", "test_closed_form_physics.py")),
    "probability": ("planning/tolerance.py", ("test_probability.py", "test_planted_faults.py")),
    "planning": ("planning", ("test_search.py", "test_candidate.py")),
    "lint": ("tools/lint", ("test_posts.py", "test_lint_sources.py", "test_lint.py")),
    "deploy": ("deploy", ("test_deploy.py", "test_manifests.py")),
}
"""Area -> what of the package it is, and the test files of its modules that no test imports."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
LIMIT_S = 600
"""Seconds after which a test run is given up, without a verdict."""


def list_places(tree: ast.Module) -> list[ast.AST]:
    """List the nodes of functions that can be made wrong, without their signatures and docstrings."""
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
                    is_choice = isinstance(node, ast.BinOp | ast.BoolOp | ast.IfExp | ast.If)
                    is_order = isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS
                    found += [node] if is_number or is_choice or is_order else []
    return found


def plant(node: ast.AST) -> bool:
    """Make a node wrong; return whether it could be."""
    if isinstance(node, ast.Constant):
        node.value = (node.value or 0.5) * 2 if isinstance(node.value, float) else node.value + 1
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[assignment]
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        is_text = isinstance(node, ast.BinOp) and isinstance(
            node.left, ast.Constant | ast.JoinedStr
        )
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        return not is_text
    else:
        return False
    return True


def draw_faults(seed: int, count: int) -> Iterator[tuple[str, Path, int, str, str]]:
    """Yield area, module, line, and source before and after for `count` faults."""
    rng, names = random.Random(seed), list(AREAS)
    for number in range(count):
        area = names[number % len(names)]
        place = ROOT / "planner" / AREAS[area][0]
        modules = sorted(place.glob("*.py")) if place.is_dir() else [place]
        while True:
            module = rng.choice(modules)
            tree = ast.parse(module.read_text(encoding="utf-8"))
            node = rng.choice(list_places(tree) or [tree])
            before = ast.unparse(node) if isinstance(node, ast.stmt | ast.expr) else ""
            if plant(node):
                yield area, module.relative_to(ROOT), node.lineno, before, ast.unparse(tree)  # type: ignore[attr-defined]
                break


def choose_tests(area: str, module: Path) -> list[str]:
    """Return the test files of a module: those that import it, the smallest first, and its area's."""
    name = ".".join(module.with_suffix("").parts)
    importing = [
        path
        for path in (ROOT / "tests").glob("test_*.py")
        if re.search(rf"\b{re.escape(name)}\b", path.read_text(encoding="utf-8"))
    ]
    importing.sort(key=lambda path: path.stat().st_size)
    return list(dict.fromkeys([*(path.name for path in importing[:3]), *AREAS[area][1]]))


def find_noticing(copy: Path, tests: list[str]) -> str | None:
    """Return which test of a copy notices its fault; empty if all pass, None without a verdict."""
    environment = {**os.environ, "PYTHONPATH": f"{copy}:{copy / 'tests'}"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow and not exhaustive"]
    command += ["-p", "no:cacheprovider", *(f"tests/{name}" for name in tests)]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[0] if failed else "" if done.returncode == 0 else f"exit {done.returncode}"


def main() -> int:
    """Plant the faults that the seed draws, and print what noticed each; 1 if over one in seven lives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many")
    options = parser.parse_args()
    started, alive, tried = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "reports", "*.part")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for area, module, line, before, source in draw_faults(options.seed, options.count):
            if time.monotonic() - started > options.seconds:
                break
            kept = (copy / module).read_text(encoding="utf-8")
            (copy / module).write_text(source, encoding="utf-8")
            noticed = find_noticing(copy, choose_tests(area, module))
            (copy / module).write_text(kept, encoding="utf-8")
            tried, alive = tried + (noticed is not None), alive + (noticed == "")
            verdict = f"no verdict in {LIMIT_S} s" if noticed is None else "SURVIVED"
            verdict = f"noticed by {noticed}" if noticed else verdict
            print(
                f"{area:12} {module}:{line} {before.splitlines()[0]:.70} -> {verdict}", flush=True
            )
    print(f"{tried - alive} of {tried} faults were noticed, in {time.monotonic() - started:.0f} s")
    return int(7 * alive > tried)


if __name__ == "__main__":
    sys.exit(main())
