"""Bytes of weights per tensor-, pipeline- and expert-parallel rank, quantized as stored.

Sharding follows vLLM 0.33.0's layers: linear.py, vocab_parallel_embedding.py, fused_moe/layer.py,
distributed/utils.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod
from operator import attrgetter

from planner.core.units import GIB, MIB
from planner.engines.deployment import Deployment
from planner.engines.layout import ParallelLayout, SpeculationConfig
from planner.engines.speculation_methods import get_draft_method, resolve_draft_model
from planner.memory.runtime_overhead import offloads_weights
from planner.models.architecture import DecoderLayer, WeightTensor
from planner.models.registry import DTYPE_BYTES, Model
from planner.parallelism.sharding import compute_shard_shape, split_layers_into_stages

MXFP4_TILE_SIZES = (128, 256)
"""Multiples to which inner and hidden size of MXFP4 experts are padded.

vLLM 0.33.0 fused_moe/oracle/mxfp4.py:837.
"""
ROCM_ROW_PADDING = 256
"""Bytes of padding per row on ROCm (VLLM_ROCM_MOE_PADDING, VLLM_ROCM_FP8_PADDING, on by default)."""
ROCM_FP8_LEFTOVER = 0.2
"""Share of FP8 matrices that padding and freed blocks take beside them.

About 0.2 for Ministral-3-14B on one MI300X (vLLM 0.13 to 0.18: 17.6 GiB for 14.7) and for DeepSeek-R1 on
eight, less for Qwen3-235B.
"""
RADEON_LOADED_BYTES, INSTINCT_LOADED_BYTES = 0.3 * GIB, 0.7 * GIB
"""What else is in use after loading on ROCm, beyond padding.

