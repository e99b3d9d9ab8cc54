"""What a command's deployment does on a GPU: whether it starts, what fits, how fast it is, and what would be better."""

from dataclasses import dataclass, replace
from typing import Any

from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.memory.memory_plan import MemoryPlan, plan_memory
from planner.planning.argument_advice import (
    ARGUMENT_SUGGESTERS,
    Suggestion,
    _limit_in_flight,
    build_default_workload,
    suggest_changes,
)
from planner.planning.prediction import Prediction, predict
from planner.tools.lint.deployment_reader import build_command_deployment
from planner.tools.lint.option_checks import CheckedCommand
from planner.workload.workload import Workload


@dataclass(frozen=True)
class CommandPlan:
    """A command's deployment on a GPU."""

    deployment: Deployment
    memory: MemoryPlan
    workload: Workload  # of one concurrency; the lengths are what counts
    loads: tuple[Prediction, ...]  # growing numbers of requests in flight
    steps: tuple[Suggestion, ...]
    improved: Prediction | None  # with all steps, at the most requests in flight

    @property
    def sequences(self) -> int:
        """Requests of the mean length that fit the KV pool of one engine."""
        return self.memory.pool.count_sequences(round(self.workload.mean_tokens_per_request))


def plan_command(
    judged: CheckedCommand, gpu: str, version: str, workload: Workload | None = None
) -> CommandPlan:
    """The command on a GPU, under its traffic or one of usual lengths, and the changes that are worth something."""
    deployment = build_command_deployment(judged, gpu, version)
    memory = plan_memory(deployment)
    if workload:
        load = replace(workload, rate=None, concurrency=1, num_prompts=None, trace=None)
    else:
        load = build_default_workload(deployment.args.max_model_len)
    many, engines = _limit_in_flight(memory, load), deployment.num_engine_instances
    sizes = (
        sorted({engines, max(1, many // engines // 4) * engines, many}) if memory.can_start else []
    )
    loads = tuple(predict(deployment, replace(load, concurrency=size)) for size in sizes)
    fixed = judged.command.role or (
        judged.command.planned_on and not workload
    )  # chosen for traffic that is not named
    steps, better = suggest_changes(memory, load, () if fixed else tuple(ARGUMENT_SUGGESTERS))
    return CommandPlan(deployment, memory, load, loads, steps, better)


def serialize_command_plan(plan: CommandPlan) -> dict[str, Any]:
    """What was planned, as JSON: GiB, ms, tokens/s, [middle, low, high]."""
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
        "steps": [{"argument": step.argument, "value": step.value, "worth": step.benefit} for step in plan.steps],
    }  # fmt: skip
