"""One deployment with one thing moved at a time: load, batch limits, a long prompt beside it, reuse of prefixes.

Frames have columns as people read them, units included; what is predicted stands in them as intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.core.quantities import GIB, Interval, PlannerError
from planner.facts.deployment import Deployment
from planner.facts.workload import Workload
from planner.latency.performance import LATENCIES, POINTS, Performance
from planner.latency.speculation import step_of
from planner.memory.budget import memory_of
from planner.planning.candidate import Candidate, full
from planner.planning.prediction import evaluate, evaluate_all
from planner.planning.scenario import Scenario
from planner.studies.layout_study import served_within

if TYPE_CHECKING:
    import pandas as pd

    from planner.memory.budget import MemoryPlan

PREFIX_CACHE_COST = 0.01
"""Throughput that prefix caching costs where nothing is ever reused: under 1 % (vLLM blog, V1 alpha, January 2025)."""


def one_replica(scenario: Scenario, candidate: Candidate) -> tuple[Deployment, Workload]:
    """One replica of `candidate`, and its share of the scenario's traffic (offline: a full batch)."""
    workload = scenario.workload.share(candidate.deployment.layout.replicas)
    alone = candidate.deployment.with_replicas(1)
    return alone, full(alone, workload) if scenario.offline else workload


def in_flight(performance: Performance) -> float:
    """Requests that are in the system at once, by Little's law: throughput x time in it."""
    return performance.request_tps.mid * performance.e2e["mean"].mid


def figures(performance: Performance) -> dict[str, Interval | float | bool]:
    """A performance in one row: every latency at every percentile in ms, and rates."""
    found: dict[str, Interval | float | bool] = {
        f"{percentile} {metric.upper()} (ms)": getattr(performance, metric)[percentile] * 1e3
        for metric in LATENCIES
        for percentile in POINTS
    }
    found |= {"Output tokens/s": performance.output_tps, "Requests/s": performance.request_tps}
    return found | {"Saturated": performance.saturated}


def promised(scenario: Scenario, metric: str) -> tuple[str, float | None]:
    """The column of `figures` that the service level limits, and the limit in ms; the p95 where it doesn't."""
    found = next((target for target in scenario.service_level if target.metric == metric), None)
    return (f"{found.name} (ms)", found.seconds * 1e3) if found else (f"p95 {metric.upper()} (ms)", None)


def _frame(name: str, cases: Iterable[tuple[float, Deployment, Workload]]) -> pd.DataFrame:
    """One row per case that fits: its value under `name`, then its figures."""
    import pandas as pd

    values, *loads = zip(*cases, strict=True)
    found = zip(values, evaluate_all(zip(*loads, strict=True)), strict=True)
    return pd.DataFrame([{name: value, **figures(one.performance)} for value, one in found if one.performance])


def spaced(low: float, high: float, points: int = 24) -> list[int]:
    """Whole numbers from `low` to `high`, evenly apart on a logarithmic axis."""
    return sorted({round(value) for value in np.geomspace(max(low, 1), max(high, low + 1, 2), points)})


def by_concurrency(deployment: Deployment, workload: Workload, values: Sequence[int]) -> pd.DataFrame:
    """So many requests always in flight: a closed loop."""
    closed = ((n, replace(workload, rate=None, concurrency=n, num_prompts=None)) for n in values)
    return _frame("Requests in flight", ((n, deployment, work) for n, work in closed))


def by_argument(deployment: Deployment, workload: Workload, name: str, values: Sequence[int]) -> pd.DataFrame:
    """Each value as the engine argument `name`; a workload without a rate keeps every slot of each taken."""
    changed = [(value, deployment.with_args(**{name: value})) for value in values]
    return _frame(name, ((v, d, full(d, workload) if workload.rate is None else workload) for v, d in changed))


def gaps(deployment: Deployment, workload: Workload, sequences: int, prompt: int, chunked: bool = True) -> pd.DataFrame:
    """Each gap between outputs of `sequences` decoding ones while a prompt of `prompt` tokens arrives beside them.

    Unchunked, the whole prompt is one step. The first and the last three gaps are undisturbed.
    """
    import pandas as pd

    budget = deployment.args.max_num_batched_tokens if chunked else prompt + sequences
    share = math.ceil(sequences / deployment.layout.pp)  # of the sequences, in one of the batches under way
    step, contexts = step_of(deployment.with_args(max_num_batched_tokens=budget)), [round(workload.context)] * share
    room = budget - share * (1 + step.drafts)
    if room < 1:
        raise PlannerError(f"max_num_batched_tokens {budget} leaves no room beside {share} decoding sequences")
    plain = step.step_seconds([], contexts).seconds
    starts = range(0, prompt, room)
    mixed = [step.step_seconds([(min(room, prompt - start), start)], contexts).seconds for start in starts]
    waits = [plain] * 3 + [plain + (seconds - plain) / step.stages for seconds in mixed] + [plain] * 3
    ends = (np.cumsum(waits) - plain * 3) * 1e3  # the prompt arrives at 0
    spread = [Interval.factor(wait * 1e3, step.sigma_tpot) for wait in waits]
    carries = [False] * 3 + [True] * len(mixed) + [False] * 3
    return pd.DataFrame({"ms": ends, "Gap (ms)": spread, "Prompt in it": carries})


