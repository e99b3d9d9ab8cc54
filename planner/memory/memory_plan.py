"""The memory plan: how an engine divides a GPU's memory at startup, and whether it starts.

vLLM 0.20.2 v1/worker/gpu_worker.py:332, 0.33.0 v1/worker/gpu_worker.py:641: the budget is
ceil(total x utilization); the KV cache pool is the rest of it after weights, activation peak,
non-torch memory and, from 0.20.2 on, the CUDA graph estimate.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from statistics import NormalDist
from typing import Literal, get_args

from planner.core.errors import PlannerError
from planner.core.intervals import Z_SCORE_80PCT, Interval
from planner.core.units import GIB
from planner.engines.deployment import Deployment, get_default_memory_utilization
from planner.engines.layout import ParallelLayout
from planner.memory import runtime_overhead
from planner.memory.deployment_changes import (
    MAX_REMEDY_UTILIZATION,
    MIN_REMEDY_MODEL_LEN,
    DeploymentChange,
    list_changes,
)
from planner.memory.kv_cache import KvCacheLayout, KvCachePool, build_kv_layout
from planner.memory.weights import (
    compute_adapter_slot_bytes,
    compute_loaded_bytes,
    compute_stored_bytes,
)
from planner.models.registry import Model

MemoryStatus = Literal["ok", "at_risk", "does_not_fit"]
MEMORY_STATUSES: tuple[MemoryStatus, ...] = get_args(MemoryStatus)
"""From the best to the worst."""
MemoryTerm = Literal["weights", "activation", "non_torch", "cudagraph"]
MEMORY_TERMS: tuple[MemoryTerm, ...] = get_args(MemoryTerm)
"""Terms beside the KV cache in the order of the engine; a memory calibration shifts them."""
MEMORY_TERM_LABELS = {
    "weights": "weights",
    "activation": "activation",
    "non_torch": "non-torch",
    "cudagraph": "CUDA graphs",
}
ADAPTERS_LABEL = "LoRA adapters"
"""The part of the term "weights" that the slots of adapters take."""
WEIGHTS_RELATIVE_SIGMA = 0.004
"""Relative spread of logged weights around the checkpoint's (loader padding, repacked formats)."""
SEARCHED_NUM_SEQS = (256, 64)
"""Values of max_num_seqs that are tried in combinations."""
BOOT_RELATIVE_SPREAD = 0.05
"""Relative spread of a calibrated term over identical starts (first, uncached compile)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per GPU on the rank that decides the pool; parts of the budget sum up exactly."""

    deployment: Deployment
    total_bytes: int
    budget_bytes: int
    weights: Interval
    activation: Interval
    non_torch: Interval
    cudagraph: Interval
    budgeted_terms: tuple[
        MemoryTerm, ...
    ]  # inside the budget beside the KV cache; others are outside
    context: Interval
    kv_available: Interval
    layout: KvCacheLayout
    pool: KvCachePool
    max_concurrency: Interval
    status: MemoryStatus
    reason: str
    warnings: tuple[str, ...]
    adapters_bytes: int = 0  # of the weights: the slots of LoRA adapters

    @property
    def terms(self) -> dict[str, tuple[Interval, bool]]:
        """Each term beside the KV cache by label, and whether the budget covers it; adapters are apart."""
        found = {
            MEMORY_TERM_LABELS[term]: (getattr(self, term), term in self.budgeted_terms)
            for term in MEMORY_TERMS
        }
        if not self.adapters_bytes:
            return found
        weights, is_inside = found.pop("weights")
        slots = Interval.from_value(self.adapters_bytes)
        return {
            "weights": (weights - slots, is_inside), ADAPTERS_LABEL: (slots, is_inside), **found,
        }  # fmt: skip

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """Bytes by name, in sum `total_bytes`; a negative KV cache is missing memory."""
        inside: dict[str, int] = {}
        others = {
            "driver context": round(self.context.mid),
            "other tenants": self.deployment.other_tenants_bytes,
        }
        for label, (term, is_inside) in self.terms.items():
            (inside if is_inside else others)[label] = round(term.mid)
        rest, outside = self.total_bytes - self.budget_bytes, {}
        for name, size in others.items():
            outside[name] = min(rest, size)
            rest -= outside[name]
        return {
            **inside,
            "KV cache": self.budget_bytes - sum(inside.values()),
            **outside,
            "headroom": rest,
        }

    @cached_property
    def remedy(self) -> str:
        """The smallest change after which it fits; empty if it does."""
        return "" if self.status == "ok" else _find_remedy(self)

    @property
    def can_start(self) -> bool:
        """Whether the engine starts: all terms, a request of max_model_len and states fit."""
        return (
            self.status != "does_not_fit"
            and self.pool.max_concurrency_x >= 1
            and self.pool.num_blocks >= self.num_state_blocks
        )

    @property
    def num_state_blocks(self) -> int:
        """Blocks that the start demands for the recurrent states of max_num_seqs sequences."""
        args, facts = self.deployment.args, self.deployment.engine.facts
        demands = facts.state_block_per_sequence and not args.enforce_eager
        has_states = any(group.kind == "state" for group in self.layout.groups)
        return args.max_num_seqs if demands and has_states else 0

    @property
    def max_state_sequences(self) -> float:
        """The largest max_num_seqs whose states surely find blocks; infinite if they need none."""
        blocks = int(max(0.0, self.kv_available.lo) // self.pool.bytes_per_block)
        return blocks if self.num_state_blocks else math.inf

    @cached_property
    def p_fits(self) -> float:
        """The probability, 0 to 1, that the engine starts and does not run out of memory.

        The tightest of three checks counts: free memory at the start, room for one request in the
        KV pool, and what is taken after the pool is allocated. Each interval is an 80% one of a
        normal error.
        """
        if not self.can_start:
            return 0.0
        free, reserve = (
            _estimate_free_at_start(self),
            int(self.deployment.engine.facts.null_block_reserved),
        )
        blocks = max(self.layout.max_blocks_per_request + reserve, self.num_state_blocks)
        want = blocks * self.pool.bytes_per_block
        rest, after = _estimate_after_pool(self)
        checks = (
            (free.mid - self.budget_bytes, free.mid - free.lo),
            (self.kv_available.mid - want, self.kv_available.mid - self.kv_available.lo),
            (rest - after.mid, after.hi - after.mid),
        )
        slack = min(room / reach if reach > 0 else math.copysign(math.inf, room or 1)
                    for room, reach in checks)  # fmt: skip
        return NormalDist().cdf(slack * Z_SCORE_80PCT)

    @property
    def slack_bytes(self) -> float:
        """Bytes that stay free on a GPU once everything is allocated, at the middle."""
        rest, after = _estimate_after_pool(self)
        return rest - after.mid


@dataclass(frozen=True)
class ModelMemory:
    """What a whole model takes, on however many GPUs; MTP layers and adapters are left out."""

    num_params: int
    stored_bytes: int  # in its checkpoint
    loaded_bytes: int  # in the format that the engine loads
    kv_bytes_per_token: float  # of one more token once windows are full


def measure_model(checkpoint: Model, deployment: Deployment) -> ModelMemory:
    """Measure a model as its checkpoint stores it and as a deployment loads it, copied to no second GPU."""
    alone = replace(deployment, layout=ParallelLayout(), speculation=None)
    return ModelMemory(
        checkpoint.architecture.params_total,
        compute_stored_bytes(checkpoint),
        compute_stored_bytes(deployment.model, padded=True),
        build_kv_layout(alone).kv_bytes_per_token,
    )


def plan_memory(deployment: Deployment) -> MemoryPlan:
    """Plan the memory of the fullest pipeline stage, with the deployment's memory calibration."""
    utilization = deployment.args.gpu_memory_utilization
    budget = math.ceil(deployment.gpu_total_bytes * utilization)
    shifts = dict(deployment.memory_calibration)
    if unknown := set(shifts) - set(MEMORY_TERMS):
        raise PlannerError(
            f"memory calibration: unknown term {', '.join(sorted(unknown))}; known:"
            f" {', '.join(MEMORY_TERMS)}"
        )
    in_budget = _select_budgeted_terms(deployment)
    layout = build_kv_layout(deployment)
    context = runtime_overhead.estimate_driver_context(deployment)
    estimate = runtime_overhead.estimate_cudagraph_budget(deployment)
    graphs = (
        estimate
        if "cudagraph" in in_budget
        else runtime_overhead.estimate_cudagraph_actual(deployment, estimate)
    )
    stages = []
    weights = compute_loaded_bytes(deployment)
    non_torch = runtime_overhead.estimate_non_torch(deployment)
    inner = last = runtime_overhead.estimate_activation(deployment)
    if len(weights) > 1:
        inner = runtime_overhead.estimate_activation(deployment, last_stage=False)
    for stage, size in enumerate(weights):
        terms = {
            "weights": Interval.from_lognormal(size, WEIGHTS_RELATIVE_SIGMA),
            "activation": last if stage == len(weights) - 1 else inner,
            "non_torch": non_torch,
            "cudagraph": graphs,
        }
        terms = {
            name: _apply_calibration_shift(term, shifts.get(name)) for name, term in terms.items()
        }
        used = sum((terms[name] for name in in_budget), Interval.from_value(0))
        if deployment.engine.facts.memory_budget == "free":
            # a fraction of the memory that is free beside all other terms
            free = -used - context + (deployment.gpu_total_bytes - deployment.other_tenants_bytes)
            available = free.map_monotone(lambda size: round(utilization * size))
        else:
            available = -used + budget
        if not shifts:
            available = available + runtime_overhead.estimate_start_spread(deployment)
        stages.append((terms, available, round(used.mid)))
    pools = [
        layout.build_pool([getattr(kv, end) for _, kv, _ in stages]) for end in ("lo", "mid", "hi")
    ]
    fullest = min(
        range(len(stages)), key=lambda i: stages[i][1].mid / layout.stage_bytes_per_block[i]
    )
    terms, available, budgeted = stages[fullest]
    memory = MemoryPlan(
        deployment, deployment.gpu_total_bytes, budgeted + round(available.mid), **terms,
        budgeted_terms=in_budget,
        context=context, kv_available=available, layout=layout, pool=pools[1], status="ok",
        reason="", warnings=(),
        max_concurrency=Interval(*(pool.max_concurrency_x for pool in pools)),
        adapters_bytes=compute_adapter_slot_bytes(deployment)[fullest],
    )  # fmt: skip
    status, reason = _determine_status(memory, pools)
    return replace(
        memory, status=status, reason=reason, warnings=(reason,) if status == "at_risk" else ()
    )


@lru_cache(maxsize=4096)
def get_memory_plan(deployment: Deployment) -> MemoryPlan:
    """Plan the memory of a deployment, cached for any number of replicas."""
    memory = _plan_memory_cached(deployment.with_replicas(1))
    return memory if deployment.layout.replicas == 1 else replace(memory, deployment=deployment)


# a search plans thousands, and its what-ifs the same again
_plan_memory_cached = lru_cache(maxsize=16_384)(plan_memory)


def _select_budgeted_terms(deployment: Deployment) -> tuple[MemoryTerm, ...]:
    """Select the terms that share the engine's budget with the KV cache.

    vLLM: all, graphs only if it estimates them; SGLang's static fraction: weights; TensorRT-LLM and
    TGI: all, as they size the pool last.
    """
    budget = deployment.engine.facts.memory_budget
    if budget == "static":
        return ("weights",)
    if budget == "free" or runtime_overhead.estimates_cudagraphs(deployment):
        return MEMORY_TERMS
    return MEMORY_TERMS[:3]


def _apply_calibration_shift(term: Interval, shift: float | None) -> Interval:
    """Round a term to bytes; if calibrated, shift it and limit its width to that of starts."""
    mid = round(term.mid)
    if shift is None:
        return Interval(min(term.lo, mid), mid, max(term.hi, mid))
    shifted = max(0, round(term.mid + shift))
    limit = BOOT_RELATIVE_SPREAD * shifted
    return Interval(
        shifted - min(mid - term.lo, limit), shifted, shifted + min(term.hi - mid, limit)
    )


def _determine_status(memory: MemoryPlan, pools: list[KvCachePool]) -> tuple[MemoryStatus, str]:
    """Determine status and reason from startup check, pool size and memory after the pool."""
    deployment, layout = memory.deployment, memory.layout
    free = _estimate_free_at_start(memory)
    if free.hi < memory.budget_bytes:
        return (
            "does_not_fit",
            (
                f"Free memory on device ({free.mid / GIB:.2f}/{memory.total_bytes / GIB:.2f} GiB)"
                " on startup is less than desired GPU memory utilization"
                f" ({deployment.args.gpu_memory_utilization}, {memory.budget_bytes / GIB:.2f} GiB)"
            ),
        )
    if memory.weights.mid > free.mid:
        return (
            "does_not_fit",
            f"CUDA out of memory while loading {memory.weights.mid / GIB:.2f} GiB of weights:"
            f" {free.mid / GIB:.2f} GiB is free",
        )
    reserve = 1 if deployment.engine.facts.null_block_reserved else 0
    required = layout.max_blocks_per_request + reserve
    if pools[2].num_blocks >= required and pools[0].num_blocks < memory.num_state_blocks:
        is_possible = pools[2].num_blocks >= memory.num_state_blocks
        return (
            "at_risk" if is_possible else "does_not_fit",
            (
                f"max_num_seqs ({memory.num_state_blocks}) {'may exceed' if is_possible else 'exceeds'}"
                f" available Mamba cache blocks ({pools[1].num_blocks}, {pools[0].num_blocks} to"
                f" {pools[2].num_blocks}): each sequence needs one for its recurrent state"
            ),
        )
    if pools[0].num_blocks < required:
        status: MemoryStatus = "at_risk" if pools[2].num_blocks >= required else "does_not_fit"
        have, want = memory.kv_available.mid, required * memory.pool.bytes_per_block
        if have <= 0:
            return (
                status,
                f"No available memory for the cache blocks: the budget lacks {-have / GIB:.2f} GiB",
            )
        return (
            status,
            (
                f"One request of max_model_len {layout.max_model_len} needs {want / GIB:.2f} GiB KV"
                f" cache, {memory.kv_available / GIB:.2f} GiB is available,"
                f" {max(0.0, want - have) / GIB:.2f} GiB is missing; estimated maximum model length"
                f" {layout.compute_max_model_len(memory.pool.num_blocks - reserve)}"
            ),
        )
    if free.lo < memory.budget_bytes:
        return (
            "at_risk",
            (
                f"{free / GIB:.2f} GiB may be free at start, {memory.budget_bytes / GIB:.2f} GiB is"
                " requested"
            ),
        )
    rest, interval = _estimate_after_pool(memory)
    if rest < interval.hi:
        return (
            "at_risk",
            (
                f"CUDA graphs and the sampler's warm-up on {deployment.args.max_num_seqs} rows want"
                f" {interval / GIB:.2f} GiB after the KV pool is allocated, {rest / GIB:.2f} GiB"
                " remains"
            ),
        )
    return "ok", ""


def _estimate_free_at_start(memory: MemoryPlan) -> Interval:
    deployment = memory.deployment
    if deployment.gpu_free_bytes is not None:
        return Interval.from_value(deployment.gpu_free_bytes)
    free = -memory.context + (memory.total_bytes - deployment.other_tenants_bytes)
    return free.map_monotone(lambda size: max(0.0, size))


def _estimate_after_pool(memory: MemoryPlan) -> tuple[float, Interval]:
    """Estimate bytes left after the pool's allocation, and those of graphs and warm-up."""
    deployment = memory.deployment
    free = deployment.gpu_free_bytes
    if free is None:  # of the driver alone: `non_torch` has what NCCL takes
        context = runtime_overhead.get_deployment_constant(deployment, "context")
        free = memory.total_bytes - deployment.other_tenants_bytes - round(context.as_interval.mid)
    rest = free - memory.budget_bytes + memory.activation.mid
    if deployment.engine.facts.memory_budget != "total":
        return rest, Interval.from_value(0)
    graphs = Interval.from_value(0) if "cudagraph" in memory.budgeted_terms else memory.cudagraph
    return rest, runtime_overhead.estimate_after_pool(deployment, graphs)


def find_safe_memory_utilization(deployment: Deployment) -> float:
    """Find the largest safe gpu_memory_utilization, in hundredths.

    It passes the startup check and leaves memory for graphs and warm-up after the pool.
    """
    memory = get_memory_plan(deployment)
    rest, interval = _estimate_after_pool(memory)
    limit = min(
        _estimate_free_at_start(memory).lo,
        memory.budget_bytes + rest - interval.hi,
        memory.total_bytes,
    )
    return max(0.0, math.floor(100 * limit / memory.total_bytes) / 100)


def explain_memory_utilization(deployment: Deployment) -> str:
    """Explain a gpu_memory_utilization that is not the engine's default; empty if it is."""
    default = get_default_memory_utilization(deployment)
    if deployment.args.gpu_memory_utilization == default:
        return ""
    safe = find_safe_memory_utilization(deployment)
    return (
        f"the default is {default:g}; up to {safe:g} starts and leaves what the engine takes later"
    )


def _find_remedy(memory: MemoryPlan) -> str:
    """Describe the cheapest changes after which the memory plan is ok."""
    if changes := find_memory_changes(memory):
        settings = [
            f"{name} to {value}"
            for change in changes
            if not change.instruction
            for name, value in change.list_settings(memory.deployment).items()
        ]
        steps = [change.instruction for change in changes if change.instruction]
        return "; ".join([*steps, *([f"set {' and '.join(settings)}"] if settings else [])])
    sizes = range(math.ceil(memory.total_bytes / GIB), 1024)
    empty = replace(memory.deployment, gpu_free_bytes=None)
    index = bisect_left(
        sizes,
        True,
        key=lambda gib: plan_memory(replace(empty, gpu_total_bytes=gib * GIB)).status == "ok",
    )
    if index == len(sizes):
        return "use a smaller model"
    return f"use GPUs with {sizes[index]} GiB or more"


def find_memory_changes(
    memory: MemoryPlan, arguments: Collection[str] | None = None, max_gpus: float = math.inf
) -> tuple[DeploymentChange, ...]:
    """Find the cheapest combination of changes after which the memory plan is ok.

    Only `arguments` change (all, if None), and the layout takes at most `max_gpus` GPUs. Empty if
    no combination helps.
    """
    deployment = memory.deployment
    limit = memory.max_state_sequences
    changes = {
        argument: [] if arguments is not None and argument not in arguments else of_argument
        for argument, of_argument in list_changes(deployment, max_state_sequences=limit).items()
    }
    layouts = [change for change in changes.pop("layout") if change.value.num_gpus <= max_gpus]
    bases = _list_combinations([layouts, changes.pop("quantization")])
    searched = (*SEARCHED_NUM_SEQS, limit)
    changes["max_num_seqs"] = [c for c in changes["max_num_seqs"] if c.value in searched]
    changes["max_num_batched_tokens"] = changes["max_num_batched_tokens"][-1:]
    last = [changes.pop(name) for name in ("gpu_memory_utilization", "max_model_len")]
    choices = _list_combinations([*changes.values(), *last])  # the others decide their values
    best: tuple[DeploymentChange, ...] = ()
    for base in bases:
        if best and _sum_costs(base) >= _sum_costs(best):
            break
        for has_length in (False, True):
            group = [
                [*base, *choice]
                for choice in choices
                if has_length == any(change.argument == "max_model_len" for change in choice)
            ]
            # what does not fit with all changes at once fits with none of them
            if not group or not _apply_changes(deployment, group[-1]):
                continue
            fitting = list(filter(None, (_apply_changes(deployment, choice) for choice in group)))
            best = min([*([best] if best else []), *fitting], key=_sum_costs)
            break
    return best


def _list_combinations(
    groups: Iterable[Sequence[DeploymentChange]],
) -> list[list[DeploymentChange]]:
    """List the combinations of at most one change of each group, the cheapest first."""
    combinations = product(*([None, *group] for group in groups))
    return sorted(([c for c in combination if c] for combination in combinations), key=_sum_costs)


def _sum_costs(changes: Iterable[DeploymentChange]) -> float:
    return sum(change.cost for change in changes)


def list_utilizations(deployment: Deployment) -> list[float]:
    """List the values of gpu_memory_utilization that may help: higher ones, or a lower safe one."""
    current, safe = deployment.args.gpu_memory_utilization, find_safe_memory_utilization(deployment)
    if 0 < safe < current:
        return [safe]
    largest = round(100 * min(safe, MAX_REMEDY_UTILIZATION))
    return [percent / 100 for percent in range(math.floor(100 * current + 1e-6) + 1, largest + 1)]


def find_larger_utilization(deployment: Deployment) -> float | None:
    """Find the largest safe gpu_memory_utilization to propose; None if the current one is it."""
    largest = list_utilizations(deployment)[-1:]
    return next((u for u in largest if u > deployment.args.gpu_memory_utilization), None)


def list_shorter_lengths(memory: MemoryPlan) -> list[int]:
    """List the max_model_len that surely starts, if it is shorter than the planned one."""
    length, _ = find_max_model_len(memory)
    limit = memory.deployment.args.max_model_len
    return [length] if MIN_REMEDY_MODEL_LEN <= length < limit else []


def _apply_changes(
    deployment: Deployment, changes: Sequence[DeploymentChange]
) -> tuple[DeploymentChange, ...] | None:
    """Return the changes with the values that they take together; None if it does not fit."""
    applied, changed, utilizations = list[DeploymentChange](), deployment, list[float]()
    try:
        for change in changes:
            if change.argument == "gpu_memory_utilization":
                if not (utilizations := list_utilizations(changed)):
                    continue
                change = replace(change, value=utilizations[-1])
            elif change.argument == "max_model_len":
                if not (lengths := list_shorter_lengths(plan_memory(changed))):
                    continue
                halvings = math.log2(changed.args.max_model_len / lengths[0])
                change = replace(change, value=lengths[0], cost=change.cost * (1 + halvings))
            changed = change.apply(changed)
            applied.append(change)
        if not applied or plan_memory(changed).status != "ok":
            return None
    except PlannerError:  # this GPU or engine does not have the change
        return None
    least = bisect_left(
        utilizations[:-1],
        True,
        key=lambda share: (
            plan_memory(changed.with_args(gpu_memory_utilization=share)).status == "ok"
        ),
    )
    return tuple(
        replace(change, value=utilizations[least])
        if change.argument == "gpu_memory_utilization"
        else change
        for change in applied
    )


def find_max_model_len(memory: MemoryPlan) -> tuple[int, int]:
    """Find the largest max_model_len at the lower end of the KV interval, and at its middle.

    Neither exceeds the model's own limit.
    """
    limit = memory.deployment.model.architecture.max_position
    reserve = memory.deployment.engine.facts.null_block_reserved
    blocks = (
        int(max(0.0, size) // memory.pool.bytes_per_block)
        for size in (memory.kv_available.lo, memory.kv_available.mid)
    )
    safe, likely = (
        min(limit, memory.layout.compute_max_model_len(max(0, n - reserve))) for n in blocks
    )
    return safe, likely
