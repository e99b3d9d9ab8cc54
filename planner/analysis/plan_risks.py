"""Describe a plan's tolerance and risks: more traffic, a lost replica, uncertain figures."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.analysis.load_curves import find_max_feasible_rps
from planner.analysis.load_ramp import OVERLOAD_REASON, run_load_ramp
from planner.analysis.phrases import ANALYSIS_PHRASES, CALIBRATION_BASIS_LABELS
from planner.core.intervals import Interval
from planner.core.number_format import (
    format_distinct,
    format_ends,
    format_number,
    format_probability,
    format_range,
)
from planner.core.progress import show_step
from planner.planning.candidate import Candidate
from planner.planning.disaggregated_search import evaluate_pools
from planner.planning.evaluation import (
    compute_free_capacity,
    compute_offered_rps,
    estimate_run_hours,
    get_capacity_rps,
)
from planner.planning.prediction import Prediction
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.slo import compute_tolerance, get_pessimistic_value
from planner.planning.tolerance import find_max_rate, simulate_candidate

MIN_GROWTH = 0.005
"""Growth below half a percent is none."""
MAX_GROWTH_IN_PERCENT = 2.0
"""From threefold on, growth is told as a factor."""
CAPACITY_MEANING = "Capacity is what the GPUs process at most, however long requests wait"


def describe_headroom(plan: Plan) -> str:
    """Describe the capacity of a plan, its free part, and `describe_growth_limit`."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    capacity = get_capacity_rps(scenario, performance) if performance else None
    if best is None or performance is None or capacity is None:
        return ""
    rate = compute_offered_rps(scenario, best.prediction)
    free = compute_free_capacity(scenario, best.prediction) or 0.0
    text = (
        f"Its capacity is {format_range(capacity)} requests/s; {format_number(rate)} are"
        f" planned{describe_rejected(scenario, best.prediction)}."
    )
    if hours := estimate_run_hours(scenario, best):
        total = scenario.workload.num_prompts or 0
        text = (
            f"It finishes {total:,} requests in {hours:.3g} hours, of"
            f" {format_number(total / rate / 3600)} allowed."
        )
    elif scenario.workload.rate is None:
        users = scenario.workload.concurrency
        text = (
            f"{users:,} concurrent requests come to {format_number(rate)} requests/s; its capacity is"
            f" {format_range(capacity)}."
        )
    elif free < 0:
        return f"{text} It is overloaded: queues grow until requests are turned away."
    if scenario.workload.rate is None:
        return text
    free_text = f"{max(free, 0.0):.0%} of it is free, headroom required {scenario.headroom:.0%}."
    return f"{text} {free_text} {describe_growth_limit(plan)}"


def describe_rejected(scenario: Scenario, prediction: Prediction) -> str:
    """Describe that a part of the traffic is rejected, after the part that is not; empty if none is."""
    rate, admitted = scenario.workload.rate, compute_offered_rps(scenario, prediction)
    if not rate or format_number(admitted) == format_number(rate):
        return ""
    return f", the rest of {format_number(rate)} is rejected as too long"


