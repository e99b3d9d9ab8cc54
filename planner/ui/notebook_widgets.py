"""What a notebook shows: figures, tables, notes, and controls that redraw them.

One output serves both faces: JupyterLab shows the controls, and whatever cannot (papermill, print,
a page on the web) shows the same content for the starting values.
"""

import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape as html_escape
from pathlib import Path
from typing import Any

import altair as alt
import ipywidgets
import pandas as pd
import traitlets

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.planning.search import Plan
from planner.ui.charts.base import render_svg
from planner.ui.notebook_session import (
    CURRENT_SCENARIO,
    load_changes,
    load_current_scenario,
    save_changes,
    search_cached,
)

_NUMBER_PATTERN = re.compile(r"[-+\N{MINUS SIGN}]?[\d.,]+(%| \([\d.,]+ to [\d.,]+\))?")
_MAX_UNBROKEN_CHARS = 12
"""Characters of a cell that stand in one line; longer text is broken, but not into a column of single words."""


def escape_html(plain: object) -> str:
    """Text as HTML; a dollar stands in an element of its own, or two of them would enclose a formula."""
    return html_escape(str(plain)).replace("$", "<span>$</span>")


class HtmlOutput:
    """A piece of content; `html` is all of it."""

    def __init__(self, html: str) -> None:
        self.html = html

    def __repr__(self) -> str:
        return "shown as HTML"  # no address in it: lessons compare their outputs

    def _repr_html_(self) -> str:
        return self.html


def show_figure(chart: alt.TopLevelMixin | dict[str, Any], caption: str) -> HtmlOutput:
    """A chart, drawn as SVG, with its caption; the report numbers it."""
    below = (
        '<figcaption style="font-size: 0.9em; opacity: 0.75; margin: 0.4em'
        f' 0">{escape_html(caption)}</figcaption>'
    )
    return HtmlOutput(f'<figure style="margin: 0.5em 0">{render_svg(chart)}{below}</figure>')


