"""The words for a verdict, money, a deployment, a limit and a reason, on every surface."""

import math
from collections.abc import Mapping

from planner.answers.answer import (
    Alternative,
    Answer,
    Bill,
    Choice,
    Limit,
    Offer,
    OtherKind,
    OtherOption,
    ReplicaLoss,
    Risk,
    is_same_price,
)
from planner.answers.phrases import BASIS_PHRASES, RISK_PHRASES
from planner.core.number_format import (
    format_apart,
    format_distinct,
    format_ends,
    format_limit_seconds,
    format_number,
    format_probability,
    format_range,
    format_seconds,
    format_shares,
    format_usd,
)
from planner.core.text import capitalize, format_count
from planner.core.units import GIB, MIB
from planner.hardware.prices import HOURS_PER_MONTH, GpuPrice
from planner.planning.alternatives import RankReason
from planner.planning.autoscaling import NUM_SIMULATED_DAYS
from planner.planning.billing import BILLING_SERVERLESS, EQUAL_COST_SHARE
from planner.planning.framework_choice import load_frameworks
from planner.planning.growth import MIN_GROWTH, GrowthLimit
from planner.planning.max_load import is_least_load
from planner.planning.memory_odds import SURE_MEMORY_PROBABILITY
from planner.planning.scenario import Scenario
from planner.planning.search import GAMBLE_PROBABILITY
from planner.planning.slo import LatencyMetric, LimitStatus, SloTarget, format_latency
from planner.workload.daily_profile import HOURS_PER_DAY, HOURS_PER_WEEK

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
MAX_GROWTH_IN_PERCENT = 2.0
"""From threefold on, growth is told as a factor."""
CAPACITY_MEANING = "Capacity is what the GPUs process at most, however long requests wait"
BUDGET_RULE = "until then budget this one, sized for the odds asked"
"""How a plan that is as likely as asked goes with a cheaper one that probably does."""
OTHER_LABELS: Mapping[OtherKind, str] = {
    "safer": "Safer", "cheaper": "Cheaper", "middle": "Between", "format": "Format", "gpu": "GPU",
}  # fmt: skip
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
_NAMES = {
    "bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "fp8_block": "FP8", "fp8_channel": "FP8",
    "fp8_e4m3": "FP8 E4M3", "fp8_e5m2": "FP8 E5M2", "eagle3": "EAGLE-3", "ngram": "n-gram", "medusa": "Medusa",
    "dflash": "DFlash", "suffix": "suffix", "mlp_speculator": "MLP speculator", "draft_model": "draft-model",
}  # fmt: skip
"""Formats and methods of speculation as people write them; of the others in capitals."""


# --- deployments


def describe_offer(offer: Offer) -> str:
    """Describe a deployment: GPUs, layout and formats, as their makers write them."""
    args = offer.deployment.args
    parts = [offer.placement, describe_weights(offer)]
    if args.kv_cache_dtype not in (None, "auto"):
        parts += [f"{_write_name(args.kv_cache_dtype)} KV cache"]
    if offer.deployment.speculation:
        parts += [f"{_write_name(offer.deployment.speculation.method)} drafts"]
    return ", ".join(parts)


def describe_weights(offer: Offer) -> str:
    """Describe the format of the weights: "FP8 weights"."""
    model = offer.deployment.model
    method = model.quantization.method
    return f"{_write_name(model.dtype if method == 'none' else method)} weights"


def _write_name(name: str) -> str:
    return _NAMES.get(name, name.upper() if name.isalnum() else name)


def gloss_deployment(offer: Offer) -> str:
    """Explain the short names of a deployment's layout and format to who does not run engines."""
    terms = dict[str, str]()
    for layout in (pool.layout for pool in offer.pools):
        sizes = {
            f"TP{layout.tp}": f"each layer is split over {layout.tp} GPUs" * (layout.tp > 1),
            f"PP{layout.pp}": f"{layout.pp} groups of layers on GPUs of their own"
            * (layout.pp > 1),
            f"DP{layout.dp}": f"requests are shared among {layout.dp} parts" * (layout.dp > 1),
            f"EP{layout.ep}": f"experts are spread over {layout.ep} GPUs" * (layout.ep > 1),
        }
        terms |= {name: text for name, text in sizes.items() if text}
    name = describe_weights(offer).partition(" ")[0]
    terms[name] = f"{offer.deployment.model.quantization.weight_bits:.3g} bits per weight"
    return "; ".join(f"{term}: {text}" for term, text in terms.items())


