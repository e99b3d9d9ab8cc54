"""Turn an answer into what the cockpit shows: words, figures and charts, as plain data.

An analytical answer has no verdict: it is an estimate.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from planner.answers import Answer, Offer, words
from planner.answers.answer import CostCurve, LatencyCurve, Limit
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
from planner.core.text import capitalize
from planner.core.units import GIB
from planner.planning.candidate import SAME_PRICE_SHARE
from planner.planning.slo import LimitStatus, explain_implausible_limits
from planner.ui.charts import base as charts
from planner.ui.charts import cockpit as charts_cockpit
from planner.ui.plan_tables import build_rejection_table, explain_choice

Page = dict[str, Any]
"""What the cockpit shows, as JSON."""
VERDICT_TONES = {"holds": "good", "at_risk": "warn", "nothing_meets": "bad"}
STATUS_TONES: dict[LimitStatus, str] = {"met": "good", "at risk": "warn", "missed": "bad"}
OPTION_LABELS = {
    "gamble": ("Cheapest", 0.5),
    "recommended": ("Recommended", None),
    "safe": ("Safe", 0.95),
}
"""The three options by name: their label, and the probability that each is the cheapest for."""
AFTER_SIMULATION = "follows with the simulation"
"""What stands for the probability of an estimate."""
MAX_REJECTED_ROWS = 8
BAR_END = 1.18
"""Where the bar of a target ends, as a multiple of its limit."""
MEMORY_LABELS = {"weights": "weights", "KV cache": "KV cache", "headroom": "free"}
"""Parts of a GPU's memory with a label of their own; the rest is one."""


def build_page(answer: Answer, ask_every_s: float | None = None) -> Page:
    """Build what the cockpit shows of an answer: an estimate if it is analytical.

    With `ask_every_s` loads are also given as users, each of whom asks every so many seconds.
    """
    best, performance = answer.best, answer.performance
    if best is None or performance is None:
        rows = build_rejection_table(answer).head(MAX_REJECTED_ROWS).itertuples(index=False)
        return {
            "state": "final",
            "tone": "bad",
            "word": words.PHRASES["verdicts"]["nothing_meets"],
            "head": "The model does not fit",
            "say": [answer.binding.sentence],
            "why": [f"{row[0]}: {row[2]}" for row in rows],
            "figures": {"verdict": answer.verdict, "probability": 0.0},
        }
    word, tone = words.PHRASES["verdicts"][answer.verdict], VERDICT_TONES[answer.verdict]
    meta = (
        f"{performance.num_simulated_requests:,} requests simulated \N{MIDDLE DOT} step costs"
        f" {words.PHRASES['basis'][best.basis]['says']}"
    )
    estimated = answer.is_estimate
    if estimated:
        word, tone, meta = "Estimate", "calm", "analytical, not simulated yet"
    elif best.is_overloaded:
        word = "Overloaded"
    about = "\N{ALMOST EQUAL TO} " if estimated else ""
    month, hour = _format_price(best)
    is_priced = bool(answer.chosen and month)
    launches = answer.chosen.launches if answer.chosen else ()
    tokens, capacity = best.usd_per_mtok, best.capacity_rps
    monthly_usd = best.prediction.usd_per_month
    tiles = list(_generate_tiles(answer, best, ask_every_s))
    if not tiles and best.usd_per_hour:
        tiles = [_tile("Price", f"{format_usd(best.usd_per_hour.mid)}/h")]
    return {
        "state": "estimate" if estimated else "final",
        "tone": tone,
        "word": word,
        "meta": meta,
        "head": _write_head(answer, best, ask_every_s),
        "sub": _describe_setup(best),
        "say": _write_sentences(answer, best),
        "month": about + month if is_priced else "",
        "period": _describe_period(answer) if is_priced else "",
        "hour": hour if answer.chosen else hour and f"closest: {hour}",
        "tiles": [
            tile if tile.get("exact") else {**tile, "value": about + tile["value"]}
            for tile in tiles
        ],
        "targets": [] if best.is_overloaded else list(_build_targets(answer, best)),
        "options": [] if estimated else _build_options(answer),
        "memory": _build_memory(best),
        "commands": [
            {"role": where, "text": line}
            for launch in launches
            for where, line in launch.shell_lines.items()
        ],
        "why": [] if estimated else _build_reasons(answer, best),
        "assumptions": list(dict.fromkeys((*answer.scenario.assumptions, *answer.notes))),
        "figures": {  # behind the words, under the names of `plan.json`
            "verdict": None if estimated else answer.verdict,
            "probability": None if estimated else answer.probability,
            "deployment": best.description,
            "usd_per_hour": best.median_usd_per_hour,
            "usd_per_month": monthly_usd and monthly_usd.mid,
            f"usd_per_mtok_{best.priced_side or 'output'}": tokens and tokens.mid,
            "capacity_rps": capacity and capacity.mid,
            "options": {
                name: [option.description, option.median_usd_per_hour, option.probability]
                for name, option in answer.options.items()
            },
        },
    }


