"""Format an answer for the terminal: what to rent first, everything else on request."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.answers.answer import Answer, Limit, Offer, Relaxation
from planner.answers.bill_wording import (
    describe_api,
    describe_gpu_price,
    describe_serverless,
    describe_stopped_bill,
    format_day_bill,
    format_hourly_price,
    format_price,
)
from planner.answers.deployment_wording import (
    describe_adapters,
    describe_engine,
    describe_gpu_memory,
    describe_machines,
    describe_model_memory,
    describe_offer,
    explain_cold_adapter,
    explain_outside,
)
from planner.answers.growth_wording import (
    describe_surge,
    explain_confident_load,
    explain_slots_in_capacity,
    list_other_options,
)
from planner.answers.wording import (
    BASIS_LABELS,
    describe_drafts,
    describe_memory_odds,
    describe_nearest_run,
    describe_open_figure,
    describe_pools,
    describe_rejected,
    explain_alternative,
    explain_binding,
    explain_stages,
    format_amount,
    format_bound,
    format_odds,
    list_doubts,
    name_limit,
)
from planner.core.errors import PlannerError
from planner.core.files import get_report_date
from planner.core.number_format import (
    format_limit_seconds,
    format_number,
    format_probability,
    format_range,
    format_seconds,
    format_seconds_range,
    format_usd,
)
from planner.core.templates import render_template
from planner.core.text import escape_to_one_line, format_columns, format_count
from planner.hardware.prices import MAX_PRICE_AGE_DAYS, look_up_gpu_price
from planner.models.registry import load_model
from planner.planning.max_load import is_least_load
from planner.planning.scenario import Scenario
from planner.planning.slo import (
    LatencyMetric,
    LimitStatus,
    SloTarget,
    explain_implausible_limits,
)
from planner.ui.terminal import UNBREAKABLE_SPACE, Colour, TerminalStyle

EXIT_CODES = {"holds": 0, "at_risk": 3, "nothing_meets": 4}
"""Exit codes of `headroom plan` by verdict."""
MAX_SUMMARY_LINES = 14
MAX_BAR_COLUMNS = 26
MIN_BAR_COLUMNS = 12
STATUS_COLOURS: dict[LimitStatus, Colour] = {"met": "green", "at risk": "amber", "missed": "red"}
LIMITS_MARK = "@"
"""The line of the summary's template that the rows of limits replace."""


def format_answer(
    answer: Answer, style: TerminalStyle | None = None, *, command: str = "", detailed: bool = False,
) -> str:  # fmt: skip
    """Return the answer as text, `detailed` with everything below the summary."""
    style = style or TerminalStyle()
    summary = format_summary(answer, style, command=command, detailed=detailed)
    return f"{summary}\n{format_details(answer, style)}" if detailed else summary


def format_summary(
    answer: Answer, style: TerminalStyle, *, command: str = "", out: str = "",
    detailed: bool = False,
) -> str:  # fmt: skip
    """Return the answer in at most 14 lines of 80 columns, or `detailed` with every limit and option.

    `command` asks this question again, for the next step; `out` is the folder where the files will be.
    """
    style = replace(style, wraps=True)  # in a pipe too, so that it fits a page
    scenario, best = answer.scenario, answer.best
    rows: Sequence[Limit] = best.limits if best else ()
    max_lines = math.inf if detailed else MAX_SUMMARY_LINES
    next_command = _choose_next_command(answer, command, out, detailed=detailed)
    values: dict[str, object] = {
        "answer": answer,
        "best": best,
        "api": describe_api(answer),
        "serverless": describe_serverless(answer),
        "describe": describe_offer,
        "price": format_price,
        "by_hour": format_day_bill,
        "usd": format_usd,
        "number": format_number,
        "likely": format_odds,
        "hourly": format_hourly_price(best) if best else "",
        "stopped": describe_stopped_bill(answer),
        "price_age": f"; newest quote of {best.price.newest_quote}, over {MAX_PRICE_AGE_DAYS} days old:"
        " set `prices`"
        if best and best.price and best.price.is_old(get_report_date())
        else "",
        "adapters": describe_adapters(answer),
        "day": _describe_day(answer),
        "traffic": describe_traffic(answer),
        "others": [],
        "surge": describe_surge(answer),
        "waiting": _describe_waiting(answer),
        "risk": _describe_risk(answer),
        "stages": explain_stages(answer),
        "pools": describe_pools(answer),
        "measure": tell_measure_first(answer),
        "ways_out": _list_ways_out(answer),
        "engine": _keep_whole(describe_engine(best)) if best else "",
        "engine_of": describe_engine,
        "explain": lambda other: explain_alternative(answer, other),
        "next_command": next_command,
        "details_command": _keep_whole(f"{command} --all")
        if command and not detailed and "#" not in next_command
        else "",
    }
    head, tail = _format_blocks(values, style)
    others = list_other_options(answer)
    for count in range(len(others), 0, -1):
        values["others"] = others[:count]
        head, tail = _format_blocks(values, style)
        if 2 + len(rows) + len(head) + len(tail) <= max_lines + (count == 1) * len(rows):
            break
    hidden_text = ""
    num_hidden = 2 + len(rows) + len(head) + len(tail) - max_lines
    if num_hidden > 0:
        rows, hidden = _select_rows(rows, int(num_hidden))
        if hidden:
            statuses = ", ".join(dict.fromkeys(row.status for row in hidden))
            hidden_text = f"{format_count(len(hidden), 'more limit')}, {statuses}"
        if len(hidden) < num_hidden:
            values["hourly"] = str(values["hourly"]).partition(" (")[0]  # without the providers'
        head, tail = _format_blocks(values, style)
    parts = [
        part for part in (head, _format_limits(rows, hidden_text, style, scenario), tail) if part
    ]
    is_spaced = 1 + sum(map(len, parts)) + len(parts) <= MAX_SUMMARY_LINES
    lines = [_format_verdict(answer, style)]
    for part in parts:
        lines += [*([""] if is_spaced else []), *part]
    return "\n".join(lines)


