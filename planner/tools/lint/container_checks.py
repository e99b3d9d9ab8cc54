"""Check what a server's container is given: GPUs, shared memory, probes, Services' variables."""

import re
from collections.abc import Iterator

from planner.core.errors import PlannerError
from planner.core.units import GIB, MIB
from planner.engines.cli_options import load_recorded_names
from planner.engines.deployment import deploy_on
from planner.latency.startup_time import StartupTime, estimate_startup
from planner.tools.lint.container_setup import ContainerSetup
from planner.tools.lint.deployment_reader import (
    build_command_deployment,
    get_served_name,
    read_layout,
)
from planner.tools.lint.findings import LintFinding, LintVerdict
from planner.tools.lint.option_checks import CheckedCommand
from planner.tools.lint.server_commands import is_hub_name

MIN_SHM_BYTES = GIB
"""Least /dev/shm of a server on several GPUs (NCCL user guide, troubleshooting: --shm-size=1g)."""
_SHM_ADVICE = {
    "docker": "--ipc=host, or --shm-size 16g",
    "compose": "ipc: host, or shm_size: 16gb",
    "kubernetes": "a volume {emptyDir: {medium: Memory}} mounted at /dev/shm",
}
_GPU_ADVICE = {
    "docker": "--gpus all",
    "compose": "deploy.resources.reservations.devices, or gpus: all",
    "kubernetes": "resources: {limits: {nvidia.com/gpu: N}}, or the vendor's name",
}
_FASTEST_GPU, _SMALLEST_MODEL = "H100", "Qwen/Qwen3-0.6B"
"""What the least startup is estimated for, if GPU or model is not known."""
_DEFAULT_HUB_CACHE = "/root/.cache/huggingface"
"""Where huggingface_hub keeps what it downloads (its documentation, HF_HOME)."""


def check_container(checked: CheckedCommand, gpu: str | None) -> Iterator[LintFinding]:
    """Yield what is wrong with the container of a command; nothing for one without."""
    setup = checked.command.setup
    if setup is None:
        return
    is_visible = "NVIDIA_VISIBLE_DEVICES" in checked.command.environment
    # what was not read may be a router, which needs none
    if setup.takes_gpus and not (setup.has_gpus or is_visible or checked.command.unread):
        why = "the container is given no GPU, unless the host's runtime gives it all"
        yield _make_finding("GPUs", "no GPUs", "risky", why, _GPU_ADVICE[setup.runtime])
    yield from _check_shared_memory(checked, setup)
    yield from _check_probe(checked, setup, gpu)
    yield from _check_service_names(checked, setup)


def _check_shared_memory(checked: CheckedCommand, setup: ContainerSetup) -> Iterator[LintFinding]:
    try:
        layout = read_layout(checked.command.engine, checked.argument_values)
    except PlannerError:
        return
    if layout.num_gpus == 1 or setup.shm_bytes is None or setup.shm_bytes >= MIN_SHM_BYTES:
        return
    why = (
        f"{layout.num_gpus} GPUs exchange data through /dev/shm, and the container has"
        f" {setup.shm_bytes / MIB:.0f} MiB of it: the start ends, or a worker dies under load"
    )
    written = f"/dev/shm of {setup.shm_bytes / MIB:.0f} MiB"
    yield _make_finding("/dev/shm", written, "risky", why, _SHM_ADVICE[setup.runtime])


def _check_probe(
    checked: CheckedCommand, setup: ContainerSetup, gpu: str | None
) -> Iterator[LintFinding]:
    """Check the time until a probe kills the server against its startup, as far as it is known."""
    limit_s, version = setup.start_limit_s, str(checked.version)
    if limit_s is None or checked.command.engine != "vllm":
        return
    try:
        deployment = build_command_deployment(checked, gpu or _FASTEST_GPU, version)
    except PlannerError:
        try:
            deployment = deploy_on(_SMALLEST_MODEL, _FASTEST_GPU, engine_version=version)
        except PlannerError:
            return
    places = [
        str(checked.argument_values.get("download_dir") or ""),
        *(checked.command.environment.get(name, "") for name in ("HF_HOME", "HF_HUB_CACHE")),
        _DEFAULT_HUB_CACHE,
    ]
    is_kept = setup.volumes is None or any(
        place.startswith(volume) or re.search("cache|hugging|model", volume.casefold())
        for volume in setup.volumes
        for place in places
    )
    is_downloaded = is_hub_name(get_served_name(checked)) and not is_kept
    slow = "internet" if is_downloaded else "network"
    stored, slowest = (estimate_startup(deployment, storage) for storage in ("nvme", slow))
    if stored is None or slowest is None or limit_s >= slowest.total.mid:
        return
    place = f"{deployment.model.name} on {deployment.gpu.name}"
    origin = "are downloaded over 1 Gbit/s (assumed)" if is_downloaded else "come over a network"
    again = ", again after each kill: no volume keeps them" if is_downloaded else ""
    is_waiting = setup.runtime == "compose"
    effect = "what waits for it gives up" if is_waiting else "it kills the server"
    again = "" if is_waiting else again
    why = (
        f"{effect} after {limit_s:.0f} s, and {place} starts in"
        f" {_format_startup(stored)}, {_format_startup(slowest)} if the weights {origin}{again}"
    )
    failures = round(1.5 * slowest.total.hi / 10)
    advice = (
        f"start_period: {10 * failures}s"
        if is_waiting
        else f"startupProbe: {{periodSeconds: 10, failureThreshold: {failures}, ...}}"
    )
    verdict: LintVerdict = "contradicts" if limit_s < stored.total.lo else "risky"
    yield _make_finding(setup.probe, f"{setup.probe}: {limit_s:.0f} s", verdict, why, advice)


def _format_startup(startup: StartupTime) -> str:
    return f"{startup.total.mid:.0f} s ({startup.total.lo:.0f}-{startup.total.hi:.0f})"


def _check_service_names(checked: CheckedCommand, setup: ContainerSetup) -> Iterator[LintFinding]:
    """Check for Services whose variables the engine takes for its own.

    Kubernetes sets NAME_PORT, NAME_SERVICE_HOST and others in each pod for each Service
    (kubernetes.io, Service, environment variables).
    """
    command = checked.command
    known = load_recorded_names("environment", command.engine)
    for name in setup.service_names:
        prefix = name.upper().replace("-", "_")
        for variable in (f"{prefix}_PORT", f"{prefix}_SERVICE_HOST", f"{prefix}_SERVICE_PORT"):
            if variable in known and variable not in command.environment:
                why = (
                    f"Kubernetes sets {variable} to the address of this Service, which"
                    f" {command.engine} reads as its own variable: it ends with an error"
                )
                instead = "another name, or enableServiceLinks: false in the pod"
                yield _make_finding("Service", f"Service {name}", "contradicts", why, instead, True)


def _make_finding(
    name: str,
    written: str,
    verdict: LintVerdict,
    why: str,
    instead: str,
    refused: bool = False,
) -> LintFinding:
    return LintFinding("environment", name, written, verdict, why, instead, refused)
