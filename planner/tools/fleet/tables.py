"""Tabulate and describe a fleet plan: its allocation, growth, and what one more GPU does."""

import math
from dataclasses import replace

import pandas as pd

from planner.answers import words
from planner.answers.answer import build_offer
from planner.core.number_format import format_probability, format_usd
from planner.core.text import format_columns
from planner.hardware.prices import HOURS_PER_MONTH
from planner.planning.candidate import PROBABILITY_TIE
from planner.planning.scenario_schema import MAX_GPUS_PER_KIND
from planner.tools.fleet.allocation import (
    DOUBT_USD,
    GROWTH_STEP,
    SAFER_PRICE_FACTOR,
    Allocation,
    FleetPlan,
    allocate_stock,
    find_max_growth,
)

LOAD_COLUMN = "every load, times"


def describe_runs(allocation: Allocation | None) -> dict[str, str]:
    """Describe what each scenario runs on."""
    return {
        name: words.describe_offer(
            replace(offer, deployment=offer.deployment.with_replicas(option.replicas))
        )
        for name, option in (allocation or {}).items()
        for offer in [build_offer(option.plan.scenario, option.candidate)]
    }


def _sum_usd(allocation: Allocation | None) -> float:
    """Sum what all run on costs, USD a month."""
    return HOURS_PER_MONTH * math.fsum(each.usd_per_hour for each in (allocation or {}).values())


def build_allocation_table(plan: FleetPlan) -> pd.DataFrame:
    """Return a row per scenario; none if the fleet is infeasible.

    Up to `its load may grow to` the replicas meet the targets as probably as the scenario asks for.
    """
    rows = [
        (
            name,
            plan.scenarios[name].model.rpartition("/")[2],
            describe_runs(plan.current)[name],
            format_usd(option.usd_per_hour * HOURS_PER_MONTH),
            format_probability(option.probability, plan.scenarios[name].confidence),
            f"{option.candidate.capacity_utilization:.0%}",
            f"{option.max_load:.2f} times",
        )
        for name, option in (plan.current or {}).items()
    ]
    return pd.DataFrame(
        rows,
        columns=[
            "scenario",
            "model",
            "deployment",
            "USD/month",
            "likely",
            "of usable capacity",
            "its load may grow to",
        ],
    )


def build_gpu_usage_table(plan: FleetPlan) -> pd.DataFrame:
    """Return the GPUs by kind and by scenario, with those that are free."""
    used = [(each.gpu, name, each.gpus) for name, each in (plan.current or {}).items()]
    free = [
        (kind, "free", count - plan.count_used(kind)) for kind, count in plan.entry.stock.items()
    ]
    return pd.DataFrame([*used, *free], columns=["GPU", "who", "GPUs"])


def build_shadow_price_table(plan: FleetPlan) -> pd.DataFrame:
    """Return a row per kind of GPU: stock, use, what one more saves, and growth with one more."""
    rows = [
        (
            kind,
            count,
            plan.count_used(kind),
            format_usd(max(_sum_usd(plan.current) - _sum_usd(larger.current), 0.0)),
            f"{find_max_growth(larger):.2f} times",
        )
        for kind, count in plan.entry.stock.items()
        for larger in [plan.with_limits(stock={**plan.entry.stock, kind: count + 1})]
    ]
    return pd.DataFrame(
        rows,
        columns=["GPU", "stock", "in use", "one more saves a month", "and every load may grow to"],
    )


def build_growth_limit_table(plan: FleetPlan) -> pd.DataFrame:
    """Return the largest growth of each scenario while the others stay, the smallest first."""
    alone = sorted((find_max_growth(plan, {name}), name) for name in plan.options)
    rows = [(name, f"{growth:.2f} times") for growth, name in alone]
    return pd.DataFrame(rows, columns=["scenario", "its load may grow to"])


def build_growth_step_table(plan: FleetPlan) -> pd.DataFrame:
    """Return a row for each load, up to twice the growth, from which on others are the cheapest."""
    rows, load, before = [], 1.0, dict[str, str]()
    while load < 2 * plan.entry.growth - 1 and (found := allocate_stock(plan, load)):
        runs, gpus = describe_runs(found), sum(option.gpus for option in found.values())
        changes = [f"{name} on {run}" for name, run in runs.items() if before.get(name) != run]
        rows.append((round(load, 2), gpus, round(_sum_usd(found)), "; ".join(changes)))
        load, before = GROWTH_STEP / 100 + min(option.max_load for option in found.values()), runs
    return pd.DataFrame(rows, columns=[LOAD_COLUMN, "GPUs", "USD/month", "what changes"])


