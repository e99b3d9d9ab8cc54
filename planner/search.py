"""Which deployment to choose: every legal candidate, evaluated; the cheapest that meets the service level.

The rule, in this order: it meets every target at the middle of its interval; it costs least per hour (GPUs, where no
price is known); it meets them at the pessimistic end too; it changes the model least (formats in the scenario's order,
no speculation); it has the fewest pipeline stages, then the largest margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from planner.deployment import Deployment, deploy_on
from planner.engines import Engine, release
from planner.hardware import Gpu
from planner.memory import plan
from planner.models import model
from planner.parallelism import legal_layouts
from planner.predict import Prediction, evaluate
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


@dataclass(frozen=True)
class Candidate:
    """A legal deployment with as many replicas as the traffic needs (or as the scenario allows)."""

    deployment: Deployment
    prediction: Prediction
    misses: tuple[str, ...]  # what it does not meet at the middle of its intervals
    risks: tuple[str, ...]  # what it does not meet at their pessimistic ends
    constraints: tuple[str, ...]  # the names of what it misses: "p95 TPOT", "rate", "memory"
    margin: float  # largest share of any limit that it uses, 1 = at the limit
    preference: tuple[int, ...]  # position of its formats in the scenario's lists, speculation last

    @property
    def meets(self) -> bool:
        """Every target holds at the middle of its interval."""
        return not self.misses

    @property
    def at_risk(self) -> bool:
        """It meets the targets, but not at the pessimistic end of every interval."""
        return self.meets and bool(self.risks)

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all its GPUs; None where none is known."""
        return self.prediction.usd_per_hour

    @property
    def cost(self) -> tuple[bool, float]:
        """What candidates are compared by: USD per hour, or GPUs where no price is known (ranked after all others)."""
        usd = self.usd_per_hour
        return usd is None, self.deployment.layout.gpus if usd is None else usd

    @property
    def shape(self) -> tuple[int, ...]:
        """(tp, pp, dp, ep) of one replica."""
        layout = self.deployment.layout
        return layout.tp, layout.pp, layout.dp, layout.ep

    @property
    def rank(self) -> tuple[object, ...]:
        """Sorts candidates from best to worst by the rule of this module."""
        return not self.meets, self.cost, self.at_risk, self.preference, self.deployment.layout.pp, self.margin

    def row(self) -> dict[str, object]:
        """The candidate in a line, with units in the names."""
        deployment, layout, found = self.deployment, self.deployment.layout, self.prediction.performance
        line = {"gpu": deployment.gpu.name, "gpus": layout.gpus, "layout": str(layout)}
        line |= {"weights": deployment.model.quantization.method, "kv_cache_dtype": deployment.args.kv_cache_dtype}
        line |= {"speculation": deployment.speculation.method if deployment.speculation else ""}
        line |= {"usd_per_hour": self.usd_per_hour, "meets": self.meets, "at_risk": self.at_risk}
        if found:
            line |= {f"{m}_ms_p95": getattr(found, m)["p95"].mid * 1e3 for m in ("ttft", "tpot", "e2e")}
            line |= {"output_tps": found.output_tps.mid, "kv_usage": found.kv_usage}
        return line | {"max_num_seqs": deployment.args.max_num_seqs, "misses": "; ".join(self.misses)}

    def __str__(self) -> str:
        price = "no price known" if self.usd_per_hour is None else f"${self.usd_per_hour:,.2f} per hour"
        verdict = (
            "; ".join(self.misses) or "; ".join(f"at risk: {risk}" for risk in self.risks) or "meets the service level"
        )
        return f"{describe(self.deployment)}: {price}; {verdict}"


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

    def frame(self) -> pd.DataFrame:
        """One row per candidate, from best to worst."""
        import pandas as pd

        return pd.DataFrame([candidate.row() for candidate in self.candidates])

    def __str__(self) -> str:
        if self.chosen is None:
            return f"{self.scenario.name}: nothing meets the service level. {self.binding}"
        after = f" Next best: {self.runner_up}." if self.runner_up else ""
        return f"{self.scenario.name}: {self.chosen}. {self.binding}{after}"


