"""The attacks of `attack_plans.py` on a few random scenarios (`test_attacks`: on the shipped); what is planted."""

from dataclasses import replace
from pathlib import Path

import attack_plans as attacks
import pytest
from scenario_generator import generate
from shipped import plan_once, sampled, small_scenario

from planner.core.intervals import Interval
from planner.engines.deployment import deploy_on
from planner.latency.performance import LATENCY_STATISTICS
from planner.planning.capacity import estimate_capacity
from planner.planning.plan import Plan
from planner.planning.scenario import parse_scenario
from planner.planning.search import search_analytically, search_deployments

pytestmark = pytest.mark.slow

CHAT = small_scenario({"workload.rate": 4, "service_level.tpot.p95": 60})


@pytest.mark.parametrize("seed", sampled((8, 14, 15, 33, 36, 42), (15, 42)))
def test_a_random_scenario_withstands_every_attack_on_its_figures(
    seed: int, tmp_path: Path
) -> None:
    assert attacks.attack(seed, tmp_path, ("figures", "agreement", "promises"))[2] == []


@pytest.mark.parametrize("seed", sampled((0, 7), [7]))
def test_brute_force_over_all_knobs_finds_nothing_cheaper(seed: int, tmp_path: Path) -> None:
    """Both take short chunks, half as many GPUs as the closed form expects of any."""
    _, _, found = attacks.attack(seed, tmp_path, ("brute",))
    assert found == []


SHORT_STEPS = (
    (9019, None),  # the closed form liked steps of 512 tokens better, which took more GPUs
    (21031, 0.827),  # it took two GPUs where one does with an FP8 cache and short steps
)
"""Seeds, and rates instead of their own."""


@pytest.mark.parametrize(("seed", "rate"), sampled(SHORT_STEPS, SHORT_STEPS[1:]))
def test_steps_that_the_closed_form_likes_less_are_replayed(
    seed: int, rate: float | None, tmp_path: Path
) -> None:
    asked = {**generate(seed, tmp_path)[1], "confidence": 0.5}
    if rate:
        asked = {**asked, "workload": {**asked["workload"], "rate": rate}}
    plan = search_deployments(parse_scenario(asked, "closed form"))
    assert plan.chosen
    found = attacks.referee(plan.scenario, plan.chosen.deployment)
    assert attacks.worst(plan.scenario, found)[0] <= 1.02
    estimate = search_analytically(plan.scenario).chosen
    assert estimate is None or plan.chosen.cost_key <= estimate.cost_key


def test_nothing_cheaper_holds_and_nothing_harder_costs_less() -> None:
    plan = plan_once(CHAT)
    assert attacks.check_nothing_cheaper(CHAT, plan) + attacks.check_metamorphic(CHAT, plan) == []


@pytest.mark.parametrize("tokens", (1, 3))
def test_the_referee_fills_the_slots_that_short_answers_leave(tokens: int) -> None:
    """As many users as slots leave some of eight empty, a fifth of the time; traffic that comes by itself does not."""
    lengths = {"prompt_tokens": {"exactly": 60}, "output_tokens": {"exactly": tokens}}
    card = deploy_on(CHAT.model, "L40S", max_model_len=2048, max_num_seqs=8)
    one = small_scenario({"workload": {**lengths, "rate": 1}, "headroom": 0})
    most = estimate_capacity(card, one.workload).mid
    asked = replace(one, workload=one.workload.with_rate(0.9 * most))
    assert attacks.referee(asked, card)["rate"] == pytest.approx(0.9, rel=0.03)


def test_the_same_seed_is_the_same_scenario_and_others_are_not(tmp_path: Path) -> None:
    assert generate(7, tmp_path) == generate(7, tmp_path)
    drawn = [generate(seed, tmp_path)[1] for seed in range(40)]
    assert (
        len({data["model"] for data in drawn}) > 15 and len({data["engine"] for data in drawn}) == 3
    )
    assert {"trace", "requests", "rate"} <= {field for data in drawn for field in data["workload"]}


def _with(plan: Plan, **figures: object) -> Plan:
    """`plan`, its chosen candidate saying something else."""
    assert plan.chosen and plan.chosen.prediction.performance
    performance = replace(plan.chosen.prediction.performance, **figures)  # type: ignore[arg-type]
    prediction = replace(plan.chosen.prediction, performance=performance)
    return replace(plan, chosen=replace(plan.chosen, prediction=prediction))


def test_the_attacks_find_what_is_planted() -> None:
    asked, plan = CHAT, plan_once(CHAT)
    assert plan.chosen and plan.chosen.prediction.performance
    deployment, performance = plan.chosen.deployment, plan.chosen.prediction.performance
    known = performance.latencies
    late = dict.fromkeys(LATENCY_STATISTICS, Interval.from_value(-0.01))
    assert any(
        "tpot" in text
        for text in attacks.check_figures(asked, _with(plan, latencies={**known, "tpot": late}))
    )
    fast = {"output_tps": performance.output_tps * 1e4, "total_tps": performance.total_tps * 1e4}
    assert any("peak FLOP/s" in text for text in attacks.check_figures(asked, _with(plan, **fast)))
    slow = {at: value * 20 for at, value in known["ttft"].items()}
    assert any(
        "headroom predict" in text
        for text in attacks.check_agreement(asked, _with(plan, latencies={**known, "ttft": slow}))
    )
    assert any(
        "TTFT is stated" in text
        for text in attacks.check_promises(asked, _with(plan, latencies={**known, "ttft": slow}))
    )
    four = replace(
        deployment,
        layout=replace(deployment.layout, replicas=4 // deployment.layout.gpus_per_replica),
    )
    dear = replace(
        plan.chosen,
        deployment=four,
        prediction=replace(plan.chosen.prediction, usd_per_hour_interval=Interval.from_value(9.99)),
    )
    assert deployment.layout.num_gpus < 4 and attacks.check_nothing_cheaper(
        asked, replace(plan, chosen=dear)
    )
    busy = replace(asked, workload=asked.workload.with_rate(60.0))
    assert any("takes" in text for text in attacks.check_promises(busy, plan))
