"""What would change the answer: the same search with one thing different."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from planner.core.errors import PlannerError
from planner.hardware.gpus import get_gpu
from planner.hardware.prices import look_up_gpu_price
from planner.memory.memory_plan import get_memory_plan
from planner.planning.candidate import Candidate
from planner.planning.evaluation import evaluate_candidates
from planner.planning.scenario import CandidateGpu, Scenario
from planner.planning.search import Plan, search_deployments
from planner.planning.search_space import RejectedOption, SearchOption, generate_search_options
from planner.planning.slo import SloTarget
from planner.planning.verification import may_be_feasible

SUGGESTED_GPUS = (
    "L40S",
    "A100-SXM-80GB",
    "H100-SXM",
    "H200-SXM",
    "B200",
    "MI300X",
    "RTX-PRO-6000-Server",
)
"""GPUs that are asked about where the scenario doesn't name them: what clouds offer most."""
FALLBACK_MAX_GPUS = 64
"""GPUs that are asked about, at least, where nothing fits on those allowed."""
MAX_SUGGESTED_GPUS_SEARCHED = 2
"""Of the other GPUs so many are searched: those that serve most for their money, in closed form."""
CROWDED_KV_USAGE = 0.5
"""Use of the KV pool (p99) above which a smaller KV cache could change the answer."""


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


def run_what_ifs(plan: Plan) -> tuple[WhatIf, ...]:
    """Every change of `changes` with what it leads to; where nothing met the service level, only those that help."""
    rows = []
    for change, scenario in propose_changes(plan):
        try:
            rows.append(WhatIf(change, search_deployments(scenario)))
        except PlannerError:  # such as a format that this model cannot take
            continue
    return tuple(item for item in rows if plan.chosen or item.plan.chosen)


def propose_changes(plan: Plan) -> Iterator[tuple[str, Scenario]]:
    """(what is different, the scenario with it), for the changes that could matter to `plan`.

    Where there is an answer, what can only make it cheaper is asked for no more money than it
    costs.
    """
    yield from _propose_cheaper_changes(plan) if plan.chosen else _propose_enabling_changes(plan)


def _propose_cheaper_changes(plan: Plan) -> Iterator[tuple[str, Scenario]]:
    """What would move the answer: its traffic, its limits, its formats, another GPU."""
    scenario, chosen = plan.scenario, plan.chosen
    assert chosen is not None
    replicas, first = chosen.deployment.layout.replicas, scenario.quantizations
    cheaper = limit_to_budget(scenario, chosen, 1.0)
    yield "twice the traffic", limit_to_budget(_scale_rate(scenario, 2.0), chosen, 2 + 1 / replicas)
    if chosen.deployment.layout.num_gpus > 1:
        if replicas == 1:  # else it takes about half of them
            yield "half the traffic", _scale_rate(cheaper, 0.5)
        for promise in scenario.slo_targets:
            yield f"{promise.name} a quarter longer", _relax_targets(cheaper, 1.25, promise)
        if scenario.slo_targets:
            yield "every limit twice as long", _relax_targets(cheaper, 2.0)
    if "fp8" not in scenario.quantizations:
        yield "FP8 weights allowed", replace(cheaper, quantizations=(*first, "fp8"))
    elif None in first and chosen.preference_key[0] != first.index(None):
        yield "only the checkpoint's own weights", replace(scenario, quantizations=(None,))
    performance = chosen.prediction.performance
    if (
        "fp8" not in scenario.kv_cache_dtypes
        and performance
        and performance.kv_usage_p99 > CROWDED_KV_USAGE
    ):
        yield (
            "FP8 KV cache allowed",
            replace(cheaper, kv_cache_dtypes=(*scenario.kv_cache_dtypes, "fp8")),
        )
    if scenario.speculation and not scenario.speculation.allowed:
        yield "speculative decoding allowed", _enable_speculation(cheaper)
    if other := _select_promising_gpus(limit_to_budget(_use_other_gpus(scenario), chosen, 1.0)):
        yield f"{_describe_gpus(other)} instead, for no more money", other


