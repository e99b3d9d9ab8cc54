"""The files of a plan: launch script, unit, verifying benchmark, alerts and checklist, all as text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from planner.core.quantities import PlannerError
from planner.facts.engine_metrics import engine_metrics
from planner.facts.workload import DEFAULT_SECONDS, Lengths
from planner.latency.performance import Performance
from planner.latency.start_up import STORAGE
from planner.operations import alerts
from planner.operations.dashboard import dashboard
from planner.operations.launch import manifests
from planner.operations.launch.command import BOOTSTRAP_PORT, checkpoint, launch, launches
from planner.operations.launch.words import script
from planner.operations.rendering import render
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.prediction import Prediction, predict
from planner.planning.scaling import Scaling
from planner.planning.scenario import Target
from planner.planning.scenario_entries import DEFAULT_FILES

DIRECTORY = "/opt/headroom"
"""Where the systemd unit expects `serve.sh`."""
RAMP, LEAST_PROMPTS = (0.25, 0.5, 0.75, 1.0, 1.25), 100
"""Shares of the planned rate worth benchmarking: up to it, and once beyond; requests of such a step, at least."""
RANGE_RATIO = 0.5
"""Spread of the benchmark's random lengths: uniform within this share of the mean to both sides."""

KINDS: dict[str, tuple[str, ...]] = {
    "script": ("trtllm.yaml", "serve.sh", "serve.env"),
    "unit": ("headroom@.service",),
    "benchmark": ("bench.sh",),
    "alerts": ("alerts.yml", "prometheus.yml", "runbook.md"),
    "dashboard": ("grafana.json",),
    "checklist": ("checklist.md",),
    **manifests.FILES,
}
"""What a scenario may ask for, and the files of it."""
IN_POOLS: dict[str, tuple[str, ...]] = {
    "script": ("prefill.sh", "decode.sh", "router.sh", "serve.env"),
    "benchmark": ("bench.sh",),
}
"""The same of pools, for which there is nothing else yet."""
ROUTER_PORT = 8080
"""Where clients of pools ask."""
FILES = tuple(dict.fromkeys(name for kinds in (KINDS, IN_POOLS) for names in kinds.values() for name in names))
"""What `documents` may write; what watches the plan only where the catalog knows the engine's own names of metrics."""


def file_names(prediction: Prediction, wanted: Sequence[str] = DEFAULT_FILES) -> list[str]:
    """The files that `documents` makes."""
    engine = prediction.deployment.engine
    if prediction.prefill:
        return [name for kind in wanted for name in IN_POOLS.get(kind, ())]
    lacking = set(alerts.FILES) if engine_metrics(engine).without else set()
    lacking |= {"trtllm.yaml"} if engine.name != "trtllm" else set()
    named = [manifests.names(kind, engine) if kind in manifests.FILES else KINDS[kind] for kind in wanted]
    return [name for names in named for name in names if name not in lacking]


def documents(
    prediction: Prediction, targets: Sequence[Target], storage: str = STORAGE, wanted: Sequence[str] = DEFAULT_FILES,
    scaling: Scaling | None = None,
) -> dict[str, str]:  # fmt: skip
    """File name -> text: shell script, systemd template unit, and whatever else of `KINDS` is wanted.

    `prediction` is the whole deployment's at its rate (or concurrency). `bench.sh` runs shares of that on one replica,
    and states what the plan predicts for each. A starting server reads its weights from `storage`; with `scaling`
    replicas follow its day. Raises `PlannerError` when the deployment does not fit.
    """
    if prediction.performance is None:
        raise PlannerError(f"nothing to deploy: {prediction.memory.reason}")
    if prediction.prefill:
        return _of_pools(prediction, targets, storage, file_names(prediction, wanted))
    deployment = prediction.deployment
    engine = deployment.engine
    start = launch(prediction, storage)
    at = alerts.endpoints(deployment.replicas, start.port, start.replicas_per_node, start.nodes)
    values: dict[str, Any] = {
        **manifests.shown(start, prediction), "p": prediction, "targets": targets, "storage": storage,
        "checkpoint": checkpoint(deployment), "ramp": ramp(prediction), "prefix": shared_prefix(prediction),
        "directory": DIRECTORY, "range_ratio": RANGE_RATIO, "prompts": benchmark_prompts,
        "script": script, "environment": manifests.environment(engine),
        "goodput": goodput(targets), "start_up": start.start_up,
        "scaled": manifests.scaled(prediction, scaling) if "kubernetes" in wanted else None,
        **alerts.watched(prediction, targets, at),
    }  # fmt: skip
    names = values["files"] = file_names(prediction, wanted)
    made = manifests.manifests([kind for kind in wanted if kind in manifests.FILES], start, prediction, scaling)
    if {"alerts.yml", "k8s/monitor.yaml"} <= {*names}:
        made["k8s/monitor.yaml"] += render("k8s/rules.yaml", rules=Markup(render("alerts.yml", **values)), **values)
    made |= {"trtllm.yaml": start.config} | ({"grafana.json": dashboard(values)} if "grafana.json" in names else {})
    return {name: made[name] if name in made else render(name, **values) for name in names}


