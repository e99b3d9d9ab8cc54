"""Tables of the speculation chapter: methods, break-even acceptance and cost of each draft."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from planner.analysis.sweep import Row, sweep
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.engines.layout import SpeculationConfig
from planner.engines.speculation_methods import explain_unsupported_method, load_draft_methods
from planner.latency.speculative_decoding import (
    SpeculationSpeedup,
    evaluate_speculation,
    find_break_even_acceptance,
    find_profitable_batches,
)
from planner.latency.step_model import compute_expected_tokens
from planner.memory.memory_plan import plan_memory
from planner.planning.scenario import Scenario

EXAMPLE_DRAFT = SpeculationConfig("eagle3", 3, 0.62)
"""Used if a scenario names no draft: chat-70b's source for an EAGLE-3 head."""
DRAFT_TOKEN_COUNTS = range(1, 9)
"""Numbers of drafted tokens to try."""


def list_available_methods(deployment: Deployment) -> tuple[str, ...]:
    """List the engine's draft methods that need no draft model, and no layers the target lacks."""
    missing = {"model"} if deployment.model.architecture.mtp_layers else {"model", "mtp"}
    names = (name for name, method in load_draft_methods().items() if method.draft not in missing)
    return tuple(name for name in names if not explain_unsupported_method(name, deployment.engine))


def propose_drafts(scenario: Scenario, deployment: Deployment) -> Deployment:
    """Return `deployment` with its own drafts, else the scenario's, else an example's."""
    entry = scenario.speculation
    config = deployment.speculation or (entry.to_config() if entry else EXAMPLE_DRAFT)
    return replace(deployment, speculation=config)


def compare_draft(drafted: Deployment, batch: float, context: float) -> SpeculationSpeedup:
    """Compare decoding with drafts to decoding without."""
    memory = plan_memory(replace(drafted, speculation=None))
    return evaluate_speculation(drafted, batch, context, memory)


def list_step_parts(speedup: SpeculationSpeedup) -> pd.DataFrame:
    """List the milliseconds per token and sequence by part, with and without speculation."""
    per = 1e3 / speedup.tokens_per_step
    rows = [
        ("without", "target", speedup.plain_s * 1e3),
        ("with", "target", speedup.verify_s * per),
        ("with", "draft", speedup.draft_s * per),
    ]
    return pd.DataFrame(rows, columns=["way", "part", "ms per token"])


def draft_tokens(deployment: Deployment, k: int) -> Deployment:
    """Return `deployment` with `k` drafted tokens a step."""
    assert deployment.speculation is not None
    drafted = replace(deployment.speculation, num_speculative_tokens=k)
    return replace(deployment, speculation=drafted)


def sweep_break_even(
    deployment: Deployment, batches: Sequence[float], ks: Sequence[int], context: float
) -> pd.DataFrame:
    """Return the break-even acceptance rate for each k and batch that has one."""

    def _read(k: int, batch: float) -> Row:
        rate = find_break_even_acceptance(draft_tokens(deployment, k), batch, context)
        return {"acceptance_rate": rate}

    return sweep({"k": ks, "batch": batches}, _read).dropna()


def sweep_speedup(
    deployment: Deployment,
    batches: Sequence[float],
    rates: Sequence[float],
    ks: Sequence[int],
    context: float,
) -> pd.DataFrame:
    """Return the speed-up for every combination: columns k, batch, acceptance_rate, speedup."""
    speedups = {
        (k, batch): evaluate_speculation(draft_tokens(deployment, k), batch, context)
        for k in ks
        for batch in batches
    }

    def _read(k: int, batch: float, rate: float) -> Row:
        tokens = compute_expected_tokens(rate, k)
        return {"speedup": replace(speedups[k, batch], tokens_per_step=tokens).speedup.mid}

    return sweep({"k": ks, "batch": batches, "acceptance_rate": rates}, _read)


def build_draft_table(drafted: Deployment, batch: float, context: float) -> pd.DataFrame:
    """Return GiB per GPU, lost sequences, speed-up at `batch` and the fastest k of each method.

    Methods that the model has no layers for, such as MTP, are left out.
    """
    config = drafted.speculation
    assert config is not None

    def _read(name: str) -> Row:
        tried = replace(drafted, speculation=replace(config, method=name))
        found = compare_draft(tried, batch, context)
        speedups = {
            k: evaluate_speculation(draft_tokens(tried, k), batch, context).speedup.mid
            for k in DRAFT_TOKEN_COUNTS
        }
        fastest = f"fastest k of {DRAFT_TOKEN_COUNTS[0]} to {DRAFT_TOKEN_COUNTS[-1]}"
        return {
            "draft (GiB per GPU)": found.draft_bytes / GIB,
            "sequences it costs": found.num_sequences_lost,
            "speed-up at the same acceptance": found.speedup, "verdict": found.verdict,
            fastest: max(speedups, key=speedups.__getitem__),
        }  # fmt: skip

    return sweep(
        {"method": dict.fromkeys((config.method, *list_available_methods(drafted)))}, _read
    )


def describe_break_even(drafted: Deployment, batch: int, context: float) -> str:
    """Describe at which batches drafts pay, and from which acceptance rate on at this one."""
    ranges = " and ".join(
        f"{first:,} to {last:,}" if first < last else f"{first:,}"
        for first, last in find_profitable_batches(drafted, context)
    )
    needed = find_break_even_acceptance(drafted, batch, context)
    at_least = "at no acceptance" if needed is None else f"from {needed:.0%} acceptance on"
    return (
        f"At this acceptance it pays at {ranges or 'no number of'} sequences at once, of"
        f" {drafted.args.max_num_seqs:,} slots (max_num_seqs); at the {batch:,} of the plan"
        f" {at_least}."
    )
