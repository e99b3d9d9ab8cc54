"""Format a sweep for the terminal: how many points meet the targets, then the first rows."""

import json
import re
from collections.abc import Mapping, Sequence

from planner.core.errors import require_extra
from planner.core.files import list_columns
from planner.core.intervals import Interval
from planner.core.number_format import format_number, format_probability, format_usd
from planner.core.text import format_columns, format_count
from planner.engines.layout import ParallelLayout
from planner.tools.sweep.runner import GPU_FIELDS
from planner.ui.terminal import TerminalStyle

VERDICT_WORDS = {"at_risk": "at risk", "nothing_meets": "nothing meets"}
"""How the table's verdicts are written where there is room."""
DEFAULT_METRICS = ("ttft_ms_p95", "tpot_ms_p95")
BAR_COLUMNS = 16
MAX_ASSUMED = 4
"""Texts about what is assumed that are shown; points with lengths of their own have one each."""


def format_sweep(
    points: Sequence[Mapping[str, object]],
    metrics: Sequence[str] = DEFAULT_METRICS,
    style: TerminalStyle | None = None,
    max_rows: int = 60,
) -> str:
    """Return the finding and the first rows of a sweep.

    `metrics` are the columns of the latencies that the scenario limits. A bar shows how much of its
    tightest limit a point uses.
    """
    style = style or TerminalStyle()
    known = list_columns(points)
    fields = [name for name in known if name.startswith("set.")]
    columns = ("cheapest", "probability", "gpu", "gpus_rented", "layout", "usd_per_hour", *metrics)
    points = [{**row, "layout": _format_layout(row)} for row in points]
    shown = [name for name in columns if name in known or name == "layout"]
    has_bars = "margin" in known
    basis = "used" if any(map(_is_simulated, points)) else "estimate"
    key = style.choose(f"● {basis} ▏ limit", f"o {basis} | limit")
    heads = [*(name.removeprefix("set.") for name in fields), "verdict"]
    heads += [name.replace("_ms_", " ms ").replace("_", " ") for name in shown] + [key] * has_bars
    rows: list[Sequence[str]] = [heads]
    for row in points[:max_rows]:
        cells = [format_setting(row.get(name)) for name in fields]
        verdict = f"{_describe_verdict(row)}{' (estimate)' * _is_estimate(row)}"
        cells += [verdict, *(_format_figure(name, row.get(name)) for name in shown)]
        share = row.get("margin")
        if has_bars:
            use = share if isinstance(share, float) and 0 <= share < float("inf") else None
            bar = "" if use is None else style.draw_bar(Interval.from_value(use), BAR_COLUMNS)
            cells.append(bar)
        rows.append(cells)
    more = f"\n... and {len(points) - max_rows:,} more" * (len(points) > max_rows)
    notes = "\n".join(
        filter(None, (_describe_cheapest(points), _describe_choice(points), _list_assumed(points)))
    )
    return f"{_summarize(points)}\n\n{format_columns(rows)}{more}" + f"\n\n{notes}" * bool(notes)


def _format_layout(row: Mapping[str, object]) -> str:
    """Return the parallel sizes, replicas and weights of a row; empty where it has none."""
    sizes = [row.get(name) for name in ("tp", "pp", "dp", "ep", "dcp", "replicas")]
    if not all(isinstance(size, int | float) and size == size for size in sizes):
        return ""
    layout = ParallelLayout(*(int(str(size).partition(".")[0]) for size in sizes))
    method = row.get("quantization")
    return str(layout) if method == "none" else f"{layout}, {method}"


def _describe_cheapest(points: Sequence[Mapping[str, object]]) -> str:
    """Count at how many loads each GPU is the cheapest that holds; empty where GPUs do not vary."""
    kinds = [str(row.get("gpu")) for row in points if row.get("cheapest") == "yes"]
    if not kinds:
        return ""
    counts = ", ".join(
        f"{kind} {format_count(kinds.count(kind), 'time')}" for kind in dict.fromkeys(kinds)
    )
    kind_fields = tuple(f"set.{name}" for name in GPU_FIELDS)
    fields = [name for name in list_columns(points) if name.startswith("set.")]
    fields = [name for name in fields if not name.startswith(kind_fields)]
    num_groups = len({tuple(str(row.get(name)) for name in fields) for row in points})
    none = f", none {format_count(num_groups - len(kinds), 'time')}" * (num_groups > len(kinds))
    return f"The cheapest GPU that holds, of points that differ in it alone: {counts}{none}."


def _describe_choice(points: Sequence[Mapping[str, object]]) -> str:
    """Say that a simulation may choose otherwise than the closed form; empty where none chose."""
    chose = any(
        isinstance(limit := row.get("binding"), str) and limit and _is_estimate(row)
        for row in points
    )
    return (
        "Chosen in closed form: `headroom plan` and `replay: true` simulate, and may choose another"
        " GPU, layout or number of replicas."
        if chose
        else ""
    )


