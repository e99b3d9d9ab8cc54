"""Turn an answer into what the cockpit shows: words, figures and charts, as plain data.

An analytical answer has no verdict: it is an estimate. What is said is `templates/panel.j2`.
"""

import math
from collections.abc import Mapping
from typing import Any

from planner.answers import Answer, words
from planner.answers.answer import PHRASES, CostCurve, LatencyCurve, is_same_price
from planner.answers.limits import Limit
from planner.core.number_format import EN_DASH, format_usd
from planner.core.text import capitalize
from planner.planning.slo import LimitStatus
from planner.ui.charts import base as charts
from planner.ui.charts import cockpit as charts_cockpit
from planner.ui.plan_text import render_page

Page = dict[str, Any]
"""What the cockpit shows, as JSON."""
STATUS_TONES: dict[LimitStatus, str] = {"met": "good", "at risk": "warn", "missed": "bad"}
AFTER_SIMULATION = "follows with the simulation"
"""What stands for the probability of an estimate."""
MAX_REJECTED_ROWS = 8
BAR_END = 1.18
"""Where the bar of a target ends, as a multiple of its limit."""


def build_page(answer: Answer) -> Page:
    """Build what the cockpit shows of an answer: an estimate if it is analytical."""
    return render_page(
        "panel",
        answer=answer,
        tones=STATUS_TONES,
        after_simulation=AFTER_SIMULATION,
        max_rejected=MAX_REJECTED_ROWS,
        end=BAR_END,
    )


def build_other_row(
    answer: Answer, other: Answer | None, label: str, changes: Mapping[str, Any]
) -> Page:
    """Build the row of another answer: what it is, its price beside `answer`'s, how likely it is.

    `changes` are the controls that ask for it.
    """
    row: Page = {"label": capitalize(label), "changes": changes}
    option = other.chosen if other else None
    if option is None:
        return {**row, "status": "misses the targets", "tone": "bad", "order": math.inf}
    own = answer.chosen.usd_per_hour if answer.chosen else None
    usd = option.usd_per_hour
    change = "" if is_same_price(usd, own) else words.format_change(usd, own)
    return {
        **row,
        "gpus": words.describe_gpus(option),
        "setup": words.describe_setup(option),
        "month": format_usd(option.bill) if option.bill else EN_DASH,
        "hour": words.format_hourly_price(option, EN_DASH),
        "change": change,
        "cheaper": bool(change and usd and own and usd < own),
        "probability": words.format_odds(option),
        "tone": STATUS_TONES[option.status],
        "order": usd or 1e9,
    }


def find_curve_target(answer: Answer, key: str) -> Limit | None:
    """Find the limit whose latency is drawn: that of `key` ("ttft p95"), else the tightest."""
    best = answer.best
    if best is None or best.is_overloaded:
        return None
    named = {f"{t.metric} {t.percentile}": row for row in best.limit_rows if (t := row.target)}
    return named.get(key) or best.tightest


def draw_charts(
    answer: Answer, latency: LatencyCurve | None, costs: CostCurve | None, width: int
) -> Page:
    """Draw the charts of an answer at `width` px: a latency and the cost over the load."""
    page: Page = {"latency": None, "cost": None, "day": None}
    if latency:  # through the plan's own point
        target = latency.target
        chart = charts_cockpit.plot_latency_over_load(
            latency.points, latency.here, target.seconds * 1e3, latency.own * 1e3, width
        )
        name = f"{PHRASES['metrics'][target.metric]} ({target.metric.upper()}), {target.percentile}"
        page["latency"] = {
            "title": f"{name}, against load",
            "key": f"{target.metric} {target.percentile}",
            "svg": charts.render_svg(chart),
            "note": f"{latency.axis}. Band: 80% interval. The curve is analytical, scaled to the plan's"
            " own figure.",
        }
    if costs and answer.chosen:
        chart = charts_cockpit.plot_cost_over_load(
            costs.unit, costs.points, costs.here, costs.own, width
        )
        unit = "$ per hour" if costs.unit.startswith("USD") else "GPUs"
        page["cost"] = {
            "title": "Cost against load",
            "svg": charts.render_svg(chart),
            "note": f"{costs.axis}; {unit} of the cheapest plan, analytical.",
        }
    best, day, billing = answer.best, answer.autoscaling, answer.billing
    if best and not best.is_overloaded and not answer.is_estimate and day and billing:
        paid = "; ".join(f"{way} {format_usd(usd)} a day" for way, usd in billing.usd.items())
        page["day"] = {
            "title": "Replicas over the day",
            "svg": charts.render_svg(charts.plot_day(day)),
            "note": f"{words.describe_day(answer)} {paid or 'No price is known'}.",
        }
    return page
