"""The decision memo: the first two pages of a report, and the head of the summary notebook.

Plain words for a reader who signs: what to rent, what it costs, how likely it meets the targets, what
else there is. Its sentences are those of `templates/memo.j2`, its figures those of the answer;
`MEMO_MIME_TYPE` carries them to the report.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

from markupsafe import Markup

from planner import __version__
from planner.answers import Answer, Offer, Performance, words
from planner.answers.answer import is_same_price
from planner.core import number_format as numbers
from planner.core.files import get_report_date
from planner.core.intervals import Interval
from planner.core.number_format import EN_DASH, format_number, format_probability, format_usd
from planner.core.templates import render_template
from planner.core.text import capitalize, escape_to_one_line
from planner.hardware.prices import HOURS_PER_MONTH, GpuPrice
from planner.planning.slo import SloTarget, explain_implausible_limits, list_benchmark_targets
from planner.ui.charts.base import MUTED_COLOR, SLO_STATUS_COLORS, render_svg
from planner.ui.charts.cockpit import color_for_print, plot_latency_over_load
from planner.ui.notebook_widgets import escape_html
from planner.ui.plan_text import render_rows

MEMO_MIME_TYPE = "application/vnd.headroom.memo+json"
MAX_OPTIONS, MAX_CHANGES = 3, 7
MIN_LABEL_DISTANCE = 0.11
"""Least distance of two named sellers, as a share of the dearest price."""
MAX_SHARE = 9.0
"""Largest share of a limit that is told; bars end before."""
_JUDGEMENTS = {"met": "Meets targets", "at risk": "At risk", "missed": "Misses targets"}
_COLORS = {**SLO_STATUS_COLORS, "": MUTED_COLOR}


class Memo(SimpleNamespace):
    """What both pages say: the fields that `memo.typ` and `memo.html.j2` show."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return dict(json.loads(json.dumps(vars(self), default=vars)))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        html = render_template(
            "ui",
            "memo.html",
            memo=self,
            color=_COLORS[self.state],
            escape=lambda text: Markup(escape_html(text)),
        )
        return {MEMO_MIME_TYPE: self.to_json(), "text/html": html}


def build_memo(answer: Answer) -> Memo:
    """Build the memo of an answer; its what-ifs, curve and ramp are shown where they are there."""
    best, scenario, curve = answer.best, answer.scenario, answer.curve
    options, bars = list(islice(_list_options(answer), MAX_OPTIONS)), list(_list_bars(answer))
    texts = defaultdict[str, list[tuple[str, ...]]](list)
    for field, text in _render(answer, options, bars):
        texts[field].append(tuple(text.split(" | ")))
    target, judged = _get_target(answer), list_benchmark_targets(scenario.slo_targets)
    ramp = tuple(_list_ramp(answer, judged))
    unit = "ms" if curve and curve.target.seconds < 1 else "s"
    first = {
        name: "".join(texts[name][0]) if texts[name] else ""
        for name in ("title", "deployment", "capacity_note", "next_step", "finding")
    }
    return Memo(
        **first,
        name=escape_to_one_line(scenario.name),
        date=f"{get_report_date():%-d %B %Y}",
        version=__version__,
        question=escape_to_one_line(" ".join(scenario.question.split())),
        verdict=words.PHRASES["verdicts"][answer.verdict],
        state=words.PHRASES["states"][answer.verdict],
        sentences=tuple(text for (text,) in texts["sentences"]),
        tiles=tuple(
            SimpleNamespace(name=name, value=value, unit=unit, note=note)
            for name, value, unit, note in texts["tiles"]
        ),
        api=words.explain_api(answer),
        day=words.describe_day(answer),
        asked=tuple(texts["asked"]),
        period="the job" if scenario.offline else "a month",
        cost_name="Cost, always on" if answer.day else "Cost",
        latency_name=words.name_target(target) if target else "",
        options=tuple(option for _, option in options),
        risks=tuple(texts["risks"]) if answer.chosen else (),
        bars=tuple(bars),
        confidence=format_probability(scenario.confidence),
        chart=render_svg(
            color_for_print(
                plot_latency_over_load(
                    curve.points, curve.here, curve.target.seconds * 1e3, curve.own * 1e3, 364
                )
            )
        )
        if curve
        else "",
        chart_title=f"{words.name_target(curve.target)}, {unit}, by {curve.axis.lower()}"
        if curve
        else "",
        changes=tuple(_list_changes(answer)),
        sellers=_list_sellers(best.price, _count_hours(best))
        if best and best.price and len(best.price.quotes) > 2
        else (),
        median_usd=best.price.median_usd * _count_hours(best) if best and best.price else 0.0,
        ramp_heads=tuple(map(words.name_target, judged)),
        ramp=ramp,
        basis=tuple(texts["basis"]),
    )


