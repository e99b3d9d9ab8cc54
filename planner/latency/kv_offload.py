"""Price KV offloading: how many blocks host memory keeps, and what loading and storing them takes.

vLLM's native backend (`--kv-offloading-size`) copies every full block to host memory, by a DMA
engine in parallel with the steps. If only host memory has the next blocks of a prompt, the request
waits until they are loaded, while others run.
"""

from typing import NamedTuple

from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.memory.kv_cache import KvCachePool

COPY_LINK_FRACTION = 50 / 64
"""Fraction of a link's bandwidth that a copy reaches: 50 GB/s over PCIe 5.0 x16 for blocks of 2 MB.

vLLM has blocks of this size from 0.12 on (vLLM blog, Inside vLLM's New KV Offloading Connector,
2026-01-08, H100).
"""


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
