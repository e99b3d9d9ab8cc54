"""How sure the choice itself is: how often it stands where step costs are drawn, and what would tell.

A draw is one true step cost for each layout. Errors are shared as the calibration's widths say:
what is left where a pair of GPU and model was measured often is a layout's own, the rest is the
pair's, and what a new GPU, model or release adds is shared by all that have it. A candidate holds
in a draw if its error is within its tolerance (`planning.tolerance`), and the cheapest that holds
is chosen; at the same price it keeps today's order. Prices, memory and traffic are not drawn.
"""

import math
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from statistics import NormalDist

import numpy as np

from planner.latency.measured_residuals import OperatingPoint, estimate_residual_covariance
from planner.latency.step_model import locate_operating_point
from planner.planning.candidate import Candidate
from planner.planning.search import Plan
from planner.planning.slo import MAX_TOLERANCE_SIGMAS
from planner.planning.tolerance import compute_load_angle

NUM_DRAWS, RANDOM_SEED = 1000, 11
MAX_DRAW_SIGMA = 2.5
"""Standard deviations beyond which draws are too rare to count."""
MAX_COSTLIER_CANDIDATES = 30
"""Candidates that cost more than the chosen one, at most."""
MIN_REPORTED_PROBABILITY = 0.005
"""What happens in fewer draws is not worth a run."""
MIN_BENCHMARK_ADVANTAGE = 0.05
"""A benchmark of another plan must change the choice in so much more of the draws to come before the plan's own."""
MIN_BENCHMARKED_SHARE = 0.1
"""Share of the draws that another plan must win: for less nobody rents its GPUs first."""
MAX_BENCHMARKS = 6
"""Benchmarks that are asked about: of the plan, and of options that cost no more and are chosen instead most often."""


@dataclass(frozen=True)
class ChoiceConfidence:
    """How often the plan stays the cheapest that holds, in `NUM_DRAWS` draws, and what is chosen else."""

    p_unchanged: float
    p_cheaper: float  # something that costs less would do
    p_costlier: float  # only something that costs more would do, or nothing that was looked at
    p_infeasible: float  # the plan itself breaks a promise, or is overloaded
    alternatives: tuple[tuple[Candidate, float], ...]  # that are chosen instead, most often first
    likeliest_cheaper: Candidate | None  # of the cheaper ones that which is chosen most often
    benchmark_values: tuple[
        tuple[Candidate, float], ...
    ]  # a benchmark of one replica of which changes the choice so often

    @property
    def best_benchmark(self) -> tuple[Candidate, float] | None:
        """What to measure first, and in which share of draws that changes the choice; None where nothing would."""
        return next(iter(self.benchmark_values), None)

    @property
    def is_cheaper_likely(self) -> bool:
        """Whether something that costs less would do in most draws."""
        return self.p_cheaper > 0.5

    @property
    def p_equal_cost(self) -> float:
        """The share in which another plan at the same price does better, or holds where this one does not."""
        return round(1 - self.p_unchanged - self.p_cheaper - self.p_costlier, 6)

    def __str__(self) -> str:
        near = ""
        if self.likeliest_cheaper:
            near = (
                f" (most often {self.likeliest_cheaper.description}, whose own probability is"
                f" {self.likeliest_cheaper.probability:.0%})"
            )
        others = {
            f"a cheaper one does{near}": self.p_cheaper,
            "another at the same price is better": self.p_equal_cost,
            "only a more expensive one does": self.p_costlier,
        }
        sentences = [
            f"in {count} {what}"
            for what, share in others.items()
            if (count := round(share * NUM_DRAWS))
        ]
        kept = (
            f"in {self.p_unchanged * NUM_DRAWS:,.0f} of {NUM_DRAWS:,} draws from the intervals the"
            " plan stays the cheapest that meets the targets"
        )
        return "; ".join([kept, *([", ".join(sentences)] if sentences else [])])


@dataclass(frozen=True)
class _ChoiceSet:
    """Candidates in the order of the rule, each with the largest error that it stands."""

    candidates: list[Candidate]
    tolerances: np.ndarray  # [candidates, 1] standard deviations

    def choose(self, z: np.ndarray) -> np.ndarray:
        """[draws] the first that holds at its errors `z` [candidates, draws]; one beyond the last where none does."""
        holds = z <= self.tolerances
        return np.where(holds.any(0), holds.argmax(0), len(self.candidates))


