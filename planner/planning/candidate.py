"""One deployment under a scenario's traffic, held against its service level."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.core.number_format import format_probability
from planner.engines.deployment import Deployment, get_default_memory_utilization
from planner.planning.prediction import Prediction
from planner.planning.slo import (
    MAX_TOLERANCE_SIGMAS,
    LimitOdds,
    combine_limits,
)

MAX_PRICE_WITHOUT_STAGES = 1.5
"""How many times the price it is worth to have no pipeline stages inside a machine: few are measured."""
SAME_PRICE_SHARE = 0.005
"""Prices that differ by less are the same for people."""
TIED_PRICE_SHARE, CLEARLY_LIKELIER = 0.02, 0.05
"""A plan that costs so little more is chosen where it is so much likelier."""
PROBABILITY_TIE = 0.02
"""Probabilities that differ by less are a tie, which the format nearest to the checkpoint wins."""


@dataclass(frozen=True)
class Candidate:
    """A legal deployment with as many replicas as the traffic needs (or as the scenario allows)."""

    deployment: Deployment
    prediction: Prediction
    violations: tuple[str, ...]  # what it does not meet at the middle of its intervals
    risks: tuple[str, ...]  # what it does not meet at their pessimistic ends
    violated_constraints: tuple[
        str, ...
    ]  # the names of what it misses: "p95 TPOT", "rate", "memory"
    limit_utilization: float  # largest share of any limit that it uses, 1 = at the limit
    capacity_utilization: float  # of the capacity that is planned to be used, 1 = all of it
    preference_key: tuple[
        int, ...
    ]  # positions of formats, speculation and engine in the scenario's lists, and 1 if tuned
    limits: tuple[LimitOdds, ...] = ()  # the load and every target, each with its own probability
    p_memory: float = 1.0  # that it starts and does not run out of memory
    confidence: float = 0.8  # the probability that the scenario asks for
    is_owned: bool = False  # its GPUs are the reader's own
    # share of its price that the scenario's day takes, scaled by the hour, where plans differ in it
    billed_fraction: float = 1.0

    @property
    def is_simulated(self) -> bool:
        """Its figures are replayed, not the closed form's."""
        return bool(
            self.prediction.performance and self.prediction.performance.num_simulated_requests
        )

    @property
    def is_feasible(self) -> bool:
        """Every target holds at the middle of its interval."""
        return not self.violations

    @property
    def tolerance_sigmas(self) -> float:
        """Standard deviations by which every step may be slower than predicted while all limits hold."""
        return min((limit.tolerance_sigmas for limit in self.limits), default=MAX_TOLERANCE_SIGMAS)

    @property
    def probability(self) -> float:
        """That it starts and meets every target, 0 to 1.

        Slower steps break the weakest of the other limits first; TTFT has an error of its own.
        """
        return combine_limits(self.limits, self.p_memory)

    def get_limit(self, name: str) -> LimitOdds | None:
        """Get a limit by its name, such as "p95 TTFT"; None for one that cannot be missed."""
        return next((limit for limit in self.limits if limit.name == name), None)

    @property
    def at_risk(self) -> bool:
        """It meets the targets, but not with the probability that the scenario asks for."""
        return self.is_feasible and self.probability < self.confidence

    @property
    def shortfall(self) -> str:
        """What it misses: the limits that it breaks, or else the probability that is asked for."""
        odds = format_probability(self.probability, self.confidence)
        probable = f"meeting all targets is only {odds} likely"
        return "; ".join(self.violations) or probable

    @property
    def is_confident(self) -> bool:
        """It meets the targets with the probability that the scenario asks for."""
        return self.is_feasible and not self.at_risk

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all GPUs that are rented for it; None where none is known."""
        return self.prediction.usd_per_hour

    @property
    def price_key(self) -> tuple[bool, float]:
        """USD per hour, or GPUs where no price is known (ranked after all others)."""
        usd = self.usd_per_hour
        return usd is None, self.prediction.num_gpus_billed if usd is None else usd

    @property
    def replica_share(self) -> float:
        """The share of its price that one replica is rented for, in whole machines; of pools all."""
        if self.is_disaggregated:
            return 1.0
        single = replace(self.deployment.with_replicas(1), spare_replicas=0)
        return single.num_gpus_billed / self.deployment.num_gpus_billed

    @property
    def cost_key(self) -> tuple[bool, float]:
        """What candidates are compared by: their price, and of it what is paid."""
        unpriced, price = self.price_key
        return unpriced, self.billed_fraction * price

    @property
    def is_disaggregated(self) -> bool:
        """Prefill and decode have workers of their own; `deployment` is that of the decode pool."""
        return self.prediction.prefill is not None

    @property
    def display_key(self) -> tuple[object, ...]:
        """What makes candidates differ for a reader: engine, GPU and layout, however experts are spread in it."""
        layouts = [
            (pool.layout.tp, pool.layout.pp, pool.layout.dp) for pool in self.prediction.pools
        ]
        return self.deployment.engine.name, self.deployment.gpu, *layouts

    @property
    def placement_key(self) -> tuple[object, ...]:
        """What it is but for its engine's arguments."""
        deployment, formats = self.deployment, self.preference_key[:-1]
        machine = (
            deployment.gpu,
            deployment.gpus_per_node,
            deployment.machine_sizes,
            deployment.link_bandwidth,
        )
        return *machine, tuple(pool.layout for pool in self.prediction.pools), formats

    @property
    def family_key(self) -> tuple[object, ...]:
        """What it is but for its engine's arguments and the number of replicas."""
        deployment = self.deployment
        return (
            deployment.gpu, deployment.gpus_per_node, deployment.machine_sizes,
            deployment.link_bandwidth, self.preference_key[:-1],
            tuple(replace(pool.layout, replicas=1) for pool in self.prediction.pools),
        )  # fmt: skip

    @property
    def identity_key(self) -> tuple[object, ...]:
        """What tells it from other candidates of its search."""
        return *self.placement_key, self.deployment.args, self.deployment.num_draft_tokens

    @property
    def replica_shape(self) -> tuple[int, ...]:
        """(tp, pp, dp, ep) of one replica."""
        layout = self.deployment.layout
        return layout.tp, layout.pp, layout.dp, layout.ep

    @property
    def rank_key(self) -> tuple[object, ...]:
        """Sorts candidates from best to worst by the rule of `planning.search`."""
        return (
            not self.is_feasible,
            self.at_risk,
            self.rank_cost,
            self.is_disaggregated,
            self.raises_memory,
            -round(self.probability / PROBABILITY_TIE),
            sum(
                math.ceil(pool.num_gpus_billed / pool.gpus_per_node)
                for pool in self.prediction.pools
            ),
            self.preference_key,
            self.deployment.layout.pp,
            self.limit_utilization,
        )

    @property
    def nearness_key(self) -> tuple[object, ...]:
        """Sorts candidates at about one price: those that do by the rule, the others by how near they come."""
        if self.is_confident:
            return False, self.rank_key
        probability = -round(self.probability / PROBABILITY_TIE)
        return True, probability, self.capacity_utilization, self.limit_utilization, self.rank_key

    @property
    def rank_cost(self) -> tuple[bool, float]:
        """Its cost, and what pipeline stages inside a machine have to save beside it."""
        unpriced, cost = self.cost_key
        return unpriced, cost * get_stages_factor(self.prediction.pools)

    @property
    def has_inner_stages(self) -> bool:
        """It has pipeline stages inside a machine, where tensor parallelism is what people build."""
        return any(map(has_inner_stages, self.prediction.pools))

    @property
    def raises_memory(self) -> bool:
        """It takes a larger share of the GPU's memory than the engine does by itself."""
        deployment = self.deployment
        usual = get_default_memory_utilization(deployment)
        return deployment.args.gpu_memory_utilization > usual + 1e-6

    def __str__(self) -> str:
        price = (
            "no price known" if self.usd_per_hour is None else f"${self.usd_per_hour:,.2f} per hour"
        )
        price += (
            f", {self.billed_fraction:.0%} of it over the day" if self.billed_fraction < 1 else ""
        )
        risks = "; ".join(f"at risk: {risk}" for risk in self.risks)
        verdict = "; ".join(self.violations) or risks or "meets every target"
        return f"{self.description}: {price}; {verdict}"

    @property
    def description(self) -> str:
        """What it is in a few words, or both pools."""
        if self.prediction.prefill is None:
            return describe_deployment(self.deployment)
        first, rest = (f"{pool.layout.replicas} x {pool.with_replicas(1).layout}{_describe_spares(pool)}"
                       for pool in self.prediction.pools)  # fmt: skip
        where = (
            f"{sum(pool.num_gpus for pool in self.prediction.pools)} x {self.deployment.gpu.name}"
        )
        return f"{where}, prefill {first}, decode {rest}, {describe_formats(self.deployment)}"


