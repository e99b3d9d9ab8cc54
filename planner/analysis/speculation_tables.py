"""Tables of the speculation chapter: by load, break-even acceptance and cost of each draft."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from planner.analysis.load_curves import get_load, set_load
from planner.analysis.sweep import Row, judge_benefit, sweep
from planner.core.number_format import format_number
from planner.core.text import format_count
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.engines.layout import SpeculationConfig
from planner.engines.speculation_methods import explain_unsupported_method, load_draft_methods
from planner.latency.performance import Performance
from planner.latency.speculative_decoding import (
    SpeculationSpeedup,
    evaluate_speculation,
    find_break_even_acceptance,
)
from planner.latency.step_model import compute_expected_tokens
from planner.memory.memory_plan import plan_memory
from planner.planning.prediction import evaluate_batch
from planner.planning.scenario import Scenario
from planner.workload.workload import Workload

EXAMPLE_DRAFT = SpeculationConfig("eagle3", 3, 0.62)
"""Used if a scenario names no draft: chat-70b's source for an EAGLE-3 head."""
DRAFT_TOKEN_COUNTS = range(1, 9)
"""Numbers of drafted tokens to try."""
SHOWN_LOAD_SHARES, NUM_JUDGED_LOADS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 0.9), 100
"""Loads of the table as shares of the most without drafts, and loads that are judged up to the most."""
LOAD_UNITS = {"Requests/s": "requests/s", "Concurrent requests": "requests in flight"}
"""How sentences name what `get_load` names."""


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


def sweep_speedup(
    deployment: Deployment,
    batches: Sequence[float],
    rates: Sequence[float],
    ks: Sequence[int],
    context: float,
) -> pd.DataFrame:
    """Return the speed-up for every combination: columns k, batch, acceptance_rate, speedup,
    and the same as effect and as text."""
    speedups = {
        (k, batch): evaluate_speculation(draft_tokens(deployment, k), batch, context)
        for k in ks
        for batch in batches
    }

    def _read(k: int, batch: float, rate: float) -> Row:
        tokens = compute_expected_tokens(rate, k)
        speedup = replace(speedups[k, batch], tokens_per_step=tokens).speedup.mid
        return {"speedup": speedup, "effect": judge_benefit(speedup - 1), "told": f"{speedup:.2g}"}

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


def describe_drafts(scenario: Scenario, deployment: Deployment, drafted: Deployment) -> str:
    """Describe which drafts the chapter considers, and how they differ from the scenario's."""
    entry, config = scenario.speculation, drafted.speculation
    assert config is not None
    k, acceptance = config.num_speculative_tokens, f"{config.acceptance_rate:.0%} acceptance"
    if entry is None:
        origin = "an example, as the scenario names none"
    elif deployment.speculation is None:
        origin = "as the scenario names them; the plan itself does without"
    elif k == entry.num_speculative_tokens:
        origin = "as the scenario names them and the plan uses them"
    else:
        origin = (
            f"the plan's; the scenario names k = {entry.num_speculative_tokens}, and the search also tries other"
            " k: it takes the one that meets the targets for the least money, of equals the likeliest"
        )
    return f"{config.method} with k = {k} drafted tokens at {acceptance} ({origin})"


def build_load_table(
    drafted: Deployment, workload: Workload, context: float
) -> pd.DataFrame | None:
    """Return mean TPOT (ms) and decoding sequences of an engine without and with drafts, by load.

    Loads are of all replicas: shares of the most that is served without drafts, and the workload's
    own. The figures are analytical, prompts included. None if there is nothing to compare.
    """
    label, own = get_load(workload)
    if (most := _find_most_loads(drafted, workload)) is None:
        return None
    shown = {float(f"{share * most[0]:.2g}") for share in SHOWN_LOAD_SHARES}
    rows = []
    for load, plain, helped in _estimate_loads(
        drafted, workload, sorted({*shown, *([own] if own <= most[0] else [])})
    ):
        found = compare_draft(drafted, max(plain.decode_batch, 1.0), context)
        before, after = (each.tpot["mean"].mid * 1e3 for each in (plain, helped))
        gained = found.speedup * (before / after / found.speedup.mid)
        rows.append(
            {
                label: load,
                "at once, without": plain.decode_batch,
                "at once, with": helped.decode_batch,
                "TPOT without (ms)": before,
                "TPOT with (ms)": "growing" if helped.saturated else after,
                "speed-up": "" if helped.saturated else gained,
            }
        )
    return pd.DataFrame(rows)


