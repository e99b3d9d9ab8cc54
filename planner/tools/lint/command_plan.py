"""Plan a command's deployment on a GPU: memory, latency at several loads, and better arguments."""

from dataclasses import dataclass, replace
from typing import Any

from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.memory.memory_plan import MemoryPlan, plan_memory
from planner.planning.argument_advice import (
    ARGUMENT_SUGGESTERS,
    Suggestion,
    build_default_workload,
    limit_in_flight,
    suggest_changes,
)
from planner.planning.memory_remedies import MemoryRemedies, find_memory_remedies
from planner.planning.prediction import Prediction, predict
from planner.tools.lint.deployment_reader import build_command_deployment
from planner.tools.lint.option_checks import CheckedCommand
from planner.workload.workload import Workload


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

    @property
    def sequences(self) -> int:
        """Requests of mean length that fit the KV cache pool of one engine instance."""
        return self.memory.pool.count_sequences(round(self.workload.mean_tokens_per_request))


def plan_command(
    checked: CheckedCommand, gpu: str, version: str, workload: Workload | None = None
) -> CommandPlan:
    """Plan the command on a GPU, under `workload` or one of typical lengths, and suggest changes.

    Raises `PlannerError` for a deployment that is unknown or that the engine rejects.
    """
    deployment = build_command_deployment(checked, gpu, version)
    memory = plan_memory(deployment)
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
    steps, improved = suggest_changes(memory, load, () if is_fixed else tuple(ARGUMENT_SUGGESTERS))
    remedies = find_memory_remedies(memory)
    return CommandPlan(deployment, memory, load, loads, steps, improved, remedies)


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
