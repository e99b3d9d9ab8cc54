"""Which of their candidates several scenarios run on, when they share a stock of GPUs, a budget and a power limit.

Each scenario's load is split over replicas of its candidates. A mixed-integer linear programme
(HiGHS) finds the split of least cost; what a GPU more is worth, and what is in the way where
nothing does, are that programme asked again.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from planner.core.errors import PlannerError
from planner.planning.scenario import Scenario

LOAD_TOLERANCE = 1e-6
"""Relative: a load that is served but for so little of it is served."""
MAX_GROWTH_FACTOR, GROWTH_RESOLUTION = 16.0, 0.01
"""How far growth is looked at, in multiples of the load, and how finely."""


@dataclass(frozen=True)
class FleetOption:
    """One replica of a candidate: the GPUs that it takes and what it serves within the scenario's service level."""

    description: str
    gpu: str
    gpus: int
    usd_per_hour: float
    watts: float  # with all of its share
    load_fraction: float  # of the scenario's load
    at_risk: bool = False  # it may miss its level at the pessimistic end of an interval
    power_curve: tuple[
        tuple[float, float], ...
    ] = ()  # parts of its share, ascending, and W with no more than these

    def compute_watts(self, part: float) -> float:
        """W with so large a part of its share."""
        parts, watts = zip(*sorted({*self.power_curve, (1.0, self.watts)}), strict=True)
        return float(np.interp(part, parts, watts))


@dataclass(frozen=True)
class Fleet:
    """Scenarios by name with their options, the stock of GPUs by kind, and what all may cost and draw together."""

    options: Mapping[str, Sequence[FleetOption]]
    stock: Mapping[str, int]
    budget: float = math.inf  # USD per hour
    power: float = math.inf  # W

    def with_gpus(self, gpu: str, more: int) -> "Fleet":
        """The same with so many more GPUs of a kind."""
        return replace(self, stock={**self.stock, gpu: self.stock.get(gpu, 0) + more})

    def with_growth(self, factor: float, names: Collection[str] | None = None) -> "Fleet":
        """With the load of these scenarios (None: of all) so many times as large; a replica serves what it did."""
        return replace(self, options={
            name: [replace(fleet_option, load_fraction=fleet_option.load_fraction / factor) for fleet_option in some] if names is None or name in names else some
            for name, some in self.options.items()
        })  # fmt: skip


@dataclass(frozen=True)
class Allocation:
    """Replicas of each option that run, by scenario; options of which none runs are left out."""

    replicas: Mapping[str, Mapping[FleetOption, int]]

    @property
    def usd_per_hour(self) -> float:
        """Price of all replicas."""
        return math.fsum(
            fleet_option.usd_per_hour * many
            for some in self.replicas.values()
            for fleet_option, many in some.items()
        )

    @property
    def watts(self) -> float:
        """Mean power of all replicas, among which each scenario's load is divided by what they can serve of it."""
        return math.fsum(
            option.compute_watts(1 / max(math.fsum(fleet_option.load_fraction * count for fleet_option, count in some.items()), 1.0)) * many
            for some in self.replicas.values() for option, many in some.items()
        )  # fmt: skip

    @property
    def gpus_by_kind(self) -> dict[str, int]:
        """GPUs that run, by kind."""
        found: dict[str, int] = {}
        for some in self.replicas.values():
            for option, many in some.items():
                found[option.gpu] = found.get(option.gpu, 0) + option.gpus * many
        return found


