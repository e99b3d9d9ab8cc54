"""Weights per rank against what vLLM's own model classes create, and against public start-up logs."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.readers import read_yaml
from planner.core.units import GIB
from planner.engines.deployment import deploy_on
from planner.engines.layout import ParallelLayout, SpeculationConfig
from planner.memory.weights import (
    compute_loaded_bytes,
    compute_lora_bytes,
    compute_stage_bytes,
    compute_stored_bytes,
)
from planner.models.architecture import WeightTensor
from planner.models.quantization import WEIGHT_FORMATS
from planner.models.registry import load_model
from planner.parallelism.sharding import compute_shard_shape, split_layers_into_stages

PUBLISHED = read_yaml(Path(__file__).parent / "data" / "published_models.yaml")


@pytest.mark.parametrize(("name", "tp", "dp", "ep", "size"), PUBLISHED["ranks"])
def test_rank_bytes_are_the_engines(name: str, tp: int, dp: int, ep: int, size: int) -> None:
    deployment = deploy_on(name, "H100", tp=tp, dp=dp, ep=ep, engine_version="0.33.0")
    assert compute_stage_bytes(deployment)[0] == pytest.approx(size, rel=0.002)


@pytest.mark.parametrize(("name", "tp", "gpu", "version", "gib"), PUBLISHED["logs"])
def test_rank_bytes_are_the_logged_ones(
    name: str, tp: int, gpu: str, version: str, gib: float
) -> None:
    planned = compute_stage_bytes(deploy_on(name, gpu, tp=tp, engine_version=version))[0]
    assert planned / GIB == pytest.approx(gib, rel=0.003)


def test_a_checkpoint_has_the_bytes_that_its_index_states() -> None:
    """total_size of model.safetensors.index.json; experts in MXFP4 are padded only when loaded."""
    sizes = {
        "meta-llama/Llama-3.1-8B-Instruct": 16_060_522_496,
        "openai/gpt-oss-120b": 65_248_815_744,
    }
    for name, size in sizes.items():
        assert compute_stored_bytes(load_model(name)) == size
    assert compute_stored_bytes(load_model("openai/gpt-oss-120b"), padded=True) > 65_248_815_744


def test_an_fp8_checkpoint_keeps_its_attention_in_bf16() -> None:
    """57.75 GiB a GPU in vllm issue 6746, of the first upload, which stored 16 KV heads in place of 8."""
    config = {"model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
              "num_attention_heads": 128, "num_key_value_heads": 16, "vocab_size": 128256,
              "max_position_embeddings": 131072}  # fmt: skip
    published = load_model("meta-llama/Llama-3.1-405B-Instruct-FP8")
    first = replace(load_model(config), quantization=published.quantization)
    planned = compute_stage_bytes(deploy_on(first, "H100", tp=8, engine_version="0.5.3"))[0]
    assert planned / GIB == pytest.approx(57.75, abs=0.03)


def test_stages_split_as_vllm_does() -> None:
    """vLLM distributed/utils.py get_pp_indices, run."""
    assert [*map(len, split_layers_into_stages(80, 3))] == [27, 27, 26]
    assert [*map(len, split_layers_into_stages(61, 4))] == [15, 15, 16, 15]
    assert [*map(len, split_layers_into_stages(94, 4))] == [23, 24, 24, 23]
    assert [*map(len, split_layers_into_stages(62, 5))] == [12, 12, 13, 13, 12]


def test_end_stages_hold_embedding_and_head() -> None:
    """Llama-3.3-70B at tp 2, pp 4 in vLLM: 16.95 GiB on the end stages, 15.97 in the middle."""
    stages = [
        size / GIB
        for size in compute_stage_bytes(deploy_on("meta-llama/Llama-3.1-70B", "H100", tp=2, pp=4))
    ]
    assert stages == pytest.approx([16.95, 15.97, 15.97, 16.95], abs=0.04)


def test_stored_formats() -> None:
    """Bits per weight of a large matrix: AWQ g128 4.156, NVFP4 4.5, MXFP4 4.25, FP8 blocks 8.002."""
    size = 8192 * 8192
    for name, bits in {
        "awq": 4.156,
        "nvfp4": 4.5,
        "mxfp4": 4.25,
        "fp8_block": 8.002,
        "int4": 4.125,
    }.items():
        assert WEIGHT_FORMATS[name].compute_matrix_bytes(8192, 8192) * 8 / size == pytest.approx(
            bits, abs=1e-3
        )


def test_a_block_that_sticks_out_has_a_scale() -> None:
    """kv_a_proj_with_mqa of DeepSeek-V3: 576 rows are 5 blocks of 128."""
    assert WEIGHT_FORMATS["fp8_block"].compute_matrix_bytes(576, 7168) == 576 * 7168 + 5 * 56 * 4


def test_unquantized_parts_stay_unquantized() -> None:
    served = load_model("nvidia/MiniMax-M2.5-NVFP4")
    layer = served.architecture.layers[0]
    formats = {
        weight.name: served.quantization.get_weight_format(weight, "layers.0.")
        for weight in layer.weights
    }
    assert formats["self_attn.q_proj"] is None
    assert formats["mlp.experts.up_proj"] is WEIGHT_FORMATS["nvfp4"]
    head = next(
        weight for weight in served.architecture.embedding_and_head if weight.part == "lm_head"
    )
    assert served.quantization.get_weight_format(head) is None


def test_mtp_layers_are_loaded_only_to_speculate() -> None:
    plain = compute_stage_bytes(deploy_on("deepseek-ai/DeepSeek-V3", "H200", tp=8))[0]
    drafting = compute_stage_bytes(
        deploy_on("deepseek-ai/DeepSeek-V3", "H200", tp=8, speculation=SpeculationConfig("mtp", 1))
    )[0]
    assert (
        11.6 < (drafting - plain) * 8 / 1e9 < 12.6
    )  # 11.6 B in FP8; latents and the bf16 join are on every rank


def test_experts_in_four_bits_whatever_the_checkpoint_calls_itself() -> None:
    """DeepSeek-V4-Flash on 2 H200, vLLM 0.23.0 and 0.27.1 log 74.08 and 74.34 GiB; its config says quant_method fp8."""
    mixed = compute_stage_bytes(
        deploy_on("deepseek-ai/DeepSeek-V4-Flash", "H200", tp=2, engine_version="0.27.1")
    )[0]
    assert mixed / GIB == pytest.approx(74.2, rel=0.01)
    whole = compute_stage_bytes(
        deploy_on("sgl-project/DeepSeek-V4-Flash-FP8", "H200", tp=2, engine_version="0.27.1")
    )[0]
    assert 1.7 < whole / mixed < 1.9


def test_lora_slots() -> None:
    """Rank-16 adapters on all linear layers of Llama-3.1-8B have 41,943,040 parameters (PEFT counts the same)."""
    weights = [
        weight
        for layer in load_model("meta-llama/Llama-3.1-8B").architecture.layers
        for weight in layer.weights
    ]
    assert compute_lora_bytes(weights, ParallelLayout(), 1, 16) == 2 * 41_943_040
    adapted = [weight for weight in weights if weight.name.endswith(("q_proj", "v_proj"))]
    assert compute_lora_bytes(adapted, ParallelLayout(), 4, 16) == 4 * 2 * 6_815_744


@pytest.mark.parametrize(
    ("name", "slots", "rank", "logged"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 256, 16, 38.5145),
        ("meta-llama/Llama-3.1-8B-Instruct", 192, 32, 49.1512),
        ("Qwen/Qwen2.5-7B-Instruct", 256, 32, 52.7489),
    ],
)
def test_weights_with_lora_slots_as_logged(name: str, slots: int, rank: int, logged: float) -> None:
    """vLLM of May 2025 (GPULLMAdapterOptimization): Llama's embedding and head take adapters, Qwen2.5's do not."""
    found = deploy_on(name, "H100", engine_version="0.9.0", max_loras=slots, max_lora_rank=rank)
    assert compute_stage_bytes(found)[0] / GIB == pytest.approx(logged, rel=0.0015)


def test_adapters_of_embedding_and_head_by_version() -> None:
    """From 0.12 on no slot holds added tokens (6 MiB each for Llama-3.1-8B); from 0.16 on Qwen3's ends take some."""

    def slot(name: str, version: str, tp: int = 1) -> int:
        sizes = [
            compute_stage_bytes(
                deploy_on(name, "H100", tp=tp, engine_version=version, max_loras=n)
            )[0]
            for n in (1, 2)
        ]
        return sizes[1] - sizes[0]

    llama, qwen = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B"
    assert slot(llama, "0.11.0") - slot(llama, "0.12.0") == 3 * 256 * 4096 * 2 + 16 * 256 * 2 * 2
    assert slot(qwen, "0.16.0") - slot(qwen, "0.15.0") == 2 * 16 * (151936 + 4096) * 2
    assert (
        slot(llama, "0.33.0", tp=8) > slot(llama, "0.33.0") / 4
    )  # the ends' adapters are whole on every rank


