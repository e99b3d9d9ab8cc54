"""Attacks on the shipped plans, on random questions, on what comes in and on what is written: a sample of each."""

import attack_decision
import attack_inputs
import attack_kills
import attack_plans
import pytest
from shipped import plan_of, sampled

from planner.planning.scenario import list_scenarios

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", sampled((1, 5, 7, 48, 54, 68, 99), (48, 68)))
def test_a_random_question_finds_no_guarantee_broken(seed: int) -> None:
    """Seven of the hundred of `attack_decision.py`."""
    assert attack_decision.attack(seed, ("verdict", "neighbours", "alone", "harder"))[2] == []


@pytest.mark.parametrize("seed", sampled((2, 3, 4, 6, 7, 10, 11), (3, 4)))
def test_nothing_that_is_pinned_is_cheaper(seed: int) -> None:
    """A layout, a format and an argument fixed by hand, and half or twice the requests and tokens of a step."""
    assert attack_decision.attack(seed, ("pinned", "halves"))[2] == []


@pytest.mark.parametrize("name", sampled(list_scenarios(), ["edge-8b-24gb"]))
def test_an_adversary_finds_no_second_value(name: str) -> None:
    plan = plan_of(name)
    checks = attack_plans.check_agreement, attack_plans.check_figures
    assert [wrong for check in checks for wrong in check(plan.scenario, plan)] == []


@pytest.mark.parametrize("seeds", sampled([range(10), range(10, 100)], [range(10)]), ids=str)
@pytest.mark.parametrize("door", sorted(attack_inputs.DOORS))
def test_hostile_inputs_are_answered_or_refused(door: str, seeds: range) -> None:
    attack_inputs.ready()
    assert [wrong for seed in seeds if (wrong := attack_inputs.attacked(door, seed)[1])] == []


@pytest.mark.parametrize("command", sampled(attack_kills.QUICK, ["replay"]))
def test_commands_stopped_at_random_moments(command: str) -> None:
    assert attack_kills.attacked(command, 3)[1] == []
