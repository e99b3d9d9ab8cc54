"""The answer in words and tables: what the summary of a report says about a plan."""

import math
from collections import Counter
from collections.abc import Mapping

import pandas as pd

from planner.analysis.layout_tables import build_candidate_frame, get_slo_label
from planner.analysis.load_ramp import run_load_ramp
from planner.core.intervals import Interval
from planner.engines.deployment import choose_machines
from planner.hardware.prices import look_up_gpu_price
from planner.latency.performance import Performance
from planner.planning.alternatives import explain_alternatives
from planner.planning.candidate import Candidate
from planner.planning.confidence import NUM_DRAWS, estimate_choice_confidence
from planner.planning.evaluation import (
    compute_free_capacity,
    compute_offered_rps,
    estimate_energy,
    estimate_run_hours,
    get_capacity_rps,
)
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.slo import format_latency
from planner.planning.what_if import WhatIf


def compare_engines(plan: Plan) -> pd.DataFrame:
    """One row per engine that may be used: its best deployment, USD an hour, and what it misses or risks."""
    best: dict[str, Candidate] = {}
    for candidate in plan.candidates:
        best.setdefault(candidate.deployment.engine.name, candidate)
    rows = [
        (str(found.deployment.engine), found.description, _format_usd(found.usd_per_hour),
         "; ".join(found.violations or found.risks) or "meets the service level")
        for found in best.values()
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["engine", "best deployment", "USD per hour", "verdict"])


def summarize_plan(plan: Plan) -> str:
    """The answer in a few sentences: what to rent, whether it keeps the promises, and how much of it stays free."""
    scenario, chosen, best = plan.scenario, plan.chosen, plan.best
    if chosen is None:
        near = (
            f"The nearest is {_describe_offer(scenario, best)}, but {'; '.join(best.violations)}"
            if best
            else str(plan.binding_constraint)
        )
        return f"Nothing that was allowed meets the service level. {near.rstrip('.')}."
    free = compute_free_capacity(scenario, chosen.prediction)
    spare = f" {free:.0%} of what it can serve stays free." if free is not None and free > 0 else ""
    kept = (
        f"Run {_describe_offer(scenario, chosen)}. It"
        f" {'is done in time' if scenario.offline else 'keeps every promise'}"
    )
    if not chosen.at_risk:
        return f"{kept}, at the pessimistic end of every interval too.{spare}"
    safer = f" Safe even there: {_describe_offer(scenario, plan.safer)}." if plan.safer else ""
    return f"{kept}, but at the pessimistic end {'; '.join(chosen.risks)}.{spare}{safer}"


def _describe_offer(scenario: Scenario, candidate: Candidate) -> str:
    """A candidate and its price, where one is known."""
    text, usd, month = (
        candidate.description,
        candidate.usd_per_hour,
        candidate.prediction.usd_per_month,
    )
    if usd is None or month is None:
        return text
    hours = estimate_run_hours(scenario, candidate)
    whole = f"${usd * hours.mid:,.0f} for all of it" if hours else f"${month.mid:,.0f} a month"
    return f"{text} for ${usd:,.2f} an hour, {whole}"


def describe_scenario(scenario: Scenario) -> str:
    """Model and traffic in a line: offline as so much work by a deadline."""
    traffic, many = str(scenario.workload), scenario.workload.num_prompts
    if scenario.offline and many and scenario.workload.rate:
        hours = many / scenario.workload.rate / 3600
        traffic = f"{many:,} requests within {hours:.3g} hours; {traffic.partition('; ')[2]}"
    return f"{scenario.model}; {traffic}"


