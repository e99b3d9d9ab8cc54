"""What everybody is told of a plan: terminal, plan.json, cockpit, memo and chapters show it.

An `Answer` is a plan whose candidates are offers. It holds numbers, names and reasons, each worked out
when it is first asked for; words are the business of `words` and of the templates.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from planner.analysis.load_curves import (
    find_paying_loads,
    get_load,
    list_draft_loads,
    sweep_cost_over_load,
    sweep_stated_latency,
)
from planner.answers.limits import Limit, list_limits
from planner.answers.ways_out import WaysOut, find_ways_out
from planner.core.catalog import load_catalog
from planner.core.intervals import Interval
from planner.core.progress import try_each
from planner.core.readers import read_yaml
from planner.deploy import LaunchSpec, build_launches, list_artifact_files, predict_benchmark_ramp
from planner.deploy.artifacts import list_benchmark_files
from planner.engines.deployment import choose_machines
from planner.hardware.prices import HOURS_PER_MONTH, GpuPrice, look_up_gpu_price
from planner.latency.lora_adapters import (
    compute_adapter_costs,
    estimate_cold_adapter_s,
    limit_sequences_by_adapters,
)
from planner.latency.measured_residuals import find_nearest_run
from planner.latency.performance import LATENCY_METRICS, Performance
from planner.latency.startup_time import StartupTime, estimate_startup
from planner.latency.step_model import locate_operating_point
from planner.models.quantization import WeightFormatEntry, load_weight_formats
from planner.planning.autoscaling import AutoscalingPlan
from planner.planning.billing import (
    BILLING_AUTOSCALED,
    BILLING_FIXED,
    EQUAL_COST_SHARE,
    TokenSide,
    price_tokens,
)
from planner.planning.candidate import (
    CLEARLY_LIKELIER,
    SAME_PRICE_SHARE,
    Candidate,
    describe_formats,
)
from planner.planning.disaggregated import estimate_kv_transfer
from planner.planning.evaluation import (
    compute_free_capacity,
    compute_offered_rps,
    estimate_energy,
    estimate_run_hours,
    get_candidate_workload,
    get_capacity_rps,
)
from planner.planning.growth import EvenOdds, GrowthLimit, find_even_odds, find_growth_limit
from planner.planning.memory_odds import SURE_MEMORY_PROBABILITY
from planner.planning.plan import GAMBLE_PROBABILITY, Plan
from planner.planning.scenario import Scenario
from planner.planning.search import GpuChoice, choose_on_each_gpu
from planner.planning.slo import LimitStatus, SloTarget
from planner.planning.what_if import (
    WhatIf,
    find_measure_first,
    find_unlisted_format,
    find_unlisted_gpu,
)
from planner.workload.sessions import SessionTrace

Fields = dict[str, Any]
"""Figures by name, as templates and plan.json show them."""
PHRASES: Mapping[str, Any] = {
    **read_yaml(Path(__file__).with_name("phrases.yaml")),
    "metrics": {name: metric.label for name, metric in LATENCY_METRICS.items()},
}
"""Words for verdicts, metrics, formats, risks and what step costs rest on."""
MIN_CURVE_POINTS, MAX_RISKS = 4, 3
MAX_STEP_COST_WEIGHT = 2.9
"""A miss at the expected speed, which weighs 3, comes before any doubt about step costs."""


@dataclass(frozen=True)
class Bill:
    """What a deployment costs on one basis: USD of a month, or of a job."""

    basis: Literal["always on", "for the job", "scaled by the hour", "stopped without traffic"]
    usd: float
    usd_per_mtok: float | None = None  # of the tokens that are priced


@dataclass(frozen=True, eq=False)
class Offer(Candidate):
    """A candidate under the traffic of its scenario: what it costs and does, and how surely."""

    scenario: Scenario = field(kw_only=True, repr=False)
    usd_per_day: tuple[float | None, ...] = ()  # scaled by the hour, and stopped without traffic
    on_share: float = 1.0  # of the hours that something runs, if it stops in those without traffic

    @property
    def performance(self) -> Performance | None:
        """What it is predicted to do; None where it cannot start."""
        return self.prediction.performance

    @property
    def gpu(self) -> str:
        """The name of its GPUs."""
        return self.deployment.gpu.name

    @property
    def placement(self) -> str:
        """GPUs and layout: "4 x H100-SXM, TP2 x 2 replicas"."""
        return self.description.removesuffix(f", {describe_formats(self.deployment)}")

    @property
    def num_gpus(self) -> int:
        """The GPUs that something runs on, those of spare replicas included."""
        return sum(pool.num_gpus for pool in self.prediction.pools)

    @property
    def num_gpus_billed(self) -> int:
        """The GPUs that are paid for, idle ones of whole machines included."""
        return self.prediction.num_gpus_billed

    @property
    def num_replicas(self) -> int:
        """The replicas of all pools, with spares."""
        return sum(pool.num_replicas for pool in self.prediction.pools)

    @property
    def machine_sizes(self) -> list[int]:
        """The GPUs of each machine that is rented."""
        return [
            size
            for pool in self.prediction.pools
            for size in pool.machines
            or choose_machines(
                pool.num_replicas, pool.layout.gpus_per_replica, (pool.gpus_per_node,)
            )
        ]

    @property
    def spans_machines(self) -> bool:
        """Whether a replica takes more than one machine."""
        pools = self.prediction.pools
        return any(pool.layout.gpus_per_replica > pool.gpus_per_node for pool in pools)

    @property
    def price(self) -> GpuPrice | None:
        """The price of its GPUs; None where none is known."""
        return look_up_gpu_price(self.deployment.gpu, self.scenario.prices)

    @cached_property
    def token_price(self) -> tuple[Interval, TokenSide] | None:
        """USD per million tokens, and which tokens they are."""
        return price_tokens(self.scenario, self)

    @cached_property
    def run_hours(self) -> Interval | None:
        """The hours of a job."""
        return estimate_run_hours(self.scenario, self)

    @cached_property
    def bills(self) -> tuple[Bill, ...]:
        """What it costs on each basis, the headline first; empty where no price is known."""
        usd, tokens = self.usd_per_hour, self.token_price
        if usd is None:
            return ()
        per_mtok = tokens and tokens[0].mid
        if self.run_hours:
            return (Bill("for the job", usd * self.run_hours.mid, per_mtok),)
        idle = self.scenario.get_idle_share(self.deployment.gpu)  # of the price, when it is off
        shares = self.billed_fraction, self.on_share + idle * (1 - self.on_share)
        days = self.usd_per_day or [24 * usd * each if each < 1 else None for each in shares]
        names: tuple[Literal["scaled by the hour", "stopped without traffic"], ...] = (
            "scaled by the hour",
            "stopped without traffic",
        )
        others = (
            Bill(name, each * HOURS_PER_MONTH / 24, per_mtok and per_mtok * each / (24 * usd))
            for name, each in zip(names, days, strict=False)
            if each is not None
        )
        return (Bill("always on", usd * HOURS_PER_MONTH, per_mtok), *others)

    @property
    def bill(self) -> float | None:
        """USD of a month that it is always on, or of the whole job."""
        return self.bills[0].usd if self.bills else None

    @property
    def least_bill(self) -> Bill:
        """The least of its bills; infinite where no price is known."""
        unknown = Bill("always on", math.inf)
        return min(self.bills, key=lambda bill: bill.usd, default=unknown)

    @property
    def usd_per_user(self) -> float | None:
        """The headline bill of a month for each user, where the scenario says how many there are."""
        trace = self.scenario.workload.trace
        users = trace.sessions.users if isinstance(trace, SessionTrace) else None
        return self.bill / users if users and self.bill and not self.run_hours else None

    @property
    def replica_usd_per_day(self) -> float | None:
        """The price of one replica for a day, in whole machines; of pools all."""
        return None if self.usd_per_hour is None else self.usd_per_hour * 24 * self.replica_share

    @cached_property
    def limit_rows(self) -> tuple[Limit, ...]:
        """Each limit of the scenario, and what it takes of it."""
        return tuple(list_limits(self.scenario, self)) if self.performance else ()

    @property
    def tightest(self) -> Limit | None:
        """The latency that is missed by most, else that may come nearest to its limit."""
        rows = [row for row in self.limit_rows if row.target]
        return max(rows, key=lambda row: (max(row.use.mid, 1.0), row.pessimistic_use), default=None)

    @property
    def status(self) -> LimitStatus:
        """Whether it may be taken: surely enough, at a risk, or not."""
        if self.is_confident:
            return "met"
        return (
            "at risk" if self.is_feasible and self.probability >= GAMBLE_PROBABILITY else "missed"
        )

    @cached_property
    def capacity_rps(self) -> Interval | None:
        """What its GPUs process at most."""
        return get_capacity_rps(self.scenario, self.performance) if self.performance else None

    @cached_property
    def offered_rps(self) -> float:
        """What is admitted, or comes from a closed loop."""
        return compute_offered_rps(self.scenario, self.prediction)

    @cached_property
    def free_capacity(self) -> float | None:
        """The share of the capacity that is free; negative when overloaded."""
        return compute_free_capacity(self.scenario, self.prediction)

    @property
    def is_overloaded(self) -> bool:
        """Whether more requests arrive than it serves, so that waits have no value."""
        return self.run_hours is None and self.free_capacity is not None and self.free_capacity < 0

    @property
    def energy(self) -> list[tuple[str, Interval]]:
        """Power and energy: unit and value."""
        return list(estimate_energy(self.scenario, self))

    @property
    def startup(self) -> StartupTime | None:
        """From the start of its process to the first answer."""
        return estimate_startup(self.deployment, self.scenario.storage)

    @property
    def kv_transfer(self) -> tuple[float, float] | None:
        """Bytes/s of a link between pools, and seconds of a mean prompt on it; None without pools."""
        if self.prediction.prefill is None:
            return None
        bandwidth, token_s = estimate_kv_transfer(self.prediction.prefill, self.deployment)
        return bandwidth, token_s * self.scenario.workload.prompt.mean

    @cached_property
    def nearest_run(self) -> Mapping[str, str] | None:
        """The measured run that shares most with it at its load."""
        if self.prediction.workload is None:
            return None
        load = self.prediction.effective_workload
        return find_nearest_run(locate_operating_point(self.deployment, load))

    @property
    def basis(self) -> str:
        """What its step costs rest on, a key of `basis` in phrases.yaml; of one that cannot start "prior"."""
        run, basis = self.nearest_run, self.performance.basis if self.performance else "prior"
        is_same_gpu = run is None or run["gpu"] == self.gpu
        if basis == "measured" and run and is_same_gpu:
            is_same_model = run["model"].casefold() == self.deployment.model.name.casefold()
            return "measured-model" if is_same_model else basis
        return "mixed-transfer" if basis == "model-transfer" and not is_same_gpu else basis

    @cached_property
    def launches(self) -> tuple[LaunchSpec, ...]:
        """The commands that start it; most offers are never asked for theirs."""
        return build_launches(self.prediction) if self.performance else ()

    @cached_property
    def adapter_slots(self) -> Fields | None:
        """The slots that a GPU has for LoRA adapters, and what one without a slot waits for."""
        deployment, load = self.deployment, self.scenario.workload
        if not load.adapters or not (count := deployment.args.max_loras):
            return None
        return {
            "count": count,
            "bytes_each": self.prediction.memory.adapters_bytes / count,
            "load_s": compute_adapter_costs(deployment).adapter_load_s,  # from host memory
            "cold_s": estimate_cold_adapter_s(deployment, self.scenario.storage),  # from a file
            "sequences": limit_sequences_by_adapters(deployment, load),
        }


@dataclass(frozen=True)
class UnlistedOption:
    """A better deployment in a format or on a GPU that the scenario does not allow."""

    offer: Offer
    is_format: bool
    quality: str  # that a format costs, as published; empty where nothing is on file
    source: str


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


@dataclass(frozen=True, eq=False)
class Answer(Plan):
    """A plan of offers, with everything that is told of it.

    Parts that take searches or simulations are worked out when they are first asked for: whoever
    shows them waits for them.
    """

    chosen: Offer | None
    runner_up: Offer | None
    gamble: Offer | None
    safe: Offer | None
    candidates: tuple[Offer, ...]
    changes: tuple[WhatIf, ...] | None = None  # None before they are searched for

    def with_changes(self, changes: Sequence[WhatIf], left_out: Sequence[str]) -> "Answer":
        """Return this answer, and what is worked out of it, with what-ifs and what time left out."""
        new = copy(self)
        vars(new).update(changes=tuple(changes), left_out=(*self.left_out, *left_out))
        return new

    @property
    def changed_offers(self) -> list[tuple[str, Offer | None]]:
        """What each what-if changes, and the plan then; None where none meets the targets."""
        found = [(each.change, each.plan) for each in self.changes or ()]
        return [(change, self.offer(plan.chosen, plan.scenario)) for change, plan in found]

    @overload
    def offer(self, candidate: Candidate, scenario: Scenario | None = None) -> Offer: ...

    @overload
    def offer(self, candidate: None, scenario: Scenario | None = None) -> None: ...

    def offer(self, candidate: Candidate | None, scenario: Scenario | None = None) -> Offer | None:
        """Return what is told of a candidate of this plan, or of another `scenario`."""
        if candidate is None or isinstance(candidate, Offer):
            return candidate
        on_share = self.chosen.on_share if self.chosen else 1.0
        return build_offer(scenario or self.scenario, candidate, on_share)

    @cached_property
    def by_gpu(self) -> tuple[GpuChoice, ...]:
        """The plan on each kind of GPU that the scenario allows, alone; none for an estimate."""
        return () if self.is_estimate else choose_on_each_gpu(self)

    @property
    def best(self) -> Offer | None:
        """The recommendation, else the closest; None where nothing fits."""
        return next(iter(self.candidates), None)

    @property
    def named_options(self) -> dict[str, Offer]:
        """The gamble, the recommendation and the safe option, those that there are, by name."""
        return {name: self.offer(each) for name, each in self.options.items()}

    @property
    def is_estimate(self) -> bool:
        """Whether it is analytical, and has no verdict."""
        return self.performance is not None and not self.performance.num_simulated_requests

    @property
    def safer(self) -> Offer | None:
        """The safe option, where it is clearly likelier than the recommended one."""
        least = self.chosen.probability + CLEARLY_LIKELIER if self.chosen else math.inf
        return self.safe if self.safe and self.safe.probability >= least else None

    @property
    def cheaper(self) -> Offer | None:
        """The cheapest with even odds, if it costs less than the recommendation."""
        option, chosen = self.gamble, self.chosen
        if option is None or chosen is None or option.price_key >= chosen.price_key:
            return None
        return None if is_same_price(option.bill, chosen.bill) else option

    @cached_property
    def even_odds(self) -> EvenOdds | None:
        """The largest load with even odds, where the largest load was the question."""
        return find_even_odds(self)

    @cached_property
    def growth(self) -> GrowthLimit | None:
        """How far the traffic may grow."""
        return find_growth_limit(self)

    @cached_property
    def measure_first(self) -> Offer | None:
        """A cheaper deployment that a benchmark of one replica may prove enough."""
        found = self.offer(find_measure_first(self))
        return found if found and found.bills and self.chosen and self.chosen.bills else None

    @property
    def saved_usd(self) -> float | None:
        """What that one would save a month."""
        bills = [each.bill if each else None for each in (self.chosen, self.measure_first)]
        return None if bills[0] is None or bills[1] is None else bills[0] - bills[1]

    @property
    def measure_files(self) -> tuple[str, ...]:
        """The files that benchmark it."""
        first = self.measure_first
        kinds = self.scenario.output_kinds
        return tuple(list_benchmark_files(first.prediction, kinds)) if first else ()

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the plan itself."""
        kinds = self.scenario.output_kinds
        return tuple(list_artifact_files(self.chosen.prediction, kinds)) if self.chosen else ()

    @property
    def scripts(self) -> list[str]:
        """The scripts that start and benchmark what is to be measured: a cheaper deployment, else the plan."""
        return [name for name in self.measure_files or self.files if name.endswith(".sh")]

    @cached_property
    def unlisted(self) -> tuple[UnlistedOption, ...]:
        """Better than the plan: a format with the quality that it costs, and a kind of GPU."""
        finders = {"formats": find_unlisted_format, "GPUs": find_unlisted_gpu}
        tried = try_each(lambda find: (find(self),), finders, "options outside the scenario")
        found = [one for _, pairs in tried for one in pairs or () if one]
        return tuple(self._describe_unlisted(self.offer(each, new)) for each, new in found)

    def _describe_unlisted(self, offer: Offer) -> UnlistedOption:
        cache, method = offer.deployment.args.kv_cache_dtype, offer.deployment.model.quantization
        is_format, entry = offer.deployment.gpu in {each.gpu for each in self.scenario.gpus}, None
        if cache not in (None, *self.scenario.kv_cache_dtypes):
            entry = load_catalog("kv_cache_formats.yaml", WeightFormatEntry).get(str(cache))
        elif is_format:
            entry = load_weight_formats().get(method.method.removesuffix("_block"))
        facts = (entry.quality, entry.source) if entry else ("", "")
        return UnlistedOption(offer, is_format, *facts)

    @property
    def other_options(self) -> dict[str, Offer]:
        """What may be taken instead of the plan by name: safer, cheaper, or outside of the scenario."""
        unlisted = {"Format" if each.is_format else "GPU": each.offer for each in self.unlisted}
        # what is to be measured first is the better of what is cheaper
        cheaper = None if self.measure_first else self.cheaper
        named = {"Safer": self.safer, "Cheaper": cheaper, **unlisted}
        return {name: each for name, each in named.items() if each and self.chosen}

    @property
    def cheaper_than_api(self) -> Offer | None:
        """The first that is as likely as asked and costs less than an API that the plan does not undercut."""
        api = self.api_comparison
        if api is None or self.is_estimate or not (api.is_api_cheaper or api.is_about_equal):
            return None
        most = (1 - EQUAL_COST_SHARE) * api.api_usd
        likely = (  # the plan itself: if it stops
            each
            for each in (self.chosen, *self.other_options.values())
            if each and each.is_confident
        )
        return next((each for each in likely if each.least_bill.usd < most), None)

    @cached_property
    def ways_out(self) -> WaysOut | None:
        """What would meet the targets where nothing does."""
        return find_ways_out(self)

    @cached_property
    def ramp(self) -> dict[float, Performance]:
        """What one replica does, by requests/s."""
        return dict(predict_benchmark_ramp(self.chosen.prediction)) if self.chosen else {}

    @cached_property
    def curve(self) -> LatencyCurve | None:
        """The latency of the tightest target over the load."""
        tightest = self.best and self.best.tightest
        return sweep_latency(self, tightest.target) if tightest and tightest.target else None

    @property
    def latency_spread(self) -> float:
        """How much longer a latency with a target may be than expected: 0.5 for half as long again."""
        targets, found = self.scenario.slo_targets, self.performance
        values = [found.get_for_display(t.metric, t.percentile) for t in targets if found]
        return max((v.hi / v.mid - 1 for v in values if 0 < v.mid < math.inf), default=0.0)

    @property
    def cache_hit_fraction(self) -> float:
        """The share of prompt tokens that are found in a prefix cache."""
        prediction = self.best and self.best.prediction
        return prediction.effective_workload.cache_hit_fraction if prediction else 0.0

    @property
    def risks(self) -> list[str]:
        """The three largest risks, keys of `risks` in phrases.yaml; a miss at the expected speed weighs 3."""
        best, load = self.best, self.scenario.workload
        if best is None or best.performance is None:
            return []
        risked = (1 - best.p_memory) / max(1 - best.probability, 1e-9)
        doubt, usd = PHRASES["basis"][best.basis]["doubt"], best.prediction.usd_per_hour_interval
        is_assumed = any(each.spread_source for each in (load.prompt, load.output))
        weights = {
            "edge": 3 * bool(self.reasons and self.chosen),
            "miss": 3 * bool(self.reasons and not self.chosen),
            "refused": 1.9 * bool(best.prediction.rejected_fraction),
            "memory": 3 * min(risked, 1.0) * (best.p_memory < SURE_MEMORY_PROBABILITY),
            "step costs": min(doubt + self.latency_spread / 2, MAX_STEP_COST_WEIGHT),
            "acceptance": 1.8 * bool(best.deployment.speculation),
            "reuse": 2 * self.cache_hit_fraction,
            "lengths": 1.5 * is_assumed,
            "traffic": 0.6 * (load.trace is None and not is_assumed),
            "price": math.log(usd.hi / usd.mid) if usd and usd.hi > 1.05 * usd.mid else 0.0,
            "license": 1.0 * best.deployment.gpu.is_geforce,
            "replica": 1.9 * any(pool.num_replicas == 1 for pool in best.prediction.pools),
        }
        largest = sorted(weights, key=lambda kind: -weights[kind])[:MAX_RISKS]
        return [kind for kind in largest if weights[kind]]

    @cached_property
    def draft_loads(self) -> Fields | None:
        """Up to which load the scenario's drafts pay, analytically; None where it names none."""
        entry, best = self.scenario.speculation, self.best
        if not entry or not best or not best.performance or best.is_disaggregated:
            return None
        drafts = best.deployment.speculation or entry.to_config()
        load = get_candidate_workload(self.scenario, best.deployment)
        rows = list_draft_loads(replace(best.deployment, speculation=drafts), load)
        first, last = next(iter(find_paying_loads(rows)), (0, -1))
        if not rows:
            return None
        unit, own = get_load(load)
        here, without, tpot = min(rows, key=lambda row: abs(row[0] - own))
        return {
            "pays_from": rows[first][0] if first else None,
            "pays_up_to": rows[last][0] if last >= first else None,
            "unit": unit.lower(),
            "is_all": (first, last) == (0, len(rows) - 1),
            "load": here,
            "tpot_s": tpot,
            "tpot_without_s": without,
        }

    @property
    def on_defaults(self) -> Offer | None:
        """The plan's GPUs and layout with the engine's own batch sizes, if that was looked at."""
        own = self.chosen and self.chosen.placement_key
        plain = [each for each in self.candidates if not each.preference_key[-1]]
        return next((each for each in plain if each.placement_key == own), None)

    def work_out(self) -> "Answer":
        """Work out every part, for those who keep the answer."""
        for name, part in vars(Answer).items():
            if isinstance(part, cached_property):
                getattr(self, name)
        return self


