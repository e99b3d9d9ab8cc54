"""What is worth a benchmark before anything is rented: its odds are its own plan's, its saving is of the bills."""

from functools import cache
from typing import Any

import pytest
from shipped import answer_of, small_plan

from planner.answers import Answer, serialize_answer
from planner.hardware.prices import HOURS_PER_MONTH, look_up_gpu_price
from planner.planning.plan import Plan
from planner.planning.what_if import find_measure_first, pin_candidate
from planner.ui.plan_files import write_plan_files
from planner.ui.plan_text import format_answer

FIELDS: dict[str, Any] = {
    "quantization": ["fp8"], "layout": {"tp": 1, "pp": 1}, "gpus.0.at_most": 6,
    "service_level": {"ttft": {"p95": 2000}, "tpot": {"p95": 60}},
}  # fmt: skip


@cache
def find_plan_worth_measuring() -> Plan:
    """A load of which a replica less holds, but not as probably as asked."""
    for rate in range(8, 40):
        plan = small_plan({**FIELDS, "workload.rate": rate})
        if plan.gamble and plan.gamble.probability < 0.78:
            return plan
    raise AssertionError


def measured() -> Answer:
    return answer_of(find_plan_worth_measuring())


def test_its_odds_are_what_plan_says_when_it_is_pinned() -> None:
    """The pinned scenario is written by hand: so many GPUs, nothing else."""
    plan, first = find_plan_worth_measuring(), measured().measure_first
    assert first and plan.chosen
    count = first.num_gpus
    assert count < plan.chosen.deployment.num_gpus
    pinned = small_plan(
        {**FIELDS, "workload.rate": plan.scenario.workload.rate, "gpus.0.at_most": count}
    )
    assert pinned.best and pinned.best.deployment.num_gpus == count
    assert first.probability == pytest.approx(pinned.probability, abs=1e-9)
    alone = pin_candidate(plan.scenario, pinned.best)
    assert [each.max_gpus for each in alone.gpus] == [count]


def test_no_cheaper_plan_with_a_fair_chance_is_worth_more() -> None:
    """Of all numbers of GPUs below the plan's, each planned alone, none has a larger product."""
    plan, first = find_plan_worth_measuring(), measured().measure_first
    assert first and plan.chosen
    own, worth = plan.chosen.usd_per_hour or 0, []
    for count in range(1, plan.chosen.deployment.num_gpus):
        fields = {**FIELDS, "workload.rate": plan.scenario.workload.rate, "gpus.0.at_most": count}
        alone = small_plan(fields).best
        if alone and alone.probability >= 0.25 and (alone.usd_per_hour or 0) <= 0.95 * own:
            worth.append(alone.probability * (own - (alone.usd_per_hour or 0)))
    chance = first.probability * (own - (first.usd_per_hour or 0))
    assert chance == pytest.approx(max(worth), rel=0.02)


def test_what_it_saves_and_costs_follows_from_the_price_of_a_gpu_hour(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan, answer = find_plan_worth_measuring(), measured()
    first = answer.measure_first
    assert first and plan.chosen
    price = look_up_gpu_price(first.deployment.gpu, plan.scenario.prices)
    assert price
    fewer = plan.chosen.deployment.num_gpus - first.num_gpus
    assert answer.saved_usd == pytest.approx(fewer * price.median_usd * HOURS_PER_MONTH)
    said = serialize_answer(answer)["measure_first"]
    assert said["benchmark_usd"] == pytest.approx(24 * price.median_usd)  # TP1: one GPU for a day
    assert said["saves_usd_per_month"] == answer.saved_usd
    assert said["probability"] == round(first.probability, 4)
    write_plan_files(answer, tmp_path)
    files = answer.measure_files
    assert files and all((tmp_path / name).exists() for name in files)
    script = (tmp_path / "measure/bench.sh").read_text()
    assert first.deployment.gpu.name in script


def test_nothing_is_named_where_all_that_is_cheaper_is_hopeless() -> None:
    """One GPU is all there is."""
    plan = small_plan({**FIELDS, "workload.rate": 2})
    assert plan.chosen and plan.chosen.deployment.num_gpus == 1
    assert find_measure_first(plan) is None
    answer = answer_of(plan)
    assert answer.measure_first is None and "Measure" not in format_answer(answer)
