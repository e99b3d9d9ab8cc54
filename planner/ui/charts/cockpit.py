"""Charts of the cockpit as plain Vega-Lite, as building them with Altair is slow."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from planner.core.intervals import Interval
from planner.ui.charts.base import (
    CATEGORY_COLORS,
    MAX_DRAWN_UTILIZATION,
    MUTED_COLOR,
    VEGA_THEME,
    VIOLATED_COLOR,
    split_intervals,
)

COCKPIT_WIDTH_PX, COCKPIT_HEIGHT_PX, COCKPIT_PANEL_HEIGHT_PX = 430, 150, 105
"""Size of a chart, and the height of each panel if there are more than two."""
VegaSpec = dict[str, Any]


def plot_live_latency(
    curves: pd.DataFrame,
    load: str,
    here: float,
    limits: Mapping[str, float],
    plan: Mapping[str, Interval],
) -> VegaSpec:
    """Plot each latency with an SLO over the load: limit dashed, and the plan with its interval."""
    panels = []
    for y, limit in limits.items():
        top = MAX_DRAWN_UTILIZATION * max(limit, plan[y].mid)
        data = pd.DataFrame({"load": curves[load], **split_intervals(curves[y])})
        data = data[data["mid"] <= top].assign(hi=data["hi"].clip(upper=top))
        spot = [{"load": here, "lo": plan[y].lo, "mid": plan[y].mid, "hi": min(plan[y].hi, top)}]
        height = {"field": "mid", "type": "quantitative", "title": y, "axis": {"tickCount": 4}}
        low = {"field": "lo", "type": "quantitative", "title": y}
        interval = {"x": _encode_load_axis(load), "y": low, "y2": {"field": "hi"}}
        layers = [
            {"mark": {"type": "area", "opacity": 0.15}, "encoding": interval},
            {"mark": "line", "encoding": {"x": _encode_load_axis(load), "y": height}},
            {
                **_wrap_values([{"limit": limit}]),
                "mark": _LIMIT_MARK | {"color": VIOLATED_COLOR},
                "encoding": {"y": _escape_plain_field("limit")},
            },
            {
                **_wrap_values(spot),
                "mark": {"type": "rule", "color": CATEGORY_COLORS[1], "strokeWidth": 2},
                "encoding": interval,
            },
            {
                **_wrap_values(spot),
                "mark": _POINT_MARK,
                "encoding": {"x": _encode_load_axis(load), "y": height},
            },
        ]
        size = COCKPIT_HEIGHT_PX if len(limits) < 3 else COCKPIT_PANEL_HEIGHT_PX
        panels.append(
            {
                **_wrap_values(data.to_dict("records")),
                "width": COCKPIT_WIDTH_PX,
                "height": size,
                "layer": layers,
            }
        )
    return {"config": VEGA_THEME, "vconcat": panels, "spacing": 12}


def plot_live_cost(data: pd.DataFrame, load: str, here: float, paid: float | None) -> VegaSpec:
    """Plot the least cost over the load, in steps named by their GPUs, and the cost of the plan."""
    unit = str(data.columns[1])
    flat = pd.DataFrame({"load": data[load], "cost": data[unit], "what": data["Deployment"]})
    last, left = flat[flat["what"] != flat["what"].shift(-1)], flat["load"].iloc[0]
    # a name ends at the end of its step, where the space above and to the left is free
    begins = last["load"].shift(fill_value=left)
    wide = last[(last["load"] > 1.3 * begins) & (last["load"] > 2 * left)]
    spot = _wrap_values([{"load": here, "cost": paid}])
    height = {"field": "cost", "type": "quantitative", "title": unit, "axis": {"tickCount": 5}}
    both = {"x": _encode_load_axis(load), "y": height}
    # the rule ends at the plan, as the name of its step is above
    below = {} if paid is None else {"y": height, "y2": {"datum": 0}}
    named = {
        "type": "text",
        "align": "right",
        "dx": -3,
        "dy": -8,
        "fontSize": 10,
        "color": "currentColor",
    }
    layers = [
        {"mark": {"type": "line", "interpolate": "step-before"}, "encoding": both},
        {
            **_wrap_values(wide.to_dict("records")),
            "mark": named,
            "encoding": both | {"text": {"field": "what"}},
        },
        {
            **spot,
            "mark": _LIMIT_MARK | {"color": MUTED_COLOR},
            "encoding": {"x": _encode_load_axis(load)} | below,
        },
        *([] if paid is None else [{**spot, "mark": _POINT_MARK, "encoding": both}]),
    ]
    values = _wrap_values(flat.to_dict("records"))
    return {
        "config": VEGA_THEME,
        "width": COCKPIT_WIDTH_PX,
        "height": COCKPIT_HEIGHT_PX,
        **values,
        "layer": layers,
    }


_LIMIT_MARK: VegaSpec = {"type": "rule", "strokeDash": [5, 4]}
_POINT_MARK: VegaSpec = {"type": "point", "color": CATEGORY_COLORS[1], "size": 110, "filled": True}


def _wrap_values(rows: list[dict[Any, Any]]) -> VegaSpec:
    return {"data": {"values": rows}}


def _escape_plain_field(field: str) -> VegaSpec:
    return {"field": field, "type": "quantitative"}


def _encode_load_axis(load: str) -> VegaSpec:
    scale = {"type": "log", "nice": False, "padding": 8}
    return _escape_plain_field("load") | {
        "title": load,
        "scale": scale,
        "axis": {"tickCount": 5, "format": "~g"},
    }
