"""One deployment under a scenario's traffic, held against its service level."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.core.quantities import Interval
from planner.facts.deployment import Deployment
from planner.facts.prices import HOURS_PER_MONTH
from planner.facts.workload import Workload
from planner.latency.performance import Performance
from planner.latency.start_up import start_up
from planner.planning.capacity import is_finite
from planner.planning.disaggregated import evaluate_disaggregated
from planner.planning.prediction import Prediction, evaluate_all, predict
from planner.planning.scenario import Scenario, Target

LIGHT = 0.5
"""Below this share of the KV pool, and of the capacity that is planned, most of both is idle."""
UNSURE = 1.3
"""What a deployment serves at most is in closed form at most so many times what the replay says."""


@dataclass(frozen=True)
class Candidate:
    """A legal deployment with as many replicas as the traffic needs (or as the scenario allows)."""

    deployment: Deployment
    prediction: Prediction
    misses: tuple[str, ...]  # what it does not meet at the middle of its intervals
    risks: tuple[str, ...]  # what it does not meet at their pessimistic ends
    constraints: tuple[str, ...]  # the names of what it misses: "p95 TPOT", "rate", "memory"
    margin: float  # largest share of any limit that it uses, 1 = at the limit
    share: float  # of the capacity that is planned to be used, 1 = all of it
    preference: tuple[int, ...]  # positions of formats, speculation and engine in the scenario's lists, and 1 if tuned
    paid: float = 1.0  # share of its price that the scenario's day takes, scaled by the hour, where plans differ in it

    @property
    def stated(self) -> bool:
        """Its figures are replayed, not the closed form's."""
        return bool(self.prediction.performance and self.prediction.performance.requests)

    @property
    def light(self) -> bool:
        """Most of what it holds and can do is idle: with more memory or with fewer slots it would do the same."""
        found = self.prediction.performance
        return found is not None and max(found.kv_usage, self.share) < LIGHT

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
        """Price of all GPUs that are rented for it; None where none is known."""
        return self.prediction.usd_per_hour

    @property
    def price(self) -> tuple[bool, float]:
        """USD per hour, or GPUs where no price is known (ranked after all others)."""
        usd = self.usd_per_hour
        return usd is None, self.prediction.gpus_rented if usd is None else usd

    @property
    def cost(self) -> tuple[bool, float]:
        """What candidates are compared by: their price, and of it what is paid."""
        unpriced, price = self.price
        return unpriced, self.paid * price

    @property
    def pooled(self) -> bool:
        """Prefill and decode have workers of their own; `deployment` is that of the decode pool."""
        return self.prediction.prefill is not None

    @property
    def kind(self) -> tuple[object, ...]:
        """What makes candidates differ for a reader: engine, GPU and layout, however experts are spread in it."""
        layouts = [(pool.layout.tp, pool.layout.pp, pool.layout.dp) for pool in self.prediction.pools]
        return self.deployment.engine.name, self.deployment.gpu, *layouts

    @property
    def place(self) -> tuple[object, ...]:
        """What it is but for its engine's arguments."""
        deployment, formats = self.deployment, self.preference[:-1]
        machine = deployment.gpu, deployment.gpus_per_node, deployment.sold_in, deployment.link_bandwidth
        return *machine, tuple(pool.layout for pool in self.prediction.pools), formats

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells it from other candidates of its search."""
        return *self.place, self.deployment.args, self.deployment.drafts

    @property
    def shape(self) -> tuple[int, ...]:
        """(tp, pp, dp, ep) of one replica."""
        layout = self.deployment.layout
        return layout.tp, layout.pp, layout.dp, layout.ep

    @property
    def rank(self) -> tuple[object, ...]:
        """Sorts candidates from best to worst by the rule of this module."""
        risky, layout = self.pooled and self.at_risk, self.deployment.layout
        return not self.meets, risky, self.cost, self.pooled, self.at_risk, self.preference, layout.pp, self.margin

    def __str__(self) -> str:
        price = "no price known" if self.usd_per_hour is None else f"${self.usd_per_hour:,.2f} per hour"
        price += f", {self.paid:.0%} of it over the day" if self.paid < 1 else ""
        risks = "; ".join(f"at risk: {risk}" for risk in self.risks)
        verdict = "; ".join(self.misses) or risks or "meets the service level"
        return f"{self.what}: {price}; {verdict}"

    @property
    def what(self) -> str:
        """What it is in a few words: `describe`, or both pools."""
        if self.prediction.prefill is None:
            return describe(self.deployment)
        first, rest = (f"{pool.layout.replicas} x {pool.with_replicas(1).layout}{_beside(pool)}"
                       for pool in self.prediction.pools)  # fmt: skip
        where = f"{sum(pool.gpus for pool in self.prediction.pools)} x {self.deployment.gpu.name}"
        return f"{where}, prefill {first}, decode {rest}, {formats(self.deployment)}"


def tuned(preference: tuple[int, ...]) -> tuple[int, ...]:
    """The `preference` of the same with other engine arguments."""
    return *preference[:-1], 1


def describe(deployment: Deployment) -> str:
    """A deployment in a few words: GPUs, layout, formats, and the engine where it is another than vLLM."""
    where = f"{deployment.gpus} x {deployment.gpu.name}"
    return f"{where}, {deployment.layout}{_beside(deployment)}, {formats(deployment)}"


def formats(deployment: Deployment) -> str:
    """What it computes in, drafts by and runs on, where that is not the usual."""
    stored = deployment.model.quantization.method
    parts = [deployment.model.dtype if stored == "none" else stored]
    parts += [f"{deployment.args.kv_cache_dtype} KV"] if deployment.args.kv_cache_dtype not in (None, "auto") else []
    parts += [deployment.speculation.method] if deployment.speculation else []
    parts += [deployment.engine.name] if deployment.engine.name != "vllm" else []
    return ", ".join(parts)


def _beside(deployment: Deployment) -> str:
    """Spare replicas, and rented GPUs that nothing runs on."""
    spares, idle = deployment.spare_replicas, deployment.gpus_rented - deployment.gpus
    beside = f" + {spares} spare{'s' if spares > 1 else ''}" if spares else ""
    return beside + (f" ({idle} of {deployment.gpus_rented} rented GPUs not needed)" if idle else "")


def judge(scenario: Scenario, deployment: Deployment, replicas: int, preference: tuple[int, ...] = ()) -> Candidate:
    """`deployment` in `replicas` copies under the scenario's traffic, held against its service level in closed form."""
    return judge_all(scenario, [(deployment, replicas, preference)])[0]


