"""The answer in words and tables: what the summary of a report says about a plan."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pandas as pd

from planner.core.quantities import Interval
from planner.facts.deployment import Deployment, ParallelLayout, machines
from planner.facts.prices import price_per_hour
from planner.latency.performance import Performance
from planner.models.registry import model
from planner.parallelism.layouts import legal_layouts
from planner.planning.candidate import (
    Candidate,
    asked_rps,
    energy,
    free_share,
    milliseconds,
    most_rps,
    replayed,
    run_hours,
)
from planner.planning.confidence import DRAWS, confidence
from planner.planning.deployments import deployment_of
from planner.planning.passed_over import passed_over
from planner.planning.pools import judged
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.what_if import WhatIf
from planner.studies.at_a_glance import kept_up_to
from planner.studies.layout_study import frame, state
from planner.studies.phrases import BASES, PHRASES
from planner.studies.ramp_test import ramp_test


def subject(plan: Plan) -> Deployment:
    """The deployment to talk about: the chosen one, else the nearest, else the widest layout there is."""
    if plan.best:
        return plan.best.deployment
    scenario, card = plan.scenario, plan.scenario.gpus[0]
    served = model(scenario.model, quantization=scenario.quantizations[-1])
    layouts = legal_layouts(served, card.gpu, card.at_most, card.node, scenario.engine) or [ParallelLayout()]
    return deployment_of(scenario, card, served, max(layouts, key=lambda layout: (layout.gpus, layout.tp)))


def by_engine(plan: Plan) -> pd.DataFrame:
    """One row per engine that may be used: its best deployment, USD an hour, and what it misses or risks."""
    best: dict[str, Candidate] = {}
    for candidate in plan.candidates:
        best.setdefault(candidate.deployment.engine.name, candidate)
    rows = [
        (f"{engine} {found.deployment.engine.version}", found.what, _usd(found.usd_per_hour),
         "; ".join(found.misses or found.risks) or "meets the service level")
        for engine, found in best.items()
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["engine", "best deployment", "USD per hour", "verdict"])


def verdict(plan: Plan) -> str:
    """The answer in a few sentences: what to rent, whether it keeps the promises, and how much of it stays free."""
    scenario, chosen, best = plan.scenario, plan.chosen, plan.best
    if chosen is None:
        near = f"The nearest is {_offer(scenario, best)}, but {'; '.join(best.misses)}" if best else str(plan.binding)
        return f"Nothing that was allowed meets the service level. {near.rstrip('.')}."
    free = free_share(scenario, chosen.prediction)
    spare = f" {free:.0%} of what it can serve stays free." if free is not None and free > 0 else ""
    kept = f"Run {_offer(scenario, chosen)}. It {'is done in time' if scenario.offline else 'keeps every promise'}"
    if not chosen.at_risk:
        return f"{kept}, at the pessimistic end of every interval too.{spare}"
    safer = f" Safe even there: {_offer(scenario, plan.safer)}." if plan.safer else ""
    return f"{kept}, but at the pessimistic end {'; '.join(chosen.risks)}.{spare}{safer}"


def _offer(scenario: Scenario, candidate: Candidate) -> str:
    """A candidate and its price, where one is known."""
    said, usd, month = candidate.what, candidate.usd_per_hour, candidate.prediction.usd_per_month
    if usd is None or month is None:
        return said
    hours = run_hours(scenario, candidate)
    whole = f"${usd * hours.mid:,.0f} for all of it" if hours else f"${month.mid:,.0f} a month"
    return f"{said} for ${usd:,.2f} an hour, {whole}"


def asked(scenario: Scenario) -> str:
    """Model and traffic in a line: offline as so much work by a deadline."""
    traffic, many = str(scenario.workload), scenario.workload.num_prompts
    if scenario.offline and many and scenario.workload.rate:
        hours = many / scenario.workload.rate / 3600
        traffic = f"{many:,} requests within {hours:.3g} hours; {traffic.partition('; ')[2]}"
    return f"{scenario.model}; {traffic}"


def limits(plan: Plan) -> str:
    """What keeps anything cheaper from doing, and why it is this and not the runner-up, by the rule of the search."""
    chosen, other = plan.chosen, plan.runner_up
    if chosen is None:
        return str(plan.binding)
    if other is None:
        return f"{plan.binding} No other layout or GPU meets the service level."
    name = f"{plan.binding} The runner-up is {other.what}"
    margins = f"this plan takes {chosen.margin:.0%} of its tightest limit, the runner-up {other.margin:.0%}"
    usd, more = chosen.usd_per_hour, other.usd_per_hour
    if usd is not None and more is not None and more > usd * 1.001:
        return f"{name}, ${more:,.2f} an hour, {more / usd - 1:.0%} more; {margins}."
    cheap = "at the same price" if usd is not None and more is not None else "with as many GPUs or more"
    reasons = {
        "at the pessimistic end it does not hold": other.at_risk and not chosen.at_risk,
        "it changes the model's formats more": other.preference > chosen.preference,
        "it has more pipeline stages": other.deployment.layout.pp > chosen.deployment.layout.pp,
    }
    reason = next((text for text, holds in reasons.items() if holds), "it leaves less room")
    return f"{name}, {cheap}. It comes second because {reason}: {margins}."


def rent(plan: Plan) -> pd.DataFrame:
    """What to rent for the best candidate, for how much, and where the price is from."""
    best = plan.best
    assert best is not None
    deployment, pools, found = best.deployment, best.prediction.pools, best.prediction.performance
    gpus, card = sum(pool.gpus for pool in pools), deployment.gpu.name
    each = max(pool.layout.gpus_per_replica for pool in pools)
    taken = [size for pool in pools for size in pool.machines
             or machines(pool.replicas, pool.layout.gpus_per_replica, (pool.gpus_per_node,))]  # fmt: skip
    idle = sum(taken) - gpus
    whole = " + ".join(f"{many} of {size} GPUs" if size > 1 else f"{many}" for size, many in Counter(taken).items())
    setup = f"{best.what.partition(', ')[2]}, {deployment.engine.name} {deployment.engine.version}"
    needed = f"{whole}, {idle} of {sum(taken)} GPUs not needed" if idle else whole
    rows: list[tuple[str, object]] = [("GPUs", f"{gpus} x {card}"), ("machines", needed), ("set up as", setup)]
    price, usd = price_per_hour(deployment.gpu, plan.scenario.prices), best.prediction.usd
    if price and usd:
        month, hours = ("cost per month (USD)", best.prediction.usd_per_month), run_hours(plan.scenario, best)
        rows += [("cost per hour (USD)", usd), ("cost of all the work (USD)", hours * usd.mid) if hours else month]
        if idle and not deployment.machines and each > 1:  # single GPUs are let singly
            rows += [("cost per hour where only whole machines are let (USD)", usd * (sum(taken) / gpus))]
        if per_token := best.prediction.usd_per_mtok_output:
            rows += [("cost per million output tokens, at the middle price (USD)", per_token)]
        rows += [("price of a GPU", str(price))]
    else:
        rows += [("price", f"none is known for {card}: set prices in the scenario")]
    rows += [(f"drawn by the GPUs ({what})", value) for what, value in energy(plan.scenario, best)]
    if found:
        rows += [("output (tokens/s)", found.output_tps), ("requests served (requests/s)", found.request_tps)]
        rows += [("figures", f"80% intervals, {found.how}")]
    told = [f"{v:,.{2 if v.mid < 100 else 0}f}" if isinstance(v, Interval) else v for _, v in rows]
    return pd.DataFrame({"what": [name for name, _ in rows], "value": told})


def room(plan: Plan, ramped: bool = False) -> str:
    """How much traffic it serves at most, what is free of that, and its `growth`."""
    scenario, best = plan.scenario, plan.best
    found = best.prediction.performance if best else None
    if best is None or found is None or found.capacity is None:
        return ""
    wanted, free = asked_rps(scenario, best.prediction), free_share(scenario, best.prediction) or 0.0
    said = f"It serves {found.capacity:.3g} requests/s at most, and {wanted:.3g} are planned."
    if hours := run_hours(scenario, best):
        many = scenario.workload.num_prompts or 0
        said = f"It is done with {many:,} requests in {hours:.3g} hours, of {many / wanted / 3600:.3g} that there are."
    elif scenario.workload.rate is None:
        users = scenario.workload.concurrency
        said = f"{users:,} users send {wanted:.3g} requests/s; it serves {found.capacity:.3g} at most."
    elif free < 0:
        return f"{said} It is overloaded: queues grow until requests are turned away."
    if scenario.workload.rate is None:
        return said
    free_said = f"So {max(free, 0.0):.0%} stay free, where {scenario.headroom:.0%} are asked for."
    return f"{said} {free_said} {growth(plan, ramped)}"


def growth(plan: Plan, ramped: bool = False) -> str:
    """By how much the traffic may grow: until the first promise breaks, or what is to stay free is used up.

    `ramped` replays the ramp of the chapter on batching for it, of which there is none for pools; else closed form.
    """
    scenario, best = plan.scenario, plan.best
    if best is None or scenario.workload.rate is None or best.prediction.performance is None:
        return ""
    if (most := most_rps(scenario, best.prediction.performance)) is None:
        return ""
    wanted, kept, how = asked_rps(scenario, best.prediction), None, ""
    what, end = ("work", "it is late") if scenario.offline else ("traffic", "it is overloaded")
    if ramped and not best.pooled and not scenario.offline:
        ramp = ramp_test(best.deployment, scenario.workload, scenario.service_level)
        kept = ramp.ceiling, ramp.why
    elif not scenario.offline:
        kept, how = kept_up_to(scenario, best), " (closed form)"
    planned = (1 - scenario.headroom) * most.mid
    if kept and kept[0].mid < planned:
        rate, why = kept
        if not rate.mid:
            return f"No rate keeps every promise: {why} even in an idle engine{how}."
        more = rate.mid / wanted - 1
        may = f"The {what} may grow {_more(more)}" if more >= 0.005 else f"There is no room for more {what}"
        return f"{may}: beyond {rate:.3g} requests/s {why}{how}, though capacity is left."
    if planned < wanted:
        return f"There is no room for more {what}."
    over = (most if kept is None else kept[0]) / wanted + -1.0
    end = f"{kept[1]}{how}" if kept else end
    low = f" ({_more(over.lo)} at the pessimistic end)" if over.lo > 0 else ""
    used = f"The {what} may grow {_more(planned / wanted - 1)} until that is used up"
    return f"{used}, and {_more(over.mid)}{low} until {end}."


def _more(share: float) -> str:
    return f"by {share:.0%}" if share < 2 else f"to {1 + share:.3g} times"


def lost(plan: Plan) -> tuple[Candidate | None, str]:
    """What the best does under the same traffic while one replica is away, replayed, and that in a sentence."""
    best = plan.best
    if best is None:
        return None, ""
    replicas, spares = best.deployment.layout.replicas, best.deployment.spare_replicas
    if spares:
        beside = f"{spares} spare replica{'s' if spares > 1 else ''} beside the {replicas} that the traffic needs"
        return None, f"While as many are away as there are spare ones, every promise holds: {beside}."
    if best.pooled:
        return _lost_worker(plan.scenario, best)
    if replicas == 1:
        twice = f"; a second costs ${best.usd_per_hour:,.2f} an hour more" if best.usd_per_hour else ""
        return None, f"There is only one replica: while it restarts, nothing is served{twice}."
    others = replace(best, deployment=best.deployment.with_replicas(replicas - 1))
    fewer = replayed(replace(plan.scenario, headroom=0.0), others)
    left = f"While one of {replicas} replicas is away, the same traffic on the other {replicas - 1}"
    if fewer.meets:
        risk = f", though at the pessimistic end {'; '.join(fewer.risks)}" if fewer.risks else ""
        return fewer, f"{left} still keeps every promise{risk} (replayed)."
    return fewer, f"{left} does not keep every promise (replayed): {'; '.join(fewer.misses)}."


def _lost_worker(scenario: Scenario, best: Candidate) -> tuple[Candidate | None, str]:
    """`lost` of pools: the worker whose loss is worse."""
    pools, worst = best.prediction.pools, None
    if alone := [role for role, pool in zip(("prefill", "decode"), pools, strict=True) if pool.layout.replicas == 1]:
        return None, f"There is only one {' and one '.join(alone)} worker: while it restarts, nothing is served."
    for k, role in enumerate(("prefill", "decode")):
        fewer = [pool.with_replicas(pool.layout.replicas - (j == k)) for j, pool in enumerate(pools)]
        found = judged(replace(scenario, headroom=0.0), fewer[0], fewer[1], scenario.workload, best.preference)
        if found and (worst is None or found.margin > worst[0].margin):
            worst = found, role
    if worst is None:
        return None, ""
    held = "still keeps every promise" if worst[0].meets else "does not keep every promise"
    missed = "" if worst[0].meets else f": {'; '.join(worst[0].misses)}"
    return worst[0], f"While one {worst[1]} worker is away, the same traffic on the others {held} (replayed){missed}."


def sure(plan: Plan) -> str:
    """How sure the choice is, and what to measure first: the result that would change it most often."""
    found = confidence(plan)
    if found is None:
        return ""
    said = f"I{str(found)[1:]}. It breaks a promise itself in {found.broken * DRAWS:,.0f}."
    if found.first is None:
        return f"{said} No benchmark of one deployment would change the choice."
    measured, share = found.first
    own = measured is plan.chosen
    what = "the plan itself" if own else measured.what
    names = ["prefill", "decode", "router", "bench"] if measured.pooled else ["serve", "bench"]
    files = " and ".join(f"`{'' if own else 'measure/'}{name}.sh`" for name in names)
    copies = "both pools" if measured.pooled else "one replica"
    return f"{said} Measure first {what}, {copies} ({files}): its result changes it in {share:.0%}."


def chosen_instead(plan: Plan) -> pd.DataFrame:
    """What is chosen in the draws from the intervals, most often first, and how often a benchmark of it would tell."""
    found = confidence(plan)
    if found is None or plan.chosen is None:
        return pd.DataFrame()
    told = {id(candidate): f"{share:.0%}" for candidate, share in found.runs}
    rows = [
        (c.what, _usd(c.usd_per_hour), round(share * DRAWS), told.get(id(c)))
        for c, share in ((plan.chosen, found.stays), *found.rivals[:5])
    ]
    columns = ["deployment", "USD per hour", f"chosen in (of {DRAWS:,} draws)", "its benchmark changes the choice"]
    return pd.DataFrame(rows, columns=columns)


def risks(plan: Plan) -> pd.DataFrame:
    """The three largest risks of the plan, each with what to measure first, from the largest on."""
    found = sorted(_risks(plan), key=lambda risk: -risk[0])[:3]
    told = PHRASES["risks"]
    rows = [(told[name]["risk"], size, told[name]["measure"]) for _, name, size in found]
    return pd.DataFrame(rows, columns=["risk", "how large", "measure first"])


def _risks(plan: Plan) -> Iterator[tuple[float, str, str]]:
    """(weight, which of the risks in `phrases.yaml`, how large): a miss that is to be expected weighs 3."""
    best, scenario = plan.best, plan.scenario
    if best is None or best.prediction.performance is None:
        return
    found, workload, deployment = best.prediction.performance, scenario.workload, best.deployment
    if plan.reasons:
        yield 3, "edge" if plan.chosen else "miss", "; ".join(plan.reasons)
    told = [found.told(target.metric, target.percentile) for target in scenario.service_level]
    width = max((value.hi / value.mid - 1 for value in told if 0 < value.mid < math.inf), default=0.0)
    latency = "growing waits" if math.isinf(width) else f"up to {width:+.0%} on a promised latency"
    wide = latency if width else f"{found.request_tps:.3g} requests/s"
    yield min(PHRASES["basis"][found.basis]["doubt"] + width / 2, 2.9), "step costs", f"{BASES[found.basis]}; {wide}"
    if drafting := deployment.speculation:
        yield 1.8, "acceptance", f"{drafting.method}, {drafting.acceptance_rate:.0%}"
    if cached := best.prediction.load.cached_share:
        yield 2 * cached, "reuse", f"{cached:.0%} of all prompt tokens are found in the cache"
    if workload.assumptions:
        yield 1.5, "lengths", workload.assumptions[0]
    elif workload.trace is None:
        spread = workload.total_quantile(0.99) / max(workload.total_quantile(0.5), 1.0)
        how = f"p99 of prompt + output is {spread:.1f} times the median"
        yield 0.6, "texts" if scenario.offline else "traffic", how
    usd = best.prediction.usd
    if usd and usd.hi > 1.05 * usd.mid:
        yield math.log(usd.hi / usd.mid), "price", f"${usd.lo:,.2f} to ${usd.hi:,.2f} an hour by who lets the GPUs"
    if any(pool.replicas == 1 for pool in best.prediction.pools):
        yield 0.9, "replica", "a restart or a lost GPU stops the service"


def _usd(amount: float | None) -> str | None:
    return None if amount is None else f"{amount:,.2f}"


def alternatives(plan: Plan) -> pd.DataFrame:
    """The ten best candidates, a row each, from best to worst; the nearest first where none meets the service level."""
    shown, names = plan.candidates[:10], {"Service level": "service level", "Figures": "figures"}
    data = frame(plan, shown, "told").rename(columns={**names, "Requests/s": "requests/s"})
    data["deployment"] = [candidate.what for candidate in shown]
    data["USD per hour"] = [_usd(candidate.usd_per_hour) for candidate in shown]
    data["what is missing"] = [distance(plan, candidate) for candidate in shown]
    promised = [f"{target.name} (ms)" for target in plan.scenario.service_level]
    held = "service level" if plan.chosen else "what is missing"
    return data[["deployment", "USD per hour", *promised, *["requests/s"] * plan.scenario.offline, held, "figures"]]


def distance(plan: Plan, candidate: Candidate) -> str:
    """How far a candidate is from each promise that it misses."""
    found, parts, named = candidate.prediction.performance, [], set()
    for target in plan.scenario.service_level:
        if found is None:
            break
        value = found.told(target.metric, target.percentile).mid
        if target.seconds < value < math.inf and target.name in candidate.constraints:
            over = value / target.seconds
            far = f"{over - 1:.0%} over" if over < 3 else f"{over:,.0f} times"
            parts.append(f"{target.name} {milliseconds(value - target.seconds)} too long ({far})")
            named.add(target.name)
    rest = [miss for name, miss in zip(candidate.constraints, candidate.misses, strict=True) if name not in named]
    return "; ".join([*rest, *parts]) or "nothing"


def passing(plan: Plan) -> pd.DataFrame:
    """Where nothing meets the service level: which limits, and which rate, the nearest plan would keep."""
    best, rows = plan.best, []
    found = best.prediction.performance if best else None
    if best is None or found is None:
        return pd.DataFrame(columns=["change", "from", "to", "to be safe"])
    for target in plan.scenario.service_level:
        value = found.told(target.metric, target.percentile)
        if target.name in best.constraints and not found.saturated:
            would = ("none would do" if math.isinf(each) else milliseconds(each) for each in (value.mid, value.hi))
            rows.append((f"a limit for {target.name} of", milliseconds(target.seconds), *would))
    rate, headroom = plan.scenario.workload.rate, 1 - plan.scenario.headroom
    if plan.scenario.offline and rate:
        served = found.request_tps * headroom
        rows.append(("requests/s asked of it", f"{rate:.3g}", f"{served.mid:.3g}", f"{served.lo:.3g}"))
    elif rate and found.capacity and not best.pooled:
        held = ramp_test(best.deployment, plan.scenario.workload, plan.scenario.service_level).ceiling
        mid, low = min(held.mid, found.capacity.mid * headroom), min(held.lo, found.capacity.lo * headroom)
        shown = (f"{mid:.3g}", f"{low:.3g}") if mid else ("none would do", "none would do")
        rows.append(("a rate (requests/s) of", f"{rate:.3g}", *shown))
    return pd.DataFrame(rows, columns=["change", "from", "to", "to be safe"])


def kept(plan: Plan) -> str:
    """That nothing has to give way, as far as the plan holds."""
    if plan.verdict == "at_risk":
        bad = "; ".join(plan.reasons)
        return f"At the middle of every interval nothing has to give way; at the pessimistic end {bad}."
    return "Nothing has to give way: the plan keeps every promise." if plan.chosen else ""


def why_not(plan: Plan) -> pd.DataFrame:
    """Each GPU, engine and format that the scenario allows and the plan has not, and what it comes to."""
    return pd.DataFrame([(other.what, other.why) for other in passed_over(plan)], columns=["instead", "why not"])


def rejections(plan: Plan) -> pd.DataFrame:
    """A dozen that could not be evaluated, and why, the largest first."""
    told = dict.fromkeys((r.what, r.gpu, r.reason) for r in sorted(plan.rejected, key=lambda each: -each.gpus))
    return pd.DataFrame(list(told)[:12], columns=["layout", "GPU", "why not"])


def counts(plan: Plan) -> str:
    """How much was looked at."""
    why = Counter(rejection.bottleneck for rejection in plan.rejected)
    reasons = ", ".join(f"{number} for {bottleneck}" for bottleneck, number in why.most_common())
    out = f"; ruled out before: {len(plan.rejected)} ({reasons})" if why else ""
    meeting = sum(candidate.meets for candidate in plan.candidates) or "none"
    closer = sum(candidate.stated for candidate in plan.candidates)
    looked = f"Deployments evaluated in closed form: {len(plan.candidates)}; replayed: {closer} of them"
    return f"{looked}; meeting the service level: {meeting}{out}."


def changed(plan: Plan, found: tuple[WhatIf, ...]) -> pd.DataFrame:
    """Each change with the plan that follows, replayed, and its cost beside today's."""
    today = plan.chosen.usd_per_hour if plan.chosen else None
    rows = []
    for item in found:
        best = item.plan.chosen
        usd = best.usd_per_hour if best else None
        against = f"{(usd / today - 1) * 100:+.0f}" if usd is not None and today else None
        what = best.what if best else "none"
        same = plan.chosen and what == plan.chosen.what
        held = state(best) if best else "misses"
        rows.append((item.change, "the same" if same else what, _usd(usd), against, held))
    columns = ["change", "plan", "USD per hour", "cost change (%)", "service level"]
    return pd.DataFrame(rows, columns=columns).drop(columns=[] if today else "cost change (%)")


def ramp_table(predicted: Mapping[float, Performance]) -> pd.DataFrame:
    """One row per step of a benchmark ramp on one replica: request rate, p99 TTFT and ITL, output throughput."""
    rows = [(f"{rate:.3g}", p.ttft["p99"] * 1e3, p.itl["p99"] * 1e3, p.output_tps) for rate, p in predicted.items()]
    return pd.DataFrame(rows, columns=["requests/s", "TTFT p99 (ms)", "ITL p99 (ms)", "output tokens/s"])
