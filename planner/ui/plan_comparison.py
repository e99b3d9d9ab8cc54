"""Compare the answers to several scenarios: what the scenarios change, and how the plans differ."""

from collections.abc import Sequence

import pandas as pd

from planner.answers import Answer
from planner.answers.answer import sweep_costs
from planner.core.errors import PlannerError
from planner.core.number_format import format_usd
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


def describe_cheapest_plan(answers: Sequence[Answer]) -> str:
    """Describe the cheapest feasible plan, of equals the safest, and its distance to the next."""
    named = list(zip(build_plan_titles(answers), answers, strict=True))
    costs = sorted(
        (round(usd, 2), answer.verdict != "holds", name)
        for name, answer in named
        if answer.chosen and (usd := answer.chosen.usd_per_hour)
    )
    missed = [f"No plan meets the targets of {name}." for name, each in named if not each.chosen]
    if len(costs) > 1:
        (usd, at_risk, name), (next_usd, _, other) = costs[:2]
        less = f"{1 - usd / next_usd:.0%} less than" if usd < next_usd else "as much as"
        risk = ", but is at risk" * at_risk
        first = f"{name} costs least{risk}: {format_usd(usd)} an hour, {less} {other}."
        return " ".join([first, *missed])
    return " ".join(missed) or "Without prices they are told apart by their GPUs."


def compare_limits(answers: Sequence[Answer]) -> pd.DataFrame:
    """Return predictions as shares of their limits, in words, one row per SLO and answer."""
    rows = [
        (name, row.name, row.status, f"{row.use * 100:.0f}%")
        for name, answer in zip(build_plan_titles(answers), answers, strict=True)
        for row in (answer.best.limit_rows if answer.best else ())
        if row.target
    ]
    return pd.DataFrame(rows, columns=["scenario", "target", "status", "told"])


def compare_costs(answers: Sequence[Answer]) -> tuple[pd.DataFrame, str, str] | None:
    """Return the least cost over the load by scenario, and both columns; None if units differ."""
    named = zip(build_plan_titles(answers), map(sweep_costs, answers), strict=True)
    curves = {name: curve for name, curve in named if curve}
    kinds = {(curve.axis, curve.unit) for curve in curves.values()}
    if len(kinds) != 1:
        return None
    ((load, cost),) = kinds
    rows = [(*point[:2], name) for name, curve in curves.items() for point in curve.points]
    return pd.DataFrame(rows, columns=[load, cost, "scenario"]), load, cost


def build_plan_titles(answers: Sequence[Answer]) -> list[str]:
    """Return the names of the scenarios, numbered if two are equal."""
    names = [answer.scenario.name for answer in answers]
    return [f"{name} ({k})" if names.count(name) > 1 else name for k, name in enumerate(names, 1)]
