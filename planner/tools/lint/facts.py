"""Find the facts that rules are held against: `catalogs/flags/place.yaml` and `consistency.yaml` have the rules."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.core.errors import PlannerError
from planner.core.units import MIB
from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import get_cli_options, is_unresolved, load_recorded_names
from planner.engines.engine import Engine
from planner.engines.model_support import judge_model_support
from planner.engines.speculation_methods import explain_unsupported_pipeline
from planner.latency.startup_time import estimate_startup
from planner.memory.runtime_overhead import offloads_weights
from planner.models.registry import Model, load_model
from planner.parallelism.layouts import explain_illegal_layout
from planner.tools.lint.container_setup import MAX_GPUS_OF_A_BOX, ContainerSetup
from planner.tools.lint.deployment_reader import (
    build_command_deployment,
    get_served_name,
    get_share_of_memory,
    may_extend_context,
    read_draft_settings,
    read_engine_args,
    read_layout,
    resolve_served_model,
)
from planner.tools.lint.option_checks import CheckedCommand
from planner.tools.lint.server_commands import is_hub_name

_LOOPBACK_PATTERN = re.compile(r"localhost|127(\.\d{1,3}){3}|\[?::1\]?")
_FASTEST_GPU = "H100"
"""What the least startup is estimated for if the GPU is not known."""


def find_place_facts(
    checked: CheckedCommand, gpu: str | None, commands: Sequence[CheckedCommand]
) -> dict[str, Any]:
    """Find what is known of the container of a command's server; nothing for one without."""
    command = checked.command
    setup = command.setup or (ContainerSetup("docker") if command.container else None)
    neighbours = _find_neighbours(checked, commands)
    if setup is None:
        return {"uses": (), "services": (), "probe": None, "neighbours": neighbours}
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
        "is_asked": any(listener and listener["port"] in use["ports"] and not use["host"] for use in setup.uses),
        "neighbours": neighbours,
        "probe": _find_probe(checked, setup, gpu),
        "services": [*_list_services(checked, setup)],
    }  # fmt: skip


def _find_listener(checked: CheckedCommand) -> dict[str, Any] | None:
    """Find where a command's server listens; None if it does not listen, or a wrapper does for it.

    A loopback is reached by nobody outside of the container; a specific address is one beside that.
    """
    command, values = checked.command, checked.argument_values
    if (
        values.get("headless")
        or values.get("uds")
        or values.get("node_rank")
        or command.role
        or command.unread
    ):
        return None
    known = checked.options.by_spelling
    host, port = (
        str(values.get(name.lstrip("-"), known[name].default if name in known else None) or "")
        for name in ("--host", "--port")
    )
    is_address = re.fullmatch(r"\d{1,3}(\.\d{1,3}){3}", host) and host != "0.0.0.0"
    is_loopback = bool(_LOOPBACK_PATTERN.fullmatch(host))
    return {
        "host": host, "port": int(port) if port.isdecimal() else None,
        "other_ports": {v for name, v in values.items() if "port" in name and isinstance(v, int)},
        "is_loopback": is_loopback, "is_specific": bool(is_address) and not is_loopback,
    }  # fmt: skip


