"""Estimate speculative decoding: tokens per step, cost of drafting and verifying, break-even.

A step drafts k tokens and verifies them with one pass of the target over k + 1 tokens per sequence.
If each drafted token is accepted with probability a after the one before, a step yields
(1 - a^(k+1)) / (1 - a) tokens (Leviathan et al., arXiv 2211.17192, eq. 1). At small batch the pass
is bound by reading weights, so k more tokens are nearly free. At large batch they cost compute, and
a mixture of experts reads more experts for them at any batch. A recurrent layer writes a state for
every token that may be the last accepted one. In addition a speculative step waits for its host,
whatever the model, so a small model gains least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.engines.coefficients import StepCoefficients
from planner.engines.deployment import Deployment
from planner.engines.speculation_methods import (
    get_deployment_draft_method,
    load_draft_host_costs,
    resolve_draft_model,
)
from planner.latency.coefficient_lookup import get_deployment_coefficients
from planner.latency.step_model import StepModel, build_target_step_model
from planner.memory.memory_plan import MemoryPlan, plan_memory
from planner.memory.weights import compute_draft_bytes

SPEEDUP_SIGMA = 0.06
"""Standard deviation of ln(measured / predicted) speed-up, without host and added step cost."""
HOST_COST_SIGMA = 0.7
"""Standard deviation of ln(cost of the host), which machines of one kind more than double."""


def compute_expected_tokens(acceptance_rate: float, k: int) -> float:
    """Return the mean tokens of a step, bonus token included: 1 (none accepted) to k + 1."""
    if not 0 <= acceptance_rate <= 1 or k < 0:
        raise PlannerError(
            f"acceptance_rate must lie in 0 to 1 and k be 0 or more, got {acceptance_rate:g}"
            f" and {k}"
        )
    return float(sum(acceptance_rate**i for i in range(k + 1)))


def infer_acceptance_rate(tokens_per_step: float, k: int) -> float:
    """Return the acceptance rate at which a step with k drafts yields `tokens_per_step`.

    That is an engine's mean acceptance length.
    """
    from scipy.optimize import brentq

    if not 1 <= tokens_per_step <= k + 1:
        raise PlannerError(
            f"a step of {k} drafts yields 1 to {k + 1} tokens, got {tokens_per_step:g}"
        )
    return float(brentq(lambda rate: compute_expected_tokens(rate, k) - tokens_per_step, 0.0, 1.0))


@dataclass(frozen=True)
class SpeculationSpeedup:
    """Effect of speculation on decoding at one batch."""

    batch: float
    tokens_per_step: float
    plain_s: float  # a step without speculation: one token per sequence
    verify_s: float  # the target over k + 1 tokens per sequence
    draft_s: float  # k drafts, and the host's time for them
    host_s: float  # the host's part of it
    draft_bytes: float  # per GPU
    # sequences that no longer fit, due to the draft's weights and cache; None: unknown
    num_sequences_lost: int | None
    sigma_tpot: float  # of the plain step

    @property
    def speedup(self) -> Interval:
        """TPOT without / TPOT with speculation.

        The error of the target's step cost cancels, except for what is added to it.
        """
        whole = self.verify_s + self.draft_s
        host = self.host_s / whole * HOST_COST_SIGMA
        added = (1 - self.plain_s / whole) * self.sigma_tpot
        return Interval.from_lognormal(
            self.tokens_per_step * self.plain_s / whole, math.hypot(SPEEDUP_SIGMA, host, added)
        )

    @property
    def verdict(self) -> str:
        """`pays` or `does not pay` if the whole interval agrees, else `may pay`."""
        return (
            "pays" if self.speedup.lo > 1 else "does not pay" if self.speedup.hi < 1 else "may pay"
        )

    def to_row(self) -> dict[str, object]:
        """Return a row by readable names, with the speed-up as an `Interval`."""
        times = {
            f"{name} (ms)": getattr(self, f"{name}_s") * 1e3
            for name in ("plain", "verify", "draft")
        }
        return {
            "batch": self.batch,
            "tokens per step": self.tokens_per_step,
            **times,
            "speed-up": self.speedup,
            "draft (GiB per GPU)": self.draft_bytes / GIB,
            "sequences lost": self.num_sequences_lost,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        plain, verify, draft = (
            f"{1e3 * seconds:.1f}" for seconds in (self.plain_s, self.verify_s, self.draft_s)
        )
        return (
            f"{self.verdict}: {self.speedup:.2f} x at batch {self.batch:g}"
            f" ({self.tokens_per_step:.2f} tokens a step; {verify} ms to verify and {draft} ms to"
            f" draft instead of {plain} ms)"
        )


@lru_cache(maxsize=4096)
def _build_step_models(
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
    sigma = math.hypot(plain.sigma_tpot, SPEEDUP_SIGMA)
    if drafter is None:
        return plain, verifying, replace(verifying, sequences_s=added, sigma_tpot=sigma)
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
                sigma_tpot=sigma,
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
        sigma_tpot=sigma,
    )
    return plain, verifying, drafting


def _drop_acceptance_rate(deployment: Deployment) -> Deployment:
    """Return one replica without its acceptance rate: no step cost depends on either."""
    assert deployment.speculation is not None
    return replace(
        deployment.with_replicas(1),
        speculation=replace(deployment.speculation, acceptance_rate=0.0),
    )


def build_step_model(
    deployment: Deployment, coefficients: StepCoefficients | None = None
) -> StepModel:
    """Build the step model of `deployment`, speculation included.

    `coefficients` replaces the catalog's.
    """
    return _build_step_model_cached(deployment.with_replicas(1), coefficients)


@lru_cache(maxsize=16_384)  # a search builds thousands, and its what-ifs the same again
def _build_step_model_cached(
    deployment: Deployment, coefficients: StepCoefficients | None
) -> StepModel:
    if (speculation := deployment.speculation) is None:
        return build_target_step_model(deployment, coefficients)
    tokens = compute_expected_tokens(
        speculation.acceptance_rate, speculation.num_speculative_tokens
    )
    reached = (
        speculation.acceptance_rate**i for i in range(speculation.num_speculative_tokens + 1)
    )
    variance = sum((2 * i + 1) * chance for i, chance in enumerate(reached)) - tokens**2
    drafting = _build_step_models(
        _drop_acceptance_rate(deployment), _estimate_host_s(deployment), coefficients
    )[2]
    return replace(drafting, tokens_per_step=tokens, tokens_variance=variance)


def _estimate_host_s(deployment: Deployment) -> tuple[float, float]:
    """Return the host's seconds per step, and the least seconds of a pass over the draft."""
    cost = load_draft_host_costs()[deployment.engine.name]
    return cost.step_us * 1e-6, cost.pass_us * 1e-6


