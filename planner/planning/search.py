"""Which deployment to choose: the cheapest that meets every target with the asked probability.

The rule: of all deployments whose probability (`planning.tolerance`) is at least the scenario's
`confidence` the cheapest, where pipeline stages inside a machine have to save a third; at the same
price one that takes no more memory than the engine does by itself, then the highest probability,
the formats nearest to the checkpoint, and the fewest machines. Of 2% in price, what is owned comes
before what is rented, and what is clearly likelier before all (`candidate.sort_by_rule`). Where nothing reaches it, the
cheapest with a probability of a half is chosen and the plan is at risk. Beside it stand the gamble,
the cheapest with a probability of a half, and the safe option, the cheapest with 95%; beside a plan
at risk the likeliest that came near.

The search is best first by price. A family (GPU, engine, formats, drafts, layout) enters at the
price of the fewest replicas whose capacity, at the closed form's largest error, may be enough. Its
replicas are bisected up to the most that cost no more than what was found, by replays at the step
cost that the asked probability allows for; other engine arguments are tried where the defaults begin
to fail. The search stops when the cheapest open family costs more than what was found.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter, itemgetter

from planner.core.progress import advance, get_progress_watch, is_out_of_time, show_step
from planner.engines.deployment import Deployment
from planner.hardware.gpus import Gpu
from planner.planning.autoscaling import (
    bill_by_day,
    rank_by_daily_cost,
)
from planner.planning.candidate import (
    CLEARLY_LIKELIER,
    PROBABILITY_TIE,
    SAME_PRICE_SHARE,
    TIED_PRICE_SHARE,
    Candidate,
    mark_as_tuned,
    sort_by_rule,
)
from planner.planning.disaggregated_search import add_pools
from planner.planning.engine_tuning import (
    HOPELESS_MARGIN,
    SAFE_ENOUGH_SIGMAS,
    tune_to_margin,
    tune_to_probability,
)
from planner.planning.evaluation import (
    REPLICA_LIMITS,
    check_against_slos,
    evaluate_candidates,
    get_candidate_workload,
    price_all_hours,
)
from planner.planning.memory_odds import estimate_memory_probability
from planner.planning.open_figure import ease_figure, settle_open_figure
from planner.planning.plan import (
    GAMBLE_PROBABILITY,
    SAFE_PROBABILITY,
    SMALLEST,
    BindingConstraint,
    Plan,
    describe_room,
    explain_infeasibility,
    explain_nearest,
)
from planner.planning.prediction import evaluate
from planner.planning.scenario import Scenario
from planner.planning.search_space import (
    Family,
    RejectedOption,
    build_families,
    estimate_fewest,
    fits_in_machine,
    spans_machines,
)
from planner.planning.slo import compute_asked_tolerance
from planner.planning.tolerance import EvaluationStore, state_deployment

MIN_CLOSED_FORM_ODDS = 0.6
"""Share of the asked probability that the closed form gives to a deployment which simulations may confirm."""
MAX_SAFE_PRICE_FACTOR = 2.0
"""Nobody pays more than so many times the recommendation for the safe option."""
MAX_DAILY_RIVALS = 3
"""Other GPUs or layouts whose day, scaled by the hour, is held against that of the cheapest."""
MAX_EASED = 3
"""So many times a figure that was open is made easier by its precision until the plan holds."""
MAX_RUNNER_UP_PROBES = 8
"""Families that are looked at beyond that price for a runner-up with another GPU or layout."""
MAX_DESCRIBED = 12
"""Cheaper deployments that are told with what short simulations say of them, nearest first."""


_Open = tuple[tuple[bool, float], int, Family]
"""Price of the fewest open replicas, its turn, its family."""
_Passed = tuple[Candidate, Family]
"""What passed short simulations, and its family."""


@show_step("searching")
def search_deployments(scenario: Scenario, *, with_options: bool = True) -> Plan:
    """Search every legal deployment of `scenario` and choose by the rule above.

    Without options it looks for no gamble, safe option or runner-up beside a choice that holds.

    If the load is the question, the plan is that of the largest that holds. A time limit ends the
    search once there is a plan, or nothing meets the targets.
    """
    kind = scenario.open_figure
    settled = settle_open_figure(scenario, is_simulated=True) if kind else scenario
    harder = "a shorter limit" if kind == "limit" else f"a larger {kind}"
    early = [harder] * bool(kind and is_out_of_time())
    plan = _search_all(settled, with_options)
    for _ in range(MAX_EASED if kind else 0):  # short replays may have stood on a limit
        easier = ease_figure(settled)
        if plan.verdict == "holds" or easier == settled:
            break
        settled, plan = easier, _search_all(easier, with_options)
    early += ["all pools"] * (scenario.allow_disaggregation and is_out_of_time())
    reason = get_progress_watch().stop_reason
    early = [f"{reason}; not tried: {what}" for what in early]
    return replace(plan, left_out=(*early, *plan.left_out))


def _search_all(scenario: Scenario, with_options: bool) -> Plan:
    """Search replicas of one kind, and pools where they are allowed."""
    plan = _search_unified(scenario, with_options)
    return add_pools(plan) if scenario.allow_disaggregation else plan


def is_promising(estimate: Candidate) -> bool:
    """Tell whether simulations may confirm what the closed form says."""
    return estimate.probability >= MIN_CLOSED_FORM_ODDS * estimate.confidence


def find_choice(scenario: Scenario) -> Candidate | None:
    """Find the cheapest that holds, of what the closed form finds likely; None if none does.

    Replicas over several machines are looked at only where none fits into one.
    """
    families = (
        build_families(scenario, fits_in_machine)[0] or build_families(scenario, spans_machines)[0]
    )
    promising = [each for each in families if is_promising(each.most)]
    search = _Search(scenario, promising, EvaluationStore(scenario))
    return next(iter(search.find_cheapest(scenario.confidence)), None)


def _search_unified(scenario: Scenario, with_options: bool) -> Plan:
    """Search replicas that do both, prefill and decode."""
    search, rejected, found = _start_search(
        scenario,
        [GAMBLE_PROBABILITY] if with_options else [scenario.confidence, GAMBLE_PROBABILITY],
    )
    gamble, safe = found[:1], list[Candidate]()
    recommended = [each for each in found if each.probability >= scenario.confidence]
    if with_options and found:
        others = MAX_DAILY_RIVALS if scenario.daily_profile else 1
        recommended = search.find_cheapest(scenario.confidence, found, others)
    if with_options and found:
        first, (unpriced, cost) = (recommended or found)[0], (recommended or found)[0].rank_cost
        most = unpriced, MAX_SAFE_PRICE_FACTOR * cost
        if recommended:
            safe = search.find_cheapest(SAFE_PROBABILITY, recommended[:1], max_price=most)
        else:  # at risk: the likeliest that came near
            clearly = first.probability + CLEARLY_LIKELIER
            safe = [
                each
                for each in _state_nearest(search)[:1]
                if each.rank_cost <= most and each.probability >= clearly
            ]
        if safe and (
            safe[0].placement_key == first.placement_key  # with other arguments
            or price_all_hours(scenario, safe[0])
            <= price_all_hours(scenario, first, SAME_PRICE_SHARE)
        ):
            first = safe[0]
        if recommended:
            recommended = [first, *recommended[1:]]
            gamble = sorted([*gamble, first], key=attrgetter("cost_key"))
        else:
            gamble = [first]
    return _build_plan(search, rejected, recommended, gamble, safe)


def _start_search(
    scenario: Scenario, probabilities: Sequence[float]
) -> "tuple[_Search, list[RejectedOption], list[Candidate]]":
    """Start a search with the cheapest option of the first probability that any reaches.

    Replicas over several machines are looked at only where nothing smaller may hold: nobody builds
    them where tensor parallelism in a machine, or more replicas, do.
    """
    search, rejected = _Search(scenario, [], EvaluationStore(scenario)), []
    found: list[Candidate] = []
    for layouts in (fits_in_machine, spans_machines):
        families, refused = build_families(scenario, layouts)
        search.families += families
        rejected += refused
        for probability in probabilities:
            if families and not found:
                found = search.find_cheapest(probability)
        if found:
            break
    return search, rejected, found


@dataclass
class _Search:
    """Families still open, and what replays have said of them."""

    scenario: Scenario
    families: list[Family]
    store: EvaluationStore
    stated: dict[Deployment, Candidate] = field(default_factory=dict)
    tuned: dict[Deployment, Deployment] = field(default_factory=dict)  # by a family's start
    nearest: list[tuple[float, Deployment, Family]] = field(default_factory=list)  # that failed
    is_cut: bool = False  # by a time limit
    probed: set[Deployment] = field(default_factory=set)  # starts of families

    @show_step("simulating layouts")
    def find_cheapest(
        self, probability: float, known: Sequence[Candidate] = (), others: int = 0,
        max_price: tuple[bool, float] = (True, math.inf),
    ) -> list[Candidate]:  # fmt: skip
        """Find the cheapest deployment that meets every target with `probability`.

        It comes first, `known` where that is likely enough; the next that do with other GPUs or layouts
        follow, up to `others`.
        """
        chosen = [each for each in known[:1] if each.probability >= probability]
        heap, passed, probes_left = list[_Open](), list[_Passed](), MAX_RUNNER_UP_PROBES
        turns = count()

        def push(family: Family) -> None:
            if (fewest := self._count_fewest(family, probability)) <= family.max_replicas:
                price = family.rank_price(self.scenario, fewest)
                heappush(heap, (price, next(turns), family))

        for family in self.families:
            if not chosen or others:
                push(family)
        while (heap or passed) and len(chosen) <= others and probes_left:
            if probability > GAMBLE_PROBABILITY and is_out_of_time():
                heap, self.is_cut = [], True
            most = max_price
            if chosen:
                most = chosen[0].rank_cost[0], MAX_SAFE_PRICE_FACTOR * chosen[0].rank_cost[1]
            if passed:
                unpriced, cost = min(each.rank_cost for each, _ in passed)
                most = unpriced, cost * (1 + TIED_PRICE_SHARE)
            if heap and heap[0][0] <= most:
                *_, family = heappop(heap)
                if found := self._find_fewest(family, probability, most):
                    passed.append((self.describe(found, family), family))
                else:  # in more replicas, if what passed for less does not hold
                    push(family)
                probes_left -= bool(chosen)
            elif passed:
                tied = [one for one in passed if one[0].rank_cost <= most]
                passed = [one for one in passed if one not in tied]
                holding, failed = self._judge(tied, probability, is_first=not chosen)
                for family in failed:
                    push(family)
                shown = {each.display_key for each in chosen}
                chosen += [each for each in holding if each.display_key not in shown][:1]
            else:
                break
        return chosen

    def _judge(
        self, tied: list[_Passed], probability: float, *, is_first: bool
    ) -> tuple[list[Candidate], list[Family]]:
        """Judge by full simulations what passed at about one price; return what holds, best first, and what does not.

        What comes first has its arguments tuned. What is no likelier than what holds is not simulated.
        """
        holding, failed = list[Candidate](), list[Family]()
        families = {id(candidate): family for candidate, family in tied}
        for candidate in sort_by_rule([candidate for candidate, _ in tied]):
            if holding and candidate.probability < holding[0].probability + PROBABILITY_TIE:
                continue
            deployment, family = candidate.deployment, families[id(candidate)]
            usual = family.start.with_replicas(deployment.layout.replicas)
            if is_first:
                deployment = tune_to_probability(self.store, deployment, usual, probability)
                self.tuned[usual] = deployment
            for each in dict.fromkeys((deployment, usual)):  # what falls short, with the defaults
                short = self.store.find_probability(each, SAFE_ENOUGH_SIGMAS)
                if short >= probability - CLEARLY_LIKELIER:
                    stated = self._state_of_family(each, family)
                    if stated.is_feasible and stated.probability >= probability - 1e-9:
                        holding.append(stated)
                        break
            else:
                self._refute(deployment, family, probability, 1.0)
                failed.append(family)
        return sort_by_rule(holding), failed

    def _get_z(self, deployment: Deployment, probability: float) -> float:
        """The tolerance that `probability` asks for, beside what memory risks."""
        return compute_asked_tolerance(probability, estimate_memory_probability(deployment))

    def _count_fewest(self, family: Family, probability: float) -> int:
        """Count the replicas below which nothing may be enough."""
        if not REPLICA_LIMITS.isdisjoint(family.most.violated_constraints):
            return family.max_replicas + 1
        z = self._get_z(family.start, probability)
        if math.isinf(z):
            return family.max_replicas + 1
        share = self.store.get_least_load_share(family.most.prediction, z)
        return max(family.get_min_replicas(z), math.ceil(family.max_replicas * share - 1e-9))

    def _find_fewest(
        self, family: Family, probability: float, max_price: tuple[bool, float]
    ) -> Deployment | None:
        """Find the fewest replicas that pass short replays, up to a price; None if none do.

        The engine's own arguments are bisected, and others tried only where those begin to fail.
        """
        if not family.most.is_feasible and family.start not in self.probed:
            tuned, margin = self._tune(family, family.max_replicas, probability)
            if margin > 1:  # as the closed form has it, no number of replicas is enough
                self._refute(tuned, family, probability, margin)
        few, best = self._count_fewest(family, probability), None
        many = family.count_affordable(self.scenario, max_price)
        advance()
        self.probed.add(family.start)
        low, least, count = few, many + 1, many if math.isfinite(max_price[1]) else few
        while low < least:
            start = family.start.with_replicas(count)
            deployment = self.tuned.get(start, start)
            if self._get_margin(deployment, probability) <= 1:
                best, least = deployment, count
            else:
                low = count + 1
            count = (low + least) // 2 if best else many
        while few < least:
            deployment, margin = self._tune(family, least - 1, probability)
            if margin > 1:
                self._refute(deployment, family, probability, margin)
                break
            best, least = deployment, least - 1
        return best

    def _tune(self, family: Family, replicas: int, probability: float) -> tuple[Deployment, float]:
        """Tune the engine arguments of a family for `probability`, and return what is left of its margin."""
        start = family.start.with_replicas(replicas)
        deployment, z = self.tuned.get(start, start), self._get_z(start, probability)
        if math.isfinite(z):
            self.tuned[start] = deployment = tune_to_margin(self.store, deployment, z)
        return deployment, self._get_margin(deployment, probability)

    def _get_margin(self, deployment: Deployment, probability: float) -> float:
        """How far the worst promise is used at the tolerance that `probability` asks for."""
        z = self._get_z(deployment, probability)
        return math.inf if math.isinf(z) else self.store.get_margin(deployment, z)

    def _refute(
        self, deployment: Deployment, family: Family, probability: float, margin: float
    ) -> None:
        z, replicas = self._get_z(family.start, probability), deployment.layout.replicas
        family.refuted[replicas] = min(z, family.refuted.get(replicas, math.inf))
        self.nearest.append((margin, deployment, family))

    def describe(self, deployment: Deployment, family: Family) -> Candidate:
        """What short replays say of `deployment`, with the closed form's figures."""
        scenario = self.scenario
        prediction = evaluate(
            deployment, get_candidate_workload(scenario, deployment), scenario.prices
        )
        limits = self.store.find_limits(prediction, SAFE_ENOUGH_SIGMAS)
        return check_against_slos(scenario, prediction, family.preference_key, limits)

    def state(self, deployment: Deployment, preference: tuple[int, ...]) -> Candidate:
        """What full replays say of `deployment`, once for each."""
        if deployment not in self.stated:
            self.stated[deployment] = state_deployment(self.scenario, deployment, preference)
        return self.stated[deployment]

    def _state_of_family(self, deployment: Deployment, family: Family) -> Candidate:
        preference = family.preference_key
        is_usual = deployment.args == family.start.args
        return self.state(deployment, preference if is_usual else mark_as_tuned(preference))

    def describe_cut(self) -> str:
        """Say which layouts the time limit kept from being simulated, cheapest first."""
        untried = [family.most for family in self.families if family.start not in self.probed]
        untried.sort(key=attrgetter("rank_key"))
        names = [
            *(estimate.description for estimate in untried[:3]),
            "a safer option",
            "a runner-up",
        ]
        return (
            f"{get_progress_watch().stop_reason} with {len(self.probed)} of {len(self.families)}"
            f" layouts simulated; not tried: {'; '.join(names)}"
        )


