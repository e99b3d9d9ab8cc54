"""Monitor a plan: what, at which thresholds, for alerts, runbook and Grafana dashboard.

An SLO is checked at the lowest bucket edge of the engine's histogram at or above its limit: a
request above that edge was certainly slower, whereas a quantile interpolated between two edges
may be off by the whole bucket. Burn rates and windows are those of Google's SRE workbook,
"Alerting on SLOs" (2018): 2% of a month's budget in an hour, 5% in six hours.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml
from markupsafe import Markup

from planner.core.templates import quote_promql, render_template
from planner.engines.deployment import Deployment
from planner.engines.metric_names import get_metric_names, load_failure_modes
from planner.latency.speculative_decoding import compute_planned_acceptance
from planner.planning.prediction import Prediction
from planner.planning.slo import SloTarget

MONITORING_FILES = ("alerts.yml", "prometheus.yml", "grafana.json", "runbook.md")
"""Files that monitor a plan; they need the names of the engine's metrics."""
BURN_RATE_WINDOWS = ((14.4, "1h", "5m", 0.5), (6.0, "6h", "30m", 0.25))
"""(times the budget, long window, short window, upper bound for a large budget).

The bound is a fraction of the way from the budget to all requests.
"""
MIN_REQUESTS_PER_HOUR = 20
"""Minimum number of requests in an hour for which a fraction of them is meaningful."""
KV_FULL_USAGE = 0.98
"""KV cache usage at which the pool is full: a growing request finds no free block."""


@dataclass(frozen=True)
class SloAlert:
    """One SLO as its histogram can measure it; times in seconds."""

    target: SloTarget
    histogram: str | None  # None: this version has none
    # Requests above it count as late; None for a mean, or beyond all edges.
    bucket_edge_s: float | None
    mean: float  # planned, pessimistic end of its interval

    @property
    def key(self) -> str:
        """Metric and statistic, such as "ttft_p95"."""
        return f"{self.target.metric}_{self.target.percentile}"

    @property
    def bucket_label(self) -> str:
        """The bucket edge as Prometheus clients write it: "0.05", "1.0"."""
        return str(float(self.bucket_edge_s or math.inf))

    @property
    def alert_name(self) -> str:
        """The name of the alert, such as "TtftP95"."""
        return f"{self.target.metric.capitalize()}{self.target.percentile.capitalize()}"

    @property
    def error_budget(self) -> float:
        """The fraction of requests that may be late: 0.05 for a p95, NaN for a mean."""
        statistic = self.target.percentile
        return math.nan if statistic == "mean" else round(1 - int(statistic[1:]) / 100, 4)

    @property
    def burn_rate_rules(self) -> list[tuple[float, str, str]]:
        """(fraction late, long window, short window) that pages; bounded for a large budget."""
        budget = self.error_budget
        return [
            (min(times * budget, budget + (1 - budget) * bound), long, short)
            for times, long, short, bound in BURN_RATE_WINDOWS
        ]


@dataclass(frozen=True)
class AlertThresholds:
    """The values at which gauges and counters deviate from the plan; None for no alert."""

    kv_usage: float | None  # halfway from the plan's p99 to a full pool; None if the plan fills it
    preemptions: float  # per request
    wait: float | None  # seconds in the queue; None if requests queue by design
    rate: float | None  # offered load in requests/s
    output_tps: float | None  # tokens/s while requests are waiting
    prefix_hits: float | None  # fraction of the prompt tokens
    accepted: float | None  # fraction of the drafted tokens


@dataclass(frozen=True)
class MonitoredPool:
    """Replicas that are watched together: all of a plan, or the workers of one pool."""

    role: str  # "prefill" or "decode"; "" where every replica does both
    deployment: Deployment
    promises: Sequence[SloAlert]
    limits: AlertThresholds
    endpoints: Sequence[str]

    @property
    def job(self) -> str:
        """The Prometheus job of its replicas."""
        return get_prometheus_job(self.deployment, self.role)

    @property
    def of(self) -> Callable[..., Markup]:
        """What selects its series in PromQL; pools serve one model, so that their job tells them apart."""
        return build_series_selector(self.deployment, **({"job": self.job} if self.role else {}))

    @property
    def alert_prefix(self) -> str:
        """What its alerts begin with, such as "Prefill"; empty for a whole plan."""
        return self.role.capitalize()

    def watches(self, role: str) -> bool:
        """Tell whether it does what workers of the pool `role` do."""
        return self.role in ("", role)


def split_by_pool(
    whole: MonitoredPool, prefill: Deployment | None, endpoints: Mapping[str, Sequence[str]]
) -> list[MonitoredPool]:
    """Return what is watched of a plan: itself, or the workers of both its pools.

    Each target is watched where its histogram is: TTFT at the prefill workers, the others at the
    decode workers. What a worker measures leaves out the time at the other, so that what it counts
    as late certainly is. `endpoints` are those of each pool.
    """
    if prefill is None:
        return [whole]
    limits = whole.limits
    first = [promise for promise in whole.promises if promise.target.metric == "ttft"]
    rest = [promise for promise in whole.promises if promise not in first]
    received = replace(limits, kv_usage=None, output_tps=None, accepted=None)
    sent = replace(limits, wait=None, rate=None, prefix_hits=None)
    return [
        MonitoredPool("prefill", prefill, first, received, endpoints["prefill"]),
        MonitoredPool("decode", whole.deployment, rest, sent, endpoints["decode"]),
    ]


