"""`planner fleet`: scenarios that share a stock of GPUs, from a YAML file to a table for the terminal."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError
from planner.core.readers import read_yaml
from planner.core.text import format_columns
from planner.hardware.gpus import get_gpu
from planner.latency.power import estimate_board_power
from planner.planning.autoscaling import find_max_replica_load
from planner.planning.candidate import Candidate, describe_deployment
from planner.planning.evaluation import compute_offered_rps, get_capacity_rps
from planner.planning.prediction import IDLE_ACTIVITY
from planner.planning.scenario import CandidateGpu, Scenario, find_scenario_file, load_scenario
from planner.planning.scenario_schema import MAX_GPUS_PER_KIND, PositiveNumber
from planner.planning.search import search_deployments
from planner.tools.fleet import tables as tables
from planner.tools.fleet.allocation import Fleet, FleetOption, FleetPlan

MAX_CANDIDATE_GPUS_PER_KIND = 512
"""GPUs of one kind that candidates are looked for on: more than the stock, as a load may be split over kinds."""


class FleetEntry(StrictEntry):
    """A fleet file: scenarios, the GPUs of each kind that there are, and what all may cost and draw."""

    scenarios: Annotated[tuple[str, ...], Field(min_length=1)]
    stock: Annotated[
        dict[str, Annotated[int, Field(ge=0, le=MAX_GPUS_PER_KIND)]], Field(min_length=1)
    ]
    usd_per_hour_at_most: PositiveNumber | None = None
    power_at_most: PositiveNumber | None = None
    growth: Annotated[float, Field(gt=1, le=100)] = 1.3


def plan_fleet(
    path: Path, progress: Callable[[int, int], None] = lambda _done, _of: None
) -> FleetPlan:
    """The fleet of a YAML file, to which scenarios' paths are relative; `PlannerError` for wrong ones.

    Candidates are searched for today's load and for the one that has grown; a replica serves as
    much of today's as it did with either. `progress` is told how many searches are done, and of how
    many.
    """
    entry = validate_entry(FleetEntry, read_yaml(path), path.name)
    asked: dict[str, Scenario] = {}
    for name in entry.scenarios:
        scenario = load_scenario(find_scenario_file(name, path.parent))
        if scenario.name in asked:
            raise PlannerError(
                f"{path.name}: two scenarios are called {scenario.name}; name their files"
                " differently"
            )
        asked[scenario.name] = scenario
    stock: dict[str, int] = {}
    for name, many in entry.stock.items():
        if (kind := get_gpu(name).name) in stock:
            raise PlannerError(
                f"{path.name}, field stock: {kind} is given twice, the second time as {name}"
            )
        stock[kind] = many
    options: dict[str, dict[str, FleetOption]] = {name: {} for name in asked}
    drawn: dict[tuple[str, str], set[tuple[float, float]]] = defaultdict(set)
    searches = [
        (name, kind, factor) for name in asked for kind in stock for factor in (1.0, entry.growth)
    ]
    for done, (name, kind, factor) in enumerate(searches):
        progress(done, len(searches))
        loaded = replace(asked[name], workload=asked[name].workload.scale(factor))
        for option in generate_fleet_options(loaded, kind, known_names=[*options[name]]):
            fleet_option = replace(option, load_fraction=option.load_fraction * factor)
            drawn[name, fleet_option.description] |= {
                (fleet_option.load_fraction, fleet_option.watts)
            }
            best = options[name].get(fleet_option.description)
            if best is None or (best.at_risk, -best.load_fraction) > (
                fleet_option.at_risk,
                -fleet_option.load_fraction,
            ):
                options[name][fleet_option.description] = fleet_option
    progress(len(searches), len(searches))
    fleet = Fleet(
        {name: [_with_power_curve(one, drawn[name, one.description]) for one in some.values()] for name, some in options.items()},
        stock,
        entry.usd_per_hour_at_most or math.inf, entry.power_at_most or math.inf,
    )  # fmt: skip
    return FleetPlan(path.stem, asked, fleet, entry.growth)


def generate_fleet_options(
    scenario: Scenario, kind: str, known_names: Collection[str] = ()
) -> list[FleetOption]:
    """What a scenario may run on GPUs of one kind: all that its search replayed and that keeps its service level.

    A replica of a candidate that needs n of them serves a share of 1/n, wherever the rest of the
    load is served; of an load that is open or has a deadline as much more as it keeps the level
    with, no more at risk, where not yet `known`.
    """
    own = next(
        (candidate_gpu for candidate_gpu in scenario.gpus if candidate_gpu.gpu.name == kind), None
    )
    card = replace(own or CandidateGpu(get_gpu(kind), 1), max_gpus=MAX_CANDIDATE_GPUS_PER_KIND)
    plan = search_deployments(replace(scenario, gpus=(card,), daily_profile=None))
    holding = [
        candidate
        for candidate in plan.without_disaggregation.candidates
        if candidate.is_feasible and candidate.is_simulated
    ]
    return [
        option
        for found in holding
        for option in _build_replica_options(scenario, found, known_names)
    ]


def _build_replica_options(
    scenario: Scenario, candidate: Candidate, known_names: Collection[str]
) -> Iterator[FleetOption]:
    deployment, replicas, watts = (
        candidate.deployment,
        candidate.deployment.layout.replicas,
        candidate.prediction.total_power_w,
    )
    if candidate.usd_per_hour is None:
        raise PlannerError(
            f"no price is known for {deployment.gpu.name}: give the scenarios prices:"
            f" {{{deployment.gpu.name}: ...}}"
        )
    option = FleetOption(
        describe_deployment(deployment.with_replicas(1)), deployment.gpu.name,
        math.ceil(deployment.num_gpus_billed / replicas),
        candidate.usd_per_hour / replicas, watts.mid / replicas if watts else 0.0, 1 / replicas,
        candidate.at_risk,
    )  # fmt: skip
    yield option
    if (
        option.description not in known_names
        and (more := _find_max_replica_load(scenario, candidate))
        and more[0] > option.load_fraction
    ):
        yield replace(option, load_fraction=more[0], watts=more[1] or option.watts)


def _find_max_replica_load(
    scenario: Scenario, candidate: Candidate
) -> tuple[float, float | None] | None:
    """The most of the load that a replica of `found` serves, and W with that; None where users wait, or for a trace."""
    performance, replicas = candidate.prediction.performance, candidate.deployment.layout.replicas
    if scenario.offline and performance and (interval := get_capacity_rps(scenario, performance)):
        most = interval.mid * (1 - scenario.headroom)  # so many requests/s whatever the job
        most = most if candidate.at_risk else min(most, interval.lo)
        return most / compute_offered_rps(scenario, candidate.prediction) / replicas, None
    if scenario.offline or scenario.workload.trace or not scenario.workload.rate:
        return None
    prediction = find_max_replica_load(scenario, candidate, safe=not candidate.at_risk)
    assert prediction.workload is not None and prediction.workload.rate is not None
    return (
        prediction.workload.rate / scenario.workload.rate,
        prediction.total_power_w.mid if prediction.total_power_w else None,
    )


def _with_power_curve(option: FleetOption, drawn: set[tuple[float, float]]) -> FleetOption:
    """`one` with the W that it has `drawn` with less of the load, and what it draws without any."""
    idle = estimate_board_power(get_gpu(option.gpu), IDLE_ACTIVITY).mid * option.gpus
    parts = (
        (share / option.load_fraction, watts)
        for share, watts in drawn
        if share < option.load_fraction
    )
    return replace(option, power_curve=((0.0, idle), *sorted(parts)))


def format_fleet_plan(plan: FleetPlan) -> str:
    """The answer in a table and a few lines: now, with one GPU more, and when every load grows."""
    rented = tables.build_allocation_table(plan)
    rows = [
        tuple(rented.columns),
        *(tuple(map(str, row)) for row in rented.itertuples(index=False)),
    ]
    sentences = [
        tables.summarize_fleet(plan),
        tables.describe_shadow_prices(plan),
        tables.describe_growth(plan),
    ]
    return "\n".join(
        [format_columns(rows)] * bool(len(rented)) + [line for line in sentences if line]
    )
