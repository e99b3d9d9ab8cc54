"""The decision memo: the first two pages of a report, and the head of the summary notebook.

Plain words for a reader who signs: what to rent, what it costs, how likely it meets the targets, what
else there is. The figures are those of the answer; `MEMO_MIME_TYPE` carries them to the report.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from markupsafe import Markup

from planner import __version__
from planner.answers import Answer, Offer, Performance
from planner.answers.answer import Benchmark, is_same_price
from planner.answers.bill_wording import explain_api, format_day_bill, list_other_bills
from planner.answers.deployment_wording import (
    describe_adapter_traffic,
    describe_adapters,
    describe_engine,
    describe_gpus,
    describe_offer,
    describe_replica_gpus,
    describe_weights,
    explain_outside,
    gloss_deployment,
)
from planner.answers.growth_wording import (
    CAPACITY_MEANING,
    describe_day,
    describe_growth_end,
    explain_confident_load,
    explain_slots_in_capacity,
    explain_surge,
    format_growth,
)
from planner.answers.wording import (
    BASIS_LABELS,
    BUDGET_RULE,
    VERDICT_NAMES,
    VERDICT_STATES,
    describe_nearest_run,
    describe_risk,
    explain_alternative,
    explain_open_figure,
    explain_shortfall,
    format_amount,
    format_bound,
    format_odds,
    format_pessimistic,
    list_doubts,
    name_limit,
    name_target,
)
from planner.core.files import get_report_date
from planner.core.intervals import Interval
from planner.core.number_format import (
    EN_DASH,
    format_limit_seconds,
    format_number,
    format_probability,
    format_seconds_range,
    format_usd,
)
from planner.core.templates import render_template
from planner.core.text import capitalize, escape_to_one_line
from planner.hardware.prices import HOURS_PER_MONTH
from planner.planning.slo import (
    LimitStatus,
    SloTarget,
    explain_implausible_limits,
    list_benchmark_targets,
)
from planner.ui.charts.base import MUTED_COLOR, render_svg
from planner.ui.charts.summary import SLO_STATUS_COLORS, plot_load_curve
from planner.ui.notebook_widgets import escape_html

MEMO_MIME_TYPE = "application/vnd.headroom.memo+json"
_TIMES = "\N{MULTIPLICATION SIGN}"
MAX_OPTIONS, MAX_CHANGES = 3, 7
MIN_LABEL_DISTANCE = 0.11
"""Least distance of two named sellers, as a share of the dearest price."""
OWN_SCRIPTS = ("serve.sh", "bench.sh")
"""What starts and benchmarks a replica, where the answer does not name them."""
MAX_SHARE = 9.0
"""Largest share of a limit that is told; bars end before."""

State = LimitStatus | Literal[""]


@dataclass(frozen=True)
class Tile:
    """One of the four numbers."""

    name: str
    value: str
    unit: str
    note: str


@dataclass(frozen=True)
class Option:
    """One way to go; cells that are not known are a dash."""

    title: str
    name: str
    cost: str
    change: str  # of the cost, against the first option
    verdict: str
    state: State
    latency: str
    capacity: str
    pro: str
    con: str

    @property
    def whole_cost(self) -> str:
        """The cost and its change."""
        return f"{self.cost} {self.change}".rstrip()


@dataclass(frozen=True)
class Bar:
    """One target: the predicted value as shares of its limit."""

    name: str
    value: str
    worst: str  # what it reaches with the probability that was asked for
    limit: str
    state: State
    lo: float
    mid: float
    hi: float


@dataclass(frozen=True)
class Memo:
    """What both pages say."""

    name: str
    date: str
    version: str
    title: str
    question: str
    verdict: str
    state: State
    deployment: str
    sentences: tuple[str, ...]
    tiles: tuple[Tile, ...]
    api: str
    day: str
    asked: tuple[tuple[str, str], ...]
    period: str
    cost_name: str
    latency_name: str
    options: tuple[Option, ...]
    capacity_note: str  # what the capacity of the options means
    risks: tuple[tuple[str, str, str], ...]  # name, size, what settles it
    next_step: str
    finding: str
    bars: tuple[Bar, ...]
    confidence: str  # the probability that was asked for, up to which a bar reaches
    chart: str  # SVG; empty without one
    chart_title: str
    changes: tuple[tuple[str, str, str, str, str, State], ...]
    sellers: tuple[tuple[str, float, bool], ...]  # seller, USD a month, whether it is named
    median_usd: float
    ramp_heads: tuple[str, ...]  # what of one replica a benchmark is judged by
    ramp: tuple[tuple[str, ...], ...]
    ramp_note: str  # why a benchmark's figures differ from those of the targets
    basis: tuple[tuple[str, str], ...]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {MEMO_MIME_TYPE: asdict(self), "text/html": _render_html(self)}


def build_memo(answer: Answer) -> Memo:
    """Build the memo of an answer; its what-ifs, curve and ramp are shown where they are there."""
    return _MemoWriter(answer).write()


class _MemoWriter:
    def __init__(self, answer: Answer) -> None:
        self.answer, self.scenario = answer, answer.scenario
        self.best, self.chosen, self.performance = answer.best, answer.chosen, answer.performance
        self.changes = answer.changes or ()
        self.api, self.choice, self.growth = answer.api, answer.choice, answer.growth
        self.prefers_api = bool(self.api and self.api.is_api_cheaper)
        tightest = self.best and self.best.tightest
        self.target = tightest.target if tightest else None
        self.base = self.chosen.bill if self.chosen else None
        if self.api and self.prefers_api:
            self.base = self.api.api_usd
        self.options = list(self._list_options())[:MAX_OPTIONS]

    def write(self) -> Memo:
        answer, scenario, best = self.answer, self.scenario, self.best
        price = best and best.price
        chart, chart_title = self._draw_chart()
        ramp = self._list_ramp()
        return Memo(
            name=escape_to_one_line(scenario.name),
            date=f"{get_report_date():%-d %B %Y}",
            version=__version__,
            title=self._write_title(),
            question=escape_to_one_line(" ".join(scenario.question.split())),
            verdict=VERDICT_NAMES[answer.verdict],
            state=VERDICT_STATES[answer.verdict],
            deployment=self._describe_setup(),
            sentences=tuple(self._write_verdict()),
            tiles=tuple(self._list_tiles()),
            api=explain_api(answer),
            day=describe_day(answer),
            asked=tuple(self._describe_question()),
            period="the job" if scenario.offline else "a month",
            cost_name="Cost, always on" if answer.day else "Cost",
            latency_name=name_target(self.target) if self.target else "",
            options=tuple(option for _, option in self.options),
            capacity_note=self._explain_capacity() if self.options else "",
            risks=tuple(self._list_risks()),
            next_step=self._write_next_step(),
            finding=self._write_finding(),
            bars=tuple(self._list_bars()),
            confidence=format_probability(scenario.confidence),
            chart=chart,
            chart_title=chart_title,
            changes=tuple(self._list_changes()),
            sellers=self._list_sellers() if price and len(price.quotes) > 2 else (),
            median_usd=price.median_usd * self._gpu_hours if price else 0.0,
            ramp_heads=tuple(map(name_target, self._judged)),
            ramp=ramp,
            ramp_note=f"* {answer.benchmark_note}" if ramp and answer.benchmark_note else "",
            basis=tuple(self._describe_basis()),
        )

    @property
    def _gpu_hours(self) -> float:
        """GPU-hours of the best deployment in a month, or in the whole run."""
        if self.best is None:
            return 0.0
        hours = self.best.run_hours
        return self.best.num_gpus_billed * (hours.mid if hours else HOURS_PER_MONTH)

    @property
    def _period(self) -> str:
        return "for the job" if self.scenario.offline else "a month"

    def _for(self, usd: float | None) -> str:
        return "" if usd is None else f" for {format_usd(usd)} {self._period}"

    def _write_title(self) -> str:
        chosen = self.chosen
        if self.best is None:
            return "No plan is possible on the GPUs allowed"
        if chosen is None:
            limits = [f"{c.max_gpus} {_TIMES} {c.gpu.name}" for c in self.scenario.gpus]
            where = f" on {limits[0]}" if len(limits) == 1 else ""
            return f"No plan{where} meets the targets: change one of them, or allow more"
        if self.api and self.prefers_api:
            stopped = self.api.stopped_usd
            if stopped is not None and stopped <= self.api.api_usd:
                return (
                    f"Use the API{self._for(self.api.api_usd)}, or GPUs that stop without traffic"
                    f" for {format_usd(stopped)}"
                )
            if other := self.answer.cheaper_than_api:
                outside = explain_outside(self.scenario, other)
                return (
                    f"Use the API{self._for(self.api.api_usd)}, or {_count_gpus(other)}"
                    f"{f' ({outside})' * bool(outside)}{self._for(other.least_bill)}"
                )
            return f"Use the API{self._for(self.api.api_usd)} instead of GPUs of your own"
        condition = " only after a benchmark" if self.answer.verdict == "at_risk" else ""
        if hours := chosen.run_hours:
            usd = _format_usd(chosen.bill, "price not known")
            time = f"{format_number(hours.mid, 2)} hours"
            return f"Rent {_count_gpus(chosen)} for {time}, {usd} in all{condition}"
        always = " always on" if self.answer.day and chosen.bill else ""
        return f"Rent {_count_gpus(chosen)}{self._for(chosen.bill)}{always}{condition}"

    def _describe_setup(self) -> str:
        if self.best is None:
            return ""
        setup = f"{describe_offer(self.best)}, {describe_engine(self.best)}"
        return f"{setup}. {gloss_deployment(self.best)}".replace(" x ", f" {_TIMES} ")

    def _write_verdict(self) -> Iterator[str]:
        answer, chosen, scenario = self.answer, self.chosen, self.scenario
        if figure := explain_open_figure(answer):
            yield f"{capitalize(figure)}."
        if chosen is None:
            yield from self._explain_closest()
            return
        what = "The work is done in time" if scenario.offline else "Every target is met"
        asked = f"{scenario.confidence:.0%}"
        yield f"{what} with a probability of {format_odds(chosen)}; you asked for {asked}."
        if bills := list_other_bills(answer):
            yield f"{capitalize('; '.join(bills)).replace('`', '')}."
        if adapters := describe_adapters(answer):
            yield f"{adapters}."
        if answer.verdict == "at_risk" and (doubts := list_doubts(chosen, "at risk")):
            yield f"Risk: {self._say_in_words(_join(doubts))}."
        if self.api and self.prefers_api:
            yield "This is the plan for GPUs of your own, the second choice here."
            stopped = self.api.stopped_usd
            if stopped is not None and stopped < self.api.api_usd:
                yield (
                    f"It is the first, for {format_usd(stopped)} {self._period}, if they may stop in"
                    " hours without traffic."
                )

    def _explain_closest(self) -> Iterator[str]:
        if self.best is None:
            yield self.answer.binding.sentence
            return
        shortfall = self._say_in_words(explain_shortfall(self.best))
        yield f"The closest plan is {_count_gpus(self.best)}. It misses: {shortfall}."
        if adapters := describe_adapters(self.answer):
            yield f"{adapters}."
        if hint := explain_implausible_limits(self.scenario.slo_targets):
            yield f"{capitalize(hint)}."

    def _list_tiles(self) -> Iterator[Tile]:
        best, scenario = self.best, self.scenario
        if best is None or self.performance is None:
            return
        yield self._build_cost_tile(best)
        if best.usd_per_mtok:
            when = "over the day, always on" if scenario.daily_profile else "at the planned load"
            name = f"Per million {best.priced_side} tokens"
            yield Tile(name, format_usd(best.usd_per_mtok.mid), "", when)
        if hours := best.run_hours:
            note = f"of {format_number(scenario.deadline_hours or 0.0)} h allowed"
            yield Tile("Time for the job", format_number(hours.mid, 2), "h", note)
        elif self.chosen and (growth := self.growth):
            yield Tile("Room to grow", *format_growth(growth), describe_growth_end(growth))
        elif users := scenario.workload.concurrency:
            served = format_number(best.offered_rps)
            yield Tile("Served", served, "requests/s", f"at {users:,} concurrent requests")
        note = "that it is done in time" if scenario.offline else "that all targets are met"
        note += "" if self.chosen else " by it"
        yield Tile("Probability", format_odds(best), "", note)

    def _build_cost_tile(self, best: Offer) -> Tile:
        whose = "Cost" if self.chosen else "Cost of the nearest plan"
        if self.prefers_api:
            whose = "Cost of own GPUs"
        if best.bill is None or best.usd_per_hour is None:
            return Tile(whose, EN_DASH, "", f"no price known for {best.gpu}")
        note = f"{format_usd(best.usd_per_hour.mid)} an hour"
        if self.answer.day:
            note += ", always on"
        return Tile(whose, format_usd(best.bill), self._period, note)

    def _describe_question(self) -> Iterator[tuple[str, str]]:
        scenario, load = self.scenario, self.scenario.workload
        lengths = (
            f"prompts of {load.prompt.mean:,.0f} and answers of {load.output.mean:,.0f} tokens on"
            " average"
        )
        traffic = (
            f"{load.concurrency or 0:,} concurrent requests, each followed at once by the next"
        )
        if hours := scenario.deadline_hours:
            traffic = f"{load.num_prompts:,} requests within {format_number(hours)} hours"
        elif load.rate:
            busiest = " in the busiest hour" if scenario.daily_profile else ""
            traffic = f"{format_number(load.rate)} requests/s{busiest}"
        model = escape_to_one_line(scenario.model.rpartition("/")[2])
        volume = f"{scenario.volume}, " if scenario.volume else ""
        adapters = describe_adapter_traffic(scenario)
        yield "Traffic", f"{model}: {volume}{traffic}; {lengths}{adapters}."
        targets = [
            f"{name_target(target)} within {format_limit_seconds(target.seconds)}"
            for target in scenario.slo_targets
        ]
        room = f" {scenario.headroom:.0%} of the capacity stays free." if scenario.headroom else ""
        meaning = " (p95: for 95 of 100 requests)" if "p95" in _join(targets) else ""
        yield "Targets", f"{capitalize(_join(targets) or 'all done in time')}{meaning}.{room}"
        gpus = ", ".join(f"{each.max_gpus} {_TIMES} {each.gpu.name}" for each in scenario.gpus)
        yield "Allowed", f"Up to {gpus}."

    def _list_options(self) -> Iterator[tuple[Offer | None, Option]]:
        """List the recommendation and what stands beside it; if nothing meets, the ways out."""
        index = iter("ABCDEFGH")
        if self.chosen is None:
            yield from self._list_ways_out(index)
            return
        if self.api and self.prefers_api:
            yield None, self._describe_api(f"{next(index)} · recommended")
        role = "own GPUs" if self.prefers_api else "recommended"
        least = f"{self.scenario.confidence:.0%}" if self.answer.verdict == "holds" else "50%"
        price = "lowest price by the hour" if self.chosen.billed_fraction < 1 else "lowest price"
        reason = f"{price} with a probability of {least} or more"
        shown = [self.chosen]
        yield (
            self.chosen,
            self._describe_option(
                f"{next(index)} · {role}", self.chosen, reason, _describe_miss(self.chosen)
            ),
        )
        benchmark = self.answer.benchmark
        for role, offer in self._list_others():
            is_measured = benchmark is not None and offer is benchmark.offer
            is_new = all(describe_gpus(offer) != describe_gpus(each) for each in shown)
            if is_new or (is_measured and all(offer is not each for each in shown)):
                shown.append(offer)
                pro, con = self._weigh(role, offer)
                yield offer, self._describe_option(f"{next(index)} · {role}", offer, pro, con)

    def _list_others(self) -> Iterator[tuple[str, Offer]]:
        """List what stands beside the recommendation by role; first what is to be measured."""
        answer, choice, benchmark = self.answer, self.choice, self.answer.benchmark
        if benchmark and not benchmark.is_own:
            yield self._find_role(benchmark.offer), benchmark.offer
        if answer.safer:
            yield "safer", answer.safer
        if answer.cheaper:
            yield "cheaper", answer.cheaper
        for change in self.changes:
            if change.offer and change.is_other_gpu:
                yield "another GPU", change.offer
        likeliest = choice.likeliest_cheaper if choice else None
        if not answer.cheaper and likeliest and likeliest.status != "missed":
            yield "cheaper", likeliest
        for offer in answer.candidates:
            if offer.meets:
                yield "next best", offer

    def _find_role(self, offer: Offer) -> str:
        assert self.chosen is not None
        return "cheaper" if offer.price_key < self.chosen.price_key else "next best"

    def _weigh(self, role: str, offer: Offer) -> tuple[str, str]:
        """Say what is for an option, and what against it."""
        cost, miss = self._compare_cost(offer), _describe_miss(offer)
        if self.prefers_api and self.chosen and self.chosen.bill and offer.bill:
            more = offer.bill - self.chosen.bill
            side = "more" if more > 0 else "less"
            cost = f"{format_usd(abs(more))} {self._period} {side} than B"
        if role == "safer":
            return f"only {miss}", cost
        if role == "next best":
            is_likelier = self.chosen is not None and offer.probability > self.chosen.probability
            return (f"only {miss}", cost) if is_likelier else ("", f"{cost}, {miss}")
        if role == "cheaper":
            return cost, miss
        is_dearer = offer.bill and self.base and offer.bill > 1.005 * self.base
        arguments = [(cost, not is_dearer), (explain_outside(self.scenario, offer), False)]
        if offer.performance:
            label = BASIS_LABELS[offer.basis].split(":")[0]
            arguments.append((f"speed {label}", offer.basis.startswith("measured")))
        pro, con = (
            ", ".join(text for text, is_for in arguments if is_for == side and text)
            for side in (True, False)
        )
        return pro, con

    def _list_ways_out(self, index: Iterator[str]) -> Iterator[tuple[Offer | None, Option]]:
        """List the plans that one change allows, best first."""
        ways = [(each, each.offer) for each in self.changes if each.offer]
        found, slots = self.answer.ways_out, self.answer.adapter_slots
        if found and slots and found.change and (offer := found.change.offer):
            count = offer.deployment.args.max_loras
            if count != slots.count:  # a way out of the answer alone, in which slots are free
                name = f"{found.change.change}, max_loras {count} in place of {slots.count}"
                ways.append((replace(found.change, change=name), offer))
        for change, offer in sorted(ways, key=lambda way: way[1].rank):
            title = f"{next(index)} · {self._say_in_words(change.change)}"
            outside = explain_outside(self.scenario, offer)
            con = "" if outside in title else capitalize(outside)
            yield offer, self._describe_option(title, offer, "", con)

    def _describe_api(self, title: str) -> Option:
        entry, api = self.scenario.billing_alternatives.api, self.api
        assert entry is not None and api is not None
        price = (
            f"${entry.usd_per_mtok_input:.2f} per M tokens in, ${entry.usd_per_mtok_output:.2f} out"
        )
        return Option(
            title, "API by the token", format_usd(api.api_usd), "", "not predicted", "", EN_DASH, EN_DASH,
            f"no servers; {price}", "speed and limits are the provider's",
        )  # fmt: skip

    def _explain_capacity(self) -> str:
        if self.scenario.offline:
            return ""
        text = f"In brackets: 4 of 5 cases. {CAPACITY_MEANING}."
        if self.chosen and self.growth:
            room = _uncapitalize(explain_confident_load(self.growth))
            text = f"In brackets: 4 of 5 cases. Option {self._letter(self.chosen)}: {room}"
            text = f"{text} {explain_surge(self.answer)}".rstrip()
        slots = explain_slots_in_capacity(self.answer)
        text += f" With LoRA adapters that is {slots}." if slots else ""
        others = list(self._explain_other_gpus())[:MAX_OPTIONS]
        return f"{text} Allowed, but no option here: {'; '.join(others)}." if others else text

    def _explain_other_gpus(self) -> Iterator[str]:
        """Explain of each kind of GPU that is allowed and not among the options what its best would do."""
        answer, shown = self.answer, {offer.gpu for offer, _ in self.options if offer}
        reasons = {each.option: each for each in answer.alternatives or ()}
        nearest = {offer.gpu: offer for offer in reversed(answer.candidates)}
        for name in (each.gpu.name for each in self.scenario.gpus if self.chosen):
            if name in shown:
                continue
            if name in reasons:
                yield f"{name} ({explain_alternative(answer, reasons[name])})"
            elif offer := nearest.get(name):
                usd = _format_usd(offer.bill, "price not known")
                yield f"{describe_gpus(offer)} ({usd}, {_uncapitalize(_judge(offer))})"
            else:
                yield f"{name} (the best dozen plans use none)"

    def _letter(self, offer: Offer) -> str:
        """Name an option that is shown by its letter, else by its GPUs."""
        titles = [option.title for shown, option in self.options if shown is offer]
        return titles[0].partition(" ")[0] if titles else _count_gpus(offer)

    def _get_bills(self, offer: Offer) -> tuple[float | None, float | None]:
        """Return the bills of an offer and of the first option, by the hour where both have one."""
        chosen = self.chosen
        if self.prefers_api and len(offer.bills) > 1:  # as the API is compared with
            return offer.bills[1].usd, self.base
        if chosen and not self.prefers_api and min(len(offer.bills), len(chosen.bills)) > 1:
            return offer.bills[1].usd, chosen.bills[1].usd
        return offer.bill, self.base

    def _compare_cost(self, offer: Offer) -> str:
        usd, base = self._get_bills(offer)
        if usd is None or base is None:
            return "another price"
        if is_same_price(usd, base):
            return "the same price"
        return f"{format_usd(abs(usd - base))} {self._period} {'more' if usd > base else 'less'}"

    def _describe_option(self, title: str, offer: Offer, pro: str, con: str) -> Option:
        latency, served = EN_DASH, offer.capacity_rps
        if self.target and offer.performance:
            value = offer.performance.get_for_display(self.target.metric, self.target.percentile)
            latency = _format_interval(value, self.target.seconds)
        is_first = offer is self.chosen and not self.prefers_api
        change = "" if is_first else _format_change(*self._get_bills(offer))
        cost = _format_usd(offer.bill) + format_day_bill(offer) * (self.answer.day is not None)
        return Option(
            title, _count_gpus(offer), cost, change, _judge(offer), offer.status, latency,
            f"{format_number(served.mid)} requests/s" if served else EN_DASH, pro, con,
        )  # fmt: skip

    def _list_risks(self) -> Iterator[tuple[str, str, str]]:
        for risk in self.answer.risks if self.chosen else ():
            name, size, settle = describe_risk(risk)
            yield capitalize(name), capitalize(self._say_in_words(size)), capitalize(settle)

    def _write_next_step(self) -> str:
        if self.chosen is None:
            if not self.changes:
                return "Allow other GPUs, more of them, or higher latency limits, and plan again."
            return "Decide which of the ways out you accept; then set it in the scenario and plan again."
        if self.prefers_api:
            return (
                "Send a day of your own requests to the API: check speed, rate limits and terms."
                " If they suit, sign A. If not, take B."
            )
        if self.scenario.offline:
            return (
                "Run a tenth of the requests on A. If it is as fast as page 2 predicts, run the rest."
                " If not, plan again with the measured speed."
            )
        benchmark = self.answer.benchmark
        if benchmark and not benchmark.is_own:
            return self._plan_other_benchmark(benchmark)
        return self._plan_own_benchmark(self.chosen, benchmark)

    def _plan_other_benchmark(self, benchmark: Benchmark) -> str:
        """Say which other option to rent for a day, and what its result decides."""
        assert self.chosen is not None
        offer = benchmark.offer
        extent = f"the GPUs of {self._letter(offer)}"
        if offer.num_replicas > 1 and not offer.is_disaggregated:
            extent = f"one replica of {self._letter(offer)} ({describe_replica_gpus(offer)})"
        price = _describe_day_price(offer.replica_usd_per_day)
        start = f"Rent {extent} for a day{price} and run the scripts in `measure/`."
        if offer.price_key >= self.chosen.price_key:
            share = _describe_value_of(benchmark)
            return f"{start} Plan again with the result, then sign.{share}"
        name, own = self._letter(offer), self._letter(self.chosen)
        return (
            f"{start} {name} is {format_odds(offer)} likely to meet every target, {own}"
            f" {format_odds(self.chosen)}: if the run shows that {name} does, keep it, as it costs"
            f" less. If not, plan again with the result; until then {own} is the safer choice."
        )

    def _plan_own_benchmark(self, chosen: Offer, benchmark: Benchmark | None) -> str:
        """Say how to benchmark the recommendation, and what its result decides."""
        usd = chosen.replica_usd_per_day
        is_one = chosen.num_replicas > 1 and not chosen.is_disaggregated
        extent = "one replica of A" if is_one else "the GPUs of A"
        scripts = benchmark.scripts if benchmark and benchmark.scripts else OWN_SCRIPTS
        run = ", then ".join(f"`{name}`" for name in scripts)
        start = f"Rent {extent} for a day{_describe_day_price(usd)} and run {run}."
        share = _describe_value_of(benchmark) if benchmark else ""
        if self.choice and benchmark and self.choice.is_cheaper_likely:
            return f"{start} Plan again with the result, then sign: a cheaper plan may be enough; {BUDGET_RULE}.{share}"
        if self.target is None:
            return f"{start} If it is as fast as page 2 predicts, sign A."
        safer = self.answer.safer
        other = f"take {self._letter(safer)}" if safer else "plan again with the result"
        limit = format_limit_seconds(self.target.seconds)
        name = capitalize(name_target(self.target))
        return f"{start} {name} within {limit}: sign A. Longer: {other}.{share}"

    def _list_bars(self) -> Iterator[Bar]:
        planned = 1 - self.scenario.headroom
        for limit in self.best.limits if self.best else ():
            shares = (min(end, MAX_SHARE) for end in (limit.use.lo, limit.use.mid, limit.use.hi))
            name, bound = name_limit(limit, self.scenario), format_bound(limit)
            mid, worst = format_amount(limit), format_pessimistic(limit)
            if limit.target:
                name = capitalize(name_target(limit.target))
            elif limit.is_load:
                name, bound = "Load (of capacity)", f"{planned:.0%}"
                mid, worst = (
                    f"{planned * use:.{int(abs(use - 1) < 0.005)}%}"
                    for use in (limit.use.mid, limit.pessimistic_use)
                )
            yield Bar(name, mid, worst, bound, limit.status, *shares)

    def _write_finding(self) -> str:
        bars = list(self._list_bars())
        if not bars:
            return "Why no plan is possible" if self.best is None else "What the plan rests on"
        missed, risky = (
            _join([_uncapitalize(bar.name) for bar in bars if bar.state == state])
            for state in ("missed", "at risk")
        )
        if missed:
            return f"Missed by the closest plan: {missed}"
        if risky:
            return f"At risk: {risky}; all other targets are met"
        if self.target is None:
            return "The work is done in time"
        return f"Every target is met; nearest to its limit: {name_target(self.target)}"

    def _draw_chart(self) -> tuple[str, str]:
        """Draw the tightest target over the load, as SVG, with its title."""
        curve = self.answer.curve
        if curve is None:
            return "", ""
        axis, limit = curve.axis.lower(), curve.target.seconds
        chart = plot_load_curve(curve.points, axis, curve.here, curve.own, limit)
        unit = "ms" if limit < 1 else "s"
        return render_svg(chart), f"{name_target(curve.target)}, {unit}, by {axis}"

    def _list_changes(self) -> Iterator[tuple[str, str, str, str, str, State]]:
        rows = list(self._join_relaxations())
        first = sorted(rows, key=lambda row: self._is_own(row[1]) or not row[1])[:MAX_CHANGES]
        base = self.chosen.bill if self.chosen else None
        for name, offer, verdict in (row for row in rows if row in first):
            if offer is None:
                yield name, "no plan", EN_DASH, EN_DASH, verdict, "missed"
                continue
            cost = _format_usd(offer.bill), _format_change(offer.bill, base) or EN_DASH
            yield name, self._name_other(offer), *cost, verdict, offer.status

    def _is_own(self, offer: Offer | None) -> bool:
        """Whether an offer is the plan's own deployment."""
        return bool(offer and self.chosen and offer.description == self.chosen.description)

    def _join_relaxations(self) -> Iterator[tuple[str, Offer | None, str]]:
        """Yield change, plan and verdict; limits that change nothing when relaxed are one row."""
        relaxed = {
            change.change: (name_target(target), change.offer)
            for target in self.scenario.slo_targets
            for change in self.changes
            if change.offer and change.change.startswith(f"limit of {target.name} relaxed")
            if self._is_own(change.offer)
        }
        least = min(
            (offer for _, offer in relaxed.values()), key=lambda o: o.probability, default=None
        )
        for change in self.changes:
            if least is None or len(relaxed) < 2 or change.change not in relaxed:
                verdict = _judge(change.offer) if change.offer else "No plan meets the targets"
                yield capitalize(self._say_in_words(change.change)), change.offer, verdict
            elif change.change == next(iter(relaxed)):
                names = ", ".join(
                    f"{name} {text.rpartition(' to ')[2]}" for text, (name, _) in relaxed.items()
                )
                yield f"Any one limit longer: {names}", least, f"{_judge(least)} or more"

    def _name_other(self, offer: Offer) -> str:
        """Name the GPUs of another answer, and its weights where they are others than the plan's."""
        own, weights = self.chosen, describe_weights(offer)
        is_same = own is not None and describe_weights(own) == weights
        return _count_gpus(offer) if is_same else f"{_count_gpus(offer)}, {weights}"

    def _say_in_words(self, change: str) -> str:
        for target in self.scenario.slo_targets:
            change = change.replace(target.name, name_target(target))
        return change

    def _list_sellers(self) -> tuple[tuple[str, float, bool], ...]:
        assert self.best is not None and self.best.price is not None
        cheapest: dict[str, float] = {}
        for quote in sorted(self.best.price.quotes, key=lambda quote: quote.usd):
            cheapest.setdefault(quote.seller, quote.usd * self._gpu_hours)
        sellers, prices = zip(*cheapest.items(), strict=True)
        last = len(prices) - 1
        named: list[int] = []
        for k in (0, last, *range(1, last)):
            gap = min((abs(prices[k] - prices[other]) for other in named), default=math.inf)
            if gap > MIN_LABEL_DISTANCE * prices[-1]:
                named.append(k)
        return tuple((sellers[k], prices[k], k in named) for k in range(last + 1))

    @property
    def _judged(self) -> tuple[SloTarget, ...]:
        return list_benchmark_targets(self.scenario.slo_targets)

    def _list_ramp(self) -> tuple[tuple[str, ...], ...]:
        chosen, steps = self.chosen, self.answer.ramp
        if chosen is None or steps is None:
            return ()
        rows = [(format_number(rate), *self._list_step(found)) for rate, found in steps.items()]
        if self.performance and not self.scenario.offline:
            found, load = self.performance, chosen.prediction.workload
            replicas = 1 if chosen.is_disaggregated else chosen.deployment.layout.replicas
            rate = ((load and load.rate) or found.request_tps.mid) / replicas
            *latencies, _ = self._list_step(found)
            tokens = format_number(found.output_tps.mid / replicas, 2)
            mark = "*" * bool(self.answer.benchmark_note)
            rows.append((f"{format_number(rate)}, your traffic{mark}", *latencies, tokens))
        return tuple(rows)

    def _list_step(self, found: Performance) -> Iterator[str]:
        """List the latencies that a benchmark is judged by, and the output tokens/s."""
        for target in self._judged:
            value = found.get_for_display(target.metric, target.percentile)
            yield "overloaded" if found.saturated else _format_interval(value, target.seconds)
        yield format_number(found.output_tps.mid, 2)

    def _describe_basis(self) -> Iterator[tuple[str, str]]:
        scenario, performance, left_out = self.scenario, self.performance, self.answer.left_out
        if performance:
            replayed = "Analytical estimate, not simulated"
            if requests := performance.num_simulated_requests:
                replayed = f"{requests:,} requests simulated with the engine's scheduler"
            run = describe_nearest_run(self.best) if self.best else ""
            basis = BASIS_LABELS[self.best.basis] if self.best else ""
            nearest = f"Of single runs this one weighs most: {run}. " if run else ""
            yield (
                "Method",
                f"{replayed}. Step times are {basis}. {nearest}80% intervals:"
                " 4 of 5 measured systems fall inside.",
            )
        if left_out:
            yield "Left out", f"{capitalize(escape_to_one_line('; '.join(left_out)))}."
        if scenario.assumptions:
            yield "Assumed", escape_to_one_line(" ".join(scenario.assumptions))
        yield (
            "Not covered",
            "Network and gateway in front of the servers, traffic other than stated, and the quality"
            " of the model's answers.",
        )


