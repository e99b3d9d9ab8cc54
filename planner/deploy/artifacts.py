"""The files of a plan: launch script, unit, verifying benchmark, alerts and checklist, all as text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from planner.core.errors import PlannerError
from planner.core.templates import render_template
from planner.deploy import alerts, manifests
from planner.deploy.arguments import format_for_script
from planner.deploy.dashboard import render_dashboard
from planner.deploy.launch_spec import BOOTSTRAP_PORT, build_launch, build_launches, get_checkpoint
from planner.engines.metric_names import get_metric_names
from planner.latency.performance import Performance
from planner.latency.startup_time import DEFAULT_STORAGE
from planner.planning.autoscaling import AutoscalingPlan
from planner.planning.confidence import estimate_choice_confidence
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.prediction import Prediction, predict
from planner.planning.scenario_schema import DEFAULT_ARTIFACTS, ArtifactKind
from planner.planning.search import Plan
from planner.planning.slo import SloTarget
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import DEFAULT_RUN_S

INSTALL_DIR = "/opt/headroom"
"""Where the systemd unit expects `serve.sh`."""
RAMP_RATE_FRACTIONS, MIN_PROMPTS_PER_STEP = (0.25, 0.5, 0.75, 1.0, 1.25), 100
"""Shares of the planned rate worth benchmarking: up to it, and once beyond; requests of such a step, at least."""
RANDOM_LENGTH_RANGE_RATIO = 0.5
"""Spread of the benchmark's random lengths: uniform within this share of the mean to both sides."""

ARTIFACT_FILES: dict[str, tuple[str, ...]] = {
    "script": ("trtllm.yaml", "serve.sh", "serve.env"),
    "unit": ("headroom@.service",),
    "benchmark": ("bench.sh",),
    "alerts": ("alerts.yml", "prometheus.yml", "runbook.md"),
    "dashboard": ("grafana.json",),
    "checklist": ("checklist.md",),
    **manifests.MANIFEST_FILES,
}
"""What a scenario may ask for, and the files of it."""
DISAGGREGATED_ARTIFACT_FILES: dict[str, tuple[str, ...]] = {
    "script": ("prefill.sh", "decode.sh", "router.sh", "serve.env"),
    "benchmark": ("bench.sh",),
}
"""The same of pools, for which there is nothing else yet."""
ROUTER_PORT = 8080
"""Where clients of pools ask."""
ALL_ARTIFACT_FILES = tuple(
    dict.fromkeys(
        name
        for kinds in (ARTIFACT_FILES, DISAGGREGATED_ARTIFACT_FILES)
        for names in kinds.values()
        for name in names
    )
)
"""What `documents` may write; what watches the plan only where the catalog knows the engine's own names of metrics."""


def list_artifact_files(
    prediction: Prediction, wanted: Sequence[str] = DEFAULT_ARTIFACTS
) -> list[str]:
    """The files that `documents` makes."""
    engine = prediction.deployment.engine
    if prediction.prefill:
        return [name for kind in wanted for name in DISAGGREGATED_ARTIFACT_FILES.get(kind, ())]
    lacking = set(alerts.MONITORING_FILES) if get_metric_names(engine).without else set()
    lacking |= {"trtllm.yaml"} if engine.name != "trtllm" else set()
    named = [
        (
            manifests.list_manifest_files(kind, engine)
            if kind in manifests.MANIFEST_FILES
            else ARTIFACT_FILES[kind]
        )
        for kind in wanted
    ]
    return [name for names in named for name in names if name not in lacking]


