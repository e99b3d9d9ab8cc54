"""How much slower than predicted a deployment may be before it breaks a promise.

Every step of a deployment may take `exp(sigma z)` times what the model predicts, where `sigma` is
the calibration's width and `z` a standard normal error. Slower steps never improve an SLO, so there
is one largest `z` at which a limit still holds: its tolerance. The probability that a limit is kept
is `Phi(tolerance)`, times the probability that the engine starts and does not run out of memory.
One `z` moves all steps, and another, hardly correlated, what a prompt costs beyond: that of all
limits is the probability that both stay below the lowest tolerances of theirs
(`Candidate.probability`). `find_limits` is the only place where both come from replays, and
`evaluation.estimate_limits` where only intervals are known.

Traffic that is stated as a range errs by one more standard normal, over which probabilities are
averaged. A search looks at one `z` of both: the worse of slower steps alone and of the direction in
which the product of both grows fastest (Hasofer and Lind, 1974), and below 0 the better.

A replay at a given `z` says which share of each limit is used there. All replays of a deployment use
the same random numbers, so answers at other `z` follow by monotonicity, and a bisection finds the
tolerance of all limits together with a handful of replays; that of each is interpolated between them.
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.latency.performance import (
    LATENCY_METRICS,
    LATENCY_STATISTICS,
    STATISTIC_SIGMA_FACTORS,
)
from planner.latency.step_model import StepModel, build_step_model
from planner.planning.candidate import Candidate
from planner.planning.capacity import (
    compute_admitted_rps,
    estimate_capacity,
)
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.evaluation import (
    MAX_CAPACITY_ERROR_FACTOR,
    check_against_slos,
    compute_slot_share,
    estimate_limits,
    evaluate_candidate,
    get_candidate_workload,
    get_capacity_rps,
    get_load_limit_name,
    rate_start,
)
from planner.planning.memory_odds import estimate_memory_probability
from planner.planning.prediction import Prediction, evaluate, predict
from planner.planning.scenario import Scenario
from planner.planning.simulation_runs import estimate_statistics_at
from planner.planning.slo import (
    MAX_TOLERANCE_SIGMAS,
    LimitOdds,
    SloTarget,
    average_limits,
    combine_limits,
    compute_asked_tolerance,
    rate_limit,
)
from planner.workload.workload import Workload

TOLERANCE_STEP_SIGMAS, SHORT_STEP_SIGMAS = 0.05, 0.2
"""Bisection ends here, two points of probability at most; that of short replays, if what follows interpolates."""
LOAD_OFFSETS_SIGMAS, LOAD_WEIGHTS = (-math.sqrt(3), 0.0, math.sqrt(3)), (1 / 6, 2 / 3, 1 / 6)
"""Loads that a range is averaged over, and their weights: Gauss-Hermite's three points."""
MAX_USE = 1e3
"""More of a limit is not told apart, such as a wait that grows without bound."""


@lru_cache(maxsize=1)
def _get_thread_pool(_process: int) -> ThreadPoolExecutor:
    """Threads of this process that wait for replays; those of `simulation_runs` may work for them."""
    return ThreadPoolExecutor(os.cpu_count() or 1)


