"""Collectives between the ranks of a layout, and their time."""

from dataclasses import dataclass
from math import ceil

import numpy as np

from planner.engines.coefficients import StepCoefficients
from planner.engines.deployment import Deployment

EXPERT_EXCHANGE = "expert dispatch and combine"
"""Name of the collectives that take tokens to the ranks of their experts and back."""
RING_LATENCY_PER_RANK_S = 3.2e-6
"""Latency per rank of a small NCCL all-gather or reduce-scatter: 7 to 25 us from 2 to 8 ranks, or
5.0 ms per step of Kimi K2 at DCP8 (vLLM on 8 B200, ai-dynamo/aisimulate pull 240, 2026)."""
GATHER_EXCHANGE_CALLS = 4
"""Collectives of an exchange: hidden states, weights and ids of the experts are gathered, results
reduced. With as many tokens on each rank each is one call, otherwise one per rank (vLLM
pynccl.py, all_gatherv and reduce_scatterv: grouped broadcasts and reductions)."""
RING_LATENCY_RANKS = 8.0
"""Ranks that double the latency of a collective: small NCCL all-gathers take 6, 8 and 12 us on 2, 4
and 8 H100, 9, 12 and 18 us on B200 (AIConfigurator's communication tables)."""
EXPERT_EXCHANGE_LATENCY_FACTOR = 15.0
"""Latency of sending tokens to their experts and back, as a multiple of a small all-reduce.

It is spent on permuting, quantizing, signalling every peer and waiting for the slowest. Fitted on
decode pools of 8 to 32 GB200 (InferenceX; 10 and 20 fit about as well).
"""
PCIE_LATENCY_FACTOR = 3.0
"""Small all-reduces take 7-27 us through host bridges, 3-6 us over NVLink.

AIConfigurator, L40S and RTX PRO 6000.
"""
PCIE_CONTENTION_FRACTION = {2: 0.75, 4: 0.6, 8: 0.5}
"""Fraction of a PCIe link per number of GPUs that reduce at once.

AIConfigurator, RTX PRO 6000 over PCIe 5.
"""


@dataclass(frozen=True)
class CollectiveCost:
    """A kind of collective in a step: number, bytes per GPU and collective, seconds in total."""

    name: str
    count: int
    bytes: np.ndarray
    seconds: np.ndarray
    grouped_calls: int = 0  # that the host issues where ranks have different numbers of tokens


def estimate_allreduce_s(size: np.ndarray, gpus: int, link: float, latency: float) -> np.ndarray:
    """Estimate an all-reduce of `size` bytes: latency plus a ring's size x 2 (n - 1) / n / link.

    The latency of one- and two-shot kernels hardly grows from 2 to 8 GPUs (AIConfigurator's
    communication tables, H100 and B200: 2.7, 3.2, 3.6 us and 4.7, 5.2, 5.8 us), and serving
    benchmarks show no growth at all.

    >>> seconds = estimate_allreduce_s(np.array(8e6), gpus=4, link=400e9, latency=5e-6)
    >>> round(float(seconds) * 1e6, 3)  # 5 us, and 12 MB of each GPU at 400 GB/s
    35.0
    """
    return latency + size * (2 * (gpus - 1) / gpus) / link


def estimate_collectives(
    deployment: Deployment, tokens: np.ndarray, c: StepCoefficients
) -> tuple[CollectiveCost, ...]:
    """Estimate the collectives of one step of `tokens` tokens on one replica."""
    architecture, layout, gpu = deployment.model.architecture, deployment.layout, deployment.gpu
    size = np.asarray(tokens, float) * architecture.hidden * 2  # bf16 activations
    nvlink = deployment.link_bandwidth >= 1.5 * gpu.pcie_bandwidth
    contention = PCIE_CONTENTION_FRACTION.get(min(layout.tp * layout.dp, 8), 0.35)
    inside = deployment.link_bandwidth * c.link * (1 if nvlink else contention)
    outside = gpu.internode_bandwidth * c.link
    latency = c.allreduce_s * (1 if nvlink else PCIE_LATENCY_FACTOR)
    rows = []
    if layout.tp > 1:
        link = inside if layout.tp <= deployment.gpus_per_node else outside
        layers = architecture.distinct_layers.items()
        count = sum(
            times * ((layer.mixer is not None) + (layer.mlp is not None)) for layer, times in layers
        )
        # over all heads, across ranks (MiniMax-M2)
        norms = sum(
            times * any(w.part == "norm" and w.num_shard_units > 1 for w in layer.weights)
            for layer, times in layers
        )
        if norms:
            small = np.asarray(tokens, float) * 8
            seconds = norms * estimate_allreduce_s(small, layout.tp, link, latency)
            rows.append(CollectiveCost("query-key norm all-reduce", norms, small, seconds))
        seconds = count * estimate_allreduce_s(size, layout.tp, link, latency)
        rows.append(CollectiveCost("TP all-reduce", count, size, seconds))
    if layout.dcp > 1:
        sequences = np.minimum(tokens, deployment.args.max_num_seqs)
        rows.append(_estimate_dcp_collective(deployment, sequences, inside))
    if layout.dp > 1 and architecture.is_moe:
        link = inside if layout.tp * layout.dp <= deployment.gpus_per_node else outside
        experts = [
            layer.mlp for layer in architecture.layers if layer.mlp and layer.mlp.num_experts
        ]
        # gather the tokens of all ranks, reduce their results; vLLM's default with EP, too
        gathers = deployment.engine.facts.gathers_expert_tokens
        calls = GATHER_EXCHANGE_CALLS if gathers else 2
        sent, wait = float(layout.dp), calls * latency * (1 + layout.dp / RING_LATENCY_RANKS)
        if layout.ep > 1 and not gathers:
            # send a token only to the ranks of its experts: in FP8, and back in bf16
            num_active = max(mlp.num_active_experts for mlp in experts)
            num_ranks = layout.dp * (1 - (1 - 1 / layout.dp) ** num_active)
            sent, wait = 0.75 * num_ranks, EXPERT_EXCHANGE_LATENCY_FACTOR * latency
        seconds = len(experts) * estimate_allreduce_s(size * sent, layout.dp, link, wait)
        grouped = len(experts) * calls * layout.dp if gathers else 0
        rows.append(CollectiveCost(EXPERT_EXCHANGE, len(experts), size * sent, seconds, grouped))
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
    """Estimate decode context parallelism: queries and log-sum-exps gathered, outputs reduced.

    Each rank attends with the queries of all `rows` to its part of the tokens (vLLM's
    cp_lse_ag_out_rs).
    """
    layout, layers, sent = deployment.layout, deployment.model.architecture.attentions, 0.0
    for mixer in layers:
        # bf16, and a log-sum-exp in FP32
        sent += mixer.heads / layout.tp * (2 * mixer.gathered_width + 4) * (layout.dcp - 1)
    latency, count = 3 * len(layers) * layout.dcp * RING_LATENCY_PER_RANK_S, 3 * len(layers)
    seconds = latency + rows * sent / link
    return CollectiveCost("DCP gather and merge", count, rows * sent / count, seconds)
