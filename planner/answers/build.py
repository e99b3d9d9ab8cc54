"""Build the answer from a plan: the one place where what is shown is worked out."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from planner.analysis.load_curves import get_load, sweep_cost_over_load, sweep_stated_latency
from planner.answers.answer import (
    AdapterSlots,
    Answer,
    Basis,
    Bill,
    Binding,
    Change,
    CostCurve,
    KindOffer,
    LatencyCurve,
    Limit,
    MeasureFirst,
    NearestRun,
    Offer,
    Outside,
    Part,
    ReplicaLoss,
    Risk,
    UnlistedOption,
)
from planner.answers.ways_out import find_ways_out
from planner.answers.words import PHRASES
from planner.core.catalog import load_catalog
from planner.core.intervals import Interval
from planner.core.progress import try_each
from planner.deploy import (
    list_artifact_files,
    predict_benchmark_ramp,
)
from planner.deploy.artifacts import (
    explain_unsupported_artifacts,
    list_benchmark_files,
)
from planner.engines.deployment import choose_machines
from planner.engines.model_registries import judge_model_support
from planner.hardware.gpus import get_gpu
from planner.hardware.prices import HOURS_PER_MONTH, look_up_gpu_price
from planner.latency.lora_adapters import (
    compute_adapter_costs,
    estimate_cold_adapter_s,
    limit_sequences_by_adapters,
)
from planner.latency.measured_residuals import describe_run, find_nearest_run
from planner.latency.startup_time import estimate_startup
from planner.latency.step_model import locate_operating_point
from planner.memory.memory_plan import explain_memory_utilization, measure_model
from planner.models.quantization import WeightFormatEntry, load_weight_formats
from planner.models.registry import load_model
from planner.planning.autoscaling import find_cheaper_always_on
from planner.planning.billing import BILLING_AUTOSCALED, BILLING_FIXED, measure_budget, price_tokens
from planner.planning.candidate import Candidate, describe_formats
from planner.planning.disaggregated import estimate_kv_transfer
from planner.planning.disaggregated_search import evaluate_pools, explain_skipped_pools
from planner.planning.evaluation import (
    compute_free_capacity,
    compute_offered_rps,
    estimate_energy,
    estimate_run_hours,
    get_capacity_rps,
    get_load_limit_name,
)
from planner.planning.growth import find_growth_limit, judge_surge
from planner.planning.max_load import is_least_load
from planner.planning.memory_odds import SURE_MEMORY_PROBABILITY
from planner.planning.prediction import Prediction
from planner.planning.scenario import Scenario
from planner.planning.search import Plan
from planner.planning.slo import (
    LimitOdds,
    compute_tolerance,
    get_range_at,
)
from planner.planning.tolerance import simulate_candidate
from planner.planning.what_if import (
    WhatIf,
    find_measure_first,
    find_unlisted_format,
    find_unlisted_gpu,
)

MAX_CANDIDATES = 12
"""Candidates that an answer tells."""
MIN_CURVE_POINTS = 4
MAX_STEP_COST_WEIGHT = 2.9
"""A miss at the expected speed, which weighs 3, comes before any doubt about step costs."""


def build_answer(
    plan: Plan, parts: Collection[Part] = (), *, changes: Sequence[WhatIf] | None = None,
    left_out: str = "", known: Answer | None = None,
) -> Answer:  # fmt: skip
    """Build the answer of `plan` with `parts` that take longer; those of `known` are taken over.

    `changes` are its what-ifs, and `left_out` says what time did not allow.
    """
    return _Builder(plan, known).build(parts, changes, left_out)


def _find_nearest_run(prediction: Prediction) -> NearestRun | None:
    """Find the measured run that shares most with a deployment at its load."""
    if prediction.workload is None:
        return None
    point = locate_operating_point(prediction.deployment, prediction.effective_workload)
    if (run := find_nearest_run(point)) is None:
        return None
    tpot_ms, deployment = run["measured_tpot_ms"], prediction.deployment
    return NearestRun(
        describe_run(run),
        float(tpot_ms) / 1e3 if tpot_ms else None,
        run["model"].casefold() == deployment.model.name.casefold(),
        run["gpu"] == deployment.gpu.name,
    )


def build_offer(scenario: Scenario, candidate: Candidate, allowed: Scenario | None = None) -> Offer:
    """Build what is told of a candidate of `scenario`; GPUs count as those of `allowed`."""
    prediction, deployment = candidate.prediction, candidate.deployment
    performance, pools = prediction.performance, prediction.pools
    price = look_up_gpu_price(deployment.gpu, scenario.prices)
    tokens, hours = price_tokens(scenario, candidate), estimate_run_hours(scenario, candidate)
    usd, energy = candidate.usd_per_hour, estimate_energy(scenario, candidate)
    formats = describe_formats(deployment)
    return Offer(
        description=candidate.description,
        placement=candidate.description.removesuffix(f", {formats}"),
        prediction=prediction,
        num_gpus=sum(pool.num_gpus for pool in pools),
        num_replicas=sum(pool.num_replicas for pool in pools),
        machine_sizes=tuple(_list_machine_sizes(candidate)),
        outside=_find_outside(allowed or scenario, candidate),
        is_owned=deployment.gpu in map(get_gpu, scenario.fields.get("owned") or ()),
        probability=candidate.probability,
        confidence=candidate.confidence,
        p_memory=candidate.p_memory,
        meets=candidate.is_feasible,
        is_simulated=candidate.is_simulated,
        limits=tuple(_list_limits(scenario, candidate)) if performance else (),
        bills=() if usd is None else (_build_headline_bill(usd, hours, tokens and tokens[0].mid),),
        price_key=candidate.price_key,
        rank=candidate.rank_key,
        billed_fraction=candidate.billed_fraction,
        replica_share=candidate.replica_share,
        price=price,
        usd_per_mtok=tokens and tokens[0],
        priced_side=tokens and tokens[1],
        run_hours=hours,
        capacity_rps=get_capacity_rps(scenario, performance) if performance else None,
        offered_rps=compute_offered_rps(scenario, prediction),
        free_capacity=compute_free_capacity(scenario, prediction),
        energy=tuple(energy),
        startup=estimate_startup(deployment, scenario.storage),
        kv_transfer=_estimate_transfer(scenario, candidate),
        cache_hit_fraction=prediction.effective_workload.cache_hit_fraction if performance else 0.0,
        nearest_run=_find_nearest_run(prediction),
        utilization_reason=explain_memory_utilization(deployment),
    )


def _measure_adapters(scenario: Scenario, best: Offer) -> AdapterSlots | None:
    """Measure the slots of LoRA adapters; None without any."""
    deployment = best.deployment
    if not scenario.workload.adapters or not deployment.args.max_loras:
        return None
    return AdapterSlots(
        deployment.args.max_loras,
        best.memory.adapters_bytes / deployment.args.max_loras,
        compute_adapter_costs(deployment).adapter_load_s,
        estimate_cold_adapter_s(deployment, scenario.storage),
        limit_sequences_by_adapters(deployment, scenario.workload),
    )


def _explain_local_model(best: Offer | None) -> Iterator[str]:
    """Explain where the weights of a model must lie that is a path on this machine."""
    if best and best.deployment.model.local_name:
        yield (
            f"the model is a path here ({best.deployment.model.name}): where it is served, the"
            " launch command must name the folder that holds its weights beside config.json"
        )


def _estimate_transfer(scenario: Scenario, candidate: Candidate) -> tuple[float, float] | None:
    """Estimate a link's bytes/s and a mean prompt's seconds on it; None without pools."""
    prefill = candidate.prediction.prefill
    if prefill is None:
        return None
    bandwidth, token_s = estimate_kv_transfer(prefill, candidate.deployment)
    return bandwidth, token_s * scenario.workload.prompt.mean


def _build_headline_bill(usd: float, hours: Interval | None, per_mtok: float | None) -> Bill:
    if hours:
        return Bill("for the job", usd * hours.mid, per_mtok)
    return Bill("always on", usd * HOURS_PER_MONTH, per_mtok)


def _find_outside(scenario: Scenario, candidate: Candidate) -> Outside:
    """Find what of a candidate the scenario does not allow: its GPU, or how many."""
    most = {each.gpu: each.max_gpus for each in scenario.gpus}
    if candidate.deployment.gpu not in most:
        return "gpu"
    num_gpus = sum(pool.num_gpus for pool in candidate.prediction.pools)
    return "count" if num_gpus > most[candidate.deployment.gpu] else ""


def _list_machine_sizes(candidate: Candidate) -> list[int]:
    """List the GPUs of each machine that is rented."""
    return [
        size
        for pool in candidate.prediction.pools
        for size in pool.machines
        or choose_machines(pool.num_replicas, pool.layout.gpus_per_replica, (pool.gpus_per_node,))
    ]


def _list_limits(scenario: Scenario, candidate: Candidate) -> Iterator[Limit]:
    """List the limits of a candidate: latencies, then the load, then others."""
    prediction, z = candidate.prediction, compute_tolerance(scenario.confidence)
    assert prediction.performance is not None
    for target in scenario.slo_targets:
        if not (odds := candidate.get_limit(target.name)):
            continue  # answers of one token have no time per token
        value = prediction.performance.get_for_display(target.metric, target.percentile)
        use = _end_at_pessimistic(value / target.seconds, odds, z)
        yield Limit(
            "latency", target.name, "s", value.mid, target.seconds, odds.pessimistic_use * target.seconds,
            use, odds.pessimistic_use, odds.status, target,
        )  # fmt: skip
    if load := _build_load_limit(scenario, candidate, z):
        yield load
    refused, allowed = prediction.rejected_fraction, scenario.refused_at_most
    if refused > allowed:
        share = refused / max(allowed, 1e-6)
        use = Interval.from_value(share)
        yield Limit("rejected", "rejected", "", refused, allowed, refused, use, share, "missed")


def _end_at_pessimistic(use: Interval, odds: LimitOdds, z: float) -> Interval:
    """Get the range of a limit up to the asked probability, and as far below."""
    return replace(get_range_at(use, z), hi=max(odds.pessimistic_use, use.mid))


def _build_load_limit(scenario: Scenario, candidate: Candidate, z: float) -> Limit | None:
    """Build the limit of requests/s, of a job's hours, or of the slots that users need."""
    performance, load = candidate.prediction.performance, scenario.workload
    capacity = performance and get_capacity_rps(scenario, performance)
    odds = candidate.get_limit(get_load_limit_name(scenario))
    if not capacity or odds is None or is_least_load(scenario):
        return None
    if load.rate is None:
        users = load.concurrency or 0
        slots, use = round(users / odds.use), Interval.from_value(odds.use)
        return Limit(
            "users", "concurrency", "requests", users, slots, users, use, odds.use, odds.status
        )
    admitted = compute_offered_rps(scenario, candidate.prediction)
    usable = capacity * (1 - scenario.headroom)
    share = usable.map_monotone(lambda rate: admitted / max(rate, 1e-9))
    use = _end_at_pessimistic(share, odds, z)
    if hours := estimate_run_hours(scenario, candidate):
        limit_h = hours.mid / share.mid
        return Limit(
            "job", "job time", "h", hours.mid, limit_h, limit_h * odds.pessimistic_use, use,
            odds.pessimistic_use, odds.status, load=share,
        )  # fmt: skip
    offered = load.rate
    if (offered > usable.mid) != (share.mid > 1):
        offered = admitted  # the rest is rejected
    return Limit(
        "load", "load", "requests/s", offered, usable.mid, usable.mid * share.mid / odds.pessimistic_use,
        use, odds.pessimistic_use, odds.status, load=share,
    )  # fmt: skip


