"""The KV pool against what vLLM itself laid out: recorded from its source, and from public start-up logs."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.engine import get_engine, list_engines
from planner.engines.layout import SpeculationConfig
from planner.memory.kv_cache import KvCacheLayout, build_kv_layout, count_caches
from planner.models.mixers import get_kv_element_bytes
from planner.models.registry import Model, load_model


def llama(**fields: Any) -> Model:
    """A Llama-shaped model: 64 layers, 2 KV heads of 128 unless told otherwise."""
    shape = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_attention_heads": 32,
    }
    rest = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 8192,
        "vocab_size": 32000,
    }
    return load_model(
        {**shape, **rest, "max_position_embeddings": 131072, "torch_dtype": "bfloat16", **fields}
    )


def layout(
    served: str | Model, version: str = "0.20.2", gpu: str = "H100", **args: Any
) -> KvCacheLayout:
    return build_kv_layout(deploy_on(served, gpu, engine_version=version, **args))


@pytest.mark.parametrize("version", ["0.20.2", "0.33.0"])
def test_plain_attention_pool_as_vllm_computed_it(version: str) -> None:
    """vLLM 0.20.2 and 0.33.0, driven with 40 GB for the cache: 38,146 blocks, 37.25x, 610,336 tokens."""
    pool = layout(llama(), version, max_model_len=16384).build_pool([40e9])
    assert (pool.num_blocks, pool.reported_tokens, round(pool.max_concurrency_x, 2)) == (
        38146,
        610336,
        37.25,
    )


@pytest.mark.parametrize(("version", "concurrency"), [("0.20.2", 3.93), ("0.33.0", 3.11)])
def test_sliding_windows_reserve_the_batch_in_flight(version: str, concurrency: float) -> None:
    """gemma-3-27b's layers at 8 KV heads, 30 GB: 7 groups, 45,776 blocks; 0.33 reserves two batches per window."""
    found = layout(
        "google/gemma-3-27b-it", version, tp=2, max_model_len=131072, max_num_batched_tokens=8192
    )
    pool = found.build_pool([30e9])
    assert (len(found.groups), pool.num_blocks, round(pool.max_concurrency_x, 2)) == (
        7,
        45776,
        concurrency,
    )


def test_a_short_request_lies_in_every_window() -> None:
    """75 blocks see all, and each of 6 groups keeps its window of 1,024 and a block: far fewer fit than tokens / 1,200.

    The chapter on VRAM: of 150,000 tokens some thirty requests of 1,200, where division gives 125.
    """
    found = layout("google/gemma-3-27b-it", "0.20.2", tp=2, max_model_len=131072)
    pool = found.build_pool([30e9])
    assert pool.count_sequences(1200) == pool.num_blocks // (75 + 6 * 65)
    divided = pool.reported_tokens / 1200
    assert pool.count_sequences(1200) / divided == pytest.approx(30 / 125, rel=0.15)


def test_hybrid_pool_against_windows_stored_in_full() -> None:
    """vLLM 0.33.0, gemma-3-27b on two GPUs with 50 GiB each: 5.56x."""
    found = layout(
        "google/gemma-3-27b-it", "0.33.0", tp=2, max_model_len=131072, max_num_batched_tokens=8192
    )
    assert round(found.build_pool([50 * GIB]).max_concurrency_x, 2) == 5.56


# vLLM's own classes: model, tp, version, block size, bytes per block, groups, KV bytes/token with
# windows
RANKS = [
    ("meta-llama/Llama-3.1-8B", 1, "0.20.2", 16, 2097152, 1, 131072),
    ("meta-llama/Llama-3.1-8B", 8, "0.33.0", 16, 262144, 1, 16384),
    ("Qwen/Qwen3-30B-A3B", 4, "0.20.2", 16, 393216, 1, 24576),
    ("deepseek-ai/DeepSeek-R1", 8, "0.20.2", 16, 1124352, 1, 70272),
    ("zai-org/GLM-5.2", 8, "0.33.0", 64, 5928192, 1, 92628),
    ("google/gemma-3-4b-it", 1, "0.20.2", 16, 327680, 7, 139264),
    ("google/gemma-4-26B-A4B", 8, "0.33.0", 16, 163840, 6, 35840),
    ("XiaomiMiMo/MiMo-V2-Flash", 1, "0.20.2", 16, 737280, 6, 222720),
    ("openai/gpt-oss-120b", 8, "0.33.0", 16, 73728, 2, 9216),
    ("Qwen/Qwen3.5-27B", 1, "0.20.2", 784, 51380224, 4, 65536),
    ("Qwen/Qwen3.5-27B", 8, "0.33.0", 448, 7340032, 4, 16384),
    ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 8, "0.20.2", 240, 1935360, 4, 8064),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 1, "0.20.2", 1312, 21495808, 8, 16384),
    ("MiniMaxAI/MiniMax-M1-80k", 8, "0.20.2", 512, 2621440, 8, 5120),
]


