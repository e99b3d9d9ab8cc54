"""Every legal deployment that a scenario allows, in as many replicas as it takes, evaluated in closed form."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import attrgetter

from planner.core.quantities import PlannerError
from planner.facts.deployment import Deployment, ParallelLayout
from planner.facts.engines import unsupported
from planner.memory.budget import memory_of
from planner.models.registry import model
from planner.parallelism.layouts import legal_layouts
from planner.planning.candidate import Candidate, asked_rps, describe, judge_all, most_rps, tuned
from planner.planning.confirmation import near
from planner.planning.deployments import deployment_of
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.variants import FEW, variants

GAIN = 1.3
"""Other engine arguments serve so many times as many requests, at most."""


@dataclass(frozen=True)
class Rejection:
    """A layout that was not evaluated, and why; `bottleneck` is "memory", "engine" or "stock"."""

    what: str
    gpu: str
    gpus: int  # of one replica
    reason: str
    bottleneck: str


Wanted = Callable[[CandidateGpu, ParallelLayout], bool]
Option = tuple[Deployment, int, tuple[int, ...]]
"""One replica of a legal deployment, how many there may be, and its `preference`."""


def evaluated(scenario: Scenario, wanted: Wanted) -> tuple[list[Candidate], list[Rejection]]:
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
                yield Rejection(str(engine), card.name, 1, reason, "engine")
            continue
        layouts = legal_layouts(served, card, asked.at_most, asked.node, engine)
        settled = scenario.layout.items()
        kinds = product(
            [shape for shape in layouts if wanted(asked, shape) and all(getattr(shape, k) == v for k, v in settled)],
            enumerate(scenario.kv_cache_dtypes),
            enumerate(speculations),
        )
        for layout, (k, kv_cache_dtype), (s, speculation) in kinds:
            what = f"{layout}, {quantization or 'checkpoint'}"
            try:
                deployment = deployment_of(under, asked, served, layout, kv_cache_dtype, speculation)
            except PlannerError as error:
                yield Rejection(what, card.name, layout.gpus, str(error), "engine")
                continue
            rented = partial(_rented, deployment)
            if most := bisect_right(range(1, asked.at_most // layout.gpus + 1), asked.at_most, key=rented):
                yield deployment, most, (q, k, s, e, 0)
                continue
            beside = f" and {deployment.spare_replicas} to spare" if deployment.spare_replicas else ""
            reason = f"one replica{beside} takes {rented(1)} GPUs to rent, of at most {asked.at_most}"
            reason += "; a machine of your own: sold_in: [1]" if asked.at_most < rented(1) > layout.gpus else ""
            yield Rejection(describe(deployment), card.name, layout.gpus, reason, "stock")


def _rented(deployment: Deployment, replicas: int) -> int:
    return deployment.with_replicas(replicas).gpus_rented


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
    replicas, performance, needed = found.deployment.layout.replicas, found.prediction.performance, 1
    if scenario.workload.rate is not None and performance and (most := most_rps(scenario, performance)):
        asked = asked_rps(scenario, found.prediction) / (1 - scenario.headroom) / GAIN
        needed = min(max(math.ceil(asked * replicas / most.mid), 1), replicas)
    return unpriced, cost / found.deployment.gpus_rented * _rented(found.deployment, needed)


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
