"""What a command's model and its own arguments contradict, whatever the GPU; the engine ends at once over each."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from planner.core.quantities import PlannerError
from planner.facts.deployment import ParallelLayout
from planner.facts.engines import Engine
from planner.models.registry import Model, model
from planner.operations.flags import left_open
from planner.operations.lint.deployment import arguments, layout_of, names, served_model
from planner.operations.lint.judging import Judged
from planner.operations.lint.verdicts import Finding
from planner.parallelism.layouts import refuse

PACKED = ("awq", "gptq", "compressed-tensors", "exl2", "marlin")
"""Formats that only a checkpoint has: no engine makes them while it loads."""
_LONGER = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"}
"""Variables that allow a context longer than the model's own."""
_STRETCHES = {"hf_overrides", "rope_scaling", "json_model_override_args", "model_loader_extra_config"}
"""Arguments that may change what the model was made for."""


def contradictions(judged: Judged, engine: Engine | None) -> Iterator[Finding]:
    """What the command's model and its own arguments contradict, whatever the GPU."""
    yield from _devices(judged)
    try:
        name, served = served_model(judged)
        layout = layout_of(judged.command.engine, judged.values)
    except PlannerError:
        return
    if engine and engine.name == "sglang" and served.architecture.is_moe:  # DeepEP spreads experts by itself
        layout = replace(layout, ep=layout.tp * layout.dp)
    if reason := refuse(served, layout, max(layout.tp, 1), engine):
        widest = "--num-shard" if judged.command.engine == "tgi" else "--tensor-parallel-size"
        yield _contradicts(widest, layout.tp, f"{name}: {reason}"[:300], _divisor(served, layout, widest))
    yield from _format(judged, name, served)
    yield from _lengths(judged, name, served.architecture.max_position, engine)


def _devices(judged: Judged) -> Iterator[Finding]:
    """More GPUs asked for than are visible, or than the container is given, where the command has one process."""
    command, values = judged.command, judged.parsed.values
    several = any(values.get(key) for key in ("nnodes", "data_parallel_size_local", "gpus_per_node"))
    if several or values.get("distributed_executor_backend") == "ray":
        return
    with suppress(PlannerError):  # a layout that nothing has
        asked, name = layout_of(command.engine, values).gpus, "CUDA_VISIBLE_DEVICES"
        visible = command.environment.get(name, "")
        if re.fullmatch(r"\d+(,\d+)*", visible) and asked > (count := len(visible.split(","))):
            why = f"the command takes {asked} GPUs, and {count} are visible"
            yield Finding("environment", name, f"{name}={visible}", "contradicts", why, refused=True)
        if command.visible is not None and asked > command.visible:
            why = f"the command takes {asked} GPUs, and the container is given {command.visible}"
            yield Finding("environment", "GPUs", f"{command.visible} GPUs", "contradicts", why, refused=True)


def _contradicts(option: str, value: Any, why: str, instead: str) -> Finding:
    return Finding("flag", option, f"{option} {value}", "contradicts", why, instead, refused=True)


def _lengths(judged: Judged, name: str, longest: int, engine: Engine | None) -> Iterator[Finding]:
    """A context longer than the model's, and steps too short for a prompt or for the sequences that run."""
    which = judged.command.engine
    args = arguments(which, judged.values)
    length, tokens, seqs = (args.get(key) for key in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"))
    allowed = any(judged.command.environment.get(variable) in ("1", "true") for variable in _LONGER)
    if isinstance(length, int) and length > longest and not (allowed or _STRETCHES & set(judged.values)):
        option = names(which).theirs["max_model_len"]
        flag = f"--{option}" if which == "trtllm" else f"--{option.replace('_', '-')}"
        yield _contradicts(flag, length, f"{name} was made for {longest:,} tokens", f"{flag} {longest}")
    if which != "vllm" or engine is None or not isinstance(tokens, int):
        return
    steps, needed = "--max-num-batched-tokens", length if isinstance(length, int) else longest
    if not args.get("enable_chunked_prefill", engine.facts["chunked_prefill"]) and tokens < needed:
        why = f"without chunked prefill a prompt is one step, and max_model_len is {needed:,}"
        yield _contradicts(steps, tokens, why, "--enable-chunked-prefill")
    if isinstance(seqs, int) and tokens < seqs:
        why = f"each of {seqs} sequences takes a token of a step"
        yield _contradicts(steps, tokens, why, f"{steps} {seqs} or more")


def _format(judged: Judged, name: str, served: Model) -> Iterator[Finding]:
    """A format that the checkpoint does not have; nothing is said of a checkpoint of which only the name is known."""
    values, stored = judged.values, served.quantization.method
    asked = values.get("quantization") or values.get("quantize")
    if not isinstance(asked, str) or left_open(asked) or served.inferred:
        return
    option = "--quantize" if judged.command.engine == "tgi" else "--quantization"
    try:
        model(name, quantization=asked)
    except PlannerError as error:
        if stored != "none" and "unknown" not in str(error):
            yield _contradicts(option, asked, str(error), "leave it out: the checkpoint says it")
        return
    if stored == "none" and asked.partition("_")[0] in PACKED:
        packs = f"{judged.command.engine} packs nothing into {asked} while it loads"
        why = f"{name} is stored in {served.dtype}, and {packs}"
        yield _contradicts(option, asked, why, f"a checkpoint in that format, or no {option}")


def _divisor(served: Model, layout: ParallelLayout, option: str) -> str:
    """The powers of two next below and above that the heads allow."""
    fits = [tp for tp in (1, 2, 4, 8, 16) if not refuse(served, replace(layout, tp=tp, ep=1), tp)]
    near = [tp for tp in fits if tp < layout.tp][-1:] + [tp for tp in fits if tp > layout.tp][:1]
    return " or ".join(f"{option} {tp}" for tp in near)
