"""Compute, case by case, what common rules of thumb give a single number for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from planner.engines.deployment import Deployment
from planner.latency.speculative_decoding import build_step_model
from planner.memory.concurrency_limits import find_safe_max_num_seqs
from planner.memory.memory_plan import get_memory_plan
from planner.memory.weights import compute_stage_bytes
from planner.planning.prediction import evaluate_batch
from planner.workload.workload import Workload


def compute_bytes_per_parameter(deployment: Deployment) -> float:
    """Return bytes per model parameter on all GPUs of a replica.

    Scales and unquantized layers are included.
    """
    layout = deployment.layout
    ranks = layout.tp * layout.dp
    return sum(compute_stage_bytes(deployment)) * ranks / deployment.model.architecture.params_total


def build_sequence_capacity_table(
    cases: Mapping[str, Deployment], traffics: Mapping[str, Workload]
) -> pd.DataFrame:
    """Return each deployment's max_num_seqs at 5% preemption risk; 0 if it does not start."""
    rows = []
    for name, deployment in cases.items():
        memory = get_memory_plan(deployment)
        limits = [
            find_safe_max_num_seqs(memory, traffic) if memory.can_start else 0
            for traffic in traffics.values()
        ]
        rows.append((name, deployment.args.max_num_seqs, *limits))
    return pd.DataFrame(rows, columns=["deployment", "engine's default", *traffics])


def build_communication_table(
    cases: Mapping[str, Deployment], batch: int, prompt: int, context: int
) -> pd.DataFrame:
    """Return the time to exchange a layer's results (microseconds), and its part of a step.

    Steps are a decode step of `batch` sequences of `context` tokens, and those of one prompt of
    `prompt` tokens alone.
    """
    rows = []
    for name, deployment in cases.items():
        step = build_step_model(deployment)
        costs = step.estimate_step([], [context] * batch), step.estimate_prompt(prompt)
        links = [cost.seconds_by_part.get("collectives", 0.0) for cost in costs]
        layers = len(deployment.model.architecture.layers)
        row: dict[str, object] = {"GPUs": name}
        for phase, link, cost in zip(("decode", "prefill"), links, costs, strict=True):
            row[f"{phase} (µs per layer)"] = link / layers * 1e6
            row[f"{phase} (% of the step)"] = link / cost.seconds * 100
        rows.append(row)
    return pd.DataFrame(rows)


def compare_step_speed(
    cases: Mapping[str, Deployment], batches: Sequence[int], prompt: int, context: int
) -> pd.DataFrame:
    """Return each case's speed relative to the first, for decode steps and a prompt."""
    seconds = {}
    for name, deployment in cases.items():
        step = build_step_model(deployment)
        seconds[name] = [step.estimate_step([], [context] * batch).seconds for batch in batches]
        seconds[name].append(step.estimate_prompt(prompt).seconds)
    first = next(iter(seconds.values()))
    rows = [
        (name, *(a / b for a, b in zip(first, times, strict=True)))
        for name, times in seconds.items()
    ]
    columns = [f"decode, batch {batch}" for batch in batches] + [f"prompt of {prompt:,}"]
    return pd.DataFrame(rows, columns=["weights", *columns])


def sweep_throughput(
    cases: Mapping[str, Deployment], workload: Workload, concurrencies: Sequence[int]
) -> pd.DataFrame:
    """Return analytical output tokens/s by requests in flight; empty if a case does not start."""
    loads = [replace(workload, rate=None, concurrency=n) for n in concurrencies]
    predictions = evaluate_batch(
        (deployment, load) for deployment in cases.values() for load in loads
    )
    speeds = [
        prediction.performance.output_tps.mid if prediction.performance else None
        for prediction in predictions
    ]
    rows = [speeds[k : k + len(loads)] for k in range(0, len(speeds), len(loads))]
    columns = [f"{n} in flight" for n in concurrencies]
    return pd.DataFrame(rows, columns=columns, index=pd.Index(cases, name="layout"))
