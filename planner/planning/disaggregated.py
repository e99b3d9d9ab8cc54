"""Disaggregated serving: one pool computes prompts, another decodes; a request passes through both in series.

Requests are let through both pools one by one (`simulator.pools_in_series`), so what follows from
the loop being closed over both is there by itself: the first burst in the prefill queue, the batch
that decode is left with when prefill is the bottleneck, answers that end together because their
prompts began together. TTFT is what a client behind NVIDIA Dynamo sees: prefill, the transfer of
the KV cache, and the wait for a seat in a decode worker, which sends the first token
(`latency.pool_costs` says how long all that takes beside the steps).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from planner.core.errors import PlannerError
from planner.core.intervals import Z_SCORE_80PCT, Interval
from planner.engines.deployment import Deployment
from planner.hardware.prices import PriceSelection
from planner.latency.performance import (
    FP8_KV_NOTE,
    LATENCY_METRICS,
    LATENCY_QUANTILES,
    LATENCY_STATISTICS,
    STATISTIC_SIGMA_FACTORS,
    Performance,
)
from planner.latency.speculative_decoding import build_step_model
from planner.latency.step_model import StepModel
from planner.latency.worker_pool_costs import (
    WorkerPoolCosts,
    get_pool_coefficients,
    get_pool_costs,
    get_pool_sigmas,
)
from planner.memory.memory_plan import MemoryPlan, get_memory_plan
from planner.planning.capacity import derive_effective_workload
from planner.planning.prediction import Prediction, estimate_hourly_cost
from planner.simulator.disaggregated_pools import (
    DecodeWorkerPool,
    PoolTimeline,
    PrefillWorkerPool,
    simulate_tandem_pools,
)
from planner.workload.request_generator import sample_arrivals
from planner.workload.workload import Workload

MAX_SIMULATED_REQUESTS = 150_000
"""Requests that are let through; a longer run has reached its steady state long before."""
ARRIVAL_SEED = 1
COLLECTIVE_PARTS = ("experts", "collectives")
"""Parts of a step that data-parallel ranks do together: their cost follows the mean load, the others' the largest."""


def evaluate_disaggregated(
    prefill: Deployment,
    decode: Deployment,
    workload: Workload,
    prices: PriceSelection | None = None,
    *,
    quick: bool = False,
) -> Prediction:
    """Predict a `prefill` and a `decode` pool (replicas = workers) under `workload`; see `predict.evaluate`.

    With a rate the loop is open, and let through at a faster and a slower step cost too, but for a
    `quick` look; with a concurrency it is closed, with both an open one that holds requests back.
    Raises `PlannerError` where requests do not fit into max_model_len, or a sequence not into the
    decode pool's KV cache.
    """
    memories = {pool: get_memory_plan(pool) for pool in (prefill, decode)}
    usd = [estimate_hourly_cost(pool, prices) for pool in (prefill, decode)]
    paid = usd[0] + usd[1] if usd[0] and usd[1] else None
    for pool, memory in memories.items():
        if not memory.can_start:
            return Prediction(pool, workload, memory, None, paid)
    prediction = Prediction(decode, workload, memories[decode], None, paid, prefill=prefill)
    load = derive_effective_workload(
        prefill, workload
    )  # which looks for shared prefixes where prompts are computed
    pools = DisaggregatedPools.from_deployments(prefill, decode, memories[decode], load)
    performance, others = pools.simulate(load), []
    if (
        load.rate is not None and not quick
    ):  # in a closed loop every time is longer by the same factor
        pace = math.exp(Z_SCORE_80PCT * pools.sigma_tpot)
        others = [pools.scale(factor).simulate(load) for factor in (1 / pace, pace)]
    return replace(prediction, performance=_widen_intervals(performance, others))


def estimate_kv_transfer(prefill: Deployment, decode: Deployment) -> tuple[float, float]:
    """(bytes/s of the link of one GPU, seconds that the KV cache of a prompt's token is on it).

    All ranks of a worker send at once, each what it holds, over the network between nodes: a pool
    may lie on any.
    """
    slowest = min(prefill.gpu.internode_bandwidth, decode.gpu.internode_bandwidth)
    return (
        slowest,
        max(get_memory_plan(pool).layout.kv_bytes_per_token for pool in (prefill, decode))
        / slowest,
    )


