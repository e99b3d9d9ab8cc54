"""Render the files of a plan: launch script, unit, benchmark, alerts and checklist."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.core.errors import PlannerError
from planner.core.progress import show_step
from planner.core.templates import render_template
from planner.deploy import alerts, manifests
from planner.deploy.launch_spec import (
    BOOTSTRAP_PORT,
    LaunchSpec,
    build_launches,
    get_checkpoint,
)
from planner.engines.metric_names import get_metric_names
from planner.latency.performance import LATENCY_METRICS, Performance
from planner.latency.startup_time import DEFAULT_STORAGE
from planner.planning.autoscaling import AutoscalingPlan
from planner.planning.capacity import count_benchmark_prefix_tokens
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.plan import Plan
from planner.planning.prediction import Prediction, predict
from planner.planning.scenario_schema import DEFAULT_ARTIFACTS, ArtifactKind
from planner.planning.slo import SloTarget, list_benchmark_targets
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import DEFAULT_RUN_S, Workload

INSTALL_DIR = "/opt/headroom"
"""Folder in which the systemd unit expects `serve.sh`."""
RAMP_RATE_FRACTIONS, MIN_PROMPTS_PER_STEP = (0.25, 0.5, 0.75, 1.0, 1.25), 100
"""Fractions of the planned rate to benchmark, one beyond it; minimum requests of a step."""
WARM_UP = {"prompts": 32, "concurrency": 8}
"""Requests that a benchmark sends before it measures, or one of each adapter, and how many at once."""
NUM_BENCHMARK_LENGTHS, BENCHMARK_LENGTHS_STRIDE = 100, 37
"""Requests that a benchmark repeats, and the step with which outputs are dealt to their prompts."""

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
DISAGGREGATED_ARTIFACT_FILES: dict[str, tuple[str, ...]] = {
    "script": ("prefill.sh", "decode.sh", "router.sh", "serve.env"),
    "unit": ("headroom-prefill@.service", "headroom-decode@.service", "headroom-router.service"),
    "benchmark": ARTIFACT_FILES["benchmark"],
    "checklist": ARTIFACT_FILES["checklist"],
}
"""The artifact kinds that exist for disaggregated serving."""
UNIT_SCRIPTS: dict[str, str] = {
    "headroom@.service": "serve.sh",
    "headroom-prefill@.service": "prefill.sh",
    "headroom-decode@.service": "decode.sh",
    "headroom-router.service": "router.sh",
}
"""The systemd units of replicas and of pools, and the script that each starts."""
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
"""All files that `render_artifacts` may write."""


def list_artifact_files(
    prediction: Prediction, wanted: Sequence[str] = DEFAULT_ARTIFACTS
) -> list[str]:
    """Return the names of the files that `render_artifacts` renders.

    Some need metrics that the engine lacks, and a single replica scales to nothing.
    """
    deployment = prediction.deployment
    files = DISAGGREGATED_ARTIFACT_FILES if prediction.prefill else ARTIFACT_FILES
    has_metrics = not get_metric_names(deployment.engine).without
    missing = {
        "trtllm.yaml": deployment.engine.name != "trtllm", "k8s/monitor.yaml": not has_metrics,
        "k8s/scale.yaml": not has_metrics or deployment.num_replicas <= 1 + deployment.spare_replicas,
    }  # fmt: skip
    unsupported = manifests.explain_unsupported_kinds(prediction, wanted)
    kinds = [kind for kind in wanted if kind not in unsupported]
    return [name for kind in kinds for name in files.get(kind, ()) if not missing.get(name)]


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
    names = list_artifact_files(prediction, wanted)
    if not names and (unsupported := manifests.explain_unsupported_kinds(prediction, wanted)):
        raise PlannerError("files: not {}: {}".format(*next(iter(unsupported.items()))))
    launches = build_launches(prediction, storage)
    values = _build_values(prediction, launches[-1], targets, names, scaling) | {"storage": storage}
    if prediction.prefill:
        values |= _build_router_values(*launches)
    return {name: _render_file(name, launches, values) for name in names}


def _build_values(
    prediction: Prediction, last: LaunchSpec, targets: Sequence[SloTarget], names: Sequence[str],
    scaling: AutoscalingPlan | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the values of all templates: what every file says, and those of one kind of file."""
    deployment, scales = last.deployment, "k8s/scale.yaml" in names
    checkpoint, given = get_checkpoint(deployment), dict(deployment.args.options)
    place = f"-gpu{first}" if (first := deployment.first_gpu) else ""
    endpoints = alerts.list_metrics_endpoints(
        deployment.num_replicas, last.port, last.replicas_per_node, last.nodes
    )
    return {
        **manifests.build_template_values(last), "p": prediction, "targets": targets, "files": names,
        "scales_by_hour": scaling is not None and scaling.num_starts > 0,
        "checkpoint": checkpoint,
        "tokenizer": given.get("tokenizer") or given.get("tokenizer_path") or checkpoint,
        "remote_code": any(flag.name[2:].replace("_", "-") == "trust-remote-code" for flag in last.flags),
        "ramp": predict_benchmark_ramp(prediction) if "bench.sh" in names else {},
        "lengths": list_benchmark_lengths(prediction), "prefix": _count_prefix_tokens(prediction),
        "directory": INSTALL_DIR + place, "prompts": count_benchmark_prompts, "warm_up": WARM_UP,
        "environment": manifests.load_environment_variables(deployment.engine),
        # of `vllm bench serve --goodput`: per metric the largest SLO
        "goodput": {
            LATENCY_METRICS[t.metric].benchmark: t.seconds
            for t in sorted(targets, key=lambda target: target.seconds)
            if LATENCY_METRICS[t.metric].per_request
        }, "latency_metrics": LATENCY_METRICS, "judged": list_benchmark_targets(targets),
        "start_up": last.start_up, "unit": f"headroom{place}@.service",
        **alerts.build_monitoring_values(prediction, targets, endpoints),
        **(manifests.build_scaler_values(prediction, scaling) if scales else {"scaled": None}),
    }  # fmt: skip


