"""Format an answer for the terminal: what to rent first, everything else on request."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.answers import words
from planner.answers.answer import Answer
from planner.answers.limits import Limit
from planner.core.errors import PlannerError
from planner.core.files import get_report_date
from planner.core.number_format import format_probability
from planner.core.readers import parse_yaml
from planner.core.text import escape_to_one_line, format_columns
from planner.hardware.prices import look_up_gpu_price
from planner.models.registry import load_model
from planner.planning.scenario import Scenario
from planner.planning.slo import (
    LimitStatus,
    explain_implausible_limits,
    list_unlimited_targets,
)
from planner.ui.terminal import Colour, TerminalStyle

EXIT_CODES = {"holds": 0, "at_risk": 3, "nothing_meets": 4}
"""Exit codes of `headroom plan` by verdict."""
MAX_BAR_COLUMNS = 26
MIN_BAR_COLUMNS = 12
STATUS_COLOURS: dict[LimitStatus, Colour] = {"met": "green", "at risk": "amber", "missed": "red"}
LIMITS_MARK = "@"
"""The line of the summary's template that the rows of limits replace."""


def format_answer(
    answer: Answer, style: TerminalStyle | None = None, *, command: str = "", detailed: bool = False,
) -> str:  # fmt: skip
    """Return the answer as text, `detailed` with everything below the summary."""
    style = style or TerminalStyle()
    summary = format_summary(answer, style, command=command, detailed=detailed)
    return f"{summary}\n{format_details(answer, style)}" if detailed else summary


def format_summary(
    answer: Answer, style: TerminalStyle, *, command: str = "", out: str = "",
    detailed: bool = False,
) -> str:  # fmt: skip
    """Return the answer in a page of the terminal: the same facts in the same order.

    `command` asks this question again, for the next step; `out` is the folder where the files will be.
    """
    style = replace(style, wraps=True)  # in a pipe too, so that it fits a page
    pairs = _list_summary(answer, command=command, out=out, detailed=detailed)
    width = max((len(label) for label, *_ in pairs), default=0)
    at = next((k for k, (label, *_) in enumerate(pairs) if label == LIMITS_MARK), len(pairs))
    head, tail = (
        style.format_rows([(f"{label:<{width}}", text) for label, text in each])
        for each in (pairs[:at], pairs[at + 1 :])
    )
    limits = _format_limits(answer.best.limit_rows if answer.best else (), style, answer.scenario)
    parts = [[_format_verdict(answer, style)], head, limits, tail]
    return "\n".join(line for part in parts for line in part)


def format_models(answers: Mapping[str, Answer | PlannerError], style: TerminalStyle) -> str:
    """Format a row per model, then which is the best, and what was assumed of all of them."""
    planned = {m: found for m, found in answers.items() if isinstance(found, Answer)}
    priced = {
        model: (EXIT_CODES[found.verdict], found.chosen.price_key)
        for model, found in planned.items()
        if found.chosen and not found.scenario.found_figure
    }
    assumed = (found.scenario.workload.assumptions for found in planned.values())
    rows = render_rows(
        "models",
        answers=answers,
        planned=planned,
        best=min(priced, key=lambda model: priced[model]) if len(priced) > 1 else None,
        assumed=dict.fromkeys(text for texts in assumed for text in texts),
    )
    return "\n".join(style.format_rows(rows))


def _format_verdict(answer: Answer, style: TerminalStyle) -> str:
    """Format the first line: the verdict with its probability."""
    signs = {"holds": ("✔", "+"), "at_risk": ("!", "!"), "nothing_meets": ("✘", "x")}
    colours: dict[str, Colour] = {"holds": "green", "at_risk": "amber", "nothing_meets": "red"}
    text = words.tell_verdict(answer)
    return style.paint(f"{style.choose(*signs[answer.verdict])} {text}", colours[answer.verdict])


def _format_limits(rows: Sequence[Limit], style: TerminalStyle, scenario: Scenario) -> list[str]:
    """Format a line with a bar for each limit, below a line that explains the bar.

    A limit is at risk if the bar, which ends at the asked probability, is beyond it.
    """
    if not rows:
        return []
    values = [f"{words.format_amount(row)} of {words.format_bound(row)}" for row in rows]
    value_width, status_width = max(map(len, values)), max(len(row.status) for row in rows)
    names = [words.name_limit(row, scenario) for row in rows]
    if style.width < 2 + max(map(len, names)) + value_width + status_width + MIN_BAR_COLUMNS + 12:
        names = [row.name for row in rows]
    name_width = max(map(len, names))
    columns = style.width - (2 + name_width + 2 + value_width + 2 + 2 + status_width)
    columns = min(columns, MAX_BAR_COLUMNS) if columns >= MIN_BAR_COLUMNS else 0
    sure = f"{format_probability(scenario.confidence)} sure"
    key = style.choose(f"● expected ━ {sure} ▏ limit", f"o expected = {sure} | limit")
    lines = [f"  {'':<{name_width + 2 + value_width}}  {key}"] * bool(columns)
    for name, value, row in zip(names, values, rows, strict=True):
        bar = f"{style.draw_bar(row.use, columns)}  " if columns else ""
        if math.isinf(row.use.mid):
            bar = " " * len(bar)
        status = style.paint(row.status, STATUS_COLOURS[row.status])
        lines.append(f"  {name:<{name_width}}  {value:<{value_width}}  {bar}{status}")
    return lines


def format_details(answer: Answer, style: TerminalStyle) -> str:
    """Return all that the summary leaves out, after an empty line."""
    return "\n".join(["", *style.format_rows(_list_details(answer))])


def list_facts(answer: Answer) -> list[list[str]]:
    """List all that the terminal says of an answer, but for its rows of limits, by label."""
    rows = [*_list_summary(answer), *_list_details(answer)]
    return [row for row in rows if row[0] != LIMITS_MARK]


def _list_summary(answer: Answer, **values: object) -> list[list[str]]:
    known = {"command": "", "out": "", "detailed": True, **values}
    return render_rows("summary", answer=answer, today=get_report_date(), **known)


def _list_details(answer: Answer) -> list[list[str]]:
    targets = answer.scenario.slo_targets
    others = list_unlimited_targets(targets)
    return render_rows("plan", answer=answer, latencies=[*targets, *others])


def format_scenario(scenario: Scenario) -> str:
    """Return a scenario as it was read, line by line."""
    head = escape_to_one_line(f"{scenario.name}: {scenario.question}".removesuffix(": "))
    rows = render_rows(
        "check",
        hint=explain_implausible_limits(scenario.slo_targets),
        scenario=scenario,
        model=load_model(scenario.model),
        look_up_gpu_price=look_up_gpu_price,
    )
    return f"{head}\n{format_columns(rows)}"


def render_page(template: str, **values: object) -> dict[str, Any]:
    """Return the fields of a template that is YAML; lists without an entry are empty."""
    fields = parse_yaml(words.render_words(template, **values), f"{template}.j2")
    return {name: [] if value is None else value for name, value in fields.items()}


def render_rows(template: str, **values: object) -> list[list[str]]:
    """Return the lines of a rendered template, split at their first bar."""
    lines = words.render_words(template, **values).splitlines()
    return [line.split(" | ", 1) for line in lines if line]
