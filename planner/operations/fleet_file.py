"""`planner fleet`: scenarios that share a stock of GPUs, from a YAML file to a table for the terminal."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from planner.core.catalog import Entry, check, read_yaml
from planner.core.quantities import PlannerError, aligned
from planner.facts.gpus import gpu
from planner.planning.candidate import Candidate, describe
from planner.planning.fleet import Fleet, Option, allocate, in_the_way, worth
from planner.planning.scenario import MOST_GPUS, CandidateGpu, Positive, Scenario, load_scenario, scenario_path
from planner.planning.search import search

MOST_OF_A_KIND = 512
"""GPUs of one kind that candidates are looked for on: more than the stock, as a load may be split over kinds."""


class FleetEntry(Entry):
    """A fleet file: scenarios, the GPUs of each kind that there are, and what all may cost and draw."""

    scenarios: Annotated[tuple[str, ...], Field(min_length=1)]
    stock: Annotated[dict[str, Annotated[int, Field(ge=0, le=MOST_GPUS)]], Field(min_length=1)]
    usd_per_hour_at_most: Positive | None = None
    power_at_most: Positive | None = None
    growth: Annotated[float, Field(gt=1, le=100)] = 1.3


def fleet_file(path: Path) -> str:
    """The table of the fleet in a YAML file, to which scenarios' paths are relative; `PlannerError` for wrong ones."""
    entry = check(FleetEntry, read_yaml(path), path.name)
    asked: dict[str, Scenario] = {}
    for name in entry.scenarios:
        one = load_scenario(scenario_path(name, path.parent))
        if one.name in asked:
            raise PlannerError(f"{path.name}: two scenarios are called {one.name}; name their files differently")
        asked[one.name] = one
    stock: dict[str, int] = {}
    for name, many in entry.stock.items():
        if (kind := gpu(name).name) in stock:
            raise PlannerError(f"{path.name}, field stock: {kind} is given twice, the second time as {name}")
        stock[kind] = many

    def fleet(factor: float) -> Fleet:
        """With every load so many times as large, and candidates searched for that."""
        loaded = {name: replace(one, workload=one.workload.times(factor)) for name, one in asked.items()}
        options = {name: [option for kind in stock for option in options_of(one, kind)] for name, one in loaded.items()}
        return Fleet(options, stock, entry.usd_per_hour_at_most or math.inf, entry.power_at_most or math.inf)

    return told(fleet(1.0), fleet(entry.growth), entry.growth)


def options_of(asked: Scenario, kind: str) -> list[Option]:
    """What a scenario may run on GPUs of one kind: all that its search replayed and that keeps its service level.

    A replica of a candidate that needs n of them serves a share of 1/n, wherever the rest of the load is served.
    """
    own = next((card for card in asked.gpus if card.gpu.name == kind), None)
    card = replace(own or CandidateGpu(gpu(kind), 1), at_most=MOST_OF_A_KIND)
    plan = search(replace(asked, gpus=(card,)))
    return [_option(found) for found in plan.candidates if found.meets and found.stated]


def _option(found: Candidate) -> Option:
    one, replicas = found.deployment, found.deployment.layout.replicas
    if found.usd_per_hour is None:
        raise PlannerError(f"no price is known for {one.gpu.name}: give the scenarios prices: {{{one.gpu.name}: ...}}")
    watts = found.prediction.watts
    return Option(
        describe(one.with_replicas(1)), one.gpu.name, math.ceil(one.gpus_rented / replicas),
        found.usd_per_hour / replicas, watts.mid / replicas if watts else 0.0, 1 / replicas,
    )  # fmt: skip


def told(fleet: Fleet, later: Fleet, factor: float) -> str:
    """The answer in a table and a few lines: now, with one GPU more, and with every load `factor` times as large."""
    now, then = allocate(fleet), allocate(later)
    if now is None:
        lines = [f"Nothing serves every scenario; in the way: {_in_the_way(fleet)}"]
    else:
        rows = [("scenario", "replicas", "USD/h", "share", "each of them")]
        for name, some in now.replicas.items():
            for one, many in some.items():
                rows.append((name, f"{many}", f"{many * one.usd_per_hour:,.2f}", f"{many * one.share:.0%}", one.what))
        used = ", ".join(f"{now.gpus.get(kind, 0)} of {many} {kind}" for kind, many in fleet.stock.items())
        saved = ", ".join(f"{kind} ${usd:,.2f}" for kind, usd in worth(fleet, now).items())
        lines = [
            aligned(rows),
            f"Together ${now.usd_per_hour:,.2f} per hour and {now.watts:,.0f} W on average; in use: {used}",
            f"One more GPU would save per hour: {saved}",
        ]
    after = f"${then.usd_per_hour:,.2f} per hour" if then else f"not served; in the way: {_in_the_way(later)}"
    return "\n".join([*lines, f"With {factor:g} times every load: {after}"])


def _in_the_way(fleet: Fleet) -> str:
    without = [name for name, some in fleet.options.items() if not some]
    return f"no GPU of the stock serves {', '.join(without)}" if without else ", ".join(in_the_way(fleet))