def _list_uses(setup: ContainerSetup, listener: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield who reaches the container, and whether the server's address and ports are theirs."""
    reached = {listener["port"], *listener["other_ports"]}
    for use in setup.uses:
        ports = {*use["ports"]}
        yield {
            **use,
            "asks_loopback": bool(_LOOPBACK_PATTERN.fullmatch(use["host"])),
            "misses": None not in reached and bool(ports) and not reached & ports,
        }


def _find_neighbours(
    checked: CheckedCommand, commands: Sequence[CheckedCommand]
) -> dict[str, Any] | None:
    """Find the servers of a file that share a GPU with one, and all their shares of its memory."""
    ours = _list_used_gpus(checked)
    if checked.command.engine != "vllm" or not ours:
        return None
    beside = [one for one in commands if one is not checked and ours & _list_used_gpus(one)]
    return {
        "names": " and ".join(one.command.where or "another command" for one in beside),
        "sum": sum(map(get_share_of_memory, (checked, *beside))),
        "share": get_share_of_memory(checked),
        "is_given": "gpu_memory_utilization" in checked.argument_values,
    }  # fmt: skip


def _list_used_gpus(checked: CheckedCommand) -> set[str]:
    """List the host's GPUs that a server takes beside others of its file; empty if not known."""
    setup, environment = checked.command.setup, checked.command.environment
    if any(map(checked.argument_values.get, ("nnodes", "data_parallel_size_local", "headless"))):
        return set()  # its parts are on machines of their own
    listed = {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"} & environment.keys()
    if setup and (setup.visible_gpus or not checked.command.beside):
        return set() if listed else {*setup.visible_gpus}
    ids = environment[listed.pop()].split(",") if listed else ["0"]
    return {*ids} if checked.command.beside else set()


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


def find_consistency_facts(checked: CheckedCommand, engine: Engine | None) -> dict[str, Any]:
    """Find what a command says; facts about a model that is not known are None."""
    values, name = checked.argument_values, checked.command.engine
    facts: dict[str, Any] = dict.fromkeys(("support", "model", "format", "drafts", "lengths"))
    facts |= {"engine": name, "release": str(engine), "devices": _find_devices(checked)}
    try:
        served, model = resolve_served_model(checked)
    except PlannerError:
        return facts
    # a command that names another class or Transformers' own code is taken at its word
    if engine and values.get("model_impl") != "transformers" and "hf_overrides" not in values:
        support = judge_model_support(model, engine)
        known = {
            "name": served,
            "is_refused": support.state == "refused",
            "sentence": support.sentence,
        }
        facts["support"] = known if support.sentence else None
    try:
        layout = read_layout(name, values)
    except PlannerError:
        return facts
    if engine and engine.name == "sglang" and model.architecture.is_moe:
        layout = replace(
            layout, ep=layout.tp * layout.dp
        )  # DeepEP distributes the experts by itself
    illegal = explain_illegal_layout(model, layout, max(layout.tp, 1), engine)
    legal = [
        tp
        for tp in (1, 2, 4, 8, 16) if illegal
        if not explain_illegal_layout(model, replace(layout, tp=tp, ep=1), tp)
    ]  # fmt: skip
    nearest = [
        *[tp for tp in legal if tp < layout.tp][-1:],
        *[tp for tp in legal if tp > layout.tp][:1],
    ]
    offload = values.get("cpu_offload_gb")
    is_idle = isinstance(offload, float) and engine and not offloads_weights(engine, model)
    drafts, reason = read_draft_settings(name, values), None
    if engine and drafts and layout.pp > 1:
        try:
            reason = explain_unsupported_pipeline(drafts[0], engine)
        except PlannerError:  # a method that is not known
            reason = None
    return facts | {
        "model": {
            "name": served, "illegal": illegal, "tp": layout.tp, "legal": nearest,
            "idle_offload": offload if is_idle else None,
        },
        "format": _find_format(values.get("quantization"), served, model),
        "drafts": {"method": drafts[0], "reason": reason} if drafts and reason else None,
        "lengths": _find_lengths(checked, model.architecture.max_position, engine),
    }  # fmt: skip


def _find_devices(checked: CheckedCommand) -> dict[str, Any] | None:
    """Find the GPUs that one process takes and has; None of a server on several machines."""
    command, values = checked.command, checked.as_meant.values
    keys = ("nnodes", "data_parallel_size_local", "gpus_per_node")
    is_ray = values.get("distributed_executor_backend") == "ray"
    if any(map(values.get, keys)) or is_ray or (command.setup and command.setup.is_member):
        return None
    try:
        taken = read_layout(command.engine, values).num_gpus
    except PlannerError:  # an impossible layout
        return None
    listed = command.environment.get("CUDA_VISIBLE_DEVICES", "")
    return {
        "taken": taken, "listed": listed, "most": MAX_GPUS_OF_A_BOX,
        "visible": len(listed.split(",")) if re.fullmatch(r"\d+(,\d+)*", listed) else None,
        "given": command.setup and command.setup.num_gpus,
        "machines": math.ceil(taken / MAX_GPUS_OF_A_BOX),
        "names_nodes": "--nnodes" in get_cli_options(command.engine, checked.version).spellings,
    }  # fmt: skip


def _find_format(asked: Any, name: str, model: Model) -> dict[str, Any] | None:
    """Find what is asked of the weights' format and stored; None if only a name says what is stored."""
    if not isinstance(asked, str) or is_unresolved(asked) or model.is_inferred:
        return None
    error = ""
    try:
        load_model(name, quantization=asked)
    except PlannerError as problem:
        error = str(problem)
    return {
        "asked": asked,
        "stored": model.quantization.method,
        "dtype": model.dtype,
        "error": error,
    }


def _find_lengths(checked: CheckedCommand, made_for: int, engine: Engine | None) -> dict[str, Any]:
    """Find the context of a command, its step and its sequences, which vLLM holds against one another."""
    name = checked.command.engine
    args = read_engine_args(name, checked.argument_values)
    length, argument = (
        args.get("max_model_len"),
        load_argument_names(name).engine_names["max_model_len"],
    )
    ignored = {finding.name for finding in checked.findings if finding.verdict == "useless"}
    is_held = name == "vllm" and engine is not None
    return {
        "length": length, "made_for": made_for, "may_extend": may_extend_context(checked),
        "option": f"--{argument if name == 'trtllm' else argument.replace('_', '-')}",
        "needed": length if isinstance(length, int) else made_for,
        "tokens": args.get("max_num_batched_tokens") if is_held else None,
        "seqs": args.get("max_num_seqs"),
        "is_chunked": "--enable-chunked-prefill" in ignored
        or (engine is not None and args.get("enable_chunked_prefill", engine.facts.chunked_prefill)),
    }  # fmt: skip
