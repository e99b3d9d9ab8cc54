"""Format a sweep for the terminal: how many points meet the targets, then the first rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.core.files import list_columns
from planner.core.intervals import Interval
from planner.core.number_format import format_number, format_probability, format_usd
from planner.core.redaction import redact_text
from planner.core.text import format_columns, format_count
from planner.engines.layout import ParallelLayout
from planner.ui.terminal import TerminalStyle

VERDICT_WORDS = {"holds": "meets targets", "at_risk": "at risk", "nothing_meets": "misses"}
"""How the table's verdicts are written where there is room."""
BAR_COLUMNS = 16
ESTIMATE_NOTE = (
    "Estimates are in closed form: `replay: true` and `headroom plan` simulate, and may choose"
    " another GPU, layout or number of replicas."
)
MAX_ASSUMED = 4
"""Texts about what is assumed that are shown; points with lengths of their own have one each."""


def format_sweep(
    points: Sequence[Mapping[str, Any]],
    metrics: Sequence[str],
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
    columns = ("cheapest", "probability", "gpu", "gpus_rented", "layout", "usd_per_month", *metrics)
    shown = [name for name in columns if name in known or name == "layout"]
    heads = [*(name.removeprefix("set.") for name in fields), "verdict"]
    heads += [
        name.replace("usd_per_month", "USD/month").replace("_ms_", " ms ").replace("_", " ")
        for name in shown
    ]
    rows: list[Sequence[str]] = [
        [*heads, style.choose("● of the tightest ▏ limit", "o of the tightest | limit")]
    ]
    for row in points[:max_rows]:
        cells = [redact_text(format_setting(row.get(name))) for name in fields]
        cells.append(f"{_describe_verdict(row)}{' (estimate)' * _is_estimate(row)}")
        figures = {**row, "layout": _format_layout(row)}
        cells += [_format_figure(name, figures.get(name)) for name in shown]
        use = row.get("margin")
        bar = use is not None and style.draw_bar(Interval.from_value(use), BAR_COLUMNS)
        cells.append(bar or "")
        rows.append(cells)
    more = f"\n... and {len(points) - max_rows:,} more" * (len(points) > max_rows)
    notes = [_count_cheapest(points), ESTIMATE_NOTE * any(map(_is_estimate, points))]
    assumed = dict.fromkeys(f"Assumed: {text}" for row in points if (text := row.get("assumed")))
    notes += [*assumed][:MAX_ASSUMED]
    ending = "".join(f"\n{note}" for note in notes if note)
    return f"{_summarize(points)}\n\n{format_columns(rows)}{more}" + f"\n{ending}" * bool(ending)


def _format_layout(row: Mapping[str, Any]) -> str:
    """Return the parallel sizes, replicas and weights of a row; empty where it has none."""
    if "tp" not in row:
        return ""
    layout = ParallelLayout(*(row[name] for name in ("tp", "pp", "dp", "ep", "dcp", "replicas")))
    return f"{layout}, {row['quantization']}".removesuffix(", none")


def _count_cheapest(points: Sequence[Mapping[str, object]]) -> str:
    """Count how often each GPU is the cheapest that holds; empty where none is."""
    kinds = [str(row.get("gpu")) for row in points if row.get("cheapest") == "yes"]
    counts = ", ".join(
        f"{kind} {format_count(kinds.count(kind), 'time')}" for kind in dict.fromkeys(kinds)
    )
    return f"The cheapest GPU that holds, of points that differ in it alone: {counts}." * bool(
        kinds
    )


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
    formats: dict[str, Callable[[float], str]] = {
        "probability": format_probability,
        "usd_per_month": format_usd,
    }
    return (
        formats[name](value)
        if name in formats and isinstance(value, float)
        else _format_cell(value)
    )


def _summarize(points: Sequence[Mapping[str, object]]) -> str:
    """Count the points by verdict, and name the cheapest that meets the targets."""
    words = [_describe_verdict(row) for row in points]
    forms = {
        "meets targets": ("meets the targets", "meet the targets"),
        "misses": ("misses one", "miss one"),
        "error": ("error", "errors"),
    }
    counts = ", ".join(
        format_count(words.count(word), *forms.get(word, (word, word)))
        for word in dict.fromkeys(sorted(words))
    )
    text = f"{format_count(len(points), 'point')}: {counts}."
    prices = [
        price
        for row, word in zip(points, words, strict=True)
        if word == "meets targets"
        and isinstance(price := row.get("usd_per_month"), float)
        and price >= 0
    ]
    loads = {"set.workload.rate", "set.workload.concurrency"}
    if not prices or not loads.isdisjoint(list_columns(points)):  # the least load is the cheapest
        return text
    return f"{text} The cheapest that meets the targets costs {format_usd(min(prices))}/month."


def _is_estimate(row: Mapping[str, object]) -> bool:
    """Return whether the figures of a point are analytical, not simulated."""
    return row.get("figures") == "closed form" and row.get("status") != "does_not_fit"


def _describe_verdict(row: Mapping[str, object]) -> str:
    verdict = row.get("verdict")
    return VERDICT_WORDS.get(verdict, verdict) if isinstance(verdict, str) else str(row["status"])


def _format_cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 99_950 else format_number(value)
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)
