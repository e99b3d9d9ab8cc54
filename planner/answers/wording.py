"""The words for a verdict, money, a deployment, a limit and a reason, on every surface."""

import math
from collections.abc import Mapping

from planner.answers.answer import (
    Alternative,
    Answer,
    Limit,
    Offer,
    Risk,
)
from planner.answers.bill_wording import format_price
from planner.answers.deployment_wording import describe_offer
from planner.answers.phrases import BASIS_PHRASES, RISK_PHRASES
from planner.core.number_format import (
    format_apart,
    format_distinct,
    format_ends,
    format_limit_seconds,
    format_number,
    format_probability,
    format_seconds,
)
from planner.core.text import capitalize, format_count
from planner.planning.alternatives import RankReason
from planner.planning.max_load import is_least_load
from planner.planning.memory_odds import SURE_MEMORY_PROBABILITY
from planner.planning.scenario import Scenario
from planner.planning.slo import LatencyMetric, LimitStatus, SloTarget, format_latency

METRIC_NAMES: Mapping[LatencyMetric, str] = {
    "ttft": "First token",
    "tpot": "Time per token",
    "itl": "Gap between tokens",
    "e2e": "Whole answer",
}
"""Latency metrics as people read them, beside their usual short names."""
VERDICT_NAMES: Mapping[str, str] = {
    "holds": "Meets targets",
    "at_risk": "At risk",
    "nothing_meets": "No plan meets the targets",
}
VERDICT_STATES: Mapping[str, LimitStatus] = {
    "holds": "met", "at_risk": "at risk", "nothing_meets": "missed",
}  # fmt: skip
BASIS_LABELS: Mapping[str, str] = {name: basis["says"] for name, basis in BASIS_PHRASES.items()}
"""What the step costs are based on, by `Offer.basis`."""
RANK_REASONS: Mapping[RankReason, str] = {
    "day": "over the day this plan costs less",
    "memory": "it needs gpu_memory_utilization above the engine's default",
    "probability": "this plan is likelier to meet every target",
    "weights": "its weight format comes later in `quantization`",
    "kv_cache": "its KV cache format comes later in `kv_cache_dtype`",
    "drafts": "it needs speculative decoding, the plan does not",
    "engine": "its engine comes later in `engine`",
    "arguments": "it needs non-default engine arguments",
    "stages": "it has more pipeline stages",
    "limit": "it comes nearer to a limit",
}


def format_odds(offer: Offer) -> str:
    """Format the probability that a deployment meets every target, apart from what is asked for."""
    return format_probability(offer.probability, offer.confidence)


def describe_memory_odds(offer: Offer) -> str:
    """Describe how probably GPU memory suffices, where that is not sure; else empty."""
    if offer.p_memory >= SURE_MEMORY_PROBABILITY:
        return ""
    share = offer.deployment.args.gpu_memory_utilization
    odds = format_probability(offer.p_memory, offer.confidence)
    return f"at gpu_memory_utilization {share:g} GPU memory is {odds} likely to suffice"


# --- the question


def name_target(target: SloTarget) -> str:
    """Name a target in words: "first token (p95)"."""
    return f"{METRIC_NAMES[target.metric].lower()} ({target.percentile})"


def describe_open_figure(scenario: Scenario) -> str:
    """Describe the largest load or the shortest limit, if that was the question; else empty."""
    load, kind = scenario.workload, scenario.found_figure
    if kind == "limit":
        target = scenario.slo_targets[0]
        return f"{target.name} of {format_limit_seconds(target.seconds)}"
    if is_least_load(scenario):
        return "one request at a time"
    if kind == "rate":
        return f"{format_number(load.rate or 0.0)} requests/s"
    return format_count(load.concurrency or 0, "concurrent request") if kind else ""


def explain_open_figure(answer: Answer) -> str:
    """Say the largest load or the shortest limit that is met; empty if it was not the question."""
    scenario = answer.scenario
    if scenario.found_figure is None:
        return ""
    if scenario.found_figure == "limit":
        target = scenario.slo_targets[0]
        shown = format_latency(target.seconds)
        if answer.chosen is None:
            return f"no limit for {target.name} can be met, not even {shown}"
        return f"{shown} is the shortest limit for {target.name} that can be met"
    amount = describe_open_figure(scenario)
    if answer.chosen and is_least_load(scenario):
        return f"even {amount} meets the targets with less than the probability asked for"
    if answer.chosen is None:
        return f"not even {amount} can be served within the targets"
    return f"{amount} are the most that can be served within the targets"


# --- limits