@dataclass(frozen=True)
class DisaggregatedPools:
    """Both pools as numbers: what their steps cost, and what a prompt needs on its way from one to the other."""

    prefill_pool: PrefillWorkerPool
    decode_pool: DecodeWorkerPool
    prefill: StepModel
    decode: StepModel
    ranks: int  # data-parallel ones of a decode worker
    resident_sequences: float  # sequences that the KV pool of a decode worker holds
    transfer_s: float  # per prompt token
    sigma_tpot: float  # standard deviations of ln(measured / predicted)
    sigma_ttft: float

    @classmethod
    def from_deployments(
        cls, prefill: Deployment, decode: Deployment, memory: MemoryPlan, workload: Workload,
        costs: WorkerPoolCosts | None = None,
    ) -> Self:  # fmt: skip
        """Price the steps of both pools; `memory` is the decode pool's, `costs` replaces the catalog's."""
        costs = costs or get_pool_costs(decode.engine)
        first = build_step_model(prefill, get_pool_coefficients(prefill, "prefill", costs))
        rest = build_step_model(decode, get_pool_coefficients(decode, "decode", costs))
        joint = np.maximum.accumulate(
            sum((first.parts[name] for name in COLLECTIVE_PARTS), np.zeros(len(first.grid)))
        )
        tokens = np.arange(first.max_tokens + 1)
        before = PrefillWorkerPool(
            workers=prefill.layout.replicas,
            ranks=prefill.layout.dp,
            rank_step_s=np.interp(tokens, first.grid, first.grid_s - joint) / first.stages,
            collective_step_s=np.interp(tokens, first.grid, joint) / first.stages,
            step_s=(first.fixed_s + first.prefill_step_s + float(first.interpolate_rows_s(1)))
            / first.stages,
        )
        context, ranks = workload.mean_decode_context, decode.layout.dp
        held = (
            (memory.pool.num_blocks - 1)
            / memory.layout.count_request_blocks(max(int(context), 1))
            * rest.kv_stretch
            * ranks
        )
        seats = int(
            min(
                decode.args.max_num_seqs * ranks,
                held,
                workload.concurrency or MAX_SIMULATED_REQUESTS,
            )
        )
        if seats < 1:
            pool = f"the KV pool of {memory.pool.reported_tokens:,} tokens"
            raise PlannerError(f"{pool} holds no sequence of {context:,.0f} tokens")
        step_s = rest.estimate_decode_step_s(
            np.maximum(np.arange(seats + 1) / ranks / rest.stages, 1.0), context
        )
        after = DecodeWorkerPool(
            decode.layout.replicas, np.maximum.accumulate(np.asarray(step_s, float)), costs.handover
        )
        sigmas = get_pool_sigmas(decode, rest.sigma_tpot, first.sigma_ttft)
        return cls(
            before,
            after,
            first,
            rest,
            ranks,
            held,
            estimate_kv_transfer(prefill, decode)[1],
            *sigmas,
        )

    def scale(self, factor: float) -> Self:
        """The same with steps of both pools that take `factor` times as long."""
        first, rest = self.prefill_pool, self.decode_pool
        slower = first._replace(
            **{
                name: getattr(first, name) * factor
                for name in ("rank_step_s", "collective_step_s", "step_s")
            }
        )
        return replace(
            self, prefill_pool=slower, decode_pool=rest._replace(step_s=rest.step_s * factor)
        )

    def simulate(self, workload: Workload) -> Performance:
        """Let the workload's requests through, a whole run from the first burst on, and sum up what they saw."""
        many = workload.concurrency or 0
        n = min(workload.num_requests, max(MAX_SIMULATED_REQUESTS, 2 * many))
        rng = np.random.default_rng(ARRIVAL_SEED)
        prompt, output, sent = _sample_requests(workload, n, rng)
        n = len(sent)
        computed = np.maximum(prompt - workload.mean_cached_tokens, 1.0)
        attention = (
            self.prefill.estimate_prefill_attention_s(computed, workload.mean_cached_tokens)
            / self.prefill.stages
        )
        front = self.prefill.request_s + computed * self.prefill.prompt_token_s
        travel = prompt * self.transfer_s + front
        steps = np.maximum(output - 1.0, 0.0) / self.decode.tokens_per_step
        run = PoolTimeline(
            *simulate_tandem_pools(
                self.prefill_pool, self.decode_pool, sent, many, computed, attention, travel, steps
            )
        )
        ttft, decoding, steps = (
            run.joined - run.sent,
            run.ended - run.joined,
            self.decode_pool.step_s,
        )
        tpot = decoding[output > 1] / (output[output > 1] - 1) if (output > 1).any() else steps[1:2]
        seats, last = len(steps) - 1, float(run.sent[-1])
        # while the last is not yet sent the loop is full, or the rate as asked
        rate = (
            float((run.ended <= last).sum()) / last
            if last > 0
            else len(ttft) / float(run.ended.max())
        )
        prefills = self.prefill_pool.workers * len(ttft) / max(float(run.busy[0]), 1e-9)
        answer_s = steps[seats] * (output.mean() - 1) / self.decode.tokens_per_step
        decodes, full = (
            self.decode_pool.workers * seats / max(answer_s, 1e-9),
            seats >= int(self.resident_sequences),
        )
        peak, limit = min(
            (float(prefills), "compute"), (float(decodes), "kv" if full else "max_num_seqs")
        )
        saturated = workload.rate is not None and workload.rate >= peak
        shares = run.tokens / max(run.tokens.sum(), 1e-9)
        batch, reached = float(shares @ np.arange(seats + 1)), np.cumsum(shares)
        gaps = [steps[min(int(np.searchsorted(reached, q)), seats)] for q in LATENCY_QUANTILES]
        spread, first = self.sigma_tpot, self.sigma_ttft
        mixed = math.hypot(first * ttft.mean(), spread * decoding.mean()) / (
            ttft.mean() + decoding.mean()
        )
        interval = Interval.from_lognormal(rate, spread)
        return Performance(
            ttft=_summarize(ttft, first),
            tpot=_summarize(tpot, spread),
            itl=_build_statistics((shares @ steps, *gaps), spread),
            e2e=_summarize(ttft + decoding, mixed),
            output_tps=interval * float(output.mean()),
            total_tps=interval * (float(output.mean()) + workload.prompt.mean),
            request_tps=interval,
            decode_batch=batch / self.ranks,
            kv_usage=min(batch / self.resident_sequences, 1.0),
            kv_usage_p99=min(int(np.searchsorted(reached, 0.99)) / self.resident_sequences, 1.0),
            capacity=Interval.from_lognormal(peak, spread),
            queue=float(np.quantile(ttft - travel, 0.99)),
            preemptions=0.0,
            saturated=saturated,
            bottleneck=(
                limit if saturated or (workload.rate is None and rate > 0.9 * peak) else "load"
            ),
            basis=self.decode.basis,
            warnings=(FP8_KV_NOTE,) if self.decode.kv_stretch > 1 else (),
            num_simulated_requests=max(round(n / self.decode_pool.workers / self.ranks), 1),
        )


