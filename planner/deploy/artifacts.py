"""Render the files of a plan: launch script, unit, benchmark, alerts and checklist."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.core.progress import show_step
from planner.core.templates import render_template
from planner.deploy import alerts, manifests
from planner.deploy.arguments import format_for_script
from planner.deploy.launch_spec import BOOTSTRAP_PORT, build_launch, build_launches, get_checkpoint
from planner.engines.metric_names import get_metric_names
from planner.latency.performance import Performance
from planner.latency.startup_time import DEFAULT_STORAGE
from planner.planning.autoscaling import AutoscalingPlan
from planner.planning.capacity import count_benchmark_prefix_tokens
from planner.planning.confidence import estimate_choice_confidence
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.prediction import Prediction, predict
from planner.planning.scenario_schema import DEFAULT_ARTIFACTS, ArtifactKind
from planner.planning.search import Plan
from planner.planning.slo import SloTarget, list_benchmark_targets
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import DEFAULT_RUN_S, Workload

INSTALL_DIR = "/opt/headroom"
"""Folder in which the systemd unit expects `serve.sh`."""
RAMP_RATE_FRACTIONS, MIN_PROMPTS_PER_STEP = (0.25, 0.5, 0.75, 1.0, 1.25), 100
"""Fractions of the planned rate to benchmark, one beyond it; minimum requests of a step."""
WARM_UP = {"prompts": 32, "concurrency": 8}
"""Requests that a benchmark sends before it measures, or one of each adapter, and how many at once."""
RANDOM_LENGTH_RANGE_RATIO = 0.5
"""Half-width of the benchmark's uniform random lengths, as a fraction of their mean."""

ARTIFACT_FILES: dict[str, tuple[str, ...]] = {
    "script": ("trtllm.yaml", "serve.sh", "serve.env"),
    "unit": ("headroom@.service",),
    "benchmark": ("bench.sh",),
    "alerts": ("alerts.yml", "prometheus.yml", "runbook.md"),
    "dashboard": ("grafana.json",),
    "checklist": ("checklist.md",),
    **manifests.MANIFEST_FILES,
}
"""The artifact kinds that a scenario may request, and their files."""
POOL_UNITS: dict[str, str] = {
    "headroom-prefill@.service": "prefill.sh",
    "headroom-decode@.service": "decode.sh",
    "headroom-router.service": "router.sh",
}
"""The systemd units of pools, and the script that each starts."""
DISAGGREGATED_ARTIFACT_FILES: dict[str, tuple[str, ...]] = {
    "script": ("prefill.sh", "decode.sh", "router.sh", "serve.env"),
    "unit": (*POOL_UNITS,),
    **{kind: ARTIFACT_FILES[kind] for kind in ("benchmark", "alerts", "dashboard", "checklist")},
    "kubernetes": ("k8s/serve.yaml", "k8s/monitor.yaml"),
}
"""The artifact kinds that exist for disaggregated serving."""
ROUTER_PORT = 8080
"""Port of the router in front of worker pools."""
ALL_ARTIFACT_FILES = tuple(
    dict.fromkeys(
        name
        for kinds in (ARTIFACT_FILES, DISAGGREGATED_ARTIFACT_FILES)
        for names in kinds.values()
        for name in names
    )
)
"""All files that `render_artifacts` may write.

Monitoring files need the names of the engine's metrics in the catalog.
"""


def list_artifact_files(
    prediction: Prediction, wanted: Sequence[str] = DEFAULT_ARTIFACTS
) -> list[str]:
    """Return the names of the files that `render_artifacts` renders."""
    deployment = prediction.deployment
    engine = deployment.engine
    missing = set(alerts.MONITORING_FILES) if get_metric_names(engine).without else set()
    unsupported = manifests.explain_unsupported_manifests(prediction, wanted)
    if prediction.prefill:
        missing |= {"k8s/monitor.yaml"} if get_metric_names(engine).without else set()
        kinds = [
            DISAGGREGATED_ARTIFACT_FILES.get(kind, ()) for kind in wanted if kind not in unsupported
        ]
        return [name for names in kinds for name in names if name not in missing]
    missing |= {"trtllm.yaml"} if engine.name != "trtllm" else set()
    named = [
        (
            manifests.list_manifest_files(kind, deployment)
            if kind in manifests.MANIFEST_FILES
            else ARTIFACT_FILES[kind]
        )
        for kind in wanted
        if kind not in unsupported
    ]
    return [name for names in named for name in names if name not in missing]


