"""The last word on a plan: the closed form ranks thousands of candidates, the replay decides among those at the top.

A closed form averages; a replay has the queues, bursts and shared steps of real schedules
(`planning.simulation_runs`). Candidates are replayed from the cheapest on, those that the closed form
puts just short of the service level among them. One that holds is tried with a replica less, one
that fails with a replica more, each with the max_num_seqs that keeps its pace.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

from planner.core.errors import PlannerError
from planner.planning.candidate import Candidate, mark_as_tuned
from planner.planning.capacity import is_finite_run
from planner.planning.deployment_builder import MAX_NUM_SEQS, NUM_SEQS_STEP
from planner.planning.engine_tuning import (
    BATCHED_TOKENS_VALUES,
    apply_engine_args,
    generate_variants,
)
from planner.planning.evaluation import (
    evaluate_candidates,
    saturate_workload,
    screen_candidate,
    simulate_candidate,
)
from planner.planning.prediction import evaluate
from planner.planning.scenario import Scenario
from planner.planning.slo import SloTarget

MAX_SIMULATED_CANDIDATES = 60
"""Candidates that are replayed at most."""
MAX_SIMULATED_AFTER_FEASIBLE = 10
"""Candidates that are replayed at most once one holds, for a runner-up and a safer one."""
ANALYTICAL_ERROR_FACTOR = 1.4
"""The closed form can be wrong by so much: up to here beyond a limit it does not rule a candidate out."""
FULL_BATCH_SLOWDOWN = 2.5
"""A full batch may be so much slower than the traffic's own."""
SCREENING_REJECT_UTILIZATION, SCREENING_REJECT_LOAD = 1.15, 1.05
"""A first look that is so far beyond a limit, or beyond what is to be used of the capacity, needs no second."""
HOPELESS_UTILIZATION = 10
"""So far beyond a limit no max_num_seqs makes up for it, and one look is enough to say so."""
MAX_SCREENINGS, SEQS_SHRINK_FACTOR, SEQS_GROWTH_FACTOR = 5, 0.8, 1.5
"""Values of max_num_seqs that are looked at, and the steps until some are known that queue and some that are slow."""
MAX_FULL_SIMULATIONS = 2
"""Of those so many are replayed in full."""
OFFLINE_SEQS_FRACTIONS = (0.5, 0.25, 0.1)
"""The same where nothing promises a pace, but a TTFT or the whole answer."""
ROOMY_KV_USAGE = 0.9
"""A KV pool of which less is in use, at p99, serves no more if it is larger."""
PACE_METRICS = ("tpot", "itl")


@dataclass
class VerificationResult:
    """What the replay says of the candidates that it was asked about."""

    feasible: list[Candidate] = field(default_factory=list)  # from best to worst
    infeasible: list[Candidate] = field(default_factory=list)  # with what they miss

    def find_runner_up(self, chosen: Candidate) -> Candidate | None:
        """The best that holds with another GPU or layout than `chosen`."""
        return next((c for c in self.feasible if c.display_key != chosen.display_key), None)

    @property
    def safest(self) -> Candidate | None:
        """The best that holds at the pessimistic end too."""
        return next((c for c in self.feasible if not c.at_risk), None)

    @property
    def is_complete(self) -> bool:
        """A choice, a runner-up, and a safer one where the choice is at risk."""
        return bool(self.feasible and self.find_runner_up(self.feasible[0]) and self.safest)


