"""A reader moves a slider in a real JupyterLab and sees the chart change."""

from __future__ import annotations

import shutil

import pytest
from lab import browser, chromium, jupyterlab, run_notebook

from planner.faces.report import NOTEBOOKS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium or Chrome is installed on this machine"),
]


def test_a_slider_redraws_its_chart(tmp_path):
    shutil.copy(NOTEBOOKS / "2-vram.ipynb", tmp_path)
    with jupyterlab(tmp_path) as address, browser() as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        run_notebook(page, address, "2-vram.ipynb")
        chart = page.locator(".widget-html svg").first
        before = chart.inner_html()
        page.locator(".widget-slider .noUi-handle").first.focus()
        page.keyboard.press("PageDown")
        page.wait_for_function(
            "before => document.querySelector('.widget-html svg').innerHTML !== before", arg=before, timeout=15_000
        )
        assert "Error" not in page.locator(".jp-OutputArea").all_inner_texts()
        elsewhere = [url for url in requests if not url.startswith((address.removesuffix("/lab"), "data:", "blob:"))]
        assert elsewhere == []  # works with no network
