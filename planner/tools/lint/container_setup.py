"""What a server's container is given: GPUs, shared memory, probes, and who reaches it at which port.

Options of `docker run` are read as the fields of a compose service that they are named after.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from planner.core.units import MIB, parse_bytes
from planner.engines.cli_options import is_unresolved
from planner.tools.lint.forms import load_forms, load_other_processors

MAX_GPUS_OF_A_BOX = 8
"""GPUs that one machine holds, whatever the usual number of their kind."""
DEFAULT_SHM_BYTES = 64 * MIB
"""Size of /dev/shm in a container, if nobody says another (`docker run --help`, Kubernetes)."""
_PROBE_DEFAULTS = {"initialDelaySeconds": 0, "periodSeconds": 10, "failureThreshold": 3}
"""Defaults of a probe (kubernetes.io, Configure Liveness, Readiness and Startup Probes)."""
_ADDRESS_PATTERN = re.compile(
    r"(?P<scheme>https?://)?(?<![\w.-])(?P<host>localhost|\d{1,3}(?:\.\d{1,3}){3}|\[?::1\]?)"
    r"(?:(?P<sign>:|[ \t]+)(?P<port>\d{1,5}|\S)?)?"
)


PortUse = dict[str, Any]
"""Who reaches a container's server (`name`, such as "healthcheck" or "ports"), and at which of its `ports`.

One of these has to be the server's; none: not known. `host` is by which it is asked inside the container, empty from
outside; `problem` says why it reaches nothing, whatever the port.
"""


def _describe_use(
    name: str, ports: Sequence[int], written: str, host: str = "", problem: str = ""
) -> PortUse:
    return {"name": name, "ports": ports, "written": written, "host": host, "problem": problem}


@dataclass(frozen=True)
class ContainerSetup:
    """What `docker run`, a compose file or a manifest gives the container of a server."""

    runtime: Literal["docker", "compose", "kubernetes"]
    has_gpus: bool = True
    num_gpus: int | None = None  # as far as it is a number
    shm_bytes: float | None = DEFAULT_SHM_BYTES  # of /dev/shm; None: the host's, or not limited
    probe: str = ""  # the first probe that kills a server which does not answer yet
    start_limit_s: float | None = None  # when it does
    service_names: tuple[str, ...] = ()  # Services whose addresses are in the environment
    mounts: Mapping[str, str] = field(default_factory=dict)  # path in it -> on the host
    volumes: tuple[str, ...] | None = None  # paths that outlive the container; None: not known
    image: str = ""
    is_member: bool = False  # of several containers that run one server
    uses: tuple[PortUse, ...] = ()
    # "shared": other programs may listen at the same address
    network: Literal["own", "host", "shared"] = "own"
    addresses: tuple[str, ...] = ()  # that it is given
    visible_gpus: tuple[
        str, ...
    ] = ()  # of the host that it takes, the first of a number; empty: not known

    @property
    def takes_gpus(self) -> bool:
        """Whether the image is for GPUs that are known here, and not for other processors."""
        names = "|".join(load_other_processors())
        return not re.search(rf"(?<![a-z])({names})(?![a-z])", self.image)


def get_nested(node: object, *keys: str) -> Any:
    """Return the value under nested keys; None if there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def list_items(value: object) -> list[Any]:
    """Return a list as it is, and anything else as an empty one."""
    return value if isinstance(value, list) else []


