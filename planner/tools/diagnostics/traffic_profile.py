"""Describe recorded traffic as a scenario's workload, from an access log or /metrics pages."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from planner.core.errors import PlannerError
from planner.tools.diagnostics.metrics_pages import measure_replica, read_metrics_page
from planner.workload.length_distribution import LengthDistribution
from planner.workload.traces import read_trace
from planner.workload.workload import Workload

LOG_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".gz")
"""Suffixes of access logs; any other file is a page."""


def build_traffic_profile(sources: Sequence[str | Path], seconds: float | None = None) -> str:
    """Return the `workload` of a scenario as YAML: lengths by mean, p50 and p95, and requests/s.

    `sources` is an access log (CSV or JSON lines with times, prompt and output tokens, or spans, see
    `read_trace`), or one or two /metrics pages of a replica, `seconds` apart. Raises `PlannerError`
    if they do not state the rate or the lengths.
    """
    known: dict[str, object] = {}
    if len(sources) == 1 and str(sources[0]).endswith(LOG_SUFFIXES):
        trace = read_trace(sources[0]).select_busiest_hour()
        load = Workload.from_trace(trace)
        known["burstiness"] = float(f"{trace.burstiness:.2g}")
        if trace.has_block_ids:
            cached = trace.prefix_hit_rate * load.prompt.mean
            known["shared_prefix"] = {"tokens": round(cached), "hit_rate": 1.0}
        text = f"{trace}; plan for the rate of your busiest hour"
    else:
        metrics = measure_replica(
            [read_metrics_page(source) for source in sources], seconds=seconds
        )
        measured = metrics.estimate_workload()
        if measured is None:
            missing = "does not say lengths of prompts or answers"
            if not metrics.seconds:
                missing = "does not say the time between the pages: add --seconds"
            elif not metrics.arrived:
                missing = "shows a queue that drains: no request arrived between the pages"
            raise PlannerError(f"{sources[-1]} {missing}")
        load = measured
        how = "two pages" if len(sources) == 2 else "one page, since the server's start"
        text = (
            f"{metrics.requests:,.0f} requests of one replica, {how}; multiply the rate by your"
            " replicas"
        )
        if load.prefix_hit_rate >= 0.01:
            known["shared_prefix"] = {"tokens": round(load.mean_cached_tokens), "hit_rate": 1.0}
    workload = {
        "prompt_tokens": _summarize_lengths(load.prompt),
        "output_tokens": _summarize_lengths(load.output),
        "rate": float(f"{load.rate or 0.0:.3g}"),
        **known,
    }
    fields = yaml.safe_dump({"workload": workload}, sort_keys=False, default_flow_style=None)
    return f"# {text}.\n{fields}"


def _summarize_lengths(lengths: LengthDistribution) -> dict[str, float]:
    """Return mean, p50 and p95, or fewer of them if no lognormal has all."""
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