def render_artifacts(
    prediction: Prediction, targets: Sequence[SloTarget], storage: str = DEFAULT_STORAGE,
    wanted: Sequence[str] = DEFAULT_ARTIFACTS,
    scaling: AutoscalingPlan | None = None,
) -> dict[str, str]:  # fmt: skip
    """File name -> text: shell script, systemd template unit, and whatever else of `KINDS` is wanted.

    `prediction` is the whole deployment's at its rate (or concurrency). `bench.sh` runs shares of
    that on one replica, and states what the plan predicts for each. A starting server reads its
    weights from `storage`; with `scaling` replicas follow its day. Raises `PlannerError` when the
    deployment does not fit.
    """
    if prediction.performance is None:
        raise PlannerError(f"nothing to deploy: {prediction.memory.reason}")
    if prediction.prefill:
        return _render_pool_artifacts(
            prediction, targets, storage, list_artifact_files(prediction, wanted)
        )
    deployment = prediction.deployment
    engine = deployment.engine
    start = build_launch(prediction, storage)
    at = alerts.list_metrics_endpoints(
        deployment.num_replicas, start.port, start.replicas_per_node, start.nodes
    )
    values: dict[str, Any] = {
        **manifests.build_template_values(start, prediction), "p": prediction, "targets": targets,
        "storage": storage,
        "checkpoint": get_checkpoint(deployment), "ramp": predict_benchmark_ramp(prediction),
        "prefix": get_benchmark_prefix_tokens(prediction),
        "directory": INSTALL_DIR, "range_ratio": RANDOM_LENGTH_RANGE_RATIO,
        "prompts": count_benchmark_prompts,
        "script": format_for_script, "environment": manifests.load_environment_variables(engine),
        "goodput": build_goodput_limits(targets), "start_up": start.start_up,
        "scaled": manifests.build_scaling_trigger(prediction, scaling) if "kubernetes" in wanted else None,
        **alerts.build_monitoring_values(prediction, targets, at),
    }  # fmt: skip
    names = values["files"] = list_artifact_files(prediction, wanted)
    made = manifests.render_manifests(
        [kind for kind in wanted if kind in manifests.MANIFEST_FILES], start, prediction, scaling
    )
    if {"alerts.yml", "k8s/monitor.yaml"} <= {*names}:
        made["k8s/monitor.yaml"] += render_template(
            "deploy",
            "k8s/rules.yaml",
            rules=Markup(render_template("deploy", "alerts.yml", **values)),
            **values,
        )
    made |= {"trtllm.yaml": start.config} | (
        {"grafana.json": render_dashboard(values)} if "grafana.json" in names else {}
    )
    return {
        name: made[name] if name in made else render_template("deploy", name, **values)
        for name in names
    }


def _render_pool_artifacts(
    prediction: Prediction, targets: Sequence[SloTarget], storage: str, names: Sequence[str]
) -> dict[str, str]:
    """The files `names` that start a worker of either pool, the router before them, and the benchmark of both."""
    first, rest = build_launches(prediction, storage)
    deployment, serving = prediction.deployment, rest.serving
    if serving.router is None:
        raise PlannerError(f"no router for pools of {deployment.engine.name} is known")
    workers = {"prefill.sh": first, "decode.sh": rest}
    sizes = " and ".join(
        f"{launch.deployment.layout.replicas} {launch.role}" for launch in workers.values()
    )
    engine = deployment.engine
    values: dict[str, Any] = {
        "title": f"{deployment.model.name} in pools of {sizes} workers on {deployment.gpu.name}, {engine}",
        "prefill": first, "decode": rest, "port": ROUTER_PORT, "router": serving.router,
        "script": format_for_script,
        "package": "sglang-router" if engine.name == "sglang" else "vllm-router",
        "bootstrap": BOOTSTRAP_PORT if engine.name == "sglang" else None,
        "environment": manifests.load_environment_variables(engine),
        "p": prediction, "targets": targets, "checkpoint": get_checkpoint(deployment),
        "goodput": build_goodput_limits(targets),
        "prefix": get_benchmark_prefix_tokens(prediction), "range_ratio": RANDOM_LENGTH_RANGE_RATIO,
        "prompts": count_benchmark_prompts,
    }  # fmt: skip
    values |= {"ramp": predict_benchmark_ramp(prediction)} if "bench.sh" in names else {}
    pool_artifacts = {}
    for name in names:
        start, template = workers.get(name, first), "serve.sh" if name in workers else name
        pool_artifacts[name] = render_template(
            "deploy",
            template,
            **values,
            launch=start,
            d=start.deployment,
            layout=start.deployment.layout,
        )
    return pool_artifacts


