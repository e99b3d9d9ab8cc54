"""Remedies against too little GPU memory: what each frees, and which are enough alone."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from planner.core.errors import PlannerError
from planner.core.number_format import format_number
from planner.core.units import GIB
from planner.engines.argument_names import load_argument_names
from planner.engines.deployment import Deployment, ParallelLayout
from planner.engines.engine_args import resolve_engine_args
from planner.engines.gpu_capabilities import explain_capability
from planner.memory.memory_plan import (
    MAX_REMEDY_UTILIZATION,
    MIN_REMEDY_BATCHED_TOKENS,
    MIN_REMEDY_MODEL_LEN,
    MemoryPlan,
    find_max_model_len,
    find_memory_changes,
    find_safe_memory_utilization,
    plan_memory,
)
from planner.models.quantization import parse_quantization
from planner.parallelism.layouts import explain_illegal_layout

MIN_REMEDY_SEQUENCES = 16
"""Smallest max_num_seqs to propose."""
SAME_GPU_ARGUMENTS = frozenset((
    "gpu_free_bytes", "gpu_memory_utilization", "kv_cache_dtype", "max_model_len",
    "max_num_batched_tokens", "max_num_seqs", "quantization",
))  # fmt: skip
"""Changes against too little memory that need no other GPUs."""
FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Names of an FP8 KV cache, the more accurate first."""


@dataclass(frozen=True)
class MemoryRemedy:
    """One change, the bytes per GPU that it frees of those that are missing, and its price."""

    change: str
    price: str  # what it costs users or operators
    freed_bytes: float
    is_enough: bool  # the engine surely starts with it alone

    def __str__(self) -> str:
        freed = f"frees {format_number(self.freed_bytes / GIB, 2)} GiB per GPU; "
        return f"{self.change}: {freed if self.freed_bytes > 0 else ''}{self.price}"


