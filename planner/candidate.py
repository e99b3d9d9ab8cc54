"""One deployment under a scenario's traffic, held against its service level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.deployment import Deployment
from planner.predict import Prediction, evaluate_all
from planner.scenario import Scenario
from planner.workload import Workload


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


def describe(deployment: Deployment) -> str:
    """A deployment in a few words: GPUs, layout, formats."""
    layout, stored = deployment.layout, deployment.model.quantization.method
    formats = [deployment.model.dtype if stored == "none" else stored]
    formats += [f"{deployment.args.kv_cache_dtype} KV"] if deployment.args.kv_cache_dtype not in (None, "auto") else []
    formats += [deployment.speculation.method] if deployment.speculation else []
    return f"{layout.gpus} x {deployment.gpu.name}, {layout}, {', '.join(formats)}"


def judge(scenario: Scenario, deployment: Deployment, replicas: int, preference: tuple[int, ...] = ()) -> Candidate:
    """`deployment` in `replicas` copies under the scenario's traffic, held against its service level."""
    return judge_all(scenario, [(deployment, replicas, preference)])[0]


def judge_all(scenario: Scenario, cases: Sequence[tuple[Deployment, int, tuple[int, ...]]]) -> list[Candidate]:
    """`judge` of every (deployment, replicas, preference); together they take little longer than one."""
    loads = [_load(scenario, deployment, replicas) for deployment, replicas, _ in cases]
    found = [
        _against(scenario, prediction, preference)
        for prediction, (_, _, preference) in zip(evaluate_all(loads, scenario.prices), cases, strict=True)
    ]
    if scenario.offline:
        return found
    meeting = [k for k, candidate in enumerate(found) if candidate.meets]
    stressed = []
    for k in meeting:  # slower than expected is the same as so much more traffic
        performance = found[k].prediction.performance
        assert performance is not None
        slower = performance.request_tps.mid / performance.request_tps.lo
        stressed.append((slower, (loads[k][0], loads[k][1].at((scenario.workload.rate or 0.0) * slower))))
    under = evaluate_all([load for _, load in stressed], scenario.prices)
    for k, (slower, _), prediction in zip(meeting, stressed, under, strict=True):
        if prediction.performance is None or prediction.performance.saturated:
            risk = f"may be overloaded, if it is {slower - 1:.0%} slower than expected"
            found[k] = replace(found[k], risks=(*found[k].risks, risk))
    return found


def _load(scenario: Scenario, deployment: Deployment, replicas: int) -> tuple[Deployment, Workload]:
    """So many replicas and what they see of the scenario's traffic."""
    deployment = replace(deployment, layout=replace(deployment.layout, replicas=replicas))
    workload = scenario.workload
    if scenario.offline:  # the engines are kept full
        full = replicas * deployment.layout.dp * (deployment.args.max_num_seqs or 1)
        workload = replace(workload, rate=None, concurrency=min(full, workload.num_prompts or full))
    return deployment, workload


def _against(scenario: Scenario, prediction: Prediction, preference: tuple[int, ...]) -> Candidate:
    """A prediction held against the service level."""
    deployment, performance, rate = prediction.deployment, prediction.performance, scenario.workload.rate or 0.0
    if performance is None:
        return Candidate(deployment, prediction, (prediction.memory.reason,), (), ("memory",), math.inf, preference)
    missed, risks = [], []
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
            is_, limit = milliseconds(value.mid), milliseconds(target.seconds)
            missed.append((target.name, f"{target.name} is {is_}, above {limit}"))
        elif value.hi > target.seconds:
            risks.append(f"{target.name} may reach {milliseconds(value.hi)}, above {milliseconds(target.seconds)}")
    if prediction.memory.status == "at_risk":
        risks.append(prediction.memory.reason)
    constraints, misses = zip(*missed, strict=True) if missed else ((), ())
    return Candidate(deployment, prediction, misses, tuple(risks), constraints, margin, preference)


def milliseconds(seconds: float) -> str:
    """A latency as a sentence has it."""
    return f"{seconds * 1e3:,.0f} ms" if seconds < 10 else f"{seconds:,.0f} s"
