"""Check where a server listens against what probes, publishes and scrapes it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from planner.engines.cli_options import is_unresolved
from planner.tools.lint.container_setup import ContainerSetup, PortUse
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.option_checks import CheckedCommand

_ANY_ADDRESSES = ("", "0.0.0.0", "::", "[::]", "*")
_LOOPBACK_PATTERN = re.compile(r"localhost|127(\.\d{1,3}){3}|\[?::1\]?")


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
        return is_address and self.host not in _ANY_ADDRESSES and not self.is_loopback


def find_listener(checked: CheckedCommand) -> Listener | None:
    """Find where a command's server listens; None if it does not listen, or a wrapper does for it."""
    command, values = checked.command, checked.argument_values
    is_worker = values.get("headless") or values.get("uds") or values.get("node_rank")
    if is_worker or command.launched or command.role or command.unread:
        return None
    known = checked.options.by_spelling
    host, port = (
        values.get(name.lstrip("-"), known[name].default if name in known else None)
        for name in ("--host", "--port")
    )
    others = {v for name, v in values.items() if "port" in name and isinstance(v, int)}
    return Listener(
        None if is_unresolved(host) else str(host or ""),
        int(str(port)) if str(port).isdecimal() else None,
        frozenset(others),
    )


def check_network(checked: CheckedCommand) -> Iterator[LintFinding]:
    """Yield what does not reach the server of a command in a container."""
    command = checked.command
    setup = command.setup or (ContainerSetup("docker") if command.container else None)
    listener = find_listener(checked)
    if setup is None or listener is None:
        return
    yield from _check_address(listener, setup)
    has_key = checked.argument_values.get("api_key") or any(
        name.endswith("API_KEY") for name in command.environment
    )
    for use in setup.uses:
        if why := _explain_unreached(use, listener, setup):
            yield LintFinding("environment", use.name, use.written, "contradicts", *why)
        elif use.name == "ports" and not (command.planned_on or has_key or listener.is_loopback):
            published = use.written.removeprefix("ports ").split(", ")
            if all(re.match(r"127\.|localhost:|\[::1\]", one) for one in published):
                continue
            key = "a key in VLLM_API_KEY, " if command.engine == "vllm" else ""
            yield LintFinding(
                "environment",
                use.name,
                use.written,
                "ok",
                "whoever reaches the host asks the server: it wants no API key",
                f"{key}a gateway, or the port on 127.0.0.1 alone",
            )


def _check_address(listener: Listener, setup: ContainerSetup) -> Iterator[LintFinding]:
    """Check for an address that a container of its own network lacks, or on which it is alone."""
    written, instead = f"--host {listener.host}", "--host 0.0.0.0"
    if setup.network == "host":
        return
    if listener.is_specific and listener.host not in setup.addresses:
        why = "the container has a network of its own, without this address: it cannot listen there"
        yield LintFinding("flag", "--host", written, "contradicts", why, instead, True)
    is_asked = any(listener.port in use.ports and not use.host for use in setup.uses)
    if listener.is_loopback and (is_asked or setup.network == "own"):
        why = f"it listens on {listener.host}, which nobody reaches from outside of the container"
        verdict = "contradicts" if is_asked else "risky"
        yield LintFinding("flag", "--host", written, verdict, why, instead)  # type: ignore[arg-type]


def _explain_unreached(
    use: PortUse, listener: Listener, setup: ContainerSetup
) -> tuple[str, str] | None:
    """Return why a use does not reach the server, and what would; None if it does, or may."""
    may_be_another = setup.network == "shared"
    if use.problem:
        return None if may_be_another and not use.is_certain else (use.problem, "")
    if use.host and listener.is_specific and _LOOPBACK_PATTERN.fullmatch(use.host):
        why = f"it asks {use.host}, and the server listens on {listener.host} alone: never healthy"
        return why, f"{listener.host} in it, or --host 0.0.0.0"
    reached = {listener.port, *listener.other_ports}
    if listener.port is None or not use.ports or reached & set(use.ports) or may_be_another:
        return None
    asked = " or ".join(map(str, dict.fromkeys(use.ports)))
    why = f"it reaches for port {asked}, and the server listens on {listener.port}"
    return why, f"{listener.port} in it, or --port {use.ports[0]}"
