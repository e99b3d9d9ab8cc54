"""Engine arguments that a search tries, as far as the scenario leaves them open."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.engines.engine_args import resolve_engine_args
from planner.memory.memory_plan import get_memory_plan
from planner.planning.candidate import PROBABILITY_TIE
from planner.planning.deployment_builder import set_max_num_seqs
from planner.planning.evaluation import estimate_limits, get_candidate_workload
from planner.planning.memory_odds import list_memory_utilizations
from planner.planning.prediction import evaluate
from planner.planning.scenario import Scenario
from planner.planning.slo import compute_probability, compute_tolerance
from planner.planning.tolerance import EvaluationStore

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
MIN_ROOM_GAIN = 1.25
"""So many times the KV cache is worth a search with more of the GPU's memory from the start."""


def generate_startable(scenario: Scenario, usual: Deployment) -> Iterator[Deployment]:
    """Generate `usual` if it starts, then with what takes less memory or gets more of it."""
    yield from _keep_startable(usual)
    args, given = usual.args, scenario.engine_args
    changes: list[dict[str, float]] = []
    if "max_num_batched_tokens" not in given:
        fewer = [each for each in BATCHED_TOKENS_VALUES if each < args.max_num_batched_tokens]
        changes += [{"max_num_batched_tokens": size} for size in reversed(fewer)]
    if "gpu_memory_utilization" not in given:
        shares = list_memory_utilizations(usual)
        changes += [{"gpu_memory_utilization": share} for share in shares if share > 0]
    if scenario.workload.adapters and "max_loras" not in given:
        changes += [{"max_loras": slots} for slots in (16, 4, 1)]
    for change in changes:
        changed_args = {"gpu_memory_utilization": args.gpu_memory_utilization, **change}
        with suppress(PlannerError):  # engines have rules for how their arguments go together
            yield from _keep_startable(apply_engine_args(scenario, usual, **changed_args))


def generate_roomier(scenario: Scenario, usual: Deployment) -> Iterator[Deployment]:
    """Generate `usual` with the largest share of the memory that lasts, where its weights leave little else."""
    lasting, args = list_memory_utilizations(usual)[0], usual.args
    is_larger = lasting >= args.gpu_memory_utilization + MIN_UTILIZATION_GAIN
    if is_larger and "gpu_memory_utilization" not in scenario.engine_args:
        with suppress(PlannerError):
            changed = apply_engine_args(
                scenario, usual, gpu_memory_utilization=lasting,
                max_num_batched_tokens=args.max_num_batched_tokens, max_loras=args.max_loras,
            )  # fmt: skip
            pools = [get_memory_plan(each).pool.num_blocks for each in (usual, changed)]
            if pools[1] >= MIN_ROOM_GAIN * pools[0]:
                yield from _keep_startable(changed)


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
TUNED_ARGUMENTS = (
    "all", "gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs", "max_loras",
    "kv_offloading_size", "speculation",
)  # fmt: skip
"""What neighbours differ in: all of it, then each."""
SAFE_ENOUGH_SIGMAS = 2.0
"""Beyond two standard deviations (98%) nothing is safer."""
HOPELESS_MARGIN = 2.0
"""So far beyond a limit hardly any other argument makes up for it."""
MAX_TUNING_STEPS = 6
"""Where so many more steps that gain as many times would not reach the limit, tuning gives up."""


