"""Find what a command says of its model, layout and lengths: `catalogs/flags/consistency.yaml` has the rules."""

import math
import re
from dataclasses import replace
from typing import Any

from planner.core.errors import PlannerError
from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import get_cli_options, is_unresolved
from planner.engines.engine import Engine
from planner.engines.model_registries import judge_model_support
from planner.engines.speculation_methods import explain_unsupported_pipeline
from planner.memory.runtime_overhead import offloads_weights
from planner.models.registry import Model, load_model
from planner.parallelism.layouts import explain_illegal_layout
from planner.tools.lint.container_setup import MAX_GPUS_OF_A_BOX
from planner.tools.lint.deployment_reader import (
    may_extend_context,
    read_draft_settings,
    read_engine_args,
    read_layout,
    resolve_served_model,
)
from planner.tools.lint.option_checks import CheckedCommand


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
