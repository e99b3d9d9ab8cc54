"""A reader moves controls in a real JupyterLab and sees what they change; a stranger's text does nothing."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from attacking_files import ATTACK, listen, write_attacks
from lab import CODE, PANEL, browser, chromium, jupyterlab, notebook7, run_notebook
from playwright.sync_api import Page
from shipped import answer_of

from planner.planning.scenario import load_scenario
from planner.planning.search import search_deployments
from planner.ui.notebook_files import NOTEBOOK_DIR
from planner.ui.plan_panel import build_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium() is None, reason="no Chromium or Chrome is installed on this machine"
    ),
]

IN_NOTEBOOK_7 = pytest.mark.skipif(
    importlib.util.find_spec("notebook") is None, reason="Jupyter Notebook 7 is not installed"
)
EITHER = pytest.mark.parametrize(
    "application", [jupyterlab, pytest.param(notebook7, marks=IN_NOTEBOOK_7)]
)


def test_a_slider_redraws_its_chart(tmp_path):
    shutil.copy(NOTEBOOK_DIR / "2-vram.ipynb", tmp_path)
    with jupyterlab(tmp_path) as address, browser() as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        run_notebook(page, address, "2-vram.ipynb")
        _move_slider(page)
        page.get_by_role(
            "button", name="Carry on with this"
        ).first.click()  # the whole chapter runs again
        page.get_by_role("button", name="Back to the plan").wait_for(timeout=60_000)
        assert "Error" not in page.locator(".jp-OutputArea").all_inner_texts()
        assert _find_elsewhere(requests, address) == []  # works with no network


def test_a_lesson_that_nobody_trusts_shows_its_charts(tmp_path):
    with jupyterlab(tmp_path) as address, browser(width=1280) as page:
        page.goto(f"{address}/tree/learn/1-kv-equation.ipynb?reset")
        picture = page.locator(".jp-OutputArea-output img").first
        picture.wait_for(timeout=90_000)
        assert picture.evaluate("it => it.naturalWidth") > 600
        assert "Cannot display" not in page.locator(".jp-Notebook").inner_text()


def test_a_lesson_judges_an_answer_and_redraws_for_another_model(tmp_path):
    """Before it has run, and where nobody trusts it, its tables are shown and no control is."""
    with jupyterlab(tmp_path) as address, browser() as page:
        page.goto(f"{address}/tree/learn/1-kv-equation.ipynb?reset")
        page.get_by_text("Run all cells, type a number").wait_for(timeout=90_000)
        run_notebook(page, address, "learn/1-kv-equation.ipynb")
        field = page.get_by_label("Your answer")
        for answer, said in (("100", "Not yet."), ("256 KiB", "Right: 256.")):
            field.fill(answer)
            field.press("Enter")
            page.get_by_text(said).wait_for(timeout=30_000)
        drawn = page.locator(".widget-html img").first
        before = drawn.get_attribute("src")
        page.get_by_label("Model").select_option("Qwen/Qwen3-4B")
        page.get_by_alt_text("Qwen/Qwen3-4B on three cards").wait_for(timeout=30_000)
        assert drawn.get_attribute("src") != before


@pytest.mark.parametrize("width", [1000, 1280, 1920])
def test_no_button_of_the_cockpit_covers_its_verdict(width, tmp_path, monkeypatch):
    """With all four: a question that was changed can be taken back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    with jupyterlab(tmp_path) as address, browser(width=width) as page:
        page.goto(f"{address}/tree/start.ipynb?reset")
        page.wait_for_selector(".headroom .head", timeout=240_000)
        page.locator("[data-gpu=L40S]").click()
        page.locator("[data-act=undo]").wait_for(timeout=60_000)
        verdict = page.locator(".verdict")
        texts = [verdict.locator(name).bounding_box() for name in (".head", ".say", ".meta")]
        for button in verdict.locator(".acts button").all():
            box = button.bounding_box()
            for text in texts:
                aside = box["x"] >= text["x"] + text["width"]
                assert aside or box["y"] >= text["y"] + text["height"]


def _move_slider(page: Page) -> None:
    """Move the first slider; returns when its chart is another."""
    before = page.locator(".widget-html svg").first.inner_html()
    page.locator(".widget-slider .noUi-handle").first.focus()
    page.keyboard.press("PageDown")
    page.wait_for_function(
        "before => document.querySelector('.widget-html svg').innerHTML !== before",
        arg=before,
        timeout=15_000,
    )


