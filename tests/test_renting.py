"""What is paid: whole machines, spare replicas, one price; what an expert limits, and what nobody would build."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shipped import answer_of, plan_once, small_fields

from planner.answers import serialize_answer
from planner.answers.words import describe_api, explain_outside
from planner.core.errors import PlannerError
from planner.engines.deployment import choose_machines, deploy_on
from planner.hardware.gpus import get_gpu
from planner.hardware.prices import PriceSelection, look_up_gpu_price
from planner.models.registry import load_model
from planner.parallelism.layouts import list_legal_layouts
from planner.planning.billing import ApiComparison
from planner.planning.plan import Plan
from planner.planning.scenario import Scenario, load_scenario, parse_scenario
from planner.planning.search import search_analytically, search_deployments

SMALL = small_fields({
    "gpus": [{"gpu": "L40S", "at_most": 16}],
    "quantization": ["checkpoint", "fp8"],
    "engine_version": "0.20.2",
    "workload": {"prompt_tokens": {"exactly": 800}, "output_tokens": {"exactly": 200}, "rate": 20},
    "service_level": {"ttft": {"p95": 1500}, "tpot": {"p95": 60}},
})  # fmt: skip
QUICK = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
RATES = st.sampled_from([2.0, 11.0, 20.0, 33.0])
UNITS = st.sampled_from([[1, 2, 4, 8], [1], [2], [4, 8], [8], [1, 8]])


def small(rate: float = 20.0, sold_in: list[int] | None = None, **fields: object) -> Scenario:
    card = {"gpu": "L40S", "at_most": 16} | ({"sold_in": sold_in} if sold_in else {})
    return parse_scenario(
        {**SMALL, "gpus": [card], "workload": {**SMALL["workload"], "rate": rate}, **fields}, "s"
    )


@cache
def planned(asked: str) -> Plan:
    """The closed form of `small`, its arguments as JSON: costs and limits in it are those of the plan."""
    return search_analytically(small(**json.loads(asked)))


def usd(**fields: object) -> float:
    chosen = planned(json.dumps(fields)).chosen
    return chosen.usd_per_hour if chosen and chosen.usd_per_hour else math.inf


@given(
    replicas=st.integers(1, 40),
    each=st.integers(1, 16),
    sold_in=st.sets(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1).map(
        lambda sizes: tuple(sorted(sizes))
    ),
)
def test_whole_machines_hold_every_replica(
    replicas: int, each: int, sold_in: tuple[int, ...]
) -> None:
    found = choose_machines(replicas, each, sold_in)
    assert {*found} <= {*sold_in} and sum(found) >= replicas * each
    if each <= sold_in[-1]:
        assert sum(size // each for size in found) >= replicas
        for size in sold_in:  # machines of one size never do with less
            assert size < each or sum(found) <= math.ceil(replicas / (size // each)) * size
    else:
        assert len(found) == replicas * math.ceil(each / sold_in[-1])
    assert sum(choose_machines(replicas + 1, each, sold_in)) >= sum(found)


@pytest.mark.parametrize(
    ("replicas", "each", "sold_in", "expected"),
    [
        (3, 1, (8,), (8,)),
        (3, 1, (1, 2, 4, 8), (1, 1, 1)),  # nobody mixes 2 and 1; one of 4 is more GPUs
        (3, 4, (1, 2, 4, 8), (4, 4, 4)),
        (16, 1, (1, 2, 4, 8), (8, 8)),
        (2, 6, (1, 2, 4, 8), (8, 8)),
        (1, 16, (1, 2, 4, 8), (8, 8)),
        (2, 12, (4, 8), (8, 8, 8, 8)),
    ],
)
def test_machines_by_hand(
    replicas: int, each: int, sold_in: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert choose_machines(replicas, each, sold_in) == expected


@QUICK
@given(rate=RATES, sold_in=UNITS, spare=st.integers(0, 2))
def test_the_bill_is_what_is_rented_times_its_price(
    rate: float, sold_in: list[int], spare: int
) -> None:
    plan = planned(json.dumps({"rate": rate, "sold_in": sold_in, "spare_replicas": spare}))
    each = look_up_gpu_price(get_gpu("L40S"))
    assert each and plan.candidates
    for candidate in plan.candidates:
        deployment = candidate.deployment
        assert candidate.usd_per_hour == pytest.approx(each.median_usd * deployment.num_gpus_billed)
        assert deployment.num_gpus <= deployment.num_gpus_billed == sum(deployment.machines) <= 16
        assert (
            deployment.num_gpus
            == (deployment.layout.replicas + spare) * deployment.layout.gpus_per_replica
        )
        assert {*deployment.machines} <= {*sold_in} and deployment.layout.tp <= max(sold_in)


@QUICK
@given(rate=RATES, times=st.floats(0.1, 10))
def test_scaling_every_price_scales_only_the_bill(rate: float, times: float) -> None:
    asked = small(rate)
    before, price = search_analytically(asked), look_up_gpu_price(get_gpu("L40S"))
    assert price
    after = search_analytically(
        replace(asked, prices=PriceSelection({"L40S": price.median_usd * times}))
    )
    assert [c.identity_key for c in before.candidates] == [c.identity_key for c in after.candidates]
    for old, new in zip(before.candidates, after.candidates, strict=True):
        assert old.usd_per_hour and new.usd_per_hour == pytest.approx(times * old.usd_per_hour)
        assert (
            old.prediction.performance == new.prediction.performance
            and old.violations == new.violations
        )


def test_a_stock_that_holds_no_replica_with_its_spare_is_a_rejection() -> None:
    plan = search_analytically(small(sold_in=[8], spare_replicas=32))
    assert (
        not plan.candidates
        and plan.binding_constraint.constraint == "stock"
        and "of at most 16" in plan.binding_constraint.sentence
    )


@pytest.mark.parametrize(
    ("sold_in", "message"),
    [([16], "machines of at most 8 GPUs"), ([0], "above 0"), ("all", "must be a whole number")],
)
def test_units_that_cannot_be_are_refused(sold_in: object, message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        small(sold_in=sold_in)


def test_one_number_is_a_unit_and_a_node_of_ones_own_is_one_too() -> None:
    assert small(sold_in=8).gpus[0].machine_sizes == (8,)
    wide = parse_scenario(
        {**SMALL, "gpus": [{"gpu": "H100-SXM", "at_most": 16, "gpus_per_node": 16}]}, "s"
    ).gpus[0]
    assert wide.machine_sizes == (1, 2, 4, 8, 16) and wide.max_machine_gpus == 16
    assert (
        parse_scenario({**SMALL, "gpus": [{"gpu": "A10", "at_most": 16}]}, "s")
        .gpus[0]
        .max_machine_gpus
        == 4
    )


@pytest.mark.parametrize("node", [1, 2, 4, 8])
def test_no_layout_that_nobody_would_build_is_offered(node: int) -> None:
    for layout in list_legal_layouts(
        load_model("meta-llama/Llama-3.1-70B"), get_gpu("H100-SXM"), 512, node
    ):
        nodes = math.ceil(layout.num_gpus / node)
        assert layout.tp <= node and layout.pp <= 8 and layout.pp % nodes == 0
        assert layout.tp * layout.pp // nodes <= node


def test_the_api_and_the_gpus_cost_the_same_where_it_turns() -> None:
    """A request of 500 + 100 tokens at 1 and 4 USD a million is 0.0009 USD; a month has 730.5 hours."""
    api = {"api": {"usd_per_mtok_input": 1, "usd_per_mtok_output": 4}}
    lengths = {"prompt_tokens": {"exactly": 500}, "output_tokens": {"exactly": 100}}

    @cache
    def compare(rate: float) -> ApiComparison:
        workload = {**lengths, "rate": rate}
        asked = parse_scenario({**SMALL, "workload": workload, "instead": api}, "s")
        plan = search_analytically(asked)
        assert plan.chosen and plan.api_comparison
        found = plan.api_comparison
        assert found.api_usd == pytest.approx(rate * 730.5 * 3600 * 0.0009)
        assert found.own_usd == pytest.approx(plan.chosen.usd_per_hour * 730.5)
        assert (
            serialize_answer(answer_of(plan))["instead"]["api"]["cheaper"] == found.is_api_cheaper
        )
        return found

    turn = compare(0.2).break_even_rps
    assert turn and compare(0.94 * turn).is_api_cheaper and not compare(1.06 * turn).is_api_cheaper
    assert compare(0.99 * turn).is_about_equal and compare(1.01 * turn).is_about_equal
    assert search_analytically(small()).api_comparison is None


def test_the_bill_of_an_api_is_what_was_given() -> None:
    lengths = {name: SMALL["workload"][name] for name in ("prompt_tokens", "output_tokens")}
    for day in ({}, {"day": [0.1] * 12 + [1.0] * 12}):
        workload = {**lengths, "requests_per_month": 2_000_000, **day}
        fields = {**SMALL, "workload": workload, "instead": {"api_usd_per_month": 2345}}
        found = search_deployments(parse_scenario(fields, "s")).api_comparison
        assert found and found.api_usd == pytest.approx(2345)


def test_an_option_that_turns_the_verdict_on_the_api_is_named() -> None:
    """A GPU that is not listed, as likely as asked, for less than the API."""
    plan = plan_once(load_scenario("chat-70b", {"instead.api_usd_per_month": 11_000}))
    answer = answer_of(plan)
    offer = answer.cheaper_than_api
    assert plan.api_comparison and plan.api_comparison.is_about_equal
    assert (
        offer
        and explain_outside(plan.scenario, offer) == "not on your list"
        and offer.bill
        and offer.bill < 0.95 * 11_000
    )
    assert f"{offer.placement} (not listed) costs less than the API" in describe_api(answer)


def test_machines_can_be_given_back_where_replicas_go_by_the_hour() -> None:
    pair = deploy_on("meta-llama/Llama-3.1-8B", "L40S", tp=2, replicas=2, sold_in=(1, 2, 4))
    assert pair.machines == (4,) and pair.returnable_machines == (2, 2)
    assert (
        deploy_on("meta-llama/Llama-3.1-8B", "L40S", tp=4, sold_in=(4,)).returnable_machines == ()
    )
    whole = deploy_on("meta-llama/Llama-3.1-8B", "L40S", tp=2, replicas=2, sold_in=(4,))
    assert whole.returnable_machines == ()


def test_bought_hardware_has_a_price_by_the_hour() -> None:
    """2,630 USD over three years are 10 cents an hour; 450 W at 0.30 USD a kWh are 13.5 more."""
    plan = search_analytically(
        parse_scenario(
            {
                **SMALL,
                "gpus": [{"gpu": "RTX-4090", "at_most": 16}],
                "owned": {"RTX-4090": {"purchase_usd": 2630, "years": 3, "usd_per_kwh": 0.3}},
            },
            "own",
        )
    )
    assert plan.chosen and plan.chosen.usd_per_hour == pytest.approx(
        0.235 * plan.chosen.deployment.num_gpus_billed, rel=0.01
    )


def test_the_shortest_limit_holds_and_a_shorter_one_does_not() -> None:
    def plan_with(limit: object) -> Plan:
        level = {"ttft": {"p95": 1500}, "tpot": {"p95": limit}}
        return search_analytically(small(gpus=[{"gpu": "L40S", "at_most": 4}], service_level=level))

    best = plan_with("best")
    milliseconds = best.scenario.slo_targets[0].seconds * 1e3
    assert best.verdict == "holds" and best.scenario.slo_targets[0].name == "p95 TPOT"
    assert plan_with(milliseconds).verdict == "holds"
    assert plan_with(0.94 * milliseconds).verdict != "holds"
    with pytest.raises(PlannerError, match="only one figure"):
        small(service_level={"ttft": {"p95": "best"}, "tpot": {"p95": "best"}})


@pytest.mark.parametrize(
    "volume",
    [
        {"tokens_per_day": 90e6},
        {"tokens_per_month": 90e6 * 365.25 / 12},
        {"requests_per_day": 90e3},
        {"requests_per_month": 90e3 * 365.25 / 12},
    ],
)
def test_a_volume_becomes_the_rate_of_the_busiest_hour(volume: dict[str, float]) -> None:
    """90 million tokens are 90,000 requests of 1,000, over nine office hours 2.78 a second."""
    lengths = {"prompt_tokens": {"exactly": 800}, "output_tokens": {"exactly": 200}}
    workload = {**lengths, **volume, "office_hours": [9, 18]}
    asked = parse_scenario({**SMALL, "workload": workload}, "office")
    assert asked.workload.rate == pytest.approx(90_000 / (9 * 3600))
    assert asked.daily_profile and sum(asked.daily_profile.hourly_fractions) == 9
    assert any("2.78 a second" in sentence for sentence in asked.assumptions)
    weekdays = parse_scenario({**SMALL, "workload": workload | {"office_days": 5}}, "office")
    closed = 7 / 5 if "month" in next(iter(volume)) else 1  # a month counts its weekends, too
    assert weekdays.workload.rate == pytest.approx(90_000 * closed / (9 * 3600))
    for others in ({"rate": 3}, {"concurrency": 4}, {"tokens_per_day": 1, "requests_per_day": 1}):
        with pytest.raises(PlannerError, match=r"leave out|not both"):
            parse_scenario({**SMALL, "workload": workload | others}, "office")


@settings(deadline=None, max_examples=30)
@given(
    opens=st.integers(0, 22), hours=st.integers(1, 24), days=st.integers(1, 7),
    requests=st.floats(100, 1e6), peak=st.floats(1, 10), is_month=st.booleans(),
)  # fmt: skip
def test_the_traffic_of_the_hours_adds_up_to_the_volume(
    opens: int, hours: int, days: int, requests: float, peak: float, is_month: bool
) -> None:
    """Whatever a day or a month is stated to have comes in the hours that have traffic."""
    lengths = {name: SMALL["workload"][name] for name in ("prompt_tokens", "output_tokens")}
    volume = {"requests_per_month" if is_month else "requests_per_day": requests}
    closes = min(opens + hours, 24)
    office = {"office_hours": [opens, closes], "office_days": days}
    scenario = parse_scenario({**SMALL, "workload": {**lengths, **volume, **office}}, "s")
    hour, profile = scenario.sized_hour, scenario.daily_profile
    assert hour and profile and hour["hour"] == opens
    assert hour["requests_per_s"] == scenario.workload.rate
    of_a_day = hour["requests_per_s"] * 3600 * (closes - opens)
    of_a_month = of_a_day * days / 7 * 365.25 / 12
    assert (of_a_month if is_month else of_a_day) == pytest.approx(requests)
    assert hour["times_mean_hour"] == pytest.approx(168 / ((closes - opens) * days))
    steady = parse_scenario(
        {**SMALL, "workload": {**lengths, **volume, "peak_to_mean": peak}}, "s"
    ).sized_hour
    seconds = (365.25 / 12 if is_month else 1) * 86400
    assert steady and steady["hour"] is None and steady["times_mean_hour"] == pytest.approx(peak)
    assert steady["requests_per_s"] * seconds == pytest.approx(requests * peak)


def test_a_service_with_office_hours_may_stop_outside_them() -> None:
    """Twelve hours without a request cost nothing but the time to start, settle and stop."""
    day = [0.0] * 12 + [1.0] * 12
    workload = {**SMALL["workload"], "rate": 2, "day": day}
    asked = {**SMALL, "workload": workload, "replicas_at_least": 0}
    plan = search_deployments(parse_scenario(asked, "s"))
    assert plan.autoscaling and plan.billing and not plan.autoscaling.violated_hours
    assert plan.autoscaling.replicas[:11] == (0,) * 11 and min(plan.autoscaling.replicas[12:]) > 0
    paid = plan.billing.usd["scaled by the hour"] / plan.billing.usd["fixed fleet"]
    assert 0.5 <= paid < 0.6