def _format_price(offer: Offer) -> tuple[str, str]:
    """Return the headline bill, and the price of an hour by provider."""
    return format_usd(offer.bill) if offer.bill else "", words.format_hourly_price(offer, EN_DASH)


def _describe_period(answer: Answer) -> str:
    if answer.scenario.offline:
        return "for the job"
    return "a month, always on" if answer.day else "a month"


def _describe_setup(offer: Offer) -> str:
    """Describe layout and formats, and the engine where it is another than vLLM."""
    parts = words.describe_offer(offer).split(", ")[1:]
    if offer.deployment.engine.name != "vllm":
        parts.append(words.describe_engine(offer))
    return " \N{MIDDLE DOT} ".join(parts)


def _write_head(answer: Answer, best: Offer, ask_every_s: float | None) -> str:
    scenario, gpus = answer.scenario, words.describe_gpus(best)
    if answer.is_estimate:
        return f"\N{ALMOST EQUAL TO} {gpus}"
    if scenario.found_figure and answer.chosen:
        figure = words.describe_open_figure(scenario)
        if scenario.found_figure == "rate" and scenario.workload.rate and ask_every_s:
            figure = f"{format_number(scenario.workload.rate * ask_every_s)} users"
        return f"{figure} on {gpus}"
    if answer.chosen:
        return f"Use {gpus} that you own" if best.is_owned else f"Rent {gpus}"
    if best.is_overloaded:
        serves = "serves" if best.num_gpus_billed == 1 else "serve"
        share = format_number(1 - (best.free_capacity or 0.0), 2)
        return f"{gpus} {serves} 1 in {share} requests"
    most = " or ".join(
        f"{option.max_gpus} \N{MULTIPLICATION SIGN} {option.gpu.name}"
        for option in scenario.gpus[:2]
    )
    return f"No plan on up to {most}"


def _write_sentences(answer: Answer, best: Offer) -> list[str]:
    """Write the two or three sentences under the headline; the first is the most important."""
    scenario = answer.scenario
    if answer.is_estimate:
        return [
            "Analytical estimate. The simulation gives the verdict; its tails are usually longer."
        ]
    if best.is_overloaded:
        most = format_number(best.capacity_rps.mid) if best.capacity_rps else EN_DASH
        return [
            f"{format_number(best.offered_rps, 3)} requests/s arrive; the capacity is {most}.",
            "The queue grows without bound, so no latencies are shown.",
        ]
    if answer.chosen is None:
        closest = f"The closest, {words.describe_gpus(best)}: {words.explain_shortfall(best)}."
        hint = explain_implausible_limits(scenario.slo_targets)
        return [closest, *([f"{capitalize(hint)}."] if hint else [])]
    tightest, safer = best.tightest, ""
    tight = ""
    if tightest and (target := tightest.target) and (performance := best.performance):
        value = performance.get_for_display(target.metric, target.percentile)
        shown = format_seconds_range(value, target.seconds, EN_DASH)
        name, limit = (
            words.PHRASES["metrics"][target.metric].lower(),
            format_limit_seconds(target.seconds),
        )
        tight = f"Closest to its limit: {name} {shown} at {target.percentile}, limit {limit}."
    if answer.verdict == "at_risk" and answer.safer:
        month, _ = _format_price(answer.safer)
        price = f", {month} {_describe_period(answer)}" if month else ""
        safer = f"Safe: {words.describe_gpus(answer.safer)}{price}."
    adapters = words.describe_adapters(answer)
    sentences = [
        _state_probability(answer, best),
        tight,
        f"{words.format_bills(answer, best)}." if len(best.bills) > 1 else "",
        f"{adapters}." if adapters else "",
        safer,
        words.explain_api(answer),
    ]
    return [sentence for sentence in sentences if sentence]


