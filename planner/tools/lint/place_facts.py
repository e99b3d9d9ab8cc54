"""Find the facts about the place of a server: `catalogs/flags/place.yaml` has the rules over them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.core.errors import PlannerError
from planner.core.units import MIB
from planner.engines.cli_options import is_unresolved, load_recorded_names
from planner.latency.startup_time import estimate_startup
from planner.tools.lint.container_setup import ContainerSetup
from planner.tools.lint.deployment_reader import (
    build_command_deployment,
    get_served_name,
    get_share_of_memory,
    read_layout,
)
from planner.tools.lint.option_checks import CheckedCommand
from planner.tools.lint.server_commands import is_hub_name

_LOOPBACK_PATTERN = re.compile(r"localhost|127(\.\d{1,3}){3}|\[?::1\]?")
_FASTEST_GPU = "H100"
"""What the least startup is estimated for if the GPU is not known."""


@dataclass(frozen=True)
class Listener:
    """Where a server listens; None for what is known only where it runs."""

    host: str | None
    port: int | None
    other_ports: frozenset[int]  # of options beside --port

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside of the machine, or of the container, reaches it."""
        return self.host is not None and bool(_LOOPBACK_PATTERN.fullmatch(self.host))

    @property
    def is_specific(self) -> bool:
        """Whether it listens on one address, which is not the loopback's."""
        is_address = bool(re.fullmatch(r"\d{1,3}(\.\d{1,3}){3}", self.host or ""))
        return is_address and self.host != "0.0.0.0" and not self.is_loopback


def find_place_facts(
    checked: CheckedCommand, gpu: str | None, commands: Sequence[CheckedCommand]
) -> dict[str, Any]:
    """Find what is known of the container of a command's server; nothing for one without."""
    command = checked.command
    setup = command.setup or (ContainerSetup("docker") if command.container else None)
    if setup is None:
        return {}
    listener, is_given = _find_listener(checked), command.setup is not None
    try:
        num_gpus = read_layout(command.engine, checked.argument_values).num_gpus
    except PlannerError:
        num_gpus = 1
    is_visible = "NVIDIA_VISIBLE_DEVICES" in command.environment
    # what was not read may be a router, which needs none
    has_gpus = setup.has_gpus or is_visible or command.unread or not setup.takes_gpus
    return {
        "setup": setup, "runtime": setup.runtime, "engine": command.engine, "is_given": is_given,
        "gpus": num_gpus, "lacks_gpus": is_given and not has_gpus,
        "shm_mib": None if setup.shm_bytes is None else setup.shm_bytes / MIB,
        "listener": listener,
        "uses": [*_list_uses(setup, listener)] if listener else [],
        "is_asked": any(listener and listener.port in use.ports and not use.host for use in setup.uses),
        "neighbours": _find_neighbours(checked, commands),
        "probe": _find_probe(checked, setup, gpu),
        "services": [*_list_services(checked, setup)],
    }  # fmt: skip


def _find_listener(checked: CheckedCommand) -> Listener | None:
    """Find where a command's server listens; None if it does not listen, or a wrapper does for it."""
    command, values = checked.command, checked.argument_values
    is_worker = values.get("headless") or values.get("uds") or values.get("node_rank")
    if is_worker or command.role or command.unread:
        return None
    known = checked.options.by_spelling
    host, port = (
        values.get(name.lstrip("-"), known[name].default if name in known else None)
        for name in ("--host", "--port")
    )
    return Listener(
        None if is_unresolved(host) else str(host or ""),
        int(str(port)) if str(port).isdecimal() else None,
        frozenset(v for name, v in values.items() if "port" in name and isinstance(v, int)),
    )


def _list_uses(setup: ContainerSetup, listener: Listener) -> Iterator[dict[str, Any]]:
    """Yield who reaches the container, and whether the server's address and ports are theirs."""
    reached = {listener.port, *listener.other_ports}
    for use in setup.uses:
        yield {
            **vars(use),
            "asks_loopback": bool(_LOOPBACK_PATTERN.fullmatch(use.host)),
            "misses": None not in reached and bool(use.ports) and not reached & {*use.ports},
        }


def _find_neighbours(
    checked: CheckedCommand, commands: Sequence[CheckedCommand]
) -> dict[str, Any] | None:
    """Find the services of a compose file that share a GPU with one, and all their shares of its memory."""
    if checked.command.engine != "vllm" or not _list_used_gpus(checked):
        return None
    ours = _list_used_gpus(checked)
    beside = [one for one in commands if one is not checked and ours & _list_used_gpus(one)]
    return {
        "names": " and ".join(one.command.where for one in beside),
        "sum": sum(map(get_share_of_memory, (checked, *beside))),
        "share": get_share_of_memory(checked),
        "is_given": "gpu_memory_utilization" in checked.argument_values,
    }  # fmt: skip


def _list_used_gpus(checked: CheckedCommand) -> set[str]:
    """List the host's GPUs that a service of a compose file takes; empty if not known."""
    setup, environment = checked.command.setup, checked.command.environment
    is_known = setup and not environment.keys() & {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}
    return {*setup.visible_gpus} if setup and is_known else set()


def _find_probe(
    checked: CheckedCommand, setup: ContainerSetup, gpu: str | None
) -> Mapping[str, Any] | None:
    """Find when a probe gives up, and how long the start takes from a disk and over a network."""
    if setup.start_limit_s is None or checked.command.engine != "vllm":
        return None
    try:
        deployment = build_command_deployment(checked, gpu or _FASTEST_GPU, str(checked.version))
    except PlannerError:
        return None
    downloads = is_hub_name(get_served_name(checked)) and setup.volumes == ()
    stored = estimate_startup(deployment, "nvme")
    slow = estimate_startup(deployment, "internet" if downloads else "network")
    return None if stored is None or slow is None else {
        "name": setup.probe, "limit_s": setup.start_limit_s, "stored": stored, "slow": slow,
        "place": f"{deployment.model.name} on {deployment.gpu.name}", "downloads": downloads,
        "failures": round(1.5 * slow.total.hi / 10),
    }  # fmt: skip


def _list_services(checked: CheckedCommand, setup: ContainerSetup) -> Iterator[dict[str, str]]:
    """Yield Services for which Kubernetes sets a variable in each pod that the engine reads."""
    known = load_recorded_names("environment", checked.command.engine)
    for name in setup.service_names:
        prefix = name.upper().replace("-", "_")
        for variable in (f"{prefix}_PORT", f"{prefix}_SERVICE_HOST", f"{prefix}_SERVICE_PORT"):
            if variable in known and variable not in checked.command.environment:
                yield {"name": name, "variable": variable}