def show_table(frame: pd.DataFrame, caption: str = "") -> HtmlOutput:
    """A table: numbers to the right at three significant digits, column names with their units as they are."""
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
        head += f'<th style="{style}">{escape_html(str(name))}</th>'
        for row, value in enumerate(column):
            text = format_value(value)
            width = (
                "; white-space: nowrap"
                if len(text) <= _MAX_UNBROKEN_CHARS
                else "; min-width: 7em" * (align == "left")
            )
            body[row] += f'<td style="{style}{width}">{_format_cell(text)}</td>'
    rows = "".join(f"<tr>{cells}</tr>" for cells in body)
    style = "caption-side: bottom; text-align: left; opacity: 0.75"
    # beyond a narrow table, without widening it
    wide = "display: inline-block; max-width: 52em; margin-right: -52em"
    top = (
        f'<caption style="{style}"><span style="{wide}">{escape_html(caption)}</span></caption>'
        if caption
        else ""
    )
    return HtmlOutput(
        '<table style="line-height:'
        f' 1.4">{top}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _format_cell(text: str) -> str:
    """Text that may go on in another line after a slash, and not within an interval, a date or GB/s."""
    kept = re.sub(
        r"(\([\d.,]+) to ((?:[\d.,]+|growing)\))",
        "\\1\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}\\2",
        text,
    )
    kept = re.sub(
        r"\b\d{4}-\d\d(-\d\d)?\b",
        lambda date: date[0].replace("-", "\N{NON-BREAKING HYPHEN}"),
        kept,
    )
    return re.sub(r"(?<!<)/(?!s\b)", "/<wbr>", escape_html(kept))


def show_note(message: object) -> HtmlOutput:
    """A sentence or two, or a result that prints as such, set apart from the rest."""
    style = (
        "border-left: 3px solid #3b7dd8; background: #3b7dd81a; padding: 0.5em 0.9em; margin:"
        " 0.6em 0"
    )
    return HtmlOutput(
        f'<blockquote style="{style}"><p style="margin: 0">{escape_html(message)}</p></blockquote>'
    )


def show_code(script: str, language: str = "bash") -> HtmlOutput:
    """A script, to be copied as it is."""
    # JupyterLab breaks within words
    style = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere"
    return HtmlOutput(
        f'<pre style="{style}"><code'
        f' class="language-{language}">{escape_html(script.strip())}</code></pre>'
    )


def fold_content(*parts: HtmlOutput, title: str = "Answer") -> HtmlOutput:
    """Content that stays folded until somebody asks for it: a practice problem's answer."""
    inner = "".join(part.html for part in parts)
    return HtmlOutput(
        f'<details style="margin: 0.6em 0"><summary>{escape_html(title)}</summary>{inner}</details>'
    )


def format_value(value: object) -> str:
    """A value as people read it: three significant digits, thousands marked, an interval as "mid (lo to hi)"."""
    if isinstance(value, Interval):
        same = value.lo == value.hi
        return (
            format_value(value.mid)
            if same
            else f"{format_value(value.mid)} ({format_value(value.lo)} to {format_value(value.hi)})"
        )
    if value is None or value is pd.NaT or (isinstance(value, float) and math.isnan(value)):
        return "\N{EN DASH}"
    if not _is_numeric(value):
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    number = float(value) + 0.0  # type: ignore[arg-type]  # no "-0"
    if math.isinf(number):
        return "growing"
    if abs(number) >= 1e5 and number != round(number):
        number = float(f"{number:.4g}")
    return f"{number:,.0f}" if abs(number) >= 1000 or number == round(number) else f"{number:.3g}"


def _is_numeric(value: object) -> bool:
    return (
        value is None
        or isinstance(value, Interval)
        or (hasattr(value, "__float__") and not isinstance(value, bool))
    )


def build_slider(
    low: float, high: float, value: float, step: float | None = None, label: str = ""
) -> ipywidgets.Widget:
    """A number between `low` and `high`; whole numbers when all three are."""
    whole = all(isinstance(number, int) for number in (low, high, value))
    kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    step = step or (1 if whole else (high - low) / 50)
    value, form = min(max(value, low), high), "d" if whole else ".2f"
    return kind(value=value, min=low, max=high, step=step, description=label, readout_format=form)


def build_choice(options: Sequence[Any], value: Any = None, label: str = "") -> ipywidgets.Widget:
    """One of `options`; the first unless `value` says which."""
    return ipywidgets.Dropdown(
        options=options, value=options[0] if value is None else value, description=label
    )


def build_text_field(value: str = "", label: str = "", hint: str = "") -> ipywidgets.Widget:
    """A line of text, taken in with Enter; `hint` stands in it while it is empty."""
    return ipywidgets.Text(
        value=value, description=label, placeholder=hint, continuous_update=False
    )


class MultiSelect(ipywidgets.VBox):
    """Some of `allowed`: each that is chosen is a button that takes it out, and a field adds others."""

    value = traitlets.Tuple()

    def __init__(self, allowed: Sequence[str], label: str, hint: str) -> None:
        super().__init__()
        self._allowed, self._hint = allowed, hint
        self._row = ipywidgets.Box(layout=ipywidgets.Layout(flex_flow="row wrap"))
        self._field = ipywidgets.Combobox(
            options=tuple(allowed), placeholder=hint, description=label, continuous_update=False,
            style={"description_width": "112px"}, layout={"width": "98%"},
        )  # fmt: skip
        self._field.observe(self._add_choice, names="value")
        self.children = (self._field, self._row)
        self.observe(self._redraw, names="value")

    def _redraw(self, _change: object) -> None:
        made = []
        for name in self.value:
            button = ipywidgets.Button(
                description=f"{name} \N{MULTIPLICATION SIGN}", tooltip=f"without {name}"
            )
            button.layout.width = "auto"
            button.on_click(
                lambda _, name=name: setattr(
                    self, "value", tuple(x for x in self.value if x != name)
                )
            )
            made.append(button)
        self._row.children = made

    def _add_choice(self, moved: Mapping[str, Any]) -> None:
        if moved["new"] in self._allowed:
            self._field.value = ""
            self.value = tuple(dict.fromkeys((*self.value, moved["new"])))


class InteractiveView(ipywidgets.VBox):
    """`draw(**values)` under its controls, drawn anew in place whenever one of them moves.

    `draw` returns a figure, table or note, or several; its `PlannerError` is shown as a note
    instead. The plain-HTML form is the drawing at the starting values. `carry` names the field of
    the question that each control sets (or one field for several controls): a button changes the
    question for the whole walk.
    """

    def __init__(
        self, draw: Callable[..., Any], carry: Mapping[str, str | tuple[str, ...]] | None = None,
        **controls: ipywidgets.Widget,
    ) -> None:  # fmt: skip
        for name, control in controls.items():
            control.description = control.description or name
            control.style.description_width = "190px"
            control.layout.width = "500px"
            control.observe(self._redraw, names="value")
        self._draw, self._controls, self._lock = draw, controls, threading.Lock()
        self._screen = ipywidgets.HTML(self._render_html())
        self._screen.add_class(
            "jp-RenderedHTMLCommon"
        )  # tables and lines of text as cells beside it have them
        sentences = [
            f"{name.description} {format_value(name.value)}"
            for name in controls.values()
            if name.value != ""
        ]
        drawn = f" Drawn for {escape_html(', '.join(sentences))}." if sentences else ""
        self._still = re.sub(
            r"(</(fig)?caption>)", lambda end: drawn + end[0], self._screen.value, count=1
        )
        layout = ipywidgets.Layout(flex_flow="row wrap")
        self._carry, self._first = (
            carry or {},
            {name: control.value for name, control in controls.items()},
        )
        bar = [_build_rerun_button("Carry on with this", self._save_changes)] if carry else []
        super().__init__([ipywidgets.Box([*controls.values(), *bar], layout=layout), self._screen])

    def _save_changes(self) -> None:
        """What has been moved becomes the question's."""
        now = {name: control.value for name, control in self._controls.items()}
        moved = {}
        for field, names in self._carry.items():
            each = (names,) if isinstance(names, str) else names
            if any(now[name] != self._first[name] for name in each):
                moved[field] = (
                    now[names] if isinstance(names, str) else {name: now[name] for name in each}
                )
        if moved:
            save_changes(moved)

    def _render_html(self) -> str:
        try:
            shown = self._draw(**{name: control.value for name, control in self._controls.items()})
        except PlannerError as error:
            shown = show_note(str(error))
        parts: Iterable[Any] = shown if isinstance(shown, (tuple, list)) else [shown]
        return "".join(part._repr_html_() for part in parts)

    def _redraw(self, _change: object) -> None:
        # JupyterLab's messages may be handled side by side: the last to draw has the last values
        with self._lock:
            self._screen.value = self._render_html()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._repr_mimebundle_(**kwargs), "text/html": self._still}