def describe_engine(offer: Offer) -> str:
    """Name the engine and its version: "vLLM 0.20.2"."""
    engine = offer.deployment.engine
    return f"{load_frameworks()[engine.name].title} {engine.version}"


def describe_gpus(offer: Offer) -> str:
    """Name how many GPUs of a kind are rented."""
    return f"{offer.num_gpus_billed} \N{MULTIPLICATION SIGN} {offer.gpu}"


def describe_replica_gpus(offer: Offer) -> str:
    """Name the GPUs of one replica; of pools all."""
    return f"{offer.gpus_per_replica} \N{MULTIPLICATION SIGN} {offer.gpu}"


def describe_adapter_traffic(scenario: Scenario) -> str:
    """Describe which LoRA adapters requests ask for, after their lengths; empty without any."""
    load = scenario.workload
    if not load.adapters:
        return ""
    skew = f"Zipf {load.adapter_zipf:g}" if load.adapter_zipf else "evenly used"
    return f"; each for one of {format_count(load.adapters, 'LoRA adapter')} ({skew})"


def describe_machines(answer: Answer) -> str:
    """Describe the machines to rent, spares included; empty where GPUs are let in any number."""
    best, day, spares = answer.best, answer.day, answer.scenario.spare_replicas
    machines = [size for pool in best.pools for size in pool.machines] if best else []
    if best is None or not machines:
        return ""
    text = f"{best.num_gpus_billed} x {best.gpu}, in machines of {' + '.join(map(str, machines))}"
    smaller = day.deployment.returnable_machines if day and day.num_starts else ()
    if smaller:
        text += (
            f"; by the hour of {' + '.join(map(str, smaller))}, as no part of a machine can be given"
            " back"
        )
    return text + f", {format_count(spares, 'spare replica')} included" * bool(spares)


def describe_adapters(answer: Answer) -> str:
    """Describe the LoRA adapters and their slots on a GPU; empty without any."""
    adapters, offer, slots = (
        answer.scenario.workload.adapters, answer.best, answer.adapter_slots,
    )  # fmt: skip
    if not adapters or offer is None or slots is None:
        return ""
    args = offer.deployment.args
    text = (
        f"{format_count(adapters, 'LoRA adapter')}, {format_count(slots.count, 'slot')} per GPU"
        f" (max_loras), rank up to {args.max_lora_rank}"
    )
    if slots.count < adapters and slots.sequences < args.max_num_seqs:
        text += f"; {slots.sequences:,} requests fill them on average, others wait for a slot"
    return text


def explain_cold_adapter(answer: Answer) -> str:
    """Explain what an adapter waits for that has no slot yet; empty without adapters."""
    slots, load = answer.adapter_slots, answer.scenario.workload
    if slots is None or answer.best is None:
        return ""
    args = answer.best.deployment.args
    in_host, cold = format_seconds(slots.load_s), format_seconds(slots.cold_s)
    where = f"{cold} from a file ({answer.scenario.storage})"
    if (args.max_cpu_loras or slots.count) >= load.adapters:
        kept = "all are kept in host memory and read before the first request"
        return f"{in_host} into a slot from host memory; {kept}. One that is added later: {where}"
    return f"{in_host} into a slot from host memory, {where}, while no step runs"


def describe_model_memory(answer: Answer) -> str:
    """Describe what the whole model takes, as its checkpoint says and as it is loaded."""
    found, offer = answer.model_memory, answer.best
    if found is None or offer is None:
        return ""
    stored, loaded = (_format_gib(size) for size in (found.stored_bytes, found.loaded_bytes))
    text = f"{format_number(found.num_params / 1e9)}B parameters, {stored} as stored"
    if stored != loaded:
        text += f", {loaded} as loaded ({describe_weights(offer)})"
    if of_token := found.kv_bytes_per_token:
        text += f"; KV cache {format_number(of_token / 1024)} KiB per token"
    return text


def _format_gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"


def describe_gpu_memory(answer: Answer) -> str:
    """Describe what the fullest GPU holds of weights, adapters and KV cache."""
    offer, slots = answer.best, answer.adapter_slots
    if offer is None:
        return ""
    memory = offer.memory
    parts = [f"{_format_gib(memory.weights.mid - memory.adapters_bytes)} of weights"]
    if slots:
        each = f"{format_count(slots.count, 'slot')} x {format_number(slots.bytes_each / MIB)} MiB"
        parts += [f"{_format_gib(memory.adapters_bytes)} of LoRA adapters ({each})"]
    of_token = memory.layout.kv_bytes_per_token
    share = f" ({format_number(of_token / 1024)} KiB per token)" if of_token else ""
    *first, last = *parts, f"{_format_gib(memory.kv_available.mid)} of KV cache{share}"
    total = _format_gib(memory.total_bytes)
    return f"{', '.join(first)} and {last} on the fullest GPU, which has {total}"


