"""Charts of batching: one request's life, what moves with load and limits, what a long prompt does to the others."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt
import pandas as pd

from planner.charts import BAD, MUTED, PALETTE, WIDTH, lines
from planner.steady import Performance

FAR = 3
"""What is more than so many times its limit is left out of a panel: it would flatten the rest."""


def request(performance: Performance, tokens: float, shown: int = 10) -> alt.TopLevelMixin:
    """A mean request in time: up to its first token, then the first `shown` of its `tokens`, and when it ends."""
    first, gap, last = (getattr(performance, metric)["mean"].mid * 1e3 for metric in ("ttft", "itl", "e2e"))
    arrivals = [first + gap * n for n in range(max(min(shown, round(tokens)), 2))]
    scale = alt.Scale(domain=[0, arrivals[-1] + gap], nice=False)
    x = alt.X("ms:Q", title="ms after the request was sent", scale=scale)

    def at(y: float, ms: list[float], text: str = "", **more: list[float]) -> alt.Chart:
        return alt.Chart(pd.DataFrame({"ms": ms, **more}), height=84).encode(x=x, y=alt.value(y), text=alt.value(text))

    end = f"... {tokens:,.0f} tokens: E2E {last / 1e3:,.2f} s"
    return alt.layer(
        at(42, [0], end=[first]).mark_bar(height=22, color=PALETTE[1]).encode(x2="end"),
        at(42, arrivals).mark_tick(thickness=2, size=22, color=PALETTE[0]),
        at(20, [0], f"TTFT {first:,.0f} ms").mark_text(align="left", dx=2, color="currentColor"),
        at(66, [arrivals[0]], end=[arrivals[1]]).mark_rule(strokeWidth=2, color=PALETTE[0]).encode(x2="end"),
        at(78, [arrivals[0]], f"ITL {gap:,.1f} ms").mark_text(align="left", color="currentColor"),
        at(20, [arrivals[-1] + gap], end).mark_text(align="right", dx=-4, color="currentColor"),
    )


def panels(
    data: pd.DataFrame, x: str, limits: Mapping[str, float | None], marks: Mapping[str, float] | None = None,
    log: bool = True,
) -> alt.TopLevelMixin:  # fmt: skip
    """One panel for each column in `limits`, its limit dashed; `marks` names places on the x axis."""
    stacked = []
    for y, limit in limits.items():
        near = data if limit is None else data[[value.mid <= FAR * limit for value in data[y]]]
        panel = lines((near if len(near) > 1 else data)[[x, y]], x, y, limit=limit, log=log)
        for name, at in (marks or {}).items():
            spot = alt.Chart(pd.DataFrame({"at": [at], "name": [name]})).encode(x=alt.X("at:Q", title=x))
            late = at * at > data[x].min() * data[x].max() if log else 2 * at > data[x].max()
            panel += spot.mark_rule(color=MUTED, strokeDash=[2, 3])
            text = spot.mark_text(color="currentColor", align="right" if late else "left", dx=-4 if late else 4)
            panel += text.encode(y=alt.value(7), text="name")
        stacked.append(panel.properties(width=WIDTH, height=150))
    return alt.vconcat(*stacked)


def gaps(cases: Mapping[str, pd.DataFrame], pace: float | None = None) -> alt.TopLevelMixin:
    """Each token that others receive: when it comes, and how long they waited for it; a panel per case."""
    rows = [
        data.assign(case=name, mid=[gap.mid for gap in data["Gap (ms)"]], lo=[gap.lo for gap in data["Gap (ms)"]],
                    hi=[gap.hi for gap in data["Gap (ms)"]])
        for name, data in cases.items()
    ]  # fmt: skip
    flat = pd.concat(rows).drop(columns="Gap (ms)").assign(pace=pace)
    flat["kind"] = flat["Prompt in it"].map({True: "step with part of the prompt", False: "decode step"})
    scale = alt.Scale(domain=["decode step", "step with part of the prompt"], range=PALETTE[:2])
    kind = alt.Color("kind", title=None, scale=scale)
    base = alt.Chart(flat).encode(x=alt.X("ms:Q", title="ms after the long prompt arrived"))
    height = alt.Y("mid:Q", title="gap (ms)", axis=alt.Axis(tickCount=4))
    layers = [
        base.mark_rule(strokeWidth=1.5).encode(y=height, color=kind),
        base.mark_rule(strokeWidth=6, opacity=0.25).encode(y="lo:Q", y2="hi:Q", color=kind),
        base.mark_point(size=30).encode(y="mid:Q", color=kind),
    ]
    if pace is not None:
        layers.append(base.mark_rule(strokeDash=[5, 4], color=BAD).encode(x=alt.X(), y="pace:Q"))
    above = alt.Header(labelOrient="top", labelAnchor="start", labelAngle=0)
    rows_of = alt.Row("case", title=None, sort=list(cases), header=above)
    return alt.layer(*layers).properties(width=WIDTH, height=90).facet(row=rows_of)