@dataclass(frozen=True)
class MemoryRemedies:
    """All remedies that free memory of a deployment that does not surely start."""

    missing_bytes: float  # per GPU, for one request of max_model_len; at most 0 if it fits
    remedies: tuple[MemoryRemedy, ...]
    combination: str  # of changes that is enough; of several if none is enough alone
    same_gpus: str = ""  # the same without more GPUs; empty if none is, or a single one is

    @property
    def enough(self) -> list[MemoryRemedy]:
        """Those of which each is enough alone, in the order of `list_memory_remedies`."""
        return [remedy for remedy in self.remedies if remedy.is_enough]

    def describe(self) -> list[str]:
        """Return a heading and a line per remedy: those that are enough, or what all free."""
        missing = f"{format_number(self.missing_bytes / GIB, 2)} GiB per GPU is missing"
        head = f"{missing} for one request of max_model_len. " if self.missing_bytes > 0 else ""
        kept = [f"together, on the same GPUs: {self.same_gpus}"] * bool(self.same_gpus)
        if len(self.enough) > 1:
            return [f"{head}Each of these is enough alone:", *map(str, self.enough), *kept]
        if self.enough:
            return [f"{head}One change is enough:", *map(str, self.enough), *kept]
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
    for price, sizes in _list_changes(memory):
        found = None
        for change, deployment in sizes:  # the mildest that is enough, or else the strongest
            if (after := _plan(deployment)) is not None:
                freed = missing - _compute_missing_bytes(after)
                found = MemoryRemedy(change, price, freed, after.status == "ok")
                if found.is_enough:
                    break
        if found and (found.is_enough or found.freed_bytes > 0):
            remedies.append(found)
    kept = find_memory_changes(memory, SAME_GPU_ARGUMENTS)
    names = load_argument_names(memory.deployment.engine.name).engine_names
    same_gpus = ", ".join(
        change.text or f"{names.get(change.argument, change.argument)} {change.value}"
        for change in kept
    )
    return MemoryRemedies(
        missing, tuple(remedies), memory.remedy, same_gpus if len(kept) > 1 else ""
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
    """Compute the bytes per GPU that one request of max_model_len needs beyond what there is."""
    reserve = int(memory.deployment.engine.facts.null_block_reserved)
    blocks = memory.layout.max_blocks_per_request + reserve
    return blocks * memory.pool.bytes_per_block - memory.kv_available.mid


def _plan(deployment: Deployment) -> MemoryPlan | None:
    """Plan the memory; None if the engine or the GPU refuses the arguments or the format."""
    engine, gpu, model = deployment.engine, deployment.gpu, deployment.model
    if explain_capability(engine.name, model.quantization.method, gpu, engine.release):
        return None
    try:
        resolve_engine_args(vars(deployment.args), engine, gpu, model)
        return plan_memory(deployment)
    except PlannerError:
        return None


def _list_changes(memory: MemoryPlan) -> Iterator[tuple[str, list[tuple[str, Deployment]]]]:
    """Yield the price of each kind of change, and its sizes in words, the mildest first.

    First what costs users nothing, then what costs accuracy, money and long requests.
    """
    deployment, args = memory.deployment, memory.deployment.args
    names = load_argument_names(deployment.engine.name).engine_names

    def change_argument(name: str, values: Iterable[Any]) -> list[tuple[str, Deployment]]:
        return [
            (f"{names[name]} {value}", deployment.with_args(**{name: value}))
            for value in values
            if name in names
        ]

    if deployment.gpu_free_bytes is not None or deployment.other_tenants_bytes:
        alone = replace(deployment, gpu_free_bytes=None, other_tenants_bytes=0)
        yield "the engine has it to itself", [("stop what else runs on the GPU", alone)]
    share, safe = args.gpu_memory_utilization, find_safe_memory_utilization(deployment)
    shares = [safe] if 0 < safe < share else _list_higher_shares(share, safe)
    does = "leaves more for" if safe < share else "leaves less for"
    yield f"{does} what else the GPU holds", change_argument("gpu_memory_utilization", shares)
    seqs = _list_powers_below(args.max_num_seqs, MIN_REMEDY_SEQUENCES)
    yield "fewer requests run at once", change_argument("max_num_seqs", seqs)
    least = max(MIN_REMEDY_BATCHED_TOKENS, args.max_num_seqs)
    tokens = _list_powers_below(args.max_num_batched_tokens, least)
    if args.enable_chunked_prefill:
        yield "long prompts take more steps", change_argument("max_num_batched_tokens", tokens)
    if (args.kv_cache_dtype or "auto") == "auto":
        known = deployment.engine.facts.kv_cache_dtypes
        caches = [name for name in FP8_CACHES if not known or name in known][:1]
        price = "a token takes half the memory, at some accuracy"
        yield price, change_argument("kv_cache_dtype", caches)
    for label, method in (("an FP8", "fp8"), ("a 4-bit (AWQ or GPTQ)", "awq")):
        scheme, model = parse_quantization(method), deployment.model
        if scheme.weight_bits < model.quantization.weight_bits:
            narrower = replace(deployment, model=replace(model, quantization=scheme))
            price = "smaller weights, at some accuracy"
            yield price, [(f"{label} checkpoint of the model", narrower)]
    wide = {"tgi": "num_shard"}.get(deployment.engine.name, "tensor_parallel_size")
    layouts = [
        (f"{wide} {layout.tp} ({layout.num_gpus} GPUs)", replace(deployment, layout=layout))
        for layout in _list_wider_layouts(deployment)
    ]
    yield "more GPUs share the model", layouts
    length, _ = find_max_model_len(memory)
    lengths = [length] if MIN_REMEDY_MODEL_LEN <= length < args.max_model_len else []
    yield (
        "longer requests are rejected; it starts at the low end of the interval too",
        change_argument("max_model_len", lengths),
    )


def _list_higher_shares(current: float, safe: float) -> list[float]:
    """List shares of the memory, in hundredths, above the current one and not above the safe one."""
    most = round(100 * min(safe, MAX_REMEDY_UTILIZATION))
    return [percent / 100 for percent in range(math.floor(100 * current + 1e-6) + 1, most + 1)]


def _list_powers_below(current: int, least: int) -> list[int]:
    """List the powers of two from `least` to below `current`, the largest first."""
    return [size for k in range(24, 0, -1) if least <= (size := 2**k) < current]


def _list_wider_layouts(deployment: Deployment) -> Iterator[ParallelLayout]:
    """Yield the layouts of more ranks of tensor parallelism that the engine accepts."""
    layout = deployment.layout
    for tp in (2, 4, 8):
        if not layout.tp < tp <= deployment.gpus_per_node:
            continue
        wider = replace(layout, tp=tp, ep=tp * layout.dp if layout.ep > 1 else 1)
        if not explain_illegal_layout(
            deployment.model, wider, deployment.gpus_per_node, deployment.engine
        ):
            yield wider