def _build_router_values(prefill: LaunchSpec, decode: LaunchSpec) -> dict[str, Any]:
    """Return the values of pools and the router before them."""
    deployment, router = decode.deployment, decode.serving.router
    if router is None:
        raise PlannerError(f"no router for pools of {deployment.engine.name} is known")
    sizes = " and ".join(
        f"{launch.deployment.layout.replicas} {launch.role}" for launch in (prefill, decode)
    )
    is_sglang = deployment.engine.name == "sglang"
    return {
        "title": f"{deployment.model.served_name} in pools of {sizes} workers on {deployment.gpu.name},"
        f" {deployment.engine}",
        "prefill": prefill, "decode": decode, "port": ROUTER_PORT, "router": router,
        "package": "sglang-router" if is_sglang else "vllm-router",
        "bootstrap": BOOTSTRAP_PORT if is_sglang else None,
    }  # fmt: skip


def _render_file(name: str, launches: Sequence[LaunchSpec], values: Mapping[str, Any]) -> str:
    """Return the text of one file; those of a pool are about its workers."""
    script = UNIT_SCRIPTS.get(name, name)
    launch = launches[0 if script in ("prefill.sh", "router.sh", "serve.env") else -1]
    if name == "trtllm.yaml":
        return launch.config
    is_worker = name in ("prefill.sh", "decode.sh")
    template = "headroom@.service" if name in UNIT_SCRIPTS else "serve.sh" if is_worker else name
    unit = name if launch.role else values["unit"]
    about = {"launch": launch, "d": launch.deployment, "layout": launch.deployment.layout}
    return render_template(
        "deploy", template, **{**values, **about, "unit": unit, "unit_script": script}
    )


