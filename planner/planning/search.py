"""Which deployment to choose: every legal candidate, evaluated; the cheapest that meets the service level.

Candidates are ranked in closed form; those at the top are replayed (`planning.confirmation`), and one that fails there
counts as missing its target. The rule, in this order: it meets every target at the middle of its interval; it costs
least per hour (GPUs, where no price is known); it meets them at the pessimistic end too; it changes the model least
(formats in the scenario's order, no speculation); it has the fewest pipeline stages, then the largest margin. Where the
traffic has a day, another layout or GPU comes first if that day, scaled by the hour, is clearly cheaper with it. Pools
of prefill and decode workers (`planning.pools`) come before replicas that do both only where they cost less and meet
every target at the pessimistic end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Literal

from planner.facts.deployment import ParallelLayout
from planner.facts.prices import price_per_hour
from planner.latency.performance import Performance
from planner.planning.candidate import Candidate
from planner.planning.confirmation import Confirmed, confirm, nearest, settled, stated
from planner.planning.options import Rejection, evaluated, within
from planner.planning.pools import in_pools, left_out
from planner.planning.renting import Renting, renting_of
from planner.planning.scaling import Scaling, by_the_day, scaling_of
from planner.planning.scenario import CandidateGpu, Scenario

TWICE = 2.0
"""Pools that cost more than so many times the plan without them are of no interest."""
AGAIN = 3
"""Cheaper candidates that are replayed once a plan holds, however far the closed form puts them from holding."""


@dataclass(frozen=True)
class Binding:
    """What keeps anything cheaper from doing: a target such as "p95 TPOT", "rate", "memory", or "one GPU"."""

    constraint: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Plan:
    """The answer to a scenario."""

    scenario: Scenario
    chosen: Candidate | None
    runner_up: Candidate | None  # the best with another GPU or layout
    safer: Candidate | None  # the cheapest that holds at the pessimistic end, where the chosen one is at risk
    binding: Binding
    candidates: tuple[Candidate, ...]  # from best to worst
    rejected: tuple[Rejection, ...]
    notes: tuple[str, ...]
    without_pools: "Plan | None" = None  # where pools are allowed

    @property
    def whole(self) -> "Plan":
        """The plan in which every replica does both, prefill and decode."""
        return self.without_pools or self

    @property
    def in_pools(self) -> bool:
        return self.chosen is not None and self.chosen.pooled

    @property
    def pooled(self) -> Candidate | None:
        """The best pools that were looked at."""
        return next((candidate for candidate in self.candidates if candidate.pooled), None)

    @property
    def best(self) -> Candidate | None:
        """The chosen candidate, else the one that comes nearest to the service level; None where nothing fits."""
        return next(iter(self.candidates), None)

    @property
    def performance(self) -> Performance | None:
        """What that one is predicted to do."""
        return self.best.prediction.performance if self.best else None

    @property
    def verdict(self) -> Literal["holds", "at_risk", "nothing_meets"]:
        """Whether the plan keeps every promise, at the pessimistic end of every interval too."""
        return "nothing_meets" if self.chosen is None else "at_risk" if self.chosen.at_risk else "holds"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is at risk, or what the nearest plan misses."""
        if self.chosen:
            return self.chosen.risks
        return self.best.misses if self.best else (self.binding.sentence,)

    @cached_property
    def scaling(self) -> Scaling | None:
        """What is chosen, hour by hour, where the scenario has a day; worked out when it is asked for first."""
        return scaling_of(self.scenario, self.chosen) if self.chosen else None

    @cached_property
    def renting(self) -> Renting | None:
        """The ways to pay for that day."""
        return renting_of(self.scenario, self.scaling) if self.scaling else None

    def __str__(self) -> str:
        if self.chosen is None:
            return f"{self.scenario.name}: nothing meets the service level. {self.binding}"
        after = f" Next best: {self.runner_up}." if self.runner_up else ""
        return f"{self.scenario.name}: {self.chosen}. {self.binding}{after}"