@pytest.mark.parametrize(("name", "tp", "version", "block", "page", "groups", "token"), RANKS)
def test_layout_is_what_vllm_creates(
    name: str, tp: int, version: str, block: int, page: int, groups: int, token: int
) -> None:
    """Per rank on an H100, from vLLM's own model classes on meta tensors."""
    found = layout(name, version, tp=tp)
    assert found.block_size == block
    assert found.stage_bytes_per_block == (page,)
    assert len(found.groups) == groups
    caches = count_caches(load_model(name).architecture.layers, tp, "auto")
    assert sum(cache.token_bytes * n for cache, n in caches.items()) == token


def test_fp8_halves_the_cache_and_checkpoints_ask_for_it() -> None:
    """vLLM 0.20.2: --kv-cache-dtype fp8 gives 1,048,576 bytes per block; so does a checkpoint with FP8 KV scales."""
    assert layout("meta-llama/Llama-3.1-8B", kv_cache_dtype="fp8").stage_bytes_per_block == (
        1048576,
    )
    scheme = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    plain, scaled = layout(llama()), layout(llama(quantization_config=scheme))
    assert scaled.kv_bytes_per_token == plain.kv_bytes_per_token / 2


def test_a_hybrids_states_with_speculation_and_prefix_caching() -> None:
    """Qwen3.6-27B with 3 MTP tokens, FP8 KV, prefix caching, vLLM 0.20.2 on two RTX PRO 4000: log says 347,625
    tokens at 196,608 and, in another run, 335,111 tokens, 2.56x at 131,072 (public start-up
    logs)."""
    spec = SpeculationConfig("mtp", 3)
    common = {"tp": 2, "kv_cache_dtype": "fp8", "enable_prefix_caching": True, "speculation": spec}
    found = layout("Qwen/Qwen3.6-27B", gpu="L40S", max_model_len=196608, max_num_seqs=10, **common)
    assert (found.block_size, found.stage_bytes_per_block) == (1600, (27852800,))
    assert found.build_pool([6.35 * GIB]).reported_tokens == 347625
    shorter = layout("Qwen/Qwen3.6-27B", gpu="L40S", max_model_len=131072, max_num_seqs=2, **common)
    pool = shorter.build_pool([248 * 27852800])
    assert (pool.reported_tokens, round(pool.max_concurrency_x, 2)) == (335111, 2.56)


def test_a_hybrid_without_prefix_caching_holds_one_state() -> None:
    """Qwen3.8-27B's shape on an L40S, vLLM 0.26.0: 184 blocks (the log's "Mamba cache blocks"), 141,036 tokens."""
    found = layout(
        "Qwen/Qwen3.6-27B", "0.26.0", "L40S", max_model_len=131072, enable_prefix_caching=False
    )
    pool = found.build_pool([8.82 * GIB])
    assert (pool.num_blocks, pool.reported_tokens, round(pool.max_concurrency_x, 2)) == (
        184,
        141036,
        1.08,
    )


def test_old_meaning_of_kv_cache_size() -> None:
    """gemma-2-9b on an H100, vLLM 0.19.0: 21,110 blocks in two groups are logged as 168,880 tokens, 20.60x."""
    found = layout("google/gemma-2-9b-it", "0.19.0", max_model_len=8192)
    pool = found.build_pool([21110 * found.stage_bytes_per_block[0]])
    assert (pool.reported_tokens, round(pool.max_concurrency_x, 2)) == (168880, 20.60)


