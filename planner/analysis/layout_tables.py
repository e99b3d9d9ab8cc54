"""What a chapter studies of a plan, and its layouts: shapes, messages, pools.

A study is the plan's own deployment under its own traffic, on which a chapter changes whatever it
tries. Columns have readable names with units; predictions are intervals.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pandas as pd

from planner.analysis.sweep import Row, sweep
from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.engines.layout import ParallelLayout
from planner.hardware.gpus import get_gpu
from planner.memory.memory_plan import MemoryPlan, get_memory_plan
from planner.parallelism.layouts import explain_illegal_layout
from planner.planning.candidate import Candidate
from planner.planning.disaggregated_search import evaluate_pools, explain_skipped_pools
from planner.planning.evaluation import (
    get_candidate_workload,
    get_capacity_rps,
)
from planner.planning.plan import Plan, get_reference_deployment
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.search import search_deployments
from planner.planning.what_if import SUGGESTED_GPUS
from planner.workload.workload import Workload

MAX_FALLBACK_GPUS = 64
"""Most GPUs of what is studied where nothing fits on those that the scenario allows."""


@dataclass(frozen=True)
class Study:
    """The plan of a scenario in which every replica does both, prefill and decode."""

    answered: Plan  # the plan of the scenario, which may have pools
    plan: Plan  # without them; where nothing fits, on other GPUs
    note: str  # what is studied
    is_current: bool  # of the scenario that the cockpit saved, which chapters may change
    scenario: Scenario
    deployment: Deployment  # the plan's own; the widest layout where nothing fits
    workload: Workload  # of all replicas
    memory: MemoryPlan
    decode_batch: int  # sequences that decode at once on average; 1 where nothing fits
    context: int  # mean tokens of a decoding sequence


def begin_study(answered: Plan, is_current: bool = False, *, fits: bool = False) -> Study:
    """Study a plan; with `fits`, one on the first suggested GPUs that hold it where nothing does."""
    plan, note = answered.without_disaggregation, ""
    if fits and not plan.candidates:
        note = f"{str(answered.binding_constraint).rstrip('.')}. This chapter continues with one change: "
        plan = _find_what_fits(plan.scenario)
        note += f"up to {MAX_FALLBACK_GPUS} x {plan.scenario.gpus[0].gpu.name}."
    elif plan.best and answered.chosen and answered.is_disaggregated:
        note = f"The plan is in pools: {answered.chosen.description}. This chapter looks at the best without them: "
        note += f"{plan.best.description}."
    elif plan.best:
        told = "The plan" if plan.chosen else "No plan meets the targets. The closest"
        note = f"{told}: {plan.best.description}."
    scenario, deployment = plan.scenario, get_reference_deployment(plan)
    performance = plan.best and plan.best.prediction.performance
    return Study(
        answered, plan, note, is_current, scenario, deployment,
        get_candidate_workload(scenario, deployment), get_memory_plan(deployment),
        max(round(performance.decode_batch), 1) if performance else 1,
        round(scenario.workload.mean_decode_context),
    )  # fmt: skip


def _find_what_fits(scenario: Scenario) -> Plan:
    """Plan a scenario on the first of the suggested GPUs that hold its model."""
    for name in SUGGESTED_GPUS:
        gpus = (CandidateGpu(get_gpu(name), MAX_FALLBACK_GPUS),)
        if (plan := search_deployments(replace(scenario, gpus=gpus))).candidates:
            return plan
    raise PlannerError(f"{scenario.name}: the model fits on none of {', '.join(SUGGESTED_GPUS)}")


def get_slo_label(candidate: Candidate) -> str:
    """Return "met", "at risk" or "missed" for all SLOs together."""
    return "missed" if not candidate.is_feasible else "at risk" if candidate.at_risk else "met"


def list_shapes(plan: Plan) -> list[Candidate]:
    """List the best candidate of each GPU and shape of a replica, best first."""
    shapes: dict[object, Candidate] = {}
    for each in plan.candidates:
        if each.prediction.can_start:
            shapes.setdefault((each.deployment.gpu.name, each.replica_shape), each)
    return list(shapes.values())


def build_shape_table(plan: Plan, candidates: Iterable[Candidate]) -> pd.DataFrame:
    """Return layout, memory, cost, latencies with an SLO and throughput, one row per candidate."""
    rows, targets = [], plan.scenario.slo_targets
    for each in candidates:
        layout, memory, performance = (
            each.deployment.layout, each.prediction.memory, each.prediction.performance,
        )  # fmt: skip
        usd = each.usd_per_hour
        rows.append({
            "GPU": each.deployment.gpu.name, "layout": str(layout), "GPUs": layout.num_gpus,
            "TP": f"TP{layout.tp}" + f" EP{layout.ep}" * (layout.ep > 1), "PP": layout.pp,
            "USD per hour": usd and f"{usd:,.2f}",
            "KV cache (GiB per GPU)": memory.kv_available / GIB,
            **{
                f"{t.name} (ms)": performance
                and performance.get_for_display(t.metric, t.percentile) * 1e3
                for t in targets
            },
            **({} if targets else {"requests/s": performance and performance.request_tps}),
            "targets": get_slo_label(each), "figures": performance and performance.source_label,
            "chosen": each is plan.chosen,
        })  # fmt: skip
    return pd.DataFrame(rows)


def describe_layout_rules(deployment: Deployment) -> str:
    """Describe which TP sizes the engine accepts for this model in one node, and why not others."""
    reasons = {
        tp: explain_illegal_layout(
            deployment.model, ParallelLayout(tp=tp), deployment.gpus_per_node, deployment.engine
        )
        for tp in (1, 2, 3, 4, 8, 16)
    }
    accepted = ", ".join(str(tp) for tp, reason in reasons.items() if not reason)
    refused = [f"TP{tp}: {reason}" for tp, reason in reasons.items() if reason]
    return f"The engine accepts TP {accepted}." + f" It refuses {'; '.join(refused)}." * bool(
        refused
    )


MAX_POOL_PAIRS = 8
"""Pairs of worker shapes in a table."""
GRID_RADIUS_WORKERS = 2
"""Most workers above and below the planned number of each pool in a grid of sizes."""


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
        gpus = candidate.prediction.num_gpus_billed
        return {
            "told": f"{candidate.limit_utilization:.0%}, {gpus} GPUs",
            "GPUs": gpus,
            "share of the tightest limit": candidate.limit_utilization,
            "targets": get_slo_label(candidate),
            "what is missing": "; ".join(candidate.violations or candidate.risks) or "nothing",
            "chosen": (n, m) == planned,
        }

    spans = (range(max(n - GRID_RADIUS_WORKERS, 1), n + GRID_RADIUS_WORKERS + 1) for n in planned)
    return sweep(dict(zip(("prefill workers", "decode workers"), spans, strict=True)), _read)


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
