"""A chart of a day: the load of each hour, and the capacity of its replicas."""

import altair as alt
import pandas as pd

from planner.planning.autoscaling import AutoscalingPlan
from planner.ui.charts.base import CATEGORY_COLORS, CHART_WIDTH_PX, MUTED_COLOR, encode_color

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
