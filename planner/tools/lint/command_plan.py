"""Plan a command's deployment on a GPU: memory, latency at several loads, and better arguments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.core.errors import PlannerError
from planner.core.intervals import Interval
from planner.core.number_format import format_number
from planner.core.units import GIB
from planner.core.versions import Version
from planner.engines.argument_names import load_argument_names
from planner.engines.cli_options import is_unresolved
from planner.engines.deployment import Deployment
from planner.hardware.gpus import Gpu, list_gpus
from planner.memory.memory_plan import (
    MemoryPlan,
    find_max_model_len,
    get_default_memory_utilization,
    plan_memory,
)
from planner.planning.argument_advice import (
    ARGUMENT_SUGGESTERS,
    Suggestion,
    build_default_workload,
    limit_in_flight,
    suggest_changes,
)
from planner.planning.memory_remedies import MemoryRemedies
from planner.planning.prediction import Prediction, predict
from planner.tools.lint.deployment_reader import (
    UnmodelledError,
    build_command_deployment,
    read_pool_option,
)
from planner.tools.lint.memory_advice import (
    describe_remedies,
    find_command_remedies,
    reduce_adapters,
)
from planner.tools.lint.option_checks import CheckedCommand
from planner.workload.workload import Workload

_CAPPING_ENGINES = ("sglang",)
"""Engines that start although the KV cache is shorter than the context, and refuse longer requests.

SGLang 0.5.9 managers/tp_worker.py: max_req_len = min(context_len - 1, max_total_num_tokens - 1); so
started sglang issue 4048 with 163,840 and room for 59,868.
"""
FIRST_RELEASE_THAT_CHECKS_BLOCKS = Version(0, 20, 2)
"""Since then vLLM compares max_model_len with the blocks of --num-gpu-blocks-override.

v1/core/kv_cache_utils.py:1982 of 0.20.2; 0.20.0 compares it with the memory that was measured.
"""
REFERENCE_GPU = "H100-SXM"
"""GPU by which weights and KV cache are counted if none is named; they are the same on others."""


@dataclass(frozen=True)
class CommandPlan:
    """A command's deployment on a GPU."""

    deployment: Deployment
    memory: MemoryPlan
    workload: Workload  # at concurrency 1; only its lengths matter
    loads: tuple[Prediction, ...]  # at increasing concurrency
    steps: tuple[Suggestion, ...]
    improved: Prediction | None  # with all steps, at the highest concurrency
    remedies: MemoryRemedies | None = None  # against too little memory; None if it starts
    capped_length: int | None = None  # tokens that requests may have, if the cache holds no more
    pool_argument: str = ""  # that sets the size of the KV cache itself

    @property
    def shortage(self) -> list[str]:
        """What is missing of the memory, and what is enough against it, a line each."""
        return describe_remedies(self.memory, self.remedies) if self.remedies else []

    @property
    def sequences(self) -> int:
        """Requests of mean length that fit the KV cache pool of one engine instance."""
        return self.memory.pool.count_sequences(round(self.workload.mean_tokens_per_request))