def estimate_choice_confidence(plan: Plan) -> ChoiceConfidence | None:
    """Estimate how sure the choice of `plan` is; None where nothing was chosen.

    The same plan has the same answer.
    """
    chosen = plan.chosen
    if chosen is None:
        return None
    rivals = _build_choice_set(plan, chosen)
    candidates = rivals.candidates
    points = [
        locate_operating_point(candidate.deployment, candidate.prediction.effective_workload)
        for candidate in candidates
    ]
    correlation = _correlate_errors(points, plan.scenario.load_sigma)
    normals = np.random.default_rng(RANDOM_SEED).standard_normal((len(points), NUM_DRAWS))
    z = np.linalg.cholesky(correlation + 1e-9 * np.eye(len(points))) @ normals
    winners, own = rivals.choose(z), candidates.index(chosen)
    bills = [(c.cost_key[0], round(c.cost_key[1], 6)) for c in candidates]
    more = np.array([*((bill > bills[own]) - (bill < bills[own]) for bill in bills), 1])[winners]
    won = Counter(winners.tolist())
    instead = [
        (k, many / NUM_DRAWS) for k, many in won.most_common() if k not in (own, len(candidates))
    ]
    cheaper = (candidates[k] for k, _ in instead if bills[k] < bills[own])
    shown = {each.placement_key for each in (*plan.options.values(), plan.runner_up) if each}
    worth_renting = [
        k
        for k, share in instead
        if bills[k] <= bills[own]
        and share >= MIN_BENCHMARKED_SHARE
        and candidates[k].placement_key in shown
    ]
    return ChoiceConfidence(
        p_unchanged=won[own] / NUM_DRAWS,
        p_cheaper=float((more < 0).mean()),
        p_costlier=float((more > 0).mean()),
        p_infeasible=1 - chosen.probability,
        alternatives=tuple(
            (candidates[k], share) for k, share in instead if share >= MIN_REPORTED_PROBABILITY
        ),
        likeliest_cheaper=next(cheaper, None),
        benchmark_values=_rank_benchmarks(
            rivals, [own, *worth_renting][:MAX_BENCHMARKS], correlation, z
        ),
    )


def _build_choice_set(plan: Plan, chosen: Candidate) -> _ChoiceSet:
    """All that could be chosen in a draw: of each place the best, nothing dearer than what always holds."""
    kept: dict[object, Candidate] = {chosen.placement_key: chosen}
    drawn = {*(target.name for target in plan.scenario.slo_targets), "capacity", "rate"}
    dearer = 0
    for candidate in sorted(plan.candidates, key=attrgetter("cost_key")):
        if dearer >= MAX_COSTLIER_CANDIDATES:
            break
        if candidate.placement_key in kept or not drawn.issuperset(candidate.violated_constraints):
            continue
        if candidate.tolerance_sigmas < -MAX_DRAW_SIGMA:
            continue
        kept[candidate.placement_key] = candidate
        dearer += candidate.cost_key > chosen.cost_key
        if dearer and candidate.tolerance_sigmas >= MAX_DRAW_SIGMA:
            break
    ordered = sorted(
        kept.values(), key=lambda each: (each.rank_cost, each is not chosen, each.rank_key)
    )
    tolerances = [
        math.inf if each.tolerance_sigmas >= MAX_TOLERANCE_SIGMAS else each.tolerance_sigmas
        for each in ordered
    ]
    return _ChoiceSet(ordered, np.array(tolerances)[:, None])


def _correlate_errors(points: list[OperatingPoint], load_sigma: float) -> np.ndarray:
    """Correlate the errors of the step costs at these points, [n, n]; those of two engines are independent.

    All share that of traffic that is a range, `load_sigma`, as far as it weighs beside their own.
    """
    correlation, sigmas = np.eye(len(points)), np.ones(len(points))
    for engine in dict.fromkeys(point.engine for point in points):
        own = [k for k, point in enumerate(points) if point.engine == engine]
        covariance = estimate_residual_covariance([points[k] for k in own], "tpot")
        widths = np.sqrt(np.diag(covariance))
        correlation[np.ix_(own, own)] = covariance / np.outer(widths, widths)
        sigmas[own] = widths
    angles = compute_load_angle(load_sigma, sigmas)
    steps, load = np.cos(angles), np.sin(angles)
    together: np.ndarray = correlation * np.outer(steps, steps) + np.outer(load, load)
    return together


def _rank_benchmarks(
    rivals: _ChoiceSet, asked: list[int], correlation: np.ndarray, z: np.ndarray
) -> tuple[tuple[Candidate, float], ...]:
    """How often the result of a benchmark of each of `asked` changes what the search says.

    First comes what is expected to save most for its own price, then what changes the choice most often.

    A result tells the error of its own layout, and of others as far as they share it, and then the
    cheapest is chosen that holds as probably as is asked of the plan. The plan's own, the first of
    `asked`, comes first where no other changes it clearly more often.
    """
    # today's choice is that of no result, under which the whole variance remains
    enough = min(
        NormalDist().inv_cdf(rivals.candidates[asked[0]].confidence), rivals.tolerances[asked[0], 0]
    )
    today, rows = rivals.choose(np.full((len(z), 1), enough))[0], []
    costs = [each.cost_key[1] for each in rivals.candidates]
    prices = np.array([*costs, math.inf])  # nothing that was looked at holds: no saving
    for k in asked:
        known = correlation[:, k]
        left = np.sqrt(np.maximum(1 - known**2, 0.0))[:, None]
        told = rivals.choose(np.outer(known, z[k]) + enough * left)
        changed = float((told != today).mean())
        saved = float(np.maximum(prices[today] - prices[told], 0.0).mean())
        benchmarked = rivals.candidates[k]
        saving = saved / max(benchmarked.price_key[1] * benchmarked.replica_share, 1e-9)
        rows.append((saving, changed + MIN_BENCHMARK_ADVANTAGE * (k == asked[0]), changed, k))
    return tuple(
        (rivals.candidates[k], changed)
        for _, _, changed, k in sorted(rows, reverse=True)
        if changed >= MIN_REPORTED_PROBABILITY
    )
