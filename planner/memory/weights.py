"""Bytes of weights as vLLM holds them: per tensor-, pipeline- and expert-parallel rank, quantized as stored.

Sharding follows vLLM 0.33.0's layers: linear.py, vocab_parallel_embedding.py, fused_moe/layer.py, distributed/utils.py.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil

from planner.core.quantities import MIB
from planner.facts.deployment import Deployment, ParallelLayout, Speculation
from planner.facts.draft_models import draft_of, method
from planner.models.architecture import Layer, Weight
from planner.models.registry import DTYPES, Model

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it splits it (vocab_parallel_embedding.py)."""
TABLES_ONCE = (0, 33, 0)
"""The first known version that keeps one multimodal rotary table for Qwen3-VL and its successors (until 0.20.2 at
least: four), and builds towers on the first pipeline stage only (models/qwen3_vl.py:1818, interfaces.py:392)."""
MXFP4_TILES = (128, 256)
"""What the inner and the hidden size of MXFP4 experts are padded to (vLLM 0.33.0 fused_moe/oracle/mxfp4.py:837)."""
LARGE, STEP = 10 * MIB, 2 * MIB
"""torch's CUDA allocator reserves tensors from `LARGE` on in multiples of `STEP` (CUDACachingAllocator.cpp)."""


def rank_shape(weight: Weight, layout: ParallelLayout) -> tuple[int, int, int]:
    """(rows, columns, copies) of `weight` on the fullest rank."""
    tp, rows, cols, copies = layout.tp, weight.rows, weight.cols, weight.copies
    if weight.part == "routed_experts":
        if layout.ep > 1:
            return rows, cols, ceil(copies / layout.ep)
        tp *= layout.dp
    if weight.shard == "column":
        rows = ceil(rows / tp)
    elif weight.shard == "row":
        cols = ceil(cols / tp)
    elif weight.shard == "kv":
        rows = rows // weight.units * max(1, weight.units // tp)
    elif weight.shard == "vocab":
        rows = ceil(rows / VOCAB_PADDING) * VOCAB_PADDING // tp
    return rows, cols, copies


