"""Every layout of a scenario: what is compared, what is sent, and that the plan is the cheapest of them."""

from dataclasses import replace

import pytest
from shipped import plan_of

from planner.analysis import layout_tables as layout_study
from planner.engines.deployment import deploy_on
from planner.planning.evaluation import evaluate_candidate
from planner.planning.plan import Plan
from planner.planning.scenario import parse_scenario
from planner.planning.search import search_deployments


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("chat-70b")


@pytest.fixture(scope="module")
def every(plan):
    return layout_study.list_shapes(plan)


def test_no_legal_layout_meets_the_service_level_for_less_than_the_plan(plan, every):
    cheapest = min(candidate.cost_key for candidate in every if candidate.is_feasible)
    assert cheapest == plan.chosen.cost_key
    assert sum(candidate is plan.chosen for candidate in every) == 1


def test_every_layout_appears_once_and_keeps_to_the_gpus_allowed(plan, every):
    shapes = [candidate.deployment.layout for candidate in every]
    assert len({replace(layout, replicas=1) for layout in shapes}) == len(shapes)
    assert max(layout.num_gpus for layout in shapes) <= 32
    assert {layout.tp for layout in shapes} == {1, 2, 4, 8}


def test_capacity_is_where_the_promises_begin_to_break(plan):
    deployment = plan.chosen.deployment
    rate = layout_study.estimate_max_rps(plan.scenario, deployment)
    meets = []
    for share in (0.95, 1.05):
        traffic = replace(plan.scenario.workload, rate=rate * share)
        asked = replace(plan.scenario, workload=traffic, headroom=0.0)
        meets.append(evaluate_candidate(asked, deployment, 1).is_feasible)
    assert meets == [True, False]


def test_llama_70b_reduces_twice_a_layer_and_a_stage_sends_once():
    """80 layers, attention and MLP each: 160 all-reduces of 8,192 bf16 values; a stage sends hidden and residual."""
    llama = deploy_on(
        "meta-llama/Llama-3.1-70B-Instruct", "H100-SXM", tp=4, engine_version="0.20.2"
    )
    sends = layout_study.build_collectives_table(llama, batch=32, context=1000)
    first = sends.drop_duplicates("Layout").set_index("Layout")
    assert first.loc["TP4", "Messages"] == 160
    assert first.loc["TP4", "KiB per token and GPU"] == 160 * 8192 * 2 / 1024
    assert first.loc["PP2", "KiB per token and GPU"] == 2 * 8192 * 2 / 1024


def test_nvlink_is_faster_than_pcie_and_stages_talk_least():
    llama = deploy_on(
        "meta-llama/Llama-3.1-70B-Instruct", "H100-SXM", tp=4, engine_version="0.20.2"
    )
    spent = layout_study.build_collectives_table(llama, batch=32, context=1000).set_index(
        ["Layout", "Link", "Step"]
    )["Messages (ms)"]
    nvlink, pcie = "NVLink 4 (450 GB/s)", "PCIe (64 GB/s)"
    for step in ("decode", "prompt"):
        assert spent["TP4", pcie, step] > 2 * spent["TP4", nvlink, step]
        assert spent["PP2", pcie, step] < spent["TP2", nvlink, step]


NOWHERE = {
    "question": "Does a 70B model fit on one 24 GB card?",
    "model": "meta-llama/Llama-3.1-70B-Instruct",
    "gpus": [{"gpu": "RTX-4090", "at_most": 1}],
    "workload": {"prompt_tokens": {"mean": 500}, "output_tokens": {"mean": 100}, "rate": 1},
    "service_level": {"ttft": {"p95": 1000}},
}


def test_where_nothing_fits_the_chapter_says_so_and_goes_on_with_a_change():
    asked = search_deployments(parse_scenario(NOWHERE, "nowhere"))
    study = layout_study.begin_study(asked, fits=True)
    assert not asked.candidates and study.plan.candidates
    assert "fits nowhere" in study.note and "up to 64 x" in study.note