def test_compressed_attention_needs_states_for_every_token_in_flight() -> None:
    """DeepSeek-V4-Flash: 0.27.1 with 65,536 batched tokens needs 52.66 GiB for 131,072 tokens and could hold 58,148
    in 23.37 GiB; with 8,192 it needs 6.66 GiB for 30,000 and could hold 13,528 in 5.44 GiB (public
    start-up logs)."""
    wide = layout(
        "deepseek-ai/DeepSeek-V4-Flash",
        "0.27.1",
        "H200",
        tp=2,
        max_model_len=131072,
        max_num_batched_tokens=65536,
    )
    narrow = layout(
        "deepseek-ai/DeepSeek-V4-Flash",
        "0.27.1",
        "H200",
        tp=2,
        max_model_len=30000,
        max_num_batched_tokens=8192,
    )
    for found, need, have, longest in ((wide, 52.66, 23.37, 58148), (narrow, 6.66, 5.44, 13528)):
        page = found.stage_bytes_per_block[0]
        assert found.max_blocks_per_request * page / GIB == pytest.approx(need, abs=0.006)
        assert found.compute_max_model_len(math.floor(have * GIB / page)) == pytest.approx(
            longest, rel=0.005
        )


def test_the_null_block_shortens_auto_fit() -> None:
    """One pool, auto-fit context: 7,616 tokens in vLLM 0.20.2, 7,600 in 0.33.0, which keeps its null block apart."""
    found = layout(llama(), max_model_len=16384)
    assert (found.compute_max_model_len(476), found.compute_max_model_len(476 - 1)) == (7616, 7600)


def test_kv_heads_are_replicated_past_one_per_rank() -> None:
    """Qwen3-30B-A3B has 4 KV heads: TP8 keeps as much per rank as TP4."""
    four, eight = (layout("Qwen/Qwen3-30B-A3B", tp=tp).kv_bytes_per_token for tp in (4, 8))
    assert four == eight


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B", "google/gemma-3-27b-it", "deepseek-ai/DeepSeek-R1"]
)
@given(pp=st.integers(1, 8))
def test_pipeline_stages_add_up(name: str, pp: int) -> None:
    """However many stages, their layers' caches sum to the whole model's, up to group padding."""
    whole = layout(name, tp=2)
    stages = layout(name, tp=2, pp=pp)
    padded = sum(stages.stage_bytes_per_block)
    assert whole.stage_bytes_per_block[0] <= padded <= whole.stage_bytes_per_block[0] * 1.5
    assert max(stages.stage_bytes_per_block) <= whole.stage_bytes_per_block[0]


def deployments() -> list[Deployment]:
    names = [
        "meta-llama/Llama-3.1-8B",
        "google/gemma-3-27b-it",
        "Qwen/Qwen3.5-27B",
        "deepseek-ai/DeepSeek-V4-Flash",
    ]
    return [deploy_on(name, "H200", engine_version="0.20.2", max_model_len=32768) for name in names]


@pytest.mark.parametrize("deployment", deployments(), ids=lambda d: d.model.name)
@given(tokens=st.integers(1, 32768), more=st.integers(0, 4096), available=st.floats(0, 2e11))
def test_more_tokens_never_hold_fewer_blocks_and_pools_fit(
    deployment: Deployment, tokens: int, more: int, available: float
) -> None:
    found = build_kv_layout(deployment)
    assert found.count_request_blocks(tokens) <= found.count_request_blocks(tokens + more)
    pool = found.build_pool([available])
    assert pool.num_blocks * pool.bytes_per_block <= available
    assert 0 <= pool.layout.padding < 1
    assert found.count_request_blocks(
        found.compute_max_model_len(pool.num_blocks), found.in_flight
    ) <= max(pool.num_blocks, found.count_request_blocks(0, 0))


def test_a_draft_with_a_plain_cache_has_no_place_among_compressed_ones() -> None:
    v4: dict[str, Any] = {"max_model_len": 8192, "tp": 4, "gpu": "B200", "version": "0.33.0"}
    drafts = [SpeculationConfig(method, 3) for method in ("mtp", "eagle3")]
    assert layout("deepseek-ai/DeepSeek-V4-Flash", speculation=drafts[0], **v4).groups
    with pytest.raises(PlannerError, match="draft with mtp"):
        layout("deepseek-ai/DeepSeek-V4-Flash", speculation=drafts[1], **v4)


def test_every_quantized_cache_is_narrower_than_sixteen_bit() -> None:
    names = {n for each in list_engines() for n in get_engine(each).facts.kv_cache_dtypes}
    assert {n for n in names if get_kv_element_bytes(n) >= 2} <= {"auto", "float16", "bfloat16"}
