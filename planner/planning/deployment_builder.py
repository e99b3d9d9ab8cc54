"""From a scenario to a deployment: the one place where its settings become an engine's arguments."""

import math
from functools import lru_cache
from typing import Any

from planner.engines.deployment import Deployment, ParallelLayout, SpeculationConfig, deploy_on
from planner.memory.concurrency_limits import find_safe_max_num_seqs
from planner.memory.memory_plan import find_safe_memory_utilization, get_memory_plan
from planner.models.registry import Model
from planner.planning.scenario import CandidateGpu, Scenario
from planner.workload.workload import Workload

MODEL_LEN_STEP_TOKENS = 256
"""max_model_len is rounded up to a multiple of this."""
NUM_SEQS_STEP = 8
"""max_num_seqs is a multiple of this: CUDA graphs are captured at such batch sizes."""
DEFAULT_LORA_SLOTS = 16
"""Slots for adapters, max_loras, unless they are settled; the search tries others (`planning.variants`)."""
MAX_NUM_SEQS = 1024
"""The largest max_num_seqs tried: vLLM's own default on its largest GPUs."""


@lru_cache(maxsize=64)
def choose_max_model_len(workload: Workload, buffer: float, limit: int) -> int:
    """The max_model_len to serve `workload` with: p99 of prompt + output plus `buffer`, rounded up, at most `limit`."""
    wanted = workload.compute_total_tokens_quantile(0.99) * (1 + buffer)
    return min(math.ceil(wanted / MODEL_LEN_STEP_TOKENS) * MODEL_LEN_STEP_TOKENS, limit)


def build_deployment(
    scenario: Scenario, candidate_gpu: CandidateGpu, model: Model, layout: ParallelLayout,
    kv_cache_dtype: str = "auto",
    speculation: SpeculationConfig | None = None,
) -> Deployment:  # fmt: skip
    """`served` on one kind of GPU as the scenario sets it up, with the limits that its traffic and memory allow."""
    length = choose_max_model_len(
        scenario.workload, scenario.context_buffer, model.architecture.max_position
    )
    args: dict[str, Any] = {"max_model_len": length, "kv_cache_dtype": kv_cache_dtype}
    if adapters := scenario.workload.adapters:
        args["max_loras"] = min(
            adapters, DEFAULT_LORA_SLOTS, int(scenario.engine_args["max_cpu_loras"])
        )
    args |= scenario.engine_args
    deployment = deploy_on(
        model, candidate_gpu.gpu, **vars(layout), engine=scenario.engine, speculation=speculation,
        interconnect=candidate_gpu.interconnect, gpus_per_node=candidate_gpu.max_machine_gpus,
        other_tenants=scenario.other_tenants,
        spare_replicas=scenario.spare_replicas, sold_in=candidate_gpu.machine_sizes,
        memory_calibration=scenario.memory_calibration, **args,
    )  # fmt: skip
    return set_max_num_seqs(scenario, deployment)


def _limit_to_free_memory(scenario: Scenario, deployment: Deployment) -> Deployment:
    """The engine's own gpu_memory_utilization, or what others on the GPU leave to it where that is too much."""
    if "gpu_memory_utilization" in scenario.engine_args:
        return deployment
    usual, share = get_memory_plan(deployment), deployment.args.gpu_memory_utilization
    safe = 0.0 if usual.status == "ok" else find_safe_memory_utilization(deployment)
    if not 0 < safe < share:
        return deployment
    less = deployment.with_args(gpu_memory_utilization=safe)
    standings = [
        (memory.can_start, memory.status == "ok") for memory in (get_memory_plan(less), usual)
    ]
    return less if standings[0] > standings[1] else deployment


def set_max_num_seqs(scenario: Scenario, deployment: Deployment) -> Deployment:
    """With the max_num_seqs that its KV pool holds in 95% of moments; memory is judged with that, not the default."""
    tried = _limit_to_free_memory(scenario, deployment)
    if "max_num_seqs" in scenario.engine_args:
        return tried
    usual = seqs = deployment.args.max_num_seqs
    while not get_memory_plan(tried).can_start and seqs > NUM_SEQS_STEP:
        seqs = min(256, seqs // 2)
        tried = _limit_to_free_memory(scenario, deployment.with_args(max_num_seqs=seqs))
    if not get_memory_plan(tried).can_start:
        return deployment
    most = min(
        MAX_NUM_SEQS if scenario.offline and seqs == usual else seqs,
        tried.args.max_num_batched_tokens,
    )

    def held(seqs: int) -> int:
        """Sequences that the pool holds beside what the engine sets aside for `seqs`."""
        fits = find_safe_max_num_seqs(
            get_memory_plan(tried.with_args(max_num_seqs=seqs)), scenario.workload
        )
        return min(most, fits // NUM_SEQS_STEP * NUM_SEQS_STEP or max(fits, 1))

    more = held(held(seqs))  # beside fewer sequences the pool is larger than beside the default
    return tried.with_args(max_num_seqs=min(more, held(more)))
