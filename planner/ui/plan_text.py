"""Format a plan or a scenario for the terminal: the answer first, everything else on request."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from planner.analysis.phrases import CALIBRATION_BASIS_LABELS
from planner.analysis.plan_risks import describe_growth_limit, describe_rejected
from planner.core.number_format import (
    format_ends,
    format_limit_seconds,
    format_number,
    format_probability,
    format_range,
    format_seconds,
    format_seconds_range,
    format_shares,
    format_usd,
)
from planner.core.progress import try_each
from planner.core.templates import render_template
from planner.core.text import escape_to_one_line, format_columns, format_count
from planner.deploy import build_launches
from planner.deploy.artifacts import explain_unsupported_artifacts, list_benchmark_files
from planner.hardware.prices import HOURS_PER_MONTH, look_up_gpu_price
from planner.latency.startup_time import StartupTime, estimate_startup
from planner.memory.memory_plan import explain_memory_utilization
from planner.models.registry import load_model
from planner.planning.alternatives import (
    Alternative,
    explain_alternatives,
    explain_other_engines,
    explain_rank,
)
from planner.planning.billing import BILLING_AUTOSCALED, BILLING_FIXED, price_tokens
from planner.planning.candidate import Candidate
from planner.planning.confidence import ChoiceConfidence, estimate_choice_confidence
from planner.planning.disaggregated import estimate_kv_transfer
from planner.planning.disaggregated_search import explain_skipped_pools
from planner.planning.evaluation import (
    compute_free_capacity,
    compute_offered_rps,
    estimate_energy,
    estimate_run_hours,
    get_capacity_rps,
)
from planner.planning.scenario import Scenario
from planner.planning.search import Plan, settle_open_figure
from planner.planning.slo import (
    LatencyMetric,
    LimitStatus,
    SloTarget,
    explain_implausible_limits,
)
from planner.planning.what_if import propose_changes, search_to_end
from planner.ui.limit_rows import LimitRow, list_limit_rows, list_violated_limits
from planner.ui.plan_words import (
    compute_bill,
    describe_adapters,
    describe_candidate,
    describe_engine,
    describe_found_figure,
    describe_gpu_price,
    explain_not_allowed,
    find_cheaper_gamble,
    format_odds,
)
from planner.ui.terminal import UNBREAKABLE_SPACE, Colour, TerminalStyle

EXIT_CODES = {"holds": 0, "at_risk": 3, "nothing_meets": 4}
"""Exit codes of `headroom plan` by verdict."""
MAX_SUMMARY_LINES = 14
MAX_BAR_COLUMNS = 26
MIN_BAR_COLUMNS = 12
MAX_CHANGES_TRIED = 2
"""Changes that are searched for one that helps, if nothing meets the targets."""
MIN_USEFUL_LOAD = 0.01
"""Share of the load below which serving less is no way out."""
STATUS_COLOURS: dict[LimitStatus, Colour] = {"met": "green", "at risk": "amber", "missed": "red"}
LIMITS_MARK = "@"
"""The line of the summary's template that the rows of limits replace."""


def format_plan(
    plan: Plan,
    style: TerminalStyle | None = None,
    *,
    command: str = "",
    detailed: bool = False,
) -> str:
    """Return the answer in at most 14 lines of 80 columns, `detailed` with everything else below.

    `command` is the one that asks this question again, for the next step.
    """
    find_unlisted = (lambda plan: None) if detailed else None
    return "\n".join(generate_answer(plan, style or TerminalStyle(), command, "", find_unlisted))


def generate_answer(
    plan: Plan, style: TerminalStyle, command: str, out: str,
    find_unlisted: Callable[[Plan], Candidate | None] | None,
) -> Iterator[str]:  # fmt: skip
    """Yield the answer, and everything else below if it is asked for, as soon as each is known.

    `out` is the folder where the files will be. `find_unlisted` searches a better plan on GPUs that
    the scenario does not list, for everything else.
    """
    yield _format_summary(plan, style, command, out, detailed=find_unlisted is not None)
    if find_unlisted:
        yield "\n".join(["", *style.format_rows(_list_details(plan, find_unlisted(plan)))])


