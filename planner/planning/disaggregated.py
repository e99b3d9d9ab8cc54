"""Disaggregated serving: a request passes through a prefill pool and a decode pool in series.

Requests are simulated through both pools one by one (`simulator.disaggregated_pools`). That
includes the effects of a loop closed over both: the first burst in the prefill queue, the small
decode batch when prefill is the bottleneck, and answers that end together because their prompts
began together. TTFT is that of a client behind NVIDIA Dynamo: prefill, the transfer of the KV
cache, and the wait for a slot in a decode worker, which sends the first token.
`latency.worker_pool_costs` has the times of these besides the steps.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

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
from planner.latency.step_model import (
    StepModel,
    build_step_model,
    build_uncorrected_step_model,
)
from planner.latency.worker_pool_costs import (
    WorkerPoolCosts,
    get_pool_coefficients,
    get_pool_costs,
    get_pool_sigmas,
)
from planner.memory.memory_plan import MemoryPlan, get_memory_plan
from planner.planning.capacity import derive_effective_workload
from planner.planning.prediction import Prediction, estimate_hourly_cost
from planner.simulator.kernel_types import DecodeWorkerPool, PoolTimeline, PrefillWorkerPool
from planner.workload.request_generator import sample_arrivals
from planner.workload.workload import Workload

MAX_SIMULATED_REQUESTS = 150_000
"""Limit of simulated requests; a longer run reaches its steady state long before."""
ARRIVAL_SEED = 1
COLLECTIVE_PARTS = ("experts", "collectives", "expert exchange")
"""Parts of a step common to all data-parallel ranks: their cost follows the mean load of the ranks,
that of the other parts the largest."""


def evaluate_disaggregated(
    prefill: Deployment,
    decode: Deployment,
    workload: Workload,
    prices: PriceSelection | None = None,
    *,
    quick: bool = False,
) -> Prediction:
    """Predict a `prefill` and a `decode` pool, whose replicas are workers, under `workload`.

    With a rate the loop is open, and simulated at a faster and a slower step cost too unless
    `quick`. With a concurrency it is closed; with both it is open but holds requests back. Raises
    `PlannerError` if requests do not fit into max_model_len, or a sequence not into the decode
    pool's KV cache.
    """
    memories = {pool: get_memory_plan(pool) for pool in (prefill, decode)}
    usd = [estimate_hourly_cost(pool, prices) for pool in (prefill, decode)]
    cost = usd[0] + usd[1] if usd[0] and usd[1] else None
    for pool, memory in memories.items():
        if not memory.can_start:
            return Prediction(pool, workload, memory, None, cost)
    prediction = Prediction(decode, workload, memories[decode], None, cost, prefill=prefill)
    load = derive_effective_workload(prefill, workload)  # prefill workers have the prefix caches
    pools = DisaggregatedPools.from_deployments(prefill, decode, memories[decode], load)
    performance, ends = pools.simulate(load), []
    if load.rate is not None and not quick:  # in a closed loop all times scale with the step cost
        slower = math.exp(Z_SCORE_80PCT * pools.sigma_tpot)
        ends = [pools.scale(factor).simulate(load) for factor in (1 / slower, slower)]
    return replace(prediction, performance=_widen_intervals(performance, ends))


def estimate_kv_transfer(prefill: Deployment, decode: Deployment) -> tuple[float, float]:
    """Estimate the KV transfer: bytes/s of one GPU's link, and seconds per prompt token on it.

    All ranks of a worker send their parts at once, over the network between nodes, since a pool may
    be on any node.
    """
    bandwidth = min(prefill.gpu.internode_bandwidth, decode.gpu.internode_bandwidth)
    token_bytes = max(get_memory_plan(pool).layout.kv_bytes_per_token for pool in (prefill, decode))
    return bandwidth, token_bytes / bandwidth


@dataclass(frozen=True)
class DisaggregatedPools:
    """Both pools as numbers: the costs of their steps, and of the transfer between them."""

    prefill_pool: PrefillWorkerPool
    decode_pool: DecodeWorkerPool
    prefill: StepModel
    decode: StepModel
    ranks: int  # data-parallel ranks of a decode worker
    resident_sequences: float  # in the KV cache pool of a decode worker
    transfer_s: float  # per prompt token
    sigma_tpot: float  # standard deviations of ln(measured / predicted)
    sigma_ttft: float

    @classmethod
    def from_deployments(
        cls, prefill: Deployment, decode: Deployment, memory: MemoryPlan, workload: Workload,
        costs: WorkerPoolCosts | None = None,
    ) -> Self:  # fmt: skip
        """Compute the step costs of both pools, with the decode pool's `memory`.

        `costs` replaces those of the catalog.
        """
        costs = costs or get_pool_costs(decode.engine)
        # measured runs of whole engines say little of engines that only prefill or only decode
        prefill_step = build_uncorrected_step_model(
            prefill, get_pool_coefficients(prefill, "prefill", costs)
        )
        decode_step = build_uncorrected_step_model(
            decode, get_pool_coefficients(decode, "decode", costs)
        )
        grid, stages = prefill_step.grid, prefill_step.stages
        collective_s = np.maximum.accumulate(
            sum((prefill_step.parts[name] for name in COLLECTIVE_PARTS), np.zeros(len(grid)))
        )
        tokens = np.arange(prefill_step.max_tokens + 1)
        fixed_s = prefill_step.fixed_s + prefill_step.prefill_step_s
        prefill_pool = PrefillWorkerPool(
            workers=prefill.layout.replicas,
            ranks=prefill.layout.dp,
            rank_step_s=np.interp(tokens, grid, prefill_step.grid_s - collective_s) / stages,
            collective_step_s=np.interp(tokens, grid, collective_s) / stages,
            step_s=(fixed_s + float(prefill_step.interpolate_rows_s(1))) / stages,
        )
        context, ranks = workload.mean_decode_context, decode.layout.dp
        resident = (
            (memory.pool.num_blocks - 1)
            / memory.layout.count_request_blocks(max(int(context), 1))
            * decode_step.kv_stretch
            * ranks
        )
        max_running = workload.concurrency or MAX_SIMULATED_REQUESTS
        slots = int(min(decode.args.max_num_seqs * ranks, resident, max_running))
        if slots < 1:
            pool = f"the KV pool of {memory.pool.reported_tokens:,} tokens"
            raise PlannerError(f"{pool} holds no sequence of {context:,.0f} tokens")
        step_s = decode_step.estimate_decode_step_s(
            np.maximum(np.arange(slots + 1) / ranks / decode_step.stages, 1.0), context
        )
        decode_pool = DecodeWorkerPool(
            decode.layout.replicas, np.maximum.accumulate(np.asarray(step_s, float)), costs.handover
        )
        # no step of the pool waits for a prompt
        received = replace(workload, prefix_tokens=0, prefix_hit_rate=1.0)
        whole = build_step_model(decode, received)
        sigmas = get_pool_sigmas(decode, whole.sigma_tpot, whole.sigma_ttft)
        decode_step = replace(decode_step, basis=whole.basis)
        transfer_s = estimate_kv_transfer(prefill, decode)[1]
        return cls(
            prefill_pool, decode_pool, prefill_step, decode_step, ranks, resident, transfer_s,
            *sigmas,
        )  # fmt: skip

    def scale(self, factor: float) -> Self:
        """Multiply the step costs of both pools by `factor`."""
        prefill, decode = self.prefill_pool, self.decode_pool
        prefill = prefill._replace(
            rank_step_s=prefill.rank_step_s * factor,
            collective_step_s=prefill.collective_step_s * factor,
            step_s=prefill.step_s * factor,
        )
        decode = decode._replace(step_s=decode.step_s * factor)
        return replace(self, prefill_pool=prefill, decode_pool=decode)

    def simulate(self, workload: Workload) -> Performance:
        """Simulate the workload's requests from the first burst on; summarize their latencies."""
        from planner.simulator.disaggregated_pools import simulate_tandem_pools  # and the compiler

        concurrency = workload.concurrency or 0
        n = min(workload.num_requests, max(MAX_SIMULATED_REQUESTS, 2 * concurrency))
        rng = np.random.default_rng(ARRIVAL_SEED)
        prompt, output, sent = _sample_requests(workload, n, rng)
        n = len(sent)
        computed = np.maximum(prompt - workload.mean_cached_tokens, 1.0)
        attention = (
            self.prefill.estimate_prefill_attention_s(computed, workload.mean_cached_tokens)
            / self.prefill.stages
        )
        frontend_s = self.prefill.request_s + computed * self.prefill.prompt_token_s
        transfer_s = prompt * self.transfer_s + frontend_s
        steps = np.maximum(output - 1.0, 0.0) / self.decode.tokens_per_step
        run = PoolTimeline(
            *simulate_tandem_pools(
                self.prefill_pool, self.decode_pool, sent, concurrency, computed, attention,
                transfer_s, steps,
            )
        )  # fmt: skip
        ttft, decoding, step_s = (
            run.joined - run.sent,
            run.ended - run.joined,
            self.decode_pool.step_s,
        )
        several = output > 1
        tpot = decoding[several] / (output[several] - 1) if several.any() else step_s[1:2]
        slots, last = len(step_s) - 1, float(run.sent[-1])
        # Until the last request is sent, the loop is full or the rate is that of the workload.
        rate = (
            float((run.ended <= last).sum()) / last
            if last > 0
            else len(ttft) / float(run.ended.max())
        )
        prefills = self.prefill_pool.workers * len(ttft) / max(float(run.busy[0]), 1e-9)
        answer_s = step_s[slots] * (output.mean() - 1) / self.decode.tokens_per_step
        decodes = self.decode_pool.workers * slots / max(answer_s, 1e-9)
        decode_limit = "kv" if slots >= int(self.resident_sequences) else "max_num_seqs"
        peak, limit = min((float(prefills), "compute"), (float(decodes), decode_limit))
        saturated = workload.rate is not None and workload.rate >= peak
        fractions = run.tokens / max(run.tokens.sum(), 1e-9)  # of tokens, by decode batch
        batch, cumulated = float(fractions @ np.arange(slots + 1)), np.cumsum(fractions)
        gaps = [step_s[min(int(np.searchsorted(cumulated, q)), slots)] for q in LATENCY_QUANTILES]
        sigma_tpot, sigma_ttft = self.sigma_tpot, self.sigma_ttft
        sigma_e2e = math.hypot(sigma_ttft * ttft.mean(), sigma_tpot * decoding.mean()) / (
            ttft.mean() + decoding.mean()
        )
        interval = Interval.from_lognormal(rate, sigma_tpot)
        return Performance(
            latencies={
                "ttft": _summarize(ttft, sigma_ttft),
                "tpot": _summarize(tpot, sigma_tpot),
                "itl": _build_statistics((fractions @ step_s, *gaps), sigma_tpot),
                "e2e": _summarize(ttft + decoding, sigma_e2e),
            },
            output_tps=interval * float(output.mean()),
            total_tps=interval * (float(output.mean()) + workload.prompt.mean),
            request_tps=interval,
            decode_batch=batch / self.ranks,
            kv_usage=min(batch / self.resident_sequences, 1.0),
            kv_usage_p99=min(
                int(np.searchsorted(cumulated, 0.99 * cumulated[-1])) / self.resident_sequences, 1.0
            ),
            capacity=Interval.from_lognormal(peak, sigma_tpot),
            queue=float(np.quantile(ttft - transfer_s, 0.99)),
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
    """Sample prompt tokens, output tokens and arrival times [n].

    A trace keeps its own, stretched to the workload's rate.
    """
    trace = workload.trace
    if trace is None:
        prompt, output = workload.prompt.sample(n, rng), workload.output.sample(n, rng)
        sent = (
            np.zeros(n)
            if workload.rate is None
            else sample_arrivals(n, workload.rate, workload.burstiness, rng)
        )
        return prompt, output, sent
    first = trace.num_uncounted
    columns = trace.prompt[first:], trace.output[first:], trace.arrival[first:]
    admitted = columns[0] <= workload.prompt.values.max()
    prompt, output, sent = (np.asarray(column[admitted][:n], float) for column in columns)
    sent -= trace.arrival[first]
    stretch = trace.rate * admitted.mean() / workload.rate if workload.rate else 0
    return prompt, output, sent * stretch


def _widen_intervals(mid: Performance, ends: list[Performance]) -> Performance:
    """Widen the latency intervals of `mid` to the latencies at faster and slower steps, `ends`."""
    if not ends:
        return mid

    def widen(metric: str, point: str) -> Interval:
        interval = mid.get(metric, point)
        values = [performance.get(metric, point).mid for performance in ends]
        return Interval(min(interval.lo, *values), interval.mid, max(interval.hi, *values))

    latencies = {
        metric: {point: widen(metric, point) for point in LATENCY_STATISTICS}
        for metric in LATENCY_METRICS
    }
    return replace(mid, latencies=latencies)


def _summarize(values: np.ndarray, sigma: float) -> dict[str, Interval]:
    return _build_statistics((values.mean(), *np.quantile(values, LATENCY_QUANTILES)), sigma)


def _build_statistics(values: Iterable[float], sigma: float) -> dict[str, Interval]:
    """Build the intervals of mean, p50, p95 and p99; tails are less certain than `sigma`."""
    sigmas = sigma * STATISTIC_SIGMA_FACTORS
    return {
        statistic: Interval.from_lognormal(float(value), float(sigma))
        for statistic, value, sigma in zip(LATENCY_STATISTICS, values, sigmas, strict=True)
    }
