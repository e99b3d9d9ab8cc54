"""What `test_scaling.py` looks at in small, more widely."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shipped import answer_of
from test_scaling import HOURS, SMALL, planned

from planner.latency.step_model import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.autoscaling import AutoscalingPlan, plan_autoscaling
from planner.planning.capacity import derive_effective_workload
from planner.planning.scenario import parse_scenario
from planner.planning.search import search_deployments
from planner.simulator.kernel_types import RouterConfig
from planner.simulator.results import SimulationResult
from planner.simulator.simulation import simulate_workload
from planner.ui.plan_text import format_answer
from planner.workload.daily_profile import build_daily_profile
from planner.workload.request_generator import sample_arrivals
from planner.workload.workload import Workload


def test_of_two_layouts_at_one_price_the_one_whose_day_costs_less_is_chosen() -> None:
    """Two replicas of one L4 become one at night; two L4 that share each step (TP2) cannot, and are better by day."""
    level = {"ttft": {"p95": 800}, "tpot": {"p95": 50}}
    office = {**SMALL, "service_level": level, "workload": {**SMALL["workload"], "rate": 5}}
    moment = search_deployments(replace(parse_scenario(office, "office"), daily_profile=None))
    plan = search_deployments(parse_scenario(office, "office"))
    assert moment.chosen is not None and moment.chosen.description.startswith("2 x L4, TP2,")
    assert plan.chosen is not None and plan.chosen.description.startswith(
        "2 x L4, TP1 x 2 replicas,"
    )
    assert plan.chosen.usd_per_hour == moment.chosen.usd_per_hour
    assert (
        plan.autoscaling is not None
        and plan.autoscaling.violated_hours == ()
        and plan.autoscaling.saved_fraction > 0.25
    )
    assert plan.chosen.cost_key[1] == pytest.approx(plan.billing.usd["scaled by the hour"] / 24)
    whole = plan_autoscaling(plan.scenario, moment.chosen)
    assert whole is not None and whole.saved_fraction == 0
    share = f"{plan.chosen.billed_fraction:.0%} of its always-on price; the runner-up costs 100%"
    assert f"its cost with hourly scaling: {share}" in format_answer(answer_of(plan), detailed=True)


REQUESTS_PER_DAY = 100_000
"""Two minutes of each hour do for a test."""


def simulate_day(found: AutoscalingPlan, load: Workload, seed: int) -> SimulationResult:
    """A day behind the router with the replicas of each hour, as the plan never looks at one."""
    hour_s = REQUESTS_PER_DAY / sum(found.rates)
    sums = np.concatenate(([0.0], np.cumsum(found.rates))) * hour_s
    n, counts = round(sums[-1]), np.maximum(found.replicas, 1)
    even = sample_arrivals(n, n / sums[-1], load.burstiness, np.random.default_rng(seed))
    fleet = found.deployment.with_replicas(int(counts.max()))
    router = RouterConfig(
        fleet.num_engine_instances, scale_at=np.arange(24) * hour_s,
        scale_to=counts * fleet.layout.dp,
    )  # fmt: skip
    return simulate_workload(
        fleet, get_memory_plan(fleet).pool, build_step_model(fleet, load), load, seed, requests=n,
        even=True, router=router, arrival=np.interp(even, sums, np.arange(25) * hour_s),
    )  # fmt: skip


@pytest.mark.parametrize("hours", ["campus-rag", list(HOURS), [1.0] * 23 + [8.0]], ids="abc")
def test_simulated_days_hold_their_level_in_every_hour(hours: str | list[float]) -> None:
    """At the expected step cost, which is faster than what a replica's largest load allows for."""
    plan, _ = planned()
    asked = replace(plan.scenario, daily_profile=build_daily_profile(hours, Path()))
    found = plan_autoscaling(asked, plan.chosen)
    assert found is not None and found.violated_hours == ()
    assert 0 <= found.saved_fraction < 1 and found.gpu_hours <= found.fixed_gpu_hours
    load = derive_effective_workload(found.deployment, asked.workload)
    days = [simulate_day(found, load, seed) for seed in range(3)]
    hour_s = REQUESTS_PER_DAY / sum(found.rates)
    hour = np.minimum(np.concatenate([day.sent for day in days]) // hour_s, 23)
    for metric, limit in (("ttft", 1.5), ("tpot", 0.09)):
        values = np.concatenate([getattr(day, metric) for day in days])
        assert max(np.quantile(values[hour == k], 0.95) for k in range(24)) <= limit
