"""Render a plan for containers and clouds: compose, Kubernetes, RunPod.

The text is in templates of the same names; this module computes their values.
"""

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import yaml

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.units import GB, GIB
from planner.core.versions import Version
from planner.deploy.alerts import get_prometheus_job
from planner.deploy.arguments import (
    COMPOSE,
    CONTAINER_MOUNT_DIR,
    SCRIPT,
    format_argument,
    format_for_pod,
)
from planner.deploy.launch_spec import LaunchSpec, build_launches
from planner.engines.deployment import Deployment
from planner.engines.engine import Engine
from planner.engines.metric_names import get_metric_names
from planner.latency.startup_time import DEFAULT_MAX_STARTUP_S, estimate_startup
from planner.memory.weights import compute_checkpoint_bytes, compute_read_bytes
from planner.planning.autoscaling import AutoscalingPlan, compute_stabilization_s
from planner.planning.prediction import Prediction
from planner.workload.daily_profile import HOURS_PER_DAY, HOURS_PER_WEEK

MANIFEST_FILES: dict[str, tuple[str, ...]] = {
    "compose": ("compose.yaml",),
    "kubernetes": ("k8s/serve.yaml", "k8s/scale.yaml", "k8s/monitor.yaml"),
    "runpod": ("runpod.env",),
}
"""The manifest kinds that a scenario may request, and their files."""
MONITORING_KINDS = ("alerts", "dashboard")
"""The kinds that need the names of the engine's metrics."""
DOWNLOAD_STORAGE = "download"
"""Storage of a pod without cached weights: a probe has to allow for the download."""
PROBE_TIMEOUT_FACTOR = 1.5
"""Probe timeout as a multiple of the pessimistic end of the startup time."""
LEADER_WORKER_SET_VARIABLES = {"NODE_RANK": "LWS_WORKER_INDEX", "MASTER_ADDR": "LWS_LEADER_ADDRESS"}
"""Our variables by a LeaderWorkerSet's names (lws.sigs.k8s.io, environment variables)."""
HOST_MEMORY_GIB = 16
"""Memory of the processes of a server beside weights that pass through and offloaded KV cache."""
MIN_RDMA_BANDWIDTH = 5 * GB
"""Bandwidth of a GPU's link between nodes, bytes/s, above which TCP does not carry it."""


class EnvVariableEntry(SourcedEntry):
    """One entry of `catalogs/environment.yaml`, whose head explains every field."""

    engine: str | None = None
    what: str
    example: str = ""
    first: Version = Version(0, 0)
    last: Version | None = None
    flag: str = ""


def load_environment_variables(engine: Engine) -> dict[str, EnvVariableEntry]:
    """Return the variables that matter to `engine` at its version, by name."""
    known = load_catalog("environment.yaml", EnvVariableEntry)
    return {
        name: entry for name, entry in known.items()
        if entry.engine in (None, engine.name) and entry.first <= engine.release
        and (entry.last is None or engine.release <= entry.last)
    }  # fmt: skip