def format_models(answers: Mapping[str, Answer | PlannerError], style: TerminalStyle) -> str:
    """Format a row per model, then which is the best, and what was assumed of all of them."""
    rows = [(model, _describe_model(found)) for model, found in answers.items()]
    planned = {m: found for m, found in answers.items() if isinstance(found, Answer)}
    best = min(planned, key=lambda model: _rank_model(planned[model]), default=None)
    if best and len(answers) > 1 and planned[best].chosen:
        rows.append(("Best", f"{best}: {_explain_best_model(planned[best])}"))
    assumed = dict.fromkeys(
        text for found in planned.values() for text in found.scenario.workload.assumptions
    )
    return "\n".join(style.format_rows([*rows, *(("Assumed", text) for text in assumed)]))


def _rank_model(found: Answer) -> tuple[object, ...]:
    """Sort answers by verdict, then by the figure that was the question, then by price and odds."""
    figure, chosen = found.open_figure, found.chosen
    value = (figure[1] if figure[0] == "limit" else -figure[1]) if figure else 0.0
    price = chosen.price_key if chosen else (True, math.inf)
    return EXIT_CODES[found.verdict], value, price, -found.probability


def _explain_best_model(found: Answer) -> str:
    if kind := found.scenario.found_figure:
        return "the shortest limit" if kind == "limit" else "it serves most within the targets"
    return "the least that meets the targets" if found.verdict == "holds" else "the least at risk"


def _describe_model(found: Answer | PlannerError) -> str:
    if isinstance(found, PlannerError):
        return f"not planned: {found}"
    if found.chosen is None:
        return f"no plan: {found.binding.sentence}"
    best, at_risk = found.chosen, ""
    what = f"{describe_offer(best)}, {describe_engine(best)}: {format_price(best)}"
    if figure := describe_open_figure(found.scenario):
        what = f"{figure} on {what}"
    if found.verdict == "at_risk":
        at_risk = f" (at risk: {'; '.join(list_doubts(best, 'at risk'))})"
    elif limit := best.tightest:
        at_risk = f"; nearest to its limit is {limit.name}, {format_amount(limit)} of {format_bound(limit)}"
    return f"{what}, {format_odds(best)} likely{at_risk}"


def _select_rows(rows: Sequence[Limit], num_hidden: int) -> tuple[Sequence[Limit], Sequence[Limit]]:
    """Select the limits to show, every target among them; those that are used least are hidden."""
    ordered = sorted(rows, key=lambda row: (row.target is None, -row.use.mid))
    num_targets = sum(row.target is not None for row in rows)  # each was asked for
    shown = ordered[: max(len(rows) - num_hidden, num_targets, 2)]
    return [row for row in rows if row in shown], [row for row in rows if row not in shown]


def _format_blocks(values: dict[str, object], style: TerminalStyle) -> tuple[list[str], list[str]]:
    """Return the lines above and below the limits, their labels aligned."""
    pairs = render_rows("summary", **values)
    width = max((len(label) for label, *_ in pairs), default=0)
    at = next((k for k, (label, *_) in enumerate(pairs) if label == LIMITS_MARK), len(pairs))
    head, tail = (
        style.format_rows([(f"{label:<{width}}", text) for label, text in each])
        for each in (pairs[:at], pairs[at + 1 :])
    )
    return head, tail


