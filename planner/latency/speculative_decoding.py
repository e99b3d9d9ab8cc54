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

import numpy as np

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.latency.step_model import (
    SPEEDUP_SIGMA,
    build_speculative_step_models,
    build_step_model,
    compute_expected_tokens,
    drop_acceptance_rate,
    estimate_draft_host_s,
)
from planner.memory.memory_plan import MemoryPlan, plan_memory
from planner.memory.weights import compute_draft_bytes

HOST_COST_SIGMA = 0.7
"""Standard deviation of ln(cost of the host), which machines of one kind more than double."""


def infer_acceptance_rate(tokens_per_step: float, k: int) -> float:
    """Return the acceptance rate at which a step with k drafts yields `tokens_per_step`.

    That is an engine's mean acceptance length.

    >>> round(infer_acceptance_rate(1.75, k=2), 6)  # 1 + 0.5 + 0.25
    0.5
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
    engine, largest = drop_acceptance_rate(deployment), float(np.max(batch))
    if largest > engine.args.max_num_seqs:  # as if so many could run
        engine = engine.with_args(max_num_seqs=1 << math.ceil(math.log2(largest)))
    steps = build_speculative_step_models(engine, host or estimate_draft_host_s(engine))
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
    sigma = build_step_model(replace(deployment, speculation=None)).sigma_tpot
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


def compute_planned_acceptance(deployment: Deployment) -> float | None:
    """Return the fraction of drafted tokens that is accepted, (a + ... + a^k) / k.

    None without speculation.
    """
    speculation, k = deployment.speculation, deployment.num_draft_tokens
    if speculation is None:
        return None
    return (compute_expected_tokens(speculation.acceptance_rate, k) - 1) / k