def _render(
    answer: Answer, options: list[tuple[Offer | None, Any]], bars: list[Any]
) -> list[list[str]]:
    """Return the fields and texts of `memo.j2`."""
    scenario, best, chosen = answer.scenario, answer.best, answer.chosen

    def name_letter(offer: Offer) -> str:
        titles = [option.title for shown, option in options if shown is offer]
        return titles[0].partition(" ")[0] if titles else words.count_gpus(offer)

    return render_rows(
        "memo",
        answer=answer,
        scenario=scenario,
        best=best,
        chosen=chosen,
        prefers_api=_prefers_api(answer),
        options=options,
        bars=bars,
        target=_get_target(answer),
        letter=name_letter,
        dash=EN_DASH,
        uncap=_uncapitalize,
        hint=explain_implausible_limits(scenario.slo_targets),
        other_gpus=list(islice(_explain_other_gpus(answer, options), MAX_OPTIONS)),
    )


def _get_target(answer: Answer) -> SloTarget | None:
    tightest = answer.best and answer.best.tightest
    return tightest.target if tightest else None


def _prefers_api(answer: Answer) -> bool:
    return bool(answer.api and answer.api.is_api_cheaper)


def _list_options(answer: Answer) -> Iterator[tuple[Offer | None, Any]]:
    """List the recommendation and what stands beside it; if nothing meets, the ways out."""
    letters = (f"{letter} · " for letter in "ABCDEFGH")
    chosen, scenario, api = answer.chosen, answer.scenario, answer.api
    if chosen is None:
        for name, offer in _list_ways_out(answer):
            outside = words.explain_outside(scenario, offer)
            con = "" if outside in name else capitalize(outside)
            yield offer, _describe_option(answer, next(letters) + name, offer, "", con)
        return
    is_api = _prefers_api(answer)
    if is_api and api and (entry := scenario.billing_alternatives.api):
        price = (
            f"${entry.usd_per_mtok_input:.2f} per M tokens in, ${entry.usd_per_mtok_output:.2f} out"
        )
        yield (
            None,
            SimpleNamespace(
                title=f"{next(letters)}recommended",
                name="API by the token",
                cost=format_usd(api.api_usd),
                change="",
                whole_cost=format_usd(api.api_usd),
                verdict="not predicted",
                state="",
                latency=EN_DASH,
                capacity=EN_DASH,
                pro=f"no servers; {price}",
                con="speed and limits are the provider's",
            ),
        )
    least = f"{scenario.confidence:.0%}" if answer.verdict == "holds" else "50%"
    hourly = " by the hour" * (chosen.billed_fraction < 1)
    reason = f"lowest price{hourly} with a probability of {least} or more"
    shown, measured = list[Offer](), answer.measure_first
    for role, offer in (("own GPUs" if is_api else "recommended", chosen), *_list_others(answer)):
        is_measured = measured is not None and offer is measured.offer
        is_new = all(words.describe_gpus(offer) != words.describe_gpus(each) for each in shown)
        if is_new or (is_measured and all(offer is not each for each in shown)):
            shown.append(offer)
            pro, con = (
                (reason, _describe_miss(offer)) if offer is chosen else _weigh(answer, role, offer)
            )
            yield offer, _describe_option(answer, next(letters) + role, offer, pro, con)


def _list_others(answer: Answer) -> Iterator[tuple[str, Offer]]:
    """List what stands beside the recommendation by role; first what is to be measured."""
    if answer.measure_first:
        yield "cheaper", answer.measure_first.offer
    others = [change.offer for change in answer.changes or () if change.is_other_gpu]
    found = [("safer", answer.safer), ("cheaper", answer.cheaper)]
    found += [("another GPU", offer) for offer in others]
    found += [("next best", offer) for offer in answer.candidates if offer.meets]
    yield from ((role, offer) for role, offer in found if offer)


def _weigh(answer: Answer, role: str, offer: Offer) -> tuple[str, str]:
    """Say what is for an option, and what against it."""
    chosen, (usd, base), miss = answer.chosen, _get_bills(answer, offer), _describe_miss(offer)
    period = "for the job" if answer.scenario.offline else "a month"
    cost = "another price" if usd is None or base is None else "the same price"
    if usd is not None and base is not None and not is_same_price(usd, base):
        cost = f"{format_usd(abs(usd - base))} {period} {'more' if usd > base else 'less'}"
    if _prefers_api(answer) and chosen and chosen.bill and offer.bill:
        more = offer.bill - chosen.bill
        cost = f"{format_usd(abs(more))} {period} {'more' if more > 0 else 'less'} than B"
    if role == "cheaper":
        return cost, miss
    is_likelier = chosen is not None and offer.probability > chosen.probability
    if role == "safer" or (role == "next best" and is_likelier):
        return f"only {miss}", cost
    if role == "next best":
        return "", f"{cost}, {miss}"
    first = answer.api.api_usd if _prefers_api(answer) and answer.api else chosen and chosen.bill
    is_dearer = offer.bill and first and offer.bill > 1.005 * first
    arguments = [(cost, not is_dearer), (words.explain_outside(answer.scenario, offer), False)]
    if offer.performance:
        label = words.PHRASES["basis"][offer.basis]["says"].split(":")[0]
        arguments.append((f"speed {label}", offer.basis.startswith("measured")))
    pro, con = (
        ", ".join(text for text, is_for in arguments if is_for == side and text)
        for side in (True, False)
    )
    return pro, con


