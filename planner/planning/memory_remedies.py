"""Remedies against too little GPU memory: what each frees, and which are enough alone."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.core.units import GIB
from planner.engines.argument_names import load_argument_names
from planner.engines.deployment import Deployment
from planner.engines.engine_args import resolve_engine_args
from planner.memory.deployment_changes import DeploymentChange, list_changes
from planner.memory.memory_plan import (
    MemoryPlan,
    list_shorter_lengths,
    list_utilizations,
    plan_memory,
)
from planner.parallelism.start_gate import explain_refused_start


@dataclass(frozen=True)
class MemoryRemedy:
    """One change, the bytes per GPU that it frees of those that are missing, and its price."""

    change: str
    price: str  # what it costs users or operators
    freed_bytes: float
    is_enough: bool  # the engine surely starts with it alone

    def __str__(self) -> str:
        freed = f"gains {format_number(self.freed_bytes / GIB, 2)} GiB per GPU; "
        return f"{self.change}: {freed if self.freed_bytes > 0 else ''}{self.price}"


@dataclass(frozen=True)
class MemoryRemedies:
    """All remedies that free memory of a deployment that does not surely start."""

    missing_bytes: float  # per GPU, for what the start demands; at most 0 if it fits
    remedies: tuple[MemoryRemedy, ...]
    combination: str  # of changes that is enough; of several if none is enough alone

    @property
    def enough(self) -> list[MemoryRemedy]:
        """Those of which each is enough alone, in the order in which they were tried."""
        return [remedy for remedy in self.remedies if remedy.is_enough]

    def without(self, argument: str) -> "MemoryRemedies":
        """Return the remedies that do not change an argument."""
        kept = (one for one in self.remedies if not one.change.startswith(argument))
        return replace(self, remedies=tuple(kept))

    def describe(self) -> list[str]:
        """Return a heading and a line per remedy: those that are enough, or what all free."""
        missing = f"{format_number(self.missing_bytes / GIB, 2)} GiB per GPU is missing. "
        head = missing if self.missing_bytes > 0 else ""
        if self.enough:
            title = "Each of these is enough alone:" if self.enough[1:] else "One change is enough:"
            return [f"{head}{title}", *map(str, self.enough)]
        largest = sorted(self.remedies, key=lambda remedy: -remedy.freed_bytes)
        lines = [*map(str, largest), f"enough is: {self.combination}"]
        return [f"{head}No change is enough alone:", *lines]

    def to_json(self) -> dict[str, object]:
        """Return the remedies as JSON, in GiB per GPU."""
        remedies = [
            {"change": one.change, "price": one.price, "is_enough": one.is_enough}
            | {"frees_gib": round(one.freed_bytes / GIB, 2)}
            for one in self.remedies
        ]
        missing = round(self.missing_bytes / GIB, 2)
        return {"missing_gib": missing, "remedies": remedies, "together": self.combination}


def find_memory_remedies(memory: MemoryPlan) -> MemoryRemedies | None:
    """Find the changes that free memory of a deployment; None if it surely starts as it is."""
    if memory.status == "ok":
        return None
    missing, remedies = _compute_missing_bytes(memory), list[MemoryRemedy]()
    deployment = memory.deployment
    for changes in _list_alternatives(memory):
        plans = ((change, _plan(change.apply(deployment))) for change in changes)
        tried = [(change, after) for change, after in plans if after]
        # the mildest that is enough, or else the strongest
        for change, after in [*(pair for pair in tried if pair[1].status == "ok"), *tried[-1:]][:1]:
            freed, is_enough = missing - _compute_missing_bytes(after), after.status == "ok"
            told = change.describe(deployment), change.describe_price(deployment)
            remedies += [MemoryRemedy(*told, freed, is_enough)] * (is_enough or freed > 0)
    return MemoryRemedies(missing, tuple(remedies), memory.remedy)


def shift_kv_available(memory: MemoryPlan, available_bytes: float | None) -> MemoryPlan:
    """Plan again so that the KV cache gets what a log states; as it is if it states nothing."""
    if available_bytes is None or "non_torch" not in memory.budgeted_terms:
        return memory
    shifts = dict(memory.deployment.memory_calibration)
    missing = memory.kv_available.mid - available_bytes
    shifts["non_torch"] = shifts.get("non_torch", 0.0) + missing
    return plan_memory(replace(memory.deployment, memory_calibration=tuple(sorted(shifts.items()))))


def _compute_missing_bytes(memory: MemoryPlan) -> float:
    """Compute the bytes per GPU that one request, and states at once, need beyond what there is."""
    reserve = int(memory.deployment.engine.facts.null_block_reserved)
    blocks = max(memory.layout.max_blocks_per_request + reserve, memory.num_state_blocks)
    return blocks * memory.pool.bytes_per_block - memory.kv_available.mid


def _plan(deployment: Deployment) -> MemoryPlan | None:
    """Plan the memory; None if the engine or the GPU refuses the arguments or the format."""
    with suppress(PlannerError):
        if not explain_refused_start(deployment):
            resolve_engine_args(
                vars(deployment.args), deployment.engine, deployment.gpu, deployment.model
            )
            return plan_memory(deployment)
    return None


def _list_alternatives(memory: MemoryPlan) -> Iterator[list[DeploymentChange]]:
    """Yield the changes of each kind that the engine has an argument for, the mildest first."""
    deployment = memory.deployment
    names = load_argument_names(deployment.engine.name).engine_names
    changes = list_changes(
        deployment, list_utilizations(deployment), list_shorter_lengths(memory),
        memory.max_state_sequences,
    )  # fmt: skip
    for argument, of_argument in changes.items():
        if argument == "quantization":
            yield from ([change] for change in of_argument)
        elif argument == "layout":
            yield [change for change in of_argument if change.value.pp == deployment.layout.pp]
        elif argument in names or argument == "gpu_free_bytes":
            yield of_argument
