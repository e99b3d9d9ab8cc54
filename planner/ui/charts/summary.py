"""Charts of a plan: its SLOs, its day, the costs of candidates, and the scores of frameworks."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from planner.core.intervals import Interval
from planner.planning.autoscaling import AutoscalingPlan
from planner.ui.charts.base import (
    CATEGORY_COLORS,
    CHART_WIDTH_PX,
    MUTED_COLOR,
    VIOLATED_COLOR,
    encode_color,
)

LOAD_CURVE_SIZE_PX = 300, 150
"""Width and height of the chart of one target, half a page wide."""
MAX_CURVE_SHARE = 1.7
"""Where the axis of a target ends, as a share of its limit or of the plan's own latency."""


def plot_load_curve(
    curve: Sequence[tuple[float, float, float, float]],
    load: str,
    here: float,
    own: Interval,
    limit: float,
) -> alt.TopLevelMixin:
    """Plot a latency over the load with its limit, and the plan with its interval.

    `curve` has rows of load, lo, mid and hi in seconds, as `own` and `limit` are.
    """
    scale, (width, height) = 1e3 if limit < 1 else 1.0, LOAD_CURVE_SIZE_PX
    top = MAX_CURVE_SHARE * max(limit, own.mid) * scale
    data = pd.DataFrame(curve, columns=["load", "lo", "mid", "hi"])
    data[["lo", "mid", "hi"]] *= scale
    data = data[data["lo"] <= top]
    end, blue = max(float(data["load"].iloc[-1]), here), CATEGORY_COLORS[0]
    side: dict[str, Any] = (
        {"align": "right", "dx": -8} if here > 0.75 * end else {"align": "left", "dx": 8}
    )
    spot = pd.DataFrame(
        [
            {
                "load": here,
                "lo": own.lo * scale,
                "mid": own.mid * scale,
                "hi": min(own.hi * scale, top),
            }
        ]
    )
    x = alt.X(
        "load:Q", title=load, scale=alt.Scale(domain=[0, end], nice=False),
        axis=alt.Axis(grid=False, tickCount=5),
    )  # fmt: skip
    axis = alt.Axis(tickCount=4, domain=False)
    y = alt.Y("mid:Q", title=None, scale=alt.Scale(domain=[0, top], nice=False), axis=axis)
    base, point = alt.Chart(data), alt.Chart(spot)

    def write(x: float, y: float, text: str, **style: Any) -> alt.Chart:
        where = pd.DataFrame([{"load": x, "mid": y, "text": text}])
        return alt.Chart(where).mark_text(**style).encode(x="load:Q", y="mid:Q", text="text:N")

    rule = alt.Chart(pd.DataFrame([{"limit": limit * scale}])).mark_rule(
        strokeDash=[5, 4], color=VIOLATED_COLOR
    )
    inside = data[data["mid"] <= top]
    return alt.layer(
        base.mark_area(opacity=0.15, color=blue, clip=True).encode(
            x=x, y=alt.Y("lo:Q", title=None), y2="hi:Q"
        ),
        base.mark_line(color=blue, clip=True).encode(x=x, y=y),
        rule.encode(y="limit:Q"),
        point.mark_rule(color=blue, strokeWidth=2).encode(x=x, y=alt.Y("lo:Q"), y2="hi:Q"),
        point.mark_point(color=blue, filled=True, opacity=1, size=80).encode(x=x, y=y),
        write(0, limit * scale, "limit", align="left", dx=4, dy=-7, color=VIOLATED_COLOR),
        write(here, own.mid * scale, "this plan", **side, dy=9, fontWeight="bold", color=blue),
        write(
            float(inside["load"].iloc[-1]), float(inside["mid"].iloc[-1]), "expected", align="left", dx=4,
            color=blue,
        ),
    ).properties(width=width, height=height)  # fmt: skip


ARRIVALS_LABEL, CAPACITY_LABEL, FIXED_FLEET_LABEL = (
    "comes",
    "its replicas may take",
    "the fixed fleet may take",
)


def plot_day(scaling: AutoscalingPlan) -> alt.TopLevelMixin:
    """Plot the requests/s of each hour as bars below the capacity of its replicas."""
    each, hours = scaling.max_replica_rps, len(scaling.rates)
    data = pd.DataFrame(
        {
            "hour": range(hours),
            "rate": scaling.rates,
            "replicas": scaling.replicas,
            "what": ARRIVALS_LABEL,
        }
    )
    data = data.assign(end=data["hour"] + 1, taken=data["replicas"] * each)
    steps = pd.concat([data, data[-1:].assign(hour=hours)]).assign(what=CAPACITY_LABEL)
    changes = data[data["replicas"] != data["replicas"].shift()]
    fixed = [
        {"hour": at, "taken": scaling.deployment.layout.replicas * each, "what": FIXED_FLEET_LABEL}
        for at in (0, hours)
    ]
    x = alt.X(
        "hour:Q",
        title="hour",
        scale=alt.Scale(domain=[0, hours], nice=False),
        axis=alt.Axis(tickCount=8),
    )
    color = encode_color(
        "what:N",
        {
            ARRIVALS_LABEL: CATEGORY_COLORS[0],
            CAPACITY_LABEL: CATEGORY_COLORS[1],
            FIXED_FLEET_LABEL: MUTED_COLOR,
        },
    )
    bars = alt.Chart(data).mark_bar(opacity=0.55)
    height = alt.Y("taken:Q", title="requests/s")
    line = alt.Chart(steps).mark_line(interpolate="step-after")
    text = alt.Chart(changes).mark_text(align="left", dx=3, dy=-7, color="currentColor")
    dashes = alt.Chart(pd.DataFrame(fixed)).mark_line(strokeDash=[5, 4])
    return alt.layer(
        bars.encode(
            x=x, x2="end", y=alt.Y("rate:Q", title="requests/s"), y2=alt.datum(0), color=color
        ),
        dashes.encode(x=x, y=height, color=color),
        line.encode(x=x, y=height, color=color),
        text.encode(x=x, y=height, text="replicas:Q"),
    ).properties(width=CHART_WIDTH_PX, height=190)
