"""An answer at a glance: its verdict, main figures and three charts, as HTML, all worked out of the plan alone."""

import math

from planner.core.quantities import GIB
from planner.faces.charts import base as charts
from planner.faces.charts import cockpit as charts_cockpit
from planner.faces.charts import scaling as charts_scaling
from planner.faces.widgets import escape, figure, note, table, text
from planner.planning.candidate import free_share
from planner.planning.search import Plan
from planner.studies import at_a_glance, layout_study, risks, summary

PENDING = "#b36a1e"
"""What the replay has not judged yet."""


def figures(plan: Plan) -> dict[str, str]:
    """Everything that is shown of an answer, as HTML by the place where it stands."""
    asked, best, found = plan.scenario, plan.best, plan.performance
    if best is None or found is None:
        why = table(summary.rejections(plan), "What was tried, and why it cannot be.").html if plan.rejected else ""
        return {"answer": _verdict(plan), "why": why}
    memory, dot = best.prediction.memory, f"dot: the plan, {found.source}"
    bars = charts.budget({"": memory}).properties(width=charts_cockpit.WIDTH)
    load, here = at_a_glance.load_of(asked.workload)
    limits = {f"{t.name} (ms)": t.seconds * 1e3 for t in asked.service_level}
    told = {f"{t.name} (ms)": found.at(t.metric, t.percentile) * 1e3 for t in asked.service_level}
    told = {name: value for name, value in told.items() if not math.isnan(value.mid)}
    curves, costs = at_a_glance.latency_against_load(asked, best), at_a_glance.cost_against_load(plan)
    latency = note("Nobody waits for this work: every slot is taken until it is done.").html * asked.offline
    how = "let through request by request" if best.pooled else "in closed form"
    if told and len(curves) > 1:
        drawn = charts_cockpit.latency(curves, load, here, {name: limits[name] for name in told}, told)
        latency = figure(drawn, f"This deployment by its load, {how}; band: 80%, dashed: promised, {dot}.").html
    cost = ""
    if len(costs) > 1:
        paid = best.usd_per_hour if "USD per hour" in costs else float(best.deployment.layout.gpus)
        drawn = charts_cockpit.cost(costs, load, here, paid)
        cost = figure(drawn, f"The least that keeps the promises under other loads, in closed form; {dot}.").html
    filled = figure(bars, f"Memory of one {best.deployment.gpu.name}: {memory.status.replace('_', ' ')}.").html
    parts = {"day": _day(plan), "memory": filled, "latency": latency, "cost": cost, "why": _why(plan)}
    return {"answer": _verdict(plan), **parts}


def _verdict(plan: Plan) -> str:
    """The answer in words, its main figures, and each promise."""
    best, found, parts = plan.best, plan.performance, [note(summary.verdict(plan)).html]
    if best and found:
        parts.append(_tiles(plan))
        parts.append(table(layout_study.promises(plan.scenario, best)).html)
    if found is None or found.requests:
        return "".join(parts)
    said = "<p style='margin: .3em 0'><b>Provisional</b>: in closed form, not judged by the replay yet.</p>"
    frame = f"border: 2px dashed {PENDING}; border-radius: 6px; padding: 0 .7em"
    return f"<div style='{frame}'>{said}{''.join(parts)}</div>"


def _day(plan: Plan) -> str:
    """What each hour of the day takes, once the plan is replayed; nothing where the question has no day."""
    found = plan.performance
    if plan.scenario.day is None or found is None:
        return ""
    if not found.requests:
        return note("The hours of the day follow with the replay.").html
    if (day := plan.scaling) is None or plan.renting is None:
        return ""
    paid = "; ".join(f"{way} USD {usd:,.2f} a day" for way, usd in plan.renting.usd.items()) or "No price is known"
    drawn = charts_scaling.day(day).properties(width=charts_cockpit.WIDTH)
    return figure(drawn, f"{day}; {day.verdict}. {paid}.").html


def _why(plan: Plan) -> str:
    """What limits it, how much may come, and what was taken for granted."""
    granted = "Taken for granted: " + " ".join(plan.scenario.assumptions) if plan.scenario.assumptions else ""
    said = (summary.limits(plan), risks.room(plan), granted)
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in said if sentence)


def _tiles(plan: Plan) -> str:
    """The main figures, each with its name under it."""
    best = plan.best
    assert best is not None
    found, usd, month = best.prediction.performance, best.usd_per_hour, best.prediction.usd_per_month
    told = [(best.what, "the deployment" if plan.chosen else "the nearest, which does not do")]
    if usd is not None and month is not None:
        told.append((f"USD {usd:,.2f}", f"an hour; USD {month.mid:,.0f} a month"))
    if each := best.prediction.usd_per_mtok_output:
        told.append((f"USD {each.mid:,.2f}", "per million output tokens"))
    if found and found.capacity:
        free = free_share(plan.scenario, best.prediction) or 0.0
        spare = f"; {free:.0%} stay free" if plan.scenario.workload.rate and not plan.scenario.offline else ""
        ends = f"{text(found.capacity.lo)} to {text(found.capacity.hi)}"
        about, until = ("", "") if found.requests else ("about ", ", until it is replayed")
        told.append((f"{about}{text(found.capacity.mid)} requests/s", f"at most ({ends}){spare}{until}"))
    told.append((f"{text(best.prediction.memory.kv_available.mid / GIB)} GiB", "of KV cache on a GPU"))
    style = "border: 1px solid #8a8f9866; border-radius: 4px; padding: .4em .7em; line-height: 1.35"
    tiles = (
        f"<div style='{style}'><b>{escape(value)}</b><br><span style='opacity:.75'>{escape(name)}</span></div>"
        for value, name in told
    )
    return f"<div style='display:flex; flex-wrap:wrap; gap:.5em; margin:.5em 0'>{''.join(tiles)}</div>"


def badge(plan: Plan | None, busy: bool = False) -> str:
    """Where the figures come from, and whether better ones are on their way."""
    found = plan.performance if plan else None
    if plan is None:
        said, color = "working", charts.MUTED
    elif busy:
        said, color = "provisional, in closed form; the replay is running", PENDING
    else:
        replays = found.requests if found else 0
        said, color = f"replayed: {replays:,} requests an engine" if replays else "searched", "#1f7a5c"
    style = f"background: {color}; color: white; border-radius: 1em; padding: .15em .8em; font-weight: 600"
    return f"<p role='status' aria-live='polite' style='margin:.2em 0'><span style='{style}'>{escape(said)}</span></p>"
