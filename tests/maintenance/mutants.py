"""Plant small faults in the package, one at a time, and count those that tests notice.

`make mutants` runs it: `python tests/maintenance/mutants.py --seed 1 --count 60`. Places are drawn by the seed,
as many of each area; a fault is an operator, a comparison, a constant or a branch that is another.
The quick tests are collected once, without the longest files. A fork of that process then runs
them all, and notes which reach which place; another one for each fault runs those that reach its
place, the shortest first, with the code of its function exchanged. Commands that tests start as
processes of their own have no fault. What survives is printed with its line: a test that fails for
it has to come from a fact, not from the code. With `--record FILE` the first run is kept, for
another `--only 3 17`.
"""

import argparse
import ast
import gc
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[2]
AREAS = {
    "memory": "memory", "parallelism": "parallelism", "latency": "latency", "queueing": "queueing",
    "probability": "planning/tolerance.py", "planning": "planning", "lint": "tools/lint",
    "deploy": "deploy",
}  # fmt: skip
"""Area -> what of the package it is."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
LIMIT_S, RECORD_LIMIT_S = 600, 3600
"""Seconds after which the tests of one fault, or of none, are given up."""
TESTS_S = 100
"""Seconds of tests, as they took without a fault, that one fault is given."""


class Fault(NamedTuple):
    """A place, as its number in its module, and what stands there."""

    area: str
    module: Path
    place: int
    line: int
    before: str


class Record(NamedTuple):
    """What tests took and failed without faults, and those that reach each fault's place."""

    seconds: dict[str, float]
    failed: list[str]
    reaching: list[list[str]]


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


def draw_faults(seed: int, count: int) -> Iterator[Fault]:
    """Yield `count` faults, as many of each area."""
    rng, names = random.Random(seed), list(AREAS)
    for number in range(count):
        area = names[number % len(names)]
        folder = ROOT / "planner" / AREAS[area]
        modules = sorted(folder.glob("*.py")) if folder.is_dir() else [folder]
        while True:
            module = rng.choice(modules)
            tree = ast.parse(module.read_text(encoding="utf-8"))
            places = list_places(tree)
            node = rng.choice(places or [tree])
            before = ast.unparse(node).partition("\n")[0]
            if plant(node):
                place, path = places.index(node), module.relative_to(ROOT)
                yield Fault(area, path, place, node.lineno, before)  # type: ignore[attr-defined]
                break


def exchange_code(module: Path, tree: ast.Module) -> None:
    """Let the functions of a loaded module run the code of another source with the same lines."""
    path = str(ROOT / module)
    compiled = list_code(compile(ast.fix_missing_locations(tree), path, "exec"))
    codes = {(code.co_qualname, code.co_firstlineno): code for code in compiled}
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == path:
            own = function.__code__
            function.__code__ = codes.get((own.co_qualname, own.co_firstlineno), own)


def list_code(code: CodeType) -> list[CodeType]:
    """List the code of all functions of a module or of a function."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return [*inner, *(part for held in inner for part in list_code(held))]


def plant_probes(faults: Sequence[Fault]) -> None:
    """Let the statements with the faults' places call `reach`, before they run."""
    for module in {fault.module for fault in faults}:
        tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
        places = list_places(tree)
        values = [value for node in ast.walk(tree) for _, value in ast.iter_fields(node)]
        blocks = [block for block in values if isinstance(block, list) and block]
        for number, fault in enumerate(faults):
            if fault.module == module:
                holding = [
                    (block, statement)
                    for block in blocks
                    for statement in block
                    if isinstance(statement, ast.stmt)
                    and any(part is places[fault.place] for part in ast.walk(statement))
                ]
                block, statement = holding[-1]  # `ast.walk` goes from outer blocks to inner ones
                probe = ast.parse(f"__import__('sys').modules['planner'].reach({number})").body[0]
                block.insert(block.index(statement), ast.copy_location(probe, statement))
        exchange_code(module, tree)


def plant_fault(fault: Fault) -> None:
    """Make the fault's place wrong in the loaded module."""
    tree = ast.parse((ROOT / fault.module).read_text(encoding="utf-8"))
    plant(list_places(tree)[fault.place])
    exchange_code(fault.module, tree)


def run_tests(items: Sequence[pytest.Item]) -> Iterator[tuple[str, float, bool]]:
    """Run tests, and yield of each its name, its seconds and whether it failed."""
    for item, following in zip(items, [*items[1:], None], strict=False):
        reports = runtestprotocol(item, nextitem=following, log=False)
        failed = any(report.failed for report in reports)
        yield item.nodeid, sum(report.duration for report in reports), failed


