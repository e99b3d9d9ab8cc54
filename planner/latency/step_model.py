"""The step model: what a step of an engine costs, by part, with a dozen calibrated coefficients.

`latency.step_work` counts what a step moves and computes, `latency.kernel_costs` prices it for a
GPU and engine. With speculation a step drafts tokens and verifies them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Self

import numpy as np

from planner.core.catalog import load_catalog
from planner.core.errors import PlannerError
from planner.engines.coefficients import StepCoefficients
from planner.engines.deployment import Deployment
from planner.engines.engine_args import list_cudagraph_sizes
from planner.engines.speculation_methods import (
    DraftHostCost,
    get_deployment_draft_method,
    resolve_draft_model,
)
from planner.latency.coefficient_lookup import CalibrationBasis, get_deployment_coefficients
from planner.latency.kernel_costs import (
    HOPPER_CLOCK_HZ,
    combine_bounds,
    estimate_attention_s,
    estimate_expert_s,
    estimate_matmul_s,
)
from planner.latency.measured_residuals import (
    OperatingPoint,
    describe_traits,
    estimate_mean_residuals,
    estimate_residual,
    get_basis,
    widen_sigma,
)
from planner.latency.step_work import StepWork, count_step_work, resolve_planned_kv_dtype
from planner.memory.kv_cache import get_kv_element_bytes, resolve_kv_cache_dtype
from planner.memory.weights import count_offloaded_bytes
from planner.parallelism.communication import EXPERT_EXCHANGE, estimate_collectives
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

COPY_LINK_FRACTION = 50 / 64
"""Fraction of a link's bandwidth that a copy reaches: 50 GB/s over PCIe 5.0 x16 for blocks of 2 MB.

vLLM has blocks of this size from 0.12 on (vLLM blog, Inside vLLM's New KV Offloading Connector,
2026-01-08, H100).
"""
CORRECTION_SEQUENCES = 2.0 ** np.arange(13)
"""Numbers of sequences at which measured runs correct a step."""
PROMPT_CORRECTION_SEQUENCES = 16
"""Number of sequences at which measured TTFT corrects prompts, of `CORRECTION_SEQUENCES`."""
SHARE_RIDGE = 0.3
"""Ridge of the equations that tell the residuals of prompts and of decode steps apart.

It was chosen by the errors of measured curves that were left out (2026-11).
"""
PROMPT_WAIT_SIGMA = 0.15
"""Standard deviation of ln(measured / predicted) of the part of TPOT that waits for prompts.