def explain_outside(scenario: Scenario, offer: Offer) -> str:
    """Explain why the scenario does not allow a deployment's GPUs; empty if it does."""
    if offer.outside != "count":
        return "not on your list" if offer.outside else ""
    most = next(each.max_gpus for each in scenario.gpus if each.gpu.name == offer.gpu)
    return f"more than the {most:,} allowed"


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


# --- money


def describe_period(scenario: Scenario) -> str:
    """Say what a bill is for, after its amount."""
    return " for the job" if scenario.offline else "/month"


def format_price(offer: Offer) -> str:
    """Format the headline bill: of a month that the GPUs are always on, or of the job."""
    if not offer.bills:
        return "price unknown"
    period = " for the job" if offer.run_hours else "/month"
    return f"{format_usd(offer.bills[0].usd)}{period}"


def format_hourly_price(offer: Offer, dash: str = "-") -> str:
    """Format the price of an hour, and where it comes from: "$5.80/h ($4.1-12 by provider)"."""
    usd, price = offer.usd_per_hour, offer.price
    if usd is None or price is None:
        return f"no price of {offer.gpu} is known"
    source = f"${format_ends(usd, dash)} by provider"
    if price.is_user_given:
        source = "your price"
    elif len(price.quotes) == 1:
        source = price.source
    return f"{format_usd(usd.mid)}/h ({source})"


def format_day_bill(offer: Offer) -> str:
    """Format what a deployment costs with replicas by the hour, after its headline; empty if not billed."""
    if len(offer.bills) < 2:
        return ""
    return f", {format_usd(offer.bills[1].usd)} by the hour"


def describe_stopped_bill(answer: Answer) -> str:
    """Describe what the plan costs if it is off in hours without traffic, beside its headline; else empty."""
    bills = answer.best.bills if answer.best else ()
    stopped = next((bill for bill in bills if bill.basis == "stopped without traffic"), None)
    if stopped is None or answer.day is None:
        return ""
    hours, period = len(answer.day.rates), "day"
    if hours > HOURS_PER_DAY:
        period = "week" if hours == HOURS_PER_WEEK else "cycle"
    idle = answer.day.rates.count(0)
    return f", or {format_usd(stopped.usd)} switched off in the {idle} hours a {period} without traffic"


def list_other_bills(answer: Answer) -> list[str]:
    """List what the plan costs on other bases than its headline."""
    offer, day = answer.best, answer.day
    if offer is None or day is None:
        return []
    return [
        _describe_bill(bill, answer)
        for bill in offer.bills[1:]
        if not is_same_price(bill.usd, offer.bill)
    ]


def _describe_bill(bill: Bill, answer: Answer) -> str:
    day = answer.day
    assert day is not None
    usd = f"{format_usd(bill.usd)}/month"
    if bill.basis == "scaled by the hour":
        fewest, most = min(day.replicas), max(day.replicas)
        count = f"{fewest}-{most} replicas" if fewest < most else format_count(most, "replica")
        return f"{usd} with {count} by the hour"
    idle = day.rates.count(0)
    return (
        f"{usd} if none runs in the {idle} hours without traffic (`replicas_at_least: 0` at the top"
        " of the scenario)"
    )


def describe_api(answer: Answer) -> str:
    """Describe what the traffic costs from an API and on the plan's GPUs; empty without an API."""
    api, period = answer.api, describe_period(answer.scenario)
    if api is None:
        return ""
    parts = [
        f"{api.api_bill}{period} by the token ({api.api_price}), {format_usd(api.own_usd)}{period} on"
        f" these GPUs{' by the hour' * bool(answer.day)}: {api.outcome}"
        f"{period * (not api.is_about_equal)}{api.turn and f', {api.turn}'}",
        _explain_cheaper_than_api(answer),
        api.stopped,
    ]
    start = f"{api.assumption} (`workload.day` gives yours): " if api.assumption else ""
    return start + "; ".join(filter(None, parts))


