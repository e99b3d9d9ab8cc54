"""Engine arguments that a search tries, as far as the scenario leaves them open."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.engines.engine_args import resolve_engine_args
from planner.latency.step_model import build_step_model
from planner.memory.memory_plan import get_memory_plan
from planner.planning.candidate import PROBABILITY_TIE
from planner.planning.deployment_builder import set_max_num_seqs
from planner.planning.evaluation import get_candidate_workload
from planner.planning.memory_odds import list_memory_utilizations
from planner.planning.scenario import Scenario
from planner.planning.slo import compute_probability, compute_tolerance
from planner.planning.tolerance import EvaluationStore, compute_error_factor

BATCHED_TOKENS_VALUES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Ladder of max_num_batched_tokens: short chunks keep steps short, long ones serve more prompts."""
NUM_SEQS_LADDER = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
)  # fmt: skip
"""Values of max_num_seqs that the search steps through: each about 1.4 times the one before."""
LORA_SLOT_VALUES = (1, 4, 16, 64, 256, 1024)
"""Values of max_loras for scenarios with adapters: more of them in a step, and less memory for the KV cache."""
MIN_UTILIZATION_GAIN = 0.01
"""Less of a GPU's memory is not worth another gpu_memory_utilization."""


def generate_variants(scenario: Scenario, usual: Deployment) -> Iterator[Deployment]:
    """Generate `usual` with one of its engine's arguments changed, for the closed form to judge.

    Larger shares of the GPU's memory are among them: the largest that lasts, and that starts.
    """
    args, given = usual.args, scenario.engine_args
    changes: list[dict[str, float]] = []
    if "max_num_batched_tokens" not in given:
        changes += [{"max_num_batched_tokens": size} for size in BATCHED_TOKENS_VALUES[1::2]]
    if "gpu_memory_utilization" not in given:
        least = args.gpu_memory_utilization + MIN_UTILIZATION_GAIN
        more = [share for share in list_memory_utilizations(usual) if share >= least]
        changes += [{"gpu_memory_utilization": share} for share in dict.fromkeys(more)]
    if (adapters := scenario.workload.adapters) and "max_loras" not in given:
        slot_counts = {min(slots, adapters) for slots in LORA_SLOT_VALUES}
        changes += [{"max_loras": slots} for slots in sorted(slot_counts)]
    if scenario.workload.uses_trace_prefixes and "kv_offloading_size" not in given:
        host_gib = scenario.host_memory_gib * usual.layout.tp * usual.layout.pp
        changes += [{"kv_offloading_size": host_gib}] if host_gib else []
    for change in changes:
        changed_args = {"gpu_memory_utilization": args.gpu_memory_utilization, **change}
        with suppress(PlannerError):  # engines have rules for how their arguments go together
            yield from _keep_startable(apply_engine_args(scenario, usual, **changed_args))
    if not get_memory_plan(usual).can_start:
        return
    if "max_num_seqs" not in given and scenario.slo_targets:
        for seqs in NUM_SEQS_LADDER[::4]:
            if seqs < args.max_num_seqs:
                yield usual.with_args(max_num_seqs=seqs)
    if drafted := usual.speculation:
        for k in range(1, usual.num_draft_tokens):
            yield replace(usual, speculation=replace(drafted, num_speculative_tokens=k))


def apply_engine_args(scenario: Scenario, usual: Deployment, **knobs: float) -> Deployment:
    """Start `usual` with other arguments, and with the max_num_seqs that then fits.

    Raises `PlannerError` if the engine refuses them.
    """
    args = usual.args
    given: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("max_model_len", "kv_cache_dtype", "max_loras", "kv_offloading_size")
    }
    given |= scenario.engine_args
    resolved = resolve_engine_args(
        {**given, **knobs}, usual.engine, usual.gpu, usual.model, usual.layout, usual.speculation
    )
    return set_max_num_seqs(scenario, replace(usual, args=resolved))


MAX_DRAFT_TOKENS = 8
"""More tokens are hardly ever drafted in a step."""
SAFE_ENOUGH_SIGMAS = 2.0
"""Beyond two standard deviations (98%) speed and capacity count, no longer safety."""
NEAR_MARGIN = 1.15
"""What is beyond its limits by less may hold between two values of a ladder."""
LEAST_HOPELESS_MARGIN = 1.1
"""Where the least margin is more, nothing is tried: it is as exact as lengths that are drawn have their percentile."""
MAX_TUNING_STEPS = 4
"""Where so many more steps of the same gain would not reach the limit, tuning gives up."""


def generate_neighbours(
    scenario: Scenario, deployment: Deployment, max_running: float = math.inf
) -> Iterator[Deployment]:
    """Generate `deployment` with one engine argument moved to the next value of its ladder.

    Arguments that the scenario sets stay. More of the GPU's memory than the engine takes by
    itself is no neighbour. Values of max_num_seqs above `max_running`, the most requests that run
    at once, change no latency and are skipped; what is served at most they do change.
    """
    args, given = deployment.args, scenario.engine_args
    if "max_num_seqs" not in given:
        limit = min(NUM_SEQS_LADDER[-1], args.max_num_batched_tokens)
        above = [each for each in NUM_SEQS_LADDER if args.max_num_seqs < each <= limit]
        below = [each for each in NUM_SEQS_LADDER if each < min(args.max_num_seqs, max_running)]
        for seqs in (*above[:1], *below[-2:]):
            if seqs <= limit:
                yield from _keep_startable(deployment.with_args(max_num_seqs=seqs))
    if "max_num_batched_tokens" not in given:
        for tokens in _list_adjacent(BATCHED_TOKENS_VALUES, args.max_num_batched_tokens):
            yield from _resize_steps(scenario, deployment, tokens)
    if (adapters := scenario.workload.adapters) and "max_loras" not in given:
        for slots in _list_adjacent(LORA_SLOT_VALUES, args.max_loras):
            with suppress(PlannerError):
                changed = apply_engine_args(scenario, deployment, max_loras=min(slots, adapters))
                yield from _keep_startable(changed)
    if drafted := deployment.speculation:
        for k in (drafted.num_speculative_tokens - 1, drafted.num_speculative_tokens + 1):
            if 1 <= k <= MAX_DRAFT_TOKENS:
                fewer = replace(drafted, num_speculative_tokens=k)
                yield from _keep_startable(replace(deployment, speculation=fewer))