def _find_elsewhere(requests: list[str], address: str) -> list[str]:
    """Find the requests to other servers than that of `address`."""
    ours = (address.removesuffix("/lab"), "data:", "blob:")
    return [url for url in requests if not url.startswith(ours)]


@pytest.mark.exhaustive
@IN_NOTEBOOK_7
def test_the_notebooks_run_in_notebook_7(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    with notebook7(tmp_path) as address, browser(width=1440) as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        run_notebook(page, address, "start.ipynb")
        _wait_for(page, ".meta", "requests simulated")
        _type(page, "Model", "Qwen/Qwen3-8B")
        _wait_for(page, ".head", "1 \N{MULTIPLICATION SIGN} H100-SXM")
        run_notebook(page, address, "2-vram.ipynb")
        _move_slider(page)
        assert _find_elsewhere(requests, address) == []


@pytest.mark.exhaustive
def test_a_question_is_asked_saved_and_walked_through(tmp_path, monkeypatch):
    """Model, GPU, load, target and price change the figures to those of a fresh computation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    for name in ("start", "2-vram"):
        shutil.copy(NOTEBOOK_DIR / f"{name}.ipynb", tmp_path)
    with jupyterlab(tmp_path) as address, browser(width=1440, height=900) as page:
        errors: list[str] = []
        page.on(
            "console", lambda line: errors.append(line.text) if "headroom" in line.text else None
        )
        page.goto(f"{address}/tree/start.ipynb?reset")
        page.wait_for_selector(".headroom .head", timeout=240_000)  # it runs by itself
        assert page.evaluate(
            "document.querySelector('.hr-app').scrollWidth <= document.querySelector('.hr-app').clientWidth"
        )
        _type(page, "Model", "llama 4")
        page.locator(".wrong", has_text="meta-llama/Llama-4-Scout").wait_for()
        assert "answer to the question before" in page.locator(".verdict").inner_text()
        _type(page, "Model", "Qwen/Qwen3-8B")
        _wait_for(page, ".head", "1 \N{MULTIPLICATION SIGN} H100-SXM")
        page.get_by_role("button", name="L40S", exact=True).click()
        page.get_by_role("button", name="H100", exact=True).click()
        _wait_for(page, ".head", "L40S")
        page.get_by_role("button", name="Requests/s", exact=True).click()
        _type(page, "Requests/s, typed", "2")
        _type(page, "p95 TPOT limit", "0.1 s")
        _type(page, "Own price, $ per GPU-hour", "0.9")
        page.get_by_label("Prompt", exact=True).focus()
        page.keyboard.press("PageUp")
        page.wait_for_function(
            "/Meets|At risk|No plan/.test(document.querySelector('.pill').innerText)"
            " && !document.querySelector('.hr-asking')",
            timeout=240_000,
        )
        page.wait_for_timeout(QUIET_MS)
        page.get_by_role("button", name="Save", exact=True).click()
        page.get_by_role("button", name="Save as scenario").click()
        page.wait_for_selector(".headroom a[href='2-vram.ipynb']", timeout=15_000)
        saved = load_scenario(tmp_path / "my-question.yaml")
        assert saved.model == "Qwen/Qwen3-8B" and saved.workload.rate == 2
        assert [option.gpu.name for option in saved.gpus] == ["L40S"]
        assert saved.slo_targets[-1].seconds == 0.1
        assert saved.prices.user_prices == {"L40S": 0.9}
        assert saved.question == "What does it take to serve Qwen/Qwen3-8B?"
        plan = search_deployments(saved)
        wanted, shown = build_page(answer_of(plan)), page.locator(".a").inner_text()
        for text in (wanted["word"], wanted["head"], wanted["month"], wanted["hour"]):
            assert text in shown
        for target in wanted["targets"]:
            assert f"{target['value']}" in shown and target["status"] in shown
        assert wanted["commands"][0]["text"] in shown
        assert errors == []
        page.locator(".headroom a[href='2-vram.ipynb']").click()
        page.wait_for_function(
            "[...document.querySelectorAll('.jp-OutputArea')].some(it => /Qwen3-8B.* on"
            " .*L40S/.test(it.innerText))",
            timeout=240_000,
        )


def _type(page: Page, label: str, value: str) -> None:
    """Type into the field with this label, and enter it."""
    field = page.get_by_label(label, exact=True).first
    field.fill(value)
    field.press("Enter")


def _wait_for(page: Page, selector: str, text: str) -> None:
    """Wait until what `selector` shows has `text`."""
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)",
        arg=[f".headroom {selector}", text],
        timeout=120_000,
    )


@pytest.mark.exhaustive
def test_a_chapter_opens_at_its_top_without_code(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    shutil.copy(NOTEBOOK_DIR / "2-vram.ipynb", tmp_path)
    with jupyterlab(tmp_path) as address, browser(width=1400, height=900) as page:
        run_notebook(page, address, "2-vram.ipynb")
        page.wait_for_timeout(QUIET_MS)
        top = "document.querySelector('.jp-WindowedPanel-outer').scrollTop"
        assert page.evaluate(top) == 0
        code = page.locator(".jp-CodeCell .jp-Cell-inputWrapper")
        assert not any(each.is_visible() for each in code.all())
        page.get_by_role("button", name="Show code").click()
        assert code.first.is_visible()


RUNS_ALL = '<p class="headroom headroom-runs-all">Carry on</p>'
"""What a stranger's prose or output may hold: a thing to click."""
EVIL = (
    "<script>window.ran=1;fetch('URL/script')</script><iframe src='URL/iframe'></iframe>"
    "<img src='x:' onerror='window.ran=1'><svg onload='window.ran=1'></svg>"
    "<object data='URL/object'></object><embed src='URL/embed'><link rel=stylesheet href='URL/css'>"
    "<style>@import 'URL/style';</style><a href='javascript:void(window.ran=1)'>a link</a>"
)
"""What would run or fetch."""
PICTURES = (
    "<img src='URL/img'><video src='URL/video' poster='URL/poster'></video><audio src='URL/audio'></audio>"
    "<p style='background: url(URL/background)'>a</p>\n\n![a](URL/markdown)\n\n"
)
"""What JupyterLab shows of anybody: only the server's policy forbids to fetch it."""
CHART = {
    "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
    "data": {"url": "URL/data.json"},
    "layer": [
        {"mark": "point"},
        {"data": {"values": [{}]}, "mark": {"type": "image", "url": "URL/mark", "width": 9}},
    ],
}
"""A chart that JupyterLab draws of anybody's data."""
QUIET_MS = 2_000
"""How long a notebook is watched that nothing may run in."""


def _stranger(cells: list[dict], marker: Path) -> dict:
    """A stranger's notebook: `cells`, one that writes the file `marker`, and two places to click."""
    code = f"from pathlib import Path\n\nPath({str(marker)!r}).touch()"
    shown = {"output_type": "display_data", "metadata": {}, "data": {"text/html": RUNS_ALL}}
    mine = [
        {
            "cell_type": "code",
            "id": "code",
            "metadata": {},
            "source": code,
            "outputs": [shown],
            "execution_count": None,
        },
        {"cell_type": "markdown", "id": "prose", "metadata": {}, "source": RUNS_ALL},
    ]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return {
        "cells": [*cells, *mine],
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


@pytest.mark.exhaustive
@EITHER
def test_a_strangers_notebook_does_not_run_by_itself(application, tmp_path):
    """Neither under a name of ours, nor with our code beside its own, nor by a click on what it shows."""
    ran = tmp_path / "ran"
    genuine = json.loads((NOTEBOOK_DIR / "start.ipynb").read_text(encoding="utf-8"))["cells"]
    strangers = {"start.ipynb": [], "2-vram.ipynb": [], "theirs/start.ipynb": genuine}
    (tmp_path / "theirs").mkdir()
    for name, cells in strangers.items():
        (tmp_path / name).write_text(json.dumps(_stranger(cells, ran)), encoding="utf-8")
    with application(tmp_path) as address, browser() as page:
        for name in strangers:
            page.goto(f"{address}/tree/{name}?reset")
            page.wait_for_function(
                f"{PANEL}?.sessionContext?.session?.kernel?.status === 'idle'", timeout=90_000
            )
            for place in ("", ".jp-MarkdownCell", ".jp-CodeCell .jp-OutputArea"):
                if place:
                    page.locator(f"{place} .headroom-runs-all").last.click()
                page.wait_for_timeout(QUIET_MS)
                assert not ran.exists(), (name, place)
            assert page.evaluate(f"{CODE}.every(cell => !cell.model.executionCount)"), name
        run_notebook(page, address, "1-framework.ipynb")  # a genuine one beside them runs


@pytest.mark.exhaustive
@EITHER
def test_what_a_strangers_notebook_shows_runs_and_fetches_nothing(application, tmp_path):
    """Neither its prose nor its outputs, without a click or by one on a link."""
    with listen() as (stranger, fetched):
        served_by_us = application is jupyterlab
        evil = (RUNS_ALL + PICTURES * served_by_us + EVIL).replace("URL", stranger)
        notebook = _stranger([], tmp_path / "ran")
        outputs = notebook["cells"][0]["outputs"]
        outputs[0]["data"]["text/html"] = evil
        if served_by_us:
            chart = json.loads(json.dumps(CHART).replace("URL", stranger))
            data = {"application/vnd.vegalite.v5+json": chart}
            outputs.append({**outputs[0], "data": data})
        notebook["cells"][1]["source"] = f"{evil}\n\n[a link](javascript:void(window.ran=1))"
        (tmp_path / "start.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
        with application(tmp_path) as address, browser() as page:
            page.goto(f"{address}/tree/start.ipynb?reset")
            page.wait_for_function(
                f"{PANEL}?.sessionContext?.session?.kernel?.status === 'idle'", timeout=90_000
            )
            for place in (".jp-MarkdownCell", ".jp-OutputArea"):
                page.locator(f"{place} .headroom-runs-all").first.wait_for(timeout=20_000)
            shown = ".jp-RenderedHTMLCommon"
            page.evaluate(f"document.querySelectorAll('{shown} a').forEach(it => it.click())")
            page.wait_for_timeout(QUIET_MS)
            assert page.evaluate("window.ran") is None and not (tmp_path / "ran").exists()
    assert fetched == []


ALIVE = """() => [...document.querySelectorAll('.jp-OutputArea *')].filter(it =>
  it.matches('script, iframe, object, embed, img, [href^="javascript:" i], mjx-container [href]')
  || [...it.attributes].some(attribute => attribute.name.startsWith('on'))
  || /stranger/.test(it.getAttribute('href') || it.getAttribute('src'))).map(it => it.outerHTML)"""
"""What is there of a text that was taken so. Headroom's own outputs have none of it."""


@pytest.mark.exhaustive
@EITHER
def test_texts_of_the_users_files_are_shown_as_text(application, tmp_path, monkeypatch):
    """In the cockpit and the chapters: names of files and models, questions, versions, lines of a log."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    place = tmp_path / "notebooks"
    place.mkdir()
    with listen() as (stranger, fetched):
        question = write_attacks(place, stranger)
        with application(place) as address:
            names = ["start", "0-summary", "2-vram", "6-deploy", "compare", "fleet"]
            for name in names[: 2 if application is notebook7 else None]:  # it renders alike
                with browser(width=1440) as page:
                    requests: list[str] = []
                    page.on("request", lambda request, seen=requests: seen.append(request.url))
                    run_notebook(page, address, f"{name}.ipynb")
                    if name == "start":
                        _wait_for(page, ".meta", "requests simulated")
                        assert page.get_by_label("Model", exact=True).input_value().endswith(ATTACK)
                        page.get_by_role("button", name="Save", exact=True).click()
                        assert page.get_by_label("Title").input_value() == question
                        page.get_by_label("Start from").select_option("wrong.yaml")
                        _wait_for(page, "[data-field=start]", ATTACK)
                    if name == "2-vram":
                        _type(page, "start-up log", "vllm.log")
                        shown = "text => document.body.innerText.includes(text)"
                        page.wait_for_function(shown, arg=f"What this log says of {ATTACK}")
                    if name == "0-summary":
                        assert question in page.locator(".jp-Notebook").inner_text()
                    assert ATTACK in page.locator(".jp-Notebook").inner_text()
                    page.wait_for_timeout(QUIET_MS)
                    alive = page.evaluate(ALIVE.replace("stranger", stranger.rpartition("/")[2]))
                    assert (page.evaluate("window.ran"), alive) == (None, []), name
                    assert _find_elsewhere(requests, address) == [], name
    assert fetched == []


@pytest.mark.exhaustive
def test_the_cockpit_imports_no_module_of_the_notebooks_folder(tmp_path, monkeypatch):
    """Neither its kernel nor the process that replays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    place = tmp_path / "theirs"
    place.mkdir()
    shutil.copy(NOTEBOOK_DIR / "start.ipynb", place)
    modules = ("planner", "ipywidgets", "multiprocessing", "pickle")
    for name in modules:
        (place / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    with jupyterlab(tmp_path) as address, browser(width=1400, height=1400) as page:
        page.goto(f"{address}/tree/theirs/start.ipynb?reset")
        page.wait_for_function(
            "document.querySelector('.headroom .meta')?.innerText.includes('requests simulated')",
            timeout=240_000,
        )
        assert not (tmp_path / "ran").exists()