@show_step("steps of the benchmark")
def predict_benchmark_ramp(prediction: Prediction) -> dict[float, Performance]:
    """Predict the steps of `bench.sh` by rate, for one replica, or for both pools.

    Each step is simulated as the script runs it, from its first request to its last.
    """
    deployment, workload, prefill = prediction.deployment, prediction.workload, prediction.prefill
    assert workload is not None
    replicas = 1 if prefill else deployment.layout.replicas
    throughput = prediction.performance.request_tps.mid if prediction.performance else 0.0
    sent = _build_benchmark_workload(prediction)
    ramp = {}
    for fraction in RAMP_RATE_FRACTIONS:
        rate = float(f"{(workload.rate or throughput) / replicas * fraction:.3g}")
        step = replace(sent.with_rate(rate), num_prompts=count_benchmark_prompts(rate))
        step_prediction = (
            evaluate_disaggregated(prefill, deployment, step)
            if prefill
            else predict(deployment.with_replicas(1), step)
        )
        ramp[rate] = step_prediction.performance
    return {rate: performance for rate, performance in ramp.items() if performance}


def list_benchmark_lengths(prediction: Prediction) -> list[tuple[int, int]]:
    """Return prompt and output tokens of the requests that `bench.sh` sends in turn.

    They are the trace's requests at the quantiles of its prompts, or quantiles of both lengths, which
    are independent of each other; all of them fit into max_model_len.
    """
    workload, limit = prediction.effective_workload, prediction.deployment.args.max_model_len
    edges = np.linspace(0, 1, NUM_BENCHMARK_LENGTHS + 1)
    if trace := workload.trace:
        lengths = np.array([trace.prompt, trace.output])[:, trace.num_uncounted :]
        lengths = lengths[:, np.argsort(lengths[0], kind="stable")]
        lengths = lengths[:, lengths[0] < limit]
        pairs = lengths[:, ((edges[1:] + edges[:-1]) / 2 * lengths.shape[1]).astype(int)]
    else:
        mixed = np.arange(NUM_BENCHMARK_LENGTHS) * BENCHMARK_LENGTHS_STRIDE % NUM_BENCHMARK_LENGTHS
        outputs = workload.output.compute_slice_means(edges)[mixed]
        pairs = np.array([workload.prompt.compute_slice_means(edges), outputs])
    prompts = np.clip(np.rint(pairs[0]), 1, limit - 1).astype(int)
    outputs = np.clip(np.rint(pairs[1]), 1, limit - prompts).astype(int)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def _build_benchmark_workload(prediction: Prediction) -> Workload:
    """Build what `bench.sh` sends: lengths of the plan's workload, which share one prefix."""
    assert prediction.workload is not None
    prompts, outputs = zip(*list_benchmark_lengths(prediction), strict=True)
    prefix = _count_prefix_tokens(prediction)
    return replace(
        prediction.workload, prompt=LengthDistribution.from_samples(np.array(prompts)),
        output=LengthDistribution.from_samples(np.array(outputs)), trace=None,
        prefix_tokens=prefix, prefix_hit_rate=float(prefix > 0), adapter_zipf=0.0,
    )  # fmt: skip


def _count_prefix_tokens(prediction: Prediction) -> int:
    assert prediction.workload is not None
    return count_benchmark_prefix_tokens(prediction.deployment, prediction.workload)


def count_benchmark_prompts(rate: float) -> int:
    """Return the requests of one step of `bench.sh`: ten minutes, and enough for a percentile."""
    return max(round(rate * DEFAULT_RUN_S), MIN_PROMPTS_PER_STEP)


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
    reasons = manifests.explain_unsupported_kinds(plan.chosen.prediction, wanted)
    return [f"not {kind}: {reason}" for kind, reason in reasons.items()]


def list_benchmark_files(measured: Prediction, kinds: Collection[str]) -> tuple[str, ...]:
    """Return the files for a benchmark of another deployment than the plan's; empty if `kinds` has none."""
    if not {*BENCHMARK_ARTIFACTS} <= {*kinds}:
        return ()
    names = list_artifact_files(measured, BENCHMARK_ARTIFACTS)
    return tuple(BENCHMARK_DIR + name for name in names if name != SECRETS_FILE)
