"""What is planned arrives: every command is read back by its engine's own parser, and starts exactly the plan."""

import json
import re
from typing import Any

import pytest
from launch_plans import arrived, described, planned, plans
from shipped import small_scenario

from planner.answers.serialization import list_args
from planner.core.errors import PlannerError
from planner.deploy import build_deployment_launch
from planner.engines.cli_options import get_cli_options
from planner.engines.deployment import deploy_on
from planner.engines.engine_args import resolve_engine_args
from planner.engines.layout import SpeculationConfig
from planner.planning.scenario import load_scenario

SHARES = {"vllm": 0.5, "sglang": 0.22, "trtllm": 0.18}


def check(engine: str, many: int, seed: int) -> None:
    seen = set()
    for launch in plans(engine, many, seed):
        assert arrived(launch) == planned(launch.deployment), described(launch)
        seen.add((launch.deployment.engine.version, launch.nodes > 1))
    assert len(seen) >= 2


@pytest.mark.parametrize("engine", SHARES)
def test_every_planned_value_arrives(engine: str) -> None:
    check(engine, round(120 * SHARES[engine]), 0)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"engine": "trtllm", "speculation": SpeculationConfig("suffix", 3)},
         "trtllm has no speculative method suffix"),
        ({"engine": "trtllm", "speculation": SpeculationConfig("eagle3", 3)}, "name the eagle3 head"),
        ({"engine": "trtllm", "limit_mm_per_prompt": "image=2"}, "has no limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": "pictures=2"}, "expected such as image=2,video=0"),
        ({"revision": "main; id"}, "expected a branch, tag or commit"),
        ({"revision": "main", "quantization": "awq"}, "revision main is of a repository, and the model names none"),
        ({"engine": "trtllm", "scheduling_policy": "priority"}, "has no scheduling policy priority"),
        ({"engine": "sglang", "long_prefill_token_threshold": 9}, "has no long_prefill_token_threshold"),
        ({"engine_version": "0.8.5", "async_scheduling": True}, "vllm 0.8.5 has no option --async-scheduling"),
        ({"engine_version": "0.16.0", "block_size": 48}, "--block-size: takes one of 1, 8, 16, 32, 64, 128, 256"),
        ({"engine_version": "0.8.5", "dp": 16}, "vllm 0.8.5 has no option --data-parallel-size-local"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused_in_a_sentence(changes: dict, what: str) -> None:
    with pytest.raises(PlannerError, match=re.escape(what)):
        build_deployment_launch(deploy_on("meta-llama/Llama-3.1-8B-Instruct", "H100", **changes))


PASSED_ON: dict[str, Any] = {
    "trust_remote_code": True, "tokenizer": "mistralai/tok", "tokenizer_mode": "mistral",
    "chat_template": "./chat template.jinja",
    "served_model_name": ["chat", "gpt-4"], "otlp_traces_endpoint": "http://otel:4317", "disable_log_stats": True,
    "attention_backend": "FLASHINFER", "num_gpu_blocks_override": 5000, "compilation_config": {"level": 3},
    "load_format": "runai_streamer", "enable_auto_tool_choice": True, "tool_call_parser": "hermes",
    "reasoning_parser": "deepseek_r1", "generation_config": "vllm", "seed": 7, "shutdown_timeout": 30,
    "allowed_origins": ["https://x"], "prefix_caching_hash_algo": "xxhash",
}  # fmt: skip
"""Options that guides to vLLM teach, beside those that are planned."""


def test_options_that_are_not_planned_are_passed_on() -> None:
    """As vLLM's parser reads them, each once; clients, alerts and benchmark ask for the given name."""
    scenario = small_scenario({"engine_version": "0.20.2", "engine_args": PASSED_ON})
    served = deploy_on(scenario.model, "L40S", engine=scenario.engine, **scenario.engine_args)
    launch = build_deployment_launch(served)
    parsed = get_cli_options("vllm", "0.20.2").parse(launch.command[2:])
    assert not parsed.errors and len({each.written for each in parsed.options}) == len(
        parsed.options
    )
    assert {name: parsed.values[name] for name in PASSED_ON} == PASSED_ON
    assert served.served_name == "chat" and "attention_backend" in scenario.assumptions[-1]
    saved = json.loads(json.dumps(list_args(served)))
    assert resolve_engine_args(saved, served.engine, served.gpu, served.model) == served.args


@pytest.mark.parametrize(
    ("engine", "name", "value", "reason"),
    [
        ("vllm", "tensor_parallel_size", 2, "set tp in layout"),
        ("vllm", "api_key", "sk-secret", "secrets stay where the server starts"),
        ("vllm", "disable_log_stats", "yes", "must be true or false"),
        ("vllm", "num_gpu_blocks_override", "many", "takes a whole number"),
        ("vllm", "attention_backends", "x", "did you mean attention_backend"),
        ("sglang", "dp_size", 2, "set dp in layout"),
        ("trtllm", "extra_llm_api_options", "x.yaml", "the plan writes that file"),
    ],
)
def test_an_option_that_cannot_be_passed_on_says_what_can(
    engine: str, name: str, value: object, reason: str
) -> None:
    with pytest.raises(PlannerError, match=reason):
        small_scenario({"engine": engine, "engine_args": {name: value}})


def test_engines_take_their_own_names_of_what_is_planned() -> None:
    own = {"engine": "sglang", "engine_args": {"mem_fraction_static": 0.8, "context_length": 4096}}
    assert small_scenario(own).engine_args == {"gpu_memory_utilization": 0.8, "max_model_len": 4096}


def test_a_tensor_parallel_group_stays_within_a_node() -> None:
    """vLLM puts world_size / nnodes consecutive ranks on each node: two nodes of 8 would cut the second of three."""
    found = build_deployment_launch(
        deploy_on("meta-llama/Llama-3.1-70B-Instruct", "H100", tp=4, pp=3, engine_version="0.20.2")
    )
    assert (found.nodes, found.gpus) == (3, 4) and "--nnodes 3" in str(found)
    first, others = found.shell_lines.values()
    assert others == f"{first} --headless"


def test_sglang_counts_all_gpus_of_a_stage() -> None:
    asked = {
        "dp": 8,
        "ep": 8,
        "engine": "sglang",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
    }
    old, new = (
        build_deployment_launch(
            deploy_on("deepseek-ai/DeepSeek-V3", "H200", engine_version=version, **asked)
        ).shell_lines[""]
        for version in ("0.5.10", "0.5.23")
    )
    assert "--tp-size 8 --dp-size 8 --enable-dp-attention --ep-size 8" in old
    assert "--tp-size 8 --attn-dp-size 8 --ep-size 8" in new and "--enable-dp-attention" not in new
    assert (
        "--max-running-requests 512 --chunked-prefill-size 65536" in old
    )  # it divides both by its copies


def test_a_head_that_nothing_can_ask_for_later_is_refused_before_the_search() -> None:
    drafts = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance_rate": 0.7}
    for engines in ("trtllm", ["vllm", "trtllm"]):
        with pytest.raises(
            PlannerError, match="speculation, field head: trtllm reads what drafts from a file"
        ):
            load_scenario(
                "chat-70b", {"engine": engines, "engine_version": None, "speculation": drafts}
            )
    for head in ({"head": "some/head"}, {"allowed": False}):
        load_scenario(
            "chat-70b",
            {"engine": "trtllm", "engine_version": None, "speculation": {**drafts, **head}},
        )
    with pytest.raises(
        PlannerError, match="speculation, field method: trtllm has no speculative method suffix"
    ):
        load_scenario(
            "chat-70b",
            {
                "engine": ["vllm", "trtllm"],
                "engine_version": None,
                "speculation": {**drafts, "method": "suffix"},
            },
        )


@pytest.mark.parametrize(
    ("model", "engine", "version", "option"),
    [
        # docs.vllm.ai: --task until 0.12, --runner since; SGLang's docs: embedding models
        ("Qwen/Qwen3-Embedding-8B", "vllm", "0.33.0", "--runner pooling"),
        ("Qwen/Qwen3-Embedding-8B", "vllm", "0.12.0", "--runner pooling"),
        ("Qwen/Qwen3-Embedding-8B", "vllm", "0.8.5", "--task embed"),
        ("Qwen/Qwen3-Reranker-4B", "vllm", "0.8.5", "--task score"),
        ("Qwen/Qwen3-Embedding-8B", "sglang", "0.5.23", "--is-embedding"),
    ],
)
def test_embeddings_are_served_as_such(model: str, engine: str, version: str, option: str) -> None:
    launch = build_deployment_launch(
        deploy_on(model, "L40S", engine=engine, engine_version=version)
    )
    assert f" {option} " in launch.shell_lines[""]
    chat = deploy_on("Qwen/Qwen3-8B", "L40S", engine=engine, engine_version=version)
    assert option.split()[0] not in build_deployment_launch(chat).shell_lines[""]