def _state_probability(answer: Answer, best: Offer) -> str:
    scenario = answer.scenario
    odds, wanted = words.format_odds(best), format_probability(scenario.confidence)
    if scenario.found_figure:
        is_limit = scenario.found_figure == "limit"
        what = "shortest limit that is met" if is_limit else "largest load that meets every target"
        text = f"The {what} with a probability of {wanted} or more; here {odds}."
    elif answer.verdict == "holds":
        text = f"Meets every target with a probability of {odds} ({wanted} required)."
    else:
        text = (
            "Meets every target at the expected speed, but only with a probability of"
            f" {odds} ({wanted} required)."
        )
    if hours := best.run_hours:
        text += f" Done in {format_number(hours.mid, 2)} hours ({format_ends(hours, EN_DASH)})."
    return text


def _build_targets(answer: Answer, best: Offer) -> Iterator[Page]:
    """Build the bars of the latency targets and of the load, on the scale of their limits."""
    performance, estimated = best.performance, answer.is_estimate
    assert performance is not None
    for limit in best.limits:
        bar: Page = {
            "status": "" if estimated else limit.status,
            "tone": "calm" if estimated else STATUS_TONES[limit.status],
            **_place_bar(limit.use),
        }
        if target := limit.target:
            value = performance.get_for_display(target.metric, target.percentile)
            yield bar | {
                "key": f"{target.metric} {target.percentile}",
                "name": words.PHRASES["metrics"][target.metric],
                "short": limit.name,
                "value": words.format_amount(limit),
                "range": format_seconds_ends(value, EN_DASH) if math.isfinite(value.hi) else "",
                "limit": words.format_bound(limit),
                "ms": (value * 1e3).as_json_list,
            }
        elif limit.load:
            planned = 1 - answer.scenario.headroom  # the share of the capacity that may be used
            ends = f"{100 * limit.load.lo * planned:.0f}{EN_DASH}{limit.load.hi * planned:.0%}"
            yield bar | {
                "key": "load",
                "name": "Load",
                "short": "of capacity",
                "value": format_share(limit.load.mid * planned),
                "range": ends if limit.use.mid <= 1 else "",
                "limit": f"{planned:.0%}",
            }


def _place_bar(value: Interval) -> Page:
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


def _tile(name: str, value: str, unit: str = "", note: str = "", **more: Any) -> Page:
    return {"name": name, "value": value, "unit": unit, "note": note, **more}


