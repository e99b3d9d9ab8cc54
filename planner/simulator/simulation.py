"""Simulate what happens to every request of a workload on a deployment, by vLLM V1's schedule.

`simulate_requests` takes requests, `simulate_workload` a `Workload` on a `Deployment`, and
`simulator.schedule_cases` produces step logs. The schedule is exact (`simulator.scheduler`), also
for several replicas behind a router (`simulator.router`). The clock is the caller's step cost. The
same seed gives the same numbers.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

import numpy as np

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.engines.engine import get_engine
from planner.engines.engine_args import count_attention_copies
from planner.latency.step_model import StepModel
from planner.latency.workload_step_costs import build_workload_step_costs
from planner.memory.kv_cache import KvCachePool
from planner.simulator.kernel_types import (
    ROUTE_LEAST_LOADED,
    EngineRules,
    RequestBatch,
    RouterConfig,
    SimulationOptions,
    StepCostTable,
    to_compiled_types,
)
from planner.simulator.results import SimulationResult
from planner.workload.length_distribution import LengthDistribution
from planner.workload.request_generator import (
    BlockContents,
    build_shared_prefix_blocks,
    build_trace_blocks,
    sample_arrivals,
)
from planner.workload.sessions import SessionTrace
from planner.workload.workload import Workload, compute_zipf_fractions

INITIAL_TOKEN_RATIO, COPIES_TOKEN_RATIO = 0.7, 0.3
"""Share of their outputs that running requests reserve at first, and its part with copies of the
attention (SGLang 0.5.16 environ.py:356, server_args.py:5606)."""
MAX_BLOCKS_PER_MEAN_PROMPT = 64
"""Blocks per mean prompt beyond which finer blocks change a simulation by less than a percent."""
LOOKAHEAD_DRAFT_METHODS = ("eagle", "mtp", "draft_model", "dflash")
"""Draft methods whose drafter has a KV cache and takes slots ahead.