@dataclass(frozen=True)
class GpuChoice:
    """The plan on one kind of GPU: the cheapest that holds there, else what is chosen at risk, or comes nearest."""

    gpu: Gpu
    candidate: Candidate | None  # None where nothing starts
    reason: str  # why it does not hold; empty where it does


def choose_on_each_gpu(plan: Plan) -> tuple[GpuChoice, ...]:
    """Plan on each kind of GPU that the scenario allows alone; replays of the plan's own search are not repeated."""
    scenario, own, choices = plan.scenario, plan.without_disaggregation.best, list[GpuChoice]()
    for gpu in dict.fromkeys(each.gpu for each in scenario.gpus):
        best, rejected = own, list(plan.rejected)
        if own is None or own.deployment.gpu != gpu:
            alone = replace(scenario, gpus=tuple(g for g in scenario.gpus if g.gpu == gpu))
            search, rejected, found = _start_search(
                alone, [scenario.confidence, GAMBLE_PROBABILITY]
            )
            best = next(iter(found or _state_nearest(search)), None)
        if best:
            choices.append(GpuChoice(gpu, best, "" if best.is_confident else best.shortfall))
        else:
            choices.append(GpuChoice(gpu, None, explain_infeasibility([], rejected).sentence))
    return tuple(choices)