It comes on top of what measured runs say of steps: how prompts of others bunch up and meet in
steps differs from run to run. Chosen by the interval score of what is left out (2026-11).
"""
FIXED_POINT_ROUNDS = 8
"""Rounds in which the sequences of an open loop and the time of their steps agree."""
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
PROMPT_COST_FIELDS = (
    "prefill_pair_s", "prefill_windows", "prefill_step_s", "prompt_s", "request_s",
    "prompt_token_s",
)  # fmt: skip
"""Fields of a step model that are seconds of prompts, besides its parts."""
COST_FIELDS = (
    *PROMPT_COST_FIELDS, "rows_s", "sequences_s", "decode_context_s", "decode_windows", "state_s",
    "fixed_s",
)  # fmt: skip
"""Fields of a step model that are seconds, besides its parts."""
LARGE_DECODE_TOKENS = 256
"""Tokens of a step above which their cost is corrected as that of prompts."""


@dataclass(frozen=True)
class StepModel:
    """Cost of a step on one engine (one data-parallel rank), as numbers that a simulation can use.

    A step with prompt chunks and decoding sequences takes tokens_s[all its tokens] + rows_s[its
    sequences] + fixed_s + decode_context_s x (context tokens of decoding sequences) +
    prefill_pair_s x (query, key) pairs, the windows' shares of both, + state_s x sequences, and
    prefill_step_s if it has prompt tokens. With `stages` > 1 that is the time through all pipeline
    stages, which work on as many steps at once. With speculation a decoding sequence has
    1 + `num_draft_tokens` tokens and rows, and sequences_s[sequences] is added.
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
    basis: CalibrationBasis = "prior"
    # standard deviations of ln(measured / predicted)
    sigma_tpot: float = 0.0
    sigma_ttft: float = 0.0
    sigma_capacity: float = 0.0  # of full steps, whatever the load
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
        parts = {name: seconds * factor for name, seconds in self.parts.items()}
        scaled = self._scale_fields(COST_FIELDS, factor)
        return replace(self, parts=parts, **scaled)

    def scale_prompts(self, factor: float) -> Self:
        """Return the same step, with what prompts add to decode steps at `factor` times the cost."""
        parts = {}
        for name, seconds in self.parts.items():
            added = np.maximum(seconds - np.interp(LARGE_DECODE_TOKENS, self.grid, seconds), 0.0)
            parts[name] = seconds + (factor - 1) * added * (self.grid > LARGE_DECODE_TOKENS)
        return replace(self, parts=parts, **self._scale_fields(PROMPT_COST_FIELDS, factor))

    def _scale_fields(self, names: Sequence[str], factor: float) -> dict[str, Any]:
        """Return these fields, seconds or (window, seconds) pairs, at `factor` times the cost."""
        scaled: dict[str, Any] = {}
        for name in names:
            value = getattr(self, name)
            is_windows = isinstance(value, tuple)
            scaled[name] = (
                tuple((w, s * factor) for w, s in value) if is_windows else value * factor
            )
        return scaled

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
        starts = np.arange(0, tokens, self.max_tokens)
        sizes = np.minimum(tokens - starts, self.max_tokens)
        cost = {name: float(np.interp(sizes, self.grid, p).sum()) for name, p in self.parts.items()}
        attention = self.estimate_prefill_attention_s(sizes, context + starts)
        cost["prefill attention"] = float(attention.sum())
        cost["head and sampling"] = len(starts) * float(self.interpolate_rows_s(1))
        cost["per sequence"] = len(starts) * float(self.interpolate_sequences_s(1))
        cost["host"] = len(starts) * (self.fixed_s + self.prefill_step_s)
        return StepCost(cost)


def count_attention_pairs(
    tokens: np.ndarray | float, context: np.ndarray | float = 0.0, window: int | None = None
) -> np.ndarray:
    """Count (query, key) pairs of a causal chunk after `context` tokens.

    Each query sees at most `window` keys.

    >>> int(count_attention_pairs(3)), int(count_attention_pairs(3, 10))  # 1 + 2 + 3, 11 + 12 + 13
    (6, 36)
    >>> int(count_attention_pairs(3, window=2))  # 1 + 2 + 2
    5
    """
    n, c = np.asarray(tokens, float), np.asarray(context, float)
    full = n * c + n * (n + 1) / 2
    if window is None:
        return full
    growing = np.clip(window - c, 0, n)  # queries that still see everything
    return growing * c + growing * (growing + 1) / 2 + (n - growing) * window


@cache
def _build_token_grid(limit: int, captured: int) -> np.ndarray:
    """Build token counts from 0 to `limit`.

    They are dense where the roofline bends and around the largest captured CUDA graph.
    """
    steps = np.unique(np.round(np.geomspace(1, max(limit, 2), 56)))
    return np.unique(
        np.concatenate([[0.0], steps, np.minimum([captured, captured + 1, limit], float(limit))])
    )


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


