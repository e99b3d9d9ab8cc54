"""Which deployment to choose: the cheapest that meets every target with the asked probability.

The rule: of all deployments whose probability (`planning.tolerance`) is at least the scenario's
`confidence` the cheapest; at the same price one that takes no more memory than the engine does by
itself, then the highest probability, the fewest machines, and the formats nearest to the
checkpoint. Where nothing reaches it, the cheapest with a probability of a half is chosen and the
plan is at risk. Beside it stand the gamble, the cheapest with a probability of a half, and the safe
option, the cheapest with 95%.

The search is best first by price. A family (GPU, engine, formats, drafts, layout) enters with the
fewest replicas that the closed form, at its largest measured error, leaves open. The cheapest open
family is replayed at the step cost that the asked probability allows for; where it fails, its
engine arguments are tuned by coordinate descent, and where that fails too it goes back with as many
replicas as the violation asks for. What holds closes everything that costs more. So the search
stops when the cheapest open family costs more than what was found.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from operator import attrgetter
from typing import Literal

from planner.core.progress import advance, get_progress_watch, is_out_of_time, show_step
from planner.engines.deployment import Deployment, ParallelLayout
from planner.latency.performance import Performance
from planner.memory.memory_plan import get_memory_plan
from planner.models.registry import load_model
from planner.parallelism.layouts import list_legal_layouts
from planner.planning.autoscaling import AutoscalingPlan, plan_autoscaling, rank_by_daily_cost
from planner.planning.billing import (
    ApiComparison,
    BillingComparison,
    compare_billing,
    compare_to_api,
)
from planner.planning.candidate import Candidate, mark_as_tuned
from planner.planning.deployment_builder import build_deployment
from planner.planning.disaggregated_search import explain_skipped_pools, search_pools
from planner.planning.engine_tuning import (
    SAFE_ENOUGH_SIGMAS,
    tune_to_margin,
    tune_to_tolerance,
)
from planner.planning.evaluation import check_against_slos, get_candidate_workload
from planner.planning.interruption import Interruption, estimate_interruption
from planner.planning.prediction import evaluate
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.search_space import Family, RejectedOption, build_families, fit_to_budget
from planner.planning.slo import compute_asked_tolerance
from planner.planning.tolerance import EvaluationStore, bisect_largest, state_deployment

MAX_POOL_COST_FACTOR = 2.0
"""Pools that cost more than so many times the plan without them are of no interest."""
GAMBLE_PROBABILITY, SAFE_PROBABILITY = 0.5, 0.95
"""Probabilities of the two options beside the recommendation."""
MAX_SAFE_PRICE_FACTOR = 2.0
"""Nobody pays more than so many times the recommendation for the safe option."""
HOPELESS_MARGIN = 2.0
"""So far beyond a limit no engine argument makes up for it, and one replay is enough to say so.

