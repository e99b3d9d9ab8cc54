"""What `test_evil_twins.py` looks at in small, more widely."""

import os
from pathlib import Path

import pytest
from attacking_files import ATTACK, listen, write_attacks
from pypdf import PdfReader
from shipped import sampled

from planner.ui import cli, pdf_report
from planner.ui.notebook_files import NOTEBOOK_DIR, list_chapter_notebooks

TWO_CHAPTERS = [NOTEBOOK_DIR / f"{name}.ipynb" for name in ("0-summary", "6-deploy")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "chapters", sampled([TWO_CHAPTERS, list_chapter_notebooks()], [TWO_CHAPTERS]), ids=len
)
def test_a_report_shows_the_texts_of_a_users_files_as_text(
    chapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf_report, "select_chapters", lambda _: chapters)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one kernel: other tests have the other cores
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    with listen() as (stranger, fetched):
        write_attacks(tmp_path, stranger)
        assert cli.main(["report", "current.yaml"]) == 0
    (report,) = tmp_path.rglob("report.pdf")
    pages = PdfReader(report).pages
    text = "".join("".join(page.extract_text() for page in pages).split())
    assert "".join(ATTACK.split()) in text and f"![a]({stranger}/m)" in text
    links = [note.get_object().get("/A", {}) for page in pages for note in page.get("/Annots", ())]
    addresses = [link.get("/URI", "") for link in links]
    assert not any(stranger in it or it.startswith("javascript:") for it in addresses)
    assert fetched == []