def _resize_steps(scenario: Scenario, deployment: Deployment, tokens: int) -> Iterator[Deployment]:
    """Change max_num_batched_tokens, and max_num_seqs only as far as memory then allows less."""
    args = deployment.args
    with suppress(PlannerError):
        changed = apply_engine_args(
            scenario, deployment, max_num_batched_tokens=tokens,
            gpu_memory_utilization=args.gpu_memory_utilization, max_loras=args.max_loras,
        )  # fmt: skip
        seqs = min(args.max_num_seqs, tokens)
        yield from _keep_startable(changed.with_args(max_num_seqs=seqs))


def _list_adjacent(ladder: Sequence[int], value: int) -> list[int]:
    """List the values of `ladder` next above and next below `value`."""
    below = [each for each in ladder if each < value]
    above = [each for each in ladder if each > value]
    return [*above[:1], *below[-1:]]


def _keep_startable(deployment: Deployment) -> Iterator[Deployment]:
    if get_memory_plan(deployment).can_start:
        yield deployment


def estimate_least_margin(scenario: Scenario, deployment: Deployment, z: float) -> float:
    """Estimate the margin at `z` that no engine argument improves on, from the targets of TTFT.

    No prompt takes less time than alone, without a wait, in the largest steps.
    """
    load, shares = get_candidate_workload(scenario, deployment), [0.0]
    targets = [target for target in scenario.slo_targets if target.metric == "ttft"]
    if not targets or load.uses_trace_prefixes:
        return 0.0
    most = max(deployment.args.max_num_batched_tokens, BATCHED_TOKENS_VALUES[-1])
    step = build_step_model(deployment.with_args(max_num_batched_tokens=most), load)
    for target in targets:
        percent = target.percentile.removeprefix("p")
        is_mean = target.percentile == "mean"
        tokens = load.prompt.mean if is_mean else load.prompt.compute_quantile(int(percent) / 100)
        cached = int(min(load.prefix_tokens or load.prefix_hit_rate * tokens, tokens - 1))
        alone_s = step.estimate_prompt(int(tokens) - cached, cached).seconds / step.stages
        slower = math.exp(step.sigma_tpot * z) * compute_error_factor(step, target, z)
        shares.append(alone_s * slower / target.seconds)
    return max(shares)


def tune_to_margin(
    store: EvaluationStore, deployment: Deployment, z: float, goal: float = 1.0
) -> Deployment:
    """Move arguments along their ladders until the margin at `z` is at most `goal`, or no step helps.

    Of all neighbours the best is taken, so that no neighbour of the result is nearer to its limits.
    Where that ends close to them, what lies between the values of a ladder is tried too.
    """
    best, margin, is_between = deployment, store.get_margin(deployment, z), False
    while margin > goal:
        neighbours = (
            list(_generate_between(store.scenario, best))
            if is_between
            else list(generate_neighbours(store.scenario, best, store.get_max_running(best)))
        )
        margins = store.get_margins(neighbours, z)
        nearest = min(margins, default=math.inf)
        if (margin - nearest) * MAX_TUNING_STEPS >= margin - goal:
            best, margin = neighbours[margins.index(nearest)], nearest
        elif is_between or margin > goal * NEAR_MARGIN:
            break
        else:
            is_between = True
    return best


def _generate_between(scenario: Scenario, deployment: Deployment) -> Iterator[Deployment]:
    """Generate `deployment` with a max_num_seqs halfway to the values of its ladder beside it."""
    seqs = deployment.args.max_num_seqs
    if "max_num_seqs" not in scenario.engine_args:
        halfway = {round(math.sqrt(seqs * each)) for each in _list_adjacent(NUM_SEQS_LADDER, seqs)}
        for value in sorted(halfway - {seqs}):
            yield from _keep_startable(deployment.with_args(max_num_seqs=value))


def tune_to_probability(
    store: EvaluationStore, deployment: Deployment, *others: Deployment
) -> Deployment:
    """Move arguments along their ladders for as long as a neighbour is safer, or as safe and better.

    So no neighbour is clearly safer than the result, and none dominates it. `others` are looked at
    as neighbours of `deployment` are.
    """

    def find(one: Deployment) -> float:
        return store.find_probability(one, SAFE_ENOUGH_SIGMAS)

    best, probability = deployment, find(deployment)
    enough = compute_probability(SAFE_ENOUGH_SIGMAS)
    seen = {best}
    pending = [*others, *generate_neighbours(store.scenario, best)]
    while pending:
        tried = pending.pop(0)
        if tried in seen:
            continue
        seen.add(tried)
        # no limit alone is kept less probably than all together: one simulation refutes most
        if not store.is_met(tried, min(compute_tolerance(probability), SAFE_ENOUGH_SIGMAS)):
            continue
        gain = find(tried) - probability
        is_safer = probability < enough and gain >= min(PROBABILITY_TIE, enough - probability)
        if is_safer or (gain > -PROBABILITY_TIE / 2 and store.dominates(tried, best)):
            best, probability = tried, max(probability, find(tried))
            pending = list(generate_neighbours(store.scenario, best))
    return best
