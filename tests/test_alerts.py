"""What watches a plan: promtool accepts the rules, and each fires when it should and is silent when it should be."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_series import Traffic, case, rule_tests

from planner.deploy import render_artifacts
from planner.deploy.alerts import (
    build_slo_alerts,
    compute_alert_thresholds,
    get_prometheus_job,
    list_metrics_endpoints,
)
from planner.engines.deployment import deploy_on
from planner.engines.engine import get_engine
from planner.engines.layout import SpeculationConfig
from planner.engines.metric_names import get_metric_names
from planner.planning.prediction import Prediction, evaluate
from planner.planning.slo import SloTarget
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

SEEN = yaml.safe_load((Path(__file__).parent / "data" / "metric_names.yaml").read_text())
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool (Debian's package prometheus) is not installed"
)
TARGETS = (SloTarget("ttft", "p99", 0.8), SloTarget("tpot", "p95", 0.04), SloTarget("itl", "p95", 0.05),
           SloTarget("e2e", "p50", 20.0), SloTarget("tpot", "mean", 0.03))  # fmt: skip
WORKLOAD = Workload(
    LengthDistribution.from_lognormal(1000, 3000),
    LengthDistribution.from_lognormal(200, 500),
    rate=4.0,
    prefix_tokens=400,
    prefix_hit_rate=0.9,
)
OFFLINE = replace(WORKLOAD, rate=None, concurrency=256, num_prompts=5000, prefix_hit_rate=0.0)


@cache
def planned(kind: str) -> tuple[Prediction, tuple[SloTarget, ...]]:
    name, _, version = kind.partition(" ")
    offline = version == "offline"
    base: dict[str, Any] = {
        "replicas": 2,
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "engine": name,
    }
    base |= {"engine_version": version or None} if not offline else {}
    drafting = SpeculationConfig("ngram", 4, 0.5) if version == "0.33.0" else None
    served = deploy_on("meta-llama/Llama-3.1-8B", "H100", **base, speculation=drafting)
    return evaluate(served, OFFLINE if offline else WORKLOAD), () if offline else TARGETS


KINDS = (
    "vllm 0.20.2", "vllm 0.33.0", "vllm 0.10.0", "vllm 0.8.5", "sglang 0.5.23", "sglang 0.5.4",
    "vllm offline",
)  # fmt: skip


@cache
def files(kind: str) -> dict[str, str]:
    return render_artifacts(*planned(kind))


def rules(kind: str) -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load(files(kind)["alerts.yml"])["groups"]
        for rule in group["rules"]
    ]


def passes(folder: Path, alerts: str, tests: Mapping[str, Any]) -> None:
    """promtool finds that these rules pass their tests."""
    (folder / "alerts.yml").write_text(alerts)
    (folder / "test.yml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@needs_promtool
@pytest.mark.parametrize("kind", ["vllm 0.33.0", "sglang 0.5.23", "vllm offline"])
def test_each_alert_fires_when_it_should_and_none_when_all_is_as_planned(
    tmp_path: Path, kind: str
) -> None:
    text = files(kind)["alerts.yml"]
    passes(tmp_path, text, rule_tests(*planned(kind), text))


@needs_promtool
def test_a_pace_between_two_edges_is_not_taken_for_one_beyond_the_limit(tmp_path: Path) -> None:
    """All at 30 ms, promised 40: a quantile interpolated in 25-50 ms says 48.75. At 45 the mean tells, not the edge."""

    def all_at(seconds: float, expected: Mapping[str, bool]) -> dict[str, Any]:
        traffic = Traffic(*planned("vllm 0.20.2"))
        traffic.mean["tpot"] = seconds
        return case(
            [rule for rule in rules("vllm 0.20.2") if "alert" in rule], traffic, expected.get
        )

    silent = {"TpotP95AboveServiceLevel": False, "TpotP95BurnsItsBudget": False}
    tests = [all_at(0.0299, {**silent, "TpotP95MeanAboveLimit": False}),
             all_at(0.045, {**silent, "TpotP95MeanAboveLimit": True})]  # fmt: skip
    spec = {"rule_files": ["alerts.yml"], "evaluation_interval": "10m", "tests": tests}
    passes(tmp_path, files("vllm 0.20.2")["alerts.yml"], spec)


@needs_promtool
def test_replicas_that_come_and_go_with_the_traffic_are_counted_against_it(tmp_path: Path) -> None:
    """Autoscaled down to one is no alarm by night; two asked for and one there is, and so is none at all."""
    prediction, targets = planned("vllm 0.33.0")
    found = render_artifacts(prediction, targets, wanted=("alerts", "kubernetes"))
    (scale,) = yaml.safe_load_all(found["k8s/scale.yaml"])
    each = float(scale["spec"]["triggers"][0]["metadata"]["threshold"])
    assert scale["spec"]["minReplicaCount"] == 1 and scale["spec"]["maxReplicaCount"] == 2

    def at(up: int, busy: float) -> dict[str, Any]:
        model = prediction.deployment.model.served_name
        labels = f'{{model_name="{model}", instance="a:1"}}'
        series = [
            f'up{{job="{get_prometheus_job(prediction.deployment)}", instance="a:1"}} {up}x60'
        ]
        if up:
            running, waiting = (
                f"vllm:num_requests_running{labels}",
                f"vllm:num_requests_waiting{labels}",
            )
            series = [*series, f"{running} {busy}x60", f"{waiting} 0x60"]
        made = [
            {"series": one.rpartition(" ")[0], "values": one.rpartition(" ")[2].replace("x", "+0x")}
            for one in series
        ]
        rule = next(one for group in yaml.safe_load(found["alerts.yml"])["groups"] for one in group["rules"]
                    if one.get("alert") == "ReplicasMissing")  # fmt: skip
        alarm = {"exp_labels": rule["labels"], "exp_annotations": rule["annotations"]}
        fires = up == 0 or busy > each
        check = {
            "eval_time": "110m",
            "alertname": "ReplicasMissing",
            "exp_alerts": [alarm] if fires else [],
        }
        return {"interval": "2m", "input_series": made, "alert_rule_test": [check]}

    tests = [at(1, each / 2), at(1, 3 * each), at(0, 0.0)]
    passes(
        tmp_path,
        found["alerts.yml"],
        {"rule_files": ["alerts.yml"], "evaluation_interval": "5m", "tests": tests},
    )


@pytest.mark.parametrize("kind", ["vllm 0.33.0", "sglang 0.5.23"])
def test_what_is_scraped_has_the_name_that_alerts_and_dashboard_count(kind: str) -> None:
    found = render_artifacts(
        *planned(kind), wanted=("alerts", "dashboard", "kubernetes", "compose")
    )
    asked = {json.loads(name) for file in ("alerts.yml", "grafana.json")
             for name in re.findall(r'job=("(?:[^"\\]|\\.)*")', found[file].replace('\\"', '"'))}  # fmt: skip
    (scraped,) = yaml.safe_load(found["prometheus.yml"])["scrape_configs"]
    monitor, ruled = yaml.safe_load_all(found["k8s/monitor.yaml"])
    assert ruled["spec"]["groups"] == yaml.safe_load(found["alerts.yml"])["groups"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (relabelled,) = endpoint["relabelings"]
    assert relabelled["targetLabel"] == "job" and asked == {scraped["job_name"]} == {
        relabelled["replacement"]
    }
    services = yaml.safe_load(found["compose.yaml"])["services"].values()
    ports = {f"localhost:{service['ports'][0].split(':')[0]}" for service in services}
    assert ports == set(
        scraped["static_configs"][0]["targets"]
    )  # where compose puts them, Prometheus looks


def test_spares_run_and_are_scraped_and_an_alert_waits_for_what_the_traffic_needs() -> None:
    prediction, targets = planned("vllm 0.33.0")
    spared = replace(prediction, deployment=replace(prediction.deployment, spare_replicas=1))
    kinds = "script alerts dashboard kubernetes compose runpod"
    found = render_artifacts(spared, targets, wanted=kinds.split())
    assert "of the 3 that the plan" in found["serve.sh"] and "at most 3" in found["runpod.env"]
    assert len(yaml.safe_load(found["compose.yaml"])["services"]) == 3
    workload = next(yaml.safe_load_all(found["k8s/serve.yaml"]))
    (scale,) = yaml.safe_load_all(found["k8s/scale.yaml"])
    assert workload["spec"]["replicas"] == scale["spec"]["maxReplicaCount"] == 3
    board = json.loads(found["grafana.json"])
    panel = next(one for one in board["panels"] if one["title"] == "Replicas that answer")
    assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1]["value"] == 2
    assert (
        len(
            yaml.safe_load(found["prometheus.yml"])["scrape_configs"][0]["static_configs"][0][
                "targets"
            ]
        )
        == 3
    )


@needs_promtool
@pytest.mark.parametrize("kind", KINDS)
def test_prometheus_reads_rules_and_configuration(tmp_path: Path, kind: str) -> None:
    for name in ("alerts.yml", "prometheus.yml"):
        (tmp_path / name).write_text(files(kind)[name])
    for what, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run(
            [PROMTOOL, "check", what, tmp_path / name], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS[:2] + KINDS[4:5])
def test_every_name_is_on_that_versions_page(kind: str) -> None:
    known, seen = get_metric_names(get_engine(*kind.split())), set(SEEN[kind]["names"])
    shown_by_its_flag = {"vllm:lora_requests_info"}  # only where adapters are served
    assert {name for name in known.names.values() if name} - shown_by_its_flag <= seen
    for role, edges in known.buckets.items():
        if SEEN[kind]["edges"]:
            assert list(edges) == SEEN[kind]["edges"][known.names[role]], role


def test_late_is_what_is_above_an_edge_that_lies_at_or_above_the_limit() -> None:
    by_key = {promise["key"]: promise for promise in build_slo_alerts(*planned("vllm 0.20.2"))}
    assert (
        by_key["tpot_p95"]["edge"],
        by_key["itl_p95"]["edge"],
        by_key["ttft_p99"]["edge"],
    ) == (
        0.05,
        0.05,
        1.0,
    )
    assert by_key["tpot_mean"]["edge"] is None
    assert {
        promise["key"]: promise["edge"] for promise in build_slo_alerts(*planned("sglang 0.5.4"))
    }["itl_p95"] == 0.06
    text = files("vllm 0.20.2")["alerts.yml"]
    assert (
        "p95 TPOT of at most 40 ms: the histogram has no edge there. Late is what took over 50 ms"
        in text
    )
    assert "p95 ITL of at most 50 ms" not in text.split("groups:")[0]
    assert "histogram_quantile" not in text


def test_no_budget_is_burnt_at_a_rate_that_cannot_be() -> None:
    """14.4 times the budget of a p50 would be more than all requests: such an alert would never fire."""
    for at in ("p50", "p95", "p99"):
        prediction, _ = planned("vllm 0.20.2")
        (promise,) = build_slo_alerts(prediction, (SloTarget("ttft", at, 0.8),))
        assert all(promise["budget"] < share < 1 for share, _, _ in promise["burns"])


def test_offline_work_may_queue() -> None:
    names = {rule["alert"] for rule in rules("vllm offline")}
    assert not names & {"RequestsWaitTooLong", "TrafficAbovePlan"} and "OutputBelowPlan" in names


def test_thresholds_leave_room_for_what_was_planned() -> None:
    for kind in KINDS:
        prediction, targets = planned(kind)
        found, limits = prediction.performance, compute_alert_thresholds(prediction, targets)
        assert found is not None and limits["preemptions"] > found.preemptions
        assert limits["kv_usage"] is None or found.kv_usage_p99 < limits["kv_usage"] < 1
        assert limits["rate"] is None or limits["rate"] > (prediction.effective_workload.rate or 0)


def test_one_target_a_replica_and_machines_have_names_where_there_are_several() -> None:
    assert list_metrics_endpoints(2, 8000, per_node=8) == ["localhost:8000", "localhost:8001"]
    assert list_metrics_endpoints(9, 8000, per_node=8)[-2:] == ["node-0:8007", "node-1:8000"]
    assert list_metrics_endpoints(2, 8000, nodes=2) == ["node-0:8000", "node-2:8000"]
    assert "localhost:8001" in files("vllm 0.20.2")["prometheus.yml"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_dashboard_asks_for_what_the_engine_reports_and_draws_the_plan(kind: str) -> None:
    board = json.loads(files(kind)["grafana.json"])
    prediction, _ = planned(kind)
    known = {name for name in get_metric_names(prediction.deployment.engine).names.values() if name}
    for panel in board["panels"]:
        steps = [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        assert steps[0] is None and steps[1:] == sorted(steps[1:]), panel["title"]
        for target in panel["targets"]:
            assert any(name in target["expr"] for name in (*known, "headroom:late:rate5m", "up{"))
    replicas = next(panel for panel in board["panels"] if panel["title"] == "Replicas that answer")
    assert replicas["fieldConfig"]["defaults"]["thresholds"]["steps"][1]["value"] == 2
    requests = next(panel for panel in board["panels"] if panel["title"] == "Requests")
    colors = [step["color"] for step in requests["fieldConfig"]["defaults"]["thresholds"]["steps"]]
    assert (
        colors == ("red green" if kind == "vllm offline" else "green yellow red").split()
    )  # jobs want to be fast


def test_grafana_takes_the_dashboard() -> None:
    schema = (
        Path(__file__).parents[2]
        / "shared"
        / "schemas"
        / "builtin"
        / "grafana-dashboard.schema.json"
    )
    if not schema.is_file():
        pytest.skip("Grafana's dashboard schema is not at hand")
    jsonschema = pytest.importorskip("jsonschema")
    for kind in KINDS:
        jsonschema.validate(json.loads(files(kind)["grafana.json"]), json.loads(schema.read_text()))


def test_every_runbook_link_leads_to_a_heading() -> None:
    for kind in KINDS:
        anchors = {
            line.split('"')[1]
            for line in files(kind)["runbook.md"].splitlines()
            if line.startswith("<a id=")
        }
        links = [rule["annotations"]["runbook_url"] for rule in rules(kind) if "alert" in rule]
        assert {link.removeprefix("runbook.md#") for link in links} <= anchors