def describe_paying_loads(drafted: Deployment, workload: Workload) -> str:
    """Describe up to which load the mean TPOT is shorter with drafts, and what is served at most.

    The loads end at what engines with drafts serve.
    """
    if (most := _find_most_loads(drafted, workload)) is None:
        return (
            "No load is compared: answers of one token have no decode steps."
            if workload.output.mean <= 1
            else "No load is compared: without or with drafts the engine does not start."
        )
    label, _ = get_load(workload)
    unit, (plain_most, drafted_most) = LOAD_UNITS[label], most
    loads = [drafted_most * step / NUM_JUDGED_LOADS for step in range(1, NUM_JUDGED_LOADS + 1)]
    found = _estimate_loads(drafted, workload, loads)
    pays = np.array(
        [
            plain.saturated
            or (not helped.saturated and helped.tpot["mean"].mid < plain.tpot["mean"].mid)
            for _, plain, helped in found
        ]
    )
    edges = np.flatnonzero(np.diff(pays, prepend=False, append=False)).tolist()
    ranges = [
        ("" if first == 0 else f"from {format_number(found[first][0], 2)} ")
        + f"up to **{format_number(found[beyond - 1][0], 2)} {unit}**"
        f" ({found[beyond - 1][2].decode_batch:,.0f} sequences decoding at once in an engine)"
        for first, beyond in zip(edges[::2], edges[1::2], strict=True)
    ]
    text = f"Drafts pay {' and '.join(ranges)}" if ranges else "Drafts pay at no load"
    if pays[-1]:
        text += ", which is all that engines with drafts serve"
    if label == "Requests/s":
        text += (
            f". However long requests may wait, the plan serves {plain_most:.3g} {unit} without"
            f" drafts and {drafted_most:.3g} with them"
        )
    return text + "."


def _find_most_loads(drafted: Deployment, workload: Workload) -> tuple[float, float] | None:
    """Return the most load without and with drafts: the capacity, or all slots of a closed loop.

    None if either does not start, or nothing is decoded.
    """
    label, own = get_load(workload)
    if workload.output.mean <= 1 or not (found := _estimate_loads(drafted, workload, [own])):
        return None
    if label != "Requests/s":
        return float(drafted.num_slots), float(drafted.num_slots)
    _, plain, helped = found[0]
    assert plain.capacity is not None and helped.capacity is not None
    return plain.capacity.mid, helped.capacity.mid


def _estimate_loads(
    drafted: Deployment, workload: Workload, loads: Iterable[float]
) -> list[tuple[float, Performance, Performance]]:
    """Estimate each load without and with drafts; none if either does not start."""
    ordered = list(loads)
    cases = [
        (deployment, set_load(workload, load))
        for load in ordered
        for deployment in (replace(drafted, speculation=None), drafted)
    ]
    found = [prediction.performance for prediction in evaluate_batch(cases)]
    return [
        (load, plain, helped)
        for load, plain, helped in zip(ordered, found[::2], found[1::2], strict=True)
        if plain and helped
    ]


def describe_break_even(drafted: Deployment, batch: int, context: float) -> str:
    """Describe from which acceptance rate on drafts pay at this batch, in decode steps alone."""
    needed = find_break_even_acceptance(drafted, batch, context)
    at_least = "at no acceptance" if needed is None else f"from {needed:.0%} acceptance on"
    return f"With {format_count(batch, 'sequence')} at once, as in the plan, drafts pay {at_least}."