def judge_all(scenario: Scenario, cases: Sequence[tuple[Deployment, int, tuple[int, ...]]]) -> list[Candidate]:
    """`judge` of every (deployment, replicas, preference); together they take little longer than one."""
    if not cases:
        return []
    copies = [deployment.with_replicas(replicas) for deployment, replicas, _ in cases]
    found = evaluate_all([(one, traffic(scenario, one)) for one in copies], scenario.prices)
    return [against(scenario, one, preference) for one, (_, _, preference) in zip(found, cases, strict=True)]


def replayed(scenario: Scenario, candidate: Candidate, *, quick: bool = False) -> Candidate:
    """`candidate` as it is stated: its traffic, replayed; `quick` is a first look."""
    load, first = traffic(scenario, candidate.deployment), candidate.prediction.prefill
    if first:
        found = evaluate_disaggregated(first, candidate.deployment, load, scenario.prices)
    else:
        found = predict(candidate.deployment, load, scenario.prices, quick=quick)
    return against(scenario, found, candidate.preference)


def glanced(scenario: Scenario, candidate: Candidate) -> Candidate:
    """A first look at `candidate`; its capacity, which takes longest, is replayed only where it may decide."""
    load = traffic(scenario, candidate.deployment)
    if is_finite(load):
        return replayed(scenario, candidate, quick=True)
    found = predict(candidate.deployment, load, scenario.prices, quick=True, rough=True)
    look = against(scenario, found, candidate.preference)
    else_decides = max(1.0, look.margin if look.margin > look.share else 0.0)
    return look if look.share * UNSURE < else_decides else replayed(scenario, candidate, quick=True)


