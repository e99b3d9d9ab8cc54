"""Tables of every layout on the candidate GPUs, of one and of two pools: what fits, capacity and cost.

What a chapter studies is the plan's own deployment under its own traffic, on which it changes
whatever it tries. Columns have readable names with units; predictions are intervals.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress, product
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from planner.analysis.load_ramp import choose_timeline_s
from planner.analysis.sweep import Row, sweep
from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.core.progress import show_step
from planner.core.units import GB, GIB
from planner.engines.deployment import Deployment
from planner.engines.layout import ParallelLayout
from planner.hardware.gpus import get_gpu, load_links, resolve_link_bandwidth
from planner.latency.coefficient_lookup import get_deployment_coefficients
from planner.latency.step_model import build_target_step_model
from planner.memory.memory_plan import MemoryPlan, get_memory_plan
from planner.parallelism.communication import estimate_collectives
from planner.parallelism.layouts import explain_illegal_layout, list_legal_layouts
from planner.planning.candidate import Candidate, describe_formats
from planner.planning.disaggregated import estimate_kv_transfer
from planner.planning.disaggregated_search import evaluate_pools, explain_skipped_pools
from planner.planning.engine_tuning import apply_engine_args, generate_neighbours
from planner.planning.evaluation import (
    compute_offered_rps,
    evaluate_candidate,
    evaluate_candidates,
    get_candidate_workload,
    get_capacity_rps,
    get_load_limit_name,
)
from planner.planning.max_load import find_max_load
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.search import Plan, get_reference_deployment, search_deployments
from planner.planning.tolerance import state_deployment
from planner.planning.what_if import SUGGESTED_GPUS, run_what_ifs
from planner.workload.workload import Workload

MAX_SHAPES, MAX_FALLBACK_GPUS = 16, 64
"""Most replica shapes in a comparison (beyond that, only stages in powers of two), and most GPUs of
the last resort if a model fits nowhere that the scenario allows."""
COMMUNICATION_LAYOUTS = (
    ParallelLayout(tp=2),
    ParallelLayout(tp=4),
    ParallelLayout(tp=8),
    ParallelLayout(pp=2),
)
"""Layouts whose communication is compared."""


def get_slo_label(candidate: Candidate) -> str:
    """Return "met", "at risk" or "missed" for all SLOs together."""
    return "missed" if not candidate.is_feasible else "at risk" if candidate.at_risk else "met"


def find_plan_to_study(plan: Plan) -> tuple[Plan, str]:
    """Return `plan`, or if nothing fits, the first plan after one change that does."""
    if plan.candidates:
        return plan, ""
    for change in run_what_ifs(plan):
        if change.plan.candidates:
            return change.plan, change.change
    for name in SUGGESTED_GPUS:
        wider = search_deployments(
            replace(plan.scenario, gpus=(CandidateGpu(get_gpu(name), MAX_FALLBACK_GPUS),))
        )
        if wider.candidates:
            return wider, f"up to {MAX_FALLBACK_GPUS} x {name}"
    raise PlannerError(f"{plan.scenario.name}: {plan.binding_constraint}")


def explain_unified_deployment(plan: Plan) -> str:
    """Explain which unified deployment a chapter studies; empty if the plan is one."""
    pooled, unified = plan.chosen, plan.without_disaggregation.best
    if pooled is None or not pooled.is_disaggregated:
        return ""
    return (
        f"The plan is in pools: {pooled.description}. This chapter looks at the best without them:"
        f" {unified.description if unified else 'none'}."
    )


def describe_studied_deployment(original: Plan, plan: Plan, changed: str) -> str:
    """Describe what a chapter studies: the `original` plan, or its substitute."""
    if original.is_disaggregated and not changed:
        return explain_unified_deployment(original)
    if changed:
        return (
            f"{str(original.binding_constraint).rstrip('.')}. This chapter continues with one"
            f" change: {changed}."
        )
    if plan.chosen is None and plan.best:
        return (
            f"No plan meets the targets. This chapter shows the closest: {plan.best.description}."
        )
    return f"The plan: {plan.chosen.description}." if plan.chosen else ""


def _find_best_on(plan: Plan, candidate_gpu: CandidateGpu) -> Candidate | None:
    """Find the best candidate in the machines of a GPU of the scenario."""
    gpu, link = candidate_gpu.gpu, candidate_gpu.interconnect
    bandwidth = resolve_link_bandwidth(gpu, link) if link else gpu.link_bandwidth
    machine = gpu, candidate_gpu.max_machine_gpus, candidate_gpu.machine_sizes, bandwidth
    return next((c for c in plan.candidates if c.family_key[:4] == machine), None)


def _list_in_shape(plan: Plan, like: Candidate, layout: ParallelLayout) -> list[Deployment]:
    """List one replica of `like` in another shape, with every choice of arguments that is known.

    In its own shape it keeps its arguments. In another one max_num_seqs is what the memory holds,
    or as many as before, and one more argument may change, as in the search.
    """
    shape, args = replace(layout, replicas=1), like.deployment.args
    moved = replace(like.deployment, layout=shape)
    if like.family_key[-1] == (shape,):
        return [moved]
    key = *like.family_key[:-1], (shape,)
    known = [c.deployment.with_replicas(1) for c in plan.candidates if c.family_key == key][:1]
    names = "max_num_batched_tokens", "gpu_memory_utilization"
    with suppress(PlannerError):
        fitted = apply_engine_args(plan.scenario, moved, **{n: getattr(args, n) for n in names})
        fewer = fitted.with_args(max_num_seqs=min(args.max_num_seqs, fitted.args.max_num_seqs))
        known += [fitted, fewer, *generate_neighbours(plan.scenario, fitted)]
    return list(dict.fromkeys(known)) or [moved]


def relayout_candidate(plan: Plan, gpu: str, tp: int, pp: int, replicas: int) -> Candidate:
    """Simulate the plan in another layout: itself in its own, else the best that is known of it.

    Raises `PlannerError` if the model does not fit there, or the engine rejects the layout.
    """
    own = plan.candidates[0].deployment.layout
    narrower = replace(own, dcp=min(own.dcp, tp)).with_tp(tp)  # experts stay spread as they are
    layout = replace(narrower, pp=pp, replicas=replicas)
    gpus = [candidate for candidate in plan.scenario.gpus if candidate.gpu.name == gpu]
    likes = [(like, one) for one in gpus if (like := _find_best_on(plan, one))]
    if not likes:
        raise PlannerError(f"the model does not fit on {gpu}")
    like, candidate_gpu = min(likes, key=lambda pair: plan.candidates.index(pair[0]))
    model, engine = like.deployment.model, like.deployment.engine
    if reason := explain_illegal_layout(model, layout, candidate_gpu.max_machine_gpus, engine):
        raise PlannerError(f"{layout} is not possible: {reason}")
    cases = [
        (deployment, replicas, like.preference_key)
        for deployment in _list_in_shape(plan, like, layout)
    ]
    placed = min(evaluate_candidates(plan.scenario, cases), key=attrgetter("rank_key"))
    return _simulate_placed(plan, placed)


def _simulate_placed(plan: Plan, placed: Candidate) -> Candidate:
    """Simulate a candidate, unless the plan has, or it does not start."""
    known = _list_simulated(plan).get(placed.placement_key)
    if known or not placed.prediction.can_start:
        return known or placed
    return state_deployment(plan.scenario, placed.deployment, placed.preference_key)


def _list_simulated(plan: Plan) -> dict[object, Candidate]:
    """Return the candidates that the plan simulated by their placement, the best of each."""
    return {c.placement_key: c for c in reversed(plan.candidates) if c.is_simulated}


@show_step("simulating layouts")
def list_layout_candidates(plan: Plan) -> tuple[Candidate, ...]:
    """List every legal TP x PP x replicas on every GPU, in the formats of its best candidate.

    Each has the best engine arguments that are known for it. Candidates that the plan simulated are
    taken from it; the others are analytical, but for those that the estimate ranks before the plan.
    """
    cases: list[tuple[Deployment, int, tuple[int, ...]]] = []
    for candidate_gpu in plan.scenario.gpus:
        if (like := _find_best_on(plan, candidate_gpu)) is None:
            continue
        most, node = candidate_gpu.max_gpus, candidate_gpu.max_machine_gpus
        deployment = like.deployment
        for shape in list_legal_layouts(
            deployment.model, deployment.gpu, most, node, deployment.engine
        ):
            cases += [
                (known, replicas, like.preference_key)
                for known in _list_in_shape(plan, like, shape)
                for replicas in range(1, most // shape.gpus_per_replica + 1)
            ]
    placed: dict[object, Candidate] = {}
    for candidate in evaluate_candidates(plan.scenario, cases):
        key = candidate.placement_key
        if key not in placed or candidate.rank_key < placed[key].rank_key:
            placed[key] = candidate
    placed |= {key: known for key, known in _list_simulated(plan).items() if key in placed}
    return _simulate_better(plan, placed.values())


def _simulate_better(plan: Plan, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Simulate what the estimate ranks before the plan, up to the fewest replicas that are enough."""
    enough: set[object] = set()
    rows = []
    for each in sorted(candidates, key=lambda one: one.deployment.layout.replicas):
        if (
            plan.chosen
            and not each.is_simulated
            and each.family_key not in enough
            and each.rank_key < plan.chosen.rank_key
        ):
            each = _simulate_placed(plan, each)
        if each.is_feasible:
            enough.add(each.family_key)
        rows.append(each)
    return tuple(rows)