def sweep_latency(plan: Plan, limit: Limit) -> LatencyCurve | None:
    """Sweep the latency of a target over the load; None where no curve can be drawn."""
    best, target, performance = plan.best, limit.target, plan.performance
    if best is None or performance is None or target is None or performance.saturated:
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


class _Builder:
    """Builds one answer; a candidate that appears twice is one offer."""

    def __init__(self, plan: Plan, known: Answer | None) -> None:
        self.plan, self.scenario, self.known = plan, plan.scenario, known
        # the candidate is kept with its offer: its id is no other's then
        self._offers: dict[int, tuple[Candidate, Offer]] = {}
        if known:
            self._take_over(known)

    def _take_over(self, known: Answer) -> None:
        """Take over the offers of an earlier answer to the same plan."""
        plan = self.plan
        pairs = [*zip(plan.candidates, known.candidates, strict=False)]
        pairs += zip(plan.options.values(), known.options.values(), strict=True)
        for candidate, offer in ((plan.runner_up, known.runner_up), (plan.chosen, known.chosen)):
            if candidate and offer:
                pairs.append((candidate, offer))
        self._offers |= {id(candidate): (candidate, offer) for candidate, offer in pairs}

    def offer(self, candidate: Candidate | None, scenario: Scenario | None = None) -> Offer | None:
        """Return what is told of a candidate, the same object for the same candidate."""
        if candidate is None:
            return None
        if id(candidate) not in self._offers:
            offer = build_offer(scenario or self.scenario, candidate, self.scenario)
            if candidate is self.plan.chosen:
                offer = replace(offer, bills=(*offer.bills, *self._bill_day()))
            elif any(candidate is each for each in self._billed_by_day):
                (bill,), share = offer.bills, candidate.billed_fraction
                per_mtok = bill.usd_per_mtok and bill.usd_per_mtok * share
                offer = replace(
                    offer, bills=(bill, Bill("scaled by the hour", bill.usd * share, per_mtok))
                )
            self._offers[id(candidate)] = candidate, offer
        return self._offers[id(candidate)][1]

    @property
    def _billed_by_day(self) -> list[Candidate]:
        """The candidates whose day is billed, where the choice rests on it."""
        chosen, plan = self.plan.chosen, self.plan
        if chosen is None or chosen.billed_fraction == 1:
            return []
        return [
            each for each in (plan.gamble, plan.safe, plan.runner_up) if each and each.usd_per_hour
        ]

    def build(
        self, parts: Collection[Part], changes: Sequence[WhatIf] | None, left_out: str
    ) -> Answer:
        """Build the answer, or add to the known one."""
        answer = self.known or self._build_base()
        for part in parts:
            if getattr(answer, part) is None:
                produced: dict[str, Any] = {part: self._producers[part](answer)}
                answer = replace(answer, **produced)
        produced = {}
        if changes is not None:
            produced["changes"] = tuple(map(self._build_change, changes))
        if left_out:
            produced["left_out"] = (*answer.left_out, left_out)
        return replace(answer, **produced)

    def _build_base(self) -> Answer:
        """Build all that takes no time."""
        plan, scenario, offer = self.plan, self.scenario, self.offer
        chosen, near = plan.chosen, plan.binding_constraint
        best = offer(chosen or plan.best)
        unified = plan.without_disaggregation.chosen if plan.is_disaggregated else None
        return Answer(
            scenario=scenario,
            verdict=plan.verdict,
            probability=plan.probability,
            best=best,
            options={name: self._get(each) for name, each in plan.options.items()},
            always_on=offer(find_cheaper_always_on(chosen, plan.candidates)),
            budget=measure_budget(scenario, chosen) if chosen else None,
            by_gpu=tuple(
                KindOffer(each.gpu.name, offer(each.candidate), each.reason) for each in plan.by_gpu
            ),
            runner_up=offer(plan.runner_up),
            by_engine=tuple(map(self._get, self._list_best_by_engine())),
            without_pools=offer(unified),
            best_pools=offer(plan.best_disaggregated),
            skipped_pools=explain_skipped_pools(scenario),
            candidates=tuple(self._get(each) for each in plan.candidates[:MAX_CANDIDATES]),
            reasons=plan.reasons,
            binding=Binding(near.constraint, near.sentence, offer(near.candidate)),
            rejected=plan.rejected,
            effort={
                "estimated": len(plan.candidates),
                "simulated": sum(each.is_simulated for each in plan.candidates),
                "feasible": sum(each.is_feasible for each in plan.candidates),
            },
            day=plan.autoscaling,
            billing=plan.billing,
            api=plan.api_comparison,
            notes=(*plan.notes, *_explain_local_model(best)),
            left_out=plan.left_out,
            risks=tuple(self._list_risks(best)) if best else (),
            files=tuple(list_artifact_files(chosen.prediction, scenario.output_kinds))
            if chosen
            else (),
            not_written=tuple(explain_unsupported_artifacts(plan)) if chosen else (),
            support=judge_model_support(best.deployment.model, best.deployment.engine).sentence
            if best
            else "",
            model_memory=measure_model(load_model(scenario.model), best.deployment)
            if best
            else None,
            adapter_slots=_measure_adapters(scenario, best) if best else None,
        )

    def _get(self, candidate: Candidate) -> Offer:
        found = self.offer(candidate)
        assert found is not None
        return found

    def _list_best_by_engine(self) -> list[Candidate]:
        best = dict[str, Candidate]()
        for candidate in sorted(self.plan.candidates, key=lambda each: not each.is_simulated):
            best.setdefault(candidate.deployment.engine.name, candidate)
        return list(best.values())

    def _bill_day(self) -> Iterator[Bill]:
        """List what the plan costs with replicas by the hour of a day."""
        plan, chosen = self.plan, self.plan.chosen
        billing = plan.billing
        if billing is None or chosen is None or BILLING_AUTOSCALED not in billing.usd:
            return
        tokens = price_tokens(self.scenario, chosen)
        days, fixed = HOURS_PER_MONTH / 24, billing.usd[BILLING_FIXED]
        by_hour: dict[Basis, float] = {"scaled by the hour": billing.usd[BILLING_AUTOSCALED]}
        if billing.stopped_usd is not None:
            by_hour["stopped without traffic"] = billing.stopped_usd
        for basis, usd in by_hour.items():
            yield Bill(basis, usd * days, tokens[0].mid * usd / fixed if tokens else None)

    def _build_change(self, what_if: WhatIf) -> Change:
        found, named = what_if.plan.chosen, {each.gpu for each in self.scenario.gpus}
        is_other = found is not None and found.deployment.gpu not in named
        return Change(what_if.change, self.offer(found, what_if.plan.scenario), is_other)

    @property
    def _producers(self) -> dict[Part, Callable[[Answer], object]]:
        return {
            "surge": lambda _: judge_surge(self.plan),
            "unlisted": lambda _: tuple(self._find_unlisted()),
            "growth": lambda _: find_growth_limit(self.plan),
            "measure_first": self._build_measure_first,
            "ways_out": lambda answer: find_ways_out(self.plan, answer, self.offer),
            "curve": lambda answer: (
                answer.best
                and answer.best.tightest
                and sweep_latency(self.plan, answer.best.tightest)
            ),
            "cost_curve": lambda _: sweep_costs(self.plan),
            "replica_loss": lambda _: _simulate_replica_loss(self.plan),
            "ramp": lambda _: (
                predict_benchmark_ramp(self.plan.chosen.prediction) if self.plan.chosen else {}
            ),
        }

    def _find_unlisted(self) -> Iterator[UnlistedOption]:
        """Find a better format, with the quality that it is known to cost, and a better kind of GPU."""
        finders = {"formats": find_unlisted_format, "GPUs": find_unlisted_gpu}
        tried = try_each(lambda find: (find(self.plan),), finders, "options outside the scenario")
        for candidate, scenario in (one for _, found in tried for one in found or () if one):
            offer = build_offer(scenario, candidate, self.scenario)
            model, cache = candidate.deployment.model, candidate.deployment.args.kv_cache_dtype
            entry = None
            if cache not in (None, *self.scenario.kv_cache_dtypes):
                entry = load_catalog("kv_cache_formats.yaml", WeightFormatEntry).get(str(cache))
            elif offer.outside != "gpu":
                entry = load_weight_formats().get(model.quantization.method.removesuffix("_block"))
            yield UnlistedOption(
                offer, entry.quality if entry else "", entry.source if entry else ""
            )

    def _build_measure_first(self, answer: Answer) -> MeasureFirst | None:
        offer, chosen = self.offer(find_measure_first(self.plan)), answer.chosen
        if offer is None or chosen is None or offer.bill is None or chosen.bill is None:
            return None
        files = list_benchmark_files(offer.prediction, self.scenario.output_kinds)
        return MeasureFirst(offer, chosen.bill - offer.bill, files)

    def _list_risks(self, best: Offer) -> list[Risk]:
        """List the three largest risks of the plan."""
        return sorted(_generate_risks(self.plan, best), key=lambda risk: -risk.weight)[:3]