def verify_candidates(scenario: Scenario, candidates: Iterable[Candidate]) -> VerificationResult:
    """Replay `candidates`, cheapest first, until the cheapest that holds, a runner-up and a safer one are known."""
    pending: list[Candidate] = []
    seen: set[object] = set()
    looked_at: set[object] = set()
    smaller: set[object] = set()

    def add(candidate: Candidate) -> None:
        if candidate.identity_key not in seen and may_be_feasible(scenario, candidate):
            seen.add(candidate.identity_key)
            insort(pending, candidate, key=_get_cost_order)

    def with_more(some: Iterable[Candidate], more: int) -> list[Candidate]:
        """`some` with so many replicas more, in closed form; without those of which none would be left."""
        sizes = [(c, c.deployment.layout.replicas + more) for c in some]
        return evaluate_candidates(
            scenario, [(c.deployment, size, c.preference_key) for c, size in sizes if size]
        )

    some = [candidate for candidate in candidates if may_be_feasible(scenario, candidate)]
    for candidate in (*some, *with_more(some, -1)):
        add(candidate)
    verified = VerificationResult()
    at_most = {candidate_gpu.gpu: candidate_gpu.max_gpus for candidate_gpu in scenario.gpus}
    tries, after = MAX_SIMULATED_CANDIDATES, MAX_SIMULATED_AFTER_FEASIBLE
    while pending and tries:
        worse = bool(verified.feasible) and not _may_beat(pending[0], verified.feasible[0])
        if worse and (verified.is_complete or not after):
            break
        asked = pending.pop(0)
        if (worse and not _is_promising(asked, verified)) or _get_size_independent_key(
            asked
        ) in looked_at:
            continue
        tries, after = tries - 1, after - worse
        tried, layout = (
            tune_and_simulate(scenario, asked, retune=not worse),
            asked.deployment.layout,
        )
        if tried.limit_utilization <= ANALYTICAL_ERROR_FACTOR:
            looked_at |= {_get_size_independent_key(asked), _get_size_independent_key(tried)}
        if tried.is_feasible:
            insort(verified.feasible, tried, key=attrgetter("rank_key"))
            alike = [
                other
                for other in some
                if other.cost_key == asked.cost_key and other.identity_key != asked.identity_key
            ]
            for fewer in with_more(
                [asked, *alike], -1
            ):  # which may take other steps than as many as are enough
                if fewer.identity_key in smaller:
                    continue
                smaller.add(fewer.identity_key)
                for one in (
                    [fewer]
                    if may_be_feasible(scenario, fewer)
                    else list_retuned_candidates(scenario, fewer)
                ):
                    add(one)
        else:
            verified.infeasible.append(tried)
            more = asked.deployment.with_replicas(layout.replicas + 1)
            helps = not {"power", "start-up"} & {*tried.violated_constraints}
            if helps and more.num_gpus_billed <= at_most.get(tried.deployment.gpu, math.inf):
                add(*with_more([asked], 1))
    if (
        verified.feasible and (best := verified.feasible[0]).at_risk
    ):  # at the same price other arguments may be safer
        others = [
            *(
                tune_and_simulate(scenario, other)
                for other in list_retuned_candidates(scenario, best)
            ),
            *_generate_wider_batches(scenario, best),
        ]
        verified.feasible = sorted(
            [*verified.feasible, *(c for c in others if c.is_feasible)], key=attrgetter("rank_key")
        )
    return verified


def _generate_wider_batches(scenario: Scenario, candidate: Candidate) -> Iterator[Candidate]:
    """`candidate` with more max_num_seqs than keep its pace when full, where that leaves fewer risks, or none.

    Slow steps hold requests longer: where those then wait for a place, more places cost less pace
    than the wait.
    """
    given, most = "max_num_seqs" in scenario.engine_args, candidate.deployment.args.max_num_seqs
    for size in () if given or scenario.offline else (2 * most, 4 * most):
        try:
            found = simulate_candidate(
                scenario,
                replace(candidate, deployment=candidate.deployment.with_args(max_num_seqs=size)),
            )
        except PlannerError:
            return
        if found.is_feasible and len(found.risks) < len(candidate.risks):
            yield found
        if not found.at_risk:
            return


def _is_promising(candidate: Candidate, result: VerificationResult) -> bool:
    """Whether the closed form says that it may be the runner-up, or once there is one, the safer plan."""
    return candidate.is_feasible and not (
        candidate.at_risk and result.find_runner_up(result.feasible[0])
    )


def _get_size_independent_key(candidate: Candidate) -> object:
    """What `tune_and_simulate` looks for the best max_num_seqs of."""
    return candidate.deployment.with_args(max_num_seqs=1)


def _may_beat(candidate: Candidate, best: Candidate) -> bool:
    """Whether the rule may put `candidate` before `best`, if it holds."""
    return (
        candidate.cost_key <= best.cost_key
        if best.at_risk
        else _get_cost_order(candidate)[:3] <= _get_cost_order(best)[:3]
    )


