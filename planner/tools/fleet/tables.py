"""Tabulate and describe a fleet plan: its allocation, shadow prices and growth."""

import math
from collections.abc import Mapping

import pandas as pd

from planner.answers.build import build_offer
from planner.answers.deployment_wording import describe_weights
from planner.core.number_format import format_number, format_probability
from planner.models.registry import load_model
from planner.planning.candidate import describe_deployment, describe_formats
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.tools.fleet.allocation import (
    GROWTH_RESOLUTION,
    Allocation,
    FleetOption,
    FleetPlan,
    find_max_growth,
)

LOAD_LIMITS = ("load", "users", "job")
"""Kinds of limit that the load uses."""
NOT_KNOWN = "\N{EN DASH}"
"""What stands for a figure that there is not."""
FREE_GPU_LABEL = "free"
"""Owner of the GPUs that no scenario uses."""


def build_allocation_table(plan: FleetPlan) -> pd.DataFrame:
    """Return a row per scenario and deployment; none if the fleet is infeasible.

    The load is beside what of the capacity may be used, as in the scenario's own plan; up to
    `confident up to` the replicas meet the targets as probably as the scenario asks for.
    """
    rows = [
        (
            name,
            plan.scenarios[name].model.rpartition("/")[2],
            (described := _describe_replicas(plan, name, option, count))[0],
            described[1] + ", converted" * _differs_from_checkpoint(plan.scenarios[name], option),
            _format_price(plan, option.gpu, count * option.usd_per_hour),
            *_format_load(plan.judged.get((name, option, count))),
            f"{count * option.load_fraction:.2f} times",
        )
        for name, replicas in _get_replicas(plan).items()
        for option, count in replicas.items()
    ]
    columns = [
        "scenario",
        "model",
        "deployment",
        "weights",
        "USD/h",
        "likely",
        "load, of usable capacity",
        "confident up to",
    ]
    return pd.DataFrame(rows, columns=columns)


def list_deployments(plan: FleetPlan) -> list[tuple[str, str]]:
    """List each scenario with its traffic, targets, and what it runs on."""
    current = plan.current_allocation
    runs = _describe_allocation(plan, current) if current else {}
    rows = []
    for name, scenario in plan.scenarios.items():
        targets = ", ".join(map(str, scenario.slo_targets))
        parts = [scenario.model.rpartition("/")[2], str(scenario.workload), targets, runs.get(name)]
        rows.append((name, "; ".join(filter(None, parts))))
    return rows


def _describe_replicas(
    plan: FleetPlan, name: str, option: FleetOption, count: int
) -> tuple[str, str]:
    """Describe a number of replicas, and the format of their weights."""
    judged = plan.judged.get((name, option, count)) or option.plan
    if judged is None or judged.chosen is None:
        return f"{count} x ({option.description})", NOT_KNOWN
    deployment = judged.chosen.deployment.with_replicas(count)
    weights = describe_weights(build_offer(judged.scenario, judged.chosen))
    where = describe_deployment(deployment).removesuffix(f", {describe_formats(deployment)}")
    return where, weights.removesuffix(" weights")


def _differs_from_checkpoint(scenario: Scenario, option: FleetOption) -> bool:
    """Tell whether a replica's weights are converted from those of the checkpoint."""
    if option.plan is None or option.plan.chosen is None:
        return False
    method = option.plan.chosen.deployment.model.quantization.method
    return method != load_model(scenario.model).quantization.method


def _format_price(plan: FleetPlan, kind: str, usd: float) -> str:
    return "owned" if kind in plan.fleet.owned else f"{usd:,.2f}"