def _format_verdict(answer: Answer, style: TerminalStyle) -> str:
    """Format the first line: the verdict with its probability."""
    scenario = answer.scenario
    odds = format_odds(answer.best) if answer.best else format_probability(0)
    odds = f"{odds} likely to meet every target"
    figure, kind = describe_open_figure(scenario), scenario.found_figure
    preposition = "with" if kind == "limit" else "up to" if answer.chosen else "at"
    if answer.chosen and is_least_load(scenario):
        preposition = "even with"
    found = figure and f"{preposition} {figure}"
    if answer.verdict == "holds":
        text = f"{style.choose('✔', '+')} MEETS TARGETS{f' {found}' if found else ''}   {odds}"
        return style.paint(text, "green")
    if answer.verdict == "at_risk":
        text = (
            f"! AT RISK{f' {found}' if found else ''}   {odds}, {scenario.confidence:.0%} required"
        )
        return style.paint(text, "amber")
    kinds = [f"{each.max_gpus} x {each.gpu.name}" for each in scenario.gpus]
    most = f"up to {kinds[0]}" if len(kinds) == 1 else f"the {len(kinds)} kinds of GPU allowed"
    where = f", not even {found}" if found else f" on {most}"
    return style.paint(f"{style.choose('✘', 'x')} NO PLAN MEETS THE TARGETS{where}", "red")


def _format_limits(
    rows: Sequence[Limit], hidden_text: str, style: TerminalStyle, scenario: Scenario
) -> list[str]:
    """Format a line with a bar for each limit, below a line that explains the bar and names what is hidden.

    A limit is at risk if the bar, which ends at the asked probability, is beyond it.
    """
    if not rows:
        return []
    values = [f"{format_amount(row)} of {format_bound(row)}" for row in rows]
    value_width, status_width = max(map(len, values)), max(len(row.status) for row in rows)
    full = [name_limit(row, scenario) for row in rows]
    for names in (full, [name.partition(",")[0] for name in full], [row.name for row in rows]):
        name_width = max(map(len, names))
        columns = style.width - (2 + name_width + 2 + value_width + 2 + 2 + status_width)
        if columns >= MIN_BAR_COLUMNS + 6:
            break
    columns = min(columns, MAX_BAR_COLUMNS)
    sure = f"{format_probability(scenario.confidence)} sure"
    key = style.choose(f"● expected ━ {sure} ▏ limit", f"o expected = {sure} | limit")
    lines = [f"  {hidden_text:<{name_width + 2 + value_width}}  {key}".rstrip()]
    lines *= columns >= MIN_BAR_COLUMNS
    for name, value, row in zip(names, values, rows, strict=True):
        bar = f"{style.draw_bar(row.use, columns)}  " if columns >= MIN_BAR_COLUMNS else ""
        if math.isinf(row.use.mid):
            bar = " " * len(bar)
        status = style.paint(row.status, STATUS_COLOURS[row.status])
        lines.append(f"  {name:<{name_width}}  {value:<{value_width}}  {bar}{status}")
    return lines


def _describe_day(answer: Answer) -> str:
    """Describe what the replicas by hour of a day cost and save."""
    day, best = answer.day, answer.best
    if day is None or best is None:
        return ""
    fewest, most = min(day.replicas), max(day.replicas)
    parts = [f"{fewest}-{most} replicas by the hour save {day.saved_fraction:.0%}"]
    if fewest == most:
        parts = [f"{format_count(most, 'replica')} in every hour"]
    elif len(best.bills) > 1:
        bill = best.bills[1]
        parts[0] += f", {format_usd(bill.usd)}/month"
        if bill.usd_per_mtok:
            parts[0] += f", {format_usd(bill.usd_per_mtok)} per M {best.priced_side} tokens"
    if day.violated_hours:
        parts += [f"{len(day.violated_hours)} hours may miss a target"]
    if describe_stopped_bill(answer):
        parts += [
            "to switch off without traffic: `replicas_at_least: 0` at the top of the scenario"
        ]
    return "; ".join(parts)


