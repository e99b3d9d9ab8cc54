"""How fast the cockpit is in a browser: `pytest tests/benchmarks/bench_cockpit.py`; medians of a real JupyterLab."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from lab import browser, chromium, jupyterlab
from playwright.sync_api import Page
from pytest_benchmark.fixture import BenchmarkFixture

from planner.ui.pdf_report import NOTEBOOK_DIR

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no Chromium or Chrome is installed on this machine"
)
TIMED = """([label, key]) => new Promise(done => {
  const shown = document.querySelector(".headroom");
  const rows = [...shown.querySelectorAll('.widget-inline-hbox')];
  const handle = rows.find(row => row.innerText.includes(label)).querySelector('.noUi-handle');
  const start = performance.now();
  const charts = () => [...shown.querySelectorAll('svg')].map(drawn => drawn.innerHTML).join('');
  const old = charts();
  new MutationObserver((_, watching) => {
    const told = shown.querySelector('[role=status]').innerText;  // a replay of the step before says so first
    if (!told.includes('provisional') || charts() === old || charts() === '') return;
    watching.disconnect();
    requestAnimationFrame(() => done((performance.now() - start) / 1000));
  }).observe(shown, {subtree: true, childList: true, characterData: true});
  handle.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
})"""
"""Seconds from a key on a slider until another chart is painted."""


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


def test_slider_to_picture(benchmark: BenchmarkFixture, cockpit) -> None:
    page, address = cockpit
    answered(page, address)
    keys = iter(["ArrowUp", "ArrowDown"] * 10)

    def moved() -> float:
        return float(page.evaluate(TIMED, ["requests/s", next(keys)]))

    moved()
    benchmark.extra_info["in the page, s"] = [round(moved(), 3) for _ in range(3)]
    benchmark.pedantic(moved, rounds=8)


def test_replay_follows(benchmark: BenchmarkFixture, cockpit) -> None:
    page, address = cockpit
    answered(page, address)
    replayed = "document.querySelector('.headroom').innerText.includes('replayed:')"
    page.wait_for_function(replayed, timeout=240_000)

    def followed() -> None:
        page.evaluate(TIMED, ["requests/s", "ArrowUp"])
        page.wait_for_function(f"!({replayed})", timeout=60_000)
        page.wait_for_function(replayed, timeout=240_000)

    benchmark.pedantic(followed, rounds=3)
