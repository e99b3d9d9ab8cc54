"""Count what one engine step moves and computes on one GPU, from the shapes of the architecture.

Matrix products are grouped by number format and attention by window, so that a step is priced in a
handful of terms. There are no times here.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from planner.engines.deployment import Deployment
from planner.latency.coefficient_lookup import get_deployment_coefficients
from planner.memory.kv_cache import resolve_kv_cache_dtype
from planner.memory.weights import compute_weight_bytes
from planner.models.architecture import DecoderLayer, WeightTensor
from planner.models.mixers import AttentionWork, get_kv_element_bytes
from planner.models.registry import Model
from planner.parallelism.sharding import compute_shard_shape

MIN_MMA_ROWS = {"hopper": 64}
"""Fewest query rows of a matrix instruction, by GPU architecture.

A decoding GQA group is padded to them (wgmma: 64).
"""


@dataclass(frozen=True)
class MatmulWork:
    """All linears of a step with one number format: weight bytes, FLOP per token, on one GPU."""

    dtype: str  # the matrix units' format: bf16, fp8, fp4, int8
    bytes: float
    flops: float
    bits: float = 16.0  # per stored weight
    kernels: int = 1


@dataclass(frozen=True)
class ExpertWork:
    """Routed experts of all layers with one number format and shape, on one GPU."""

    dtype: str  # of the matrix units
    # of weights and activations together, as in `catalogs/calibration/experts.yaml`
    format: str
    layers: int
    held: int  # experts of a layer on this GPU
    total: int
    active: int  # per token
    ranks: int  # among which the experts are distributed (1: each is cut over all GPUs)
    bytes: float  # of one expert
    flops: float  # of one row in one expert
    row_bytes: float  # activations that one row moves: in, between and out, in 16 bit


@dataclass(frozen=True)
class StepWork:
    """Work of a step per token, row and context token.

    It is that of one GPU of every pipeline stage in turn.
    """

    matmuls: tuple[MatmulWork, ...]
    experts: tuple[ExpertWork, ...]
    head: MatmulWork
    vocab: float
    contexts: tuple[AttentionWork, ...]
    state_bytes: float  # read and written per sequence and step
    kernels: int  # launched one after the other, all layers
    # launched if graphs leave attention out: each layer's cache write, attention and next piece
    pieces: int
    token_bytes: float  # of activations that kernels pass on per token, all layers


def _count_matmul(
    model: Model, weight: WeightTensor, deployment: Deployment, prefix: str = ""
) -> tuple[str, float, float, float]:
    """Return format of the matrix units, bytes, FLOP per token, and bits, on one GPU.

    A format that the GPU lacks is computed in 16 bits.
    """
    peaks, scheme = deployment.gpu.peak_flops, model.quantization.get_weight_format(weight, prefix)
    wide = "bf16" if "bf16" in peaks else "fp16"
    rows, cols, copies = compute_shard_shape(weight, deployment.layout)
    wanted = "" if scheme is None else scheme.activation
    # vLLM has MXFP4 kernels for compute capability 10 alone, and widens on newer ones (Marlin;
    # issues 30135, 2025-12: RTX PRO 6000; 41477, 2026-05: GB10)
    widens_from = deployment.engine.facts.mxfp4_widened_from
    widened = 0 < widens_from <= (deployment.gpu.compute_capability or 0)
    if scheme is not None and scheme.method == "mxfp4" and "fp4" in peaks and not widened:
        wanted = "fp8"  # FlashInfer's MXFP4 x MXFP8 kernels
    dtype = wanted if wanted in peaks else wide
    bits = 16.0 if scheme is None else scheme.bits
    return (
        dtype,
        compute_weight_bytes(model, weight, deployment.layout, prefix),
        2.0 * rows * cols * copies,
        bits,
    )


def _count_matmuls(deployment: Deployment) -> tuple[MatmulWork, ...]:
    """Count all linears of the layers except the routed experts', by format."""
    totals: dict[tuple[str, float], list[float]] = {}  # bytes, FLOP per token, kernels
    for (layer, prefix), times in deployment.model.distinct_layers.items():
        for weight in layer.weights:
            if weight.linear and weight.part != "routed_experts":
                dtype, size, flops, bits = _count_matmul(
                    deployment.model, weight, deployment, prefix
                )
                total = totals.setdefault((dtype, bits), [0.0, 0.0, 0])
                total[0] += size * times
                total[1] += flops * times
                # each row-parallel linear comes with a fused column-parallel one
                total[2] += 2 * times * (weight.shard == "row")
    return tuple(
        MatmulWork(dtype, size, flops, bits, int(kernels))
        for (dtype, bits), (size, flops, kernels) in totals.items()
    )


