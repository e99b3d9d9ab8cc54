"""Plan scenarios that share a stock of GPUs, from a YAML file to a table for the terminal."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError
from planner.core.progress import get_progress_watch, is_out_of_time, try_each
from planner.core.readers import read_yaml
from planner.core.text import format_columns
from planner.hardware.gpus import get_gpu
from planner.latency.power import estimate_board_power
from planner.planning.autoscaling import find_max_replica_load
from planner.planning.candidate import PROBABILITY_TIE, Candidate, describe_deployment
from planner.planning.max_load import find_max_load
from planner.planning.prediction import IDLE_ACTIVITY
from planner.planning.scenario import CandidateGpu, Scenario, find_scenario_file, load_scenario
from planner.planning.scenario_schema import MAX_GPUS_PER_KIND, PositiveNumber
from planner.planning.search import Plan, search_deployments
from planner.planning.tolerance import state_deployment
from planner.tools.fleet import tables
from planner.tools.fleet.allocation import (
    Allocation,
    Fleet,
    FleetChoice,
    FleetOption,
    FleetPlan,
    allocate_replicas,
    choose_safest,
)

MAX_CANDIDATE_GPUS_PER_KIND = 512
"""GPUs per kind in the search for candidates: more than the stock, as kinds can share a load."""


class FleetEntry(StrictEntry):
    """A fleet file: scenarios, the stock of GPUs by kind, and the limits of cost and power."""

    scenarios: Annotated[tuple[str, ...], Field(min_length=1)]
    stock: Annotated[
        dict[str, Annotated[int, Field(ge=0, le=MAX_GPUS_PER_KIND)]], Field(min_length=1)
    ]
    owned: tuple[str, ...] = ()
    usd_per_hour_at_most: PositiveNumber | None = None
    power_at_most: PositiveNumber | None = None
    growth: Annotated[float, Field(gt=1, le=100)] = 1.3


def plan_fleet(path: Path) -> FleetPlan:
    """Plan the fleet in a YAML file, to which the paths of scenarios are relative.

    Candidates are searched for today's load and for the grown one; a replica then serves the larger
    of both loads. Those for which there is no time are left out. Raises `PlannerError` for a file
    that cannot be used.
    """
    entry = validate_entry(FleetEntry, read_yaml(path), path.name)
    scenarios: dict[str, Scenario] = {}
    for name in entry.scenarios:
        scenario = load_scenario(find_scenario_file(name, path.parent))
        if scenario.name in scenarios:
            raise PlannerError(
                f"{path.name}: two scenarios are called {scenario.name}; name their files"
                " differently"
            )
        scenarios[scenario.name] = scenario
    stock: dict[str, int] = {}
    for name, count in entry.stock.items():
        if (kind := get_gpu(name).name) in stock:
            raise PlannerError(
                f"{path.name}, field stock: {kind} is given twice, the second time as {name}"
            )
        stock[kind] = count
    owned = frozenset(get_gpu(name).name for name in entry.owned)
    if unknown := ", ".join(sorted(owned - {*stock})):
        raise PlannerError(f"{path.name}, field owned: stock does not name {unknown}")
    wholes: dict[str, dict[tuple[str, int], FleetOption]] = {name: {} for name in scenarios}
    options: dict[str, dict[str, FleetOption]] = {name: {} for name in scenarios}
    # (load fraction, W) of every option, by scenario and description
    load_watts: dict[tuple[str, str], set[tuple[float, float]]] = defaultdict(set)
    searches = {
        f"{name} on {kind}, {factor:g} times the load": (name, kind, factor)
        for name in scenarios
        for kind in stock
        for factor in (1.0, entry.growth)
    }

    def search(case: tuple[str, str, float]) -> list[FleetOption] | None:
        name, kind, factor = case
        scenario = scenarios[name]
        scaled = replace(scenario, workload=scenario.workload.scale(factor))
        found = generate_fleet_options(
            scaled, kind, known_names=[*options[name]], is_owned=kind in owned
        )
        return None if is_out_of_time() else found

    for title, found in try_each(search, searches, "searches"):
        name, _, factor = searches[title]
        for option in found or ():
            if factor == 1 and option.plan and option.plan.chosen:
                replicas = option.plan.chosen.deployment.layout.replicas
                wholes[name].setdefault((option.description, replicas), option)
            option = replace(option, load_fraction=option.load_fraction * factor)
            load_watts[name, option.description].add((option.load_fraction, option.watts))
            best = options[name].get(option.description)
            if best is None or (best.at_risk, -best.load_fraction) > (
                option.at_risk,
                -option.load_fraction,
            ):
                options[name][option.description] = option
    fleet = Fleet(
        {
            name: [
                _with_power_curve(option, load_watts[name, description])
                for description, option in scenario_options.items()
            ]
            for name, scenario_options in options.items()
        },
        stock,
        entry.usd_per_hour_at_most or math.inf,
        entry.power_at_most or math.inf,
        owned,
    )
    same_cost, safer, judged = _judge_allocation(fleet, scenarios, wholes)
    left_out = get_progress_watch().describe_left_out()
    return FleetPlan(path.stem, scenarios, fleet, entry.growth, left_out, same_cost, safer, judged)


def _judge_allocation(
    fleet: Fleet,
    scenarios: Mapping[str, Scenario],
    wholes: Mapping[str, Mapping[tuple[str, int], FleetOption]],
) -> tuple[Allocation | None, Allocation | None, dict[tuple[str, FleetOption, int], Plan]]:
    """Return the safest replicas at the cheapest one's cost, safer ones, and the plans of all.

    Safer are those plans of a whole load that the searches found and that fit into the stock.
    """
    cheapest = allocate_replicas(fleet)
    if cheapest is None:
        return None, None, {}
    # the searches' choices, as the replicas that the programme counts
    judged: dict[tuple[str, FleetOption, int], Plan] = {
        (name, option, count): whole.plan
        for name, plans in wholes.items()
        for (description, count), whole in plans.items()
        for option in fleet.options[name]
        if option.description == description and whole.plan
    }
    safe = {key: plan.probability for key, plan in judged.items()}
    for name, replicas in cheapest.replicas.items():
        served = Allocation({name: replicas}).load_factor
        for option, count in replicas.items():
            share = option.load_fraction * count / served
            known = judged.get((name, option, count))
            if (base := known or option.plan) and (share < 1 or not known) and not is_out_of_time():
                judged[name, option, count] = _judge_share(scenarios[name], base, share, count)
    plan = FleetPlan("", scenarios, fleet, 1.0, judged=judged)
    choices: dict[str, list[FleetChoice]] = {}
    for name, replicas in cheapest.replicas.items():
        own = plan.get_probability(cheapest, name)
        choices[name] = [FleetChoice(replicas, 1.0 if math.isnan(own) else own)]
        choices[name] += [
            FleetChoice({option: count}, probability)
            for (scenario, option, count), probability in safe.items()
            if scenario == name and probability >= own + PROBABILITY_TIE
        ]
    found: list[Allocation | None] = []
    for budget in (cheapest.usd_per_hour, fleet.budget):
        safest = choose_safest(replace(fleet, budget=budget), choices)
        found.append(
            Allocation({name: choice.replicas for name, choice in safest.items()})
            if safest
            else cheapest
        )
    same_cost, safer = found
    return same_cost, None if safer == same_cost else safer, judged


def _judge_share(scenario: Scenario, plan: Plan, share: float, replicas: int) -> Plan:
    """Return `plan` with so many replicas of its choice, simulated at a share of the load."""
    assert plan.chosen is not None
    load = scenario.workload if share == 1 else scenario.workload.scale(share)
    part = replace(plan.scenario, workload=load)
    deployment = plan.chosen.deployment.with_replicas(replicas)
    return _choose(replace(plan, scenario=part), state_deployment(part, deployment))


def _choose(plan: Plan, candidate: Candidate) -> Plan:
    """Return `plan` as if the search had chosen `candidate`."""
    others = (each for each in plan.candidates if each is not candidate)
    return replace(plan, chosen=candidate, candidates=(candidate, *others))


def generate_fleet_options(
    scenario: Scenario, kind: str, known_names: Collection[str] = (), *, is_owned: bool = False
) -> list[FleetOption]:
    """Return the replicas of a scenario on GPUs of one kind: all that are simulated and feasible.

    A replica of a candidate with n replicas serves 1/n of the load. For an open loop or a deadline
    there is a second option with its largest load that is as feasible, unless the candidate is in
    `known_names`. GPUs of one's own cost nothing more.
    """
    candidate_gpu = next(
        (gpu for gpu in scenario.gpus if gpu.gpu.name == kind), CandidateGpu(get_gpu(kind), 1)
    )
    most = replace(candidate_gpu, max_gpus=MAX_CANDIDATE_GPUS_PER_KIND)
    plan = search_deployments(replace(scenario, gpus=(most,), daily_profile=None))
    return [
        option
        for candidate in plan.without_disaggregation.candidates
        if candidate.is_confident and candidate.is_simulated
        for option in _build_replica_options(plan, candidate, known_names, is_owned=is_owned)
    ]


def _build_replica_options(
    plan: Plan, candidate: Candidate, known_names: Collection[str], *, is_owned: bool
) -> Iterator[FleetOption]:
    """Yield the option of a replica at its part of the load, then the one at its largest load."""
    scenario, usd = plan.scenario, 0.0 if is_owned else candidate.usd_per_hour
    deployment, watts = candidate.deployment, candidate.prediction.total_power_w
    replicas = deployment.layout.replicas
    if usd is None:
        raise PlannerError(
            f"no price is known for {deployment.gpu.name}: give the scenarios prices:"
            f" {{{deployment.gpu.name}: ...}}, or the fleet owned: [{deployment.gpu.name}]"
        )
    option = FleetOption(
        description=describe_deployment(deployment.with_replicas(1)),
        gpu=deployment.gpu.name,
        gpus=math.ceil(deployment.num_gpus_billed / replicas),
        usd_per_hour=usd / replicas,
        watts=watts.mid / replicas if watts else 0.0,
        load_fraction=1 / replicas,
        at_risk=candidate.at_risk,
        plan=_choose(plan, candidate),
    )
    yield option
    if (
        option.description not in known_names
        and (max_load := _find_max_replica_load(scenario, candidate))
        and max_load[0] > option.load_fraction
    ):
        yield replace(option, load_fraction=max_load[0], watts=max_load[1] or option.watts)


def _find_max_replica_load(
    scenario: Scenario, candidate: Candidate
) -> tuple[float, float | None] | None:
    """Return a replica's largest load fraction and its W; None for closed loops and traces."""
    if scenario.workload.trace or not scenario.workload.rate:
        return None
    if scenario.offline:
        probability = 0.0 if candidate.at_risk else scenario.confidence
        most = find_max_load(scenario, candidate.deployment, probability)
        return most / scenario.workload.rate / candidate.deployment.layout.replicas, None
    prediction = find_max_replica_load(scenario, candidate)
    assert prediction.workload is not None and prediction.workload.rate is not None
    return (
        prediction.workload.rate / scenario.workload.rate,
        prediction.total_power_w.mid if prediction.total_power_w else None,
    )


def _with_power_curve(option: FleetOption, load_watts: set[tuple[float, float]]) -> FleetOption:
    """Return `option` with its power at zero and at the smaller ones of (load fraction, W)."""
    idle_w = estimate_board_power(get_gpu(option.gpu), IDLE_ACTIVITY).mid * option.gpus
    points = (
        (fraction / option.load_fraction, watts)
        for fraction, watts in load_watts
        if fraction < option.load_fraction
    )
    return replace(option, power_curve=((0.0, idle_w), *sorted(points)))


def format_fleet_plan(plan: FleetPlan) -> str:
    """Return the finding, the allocation as a table, then growth and what one more GPU saves."""
    table = tables.build_allocation_table(plan)
    rows = [tuple(table.columns), *(tuple(map(str, row)) for row in table.itertuples(index=False))]
    parts = [
        tables.summarize_fleet(plan),
        format_columns(rows) if len(table) else "",
        "\n".join(
            filter(
                None,
                [
                    tables.describe_safer(plan),
                    tables.describe_growth(plan),
                    tables.describe_shadow_prices(plan),
                ],
            )
        ),
        f"Left out: {plan.left_out}." if plan.left_out else "",
    ]
    return "\n\n".join(filter(None, parts))
