"""A day of traffic: replicas by hour that hold the level when the day is replayed, and what they save."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml

from planner.core.errors import PlannerError
from planner.deploy.artifacts import render_artifacts
from planner.deploy.manifests import build_cron_schedule
from planner.hardware.gpus import get_gpu
from planner.hardware.prices import look_up_gpu_price
from planner.planning.autoscaling import (
    AutoscalingPlan,
    fill_short_lulls,
    plan_autoscaling,
)
from planner.planning.billing import compare_billing, measure_budget, price_serverless
from planner.planning.plan import Plan
from planner.planning.scenario import Scenario, load_scenario, parse_scenario
from planner.planning.scenario_schema import ApiEntry, BillingAlternativesEntry, ServerlessEntry
from planner.planning.search import search_analytically, search_deployments
from planner.workload.daily_profile import build_daily_profile, load_daily_profiles

HOURS = (2, 1, 1, 1, 1, 2, 6, 16, 30, 38, 40, 39, 36, 38, 40, 38, 34, 30, 24, 20, 16, 12, 8, 4)
SMALL = {
    "confidence": 0.5,  # the day is what is looked at, not the odds
    "question": "How many L4 does an office need, hour by hour?",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "quantization": "fp8",
    "gpus": {"gpu": "L4", "at_most": 12},
    "engine_version": "0.20.2",
    "workload": {
        "prompt_tokens": {"exactly": 400},
        "output_tokens": {"exactly": 60},
        "rate": 40,
        "day": list(HOURS),
    },
    "service_level": {"ttft": {"p95": 1500}, "tpot": {"p95": 90}},
}


@cache
def planned() -> tuple[Plan, AutoscalingPlan]:
    plan = search_deployments(parse_scenario(SMALL, "office"))
    assert plan.chosen is not None
    found = plan_autoscaling(plan.scenario, plan.chosen)
    assert found is not None
    return plan, found


def asked(**workload: object) -> Scenario:
    changed = {
        name: value
        for name, value in {**SMALL["workload"], **workload}.items()
        if value is not None
    }
    return parse_scenario({**SMALL, "workload": changed}, "office")


def test_the_level_holds_in_every_hour_with_fewer_gpu_hours() -> None:
    plan, found = planned()
    fixed = plan.chosen.deployment.layout.replicas
    assert fixed >= 3 and found.violated_hours == () and len(found.replicas) == 24
    assert max(found.replicas) <= fixed and min(found.replicas) < fixed / 2
    assert [found.replicas[k] for k in np.argsort(HOURS)] == sorted(found.replicas), (
        "more traffic, not fewer replicas"
    )
    hours = sum(found.replicas) * plan.chosen.deployment.layout.gpus_per_replica
    changing = found.num_starts * (found.lead_s + found.stabilization_s + found.drain_s) / 3600
    assert found.gpu_hours == pytest.approx(hours + changing)
    assert (
        found.saved_fraction == pytest.approx(1 - found.gpu_hours / found.fixed_gpu_hours)
        and found.saved_fraction > 0.2
    )


def test_the_threshold_is_what_is_in_a_replica_that_takes_its_most() -> None:
    """Little's law, against the replay of one replica at that rate."""
    plan, found = planned()
    rate = found.max_load_replica.workload.rate
    assert rate >= plan.scenario.workload.rate / plan.chosen.deployment.layout.replicas
    assert found.scale_up_in_flight == pytest.approx(
        rate * found.max_load_replica.performance.get("e2e", "mean").mid
    )
    assert (
        found.max_load_replica.performance.get("ttft", "p95").mid <= 1.5
        and found.max_load_replica.performance.get("tpot", "p95").mid <= 0.09
    )
    assert rate <= 0.8 * found.max_load_replica.performance.capacity.mid * 1.001, (
        "the headroom stays free in every hour"
    )


