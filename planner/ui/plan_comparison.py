"""Compare the answers to several scenarios: what the scenarios change, and how the plans differ."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import pandas as pd

from planner.answers import Answer, words
from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.planning.scenario import Scenario
from planner.planning.slo import format_latency

MAX_COMPARED_PLANS = 4
"""Most plans in a comparison."""

ValueT = TypeVar("ValueT")


def build_plan_comparison(answers: Sequence[Answer]) -> pd.DataFrame:
    """Return a row per fact and a column per answer: first the changes, then the results.

    Takes two to `MAX_COMPARED_PLANS` answers; costs show the difference from the first in brackets.
    """
    check_plan_count(answers)
    facts = {
        name: [describe(answer.scenario) for answer in answers]
        for name, describe in _SCENARIO_FACTS.items()
    }
    rows: dict[str, Sequence[object]] = {
        name: values for name, values in facts.items() if len(set(values)) > 1
    }
    for parts in (map(_collect_plan_facts, answers), map(_format_limits, answers)):
        rows |= _collect_by_name(parts)
    costs = _collect_by_name(map(_collect_costs, answers))
    rows |= {
        name: [_format_with_difference(usd, values[0]) for usd in values]
        for name, values in costs.items()
    }
    data = pd.DataFrame(rows.values(), columns=build_plan_titles(answers))
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


def describe_cheapest_plan(answers: Sequence[Answer]) -> str:
    """Describe the cheapest feasible plan, of equals the safest, and its distance to the next."""
    named = list(zip(build_plan_titles(answers), answers, strict=True))
    costs = sorted(
        (round(usd.mid, 2), answer.verdict != "holds", name, usd.lo)
        for name, answer in named
        if answer.chosen and (usd := answer.chosen.usd_per_hour)
    )
    infeasible = [name for name, answer in named if not answer.chosen]
    sentences = []
    if infeasible:
        sentences.append(f"No plan meets the targets of {', '.join(infeasible)}.")
    if len(costs) > 1:
        (price, at_risk, name, lowest), (next_usd, _, other, next_lowest) = costs[:2]
        equals = [
            f"{other_name} (at risk)" if other_at_risk else other_name
            for other_usd, other_at_risk, other_name, _ in costs[1:]
            if other_usd == price
        ]
        difference = f"{1 - price / next_usd:.0%} less than {other}"
        if equals:
            difference = f"as much as {' and '.join(equals)}"
        elif next_lowest < lowest:
            difference += (
                f" at the middle price; at the cheapest quotes {other} does,"
                f" ${next_lowest:,.2f} against ${lowest:,.2f}"
            )
        risk = ", but is at risk" * at_risk
        sentences.insert(0, f"{name} costs least{risk}: ${price:,.2f} an hour, {difference}.")
    return " ".join(sentences) or "Without prices they are told apart by their GPUs."


def compare_limits(answers: Sequence[Answer]) -> pd.DataFrame:
    """Return predictions as shares of their limits, in words, one row per SLO and answer."""
    rows = []
    for name, answer in zip(build_plan_titles(answers), answers, strict=True):
        for limit in answer.best.limits if answer.best else ():
            if (target := limit.target) and (performance := answer.performance):
                value = performance.get_for_display(target.metric, target.percentile)
                told = f"{value / target.seconds * 100:.0f}%"
                rows.append((name, target.name, limit.status, told))
    return pd.DataFrame(rows, columns=["scenario", "target", "status", "told"])


def compare_costs(answers: Sequence[Answer]) -> tuple[pd.DataFrame, str, str] | None:
    """Return the least cost over the load by scenario, and both columns; None if units differ."""
    named = zip(build_plan_titles(answers), answers, strict=True)
    curves = {name: answer.cost_curve for name, answer in named if answer.cost_curve}
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


_SCENARIO_FACTS: dict[str, Callable[[Scenario], str]] = {
    "model": lambda scenario: scenario.model,
    "weights": lambda scenario: " or ".join(
        quantization or "checkpoint" for quantization in scenario.quantizations
    ),
    "KV cache allowed": lambda scenario: " or ".join(scenario.kv_cache_dtypes),
    "GPUs allowed": lambda scenario: " or ".join(
        f"up to {each.max_gpus} x {each.gpu.name}" for each in scenario.gpus
    ),
    "engine": lambda scenario: " or ".join(map(str, (scenario.engine, *scenario.other_engines))),
    "traffic": lambda scenario: str(scenario.workload),
    "a day": lambda scenario: (
        scenario.daily_profile.name if scenario.daily_profile else "always the busiest hour"
    ),
    "LoRA adapters": lambda scenario: (
        f"{scenario.workload.adapters} of rank {scenario.engine_args.get('max_lora_rank')} at most,"
        f" skew {scenario.workload.adapter_zipf:g}"
        if scenario.workload.adapters
        else "none"
    ),
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


def _collect_plan_facts(answer: Answer) -> dict[str, object]:
    """Collect what a plan is and does, except limits and costs."""
    best, performance = answer.best, answer.performance
    rows: dict[str, object] = {
        "answer": words.PHRASES["verdicts"][answer.verdict].lower(),
        "deployment": best and best.description,
        "what limits it": answer.binding.constraint,
    }
    if best is None or performance is None:
        return rows
    free, power, usd = best.free_capacity, best.prediction.gpu_power_w, best.usd_per_hour
    rows |= {
        "capacity (requests/s)": best.capacity_rps,
        "stays free (%)": None if free is None else round(free * 100),
        "output (tokens/s)": performance.output_tps,
        "KV cache of a GPU (GiB)": best.memory.kv_available / GIB,
        "drawn by all GPUs (W)": power and power * best.prediction.num_gpus,
    }
    if usd and usd.lo < usd.hi:
        rows |= {"USD per hour, by the quotes": f"{usd.lo:,.2f} to {usd.hi:,.2f}"}
    return rows | {"figures": performance.source_description}


def _format_limits(answer: Answer) -> dict[str, str | None]:
    """Format the prediction and the status of each target."""
    statuses: dict[str, str | None] = {
        f"{target.name} (ms)": None for target in answer.scenario.slo_targets
    }
    for limit in answer.best.limits if answer.best else ():
        if (target := limit.target) and (performance := answer.performance):
            value = performance.get_for_display(target.metric, target.percentile)
            statuses[f"{limit.name} (ms)"] = f"{value * 1e3:,.0f}: {limit.status}"
    return statuses


def _collect_costs(answer: Answer) -> dict[str, float]:
    """Collect the costs of the best deployment in USD by name."""
    best = answer.best
    if best is None or best.usd_per_hour is None or not best.bills:
        return {}
    costs = {"USD per hour": best.usd_per_hour.mid}
    for bill in best.bills:
        period = "for all of the work" if bill.basis == "for the job" else f"a month, {bill.basis}"
        costs[f"USD {period}"] = bill.usd
    if answer.billing:
        costs |= {f"USD a day, {option}": usd for option, usd in answer.billing.usd.items()}
    if best.usd_per_mtok:
        costs[f"USD per million {best.priced_side} tokens"] = best.usd_per_mtok.mid
    return costs


def _format_with_difference(usd: float | None, first: float | None) -> str | None:
    """Format an amount with its difference from the first one's."""
    if usd is None:
        return None
    shown = f"{usd:,.2f}" if usd < 1000 else f"{usd:,.0f}"
    is_same = first is None or abs(usd - first) < 1e-9 * first
    return shown if is_same or first is None else f"{shown} ({usd / first - 1:+.0%})"