def build_slo_alerts(prediction: Prediction, targets: Sequence[SloTarget]) -> list[SloAlert]:
    """Return each SLO with its histogram and bucket edge."""
    performance = prediction.performance
    metric_names = get_metric_names(prediction.deployment.engine)
    assert performance is not None
    edges = [
        next((edge for edge in metric_names.buckets.get(t.metric, ()) if edge >= t.seconds), None)
        if t.percentile != "mean"
        else None
        for t in targets
    ]
    return [
        SloAlert(
            target,
            metric_names.names.get(target.metric),
            edge,
            performance.get(target.metric, "mean").hi,
        )
        for target, edge in zip(targets, edges, strict=True)
    ]


def compute_alert_thresholds(
    prediction: Prediction, targets: Sequence[SloTarget]
) -> AlertThresholds:
    """Return the thresholds beyond which production deviates from the simulation."""
    performance, load = prediction.performance, prediction.effective_workload
    assert performance is not None
    limits = [target.seconds for target in targets if target.metric == "ttft"]
    hits, accepted = load.cache_hit_fraction, compute_planned_acceptance(prediction.deployment)
    paced = load.rate is not None
    return AlertThresholds(
        kv_usage=(
            (performance.kv_usage_p99 + 1) / 2 if performance.kv_usage_p99 < KV_FULL_USAGE else None
        ),
        preemptions=max(2 * performance.preemptions, performance.preemptions + 0.05),
        wait=max([*limits, performance.get("ttft", "p99").hi]) if paced else None,
        rate=1.1 * load.rate if load.rate is not None else None,
        output_tps=None if paced else performance.output_tps.lo,
        prefix_hits=hits / 2 if hits >= 0.05 else None,
        accepted=None if accepted is None else 0.8 * accepted,
    )


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


def build_series_selector(deployment: Deployment, **own: str) -> Callable[..., Markup]:
    """Return a function that selects this model's series in PromQL: of("up", le="1.0").

    `own` are labels beside the model's name that all of them have.
    """

    def of(metric: str, **labels: str) -> Markup:
        pairs = {"model_name": deployment.served_name, **own, **labels}
        return Markup(
            f"{metric}{{{','.join(f'{key}={quote_promql(value)}' for key, value in pairs.items())}}}"
        )

    return of


def get_prometheus_job(deployment: Deployment, role: str = "") -> str:
    """Return the Prometheus job of the plan's replicas, or of the workers of a pool."""
    return f"headroom/{deployment.model.name}" + (f"/{role}" if role else "")


def list_metrics_endpoints(
    replicas: int, port: int, per_node: int = 1, nodes: int = 1, role: str = ""
) -> list[str]:
    """Return HOST:PORT of the /metrics page of every replica.

    `per_node` replicas share a node, with ports from `port` up, or one replica spans `nodes` nodes.
    Nodes are called node-0, node-1, ..., or prefill-0, ... for a pool; a single one is localhost.
    """
    name = role or "node"
    if nodes > 1:
        return [f"{name}-{k * nodes}:{port}" for k in range(replicas)]
    host = f"{name}-{{}}" if role or replicas > per_node else "localhost"
    return [f"{host.format(k // per_node)}:{port + k % per_node}" for k in range(replicas)]


def build_monitoring_values(
    prediction: Prediction, targets: Sequence[SloTarget], endpoints: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return the additional values of the `MONITORING_FILES` templates.

    `endpoints` lists the /metrics endpoints of the plan's replicas by their pool, "" without any.
    """
    deployment = prediction.deployment
    engine_metric_names = get_metric_names(deployment.engine)
    promises = build_slo_alerts(prediction, targets)
    limits = compute_alert_thresholds(prediction, targets)
    whole = MonitoredPool("", deployment, promises, limits, endpoints.get("", ()))
    return {
        "metrics": engine_metric_names.names, "without": engine_metric_names.without,
        "promises": promises, "limits": limits, "fewest": MIN_REQUESTS_PER_HOUR,
        "watched": split_by_pool(whole, prediction.prefill, endpoints),
        "recorded": build_series_selector(deployment), "job": whole.job,
        "planned_hits": prediction.effective_workload.cache_hit_fraction,
        "planned_acceptance": compute_planned_acceptance(deployment),
        "modes": (
            load_failure_modes(engine_metric_names.names, deployment.engine.name)
            if engine_metric_names.names
            else {}
        ),
    }  # fmt: skip


def render_dashboard(values: Mapping[str, Any]) -> str:
    """Render `grafana.json`: expected values and SLOs behind the metrics; panels: `grafana.yaml.j2`."""
    title = values["title"]
    panels = yaml.safe_load(render_template("deploy", "grafana.yaml", **values))
    uid = f"headroom-{hashlib.sha256(title.encode()).hexdigest()[:16]}"
    dashboard = json.loads(
        render_template("deploy", "grafana.json", title=title, uid=uid, panels=panels)
    )
    return json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"