def _format_summary(
    plan: Plan, style: TerminalStyle, command: str, out: str, *, detailed: bool
) -> str:
    style = replace(style, wraps=True)  # in a pipe too, so that it fits a page
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    rows = list_limit_rows(plan)
    values: dict[str, object] = {
        "plan": plan,
        "best": best,
        "performance": performance,
        "api": plan.api_comparison,
        "period": "/month" if not scenario.offline else " for the job",
        "describe": describe_candidate,
        "price": lambda candidate: format_price(scenario, candidate),
        "usd": format_usd,
        "number": format_number,
        "odds": format_probability,
        "likely": format_odds,
        "hourly": _format_hourly_price(best) if best else "",
        "tokens": best and price_tokens(scenario, best),
        "cheaper": find_cheaper_gamble(plan),
        "adapters": describe_adapters(scenario, best) if best else "",
        "day": _describe_day(plan),
        "traffic": describe_traffic(plan),
        "waiting": _describe_waiting(plan),
        "risk": _describe_risk(plan, rows),
        "ways_out": [] if plan.chosen else list_ways_out(plan),
        "engine": _keep_whole(describe_engine(best)) if best else "",
        "engine_of": describe_engine,
        "engines": explain_other_engines(plan),
        "next_command": _choose_next_command(plan, command, out, style),
        "details_command": _keep_whole(f"{command} --all") if command and not detailed else "",
        "hidden_rows": "",
    }
    head, tail = _format_blocks(values, style)
    num_hidden = 2 + len(rows) + len(head) + len(tail) - MAX_SUMMARY_LINES
    if num_hidden > 0:
        ordered = sorted(rows, key=lambda row: (row.target is None, -row.use.mid))
        num_targets = sum(row.target is not None for row in rows)  # each was asked for
        shown = ordered[: max(len(rows) - num_hidden, num_targets, 2)]
        hidden, rows = [row for row in rows if row not in shown], [r for r in rows if r in shown]
        if hidden:
            values["hidden_rows"] = (
                f" ({format_count(len(hidden), 'more limit')}, {_join_statuses(hidden)})"
            )
        if len(hidden) < num_hidden:
            values["hourly"] = str(values["hourly"]).partition(" (")[0]  # without the providers'
        head, tail = _format_blocks(values, style)
    lines = [_format_verdict(plan, style)]
    limits = _format_limits(rows, style, scenario.confidence)
    parts = [part for part in (head, limits, tail) if part]
    num_lines = 1 + sum(map(len, parts))
    spaced = num_lines + len(parts) <= MAX_SUMMARY_LINES
    for part in parts:
        lines += [*([""] if spaced else []), *part]
    return "\n".join(lines)


def _format_blocks(values: dict[str, object], style: TerminalStyle) -> tuple[list[str], list[str]]:
    """Return the lines above and below the limits, their labels aligned."""
    pairs = [_split_row(line) for line in _render("summary", values)]
    width = max((len(label) for label, _ in pairs), default=0)
    above, below = _split_blocks(pairs)
    return (
        style.format_rows([(f"{label:<{width}}", text) for label, text in above]),
        style.format_rows([(f"{label:<{width}}", text) for label, text in below]),
    )


def _render(template: str, values: dict[str, object]) -> list[str]:
    return [line for line in render_template("ui", template, **values).splitlines() if line]


def _split_row(line: str) -> tuple[str, str]:
    label, _, text = line.partition(" | ")
    return label, text


def _split_blocks(pairs: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], ...]:
    """Split rows at the mark of the limits."""
    at = next((k for k, (label, _) in enumerate(pairs) if label == LIMITS_MARK), len(pairs))
    head, tail = pairs[:at], pairs[at + 1 :]
    return head, tail


def _format_verdict(plan: Plan, style: TerminalStyle) -> str:
    """Format the first line: the verdict with its probability."""
    odds = f"{format_odds(plan.best) if plan.best else format_probability(0)} likely to meet every target"
    figure, kind = describe_found_figure(plan.scenario), plan.scenario.found_figure
    found = figure and f"{'with' if kind == 'limit' else 'up to' if plan.chosen else 'at'} {figure}"
    if plan.verdict == "holds":
        text = f"{style.choose('✔', '+')} MEETS TARGETS{f' {found}' if found else ''}   {odds}"
        return style.paint(text, "green")
    if plan.verdict == "at_risk":
        text = f"! AT RISK{f' {found}' if found else ''}   {odds}, {plan.scenario.confidence:.0%} required"
        return style.paint(text, "amber")
    where = f", not even {found}" if found else f" on {_describe_allowed_gpus(plan.scenario)}"
    return style.paint(f"{style.choose('✘', 'x')} NO PLAN MEETS THE TARGETS{where}", "red")