def select_fewest_replicas(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Select the fewest feasible replicas of each GPU and shape; the most if none is feasible."""
    selected: dict[object, Candidate] = {}
    for candidate in candidates:
        key = candidate.deployment.gpu.name, candidate.replica_shape
        if key not in selected or not selected[key].is_feasible:
            selected[key] = candidate
    return tuple(selected.values())


def estimate_max_rps(scenario: Scenario, deployment: Deployment) -> float:
    """Return the most requests/s of one replica within the SLOs, analytically, without headroom.

    Offline, it is the throughput with all slots taken.
    """
    workload, scenario = scenario.workload, replace(scenario, headroom=0.0)
    if scenario.offline or workload.rate is None:
        performance = evaluate_candidate(scenario, deployment, 1).prediction.performance
        return performance.request_tps.mid if performance else 0.0
    return find_max_load(scenario, evaluate_candidate(scenario, deployment, 1), 0.0)


def build_candidate_frame(
    plan: Plan, candidates: Iterable[Candidate], read: str = "get"
) -> pd.DataFrame:
    """Return layout, cost, latencies with an SLO and throughput, one row per candidate.

    `read` is "get" for charts, "get_for_display" for people (`Performance`).
    """
    rows, targets = [], plan.scenario.slo_targets
    for candidate in candidates:
        layout, performance = candidate.deployment.layout, candidate.prediction.performance
        rows.append({
            "GPU": candidate.deployment.gpu.name, "Layout": str(layout), "GPUs": layout.num_gpus,
            "TP": f"TP{layout.tp}" + f" EP{layout.ep}" * (layout.ep > 1), "PP": layout.pp,
            "Replicas": layout.replicas, "USD per hour": candidate.usd_per_hour,
            **{
                f"{t.name} (ms)": performance
                and getattr(performance, read)(t.metric, t.percentile) * 1e3
                for t in targets
            },
            "Output tokens/s": performance and performance.output_tps,
            "Requests/s": performance and performance.request_tps,
            "Targets": get_slo_label(candidate) if performance else "does not fit",
            "Figures": performance and performance.source_label,
            "Saturated": bool(performance and performance.saturated),
            "Chosen": candidate is plan.chosen,
        })  # fmt: skip
    return pd.DataFrame(rows)


def select_comparable(plan: Plan, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Select candidates that fit on the plan's GPU, in a node or in as many GPUs as its replica.

    If only one does, those on every GPU.
    """
    best = plan.candidates[0].deployment
    max_gpus = max(best.gpus_per_node, best.layout.gpus_per_replica)
    fitting = [
        c
        for c in candidates
        if c.prediction.can_start and c.deployment.layout.gpus_per_replica <= max_gpus
    ]
    same_gpu = [c for c in fitting if c.deployment.gpu == best.gpu]
    shown = same_gpu if len(same_gpu) > 1 else fitting
    if len(shown) <= MAX_SHAPES:
        return shown
    return [c for c in shown if c.deployment.layout.pp.bit_count() == 1 or c is plan.best][
        :MAX_SHAPES
    ]


def group_by_replica_shape(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    """Return the candidates by replica shape, with GPU and format if these differ."""
    replicas = [candidate.deployment.with_replicas(1) for candidate in candidates]
    parts = [
        (deployment.gpu.name, str(deployment.layout), describe_formats(deployment))
        for deployment in replicas
    ]
    gpus, _, formats = map(set, zip(*parts, strict=True))
    is_shown = len(gpus) > 1, True, len(formats) > 1
    return {
        ", ".join(compress(names, is_shown)): candidate
        for names, candidate in zip(parts, candidates, strict=True)
    }


def build_replica_table(plan: Plan, candidates: Sequence[Candidate]) -> pd.DataFrame:
    """Return memory of the fullest GPU, sequences and requests/s, one row per replica shape."""
    length, rows = round(plan.scenario.workload.compute_total_tokens_quantile(0.95)), []
    for name, candidate in group_by_replica_shape(candidates).items():
        layout, memory = candidate.deployment.layout, candidate.prediction.memory
        served = estimate_max_rps(plan.scenario, candidate.deployment) or None
        rows.append({
            "One replica": name, "GPUs": layout.gpus_per_replica,
            "Weights (GiB per GPU)": memory.weights / GIB,
            "KV cache (GiB per GPU)": memory.kv_available / GIB,
            "max_num_batched_tokens": candidate.deployment.args.max_num_batched_tokens,
            f"Sequences of {length:,} tokens": memory.pool.count_sequences(length),
            "Requests/s": served,
            "Requests/s per GPU": served and served / layout.gpus_per_replica,
        })  # fmt: skip
    data = pd.DataFrame(rows)
    alike = data["max_num_batched_tokens"].nunique() == 1
    return data.drop(columns="max_num_batched_tokens") if alike else data


def build_slo_table(scenario: Scenario, candidate: Candidate) -> pd.DataFrame:
    """Return limit, prediction and status of each SLO (offline: of the deadline)."""
    performance = candidate.prediction.performance
    rows: list[tuple[object, ...]] = []
    for target in scenario.slo_targets:
        if performance is None:
            break
        value, limit = performance.get_for_display(target.metric, target.percentile), target.seconds
        rows.append(
            (
                f"{target.name} (ms)",
                value * 1e3,
                limit * 1e3,
                value / limit * 100,
                limit_odds.status if (limit_odds := candidate.get_limit(target.name)) else "met",
            )
        )
    if (
        performance
        and (capacity := get_capacity_rps(scenario, performance))
        and scenario.workload.rate
    ):
        offered = compute_offered_rps(scenario, candidate.prediction)
        load = candidate.get_limit(get_load_limit_name(scenario))
        status = load.status if load else "met"
        utilization = capacity.map_monotone(lambda rate: offered / rate * 100)
        suffix = f", {scenario.headroom:.0%} to stay free" if scenario.headroom else ""
        rows.append((f"Requests/s at most{suffix}", capacity, offered, utilization, status))
    return pd.DataFrame(
        rows, columns=["Target", "Predicted", "Limit", "Share of the limit (%)", "Verdict"]
    )


def list_shortlist(plan: Plan, candidates: Iterable[Candidate]) -> pd.DataFrame:
    """Return the best dozen that fit; the closest first if none is feasible."""
    fit = [candidate for candidate in candidates if candidate.prediction.can_start]
    fit.sort(key=attrgetter("rank_key" if plan.chosen else "limit_utilization"))
    data = build_candidate_frame(plan, fit[:12], "get_for_display")
    data["USD per hour"] = [usd if usd is None else f"{usd:,.2f}" for usd in data["USD per hour"]]
    hidden = ["GPUs", "TP", "PP", "Replicas", "Saturated", "Chosen"]
    hidden += ["Requests/s"] * bool(plan.scenario.slo_targets) + ["GPU"] * (
        data["GPU"].nunique() == 1
    )
    return data.drop(columns=hidden)


def list_pareto_fronts(plan: Plan, data: pd.DataFrame) -> list[dict[str, Any]]:
    """List what layouts are drawn by over their cost, with its limit, if enough of them keep up.

    That is each latency with a target, or the throughput without one.
    """
    fronts: list[dict[str, Any]] = [
        {"y": f"{target.name} (ms)", "limit": target.seconds * 1e3}
        for target in {t.metric: t for t in plan.scenario.slo_targets}.values()
    ]
    if not fronts:
        rate = plan.scenario.workload.rate
        return [{"y": "Requests/s", "limit": rate, "more_is_better": True}]
    return [front for front in fronts if _has_enough_points(data, front["y"])]


def _has_enough_points(data: pd.DataFrame, column: str) -> bool:
    """Return whether enough layouts keep up for a Pareto front of `column` to be visible."""
    rows = data[data[column].notna() & ~data["Saturated"]]
    return len(set(rows["USD per hour"].where(rows["USD per hour"].notna(), rows["GPUs"]))) > 2


def find_pareto_front(
    data: pd.DataFrame, cost: str, value: str, more_is_better: bool = False
) -> list[bool]:
    """Return for each row whether no other costs less and has as good an expected `value`."""
    sign = -1 if more_is_better else 1
    points = [
        (usd, sign * interval.mid) for usd, interval in zip(data[cost], data[value], strict=True)
    ]
    return [not any(other < point and other[1] <= point[1] for other in points) for point in points]


def build_collectives_table(deployment: Deployment, batch: int, context: float) -> pd.DataFrame:
    """Return what TP 2, 4 and 8 and two stages would send over every link that they might use.

    Steps are a decode step of `batch` sequences of `context` tokens, and one with as many prompt
    tokens as fit.
    """
    gpu, tokens, rows = deployment.gpu, deployment.args.max_num_batched_tokens, []
    link_name = (
        gpu.link.replace("nvlink", "NVLink ")
        if deployment.link_bandwidth == gpu.link_bandwidth
        else "as wired"
    )
    links = {link_name: deployment.link_bandwidth}
    fast = deployment.link_bandwidth > gpu.pcie_bandwidth
    links |= (
        {"PCIe": gpu.pcie_bandwidth}
        if fast
        else {"NVLink 4, if it had it": load_links()["nvlink4"]}
    )
    wires = [(f"{name} ({speed / GB:g} GB/s)", speed, 8) for name, speed in links.items()]
    wires.append(
        (f"between nodes ({gpu.internode_bandwidth / GB:g} GB/s)", deployment.link_bandwidth, 1)
    )
    steps = {"decode": ([], [round(context)] * batch), "prompt": ([(tokens, 0)], [])}
    shapes = [
        shape
        for shape in COMMUNICATION_LAYOUTS
        if explain_illegal_layout(deployment.model, shape, 8, deployment.engine) is None
    ]
    for shape, (wire, bandwidth, node), (step, batch_args) in product(shapes, wires, steps.items()):
        placed = replace(deployment, layout=shape, link_bandwidth=bandwidth, gpus_per_node=node)
        collectives = estimate_collectives(
            placed, np.array([1.0]), get_deployment_coefficients(placed).coefficients
        )
        cost = build_target_step_model(placed).estimate_step(*batch_args)
        collective_s = cost.seconds_by_part["collectives"] + cost.seconds_by_part["expert exchange"]
        sent = sum(part.count * float(part.bytes[0]) for part in collectives)
        rows.append({
            "Layout": str(shape).removeprefix("TP1 x "), "Link": wire, "Step": step,
            "Messages": sum(part.count for part in collectives), "Step (ms)": cost.seconds * 1e3,
            "KiB per token and GPU": sent / 1024,
            "Messages (ms)": collective_s * 1e3,
            "Share of the step (%)": collective_s / cost.seconds * 100,
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


@dataclass(frozen=True)
class Study:
    """The plan of a scenario in which every replica does both, prefill and decode."""

    answered: Plan  # the plan of the scenario, which may have pools
    plan: Plan  # without them; where nothing fits, after a change
    note: str  # what is studied
    is_current: bool  # of the scenario that the cockpit saved, which chapters may change
    scenario: Scenario
    deployment: Deployment  # the plan's own; the widest layout where nothing fits
    workload: Workload  # of all replicas
    memory: MemoryPlan
    decode_batch: int  # sequences that decode at once on average; 1 where nothing fits
    context: int  # mean tokens of a decoding sequence
    timeline_s: float  # seconds of one engine that are drawn


def begin_study(answered: Plan, is_current: bool = False, *, fits: bool = False) -> Study:
    """Study a plan; with `fits`, the plan after the first change with which something fits."""
    plan, change = answered.without_disaggregation, ""
    if fits:
        plan, change = find_plan_to_study(plan)
    scenario, deployment = plan.scenario, get_reference_deployment(plan)
    workload = get_candidate_workload(scenario, deployment)
    performance = plan.best and plan.best.prediction.performance
    return Study(
        answered, plan, describe_studied_deployment(answered, plan, change), is_current, scenario,
        deployment, workload, get_memory_plan(deployment),
        max(round(performance.decode_batch), 1) if performance else 1,
        round(scenario.workload.mean_decode_context), choose_timeline_s(deployment, workload),
    )  # fmt: skip


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
