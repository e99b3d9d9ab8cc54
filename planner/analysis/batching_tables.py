"""Tables of the batching chapter: load, bursts, a long prompt, prefix reuse and adapters."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from planner.analysis.layout_tables import estimate_max_rps
from planner.analysis.load_ramp import build_surge_workload, simulate_timeline
from planner.analysis.sweep import Row, read_estimate, sweep
from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.latency.step_model import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.candidate import Candidate
from planner.planning.capacity import PREFIX_CACHE_OVERHEAD_FRACTION
from planner.planning.evaluation import saturate_workload
from planner.planning.prediction import evaluate
from planner.planning.scenario import Scenario
from planner.planning.search import search_analytically
from planner.workload.workload import Workload, compute_zipf_fractions


def split_workload(scenario: Scenario, deployment: Deployment) -> Workload:
    """Return the part of the traffic that one replica gets (offline: a full batch)."""
    workload, replica = (
        scenario.workload.split(deployment.layout.replicas), deployment.with_replicas(1),
    )  # fmt: skip
    return saturate_workload(replica, workload) if scenario.offline else workload


def count_requests_in_flight(candidate: Candidate) -> int:
    """Count the requests at once on one replica, by Little's law."""
    performance = candidate.prediction.performance
    assert performance is not None
    inside = performance.request_tps.mid * performance.e2e["mean"].mid
    return max(1, round(inside / candidate.deployment.layout.replicas))


def get_slo_column(scenario: Scenario, metric: str) -> tuple[str, float | None]:
    """Return the sweep column with an SLO for `metric`, and its limit in ms; without one, p95."""
    target = next((t for t in scenario.slo_targets if t.metric == metric), None)
    return (
        (f"{target.name} (ms)", target.seconds * 1e3)
        if target
        else (f"p95 {metric.upper()} (ms)", None)
    )


def sweep_concurrency(
    deployment: Deployment, workload: Workload, values: Iterable[int]
) -> pd.DataFrame:
    """Return latencies and throughput of closed loops by requests in flight, if they fit."""

    def _read(requests: int) -> Row:
        load = replace(workload, rate=None, concurrency=requests, num_prompts=None)
        return read_estimate(deployment, load)

    return sweep({"Requests in flight": values}, _read)


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


def simulate_long_prompt(
    deployment: Deployment, workload: Workload, sequences: int, prompt: int
) -> tuple[dict[str, pd.DataFrame], pd.DataFrame]:
    """Simulate a long prompt beside decoding `sequences`: gaps by case, and other budgets."""
    own = deployment.args.max_num_batched_tokens
    gaps = {
        f"with chunked prefill, {budget:,} tokens a step": simulate_prefill_gaps(
            deployment.with_args(max_num_batched_tokens=budget), workload, sequences, prompt
        )
        for budget in sorted({2048, own})
    }
    gaps["without: the whole prompt in one step"] = simulate_prefill_gaps(
        deployment, workload, sequences, prompt, chunked=False
    )
    ladder = {size for size in (512, 1024, 2048, 4096, 8192) if size >= 2 * sequences}
    sizes = sorted({own, *ladder})
    return gaps, sweep_long_prompt(deployment, workload, sequences, prompt, sizes)


def simulate_cases(
    cases: Mapping[str, tuple[Deployment, Workload]], seconds: float
) -> dict[str, pd.DataFrame]:
    """Simulate one engine in each case: gauges over time by its name and its tail in words."""
    told = {name: simulate_timeline(*case, seconds) for name, case in cases.items()}
    return {f"{name}: {text}": gauges for name, (text, gauges) in told.items()}


def simulate_bursts(
    deployment: Deployment, workload: Workload, burstiness: float, surge: float, seconds: float
) -> dict[str, pd.DataFrame]:
    """Simulate one engine as planned, in bursts, and with a surge in the middle."""
    loads = {
        "as planned": workload,
        f"burstiness {burstiness:g}": replace(workload, trace=None, burstiness=burstiness),
        f"{surge:g} times the rate in the second third": build_surge_workload(
            workload, surge, seconds
        ),
    }
    return simulate_cases({name: (deployment, load) for name, load in loads.items()}, seconds)