def weight_bytes(model: Model, weight: Weight, layout: ParallelLayout, prefix: str = "") -> float:
    """Bytes of `weight` on the fullest rank, in the module `prefix`."""
    rows, cols, copies = rank_shape(weight, layout)
    scheme = model.quantization.scheme(weight, prefix)
    if scheme is None:
        return rows * cols * copies * (weight.bits // 8 if weight.bits else DTYPES[model.dtype])
    if scheme.method == "mxfp4" and weight.part == "routed_experts":
        tiles = MXFP4_TILES if weight.shard == "column" else reversed(MXFP4_TILES)
        rows, cols = (ceil(size / tile) * tile for size, tile in zip((rows, cols), tiles, strict=True))
    return copies * scheme.bytes(rows, cols)


def lora_bytes(
    weights: Iterable[Weight], layout: ParallelLayout, max_loras: int, max_lora_rank: int,
    targets: tuple[str, ...] = (), reserved: bool = False,
) -> int:  # fmt: skip
    """Bytes per GPU that vLLM sets aside for adapters on `weights`: an A and a B matrix of `max_lora_rank` per slot.

    Both are in 16 bit, and only the side that the weight itself splits is split (vLLM 0.33.0 lora/layers/). `targets`
    are module names such as "q_proj"; empty means every linear layer. `reserved`: as torch's allocator reserves them.
    """
    wanted = [w for w in weights if w.linear and (not targets or w.name.split(".")[-1] in targets)]
    shapes = (rank_shape(weight, layout) for weight in wanted)
    sizes = ((2 * max_loras * max_lora_rank * side, n) for rows, cols, n in shapes for side in (rows, cols))
    return sum(n * (ceil(size / STEP) * STEP if reserved and size >= LARGE else size) for size, n in sizes)


def lora_end_bytes(deployment: Deployment) -> tuple[int, int]:
    """Bytes per GPU of adapters on the embedding and on the output head, where the engine has any; not split.

    Until 0.11 every slot also has room for tokens that its adapter adds, once more in the embedding itself
    (vLLM 0.9.2 lora/layers.py, models/llama.py:332; 0.33.0 lora/layers/vocab_parallel_embedding.py).
    """
    architecture, facts, args = deployment.model.architecture, deployment.engine.facts, deployment.args
    if not args.max_loras or not any(architecture.model_type in types for types in facts["lora_ends"].values()):
        return 0, 0
    extra, hidden, tp = facts["lora_extra_vocabulary"], architecture.hidden, deployment.layout.tp
    each = 2 * args.max_loras * (args.max_lora_rank * (architecture.vocab + extra + hidden) + extra * hidden)
    added = ceil(2 * extra * hidden / tp)
    return each + args.max_loras * added, each + added


def stage_ends(layers: int, pp: int) -> tuple[int, ...]:
    """Where each pipeline stage begins, and the last one ends.

    The remainder goes one each to stages counted back from the last but one (vLLM 0.33.0 distributed/utils.py:198,
    without VLLM_PP_LAYER_PARTITION).
    """
    sizes = [layers // pp] * pp
    for extra in range(layers % pp):
        sizes[-2 - extra] += 1
    return tuple(accumulate(sizes, initial=0))


def rank_bytes(deployment: Deployment) -> tuple[int, ...]:
    """Weight bytes per GPU of every pipeline stage, with draft and adapters; the fullest stage decides what fits."""
    model, layout, args = deployment.model, deployment.layout, deployment.args
    if model.architecture.towers and not deployment.towers:
        model = replace(model, architecture=replace(model.architecture, towers=()))
    stages = list(_stages(model, layout, deployment.engine.release >= TABLES_ONCE))
    if deployment.speculation is not None:
        stages[-1] += draft_bytes(model, deployment.speculation, layout)
    if args.max_loras:
        layers, v0 = model.architecture.layers, deployment.engine.v0
        for stage, (start, end) in enumerate(pairwise(stage_ends(len(layers), layout.pp))):
            weights = [weight for layer in layers[start:end] for weight in layer.weights]
            stages[stage] += lora_bytes(weights, layout, args.max_loras, args.max_lora_rank, reserved=v0)
        first, last = lora_end_bytes(deployment)
        stages[0] += first
        stages[-1] += last
    return tuple(stages)


@lru_cache(maxsize=4096)
def _stages(model: Model, layout: ParallelLayout, lean: bool) -> tuple[int, ...]:
    """Bytes per stage; `lean` engines keep one multimodal rotary table, and towers on the first stage only."""
    architecture = model.architecture
    stages = []
    for stage, (start, end) in enumerate(pairwise(stage_ends(len(architecture.layers), layout.pp))):
        first, last = stage == 0, stage == layout.pp - 1
        total = sum(_layer_bytes(model, architecture.layers[i], layout, model.prefixes[i]) for i in range(start, end))
        for weight in architecture.ends:
            embedding, everywhere = weight.part == "embedding", weight.part == "engine"
            if everywhere or (first and embedding) or (last and (not embedding or architecture.tied)):
                spare = weight.copies if lean and weight.name == "mrope_once" else 1
                total += weight_bytes(model, weight, layout) / spare
        if first or not lean:
            total += sum(weight_bytes(model, weight, layout) for weight in architecture.towers)
        stages.append(round(total))
    return tuple(stages)


@lru_cache(maxsize=4096)
def _layer_bytes(model: Model, layer: Layer, layout: ParallelLayout, prefix: str) -> float:
    return sum(weight_bytes(model, weight, layout, prefix) for weight in layer.weights)


@lru_cache(maxsize=256)
def draft_bytes(model: Model, speculation: Speculation, layout: ParallelLayout) -> int:
    """Weight bytes per GPU that speculation adds to the last stage, without what the draft shares with the target.

    MTP layers use the target's embedding and head; EAGLE heads its embedding, and its head unless they have a smaller
    vocabulary of their own (vLLM 0.33.0 v1/spec_decode/llm_base_proposer.py).
    """
    if (draft := draft_of(model, speculation)) is None:
        return 0
    how, alone = method(speculation.method), ParallelLayout(tp=layout.tp)
    if how.draft == "mtp":
        layers = enumerate(model.architecture.mtp or draft.architecture.layers, len(model.architecture.layers))
        return round(sum(_layer_bytes(model, layer, layout, f"mtp.layers.{index}.") for index, layer in layers))
    shared = () if how.draft == "model" else ("embedding",) if how.head_vocab else ("embedding", "lm_head")
    ends = sum(weight_bytes(draft, weight, alone) for weight in draft.architecture.ends if weight.part in shared)
    return _stages(draft, alone, True)[0] - round(ends)
