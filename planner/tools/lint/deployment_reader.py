"""Translate a command into the planner's terms: model, layout, arguments and speculation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import PurePath
from typing import Any

from pydantic import Field

from planner.core.catalog import validate_entry
from planner.core.errors import PlannerError
from planner.core.readers import read_yaml
from planner.core.redaction import MASK
from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import FLAGS_DIR, is_unresolved
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.engine import get_engine
from planner.engines.engine_args import (
    MAX_BATCH_LIMITS,
    EngineArgs,
    divide_batch_limits,
    format_media_limits,
)
from planner.engines.layout import ParallelLayout, SpeculationConfig
from planner.engines.model_support import VersionedEntry, explain_unsupported_format
from planner.engines.speculation_methods import normalize_method_name
from planner.hardware.gpus import parse_gpu_count
from planner.models.mixers import RecurrentMixer
from planner.models.registry import Model, load_model, load_model_at
from planner.parallelism.layouts import explain_illegal_layout
from planner.parallelism.start_gate import explain_refused_model
from planner.planning.scenario_schema import coerce_engine_args
from planner.tools.lint.container_setup import MAX_GPUS_OF_A_BOX
from planner.tools.lint.findings import LintFinding
from planner.tools.lint.forms import load_forms, load_other_processors
from planner.tools.lint.option_checks import CheckedCommand, find_engine_version
from planner.tools.lint.rules import describe_item

_LONG_CONTEXT_VARIABLES = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
}
"""Variables that allow a context longer than the model supports."""
_CONTEXT_EXTENDING_ARGS = {
    "hf_overrides",
    "rope_scaling",
    "json_model_override_args",
    "model_loader_extra_config",
}
"""Arguments that may extend the context that the model supports."""


_LAYOUT_ARGUMENTS = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "dcp_size",
    "decode_context_parallel_size", "tp_size", "pp_size", "enable_expert_parallel",
)  # fmt: skip
"""Arguments that divide a model over GPUs."""


class RefusedDeploymentError(PlannerError):
    """The engine does not start so on this GPU: not a gap of the planner's knowledge."""


class UnmodelledError(PlannerError):
    """The engine may well start so; what it does then is not modelled here."""


def read_named_gpu(checked: CheckedCommand) -> str | None:
    """Return the GPU that a command's file names, with how many it gives; None if it names none.

    The number is left out where the command takes more, as on several machines.
    """
    command = checked.command
    if not command.gpu:
        return None
    named, gpu = parse_gpu_count(command.gpu)
    count = (command.setup and command.setup.num_gpus) or named
    with suppress(PlannerError):
        if count and count >= read_layout(command.engine, checked.argument_values).num_gpus:
            return f"{count}x{gpu.name}"
    return gpu.name


def get_served_name(checked: CheckedCommand) -> str:
    """Return the name or path of the model that a command serves; empty if it names none."""
    key = {"vllm": "model", "sglang": "model_path"}.get(checked.command.engine, "")
    words = checked.as_meant.positional
    return str((words[0] if words else checked.argument_values.get(key)) or "")


def may_extend_context(checked: CheckedCommand) -> bool:
    """Return whether the command may serve a longer context than the model's config states."""
    environment = checked.command.environment
    is_allowed = any(environment.get(name) in ("1", "true") for name in _LONG_CONTEXT_VARIABLES)
    written = {one.written.lstrip("-").replace("-", "_") for one in checked.as_meant.options}
    return is_allowed or bool(_CONTEXT_EXTENDING_ARGS & {*checked.argument_values, *written})


def resolve_served_model(checked: CheckedCommand) -> tuple[str, Model]:
    """Return the served model's name and the model, also by the last part of a path.

    Raises `PlannerError` if the command names no model, or an unknown one.
    """
    name = get_served_name(checked)
    if not name:
        raise PlannerError("the command names no model")
    if is_unresolved(PurePath(name).name):
        raise PlannerError(f"the model is {name!r:.80}, which is filled in only where it runs")
    try:
        return name, load_model_at(name)
    except PlannerError:
        if checked.command.shown.show_word("", name) == MASK:
            raise PlannerError("the command names no model that is known here") from None
        raise


