"""Tables of the speculation chapter: where drafts pay, by load, batch and acceptance."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from planner.analysis.load_curves import get_load, list_draft_loads
from planner.analysis.sweep import Row, judge_benefit, sweep
from planner.core.text import format_count
from planner.engines.deployment import Deployment
from planner.engines.layout import SpeculationConfig
from planner.engines.speculation_methods import explain_unsupported_method, load_draft_methods
from planner.latency.speculative_decoding import (
    SpeculationSpeedup,
    evaluate_speculation,
    find_break_even_acceptance,
)
from planner.latency.step_model import compute_expected_tokens
from planner.memory.memory_plan import plan_memory
from planner.planning.scenario import Scenario
from planner.workload.workload import Workload

EXAMPLE_DRAFT = SpeculationConfig("eagle3", 3, 0.62)
"""Used if a scenario names no draft: chat-70b's source for an EAGLE-3 head."""


def list_available_methods(deployment: Deployment) -> tuple[str, ...]:
    """List the engine's draft methods that need no draft model, and no layers the target lacks."""
    missing = {"model"} if deployment.model.architecture.mtp_layers else {"model", "mtp"}
    names = (name for name, method in load_draft_methods().items() if method.draft not in missing)
    return tuple(name for name in names if not explain_unsupported_method(name, deployment.engine))


def propose_drafts(scenario: Scenario, deployment: Deployment) -> tuple[Deployment, str]:
    """Return `deployment` with its own drafts, else the scenario's, else an example's, in words."""
    entry = scenario.speculation
    if deployment.speculation:
        config, whose = deployment.speculation, "the plan's own"
    elif entry:
        config, whose = entry.to_config(), "the scenario's; the plan does without"
    else:
        config, whose = EXAMPLE_DRAFT, "an example, as the scenario names none"
    k, rate = config.num_speculative_tokens, config.acceptance_rate
    drafted = replace(deployment, speculation=config)
    return (
        drafted,
        f"{config.method} with k = {k} drafted tokens at {rate:.0%} acceptance ({whose})",
    )


def compare_draft(drafted: Deployment, batch: float, context: float) -> SpeculationSpeedup:
    """Compare decoding with drafts to decoding without."""
    memory = plan_memory(replace(drafted, speculation=None))
    return evaluate_speculation(drafted, batch, context, memory)


def sweep_speedup(
    deployment: Deployment,
    batches: Sequence[float],
    rates: Sequence[float],
    ks: Sequence[int],
    context: float,
) -> pd.DataFrame:
    """Return the speed-up for every combination: columns k, batch, acceptance rate, speedup,
    and the same as effect and as text."""
    assert deployment.speculation is not None
    speedups = dict[tuple[int, float], SpeculationSpeedup]()
    for k in ks:
        config = replace(deployment.speculation, num_speculative_tokens=k)
        drafted = replace(deployment, speculation=config)
        speedups |= {(k, batch): evaluate_speculation(drafted, batch, context) for batch in batches}

    def _read(k: int, batch: float, rate: float) -> Row:
        tokens = compute_expected_tokens(rate, k)
        speedup = replace(speedups[k, batch], tokens_per_step=tokens).speedup.mid
        return {"speedup": speedup, "effect": judge_benefit(speedup - 1), "told": f"{speedup:.2g}"}

    return sweep({"k": ks, "batch": batches, "acceptance rate": rates}, _read)


def sweep_draft_loads(drafted: Deployment, workload: Workload) -> pd.DataFrame | None:
    """Return `list_draft_loads` as a table in ms; None if nothing can be compared."""
    rows, (label, _) = list_draft_loads(drafted, workload), get_load(workload)
    columns = [label.lower(), "without", "with"]
    return pd.DataFrame(rows, columns=columns, dtype=float) * [1, 1e3, 1e3] if rows else None


def describe_break_even(drafted: Deployment, batch: int, context: float) -> str:
    """Describe from which acceptance rate on drafts pay at this batch, in decode steps alone."""
    needed = find_break_even_acceptance(drafted, batch, context)
    at_least = "at no acceptance" if needed is None else f"from {needed:.0%} acceptance on"
    return f"With {format_count(batch, 'sequence')} at once, as in the plan, drafts pay {at_least}."
