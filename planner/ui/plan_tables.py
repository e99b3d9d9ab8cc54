"""Sentences and tables of an answer, for the summary of a report."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd

from planner.answers import Answer, Offer, Performance, words
from planner.answers.answer import Relaxation, is_same_price
from planner.core.intervals import Interval
from planner.core.number_format import EN_DASH, format_number
from planner.planning.slo import SloTarget, format_latency, list_benchmark_targets

RELAXED = {
    "rate": "a rate (requests/s) of",
    "concurrency": "concurrent requests of",
    "hours": "a deadline (h) of",
}
MAX_CANDIDATE_ROWS, MAX_REJECTED_ROWS = 10, 12


def compare_engines(answer: Answer) -> pd.DataFrame:
    """Return the best deployment, USD per hour and violations or risks of each allowed engine."""
    rows = [
        (
            str(offer.deployment.engine),
            offer.description,
            _format_usd(offer.usd_per_hour),
            "meets targets" if offer.is_confident else words.explain_shortfall(offer),
        )
        for offer in answer.by_engine
    ]
    return pd.DataFrame(rows, columns=["engine", "best deployment", "USD per hour", "verdict"])


def explain_choice(answer: Answer) -> str:
    """Explain what keeps anything cheaper from doing, and why the runner-up comes second."""
    chosen, runner_up = answer.chosen, answer.runner_up
    if chosen is None:
        return answer.binding.sentence
    near = answer.binding.offer
    text = (
        f"Closest cheaper option: {words.explain_binding(answer)}."
        if near
        else answer.binding.sentence
    )
    if runner_up is None:
        return text
    text = f"{text} The runner-up is {runner_up.description}"
    usd, own = runner_up.bill, chosen.bill
    if usd and own and usd > own and not is_same_price(usd, own):
        return f"{text}, {words.format_price(runner_up)}, {usd / own - 1:.0%} more."
    price = "at the same price" if usd and own else "with as many GPUs or more"
    odds = f"{words.format_odds(runner_up)} likely against {words.format_odds(chosen)}"
    return f"{text}, {price}, {odds}."


def build_rental_table(answer: Answer) -> pd.DataFrame:
    """Return what to rent, its cost, and the source of the price."""
    best = answer.best
    assert best is not None
    day, idle = answer.day, best.num_idle_gpus
    smaller = day.deployment.returnable_machines if day and day.num_starts else ()
    sizes = smaller or best.machine_sizes  # no part of a machine can be given back
    machines = " + ".join(
        f"{count} of {size} GPUs" if size > 1 else f"{count}"
        for size, count in Counter(sizes).items()
    )
    needed = f"{machines}, {idle} of {sum(sizes)} GPUs not needed" if idle else machines
    rows: list[tuple[str, object]] = [
        ("GPUs", f"{best.num_gpus} x {best.gpu}"),
        ("machines", needed),
        ("set up as", f"{best.description.partition(', ')[2]}, {best.deployment.engine}"),
        *_list_costs(answer, best),
    ]
    rows += [(f"power and energy of the GPUs ({name})", value) for name, value in best.energy]
    if performance := best.performance:
        rows += [
            ("output (tokens/s)", performance.output_tps),
            ("requests served (requests/s)", performance.request_tps),
            ("figures", f"80% intervals, {performance.source_description}"),
        ]
    names, values = zip(*rows, strict=True)
    return pd.DataFrame({"what": names, "value": list(map(_format_amount, values))})


def _list_costs(answer: Answer, best: Offer) -> list[tuple[str, object]]:
    """List the headline bill, those on other bases, and the price that they rest on."""
    usd = best.usd_per_hour
    if best.price is None or usd is None or not best.bills:
        return [("price", f"none is known for {best.gpu}: set prices in the scenario")]
    is_job, bill = best.run_hours is not None, best.bills[0]
    basis = f", {bill.basis}" * bool(answer.day)
    month = "cost of all the work (USD)" if is_job else f"cost per month{basis} (USD)"
    rows: list[tuple[str, object]] = [
        ("cost per hour (USD)", usd.mid),
        (month, best.run_hours * usd.mid if best.run_hours else bill.usd),
    ]
    rows += [(f"cost per month, {each.basis} (USD)", each.usd) for each in best.bills[1:]]
    replica = max(pool.layout.gpus_per_replica for pool in best.pools)
    if best.num_idle_gpus and not best.deployment.machines and replica > 1:
        # one GPU can be rented alone
        whole = usd.mid * (sum(best.machine_sizes) / best.num_gpus)
        rows += [("cost per hour where only whole machines are let (USD)", whole)]
    if best.usd_per_mtok:
        rows += [(f"cost per million {best.priced_side} tokens (USD)", best.usd_per_mtok)]
    return [*rows, ("price of a GPU", str(best.price))]


def _format_amount(value: object) -> object:
    """Format numbers and intervals with cents below 100; what is no number stays."""
    if not isinstance(value, float | Interval):
        return value
    size = value if isinstance(value, float) else value.mid
    return f"{value:,.{2 if size < 100 else 0}f}"


def _format_usd(usd: Interval | None) -> str | None:
    return None if usd is None else f"{usd.mid:,.2f}"


def build_candidate_table(answer: Answer) -> pd.DataFrame:
    """Return the ten best deployments from best to worst; the closest first if none is feasible."""
    scenario, rows = answer.scenario, []
    for offer in answer.candidates[:MAX_CANDIDATE_ROWS]:
        performance = offer.performance
        rows.append({
            "deployment": offer.description,
            "USD per hour": _format_usd(offer.usd_per_hour),
            **{
                f"{target.name} (ms)": performance
                and performance.get_for_display(target.metric, target.percentile) * 1e3
                for target in scenario.slo_targets
            },
            **({"requests/s": performance and performance.request_tps} if scenario.offline else {}),
            **(
                {"targets": offer.status if performance else "does not fit"}
                if answer.chosen
                else {"what is missing": "" if offer.is_confident else words.explain_shortfall(offer)}
            ),
            "figures": performance and performance.source_label,
        })  # fmt: skip
    return pd.DataFrame(rows)


def build_relaxation_table(answer: Answer) -> pd.DataFrame:
    """Return the limits and the load that would be met, if nothing meets what is asked for."""
    found = answer.ways_out.relaxations if answer.ways_out else ()
    limits = [each for each in found if each.kind == "limit"]
    rows = [(RELAXED[each.kind], *_list_values(each)) for each in found if each not in limits]
    if limits:  # those that are missed have to give way together
        names = " and ".join(each.name for each in limits)
        what = f"limits for {names}, together, of" if len(limits) > 1 else f"a limit for {names} of"
        values = zip(*map(_list_values, limits), strict=True)
        rows.insert(0, (what, *map("; ".join, values)))
    return pd.DataFrame(rows, columns=["change", "from", "expected", "with the asked probability"])


def _list_values(found: Relaxation) -> list[str]:
    values = (found.given, found.expected, found.pessimistic)
    if found.kind == "limit":
        return [EN_DASH if value is None else format_latency(value) for value in values]
    return [EN_DASH if value is None else format_number(value) for value in values]


def describe_slo_margin(answer: Answer) -> str:
    """Describe that no limit has to be relaxed, if the plan is feasible."""
    if answer.verdict == "at_risk":
        reasons = "; ".join(answer.reasons)
        return (
            "At the expected step cost no limit has to be relaxed, but the plan is less likely to meet"
            f" the targets than required: {reasons}."
        )
    return "No limit has to be relaxed: the plan meets every target." if answer.chosen else ""


def build_rejection_table(answer: Answer) -> pd.DataFrame:
    """Return the dozen largest options that could not be evaluated, and why."""
    largest = sorted(answer.rejected, key=lambda rejection: -rejection.gpus)
    rows = dict.fromkeys((each.description, each.gpu, each.reason) for each in largest)
    return pd.DataFrame(list(rows)[:MAX_REJECTED_ROWS], columns=["layout", "GPU", "why not"])


def describe_search_effort(answer: Answer) -> str:
    """Describe how many options the search evaluated."""
    counts = Counter(rejection.bottleneck for rejection in answer.rejected)
    reasons = ", ".join(f"{number} for {bottleneck}" for bottleneck, number in counts.most_common())
    rejected = f"; ruled out before: {len(answer.rejected)} ({reasons})" if counts else ""
    effort = answer.effort
    return (
        f"Deployments estimated analytically: {effort['estimated']}; simulated: {effort['simulated']} of"
        f" them; meeting the targets: {effort['feasible'] or 'none'}{rejected}."
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