def read_layout(engine: str, values: Mapping[str, Any]) -> ParallelLayout:
    """Return the parallel layout that an engine's arguments select."""
    sizes = {
        key: value
        for key, value in values.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    tp, pp, dp = (sizes.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    if engine == "sglang":
        copies, dcp = read_attention_copies(values), sizes.get("dcp_size", 1)
        ep = tp if sizes.get("expert_parallel_size", 1) > 1 else 1
        if copies > 1:
            return ParallelLayout(tp=max(tp // copies, 1), pp=pp, dp=copies, ep=ep, dcp=dcp)
        # without attention copies each of dp holds the whole model (docs.sglang.io,
        # dp_dpa_smg_guide, 2026-11)
        return ParallelLayout(tp=tp, pp=pp, ep=ep, dcp=dcp, replicas=dp)
    if engine == "trtllm":
        ep = tp if sizes.get("moe_expert_parallel_size", 1) > 1 else 1
        tp, dp = (1, tp) if values.get("enable_attention_dp") is True else (tp, 1)
        return ParallelLayout(tp=tp, dp=dp, pp=pp, ep=ep)
    ep = tp * dp if values.get("enable_expert_parallel") else 1
    dcp = sizes.get("decode_context_parallel_size", 1)
    return ParallelLayout(tp=tp, pp=pp, dp=dp, ep=ep, dcp=dcp)


def read_attention_copies(values: Mapping[str, Any]) -> int:
    """Return SGLang's number of attention copies, which share its batch limits (server_args.py)."""
    copies = values.get("attn_dp_size") or (
        values.get("data_parallel_size") if values.get("enable_dp_attention") else 1
    )
    return copies if isinstance(copies, int) and copies > 0 else 1


def read_engine_args(engine: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the planner's names, without those that only the host can resolve."""
    values = {name: value for name, value in values.items() if not is_unresolved(value)}
    args = {
        name: values[engine_name]
        for engine_name, name in load_argument_names(engine).arguments.items()
        if engine_name in values
    }
    if args.get("max_model_len") in ("auto", "-1", -1):
        del args["max_model_len"]
    if args.get("dtype") == "auto":
        del args["dtype"]
    if (limits := args.get("limit_mm_per_prompt")) is not None:
        limits = limits.strip("'") if isinstance(limits, str) else limits
        args["limit_mm_per_prompt"] = format_media_limits(limits)
    names = load_forms()
    for switch, implied in names.implies.items():
        args |= implied if values.get(switch) else {}
    for switch in [*filter(values.get, names.lora_when[engine])][:1]:
        holder = values[switch] if isinstance(values[switch], Mapping) else values
        texts = [(str(holder.get(name)), default) for name, default in names.lora[engine].items()]
        sizes = [int(text[:19]) if text.isdecimal() else default for text, default in texts]
        args |= dict(zip(("max_loras", "max_lora_rank", "max_cpu_loras"), sizes, strict=True))
    args |= _read_sglang_args(values, args) if engine == "sglang" else {}
    args |= _read_trtllm_args(values) if engine == "trtllm" else {}
    return {name: value for name, value in args.items() if name in EngineArgs.__dataclass_fields__}


def get_share_of_memory(checked: CheckedCommand) -> float:
    """Return the share of each GPU's memory that a vLLM command asks for, given or by default."""
    share = checked.argument_values.get("gpu_memory_utilization")
    if isinstance(share, float):
        return share
    engine = find_engine_version(checked.command.engine, checked.version)
    return engine.facts.gpu_memory_utilization if engine else 0.9


def _read_sglang_args(values: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    limits = {name: args[name] for name in MAX_BATCH_LIMITS if isinstance(args.get(name), int)}
    changed = divide_batch_limits(limits, read_attention_copies(values))
    if (tokens := changed.get("max_num_batched_tokens")) is not None:
        changed["enable_chunked_prefill"] = tokens > 0
        if tokens <= 0:
            changed["max_num_batched_tokens"] = values.get("max_prefill_tokens", 16384)
    if values.get("cuda_graph_backend_decode") == "disabled":
        changed["enforce_eager"] = True
    return changed


def _read_trtllm_args(values: Mapping[str, Any]) -> dict[str, Any]:
    # kv_cache_config replaces all cache options.
    cache = values.get("kv_cache_config")
    cache = cache if isinstance(cache, Mapping) else {}
    names = load_argument_names("trtllm").cache
    args: dict[str, Any] = {name: cache[own] for own, name in names.items() if own in cache}
    if "disable_overlap_scheduler" in values:
        args["async_scheduling"] = not values["disable_overlap_scheduler"]
    if "cuda_graph_config" in values:
        args["enforce_eager"] = values["cuda_graph_config"] is None
    return args


def read_draft_settings(
    engine: str, values: Mapping[str, Any]
) -> tuple[str, int, str | None] | None:
    """Return (planner's method, tokens, draft model) of speculative decoding, or None."""
    config, methods = values.get("speculative_config"), load_argument_names(engine).methods
    if engine == "vllm" and isinstance(config, Mapping):
        draft, tokens = config.get("model"), config.get("num_speculative_tokens", 1)
        # what vLLM infers from a draft's name (0.20.2 config/speculative.py)
        parts = {"eagle3": "eagle3", "eagle-": "eagle", "medusa": "medusa"}
        named = (method for part, method in parts.items() if part in str(draft).lower())
        method = config.get("method") or next(named, "draft_model" if draft else "ngram")
    elif engine == "sglang" and (method := values.get("speculative_algorithm")):
        tokens = values.get("speculative_num_draft_tokens", 4)
        tokens = max(tokens - 1, 1) if isinstance(tokens, int) else tokens
        draft = values.get("speculative_draft_model_path")
    elif engine == "trtllm" and isinstance(config, Mapping):
        tokens = config.get("max_draft_len") or config.get("num_nextn_predict_layers") or 1
        draft = config.get("speculative_model") or config.get("speculative_model_dir")
        method = config.get("decoding_type", "")
    else:
        return None
    method = str(method) if engine == "vllm" else str(method).lower()
    return methods.get(method, method), tokens, str(draft) if draft else None


def read_speculation(engine: str, values: Mapping[str, Any]) -> SpeculationConfig | None:
    """Return the command's speculative decoding; `PlannerError` for an unknown model or method."""
    if (settings := read_draft_settings(engine, values)) is None:
        return None
    method, tokens, draft = settings
    # Gemma 4's drafters are models of their own whatever the method is called (vllm pull 41745)
    if draft and (method == "draft_model" or "-assistant" in draft):
        config = values.get("speculative_config")
        is_any = isinstance(config, Mapping) and config.get("use_heterogeneous_vocab") is True
        return SpeculationConfig(
            "draft_model", tokens, draft=load_model(draft), any_vocabulary=is_any
        )
    try:
        normalize_method_name(method)
    except PlannerError:
        raise UnmodelledError(
            f"the speculative method {method!r:.60} is not modelled here, so that the memory of what"
            " drafts, latencies and throughput are not checked"
        ) from None
    return SpeculationConfig(method, tokens, head=draft)


def _store_states(model: Model, width: int) -> Model:
    """Return a model with that many bytes an element of its recurrent states; KDA's are FP32 always.

    vLLM 0.33.0 layers/mamba/mamba_utils.py, MambaStateDtypeCalculator.
    """
    architecture = model.architecture
    changed = {
        layer: replace(
            layer,
            mixers=tuple(
                replace(mixer, state_width=width)
                if isinstance(mixer, RecurrentMixer) and mixer.has_chosen_width
                else mixer
                for mixer in layer.mixers
            ),
        )
        for layer in architecture.distinct_layers
    }
    layers = tuple(changed[layer] for layer in architecture.layers)
    return replace(model, architecture=replace(architecture, layers=layers))


def build_command_deployment(checked: CheckedCommand, gpu: str, version: str) -> Deployment:
    """Return the command's deployment on a GPU.

    Raises `PlannerError` for what the planner does not know, or the engine rejects.
    """
    values, engine = checked.argument_values, checked.command.engine
    num_gpus, gpu_spec = parse_gpu_count(gpu)
    if unmodelled := explain_unmodelled_server(checked):
        raise UnmodelledError(unmodelled)
    name, model = resolve_served_model(checked)
    sizes = {*load_argument_names(engine).arguments, "quantization", *_LAYOUT_ARGUMENTS}
    open_sizes = [one for one in values if one in sizes and is_unresolved(values[one])]
    if open_sizes and not checked.command.planned_on:
        raise UnmodelledError(
            f"{', '.join(open_sizes)}: filled in only where it runs, so that memory, latencies and"
            " throughput are not checked"
        )
    if unread := model.architecture.unread:
        raise UnmodelledError(
            f"{name} is of no known family, and what {', '.join(unread[:8])} in its config.json decide is"
            " not modelled here, so that memory, latencies and throughput are not checked"
        )
    quantization = values.get("quantization")
    if (
        isinstance(quantization, str)
        and model.quantization.method == "none"
        and quantization in get_engine(engine).facts.online
    ):
        model = load_model(model.name, quantization=quantization)
    elif isinstance(quantization, str) and model.quantization.method == "none":
        raise UnmodelledError(
            f"what {engine} makes of {name} with the quantization {quantization!r:.60} is not modelled"
            " here, so that the memory of its weights, latencies and throughput are not checked"
        )
    state = values.get("mamba_ssm_cache_dtype")
    if isinstance(state, str) and state != "auto":
        model = _store_states(model, 4 if state == "float32" else 2)
    get_engine(engine, version)  # a release that is not known is no refusal
    args: dict[str, Any] = dict(coerce_engine_args(read_engine_args(engine, values)))
    layout = read_layout(engine, values)
    if dtype := args.pop("dtype", None):
        dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
        if dtype == "bfloat16" and "bf16" not in gpu_spec.peak_flops:
            raise RefusedDeploymentError(
                f"bfloat16 does not run on {gpu_spec.name} (compute capability"
                f" {gpu_spec.compute_capability}); use float16"
            )
        model = replace(model, dtype=dtype)
    length, made_for = args.get("max_model_len"), model.architecture.max_position
    if isinstance(length, int) and length > made_for and may_extend_context(checked):
        model = replace(model, architecture=replace(model.architecture, max_position=length))
    speculation = read_speculation(engine, values)
    if num_gpus is not None and num_gpus < layout.num_gpus:
        raise RefusedDeploymentError(
            f"{name} on {layout} takes {layout.num_gpus} GPUs, and --gpu says {num_gpus}"
        )
    # who names up to eight has them in one machine
    largest_node = max(gpu_spec.gpus_per_node, MAX_GPUS_OF_A_BOX)
    node = num_gpus if num_gpus and num_gpus <= largest_node else gpu_spec.gpus_per_node
    try:
        deployment = deploy_on(
            model, gpu_spec, **vars(layout), engine=engine, engine_version=version,
            gpus_per_node=node, speculation=speculation, **args,
        )  # fmt: skip
    except PlannerError as error:
        raise RefusedDeploymentError(str(error)) from None
    requested = quantization.lower() if isinstance(quantization, str) else ""
    if reason := (
        explain_unsupported_format(requested, gpu_spec, deployment.engine)
        or explain_refused_model(deployment.model, gpu_spec, deployment.engine)
    ):
        raise RefusedDeploymentError(reason)
    largest = max(node, layout.tp)
    if reason := explain_illegal_layout(deployment.model, layout, largest, deployment.engine):
        raise RefusedDeploymentError(f"{name} on {layout}: {reason}")
    if layout.tp > node:
        raise PlannerError(
            f"{name} on {layout}: tensor parallelism across machines of {node} GPUs has no model here:"
            " every layer would wait for the network, so that pipeline stages are usually faster"
        )
    return deployment


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
) -> Iterator[tuple[UnmodelledOptions, str]]:
    """Yield what a command is given of the entries, by name, but for values usual with a kind."""
    given = {**checked.command.environment, **checked.argument_values}
    for entry in _load_unmodelled(checked.command.engine):
        usual = [one.casefold() for kind in ("any", *kinds) for one in entry.usual.get(kind, ())]
        for name in entry.arguments if entry.applies_to(checked.version) else ():
            argument, _, key = name.partition(".")
            value = given.get(argument)
            if key:
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None and str(value).casefold() not in usual:
                yield entry, name


def find_unmodelled_options(
    checked: CheckedCommand, deployment: Deployment
) -> Iterator[LintFinding]:
    """Yield the options of a command planned as `deployment` that change what no model knows."""
    command, generation = checked.command, str(int(deployment.gpu.compute_capability or 0))
    is_mla = deployment.model.architecture.is_mla
    for entry, name in _list_given(checked, [generation, f"{generation} mla" * is_mla]):
        why = f"not modelled: it changes {entry.changes}"
        item = describe_item(command, checked.as_meant, name.partition(".")[0])
        yield LintFinding(*item, "unread", why)  # type: ignore[arg-type]


def explain_unmodelled_server(checked: CheckedCommand) -> str:
    """Explain why nothing of a command's memory and speed is known here; empty if it is."""
    command, device = checked.command, str(checked.argument_values.get("device", ""))
    unchecked = "memory, latencies and throughput are not checked"
    if device in load_other_processors() or (command.setup and not command.setup.takes_gpus):
        return f"it serves on processors that are not modelled here: {unchecked}"
    sized = [(name, entry.changes) for entry, name in _list_given(checked, ()) if entry.sizes]
    if sized:
        return f"{sized[0][0]} is not modelled here: it changes {sized[0][1]}"
    return ""