def describe_serverless(answer: Answer) -> str:
    """Describe what the day costs by the GPU-second and on the plan's GPUs; empty if nobody asked."""
    chosen, billing = answer.chosen, answer.billing
    if answer.scenario.billing_alternatives.serverless is None or chosen is None:
        return ""
    usd = billing.usd.get(BILLING_SERVERLESS) if billing else None
    own = min(chosen.bills[1:], key=lambda bill: bill.usd, default=None)
    if usd is None or own is None:
        return (
            "not compared: give `workload.day` or `workload.office_hours`, and a price of the GPU"
        )
    usd *= HOURS_PER_MONTH / HOURS_PER_DAY
    saved, outcome = abs(usd - own.usd), "about the same"
    if saved >= EQUAL_COST_SHARE * max(usd, own.usd):
        saver = "serverless saves" if usd < own.usd else "own GPUs save"
        outcome = f"{saver} {format_usd(saved)}/month"
    how = " (`replicas_at_least: 0`)" * (own.basis == "stopped without traffic")
    return (
        f"{format_usd(usd)}/month by the second, {format_usd(own.usd)}/month on these GPUs"
        f" {own.basis}{how}: {outcome}"
    )


def explain_api(answer: Answer) -> str:
    """Explain which of API and GPUs is cheaper, in a sentence; empty without an API."""
    if answer.api is None:
        return ""
    parts = (answer.api.sentence, _explain_cheaper_than_api(answer))
    return capitalize("; ".join(filter(None, parts))) + "."


def _explain_cheaper_than_api(answer: Answer) -> str:
    """Name what costs less than the API where the plan does not; empty without."""
    offer = answer.cheaper_than_api
    if offer is None:
        return ""
    outside = explain_outside(answer.scenario, offer).replace("on your list", "listed")
    usd = f"{format_usd(offer.least_bill)}{describe_period(answer.scenario)}"
    return f"but {offer.placement}{f' ({outside})' * bool(outside)} costs less than the API: {usd}"


def describe_gpu_price(price: GpuPrice) -> str:
    """Describe the price of a GPU-hour and its quotes."""
    text = f"{format_usd(price.median_usd)} per GPU-hour"
    if price.is_user_given:
        return f"{text}, set in the scenario"
    text += f" {price.tier.replace('_', ' ')}"
    if len(price.quotes) == 1:
        return f"{text} ({price.source}, {price.date})"
    first, *_, last = sorted(price.quotes, key=lambda quote: quote.usd)
    ends = f"${first.usd:.2f} {first.seller} to ${last.usd:.2f} {last.seller}"
    return f"{text}, median of {len(price.quotes)} quotes ({ends}, {price.date})"


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
    """Describe the measured run that the step costs lean on most; empty where there is none."""
    if offer.nearest_run is None:
        return ""
    run = offer.nearest_run
    return f"{run.text}: {format_latency(run.tpot_s)} per token" if run.tpot_s else run.text


def describe_draws(choice: Choice) -> str:
    """Describe what exact step costs would choose: "this plan 97%, a cheaper one 3%"."""
    shares = {
        "this plan": choice.p_unchanged,
        "another at its price": choice.p_equal_cost,
        "a more expensive one": choice.p_costlier,
        "a cheaper one": choice.p_cheaper,
    }
    texts = zip(shares, format_shares(list(shares.values())), strict=True)
    text = ", ".join(f"{what} {share}" for what, share in texts if share != "0%")
    unlikely = "; no single cheaper plan is likely enough to meet the targets"
    return text + unlikely * choice.is_cheaper_likely


def describe_cheaper_odds(answer: Answer) -> str:
    """Say that a benchmark pays off before anything is rented for long, where it probably does; else empty."""
    choice = answer.choice
    if choice is None or not choice.is_cheaper_likely or answer.scenario.offline:
        return ""  # a job takes fewer GPUs longer, for the same bill
    near, some = choice.likeliest_cheaper, format_probability(choice.p_cheaper)
    alone = f", {near.placement} alone {format_odds(near)}" if near else ""
    return f"first, an hour: {some} likely that some cheaper plan does{alone}; {BUDGET_RULE}"


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