def _format_load(judged: Plan | None) -> tuple[str, str]:
    """Format the probability, and the load beside the usable capacity."""
    if judged is None or judged.chosen is None:
        return NOT_KNOWN, NOT_KNOWN
    likely = format_probability(judged.probability, judged.chosen.confidence)
    limits = build_offer(judged.scenario, judged.chosen).limits
    limit = next((each for each in limits if each.kind in LOAD_LIMITS), None)
    if limit is None:
        return likely, NOT_KNOWN
    load, most = format_number(limit.value), format_number(limit.limit)
    return likely, f"{load} of {most} {limit.unit}"


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
            (
                _format_price(plan, kind, plan.shadow_prices[kind])
                if kind in plan.shadow_prices
                else None
            ),
            _format_growth_with_one_more(plan, kind),
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
    """Return the cost and GPUs over the growth of all loads, to twice `plan.growth` or the largest.

    At each load they are the cheapest that meet the targets as probably as the scenarios ask for.
    """
    return pd.DataFrame(
        [
            (load, allocation.usd_per_hour, sum(allocation.gpus_by_kind.values()))
            for load, allocation in plan.growth_allocations
        ],
        columns=["every load, times", "USD per hour", "GPUs"],
    )


def build_growth_step_table(plan: FleetPlan) -> pd.DataFrame:
    """Return a row for each load from which on other replicas are needed, and which."""
    rows: list[tuple[str, int, str, str]] = []
    before: dict[str, str] = {}
    for load, allocation in plan.growth_allocations:
        runs = _describe_allocation(plan, allocation)
        changes = [f"{name} on {run}" for name, run in runs.items() if before.get(name) != run]
        if changes:
            gpus = sum(allocation.gpus_by_kind.values())
            usd = f"{allocation.usd_per_hour:,.2f}"
            rows.append((f"{load:.2f}", gpus, usd, "; ".join(changes)))
        before = runs
    table = pd.DataFrame(rows, columns=["every load, times", "GPUs", "USD/h", "what changes"])
    return table.drop(columns="USD/h") if plan.owns_all else table


def _describe_allocation(plan: FleetPlan, allocation: Allocation) -> dict[str, str]:
    """Describe what each scenario runs on, such as "4 x H100-SXM, TP4, FP8"."""
    return {
        name: " and ".join(
            ", ".join(_describe_replicas(plan, name, *item)).removesuffix(f", {NOT_KNOWN}")
            for item in replicas.items()
        )
        for name, replicas in allocation.replicas.items()
    }


def summarize_fleet(plan: FleetPlan) -> str:
    """Return the cost, power and probability of the fleet, or why it is infeasible."""
    current = plan.current_allocation
    if current is None:
        return f"No allocation serves every scenario. Limited by {describe_binding_limits(plan)}."
    used = ", ".join(
        f"{current.gpus_by_kind.get(kind, 0)} of {stock} {'owned ' * (kind in plan.fleet.owned)}{kind}"
        for kind, stock in plan.fleet.stock.items()
    )
    risks = [
        name
        for name, replicas in current.replicas.items()
        if any(option.at_risk for option in replicas)
    ]
    cost = "at" if plan.owns_all else f"for ${current.usd_per_hour:,.2f}/h and"
    text = f"Every scenario is served {cost} {current.watts:,.0f} W on average, on {used}."
    text += f" At risk: {', '.join(risks)}." * (len(risks) > 0)
    return " ".join(filter(None, (text, describe_probabilities(plan, current))))


def describe_probabilities(plan: FleetPlan, allocation: Allocation) -> str:
    """Describe how probably each scenario meets its targets, and all of them together.

    All do at most as probably as the least probable, if their errors have one cause, and at least
    with the product, if they have nothing in common.
    """
    odds = {name: plan.get_probability(allocation, name) for name in allocation.replicas}
    if any(map(math.isnan, odds.values())):
        return ""
    each = ", ".join(f"{name} {format_probability(p)}" for name, p in odds.items())
    text = f"Likely to meet every target: {each}"
    if len(odds) == 1:
        return f"{text}."
    least, most = (
        format_probability(math.prod(odds.values())),
        format_probability(min(odds.values())),
    )
    together = most if least == most else f"{least} (independent errors) to {most} (shared ones)"
    return f"{text}; all together {together}."