def plan_command(
    checked: CheckedCommand, gpu: str, version: str, workload: Workload | None = None
) -> CommandPlan:
    """Plan the command on a GPU, under `workload` or one of typical lengths, and suggest changes.

    Raises `PlannerError` for a deployment that is unknown
    or that the engine rejects.
    """
    memory, pool_argument = plan_command_memory(checked, gpu, version)
    deployment, capped_length = memory.deployment, None
    starts_with_any_pool = deployment.engine.name in _CAPPING_ENGINES or (
        pool_argument == "num_gpu_blocks_override"
        and deployment.engine.release < FIRST_RELEASE_THAT_CHECKS_BLOCKS
    )
    # vLLM takes the length that fits (v1/core/kv_cache_utils.py, 0.14 to 0.33.0)
    is_fitted = checked.argument_values.get("max_model_len") in ("auto", "-1", -1)
    if (is_fitted and memory.status != "ok") or (not memory.can_start and starts_with_any_pool):
        deployment, memory, capped_length = _cap_length(memory, read_pool_option(checked))
    if workload:
        load = replace(workload, rate=None, concurrency=1, num_prompts=None, trace=None)
    else:
        load = build_default_workload(deployment.args.max_model_len)
    max_in_flight, engines = limit_in_flight(memory, load), deployment.num_engine_instances
    sizes = (
        sorted({engines, max(1, max_in_flight // engines // 4) * engines, max_in_flight})
        if memory.can_start
        else []
    )
    loads = tuple(predict(deployment, replace(load, concurrency=size)) for size in sizes)
    # The arguments of a plan were chosen for a workload that is not known here.
    is_fixed = checked.command.role or (checked.command.planned_on and not workload)
    if pool_argument and memory.status != "ok":  # what else is changed, the pool stays as it is
        return CommandPlan(
            deployment, memory, load, loads, (), None, None, capped_length, pool_argument
        )
    share = deployment.args.gpu_memory_utilization
    is_shared = share < get_default_memory_utilization(deployment) or pool_argument
    names = [] if is_fixed else [
        name for name in ARGUMENT_SUGGESTERS if name != "gpu_memory_utilization" or not is_shared
    ]  # fmt: skip
    steps, improved = _suggest(memory, load, names)
    steps = tuple(_warn(step, deployment, bool(is_shared)) for step in steps)
    remedies = find_command_remedies(memory)
    return CommandPlan(
        deployment, memory, load, loads, steps, improved, remedies, capped_length, pool_argument
    )


def _suggest(
    memory: MemoryPlan, load: Workload, names: Sequence[str]
) -> tuple[tuple[Suggestion, ...], Prediction | None]:
    """Suggest what makes a command start, fewer slots of adapters first, or what never slows it.

    A larger pool can take throughput where it lets more requests crowd a step.
    """
    if fewer := reduce_adapters(memory):
        steps, improved = suggest_changes(plan_memory(fewer), load, names)
        settings = {
            "max_loras": "fewer adapters run at once",
            "max_cpu_loras": "adapters that wait in host memory",
        }
        adapters = (
            Suggestion(name, getattr(fewer.args, name), why) for name, why in settings.items()
        )
        return (*adapters, *steps), improved or predict(fewer, load)
    steps, improved = suggest_changes(memory, load, names)
    while steps and improved and improved.workload and memory.status == "ok":
        before = predict(memory.deployment, improved.workload).performance
        after = improved.performance
        if not (before and after) or after.output_tps.mid >= before.output_tps.mid:
            break
        called = load_argument_names(memory.deployment.engine.name).engine_names
        names = [name for name in names if called.get(name) != steps[-1].argument]
        steps, improved = suggest_changes(memory, load, names)
    return steps, improved


def plan_command_memory(checked: CheckedCommand, gpu: str, version: str) -> tuple[MemoryPlan, str]:
    """Plan the memory of a command on a GPU, and name the argument that sets its KV cache, if any.

    The cache then has that size whatever the share of the memory, which still has to be free at the
    start: vLLM 0.33.0 v1/worker/gpu_worker.py:542 and 656. Raises `PlannerError` for a deployment
    that is unknown or that the engine rejects.
    """
    deployment = build_command_deployment(checked, gpu, version)
    memory, given = plan_memory(deployment), read_pool_option(checked)
    if given is None or memory.reason.startswith("Free memory"):
        return memory, ""
    return _plan_with_pool(memory, *given), given[0]


def _plan_with_pool(memory: MemoryPlan, argument: str, size: int) -> MemoryPlan:
    """Plan again with a KV cache of exactly that many bytes, or blocks of --num-gpu-blocks-override."""
    pool, layout, deployment = memory.pool, memory.layout, memory.deployment
    is_blocks = argument == "num_gpu_blocks_override"
    num_bytes = size * pool.bytes_per_block if is_blocks else size
    needed = layout.max_blocks_per_request + int(deployment.engine.facts.null_block_reserved)
    needed = max(needed, memory.num_state_blocks)
    is_enough = num_bytes // pool.bytes_per_block >= needed
    share = deployment.args.gpu_memory_utilization
    target = num_bytes + pool.bytes_per_block / 2
    pinned = plan_memory(_shift_share(deployment, share, target - memory.kv_available.mid))
    exact = replace(pinned, kv_available=Interval.from_value(num_bytes))
    # whether the rest fits is judged with the spread on top, as the size itself is certain
    spread = memory.kv_available.mid - memory.kv_available.lo if is_enough else 0.0
    judged = plan_memory(_shift_share(deployment, share, target - memory.kv_available.mid + spread))
    if judged.reason.startswith("Free memory"):
        others = pinned.budget_bytes - num_bytes
        reason = (
            f"{argument} takes {num_bytes / GIB:.2f} GiB, and weights, activations and graphs"
            f" {others / GIB:.2f} GiB: of {memory.total_bytes / GIB:.2f} GiB not as much is free"
        )
        return replace(exact, status="does_not_fit", reason=reason)
    if is_enough:
        return replace(exact, status=judged.status, reason=judged.reason)
    by_states = needed == memory.num_state_blocks
    needs = (
        f"The states of max_num_seqs {deployment.args.max_num_seqs} need"
        if by_states
        else f"One request of max_model_len {layout.max_model_len} needs"
    )
    reason = (
        f"{needs} {needed:,} blocks of the KV cache, and {argument} gives {exact.pool.num_blocks:,}"
    )
    return replace(exact, status="does_not_fit", reason=reason)


def _shift_share(deployment: Deployment, share: float, num_bytes: float) -> Deployment:
    """Return the deployment with that many bytes more in its share of the memory."""
    return deployment.with_args(
        gpu_memory_utilization=share + num_bytes / deployment.gpu_total_bytes
    )


def _warn(step: Suggestion, deployment: Deployment, is_shared: bool) -> Suggestion:
    """Say what a step rests on: a share above the one of the command, or the format of its cache."""
    is_larger = is_shared and step.argument == "gpu_memory_utilization"
    if is_larger and step.value > deployment.args.gpu_memory_utilization:
        return replace(step, benefit=f"{step.benefit}, if nothing else uses the GPU")
    if step.argument != "kv_cache_dtype":
        return step
    has_fp8 = "fp8" in deployment.gpu.peak_flops
    caution = "" if has_fp8 else ", and the GPU has no FP8 arithmetic: compare answers first"
    return replace(step, benefit=f"{step.benefit}, at some accuracy{caution}")


def _cap_length(
    memory: MemoryPlan, pool: tuple[str, int] | None
) -> tuple[Deployment, MemoryPlan, int | None]:
    """Return a deployment and its memory with the length that its KV cache holds, if that starts."""
    deployment, length = memory.deployment, find_max_model_len(memory)[0]
    if length < 1:
        return deployment, memory, None
    capped = replace(deployment, args=replace(deployment.args, max_model_len=length))
    capped_memory = plan_memory(capped)
    if pool:
        capped_memory = _plan_with_pool(capped_memory, *pool)
    if not capped_memory.can_start:
        return deployment, memory, None
    return capped_memory.deployment, capped_memory, length


@dataclass(frozen=True)
class MemoryNeed:
    """What each GPU of a command has to hold at least, whichever GPU it is."""

    num_gpus: int
    weights_bytes: float
    kv_bytes: float  # of one request of max_model_len
    max_model_len: int

    @property
    def gib(self) -> float:
        """GiB on each GPU; activations, CUDA graphs and the driver come on top."""
        return (self.weights_bytes + self.kv_bytes) / GIB

    @property
    def exceeds_all_gpus(self) -> bool:
        """Whether no GPU of the catalog has as much."""
        return self.gib * GIB > find_largest_gpu().memory_bytes

    def __str__(self) -> str:
        where = f"each of its {self.num_gpus} GPUs" if self.num_gpus > 1 else "its GPU"
        total, weights, kv = (
            format_number(gib) for gib in (self.gib, self.weights_bytes / GIB, self.kv_bytes / GIB)
        )
        return (
            f"it needs more than {total} GiB on {where} ({weights} GiB of weights, {kv} GiB of KV"
            f" cache for one request of {self.max_model_len:,} tokens)"
        )


def find_largest_gpu() -> Gpu:
    """Find the GPU of the catalog with the most memory."""
    return max(list_gpus(), key=lambda gpu: gpu.memory_bytes)


def describe_largest_gpu() -> str:
    """Describe the GPU of the catalog with the most memory."""
    gpu = find_largest_gpu()
    return f"{gpu.memory_bytes / GIB:,.0f} GiB ({gpu.name})"


def compute_memory_need(checked: CheckedCommand, version: str) -> MemoryNeed | None:
    """Compute the least memory of a command whose GPU is not known.

    None if its model or a value is not known. Raises `UnmodelledError` for what no GPU would help.
    """
    values = checked.argument_values
    if any(map(is_unresolved, values.values())):
        return None
    try:
        deployment = build_command_deployment(checked, REFERENCE_GPU, version)
        memory = plan_memory(deployment)
    except UnmodelledError:
        raise
    except PlannerError:
        return None
    return MemoryNeed(
        deployment.layout.num_gpus,
        memory.weights.mid,
        memory.layout.max_blocks_per_request * memory.pool.bytes_per_block,
        deployment.args.max_model_len,
    )


def serialize_command_plan(plan: CommandPlan) -> dict[str, Any]:
    """Return the plan as JSON: GiB, ms, tokens/s; intervals as [expected, low, high]."""
    loads = [
        {
            "concurrency": prediction.workload.concurrency,
            "output_tps": prediction.performance.output_tps.as_json_list,
            "ttft_ms_p50": (prediction.performance.get("ttft", "p50") * 1e3).as_json_list,
            "ttft_ms_p95": (prediction.performance.get("ttft", "p95") * 1e3).as_json_list,
            "tpot_ms_mean": (prediction.performance.get("tpot", "mean") * 1e3).as_json_list,
            "preemptions_per_request": prediction.performance.preemptions,
        }
        for prediction in plan.loads if prediction.performance and prediction.workload
    ]  # fmt: skip
    return {
        "deployment": str(plan.deployment), "starts": plan.memory.can_start,
        "status": plan.memory.status,
        "reason": plan.memory.reason,
        "kv_available_gib": (plan.memory.kv_available / GIB).as_json_list,
        "kv_tokens": plan.memory.pool.reported_tokens, "sequences": plan.sequences,
        "prompt_tokens_mean": plan.workload.prompt.mean,
        "output_tokens_mean": plan.workload.output.mean,
        "loads": loads,
        "remedies": plan.remedies and plan.remedies.to_json(),
        "steps": [
            {"argument": step.argument, "value": step.value, "worth": step.benefit}
            for step in plan.steps
        ],
    }  # fmt: skip
