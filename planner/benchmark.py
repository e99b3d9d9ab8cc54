"""What a benchmark of so many requests reports: the run itself, replayed from its first burst to its last token.

The closed form (`planner.steady`) answers for traffic that goes on; a measured run starts with an empty engine, has its
own queues and tails, and drains in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.deployment import Deployment
from planner.memory import MemoryPlan
from planner.quantities import Interval
from planner.replay import ReplayResult, replay_workload
from planner.speculation import step_of
from planner.steady import Performance
from planner.workload import Workload

MOST = 50_000
"""Requests of one engine that are replayed; in longer runs beginning and end no longer matter."""


def is_benchmark(deployment: Deployment, workload: Workload) -> bool:
    """Whether `workload` is a run to be replayed: a closed loop or a number of requests, no trace, and not too many."""
    engines = deployment.layout.replicas * deployment.layout.dp
    requests = workload.num_prompts or 10 * (workload.concurrency or 0)
    return workload.trace is None and 0 < requests <= MOST * engines


def benchmark(deployment: Deployment, memory: MemoryPlan, workload: Workload, steady: Performance) -> Performance:
    """`workload.num_prompts` requests replayed, as `vllm bench serve` reports them; intervals as wide as `steady`'s.

    Raises `PlannerError` for requests that can never be scheduled.
    """
    step = step_of(deployment)
    run = replay_workload(deployment, memory.pool, step, workload)
    engines = deployment.layout.replicas * deployment.layout.dp
    arriving = workload.num_prompts / workload.rate if workload.rate and workload.num_prompts else 0.0
    paced = min(arriving / run.duration, 1.0)  # of the run, for which its speed is the client's
    rate = Interval.factor(run.request_tps * engines, step.sigma_tpot * (1 - paced))
    return replace(
        steady,
        ttft=_around(run, "ttft", steady.ttft),
        tpot=_around(run, "tpot", steady.tpot),
        itl=_around(run, "itl", steady.itl),
        e2e=_around(run, "e2e", steady.e2e),
        request_tps=rate,
        output_tps=rate * float(run.output.mean()),
        total_tps=rate * float(run.output.mean() + run.prompt.mean()),
        decode_batch=run.decode_batch,
        kv_usage=run.kv_usage(0.99),
        queue=run.stats("queue")["p99"],
        preemptions=float(run.preemptions.mean()),
    )


def _around(run: ReplayResult, metric: str, like: Mapping[str, Interval]) -> dict[str, Interval]:
    """The run's mean and percentiles, as uncertain as those of `like`; without a second token there is no TPOT."""
    found = run.stats(metric)
    return {name: like[name] * (value / like[name].mid) if value >= 0 else like[name] for name, value in found.items()}