def explain_binding_constraint(plan: Plan) -> str:
    """What keeps anything cheaper from doing, and why it is this and not the runner-up, by the rule of the search."""
    chosen, other = plan.chosen, plan.runner_up
    if chosen is None:
        return str(plan.binding_constraint)
    if other is None:
        return f"{plan.binding_constraint} No other layout or GPU meets the service level."
    name = f"{plan.binding_constraint} The runner-up is {other.description}"
    margins = (
        f"this plan takes {chosen.limit_utilization:.0%} of its tightest limit, the runner-up"
        f" {other.limit_utilization:.0%}"
    )
    usd, more = chosen.usd_per_hour, other.usd_per_hour
    if usd is not None and more is not None and more > usd * 1.001:
        return f"{name}, ${more:,.2f} an hour, {more / usd - 1:.0%} more; {margins}."
    cheap = (
        "at the same price" if usd is not None and more is not None else "with as many GPUs or more"
    )
    reasons = {
        "at the pessimistic end it does not hold": other.at_risk and not chosen.at_risk,
        "it changes the model's formats more": other.preference_key > chosen.preference_key,
        "it has more pipeline stages": other.deployment.layout.pp > chosen.deployment.layout.pp,
    }
    reason = next((text for text, holds in reasons.items() if holds), "it leaves less room")
    return f"{name}, {cheap}. It comes second because {reason}: {margins}."


def build_rental_table(plan: Plan) -> pd.DataFrame:
    """What to rent for the best candidate, for how much, and where the price is from."""
    best = plan.best
    assert best is not None
    deployment, pools, performance = (
        best.deployment,
        best.prediction.pools,
        best.prediction.performance,
    )
    gpus, card = sum(pool.num_gpus for pool in pools), deployment.gpu.name
    each = max(pool.layout.gpus_per_replica for pool in pools)
    taken = [size for pool in pools for size in pool.machines
             or choose_machines(pool.num_replicas, pool.layout.gpus_per_replica, (pool.gpus_per_node,))]  # fmt: skip
    idle = sum(taken) - gpus
    whole = " + ".join(
        f"{many} of {size} GPUs" if size > 1 else f"{many}" for size, many in Counter(taken).items()
    )
    setup = f"{best.description.partition(', ')[2]}, {deployment.engine}"
    needed = f"{whole}, {idle} of {sum(taken)} GPUs not needed" if idle else whole
    rows: list[tuple[str, object]] = [
        ("GPUs", f"{gpus} x {card}"),
        ("machines", needed),
        ("set up as", setup),
    ]
    price, usd = (
        look_up_gpu_price(deployment.gpu, plan.scenario.prices),
        best.prediction.usd_per_hour_interval,
    )
    if price and usd:
        month, hours = (
            ("cost per month (USD)", best.prediction.usd_per_month),
            estimate_run_hours(plan.scenario, best),
        )
        rows += [
            ("cost per hour (USD)", usd),
            ("cost of all the work (USD)", hours * usd.mid) if hours else month,
        ]
        if idle and not deployment.machines and each > 1:  # single GPUs are let singly
            rows += [
                ("cost per hour where only whole machines are let (USD)", usd * (sum(taken) / gpus))
            ]
        if per_token := best.prediction.usd_per_mtok_output:
            rows += [("cost per million output tokens, at the middle price (USD)", per_token)]
        rows += [("price of a GPU", str(price))]
    else:
        rows += [("price", f"none is known for {card}: set prices in the scenario")]
    rows += [
        (f"drawn by the GPUs ({what})", value)
        for what, value in estimate_energy(plan.scenario, best)
    ]
    if performance:
        rows += [
            ("output (tokens/s)", performance.output_tps),
            ("requests served (requests/s)", performance.request_tps),
        ]
        rows += [("figures", f"80% intervals, {performance.source_description}")]
    told = [f"{v:,.{2 if v.mid < 100 else 0}f}" if isinstance(v, Interval) else v for _, v in rows]
    return pd.DataFrame({"what": [name for name, _ in rows], "value": told})


def describe_confidence(plan: Plan) -> str:
    """How sure the choice is, and what to measure first: the result that would change it most often."""
    confidence = estimate_choice_confidence(plan)
    if confidence is None:
        return ""
    text = (
        f"I{str(confidence)[1:]}. It breaks a promise itself in"
        f" {confidence.p_infeasible * NUM_DRAWS:,.0f}."
    )
    if confidence.best_benchmark is None:
        return f"{text} No benchmark of one deployment would change the choice."
    measured, share = confidence.best_benchmark
    own = measured is plan.chosen
    what = "the plan itself" if own else measured.description
    names = (
        ["prefill", "decode", "router", "bench"]
        if measured.is_disaggregated
        else ["serve", "bench"]
    )
    files = " and ".join(f"`{'' if own else 'measure/'}{name}.sh`" for name in names)
    copies = "both pools" if measured.is_disaggregated else "one replica"
    return f"{text} Measure first {what}, {copies} ({files}): its result changes it in {share:.0%}."