def _generate_risks(plan: Plan, best: Offer) -> Iterator[Risk]:
    scenario, performance = plan.scenario, best.performance
    if performance is None:
        return
    if plan.reasons:
        yield Risk("edge" if plan.chosen else "miss", 3, {"reasons": plan.reasons})
    if share := best.prediction.rejected_fraction:
        yield Risk("refused", 1.9, {"share": share})
    if best.p_memory < SURE_MEMORY_PROBABILITY:
        risked = (1 - best.p_memory) / max(1 - best.probability, 1e-9)
        yield Risk("memory", 3 * min(risked, 1.0), {"suffices": best.p_memory})
    values = [performance.get_for_display(t.metric, t.percentile) for t in scenario.slo_targets]
    width = max((v.hi / v.mid - 1 for v in values if 0 < v.mid < math.inf), default=0.0)
    yield Risk(
        "step costs", min(PHRASES["basis"][best.basis]["doubt"] + width / 2, MAX_STEP_COST_WEIGHT),
        {"basis": best.basis, "width": width, "served_rps": performance.request_tps},
    )  # fmt: skip
    if speculation := best.deployment.speculation:
        yield Risk("acceptance", 1.8, {"rate": speculation.acceptance_rate})
    if best.cache_hit_fraction:
        hits = best.cache_hit_fraction
        yield Risk("reuse", 2 * hits, {"hits": hits})
    workload = scenario.workload
    lengths = {"prompt": workload.prompt, "answer": workload.output}
    assumed = [(name, each.p95) for name, each in lengths.items() if each.spread_source]
    if assumed:
        yield Risk("lengths", 1.5, {"side": assumed[0][0], "p95": assumed[0][1]})
    elif workload.trace is None:
        median = max(workload.compute_total_tokens_quantile(0.5), 1.0)
        spread = workload.compute_total_tokens_quantile(0.99) / median
        yield Risk("traffic", 0.6, {"spread": spread})
    usd = best.usd_per_hour
    if usd and usd.hi > 1.05 * usd.mid:
        yield Risk("price", math.log(usd.hi / usd.mid), {"usd_per_hour": usd})
    if best.deployment.gpu.is_geforce:
        yield Risk("license", 1.0, {})
    if any(pool.num_replicas == 1 for pool in best.pools):
        yield Risk("replica", 1.9, {})


