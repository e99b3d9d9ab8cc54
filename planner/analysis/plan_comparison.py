"""Compare plans of several scenarios: what the scenarios change, and how the plans differ."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import pandas as pd

from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.planning.billing import price_tokens
from planner.planning.evaluation import (
    compute_free_capacity,
    estimate_run_hours,
    get_capacity_rps,
)
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.slo import format_latency

MAX_COMPARED_PLANS = 4
"""Most plans in a comparison."""
VERDICT_LABELS = {
    "holds": "meets targets",
    "at_risk": "at risk",
    "nothing_meets": "no plan meets the targets",
}

ValueT = TypeVar("ValueT")


def build_plan_comparison(plans: Sequence[Plan]) -> pd.DataFrame:
    """Return a row per fact and a column per plan: first the changes, then each plan's results.

    Takes two to `MAX_COMPARED_PLANS` plans; costs show the difference from the first plan's in
    brackets.
    """
    check_plan_count(plans)
    facts = {
        name: [describe(plan.scenario) for plan in plans]
        for name, describe in _SCENARIO_FACTS.items()
    }
    rows: dict[str, Sequence[object]] = {
        name: values for name, values in facts.items() if len(set(values)) > 1
    }
    for parts in (map(_collect_plan_facts, plans), map(_format_slo_statuses, plans)):
        rows |= _collect_by_name(parts)
    costs = _collect_by_name(map(_collect_costs, plans))
    rows |= {
        name: [_format_with_difference(usd, values[0]) for usd in values]
        for name, values in costs.items()
    }
    data = pd.DataFrame(rows.values(), columns=build_plan_titles(plans))
    data.insert(0, "", list(rows))
    return data


def _collect_by_name(parts: Iterable[Mapping[str, ValueT]]) -> dict[str, list[ValueT | None]]:
    """Return the values of all parts by name; None if a part lacks it."""
    parts = list(parts)
    return {
        name: [part.get(name) for part in parts]
        for name in dict.fromkeys(name for part in parts for name in part)
    }


def check_plan_count(plans: Sequence[object]) -> None:
    """Raise `PlannerError` if this many plans cannot be compared."""
    if not 2 <= len(plans) <= MAX_COMPARED_PLANS:
        raise PlannerError(f"2 to {MAX_COMPARED_PLANS} scenarios can be compared, got {len(plans)}")


def describe_cheapest_plan(plans: Sequence[Plan]) -> str:
    """Describe the cheapest feasible plan, of equals the safest, and its distance to the next."""
    costs = sorted(
        (round(interval.mid, 2), plan.verdict != "holds", name, interval.lo)
        for plan, name in zip(plans, build_plan_titles(plans), strict=True)
        if plan.chosen and (interval := plan.chosen.prediction.usd_per_hour_interval)
    )
    infeasible = [
        name for plan, name in zip(plans, build_plan_titles(plans), strict=True) if not plan.chosen
    ]
    sentences = []
    if infeasible:
        sentences.append(f"No plan meets the targets of {', '.join(infeasible)}.")
    if len(costs) > 1:
        (usd, at_risk, name, lowest), (next_usd, _, other, next_lowest) = costs[:2]
        equals = [
            f"{other_name} (at risk)" if other_at_risk else other_name
            for other_usd, other_at_risk, other_name, _ in costs[1:]
            if other_usd == usd
        ]
        difference = (
            f"as much as {' and '.join(equals)}"
            if equals
            else f"{1 - usd / next_usd:.0%} less than {other}"
        )
        if next_lowest < lowest and not equals:
            difference += (
                f" at the middle price; at the cheapest quotes {other} does,"
                f" ${next_lowest:,.2f} against ${lowest:,.2f}"
            )
        sentences.insert(
            0,
            f"{name} costs least{', but is at risk' * at_risk}: ${usd:,.2f} an hour, {difference}.",
        )
    return " ".join(sentences) or "Without prices they are told apart by their GPUs."


def compare_slos(plans: Sequence[Plan]) -> pd.DataFrame:
    """Return predictions as fractions of their limits (intervals), one row per SLO and plan."""
    rows = []
    for name, plan in zip(build_plan_titles(plans), plans, strict=True):
        if (performance := plan.performance) is None:
            continue
        for target in plan.scenario.slo_targets:
            value = performance.get_for_display(target.metric, target.percentile)
            if not math.isnan(value.mid):
                rows.append(
                    {
                        "scenario": name,
                        "target": str(target),
                        "Share of the limit": value / target.seconds,
                    }
                )
    return pd.DataFrame(rows, columns=["scenario", "target", "Share of the limit"])


def build_plan_titles(plans: Sequence[Plan]) -> list[str]:
    """Return the names of the plans' scenarios, numbered if two are equal."""
    names = [plan.scenario.name for plan in plans]
    return [f"{name} ({k})" if names.count(name) > 1 else name for k, name in enumerate(names, 1)]