def _list_assumed(points: Sequence[Mapping[str, object]]) -> str:
    """List what is assumed at any point, each once."""
    texts = dict.fromkeys(
        str(text) for row in points if isinstance(text := row.get("assumed"), str) and text
    )
    shown = [f"Assumed: {text}" for text in list(texts)[:MAX_ASSUMED]]
    more = len(texts) - len(shown)
    return "\n".join([*shown, *[f"... and {more:,} more in the column `assumed`"] * (more > 0)])


def format_setting(value: object) -> str:
    """Return a field's value in short: "H100 (up to 32)" for a list of GPUs."""
    if isinstance(value, str) and value.startswith("["):
        entries = json.loads(value)
        if all(isinstance(entry, dict) and {*entry} >= {"gpu", "at_most"} for entry in entries):
            return ", ".join(f"{entry['gpu']} (up to {entry['at_most']})" for entry in entries)
    if isinstance(value, str) and value.startswith("{"):
        return ", ".join(f"{name} {_format_cell(each)}" for name, each in json.loads(value).items())
    return _format_cell(value)


def _format_figure(name: str, value: object) -> str:
    if name == "probability" and isinstance(value, float) and value == value:
        return format_probability(value)
    return _format_cell(value)


def _summarize(points: Sequence[Mapping[str, object]]) -> str:
    """Count the points by verdict, and name the cheapest that meets the targets."""
    words = [_describe_verdict(row) for row in points]
    forms = {
        "holds": ("meets the targets", "meet the targets"),
        "nothing meets": ("misses one", "miss one"),
        "error": ("error", "errors"),
    }
    counts = ", ".join(
        format_count(words.count(word), *forms.get(word, (word, word)))
        for word in dict.fromkeys(sorted(words))
    )
    text = f"{format_count(len(points), 'point')}: {counts}.{_describe_estimates(points)}"
    prices = [
        price
        for row, word in zip(points, words, strict=True)
        if word == "holds" and isinstance(price := row.get("usd_per_hour"), float) and price >= 0
    ]
    loads = {"set.workload.rate", "set.workload.concurrency"}
    if not prices or not loads.isdisjoint(list_columns(points)):  # the least load is the cheapest
        return text
    return f"{text} The cheapest that meets the targets costs {format_usd(min(prices))}/h."


def _is_simulated(row: Mapping[str, object]) -> bool:
    return row.get("figures") == "replay"


def _is_estimate(row: Mapping[str, object]) -> bool:
    """Return whether the figures of a point are analytical, not simulated."""
    return row.get("figures") == "closed form" and row.get("status") != "does_not_fit"


def _describe_estimates(points: Sequence[Mapping[str, object]]) -> str:
    """Describe how many points are analytical estimates; empty if none is."""
    num_estimates = sum(map(_is_estimate, points))
    if not num_estimates:
        return ""
    if not any(map(_is_simulated, points)):
        return " All are analytical estimates, not simulations; `replay: true` simulates them."
    return f" Analytical estimates, not simulations: {num_estimates:,}."


def _describe_verdict(row: Mapping[str, object]) -> str:
    verdict = row.get("verdict")
    return VERDICT_WORDS.get(verdict, verdict) if isinstance(verdict, str) else str(row["status"])


def _format_cell(value: object) -> str:
    if isinstance(value, float):
        return (
            "" if value != value else f"{value:,.0f}" if value >= 99_950 else format_number(value)
        )
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)


def _shorten(cells: list[str]) -> list[str]:
    """Return the cells without how many GPUs there may be, if they still differ."""
    short = [re.sub(r" \(up to \d+\)", "", cell) for cell in cells]
    return short if len({*short}) == len({*cells}) else cells


def draw_sweep(
    points: Sequence[Mapping[str, object]], metrics: Sequence[str] = DEFAULT_METRICS
) -> str | None:
    """Return the chart of a sweep as SVG: cost by load, or the first of `metrics` at one cost.

    None where no field is a number, or too many vary.
    """
    with require_extra("report", "the chart"):
        from planner.ui.charts.base import render_svg
        from planner.ui.charts.sweep import plot_sweep

    fields = {
        name.removeprefix("set."): _shorten([format_setting(row.get(name)) for row in points])
        for name in list_columns(points)
        if name.startswith("set.")
    }
    has_costs = len({row.get("usd_per_hour") for row in points} - {None}) > 1
    chart = plot_sweep(points, fields, "usd_per_hour" if has_costs else next(iter(metrics), ""))
    return render_svg(chart) if chart else None