def _get_cost_order(candidate: Candidate) -> tuple[object, ...]:
    return (
        candidate.cost_key,
        candidate.preference_key,
        candidate.deployment.layout.pp,
        candidate.limit_utilization,
    )


def may_be_feasible(scenario: Scenario, candidate: Candidate) -> bool:
    """Whether the closed form leaves it open that `candidate` holds.

    While queues grow its waits mean nothing, and its pace is that of a full batch: only the load
    counts, and the pace.
    """
    if candidate.limit_utilization <= ANALYTICAL_ERROR_FACTOR or (
        scenario.offline and candidate.capacity_utilization <= ANALYTICAL_ERROR_FACTOR
    ):
        return True
    performance = candidate.prediction.performance
    if (
        performance is None
        or not performance.saturated
        or candidate.capacity_utilization > ANALYTICAL_ERROR_FACTOR
    ):
        return False
    return all(
        getattr(performance, t.metric)[t.percentile].mid <= FULL_BATCH_SLOWDOWN * t.seconds
        for t in _list_pace_targets(scenario)
    )


def tune_and_simulate(
    scenario: Scenario, candidate: Candidate, *, retune: bool = True
) -> Candidate:
    """`candidate` replayed, with the first max_num_seqs that holds of those looked at, or the best of them.

    `retune`: where none holds, other arguments are looked at too, as for all that may become the
    plan.
    """
    if candidate.limit_utilization > HOPELESS_UTILIZATION and not may_be_feasible(
        scenario, candidate
    ):
        return simulate_candidate(scenario, candidate, quick=True)
    looks = _screen_batch_sizes(scenario, candidate)
    best = min(looks, key=attrgetter("limit_utilization"))
    for other in (
        list_retuned_candidates(scenario, best)
        if retune and 1 < best.limit_utilization <= FULL_BATCH_SLOWDOWN
        else ()
    ):
        if min(looks, key=attrgetter("limit_utilization")).limit_utilization > 1:
            looks += _screen_batch_sizes(scenario, other, best)
    if retune:
        looks += _climb_step_sizes(scenario, looks)
    looks.sort(key=attrgetter("limit_utilization"))
    best = looks[0]
    for look in looks[:MAX_FULL_SIMULATIONS]:
        if look.limit_utilization > SCREENING_REJECT_UTILIZATION or look.capacity_utilization > (
            SCREENING_REJECT_LOAD if is_finite_run(scenario.workload) else 1
        ):
            break  # of traffic that goes on a longer look has the same capacity
        found = simulate_candidate(scenario, look)
        best = (
            found
            if found.is_feasible or best is look or found.limit_utilization < best.limit_utilization
            else best
        )
        if (
            found.is_feasible or found.limit_utilization > SCREENING_REJECT_LOAD
        ):  # another size will not make up for so much
            break
    return (
        simulate_candidate(scenario, best, quick=True)
        if best is looks[0] and best.is_simulated
        else best
    )


def _climb_step_sizes(scenario: Scenario, looks: list[Candidate]) -> list[Candidate]:
    """First looks at longer and shorter steps than the best of `looks` has, for as long as they come nearer to holding.

    The closed form errs about one length more than about another, and hides a better one so. Where
    the pace is far off the shortest steps are looked at first: a prompt holds up the others for a
    step, and its length is theirs.
    """
    best = min(looks, key=attrgetter("limit_utilization"))
    known = {look.deployment.args.max_num_batched_tokens for look in looks}
    args, preference, rows = best.deployment.args, mark_as_tuned(best.preference_key), []
    if "max_num_batched_tokens" in scenario.engine_args:
        return []
    far = best.limit_utilization > FULL_BATCH_SLOWDOWN and _misses_only_pace(best)
    longer = [size for size in BATCHED_TOKENS_VALUES if size > args.max_num_batched_tokens]
    shorter = [size for size in BATCHED_TOKENS_VALUES[::-1] if size < args.max_num_batched_tokens]
    for sizes in (
        (BATCHED_TOKENS_VALUES[:1], BATCHED_TOKENS_VALUES[1:]) if far else (longer, shorter)
    ):
        for size in sizes:
            if (
                size in known
                or best.limit_utilization <= 1
                or (
                    best.limit_utilization > FULL_BATCH_SLOWDOWN
                    and sizes != BATCHED_TOKENS_VALUES[:1]
                )
            ):
                break
            knobs = {
                "max_num_batched_tokens": size,
                "gpu_memory_utilization": args.gpu_memory_utilization,
            }
            try:
                changed = apply_engine_args(scenario, best.deployment, **knobs)
                changed = changed.with_args(
                    max_num_seqs=min(args.max_num_seqs, changed.args.max_num_seqs)
                )
                look = screen_candidate(
                    scenario, replace(best, deployment=changed, preference_key=preference)
                )
            except PlannerError:  # the engine has rules of its own, and longer steps take memory
                break
            if look.limit_utilization >= best.limit_utilization:
                break
            best = look
            rows.append(look)
    return rows


