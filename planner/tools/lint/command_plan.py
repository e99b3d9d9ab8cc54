"""Plan a command's deployment on a GPU: memory, latency at several loads, and better arguments."""

from dataclasses import dataclass, replace
from typing import Any

from planner.core.errors import PlannerError
from planner.core.units import GIB
from planner.engines.cli_options import is_unresolved
from planner.engines.deployment import Deployment, get_default_memory_utilization
from planner.memory.memory_plan import MemoryPlan, find_max_model_len, plan_memory
from planner.planning.argument_advice import (
    ARGUMENT_SUGGESTERS,
    Suggestion,
    build_default_workload,
    limit_in_flight,
    suggest_changes,
)
from planner.planning.memory_remedies import MemoryRemedies, find_memory_remedies
from planner.planning.prediction import Prediction, predict
from planner.tools.lint.deployment_reader import UnmodelledError, build_command_deployment
from planner.tools.lint.option_checks import CheckedCommand
from planner.workload.workload import Workload

_CAPPING_ENGINES = ("sglang",)
"""Engines that start although the KV cache is shorter than the context, and refuse longer requests.

SGLang 0.5.9 managers/tp_worker.py: max_req_len = min(context_len - 1, max_total_num_tokens - 1); so
started sglang issue 4048 with 163,840 and room for 59,868.
"""
FITTED_LENGTHS = ("auto", "-1", -1)
"""Values of max_model_len for which vLLM takes the length that fits (v1/core/kv_cache_utils.py)."""
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
    memory, capped_length = plan_memory(build_command_deployment(checked, gpu, version)), None
    is_fitted = checked.argument_values.get("max_model_len") in FITTED_LENGTHS
    is_capped = memory.deployment.engine.name in _CAPPING_ENGINES and not memory.can_start
    length = (
        find_max_model_len(memory)[0] if is_capped or (is_fitted and memory.status != "ok") else 0
    )
    if length > 0:
        capped = plan_memory(memory.deployment.with_args(max_model_len=length))
        memory, capped_length = (capped, length) if capped.can_start else (memory, None)
    deployment = memory.deployment
    if workload:
        load = replace(workload, rate=None, concurrency=1, num_prompts=None, trace=None)
    else:
        load = build_default_workload(deployment.args.max_model_len)
    most, engines = limit_in_flight(memory, load), deployment.num_engine_instances
    sizes = {engines, max(1, most // engines // 4) * engines, most} if memory.can_start else set()
    loads = tuple(predict(deployment, replace(load, concurrency=size)) for size in sorted(sizes))
    # The arguments of a plan were chosen for a workload that is not known here.
    is_fixed = checked.command.role or (checked.command.planned_on and not workload)
    # who asks for less than the default shares the GPU
    share, usual = (
        deployment.args.gpu_memory_utilization,
        get_default_memory_utilization(deployment),
    )
    names = [] if is_fixed else [
        name for name in ARGUMENT_SUGGESTERS if name != "gpu_memory_utilization" or share >= usual
    ]  # fmt: skip
    steps, improved = suggest_changes(memory, load, names)
    remedies = find_memory_remedies(memory)
    return CommandPlan(deployment, memory, load, loads, steps, improved, remedies, capped_length)


def plan_least_memory(checked: CheckedCommand, version: str) -> MemoryPlan | None:
    """Plan the memory of a command whose GPU is not known: only weights and KV cache count.

    None if its model or a value is not known. Raises `UnmodelledError` for what no GPU would help.
    """
    if any(map(is_unresolved, checked.argument_values.values())):
        return None
    try:
        return plan_memory(build_command_deployment(checked, REFERENCE_GPU, version))
    except UnmodelledError:
        raise
    except PlannerError:
        return None


def compute_least_bytes(memory: MemoryPlan) -> float:
    """Compute what weights and one request take of each GPU; activations and graphs come on top."""
    return memory.weights.mid + memory.layout.max_blocks_per_request * memory.pool.bytes_per_block


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