0 to 0.7 GiB in starts of vLLM 0.11 to 0.13 on Radeon AI PRO R9700; 0.3 to 1.7 in those of 0.11 to 0.18
on MI300X, 5 models (vllm-memory-estimator's validation set).
"""
EXPERT_TILE = 128
"""The inner size of packed experts without a gate is padded to a multiple of this."""
LARGE_ALLOCATION_BYTES, ALLOCATION_STEP_BYTES = 10 * MIB, 2 * MIB
"""torch reserves large tensors in multiples of the step (CUDACachingAllocator.cpp)."""


def compute_weight_bytes(
    model: Model, weight: WeightTensor, layout: ParallelLayout, prefix: str = "",
    padded: bool = True,
) -> float:  # fmt: skip
    """Compute the bytes of a weight on the fullest rank, in the module `prefix`; `padded` by the engine."""
    rows, cols, copies = compute_shard_shape(weight, layout)
    scheme = model.quantization.get_weight_format(weight, prefix)
    if scheme is None:
        bits = weight.stored_bits
        return rows * cols * copies * (bits // 8 if bits else DTYPE_BYTES[model.dtype])
    if padded and scheme.method == "mxfp4" and weight.part == "routed_experts":
        tiles = MXFP4_TILE_SIZES if weight.shard == "column" else reversed(MXFP4_TILE_SIZES)
        rows, cols = (
            ceil(size / tile) * tile for size, tile in zip((rows, cols), tiles, strict=True)
        )
    return copies * scheme.compute_matrix_bytes(rows, cols)


def compute_lora_bytes(
    weights: Iterable[WeightTensor], layout: ParallelLayout, max_loras: int, max_lora_rank: int,
    reserved: bool = False,
) -> int:  # fmt: skip
    """Compute the bytes per GPU that vLLM allocates for adapters: matrices A and B per slot.

    Both have rank `max_lora_rank` and 16 bit; only the side that the weight itself splits is split
    (vLLM 0.33.0 lora/layers/). `reserved` rounds sizes up as torch's allocator does.
    """
    total = 0
    for weight in filter(attrgetter("linear"), weights):
        rows, cols, copies = compute_shard_shape(weight, layout)
        for side in (rows, cols):
            size = 2 * max_loras * max_lora_rank * side
            if reserved and size >= LARGE_ALLOCATION_BYTES:
                size = ceil(size / ALLOCATION_STEP_BYTES) * ALLOCATION_STEP_BYTES
            total += copies * size
    return total


def compute_lora_embedding_bytes(deployment: Deployment) -> tuple[int, int]:
    """Compute bytes per GPU of adapters on embedding and output head, which are not split.

    Until 0.11 every slot also has space for tokens that its adapter adds, once more in the
    embedding itself (vLLM 0.9.2 lora/layers.py, models/llama.py:332; 0.33.0
    lora/layers/vocab_parallel_embedding.py).
    """
    architecture, args = deployment.model.architecture, deployment.args
    facts = deployment.engine.facts
    if not args.max_loras or not any(
        architecture.model_type in types for types in facts.lora_ends.values()
    ):
        return 0, 0
    extra, hidden, tp = facts.lora_extra_vocabulary, architecture.hidden, deployment.layout.tp
    elements = args.max_lora_rank * (architecture.vocab + extra + hidden) + extra * hidden
    adapters, added = 2 * args.max_loras * elements, ceil(2 * extra * hidden / tp)
    return adapters + args.max_loras * added, adapters + added


def compute_stage_bytes(deployment: Deployment) -> tuple[int, ...]:
    """Compute the weight bytes per GPU of each pipeline stage, with draft and adapters."""
    model, layout = deployment.model, deployment.layout
    if model.architecture.vision_towers and not deployment.loaded_vision_towers:
        model = replace(model, architecture=replace(model.architecture, vision_towers=()))
    stages = list(_sum_stage_bytes(model, layout, deployment.engine.facts.lean_copies))
    if deployment.speculation is not None:
        stages[-1] += compute_draft_bytes(model, deployment.speculation, layout)
    adapters, offloaded = compute_adapter_slot_bytes(deployment), count_offloaded_bytes(deployment)
    return tuple(
        size + slots - part for size, slots, part in zip(stages, adapters, offloaded, strict=True)
    )


def compute_adapter_slot_bytes(deployment: Deployment) -> tuple[int, ...]:
    """Compute the bytes per GPU of each pipeline stage that the slots of LoRA adapters take."""
    args, layout = deployment.args, deployment.layout
    if not args.max_loras:
        return (0,) * layout.pp
    stages = list(
        _sum_slot_bytes(
            deployment.model, layout, args.max_loras, args.max_lora_rank, deployment.engine.is_v0
        )
    )
    first, last = compute_lora_embedding_bytes(deployment)
    stages[0] += first
    stages[-1] += last
    return tuple(stages)


@lru_cache(maxsize=256)
def _sum_slot_bytes(
    model: Model, layout: ParallelLayout, max_loras: int, max_lora_rank: int, reserved: bool
) -> tuple[int, ...]:
    """Sum what the slots take on the decoder layers of each pipeline stage."""
    layers = model.architecture.layers
    return tuple(
        compute_lora_bytes(
            (weight for number in numbers for weight in layers[number].weights), layout,
            max_loras, max_lora_rank, reserved=reserved,
        )
        for numbers in split_layers_into_stages(len(layers), layout.pp)
    )  # fmt: skip


def compute_stored_bytes(model: Model, padded: bool = False) -> int:
    """Compute the bytes of a model's weights, without MTP layers: as stored, or `padded` as an engine does."""
    architecture, layout = model.architecture, ParallelLayout()
    weights = [
        (weight, prefix)
        for layer, prefix in zip(architecture.layers, model.layer_prefixes, strict=True)
        for weight in layer.weights
    ]
    weights += [(weight, "") for weight in architecture.embedding_and_head]
    weights += [(weight, "") for weight in architecture.vision_towers]
    sizes = (
        compute_weight_bytes(model, weight, layout, prefix, padded)
        for weight, prefix in weights
        if weight.part != "engine"
    )
    return round(sum(sizes))


def compute_read_bytes(deployment: Deployment) -> tuple[int, ...]:
    """Compute the bytes of files that each GPU of a stage takes its weights and draft from.

    What an engine converts while it loads is read in the format of the checkpoint.
    """
    model = deployment.model
    if model.quantization.method in deployment.engine.facts.online:
        model = model.as_stored
    whole = deployment.with_args(max_loras=0, cpu_offload_gb=0.0)
    return compute_stage_bytes(replace(whole, model=model))


def compute_checkpoint_bytes(deployment: Deployment) -> int:
    """Compute the bytes of all files that a replica reads, each once."""
    layout = deployment.layout
    return sum(compute_read_bytes(deployment)) * layout.tp * (layout.dp if layout.ep > 1 else 1)


def count_offloaded_bytes(deployment: Deployment) -> tuple[int, ...]:
    """Count the weight bytes of each stage, per GPU, that stay in host memory: of layers only.

    vLLM 0.33.0 model_executor/models/utils.py (make_layers), model_executor/offloader/uva.py.
    """
    model, layout = deployment.model, deployment.layout
    limit = round(deployment.args.cpu_offload_gb * GIB)
    if not limit or not offloads_weights(deployment.engine, model):
        return (0,) * layout.pp
    sizes = _sum_over_stages(model, layout, _compute_layer_bytes)
    return tuple(min(limit, round(size)) for size in sizes)


def compute_loaded_bytes(deployment: Deployment) -> tuple[int, ...]:
    """Compute the weight bytes per GPU of each stage once they are loaded, with copies and padding.

    On ROCm all memory in use counts (vLLM 0.19.1 platforms/rocm.py, get_current_memory_usage).
    """
    stages, facts = compute_stage_bytes(deployment), deployment.engine.facts
    if not facts.own_constants:
        return stages
    measures, loaded = [_compute_copied_bytes], 0.0
    if deployment.gpu.vendor == "amd":
        measures.append(_compute_rocm_padding)
        is_instinct = "fabric" in deployment.gpu.link
        loaded = INSTINCT_LOADED_BYTES if is_instinct else RADEON_LOADED_BYTES
    elif facts.padded_experts:
        measures.append(_compute_expert_padding)
    model, layout = deployment.model, deployment.layout
    added = [_sum_over_stages(model, layout, measure) for measure in measures]
    return tuple(
        round(size + sum(more) + loaded) for size, *more in zip(stages, *added, strict=True)
    )


@lru_cache(maxsize=4096)
def _sum_over_stages(
    model: Model,
    layout: ParallelLayout,
    measure: Callable[[Model, DecoderLayer, ParallelLayout, str], float],
) -> tuple[float, ...]:
    """Sum what each decoder layer of a pipeline stage has of `measure`."""
    layers, prefixes = model.architecture.layers, model.layer_prefixes
    return tuple(
        sum(measure(model, layers[i], layout, prefixes[i]) for i in stage)
        for stage in split_layers_into_stages(len(layers), layout.pp)
    )


@lru_cache(maxsize=4096)
def _compute_copied_bytes(
    model: Model, layer: DecoderLayer, layout: ParallelLayout, prefix: str
) -> float:
    """Compute the 16-bit copy of a packed kv_b_proj, which is absorbed into queries and outputs.

    vLLM 0.33.0 model_executor/layers/attention/mla_attention.py, process_weights_after_loading.
    """
    return sum(
        2.0 * prod(compute_shard_shape(weight, layout))
        for weight in layer.weights
        if weight.name.endswith("kv_b_proj")
        and model.quantization.get_weight_format(weight, prefix)
    )


@lru_cache(maxsize=4096)
def _compute_expert_padding(
    model: Model, layer: DecoderLayer, layout: ParallelLayout, prefix: str
) -> float:
    """Compute what packed experts without a gate gain where their inner size is padded to 128.

    vLLM 0.19.1 quantization/utils/flashinfer_utils.py:435, flashinfer_fp4_moe.py:251.
    """
    if not layer.mlp or not layer.mlp.num_experts or layer.mlp.matrices != 2:
        return 0.0
    total = 0.0
    for weight in layer.weights:
        rows, cols, _ = compute_shard_shape(weight, layout)
        inner = rows if weight.shard == "column" else cols
        is_packed = model.quantization.get_weight_format(weight, prefix) is not None
        if weight.part == "routed_experts" and is_packed:
            size = compute_weight_bytes(model, weight, layout, prefix)
            total += size * (ceil(inner / EXPERT_TILE) * EXPERT_TILE / inner - 1)
    return total


@lru_cache(maxsize=4096)
def _compute_rocm_padding(
    model: Model, layer: DecoderLayer, layout: ParallelLayout, prefix: str
) -> float:
    """Compute what rows take that are padded on ROCm, and the blocks that the copies leave.

    Rows of a multiple of 512 bytes get 256 more, in a copy. That of the experts' outer matrix lands
    in the block that the inner one left, which so stays whole; of FP8 matrices a share is left over,
    unless their channels are scaled
    (vLLM 0.19.1 fused_moe/unquantized_fused_moe_method.py:194, quantization/utils/fp8_utils.py:1408).
    """
    inner = outer = inner_padding = outer_padding = packed = 0.0
    for weight in layer.weights:
        rows, cols, copies = compute_shard_shape(weight, layout)
        size = compute_weight_bytes(model, weight, layout, prefix)
        scheme = model.quantization.get_weight_format(weight, prefix)
        is_padded = 2 * cols % (2 * ROCM_ROW_PADDING) == 0
        padding = rows * copies * ROCM_ROW_PADDING * is_padded
        if weight.part != "routed_experts":
            if scheme is not None and scheme.activation == "fp8" and scheme.group[0] != 1:
                packed += size
        elif scheme is None and weight.shard == "row":
            outer, outer_padding = outer + size, outer_padding + padding
        elif scheme is None:
            inner, inner_padding = inner + size, inner_padding + padding
    kept = max(inner - outer, outer_padding) if outer_padding else 0.0
    return ROCM_FP8_LEFTOVER * packed + inner_padding + kept


def compute_bytes_per_parameter(deployment: Deployment) -> float:
    """Compute the bytes per model parameter on all GPUs of a replica.

    Scales and unquantized layers are included.
    """
    layout = deployment.layout
    ranks = layout.tp * layout.dp
    return sum(compute_stage_bytes(deployment)) * ranks / deployment.model.architecture.params_total


@lru_cache(maxsize=4096)
def _sum_stage_bytes(model: Model, layout: ParallelLayout, lean: bool) -> tuple[int, ...]:
    """Sum weight bytes per stage; `lean`: one rotary table, and towers on the first stage only."""
    architecture, last = model.architecture, layout.pp - 1
    towers = sum(
        compute_weight_bytes(model, weight, layout) for weight in architecture.vision_towers
    )
    stages = list(_sum_over_stages(model, layout, _compute_layer_bytes))
    for weight in architecture.embedding_and_head:
        is_embedding, everywhere = weight.part == "embedding", weight.part == "engine"
        divisor = weight.copies if lean and weight.name == "mrope_once" else 1
        size = compute_weight_bytes(model, weight, layout) / divisor
        for stage in range(layout.pp):
            at_end = stage == last and (not is_embedding or architecture.tied)
            stages[stage] += size if everywhere or (stage == 0 and is_embedding) or at_end else 0
    return tuple(
        round(size + (towers if stage == 0 or not lean else 0)) for stage, size in enumerate(stages)
    )


@lru_cache(maxsize=4096)
def _compute_layer_bytes(
    model: Model, layer: DecoderLayer, layout: ParallelLayout, prefix: str
) -> float:
    return sum(compute_weight_bytes(model, weight, layout, prefix) for weight in layer.weights)


@lru_cache(maxsize=256)
def compute_draft_bytes(
    model: Model, speculation: SpeculationConfig, layout: ParallelLayout
) -> int:
    """Compute the bytes per GPU that speculation adds to the last stage, without shared weights.

    MTP layers use the target's embedding and head; EAGLE heads its embedding, and its head unless
    they have a smaller vocabulary (vLLM 0.33.0 v1/spec_decode/llm_base_proposer.py).
    """
    if (draft := resolve_draft_model(model, speculation)) is None:
        return 0
    method, draft_layout = get_draft_method(speculation.method), ParallelLayout(tp=layout.tp)
    if method.draft == "mtp":
        layers = enumerate(
            model.architecture.mtp_layers or draft.architecture.layers,
            len(model.architecture.layers),
        )
        return round(
            sum(
                _compute_layer_bytes(model, layer, layout, f"mtp.layers.{index}.")
                for index, layer in layers
            )
        )
    shared_parts: tuple[str, ...] = ()
    if method.draft != "model":
        shared_parts = ("embedding",) if method.head_vocab else ("embedding", "lm_head")
    shared_bytes = sum(
        compute_weight_bytes(draft, weight, draft_layout)
        for weight in draft.architecture.embedding_and_head
        if weight.part in shared_parts
        # equal rotary tables are created once
        or (weight.part == "engine" and weight in model.architecture.embedding_and_head)
    )
    return _sum_stage_bytes(draft, draft_layout, True)[0] - round(shared_bytes)