def describe_traffic(answer: Answer) -> str:
    """Describe the load with mean lengths: "2 requests/s of 1,200 + 250 tokens"."""
    scenario, best = answer.scenario, answer.best
    load = scenario.workload
    tokens = f"{load.prompt.mean:,.0f} + {load.output.mean:,.0f} tokens"
    if hours := scenario.deadline_hours:
        return f"{load.num_prompts:,} requests of {tokens} in {format_number(hours)} h"
    if load.rate is not None:
        peak = " in the busiest hour" if scenario.mean_fraction < 1 else ""
        rate = format_number(load.rate)
        if is_least_load(scenario) or (scenario.found_figure == "rate" and answer.chosen is None):
            return f"{describe_open_figure(scenario)} of {tokens}"
        if scenario.load_sigma and (given := scenario.rate_range):
            rate = f"{format_number(given.lo)}-{format_number(given.hi)}"
        return f"{rate} request{'s' * (rate != '1')}/s of {tokens}{peak}"
    text = f"{load.concurrency:,} concurrent requests of {tokens}"
    if best is None or best.capacity_rps is None:
        return text
    capacity = format_number(best.capacity_rps.mid)
    return f"{text}: {format_number(best.offered_rps)} requests/s (capacity {capacity})"


def _describe_waiting(answer: Answer) -> str:
    """Describe that requests wait in a queue for longer than their answers take, if they do."""
    performance = answer.performance
    if answer.chosen is None or performance is None:
        return ""
    wait, end = performance.ttft["mean"].mid, performance.e2e["mean"].mid
    if not min(wait, performance.queue) > end - wait > 0:
        return ""
    has_limit = any(target.metric in ("ttft", "e2e") for target in answer.scenario.slo_targets)
    return (
        f"the first token takes {format_seconds(wait)} on average, mostly in a queue, and the"
        f" rest of an answer {format_seconds(end - wait)}"
        f"{'' if has_limit else '; a target for TTFT would limit it'}"
    )


def _describe_risk(answer: Answer) -> str:
    """Describe what may be missed by a plan at risk, or why the closest misses something."""
    scenario, best = answer.scenario, answer.best
    if hint := explain_implausible_limits(scenario.slo_targets):
        return hint
    if best is None:
        return ""
    if best.performance and (memory := describe_memory_odds(best)):
        return best.memory.reason or memory
    if answer.verdict == "holds":
        return ""
    if answer.verdict == "at_risk":
        doubts = "; ".join(list_doubts(best, "at risk"))
        return (
            f"even with {describe_open_figure(scenario)} {doubts}"
            if is_least_load(scenario)
            else doubts
        )
    if best.is_overloaded and best.capacity_rps and scenario.workload.rate:
        return (
            f"overloaded: {format_number(best.offered_rps)} requests/s, capacity"
            f" {format_number(best.capacity_rps.mid)}"
        )
    return ""


def _list_ways_out(answer: Answer) -> list[str]:
    """List what would meet the targets: another deployment, then other limits or less load."""
    found = answer.ways_out
    if found is None:
        return []
    limits = " and ".join(
        f"{each.name} of {format_seconds(each.pessimistic, each.given)}"
        for each in found.relaxations
        if each.kind == "limit"
    )
    loads = ", or ".join(
        describe_less_load(each) for each in found.relaxations if each.kind != "limit"
    )
    if loads:
        loads += f" ({format_probability(answer.scenario.confidence)} likely)"
    relaxed = [text for text in (limits and f"a limit for {limits}", loads) if text]
    texts = [", or ".join(relaxed)] if relaxed else []
    if (change := found.change) and change.offer:
        outside = explain_outside(answer.scenario, change.offer)
        slots = change.offer.deployment.args.max_loras
        is_other = answer.adapter_slots and slots != answer.adapter_slots.count
        name = f"{describe_offer(change.offer)}{f', max_loras {slots}' if is_other else ''}"
        name += f" ({outside})" * bool(outside)
        texts.insert(0, f"{name}: {format_price(change.offer)}, {format_odds(change.offer)} likely")
    return texts


def describe_less_load(found: Relaxation) -> str:
    """Describe a load, or a deadline, that would do."""
    if found.kind == "hours":
        hours = format_number(found.pessimistic, 2)
        return f"a deadline of {hours} h instead of {format_number(found.given)} h"
    if found.kind == "rate":
        rate = format_number(found.pessimistic, 2)
        return f"up to {rate} requests/s instead of {format_number(found.given)}"
    return f"up to {found.pessimistic:,.0f} concurrent requests instead of {found.given:,.0f}"


def _choose_next_command(answer: Answer, command: str, out: str, *, detailed: bool) -> str:
    """Choose the command that comes next, told once however long it is; none if nothing meets."""
    chosen = answer.chosen
    if chosen is None or not command:
        return ""
    if out:
        text = ", then ".join(_keep_whole(f"bash {out}/{name}") for name in answer.scripts)
        nodes = max(
            math.ceil(each.layout.gpus_per_replica / each.gpus_per_node) for each in chosen.pools
        )
        if nodes == 1:
            return text
        return (
            f"{text}. Start a replica on {nodes} machines, each with NODE_RANK and MASTER_ADDR set"
        )
    comment = "launch script, benchmark, alerts" if detailed else "or --all: details"
    return f"{_keep_whole(f'{command} --out plan/')} {_keep_whole(f'  # {comment}')}"


