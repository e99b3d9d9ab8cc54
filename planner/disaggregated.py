"""Disaggregated serving: one pool computes prompts, another decodes; a request passes through both in series.

TTFT is the prefill pool's under prompts alone, TPOT the decode pool's under prompts that arrive computed; Little's law
ties them together. What the transfer of a prompt's KV adds is counted at the network's peak and not hidden by anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.deployment import Deployment
from planner.predict import RATES, Prediction, memory_of
from planner.prices import price_per_hour
from planner.quantities import Interval
from planner.steady import Performance, closed_loop, open_loop
from planner.workload import Lengths, Workload


def evaluate_disaggregated(
    prefill: Deployment, decode: Deployment, workload: Workload, prices: Mapping[str, float] | None = None
) -> Prediction:
    """Predict a `prefill` and a `decode` pool (replicas = workers) under `workload`; see `predict.evaluate`."""
    memories = {pool: memory_of(pool) for pool in (prefill, decode)}
    price = price_per_hour(decode.gpu, prices or {})
    usd = price.usd * (prefill.layout.gpus + decode.layout.gpus) if price else None
    for pool, memory in memories.items():
        if memory.status == "does_not_fit" or memory.pool.max_concurrency_x < 1:
            return Prediction(pool, workload, memory, None, usd)
    prompts = replace(workload, output=Lengths.fixed(1))
    arrived = replace(workload, prompt=Lengths.fixed(workload.prompt.mean), prefix_tokens=0, prefix_hit_rate=1.0)
    steps = max(workload.output.mean - 1, 0.0)
    if workload.rate is not None:
        first = open_loop(prefill, memories[prefill], prompts)
        rest = open_loop(decode, memories[decode], replace(arrived, rate=first.request_tps.mid))
    else:  # split the requests in flight between the pools so that both pass as many per second
        total = workload.concurrency or 1
        low, high = 0.0, 1.0
        for _ in range(30):
            share = (low + high) / 2
            first = closed_loop(prefill, memories[prefill], replace(prompts, concurrency=max(1, round(share * total))))
            decoding = max(1, round((1 - share) * total))
            rest = closed_loop(decode, memories[decode], replace(arrived, concurrency=decoding))
            passed = total * (1 - share) / (steps * rest.tpot["mean"].mid + rest.queue / 2 + 1e-9)
            waiting = share * total / first.ttft["mean"].mid
            low, high = (share, high) if waiting < passed else (low, share)
            if (high - low) * total < 0.5:
                break
    transfer = workload.prompt.mean * memories[prefill].pool.kv_bytes_per_token / prefill.gpu.internode_bandwidth
    performance = _in_series(first, rest, workload, transfer)
    return Prediction(decode, workload, memories[decode], performance, usd, None, prefill)


def _in_series(first: Performance, rest: Performance, workload: Workload, transfer: float) -> Performance:
    """The two pools' figures as a request sees them one after the other."""
    outputs, prompt = workload.output.mean, workload.prompt.mean
    e2e = {q: first.ttft[q] + rest.tpot[q] * max(outputs - 1, 0.0) + transfer for q in rest.tpot}
    tokens = rest.output_tps
    if workload.rate is None:
        mean = e2e["mean"]
        tokens = Interval(1 / mean.hi, 1 / mean.mid, 1 / mean.lo) * (outputs * (workload.concurrency or 1))
    rates: dict[str, Any] = dict(zip(RATES, (tokens, tokens * (1 + prompt / outputs), tokens / outputs), strict=True))
    return replace(
        rest, ttft=first.ttft, e2e=e2e, queue=math.hypot(first.queue, rest.queue),
        saturated=first.saturated or rest.saturated, **rates,
    )  # fmt: skip
