"""The files of a plan: launch script, unit, verifying benchmark, alerts and checklist, all as text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.core.quantities import PlannerError
from planner.facts.engine_metrics import engine_metrics
from planner.facts.workload import DEFAULT_SECONDS, Lengths
from planner.latency.performance import Performance
from planner.latency.start_up import STORAGE
from planner.operations import alerts
from planner.operations.dashboard import dashboard
from planner.operations.launch import manifests
from planner.operations.launch.command import checkpoint, launch
from planner.operations.launch.words import script
from planner.operations.rendering import render
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
FILES = tuple(name for names in KINDS.values() for name in names)
"""What `documents` may write; what watches the plan only where the catalog knows the engine's own names of metrics."""


def file_names(prediction: Prediction, wanted: Sequence[str] = DEFAULT_FILES) -> list[str]:
    """The files that `documents` makes."""
    engine = prediction.deployment.engine
    lacking = set(alerts.FILES) if engine_metrics(engine).without else set()
    lacking |= {"trtllm.yaml"} if engine.name != "trtllm" else set()
    named = [manifests.names(kind, engine) if kind in manifests.FILES else KINDS[kind] for kind in wanted]
    return [name for names in named for name in names if name not in lacking]


def documents(
    prediction: Prediction,
    targets: Sequence[Target],
    storage: str = STORAGE,
    wanted: Sequence[str] = DEFAULT_FILES,
    scaling: Scaling | None = None,
) -> dict[str, str]:
    """File name -> text: shell script, systemd template unit, and whatever else of `KINDS` is wanted.

    `prediction` is the whole deployment's at its rate (or concurrency). `bench.sh` runs shares of that on one replica,
    and states what the plan predicts for each. A starting server reads its weights from `storage`; with
    `scaling` replicas follow its day. Raises
    `PlannerError` when the deployment does not fit.
    """
    if prediction.performance is None:
        raise PlannerError(f"nothing to deploy: {prediction.memory.reason}")
    deployment = prediction.deployment
    layout, engine = deployment.layout, deployment.engine
    slowest = sorted(targets, key=lambda target: target.seconds)  # one limit per metric: the last and widest
    start = launch(prediction, storage)
    at = alerts.endpoints(deployment.replicas, start.port, start.replicas_per_node, start.nodes)
    values: dict[str, Any] = {
        "title": f"{deployment.model.name} on {layout} of {deployment.gpu.name}, {engine.name} {engine.version}",
        "launch": start, "p": prediction, "d": deployment, "layout": layout, "targets": targets,
        "checkpoint": checkpoint(deployment), "ramp": ramp(prediction), "prefix": shared_prefix(prediction),
        "directory": DIRECTORY, "drain_s": start.drain_s, "range_ratio": RANGE_RATIO, "prompts": benchmark_prompts,
        "script": script, "environment": manifests.environment(engine),
        "goodput": {("e2el" if t.metric == "e2e" else t.metric): t.seconds for t in slowest if t.metric != "itl"},
        "start_up": start.start_up,
        "scaled": manifests.scaled(prediction, scaling) if "kubernetes" in wanted else None,
        **alerts.watched(prediction, targets, at),
    }  # fmt: skip
    names = file_names(prediction, wanted)
    made = manifests.manifests([kind for kind in wanted if kind in manifests.FILES], start, prediction, scaling)
    made |= {"trtllm.yaml": start.config} | ({"grafana.json": dashboard(values)} if "grafana.json" in names else {})
    return {name: made[name] if name in made else render(name, **values) for name in names}


def ramp(prediction: Prediction) -> dict[float, Performance]:
    """What `bench.sh` should measure on one replica at growing shares of its traffic: requests/s -> prediction.

    Each step is replayed as the script runs it, from its first request to its last.
    """
    layout, workload = prediction.deployment.layout, prediction.workload
    assert workload is not None
    served = prediction.performance.request_tps.mid if prediction.performance else 0.0
    prefix = shared_prefix(prediction)
    drawn = replace(
        workload, prompt=_random(workload.prompt.mean, prefix), output=_random(workload.output.mean), trace=None,
        prefix_tokens=prefix, prefix_hit_rate=float(prefix > 0), adapter_zipf=0.0,
    )  # fmt: skip
    found = {}
    for share in RAMP:
        rate = float(f"{(workload.rate or served) / layout.replicas * share:.3g}")
        step = replace(drawn.at(rate), num_prompts=benchmark_prompts(rate))
        found[rate] = predict(prediction.deployment.with_replicas(1), step).performance
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
