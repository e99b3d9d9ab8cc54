"""What a plan bears and what may prove it wrong: more traffic, a replica that is away, its doubtful figures."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from planner.analysis.load_curves import find_max_feasible_rps
from planner.analysis.load_ramp import OVERLOAD_REASON, run_load_ramp
from planner.analysis.phrases import ANALYSIS_PHRASES, CALIBRATION_BASIS_LABELS
from planner.planning.candidate import Candidate
from planner.planning.disaggregated_search import evaluate_pools
from planner.planning.evaluation import (
    compute_free_capacity,
    compute_offered_rps,
    estimate_run_hours,
    get_capacity_rps,
    simulate_candidate,
)
from planner.planning.scenario import Scenario
from planner.planning.search import Plan


def describe_headroom(plan: Plan) -> str:
    """How much traffic it serves at most, what is free of that, and its `growth`."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    if best is None or performance is None or performance.capacity is None:
        return ""
    wanted, free = (
        compute_offered_rps(scenario, best.prediction),
        compute_free_capacity(scenario, best.prediction) or 0.0,
    )
    text = f"It serves {performance.capacity:.3g} requests/s at most, and {wanted:.3g} are planned."
    if hours := estimate_run_hours(scenario, best):
        many = scenario.workload.num_prompts or 0
        text = (
            f"It is done with {many:,} requests in {hours:.3g} hours, of {many / wanted / 3600:.3g}"
            " that there are."
        )
    elif scenario.workload.rate is None:
        users = scenario.workload.concurrency
        text = (
            f"{users:,} users send {wanted:.3g} requests/s; it serves {performance.capacity:.3g} at"
            " most."
        )
    elif free < 0:
        return f"{text} It is overloaded: queues grow until requests are turned away."
    if scenario.workload.rate is None:
        return text
    free_said = f"So {max(free, 0.0):.0%} stay free, where {scenario.headroom:.0%} are asked for."
    return f"{text} {free_said} {describe_growth_limit(plan)}"


def describe_growth_limit(plan: Plan) -> str:
    """By how much the traffic may grow: until the first promise breaks, or what is to stay free is used up.

    Of a replayed plan by the ramp of the chapter on batching, of which there is none for pools;
    else in closed form.
    """
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    if (
        best is None
        or performance is None
        or scenario.workload.rate is None
        or not (most := get_capacity_rps(scenario, performance))
    ):
        return ""
    wanted, kept, how = compute_offered_rps(scenario, best.prediction), None, ""
    what, end = ("work", "it is late") if scenario.offline else ("traffic", "it is overloaded")
    if best.is_simulated and not best.is_disaggregated and not scenario.offline:
        ramp = run_load_ramp(best.deployment, scenario.workload, scenario.slo_targets)
        kept = None if ramp.reason == OVERLOAD_REASON else (ramp.ceiling, ramp.reason)
    elif not scenario.offline:
        kept, how = find_max_feasible_rps(scenario, best), " (closed form)"
    planned = (1 - scenario.headroom) * most.mid
    if kept and kept[0].mid < planned:
        rate, why = kept
        if not rate.mid:
            return f"No rate keeps every promise: {why} even in an idle engine{how}."
        more = rate.mid / wanted - 1
        may = (
            f"The {what} may grow by {more:,.0%}"
            if more >= 0.005
            else f"There is no room for more {what}"
        )
        return f"{may}: beyond {rate:.3g} requests/s {why}{how}, though capacity is left."
    if planned < wanted:
        return f"There is no room for more {what}."
    over = (most if kept is None else kept[0]) / wanted + -1.0
    end = f"{kept[1]}{how}" if kept else end
    low = f" (by {over.lo:,.0%} at the pessimistic end)" if over.lo > 0 else ""
    used = (
        f"by {planned / wanted - 1:,.0%} until that is used up, and " if scenario.headroom else ""
    )
    return f"The {what} may grow {used}by {over.mid:,.0%}{low} until {end}."


def simulate_replica_loss(plan: Plan) -> tuple[Candidate | None, str]:
    """What the best does under the same traffic while one replica is away, replayed, and that in a sentence."""
    best = plan.best
    if best is None:
        return None, ""
    replicas, spares = best.deployment.layout.replicas, best.deployment.spare_replicas
    if spares:
        beside = (
            f"{spares} spare replica{'s' if spares > 1 else ''} beside the {replicas} that the"
            " traffic needs"
        )
        return (
            None,
            f"While as many are away as there are spare ones, every promise holds: {beside}.",
        )
    if best.is_disaggregated:
        return _simulate_worker_loss(plan.scenario, best)
    if replicas == 1:
        twice = (
            f"; a second costs ${best.usd_per_hour:,.2f} an hour more" if best.usd_per_hour else ""
        )
        return None, f"There is only one replica: while it restarts, nothing is served{twice}."
    others = replace(best, deployment=best.deployment.with_replicas(replicas - 1))
    fewer = simulate_candidate(replace(plan.scenario, headroom=0.0), others)
    left = f"While one of {replicas} replicas is away, the same traffic on the other {replicas - 1}"
    if fewer.is_feasible:
        risk = f", though at the pessimistic end {'; '.join(fewer.risks)}" if fewer.risks else ""
        return fewer, f"{left} still keeps every promise{risk} (replayed)."
    return fewer, f"{left} does not keep every promise (replayed): {'; '.join(fewer.violations)}."


