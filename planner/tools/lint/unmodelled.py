"""Find what of a command no model knows: options, processors and servers of other kinds."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from pydantic import Field

from planner.core.catalog import validate_entry
from planner.core.readers import read_yaml
from planner.engines.cli_options import FLAGS_DIR
from planner.engines.deployment import Deployment
from planner.engines.gpu_capabilities import VersionedEntry
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.forms import load_other_processors
from planner.tools.lint.option_checks import CheckedCommand


class UnmodelledOptions(VersionedEntry):
    """An entry of `catalogs/flags/unmodelled.yaml`, whose head explains every field."""

    arguments: tuple[str, ...]
    changes: str
    sizes: bool = False
    usual: dict[str, tuple[str, ...]] = Field(default_factory=dict)


@cache
def _load_unmodelled(engine: str) -> tuple[UnmodelledOptions, ...]:
    return tuple(
        validate_entry(UnmodelledOptions, entry, f"flags/unmodelled.yaml, entry {n} of {engine}")
        for n, entry in enumerate(read_yaml(FLAGS_DIR / "unmodelled.yaml").get(engine, []), 1)
    )


def _list_given(
    checked: CheckedCommand, kinds: Sequence[str]
) -> Iterator[tuple[UnmodelledOptions, str, str]]:
    """Yield what a command is given of the entries, by name and value, but for values usual with a kind."""
    given = {**checked.command.environment, **checked.argument_values}
    for entry in _load_unmodelled(checked.command.engine):
        usual = [one.casefold() for kind in ("any", *kinds) for one in entry.usual.get(kind, ())]
        for name in entry.arguments if entry.applies_to(checked.version) else ():
            argument, _, key = name.partition(".")
            value = given.get(argument)
            if key:
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None and str(value).casefold() not in usual:
                yield entry, name, str(value)


def find_unmodelled_options(
    checked: CheckedCommand, deployment: Deployment
) -> Iterator[LintFinding]:
    """Yield the options of a command planned as `deployment` that change what no model knows."""
    command, generation = checked.command, str(int(deployment.gpu.compute_capability or 0))
    is_mla = deployment.model.architecture.is_mla
    for entry, name, value in _list_given(checked, [generation, f"{generation} mla" * is_mla]):
        why = f"not modelled: it changes {entry.changes}"
        flag = f"--{name.replace('_', '-')}"
        if name.isupper():
            shown = command.shown.show_variable(name, value)
            yield LintFinding("environment", name, f"{name}={shown}", "unread", why)
        elif name.partition(".")[0] in command.config:
            yield LintFinding("setting", name, f"{name}: {value}", "unread", why)
        else:
            named = flag.partition(".")[0]
            written = f"{flag} {command.shown.show_word(named, value)}"
            yield LintFinding("flag", named, written, "unread", why)


def explain_unmodelled_server(checked: CheckedCommand) -> str:
    """Explain why nothing of a command's memory and speed is known here; empty if it is."""
    command, device = checked.command, str(checked.argument_values.get("device", ""))
    unchecked = "memory, latencies and throughput are not checked"
    if device in load_other_processors() or (command.setup and not command.setup.takes_gpus):
        return f"it serves on processors that are not modelled here: {unchecked}"
    sized = [(name, entry.changes) for entry, name, _ in _list_given(checked, ()) if entry.sizes]
    if sized:
        return f"{sized[0][0]} is not modelled here: it changes {sized[0][1]}"
    return ""
