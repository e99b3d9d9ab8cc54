"""Assemble the parts of one engine's step cost under a workload.

The step model of the deployment includes speculation. Adapters, shared prefixes and KV offloading
depend on the workload as well: a simulation prices them in every step (`simulator.simulation`),
the analytical estimate on average (`queueing.steady_state`).

vLLM's native KV offloading (`--kv-offloading-size`) copies every full block to host memory, by a
DMA engine in parallel with the steps. If only host memory has the next blocks of a prompt, the
request waits until they are loaded, while others run.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.latency.lora_adapters import AdapterCosts, add_adapter_costs, compute_adapter_costs
from planner.latency.shared_prefix_reads import count_concurrent_readers, subtract_shared_reads
from planner.latency.step_model import COPY_LINK_FRACTION, StepModel, build_step_model
from planner.memory.kv_cache import KvCachePool
from planner.workload.workload import Workload


class KvOffload(NamedTuple):
    """Host memory behind the KV cache pool of one engine; zeros without KV offloading."""

    num_blocks: int = 0
    load_block_s: float = 0.0
    store_token_s: float = 0.0  # added to a step for each of its tokens


def estimate_kv_offload(deployment: Deployment, pool: KvCachePool) -> KvOffload:
    """Estimate what host memory keeps of `pool`, and the seconds of copies.

    A rank keeps and loads its own part: kv_offloading_size / ranks bytes, over its own link to the
    host. Storing reads from GPU memory once more, which delays steps. The result is zero without
    offloading, and for models with several kinds of blocks, as versions differ in what they keep of
    them.
    """
    groups = pool.layout.groups
    if not deployment.args.kv_offloading_size or len(groups) > 1 or groups[0].kind != "full":
        return KvOffload()
    block, gpu = pool.bytes_per_block, deployment.gpu
    ranks = deployment.layout.tp * deployment.layout.pp
    num_blocks = int(deployment.args.kv_offloading_size * GIB / ranks / block)
    token = block / (groups[0].block_size * pool.layout.dcp)
    return KvOffload(
        num_blocks, block / (gpu.host_bandwidth * COPY_LINK_FRACTION), token / gpu.memory_bandwidth
    )


@dataclass(frozen=True)
class WorkloadStepCosts:
    """Step costs by part; a part that the workload or the deployment does not use costs nothing."""

    deployment: Deployment
    workload: Workload
    step: StepModel  # speculation included
    pool: KvCachePool
    adapters: AdapterCosts
    reuses_prefixes: bool  # the prefix cache is on, and the workload finds something in it
    concurrent_readers: float  # see `count_concurrent_readers`; 0: nothing is read together

    @cached_property
    def offload(self) -> KvOffload:
        """Host memory behind the KV cache; without prefixes to reuse nothing is kept there."""
        if not self.reuses_prefixes:
            return KvOffload()
        return estimate_kv_offload(self.deployment, self.pool)

    def average_step(self) -> StepModel:
        """Return `step` plus what adapters and shared prefixes change on average.

        KV offloading is left out: the analytical estimate counts the prefixes that host memory
        keeps as cached (`planning.capacity`), and only a simulation prices copies to and from it.
        """
        args = self.deployment.args
        step = subtract_shared_reads(
            self.step, self.workload, self.concurrent_readers, args.max_num_seqs
        )
        return add_adapter_costs(step, self.adapters, args, self.workload)


def build_workload_step_costs(
    deployment: Deployment,
    workload: Workload,
    pool: KvCachePool,
    step: StepModel | None = None,
) -> WorkloadStepCosts:
    """Build the step costs of one engine of `deployment`; `step` replaces the calibrated model."""
    args = deployment.args
    reuses_prefixes = args.enable_prefix_caching and workload.prefix_hit_rate > 0
    return WorkloadStepCosts(
        deployment,
        workload,
        step=step or build_step_model(deployment, workload),
        pool=pool,
        adapters=compute_adapter_costs(deployment) if workload.adapters else AdapterCosts(),
        reuses_prefixes=reuses_prefixes,
        concurrent_readers=(
            count_concurrent_readers(deployment)
            if reuses_prefixes and workload.uses_trace_prefixes
            else 0.0
        ),
    )
