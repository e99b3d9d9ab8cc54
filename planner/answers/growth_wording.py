"""How room for more traffic, a lost replica and a day are told."""

from collections.abc import Mapping

from planner.answers.answer import (
    Answer,
    Offer,
    OtherKind,
    OtherOption,
    ReplicaLoss,
)
from planner.answers.bill_wording import format_day_bill, format_price
from planner.answers.deployment_wording import describe_offer
from planner.answers.wording import describe_rejected, format_odds
from planner.core.intervals import Interval
from planner.core.number_format import (
    format_distinct,
    format_number,
    format_probability,
    format_range,
)
from planner.planning.growth import GrowthLimit
from planner.planning.slo import format_latency

MAX_GROWTH_IN_PERCENT = 2.0
"""From threefold on, growth is told as a factor."""
CAPACITY_MEANING = "Capacity is what the GPUs process at most, however long requests wait"
OTHER_LABELS: Mapping[OtherKind, str] = {
    "safer": "Safer", "cheaper": "Cheaper", "middle": "Between", "format": "Format", "gpu": "GPU",
}  # fmt: skip


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
    growth = explain_confident_load(answer.growth) if answer.growth else ""
    return " ".join(filter(None, (text, growth, explain_surge(answer))))


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
    texts = [*_describe_unlimited(surge.unlimited)]
    if surge.more:
        texts += [f"at {surge.more:.0%} more: {format_probability(surge.probability)} likely"]
    if even := surge.even_odds:
        odds = f"at {format_number(even.load)}: {format_probability(even.probability)}"
        texts += [" and ".join((odds, *_describe_unlimited(even.unlimited)))]
    return ", ".join(texts)


def _describe_unlimited(unlimited: Mapping[str, Interval]) -> list[str]:
    return [f"{name} {format_latency(each.mid)}" for name, each in unlimited.items()]


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


def explain_slots_in_capacity(answer: Answer) -> str:
    """Explain what the capacity leaves out where adapters share slots; empty where none waits for one."""
    slots, adapters = answer.adapter_slots, answer.scenario.workload.adapters
    if slots is None or slots.count >= adapters:
        return ""
    return (
        "in a long queue, in which requests of one adapter meet and share a slot; within the targets"
        " it is less"
    )


def describe_day(answer: Answer) -> str:
    """Describe the replicas over the day, and in how many hours all of them are too few."""
    day = answer.day
    if day is None:
        return ""
    fewest, most, missed = min(day.replicas), max(day.replicas), len(day.violated_hours)
    short = f"; in {missed} of {len(day.rates)} hours all are too few" if missed else ""
    return (
        f"{fewest} to {most} replicas over {len(day.rates)} hours save {day.saved_fraction:.0%} of"
        f" {day.fixed_gpu_hours:,.0f} GPU-hours; each gets up to"
        f" {format_number(day.max_replica_rps)} requests/s{short}."
    )
