"""The deployment that a command asks for: model, layout, arguments and drafting, by the planner's names."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.core.errors import PlannerError
from planner.deploy.launch_spec import get_engine_packaging
from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import is_unresolved
from planner.engines.deployment import Deployment, ParallelLayout, SpeculationConfig, deploy_on
from planner.engines.engine_args import EngineArgs
from planner.hardware import gpus
from planner.hardware.gpus import Gpu
from planner.models.registry import Model, load_model
from planner.parallelism.layouts import explain_illegal_layout
from planner.planning.scenario_schema import coerce_engine_args
from planner.tools.lint.option_checks import CheckedCommand


def parse_gpu_count(gpu: str) -> tuple[int | None, Gpu]:
    """How many GPUs, where that is said, and which: "H100", "4xH100", "4x H100-SXM", "H100:4"."""
    match = re.fullmatch(r"\s*(?:(\d{1,4})\s*x\s*)?([^:]+?)(?::(\d{1,4}))?\s*", gpu, re.IGNORECASE)
    if match is None or (match[1] and match[3]) or (many := match[1] or match[3]) == "0":
        raise PlannerError(
            "--gpu takes the name of a GPU, as in `planner gpus`, or 4xH100 for four; got"
            f" {gpu!r:.60}"
        )
    return int(many) if many else None, gpus.get_gpu(match[2])


def resolve_served_model(checked: CheckedCommand) -> tuple[str, Model]:
    """What the command serves, by its name or by the last part of a path; `PlannerError` where it is not known."""
    key = {"vllm": "model", "sglang": "model_path", "tgi": "model_id"}.get(
        checked.command.engine, ""
    )
    words = checked.as_meant.positional if key != "model_id" else ()
    given = words[0] if words else checked.argument_values.get(key)
    if not given:
        raise PlannerError("the command names no model")
    name = str(given)
    if is_unresolved(name):
        raise PlannerError(f"the model is {name!r:.80}, which is filled in only where it runs")
    try:
        return name, load_model(name)
    except PlannerError:
        last = name.rstrip("/").rpartition("/")[2]
        if name.count("/") < 2 and not name.startswith(("/", ".", "~")):
            raise
        return name, load_model(last)


def read_layout(engine: str, values: Mapping[str, Any]) -> ParallelLayout:
    size = {
        key: value
        for key, value in values.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    tp, pp = size.get("tensor_parallel_size", 1), size.get("pipeline_parallel_size", 1)
    dp = size.get("data_parallel_size", 1)
    if engine == "tgi":
        return ParallelLayout(tp=size.get("num_shard", 1))
    if engine == "sglang":
        dcp = size.get("dcp_size", 1)
        copies, spread = (
            count_attention_copies(values),
            tp if size.get("expert_parallel_size", 1) > 1 else 1,
        )
        if copies > 1:
            return ParallelLayout(tp=max(tp // copies, 1), pp=pp, dp=copies, ep=spread, dcp=dcp)
        # without attention copies each of dp holds the whole model (docs.sglang.io,
        # dp_dpa_smg_guide, 2026-11)
        return ParallelLayout(tp=tp, pp=pp, ep=spread, dcp=dcp, replicas=dp)
    if engine == "trtllm":
        spread = tp if size.get("moe_expert_parallel_size", 1) > 1 else 1
        copied = values.get("enable_attention_dp") is True
        return ParallelLayout(tp=1 if copied else tp, dp=tp if copied else 1, pp=pp, ep=spread)
    ep = tp * dp if values.get("enable_expert_parallel") else 1
    return ParallelLayout(
        tp=tp, pp=pp, dp=dp, ep=ep, dcp=size.get("decode_context_parallel_size", 1)
    )


def count_attention_copies(values: Mapping[str, Any]) -> int:
    """SGLang's copies of the attention, which its limits of a batch are shared out to (server_args.py)."""
    asked = values.get("attn_dp_size") or (
        values.get("data_parallel_size") if values.get("enable_dp_attention") else 1
    )
    return asked if isinstance(asked, int) and asked > 0 else 1


