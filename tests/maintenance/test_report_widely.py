"""What `test_report.py` looks at in small, more widely."""

import pytest
from pypdf import PdfReader

from planner.ui.pdf_report import write_report

pytestmark = pytest.mark.slow


def test_a_model_that_fits_nowhere_gets_a_report_that_says_so(tmp_path):
    overrides = {"gpus": [{"gpu": "L4", "at_most": 1}]}
    first, *rest = PdfReader(write_report("chat-70b", tmp_path, overrides)).pages
    assert "fits nowhere" in " ".join(first.extract_text().split())
    assert any("GiB" in page.extract_text() for page in rest)