def explain_replica_loss(loss: ReplicaLoss | None, offer: Offer) -> str:
    """Explain what happens while one replica is down."""
    if loss is None:
        return ""
    if loss.kind == "spares":
        are = "spares are" if loss.spares > 1 else "spare is"
        return (
            f"With up to {loss.spares} replica{'s' * (loss.spares > 1)} down, every target is met:"
            f" the traffic needs {loss.replicas}, and {loss.spares} {are} provisioned."
        )
    if loss.kind == "single":
        usd = offer.usd_per_hour
        is_replica = usd and loss.role == "replica"
        second = f"; a second costs ${usd.mid:,.2f} an hour more" if is_replica and usd else ""
        return f"There is only one {loss.role}: while it restarts, nothing is served{second}."
    others = f"other {loss.replicas - 1}" if loss.replicas > 2 else "other"
    left = others if loss.role == "replica" else "others"
    text = f"With one of {loss.replicas} {loss.role}s down, the same traffic on the {left}"
    how = " (simulated)" * loss.is_simulated
    if loss.meets:
        risk = f", though {'; '.join(loss.texts)}" if loss.texts else ""
        return f"{text} still meets every target{risk}{how}."
    return f"{text} misses a target{how}: {'; '.join(loss.texts)}."


def describe_headroom(answer: Answer) -> str:
    """Describe the capacity of a plan, its free part, and how far traffic may grow."""
    scenario, best = answer.scenario, answer.best
    if best is None or best.capacity_rps is None:
        return ""
    load, rate = scenario.workload, best.offered_rps
    if best.run_hours and scenario.deadline_hours:
        total, allowed = load.num_prompts or 0, format_number(scenario.deadline_hours)
        hours = format_range(best.run_hours)
        text = f"It finishes {total:,} requests in {hours} hours, of {allowed} allowed."
        return f"{text} {_describe_free(answer, best)}"
    capacity = format_range(best.capacity_rps)
    if load.rate is None:
        return (
            f"{load.concurrency:,} concurrent requests come to {format_number(rate)} requests/s; its"
            f" capacity is {capacity}."
        )
    text = (
        f"Its capacity is {capacity} requests/s; {format_number(rate)} are"
        f" planned{describe_rejected(answer)}."
    )
    if best.is_overloaded:
        return f"{text} It is overloaded: queues grow until requests are turned away."
    return f"{text} {_describe_free(answer, best)}"


def _describe_free(answer: Answer, best: Offer) -> str:
    free = f"{max(best.free_capacity or 0.0, 0.0):.0%} of it is free"
    text = f"{free}, headroom required {answer.scenario.headroom:.0%}."
    return " ".join(filter(None, (text, explain_growth(answer), explain_surge(answer))))


def list_other_options(answer: Answer) -> list[tuple[str, str]]:
    """List what may be taken instead of the plan, as label and text, what matters most first."""
    usual = not (answer.chosen and answer.chosen.has_inner_stages)
    return [
        (OTHER_LABELS[each.kind], _describe_option(each, has_usual_layout=usual))
        for each in answer.other_options
    ]


def _describe_option(option: OtherOption, *, has_usual_layout: bool) -> str:
    offer, outside = option.offer, ""
    price = f"{format_price(offer)}{format_day_bill(offer)}, {format_odds(offer)} likely"
    parts = [price]
    if option.unlisted:
        outside = " (not allowed)" if option.unlisted.is_format else " (not listed)"
    if option.unlisted and option.unlisted.is_format:
        parts += [option.unlisted.quality.partition(" (")[0] or "quality not published"]
    if offer.has_inner_stages and has_usual_layout and offer.probability >= offer.confidence:
        parts += ["its pipeline stages are rarely measured"]
    return f"{describe_offer(offer)}{outside}: {'; '.join(parts)}"


def describe_surge(answer: Answer) -> str:
    """Describe the probability at more traffic than planned: "at 20% more: 66% likely"; else empty."""
    surge = answer.surge
    if surge is None:
        return ""
    text = f"at {surge.more:.0%} more: {format_probability(surge.probability)} likely"
    planned = answer.open_figure
    if surge.even_odds_load is None or planned is None:
        return text
    if surge.even_odds_load <= planned[1] * (1 + surge.more):
        return text
    even = format_number(surge.even_odds_load)
    return f"{text}, at {even}: {format_probability(GAMBLE_PROBABILITY)}"


def explain_surge(answer: Answer) -> str:
    """Explain in a sentence what the probability assumes; empty where that was not computed."""
    if answer.surge is None:
        return ""
    return f"The probability assumes this traffic; {describe_surge(answer)}."


def format_growth(growth: GrowthLimit) -> tuple[str, str]:
    """Format how far traffic may grow, as a value and a unit: "+6%", from threefold on "3.5 times"."""
    if not growth.growth:
        return "None", ""
    if growth.growth < MAX_GROWTH_IN_PERCENT:
        return f"+{growth.growth:.0%}", ""
    return format_number(1 + growth.growth, 2), "times"


