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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from operator import attrgetter
from typing import Literal

from planner.core.quantities import PlannerError
from planner.facts.deployment import Deployment, ParallelLayout
from planner.facts.engines import unsupported
from planner.facts.prices import price_per_hour
from planner.memory.budget import memory_of
from planner.models.registry import model
from planner.parallelism.layouts import legal_layouts
from planner.planning.candidate import Candidate, asked_rps, describe, judge_all, most_rps, tuned
from planner.planning.confirmation import Confirmed, confirm, near, nearest, stated
from planner.planning.deployments import deployment_of
from planner.planning.pools import in_pools, left_out
from planner.planning.renting import Renting, renting_of
from planner.planning.scaling import Scaling, by_the_day, scaling_of
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.variants import FEW, variants

GAIN = 1.3
"""Other engine arguments serve so many times as many requests, at most."""
TWICE = 2.0
"""Pools that cost more than so many times the plan without them are of no interest."""


@dataclass(frozen=True)
class Rejection:
    """A layout that was not evaluated, and why; `bottleneck` is "memory", "engine" or "stock"."""

    what: str
    gpu: str
    gpus: int  # of one replica
    reason: str
    bottleneck: str


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
    candidates, rejected = _evaluated(scenario, lambda card, layout: layout.gpus <= card.node)
    found = confirm(scenario, candidates)

    def wide(card: CandidateGpu, layout: ParallelLayout) -> bool:
        price = price_per_hour(card.gpu, scenario.prices)
        best = found.holding[0].usd_per_hour if found.holding else None
        dearer = price is not None and best is not None and price.usd * layout.gpus > best
        return layout.gpus > card.node and not dearer

    more, refused = _evaluated(scenario, wide)
    rejected += refused
    if more:
        candidates += more
        found = confirm(scenario, candidates)
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
    candidates, rejected = _evaluated(scenario, lambda card, layout: layout.gpus <= card.node)
    if not any(candidate.meets for candidate in candidates):
        wide, refused = _evaluated(scenario, lambda card, layout: layout.gpus > card.node)
        candidates, rejected = candidates + wide, rejected + refused
    ordered = sorted(candidates, key=attrgetter("rank"))
    found = Confirmed([candidate for candidate in ordered if candidate.meets])
    if not found.holding:
        ordered.sort(key=attrgetter("margin"))
    return _answered(scenario, found, ordered, rejected, settle=lambda _, candidate: candidate)


Wanted = Callable[[CandidateGpu, ParallelLayout], bool]


def _evaluated(scenario: Scenario, wanted: Wanted) -> tuple[list[Candidate], list[Rejection]]:
    """Every legal candidate with a layout that is `wanted`, in closed form, and what is none."""
    cases, rejected = [], []
    for option in options(scenario, wanted):
        if isinstance(option, Rejection):
            rejected.append(option)
            continue
        one, most, preference = option
        if (memory := memory_of(one)).starts:
            cases.append(option)
        elif (larger := next(variants(scenario, one), None)) is not None:
            cases.append((larger, most, tuned(preference)))
        else:
            gpus = one.layout.gpus_per_replica
            rejected.append(Rejection(describe(one), one.gpu.name, gpus, memory.reason, "memory"))
    usual = _sized(scenario, cases)
    return [*usual, *_tuned(scenario, cases, usual)], rejected


Option = tuple[Deployment, int, tuple[int, ...]]
"""One replica of a legal deployment, how many there may be, and its `preference`."""