def _count_experts(deployment: Deployment) -> tuple[ExpertWork, ...]:
    """Count the routed experts of all layers, by format and shape."""
    model, layout = deployment.model, deployment.layout
    layers: dict[ExpertWork, int] = {}
    for (layer, prefix), times in model.distinct_layers.items():
        weights = [
            weight for weight in layer.weights if weight.linear and weight.part == "routed_experts"
        ]
        if not weights or not layer.mlp:
            continue
        dtype, _, _, bits = _count_matmul(model, weights[0], deployment, prefix)
        scheme = model.quantization.get_weight_format(weights[0], prefix)
        shapes = [compute_shard_shape(weight, layout) for weight in weights]
        held = shapes[0][2]
        inner = sum(
            rows
            for (rows, _, _), weight in zip(shapes, weights, strict=True)
            if weight.shard == "column"
        )
        expert_work = ExpertWork(
            dtype=dtype,
            format=_get_expert_format(dtype, bits, scheme.method if scheme else ""),
            layers=1,
            held=held,
            total=layer.mlp.num_experts,
            active=layer.mlp.num_active_experts,
            ranks=layout.ep,
            bytes=sum(compute_weight_bytes(model, weight, layout, prefix) for weight in weights)
            / held,
            flops=2.0 * sum(rows * cols for rows, cols, _ in shapes),
            row_bytes=2.0 * (2 * model.architecture.hidden + 1.5 * inner),
        )
        layers[expert_work] = layers.get(expert_work, 0) + times
    return tuple(replace(work, layers=count) for work, count in layers.items())


def _get_expert_format(dtype: str, bits: float, method: str) -> str:
    """Return the format of a fused-experts kernel.

    It is the matrix units' format if weights have it too, else that of the weights.
    """
    if bits > 8:
        return "bf16"
    if bits == 8 and dtype in ("bf16", "fp16"):
        return "int4"  # narrow weights, widened
    if bits == 8:
        return "fp8_block" if method == "fp8_block" else "fp8"
    if dtype == "fp4":
        return "nvfp4"
    return ("mxfp4_fp8" if dtype == "fp8" else "mxfp4") if method == "mxfp4" else "int4"


def resolve_planned_kv_dtype(deployment: Deployment) -> str:
    """Return the dtype of the KV cache.

    It is the requested one; for "auto" what the checkpoint declares, else the model's dtype.
    Without a request, it is the dtype of the recipes behind the calibration, so that a prediction
    means what was measured: NVIDIA's NVFP4 checkpoints declare an FP8 cache, which vLLM uses. All
    recipes with an FP8 cache are of quantized weights; others have what the memory plan has.
    """
    main = deployment.model.quantization.main_format
    if deployment.args.kv_cache_dtype is not None or main is None:
        return resolve_kv_cache_dtype(deployment)
    if main.method == "nvfp4":
        return "fp8"
    return get_deployment_coefficients(deployment).kv_cache_dtype