def describe(deployment: Deployment) -> str:
    """A deployment in a few words: GPUs, layout, formats."""
    layout, stored = deployment.layout, deployment.model.quantization.method
    formats = [deployment.model.dtype if stored == "none" else stored]
    formats += [f"{deployment.args.kv_cache_dtype} KV"] if deployment.args.kv_cache_dtype != "auto" else []
    formats += [deployment.speculation.method] if deployment.speculation else []
    return f"{layout.gpus} x {deployment.gpu.name}, {layout}, {', '.join(formats)}"


def context_length(workload: Workload, buffer: float, limit: int) -> int:
    """The max_model_len to serve `workload` with: p99 of prompt + output plus `buffer`, rounded up, at most `limit`."""
    wanted = workload.total_quantile(0.99) * (1 + buffer)
    return min(math.ceil(wanted / LENGTH_STEP) * LENGTH_STEP, limit)


def search(scenario: Scenario) -> Plan:
    """Evaluate every legal candidate of `scenario` and choose by the rule above."""
    candidates: list[Candidate] = []
    rejected: list[Rejection] = []
    cheapest = math.inf
    for option in sorted(_options(scenario), key=lambda option: option.gpus):
        found = option if isinstance(option, Rejection) else _size(scenario, option, cheapest)
        if isinstance(found, Rejection):
            rejected.append(found)
        else:
            candidates.append(found)
            if found.meets and found.usd_per_hour is not None:
                cheapest = min(cheapest, found.usd_per_hour)
    candidates.sort(key=lambda candidate: candidate.rank)
    meeting = [candidate for candidate in candidates if candidate.meets]
    if not meeting:
        return Plan(scenario, None, None, None, _nothing(candidates, rejected), tuple(candidates), tuple(rejected), ())
    chosen = _batch_within(scenario, meeting[0])
    candidates[0] = chosen
    other = (c for c in meeting if (c.deployment.gpu, c.shape) != (chosen.deployment.gpu, chosen.shape))
    safer = next((c for c in meeting if not c.at_risk), None) if chosen.at_risk else None
    binding = _binding(scenario, chosen, candidates, rejected)
    notes = _notes(scenario, chosen, candidates)
    return Plan(scenario, chosen, next(other, None), safer, binding, tuple(candidates), tuple(rejected), notes)


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
        args = {"max_model_len": length, **scenario.engine_args}
        layouts = legal_layouts(served, card, wanted.at_most, wanted.gpus_per_node)
        kinds = product(layouts, enumerate(scenario.kv_cache_dtypes), enumerate(speculations))
        for layout, (k, kv_cache_dtype), (s, speculation) in kinds:
            sizes = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
            try:
                deployment = deploy_on(
                    served, card, **sizes, engine=scenario.engine, speculation=speculation,
                    interconnect=wanted.interconnect, gpus_per_node=wanted.gpus_per_node,
                    other_tenants=scenario.other_tenants, **{"kv_cache_dtype": kv_cache_dtype, **args},
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


def _size(scenario: Scenario, option: _Option, cheapest: float) -> Candidate | Rejection:
    """The option with the fewest replicas that meet the service level, or with all there may be where none do."""
    deployment, layout = option.deployment, option.deployment.layout
    price, what = price_per_hour(deployment.gpu, scenario.prices), describe(deployment)
    if layout.gpus > deployment.gpus_per_node and price and price.usd * layout.gpus > cheapest:
        return Rejection(what, deployment.gpu.name, option.gpus, "one replica costs more than the best plan", "cost")
    memory = plan(deployment)
    if memory.status == "does_not_fit" or memory.pool.max_concurrency_x < 1:
        return Rejection(what, deployment.gpu.name, option.gpus, memory.reason, "memory")
    if "max_num_seqs" not in scenario.engine_args:
        held = memory.sequences_that_fit(round(scenario.workload.prompt.p50 + scenario.workload.output.p50))
        seqs = min(deployment.args.max_num_seqs or SEQS_STEP, max(math.ceil(held / SEQS_STEP), 1) * SEQS_STEP)
        deployment = replace(deployment, args=replace(deployment.args, max_num_seqs=seqs))
    low, high = 0, option.at_most // option.gpus
    best = judge(scenario, deployment, high, option.preference)
    while best.meets and high - low > 1:
        middle = (low + high) // 2
        tried = judge(scenario, deployment, middle, option.preference)
        low, high, best = (low, middle, tried) if tried.meets else (middle, high, best)
    return best


def judge(scenario: Scenario, deployment: Deployment, replicas: int, preference: tuple[int, ...] = ()) -> Candidate:
    """`deployment` in `replicas` copies under the scenario's traffic, held against its service level."""
    deployment = replace(deployment, layout=replace(deployment.layout, replicas=replicas))
    workload, rate = scenario.workload, scenario.workload.rate or 0.0
    if scenario.offline:  # the engines are kept full
        full = replicas * deployment.layout.dp * (deployment.args.max_num_seqs or 1)
        workload = replace(workload, rate=None, concurrency=min(full, workload.num_prompts or full))
    prediction = evaluate(deployment, workload, scenario.prices)
    performance = prediction.performance
    if performance is None:
        return Candidate(deployment, prediction, (prediction.memory.reason,), (), ("memory",), math.inf, preference)
    missed, risks, margin = [], [], 0.0
    served = performance.request_tps
    if performance.saturated or (scenario.offline and served.mid < rate):
        missed.append(("rate", f"serves {served.mid:.3g} of {rate:.3g} requests/s"))
    elif scenario.offline and served.lo < rate:
        risks.append(f"may serve only {served.lo:.3g} of {rate:.3g} requests/s")
    margin = rate / served.mid if scenario.offline else 0.0
    for target in scenario.service_level:
        value = getattr(performance, target.metric)[target.percentile]
        margin = max(margin, value.mid / target.seconds)
        if value.mid > target.seconds:
            missed.append((target.name, f"{target.name} is {_ms(value.mid)}, above {_ms(target.seconds)}"))
        elif value.hi > target.seconds:
            risks.append(f"{target.name} may reach {_ms(value.hi)}, above {_ms(target.seconds)}")
    if prediction.memory.status == "at_risk":
        risks.append(prediction.memory.reason)
    constraints, misses = zip(*missed, strict=True) if missed else ((), ())
    return Candidate(deployment, prediction, misses, tuple(risks), constraints, margin, preference)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < 10 else f"{seconds:,.0f} s"


def _batch_within(scenario: Scenario, candidate: Candidate) -> Candidate:
    """`candidate` with the largest max_num_seqs at which a full batch still keeps the promised pace of tokens."""
    paces = [target for target in scenario.service_level if target.metric in ("tpot", "itl")]
    deployment, layout = candidate.deployment, candidate.deployment.layout
    low, high = 0, (deployment.args.max_num_seqs or 0) // SEQS_STEP
    if not paces or "max_num_seqs" in scenario.engine_args:
        return candidate
    while high - low > 1:
        middle = (low + high) // 2
        full = replace(scenario.workload, rate=None, concurrency=middle * SEQS_STEP * layout.replicas * layout.dp)
        found = evaluate(deployment, full, scenario.prices).performance
        kept = found and all(getattr(found, t.metric)[t.percentile].mid <= t.seconds for t in paces)
        low, high = (middle, high) if kept else (low, middle)
    limited = replace(deployment, args=replace(deployment.args, max_num_seqs=max(high, 1) * SEQS_STEP))
    guarded = judge(scenario, limited, layout.replicas, candidate.preference)
    return guarded if guarded.meets and guarded.at_risk <= candidate.at_risk else candidate


def _binding(scenario: Scenario, chosen: Candidate, candidates: list[Candidate], rejected: list[Rejection]) -> Binding:
    """What stops the next cheaper step: a replica less, another candidate, or fewer GPUs."""
    layout = chosen.deployment.layout
    if layout.replicas > 1:
        fewer = judge(scenario, chosen.deployment, layout.replicas - 1)
        return Binding(fewer.constraints[0], f"With {layout.replicas - 1} replicas, {'; '.join(fewer.misses)}.")
    cheaper = [c for c in candidates if not c.meets and c.cost < chosen.cost]
    if cheaper:
        near = min(cheaper, key=lambda candidate: candidate.margin)
        return Binding(near.constraints[0], f"The nearest cheaper one, {describe(near.deployment)}: {near.misses[0]}.")
    card = chosen.deployment.gpu.name
    small = [r for r in rejected if r.bottleneck == "memory" and r.gpu == card and r.gpus < layout.gpus]
    if small:
        return Binding("memory", f"Fewer GPUs do not hold it: {small[-1].what}: {small[-1].reason}")
    return Binding("one GPU", f"It is the cheapest single replica, and uses {chosen.margin:.0%} of the tightest limit.")


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
