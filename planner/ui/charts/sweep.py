"""The chart of a sweep: its cost, or a latency, over the field that varies most."""

from collections.abc import Mapping, Sequence

import altair as alt
import pandas as pd

from planner.ui.charts.base import CHART_WIDTH_PX, encode_color

UNITS = {
    "workload.rate": "requests/s", "workload.concurrency": "users", "workload.prompt_tokens": "tokens",
    "workload.output_tokens": "tokens", "headroom": "share of the capacity", "deployment.tp": "GPUs",
}  # fmt: skip
"""Units of the fields of a scenario that are numbers."""
WIDE_RANGE = 8
"""Figures that differ by a larger factor are drawn on a logarithmic axis."""
MAX_SERIES = 8
"""More combinations of the other fields are no chart to read."""


def plot_sweep(
    points: Sequence[Mapping[str, object]], fields: dict[str, list[str]], metric: str
) -> alt.LayerChart | None:
    """Plot `metric` of `points` over their numeric field with the most values.

    `fields` are the cells of each varied field. The other fields are the colors; points that are at
    risk or miss a target are hollow, and no line leads to them; the cheapest GPU is ringed. None if
    no field is a number, or for too many colors.
    """
    table = pd.DataFrame(points)
    numeric = [
        name
        for name in fields
        if pd.api.types.is_numeric_dtype(table[f"set.{name}"])
        and table[f"set.{name}"].nunique() > 1
    ]
    if not numeric or metric not in table:
        return None
    x = max(numeric, key=lambda name: table[f"set.{name}"].nunique())
    others = [cells for name, cells in fields.items() if name != x and len(set(cells)) > 1]
    series = [", ".join(cells) for cells in zip(*others, strict=True)] or [metric] * len(table)
    data = pd.DataFrame({
        "x": table[f"set.{x}"], "y": table[metric], "series": series,
        "meets": table["verdict"] == "holds",
        "cheapest": table["cheapest"] == "yes" if "cheapest" in table else False,
    }).dropna()  # fmt: skip
    names = list(dict.fromkeys(data["series"]))
    if not 1 <= len(names) <= MAX_SERIES:
        return None
    spans = data["x"].max() / data["x"].min() if data["x"].min() > 0 else 0.0
    rises = data["y"].max() / data["y"].min() if data["y"].min() > 0 else 0.0
    title = "USD per hour" if metric == "usd_per_hour" else metric.replace("_ms_", " ms ")
    base = alt.Chart(data, width=CHART_WIDTH_PX, height=260).encode(
        x=alt.X(
            "x:Q",
            title=f"{x} ({UNITS[x]})" if x in UNITS else x,
            scale=alt.Scale(type="log" if spans > WIDE_RANGE else "linear", nice=False),
        ),
        y=alt.Y(
            "y:Q",
            title=title.replace("_", " "),
            scale=alt.Scale(type="log") if rises > WIDE_RANGE else alt.Scale(zero=True),
        ),
        color=encode_color("series:N", names).legend(labelLimit=0, columns=2),
    )
    meeting = base.transform_filter("datum.meets")
    failing = base.transform_filter("!datum.meets").mark_point(size=70, filled=False)
    cheapest = base.transform_filter("datum.cheapest").mark_point(size=240, filled=False)
    points = meeting.mark_point(size=70, filled=True)
    return meeting.mark_line(opacity=0.6) + points + failing + cheapest
