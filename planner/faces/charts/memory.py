"""Charts of the VRAM chapter beside the budget bar: sweeps with their status, and sequences by length."""

from __future__ import annotations

import altair as alt
import pandas as pd

from planner.faces.charts.base import BAD, GOOD, MUTED, PALETTE, ends, lines

STATUS = {"ok": GOOD, "at_risk": PALETTE[1], "does_not_fit": BAD}


def sweep(data: pd.DataFrame, chosen: float | None = None, log: bool = False) -> alt.TopLevelMixin:
    """The second column against the first, with its 80 % band, dots coloured by `status`, and a rule at `chosen`."""
    x, y = data.columns[:2]
    dots = data.drop(columns=y).assign(mid=ends(data[y])["mid"])
    scale = alt.Scale(domain=list(STATUS), range=list(STATUS.values()))
    points = alt.Chart(dots).mark_point()
    points = points.encode(
        x=alt.X(x, scale=alt.Scale(type="log" if log else "linear", nice=False)),
        y=alt.Y("mid", scale=_from_zero(dots["mid"])),
        color=alt.Color("status", title=None, scale=scale),
    )
    layers = [lines(data, x, y, log=log), points]
    if chosen is not None:
        layers.append(alt.Chart(pd.DataFrame({x: [chosen]})).mark_rule(strokeDash=[2, 3]).encode(x=x))
    return alt.layer(*layers).properties(height=140)


def _from_zero(values: pd.Series) -> alt.Scale:
    """An axis from zero; where nothing is above it, zero still lies at its foot."""
    return alt.Scale(domain=[0, float(values.max()) or 1.0])


def residuals(data: pd.DataFrame) -> alt.TopLevelMixin:
    """Per public log (`validation.residuals`): the planned 80 % interval as a bar, what was logged as a dot."""
    drawn = data[["log"]].assign(
        lo=ends(data["interval (%)"])["lo"],
        hi=ends(data["interval (%)"])["hi"],
        error=data["error (%)"],
        logged=data["inside"].map({True: "logged, inside", False: "logged, outside"}),
    )
    base = alt.Chart(drawn, height=alt.Step(11)).encode(
        y=alt.Y("log", title=None, sort=None, axis=alt.Axis(labelLimit=300))
    )
    bars = base.mark_bar(color=MUTED, opacity=0.45, height=7).encode(
        x=alt.X("lo", title="logged minus planned KV cache (% of the budget); bar: planned 80 % interval"), x2="hi"
    )
    scale = alt.Scale(domain=["logged, inside", "logged, outside"], range=[GOOD, BAD])
    return bars + base.mark_point().encode(x="error", color=alt.Color("logged", title=None, scale=scale))


def sequences(data: pd.DataFrame) -> alt.TopLevelMixin:
    """How many sequences fit, by their length."""
    base = alt.Chart(data, height=alt.Step(30)).encode(
        x=alt.X(
            "sequences", title="sequences that fit at once in one engine", scale=_from_zero(data["sequences"] * 1.1)
        ),
        y=alt.Y("length", title=None, sort=None),
    )
    return base.mark_bar() + base.mark_text(align="left", dx=4).encode(text=alt.Text("sequences", format=",d"))
