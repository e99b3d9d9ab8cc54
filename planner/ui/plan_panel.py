"""Turn a plan into what the cockpit shows: words, figures and charts, as plain data.

Everything comes from one `Plan`, the same that `plan.json` states. An analytical plan has no
verdict: it is an estimate.
"""

import math
from collections.abc import Iterator
from typing import Any

from planner.analysis import load_curves
from planner.analysis import plan_summary as summary
from planner.analysis.phrases import CALIBRATION_BASIS_LABELS, METRIC_NAMES, VERDICT_NAMES
from planner.analysis.plan_risks import CAPACITY_MEANING, GrowthLimit, find_growth_limit
from planner.core.intervals import Interval
from planner.core.number_format import (
    EN_DASH,
    format_ends,
    format_limit_seconds,
    format_number,
    format_probability,
    format_seconds_ends,
    format_seconds_range,
    format_share,
    format_usd,
)
from planner.core.units import GIB
from planner.deploy import build_launches
from planner.hardware.prices import look_up_gpu_price
from planner.planning.billing import price_tokens
from planner.planning.candidate import Candidate
from planner.planning.evaluation import (
    compute_free_capacity,
    compute_offered_rps,
    estimate_run_hours,
    get_capacity_rps,
)
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.slo import LimitStatus, SloTarget, explain_implausible_limits
from planner.ui.charts import autoscaling as charts_scaling
from planner.ui.charts import base as charts
from planner.ui.charts import cockpit as charts_cockpit
from planner.ui.limit_rows import find_tightest_target, list_limit_rows
from planner.ui.plan_words import (
    compute_bill,
    describe_adapters,
    describe_candidate,
    describe_engine,
    describe_found_figure,
    describe_gpu_price,
    format_odds,
)

Answer = dict[str, Any]
"""What the cockpit shows, as JSON."""
VERDICT_TONES = {"holds": "good", "at_risk": "warn", "nothing_meets": "bad"}
STATUS_TONES: dict[LimitStatus, str] = {"met": "good", "at risk": "warn", "missed": "bad"}
OPTIONS = {
    "gamble": ("Cheapest", 0.5),
    "recommended": ("Recommended", None),
    "safe": ("Safe", 0.95),
}
"""The three options by name: their label, and the probability that each is the cheapest for."""
AFTER_SIMULATION = "follows with the simulation"
"""What stands for the probability of an estimate."""
BAR_END = 1.18
"""Where the bar of a target ends, as a multiple of its limit."""
MEMORY_LABELS = {"weights": "weights", "KV cache": "KV cache", "headroom": "free"}
"""Parts of a GPU's memory with a label of their own; the rest is one."""


def build_answer(plan: Plan, ask_every_s: float | None = None) -> Answer:
    """Build the answer to show for a plan: an estimate if it is analytical.

    With `ask_every_s` loads are also given as users, each of whom asks every so many seconds.
    """
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    if best is None or performance is None:
        return {
            "state": "final",
            "tone": "bad",
            "word": VERDICT_NAMES["nothing_meets"],
            "head": "The model does not fit",
            "say": [plan.binding_constraint.sentence],
            "why": [
                f"{row[0]}: {row[1]}"
                for row in summary.build_rejection_table(plan).head(8).itertuples(index=False)
            ],
            "figures": {"verdict": plan.verdict, "probability": 0.0},
        }
    estimated = not performance.num_simulated_requests
    overloaded = _is_overloaded(scenario, best)
    word, tone = VERDICT_NAMES[plan.verdict], VERDICT_TONES[plan.verdict]
    if estimated:
        word, tone = "Estimate", "calm"
    elif overloaded:
        word = "Overloaded"
    about = "\N{ALMOST EQUAL TO} " if estimated else ""
    month, hour = _format_price(scenario, best)
    answers = bool(plan.chosen)
    growth = find_growth_limit(plan) if answers and not scenario.offline else None
    return {
        "state": "estimate" if estimated else "final",
        "tone": tone,
        "word": word,
        "meta": (
            "analytical, not simulated yet"
            if estimated
            else f"{performance.num_simulated_requests:,} requests simulated \N{MIDDLE DOT} step costs"
            f" {CALIBRATION_BASIS_LABELS[performance.basis]}"
        ),
        "head": _write_head(plan, overloaded, estimated, ask_every_s),
        "sub": _describe_setup(best),
        "say": _write_sentences(plan, overloaded, estimated),
        "month": about + month if answers and month else "",
        "period": _describe_period(scenario) if answers and month else "",
        "hour": hour if answers else hour and f"closest: {hour}",
        "tiles": [
            _add_about(tile, about)
            for tile in _build_tiles(plan, growth, overloaded, estimated, ask_every_s)
        ],
        "targets": [] if overloaded else list(_build_targets(plan, estimated)),
        "options": [] if estimated else _build_options(plan),
        "memory": _build_memory(best),
        "commands": (
            [
                {"role": where, "text": line}
                for launch in build_launches(best.prediction)
                for where, line in launch.shell_lines.items()
            ]
            if answers
            else []
        ),
        "why": [] if estimated else _build_reasons(plan, growth),
        "assumptions": list(dict.fromkeys((*scenario.assumptions, *plan.notes))),
        "figures": _list_figures(plan, estimated),
    }


