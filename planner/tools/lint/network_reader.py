"""Read who reaches a container's server, and at which port: probes, published ports, Services."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from planner.engines.cli_options import is_unresolved
from planner.tools.lint.server_commands import PortUse, read_published_ports

_ADDRESS_PATTERN = re.compile(
    r"(?P<scheme>https?://)?(?<![\w.-])(?P<host>localhost|\d{1,3}(?:\.\d{1,3}){3}|\[?::1\]?)"
    r"(?:(?P<sign>:|[ \t]+)(?P<port>\d{1,5}|\S)?)?"
)
_PROBE_KEYS = ("startupProbe", "livenessProbe", "readinessProbe")


def get_nested(node: object, *keys: str) -> Any:
    """Return the value under nested keys; None if there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def list_items(value: object) -> list[Any]:
    """Return a list as it is, and anything else as an empty one."""
    return value if isinstance(value, list) else []


def read_check_command(name: str, command: object) -> Iterator[PortUse]:
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
        yield PortUse(
            name, tuple(port for _, port in found), f"{name}: {text}"[:300], host=found[0][0]
        )


def read_compose_uses(node: Mapping[str, Any], is_host_network: bool) -> Iterator[PortUse]:
    """Yield who reaches a compose service: its health check, and its published ports."""
    yield from read_check_command("healthcheck", get_nested(node, "healthcheck", "test"))
    published = [
        ":".join(str(one[key]) for key in ("host_ip", "published", "target") if key in one)
        if isinstance(one, Mapping) else str(one)
        for one in list_items(node.get("ports"))
    ]  # fmt: skip
    yield from read_published_ports(published, is_host_network)


def read_pod_uses(
    node: Mapping[str, Any], labels: Mapping[str, Any], objects: Sequence[Mapping[str, Any]]
) -> Iterator[PortUse]:
    """Yield who reaches a container of a pod: its probes, and what of the file selects its labels."""
    ports = [one for one in list_items(node.get("ports")) if isinstance(one, Mapping)]
    named = {str(one["name"]): one.get("containerPort") for one in ports if "name" in one}
    for key in _PROBE_KEYS:
        probe = node.get(key)
        if command := get_nested(probe, "exec", "command"):
            yield from read_check_command(key, command)
        for kind in ("httpGet", "tcpSocket"):
            asked = get_nested(probe, kind)
            if isinstance(asked, Mapping) and "host" not in asked and "port" in asked:
                yield _resolve_port(key, f"{key}: port {asked['port']}", [asked["port"]], named)
    for service in objects:
        if service.get("kind") == "Service" and _selects(
            get_nested(service, "spec", "selector"), labels
        ):
            yield from _read_service(service, named, objects)
    for monitor in objects:
        selector = get_nested(monitor, "spec", "selector", "matchLabels")
        if monitor.get("kind") == "PodMonitor" and _selects(selector, labels):
            for endpoint in list_items(get_nested(monitor, "spec", "podMetricsEndpoints")):
                if port := get_nested(endpoint, "port"):
                    yield _resolve_port(
                        _name(monitor), f"{_name(monitor)}: port {port}", [port], named
                    )


def _selects(selector: object, labels: Mapping[str, Any]) -> bool:
    """Return whether a selector of labels picks those; an empty one may pick anything."""
    return (
        isinstance(selector, Mapping)
        and bool(selector)
        and all(str(labels.get(key)) == str(value) for key, value in selector.items())
    )


def _name(one: Mapping[str, Any]) -> str:
    return f"{one.get('kind')} {get_nested(one, 'metadata', 'name')}"[:80]


def _resolve_port(
    name: str, written: str, ports: Iterable[object], named: Mapping[str, object]
) -> PortUse:
    """Return a use of ports by number or name; a name that no port has reaches nothing."""
    numbers = list[int]()
    for port in ports:
        number = named.get(str(port), port)
        if str(number).isdecimal():
            numbers.append(int(str(number)))
        elif is_unresolved(number) or is_unresolved(str(port)):
            return PortUse(name, (), written)
        else:
            why = f"no port of the container has the name {str(port)!r:.40}"
            return PortUse(name, (), written, problem=why, is_certain=False)
    return PortUse(name, tuple(numbers), written)


def _read_service(
    service: Mapping[str, Any], named: Mapping[str, object], objects: Sequence[Mapping[str, Any]]
) -> Iterator[PortUse]:
    """Yield a Service's ports in the container, and who reaches it at ports that it does not have."""
    ports = [
        one for one in list_items(get_nested(service, "spec", "ports")) if isinstance(one, Mapping)
    ]
    targets = [one.get("targetPort", one.get("port")) for one in ports]
    if not ports or None in targets:
        return
    written = f"{_name(service)}: targetPort {', '.join(map(str, targets))}"
    yield _resolve_port(_name(service), written, targets, named)
    known = {str(one.get(key)) for one in ports for key in ("port", "name") if one.get(key)}
    own = {str(one.get("name")) for one in ports}
    name = str(get_nested(service, "metadata", "name"))
    labels = get_nested(service, "metadata", "labels") or {}
    for other in objects:
        kind = other.get("kind")
        if kind in ("Ingress", "HTTPRoute"):
            wanted, accepted = list(_list_backend_ports(other.get("spec"), name)), known
        elif kind == "ServiceMonitor" and _selects(
            get_nested(other, "spec", "selector", "matchLabels"), labels
        ):
            endpoints = list_items(get_nested(other, "spec", "endpoints"))
            wanted, accepted = [p for one in endpoints if (p := get_nested(one, "port"))], own
        else:
            continue
        for port in wanted:
            if str(port) not in accepted and not is_unresolved(str(port)):
                why = f"{_name(service)} has no port {str(port)!r:.40}, only {', '.join(sorted(accepted))}"
                yield PortUse(_name(other), (), f"{_name(other)}: port {port}", problem=why)


def _list_backend_ports(node: object, service: str) -> Iterator[object]:
    """Yield the ports at which an Ingress or a route reaches a Service."""
    if isinstance(node, list):
        for item in node:
            yield from _list_backend_ports(item, service)
    if not isinstance(node, Mapping):
        return
    backend = node.get("service")
    if isinstance(backend, Mapping) and backend.get("name") == service:
        port = backend.get("port")
        yield from (p for key in ("number", "name") if (p := get_nested(port, key)))
    for reference in list_items(node.get("backendRefs")):
        is_service = get_nested(reference, "kind") in (None, "Service")
        if (
            is_service
            and get_nested(reference, "name") == service
            and get_nested(reference, "port")
        ):
            yield reference["port"]
    for value in node.values():
        yield from _list_backend_ports(value, service)