def build_choice_table(plan: Plan) -> pd.DataFrame:
    """What is chosen in the draws from the intervals, most often first, and how often a benchmark of it would tell."""
    confidence = estimate_choice_confidence(plan)
    if confidence is None or plan.chosen is None:
        return pd.DataFrame()
    told = {id(candidate): f"{share:.0%}" for candidate, share in confidence.benchmark_values}
    rows = [
        (c.description, _format_usd(c.usd_per_hour), round(share * NUM_DRAWS), told.get(id(c)))
        for c, share in ((plan.chosen, confidence.p_unchanged), *confidence.alternatives[:5])
    ]
    columns = [
        "deployment",
        "USD per hour",
        f"chosen in (of {NUM_DRAWS:,} draws)",
        "its benchmark changes the choice",
    ]
    return pd.DataFrame(rows, columns=columns)


def _format_usd(amount: float | None) -> str | None:
    return None if amount is None else f"{amount:,.2f}"


def build_candidate_table(plan: Plan) -> pd.DataFrame:
    """The ten best candidates, a row each, from best to worst; the nearest first where none meets the service level."""
    shown, names = plan.candidates[:10], {"Service level": "service level", "Figures": "figures"}
    data = build_candidate_frame(plan, shown, "get_for_display").rename(
        columns={**names, "Requests/s": "requests/s"}
    )
    data["deployment"] = [candidate.description for candidate in shown]
    data["USD per hour"] = [_format_usd(candidate.usd_per_hour) for candidate in shown]
    data["what is missing"] = [describe_violations(plan, candidate) for candidate in shown]
    promised = [f"{target.name} (ms)" for target in plan.scenario.slo_targets]
    held = "service level" if plan.chosen else "what is missing"
    return data[
        [
            "deployment",
            "USD per hour",
            *promised,
            *["requests/s"] * plan.scenario.offline,
            held,
            "figures",
        ]
    ]


def describe_violations(plan: Plan, candidate: Candidate) -> str:
    """How far a candidate is from what it misses, in a few words; of a wait that grows the figures tell."""
    performance, missed = (
        candidate.prediction.performance,
        dict(zip(candidate.violated_constraints, candidate.violations, strict=True)),
    )
    if (
        performance
        and "capacity" in missed
        and (most := get_capacity_rps(plan.scenario, performance))
    ):
        missed["capacity"] = (
            f"{compute_offered_rps(plan.scenario, candidate.prediction):.3g} of {most.mid:.3g}"
            " requests/s at most"
        )
    for target in plan.scenario.slo_targets if performance else ():
        if target.name in missed and performance:
            over = (
                performance.get_for_display(target.metric, target.percentile).mid / target.seconds
            )
            far = f"{over - 1:.0%} over" if over < 3 else f"{over:,.0f} times the limit"
            missed[target.name] = f"{target.name} {far}" if math.isfinite(over) else ""
    return "; ".join(filter(None, missed.values())) or "nothing"