def get_stages_factor(pools: Sequence[Deployment]) -> float:
    """Get how many times its price something counts: pipeline stages inside a machine have to save a third."""
    return MAX_PRICE_WITHOUT_STAGES if any(map(has_inner_stages, pools)) else 1.0


def sort_by_rule(holding: list[Candidate]) -> list[Candidate]:
    """Sort what meets the targets by the rule: price, then odds, where both tie the format listed first."""
    ordered = sorted(holding, key=lambda each: (each.rank_cost, each.rank_key))
    if not ordered:
        return []
    unpriced, cost = ordered[0].rank_cost

    def is_near(candidate: Candidate, share: float) -> bool:
        return candidate.rank_cost <= (unpriced, cost * (1 + share))

    equal = [each for each in ordered if is_near(each, SAME_PRICE_SHARE)]
    usual = [each for each in equal if not each.raises_memory] or equal
    likeliest = max(each.probability for each in usual)
    tied = [each for each in usual if each.probability >= likeliest - PROBABILITY_TIE]
    best = min(tied, key=lambda each: (each.preference_key, each.rank_key))
    near = [each for each in ordered if is_near(each, TIED_PRICE_SHARE)]
    odds = best.probability - PROBABILITY_TIE
    owned = [each for each in near if each.is_owned and each.probability >= odds]
    best = best if best.is_owned else next(iter(owned), best)
    likelier = [each for each in near if each.probability >= best.probability + CLEARLY_LIKELIER]
    best = max(likelier, key=lambda each: each.probability, default=best)
    return [best, *(each for each in ordered if each is not best)]


