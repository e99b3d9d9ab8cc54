"""A chart of the sizes of worker pools."""

import altair as alt
import pandas as pd

from planner.ui.charts.base import CHART_WIDTH_PX, encode_color
from planner.ui.charts.summary import SLO_STATUS_COLORS


def plot_pool_sizes(data: pd.DataFrame) -> alt.TopLevelMixin:
    """Plot limit utilization by the numbers of workers of both pools; the chosen one is framed."""
    base = alt.Chart(data.drop(columns="what is missing")).encode(
        x=alt.X("prefill workers:O", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("decode workers:O", sort="descending"),
    )
    tiles = base.mark_rect(opacity=0.55, stroke="white", strokeWidth=1)
    tiles = tiles.encode(color=encode_color("targets", SLO_STATUS_COLORS, data["targets"]))
    share = alt.Text("share of the tightest limit:Q", format=".0%")
    text = base.mark_text(fontSize=10, dy=-6, color="currentColor").encode(text=share)
    gpus = base.mark_text(fontSize=9, dy=8, color="currentColor").transform_calculate(
        label="datum.GPUs + ' GPUs'"
    )
    ring = base.mark_rect(filled=False, stroke="currentColor", strokeWidth=2).transform_filter(
        "datum.chosen"
    )
    layers = alt.layer(tiles, text, gpus.encode(text="label:N"), ring)
    return layers.properties(width=CHART_WIDTH_PX - 160, height=alt.Step(36))
