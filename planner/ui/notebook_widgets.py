"""Show figures, tables and notes in notebooks, and controls that redraw them.

JupyterLab shows the controls. Where they cannot work (papermill, print, a web page), the same
output shows its content for the initial values.
"""

import math
import re
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape as html_escape
from pathlib import Path
from typing import Any

import altair as alt
import ipywidgets
import pandas as pd
from IPython.display import Markdown

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.number_format import format_probability
from planner.core.text import escape_markdown
from planner.ui.charts.base import render_png, render_svg
from planner.ui.notebook_session import (
    CURRENT_SCENARIO,
    OpenedPlan,
    load_changes,
    load_current_scenario,
    save_changes,
    search_cached,
)

_NUMBER_PATTERN = re.compile(r"[-+\N{MINUS SIGN}]?[\d.,]+(%| \([\d.,]+ to [\d.,]+\))?")
_MAX_UNBROKEN_CHARS = 12
"""Longest text of a cell that is never broken; longer text gets a minimum width."""


def escape_html(text: object) -> str:
    """Return text as HTML, with dollars and backslashes in elements: they would begin formulas."""
    return re.sub(r"[$\\]", lambda mark: f"<span>{mark[0]}</span>", html_escape(str(text)))


class HtmlOutput:
    """Content of a notebook as HTML."""

    def __init__(self, html: str) -> None:
        self.html = html

    def __repr__(self) -> str:
        return "shown as HTML"  # without an address: the outputs of lessons are compared

    def _repr_html_(self) -> str:
        return self.html


class EmptyOutput(HtmlOutput):
    """What is shown for None: nothing."""

    def _ipython_display_(self) -> None:
        pass


NOTHING = EmptyOutput("")


def show_figure(chart: alt.TopLevelMixin | dict[str, Any] | None, caption: str) -> HtmlOutput:
    """Return a chart as SVG with its caption, which the report numbers; nothing for None."""
    if chart is None:
        return NOTHING
    svg = render_svg(chart)
    # as wide as the notebook, until its letters are much larger than the text
    width = float(svg.partition(' width="')[2].partition('"')[0])
    style = f"margin: 0.5em 0; max-width: max({1.6 * width:.0f}px, min(65vw, {2.1 * width:.0f}px))"
    svg = svg.replace("overflow: visible", "overflow: visible; width: 100%; height: auto", 1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html_escape(caption)}" ', 1)
    return HtmlOutput(f'<figure style="{style}">{svg}{_render_caption(caption)}</figure>')


def show_picture(chart: alt.TopLevelMixin, caption: str) -> HtmlOutput:
    """Return a chart as a picture on white with its caption, in a notebook that nobody has to trust."""
    data = b64encode(render_png(render_svg(chart))).decode()
    picture = f'<img src="data:image/png;base64,{data}" alt="{html_escape(caption)}">'
    style, below = "margin: 0.5em 0", _render_caption(caption)
    return HtmlOutput(f'<figure style="{style}">{picture}{below}</figure>')


def _render_caption(caption: str) -> str:
    style = "font-size: 0.9em; opacity: 0.75; margin: 0.4em 0"
    return f'<figcaption style="{style}">{escape_html(caption)}</figcaption>'


def show_table(
    rows: pd.DataFrame | Sequence[Mapping[str, object]] | None, caption: str = ""
) -> HtmlOutput:
    """Return a table, numbers right-aligned, at three significant digits; nothing for None."""
    if rows is None:
        return NOTHING
    frame = pd.DataFrame(rows)
    if frame.index.name or not isinstance(frame.index, pd.RangeIndex):
        frame = frame.reset_index(names=frame.index.name or "")
    head, body = "", [""] * len(frame)
    for name in frame.columns:
        column = list(frame[name])
        align = (
            "right"
            if all(_is_numeric(value) or _NUMBER_PATTERN.fullmatch(str(value)) for value in column)
            else "left"
        )
        style = f"text-align: {align}; padding: 0.3em 0.6em"
        head += f'<th scope="col" style="{style}">{escape_html(str(name))}</th>'
        for row, value in enumerate(column):
            text = format_value(value)
            width = (
                "; white-space: nowrap"
                if len(text) <= _MAX_UNBROKEN_CHARS
                else "; min-width: 7em" * (align == "left")
            )
            body[row] += f'<td style="{style}{width}">{_format_cell(text)}</td>'
    cells = "".join(f"<tr>{row}</tr>" for row in body)
    style = "caption-side: bottom; text-align: left; opacity: 0.75"
    # a caption may be wider than a narrow table, without widening it
    span_style = "display: inline-block; max-width: 52em; margin-right: -52em"
    span = f'<span style="{span_style}">{escape_html(caption)}</span>'
    caption_html = f'<caption style="{style}">{span}</caption>' if caption else ""
    return HtmlOutput(
        '<table style="line-height:'
        f' 1.4">{caption_html}<thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>'
    )