def _generate_tiles(answer: Answer, best: Offer, ask_every_s: float | None) -> Iterator[Page]:
    """Yield the main figures: cost per token, capacity, room to grow, probability."""
    scenario, estimated = answer.scenario, answer.is_estimate
    if best.usd_per_mtok and answer.chosen:
        when = "over the day, always on" if scenario.daily_profile else "if every hour is as busy"
        name = f"Cost per million {best.priced_side} tokens"
        note = "" if scenario.offline else when
        yield _tile(name, format_usd(best.usd_per_mtok.mid), note=note)
    if best.capacity_rps:
        yield _build_capacity_tile(answer, best, best.capacity_rps, ask_every_s)
    if (growth := answer.growth) and answer.chosen and not scenario.offline:
        value, hint = words.format_growth(growth), words.explain_confident_load(growth)
        note = words.describe_growth_end(growth, ask_every_s)
        yield _tile("Room to grow", value, "", note, exact=not growth.growth, hint=hint)
    if estimated and not best.is_overloaded:
        yield _tile("Probability", "...", note=AFTER_SIMULATION, exact=True)
    elif not best.is_overloaded:
        spares, note = scenario.spare_replicas, ""
        if spares:
            note = f"{spares} spare replica{'s' * (spares > 1)}"
        elif best.deployment.layout.replicas == 1:
            note = "1 replica: a restart stops the service"
        odds, unit = words.format_odds(best), "to meet every target"
        yield _tile("Probability", odds, unit, note, share=answer.probability)


def _build_capacity_tile(
    answer: Answer, best: Offer, capacity: Interval, ask_every_s: float | None
) -> Page:
    scenario, free = answer.scenario, best.free_capacity
    note = f"{format_share(free)} free" if free and free > 0 else ""
    note = "overloaded" if best.is_overloaded else note
    unit = "requests/s"
    if ask_every_s and scenario.workload.rate and not scenario.offline:
        rate = f"{format_number(capacity.mid)} requests/s"
        note = f"{rate} \N{MIDDLE DOT} {note}" if note else rate
        capacity, unit = capacity * ask_every_s, "users"
    return _tile(
        "Capacity",
        format_number(capacity.mid, 2 if unit == "users" else 3),
        f"{unit} ({format_ends(capacity, EN_DASH)})",
        note if scenario.workload.rate else "",
        hint="" if scenario.offline else f"{words.PHRASES['capacity']}.",
    )


def _build_options(answer: Answer) -> list[Page]:
    """Build the three options, each with its price and probability; equal ones are one row."""
    rows: list[Page] = []
    last: Offer | None = None
    wanted = answer.scenario.confidence
    for name, (label, confidence) in OPTION_LABELS.items():
        option = answer.options.get(name)
        if option is None:
            continue
        month, hour = _format_price(option)
        row = {
            "name": name,
            "label": label,
            "gpus": words.describe_gpus(option),
            "setup": _describe_setup(option),
            "month": month or EN_DASH,
            "hour": hour,
            "probability": words.format_odds(option),
            "share": option.probability,
            "tone": "good" if option.probability >= wanted else "warn",
            "confidence": 100 * (confidence or wanted),
            "chosen": name == "recommended",
        }
        if last and last.description == option.description and last.bill == option.bill:
            joined = f"{rows[-1]['label'].replace(' and ', ', ')} and {label.lower()}"
            rows[-1] = {**row, "label": joined, "chosen": row["chosen"] or rows[-1]["chosen"]}
        else:
            rows.append(row)
        last = option
    return rows


def build_other_row(
    answer: Answer, other: Answer | None, label: str, changes: Mapping[str, Any]
) -> Page:
    """Build the row of another answer: what it is, its price beside `answer`'s, how likely it is.

    `changes` are the controls that ask for it.
    """
    row: Page = {"label": capitalize(label), "changes": changes, "order": math.inf}
    option = other.chosen if other else None
    if option is None or other is None:
        return {**row, "status": "misses the targets", "tone": "bad", "order": 1e12}
    month, hour = _format_price(option)
    mine, usd = answer.chosen and answer.chosen.usd_per_hour, option.usd_per_hour
    change = usd.mid / mine.mid - 1 if mine and usd else None
    shown = ""
    if change is not None and abs(change) >= SAME_PRICE_SHARE:
        shown = f"{change:+.0%}".replace("-", "\N{MINUS SIGN}")
    return {
        **row,
        "gpus": words.describe_gpus(option),
        "setup": _describe_setup(option),
        "month": month or EN_DASH,
        "hour": hour,
        "change": shown,
        "cheaper": change is not None and change < -SAME_PRICE_SHARE,
        "probability": words.format_odds(option),
        "tone": VERDICT_TONES[other.verdict],
        "order": usd.mid if usd else 1e9,
    }


