"""Build deployments: the one place where a scenario's settings become engine arguments."""

import math
from functools import lru_cache
from typing import Any

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment, deploy_on
from planner.engines.layout import ParallelLayout, SpeculationConfig
from planner.memory.concurrency_limits import find_safe_max_num_seqs
from planner.memory.memory_plan import get_memory_plan
from planner.models.registry import Model, find_published_checkpoint, load_model
from planner.parallelism.start_gate import explain_refused_model
from planner.planning.memory_odds import list_memory_utilizations
from planner.planning.scenario import CandidateGpu, Scenario
from planner.workload.workload import Workload

MODEL_LEN_STEP_TOKENS = 256
"""max_model_len is rounded up to a multiple of this."""
NUM_SEQS_STEP = 8
"""max_num_seqs is a multiple of this, because CUDA graphs are captured at such batch sizes."""
DEFAULT_LORA_SLOTS = 64
"""Default max_loras, the adapter slots; the search tries others (`planning.engine_tuning`)."""
MAX_NUM_SEQS = 1024
"""The largest max_num_seqs tried: vLLM's own default on its largest GPUs."""


@lru_cache(maxsize=256)
def load_format(source: str, quantization: str | None) -> Model:
    """Load a model in a format: its published checkpoint where one is known, else converted on load."""
    model, published = load_model(source), None
    if quantization is not None and not (model.quantization.schemes or model.is_inferred):
        published = find_published_checkpoint(quantization, model)
    return load_model(published) if published else load_model(source, quantization=quantization)


@lru_cache(maxsize=64)
def choose_max_model_len(workload: Workload, buffer: float, limit: int) -> int:
    """Return the max_model_len for `workload`: p99 of prompt + output plus `buffer`, up to `limit`.

    `buffer` is a fraction; the sum is rounded up to `MODEL_LEN_STEP_TOKENS`.
    """
    tokens = workload.compute_total_tokens_quantile(0.99) * (1 + buffer)
    return min(math.ceil(tokens / MODEL_LEN_STEP_TOKENS) * MODEL_LEN_STEP_TOKENS, limit)


def build_deployment(
    scenario: Scenario, candidate_gpu: CandidateGpu, model: Model, layout: ParallelLayout,
    kv_cache_dtype: str = "auto",
    speculation: SpeculationConfig | None = None,
) -> Deployment:  # fmt: skip
    """Build the scenario's deployment, with the limits that its workload and memory allow.

    Raises `PlannerError` for a model or arguments that the engine refuses; the layout is legal.
    """
    max_model_len = choose_max_model_len(
        scenario.workload, scenario.context_buffer, model.architecture.max_position
    )
    args: dict[str, Any] = {"max_model_len": max_model_len, "kv_cache_dtype": kv_cache_dtype}
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
    if reason := explain_refused_model(model, candidate_gpu.gpu, scenario.engine):
        raise PlannerError(reason)
    return set_max_num_seqs(scenario, deployment)


def _limit_to_free_memory(scenario: Scenario, deployment: Deployment) -> Deployment:
    """Lower the engine's default gpu_memory_utilization if other tenants leave less memory.

    The lower one is used only if the engine then gets further in its start-up.
    """
    if "gpu_memory_utilization" in scenario.engine_args:
        return deployment
    if get_memory_plan(deployment).status == "ok":
        return deployment
    shares = list_memory_utilizations(deployment)
    lowered = (
        deployment.with_args(gpu_memory_utilization=share)
        for share in shares if 0 < share < deployment.args.gpu_memory_utilization
    )  # fmt: skip

    def rank(tried: Deployment) -> tuple[bool, bool]:
        memory = get_memory_plan(tried)
        return memory.can_start, memory.status == "ok"

    return max((deployment, *lowered), key=rank)  # the first of equals


def set_max_num_seqs(scenario: Scenario, deployment: Deployment) -> Deployment:
    """Set the max_num_seqs whose sequences fit into the KV cache pool with 95% probability.

    A max_num_seqs of the scenario stays. The memory plan is that of the number set, not of the
    engine's default.
    """
    tried = _limit_to_free_memory(scenario, deployment)
    if "max_num_seqs" in scenario.engine_args:
        return tried
    default = seqs = deployment.args.max_num_seqs
    while not (memory := get_memory_plan(tried)).can_start and seqs > NUM_SEQS_STEP:
        limit = memory.max_state_sequences // NUM_SEQS_STEP * NUM_SEQS_STEP
        seqs = int(limit) if 0 < limit < seqs else min(256, seqs // 2)
        tried = _limit_to_free_memory(scenario, deployment.with_args(max_num_seqs=seqs))
    if not get_memory_plan(tried).can_start:
        return deployment
    max_seqs = min(
        MAX_NUM_SEQS if scenario.offline and seqs == default else seqs,
        tried.args.max_num_batched_tokens,
    )

    def count_safe_seqs(seqs: int) -> int:
        """Count the sequences that fit if the engine sets memory aside for `seqs`."""
        fits = find_safe_max_num_seqs(
            get_memory_plan(tried.with_args(max_num_seqs=seqs)), scenario.workload
        )
        return min(max_seqs, fits // NUM_SEQS_STEP * NUM_SEQS_STEP or max(fits, 1))

    seqs = count_safe_seqs(count_safe_seqs(seqs))  # the pool is larger with fewer sequences
    return tried.with_args(max_num_seqs=min(seqs, count_safe_seqs(seqs)))
