"""Describe a plan's tolerance and risks: more traffic, a lost replica, uncertain figures."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

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
from planner.planning.max_load import find_max_load, judge_at_load
from planner.planning.prediction import Prediction
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.tolerance import simulate_candidate

MIN_GROWTH = 0.005
"""Growth below half a percent is none."""
MAX_GROWTH_IN_PERCENT = 2.0
"""From threefold on, growth is told as a factor."""
CAPACITY_MEANING = "Capacity is what the GPUs process at most, however long requests wait"
BEYOND_LOAD = 1.05
"""What fails first beyond a load is what is weakest at so many times it."""


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
    # up to which all SLOs are met at the expected step cost, from `confident_rps` on, and what fails
    # beyond; None if that is the capacity
    limit: tuple[Interval, str] | None
    method: str  # " (estimate)" where the limit is that of an estimate
    confident_rps: (
        float  # up to which all SLOs and the headroom hold with `confidence`; 0 if at risk
    )
    confidence: float  # the probability that the scenario asks for
    slow_reason: str = ""  # what fails first beyond `confident_rps`; empty for the capacity

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


@show_step("growth")
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
    offered = compute_offered_rps(scenario, best.prediction)
    admitted = offered / scenario.workload.rate
    confident = admitted * find_max_load(scenario, best) if best.is_confident else 0.0
    limit, loose = None, replace(scenario, headroom=0.0)
    if not scenario.offline:
        most = find_max_load(loose, best, 0.0)
        expected = admitted * most
        if reason := _explain_end(loose, best, most or scenario.workload.rate):
            limit = Interval(min(confident, expected), expected, expected), reason
    return GrowthLimit(
        capacity, offered, (1 - scenario.headroom) * capacity.mid, limit,
        "" if best.is_simulated else " (estimate)", confident, scenario.confidence,
        _explain_end(scenario, best, confident / admitted) if confident else "",
    )  # fmt: skip


def _explain_end(scenario: Scenario, candidate: Candidate, rate: float) -> str:
    """Explain which target is the first to be missed beyond `rate`; empty if it is the capacity."""
    judged = judge_at_load(scenario, candidate, BEYOND_LOAD * rate)
    weakest = min(judged.limits, key=lambda limit: limit.tolerance_sigmas, default=None)
    return next(
        (
            f"the {target.name} exceeds {target.seconds * 1e3:,.0f} ms"
            for target in scenario.slo_targets
            if weakest and target.name == weakest.name
        ),
        "",
    )


def describe_growth_limit(plan: Plan) -> str:
    """Describe how far traffic may grow with the asked probability, and at the expected speed.

    It is simulated where the plan is, and else analytical.
    """
    found = find_growth_limit(plan)
    if found is None:
        return ""
    expected = _describe_expected_growth(plan.scenario, found)
    return expected if plan.scenario.offline else f"{found.explain()} {expected}"


def _describe_expected_growth(scenario: Scenario, found: GrowthLimit) -> str:
    """Describe how far traffic may grow at the expected speed: one time in two it is less."""
    offered, planned, limit, method = (
        found.offered_rps, found.planned_rps, found.limit, found.method,
    )  # fmt: skip
    subject, end = ("work", "it is late") if scenario.offline else ("traffic", "it is overloaded")
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
        shown = format_number(rate.mid)
        return f"{sentence}: beyond {shown} requests/s {reason}{method}, though capacity is left."
    if planned < offered:
        return f"At the expected speed there is no room for more {subject}."
    if limit:
        end = f"{limit[1]}{method}"
    growth = (limit[0] if limit else found.capacity).mid / offered - 1
    headroom_text = (
        f"by {_format_growth(planned / offered - 1)} within the headroom, and "
        if scenario.headroom
        else ""
    )
    return f"At the expected speed the {subject} may grow {headroom_text}by {_format_growth(growth)} until {end}."


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