def _add_rounding(price: tuple[bool, float]) -> tuple[bool, float]:
    return price[0], price[1] * (1 + 1e-6)


def _build_plan(
    search: _Search, rejected: list[RejectedOption], recommended: list[Candidate],
    gamble: list[Candidate], safe: list[Candidate],
) -> Plan:  # fmt: skip
    """The plan: what was found, and every other candidate from best to worst."""
    scenario, day = search.scenario, None
    holding = recommended or gamble
    if holding and scenario.daily_profile:
        holding, day = rank_by_daily_cost(scenario, holding)
        gamble, safe = (
            [bill_by_day(scenario, each, holding[0]) for each in option]
            for option in (gamble, safe)
        )
    failed = [] if holding else _state_nearest(search)
    if failed and failed[0].is_feasible and failed[0].probability >= GAMBLE_PROBABILITY:
        holding = gamble = failed[:1]  # a short replay stood on the limit; the full one counts
    binding = _find_binding_constraint(search, holding[0], gamble, rejected) if holding else None
    rest = _describe_others(
        search, [*holding, *failed], cheaper_than=holding[0] if holding else None
    )
    if holding:
        ordered = (holding[0], *sorted((*holding[1:], *rest), key=attrgetter("rank_key")))
    else:
        ordered = (*failed, *sorted(rest, key=attrgetter("limit_utilization")))
    unpriced = sorted({c.deployment.gpu.name for c in ordered if c.usd_per_hour is None})
    notes = (
        [f"no price is known for {', '.join(unpriced)}: ranked after the others, by GPUs"]
        if unpriced
        else []
    )
    if binding is None:
        binding = explain_infeasibility(list(ordered), rejected)
        return Plan(
            scenario, None, None, None, None, binding, ordered, tuple(rejected), tuple(notes),
        )  # fmt: skip
    chosen = holding[0]
    return Plan(
        scenario, chosen, next(iter(holding[1:]), None), next(iter(gamble), None),
        next(iter(safe), None), binding, ordered, tuple(rejected),
        (*notes, *chosen.prediction.warnings), left_out=(search.describe_cut(),) * search.is_cut,
        simulated_day=day,
    )  # fmt: skip


