"""How probably memory lasts while an engine serves, beyond its start.

An engine sizes its KV cache by the peak that it measures before it serves. What the allocator then
loses to fragments, and takes beyond that peak, comes out of what `gpu_memory_utilization` leaves.
"""

import math
from functools import lru_cache

from planner.core.intervals import Z_SCORE_80PCT
from planner.core.units import GIB
from planner.engines.deployment import Deployment
from planner.memory.memory_plan import (
    MEMORY_TERMS,
    MemoryPlan,
    find_safe_memory_utilization,
    get_memory_plan,
)
from planner.memory.runtime_overhead import get_constant
from planner.planning.slo import compute_probability

LASTING_SIGMAS = 2.0
"""Standard deviations of what serving takes that a larger gpu_memory_utilization leaves free."""
SURE_MEMORY_PROBABILITY = 0.977
"""Probability of `LASTING_SIGMAS`, from which on nothing is said of memory."""


def estimate_memory_probability(deployment: Deployment) -> float:
    """Estimate the probability, 0 to 1, that the engine starts and does not run out of memory."""
    return _estimate_of_one_replica(deployment.with_replicas(1))


@lru_cache(maxsize=16_384)
def _estimate_of_one_replica(deployment: Deployment) -> float:
    memory = get_memory_plan(deployment)
    room, need, sigma = _estimate_serving_room(memory)
    return min(memory.p_fits, compute_probability((room - need) / sigma))


def list_memory_utilizations(deployment: Deployment) -> tuple[float, float]:
    """List the largest gpu_memory_utilization that lasts, and the largest that starts, in hundredths."""
    memory, starts = get_memory_plan(deployment), find_safe_memory_utilization(deployment)
    room, need, sigma = _estimate_serving_room(memory)
    limit = memory.budget_bytes + room - need - LASTING_SIGMAS * sigma
    lasts = max(0.0, math.floor(100 * limit / memory.total_bytes) / 100)
    return min(lasts, starts), starts


def _estimate_serving_room(memory: MemoryPlan) -> tuple[float, float, float]:
    """Estimate bytes left once everything is allocated, those that serving takes, and their error."""
    serving = get_constant("serving-fragments", memory.deployment.engine.release)
    assert serving is not None
    outside = memory.context.mid + memory.deployment.other_tenants_bytes
    outside += sum(
        getattr(memory, term).mid for term in MEMORY_TERMS if term not in memory.budgeted_terms
    )
    return (
        memory.total_bytes - memory.budget_bytes - outside,
        serving.value * GIB,
        math.hypot(serving.sigma * GIB, (memory.context.hi - memory.context.mid) / Z_SCORE_80PCT),
    )
