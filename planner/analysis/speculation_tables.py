"""What the speculation chapter shows: which draft to consider, where it breaks even, what each way to draft takes."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.engines.deployment import Deployment, SpeculationConfig
from planner.engines.speculation_methods import explain_unsupported_method, load_draft_methods
from planner.latency.speculative_decoding import evaluate_speculation, find_break_even_acceptance
from planner.memory.memory_plan import MemoryPlan

EXAMPLE_DRAFT = SpeculationConfig("eagle3", 3, 0.62)
"""Considered where a scenario names nothing: what chat-70b cites for an EAGLE-3 head."""
DRAFT_TOKEN_COUNTS = range(1, 9)
"""Drafted tokens that are tried."""


def list_available_methods(deployment: Deployment) -> tuple[str, ...]:
    """Methods that the engine has and that need nothing but the target: no model to name, no layers it doesn't have."""
    missing = {"model"} if deployment.model.architecture.mtp_layers else {"model", "mtp"}
    known = (name for name, how in load_draft_methods().items() if how.draft not in missing)
    return tuple(name for name in known if not explain_unsupported_method(name, deployment.engine))


def sweep_break_even(
    deployment: Deployment, batches: Sequence[float], ks: Sequence[int], context: float
) -> pd.DataFrame:
    """The acceptance rate at which speculation breaks even, for each k and batch at which there is one."""
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


def build_draft_table(
    drafted: Deployment, memory: MemoryPlan, batch: float, context: float
) -> pd.DataFrame:
    """One row per way to draft: GiB per GPU, sequences that it costs, speed-up at `batch`, and the fastest k."""
    rows = []
    assert drafted.speculation is not None
    for name in dict.fromkeys((drafted.speculation.method, *list_available_methods(drafted))):
        way = replace(drafted.speculation, method=name)
        try:
            speedup = evaluate_speculation(
                replace(drafted, speculation=way), batch, context, memory
            )
            longer = [
                replace(drafted, speculation=replace(way, num_speculative_tokens=k))
                for k in DRAFT_TOKEN_COUNTS
            ]
            gains = [
                evaluate_speculation(deployment, batch, context).speedup.mid
                for deployment in longer
            ]
        except PlannerError:  # such as MTP on a model without such layers
            continue
        best = DRAFT_TOKEN_COUNTS[gains.index(max(gains))]
        rows.append(
            (
                name,
                speedup.draft_bytes / GIB,
                speedup.num_sequences_lost,
                speedup.speedup,
                speedup.verdict,
                best,
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