def build_target_step_model(
    deployment: Deployment, coefficients: StepCoefficients | None = None, queries: int = 1
) -> StepModel:
    """Build the step model of `deployment` without speculation, as its coefficients alone give it.

    `coefficients` replaces the catalog's. `queries` is the number of tokens of a decoding sequence
    that attend to its cache, which is read once for all of them.
    """
    gpu, args, w = deployment.gpu, deployment.args, count_step_work(deployment)
    c = coefficients or get_deployment_coefficients(deployment).coefficients
    c = replace(c, kernel_s=c.kernel_s * HOPPER_CLOCK_HZ / (gpu.boost_clock_hz or HOPPER_CLOCK_HZ))
    captured = max(
        list_cudagraph_sizes(deployment.engine, args, gpu, deployment.num_draft_tokens), default=0
    )
    tokens = _build_token_grid(args.max_num_batched_tokens, captured)
    parts, launches = _estimate_token_parts(deployment, w, tokens, c, queries)
    pieces = deployment.engine.facts.capture.pieces
    between = launches if pieces == "none" else min(w.pieces * c.launch_s, launches)
    parts["launches"] = (launches - between) * (tokens > captured) * (not args.enforce_eager)
    shared = sum(np.ptp(parts[name]) for name in PARTS_OF_ALL_RANKS)
    rows = np.arange(args.max_num_seqs + 1, dtype=float)
    head = estimate_matmul_s(w.head, rows, deployment, c)
    # the GPU's time for a step of one token
    alone = float(sum(part[1] for part in parts.values()) + head[1])
    sampling = rows * w.vocab * 4 * SAMPLING_PASSES_PER_ROW / gpu.memory_bandwidth
    host = ASYNC_HOST_FRACTION if args.async_scheduling else 1.0
    is_every_step = pieces == "every step" and not args.enforce_eager
    decode, prefill = estimate_attention_s(w.contexts, deployment, c, queries)
    step = StepModel(
        grid=tokens,
        parts=parts,
        max_tokens=args.max_num_batched_tokens,
        rows_s=head + sampling + rows * c.row_s * host,
        decode_context_s=decode.get(None, 0.0),
        decode_windows=tuple((window, s) for window, s in decode.items() if window),
        prefill_pair_s=prefill.get(None, 0.0),
        prefill_windows=tuple((window, s) for window, s in prefill.items() if window),
        state_s=w.state_bytes / (gpu.memory_bandwidth * c.kv),
        fixed_s=_estimate_exposed_host_s(deployment, c, alone)
        + is_every_step * between
        # weights in host memory are read over the link at every step
        + max(count_offloaded_bytes(deployment))
        / (deployment.gpu.host_bandwidth * COPY_LINK_FRACTION),
        prefill_step_s=0.0 if args.enforce_eager or is_every_step else between,
        prompt_s=c.prompt_s,
        request_s=c.request_s,
        prompt_token_s=c.prompt_token_s,
        stages=deployment.layout.pp,
        ranks=deployment.ranks_per_clock,
        padded_tokens=captured,
        shared_fraction=float(shared / sum(map(np.ptp, parts.values()))),
        kv_stretch=get_kv_element_bytes(resolve_kv_cache_dtype(deployment))
        / get_kv_element_bytes(resolve_planned_kv_dtype(deployment)),
    )
    return step if c.pace == 1 else step.scale(c.pace)


def _estimate_token_parts(
    deployment: Deployment, w: StepWork, tokens: np.ndarray, c: StepCoefficients, queries: int
) -> tuple[dict[str, np.ndarray], float]:
    """Estimate the seconds of each part at these token counts, and those of all kernel launches."""
    collectives = estimate_collectives(deployment, tokens, c)

    def add_up(times: Iterable[np.ndarray]) -> np.ndarray:
        return sum(times, np.zeros(len(tokens)))

    parts = {
        "dense linears": add_up(estimate_matmul_s(m, tokens, deployment, c) for m in w.matmuls),
        "experts": add_up(estimate_expert_s(e, tokens, deployment, c, queries) for e in w.experts),
        "collectives": add_up(part.seconds for part in collectives if part.name != EXPERT_EXCHANGE),
        "expert exchange": add_up(
            part.seconds for part in collectives if part.name == EXPERT_EXCHANGE
        ),
        "activations": tokens * w.token_bytes * c.token_passes / deployment.gpu.memory_bandwidth,
        "kernel latency": np.full(len(tokens), w.kernels * c.kernel_s),
    }
    kernels = (
        w.kernels
        + sum(m.kernels for m in w.matmuls)
        + sum(e.layers * KERNELS_PER_EXPERT_LAYER for e in w.experts)
        + sum(part.grouped_calls for part in collectives) * LAUNCHES_PER_GROUPED_CALL
    )
    return parts, kernels * c.launch_s


