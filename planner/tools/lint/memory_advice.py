"""What a command can change against too little GPU memory, beyond what every deployment can."""

from collections.abc import Iterator
from dataclasses import replace

from planner.core.number_format import format_number
from planner.core.text import format_count
from planner.core.units import GIB
from planner.engines.argument_names import load_argument_names
from planner.engines.deployment import Deployment
from planner.memory.memory_plan import MemoryPlan, find_memory_changes, plan_memory
from planner.planning.memory_remedies import MemoryRemedies, MemoryRemedy, find_memory_remedies

FEWER_ADAPTERS = (32, 16, 8, 4, 2, 1)
"""Slots of adapters to propose."""


def find_command_remedies(memory: MemoryPlan) -> MemoryRemedies | None:
    """Find the changes that free memory of a command; None if it surely starts as it is.

    Beside those of every deployment these are fewer slots of adapters.
    """
    remedies = find_memory_remedies(memory)
    if remedies is None:
        return None
    found = (*_try_fewer_adapters(memory), *remedies.remedies)
    return replace(remedies, remedies=found)


def describe_shortage(memory: MemoryPlan, remedies: MemoryRemedies) -> str:
    """Say in a sentence what is missing for what, and which part of it adapters take."""
    missing, kv = remedies.missing_bytes, memory.kv_available.mid
    sentences = list[str]()
    if missing > 0 and kv < 0:
        sentences.append(
            f"{missing / GIB:.2f} GiB per GPU is missing: {-kv / GIB:.2f} for weights, activations and"
            f" graphs, and {(missing + kv) / GIB:.2f} for the KV cache of one request of"
            f" {memory.layout.max_model_len:,} tokens."
        )
    elif missing > 0:
        sentences.append(f"{format_number(missing / GIB, 2)} GiB per GPU is missing.")
    args = memory.deployment.args
    if args.max_loras:
        adapters = format_number(memory.adapters_bytes / GIB, 2)
        slots = format_count(args.max_loras, "slot")
        sentences.append(
            f"{adapters} GiB of what is loaded are {slots} of adapters of rank {args.max_lora_rank}."
        )
    return " ".join(sentences)


def describe_remedies(memory: MemoryPlan, remedies: MemoryRemedies) -> list[str]:
    """Return a heading and a line per remedy, those of a deeper level indented."""
    head = describe_shortage(memory, remedies)
    shown = remedies.enough or sorted(remedies.remedies, key=lambda one: -one.freed_bytes)
    lines = [f"  {one}" for one in shown]
    if not remedies.enough:
        title = "No change is enough alone:"
        lines.append(f"  enough is: {remedies.combination}")
    else:
        title = "Each of these is enough alone:" if lines[1:] else "One change is enough:"
    lines.append("Other GPUs, machines and checkpoints: headroom plan")
    return [f"{head} {title}".strip(), *lines]


def reduce_adapters(memory: MemoryPlan) -> Deployment | None:
    """Return the deployment with the most slots of adapters with which other changes let it start.

    The adapters stay in host memory; None where it starts, has one slot, or nothing helps.
    """
    deployment = memory.deployment
    if memory.status == "ok" or deployment.args.max_loras < 2:
        return None
    for fewer in _list_fewer_adapters(deployment):
        after = plan_memory(fewer)
        if after.status == "ok" or find_memory_changes(after, _list_mild_arguments(deployment)):
            return fewer
    return None


def _list_mild_arguments(deployment: Deployment) -> set[str]:
    """List the engine's arguments that take no accuracy."""
    return {*load_argument_names(deployment.engine.name).engine_names} - {"kv_cache_dtype"}


def _name_slots(deployment: Deployment) -> str:
    return f"max_loras {deployment.args.max_loras} max_cpu_loras {deployment.args.max_cpu_loras}"


def _list_fewer_adapters(deployment: Deployment) -> Iterator[Deployment]:
    args = deployment.args
    for slots in FEWER_ADAPTERS if deployment.engine.name == "vllm" else ():
        if slots < args.max_loras:
            kept = max(args.max_cpu_loras, args.max_loras)
            yield deployment.with_args(max_loras=slots, max_cpu_loras=kept)


def _try_fewer_adapters(memory: MemoryPlan) -> Iterator[MemoryRemedy]:
    """Yield the most slots of adapters that are enough, or else what one slot frees."""
    best = None
    for fewer in _list_fewer_adapters(memory.deployment):
        after = plan_memory(fewer)
        price = "fewer adapters run at once, the others wait in host memory"
        freed = after.kv_available.mid - memory.kv_available.mid
        best = MemoryRemedy(_name_slots(fewer), price, freed, after.status == "ok")
        if best.is_enough:
            break
    if best:
        yield best