@dataclass
class EvaluationStore:
    """What replays have said about deployments under one scenario's traffic.

    Search, alternatives and confidence all read it, so that they never contradict each other.
    """

    scenario: Scenario
    quick: bool = True  # short replays
    # shares of the limits by z, of those that were computed there
    _uses: dict[Deployment, dict[float, dict[str, float]]] = field(default_factory=dict)
    _bounds: dict[Deployment, tuple[float, float]] = field(default_factory=dict)
    _probabilities: dict[Deployment, float] = field(default_factory=dict)
    _running: dict[Deployment, int] = field(default_factory=dict)
    _served: dict[Deployment, float] = field(default_factory=dict)  # requests/s of a replica

    def get_margin(self, deployment: Deployment, z: float) -> float:
        """Replay `deployment` at `z` and get the largest share of any limit that it takes.

        1 is at the limit; infinite where it does not start or refuses the traffic.
        """
        key, known = round(z, 3), self._uses.setdefault(deployment, {})
        if key not in known:
            self._keep(deployment, z, self._simulate_uses(deployment, z))
        return max(known[key].values(), default=0.0)

    def get_tightest_target(self, deployment: Deployment, z: float) -> SloTarget | None:
        """Get the target of which `deployment` uses most at `z`; None if the load or memory is tighter."""
        self.get_margin(deployment, z)
        uses = self._uses[deployment][round(z, 3)]
        name = max(uses, key=lambda name: uses[name], default="")
        return next((t for t in self.scenario.slo_targets if t.name == name), None)

    def _keep(self, deployment: Deployment, z: float, uses: dict[str, float]) -> None:
        """Keep the shares at `z`, and what they say of other step costs."""
        self._uses.setdefault(deployment, {})[round(z, 3)] = uses
        margin = max(uses.values(), default=0.0)
        holds, broken = self._bounds.get(deployment, (-math.inf, math.inf))
        limit = z - self._divide_by_sigma(deployment, margin)
        if margin <= 1 or get_load_limit_name(self.scenario) in uses:  # else its load is not known
            holds = max(holds, min(z, limit))
        self._bounds[deployment] = holds, min(broken, max(z, limit))

    def _divide_by_sigma(self, deployment: Deployment, margin: float) -> float:
        """Convert a margin to the z by which the steps may at most be slower, or must be faster.

        If every step takes s times as long, the engine does in s times the time what it would do
        at s times the load, and waits are no shorter at more load. So a margin grows at least as s
        does, and one replay bounds the tolerance from both sides.
        """
        if not 0 < margin < math.inf:
            return math.copysign(math.inf, margin - 1)
        sigma = self._get_least_sigma(deployment)
        return math.log(margin) / sigma if sigma > 0 else math.copysign(math.inf, margin - 1)

    def _get_least_sigma(self, deployment: Deployment) -> float:
        """The error of a step by which a share of a limit grows at least."""
        sigma = self._get_step_sigma(deployment)
        return sigma * math.cos(compute_load_angle(self.scenario.load_sigma, sigma))

    def _get_step_sigma(self, deployment: Deployment) -> float:
        """The smaller of the errors of a step at the load and of the capacity."""
        step = build_step_model(deployment, get_candidate_workload(self.scenario, deployment))
        return min(step.sigma_tpot, step.sigma_capacity)

    def get_margins(self, deployments: Sequence[Deployment], z: float) -> list[float]:
        """`get_margin` of each, on all cores: the compiled replay does not hold the interpreter's lock."""
        if len(deployments) < 2:
            return [self.get_margin(deployment, z) for deployment in deployments]
        return list(_get_thread_pool(os.getpid()).map(lambda d: self.get_margin(d, z), deployments))

    def is_met(self, deployment: Deployment, z: float) -> bool:
        """Tell whether every promise holds at `z`, from what is known where that is enough."""
        holds, broken = self._bounds.get(deployment, (-math.inf, math.inf))
        if z <= holds or z >= broken:
            return z <= holds
        return self.get_margin(deployment, z) <= 1

    def get_max_running(self, deployment: Deployment) -> float:
        """Get the most requests that ran at once in an engine; infinite where nothing was replayed."""
        return self._running.get(deployment, math.inf)

    def find_tolerance(
        self, deployment: Deployment, at_most: float = MAX_TOLERANCE_SIGMAS,
        step: float = TOLERANCE_STEP_SIGMAS,
    ) -> float:  # fmt: skip
        """Find the largest z, up to `at_most`, at which every promise holds, to a `step` below it."""
        if self.is_met(deployment, at_most):
            return at_most
        low, high = -MAX_TOLERANCE_SIGMAS, at_most
        if self.is_met(deployment, 0.0):
            low = 0.0
        elif not self.is_met(deployment, low):
            return low
        else:
            high = min(high, 0.0)
        holds, broken = self._bounds[deployment]
        low, high = max(low, holds), min(high, broken)
        while high - low > step:
            middle = (low + high) / 2
            low, high = (middle, high) if self.is_met(deployment, middle) else (low, middle)
        return low

    def find_limits(
        self, prediction: Prediction, at_most: float = MAX_TOLERANCE_SIGMAS
    ) -> tuple[LimitOdds, ...]:
        """Find how probably the load and each target are kept by what was predicted.

        Of traffic that is given as a range that is the mean over its loads, as at each of them alone.
        """
        if not self.scenario.load_sigma:
            return self._find_limits_of_load(prediction, at_most)
        deployment, found = prediction.deployment, list[tuple[LimitOdds, ...]]()
        for offset in LOAD_OFFSETS_SIGMAS:
            more = math.exp(self.scenario.load_sigma * offset)
            workload = self.scenario.workload.scale(more)
            store = EvaluationStore(
                replace(self.scenario, workload=workload, load_sigma=0.0), self.quick
            )
            load = get_candidate_workload(store.scenario, deployment)
            loaded = (
                prediction
                if not offset
                else (evaluate if self.quick else predict)(deployment, load)
            )
            found.append(store._find_limits_of_load(loaded, at_most))
        p_memory, confidence = estimate_memory_probability(deployment), self.scenario.confidence
        return tuple(
            average_limits(each, LOAD_WEIGHTS, p_memory, confidence)
            for each in zip(*found, strict=True)
        )

    def _find_limits_of_load(self, prediction: Prediction, at_most: float) -> tuple[LimitOdds, ...]:
        """Find those odds at the scenario's own load.

        The tolerance of what holds at `at_most` is not looked for beyond. Full replays take the
        prediction for what is at the predicted step cost.
        """
        deployment, confidence = prediction.deployment, self.scenario.confidence
        estimates = estimate_limits(self.scenario, prediction)
        p_memory = estimate_memory_probability(deployment)
        asked = round(min(compute_asked_tolerance(confidence, p_memory), MAX_TOLERANCE_SIGMAS), 3)
        if not self.quick:
            self._keep(deployment, 0.0, {limit.name: limit.use for limit in estimates})
            self.get_margin(deployment, asked)
        step = SHORT_STEP_SIGMAS if self.quick else TOLERANCE_STEP_SIGMAS
        self.find_tolerance(deployment, at_most, step)
        points, limits = sorted(self._uses[deployment].items()), []
        sigma = max(self._get_step_sigma(deployment), 1e-6)
        for limit in estimates:
            if known := {z: uses[limit.name] for z, uses in points if limit.name in uses}:
                z, shares = np.array(list(known)), np.clip(list(known.values()), 1e-9, MAX_USE)
                logs = np.maximum.accumulate(np.log(shares))  # slower steps never lower a share
                beyond = (min(-logs[0], 0.0) + max(-logs[-1], 0.0)) / sigma
                tolerance = float(np.interp(0.0, logs, z)) + beyond
                tolerance = min(max(tolerance, -MAX_TOLERANCE_SIGMAS), at_most)
                use, reach = (
                    known.get(at, math.exp(np.interp(at, z, logs))) for at in (0.0, asked)
                )
                limit = rate_limit(
                    limit.name, use, reach, tolerance, p_memory, confidence, limit.metric
                )
            limits.append(limit)
        return tuple(limits)

    def find_probability(self, deployment: Deployment, at_most: float) -> float:
        """Find how probably every limit is kept; beyond tolerances of `at_most` it is not told apart."""
        if deployment not in self._probabilities:
            load = get_candidate_workload(self.scenario, deployment)
            limits = self.find_limits(evaluate(deployment, load), at_most)
            p_memory = estimate_memory_probability(deployment)
            self._probabilities[deployment] = combine_limits(limits, p_memory)
        return self._probabilities[deployment]

    def _simulate_uses(self, deployment: Deployment, z: float) -> dict[str, float]:
        """Shares of the limits at `z`, by name, of steps and of traffic that may be more than expected."""
        slower = self._simulate_steps(self.scenario, deployment, z)
        if not self.scenario.load_sigma or not z or "memory" in slower:
            return slower
        angle = compute_load_angle(self.scenario.load_sigma, self._get_step_sigma(deployment))
        more = math.exp(self.scenario.load_sigma * z * math.sin(angle))
        loaded = replace(self.scenario, workload=self.scenario.workload.scale(more))
        both = self._simulate_steps(loaded, deployment, z * math.cos(angle))
        choose = max if z > 0 else min
        return {
            name: choose(uses[name] for uses in (slower, both) if name in uses)
            for name in slower | both
        }

    def _simulate_steps(
        self, scenario: Scenario, deployment: Deployment, z: float
    ) -> dict[str, float]:
        """Shares of the limits at `z` of the step costs: targets by a replay, load by the capacity.

        Short runs look at the load only where every latency is kept, and simulate the capacity where
        the closed form leaves it open. Full runs do not replay what is overloaded: its waits grow.
        """
        load, name = get_candidate_workload(scenario, deployment), get_load_limit_name(scenario)
        uses = dict[str, float]()
        try:
            if self.quick:
                if scenario.slo_targets:
                    uses = self._simulate_latencies(scenario, deployment, load, z)
                if max(uses.values(), default=0.0) > 1 and scenario.workload.rate is not None:
                    return uses
            uses[name] = share = self._compute_load_share(scenario, deployment, load, z)
            if not self.quick and scenario.slo_targets:
                if share * (1 - scenario.headroom) > 1:
                    waits = (t for t in scenario.slo_targets if t.waits)
                    return uses | {target.name: math.inf for target in waits}
                uses |= self._simulate_latencies(scenario, deployment, load, z)
        except PlannerError:
            return {"memory": math.inf}
        return uses

    def _simulate_latencies(
        self, scenario: Scenario, deployment: Deployment, load: Workload, z: float
    ) -> dict[str, float]:
        step = build_step_model(deployment, load)
        slower = math.exp(step.sigma_tpot * z)
        statistics, running = estimate_statistics_at(deployment, load, slower, quick=self.quick)
        self._running[deployment] = max(running, self._running.get(deployment, 0))
        uses = {
            t: statistics[t.metric, t.percentile] * compute_error_factor(step, t, z) / t.seconds
            for t in scenario.slo_targets
        }
        return {target.name: use for target, use in uses.items() if not math.isnan(use)}

    def get_least_load_share(self, prediction: Prediction, z: float) -> float:
        """Get the least that the load can be as a share of the usable capacity, at `z`, by a closed form."""
        scenario, deployment = self.scenario, prediction.deployment
        load, performance = get_candidate_workload(scenario, deployment), prediction.performance
        served = get_capacity_rps(scenario, performance) if performance else None
        if scenario.workload.rate is None or served is None:
            return self._estimate_load_share(scenario, deployment, load, z)
        share = self._divide_load(scenario, deployment, load, z, served.mid)
        return share / MAX_CAPACITY_ERROR_FACTOR

    def _estimate_load_share(
        self, scenario: Scenario, deployment: Deployment, load: Workload, z: float
    ) -> float:
        """The load as a share of the capacity that may be used, at `z`, in closed form.

        Of users it is exact: that of the slots, and 0 where all have one.
        """
        if scenario.workload.rate is None:
            share = compute_slot_share(scenario, deployment)  # slower steps change no slot
            return share if share > 1 else 0.0
        replicas = deployment.layout.replicas
        # reuse of a trace's prefixes depends on the replicas, else each serves as much as one
        key = deployment.with_replicas(1) if not load.uses_trace_prefixes else deployment
        if key not in self._served:
            performance = evaluate(deployment, load).performance
            served = get_capacity_rps(scenario, performance) if performance else None
            self._served[key] = served.mid / replicas if served else 0.0
        return self._divide_load(scenario, deployment, load, z, self._served[key] * replicas)

    def _compute_load_share(
        self, scenario: Scenario, deployment: Deployment, load: Workload, z: float
    ) -> float:
        """What the closed form estimates, by a simulation; short runs leave to it what is clear."""
        share = self._estimate_load_share(scenario, deployment, load, z)
        error = MAX_CAPACITY_ERROR_FACTOR
        if scenario.workload.rate is None or (self.quick and not 1 / error < share <= error):
            return share
        if scenario.offline:
            performance = predict(deployment, load, quick=self.quick).performance
            served = performance.request_tps if performance else None
        else:
            served = estimate_capacity(deployment, load)
        return self._divide_load(scenario, deployment, load, z, served.mid if served else 0.0)

    def _divide_load(
        self, scenario: Scenario, deployment: Deployment, load: Workload, z: float,
        served: float,
    ) -> float:  # fmt: skip
        admitted = (
            scenario.workload.rate if scenario.offline else compute_admitted_rps(deployment, load)
        )
        asked = (admitted or 0.0) * math.exp(build_step_model(deployment, load).sigma_capacity * z)
        return asked / max(served * (1 - scenario.headroom), 1e-12)