def _misses_only_pace(look: Candidate) -> bool:
    """Whether it keeps all but its pace."""
    return {name.split()[-1].lower() for name in look.violated_constraints} <= {
        *PACE_METRICS,
        "memory",
    }


def _screen_batch_sizes(
    scenario: Scenario, candidate: Candidate, than: Candidate | None = None
) -> list[Candidate]:
    """First looks at values of max_num_seqs, up to one that holds: more where requests queue, else fewer.

    One look is enough at what is worse `than` the same with other arguments.
    """
    looks: dict[int, Candidate] = {}
    most = candidate.deployment.args.max_num_seqs

    def look(size: int) -> Candidate:
        tried = replace(candidate, deployment=candidate.deployment.with_args(max_num_seqs=size))
        try:
            looks[size] = screen_candidate(scenario, tried)
        except PlannerError as error:
            looks[size] = replace(
                tried,
                violations=(str(error),),
                violated_constraints=("memory",),
                limit_utilization=math.inf,
            )
        return looks[size]

    if (
        "max_num_seqs" in scenario.engine_args
        or most < 2 * NUM_SEQS_STEP
        or not scenario.slo_targets
    ):
        look(most)
    elif scenario.offline or not _list_pace_targets(
        scenario
    ):  # fewer in flight, or fewer that share a step
        sizes = [max(int(most * share), 1) for share in OFFLINE_SEQS_FRACTIONS]
        found = look(most)
        if than and found.limit_utilization > SCREENING_REJECT_UTILIZATION * than.limit_utilization:
            sizes = []
        while (
            sizes
            and found.limit_utilization > 1
            and (found.limit_utilization <= ANALYTICAL_ERROR_FACTOR or scenario.offline)
        ):
            if (size := sizes.pop(0)) < _get_max_running(found):  # else it is the same
                found = look(size)
    else:
        limit = max(most, min(MAX_NUM_SEQS, candidate.deployment.args.max_num_batched_tokens))
        size = _find_max_paced_seqs(scenario, candidate)
        best = look(size)
        queues = not _misses_only_pace(best)
        promising = than is None or best.limit_utilization < than.limit_utilization
        while promising and not best.is_feasible and len(looks) < MAX_SCREENINGS:
            taken = min(_get_max_running(best), size)
            if queues and taken < size and "capacity" not in best.violated_constraints:
                break
            before, wanted = (
                size,
                size * SEQS_GROWTH_FACTOR if queues else taken * SEQS_SHRINK_FACTOR,
            )
            step = NUM_SEQS_STEP if wanted >= NUM_SEQS_STEP else 1
            size = min(max(round(wanted / step), 1) * step, limit)
            if size in looks:
                break
            if (found := look(size)).limit_utilization > best.limit_utilization:  # too far
                look(round(math.sqrt(before * size)))
                break
            best = found
        else:
            if promising and not best.is_feasible and not queues and size < NUM_SEQS_STEP:
                look(1)  # even a few that share steps may be too many
    return list(looks.values())


def _compute_tightness(scenario: Scenario, candidate: Candidate) -> tuple[float, float]:
    """How near its limits it is; where users wait for their answers its capacity always is, and the latencies tell."""
    performance = candidate.prediction.performance
    shares = (
        [performance.get(t.metric, t.percentile).mid / t.seconds for t in scenario.slo_targets]
        if performance
        else []
    )
    return candidate.limit_utilization, max(shares, default=0.0)


