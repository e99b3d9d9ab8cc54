"""Collectives between the ranks of a layout, and their time."""

from dataclasses import dataclass
from math import ceil

import numpy as np

from planner.engines.coefficients import StepCoefficients
from planner.engines.deployment import Deployment
from planner.models.architecture import (
    DecoderLayer,
    GroupedQueryAttention,
    LatentAttention,
    MoeBlock,
)


@dataclass(frozen=True)
class CollectiveCost:
    """One kind of message in a step: how often, how many bytes one GPU contributes each time, seconds altogether."""

    name: str
    count: int
    bytes: np.ndarray
    seconds: np.ndarray


def _has_cross_head_norm(layer: DecoderLayer) -> bool:
    """Queries and keys are normalised over all heads at once (MiniMax-M2), so ranks must add up their squares."""
    return isinstance(layer.mixer, GroupedQueryAttention) and any(
        weight.name.endswith("q_norm") and weight.rows > layer.mixer.head_dim
        for weight in layer.weights
    )


def estimate_allreduce_s(size: np.ndarray, gpus: int, link: float, latency: float) -> np.ndarray:
    """One all-reduce of `size` bytes: one latency, plus a ring's 2 (n - 1) / n over the link.

    One- and two-shot kernels hardly slow down from 2 to 8 GPUs (AIConfigurator's communication
    tables, H100 and B200: 2.7, 3.2, 3.6 us and 4.7, 5.2, 5.8 us), and serving points show no growth
    at all.
    """
    return latency + size * (2 * (gpus - 1) / gpus) / link


def estimate_collectives(
    deployment: Deployment, tokens: np.ndarray, c: StepCoefficients
) -> tuple[CollectiveCost, ...]:
    """The messages of one step of `tokens` tokens on one replica, with the bytes that each GPU contributes."""
    architecture, layout, gpu = deployment.model.architecture, deployment.layout, deployment.gpu
    size = np.asarray(tokens, float) * architecture.hidden * 2  # bf16 activations
    nvlink = deployment.link_bandwidth >= 1.5 * gpu.pcie_bandwidth
    inside = (
        deployment.link_bandwidth
        * c.link
        * (1 if nvlink else PCIE_CONTENTION_FRACTION.get(min(layout.tp * layout.dp, 8), 0.35))
    )
    outside = gpu.internode_bandwidth * c.link
    latency = c.allreduce_s * (1 if nvlink else PCIE_LATENCY_FACTOR)
    rows = []
    if layout.tp > 1:
        link = inside if layout.tp <= deployment.gpus_per_node else outside
        layers = architecture.distinct_layers.items()
        count = sum(
            times * ((layer.mixer is not None) + (layer.mlp is not None)) for layer, times in layers
        )
        norms = sum(times * _has_cross_head_norm(layer) for layer, times in layers)
        if norms:
            small = np.asarray(tokens, float) * 8
            seconds = norms * estimate_allreduce_s(small, layout.tp, link, latency)
            rows.append(CollectiveCost("query-key norm all-reduce", norms, small, seconds))
        seconds = count * estimate_allreduce_s(size, layout.tp, link, latency)
        rows.append(CollectiveCost("TP all-reduce", count, size, seconds))
    if layout.dcp > 1:
        rows.append(
            _estimate_dcp_collective(
                deployment, np.minimum(tokens, deployment.args.max_num_seqs), inside
            )
        )
    if layout.dp > 1 and architecture.is_moe:
        link = inside if layout.tp * layout.dp <= deployment.gpus_per_node else outside
        experts = [layer.mlp for layer in architecture.layers if isinstance(layer.mlp, MoeBlock)]
        sent, wait = (
            float(layout.dp),
            2 * latency,
        )  # gather everybody's tokens, reduce everybody's results
        if (
            layout.ep > 1 and deployment.engine.name != "vllm"
        ):  # vLLM's default is that too; the others send a token
            reached = layout.dp * (
                1 - (1 - 1 / layout.dp) ** max(mlp.num_active_experts for mlp in experts)
            )
            sent, wait = (
                0.75 * reached,
                EXPERT_EXCHANGE_LATENCY_FACTOR * latency,
            )  # to the ranks of its experts only: FP8 there, bf16 back
        seconds = len(experts) * estimate_allreduce_s(size * sent, layout.dp, link, wait)
        rows.append(
            CollectiveCost("expert dispatch and combine", len(experts), size * sent, seconds)
        )
    if layout.pp > 1:
        across = min(ceil(layout.tp * layout.pp / deployment.gpus_per_node) - 1, layout.pp - 1)
        sends = 2 * size  # hidden states and residual
        seconds = (layout.pp - 1) * latency + sends * (
            across / outside + (layout.pp - 1 - across) / inside
        )
        rows.append(CollectiveCost("PP send", layout.pp - 1, sends, seconds))
    return tuple(rows)


def _estimate_dcp_collective(
    deployment: Deployment, rows: np.ndarray, link: float
) -> CollectiveCost:
    """Decode context parallelism: a layer gathers the queries of `rows` and their log-sum-exps, and adds up outputs.

    Every rank of the group attends with all its queries to its share of the tokens (vLLM's
    cp_lse_ag_out_rs).
    """
    layout, layers, sent = deployment.layout, deployment.model.architecture.attentions, 0.0
    for mixer in layers:
        if isinstance(mixer, LatentAttention):
            wide = mixer.kv_elements + mixer.kv_lora_rank
        else:
            wide = mixer.head_dim + mixer.v_head_dim
        sent += (
            mixer.heads / layout.tp * (2 * wide + 4) * (layout.dcp - 1)
        )  # bf16, and a log-sum-exp in fp32
    waits, count = 3 * len(layers) * layout.dcp * RING_LATENCY_PER_RANK_S, 3 * len(layers)
    return CollectiveCost(
        "DCP gather and merge", count, rows * sent / count, waits + rows * sent / link
    )


RING_LATENCY_PER_RANK_S = 3.2e-6
"""A small all-gather or reduce-scatter of NCCL takes so long per rank: 7 to 25 us from 2 to 8 ranks, and all of them
5.0 ms a step of Kimi K2 at DCP8 (vLLM on 8 B200, ai-dynamo/aisimulate pull 240, 2026)."""
EXPERT_EXCHANGE_LATENCY_FACTOR = 15.0
"""Latency of sending tokens to their experts and back, in small all-reduces: permuting, quantizing, signalling every
peer, waiting for the slowest. Fitted on decode pools of 8 to 32 GB200 (InferenceX; 10 and 20 fit
about as well)."""
PCIE_LATENCY_FACTOR = 3.0
"""Small all-reduces through host bridges take 7-27 us, over NVLink 3-6 us (AIConfigurator, L40S and RTX PRO 6000)."""
PCIE_CONTENTION_FRACTION = {2: 0.75, 4: 0.6, 8: 0.5}
"""What is left of a PCIe link when this many GPUs reduce at once (AIConfigurator, RTX PRO 6000 over PCIe 5)."""
