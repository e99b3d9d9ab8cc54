"""Monitor a plan: what, at which thresholds, for alerts, runbook and Grafana dashboard.

An SLO is checked at the lowest bucket edge of the engine's histogram at or above its limit: a
request above that edge was certainly slower, whereas a quantile interpolated between two edges
may be off by the whole bucket. Burn rates and windows are those of Google's SRE workbook,
"Alerting on SLOs" (2018): 2% of a month's budget in an hour, 5% in six hours.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import yaml
from markupsafe import Markup

from planner.core.templates import quote_promql
from planner.engines.deployment import Deployment
from planner.engines.metric_names import get_metric_names, load_failure_modes
from planner.latency.speculative_decoding import compute_planned_acceptance
from planner.planning.prediction import Prediction
from planner.planning.slo import SloTarget

BURN_RATE_WINDOWS = ((14.4, "1h", "5m", 0.5), (6.0, "6h", "30m", 0.25))
"""(times the budget, long window, short window, upper bound for a large budget).

The bound is a fraction of the way from the budget to all requests.
"""
MIN_REQUESTS_PER_HOUR = 20
"""Minimum number of requests in an hour for which a fraction of them is meaningful."""
KV_FULL_USAGE = 0.98
"""KV cache usage at which the pool is full: a growing request finds no free block."""


def build_slo_alerts(prediction: Prediction, targets: Sequence[SloTarget]) -> list[dict[str, Any]]:
    """Return each SLO as its histogram can measure it; times in seconds.

    `histogram` is None if this version has none, `edge` for a mean, or beyond all edges. `budget` is
    the fraction of requests that may be late, and `burns` has (fraction late, long window, short
    window) that pages, bounded for a large budget.
    """
    names, alerts = get_metric_names(prediction.deployment.engine), list[dict[str, Any]]()
    for target in targets:
        is_mean = target.percentile == "mean"
        edges = () if is_mean else names.buckets.get(target.metric, ())
        budget = math.nan if is_mean else round(1 - int(target.percentile[1:]) / 100, 4)
        alerts.append({
            "target": target, "key": f"{target.metric}_{target.percentile}",
            "name": f"{target.metric.capitalize()}{target.percentile.capitalize()}",
            "histogram": names.names.get(target.metric),
            "edge": next((edge for edge in edges if edge >= target.seconds), None), "budget": budget,
            "burns": [
                (min(times * budget, budget + (1 - budget) * bound), long, short)
                for times, long, short, bound in BURN_RATE_WINDOWS
            ],
        })  # fmt: skip
    return alerts


def compute_alert_thresholds(
    prediction: Prediction, targets: Sequence[SloTarget]
) -> dict[str, float | None]:
    """Return the values at which production deviates from the simulation; None for no alert.

    KV cache usage (none if the plan fills it), preemptions a request, seconds in the queue (none if
    requests queue by design), requests/s, tokens/s while requests wait, and the fractions of the
    prompt tokens that are found in the prefix cache and of the drafted tokens that are accepted.
    """
    performance, load = prediction.performance, prediction.effective_workload
    assert performance is not None
    limits = [target.seconds for target in targets if target.metric == "ttft"]
    hits, accepted = load.cache_hit_fraction, compute_planned_acceptance(prediction.deployment)
    is_full, rate = performance.kv_usage_p99 >= KV_FULL_USAGE, load.rate
    return {
        "kv_usage": None if is_full else (performance.kv_usage_p99 + 1) / 2,
        "preemptions": max(2 * performance.preemptions, performance.preemptions + 0.05),
        "wait": None if rate is None else max([*limits, performance.get("ttft", "p99").hi]),
        "rate": None if rate is None else 1.1 * rate,
        "output_tps": performance.output_tps.lo if rate is None else None,
        "prefix_hits": hits / 2 if hits >= 0.05 else None,
        "accepted": None if accepted is None else 0.8 * accepted,
    }


def list_alert_rules(rules: str) -> list[dict[str, str]]:
    """Return one row per alert of Prometheus `rules`: name, severity, delay and meaning."""
    return [
        {
            "alert": rule["alert"],
            "severity": rule["labels"]["severity"],
            "after": rule.get("for", "0m"),
            "means": rule["annotations"]["summary"],
        }
        for group in yaml.safe_load(rules)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]


def select_series(deployment: Deployment, metric: str, **labels: str) -> Markup:
    """Return what selects this model's series of a metric in PromQL."""
    pairs = {"model_name": deployment.served_name, **labels}
    return Markup(
        f"{metric}{{{','.join(f'{key}={quote_promql(value)}' for key, value in pairs.items())}}}"
    )


def get_prometheus_job(deployment: Deployment) -> str:
    """Return the Prometheus job of the plan's replicas."""
    return f"headroom/{deployment.model.served_name}"


def list_metrics_endpoints(
    replicas: int, port: int, per_node: int = 1, nodes: int = 1
) -> list[str]:
    """Return HOST:PORT of the /metrics page of every replica.

    `per_node` replicas share a node, with ports from `port` up, or one replica spans `nodes` nodes.
    Nodes are called node-0, node-1, ...; a single one is localhost.
    """
    if nodes == 1 and replicas <= per_node:
        return [f"localhost:{port + k}" for k in range(replicas)]
    return [f"node-{k * nodes // per_node}:{port + k % per_node}" for k in range(replicas)]


def build_monitoring_values(
    prediction: Prediction, targets: Sequence[SloTarget], endpoints: Sequence[str]
) -> dict[str, Any]:
    """Return the additional values of the templates that monitor a plan."""
    deployment, known = prediction.deployment, get_metric_names(prediction.deployment.engine)
    return {
        "metrics": known.names, "without": known.without, "endpoints": endpoints,
        "promises": build_slo_alerts(prediction, targets),
        "limits": compute_alert_thresholds(prediction, targets), "fewest": MIN_REQUESTS_PER_HOUR,
        "of": partial(select_series, deployment),
        "planned_hits": prediction.effective_workload.cache_hit_fraction,
        "planned_acceptance": compute_planned_acceptance(deployment),
        "modes": load_failure_modes(known.names, deployment.engine.name) if known.names else {},
    }  # fmt: skip
