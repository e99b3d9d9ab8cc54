"""A fleet's replicas: as cheap as trying every combination, within all limits."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from pypdf import PdfReader
from shipped import plan_once

from planner.core.errors import PlannerError
from planner.planning.scenario import load_scenario
from planner.tools.fleet import fleet_file
from planner.tools.fleet import tables as fleet_tables
from planner.tools.fleet.allocation import (
    Allocation,
    Fleet,
    FleetChoice,
    FleetOption,
    FleetPlan,
    allocate_replicas,
    choose_safest,
    compute_shadow_prices,
    find_binding_limits,
    find_max_growth,
)
from planner.tools.fleet.fleet_file import format_fleet_plan, plan_fleet
from planner.ui import pdf_report as report
from planner.ui.charts import fleet as charts

KINDS = ("L4", "H100-SXM")


def random_fleet(seed: int) -> Fleet:
    """Two or three scenarios with two or three options each, on a small stock, some with a budget or a power limit."""
    rng = np.random.default_rng(seed)

    def option(k: int) -> FleetOption:
        gpus = int(rng.choice([1, 2]))
        usd = round(gpus * float(rng.uniform(0.5, 3)), 2)
        return FleetOption(
            f"option {k}",
            str(rng.choice(KINDS)),
            gpus,
            usd,
            300.0 * gpus,
            float(rng.uniform(0.3, 1.2)),
        )

    options = {
        f"scenario {k}": [option(j) for j in range(rng.integers(2, 4))]
        for k in range(rng.integers(2, 4))
    }
    stock = {kind: int(rng.integers(2, 7)) for kind in KINDS}
    budget = float(rng.uniform(5, 15)) if rng.random() < 0.4 else math.inf
    power = float(rng.uniform(1000, 3000)) if rng.random() < 0.4 else math.inf
    return Fleet(options, stock, budget, power)


def cheapest(fleet: Fleet) -> float:
    """The least cost of all combinations; infinite where none serves every load within the limits."""
    flat = [(name, option) for name, some in fleet.options.items() for option in some]
    sizes = [
        range(min(fleet.stock[option.gpu] // option.gpus, math.ceil(1 / option.load_fraction)) + 1)
        for _, option in flat
    ]
    counts = np.array(list(product(*sizes)))
    served = [
        counts @ [o.load_fraction * (name == one) for name, o in flat] >= 1 for one in fleet.options
    ]
    stocked = [
        counts @ [o.gpus * (o.gpu == kind) for _, o in flat] <= fleet.stock[kind] for kind in KINDS
    ]
    cost, watts = (
        counts @ [getattr(o, field) for _, o in flat] for field in ("usd_per_hour", "watts")
    )
    legal = np.all([*served, *stocked, cost <= fleet.budget, watts <= fleet.power], axis=0)
    return float(cost[legal].min()) if legal.any() else math.inf


def cost(found: Allocation | None) -> float:
    return found.usd_per_hour if found else math.inf


@pytest.mark.parametrize("seed", range(20))
def test_no_combination_is_cheaper(seed: int) -> None:
    fleet = random_fleet(seed)
    found = allocate_replicas(fleet)
    assert cost(found) == pytest.approx(cheapest(fleet))
    if found:
        assert all(many <= fleet.stock[kind] for kind, many in found.gpus_by_kind.items())
        assert found.watts <= fleet.power
        for some in found.replicas.values():
            assert sum(option.load_fraction * many for option, many in some.items()) >= 1 - 1e-6
        now = cheapest(fleet)
        assert compute_shadow_prices(fleet, found) == pytest.approx(
            {
                kind: now - cheapest(fleet.with_gpus(kind, 1))
                for kind in compute_shadow_prices(fleet, found)
            }
        )


def test_random_fleets_are_of_both_kinds() -> None:
    solvable = [math.isfinite(cheapest(random_fleet(seed))) for seed in range(20)]
    assert 5 <= sum(solvable) <= 19


def test_a_scenario_is_split_over_kinds_where_one_runs_out() -> None:
    cheap, dear = (
        FleetOption("a", "L4", 1, 1.0, 70.0, 0.25),
        FleetOption("b", "H100-SXM", 1, 3.0, 500.0, 0.5),
    )
    fleet = Fleet({"chat": [cheap, dear]}, {"L4": 2, "H100-SXM": 2})
    found = allocate_replicas(fleet)
    assert found and found.replicas == {"chat": {cheap: 2, dear: 1}}
    assert compute_shadow_prices(fleet, found) == {
        "H100-SXM": 0.0,
        "L4": 0.0,
    }  # a third L4 still leaves a quarter to an H100
    assert cost(allocate_replicas(fleet.with_gpus("L4", 2))) == 4.0


def test_replicas_that_could_do_more_draw_what_their_load_asks_for() -> None:
    one = FleetOption("1 x L4", "L4", 1, 0.84, 70.0, 0.8, power_curve=((0.0, 20.0), (0.5, 60.0)))
    for factor, watts in ((1.0, 2 * 62.5), (1.6, 2 * 70.0), (0.8, 70.0), (0.4, 60.0), (0.2, 40.0)):
        found = allocate_replicas(Fleet({"some": [one]}, {"L4": 4}).with_growth(factor))
        assert found and found.watts == pytest.approx(watts)


def test_of_options_at_one_price_the_first_runs() -> None:
    same = [
        FleetOption(what, "L4", 1, 0.84, 70.0, share)
        for what, share in (("bfloat16", 1.0), ("awq", 3.0))
    ]
    for options in (same, same[::-1]):
        found = allocate_replicas(Fleet({"chat": options}, {"L4": 4}))
        assert found and found.replicas == {"chat": {options[0]: 1}}


def test_what_is_in_the_way_is_each_limit_that_alone_would_do() -> None:
    loads = {"chat": [FleetOption("a", "L4", 1, 1.0, 70.0, 0.2)]}
    assert allocate_replicas(Fleet(loads, {"L4": 5}, budget=5.0, power=350.0))
    assert find_binding_limits(Fleet(loads, {"L4": 4}, budget=10.0)) == ("stock of L4",)
    assert find_binding_limits(Fleet(loads, {"L4": 9}, budget=4.0)) == ("budget",)
    assert find_binding_limits(Fleet(loads, {"L4": 9}, power=349.0)) == ("power",)
    assert find_binding_limits(Fleet(loads, {"L4": 4}, budget=4.0)) == ("all of them together",)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_within_the_limits_is_safer(seed: int) -> None:
    rng, fleet = np.random.default_rng(seed), random_fleet(seed)
    choices = {
        name: [
            FleetChoice({option: int(rng.integers(1, 3))}, float(rng.uniform(0.8, 0.99)))
            for option in options
        ]
        for name, options in fleet.options.items()
    }

    def probability(together: tuple[FleetChoice, ...]) -> float:
        found = Allocation({str(k): choice.replicas for k, choice in enumerate(together)})
        legal = all(many <= fleet.stock[kind] for kind, many in found.gpus_by_kind.items())
        legal &= found.usd_per_hour <= fleet.budget
        legal &= sum(choice.alone.watts for choice in together) <= fleet.power
        return legal * math.prod(choice.probability for choice in together)

    most = max(map(probability, product(*choices.values())))
    found = choose_safest(fleet, choices)
    assert (0 if found is None else probability(tuple(found.values()))) == pytest.approx(most)


def test_gpus_of_ones_own_are_used_first_and_as_few_as_do() -> None:
    own, rented = (
        FleetOption("a", "H100-SXM", 2, 0.0, 700.0, 1.0),
        FleetOption("b", "L4", 1, 0.84, 70.0, 1.0),
    )
    fewer = FleetOption("c", "H100-SXM", 1, 0.0, 700.0, 1.0)
    fleet = Fleet(
        {"chat": [rented, own, fewer]}, {"L4": 4, "H100-SXM": 2}, owned=frozenset({"H100-SXM"})
    )
    found = allocate_replicas(fleet)
    assert found and found.replicas == {"chat": {fewer: 1}}


def test_idle_gpus_make_what_runs_safer_where_they_are_owned_and_else_it_is_named(
    tmp_path: Path,
) -> None:
    """The safer option of the scenario's own plan is what GPUs that are left are for."""
    path = tmp_path / "fleet.yaml"
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {L4: 4}\n")
    rented = plan_fleet(path)
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {L4: 4}\nowned: [L4]\n")
    owned = plan_fleet(path)
    assert rented.current_allocation and rented.safer and owned.current_allocation
    odds = [
        fleet.get_probability(found, "edge-8b-24gb")
        for fleet, found in (
            (rented, rented.current_allocation), (rented, rented.safer),
            (owned, owned.current_allocation),
        )
    ]  # fmt: skip
    plan = plan_once(load_scenario("edge-8b-24gb", {"gpus": [{"gpu": "L4", "at_most": 4}]}))
    assert odds[0] == pytest.approx(plan.probability) and odds[0] < odds[1] == odds[2]
    assert owned.current_allocation.gpus_by_kind == rented.safer.gpus_by_kind
    assert owned.current_allocation.usd_per_hour == 0 < rented.current_allocation.usd_per_hour
    said = format_fleet_plan(rented)
    assert "Safer, with the" in said and f"{odds[1]:.0%} likely" in said
    said = format_fleet_plan(owned)
    assert "owned L4" in said and "$" not in said and "Safer" not in said
    (part,) = owned.plans.values()
    assert part.probability == odds[2] and part.chosen
    assert part.chosen.deployment.num_gpus == owned.current_allocation.gpus_by_kind["L4"]
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {L4: 4}\nowned: [L40S]\n")
    with pytest.raises(PlannerError, match="stock does not name L40S"):
        plan_fleet(path)