def _format_cell(text: str) -> str:
    """Return text that breaks after a slash, but not in an interval, a date or GB/s."""
    text = re.sub(
        r"(\([\d.,]+) to ((?:[\d.,]+|growing)\))",
        "\\1\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}\\2",
        text,
    )
    text = re.sub(
        r"\b\d{4}-\d\d(-\d\d)?\b",
        lambda date: date[0].replace("-", "\N{NON-BREAKING HYPHEN}"),
        text,
    )
    return re.sub(r"(?<!<)/(?!s\b)", "/<wbr>", escape_html(text))


NOTE_COLOR, RIGHT_COLOR, ERROR_COLOR = "#3b7dd8", "#2e9e5b", "#d9463b"


def show_note(message: object, color: str = NOTE_COLOR) -> HtmlOutput:
    """Return a sentence or two, or a result that prints as such, in a frame; nothing for ""."""
    if not message:
        return NOTHING
    style = (
        f"border-left: 3px solid {color}; background: {color}1a; padding: 0.5em 0.9em; margin:"
        " 0.6em 0"
    )
    return HtmlOutput(
        f'<blockquote style="{style}"><p style="margin: 0">{escape_html(message)}</p></blockquote>'
    )


def show_markdown(text: str) -> Any:
    """Return paragraphs of Markdown with figures in them; nothing for ""."""
    return Markdown(text) if text else NOTHING  # type: ignore[no-untyped-call]


def conclude(decision: object, limit: object, question: str, chapter: str) -> Any:
    """Return the end of a chapter: the decision here, what limits it, and the next question."""
    return show_markdown(
        f"**So:** {escape_markdown(decision)}\n\n**What limits it:** {escape_markdown(limit)}\n\n"
        f"**Next:** [{question}]({chapter}.ipynb)"
    )


def show_code(script: str | None, language: str = "bash") -> HtmlOutput:
    """Return a script to copy; nothing for None."""
    if script is None:
        return NOTHING
    # by default JupyterLab breaks within words
    style = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere"
    return HtmlOutput(
        f'<pre style="{style}"><code'
        f' class="language-{language}">{escape_html(script.strip())}</code></pre>'
    )


def fold_content(*parts: HtmlOutput, title: str = "Answer") -> HtmlOutput:
    """Return content that is folded until it is clicked, such as the answer to a problem."""
    inner = "".join(part.html for part in parts)
    return HtmlOutput(
        f'<details style="margin: 0.6em 0"><summary>{escape_html(title)}</summary>{inner}</details>'
    )


def format_value(value: object) -> str:
    """Return a value at three significant digits, and an interval as "mid (lo to hi)"."""
    if isinstance(value, Interval):
        if value.lo == value.hi:
            return format_value(value.mid)
        return f"{format_value(value.mid)} ({format_value(value.lo)} to {format_value(value.hi)})"
    if value is None or value is pd.NaT or (isinstance(value, float) and math.isnan(value)):
        return "\N{EN DASH}"
    if not _is_numeric(value):
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    number = float(value) + 0.0  # type: ignore[arg-type]  # no "-0"
    if math.isinf(number):
        return "growing"
    if abs(number) >= 1e5 and number != round(number):
        number = float(f"{number:.4g}")
    shown = f"{number:.3g}"
    return f"{number:,.0f}" if abs(float(shown)) >= 1000 or number == round(number) else shown


def _is_numeric(value: object) -> bool:
    return (
        value is None
        or isinstance(value, Interval)
        or (hasattr(value, "__float__") and not isinstance(value, bool))
    )


def build_slider(
    low: float, high: float, value: float, step: float | None = None, label: str = ""
) -> ipywidgets.Widget:
    """Return a slider from `low` to `high`, or to `value` if that is beyond; of integers if all are."""
    whole = all(isinstance(number, int) for number in (low, high, value))
    kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    step, form = step or (1 if whole else (high - low) / 50), "d" if whole else ".2f"
    return kind(
        value=value, min=min(low, value), max=max(high, value), step=step, description=label,
        readout_format=form,
    )  # fmt: skip


def build_ladder(values: Iterable[int], value: int, label: str = "") -> ipywidgets.Widget:
    """Return a slider over `values`, with `value` among them."""
    options = [(f"{each:,}", each) for each in sorted({*values, value})]
    return ipywidgets.SelectionSlider(options=options, value=value, description=label)


def build_choice(options: Sequence[Any], value: Any = None, label: str = "") -> ipywidgets.Widget:
    """Return a choice of one of `options`, or of `value`; the default is the first."""
    known = [option[1] if isinstance(option, tuple) else option for option in options]
    value = known[0] if value is None else value
    options = [*options, *([] if value in known else [value])]
    return ipywidgets.Dropdown(options=options, value=value, description=label)


