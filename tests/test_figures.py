"""Figures of one quantity agree on the first pages: memo, terminal, cockpit, checklist and plan.json."""

import re
from dataclasses import replace

import pytest
from shipped import answer_of, plan_of, plan_once, sampled

from planner.analysis import plan_risks as risks
from planner.answers import serialize_answer
from planner.answers.wording import CAPACITY_MEANING, describe_headroom
from planner.core.number_format import (
    format_limit_seconds,
    format_number,
    format_probability,
    format_seconds,
)
from planner.deploy import explain_benchmark_lengths, render_artifacts
from planner.planning.candidate import Candidate
from planner.planning.search import Plan
from planner.planning.tolerance import state_deployment
from planner.ui.decision_memo import build_memo
from planner.ui.plan_panel import build_page
from planner.ui.plan_text import format_answer

RATE_TOLERANCE = 0.05
"""A largest load is found to 3%, by short replays."""


@pytest.fixture(params=sampled(("chat-70b", "code-completion", "long-documents"), ["chat-70b"]))
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(request.param)


@pytest.fixture
def chosen(plan: Plan) -> Candidate:
    assert plan.chosen
    return plan.chosen


def test_a_latency_is_the_same_figure_everywhere(plan: Plan, chosen: Candidate) -> None:
    memo, terminal = build_memo(answer_of(plan)), format_answer(answer_of(plan), detailed=True)
    bars = {target["short"]: target for target in build_page(answer_of(plan))["targets"]}
    last = dict(zip(memo.ramp_heads, memo.ramp[-1][1:], strict=False))
    entries = serialize_answer(answer_of(plan))["service_level"]
    for target, bar, entry in zip(plan.scenario.slo_targets, memo.bars, entries, strict=False):
        value = format_seconds(entry["predicted_ms"][0] / 1e3, target.seconds)
        assert bar.value == bars[target.name]["value"] == value
        ends = bars[target.name]["range"].replace("\N{EN DASH}", "-")
        assert f"{value} of {format_limit_seconds(target.seconds)}" in terminal
        assert re.search(rf"{target.name} +{re.escape(value)} \({ends}\), limit", terminal)
        assert last[bar.name.lower()].startswith(f"{value} (")  # of the traffic itself
        assert memo.latency_name != bar.name.lower() or memo.options[0].latency.startswith(value)


def test_what_differs_from_the_benchmark_is_said_wherever_it_is_predicted(
    plan: Plan, chosen: Candidate
) -> None:
    memo, said = build_memo(answer_of(plan)), explain_benchmark_lengths(chosen.prediction)
    script = render_artifacts(chosen.prediction, plan.scenario.slo_targets)["bench.sh"]
    load = chosen.prediction.workload
    assert load and said == memo.ramp_note and f"# {said}\n" in script
    assert memo.ramp[-1][0].endswith("your traffic")
    assert format_number(load.prompt.compute_quantile(0.95)) in said


def test_room_to_grow_is_one_figure_and_told_apart_from_the_capacity(plan: Plan) -> None:
    growth, memo, answer = (
        risks.find_growth_limit(plan),
        build_memo(answer_of(plan)),
        build_page(answer_of(plan)),
    )
    assert growth
    tiles = {tile["name"]: tile for tile in answer["tiles"]}
    (room,) = [tile for tile in memo.tiles if tile.name == "Room to grow"]
    assert (tiles[room.name]["value"], tiles[room.name]["note"]) == (room.value, room.note)
    assert tiles["Capacity"]["value"] == memo.options[0].capacity.split()[0]
    said = growth.explain()
    assert said in describe_headroom(answer_of(plan)) and said in answer["why"]
    assert said in format_answer(answer_of(plan), detailed=True)
    assert memo.capacity_note.endswith(said[1:]) and CAPACITY_MEANING in said
    assert f"{format_probability(plan.scenario.confidence)} likely" in room.note
    assert growth.confident_rps < growth.capacity.mid


def test_room_to_grow_keeps_the_probability_asked_for(plan: Plan, chosen: Candidate) -> None:
    growth, scenario = risks.find_growth_limit(plan), plan.scenario
    assert growth and scenario.workload.rate
    share = max(growth.confident_rps / growth.offered_rps, 1.0)
    for more, holds in ((1 / (1 + RATE_TOLERANCE), True), (1 + 3 * RATE_TOLERANCE, False)):
        busier = scenario.workload.with_rate(scenario.workload.rate * share * more)
        found = state_deployment(replace(scenario, workload=busier), chosen.deployment)
        assert found.is_confident == holds


@pytest.mark.exhaustive
def test_room_to_grow_is_the_largest_load_that_the_same_gpus_serve() -> None:
    plan = plan_of("chat-70b")
    growth, chosen = risks.find_growth_limit(plan), plan.chosen
    assert growth and chosen
    (gpus,) = plan.scenario.gpus
    same = replace(gpus, max_gpus=chosen.prediction.num_gpus_billed)
    most = plan_once(replace(plan.scenario, gpus=(same,), open_figure="rate"))
    assert most.scenario.workload.rate == pytest.approx(growth.confident_rps, rel=RATE_TOLERANCE)


def test_nothing_cheaper_that_is_shown_is_nearer_than_the_nearest(
    plan: Plan, chosen: Candidate
) -> None:
    near = plan.binding_constraint.candidate
    assert near
    for option in plan.options.values():
        cheaper = option.price_key < chosen.price_key
        assert not cheaper or option.probability <= near.probability


def test_price_and_load_have_the_same_digits_everywhere(plan: Plan, chosen: Candidate) -> None:
    terminal, answer, memo = (
        format_answer(answer_of(plan), detailed=True),
        build_page(answer_of(plan)),
        build_memo(answer_of(plan)),
    )
    (quotes,) = re.findall(r"\(\$([\d.]+-[\d.]+) by provider\)", terminal)
    assert f"${quotes} by provider" in answer["hour"].replace("\N{EN DASH}", "-")
    risk = [size for name, size, _ in memo.risks if name == "The price"]
    assert risk in ([], [f"Providers ask ${quotes.replace('-', ' to $')} an hour"])
    (price,) = re.findall(r"Price +(\$[\d.]+ per GPU-hour.*)", terminal)
    assert f"Price: {price}." in answer["why"]
    load = next(bar for bar in memo.bars if bar.name.startswith("Load"))
    shown = next(target for target in answer["targets"] if target["key"] == "load")
    assert (load.value, load.limit) == (shown["value"], shown["limit"])
    capacity = serialize_answer(answer_of(plan))["capacity_rps"]
    offered = serialize_answer(answer_of(plan))["planned_rps"]
    ends = [f"{100 * offered / end:.0f}" for end in reversed(sorted(capacity[1:]))]
    assert shown["range"] == f"{ends[0]}\N{EN DASH}{ends[1]}%"


def test_a_probability_below_what_is_asked_is_not_rounded_up_to_it() -> None:
    assert format_probability(0.796, 0.8) == "79.6%"
    assert format_probability(0.7999, 0.8) == "79.9%"
    assert format_probability(0.804, 0.8) == "80%" == format_probability(0.796)
    assert format_probability(0.58, 0.8) == "58%"


def test_the_load_that_traffic_may_grow_to_differs_from_the_planned_one(plan: Plan) -> None:
    growth = risks.find_growth_limit(plan)
    assert growth
    (end,) = re.findall(r"to ([\d.,]+) requests/s", growth.describe_end()) or [""]
    assert bool(end) == (growth.growth > 0) and end != format_number(growth.offered_rps, 2)
