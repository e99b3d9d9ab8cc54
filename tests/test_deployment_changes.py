"""Changes of a deployment: names by engine, prices, and the changed deployment."""

from dataclasses import replace

import pytest

from planner.core.units import GIB
from planner.engines.deployment import deploy_on
from planner.engines.layout import ParallelLayout
from planner.memory.deployment_changes import DeploymentChange, list_changes, list_smaller_caches
from planner.memory.memory_plan import find_memory_changes, plan_memory

SMALL = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    ("engine", "argument", "value", "name"),
    [
        ("vllm", "max_num_seqs", 64, "max_num_seqs 64"),
        ("sglang", "gpu_memory_utilization", 0.8, "mem_fraction_static 0.8"),
        ("vllm", "layout", ParallelLayout(tp=4), "tensor_parallel_size 4 (4 GPUs)"),
        ("tgi", "layout", ParallelLayout(tp=2), "num_shard 2 (2 GPUs)"),
        ("vllm", "quantization", "fp8", "an FP8 checkpoint of the model"),
    ],
)
def test_a_change_has_the_engines_own_name(
    engine: str, argument: str, value: object, name: str
) -> None:
    deployment = deploy_on(SMALL, "H100", engine=engine)
    assert DeploymentChange(argument, value).describe(deployment) == name


def test_a_change_changes_one_thing() -> None:
    shared = deploy_on(SMALL, "H100", other_tenants=GIB)
    (alone,) = list_changes(shared)["gpu_free_bytes"]
    assert alone.apply(shared) == replace(shared, other_tenants_bytes=0)
    assert DeploymentChange("max_num_seqs", 8).apply(shared) == shared.with_args(max_num_seqs=8)
    narrow = DeploymentChange("quantization", "awq").apply(shared)
    assert narrow.model.quantization.weight_bits == 4 and narrow.args == shared.args


def test_a_wider_layout_keeps_its_expert_parallelism() -> None:
    """Experts span all ranks (vLLM, --enable-expert-parallel): 2 x 8 of them beside TP2 x DP8."""
    wide = deploy_on("Qwen/Qwen3-30B-A3B", "H100", dp=8, ep=8)
    layouts = [change.value for change in list_changes(wide)["layout"] if change.value.pp == 1]
    assert layouts and all(layout.ep == layout.tp * 8 for layout in layouts)


@pytest.mark.parametrize(
    ("engine", "gpu", "names"),
    [
        ("vllm", "H100", ["fp8"]),
        ("vllm", "V100", []),  # compute capability 7.0, below the 8.0 of an FP8 cache
        ("sglang", "H100", ["fp8_e4m3"]),
        ("tgi", "H100", ["fp8_e4m3fn"]),
    ],
)
def test_the_smaller_cache_is_one_that_engine_and_gpu_have(
    engine: str, gpu: str, names: list[str]
) -> None:
    assert list_smaller_caches(deploy_on(SMALL, gpu, engine=engine)) == names
    chosen = deploy_on(SMALL, "H100", kv_cache_dtype="fp8")
    assert not list_smaller_caches(chosen)


def test_sglang_halves_its_cache_before_it_rejects_long_requests() -> None:
    deployment = deploy_on(SMALL, "T4", engine="sglang", tp=2, gpus_per_node=2)
    changes = find_memory_changes(plan_memory(deployment), max_gpus=2)
    assert {change.argument for change in changes} >= {"kv_cache_dtype"}
    assert not {change.argument for change in changes} & {"max_model_len", "layout"}


def test_a_remedy_names_the_engines_own_options() -> None:
    """SGLang has no --gpu-memory-utilization (server_args.py: --mem-fraction-static)."""
    memory = plan_memory(deploy_on(SMALL, "L4", engine="sglang", max_model_len=65536))
    assert memory.status != "ok" and "gpu_memory_utilization" not in memory.remedy
    assert "mem_fraction_static to " in memory.remedy
