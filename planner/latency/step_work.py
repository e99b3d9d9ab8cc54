"""What one engine step has to move and compute on one GPU: counts from the architecture's shapes, no times.

Matrix products are gathered by number format, attention by window, so that a step is priced in a handful of terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.facts.deployment import Deployment
from planner.facts.gpus import Gpu
from planner.latency.calibration import calibration_of
from planner.memory.kv_cache import kv_width
from planner.memory.weights import rank_shape, weight_bytes
from planner.models.architecture import Attention, Experts, LatentAttention, Layer, Recurrent, Weight
from planner.models.registry import Model

MMA_ROWS = {"hopper": 64}
"""Query rows that a matrix instruction multiplies at least; a decoding GQA group is padded to them (wgmma: 64)."""
SPARSE_TOKENS = 2048
"""Tokens that DeepSeek sparse attention keeps per query (`index_topk` of DeepSeek-V3.2 and GLM-5)."""


@dataclass(frozen=True)
class Matmul:
    """All linears of a step that share a number format: bytes of weights, FLOP a token, on one GPU."""

    dtype: str  # the matrix units' format: bf16, fp8, fp4, int8
    bytes: float
    flops: float
    bits: float = 16.0  # per stored weight
    kernels: int = 1
    experts: int = 0  # of how many experts per layer (0: dense)
    active: int = 0


@dataclass(frozen=True)
class Context:
    """Attention layers that see the same span: what one context token costs a sequence on one GPU, over all layers."""

    window: int | None
    bytes: float  # KV read per context token in decode
    decode_flops: float  # per context token, with one query per sequence padded to what a matrix instruction multiplies
    query_flops: float  # per (query, context token), unpadded
    prefill_flops: float


@dataclass(frozen=True)
class Work:
    """What a step has to do, per token, row and context token, on one GPU of every pipeline stage in turn."""

    matmuls: tuple[Matmul, ...]
    head: Matmul
    vocab: float
    contexts: tuple[Context, ...]
    state_bytes: float  # read and written per sequence and step
    kernels: int  # launched one after the other, all layers
    token_bytes: float  # one pass over the activations of one token, all layers


def _matmul(model: Model, weight: Weight, deployment: Deployment, prefix: str = "") -> tuple[str, float, float, float]:
    """(format of the matrix units, bytes, FLOP per token, bits) on one GPU; a format it lacks is computed in 16 bit."""
    peaks, scheme = deployment.gpu.flops, model.quantization.scheme(weight, prefix)
    wide = "bf16" if "bf16" in peaks else "fp16"
    rows, cols, copies = rank_shape(weight, deployment.layout)
    wanted = "" if scheme is None else scheme.activation
    if scheme is not None and scheme.method == "mxfp4" and "fp4" in peaks:
        wanted = "fp8"  # FlashInfer's MXFP4 x MXFP8 kernels
    dtype = wanted if wanted in peaks else wide
    bits = 16.0 if scheme is None else scheme.bits
    return dtype, weight_bytes(model, weight, deployment.layout, prefix), 2.0 * rows * cols * copies, bits


def _matmuls(deployment: Deployment) -> tuple[Matmul, ...]:
    """Every linear of the layers, gathered by format and by dense or expert."""
    model, layout = deployment.model, deployment.layout
    found: dict[tuple[str, float, int, int], list[float]] = {}  # bytes, FLOP per token, kernels
    for (layer, prefix), times in model.distinct_layers.items():
        for weight in layer.weights:
            if not weight.linear:
                continue
            dtype, size, flops, bits = _matmul(model, weight, deployment, prefix)
            experts = active = 0
            if weight.part == "routed_experts" and isinstance(layer.mlp, Experts):
                experts, active = layer.mlp.total, layer.mlp.active
                flops *= active / experts * layout.dp  # a rank's experts see the tokens of all data-parallel ranks
            total = found.setdefault((dtype, bits, experts, active), [0.0, 0.0, 0])
            total[0] += size * times
            total[1] += flops * times
            total[2] += 2 * times * (weight.shard == "row")  # each comes with a fused column-parallel one
    return tuple(
        Matmul(dtype, size, flops, bits, int(kernels), experts, active)
        for (dtype, bits, experts, active), (size, flops, kernels) in found.items()
    )


def kv_dtype(deployment: Deployment) -> str:
    """What the KV cache is stored in: as asked, and for "auto" what the checkpoint declares, else the model's dtype.

    Where nothing is asked, it is what the recipes behind the calibration had, so that a prediction means what was
    measured: NVIDIA's NVFP4 checkpoints declare an FP8 cache, which vLLM follows.
    """
    asked = deployment.args.kv_cache_dtype
    if asked is not None:
        return (deployment.model.quantization.kv_cache_dtype or asked) if asked == "auto" else asked
    main = deployment.model.quantization.main
    if main is not None and main.method == "nvfp4":
        return "fp8"
    return calibration_of(deployment.model, deployment.gpu, deployment.engine).kv_cache_dtype


def _contexts(deployment: Deployment) -> tuple[Context, ...]:
    """What attention reads and multiplies per context token, gathered by window."""
    tp, dcp, width = deployment.layout.tp, deployment.layout.dcp, kv_width(kv_dtype(deployment))
    found: dict[int | None, np.ndarray] = {}

    def add(window: int | None, times: int, *costs: float) -> None:
        found[window] = found.get(window, np.zeros(4)) + times * np.array(costs)

    for layer, times in deployment.model.architecture.distinct_layers.items():
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                flops = 2.0 * mixer.heads / tp * (mixer.head_dim + mixer.v_head_dim)
                least = MMA_ROWS.get(deployment.gpu.architecture, 16) * max(mixer.kv_heads / tp, 1.0)
                padded = 2.0 * max(mixer.heads / tp, least) * (mixer.head_dim + mixer.v_head_dim)
                kept = max(mixer.kv_heads / tp, 1.0) * (mixer.head_dim + mixer.v_head_dim) * width
                add(mixer.window, times, kept / dcp, padded / dcp, flops / dcp, flops)
            elif isinstance(mixer, LatentAttention):
                decode = 2.0 * mixer.heads / tp * (mixer.kv_elements + mixer.kv_lora_rank)
                prefill = 2.0 * mixer.heads / tp * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
                window = SPARSE_TOKENS if mixer.index_heads else mixer.window
                add(window, times, mixer.kv_elements * width / dcp, decode / dcp, decode / dcp, prefill)
                if mixer.has_indexer_cache:  # it scores the whole context, in fp8: twice the bf16 rate
                    score = mixer.index_heads * mixer.index_dim / max(mixer.compress, 1)
                    add(None, times, mixer.index_bytes, score, score, score)
    return tuple(Context(window, *costs) for window, costs in found.items())


def _kernels(model: Model, layer: Layer, prefix: str, gpu: Gpu) -> int:
    """Kernels of one layer beside its matrix products and all-reduces, as vLLM's compiled graph leaves them."""
    schemes = [model.quantization.scheme(weight, prefix) for weight in layer.weights if weight.linear]
    used = [scheme for scheme in schemes if scheme is not None]
    count = 0
    for mixer in layer.mixers:  # norm, rotary embedding, cache write, attention, its reduction; MLA's absorbed products
        count += 5 if isinstance(mixer, Attention) else 9 if isinstance(mixer, LatentAttention) else 8
        if isinstance(mixer, LatentAttention) and mixer.has_indexer_cache:
            count += 7  # query and key projections, norm, rotation, quantization, scores, top-k
    if isinstance(layer.mlp, Experts):  # norm, router, top-k, sorting, activation, sum; FlashInfer fuses the 4-bit ones
        fused = "fp4" in gpu.flops and any(scheme.bits < 6 for scheme in used)
        count += (3 if fused else 6) + 2 * bool(layer.mlp.shared_intermediate)
    elif layer.mlp is not None:
        count += 2
    # compilation folds the quantization of activations into the norm or activation before, but not in blocks
    return count + min(sum(scheme.method == "fp8_block" for scheme in used), 4)


@lru_cache(maxsize=4096)
def work(deployment: Deployment) -> Work:
    """Count what a step of `deployment` has to do; pure arithmetic on the architecture's shapes."""
    model, tp = deployment.model, deployment.layout.tp
    architecture = model.architecture
    head = next(w for part in ("lm_head", "embedding") for w in architecture.ends if w.part == part)
    return Work(
        matmuls=_matmuls(deployment),
        head=Matmul(*_matmul(model, head, deployment)),
        vocab=architecture.vocab,
        contexts=_contexts(deployment),
        state_bytes=2.0 * sum(m.state_bytes(tp) for m in architecture.mixers if isinstance(m, Recurrent)),
        kernels=sum(
            times * _kernels(model, layer, prefix, deployment.gpu)
            for (layer, prefix), times in model.distinct_layers.items()
        ),
        token_bytes=2.0 * architecture.hidden * len(architecture.layers),
    )