def summarize_fleet(plan: FleetPlan) -> str:
    """Return the cost, power and probabilities of the fleet, or why it is infeasible.

    All together meet their targets at least as probably as if their errors had nothing in common.
    """
    if plan.current is None:
        return f"No allocation serves every scenario: {describe_limits(plan, 1.0)}."
    stock = ", ".join(
        f"{plan.count_used(kind)} of {count} {'owned ' * (kind in plan.entry.owned)}{kind}"
        for kind, count in plan.entry.stock.items()
    )
    return (
        f"Every scenario is served for {format_usd(_sum_usd(plan.current))}/month and"
        f" {math.fsum(option.watts for option in plan.current.values()):,.0f} W on average,"
        f" on {stock}. Likely to meet every target: {_describe_odds(plan.current)}."
    )


def _describe_odds(allocation: Allocation) -> str:
    odds = {name: one.probability for name, one in allocation.items()}
    odds["all together at least"] = math.prod(odds.values())
    return ", ".join(f"{name} {format_probability(each)}" for name, each in odds.items())


def describe_safer(plan: FleetPlan) -> str:
    """Describe what is safer within the stock, for how much more; empty if nothing is."""
    current = plan.current or {}
    worth = DOUBT_USD + SAFER_PRICE_FACTOR * _sum_usd(current) / HOURS_PER_MONTH
    safer = allocate_stock(plan, doubt_usd=worth) or {}
    changes = {name: option for name, option in safer.items() if option != current[name]}
    if all(
        changes[name].probability < current[name].probability + PROBABILITY_TIE for name in changes
    ):
        return ""
    runs = " and ".join(f"{name} on {run}" for name, run in describe_runs(changes).items())
    return (
        f"Safer, with GPUs that are left: {runs}, for {format_usd(_sum_usd(safer) - _sum_usd(current))} a month"
        f" more. Likely then: {_describe_odds(safer)}."
    )


def describe_growth(plan: FleetPlan) -> str:
    """Return what serves the grown load, and the largest growth with what limits it."""
    if plan.current is None:
        return ""
    grown, most = allocate_stock(plan, plan.entry.growth), find_max_growth(plan)
    runs = "; ".join(f"{name} on {run}" for name, run in describe_runs(grown).items())
    return (
        "What runs meets the targets as probably as asked up to"
        f" {min(option.max_load for option in plan.current.values()):.2f} times every load. With"
        f" {plan.entry.growth:g} times every load:"
        f" {f'{format_usd(_sum_usd(grown))}/month ({runs})' if grown else 'not served'}. The largest growth is"
        f" {most:.2f} times: {describe_limits(plan, most + GROWTH_STEP)}."
    )


def describe_limits(plan: FleetPlan, load: float) -> str:
    """Describe the limits of which any alone is in the way of so many times every load."""
    if unserved := [name for name, options in plan.options.items() if not options]:
        return f"no GPU of the stock serves {', '.join(unserved)}"
    stock = plan.entry.stock
    relaxed = {
        **{
            f"the stock of {kind}": plan.with_limits(stock={**stock, kind: MAX_GPUS_PER_KIND})
            for kind in stock
        },
        "the budget": plan.with_limits(usd_per_month_at_most=math.inf),
        "the power": plan.with_limits(power_at_most=math.inf),
    }
    limits = [name for name, other in relaxed.items() if allocate_stock(other, load)]
    return f"the limit is {' or '.join(limits) or 'all of them together'}"


def format_fleet_plan(plan: FleetPlan) -> str:
    """Return the finding, the allocation as a table, then growth and what one more GPU does."""
    tables = [build_allocation_table(plan), build_shadow_price_table(plan)] if plan.current else []
    shown = [
        format_columns([tuple(table.columns), *table.astype(str).itertuples(index=False)])
        for table in tables
    ]
    texts = [summarize_fleet(plan), *shown[:1], describe_safer(plan), describe_growth(plan)]
    texts += [*shown[1:], plan.left_out and f"Left out: {plan.left_out}."]
    return "\n\n".join(filter(None, texts))
