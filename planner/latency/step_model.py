"""Price an engine step: a roofline per part, with a dozen calibrated coefficients.

`latency.step_work` counts what a step moves and computes; this module prices it for a GPU and
engine. Roofline: Williams et al. 2009. A kernel's time is a norm of its memory and its compute
time, so that both matter near the ridge. A mixture of E experts, k of which serve a token, reads
E (1 - (1 - k/E)^T) experts for T tokens.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Self

import numpy as np

from planner.core.errors import PlannerError
from planner.engines.coefficients import StepCoefficients
from planner.engines.deployment import Deployment
from planner.engines.engine_args import list_cudagraph_sizes
from planner.latency.coefficient_lookup import CalibrationBasis, get_deployment_coefficients
from planner.latency.expert_kernels import get_expert_kernel
from planner.latency.step_work import (
    ExpertWork,
    MatmulWork,
    count_step_work,
    resolve_planned_kv_dtype,
)
from planner.memory.kv_cache import get_kv_element_bytes
from planner.parallelism.communication import EXPERT_EXCHANGE, estimate_collectives

ASYNC_HOST_FRACTION = 0.35
"""Fraction of the host's time per sequence that asynchronous scheduling does not hide."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step, by part."""

    seconds_by_part: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds_by_part.values())

    def __str__(self) -> str:
        inside = ", ".join(
            f"{name} {value * 1e3:.2f}" for name, value in self.seconds_by_part.items() if value > 0
        )
        return f"{self.seconds * 1e3:.2f} ms ({inside})"


PARTS_OF_ALL_RANKS = ("experts", "expert exchange")
"""Parts of a step that ranks with experts in common do together, whose tokens they are."""
COST_FIELDS = (
    "rows_s", "sequences_s", "decode_context_s", "prefill_pair_s", "state_s", "fixed_s",
    "prefill_step_s", "prompt_s", "request_s", "prompt_token_s",
)  # fmt: skip
"""Fields of a step model that are seconds, besides its parts and windows."""


