"""Compute, case by case, what common rules of thumb give a single number for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from planner.analysis.sweep import Row, sweep
from planner.engines.deployment import Deployment
from planner.latency.step_model import build_step_model
from planner.memory.concurrency_limits import find_safe_max_num_seqs
from planner.memory.memory_plan import get_memory_plan
from planner.planning.prediction import evaluate
from planner.workload.workload import Workload


def build_sequence_capacity_table(
    cases: Mapping[str, Deployment], traffics: Mapping[str, Workload]
) -> pd.DataFrame:
    """Return each deployment's max_num_seqs at 5% preemption risk; 0 if it does not start."""

    def _read(name: str) -> Row:
        memory = get_memory_plan(cases[name])
        limits = {
            traffic: find_safe_max_num_seqs(memory, load) if memory.can_start else 0
            for traffic, load in traffics.items()
        }
        return {"engine's default": cases[name].args.max_num_seqs, **limits}

    return sweep({"deployment": cases}, _read)


def build_communication_table(
    cases: Mapping[str, Deployment], batch: int, prompt: int, context: int
) -> pd.DataFrame:
    """Return the time to exchange a layer's results (microseconds), and its part of a step.

    Steps are a decode step of `batch` sequences of `context` tokens, and those of one prompt of
    `prompt` tokens alone.
    """

    def _read(name: str) -> Row:
        step, layers = build_step_model(cases[name]), len(cases[name].model.architecture.layers)
        row = {}
        for phase, cost in (
            ("decode", step.estimate_step([], [context] * batch)),
            ("prefill", step.estimate_prompt(prompt)),
        ):
            link = cost.seconds_by_part.get("collectives", 0.0)
            row[f"{phase} (µs per layer)"] = link / layers * 1e6
            row[f"{phase} (% of the step)"] = link / cost.seconds * 100
        return row

    return sweep({"GPUs": cases}, _read)


def compare_step_speed(
    cases: Mapping[str, Deployment], batches: Sequence[int], prompt: int, context: int
) -> pd.DataFrame:
    """Return each case's speed relative to the first, for decode steps and a prompt."""

    def _read(name: str) -> Row:
        step = build_step_model(cases[name])
        row = {
            f"decode, batch {batch}": step.estimate_step([], [context] * batch).seconds
            for batch in batches
        }
        return row | {f"prompt of {prompt:,}": step.estimate_prompt(prompt).seconds}

    seconds = sweep({"weights": cases}, _read).set_index("weights")
    return (seconds.iloc[0] / seconds).reset_index()


def sweep_throughput(
    cases: Mapping[str, Deployment], workload: Workload, concurrencies: Sequence[int]
) -> pd.DataFrame:
    """Return analytical output tokens/s by requests in flight; empty if a case does not start."""

    def _read(name: str) -> Row:
        loads = {n: replace(workload, rate=None, concurrency=n) for n in concurrencies}
        served = {n: evaluate(cases[name], load).performance for n, load in loads.items()}
        return {f"{n} in flight": each and each.output_tps.mid for n, each in served.items()}

    return sweep({"layout": cases}, _read).set_index("layout")