def parse_count(value: object) -> int | None:
    """Return a number of things; None for other text."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 10 else None


def read_docker_options(words: Sequence[str]) -> tuple[dict[str, Any], int | None]:
    """Return the options of `docker run` as fields of a compose service, and where its image is."""
    service, at, forms = dict[str, Any](), words.index("run") + 1, load_forms()
    while at < len(words) and words[at].startswith("-"):
        key, equals_sign, value = words[at].partition("=")
        is_switch = key in forms.names["docker_switches"] or re.fullmatch(r"-[ditP]+", key)
        text = value if equals_sign else words[at + 1] if at + 1 < len(words) else ""
        at += 1 if equals_sign or is_switch else 2
        name = forms.spellings["docker_options"].get(key, key.lstrip("-").replace("-", "_"))
        if name in ("ports", "volumes", "environment", "tmpfs"):
            service.setdefault(name, []).append(text)
        else:
            service[name] = True if is_switch else text
        service["detach"] = service.get("detach") or re.fullmatch("-[itP]*d[itP]*", key) is not None
    gpus = str(service.get("gpus", "")).strip("'\"")
    ids = gpus.removeprefix("device=").split(",") if gpus.startswith("device=") else []
    if gpus and gpus != "all":
        service["gpus"] = [{"device_ids": ids} if ids else {"count": parse_count(gpus)}]
    return service, at if at < len(words) else None


def read_service_setup(
    service: Mapping[str, Any], runtime: Literal["docker", "compose"] = "compose", *,
    is_awaited: bool = False,
) -> ContainerSetup:  # fmt: skip
    """Return what a compose service, or `docker run` in its words, gives its container.

    Where others wait until it is healthy, its health check gives up as a probe does.
    """
    reserved = list_items(get_nested(service, "deploy", "resources", "reservations", "devices"))
    gpus = service.get("gpus")
    requests = [*reserved, *list_items(gpus), *([{}] if gpus == "all" else [])]
    count, ids = (get_nested(requests[0] if requests else None, key) for key in ("count", "device_ids"))  # fmt: skip
    named = ",".join(map(str, list_items(ids))).split(",") if ids else []
    mounts = dict[str, str]()
    for one in list_items(service.get("volumes")):
        source, _, target = str(one).partition(":")
        if isinstance(one, Mapping):
            source, target = str(one.get("source", "")), str(one.get("target", ""))
        mounts[target.partition(":")[0]] = source
    is_shared = str(service.get("ipc", "private")) not in ("private", "shareable", "none")
    size = service.get("shm_size")
    mode, networks = str(service.get("network_mode") or ""), service.get("networks")
    joined = networks.values() if isinstance(networks, Mapping) else ()
    addresses = [service.get("ip"), *(get_nested(one, "ipv4_address") for one in joined)]
    has_gpus = any(service.get(key) for key in ("gpus", "devices", "runtime", "privileged"))
    return ContainerSetup(
        runtime,
        bool(requests) or has_gpus,
        count if isinstance(count, int) else len(named) or None,
        None if is_shared or "/dev/shm" in f"{service.get('volumes')} {service.get('tmpfs')}"
        else parse_bytes(str(size)) if size else DEFAULT_SHM_BYTES,
        probe="healthcheck",
        start_limit_s=_read_health_limit(service.get("healthcheck")) if is_awaited else None,
        mounts=mounts,
        volumes=tuple(mounts) if runtime == "compose" else None,
        uses=tuple(_read_service_uses(service, mode == "host")),
        network="host" if mode == "host" else "shared" if ":" in mode else "own",
        addresses=tuple(map(str, filter(None, addresses))),
        # a count takes the host's first ones, and a profile may not start
        visible_gpus=tuple(named) or ("0",) * bool(requests)
        if (runtime == "compose" or service.get("detach")) and not service.get("profiles") else (),
    )  # fmt: skip


def read_pod_setup(
    node: Mapping[str, Any], pod: Mapping[str, Any] | None, kind: str,
    objects: Sequence[Mapping[str, Any]],
) -> ContainerSetup:  # fmt: skip
    """Return what a container of a pod is given; of a template, whose pod is not here, less is known."""
    forms, is_foreign = load_forms(), not pod
    pod = pod or {}
    limits = get_nested(node, "resources", "limits")
    limits = limits if isinstance(limits, Mapping) else {}
    limits = {"requested/gpu": node["requestGPU"]} if "requestGPU" in node else limits  # of a chart
    mounts = {
        str(get_nested(mount, "name")): get_nested(mount, "mountPath")
        for mount in list_items(node.get("volumeMounts"))
    }
    shm: float | None = DEFAULT_SHM_BYTES
    for volume in list_items(pod.get("volumes")):
        if mounts.get(str(get_nested(volume, "name"))) == "/dev/shm":
            size = get_nested(volume, "emptyDir", "sizeLimit")
            shm = parse_bytes(str(size)) if size else None
    containers = list_items(pod.get("containers"))
    has_others = (is_foreign and "containerPort" not in node) or any(
        one in containers or get_nested(one, "restartPolicy") == "Always"
        for one in [*containers[1:], *list_items(pod.get("initContainers"))]
    )
    is_fetched = kind in (
        *forms.names["runtime_kinds"],
        "InferenceService",
    )  # KServe brings the weights
    counts = [n for name, n in limits.items() if str(name).endswith(("/gpu", "/gaudi"))]
    probe, limit_s = _read_start_limit(node)
    return ContainerSetup(
        "kubernetes",
        is_foreign
        or kind in forms.names["runtime_kinds"]  # whose GPUs the InferenceService gives
        or any("/" in str(name) for name in limits)
        or bool(get_nested(node, "resources", "claims")),
        parse_count(counts[0]) if counts else None,
        None if is_foreign or pod.get("hostIPC") is True else shm,
        probe,
        limit_s,
        tuple(
            str(get_nested(one, "metadata", "name"))
            for one in objects
            if one.get("kind") == "Service" and pod.get("enableServiceLinks") is not False
        ),
        volumes=None if is_foreign or is_fetched else tuple(map(str, mounts.values())),
        uses=tuple(_read_pod_uses(node)),
        network="host" if pod.get("hostNetwork") is True else "shared" if has_others else "own",
    )


def _read_health_limit(check: object) -> float | None:
    """Return after how many seconds a service counts as unhealthy; None if that is not known.

    docs.docker.com, Dockerfile reference: failures within the start period do not count.
    """
    if not isinstance(check, Mapping) or not check.get("test"):
        return None
    units, retries = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}, check.get("retries", 3)
    start, interval = (
        sum(
            float(n) * units[unit]
            for n, unit in re.findall(r"(\d{1,9}(?:\.\d{1,9})?)(ms|[hms])", text)
        )
        for text in (str(check.get("start_period", "0s")), str(check.get("interval", "30s")))
    )
    is_known = isinstance(retries, int) and not is_unresolved(str(check))
    return start + interval * retries if is_known else None


def _read_start_limit(node: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the probe that kills a container which does not answer, and after how many seconds."""
    for key in ("startupProbe", "livenessProbe"):
        if isinstance(probe := node.get(key), Mapping):
            numbers = [probe.get(name, default) for name, default in _PROBE_DEFAULTS.items()]
            if not all(isinstance(number, int | float) for number in numbers):
                return key, None
            return key, numbers[0] + numbers[1] * numbers[2]
    return "", None


