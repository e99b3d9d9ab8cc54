"""How sure a choice is: laws of the draws on candidates with planted intervals, and on searched plans."""

import re
from dataclasses import replace

import pytest
from shipped import answer_of, plan_once, small_plan

from planner.answers import serialize_answer
from planner.core.intervals import Interval
from planner.hardware.prices import PriceSelection
from planner.planning.candidate import Candidate
from planner.planning.confidence import ChoiceConfidence, estimate_choice_confidence
from planner.planning.evaluation import check_against_slos
from planner.planning.search import Plan
from planner.ui.plan_files import write_plan_files
from planner.ui.plan_text import format_answer


def searched(rate: float = 9) -> Plan:
    fields = {"engine_version": "0.33.0", "quantization": ["checkpoint", "fp8"]}
    return small_plan({**fields, "workload.rate": rate})


def planted(
    candidate: Candidate, capacity: float, usd: float, sigma: float = 0.1, **layout: int
) -> Candidate:
    """`candidate` that is fast enough, and serves `capacity` requests/s at most for `usd` an hour."""
    prediction = candidate.prediction
    assert prediction.performance
    fast = dict.fromkeys(prediction.performance.ttft, Interval.from_lognormal(0.01, sigma))
    served = replace(
        prediction.performance,
        ttft=fast,
        tpot=fast,
        capacity=Interval.from_lognormal(capacity, sigma),
        saturated=False,
    )
    deployment = replace(
        candidate.deployment, layout=replace(candidate.deployment.layout, **layout)
    )
    found = replace(
        prediction,
        deployment=deployment,
        performance=served,
        usd_per_hour_interval=Interval.from_value(usd),
    )
    return check_against_slos(searched().scenario, found, candidate.preference_key)


def sure(*candidates: Candidate) -> ChoiceConfidence:
    cheapest = min(candidates, key=lambda each: each.cost_key)
    plan = replace(searched(), candidates=candidates, chosen=candidates[0], gamble=cheapest)
    found = estimate_choice_confidence(plan)
    assert found and found == estimate_choice_confidence(
        replace(plan, candidates=candidates[::-1])
    )  # whatever the order
    return found


def like() -> Candidate:
    chosen = searched().chosen
    assert chosen
    return chosen


ENOUGH = 9 / 0.8  # requests/s that leave the asked fifth free


def test_without_a_rival_near_the_choice_is_certain() -> None:
    found = sure(
        planted(like(), 3 * ENOUGH, 1.0),
        planted(like(), ENOUGH / 3, 0.5, tp=2),
        planted(like(), 99, 9.0, tp=4),
    )
    assert found.p_unchanged == 1.0 and found.best_benchmark is None and found.alternatives == ()
    assert found.p_infeasible < 0.01


def test_of_two_at_one_price_that_both_hold_the_order_stays() -> None:
    found = sure(planted(like(), 2 * ENOUGH, 1.0, tp=1), planted(like(), 2 * ENOUGH, 1.0, tp=2))
    assert found.p_unchanged == 1.0 and found.p_equal_cost == 0.0


def test_at_the_edge_of_its_capacity_it_holds_in_half_of_the_draws() -> None:
    """And a benchmark of it is what tells: the headroom is one of the promises."""
    found = sure(planted(like(), ENOUGH, 1.0), planted(like(), 9 * ENOUGH, 2.0, tp=2))
    assert found.p_unchanged == pytest.approx(0.5, abs=0.05) and found.p_costlier == pytest.approx(
        1 - found.p_unchanged
    )
    assert found.p_infeasible == pytest.approx(0.5, abs=0.05)
    assert (
        found.best_benchmark
        and found.best_benchmark[0].deployment.layout.tp == 1
        and found.best_benchmark[1] == pytest.approx(0.5, abs=0.05)
    )


def test_a_cheaper_one_just_short_is_worth_a_benchmark() -> None:
    """It lacks one standard deviation: 16% of the draws; the chosen one is far from any limit."""
    found = sure(planted(like(), 9 * ENOUGH, 2.0, tp=2), planted(like(), ENOUGH / 1.105, 1.0, tp=1))
    assert (
        found.p_cheaper == pytest.approx(0.16, abs=0.03)
        and found.best_benchmark
        and found.best_benchmark[0].deployment.layout.tp == 1
    )
    assert found.best_benchmark[1] == pytest.approx(found.p_cheaper, abs=0.02)


def test_narrower_intervals_make_it_surer() -> None:
    def stays(sigma: float) -> float:
        return sure(
            planted(like(), 1.1 * ENOUGH, 1.0, sigma), planted(like(), 9 * ENOUGH, 2.0, sigma, tp=2)
        ).p_unchanged

    assert stays(0.02) > stays(0.1) + 0.1 > stays(0.5) + 0.1