def describe_safer(plan: FleetPlan) -> str:
    """Describe what is safer within the stock, for how much more; empty if nothing is."""
    current, safer = plan.current_allocation, plan.safer
    if current is None or safer is None:
        return ""
    runs = _describe_allocation(plan, safer)
    changes = " and ".join(
        f"{name} on {runs[name]} ({format_probability(plan.get_probability(safer, name))} likely)"
        for name, replicas in safer.replicas.items()
        if replicas != current.replicas[name]
    )
    left = ", ".join(
        f"{stock - current.gpus_by_kind.get(kind, 0)} {kind}"
        for kind, stock in plan.fleet.stock.items()
        if stock > current.gpus_by_kind.get(kind, 0)
    )
    odds = format_probability(math.prod(plan.get_probability(safer, name) for name in runs))
    more = safer.usd_per_hour - current.usd_per_hour
    return (
        f"Safer, with the {left} that are left: {changes}, for ${more:,.2f}/h more; all together at"
        f" least {odds}."
    )


def describe_shadow_prices(plan: FleetPlan) -> str:
    """Return the shadow prices in a sentence; those of GPUs of one's own are no money."""
    if plan.owns_all and plan.shadow_prices:
        growths = [
            f"{_format_growth_with_one_more(plan, kind)} with {kind}" for kind in plan.fleet.stock
        ]
        return f"With one more GPU every load may grow to: {', '.join(growths)}."
    saving = [
        f"${usd:,.2f}/h with {kind}" for kind, usd in plan.shadow_prices.items() if usd > 0.005
    ]
    if saving:
        return f"One more GPU saves {', '.join(saving)}."
    return "One more GPU of any kind saves nothing." if plan.shadow_prices else ""


def describe_growth(plan: FleetPlan) -> str:
    """Return what serves the grown load, and the growth and limit at which the fleet is infeasible."""
    if plan.current_allocation is None:
        return ""
    text = (
        "What runs meets the targets as probably as asked up to"
        f" {plan.current_allocation.load_factor:.2f} times every load. With {plan.growth:g} times"
        f" every load: {_describe_grown(plan)}."
    )
    if math.isinf(plan.max_growth):
        return f"{text} Every scenario is served up to {plan.growth_limit:g} times."
    return (
        f"{text} The largest growth is {plan.max_growth:.2f} times, limited by"
        f" {describe_binding_limits(plan)}."
    )


def _describe_grown(plan: FleetPlan) -> str:
    grown = plan.grown_allocation
    if grown is None:
        return "not served"
    if plan.is_ready_to_grow:
        return "served by what runs"
    runs = "; ".join(f"{name} on {run}" for name, run in _describe_allocation(plan, grown).items())
    gpus = ", ".join(f"{count} {kind}" for kind, count in grown.gpus_by_kind.items())
    cost = f"${grown.usd_per_hour:,.2f}/h on " * (not plan.owns_all)
    return f"{cost}{gpus} ({runs})"


def describe_binding_limits(plan: FleetPlan) -> str:
    """Return the binding limits in words."""
    unserved = [name for name, options in plan.fleet.options.items() if not options]
    if unserved:
        return f"no GPU of the stock serves {', '.join(unserved)}"
    return "any of " * (len(plan.binding_limits) > 1) + ", ".join(plan.binding_limits)


def _format_growth_with_one_more(plan: FleetPlan, kind: str) -> str:
    most = find_max_growth(plan.fleet.with_gpus(kind, 1), limit=plan.growth_limit)
    return _format_factor(plan, most)


def _format_factor(plan: FleetPlan, factor: float) -> str:
    if math.isnan(factor):
        return "\N{EN DASH}"
    if math.isinf(factor):
        return f"more than {plan.growth_limit:g} times"
    return f"{factor:.2f} times" if factor >= 1 + GROWTH_RESOLUTION else "not at all"
