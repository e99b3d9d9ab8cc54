"""Varied deployments, and what an engine's own parser reads out of the command that starts one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import yaml

from planner.core.quantities import PlannerError
from planner.facts.deployment import Deployment, ParallelLayout, Speculation, deploy_on
from planner.facts.draft_models import kind
from planner.facts.engines import EngineArgs
from planner.models.registry import model
from planner.operations.flags import options
from planner.operations.launch import Launch, launch_of
from planner.operations.launch.words import Variable, Word
from planner.parallelism.layouts import refuse

VERSIONS = {
    "vllm": [
        "0.5.4",
        "0.6.6",
        "0.7.3",
        "0.8.5",
        "0.9.2",
        "0.10.0",
        "0.12.0",
        "0.14.1",
        "0.16.0",
        "0.18.0",
        "0.20.2",
        "0.33.0",
    ],
    "sglang": ["0.5.10", "0.5.23"],
    "trtllm": ["1.1.0", "1.2.0", "1.3.0"],
    "tgi": ["3.1.0", "3.3.7"],
}
MODELS = ["meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen3-235B-A22B",
          "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Instruct"]  # fmt: skip
GPUS = ["H100", "H200", "B200", "L40S", "MI300X", "Gaudi-3"]
METHODS = {"vllm": ["ngram", "eagle3", "mtp", "draft_model", "suffix", "medusa"], "tgi": ["ngram"],
           "sglang": ["ngram", "eagle3", "mtp", "eagle"], "trtllm": ["ngram", "eagle3", "mtp"]}  # fmt: skip


def drawn(engine: str, draw: random.Random) -> Deployment:
    """Some deployment of `engine`; `PlannerError` where nothing starts like that."""
    one_node = engine == "tgi"
    layout = {"tp": draw.choice([1, 2, 4, 8])}
    if not one_node:
        layout |= {"pp": draw.choice([1, 1, 1, 2, 3, 4]), "dp": draw.choice([1, 1, 1, 2, 8, 16])}
        layout["ep"] = draw.choice([1, layout["tp"] * layout["dp"]])
        layout["dcp"] = draw.choice([1, 1, 1, 2])
    name = draw.choice(MODELS)
    args: dict[str, Any] = {
        "max_model_len": draw.choice([4096, 8192, 20480]), "max_num_seqs": draw.choice([1, 64, 256, 1000]),
        "max_num_batched_tokens": draw.choice([None, 32768]), "gpu_memory_utilization": draw.choice([None, 0.8, 0.87]),
        "kv_cache_dtype": draw.choice(["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]),
        "block_size": draw.choice([None, 16, 64]), "enforce_eager": draw.random() < 0.2,
        "enable_prefix_caching": draw.choice([None, True, False]),
        "enable_chunked_prefill": draw.choice([None, None, True, False]),
        "async_scheduling": draw.choice([None, None, True, False]), "dtype": draw.choice([None, "bfloat16", "float16"]),
    }  # fmt: skip
    if draw.random() < 0.2:
        args |= {"max_loras": draw.choice([1, 8]), "max_lora_rank": draw.choice([8, 64])}
    if draw.random() < 0.2:
        args |= {"scheduling_policy": "priority"}
    if draw.random() < 0.15:
        args |= {"long_prefill_token_threshold": 2048}
    if engine == "sglang" and draw.random() < 0.3:
        args |= {"scheduler_recv_interval": 5}
    speculation = None
    if draw.random() < 0.4:
        method = draw.choice(METHODS[engine])
        draft = model("meta-llama/Llama-3.2-1B-Instruct") if method == "draft_model" else None
        head = draw.choice([None, "some/head", "it's $HOME/head"])
        speculation = Speculation(method, draw.choice([1, 3, 5]), 0.6, draft, head if draft is None else None)
    quantization = draw.choice([None, None, "fp8", "awq"])
    return deploy_on(
        name, draw.choice(GPUS), **layout, engine=engine, engine_version=draw.choice(VERSIONS[engine]),
        speculation=speculation, quantization=quantization, replicas=draw.choice([1, 4]), **args,
    )  # fmt: skip


def plans(engine: str, many: int, seed: int = 0) -> Iterator[Launch]:
    """So many launches of deployments that the engine takes."""
    found = 0
    for at in count():
        if found == many:
            return
        try:
            deployment = drawn(engine, random.Random(f"{engine} {seed} {at}"))
            if refuse(deployment.model, deployment.layout, deployment.gpus_per_node, deployment.engine):
                continue
            made = launch_of(deployment)
        except PlannerError:
            continue
        found += 1
        yield made


def planned(deployment: Deployment) -> dict[str, Any]:
    """Everything that has to arrive, by our own names."""
    args = {**vars(deployment.args), "kv_cache_dtype": deployment.args.kv_cache_dtype or "auto"}
    if not deployment.args.max_loras:
        args["max_lora_rank"] = EngineArgs.__dataclass_fields__["max_lora_rank"].default
    drafting = deployment.speculation
    return {
        "layout": replace(deployment.layout, replicas=1), **args,
        "speculation": drafting and (kind(drafting.method), drafting.num_speculative_tokens),
    }  # fmt: skip


def arrived(launch: Launch) -> dict[str, Any]:
    """What the engine makes of the command, by its own parser's types and choices and its own defaults."""
    deployment = launch.deployment
    engine = deployment.engine
    parsed = options(engine.name, engine.version).parse([filled(word) for flag in launch.flags for word in flag.words])
    assert not parsed.errors and not parsed.positional, parsed
    read = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "tgi": _tgi}[engine.name]
    return read(launch, parsed.values)


