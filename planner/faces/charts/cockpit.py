"""Charts of the cockpit, as plain Vega-Lite: a slider waits for them, and Altair would take most of its time."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from planner.core.quantities import Interval
from planner.faces.charts.base import BAD, FAR, MUTED, PALETTE, THEME, ends

WIDTH, HEIGHT, LOW = 430, 150, 105
"""Of a chart; and the height of each panel where there are more than two."""
Spec = dict[str, Any]


def latency(
    curves: pd.DataFrame, load: str, here: float, limits: Mapping[str, float], plan: Mapping[str, Interval]
) -> Spec:
    """One panel for each promised latency against the load: limit dashed, and the plan with its interval."""
    panels = []
    for y, limit in limits.items():
        top = FAR * max(limit, plan[y].mid)
        data = pd.DataFrame({"load": curves[load], **ends(curves[y])})
        data = data[data["mid"] <= top].assign(hi=data["hi"].clip(upper=top))
        spot = [{"load": here, "lo": plan[y].lo, "mid": plan[y].mid, "hi": min(plan[y].hi, top)}]
        height = {"field": "mid", "type": "quantitative", "title": y, "axis": {"tickCount": 4}}
        low = {"field": "lo", "type": "quantitative", "title": y}
        interval = {"x": _across(load), "y": low, "y2": {"field": "hi"}}
        layers = [
            {"mark": {"type": "area", "opacity": 0.15}, "encoding": interval},
            {"mark": "line", "encoding": {"x": _across(load), "y": height}},
            {**_values([{"limit": limit}]), "mark": _DASHED | {"color": BAD}, "encoding": {"y": _plain("limit")}},
            {**_values(spot), "mark": {"type": "rule", "color": PALETTE[1], "strokeWidth": 2}, "encoding": interval},
            {**_values(spot), "mark": _SPOT, "encoding": {"x": _across(load), "y": height}},
        ]
        size = HEIGHT if len(limits) < 3 else LOW
        panels.append({**_values(data.to_dict("records")), "width": WIDTH, "height": size, "layer": layers})
    return {"config": THEME, "vconcat": panels, "spacing": 12}


def cost(data: pd.DataFrame, load: str, here: float, paid: float | None) -> Spec:
    """What the cheapest costs against the load, as steps that name their GPUs; the plan, and what is paid for it."""
    unit = str(data.columns[1])
    flat = pd.DataFrame({"load": data[load], "cost": data[unit], "what": data["Deployment"]})
    last, left = flat[flat["what"] != flat["what"].shift(-1)], flat["load"].iloc[0]
    begins = last["load"].shift(fill_value=left)  # a name ends with its step: above it, and left of it, nothing is
    wide = last[(last["load"] > 1.3 * begins) & (last["load"] > 2 * left)]
    spot = _values([{"load": here, "cost": paid}])
    height = {"field": "cost", "type": "quantitative", "title": unit, "axis": {"tickCount": 5}}
    both = {"x": _across(load), "y": height}
    below = {} if paid is None else {"y": height, "y2": {"datum": 0}}  # above the plan its step has its name
    named = {"type": "text", "align": "right", "dx": -3, "dy": -8, "fontSize": 10, "color": "currentColor"}
    layers = [
        {"mark": {"type": "line", "interpolate": "step-before"}, "encoding": both},
        {**_values(wide.to_dict("records")), "mark": named, "encoding": both | {"text": {"field": "what"}}},
        {**spot, "mark": _DASHED | {"color": MUTED}, "encoding": {"x": _across(load)} | below},
        *([] if paid is None else [{**spot, "mark": _SPOT, "encoding": both}]),
    ]
    values = _values(flat.to_dict("records"))
    return {"config": THEME, "width": WIDTH, "height": HEIGHT, **values, "layer": layers}


_DASHED: Spec = {"type": "rule", "strokeDash": [5, 4]}
_SPOT: Spec = {"type": "point", "color": PALETTE[1], "size": 110, "filled": True}


def _values(rows: list[dict[Any, Any]]) -> Spec:
    return {"data": {"values": rows}}


def _plain(field: str) -> Spec:
    return {"field": field, "type": "quantitative"}


def _across(load: str) -> Spec:
    scale = {"type": "log", "nice": False, "padding": 8}
    return _plain("load") | {"title": load, "scale": scale, "axis": {"tickCount": 5, "format": "~g"}}