def build_goodput_limits(targets: Sequence[SloTarget]) -> dict[str, float]:
    """The limits that `vllm bench serve` counts by, of each metric the last and widest."""
    slowest = sorted(targets, key=lambda target: target.seconds)
    return {
        ("e2el" if t.metric == "e2e" else t.metric): t.seconds for t in slowest if t.metric != "itl"
    }


def predict_benchmark_ramp(prediction: Prediction) -> dict[float, Performance]:
    """What `bench.sh` should measure on one replica, or both pools, at growing shares of the traffic, by rate.

    Each step is replayed as the script runs it, from its first request to its last.
    """
    deployment, workload, first = prediction.deployment, prediction.workload, prediction.prefill
    assert workload is not None
    copies = 1 if first else deployment.layout.replicas
    served = prediction.performance.request_tps.mid if prediction.performance else 0.0
    prefix = get_benchmark_prefix_tokens(prediction)
    drawn = replace(
        workload, prompt=_build_random_lengths(workload.prompt.mean, prefix),
        output=_build_random_lengths(workload.output.mean), trace=None,
        prefix_tokens=prefix, prefix_hit_rate=float(prefix > 0), adapter_zipf=0.0,
    )  # fmt: skip
    found = {}
    for share in RAMP_RATE_FRACTIONS:
        rate = float(f"{(workload.rate or served) / copies * share:.3g}")
        step = replace(drawn.with_rate(rate), num_prompts=count_benchmark_prompts(rate))
        one = (
            evaluate_disaggregated(first, deployment, step)
            if first
            else predict(deployment.with_replicas(1), step)
        )
        found[rate] = one.performance
    return {rate: performance for rate, performance in found.items() if performance}


def get_benchmark_prefix_tokens(prediction: Prediction) -> int:
    """Tokens that all prompts of the benchmark begin with: the scenario's own, or what the plan reuses on average."""
    assert prediction.workload is not None
    return prediction.workload.prefix_tokens or int(
        prediction.effective_workload.mean_cached_tokens
    )


def count_benchmark_prompts(rate: float) -> int:
    """Requests of one step of `bench.sh`: ten minutes of arrivals, and enough for a percentile."""
    return max(round(rate * DEFAULT_RUN_S), MIN_PROMPTS_PER_STEP)


def _build_random_lengths(mean: float, prefix: int = 0) -> LengthDistribution:
    """Lengths as `--random-range-ratio` draws them: a shared prefix, and the rest uniform around its mean."""
    rest = max(mean - prefix, 1.0)
    low, high = (prefix + rest * (1 + side * RANDOM_LENGTH_RANGE_RATIO) for side in (-1, 1))
    return LengthDistribution.from_uniform(high, low / high)


SECRETS_FILE = "serve.env"
"""Its owner fills it in with keys: it is readable to them alone, and not written over once it holds any."""
BENCHMARK_DIR = "measure/"
"""Where the scripts lie that measure another deployment than the plan's."""
BENCHMARK_ARTIFACTS: tuple[ArtifactKind, ...] = ("script", "benchmark")
"""What it takes to measure one."""


def list_unsupported_artifacts(plan: Plan) -> list[str]:
    """The kinds of files that the scenario asks for, and that there are none of for pools."""
    return (
        [kind for kind in plan.scenario.output_kinds if kind not in DISAGGREGATED_ARTIFACT_FILES]
        if plan.is_disaggregated
        else []
    )


def list_benchmark_files(plan: Plan) -> tuple[str, ...]:
    """The files that start and benchmark what should be measured first; none where no result changes the choice."""
    sure = estimate_choice_confidence(plan)
    if (
        sure is None
        or sure.best_benchmark is None
        or not {*BENCHMARK_ARTIFACTS} <= {*plan.scenario.output_kinds}
    ):
        return ()
    measured = sure.best_benchmark[0]
    folder_of = "" if measured is plan.chosen else BENCHMARK_DIR
    return tuple(
        folder_of + name
        for name in list_artifact_files(measured.prediction, BENCHMARK_ARTIFACTS)
        if name != SECRETS_FILE
    )