def render_artifacts(
    prediction: Prediction, targets: Sequence[SloTarget], storage: str = DEFAULT_STORAGE,
    wanted: Sequence[str] = DEFAULT_ARTIFACTS,
    scaling: AutoscalingPlan | None = None,
) -> dict[str, str]:  # fmt: skip
    """Return file name -> text for the `wanted` kinds of `ARTIFACT_FILES`.

    `prediction` is that of the whole deployment at its rate (or concurrency). `bench.sh` runs
    fractions of that on one replica, and states the prediction for each. A starting server reads
    its weights from `storage`; with `scaling` the replicas follow its daily profile. Raises
    `PlannerError` if the deployment does not fit.
    """
    if prediction.performance is None:
        raise PlannerError(f"nothing to deploy: {prediction.memory.reason}")
    names, unsupported = (
        list_artifact_files(prediction, wanted), manifests.explain_unsupported_manifests(prediction, wanted)
    )  # fmt: skip
    if unsupported and not names:
        raise PlannerError(f"files: {next(iter(unsupported.values()))}")
    if prediction.prefill:
        return _render_pool_artifacts(prediction, targets, storage, names)
    deployment = prediction.deployment
    engine = deployment.engine
    launch = build_launch(prediction, storage)
    endpoints = alerts.list_metrics_endpoints(
        deployment.num_replicas, launch.port, launch.replicas_per_node, launch.nodes
    )
    hosts = (
        [f"node-{node}" for node in range(deployment.num_replicas * launch.nodes)]
        if launch.nodes > 1
        else list(dict.fromkeys(endpoint.rpartition(":")[0] for endpoint in endpoints))
    )
    place = f"-gpu{deployment.first_gpu}" if deployment.first_gpu else ""
    values: dict[str, Any] = {
        **manifests.build_template_values(launch, prediction), "p": prediction, "targets": targets,
        "hosts": hosts, "scales_by_hour": scaling is not None and scaling.num_starts > 0,
        "storage": storage,
        "checkpoint": get_checkpoint(deployment),
        "ramp": predict_benchmark_ramp(prediction) if "bench.sh" in names else {},
        "lengths": explain_benchmark_lengths(prediction), "prefix": _count_prefix_tokens(prediction),
        "directory": INSTALL_DIR + place, "range_ratio": RANDOM_LENGTH_RANGE_RATIO,
        "prompts": count_benchmark_prompts, "warm_up": WARM_UP,
        "script": format_for_script, "environment": manifests.load_environment_variables(engine),
        "goodput": build_goodput_limits(targets), "judged": list_benchmark_targets(targets),
        "start_up": launch.start_up,
        "scaled": manifests.build_scaling_trigger(prediction, scaling) if "kubernetes" in wanted else None,
        "unit": f"headroom{place}@.service", "unit_script": "serve.sh",
        **alerts.build_monitoring_values(prediction, targets, {"": endpoints}),
    }  # fmt: skip
    values["files"] = names
    kinds = [kind for kind in wanted if kind in manifests.MANIFEST_FILES]
    rendered = manifests.render_manifests(
        [kind for kind in kinds if kind not in unsupported], launch, prediction, scaling
    )
    if {"alerts.yml", "k8s/monitor.yaml"} <= {*names}:
        rendered["k8s/monitor.yaml"] += render_template(
            "deploy",
            "k8s/rules.yaml",
            rules=Markup(render_template("deploy", "alerts.yml", **values)),
            **values,
        )
    rendered |= {"trtllm.yaml": launch.config} | (
        {"grafana.json": alerts.render_dashboard(values)} if "grafana.json" in names else {}
    )
    return {
        name: rendered[name] if name in rendered else render_template("deploy", name, **values)
        for name in names
    }


