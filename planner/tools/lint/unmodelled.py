"""Find what of a command no model knows: options, processors and servers of other kinds."""

import re
from collections.abc import Iterator
from functools import cache

from pydantic import Field

from planner.core.catalog import validate_entry
from planner.core.readers import read_yaml
from planner.engines.cli_options import FLAGS_DIR
from planner.engines.gpu_capabilities import VersionedEntry
from planner.hardware.gpus import Gpu
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.option_checks import CheckedCommand

_OTHER_DEVICES = ("cpu", "tpu", "xpu", "hpu", "npu", "neuron", "openvino")
"""Values of `--device` that are no GPU that is known here (the engines' parsers)."""


class UnmodelledOptions(VersionedEntry):
    """An entry of `catalogs/flags/unmodelled.yaml`, whose head explains every field."""

    arguments: tuple[str, ...]
    changes: str
    usual: dict[str, tuple[str, ...]] = Field(default_factory=dict)


@cache
def _load_unmodelled(engine: str) -> tuple[UnmodelledOptions, ...]:
    return tuple(
        validate_entry(UnmodelledOptions, entry, f"flags/unmodelled.yaml, entry {n} of {engine}")
        for n, entry in enumerate(read_yaml(FLAGS_DIR / "unmodelled.yaml").get(engine, []), 1)
    )


def find_unmodelled_options(checked: CheckedCommand, gpu: Gpu) -> Iterator[LintFinding]:
    """Yield the options of a command planned on `gpu` that change what no model knows."""
    command = checked.command
    given = {**command.environment, **checked.argument_values}
    generation = str(int(gpu.compute_capability or 0))
    for entry in _load_unmodelled(command.engine):
        usual = (*entry.usual.get("any", ()), *entry.usual.get(generation, ()))
        for name in entry.arguments if entry.applies_to(checked.version) else ():
            value = given.get(name)
            if value is None or str(value).casefold() in map(str.casefold, usual):
                continue
            why = f"not modelled: it changes {entry.changes}"
            if name.isupper():
                yield LintFinding("environment", name, f"{name}={value}"[:300], "unread", why)
            else:
                flag = f"--{name.replace('_', '-')}"
                yield LintFinding("flag", flag, f"{flag} {value}"[:300], "unread", why)


def explain_unmodelled_server(checked: CheckedCommand) -> str:
    """Explain why nothing of a command's memory and speed is known here; empty if it is."""
    command, device = checked.command, str(checked.argument_values.get("device", ""))
    unchecked = "memory, latencies and throughput are not checked"
    if device in _OTHER_DEVICES or (command.setup and not command.setup.takes_gpus):
        return f"it serves on processors that are not modelled here: {unchecked}"
    if re.search(r" --omni\b", command.launched):
        return f"vLLM-Omni serves a model in stages, which are not modelled here: {unchecked}"
    return ""
