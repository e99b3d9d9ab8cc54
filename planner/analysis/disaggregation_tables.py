"""What the chapter on pools looks at: pools against replicas that do both, their sizes, and the link between them."""

from collections.abc import Mapping

import pandas as pd

from planner.analysis.layout_tables import get_slo_label
from planner.core.units import GB, GIB
from planner.memory.memory_plan import get_memory_plan
from planner.planning.candidate import Candidate
from planner.planning.disaggregated import estimate_kv_transfer
from planner.planning.disaggregated_search import evaluate_pools
from planner.planning.evaluation import get_capacity_rps
from planner.planning.search import Plan

MAX_POOL_PAIRS = 8
"""Pairs of worker shapes in a table."""
GRID_RADIUS_WORKERS = 2
"""Workers of each pool more than planned in a grid of sizes, and as many fewer."""
LINK_BANDWIDTHS: Mapping[str, float] = {
    "10 Gbit/s a GPU": 1.25 * GB, "100 Gbit/s a GPU": 12.5 * GB, "400 Gbit/s a GPU": 50 * GB,
    "NVLink 4": 450 * GB,
}  # fmt: skip
"""Bytes/s of one GPU in one direction, from Ethernet to within a machine."""


def compare_pools(plan: Plan) -> pd.DataFrame:
    """The best without pools, then the best pools of each pair of worker shapes, with the workers that it takes."""
    pooled = [candidate for candidate in plan.candidates if candidate.is_disaggregated][
        :MAX_POOL_PAIRS
    ]
    rows = []
    for found in [
        *([plan.without_disaggregation.best] if plan.without_disaggregation.best else []),
        *pooled,
    ]:
        performance, usd = found.prediction.performance, found.usd_per_hour
        first, rest = found.prediction.prefill, found.deployment
        rows.append({
            "prefill": f"{first.num_replicas} x {first.with_replicas(1).layout}" if first else "both in",
            "decode": f"{rest.num_replicas} x {rest.with_replicas(1).layout}",
            "GPUs": f"{found.prediction.num_gpus_billed} {rest.gpu.name}",
            "USD per hour": usd and f"{usd:,.2f}",
            **{f"{t.name} (ms)": performance and performance.get_for_display(t.metric, t.percentile) * 1e3
               for t in plan.scenario.slo_targets},
            "serves at most (requests/s)": performance and get_capacity_rps(plan.scenario, performance),
            "service level": get_slo_label(found) + ", chosen" * (found is plan.chosen),
        })  # fmt: skip
    return pd.DataFrame(rows)


def sweep_pool_sizes(plan: Plan, best: Candidate) -> pd.DataFrame:
    """Other numbers of workers of the same shapes: GPUs, the share of the tightest limit, and the verdict."""
    first, rest = best.prediction.pools
    rows = []
    for n in range(
        max(first.layout.replicas - GRID_RADIUS_WORKERS, 1),
        first.layout.replicas + GRID_RADIUS_WORKERS + 1,
    ):
        for m in range(
            max(rest.layout.replicas - GRID_RADIUS_WORKERS, 1),
            rest.layout.replicas + GRID_RADIUS_WORKERS + 1,
        ):
            candidate = evaluate_pools(
                plan.scenario, first.with_replicas(n), rest.with_replicas(m), plan.scenario.workload
            )
            if candidate is None:
                continue
            rows.append({
                "prefill workers": n, "decode workers": m,
                "GPUs": candidate.prediction.num_gpus_billed,
                "share of the tightest limit": candidate.limit_utilization,
                "service level": get_slo_label(candidate),
                "what is missing": "; ".join(candidate.violations or candidate.risks) or "nothing",
                "chosen": (n, m) == (first.layout.replicas, rest.layout.replicas),
            })  # fmt: skip
    return pd.DataFrame(rows)


def sweep_kv_links(plan: Plan, best: Candidate) -> pd.DataFrame:
    """How long the KV cache of a mean and of a p95 prompt is on its way, by the link of a GPU, and of which TTFT."""
    own, each = estimate_kv_transfer(*best.prediction.pools)
    prompt, performance = plan.scenario.workload.prompt, best.prediction.performance
    assert performance is not None
    ttft = performance.get("ttft", "mean").mid
    rows = []
    for name, speed in {f"planned: {own / GB:.3g} GB/s": own, **LINK_BANDWIDTHS}.items():
        mean = each * own / speed * prompt.mean
        rows.append({
            "link": name, "mean prompt (ms)": mean * 1e3,
            "p95 prompt (ms)": each * own / speed * prompt.p95 * 1e3,
            "of the mean TTFT": f"{mean / (ttft - each * prompt.mean + mean):.1%}",
        })  # fmt: skip
    return pd.DataFrame(rows)


def describe_kv_transfer(plan: Plan, best: Candidate) -> str:
    """What goes over the link, in a sentence."""
    own, each = estimate_kv_transfer(*best.prediction.pools)
    prompt, rate = plan.scenario.workload.prompt.mean, plan.scenario.workload.rate
    size = each * own * prompt
    most = max(
        get_memory_plan(pool).layout.kv_bytes_per_token / pool.num_engine_instances
        for pool in best.prediction.pools
    )
    text = (
        f"A prompt of {prompt:,.0f} tokens leaves {size / GIB:.3g} GiB of KV cache on a GPU, which"
        " takes "
    )
    busy = (
        f" At {rate:.3g} requests/s the busiest link carries {rate * most * prompt / GB:.3g} GB/s."
        if rate
        else ""
    )
    return f"{text}{each * prompt * 1e3:.3g} ms at {own / GB:.3g} GB/s.{busy}"