def _estimate_exposed_host_s(deployment: Deployment, c: StepCoefficients, gpu_s: float) -> float:
    """Estimate the host's seconds of a step that the GPU's `gpu_s` does not hide."""
    args, issued = deployment.args, 0.0
    if args.enforce_eager:
        issued = EAGER_LAYER_S * len(deployment.model.architecture.layers) / c.pace
    elif not args.async_scheduling:
        return c.step_s
    # hidden as far as it takes less than the GPU
    return float(combine_bounds(np.array(gpu_s), np.array(c.step_s + issued))) - gpu_s


SPEEDUP_SIGMA = 0.06
"""Standard deviation of ln(measured / predicted) speed-up, without host and added step cost."""


def compute_expected_tokens(acceptance_rate: float, k: int) -> float:
    """Return the mean tokens of a step, bonus token included: 1 (none accepted) to k + 1.

    Each of k drafts is accepted with the same probability if the one before was:

    >>> compute_expected_tokens(0.5, 2)
    1.75
    """
    if not 0 <= acceptance_rate <= 1 or k < 0:
        raise PlannerError(
            f"acceptance_rate must lie in 0 to 1 and k be 0 or more, got {acceptance_rate:g}"
            f" and {k}"
        )
    return float(sum(acceptance_rate**i for i in range(k + 1)))


@lru_cache(maxsize=4096)
def build_speculative_step_models(
    deployment: Deployment, host: tuple[float, float], coefficients: StepCoefficients | None = None
) -> tuple[StepModel, StepModel, StepModel]:
    """Build the step models of the target alone, of verifying, and of drafting and verifying.

    The host pays once per sequence, the device per token. Attention reads a sequence's KV cache
    once for all its tokens, a recurrent layer its state, of which it writes one per token. `host`
    is the seconds of a step, and the least seconds of a draft's pass.
    """
    assert deployment.speculation is not None
    method, k = (
        get_deployment_draft_method(deployment),
        deployment.speculation.num_speculative_tokens,
    )
    drafter, (step_s, pass_s) = resolve_draft_model(deployment.model, deployment.speculation), host
    known = coefficients or get_deployment_coefficients(deployment).coefficients
    plain = build_target_step_model(alone := replace(deployment, speculation=None), known)
    max_sequences = len(plain.rows_s) - 1
    wide = alone.with_args(max_num_seqs=max_sequences * (k + 1))
    target = build_target_step_model(wide, replace(known, row_s=0.0), queries=k + 1)
    verifying = replace(
        target,
        sequences_s=plain.rows_s - target.rows_s[: max_sequences + 1],
        state_s=target.state_s * (1 + (k + 1)) / 2,  # relative to one read and one written state
        num_draft_tokens=k,
    )
    sequences = np.arange(max_sequences + 1.0)
    added = verifying.sequences_s + step_s + sequences * method.host_us * 1e-6
    if drafter is None:
        return plain, verifying, replace(verifying, sequences_s=added, sigma_tpot=SPEEDUP_SIGMA)
    draft = build_target_step_model(
        replace(wide, model=drafter), replace(known, step_s=0.0, row_s=0.0)
    )
    if method.draft == "heads":
        return (
            plain,
            verifying,
            replace(
                verifying,
                sequences_s=added + k * draft.interpolate_rows_s(sequences),
                sigma_tpot=SPEEDUP_SIGMA,
            ),
        )
    passes = k if method.passes == "each" else 1
    # the first pass reads all tokens of the step, prompts too: that is in the parts
    first = draft.fixed_s + draft.interpolate_rows_s(sequences * (k / passes))
    later = (
        draft.fixed_s + draft.interpolate_tokens_s(sequences) + draft.interpolate_rows_s(sequences)
    )
    waits = np.maximum(pass_s - first - draft.interpolate_tokens_s(sequences * (k + 1)), 0.0)
    added = added + first + waits + (passes - 1) * np.maximum(later, pass_s)
    drafting = replace(
        verifying,
        parts={**verifying.parts, "drafting": draft.grid_s},
        sequences_s=added,
        decode_context_s=verifying.decode_context_s + passes * draft.decode_context_s,
        decode_windows=verifying.decode_windows
        + tuple((w, passes * s) for w, s in draft.decode_windows),
        prefill_pair_s=verifying.prefill_pair_s + draft.prefill_pair_s,
        prefill_windows=verifying.prefill_windows + draft.prefill_windows,
        prefill_step_s=verifying.prefill_step_s + draft.prefill_step_s,
        state_s=verifying.state_s + passes * draft.state_s,
        sigma_tpot=SPEEDUP_SIGMA,
    )
    return plain, verifying, drafting