def _propose_enabling_changes(plan: Plan) -> Iterator[tuple[str, Scenario]]:
    """What might help a scenario that nothing meets."""
    scenario = plan.scenario
    more = tuple(
        replace(candidate, max_gpus=max(FALLBACK_MAX_GPUS, 4 * candidate.max_gpus))
        for candidate in scenario.gpus
    )
    tried = [(f"up to {more[0].max_gpus} GPUs", replace(scenario, gpus=more))]
    tight = {
        **scenario.engine_args,
        "max_model_len": int(scenario.workload.compute_total_tokens_quantile(0.95)),
    }
    if plan.best is None:
        tried += [
            ("no room above the p95 of prompt + output", replace(scenario, engine_args=tight))
        ]
    else:
        tried += [("half the traffic", _scale_rate(scenario, 0.5))]
    if scenario.slo_targets and plan.best:
        tried += [("every limit twice as long", _relax_targets(scenario, 2.0))]
    for name, text in (("fp8", "FP8 weights allowed"), ("awq", "4-bit weights (AWQ) allowed")):
        if name not in scenario.quantizations:
            tried += [(text, replace(scenario, quantizations=(*scenario.quantizations, name)))]
    if "fp8" not in scenario.kv_cache_dtypes:
        tried += [
            (
                "FP8 KV cache allowed",
                replace(scenario, kv_cache_dtypes=(*scenario.kv_cache_dtypes, "fp8")),
            )
        ]
    if scenario.speculation and not scenario.speculation.allowed:
        tried += [("speculative decoding allowed", _enable_speculation(scenario))]
    yield from (
        (sentence, changed) for sentence, changed in tried if _select_promising_gpus(changed)
    )
    if other := _select_promising_gpus(_use_other_gpus(scenario)):
        yield f"{_describe_gpus(other)} instead", other


def _scale_rate(scenario: Scenario, factor: float) -> Scenario:
    return replace(scenario, workload=scenario.workload.scale(factor))


def _relax_targets(scenario: Scenario, factor: float, only: SloTarget | None = None) -> Scenario:
    """With `factor` times each limit, or that of one promise."""
    level = tuple(
        replace(target, seconds=target.seconds * factor) if only in (None, target) else target
        for target in scenario.slo_targets
    )
    return replace(scenario, slo_targets=level)


def _enable_speculation(scenario: Scenario) -> Scenario:
    assert scenario.speculation is not None
    return replace(scenario, speculation=scenario.speculation.model_copy(update={"allowed": True}))


def _use_other_gpus(scenario: Scenario) -> Scenario:
    """On the GPUs that it does not name."""
    gpus, most = (
        [candidate.gpu for candidate in scenario.gpus],
        max(FALLBACK_MAX_GPUS, *(c.max_gpus for c in scenario.gpus)),
    )
    return replace(
        scenario,
        gpus=tuple(
            CandidateGpu(gpu, most) for gpu in map(get_gpu, SUGGESTED_GPUS) if gpu not in gpus
        ),
    )


def _describe_gpus(scenario: Scenario) -> str:
    return " or ".join(candidate.gpu.name for candidate in scenario.gpus)


def limit_to_budget(scenario: Scenario, chosen: Candidate, times: float) -> Scenario:
    """`scenario` with no more GPUs of a kind than `times` the price of `chosen` buys (without prices: its GPUs)."""
    cards = []
    for candidate_gpu in scenario.gpus:
        price = look_up_gpu_price(candidate_gpu.gpu, scenario.prices)
        usd, gpus = chosen.usd_per_hour, chosen.prediction.num_gpus_billed
        most = int(times * (usd / price.median_usd if usd and price else gpus) + 1e-6)
        cards += (
            [replace(candidate_gpu, max_gpus=min(candidate_gpu.max_gpus, most))] if most else []
        )
    return replace(scenario, gpus=tuple(cards))


def _select_promising_gpus(scenario: Scenario) -> Scenario | None:
    """`scenario` with the GPUs on which the closed form gives it hope, best served for the money; None where none."""
    worth = {}
    for candidate_gpu in scenario.gpus:
        hopeful = [
            candidate
            for candidate in _evaluate_all_layouts(scenario, candidate_gpu)
            if may_be_feasible(scenario, candidate)
        ]
        served = [(c.prediction.performance, c.cost_key) for c in hopeful]
        rates = [
            (not cost[0], performance.capacity.mid / cost[1])
            for performance, cost in served
            if performance and performance.capacity
        ]
        if rates:
            worth[candidate_gpu] = max(rates)
    best = sorted(worth, key=lambda card: worth[card], reverse=True)[:MAX_SUGGESTED_GPUS_SEARCHED]
    return replace(scenario, gpus=tuple(best)) if best else None


def _evaluate_all_layouts(scenario: Scenario, candidate_gpu: CandidateGpu) -> list[Candidate]:
    """As many replicas as may be of every layout in up to two nodes, in closed form."""
    most = 2 * (candidate_gpu.max_machine_gpus)
    cases: list[SearchOption | RejectedOption] = []
    one = replace(
        scenario,
        gpus=(candidate_gpu,),
        kv_cache_dtypes=scenario.kv_cache_dtypes[-1:],
        speculation=None,
    )
    for quantization in scenario.quantizations:
        with suppress(PlannerError):  # a format that this model cannot take
            cases += generate_search_options(
                replace(one, quantizations=(quantization,)),
                lambda _, layout: layout.num_gpus <= most,
            )
    legal = [case for case in cases if not isinstance(case, RejectedOption)]
    return evaluate_candidates(
        scenario, [case for case in legal if get_memory_plan(case[0]).can_start]
    )