@dataclass(frozen=True)
class StepModel:
    """Cost of a step on one engine (one data-parallel rank), as numbers that a simulation can use.

    A step with prompt chunks and decoding sequences takes tokens_s[all its tokens] + rows_s[its
    sequences] + fixed_s + decode_context_s x (context tokens of decoding sequences) +
    prefill_pair_s x (query, key) pairs, the windows' shares of both, + state_s x sequences, and
    prefill_step_s if it has prompt tokens. With `stages` > 1 that is the time through all pipeline
    stages, which work on as many steps at once. With speculation (see
    `latency.speculative_decoding.build_step_model`) a decoding sequence has 1 + `num_draft_tokens`
    tokens and rows, and sequences_s[sequences] is added.
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
    prompt_s: float  # of each prompt chunk, in addition to its tokens
    request_s: float
    prompt_token_s: float
    stages: int
    ranks: int  # that start and end each step together
    padded_tokens: int  # up to which all ranks are padded to the fullest: those of CUDA graphs
    shared_fraction: float  # of the time of tokens in a full step: what all ranks do together
    # blocks for performance relative to the memory plan's, see `step_work.resolve_planned_kv_dtype`
    kv_stretch: float
    basis: CalibrationBasis
    sigma_tpot: float
    sigma_ttft: float
    sigma_output_tps: float  # a lower bound: with drafts it is no less than TPOT's
    # [max_num_seqs + 1] per sequences in the step: drafting, adapters
    sequences_s: np.ndarray = field(default_factory=lambda: np.zeros(1))
    num_draft_tokens: int = 0  # tokens that each decoding sequence verifies in addition to its own
    tokens_per_step: float = 1.0  # mean tokens that a decoding sequence yields
    tokens_variance: float = 0.0  # their variance

    @cached_property
    def grid_s(self) -> np.ndarray:
        """Seconds of the token-dependent parts at each grid point, monotone."""
        return np.maximum.accumulate(sum(self.parts.values()))

    @cached_property
    def tokens_s(self) -> np.ndarray:
        """[max_num_batched_tokens + 1] seconds of a step by its scheduled tokens."""
        return np.interp(np.arange(self.max_tokens + 1), self.grid, self.grid_s)

    @cached_property
    def shared_tokens_s(self) -> np.ndarray:
        """[max_num_batched_tokens + 1] the part of `tokens_s` that data-parallel ranks do together.

        It is 0 for ranks that share no experts.
        """
        if self.ranks == 1:
            return np.zeros(1)
        shared = sum(self.parts[name] for name in PARTS_OF_ALL_RANKS)
        return np.interp(np.arange(self.max_tokens + 1), self.grid, shared)

    def interpolate_tokens_s(self, count: np.ndarray | float) -> np.ndarray:
        """Interpolate `tokens_s` at real-valued counts."""
        return np.interp(count, self.grid, self.grid_s)

    def interpolate_rows_s(self, count: np.ndarray | float) -> np.ndarray:
        """Interpolate `rows_s` at real-valued counts."""
        return np.interp(count, np.arange(len(self.rows_s)), self.rows_s)

    def interpolate_sequences_s(self, count: np.ndarray | float) -> np.ndarray:
        """Interpolate `sequences_s` at real-valued counts."""
        return np.interp(count, np.arange(len(self.sequences_s)), self.sequences_s)

    def estimate_decode_attention_s(self, context: np.ndarray | float) -> np.ndarray:
        """Estimate the seconds that a decoding sequence of this context adds to a step."""
        windows = sum(s * np.minimum(context, window) for window, s in self.decode_windows)
        return self.decode_context_s * np.asarray(context, float) + windows + self.state_s

    def estimate_decode_step_s(
        self, sequences: np.ndarray | float, context: np.ndarray | float
    ) -> np.ndarray:
        """Estimate the seconds in which each of `sequences` has a decode step.

        It takes several steps if one cannot hold all tokens.
        """
        sequences = np.asarray(sequences, float)
        steps = np.maximum(sequences * (1 + self.num_draft_tokens) / self.max_tokens, 1.0)
        batch = sequences / steps
        tokens = batch * (1 + self.num_draft_tokens)
        shared = (
            self.fixed_s
            + self.interpolate_tokens_s(tokens)
            + self.interpolate_rows_s(tokens)
            + self.interpolate_sequences_s(batch)
        )
        return steps * (shared + batch * self.estimate_decode_attention_s(context))

    def estimate_prefill_attention_s(
        self, tokens: np.ndarray | float, context: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Estimate the attention of a prompt chunk of `tokens` after `context` cached ones."""
        total = (
            self.prefill_pair_s * count_attention_pairs(tokens, context)
            + self.state_s
            + self.prompt_s
        )
        return total + sum(
            s * count_attention_pairs(tokens, context, window) for window, s in self.prefill_windows
        )

    def scale(self, factor: float) -> Self:
        """Return the same step at `factor` times the cost."""
        scaled: dict[str, Any] = {name: getattr(self, name) * factor for name in COST_FIELDS}
        for name in ("decode_windows", "prefill_windows"):
            scaled[name] = tuple(
                (window, seconds * factor) for window, seconds in getattr(self, name)
            )
        return replace(
            self, parts={name: seconds * factor for name, seconds in self.parts.items()}, **scaled
        )

    def estimate_step(self, chunks: Sequence[tuple[int, int]], contexts: Sequence[int]) -> StepCost:
        """Estimate a step of prompt `chunks` (tokens, context before) and decoding sequences.

        `contexts` are those of the decoding sequences. Raises `PlannerError` for more tokens than
        a step holds.
        """
        decoding = len(contexts) * (1 + self.num_draft_tokens)
        count = sum(tokens for tokens, _ in chunks) + decoding
        if count > self.max_tokens:
            raise PlannerError(
                f"a step holds {self.max_tokens:,} tokens (max_num_batched_tokens), not {count:,}"
            )
        cost = {name: float(np.interp(count, self.grid, part)) for name, part in self.parts.items()}
        cost["prefill attention"] = float(
            sum(self.estimate_prefill_attention_s(*chunk) for chunk in chunks)
        )
        cost["decode attention"] = float(
            self.estimate_decode_attention_s(np.asarray(contexts, float)).sum()
        )
        cost["head and sampling"] = float(self.interpolate_rows_s(len(chunks) + decoding))
        cost["per sequence"] = float(self.interpolate_sequences_s(len(chunks) + len(contexts)))
        cost["host"] = self.fixed_s + (self.prefill_step_s if chunks else 0.0)
        return StepCost(cost)

    def estimate_prompt(self, tokens: int, context: int = 0) -> StepCost:
        """Estimate the steps of a prompt of `tokens` alone, each of at most `max_tokens`.

        `context` tokens before it are cached.
        """
        total = Counter[str]()
        for start in range(0, tokens, self.max_tokens):
            chunk = min(self.max_tokens, tokens - start), context + start
            total.update(self.estimate_step([chunk], []).seconds_by_part)
        return StepCost(total)


