"""What is planned arrives: every command is read back by its engine's own parser, and starts exactly the plan."""

import re

import pytest
from launch_plans import arrived, described, planned, plans

from planner.core.errors import PlannerError
from planner.deploy import build_deployment_launch
from planner.engines.deployment import deploy_on
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
        ({"revision": "main", "quantization": "awq"}, "revision main is not one of a checkpoint quantized with awq"),
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


def test_a_tensor_parallel_group_stays_within_a_node() -> None:
    """vLLM puts world_size / nnodes consecutive ranks on each node: two nodes of 8 would cut the second of three."""
    found = build_deployment_launch(
        deploy_on("meta-llama/Llama-3.1-70B-Instruct", "H100", tp=4, pp=3, engine_version="0.20.2")
    )
    assert (found.nodes, found.gpus) == (3, 4) and "--nnodes 3" in found.shell_line
    first, others = found.shell_lines.values()
    assert first == found.shell_line and others == f"{first} --headless"


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
        ).shell_line
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
    assert f" {option} " in launch.shell_line
    chat = deploy_on("Qwen/Qwen3-8B", "L40S", engine=engine, engine_version=version)
    assert option.split()[0] not in build_deployment_launch(chat).shell_line