def long_prompt(
    deployment: Deployment, workload: Workload, sequences: int, prompt: int, budgets: Sequence[int]
) -> pd.DataFrame:
    """What a prompt of `prompt` tokens does to everyone else and waits itself, by max_num_batched_tokens.

    The last row is without chunked prefill, for which the engine wants a budget of at least max_model_len.
    """
    import pandas as pd

    rows = []
    whole = max(deployment.args.max_model_len, prompt + sequences)
    for budget, chunked in [*((budget, True) for budget in budgets), (whole, False)]:
        changed = deployment.with_args(max_num_batched_tokens=budget, enable_chunked_prefill=chunked)
        data = gaps(changed, workload, sequences, prompt, chunked)
        disturbed = data[data["Prompt in it"]]
        row = {"max_num_batched_tokens": f"{budget:,}" if chunked else "whole prompt", "Steps": len(disturbed)}
        row |= {"Longest gap (ms)": max(disturbed["Gap (ms)"], key=lambda gap: gap.mid)}
        row |= {"Disturbed for (ms)": float(disturbed["ms"].max())}
        rows.append(row | {"Activations (GiB per GPU)": memory_of(changed).activation / GIB})
    return pd.DataFrame(rows)


def by_reuse(scenario: Scenario, candidate: Candidate, shares: Sequence[float]) -> pd.DataFrame:
    """A share of all prompt tokens found in the prefix cache: TTFT, throughput when full, replicas needed."""
    import pandas as pd

    alone = candidate.deployment.with_args(enable_prefix_caching=True)
    rows = []
    for share in shares:
        workload = replace(scenario.workload, prefix_tokens=0, prefix_hit_rate=share)
        busy, loaded = (evaluate(alone, w).performance for w in (full(alone, workload), workload))
        each = served_within(
            replace(scenario, workload=workload), replace(alone, layout=replace(alone.layout, replicas=1))
        )
        needed = math.ceil((workload.rate or 0) / each) if each else math.nan
        row: dict[str, Any] = {"Prompt tokens found in the cache (%)": share * 100, "Replicas needed": needed}
        row |= {"Requests/s, all slots taken": busy and busy.request_tps}
        rows.append(row | (figures(loaded) if loaded else {}))
    return pd.DataFrame(rows)


def pays_off(reuse: pd.DataFrame) -> float | None:
    """The reuse (%) from which prefix caching wins more throughput than `PREFIX_CACHE_COST`, of a `by_reuse` frame."""
    served = np.array([value.mid for value in reuse["Requests/s, all slots taken"]])
    gain = np.maximum.accumulate(served / served[0] - 1)
    return float(np.interp(PREFIX_CACHE_COST, gain, reuse.iloc[:, 0])) if gain[-1] > PREFIX_CACHE_COST else None


def knee(load: pd.DataFrame, tpot: str, limit: float | None) -> str:
    """What concurrency buys and costs, from a `by_concurrency` frame: alone, and at the last point within the limit."""
    alone, last = load.iloc[0], load.iloc[-1]
    within = load[[limit is None or value.mid <= limit for value in load[tpot]]]
    name = tpot.removesuffix(" (ms)")
    if not len(within):
        return f"Even alone, a request has a {name} of {alone[tpot]:.1f} ms: more than the {limit:,.0f} ms promised."
    end = within.iloc[-1]
    grown = end["Output tokens/s"].mid / alone["Output tokens/s"].mid
    text = (
        f"Alone, a request has a {name} of {alone[tpot]:.1f} ms, and the replica makes {alone['Output tokens/s']:,.0f} "
        f"output tokens/s. With {end['Requests in flight']:,.0f} in flight it makes {grown:.1f} times as much, while "
        f"the {name} is {end[tpot].mid / alone[tpot].mid:.1f} times as long: {end[tpot]:.1f} ms."
    )
    if limit is None or len(within) == len(load):
        return text
    beyond = f"at {last['Requests in flight']:,.0f} it is {last[tpot]:.0f} ms"
    return f"{text} More breaks the promise of {limit:,.0f} ms; {beyond}."


def reuse_worth(reuse: pd.DataFrame, memory: MemoryPlan, workload: Workload, kv_usage: float) -> str:
    """From which reuse on prefix caching pays, where it saves replicas, and how many prompts the cache can keep."""
    pays, replicas = pays_off(reuse), reuse["Replicas needed"]
    text = (
        f"Prefix caching pays off above **{pays:.1f} %** of prompt tokens found again."
        if pays is not None
        else "Prompts are so small a part of this work that finding them again saves less than looking for them costs."
    )
    fewer = reuse[replicas < replicas.iloc[0]]
    if len(fewer):
        share, count = fewer.iloc[0][[reuse.columns[0], "Replicas needed"]]
        text += f" From about {share:.0f} % on, {count:.0f} instead of {replicas.iloc[0]:.0f} replicas are enough."
    elif replicas.iloc[0] == 1:
        text += " One replica is needed in any case."
    spare = round(memory.pool.kv_tokens * (1 - kv_usage), -3)
    return text + (
        f" What is kept must fit: of the {memory.pool.kv_tokens:,} tokens in one replica's KV pool, running requests "
        f"leave about {spare:,.0f}: room to remember {spare / workload.prompt.mean:,.0f} prompts of mean length."
    )