def has_inner_stages(deployment: Deployment) -> bool:
    """Tell whether a replica inside one machine has pipeline stages."""
    layout = deployment.layout
    return layout.pp > 1 and layout.gpus_per_replica <= deployment.gpus_per_node


def mark_as_tuned(preference: tuple[int, ...]) -> tuple[int, ...]:
    """The `preference` of the same with other engine arguments."""
    return *preference[:-1], 1


def describe_deployment(deployment: Deployment) -> str:
    """A deployment in a few words: GPUs, layout, formats, and the engine where it is another than vLLM."""
    where = f"{deployment.num_gpus} x {deployment.gpu.name}"
    return (
        f"{where}, {deployment.layout}{_describe_spares(deployment)},"
        f" {describe_formats(deployment)}"
    )


def describe_formats(deployment: Deployment) -> str:
    """What it computes in, drafts by and runs on, where that is not the usual."""
    stored = deployment.model.quantization.method
    parts = [deployment.model.dtype if stored == "none" else stored]
    parts += (
        [f"{deployment.args.kv_cache_dtype} KV"]
        if deployment.args.kv_cache_dtype not in (None, "auto")
        else []
    )
    parts += [deployment.speculation.method] if deployment.speculation else []
    parts += [] if deployment.engine.is_default else [deployment.engine.name]
    return ", ".join(parts)


def _describe_spares(deployment: Deployment) -> str:
    """Spare replicas, and rented GPUs that nothing runs on."""
    spares, idle = deployment.spare_replicas, deployment.num_gpus_billed - deployment.num_gpus
    beside = f" + {spares} spare{'s' if spares > 1 else ''}" if spares else ""
    return beside + (
        f" ({idle} of {deployment.num_gpus_billed} rented GPUs not needed)" if idle else ""
    )
