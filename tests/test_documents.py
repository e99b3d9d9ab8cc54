"""What documents say is so: the examples of the method run, and every link within the repository leads somewhere."""

import doctest
import json
import re
import subprocess
import sys
import tomllib
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


def test_a_plan_needs_no_more_than_make_has_installed_when_it_compiles_the_replay() -> None:
    """The Makefile plans while the rest is installed; where that fails, the first answer waits for the compiler."""
    early = re.search(
        r"\(INSTALL\) ((?:[a-z0-9]+ ?)+)$",
        (ROOT / "Makefile").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    names = {re.split(r"[^\w-]", one)[0] for one in needed} - {
        "numpy",
        *(early[1].split() if early else ()),
    }
    blocked = f"import sys; sys.modules.update(dict.fromkeys({sorted(names)!r}))"
    code = f"{blocked}; import planner; planner.plan(planner.load_scenario('edge-8b-24gb'))"
    assert early and "scipy" in names
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        ).stderr
        == ""
    )


def test_the_method_computes_what_it_says() -> None:
    found = doctest.testfile(str(ROOT / "notebooks" / "method.md"), module_relative=False)
    assert found.attempted > 20 and not found.failed


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