def _simulate_replica_loss(plan: Plan) -> ReplicaLoss | None:
    """Simulate the traffic without one replica, or the pool's worker that hurts more."""
    best = plan.best
    if best is None:
        return None
    replicas, spares = best.deployment.layout.replicas, best.deployment.spare_replicas
    if spares:
        return ReplicaLoss("spares", "replica", replicas, spares, True, (), False)
    without_headroom = replace(plan.scenario, headroom=0.0)
    if best.is_disaggregated:
        return _simulate_worker_loss(without_headroom, best)
    if replicas == 1:
        return ReplicaLoss("single", "replica", 1, 0, False, (), False)
    remaining = replace(best, deployment=best.deployment.with_replicas(replicas - 1))
    return _describe_loss("replica", replicas, simulate_candidate(without_headroom, remaining))


def _describe_loss(role: str, replicas: int, left: Candidate) -> ReplicaLoss:
    texts = left.risks if left.is_feasible else left.violations
    return ReplicaLoss("fewer", role, replicas, 0, left.is_feasible, texts, left.is_simulated)


def _simulate_worker_loss(scenario: Scenario, best: Candidate) -> ReplicaLoss | None:
    pools, worst = best.prediction.pools, None
    roles = ("prefill worker", "decode worker")
    single = [role for role, pool in zip(roles, pools, strict=True) if pool.layout.replicas == 1]
    if single:
        return ReplicaLoss("single", " and one ".join(single), 1, 0, False, (), False)
    for k, role in enumerate(roles):
        left = [pool.with_replicas(pool.layout.replicas - (j == k)) for j, pool in enumerate(pools)]
        found = evaluate_pools(scenario, left[0], left[1], scenario.workload, best.preference_key)
        if found and (worst is None or found.limit_utilization > worst[0].limit_utilization):
            worst = found, role, pools[k].layout.replicas
    return worst and _describe_loss(worst[1], worst[2], worst[0])