def _render_pool_artifacts(
    prediction: Prediction, targets: Sequence[SloTarget], storage: str, names: Sequence[str]
) -> dict[str, str]:
    """Return the files `names` for the workers of both pools, the router and the benchmark."""
    prefill, decode = build_launches(prediction, storage)
    deployment, serving = prediction.deployment, decode.serving
    if serving.router is None:
        raise PlannerError(f"no router for pools of {deployment.engine.name} is known")
    workers = {"prefill.sh": prefill, "decode.sh": decode}
    sizes = " and ".join(
        f"{launch.deployment.layout.replicas} {launch.role}" for launch in workers.values()
    )
    engine = deployment.engine
    values: dict[str, Any] = {
        **manifests.build_template_values(decode, prediction),
        "title": f"{deployment.model.name} in pools of {sizes} workers on {deployment.gpu.name}, {engine}",
        "prefill": prefill, "decode": decode, "port": ROUTER_PORT, "router": serving.router,
        "script": format_for_script,
        "package": "sglang-router" if engine.name == "sglang" else "vllm-router",
        "bootstrap": BOOTSTRAP_PORT if engine.name == "sglang" else None,
        "environment": manifests.load_environment_variables(engine),
        "p": prediction, "targets": targets, "checkpoint": get_checkpoint(deployment),
        "goodput": build_goodput_limits(targets), "judged": list_benchmark_targets(targets),
        "lengths": explain_benchmark_lengths(prediction),
        "prefix": _count_prefix_tokens(prediction), "range_ratio": RANDOM_LENGTH_RANGE_RATIO,
        "prompts": count_benchmark_prompts, "warm_up": WARM_UP,
    }  # fmt: skip
    values |= {"ramp": predict_benchmark_ramp(prediction)} if "bench.sh" in names else {}
    endpoints = {
        launch.role: alerts.list_metrics_endpoints(
            launch.deployment.num_replicas, launch.port, launch.replicas_per_node, launch.nodes,
            launch.role,
        )
        for launch in workers.values()
    }  # fmt: skip
    values |= {
        "files": names, "directory": INSTALL_DIR, "scaled": None, "scales_by_hour": False, "storage": storage,
        "start_up": decode.start_up, "drain_s": decode.drain_s,
        "hosts": [*dict.fromkeys(e.rpartition(":")[0] for each in endpoints.values() for e in each)],
        **alerts.build_monitoring_values(prediction, targets, endpoints),
    }  # fmt: skip
    pool_artifacts = {}
    for name in names:
        script = POOL_UNITS.get(name, name)
        launch = workers.get(script, prefill if script in ("router.sh", "serve.env") else decode)
        of_launch = {"launch": launch, "d": launch.deployment, "layout": launch.deployment.layout}
        template = (
            {script: "headroom@.service"}
            if name in POOL_UNITS
            else dict.fromkeys(workers, "serve.sh")
        )
        pool_artifacts[name] = (
            alerts.render_dashboard({**values, **of_launch})
            if name == "grafana.json"
            else manifests.render_pool_manifests((prefill, decode), prediction, values)
            if name == "k8s/serve.yaml"
            else _render_pool_monitors(values, of_launch)
            if name == "k8s/monitor.yaml"
            else render_template(
                "deploy",
                template.get(script, name),
                **{**values, **of_launch, "unit": name, "unit_script": script},
            )
        )
    return pool_artifacts


def _render_pool_monitors(values: Mapping[str, Any], of_launch: Mapping[str, Any]) -> str:
    """Return a PodMonitor for each pool, and the rules of `alerts.yml` if that is written."""
    slug, texts = manifests.build_slug(of_launch["d"].model.name), list[str]()
    for pool in values["watched"]:
        own = {**values, "slug": f"{slug}-{pool.role}", "job": pool.job}
        texts.append(render_template("deploy", "k8s/monitor.yaml", **own))
    if "alerts.yml" in values["files"]:
        whole = {**values, **of_launch, "slug": slug}
        rules = Markup(render_template("deploy", "alerts.yml", **whole))
        texts.append(render_template("deploy", "k8s/rules.yaml", rules=rules, **whole))
    return "---\n".join(text.removeprefix("---\n") for text in texts)


def build_goodput_limits(targets: Sequence[SloTarget]) -> dict[str, float]:
    """Return the limits of `vllm bench serve --goodput`: per metric the largest SLO."""
    slowest = sorted(targets, key=lambda target: target.seconds)
    return {
        ("e2el" if t.metric == "e2e" else t.metric): t.seconds for t in slowest if t.metric != "itl"
    }