def count_attention_pairs(
    tokens: np.ndarray | float, context: np.ndarray | float = 0.0, window: int | None = None
) -> np.ndarray:
    """Count (query, key) pairs of a causal chunk after `context` tokens.

    Each query sees at most `window` keys.
    """
    n, c = np.asarray(tokens, float), np.asarray(context, float)
    full = n * c + n * (n + 1) / 2
    if window is None:
        return full
    growing = np.clip(window - c, 0, n)  # queries that still see everything
    return growing * c + growing * (growing + 1) / 2 + (n - growing) * window


HOPPER_CLOCK_HZ = 1.98e9
"""Clock of H100 SXM, to which `kernel_s` refers.

Kernels that move little data scale with the clock: Hopper's 3.7 us of a GEMM are 5.4 on A100 (by
its clock 5.2); small kernels of Gated DeltaNet take 0.78-0.85 of Hopper's on L40S (0.79), 0.83-0.89
on RTX PRO 6000 (0.76; AIConfigurator 0.12's tables). GPUs other than NVIDIA's were not measured.
"""
GEMM_LATENCY_FRACTION = 0.4
"""Fraction of `kernel_s` that a matrix product takes in addition to its roofline.

3.7 us on H100, 5.4 on A100, 2.4 on RTX PRO 6000 (AIConfigurator 0.12's bf16 GEMM tables of vLLM
0.24 and 0.14, 2026-09, which latency + roofline fits to 8%, a norm of both to 9-15%).
"""
TRITON_ATTENTION_EFFICIENCY = {
    "grouped": (0.44, 1.0),
    "latent": (0.05, 1.0),
    "sparse": (0.5, 0.9),
    "index": (0.3, 0.5),
}
ATTENTION_EFFICIENCY: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "hopper": {"grouped": (0.44, 1.0), "latent": (0.78, 1.4), "sparse": (0.71, 1.1), "index": (0.38, 0.6)},
    "blackwell": {"grouped": (0.44, 1.0), "latent": (0.8, 1.5), "sparse": (0.5, 0.9), "index": (0.3, 0.5)},
    "ampere": TRITON_ATTENTION_EFFICIENCY, "ada": TRITON_ATTENTION_EFFICIENCY,
    "blackwell-desktop": TRITON_ATTENTION_EFFICIENCY,
    "": {"grouped": (0.44, 1.0), "latent": (0.44, 1.0), "sparse": (0.44, 0.9), "index": (0.3, 0.5)},
}  # fmt: skip
"""Efficiency of decode and prefill attention by generation and kind.

The first figure is the fraction of the dense bf16 peak that decoding reaches if it is bound by
compute, the second how prefill compares with that of grouped queries (`attention`).

Source: AIConfigurator 0.12's tables of vLLM 0.24 (2026-09). FlashMLA reaches 0.74-0.81 on Hopper
with its rows padded to 64, FlashAttention 3 0.41 over an FP8 cache; Triton's MLA, the only one on
Ampere, Ada and desktop Blackwell, 0.05 (L40S, RTX PRO 6000). Prefill with expanded latents reaches
0.87-0.96 on Hopper and Blackwell where grouped queries reach 0.58-0.66, with selected ones 0.71 and
0.4-0.5; the indexer's scores 0.25-0.4 of the FP8 peak. A latent cache in FP8 is multiplied in FP8
on Blackwell. Others have not been measured.
"""


