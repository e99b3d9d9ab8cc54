"""What to watch of a plan in production, and from where on it is no longer the plan: for alerts, dashboard and runbook.

A promise is held against the lowest edge of the engine's histogram at or above its limit: what lies
above that edge surely took longer, where a quantile interpolated between two edges may be off by
the whole bucket. Burn rates and their windows are those of Google's SRE workbook, "Alerting on
SLOs" (2018): 2% of a month's budget in an hour, 5% in six hours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from markupsafe import Markup

from planner.core.templates import quote_promql
from planner.engines.deployment import Deployment
from planner.engines.failure_modes import load_failure_modes
from planner.engines.metric_names import get_metric_names
from planner.latency.speculative_decoding import compute_planned_acceptance
from planner.planning.prediction import Prediction
from planner.planning.slo import SloTarget

if TYPE_CHECKING:
    import pandas as pd

MONITORING_FILES = ("alerts.yml", "prometheus.yml", "grafana.json", "runbook.md")
"""What watches a plan, where the engine's metrics are known."""
BURN_RATE_WINDOWS = ((14.4, "1h", "5m", 0.5), (6.0, "6h", "30m", 0.25))
"""(times the budget, long window, short window, share of the way to all requests where the budget is a large one)."""
MIN_REQUESTS_PER_HOUR = 20
"""Requests in an hour from which on a share of them says something."""
KV_FULL_USAGE = 0.98
"""KV usage from which on the pool is full: a request that grows finds no block."""


@dataclass(frozen=True)
class SloAlert:
    """One target of the service level as its histogram can see it; times in seconds."""

    target: SloTarget
    histogram: str | None  # None: this version has none
    bucket_edge_s: (
        float | None
    )  # where requests are counted as late; None for a mean, or beyond all edges
    mean: float  # planned, the high end of its interval

    @property
    def key(self) -> str:
        """ "ttft_p95"."""
        return f"{self.target.metric}_{self.target.percentile}"

    @property
    def bucket_label(self) -> str:
        """The edge as Prometheus clients write it, "0.05" or "1.0"."""
        return str(float(self.bucket_edge_s or math.inf))

    @property
    def alert_name(self) -> str:
        """ "TtftP95"."""
        return f"{self.target.metric.capitalize()}{self.target.percentile.capitalize()}"

    @property
    def error_budget(self) -> float:
        """The share of requests that may be late: 0.05 of a p95."""
        at = self.target.percentile
        return math.nan if at == "mean" else round(1 - int(at[1:]) / 100, 4)

    @property
    def burn_rate_rules(self) -> list[tuple[float, str, str]]:
        """(share late, long window, short window) that pages: no share can be `BURNS` times a large budget."""
        return [(min(times * self.error_budget, self.error_budget + (1 - self.error_budget) * most), long, short)
                for times, long, short, most in BURN_RATE_WINDOWS]  # fmt: skip


@dataclass(frozen=True)
class AlertThresholds:
    """Where each gauge and counter leaves the plan; None where there is nothing to watch."""

    kv_usage: float | None  # halfway from the plan's p99 to a full pool; None: the plan fills it
    preemptions: float  # per request
    wait: float | None  # seconds that waiting requests wait; None where work queues by design
    rate: float | None  # requests/s that arrive
    output_tps: float | None  # tokens/s while requests wait
    prefix_hits: float | None  # share of the prompt tokens
    accepted: float | None  # share of the drafted tokens


def build_slo_alerts(prediction: Prediction, targets: Sequence[SloTarget]) -> list[SloAlert]:
    """Every target with its histogram and edge."""
    performance, engine_metric_names = (
        prediction.performance,
        get_metric_names(prediction.deployment.engine),
    )
    assert performance is not None
    edges = [
        (
            engine_metric_names.find_bucket_edge(each.metric, each.seconds)
            if each.percentile != "mean"
            else None
        )
        for each in targets
    ]
    return [
        SloAlert(
            each,
            engine_metric_names.names.get(each.metric),
            edge,
            performance.get(each.metric, "mean").hi,
        )
        for each, edge in zip(targets, edges, strict=True)
    ]


def compute_alert_thresholds(
    prediction: Prediction, targets: Sequence[SloTarget]
) -> AlertThresholds:
    """From where on production is no longer what was replayed."""
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
        wait=max([*limits, performance.ttft["p99"].hi]) if paced else None,
        rate=1.1 * load.rate if load.rate is not None else None,
        output_tps=None if paced else performance.output_tps.lo,
        prefix_hits=hits / 2 if hits >= 0.05 else None,
        accepted=None if accepted is None else 0.8 * accepted,
    )


def list_alert_rules(rules: str) -> pd.DataFrame:
    """One row per alert of a file of Prometheus `rules`: its name, what it does, after how long, what it means."""
    import pandas as pd

    groups = yaml.safe_load(rules)["groups"]
    found = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    rows = [
        (r["alert"], r["labels"]["severity"], r.get("for", "0m"), r["annotations"]["summary"])
        for r in found
    ]
    return pd.DataFrame(rows, columns=["alert", "severity", "after", "means"])


def build_series_selector(deployment: Deployment) -> Callable[..., Markup]:
    """Series of this plan's model in PromQL: of("up", le="1.0")."""

    def of(metric: str, **labels: str) -> Markup:
        pairs = {"model_name": deployment.model.name, **labels}
        return Markup(
            f"{metric}{{{','.join(f'{key}={quote_promql(value)}' for key, value in pairs.items())}}}"
        )

    return of


def get_prometheus_job(deployment: Deployment) -> str:
    """What Prometheus calls the replicas of this plan."""
    return f"headroom/{deployment.model.name}"


def list_metrics_endpoints(
    replicas: int, port: int, per_node: int = 1, nodes: int = 1
) -> list[str]:
    """HOST:PORT of every replica's /metrics: `per_node` share a machine from `port` up, or one spans `nodes` of them.

    Machines are called node-0, node-1, ...; a single one is localhost.
    """
    if nodes > 1:
        return [f"node-{k * nodes}:{port}" for k in range(replicas)]
    host = "node-{}" if replicas > per_node else "localhost"
    return [f"{host.format(k // per_node)}:{port + k % per_node}" for k in range(replicas)]


def build_monitoring_values(
    prediction: Prediction, targets: Sequence[SloTarget], at: Sequence[str]
) -> dict[str, Any]:
    """What the templates of `FILES` need beside the plan itself; `at`: the `endpoints` of its replicas."""
    deployment = prediction.deployment
    engine_metric_names = get_metric_names(deployment.engine)
    return {
        "metrics": engine_metric_names.names, "without": engine_metric_names.without,
        "promises": build_slo_alerts(prediction, targets),
        "limits": compute_alert_thresholds(prediction, targets), "fewest": MIN_REQUESTS_PER_HOUR,
        "of": build_series_selector(deployment), "job": get_prometheus_job(deployment),
        "endpoints": at, "planned_hits": prediction.effective_workload.cache_hit_fraction,
        "planned_acceptance": compute_planned_acceptance(deployment),
        "modes": load_failure_modes(engine_metric_names.names) if engine_metric_names.names else {},
    }  # fmt: skip