N-grams and suffixes take none.
"""


def uses_v033_scheduler(version: str | None) -> bool:
    """Return whether vLLM `version` schedules as 0.33.0 does; None is the newest known version.

    Raises `PlannerError` for an unknown version.
    """
    return get_engine("vllm", version).facts.scheduler_0_33


def simulate_requests(
    rules: EngineRules,
    table: StepCostTable,
    traffic: RequestBatch,
    *,
    names: Sequence[str] | None = None,
    location: str = "",
    collect_timing: bool = True,
    log_steps: bool = False,
    gauge_s: float = 0.0,
    router: RouterConfig | None = None,
) -> SimulationResult:
    """Simulate [n] requests.

    `log_steps` records what every step schedules; `gauge_s` > 0 is the interval at which gauges are
    sampled. With a `concurrency`, requests are held back while this many are in flight (a closed
    loop, if all arrive at 0). Without `content` (see `workload.request_generator`) no two prompts
    share a prefix. With a `router` the result covers all replicas, and `outcome.replica` has the
    replica of each request.

    Raises `PlannerError` for anything that cannot be simulated. It names the field and the request,
    by `names`, in the file `location`.
    """
    from planner.simulator.router import run_compiled_simulation

    def label(i: int) -> str:
        return f"{location}{', ' * bool(location)}request {names[i] if names else i + 1}"

    _check_requests(rules, table, traffic, label)
    if rules.priority and not len(traffic.rank):
        traffic = traffic._replace(rank=np.arange(len(traffic.arrival)))
    rules, table = to_compiled_types(rules), to_compiled_types(table)
    traffic = to_compiled_types(traffic)
    router = to_compiled_types(router or RouterConfig())
    prompt, output, usable = traffic.prompt, traffic.output, rules.num_blocks - 1
    needs = count_final_blocks(rules, prompt, output)
    largest = int(needs.argmax())
    if needs[largest] > usable:
        raise PlannerError(
            f"{label(largest)} can never fit: its {prompt[largest]:,} + {output[largest]:,} tokens"
            f" need {needs[largest]:,} KV blocks and the pool has {usable:,}"
        )
    options = to_compiled_types(
        SimulationOptions(
            collect_timing,
            log_steps,
            gauge_s,
            rules.enable_prefix_caching and not len(traffic.content),
            router.ranks_per_clock > 1,
        )
    )
    outcome = run_compiled_simulation(rules, table, traffic, router, options)
    if outcome.stuck == -2:  # a preempted request may find its own blocks: give them contents
        content, start = build_shared_prefix_blocks(
            prompt, output, np.zeros_like(prompt), int(rules.groups[0, 1])
        )
        traffic = to_compiled_types(traffic._replace(content=content, content_start=start))
        outcome = run_compiled_simulation(
            rules, table, traffic, router, options._replace(stop_at_first_preemption=False)
        )
    if outcome.stuck >= 0:
        raise PlannerError(
            f"{label(outcome.stuck)} can never be scheduled: its {prompt[outcome.stuck]:,} prompt"
            f" tokens do not fit {usable:,} KV blocks of {rules.groups[0, 1]} tokens and steps of"
            f" {rules.max_num_batched_tokens:,} tokens"
        )
    return SimulationResult(outcome, prompt, output, rules.num_blocks)


def _check_requests(
    rules: EngineRules, table: StepCostTable, traffic: RequestBatch, label: Callable[[int], str]
) -> None:
    """Raise `PlannerError` for requests and step costs that cannot be simulated."""
    if not len(traffic.arrival):
        raise PlannerError("there are no requests; at least one is needed")
    longest = int(np.argmax(traffic.prompt))
    if traffic.prompt[longest] >= rules.max_model_len:
        raise PlannerError(
            f"{label(longest)}, field prompt: {traffic.prompt[longest]:,} tokens leave no room for"
            f" an output within max_model_len {rules.max_model_len:,}"
        )
    for part, seconds in table._asdict().items():
        if not (np.min(seconds, initial=0) >= 0 and np.max(seconds, initial=0) < math.inf):
            raise PlannerError(
                f"step cost, field {part}: it holds something else than times from 0"
            )


def count_final_blocks(rules: EngineRules, prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Return [n] blocks that each request holds at least when its last token is computed."""
    tokens = np.minimum(prompt.astype(np.int64) + output - 1, rules.max_model_len - 1)
    blocks = np.zeros(len(prompt), np.int64)
    for window, size in rules.groups:
        blocks += -window if window < 0 else -(-np.minimum(tokens, window or tokens) // size)
    return blocks


def build_engine_rules(deployment: Deployment, pool: KvCachePool, seed: int = 0) -> EngineRules:
    """Build the rules of one engine (one data-parallel rank) with the KV cache pool of its plan."""
    args, speculation = deployment.args, deployment.speculation
    groups: list[tuple[int, int]] = []
    for group in sorted(
        pool.layout.groups, key=lambda group: (group.kind == "state", group.block_size)
    ):
        reach = {"full": 0, "state": -group.states}.get(group.kind, group.window)
        groups.append((reach, group.block_size * pool.layout.dcp))
    copies = count_attention_copies(deployment.engine, deployment.model, deployment.layout)
    has_lookahead = speculation and speculation.method.lower().startswith(LOOKAHEAD_DRAFT_METHODS)
    return EngineRules(
        max_num_seqs=int(min(args.max_num_seqs, max(pool.max_sequences, 1))),
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_blocks=pool.num_blocks,
        max_model_len=args.max_model_len,
        enable_prefix_caching=args.enable_prefix_caching,
        enable_chunked_prefill=args.enable_chunked_prefill,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        async_scheduling=args.async_scheduling,
        priority=args.scheduling_policy == "priority",
        uses_v033_scheduler=deployment.engine.facts.scheduler_0_33,
        groups=np.array(groups, np.int64),
        num_speculative_tokens=deployment.num_draft_tokens,
        acceptance_rate=speculation.acceptance_rate if speculation else 0.0,
        num_lookahead_tokens=deployment.num_draft_tokens if has_lookahead else 0,
        seed=seed,
        recv_interval=args.scheduler_recv_interval,
        prefills_first=deployment.engine.facts.prefills_first,
        token_ratio=INITIAL_TOKEN_RATIO * (COPIES_TOKEN_RATIO if copies > 1 else 1),
    )


def _coarsen_blocks(rules: EngineRules, prompt: float) -> EngineRules:
    """Return `rules` with the same pool in larger blocks, where those would be needlessly fine.

    That is if a mean prompt would fill more than twice `MAX_BLOCKS_PER_MEAN_PROMPT` blocks.
    """
    factor = 2 ** max(
        math.floor(math.log2(prompt / (MAX_BLOCKS_PER_MEAN_PROMPT * rules.groups[0, 1]))), 0
    )
    if factor == 1 or (rules.groups[:, 0] < 0).any():
        return rules
    return rules._replace(
        num_blocks=(rules.num_blocks - 1) // factor + 1, groups=rules.groups * np.array([1, factor])
    )


def build_step_cost_table(model: StepModel) -> StepCostTable:
    """Build the step cost table that the compiled simulation reads."""
    decode_windows, prefill_windows = (
        np.array(rows, float).reshape(-1, 2)
        for rows in (model.decode_windows, model.prefill_windows)
    )
    return StepCostTable(
        tokens_s=model.tokens_s,
        rows_s=model.rows_s,
        fixed_s=model.fixed_s,
        state_s=model.state_s,
        decode_context_s=model.decode_context_s,
        prefill_pair_s=model.prefill_pair_s,
        prefill_step_s=model.prefill_step_s,
        decode_windows=decode_windows,
        prefill_windows=prefill_windows,
        stages=model.stages,
        sequences_s=model.sequences_s,
        shared_tokens_s=model.shared_tokens_s,
        padded_tokens=model.padded_tokens,
        prompt_s=model.prompt_s,
    )


def simulate_workload(
    deployment: Deployment, pool: KvCachePool, model: StepModel, workload: Workload,
    seed: int = 0, gauge_s: float = 0.0, requests: int | None = None, even: bool = False,
    router: RouterConfig | None = None,
) -> SimulationResult:  # fmt: skip
    """Simulate one engine's share of `workload`: its own trace, or lengths and arrivals by `seed`.

    Ranks that share a clock are simulated together, each with its share.

    `model` is the deployment's step model, see `latency.speculative_decoding.build_step_model`.
    Requests go to the engines round robin; of a trace, engine `seed` gets every n-th request (of
    sessions, those of every n-th), and the first `num_uncounted` are simulated, but left out. With
    a `router` all of its replicas are simulated instead. `requests` is the number of an engine's
    requests (None: those of a whole run). `even` spreads their lengths evenly, so that few requests
    have the mean of many. Prompts that the engine rejects
    are left out. Drafted tokens are accepted at random, each with the deployment's `acceptance_rate` a if
    those before it were, so that a step yields 1 + a + ... + a^k tokens on average.
    """
    ranks = deployment.ranks_per_clock
    engines, simulated = (1, 1) if router else (deployment.num_clocks, ranks)
    if router or ranks > 1:
        router = router or RouterConfig(ranks, ROUTE_LEAST_LOADED)
        router = router._replace(ranks_per_clock=ranks)
    requests = requests and simulated * requests
    share, trace = workload.split(engines), workload.trace
    own, uncounted = np.empty(0, np.int64), 0
    if trace is not None:
        own = trace.select_rows(seed % engines, engines)
        uncounted = int(np.searchsorted(own, trace.num_uncounted))
        own = own[: requests and requests + uncounted]
    n = len(own) if trace else requests or share.num_requests
    arrival, prompt, output, rng = _draw_requests(workload, share, own, n, seed, even)
    limit = deployment.args.max_model_len
    if not (served := prompt < limit).any():
        raise PlannerError(
            f"all prompts are rejected: each exceeds max_model_len {limit:,}. Raise max_model_len"
        )
    arrival, prompt, output = arrival[served], prompt[served], output[served]
    uncounted = int(np.count_nonzero(served[:uncounted]))
    if model.kv_stretch > 1:
        held = pool.layout.sequences_per_block / model.kv_stretch  # of states, as many as before
        layout = replace(pool.layout, sequences_per_block=held)
        pool = replace(pool, layout=layout, num_blocks=int(pool.num_blocks * model.kv_stretch))
    rules = build_engine_rules(deployment, pool, seed)
    if (prompt.astype(np.int64) + output).max() > rules.max_num_batched_tokens:
        # without it no engine would start for such requests
        rules = rules._replace(enable_chunked_prefill=True)
    traffic = RequestBatch(
        arrival,
        prompt,
        output,
        concurrency=share.concurrency or 0,
        request_s=model.request_s,
        prompt_token_s=model.prompt_token_s,
    )
    costs = build_workload_step_costs(deployment, workload, pool, model)
    table = build_step_cost_table(model)._replace(
        **costs.adapters._asdict(), concurrent_readers=costs.concurrent_readers
    )
    if costs.reuses_prefixes or rules.groups[0, 1] == 1:  # a block per token is too fine as well
        rules = _coarsen_blocks(rules, float(prompt.mean()))
    if costs.reuses_prefixes:
        size = int(rules.groups[0, 1])
        content, start = _build_contents(
            workload, share, own[served] if trace else own, prompt, output, size, rng
        )
        traffic = traffic._replace(content=content, content_start=start)
    if costs.offload.store_token_s:
        coarse = rules.groups[0, 1] / pool.layout.groups[0].block_size
        rules = rules._replace(host_blocks=int(costs.offload.num_blocks / coarse))
        table = table._replace(
            host_block_s=costs.offload.load_block_s * coarse,
            tokens_s=table.tokens_s + costs.offload.store_token_s * np.arange(len(table.tokens_s)),
        )
    if workload.adapters:
        rules, table, traffic = _add_adapters(deployment, workload, rng, rules, table, traffic)
    result = simulate_requests(rules, table, traffic, gauge_s=gauge_s, router=router)
    return replace(result.trim(uncounted, 0), engines=simulated)


def _draw_requests(
    workload: Workload, share: Workload, own: np.ndarray, n: int, seed: int, even: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.random.Generator]:  # fmt: skip
    """Draw arrivals [s], prompt and output tokens of one engine, or take its `own` of a trace.

    Returns them with what draws the rest.
    """
    trace, rng = workload.trace, np.random.default_rng(seed)
    if trace is not None and workload.prompt.kind == workload.output.kind == "empirical":
        prompt, output = trace.prompt[own], trace.output[own]
    else:
        prompt, output, drawn = _draw_lengths(share.prompt, share.output, n, seed, even)
        rng = deepcopy(drawn)
    if trace is not None:
        arrival = trace.arrival[own] * (trace.rate / workload.rate if workload.rate else 1.0)
    else:
        arrival = sample_arrivals(n, share.rate or math.inf, share.burstiness, rng)
    return arrival, prompt, output, rng


@lru_cache(maxsize=64)  # a search sends every candidate the same
def _draw_lengths(
    prompt: LengthDistribution, output: LengthDistribution, n: int, seed: int, even: bool
) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """Draw [n] prompts and outputs in tokens; return them with the generator after it."""
    rng = np.random.default_rng(seed)
    return prompt.sample(n, rng, even), output.sample(n, rng, even), rng


def _build_contents(
    workload: Workload, share: Workload, own: np.ndarray, prompt: np.ndarray, output: np.ndarray,
    size: int, rng: np.random.Generator,
) -> BlockContents:  # fmt: skip
    """Build the contents of blocks of `size` tokens: those of a trace's `own` requests, or drawn."""
    trace = workload.trace
    if trace is None or not workload.uses_trace_prefixes:
        return _sample_prefixes(share, prompt, output, size, rng)
    if isinstance(trace, SessionTrace):
        return trace.build_blocks(own, size)
    return build_trace_blocks(trace, own, prompt, output, size)


def _add_adapters(
    deployment: Deployment, workload: Workload, rng: np.random.Generator, rules: EngineRules,
    table: StepCostTable, traffic: RequestBatch,
) -> tuple[EngineRules, StepCostTable, RequestBatch]:  # fmt: skip
    """Give every request an adapter, and the engine its slots for them."""
    slots = deployment.args.max_loras
    if not slots:
        raise PlannerError(
            f"{workload.adapters:,} adapters need slots on the GPU: give max_loras, from 1"
        )
    popularity = compute_zipf_fractions(workload.adapters, workload.adapter_zipf)
    adapter = rng.choice(workload.adapters, len(traffic.prompt), p=popularity)
    cached = deployment.args.max_cpu_loras or slots
    if cached >= workload.adapters:  # --lora-modules loads all before the first request
        table = table._replace(adapter_cold_s=0.0)
    rules = rules._replace(max_loras=slots, max_cpu_loras=cached)
    return rules, table, traffic._replace(adapter=adapter)


def count_serving_engines(deployment: Deployment, workload: Workload) -> int:
    """Count the engines among which the requests in flight are distributed.

    A closed loop with fewer requests than replicas leaves the others idle; of ranks on one clock
    the idle ones are simulated.
    """
    clocks = deployment.num_clocks
    return deployment.ranks_per_clock * min(clocks, workload.concurrency or clocks)


def _sample_prefixes(
    share: Workload, prompt: np.ndarray, output: np.ndarray, size: int, rng: np.random.Generator
) -> BlockContents:
    """Return the blocks of prompts of which `prefix_hit_rate` is shared.

    It is that fraction of each prompt, or `prefix_tokens` of that fraction of the prompts.
    """
    prefix = np.rint(prompt * share.prefix_hit_rate / size) * size
    if share.prefix_tokens:
        prefix = np.where(rng.random(len(prompt)) < share.prefix_hit_rate, share.prefix_tokens, 0)
    return build_shared_prefix_blocks(prompt, output, prefix, size)