def _get_attention_efficiency(kind: str, deployment: Deployment) -> tuple[float, float]:
    generation = deployment.gpu.kernel_generation
    reached, prefill = ATTENTION_EFFICIENCY.get(generation, ATTENTION_EFFICIENCY[""])[kind]
    in_fp8 = (
        kind == "latent"
        and generation == "blackwell"
        and get_kv_element_bytes(resolve_planned_kv_dtype(deployment)) == 1
    )
    return reached * (2 if in_fp8 else 1), prefill


@cache
def _build_token_grid(limit: int, captured: int) -> np.ndarray:
    """Build token counts from 0 to `limit`.

    They are dense where the roofline bends and around the largest captured CUDA graph.
    """
    steps = np.unique(np.round(np.geomspace(1, max(limit, 2), 56)))
    return np.unique(
        np.concatenate([[0.0], steps, np.minimum([captured, captured + 1, limit], float(limit))])
    )


def _estimate_matmul_s(
    m: MatmulWork, tokens: np.ndarray, deployment: Deployment, c: StepCoefficients
) -> np.ndarray:
    """Estimate the seconds of a group of linears at these token counts."""
    gpu = deployment.gpu
    reached = {"fp8": c.gemm_fp8, "int8": c.gemm_fp8, "fp4": c.gemm_fp4}.get(m.dtype, c.gemm_bf16)
    if m.bits <= 8 and m.dtype in ("bf16", "fp16"):
        reached *= c.gemm_widened
    # the pace scales the whole step, but the rate never exceeds the peak
    rate = gpu.peak_flops[m.dtype] * min(reached, c.pace)
    bandwidth = gpu.memory_bandwidth * (c.memory_fp4 if m.bits < 6 else c.memory)
    read = np.full_like(tokens, m.bytes / bandwidth)
    return _combine_bounds(
        read, tokens * m.flops / rate
    ) + m.kernels * c.kernel_s * GEMM_LATENCY_FRACTION * (tokens > 0)


def _estimate_expert_s(
    e: ExpertWork, tokens: np.ndarray, deployment: Deployment, c: StepCoefficients, queries: int = 1
) -> np.ndarray:
    """Estimate the fused-experts kernels of all layers: latency, norm(read, compute), activations.

    T tokens route as T^0.9 independent ones would, so they touch E (1 - (1 - k/E)^(T^0.9)) of E
    experts; the `queries` of one sequence, most of which are guesses, count as independent. The
    rows of each touched expert are padded to whole tiles. Experts are used unevenly, with a
    relative standard deviation of `EXPERT_LOAD_RELATIVE_SIGMA`: of R ranks with n experts each, the
    fullest has 1 + sigma sqrt(2 ln R / n) times the mean (the largest of R normal variables).
    """
    gpu, kernel = deployment.gpu, get_expert_kernel(deployment.gpu, deployment.engine, e.format)
    # a rank's experts see the tokens of all data-parallel ranks
    all_tokens = tokens * deployment.layout.dp
    touched = e.held * (
        1
        - (1 - e.active / e.total) ** (queries * (all_tokens / queries) ** EXPERT_ROUTING_EXPONENT)
    )
    rows = (
        all_tokens
        * e.active
        / e.ranks
        * (1 + EXPERT_LOAD_RELATIVE_SIGMA * math.sqrt(2 * math.log(e.ranks) / e.held))
    )
    read = touched * e.bytes / (gpu.memory_bandwidth * kernel.memory)
    compute = (
        (rows + touched * kernel.padding)
        * e.flops
        / (gpu.peak_flops[e.dtype] * kernel.gemm * c.expert_gemm)
    )
    moved = rows * e.row_bytes * kernel.passes / gpu.memory_bandwidth
    return e.layers * (
        kernel.latency_s * c.expert_latency * (tokens > 0) + _combine_bounds(read, compute) + moved
    )