def search(scenario: Scenario) -> Plan:
    """Evaluate every legal candidate of `scenario` and choose by the rule above."""
    plan = _without_pools(scenario)
    return _with_pools(plan) if scenario.pools else plan


def _with_pools(whole: Plan) -> Plan:
    """`whole` with pools among its candidates; the plan is theirs where the rule says so."""
    scenario, today = whole.scenario, whole.chosen
    if reason := left_out(scenario):
        return replace(whole, notes=(*whole.notes, f"pools are not looked at: {reason}"), without_pools=whole)
    pools = in_pools(scenario, TWICE * today.cost[1] if today and not today.cost[0] else math.inf)
    best = next((pool for pool in pools if pool.meets), None)
    together = (*whole.candidates, *pools)
    if today or best:
        together = tuple(sorted(together, key=lambda one: (not (one.meets and one.stated), one.rank)))
    plan = replace(whole, candidates=together, without_pools=whole)
    if best is None:
        return plan
    if today is None or best.rank < today.rank:
        binding = _binding(scenario, best, list(whole.candidates), list(whole.rejected))
        notes = tuple(dict.fromkeys((*whole.notes, *best.prediction.warnings)))
        return replace(plan, chosen=best, runner_up=today, safer=None, binding=binding, notes=notes)
    safer = whole.safer is None or best.rank < whole.safer.rank
    return replace(plan, safer=best) if today.at_risk and not best.at_risk and safer else plan


def _without_pools(scenario: Scenario) -> Plan:
    """The plan of replicas that do both, prefill and decode.

    Replicas over several nodes are looked at where nothing smaller holds, or one of them would cost no more.
    """
    candidates, rejected = evaluated(scenario, lambda card, layout: layout.gpus <= card.node)
    found = confirm(scenario, candidates)

    def wide(card: CandidateGpu, layout: ParallelLayout) -> bool:
        price = price_per_hour(card.gpu, scenario.prices)
        best = found.holding[0].usd_per_hour if found.holding else None
        dearer = price is not None and best is not None and price.usd * layout.gpus > best
        return layout.gpus > card.node and not dearer

    more, refused = evaluated(scenario, wide)
    rejected += refused
    if more:
        candidates += more
        found = confirm(scenario, candidates)
    while held := _hidden(scenario, found, candidates):
        found.holding = sorted([*held, *found.holding], key=attrgetter("rank"))
    looked_at = {c.place for c in (*found.holding, *found.failing)}
    rest = [c for c in candidates if c.place not in looked_at]
    ordered = [] if found.holding else nearest(scenario, [*found.failing, *rest])
    found.holding += sorted((c for c in ordered if c.meets and c.stated), key=attrgetter("rank"))
    day = None
    if found.holding:
        if scenario.day:
            found.holding, day = by_the_day(scenario, found.holding)
        ordered = [*found.holding, *sorted((*found.failing, *rest), key=attrgetter("rank"))]
    unpriced = sorted({c.deployment.gpu.name for c in ordered if c.usd_per_hour is None})
    notes = [f"no price is known for {', '.join(unpriced)}: ranked after the others, by GPUs"] if unpriced else []
    plan = _answered(scenario, found, ordered, rejected, notes)
    if day:
        vars(plan)["scaling"] = day
    return plan


def _hidden(scenario: Scenario, found: Confirmed, candidates: Sequence[Candidate]) -> list[Candidate]:
    """What holds and costs less than all that was `found`, of what the closed form puts too far from it to be tried."""
    if not found.holding:
        return []
    unpriced, cost = found.holding[0].price
    known = {candidate.place for candidate in found.failing}
    cheaper = within(scenario, (unpriced, cost * (1 - 1e-6)), [*found.holding, *candidates])
    places: dict[object, Candidate] = {}
    for candidate in sorted(cheaper, key=attrgetter("margin")):
        places.setdefault(candidate.place, candidate)
    tried = [places[place] for place in [place for place in places if place not in known][:AGAIN]]
    return [one for candidate in tried if (one := settled(scenario, candidate)).meets]


