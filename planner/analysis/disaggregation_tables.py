"""Tables of the chapter on disaggregated pools: against unified replicas, by size and by link."""

from collections.abc import Mapping

import pandas as pd

from planner.analysis.layout_tables import get_slo_label
from planner.analysis.sweep import Row, sweep
from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.core.units import GB, GIB
from planner.memory.memory_plan import get_memory_plan
from planner.planning.candidate import Candidate
from planner.planning.disaggregated import estimate_kv_transfer
from planner.planning.disaggregated_search import evaluate_pools, explain_skipped_pools
from planner.planning.evaluation import get_capacity_rps
from planner.planning.search import Plan

MAX_POOL_PAIRS = 8
"""Pairs of worker shapes in a table."""
GRID_RADIUS_WORKERS = 2
"""Most workers above and below the planned number of each pool in a grid of sizes."""
LINK_BANDWIDTHS: Mapping[str, float] = {
    "10 Gbit/s a GPU": 1.25 * GB, "100 Gbit/s a GPU": 12.5 * GB, "400 Gbit/s a GPU": 50 * GB,
    "NVLink 4": 450 * GB,
}  # fmt: skip
"""Bytes/s of one GPU in one direction, from Ethernet to links within a machine."""


def compare_pools(plan: Plan) -> pd.DataFrame:
    """Return the best unified plan, then the best pools of each pair of worker shapes."""
    pooled = [candidate for candidate in plan.candidates if candidate.is_disaggregated]
    unified, targets, rows = plan.without_disaggregation.best, plan.scenario.slo_targets, []
    for candidate in [*([unified] if unified else []), *pooled[:MAX_POOL_PAIRS]]:
        performance, usd = candidate.prediction.performance, candidate.usd_per_hour
        first, decode = candidate.prediction.prefill, candidate.deployment
        capacity = performance and get_capacity_rps(plan.scenario, performance)
        rows.append({
            "prefill": (
                f"{first.num_replicas} x {first.with_replicas(1).layout}" if first else "both in"
            ),
            "decode": f"{decode.num_replicas} x {decode.with_replicas(1).layout}",
            "GPUs": f"{candidate.prediction.num_gpus_billed} {decode.gpu.name}",
            "USD per hour": usd and f"{usd:,.2f}",
            **{
                f"{t.name} (ms)": performance
                and performance.get_for_display(t.metric, t.percentile) * 1e3
                for t in targets
            },
            "capacity (requests/s)": capacity,
            "targets": get_slo_label(candidate) + ", chosen" * (candidate is plan.chosen),
        })  # fmt: skip
    return pd.DataFrame(rows)


def sweep_pool_sizes(plan: Plan, best: Candidate) -> pd.DataFrame:
    """Vary the number of workers: GPUs, limit utilization and SLO status, one row per size."""
    prefill, decode = best.prediction.pools
    planned = prefill.layout.replicas, decode.layout.replicas

    def _read(n: int, m: int) -> Row:
        pools, load = (prefill.with_replicas(n), decode.with_replicas(m)), plan.scenario.workload
        if (candidate := evaluate_pools(plan.scenario, *pools, load)) is None:
            raise PlannerError("no such pools can be rented")
        return {
            "GPUs": candidate.prediction.num_gpus_billed,
            "share of the tightest limit": candidate.limit_utilization,
            "targets": get_slo_label(candidate),
            "what is missing": "; ".join(candidate.violations or candidate.risks) or "nothing",
            "chosen": (n, m) == planned,
        }

    spans = (range(max(n - GRID_RADIUS_WORKERS, 1), n + GRID_RADIUS_WORKERS + 1) for n in planned)
    return sweep(dict(zip(("prefill workers", "decode workers"), spans, strict=True)), _read)


def sweep_kv_links(plan: Plan, best: Candidate) -> pd.DataFrame:
    """Return the KV transfer time of a mean and a p95 prompt, and its part of TTFT, by link."""
    bandwidth, s_per_token = estimate_kv_transfer(*best.prediction.pools)
    prompt, performance = plan.scenario.workload.prompt, best.prediction.performance
    assert performance is not None
    ttft = performance.get("ttft", "mean").mid
    links = {f"planned: {format_number(bandwidth / GB)} GB/s": bandwidth, **LINK_BANDWIDTHS}

    def _read(name: str) -> Row:
        slowdown = bandwidth / links[name]
        seconds = s_per_token * slowdown * prompt.mean
        return {
            "mean prompt (ms)": seconds * 1e3,
            "p95 prompt (ms)": s_per_token * slowdown * prompt.p95 * 1e3,
            "of the mean TTFT": f"{seconds / (ttft - s_per_token * prompt.mean + seconds):.1%}",
        }

    return sweep({"link": links}, _read)


def describe_kv_transfer(plan: Plan, best: Candidate) -> str:
    """Describe the KV transfer of a mean prompt."""
    bandwidth, s_per_token = estimate_kv_transfer(*best.prediction.pools)
    prompt, rate = plan.scenario.workload.prompt.mean, plan.scenario.workload.rate
    size = s_per_token * bandwidth * prompt
    kv_bytes = max(
        get_memory_plan(pool).layout.kv_bytes_per_token / pool.num_engine_instances
        for pool in best.prediction.pools
    )
    text = (
        f"A prompt of {prompt:,.0f} tokens leaves {format_number(size / GIB)} GiB of KV cache on a GPU, which"
        f" takes {format_number(s_per_token * prompt * 1e3)} ms at {format_number(bandwidth / GB)} GB/s."
    )
    if not rate:
        return text
    traffic = rate * kv_bytes * prompt / GB
    return f"{text} At {format_number(rate)} requests/s the busiest link carries {format_number(traffic)} GB/s."


def find_best_pools(plan: Plan) -> Candidate | None:
    """Find the pools that a plan consists of, else the best that were looked at."""
    return plan.chosen if plan.is_disaggregated else plan.best_disaggregated


def describe_pools(answered: Plan, plan: Plan) -> str:
    """Describe the best pools of `plan`, and whether they are what was `answered`."""
    best, unified = find_best_pools(plan), plan.without_disaggregation.best
    text = (
        ""
        if answered.scenario.allow_disaggregation
        else ("The scenario does not allow pools (pools: true does); this is what they would be. ")
    )
    text += f"The plan without pools: {unified}. " if unified else ""
    if best is None:
        expensive = "none serve this traffic for less than twice the price of the plan without them"
        why = explain_skipped_pools(plan.scenario) or expensive
        return f"{text}There are no pools to look at: {why}."
    status = "They are the plan" if plan.is_disaggregated else "They are not the plan"
    return (
        f"{text}The best pools: {best}. {status}: pools are chosen where they cost less and meet"
        " every target at the pessimistic end too, as their intervals are wide."
    )
