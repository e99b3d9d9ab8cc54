"""Plan scenarios that share a stock of GPUs, under a budget and a power limit.

Of every scenario one option is chosen: a deployment that its plan found on one kind of GPU, with as
many replicas as its load needs. The choice is a mixed-integer linear program (HiGHS); what one more
GPU saves, growth and what limits it are solutions of the same program with one number changed.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

from planner.core.catalog import StrictEntry, validate_entry
from planner.core.errors import PlannerError
from planner.core.progress import get_progress_watch, is_out_of_time, try_each
from planner.core.readers import read_yaml
from planner.hardware.gpus import get_gpu
from planner.hardware.prices import HOURS_PER_MONTH
from planner.planning.candidate import Candidate
from planner.planning.max_load import find_max_load, get_figure, get_load_kind
from planner.planning.plan import Plan
from planner.planning.scenario import CandidateGpu, Scenario, find_scenario_file, load_scenario
from planner.planning.scenario_schema import MAX_GPUS_PER_KIND, PositiveNumber
from planner.planning.search import search_deployments

DOUBT_USD, GPU_USD, SAFER_PRICE_FACTOR = 0.01, 1e-5, 20
"""USD per hour that e times the probability and one GPU less are worth, to decide between equals; and
how many times its price such a fleet is worth to who asks what is safer: 1% more probable, 20% dearer."""
GROWTH_STEP, REPLICA_TOLERANCE = 0.01, 1e-6
"""Resolution of growth, in multiples of the load; replicas that count as none."""
GpuKind = Annotated[str, AfterValidator(lambda name: get_gpu(name).name)]


class FleetEntry(StrictEntry):
    """A fleet file: scenarios, the stock of GPUs by kind, and the limits of cost and power."""

    scenarios: Annotated[tuple[str, ...], Field(min_length=1)]
    stock: Annotated[
        dict[GpuKind, Annotated[int, Field(ge=0, le=MAX_GPUS_PER_KIND)]], Field(min_length=1)
    ]
    owned: tuple[GpuKind, ...] = ()
    usd_per_month_at_most: PositiveNumber = math.inf
    power_at_most: PositiveNumber = math.inf
    growth: Annotated[float, Field(gt=1, le=100)] = 1.3


@dataclass(frozen=True)
class FleetOption:
    """Replicas of a deployment of one scenario: what they take, and up to which load they do."""

    plan: Plan = field(compare=False, repr=False)  # for today's load
    candidate: Candidate = field(compare=False, repr=False)  # of that plan
    gpu: str
    gpus: int
    usd_per_hour: float
    watts: float
    probability: float  # of meeting every target under today's load
    max_load: float  # at which they do as probably as asked, in multiples of today's
    replicas: int = 1

    def scale_to(self, load: float) -> "FleetOption":
        """Return it with as many replicas more as a load needs; its W are then an upper bound."""
        replicas = math.ceil(self.replicas * load / self.max_load - REPLICA_TOLERANCE)
        more = max(replicas / self.replicas, 1.0)
        return replace(
            self, gpus=math.ceil(self.gpus * more), usd_per_hour=self.usd_per_hour * more,
            watts=self.watts * max(more, load), max_load=self.max_load * more,
            replicas=round(self.replicas * more),
        )  # fmt: skip


Allocation = Mapping[str, FleetOption]
"""The chosen option of every scenario, by name."""


@dataclass(frozen=True)
class FleetPlan:
    """A fleet file, its scenarios, and the options that each has."""

    entry: FleetEntry
    scenarios: Mapping[str, Scenario]
    options: Mapping[str, Sequence[FleetOption]]
    left_out: str = ""  # searches for which there was no time

    @cached_property
    def current(self) -> Allocation | None:
        """The cheapest allocation for today's loads; of equally cheap ones the most probable."""
        return allocate_stock(self)

    def count_used(self, gpu: str) -> int:
        """Count the GPUs of a kind that run."""
        return sum(option.gpus * (option.gpu == gpu) for option in (self.current or {}).values())

    def with_limits(self, **limits: object) -> "FleetPlan":
        """Return it with other fields of the fleet file."""
        return replace(self, entry=self.entry.model_copy(update=limits))


def plan_fleet(path: Path) -> FleetPlan:
    """Plan the fleet in a YAML file, to which the paths of scenarios are relative.

    Each scenario is planned on each kind of GPU; what there is no time for is left out. Raises
    `PlannerError` for a file that cannot be used.
    """
    content = read_yaml(path)
    entry = validate_entry(FleetEntry, content, path.name)
    if len(entry.stock) < len(content["stock"]):
        raise PlannerError(f"{path.name}, field stock: a kind is given twice in {content['stock']}")
    if unknown := ", ".join({*entry.owned} - {*entry.stock}):
        raise PlannerError(f"{path.name}, field owned: stock does not name {unknown}")
    loaded = [load_scenario(find_scenario_file(name, path.parent)) for name in entry.scenarios]
    scenarios = {scenario.name: scenario for scenario in loaded}
    if len(scenarios) < len(loaded):
        raise PlannerError(
            f"{path.name}: two scenarios have one name; name their files differently"
        )
    searches = {
        f"{scenario.name} on {kind}": (scenario, kind, count, kind in entry.owned)
        for scenario in loaded
        for kind, count in entry.stock.items()
        if count
    }
    found = dict(try_each(lambda case: plan_on_gpu(*case), searches, "searches"))
    options = {
        name: [
            option
            for title, (scenario, *_) in searches.items()
            if scenario.name == name
            for option in found[title] or ()
        ]
        for name in scenarios
    }
    return FleetPlan(entry, scenarios, options, get_progress_watch().describe_left_out())


