"""Speculative decoding: tokens per step from acceptance, what drafting and verifying cost, where it stops paying.

A step drafts k tokens and verifies them with one pass of the target over k + 1 tokens per sequence.
With each drafted token accepted with probability a after the last, a step yields (1 - a^(k+1)) / (1
- a) tokens (Leviathan et al., arXiv 2211.17192, eq. 1). At small batch the pass is bound by reading
weights, so k more tokens are nearly free; at large batch they cost compute, and a mixture of
experts reads more experts for them at any batch. A recurrent layer writes a state for every token
that may turn out to be the last accepted one. Beside all that a speculative step waits for its
host, whatever the model: so a small one gains least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.engines.deployment import Deployment

if TYPE_CHECKING:
    import pandas as pd

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.engines.coefficients import StepCoefficients
from planner.engines.speculation_methods import (
    get_deployment_draft_method,
    load_draft_host_costs,
    resolve_draft_model,
)
from planner.latency.coefficient_lookup import get_deployment_coefficients
from planner.latency.step_model import StepModel, build_target_step_model
from planner.memory.memory_plan import MemoryPlan, plan_memory
from planner.memory.weights import compute_draft_bytes

if TYPE_CHECKING:
    import pandas as pd

SPEEDUP_SIGMA = 0.06
"""Standard deviation of ln(measured / predicted) of a speed-up, but for the two that follow."""
HOST_COST_SIGMA = 0.7
"""The same of what the host costs, which differs more than twice between machines of one kind."""


def compute_expected_tokens(acceptance_rate: float, k: int) -> float:
    """Tokens that a step yields on average, its bonus token included: 1 (nothing accepted) to k + 1."""
    if not 0 <= acceptance_rate <= 1 or k < 0:
        raise PlannerError(
            f"acceptance_rate must lie in 0 to 1 and k be 0 or more, got {acceptance_rate:g}"
            f" and {k}"
        )
    return float(sum(acceptance_rate**i for i in range(k + 1)))


def infer_acceptance_rate(tokens_per_step: float, k: int) -> float:
    """The acceptance rate at which a step of k drafts yields `tokens_per_step` (an engine's mean acceptance length)."""
    from scipy.optimize import brentq

    if not 1 <= tokens_per_step <= k + 1:
        raise PlannerError(
            f"a step of {k} drafts yields 1 to {k + 1} tokens, got {tokens_per_step:g}"
        )
    return float(brentq(lambda rate: compute_expected_tokens(rate, k) - tokens_per_step, 0.0, 1.0))


@dataclass(frozen=True)
class SpeculationSpeedup:
    """What speculation does to decoding at one batch."""

    batch: float
    tokens_per_step: float
    plain_s: float  # a step without speculation: one token per sequence
    verify_s: float  # the target over k + 1 tokens per sequence
    draft_s: float  # k drafts, and what the host takes for them
    host_s: float  # of that, the host's
    draft_bytes: float  # per GPU
    num_sequences_lost: (
        int | None
    )  # that the draft's weights and cache push out of the KV pool; None: not asked
    sigma_tpot: float  # of the plain step

    @property
    def speedup(self) -> Interval:
        """TPOT without / TPOT with: the target's own step cost cancels but for what is added to it."""
        whole = self.verify_s + self.draft_s
        host, added = (
            self.host_s / whole * HOST_COST_SIGMA,
            (1 - self.plain_s / whole) * self.sigma_tpot,
        )
        return Interval.from_lognormal(
            self.tokens_per_step * self.plain_s / whole, math.hypot(SPEEDUP_SIGMA, host, added)
        )

    @property
    def verdict(self) -> str:
        """`pays` or `does not pay` when the whole interval says so, else `may pay`."""
        return (
            "pays" if self.speedup.lo > 1 else "does not pay" if self.speedup.hi < 1 else "may pay"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row, the speed-up as an `Interval`."""
        import pandas as pd

        times = {
            f"{name} (ms)": getattr(self, f"{name}_s") * 1e3
            for name in ("plain", "verify", "draft")
        }
        row = {
            "batch": self.batch,
            "tokens per step": self.tokens_per_step,
            **times,
            "speed-up": self.speedup,
        }
        memory = {
            "draft (GiB per GPU)": self.draft_bytes / GIB,
            "sequences lost": self.num_sequences_lost,
        }
        return pd.DataFrame([{**row, **memory, "verdict": self.verdict}])

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
    """Step costs of the target alone, of the target verifying drafts, and of drafting and verifying.

    The host pays once per sequence, the device per token; attention reads a sequence's KV once for
    all its tokens, a recurrent layer its state, of which it writes one for each. `host`: seconds of
    a step, and least of a draft's pass.
    """
    assert deployment.speculation is not None
    how, k = get_deployment_draft_method(deployment), deployment.speculation.num_speculative_tokens
    drafter, (step_s, pass_s) = resolve_draft_model(deployment.model, deployment.speculation), host
    known = coefficients or get_deployment_coefficients(deployment).coefficients
    plain = build_target_step_model(alone := replace(deployment, speculation=None), known)
    seats = len(plain.rows_s) - 1
    wide = alone.with_args(max_num_seqs=seats * (k + 1))
    target = build_target_step_model(wide, replace(known, row_s=0.0), queries=k + 1)
    verifying = replace(
        target,
        sequences_s=plain.rows_s - target.rows_s[: seats + 1],
        state_s=target.state_s * (1 + (k + 1)) / 2,  # of one that is read and written once
        num_draft_tokens=k,
    )
    sequences = np.arange(seats + 1.0)
    added = verifying.sequences_s + step_s + sequences * how.host_us * 1e-6
    sigma = math.hypot(plain.sigma_tpot, SPEEDUP_SIGMA)
    if drafter is None:
        return plain, verifying, replace(verifying, sequences_s=added, sigma_tpot=sigma)
    draft = build_target_step_model(
        replace(wide, model=drafter), replace(known, step_s=0.0, row_s=0.0)
    )
    if how.draft == "heads":
        return (
            plain,
            verifying,
            replace(
                verifying,
                sequences_s=added + k * draft.interpolate_rows_s(sequences),
                sigma_tpot=sigma,
            ),
        )
    passes = k if how.passes == "each" else 1
    first = draft.fixed_s + draft.interpolate_rows_s(
        sequences * (k / passes)
    )  # it reads all tokens of the step, prompts too
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
    """One replica of `deployment` without its acceptance rate: no step's cost depends on either."""
    assert deployment.speculation is not None
    return replace(
        deployment.with_replicas(1),
        speculation=replace(deployment.speculation, acceptance_rate=0.0),
    )


def build_step_model(
    deployment: Deployment, coefficients: StepCoefficients | None = None
) -> StepModel:
    """The step cost of `deployment`, its speculation included; `coefficients` replaces the catalog's."""
    return _build_step_model_cached(deployment.with_replicas(1), coefficients)


@lru_cache(maxsize=1024)
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
    """Seconds that a step costs the engine's host, and that a pass over the draft takes at least."""
    cost = load_draft_host_costs()[deployment.engine.name]
    return cost.step_us * 1e-6, cost.pass_us * 1e-6


def estimate_step_s(
    deployment: Deployment,
    batch: np.ndarray | float,
    context: float,
    host: tuple[float, float] | None = None,
) -> tuple[np.ndarray, ...]:
    """Seconds of a plain step of `batch` sequences, of one that verifies, and of one that drafts and verifies.

    `host` replaces the engine's own: seconds of a step, and the least that a pass over the draft
    takes.
    """
    engine, largest = _drop_acceptance_rate(deployment), float(np.max(batch))
    if largest > engine.args.max_num_seqs:  # judged as if so many might run
        engine = engine.with_args(max_num_seqs=1 << math.ceil(math.log2(largest)))
    steps = _build_step_models(engine, host or _estimate_host_s(engine))
    return tuple(
        step.estimate_decode_step_s(np.maximum(batch / step.stages, 1.0), context) for step in steps
    )


def evaluate_speculation(
    deployment: Deployment, batch: float, context: float, memory: MemoryPlan | None = None
) -> SpeculationSpeedup:
    """The effect of `deployment.speculation` on `batch` decoding sequences of `context` tokens in one engine.

    With the memory plan of the deployment without speculation, counts the sequences that the draft
    costs.
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
    """The acceptance rate above which speculation pays at this batch; None when no rate does."""
    speedup = evaluate_speculation(deployment, batch, context)
    needed = (speedup.verify_s + speedup.draft_s) / speedup.plain_s
    k = deployment.num_draft_tokens
    return infer_acceptance_rate(max(needed, 1.0), k) if needed <= k + 1 else None


def find_profitable_batches(
    deployment: Deployment, context: float, largest: int | None = None
) -> list[tuple[int, int]]:
    """The first and the last batch of each range up to `largest` (default: max_num_seqs) at which speculation pays.

    There may be several: a few drafted tokens wake experts that a larger batch reads anyway.
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
    turns = np.flatnonzero(
        np.diff(pays, prepend=False, append=False)
    ).tolist()  # the first of a range, and one beyond
    return [(first + 1, beyond) for first, beyond in zip(turns[::2], turns[1::2], strict=True)]


def find_break_even_batch(
    deployment: Deployment, context: float, largest: int | None = None
) -> int:
    """The largest batch of `pays_at`; 0 when it pays at none."""
    return max(
        (last for _, last in find_profitable_batches(deployment, context, largest)), default=0
    )


def sweep_speedup(
    deployment: Deployment,
    batches: Sequence[float],
    rates: Sequence[float],
    ks: Sequence[int],
    context: float,
) -> pd.DataFrame:
    """Speed-up for every combination: columns k, batch, acceptance_rate, speedup."""
    import pandas as pd

    rows = []
    for k in ks:
        changed = deployment.speculation and replace(
            deployment.speculation, num_speculative_tokens=k
        )
        for batch in batches:
            speedup = evaluate_speculation(replace(deployment, speculation=changed), batch, context)
            at = {
                rate: replace(speedup, tokens_per_step=compute_expected_tokens(rate, k))
                for rate in rates
            }
            rows += [(k, batch, rate, one.speedup.mid) for rate, one in at.items()]
    return pd.DataFrame(rows, columns=["k", "batch", "acceptance_rate", "speedup"])


def compute_planned_acceptance(deployment: Deployment) -> float | None:
    """The share of drafted tokens that is accepted, (a + ... + a^k) / k; None where nothing is drafted."""
    drafting, k = deployment.speculation, deployment.num_draft_tokens
    return (compute_expected_tokens(drafting.acceptance_rate, k) - 1) / k if drafting else None