def filled(word: Word) -> str:
    """An argument where every variable is set."""
    set_to = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    return "".join(set_to.get(part.name, "some/head") if isinstance(part, Variable) else str(part) for part in word)


def _args(deployment: Deployment, **found: Any) -> dict[str, Any]:
    """Arguments that arrived over the engine's defaults."""
    facts = deployment.engine.facts
    names = ("block_size", "enforce_eager", "max_loras", "max_lora_rank", "long_prefill_token_threshold",
             "scheduling_policy", "scheduler_recv_interval")  # fmt: skip
    defaults = {name: EngineArgs.__dataclass_fields__[name].default for name in names}
    defaults |= {"enable_chunked_prefill": facts["chunked_prefill"], "async_scheduling": facts["async_scheduling"]}
    return {**defaults, "kv_cache_dtype": "auto", **found}


def _vllm(launch: Launch, values: dict[str, Any]) -> dict[str, Any]:
    deployment = launch.deployment
    size = {short: values.get(f"{name}_parallel_size", 1) for short, name in
            {"tp": "tensor", "pp": "pipeline", "dp": "data", "dcp": "decode_context"}.items()}  # fmt: skip
    size["ep"] = size["tp"] * size["dp"] if values.get("enable_expert_parallel") else 1
    args = {name: values[name] for name in EngineArgs.__dataclass_fields__ if name in values}
    args |= {} if values.get("enable_lora") else {"max_loras": 0}
    drafting = values.get("speculative_config")
    if old := values.get("speculative_model"):
        method = {"[ngram]": "ngram"}.get(old) or kind(deployment.speculation.method)
        drafting = {"method": method, "num_speculative_tokens": values["num_speculative_tokens"]}
    args.setdefault("enable_prefix_caching", deployment.engine.facts["prefix_caching"])
    if launch.nodes > 1 and "nnodes" in values:
        assert values["nnodes"] * launch.gpus == deployment.layout.gpus_per_replica
    if launch.nodes > 1 and "data_parallel_size_local" in values:
        assert values["data_parallel_size_local"] * launch.nodes == size["dp"]
    return {
        "layout": ParallelLayout(**size), **_args(deployment, **args),
        "speculation": drafting and (kind(drafting["method"]), drafting["num_speculative_tokens"]),
    }  # fmt: skip