def traffic(scenario: Scenario, deployment: Deployment) -> Workload:
    """The scenario's traffic; offline, a closed loop that keeps every slot of `deployment` taken."""
    workload = scenario.workload
    return full(deployment, workload) if scenario.offline else workload


def full(deployment: Deployment, workload: Workload) -> Workload:
    """`workload` as a closed loop that keeps every one of `deployment`'s max_num_seqs slots taken."""
    slots = deployment.args.max_num_seqs * deployment.engines
    return replace(workload, rate=None, trace=None, concurrency=min(slots, workload.num_prompts or slots))


def against(scenario: Scenario, prediction: Prediction, preference: tuple[int, ...] = ()) -> Candidate:
    """A prediction held against the service level."""
    deployment, performance = prediction.deployment, prediction.performance
    if performance is None:
        reason = prediction.memory.reason
        return Candidate(deployment, prediction, (reason,), (), ("memory",), math.inf, math.inf, preference)
    missed, risks, share = _load(scenario, prediction, performance)
    margin = share
    for target in scenario.service_level:
        found, told = (read(target.metric, target.percentile) for read in (performance.at, performance.told))
        if math.isnan(found.mid):  # answers of one token have no pace
            continue
        margin = max(margin, found.mid / target.seconds)
        if told.mid > target.seconds:
            missed.append((target.name, f"{target.name} {_beyond('is', 'grows', told.mid, target.seconds)}"))
        elif told.hi > target.seconds:
            risks.append(f"{target.name} may {_beyond('reach', 'grow', told.hi, target.seconds)}")
    if prediction.refused > scenario.refused_at_most:
        said = f"{prediction.refused:.1%} of the requests are refused, above {scenario.refused_at_most:.1%}"
        missed.append(("max_model_len", said))
        margin = max(margin, prediction.refused / max(scenario.refused_at_most, 1e-6))
    for name, said, value, most in bounds(scenario, prediction):
        if value is None:
            risks.append(f"{said} is not known, and {most} is the limit")
            continue
        margin = max(margin, value.mid / most.value)
        if value.mid > most.value:
            missed.append((name, f"{said} is {most.of(value.mid)}, above {most}"))
        elif value.hi > most.value:
            risks.append(f"{said} may reach {most.of(value.hi)}, above {most}")
    if prediction.memory.status == "at_risk":
        risks.append(prediction.memory.reason)
    constraints, misses = zip(*missed, strict=True) if missed else ((), ())
    return Candidate(deployment, prediction, misses, tuple(risks), constraints, margin, share, preference)


def _beyond(is_: str, grows: str, seconds: float, limit: float) -> str:
    if math.isinf(seconds):
        return f"{grows} for as long as it runs"
    return f"{is_} {milliseconds(seconds, limit)}, above {milliseconds(limit)}"


@dataclass(frozen=True)
class Limit:
    """The most that something may be, with its unit."""

    value: float
    unit: str

    def of(self, amount: float) -> str:
        """Another amount in the same unit, exact enough to tell it from the limit."""
        return f"{amount:,.{0 if abs(amount - self.value) >= 1 else 2}f} {self.unit}"

    def __str__(self) -> str:
        return f"{self.value:,.10g} {self.unit}"


def bounds(scenario: Scenario, prediction: Prediction) -> Iterator[tuple[str, str, Interval | None, Limit]]:
    """(name, what it is, its figure, the limit) for each limit that the scenario sets beside its service level."""
    if scenario.start_up_at_most is not None:
        begins = [start_up(pool, scenario.storage) for pool in prediction.pools]
        totals = [one.total for one in begins if one]
        slowest = max(totals, key=lambda total: total.mid) if len(totals) == len(begins) else None
        yield "start-up", "the start-up of a replica", slowest, Limit(scenario.start_up_at_most, "s")
    if scenario.power_at_most is not None:
        yield "power", "the mean power of all GPUs", prediction.watts, Limit(scenario.power_at_most, "W")