def _answered(
    scenario: Scenario, found: Confirmed, ordered: list[Candidate], rejected: list[Rejection],
    notes: Sequence[str] = (), settle: Callable[[Scenario, Candidate], Candidate] = stated,
) -> Plan:  # fmt: skip
    """The plan of what was `found` to hold, and of all candidates, `ordered` from best to worst."""
    places: dict[object, Candidate] = {}
    for candidate in ordered:  # of one deployment with several arguments the best
        places.setdefault(candidate.place, candidate)
    shown = tuple(places.values()), tuple(rejected)
    if not found.holding:
        return Plan(scenario, None, None, None, _nothing(ordered, rejected), *shown, ())
    chosen, binding = found.holding[0], _binding(scenario, found.holding[0], ordered, rejected, settle)
    safer, said = found.safe if chosen.at_risk else None, (*notes, *chosen.prediction.warnings)
    return Plan(scenario, chosen, found.other(chosen), safer, binding, *shown, said)


def ranked(scenario: Scenario) -> Plan:
    """`search` in closed form, in about a tenth of a second: while a control moves, before the replay has spoken."""
    candidates, rejected = evaluated(scenario, lambda card, layout: layout.gpus <= card.node)
    if not any(candidate.meets for candidate in candidates):
        wide, refused = evaluated(scenario, lambda card, layout: layout.gpus > card.node)
        candidates, rejected = candidates + wide, rejected + refused
    ordered = sorted(candidates, key=attrgetter("rank"))
    found = Confirmed([candidate for candidate in ordered if candidate.meets])
    if not found.holding:
        ordered.sort(key=attrgetter("margin"))
    return _answered(scenario, found, ordered, rejected, settle=lambda _, candidate: candidate)


def _binding(
    scenario: Scenario, chosen: Candidate, candidates: list[Candidate], rejected: list[Rejection],
    settle: Callable[[Scenario, Candidate], Candidate] = stated,
) -> Binding:  # fmt: skip
    """What the nearest cheaper deployment misses: any candidate with as many replicas as cost less than `chosen`."""
    margin, (unpriced, cost) = attrgetter("margin"), chosen.price
    cheaper = [c for c in within(scenario, (unpriced, cost * (1 - 1e-6)), candidates) if not c.meets]
    if cheaper:
        looked_at = [settle(scenario, candidate) for candidate in sorted(cheaper, key=margin)[:2]]
        cheaper = sorted((candidate for candidate in looked_at if not candidate.meets), key=margin)
    if cheaper:
        near = cheaper[0]
        said = f"Of all that costs less, {near.what} comes nearest, but {'; '.join(near.misses)}."
        return Binding(near.constraints[0], said)
    small = [r for r in rejected if r.bottleneck == "memory" and r.gpus < chosen.deployment.layout.gpus]
    if small:
        largest = max(small, key=lambda rejection: rejection.gpus)
        return Binding("memory", f"Less does not hold the model, such as {largest.what}: {largest.reason}.")
    return Binding("one GPU", f"Nothing smaller exists; it uses {chosen.margin:.0%} of the tightest limit.")


def _nothing(candidates: list[Candidate], rejected: list[Rejection]) -> Binding:
    """Why no candidate does, nearest first."""
    if candidates:
        near = candidates[0]
        return Binding(near.constraints[0], f"The nearest, {near.what}: {'; '.join(near.misses)}.")
    if not rejected:
        return Binding("engine", "The engine accepts no layout of this model on these GPUs.")
    last = max(rejected, key=lambda rejection: rejection.gpus)
    return Binding(last.bottleneck, f"It fits nowhere: {last.what} on {last.gpu}: {last.reason}")