@dataclass(frozen=True)
class GrowthLimit:
    """How far the traffic of a plan may grow, in requests/s."""

    capacity: Interval
    offered_rps: float
    planned_rps: float  # the capacity less the headroom
    limit: tuple[Interval, str] | None  # the rate up to which all SLOs hold, and what fails beyond
    method: str  # " (estimate)" where the limit is that of an estimate
    confident_rps: (
        float  # up to which all SLOs and the headroom hold with `confidence`; 0 if at risk
    )
    confidence: float  # the probability that the scenario asks for
    slow_reason: str = ""  # what fails first with the slowest steps

    @property
    def growth(self) -> float:
        """The growth up to which the plan keeps the asked probability, 0.4 for 40%."""
        growth = max(self.confident_rps / self.offered_rps - 1, 0.0)
        return growth if growth >= MIN_GROWTH else 0.0

    def format_value(self) -> tuple[str, str]:
        """Format `growth` as a value and a unit: "+6%", from threefold on "3.5 times"."""
        if not self.growth:
            return "None", ""
        if self.growth < MAX_GROWTH_IN_PERCENT:
            return f"+{self.growth:.0%}", ""
        return format_number(1 + self.growth, 2), "times"

    def describe_end(self, ask_every_s: float | None = None) -> str:
        """Describe the load that `growth` leads to, in requests/s or in users, and its probability."""
        odds = format_probability(self.confidence)
        if not self.growth:
            return (
                f"more is under {odds} likely"
                if self.confident_rps
                else f"under {odds} likely already"
            )
        unit = "users" if ask_every_s else "requests/s"
        return f"to {self._format_end(ask_every_s or 1.0)} {unit}, {odds} likely"

    def _format_end(self, factor: float = 1.0) -> str:
        return format_distinct(self.confident_rps * factor, self.offered_rps * factor)

    def explain(self) -> str:
        """Explain up to which load every target is met, and how that differs from the capacity."""
        odds = format_probability(self.confidence)
        if self.growth:
            met = (
                f"Every target is met with a probability of {odds} up to {self._format_end()}"
                " requests/s"
            )
        elif self.confident_rps:
            met = f"Beyond the planned load the probability falls below the {odds} asked for"
        else:
            met = f"At the planned load the probability is already below the {odds} asked for"
        return f"{met}. {CAPACITY_MEANING}."


@show_step("load ramp")
def find_growth_limit(plan: Plan) -> GrowthLimit | None:
    """Find how far traffic may grow; None in a closed loop or without a prediction.

    None also if the load is the largest that was found: it is the limit at the asked probability.
    """
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    if (
        best is None
        or performance is None
        or scenario.workload.rate is None
        or scenario.found_figure == "rate"
        or not (capacity := get_capacity_rps(scenario, performance))
    ):
        return None
    limit, method, slow_reason = None, "", ""
    offered = compute_offered_rps(scenario, best.prediction)
    planned = (1 - scenario.headroom) * capacity.mid
    is_replayed = best.is_simulated and not best.is_disaggregated and not scenario.offline
    if is_replayed:
        ramp = run_load_ramp(best.deployment, scenario.workload, scenario.slo_targets)
        limit = None if ramp.reason == OVERLOAD_REASON else (ramp.ceiling, ramp.reason)
        slow_reason = "" if ramp.slow_reason == OVERLOAD_REASON else ramp.slow_reason
    elif not scenario.offline:
        limit, method = find_max_feasible_rps(scenario, best), " (estimate)"
        slow_reason = limit[1] if limit else ""
    if is_replayed:
        admitted = offered / scenario.workload.rate
        most = find_max_rate(scenario, best, planned / admitted) if best.is_confident else 0.0
        confident = admitted * most
    else:
        z = compute_tolerance(scenario.confidence)
        ends = [capacity * (1 - scenario.headroom), *([limit[0]] if limit else [])]
        confident = min(_get_rate_at(rate, z) for rate in ends) * best.is_confident
    return GrowthLimit(
        capacity, offered, planned, limit, method, confident, scenario.confidence, slow_reason
    )


def _get_rate_at(rate: Interval, z: float) -> float:
    """Get the rate that is reached with steps slower by `z` standard deviations."""
    slow = rate.map_monotone(lambda each: 1 / max(each, 1e-9))
    return 1 / max(get_pessimistic_value(slow, z), 1e-9)


def describe_growth_limit(plan: Plan) -> str:
    """Describe how far traffic may grow with the asked probability, and at the expected speed.

    For a simulated plan it follows from a load ramp, which disaggregated pools do not have; else it
    is analytical.
    """
    found = find_growth_limit(plan)
    if found is None:
        return ""
    expected = _describe_expected_growth(plan.scenario, found)
    return expected if plan.scenario.offline else f"{found.explain()} {expected}"