def sweep_prefix_reuse(
    scenario: Scenario, candidate: Candidate, shares: Sequence[float]
) -> pd.DataFrame:
    """Return TTFT, saturated throughput and replicas by the fraction of cached prompt tokens."""
    deployment = candidate.deployment.with_args(enable_prefix_caching=True)

    def _read(percent: float) -> Row:
        load = replace(scenario.workload, prefix_tokens=0, prefix_hit_rate=percent / 100)
        full = evaluate(deployment, saturate_workload(deployment, load)).performance
        max_rps = estimate_max_rps(replace(scenario, workload=load), deployment.with_replicas(1))
        needed = math.ceil((load.rate or 0) / max_rps) if max_rps else math.nan
        served = {
            "Replicas needed": needed,
            "Requests/s, all slots taken": full and full.request_tps,
        }
        return served | read_estimate(deployment, load)

    return sweep({"Prompt tokens found in the cache (%)": [s * 100 for s in shares]}, _read)


def find_break_even_reuse(reuse: pd.DataFrame) -> float | None:
    """Find the reuse (%) whose gain in throughput exceeds `PREFIX_CACHE_OVERHEAD_FRACTION`.

    `reuse` comes from `sweep_prefix_reuse`.
    """
    served = np.array([value.mid for value in reuse["Requests/s, all slots taken"]])
    gain = np.maximum.accumulate(served / served[0] - 1)
    return (
        float(np.interp(PREFIX_CACHE_OVERHEAD_FRACTION, gain, reuse.iloc[:, 0]))
        if gain[-1] > PREFIX_CACHE_OVERHEAD_FRACTION
        else None
    )


def describe_prefix_reuse(candidate: Candidate, workload: Workload, reuse: pd.DataFrame) -> str:
    """Describe from where on prefix caching pays, and what the KV cache has room for."""
    performance, pool = candidate.prediction.performance, candidate.prediction.memory.pool
    if performance is None or (pays := find_break_even_reuse(reuse)) is None:
        return (
            "Prompts are so small a part of this work that finding them again saves less than"
            " looking for them costs."
        )
    kept = pool.reported_tokens * (1 - performance.kv_usage)
    most, fewest = (reuse["Replicas needed"].iloc[at] for at in (0, -1))
    needed = f"; replicas needed: {most:.0f} without, {fewest:.0f} with the most drawn"
    return (
        f"Prefix caching pays off above **{pays:.1f}%** of prompt tokens found again"
        f"{needed * bool(most == most and fewest == fewest)}. What is kept must fit: running requests"
        f" leave about {kept:,.0f} of the {pool.reported_tokens:,} tokens in one replica's KV pool,"
        f" room for {kept / workload.prompt.mean:,.0f} prompts."
    )


SHARED_ENDPOINT_LABEL, DEDICATED_ENDPOINT_LABEL = "one for all", "one for each"


@dataclass(frozen=True)
class EndpointComparison:
    """USD per hour by number of adapters at the same total traffic, shared or dedicated."""

    frame: pd.DataFrame  # Adapters, Endpoints, USD per hour; infeasible numbers have no row
    dedicated_deployment: str  # one replica for one adapter
    dedicated_usd_per_hour: float
    # requests/s of one adapter from which a dedicated endpoint costs less than its share, if any
    min_dedicated_rps: float | None

    @property
    def break_even_adapters(self) -> int | None:
        """The fewest adapters in the table for which a shared endpoint costs less; None if none."""
        costs = self.frame.pivot(index="Adapters", columns="Endpoints", values="USD per hour")
        costs = costs.reindex(columns=[SHARED_ENDPOINT_LABEL, DEDICATED_ENDPOINT_LABEL])
        cheaper = costs.index[costs[SHARED_ENDPOINT_LABEL] < costs[DEDICATED_ENDPOINT_LABEL]]
        return int(cheaper[0]) if len(cheaper) else None