def test_errors_that_two_layouts_share_do_not_part_them() -> None:
    """On one GPU a rival that serves 5% less fails with the plan; most of what is unknown moves both."""
    found = sure(planted(like(), ENOUGH, 1.0, 0.3), planted(like(), 0.95 * ENOUGH, 1.0, 0.3, tp=2))
    assert 0.35 < found.p_unchanged < 0.6 and found.p_costlier > 0.3


def test_prices_of_all_times_two_change_nothing() -> None:
    plan = searched()
    prices = PriceSelection(
        {"L40S": 2 * (plan.chosen.usd_per_hour or 0) / plan.chosen.deployment.num_gpus_billed}
    )  # type: ignore[union-attr]
    twice = estimate_choice_confidence(plan_once(replace(plan.scenario, prices=prices)))
    once = estimate_choice_confidence(plan)
    assert (
        twice
        and once
        and (twice.p_unchanged, twice.p_cheaper, twice.p_infeasible)
        == (once.p_unchanged, once.p_cheaper, once.p_infeasible)
    )


def test_a_plan_says_it_and_its_folder_holds_what_to_measure_first(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = searched()
    found, said = estimate_choice_confidence(plan), serialize_answer(answer_of(plan))["confidence"]
    assert found and said["stays"] == found.p_unchanged
    assert said["stays"] + said["cheaper"] + said["alike"] + said["dearer"] == pytest.approx(1)
    text = re.search(r"choice would be (.*)", format_answer(answer_of(plan), detailed=True))
    shares = list(map(int, re.findall(r"(\d+)%", text[1]))) if text else []
    assert sum(shares) == 100 and shares[0] == pytest.approx(100 * found.p_unchanged, abs=1)
    measured = replace(plan, candidates=tuple(planted(c, ENOUGH / 1.05, 0.5) if c is plan.runner_up else c
                                              for c in plan.candidates))  # fmt: skip
    first = serialize_answer(answer_of(measured))["confidence"]["measure_first"]
    assert first["changes_the_choice"] > 0.1
    write_plan_files(answer_of(measured), tmp_path)
    assert all((tmp_path / name).exists() for name in first["files"]) and first["files"]
    runner_up = plan.runner_up
    script = tmp_path / ("measure/bench.sh" if (tmp_path / "measure").exists() else "bench.sh")
    assert runner_up and runner_up.deployment.gpu.name in script.read_text()
    write_plan_files(answer_of(plan_once(replace(searched(1).scenario, slo_targets=()))), tmp_path)
    assert not (tmp_path / "measure").exists()


def test_a_benchmark_changes_the_choice_as_often_as_its_own_plan_turns_out_to_hold() -> None:
    """What costs half and holds in 60 of 100 cases is chosen in as many, once it has been measured."""
    chosen, *_ = (c for c in searched().candidates if c.is_confident)
    sure_one = planted(chosen, 10 * ENOUGH, 2.0, tp=2)
    likely = planted(chosen, ENOUGH * 1.025, 1.0)
    assert 0.55 < likely.probability < 0.65
    found = sure(sure_one, likely)
    _, share = next(each for each in found.benchmark_values if each[0] is likely)
    assert share == pytest.approx(likely.probability, abs=0.12) and found.p_cheaper > 0.5


def test_what_is_measured_first_is_on_the_page_and_can_save_its_price() -> None:
    """Of two that may cost less, that which is an option; one that is none is not measured."""
    chosen = planted(like(), 9 * ENOUGH, 2.0, tp=4)
    option, other = planted(like(), ENOUGH, 0.5, tp=1), planted(like(), ENOUGH, 1.0, tp=2)
    plan = replace(
        searched(), candidates=(chosen, option, other), chosen=chosen, runner_up=None, safe=None
    )
    for gamble in (option, other):
        found = estimate_choice_confidence(replace(plan, gamble=gamble))
        assert found and found.best_benchmark
        measured = [each for each, _ in found.benchmark_values if each is not chosen]
        assert measured == [gamble] and found.best_benchmark[0] is gamble


def test_one_replica_is_priced_in_the_machines_that_are_for_rent() -> None:
    """A replica of two GPUs needs all eight where only machines of eight are sold; a spare is not measured."""
    one = like()
    two = replace(one.deployment.with_replicas(2), spare_replicas=1)
    assert replace(one, deployment=two).replica_share == pytest.approx(1 / 3)
    whole = replace(two, machine_sizes=(8,))
    assert replace(one, deployment=whole).replica_share == 1.0
