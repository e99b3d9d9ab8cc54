"""Render a plan for the cockpit as HTML: verdict, main figures and charts."""

import math

from planner.analysis import layout_tables, load_curves
from planner.analysis import plan_risks as risks
from planner.analysis import plan_summary as summary
from planner.core.units import GIB
from planner.planning.evaluation import compute_free_capacity
from planner.planning.search import Plan
from planner.ui.charts import autoscaling as charts_scaling
from planner.ui.charts import base as charts
from planner.ui.charts import cockpit as charts_cockpit
from planner.ui.notebook_widgets import (
    escape_html,
    format_value,
    show_figure,
    show_note,
    show_table,
)

PENDING_COLOR = "#b36a1e"
"""Marks a plan that is not simulated yet."""


def render_figures(plan: Plan) -> dict[str, str]:
    """Return the HTML of a plan by the name of its panel."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    if best is None or performance is None:
        why = (
            show_table(
                summary.build_rejection_table(plan), "What was tried, and why it cannot be."
            ).html
            if plan.rejected
            else ""
        )
        return {"answer": _render_verdict(plan), "why": why}
    memory, dot = best.prediction.memory, f"dot: the plan, {performance.source_label}"
    bars = charts.plot_memory_budget({"": memory}).properties(width=charts_cockpit.COCKPIT_WIDTH_PX)
    load, operating_point = load_curves.get_load(scenario.workload)
    limits = {f"{t.name} (ms)": t.seconds * 1e3 for t in scenario.slo_targets}
    latencies = {
        f"{t.name} (ms)": value * 1e3
        for t in scenario.slo_targets
        if not math.isnan((value := performance.get(t.metric, t.percentile)).mid)
    }
    curves = load_curves.sweep_latency_over_load(scenario, best)
    costs = load_curves.sweep_cost_over_load(plan)
    latency = (
        show_note("Nobody waits for this work: every slot is taken until it is done.").html
        * scenario.offline
    )
    method = "let through request by request" if best.is_disaggregated else "in closed form"
    if latencies and len(curves) > 1:
        chart = charts_cockpit.plot_live_latency(
            curves, load, operating_point, {name: limits[name] for name in latencies}, latencies
        )
        latency = show_figure(
            chart, f"This deployment by its load, {method}; band: 80%, dashed: promised, {dot}."
        ).html
    cost = ""
    if len(costs) > 1:
        plan_cost = (
            best.usd_per_hour if "USD per hour" in costs else float(best.deployment.layout.num_gpus)
        )
        chart = charts_cockpit.plot_live_cost(costs, load, operating_point, plan_cost)
        cost = show_figure(
            chart, f"The least that keeps the promises under other loads, in closed form; {dot}."
        ).html
    memory_html = show_figure(
        bars, f"Memory of one {best.deployment.gpu.name}: {memory.status.replace('_', ' ')}."
    ).html
    return {
        "answer": _render_verdict(plan),
        "day": _render_day(plan),
        "memory": memory_html,
        "latency": latency,
        "cost": cost,
        "why": _render_reasons(plan),
    }


def _render_verdict(plan: Plan) -> str:
    """Return the verdict, the main figures and the SLOs."""
    best, performance = plan.best, plan.performance
    parts = [show_note(summary.summarize_plan(plan)).html]
    if best and performance:
        parts.append(_render_tiles(plan))
        parts.append(show_table(layout_tables.build_slo_table(plan.scenario, best)).html)
    if performance is None or performance.num_simulated_requests:
        return "".join(parts)
    warning = (
        "<p style='margin: .3em 0'><b>Provisional</b>: in closed form, not judged by the replay"
        " yet.</p>"
    )
    frame = f"border: 2px dashed {PENDING_COLOR}; border-radius: 6px; padding: 0 .7em"
    return f"<div style='{frame}'>{warning}{''.join(parts)}</div>"


def _render_day(plan: Plan) -> str:
    """Return the replicas by hour once the plan is simulated; empty without a daily profile."""
    performance = plan.performance
    if plan.scenario.daily_profile is None or performance is None:
        return ""
    if not performance.num_simulated_requests:
        return show_note("The hours of the day follow with the replay.").html
    if (day := plan.autoscaling) is None or plan.billing is None:
        return ""
    costs = (
        "; ".join(f"{way} USD {usd:,.2f} a day" for way, usd in plan.billing.usd.items())
        or "No price is known"
    )
    chart = charts_scaling.plot_day(day).properties(width=charts_cockpit.COCKPIT_WIDTH_PX)
    return show_figure(chart, f"{day}; {day.verdict}. {costs}.").html


def _render_reasons(plan: Plan) -> str:
    """Return the binding constraint, the headroom and the assumptions."""
    assumptions = (
        "Taken for granted: " + " ".join(plan.scenario.assumptions)
        if plan.scenario.assumptions
        else ""
    )
    sentences = (
        summary.explain_binding_constraint(plan),
        risks.describe_headroom(plan),
        assumptions,
    )
    return "".join(f"<p>{escape_html(sentence)}</p>" for sentence in sentences if sentence)


def _render_tiles(plan: Plan) -> str:
    """Return the main figures, each above its name."""
    best = plan.best
    assert best is not None
    performance = best.prediction.performance
    usd, month = best.usd_per_hour, best.prediction.usd_per_month
    figures = [
        (best.description, "the deployment" if plan.chosen else "the nearest, which does not do")
    ]
    if usd is not None and month is not None:
        figures.append((f"USD {usd:,.2f}", f"an hour; USD {month.mid:,.0f} a month"))
    if usd_per_mtok := best.prediction.usd_per_mtok_output:
        figures.append((f"USD {usd_per_mtok.mid:,.2f}", "per million output tokens"))
    if performance and performance.capacity:
        free = compute_free_capacity(plan.scenario, best.prediction) or 0.0
        spare = (
            f"; {free:.0%} stay free"
            if plan.scenario.workload.rate and not plan.scenario.offline
            else ""
        )
        ends = f"{format_value(performance.capacity.lo)} to {format_value(performance.capacity.hi)}"
        about, until = (
            ("", "") if performance.num_simulated_requests else ("about ", ", until it is replayed")
        )
        figures.append(
            (
                f"{about}{format_value(performance.capacity.mid)} requests/s",
                f"at most ({ends}){spare}{until}",
            )
        )
    figures.append(
        (
            f"{format_value(best.prediction.memory.kv_available.mid / GIB)} GiB",
            "of KV cache on a GPU",
        )
    )
    style = "border: 1px solid #8a8f9866; border-radius: 4px; padding: .4em .7em; line-height: 1.35"
    tiles = (
        f"<div style='{style}'><b>{escape_html(value)}</b><br><span"
        f" style='opacity:.75'>{escape_html(name)}</span></div>"
        for value, name in figures
    )
    return (
        f"<div style='display:flex; flex-wrap:wrap; gap:.5em; margin:.5em 0'>{''.join(tiles)}</div>"
    )


def render_badge(plan: Plan | None, busy: bool = False) -> str:
    """Return the source of the figures, and whether a simulation is running."""
    performance = plan.performance if plan else None
    if plan is None:
        status, color = "working", charts.MUTED_COLOR
    elif busy:
        status, color = "provisional, in closed form; the replay is running", PENDING_COLOR
    else:
        num_requests = performance.num_simulated_requests if performance else 0
        status = f"replayed: {num_requests:,} requests an engine" if num_requests else "searched"
        color = "#1f7a5c"
    style = (
        f"background: {color}; color: white; border-radius: 1em; padding: .15em .8em;"
        " font-weight: 600"
    )
    return (
        "<p role='status' aria-live='polite' style='margin:.2em 0'><span"
        f" style='{style}'>{escape_html(status)}</span></p>"
    )
