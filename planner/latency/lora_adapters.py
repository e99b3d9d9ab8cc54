"""What LoRA adapters add to a step: each different one in it, each token that one changes, each that is loaded.

The replay prices every step by the adapters in it; `with_adapters` is the same on average, for the
closed form.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.units import GB
from planner.engines.deployment import Deployment
from planner.latency.step_model import StepModel
from planner.memory.weights import compute_lora_bytes
from planner.workload.workload import Workload, compute_adapter_popularity


class LoraCosts(SourcedEntry):
    """An entry of `catalogs/adapters.yaml`, whose head explains its fields."""

    adapter_us: NonNegativeFloat
    token_us: NonNegativeFloat
    load_gb_s: PositiveFloat
    cold_ms: NonNegativeFloat


def compute_adapter_bytes(deployment: Deployment) -> int:
    """Bytes that one adapter of the largest rank takes on one GPU."""
    weights = (weight for layer in deployment.model.architecture.layers for weight in layer.weights)
    return compute_lora_bytes(weights, deployment.layout, 1, deployment.args.max_lora_rank)


def compute_adapter_costs(deployment: Deployment) -> dict[str, Any]:
    """The fields of `simulator.kernel_types.StepTable` that adapters fill, s.

    A rank adds what reading it takes: kernels compute with matrices padded to max_lora_rank, so
    every slot costs alike.
    """
    known = load_catalog("adapters.yaml", LoraCosts)
    costs, size = (
        known.get(deployment.engine.name, known["vllm"]),
        compute_adapter_bytes(deployment),
    )
    layers = len(deployment.model.architecture.layers) / deployment.layout.pp
    return {
        "adapter_s": costs.adapter_us * 1e-6 * layers + size / deployment.gpu.memory_bandwidth,
        "adapter_token_s": costs.token_us * 1e-6 * layers,
        "adapter_load_s": size / (costs.load_gb_s * GB),
        "adapter_cold_s": costs.cold_ms * 1e-3,
    }


@lru_cache(maxsize=64)
def estimate_distinct_adapters(adapters: int, zipf: float, sequences: int) -> np.ndarray:
    """[sequences + 1] different adapters among so many requests, on average: sum over adapters of 1 - (1 - p)^n."""
    others = np.log1p(-np.minimum(compute_adapter_popularity(adapters, zipf), 1 - 1e-12))
    return np.array([-np.expm1(n * others).sum() for n in range(sequences + 1)])


def limit_sequences_by_adapters(deployment: Deployment, workload: Workload) -> int:
    """Sequences that run at once: max_num_seqs, or as many as have max_loras different adapters on average.

    In a closed loop the slots' share of all adapters runs with as many of the requests. Where
    requests wait, more of one adapter run together than this says, the more so the less evenly they
    are asked for; only the replay has that.
    """
    most, slots = deployment.args.max_num_seqs, deployment.args.max_loras
    if not workload.adapters or slots >= workload.adapters:
        return most
    among = estimate_distinct_adapters(workload.adapters, workload.adapter_zipf, most)
    few = int(np.searchsorted(among, slots, side="right")) - 1
    if workload.rate is None and workload.concurrency:
        few = max(
            few,
            int(workload.concurrency / deployment.num_engine_instances * slots / workload.adapters),
        )
    return min(max(few, 1), most)


def add_adapter_costs(step: StepModel, deployment: Deployment, workload: Workload) -> StepModel:
    """`step` with what adapters add on average; the rarest, which no slot holds, are loaded for every request."""
    if not workload.adapters:
        return step
    costs, slots = compute_adapter_costs(deployment), deployment.args.max_loras
    among = estimate_distinct_adapters(
        workload.adapters, workload.adapter_zipf, deployment.args.max_num_seqs
    )
    asked, kept = (
        compute_adapter_popularity(workload.adapters, workload.adapter_zipf),
        deployment.args.max_cpu_loras or slots,
    )
    loading = (
        asked[slots:].sum() * costs["adapter_load_s"] + asked[kept:].sum() * costs["adapter_cold_s"]
    )
    return replace(
        step,
        parts={**step.parts, "adapters": costs["adapter_token_s"] * step.grid},
        sequences_s=step.sequences_s + costs["adapter_s"] * np.minimum(among, slots),
        prompt_s=step.prompt_s + float(loading),
    )