def _list_ways_out(answer: Answer) -> list[tuple[str, Offer]]:
    """List the changes that allow a plan, in words, best first."""
    ways = [(each.change, each.offer) for each in answer.changes or () if each.offer]
    found, slots = answer.ways_out, answer.adapter_slots
    if found and slots and found.change and (offer := found.change.offer):
        count = offer.deployment.args.max_loras
        if count != slots.count:  # a way out of the answer alone, in which slots are free
            ways.append(
                (f"{found.change.change}, max_loras {count} in place of {slots.count}", offer)
            )
    return [
        (words.say_in_words(answer.scenario, n), o)
        for n, o in sorted(ways, key=lambda way: way[1].rank)
    ]


def _describe_option(answer: Answer, title: str, offer: Offer, pro: str, con: str) -> Any:
    """Describe one way to go; cells that are not known are a dash."""
    target, served, latency = _get_target(answer), offer.capacity_rps, EN_DASH
    if target and offer.performance:
        value = offer.performance.get_for_display(target.metric, target.percentile)
        latency = _format_interval(value, target.seconds)
    is_first = offer is answer.chosen and not _prefers_api(answer)
    change = "" if is_first else _format_change(*_get_bills(answer, offer))

    cost = EN_DASH if offer.bill is None else format_usd(offer.bill)
    return SimpleNamespace(
        title=title,
        name=words.count_gpus(offer),
        cost=cost,
        change=change,
        whole_cost=f"{cost} {change}".rstrip(),
        verdict=_judge(offer),
        state=offer.status,
        latency=latency,
        capacity=f"{format_number(served.mid)} requests/s" if served else EN_DASH,
        pro=pro,
        con=con,
    )


def _get_bills(answer: Answer, offer: Offer) -> tuple[float | None, float | None]:
    """Return the bills of an offer and of the first option, by the hour where both have one."""
    chosen, api = answer.chosen, answer.api
    if api and _prefers_api(answer):
        return offer.bills[1].usd if len(offer.bills) > 1 else offer.bill, api.api_usd
    if chosen and min(len(offer.bills), len(chosen.bills)) > 1:
        return offer.bills[1].usd, chosen.bills[1].usd
    return offer.bill, chosen.bill if chosen else None


def _explain_other_gpus(answer: Answer, options: list[tuple[Offer | None, Any]]) -> Iterator[str]:
    """Explain of each kind of GPU that is allowed and not among the options what its best would do."""
    shown = {offer.gpu for offer, _ in options if offer}
    for kind in (each for each in answer.by_gpu if answer.chosen and each.gpu not in shown):
        if offer := kind.offer:
            usd = "price not known" if offer.bill is None else format_usd(offer.bill)
            yield f"{words.describe_gpus(offer)} ({usd}, {_uncapitalize(_judge(offer))})"
        else:
            yield f"{kind.gpu} ({kind.reason})"


def _list_bars(answer: Answer) -> Iterator[Any]:
    """List the limits, each with the predicted value as shares of it."""
    planned = 1 - answer.scenario.headroom
    for limit in answer.best.limits if answer.best else ():
        lo, mid, hi = (min(end, MAX_SHARE) for end in (limit.use.lo, limit.use.mid, limit.use.hi))
        name, bound = words.name_limit(limit, answer.scenario), words.format_bound(limit)
        value, worst = words.format_amount(limit), words.format_pessimistic(limit)
        if limit.target:
            name = capitalize(words.name_target(limit.target))
        elif limit.is_load:
            name, bound = "Load (of capacity)", f"{planned:.0%}"
            value, worst = (
                f"{planned * use:.{int(abs(use - 1) < 0.005)}%}"
                for use in (limit.use.mid, limit.pessimistic_use)
            )
        yield SimpleNamespace(
            name=name,
            value=value,
            worst=worst,
            limit=bound,
            state=limit.status,
            lo=lo,
            mid=mid,
            hi=hi,
        )