class InteractiveView(ipywidgets.VBox):
    """Show `draw(**values)` below its controls, and redraw it when one of them changes.

    `draw` returns one or several figures, tables or notes; its `PlannerError` is shown as a note.
    With `change`, it is `draw(change(**values))`: what is looked at, the `subject`, is the plan's
    own deployment with these values. The plain HTML is drawn at the initial values. `carry` reads
    fields of the scenario from the subject; then a button sets those that changed for all notebooks.
    """

    def __init__(
        self, draw: Callable[..., Any], carry: Mapping[str, Callable[[Any], object]] | None = None,
        change: Callable[..., Any] = dict, **controls: ipywidgets.Widget,
    ) -> None:  # fmt: skip
        for name, control in controls.items():
            control.description = control.description or name
            control.style.description_width = "190px"
            control.layout.width = "500px"
            control.observe(self._redraw, names="value")
        self._draw, self._change, self._controls = draw, change, controls
        self._lock = threading.Lock()
        self._screen = ipywidgets.HTML(self._render_html())
        # tables and text as in the cells around it
        self._screen.add_class("jp-RenderedHTMLCommon")
        values = [
            f"{control.description} {format_value(getattr(control, 'label', control.value))}"
            for control in controls.values()
            if control.value != ""
        ]
        drawn = f" Drawn for {escape_html(', '.join(values))}." if values else ""
        self._still = re.sub(
            r"(</span>)?</(fig)?caption>", lambda end: drawn + end[0], self._screen.value, count=1
        )
        layout = ipywidgets.Layout(flex_flow="row wrap")
        self._carry = carry or {}
        self._initial = {field: read(self.subject) for field, read in self._carry.items()}
        bar = [_build_rerun_button("Carry on with this", self._save_changes)] if carry else []
        super().__init__([ipywidgets.Box([*controls.values(), *bar], layout=layout), self._screen])

    def _save_changes(self) -> None:
        """Set the changed values in the current scenario."""
        now = {field: read(self.subject) for field, read in self._carry.items()}
        if changes := {field: now[field] for field in now if now[field] != self._initial[field]}:
            save_changes(changes)

    @property
    def subject(self) -> Any:
        """What is drawn at the controls' values."""
        values = {name: control.value for name, control in self._controls.items()}
        rounded = {k: round(v, 6) for k, v in values.items() if isinstance(v, float)}
        return self._change(**values | rounded)  # a page computes 0.9199999999999999

    def _render_html(self) -> str:
        try:
            subject = self.subject
            content = self._draw(**subject) if self._change is dict else self._draw(subject)
        except PlannerError as error:
            content = show_note(str(error), ERROR_COLOR)
        parts: Iterable[Any] = content if isinstance(content, (tuple, list)) else [content]
        return "".join(part._repr_html_() for part in parts)

    def _redraw(self, _change: object) -> None:
        # JupyterLab may handle messages in parallel: the last to draw has the latest values
        with self._lock:
            self._screen.value = self._render_html()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._repr_mimebundle_(**kwargs), "text/html": self._still}


def ask_number(right: float, hint: str, tolerance: float = 0.1) -> InteractiveView:
    """Return a field for an answer, and whether it is within `tolerance` of the right one."""

    def _judge(answer: str) -> HtmlOutput:
        if (number := re.search(r"\d[\d,]*\.?\d*", answer)) is None:
            return show_note("Run all cells, type a number and press Enter.")
        if abs(float(number[0].replace(",", "")) / right - 1) <= tolerance:
            return show_note(f"Right: {format_value(right)}.", RIGHT_COLOR)
        return show_note(f"Not yet. {hint}", ERROR_COLOR)

    field = ipywidgets.Text(
        description="Your answer", placeholder="a number", continuous_update=False
    )
    return InteractiveView(_judge, answer=field)


def _build_rerun_button(label: str, do: Callable[[], None]) -> ipywidgets.Widget:
    """Return a button that changes the scenario; then JupyterLab reruns the notebook (`ui/lab`)."""
    button = ipywidgets.Button(
        description=label, tooltip=f"{label}: this chapter and those that follow"
    )
    button.add_class("headroom-runs-all")
    button.on_click(lambda _: do())
    return button


def render_changes(scenario: str | Path, plan: OpenedPlan) -> ipywidgets.Widget | None:
    """Return the changes of notebooks and the plan before and after, with a button to undo them."""
    if scenario != CURRENT_SCENARIO or not (changes := load_changes()):
        return None

    def describe(name: str, plan: OpenedPlan) -> dict[str, object]:
        best, targets = plan.best, plan.scenario.slo_targets
        row: dict[str, object] = {"": name, "plan": best.description if best else "nothing fits"}
        if best and (performance := best.prediction.performance):
            row |= {"USD per hour": best.usd_per_hour, "odds": format_probability(best.probability)}
            for target in targets:
                value = performance.get_for_display(target.metric, target.percentile)
                row[f"{target.name} (ms)"] = value * 1e3
        return row

    before = search_cached(load_current_scenario(CURRENT_SCENARIO, changed=False))
    fields = ", ".join(f"{field} = {value}" for field, value in changes.items())
    table = show_table(
        [describe("before", before), describe("now", plan)], f"Changed from the plan: {fields}."
    )
    undo = _build_rerun_button("Back to the plan", lambda: save_changes({}))
    return ipywidgets.VBox([ipywidgets.HTML(table.html), undo])
