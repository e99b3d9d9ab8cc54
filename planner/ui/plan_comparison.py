"""Compare the answers to several scenarios: what the scenarios change, and how the plans differ."""

from collections.abc import Sequence

import pandas as pd

from planner.answers import Answer
from planner.core.errors import PlannerError
from planner.ui.plan_text import render_rows

MAX_COMPARED_PLANS = 4
"""Most plans in a comparison."""


def build_plan_comparison(answers: Sequence[Answer]) -> pd.DataFrame:
    """Return a row per fact and a column per answer: first what is asked differently, then the results.

    Takes two to `MAX_COMPARED_PLANS` answers; costs show the difference from the first in brackets.
    """
    check_plan_count(answers)
    columns = [
        dict(render_rows("comparison", answer=answer, first=answers[0])) for answer in answers
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = {name: [column.get(name) for column in columns] for name in names}
    shown = [
        [name, *row]
        for name, row in rows.items()
        if not name.startswith("asked: ") or len({*row}) > 1
    ]
    return pd.DataFrame(shown, columns=["", *build_plan_titles(answers)])


def check_plan_count(plans: Sequence[object]) -> None:
    """Raise `PlannerError` if this many plans cannot be compared."""
    if not 2 <= len(plans) <= MAX_COMPARED_PLANS:
        raise PlannerError(f"2 to {MAX_COMPARED_PLANS} scenarios can be compared, got {len(plans)}")


def build_plan_titles(answers: Sequence[Answer]) -> list[str]:
    """Return the names of the scenarios, numbered if two are equal."""
    names = [answer.scenario.name for answer in answers]
    return [f"{name} ({k})" if names.count(name) > 1 else name for k, name in enumerate(names, 1)]