def build_relaxation_table(plan: Plan) -> pd.DataFrame:
    """Where nothing meets the service level: which limits, and which rate, the nearest plan would keep."""
    best, performance, rows = plan.best, plan.performance, []
    if best is None or performance is None:
        return pd.DataFrame(columns=["change", "from", "to", "to be safe"])
    for target in plan.scenario.slo_targets:
        value = performance.get_for_display(target.metric, target.percentile)
        if target.name in best.violated_constraints and not performance.saturated:
            would = (
                "none would do" if math.isinf(each) else format_latency(each)
                for each in (value.mid, value.hi)
            )
            rows.append((f"a limit for {target.name} of", format_latency(target.seconds), *would))
    rate, headroom = plan.scenario.workload.rate, 1 - plan.scenario.headroom
    if plan.scenario.offline and rate:
        interval = performance.request_tps * headroom
        rows.append(
            ("requests/s asked of it", f"{rate:.3g}", f"{interval.mid:.3g}", f"{interval.lo:.3g}")
        )
    elif rate and performance.capacity and not best.is_disaggregated:
        held = run_load_ramp(
            best.deployment, plan.scenario.workload, plan.scenario.slo_targets
        ).ceiling
        mid, low = (
            min(held.mid, performance.capacity.mid * headroom),
            min(held.lo, performance.capacity.lo * headroom),
        )
        shown = (f"{mid:.3g}", f"{low:.3g}") if mid else ("none would do", "none would do")
        rows.append(("a rate (requests/s) of", f"{rate:.3g}", *shown))
    return pd.DataFrame(rows, columns=["change", "from", "to", "to be safe"])


def describe_slo_margin(plan: Plan) -> str:
    """That nothing has to give way, as far as the plan holds."""
    if plan.verdict == "at_risk":
        bad = "; ".join(plan.reasons)
        return (
            "At the middle of every interval nothing has to give way; at the pessimistic end"
            f" {bad}."
        )
    return "Nothing has to give way: the plan keeps every promise." if plan.chosen else ""


def build_alternatives_table(plan: Plan) -> pd.DataFrame:
    """Each GPU, engine and format that the scenario allows and the plan has not, and what it comes to."""
    return pd.DataFrame(
        [(other.option, other.reason) for other in explain_alternatives(plan)],
        columns=["instead", "why not"],
    )


def build_rejection_table(plan: Plan) -> pd.DataFrame:
    """A dozen that could not be evaluated, and why, the largest first."""
    told = dict.fromkeys(
        (r.description, r.gpu, r.reason) for r in sorted(plan.rejected, key=lambda each: -each.gpus)
    )
    return pd.DataFrame(list(told)[:12], columns=["layout", "GPU", "why not"])


def describe_search_effort(plan: Plan) -> str:
    """How much was looked at."""
    why = Counter(rejection.bottleneck for rejection in plan.rejected)
    reasons = ", ".join(f"{number} for {bottleneck}" for bottleneck, number in why.most_common())
    out = f"; ruled out before: {len(plan.rejected)} ({reasons})" if why else ""
    meeting = sum(candidate.is_feasible for candidate in plan.candidates) or "none"
    closer = sum(candidate.is_simulated for candidate in plan.candidates)
    looked = (
        f"Deployments evaluated in closed form: {len(plan.candidates)}; replayed: {closer} of them"
    )
    return f"{looked}; meeting the service level: {meeting}{out}."


def build_what_if_table(plan: Plan, what_ifs: tuple[WhatIf, ...]) -> pd.DataFrame:
    """Each change with the plan that follows, replayed, and its cost beside today's."""
    today = plan.chosen.usd_per_hour if plan.chosen else None
    rows = []
    for item in what_ifs:
        best = item.plan.chosen
        usd = best.usd_per_hour if best else None
        against = f"{(usd / today - 1) * 100:+.0f}" if usd is not None and today else None
        what = best.description if best else "none"
        same = plan.chosen and what == plan.chosen.description
        held = get_slo_label(best) if best else "misses"
        rows.append((item.change, "the same" if same else what, _format_usd(usd), against, held))
    columns = ["change", "plan", "USD per hour", "cost change (%)", "service level"]
    return pd.DataFrame(rows, columns=columns).drop(columns=[] if today else "cost change (%)")


def build_ramp_table(predicted: Mapping[float, Performance]) -> pd.DataFrame:
    """One row per step of a benchmark ramp on one replica: request rate, p99 TTFT and ITL, output throughput."""
    rows = [
        (f"{rate:.3g}", p.ttft["p99"] * 1e3, p.itl["p99"] * 1e3, p.output_tps)
        for rate, p in predicted.items()
    ]
    return pd.DataFrame(
        rows, columns=["requests/s", "TTFT p99 (ms)", "ITL p99 (ms)", "output tokens/s"]
    )
