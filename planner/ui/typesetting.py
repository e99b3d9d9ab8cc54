"""Typeset executed notebooks: their outputs become Typst, charts PDFs, and the pages one PDF."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TYPST_TEMPLATE = Path(__file__).with_name("templates") / "report.typ"
MEMO_TEMPLATE = TYPST_TEMPLATE.with_name("memo.typ")
PANDOC_OPTIONS = (
    "--wrap=none",
    "--sandbox",
    f"--lua-filter={Path(__file__).with_name('templates') / 'report.lua'}",
)
"""Nothing is fetched; the filter drops raw content, and links that are not of the web."""
TEXT_WIDTH_PX = 640
"""Width of the page's text in pixels of a chart, whose type is a little smaller than the page's."""
SVG_BOTTOM_MARGIN_PX = 8
"""Added below a chart, whose font is taller than the one that it was laid out in."""
SVG_CASE_SENSITIVE_NAMES = ("viewBox", "clipPath", "linearGradient")
"""Names in an SVG that nbconvert writes in lower case, as HTML allows."""
OUTPUT_MIME_TYPES = [
    "text/html",
    "image/svg+xml",
    "image/png",
    "text/markdown",
    "text/latex",
    "text/plain",
]
"""Outputs by preference; without widgets, so that their plain HTML is used."""


def typeset_pages(work: Path) -> Path:
    """Typeset the pages whose parts are in `work`, with Typst's own fonts; return the PDF."""
    import typst

    for template in (TYPST_TEMPLATE, MEMO_TEMPLATE):
        shutil.copy(template, work)
    page, pdf = str(work / TYPST_TEMPLATE.name), work / "report.pdf"
    typst.compile(page, output=str(pdf), ignore_system_fonts=True)
    return pdf


def convert_svg_to_pdf(svg: str) -> bytes:
    """Convert a chart to PDF, with room for letters that reach below its lower edge."""
    import vl_convert

    size = r'height="([\d.]+)" viewBox="([-\d.]+) ([-\d.]+) ([\d.]+) [\d.]+"'

    def extend(match: re.Match[str]) -> str:
        height = f"{float(match[1]) + SVG_BOTTOM_MARGIN_PX:g}"
        return f'height="{height}" viewBox="{match[2]} {match[3]} {match[4]} {height}"'

    return bytes(vl_convert.svg_to_pdf(re.sub(size, extend, svg, count=1)))


def convert_notebook(notebook: Path, work: Path, left_out: Sequence[str]) -> str:
    """Convert an executed notebook to Typst without cells tagged `left_out`, its charts to PDFs."""
    import pypandoc

    html = _move_charts(_export_html(notebook, left_out), notebook.stem, work)
    dialect = "html+tex_math_dollars-native_divs-native_spans-auto_identifiers"
    text = str(pypandoc.convert_text(html, "typst", format=dialect, extra_args=PANDOC_OPTIONS))
    # a question stays with what follows, and a line above a quote or figure with that
    text = re.sub(r"(?m)^(#strong\[Question:\].*)$", r"#block(sticky: true)[\1]", text)
    text = re.sub(r"(?m)^(\w.{,200})\n\n(?=#quote|#figure)", r"#block(sticky: true)[\1]\n\n", text)
    text = text.replace("align(center)[#table(", "align(left)[#table(")
    return text.replace("\n- ☐ ", "\n/ ☐: ")


def _export_html(notebook: Path, left_out: Sequence[str]) -> str:
    """Export the outputs of a notebook, figures and tables with an id each."""
    import nbformat
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    config = Config({"NbConvertBase": {"display_data_priority": OUTPUT_MIME_TYPES}})
    hidden = {"exclude_input": True, "exclude_output_prompt": True, "exclude_anchor_links": True}
    exporter = HTMLExporter(template_name="basic", config=config, **hidden)
    read = nbformat.reads(notebook.read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]
    read.cells = [c for c in read.cells if not {*c.metadata.get("tags", [])} & {*left_out}]
    _leave_out_prose(read.cells)
    html, _ = exporter.from_notebook_node(read)
    # images are from a user's text: charts come as SVG
    html = re.sub(r"<img\b[^>]*>", _get_alternative_text, html)
    return re.sub(
        r"<(?:figure|table)\b", lambda tag: f'{tag[0]} id="{notebook.stem}-{tag.start()}"', html
    )


def _leave_out_prose(cells: Sequence[Any]) -> None:
    """Leave the titles and questions of chapters, and the headings that something shown follows.

    What is explained in general is in the notebooks.
    """
    is_followed = False
    for cell in reversed(cells):
        if cell.cell_type == "code":
            is_followed |= bool(cell.outputs)
            continue
        kept = list[str]()
        for line in reversed(cell.source.splitlines()):
            if line.startswith(("# ", "**Question")) or (line.startswith("## ") and is_followed):
                kept.append(line)
                is_followed &= not line.startswith("## ")
        cell.source = "\n\n".join(reversed(kept))


def _get_alternative_text(image: re.Match[str]) -> str:
    alternative = re.search(r"""\balt=("[^"]*"|'[^']*')""", image[0])
    return alternative[1][1:-1] if alternative else ""


def _move_charts(html: str, name: str, work: Path) -> str:
    """Write every chart to a PDF in `work`, and show that in its place."""

    def move(match: re.Match[str]) -> str:
        file, svg = f"{name}-{match.start()}.pdf", match[0]
        for cased in SVG_CASE_SENSITIVE_NAMES:
            svg = svg.replace(cased.lower(), cased)
        (work / file).write_bytes(convert_svg_to_pdf(svg))
        percent = min(100, round(float(match[1]) / TEXT_WIDTH_PX * 100))
        return f'<img src="{file}" width="{percent}%">'

    return re.sub(r'<svg[^>]*? width="([\d.]+)".*?</svg>', move, html, flags=re.DOTALL)
