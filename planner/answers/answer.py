"""What everybody is told of a plan: terminal, plan.json, cockpit, memo and chapters show it.

`answer.build` fills it from a plan. It holds numbers, names and reasons; words are the business of
`wording` and of whoever shows it. Parts that take longer are None until they are asked for, and
who shows an answer leaves them out then.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from planner.core.intervals import Interval
from planner.deploy import LaunchSpec, build_launches
from planner.engines.deployment import Deployment
from planner.hardware.prices import GpuPrice
from planner.latency.performance import Performance
from planner.latency.startup_time import StartupTime
from planner.memory.memory_plan import MemoryPlan, ModelMemory
from planner.planning.autoscaling import AutoscalingPlan
from planner.planning.billing import (
    EQUAL_COST_SHARE,
    ApiComparison,
    BillingComparison,
    TokenSide,
)
from planner.planning.candidate import SAME_PRICE_SHARE, has_inner_stages
from planner.planning.growth import GrowthLimit, Surge
from planner.planning.prediction import Prediction
from planner.planning.scenario import Scenario
from planner.planning.search_space import RejectedOption
from planner.planning.slo import LimitStatus, SloTarget

Part = Literal[
    "surge",
    "unlisted",
    "growth",
    "measure_first",
    "ways_out",
    "curve",
    "cost_curve",
    "replica_loss",
    "ramp",
]
"""A part of an answer that takes longer than the rest."""
SUMMARY_PARTS: tuple[Part, ...] = ("surge", "unlisted", "measure_first", "ways_out")
"""What the first lines say."""
MEMO_PARTS: tuple[Part, ...] = ("curve", "ramp", "replica_loss")
"""What a report says beside."""
FILE_PARTS: tuple[Part, ...] = (*SUMMARY_PARTS, "growth")
"""What plan.json and the details say."""
Outside = Literal["", "gpu", "count"]
Verdict = Literal["holds", "at_risk", "nothing_meets"]
Basis = Literal["always on", "for the job", "scaled by the hour", "stopped without traffic"]
"""What a bill counts: every hour of a month, the hours of a job, or the replicas by hour."""


@dataclass(frozen=True)
class Limit:
    """One limit of the scenario, and what a deployment takes of it."""

    kind: Literal["latency", "load", "job", "users", "rejected"]
    name: str  # "p95 TTFT", "load"
    unit: str  # "s", "requests/s", "h", "requests", "W", or "" for a share
    value: float  # expected
    limit: float
    pessimistic: float  # at the asked probability: the value, or of a load what may be used then
    use: Interval  # the expected share, up to that at the asked probability, and as far below
    pessimistic_use: float
    status: LimitStatus
    target: SloTarget | None = None
    load: Interval | None = None  # share of the usable capacity, with its 80% interval

    @property
    def is_load(self) -> bool:
        """Whether it is that of requests/s, or of the hours of a job."""
        return self.kind in ("load", "job")


@dataclass(frozen=True)
class Bill:
    """What a deployment costs on one basis: USD of a month, or of a job."""

    basis: Basis
    usd: float
    usd_per_mtok: float | None = None  # of the tokens that are priced


@dataclass(frozen=True)
class AdapterSlots:
    """The slots that a GPU has for LoRA adapters, and what an adapter without one waits for."""

    count: int  # max_loras
    bytes_each: float  # on the fullest GPU
    load_s: float  # from host memory into a slot
    cold_s: float  # from a file into a slot
    sequences: int  # requests that fill the slots, on average


@dataclass(frozen=True)
class NearestRun:
    """A measured run: what it was, its TPOT, and what it shares with a deployment."""

    text: str
    tpot_s: float | None
    has_same_model: bool
    has_same_gpu: bool


@dataclass(frozen=True)
class Offer:
    """A deployment under the scenario's traffic: what it is, costs and does, and how surely."""

    description: str  # "4 x H100-SXM, TP2 x 2 replicas, fp8"
    placement: str  # "4 x H100-SXM, TP2 x 2 replicas"
    prediction: Prediction
    num_gpus: int
    num_replicas: int  # with spares, of all pools
    machine_sizes: tuple[int, ...]  # GPUs of each machine that is rented
    outside: Outside  # what of it the scenario does not allow
    is_owned: bool
    probability: float  # that it starts and meets every target
    confidence: float  # the probability that is asked for
    p_memory: float
    meets: bool  # every target at the expected speed
    is_simulated: bool
    limits: tuple[Limit, ...]
    bills: tuple[Bill, ...]  # the first is the headline; empty where no price is known
    price_key: tuple[bool, float]  # USD per hour, or GPUs where no price is known
    rank: tuple[object, ...]  # sorts from best to worst
    billed_fraction: float
    replica_share: float  # of its price, for which one replica is rented
    price: GpuPrice | None
    usd_per_mtok: Interval | None
    priced_side: TokenSide | None
    run_hours: Interval | None  # of a job
    capacity_rps: Interval | None
    offered_rps: float  # what is admitted, or comes from a closed loop
    free_capacity: float | None  # negative when overloaded
    energy: tuple[tuple[str, Interval], ...]  # unit and value
    startup: StartupTime | None
    kv_transfer: tuple[float, float] | None  # bytes/s of a link, and seconds for a mean prompt
    cache_hit_fraction: float
    nearest_run: NearestRun | None  # that the step costs lean on most
    utilization_reason: str  # for a gpu_memory_utilization that is not the engine's default

    @property
    def deployment(self) -> Deployment:
        """What runs; of pools the decode workers."""
        return self.prediction.deployment

    @property
    def pools(self) -> tuple[Deployment, ...]:
        """What runs: prefill and decode workers, where they are apart."""
        return self.prediction.pools

    @property
    def performance(self) -> Performance | None:
        """What it is predicted to do; None where it cannot start."""
        return self.prediction.performance

    @property
    def memory(self) -> MemoryPlan:
        """What a GPU holds."""
        return self.prediction.memory

    @property
    def basis(self) -> str:
        """What its step costs rest on, a key of `basis` in phrases.yaml; of one that cannot start "prior"."""
        run, basis = self.nearest_run, self.performance.basis if self.performance else "prior"
        if run and basis == "measured" and run.has_same_model and run.has_same_gpu:
            return "measured-model"
        return (
            "mixed-transfer"
            if run and basis == "model-transfer" and not run.has_same_gpu
            else basis
        )

    @property
    def num_gpus_billed(self) -> int:
        """The GPUs that are paid for, idle ones of whole machines included."""
        return self.prediction.num_gpus_billed

    @cached_property
    def launches(self) -> tuple[LaunchSpec, ...]:
        """The commands that start it; most offers are never asked for theirs."""
        return build_launches(self.prediction) if self.performance else ()

    @property
    def usd_per_hour(self) -> Interval | None:
        """Its price by provider; None where none is known."""
        return self.prediction.usd_per_hour_interval

    @property
    def median_usd_per_hour(self) -> float | None:
        """Its price at the middle quotes; None where none is known."""
        return self.prediction.usd_per_hour

    @property
    def capacity_less_one_rps(self) -> float | None:
        """Its capacity while one of its replicas is down."""
        replicas = self.deployment.layout.replicas
        return self.capacity_rps.mid * (1 - 1 / replicas) if self.capacity_rps else None

    @property
    def num_nodes(self) -> int:
        """The machines of one replica."""
        return max(math.ceil(p.layout.gpus_per_replica / p.gpus_per_node) for p in self.pools)

    @property
    def num_idle_gpus(self) -> int:
        """GPUs of rented machines on which nothing runs."""
        return sum(self.machine_sizes) - self.num_gpus

    @property
    def gpu(self) -> str:
        """The name of its GPUs."""
        return self.deployment.gpu.name

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode have workers of their own."""
        return len(self.pools) > 1

    @property
    def has_inner_stages(self) -> bool:
        """Whether it has pipeline stages inside a machine, where people use tensor parallelism."""
        return any(map(has_inner_stages, self.pools))

    @property
    def is_confident(self) -> bool:
        """Whether it meets every target with the probability that is asked for."""
        return self.meets and self.probability >= self.confidence

    @property
    def status(self) -> LimitStatus:
        """Whether it may be taken: surely enough, at a risk, or not."""
        if self.is_confident:
            return "met"
        return "at risk" if self.meets and self.probability >= 0.5 else "missed"

    @property
    def bill(self) -> float | None:
        """USD of a month that it is always on, or of the whole job."""
        return self.bills[0].usd if self.bills else None

    @property
    def least_bill(self) -> float:
        """The least of its bills; infinite where no price is known."""
        return min((bill.usd for bill in self.bills), default=math.inf)

    @property
    def is_overloaded(self) -> bool:
        """Whether more requests arrive than it serves, so that waits have no value."""
        return self.run_hours is None and self.free_capacity is not None and self.free_capacity < 0

    @property
    def tightest(self) -> Limit | None:
        """The latency that is missed by most, else that may come nearest to its limit."""
        rows = [row for row in self.limits if row.target]
        return max(rows, key=lambda row: (max(row.use.mid, 1.0), row.pessimistic_use), default=None)

    @property
    def gpus_per_replica(self) -> int:
        """The GPUs of one replica; of pools all."""
        return self.num_gpus if self.is_disaggregated else self.deployment.layout.gpus_per_replica

    @property
    def replica_usd_per_day(self) -> float | None:
        """The price of one replica for a day, in whole machines; of pools all."""
        usd = self.median_usd_per_hour
        return None if usd is None else usd * 24 * self.replica_share

    def get_limit(self, name: str) -> Limit | None:
        """Get a limit by its name; None for one that cannot be missed."""
        return next((limit for limit in self.limits if limit.name == name), None)


@dataclass(frozen=True)
class UnlistedOption:
    """A better deployment in a format or on a GPU that the scenario does not allow."""

    offer: Offer
    quality: str  # that a format costs, as published; empty where nothing is on file
    source: str

    @property
    def is_format(self) -> bool:
        """Whether it differs in its format, not in its GPU."""
        return self.offer.outside != "gpu"


@dataclass(frozen=True)
class OtherOption:
    """What somebody may take instead of the plan, and why."""

    label: Literal["Safer", "Cheaper", "Format", "GPU"]
    offer: Offer
    unlisted: UnlistedOption | None = None


@dataclass(frozen=True)
class MeasureFirst:
    """A cheaper deployment that a benchmark of one replica may prove enough."""

    offer: Offer
    saved_usd: float  # a month
    files: tuple[str, ...]  # that run it


@dataclass(frozen=True)
class Change:
    """The answer after one change; without an offer nothing meets the targets."""

    change: str
    offer: Offer | None
    is_other_gpu: bool = False


@dataclass(frozen=True)
class Relaxation:
    """A limit that the closest deployment would meet, or a load that the allowed GPUs serve."""

    kind: Literal["limit", "rate", "concurrency", "hours"]
    name: str  # of the limit
    given: float  # s, requests/s, requests, or h
    expected: float | None  # what would do at the expected speed
    pessimistic: float  # with the asked probability


@dataclass(frozen=True)
class WaysOut:
    """What would meet the targets where nothing does."""

    change: Change | None  # the best deployment that a change allows
    relaxations: tuple[Relaxation, ...]


@dataclass(frozen=True)
class LatencyCurve:
    """A latency over the load, through what is predicted at the offered load."""

    target: SloTarget
    axis: str  # "Requests/s" or "Concurrent requests"
    here: float  # the offered load
    own: Interval  # s, at that load
    points: tuple[tuple[float, float, float, float], ...]  # load, and both ends and middle in s


@dataclass(frozen=True)
class CostCurve:
    """The least cost of other loads, and with how many GPUs of which kind."""

    unit: str  # "USD per hour" or "GPUs"
    axis: str
    here: float
    own: float | None  # what the plan costs
    points: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True)
class ReplicaLoss:
    """What is left of the plan while a replica, or a worker of a pool, is down."""

    kind: Literal["spares", "single", "fewer"]
    role: str  # "replica", "prefill worker", "decode worker"
    replicas: int
    spares: int
    meets: bool
    texts: tuple[str, ...]  # what is missed then, or at risk
    is_simulated: bool


@dataclass(frozen=True)
class Risk:
    """One of the largest risks, with its size and weight; a miss at the expected speed weighs 3."""

    kind: str  # of `risks` in phrases.yaml
    weight: float
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class Binding:
    """What keeps anything cheaper from doing."""

    constraint: str
    sentence: str
    offer: Offer | None  # the nearest that is cheaper


@dataclass(frozen=True)
class KindOffer:
    """The cheapest plan that holds on one kind of GPU; else the nearest there, and why it does not."""

    gpu: str
    offer: Offer | None
    reason: str  # empty where it holds


@dataclass(frozen=True)
class Answer:
    """Everything that anybody is told of a plan."""

    scenario: Scenario  # the question as understood, with the figure that was open
    verdict: Verdict
    probability: float
    best: Offer | None  # the recommendation, else the closest; None where nothing fits
    options: Mapping[str, Offer]  # "gamble", "recommended" and "safe", those that there are
    runner_up: Offer | None
    by_engine: tuple[Offer, ...]  # the best of each engine
    without_pools: Offer | None  # the recommendation without pools, where pools were allowed
    best_pools: Offer | None
    skipped_pools: str  # why pools were not evaluated
    candidates: tuple[Offer, ...]  # the first dozen, from best to worst
    reasons: tuple[str, ...]
    binding: Binding
    rejected: tuple[RejectedOption, ...]
    effort: Mapping[str, int]  # deployments that were estimated, simulated and meet the targets
    day: AutoscalingPlan | None
    billing: BillingComparison | None
    api: ApiComparison | None
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    risks: tuple[Risk, ...]
    files: tuple[str, ...]
    not_written: tuple[str, ...]  # kinds of files that this plan cannot have, with the reason
    support: str  # that nobody knows whether the engine's release serves the model, else empty
    model_memory: ModelMemory | None = None  # of the best
    adapter_slots: AdapterSlots | None = None  # of the best; None without adapters
    always_on: Offer | None = None  # cheaper without scaling, where the choice rests on it
    budget: Mapping[str, float | bool] | None = None  # what the plan takes of it
    by_gpu: tuple[KindOffer, ...] = ()
    surge: Surge | None = None  # at more traffic than planned
    unlisted: tuple[UnlistedOption, ...] | None = None  # better than the plan: a format and a GPU
    growth: GrowthLimit | None = None
    measure_first: MeasureFirst | None = None
    ways_out: WaysOut | None = None
    curve: LatencyCurve | None = None  # of the tightest target
    cost_curve: CostCurve | None = None
    ramp: Mapping[float, Performance] | None = None  # of one replica by requests/s
    replica_loss: ReplicaLoss | None = None
    changes: tuple[Change, ...] | None = None

    @property
    def chosen(self) -> Offer | None:
        """The recommendation; None where nothing meets the targets."""
        return None if self.verdict == "nothing_meets" else self.best

    @property
    def performance(self) -> Performance | None:
        """What the recommendation, or the closest, is predicted to do."""
        return self.best.performance if self.best else None

    @property
    def scripts(self) -> tuple[str, ...]:
        """The scripts that start and benchmark what is to be measured: a cheaper deployment, else the plan."""
        names = (self.measure_first.files if self.measure_first else ()) or self.files
        return tuple(name for name in names if name.endswith(".sh"))

    @property
    def is_estimate(self) -> bool:
        """Whether it is analytical, and has no verdict."""
        return self.performance is not None and not self.performance.num_simulated_requests

    @property
    def safer(self) -> Offer | None:
        """The safe option, where it is another deployment than the recommended one."""
        safe = self.options.get("safe")
        return None if self.chosen is None or safe is self.chosen else safe

    @cached_property
    def cheaper(self) -> Offer | None:
        """The cheapest with even odds, if it costs less than the recommendation."""
        option, chosen = self.options.get("gamble"), self.chosen
        if option is None or chosen is None or option.price_key >= chosen.price_key:
            return None
        return None if is_same_price(option.bill, chosen.bill) else option

    @cached_property
    def other_options(self) -> tuple[OtherOption, ...]:
        """What may be taken instead of the plan: safer, cheaper, or outside of the scenario."""
        named = [OtherOption("Safer", self.safer)] if self.safer else []
        # what is to be measured first is the better of what is cheaper
        named += (
            [OtherOption("Cheaper", self.cheaper)]
            if self.cheaper and not self.measure_first
            else []
        )
        return (
            *named,
            *(
                OtherOption("Format" if each.is_format else "GPU", each.offer, each)
                for each in (self.unlisted or ())
                if self.chosen
            ),
        )

    @cached_property
    def cheaper_than_api(self) -> Offer | None:
        """The cheapest option that is as likely as asked and costs less than the API, which the plan does not."""
        api = self.api
        if api is None or not (api.is_api_cheaper or api.is_about_equal):
            return None
        likely = [
            each.offer
            for each in self.other_options
            if each.offer.bills and each.offer.probability >= each.offer.confidence
        ]
        best = min(likely, key=lambda offer: offer.least_bill, default=None)
        return best if best and best.least_bill < (1 - EQUAL_COST_SHARE) * api.api_usd else None

    @property
    def open_figure(self) -> tuple[str, float] | None:
        """The figure that was the question, where something meets it: its kind and value."""
        load, kind = self.scenario.workload, self.scenario.found_figure
        if kind is None or self.chosen is None:
            return None
        if kind == "limit":
            return kind, self.scenario.slo_targets[0].seconds
        return kind, float((load.rate if kind == "rate" else load.concurrency) or 0)


def is_same_price(usd: float | None, base: float | None) -> bool:
    """Whether two prices are known and the same to half a percent."""
    return bool(usd and base and abs(usd / base - 1) < SAME_PRICE_SHARE)
