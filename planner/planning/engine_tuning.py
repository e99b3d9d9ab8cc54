"""Engine arguments that change the bill: what a search tries of each, where the scenario leaves it open."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from planner.core.errors import PlannerError
from planner.engines.deployment import Deployment
from planner.engines.engine_args import resolve_engine_args
from planner.memory.memory_plan import find_safe_memory_utilization, get_memory_plan
from planner.planning.deployment_builder import set_max_num_seqs
from planner.planning.scenario import Scenario

BATCHED_TOKENS_VALUES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Values of max_num_batched_tokens: short chunks keep steps short, long ones serve more prompts."""
NUM_SEQS_FRACTIONS = (0.6, 0.35, 0.2, 0.1)
"""Shares of max_num_seqs: where more wait, those that run are faster."""
LORA_SLOT_VALUES = (1, 4, 16, 64, 256, 1024)
"""Values of max_loras where adapters are asked for: more of them in a step, and less memory for the KV cache."""
SCREENING_TOKENS_VALUES = BATCHED_TOKENS_VALUES[1::2]
"""The same for a first look at very many deployments."""
MIN_UTILIZATION_GAIN = 0.01
"""Less of a GPU's memory is not worth another gpu_memory_utilization."""


def generate_variants(
    scenario: Scenario,
    usual: Deployment,
    tokens: tuple[int, ...] = BATCHED_TOKENS_VALUES,
    *,
    is_underused: bool = False,
) -> Iterator[Deployment]:
    """`usual` with every other combination of its engine's arguments; with smaller batches, and with fewer drafts.

    `is_underused`: its memory and its slots are mostly empty, so that neither is tried in another size.
    """
    is_underused = (
        is_underused and scenario.workload.trace is None
    )  # of whose blocks a larger pool keeps more
    args, given = usual.args, scenario.engine_args
    sizes, shares, seqs = (
        [args.max_num_batched_tokens],
        [args.gpu_memory_utilization],
        args.max_num_seqs,
    )
    if "max_num_batched_tokens" not in given:
        sizes += [size for size in tokens if size != sizes[0]]
    if (
        not is_underused
        and "gpu_memory_utilization" not in given
        and (most := find_safe_memory_utilization(usual)) >= shares[0] + MIN_UTILIZATION_GAIN
    ):
        shares.append(most)
    changes = [
        {"max_num_batched_tokens": size, "gpu_memory_utilization": share}
        for size, share in product(sizes, shares)
    ]
    if (adapters := scenario.workload.adapters) and "max_loras" not in given:
        slots = {min(many, adapters) for many in LORA_SLOT_VALUES} - {args.max_loras}
        changes += [{"max_loras": many} for many in sorted(slots)]
    for knobs in changes[1:]:
        with suppress(
            PlannerError
        ):  # the engine has rules of its own for how its arguments go together
            if get_memory_plan(changed := apply_engine_args(scenario, usual, **knobs)).can_start:
                yield changed
    if not get_memory_plan(usual).can_start:
        return
    if not is_underused and "max_num_seqs" not in given and scenario.slo_targets:
        yield from (
            usual.with_args(max_num_seqs=fewer)
            for share in NUM_SEQS_FRACTIONS
            if (fewer := int(seqs * share))
        )
    if drafted := usual.speculation:
        fewer_drafts = (
            replace(drafted, num_speculative_tokens=k) for k in range(1, usual.num_draft_tokens)
        )
        yield from (replace(usual, speculation=fewer) for fewer in fewer_drafts)


def apply_engine_args(scenario: Scenario, usual: Deployment, **knobs: float) -> Deployment:
    """`usual` started with other arguments, and the max_num_seqs that go with them; `PlannerError` where it refuses."""
    args = usual.args
    given: dict[str, Any] = {
        name: getattr(args, name) for name in ("max_model_len", "kv_cache_dtype", "max_loras")
    }
    given |= scenario.engine_args
    resolved = resolve_engine_args({**given, **knobs}, usual.engine, usual.gpu, usual.model)
    return set_max_num_seqs(scenario, replace(usual, args=resolved))
