"""What frees enough GPU memory: deployments that are known to run after the change, and invariants."""

import re

import pytest

from planner.core.units import GIB
from planner.engines.deployment import deploy_on
from planner.memory.memory_plan import MemoryPlan, get_memory_plan, plan_memory
from planner.planning.memory_remedies import (
    MemoryRemedies,
    find_memory_remedies,
    shift_kv_available,
)
from planner.tools.lint.report import lint


def remedied(model: str, gpu: str, **options: object) -> tuple[MemoryPlan, MemoryRemedies]:
    memory = plan_memory(deploy_on(model, gpu, **options))  # type: ignore[arg-type]
    remedies = find_memory_remedies(memory)
    assert memory.status != "ok" and remedies is not None
    return memory, remedies


@pytest.mark.parametrize(
    ("model", "gpu", "options", "known"),
    [
        # the model card: 405B in BF16 needs two nodes, its FP8 checkpoint runs on one of eight H100
        ("meta-llama/Llama-3.1-405B-Instruct", "H100", {"tp": 8, "max_model_len": 8192}, "an FP8 checkpoint"),
        # 32.8 G parameters of 2 bytes leave 3 GiB of 72 for the 10 GiB of its whole context
        ("Qwen/Qwen3-32B", "H100", {"max_model_len": 40960}, "a 4-bit"),
        # runs on one H100 with fewer sequences, as its makers say of one 80 GB GPU
        ("openai/gpt-oss-120b", "H100", {}, "max_num_seqs"),
        ("meta-llama/Llama-3.1-70B-Instruct", "H100", {"max_model_len": 8192}, "tensor_parallel_size 4"),
        ("mistralai/Mistral-7B-v0.3", "L4", {"gpu_memory_utilization": 0.5}, "gpu_memory_utilization 0.8"),
        ("meta-llama/Llama-3.1-8B-Instruct", "RTX-4090", {"max_model_len": 49152}, "kv_cache_dtype fp8"),
    ],
)  # fmt: skip
def test_what_is_known_to_suffice_is_among_what_suffices(
    model: str, gpu: str, options: dict[str, object], known: str
) -> None:
    _, remedies = remedied(model, gpu, **options)
    assert any(one.change.startswith(known) for one in remedies.enough), remedies.describe()
    assert all(one.freed_bytes >= remedies.missing_bytes for one in remedies.enough)


def test_an_fp8_cache_frees_half_of_what_a_request_needs() -> None:
    """131,072 tokens of Llama-3.1-8B take 16 GiB: 2 x 32 layers x 8 heads x 128 x 2 bytes a token."""
    _, remedies = remedied("meta-llama/Llama-3.1-8B-Instruct", "RTX-4090")
    freed = {one.change: one.freed_bytes / GIB for one in remedies.remedies}
    assert freed["kv_cache_dtype fp8"] == pytest.approx(8, abs=0.1)
    # 8.03 G parameters of 2 bytes, less than half of them in 4 bits with scales
    assert 9 < freed["a 4-bit (AWQ or GPTQ) checkpoint of the model"] < 10.5


def test_a_gpu_without_a_kernel_is_not_sent_to_it() -> None:
    """V100: no FP8 KV cache in vLLM (8.0 and more), no FP8 and AWQ weights (7.5 and more)."""
    memory, remedies = remedied("meta-llama/Llama-3.1-8B-Instruct", "V100", max_model_len=16384)
    assert not [one for one in remedies.remedies if re.search("(?i)fp8|4-bit", one.change)]
    assert "FP8" not in memory.remedy


def test_if_nothing_is_enough_alone_that_is_said() -> None:
    """405B on one H100: no single change frees 700 GiB."""
    memory, remedies = remedied(
        "meta-llama/Llama-3.1-405B-Instruct", "H100", gpus_per_node=1, max_model_len=8192
    )
    head, *lines, together = remedies.describe()
    assert "No change is enough alone" in head and memory.remedy in together
    freed = [one.freed_bytes for one in remedies.remedies]
    assert max(freed) < remedies.missing_bytes and len(lines) == len(freed)


def test_what_starts_needs_nothing() -> None:
    deployment = deploy_on("meta-llama/Llama-3.1-8B-Instruct", "H100", max_model_len=8192)
    assert find_memory_remedies(get_memory_plan(deployment)) is None


def test_a_log_decides_what_is_available() -> None:
    memory = plan_memory(deploy_on("meta-llama/Llama-3.1-8B-Instruct", "H100", max_model_len=65536))
    shifted = shift_kv_available(memory, 4 * GIB)
    assert shifted.kv_available.mid == pytest.approx(4 * GIB, rel=1e-6)
    remedies = find_memory_remedies(shifted)
    assert remedies and remedies.missing_bytes == pytest.approx(4 * GIB, rel=0.01)
    assert shift_kv_available(memory, None) == memory


def test_lint_without_a_gpu_says_what_is_not_checked() -> None:
    """405.9 G parameters of 2 bytes on two GPUs are 378 GiB each: more than any GPU has."""
    fits = lint("vllm serve meta-llama/Llama-3.1-70B-Instruct --max-model-len 8192 -tp 4")
    assert "Memory is not checked without a GPU: it needs more than 33" in str(fits)
    assert "each of its 4 GPUs" in str(fits) and "--gpu H100-SXM" in str(fits)
    assert fits.verdict == "ok"
    large = lint("vllm serve meta-llama/Llama-3.1-405B-Instruct -tp 2")
    assert "378 GiB of weights" in str(large) and not large.findings[0].needs_fix
    offloaded = lint("vllm serve meta-llama/Llama-3.1-405B-Instruct --cpu-offload-gb 900")
    assert "70.9 GiB on its GPU (7.86 GiB" in str(offloaded)  # embedding and head
    for unknown in ("vllm serve mine", "vllm serve Qwen/Qwen3-32B -tp $TP"):
        assert "Memory is not checked without a GPU. Add --gpu" in str(lint(unknown))
    assert "not checked" not in str(lint("vllm serve Qwen/Qwen3-8B", gpu="H100"))