def _count_attention(deployment: Deployment) -> tuple[AttentionWork, ...]:
    """Sum what attention reads and multiplies per context token, by kind and window."""
    layout, width = deployment.layout, get_kv_element_bytes(resolve_planned_kv_dtype(deployment))
    rows = MIN_MMA_ROWS.get(deployment.gpu.architecture, 16)
    totals: dict[tuple[str, int | None], np.ndarray] = {}
    for layer, times in deployment.model.architecture.distinct_layers.items():
        for mixer in layer.attentions:
            for work in mixer.count_attention(layout.tp, layout.dcp, width, rows):
                kind, window, *costs = vars(work).values()
                total = totals.setdefault((kind, window), np.zeros(4))
                total += times * np.array(costs)
    return tuple(AttentionWork(kind, window, *costs) for (kind, window), costs in totals.items())


def _count_kernels(model: Model, layer: DecoderLayer, prefix: str) -> int:
    """Count the kernels of a layer in vLLM's compiled graph.

    Matrix products and all-reduces are counted elsewhere.
    """
    schemes = [
        model.quantization.get_weight_format(weight, prefix)
        for weight in layer.weights
        if weight.linear
    ]
    used = [scheme for scheme in schemes if scheme is not None]
    count = sum(mixer.kernels for mixer in layer.mixers)
    if layer.mlp and layer.mlp.num_experts:  # norm, router, top-k; the rest is the fused kernel's
        count += 3 + 2 * bool(layer.mlp.shared_intermediate)
    elif layer.mlp is not None:
        count += 2
    # compilation fuses the quantization of activations into the norm or activation before, but not
    # block-wise quantization
    return count + min(sum(scheme.method == "fp8_block" for scheme in used), 4)


def _count_token_bytes(deployment: Deployment) -> float:
    """Return the bytes that the kernels of all layers pass on per token on one GPU, in 16 bits.

    Each value is written once and read once. A mixer or an MLP adds to the residual and normalises
    (two values in, two out), reads that and writes its result: 6 `hidden`, whole on every GPU.
    Between its linears the inner values are sharded like the weights. Those of routed experts are
    in `ExpertWork.row_bytes`. The chunked delta rule passes on values of its own.
    """
    architecture, total = deployment.model.architecture, 0.0
    for layer, times in architecture.distinct_layers.items():
        blocks = len(layer.mixers) + (layer.mlp is not None)
        delta_passes = sum(mixer.delta_passes for mixer in layer.mixers)
        inner = 0
        for weight in layer.weights:
            if weight.linear and weight.part != "routed_experts":
                rows, cols, copies = compute_shard_shape(weight, deployment.layout)
                inner += copies * (cols if weight.shard == "row" else rows)
                if weight.shard == "row" and weight.part == "linear_ssm":
                    inner += delta_passes * copies * cols
        total += times * (6 * architecture.hidden * blocks + 2 * inner)
    return 2.0 * total


def count_step_work(deployment: Deployment) -> StepWork:
    """Count what a step of `deployment` has to do; pure arithmetic on the architecture's shapes."""
    return _count_step_work_cached(
        deployment.with_args(max_num_seqs=1, max_num_batched_tokens=1, gpu_memory_utilization=1.0)
    )


@lru_cache(maxsize=4096)
def _count_step_work_cached(deployment: Deployment) -> StepWork:
    """Count the work of a step for normalised batch limits, on which it does not depend."""
    model, tp = deployment.model, deployment.layout.tp
    architecture = model.architecture
    head = next(
        w
        for part in ("lm_head", "embedding")
        for w in architecture.embedding_and_head
        if w.part == part
    )
    return StepWork(
        matmuls=_count_matmuls(deployment),
        experts=_count_experts(deployment),
        head=MatmulWork(*_count_matmul(model, head, deployment)),
        vocab=architecture.vocab,
        contexts=_count_attention(deployment),
        state_bytes=2.0 * sum(mixer.compute_state_bytes(tp) for mixer in architecture.mixers),
        kernels=sum(
            times * _count_kernels(model, layer, prefix)
            for (layer, prefix), times in model.distinct_layers.items()
        ),
        pieces=3 * len(architecture.mixers),
        token_bytes=_count_token_bytes(deployment),
    )
