"""The tail of a deployment's latencies: one engine's share of the traffic, replayed request by request.

Every run is replayed at the calibrated step cost and at both ends of its 80 % interval, so that an interval grows where
a slower engine would queue. Frames have columns as people read them, units included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.deployment import Deployment
from planner.kv import KvPool
from planner.latency import StepModel
from planner.predict import memory_of
from planner.quantities import Z80, Interval, PlannerError
from planner.replay import ReplayResult, replay_workload
from planner.scenario import Scenario, Target
from planner.sizing import with_args
from planner.speculation import step_of
from planner.steady import Performance
from planner.sweeps import METRICS, PERCENTILES, full
from planner.traces import Trace
from planner.workload import Lengths, Workload

if TYPE_CHECKING:
    import pandas as pd

REQUESTS = 4000
"""Requests of a run whose tail is read: its p99 rests on 40 of them."""
SWEEP = 1500
"""Requests of each run of a sweep."""
WAVES = 4
"""A closed loop has at least so many requests per unit of concurrency: its first burst counts for no more than that."""
KEEPS_UP = 0.95
"""Served share of the arrivals from which on a deployment counts as following them."""
SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, eq=False)
class Tail:
    """The same requests at the calibrated step cost (`mid`) and at the ends of its interval; see `tail`."""

    lo: ReplayResult
    mid: ReplayResult
    hi: ReplayResult
    sigma_ttft: float

    def at(self, metric: str, percentile: str) -> Interval:
        """Seconds of "ttft", "tpot", "itl", "e2e" or "queue" at "mean", "p50", "p95" or "p99"."""
        return self._around(metric, *(at(run, metric, percentile) for run in (self.lo, self.mid, self.hi)))

    def quantile(self, metric: str, q: float) -> Interval:
        """Seconds that a share `q` of the values of `metric` does not exceed."""
        return self._around(metric, *(run.quantile(metric, q) for run in (self.lo, self.mid, self.hi)))

    def _around(self, metric: str, lo: float, mid: float, hi: float) -> Interval:
        """What faster and slower steps make of it; a TTFT is at least as uncertain as the measured ones were."""
        reach = math.exp(Z80 * self.sigma_ttft) if metric == "ttft" else 1.0
        return Interval(min(lo, mid / reach), mid, max(hi, mid * reach))

    @cached_property
    def keeps_up(self) -> Interval:
        """The share of the arrivals that is served in the meantime, 0 to 1: below 1 the queue grows."""
        lo, mid, hi = sorted(served(run) for run in (self.lo, self.mid, self.hi))
        return Interval(lo, mid, hi)

    @property
    def preemptions(self) -> float:
        """Preemptions per request."""
        return float(self.mid.preemptions.sum()) / len(self.mid.output)

    def misses(self, service_level: Iterable[Target]) -> list[tuple[Target, Interval]]:
        """The targets that the middle of the interval does not meet, with what is reached instead."""
        found = ((target, self.at(target.metric, target.percentile)) for target in service_level)
        return [(target, value) for target, value in found if value.mid > target.seconds]


def at(run: ReplayResult, metric: str, percentile: str) -> float:
    """Seconds of one replay's `metric` at "mean", "p50", "p95" or "p99"."""
    return run.stats(metric)["mean"] if percentile == "mean" else run.quantile(metric, SHARES[percentile])


def served(run: ReplayResult) -> float:
    """Requests that ended per request that arrived, at most 1, in the last three quarters of the arrivals' time."""
    start, end = run.sent[-1] / 4, run.sent[-1]
    ended = run.outcome.last_token * run.second
    arrived = np.count_nonzero(run.sent > start)
    return min(np.count_nonzero((ended > start) & (ended <= end)) / arrived, 1.0) if arrived else 1.0


def accepted(workload: Workload, max_model_len: int) -> Workload:
    """`workload` without the prompts that the engine refuses because they leave no room for an output."""
    trace, lengths = workload.trace, workload.prompt.values
    short = lengths < max_model_len
    if trace is not None:
        trace = _some(trace, trace.prompt < max_model_len)
    if not short.any() or (trace is not None and not len(trace.prompt)):
        raise PlannerError(f"every prompt has at least {max_model_len:,} tokens, which is max_model_len: none fits")
    prompt = workload.prompt if short.all() else Lengths.empirical(lengths[short])
    return replace(workload, prompt=prompt, trace=trace)


def _some(trace: Trace, which: np.ndarray | slice) -> Trace:
    """Some requests of a trace."""
    return replace(trace, arrival=trace.arrival[which], prompt=trace.prompt[which], output=trace.output[which])


def slower(step: StepModel, factor: float) -> StepModel:
    """The same step at `factor` times the cost."""
    times = (
        "rows_s", "sequences_s", "decode_context_s", "prefill_pair_s", "state_s", "fixed_s", "prefill_step_s",
        "request_s", "prompt_token_s",
    )  # fmt: skip
    scaled: dict[str, Any] = {name: getattr(step, name) * factor for name in times}
    for name in ("decode_windows", "prefill_windows"):
        scaled[name] = tuple((window, seconds * factor) for window, seconds in getattr(step, name))
    return replace(step, parts={name: seconds * factor for name, seconds in step.parts.items()}, **scaled)


