"""Argument changes that improve a deployment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.engines.argument_names import load_argument_names
from planner.engines.deployment import Deployment, deploy_on
from planner.memory.concurrency_limits import estimate_preemption_risk, find_safe_max_num_seqs
from planner.memory.deployment_changes import MEMORY_BENEFITS
from planner.memory.memory_plan import (
    MemoryPlan,
    find_larger_utilization,
    find_memory_changes,
    plan_memory,
)
from planner.planning.prediction import Prediction, predict
from planner.workload.length_distribution import LengthDistribution
from planner.workload.workload import Workload

DEFAULT_PROMPT_TOKENS, DEFAULT_OUTPUT_TOKENS = 1000, 200
"""Tokens of a request, on average, if the traffic is not known."""
MIN_SUGGESTED_GAIN = 0.02
"""Fraction of throughput or pace from which on a change is proposed."""


@dataclass(frozen=True)
class Suggestion:
    """One change of an argument, by the engine's own name, and what it improves."""

    argument: str
    value: Any
    benefit: str


def build_default_workload(max_tokens: int) -> Workload:
    """Return requests of typical lengths, spread as in public traces, within `max_tokens`."""
    prompt, output = (
        min(float(mean), max_tokens * share)
        for mean, share in ((DEFAULT_PROMPT_TOKENS, 0.6), (DEFAULT_OUTPUT_TOKENS, 0.2))
    )
    prompts, outputs = (
        LengthDistribution.from_public_traces(prompt, "prompt", 0.75 * max_tokens),
        LengthDistribution.from_public_traces(output, "output", 0.25 * max_tokens),
    )
    return Workload(prompts, outputs, concurrency=1)


def suggest_changes(
    memory: MemoryPlan, load: Workload, arguments: Sequence[str] | None = None
) -> tuple[tuple[Suggestion, ...], Prediction | None]:
    """Suggest what makes a deployment start, then which of `arguments` (all) serve traffic better.

    Also return the prediction with all of them, at the load of full slots.
    """
    steps, best = (
        ([], memory.deployment) if memory.status == "ok" else _find_starting_changes(memory)
    )
    if not steps and not memory.can_start:
        return (), None
    full_load = replace(load, concurrency=limit_in_flight(plan_memory(best), load))
    current = predict(best, full_load)
    called = load_argument_names(best.engine.name).engine_names
    for name in ARGUMENT_SUGGESTERS if arguments is None else arguments:
        value = ARGUMENT_SUGGESTERS[name](best, full_load) if name in called else None
        changed = best if value is None else best.with_args(**{name: value})
        changed_prediction = (
            predict(changed, full_load)
            if value is not None and plan_memory(changed).status == "ok"
            else None
        )
        if (
            changed_prediction
            and changed_prediction.performance
            and current.performance
            and (benefit := _describe_benefit(current, changed_prediction, full_load))
        ):
            steps.append(Suggestion(called[name], value, benefit))
            best, current = changed, changed_prediction
    return tuple(steps), current if steps else None


def limit_in_flight(memory: MemoryPlan, load: Workload) -> int:
    """Limit the requests in flight to what memory and max_num_seqs take, up to 256 an engine."""
    fit, args = (
        memory.pool.count_sequences(round(load.mean_tokens_per_request)),
        memory.deployment.args,
    )
    return max(1, min(fit, args.max_num_seqs, 256)) * memory.deployment.num_engine_instances


def _find_starting_changes(memory: MemoryPlan) -> tuple[list[Suggestion], Deployment]:
    """Find the cheapest changes after which it surely starts, on one machine; none if none help."""
    deployment = memory.deployment
    arguments = {*load_argument_names(deployment.engine.name).engine_names, "layout"}
    steps = list[Suggestion]()
    for change in find_memory_changes(memory, arguments, deployment.gpus_per_node):
        settings = change.list_settings(deployment).items()
        benefit = MEMORY_BENEFITS[change.argument]
        steps += [Suggestion(name, value, benefit) for name, value in settings]
        deployment = change.apply(deployment)
    if steps:
        tokens = plan_memory(deployment).pool.reported_tokens
        steps[-1] = replace(steps[-1], benefit=f"it starts: {tokens:,} tokens of KV cache")
    return steps, deployment