In ten searches tuning mended none of 138 misses by more than 35%; but a hybrid model that misses its
TTFT by half with the steps that the closed form likes holds with others, on half the GPUs.
"""
MAX_PROBES = 150
"""Families and replica counts that are replayed for one option at most; a search that ends so says it."""
MAX_EQUAL_PRICE_PROBES = 8
"""Families that are looked at, at the price of the first that holds, for a safer one."""
MAX_DAILY_RIVALS = 3
"""Other GPUs or layouts whose day, scaled by the hour, is held against that of the cheapest."""
MIN_HARDNESS, MAX_HARDNESS = 1e-3, 1e6
"""Requests/s, users, or the inverse of a limit in seconds, between which they are searched."""
MAX_RUNNER_UP_PROBES = 8
"""Families that are looked at beyond that price for a runner-up with another GPU or layout."""


@dataclass(frozen=True)
class BindingConstraint:
    """What keeps anything cheaper from doing: a target such as "p95 TPOT", "rate", "memory", or "one GPU"."""

    constraint: str
    sentence: str
    candidate: Candidate | None = field(default=None, compare=False, repr=False)  # that it keeps

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Plan:
    """The answer to a scenario."""

    scenario: Scenario
    chosen: Candidate | None
    runner_up: Candidate | None  # the best with another GPU or layout
    gamble: Candidate | None  # the cheapest with a probability of `GAMBLE_PROBABILITY`
    safe: Candidate | None  # the cheapest with a probability of `SAFE_PROBABILITY`
    binding_constraint: BindingConstraint
    candidates: tuple[Candidate, ...]  # from best to worst
    rejected: tuple[RejectedOption, ...]
    notes: tuple[str, ...]
    without_pools: "Plan | None" = None  # where pools are allowed
    left_out: tuple[str, ...] = ()  # by a time limit
    store: EvaluationStore | None = field(default=None, compare=False, repr=False)
    # of the chosen candidate, if the choice rests on it
    simulated_day: AutoscalingPlan | None = field(default=None, repr=False)

    @property
    def without_disaggregation(self) -> "Plan":
        """The plan in which every replica does both, prefill and decode."""
        return self.without_pools or self

    @property
    def is_disaggregated(self) -> bool:
        return self.chosen is not None and self.chosen.is_disaggregated

    @property
    def best_disaggregated(self) -> Candidate | None:
        """The best pools that were looked at."""
        return next(
            (candidate for candidate in self.candidates if candidate.is_disaggregated), None
        )

    @property
    def best(self) -> Candidate | None:
        """The chosen candidate, else the one that comes nearest to the service level; None where nothing fits."""
        return next(iter(self.candidates), None)

    @property
    def performance(self) -> Performance | None:
        """What that one is predicted to do."""
        return self.best.prediction.performance if self.best else None

    @property
    def options(self) -> dict[str, Candidate]:
        """The gamble, the recommendation and the safe option, those that there are, by name."""
        named = {"gamble": self.gamble, "recommended": self.chosen, "safe": self.safe}
        return {name: candidate for name, candidate in named.items() if candidate}

    @property
    def probability(self) -> float:
        """That what is chosen, or comes nearest, starts and meets every target."""
        return self.best.probability if self.best else 0.0

    @property
    def verdict(self) -> Literal["holds", "at_risk", "nothing_meets"]:
        """`holds` where the probability is at least the scenario's `confidence`."""
        return (
            "nothing_meets"
            if self.chosen is None
            else "at_risk"
            if self.chosen.at_risk
            else "holds"
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is at risk, or what the nearest plan misses."""
        if self.chosen and self.chosen.at_risk:
            return self.chosen.risks
        if self.chosen:
            return ()
        return self.best.violations if self.best else (self.binding_constraint.sentence,)

    @cached_property
    def autoscaling(self) -> AutoscalingPlan | None:
        """The replicas of the chosen candidate by hour; None if the scenario has no daily profile."""
        if self.scenario.daily_profile is None or not self.chosen:
            return None
        return self.simulated_day or plan_autoscaling(self.scenario, self.chosen)

    @cached_property
    def billing(self) -> BillingComparison | None:
        """The ways to pay for that day."""
        return compare_billing(self.scenario, self.autoscaling) if self.autoscaling else None

    @cached_property
    def api_comparison(self) -> ApiComparison | None:
        """The plan's cost beside that of the scenario's API; None without one, or without a plan.

        With a daily profile it follows with the replay, which the bills of the day need.
        """
        if self.chosen is None or self.scenario.billing_alternatives.api is None:
            return None
        if self.scenario.daily_profile and not self.chosen.is_simulated:
            return None
        return compare_to_api(self.scenario, self.chosen, self.billing)

    @cached_property
    def interruption(self) -> Interruption | None:
        """What an interruption leaves of it; None at other prices than spot, or without a plan."""
        if self.chosen is None or not self.chosen.is_simulated:
            return None
        return estimate_interruption(self.scenario, self.chosen)

    def __str__(self) -> str:
        if self.chosen is None:
            return f"{self.scenario.name}: no plan meets the targets. {self.binding_constraint}"
        after = f" Next best: {self.runner_up}." if self.runner_up else ""
        return f"{self.scenario.name}: {self.chosen}. {self.binding_constraint}{after}"


@show_step("searching")
def search_deployments(scenario: Scenario) -> Plan:
    """Search every legal deployment of `scenario` and choose by the rule above.

    If the load is the question, the plan is that of the largest that holds. A time limit ends the
    search once there is a plan, or nothing meets the targets.
    """
    early = []
    if kind := scenario.open_figure:
        scenario = settle_open_figure(scenario, is_simulated=True)
        harder = "a shorter limit" if kind == "limit" else f"a larger {kind}"
        early += [harder] * is_out_of_time()
    plan = _search_unified(scenario)
    if scenario.allow_disaggregation:
        plan = _add_pool_candidates(plan)
        early += ["all pools"] * is_out_of_time()
    reason = get_progress_watch().stop_reason
    early = [f"{reason}; not tried: {what}" for what in early]
    return replace(plan, left_out=(*early, *plan.left_out))


def _add_pool_candidates(whole: Plan) -> Plan:
    """`whole` with pools among its candidates; the plan is theirs where the rule says so."""
    scenario, today = whole.scenario, whole.chosen
    if reason := explain_skipped_pools(scenario):
        return replace(
            whole, notes=(*whole.notes, f"pools are not evaluated: {reason}"), without_pools=whole
        )
    pools = search_pools(
        scenario,
        MAX_POOL_COST_FACTOR * today.cost_key[1] if today and not today.cost_key[0] else math.inf,
    )
    best = next((pool for pool in pools if pool.is_feasible), None)
    together = (*whole.candidates, *pools)
    if today or best:
        together = tuple(
            sorted(
                together, key=lambda one: (not (one.is_feasible and one.is_simulated), one.rank_key)
            )
        )
    plan = replace(whole, candidates=together, without_pools=whole)
    if best is None:
        return plan
    if today is None or best.rank_key < today.rank_key:
        binding = whole.binding_constraint
        notes = tuple(dict.fromkeys((*whole.notes, *best.prediction.warnings)))
        return replace(
            plan,
            chosen=best,
            runner_up=today,
            binding_constraint=binding,
            notes=notes,
        )
    safer = best.probability >= SAFE_PROBABILITY and (
        whole.safe is None or best.cost_key < whole.safe.cost_key
    )
    return replace(plan, safe=best) if safer else plan


def _search_unified(scenario: Scenario) -> Plan:
    """Search replicas that do both, prefill and decode."""
    search, rejected, gamble = _search_for_gamble(scenario)
    others = MAX_DAILY_RIVALS if scenario.daily_profile else 1
    recommended = search.find_cheapest(scenario.confidence, others=others) if gamble else []
    safe = []
    if recommended:
        unpriced, price = recommended[0].price_key
        safe = search.find_cheapest(
            SAFE_PROBABILITY, at_most=(unpriced, MAX_SAFE_PRICE_FACTOR * price)
        )
        first = recommended[0]
        if safe and (
            safe[0].placement_key == first.placement_key  # with other arguments
            or (safe[0].price_key <= first.price_key and safe[0].rank_key < first.rank_key)
        ):
            recommended = [safe[0], *recommended[1:]]
    return _build_plan(search, rejected, recommended, gamble, safe)


def _search_for_gamble(
    scenario: Scenario,
) -> "tuple[_Search, list[RejectedOption], list[Candidate]]":
    """Start a search with its cheapest option, the gamble; without one, nothing else holds either.

    Replicas over several machines are looked at only where nothing smaller may hold: nobody builds
    them where tensor parallelism in a machine, or more replicas, do.
    """
    families, rejected = build_families(scenario, _fits_in_machine)
    search = _Search(scenario, families, EvaluationStore(scenario))
    gamble = search.find_cheapest(GAMBLE_PROBABILITY)
    if gamble:
        return search, rejected, gamble
    wide, refused = build_families(scenario, _spans_machines)
    search.families = [*families, *wide]
    gamble = search.find_cheapest(GAMBLE_PROBABILITY) if wide else []
    return search, rejected + refused, gamble


def _fits_in_machine(candidate_gpu: CandidateGpu, layout: ParallelLayout) -> bool:
    return layout.num_gpus <= candidate_gpu.max_machine_gpus


def _spans_machines(candidate_gpu: CandidateGpu, layout: ParallelLayout) -> bool:
    return not _fits_in_machine(candidate_gpu, layout)


@dataclass
class _Search:
    """Families still open, and what replays have said of them."""

    scenario: Scenario
    families: list[Family]
    store: EvaluationStore
    stated: dict[Deployment, Candidate] = field(default_factory=dict)
    tuned: dict[Deployment, Deployment] = field(default_factory=dict)  # by a family's start
    nearest: list[tuple[float, Deployment, Family]] = field(default_factory=list)  # that failed
    is_complete: bool = True
    is_cut: bool = False  # by a time limit
    probed: set[Deployment] = field(default_factory=set)  # starts of families

    @show_step("simulating layouts")
    def find_cheapest(
        self, probability: float, *, others: int = 0,
        at_most: tuple[bool, float] = (True, math.inf),
    ) -> list[Candidate]:  # fmt: skip
        """Find the cheapest deployment that meets every target with `probability`.

        It comes first; the next that hold with other GPUs or layouts follow, up to `others`.
        """
        # (price of the fewest replicas that are open, hope, family, replicas to try)
        heap: list[tuple[bool, float, float, int, int]] = []
        level: list[tuple[Candidate, int]] = []  # what holds in short replays
        skipped: list[tuple[int, int]] = []  # at the price of the cheapest of them, as others hold
        holds: dict[int, int] = {}  # family: replicas that are known to be enough
        chosen: list[Candidate] = []

        def push(k: int, replicas: int) -> None:
            family = self.families[k]
            least = family.get_min_replicas(self._get_z(family.start, probability))
            price = family.price(self.scenario, least)
            if least <= family.max_replicas and price <= at_most:
                hope = -family.estimate.tolerance_sigmas
                heappush(heap, (*price, hope, k, min(replicas, family.max_replicas)))

        for k, family in enumerate(self.families):
            push(k, family.get_min_replicas(self._get_z(family.start, probability)))
        tries, equal = MAX_PROBES, MAX_EQUAL_PRICE_PROBES
        while heap or level:
            limit = min((candidate.price_key for candidate, _ in level), default=at_most)
            if level and (not heap or heap[0][:2] > _add_rounding(limit)):
                cheapest = [one for one in level if one[0].price_key <= _add_rounding(limit)]
                level = [one for one in level if one[0].price_key > _add_rounding(limit)]
                for candidate, k in sorted(cheapest, key=lambda each: each[0].rank_key):
                    if candidate.display_key in {each.display_key for each in chosen}:
                        continue
                    family = self.families[k]
                    stated = self._settle(candidate, family, tune=not chosen)
                    if stated.is_feasible and stated.probability >= probability - 1e-9:
                        chosen.append(stated)
                        if len(chosen) > others:
                            return chosen
                    else:
                        self._refute(stated.deployment, family, probability, 1.0)
                        push(k, stated.deployment.layout.replicas + 1)
                if chosen:
                    tries = min(tries, MAX_RUNNER_UP_PROBES)
                else:
                    for k, replicas in skipped:
                        push(k, replicas)
                skipped, equal = [], MAX_EQUAL_PRICE_PROBES
                continue
            unpriced, price, _, k, replicas = heappop(heap)
            family = self.families[k]
            if probability > GAMBLE_PROBABILITY and is_out_of_time():
                tries, self.is_cut = 0, True
            is_equal = bool(level) and _add_rounding((unpriced, price)) >= limit
            if (is_equal and not equal) or not tries:
                if not tries and not level:
                    self.is_complete = bool(chosen) or self.is_cut
                    break
                skipped.append((k, replicas))
                continue
            tries, equal = tries - 1, equal - is_equal
            z = self._get_z(family.start, probability)
            fewest = family.get_min_replicas(z)
            while replicas > fewest and family.price(self.scenario, replicas) > _add_rounding(
                limit
            ):
                replicas -= 1  # more are dearer than what holds already
            tuned, margin = self._probe(family, replicas, probability)
            if margin > 1:
                self._refute(tuned, family, probability, margin)
                if math.isfinite(margin):
                    more = self._count_more_replicas(tuned, family, z)
                    push(k, min(more, holds.get(k, more)))
            elif fewest < replicas:
                holds[k] = replicas  # more were tried at once than it may take
                push(k, (fewest + replicas) // 2)
            else:
                level.append((self.describe(tuned, family), k))
        return chosen

    def _get_z(self, deployment: Deployment, probability: float) -> float:
        """The tolerance that `probability` asks for, beside what memory risks."""
        return compute_asked_tolerance(probability, get_memory_plan(deployment).p_fits)

    def _probe(self, family: Family, replicas: int, probability: float) -> tuple[Deployment, float]:
        """Replay a family for `probability`, with other engine arguments where its own fail."""
        advance()
        self.probed.add(family.start)
        start = family.start.with_replicas(replicas)
        deployment = self.tuned.get(start, start)
        margin = self._get_margin(deployment, probability)
        if 1 < margin <= HOPELESS_MARGIN:
            deployment = tune_to_margin(
                self.store, deployment, self._get_z(deployment, probability)
            )
            margin = self._get_margin(deployment, probability)
            self.tuned[start] = deployment
        return deployment, margin

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

    def _count_more_replicas(self, deployment: Deployment, family: Family, z: float) -> int:
        """Count the replicas to try next: as many as the load needs, in steps that double.

        What was skipped is looked at once more replicas hold.
        """
        replicas = deployment.layout.replicas
        by_load = math.ceil(replicas * self.store.get_least_load_share(deployment, z) - 1e-9)
        failures = sum(least <= z + 1e-9 for least in family.refuted.values())
        doubled = min(replicas + 2 ** max(failures - 1, 0), family.max_replicas)
        return max(by_load, int(doubled), replicas + 1)

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

    def _settle(self, candidate: Candidate, family: Family, *, tune: bool) -> Candidate:
        """Tune what was found, and state it from full replays."""
        deployment = candidate.deployment
        if tune:
            deployment = tune_to_tolerance(self.store, deployment)
            self.tuned[family.start.with_replicas(deployment.layout.replicas)] = deployment
        preference = family.preference_key
        is_usual = deployment.args == family.start.args
        return self.state(deployment, preference if is_usual else mark_as_tuned(preference))

    def describe_cut(self) -> str:
        """Say which layouts the time limit kept from being simulated, cheapest first."""
        untried = [family.estimate for family in self.families if family.start not in self.probed]
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


def _add_rounding(price: tuple[bool, float]) -> tuple[bool, float]:
    return price[0], price[1] * (1 + 1e-6)


def tune_candidate(plan: Plan, candidate: Candidate) -> Candidate:
    """Tune the engine arguments of a candidate as the search does, and state it."""
    if candidate.is_disaggregated or not candidate.prediction.can_start:
        return candidate
    store = plan.store or EvaluationStore(plan.scenario)
    deployment = candidate.deployment
    if store.find_tolerance(deployment) < 0:
        deployment = tune_to_margin(store, deployment, 0.0)
    deployment = tune_to_tolerance(store, deployment)
    return state_deployment(plan.scenario, deployment, candidate.preference_key)


def _build_plan(
    search: _Search, rejected: list[RejectedOption], recommended: list[Candidate],
    gamble: list[Candidate], safe: list[Candidate],
) -> Plan:  # fmt: skip
    """The plan: what was found, and every other candidate from best to worst."""
    scenario, day = search.scenario, None
    holding = recommended or gamble
    if holding and scenario.daily_profile:
        holding, day = rank_by_daily_cost(scenario, holding)
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
    if not search.is_complete:
        notes.append(
            f"the search stopped after simulating {MAX_PROBES} candidates: a cheaper plan may meet"
            " the targets"
        )
    if binding is None:
        binding = _explain_infeasibility(list(ordered), rejected)
        return Plan(
            scenario, None, None, None, None, binding, ordered, tuple(rejected), (),
            store=search.store,
        )  # fmt: skip
    chosen = holding[0]
    return Plan(
        scenario, chosen, next(iter(holding[1:]), None), next(iter(gamble), None),
        next(iter(safe), None), binding, ordered, tuple(rejected),
        (*notes, *chosen.prediction.warnings), left_out=(search.describe_cut(),) * search.is_cut,
        store=search.store, simulated_day=day,
    )  # fmt: skip


def _describe_others(
    search: _Search, told: list[Candidate], cheaper_than: Candidate | None
) -> list[Candidate]:
    """Every other deployment once: as it was stated, else as short replays refuted it for less money.

    Families of which neither is known follow in closed form. Where nothing holds with the asked
    probability, replay has refuted more than what is cheaper.
    """
    chosen = cheaper_than
    limit = chosen.price_key if chosen and not chosen.at_risk else (True, math.inf)

    def get_key(candidate: Candidate, deployment: Deployment) -> tuple[object, int]:
        return candidate.family_key, deployment.layout.replicas

    found = {get_key(each, each.deployment): each for each in told}
    for candidate in sorted(search.stated.values(), key=attrgetter("rank_key")):
        found.setdefault(get_key(candidate, candidate.deployment), candidate)
    for margin, deployment, family in sorted(search.nearest, key=lambda each: each[0]):
        price, key = (
            family.price(search.scenario, deployment.layout.replicas),
            get_key(family.estimate, deployment),
        )
        if chosen and math.isfinite(margin) and _add_rounding(price) < limit and key not in found:
            found[key] = search.describe(deployment, family)
            if found[key].probability >= GAMBLE_PROBABILITY:  # somebody may take it
                found[key] = search.state(deployment, family.preference_key)
    families = {candidate.family_key for candidate in found.values()}
    for estimate in sorted((f.estimate for f in search.families), key=attrgetter("rank_key")):
        if estimate.family_key not in families:
            families.add(estimate.family_key)
            found[get_key(estimate, estimate.deployment)] = estimate
    return list(found.values())[len(told) :]


def _state_nearest(search: _Search, most: int = 4) -> list[Candidate]:
    """State the candidates that came nearest to the promises, nearest first."""
    places: dict[object, Candidate] = {}
    for _, deployment, family in sorted(search.nearest, key=lambda each: each[0]):
        if len(places) < most and family.start not in places:
            places[family.start] = search.state(deployment, family.preference_key)
    if not places:  # the closed form is so far beyond the limits that nothing was replayed
        estimates = sorted(
            (family.estimate for family in search.families), key=attrgetter("limit_utilization")
        )
        for estimate in estimates[:most]:
            if estimate.prediction.can_start:
                places[estimate.deployment] = search.state(
                    estimate.deployment, estimate.preference_key
                )
    return sorted(places.values(), key=attrgetter("limit_utilization", "cost_key"))


def settle_open_figure(scenario: Scenario, *, is_simulated: bool) -> Scenario:
    """Find the largest load, or the shortest limit, that some deployment keeps with the asked probability.

    Returns `scenario` with that figure, to `OPEN_FIGURE_PRECISION`; with the easiest that was tried
    if not even that is kept. Without replays the closed form answers.
    """
    found = _find_hardest(scenario, 1.0, 8.0, _holds_analytically)
    if is_simulated:
        found = _find_hardest(scenario, found, 1.25, _holds_in_replay)
    return _put_figure(scenario, found)


def _holds_analytically(scenario: Scenario) -> bool:
    return search_analytically(scenario).verdict == "holds"


def _holds_in_replay(scenario: Scenario) -> bool:
    search, _, gamble = _search_for_gamble(scenario)
    return bool(gamble and search.find_cheapest(scenario.confidence))


def _put_figure(scenario: Scenario, hardness: float) -> Scenario:
    """`scenario` with the figure that was open: a rate or a limit of three digits, or whole users."""
    kind, targets, workload = scenario.open_figure, scenario.slo_targets, scenario.workload
    if kind == "limit":
        first = replace(targets[0], seconds=float(f"{1 / hardness:.3g}"))
        targets = (first, *targets[1:])
    elif kind == "rate":
        workload = replace(workload, rate=float(f"{hardness:.3g}"))
    else:
        workload = replace(workload, concurrency=max(int(hardness), 1))
    return replace(
        scenario, workload=workload, slo_targets=targets, open_figure=None, found_figure=kind
    )


def _find_hardest(
    scenario: Scenario, start: float, step: float, holds: Callable[[Scenario], bool]
) -> float:
    """The hardest question that `holds`: from `start` up or down by factors of `step`, then by bisection."""
    known: dict[tuple[object, ...], bool] = {}

    def check(hardness: float) -> bool:
        asked = _put_figure(scenario, hardness)
        key = asked.workload.rate, asked.workload.concurrency, asked.slo_targets
        if key not in known:
            known[key] = holds(asked)
        return known[key]

    low = high = start
    if check(start):
        while high < MAX_HARDNESS and not is_out_of_time() and check(high := low * step):
            low = high
    else:
        while low > MIN_HARDNESS and not is_out_of_time() and not check(low := high / step):
            high = low
    return bisect_largest(low, high, check)


def search_analytically(scenario: Scenario) -> Plan:
    """`search_deployments` in closed form, in about a tenth of a second: while a control moves."""
    if scenario.open_figure:
        scenario = settle_open_figure(scenario, is_simulated=False)
    families, rejected = build_families(scenario, _fits_in_machine)
    if not any(family.estimate.is_feasible for family in families):
        wide, refused = build_families(scenario, _spans_machines)
        families, rejected = families + wide, rejected + refused
    ordered = sorted((family.estimate for family in families), key=attrgetter("rank_key"))
    if not ordered or not ordered[0].is_feasible:
        ordered.sort(key=attrgetter("limit_utilization"))
        binding = _explain_infeasibility(ordered, rejected)
        return Plan(scenario, None, None, None, None, binding, tuple(ordered), tuple(rejected), ())
    chosen = ordered[0]
    others = (c for c in ordered if c.is_feasible and c.display_key != chosen.display_key)
    binding = BindingConstraint("one GPU", _describe_room(chosen))
    return Plan(
        scenario, chosen, next(others, None), None, None, binding, tuple(ordered), tuple(rejected),
        chosen.prediction.warnings,
    )  # fmt: skip


def _find_binding_constraint(
    search: _Search, chosen: Candidate, gamble: list[Candidate], rejected: list[RejectedOption]
) -> BindingConstraint:
    """What the nearest cheaper deployment misses: the gamble, else what replay or closed form refuted."""
    if gamble and gamble[0].price_key < chosen.price_key:
        return _explain_nearest(gamble[0])
    cheaper = [
        (margin, deployment, family.preference_key)
        for margin, deployment, family in search.nearest
        if _add_rounding(family.price(search.scenario, deployment.layout.replicas))
        < chosen.price_key
    ]
    if not cheaper:
        unpriced, price = chosen.price_key
        estimates = fit_to_budget(
            search.scenario, (unpriced, price * (1 - 1e-6)), [f.estimate for f in search.families]
        )
        nearest = sorted(estimates, key=attrgetter("nearness_key"))[:1]
        cheaper = [(1.0, each.deployment, each.preference_key) for each in nearest]
    if cheaper:
        _, deployment, preference = min(cheaper, key=lambda each: each[0])
        return _explain_nearest(search.state(deployment, preference))
    small = [
        rejection for rejection in rejected
        if rejection.bottleneck == "memory" and rejection.gpus < chosen.deployment.layout.num_gpus
    ]  # fmt: skip
    if small:
        largest = max(small, key=lambda rejection: rejection.gpus)
        text = f"Fewer GPUs do not hold the model: {largest.description}, {largest.reason}."
        return BindingConstraint("memory", text)
    return BindingConstraint("one GPU", _describe_room(chosen))


def _explain_nearest(near: Candidate) -> BindingConstraint:
    text = f"Closest cheaper option: {near.description}; {near.shortfall}."
    return BindingConstraint(_get_first_violation(near), text, near)


def _get_first_violation(candidate: Candidate) -> str:
    """The limit that `candidate` breaks first, or "probability"."""
    return next(iter(candidate.violated_constraints), "probability")


def _describe_room(chosen: Candidate) -> str:
    return (
        f"No smaller deployment exists. Highest limit utilization: {chosen.limit_utilization:.0%}."
    )


def _explain_infeasibility(
    candidates: list[Candidate], rejected: list[RejectedOption]
) -> BindingConstraint:
    """Why no candidate does, nearest first."""
    if candidates:
        near = candidates[0]
        text = f"Closest: {near.description}; {near.shortfall}."
        return BindingConstraint(_get_first_violation(near), text)
    if not rejected:
        return BindingConstraint(
            "engine",
            "No layout of this model is left on these GPUs: sizes have to divide its heads and layers,"
            " and tensor parallelism is planned inside one machine only.",
        )
    last = max(rejected, key=lambda rejection: rejection.gpus)
    where = "" if last.gpu in last.description else f" on {last.gpu}"
    return BindingConstraint(
        last.bottleneck, f"It fits nowhere: {last.description}{where}: {last.reason}"
    )


def get_reference_deployment(plan: Plan) -> Deployment:
    """The deployment to talk about: the chosen one, else the nearest, else the widest layout there is."""
    if plan.best:
        return plan.best.deployment
    scenario, candidate_gpu = plan.scenario, plan.scenario.gpus[0]
    model = load_model(scenario.model, quantization=scenario.quantizations[-1])
    layouts = list_legal_layouts(
        model,
        candidate_gpu.gpu,
        candidate_gpu.max_gpus,
        candidate_gpu.max_machine_gpus,
        scenario.engine,
    ) or [ParallelLayout()]
    return build_deployment(
        scenario,
        candidate_gpu,
        model,
        max(layouts, key=lambda layout: (layout.num_gpus, layout.tp)),
    )