DENSE = ["meta-llama/Llama-3.1-70B", "Qwen/Qwen2.5-72B", "google/gemma-2-27b-it"]
MOE = ["Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3", "mistralai/Mixtral-8x7B-v0.1"]


def list_weights(name: str) -> list[WeightTensor]:
    """Each weight of a model, and of equal layers those of one."""
    shape = load_model(name).architecture
    layers = [weight for layer in shape.distinct_layers for weight in layer.weights]
    return [*layers, *shape.embedding_and_head, *shape.vision_towers]


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(DENSE + MOE), tp=st.sampled_from([1, 2, 4, 8]))
def test_tensor_parallel_shards_add_up_to_the_whole_and_the_replicas(name: str, tp: int) -> None:
    layout = ParallelLayout(tp=tp)
    for weight in list_weights(name):
        rows, cols, copies = compute_shard_shape(weight, layout)
        if weight.shard == "replicated":
            assert rows * cols * copies == weight.num_elements
        elif weight.shard == "kv":
            assert rows * cols * copies * tp == weight.num_elements * max(
                1, tp // weight.num_shard_units
            )
        elif weight.shard == "vocab":
            assert 0 <= rows * tp - weight.rows < 64
        else:
            assert rows * cols * copies * tp == weight.num_elements


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(DENSE + MOE), pp=st.integers(1, 8), tp=st.sampled_from([1, 4]))
def test_pipeline_stages_add_up_to_the_whole(name: str, pp: int, tp: int) -> None:
    whole = compute_stage_bytes(deploy_on(name, "H200", tp=tp))[0]
    stages = compute_stage_bytes(deploy_on(name, "H200", tp=tp, pp=pp))
    served = load_model(name)
    shared = sum(
        w.num_elements * 2 for w in served.architecture.embedding_and_head if w.part == "engine"
    ) * (pp - 1)
    tied = served.architecture.tied and pp > 1
    again = (
        sum(
            w.num_elements * 2 // tp
            for w in served.architecture.embedding_and_head
            if w.part == "embedding"
        )
        if tied
        else 0
    )
    assert sum(stages) == pytest.approx(whole + shared + again, rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(name=st.sampled_from(MOE), tp=st.sampled_from([1, 2, 4]), dp=st.sampled_from([1, 2, 4]))
def test_expert_parallel_ranks_hold_every_expert_once(name: str, tp: int, dp: int) -> None:
    ranks = tp * dp
    for weight in list_weights(name):
        if weight.part == "routed_experts" and weight.copies % ranks == 0:
            rows, cols, copies = compute_shard_shape(weight, ParallelLayout(tp=tp, dp=dp, ep=ranks))
            assert (rows, cols, copies * ranks) == (weight.rows, weight.cols, weight.copies)


STARTS = [
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "MI300X", 8, 1, "0.11.2", 126.73),
    ("Qwen/Qwen3-235B-A22B-Instruct-2507", "MI300X", 4, 1, "0.11.2", 112.61),
    ("Qwen/Qwen3-235B-A22B-Instruct-2507", "MI300X", 8, 1, "0.11.2", 56.65),
    ("RedHatAI/Ministral-3-14B-Instruct-2512", "MI300X", 1, 1, "0.14.1", 17.60),
    ("deepseek-ai/DeepSeek-R1-0528", "MI300X", 8, 1, "0.14.1", 81.31),
    ("deepseek-ai/DeepSeek-R1-0528", "H200", 8, 1, "0.14.1", 79.74),
    ("RedHatAI/Llama-4-Maverick-17B-128E-Instruct-FP8", "H200", 8, 1, "0.11.2", 48.87),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", "H200", 1, 1, "0.16.0", 30.52),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", "H200", 1, 1, "0.18.0", 31.40),
]
"""Model, GPU, TP, EP, vLLM, "Model loading took ... GiB" (vllm-memory-estimator's validation set)."""


@pytest.mark.parametrize(("name", "gpu", "tp", "ep", "version", "logged"), STARTS)
def test_loading_adds_copies_and_padding(
    name: str, gpu: str, tp: int, ep: int, version: str, logged: float
) -> None:
    deployment = deploy_on(name, gpu, tp=tp, ep=ep, engine_version=version)
    assert compute_loaded_bytes(deployment)[0] / GIB == pytest.approx(logged, rel=0.011)
