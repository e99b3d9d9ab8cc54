"""What documents say is so: the examples of the method run, and every link within the repository leads somewhere."""

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def documents() -> list[Path]:
    places = [
        *ROOT.glob("*.md"),
        *(path for folder in ("notebooks", "reports") for path in (ROOT / folder).rglob("*")),
    ]
    return [
        path
        for path in places
        if path.suffix in (".md", ".ipynb") and ".ipynb_checkpoints" not in path.parts
    ]


def prose(document: Path) -> str:
    text = document.read_text(encoding="utf-8")
    if document.suffix == ".md":
        return text
    return "\n".join(
        "".join(cell["source"])
        for cell in json.loads(text)["cells"]
        if cell["cell_type"] == "markdown"
    )


def test_the_method_computes_what_it_says() -> None:
    found = doctest.testfile(str(ROOT / "notebooks" / "method.md"), module_relative=False)
    assert found.attempted > 20 and not found.failed


FORMULAS = [
    path
    for folder in ("memory", "latency", "parallelism")
    for path in sorted((ROOT / "planner" / folder).glob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", FORMULAS, ids=lambda path: path.stem)
def test_a_formula_computes_its_example(path: Path) -> None:
    module = importlib.import_module(f"planner.{path.parent.name}.{path.stem}")
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


@pytest.mark.parametrize(
    "document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_links_lead_somewhere(document: Path) -> None:
    inside = [link.partition("#")[0] for link in LINK.findall(prose(document)) if "://" not in link]
    missing = [
        link
        for link in inside
        if link and not link.startswith("mailto:") and not (document.parent / link).exists()
    ]
    assert not missing