def _read_check_command(name: str, command: object) -> Iterator[PortUse]:
    """Yield the addresses inside the container that a check's command asks, one of which is enough."""
    text = " ".join(map(str, command)) if isinstance(command, list) else str(command or "")
    found = list[tuple[str, int]]()
    for match in _ADDRESS_PATTERN.finditer(text):
        port, scheme = match["port"] or "", match["scheme"]
        if not port.isdecimal() and (match["sign"] == ":" or not scheme):
            return  # a variable, or no address
        default = 443 if scheme == "https://" else 80
        found.append((match["host"], int(port) if port.isdecimal() else default))
    if found:
        yield _describe_use(
            name,
            tuple(port for _, port in found),
            f"{name}: {found[0][0]} at port {found[0][1]}",
            host=found[0][0],
        )


def _read_service_uses(service: Mapping[str, Any], is_host_network: bool) -> Iterator[PortUse]:
    """Yield who reaches a compose service: its health check, and the ports that it publishes.

    In the host's network Docker ignores these, so that the port on the host has to be the server's.
    """
    yield from _read_check_command("healthcheck", get_nested(service, "healthcheck", "test"))
    published = [
        ":".join(str(one[key]) for key in ("host_ip", "published", "target") if key in one)
        if isinstance(one, Mapping) else str(one)
        for one in list_items(service.get("ports"))
    ]  # fmt: skip
    parts = [one.partition("/")[0].split(":")[-2:] for one in published]
    ports = [parse_count(one[0 if is_host_network else -1]) for one in parts]
    if ports and None not in ports:
        known = tuple(port for port in ports if port is not None)
        yield _describe_use("ports", known, f"ports {', '.join(published)}")


def _read_pod_uses(node: Mapping[str, Any]) -> Iterator[PortUse]:
    """Yield who reaches a container of a pod: its probes."""
    ports = [one for one in list_items(node.get("ports")) if isinstance(one, Mapping)]
    named = {str(one["name"]): one.get("containerPort") for one in ports if "name" in one}
    for key in ("startupProbe", "livenessProbe", "readinessProbe"):
        yield from _read_check_command(key, get_nested(node.get(key), "exec", "command"))
        for kind in ("httpGet", "tcpSocket"):
            asked = get_nested(node.get(key), kind)
            if isinstance(asked, Mapping) and "host" not in asked and "port" in asked:
                port, written = asked["port"], f"{key}: port {asked['port']}"
                number = str(named.get(str(port), port))
                is_wrong = not number.isdecimal() and not is_unresolved(number)
                why = f"no port of the container has the name {number!r:.40}" if is_wrong else ""
                ports_asked = (int(number),) if number.isdecimal() else ()
                yield _describe_use(key, ports_asked, written, problem=why)
