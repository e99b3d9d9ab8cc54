"""Answers to several questions side by side: what is asked otherwise, and what comes of it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.planning.evaluation import compute_free_capacity, estimate_run_hours
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.slo import format_latency, get_slo_status

MAX_COMPARED_PLANS = 4
"""Questions that are held against each other at most."""
VERDICT_LABELS = {
    "holds": "keeps every promise",
    "at_risk": "at risk",
    "nothing_meets": "nothing meets the service level",
}


def build_plan_comparison(plans: Sequence[Plan]) -> pd.DataFrame:
    """A row per fact, a column per plan: first what is asked otherwise, then what each answer is and does.

    Two to `MOST` plans; costs have their difference from the first plan's in brackets.
    """
    check_plan_count(plans)
    asked = {
        what: [told(plan.scenario) for plan in plans] for what, told in _SCENARIO_FACTS.items()
    }
    rows: dict[str, list[Any]] = {
        what: sentences for what, sentences in asked.items() if len(set(sentences)) > 1
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


def _collect_by_name(parts: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What every part has under each of their names; None where it has nothing."""
    parts = list(parts)
    return {
        name: [part.get(name) for part in parts]
        for name in dict.fromkeys(name for part in parts for name in part)
    }


def check_plan_count(asked: Sequence[object]) -> None:
    """Raise `PlannerError` where so many cannot be compared."""
    if not 2 <= len(asked) <= MAX_COMPARED_PLANS:
        raise PlannerError(f"2 to {MAX_COMPARED_PLANS} scenarios can be compared, got {len(asked)}")


def describe_cheapest_plan(plans: Sequence[Plan]) -> str:
    """Which answer that keeps its promises costs least, of equals the safest, and how much less than the next."""
    known = sorted(
        (round(usd.mid, 2), plan.verdict != "holds", name, usd.lo)
        for plan, name in zip(plans, build_plan_titles(plans), strict=True)
        if plan.chosen and (usd := plan.chosen.prediction.usd_per_hour_interval)
    )
    none = [
        name for plan, name in zip(plans, build_plan_titles(plans), strict=True) if not plan.chosen
    ]
    sentences = [f"Nothing meets the service level of {', '.join(none)}."] if none else []
    if len(known) > 1:
        (middle, risk, name, low), (more, _, other, least) = known[:2]
        alike = [
            f"{each} (at risk)" if unsafe else each
            for same, unsafe, each, _ in known[1:]
            if same == middle
        ]
        less = (
            f"as much as {' and '.join(alike)}"
            if alike
            else f"{1 - middle / more:.0%} less than {other}"
        )
        if least < low and not alike:
            less += (
                f" at the middle price; at the cheapest quotes {other} does, ${least:,.2f} against"
                f" ${low:,.2f}"
            )
        sentences.insert(
            0, f"{name} costs least{', but is at risk' * risk}: ${middle:,.2f} an hour, {less}."
        )
    return " ".join(sentences) or "Without prices they are told apart by their GPUs."


def compare_slos(plans: Sequence[Plan]) -> pd.DataFrame:
    """A row per promise and plan: predicted as a share of the limit, as an interval; of each promise that is made."""
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
                        "promise": str(target),
                        "Share of the limit": value / target.seconds,
                    }
                )
    return pd.DataFrame(rows, columns=["scenario", "promise", "Share of the limit"])


def build_plan_titles(plans: Sequence[Plan]) -> list[str]:
    """The names of the plans' scenarios, numbered where two are alike."""
    names = [plan.scenario.name for plan in plans]
    return [f"{name} ({k})" if names.count(name) > 1 else name for k, name in enumerate(names, 1)]


def _describe_adapters(scenario: Scenario) -> str:
    load, rank = scenario.workload, scenario.engine_args.get("max_lora_rank")
    return (
        f"{load.adapters} of rank {rank} at most, skew {load.adapter_zipf:g}"
        if load.adapters
        else "none"
    )


