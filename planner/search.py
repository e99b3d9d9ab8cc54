"""Which deployment to choose: every legal candidate, evaluated; the cheapest that meets the service level.

Candidates are ranked in closed form; those at the top are replayed (`planner.confirm`), and one that fails there counts
as missing its target. The rule, in this order: it meets every target at the middle of its interval; it costs least per
hour (GPUs, where no price is known); it meets them at the pessimistic end too; it changes the model least (formats in
the scenario's order, no speculation); it has the fewest pipeline stages, then the largest margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

from planner.advice import safe_max_num_seqs
from planner.candidate import Candidate, describe, judge, judge_all
from planner.confirm import confirm, replayed
from planner.deployment import Deployment, deploy_on
from planner.engines import Engine, release
from planner.hardware import Gpu
from planner.models import model
from planner.parallelism import legal_layouts
from planner.predict import evaluate, memory_of
from planner.prices import price_per_hour
from planner.quantities import PlannerError
from planner.scenario import Scenario
from planner.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

LENGTH_STEP = 256
"""max_model_len is rounded up to a multiple of this."""
SEQS_STEP = 8
"""max_num_seqs is a multiple of this: CUDA graphs are captured at such batch sizes."""
MAX_SEQS = 1024
"""The largest max_num_seqs tried: vLLM's own default on its largest GPUs."""


@dataclass(frozen=True)
class Rejection:
    """A layout that was not evaluated, and why; `bottleneck` is "memory", "engine" or "cost"."""

    what: str
    gpu: str
    gpus: int  # of one replica
    reason: str
    bottleneck: str