def drop_acceptance_rate(deployment: Deployment) -> Deployment:
    """Return one replica without its acceptance rate: no step cost depends on either."""
    assert deployment.speculation is not None
    return replace(
        deployment.with_replicas(1),
        speculation=replace(deployment.speculation, acceptance_rate=0.0),
    )


REFERENCE_WORKLOAD = Workload(
    LengthDistribution.from_constant(1024), LengthDistribution.from_constant(256), concurrency=8
)
"""The load of a step model that is asked for without any."""


@lru_cache(maxsize=1024)  # each has tables of its own
def build_step_model(
    deployment: Deployment,
    workload: Workload | None = None,
    coefficients: StepCoefficients | None = None,
) -> StepModel:
    """Build the step model of `deployment` for the lengths of `workload`, speculation included.

    Measured runs nearby correct it, and say how far off it may be at this load. `coefficients`
    replaces the catalog's.
    """
    load = workload or REFERENCE_WORKLOAD
    point = locate_operating_point(deployment, load)
    position = point.position[1:]
    step = _build_corrected_step_model(deployment.with_replicas(1), position, coefficients)
    # prompts are corrected alike at all loads, so what runs say of this one is part of the error
    here, ttft = estimate_residual(point, "ttft")
    _, usual = _estimate_residuals(point.engine, point.traits, step.stages, position)
    full = point._replace(position=(math.log(deployment.args.max_num_seqs), *position))
    plain = build_uncorrected_step_model(deployment.with_replicas(1), coefficients)
    tpot, most = (
        widen_sigma(
            each, "tpot", estimate_residual(each, "tpot")[1],
            PROMPT_WAIT_SIGMA * estimate_prompt_share(plain, load, math.exp(each.position[0])),
        )
        for each in (point, full)
    )  # fmt: skip
    ttft = widen_sigma(point, "ttft", ttft, here - usual)
    basis = get_basis(point)
    if user := deployment.engine.calibration.get(deployment.gpu.name):
        own = user.sigma_tpot or 0.0, user.sigma_ttft or 0.0, user.sigma_tpot or 0.0
        is_own = deployment.model.architecture.model_type in user.models
        basis = "measured" if is_own else "model-transfer"
        # transferred, no error is smaller than where it was measured
        tpot, ttft, most = (
            mine or other if is_own else max(mine, other)
            for mine, other in zip(own, (tpot, ttft, most), strict=True)
        )
    return replace(
        step,
        basis=basis,
        sigma_tpot=math.hypot(step.sigma_tpot, tpot),
        sigma_ttft=ttft,
        sigma_capacity=math.hypot(step.sigma_tpot, most),
    )


