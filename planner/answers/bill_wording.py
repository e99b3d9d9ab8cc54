"""How prices, bills and what an API costs are told."""

from planner.answers.answer import (
    Answer,
    Bill,
    Offer,
    is_same_price,
)
from planner.answers.deployment_wording import explain_outside
from planner.core.number_format import (
    format_ends,
    format_usd,
)
from planner.core.text import capitalize, format_count
from planner.hardware.prices import HOURS_PER_MONTH, GpuPrice
from planner.planning.billing import BILLING_SERVERLESS, EQUAL_COST_SHARE
from planner.planning.scenario import Scenario
from planner.workload.daily_profile import HOURS_PER_DAY, HOURS_PER_WEEK

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
        f"{api.api_bill}{period} by the token ({format_usd(api.api_usd_per_mtok_output)} per M output"
        f" tokens with their prompts), {format_usd(api.own_usd)}{period} on"
        f" these GPUs{' by the hour' * bool(answer.day)}: {api.outcome}"
        f"{period * (not api.is_about_equal)}{api.turn and f', {api.turn}'}",
        _explain_cheaper_than_api(answer),
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
    text = describe_api(answer)
    return f"{capitalize(text)}." if text else ""


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