@dataclass(frozen=True)
class Binding:
    """What keeps anything cheaper from doing: a target such as "p95 TPOT", "rate", "memory", or "one GPU"."""

    constraint: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Plan:
    """The answer to a scenario."""

    scenario: Scenario
    chosen: Candidate | None
    runner_up: Candidate | None  # the best with another GPU or layout
    safer: Candidate | None  # the cheapest that holds at the pessimistic end, where the chosen one is at risk
    binding: Binding
    candidates: tuple[Candidate, ...]  # from best to worst
    rejected: tuple[Rejection, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> Candidate | None:
        """The chosen candidate, else the one that comes nearest to the service level; None where nothing fits."""
        return self.chosen or min(self.candidates, key=lambda candidate: candidate.margin, default=None)

    def frame(self) -> pd.DataFrame:
        """One row per candidate, from best to worst."""
        import pandas as pd

        return pd.DataFrame([candidate.row() for candidate in self.candidates])

    def __str__(self) -> str:
        if self.chosen is None:
            return f"{self.scenario.name}: nothing meets the service level. {self.binding}"
        after = f" Next best: {self.runner_up}." if self.runner_up else ""
        return f"{self.scenario.name}: {self.chosen}. {self.binding}{after}"


def context_length(workload: Workload, buffer: float, limit: int) -> int:
    """The max_model_len to serve `workload` with: p99 of prompt + output plus `buffer`, rounded up, at most `limit`."""
    wanted = workload.total_quantile(0.99) * (1 + buffer)
    return min(math.ceil(wanted / LENGTH_STEP) * LENGTH_STEP, limit)


def search(scenario: Scenario) -> Plan:
    """Evaluate every legal candidate of `scenario` and choose by the rule above."""
    candidates: list[Candidate] = []
    rejected: list[Rejection] = []
    cheapest = math.inf
    for _, group in groupby(sorted(_options(scenario), key=lambda option: option.gpus), lambda option: option.gpus):
        tried: list[_Option] = []
        for option in group:
            refused = option if isinstance(option, Rejection) else _refused(scenario, option, cheapest)
            if isinstance(refused, Rejection):
                rejected.append(refused)
            elif isinstance(option, _Option):
                tried.append(replace(option, deployment=fill_batch(scenario, option.deployment)))
        for found in _sized(scenario, tried):
            candidates.append(found)
            if found.meets and found.usd_per_hour is not None:
                cheapest = min(cheapest, found.usd_per_hour)
    candidates.sort(key=lambda candidate: candidate.rank)
    meeting = [candidate for candidate in candidates if candidate.meets]
    if not meeting:
        return Plan(scenario, None, None, None, _nothing(candidates, rejected), tuple(candidates), tuple(rejected), ())
    confirmed = confirm(scenario, meeting)
    looked_at = {c.deployment for c in (*confirmed.holding, *confirmed.failing)}
    rest = [c for c in candidates if c.deployment not in looked_at]
    if not confirmed.holding:
        candidates = sorted((*rest, *confirmed.failing), key=lambda candidate: candidate.rank)
        return Plan(scenario, None, None, None, _nothing(candidates, rejected), tuple(candidates), tuple(rejected), ())
    best = confirmed.holding[0]
    chosen = _batch_within(scenario, best)
    if chosen is not best and not replayed(scenario, chosen).meets:
        chosen = best
    runner_up, safer = confirmed.other(chosen), confirmed.safe if chosen.at_risk else None
    after = sorted((*rest, *confirmed.holding[1:], *confirmed.failing), key=lambda candidate: candidate.rank)
    candidates = [chosen, *after]
    binding = _binding(scenario, chosen, candidates, rejected)
    notes = _notes(scenario, chosen, candidates)
    return Plan(scenario, chosen, runner_up, safer, binding, tuple(candidates), tuple(rejected), notes)


@dataclass(frozen=True)
class _Option:
    """One replica of a legal deployment, before its replicas are counted."""

    deployment: Deployment
    at_most: int  # GPUs
    preference: tuple[int, ...]

    @property
    def gpus(self) -> int:
        return self.deployment.layout.gpus_per_replica


def _options(scenario: Scenario) -> Iterator[_Option | Rejection]:
    """Every combination of GPU, formats, speculation and layout that the scenario allows and the engine accepts."""
    given = scenario.speculation
    speculations = [None, given.load()] if given and given.allowed else [None]
    for wanted, (q, quantization) in product(scenario.gpus, enumerate(scenario.quantizations)):
        card, served = wanted.gpu, model(scenario.model, quantization=quantization)
        if unsupported := _unsupported(scenario.engine, card):
            yield Rejection(str(scenario.engine), card.name, 1, unsupported, "engine")
            continue
        length = context_length(scenario.workload, scenario.context_buffer, served.architecture.max_position)
        args: dict[str, Any] = {"max_model_len": length, **scenario.engine_args}
        layouts = legal_layouts(served, card, wanted.at_most, wanted.gpus_per_node, scenario.engine)
        kinds = product(layouts, enumerate(scenario.kv_cache_dtypes), enumerate(speculations))
        for layout, (k, kv_cache_dtype), (s, speculation) in kinds:
            sizes: dict[str, Any] = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
            try:
                deployment = deploy_on(
                    served, card, **sizes, engine=scenario.engine, speculation=speculation,
                    interconnect=wanted.interconnect, gpus_per_node=wanted.gpus_per_node,
                    other_tenants=scenario.other_tenants, memory_calibration=scenario.memory_calibration,
                    **{"kv_cache_dtype": kv_cache_dtype, **args},
                )  # fmt: skip
            except PlannerError as error:
                yield Rejection(f"{layout}, {quantization}", card.name, layout.gpus, str(error), "engine")
            else:
                yield _Option(deployment, wanted.at_most, (q, k, s))


def _unsupported(engine: Engine, card: Gpu) -> str:
    """Why `engine` does not run on `card`, or nothing."""
    if engine.name not in card.supported:
        return f"{engine.name} does not run on {card.name}"
    since, until = card.supported[engine.name]
    if engine.release < release(since):
        return f"{engine.name} runs on {card.name} from {since} on, not in {engine.version}"
    return f"{engine.name} ran on {card.name} until {until}" if until and engine.release > release(until) else ""


def _refused(scenario: Scenario, option: _Option, cheapest: float) -> Rejection | None:
    """Why the option need not be evaluated, if so."""
    deployment, layout = option.deployment, option.deployment.layout
    price, what = price_per_hour(deployment.gpu, scenario.prices), describe(deployment)
    if layout.gpus > deployment.gpus_per_node and price and price.usd * layout.gpus > cheapest:
        return Rejection(what, deployment.gpu.name, option.gpus, "one replica costs more than the best plan", "cost")
    memory = memory_of(deployment)
    if not memory.starts:
        return Rejection(what, deployment.gpu.name, option.gpus, memory.reason, "memory")
    return None


def _sized(scenario: Scenario, options: list[_Option]) -> list[Candidate]:
    """Each option with the fewest replicas that meet the service level, or with all there may be where none do.

    All options are halved at once, so that every round is one evaluation of many.
    """

    def tried(replicas: dict[int, int]) -> dict[int, Candidate]:
        cases = [(options[k].deployment, count, options[k].preference) for k, count in replicas.items()]
        return dict(zip(replicas, judge_all(scenario, cases), strict=True))

    low = dict.fromkeys(range(len(options)), 0)
    high = {k: option.at_most // option.gpus for k, option in enumerate(options)}
    best = tried(high)
    while middle := {k: (low[k] + high[k]) // 2 for k in best if best[k].meets and high[k] - low[k] > 1}:
        for k, found in tried(middle).items():
            if found.meets:
                high[k], best[k] = middle[k], found
            else:
                low[k] = middle[k]
    return [best[k] for k in range(len(options))]


def fill_batch(scenario: Scenario, deployment: Deployment) -> Deployment:
    """`deployment` with the max_num_seqs that its KV pool holds in 95 % of moments, unless the scenario sets it."""
    if "max_num_seqs" in scenario.engine_args:
        return deployment
    held = safe_max_num_seqs(memory_of(deployment), scenario.workload)
    most = MAX_SEQS if scenario.offline else deployment.args.max_num_seqs or MAX_SEQS
    seqs = min(most, held // SEQS_STEP * SEQS_STEP or max(held, 1))
    return replace(deployment, args=replace(deployment.args, max_num_seqs=seqs))


def _batch_within(scenario: Scenario, candidate: Candidate) -> Candidate:
    """`candidate` with the largest max_num_seqs that rarely preempts and, when full, keeps the promised pace."""
    paces = [target for target in scenario.service_level if target.metric in ("tpot", "itl")]
    deployment, layout = candidate.deployment, candidate.deployment.layout
    if (
        scenario.offline
        or "max_num_seqs" in scenario.engine_args
        or (deployment.args.max_num_seqs or 0) < 2 * SEQS_STEP
    ):
        return candidate
    most = (deployment.args.max_num_seqs or 0) // SEQS_STEP
    low, high = (0 if paces else most), most + 1
    while high - low > 1:
        middle = (low + high) // 2
        full = replace(scenario.workload, rate=None, concurrency=middle * SEQS_STEP * layout.replicas * layout.dp)
        found = evaluate(deployment, full, scenario.prices).performance
        kept = found and all(getattr(found, t.metric)[t.percentile].mid <= t.seconds for t in paces)
        low, high = (middle, high) if kept else (low, middle)
    limited = replace(deployment, args=replace(deployment.args, max_num_seqs=max(low, 1) * SEQS_STEP))
    guarded = judge(scenario, limited, layout.replicas, candidate.preference)
    return guarded if guarded.meets and guarded.at_risk <= candidate.at_risk else candidate


def _binding(scenario: Scenario, chosen: Candidate, candidates: list[Candidate], rejected: list[Rejection]) -> Binding:
    """What the nearest cheaper deployment misses: any candidate with as many replicas as cost less than `chosen`."""
    cheaper = []
    for candidate in candidates:
        replicas = candidate.deployment.layout.replicas
        unpriced, each = candidate.cost[0], candidate.cost[1] / replicas
        affordable = min(math.ceil(chosen.cost[1] / each) - 1, replicas)
        if unpriced == chosen.cost[0] and affordable > 0:
            same = affordable == replicas and not candidate.meets
            cheaper.append(candidate if same else judge(scenario, candidate.deployment, affordable))
    cheaper = [candidate for candidate in cheaper if not candidate.meets]
    if cheaper:
        near = min(cheaper, key=lambda candidate: candidate.margin)
        return Binding(
            near.constraints[0],
            f"Of all that costs less, {describe(near.deployment)} comes nearest, but {near.misses[0]}.",
        )
    small = [r for r in rejected if r.bottleneck == "memory" and r.gpus < chosen.deployment.layout.gpus]
    if small:
        nearest = max(small, key=lambda rejection: rejection.gpus)
        return Binding("memory", f"Less does not hold the model, such as {nearest.what}: {nearest.reason}.")
    return Binding("one GPU", f"Nothing smaller exists; it uses {chosen.margin:.0%} of the tightest limit.")


def _nothing(candidates: list[Candidate], rejected: list[Rejection]) -> Binding:
    """Why no candidate does."""
    if candidates:
        near = min(candidates, key=lambda candidate: candidate.margin)
        return Binding(near.constraints[0], f"The nearest, {describe(near.deployment)}: {'; '.join(near.misses)}.")
    if not rejected:
        return Binding("engine", "The engine accepts no layout of this model on these GPUs.")
    last = max(rejected, key=lambda rejection: rejection.gpus)
    return Binding(last.bottleneck, f"It fits nowhere: {last.what} on {last.gpu}: {last.reason}")


def _notes(scenario: Scenario, chosen: Candidate, candidates: list[Candidate]) -> tuple[str, ...]:
    """What a reader should know about how the choice was made."""
    unpriced = sorted({c.deployment.gpu.name for c in candidates if c.usd_per_hour is None})
    notes = [f"no price is known for {', '.join(unpriced)}: ranked after the others, by GPUs"] if unpriced else []
    length = chosen.deployment.args.max_model_len or 0
    longest = scenario.workload.prompt.largest + scenario.workload.output.largest
    if longest > length:
        notes.append(
            f"requests longer than max_model_len {length:,} are refused; under 1 % are, by the workload's own lengths"
        )
    return (*notes, *chosen.prediction.warnings)
