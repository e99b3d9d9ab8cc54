"""An answer at a glance: its verdict, main figures and three charts, as HTML, all worked out of the plan alone."""

import math

from planner.analysis import layout_tables as layout_study
from planner.analysis import load_curves as at_a_glance
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
"""What the replay has not judged yet."""


def render_figures(plan: Plan) -> dict[str, str]:
    """Everything that is shown of an answer, as HTML by the place where it stands."""
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
    load, here = at_a_glance.get_load(scenario.workload)
    limits = {f"{t.name} (ms)": t.seconds * 1e3 for t in scenario.slo_targets}
    told = {
        f"{t.name} (ms)": performance.get(t.metric, t.percentile) * 1e3
        for t in scenario.slo_targets
    }
    told = {name: value for name, value in told.items() if not math.isnan(value.mid)}
    curves, costs = (
        at_a_glance.sweep_latency_over_load(scenario, best),
        at_a_glance.sweep_cost_over_load(plan),
    )
    latency = (
        show_note("Nobody waits for this work: every slot is taken until it is done.").html
        * scenario.offline
    )
    how = "let through request by request" if best.is_disaggregated else "in closed form"
    if told and len(curves) > 1:
        drawn = charts_cockpit.plot_live_latency(
            curves, load, here, {name: limits[name] for name in told}, told
        )
        latency = show_figure(
            drawn, f"This deployment by its load, {how}; band: 80%, dashed: promised, {dot}."
        ).html
    cost = ""
    if len(costs) > 1:
        paid = (
            best.usd_per_hour if "USD per hour" in costs else float(best.deployment.layout.num_gpus)
        )
        drawn = charts_cockpit.plot_live_cost(costs, load, here, paid)
        cost = show_figure(
            drawn, f"The least that keeps the promises under other loads, in closed form; {dot}."
        ).html
    filled = show_figure(
        bars, f"Memory of one {best.deployment.gpu.name}: {memory.status.replace('_', ' ')}."
    ).html
    parts = {
        "day": _render_day(plan),
        "memory": filled,
        "latency": latency,
        "cost": cost,
        "why": _render_reasons(plan),
    }
    return {"answer": _render_verdict(plan), **parts}


def _render_verdict(plan: Plan) -> str:
    """The answer in words, its main figures, and each promise."""
    best, performance, parts = (
        plan.best,
        plan.performance,
        [show_note(summary.summarize_plan(plan)).html],
    )
    if best and performance:
        parts.append(_render_tiles(plan))
        parts.append(show_table(layout_study.build_slo_table(plan.scenario, best)).html)
    if performance is None or performance.num_simulated_requests:
        return "".join(parts)
    said = (
        "<p style='margin: .3em 0'><b>Provisional</b>: in closed form, not judged by the replay"
        " yet.</p>"
    )
    frame = f"border: 2px dashed {PENDING_COLOR}; border-radius: 6px; padding: 0 .7em"
    return f"<div style='{frame}'>{said}{''.join(parts)}</div>"


def _render_day(plan: Plan) -> str:
    """What each hour of the day takes, once the plan is replayed; nothing where the question has no day."""
    performance = plan.performance
    if plan.scenario.daily_profile is None or performance is None:
        return ""
    if not performance.num_simulated_requests:
        return show_note("The hours of the day follow with the replay.").html
    if (day := plan.autoscaling) is None or plan.billing is None:
        return ""
    paid = (
        "; ".join(f"{way} USD {usd:,.2f} a day" for way, usd in plan.billing.usd.items())
        or "No price is known"
    )
    drawn = charts_scaling.plot_day(day).properties(width=charts_cockpit.COCKPIT_WIDTH_PX)
    return show_figure(drawn, f"{day}; {day.verdict}. {paid}.").html


def _render_reasons(plan: Plan) -> str:
    """What limits it, how much may come, and what was taken for granted."""
    granted = (
        "Taken for granted: " + " ".join(plan.scenario.assumptions)
        if plan.scenario.assumptions
        else ""
    )
    said = (summary.explain_binding_constraint(plan), risks.describe_headroom(plan), granted)
    return "".join(f"<p>{escape_html(sentence)}</p>" for sentence in said if sentence)


def _render_tiles(plan: Plan) -> str:
    """The main figures, each with its name under it."""
    best = plan.best
    assert best is not None
    performance, usd, month = (
        best.prediction.performance,
        best.usd_per_hour,
        best.prediction.usd_per_month,
    )
    told = [
        (best.description, "the deployment" if plan.chosen else "the nearest, which does not do")
    ]
    if usd is not None and month is not None:
        told.append((f"USD {usd:,.2f}", f"an hour; USD {month.mid:,.0f} a month"))
    if each := best.prediction.usd_per_mtok_output:
        told.append((f"USD {each.mid:,.2f}", "per million output tokens"))
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
        told.append(
            (
                f"{about}{format_value(performance.capacity.mid)} requests/s",
                f"at most ({ends}){spare}{until}",
            )
        )
    told.append(
        (
            f"{format_value(best.prediction.memory.kv_available.mid / GIB)} GiB",
            "of KV cache on a GPU",
        )
    )
    style = "border: 1px solid #8a8f9866; border-radius: 4px; padding: .4em .7em; line-height: 1.35"
    tiles = (
        f"<div style='{style}'><b>{escape_html(value)}</b><br><span"
        f" style='opacity:.75'>{escape_html(name)}</span></div>"
        for value, name in told
    )
    return (
        f"<div style='display:flex; flex-wrap:wrap; gap:.5em; margin:.5em 0'>{''.join(tiles)}</div>"
    )


def render_badge(plan: Plan | None, busy: bool = False) -> str:
    """Where the figures come from, and whether better ones are on their way."""
    performance = plan.performance if plan else None
    if plan is None:
        said, color = "working", charts.MUTED_COLOR
    elif busy:
        said, color = "provisional, in closed form; the replay is running", PENDING_COLOR
    else:
        replays = performance.num_simulated_requests if performance else 0
        said, color = (
            f"replayed: {replays:,} requests an engine" if replays else "searched",
            "#1f7a5c",
        )
    style = (
        f"background: {color}; color: white; border-radius: 1em; padding: .15em .8em;"
        " font-weight: 600"
    )
    return (
        "<p role='status' aria-live='polite' style='margin:.2em 0'><span"
        f" style='{style}'>{escape_html(said)}</span></p>"
    )