def _of_pools(prediction: Prediction, targets: Sequence[Target], storage: str, names: Sequence[str]) -> dict[str, str]:
    """The files `names` that start a worker of either pool, the router before them, and the benchmark of both."""
    first, rest = launches(prediction, storage)
    deployment, serving = prediction.deployment, rest.serving
    if serving.router is None:
        raise PlannerError(f"no router for pools of {deployment.engine.name} is known")
    workers = {"prefill.sh": first, "decode.sh": rest}
    sizes = " and ".join(f"{one.deployment.layout.replicas} {one.role}" for one in workers.values())
    engine = deployment.engine
    values: dict[str, Any] = {
        "title": f"{deployment.model.name} in pools of {sizes} workers on {deployment.gpu.name}, {engine}",
        "prefill": first, "decode": rest, "port": ROUTER_PORT, "router": serving.router, "script": script,
        "package": "sglang-router" if engine.name == "sglang" else "vllm-router",
        "bootstrap": BOOTSTRAP_PORT if engine.name == "sglang" else None, "environment": manifests.environment(engine),
        "p": prediction, "targets": targets, "checkpoint": checkpoint(deployment), "goodput": goodput(targets),
        "prefix": shared_prefix(prediction), "range_ratio": RANGE_RATIO, "prompts": benchmark_prompts,
    }  # fmt: skip
    values |= {"ramp": ramp(prediction)} if "bench.sh" in names else {}
    found = {}
    for name in names:
        start, template = workers.get(name, first), "serve.sh" if name in workers else name
        found[name] = render(template, **values, launch=start, d=start.deployment, layout=start.deployment.layout)
    return found


def goodput(targets: Sequence[Target]) -> dict[str, float]:
    """The limits that `vllm bench serve` counts by, of each metric the last and widest."""
    slowest = sorted(targets, key=lambda target: target.seconds)
    return {("e2el" if t.metric == "e2e" else t.metric): t.seconds for t in slowest if t.metric != "itl"}


def ramp(prediction: Prediction) -> dict[float, Performance]:
    """What `bench.sh` should measure on one replica, or both pools, at growing shares of the traffic, by rate.

    Each step is replayed as the script runs it, from its first request to its last.
    """
    deployment, workload, first = prediction.deployment, prediction.workload, prediction.prefill
    assert workload is not None
    copies = 1 if first else deployment.layout.replicas
    served = prediction.performance.request_tps.mid if prediction.performance else 0.0
    prefix = shared_prefix(prediction)
    drawn = replace(
        workload, prompt=_random(workload.prompt.mean, prefix), output=_random(workload.output.mean), trace=None,
        prefix_tokens=prefix, prefix_hit_rate=float(prefix > 0), adapter_zipf=0.0,
    )  # fmt: skip
    found = {}
    for share in RAMP:
        rate = float(f"{(workload.rate or served) / copies * share:.3g}")
        step = replace(drawn.at(rate), num_prompts=benchmark_prompts(rate))
        one = evaluate_disaggregated(first, deployment, step) if first else predict(deployment.with_replicas(1), step)
        found[rate] = one.performance
    return {rate: performance for rate, performance in found.items() if performance}


def shared_prefix(prediction: Prediction) -> int:
    """Tokens that all prompts of the benchmark begin with: the scenario's own, or what the plan reuses on average."""
    assert prediction.workload is not None
    return prediction.workload.prefix_tokens or int(prediction.load.cached_tokens)


def benchmark_prompts(rate: float) -> int:
    """Requests of one step of `bench.sh`: ten minutes of arrivals, and enough for a percentile."""
    return max(round(rate * DEFAULT_SECONDS), LEAST_PROMPTS)


def _random(mean: float, prefix: int = 0) -> Lengths:
    """Lengths as `--random-range-ratio` draws them: a shared prefix, and the rest uniform around its mean."""
    rest = max(mean - prefix, 1.0)
    low, high = (prefix + rest * (1 + side * RANGE_RATIO) for side in (-1, 1))
    return Lengths.uniform(high, low / high)
