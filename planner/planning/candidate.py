"""One deployment under a scenario's traffic, held against its service level."""

from dataclasses import dataclass

from planner.engines.deployment import Deployment
from planner.planning.prediction import Prediction

MAX_UNDERUSED_FRACTION = 0.5
"""Below this share of the KV pool, and of the capacity that is planned, most of both is idle."""


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
        return found is not None and max(found.kv_usage, self.share) < MAX_UNDERUSED_FRACTION

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
            return describe_deployment(self.deployment)
        first, rest = (f"{pool.layout.replicas} x {pool.with_replicas(1).layout}{_describe_spares(pool)}"
                       for pool in self.prediction.pools)  # fmt: skip
        where = f"{sum(pool.gpus for pool in self.prediction.pools)} x {self.deployment.gpu.name}"
        return f"{where}, prefill {first}, decode {rest}, {describe_formats(self.deployment)}"


def mark_as_tuned(preference: tuple[int, ...]) -> tuple[int, ...]:
    """The `preference` of the same with other engine arguments."""
    return *preference[:-1], 1


def describe_deployment(deployment: Deployment) -> str:
    """A deployment in a few words: GPUs, layout, formats, and the engine where it is another than vLLM."""
    where = f"{deployment.gpus} x {deployment.gpu.name}"
    return f"{where}, {deployment.layout}{_describe_spares(deployment)}, {describe_formats(deployment)}"


def describe_formats(deployment: Deployment) -> str:
    """What it computes in, drafts by and runs on, where that is not the usual."""
    stored = deployment.model.quantization.method
    parts = [deployment.model.dtype if stored == "none" else stored]
    parts += [f"{deployment.args.kv_cache_dtype} KV"] if deployment.args.kv_cache_dtype not in (None, "auto") else []
    parts += [deployment.speculation.method] if deployment.speculation else []
    parts += [deployment.engine.name] if deployment.engine.name != "vllm" else []
    return ", ".join(parts)


def _describe_spares(deployment: Deployment) -> str:
    """Spare replicas, and rented GPUs that nothing runs on."""
    spares, idle = deployment.spare_replicas, deployment.gpus_rented - deployment.gpus
    beside = f" + {spares} spare{'s' if spares > 1 else ''}" if spares else ""
    return beside + (f" ({idle} of {deployment.gpus_rented} rented GPUs not needed)" if idle else "")
