"""Varied deployments, and what an engine's own parser reads out of the command that starts one."""

import json
import random
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from itertools import count
from typing import Any

import yaml

from planner.core.errors import PlannerError
from planner.deploy import LaunchSpec, build_deployment_launch
from planner.deploy.arguments import Argument, EnvVariable, format_argument
from planner.engines.cli_options import get_cli_options
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.engine_args import EngineArgs
from planner.engines.layout import SpeculationConfig
from planner.engines.speculation_methods import normalize_method_name
from planner.models.registry import load_model
from planner.parallelism.start_gate import explain_refused_start
from planner.tools.lint.deployment_reader import read_draft_settings, read_engine_args, read_layout

TOKENIZER = """class AutoTokenizer:
    from_pretrained = classmethod(lambda cls, name, **options: cls())
    __len__ = lambda self: 5000
    decode = lambda self, ids: " " + "".join(chr(97 + ids[0] // 26**k % 26) for k in range(3))
    encode = lambda self, text: ["<s>", *text.split()]
"""
"""A stand-in for transformers whose words are tokens, as far as `bench.sh` needs it."""
VERSIONS = {
    "vllm": ["0.5.4", "0.6.6", "0.7.3", "0.8.5", "0.9.2", "0.10.0", "0.12.0", "0.14.1", "0.16.0", "0.18.0", "0.20.2",
             "0.33.0"],
    "sglang": ["0.5.10", "0.5.23"],
    "trtllm": ["1.1.0", "1.2.0", "1.3.0"],
}  # fmt: skip
MODELS = ["meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen3-235B-A22B",
          "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b", "moonshotai/Kimi-K2-Instruct"]  # fmt: skip
GPUS = ["H100", "H200", "B200", "L40S", "MI300X", "Gaudi-3"]
METHODS = {"vllm": ["ngram", "eagle3", "mtp", "draft_model", "suffix", "medusa"],
           "sglang": ["ngram", "eagle3", "mtp", "eagle"], "trtllm": ["ngram", "eagle3", "mtp"]}  # fmt: skip


