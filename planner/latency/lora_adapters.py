"""Price LoRA adapters: each distinct one in a step, each token that uses one, each load.

The simulation prices every step by the adapters in it. `add_adapter_costs` adds the same on
average, for the analytical estimate.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from planner.core.catalog import SourcedEntry, load_catalog
from planner.core.units import GB
from planner.engines.deployment import Deployment
from planner.engines.engine_args import EngineArgs
from planner.engines.layout import ParallelLayout
from planner.latency.startup_time import DEFAULT_STORAGE, get_storage_rate
from planner.latency.step_model import StepModel
from planner.memory.weights import compute_lora_bytes
from planner.workload.workload import Workload, compute_zipf_fractions


class LoraCosts(SourcedEntry):
    """An entry of `catalogs/adapters.yaml`, whose header explains its fields."""

    adapter_us: NonNegativeFloat
    token_us: NonNegativeFloat
    load_gb_s: PositiveFloat
    cold_ms: NonNegativeFloat


class AdapterCosts(NamedTuple):
    """Seconds that adapters add, named as the fields of `simulator.kernel_types.StepCostTable`."""

    adapter_s: float = 0.0  # per distinct adapter in a step
    adapter_token_s: float = 0.0  # per token that uses an adapter
    adapter_load_s: float = 0.0  # per load from host memory
    adapter_cold_s: float = 0.0  # per load from disk, in addition


def compute_adapter_bytes(deployment: Deployment) -> int:
    """Return the bytes that one adapter of rank max_lora_rank takes on one GPU."""
    weights = (weight for layer in deployment.model.architecture.layers for weight in layer.weights)
    return compute_lora_bytes(weights, deployment.layout, 1, deployment.args.max_lora_rank)


def compute_adapter_costs(deployment: Deployment) -> AdapterCosts:
    """Return the costs of the adapters of `deployment`.

    The cost of an adapter includes the time to read it. Every slot costs the same, since kernels
    compute with matrices padded to max_lora_rank.
    """
    known = load_catalog("adapters.yaml", LoraCosts)
    costs = known.get(deployment.engine.name, known["vllm"])
    size = compute_adapter_bytes(deployment)
    layers = len(deployment.model.architecture.layers) / deployment.layout.pp
    return AdapterCosts(
        adapter_s=costs.adapter_us * 1e-6 * layers + size / deployment.gpu.memory_bandwidth,
        adapter_token_s=costs.token_us * 1e-6 * layers,
        adapter_load_s=size / (costs.load_gb_s * GB),
        adapter_cold_s=costs.cold_ms * 1e-3,
    )


def compute_cold_load_s(
    size_bytes: float, storage_bytes_per_s: float, costs: AdapterCosts
) -> float:
    """Compute the seconds until an adapter that is nowhere yet has a slot on the GPU.

    Its file is read at `storage_bytes_per_s`, the engine makes tensors of it, and the link to the
    GPU carries them. A rank-16 adapter of 84 MB for an 8B model, fetched over 1 Gbit/s:

    >>> round(compute_cold_load_s(84e6, 0.125e9, AdapterCosts(adapter_load_s=0.005, adapter_cold_s=0.3)), 2)
    0.98
    """
    return costs.adapter_cold_s + size_bytes / storage_bytes_per_s + costs.adapter_load_s


def estimate_cold_adapter_s(deployment: Deployment, storage: str = DEFAULT_STORAGE) -> float:
    """Estimate `compute_cold_load_s` of an adapter of rank max_lora_rank whose file is in `storage`.

    Raises `PlannerError` if the rate of `storage` is not known.
    """
    alone = replace(deployment, layout=ParallelLayout())
    rate = get_storage_rate(storage, deployment.engine.release)
    return compute_cold_load_s(
        compute_adapter_bytes(alone), rate, compute_adapter_costs(deployment)
    )


@lru_cache(maxsize=64)
def estimate_distinct_adapters(adapters: int, zipf: float, sequences: int) -> np.ndarray:
    """Return [sequences + 1] the mean number of distinct adapters among n requests.

    It is the sum of 1 - (1 - p)^n over all adapters.

    >>> estimate_distinct_adapters(2, zipf=0.0, sequences=2)[1:].round(6).tolist()
    [1.0, 1.5]
    """
    others = np.log1p(-np.minimum(compute_zipf_fractions(adapters, zipf), 1 - 1e-12))
    return np.array([-np.expm1(n * others).sum() for n in range(sequences + 1)])


def limit_sequences_by_adapters(deployment: Deployment, workload: Workload) -> int:
    """Return how many sequences run at once: max_num_seqs, or fewer if adapters lack slots.

    On average this many sequences have max_loras distinct adapters. In a closed loop, the slots'
    fraction of all adapters runs with the same fraction of the requests. If requests wait, more
    requests of one adapter run together than this estimate assumes, especially if popularity is
    uneven; only the simulation covers that.
    """
    max_sequences, slots = deployment.args.max_num_seqs, deployment.args.max_loras
    if not workload.adapters or slots >= workload.adapters:
        return max_sequences
    distinct = estimate_distinct_adapters(workload.adapters, workload.adapter_zipf, max_sequences)
    limit = int(np.searchsorted(distinct, slots, side="right")) - 1
    if workload.rate is None and workload.concurrency:
        in_flight = workload.concurrency / deployment.num_engine_instances
        limit = max(limit, int(in_flight * slots / workload.adapters))
    return min(max(limit, 1), max_sequences)


def add_adapter_costs(
    step: StepModel, costs: AdapterCosts, args: EngineArgs, workload: Workload
) -> StepModel:
    """Return `step` with the mean cost of adapters.

    Adapters beyond the max_loras most popular ones are loaded for every request.
    """
    if not workload.adapters:
        return step
    slots = args.max_loras
    distinct = estimate_distinct_adapters(
        workload.adapters, workload.adapter_zipf, args.max_num_seqs
    )
    popularity = compute_zipf_fractions(workload.adapters, workload.adapter_zipf)
    loading_s = (
        popularity[slots:].sum() * costs.adapter_load_s
        + popularity[args.max_cpu_loras or slots :].sum() * costs.adapter_cold_s
    )
    return replace(
        step,
        parts={**step.parts, "adapters": costs.adapter_token_s * step.grid},
        sequences_s=step.sequences_s + costs.adapter_s * np.minimum(distinct, slots),
        prompt_s=step.prompt_s + float(loading_s),
    )
