"""A fleet: as cheap as trying every combination, within all limits, and each member where no other is."""

import math
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml
from pypdf import PdfReader
from shipped import plan_once, small_fields, small_plan, small_scenario

from planner.core.catalog import CATALOG_DIR
from planner.core.errors import PlannerError
from planner.core.number_format import format_usd
from planner.deploy import render_artifacts
from planner.tools.fleet import allocation
from planner.tools.fleet import tables as fleet_tables
from planner.tools.fleet.allocation import (
    FleetEntry,
    FleetOption,
    FleetPlan,
    allocate_stock,
    build_member_plans,
    find_max_growth,
    plan_fleet,
)
from planner.ui import pdf_report as report

KINDS = ("L40S", "H100-SXM")
CENT = 0.01


def option(
    gpu: str, gpus: int, usd: float, most: float = 1.0, p: float = 0.9, watts: float = 0.0
) -> FleetOption:
    plan = small_plan()
    assert plan.chosen
    own = replace(plan.chosen.deployment, machine_sizes=())
    return FleetOption(plan, replace(plan.chosen, deployment=own), gpu, gpus, usd, watts, p, most)


def fleet(
    options: dict[str, list[FleetOption]], stock: dict[str, int], **limits: object
) -> FleetPlan:
    entry = FleetEntry.model_validate({"scenarios": [*options], "stock": stock, **limits})
    return FleetPlan(entry, dict.fromkeys(options, small_scenario()), options)


def random_fleet(seed: int) -> FleetPlan:
    """Two or three scenarios with up to three options each on a small stock, some with limits."""
    rng = np.random.default_rng(seed)

    def draw() -> FleetOption:
        gpus, each = int(rng.choice([1, 2])), float(rng.uniform(0.5, 3))
        most, p = float(rng.uniform(1, 2)), float(rng.uniform(0.8, 1))
        return option(str(rng.choice(KINDS)), gpus, round(gpus * each, 2), most, p, 300.0 * gpus)

    options = {
        f"s{k}": [draw() for _ in range(rng.integers(1, 4))] for k in range(rng.integers(2, 4))
    }
    limits = {
        "usd_per_month_at_most": float(rng.uniform(4, 12)) * 730.5,
        "power_at_most": float(rng.uniform(1000, 3000)),
    }
    stock = {kind: int(rng.integers(1, 6)) for kind in KINDS}
    return fleet(options, stock, **{name: limits[name] for name in limits if rng.random() < 0.4})


def list_costs(plan: FleetPlan, load: float) -> Iterator[float]:
    """The cost of every combination that keeps all limits, counted by hand."""
    for chosen in product(*plan.options.values()):
        counts = [math.ceil(load / one.max_load - 1e-9) for one in chosen]
        used = dict.fromkeys(KINDS, 0)
        for one, count in zip(chosen, counts, strict=True):
            used[one.gpu] += one.gpus * count
        usd = sum(one.usd_per_hour * count for one, count in zip(chosen, counts, strict=True))
        watts = sum(one.watts * max(count, load) for one, count in zip(chosen, counts, strict=True))
        entry = plan.entry
        if (
            all(used[kind] <= entry.stock[kind] for kind in KINDS)
            and usd * 730.5 <= entry.usd_per_month_at_most
            and watts <= entry.power_at_most
        ):
            yield usd


@pytest.mark.parametrize("seed", range(16))
def test_no_combination_is_cheaper(seed: int) -> None:
    plan = random_fleet(seed)
    for load in (1.0, 1.6):
        found, costs = allocate_stock(plan, load), [*list_costs(plan, load)]
        assert bool(found) == bool(costs)
        if found:
            assert sum(one.usd_per_hour for one in found.values()) <= min(costs) + CENT
    if plan.current:
        most = find_max_growth(plan)
        assert [*list_costs(plan, most)] and not [*list_costs(plan, most + 0.01)]
        assert min(find_max_growth(plan, {name}) for name in plan.options) >= most


def test_random_fleets_are_of_both_kinds() -> None:
    served = [random_fleet(seed).current is not None for seed in range(16)]
    assert 4 <= sum(served) <= 12


def test_of_equal_prices_the_most_probable_runs_then_the_smallest() -> None:
    likely, other = option("L40S", 2, 3.0, p=0.95), option("L40S", 2, 3.0, p=0.85)
    small = option("L40S", 1, 3.0, p=0.95)
    for options in ([likely, other], [other, likely]):
        assert fleet({"chat": options}, {"L40S": 4}).current == {"chat": likely}
    assert fleet({"chat": [likely, small]}, {"L40S": 4}).current == {"chat": small}


