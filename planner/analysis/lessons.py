"""What the lessons' tables read of a deployment, an estimate or a simulation."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from planner.analysis.sweep import Row, build_latency_row, sweep
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.latency.performance import LATENCY_METRICS, Performance
from planner.latency.step_model import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.prediction import evaluate
from planner.simulator.results import SimulationResult
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

Tokens = int | tuple[int, int]
"""Tokens of every request, or their mean and 95th percentile."""


def build_traffic(
    prompt: Tokens, output: Tokens, rate: float | None = None, **load: Any
) -> Workload:
    """Return traffic of such prompts and answers, at 1 request/s where no load is given."""
    prompts, answers = (
        LengthDistribution.from_constant(tokens)
        if isinstance(tokens, int)
        else LengthDistribution.from_lognormal(tokens[0], p95=tokens[1])
        for tokens in (prompt, output)
    )
    return Workload(prompts, answers, rate=rate if rate or "concurrency" in load else 1, **load)


def read_pool(deployment: Deployment, tokens: int = 2000) -> Row:
    """Return the memory of a GPU, and what the KV pools of all engines hold; 0 if it does not start."""
    memory = get_memory_plan(deployment)
    held = deployment.num_engine_instances if memory.can_start else 0
    return {
        "weights (GiB a GPU)": memory.weights.mid / GIB,
        "KV (bytes per token and GPU)": memory.layout.kv_bytes_per_token,
        "KV pool (tokens)": held and held * memory.pool.reported_tokens,
        f"requests of {tokens:,} that fit": held and held * memory.pool.count_sequences(tokens),
        "starts": memory.status.replace("_", " "),
    }


def read_performance(performance: Performance | None) -> Row:
    """Return the middles of an estimate; nothing if there is none."""
    if performance is None:
        return {}
    latencies: Row = build_latency_row(performance)
    return {
        "requests/s": performance.request_tps.mid,
        "output tokens/s": round(performance.output_tps.mid),
        **{name: each.mid for name, each in latencies.items()},
        "KV cache in use (%)": round(100 * performance.kv_usage),
        "limit": performance.bottleneck,
    }


def read_run(run: SimulationResult) -> Row:
    """Return throughput, latencies and preemptions of one simulation."""
    return {
        "requests/s": run.request_tps,
        "output tokens/s": run.output_tps,
        **{
            f"{at} {name.upper()} (ms)": seconds * 1e3
            for name in LATENCY_METRICS
            for at, seconds in run.summarize(name).items()
        },
        "preemptions per request": run.preemptions.mean(),
        "decoding at once": run.decode_batch,
    }


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
    cases: Mapping[str, Deployment], prompt: Tokens, output: Tokens, concurrencies: Sequence[int]
) -> pd.DataFrame:
    """Return analytical output tokens/s by requests in flight; empty if a case does not start."""

    def _read(name: str) -> Row:
        loads = {n: build_traffic(prompt, output, concurrency=n) for n in concurrencies}
        served = {n: evaluate(cases[name], load).performance for n, load in loads.items()}
        return {f"{n} in flight": each and each.output_tps.mid for n, each in served.items()}

    return sweep({"layout": cases}, _read).set_index("layout")