def _build_linear_program(
    fleet: Fleet,
) -> tuple[list[tuple[str, FleetOption]], np.ndarray, dict[str, Any]]:
    """All options with their scenarios, the price of a replica of each, and what binds their numbers.

    For every scenario sum of share x replicas >= 1, for every kind of GPU sum of gpus x replicas <=
    stock.
    """
    from scipy.optimize import Bounds, LinearConstraint

    flat = [(name, option) for name, some in fleet.options.items() for option in some]
    column = {
        field: np.array([getattr(option, field) for _, option in flat])
        for field in ("usd_per_hour", "watts")
    }
    served = np.array(
        [[option.load_fraction * (name == one) for name, option in flat] for one in fleet.options]
    )
    kinds = sorted({option.gpu for _, option in flat})
    taken = np.array([[option.gpus * (option.gpu == kind) for _, option in flat] for kind in kinds])
    limits = [
        LinearConstraint(served, lb=1 - LOAD_TOLERANCE),
        LinearConstraint(taken, ub=[fleet.stock.get(kind, 0) for kind in kinds]),
    ]
    for field, most in (("usd_per_hour", fleet.budget), ("watts", fleet.power)):
        if math.isfinite(most):
            limits.append(LinearConstraint(column[field][None, :], ub=most * (1 + LOAD_TOLERANCE)))
    copies = [
        min(fleet.stock.get(option.gpu, 0) // option.gpus, math.ceil(1 / option.load_fraction))
        for _, option in flat
    ]
    options = {"mip_rel_gap": 0, "time_limit": 60}
    return flat, column["usd_per_hour"], {
        "integrality": 1, "bounds": Bounds(0, copies), "constraints": limits, "options": options,
    }  # fmt: skip


def _solve(costs: np.ndarray, asked: dict[str, Any]) -> Any:
    """The solver's answer with the least costs; None where there is none, `PlannerError` where it does not know."""
    from scipy.optimize import milp

    optimize_result = milp(costs, **asked)
    if optimize_result.status == 2:
        return None
    if optimize_result.x is None or optimize_result.status != 0:
        raise PlannerError(f"the fleet's programme was not solved: {optimize_result.message}")
    return optimize_result


def is_feasible_fleet(fleet: Fleet) -> bool:
    """Whether some replicas serve every scenario in full within stock, budget and power."""
    if not all(fleet.options.values()):
        return False
    _, usd, asked = _build_linear_program(fleet)
    return _solve(np.zeros_like(usd), asked) is not None


def allocate_replicas(fleet: Fleet) -> Allocation | None:
    """The cheapest replicas that serve every scenario in full within stock, budget and power; None where none do.

    Of those that cost the same, the ones that come first among a scenario's options. Raises
    `PlannerError` where the solver finds neither an answer nor that there is none.
    """
    from scipy.optimize import LinearConstraint, milp

    if not all(fleet.options.values()):
        return None
    flat, usd, asked = _build_linear_program(fleet)
    if (value := _solve(usd, asked)) is None:
        return None
    place = [k for some in fleet.options.values() for k in range(len(some))]
    as_cheap = LinearConstraint(usd[None, :], ub=value.fun * (1 + LOAD_TOLERANCE))
    first = milp(
        np.array(place, float), **{**asked, "constraints": [*asked["constraints"], as_cheap]}
    )
    counts = np.rint(value.x if first.x is None else first.x).astype(int)
    return Allocation(
        {
            name: {
                option: int(count)
                for (whose, option), count in zip(flat, counts, strict=True)
                if whose == name and count
            }
            for name in fleet.options
        }
    )


def compute_shadow_prices(fleet: Fleet, now: Allocation) -> dict[str, float]:
    """USD per hour that one more GPU of each kind would save, its own price counted where it is used; by kind."""
    saved = {}
    for kind in sorted({option.gpu for some in fleet.options.values() for option in some}):
        _, usd, asked = _build_linear_program(fleet.with_gpus(kind, 1))
        value = _solve(usd, asked)
        saved[kind] = max(0.0, now.usd_per_hour - float(value.fun)) if value else 0.0
    return saved


def find_binding_limits(fleet: Fleet) -> tuple[str, ...]:
    """Where nothing serves `fleet`: each limit that alone, if lifted, would let it; "all of them together" if none."""
    kinds = sorted({option.gpu for some in fleet.options.values() for option in some})
    lifted = {f"stock of {kind}": fleet.with_gpus(kind, 10**6) for kind in kinds}
    lifted |= {"budget": replace(fleet, budget=math.inf), "power": replace(fleet, power=math.inf)}
    return tuple(name for name, freed in lifted.items() if is_feasible_fleet(freed)) or (
        "all of them together",
    )


def find_max_growth(
    fleet: Fleet, names: Collection[str] | None = None, most: float = MAX_GROWTH_FACTOR
) -> float:
    """How many times the load of `names` (None: all) is served, to `FINE`; infinite from `most` on, NaN if not one."""
    if not is_feasible_fleet(fleet):
        return math.nan
    if is_feasible_fleet(fleet.with_growth(most, names)):
        return math.inf
    steps = range(1, round((most - 1) / GROWTH_RESOLUTION))
    return 1 + GROWTH_RESOLUTION * bisect_left(
        steps,
        True,
        key=lambda step: (
            not is_feasible_fleet(fleet.with_growth(1 + step * GROWTH_RESOLUTION, names))
        ),
    )


@dataclass(frozen=True)
class FleetPlan:
    """The answer to a fleet file: what was asked, and what runs now and with every load `growth` times as large."""

    name: str
    scenarios: Mapping[str, Scenario]
    fleet: Fleet
    growth: float

    @cached_property
    def current_allocation(self) -> Allocation | None:
        """The cheapest replicas for today's load."""
        return allocate_replicas(self.fleet)

    @cached_property
    def grown_allocation(self) -> Allocation | None:
        """The cheapest replicas for the load that has grown."""
        return allocate_replicas(self.fleet.with_growth(self.growth))

    @cached_property
    def shadow_prices(self) -> dict[str, float]:
        """USD per hour that one more GPU of each kind would save; empty where nothing serves today's load."""
        return (
            compute_shadow_prices(self.fleet, self.current_allocation)
            if self.current_allocation
            else {}
        )

    @property
    def growth_limit(self) -> float:
        """How far growth is looked at."""
        return max(MAX_GROWTH_FACTOR, self.growth)

    @cached_property
    def max_growth(self) -> float:
        """How many times as large every load may grow together; see `reach`."""
        return find_max_growth(self.fleet, most=self.growth_limit)

    @cached_property
    def max_growth_alone(self) -> dict[str, float]:
        """The same of each scenario's load, all others staying as they are."""
        return {
            name: find_max_growth(self.fleet, {name}, self.growth_limit)
            for name in self.fleet.options
        }

    @property
    def binding_limits(self) -> tuple[str, ...]:
        """What is in the way of today's load where it is not served, else of the first growth that is not."""
        factor = 1.0 if math.isnan(self.max_growth) else self.max_growth + GROWTH_RESOLUTION
        return find_binding_limits(self.fleet.with_growth(factor)) if math.isfinite(factor) else ()
