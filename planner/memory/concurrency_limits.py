"""What to set: the longest context and the largest batch that memory carries, and what more memory would buy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from planner.core.units import GIB
from planner.memory.kv_cache import KvCacheLayout, resolve_kv_cache_dtype
from planner.memory.layer_caches import get_kv_element_bytes
from planner.memory.memory_plan import MemoryPlan, plan_memory
from planner.models.quantization import parse_quantization
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

NUM_CONTEXT_KNOTS = 33
"""Context lengths at which blocks are counted; between them they are interpolated."""
_QUASI_RANDOM_POINTS = np.outer((0.8191725, 0.6710436, 0.5497005), np.arange(1, 1025)) % 1
"""1,024 points that fill the unit cube evenly (Roberts' R3 sequence): a prompt, an answer, and how far it has come."""


def estimate_preemption_risk(memory: MemoryPlan, workload: Workload, sequences: int) -> float:
    """Probability that `sequences` concurrent requests outgrow the pool at a random moment, so that one is preempted.

    Each has a prompt of the workload and is somewhere in its answer; long answers are met more
    often than short ones. The blocks of all of them together are taken as normal. Sharing of cached
    prefixes is left out.
    """
    mean, spread = _estimate_blocks_held(memory.layout, workload.prompt, workload.output)
    free = memory.pool.num_blocks - 1 - sequences * mean
    return 0.5 * math.erfc(free / max(spread * math.sqrt(sequences), 1e-9) / math.sqrt(2))


def find_safe_max_num_seqs(memory: MemoryPlan, workload: Workload, max_risk: float = 0.05) -> int:
    """The largest max_num_seqs whose preemption risk is at most `risk`; 0 when not even one request fits.

    n requests hold n x mean + z x spread x sqrt(n) blocks in all but `risk` of moments: solved for
    sqrt(n).
    """
    mean, spread = _estimate_blocks_held(memory.layout, workload.prompt, workload.output)
    free, reach = max(0, memory.pool.num_blocks - 1), NormalDist().inv_cdf(1 - max_risk) * spread
    root = (math.sqrt(reach**2 + 4 * mean * free) - reach) / (2 * mean)
    return math.floor(root**2 + 1e-9)


@lru_cache(maxsize=256)
def _estimate_blocks_held(
    layout: KvCacheLayout, prompt: LengthDistribution, output: LengthDistribution
) -> tuple[float, float]:
    """Mean and standard deviation of the blocks that a request holds at a random moment of its decoding."""
    contexts, knots = _sample_contexts(prompt, output, layout.max_model_len)
    blocks = np.interp(
        contexts, knots, [layout.count_request_blocks(int(context)) for context in knots]
    )
    return float(blocks.mean()), float(blocks.std())


@lru_cache(maxsize=64)
def _sample_contexts(
    prompt: LengthDistribution, output: LengthDistribution, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Contexts of requests at random moments of their decoding, at most `most`; and some of them, ascending."""
    prompts, outputs = prompt.values, output.values
    begun = prompts[(_QUASI_RANDOM_POINTS[0] * len(prompts)).astype(int)]
    met = outputs[
        np.searchsorted(np.cumsum(outputs) / outputs.sum(), _QUASI_RANDOM_POINTS[1])
    ]  # by length: long ones stay longer
    contexts = np.clip(begun + _QUASI_RANDOM_POINTS[2] * met, 1, most)
    return contexts, np.unique(
        np.quantile(contexts, np.linspace(0, 1, NUM_CONTEXT_KNOTS)).astype(int)
    )


def build_sequence_table(memory: MemoryPlan, workload: Workload) -> pd.DataFrame:
    """One row per length (p50, p95, max_model_len): how many sequences fit, and the preemption risk of so many."""
    import pandas as pd

    most, rows = memory.layout.max_model_len, []
    lengths = {
        "p50": workload.compute_total_tokens_quantile(0.5),
        "p95": workload.compute_total_tokens_quantile(0.95),
        "max_model_len": most,
    }
    for name, tokens in lengths.items():
        fit = memory.pool.count_sequences(min(round(tokens), most))
        rows.append(
            (
                name,
                round(tokens),
                fit,
                estimate_preemption_risk(memory, workload, fit) if fit else 1.0,
            )
        )
    return pd.DataFrame(rows, columns=["length", "tokens", "sequences", "preemption risk"])


def estimate_memory_gains(memory: MemoryPlan, tokens: int) -> pd.DataFrame:
    """What one more GiB, an FP8 KV cache, and FP8 or 4-bit weights each buy, in sequences of `tokens` of context."""
    import pandas as pd

    deployment = memory.deployment
    gib = math.ceil(GIB / deployment.args.gpu_memory_utilization)
    changes = {
        "one more GiB": replace(deployment, gpu_total_bytes=deployment.gpu_total_bytes + gib)
    }
    if get_kv_element_bytes(resolve_kv_cache_dtype(deployment)) > 1:
        changes["FP8 KV cache"] = deployment.with_args(kv_cache_dtype="fp8")
    for name, scheme in (
        ("FP8 weights", parse_quantization("fp8")),
        ("4-bit weights (AWQ)", parse_quantization("awq")),
    ):
        if scheme.weight_bits < deployment.model.quantization.weight_bits:
            changes[name] = replace(
                deployment, model=replace(deployment.model, quantization=scheme)
            )
    rows = []
    for name, changed in changes.items():
        p = plan_memory(changed)
        held = p.pool.count_sequences(tokens)
        rows.append(
            (
                name,
                max(0.0, p.kv_available.mid / GIB),
                held,
                held - memory.pool.count_sequences(tokens),
            )
        )
    return pd.DataFrame(rows, columns=["change", "KV cache (GiB)", "sequences", "more than now"])