def _keep_whole(command: str) -> str:
    """Keep a command on one line, to be copied."""
    return command.replace(" ", UNBREAKABLE_SPACE)


def format_details(answer: Answer, style: TerminalStyle) -> str:
    """Return all that the summary leaves out, after an empty line."""
    scenario, best, performance = answer.scenario, answer.best, answer.performance
    values: dict[str, object] = {
        "answer": answer,
        "scenario": scenario,
        "best": best,
        "performance": performance,
        "describe": describe_offer,
        "describe_engine": describe_engine,
        "describe_model_memory": describe_model_memory,
        "describe_gpu_memory": describe_gpu_memory,
        "explain_cold_adapter": explain_cold_adapter,
        "explain_slots_in_capacity": explain_slots_in_capacity,
        "price": format_price,
        "number": format_number,
        "odds": format_probability,
        "likely": format_odds,
    }
    if best and performance:
        startup = best.startup
        requests = format_number(performance.num_simulated_requests)
        values |= {
            "memory": describe_memory_odds(best),
            "machines": describe_machines(answer),
            "drafts": describe_drafts(answer),
            "gpu_price": best.price and describe_gpu_price(best.price),
            "power": [f"{format_range(value)} {unit}" for unit, value in best.energy],
            "latencies": _list_latencies(scenario, best),
            "explain": lambda other: explain_alternative(answer, other),
            "limited_by": explain_binding(answer),
            "basis_labels": BASIS_LABELS,
            "nearest_run": describe_nearest_run(best),
            "simulated": f"{requests} simulated requests per engine"
            if performance.num_simulated_requests
            else "analytical estimate",
            "free_capacity": best.free_capacity or 0.0,
            "rejected": describe_rejected(answer),
            "capacity": best.capacity_rps
            and not is_least_load(scenario)
            and format_range(best.capacity_rps),
            "startup": startup
            and f"{format_seconds_range(startup.total)};"
            f" {format_seconds_range(startup.total_with_cache)} with a warm compile cache",
            "growth": explain_confident_load(answer.growth) if answer.growth else "",
            "day_savings": _describe_day(answer),
        }
    rows = [(label, text) for label, text in render_rows("plan", **values)]
    return "\n".join(["", *style.format_rows(rows)])


def _list_latencies(scenario: Scenario, best: Offer) -> list[tuple[str, str]]:
    """List each target with its interval, and the p95 of latencies that no target limits."""
    performance = best.performance
    assert performance is not None
    limits = {target: format_limit_seconds(target.seconds) for target in scenario.slo_targets}
    metrics: tuple[LatencyMetric, ...] = () if scenario.offline else ("ttft", "tpot", "e2e")
    others = [SloTarget(metric, "p95", math.inf) for metric in metrics]
    named = {target.metric for target in limits}
    limits |= {target: "" for target in others if target.metric not in named}
    rows = []
    for target, limit in limits.items():
        value = performance.get_for_display(target.metric, target.percentile)
        if math.isnan(value.mid):
            text = "none: answers have one token"
        elif math.isinf(value.mid):
            text = "unbounded (overload)"
        else:
            text = format_seconds_range(value)
        rows.append((target.name, f"{text}, {f'limit {limit}' if limit else 'no target'}"))
    return rows


def format_scenario(scenario: Scenario) -> str:
    """Return a scenario as it was read, line by line."""
    head = escape_to_one_line(f"{scenario.name}: {scenario.question}".removesuffix(": "))
    rows = render_rows(
        "check",
        hint=explain_implausible_limits(scenario.slo_targets),
        scenario=scenario,
        model=load_model(scenario.model),
        look_up_gpu_price=look_up_gpu_price,
    )
    return f"{head}\n{format_columns(rows)}"


def tell_measure_first(answer: Answer) -> str:
    """Return what is worth a benchmark first, to follow the word "Measure"; empty where nothing is."""
    return render_template(
        "ui", "measure_first", first=answer.measure_first, describe=describe_offer,
        odds=format_odds, usd=format_usd,
    )  # fmt: skip


def render_rows(template: str, **values: object) -> list[list[str]]:
    """Return the lines of a rendered template, split at their first bar."""
    lines = render_template("ui", template, **values).splitlines()
    return [line.split(" | ", 1) for line in lines if line]