def _describe_adapters(scenario: Scenario) -> str:
    """Describe the LoRA adapters of a scenario."""
    load, rank = scenario.workload, scenario.engine_args.get("max_lora_rank")
    return (
        f"{load.adapters} of rank {rank} at most, skew {load.adapter_zipf:g}"
        if load.adapters
        else "none"
    )


_SCENARIO_FACTS: dict[str, Callable[[Scenario], str]] = {
    "model": lambda scenario: scenario.model,
    "weights": lambda scenario: " or ".join(
        quantization or "checkpoint" for quantization in scenario.quantizations
    ),
    "KV cache allowed": lambda scenario: " or ".join(scenario.kv_cache_dtypes),
    "GPUs allowed": lambda scenario: " or ".join(
        f"up to {candidate_gpu.max_gpus} x {candidate_gpu.gpu.name}"
        for candidate_gpu in scenario.gpus
    ),
    "engine": lambda scenario: " or ".join(map(str, (scenario.engine, *scenario.other_engines))),
    "traffic": lambda scenario: str(scenario.workload),
    "a day": lambda scenario: str(scenario.daily_profile or "always the busiest hour"),
    "LoRA adapters": _describe_adapters,
    "targets": lambda scenario: (
        "; ".join(f"{t.name} {format_latency(t.seconds)}" for t in scenario.slo_targets) or "none"
    ),
    "headroom": lambda scenario: f"{scenario.headroom:.0%}",
    "layout": lambda scenario: (
        ", ".join(f"{name} {size}" for name, size in scenario.layout.items()) or "any"
    ),
    "engine arguments": lambda scenario: (
        ", ".join(f"{name} {value}" for name, value in scenario.engine_args.items()) or "none"
    ),
    "speculation": lambda scenario: (
        str(scenario.speculation) + " (not allowed)" * (not scenario.speculation.allowed)
        if scenario.speculation
        else "none"
    ),
}


def _collect_plan_facts(plan: Plan) -> dict[str, object]:
    """Collect what a plan is and does, except SLOs and costs."""
    best, performance = plan.best, plan.performance
    rows: dict[str, object] = {
        "answer": VERDICT_LABELS[plan.verdict],
        "deployment": best and best.description,
        "what limits it": plan.binding_constraint.constraint,
    }
    if best is None or performance is None:
        return rows
    free, power = compute_free_capacity(plan.scenario, best.prediction), best.prediction.gpu_power_w
    rows |= {
        "capacity (requests/s)": get_capacity_rps(plan.scenario, performance),
        "stays free (%)": None if free is None else round(free * 100),
        "output (tokens/s)": performance.output_tps,
        "KV cache of a GPU (GiB)": best.prediction.memory.kv_available / GIB,
        "drawn by all GPUs (W)": power and power * best.prediction.num_gpus,
    }
    if (usd := best.prediction.usd_per_hour_interval) and usd.lo < usd.hi:
        rows |= {"USD per hour, by the quotes": f"{usd.lo:,.2f} to {usd.hi:,.2f}"}
    return rows | {"figures": performance.source_description}


def _format_slo_statuses(plan: Plan) -> dict[str, str | None]:
    """Format the prediction and the status of each SLO."""
    best, performance, statuses = plan.best, plan.performance, dict[str, str | None]()
    for target in plan.scenario.slo_targets:
        limit = best.get_limit(target.name) if best and performance else None
        statuses[f"{target.name} (ms)"] = None
        if limit and performance:
            latency = performance.get_for_display(target.metric, target.percentile)
            statuses[f"{target.name} (ms)"] = f"{latency * 1e3:,.0f}: {limit.status}"
    return statuses


def _collect_costs(plan: Plan) -> dict[str, float]:
    """Collect the costs of the best candidate in USD by name."""
    best = plan.best
    month = best.prediction.usd_per_month if best else None
    if best is None or best.usd_per_hour is None or month is None:
        return {}
    costs = {"USD per hour": best.usd_per_hour}
    if hours := estimate_run_hours(plan.scenario, best):
        costs |= {"USD for all of the work": best.usd_per_hour * hours.mid}
    else:
        costs |= {"USD a month": month.mid}
    if plan.billing:
        costs |= {f"USD a day, {option}": usd for option, usd in plan.billing.usd.items()}
    tokens = price_tokens(plan.scenario, best)
    return costs | ({f"USD per million {tokens[1]} tokens": tokens[0].mid} if tokens else {})


def _format_with_difference(usd: float | None, first: float | None) -> str | None:
    """Format an amount with its difference from the first plan's."""
    if usd is None:
        return None
    shown = f"{usd:,.2f}" if usd < 1000 else f"{usd:,.0f}"
    return (
        shown
        if first is None or abs(usd - first) < 1e-9 * first
        else f"{shown} ({usd / first - 1:+.0%})"
    )
