"""Tables of the batching chapter: a batch that grows, a long prompt, and prefixes found again."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from planner.analysis.sweep import Row, read_estimate, sweep
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.latency.power import estimate_gpu_activity
from planner.latency.step_model import build_step_model
from planner.latency.step_work import count_step_work
from planner.memory.memory_plan import get_memory_plan
from planner.planning.candidate import Candidate
from planner.planning.evaluation import saturate_workload
from planner.planning.prediction import evaluate
from planner.planning.scenario import Scenario
from planner.workload.workload import Workload


def get_slo_column(scenario: Scenario, metric: str) -> tuple[str, float | None]:
    """Return the sweep column with an SLO for `metric`, and its limit in ms; without one, p95."""
    target = next((t for t in scenario.slo_targets if t.metric == metric), None)
    return (
        (f"{target.name} (ms)", target.seconds * 1e3)
        if target
        else (f"p95 {metric.upper()} (ms)", None)
    )


def sweep_batch(deployment: Deployment, workload: Workload, values: Iterable[int]) -> pd.DataFrame:
    """Return latencies, throughput, and use of bandwidth and arithmetic by requests in flight.

    They are of one replica, analytical. Arithmetic is two FLOP for each active parameter and token
    against the peak of the weights' own format; the bandwidth is what is read.
    """
    replica, gpu = deployment.with_replicas(1), deployment.gpu
    dtype = max(count_step_work(replica).matmuls, key=lambda work: work.flops).dtype
    flops = 2 * deployment.model.architecture.params_active / replica.layout.num_gpus

    def _read(requests: int) -> Row:
        load = replace(workload, rate=None, concurrency=requests, num_prompts=None, trace=None)
        row, performance = read_estimate(replica, load), evaluate(replica, load).performance
        assert performance is not None
        rate = performance.request_tps.mid
        computed = rate * (load.prompt.mean - load.mean_cached_tokens + load.output.mean)
        moved = estimate_gpu_activity(replica, load, rate, performance.decode_batch).bytes
        return row | {
            "bandwidth used (%)": moved / gpu.memory_bandwidth * 100,
            "arithmetic used (%)": computed * flops / gpu.peak_flops[dtype] * 100,
        }

    return sweep({"requests in flight": values}, _read)


def simulate_prefill_gaps(
    deployment: Deployment, workload: Workload, sequences: int, prompt: int, chunked: bool = True
) -> pd.DataFrame:
    """Return each gap between outputs of `sequences` while a prompt of `prompt` tokens runs.

    Unchunked, the prompt is one step. The first and the last three gaps are undisturbed.
    """
    budget = deployment.args.max_num_batched_tokens if chunked else prompt + sequences
    batch = math.ceil(sequences / deployment.layout.pp)  # in each concurrent batch
    step = build_step_model(deployment.with_args(max_num_batched_tokens=budget), workload)
    contexts = [round(workload.mean_decode_context)] * batch
    chunk_tokens = budget - batch * (1 + step.num_draft_tokens)
    if chunk_tokens < 1:
        raise PlannerError(
            f"max_num_batched_tokens {budget} leaves no room beside {batch} decoding sequences"
        )
    plain = step.estimate_step([], contexts).seconds
    starts = range(0, prompt, chunk_tokens)
    mixed = [
        step.estimate_step([(min(chunk_tokens, prompt - start), start)], contexts).seconds
        for start in starts
    ]
    gaps = (
        [plain] * 3 + [plain + (seconds - plain) / step.stages for seconds in mixed] + [plain] * 3
    )
    ends = (np.cumsum(gaps) - plain * 3) * 1e3  # the prompt arrives at time 0
    intervals = [Interval.from_lognormal(wait * 1e3, step.sigma_tpot) for wait in gaps]
    has_prompt = [False] * 3 + [True] * len(mixed) + [False] * 3
    return pd.DataFrame({"ms": ends, "Gap (ms)": intervals, "Prompt in it": has_prompt})


def sweep_long_prompt(
    deployment: Deployment, workload: Workload, sequences: int, prompt: int, budgets: Sequence[int]
) -> pd.DataFrame:
    """Return the effect of a long prompt on others and its own wait by max_num_batched_tokens."""
    sizes = {f"{budget:,}": budget for budget in budgets}
    sizes["whole prompt"] = max(deployment.args.max_model_len, prompt + sequences)

    def _read(name: str) -> Row:
        chunked = name != "whole prompt"
        changed = deployment.with_args(
            max_num_batched_tokens=sizes[name], enable_chunked_prefill=chunked
        )
        data = simulate_prefill_gaps(changed, workload, sequences, prompt, chunked)
        disturbed = data[data["Prompt in it"]]
        return {
            "Steps": len(disturbed),
            "Longest gap (ms)": max(disturbed["Gap (ms)"], key=lambda gap: gap.mid),
            "Disturbed for (ms)": float(disturbed["ms"].max()),
            "Activations (GiB per GPU)": get_memory_plan(changed).activation / GIB,
        }

    return sweep({"max_num_batched_tokens": sizes}, _read)


def sweep_prefix_reuse(
    scenario: Scenario, candidate: Candidate, shares: Sequence[float]
) -> pd.DataFrame:
    """Return latencies and saturated throughput by the fraction of cached prompt tokens."""
    deployment = candidate.deployment.with_args(enable_prefix_caching=True)

    def _read(percent: float) -> Row:
        load = replace(scenario.workload, prefix_tokens=0, prefix_hit_rate=percent / 100)
        full = evaluate(deployment, saturate_workload(deployment, load)).performance
        served = {"Requests/s, all slots taken": full and full.request_tps}
        return served | read_estimate(deployment, load)

    return sweep({"Prompt tokens found in the cache (%)": [s * 100 for s in shares]}, _read)
