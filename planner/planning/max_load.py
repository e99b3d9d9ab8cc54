"""The largest load that a deployment serves within the targets, judged exactly as a plan is judged.

Growth, load ramps, replicas by the hour, fleets, charts and `rate: max` all ask `find_max_load`. Two
figures differ from it on purpose: `capacity.estimate_capacity` is what is served at most however
long requests wait, and the growth of a fleet ends where whole replicas no longer fit into its stock.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from planner.core.progress import is_out_of_time
from planner.engines.deployment import Deployment
from planner.planning.candidate import Candidate
from planner.planning.evaluation import evaluate_candidate
from planner.planning.memory_odds import estimate_memory_probability
from planner.planning.scenario import Scenario
from planner.planning.scenario_schema import OpenFigure
from planner.planning.slo import compute_asked_tolerance, compute_tolerance
from planner.planning.tolerance import EvaluationStore, simulate_candidate, state_deployment
from planner.workload.sessions import scale_sessions

LOAD_PRECISION = 1.01
"""A largest load is found to 1%, and is never above what meets the targets."""
MIN_FIGURE, MAX_FIGURE = 1e-3, 1e6
"""Requests/s, users, or the inverse of a limit in seconds, between which they are searched."""
MAX_CORRECTIONS, CORRECTION_SIGMAS = 4, (0.02, 0.5)
"""So often, by at least and at most so much, are slower steps asked for until all limits are kept as asked."""
FIRST_STEP = 1.1
"""Factor of the first step away from where a search starts; every further one is its square."""


def is_least_load(scenario: Scenario) -> bool:
    """Whether the largest rate was the question, and not even one request at a time keeps the targets."""
    return scenario.found_figure == "rate" and (scenario.workload.rate or 0.0) <= MIN_FIGURE


def find_max_load(
    scenario: Scenario, candidate: Candidate | Deployment, probability: float | None = None,
    kind: OpenFigure | None = None,
) -> float:  # fmt: skip
    """Find the largest load at which `candidate` meets every target with `probability`.

    It is in requests/s, or in users of a closed loop. Of the `kind` "limit" it is the inverse of the
    shortest first target in seconds. `probability` defaults to the scenario's; with 0 the targets
    have to be met at the expected step cost alone. Returns 0 where no load is small enough. A
    candidate is judged by what it was judged by: simulations, or the closed form.
    """
    asked = scenario.confidence if probability is None else probability
    kind = kind or get_load_kind(scenario)
    deployment = candidate if isinstance(candidate, Deployment) else candidate.deployment

    def round_load(load: float) -> float:
        """Give every engine as many users, where there are enough: else one of them has more."""
        engines = deployment.num_engine_instances
        return load - load % engines if kind == "concurrency" and load >= engines else load

    def judge(load: float) -> Candidate:
        return judge_at_load(scenario, candidate, round_load(load), kind)

    def is_met(load: float) -> bool:
        judged = judge(load)
        return judged.is_feasible and judged.probability >= asked - 1e-9

    start = get_figure(scenario, kind)
    if isinstance(candidate, Candidate) and (
        candidate.is_disaggregated or not candidate.is_simulated
    ):
        return round_load(find_largest(is_met, start))
    z = compute_asked_tolerance(asked, estimate_memory_probability(deployment)) if asked else 0.0
    if math.isinf(z):
        return 0.0

    def is_likely(load: float) -> bool:
        """Tell from one simulation at the step cost that the probability asks for."""
        loaded = set_figure(scenario, kind, round_load(load))
        return EvaluationStore(loaded, quick=False).is_met(deployment, round(max(z, 0.0), 3))

    most = start
    for _ in range(MAX_CORRECTIONS):
        most = find_largest(is_likely, most)
        judged = judge(most) if most else None
        if judged is None or (judged.is_feasible and judged.probability >= asked - 1e-9):
            return round_load(most)
        # several limits are kept less probably than the one that is used most
        missing = compute_tolerance(asked) - compute_tolerance(judged.probability)
        z += min(max(missing, CORRECTION_SIGMAS[0]), CORRECTION_SIGMAS[1])
    return round_load(find_largest(is_met, most / LOAD_PRECISION))


def judge_at_load(
    scenario: Scenario, candidate: Candidate | Deployment, load: float,
    kind: OpenFigure | None = None,
) -> Candidate:  # fmt: skip
    """Judge `candidate` under another load or limit, by what it was judged by before."""
    loaded = set_figure(scenario, kind or get_load_kind(scenario), load)
    if isinstance(candidate, Deployment):
        return state_deployment(loaded, candidate)
    if candidate.is_simulated:
        return simulate_candidate(loaded, candidate)
    deployment = candidate.deployment
    return evaluate_candidate(loaded, deployment, deployment.layout.replicas)


def find_largest(
    is_met: Callable[[float], bool], start: float, precision: float = LOAD_PRECISION
) -> float:
    """Find the largest value at which `is_met`, to `precision`; 0 if at none.

    The steps away from `start` grow until one value is and one is not, and are halved from then
    on. Out of time, it is the largest that was seen to.
    """
    low, high, value, step = 0.0, math.inf, start, FIRST_STEP
    while high > max(low * precision, MIN_FIGURE) and low < MAX_FIGURE and not is_out_of_time():
        if is_met(value):
            low = value
        else:
            high = value
        if low and high < math.inf:
            value = math.sqrt(low * high)
        else:
            value, step = value * step if low else value / step, step * step
            value = min(max(value, MIN_FIGURE), MAX_FIGURE)
    return low


def get_load_kind(scenario: Scenario) -> OpenFigure:
    """Get whether the load is a rate or a number of users."""
    return "rate" if scenario.workload.rate is not None else "concurrency"


def get_figure(scenario: Scenario, kind: OpenFigure) -> float:
    """Get a figure of the scenario, as `set_figure` takes it."""
    workload = scenario.workload
    if kind == "limit":
        return 1 / scenario.slo_targets[0].seconds
    return (workload.rate if kind == "rate" else workload.concurrency) or 1.0


def set_figure(scenario: Scenario, kind: OpenFigure, value: float) -> Scenario:
    """Return `scenario` with requests/s, whole users, or the inverse of its first limit [1/s]."""
    targets, workload = scenario.slo_targets, scenario.workload
    if kind == "limit":
        targets = (replace(targets[0], seconds=float(f"{1 / value:.12g}")), *targets[1:])
    elif kind == "rate":
        workload = scale_sessions(workload, value)
    else:
        workload = replace(workload, concurrency=max(int(value), 1))
    return replace(scenario, workload=workload, slo_targets=targets, open_figure=None)


def round_figure(kind: OpenFigure, value: float) -> float:
    """Round a figure to what is easier: three digits, or whole users."""
    if kind == "concurrency":
        return max(math.floor(value + 1e-9), 1)
    return -1 / _floor_digits(-1 / value) if kind == "limit" else _floor_digits(value)


def _floor_digits(value: float) -> float:
    """Round down to three significant digits."""
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return float(f"{math.floor(value / unit + 1e-9) * unit:.3g}")