def tail(
    deployment: Deployment, workload: Workload, requests: int = REQUESTS, *, ends: bool = True,
    pool: KvPool | None = None, seed: int = 0,
) -> Tail:  # fmt: skip
    """Replay `requests` of `workload` on one engine of `deployment`: drawn with `seed`, or the first of its trace.

    A closed loop has at least `WAVES` per unit of concurrency. Without `ends` only at the middle of the step cost.
    `pool` replaces the KV pool of the memory plan. Raises `PlannerError` where the deployment does not fit.
    """
    step, pace = step_of(deployment), math.exp(Z80 * step_of(deployment).sigma_tpot)
    mid = once(deployment, workload, requests, pool=pool, seed=seed)
    if not ends:
        return Tail(mid, mid, mid, 0.0)
    lo, hi = (once(deployment, workload, requests, pool=pool, seed=seed, pace=p) for p in (1 / pace, pace))
    return Tail(lo, mid, hi, step.sigma_ttft)


def once(
    deployment: Deployment, workload: Workload, requests: int = REQUESTS, *, pool: KvPool | None = None,
    pace: float = 1.0, seed: int = 0, gauge_s: float = 0.0,
) -> ReplayResult:  # fmt: skip
    """One replay of `tail`, every step at `pace` times its cost."""
    if pool is None:
        memory = memory_of(deployment)
        if not memory.starts:
            raise PlannerError(memory.reason)
        pool = memory.pool
    engines = deployment.layout.replicas * deployment.layout.dp
    workload = accepted(workload, deployment.args.max_model_len or 0)
    if workload.trace is None:
        workload = replace(workload, num_prompts=max(requests * engines, WAVES * (workload.concurrency or 0)))
    else:
        workload = replace(workload, trace=_some(workload.trace, slice(requests * engines)))
    return replay_workload(deployment, pool, slower(step_of(deployment), pace), workload, seed, gauge_s)


def traffic(scenario: Scenario, deployment: Deployment) -> Workload:
    """The scenario's traffic; offline, a closed loop that keeps every slot of `deployment` taken."""
    return full(deployment, scenario.workload) if scenario.offline else scenario.workload


def latencies(service_level: Sequence[Target], found: Tail) -> pd.DataFrame:
    """The four latencies and the wait in the queue, in ms, and what the service level says of each."""
    import pandas as pd

    rows = []
    for metric in (*METRICS, "queue"):
        row: dict[str, object] = {"Latency": "Queue" if metric == "queue" else metric.upper()}
        row |= {f"{name} (ms)": found.at(metric, name) * 1e3 for name in PERCENTILES}
        limits = [f"{t.percentile} {t.seconds * 1e3:,.0f} ms" for t in service_level if t.metric == metric]
        rows.append(row | {"Limit": ", ".join(limits) or None})
    return pd.DataFrame(rows)


def difference(found: Tail, steady: Performance) -> str:
    """How much more (+) or less (-) than the replay the closed form says, in percent of the replay."""
    parts = []
    for metric in METRICS:
        apart = {
            name: getattr(steady, metric)[name].mid / replayed - 1
            for name in ("mean", "p99")
            if (replayed := found.at(metric, name).mid) > 0
        }
        parts.append(f"{metric.upper()} {', '.join(f'{name} {value:+.0%}' for name, value in apart.items())}")
    return f"The closed form, held against the replay: {'; '.join(parts)}."


def curve(found: Tail, metric: str, steady: Performance | None = None) -> pd.DataFrame:
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


def figures(found: Tail) -> dict[str, Interval | float]:
    """A tail in one row: every latency at every percentile in ms, preemptions, and the share that is served."""
    row: dict[str, Interval | float] = {
        f"{percentile} {metric.upper()} (ms)": found.at(metric, percentile) * 1e3
        for metric in METRICS
        for percentile in PERCENTILES
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
        changed = with_args(deployment, **{name: value})
        memory = memory_of(changed)
        if not memory.starts:
            continue
        row: dict[str, Any] = {name: value, "KV pool (tokens)": memory.pool.kv_tokens}
        rows.append(row | figures(tail(changed, workload, requests)))
    return pd.DataFrame(rows)


def by_pool(deployment: Deployment, workload: Workload, points: int = 7, requests: int = SWEEP) -> pd.DataFrame:
    """KV pools around what the traffic takes: from twice its own p99 of use, or the plan's pool, down to a quarter.

    At the middle of the step cost. `gpu_memory_utilization` is what would leave so much. A pool that cannot hold one
    request of max_model_len is left out: the engine would not start with it.
    """
    import pandas as pd

    memory = memory_of(deployment)
    plan, share = memory.pool, deployment.args.gpu_memory_utilization or 0.0
    least = plan.layout.blocks_per_request + 1
    wanted = plan.num_blocks * once(deployment, workload, requests).kv_usage(0.99)
    most = max(min(2 * wanted, plan.num_blocks), least)
    rows = []
    for blocks in np.unique(np.geomspace(max(wanted / 4, least), most, points).astype(int))[::-1]:
        pool = replace(plan, num_blocks=int(blocks))
        given_up = (plan.num_blocks - pool.num_blocks) * plan.bytes_per_block
        row: dict[str, Any] = {"KV pool (tokens)": pool.kv_tokens}
        row["gpu_memory_utilization"] = share * (1 - given_up / memory.requested)
        rows.append(row | figures(tail(deployment, workload, requests, ends=False, pool=pool)))
    return pd.DataFrame(rows)


def verdict(service_level: Sequence[Target], found: Tail, steady: Performance) -> str:
    """Whether the replay meets the service level, and where the closed form says otherwise."""
    missed = [f"{target.name} is {value.mid * 1e3:,.0f} ms, above {target.seconds * 1e3:,.0f} ms"
              for target, value in found.misses(service_level)]  # fmt: skip
    stated = [t for t in service_level if getattr(steady, t.metric)[t.percentile].mid > t.seconds]
    if not service_level:
        return "Nobody waits for this work: there is no service level to hold the replay against."
    if not missed:
        tight = [t.name for t in service_level if found.at(t.metric, t.percentile).hi > t.seconds]
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