def build_slug(name: str) -> str:
    """Return a model's name as a Kubernetes name: "llama-3-1-8b-instruct", "model-4-bit"."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.rpartition("/")[2].lower()).strip("-")[:40].strip("-")
    is_name = re.match("[a-z].", plain) and isinstance(
        yaml.safe_load(plain), str
    )  # true, no and y are none in YAML
    return plain if is_name else f"model-{plain}".strip("-")


def explain_unsupported_kinds(prediction: Prediction, wanted: Sequence[str]) -> dict[str, str]:
    """Return kind -> reason for the `wanted` kinds of files that are not written for the plan."""
    reasons = {
        kind: reason
        for launch in build_launches(prediction)
        for kind, is_broken, reason in _list_rules(launch)
        if is_broken
    }
    return {kind: reasons[kind] for kind in wanted if kind in reasons}


def _list_rules(launch: LaunchSpec) -> list[tuple[str, object, str]]:
    """Return (kind, whether its files cannot serve this launch, why not), the decisive one last."""
    engine, gpu, variables = launch.deployment.engine, launch.deployment.gpu, launch.variables
    is_split, kinds = launch.nodes > 1, (*MONITORING_KINDS, *MANIFEST_FILES)
    missing = get_metric_names(engine).without
    asked = next((variables[name].missing for name in ("MODEL", "DRAFT") if name in variables), "")
    return [
        *((kind, missing, missing) for kind in MONITORING_KINDS),
        *(
            (kind, is_split, f"a replica starts on one node, and the plan's spans {launch.nodes}")
            for kind in ("compose", "runpod")
        ),
        ("runpod", engine.name != "vllm", f"it serves vLLM alone, not {engine.name}"),
        ("runpod", gpu.vendor != "nvidia", f"its GPUs are NVIDIA's, and the plan is for {gpu.name}"),
        ("runpod", asked, f"it cannot ask for what the plan leaves open ({asked})"),
        (
            "runpod", not "".join(launch.command).isprintable(),
            "the command has letters that no line of runpod.env can hold",
        ),
        ("kubernetes", launch.image is None, f"no image of {engine} for {gpu.name} is published"),
        (
            "kubernetes", is_split and "MASTER_ADDR" not in variables,
            f"{engine} spans nodes by a launcher of its own",
        ),
        (
            "kubernetes", any(variable.times != 1 for variable in variables.values()),
            "a pod cannot count in NODE_RANK: this version needs serve.sh on each node",
        ),
        *((kind, launch.role, "pools have none") for kind in kinds),
    ]  # fmt: skip


def build_template_values(launch: LaunchSpec) -> dict[str, Any]:
    """Return the values that all templates may use."""
    deployment = launch.deployment
    begins, start_s = (
        estimate_startup(deployment, DOWNLOAD_STORAGE),
        compute_start_timeout_s(deployment),
    )
    engine, layout, slug = (
        deployment.engine,
        deployment.layout,
        build_slug(deployment.model.served_name),
    )
    takes = f": with its weights to be downloaded it takes {begins}" if begins else ""
    held = math.ceil(max(compute_read_bytes(deployment)) * launch.gpus / GIB)
    files = math.ceil(compute_checkpoint_bytes(deployment) / GIB)
    tier = math.ceil(deployment.args.kv_offloading_size * layout.dp)
    return {
        "title": launch.title,
        "launch": launch, "d": deployment, "layout": layout,
        "slug": slug, "keys": f"{slug}-keys", "mounted": CONTAINER_MOUNT_DIR,
        "flags": [word for flag in launch.flags for word in flag.arguments],
        "others": [(flag,) for flag in launch.worker_arguments],
        "program": [("python3",) if word == ("python",) else word for word in launch.program],
        # images lack python
        "renamed": LEADER_WORKER_SET_VARIABLES if launch.nodes > 1 else {}, "pod": format_for_pod,
        "compose": partial(format_argument, dialect=COMPOSE),
        "script": partial(format_argument, dialect=SCRIPT),
        "metrics": get_metric_names(engine).names,
        "drain_s": launch.drain_s, "grace_s": launch.drain_s + 30, "start_s": start_s,
        "started": f"given up after {start_s} s{takes}",
        "cpus": 2 + launch.gpus, "memory_gib": held + tier + HOST_MEMORY_GIB,
        "memory_reason": f"{held} GiB of weights on their way to the GPUs, "
        + (f"{tier} GiB of offloaded KV cache, " if tier else "")
        + f"{HOST_MEMORY_GIB} GiB for the processes",
        # where the plan counts on a link between nodes that only RDMA gives
        "rdma": launch.device.rdma if launch.nodes > 1
        and deployment.gpu.internode_bandwidth >= MIN_RDMA_BANDWIDTH else None,
        "shm_gib": tier + 4 + 2 * launch.gpus,
        "disk_gb": 2 * files + 100,
        "shared_cache": deployment.num_replicas * launch.nodes > 1, "job": get_prometheus_job(deployment),
    }  # fmt: skip


def compute_start_timeout_s(deployment: Deployment) -> int:
    """Return the seconds to wait for a starting replica."""
    begins = estimate_startup(deployment, DOWNLOAD_STORAGE)
    return (
        math.ceil(PROBE_TIMEOUT_FACTOR * begins.total.hi)
        if begins
        else round(DEFAULT_MAX_STARTUP_S)
    )


def build_scaler_values(prediction: Prediction, scaling: AutoscalingPlan | None) -> dict[str, Any]:
    """Return the template values of the autoscaler.

    `scaled` has the requests in flight that add a replica, and minutes until it answers.
    """
    deployment, timeout_s = prediction.deployment, compute_start_timeout_s(prediction.deployment)
    spares, in_flight = deployment.spare_replicas, prediction.mean_in_flight
    least, hours, stable_s = 1, list[tuple[str, str, int]](), compute_stabilization_s(timeout_s)
    if scaling:
        in_flight, stable_s = scaling.scale_up_in_flight, scaling.stabilization_s
        begins, least = estimate_startup(deployment, DOWNLOAD_STORAGE), min(scaling.replicas)
        hours = build_cron_schedule(
            scaling, max(scaling.lead_s, begins.total.hi if begins else 0.0)
        )
    return {
        "in_flight": in_flight, "stable_s": round(stable_s), "least": least + spares, "hours": hours,
        "scaled": {"each": in_flight, "minutes": math.ceil(timeout_s / 60)},
    }  # fmt: skip


def build_cron_schedule(scaling: AutoscalingPlan, lead_s: float) -> list[tuple[str, str, int]]:
    """Return (start, end, replicas) in cron syntax for all hours above the minimum.

    Each start is `lead_s` early, but later than the end before it, for KEDA knows but one end a turn.
    Empty unless the profile is a day or week that starts at midnight.
    """
    counts, all_hours = scaling.replicas, len(scaling.replicas)
    if not scaling.starts_at_midnight or all_hours not in (HOURS_PER_DAY, HOURS_PER_WEEK):
        return []

    def cron(minutes: int) -> str:
        day, rest = divmod(minutes % (all_hours * 60), 24 * 60)
        weekday = "*" if all_hours == HOURS_PER_DAY else (day + 1) % 7  # 0 is Sunday
        return f"{rest % 60} {rest // 60} * * {weekday}"

    changes = [hour for hour in range(all_hours) if counts[hour] != counts[hour - 1]]
    lead, turns = math.ceil(lead_s / 60), zip(changes, [*changes[1:], *changes[:1]], strict=True)
    return [
        (cron(start * 60 - min(lead, (start - end) % all_hours * 60 - 1)), cron(end * 60), counts[start])
        for start, end in turns
        if counts[start] > min(counts)
    ]  # fmt: skip