@lru_cache(maxsize=4096)  # a search builds thousands, and its what-ifs the same again
def _build_corrected_step_model(
    deployment: Deployment, position: tuple[float, ...], coefficients: StepCoefficients | None
) -> StepModel:
    """Correct the step model by what measured runs say of steps with so many sequences.

    `position` is where lengths and layout stand, without the sequences. A step with more sequences
    takes no less time, and no more per sequence.
    """
    plain = build_uncorrected_step_model(deployment, coefficients)
    tpot, ttft = _estimate_residuals(
        deployment.engine.name, describe_traits(deployment), plain.stages, position
    )
    residuals, prompts = _split_residuals(plain, position, tpot, ttft)
    sequences, context = np.arange(1.0, deployment.args.max_num_seqs + 1), math.exp(position[0])
    factors = np.exp(np.interp(np.log(sequences), np.log(CORRECTION_SEQUENCES), residuals))
    corrected = np.maximum.accumulate(plain.estimate_decode_step_s(sequences, context) * factors)
    corrected = np.minimum.accumulate(corrected / sequences) * sequences
    least = residuals.min()
    step = plain.scale(math.exp(least)).scale_prompts(math.exp(prompts - least))
    missing = corrected - step.estimate_decode_step_s(sequences, context)
    added = np.append(0.0, np.maximum.accumulate(np.maximum(missing, 0.0)))
    in_row = np.arange(len(step.rows_s)) / (1 + step.num_draft_tokens)
    return replace(step, rows_s=step.rows_s + np.interp(in_row, np.append(0.0, sequences), added))


def _split_residuals(
    step: StepModel, position: tuple[float, ...], tpot: np.ndarray, ttft: float
) -> tuple[np.ndarray, float]:
    """Split residuals of TPOT [sequences] and TTFT into those of decode steps and of prompts.

    Prompts take a share of TPOT, and decode steps one of TTFT. What a small share would have to
    explain is damped.
    """
    context, prompt_per_output = math.exp(position[0]), math.exp(position[-1])
    output = context / (prompt_per_output + 0.5)
    prompt = max(round(context - output / 2), 1)
    usual = CORRECTION_SEQUENCES.tolist().index(PROMPT_CORRECTION_SEQUENCES)
    in_tpot, in_ttft = _estimate_shares(step, CORRECTION_SEQUENCES, context, prompt, output)
    prompts = tpot[usual] + _weigh_share(in_ttft[usual]) * (ttft - tpot[usual])
    return tpot - (1 - in_tpot) * _weigh_share(in_tpot) * (prompts - tpot), float(prompts)


