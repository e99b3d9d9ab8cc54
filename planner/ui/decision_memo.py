"""The decision memo: the first two pages of a report, and the head of the summary notebook.

Plain words for a reader who signs: what to rent, what it costs, how likely it meets the targets, what
else there is. What it says is `templates/memo.j2`; `MEMO_MIME_TYPE` carries it to the report.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from markupsafe import Markup

from planner import __version__
from planner.answers import Answer, Offer, words
from planner.core.files import get_report_date
from planner.core.templates import render_template
from planner.hardware.prices import HOURS_PER_MONTH, GpuPrice
from planner.planning.slo import list_benchmark_targets
from planner.ui.charts.base import MUTED_COLOR, SLO_STATUS_COLORS, render_svg
from planner.ui.charts.cockpit import color_for_print, plot_latency_over_load
from planner.ui.notebook_widgets import escape_html
from planner.ui.plan_text import render_page

MEMO_MIME_TYPE = "application/vnd.headroom.memo+json"
MAX_OPTIONS, MAX_CHANGES, CHART_PX = 3, 7, 364
MIN_LABEL_DISTANCE = 0.11
"""Least distance of two named sellers, as a share of the dearest price."""
MAX_SHARE = 9.0
"""Largest share of a limit that is told; bars end before."""


@dataclass(frozen=True)
class Memo:
    """What both pages say: the fields that `memo.typ` and `memo.html.j2` show."""

    fields: dict[str, Any]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        html = render_template(
            "ui",
            "memo.html",
            memo=self.fields,
            color={**SLO_STATUS_COLORS, "": MUTED_COLOR}[self.fields["state"]],
            escape=lambda text: Markup(escape_html(text)),
        )
        return {MEMO_MIME_TYPE: self.fields, "text/html": html}


def build_memo(answer: Answer) -> Memo:
    """Build the memo of an answer, with its what-ifs where they are there."""
    best, curve = answer.best, answer.curve
    fields = render_page(
        "memo",
        answer=answer,
        options=list(islice(_list_options(answer), MAX_OPTIONS)),
        judged=list_benchmark_targets(answer.scenario.slo_targets),
        date=f"{get_report_date():%-d %B %Y}",
        version=__version__,
        max_share=MAX_SHARE,
        max_changes=MAX_CHANGES,
    )
    fields |= {"sellers": [], "median_usd": 0.0}
    if best and (price := best.price) and len(price.quotes) > 2:
        hours = best.num_gpus_billed * (best.run_hours.mid if best.run_hours else HOURS_PER_MONTH)
        fields |= {"sellers": _list_sellers(price, hours), "median_usd": price.median_usd * hours}
    fields["chart"] = ""
    if curve:
        limit_ms, own_ms = curve.target.seconds * 1e3, curve.own * 1e3
        drawn = plot_latency_over_load(curve.points, curve.here, limit_ms, own_ms, CHART_PX)
        fields["chart"] = render_svg(color_for_print(drawn))
    return Memo(fields)


def _list_options(answer: Answer) -> Iterator[tuple[str, Offer | None]]:
    """List the recommendation and what stands beside it by role; if nothing meets, the ways out."""
    if answer.chosen is None:
        ways = [(name, offer) for name, offer in answer.changed_offers if offer]
        yield from sorted(ways, key=lambda way: way[1].rank_key)
        return
    is_api = answer.api_comparison is not None and answer.api_comparison.is_api_cheaper
    if is_api:
        yield "recommended", None
    own = "GPUs" if is_api else "recommended"
    others = [(own, answer.chosen), ("cheaper", answer.measure_first or answer.cheaper)]
    others += [("safer", answer.safer)]
    own_gpu = answer.chosen.deployment.gpu
    kinds = [each.candidate for each in answer.by_gpu if not each.reason and each.gpu != own_gpu]
    others += [("another GPU", answer.offer(each)) for each in kinds]
    names = {True: "another format", False: "another GPU"}
    others += [(names[each.is_format], each.offer) for each in answer.unlisted]
    others += [("next best", answer.runner_up)]
    shown = set[str]()
    for role, offer in others:
        if offer and words.describe_gpus(offer) not in shown:
            shown.add(words.describe_gpus(offer))
            yield role, offer


def _list_sellers(price: GpuPrice, hours: float) -> list[tuple[str, float, bool]]:
    """List sellers with their bill, and whether the name has room on the line."""
    cheapest: dict[str, float] = {}
    for quote in sorted(price.quotes, key=lambda quote: quote.usd):
        cheapest.setdefault(quote.seller, quote.usd * hours)
    prices, named = list(cheapest.values()), list[int]()
    for k in (0, len(prices) - 1, *range(1, len(prices) - 1)):
        if all(abs(prices[k] - prices[j]) > MIN_LABEL_DISTANCE * prices[-1] for j in named):
            named.append(k)
    return [(seller, usd, k in named) for k, (seller, usd) in enumerate(cheapest.items())]
