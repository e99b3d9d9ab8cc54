"""What a user's text looks like is what it shows: nothing in it runs, links or is fetched, wherever it is rendered."""

import os
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from attacking_files import ATTACK, listen, write_attacks
from IPython.display import Markdown
from markdown_it import MarkdownIt
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pypdf import PdfReader
from shipped import sampled

from planner.core.errors import PlannerError
from planner.core.text import escape_markdown
from planner.core.versions import Version, is_nightly
from planner.deploy import render_artifacts
from planner.engines.cli_options import get_cli_options
from planner.engines.deployment import deploy_on
from planner.engines.engine import get_engine
from planner.planning.prediction import predict
from planner.tools.lint.report import lint
from planner.ui import cli, pdf_report, typesetting
from planner.ui.notebook_files import NOTEBOOK_DIR, list_chapter_notebooks
from planner.ui.notebook_widgets import escape_html
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

PAYLOADS = (
    "<img src=x onerror=alert(1)>",
    "<iframe src='http://127.0.0.1:9/'></iframe>",
    "[a](javascript:alert(1))",
    "![a](http://127.0.0.1:9/b.png)",
    r"\(\require{html}\href{javascript:alert(1)}{a}\)",
    "`b` **c** $d$",
    "${HOME}",
)
"""Texts that would run, fetch, link, or change if they were not taken as text."""


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_version_is_a_pattern(payload: str) -> None:
    for version in (f"nightly{payload}", f"nightly-{payload}", f"0.20.2+{payload}", payload):
        with pytest.raises(PlannerError, match=r"version|nightly"):
            get_engine("vllm", version)
        with pytest.raises(PlannerError, match=r"version|nightly"):
            get_cli_options("vllm", version)
        for option in ({"version": version}, {"to": version}):
            with pytest.raises(PlannerError, match=r"^--(engine-version|to): "):
                lint("vllm serve Qwen/Qwen3-8B", **option)


@pytest.mark.parametrize(
    "tag",
    [
        "nightly",
        "nightly-5b8c30d62b754b575e043ce2fc0dcbf8a64f6306",
        "nightly-aarch64",
    ],
)
def test_tags_of_nightly_images_are_versions(tag: str) -> None:
    assert is_nightly(tag) and get_engine("vllm", tag).version == tag
    report = lint("vllm serve Qwen/Qwen3-8B --enable-prefix-caching", tag)
    assert report.commands[0].checked.version == get_cli_options("vllm", "nightly").version
    assert f"vllm {tag}" in str(report)


@pytest.mark.parametrize("text", ["0.11.0rc2.dev30+g7f8e", "v0.9.0.post1", "1.3.0rc25", "0.20"])
def test_builds_between_releases_are_versions(text: str) -> None:
    assert str(Version.parse(text)) == text


@pytest.mark.parametrize("payload", PAYLOADS)
def test_markdown_shows_text_as_it_is(payload: str) -> None:
    rendered = MarkdownIt("commonmark", {"html": True}).render(escape_markdown(payload))
    tokens = MarkdownIt("commonmark", {"html": True}).parseInline(escape_markdown(payload))
    kinds = {token.type for token in tokens[0].children or ()}
    assert kinds <= {"text", "text_special"}, rendered
    assert "".join(token.content for token in tokens[0].children or ()) == payload


@pytest.mark.parametrize("payload", PAYLOADS)
def test_files_for_people_hold_no_markup_of_a_model_name(payload: str) -> None:
    plain, evil = (
        _write_checklist_and_runbook(name) for name in ("meta-llama/Llama-3.1-8B", payload)
    )
    for expected, text in zip(plain, evil, strict=True):
        parse = MarkdownIt("commonmark", {"html": True}).parse
        kinds = [[token.type for token in parse(written)] for written in (expected, text)]
        assert kinds[0] == kinds[1]
        html = [MarkdownIt("commonmark", {"html": True}).render(part) for part in (expected, text)]
        tags = [re.findall(r"</?\w+", part) for part in html]
        assert tags[0] == tags[1]


def _write_checklist_and_runbook(name: str) -> list[str]:
    deployment = deploy_on("meta-llama/Llama-3.1-8B-Instruct", "H100")
    deployment = replace(deployment, model=replace(deployment.model, name=name))
    lengths = LengthDistribution.from_constant(500), LengthDistribution.from_constant(100)
    files = render_artifacts(predict(deployment, Workload(*lengths, rate=1.0), quick=True), ())
    return [files["checklist.md"], files["runbook.md"]]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_formulas_in_html_are_text(payload: str) -> None:
    """MathJax joins no text across elements, so a delimiter in one of its own opens nothing."""
    html = escape_html(payload)
    assert not re.search(r"(?<!>)[$\\]|[$\\](?!</span>)", html)
    assert not re.search(r"<(?!/?span>)", html)


def test_a_report_fetches_nothing_and_links_only_to_the_web(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("swordfish")
    evil = (
        "[b](javascript:alert(1)) [c](file:///etc/passwd)"
        f" <a href='java&#115;cript:alert(2)'>d</a> <embed src='file://{secret}'>"
        " [e](https://docs.vllm.ai) <object data='http://127.0.0.1:9/'></object>"
        f" <iframe src='file://{secret}'></iframe>"
    )
    cells = [
        new_markdown_cell(evil),
        new_code_cell(outputs=[new_output("display_data", {"text/markdown": Markdown(evil).data})]),
        new_code_cell(outputs=[new_output("display_data", {"text/html": f"<p>{evil}</p>"})]),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "a.ipynb")
    typst = typesetting.convert_notebook(tmp_path / "a.ipynb", tmp_path, ())
    assert set(re.findall(r'#link\("([^"]*)', typst)) == {"https://docs.vllm.ai"}
    assert "swordfish" not in typst and "#raw(lang: html" not in typst


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