def _list_changes(answer: Answer) -> Iterator[tuple[str, ...]]:
    """List what would change the answer; limits that change nothing when relaxed are one row."""
    own, rows = answer.chosen, list[tuple[str, Offer | None, str]]()
    relaxed = {
        change.change: (words.name_target(target), change.offer)
        for target in answer.scenario.slo_targets
        for change in answer.changes or ()
        if change.offer and change.change.startswith(f"limit of {target.name} relaxed")
        if own and change.offer.description == own.description
    }
    least = min((offer for _, offer in relaxed.values()), key=lambda o: o.probability, default=None)
    for change in answer.changes or ():
        if least is None or len(relaxed) < 2 or change.change not in relaxed:
            verdict = _judge(change.offer) if change.offer else "No plan meets the targets"
            rows.append(
                (
                    capitalize(words.say_in_words(answer.scenario, change.change)),
                    change.offer,
                    verdict,
                )
            )
        elif change.change == next(iter(relaxed)):
            names = ", ".join(
                f"{name} {text.rpartition(' to ')[2]}" for text, (name, _) in relaxed.items()
            )
            rows.append((f"Any one limit longer: {names}", least, f"{_judge(least)} or more"))
    told = sorted(
        rows, key=lambda r: not r[0] or bool(r[1] and own and r[1].description == own.description)
    )
    for name, offer, verdict in (row for row in rows if row in told[:MAX_CHANGES]):
        if offer is None:
            yield name, "no plan", EN_DASH, EN_DASH, verdict, "missed"
            continue
        weights, usd = words.describe_weights(offer), offer.bill
        other = "" if own and words.describe_weights(own) == weights else f", {weights}"
        shown = EN_DASH if usd is None else format_usd(usd)
        changed = _format_change(usd, own.bill if own else None) or EN_DASH
        yield name, words.count_gpus(offer) + other, shown, changed, verdict, offer.status


def _list_sellers(price: GpuPrice, hours: float) -> tuple[tuple[str, float, bool], ...]:
    """List sellers with their bill, and whether the name has room on the line."""
    cheapest: dict[str, float] = {}
    for quote in sorted(price.quotes, key=lambda quote: quote.usd):
        cheapest.setdefault(quote.seller, quote.usd * hours)
    prices, named = list(cheapest.values()), list[int]()
    for k in (0, len(prices) - 1, *range(1, len(prices) - 1)):
        if all(abs(prices[k] - prices[j]) > MIN_LABEL_DISTANCE * prices[-1] for j in named):
            named.append(k)
    return tuple((seller, usd, k in named) for k, (seller, usd) in enumerate(cheapest.items()))


def _count_hours(best: Offer) -> float:
    """GPU-hours of the best deployment in a month, or in the whole run."""
    return best.num_gpus_billed * (best.run_hours.mid if best.run_hours else HOURS_PER_MONTH)


def _list_ramp(answer: Answer, judged: tuple[SloTarget, ...]) -> Iterator[tuple[str, ...]]:
    """List what one replica does at each rate of its benchmark, and last at the traffic's own."""
    chosen, found = answer.chosen, answer.performance

    def list_step(step: Performance, tokens: float) -> Iterator[str]:
        for target in judged:
            value = step.get_for_display(target.metric, target.percentile)
            yield "overloaded" if step.saturated else _format_interval(value, target.seconds)
        yield format_number(tokens, 2)

    if chosen is None or answer.ramp is None:
        return
    for rate, step in answer.ramp.items():
        yield format_number(rate), *list_step(step, step.output_tps.mid)
    if found and not answer.scenario.offline:
        replicas = 1 if chosen.is_disaggregated else chosen.deployment.layout.replicas
        load = chosen.prediction.workload
        own = format_number(((load and load.rate) or found.request_tps.mid) / replicas)
        yield f"{own}, your traffic", *list_step(found, found.output_tps.mid / replicas)


def _judge(offer: Offer) -> str:
    estimated = " (estimated)" * (not offer.is_simulated)
    return f"{_JUDGEMENTS[offer.status]}, {words.format_odds(offer)}{estimated}"


def _describe_miss(offer: Offer) -> str:
    return f"{format_probability(1 - offer.probability)} risk that a target is missed"


def _format_change(usd: float | None, base: float | None) -> str:
    if not usd or not base or is_same_price(usd, base):
        return "same" if usd and base else ""
    return f"{usd / base - 1:+.0%}".replace("-", "\N{MINUS SIGN}")


def _uncapitalize(text: str) -> str:
    return text[:1].lower() + text[1:]


def _format_interval(value: Interval, limit: float) -> str:
    return EN_DASH if math.isnan(value.mid) else numbers.format_seconds_range(value, limit, EN_DASH)