def _describe_allowed_gpus(scenario: Scenario) -> str:
    kinds = [f"{each.max_gpus} x {each.gpu.name}" for each in scenario.gpus]
    return f"up to {kinds[0]}" if len(kinds) == 1 else f"the {len(kinds)} kinds of GPU allowed"


def _format_limits(rows: Sequence[LimitRow], style: TerminalStyle, confidence: float) -> list[str]:
    """Format a line with a bar for each limit, below a line that explains the bar.

    A limit is at risk if the bar, which ends at the asked `confidence`, is beyond it.
    """
    if not rows:
        return []
    values = [f"{row.value} of {row.limit}" for row in rows]
    value_width, status_width = max(map(len, values)), max(len(row.status) for row in rows)
    for names in ([row.name for row in rows], [row.short_name for row in rows]):
        name_width = max(map(len, names))
        columns = style.width - (2 + name_width + 2 + value_width + 2 + 2 + status_width)
        if columns >= MIN_BAR_COLUMNS + 6:
            break
    columns = min(columns, MAX_BAR_COLUMNS)
    sure = f"{format_probability(confidence)} sure"
    key = style.choose(f"● expected ━ {sure} ▏ limit", f"o expected = {sure} | limit")
    lines = [f"  {'':<{name_width}}  {'':<{value_width}}  {key}"] * (columns >= MIN_BAR_COLUMNS)
    for name, value, row in zip(names, values, rows, strict=True):
        bar = f"{style.draw_bar(row.use, columns)}  " if columns >= MIN_BAR_COLUMNS else ""
        if math.isinf(row.use.mid):
            bar = " " * len(bar)
        status = style.paint(row.status, STATUS_COLOURS[row.status])
        lines.append(f"  {name:<{name_width}}  {value:<{value_width}}  {bar}{status}")
    return lines


def _join_statuses(rows: Sequence[LimitRow]) -> str:
    return ", ".join(dict.fromkeys(row.status for row in rows))


def format_price(scenario: Scenario, candidate: Candidate) -> str:
    """Format a candidate's price: of a month, or of all the work if that ends."""
    usd = compute_bill(scenario, candidate)
    if usd is None:
        return "price unknown"
    is_job = estimate_run_hours(scenario, candidate) is not None
    return f"{format_usd(usd)}{' for the job' if is_job else '/month'}"


def _format_hourly_price(candidate: Candidate) -> str:
    usd = candidate.prediction.usd_per_hour_interval
    if usd is None:
        return ""
    if usd.lo == usd.hi:
        return f"{format_usd(usd.mid)}/h"
    return f"{format_usd(usd.mid)}/h (${format_ends(usd)} by provider)"


def _describe_day(plan: Plan) -> str:
    """Describe what the replicas by hour of a day cost and save."""
    day, billing = plan.autoscaling, plan.billing
    if day is None or billing is None:
        return ""
    fewest, most = min(day.replicas), max(day.replicas)
    missed = f"; {len(day.violated_hours)} hours may miss a target" if day.violated_hours else ""
    if billing.stopped_usd is not None and plan.api_comparison is None:
        stopped = format_usd(billing.stopped_usd * HOURS_PER_MONTH / 24)
        missed += (
            f"; {stopped}/month if none runs in the {day.rates.count(0)} hours without traffic"
            " (`replicas_at_least: 0` at the top of the scenario)"
        )
    if fewest == most:
        return f"{format_count(most, 'replica')} in every hour{missed}"
    cost = ""
    if (usd := billing.usd.get(BILLING_AUTOSCALED)) and plan.best:
        cost = f", {format_usd(usd * HOURS_PER_MONTH / 24)}/month"
        if tokens := price_tokens(plan.scenario, plan.best):
            scaled = tokens[0].mid * usd / billing.usd[BILLING_FIXED]
            cost += f", {format_usd(scaled)} per M {tokens[1]} tokens"
    return f"{fewest}-{most} replicas by the hour save {day.saved_fraction:.0%}{cost}{missed}"