def build_offer(scenario: Scenario, candidate: Candidate, on_share: float = 1.0) -> Offer:
    """Build what is told of a candidate of `scenario`."""
    values = {each.name: getattr(candidate, each.name) for each in fields(Candidate)}
    return Offer(**values, scenario=scenario, on_share=on_share)


def build_answer(plan: Plan) -> Answer:
    """Build the answer of `plan`: the same candidate is the same offer everywhere."""
    offers: dict[int, Offer | None] = {id(None): None}
    on_share = _compute_on_share(plan.autoscaling)

    def offer(candidate: Candidate | None) -> Offer | None:
        if candidate is not None and id(candidate) not in offers:
            offers[id(candidate)] = build_offer(plan.scenario, candidate, on_share)
        return offers[id(candidate)]

    values = {each.name: getattr(plan, each.name) for each in fields(Plan)}
    if plan.chosen and (billing := plan.billing) and BILLING_FIXED in billing.usd:
        by_day = billing.usd[BILLING_AUTOSCALED], billing.stopped_usd
        chosen = build_offer(plan.scenario, plan.chosen, on_share)
        offers[id(plan.chosen)] = replace(chosen, usd_per_day=by_day)
    values["simulated_day"] = plan.autoscaling
    for name in ("chosen", "runner_up", "gamble", "safe"):
        values[name] = offer(values[name])
    values["candidates"] = tuple(map(offer, plan.candidates))
    return Answer(**values)