_SCENARIO_FACTS: dict[str, Callable[[Scenario], str]] = {
    "model": lambda asked: asked.model,
    "weights": lambda asked: " or ".join(
        quantization or "checkpoint" for quantization in asked.quantizations
    ),
    "KV cache allowed": lambda asked: " or ".join(asked.kv_cache_dtypes),
    "GPUs allowed": lambda asked: " or ".join(
        f"up to {candidate_gpu.max_gpus} x {candidate_gpu.gpu.name}" for candidate_gpu in asked.gpus
    ),
    "engine": lambda asked: " or ".join(map(str, (asked.engine, *asked.other_engines))),
    "traffic": lambda asked: str(asked.workload),
    "a day": lambda asked: str(asked.daily_profile or "always the busiest hour"),
    "LoRA adapters": _describe_adapters,
    "service level": lambda asked: (
        "; ".join(f"{t.name} {format_latency(t.seconds)}" for t in asked.slo_targets) or "none"
    ),
    "headroom": lambda asked: f"{asked.headroom:.0%}",
    "layout": lambda asked: (
        ", ".join(f"{name} {size}" for name, size in asked.layout.items()) or "any"
    ),
    "engine arguments": lambda asked: (
        ", ".join(f"{name} {value}" for name, value in asked.engine_args.items()) or "none"
    ),
    "speculation": lambda asked: (
        str(asked.speculation) + " (not allowed)" * (not asked.speculation.allowed)
        if asked.speculation
        else "none"
    ),
}


def _collect_plan_facts(plan: Plan) -> dict[str, Any]:
    """What the answer is and does, but for promises and costs."""
    best, performance = plan.best, plan.performance
    rows: dict[str, Any] = {
        "answer": VERDICT_LABELS[plan.verdict],
        "deployment": best and best.description,
    }
    rows |= {"what limits it": plan.binding_constraint.constraint}
    if best is None or performance is None:
        return rows
    free, power = compute_free_capacity(plan.scenario, best.prediction), best.prediction.gpu_power_w
    rows |= {"serves at most (requests/s)": performance.capacity}
    rows |= {
        "stays free (%)": None if free is None else round(free * 100),
        "output (tokens/s)": performance.output_tps,
    }
    rows |= {"KV cache of a GPU (GiB)": best.prediction.memory.kv_available / GIB}
    rows |= {"drawn by all GPUs (W)": power and power * best.prediction.num_gpus}
    if (usd := best.prediction.usd_per_hour_interval) and usd.lo < usd.hi:
        rows |= {"USD per hour, by the quotes": f"{usd.lo:,.2f} to {usd.hi:,.2f}"}
    return rows | {"figures": performance.source_description}


def _format_slo_statuses(plan: Plan) -> dict[str, str | None]:
    """What is predicted of each promise, and what becomes of it."""
    performance = plan.performance
    told = {
        t: performance.get_for_display(t.metric, t.percentile) if performance else None
        for t in plan.scenario.slo_targets
    }
    return {
        f"{t.name} (ms)": None if v is None else f"{v * 1e3:,.0f}: {get_slo_status(t, v)}"
        for t, v in told.items()
    }


def _collect_costs(plan: Plan) -> dict[str, float]:
    """USD of the best candidate, by name."""
    best = plan.best
    month = best.prediction.usd_per_month if best else None
    if best is None or best.usd_per_hour is None or month is None:
        return {}
    found = {"USD per hour": best.usd_per_hour}
    if hours := estimate_run_hours(plan.scenario, best):
        found |= {"USD for all of the work": best.usd_per_hour * hours.mid}
    else:
        found |= {"USD a month": month.mid}
    if plan.billing:
        found |= {f"USD a day, {way}": usd for way, usd in plan.billing.usd.items()}
    each = best.prediction.usd_per_mtok_output
    return found | ({"USD per million output tokens": each.mid} if each else {})


def _format_with_difference(usd: float | None, first: float | None) -> str | None:
    """An amount, and how far it is from the first plan's."""
    if usd is None:
        return None
    shown = f"{usd:,.2f}" if usd < 1000 else f"{usd:,.0f}"
    return (
        shown
        if first is None or abs(usd - first) < 1e-9 * first
        else f"{shown} ({usd / first - 1:+.0%})"
    )