def read_engine_args(engine: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The command's arguments by the planner's names; those that only its machine can fill in are left out."""
    values = {name: value for name, value in values.items() if not is_unresolved(value)}
    found = {
        ours: values[theirs]
        for theirs, ours in load_argument_names(engine).arguments.items()
        if theirs in values
    }
    if found.get("max_model_len") in ("auto", "-1", -1):
        del found["max_model_len"]
    if found.get("dtype") == "auto":
        del found["dtype"]
    if isinstance(limits := found.get("limit_mm_per_prompt"), Mapping):
        plain = {
            kind: most.get("count") if isinstance(most, Mapping) else most
            for kind, most in limits.items()
        }
        media = (f"{kind}={most}" for kind, most in plain.items() if isinstance(most, int))
        found["limit_mm_per_prompt"] = ",".join(media)
    found |= {
        "sglang": _read_sglang_args,
        "trtllm": _read_trtllm_args,
        "tgi": _read_tgi_args,
        "vllm": _read_vllm_args,
    }[engine](values, found)
    return {name: value for name, value in found.items() if name in EngineArgs.__dataclass_fields__}


_EXTRA_LORA_ARGS = {"max_lora_rank": 16, "max_cpu_loras": 0}


def _read_vllm_args(values: Mapping[str, Any], _found: Mapping[str, Any]) -> dict[str, Any]:
    made = (
        _read_lora_args(values, {"max_loras": 1, **_EXTRA_LORA_ARGS})
        if values.get("enable_lora")
        else {}
    )
    return made | (
        {"limit_mm_per_prompt": "image=0,video=0"} if values.get("language_model_only") else {}
    )


def _read_lora_args(values: Mapping[str, Any], usual: Mapping[str, int]) -> dict[str, Any]:
    """Slots of adapters, their rank, and how many host memory keeps, under the engine's names in `usual`."""
    given = [(str(values.get(name)), default) for name, default in usual.items()]
    sizes = [int(size[:19]) if size.isdecimal() else default for size, default in given]
    return dict(zip(("max_loras", "max_lora_rank", "max_cpu_loras"), sizes, strict=True))


def _read_sglang_args(values: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    copies, made = count_attention_copies(values), dict[str, Any]()
    if isinstance(seqs := found.get("max_num_seqs"), int):
        made["max_num_seqs"] = max(seqs // copies, 1)
    if isinstance(tokens := found.get("max_num_batched_tokens"), int):
        made["enable_chunked_prefill"] = tokens > 0
        made["max_num_batched_tokens"] = (
            tokens // copies if tokens > 0 else values.get("max_prefill_tokens", 16384)
        )
    if values.get("disable_radix_cache"):
        made["enable_prefix_caching"] = False
    if values.get("disable_overlap_schedule"):
        made["async_scheduling"] = False
    if values.get("enable_priority_scheduling"):
        made["scheduling_policy"] = "priority"
    if values.get("cuda_graph_backend_decode") == "disabled":
        made["enforce_eager"] = True
    if values.get("enable_lora") or values.get("lora_paths"):
        made |= _read_lora_args(
            values, {"max_loras_per_batch": 8, "max_lora_rank": 16, "max_loaded_loras": 0}
        )
    return made


def _read_trtllm_args(values: Mapping[str, Any], _found: Mapping[str, Any]) -> dict[str, Any]:
    made = dict[str, Any]()
    if isinstance(kept := values.get("kv_cache_config"), Mapping):  # it replaces the options' whole
        made |= {
            ours: kept[theirs]
            for theirs, ours in load_argument_names("trtllm").cache.items()
            if theirs in kept
        }
    if "disable_overlap_scheduler" in values:
        made["async_scheduling"] = not values["disable_overlap_scheduler"]
    if "cuda_graph_config" in values:
        made["enforce_eager"] = values["cuda_graph_config"] is None
    if isinstance(adapters := values.get("lora_config"), Mapping):
        made |= _read_lora_args(adapters, {"max_loras": 1, **_EXTRA_LORA_ARGS})
    return made


def _read_tgi_args(values: Mapping[str, Any], _found: Mapping[str, Any]) -> dict[str, Any]:
    made = {"enforce_eager": True} if str(values.get("cuda_graphs")) == "0" else dict[str, Any]()
    return made | (
        {"enable_prefix_caching": False}
        if str(values.get("prefix_caching")) in ("0", "false")
        else {}
    )


def read_draft_settings(
    engine: str, values: Mapping[str, Any]
) -> tuple[str, int, str | None] | None:
    """(method by our name, tokens, what drafts them) of speculative decoding; None where there is none."""
    config = values.get("speculative_config")
    if engine == "vllm" and isinstance(config, Mapping):
        draft = config.get("model")
        method = str(config.get("method") or ("draft_model" if draft else "ngram"))
        return method, config.get("num_speculative_tokens", 1), str(draft) if draft else None
    if engine == "vllm" and (draft := values.get("speculative_model")):  # before 0.8.5
        method = "ngram" if draft == "[ngram]" else "draft_model"
        return (
            method,
            values.get("num_speculative_tokens", 1),
            None if method == "ngram" else str(draft),
        )
    if engine == "sglang" and (algorithm := values.get("speculative_algorithm")):
        tokens = values.get("speculative_num_draft_tokens", 4)
        tokens = max(tokens - 1, 1) if isinstance(tokens, int) else tokens
        return (
            _normalize_draft_method(engine, algorithm),
            tokens,
            values.get("speculative_draft_model_path"),
        )
    if engine == "trtllm" and isinstance(config, Mapping):
        tokens = config.get("max_draft_len") or config.get("num_nextn_predict_layers") or 1
        draft = config.get("speculative_model") or config.get("speculative_model_dir")
        return (
            _normalize_draft_method(engine, config.get("decoding_type", "")),
            tokens,
            str(draft) if draft else None,
        )
    if engine == "tgi" and values.get("speculate"):
        return "ngram", values["speculate"], None
    return None


def _normalize_draft_method(engine: str, name: Any) -> str:
    return load_argument_names(engine).methods.get(str(name).lower(), str(name).lower())


def read_speculation(engine: str, values: Mapping[str, Any]) -> SpeculationConfig | None:
    """The drafting that the command asks for; `PlannerError` where its model or method is unknown."""
    if (found := read_draft_settings(engine, values)) is None:
        return None
    method, tokens, draft = found
    if method == "draft_model" and draft:
        return SpeculationConfig(method, tokens, draft=load_model(draft))
    return SpeculationConfig(method, tokens, head=draft)


def build_command_deployment(checked: CheckedCommand, gpu: str, version: str) -> Deployment:
    """The command's deployment on a GPU; `PlannerError` for what the planner does not know, or the engine refuses."""
    values, engine = checked.argument_values, checked.command.engine
    many, card = parse_gpu_count(gpu)
    name, model = resolve_served_model(checked)
    asked = values.get("quantization") or values.get("quantize")
    if (
        isinstance(asked, str)
        and model.quantization.method == "none"
        and asked in get_engine_packaging(engine).online
    ):
        model = load_model(model.name, quantization=asked)
    args: dict[str, Any] = dict(coerce_engine_args(read_engine_args(engine, values)))
    layout = read_layout(engine, values)
    if dtype := args.pop("dtype", None):
        model = replace(model, dtype={"half": "float16", "float": "float32"}.get(dtype, dtype))
    if many is not None and many < layout.num_gpus:
        raise PlannerError(
            f"{name} on {layout} takes {layout.num_gpus} GPUs, and --gpu says {many}"
        )
    node = min(many or card.gpus_per_node, card.gpus_per_node)
    deployment = deploy_on(
        model, card, **vars(layout), engine=engine, engine_version=version, gpus_per_node=node,
        speculation=read_speculation(engine, values), **args,
    )  # fmt: skip
    if reason := explain_illegal_layout(deployment.model, layout, node, deployment.engine):
        raise PlannerError(f"{name} on {layout}: {reason}")
    return deployment