def _list_figures(plan: Plan, estimated: bool) -> dict[str, Any]:
    """List the figures behind the words as numbers, under the names of `plan.json`."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    assert best is not None and performance is not None
    month, tokens = best.prediction.usd_per_month, price_tokens(scenario, best)
    capacity = get_capacity_rps(scenario, performance)
    return {
        "verdict": None if estimated else plan.verdict,
        "probability": None if estimated else plan.probability,
        "deployment": best.description,
        "usd_per_hour": best.usd_per_hour,
        "usd_per_month": month and month.mid,
        f"usd_per_mtok_{tokens[1] if tokens else 'output'}": tokens and tokens[0].mid,
        "capacity_rps": capacity and capacity.mid,
        "options": {
            name: [option.description, option.usd_per_hour, option.probability]
            for name, option in plan.options.items()
        },
    }


def _is_overloaded(scenario: Scenario, best: Candidate) -> bool:
    """Return whether more requests arrive than are served, so that waits have no value."""
    free = compute_free_capacity(scenario, best.prediction)
    return bool(scenario.workload.rate and not scenario.offline and free is not None and free < 0)


def _format_price(scenario: Scenario, candidate: Candidate) -> tuple[str, str]:
    """Return the price of a month (of all the work, if that ends), and of an hour by provider."""
    usd, bill = candidate.usd_per_hour, compute_bill(scenario, candidate)
    if usd is None or bill is None:
        return "", f"no price of {candidate.deployment.gpu.name} is known"
    price = look_up_gpu_price(candidate.deployment.gpu, scenario.prices)
    hourly = f"{format_usd(usd)}/h"
    if price is None:
        return "", hourly
    if price.is_user_given:
        source = "your price"
    elif len(price.quotes) == 1:
        source = price.source
    else:
        quotes = Interval(price.min_usd, price.median_usd, price.max_usd) * (usd / price.median_usd)
        source = f"${format_ends(quotes, EN_DASH)} by provider"
    return format_usd(bill), f"{hourly} \N{MIDDLE DOT} {source}"


def _describe_period(scenario: Scenario) -> str:
    return "for the job" if scenario.offline else "a month"


def _describe_gpus(candidate: Candidate) -> str:
    num_gpus = candidate.prediction.num_gpus_billed
    return f"{num_gpus} \N{MULTIPLICATION SIGN} {candidate.deployment.gpu.name}"


def _describe_setup(candidate: Candidate) -> str:
    """Describe layout and formats, and the engine where it is another than vLLM."""
    parts = describe_candidate(candidate).split(", ")[1:]
    if candidate.deployment.engine.name != "vllm":
        parts.append(describe_engine(candidate))
    return " \N{MIDDLE DOT} ".join(parts)


def _write_head(plan: Plan, overloaded: bool, estimated: bool, ask_every_s: float | None) -> str:
    scenario, best = plan.scenario, plan.best
    assert best is not None
    gpus = _describe_gpus(best)
    if estimated:
        return f"\N{ALMOST EQUAL TO} {gpus}"
    if scenario.found_figure and plan.chosen:
        return f"{_describe_found(scenario, ask_every_s)} on {gpus}"
    if plan.chosen:
        return f"Rent {gpus}"
    if overloaded:
        free = compute_free_capacity(scenario, best.prediction) or 0.0
        serves = "serves" if best.prediction.num_gpus_billed == 1 else "serve"
        return f"{gpus} {serves} 1 in {format_number(1 - free, 2)} requests"
    most = " or ".join(
        f"{option.max_gpus} \N{MULTIPLICATION SIGN} {option.gpu.name}"
        for option in scenario.gpus[:2]
    )
    return f"No plan on up to {most}"


def _describe_found(scenario: Scenario, ask_every_s: float | None) -> str:
    if scenario.found_figure == "rate" and scenario.workload.rate and ask_every_s:
        return f"{format_number(scenario.workload.rate * ask_every_s)} users"
    return describe_found_figure(scenario)


def _write_sentences(plan: Plan, overloaded: bool, estimated: bool) -> list[str]:
    """Write the two or three sentences under the headline; the first is the most important."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    assert best is not None and performance is not None
    if estimated:
        return [
            "Analytical estimate. The simulation gives the verdict; its tails are usually longer."
        ]
    odds, asked = format_odds(best), format_probability(scenario.confidence)
    if overloaded:
        capacity = get_capacity_rps(scenario, performance)
        most = format_number(capacity.mid) if capacity else EN_DASH
        rate = compute_offered_rps(scenario, best.prediction)
        return [
            f"{format_number(rate, 3)} requests/s arrive; the capacity is {most}.",
            "The queue grows without bound, so no latencies are shown.",
        ]
    tight = _describe_tightest(plan)
    if plan.chosen is None:
        missed = [row for row in list_limit_rows(plan) if row.status == "missed"]
        reasons = [_describe_value(row.target, best) for row in missed if row.target]
        reasons += [
            f"load {load} of its capacity, limit {limit}"
            for load, _, limit in (_format_load(scenario, row.load) for row in missed if row.load)
        ]
        reasons = reasons or list(best.violations)
        closest = f"The closest, {_describe_gpus(best)}: {'; '.join(reasons[:3])}."
        hint = explain_implausible_limits(scenario.slo_targets)
        return [closest, *([f"{hint[0].upper()}{hint[1:]}."] if hint else [])]
    if scenario.found_figure:
        is_limit = scenario.found_figure == "limit"
        what = "shortest limit that is met" if is_limit else "largest load that meets every target"
        first = f"The {what} with a probability of {asked} or more; here {odds}."
    elif plan.verdict == "holds":
        first = f"Meets every target with a probability of {odds} ({asked} required)."
    else:
        first = (
            "Meets every target at the expected speed, but only with a probability of"
            f" {odds} ({asked} required)."
        )
    if scenario.offline and (hours := estimate_run_hours(scenario, best)):
        first += f" Done in {format_number(hours.mid, 2)} hours ({format_ends(hours, EN_DASH)})."
    safer = ""
    if plan.verdict == "at_risk" and plan.safer:
        month, _ = _format_price(scenario, plan.safer)
        price = f", {month} {_describe_period(scenario)}" if month else ""
        safer = f"Safe: {_describe_gpus(plan.safer)}{price}."
    api = plan.api_comparison.sentence if plan.api_comparison else ""
    adapters = describe_adapters(scenario, plan.chosen)
    return [
        first,
        *filter(
            None, [tight, adapters and f"{adapters}.", safer, api and f"{api[0].upper()}{api[1:]}."]
        ),
    ]


