"""Find the GPU that a deployment's file names: labels of nodes, instance types, accelerators."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from planner.core.catalog import load_catalog
from planner.core.errors import PlannerError
from planner.engines.engine import CloudNames
from planner.hardware.gpus import Gpu, get_gpu
from planner.tools.lint.container_setup import get_nested, list_items
from planner.tools.lint.forms import load_forms


def find_named_gpu(node: Mapping[str, Any]) -> str:
    """Return the GPU on which a mapping wants to run, the smallest of several; empty if it names none.

    With a number if it names one, such as "4xL40S" for SkyPilot's `accelerators: L40S:4`.
    """
    named = [one for text in _list_wanted(node) if (one := resolve_gpu(text))]
    smallest = min(named, key=lambda one: one[1].memory_bytes, default=None)
    if smallest is None:
        return ""
    count, gpu = smallest
    return f"{count}x{gpu.name}" if count else gpu.name


def resolve_gpu(text: str) -> tuple[int, Gpu] | None:
    """Return number (0: none is said) and GPU of a label's value or an instance type; None if unknown."""
    clouds = load_catalog("clouds.yaml", CloudNames)
    for pattern, name in clouds["instances"].names.items():
        if fnmatchcase(text.casefold(), pattern):
            return 0, get_gpu(name)
    match = re.fullmatch(r"(?:nvidia-gpu-|amd-gpu-)?(.+?)(?::(\d{1,3}))?", text.strip())
    if match is None:
        return None
    name = re.sub(r"-shared$", "", match[1], flags=re.IGNORECASE)
    try:
        return int(match[2] or 0), get_gpu(clouds["gpu labels"].names.get(name.casefold(), name))
    except PlannerError:
        return None


def _list_wanted(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a mapping that may name a GPU."""
    for holder in (node, node.get("resources"), node.get("resource")):
        for key in load_forms().names["gpu_keys"]:
            value = get_nested(holder, key)
            if isinstance(value, Mapping):
                yield from (f"{name}:{count}" for name, count in value.items())
            elif isinstance(value, str):
                yield value
    for key in ("nodeSelector", "node_selector", "nodeSelectorTerms", "affinity"):
        yield from _list_texts(node.get(key))


def _list_texts(node: object) -> Iterator[str]:
    """Yield the texts of a selector of nodes, but for those that it does not want."""
    if isinstance(node, str):
        yield node
    is_wanted = get_nested(node, "operator") in (None, "In")
    inner = node.values() if isinstance(node, Mapping) and is_wanted else list_items(node)
    for value in inner:
        yield from _list_texts(value)