def plan_on_gpu(
    scenario: Scenario, kind: str, count: int, is_owned: bool
) -> list[FleetOption] | None:
    """Plan a scenario on GPUs of one kind: the cheapest deployment, and the safe one if there is.

    GPUs of one's own cost nothing more. Returns None if there was no time for all of it.
    """
    named = next(
        (each for each in scenario.gpus if each.gpu.name == kind),
        CandidateGpu(get_gpu(kind), count),
    )
    # machines of one's own are not rented whole
    own: dict[str, Any] = {"gpu": replace(named.gpu, sold_in=()), "sold_in": ()} if is_owned else {}
    plan = search_deployments(
        replace(
            scenario,
            gpus=(replace(named, max_gpus=count, **own),),
            daily_profile=None,
            allow_disaggregation=False,
        )
    )
    today, options = get_figure(plan.scenario, get_load_kind(plan.scenario)), list[FleetOption]()
    found = {
        each.identity_key: each
        for each in (plan.chosen, plan.safe)
        if each and each.is_confident and each.is_simulated
    }
    for candidate in found.values():
        usd = 0.0 if is_owned else candidate.usd_per_hour
        if usd is None:
            raise PlannerError(
                f"no price is known for {kind}: give the scenarios prices: {{{kind}: ...}}, or the"
                f" fleet owned: [{kind}]"
            )
        power, deployment = candidate.prediction.total_power_w, candidate.deployment
        most = today if scenario.workload.trace else find_max_load(plan.scenario, candidate)
        options.append(
            FleetOption(
                plan, candidate, kind,
                deployment.num_gpus_billed, usd,
                power.mid if power else 0.0, candidate.probability, max(most / today, 1.0),
                deployment.layout.replicas,
            )
        )  # fmt: skip
    return None if is_out_of_time() else options


def allocate_stock(
    fleet: FleetPlan, load: float = 1.0, names: Collection[str] | None = None,
    doubt_usd: float = DOUBT_USD,
) -> Allocation | None:  # fmt: skip
    """Choose an option of every scenario, at least cost within stock, budget and power.

    The load of `names` (None: of all) is so many times today's. Returns None if no choice is within
    the limits; raises `PlannerError` if the solver does not know.
    """
    from scipy.optimize import LinearConstraint, milp

    if not all(fleet.options.values()):
        return None
    pairs = [
        (name, option.scale_to(load if names is None or name in names else 1.0))
        for name, options in fleet.options.items()
        for option in options
    ]
    usd, watts, doubts, gpus = np.array(
        [(o.usd_per_hour, o.watts, -math.log(max(o.probability, 1e-9)), o.gpus) for _, o in pairs]
    ).T
    one_each = [[name == own for name, _ in pairs] for own in fleet.options]
    used = [[o.gpus * (o.gpu == kind) for _, o in pairs] for kind in fleet.entry.stock]
    most = [fleet.entry.usd_per_month_at_most / HOURS_PER_MONTH, fleet.entry.power_at_most]
    result = milp(
        usd + doubt_usd * doubts + GPU_USD * gpus,
        integrality=1,
        bounds=(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint([*used, usd, watts], ub=[*fleet.entry.stock.values(), *most]),
        ],
        options={"mip_rel_gap": 0, "time_limit": 60},
    )
    if result.status not in (0, 2):
        raise PlannerError(f"the fleet's programme was not solved: {result.message}")
    chosen = np.zeros(len(pairs)) if result.x is None else result.x
    return {
        name: option for (name, option), n in zip(pairs, chosen, strict=True) if n > 0.5
    } or None


def find_max_growth(fleet: FleetPlan, names: Collection[str] | None = None) -> float:
    """Return the largest multiple of the load of `names` (None: of all) that is served, to 1%.

    It is less than 1 if today's load is not.
    """
    bound = max(
        option.max_load * fleet.entry.stock[option.gpu]
        for options in fleet.options.values()
        for option in options
    )
    steps = range(round(1 / GROWTH_STEP), round(bound / GROWTH_STEP) + 2)
    unserved = bisect_left(
        steps, True, key=lambda step: not allocate_stock(fleet, step * GROWTH_STEP, names)
    )
    return (steps[0] + unserved - 1) * GROWTH_STEP


def build_member_plans(fleet: FleetPlan) -> dict[str, Plan]:
    """Return the plan of each scenario's choice, which begins where those on its machine end.

    The largest is placed first; what is no larger than a machine lies on the first that has enough
    GPUs left. What is rented has machines of its own.
    """
    plans: dict[str, Plan] = {}
    machines: dict[str, list[int]] = {kind: [] for kind in fleet.entry.stock}  # GPUs in use
    for name, option in sorted((fleet.current or {}).items(), key=lambda item: -item[1].gpus):
        candidate, placed, used = (
            option.candidate,
            option.candidate.deployment,
            machines[option.gpu],
        )
        if not placed.machines:
            node = placed.gpus_per_node
            at = next((k for k, gpus in enumerate(used) if gpus + option.gpus <= node), len(used))
            used += [0] * (at == len(used))
            placed = replace(placed, first_gpu=used[at])
            used[at] += option.gpus % node
        prediction = replace(candidate.prediction, deployment=placed)
        chosen = replace(candidate, deployment=placed, prediction=prediction)
        plans[name] = replace(
            option.plan,
            chosen=chosen,
            candidates=(chosen, *(c for c in option.plan.candidates if c is not candidate)),
        )
    return plans