def test_a_fleet_of_one_scenario_is_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {L4: 2, RTX-4090: 1}\n")
    gpus = [{"gpu": "L4", "at_most": 2}, {"gpu": "RTX-4090", "at_most": 1}]
    plan = plan_once(load_scenario("edge-8b-24gb", {"gpus": gpus}))
    assert plan.chosen
    found = plan_fleet(path)
    said = format_fleet_plan(found)
    assert said.startswith(f"Every scenario is served for ${plan.chosen.usd_per_hour:,.2f}/h")
    assert (
        found.current_allocation and found.grown_allocation and plan.chosen.prediction.total_power_w
    )
    assert found.current_allocation.watts == pytest.approx(
        plan.chosen.prediction.total_power_w.mid, rel=0.01
    ), "today's load, not a grown one"
    assert found.current_allocation.watts < found.grown_allocation.watts
    # a load that no search was asked about
    busier = replace(plan.scenario, workload=plan.scenario.workload.scale(4.0))
    chosen, grown = plan_once(busier).chosen, found.fleet.with_growth(4.0)
    assert chosen and cost(allocate_replicas(grown)) == pytest.approx(chosen.usd_per_hour)
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {L4: 0}\n")
    assert "Limited by stock of L4" in format_fleet_plan(plan_fleet(path))
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {H100: 8, H100-SXM: 2}\n")
    with pytest.raises(PlannerError, match="H100-SXM is given twice"):
        plan_fleet(path)
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {L4: many}\n")
    with pytest.raises(PlannerError, match=r"stock\.L4"):
        plan_fleet(path)


