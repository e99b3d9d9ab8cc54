"""Tabulate and describe a fleet plan: its allocation, shadow prices and growth."""

import math
from collections.abc import Mapping

import pandas as pd

from planner.tools.fleet.allocation import (
    GROWTH_RESOLUTION,
    FleetOption,
    FleetPlan,
    allocate_replicas,
    find_max_growth,
)

GROWTH_CURVE_POINTS = 25
"""Points of the curve of cost over growth."""
FREE_GPU_LABEL = "free"
"""Owner of the GPUs that no scenario uses."""


def build_allocation_table(plan: FleetPlan) -> pd.DataFrame:
    """Return a row per scenario and deployment; none if the fleet is infeasible."""
    rows = [
        (
            name,
            plan.scenarios[name].model.rpartition("/")[2],
            count,
            f"{count * option.gpus} {option.gpu}",
            f"{count * option.usd_per_hour:,.2f}",
            f"{count * option.load_fraction:.0%}",
            option.description,
            "at risk" if option.at_risk else "met",
        )
        for name, replicas in _get_replicas(plan).items()
        for option, count in replicas.items()
    ]
    columns = [
        "scenario",
        "model",
        "replicas",
        "GPUs",
        "USD/h",
        "capacity / load",
        "deployment",
        "targets",
    ]
    return pd.DataFrame(rows, columns=columns)


def _get_replicas(plan: FleetPlan) -> Mapping[str, Mapping[FleetOption, int]]:
    return plan.current_allocation.replicas if plan.current_allocation else {}


def build_gpu_usage_table(plan: FleetPlan) -> pd.DataFrame:
    """Return the GPUs by kind and by scenario, with those that are free."""
    rows = []
    for kind, stock in plan.fleet.stock.items():
        used = [
            (name, sum(option.gpus * n for option, n in replicas.items() if option.gpu == kind))
            for name, replicas in _get_replicas(plan).items()
        ]
        used.append((FREE_GPU_LABEL, stock - sum(num_gpus for _, num_gpus in used)))
        rows += [(kind, name, num_gpus) for name, num_gpus in used if num_gpus]
    return pd.DataFrame(rows, columns=["GPU", "who", "GPUs"])


def build_shadow_price_table(plan: FleetPlan) -> pd.DataFrame:
    """Return a row per kind of GPU: stock, use, shadow price, and growth with one more GPU."""
    used = plan.current_allocation.gpus_by_kind if plan.current_allocation else {}
    rows = [
        (
            kind,
            stock,
            used.get(kind, 0),
            f"{plan.shadow_prices[kind]:,.2f}" if kind in plan.shadow_prices else None,
            _format_factor(
                plan, find_max_growth(plan.fleet.with_gpus(kind, 1), limit=plan.growth_limit)
            ),
        )
        for kind, stock in plan.fleet.stock.items()
    ]
    columns = [
        "GPU",
        "stock",
        "in use",
        "one more saves (USD/h)",
        "and every load may grow to",
    ]
    return pd.DataFrame(rows, columns=columns)


def build_growth_limit_table(plan: FleetPlan) -> pd.DataFrame:
    """Return the largest growth of each scenario while the others stay, the smallest first."""
    rows = [
        (name, _format_factor(plan, plan.max_growth_alone[name]))
        for name in sorted(plan.max_growth_alone, key=plan.max_growth_alone.__getitem__)
    ]
    return pd.DataFrame(rows, columns=["scenario", "its load may grow to"])


def sweep_fleet_growth(plan: FleetPlan) -> pd.DataFrame:
    """Return the cost over the growth of all loads, to twice `plan.growth` or the largest."""
    most = min(2 * plan.growth - 1, plan.max_growth)
    if math.isnan(most):
        return pd.DataFrame(columns=["every load, times", "USD per hour"])
    loads = [1 + (most - 1) * k / (GROWTH_CURVE_POINTS - 1) for k in range(GROWTH_CURVE_POINTS)]
    rows = [
        (load, allocation.usd_per_hour)
        for load in loads
        if (allocation := allocate_replicas(plan.fleet.with_growth(load)))
    ]
    return pd.DataFrame(rows, columns=["every load, times", "USD per hour"])


def summarize_fleet(plan: FleetPlan) -> str:
    """Return the cost and power of the fleet, or why it is infeasible."""
    if plan.current_allocation is None:
        return f"No allocation serves every scenario. Limited by {describe_binding_limits(plan)}."
    used = ", ".join(
        f"{plan.current_allocation.gpus_by_kind.get(kind, 0)} of {stock} {kind}"
        for kind, stock in plan.fleet.stock.items()
    )
    risks = [
        name
        for name, replicas in plan.current_allocation.replicas.items()
        if any(option.at_risk for option in replicas)
    ]
    text = (
        f"Every scenario is served for ${plan.current_allocation.usd_per_hour:,.2f}/h and"
        f" {plan.current_allocation.watts:,.0f} W on average, on {used}."
    )
    return text + f" At risk: {', '.join(risks)}." * (len(risks) > 0)


def describe_shadow_prices(plan: FleetPlan) -> str:
    """Return the shadow prices in a sentence."""
    saving = [
        f"${usd:,.2f}/h with {kind}" for kind, usd in plan.shadow_prices.items() if usd > 0.005
    ]
    if saving:
        return f"One more GPU saves {', '.join(saving)}."
    return "One more GPU of any kind saves nothing." if plan.shadow_prices else ""


def describe_growth(plan: FleetPlan) -> str:
    """Return the cost after growth, and the growth and limit at which the fleet is infeasible."""
    if plan.current_allocation is None:
        return ""
    after = (
        f"${plan.grown_allocation.usd_per_hour:,.2f}/h" if plan.grown_allocation else "not served"
    )
    text = f"With {plan.growth:g} times every load: {after}."
    if math.isinf(plan.max_growth):
        return f"{text} Every scenario is served up to {plan.growth_limit:g} times."
    return (
        f"{text} The largest growth is {plan.max_growth:.2f} times, limited by"
        f" {describe_binding_limits(plan)}."
    )


def describe_binding_limits(plan: FleetPlan) -> str:
    """Return the binding limits in words."""
    unserved = [name for name, options in plan.fleet.options.items() if not options]
    if unserved:
        return f"no GPU of the stock serves {', '.join(unserved)}"
    return "any of " * (len(plan.binding_limits) > 1) + ", ".join(plan.binding_limits)


def _format_factor(plan: FleetPlan, factor: float) -> str:
    if math.isnan(factor):
        return "\N{EN DASH}"
    if math.isinf(factor):
        return f"more than {plan.growth_limit:g} times"
    return f"{factor:.2f} times" if factor >= 1 + GROWTH_RESOLUTION else "not at all"