def compare_adapter_endpoints(scenario: Scenario) -> EndpointComparison | None:
    """Compare both ways for 1, 2, 4, ... adapters, up to all of the scenario's.

    Returns None if either is impossible or has no price. An adapter's own endpoint is the cheaper
    of two deployments, and has as many replicas as its requests/s need with the scenario's
    headroom, at least one.
    """
    load, engine_args = scenario.workload, scenario.engine_args
    if not load.adapters or load.rate is None or scenario.offline:
        return None
    args = {name: value for name, value in engine_args.items() if "lora" not in name}
    shared, dedicated = search_analytically(scenario).chosen, []
    # the deployments planned for one adapter's mean traffic and for all traffic
    for rate in (load.rate / load.adapters, load.rate):
        merged = replace(
            scenario, engine_args=args, workload=replace(load.with_rate(rate), adapters=0)
        )
        if (chosen := search_analytically(merged).chosen) and chosen.usd_per_hour:
            deployment = chosen.deployment.with_replicas(1)
            capacity = estimate_max_rps(merged, deployment) * (1 - scenario.headroom)
            dedicated.append(
                (chosen.usd_per_hour / chosen.deployment.layout.replicas, capacity, str(deployment))
            )
    if not (dedicated and shared and shared.usd_per_hour):
        return None
    rows = []
    for count in sorted({*(2**k for k in range(load.adapters.bit_length())), load.adapters}):
        rates = load.rate * compute_zipf_fractions(count, load.adapter_zipf)
        cheapest = np.min(
            [usd * np.maximum(np.ceil(rates / capacity), 1) for usd, capacity, _ in dedicated],
            axis=0,
        )
        rows.append((count, DEDICATED_ENDPOINT_LABEL, cheapest.sum()))
        if (
            candidate := search_analytically(
                replace(scenario, workload=replace(load, adapters=count))
            ).chosen
        ) and candidate.usd_per_hour:
            rows.append((count, SHARED_ENDPOINT_LABEL, candidate.usd_per_hour))
    frame = pd.DataFrame(rows, columns=["Adapters", "Endpoints", "USD per hour"])
    share = shared.usd_per_hour / load.rate
    min_rps = min(
        (usd / share for usd, capacity, _ in dedicated if usd <= share * capacity),
        default=None,
    )
    usd, _, description = min(dedicated)
    return EndpointComparison(frame, description, usd, min_rps)


def describe_adapter_endpoints(
    scenario: Scenario, slots: int, compared: EndpointComparison | None
) -> str:
    """Describe, as Markdown, what adapters cost on one endpoint or each; empty without adapters."""
    if not scenario.workload.adapters:
        return ""
    text = (
        "## One endpoint for all adapters, or one for each\n\n"
        f"Every request asks for one of {scenario.workload.adapters:,} LoRA adapters. The engine"
        f" keeps {slots:,} of them in slots on every GPU, and has no more different ones in a step:"
        " requests for others wait, whatever came first. Each different adapter in a step costs"
        " time of its own, however few tokens it changes, so rare adapters make steps slow.\n\n"
    )
    if compared is None:
        return (
            f"{text}What an endpoint for each would cost is not compared: it takes a rate, prices,"
            " and a feasible plan."
        )
    text += (
        "An adapter that has its own endpoint is merged into the weights and costs nothing more,"
        f" but takes at least {compared.dedicated_deployment}, USD"
        f" {compared.dedicated_usd_per_hour:,.2f} per hour. "
    )
    if count := compared.break_even_adapters:
        text += f"One endpoint for all costs less from **{count} adapters** on. "
    if rate := compared.min_dedicated_rps:
        return (
            f"{text}An adapter that is asked for more than **{rate:,.3g} times a second** by itself"
            " costs less on its own."
        )
    return f"{text}However often an adapter is asked for, it costs no less on its own."