def test_what_breaks_first_is_told() -> None:
    plan = fleet(
        {"edge": [option("L40S", 1, 2.0, 1.2)], "code": [option("H100-SXM", 1, 3.0)]},
        {"L40S": 2, "H100-SXM": 1}, growth=2.0,
    )  # fmt: skip
    said = fleet_tables.format_fleet_plan(plan)
    assert "2 times every load: not served" in said and "largest growth is 1.00 times" in said
    assert "the limit is the stock of H100-SXM." in said
    alone = fleet_tables.build_growth_limit_table(plan)
    assert [*alone.itertuples(index=False, name=None)] == [
        ("code", "1.00 times"),
        ("edge", "2.40 times"),
    ]
    more = fleet_tables.build_shadow_price_table(plan)["and every load may grow to"]
    assert [*more] == ["1.00 times", "2.00 times"]
    larger = plan.with_limits(stock={"L40S": 4, "H100-SXM": 4})
    steps = fleet_tables.build_growth_step_table(larger)
    assert [*steps["every load, times"]] == [1.0, 1.0, 1.2, 2.0, 2.4]
    assert [*steps["GPUs"]] == [2, 3, 4, 5, 6] and steps["USD/month"].is_monotonic_increasing
    used = fleet_tables.build_gpu_usage_table(plan).groupby("GPU")["GPUs"].sum()
    assert used.to_dict() == plan.entry.stock
    for limit in ({"usd_per_month_at_most": 2920.0}, {"power_at_most": 9.0}):
        one = fleet({"edge": [option("L40S", 1, 5.0, watts=9.5)]}, {"L40S": 1}, **limit)
        assert one.current is None
        named = "the budget" if "usd_per_month_at_most" in limit else "the power"
        assert fleet_tables.summarize_fleet(one).endswith(f"the limit is {named}.")


def test_members_lie_beside_each_other_on_machines() -> None:
    """No GPU is used twice; whatever fits a machine lies in one, and the stock is enough for all."""
    sizes = {"a": 2, "b": 12, "c": 1, "d": 4, "e": 5}
    options = {name: [option("L40S", gpus, 1.0)] for name, gpus in sizes.items()}
    plan = fleet(options, {"L40S": sum(sizes.values())}, owned=["L40S"])
    begins = {}
    for name, member in build_member_plans(plan).items():
        assert member.chosen and member.best is member.chosen
        assert member.chosen.prediction.deployment == member.chosen.deployment
        assert member.chosen.deployment.gpus_per_node == 8
        begins[name] = member.chosen.deployment.first_gpu
    # machines: b; the rest of b and d; e, a and c
    assert begins == {"b": 0, "e": 0, "d": 4, "a": 5, "c": 7}


