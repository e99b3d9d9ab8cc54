"""Charts of the cockpit as plain Vega-Lite, as building them with Altair is slow.

Their colours are the page's CSS variables, so that one drawing serves light and dark.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from planner.core.intervals import Interval
from planner.core.number_format import format_number

CHART_HEIGHT_PX = 178
MARGIN_PX = 64
"""Width beside the plotted area: labels of the y axis and names at the ends of lines."""
MIN_PLOT_WIDTH_PX = 200
MAX_DRAWN_LIMIT_FACTOR = 1.7
"""Largest latency that is drawn, as a multiple of its limit."""
VegaSpec = dict[str, Any]
_CONFIG: VegaSpec = {
    "background": "transparent",
    "font": "sans-serif",
    "view": {"stroke": "transparent"},
    "padding": {"left": 4, "right": 12, "top": 16, "bottom": 2},
}

_DOT: VegaSpec = {
    "type": "point", "filled": True, "size": 90, "opacity": 1, "color": "var(--blue)",
}  # fmt: skip


PRINT_COLORS = {
    "blue": "#3b7dd8", "ink": "#1d2330", "ink2": "#4a5261", "ink3": "#7b8494", "line": "#e3e6eb",
    "line2": "#c9ced6", "warn-dot": "#e0802f",
}  # fmt: skip
"""What the page's variables are on paper."""


def color_for_print(spec: VegaSpec) -> VegaSpec:
    """Return a chart in the colours of paper, where the page's variables are unknown."""
    text = re.sub(r"var\(--([\w-]+)\)", lambda name: PRINT_COLORS[name[1]], json.dumps(spec))
    return dict(json.loads(text))


def plot_latency_over_load(
    curve: Sequence[tuple[float, float, float, float]],
    offered: float,
    limit: float,
    value: Interval,
    width: int,
) -> VegaSpec:
    """Plot a latency over the load, and its `value` at `offered`; `limit` and `value` are in ms.

    `curve` has rows of load, lo, mid and hi in seconds. The limit is a line; above it the band is
    amber. What lies beyond `MAX_DRAWN_LIMIT_FACTOR` times the limit is cut off.
    """
    top = max(MAX_DRAWN_LIMIT_FACTOR * limit, 1.1 * value.mid)
    data = pd.DataFrame(curve, columns=["x", "lo", "mid", "hi"])
    data[["lo", "mid", "hi"]] *= 1e3
    data["hi"] = data["hi"].clip(upper=top)
    data["low"], data["under"] = data["lo"].clip(upper=limit), data["hi"].clip(upper=limit)
    data["over"] = data["lo"].clip(lower=limit, upper=top)
    over = data[data["hi"] > data["over"]]
    spot = {"x": offered, "lo": value.lo, "mid": value.mid, "hi": min(value.hi, top)}
    x = _encode_load([0, max(float(data["x"].max()), offered) * 1.03])
    y = {
        "type": "quantitative",
        "title": None,
        "scale": {"domain": [0, top], "nice": False},
        "axis": _grid_axis(),
    }
    height = y | {"field": "mid"}
    last = data.iloc[-1]
    layers = [
        {
            "mark": {"type": "area", "color": "var(--blue)", "opacity": 0.14, "clip": True},
            "encoding": {"x": x, "y": y | {"field": "low"}, "y2": {"field": "under"}},
        },
        {
            **_wrap_values(over.to_dict("records")),
            "mark": {"type": "area", "color": "var(--warn-dot)", "opacity": 0.3, "clip": True},
            "encoding": {"x": x, "y": y | {"field": "over"}, "y2": {"field": "hi"}},
        },
        _rule("y", limit, {"color": "var(--ink)", "strokeWidth": 1.4}),
        _rule("x", offered, {"color": "var(--ink2)", "strokeDash": [2, 3]}),
        {
            "mark": {"type": "line", "color": "var(--blue)", "strokeWidth": 2.4, "clip": True},
            "encoding": {"x": x, "y": height},
        },
        {
            **_wrap_values([spot]),
            "mark": {"type": "rule", "color": "var(--blue)", "strokeWidth": 2},
            "encoding": {"x": x, "y": y | {"field": "lo"}, "y2": {"field": "hi"}},
        },
        {
            **_wrap_values([spot]),
            "mark": _DOT,
            "encoding": {"x": x, "y": height},
        },
        _text(0, limit, f"limit {limit:,.10g} ms", "var(--ink)", dx=5, dy=-7),
        _text(
            offered, top, f"{format_number(offered, 3)} now", "var(--ink)", align="center", dy=-8
        ),
        _text(
            offered, spot["mid"], f"{format_number(value.mid, 2)} ms", "var(--blue)", dx=9, dy=13
        ),
    ]
    if last["mid"] < top:
        layers.append(
            _text(last["x"], last["mid"], "expected", "var(--blue)", align="right", dy=-9)
        )
    return _build_chart(data, layers, width)