def describe_traffic(plan: Plan) -> str:
    """Describe the load with mean lengths: "2 requests/s of 1,200 + 250 tokens"."""
    scenario, performance = plan.scenario, plan.performance
    load = scenario.workload
    tokens = f"{load.prompt.mean:,.0f} + {load.output.mean:,.0f} tokens"
    if scenario.offline and load.num_prompts and load.rate:
        hours = format_number(load.num_prompts / load.rate / 3600)
        return f"{load.num_prompts:,} requests of {tokens} in {hours} h"
    if load.rate is not None:
        peak = " in the busiest hour" if scenario.daily_profile else ""
        rate = format_number(load.rate)
        return f"{rate} request{'s' * (rate != '1')}/s of {tokens}{peak}"
    text = f"{load.concurrency:,} concurrent requests of {tokens}"
    capacity = performance and get_capacity_rps(scenario, performance)
    if performance is None or not capacity:
        return text
    return (
        f"{text}: {format_number(performance.request_tps.mid)} requests/s"
        f" (capacity {format_number(capacity.mid)})"
    )


def _describe_waiting(plan: Plan) -> str:
    """Describe that requests wait in a queue for longer than their answers take, if they do."""
    performance = plan.performance
    if plan.chosen is None or performance is None:
        return ""
    wait, end = performance.ttft["mean"].mid, performance.e2e["mean"].mid
    if not min(wait, performance.queue) > end - wait > 0:
        return ""
    has_limit = any(target.metric in ("ttft", "e2e") for target in plan.scenario.slo_targets)
    return (
        f"the first token takes {format_seconds(wait)} on average, mostly in a queue, and the"
        f" rest of an answer {format_seconds(end - wait)}"
        f"{'' if has_limit else '; a target for TTFT would limit it'}"
    )


def _describe_risk(plan: Plan, rows: Sequence[LimitRow]) -> str:
    """Describe what may be missed by a plan at risk, or why the nearest is none without a miss."""
    scenario, best = plan.scenario, plan.best
    if hint := explain_implausible_limits(scenario.slo_targets):
        return hint
    if best is None or plan.verdict == "holds":
        return ""
    if best.prediction.performance and best.p_memory < scenario.confidence:
        return best.prediction.memory.reason or "GPU memory may not suffice"
    if plan.verdict == "at_risk":
        return "; ".join(
            f"{row.short_name} may reach {row.pessimistic}, limit {row.limit}"
            if row.short_name != "load" and row.short_name != "busiest hour"
            else f"usable capacity may be {row.pessimistic}, load {row.value}"
            for row in rows
            if row.status == "at risk"
        )
    used = best.capacity_utilization * (1 - scenario.headroom)
    if best.prediction.performance and used > 1 and scenario.workload.rate and not scenario.offline:
        capacity = get_capacity_rps(scenario, best.prediction.performance)
        assert capacity is not None
        return (
            f"overloaded: {format_number(compute_offered_rps(scenario, best.prediction))}"
            f" requests/s, capacity {format_number(capacity.mid)}"
        )
    return ""


def list_ways_out(plan: Plan) -> list[str]:
    """List what would meet the targets: other GPUs or formats, other limits, less load.

    Each follows from a search, or from the prediction of the nearest candidate.
    """
    found: list[tuple[Scenario, Candidate]] = []
    asked = plan.scenario
    proposed = [
        (change, each)
        for change, each in propose_changes(plan)
        if (each.workload, each.slo_targets) == (asked.workload, asked.slo_targets)
    ]
    others = proposed[MAX_CHANGES_TRIED:][-1:]  # on other GPUs
    for _, plans in try_each(
        search_to_end, dict((*proposed[:MAX_CHANGES_TRIED], *others)), "ways out"
    ):
        found += [(other.scenario, other.chosen) for other in plans or () if other.chosen]
        if found and found[-1][1].is_confident:
            break
    texts = []
    if found:
        scenario, chosen = max(found, key=lambda way: (way[1].is_confident, way[1].probability))
        outside = explain_not_allowed(plan.scenario, chosen)
        name = f"{describe_candidate(chosen)}{f' ({outside})' * bool(outside)}"
        texts = [f"{name}: {format_price(scenario, chosen)}, {format_odds(chosen)} likely"]
    rows, limits_and_loads = list_limit_rows(plan), []
    latencies = {target.name for target in plan.scenario.slo_targets}
    missed = [row for row in rows if row.status != "met"]
    is_bounded = not any(math.isinf(row.use.hi) for row in missed)
    if missed and is_bounded and all(row.short_name in latencies for row in missed):
        limits = " and ".join(f"{row.short_name} of {row.pessimistic}" for row in missed)
        limits_and_loads.append(f"a limit for {limits}")
    for _, load in try_each(_find_feasible_load, {"less load": plan}, "ways out"):
        limits_and_loads += [load] if load else []
    return [*texts, *([", or ".join(limits_and_loads)] if limits_and_loads else [])]


