"""What one engine step costs: a roofline per part, priced with a dozen calibrated coefficients.

`work` counts what a step has to move and compute (arithmetic on shapes), `step_model` prices it for a GPU and engine.
Roofline: Williams et al. 2009; a kernel's time is the p-norm of its memory and its compute time, so that both matter
near the ridge. A mixture of E experts of which k serve a token reads E (1 - (1 - k/E)^T) experts for T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from planner.architecture import Attention, Experts, LatentAttention, Layer, Recurrent, Weight
from planner.coefficients import Basis, Coefficients, calibration_of
from planner.deployment import Deployment
from planner.models import Model
from planner.parallelism import collectives
from planner.weights import rank_shape, weight_bytes

SMOOTH = 4.0
"""Order of the p-norm between memory and compute time; GEMMs at the ridge are 15-20 % above either (AIConfigurator)."""
EP_IMBALANCE = 1.15
"""The busiest of several expert-parallel ranks against their mean, for routers trained with balancing losses."""
LAUNCH_S = 5e-6
"""Issuing one kernel from Python in a step without a CUDA graph, on a current host."""
SPARSE_TOKENS = 2048
"""Tokens that DeepSeek sparse attention keeps per query (`index_topk` of DeepSeek-V3.2 and GLM-5)."""
PINGPONG = 0.35
"""Share of the host's step and row time that asynchronous scheduling leaves in the GPU's way."""


@dataclass(frozen=True)
class Matmul:
    """All linears of a step that share a number format: bytes of weights, FLOP a token, on one GPU."""

    dtype: str  # the matrix units' format: bf16, fp8, fp4, int8
    bytes: float
    flops: float
    bits: float = 16.0  # per stored weight
    experts: int = 0  # of how many experts per layer (0: dense)
    active: int = 0


@dataclass(frozen=True)
class Context:
    """Attention layers that see the same span: what one context token costs a sequence on one GPU, over all layers."""

    window: int | None
    bytes: float  # KV read per context token in decode
    decode_flops: float  # per (query, context token)
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


def _matmul(model: Model, weight: Weight, deployment: Deployment) -> tuple[str, float, float, float]:
    """(format of the matrix units, bytes, FLOP per token, bits) on one GPU; a format it lacks is computed in 16 bit."""
    peaks, scheme = deployment.gpu.flops, model.quantization.scheme(weight)
    wide = "bf16" if "bf16" in peaks else "fp16"
    rows, cols, copies = rank_shape(weight, deployment.layout)
    dtype = scheme.activation if scheme is not None and scheme.activation in peaks else wide
    bits = 16.0 if scheme is None else scheme.bits
    return dtype, weight_bytes(model, weight, deployment.layout), 2.0 * rows * cols * copies, bits


def _matmuls(deployment: Deployment) -> tuple[Matmul, ...]:
    """Every linear of the layers, gathered by format and by dense or expert."""
    model, layout = deployment.model, deployment.layout
    found: dict[tuple[str, float, int, int], list[float]] = {}
    for layer, times in model.architecture.distinct_layers.items():
        for weight in layer.weights:
            if not weight.linear:
                continue
            dtype, size, flops, bits = _matmul(model, weight, deployment)
            experts = active = 0
            if weight.part == "routed_experts" and isinstance(layer.mlp, Experts):
                experts, active = layer.mlp.total, layer.mlp.active
                flops *= active / experts * layout.dp  # a rank's experts see the tokens of all data-parallel ranks
            total = found.setdefault((dtype, bits, experts, active), [0.0, 0.0])
            total[0] += size * times
            total[1] += flops * times
    return tuple(Matmul(key[0], size, flops, *key[1:]) for key, (size, flops) in found.items())


def _kv_width(deployment: Deployment) -> float:
    """Bytes per cached element."""
    dtype = deployment.args.kv_cache_dtype or "auto"
    return 1.0 if dtype.startswith(("fp8", "int8")) else 0.5625 if "nvfp4" in dtype else 2.0


def _contexts(deployment: Deployment) -> tuple[Context, ...]:
    """What attention reads and multiplies per context token, gathered by window."""
    tp, dcp, width = deployment.layout.tp, deployment.layout.dcp, _kv_width(deployment)
    found: dict[int | None, np.ndarray] = {}

    def add(window: int | None, times: int, *costs: float) -> None:
        found[window] = found.get(window, np.zeros(3)) + times * np.array(costs)

    for layer, times in deployment.model.architecture.distinct_layers.items():
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                flops = 2.0 * mixer.heads / tp * (mixer.head_dim + mixer.v_head_dim)
                kept = max(mixer.kv_heads / tp, 1.0) * (mixer.head_dim + mixer.v_head_dim) * width
                add(mixer.window, times, kept / dcp, flops / dcp, flops)
            elif isinstance(mixer, LatentAttention):
                decode = 2.0 * mixer.heads / tp * (mixer.kv_elements + mixer.kv_lora_rank)
                prefill = 2.0 * mixer.heads / tp * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
                window = SPARSE_TOKENS if mixer.index_heads else mixer.window
                add(window, times, mixer.kv_elements * width / dcp, decode / dcp, prefill)
                if mixer.has_indexer_cache:  # it scores the whole context, in fp8: twice the bf16 rate
                    score = mixer.index_heads * mixer.index_dim / max(mixer.compress, 1)
                    add(None, times, mixer.index_bytes, score, score)
    return tuple(Context(window, *costs) for window, costs in found.items())


def _kernels(model: Model, layer: Layer) -> int:
    """Kernels that one layer launches, all-reduces apart: as vLLM's compiled graph leaves them, counted on its layers."""
    names = {weight.name for weight in layer.weights}
    count = 0
    for mixer in layer.mixers:
        count += 7 if isinstance(mixer, Attention) else 14 if isinstance(mixer, LatentAttention) else 10
    count += any("q_norm" in name for name in names)
    if isinstance(layer.mlp, Experts):
        count += 8 + 4 * any("shared" in name for name in names)
    elif layer.mlp is not None:
        count += 4
    schemes = [model.quantization.scheme(weight) for weight in layer.weights if weight.linear]
    quantized = sum(scheme is not None and scheme.activation != "bf16" for scheme in schemes)
    return count + min(quantized, 4)  # activations are quantized once per fused linear


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
        kernels=sum(times * _kernels(model, layer) for layer, times in architecture.distinct_layers.items()),
        token_bytes=2.0 * architecture.hidden * len(architecture.layers),
    )


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step, by part."""

    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        inside = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in self.parts.items() if value > 0)
        return f"{self.seconds * 1e3:.2f} ms ({inside})"


@dataclass(frozen=True)
class StepModel:
    """What one step costs on one engine (one data-parallel rank), as numbers that a replay can use.

    A step with prompt chunks and decoding sequences takes tokens_s[all its tokens] + rows_s[its sequences] + fixed_s
    + decode_context_s x (context tokens of decoding sequences) + prefill_pair_s x (query, key) pairs, the windows' shares
    of both, + state_s x sequences, and prefill_step_s if it holds prompt tokens. With `stages` > 1 that is the time through all
    pipeline stages, and as many steps are under way at once.
    """

    grid: np.ndarray  # token counts at which `parts` were priced
    parts: Mapping[str, np.ndarray]  # seconds at each of them
    max_tokens: int
    rows_s: np.ndarray  # [max_num_seqs + 1]
    decode_context_s: float
    decode_windows: tuple[tuple[int, float], ...]  # (window, s per context token inside it)
    prefill_pair_s: float
    prefill_windows: tuple[tuple[int, float], ...]
    state_s: float
    fixed_s: float
    prefill_step_s: float
    request_s: float
    prompt_token_s: float
    stages: int
    basis: Basis
    sigma_tpot: float
    sigma_ttft: float

    @cached_property
    def grid_s(self) -> np.ndarray:
        """Seconds of the token-dependent parts at each grid point, never falling."""
        return np.maximum.accumulate(sum(self.parts.values()))

    @cached_property
    def tokens_s(self) -> np.ndarray:
        """[max_num_batched_tokens + 1] seconds of a step that schedules so many tokens."""
        return np.interp(np.arange(self.max_tokens + 1), self.grid, self.grid_s)

    def tokens(self, count: np.ndarray | float) -> np.ndarray:
        """`tokens_s` at real-valued counts."""
        return np.interp(count, self.grid, self.grid_s)

    def rows(self, count: np.ndarray | float) -> np.ndarray:
        """`rows_s` at real-valued counts."""
        return np.interp(count, np.arange(len(self.rows_s)), self.rows_s)

    def decode_attention(self, context: np.ndarray | float) -> np.ndarray:
        """Seconds that one decoding sequence of this context adds to a step."""
        windows = sum(s * np.minimum(context, window) for window, s in self.decode_windows)
        return self.decode_context_s * np.asarray(context, float) + windows + self.state_s

    def prefill_attention(self, tokens: np.ndarray | float, context: np.ndarray | float = 0.0) -> np.ndarray:
        """Seconds of attention for a prompt chunk of `tokens` after `context` cached ones."""
        total = self.prefill_pair_s * pairs(tokens, context) + self.state_s
        return total + sum(s * pairs(tokens, context, window) for window, s in self.prefill_windows)

    def step_seconds(self, chunks: Sequence[tuple[int, int]], contexts: Sequence[int]) -> StepCost:
        """Cost of a step of prompt `chunks` (tokens, context before) and decoding sequences with these `contexts`."""
        count = sum(tokens for tokens, _ in chunks) + len(contexts)
        cost = {name: float(np.interp(count, self.grid, part)) for name, part in self.parts.items()}
        cost["prefill attention"] = float(sum(self.prefill_attention(*chunk) for chunk in chunks))
        cost["decode attention"] = (
            float(self.decode_attention(np.asarray(contexts, float)).sum()) if len(contexts) else 0.0
        )
        cost["head and sampling"] = float(self.rows(len(chunks) + len(contexts)))
        cost["host"] = self.fixed_s + (self.prefill_step_s if chunks else 0.0)
        return StepCost(cost)


def pairs(tokens: np.ndarray | float, context: np.ndarray | float = 0.0, window: int | None = None) -> np.ndarray:
    """(query, key) pairs of a causal chunk after `context` tokens, each query seeing at most `window` keys."""
    n, c = np.asarray(tokens, float), np.asarray(context, float)
    full = n * c + n * (n + 1) / 2
    if window is None:
        return full
    growing = np.clip(window - c, 0, n)  # queries that still see everything
    return growing * c + growing * (growing + 1) / 2 + (n - growing) * window


def _grid(limit: int) -> np.ndarray:
    """Token counts from 0 to `limit`, dense where the roofline bends."""
    steps = np.unique(np.round(np.geomspace(1, max(limit, 2), 56)))
    return np.unique(np.concatenate([[0.0], steps, [float(limit)]]))


def _matmul_seconds(m: Matmul, tokens: np.ndarray, deployment: Deployment, c: Coefficients) -> np.ndarray:
    """Seconds of a group of linears for these token counts."""
    gpu, layout = deployment.gpu, deployment.layout
    rate = gpu.flops[m.dtype] * {"fp8": c.gemm_fp8, "int8": c.gemm_fp8, "fp4": c.gemm_fp4}.get(m.dtype, c.gemm_bf16)
    bandwidth, touched, flops = (
        gpu.bandwidth * (c.memory_fp4 if m.bits < 6 else c.memory),
        np.ones_like(tokens),
        m.flops,
    )
    if m.experts:
        touched = 1 - (1 - m.active / m.experts) ** ((tokens * layout.dp) ** c.expert_spread)
        bandwidth, rate = gpu.bandwidth * c.expert_memory, rate * c.expert_gemm
        if layout.ep > 1:
            flops = flops * EP_IMBALANCE
            touched = np.minimum(touched * EP_IMBALANCE, 1.0)
    read, compute = m.bytes * touched / bandwidth, tokens * flops / rate
    return (read**SMOOTH + compute**SMOOTH) ** (1 / SMOOTH)


def step_model(deployment: Deployment, coefficients: Coefficients | None = None) -> StepModel:
    """The step cost of `deployment`, calibrated as well as anyone measured; `coefficients` replaces the catalog's."""
    gpu, args, w = deployment.gpu, deployment.args, work(deployment)
    known = calibration_of(deployment.model, gpu, deployment.engine.name)
    c = coefficients or known.coefficients
    tokens = _grid(args.max_num_batched_tokens or 2048)
    parts: dict[str, np.ndarray] = {
        "dense linears": sum(
            (_matmul_seconds(m, tokens, deployment, c) for m in w.matmuls if not m.experts), np.zeros(len(tokens))
        ),
        "experts": sum(
            (_matmul_seconds(m, tokens, deployment, c) for m in w.matmuls if m.experts), np.zeros(len(tokens))
        ),
        "collectives": sum((part.seconds for part in collectives(deployment, tokens, c)), np.zeros(len(tokens))),
        "activations": tokens * w.token_bytes * c.token_passes / gpu.bandwidth,
        "kernel latency": np.full(len(tokens), w.kernels * c.kernel_s),
    }
    if args.enforce_eager:
        launches = w.kernels * LAUNCH_S
        parts["kernel latency"] = parts["kernel latency"] + np.maximum(launches - sum(parts.values()), 0)
    host = PINGPONG if args.async_scheduling else 1.0
    rows = np.arange((args.max_num_seqs or 256) + 1, dtype=float)
    sampling = rows * w.vocab * 4 * SAMPLING_PASSES / gpu.bandwidth
    rate = gpu.bandwidth * c.kv
    peak = gpu.flops["bf16" if "bf16" in gpu.flops else "fp16"] * c.attention
    decode = {k.window: max(k.bytes / rate, k.decode_flops / peak) for k in w.contexts}
    prefill = {k.window: k.prefill_flops / peak for k in w.contexts}
    return StepModel(
        grid=tokens,
        parts=parts,
        max_tokens=args.max_num_batched_tokens or 2048,
        rows_s=_matmul_seconds(w.head, rows, deployment, c) + sampling + rows * c.row_s * host,
        decode_context_s=decode.get(None, 0.0),
        decode_windows=tuple((window, s) for window, s in decode.items() if window),
        prefill_pair_s=prefill.get(None, 0.0),
        prefill_windows=tuple((window, s) for window, s in prefill.items() if window),
        state_s=w.state_bytes / rate,
        fixed_s=c.step_s * host,
        prefill_step_s=c.prefill_step_s,
        request_s=c.request_s,
        prompt_token_s=c.prompt_token_s,
        stages=deployment.layout.pp,
        basis=known.basis,
        sigma_tpot=known.sigma_tpot,
        sigma_ttft=known.sigma_ttft,
    )


SAMPLING_PASSES = 4
"""fp32 passes over the logits of one row in a greedy or plain-temperature sampler: cast, scale, softmax, draw."""
