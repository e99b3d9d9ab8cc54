"""How sure the choice itself is: how often it stands where figures are drawn from their intervals, and what would tell.

A draw is one true step cost for each layout. Errors are shared as the calibration's widths say:
what is left where a pair of GPU and model was measured often is a layout's own, the rest is the
pair's, and what a new GPU, model or release adds is shared by all that have it. Every figure of a
candidate moves with its step cost, and the rule of the search judges what comes of it, headroom
included; at the same price it keeps today's order. Prices, memory and traffic are not drawn.
"""

import math
from collections import Counter
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from planner.core.intervals import Z_SCORE_80PCT, Interval
from planner.latency.coefficient_lookup import (
    get_deployment_coefficients,
    get_weight_format_name,
    load_calibration_catalog,
)
from planner.planning.candidate import Candidate
from planner.planning.evaluation import compute_offered_rps, get_capacity_rps
from planner.planning.scenario import Scenario
from planner.planning.search import Plan

NUM_DRAWS, RANDOM_SEED = 1000, 11
MAX_DRAW_SIGMA = 2.5
"""Standard deviations beyond which draws are too rare to count."""
MAX_COSTLIER_CANDIDATES = 30
"""Candidates that cost more than the chosen one, at most."""
MIN_REPORTED_PROBABILITY = 0.005
"""What happens in fewer draws is not worth a run."""
MIN_BENCHMARK_ADVANTAGE = 0.01
"""A benchmark of another plan must change the choice in so much more of the draws to come before the plan's own."""
MAX_BENCHMARKS = 6
"""Benchmarks that are asked about: of the chosen plan, and of those that are chosen instead most often."""


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
    def p_equal_cost(self) -> float:
        """The share in which another plan at the same price does better, or holds where this one does not."""
        return round(1 - self.p_unchanged - self.p_cheaper - self.p_costlier, 6)

    def __str__(self) -> str:
        near = ""
        if self.likeliest_cheaper:
            missed = "; ".join(self.likeliest_cheaper.violations)
            near = (
                f" (most often {self.likeliest_cheaper.description}, which misses in the middle of"
                f" its intervals: {missed})"
            )
        others = {
            f"something cheaper would do{near}": self.p_cheaper,
            "another at the same price does better": self.p_equal_cost,
            "only something dearer keeps all that is asked": self.p_costlier,
        }
        sentences = [
            f"in {count} {what}"
            for what, share in others.items()
            if (count := round(share * NUM_DRAWS))
        ]
        kept = (
            f"in {self.p_unchanged * NUM_DRAWS:,.0f} of {NUM_DRAWS:,} draws from the intervals it"
            " stays the cheapest that holds"
        )
        return "; ".join([kept, *([", ".join(sentences)] if sentences else [])])


@dataclass(frozen=True)
class _ChoiceSet:
    """Candidates in the order of the rule, with logarithms of the shares of their limits, and what step costs move."""

    candidates: list[Candidate]
    # [candidates, limits, 3] middle, what a standard deviation slower adds, and faster takes away;
    limits: np.ndarray
    # of the promises, then of the load
    order: np.ndarray  # [candidates, 1] of cost, then of today's rank but for the margin

    def compute_excess(self, z: np.ndarray) -> np.ndarray:
        """[candidates, draws] by how much each exceeds its tightest limit at its [candidates, draws] `z`."""
        mid, slower, faster = np.moveaxis(self.limits, 2, 0)[..., None]
        late, early = np.maximum(z, 0)[:, None], np.maximum(-z, 0)[:, None]
        return np.asarray((mid + slower * late - faster * early).max(1))

    def choose(self, z: np.ndarray) -> np.ndarray:
        """[draws] which the rule chooses at `z`; one beyond the last where none holds."""
        over = self.compute_excess(z)
        keys = np.where(over > 0, np.inf, self.order + np.exp(np.minimum(over, 0)) / 2)
        return np.where(np.isfinite(keys.min(0)), keys.argmin(0), len(self.candidates))


