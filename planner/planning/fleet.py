"""Which of their candidates several scenarios run on, when they share a stock of GPUs, a budget and a power limit.

Each scenario's load is split over replicas of its candidates. A mixed-integer linear programme (HiGHS) finds the split
of least cost; what a GPU more is worth, and what is in the way where nothing does, are that programme asked again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.core.quantities import PlannerError

TOLERANCE = 1e-6
"""Relative: a load that is served but for so little of it is served."""


@dataclass(frozen=True)
class Option:
    """One replica of a candidate: the GPUs that it takes and what it serves within the scenario's service level."""

    what: str
    gpu: str
    gpus: int
    usd_per_hour: float
    watts: float
    share: float  # of the scenario's load


@dataclass(frozen=True)
class Fleet:
    """Scenarios by name with their options, the stock of GPUs by kind, and what all may cost and draw together."""

    options: Mapping[str, Sequence[Option]]
    stock: Mapping[str, int]
    budget: float = math.inf  # USD per hour
    power: float = math.inf  # W

    def with_gpus(self, gpu: str, more: int) -> "Fleet":
        """The same with so many more GPUs of a kind."""
        return replace(self, stock={**self.stock, gpu: self.stock.get(gpu, 0) + more})


@dataclass(frozen=True)
class Allocation:
    """Replicas of each option that run, by scenario; options of which none runs are left out."""

    replicas: Mapping[str, Mapping[Option, int]]

    @property
    def usd_per_hour(self) -> float:
        """Price of all replicas."""
        return self._sum("usd_per_hour")

    @property
    def watts(self) -> float:
        """Mean power of all replicas under the planned load."""
        return self._sum("watts")

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs that run, by kind."""
        found: dict[str, int] = {}
        for some in self.replicas.values():
            for option, many in some.items():
                found[option.gpu] = found.get(option.gpu, 0) + option.gpus * many
        return found

    def _sum(self, field: str) -> float:
        return math.fsum(
            getattr(option, field) * many for some in self.replicas.values() for option, many in some.items()
        )


def allocate(fleet: Fleet) -> Allocation | None:
    """The cheapest replicas that serve every scenario in full within stock, budget and power; None where none do.

    minimise sum of usd x replicas, with for every scenario: sum of share x replicas >= 1, for every kind of GPU:
    sum of gpus x replicas <= stock. Raises `PlannerError` where the solver finds neither an answer nor that there is
    none.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    flat = [(name, option) for name, some in fleet.options.items() for option in some]
    if any(not some for some in fleet.options.values()):
        return None
    column = {field: np.array([getattr(option, field) for _, option in flat]) for field in ("usd_per_hour", "watts")}
    served = np.array([[option.share * (name == one) for name, option in flat] for one in fleet.options])
    kinds = sorted({option.gpu for _, option in flat})
    taken = np.array([[option.gpus * (option.gpu == kind) for _, option in flat] for kind in kinds])
    limits = [
        LinearConstraint(served, lb=1 - TOLERANCE),
        LinearConstraint(taken, ub=[fleet.stock.get(kind, 0) for kind in kinds]),
    ]
    for field, most in (("usd_per_hour", fleet.budget), ("watts", fleet.power)):
        if math.isfinite(most):
            limits.append(LinearConstraint(column[field][None, :], ub=most * (1 + TOLERANCE)))
    copies = [min(fleet.stock.get(option.gpu, 0) // option.gpus, math.ceil(1 / option.share)) for _, option in flat]
    found = milp(column["usd_per_hour"], integrality=1, bounds=Bounds(0, copies), constraints=limits,
                 options={"mip_rel_gap": 0, "time_limit": 60})  # fmt: skip
    if found.status == 2:
        return None
    if found.x is None or found.status != 0:
        raise PlannerError(f"the fleet's programme was not solved: {found.message}")
    counts = np.rint(found.x).astype(int)
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


def worth(fleet: Fleet, now: Allocation) -> dict[str, float]:
    """USD per hour that one more GPU of each kind would save, its own price counted where it is used; by kind."""
    kinds = sorted({option.gpu for some in fleet.options.values() for option in some})
    after = {kind: allocate(fleet.with_gpus(kind, 1)) for kind in kinds}
    return {kind: now.usd_per_hour - found.usd_per_hour if found else 0.0 for kind, found in after.items()}


def in_the_way(fleet: Fleet) -> tuple[str, ...]:
    """Where nothing serves `fleet`: each limit that alone, if lifted, would let it; "all of them together" if none."""
    kinds = sorted({option.gpu for some in fleet.options.values() for option in some})
    lifted = {f"stock of {kind}": fleet.with_gpus(kind, 10**6) for kind in kinds}
    lifted |= {"budget": replace(fleet, budget=math.inf), "power": replace(fleet, power=math.inf)}
    return tuple(name for name, freed in lifted.items() if allocate(freed)) or ("all of them together",)
