"""Charts: one theme, one way to draw. Every function takes results of `planner` and returns an Altair chart."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import altair as alt
import vl_convert

WIDTH, HEIGHT = 560, 260
PALETTE = ["#3b7dd8", "#e0802f", "#2e9e78", "#c9524a", "#8a6fc4", "#b38a3d", "#4fa9bd", "#c96fa3"]
"""Mid-tones that stay apart for colour-blind eyes, on white paper and on a dark screen."""
GOOD, BAD, MUTED = "#2e9e78", "#c9524a", "#8a8f98"


@alt.theme.register("headroom", enable=True)
def theme() -> Any:
    """Text takes the colour of what is around it (`currentColor`), so that a chart suits paper and a dark screen."""
    text = "currentColor"
    font = "Liberation Sans, Arial, Helvetica, sans-serif"
    faint = "#8888884d"
    return {
        "config": {
            "background": "transparent",
            "font": font,
            "view": {"continuousWidth": WIDTH, "continuousHeight": HEIGHT, "discreteWidth": WIDTH, "stroke": None},
            "range": {"category": PALETTE, "heatmap": {"scheme": "viridis"}},
            "title": {"color": text, "fontSize": 12, "anchor": "start", "fontWeight": "bold"},
            "axis": {
                "labelColor": text,
                "titleColor": text,
                "titleFontWeight": "normal",
                "labelFontSize": 11,
                "titleFontSize": 11,
                "gridColor": faint,
                "domainColor": MUTED,
                "tickColor": MUTED,
                "tickCount": 8,
            },
            "legend": {
                "labelColor": text,
                "titleColor": text,
                "titleFontWeight": "normal",
                "labelFontSize": 11,
                "titleFontSize": 11,
                "orient": "top",
            },
            "header": {"labelColor": text, "titleColor": text, "labelFontSize": 11},
            "line": {"strokeWidth": 2},
            "text": {"color": text, "fontSize": 11},
            "rule": {"color": MUTED},
            "bar": {"color": PALETTE[0]},
            "point": {"filled": True, "size": 55},
        }
    }


def svg(chart: alt.TopLevelMixin) -> str:
    """The chart as one SVG element, made offline; marks say what they stand for when the pointer rests on them."""
    drawn = vl_convert.vegalite_to_svg(
        chart.to_dict(), vl_version=alt.SCHEMA_VERSION.removeprefix("v").rsplit(".", 1)[0]
    )
    mark = hashlib.sha1(drawn.encode()).hexdigest()[:8]
    drawn = re.sub(r'(id="|url\(#)((?:clip|gradient)\w*)', rf"\g<1>{mark}-\2", drawn)  # several charts share a page
    return re.sub(
        r'(<path aria-label="([^"]*)" role="[^"]*" aria-roledescription="(?!line|area)[^>]*)/>', _with_title, drawn
    )


def _with_title(match: re.Match[str]) -> str:
    text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.3g}", match[2])
    return f"{match[1]}><title>{text}</title></path>"