def _build_memory(best: Offer) -> Page:
    """Build the bar of one GPU's memory: three or four parts, and a sentence."""
    memory = best.memory
    parts = {name: size for name, size in memory.bytes_by_part.items() if size > 0}
    rest = {name: size for name, size in parts.items() if name not in MEMORY_LABELS}
    shown = [(label, parts[name], "") for name, label in MEMORY_LABELS.items() if name in parts]
    details = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in rest.items())
    shown.insert(1, ("overhead", sum(rest.values()), details))
    total = sum(size for _, size, _ in shown)
    usage = best.performance.kv_usage if best.performance else 0.0
    fits = "fits" if memory.status == "ok" else memory.status.replace("_", " ")
    limits = "Memory limits this plan" if usage > 0.9 else "Memory does not limit this plan"
    return {
        "title": f"{total / GIB:.1f} GiB of one {best.gpu}: {fits}",
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


def _build_reasons(answer: Answer, best: Offer) -> list[str]:
    """Return what keeps anything cheaper from doing, the room to grow, and the price source."""
    reasons = [explain_choice(answer), *answer.reasons]
    if answer.growth and answer.chosen and not answer.scenario.offline:
        reasons.append(words.explain_confident_load(answer.growth))
    if surge := words.explain_surge(answer):
        reasons.append(surge)
    if measure := words.tell_measure_first(answer):
        reasons.append(f"Measure {measure}")
    if best.price:
        reasons.append(f"Price: {words.describe_gpu_price(best.price)}.")
    return list(dict.fromkeys(reasons))


def find_curve_target(answer: Answer, key: str) -> Limit | None:
    """Find the limit whose latency is drawn: that of `key` ("ttft p95"), else the tightest."""
    best = answer.best
    if best is None or best.is_overloaded:
        return None
    named = {f"{t.metric} {t.percentile}": row for row in best.limits if (t := row.target)}
    return named.get(key) or best.tightest


def draw_charts(
    answer: Answer, latency: LatencyCurve | None, costs: CostCurve | None, width: int
) -> Page:
    """Draw the charts of an answer at `width` px: a latency and the cost over the load."""
    page: Page = {"latency": None, "cost": None, "day": None}
    if latency:  # through the plan's own point
        target = latency.target
        chart = charts_cockpit.plot_latency_over_load(
            latency.points, latency.here, target.seconds * 1e3, latency.own * 1e3, width
        )
        name = f"{words.PHRASES['metrics'][target.metric]} ({target.metric.upper()}), {target.percentile}"
        page["latency"] = {
            "title": f"{name}, against load",
            "key": f"{target.metric} {target.percentile}",
            "svg": charts.render_svg(chart),
            "note": f"{latency.axis}. Band: 80% interval. The curve is analytical, scaled to the plan's"
            " own figure.",
        }
    if costs and answer.chosen:
        chart = charts_cockpit.plot_cost_over_load(
            costs.unit, costs.points, costs.here, costs.own, width
        )
        unit = "$ per hour" if costs.unit.startswith("USD") else "GPUs"
        page["cost"] = {
            "title": "Cost against load",
            "svg": charts.render_svg(chart),
            "note": f"{costs.axis}; {unit} of the cheapest plan, analytical.",
        }
    best, day, billing = answer.best, answer.day, answer.billing
    if best and not best.is_overloaded and not answer.is_estimate and day and billing:
        paid = "; ".join(f"{way} {format_usd(usd)} a day" for way, usd in billing.usd.items())
        page["day"] = {
            "title": "Replicas over the day",
            "svg": charts.render_svg(charts.plot_day(day)),
            "note": f"{words.describe_day(answer)} {paid or 'No price is known'}.",
        }
    return page
