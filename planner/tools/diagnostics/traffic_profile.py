"""What production sends, as a scenario's workload: from an access log, or from the histograms of /metrics pages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from planner.core.errors import PlannerError
from planner.tools.diagnostics.metrics_pages import measure_replica, read_metrics_page
from planner.workload.length_distribution import LengthDistribution
from planner.workload.traces import read_trace
from planner.workload.workload import Workload

LOG_SUFFIXES = (".csv", ".tsv", ".jsonl", ".gz")
"""How the names of access logs end; whatever else is given is a page."""


def build_traffic_profile(sources: Sequence[str | Path], seconds: float | None = None) -> str:
    """The `workload` of a scenario, YAML: lengths with mean, p50 and p95, and requests/s.

    `sources` is an access log (CSV or JSON lines with a time, prompt and output tokens, as
    `read_trace` takes them), or one or two /metrics pages of a replica, `seconds` apart. Raises
    `PlannerError` for what says no rate or lengths.
    """
    known: dict[str, Any] = {}
    if len(sources) == 1 and str(sources[0]).endswith(LOG_SUFFIXES):
        trace = read_trace(sources[0]).select_busiest_hour()
        load = Workload.from_trace(trace)
        known["burstiness"] = float(f"{trace.burstiness:.2g}")
        text = f"{trace}; plan for the rate of your busiest hour"
    else:
        metrics = measure_replica(
            [read_metrics_page(source) for source in sources], seconds=seconds
        )
        told = metrics.estimate_workload()
        if told is None:
            missing = (
                "lengths of prompts or answers"
                if metrics.seconds
                else "the time between the pages: add --seconds"
            )
            raise PlannerError(f"{sources[-1]} does not say {missing}")
        load, known = told, {}
        how = "two pages" if len(sources) == 2 else "one page, since the server's start"
        text = (
            f"{metrics.requests:,.0f} requests of one replica, {how}; multiply the rate by your"
            " replicas"
        )
        if load.prefix_hit_rate >= 0.01:
            known["shared_prefix"] = {"tokens": round(load.mean_cached_tokens), "hit_rate": 1.0}
    fields = {
        "prompt_tokens": _format_lengths(load.prompt),
        "output_tokens": _format_lengths(load.output),
    }
    workload = {**fields, "rate": float(f"{load.rate or 0.0:.3g}"), **known}
    return f"# {text}.\n{yaml.safe_dump({'workload': workload}, sort_keys=False, default_flow_style=None)}"


def _format_lengths(lengths: LengthDistribution) -> dict[str, Any]:
    """Mean, p50 and p95 as far as a scenario can be planned with them."""
    mean, p50, p95 = (round(value, 1) for value in (lengths.mean, lengths.p50, lengths.p95))
    for figures in (
        {"mean": mean, "p50": p50, "p95": p95},
        {"mean": mean, "p95": p95},
        {"mean": mean, "p50": p50},
    ):
        try:
            LengthDistribution.from_lognormal(mean, figures.get("p95"), figures.get("p50"))
            return figures
        except PlannerError:
            continue
    return {"mean": mean}