def test_a_fleet_is_its_scenarios_plans_side_by_side(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(small_fields()))
    path = tmp_path / "fleet.yaml"
    path.write_text("scenarios: [./a.yaml, ./b.yaml]\nstock: {L40S: 8, H100: 0}\n")
    plan, alone = plan_fleet(path), small_plan()
    assert alone.chosen and alone.chosen.usd_per_hour and alone.chosen.prediction.total_power_w
    gpus = alone.chosen.deployment.num_gpus
    rented = [member.chosen for member in build_member_plans(plan).values()]
    own = alone.chosen.deployment
    assert [
        each and (each.deployment.gpu.name, each.deployment.layout, each.deployment.args)
        for each in rented
    ] == 2 * [(own.gpu.name, own.layout, own.args)]
    said = fleet_tables.format_fleet_plan(plan)
    assert said.startswith(
        f"Every scenario is served for {format_usd(2 * alone.chosen.usd_per_hour * 730.5)}/month"
    )
    assert f"{2 * alone.chosen.prediction.total_power_w.mid:,.0f} W" in said
    assert f"on {2 * gpus} of 8 L40S, 0 of 0 H100-SXM" in said
    assert plan.entry.stock == {"L40S": 8, "H100-SXM": 0}
    # a busier day is served by what the plan of that day would rent, or by little more
    chosen = plan_once(small_scenario({"workload.rate": 9 * 1.3, "gpus.0.at_most": 8})).chosen
    grown = allocate_stock(plan, 1.3, ["a"])
    assert chosen and chosen.usd_per_hour and grown
    assert chosen.usd_per_hour - CENT <= grown["a"].usd_per_hour <= 1.5 * chosen.usd_per_hour
    # on a machine of one's own they lie beside each other
    path.write_text(f"{path.read_text()}owned: [L40S]\n")
    owned = plan_fleet(path)
    assert "rented" not in fleet_tables.format_fleet_plan(owned)
    stub = tmp_path / "vllm"
    stub.write_text('#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES $*"\n')
    stub.chmod(0o755)
    taken: list[str] = []
    ports: list[int] = []
    for member in build_member_plans(owned).values():
        assert member.chosen
        files = render_artifacts(
            member.chosen.prediction, member.scenario.slo_targets, wanted=("script", "compose")
        )
        (tmp_path / "serve.sh").write_text(files["serve.sh"])
        composed = yaml.safe_load(files["compose.yaml"])["services"]
        for replica in range(member.chosen.deployment.num_replicas):
            started = subprocess.run(
                ["bash", str(tmp_path / "serve.sh"), str(replica)], check=True, text=True,
                env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True,
            ).stdout.split()  # fmt: skip
            taken += started[0].split(",")
            ports.append(int(started[started.index("--port") + 1]))
            assert str(composed[f"serve-{replica}"]["ports"][0]).startswith(f"{ports[-1]}:")
    used = sum(option.gpus for option in (owned.current or {}).values())
    assert used >= 2 * gpus and sorted(taken) == sorted(map(str, range(used)))
    assert len({*ports}) == len(ports) and min(ports) == 8000


def test_idle_gpus_of_ones_own_make_it_safer(tmp_path: Path) -> None:
    path, edge = tmp_path / "fleet.yaml", tmp_path / "edge.yaml"
    shipped = (CATALOG_DIR / "scenarios" / "edge-8b-24gb.yaml").read_text(encoding="utf-8")
    edge.write_text(shipped.replace("rate: 0.55", "rate: 2.6"))
    path.write_text("scenarios: [edge.yaml]\nstock: {L4: 4}\n")
    rented = plan_fleet(path)
    path.write_text("scenarios: [edge.yaml]\nstock: {L4: 4}\nowned: [L4]\n")
    owned = plan_fleet(path)
    assert rented.current and owned.current
    before, after = (each.current["edge"] for each in (rented, owned) if each.current)
    assert before.gpus < after.gpus and before.probability < after.probability
    assert before.usd_per_hour > after.usd_per_hour == 0
    safer = fleet_tables.describe_safer(rented)
    assert "Safer" in safer and f"edge on {after.gpus} x L4" in safer
    assert not fleet_tables.describe_safer(owned)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("stock: {H100: 8, H100-SXM: 2}", "given twice"),
        ("stock: {L4: many}", r"stock\.L4"),
        ("stock: {L4: 4}\nowned: [L40S]", "stock does not name L40S"),
        ("stock: {L4: 4}\nscenarios: [edge-8b-24gb, edge-8b-24gb]", "name their files"),
    ],
)
def test_a_wrong_file_is_refused(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text if "scenarios" in text else f"scenarios: [edge-8b-24gb]\n{text}")
    with pytest.raises(PlannerError, match=error):
        plan_fleet(path)


def test_a_stock_that_serves_nobody_is_told(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("scenarios: [edge-8b-24gb]\nstock: {L4: 0}\n")
    assert "no GPU of the stock serves edge-8b-24gb" in fleet_tables.format_fleet_plan(
        plan_fleet(path)
    )


@pytest.mark.slow
def test_a_fleet_is_a_pdf_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fleet({"one": [option("L40S", 2, 3.72, 1.5)]}, {"L40S": 8})
    monkeypatch.setattr(allocation, "plan_fleet", lambda *_: plan)
    pdf, is_served = report.write_fleet_report(tmp_path / "ours.yaml", tmp_path / "out")
    assert is_served
    text = " ".join(" ".join(page.extract_text() for page in PdfReader(pdf).pages).split())
    for words in (
        "ours",
        "One more GPU",
        "what breaks first",
        "Figure 2",
        "$2,720/month",
        "2 of 8 L40S",
    ):
        assert words in text
    assert (tmp_path / "out" / "one" / "serve.sh").is_file()