@show_step("steps of the benchmark")
def predict_benchmark_ramp(prediction: Prediction) -> dict[float, Performance]:
    """Predict the steps of `bench.sh` by rate, for one replica, or for both pools.

    Each step is simulated as the script runs it, from its first request to its last.
    """
    deployment, workload, prefill = prediction.deployment, prediction.workload, prediction.prefill
    assert workload is not None
    replicas = 1 if prefill else deployment.layout.replicas
    throughput = prediction.performance.request_tps.mid if prediction.performance else 0.0
    random_workload = _build_random_workload(prediction)
    ramp = {}
    for fraction in RAMP_RATE_FRACTIONS:
        rate = float(f"{(workload.rate or throughput) / replicas * fraction:.3g}")
        step = replace(random_workload.with_rate(rate), num_prompts=count_benchmark_prompts(rate))
        step_prediction = (
            evaluate_disaggregated(prefill, deployment, step)
            if prefill
            else predict(deployment.with_replicas(1), step)
        )
        ramp[rate] = step_prediction.performance
    return {rate: performance for rate, performance in ramp.items() if performance}


def explain_benchmark_lengths(prediction: Prediction) -> str:
    """Explain why the figures of `bench.sh` differ from the plan's: its lengths spread less or more."""
    own, random = prediction.workload, _build_random_workload(prediction)
    assert own is not None
    pairs = {
        "prompts": (own.prompt, random.prompt),
        "answers": (own.output, random.output),
    }
    ends = {name: [each.compute_quantile(0.95) for each in pair] for name, pair in pairs.items()}
    name, (yours, its) = max(ends.items(), key=lambda item: abs(math.log(item[1][0] / item[1][1])))
    return (
        f"The benchmark sends uniform lengths: 95% of its {name} have up to {format_number(its)}"
        f" tokens, of yours {format_number(yours)}. So your traffic has other latencies."
    )


def _build_random_workload(prediction: Prediction) -> Workload:
    """Build what `bench.sh` sends: uniform lengths around the means of the plan's workload."""
    workload = prediction.workload
    assert workload is not None
    prefix = _count_prefix_tokens(prediction)
    return replace(
        workload, prompt=_build_random_lengths(workload.prompt.mean, prefix),
        output=_build_random_lengths(workload.output.mean), trace=None,
        prefix_tokens=prefix, prefix_hit_rate=float(prefix > 0), adapter_zipf=0.0,
    )  # fmt: skip


def _count_prefix_tokens(prediction: Prediction) -> int:
    assert prediction.workload is not None
    return count_benchmark_prefix_tokens(prediction.deployment, prediction.workload)


def count_benchmark_prompts(rate: float) -> int:
    """Return the requests of one step of `bench.sh`: ten minutes, and enough for a percentile."""
    return max(round(rate * DEFAULT_RUN_S), MIN_PROMPTS_PER_STEP)


def _build_random_lengths(mean: float, prefix: int = 0) -> LengthDistribution:
    """Return the lengths of `--random-range-ratio`: a shared prefix and a uniform rest."""
    rest = max(mean - prefix, 1.0)
    low, high = (prefix + rest * (1 + side * RANDOM_LENGTH_RANGE_RATIO) for side in (-1, 1))
    return LengthDistribution.from_uniform(high, low / high)


SECRETS_FILE = "serve.env"
"""Holds the keys; readable by its owner only, and not overwritten once it holds any."""
BENCHMARK_DIR = "measure/"
"""Folder of the scripts that benchmark another deployment than the plan's."""
BENCHMARK_ARTIFACTS: tuple[ArtifactKind, ...] = ("script", "benchmark")
"""The artifact kinds that a benchmark needs."""


def explain_unsupported_artifacts(plan: Plan) -> list[str]:
    """Return a sentence for each of the requested files that cannot start the plan."""
    wanted = plan.scenario.output_kinds
    if plan.chosen is None or plan.chosen.prediction.performance is None:
        return []
    reasons = manifests.explain_unsupported_manifests(plan.chosen.prediction, wanted)
    return [f"not {kind}: {reason}" for kind, reason in reasons.items()]


def list_benchmark_files(plan: Plan) -> tuple[str, ...]:
    """Return the files for the benchmark to run first; empty if no result changes the choice."""
    confidence = estimate_choice_confidence(plan)
    if (
        confidence is None
        or confidence.best_benchmark is None
        or not {*BENCHMARK_ARTIFACTS} <= {*plan.scenario.output_kinds}
    ):
        return ()
    measured = confidence.best_benchmark[0]
    folder_of = "" if measured is plan.chosen else BENCHMARK_DIR
    return tuple(
        folder_of + name
        for name in list_artifact_files(measured.prediction, BENCHMARK_ARTIFACTS)
        if name != SECRETS_FILE
    )