def _describe_tightest(plan: Plan) -> str:
    """Describe the target that is closest to its limit."""
    target = find_tightest_target(plan)
    if target is None or plan.best is None:
        return ""
    return f"Closest to its limit: {_describe_value(target, plan.best)}."


def _describe_value(target: SloTarget, candidate: Candidate) -> str:
    """Describe one target's prediction, range and limit."""
    performance = candidate.prediction.performance
    assert performance is not None
    value = performance.get_for_display(target.metric, target.percentile)
    shown = format_seconds_range(value, target.seconds, EN_DASH)
    limit = format_limit_seconds(target.seconds)
    return f"{METRIC_NAMES[target.metric].lower()} {shown} at {target.percentile}, limit {limit}"


def _build_targets(plan: Plan, estimated: bool) -> Iterator[Answer]:
    """Build the bars of the latency targets and of the load, on the scale of their limits."""
    best, performance = plan.best, plan.performance
    assert best is not None and performance is not None
    for row in list_limit_rows(plan):
        bar: Answer = {
            "status": "" if estimated else row.status,
            "tone": "calm" if estimated else STATUS_TONES[row.status],
            **_place_bar(row.use),
        }
        if target := row.target:
            value = performance.get_for_display(target.metric, target.percentile)
            yield bar | {
                "key": f"{target.metric} {target.percentile}",
                "name": METRIC_NAMES[target.metric],
                "short": row.short_name,
                "value": row.value,
                "range": format_seconds_ends(value, EN_DASH) if math.isfinite(value.hi) else "",
                "limit": row.limit,
                "ms": (value * 1e3).as_json_list,
            }
        elif row.load:
            load, ends, limit = _format_load(plan.scenario, row.load)
            yield bar | {
                "key": "load", "name": "Load", "short": "of capacity", "value": load,
                "range": ends if row.use.mid <= 1 else "", "limit": limit,
            }  # fmt: skip


