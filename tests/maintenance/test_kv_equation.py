"""What the VRAM chapter says of each kind of layer adds up to what a token takes."""

import pytest

from planner.analysis.memory_sweeps import build_kv_table
from planner.engines.deployment import deploy_on
from planner.memory.memory_plan import plan_memory

KINDS = [  # model, GPU, tp, bytes per token on one GPU, kinds of layers
    ("meta-llama/Llama-3.1-70B", "H100", 4, 80 * 2 * 256 * 2, ["full attention"]),
    (
        "google/gemma-3-27b-it",
        "H100",
        1,
        10 * 16 * 256 * 2,
        ["full attention", "sliding window of 1,024"],
    ),
    (
        "openai/gpt-oss-120b",
        "H100",
        1,
        18 * 8 * 128 * 2,
        ["full attention", "sliding window of 128"],
    ),
    (
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "H100",
        4,
        12 * 512 * 2,
        ["full attention", "gated delta rule"],
    ),
    ("deepseek-ai/DeepSeek-V3", "H200", 8, 61 * 576 * 2, ["latent attention (MLA)"]),
    (
        "deepseek-ai/DeepSeek-V3.2",
        "H200",
        8,
        78324,
        ["latent attention (MLA) with an indexer"],
    ),  # vLLM 0.33.0 itself
]


@pytest.mark.parametrize(("name", "gpu", "tp", "token", "kinds"), KINDS)
def test_the_kinds_of_layers_add_up(
    name: str, gpu: str, tp: int, token: int, kinds: list[str]
) -> None:
    found = plan_memory(deploy_on(name, gpu, tp=tp, max_model_len=8192))
    table = build_kv_table(found)
    assert sorted(table["kind of layer"]) == kinds
    assert table["layers"].sum() == len(found.deployment.model.architecture.layers)
    assert table["bytes per token"].sum() == found.pool.layout.kv_bytes_per_token == token


def test_what_a_pipeline_stage_and_shared_caches_keep() -> None:
    """80 layers over two stages; gemma-4-E4B keeps a cache in 24 of its 42 layers."""
    halved = build_kv_table(plan_memory(deploy_on("meta-llama/Llama-3.1-70B", "H100", tp=4, pp=2)))
    assert halved["layers"].sum() == 40
    third = plan_memory(
        deploy_on("google/gemma-3-27b-it", "L40S", tp=2, pp=3)
    )  # stages hold 3, 3 and 4 of 10 full layers
    held = build_kv_table(third)["bytes per token"].sum()
    assert held == 4 * 8 * 256 * 2 == third.pool.layout.kv_bytes_per_token
    shared = build_kv_table(plan_memory(deploy_on("google/gemma-4-E4B", "H100"))).set_index(
        "kind of layer"
    )["layers"]
    assert shared["attention on an earlier layer's cache"] == 18 and shared.sum() == 42


def test_a_sequence_holds_windows_and_states_once() -> None:
    """gemma-3-27b: 1,024 tokens of 52 windowed layers are all that they ever take; Qwen3-Next's state never grows."""
    table = build_kv_table(plan_memory(deploy_on("google/gemma-3-27b-it", "H100"))).set_index(
        "kind of layer"
    )
    assert table.loc["sliding window of 1,024", "bytes per sequence"] == 1024 * 52 * 16 * 256 * 2
    found = plan_memory(deploy_on("Qwen/Qwen3-Next-80B-A3B-Instruct", "H100", tp=4))
    assert (
        build_kv_table(found)["bytes per sequence"].sum() == found.pool.layout.state_bytes_per_seq
    )