def _describe_others(
    search: _Search, told: list[Candidate], cheaper_than: Candidate | None
) -> list[Candidate]:
    """Every other deployment once: as it was stated, else as short replays refuted it for less money.

    Those that came nearest are told by them, all other families in closed form, in as many replicas
    as cost no more.
    """
    chosen, scenario = cheaper_than, search.scenario
    limit = chosen.rank_cost if chosen and not chosen.at_risk else (True, math.inf)

    def get_key(candidate: Candidate, deployment: Deployment) -> tuple[object, int]:
        return candidate.family_key, deployment.layout.replicas

    found = {get_key(each, each.deployment): each for each in told}
    for candidate in sorted(search.stated.values(), key=attrgetter("rank_key")):
        found.setdefault(get_key(candidate, candidate.deployment), candidate)
    described = 0
    for margin, deployment, family in sorted(search.nearest, key=itemgetter(0)):
        key = get_key(family.most, deployment)
        price = family.rank_price(scenario, deployment.layout.replicas)
        if (
            chosen
            and margin <= HOPELESS_MARGIN
            and _add_rounding(price) < limit
            and key not in found
        ):
            found[key] = search.describe(deployment, family)
            if found[key].probability >= GAMBLE_PROBABILITY:  # somebody may take it
                found[key] = search.state(deployment, family.preference_key)
            if (described := described + 1) == MAX_DESCRIBED:
                break
    families = {candidate.family_key for candidate in found.values()}
    rest = [*{each.key: each for each in search.families if each.key not in families}.values()]
    counts = [max(family.count_affordable(scenario, limit), 1) for family in rest]
    cases = [
        (family.start, n, family.preference_key) for family, n in zip(rest, counts, strict=True)
    ]
    return [*list(found.values())[len(told) :], *evaluate_candidates(scenario, cases)]