@pytest.mark.parametrize(
    "counts, hours, kept",
    [
        ([3, 1, 3, 1, 1, 3], 1, [3, 3, 3, 1, 1, 3]),
        ([1, 3, 3, 2, 1, 2], 0.9, [1, 3, 3, 2, 1, 2]),
        ([1, 3, 3, 3, 3, 1], 1, [1, 3, 3, 3, 3, 1]),
        ([1, 3, 3, 3, 3, 1], 2, [3, 3, 3, 3, 3, 3]),
        ([2, 2, 2], 3, [2, 2, 2]),
    ],
)
def test_lulls_too_short_for_a_start_are_kept(
    counts: list[int], hours: float, kept: list[int]
) -> None:
    assert fill_short_lulls(np.array(counts), hours).tolist() == kept


def test_replicas_at_least() -> None:
    plan, _ = planned()
    found = plan_autoscaling(replace(plan.scenario, replicas_at_least=2), plan.chosen)
    assert found is not None and min(found.replicas) == 2
    assert plan_autoscaling(replace(plan.scenario, daily_profile=None), plan.chosen) is None


def test_a_day_is_named_counted_or_given(tmp_path: Path) -> None:
    assert asked().daily_profile.hourly_fractions == pytest.approx(np.array(HOURS) / 40)
    named = asked(day="campus-rag").daily_profile
    assert (
        max(named.hourly_fractions) == 1
        and named.hourly_fractions[3] == pytest.approx(25 / 485)
        and named.peak_rps is None
    )
    assert all(len(profile.hours) == 24 for profile in load_daily_profiles().values())
    rows = [
        f"{hour * 3600 + k},100,10" for hour in range(25) for k in range(2 if hour % 24 > 1 else 1)
    ]
    (tmp_path / "day.csv").write_text("\n".join(["arrival,prompt_tokens,output_tokens", *rows]))
    counted = build_daily_profile("day.csv", tmp_path / "day.csv")
    assert counted.hourly_fractions == (
        0.5,
        0.5,
        *[1.0] * 22,
    ), "the hour that had only begun is left out"
    path = tmp_path / "mine.yaml"
    counted_in = {name: value for name, value in SMALL["workload"].items() if name != "rate"}
    path.write_text(yaml.safe_dump({**SMALL, "workload": {**counted_in, "day": "day.csv"}}))
    found = load_scenario(path)
    assert found.workload.rate == 2 / 3600 and found.files[-1] == tmp_path / "day.csv"
    assert search_analytically(found).chosen is not None


@pytest.mark.parametrize("shape", [0.2, 1.0])
def test_a_days_trace_says_how_its_requests_bunch(tmp_path: Path, shape: float) -> None:
    """Within the hours: that they rise and fall is no burst."""
    turns, sums = (
        np.cumsum(np.random.default_rng(0).gamma(shape, 1 / shape, 200 * sum(HOURS))),
        np.cumsum((0, *HOURS)),
    )
    seconds = np.interp(turns, sums * 200, np.arange(25) * 3600)[turns < sums[-1] * 200]
    path = tmp_path / "day.csv"
    path.write_text(
        "\n".join(["arrival,prompt_tokens,output_tokens", *(f"{at:.6f},400,60" for at in seconds)])
    )
    assert build_daily_profile("day.csv", path).burstiness == pytest.approx(shape, rel=0.1)
    assert asked(day=str(path)).workload.burstiness == pytest.approx(shape, rel=0.1)
    assert asked(day=str(path), burstiness=0.5).workload.burstiness == 0.5


@pytest.mark.parametrize(
    "workload, told",
    [
        ({"day": [1.0] * 23}, "workload, day: given by the scenario has 23 hours"),
        ({"day": [0.0] * 24}, "no hour with traffic"),
        ({"day": [1.0] * 23 + [-1]}, "24 to 168 hourly figures from 0"),
        ({"day": 3}, "24 to 168 hourly figures"),
        ({"day": "campus"}, "did you mean campus-rag"),
        ({"day": "9" * 5000}, "unknown profile"),
        ({"day": [1.0] * 24, "rate": None, "concurrency": 8}, "leave out concurrency"),
        ({"day": [1.0] * 24, "rate": None, "requests": 8, "within_hours": 1}, "leave out requests"),
    ],
)  # fmt: skip
def test_what_is_no_day_is_told(workload: dict[str, object], told: str) -> None:
    with pytest.raises(PlannerError, match=told):
        asked(**workload)


