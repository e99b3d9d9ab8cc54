"""Why not another GPU, engine or format: what each that the scenario allows comes to at the price of the plan."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from planner.planning.candidate import Candidate, judge_all, milliseconds, most_rps
from planner.planning.confirmation import stated
from planner.planning.options import within
from planner.planning.scenario import Scenario
from planner.planning.search import Plan

LATER = (
    "`quantization` of the scenario lists it later", "`kv_cache_dtype` of the scenario lists it later",
    "it drafts, which the plan does without", "`engine` of the scenario lists it later",
    "it needs other engine arguments than the usual ones",
)  # fmt: skip
"""Why one comes after another at the same price, by the first place in which their `preference` differs."""


@dataclass(frozen=True)
class PassedOver:
    """Something that the scenario allows and the plan has not, and why not."""

    what: str  # "B200", "the checkpoint's own weights"
    candidate: Candidate | None  # the nearest for no more money, replayed; else the least that starts, if any does
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def passed_over(plan: Plan) -> tuple[PassedOver, ...]:
    """Every GPU, engine, weight and KV-cache format, and drafting or none, that the plan might have had instead."""
    if (chosen := plan.chosen) is None:
        return ()
    return tuple(_why(plan, chosen, *kind) for kind in _kinds(plan, chosen))


def _kinds(plan: Plan, chosen: Candidate) -> Iterator[tuple[str, str, list[Candidate]]]:
    """(what, its GPU if that is what it is, the candidates with it) for each that `chosen` has not."""
    scenario = plan.scenario
    for card in scenario.gpus:
        if card.gpu != chosen.deployment.gpu:
            name = card.gpu.name
            yield name, name, [c for c in plan.whole.candidates if c.deployment.gpu == card.gpu]
    drafted = scenario.speculation.method if scenario.speculation and scenario.speculation.allowed else ""
    names = (
        [f"{q} weights" if q else "the checkpoint's own weights" for q in scenario.quantizations],
        ["the model's own KV cache" if kv == "auto" else f"{kv} KV cache" for kv in scenario.kv_cache_dtypes],
        ["no drafts", f"drafts of {drafted}"] if drafted else ["no drafts"],
        [one.engine.name for one in scenario.by_engine],
    )
    for position, options in enumerate(names):
        for k, what in enumerate(options):
            if k != chosen.preference[position]:
                yield what, "", [c for c in plan.whole.candidates if c.preference[position] == k]


def _why(plan: Plan, chosen: Candidate, what: str, gpu: str, others: list[Candidate]) -> PassedOver:
    """What the nearest of `others` misses for no more money, or by how much the least of them is dearer."""
    scenario = plan.scenario
    if not others:
        refused = [rejection for rejection in plan.rejected if rejection.gpu == gpu]
        last = max(refused, key=attrgetter("gpus"), default=None)
        return PassedOver(what, None, f"{last.what}: {last.reason}" if last else "no deployment with it starts")
    if near := sorted(within(scenario, chosen.price, others), key=attrgetter("margin")):
        found = stated(scenario, near[0])
        if found.meets:
            gains = _gains(scenario, found, chosen)
            said = f"{found.what} does it too, for {_costs(found)}{gains}; {_after(found, chosen)}"
            return PassedOver(what, found, said)
        said = f"of all that costs no more, {found.what} comes nearest, but {'; '.join(found.misses)}"
        return PassedOver(what, found, said)
    single = judge_all(scenario, [(one.deployment, 1, one.preference) for one in others])
    least = min(single, key=attrgetter("cost"))
    if least.usd_per_hour is None and chosen.usd_per_hour is not None:
        return PassedOver(what, least, "no price is known, so it comes after all others")
    return PassedOver(what, least, f"{least.what}, the least that starts, costs {_costs(least)}, not {_costs(chosen)}")


def _costs(candidate: Candidate) -> str:
    unpriced, cost = candidate.price
    return f"{cost:,.0f} GPU{'s' * (cost != 1)}" if unpriced else f"${cost:,.2f} per hour"


def _gains(scenario: Scenario, found: Candidate, chosen: Candidate) -> str:
    """What `found` serves more or less than `chosen`, and the promise that `chosen` keeps most narrowly in both."""
    new, old = found.prediction.performance, chosen.prediction.performance
    if new is None or old is None or not ((most := most_rps(scenario, new)) and (least := most_rps(scenario, old))):
        return ""
    more = round(100 * (most.mid / least.mid - 1))
    said = f", and serves {abs(more)}% {'more' if more > 0 else 'less'}" if more else ", and serves as much"
    paced = {t: old.told(t.metric, t.percentile).mid for t in scenario.service_level}
    paced = {t: value for t, value in paced.items() if not math.isnan(value)}  # answers of one token have no pace
    if not paced:
        return said
    target = max(paced, key=lambda t: paced[t] / t.seconds)
    after = milliseconds(new.told(target.metric, target.percentile).mid)
    before = milliseconds(paced[target])
    return f"{said}, {target.name} {after}, not {before}" if after != before else said


def _after(found: Candidate, chosen: Candidate) -> str:
    """Which part of the rule puts `found` after `chosen`, both of which do at one price."""
    if found.cost > chosen.cost:
        return "over the day the plan costs less"
    if found.at_risk > chosen.at_risk:
        return f"at risk: {'; '.join(found.risks)}"
    if found.preference > chosen.preference:
        differ = (why for why, own, its in zip(LATER, chosen.preference, found.preference, strict=True) if own != its)
        return next(differ)
    stages = found.deployment.layout.pp > chosen.deployment.layout.pp
    return "it has more pipeline stages" if stages else "it comes nearer to a limit"
