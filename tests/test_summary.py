"""What the first pages say holds: machines and money add up, room to grow is room, and what would pass does pass."""

import math
from dataclasses import replace
from functools import cache

import pytest
from shipped import answer_of, small_plan

from planner.answers.answer import PHRASES, build_offer
from planner.answers.words import explain_local_model, explain_outside
from planner.core.number_format import format_seconds, format_usd
from planner.engines.deployment import choose_machines
from planner.hardware.gpus import get_gpu
from planner.planning.plan import Plan
from planner.planning.scenario import CandidateGpu
from planner.planning.scenario_schema import ApiEntry
from planner.planning.tolerance import simulate_candidate
from planner.planning.what_if import find_unlisted_gpu, run_what_ifs
from planner.ui import plan_tables as tables
from planner.ui.decision_memo import build_memo


def plan(ttft: float = 2000, rate: float = 9) -> Plan:
    return small_plan({"service_level.ttft.p95": ttft, "workload.rate": rate})


@cache
def find_plan_at_risk() -> Plan:
    """Between the limits that hold and those that nothing meets."""
    missed, held = 60.0, 600.0
    while (found := plan(limit := math.sqrt(missed * held))).verdict != "at_risk":
        missed, held = (missed, limit) if found.verdict == "holds" else (limit, held)
    return found


def test_machines_hold_whole_replicas() -> None:
    assert choose_machines(1, 16, (8,)) == (8, 8)
    assert choose_machines(3, 4, (8,)) == (8, 8)
    assert choose_machines(2, 6, (8,)) == (8, 8)  # six GPUs: a machine of eight holds one of them
    assert choose_machines(2, 16, (8,)) == (8, 8, 8, 8)


def test_what_would_pass_passes() -> None:
    stuck = plan(ttft=8, rate=2)
    ways = answer_of(stuck).ways_out
    assert stuck.chosen is None and ways
    (limit,) = [each.pessimistic for each in ways.relaxations if each.kind == "limit"]
    targets = plan(ttft=1.02e3 * limit, rate=2).scenario.slo_targets
    relaxed = replace(stuck.scenario, slo_targets=targets)
    best = stuck.best
    assert best
    found = simulate_candidate(relaxed, best)
    assert found.is_feasible and not found.at_risk
    table = tables.build_candidate_table(answer_of(stuck))
    assert (
        set(table["figures"]) <= {"simulated", "estimate"}
        and table["figures"].iloc[0] == "simulated"
    )
    over = format_seconds(found.prediction.performance.get("ttft", "p95").mid, 0.008)
    assert table["what is missing"].iloc[0] == f"p95 TTFT is {over}, limit 8 ms"


def test_limits_that_pass_together_say_how_likely_they_do() -> None:
    """Each alone is kept with what was asked; all at once are less likely, and that is what is told."""
    targets = {"ttft": {"p95": 8}, "tpot": {"p95": 5}}
    stuck = small_plan({"service_level": targets, "workload.rate": 2})
    ways, best = answer_of(stuck).ways_out, stuck.best
    assert ways and best
    told = {each.name: each for each in ways.relaxations if each.kind == "limit"}
    assert told.keys() == {"p95 TTFT", "p95 TPOT"}
    relaxed = [
        replace(target, seconds=told[target.name].pessimistic)
        for target in stuck.scenario.slo_targets
    ]
    found = simulate_candidate(replace(stuck.scenario, slo_targets=tuple(relaxed)), best)
    (likely,) = {each.probability for each in told.values()}
    assert likely < stuck.scenario.confidence
    assert found.probability == pytest.approx(likely, abs=0.02)


def test_what_was_measured_is_named_as_what_it_is() -> None:
    """A run of the very model on the very GPU is more than one of its family; one on another GPU is less."""
    best = answer_of(plan()).best
    assert best and best.performance
    for basis, model, gpu, said in (
        ("measured", True, True, "measured on this GPU with this very model"),
        ("measured", False, True, "measured on this GPU with models of this family"),
        ("measured", True, False, "measured on this GPU with models of this family"),
        ("model-transfer", False, True, "measured on this GPU, but with models of other families"),
        ("model-transfer", False, False, "and on other GPUs"),
    ):
        performance = replace(best.performance, basis=basis)
        offer = replace(best, prediction=replace(best.prediction, performance=performance))
        named = offer.deployment.model.name if model else "another/model"
        vars(offer)["nearest_run"] = {"model": named, "gpu": offer.gpu if gpu else "another"}
        assert said in PHRASES["basis"][offer.basis]["says"]
    known = {offer.basis for offer in answer_of(plan()).candidates[:12]}
    assert known <= set(PHRASES["basis"])


def test_a_model_that_is_a_path_says_where_its_weights_must_lie() -> None:
    best = answer_of(plan()).best
    assert best
    local = replace(best.deployment.model, name="work/config.json", local_name="work")
    deployment = replace(best.deployment, model=local)
    offer = replace(best, deployment=deployment)
    assert "set MODEL where work is served" in explain_local_model(offer)
    assert not explain_local_model(best)


def test_the_memo_recommends_the_api_where_it_costs_less() -> None:
    for usd, cheaper in ((1e-4, True), (1e4, False)):
        api = ApiEntry(usd_per_mtok_input=usd, usd_per_mtok_output=usd)
        bills = plan().scenario.billing_alternatives.model_copy(update={"api": api})
        asked = replace(plan(), scenario=replace(plan().scenario, billing_alternatives=bills))
        memo, found = build_memo(answer_of(asked)).fields, asked.api_comparison
        assert found and found.is_api_cheaper == cheaper
        assert memo["title"].startswith("Use the API" if cheaper else "Rent")
        assert format_usd(found.api_usd) in memo["api"] and format_usd(found.own_usd) in memo["api"]
        assert (memo["options"][0]["name"] == "API by the token") == cheaper


def test_the_memo_without_a_plan_shows_the_ways_out() -> None:
    stuck = plan(ttft=8)
    memo = build_memo(answer_of(stuck).with_changes(run_what_ifs(stuck), [])).fields
    assert memo["title"].startswith("No plan") and not memo["risks"] and not memo["ramp"]
    assert any(bar["state"] == "missed" for bar in memo["bars"])
    listed = {each.gpu.name for each in stuck.scenario.gpus}
    for option in memo["options"]:
        gpu = option["name"].split(",")[0].split()[-1]
        assert ("not on your list" in option["con"]) == (gpu not in listed)


def test_a_gpu_that_is_not_on_the_list_is_named_so() -> None:
    plan_on_list = plan()
    scenario, chosen = plan_on_list.scenario, plan_on_list.chosen
    assert chosen and not explain_outside(scenario, build_offer(scenario, chosen))
    found = find_unlisted_gpu(plan_on_list)
    assert found is None or found[0].deployment.gpu.name != "L40S"
    h100 = replace(plan_on_list.scenario, gpus=(CandidateGpu(get_gpu("H100-SXM"), 4),))
    assert explain_outside(h100, build_offer(h100, chosen)) == "not on your list"