def _simulate_worker_loss(scenario: Scenario, best: Candidate) -> tuple[Candidate | None, str]:
    """`lost` of pools: the worker whose loss is worse."""
    pools, worst = best.prediction.pools, None
    if alone := [
        role
        for role, pool in zip(("prefill", "decode"), pools, strict=True)
        if pool.layout.replicas == 1
    ]:
        return (
            None,
            (
                f"There is only one {' and one '.join(alone)} worker: while it restarts, nothing is"
                " served."
            ),
        )
    for k, role in enumerate(("prefill", "decode")):
        fewer = [
            pool.with_replicas(pool.layout.replicas - (j == k)) for j, pool in enumerate(pools)
        ]
        candidate = evaluate_pools(
            replace(scenario, headroom=0.0),
            fewer[0],
            fewer[1],
            scenario.workload,
            best.preference_key,
        )
        if candidate and (
            worst is None or candidate.limit_utilization > worst[0].limit_utilization
        ):
            worst = candidate, role
    if worst is None:
        return None, ""
    held = "still keeps every promise" if worst[0].is_feasible else "does not keep every promise"
    missed = "" if worst[0].is_feasible else f": {'; '.join(worst[0].violations)}"
    return (
        worst[0],
        (
            f"While one {worst[1]} worker is away, the same traffic on the others {held}"
            f" (replayed){missed}."
        ),
    )


def list_largest_risks(plan: Plan) -> pd.DataFrame:
    """The three largest risks of the plan, each with what to measure first, from the largest on."""
    found = sorted(_generate_risks(plan), key=lambda risk: -risk[0])[:3]
    told = ANALYSIS_PHRASES["risks"]
    rows = [(told[name]["risk"], size, told[name]["measure"]) for _, name, size in found]
    return pd.DataFrame(rows, columns=["risk", "how large", "measure first"])


def _generate_risks(plan: Plan) -> Iterator[tuple[float, str, str]]:
    """(weight, which of the risks in `phrases.yaml`, how large): a miss that is to be expected weighs 3."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    if best is None or performance is None:
        return
    workload, deployment = scenario.workload, best.deployment
    if plan.reasons:
        yield 3, "edge" if plan.chosen else "miss", "; ".join(plan.reasons)
    intervals = [
        performance.get_for_display(target.metric, target.percentile)
        for target in scenario.slo_targets
    ]
    width = max(
        (value.hi / value.mid - 1 for value in intervals if 0 < value.mid < math.inf), default=0.0
    )
    latency = "growing waits" if math.isinf(width) else f"up to {width:+.0%} on a promised latency"
    wide = latency if width else f"{performance.request_tps:.3g} requests/s"
    yield (
        min(ANALYSIS_PHRASES["basis"][performance.basis]["doubt"] + width / 2, 2.9),
        "step costs",
        f"{CALIBRATION_BASIS_LABELS[performance.basis]}; {wide}",
    )
    if drafting := deployment.speculation:
        yield 1.8, "acceptance", f"{drafting.method}, {drafting.acceptance_rate:.0%}"
    if cached := best.prediction.effective_workload.cache_hit_fraction:
        yield 2 * cached, "reuse", f"{cached:.0%} of all prompt tokens are found in the cache"
    if workload.assumptions:
        yield 1.5, "lengths", workload.assumptions[0]
    elif workload.trace is None:
        spread = workload.compute_total_tokens_quantile(0.99) / max(
            workload.compute_total_tokens_quantile(0.5), 1.0
        )
        how = f"p99 of prompt + output is {spread:.1f} times the median"
        yield 0.6, "texts" if scenario.offline else "traffic", how
    usd = best.prediction.usd_per_hour_interval
    if usd and usd.hi > 1.05 * usd.mid:
        yield (
            math.log(usd.hi / usd.mid),
            "price",
            f"${usd.lo:,.2f} to ${usd.hi:,.2f} an hour by who lets the GPUs",
        )
    if any(pool.num_replicas == 1 for pool in best.prediction.pools):
        yield 0.9, "replica", "a restart or a lost GPU stops the service"
