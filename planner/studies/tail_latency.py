"""The tail of a deployment's latencies: one engine's share of the traffic, replayed request by request.

Every run is replayed at the calibrated step cost and at both ends of its 80 % interval, so that an interval grows where
a slower engine would queue. Frames have columns as people read them, units included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.core.quantities import Interval
from planner.facts.deployment import Deployment
from planner.facts.workload import Workload
from planner.latency.performance import LATENCIES, POINTS, Performance
from planner.memory.budget import memory_of
from planner.planning.benchmark_run import Run, once, sample
from planner.planning.scenario import Target

if TYPE_CHECKING:
    import pandas as pd

SWEEP = 1500
"""Requests of each run of a sweep."""
KEEPS_UP = 0.95
"""Served share of the arrivals from which on a deployment counts as following them."""
SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


def latencies(service_level: Sequence[Target], found: Run) -> pd.DataFrame:
    """The four latencies and the wait in the queue, in ms, and what the service level says of each."""
    import pandas as pd

    rows = []
    for metric in (*LATENCIES, "queue"):
        row: dict[str, object] = {"Latency": "Queue" if metric == "queue" else metric.upper()}
        row |= {f"{name} (ms)": found.at(metric, name) * 1e3 for name in POINTS}
        limits = [f"{t.percentile} {t.seconds * 1e3:,.0f} ms" for t in service_level if t.metric == metric]
        rows.append(row | {"Limit": ", ".join(limits) or None})
    return pd.DataFrame(rows)


def difference(found: Run, steady: Performance) -> str:
    """How much more (+) or less (-) than the replay the closed form says, in percent of the replay."""
    parts = []
    for metric in LATENCIES:
        apart = {
            name: getattr(steady, metric)[name].mid / replayed - 1
            for name in ("mean", "p99")
            if (replayed := found.at(metric, name).mid) > 0
        }
        parts.append(f"{metric.upper()} {', '.join(f'{name} {value:+.0%}' for name, value in apart.items())}")
    return f"The closed form, held against the replay: {'; '.join(parts)}."


def curve(found: Run, metric: str, steady: Performance | None = None) -> pd.DataFrame:
    """Latency (ms, 80 % interval) by the share of values that are slower, down to 0.1 %: the distribution's tail.

    Columns: slower, lo, mid, hi, name ("p50", "p95", "p99" or nothing) and, where there is a name, "closed form".
    """
    import pandas as pd

    slower_shares = sorted({*np.geomspace(1, 1e-3, 91).round(6), *(round(1 - q, 6) for q in SHARES.values())})
    names = {round(1 - q, 6): name for name, q in SHARES.items()}
    rows = []
    for share in slower_shares:
        value, name = found.quantile(metric, 1 - share) * 1e3, names.get(share)
        stated = getattr(steady, metric)[name].mid * 1e3 if name and steady else None
        rows.append((share, value.lo, value.mid, value.hi, name, stated))
    return pd.DataFrame(rows, columns=["slower", "lo", "mid", "hi", "name", "closed form"])


def figures(found: Run) -> dict[str, Interval | float]:
    """A tail in one row: every latency at every percentile in ms, preemptions, and the share that is served."""
    row: dict[str, Interval | float] = {
        f"{percentile} {metric.upper()} (ms)": found.at(metric, percentile) * 1e3
        for metric in LATENCIES
        for percentile in POINTS
    }
    row |= {"Longest ITL (ms)": found.quantile("itl", 1.0) * 1e3, "Served (%)": found.keeps_up * 100}
    return row | {"Preemptions (per 100)": 100 * found.preemptions}


def by_argument(
    deployment: Deployment, workload: Workload, name: str, values: Sequence[float], requests: int = SWEEP
) -> pd.DataFrame:
    """Each value as the engine argument `name`; values with which the engine would not start are left out."""
    import pandas as pd

    rows = []
    for value in values:
        changed = deployment.with_args(**{name: value})
        memory = memory_of(changed)
        if not memory.starts:
            continue
        row: dict[str, Any] = {name: value, "KV pool (tokens)": memory.pool.kv_tokens}
        rows.append(row | figures(sample(changed, workload, requests)))
    return pd.DataFrame(rows)


def by_pool(deployment: Deployment, workload: Workload, points: int = 7, requests: int = SWEEP) -> pd.DataFrame:
    """KV pools around what the traffic takes: from twice its own p99 of use, or the plan's pool, down to a quarter.

    At the middle of the step cost. `gpu_memory_utilization` is what would leave so much. A pool that cannot hold one
    request of max_model_len is left out: the engine would not start with it.
    """
    import pandas as pd

    memory = memory_of(deployment)
    plan, share = memory.pool, deployment.args.gpu_memory_utilization
    least = plan.layout.blocks_per_request + 1
    wanted = plan.num_blocks * once(deployment, workload, requests).kv_usage(0.99)
    most = max(min(2 * wanted, plan.num_blocks), least)
    rows = []
    for blocks in np.unique(np.geomspace(max(wanted / 4, least), most, points).astype(int))[::-1]:
        pool = replace(plan, num_blocks=int(blocks))
        given_up = (plan.num_blocks - pool.num_blocks) * plan.bytes_per_block
        row: dict[str, Any] = {"KV pool (tokens)": pool.kv_tokens}
        row["gpu_memory_utilization"] = share * (1 - given_up / memory.requested)
        rows.append(row | figures(sample(deployment, workload, requests, ends=False, pool=pool)))
    return pd.DataFrame(rows)


def verdict(service_level: Sequence[Target], found: Run, steady: Performance) -> str:
    """Whether the replay meets the service level, and where the closed form says otherwise."""
    reached = [(target, found.at(target.metric, target.percentile)) for target in service_level]
    missed = [f"{target.name} is {value.mid * 1e3:,.0f} ms, above {target.seconds * 1e3:,.0f} ms"
              for target, value in reached if value.mid > target.seconds]  # fmt: skip
    stated = [t for t in service_level if getattr(steady, t.metric)[t.percentile].mid > t.seconds]
    if not service_level:
        return "Nobody waits for this work: there is no service level to hold the replay against."
    if not missed:
        tight = [target.name for target, value in reached if value.hi > target.seconds]
        risk = f" At the pessimistic end of its interval it does not: {', '.join(tight)}." if tight else ""
        return f"Replayed, the deployment meets the service level.{risk}"
    apart = "" if stated else " The closed form, by which the plan was chosen, says that it does: plan for the replay."
    return f"Replayed, the deployment does not meet the service level: {'; '.join(missed)}.{apart}"


def preempting(pools: pd.DataFrame, plan: int) -> str:
    """From which pool on, of a `by_pool` frame, requests are preempted, and what the smallest does to them."""
    count = pools["Preemptions (per 100)"]
    largest, smallest = pools.iloc[0], pools.iloc[-1]
    ample = f"The plan's pool holds {plan:,} tokens, {plan / largest['KV pool (tokens)']:.3g} times the largest drawn."
    before = ample if plan > 1.05 * largest["KV pool (tokens)"] else f"The plan's pool holds {plan:,} tokens."
    if not count.any():
        return f"{before} Even the smallest pool with which the engine starts preempts nobody."
    first = pools[count > 0].iloc[0]
    longer, later = (smallest[name].mid / largest[name].mid for name in ("Longest ITL (ms)", "p99 E2E (ms)"))
    return (
        f"{before} Preemption starts at {first['KV pool (tokens)']:,.0f} tokens, which gpu_memory_utilization "
        f"{first['gpu_memory_utilization']:.2f} would leave. With {smallest['KV pool (tokens)']:,.0f} tokens, 100 "
        f"requests are preempted {smallest['Preemptions (per 100)']:.0f} times; the longest gap between two "
        f"tokens is {longer:.1f} times as long as with the largest pool drawn, and the p99 E2E {later:.1f} times."
    )


def kept(swept: pd.DataFrame) -> pd.DataFrame:
    """The rows of a sweep in which the deployment keeps up with its traffic; all of them where it nowhere does."""
    enough = swept[[value.mid >= 100 * KEEPS_UP for value in swept["Served (%)"]]]
    return enough if len(enough) > 1 else swept