def _find_feasible_load(plan: Plan) -> str:
    """Find the largest load that the allowed GPUs serve within the targets."""
    scenario = plan.scenario
    if scenario.offline and plan.best and plan.performance:
        rate, served = scenario.workload.rate, plan.performance.request_tps
        total = scenario.workload.num_prompts
        if not rate or not total:
            return ""
        hours = total / (served.lo * (1 - scenario.headroom)) / 3600
        given = format_number(total / rate / 3600)
        return f"a deadline of {format_number(hours, 2)} h instead of {given} h"
    if plan.best is None or scenario.found_figure or scenario.workload.trace:
        return ""
    kind: Literal["rate", "concurrency"] = (
        "rate" if scenario.workload.rate is not None else "concurrency"
    )
    found = settle_open_figure(
        replace(scenario, open_figure=kind, daily_profile=None), is_simulated=True
    ).workload
    if found.rate is not None and scenario.workload.rate is not None:
        if not MIN_USEFUL_LOAD <= found.rate / scenario.workload.rate < 1:
            return ""
        return (
            f"up to {format_number(found.rate, 2)} requests/s instead of"
            f" {format_number(scenario.workload.rate)}"
        )
    if (found.concurrency or 0) < 2:
        return ""
    wanted = scenario.workload.concurrency
    return f"up to {found.concurrency:,} concurrent requests instead of {wanted:,}"


def _choose_next_command(plan: Plan, command: str, out: str, style: TerminalStyle) -> str:
    """Choose the command that comes next, with what it does if that fits; none if nothing meets."""
    if plan.chosen is None or not command:
        return ""
    if out:
        scripts = ", then ".join(_keep_whole(f"bash {out}/{name}") for name in _list_scripts(plan))
        pools = plan.chosen.prediction.pools
        nodes = max(math.ceil(pool.layout.gpus_per_replica / pool.gpus_per_node) for pool in pools)
        if nodes == 1:
            return scripts
        return f"{scripts}. Start a replica on {nodes} machines, each with NODE_RANK and MASTER_ADDR set"
    text, comment = f"{command} --out plan/", "   # launch script, benchmark, alerts"
    return _keep_whole(text + comment * (len(text + comment) <= style.width - 11))


def _keep_whole(command: str) -> str:
    """Keep a command on one line, to be copied."""
    return command.replace(" ", UNBREAKABLE_SPACE)


def _list_scripts(plan: Plan) -> list[str]:
    return [name for name in list_benchmark_files(plan) if name.endswith(".sh")]