def _compute_on_share(day: AutoscalingPlan | None) -> float:
    """Compute the share of the hours that have traffic, and of those in which replicas start and stop."""
    if day is None:
        return 1.0
    counts = np.where(np.array(day.rates) > 0, day.deployment.layout.replicas, 0)
    return min(day.compute_billed_gpu_hours(counts) / day.fixed_gpu_hours, 1.0)


def sweep_latency(plan: Plan, target: SloTarget) -> LatencyCurve | None:
    """Sweep the latency of a target over the load; None where no curve can be drawn."""
    best, performance = plan.best, plan.performance
    if best is None or performance is None or performance.saturated:
        return None
    own = performance.get(target.metric, target.percentile)
    points = sweep_stated_latency(plan.scenario, best, target)
    if len(points) < MIN_CURVE_POINTS or math.isnan(own.mid):
        return None
    axis, here = get_load(plan.scenario.workload)
    return LatencyCurve(target, axis, here, own, tuple(points))


def sweep_costs(plan: Plan) -> CostCurve | None:
    """Sweep the least cost over the load; None where too few loads have a plan."""
    chosen = plan.chosen
    unit, points = sweep_cost_over_load(plan) if plan.best else ("", [])
    if len(points) < MIN_CURVE_POINTS:
        return None
    axis, here = get_load(plan.scenario.workload)
    own = None
    if chosen:
        own = chosen.usd_per_hour if unit != "GPUs" else chosen.deployment.layout.num_gpus
    return CostCurve(unit, axis, here, own, tuple(points))


def is_same_price(usd: float | None, base: float | None) -> bool:
    """Whether two prices are known and the same to half a percent."""
    return bool(usd and base and abs(usd / base - 1) < SAME_PRICE_SHARE)