def _sglang(launch: Launch, values: dict[str, Any]) -> dict[str, Any]:
    long = {"tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size", "dp_size": "data_parallel_size",
            "ep_size": "expert_parallel_size"}  # fmt: skip
    values = {**{short: values[name] for short, name in long.items() if name in values}, **values}
    attention = values.get("attn_dp_size") or (values["dp_size"] if values.get("enable_dp_attention") else 1)
    dp = attention if attention > 1 else values.get("dp_size", 1)
    chunk = values["chunked_prefill_size"]
    names = {"NEXTN": "mtp", "STANDALONE": "draft_model"}
    method = values.get("speculative_algorithm")
    eager = values.get("disable_cuda_graph") or values.get("cuda_graph_backend_decode") == "disabled"
    sizes = {"tp": values.get("tp_size", 1) // attention, "pp": values.get("pp_size", 1), "dp": dp,
             "ep": values.get("ep_size", 1), "dcp": values.get("dcp_size", 1)}  # fmt: skip
    if values.get("nnodes", 1) > 1:
        assert values["nnodes"] == launch.nodes and "dist_init_addr" in values and "node_rank" in values
    assert values["host"] == "0.0.0.0" and values["enable_metrics"]
    found = {
        "max_model_len": values["context_length"], "max_num_seqs": values["max_running_requests"] // attention,
        "max_num_batched_tokens": chunk // attention if chunk > 0 else values["max_prefill_tokens"],
        "gpu_memory_utilization": values["mem_fraction_static"], "dtype": values["dtype"],
        "enable_prefix_caching": not values.get("disable_radix_cache"), "enable_chunked_prefill": chunk > 0,
        "async_scheduling": not values.get("disable_overlap_schedule"), "enforce_eager": bool(eager),
        "scheduling_policy": "priority" if values.get("enable_priority_scheduling") else "fcfs",
        "kv_cache_dtype": values.get("kv_cache_dtype", "auto"), "block_size": values.get("page_size"),
        "scheduler_recv_interval": values.get("scheduler_recv_interval", 1),
    }  # fmt: skip
    if values.get("enable_lora"):
        found |= {"max_loras": values["max_loras_per_batch"], "max_lora_rank": values["max_lora_rank"]}
    drafted = method and (kind(names.get(method, method)), values["speculative_num_draft_tokens"] - 1)
    return {"layout": ParallelLayout(**sizes), **_args(launch.deployment, **found), "speculation": drafted}


def _trtllm(launch: Launch, values: dict[str, Any]) -> dict[str, Any]:
    config = yaml.safe_load(launch.config)
    cache, drafting, adapters = config["kv_cache_config"], config.get("speculative_config"), config.get("lora_config")
    ranks, copied = values.get("tensor_parallel_size", 1), config.get("enable_attention_dp", False)
    sizes = {"tp": 1 if copied else ranks, "dp": ranks if copied else 1, "pp": values.get("pipeline_parallel_size", 1),
             "ep": values.get("moe_expert_parallel_size", 1)}  # fmt: skip
    if launch.nodes > 1:
        command = launch.command
        assert command[:3] == ["mpirun", "-n", str(ranks * sizes["pp"])] and "trtllm-llmapi-launch" in command
        assert values["gpus_per_node"] * launch.nodes == ranks * sizes["pp"]
    found = {
        "max_model_len": values["max_seq_len"], "max_num_seqs": values["max_batch_size"], "dtype": config["dtype"],
        "max_num_batched_tokens": values["max_num_tokens"], "gpu_memory_utilization": cache["free_gpu_memory_fraction"],
        "enable_prefix_caching": cache["enable_block_reuse"], "kv_cache_dtype": cache["dtype"],
        "enable_chunked_prefill": config["enable_chunked_prefill"], "block_size": cache.get("tokens_per_block"),
        "async_scheduling": not config["disable_overlap_scheduler"], "enforce_eager": "cuda_graph_config" in config,
        **(adapters or {}),
    }  # fmt: skip
    tokens = drafting and (drafting.get("max_draft_len") or drafting["num_nextn_predict_layers"])
    names = {"Eagle": "eagle3", "Eagle3": "eagle3", "DraftTarget": "draft_model"}
    drafted = drafting and (kind(names.get(drafting["decoding_type"], drafting["decoding_type"])), tokens)
    return {"layout": ParallelLayout(**sizes), **_args(launch.deployment, **found), "speculation": drafted}


def _tgi(launch: Launch, values: dict[str, Any]) -> dict[str, Any]:
    args = launch.deployment.args
    found = {
        "max_model_len": values["max_total_tokens"], "max_num_seqs": values["max_batch_size"],
        "max_num_batched_tokens": values["max_batch_prefill_tokens"], "block_size": args.block_size,
        "gpu_memory_utilization": values["cuda_memory_fraction"], "dtype": values.get("dtype", args.dtype),
        "enable_prefix_caching": launch.environment.get("PREFIX_CACHING") != "0",
        "kv_cache_dtype": values.get("kv_cache_dtype", "auto"), "enforce_eager": values.get("cuda_graphs") == "0",
    }  # fmt: skip
    drafted = ("ngram", values["speculate"]) if "speculate" in values else None
    layout = ParallelLayout(tp=values["num_shard"])
    return {"layout": layout, **_args(launch.deployment, **found), "speculation": drafted}


def described(launch: Launch) -> str:
    """The launch in a failed test's message."""
    return json.dumps(launch.command)