def estimate_choice_confidence(plan: Plan) -> ChoiceConfidence | None:
    """How sure the choice of `plan` is; None where nothing was chosen. The same plan has the same answer."""
    chosen = plan.chosen
    if chosen is None:
        return None
    rivals = _build_choice_set(plan, chosen)
    candidates = rivals.candidates
    shares = [_decompose_variance(candidate) for candidate in candidates]
    errors = {
        name: _draw_standard_normal(name) for name in {name for each in shares for name in each}
    }
    z = np.array(
        [sum(math.sqrt(share) * errors[name] for name, share in each.items()) for each in shares]
    )
    winners, own = rivals.choose(z), candidates.index(chosen)
    bills = [
        (unpriced, round(cost, 6))
        for unpriced, cost in (candidate.cost_key for candidate in candidates)
    ]
    more = np.array([*((bill > bills[own]) - (bill < bills[own]) for bill in bills), 1])[winners]
    won = Counter(winners.tolist())
    instead = [
        (k, many / NUM_DRAWS) for k, many in won.most_common() if k not in (own, len(candidates))
    ]
    saving = (
        candidates[k] for k, _ in instead if bills[k] < bills[own] and candidates[k].violations
    )
    served = rivals.limits[own].copy()
    served[-1, 0] += math.log(
        1 - plan.scenario.headroom
    )  # all that it can serve, with nothing to stay free
    broken = (
        _ChoiceSet([chosen], served[None], np.zeros((1, 1))).compute_excess(z[own : own + 1]) > 0
    )
    return ChoiceConfidence(
        p_unchanged=won[own] / NUM_DRAWS,
        p_cheaper=float((more < 0).mean()),
        p_costlier=float((more > 0).mean()),
        p_infeasible=float(broken.mean()),
        alternatives=tuple(
            (candidates[k], share) for k, share in instead if share >= MIN_REPORTED_PROBABILITY
        ),
        likeliest_cheaper=next(saving, None),
        benchmark_values=_rank_benchmarks(
            rivals, [own, *(k for k, _ in instead)][:MAX_BENCHMARKS], shares, z
        ),
    )


def _build_choice_set(plan: Plan, chosen: Candidate) -> _ChoiceSet:
    """All that could be chosen in a draw: of each place the best, nothing dearer than what always holds."""
    kept: dict[object, tuple[Candidate, list[tuple[float, float, float]]]] = {}
    most = (True, math.inf)
    for candidate in sorted(
        plan.candidates, key=lambda candidate: (candidate.cost_key, candidate.rank_key)
    ):
        dearer = sum(other.cost_key > chosen.cost_key for other, _ in kept.values())
        if candidate.cost_key > most:
            break
        if (
            dearer >= MAX_COSTLIER_CANDIDATES
            or candidate.placement_key in kept
            or (limits := _compute_limit_rows(plan.scenario, candidate)) is None
        ):
            continue
        if (
            all(mid - MAX_DRAW_SIGMA * faster <= 0 for mid, _, faster in limits)
            or candidate is chosen
        ):
            kept[candidate.placement_key] = candidate, limits
        if candidate.cost_key >= chosen.cost_key and all(
            mid + MAX_DRAW_SIGMA * slower <= 0 for mid, slower, _ in limits
        ):
            most = min(most, candidate.cost_key)
    if chosen.placement_key not in kept or kept[chosen.placement_key][0] is not chosen:
        kept[chosen.placement_key] = chosen, _compute_limit_rows(plan.scenario, chosen) or []
    first = [
        (candidate.cost_key, candidate.rank_key, candidate is not chosen)
        for candidate, _ in kept.values()
    ]
    ordered = sorted(zip(first, kept.values(), strict=True), key=lambda item: item[0])
    candidates = [candidate for _, (candidate, _) in ordered]
    keys = [((c.cost_key[0], round(c.cost_key[1], 6)), c.rank_key[:-1]) for c in candidates]
    order = np.array([[sorted(set(keys)).index(key)] for key in keys])
    return _ChoiceSet(
        candidates, np.array([kept[candidate.placement_key][1] for candidate in candidates]), order
    )