def test_a_replica_takes_as_much_more_of_a_job_as_its_deadline_leaves() -> None:
    """A search for so much more finds it safe with one replica, and beyond that not any more."""
    gpus = [{"gpu": "L4", "at_most": 4}]
    small = {"model": "meta-llama/Llama-3.1-8B-Instruct", "workload.requests": 20_000, "gpus": gpus}
    asked = load_scenario("offline-batch", small)
    most = max(fleet_file.generate_fleet_options(asked, "L4"), key=lambda one: one.load_fraction)
    assert most.load_fraction > 1.2 and not most.at_risk
    alone = replace(asked, gpus=(replace(asked.gpus[0], max_gpus=most.gpus),))
    for times, safe in ((0.99 * most.load_fraction, True), (1.2 * most.load_fraction, False)):
        chosen = plan_once(replace(alone, workload=asked.workload.scale(times))).chosen
        assert (chosen is not None and not chosen.at_risk) == safe


@pytest.mark.parametrize("seed", range(0, 20, 3))
def test_loads_grow_as_far_as_no_combination_fails(seed: int) -> None:
    fleet = random_fleet(seed)
    most = find_max_growth(fleet, limit=4)
    if math.isnan(most):
        assert math.isinf(cheapest(fleet))
    elif math.isinf(most):
        assert math.isfinite(cheapest(fleet.with_growth(4)))
    else:
        assert math.isfinite(cheapest(fleet.with_growth(most))) and math.isinf(
            cheapest(fleet.with_growth(most + 0.01))
        )
        assert min(find_max_growth(fleet, {name}, limit=4) for name in fleet.options) >= most


