"""The decision memo: the first two pages of a report, and the head of the summary notebook.

Plain words for a reader who signs: what to rent, what it costs, how likely it meets the targets, what
else there is. The facts are those of `plan.json`; `MEMO_MIME_TYPE` carries them to the report.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

from planner import __version__
from planner.analysis.load_curves import get_load, sweep_stated_latency
from planner.analysis.phrases import CALIBRATION_BASIS_LABELS, METRIC_NAMES, VERDICT_NAMES
from planner.analysis.plan_risks import CAPACITY_MEANING, find_growth_limit, list_largest_risks
from planner.analysis.plan_summary import describe_day
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
from planner.core.text import escape_to_one_line
from planner.deploy import explain_benchmark_lengths, predict_benchmark_ramp
from planner.hardware.prices import HOURS_PER_MONTH, look_up_gpu_price
from planner.latency.performance import Performance
from planner.planning.billing import BILLING_AUTOSCALED, price_tokens
from planner.planning.candidate import Candidate
from planner.planning.confidence import ChoiceConfidence, estimate_choice_confidence
from planner.planning.evaluation import (
    compute_offered_rps,
    estimate_run_hours,
    get_capacity_rps,
)
from planner.planning.search import Plan
from planner.planning.slo import (
    LimitStatus,
    SloTarget,
    explain_implausible_limits,
    list_benchmark_targets,
)
from planner.planning.what_if import WhatIf
from planner.ui.charts.base import MUTED_COLOR, render_svg
from planner.ui.charts.summary import SLO_STATUS_COLORS, plot_load_curve
from planner.ui.limit_rows import find_tightest_target, list_limit_rows
from planner.ui.notebook_widgets import escape_html
from planner.ui.plan_words import (
    compute_bill,
    describe_adapters,
    describe_candidate,
    describe_engine,
    explain_not_allowed,
    find_cheaper_gamble,
    format_odds,
    is_same_price,
)

MEMO_MIME_TYPE = "application/vnd.headroom.memo+json"
_TIMES = "\N{MULTIPLICATION SIGN}"
VERDICT_STATES: Mapping[str, LimitStatus] = {
    "holds": "met", "at_risk": "at risk", "nothing_meets": "missed",
}  # fmt: skip
MAX_OPTIONS, MAX_CHANGES = 3, 7
MIN_LABEL_DISTANCE = 0.11
"""Least distance of two named sellers, as a share of the dearest price."""
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


def build_memo(plan: Plan, changes: Sequence[WhatIf] = (), left_out: str = "") -> Memo:
    """Build the memo of `plan`; `changes` are its what-ifs, and `left_out` says which are missing."""
    return _MemoWriter(plan, tuple(changes), left_out).write()


class _MemoWriter:
    def __init__(self, plan: Plan, changes: tuple[WhatIf, ...], left_out: str = "") -> None:
        self.plan, self.scenario, self.changes = plan, plan.scenario, changes
        self.left_out = [*plan.left_out, *([left_out] if left_out else [])]
        self.best, self.chosen, self.performance = plan.best, plan.chosen, plan.performance
        self.api = plan.api_comparison
        self.confidence: ChoiceConfidence | None = estimate_choice_confidence(plan)
        self.target = find_tightest_target(plan)
        self.growth = find_growth_limit(plan)

    def write(self) -> Memo:
        plan, scenario, best = self.plan, self.scenario, self.best
        price = best and look_up_gpu_price(best.deployment.gpu, scenario.prices)
        sellers = self._list_sellers() if best and price and len(price.quotes) > 2 else ()
        chart, chart_title = self._draw_chart()
        return Memo(
            name=escape_to_one_line(scenario.name),
            date=f"{get_report_date():%-d %B %Y}",
            version=__version__,
            title=self._write_title(),
            question=escape_to_one_line(" ".join(scenario.question.split())),
            verdict=VERDICT_NAMES[plan.verdict],
            state=VERDICT_STATES[plan.verdict],
            deployment=self._describe_setup(),
            sentences=tuple(self._write_verdict()),
            tiles=tuple(self._list_tiles()),
            api=f"{_capitalize(self.api.sentence)}." if self.api else "",
            day=describe_day(plan),
            asked=tuple(self._describe_question()),
            period="the job" if scenario.offline else "a month",
            cost_name="Cost, always on" if self._is_scaled else "Cost",
            latency_name=_name_target(self.target) if self.target else "",
            options=(options := tuple(islice(self._list_options(), MAX_OPTIONS))),
            capacity_note=self._explain_capacity() if options else "",
            risks=tuple(self._list_risks()),
            next_step=self._write_next_step(),
            finding=self._write_finding(),
            bars=tuple(self._list_bars()),
            confidence=format_probability(scenario.confidence),
            chart=chart,
            chart_title=chart_title,
            changes=tuple(self._list_changes()),
            sellers=sellers,
            median_usd=price.median_usd * self._gpu_hours if price else 0.0,
            ramp_heads=tuple(map(_name_target, self._judged)),
            ramp=(ramp := self._list_ramp()),
            ramp_note=explain_benchmark_lengths(self.chosen.prediction)
            if ramp and self.chosen
            else "",
            basis=tuple(self._describe_basis()),
        )

    @property
    def _gpu_hours(self) -> float:
        """GPU-hours of the best candidate in a month, or in the whole run."""
        if self.best is None:
            return 0.0
        hours = estimate_run_hours(self.scenario, self.best)
        return self.best.prediction.num_gpus_billed * (hours.mid if hours else HOURS_PER_MONTH)

    def _write_title(self) -> str:
        if self.best is None:
            return "No plan is possible on the GPUs allowed"
        if self.chosen is None:
            limits = [f"{c.max_gpus} {_TIMES} {c.gpu.name}" for c in self.scenario.gpus]
            where = f" on {limits[0]}" if len(limits) == 1 else ""
            return f"No plan{where} meets the targets: change one of them, or allow more"
        if self.api and self.api.is_api_cheaper:
            return f"Use the API{self._for(self.api.api_usd)} instead of GPUs of your own"
        condition = " only after a benchmark" if self.chosen.at_risk else ""
        if hours := estimate_run_hours(self.scenario, self.chosen):
            usd = format_usd(self._bill) if self._bill else "price not known"
            return f"Rent {_count_gpus(self.chosen)} for {format_number(hours.mid, 2)} hours, {usd} in all{condition}"
        amount = "up to " * self._is_scaled + _count_gpus(self.chosen)
        return f"Rent {amount}{self._for(self._bill)}{condition}"

    def _price(self, candidate: Candidate) -> float | None:
        return compute_bill(self.scenario, candidate)

    @property
    def _bill(self) -> float | None:
        """What the plan costs: its price, or less if GPUs follow the hours of a day."""
        billing = self.plan.billing
        if billing and BILLING_AUTOSCALED in billing.usd:
            return billing.usd[BILLING_AUTOSCALED] * HOURS_PER_MONTH / 24
        return self._price(self.best) if self.best else None

    @property
    def _is_scaled(self) -> bool:
        price = self._price(self.best) if self.best else None
        return bool(price and self._bill and self._bill < 0.995 * price)

    @property
    def _period(self) -> str:
        return "for the job" if self.scenario.offline else "a month"

    def _for(self, usd: float | None) -> str:
        return "" if usd is None else f" for {format_usd(usd)} {self._period}"

    def _describe_setup(self) -> str:
        if self.best is None:
            return ""
        setup = f"{describe_candidate(self.best)}, {describe_engine(self.best)}"
        return setup.replace(" x ", f" {_TIMES} ")

    def _write_verdict(self) -> Iterator[str]:
        plan, chosen, scenario = self.plan, self.chosen, self.scenario
        if plan.load_sentence:
            yield _capitalize(plan.load_sentence) + "."
        if chosen is None:
            if self.best is None:
                yield str(plan.binding_constraint)
                return
            doubts = list(self._list_doubts("missed")) or self.best.violations
            yield f"The closest plan is {_count_gpus(self.best)}. It misses: {_join(doubts)}."
            if hint := explain_implausible_limits(scenario.slo_targets):
                yield f"{_capitalize(hint)}."
            return
        asked = f"{scenario.confidence:.0%}"
        what = "The work is done in time" if scenario.offline else "Every target is met"
        yield f"{what} with a probability of {format_odds(chosen)}; you asked for {asked}."
        if adapters := describe_adapters(scenario, chosen):
            yield f"{adapters}."
        if chosen.at_risk and (doubts := list(self._list_doubts("at risk"))):
            yield f"Risk: {_join(doubts)}."
        if self.api and self.api.is_api_cheaper:
            yield "This is the plan for GPUs of your own, the second choice here."
            stopped = self.api.stopped_usd
            if stopped is not None and stopped < self.api.api_usd:
                yield (
                    f"It is the first, for {format_usd(stopped)} {self._period}, if they may stop in"
                    " hours without traffic."
                )

    def _list_doubts(self, state: State) -> Iterator[str]:
        """Say of each target in `state` what it reaches, and its limit."""
        for bar in self._list_bars():
            if bar.state == state:
                name = _uncapitalize(bar.name)
                reached = f"may reach {bar.worst}" if state == "at risk" else f"is {bar.value}"
                yield f"{name} {reached}, the limit is {bar.limit}"

    def _list_tiles(self) -> Iterator[Tile]:
        best, scenario, performance = self.best, self.scenario, self.performance
        if best is None or performance is None:
            return
        usd, hours, price = best.usd_per_hour, estimate_run_hours(scenario, best), self._bill
        whose = "Cost" if self.chosen else "Cost of the nearest plan"
        if self.api and self.api.is_api_cheaper:
            whose = "Cost of own GPUs"
        if usd is None or price is None:
            yield Tile(whose, EN_DASH, "", f"no price known for {best.deployment.gpu.name}")
        else:
            rate = f"{format_usd(usd)} an hour"
            if self._is_scaled:
                rate = f"scaled by the hour; at most {_format_usd(self._price(best))}"
            yield Tile(whose, format_usd(price), self._period, rate)
        always_on = self._price(best)
        if (tokens := price_tokens(scenario, best)) and price and always_on:
            per_token, side = tokens
            when = "over the day" if scenario.daily_profile else "at the planned load"
            shown = format_usd(per_token.mid * price / always_on)
            yield Tile(f"Per million {side} tokens", shown, "", when)
        if hours:
            total = scenario.workload.num_prompts or 0
            within = total / (scenario.workload.rate or 1.0) / 3600
            yield Tile(
                "Time for the job",
                format_number(hours.mid, 2),
                "h",
                f"of {format_number(within)} h allowed",
            )
        elif self.chosen and (growth := self.growth):
            yield Tile("Room to grow", *growth.format_value(), growth.describe_end())
        elif users := scenario.workload.concurrency:
            served = format_number(compute_offered_rps(scenario, best.prediction))
            yield Tile("Served", served, "requests/s", f"at {users:,} concurrent requests")
        note = "that it is done in time" if scenario.offline else "that all targets are met"
        note += "" if self.chosen else " by it"
        yield Tile("Probability", format_odds(best), "", note)

    def _describe_question(self) -> Iterator[tuple[str, str]]:
        scenario, load = self.scenario, self.scenario.workload
        lengths = (
            f"prompts of {load.prompt.mean:,.0f} and answers of {load.output.mean:,.0f} tokens on"
            " average"
        )
        if scenario.offline and load.num_prompts and load.rate:
            hours = load.num_prompts / load.rate / 3600
            traffic = f"{load.num_prompts:,} requests within {format_number(hours)} hours"
        elif load.rate:
            traffic = f"{format_number(load.rate)} requests/s" + " in the busiest hour" * bool(
                scenario.daily_profile
            )
        else:
            traffic = f"{load.concurrency:,} concurrent requests, each followed at once by the next"
        model = escape_to_one_line(scenario.model.rpartition("/")[2])
        volume = f"{scenario.volume}, " if scenario.volume else ""
        yield "Traffic", f"{model}: {volume}{traffic}; {lengths}."
        targets = [
            f"{_name_target(target)} within {format_limit_seconds(target.seconds)}"
            for target in scenario.slo_targets
        ]
        room = f" {scenario.headroom:.0%} of the capacity stays free." if scenario.headroom else ""
        meaning = " (p95: for 95 of 100 requests)" if "p95" in _join(targets) else ""
        yield "Targets", f"{_capitalize(_join(targets) or 'all done in time')}{meaning}.{room}"
        gpus = ", ".join(f"{each.max_gpus} {_TIMES} {each.gpu.name}" for each in scenario.gpus)
        yield "Allowed", f"Up to {gpus}."

    def _list_options(self) -> Iterator[Option]:
        """The recommendation, then what costs less or is safer; if nothing meets, the ways out."""
        first, index = self.chosen, iter("ABCDEFGH")
        if first is None:
            ways = [(each, each.plan.chosen) for each in self.changes if each.plan.chosen]
            for change, way in sorted(ways, key=lambda each: each[1].rank_key):
                title = f"{next(index)} · {self._say_in_words(change.change)}"
                outside = explain_not_allowed(self.scenario, way)
                outside = "" if outside in title else _capitalize(outside)
                yield self._describe_option(title, way, None, "", outside)
            return
        base = self._price(first)
        if self.api and self.api.is_api_cheaper:
            base, api = self.api.api_usd, self.scenario.billing_alternatives.api
            assert api is not None
            price = (
                f"${api.usd_per_mtok_input:.2f} per M tokens in, ${api.usd_per_mtok_output:.2f} out"
            )
            yield Option(
                f"{next(index)} · recommended", "API by the token", format_usd(base), "",
                "not predicted", "", EN_DASH, EN_DASH, f"no servers; {price}",
                "speed and limits are the provider's",
            )  # fmt: skip
        against = _describe_miss(first)
        yield self._describe_option(
            f"{next(index)} · {'recommended' if not (self.api and self.api.is_api_cheaper) else 'own GPUs'}",
            first, base,
            f"lowest price with a probability of {self.scenario.confidence:.0%} or more"
            if not first.at_risk else "lowest price with a probability of 50% or more",
            against,
        )  # fmt: skip
        gamble = find_cheaper_gamble(self.plan)
        if safe := self.plan.safer:
            yield self._describe_option(
                f"{next(index)} · safer", safe, base, f"only {_describe_miss(safe)}",
                self._compare_cost(safe, base),
            )  # fmt: skip
        if gamble:
            yield self._describe_cheaper(next(index), gamble, base)
        for change in self.changes:
            found = change.plan.chosen
            if found and found.deployment.gpu not in {each.gpu for each in self.scenario.gpus}:
                yield self._describe_other_gpu(next(index), found, base)
        if not gamble and self.confidence and (hoped := self.confidence.likeliest_cheaper):
            yield self._describe_cheaper(next(index), hoped, base)
        shown = {_count_gpus(each) for each in self.plan.options.values()}
        for other in self.plan.candidates:
            if other.is_feasible and _count_gpus(other) not in shown:
                shown.add(_count_gpus(other))
                yield self._describe_option(
                    f"{next(index)} · next best", other, base,
                    _describe_miss(other),
                    self._compare_cost(other, base),
                )  # fmt: skip

    def _explain_capacity(self) -> str:
        if self.scenario.offline:
            return ""
        if self.chosen and self.growth:
            letter = "B" if self.api and self.api.is_api_cheaper else "A"
            room = _uncapitalize(self.growth.explain())
            return f"In brackets: 4 of 5 cases. Option {letter}: {room}"
        return f"In brackets: 4 of 5 cases. {CAPACITY_MEANING}."

    def _describe_cheaper(self, letter: str, candidate: Candidate, base: float | None) -> Option:
        return self._describe_option(
            f"{letter} · cheaper", candidate, base, self._compare_cost(candidate, base),
            _describe_miss(candidate),
        )  # fmt: skip

    def _describe_other_gpu(self, letter: str, candidate: Candidate, base: float | None) -> Option:
        usd, performance = self._price(candidate), candidate.prediction.performance
        is_dearer = usd and base and usd > base and not is_same_price(usd, base)
        arguments = [
            (self._compare_cost(candidate, base), not is_dearer),
            (explain_not_allowed(self.scenario, candidate), False),
        ]
        if performance:
            label = CALIBRATION_BASIS_LABELS[performance.basis].split(":")[0]
            arguments.append((f"speed {label}", performance.basis == "measured"))
        pro, con = (
            ", ".join(text for text, is_for in arguments if is_for == side)
            for side in (True, False)
        )
        return self._describe_option(f"{letter} · another GPU", candidate, base, pro, con)

    def _compare_cost(self, candidate: Candidate, base: float | None) -> str:
        usd = self._price(candidate)
        if usd is None or base is None:
            return "another price"
        if is_same_price(usd, base):
            return "the same price"
        return f"{format_usd(abs(usd - base))} {self._period} {'more' if usd > base else 'less'}"

    def _describe_option(
        self, title: str, candidate: Candidate, base: float | None, pro: str, con: str
    ) -> Option:
        usd, performance = self._price(candidate), candidate.prediction.performance
        change = _format_change(usd, base) if base and usd != base else ""
        latency = EN_DASH
        if self.target and performance:
            value = performance.get(self.target.metric, self.target.percentile)
            latency = _format_interval(value, self.target.seconds)
        served = get_capacity_rps(self.scenario, performance) if performance else None
        word, state = self._judge(candidate)
        return Option(
            title, _count_gpus(candidate), _format_usd(usd), change, word, state, latency,
            f"{format_number(served.mid)} requests/s" if served else EN_DASH, pro, con,
        )  # fmt: skip

    def _judge(self, candidate: Candidate) -> tuple[str, State]:
        odds = format_odds(candidate) + " (estimated)" * (not candidate.is_simulated)
        if candidate.is_confident:
            return f"Meets targets, {odds}", "met"
        if candidate.is_feasible and candidate.probability >= 0.5:
            return f"At risk, {odds}", "at risk"
        return f"Misses targets, {odds}", "missed"

    def _list_risks(self) -> Iterator[tuple[str, str, str]]:
        if self.chosen is None:
            return
        for name, size, settle in list_largest_risks(self.plan):
            yield _capitalize(name), _capitalize(self._say_in_words(size)), _capitalize(settle)

    def _write_next_step(self) -> str:
        if self.chosen is None:
            if not self.changes:
                return "Allow other GPUs, more of them, or higher latency limits, and plan again."
            return "Decide which of the ways out you accept; then set it in the scenario and plan again."
        if self.api and self.api.is_api_cheaper:
            return (
                "Send a day of your own requests to the API: check speed, rate limits and terms."
                " If they suit, sign A. If not, take B."
            )
        if self.scenario.offline:
            return (
                "Run a tenth of the requests on A. If it is as fast as page 2 predicts, run the rest."
                " If not, plan again with the measured speed."
            )
        best = self.confidence.best_benchmark if self.confidence else None
        measured = best[0] if best else self.chosen
        usd = measured.usd_per_hour
        if usd is not None and not measured.is_disaggregated:
            usd /= measured.deployment.layout.replicas
        cost = f" ({format_usd(usd * 24)})" if usd is not None else ""
        own = measured is self.chosen
        share = (
            f" The result changes the choice in {format_probability(best[1])} of cases."
            if best
            else ""
        )
        files = "`serve.sh`, then `bench.sh`" if own else "the scripts in `measure/`"
        extent = "one replica of A" if measured.deployment.layout.replicas > 1 else "the GPUs of A"
        start = f"Rent {extent} for a day{cost} and run {files}."
        if not own:
            start = f"Rent {_count_gpus(measured)} for a day{cost} and run {files}."
            if measured.price_key >= self.chosen.price_key:
                return f"{start} Plan again with the result, then sign.{share}"
            kept = (
                f"{_capitalize(_name_target(self.target))} within {format_limit_seconds(self.target.seconds)}"
                if self.target
                else "As fast as predicted"
            )
            return f"{start} {kept}: keep it, it costs less. If not: plan again with the result.{share}"
        if self.confidence and best and self.confidence.is_cheaper_likely:
            return f"{start} Plan again with the result, then sign: a cheaper plan may be enough.{share}"
        if self.target is None:
            return f"{start} If it is as fast as page 2 predicts, sign A."
        limit = format_limit_seconds(self.target.seconds)
        other = "take B" if self.plan.safer else "plan again with the result"
        return (
            f"{start} {_capitalize(_name_target(self.target))} within {limit}: sign A. Longer:"
            f" {other}.{share}"
        )

    def _list_bars(self) -> Iterator[Bar]:
        planned = 1 - self.scenario.headroom
        for row in list_limit_rows(self.plan):
            shares = (min(end, MAX_SHARE) for end in (row.use.lo, row.use.mid, row.use.hi))
            if row.target:
                name = _capitalize(_name_target(row.target))
                yield Bar(name, row.value, row.pessimistic, row.limit, row.status, *shares)
            elif row.is_load:
                mid, worst = (
                    f"{planned * use:.{int(abs(use - 1) < 0.005)}%}"
                    for use in (row.use.mid, row.pessimistic_use)
                )
                yield Bar("Load (of capacity)", mid, worst, f"{planned:.0%}", row.status, *shares)

    def _write_finding(self) -> str:
        bars = list(self._list_bars())
        if not bars:
            return "Why no plan is possible" if self.best is None else "What the plan rests on"
        missed = [bar.name for bar in bars if bar.state == "missed"]
        risky = [bar.name for bar in bars if bar.state == "at risk"]
        if missed:
            return f"Missed by the closest plan: {_join(_lower(missed))}"
        if risky:
            return f"At risk: {_join(_lower(risky))}; all other targets are met"
        if self.target is None:
            return "The work is done in time"
        return f"Every target is met; nearest to its limit: {_name_target(self.target)}"

    def _draw_chart(self) -> tuple[str, str]:
        """Draw the tightest target over the load, as SVG, with its title."""
        target, performance, best = self.target, self.performance, self.best
        if target is None or performance is None or best is None:
            return "", ""
        data = sweep_stated_latency(self.scenario, best, target)
        if len(data) < 4 or performance.saturated:
            return "", ""
        name, here = get_load(self.scenario.workload)
        own = performance.get(target.metric, target.percentile)
        chart = plot_load_curve(data, name.lower(), here, own, target.seconds)
        unit = "ms" if target.seconds < 1 else "s"
        return render_svg(chart), f"{_name_target(target)}, {unit}, by {name.lower()}"

    def _list_changes(self) -> Iterator[tuple[str, str, str, str, str, State]]:
        base = self._price(self.chosen) if self.chosen else None
        own = self.chosen and self.chosen.description
        ordered = sorted(
            self.changes,
            key=lambda each: not each.plan.chosen or each.plan.chosen.description == own,
        )
        for item in [each for each in self.changes if each in ordered[:MAX_CHANGES]]:
            found = item.plan.chosen
            change = _capitalize(self._say_in_words(item.change))
            if found is None:
                yield change, "no plan", EN_DASH, EN_DASH, "No plan meets the targets", "missed"
                continue
            usd = compute_bill(item.plan.scenario, found)
            share = _format_change(usd, base)
            yield change, _count_gpus(found), _format_usd(usd), share, *self._judge(found)

    def _say_in_words(self, change: str) -> str:
        for target in self.scenario.slo_targets:
            change = change.replace(target.name, _name_target(target))
        return change

    def _list_sellers(self) -> tuple[tuple[str, float, bool], ...]:
        assert self.best is not None
        price = look_up_gpu_price(self.best.deployment.gpu, self.scenario.prices)
        assert price is not None
        cheapest: dict[str, float] = {}
        for quote in sorted(price.quotes, key=lambda quote: quote.usd):
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
        if self.chosen is None:
            return ()
        steps = predict_benchmark_ramp(self.chosen.prediction)
        rows = [(format_number(rate), *self._list_step(found)) for rate, found in steps.items()]
        if self.performance and not self.scenario.offline:
            found, load = self.performance, self.chosen.prediction.workload
            replicas = 1 if self.chosen.is_disaggregated else self.chosen.deployment.layout.replicas
            rate = ((load and load.rate) or found.request_tps.mid) / replicas
            *latencies, _ = self._list_step(found)
            tokens = format_number(found.output_tps.mid / replicas, 2)
            rows.append((f"{format_number(rate)}, your traffic", *latencies, tokens))
        return tuple(rows)

    def _list_step(self, found: Performance) -> Iterator[str]:
        """List the latencies that a benchmark is judged by, and the output tokens/s."""
        for target in self._judged:
            value = found.get_for_display(target.metric, target.percentile)
            yield "overloaded" if found.saturated else _format_interval(value, target.seconds)
        yield format_number(found.output_tps.mid, 2)

    def _describe_basis(self) -> Iterator[tuple[str, str]]:
        scenario, performance = self.scenario, self.performance
        if performance:
            basis = CALIBRATION_BASIS_LABELS[performance.basis]
            replayed = (
                f"{performance.num_simulated_requests:,} requests simulated with the engine's scheduler"
                if performance.num_simulated_requests
                else "Analytical estimate, not simulated"
            )
            yield (
                "Method",
                f"{replayed}. Step times are {basis}. 80% intervals: 4 of 5 measured systems fall"
                " inside.",
            )
        if self.left_out:
            yield "Left out", f"{_capitalize(escape_to_one_line('; '.join(self.left_out)))}."
        if scenario.assumptions:
            yield "Assumed", escape_to_one_line(" ".join(scenario.assumptions))
        yield (
            "Not covered",
            "Network and gateway in front of the servers, traffic other than stated, and the quality"
            " of the model's answers.",
        )


def _name_target(target: SloTarget) -> str:
    return f"{METRIC_NAMES[target.metric].lower()} ({target.percentile})"


def _count_gpus(candidate: Candidate) -> str:
    """Name how many GPUs of a kind, and the replicas where there are several."""
    replicas = sum(pool.num_replicas for pool in candidate.prediction.pools)
    gpus = f"{candidate.prediction.num_gpus_billed} {_TIMES} {candidate.deployment.gpu.name}"
    return (
        f"{gpus}, {replicas} replicas"
        if replicas > 1 and replicas < candidate.prediction.num_gpus_billed
        else gpus
    )


def _describe_miss(candidate: Candidate) -> str:
    return f"{format_probability(1 - candidate.probability)} risk that a target is missed"


def _format_change(usd: float | None, base: float | None) -> str:
    if not usd or not base:
        return EN_DASH
    return (
        "same"
        if is_same_price(usd, base)
        else f"{usd / base - 1:+.0%}".replace("-", "\N{MINUS SIGN}")
    )


def _join(parts: Sequence[str]) -> str:
    return "; ".join(parts)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _uncapitalize(text: str) -> str:
    return text[:1].lower() + text[1:]


def _lower(names: Sequence[str]) -> list[str]:
    return [_uncapitalize(name) for name in names]


def _format_usd(usd: float | None) -> str:
    return EN_DASH if usd is None else format_usd(usd)


def _format_interval(value: Interval, limit: float = math.inf) -> str:
    return EN_DASH if math.isnan(value.mid) else format_seconds_range(value, limit, EN_DASH)


_STATE_COLORS = {**SLO_STATUS_COLORS, "": MUTED_COLOR}


def _render_html(memo: Memo) -> str:
    """Render page 1 for a notebook."""

    def tag(name: str, text: str, style: str = "") -> str:
        return f"<{name}{f' style={chr(34)}{style}{chr(34)}' if style else ''}>{text}</{name}>"

    color = _STATE_COLORS[memo.state]
    said = " ".join(memo.sentences)
    verdict = tag("b", escape_html(memo.verdict), f"color: {color}") + f" {escape_html(said)}"
    tiles = "".join(
        tag(
            "div",
            f"{escape_html(tile.name)}<br><b style='font-size: 1.4em'>{escape_html(tile.value)}</b>"
            f" {escape_html(tile.unit)}<br>{escape_html(tile.note)}",
            "border-top: 1px solid #8a8f98; padding: .4em 1.2em .4em 0; min-width: 9em",
        )
        for tile in memo.tiles
    )
    asked = "".join(f"<p><b>{escape_html(k)}.</b> {escape_html(v)}</p>" for k, v in memo.asked)
    parts = [
        tag("h2", escape_html(memo.title)),
        tag("p", escape_html(memo.question)),
        tag("p", verdict, f"border-left: 4px solid {color}; padding: .4em .8em"),
        tag("p", escape_html(memo.deployment)) if memo.deployment else "",
        tag("div", tiles, "display: flex; flex-wrap: wrap; gap: 1em"),
        tag("p", f"<b>API or own GPUs.</b> {escape_html(memo.api.replace('`', ''))}")
        if memo.api
        else "",
        tag("p", f"<b>The day.</b> {escape_html(memo.day)}") if memo.day else "",
        asked,
        _render_options(memo),
        _render_rows(
            "Risks, and what settles each", ("risk", "size", "what settles it"), memo.risks
        ),
        tag("p", f"<b>Next step.</b> {escape_html(memo.next_step.replace('`', ''))}"),
        _render_rows(
            "What would change the answer",
            ("if", "then rent", "cost", "change", "verdict"),
            [row[:5] for row in memo.changes],
        ),
    ]
    return "".join(parts)


def _render_options(memo: Memo) -> str:
    if not memo.options:
        return ""
    rows: dict[str, list[str]] = {
        "": [option.title for option in memo.options],
        "rent": [option.name for option in memo.options],
        memo.cost_name.lower(): [f"{option.cost} {option.change}" for option in memo.options],
        "verdict": [option.verdict for option in memo.options],
        memo.latency_name: [option.latency for option in memo.options],
        "capacity": [option.capacity for option in memo.options],
        "pro": [option.pro for option in memo.options],
        "con": [option.con for option in memo.options],
    }
    first, *rest = [[name, *cells] for name, cells in rows.items() if name or cells]
    note = f"<p>{escape_html(memo.capacity_note)}</p>" if memo.capacity_note else ""
    return _render_rows("Options", first, [row for row in rest if row[0]]) + note


def _render_rows(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""

    def line(cells: Sequence[str], name: str) -> str:
        style = "text-align: left; vertical-align: top"
        return "".join(f'<{name} style="{style}">{escape_html(cell)}</{name}>' for cell in cells)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        f"<h3>{escape_html(title)}</h3><table><thead><tr>{line(head, 'th')}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )
