"""What a command's model and its own arguments contradict, whatever the GPU; the engine ends at once over each."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from planner.core.errors import PlannerError
from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import is_unresolved
from planner.engines.deployment import ParallelLayout
from planner.engines.engine import Engine
from planner.models.registry import Model, load_model
from planner.parallelism.layouts import explain_illegal_layout
from planner.tools.lint.deployment_reader import read_engine_args, read_layout, resolve_served_model
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.option_checks import CheckedCommand

CHECKPOINT_ONLY_FORMATS = ("awq", "gptq", "compressed-tensors", "exl2", "marlin")
"""Formats that only a checkpoint has: no engine makes them while it loads."""
_LONG_CONTEXT_VARIABLES = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
}
"""Variables that allow a context longer than the model's own."""
_CONTEXT_EXTENDING_ARGS = {
    "hf_overrides",
    "rope_scaling",
    "json_model_override_args",
    "model_loader_extra_config",
}
"""Arguments that may change what the model was made for."""


def find_contradictions(judged: CheckedCommand, engine: Engine | None) -> Iterator[LintFinding]:
    """What the command's model and its own arguments contradict, whatever the GPU."""
    yield from _check_devices(judged)
    try:
        name, model = resolve_served_model(judged)
        layout = read_layout(judged.command.engine, judged.argument_values)
    except PlannerError:
        return
    if (
        engine and engine.name == "sglang" and model.architecture.is_moe
    ):  # DeepEP spreads experts by itself
        layout = replace(layout, ep=layout.tp * layout.dp)
    if reason := explain_illegal_layout(model, layout, max(layout.tp, 1), engine):
        widest = "--num-shard" if judged.command.engine == "tgi" else "--tensor-parallel-size"
        yield _make_contradiction(
            widest, layout.tp, f"{name}: {reason}"[:300], _suggest_divisor(model, layout, widest)
        )
    yield from _check_format(judged, name, model)
    yield from _check_lengths(judged, name, model.architecture.max_position, engine)


def _check_devices(judged: CheckedCommand) -> Iterator[LintFinding]:
    """More GPUs asked for than are visible, or than the container is given, where the command has one process."""
    command, values = judged.command, judged.as_meant.values
    several = any(
        values.get(key) for key in ("nnodes", "data_parallel_size_local", "gpus_per_node")
    )
    if several or values.get("distributed_executor_backend") == "ray":
        return
    with suppress(PlannerError):  # a layout that nothing has
        asked, name = read_layout(command.engine, values).num_gpus, "CUDA_VISIBLE_DEVICES"
        visible = command.environment.get(name, "")
        if re.fullmatch(r"\d+(,\d+)*", visible) and asked > (count := len(visible.split(","))):
            why = f"the command takes {asked} GPUs, and {count} are visible"
            yield LintFinding(
                "environment", name, f"{name}={visible}", "contradicts", why, refused=True
            )
        if command.num_visible_gpus is not None and asked > command.num_visible_gpus:
            why = (
                f"the command takes {asked} GPUs, and the container is given"
                f" {command.num_visible_gpus}"
            )
            yield LintFinding(
                "environment",
                "GPUs",
                f"{command.num_visible_gpus} GPUs",
                "contradicts",
                why,
                refused=True,
            )


def _make_contradiction(option: str, value: Any, why: str, instead: str) -> LintFinding:
    return LintFinding(
        "flag", option, f"{option} {value}", "contradicts", why, instead, refused=True
    )


def _check_lengths(
    judged: CheckedCommand, name: str, longest: int, engine: Engine | None
) -> Iterator[LintFinding]:
    """A context longer than the model's, and steps too short for a prompt or for the sequences that run."""
    which = judged.command.engine
    args = read_engine_args(which, judged.argument_values)
    length, tokens, seqs = (
        args.get(key) for key in ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
    )
    allowed = any(
        judged.command.environment.get(variable) in ("1", "true")
        for variable in _LONG_CONTEXT_VARIABLES
    )
    if (
        isinstance(length, int)
        and length > longest
        and not (allowed or _CONTEXT_EXTENDING_ARGS & set(judged.argument_values))
    ):
        option = load_argument_names(which).engine_names["max_model_len"]
        flag = f"--{option}" if which == "trtllm" else f"--{option.replace('_', '-')}"
        yield _make_contradiction(
            flag, length, f"{name} was made for {longest:,} tokens", f"{flag} {longest}"
        )
    if which != "vllm" or engine is None or not isinstance(tokens, int):
        return
    steps, needed = "--max-num-batched-tokens", length if isinstance(length, int) else longest
    if not args.get("enable_chunked_prefill", engine.facts.chunked_prefill) and tokens < needed:
        why = f"without chunked prefill a prompt is one step, and max_model_len is {needed:,}"
        yield _make_contradiction(steps, tokens, why, "--enable-chunked-prefill")
    if isinstance(seqs, int) and tokens < seqs:
        why = f"each of {seqs} sequences takes a token of a step"
        yield _make_contradiction(steps, tokens, why, f"{steps} {seqs} or more")


def _check_format(judged: CheckedCommand, name: str, model: Model) -> Iterator[LintFinding]:
    """A format that the checkpoint does not have; nothing is said of a checkpoint of which only the name is known."""
    values, stored = judged.argument_values, model.quantization.method
    asked = values.get("quantization") or values.get("quantize")
    if not isinstance(asked, str) or is_unresolved(asked) or model.is_inferred:
        return
    option = "--quantize" if judged.command.engine == "tgi" else "--quantization"
    try:
        load_model(name, quantization=asked)
    except PlannerError as error:
        if stored != "none" and "unknown" not in str(error):
            yield _make_contradiction(
                option, asked, str(error), "leave it out: the checkpoint says it"
            )
        return
    if stored == "none" and asked.partition("_")[0] in CHECKPOINT_ONLY_FORMATS:
        packs = f"{judged.command.engine} packs nothing into {asked} while it loads"
        why = f"{name} is stored in {model.dtype}, and {packs}"
        yield _make_contradiction(
            option, asked, why, f"a checkpoint in that format, or no {option}"
        )


def _suggest_divisor(model: Model, layout: ParallelLayout, option: str) -> str:
    """The powers of two next below and above that the heads allow."""
    fits = [
        tp
        for tp in (1, 2, 4, 8, 16)
        if not explain_illegal_layout(model, replace(layout, tp=tp, ep=1), tp)
    ]
    near = [tp for tp in fits if tp < layout.tp][-1:] + [tp for tp in fits if tp > layout.tp][:1]
    return " or ".join(f"{option} {tp}" for tp in near)