EXPERT_ROUTING_EXPONENT = 0.9
"""Exponent of the tokens that route independently, fitted to expert counts of served models."""
EXPERT_LOAD_RELATIVE_SIGMA = 0.4
"""Standard deviation of the use of an expert, relative to the mean."""


def _combine_bounds(*times: np.ndarray) -> np.ndarray:
    """Return the 4-norm of bounds.

    At the ridge GEMMs take 15-20% more than either bound (AIConfigurator's GEMM tables).
    """
    squares = np.square(np.stack(times))
    return np.sqrt(np.sqrt((squares * squares).sum(axis=0)))


def build_target_step_model(
    deployment: Deployment, coefficients: StepCoefficients | None = None, queries: int = 1
) -> StepModel:
    """Build the calibrated step model of `deployment` without speculation.

    `coefficients` replaces the catalog's. `queries` is the number of tokens of a decoding sequence
    that attend to its cache, which is read once for all of them.
    """
    gpu, args, w = deployment.gpu, deployment.args, count_step_work(deployment)
    known = get_deployment_coefficients(deployment)
    c = coefficients or known.coefficients
    c = replace(c, kernel_s=c.kernel_s * HOPPER_CLOCK_HZ / (gpu.boost_clock_hz or HOPPER_CLOCK_HZ))
    captured = max(
        list_cudagraph_sizes(deployment.engine, args, gpu, deployment.num_draft_tokens), default=0
    )
    tokens = _build_token_grid(args.max_num_batched_tokens, captured)
    collectives = estimate_collectives(deployment, tokens, c)

    def add_up(times: Iterable[np.ndarray]) -> np.ndarray:
        return sum(times, np.zeros(len(tokens)))

    parts: dict[str, np.ndarray] = {
        "dense linears": add_up(_estimate_matmul_s(m, tokens, deployment, c) for m in w.matmuls),
        "experts": add_up(_estimate_expert_s(e, tokens, deployment, c, queries) for e in w.experts),
        "collectives": add_up(part.seconds for part in collectives if part.name != EXPERT_EXCHANGE),
        "expert exchange": add_up(
            part.seconds for part in collectives if part.name == EXPERT_EXCHANGE
        ),
        "activations": tokens * w.token_bytes * c.token_passes / gpu.memory_bandwidth,
        "kernel latency": np.full(len(tokens), w.kernels * c.kernel_s),
    }
    kernels = (
        w.kernels
        + sum(m.kernels for m in w.matmuls)
        + sum(e.layers * KERNELS_PER_EXPERT_LAYER for e in w.experts)
        + sum(part.grouped_calls for part in collectives) * LAUNCHES_PER_GROUPED_CALL
    )
    launches, pieces = kernels * c.launch_s, deployment.engine.facts.capture.pieces
    between = launches if pieces == "none" else min(w.pieces * c.launch_s, launches)
    parts["launches"] = (launches - between) * (tokens > captured) * (not args.enforce_eager)
    host = ASYNC_HOST_FRACTION if args.async_scheduling else 1.0
    shared = sum(np.ptp(parts[name]) for name in PARTS_OF_ALL_RANKS)
    rows = np.arange(args.max_num_seqs + 1, dtype=float)
    head = _estimate_matmul_s(w.head, rows, deployment, c)
    # the GPU's time for a step of one token
    alone = float(sum(part[1] for part in parts.values()) + head[1])
    issued = (
        EAGER_LAYER_S * len(deployment.model.architecture.layers) / c.pace
        if args.enforce_eager
        else 0.0
    )
    hidden = args.async_scheduling or args.enforce_eager  # as far as it takes less than the GPU
    exposed = (
        float(_combine_bounds(np.array(alone), np.array(c.step_s + issued))) - alone
        if hidden
        else c.step_s
    )
    sampling = rows * w.vocab * 4 * SAMPLING_PASSES_PER_ROW / gpu.memory_bandwidth
    rate = gpu.memory_bandwidth * c.kv
    peak = gpu.peak_flops["bf16" if "bf16" in gpu.peak_flops else "fp16"]
    decode: dict[int | None, float] = {}
    prefill: dict[int | None, float] = {}
    for k in w.contexts:
        reached, others = _get_attention_efficiency(k.kind, deployment)
        multiplied = max(k.decode_flops, queries * k.query_flops) / (peak * reached)
        seconds = float(_combine_bounds(np.array(k.bytes / rate), np.array(multiplied)))
        decode[k.window] = decode.get(k.window, 0.0) + seconds
        prefill[k.window] = prefill.get(k.window, 0.0) + k.prefill_flops / (
            peak * c.attention * others
        )
    step = StepModel(
        grid=tokens,
        parts=parts,
        max_tokens=args.max_num_batched_tokens,
        rows_s=head + sampling + rows * c.row_s * host,
        decode_context_s=decode.get(None, 0.0),
        decode_windows=tuple((window, s) for window, s in decode.items() if window),
        prefill_pair_s=prefill.get(None, 0.0),
        prefill_windows=tuple((window, s) for window, s in prefill.items() if window),
        state_s=w.state_bytes / rate,
        fixed_s=exposed + (between if pieces == "every step" and not args.enforce_eager else 0.0),
        prefill_step_s=0.0 if args.enforce_eager or pieces == "every step" else between,
        prompt_s=c.prompt_s,
        request_s=c.request_s,
        prompt_token_s=c.prompt_token_s,
        stages=deployment.layout.pp,
        ranks=deployment.ranks_per_clock,
        padded_tokens=captured,
        shared_fraction=float(shared / sum(map(np.ptp, parts.values()))),
        kv_stretch=get_kv_element_bytes(deployment.args.kv_cache_dtype or "auto")
        / get_kv_element_bytes(resolve_planned_kv_dtype(deployment)),
        basis=known.basis,
        sigma_tpot=known.sigma_tpot,
        sigma_ttft=known.sigma_ttft,
        sigma_output_tps=known.sigma_output_tps,
    )
    return step if c.pace == 1 else step.scale(c.pace)


EAGER_LAYER_S = 0.75e-3
"""Seconds that PyTorch takes to issue a layer eagerly, whatever its size and the GPU's pace.

On an A800, 7B with 28 layers takes 22-23 ms per token (13 with graphs), its talker with a quarter
of the width 19-20 (5.4-6; vllm-omni issue 7960, 2026-09).
"""
LAUNCHES_PER_GROUPED_CALL = 2.5
"""Kernel launches that take as long as issuing one of a group of NCCL calls.

Chosen for MiniMax-M3 on 8 B300, DP4 and DP8 beside TP8 (InferenceX, 2026-07).
"""
KERNELS_PER_EXPERT_LAYER = 6
"""Kernels of a fused-experts layer: sorting, quantizing, two products, activation, sum."""
SAMPLING_PASSES_PER_ROW = 4
"""fp32 passes over a row's logits in a greedy or plain-temperature sampler.

They are cast, scale, softmax and draw.
"""