def describe_growth_end(growth: GrowthLimit, ask_every_s: float | None = None) -> str:
    """Describe the load that traffic may grow to, in requests/s or in users, and its probability."""
    odds = format_probability(growth.confidence)
    if not growth.growth:
        return (
            f"more is under {odds} likely"
            if growth.confident_rps
            else f"under {odds} likely already"
        )
    unit = "users" if ask_every_s else "requests/s"
    return f"to {_format_growth_end(growth, ask_every_s or 1.0)} {unit}, {odds} likely"


def _format_growth_end(growth: GrowthLimit, factor: float = 1.0) -> str:
    return format_distinct(growth.confident_rps * factor, growth.offered_rps * factor)


def explain_confident_load(growth: GrowthLimit) -> str:
    """Explain up to which load every target is met, and how that differs from the capacity."""
    odds, end = format_probability(growth.confidence), _format_growth_end(growth)
    if growth.growth:
        text = f"Every target is met with a probability of {odds} up to {end} requests/s"
    elif growth.confident_rps:
        text = f"Beyond the planned load the probability falls below the {odds} asked for"
    else:
        text = f"At the planned load the probability is already below the {odds} asked for"
    return f"{text}. {CAPACITY_MEANING}."


def explain_growth(answer: Answer) -> str:
    """Explain how far traffic may grow with the asked probability, and at the expected speed."""
    growth = answer.growth
    if growth is None:
        return ""
    expected = _explain_expected_growth(answer.scenario, growth)
    return expected if answer.scenario.offline else f"{explain_confident_load(growth)} {expected}"


def _explain_expected_growth(scenario: Scenario, growth: GrowthLimit) -> str:
    """Explain how far traffic may grow at the expected speed: one time in two it is less."""
    subject, end = ("work", "it is late") if scenario.offline else ("traffic", "it is overloaded")
    offered, planned = growth.offered_rps, growth.usable_rps
    start = "At the expected speed"
    rate, reason = growth.expected or (growth.capacity.mid, end)
    end = f"{reason}{' (estimate)' * (growth.is_estimate and growth.expected is not None)}"
    if not rate:
        return f"No rate meets every target: {end} even in an idle engine."
    more = rate / offered - 1
    if growth.expected and rate < planned:
        room = f"{start} the {subject} may grow by {_format_share(more)}"
        if more < MIN_GROWTH:
            room = f"{start} there is no room for more {subject}"
        return f"{room}: beyond {format_number(rate)} requests/s {end}, though capacity is left."
    if planned < offered:
        return f"{start} there is no room for more {subject}."
    within = ""
    if scenario.headroom:
        within = f"by {_format_share(planned / offered - 1)} within the headroom, and "
    return f"{start} the {subject} may grow {within}by {_format_share(more)} until {end}."


def explain_slots_in_capacity(answer: Answer) -> str:
    """Explain what the capacity leaves out where adapters share slots; empty where none waits for one."""
    slots, adapters = answer.adapter_slots, answer.scenario.workload.adapters
    if slots is None or slots.count >= adapters:
        return ""
    return (
        "in a long queue, in which requests of one adapter meet and share a slot; within the targets"
        " it is less"
    )


def _format_share(growth: float) -> str:
    if growth < MAX_GROWTH_IN_PERCENT:
        return f"{growth:.0%}"
    return f"a factor of {format_number(growth + 1, 2)}"


def describe_day(answer: Answer) -> str:
    """Describe the replicas over the day, and in how many single hours an unusual day may miss.

    The plan's probability is that of its busiest hour at all step costs. A single hour's tail is
    judged at the expected step cost, but on the worst of `NUM_SIMULATED_DAYS` days or one in forty.
    """
    day = answer.day
    if day is None:
        return ""
    hours, missed = len(day.rates), len(day.violated_hours)
    unit = "day" if hours == 24 else "week" if hours == 168 else "cycle"
    text = f"{capitalize(str(day))}."
    if not missed:
        return (
            f"{text} Every hour meets the targets on each of {NUM_SIMULATED_DAYS} days simulated at"
            " the expected step cost."
        )
    worst = max(day.hourly_limit_utilization) - 1
    return (
        f"{text} {hours - missed} of {hours} hours meet the targets on an unusual {unit} (1 in 40)"
        f" too. In the other {missed} the whole fleet runs, and on such a {unit} the tail of one hour"
        f" may exceed its limit by up to {worst:.0%}."
    )