def generate_neighbours(
    scenario: Scenario, deployment: Deployment, max_running: float = math.inf
) -> Iterator[Deployment]:
    """Generate `deployment` with one engine argument moved to the next value of its ladder.

    Arguments that the scenario sets stay. More of the GPU's memory than the engine takes by itself
    is a neighbour only where memory limits the requests. Values of max_num_seqs above `max_running`,
    the most requests that run at once, change no latency and are skipped; what is served at most they
    do change.
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
    kept = {"gpu_memory_utilization": args.gpu_memory_utilization, "max_loras": args.max_loras}
    changes: list[dict[str, float]] = []
    if (adapters := scenario.workload.adapters) and "max_loras" not in given:
        slot_counts = _list_adjacent(LORA_SLOT_VALUES, args.max_loras)
        changes += [{"max_loras": min(slots, adapters)} for slots in slot_counts]
    held = get_memory_plan(deployment).pool.count_sequences(
        round(scenario.workload.mean_tokens_per_request)
    )
    if "gpu_memory_utilization" not in given and held <= max_running:
        lasting = list_memory_utilizations(deployment)[0]
        if lasting >= args.gpu_memory_utilization + MIN_UTILIZATION_GAIN:
            changes += [{"gpu_memory_utilization": lasting}]
    if scenario.workload.uses_trace_prefixes and "kv_offloading_size" not in given:
        host_gib = scenario.host_memory_gib * deployment.layout.tp * deployment.layout.pp
        if host_gib and not args.kv_offloading_size:
            changes += [{"kv_offloading_size": host_gib}]
    for change in changes:
        with suppress(PlannerError):  # engines have rules for how their arguments go together
            yield from _keep_startable(apply_engine_args(scenario, deployment, **(kept | change)))
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


def tune_to_margin(store: EvaluationStore, deployment: Deployment, z: float) -> Deployment:
    """Move arguments along their ladders until every limit is kept at `z`, or no step helps.

    The slots are balanced first where all are taken, or where it is far from its limits; else last.
    """
    best = deployment
    while (margin := store.get_margin(best, z)) > 1:
        is_full = store.get_max_running(best) >= best.args.max_num_seqs
        moves = (_take_best_step, _balance_slots)
        for move in reversed(moves) if is_full or margin > HOPELESS_MARGIN else moves:
            tried = move(store, best, z)
            if store.get_margin(tried, z) <= margin ** (1 - 1 / MAX_TUNING_STEPS):
                best = tried
                break
        else:
            return best
    return best


def _take_best_step(store: EvaluationStore, best: Deployment, z: float) -> Deployment:
    """Take the step of another argument than the slots that comes nearest to the limits."""
    if store.get_margin(best, z) > HOPELESS_MARGIN:
        return best
    target, seqs = store.get_tightest_target(best, z), best.args.max_num_seqs
    neighbours = [
        each
        for each in generate_neighbours(store.scenario, best, store.get_max_running(best))
        if each.with_args(max_num_seqs=seqs) != best  # no step of the slots alone
        if not (target and not target.waits and _change_step(best, each) > 0)
    ]
    margins = store.get_margins(neighbours, z)
    return neighbours[margins.index(min(margins))] if neighbours else best


def _change_step(now: Deployment, then: Deployment) -> int:
    """By how many tokens a step becomes longer."""
    return then.args.max_num_batched_tokens - now.args.max_num_batched_tokens


def _may_keep_pace(scenario: Scenario, single: Deployment, z: float, limit: str) -> bool:
    """Tell whether the closed form of one request at a time, whose steps nothing disturbs, keeps a limit."""
    prediction = evaluate(single, get_candidate_workload(scenario, single))
    if prediction.performance is None:
        return False
    limits = {each.name: each for each in estimate_limits(scenario, prediction)}
    return limit not in limits or limits[limit].tolerance_sigmas >= z


def _balance_slots(store: EvaluationStore, deployment: Deployment, z: float) -> Deployment:
    """Bisect max_num_seqs: more slots make every token slower, and waits for a slot shorter."""
    args, target = deployment.args, store.get_tightest_target(deployment, z)
    running, best = store.get_max_running(deployment), deployment
    if "max_num_seqs" in store.scenario.engine_args:
        return best
    if target and not target.waits:
        values = [each for each in NUM_SEQS_LADDER if each < min(args.max_num_seqs, running)]
        if not _may_keep_pace(store.scenario, deployment.with_args(max_num_seqs=1), z, target.name):
            return best
    elif running < args.max_num_seqs and target:
        return best
    else:
        values = [
            each
            for each in NUM_SEQS_LADDER
            if args.max_num_seqs < each <= args.max_num_batched_tokens
        ]
    low, high = 0, len(values)
    while low < high and store.get_margin(best, z) > 1:
        middle = (low + high) // 2
        tried = deployment.with_args(max_num_seqs=values[middle])
        if store.get_margin(tried, z) < store.get_margin(best, z):
            best = tried
        target = store.get_tightest_target(tried, z)
        has_queue = store.get_max_running(tried) >= values[middle]
        if target and not (target.waits and has_queue):
            high = middle
        else:
            low = middle + 1
    return best


def tune_to_probability(
    store: EvaluationStore, deployment: Deployment, usual: Deployment, asked: float
) -> Deployment:
    """Move arguments as long as the probability gains by it, and back where it does not need them.

    No neighbour of the result is clearly safer; each argument that is not that of `usual` makes it
    so, or as probable as `asked`.
    """

    def find(one: Deployment) -> float:
        return store.find_probability(one, SAFE_ENOUGH_SIGMAS)

    best, probability, seen = deployment, find(deployment), {deployment}
    pending = list(generate_neighbours(store.scenario, best, store.get_max_running(best)))
    while pending:
        tried, wanted = pending.pop(0), probability + PROBABILITY_TIE
        # no limit alone is kept less probably than all together: one simulation refutes most
        if wanted > compute_probability(SAFE_ENOUGH_SIGMAS) or tried in seen:
            continue
        seen.add(tried)
        if store.is_met(tried, compute_tolerance(wanted)) and find(tried) >= wanted:
            best, probability = tried, find(tried)
            pending = list(generate_neighbours(store.scenario, best, store.get_max_running(best)))
    least = probability - PROBABILITY_TIE
    if probability >= asked or store.is_met(best, compute_tolerance(asked)):
        least = max(least, min(asked, probability))
    z = min(compute_tolerance(least), SAFE_ENOUGH_SIGMAS)
    for name in TUNED_ARGUMENTS:
        for restored in _keep_startable(_restore(usual, name, best)):
            if restored != best and store.is_met(restored, z) and find(restored) >= least:
                best = restored
    return best


def _restore(usual: Deployment, name: str, deployment: Deployment) -> Deployment:
    """Give an argument of `deployment`, or its drafts, the value that it has in `usual`."""
    if name == "all":
        return usual
    if name == "speculation":
        return replace(deployment, speculation=usual.speculation)
    value, args = getattr(usual.args, name), deployment.args
    if name == "max_num_seqs":
        value = min(value, args.max_num_batched_tokens)
    return deployment.with_args(**{name: value})