def _list_details(plan: Plan, unlisted: Candidate | None) -> list[tuple[str, str]]:
    """Return label and text of all that the summary leaves out."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    values: dict[str, object] = {
        "plan": plan,
        "scenario": scenario,
        "best": best,
        "unlisted": unlisted,
        "performance": performance,
        "describe": describe_candidate,
        "describe_engine": describe_engine,
        "price": lambda candidate: format_price(scenario, candidate),
        "number": format_number,
        "odds": format_probability,
        "likely": format_odds,
    }
    if best and performance:
        confidence, capacity = (
            estimate_choice_confidence(plan),
            get_capacity_rps(scenario, performance),
        )
        startup = estimate_startup(best.deployment, scenario.storage)
        gpu_price = look_up_gpu_price(best.deployment.gpu, scenario.prices)
        alternatives = explain_alternatives(plan)
        values |= {
            "launches": build_launches,
            "gpu_price": gpu_price and describe_gpu_price(gpu_price),
            "power": [
                f"{format_range(value)} {unit}" for unit, value in estimate_energy(scenario, best)
            ],
            "latencies": _list_latencies(scenario, best),
            "skipped_pools": explain_skipped_pools(scenario),
            "not_written": explain_unsupported_artifacts(plan),
            "estimate_kv_transfer": estimate_kv_transfer,
            "confidence": confidence,
            "choice": _describe_choice(confidence) if confidence else (),
            "scripts": _list_scripts(plan),
            "alternatives": [
                (other.option, _explain_alternative(plan, other)) for other in alternatives
            ],
            "limited_by": _explain_limit(plan, alternatives),
            "basis_labels": CALIBRATION_BASIS_LABELS,
            "simulated": (
                f"{format_number(performance.num_simulated_requests)} simulated requests per engine"
                if performance.num_simulated_requests
                else "analytical estimate"
            ),
            "free_capacity": compute_free_capacity(scenario, best.prediction) or 0.0,
            "rejected": describe_rejected(scenario, best.prediction),
            "offered_rps": compute_offered_rps(scenario, best.prediction),
            "capacity": capacity and format_range(capacity),
            "startup": startup and _describe_startup(startup),
            "growth": describe_growth_limit(plan),
            "day_savings": _describe_day(plan),
            "utilization_reason": explain_memory_utilization(best.deployment),
        }
    return [_split_row(line) for line in _render("plan", values)]


def _list_latencies(scenario: Scenario, best: Candidate) -> list[tuple[str, str]]:
    """List each target with its interval, and the p95 of latencies that no target limits."""
    performance = best.prediction.performance
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


def _describe_startup(startup: StartupTime) -> str:
    """Describe a cold start, and one with a warm compile cache."""
    cold, warm = startup.total, startup.total_with_cache
    return f"{format_seconds_range(cold)}; {format_seconds_range(warm)} with a warm compile cache"


def _describe_choice(confidence: ChoiceConfidence) -> list[str]:
    """Describe how often the plan stays the choice under calibration error, and what is chosen else."""
    shares = {
        "this plan": confidence.p_unchanged,
        "another at its price": confidence.p_equal_cost,
        "a more expensive one": confidence.p_costlier,
        "a cheaper one": confidence.p_cheaper,
    }
    texts = zip(shares, format_shares(list(shares.values())), strict=True)
    return [f"{what} {share}" for what, share in texts if share != "0%"]


def _explain_alternative(plan: Plan, other: Alternative) -> str:
    """Explain why the plan does not use an alternative, in one clause."""
    scenario, chosen, candidate = plan.scenario, plan.chosen, other.candidate
    assert chosen is not None
    if candidate is None:
        return other.reason
    name, price = describe_candidate(candidate), format_price(scenario, candidate)
    if candidate.usd_per_hour is None and chosen.usd_per_hour is not None:
        return "no price known, so ranked last"
    if candidate.price_key[1] > chosen.price_key[1] * (1 + 1e-6):
        times = candidate.price_key[1] / chosen.price_key[1]
        return f"{format_number(times, 2)} times the price ({price} for the smallest, {name})"
    if candidate.is_confident:
        odds, reason = format_odds(candidate), explain_rank(candidate, chosen)
        if round(candidate.probability, 2) < round(chosen.probability, 2):
            reason = "this plan is likelier to"
        return f"{name} meets the targets too ({price}, {odds} likely); {reason}"
    if scenario.found_figure in ("rate", "concurrency"):
        return f"{name} serves less within the targets"
    return f"{name}: {_describe_shortfall(scenario, candidate)}"


def _describe_shortfall(scenario: Scenario, candidate: Candidate) -> str:
    violated = list_violated_limits(scenario, candidate)
    return "; ".join(violated) or f"only {format_odds(candidate)} likely to meet every target"


def _explain_limit(plan: Plan, alternatives: Sequence[Alternative]) -> str:
    """Explain what the closest cheaper deployment lacks.

    The same deployment, tuned as an alternative, may do better: then that one counts.
    """
    near = plan.binding_constraint.candidate
    if near is None:
        return plan.binding_constraint.sentence
    same = [
        other.candidate
        for other in alternatives
        if other.candidate and other.candidate.placement_key[:-1] == near.placement_key[:-1]
    ]
    near = max([near, *same], key=lambda candidate: candidate.probability)
    shortfall = _describe_shortfall(plan.scenario, near)
    misses = ", misses" * bool(near.violations)
    return f"{describe_candidate(near)}, {format_price(plan.scenario, near)}{misses}: {shortfall}"


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


def render_rows(template: str, **values: object) -> list[list[str]]:
    """Return the lines of a rendered template, split at their first bar."""
    return [
        line.split(" | ", 1)
        for line in render_template("ui", template, **values).splitlines()
        if line
    ]