def test_what_is_paid_by_hour_second_and_token() -> None:
    """By hand for a whole day's figures."""
    plan, found = planned()
    instead = BillingAlternativesEntry(
        serverless=ServerlessEntry(usd_per_gpu_second=0.0004, cold_start=30, idle_seconds=60),
        api=ApiEntry(usd_per_mtok_input=0.1, usd_per_mtok_output=0.2),
    )
    paid = compare_billing(replace(plan.scenario, billing_alternatives=instead), found)
    requests = 40 * 3600 * sum(HOURS) / max(HOURS)
    assert paid.requests == pytest.approx(requests)
    assert paid.usd["API"] == pytest.approx(requests * (400 * 0.1 + 60 * 0.2) / 1e6)
    assert paid.usd["fixed fleet"] == pytest.approx(
        plan.chosen.deployment.layout.num_gpus * 24 * found.usd_per_gpu_hour
    )
    assert paid.usd["scaled by the hour"] == pytest.approx(found.gpu_hours * found.usd_per_gpu_hour)
    busy = (
        sum(math.ceil(rate / found.max_replica_rps - 1e-9) for rate in found.rates) * 3600 * 0.0004
    )
    assert busy * 0.99 < paid.usd["serverless"] < busy * 1.02 and paid.cold < 1e-9, (
        "somebody always asks"
    )


def test_an_owners_bill_is_the_same_on_or_off_but_for_power() -> None:
    """Four cards of $9,000 over 48 months are $750 a month; 72 W at 30 cents are 2.16 cents an hour."""
    fields = {**SMALL, "replicas_at_least": 0, "owned": {"L4": {"purchase_usd": 9000, "years": 4}}}
    free = parse_scenario(fields, "own")
    found = planned()[1]

    def bill_month(scenario: Scenario, price: float) -> dict[str, float]:
        day = replace(
            found, usd_per_gpu_hour=price, idle_share=scenario.get_idle_share(get_gpu("L4"))
        )
        return {way: usd * 365.25 / 12 for way, usd in compare_billing(scenario, day).usd.items()}

    price = look_up_gpu_price(get_gpu("L4"), free.prices)
    assert price and 4 * price.median_usd * 730.5 == pytest.approx(750)
    bills = bill_month(free, price.median_usd)
    count = found.fixed_gpu_hours / 24
    assert bills["fixed fleet"] == bills["scaled by the hour"] == pytest.approx(750 * count / 4)
    fields["owned"] = {"L4": {"purchase_usd": 9000, "years": 4, "usd_per_kwh": 0.3}}
    paid = parse_scenario(fields, "own")
    price = look_up_gpu_price(get_gpu("L4"), paid.prices)
    bills = bill_month(paid, price.median_usd)
    power = found.gpu_hours * 0.0216 * 365.25 / 12
    assert bills["scaled by the hour"] == pytest.approx(750 * count / 4 + power)


@pytest.mark.parametrize(
    "budget, at_most, is_bound", [(20, 1, True), (20, 40, False), (0.9, 40, False)]
)
def test_a_budget_that_at_most_leaves_unspent_is_told(
    budget: float, at_most: int, is_bound: bool
) -> None:
    """An L4 costs $0.80 here: 20 dollars buy 25 of them, 90 cents one."""
    fields = {
        **SMALL, "prices": {"L4": 0.8}, "gpus": {"gpu": "L4", "at_most": at_most},
        "workload": {**SMALL["workload"], "rate": "max"}, "budget": {"usd_per_hour": budget},
    }  # fmt: skip
    del fields["workload"]["day"]
    plan = search_analytically(parse_scenario(fields, "budget"))
    used = measure_budget(plan.scenario, plan.chosen)
    assert used and used["is_bound_by_at_most"] == is_bound
    assert used["spent_fraction"] == pytest.approx(0.8 * min(at_most, int(budget / 0.8)) / budget)


