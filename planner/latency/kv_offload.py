"""A tier of host memory behind the pool of KV blocks: how many it keeps, and what loading and storing them takes.

vLLM's native backend (`--kv-offloading-size`): every block is copied to host memory when it is
full, by a DMA engine beside the steps; a prompt whose next blocks lie only there waits until they
are loaded, while others go on.
"""

from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.memory.kv_cache import KvCachePool

COPY_LINK_FRACTION = 50 / 64
"""Of a link's bandwidth, what a copy gets: 50 GB/s over PCIe 5.0 x16 for blocks of 2 MB, as vLLM has them from 0.12 on
(vLLM blog, Inside vLLM's New KV Offloading Connector, 2026-01-08, H100)."""


def estimate_kv_offload(deployment: Deployment, pool: KvCachePool) -> tuple[int, float, float]:
    """Blocks that it keeps, seconds to load one, and seconds that storing adds to a step for each of its tokens.

    A rank keeps and loads its own part: kv_offloading_size / ranks bytes, over its own link to the
    host. What is stored is read from GPU memory once more, which steps wait for. Zeros for models
    whose blocks are of several kinds: what is kept of them differs by version.
    """
    if len(pool.layout.groups) > 1 or pool.layout.groups[0].kind != "full":
        return 0, 0.0, 0.0
    block, gpu = pool.bytes_per_block, deployment.gpu
    ranks = deployment.layout.tp * deployment.layout.pp
    kept = int(deployment.args.kv_offloading_size * GIB / ranks / block)
    token = block / (pool.layout.groups[0].block_size * pool.layout.dcp)
    return kept, block / (gpu.host_bandwidth * COPY_LINK_FRACTION), token / gpu.memory_bandwidth