def record(items: Sequence[pytest.Item], faults: Sequence[Fault]) -> Record:
    """Run all tests, and note which of them reach which fault's place."""
    reached: set[int] = set()
    sys.modules["planner"].reach = reached.add  # type: ignore[attr-defined]
    plant_probes(faults)
    found = Record({}, [], [[] for _ in faults])
    for name, seconds, failed in run_tests(items):
        found.seconds[name] = seconds
        found.failed.extend([name] * failed)
        for number in reached:
            found.reaching[number].append(name)
        reached.clear()
    return found


def choose_tests(recorded: Record, number: int) -> list[str]:
    """Choose what to run for a fault: of files with short tests first, what reaches its place."""
    took = recorded.seconds
    names = [name for name in recorded.reaching[number] if name not in recorded.failed]
    files: dict[str, list[str]] = {}
    for name in sorted(names, key=took.__getitem__):
        files.setdefault(name.partition("::")[0], []).append(name)
    chosen, total = list[str](), 0.0
    for name in (name for held in files.values() for name in held):
        if total + took[name] <= TESTS_S:
            chosen, total = [*chosen, name], total + took[name]
    return chosen


def find_noticing(items: Sequence[pytest.Item], fault: Fault) -> str:
    """Return which test notices a fault, or nothing."""
    plant_fault(fault)
    return next((name for name, _, failed in run_tests(items) if failed), "")


def run_in_child(task: Callable[..., Any], *arguments: Any, limit_s: int = LIMIT_S) -> Any:
    """Return what `task` does in a fork of this process; None if it dies or takes too long.

    What it computed is gone with it, in memory and in the folder of kept plans.
    """
    reader, writer = os.pipe()
    if not (child := os.fork()):
        signal.alarm(limit_s)
        try:
            with os.fdopen(writer, "w") as answer:
                json.dump(task(*arguments), answer)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    for path in Path(os.environ["XDG_CACHE_HOME"]).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return json.loads(text) if text else None


class Planting:
    """In the place of pytest's own loop: all tests once without a fault, then those of each fault."""

    def __init__(self, faults: Sequence[Fault], only: Sequence[int], kept: Path | None) -> None:
        self.faults, self.only, self.kept = faults, only, kept
        self.alive = self.tried = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Print of each fault what notices it."""
        longest = {f"test_{name}.py" for name in sys.modules["conftest"].LONGEST}
        short = [item for item in session.items if item.path.name not in longest]
        items = {item.nodeid: item for item in short}
        if self.kept and self.kept.exists():
            found = json.loads(self.kept.read_text(encoding="utf-8"))
        else:
            found = run_in_child(record, short, self.faults, limit_s=RECORD_LIMIT_S)
        if self.kept:
            self.kept.write_text(json.dumps(found), encoding="utf-8")
        recorded = Record(*found)
        for number in self.only:
            fault, chosen = self.faults[number], choose_tests(recorded, number)
            tests = [items[name] for name in chosen if name in items]
            noticing = run_in_child(find_noticing, tests, fault)
            self.tried += noticing is not None
            self.alive += noticing == ""
            counts = f"{len(tests)} of {len(recorded.reaching[number])} tests that reach it"
            verdict = f"noticed by {noticing}" if noticing else f"SURVIVED {counts}"
            verdict = verdict if noticing is not None else "no verdict"
            where = f"{number} {fault.area} {fault.module}:{fault.line}"
            print(f"{where} {fault.before:.70} -> {verdict}", file=sys.stderr, flush=True)
        return True


def main() -> int:
    """Plant the faults that the seed draws, and print what noticed each; 1 if over one in seven lives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument(
        "--only", type=int, nargs="+", help="of these, the faults with these numbers"
    )
    parser.add_argument(
        "--record", type=Path, help="keep in this file which tests reach which place"
    )
    options = parser.parse_args()
    started, faults = time.monotonic(), list(draw_faults(options.seed, options.count))
    planting = Planting(faults, options.only or range(len(faults)), options.record)
    os.chdir(ROOT)
    pytest.main(
        ["-q", "-s", "-m", "not slow and not exhaustive", "-p", "no:cacheprovider",],
        plugins=[planting],
    )  # fmt: skip
    noticed = planting.tried - planting.alive
    print(f"{noticed} of {planting.tried} noticed, in {time.monotonic() - started:.0f} s")
    return int(7 * planting.alive > planting.tried)


if __name__ == "__main__":
    sys.exit(main())