def _format_load(scenario: Scenario, use: Interval) -> tuple[str, str, str]:
    """Format the load as a share of the capacity, its interval, and the share that may be used."""
    planned = 1 - scenario.headroom
    lo, mid, hi = (end * planned for end in (use.lo, use.mid, use.hi))
    return format_share(mid), f"{100 * lo:.0f}{EN_DASH}{hi:.0%}", f"{planned:.0%}"


def _place_bar(value: Interval) -> Answer:
    """Place a value, as a share of its limit, on a bar that ends at `BAR_END`: percent from the left."""

    def place(share: float) -> float:
        return round(100 * min(max(share, 0.0), BAR_END) / BAR_END, 1) if share == share else 0.0

    limit, lo, hi = place(1.0), place(value.lo), place(value.hi)
    return {
        "mid": place(value.mid),
        "lo": lo,
        "inside": max(min(hi, limit) - lo, 0.0),
        "over_from": max(lo, limit),
        "over": max(hi - max(lo, limit), 0.0),
        "at": limit,
    }


def _build_tiles(
    plan: Plan,
    growth: GrowthLimit | None,
    overloaded: bool,
    estimated: bool,
    ask_every_s: float | None,
) -> list[Answer]:
    """Build the main figures: cost per token, capacity, room to grow, probability."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    assert best is not None and performance is not None
    tiles: list[Answer] = []
    usd, month = best.usd_per_hour, best.prediction.usd_per_month
    if (tokens := price_tokens(scenario, best)) and plan.chosen:
        when = "over the day, always on" if scenario.daily_profile else "if every hour is as busy"
        tiles.append(
            {
                "name": f"Cost per million {tokens[1]} tokens",
                "value": format_usd(tokens[0].mid),
                "unit": "",
                "note": "" if scenario.offline else when,
            }
        )
    if capacity := get_capacity_rps(scenario, performance):
        free = compute_free_capacity(scenario, best.prediction)
        note = (
            "overloaded"
            if overloaded
            else f"{format_share(free)} free"
            if free and free > 0
            else ""
        )
        shown, unit = capacity, "requests/s"
        if ask_every_s and scenario.workload.rate and not scenario.offline:
            shown, unit = capacity * ask_every_s, "users"
            rate = f"{format_number(capacity.mid)} requests/s"
            note = f"{rate} \N{MIDDLE DOT} {note}" if note else rate
        tiles.append(
            {
                "name": "Capacity",
                "value": format_number(shown.mid, 2 if unit == "users" else 3),
                "unit": f"{unit} ({format_ends(shown, EN_DASH)})",
                "note": note if scenario.workload.rate else "",
                "hint": "" if scenario.offline else f"{CAPACITY_MEANING}.",
            }
        )
    if growth:
        value, unit = growth.format_value()
        tiles.append(
            {
                "name": "Room to grow",
                "value": value,
                "unit": unit,
                "exact": not growth.growth,
                "note": growth.describe_end(ask_every_s),
                "hint": growth.explain(),
            }
        )
    if not estimated and not overloaded:
        spares = scenario.spare_replicas
        tiles.append(
            {
                "name": "Probability",
                "value": format_odds(best),
                "unit": "to meet every target",
                "note": (
                    f"{spares} spare replica{'s' * (spares > 1)}"
                    if spares
                    else "1 replica: a restart stops the service"
                    if best.deployment.layout.replicas == 1
                    else ""
                ),
                "share": plan.probability,
            }
        )
    elif not overloaded:
        tiles.append(
            {
                "name": "Probability",
                "value": "...",
                "unit": "",
                "note": AFTER_SIMULATION,
                "exact": True,
            }
        )
    if not tiles and usd is not None and month is not None:
        tiles.append({"name": "Price", "value": f"{format_usd(usd)}/h", "unit": "", "note": ""})
    return tiles


def _add_about(tile: Answer, about: str) -> Answer:
    """Mark the value of a tile as an estimate."""
    return tile if tile.get("exact") else {**tile, "value": about + tile["value"]}


def _build_options(plan: Plan) -> list[Answer]:
    """Build the three options, each with its price and probability; equal ones are one row."""
    rows: list[Answer] = []
    for name, (label, confidence) in OPTIONS.items():
        option = plan.options.get(name)
        if option is None:
            continue
        month, hour = _format_price(plan.scenario, option)
        row = {
            "name": name,
            "label": label,
            "gpus": _describe_gpus(option),
            "setup": _describe_setup(option),
            "month": month or EN_DASH,
            "hour": hour,
            "probability": format_odds(option),
            "share": option.probability,
            "tone": "good" if option.probability >= plan.scenario.confidence else "warn",
            "confidence": 100 * (confidence or plan.scenario.confidence),
            "chosen": name == "recommended",
        }
        if rows and plan.options[rows[-1]["name"]].identity_key == option.identity_key:
            joined = f"{rows[-1]['label'].replace(' and ', ', ')} and {label.lower()}"
            rows[-1] = {**row, "label": joined, "chosen": row["chosen"] or rows[-1]["chosen"]}
        else:
            rows.append(row)
    return rows


def build_other_row(plan: Plan, other: Plan | None, label: str, changes: dict[str, Any]) -> Answer:
    """Build the row of another plan: what it is, its price beside that of `plan`, its probability.

    `changes` are the controls that ask for it.
    """
    row: Answer = {
        "label": f"{label[:1].upper()}{label[1:]}",
        "changes": changes,
        "order": math.inf,
    }
    option = other.chosen if other else None
    if option is None or other is None:
        return {**row, "status": "misses the targets", "tone": "bad", "order": 1e12}
    month, hour = _format_price(other.scenario, option)
    mine, usd = plan.chosen and plan.chosen.usd_per_hour, option.usd_per_hour
    change = usd / mine - 1 if mine and usd else None
    return {
        **row,
        "gpus": _describe_gpus(option),
        "setup": _describe_setup(option),
        "month": month or EN_DASH,
        "hour": hour,
        "change": ""
        if change is None or abs(change) < 0.005
        else f"{change:+.0%}".replace("-", "\N{MINUS SIGN}"),
        "cheaper": change is not None and change < -0.005,
        "probability": format_odds(option),
        "tone": VERDICT_TONES[other.verdict],
        "order": usd if usd is not None else 1e9,
    }


def _build_memory(best: Candidate) -> Answer:
    """Build the bar of one GPU's memory: three or four parts, and a sentence."""
    memory = best.prediction.memory
    parts = {name: size for name, size in memory.bytes_by_part.items() if size > 0}
    rest = {name: size for name, size in parts.items() if name not in MEMORY_LABELS}
    shown = [(label, parts[name], "") for name, label in MEMORY_LABELS.items() if name in parts]
    details = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in rest.items())
    shown.insert(1, ("overhead", sum(rest.values()), details))
    total = sum(size for _, size, _ in shown)
    performance = best.prediction.performance
    usage = performance.kv_usage if performance else 0.0
    fits = "fits" if memory.status == "ok" else memory.status.replace("_", " ")
    limits = "Memory limits this plan" if usage > 0.9 else "Memory does not limit this plan"
    return {
        "title": f"{total / GIB:.1f} GiB of one {best.deployment.gpu.name}: {fits}",
        "parts": [
            {
                "name": name,
                "gib": f"{size / GIB:.1f}",
                "share": 100 * size / total,
                "details": details,
            }
            for name, size, details in shown
            if size
        ],
        "note": f"{limits}: {format_share(usage)} of the KV cache is in use on average.",
    }