def name_limit(limit: Limit, scenario: Scenario) -> str:
    """Name a limit in full: "First token (TTFT) p95"."""
    if target := limit.target:
        return f"{METRIC_NAMES[target.metric]} ({target.metric.upper()}) {target.percentile}"
    headroom = scenario.headroom
    if limit.kind == "load":
        allowed = f", {1 - headroom:.0%} of capacity" if headroom else ""
        return f"{capitalize(limit.name)} (req/s){allowed}"
    if limit.kind == "job":
        return f"Job time, {headroom:.0%} headroom"
    fixed = {"users": "Concurrent requests", "rejected": "Rejected requests"}
    return fixed.get(limit.kind, capitalize(limit.name))


def format_amount(limit: Limit, amount: float | None = None) -> str:
    """Format what is expected of a limit, or another `amount` of it, apart from the limit."""
    amount = limit.value if amount is None else amount
    match limit.kind:
        case "latency":
            return format_seconds(amount, limit.limit)
        case "load":
            return format_apart(amount, limit.limit)
        case "users":
            return f"{amount:,.0f}"
        case "rejected":
            return f"{amount:.1%}"
    return f"{format_distinct(amount, limit.limit)} {limit.unit}"


def format_bound(limit: Limit) -> str:
    """Format the limit itself."""
    match limit.kind:
        case "latency":
            return format_limit_seconds(limit.limit)
        case "load":
            return format_apart(limit.limit, limit.value)
        case "job":
            return f"{format_apart(limit.limit, limit.value)} h"
        case "resource":
            return f"{limit.limit:,.6g} {limit.unit}"
    return format_amount(limit, limit.limit)


def format_pessimistic(limit: Limit) -> str:
    """Format what a limit may reach with the asked probability; of a load what may be used then."""
    return (
        format_apart(limit.pessimistic, limit.value)
        if limit.kind == "load"
        else format_amount(limit, limit.pessimistic)
    )


def explain_limit(limit: Limit) -> str:
    """Explain what of a limit is missed, or may be: "p95 TPOT may reach 54 ms, limit 50 ms"."""
    unit = " requests/s" if limit.kind == "load" else ""
    if limit.status == "missed":
        return f"{limit.name} is {format_amount(limit)}, limit {format_bound(limit)}{unit}"
    if limit.kind == "load":
        return (
            f"usable capacity may be {format_pessimistic(limit)}, load {format_amount(limit)}{unit}"
        )
    return f"{limit.name} may reach {format_pessimistic(limit)}, limit {format_bound(limit)}"


def list_doubts(offer: Offer, status: LimitStatus) -> list[str]:
    """List the limits that a deployment misses, or may miss."""
    found = [limit for limit in offer.limits if limit.status == status]
    if any(limit.is_load for limit in found):  # then waits grow without bound, which is no news
        found = [limit for limit in found if not math.isinf(limit.use.mid)]
    return list(map(explain_limit, found))


def explain_shortfall(offer: Offer) -> str:
    """Explain what a deployment lacks: the limits it exceeds, else its probability."""
    missed = "; ".join(list_doubts(offer, "missed")) if offer.performance else offer.memory.reason
    return missed or f"only {format_odds(offer)} likely to meet every target"


# --- reasons


def explain_alternative(answer: Answer, other: Alternative) -> str:
    """Explain why the plan does not use an alternative, in one clause."""
    chosen, offer = answer.chosen, other.offer
    if chosen is None or offer is None:
        return other.text if other.kind == "cannot start" else f"not tried: {other.text}"
    name, price = describe_offer(offer), format_price(offer)
    match other.kind:
        case "no price":
            return "no price known, so ranked last"
        case "dearer":
            times = format_number(offer.price_key[1] / chosen.price_key[1], 2)
            return f"{times} times the price ({price} for the smallest, {name})"
        case "less":
            return f"{name} serves less within the targets"
        case "misses":
            return f"{name}: {explain_shortfall(offer)}"
    assert other.rank_reason is not None
    # drafts shorten the time per token
    shown = _find_token_limit(chosen) if other.rank_reason == "drafts" else chosen.tightest
    gains = _compare_to_plan(shown, offer, other.served_change)
    odds = f"{price}, {format_odds(offer)} likely"
    return f"{name} meets the targets too ({odds}{gains}); {RANK_REASONS[other.rank_reason]}"


def _find_token_limit(offer: Offer) -> Limit | None:
    """Find the limit per token that comes nearest, else the nearest of all."""
    rows = [row for row in offer.limits if row.target and row.target.metric in ("tpot", "itl")]
    return max(rows, key=lambda row: row.pessimistic_use, default=offer.tightest)


def _compare_to_plan(tightest: Limit | None, offer: Offer, served_change: float | None) -> str:
    """Compare capacity, and a latency of the plan."""
    text = ""
    if served_change is not None:
        more = round(100 * served_change)
        text = f", serves {abs(more)}% {'more' if more > 0 else 'less'}" if more else ""
    other = tightest and offer.get_limit(tightest.name)
    if not tightest or not other:
        return text
    after, before = format_latency(other.value), format_latency(tightest.value)
    return f"{text}, {tightest.name} {after}, not {before}" if after != before else text


