"""How a model is cut over GPUs: which layouts an engine accepts, what they say to each other, how a pipeline idles."""

from dataclasses import dataclass
from itertools import product
from math import ceil

import numpy as np

from planner.facts.coefficients import Coefficients
from planner.facts.deployment import Deployment, ParallelLayout
from planner.facts.engines import Engine
from planner.facts.gpus import Gpu
from planner.models.architecture import Attention, Experts, LatentAttention, Layer
from planner.models.registry import Model

FP8_BLOCK = 128
STAGES = 8
"""Stages of a pipeline at most: nobody runs a longer one, as its bubbles and its latency grow with each."""


@dataclass(frozen=True)
class Collective:
    """One kind of message in a step: how often, how many bytes one GPU contributes each time, seconds altogether."""

    name: str
    count: int
    bytes: np.ndarray
    seconds: np.ndarray


def refuse(model: Model, layout: ParallelLayout, gpus_per_node: int, engine: Engine | None = None) -> str | None:
    """Why `engine` would not start `model` in this layout, in the sense of vLLM's own message; None if it would."""
    architecture, tp = model.architecture, layout.tp
    heads, kv_heads = architecture.heads, architecture.kv_heads
    if engine is not None and engine.name == "tgi" and max(layout.pp, layout.dp, layout.ep, layout.dcp) > 1:
        return "tgi splits a model by tensor parallelism alone"
    if heads % tp:
        return f"total number of attention heads ({heads}) must be divisible by tensor parallel size ({tp})"
    if not architecture.is_mla and kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} KV heads neither divide nor are divided by tensor parallel size {tp}"
    if layout.pp > len(architecture.layers):
        return f"pipeline parallel size {layout.pp} exceeds the {len(architecture.layers)} layers"
    if tp > gpus_per_node:
        return f"tensor parallel size {tp} would cross a node boundary ({gpus_per_node} GPUs a node)"
    if layout.dcp > 1:
        if tp % layout.dcp:
            return f"tensor parallel size {tp} must be divisible by decode context parallel size {layout.dcp}"
        if not architecture.is_mla and layout.dcp > max(tp // kv_heads, 1):
            return f"decode context parallel size {layout.dcp} must be at most tp / KV heads = {tp // kv_heads}"
    if layout.ep > 1:
        if not architecture.is_moe:
            return "expert parallelism needs a mixture-of-experts model"
        if layout.ep not in (tp, tp * layout.dp):
            return f"expert parallel size is tp x dp = {tp * layout.dp}, not {layout.ep}"
    if model.quantization.method == "fp8_block":
        for what, width, cut in _block_widths(model, layout, engine is None or engine.facts["fp8_block_experts_whole"]):
            if width % cut or (width // cut) % FP8_BLOCK:
                return (
                    f"the output size of {what} / {cut} GPUs = {width / cut:g} is not divisible by "
                    f"weight quantization block_n = {FP8_BLOCK}"
                )
    return None


def _block_widths(model: Model, layout: ParallelLayout, experts: bool) -> dict[tuple[str, int, int], None]:
    """Sizes that tensor parallelism cuts and that must stay whole 128-blocks: (name, size, cut over)."""
    found: dict[tuple[str, int, int], None] = {}
    for layer in model.architecture.distinct_layers:
        for weight in layer.weights:
            if experts and weight.part == "routed_experts" and weight.shard == "column" and layout.ep == 1:
                found["the experts' gate and up", weight.rows, layout.tp * layout.dp] = None
            elif weight.part in ("dense_mlp", "shared_experts") and weight.shard == "column":
                found["gate and up", weight.rows, layout.tp] = None
    return found


def legal_layouts(
    model: Model, gpu: Gpu, max_gpus: int, gpus_per_node: int | None = None, engine: Engine | None = None
) -> list[ParallelLayout]:
    """Every layout of ONE replica on at most `max_gpus`: TP inside a node (powers of two), PP, for MoE EP and DP too.

    A pipeline has at most `STAGES` stages, and where it takes several nodes each holds as many of them.
    With attention data parallelism (DP) every rank has its own requests and KV cache, and experts are spread over all.
    Decode context parallelism (DCP) is not tried: with its messages for free it changed no bill, of the shipped
    scenarios and of 60 random ones (2026-11).
    """
    node, moe, found = gpus_per_node or gpu.gpus_per_node, model.architecture.is_moe, []
    shared = moe and (engine is None or engine.facts["data_parallel_attention"])
    for tp in _powers(min(node, max_gpus)):
        sizes = product(range(1, min(max_gpus // tp, STAGES) + 1), (1, tp) if moe and tp > 1 else (1,))
        found += [ParallelLayout(tp=tp, pp=pp, ep=ep) for pp, ep in sizes if not pp % ceil(tp * pp / node)]
        ranks = _powers(max_gpus // tp)[1:] if shared else []
        found += [ParallelLayout(tp=tp, dp=dp, ep=tp * dp) for dp in ranks]
    return [layout for layout in found if refuse(model, layout, node, engine) is None]


def _powers(most: int) -> list[int]:
    """The powers of two up to `most`."""
    return [2**power for power in range(max(most, 1).bit_length())]


def _normalizes_across_heads(layer: Layer) -> bool:
    """Queries and keys are normalised over all heads at once (MiniMax-M2), so ranks must add up their squares."""
    return isinstance(layer.mixer, Attention) and any(
        weight.name.endswith("q_norm") and weight.rows > layer.mixer.head_dim for weight in layer.weights
    )


def allreduce_seconds(size: np.ndarray, gpus: int, link: float, latency: float) -> np.ndarray:
    """One all-reduce of `size` bytes: one latency, plus a ring's 2 (n - 1) / n over the link.

    One- and two-shot kernels hardly slow down from 2 to 8 GPUs (AIConfigurator's communication tables, H100 and B200:
    2.7, 3.2, 3.6 us and 4.7, 5.2, 5.8 us), and serving points show no growth at all.
    """
    return latency + size * (2 * (gpus - 1) / gpus) / link


def collectives(deployment: Deployment, tokens: np.ndarray, c: Coefficients) -> tuple[Collective, ...]:
    """The messages of one step of `tokens` tokens on one replica, with the bytes that each GPU contributes."""
    architecture, layout, gpu = deployment.model.architecture, deployment.layout, deployment.gpu
    size = np.asarray(tokens, float) * architecture.hidden * 2  # bf16 activations
    nvlink = deployment.link_bandwidth >= 1.5 * gpu.pcie_bandwidth
    inside = deployment.link_bandwidth * c.link * (1 if nvlink else PCIE_SHARE.get(min(layout.tp * layout.dp, 8), 0.35))
    outside = gpu.internode_bandwidth * c.link
    latency = c.allreduce_s * (1 if nvlink else PCIE_LATENCY)
    found = []
    if layout.tp > 1:
        link = inside if layout.tp <= deployment.gpus_per_node else outside
        layers = architecture.distinct_layers.items()
        count = sum(times * ((layer.mixer is not None) + (layer.mlp is not None)) for layer, times in layers)
        norms = sum(times * _normalizes_across_heads(layer) for layer, times in layers)
        if norms:
            small = np.asarray(tokens, float) * 8
            seconds = norms * allreduce_seconds(small, layout.tp, link, latency)
            found.append(Collective("query-key norm all-reduce", norms, small, seconds))
        seconds = count * allreduce_seconds(size, layout.tp, link, latency)
        found.append(Collective("TP all-reduce", count, size, seconds))
    if layout.dcp > 1:
        found.append(_merged_attention(deployment, np.minimum(tokens, deployment.args.max_num_seqs), inside))
    if layout.dp > 1 and architecture.is_moe:
        link = inside if layout.tp * layout.dp <= deployment.gpus_per_node else outside
        experts = [layer.mlp for layer in architecture.layers if isinstance(layer.mlp, Experts)]
        sent, wait = float(layout.dp), 2 * latency  # gather everybody's tokens, reduce everybody's results
        if layout.ep > 1 and deployment.engine.name != "vllm":  # vLLM's default is that too; the others send a token
            reached = layout.dp * (1 - (1 - 1 / layout.dp) ** max(mlp.active for mlp in experts))
            sent, wait = 0.75 * reached, EXCHANGE * latency  # to the ranks of its experts only: FP8 there, bf16 back
        seconds = len(experts) * allreduce_seconds(size * sent, layout.dp, link, wait)
        found.append(Collective("expert dispatch and combine", len(experts), size * sent, seconds))
    if layout.pp > 1:
        across = min(ceil(layout.tp * layout.pp / deployment.gpus_per_node) - 1, layout.pp - 1)
        sends = 2 * size  # hidden states and residual
        seconds = (layout.pp - 1) * latency + sends * (across / outside + (layout.pp - 1 - across) / inside)
        found.append(Collective("PP send", layout.pp - 1, sends, seconds))
    return tuple(found)


def _merged_attention(deployment: Deployment, rows: np.ndarray, link: float) -> Collective:
    """Decode context parallelism: a layer gathers the queries of `rows` and their log-sum-exps, and adds up outputs.

    Every rank of the group attends with all its queries to its share of the tokens (vLLM's cp_lse_ag_out_rs).
    """
    layout, layers, sent = deployment.layout, deployment.model.architecture.attentions, 0.0
    for mixer in layers:
        if isinstance(mixer, LatentAttention):
            wide = mixer.kv_elements + mixer.kv_lora_rank
        else:
            wide = mixer.head_dim + mixer.v_head_dim
        sent += mixer.heads / layout.tp * (2 * wide + 4) * (layout.dcp - 1)  # bf16, and a log-sum-exp in fp32
    waits, count = 3 * len(layers) * layout.dcp * RING_S, 3 * len(layers)
    return Collective("DCP gather and merge", count, rows * sent / count, waits + rows * sent / link)


RING_S = 3.2e-6
"""A small all-gather or reduce-scatter of NCCL takes so long per rank: 7 to 25 us from 2 to 8 ranks, and all of them
5.0 ms a step of Kimi K2 at DCP8 (vLLM on 8 B200, ai-dynamo/aisimulate pull 240, 2026)."""
EXCHANGE = 15.0
"""Latency of sending tokens to their experts and back, in small all-reduces: permuting, quantizing, signalling every
peer, waiting for the slowest. Fitted on decode pools of 8 to 32 GB200 (InferenceX; 10 and 20 fit about as well)."""
PCIE_LATENCY = 3.0
"""Small all-reduces through host bridges take 7-27 us, over NVLink 3-6 us (AIConfigurator, L40S and RTX PRO 6000)."""
PCIE_SHARE = {2: 0.75, 4: 0.6, 8: 0.5}
"""What is left of a PCIe link when this many GPUs reduce at once (AIConfigurator, RTX PRO 6000 over PCIe 5)."""


def pipeline_bubble(pp: int, microbatches: int) -> float:
    """Idle share of a pipeline of `pp` stages fed `microbatches` at a time: (pp - 1) / (pp - 1 + m), GPipe (2019)."""
    return (pp - 1) / (pp - 1 + microbatches)
