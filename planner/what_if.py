"""What would change the answer: the same search with one thing different."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.hardware import gpu
from planner.quantities import PlannerError
from planner.scenario import CandidateGpu, Scenario
from planner.search import Plan, search

OTHER_GPUS = ("L40S", "A100-SXM-80GB", "H100-SXM", "H200-SXM", "B200", "MI300X", "RTX-PRO-6000-Server")
"""GPUs that are asked about where the scenario doesn't name them: what clouds offer most."""
MANY = 64
"""GPUs that are asked about, at least, where nothing fits on those allowed."""


@dataclass(frozen=True)
class WhatIf:
    """The plan after one change."""

    change: str
    plan: Plan

    @property
    def answer(self) -> str:
        """The chosen deployment after the change, with its price, or that there is none."""
        return str(self.plan.chosen) if self.plan.chosen else "nothing meets the service level"

    def __str__(self) -> str:
        return f"{self.change}: {self.answer}"


def what_if(plan: Plan) -> tuple[WhatIf, ...]:
    """Every change of `changes` with what it leads to; where nothing met the service level, only those that help."""
    found = []
    for change, scenario in changes(plan.scenario, stuck=plan.chosen is None):
        try:
            found.append(WhatIf(change, search(scenario)))
        except PlannerError:  # such as a format that this model cannot take
            continue
    return tuple(item for item in found if plan.chosen or item.plan.chosen)


def changes(scenario: Scenario, stuck: bool = False) -> Iterator[tuple[str, Scenario]]:
    """(what is different, the scenario with it); `stuck`: what might help one that nothing meets."""

    def rate(factor: float) -> Scenario:
        return replace(scenario, workload=replace(scenario.workload, rate=(scenario.workload.rate or 0) * factor))

    def limits(factor: float) -> Scenario:
        level = tuple(replace(target, seconds=target.seconds * factor) for target in scenario.service_level)
        return replace(scenario, service_level=level)

    if stuck:
        more = tuple(replace(candidate, at_most=max(MANY, 4 * candidate.at_most)) for candidate in scenario.gpus)
        yield f"up to {more[0].at_most} GPUs", replace(scenario, gpus=more)
        tight = {**scenario.engine_args, "max_model_len": int(scenario.workload.total_quantile(0.95))}
        yield "no room above the p95 of prompt + output", replace(scenario, engine_args=tight)
    else:
        yield "twice the traffic", rate(2.0)
    yield "half the traffic", rate(0.5)
    if scenario.service_level:
        yield "every limit twice as long", limits(2.0)
        if not stuck:
            yield "every limit a quarter shorter", limits(0.75)
    if "fp8" not in scenario.quantizations:
        yield "FP8 weights allowed", replace(scenario, quantizations=(*scenario.quantizations, "fp8"))
    elif not stuck:
        yield "only the checkpoint's own weights", replace(scenario, quantizations=(None,))
    if stuck and "awq" not in scenario.quantizations:
        yield "4-bit weights (AWQ) allowed", replace(scenario, quantizations=(*scenario.quantizations, "awq"))
    if "fp8" not in scenario.kv_cache_dtypes:
        yield "FP8 KV cache allowed", replace(scenario, kv_cache_dtypes=(*scenario.kv_cache_dtypes, "fp8"))
    if scenario.speculation and not scenario.speculation.allowed:
        allowed = scenario.speculation.model_copy(update={"allowed": True})
        yield "speculative decoding allowed", replace(scenario, speculation=allowed)
    most = max(MANY if stuck else 0, *(candidate.at_most for candidate in scenario.gpus))
    for name in OTHER_GPUS:
        if gpu(name) not in [candidate.gpu for candidate in scenario.gpus]:
            yield f"{name} instead", replace(scenario, gpus=(CandidateGpu(gpu(name), most),))