def _state_nearest(search: _Search, most: int = 4) -> list[Candidate]:
    """State the candidates that came nearest to the promises, nearest first."""
    places: dict[object, Candidate] = {}
    for _, deployment, family in sorted(search.nearest, key=lambda each: each[0]):
        if len(places) < most and family.start not in places:
            places[family.start] = search.state(deployment, family.preference_key)
    if not places:  # the closed form is so far beyond the limits that nothing was replayed
        estimates = sorted(
            (family.most for family in search.families), key=attrgetter("limit_utilization")
        )
        for estimate in estimates[:most]:
            if estimate.prediction.can_start:
                places[estimate.deployment] = search.state(
                    estimate.deployment, estimate.preference_key
                )
    return sorted(
        places.values(),
        key=lambda c: (-round(c.probability / PROBABILITY_TIE), c.cost_key, c.limit_utilization),
    )


def search_analytically(scenario: Scenario) -> Plan:
    """`search_deployments` in closed form, in about a tenth of a second: while a control moves."""
    if scenario.open_figure:
        scenario = settle_open_figure(scenario, is_simulated=False)
    families, rejected = build_families(scenario, fits_in_machine)
    if not any(family.most.is_feasible for family in families):
        wide, refused = build_families(scenario, spans_machines)
        families, rejected = families + wide, rejected + refused
    ordered = sorted(
        estimate_fewest(scenario, families, attrgetter("is_confident")), key=attrgetter("rank_key")
    )
    if ordered and ordered[0].at_risk:

        def is_likely(candidate: Candidate) -> bool:
            return candidate.is_feasible and candidate.probability >= GAMBLE_PROBABILITY

        ordered = sorted(estimate_fewest(scenario, families, is_likely), key=attrgetter("rank_key"))
    if not ordered or not ordered[0].is_feasible:
        ordered.sort(key=attrgetter("limit_utilization"))
        binding = explain_infeasibility(ordered, rejected)
        return Plan(scenario, None, None, None, None, binding, tuple(ordered), tuple(rejected), ())
    chosen = ordered[0]
    others = (c for c in ordered if c.is_feasible and c.display_key != chosen.display_key)
    binding = BindingConstraint(SMALLEST, describe_room(chosen))
    return Plan(
        scenario, chosen, next(others, None), None, None, binding, tuple(ordered), tuple(rejected),
        chosen.prediction.warnings,
    )  # fmt: skip


def _find_binding_constraint(
    search: _Search, chosen: Candidate, gamble: list[Candidate], rejected: list[RejectedOption]
) -> BindingConstraint:
    """What the nearest cheaper deployment misses: the gamble, else what replay or closed form refuted."""
    if gamble and gamble[0].price_key < chosen.price_key:
        return explain_nearest(gamble[0])
    cheaper = [
        (margin, deployment, family.preference_key)
        for margin, deployment, family in search.nearest
        if _add_rounding(family.rank_price(search.scenario, deployment.layout.replicas))
        < chosen.rank_cost
    ]
    if cheaper:
        _, deployment, preference = min(cheaper, key=lambda each: each[0])
        return explain_nearest(search.state(deployment, preference))
    small = [
        rejection for rejection in rejected
        if rejection.bottleneck == "memory" and rejection.gpus < chosen.deployment.layout.num_gpus
    ]  # fmt: skip
    if small:
        largest = max(small, key=lambda rejection: rejection.gpus)
        text = f"Fewer GPUs do not hold the model: {largest.description}, {largest.reason}."
        return BindingConstraint("memory", text)
    return BindingConstraint(SMALLEST, describe_room(chosen))
