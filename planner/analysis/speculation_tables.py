"""Tables of the speculation chapter: methods, break-even acceptance and cost of each draft."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.engines.deployment import Deployment, SpeculationConfig
from planner.engines.speculation_methods import explain_unsupported_method, load_draft_methods
from planner.latency.speculative_decoding import (
    compute_expected_tokens,
    evaluate_speculation,
    find_break_even_acceptance,
)
from planner.memory.memory_plan import MemoryPlan

EXAMPLE_DRAFT = SpeculationConfig("eagle3", 3, 0.62)
"""Used if a scenario names no draft: chat-70b's source for an EAGLE-3 head."""
DRAFT_TOKEN_COUNTS = range(1, 9)
"""Numbers of drafted tokens to try."""


def list_available_methods(deployment: Deployment) -> tuple[str, ...]:
    """List the engine's draft methods that need no draft model, and no layers the target lacks."""
    missing = {"model"} if deployment.model.architecture.mtp_layers else {"model", "mtp"}
    names = (name for name, method in load_draft_methods().items() if method.draft not in missing)
    return tuple(name for name in names if not explain_unsupported_method(name, deployment.engine))


def sweep_break_even(
    deployment: Deployment, batches: Sequence[float], ks: Sequence[int], context: float
) -> pd.DataFrame:
    """Return the break-even acceptance rate for each k and batch that has one."""
    rows = []
    for k in ks:
        drafting = deployment.speculation and replace(
            deployment.speculation, num_speculative_tokens=k
        )
        changed = replace(deployment, speculation=drafting)
        rows += [
            (k, batch, find_break_even_acceptance(changed, batch, context)) for batch in batches
        ]
    return pd.DataFrame(rows, columns=["k", "batch", "acceptance_rate"]).dropna()


def sweep_speedup(
    deployment: Deployment,
    batches: Sequence[float],
    rates: Sequence[float],
    ks: Sequence[int],
    context: float,
) -> pd.DataFrame:
    """Return the speed-up for every combination: columns k, batch, acceptance_rate, speedup."""
    rows = []
    for k in ks:
        changed = deployment.speculation and replace(
            deployment.speculation, num_speculative_tokens=k
        )
        for batch in batches:
            speedup = evaluate_speculation(replace(deployment, speculation=changed), batch, context)
            for rate in rates:
                at_rate = replace(speedup, tokens_per_step=compute_expected_tokens(rate, k))
                rows.append((k, batch, rate, at_rate.speedup.mid))
    return pd.DataFrame(rows, columns=["k", "batch", "acceptance_rate", "speedup"])


def build_draft_table(
    drafted: Deployment, memory: MemoryPlan, batch: float, context: float
) -> pd.DataFrame:
    """Return GiB per GPU, lost sequences, speed-up at `batch` and the fastest k of each method."""
    rows = []
    assert drafted.speculation is not None
    for name in dict.fromkeys((drafted.speculation.method, *list_available_methods(drafted))):
        config = replace(drafted.speculation, method=name)
        try:
            speedup = evaluate_speculation(
                replace(drafted, speculation=config), batch, context, memory
            )
            deployments = [
                replace(drafted, speculation=replace(config, num_speculative_tokens=k))
                for k in DRAFT_TOKEN_COUNTS
            ]
            speedups = [
                evaluate_speculation(deployment, batch, context).speedup.mid
                for deployment in deployments
            ]
        except PlannerError:  # such as MTP on a model without such layers
            continue
        best_k = DRAFT_TOKEN_COUNTS[speedups.index(max(speedups))]
        rows.append(
            (
                name,
                speedup.draft_bytes / GIB,
                speedup.num_sequences_lost,
                speedup.speedup,
                speedup.verdict,
                best_k,
            )
        )
    columns = [
        "method",
        "draft (GiB per GPU)",
        "sequences it costs",
        "speed-up at the same acceptance",
        "verdict",
    ]
    return pd.DataFrame(
        rows,
        columns=[*columns, f"fastest k of {DRAFT_TOKEN_COUNTS[0]} to {DRAFT_TOKEN_COUNTS[-1]}"],
    )
