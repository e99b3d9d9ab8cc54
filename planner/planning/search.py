"""Which deployment to choose: the cheapest that meets every target with the asked probability.

The rule: of all deployments whose probability (`planning.tolerance`) is at least the scenario's
`confidence` the cheapest, where pipeline stages inside a machine have to save a third; at the same
price one that takes no more memory than the engine does by itself, then the highest probability,
the fewest machines, and the formats nearest to the checkpoint. Where nothing reaches it, the
cheapest with a probability of a half is chosen and the plan is at risk. Beside it stand the gamble,
the cheapest with a probability of a half, and the safe option, the cheapest with 95%.

The search is best first by price. A family (GPU, engine, formats, drafts, layout) enters with the
fewest replicas that the closed form, at its largest measured error, leaves open. The cheapest open
family is replayed at the step cost that the asked probability allows for; where it fails, its
engine arguments are tuned by coordinate descent, and where that fails too it goes back with as many
replicas as the violation asks for. What holds closes everything that costs more. So the search
stops when the cheapest open family costs more than what was found.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from operator import attrgetter, itemgetter
from typing import Literal

from planner.core.progress import advance, get_progress_watch, is_out_of_time, show_step
from planner.engines.deployment import Deployment
from planner.engines.layout import ParallelLayout
from planner.latency.performance import Performance
from planner.models.registry import load_model
from planner.parallelism.layouts import list_legal_layouts
from planner.planning.autoscaling import (
    AutoscalingPlan,
    bill_by_day,
    plan_autoscaling,
    rank_by_daily_cost,
)
from planner.planning.billing import (
    ApiComparison,
    BillingComparison,
    compare_billing,
    compare_to_api,
)
from planner.planning.candidate import (
    MAX_PRICE_WITHOUT_STAGES,
    PROBABILITY_TIE,
    SAME_PRICE_SHARE,
    Candidate,
    mark_as_tuned,
)
from planner.planning.deployment_builder import build_deployment
from planner.planning.disaggregated_search import explain_skipped_pools, search_pools
from planner.planning.engine_tuning import (
    LEAST_HOPELESS_MARGIN,
    NEAR_MARGIN,
    SAFE_ENOUGH_SIGMAS,
    estimate_least_margin,
    tune_to_margin,
    tune_to_probability,
)
from planner.planning.evaluation import (
    check_against_slos,
    estimate_run_hours,
    get_candidate_workload,
)
from planner.planning.max_load import (
    LOAD_PRECISION,
    MAX_FIGURE,
    MIN_FIGURE,
    find_largest,
    find_max_load,
    round_figure,
    set_figure,
)
from planner.planning.memory_odds import estimate_memory_probability
from planner.planning.prediction import evaluate
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.scenario_schema import OpenFigure
from planner.planning.search_space import (
    Family,
    RejectedOption,
    build_families,
    estimate_fewest,
    fit_to_budget,
)
from planner.planning.slo import compute_asked_tolerance
from planner.planning.tolerance import EvaluationStore, state_deployment

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
"""Families and replica counts that are replayed for one option, cheapest first, before a search jumps."""
MAX_LIKELY_FAMILIES, MAX_LIKELY_PROBES = 8, 50
"""Where nothing cheap held by then, so many that are likely to be enough in closed form follow; a plan says so."""
MAX_EQUAL_PRICE_PROBES = 8
"""Families that are looked at, at the price of the first that holds, for a safer one."""
MAX_DAILY_RIVALS = 3
"""Other GPUs or layouts whose day, scaled by the hour, is held against that of the cheapest."""
NEAR_MISS_RATIO, MAX_NEAR_MISSES = 1.1, 3
"""So many so little beyond a limit in short simulations get full ones before a search gives up."""
ROUGH_PRECISION = 1.5
"""Of the closed form where it is only the start of a search."""
MAX_REFUSALS = 3
"""Reasons that are named where the engines refuse all there is."""
MAX_PUSHED = 3
"""Options that came nearest in a search and are pushed as far as they meet the targets."""
MAX_RUNNER_UP_PROBES = 8
"""Families that are looked at beyond that price for a runner-up with another GPU or layout."""


SMALLEST = "one GPU"
"""What `BindingConstraint.constraint` is where no smaller deployment exists."""


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
    pools = search_pools(scenario, _get_max_pool_cost(today))
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
    asked = scenario.confidence
    recommended = search.find_cheapest(asked, others=others) if gamble else []
    recommended = search.add_usual(recommended, asked)
    safe = []
    if recommended:
        unpriced, price = recommended[0].price_key
        safe = search.find_cheapest(
            SAFE_PROBABILITY, max_price=(unpriced, MAX_SAFE_PRICE_FACTOR * price),
            inner_stages=recommended[0].has_inner_stages,
        )  # fmt: skip
        first = recommended[0]
        if safe and (
            safe[0].placement_key == first.placement_key  # with other arguments
            or _price_all_hours(scenario, safe[0])
            <= _price_all_hours(scenario, first, SAME_PRICE_SHARE)
        ):
            recommended = [safe[0], *recommended[1:]]
    elif gamble:
        gamble = search.add_usual(gamble, GAMBLE_PROBABILITY)
    return _build_plan(search, rejected, recommended, gamble, safe)


def _price_all_hours(
    scenario: Scenario, candidate: Candidate, more: float = 0.0
) -> tuple[bool, float]:
    """Price a job, or an hour of what runs always, and a share `more`."""
    unpriced, price = candidate.price_key
    hours = estimate_run_hours(scenario, candidate)
    return unpriced, price * (hours.mid if hours else 1.0) * (1 + more)


def _search_for_gamble(
    scenario: Scenario, *, in_full: bool = False, inner_stages: bool = True
) -> "tuple[_Search, list[RejectedOption], list[Candidate]]":
    """Start a search with its cheapest option, the gamble; without one, nothing else holds either.

    Replicas over several machines are looked at only where nothing smaller may hold: nobody builds
    them where tensor parallelism in a machine, or more replicas, do. Without `inner_stages` none
    has pipeline stages inside a machine, nor spans machines.
    """
    search, rejected = _Search(scenario, [], EvaluationStore(scenario)), []
    gamble: list[Candidate] = []
    for layouts in (_fits_in_machine, _spans_machines)[: 1 + inner_stages]:
        families, refused = build_families(scenario, layouts, in_full=in_full)
        search.families += families
        rejected += refused
        if families:
            gamble = search.find_cheapest(GAMBLE_PROBABILITY, inner_stages=inner_stages)
        if gamble:
            break
    return search, rejected, gamble


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
        max_price: tuple[bool, float] = (True, math.inf), inner_stages: bool = True,
    ) -> list[Candidate]:  # fmt: skip
        """Find the cheapest deployment that meets every target with `probability`.

        It comes first; the next that do with other GPUs or layouts follow, up to `others`. Without
        `inner_stages` none has pipeline stages inside a machine.
        """
        return _CheapestFirst(self, probability, others, max_price, inner_stages).run()

    def add_usual(self, found: list[Candidate], probability: float) -> list[Candidate]:
        """Add what people build where the cheapest has stages in a machine; return the best by the rule first."""
        if found and found[0].has_inner_stages:
            found = [*found, *self.find_cheapest(probability, inner_stages=False)]
        return sorted(found, key=attrgetter("rank_key"))

    def _get_z(self, deployment: Deployment, probability: float) -> float:
        """The tolerance that `probability` asks for, beside what memory risks."""
        return compute_asked_tolerance(probability, estimate_memory_probability(deployment))

    def _probe(self, family: Family, replicas: int, probability: float) -> tuple[Deployment, float]:
        """Replay a family for `probability`, with other engine arguments where its own fail."""
        advance()
        self.probed.add(family.start)
        start = family.start.with_replicas(replicas)
        deployment = self.tuned.get(start, start)
        margin = self._get_margin(deployment, probability)
        if 1 < margin <= HOPELESS_MARGIN:
            z = self._get_z(deployment, probability)
            deployment = tune_to_margin(self.store, deployment, z)
            margin = self._get_margin(deployment, probability)
            if 1 < margin <= NEAR_MARGIN and family.other_start:
                other = tune_to_margin(self.store, family.other_start.with_replicas(replicas), z)
                if (found := self._get_margin(other, probability)) < margin:
                    deployment, margin = other, found
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

    def _judge(self, candidate: Candidate, family: Family, probability: float) -> Candidate:
        """Judge what passed by full simulations with its arguments tuned.

        What then falls short is tuned once more from where else its family may start.
        """
        starts = [candidate.deployment]
        if family.other_start:
            starts.append(family.other_start.with_replicas(candidate.deployment.layout.replicas))
        judged: list[Candidate] = []
        for k in range(len(starts)):
            deployment = tune_to_probability(self.store, *starts[k:])
            judged.append(self._state_of_family(deployment, family))
            if judged[-1].probability >= probability:
                break
        best = max(judged, key=attrgetter("is_feasible", "probability"))
        self.tuned[family.start.with_replicas(best.deployment.layout.replicas)] = best.deployment
        return best

    def _state_of_family(self, deployment: Deployment, family: Family) -> Candidate:
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


@dataclass
class _CheapestFirst:
    """A search for the cheapest options that meet every target with `probability`, by price."""

    search: _Search
    probability: float
    others: int
    max_price: tuple[bool, float]
    inner_stages: bool
    # price of the fewest open replicas, whether it has stages inside a machine, minus the estimate's
    # tolerance, family, replicas to try
    heap: list[tuple[bool, float, bool, float, int, int]] = field(default_factory=list)
    passed: list[tuple[Candidate, int]] = field(default_factory=list)  # short simulations
    postponed: list[tuple[int, int]] = field(default_factory=list)  # no cheaper than what passed
    enough: dict[int, int] = field(default_factory=dict)  # replicas that are known to be, by family
    chosen: list[Candidate] = field(default_factory=list)
    # ratio to the limit, deployment and family of what short simulations refuted
    missed: list[tuple[float, Deployment, int]] = field(default_factory=list)
    probes_left: int = field(default_factory=lambda: MAX_PROBES)
    has_jumped: bool = False
    equal_probes_left: int = MAX_EQUAL_PRICE_PROBES

    def run(self) -> list[Candidate]:
        """Probe families by price, and judge what passed once nothing open is cheaper."""
        for k, family in enumerate(self.search.families):
            if self.inner_stages or not family.estimate.has_inner_stages:
                self._push(k, family.get_min_replicas(self._get_z(family)))
        while self.heap or self.passed:
            if self.passed and (
                not self.heap or self.heap[0][:2] > _add_rounding(self._get_price_limit())
            ):
                self._judge_cheapest()
                if len(self.chosen) > self.others:
                    break
            elif not self._probe_next():
                break
        self._judge_near_misses()
        return self.chosen

    def _judge_near_misses(self) -> None:
        """Choose the nearest that full simulations let pass, of what short ones nearly did."""
        near = sorted(
            (miss for miss in self.missed if miss[0] <= NEAR_MISS_RATIO), key=itemgetter(0)
        )
        store = EvaluationStore(self.search.scenario, quick=False)
        for _, deployment, k in near[:MAX_NEAR_MISSES]:
            if self.chosen or is_out_of_time():
                return
            family = self.search.families[k]
            tuned = tune_to_margin(
                store, deployment, self.search._get_z(deployment, self.probability)
            )
            judged = self.search._state_of_family(tuned, family)
            if self._is_met(judged):
                self.chosen.append(judged)

    def _is_met(self, judged: Candidate) -> bool:
        return judged.is_feasible and judged.probability >= self.probability - 1e-9

    def _get_price_limit(self) -> tuple[bool, float]:
        """The least price of what passed, else the largest that may be paid."""
        return min((candidate.price_key for candidate, _ in self.passed), default=self.max_price)

    def _get_z(self, family: Family) -> float:
        return self.search._get_z(family.start, self.probability)

    def _push(self, k: int, replicas: int) -> None:
        """Put a family back, to be tried with `replicas`, at the price of the fewest."""
        family = self.search.families[k]
        fewest = family.get_min_replicas(self._get_z(family))
        price = family.price(self.search.scenario, fewest)
        if fewest <= family.max_replicas and price <= self.max_price:
            estimate = family.estimate
            order = estimate.has_inner_stages, -estimate.tolerance_sigmas
            heappush(self.heap, (*price, *order, k, min(replicas, family.max_replicas)))

    def _judge_cheapest(self) -> None:
        """Judge the cheapest that passed by full simulations, until enough are chosen."""
        limit = _add_rounding(self._get_price_limit())
        cheapest = [one for one in self.passed if one[0].price_key <= limit]
        self.passed = [one for one in self.passed if one[0].price_key > limit]
        for candidate, k in sorted(cheapest, key=lambda each: each[0].rank_key):
            if candidate.display_key in {each.display_key for each in self.chosen}:
                continue
            family = self.search.families[k]
            judged = (
                self.search._state_of_family(candidate.deployment, family)
                if self.chosen
                else self.search._judge(candidate, family, self.probability)
            )
            if self._is_met(judged):
                self.chosen.append(judged)
                if len(self.chosen) > self.others:
                    return
            else:
                self.search._refute(judged.deployment, family, self.probability, 1.0)
                self._push(k, judged.deployment.layout.replicas + 1)
        if self.chosen:
            self.probes_left = min(self.probes_left, MAX_RUNNER_UP_PROBES)
        else:
            for k, replicas in self.postponed:
                self._push(k, replicas)
        self.postponed, self.equal_probes_left = [], MAX_EQUAL_PRICE_PROBES

    def _probe_next(self) -> bool:
        """Probe the cheapest open family, if any probe is left for it; return whether to go on."""
        unpriced, price, *_, k, replicas = heappop(self.heap)
        if self.probability > GAMBLE_PROBABILITY and is_out_of_time():
            self.probes_left, self.search.is_cut = 0, True
        is_equal = bool(self.passed) and _add_rounding((unpriced, price)) >= self._get_price_limit()
        if (is_equal and not self.equal_probes_left) or not self.probes_left:
            if not self.probes_left and not self.passed:
                if self.chosen or self.search.is_cut or self.has_jumped:
                    return False
                self._jump_to_likely()
                return True
            self.postponed.append((k, replicas))
            return True
        self.equal_probes_left -= is_equal
        self.probes_left -= self._probe(k, replicas)
        return True

    def _jump_to_likely(self) -> None:
        """Go on with what is likely in closed form, in as many replicas, where all that is cheaper takes too long."""
        self.has_jumped = True
        self.search.is_complete &= self.probability > self.search.scenario.confidence
        self.heap, self.probes_left = [], MAX_LIKELY_PROBES
        likely = [
            (family.price(self.search.scenario, replicas), k, replicas)
            for k, family in enumerate(self.search.families)
            if self.inner_stages or not family.estimate.has_inner_stages
            if family.estimate.is_feasible and not family.estimate.at_risk
            if (replicas := family.estimate.deployment.layout.replicas)
            >= family.get_min_replicas(self._get_z(family))
        ]
        for price, k, replicas in sorted(likely)[:MAX_LIKELY_FAMILIES]:
            if price <= self.max_price:
                heappush(self.heap, (*price, False, 0.0, k, replicas))

    def _probe(self, k: int, replicas: int) -> bool:
        """Probe a family: put it back with more replicas or fewer, or let it pass; tell whether it was simulated."""
        family = self.search.families[k]
        z, limit = self._get_z(family), _add_rounding(self._get_price_limit())
        fewest = family.get_min_replicas(z)
        while replicas > fewest and family.price(self.search.scenario, replicas) > limit:
            replicas -= 1  # more are dearer than what passed already
        if self.probability > GAMBLE_PROBABILITY:
            few, many = (family.start.with_replicas(n) for n in (replicas, family.max_replicas))
            least = min(
                estimate_least_margin(self.search.scenario, each, z) for each in (few, many)
            )
            if least > LEAST_HOPELESS_MARGIN:
                self.search._refute(few, family, self.probability, least)
                return False
        tuned, ratio = self.search._probe(family, replicas, self.probability)
        if ratio > 1:
            self.search._refute(tuned, family, self.probability, ratio)
            self.missed.append((ratio, tuned, k))
            if math.isfinite(ratio):
                z = self.search._get_z(
                    tuned, self.probability
                )  # memory may be surer than at the start
                more = self.search._count_more_replicas(tuned, family, z)
                self._push(k, min(more, self.enough.get(k, more)))
        elif fewest < replicas:
            self.enough[k] = replicas  # more were tried at once than it may take
            self._push(k, (fewest + replicas) // 2)
        else:
            self.passed.append((self.search.describe(tuned, family), k))
        return True


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
    deployment = tune_to_probability(store, deployment)
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
    if not search.is_complete:
        notes.append(
            f"after {MAX_PROBES} simulated candidates the search went on with likely ones: a cheaper plan"
            " may meet the targets"
        )
    if binding is None:
        binding = _explain_infeasibility(list(ordered), rejected)
        return Plan(
            scenario, None, None, None, None, binding, ordered, tuple(rejected), tuple(notes),
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
    return sorted(
        places.values(),
        key=lambda c: (-round(c.probability / PROBABILITY_TIE), c.cost_key, c.limit_utilization),
    )


def settle_open_figure(scenario: Scenario, *, is_simulated: bool) -> Scenario:
    """Find the largest load, or the shortest limit, that any deployment keeps as asked.

    Returns `scenario` with that figure; with the easiest that was tried if not even that is kept.
    Without simulations the closed form answers.
    """
    kind = scenario.open_figure
    assert kind is not None

    def is_met_analytically(value: float) -> bool:
        asked = set_figure(scenario, kind, value)
        return search_analytically(asked, in_full=is_simulated).verdict == "holds"

    precision = ROUGH_PRECISION if is_simulated else LOAD_PRECISION
    start = find_largest(is_met_analytically, 1.0, precision)
    value = _find_best_figure(scenario, kind, start or MIN_FIGURE) if is_simulated else start
    return replace(
        set_figure(scenario, kind, round_figure(kind, value or MIN_FIGURE)), found_figure=kind
    )


def _find_best_figure(scenario: Scenario, kind: OpenFigure, start: float) -> float:
    """Find the largest figure; pipeline stages inside a machine have to raise it by half; 0 if none."""
    usual = _push_figure(scenario, kind, start, inner_stages=False)
    if not usual:
        return _push_figure(scenario, kind, start)
    beyond = usual * MAX_PRICE_WITHOUT_STAGES
    return _push_figure(scenario, kind, beyond, at_least=beyond) or usual


def _push_figure(
    scenario: Scenario, kind: OpenFigure, start: float, *, inner_stages: bool = True, at_least: float = 0.0,
) -> float:  # fmt: skip
    """Find the largest figure at which a search has an option that meets the targets; 0 if none.

    Without `inner_stages` none has pipeline stages inside a machine; 0 too where none reaches `at_least`.

    What a search chooses, and what comes nearest in it, is pushed as far as it meets the targets in
    all the replicas that there may be: there the next search looks, or further where the last one had
    an option. It ends where a search a little above the largest figure misses, and nothing is pushed
    beyond. So an option more never lowers it.
    """
    met, missed, value, step = 0.0, [math.inf], round_figure(kind, start), LOAD_PRECISION
    while MIN_FIGURE <= value <= MAX_FIGURE and not is_out_of_time():
        asked = set_figure(scenario, kind, value)
        options, is_met = _list_strongest(asked, inner_stages)
        if not is_met and value <= at_least:
            return 0.0
        if is_met:
            met = max(met, value)
        else:
            missed.append(value)
        pushed = 0.0
        for one in options:
            known = max(met, pushed)
            pushed = max(pushed, find_max_load(asked, one, kind=kind, more_than=known))
        least = max(met * LOAD_PRECISION, met + (kind == "concurrency"))
        above = min(miss for miss in missed if miss > met)
        step = step * step if is_met else LOAD_PRECISION
        reach = min(met * step, math.sqrt(met * above)) if met else 0.0
        if pushed > least and all(abs(miss / pushed - 1) > LOAD_PRECISION - 1 for miss in missed):
            value = max(pushed, reach)
        elif above <= least:
            break
        else:
            value = max(reach, least) if met else value / 4
        value = round_figure(kind, value)
        if value <= met:
            break
    return met or start * is_out_of_time()


def _list_strongest(
    scenario: Scenario, inner_stages: bool
) -> tuple[list[Deployment | Candidate], bool]:
    """List what meets the targets or comes nearest, in its most replicas, and if any meets them.

    Pools are looked at where nothing else meets the targets.
    """
    search, _, gamble = _search_for_gamble(scenario, in_full=True, inner_stages=inner_stages)
    meeting = search.find_cheapest(scenario.confidence, inner_stages=inner_stages) if gamble else []
    families = {family.estimate.family_key: family for family in search.families}
    options = {one.family_key: one.deployment for one in meeting}
    for _, deployment, family in sorted(search.nearest, key=itemgetter(0)):
        if len(options) < len(meeting) + MAX_PUSHED:
            options.setdefault(family.estimate.family_key, deployment)
    pools: list[Candidate] = []
    if (
        not meeting
        and inner_stages
        and scenario.allow_disaggregation
        and not explain_skipped_pools(scenario)
    ):
        pools = search_pools(scenario, _get_max_pool_cost(next(iter(gamble), None)))
        meeting = [pool for pool in pools if pool.is_confident]
    most = [one.with_replicas(families[key].max_replicas) for key, one in options.items()]
    return [*most, *pools[:MAX_PUSHED]], bool(meeting)


def _get_max_pool_cost(unified: Candidate | None) -> float:
    """Get what pools may cost beside the plan without them."""
    if unified is None or unified.cost_key[0]:
        return math.inf
    return MAX_POOL_COST_FACTOR * unified.cost_key[1]


def search_analytically(scenario: Scenario, *, in_full: bool = False) -> Plan:
    """`search_deployments` in closed form, in about a tenth of a second: while a control moves."""
    if scenario.open_figure:
        scenario = settle_open_figure(scenario, is_simulated=False)
    families, rejected = build_families(scenario, _fits_in_machine, in_full=in_full)
    if not any(family.estimate.is_feasible for family in families):
        wide, refused = build_families(scenario, _spans_machines, in_full=in_full)
        families, rejected = families + wide, rejected + refused
    ordered = sorted((family.estimate for family in families), key=attrgetter("rank_key"))
    if ordered and ordered[0].is_feasible and ordered[0].at_risk and not in_full:
        fewest = estimate_fewest(scenario, families, GAMBLE_PROBABILITY)
        ordered = sorted(fewest, key=attrgetter("rank_key"))
    if not ordered or not ordered[0].is_feasible:
        ordered.sort(key=attrgetter("limit_utilization"))
        binding = _explain_infeasibility(ordered, rejected)
        return Plan(scenario, None, None, None, None, binding, tuple(ordered), tuple(rejected), ())
    chosen = ordered[0]
    others = (c for c in ordered if c.is_feasible and c.display_key != chosen.display_key)
    binding = BindingConstraint(SMALLEST, _describe_room(chosen))
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
    return BindingConstraint(SMALLEST, _describe_room(chosen))


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
    if refusals := _list_refusals(rejected):
        return BindingConstraint("engine", f"Nothing starts: {'; '.join(refusals)}.")
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


def _list_refusals(rejected: list[RejectedOption]) -> list[str]:
    """List the first reasons of what the engines refuse, if that is all there is."""
    if any(rejection.bottleneck != "engine" for rejection in rejected):
        return []
    return list(dict.fromkeys(rejection.reason for rejection in rejected))[:MAX_REFUSALS]


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
