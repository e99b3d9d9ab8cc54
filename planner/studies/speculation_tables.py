"""What the speculation chapter shows: which draft to consider, where it breaks even, what each way to draft takes."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from planner.core.quantities import GIB, PlannerError
from planner.facts.deployment import Deployment, Speculation
from planner.facts.draft_models import lacking, methods
from planner.latency.speculation import break_even_acceptance, speculate
from planner.memory.budget import MemoryPlan

EXAMPLE_DRAFT = Speculation("eagle3", 3, 0.62)
"""Considered where a scenario names nothing: what chat-70b cites for an EAGLE-3 head."""
KS = range(1, 9)
"""Drafted tokens that are tried."""


def possible(deployment: Deployment) -> tuple[str, ...]:
    """Methods that the engine has and that need nothing but the target: no model to name, no layers it doesn't have."""
    missing = {"model"} if deployment.model.architecture.mtp else {"model", "mtp"}
    known = (name for name, how in methods().items() if how.draft not in missing)
    return tuple(name for name in known if not lacking(name, deployment.engine))


def break_even_line(
    deployment: Deployment, batches: Sequence[float], ks: Sequence[int], context: float
) -> pd.DataFrame:
    """The acceptance rate at which speculation breaks even, for each k and batch at which there is one."""
    rows = []
    for k in ks:
        drafting = deployment.speculation and replace(deployment.speculation, num_speculative_tokens=k)
        changed = replace(deployment, speculation=drafting)
        rows += [(k, batch, break_even_acceptance(changed, batch, context)) for batch in batches]
    return pd.DataFrame(rows, columns=["k", "batch", "acceptance_rate"]).dropna()


def draft_table(drafted: Deployment, memory: MemoryPlan, batch: float, context: float) -> pd.DataFrame:
    """One row per way to draft: GiB per GPU, sequences that it costs, speed-up at `batch`, and the fastest k."""
    rows = []
    assert drafted.speculation is not None
    for name in dict.fromkeys((drafted.speculation.method, *possible(drafted))):
        way = replace(drafted.speculation, method=name)
        try:
            found = speculate(replace(drafted, speculation=way), batch, context, memory)
            longer = [replace(drafted, speculation=replace(way, num_speculative_tokens=k)) for k in KS]
            gains = [speculate(one, batch, context).speedup.mid for one in longer]
        except PlannerError:  # such as MTP on a model without such layers
            continue
        best = KS[gains.index(max(gains))]
        rows.append((name, found.draft_bytes / GIB, found.sequences_lost, found.speedup, found.verdict, best))
    columns = ["method", "draft (GiB per GPU)", "sequences it costs", "speed-up at the same acceptance", "verdict"]
    return pd.DataFrame(rows, columns=[*columns, f"fastest k of {KS[0]} to {KS[-1]}"])