explore = InteractiveView


def _build_rerun_button(label: str, do: Callable[[], None]) -> ipywidgets.Widget:
    """A button that does something to the question, after which JupyterLab runs the chapter again (`ui/lab`)."""
    button = ipywidgets.Button(
        description=label, tooltip=f"{label}: this chapter and those that follow"
    )
    button.add_class("headroom-runs-all")
    button.on_click(lambda _: do())
    return button


def render_changes(scenario: str | Path, plan: Plan) -> ipywidgets.Widget | None:
    """What chapters changed of the question and what that does to the plan, with a way back; None where nothing is."""
    if scenario != CURRENT_SCENARIO or not (changed := load_changes()):
        return None
    before = search_cached(load_current_scenario(CURRENT_SCENARIO, changed=False))

    def cost(found: Plan) -> str:
        if found.best is None:
            return "nothing fits"
        usd = (
            ""
            if found.best.usd_per_hour is None
            else f" at ${found.best.usd_per_hour:,.2f} an hour"
        )
        return f"{found.best.description}{usd}" + ", which does not do" * (found.chosen is None)

    what = ", ".join(f"{field} = {_format_plain(value)}" for field, value in changed.items())
    html_output = show_note(
        f"Changed from the plan: {what}. Now {cost(plan)}; before, {cost(before)}."
    )
    return ipywidgets.VBox(
        [
            ipywidgets.HTML(html_output.html),
            _build_rerun_button("Back to the plan", lambda: save_changes({})),
        ]
    )


def _format_plain(value: object) -> str:
    return (
        ", ".join(f"{name} {part}" for name, part in value.items())
        if isinstance(value, dict)
        else str(value)
    )