def options(scenario: Scenario, wanted: Wanted) -> Iterator[Option | Rejection]:
    """Every combination of GPU, formats, speculation and layout that the scenario allows and the engine accepts."""
    given = scenario.speculation
    speculations = [None, given.load()] if given and given.allowed else [None]
    for (e, under), asked, (q, quantization) in product(
        enumerate(scenario.by_engine), scenario.gpus, enumerate(scenario.quantizations)
    ):
        card, served, engine = asked.gpu, model(scenario.model, quantization=quantization), under.engine
        if reason := unsupported(card, engine):
            if q == 0 and wanted(asked, ParallelLayout()):
                yield Rejection(f"{engine.name} {engine.version}", card.name, 1, reason, "engine")
            continue
        layouts = legal_layouts(served, card, asked.at_most, asked.node, engine)
        settled = scenario.layout.items()
        kinds = product(
            [shape for shape in layouts if wanted(asked, shape) and all(getattr(shape, k) == v for k, v in settled)],
            enumerate(scenario.kv_cache_dtypes),
            enumerate(speculations),
        )
        for layout, (k, kv_cache_dtype), (s, speculation) in kinds:
            try:
                deployment = deployment_of(under, asked, served, layout, kv_cache_dtype, speculation)
            except PlannerError as error:
                yield Rejection(
                    f"{layout}, {quantization or 'checkpoint'}", card.name, layout.gpus, str(error), "engine"
                )
            else:
                sizes = range(1, asked.at_most // layout.gpus + 1)
                rented = partial(_rented, deployment)
                if most := bisect_right(sizes, asked.at_most, key=rented):
                    yield deployment, most, (q, k, s, e, 0)
                else:
                    beside = f" and {deployment.spare_replicas} to spare" if deployment.spare_replicas else ""
                    reason = f"one replica{beside} takes {rented(1)} GPUs to rent, of at most {asked.at_most}"
                    reason += "; a machine of your own: sold_in: [1]" if asked.at_most < rented(1) > layout.gpus else ""
                    yield Rejection(describe(deployment), card.name, layout.gpus, reason, "stock")


def _rented(deployment: Deployment, replicas: int) -> int:
    return deployment.with_replicas(replicas).gpus_rented


def _tuned(scenario: Scenario, cases: list[Option], usual: list[Candidate]) -> list[Candidate]:
    """The same with other engine arguments, where those may do for less or at less risk: of each size the best."""
    least = min((found.cost for found in usual if found.meets), default=(True, math.inf))
    tried = [
        (changed, most, tuned(preference))
        for (one, most, preference), found in zip(cases, usual, strict=True)
        if _at_least(scenario, found) <= least
        for changed in variants(scenario, one, FEW, light=found.light)
    ]

    def hope(found: Candidate) -> tuple[object, ...]:  # what only comes near may hold in the replay
        return not near(scenario, found), *found.rank[:3]

    known, better = {found.place: hope(found) for found in usual}, dict[object, Candidate]()
    for found in sorted(_sized(scenario, tried), key=attrgetter("rank")):
        if found.place not in known or hope(found) < known[found.place]:
            better.setdefault(found.place, found)
    return list(better.values())


def _at_least(scenario: Scenario, found: Candidate) -> tuple[bool, float]:
    """What as many of its replicas cost as the load asks for by itself, whatever the engine's arguments."""
    unpriced, cost = found.cost
    replicas, performance = found.deployment.layout.replicas, found.prediction.performance
    most = performance and most_rps(scenario, performance)
    if scenario.workload.rate is None or not most:
        return unpriced, cost / found.deployment.gpus_rented * _rented(found.deployment, 1)
    asked = asked_rps(scenario, found.prediction) / (1 - scenario.headroom) / GAIN
    needed = min(max(math.ceil(asked * replicas / most.mid), 1), replicas)
    return unpriced, cost / found.deployment.gpus_rented * _rented(found.deployment, needed)


def _sized(scenario: Scenario, cases: list[Option]) -> list[Candidate]:
    """Each option with the fewest replicas that meet the service level, or with all there may be where none do.

    All options are halved at once, so that every round is one evaluation of many.
    """

    def tried(replicas: dict[int, int]) -> dict[int, Candidate]:
        asked = [(cases[k][0], count, cases[k][2]) for k, count in replicas.items()]
        return dict(zip(replicas, judge_all(scenario, asked), strict=True))

    high = {k: most for k, (_, most, _) in enumerate(cases)}
    best = tried(high)
    low = {k: _too_few(scenario, found) for k, found in best.items()}

    def enough(found: Candidate) -> bool:  # of more replicas, which do not mend a power limit, but break it
        return {*found.constraints} <= {"power"}

    looked_at = {k: low[k] + 1 for k in best if enough(best[k]) and high[k] - low[k] > 1}  # mostly enough
    while middle := looked_at:
        for k, found in tried(middle).items():
            if enough(found):
                high[k], best[k] = middle[k], found
            else:
                low[k] = middle[k]
        looked_at = {k: (low[k] + high[k]) // 2 for k in middle if high[k] - low[k] > 1}
    return list(best.values())


def _too_few(scenario: Scenario, found: Candidate) -> int:
    """Replicas of `found` that the load is too much for, whatever is promised: capacity grows with their number."""
    load = scenario.workload
    if load.rate is None or load.trace or scenario.offline or not math.isfinite(found.share):
        return 0
    replicas = found.deployment.layout.replicas
    return min(math.ceil(found.share * replicas * (1 - 1e-9)), replicas) - 1


def within(scenario: Scenario, most: tuple[bool, float], candidates: Iterable[Candidate]) -> list[Candidate]:
    """Each of `candidates` in as many replicas as cost up to `most` (as `Candidate.price` has it), but dearer ones."""
    same, fewer = [], []
    for candidate in candidates:
        replicas, (unpriced, cost) = candidate.deployment.layout.replicas, candidate.price
        gpus = math.floor(most[1] / cost * candidate.deployment.gpus_rented + 1e-9)
        affordable = bisect_right(range(1, replicas + 1), gpus, key=partial(_rented, candidate.deployment))
        if unpriced == most[0] and affordable == replicas and not candidate.meets:
            same.append(candidate)
        elif unpriced == most[0] and affordable:
            fewer.append((candidate.deployment, affordable, candidate.preference))
    return [*same, *judge_all(scenario, fewer)]


def _binding(
    scenario: Scenario,
    chosen: Candidate,
    candidates: list[Candidate],
    rejected: list[Rejection],
    settle: Callable[[Scenario, Candidate], Candidate] = stated,
) -> Binding:
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