def _describe_expected_growth(scenario: Scenario, found: GrowthLimit) -> str:
    """Describe how far traffic may grow at the expected speed: one time in two it is less."""
    capacity, offered, limit, method = found.capacity, found.offered_rps, found.limit, found.method
    subject, end = ("work", "it is late") if scenario.offline else ("traffic", "it is overloaded")
    planned, slow_end = found.planned_rps, found.slow_reason or end
    if limit and limit[0].mid < planned:
        rate, reason = limit
        if not rate.mid:
            return f"No rate meets every target: {reason} even in an idle engine{method}."
        growth = rate.mid / offered - 1
        sentence = (
            f"At the expected speed the {subject} may grow by {_format_growth(growth)}"
            if growth >= MIN_GROWTH
            else f"At the expected speed there is no room for more {subject}"
        )
        shown = format_range(rate)
        return f"{sentence}: beyond {shown} requests/s {reason}{method}, though capacity is left."
    if planned < offered:
        return f"At the expected speed there is no room for more {subject}."
    margin = (capacity if limit is None else limit[0]) / offered + -1.0
    end = f"{limit[1]}{method}" if limit else end
    low_text = ""
    if margin.lo > 0:
        why = "" if f"{slow_end}{method}" == end or slow_end == end else f" until {slow_end}"
        low_text = f" (with the slowest steps by {_format_growth(margin.lo)}{why})"
    headroom_text = (
        f"by {_format_growth(planned / offered - 1)} within the headroom, and "
        if scenario.headroom
        else ""
    )
    growth_text = _format_growth(margin.mid)
    return f"At the expected speed the {subject} may grow {headroom_text}by {growth_text}{low_text} until {end}."


def _format_growth(growth: float) -> str:
    if growth < MAX_GROWTH_IN_PERCENT:
        return f"{growth:.0%}"
    return f"a factor of {format_number(growth + 1, 2)}"


def simulate_replica_loss(plan: Plan) -> tuple[Candidate | None, str]:
    """Simulate the plan's traffic without one replica, and describe the result in a sentence."""
    best = plan.best
    if best is None:
        return None, ""
    replicas, spares = best.deployment.layout.replicas, best.deployment.spare_replicas
    if spares:
        spare_text = (
            f"the traffic needs {replicas}, and {spares} spare{'s are' if spares > 1 else ' is'}"
            " provisioned"
        )
        return (
            None,
            f"With up to {spares} replica{'s' * (spares > 1)} down, every target is met: {spare_text}.",
        )
    if best.is_disaggregated:
        return _simulate_worker_loss(plan.scenario, best)
    if replicas == 1:
        second = (
            f"; a second costs ${best.usd_per_hour:,.2f} an hour more" if best.usd_per_hour else ""
        )
        return (
            None,
            f"There is only one replica: while it restarts, nothing is served{second}.",
        )
    remaining = replace(best, deployment=best.deployment.with_replicas(replicas - 1))
    result = simulate_candidate(replace(plan.scenario, headroom=0.0), remaining)
    text = f"With one of {replicas} replicas down, the same traffic on the other {replicas - 1}"
    if result.is_feasible:
        risk = f", though {'; '.join(result.risks)}" if result.risks else ""
        return result, f"{text} still meets every target{risk} (simulated)."
    return (
        result,
        f"{text} misses a target (simulated): {'; '.join(result.violations)}.",
    )