def _suggest_memory_utilization(deployment: Deployment, load: Workload) -> float | None:
    """Return the safe share of the memory if vLLM's pool takes fewer requests than may run."""
    fit = plan_memory(deployment).pool.count_sequences(round(load.mean_tokens_per_request))
    is_short = (
        deployment.engine.facts.memory_budget == "total" and fit < deployment.args.max_num_seqs
    )
    return find_larger_utilization(deployment) if is_short else None


def _suggest_batched_tokens(deployment: Deployment, load: Workload) -> int | None:
    """Return the engine's own tokens of a step if the command has fewer."""
    bare = deploy_on(
        deployment.model, deployment.gpu, **vars(deployment.layout), engine=deployment.engine,
        max_model_len=deployment.args.max_model_len,
    )  # fmt: skip
    usual = bare.args.max_num_batched_tokens
    return usual if deployment.args.max_num_batched_tokens < usual else None


def _suggest_num_seqs(deployment: Deployment, load: Workload) -> int | None:
    """Return the sequences that hardly ever outgrow the pool if the command has more."""
    memory, many = plan_memory(deployment), deployment.args.max_num_seqs
    safe = find_safe_max_num_seqs(memory, load)
    crowded = estimate_preemption_risk(memory, load, min(many, load.concurrency or 1)) > 0.05
    return safe if 0 < safe < many and crowded else None


ARGUMENT_SUGGESTERS: dict[str, Callable[[Deployment, Workload], Any]] = {
    "enforce_eager": lambda deployment, _: False if deployment.args.enforce_eager else None,
    "gpu_memory_utilization": _suggest_memory_utilization,
    "max_num_batched_tokens": _suggest_batched_tokens, "max_num_seqs": _suggest_num_seqs,
}  # fmt: skip
"""By argument, the value that may serve the same traffic better; None if there is none to try."""


def _describe_benefit(now: Prediction, then: Prediction, load: Workload) -> str:
    """Describe what a change does to the same traffic; empty if that is too little."""
    before, after = now.performance, then.performance
    assert before and after
    rate = after.output_tps.mid / before.output_tps.mid - 1
    pace = before.get("tpot", "mean").mid / after.get("tpot", "mean").mid - 1
    first = before.get("ttft", "p50").mid / after.get("ttft", "p50").mid - 1
    calmer, gain = before.preemptions - after.preemptions, MIN_SUGGESTED_GAIN
    tokens = round(load.mean_tokens_per_request)
    fits = [each.memory.pool.count_sequences(tokens) for each in (now, then)]
    # what runs instead of waiting slows down its neighbours: no loss as far as more is served
    is_worse = min(rate, pace + max(rate, 0.0)) < -gain or (first < -0.1 and calmer <= 0.1)
    is_better = max(rate, pace, first / 5, 2 * calmer) > gain or fits[1] > 1.05 * fits[0]
    if is_worse or not is_better:
        return ""
    ms = [each.get(*of).mid * 1e3 for of in _SHOWN_LATENCIES for each in (before, after)]
    rows = (
        (pace, f"TPOT {ms[0]:,.1f} ms -> {ms[1]:,.1f} ms"),
        (first / 5, f"median TTFT {ms[2]:,.1f} ms -> {ms[3]:,.1f} ms"),
        (rate, f"{before.output_tps.mid:,.0f} -> {after.output_tps.mid:,.0f} output tokens/s"),
        (calmer, f"{before.preemptions:.2f} -> {after.preemptions:.2f} preemptions a request"),
        (fits[1] - fits[0], f"{fits[0]:,} -> {fits[1]:,} requests fit"),
    )
    told = ", ".join(text for change, text in rows if abs(change) > gain / 2)
    return f"{told} at {load.concurrency} in flight"


_SHOWN_LATENCIES = (("tpot", "mean"), ("ttft", "p50"))
