"""A Prometheus's series of a plan's traffic, as planned or with one thing wrong, as promtool's rule tests want them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from planner.deploy.alerts import (
    build_slo_alerts,
    compute_alert_thresholds,
    get_prometheus_job,
    quote_promql,
)
from planner.engines.metric_names import get_metric_names
from planner.latency.speculative_decoding import compute_planned_acceptance
from planner.planning.prediction import Prediction
from planner.planning.slo import SloTarget


class Traffic:
    """Series of a Prometheus every other minute, for two hours: as planned, until a fact of it is changed."""

    def __init__(self, prediction: Prediction, targets: Sequence[SloTarget]) -> None:
        self.prediction, self.targets = prediction, targets
        self.names = get_metric_names(self.prediction.deployment.engine).names
        self.model = self.prediction.deployment.model.served_name
        found = self.prediction.performance
        assert found is not None
        self.rate, self.waiting, self.preempted = found.request_tps.mid, 0.0, found.preemptions
        self.up = [1] * self.prediction.deployment.num_replicas
        self.kv = min(found.kv_usage, 0.9)
        self.tokens = found.output_tps.mid
        self.late: dict[str, float] = {}  # share of requests above the edge
        self.mean: dict[str, float] = {}  # seconds
        self.hits, self.accepted = (
            prediction.effective_workload.cache_hit_fraction,
            compute_planned_acceptance(prediction.deployment) or 0.0,
        )

    def series(self) -> list[dict[str, str]]:
        made: dict[str, str] = {}

        def put(name: str | None, value: float, grows: bool, **labels: str) -> None:
            if name is not None:
                pairs = {"model_name": self.model, "instance": "a:1", **labels}
                text = ",".join(f"{key}={quote_promql(shown)}" for key, shown in pairs.items())
                made[f"{name}{{{text}}}"] = (
                    f"0+{value * 120:.6f}x58" if grows else f"{value:.6f}x58"
                )

        for promise in build_slo_alerts(self.prediction, self.targets):
            if promise["histogram"]:
                role = promise["target"].metric
                put(f"{promise['histogram']}_count", self.rate, True)
                mean = self.mean.get(role, 0.5 * promise["target"].seconds)
                put(f"{promise['histogram']}_sum", self.rate * mean, True)
                if promise["edge"]:
                    share = 1 - self.late.get(role, 0.0)
                    put(
                        f"{promise['histogram']}_bucket",
                        self.rate * share,
                        True,
                        le=str(float(promise["edge"])),
                    )
        for role, value in {"success": self.rate, "preemptions": self.rate * self.preempted, "drafted": 100.0,
                            "accepted": 100 * self.accepted, "generation_tokens": self.tokens,
                            "prefix_queries": 100.0, "prefix_hits": 100 * self.hits}.items():  # fmt: skip
            put(self.names[role], value, True)
        put(self.names["kv_usage"], self.kv, False)
        put(
            self.names["running"],
            self.rate * self.prediction.performance.get("e2e", "mean").mid,
            False,
        )
        put(self.names["waiting"], self.waiting, False)
        for place, value in enumerate(self.up):
            made[
                f'up{{job={quote_promql(get_prometheus_job(self.prediction.deployment))},instance="node-{place}"}}'
            ] = f"{value}x58"
        return [{"series": name, "values": values} for name, values in made.items()]


def spoil(traffic: Traffic, alert: str) -> None:
    """What goes wrong so that `alert` fires."""
    for role in ("ttft", "tpot", "itl", "e2e"):
        if alert.startswith(role.capitalize()):
            if alert.endswith("AboveLimit"):
                traffic.mean[role] = 1.1 * max(
                    t.seconds for t in traffic.targets if t.metric == role
                )
                return
            times = 4.0 if alert.endswith("AboveServiceLevel") else 100.0
            share = {
                one["target"].metric: one["budget"]
                for one in build_slo_alerts(traffic.prediction, traffic.targets)
                if one["target"].percentile != "mean"
            }
            traffic.late[role] = min(times * share[role], 1.0)
            return
    limits = compute_alert_thresholds(traffic.prediction, traffic.targets)
    facts: dict[str, Callable[[], dict[str, Any]]] = {
        "ReplicasMissing": lambda: {"up": [0] * len(traffic.up)},
        "KvCacheAbovePlan": lambda: {"kv": (limits["kv_usage"] + 1) / 2},
        "PreemptionsAbovePlan": lambda: {"preempted": 3 * limits["preemptions"]},
        "RequestsWaitTooLong": lambda: {"waiting": 2 * limits["wait"] * traffic.rate},
        "TrafficAbovePlan": lambda: {"rate": 1.2 * limits["rate"]},
        "OutputBelowPlan": lambda: {"tokens": 0.5 * limits["output_tps"], "waiting": 5.0},
        "PrefixHitsBelowPlan": lambda: {"hits": 0.1 * limits["prefix_hits"]},
        "DraftsRejected": lambda: {"accepted": 0.1 * limits["accepted"]},
    }
    vars(traffic).update(facts[alert]())


def rule_tests(prediction: Prediction, targets: Sequence[SloTarget], text: str) -> dict[str, Any]:
    """Tests of the rules in `text` for promtool: no alert when all is as planned, and each when it should."""
    found = [
        rule
        for group in yaml.safe_load(text)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    names = [rule["alert"] for rule in found]
    assert len(set(names)) == len(names) >= 4
    tests = [case(found, Traffic(prediction, targets), lambda _: False)]
    for name in names:
        spoil(traffic := Traffic(prediction, targets), name)
        tests.append(case(found, traffic, lambda seen, name=name: True if seen == name else None))
    return {"rule_files": ["alerts.yml"], "evaluation_interval": "10m", "tests": tests}


def case(
    rules: Sequence[Mapping[str, Any]], traffic: Traffic, expected: Callable[[str], bool | None]
) -> dict[str, Any]:
    """What promtool should see of the `rules` under `traffic`: of each alert, whether it fires; None: either."""
    checks = []
    for rule in rules:
        if (fires := expected(rule["alert"])) is not None:
            labels = rule["labels"] | (
                {"instance": "a:1"} if rule["alert"] == "KvCacheAbovePlan" else {}
            )
            if promise := re.search(r'promise="(\w+)"', rule["expr"]):
                labels = labels | {"promise": promise[1]}
            alert = {"exp_labels": _shown(labels), "exp_annotations": _shown(rule["annotations"])}
            checks.append(
                {
                    "eval_time": "110m",
                    "alertname": rule["alert"],
                    "exp_alerts": [alert] if fires else [],
                }
            )
    return {"interval": "2m", "input_series": traffic.series(), "alert_rule_test": checks}


def _shown(texts: Mapping[str, str]) -> dict[str, str]:
    """Labels or annotations once Prometheus has run their templates, of which ours only say two braces."""
    return {name: text.replace('{{"{{"}}', "{{") for name, text in texts.items()}