def _sample_requests(
    workload: Workload, n: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[n] prompt and output tokens and seconds of arrival: a trace's own, at the rate asked for, or drawn ones."""
    trace = workload.trace
    if trace is None:
        prompt, output = workload.prompt.sample(n, rng), workload.output.sample(n, rng)
        sent = (
            np.zeros(n)
            if workload.rate is None
            else sample_arrivals(n, workload.rate, workload.burstiness, rng)
        )
        return prompt, output, sent
    taken = trace.prompt <= workload.prompt.values.max()  # the others are refused
    columns = trace.prompt, trace.output, trace.arrival
    prompt, output, sent = (np.asarray(column[taken][:n], float) for column in columns)
    return (
        prompt,
        output,
        sent * (trace.rate * taken.mean() / workload.rate) if workload.rate else 0 * sent,
    )


def _widen_intervals(mid: Performance, others: list[Performance]) -> Performance:
    """`mid` with intervals that hold what faster and slower steps make of queues, too."""
    if not others:
        return mid

    def wider(metric: str, point: str) -> Interval:
        interval, ends = (
            mid.get(metric, point),
            [performance.get(metric, point).mid for performance in others],
        )
        return Interval(min(interval.lo, *ends), interval.mid, max(interval.hi, *ends))

    times: dict[str, Any] = {
        metric: {point: wider(metric, point) for point in LATENCY_STATISTICS}
        for metric in LATENCY_METRICS
    }
    return replace(mid, **times)


def _summarize(values: np.ndarray, sigma: float) -> dict[str, Interval]:
    return _build_statistics((values.mean(), *np.quantile(values, LATENCY_QUANTILES)), sigma)


def _build_statistics(values: Iterable[float], sigma: float) -> dict[str, Interval]:
    """Mean, p50, p95 and p99, each with the calibration's spread; tails are less certain."""
    sized = zip(LATENCY_STATISTICS, values, sigma * STATISTIC_SIGMA_FACTORS, strict=True)
    return {
        name: Interval.from_lognormal(float(value), float(spread)) for name, value, spread in sized
    }
