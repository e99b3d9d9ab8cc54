"""Legal layouts of a model on GPUs, by the rules of each engine."""

from itertools import product
from math import ceil

from planner.engines.engine import Engine
from planner.engines.layout import ParallelLayout
from planner.hardware.gpus import Gpu
from planner.models.registry import Model

_MLP_PARTS = ("dense_mlp", "shared_experts", "routed_experts")
MAX_PIPELINE_STAGES = 8
"""Longest pipeline that is tried; bubbles and latency grow with every stage."""


def explain_illegal_layout(
    model: Model, layout: ParallelLayout, gpus_per_node: int, engine: Engine | None = None
) -> str | None:
    """Explain, much like vLLM, why the engine does not start this layout; None if it does."""
    architecture, tp, dcp = model.architecture, layout.tp, layout.dcp
    heads, kv_heads, num_layers = (
        architecture.num_query_heads, architecture.num_kv_heads, len(architecture.layers)
    )  # fmt: skip
    is_narrow = engine is not None and engine.facts.tensor_parallel_only
    is_mla = architecture.is_mla
    ranks_per_kv_head = tp // max(kv_heads, 1)
    rules = (
        (
            is_narrow and max(layout.pp, layout.dp, layout.ep, dcp) > 1,
            f"{engine and engine.name} splits a model by tensor parallelism alone",
        ),
        (
            heads % tp > 0,
            f"total number of attention heads ({heads}) must be divisible by tensor parallel size"
            f" ({tp})",
        ),
        (
            not is_mla and kv_heads % tp > 0 and tp % kv_heads > 0,
            f"{kv_heads} KV heads neither divide nor are divided by tensor parallel size {tp}",
        ),
        (
            layout.pp > num_layers,
            f"pipeline parallel size {layout.pp} exceeds the {num_layers} layers",
        ),
        (
            tp > gpus_per_node,
            f"tensor parallel size {tp} would cross a node boundary ({gpus_per_node} GPUs a node)",
        ),
        (
            tp % dcp > 0,
            f"tensor parallel size {tp} must be divisible by decode context parallel size {dcp}",
        ),
        (
            not is_mla and dcp > max(ranks_per_kv_head, 1),
            f"decode context parallel size {dcp} must be at most tp / KV heads ="
            f" {ranks_per_kv_head}",
        ),
        (
            layout.ep > 1 and not architecture.is_moe,
            "expert parallelism needs a mixture-of-experts model",
        ),
    )
    broken = (reason for is_broken, reason in rules if is_broken)
    return next(broken, None) or _explain_split_groups(model, layout, engine)


def _explain_split_groups(
    model: Model, layout: ParallelLayout, engine: Engine | None
) -> str | None:
    """Explain which matrix tensor parallelism would cut within a quantization group; None if none.

    Outputs of a column-parallel matrix have to leave whole groups of rows, inputs of a row-parallel
    one whole groups of columns (vLLM quantization/fp8.py; awq.py: "The input size is not aligned
    with the quantized weight shape"). Experts in 4 bits get smaller groups (moe_wna16.py).
    """
    experts_whole = engine is None or engine.facts.fp8_block_experts_whole
    for layer, prefix in model.distinct_layers if model.quantization.schemes else ():
        for weight in layer.weights:
            scheme = model.quantization.get_weight_format(weight, prefix)
            is_routed = weight.part == "routed_experts"
            if scheme is None or scheme.split_groups or weight.shard not in ("column", "row"):
                continue
            if is_routed and (layout.ep > 1 or scheme.bits < 8 or not experts_whole):
                continue
            is_column = weight.shard == "column"
            if is_column and weight.part not in _MLP_PARTS:
                continue  # checkpoints keep narrow ones in 16 bit, which a name alone does not say
            side, size = ("output", weight.rows) if is_column else ("input", weight.cols)
            parts, group = layout.tp * (layout.dp if is_routed else 1), scheme.group[not is_column]
            if group <= 1 or (not is_column and size % group):
                continue  # of inputs: its checkpoint has other groups than are assumed
            if size % parts or (size // parts) % group:
                return (
                    f"the {side} size of {weight.name} / {parts} GPUs = {size / parts:g} is not"
                    f" divisible by weight quantization {'block_n' if is_column else 'group'} ="
                    f" {group}"
                )
    return None


def list_legal_layouts(
    model: Model,
    gpu: Gpu,
    max_gpus: int,
    gpus_per_node: int | None = None,
    engine: Engine | None = None,
) -> list[ParallelLayout]:
    """List all legal layouts of ONE replica on up to `max_gpus`: TP, PP, and for MoE EP and DP.

    TP is a power of two inside a node. A pipeline has at most `MAX_PIPELINE_STAGES` stages, equally
    many on each of its nodes. With attention data parallelism (DP) every rank has its own requests
    and KV cache, and experts are spread over all ranks. Decode context parallelism (DCP) is not
    tried: even with free communication it changed no plan's cost, of the shipped scenarios and of
    60 random ones (2026-11).
    """
    node, moe, layouts = gpus_per_node or gpu.gpus_per_node, model.architecture.is_moe, []
    has_dp = moe and (engine is None or engine.facts.data_parallel_attention)
    for tp in list_powers_of_two(min(node, max_gpus)):
        stages = range(1, min(max_gpus // tp, MAX_PIPELINE_STAGES) + 1)
        layouts += [
            ParallelLayout(tp=tp, pp=pp, ep=ep)
            for pp, ep in product(stages, (1, tp) if moe and tp > 1 else (1,))
            if not pp % ceil(tp * pp / node)
        ]
        ranks = list_powers_of_two(max_gpus // tp)[1:] if has_dp else []
        layouts += [ParallelLayout(tp=tp, dp=dp, ep=tp * dp) for dp in ranks]
    return [layout for layout in layouts if not explain_illegal_layout(model, layout, node, engine)]


def list_powers_of_two(maximum: int) -> list[int]:
    """List the powers of two up to `maximum`."""
    return [2**power for power in range(max(maximum, 1).bit_length())]