def _build_reasons(plan: Plan, growth: GrowthLimit | None) -> list[str]:
    """Return the binding constraint, the room to grow beside the capacity, and the price source."""
    best = plan.best
    assert best is not None
    price = look_up_gpu_price(best.deployment.gpu, plan.scenario.prices)
    reasons = [summary.explain_binding_constraint(plan), *plan.reasons]
    if growth:
        reasons.append(growth.explain())
    if price:
        reasons.append(f"Price: {describe_gpu_price(price)}.")
    return list(dict.fromkeys(reasons))


def build_charts(plan: Plan, target_key: str, width: int, costs: bool = True) -> Answer:
    """Build the charts of a plan at `width` px: one target over the load, and the cost of loads."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    if best is None or performance is None or _is_overloaded(scenario, best):
        return {"latency": None, "cost": None, "day": None}
    return {
        "latency": _draw_latency(plan, best, target_key, width),
        "cost": _draw_cost(plan, best, width) if costs else None,
        "day": _draw_day(plan) if performance.num_simulated_requests else None,
    }


def _draw_latency(plan: Plan, best: Candidate, target_key: str, width: int) -> Answer | None:
    """Draw a latency over the load, through the plan's own point."""
    scenario, performance = plan.scenario, best.prediction.performance
    known = {f"{t.metric} {t.percentile}": t for t in scenario.slo_targets}
    target = known.get(target_key) or find_tightest_target(plan)
    if performance is None or target is None:
        return None
    value = performance.get(target.metric, target.percentile)
    curve = load_curves.sweep_stated_latency(scenario, best, target)
    if len(curve) < 3 or math.isnan(value.mid):
        return None
    load, offered = load_curves.get_load(scenario.workload)
    chart = charts_cockpit.plot_latency_over_load(
        curve, offered, target.seconds * 1e3, value * 1e3, width
    )
    return {
        "title": f"{METRIC_NAMES[target.metric]} ({target.metric.upper()}), {target.percentile}, against load",
        "key": f"{target.metric} {target.percentile}",
        "svg": charts.render_svg(chart),
        "note": f"{load}. Band: 80% interval. The curve is analytical, scaled to the plan's own figure.",
    }


def _draw_cost(plan: Plan, best: Candidate, width: int) -> Answer | None:
    """Draw the least cost of other loads."""
    unit, costs = load_curves.sweep_cost_over_load(plan) if plan.chosen else ("", [])
    if len(costs) < 3:
        return None
    load, offered = load_curves.get_load(plan.scenario.workload)
    paid = best.usd_per_hour if unit.startswith("USD") else best.deployment.layout.num_gpus
    chart = charts_cockpit.plot_cost_over_load(unit, costs, offered, paid, width)
    return {
        "title": "Cost against load",
        "svg": charts.render_svg(chart),
        "note": f"{load}; {'$ per hour' if unit.startswith('USD') else 'GPUs'} of the cheapest plan, analytical.",
    }


def _draw_day(plan: Plan) -> Answer | None:
    """Draw the replicas by hour, with what the day costs; None without a daily profile."""
    if (day := plan.autoscaling) is None or plan.billing is None:
        return None
    costs = "; ".join(f"{way} {format_usd(usd)} a day" for way, usd in plan.billing.usd.items())
    return {
        "title": "Replicas over the day",
        "svg": charts.render_svg(charts_scaling.plot_day(day)),
        "note": f"{day}; {day.verdict}. {costs or 'No price is known'}.",
    }
