"""Find contradictions between a command's arguments, or with its model, that hold on any GPU.

The engine does not start with any of them.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from planner.core.errors import PlannerError
from planner.core.text import format_count
from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import get_cli_options, is_unresolved
from planner.engines.engine import Engine
from planner.engines.layout import ParallelLayout
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
from planner.tools.lint.findings import LintFinding, LintVerdict
from planner.tools.lint.option_checks import CheckedCommand

CHECKPOINT_ONLY_FORMATS = ("awq", "gptq", "compressed-tensors", "exl2", "marlin")
"""Formats that only a checkpoint can have: no engine converts to them while loading."""


def find_contradictions(checked: CheckedCommand, engine: Engine | None) -> Iterator[LintFinding]:
    """Yield the contradictions of a command, whatever the GPU."""
    yield from _check_devices(checked)
    yield from check_model_support(checked, engine)
    try:
        name, model = resolve_served_model(checked)
        layout = read_layout(checked.command.engine, checked.argument_values)
    except PlannerError:
        return
    if engine and engine.name == "sglang" and model.architecture.is_moe:
        # DeepEP distributes the experts over all GPUs by itself.
        layout = replace(layout, ep=layout.tp * layout.dp)
    if reason := explain_illegal_layout(model, layout, max(layout.tp, 1), engine):
        option = "--tensor-parallel-size"
        legal_sizes = [
            tp
            for tp in (1, 2, 4, 8, 16)
            if not explain_illegal_layout(model, replace(layout, tp=tp, ep=1), tp)
        ]
        smaller = [tp for tp in legal_sizes if tp < layout.tp][-1:]
        larger = [tp for tp in legal_sizes if tp > layout.tp][:1]
        instead = " or ".join(f"{option} {tp}" for tp in smaller + larger)
        yield _make_contradiction(option, layout.tp, f"{name}: {reason}", instead)
    yield from _check_format(checked, name, model)
    yield from _check_draft_pipeline(checked, layout, engine)
    offload = checked.argument_values.get("cpu_offload_gb")
    if isinstance(offload, float) and offload and engine and not offloads_weights(engine, model):
        why = f"model runner V2, which serves this model in {engine}, leaves all weights on the GPU"
        option, instead = "--cpu-offload-gb", "VLLM_USE_V2_MODEL_RUNNER=0 beside it"
        yield LintFinding("flag", option, f"{option} {offload:g}", "useless", why, instead)
    yield from _check_lengths(checked, name, model.architecture.max_position, engine)


def check_model_support(checked: CheckedCommand, engine: Engine | None) -> Iterator[LintFinding]:
    """Yield that the release does not know the served model, or that nothing records whether it does.

    A command that names another class or Transformers' own code is taken at its word.
    """
    values = checked.argument_values
    if engine is None or values.get("model_impl") == "transformers" or "hf_overrides" in values:
        return
    try:
        name, model = resolve_served_model(checked)
    except PlannerError:
        return
    support = judge_model_support(model, engine)
    if support.sentence:
        is_refused = support.state == "refused"
        verdict: LintVerdict = "contradicts" if is_refused else "ok"
        yield LintFinding("setting", "model", name, verdict, support.sentence, refused=is_refused)


def _check_devices(checked: CheckedCommand) -> Iterator[LintFinding]:
    """Check a single-process command for more GPUs than are visible or given to its container."""
    command, values = checked.command, checked.as_meant.values
    is_distributed = any(
        values.get(key) for key in ("nnodes", "data_parallel_size_local", "gpus_per_node")
    )
    if is_distributed or values.get("distributed_executor_backend") == "ray":
        return
    given = command.num_gpus or (command.setup and command.setup.num_gpus)
    if command.setup and command.setup.is_member:
        return
    with suppress(PlannerError):  # an impossible layout
        num_gpus, name = read_layout(command.engine, values).num_gpus, "CUDA_VISIBLE_DEVICES"
        visible = command.environment.get(name, "")
        if re.fullmatch(r"\d+(,\d+)*", visible) and num_gpus > (count := len(visible.split(","))):
            seen = f"{count} {'is' if count == 1 else 'are'} visible"
            why = f"the command takes {format_count(num_gpus, 'GPU')}, and {seen}"
            yield LintFinding(
                "environment", name, f"{name}={visible}", "contradicts", why, refused=True
            )
        if given and num_gpus > given:
            holder = "job" if command.num_gpus else "container"
            why = f"the command takes {format_count(num_gpus, 'GPU')}, the {holder} has {given}"
            yield LintFinding(
                "environment",
                "GPUs",
                format_count(given, "GPU"),
                "contradicts",
                why,
                refused=True,
            )
        elif not given and num_gpus > MAX_GPUS_OF_A_BOX:
            yield from _check_machines(checked, num_gpus)


def _check_machines(checked: CheckedCommand, num_gpus: int) -> Iterator[LintFinding]:
    """Check for more GPUs than one machine has, of releases that need `--nnodes` for them.

    vLLM from 0.12 on ends with "World size (16) is larger than the number of available GPUs (8) in
    this node" (config/parallel.py); before, it looked for a Ray cluster by itself.
    """
    engine, machines = checked.command.engine, math.ceil(num_gpus / MAX_GPUS_OF_A_BOX)
    if "--nnodes" not in get_cli_options(engine, checked.version).spellings:
        return
    address = "--master-addr ADDRESS" if engine == "vllm" else "--dist-init-addr ADDRESS:PORT"
    others = "1" if machines == 2 else f"1 to {machines - 1}"
    instead = (
        f"--nnodes {machines} {address} --node-rank 0 on the first machine, the same with --node-rank"
        f" {others}{' --headless' * (engine == 'vllm')} on the rest"
    )
    why = f"more than a machine of {MAX_GPUS_OF_A_BOX} has: there the server ends with an error while it starts"
    yield LintFinding("setting", "GPUs", format_count(num_gpus, "GPU"), "risky", why, instead)


def _make_contradiction(option: str, value: Any, why: str, instead: str) -> LintFinding:
    """Return a finding about an option that the engine rejects."""
    return LintFinding(
        "flag", option, f"{option} {value}", "contradicts", why, instead, refused=True
    )


def _check_lengths(
    checked: CheckedCommand, name: str, max_position: int, engine: Engine | None
) -> Iterator[LintFinding]:
    """Check the context against the model's, and the step size against prompts and sequences."""
    engine_name = checked.command.engine
    args = read_engine_args(engine_name, checked.argument_values)
    length, tokens, seqs = (
        args.get(key) for key in ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
    )
    if isinstance(length, int) and length > max_position and not may_extend_context(checked):
        context_option = load_argument_names(engine_name).engine_names["max_model_len"]
        flag = (
            f"--{context_option}"
            if engine_name == "trtllm"
            else f"--{context_option.replace('_', '-')}"
        )
        yield _make_contradiction(
            flag, length, f"{name} was made for {max_position:,} tokens", f"{flag} {max_position}"
        )
    if engine_name != "vllm" or engine is None or not isinstance(tokens, int):
        return
    option, needed = "--max-num-batched-tokens", length if isinstance(length, int) else max_position
    ignored = {finding.name for finding in checked.findings if finding.verdict == "useless"}
    is_chunked = args.get("enable_chunked_prefill", engine.facts.chunked_prefill)
    if not is_chunked and "--enable-chunked-prefill" not in ignored and tokens < needed:
        why = f"without chunked prefill a prompt is one step, and max_model_len is {needed:,}"
        yield _make_contradiction(option, tokens, why, "--enable-chunked-prefill")
    if isinstance(seqs, int) and tokens < seqs:
        why = f"each of {seqs} sequences takes a token of a step"
        yield _make_contradiction(option, tokens, why, f"{option} {seqs} or more")


