"""What `test_comparison.py` looks at in small, more widely."""

import pytest
from pypdf import PdfReader
from test_comparison import SMALL

from planner.ui.pdf_report import write_comparison_report


@pytest.mark.slow
def test_a_pdf_holds_them_side_by_side(tmp_path):
    pdf = write_comparison_report([SMALL, "chat-70b"], tmp_path)
    text = " ".join(" ".join(page.extract_text() for page in PdfReader(pdf).pages).split())
    for said in (
        f"{SMALL} against chat-70b",
        "Side by side",
        "USD per hour",
        "costs least",
        "Figure 3",
    ):
        assert said in text
