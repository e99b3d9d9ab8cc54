"""How a model is cut over GPUs: which layouts an engine accepts, what they say to each other, how a pipeline idles."""

from itertools import product
from math import ceil

from planner.engines.deployment import ParallelLayout
from planner.engines.engine import Engine
from planner.hardware.gpus import Gpu
from planner.models.registry import Model

FP8_BLOCK_SIZE = 128
MAX_PIPELINE_STAGES = 8
"""Stages of a pipeline at most: nobody runs a longer one, as its bubbles and its latency grow with each."""


def explain_illegal_layout(
    model: Model, layout: ParallelLayout, gpus_per_node: int, engine: Engine | None = None
) -> str | None:
    """Why `engine` would not start `model` in this layout, in the sense of vLLM's own message; None if it would."""
    architecture, tp = model.architecture, layout.tp
    heads, kv_heads = architecture.num_query_heads, architecture.num_kv_heads
    if (
        engine is not None
        and engine.name == "tgi"
        and max(layout.pp, layout.dp, layout.ep, layout.dcp) > 1
    ):
        return "tgi splits a model by tensor parallelism alone"
    if heads % tp:
        return (
            f"total number of attention heads ({heads}) must be divisible by tensor parallel size"
            f" ({tp})"
        )
    if not architecture.is_mla and kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} KV heads neither divide nor are divided by tensor parallel size {tp}"
    if layout.pp > len(architecture.layers):
        return f"pipeline parallel size {layout.pp} exceeds the {len(architecture.layers)} layers"
    if tp > gpus_per_node:
        return (
            f"tensor parallel size {tp} would cross a node boundary ({gpus_per_node} GPUs a node)"
        )
    if layout.dcp > 1:
        if tp % layout.dcp:
            return (
                f"tensor parallel size {tp} must be divisible by decode context parallel size"
                f" {layout.dcp}"
            )
        if not architecture.is_mla and layout.dcp > max(tp // kv_heads, 1):
            return (
                f"decode context parallel size {layout.dcp} must be at most tp / KV heads ="
                f" {tp // kv_heads}"
            )
    if layout.ep > 1:
        if not architecture.is_moe:
            return "expert parallelism needs a mixture-of-experts model"
        if layout.ep not in (tp, tp * layout.dp):
            return f"expert parallel size is tp x dp = {tp * layout.dp}, not {layout.ep}"
    if model.quantization.method == "fp8_block":
        for what, width, cut in _collect_fp8_block_widths(
            model, layout, engine is None or engine.facts.fp8_block_experts_whole
        ):
            if width % cut or (width // cut) % FP8_BLOCK_SIZE:
                return (
                    f"the output size of {what} / {cut} GPUs = {width / cut:g} is not divisible by "
                    f"weight quantization block_n = {FP8_BLOCK_SIZE}"
                )
    return None


def _collect_fp8_block_widths(
    model: Model, layout: ParallelLayout, experts: bool
) -> dict[tuple[str, int, int], None]:
    """Sizes that tensor parallelism cuts and that must stay whole 128-blocks: (name, size, cut over)."""
    fp8_block_widths: dict[tuple[str, int, int], None] = {}
    for layer in model.architecture.distinct_layers:
        for weight in layer.weights:
            if (
                experts
                and weight.part == "routed_experts"
                and weight.shard == "column"
                and layout.ep == 1
            ):
                fp8_block_widths["the experts' gate and up", weight.rows, layout.tp * layout.dp] = (
                    None
                )
            elif weight.part in ("dense_mlp", "shared_experts") and weight.shard == "column":
                fp8_block_widths["gate and up", weight.rows, layout.tp] = None
    return fp8_block_widths


def list_legal_layouts(
    model: Model,
    gpu: Gpu,
    max_gpus: int,
    gpus_per_node: int | None = None,
    engine: Engine | None = None,
) -> list[ParallelLayout]:
    """Every layout of ONE replica on at most `max_gpus`: TP inside a node (powers of two), PP, for MoE EP and DP too.

    A pipeline has at most `STAGES` stages, and where it takes several nodes each holds as many of
    them. With attention data parallelism (DP) every rank has its own requests and KV cache, and
    experts are spread over all. Decode context parallelism (DCP) is not tried: with its messages
    for free it changed no bill, of the shipped scenarios and of 60 random ones (2026-11).
    """
    node, moe, rows = gpus_per_node or gpu.gpus_per_node, model.architecture.is_moe, []
    shared = moe and (engine is None or engine.facts.data_parallel_attention)
    for tp in _list_powers_of_two(min(node, max_gpus)):
        sizes = product(
            range(1, min(max_gpus // tp, MAX_PIPELINE_STAGES) + 1),
            (1, tp) if moe and tp > 1 else (1,),
        )
        rows += [
            ParallelLayout(tp=tp, pp=pp, ep=ep) for pp, ep in sizes if not pp % ceil(tp * pp / node)
        ]
        ranks = _list_powers_of_two(max_gpus // tp)[1:] if shared else []
        rows += [ParallelLayout(tp=tp, dp=dp, ep=tp * dp) for dp in ranks]
    return [
        layout for layout in rows if explain_illegal_layout(model, layout, node, engine) is None
    ]


def _list_powers_of_two(most: int) -> list[int]:
    """The powers of two up to `most`."""
    return [2**power for power in range(max(most, 1).bit_length())]
