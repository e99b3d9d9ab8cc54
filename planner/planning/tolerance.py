"""How much slower than predicted a deployment may be before it breaks a promise.

Every step of a deployment may take `exp(sigma z)` times what the model predicts, where `sigma` is
the calibration's width and `z` a standard normal error. Slower steps never improve an SLO, so there
is one largest `z` at which every promise and the headroom still hold: the tolerance. The
probability that the deployment keeps everything is `Phi(tolerance)`, times the probability that it
starts and does not run out of memory.

A replay at a given `z` answers whether the promises hold there. All replays of a deployment use the
same random numbers, so answers at other `z` follow by monotonicity, and bisection finds the
tolerance with a handful of replays.
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.engines.deployment import Deployment
from planner.latency.performance import LATENCY_STATISTICS, STATISTIC_SIGMA_FACTORS
from planner.latency.speculative_decoding import build_step_model
from planner.planning.capacity import (
    compute_admitted_rps,
    estimate_capacity,
    get_rate_sigma,
)
from planner.planning.evaluation import (
    MAX_CAPACITY_ERROR_FACTOR,
    compute_slot_share,
    get_candidate_workload,
    get_capacity_rps,
)
from planner.planning.prediction import evaluate, predict
from planner.planning.scenario import Scenario
from planner.planning.simulation_runs import estimate_statistics_at
from planner.planning.slo import MAX_TOLERANCE_SIGMAS
from planner.workload.workload import Workload

TOLERANCE_STEP_SIGMAS = 0.05
"""Bisection ends here: two points of probability at most."""
MIN_DOMINANCE, EQUAL = 1.05, 0.999
"""A deployment is clearly better than another from 5% on, if it is worse in nothing; a thousandth is equal."""


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
    _margins: dict[tuple[Deployment, float], float] = field(default_factory=dict)
    _bounds: dict[Deployment, tuple[float, float]] = field(default_factory=dict)
    _running: dict[Deployment, int] = field(default_factory=dict)
    _figures: dict[Deployment, tuple[float, float, float]] = field(default_factory=dict)

    def get_margin(self, deployment: Deployment, z: float) -> float:
        """Replay `deployment` at `z` and get the largest share of any limit that it takes.

        1 is at the limit; infinite where it does not start or refuses the traffic.
        """
        key = deployment, round(z, 3)
        if key not in self._margins:
            margin, is_replayed = self._simulate_margin(deployment, z)
            self._margins[key] = margin
            holds, broken = self._bounds.get(deployment, (-math.inf, math.inf))
            limit = z - self._divide_by_sigma(deployment, margin)
            if is_replayed or margin <= 1:  # else its latencies may be further beyond than its load
                holds = max(holds, min(z, limit))
            self._bounds[deployment] = holds, min(broken, max(z, limit))
        return self._margins[key]

    def _divide_by_sigma(self, deployment: Deployment, margin: float) -> float:
        """Convert a margin to the z by which the steps may at most be slower, or must be faster.

        If every step takes s times as long, the engine does in s times the time what it would do
        at s times the load, and waits are no shorter at more load. So a margin grows at least as s
        does, and one replay bounds the tolerance from both sides.
        """
        if not 0 < margin < math.inf:
            return math.copysign(math.inf, margin - 1)
        sigma = min(build_step_model(deployment).sigma_tpot, get_rate_sigma(deployment))
        return math.log(margin) / sigma if sigma > 0 else math.copysign(math.inf, margin - 1)

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

    def get_refuted_tolerance(self, deployment: Deployment) -> float:
        """Get the least z at which replay has seen a promise break; infinite where it has not."""
        return self._bounds.get(deployment, (-math.inf, math.inf))[1]

    def find_tolerance(
        self, deployment: Deployment, at_most: float = MAX_TOLERANCE_SIGMAS
    ) -> float:
        """Find the largest z, up to `at_most`, at which every promise holds."""
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
        while high - low > TOLERANCE_STEP_SIGMAS:
            middle = (low + high) / 2
            low, high = (middle, high) if self.is_met(deployment, middle) else (low, middle)
        return low

    def dominates(self, one: Deployment, other: Deployment) -> bool:
        """Tell whether `one` is at least as good in p95 TTFT, p95 TPOT and capacity, and 5% better in one."""
        new, old = self.get_figures(one), self.get_figures(other)
        ratios = [b / a for a, b in zip(new, old, strict=True) if a > 0 and b > 0]
        return min(ratios) >= EQUAL and max(ratios) >= MIN_DOMINANCE

    def get_figures(self, deployment: Deployment) -> tuple[float, float, float]:
        """p95 TTFT and p95 TPOT in seconds, and the inverse of the capacity, at the predicted step cost."""
        if deployment not in self._figures:
            load = get_candidate_workload(self.scenario, deployment)
            statistics, _ = estimate_statistics_at(deployment, load, 1.0)
            served = estimate_capacity(deployment, load).mid
            times = (statistics[metric, "p95"] for metric in ("ttft", "tpot"))
            ttft, tpot = (0.0 if math.isnan(value) else value for value in times)
            self._figures[deployment] = ttft, tpot, 1 / max(served, 1e-12)
        return self._figures[deployment]

    def _simulate_margin(self, deployment: Deployment, z: float) -> tuple[float, bool]:
        """The largest share of a limit at `z`: promises by a short replay, load by the capacity.

        What is overloaded is not replayed; the flag tells.
        """
        scenario, load = self.scenario, get_candidate_workload(self.scenario, deployment)
        try:
            step = build_step_model(deployment)
            margin = self._estimate_load_margin(deployment, load, z)
            if margin > 1:
                return margin, False  # its queue grows, or leaves too little free
            if not scenario.slo_targets:
                return margin, True
            slower = math.exp(step.sigma_tpot * z)
            statistics, running = estimate_statistics_at(deployment, load, slower, quick=self.quick)
            self._running[deployment] = max(running, self._running.get(deployment, 0))
        except PlannerError:
            return math.inf, False
        for target in scenario.slo_targets:
            value = statistics[target.metric, target.percentile]
            if math.isnan(value):
                continue
            sigma = step.sigma_ttft if target.metric == "ttft" else step.sigma_tpot
            factor = float(STATISTIC_SIGMA_FACTORS[LATENCY_STATISTICS.index(target.percentile)])
            rest = max(sigma * factor - step.sigma_tpot, 0.0)  # beyond what slower steps explain
            margin = max(margin, value * math.exp(rest * z) / target.seconds)
        return margin, True

    def get_least_load_share(self, deployment: Deployment, z: float) -> float:
        """Get the least that the load can be as a share of the usable capacity, at `z`."""
        load = get_candidate_workload(self.scenario, deployment)
        share = self._estimate_load_margin(deployment, load, z)
        return share / MAX_CAPACITY_ERROR_FACTOR if share >= MAX_CAPACITY_ERROR_FACTOR else share

    def _estimate_load_margin(self, deployment: Deployment, load: Workload, z: float) -> float:
        """The load as a share of the capacity that may be used, at `z`.

        In closed form where its largest error does not matter.
        """
        scenario = self.scenario
        if scenario.workload.rate is None:
            share = compute_slot_share(scenario, deployment)  # slower steps change no slot
            return share if share > 1 else 0.0
        admitted = (
            scenario.workload.rate if scenario.offline else compute_admitted_rps(deployment, load)
        )
        asked = admitted * math.exp(get_rate_sigma(deployment) * z)

        def compute_share(served: Interval | None) -> float:
            return asked / max((served.mid if served else 0.0) * (1 - scenario.headroom), 1e-12)

        if self.quick:
            performance = evaluate(deployment, load).performance
            rough = compute_share(get_capacity_rps(scenario, performance) if performance else None)
            if not 1 / MAX_CAPACITY_ERROR_FACTOR < rough < MAX_CAPACITY_ERROR_FACTOR:
                return rough
        if scenario.offline:
            performance = predict(deployment, load, quick=self.quick).performance
            return compute_share(performance.request_tps if performance else None)
        return compute_share(estimate_capacity(deployment, load))