@pytest.mark.parametrize("rate, idle, start", [(0.01, 60.0, 30.0), (0.002, 0.0, 100.0)])
def test_a_serverless_replica_is_paid_as_a_simulation_says(
    rate: float, idle: float, start: float
) -> None:
    """Requests at random: the first starts a replica, which stays until `idle` after the last answer."""
    _, found = planned()
    stay, rng = (
        found.max_load_replica.performance.get("e2e", "mean").mid + idle,
        np.random.default_rng(1),
    )
    paid, cold, until, now, many = 0.0, 0, -1.0, 0.0, 40_000
    ready = 0.0
    for gap in rng.exponential(1 / rate, many):
        now += gap
        if now >= until:
            cold, ready, paid = cold + 1, now + start, paid + start
            until = ready
        elif now < ready:
            cold += 1
        more = max(until, max(now, ready) + stay)
        paid, until = paid + more - until, more
    quiet = replace(found, rates=(rate,) * 24, replicas=(1,) * 24)
    usd, waits = price_serverless(
        ServerlessEntry(usd_per_gpu_second=1, cold_start=start, idle_seconds=idle), quiet
    )
    assert usd / 86400 == pytest.approx(paid / now, rel=0.05)
    assert waits == pytest.approx(cold / many, rel=0.05)


def test_the_file_for_keda_has_the_plans_hours_threshold_and_patience() -> None:
    """At every minute of the day its triggers ask for as many replicas as the plan has, a start-up ahead."""
    plan, found = planned()
    (text,) = render_artifacts(plan.chosen.prediction, (), wanted=["kubernetes"], scaling=found)[
        "k8s/scale.yaml"
    ].split("---")
    spec = yaml.safe_load(text)["spec"]
    *clock, watched = spec["triggers"]
    assert watched["metadata"]["threshold"] == f"{found.scale_up_in_flight:.3g}"
    down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] == round(found.stabilization_s) >= found.lead_s
    asked = np.full(1440, spec["minReplicaCount"])
    for trigger in clock:
        (from_minute, from_hour), (to_minute, to_hour) = (
            map(int, trigger["metadata"][end].split()[:2]) for end in ("start", "end")
        )
        first, last = from_hour * 60 + from_minute, to_hour * 60 + to_minute
        own = np.arange(first, last + 1440 * (last <= first)) % 1440
        asked[own] = np.maximum(asked[own], int(trigger["metadata"]["desiredReplicas"]))
    lead = math.ceil(found.lead_s / 60)
    for ahead in range(lead + 1):
        assert (np.roll(asked, ahead) >= np.repeat(found.replicas, 60)).all()
    assert asked.sum() <= 60 * sum(found.replicas) + 5 * found.num_starts, "and no more than that"
    weekly = replace(found, replicas=(1,) * 8 + (2,) * 2 + (1,) * 158, rates=(1.0,) * 168)
    assert build_cron_schedule(weekly, 90.0) == [("58 7 * * 1", "0 10 * * 1", 2)], (
        "a week begins on Monday"
    )
    long = replace(found, replicas=(1,) + (2,) * 23, rates=(1.0,) * 24)
    assert build_cron_schedule(long, 4000.0) == [("1 0 * * *", "0 0 * * *", 2)], (
        "a start never passes the end before"
    )
    assert build_cron_schedule(replace(found, starts_at_midnight=False), 90.0) == []


def test_spare_replicas_run_beside_those_that_the_traffic_asks_for() -> None:
    """When idle, and when the planned ones are full: else the loss of one would break a promise."""
    plan, found = planned()
    deployment = replace(plan.chosen.deployment, spare_replicas=2)
    prediction = replace(plan.chosen.prediction, deployment=deployment)
    for followed in (None, replace(found, deployment=deployment)):
        (text,) = render_artifacts(prediction, (), wanted=["kubernetes"], scaling=followed)[
            "k8s/scale.yaml"
        ].split("---")
        spec = yaml.safe_load(text)["spec"]
        watched = spec["triggers"][-1]["metadata"]
        assert spec["minReplicaCount"] == 3
        assert watched["query"].endswith(f") + 2 * {watched['threshold']}")