def _check_format(checked: CheckedCommand, name: str, model: Model) -> Iterator[LintFinding]:
    """Check for a weight format that the checkpoint does not have.

    Nothing is reported if only the checkpoint's name is known.
    """
    values, stored = checked.argument_values, model.quantization.method
    requested, option = values.get("quantization"), "--quantization"
    if not isinstance(requested, str) or is_unresolved(requested) or model.is_inferred:
        return
    try:
        load_model(name, quantization=requested)
    except PlannerError as error:
        if stored != "none" and "unknown" not in str(error):
            yield _make_contradiction(
                option, requested, str(error), "leave it out: the checkpoint says it"
            )
        return
    if stored == "none" and requested.partition("_")[0] in CHECKPOINT_ONLY_FORMATS:
        packs = f"{checked.command.engine} packs nothing into {requested} while it loads"
        why = f"{name} is stored in {model.dtype}, and {packs}"
        yield _make_contradiction(
            option, requested, why, f"a checkpoint in that format, or no {option}"
        )


def _check_draft_pipeline(
    checked: CheckedCommand, layout: ParallelLayout, engine: Engine | None
) -> Iterator[LintFinding]:
    """Check for drafts under pipeline parallelism, which few releases have."""
    settings = read_draft_settings(checked.command.engine, checked.argument_values)
    if engine is None or settings is None or layout.pp == 1:
        return
    with suppress(PlannerError):  # a method that is not known
        if reason := explain_unsupported_pipeline(settings[0], engine):
            option = "--speculative-config" if engine.name == "vllm" else "--speculative-algorithm"
            yield _make_contradiction(
                option, settings[0], reason, "no drafts, or tensor parallelism alone"
            )
