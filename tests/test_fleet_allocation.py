"""A fleet's replicas: as cheap as trying every combination, within all limits."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from planner.core.quantities import PlannerError
from planner.operations.fleet_file import fleet_file
from planner.planning.fleet import Allocation, Fleet, Option, allocate, in_the_way, worth
from planner.planning.scenario import load_scenario
from planner.planning.search import search

KINDS = ("L4", "H100-SXM")


def random_fleet(seed: int) -> Fleet:
    """Two or three scenarios with two or three options each, on a small stock, some with a budget or a power limit."""
    rng = np.random.default_rng(seed)

    def option(k: int) -> Option:
        gpus = int(rng.choice([1, 2]))
        usd = round(gpus * float(rng.uniform(0.5, 3)), 2)
        return Option(f"option {k}", str(rng.choice(KINDS)), gpus, usd, 300.0 * gpus, float(rng.uniform(0.3, 1.2)))

    options = {f"scenario {k}": [option(j) for j in range(rng.integers(2, 4))] for k in range(rng.integers(2, 4))}
    stock = {kind: int(rng.integers(2, 7)) for kind in KINDS}
    budget = float(rng.uniform(5, 15)) if rng.random() < 0.4 else math.inf
    power = float(rng.uniform(1000, 3000)) if rng.random() < 0.4 else math.inf
    return Fleet(options, stock, budget, power)


def cheapest(fleet: Fleet) -> float:
    """The least cost of all combinations; infinite where none serves every load within the limits."""
    flat = [(name, option) for name, some in fleet.options.items() for option in some]
    sizes = [range(min(fleet.stock[option.gpu] // option.gpus, math.ceil(1 / option.share)) + 1) for _, option in flat]
    counts = np.array(list(product(*sizes)))
    served = [counts @ [o.share * (name == one) for name, o in flat] >= 1 for one in fleet.options]
    stocked = [counts @ [o.gpus * (o.gpu == kind) for _, o in flat] <= fleet.stock[kind] for kind in KINDS]
    cost, watts = (counts @ [getattr(o, field) for _, o in flat] for field in ("usd_per_hour", "watts"))
    legal = np.all([*served, *stocked, cost <= fleet.budget, watts <= fleet.power], axis=0)
    return float(cost[legal].min()) if legal.any() else math.inf


def cost(found: Allocation | None) -> float:
    return found.usd_per_hour if found else math.inf


@pytest.mark.parametrize("seed", range(20))
def test_no_combination_is_cheaper(seed: int) -> None:
    fleet = random_fleet(seed)
    found = allocate(fleet)
    assert cost(found) == pytest.approx(cheapest(fleet))
    if found:
        assert all(many <= fleet.stock[kind] for kind, many in found.gpus.items())
        assert found.watts <= fleet.power
        for some in found.replicas.values():
            assert sum(option.share * many for option, many in some.items()) >= 1 - 1e-6
        now = cheapest(fleet)
        assert worth(fleet, found) == pytest.approx(
            {kind: now - cheapest(fleet.with_gpus(kind, 1)) for kind in worth(fleet, found)}
        )


def test_random_fleets_are_of_both_kinds() -> None:
    solvable = [math.isfinite(cheapest(random_fleet(seed))) for seed in range(20)]
    assert 5 <= sum(solvable) <= 19


def test_a_scenario_is_split_over_kinds_where_one_runs_out() -> None:
    cheap, dear = Option("a", "L4", 1, 1.0, 70.0, 0.25), Option("b", "H100-SXM", 1, 3.0, 500.0, 0.5)
    fleet = Fleet({"chat": [cheap, dear]}, {"L4": 2, "H100-SXM": 2})
    found = allocate(fleet)
    assert found and found.replicas == {"chat": {cheap: 2, dear: 1}}
    assert worth(fleet, found) == {"H100-SXM": 0.0, "L4": 0.0}  # a third L4 still leaves a quarter to an H100
    assert cost(allocate(fleet.with_gpus("L4", 2))) == 4.0


def test_what_is_in_the_way_is_each_limit_that_alone_would_do() -> None:
    loads = {"chat": [Option("a", "L4", 1, 1.0, 70.0, 0.2)]}
    assert allocate(Fleet(loads, {"L4": 5}, budget=5.0, power=350.0))
    assert in_the_way(Fleet(loads, {"L4": 4}, budget=10.0)) == ("stock of L4",)
    assert in_the_way(Fleet(loads, {"L4": 9}, budget=4.0)) == ("budget",)
    assert in_the_way(Fleet(loads, {"L4": 9}, power=349.0)) == ("power",)
    assert in_the_way(Fleet(loads, {"L4": 4}, budget=4.0)) == ("all of them together",)


def test_a_fleet_of_one_scenario_is_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {L4: 2, RTX-4090: 1}\n")
    gpus = [{"gpu": "L4", "at_most": 2}, {"gpu": "RTX-4090", "at_most": 1}]
    plan = search(load_scenario("edge-8b-24gb", {"gpus": gpus}))
    assert plan.chosen
    assert f"Together ${plan.chosen.usd_per_hour:,.2f} per hour" in fleet_file(path)
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {L4: 0}\n")
    assert "in the way: stock of L4" in fleet_file(path)
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {H100: 8, H100-SXM: 2}\n")
    with pytest.raises(PlannerError, match="H100-SXM is given twice"):
        fleet_file(path)
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {L4: many}\n")
    with pytest.raises(PlannerError, match=r"stock\.L4"):
        fleet_file(path)