def _compute_limit_rows(
    scenario: Scenario, candidate: Candidate
) -> list[tuple[float, float, float]] | None:
    """Compute a row of `_ChoiceSet.limits` for each promise and for the load.

    None where it misses what no step cost changes.
    """
    performance, planned = candidate.prediction.performance, 1 - scenario.headroom
    drawn = {*(target.name for target in scenario.slo_targets), "capacity", "rate"}
    if performance is None or not drawn.issuperset(candidate.violated_constraints):
        return None
    times = [(performance.get(t.metric, t.percentile), t.seconds) for t in scenario.slo_targets]
    rows = [_compute_log_sensitivity(value, limit) for value, limit in times]
    most, asked = (
        get_capacity_rps(scenario, performance),
        compute_offered_rps(scenario, candidate.prediction),
    )
    if (
        scenario.workload.rate is None or most is None
    ):  # users wait for their answers: no queue grows
        return [*rows, _compute_log_sensitivity(Interval.from_value(0), planned)]
    return [
        *rows,
        _compute_log_sensitivity(most.map_monotone(lambda rate: asked / max(rate, 1e-9)), planned),
    ]


def _compute_log_sensitivity(value: Interval, limit: float) -> tuple[float, float, float]:
    """Logarithms: of its middle as a share of `limit`, and of what a standard deviation adds and takes away."""
    if math.isnan(value.mid):  # answers of one token have no pace
        value = Interval.from_value(0)
    lo, mid, hi = (max(end / limit, 1e-9) for end in (value.lo, value.mid, value.hi))
    return math.log(mid), math.log(hi / mid) / Z_SCORE_80PCT, math.log(mid / lo) / Z_SCORE_80PCT


def _decompose_variance(candidate: Candidate) -> dict[str, float]:
    """Shares of the variance of its step cost, by what has the same error; those of its layout alone last."""
    deployment = candidate.deployment
    coefficients, engine, card = (
        get_deployment_coefficients(deployment),
        deployment.engine,
        deployment.gpu.name,
    )
    widths = load_calibration_catalog(engine.name).common.sigma_tpot
    name, layout = str(engine), deployment.with_replicas(1).layout
    pair = f"{name}, {card}, {get_weight_format_name(deployment.model)}"
    own = (
        f"{pair}, {layout}, {deployment.args.kv_cache_dtype or 'auto'} KV,"
        f" {deployment.num_draft_tokens} drafts"
    )
    kinds = {"model": f"{name}, the model", "gpu": f"{name}, {card}", "version": name}
    found = {
        kinds[new]: max(getattr(widths, new) ** 2 - widths.curve**2, 0.0)
        for new in coefficients.novelties
        if new in kinds
    }
    found[pair] = max(widths.curve**2 - widths.many**2, 0.0) * (
        coefficients.sigma_tpot > widths.many
    )
    found[own] = widths.many**2
    return {name: square / sum(found.values()) for name, square in found.items()}


def _draw_standard_normal(name: str) -> np.ndarray:
    """Standard normal draws of an error, the same for the same name whatever else is drawn."""
    return np.random.default_rng([RANDOM_SEED, crc32(name.encode())]).standard_normal(NUM_DRAWS)


def _rank_benchmarks(
    rivals: _ChoiceSet, asked: list[int], shares: list[dict[str, float]], z: np.ndarray
) -> tuple[tuple[Candidate, float], ...]:
    """How often the result of a benchmark of each of `asked` changes what the search says, most often first.

    A result tells the error of its own layout, and of others as far as they share it; the rest
    stays at the middle. The plan's own, the first of `asked`, comes first where no other changes it
    clearly more often.
    """
    today, rows = rivals.choose(np.zeros((len(z), 1)))[0], []
    for k in dict.fromkeys(
        {list(shares[k])[-1]: k for k in reversed(asked)}[list(shares[k])[-1]] for k in asked
    ):
        known = [
            sum(math.sqrt(share * shares[k].get(name, 0)) for name, share in each.items())
            for each in shares
        ]
        changed = float((rivals.choose(np.outer(known, z[k])) != today).mean())
        rows.append((changed + MIN_BENCHMARK_ADVANTAGE * (k == asked[0]), changed, k))
    return tuple(
        (rivals.candidates[k], changed)
        for _, changed, k in sorted(rows, reverse=True)
        if changed >= MIN_REPORTED_PROBABILITY
    )