def _load(
    scenario: Scenario, prediction: Prediction, performance: Performance
) -> tuple[list[tuple[str, str]], list[str], float]:
    """What the load says: misses with their names, risks, and the share that it takes of what is to be used."""
    asked, free, planned = asked_rps(scenario, prediction), free_share(scenario, prediction), 1 - scenario.headroom
    most = most_rps(scenario, performance)
    assert free is not None and most is not None
    used = 1 - free
    if scenario.workload.rate is None:
        return [], [], min(used, 1.0)  # users wait for their answers: no queue grows, whatever they send
    share = used / planned
    if share > 1 and scenario.offline:
        spare = f", of which {scenario.headroom:.0%} should stay free" if used <= 1 else ""
        return [("rate", f"it serves {most.mid:.3g} of {asked:.3g} requests/s{spare}")], [], share
    if share > 1:
        beyond = f"above the {planned:.0%} that are planned" if used <= 1 else "so that its queue grows"
        digits = 3 if share <= 1.005 else 1 if used < 1.1 else 0
        times = f"{used:.3g} times" if used >= 2 else f"{used:.{digits}%} of"
        said = f"{asked:.3g} requests/s are {times} the {most.mid:.3g} it serves at most, {beyond}"
        return [("capacity", said)], [], share
    digits = 3 if most.lo < 0.99 * asked else 5
    risk = f"it may serve only {most.lo:.{digits}g} of {asked:.{digits}g} requests/s"
    return [], [risk] * (asked > most.lo), share


def held(target: Target, value: Interval) -> str:
    """Whether a promise is "kept", "at risk" or "broken" by what is predicted; answers of one token keep any pace."""
    return "broken" if value.mid > target.seconds else "at risk" if value.hi > target.seconds else "kept"


def asked_rps(scenario: Scenario, prediction: Prediction) -> float:
    """Requests/s that are planned for: those that arrive and are taken, the deadline asks for, or the users send."""
    rate, found = scenario.workload.rate, prediction.performance
    if rate is None:
        return found.request_tps.mid if found else math.nan
    return rate if scenario.offline else rate * (1 - prediction.refused)


def free_share(scenario: Scenario, prediction: Prediction) -> float | None:
    """The share of what it can serve that the traffic leaves free; negative where it is overloaded."""
    found = prediction.performance
    if found is None or (most := most_rps(scenario, found)) is None:
        return None
    return 1 - asked_rps(scenario, prediction) / most.mid


def most_rps(scenario: Scenario, performance: Performance) -> Interval | None:
    """Requests/s that the traffic is held against: the capacity, and offline what the whole job is served at."""
    return performance.request_tps if scenario.offline else performance.capacity


def run_hours(scenario: Scenario, candidate: Candidate) -> Interval | None:
    """Hours that work with a deadline takes; None where traffic goes on, or nothing is predicted."""
    found, many = candidate.prediction.performance, scenario.workload.num_prompts
    return found.request_tps.map(lambda rate: many / rate / 3600) if scenario.offline and found and many else None


def energy(scenario: Scenario, candidate: Candidate) -> list[tuple[str, Interval]]:
    """(unit, figure) of the boards' mean power and energy under the planned load; none where nothing runs."""
    found, hours = candidate.prediction, run_hours(scenario, candidate)
    if found.power is None:
        return []
    kwh = (found.watts or found.power) * ((hours.mid if hours else HOURS_PER_MONTH) / 1e3)
    shown = [("W each, mean", found.power), ("kWh for all of it" if hours else "kWh a month", kwh)]
    return [*shown, ("J per output token", found.joules)] if found.joules else shown


def milliseconds(seconds: float, limit: float = math.inf) -> str:
    """A latency as a sentence has it, exact enough to tell it from a `limit` beside it."""
    if seconds >= 10:
        return f"{seconds:,.0f} s" if abs(seconds - limit) >= 1 else f"{seconds:,.2f} s"
    if seconds < 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e3:,.0f} ms" if abs(seconds - limit) >= 1e-3 else f"{seconds * 1e3:,.2f} ms"
