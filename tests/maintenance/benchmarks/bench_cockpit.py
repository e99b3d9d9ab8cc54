"""How fast the cockpit is in a browser: medians of a real JupyterLab.

`pytest tests/maintenance/benchmarks/bench_cockpit.py`
"""

from __future__ import annotations

import shutil
from itertools import cycle
from pathlib import Path

import pytest
from lab import browser, chromium, jupyterlab
from playwright.sync_api import Page
from pytest_benchmark.fixture import BenchmarkFixture

from planner.ui.pdf_report import NOTEBOOK_DIR

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no Chromium or Chrome is installed on this machine"
)
TIMED = """delta => new Promise(done => {
  const shown = document.querySelector('.headroom');
  const sliders = ['Users', 'Requests/s'].map(name => shown.querySelector(`input[type=range][aria-label="${name}"]`));
  const slider = sliders.find(each => each && each.offsetParent), start = performance.now();
  const charts = () => [...shown.querySelectorAll('svg')].map(drawn => drawn.innerHTML).join('');
  const old = charts();
  new MutationObserver((_, watching) => {
    if (charts() === old || charts() === '') return;
    watching.disconnect();
    requestAnimationFrame(() => done((performance.now() - start) / 1000));
  }).observe(shown, {subtree: true, childList: true, characterData: true});
  slider.value = +slider.value + delta;
  for (const kind of ['input', 'change']) slider.dispatchEvent(new Event(kind, {bubbles: true}));
})"""
"""Seconds from a move of the load's slider until another chart is painted."""
SIMULATED = "document.querySelector('.headroom .meta').innerText.includes('requests simulated')"


@pytest.fixture
def cockpit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A page of a server over the cockpit's notebook, with its address; nothing is kept from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    shutil.copy(NOTEBOOK_DIR / "start.ipynb", tmp_path)
    with jupyterlab(tmp_path) as address, browser(width=1400, height=1400) as page:
        yield page, f"{address}/tree/start.ipynb?reset"


def answered(page: Page, address: str) -> None:
    """Open the cockpit and wait for its first answer."""
    page.goto(address)
    page.wait_for_selector(".headroom svg", timeout=240_000)


def test_cold_open(benchmark: BenchmarkFixture, cockpit) -> None:
    benchmark.pedantic(answered, args=cockpit, rounds=1)


def test_open_again(benchmark: BenchmarkFixture, cockpit, tmp_path: Path) -> None:
    """From another server, as on the next day: the plan is kept."""
    answered(*cockpit)
    page, _ = cockpit
    with jupyterlab(tmp_path) as address:
        opened = (page, f"{address}/tree/start.ipynb?reset")
        benchmark.pedantic(answered, args=opened, rounds=1)


def test_slider_to_picture(benchmark: BenchmarkFixture, cockpit) -> None:
    page, address = cockpit
    answered(page, address)
    deltas = cycle([40, -40])

    def moved() -> float:
        return float(page.evaluate(TIMED, next(deltas)))

    moved()
    benchmark.extra_info["in the page, s"] = [round(moved(), 3) for _ in range(3)]
    benchmark.pedantic(moved, rounds=8)


def test_replay_follows(benchmark: BenchmarkFixture, cockpit) -> None:
    page, address = cockpit
    answered(page, address)
    page.wait_for_function(SIMULATED, timeout=240_000)

    def followed() -> None:
        page.evaluate(TIMED, 40)
        page.wait_for_function(f"!({SIMULATED})", timeout=60_000)
        page.wait_for_function(SIMULATED, timeout=240_000)

    benchmark.pedantic(followed, rounds=3)
