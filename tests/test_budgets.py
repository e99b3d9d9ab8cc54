"""The package stays small: statements by folder, lines with data, lines of tests, as `budgets.toml` allows."""

import ast
import tomllib
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "planner"
BUDGETS = tomllib.loads((TESTS / "budgets.toml").read_text(encoding="utf-8"))
MAINTAINED = {".py", ".j2", ".yaml", ".yml", ".typ", ".lua", ".js", ".css", ".csv", ".md"}
"""Endings of what people maintain by hand in the package."""


def get_folder(path: Path) -> str:
    """The folder of the package that `path` counts for; each companion is one of its own."""
    parts = path.relative_to(PACKAGE).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("tools",) else 1]) or "."


def count_statements(path: Path) -> int:
    """Statements of the syntax tree, docstrings and imports included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def count_lines(*paths: Path) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def test_every_folder_keeps_its_budget_of_statements() -> None:
    counts: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        counts[get_folder(path)] += count_statements(path)
    assert {folder for folder in counts if counts[folder]} == set(BUDGETS["statements"])
    above = {
        folder: f"{count}, budget {BUDGETS['statements'][folder]}"
        for folder, count in counts.items()
        if count > BUDGETS["statements"].get(folder, 0)
    }
    assert above == {}


def test_package_and_tests_keep_their_budgets_of_lines() -> None:
    maintained = (path for path in PACKAGE.rglob("*") if path.suffix in MAINTAINED)
    assert count_lines(*maintained) <= BUDGETS["lines"]["package"]
    collected = (path for path in TESTS.rglob("*.py") if "maintenance" not in path.parts)
    assert count_lines(*collected) <= BUDGETS["lines"]["tests"]


def test_statements_count_bodies_and_docstrings(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""Said."""\nimport os\n\n\ndef run():\n    if os:\n        return (1,\n            2)\n'
    )
    assert count_statements(module) == 5
