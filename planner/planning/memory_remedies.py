"""Remedies against too little GPU memory: what each frees, and which are enough alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.core.units import GIB
from planner.engines.argument_names import load_argument_names
from planner.engines.deployment import Deployment
from planner.engines.engine_args import resolve_engine_args
from planner.memory.deployment_changes import CHANGE_PRICES, DeploymentChange, list_changes
from planner.memory.memory_plan import (
    MemoryPlan,
    find_memory_changes,
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
    lowers_demand: bool = False  # it frees nothing: a start asks for less

    def __str__(self) -> str:
        freed = f"{format_number(self.freed_bytes / GIB, 2)} GiB per GPU"
        freed = f"needs {freed} less; " if self.lowers_demand else f"frees {freed}; "
        return f"{self.change}: {freed if self.freed_bytes > 0 else ''}{self.price}"


@dataclass(frozen=True)
class MemoryRemedies:
    """All remedies that free memory of a deployment that does not surely start."""

    missing_bytes: float  # per GPU, for what the start demands; at most 0 if it fits
    remedies: tuple[MemoryRemedy, ...]
    combination: str  # of changes that is enough; of several if none is enough alone
    same_gpus: str = ""  # the same without more GPUs; empty if none is, or a single one is

    @property
    def enough(self) -> list[MemoryRemedy]:
        """Those of which each is enough alone, in the order of `list_memory_remedies`."""
        return [remedy for remedy in self.remedies if remedy.is_enough]

    def without(self, argument: str) -> "MemoryRemedies":
        """Return the remedies that do not change an argument."""
        kept = (one for one in self.remedies if not one.change.startswith(argument))
        return replace(self, remedies=tuple(kept))

    def describe(self) -> list[str]:
        """Return a heading and a line per remedy: those that are enough, or what all free."""
        missing = f"{format_number(self.missing_bytes / GIB, 2)} GiB per GPU is missing"
        head = f"{missing}. " if self.missing_bytes > 0 else ""
        on_same_gpus = [f"together, on the same GPUs: {self.same_gpus}"] * bool(self.same_gpus)
        if len(self.enough) > 1:
            return [f"{head}Each of these is enough alone:", *map(str, self.enough), *on_same_gpus]
        if self.enough:
            return [f"{head}One change is enough:", *map(str, self.enough), *on_same_gpus]
        largest = sorted(self.remedies, key=lambda remedy: -remedy.freed_bytes)
        together = f"enough is: {self.combination}"
        return [f"{head}No change is enough alone:", *map(str, largest), together]

    def to_json(self) -> dict[str, object]:
        """Return the remedies as JSON, in GiB per GPU."""
        return {
            "missing_gib": round(self.missing_bytes / GIB, 2),
            "remedies": [
                {
                    "change": remedy.change,
                    "frees_gib": round(remedy.freed_bytes / GIB, 2),
                    "is_enough": remedy.is_enough,
                    "price": remedy.price,
                }
                for remedy in self.remedies
            ],
            "together": self.combination,
            "together_on_the_same_gpus": self.same_gpus or None,
        }


def find_memory_remedies(memory: MemoryPlan) -> MemoryRemedies | None:
    """Find the changes that free memory of a deployment; None if it surely starts as it is."""
    if memory.status == "ok":
        return None
    missing, remedies = _compute_missing_bytes(memory), list[MemoryRemedy]()
    deployment = memory.deployment
    for changes in _list_alternatives(memory):
        remedy = None
        for change in changes:  # the mildest that is enough, or else the strongest
            if (after := _plan(change.apply(deployment))) is not None:
                remedy = MemoryRemedy(
                    change.describe(deployment),
                    change.describe_price(deployment),
                    missing - _compute_missing_bytes(after),
                    after.status == "ok",
                    change.argument == "max_model_len",
                )
                if remedy.is_enough:
                    break
        if remedy and (remedy.is_enough or remedy.freed_bytes > 0):
            remedies.append(remedy)
    same = find_memory_changes(memory, CHANGE_PRICES.keys() - {"layout"})
    same_gpus = ", ".join(change.instruction or change.describe(deployment) for change in same)
    return MemoryRemedies(
        missing, tuple(remedies), memory.remedy, same_gpus if len(same) > 1 else ""
    )


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
    engine, gpu, model = deployment.engine, deployment.gpu, deployment.model
    if explain_refused_start(deployment):
        return None
    try:
        resolve_engine_args(vars(deployment.args), engine, gpu, model)
        return plan_memory(deployment)
    except PlannerError:
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
