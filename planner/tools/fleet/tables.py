"""What a fleet is to run, what one more GPU of each kind is worth to it, and how far its loads may grow."""

import math

import pandas as pd

from planner.tools.fleet.allocation import (
    GROWTH_RESOLUTION,
    FleetPlan,
    allocate_replicas,
    find_max_growth,
)

GROWTH_CURVE_POINTS = 25
"""Loads of the curve of cost against growth."""
FREE_GPU_LABEL = "free"
"""Who has the GPUs that nobody needs."""


def build_allocation_table(plan: FleetPlan) -> pd.DataFrame:
    """A row for each deployment of each scenario that runs; empty where nothing serves them all."""
    rows = [
        (
            name, plan.scenarios[name].model.rpartition("/")[2], many,
            f"{many * one.gpus} {one.gpu}",
            f"{many * one.usd_per_hour:,.2f}", f"{many * one.load_fraction:.0%}", one.description,
            "at risk" if one.at_risk else "holds",
        )
        for name,
        some in (plan.current_allocation.replicas if plan.current_allocation else {}).items()
        for one, many in some.items()
    ]  # fmt: skip
    columns = [
        "scenario",
        "model",
        "replicas",
        "GPUs",
        "USD/h",
        "of its load",
        "each of them",
        "service level",
    ]
    return pd.DataFrame(rows, columns=columns)


def build_gpu_usage_table(plan: FleetPlan) -> pd.DataFrame:
    """GPUs by kind and by who has them, those that stay free among them."""
    running, rows = plan.current_allocation.replicas if plan.current_allocation else {}, []
    for kind, stock in plan.fleet.stock.items():
        taken = [
            sum(one.gpus * many for one, many in some.items() if one.gpu == kind)
            for some in running.values()
        ]
        rows += [
            (kind, who, gpus)
            for who, gpus in zip(
                (*running, FREE_GPU_LABEL), (*taken, stock - sum(taken)), strict=True
            )
        ]
    return pd.DataFrame([row for row in rows if row[2]], columns=["GPU", "who", "GPUs"])


def build_shadow_price_table(plan: FleetPlan) -> pd.DataFrame:
    """A row for each kind of GPU: how many there are and run, what one more would save, how far loads may grow then."""
    used = plan.current_allocation.gpus_by_kind if plan.current_allocation else {}
    rows = [
        (
            kind, stock, used.get(kind, 0),
            f"{plan.shadow_prices[kind]:,.2f}" if kind in plan.shadow_prices else None,
            _format_factor(plan, find_max_growth(plan.fleet.with_gpus(kind, 1), most=plan.growth_limit)),
        )
        for kind, stock in plan.fleet.stock.items()
    ]  # fmt: skip
    columns = [
        "GPU",
        "there are",
        "in use",
        "one more would save (USD/h)",
        "and every load may grow to",
    ]
    return pd.DataFrame(rows, columns=columns)


def build_growth_limit_table(plan: FleetPlan) -> pd.DataFrame:
    """A row for each scenario, the first to break on top: how far its load may grow while the others stay."""
    rows = [
        (name, _format_factor(plan, plan.max_growth_alone[name]))
        for name in sorted(plan.max_growth_alone, key=plan.max_growth_alone.__getitem__)
    ]
    return pd.DataFrame(rows, columns=["scenario", "its load may grow to"])


def sweep_fleet_growth(plan: FleetPlan) -> pd.DataFrame:
    """What all cost an hour with every load so many times as large, to twice `plan.growth` or where it breaks."""
    most = min(2 * plan.growth - 1, plan.max_growth)
    if math.isnan(most):
        return pd.DataFrame(columns=["every load, times", "USD per hour"])
    loads = [1 + (most - 1) * k / (GROWTH_CURVE_POINTS - 1) for k in range(GROWTH_CURVE_POINTS)]
    found = [(load, allocate_replicas(plan.fleet.with_growth(load))) for load in loads]
    rows = [(load, allocation.usd_per_hour) for load, allocation in found if allocation]
    return pd.DataFrame(rows, columns=["every load, times", "USD per hour"])


def summarize_fleet(plan: FleetPlan) -> str:
    """What all of it costs and draws, or what keeps it from being served."""
    if plan.current_allocation is None:
        return f"Nothing serves every scenario; in the way: {describe_binding_limits(plan)}."
    used = ", ".join(
        f"{plan.current_allocation.gpus_by_kind.get(kind, 0)} of {many} {kind}"
        for kind, many in plan.fleet.stock.items()
    )
    risks = [
        name
        for name, some in plan.current_allocation.replicas.items()
        if any(fleet_option.at_risk for fleet_option in some)
    ]
    text = (
        f"Together ${plan.current_allocation.usd_per_hour:,.2f} per hour and"
        f" {plan.current_allocation.watts:,.0f} W on average; in use: {used}."
    )
    return text + f" At risk at the pessimistic end of an interval: {', '.join(risks)}." * (
        len(risks) > 0
    )


def describe_shadow_prices(plan: FleetPlan) -> str:
    """What one GPU more of each kind would save."""
    saving = [f"{kind} ${usd:,.2f}" for kind, usd in plan.shadow_prices.items() if usd > 0.005]
    if saving:
        return f"One more GPU would save per hour: {', '.join(saving)}."
    return "One more GPU of any kind saves nothing." if plan.shadow_prices else ""


def describe_growth(plan: FleetPlan) -> str:
    """What becomes of the fleet when every load grows, and what breaks first."""
    if plan.current_allocation is None:
        return ""
    after = (
        f"${plan.grown_allocation.usd_per_hour:,.2f} per hour"
        if plan.grown_allocation
        else "not served"
    )
    text = f"With {plan.growth:g} times every load: {after}."
    if math.isinf(plan.max_growth):
        return f"{text} Nothing breaks up to {plan.growth_limit:g} times."
    return (
        f"{text} It breaks above {plan.max_growth:.2f} times; in the way:"
        f" {describe_binding_limits(plan)}."
    )


def describe_binding_limits(plan: FleetPlan) -> str:
    """What is in the way, in words."""
    without = [name for name, some in plan.fleet.options.items() if not some]
    if without:
        return f"no GPU of the stock serves {', '.join(without)}"
    return "any of " * (len(plan.binding_limits) > 1) + ", ".join(plan.binding_limits)


def _format_factor(plan: FleetPlan, factor: float) -> str:
    if math.isnan(factor):
        return "\N{EN DASH}"
    if math.isinf(factor):
        return f"more than {plan.growth_limit:g} times"
    return f"{factor:.2f} times" if factor >= 1 + GROWTH_RESOLUTION else "not at all"