def _has_free_memory_and_slots(scenario: Scenario, candidate: Candidate) -> bool:
    """Whether the replay says that neither memory nor slots are what it lacks."""
    performance = candidate.prediction.performance
    if (
        performance is None
        or not candidate.is_simulated
        or scenario.workload.trace
        or "capacity" in candidate.violated_constraints
    ):
        return False
    slots = (
        _list_pace_targets(scenario)
        or performance.max_running < candidate.deployment.args.max_num_seqs
    )
    return bool(slots) and performance.kv_usage_p99 < ROOMY_KV_USAGE


def _get_max_running(candidate: Candidate) -> float:
    performance = candidate.prediction.performance
    return performance.max_running if performance and candidate.is_simulated else math.inf


def list_retuned_candidates(scenario: Scenario, candidate: Candidate) -> list[Candidate]:
    """`candidate` with other engine arguments that the closed form likes better, the best of each length of steps.

    Longer, shorter and equal ones: it errs about one kind more than about another.
    """
    deployment, replicas = candidate.deployment, candidate.deployment.layout.replicas
    preference, tokens = (
        mark_as_tuned(candidate.preference_key),
        deployment.args.max_num_batched_tokens,
    )
    others = generate_variants(scenario, deployment, is_underused=candidate.is_underused)
    usual, *tried = evaluate_candidates(
        scenario, [(each, replicas, preference) for each in (deployment, *others)]
    )
    tight = partial(_compute_tightness, scenario)
    better = [
        found for found in tried if tight(found) < tight(usual) and may_be_feasible(scenario, found)
    ]
    if _has_free_memory_and_slots(scenario, candidate):
        memory = {
            name: getattr(deployment.args, name)
            for name in ("gpu_memory_utilization", "max_num_seqs")
        }
        better = [found for found in better if found.deployment.with_args(**memory) != deployment]
    best: dict[tuple[bool, bool], Candidate] = {}
    for found in sorted(better, key=tight):
        size = found.deployment.args.max_num_batched_tokens
        best.setdefault((size > tokens, size < tokens), found)
    return list(best.values())


def _list_pace_targets(scenario: Scenario) -> list[SloTarget]:
    return [target for target in scenario.slo_targets if target.metric in PACE_METRICS]


def _find_max_paced_seqs(scenario: Scenario, candidate: Candidate) -> int:
    """The largest max_num_seqs that keeps the promised pace when full, else the largest."""
    most = candidate.deployment.args.max_num_seqs

    def too_slow(size: int) -> bool:
        sized = candidate.deployment.with_args(max_num_seqs=size)
        performance = evaluate(
            sized, saturate_workload(sized, replace(scenario.workload, num_prompts=None))
        ).performance
        return performance is None or any(
            getattr(performance, t.metric)[t.percentile].mid > t.seconds
            for t in _list_pace_targets(scenario)
        )

    sizes: list[int] = [most, *range(NUM_SEQS_STEP, most, NUM_SEQS_STEP), most]
    return sizes[bisect_left(sizes, True, lo=1, key=too_slow) - 1]


def ensure_simulated(scenario: Scenario, candidate: Candidate) -> Candidate:
    """`candidate` replayed, unless it is already."""
    return (
        tune_and_simulate(scenario, candidate)
        if candidate.prediction.can_start and not candidate.is_simulated
        else candidate
    )


def _get_closeness_key(candidate: Candidate) -> tuple[object, ...]:
    return round(candidate.limit_utilization, 3), candidate.cost_key


def rank_closest_candidates(
    scenario: Scenario, candidates: Sequence[Candidate], most: int = 6
) -> list[Candidate]:
    """The `most` candidates that come nearest to the service level, replayed, nearest first; then all others."""
    fit = sorted((c for c in candidates if c.prediction.can_start), key=_get_closeness_key)
    rest = [c for c in candidates if not c.prediction.can_start]
    shown = sorted(
        (ensure_simulated(scenario, candidate) for candidate in fit[:most]), key=_get_closeness_key
    )
    shown[:1] = [
        simulate_candidate(scenario, candidate)
        for candidate in shown[:1]
        if math.isfinite(candidate.limit_utilization)
    ]
    return [*shown, *fit[most:], *rest]