def shared_stock() -> FleetPlan:
    small = FleetOption("1 x L4", "L4", 1, 0.84, 70.0, 0.6)
    large = FleetOption("1 x H100-SXM", "H100-SXM", 1, 3.0, 700.0, 0.5, at_risk=True)
    fleet = Fleet({"edge-8b-24gb": [small], "code-completion": [large]}, {"L4": 4, "H100-SXM": 2})
    return FleetPlan("ours", {name: load_scenario(name) for name in fleet.options}, fleet, 1.3)


def test_what_breaks_first_is_told() -> None:
    plan = shared_stock()
    assert plan.current_allocation and plan.current_allocation.usd_per_hour == pytest.approx(
        2 * 0.84 + 2 * 3.0
    )
    said = format_fleet_plan(plan)
    assert (
        "With 1.3 times every load: not served. The largest growth is 1.00 times, limited by stock of"
        " H100-SXM." in said
    )
    assert "At risk: code-completion" in said
    assert plan.max_growth_alone == pytest.approx({"edge-8b-24gb": 2.4, "code-completion": 1.0})
    assert fleet_tables.build_growth_limit_table(plan)["scenario"][0] == "code-completion"
    more = fleet_tables.build_shadow_price_table(plan).set_index("GPU")[
        "and every load may grow to"
    ]
    assert more.to_dict() == {"L4": "not at all", "H100-SXM": "1.50 times"}
    used = fleet_tables.build_gpu_usage_table(plan).groupby("GPU")["GPUs"].sum()
    assert used.to_dict() == dict(plan.fleet.stock)
    (bars,) = charts.plot_fleet_stock(plan).to_dict()["datasets"].values()
    assert {(row["GPU"], row["who"]): row["GPUs"] for row in bars}["L4", "edge-8b-24gb"] == 2
    larger = replace(plan, fleet=plan.fleet.with_gpus("H100-SXM", 2))
    steps = fleet_tables.build_growth_step_table(larger)
    assert list(steps["every load, times"]) == ["1.00", "1.01", "1.21", "1.51"]
    assert list(steps["GPUs"]) == [4, 5, 6, 7]
    costs = fleet_tables.sweep_fleet_growth(larger)["USD per hour"]
    assert costs.is_monotonic_increasing and costs[0] == pytest.approx(
        plan.current_allocation.usd_per_hour
    )


@pytest.mark.slow
def test_a_fleet_is_a_pdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = shared_stock()
    monkeypatch.setattr(fleet_file, "plan_fleet", lambda *_: plan)
    pdf, is_served = report.write_fleet_report(tmp_path / "ours.yaml", tmp_path / "out")
    assert is_served
    text = " ".join(" ".join(page.extract_text() for page in PdfReader(pdf).pages).split())
    assert plan.current_allocation
    for words in (
        "ours",
        "One more GPU",
        "what breaks first",
        "Figure 2",
        f"{plan.current_allocation.usd_per_hour:,.2f}/h",
        "1.50 times",
    ):
        assert words in text


@pytest.mark.parametrize("seed", range(0, 20, 5))
def test_what_serves_a_larger_load_as_well_stays_the_cheapest(seed: int) -> None:
    plan = FleetPlan("", {}, random_fleet(seed), 1.5)
    for load, found in plan.growth_allocations[::9]:
        assert found.usd_per_hour == pytest.approx(cheapest(plan.fleet.with_growth(load)))