def estimate_step_s(
    deployment: Deployment,
    batch: np.ndarray | float,
    context: float,
    host: tuple[float, float] | None = None,
) -> tuple[np.ndarray, ...]:
    """Estimate the seconds of a plain step, of one that verifies, and of one that also drafts.

    `host` replaces the engine's own: seconds of a step, and the least seconds of a pass over the
    draft.
    """
    engine, largest = _drop_acceptance_rate(deployment), float(np.max(batch))
    if largest > engine.args.max_num_seqs:  # as if so many could run
        engine = engine.with_args(max_num_seqs=1 << math.ceil(math.log2(largest)))
    steps = _build_step_models(engine, host or _estimate_host_s(engine))
    return tuple(
        step.estimate_decode_step_s(np.maximum(batch / step.stages, 1.0), context) for step in steps
    )


def evaluate_speculation(
    deployment: Deployment, batch: float, context: float, memory: MemoryPlan | None = None
) -> SpeculationSpeedup:
    """Evaluate `deployment.speculation` for `batch` decoding sequences in one engine.

    `context` is in tokens. With the memory plan of the deployment without speculation, it counts
    the sequences that the draft costs.
    """
    if (speculation := deployment.speculation) is None:
        raise PlannerError(
            "the deployment has no speculation to judge: give method and num_speculative_tokens"
        )
    lost = None
    if memory is not None:
        lost = memory.pool.count_sequences(round(context)) - plan_memory(
            deployment
        ).pool.count_sequences(round(context))
    plain, verify, whole = map(float, estimate_step_s(deployment, batch, context))
    host = whole - float(estimate_step_s(deployment, batch, context, (0.0, 0.0))[2])
    sigma = build_target_step_model(replace(deployment, speculation=None)).sigma_tpot
    tokens = compute_expected_tokens(
        speculation.acceptance_rate, speculation.num_speculative_tokens
    )
    taken = compute_draft_bytes(deployment.model, speculation, deployment.layout)
    return SpeculationSpeedup(
        batch, tokens, plain, verify, whole - verify, host, taken, lost, sigma
    )


def find_break_even_acceptance(
    deployment: Deployment, batch: float, context: float
) -> float | None:
    """Return the acceptance rate above which speculation pays at this batch, None if none does."""
    speedup = evaluate_speculation(deployment, batch, context)
    needed = (speedup.verify_s + speedup.draft_s) / speedup.plain_s
    k = deployment.num_draft_tokens
    return infer_acceptance_rate(max(needed, 1.0), k) if needed <= k + 1 else None


def find_profitable_batches(
    deployment: Deployment, context: float, largest: int | None = None
) -> list[tuple[int, int]]:
    """Return the first and last batch of each range at which speculation pays.

    Batches are up to `largest` (default: max_num_seqs). There may be several ranges: a few drafted
    tokens activate experts that a larger batch reads anyway.
    """
    if (speculation := deployment.speculation) is None:
        return []
    batches = np.arange(1, (largest or deployment.args.max_num_seqs) + 1)
    plain, _, whole = estimate_step_s(deployment, batches, context)
    pays = (
        compute_expected_tokens(speculation.acceptance_rate, speculation.num_speculative_tokens)
        * plain
        >= whole
    )
    # the first of each range, and one beyond
    edges = np.flatnonzero(np.diff(pays, prepend=False, append=False)).tolist()
    return [(first + 1, beyond) for first, beyond in zip(edges[::2], edges[1::2], strict=True)]


def find_break_even_batch(
    deployment: Deployment, context: float, largest: int | None = None
) -> int:
    """Return the largest batch at which speculation pays, 0 if there is none."""
    return max(
        (last for _, last in find_profitable_batches(deployment, context, largest)), default=0
    )


def compute_planned_acceptance(deployment: Deployment) -> float | None:
    """Return the fraction of drafted tokens that is accepted, (a + ... + a^k) / k.

    None without speculation.
    """
    speculation, k = deployment.speculation, deployment.num_draft_tokens
    if speculation is None:
        return None
    return (compute_expected_tokens(speculation.acceptance_rate, k) - 1) / k