def _count_gpus(offer: Offer) -> str:
    """Name how many GPUs of a kind, and the replicas where there are several."""
    replicas = offer.num_replicas
    is_group = 1 < replicas < offer.num_gpus_billed and not offer.is_disaggregated
    return f"{describe_gpus(offer)}, {replicas} replicas" if is_group else describe_gpus(offer)


def _judge(offer: Offer) -> str:
    words = {"met": "Meets targets", "at risk": "At risk", "missed": "Misses targets"}
    estimated = " (estimated)" * (not offer.is_simulated)
    return f"{words[offer.status]}, {format_odds(offer)}{estimated}"


def _describe_miss(offer: Offer) -> str:
    return f"{format_probability(1 - offer.probability)} risk that a target is missed"


def _describe_value_of(benchmark: Benchmark) -> str:
    share = format_probability(benchmark.changes_choice)
    return f" The result changes the choice in {share} of cases."


def _describe_day_price(usd: float | None) -> str:
    return "" if usd is None else f" ({format_usd(usd)})"


def _format_change(usd: float | None, base: float | None) -> str:
    if not usd or not base:
        return ""
    if is_same_price(usd, base):
        return "same"
    return f"{usd / base - 1:+.0%}".replace("-", "\N{MINUS SIGN}")


def _join(parts: Sequence[str]) -> str:
    return "; ".join(parts)


def _uncapitalize(text: str) -> str:
    return text[:1].lower() + text[1:]


def _format_usd(usd: float | None, unknown: str = EN_DASH) -> str:
    return unknown if usd is None else format_usd(usd)


def _format_interval(value: Interval, limit: float = math.inf) -> str:
    return EN_DASH if math.isnan(value.mid) else format_seconds_range(value, limit, EN_DASH)


_STATE_COLORS = {**SLO_STATUS_COLORS, "": MUTED_COLOR}


def _render_html(memo: Memo) -> str:
    """Render page 1 for a notebook."""
    return render_template(
        "ui",
        "memo.html",
        memo=memo,
        color=_STATE_COLORS[memo.state],
        escape=lambda text: Markup(escape_html(text)),
    )
