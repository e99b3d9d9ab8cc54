"""Sentences and tables of a plan for the summary of a report."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd

from planner.analysis.layout_tables import build_candidate_frame
from planner.analysis.load_ramp import run_load_ramp
from planner.core.intervals import Interval
from planner.core.number_format import format_number
from planner.core.text import escape_markdown
from planner.engines.deployment import choose_machines
from planner.hardware.prices import look_up_gpu_price
from planner.latency.performance import Performance
from planner.planning.alternatives import explain_alternatives
from planner.planning.autoscaling import NUM_SIMULATED_DAYS
from planner.planning.billing import price_tokens
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
from planner.planning.slo import SloTarget, format_latency, list_benchmark_targets


def compare_engines(plan: Plan) -> pd.DataFrame:
    """Return the best deployment, USD per hour and violations or risks of each allowed engine."""
    best: dict[str, Candidate] = {}
    for candidate in plan.candidates:
        best.setdefault(candidate.deployment.engine.name, candidate)
    rows = [
        (
            str(c.deployment.engine),
            c.description,
            _format_usd(c.usd_per_hour),
            "; ".join(c.violations or c.risks) or "meets targets",
        )
        for c in best.values()
    ]
    return pd.DataFrame(rows, columns=["engine", "best deployment", "USD per hour", "verdict"])


def summarize_plan(plan: Plan) -> str:
    """Summarize a plan in a few sentences: what to rent, SLO status and free capacity."""
    scenario, chosen, best = plan.scenario, plan.chosen, plan.best
    if chosen is None:
        closest = (
            f"The nearest is {_describe_offer(scenario, best)}, but {'; '.join(best.violations)}"
            if best
            else str(plan.binding_constraint)
        )
        return f"No plan meets the targets. {closest.rstrip('.')}."
    free = compute_free_capacity(scenario, chosen.prediction)
    spare = f" {free:.0%} of what it can serve stays free." if free is not None and free > 0 else ""
    kept = "is done in time" if scenario.offline else "meets every target"
    odds = f"{chosen.probability:.0%}"
    answers = [plan.load_sentence, plan.api_comparison and plan.api_comparison.sentence]
    first = "".join(f"{answer[0].upper()}{answer[1:]}. " for answer in answers if answer)
    sentence = (
        f"{first}Run {_describe_offer(scenario, chosen)}. It {kept} with a probability of {odds}"
    )
    safer = ""
    if plan.safer:
        offer = _describe_offer(scenario, plan.safer)
        safer = f" Safer, with {plan.safer.probability:.0%}: {offer}."
    if not chosen.at_risk:
        return f"{sentence}.{spare}{safer}"
    return f"{sentence}; {scenario.confidence:.0%} were asked for: {'; '.join(plan.reasons)}.{spare}{safer}"


def _describe_offer(scenario: Scenario, candidate: Candidate) -> str:
    """Describe a candidate and its price, if known."""
    text = candidate.description
    usd = candidate.usd_per_hour
    month = candidate.prediction.usd_per_month
    if usd is None or month is None:
        return text
    hours = estimate_run_hours(scenario, candidate)
    total = f"${usd * hours.mid:,.0f} for the job" if hours else f"${month.mid:,.0f} a month"
    return f"{text} for ${usd:,.2f} an hour, {total}"


def describe_scenario(scenario: Scenario) -> str:
    """Describe model and traffic in a line; offline as work with a deadline."""
    traffic, total = str(scenario.workload), scenario.workload.num_prompts
    if scenario.offline and total and scenario.workload.rate:
        hours = total / scenario.workload.rate / 3600
        traffic = (
            f"{total:,} requests within {format_number(hours)} hours; {traffic.partition('; ')[2]}"
        )
    return f"{scenario.model}; {traffic}"


def explain_binding_constraint(plan: Plan) -> str:
    """Explain the binding constraint, and by which rule of the search the runner-up lost."""
    chosen, runner_up = plan.chosen, plan.runner_up
    if chosen is None:
        return str(plan.binding_constraint)
    if runner_up is None:
        return f"{plan.binding_constraint} No other layout or GPU meets the targets."
    text = f"{plan.binding_constraint} The runner-up is {runner_up.description}"
    margins = (
        f"this plan takes {chosen.limit_utilization:.0%} of its tightest limit, the runner-up"
        f" {runner_up.limit_utilization:.0%}"
    )
    usd, other_usd = chosen.usd_per_hour, runner_up.usd_per_hour
    if usd is not None and other_usd is not None and other_usd > usd * 1.001:
        return f"{text}, ${other_usd:,.2f} an hour, {other_usd / usd - 1:.0%} more; {margins}."
    price_text = (
        "at the same price"
        if usd is not None and other_usd is not None
        else "with as many GPUs or more"
    )
    reasons = {
        "it needs gpu_memory_utilization above the engine's default": (
            runner_up.raises_memory and not chosen.raises_memory
        ),
        f"it is less likely to meet every target, {runner_up.probability:.0%}": (
            round(runner_up.probability, 2) < round(chosen.probability, 2)
        ),
        "it changes the model's formats more": runner_up.preference_key > chosen.preference_key,
        "it has more pipeline stages": runner_up.deployment.layout.pp > chosen.deployment.layout.pp,
    }
    reason = next((name for name, applies in reasons.items() if applies), "it leaves less room")
    return f"{text}, {price_text}. It comes second because {reason}: {margins}."


def build_rental_table(plan: Plan) -> pd.DataFrame:
    """Return what to rent for the best candidate, its cost, and the source of the price."""
    best = plan.best
    assert best is not None
    deployment = best.deployment
    pools = best.prediction.pools
    performance = best.prediction.performance
    gpus, gpu_name = sum(pool.num_gpus for pool in pools), deployment.gpu.name
    gpus_per_worker = max(pool.layout.gpus_per_replica for pool in pools)
    sizes = [
        size
        for pool in pools
        for size in pool.machines
        or choose_machines(pool.num_replicas, pool.layout.gpus_per_replica, (pool.gpus_per_node,))
    ]
    idle = sum(sizes) - gpus
    machines = " + ".join(
        f"{count} of {size} GPUs" if size > 1 else f"{count}"
        for size, count in Counter(sizes).items()
    )
    setup = f"{best.description.partition(', ')[2]}, {deployment.engine}"
    needed = f"{machines}, {idle} of {sum(sizes)} GPUs not needed" if idle else machines
    rows: list[tuple[str, object]] = [
        ("GPUs", f"{gpus} x {gpu_name}"),
        ("machines", needed),
        ("set up as", setup),
    ]
    price = look_up_gpu_price(deployment.gpu, plan.scenario.prices)
    usd, month_usd = best.usd_per_hour, best.prediction.usd_per_month
    if price and usd and month_usd:
        month = ("cost per month (USD)", month_usd.mid)
        hours = estimate_run_hours(plan.scenario, best)
        rows += [
            ("cost per hour (USD)", usd),
            ("cost of all the work (USD)", hours * usd) if hours else month,
        ]
        if idle and not deployment.machines and gpus_per_worker > 1:  # one GPU can be rented alone
            rows += [
                (
                    "cost per hour where only whole machines are let (USD)",
                    usd * (sum(sizes) / gpus),
                )
            ]
        if tokens := price_tokens(plan.scenario, best):
            rows += [(f"cost per million {tokens[1]} tokens (USD)", tokens[0])]
        rows += [("price of a GPU", str(price))]
    else:
        rows += [("price", f"none is known for {gpu_name}: set prices in the scenario")]
    rows += [
        (f"power and energy of the GPUs ({name})", value)
        for name, value in estimate_energy(plan.scenario, best)
    ]
    if performance:
        rows += [
            ("output (tokens/s)", performance.output_tps),
            ("requests served (requests/s)", performance.request_tps),
        ]
        rows += [("figures", f"80% intervals, {performance.source_description}")]
    return pd.DataFrame(
        {"what": [name for name, _ in rows], "value": [_format_amount(v) for _, v in rows]}
    )


def _format_amount(value: object) -> object:
    """Format numbers and intervals with cents below 100; what is no number stays."""
    if not isinstance(value, float | Interval):
        return value
    size = value if isinstance(value, float) else value.mid
    return f"{value:,.{2 if size < 100 else 0}f}"


def describe_confidence(plan: Plan) -> str:
    """Describe the choice confidence, and the benchmark that most often changes the choice."""
    confidence = estimate_choice_confidence(plan)
    if confidence is None:
        return ""
    text = f"I{str(confidence)[1:]}. It meets every target in {1 - confidence.p_infeasible:.0%}."
    if confidence.best_benchmark is None:
        return f"{text} No benchmark of one deployment would change the choice."
    measured, share = confidence.best_benchmark
    is_plan = measured is plan.chosen
    target = "the plan itself" if is_plan else escape_markdown(measured.description)
    names = (
        ["prefill", "decode", "router", "bench"]
        if measured.is_disaggregated
        else ["serve", "bench"]
    )
    files = " and ".join(f"`{'' if is_plan else 'measure/'}{name}.sh`" for name in names)
    extent = "both pools" if measured.is_disaggregated else "one replica"
    return (
        f"{text} Benchmark {target} first, {extent} ({files}): the result changes the choice in"
        f" {share:.0%} of cases."
    )


def build_choice_table(plan: Plan) -> pd.DataFrame:
    """Return how often each candidate is chosen in the draws, and the value of its benchmark."""
    confidence = estimate_choice_confidence(plan)
    if confidence is None or plan.chosen is None:
        return pd.DataFrame()
    values = {id(candidate): f"{share:.0%}" for candidate, share in confidence.benchmark_values}
    rows = [
        (c.description, _format_usd(c.usd_per_hour), round(share * NUM_DRAWS), values.get(id(c)))
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
    """Format an amount in USD; None stays None."""
    return None if amount is None else f"{amount:,.2f}"


def build_candidate_table(plan: Plan) -> pd.DataFrame:
    """Return the ten best candidates from best to worst; the closest first if none is feasible."""
    candidates = plan.candidates[:10]
    data = build_candidate_frame(plan, candidates, "get_for_display")
    data = data.rename(columns={n: n.lower() for n in ("Targets", "Figures", "Requests/s")})
    data["deployment"] = [candidate.description for candidate in candidates]
    data["USD per hour"] = [_format_usd(candidate.usd_per_hour) for candidate in candidates]
    data["what is missing"] = [describe_violations(plan, candidate) for candidate in candidates]
    latencies = [f"{target.name} (ms)" for target in plan.scenario.slo_targets]
    verdict = "targets" if plan.chosen else "what is missing"
    return data[
        [
            "deployment",
            "USD per hour",
            *latencies,
            *["requests/s"] * plan.scenario.offline,
            verdict,
            "figures",
        ]
    ]


def describe_violations(plan: Plan, candidate: Candidate) -> str:
    """Describe how far a candidate exceeds its limits, in a few words.

    A latency that grows without bound is omitted: the table shows it.
    """
    performance = candidate.prediction.performance
    violations = dict(zip(candidate.violated_constraints, candidate.violations, strict=True))
    if (
        performance
        and "capacity" in violations
        and (capacity := get_capacity_rps(plan.scenario, performance))
    ):
        violations["capacity"] = (
            f"{format_number(compute_offered_rps(plan.scenario, candidate.prediction))} of"
            f" {format_number(capacity.mid)} requests/s at most"
        )
    for target in plan.scenario.slo_targets if performance else ():
        if target.name in violations and performance:
            ratio = (
                performance.get_for_display(target.metric, target.percentile).mid / target.seconds
            )
            excess = f"{ratio - 1:.0%} over" if ratio < 3 else f"{ratio:,.0f} times the limit"
            violations[target.name] = f"{target.name} {excess}" if math.isfinite(ratio) else ""
    return "; ".join(filter(None, violations.values())) or "nothing"


def build_relaxation_table(plan: Plan) -> pd.DataFrame:
    """Return the limits and the rate that the closest plan would meet, if none is feasible."""
    best, performance, rows = plan.best, plan.performance, []
    if best is None or performance is None:
        return pd.DataFrame(columns=["change", "from", "to", "to be safe"])
    for target in plan.scenario.slo_targets:
        value = performance.get_for_display(target.metric, target.percentile)
        if target.name in best.violated_constraints and not performance.saturated:
            limits = (
                "none would do" if math.isinf(value_end) else format_latency(value_end)
                for value_end in (value.mid, value.hi)
            )
            rows.append((f"a limit for {target.name} of", format_latency(target.seconds), *limits))
    rate, headroom = plan.scenario.workload.rate, 1 - plan.scenario.headroom
    if plan.scenario.offline and rate:
        interval = performance.request_tps * headroom
        rows.append(
            (
                "requests/s asked of it",
                format_number(rate),
                format_number(interval.mid),
                format_number(interval.lo),
            )
        )
    elif rate and performance.capacity and not best.is_disaggregated:
        ceiling = run_load_ramp(
            best.deployment, plan.scenario.workload, plan.scenario.slo_targets
        ).ceiling
        mid = min(ceiling.mid, performance.capacity.mid * headroom)
        low = min(ceiling.lo, performance.capacity.lo * headroom)
        shown = (
            (format_number(mid), format_number(low)) if mid else ("none would do", "none would do")
        )
        rows.append(("a rate (requests/s) of", format_number(rate), *shown))
    return pd.DataFrame(rows, columns=["change", "from", "to", "to be safe"])


def describe_slo_margin(plan: Plan) -> str:
    """Describe that no limit has to be relaxed, if the plan is feasible."""
    if plan.verdict == "at_risk":
        reasons = "; ".join(plan.reasons)
        return (
            "At the expected step cost no limit has to be relaxed, but the plan is less likely to meet"
            f" the targets than required: {reasons}."
        )
    return "No limit has to be relaxed: the plan meets every target." if plan.chosen else ""


def build_alternatives_table(plan: Plan) -> pd.DataFrame:
    """Return each allowed GPU, engine and format that the plan does not use, and why."""
    return pd.DataFrame(
        [(other.option, other.reason) for other in explain_alternatives(plan)],
        columns=["instead", "why not"],
    )


def build_rejection_table(plan: Plan) -> pd.DataFrame:
    """Return the dozen largest options that could not be evaluated, and why."""
    rows = dict.fromkeys(
        (r.description, r.gpu, r.reason)
        for r in sorted(plan.rejected, key=lambda rejection: -rejection.gpus)
    )
    return pd.DataFrame(list(rows)[:12], columns=["layout", "GPU", "why not"])


def describe_search_effort(plan: Plan) -> str:
    """Describe how many options the search evaluated."""
    counts = Counter(rejection.bottleneck for rejection in plan.rejected)
    reasons = ", ".join(f"{number} for {bottleneck}" for bottleneck, number in counts.most_common())
    rejected = f"; ruled out before: {len(plan.rejected)} ({reasons})" if counts else ""
    num_feasible = sum(candidate.is_feasible for candidate in plan.candidates) or "none"
    simulated = sum(candidate.is_simulated for candidate in plan.candidates)
    return (
        f"Deployments estimated analytically: {len(plan.candidates)}; simulated: {simulated} of"
        f" them; meeting the targets: {num_feasible}{rejected}."
    )


def describe_day(plan: Plan) -> str:
    """Describe the replicas over the day, and in how many single hours an unusual day may miss.

    The plan's probability is that of its busiest hour at all step costs. A single hour's tail is
    judged at the expected step cost, but on the worst of `NUM_SIMULATED_DAYS` days or one in forty.
    """
    day = plan.autoscaling
    if day is None:
        return ""
    hours, missed = len(day.rates), len(day.violated_hours)
    unit = "day" if hours == 24 else "week" if hours == 168 else "cycle"
    text = f"{str(day)[:1].upper()}{str(day)[1:]}."
    if not missed:
        return (
            f"{text} Every hour meets the targets on each of {NUM_SIMULATED_DAYS} days simulated at"
            " the expected step cost."
        )
    worst = max(day.hourly_limit_utilization) - 1
    return (
        f"{text} {hours - missed} of {hours} hours meet the targets on an unusual {unit} (1 in 40)"
        f" too. In the other {missed} the whole fleet runs, and on such a {unit} the tail of one hour"
        f" may exceed its limit by up to {worst:.0%}."
    )


def build_ramp_table(
    predicted: Mapping[float, Performance], targets: Sequence[SloTarget] = ()
) -> pd.DataFrame:
    """Return the metrics of the SLOs and output throughput of one replica by request rate."""
    judged = list_benchmark_targets(targets)
    rows = [
        (format_number(rate), *(p.get(t.metric, t.percentile) * 1e3 for t in judged), p.output_tps)
        for rate, p in predicted.items()
    ]
    names = [f"{target.name} (ms)" for target in judged]
    return pd.DataFrame(rows, columns=["requests/s", *names, "output tokens/s"])