def _simulate_worker_loss(scenario: Scenario, best: Candidate) -> tuple[Candidate | None, str]:
    """Evaluate the loss of the worker that hurts more, prefill or decode."""
    pools, worst = best.prediction.pools, None
    if single := [
        role
        for role, pool in zip(("prefill", "decode"), pools, strict=True)
        if pool.layout.replicas == 1
    ]:
        roles = " and one ".join(single)
        return None, f"There is only one {roles} worker: while it restarts, nothing is served."
    for k, role in enumerate(("prefill", "decode")):
        remaining = [
            pool.with_replicas(pool.layout.replicas - (j == k)) for j, pool in enumerate(pools)
        ]
        candidate = evaluate_pools(
            replace(scenario, headroom=0.0),
            remaining[0],
            remaining[1],
            scenario.workload,
            best.preference_key,
        )
        if candidate and (
            worst is None or candidate.limit_utilization > worst[0].limit_utilization
        ):
            worst = candidate, role
    if worst is None:
        return None, ""
    outcome = "still meets every target" if worst[0].is_feasible else "misses a target"
    violations = "" if worst[0].is_feasible else f": {'; '.join(worst[0].violations)}"
    return (
        worst[0],
        (
            f"With one {worst[1]} worker down, the same traffic on the others {outcome}"
            f" (simulated){violations}."
        ),
    )


def list_largest_risks(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the three largest risks of the plan: the risk, how large, what to measure first."""
    risks = sorted(_generate_risks(plan), key=lambda risk: -risk[0])[:3]
    phrases = ANALYSIS_PHRASES["risks"]
    return [(phrases[name]["risk"], size, phrases[name]["measure"]) for _, name, size in risks]


def _generate_risks(plan: Plan) -> Iterator[tuple[float, str, str]]:
    """Yield (weight, risk in `phrases.yaml`, size); an expected violation weighs 3."""
    scenario, best, performance = plan.scenario, plan.best, plan.performance
    if best is None or performance is None:
        return
    workload, deployment = scenario.workload, best.deployment
    if plan.reasons:
        yield 3, "edge" if plan.chosen else "miss", "; ".join(plan.reasons)
    intervals = [
        performance.get_for_display(target.metric, target.percentile)
        for target in scenario.slo_targets
    ]
    width = max(
        (value.hi / value.mid - 1 for value in intervals if 0 < value.mid < math.inf), default=0.0
    )
    latency = (
        "waits may grow without end"
        if math.isinf(width)
        else f"a latency may be {1 + width:.2g} times the expected one"
    )
    size = latency if width else f"{performance.request_tps:.3g} requests/s"
    yield (
        min(ANALYSIS_PHRASES["basis"][performance.basis]["doubt"] + width / 2, 2.9),
        "step costs",
        f"{CALIBRATION_BASIS_LABELS[performance.basis]}; {size}",
    )
    if speculation := deployment.speculation:
        yield (
            1.8,
            "acceptance",
            f"{speculation.acceptance_rate:.0%} of the tokens after an accepted one",
        )
    if hits := best.prediction.effective_workload.cache_hit_fraction:
        yield (
            2 * hits,
            "reuse",
            f"{hits:.0%} of all prompt tokens are found in the cache",
        )
    lengths = {"prompt": workload.prompt, "answer": workload.output}
    if assumed := [
        f"assumed: 5% of {name}s have over {each.p95:,.0f} tokens"
        for name, each in lengths.items()
        if each.spread_source
    ]:
        yield 1.5, "lengths", assumed[0]
    elif workload.trace is None:
        spread = workload.compute_total_tokens_quantile(0.99) / max(
            workload.compute_total_tokens_quantile(0.5), 1.0
        )
        text = f"prompt + output at p99 is {format_number(spread, 2)} times the median"
        yield 0.6, "texts" if scenario.offline else "traffic", text
    usd = best.prediction.usd_per_hour_interval
    if usd and usd.hi > 1.05 * usd.mid:
        yield (
            math.log(usd.hi / usd.mid),
            "price",
            f"providers ask ${format_ends(usd, ' to $')} an hour",
        )
    if deployment.gpu.is_geforce:
        yield 1.0, "license", "NVIDIA does not license the GeForce driver for data centers"
    if any(pool.num_replicas == 1 for pool in best.prediction.pools):
        yield 0.9, "replica", "a restart or a lost GPU stops the service"
