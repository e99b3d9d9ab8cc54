"""Allocate replicas of several scenarios that share a stock of GPUs, a budget and a power limit.

The load of each scenario is split over replicas of its candidates. A mixed-integer linear program
(HiGHS) finds the split of least cost. Shadow prices and binding limits are solutions of the same
program with one limit changed.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.core.errors import PlannerError
from planner.planning.scenario import Scenario
from planner.planning.search import Plan

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint, OptimizeResult

LOAD_TOLERANCE = 1e-6
"""Relative tolerance of loads and limits."""
MAX_GROWTH_FACTOR, GROWTH_RESOLUTION = 16.0, 0.01
"""Largest growth that is searched, and its resolution, in multiples of the load."""
SOLVER_ARGUMENTS: Mapping[str, Any] = {
    "integrality": 1, "options": {"mip_rel_gap": 0, "time_limit": 60},
}  # fmt: skip
"""Arguments of `milp` for whole numbers, solved exactly or within a minute."""
GROWTH_CURVE_POINTS = 100
"""Points of the curve of cost over growth, at most."""


@dataclass(frozen=True)
class FleetOption:
    """One replica of a candidate: its GPUs, and the load that it serves within the SLOs."""

    description: str
    gpu: str
    gpus: int
    usd_per_hour: float
    watts: float  # at its whole load
    load_fraction: float  # of the scenario's load
    at_risk: bool = False
    power_curve: tuple[tuple[float, float], ...] = ()
    """Smaller fractions of its load, ascending, each with the W that it then draws."""
    plan: Plan | None = field(default=None, compare=False, repr=False)
    """The plan whose choice it is a replica of."""

    def with_growth(self, factor: float) -> "FleetOption":
        """Return the same for a load that is `factor` times as large."""
        return replace(self, load_fraction=self.load_fraction / factor)

    def compute_watts(self, fraction: float) -> float:
        """Return the W that it draws at a fraction of its load."""
        fractions, watts = zip(*sorted({*self.power_curve, (1.0, self.watts)}), strict=True)
        return float(np.interp(fraction, fractions, watts))


@dataclass(frozen=True)
class Fleet:
    """The options of all scenarios, the stock of GPUs by kind, and limits of cost and power."""

    options: Mapping[str, Sequence[FleetOption]]
    stock: Mapping[str, int]
    budget: float = math.inf  # USD per hour
    power: float = math.inf  # W
    owned: frozenset[str] = frozenset()  # kinds that cost nothing more to use

    def with_gpus(self, gpu: str, count: int) -> "Fleet":
        """Return the fleet with `count` more GPUs of a kind."""
        return replace(self, stock={**self.stock, gpu: self.stock.get(gpu, 0) + count})

    def with_growth(self, factor: float, names: Collection[str] | None = None) -> "Fleet":
        """Return the fleet with the load of these scenarios (None: of all) times `factor`."""
        return replace(
            self,
            options={
                name: [option.with_growth(factor) for option in options]
                if names is None or name in names
                else options
                for name, options in self.options.items()
            },
        )


@dataclass(frozen=True)
class Allocation:
    """Numbers of replicas by scenario and option; options without replicas are left out."""

    replicas: Mapping[str, Mapping[FleetOption, int]]

    @property
    def usd_per_hour(self) -> float:
        """Cost of all replicas."""
        return math.fsum(
            option.usd_per_hour * count
            for replicas in self.replicas.values()
            for option, count in replicas.items()
        )

    @property
    def watts(self) -> float:
        """Mean power of all replicas; those of a scenario share its load by their capacity."""
        watts = []
        for replicas in self.replicas.values():
            served = math.fsum(option.load_fraction * count for option, count in replicas.items())
            watts += [
                option.compute_watts(1 / max(served, 1.0)) * count
                for option, count in replicas.items()
            ]
        return math.fsum(watts)

    def with_growth(self, factor: float) -> "Allocation":
        """Return the same replicas for loads that are `factor` times as large."""
        return Allocation(
            {
                name: {option.with_growth(factor): count for option, count in replicas.items()}
                for name, replicas in self.replicas.items()
            }
        )

    @property
    def load_factor(self) -> float:
        """The multiple of all loads that they serve."""
        return min(
            math.fsum(option.load_fraction * count for option, count in replicas.items())
            for replicas in self.replicas.values()
        )

    @property
    def gpus_by_kind(self) -> dict[str, int]:
        """GPUs that run, by kind."""
        num_gpus: dict[str, int] = {}
        for replicas in self.replicas.values():
            for option, count in replicas.items():
                num_gpus[option.gpu] = num_gpus.get(option.gpu, 0) + option.gpus * count
        return num_gpus


@dataclass(frozen=True)
class FleetChoice:
    """All replicas of one scenario, and the probability that they meet its targets."""

    replicas: Mapping[FleetOption, int]
    probability: float

    @property
    def alone(self) -> Allocation:
        """These replicas, without those of other scenarios."""
        return Allocation({"": self.replicas})


def _build_linear_program(
    fleet: Fleet,
) -> tuple[list[tuple[str, FleetOption]], np.ndarray, dict[str, Any]]:
    """Return (scenario, option) pairs, the cost of a replica of each, and arguments of `milp`.

    The unknowns are numbers of replicas. For every scenario the sum of load_fraction x replicas is
    at least 1; for every kind of GPU the sum of gpus x replicas is at most the stock.
    """
    from scipy.optimize import Bounds, LinearConstraint

    pairs = [(name, option) for name, options in fleet.options.items() for option in options]
    usd_per_hour = np.array([option.usd_per_hour for _, option in pairs])
    watts = np.array([option.watts for _, option in pairs])
    served = np.array(
        [
            [option.load_fraction * (name == scenario) for name, option in pairs]
            for scenario in fleet.options
        ]
    )
    gpus = [{option.gpu: option.gpus} for _, option in pairs]
    constraints = [
        LinearConstraint(served, lb=1 - LOAD_TOLERANCE),
        *_limit_to_fleet(fleet, gpus, usd_per_hour, watts),
    ]
    max_replicas = [
        min(fleet.stock.get(option.gpu, 0) // option.gpus, math.ceil(1 / option.load_fraction))
        for _, option in pairs
    ]
    program = {"bounds": Bounds(0, max_replicas), "constraints": constraints, **SOLVER_ARGUMENTS}
    return pairs, usd_per_hour, program


def _limit_to_fleet(
    fleet: Fleet, gpus: Sequence[Mapping[str, int]], usd_per_hour: np.ndarray, watts: np.ndarray
) -> "list[LinearConstraint]":
    """Limit numbers of what takes GPUs by kind, money and power to what the fleet has of each."""
    from scipy.optimize import LinearConstraint

    kinds = _list_kinds(fleet)
    used = np.array([[each.get(kind, 0) for each in gpus] for kind in kinds])
    return [
        LinearConstraint(used, ub=[fleet.stock.get(kind, 0) for kind in kinds]),
        *(
            LinearConstraint(values[None, :], ub=limit * (1 + LOAD_TOLERANCE))
            for values, limit in ((usd_per_hour, fleet.budget), (watts, fleet.power))
            if math.isfinite(limit)
        ),
    ]


def _solve(costs: np.ndarray, program: dict[str, Any]) -> "OptimizeResult | None":
    """Return the solution of least cost; None if there is none.

    Raises `PlannerError` if the solver does not know.
    """
    from scipy.optimize import milp

    result = milp(costs, **program)
    if result.status == 2:
        return None
    if result.x is None or result.status != 0:
        raise PlannerError(f"the fleet's programme was not solved: {result.message}")
    return result


def _solve_in_turn(objectives: Sequence[np.ndarray], program: dict[str, Any]) -> np.ndarray | None:
    """Return the whole numbers of the least first objective, of equals of the least next one.

    None if there are none; raises `PlannerError` if the solver does not know.
    """
    from scipy.optimize import LinearConstraint, milp

    first, *others = objectives
    if (best := _solve(first, program)) is None:
        return None
    values, constraints = first, [*program["constraints"]]
    for objective in others:
        equal = LinearConstraint(values[None, :], ub=best.fun * (1 + LOAD_TOLERANCE))
        constraints.append(equal)
        found = milp(objective, **{**program, "constraints": constraints})
        if found.x is None:
            break
        best, values = found, objective
    return np.asarray(np.rint(best.x).astype(int))


def choose_safest(
    fleet: Fleet, choices: Mapping[str, Sequence[FleetChoice]]
) -> dict[str, FleetChoice] | None:
    """Choose one of each scenario's `choices`, so that all together are as probable as can be.

    They stay within the fleet's stock, budget and power. Of equals it is the cheapest, then the one
    of the fewest GPUs. Returns None if nothing does.
    """
    from scipy.optimize import Bounds, LinearConstraint

    pairs = [(name, choice) for name, some in choices.items() for choice in some]
    used = [choice.alone.gpus_by_kind for _, choice in pairs]
    usd = np.array([choice.alone.usd_per_hour for _, choice in pairs])
    watts = np.array([choice.alone.watts for _, choice in pairs])
    one_each = np.array([[float(name == own) for name, _ in pairs] for own in choices])
    constraints = [
        LinearConstraint(one_each, lb=1, ub=1), *_limit_to_fleet(fleet, used, usd, watts),
    ]  # fmt: skip
    program = {"bounds": Bounds(0, 1), "constraints": constraints, **SOLVER_ARGUMENTS}
    doubts = np.array([-math.log(max(choice.probability, 1e-9)) for _, choice in pairs])
    num_gpus = np.array([float(sum(gpus.values())) for gpus in used])
    counts = _solve_in_turn((doubts, usd, num_gpus), program)
    if counts is None:
        return None
    return {name: choice for (name, choice), n in zip(pairs, counts, strict=True) if n}


def is_feasible_fleet(fleet: Fleet) -> bool:
    """Return whether any replicas serve every scenario within stock, budget and power."""
    if not all(fleet.options.values()):
        return False
    _, usd, program = _build_linear_program(fleet)
    return _solve(np.zeros_like(usd), program) is not None


def allocate_replicas(fleet: Fleet) -> Allocation | None:
    """Return the cheapest replicas that serve every scenario within stock, budget and power.

    Equal costs are decided by how many GPUs of one's own work, then by the order of a scenario's
    options. Returns None if there is no solution; raises `PlannerError` if the solver does not know.
    """
    if not all(fleet.options.values()):
        return None
    pairs, usd, program = _build_linear_program(fleet)
    own_gpus = np.array([option.gpus * (option.gpu in fleet.owned) for _, option in pairs])
    ranks = np.array([float(k) for options in fleet.options.values() for k in range(len(options))])
    counts = _solve_in_turn((usd, own_gpus, ranks), program)
    if counts is None:
        return None
    return Allocation(
        {
            name: {
                option: int(count)
                for (scenario, option), count in zip(pairs, counts, strict=True)
                if scenario == name and count
            }
            for name in fleet.options
        }
    )


def compute_shadow_prices(fleet: Fleet, current: Allocation) -> dict[str, float]:
    """Return the USD per hour that one more GPU of each kind saves, net of its own cost."""
    savings = {}
    for kind in _list_kinds(fleet):
        _, usd, program = _build_linear_program(fleet.with_gpus(kind, 1))
        solution = _solve(usd, program)
        savings[kind] = max(0.0, current.usd_per_hour - float(solution.fun)) if solution else 0.0
    return savings


def _list_kinds(fleet: Fleet) -> list[str]:
    """Return the kinds of GPU that the options use, sorted."""
    return sorted({option.gpu for options in fleet.options.values() for option in options})


def find_binding_limits(fleet: Fleet) -> tuple[str, ...]:
    """Return the limits of an infeasible fleet whose removal alone makes it feasible.

    If there are none it is "all of them together".
    """
    relaxed = {f"stock of {kind}": fleet.with_gpus(kind, 10**6) for kind in _list_kinds(fleet)}
    relaxed |= {"budget": replace(fleet, budget=math.inf), "power": replace(fleet, power=math.inf)}
    limits = tuple(name for name, other in relaxed.items() if is_feasible_fleet(other))
    return limits or ("all of them together",)


def find_max_growth(
    fleet: Fleet, names: Collection[str] | None = None, limit: float = MAX_GROWTH_FACTOR
) -> float:
    """Return the largest multiple of the load of `names` (None: of all) that is served.

    It is NaN if today's load is not served, and infinite if `limit` times the load is.
    """
    if not is_feasible_fleet(fleet):
        return math.nan
    if is_feasible_fleet(fleet.with_growth(limit, names)):
        return math.inf
    steps = range(1, round((limit - 1) / GROWTH_RESOLUTION))
    return 1 + GROWTH_RESOLUTION * bisect_left(
        steps,
        True,
        key=lambda step: (
            not is_feasible_fleet(fleet.with_growth(1 + step * GROWTH_RESOLUTION, names))
        ),
    )


@dataclass(frozen=True)
class FleetPlan:
    """The answer to a fleet file, for today's loads and for loads `growth` times as large."""

    name: str
    scenarios: Mapping[str, Scenario]
    fleet: Fleet
    growth: float
    left_out: str = ""  # searches for which there was no time
    same_cost: Allocation | None = None  # the safest replicas that cost no more than the cheapest
    safer: Allocation | None = None  # the safest of all, where they are safer still
    # of every scenario, replica and number of them: the plan of its share of today's load
    judged: Mapping[tuple[str, FleetOption, int], Plan] = field(default_factory=dict)

    @cached_property
    def current_allocation(self) -> Allocation | None:
        """The cheapest replicas for today's load; of equally cheap ones the safest."""
        return self.same_cost or allocate_replicas(self.fleet)

    @property
    def owns_all(self) -> bool:
        """Whether no GPU of the stock costs more when it is used."""
        return self.fleet.owned >= {*self.fleet.stock}

    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of what runs of each scenario, or (numbered) of each of its deployments."""
        if self.current_allocation is None:
            return {}
        named: dict[str, Plan] = {}
        for name, replicas in self.current_allocation.replicas.items():
            for k, item in enumerate(replicas.items(), 1):
                if plan := self.judged.get((name, *item)):
                    stock = self.fleet.stock.get(item[0].gpu, 0)
                    gpus = tuple(replace(gpu, max_gpus=stock) for gpu in plan.scenario.gpus)
                    named[f"{name}-{k}" if len(replicas) > 1 else name] = replace(
                        plan, scenario=replace(plan.scenario, gpus=gpus)
                    )
        return named

    def get_probability(self, allocation: Allocation, name: str) -> float:
        """Return the probability that a scenario meets its targets; NaN if it was not judged."""
        plans = [self.judged.get((name, *item)) for item in allocation.replicas[name].items()]
        return math.prod(plan.probability if plan else math.nan for plan in plans)

    @cached_property
    def grown_allocation(self) -> Allocation | None:
        """The cheapest replicas for the grown load: today's, if they serve it."""
        if self.current_allocation and self.is_ready_to_grow:
            return self.current_allocation.with_growth(self.growth)
        return allocate_replicas(self.fleet.with_growth(self.growth))

    @cached_property
    def growth_allocations(self) -> tuple[tuple[float, Allocation], ...]:
        """Loads up to twice `growth` or the largest, each with its cheapest replicas.

        A larger load costs no less, so what serves it as well stays the cheapest.
        """
        most = min(2 * self.growth - 1, self.max_growth)
        if math.isnan(most):
            return ()
        steps = math.ceil(max(most - 1, 0.0) / GROWTH_RESOLUTION - LOAD_TOLERANCE)
        stride = max(math.ceil(steps / GROWTH_CURVE_POINTS), 1)
        found: list[tuple[float, Allocation]] = []
        most_served, last = 0.0, None
        for step in (*range(0, steps, stride), steps):
            load = min(1 + step * GROWTH_RESOLUTION, most)
            if last is None or most_served < load * (1 - LOAD_TOLERANCE):
                last = allocate_replicas(self.fleet.with_growth(load))
                most_served = load * last.load_factor if last else 0.0
            if last:
                found.append((load, last))
        return tuple(found)

    @property
    def is_ready_to_grow(self) -> bool:
        """Whether what runs serves the grown load as well."""
        today = self.current_allocation
        return today is not None and today.load_factor >= self.growth * (1 - LOAD_TOLERANCE)

    @cached_property
    def shadow_prices(self) -> dict[str, float]:
        """USD per hour that one more GPU of each kind saves; empty if the fleet is infeasible."""
        return (
            compute_shadow_prices(self.fleet, self.current_allocation)
            if self.current_allocation
            else {}
        )

    @property
    def growth_limit(self) -> float:
        """The largest growth that is searched."""
        return max(MAX_GROWTH_FACTOR, self.growth)

    @cached_property
    def max_growth(self) -> float:
        """The largest multiple of all loads together; see `find_max_growth`."""
        return find_max_growth(self.fleet, limit=self.growth_limit)

    @cached_property
    def max_growth_alone(self) -> dict[str, float]:
        """The largest multiple of each scenario's load, if the others stay as they are."""
        return {
            name: find_max_growth(self.fleet, {name}, self.growth_limit)
            for name in self.fleet.options
        }

    @property
    def binding_limits(self) -> tuple[str, ...]:
        """The limits that today's load exceeds or, if none, the growth just above the largest."""
        factor = 1.0 if math.isnan(self.max_growth) else self.max_growth + GROWTH_RESOLUTION
        return find_binding_limits(self.fleet.with_growth(factor)) if math.isfinite(factor) else ()