def explain_stages(answer: Answer) -> str:
    """Explain what speaks against pipeline stages inside a machine; empty if the plan has none."""
    if answer.chosen is None or not answer.chosen.has_inner_stages:
        return ""
    usual, instead = answer.runner_up, "nothing that was found does without them"
    if usual and not usual.has_inner_stages:
        odds = f"{format_price(usual)}, {format_odds(usual)} likely"
        instead = f"without them {describe_offer(usual)}: {odds}"
    return (
        "pipeline stages inside a machine are rarely built, and few runs with them were"
        f" measured; {instead}"
    )


def describe_pools(answer: Answer) -> str:
    """Describe pools of prefill and decode workers where they are allowed and not chosen: why not; else empty."""
    best, pools = answer.best, answer.best_pools
    if not answer.scenario.allow_disaggregation or best is None or best.is_disaggregated:
        return ""
    if answer.skipped_pools:
        return f"not evaluated: {answer.skipped_pools}"
    if pools is None:
        return "none meets the targets for less than twice the price"
    text = f"{describe_offer(pools)}: {format_price(pools)}, {format_odds(pools)} likely"
    chosen = answer.chosen
    if not pools.is_confident:
        missed = explain_shortfall(pools)
        return f"{text}; {missed}" if not missed.startswith("only") else f"{text}, less than asked"
    if chosen and pools.price_key >= chosen.price_key:
        return f"{text}; they cost no less than the plan"
    return f"{text}, with wide intervals: measure them first"


def explain_binding(answer: Answer) -> str:
    """Explain what the closest cheaper deployment lacks."""
    near, pinned = answer.binding.offer, answer.scenario.layout
    if near is None and pinned and answer.chosen:
        sizes = ", ".join(f"{name} {size}" for name, size in pinned.items())
        return (
            f"{sizes} is pinned by `layout`. {answer.binding.sentence.replace('exists', 'has it')}"
        )
    if near is None:
        return answer.binding.sentence
    misses = ", misses" * (not near.meets)
    return f"{describe_offer(near)}, {format_price(near)}{misses}: {explain_shortfall(near)}"


def describe_drafts(answer: Answer) -> str:
    """Say that another number of drafts is proposed than the scenario names; empty if it is that one."""
    named, chosen = answer.scenario.speculation, answer.chosen
    used = chosen and chosen.deployment.speculation
    if named is None or not used:
        return ""
    k, wanted = used.num_speculative_tokens, named.num_speculative_tokens
    if k == wanted:
        return ""
    return (
        f"the scenario names num_speculative_tokens {wanted}; {k} is proposed, because of the numbers"
        " tried it keeps the targets best at this load"
    )


def describe_nearest_run(offer: Offer) -> str:
    """Describe the measured run that the step costs lean on most; empty where the basis says more."""
    run = offer.nearest_run
    if run is None or (offer.basis == "measured" and not run.has_same_gpu):
        return ""
    return f"{run.text}: {format_latency(run.tpot_s)} per token" if run.tpot_s else run.text


def describe_rejected(answer: Answer) -> str:
    """Describe the part of the traffic that is rejected; empty if none is."""
    rate, offer = answer.scenario.workload.rate, answer.best
    if not rate or not offer or format_number(offer.offered_rps) == format_number(rate):
        return ""
    return f", the rest of {format_number(rate)} is rejected as too long"


def describe_risk(risk: Risk) -> tuple[str, str, str]:
    """Describe a risk: what it is, how large, and what to measure first to settle it."""
    phrase = RISK_PHRASES[risk.kind]
    return phrase["risk"], _size_risk(risk), phrase["measure"]


def _size_risk(risk: Risk) -> str:
    figures = risk.figures
    match risk.kind:
        case "edge" | "miss":
            return "; ".join(figures["reasons"])
        case "memory":
            return f"{format_probability(figures['suffices'])} likely not to run out"
        case "step costs":
            width = figures["width"]
            size = f"a latency may be {1 + width:.2g} times the expected one"
            if math.isinf(width):
                size = "waits may grow without end"
            elif not width:
                size = f"{figures['served_rps']:.3g} requests/s"
            return f"{BASIS_LABELS[figures['basis']]}; {size}"
        case "acceptance":
            return f"{figures['rate']:.0%} of the tokens after an accepted one"
        case "reuse":
            return f"{figures['hits']:.0%} of all prompt tokens are found in the cache"
        case "lengths":
            return f"assumed: 5% of {figures['side']}s have over {figures['p95']:,.0f} tokens"
        case "traffic" | "texts":
            spread = format_number(figures["spread"], 2)
            return f"prompt + output at p99 is {spread} times the median"
        case "price":
            return f"providers ask ${format_ends(figures['usd_per_hour'], ' to $')} an hour"
        case "license":
            return "NVIDIA does not license the GeForce driver for data centers"
    return "a restart or a lost GPU stops the service"