def drawn(engine: str, draw: random.Random) -> Deployment:
    """Some deployment of `engine`; `PlannerError` where nothing starts like that."""
    layout = {"tp": draw.choice([1, 2, 4, 8])}
    layout |= {"pp": draw.choice([1, 1, 1, 2, 3, 4]), "dp": draw.choice([1, 1, 1, 2, 8, 16])}
    layout["ep"] = draw.choice([1, layout["tp"] * layout["dp"]])
    layout["dcp"] = draw.choice([1, 1, 1, 2])
    name = draw.choice(MODELS)
    args: dict[str, Any] = {
        "max_model_len": draw.choice([4096, 8192, 20480]),
        "max_num_seqs": draw.choice([1, 64, 256, 1000]),
        "max_num_batched_tokens": draw.choice([None, 32768]),
        "gpu_memory_utilization": draw.choice([None, 0.8, 0.87]),
        "kv_cache_dtype": draw.choice(["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]),
        "block_size": draw.choice([None, 16, 64]), "enforce_eager": draw.random() < 0.2,
        "enable_prefix_caching": draw.choice([None, True, False]),
        "enable_chunked_prefill": draw.choice([None, None, True, False]),
        "async_scheduling": draw.choice([None, None, True, False]),
        "dtype": draw.choice([None, "bfloat16", "float16"]),
    }  # fmt: skip
    if draw.random() < 0.2:
        args |= {
            "max_loras": draw.choice([1, 8]),
            "max_lora_rank": draw.choice([8, 64]),
            "max_cpu_loras": draw.choice([0, 9]),
        }
    if draw.random() < 0.2:
        args |= {"scheduling_policy": "priority"}
    if draw.random() < 0.15:
        args |= {"long_prefill_token_threshold": 2048}
    if draw.random() < 0.2:
        args |= {"revision": draw.choice(["main", "refs/pr/12", "0123456789abcdef"])}
    if engine in ("vllm", "sglang") and draw.random() < 0.2:
        args |= {"limit_mm_per_prompt": draw.choice(["image=2", "image=4,video=0"])}
    if engine == "sglang" and draw.random() < 0.3:
        args |= {"scheduler_recv_interval": 5}
    speculation = None
    if draw.random() < 0.4:
        method = draw.choice(METHODS[engine])
        draft = load_model("meta-llama/Llama-3.2-1B-Instruct") if method == "draft_model" else None
        head = draw.choice([None, "some/head", "it's $HOME/head"])
        speculation = SpeculationConfig(
            method, draw.choice([1, 3, 5]), 0.6, draft, head if draft is None else None
        )
    quantization = draw.choice([None, None, "fp8", "awq"])
    return deploy_on(
        name, draw.choice(GPUS), **layout, engine=engine,
        engine_version=draw.choice(VERSIONS[engine]),
        speculation=speculation, quantization=quantization, replicas=draw.choice([1, 4]), **args,
    )  # fmt: skip


def plans(engine: str, many: int, seed: int = 0) -> Iterator[LaunchSpec]:
    """So many launches of deployments that the engine takes."""
    found = 0
    for at in count():
        if found == many:
            return
        try:
            deployment = drawn(engine, random.Random(f"{engine} {seed} {at}"))
            crosses_node = deployment.layout.tp > deployment.gpus_per_node
            if crosses_node or explain_refused_start(deployment):
                continue
            made = build_deployment_launch(deployment)
        except PlannerError:
            continue
        found += 1
        yield made


def planned(deployment: Deployment) -> dict[str, Any]:
    """Everything that has to arrive, by our own names."""
    args = {**vars(deployment.args), "kv_cache_dtype": deployment.args.kv_cache_dtype or "auto"}
    if not deployment.args.max_loras:
        args["max_lora_rank"] = EngineArgs.__dataclass_fields__["max_lora_rank"].default
    drafts, layout = deployment.speculation, replace(deployment.layout, replicas=1)
    if deployment.engine.name == "sglang" and not deployment.model.architecture.is_moe:
        layout = replace(
            layout, dp=1, replicas=layout.dp
        )  # copies of a dense model are whole replicas
    return {
        "layout": layout, **args,
        "speculation": drafts and (normalize_method_name(drafts.method), drafts.num_speculative_tokens),
    }  # fmt: skip


def arrived(launch: LaunchSpec) -> dict[str, Any]:
    """What `headroom lint` reads in the command, over the engine's own defaults of what is left out."""
    deployment = launch.deployment
    engine = deployment.engine
    parsed = get_cli_options(engine.name, engine.version).parse(
        [filled(word) for flag in launch.flags for word in flag.arguments]
    )
    assert not parsed.errors and not parsed.positional, parsed
    values = parsed.values | (yaml.safe_load(launch.config) if launch.config else {})
    values |= {name.lower(): value for name, value in launch.environment.items()}
    _spans(launch, values)
    drafts = read_draft_settings(engine.name, values)
    method = (
        normalize_method_name(deployment.speculation.method)
        if "speculative_model" in values
        else drafts and normalize_method_name(drafts[0])
    )
    if (
        values.get("speculative_model") == "[ngram]"
    ):  # any other was named by its weights alone before 0.8.5
        method = "ngram"
    return {
        "layout": read_layout(engine.name, values), **_defaults(deployment),
        **read_engine_args(engine.name, values),
        "speculation": drafts and (method, drafts[1]),
    }  # fmt: skip


def _spans(launch: LaunchSpec, values: dict[str, Any]) -> None:
    """The nodes and ranks of the command hold exactly the GPUs of a replica; it is reached, and measured."""
    layout, ranks = (
        launch.deployment.layout,
        values.get("tensor_parallel_size", 1) * values.get("pipeline_parallel_size", 1),
    )
    if launch.deployment.engine.name == "sglang":
        assert values["host"] == "0.0.0.0" and values["enable_metrics"]
    if launch.nodes == 1:
        return
    if "nnodes" in values:
        assert (
            values["nnodes"] == launch.nodes
            and values["nnodes"] * launch.gpus == layout.gpus_per_replica
        )
        assert "dist_init_addr" in values or {"master_addr", "master_port"} <= set(values)
        assert "node_rank" in values
    if "data_parallel_size_local" in values:
        assert values["data_parallel_size_local"] * launch.nodes == layout.dp
    if "gpus_per_node" in values:
        assert (
            launch.command[:3] == ["mpirun", "-n", str(ranks)]
            and "trtllm-llmapi-launch" in launch.command
        )
        assert values["gpus_per_node"] * launch.nodes == ranks


def filled(word: Argument) -> str:
    """An argument where every variable is set."""
    set_to = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    return "".join(
        set_to.get(part.name, "some/head")
        if isinstance(part, EnvVariable)
        else format_argument((part,))
        for part in word
    )


def _defaults(deployment: Deployment) -> dict[str, Any]:
    """What the engine starts with where the command says nothing."""
    facts = deployment.engine.facts
    defaults = {
        field.name: field.default for field in fields(EngineArgs) if field.default is not MISSING
    }
    defaults |= {
        "enable_chunked_prefill": facts.chunked_prefill,
        "async_scheduling": facts.async_scheduling,
    }
    defaults |= {"enable_prefix_caching": facts.prefix_caching, "kv_cache_dtype": "auto"}
    return defaults


def described(launch: LaunchSpec) -> str:
    """The launch in a failed test's message."""
    return json.dumps(launch.command)