def plot_cost_over_load(
    unit: str, costs: Sequence[tuple[float, float, str]], offered: float, paid: float | None, width: int
) -> VegaSpec:  # fmt: skip
    """Plot the least cost over the load, in steps named by their GPUs, and the cost of the plan."""
    flat = pd.DataFrame(costs, columns=["x", "cost", "what"])
    last, left = flat[flat["what"] != flat["what"].shift(-1)], flat["x"].iloc[0]
    right = max(float(flat["x"].max()), offered)
    # a name ends at the end of its step, where the space above and to the left is free
    begins = last["x"].shift(fill_value=left)
    wide = last[(last["x"] - begins) > 0.14 * right]
    x = _encode_load([0, right * 1.03])
    y = {
        "field": "cost",
        "type": "quantitative",
        "title": None,
        "scale": {"domainMin": 0, "domainMax": float(flat["cost"].max()) * 1.15, "nice": False},
        "axis": _grid_axis()
        | ({"labelExpr": "'$' + datum.label"} if unit.startswith("USD") else {}),
    }
    layers = [
        {
            "mark": {
                "type": "line",
                "interpolate": "step-before",
                "color": "var(--blue)",
                "strokeWidth": 2.2,
            },
            "encoding": {"x": x, "y": y},
        },
        {
            **_wrap_values(wide.to_dict("records")),
            "mark": {
                "type": "text",
                "align": "right",
                "dx": -3,
                "dy": -8,
                "fontSize": 11,
                "color": "var(--ink2)",
            },
            "encoding": {"x": x, "y": y, "text": {"field": "what"}},
        },
        _rule("x", offered, {"color": "var(--ink2)", "strokeDash": [2, 3]}),
    ]
    if paid is not None:
        layers.append(
            {
                **_wrap_values([{"x": offered, "cost": paid}]),
                "mark": _DOT,
                "encoding": {"x": x, "y": y},
            }
        )
    return _build_chart(flat, layers, width)


def _build_chart(data: pd.DataFrame, layers: list[VegaSpec], width: int) -> VegaSpec:
    return {
        "config": _CONFIG,
        **_wrap_values(data.to_dict("records")),
        "width": max(width - MARGIN_PX, MIN_PLOT_WIDTH_PX),
        "height": CHART_HEIGHT_PX,
        "layer": layers,
    }


def _wrap_values(rows: list[dict[Any, Any]]) -> VegaSpec:
    return {"data": {"values": rows}}


def _rule(axis: str, value: float, mark: VegaSpec) -> VegaSpec:
    return {
        **_wrap_values([{axis: value}]),
        "mark": {"type": "rule", **mark},
        "encoding": {axis: {"field": axis, "type": "quantitative"}},
    }


def _text(
    x: float, y: float, text: str, color: str, *, align: str = "left", dx: int = 0, dy: int = 0
) -> VegaSpec:
    return {
        **_wrap_values([{"x": x, "mid": y, "text": text}]),
        "mark": {
            "type": "text", "align": align, "color": color, "fontWeight": "bold", "fontSize": 11,
            "dx": dx, "dy": dy,
        },
        "encoding": {
            "x": {"field": "x", "type": "quantitative"},
            "y": {"field": "mid", "type": "quantitative"},
            "text": {"field": "text"},
        },
    }  # fmt: skip


def _encode_load(domain: list[float]) -> VegaSpec:
    return {
        "field": "x",
        "type": "quantitative",
        "title": None,
        "scale": {"domain": domain, "nice": False},
        "axis": {
            "grid": False, "tickCount": 6, "ticks": False, "labelPadding": 5, "labelFontSize": 11,
            "domainColor": "var(--line2)", "labelColor": "var(--ink3)",
        },
    }  # fmt: skip


def _grid_axis() -> VegaSpec:
    return {
        "tickCount": 4, "ticks": False, "domain": False, "labelFontSize": 11,
        "gridColor": "var(--line)", "labelColor": "var(--ink3)",
    }  # fmt: skip