def compute_load_angle(load_sigma: float, sigmas: Any) -> Any:
    """Compute how far the worst direction turns from steps, of which `sigmas` are the errors, to the load.

    In radians: 0 where the load is exact.
    """
    return np.arctan2(load_sigma, sigmas)


def compute_error_factor(step: StepModel, target: SloTarget, z: float) -> float:
    """Compute by how much a statistic is further off at `z` than slower steps explain: errors of TTFT, and tails."""
    sigma = step.sigma_ttft if LATENCY_METRICS[target.metric].error == "prompt" else step.sigma_tpot
    factor = float(STATISTIC_SIGMA_FACTORS[LATENCY_STATISTICS.index(target.percentile)])
    return math.exp(max(sigma * factor - step.sigma_tpot, 0.0) * z)


def simulate_candidate(scenario: Scenario, candidate: Candidate) -> Candidate:
    """Replay `candidate` in full: `state_deployment`, or the intervals of prefill and decode pools."""
    deployment, prefill = candidate.deployment, candidate.prediction.prefill
    if prefill is None:
        return state_deployment(scenario, deployment, candidate.preference_key)
    load = get_candidate_workload(scenario, deployment)
    prediction = evaluate_disaggregated(prefill, deployment, load, scenario.prices)
    return check_against_slos(scenario, prediction, candidate.preference_key)


def state_deployment(
    scenario: Scenario, deployment: Deployment, preference: tuple[int, ...] = ()
) -> Candidate:
    """State what `deployment` does: its traffic replayed in full, its limits by long runs."""
    load = get_candidate_workload(scenario, deployment)
    try:
        prediction = predict(deployment, load, scenario.prices)
    except PlannerError as error:
        failed = evaluate_candidate(scenario, deployment, deployment.layout.replicas, preference)
        return replace(
            failed, violations=(str(error),), violated_constraints=("memory",),
            limit_utilization=math.inf, limits=(rate_start(scenario.confidence),),
        )  # fmt: skip
    store = EvaluationStore(scenario, quick=False)
    limits = store.find_limits(prediction) if prediction.can_start else None
    stated = check_against_slos(scenario, prediction, preference, limits)
    return stated if stated.at_risk else replace(stated, risks=())