def _estimate_shares(
    step: StepModel, sequences: np.ndarray | float, context: float, prompt: int, output: float,
    cached: int = 0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Estimate the shares [sequences] of decode steps in TPOT, and of a prompt's own time in TTFT.

    `prompt` tokens after `cached` ones are computed, and `output` ones generated, at a mean `context`.
    """
    decode_s = step.estimate_decode_step_s(sequences, context)
    passes = math.ceil(prompt / step.max_tokens)
    alone_s = passes * float(step.estimate_decode_step_s(1.0, context))
    prompt_s = max(step.estimate_prompt(prompt, cached).seconds - alone_s, 0.0)
    waited_s = np.asarray(sequences) * prompt_s * step.tokens_per_step / output
    return decode_s / (waited_s + decode_s), prompt_s / (prompt_s + decode_s)


def estimate_prompt_share(step: StepModel, load: Workload, sequences: float) -> float:
    """Estimate the share of TPOT that waits for prompts of others, with so many sequences."""
    in_tpot, _ = _estimate_shares(
        step, sequences, load.mean_decode_context,
        round(load.prompt.mean - load.mean_cached_tokens), load.output.mean,
        cached=round(load.mean_cached_tokens),
    )  # fmt: skip
    return 1 - float(in_tpot)


def _weigh_share(share: Any) -> Any:
    """Return by what a residual is multiplied to be explained by a part with this share of the time.

    >>> _weigh_share(1.0), round(_weigh_share(0.5), 2), _weigh_share(0.0)  # not 1, 2, infinity
    (1.0, 1.18, 0.0)
    """
    return share * (1 + SHARE_RIDGE) / (share**2 + SHARE_RIDGE)


@lru_cache(maxsize=4096)  # the same for all engine arguments and trial coefficients
def _estimate_residuals(
    engine: str, traits: tuple[tuple[str, str], ...], stages: int, position: tuple[float, ...]
) -> tuple[np.ndarray, float]:
    """Estimate the residuals of TPOT for a step of each stage with `CORRECTION_SEQUENCES`, and of TTFT."""
    points = [
        OperatingPoint(engine, traits, (math.log(n * stages), *position))
        for n in CORRECTION_SEQUENCES.tolist()
    ]
    usual = points[0]._replace(position=(math.log(PROMPT_CORRECTION_SEQUENCES), *position))
    ttft = estimate_mean_residuals([usual], "ttft")
    return estimate_mean_residuals(points, "tpot"), float(ttft[0])


def locate_operating_point(deployment: Deployment, workload: Workload) -> OperatingPoint:
    """Locate a deployment under a load among the measured runs.

    Of an open loop the sequences are those in flight by Little's law.
    """
    step = build_uncorrected_step_model(deployment.with_replicas(1), None)
    context, most = workload.mean_decode_context, float(deployment.args.max_num_seqs)
    engines = deployment.num_engine_instances
    sequences = workload.concurrency / engines if workload.concurrency else most
    if workload.rate:
        arriving, limit = workload.rate / engines, min(sequences, most)
        steps, sequences = workload.output.mean / step.tokens_per_step, 1.0
        for _ in range(FIXED_POINT_ROUNDS):
            stay = steps * float(step.estimate_decode_step_s(sequences, context))
            before, sequences = sequences, min(max(arriving * stay, 1.0), limit)
            if sequences == before:
                break
    first_step_s = float(step.estimate_decode_step_s(1.0, context)) / step.tokens_per_step
    position = (
        min(max(sequences, 1.0), most), context, deployment.layout.tp, first_step_s,
        workload.prompt.mean / workload.output.mean,
    )  # fmt: skip
    return OperatingPoint(
        deployment.engine.name,
        describe_traits(deployment.with_replicas(1)),
        tuple(map(math.log, position)),
    )


@lru_cache(maxsize=4096)
def build_uncorrected_step_model(
    deployment: Deployment, coefficients: StepCoefficients | None
) -> StepModel:
    """Build the step model as coefficients alone give it, speculation included."""
    if (speculation := deployment.speculation) is None:
        return build_target_step_model(deployment, coefficients)
    tokens = compute_expected_tokens(
        speculation.acceptance_rate, speculation.num_speculative_tokens
    )
    reached = (
        speculation.acceptance_rate**i for i in range(speculation.num_speculative_tokens + 1)
    )
    variance = sum((2 * i + 1) * chance for i, chance in enumerate(reached)) - tokens**2
    drafting = build_speculative_step_models(
        drop_acceptance_rate(deployment), estimate_draft_host_s(deployment), coefficients
    )[2]
    return replace(drafting, tokens_per_step=tokens, tokens_variance=variance)


def estimate_draft_host_s(deployment: Deployment) -> tuple[float, float]:
    """Return the host's seconds per step, and the least seconds of a pass over the draft."""
    return (
        (cost := load_catalog("drafting.yaml", DraftHostCost)[deployment.engine.name]).step_us
        * 1e-6,
        cost.pass_us * 1e-6,
    )
